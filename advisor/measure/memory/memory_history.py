"""History of the allocator in order: lifetime of each block, and bytes held at each event."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.intervals import Bools, Ints
from advisor.core.snapshot import MemorySnapshot
from advisor.measure.memory.memory_origin import ROLES, AllocationOrigin, find_origin

PHASES = ("", "forward", "backward", "optimizer")
"""Phases of a step, by what allocates; empty: before the first phase."""
MIN_EVENTS = 10
"""Events that a history needs to show how memory is used."""


@dataclass(frozen=True)
class BlockLifetimes:
    """Blocks of a device, one an entry: from the event that made it to the one that ended it.

    ``start_event`` is -1 for blocks from before the history; ``end_event`` is the number of events
    for blocks that are still there. Bytes are those that were asked for."""

    address: Ints
    size: Ints
    start_event: Ints
    end_event: Ints
    stack: Ints
    """Stack that allocated it; -1: not recorded."""
    release: Ints
    """Stack that freed it; -1: not recorded, or there still."""

    def __len__(self) -> int:
        return len(self.size)

    def at(self, event: int) -> Bools:
        """Return which blocks are held after an event (-1: before the first)."""
        held: Bools = (self.start_event <= event) & (self.end_event > event)
        return held


class MemoryHistory:
    """Allocator history of one device of a snapshot."""

    def __init__(self, snapshot: MemorySnapshot, device: int) -> None:
        self.snapshot = snapshot
        self.device = device
        self.events = snapshot.events.filter(pl.col("device") == device)
        self.blocks = snapshot.blocks.filter(pl.col("device") == device)
        self.segments = snapshot.segments.filter(pl.col("device") == device)
        self.unmatched = 0
        """Allocations without an end that are not in the state: their ends were not recorded."""

    @property
    def count(self) -> int:
        return self.events.height

    @cached_property
    def origins(self) -> list[AllocationOrigin]:
        """Origin of each stack of the snapshot; the last is that of no stack at all."""
        return [*(find_origin(stack) for stack in self.snapshot.stacks), find_origin(None)]

    @cached_property
    def event_stack(self) -> Ints:
        """Stack of each event; -1: none."""
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
        """Every block that was allocated or freed in the history, or is there at its end.

        A tensor lets go of its block at ``free_requested`` (at ``free_completed`` where the former
        is not in the history): from then on no line of the program holds it."""
        is_ = self.is_action
        ends = is_["free_requested"] if is_["free_requested"].any() else is_["free_completed"]
        rows = np.flatnonzero(is_["alloc"] | ends)
        address = self.events["address"].fill_null(-1).to_numpy()[rows]
        order = np.argsort(address, kind="stable")
        rows, address = rows[order], address[order]
        starts = is_["alloc"][rows]
        size = self.events["size"].fill_null(0).to_numpy()[rows]
        same = address[1:] == address[:-1]
        same_next = np.append(same, False)[: len(rows)]
        same_before = np.append(False, same)[: len(rows)]
        after = np.append(rows[1:], 0)[: len(rows)]
        before_starts = np.append(False, starts[:-1])[: len(rows)]
        ended = np.where(same_next, after, self.count)
        orphan = ~starts & ~(same_before & before_starts)
        state = self.blocks.filter(pl.col("state") == "allocated")
        here = state["address"].to_numpy()
        alive = starts & (ended == self.count)
        if self.segments.height:  # the state is recorded: what is not in it has ended somewhere
            gone = alive & ~np.isin(address, here)
            self.unmatched = int(gone.sum())
            ended = np.where(gone, rows, ended)
            alive &= ~gone
        older = ~np.isin(here, address[alive])
        stacks = self.event_stack[rows]
        ends_at = np.concatenate(
            [ended[starts], rows[orphan], np.full(int(older.sum()), self.count)]
        ).astype(np.int64)
        return BlockLifetimes(
            address=np.concatenate([address[starts], address[orphan], here[older]]),
            size=np.concatenate([size[starts], size[orphan], state["requested"].to_numpy()[older]]),
            start_event=np.concatenate(
                [rows[starts], np.full(int(orphan.sum()), -1), np.full(int(older.sum()), -1)]
            ).astype(np.int64),
            end_event=ends_at,
            release=np.append(self.event_stack, -1)[ends_at],
            stack=np.concatenate(
                [
                    stacks[starts],
                    np.full(int(orphan.sum()), -1),  # theirs says who freed it
                    state["stack"].fill_null(-1).cast(pl.Int64).to_numpy()[older],
                ]
            ),
        )

    @cached_property
    def allocated(self) -> Ints:
        """Bytes in tensors before the first event and after each: one entry more than events."""
        lives = self.block_lifetimes
        change = np.zeros(self.count + 1, dtype=np.int64)
        change[0] = int(lives.size[lives.start_event < 0].sum())
        born = lives.start_event >= 0
        np.add.at(change, lives.start_event[born] + 1, lives.size[born])
        ended = lives.end_event < self.count
        np.add.at(change, lives.end_event[ended] + 1, -lives.size[ended])
        return np.cumsum(change)

    @cached_property
    def reserved(self) -> Ints:
        """Bytes in segments, aligned with ``allocated``: counted back from those in the end."""
        is_ = self.is_action
        size = self.events["size"].fill_null(0).to_numpy()
        change = np.where(is_["segment_alloc"] | is_["segment_map"], size, 0)
        change = change - np.where(is_["segment_free"] | is_["segment_unmap"], size, 0)
        upto = np.concatenate([[0], np.cumsum(change)]).astype(np.int64)
        whole = int(self.segments["total"].sum() or 0)
        counted: Ints = upto + (whole - upto[-1])
        return counted

    @cached_property
    def role(self) -> NDArray[np.int16]:
        """Role of each event's stack: place in ``memory_origin.ROLES``."""
        codes = np.array([ROLES.index(each.role) for each in self.origins], dtype=np.int16)
        return codes[self.event_stack]

    def allocates(self, *roles: str) -> Bools:
        """Return which events are allocations for one of these roles."""
        mask: Bools = np.isin(self.role, [ROLES.index(role) for role in roles])
        return mask & self.is_action["alloc"]

    @cached_property
    def has_stacks(self) -> bool:
        """Whether any event has a stack; one without is then autograd's, without Python frames."""
        return any(self.snapshot.stacks)

    @cached_property
    def phase(self) -> NDArray[np.int8]:
        """Phase of each event: place in PHASES, by the last allocation that belongs to one."""
        own = np.full(self.count, -1, dtype=np.int8)
        own[self.allocates("forward")] = PHASES.index("forward")
        backward = self.allocates("backward", "gradient", "recomputed")
        if self.has_stacks:
            backward |= self.allocates("nothing")
        own[backward] = PHASES.index("backward")
        own[self.allocates("optimizer")] = PHASES.index("optimizer")
        known = np.maximum.accumulate(np.where(own >= 0, np.arange(self.count), -1))
        phase: NDArray[np.int8] = np.where(known < 0, 0, own[np.maximum(known, 0)])
        return phase

    @property
    def began_before(self) -> bool:
        """Whether some blocks are older than the history: it was switched on late, or has lost its
        start (``max_entries``)."""
        return bool((self.block_lifetimes.start_event < 0).any())

    @property
    def is_too_short(self) -> bool:
        """Whether there are too few events for a history, so that only the state is known."""
        return self.count < MIN_EVENTS and self.failed_event is None

    @cached_property
    def failed_event(self) -> int | None:
        """Last event that reports out of memory; ``None``: none."""
        result = np.flatnonzero(self.is_action["oom"])
        return int(result[-1]) if len(result) else None

    @cached_property
    def peak(self) -> int:
        """Event after which most bytes were in tensors; -1: before the first."""
        return int(np.argmax(self.allocated)) - 1

    @cached_property
    def steps(self) -> tuple[str, Ints]:
        """Source of the steps, and the event at which each begins; fewer than two: none recurs.

        By annotations ``ProfilerStep#``, where they were recorded; else by bursts of the
        optimizer's allocations, the step after which begins the next; else by the first gradient of
        each backward pass; else by the outermost module's first allocation; without stacks by the
        curve itself, which rises and falls in each step."""
        marks = self._annotated()
        if len(marks) >= 2:
            return "annotations", marks
        codes = np.array([each.backward_begins for each in self.origins])
        begins = np.flatnonzero(codes[self.event_stack] & self.is_action["alloc"])
        optimizer = self.allocates("optimizer")
        acts = np.flatnonzero(optimizer | self.allocates("forward", "own"))
        ends = np.flatnonzero(optimizer[acts][:-1] & ~optimizer[acts][1:])
        first = acts[ends + 1]
        # an optimizer that allocates in its first steps only marks none
        if len(first) >= 2 and (len(begins) < 3 or first[-1] >= begins[-3]):
            return "optimizer", first
        if len(begins) >= 2:
            return "backward passes", begins
        passes = self._forward_passes()
        if len(passes) >= 2:
            return "forward passes", passes
        teeth = np.empty(0, dtype=np.int64) if self.has_stacks else self._curve_minima()
        return ("rise and fall of memory", teeth) if len(teeth) >= 2 else ("", teeth[:0])

    def _forward_passes(self) -> Ints:
        """Find events at which the outermost module allocates for the first time in a pass: of the
        stacks with the fewest module calls, the first that recurs, where little is held."""
        rows = np.flatnonzero(self.allocates("forward"))
        depth = np.array([each.depth for each in self.origins])[self.event_stack[rows]]
        rows = rows[depth == depth.min()] if len(rows) else rows
        stacks, first, counts = np.unique(
            self.event_stack[rows], return_index=True, return_counts=True
        )
        fewest = counts[counts > 1].min(initial=self.count)
        chosen = stacks[counts == fewest]
        if not len(chosen):
            return np.empty(0, dtype=np.int64)
        chosen = chosen[np.argmin(first[counts == fewest])]
        marks: Ints = rows[self.event_stack[rows] == chosen]
        level = self.allocated[marks]
        low, high = int(self.allocated.min()), int(self.allocated.max())
        # what comes once, and late, ends the only pass: it is layers that recur
        once = rows[first[counts == 1]]
        is_pass = np.median(level) - low <= (high - low) / 2 and not (once > marks[1]).any()
        return marks if is_pass else np.empty(0, dtype=np.int64)

    def _curve_minima(self) -> Ints:
        """Find the lowest points between peaks of the curve, its steady growth aside."""
        curve = self.allocated.astype(np.float64)
        parts = np.array_split(curve, 8)
        if self.count < 16:
            return np.empty(0, dtype=np.int64)
        lowest = [float(part.min()) for part in parts]
        curve -= np.linspace(min(lowest[:4]), min(lowest[4:]), len(curve))
        low, high = curve.min(), curve.max()
        near = np.where(curve > low + 0.6 * (high - low), 1, 0)
        near[curve < low + 0.25 * (high - low)] = -1
        rows = np.flatnonzero(near)
        turns = np.flatnonzero(np.diff(near[rows]) < 0) + 1  # from a peak down
        ends = np.flatnonzero(np.diff(near[rows]) > 0) + 1
        marks = []
        for down in turns:  # one a step
            up = ends[ends > down]
            stop = rows[up[0]] if len(up) else len(curve)
            marks.append(rows[down] + int(np.argmin(curve[rows[down] : stop])))
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
        at = np.searchsorted(times.to_numpy(), np.sort(marks["time_us"].unique().to_numpy()))
        return np.unique(at[at < self.count]).astype(np.int64)
