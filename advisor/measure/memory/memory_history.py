"""History of the allocator in order: lifetime of each block, and allocated bytes at each event."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.intervals import Bools, Ints
from advisor.core.snapshot import MemorySnapshot
from advisor.measure.memory.memory_origin import ROLES, AllocationOrigin, find_origin

PHASES = ("", "forward", "backward", "optimizer")
"""Phases of a step, by the allocating code. Empty before the first phase."""
_MIN_EVENTS = 10
"""Minimum number of events of a history that shows how memory is used."""


@dataclass(frozen=True)
class BlockLifetimes:
    """Blocks of a device, one per entry, from the event that allocated the block to the one that
    freed it.

    ``start_event`` is -1 for blocks from before the history, and ``end_event`` is the number of
    events for blocks that are still allocated. Bytes are the requested bytes."""

    address: Ints
    size: Ints
    start_event: Ints
    end_event: Ints
    stack: Ints
    """Stack that allocated the block, or -1 if not recorded."""
    release: Ints
    """Stack that freed the block, or -1 if not recorded or still allocated."""

    def __len__(self) -> int:
        return len(self.size)

    def at(self, event: int) -> Bools:
        """Return which blocks are allocated after an event (-1 for before the first)."""
        is_allocated: Bools = (self.start_event <= event) & (self.end_event > event)
        return is_allocated


class MemoryHistory:
    """Allocator history of one device of a snapshot."""

    def __init__(self, snapshot: MemorySnapshot, device: int) -> None:
        self.snapshot = snapshot
        self.device = device
        self.events = snapshot.events.filter(pl.col("device") == device)
        self.blocks = snapshot.blocks.filter(pl.col("device") == device)
        self.segments = snapshot.segments.filter(pl.col("device") == device)
        self.unmatched = 0
        """Number of allocations missing from the final state: their ends were not recorded."""

    @property
    def count(self) -> int:
        return self.events.height

    @cached_property
    def origins(self) -> list[AllocationOrigin]:
        """Origin of each stack of the snapshot; the last entry is for blocks without a stack."""
        return [*(find_origin(stack) for stack in self.snapshot.stacks), find_origin(None)]

    @cached_property
    def event_stack(self) -> Ints:
        """Stack of each event, or -1."""
        return self.events["stack"].fill_null(-1).cast(pl.Int64).to_numpy()

    @cached_property
    def is_action(self) -> dict[str, Bools]:
        """Masks by action, aligned with ``events``."""
        actions = self.events["action"].cast(pl.String).to_numpy()
        names = ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free",
                 "segment_map", "segment_unmap", "oom")  # fmt: skip
        return {name: actions == name for name in names}

    @cached_property
    def block_lifetimes(self) -> BlockLifetimes:
        """Every block that was allocated or freed in the history, or is allocated at its end.

        A tensor releases its block at ``free_requested`` (or at ``free_completed`` if the former is
        not in the history). From then on no line of the program uses it."""
        masks = self.is_action
        is_end = (
            masks["free_requested"] if masks["free_requested"].any() else masks["free_completed"]
        )
        rows = np.flatnonzero(masks["alloc"] | is_end)
        address = self.events["address"].fill_null(-1).to_numpy()[rows]
        order = np.argsort(address, kind="stable")
        rows, address = rows[order], address[order]
        is_start = masks["alloc"][rows]
        size = self.events["size"].fill_null(0).to_numpy()[rows]
        same_address = address[1:] == address[:-1]
        same_next = np.append(same_address, False)[: len(rows)]
        same_before = np.append(False, same_address)[: len(rows)]
        next_rows = np.append(rows[1:], 0)[: len(rows)]
        previous_is_start = np.append(False, is_start[:-1])[: len(rows)]
        end_events = np.where(same_next, next_rows, self.count)
        is_orphan = ~is_start & ~(same_before & previous_is_start)
        state = self.blocks.filter(pl.col("state") == "allocated")
        allocated = state["address"].to_numpy()
        is_alive = is_start & (end_events == self.count)
        if self.segments.height:  # the state is recorded: blocks missing from it were freed
            is_gone = is_alive & ~np.isin(address, allocated)
            self.unmatched = int(is_gone.sum())
            end_events = np.where(is_gone, rows, end_events)
            is_alive &= ~is_gone
        is_older = ~np.isin(allocated, address[is_alive])
        stacks = self.event_stack[rows]
        ends_at = np.concatenate(
            [end_events[is_start], rows[is_orphan], np.full(int(is_older.sum()), self.count)]
        ).astype(np.int64)
        return BlockLifetimes(
            address=np.concatenate([address[is_start], address[is_orphan], allocated[is_older]]),
            size=np.concatenate(
                [size[is_start], size[is_orphan], state["requested"].to_numpy()[is_older]]
            ),
            start_event=np.concatenate(
                [
                    rows[is_start],
                    np.full(int(is_orphan.sum()), -1),
                    np.full(int(is_older.sum()), -1),
                ]
            ).astype(np.int64),
            end_event=ends_at,
            release=np.append(self.event_stack, -1)[ends_at],
            stack=np.concatenate(
                [
                    stacks[is_start],
                    np.full(
                        int(is_orphan.sum()), -1
                    ),  # their stack is the one that freed the block
                    state["stack"].fill_null(-1).cast(pl.Int64).to_numpy()[is_older],
                ]
            ),
        )

    @cached_property
    def allocated(self) -> Ints:
        """Bytes in tensors before the first and after each event: one entry more than events."""
        blocks = self.block_lifetimes
        change = np.zeros(self.count + 1, dtype=np.int64)
        change[0] = int(blocks.size[blocks.start_event < 0].sum())
        is_new = blocks.start_event >= 0
        np.add.at(change, blocks.start_event[is_new] + 1, blocks.size[is_new])
        is_freed = blocks.end_event < self.count
        np.add.at(change, blocks.end_event[is_freed] + 1, -blocks.size[is_freed])
        return np.cumsum(change)

    @cached_property
    def reserved(self) -> Ints:
        """Bytes in segments, aligned with ``allocated``, counted back from the final state."""
        masks = self.is_action
        size = self.events["size"].fill_null(0).to_numpy()
        change = np.where(masks["segment_alloc"] | masks["segment_map"], size, 0)
        change = change - np.where(masks["segment_free"] | masks["segment_unmap"], size, 0)
        cumulative = np.concatenate([[0], np.cumsum(change)]).astype(np.int64)
        total = int(self.segments["total"].sum() or 0)
        result: Ints = cumulative + (total - cumulative[-1])
        return result

    @cached_property
    def role(self) -> NDArray[np.int16]:
        """Role of each event's stack: index in ``memory_origin.ROLES``."""
        codes = np.array([ROLES.index(origin.role) for origin in self.origins], dtype=np.int16)
        return codes[self.event_stack]

    def allocates(self, *roles: str) -> Bools:
        """Return which events are allocations for one of these roles."""
        mask: Bools = np.isin(self.role, [ROLES.index(role) for role in roles])
        return mask & self.is_action["alloc"]

    @cached_property
    def has_stacks(self) -> bool:
        """Whether any event has a stack; events without one are then autograd's."""
        return any(self.snapshot.stacks)

    @cached_property
    def phase(self) -> NDArray[np.int8]:
        """Phase of each event: index in PHASES, by the last allocation that belongs to a phase."""
        phases = np.full(self.count, -1, dtype=np.int8)
        phases[self.allocates("forward")] = PHASES.index("forward")
        backward = self.allocates("backward", "gradient", "recomputed")
        if self.has_stacks:
            backward |= self.allocates("nothing")
        phases[backward] = PHASES.index("backward")
        phases[self.allocates("optimizer")] = PHASES.index("optimizer")
        last_known = np.maximum.accumulate(np.where(phases >= 0, np.arange(self.count), -1))
        phase: NDArray[np.int8] = np.where(last_known < 0, 0, phases[np.maximum(last_known, 0)])
        return phase

    @property
    def began_before(self) -> bool:
        """Whether some blocks are older than the history: it was enabled late, or has lost its
        start (``max_entries``)."""
        return bool((self.block_lifetimes.start_event < 0).any())

    @property
    def is_too_short(self) -> bool:
        """Whether there are too few events for a history, so that only the state is known."""
        return self.count < _MIN_EVENTS and self.failed_event is None

    @cached_property
    def failed_event(self) -> int | None:
        """Last event that reports out of memory, or ``None``."""
        result = np.flatnonzero(self.is_action["oom"])
        return int(result[-1]) if len(result) else None

    @cached_property
    def peak(self) -> int:
        """Event after which the most bytes were in tensors, or -1 before the first event."""
        return int(np.argmax(self.allocated)) - 1

    @cached_property
    def steps(self) -> tuple[str, Ints]:
        """Source of the steps, and the event at which each begins. Empty if no steps recur.

        Steps are found by annotations ``ProfilerStep#`` if they were recorded, else by bursts of
        the optimizer's allocations, each of which ends a step, else by the first gradient of each
        backward pass, else by the outermost module's first allocation, or without stacks by the
        curve itself, which rises and falls in each step."""
        marks = self._annotated()
        if len(marks) >= 2:
            return "annotations", marks
        codes = np.array([origin.backward_begins for origin in self.origins])
        backward_starts = np.flatnonzero(codes[self.event_stack] & self.is_action["alloc"])
        optimizer = self.allocates("optimizer")
        known_events = np.flatnonzero(optimizer | self.allocates("forward", "own"))
        ends = np.flatnonzero(optimizer[known_events][:-1] & ~optimizer[known_events][1:])
        first_events = known_events[ends + 1]
        # an optimizer that allocates only in its first steps marks no steps
        if len(first_events) >= 2 and (
            len(backward_starts) < 3 or first_events[-1] >= backward_starts[-3]
        ):
            return "optimizer", first_events
        if len(backward_starts) >= 2:
            return "backward passes", backward_starts
        passes = self._forward_passes()
        if len(passes) >= 2:
            return "forward passes", passes
        minima = np.empty(0, dtype=np.int64) if self.has_stacks else self._curve_minima()
        return ("rise and fall of memory", minima) if len(minima) >= 2 else ("", minima[:0])

    def _forward_passes(self) -> Ints:
        """Find events at which the outermost module allocates for the first time in a pass: the
        first recurring stack with the fewest module calls, while little is allocated."""
        rows = np.flatnonzero(self.allocates("forward"))
        depth = np.array([origin.depth for origin in self.origins])[self.event_stack[rows]]
        rows = rows[depth == depth.min()] if len(rows) else rows
        stacks, first_index, counts = np.unique(
            self.event_stack[rows], return_index=True, return_counts=True
        )
        fewest = counts[counts > 1].min(initial=self.count)
        recurring = stacks[counts == fewest]
        if not len(recurring):
            return np.empty(0, dtype=np.int64)
        recurring = recurring[np.argmin(first_index[counts == fewest])]
        marks: Ints = rows[self.event_stack[rows] == recurring]
        levels = self.allocated[marks]
        low, high = int(self.allocated.min()), int(self.allocated.max())
        # a late single allocation ends the only pass: then layers recur, not passes
        single = rows[first_index[counts == 1]]
        is_pass = np.median(levels) - low <= (high - low) / 2 and not (single > marks[1]).any()
        return marks if is_pass else np.empty(0, dtype=np.int64)

    def _curve_minima(self) -> Ints:
        """Find the lowest points between peaks of the curve, without its steady growth."""
        curve = self.allocated.astype(np.float64)
        parts = np.array_split(curve, 8)
        if self.count < 16:
            return np.empty(0, dtype=np.int64)
        lowest = [float(part.min()) for part in parts]
        curve -= np.linspace(min(lowest[:4]), min(lowest[4:]), len(curve))
        low, high = curve.min(), curve.max()
        level_class = np.where(curve > low + 0.6 * (high - low), 1, 0)
        level_class[curve < low + 0.25 * (high - low)] = -1
        rows = np.flatnonzero(level_class)
        falls = np.flatnonzero(np.diff(level_class[rows]) < 0) + 1  # from a peak down
        rises = np.flatnonzero(np.diff(level_class[rows]) > 0) + 1
        marks = []
        for fall in falls:  # one per step
            next_rise = rises[rises > fall]
            stop = rows[next_rise[0]] if len(next_rise) else len(curve)
            marks.append(rows[fall] + int(np.argmin(curve[rows[fall] : stop])))
        return np.array(marks, dtype=np.int64)

    def _annotated(self) -> Ints:
        marks = self.snapshot.annotations.filter(
            pl.col("name").str.starts_with("ProfilerStep#")
            & (pl.col("stage") == "START")
            & ((pl.col("device") == self.device) | pl.col("device").is_null())
        )
        times = self.events["time_us"]
        if marks.is_empty() or times.is_null().any():
            return np.empty(0, dtype=np.int64)
        events = np.searchsorted(times.to_numpy(), np.sort(marks["time_us"].unique().to_numpy()))
        return np.unique(events[events < self.count]).astype(np.int64)
