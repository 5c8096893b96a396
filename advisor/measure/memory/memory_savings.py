"""Estimates of the memory that changes to a program would free. A change names the blocks that it
affects, and the history is summed again without them. So a change frees only what it lowers the
peak by, even if the peak moves, and changes can be combined."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from advisor.core.intervals import Bools, Ints
from advisor.core.snapshot import SnapshotFrame, Stack
from advisor.core.text import format_bytes
from advisor.measure.host.stacks import CodeOwner
from advisor.measure.memory.allocator_replay import measure_repacking
from advisor.measure.memory.memory_history import PHASES
from advisor.measure.memory.memory_kinds import CATEGORIES
from advisor.measure.memory.memory_origin import (
    CALLS,
    MODULE,
    AllocationOrigin,
    snapshot_code_owner,
)
from advisor.measure.memory.peak_memory import PeakMemory, cached_measurement

MIN_SAVING_SHARE = 0.05
"""Minimum share of the peak for a reported saving."""
LOSS_CHUNKS = 8
"""Number of pieces of a loss over classes, at most as many as in fused losses."""
STATE_8_BIT = (1 + 4 / 256) / 4
"""Bytes of an 8-bit state over its bytes in fp32, with an fp32 scale per 256 elements
(bitsandbytes)."""
MIN_8_BIT_BYTES = 4096 * 4
"""Minimum bytes of an fp32 state that is changed to 8 bits (bitsandbytes, ``min_8bit_size``)."""


COST_ORDER = (
    "16-bit weights", "BF16 autocast", "8-bit optimizer", "16-bit optimizer state",
    "expandable segments", "autocast without cache", "half the batch", "checkpointing",
    "offload activations", "offload optimizer state",
)  # fmt: skip
"""Changes with a cost, the cheapest first: changed numerics before time. Changes that free only the
space between tensors are included. All other changes cost nothing."""
_LAST_WITHOUT_WORK = 5
"""Number of the first changes that add no work to a step, so that only their size decides."""


class MemoryChange(NamedTuple):
    """Blocks that a change shrinks or removes, always or for some events."""

    name: str
    rows: Ints
    """Rows of ``MemoryHistory.block_lifetimes``. A row may recur with other times."""
    kept_share: float | np.ndarray
    """Share of their bytes that stays, or an array with one share per row."""
    assumes: str
    start: Ints | None = None
    """Events from ``start`` to ``end`` in which the rest is freed, or ``None`` for always."""
    end: Ints | None = None
    where: AllocationOrigin | None = None
    """Line that the change affects, or ``None`` if it is not a single line."""
    group: str = ""
    """Group of changes that exclude each other, or empty."""
    forward_call: Ints | None = None
    """Call of a row in its forward pass, since checkpointing can cover only some calls.
    """
    request_share: float = 1.0
    """Share of the failed request that is still requested at once."""

    def for_calls(self, count: int) -> MemoryChange:
        """Limit the change to the first ``count`` calls of each pass."""
        if self.forward_call is None or self.start is None or self.end is None:
            return self
        is_chosen = self.forward_call < count
        return self._replace(
            rows=self.rows[is_chosen], start=self.start[is_chosen], end=self.end[is_chosen],
            forward_call=self.forward_call[is_chosen],
        )  # fmt: skip


class FreedMemory(NamedTuple):
    name: str
    """Name of a change of ``find_changes``, or ``expandable segments``."""
    bytes: int
    """Bytes by which the peak of the history falls, or for expandable segments the reserved memory
    at the peak."""
    assumes: str
    file: str | None = None
    """File of the line that the change affects, or ``None`` if it is not a single line."""
    line: int | None = None
    function: str | None = None


def count_needed_bytes(
    peak: PeakMemory, changes: Sequence[MemoryChange] = (), scale: float = 1.0
) -> int:
    """Count the maximum bytes in tensors after changes, including the failed request.

    ``scale`` is the scale of the batch, with which the blocks of ``batch_rows`` grow."""
    h, lives = peak.history, peak.history.block_lifetimes
    share = np.ones(len(lives))
    for change in changes:
        if change.start is None:
            share[change.rows] *= change.kept_share
    if scale != 1.0:
        share[batch_rows(peak)] *= scale
    curve = h.allocated.astype(np.float64)
    size = lives.size * (share - 1)
    _add_to_curve(
        curve, np.maximum(lives.start_event, -1) + 1, np.minimum(lives.end_event, h.count) + 1, size
    )
    for change in changes:
        if change.start is not None and change.end is not None:
            freed = -lives.size[change.rows] * share[change.rows] * (1 - change.kept_share)
            start = lives.start_event[change.rows]
            free_start = np.where(start < 0, change.start, np.maximum(change.start, start + 1))
            end = np.minimum(change.end, lives.end_event[change.rows])
            is_real = end > free_start
            _add_to_curve(curve, free_start[is_real] + 1, end[is_real] + 1, freed[is_real])
    if h.failed_event is not None and peak.request is not None:
        request_share = min([change.request_share for change in changes], default=1.0)
        curve[h.failed_event + 1] += peak.request * request_share
    return round(float(curve.max()))


def _add_to_curve(curve: np.ndarray, start: Ints, end: Ints, size: np.ndarray) -> None:
    count = len(curve)
    total = np.bincount(start, weights=size, minlength=count + 1)[: count + 1]
    total -= np.bincount(end, weights=size, minlength=count + 1)[: count + 1]
    curve += np.cumsum(total)[:count]


@cached_measurement
def find_savings(peak: PeakMemory) -> list[FreedMemory]:
    """List the changes that lower the peak, the cheapest in time first, then the largest. Savings
    overlap and must not be added up."""
    before = count_needed_bytes(peak)
    result = [
        _build_saving(peak, change, before - count_needed_bytes(peak, [change]))
        for change in find_changes(peak)
    ]
    min_bytes = MIN_SAVING_SHARE * max(before, 1)
    savings = [change for change in result if change.bytes >= min_bytes]
    repacked = measure_repacking(peak)
    if repacked is not None and (
        repacked.helps or repacked.freed >= MIN_SAVING_SHARE * peak.reserved
    ):
        savings.append(FreedMemory("expandable segments", repacked.freed, repacked.assumes))
    return sorted(savings, key=lambda change: (_rank_cost(change.name), -change.bytes))


def _rank_cost(change: str) -> int:
    """Return the position of a change among the costs, or 0 if it costs nothing."""
    position = COST_ORDER.index(change) + 1 if change in COST_ORDER else 0
    return max(position, _LAST_WITHOUT_WORK) if position else 0


MIN_PEAK_SHARE = 0.95
"""Minimum share of the bytes freed at the peak that the peak falls by, if it does not move."""


def _build_saving(peak: PeakMemory, change: MemoryChange, freed: int) -> FreedMemory:
    where = change.where
    location = (None, None, None) if where is None else (where.file, where.line, where.function)
    lives, assumes = peak.history.block_lifetimes, change.assumes
    is_held = lives.at(peak.event)[change.rows]
    if change.start is not None and change.end is not None:
        is_held &= (change.start <= peak.event) & (change.end > peak.event)
    at_peak = float((lives.size[change.rows] * (1 - change.kept_share))[is_held].sum())
    if freed < MIN_PEAK_SHARE * at_peak:
        moved = (
            f"this frees {format_bytes(at_peak)} at that moment, and another one becomes the peak"
        )
        assumes = f"{assumes}; {moved}"
    return FreedMemory(change.name, freed, assumes, *location)


@cached_measurement
def find_changes(peak: PeakMemory) -> list[MemoryChange]:
    """List the changes whose blocks are in the history."""
    if peak.snapshot.exception is not None:
        return []
    changes = [
        _find_fused_attention(peak), _find_smaller_logits(peak), _find_references(peak),
        _halve_batch(peak), *_find_autocast_changes(peak), _share_graph_pools(peak),
    ]  # fmt: skip
    if peak.trains is not False:
        changes += [
            _find_half_precision(peak),
            _find_checkpointing(peak),
            _find_offload(peak),
            _find_set_to_none(peak),
            *_find_optimizer_changes(peak),
        ]
    return [
        change
        for change in changes
        if change is not None and (len(change.rows) or change.request_share < 1)
    ]


def _is_in(peak: PeakMemory, *categories: str) -> Bools:
    mask: Bools = np.isin(peak.category_codes, [CATEGORIES.index(name) for name in categories])
    return mask


# -- activations ----------------------------------------------------------------------------------


def _find_checkpointing(peak: PeakMemory) -> MemoryChange | None:
    """Checkpoint the line that calls the same module repeatedly: each call keeps only its output,
    and is recomputed when its backward begins.

    The stack of a call's first block marks the calls. Calls that no backward pass of the history
    reaches stay freed to the end, except the largest, which is complete while it is recomputed."""
    lives = peak.history.block_lifetimes
    rows = np.flatnonzero(_is_in(peak, "activations", "autocast copies") & (lives.start_event >= 0))
    rows = rows[np.argsort(lives.start_event[rows], kind="stable")]
    stacks = lives.stack[rows]
    stacks_by_line: dict[tuple[str, int, str], list[int]] = {}
    for stack in np.unique(stacks).tolist():
        for line in set(_find_callers(peak, stack)):
            stacks_by_line.setdefault(line, []).append(stack)
    best: MemoryChange | None = None
    lowest = count_needed_bytes(peak)
    for line, stacks_of_line in stacks_by_line.items():
        change = _checkpoint_line(peak, rows[np.isin(stacks, stacks_of_line)], line)
        needed = lowest if change is None else count_needed_bytes(peak, [change])
        if needed < lowest:
            best, lowest = change, needed
    return best


def _checkpoint_line(
    peak: PeakMemory, rows: Ints, line: tuple[str, int, str]
) -> MemoryChange | None:
    h, lives = peak.history, peak.history.block_lifetimes
    stacks, born = lives.stack[rows], lives.start_event[rows]
    is_first_stack = stacks == stacks[0]
    starts = np.flatnonzero(is_first_stack & np.append(True, ~is_first_stack[:-1]))
    if len(starts) < 2:
        return None
    ends = np.append(starts[1:], len(rows))
    in_backward = np.append(h.phase == PHASES.index("backward"), True)
    phase_run = np.cumsum(np.append([0], np.diff(h.phase) != 0))  # index of the run of a phase
    held_calls: list[tuple[Ints, int, int, int]] = []  # rows, begin, end, number in the pass
    number, before = 0, -1
    for start, stop in zip(starts, ends, strict=True):  # one call per round
        call = rows[start:stop]
        number = number + 1 if phase_run[born[start]] == before else 0
        before = int(phase_run[born[start]])
        forward_end = int(born[stop - 1])
        is_waiting = (lives.end_event[call] > forward_end + 1) & in_backward[lives.end_event[call]]
        saved_blocks = call[is_waiting][:-1]  # the last block is its output
        if len(saved_blocks):
            held_calls.append(
                (saved_blocks, forward_end + 1, int(lives.end_event[saved_blocks].min()), number)
            )
    freed_calls: list[tuple[Ints, int, int, int]] = []
    unreached: list[tuple[Ints, int, int, int]] = []
    for index, (saved_blocks, forward_end, first, turn) in enumerate(held_calls):
        if first >= h.count:
            unreached.append((saved_blocks, forward_end, first, turn))
            continue
        # recomputed when the backward of the following call is over
        later = (
            lives.end_event[held_calls[index + 1][0]]
            if index + 1 < len(held_calls)
            else np.empty(0)
        )
        later = later[later < first]
        back = int(later.max()) if len(later) and held_calls[index + 1][3] > turn else first - 1
        freed_calls.append((saved_blocks, forward_end, back, turn))
    if unreached:
        largest = max(range(len(unreached)), key=lambda n: int(lives.size[unreached[n][0]].sum()))
        freed_calls += [call for n, call in enumerate(unreached) if n != largest]
    if not freed_calls:
        return None
    counts = [len(call[0]) for call in freed_calls]
    calls = max(call[3] for call in freed_calls) + 1
    return MemoryChange(
        "checkpointing",
        np.concatenate([call[0] for call in freed_calls]),
        0.0,
        f"each of the {max(calls, len(unreached))} calls there keeps only its output, and is "
        "complete while it is recomputed; the forward pass runs twice",
        np.repeat([call[1] for call in freed_calls], counts),
        np.repeat([call[2] for call in freed_calls], counts),
        AllocationOrigin("forward", *line),
        group="activations",
        forward_call=np.repeat([call[3] for call in freed_calls], counts),
    )


def _find_callers(peak: PeakMemory, stack: int) -> list[tuple[str, int, str]]:
    """List the user's lines around a stack that call a module and could be checkpointed."""
    frames = peak.snapshot.stacks[stack] if stack >= 0 else ()
    frames = tuple(f for f in frames if f.line > 0)
    is_call = [MODULE.search(f.file.replace("\\", "/")) and f.name in CALLS for f in frames]
    if not any(is_call):  # mixed stacks of C++ and Python may lack the frame of the call itself
        is_call = [f.name == "forward" for f in frames]
    return [
        (outer.file, outer.line, outer.name)
        for index, outer in enumerate(frames[1:], start=1)
        if is_call[index - 1]
        and outer.name not in CALLS
        and snapshot_code_owner(outer) >= CodeOwner.LIBRARY
        and any(is_call[index:])
    ]


def _find_fused_attention(peak: PeakMemory) -> MemoryChange | None:
    """Compute attention in one fused kernel, which stores no scores: the softmax inside a function
    or file of attention made blocks of their size. Under autocast, that function's next product
    keeps a 16-bit copy of them. No other block of the function has half their size, unless a head
    has as many channels as the sequence has tokens."""
    lives, stacks = peak.history.block_lifetimes, peak.snapshot.stacks
    attention_frames = np.array([*(_find_attention(stack) for stack in stacks), None], dtype=object)
    in_softmax = np.array([*(any(_SOFTMAX.search(f.name) for f in s) for s in stacks), False])
    in_attention = np.array([frame is not None for frame in attention_frames])
    rows = np.flatnonzero(in_attention[lives.stack] & _is_in(peak, "activations"))
    if not len(rows):
        return None
    scores = np.unique(lives.size[rows[in_softmax[lives.stack[rows]]]])
    if not len(scores):
        return None
    largest = int(scores.max())
    softmax_rows = rows[(lives.size[rows] == largest) & in_softmax[lives.stack[rows]]]
    first = attention_frames[lives.stack[softmax_rows[0]]]
    is_score = lives.size[rows] == largest
    if _is_in(peak, "autocast copies").any():
        same_function = [
            p is not None and (p.file, p.name) == (first.file, first.name) for p in attention_frames
        ]
        is_score |= (lives.size[rows] * 2 == largest) & np.array(same_function)[lives.stack[rows]]
    rows = rows[is_score]
    return MemoryChange(
        "fused attention",
        rows,
        0.0,
        "a fused kernel stores neither scores nor their softmax",
        where=AllocationOrigin("forward", first.file, first.line, first.name),
    )


_SOFTMAX = re.compile(r"(?<!log_)softmax", re.IGNORECASE)
_ATTENTION = re.compile(r"attention|attn|sdpa", re.IGNORECASE)


def _find_attention(stack: Stack) -> SnapshotFrame | None:
    """Return the innermost frame of the user's attention function or file."""
    for frame in stack:
        file = frame.file.replace("\\", "/").rsplit("/", 1)[-1]
        if snapshot_code_owner(frame) >= CodeOwner.LIBRARY and (
            _ATTENTION.search(frame.name) or _ATTENTION.search(file)
        ):
            return frame
    return None


def _find_offload(peak: PeakMemory) -> MemoryChange | None:
    """Move activations to host memory while they wait for the backward pass."""
    h, lives = peak.history, peak.history.block_lifetimes
    rows = np.flatnonzero(
        _is_in(peak, "activations") & (lives.start_event >= 0) & (lives.size >= 1 << 20)
    )
    phase = np.append(h.phase, PHASES.index("backward"))[lives.end_event[rows]]
    rows = rows[phase == PHASES.index("backward")]
    rows = rows[lives.end_event[rows] - lives.start_event[rows] > 2]
    # the next block is fetched while one is in use
    return MemoryChange(
        "offload activations",
        rows,
        0.0,
        "activations go to pinned host memory after use, and come back just before the backward "
        "pass needs them",
        lives.start_event[rows] + 2,
        lives.end_event[rows] - 2,
        group="activations",
    )


def batch_rows(peak: PeakMemory) -> Ints:
    """Find blocks whose size is in proportion to the batch: activations, inputs, and temporary
    gradients of activations, but never weights, states, copies of weights or caches."""
    lives = peak.history.block_lifetimes
    weights = np.unique(lives.size[_is_in(peak, "weights", "gradients")])
    is_flow = _is_in(peak, "backward temporaries") & ~np.isin(lives.size, weights)
    rows: Ints = np.flatnonzero(_is_in(peak, "activations", "inputs", "earlier steps") | is_flow)
    return rows


def _halve_batch(peak: PeakMemory) -> MemoryChange:
    return MemoryChange(
        "half the batch",
        batch_rows(peak),
        0.5,
        f"activations, inputs and {'' if peak.trains is False else 'backward '}temporaries are in "
        "proportion to the batch, which is halved",
    )


class Logits(NamedTuple):
    """Blocks of logits: made by a loss over classes, or of the same size around it."""

    rows: Ints
    """Rows of ``MemoryHistory.block_lifetimes``."""
    largest: int
    """Size of the loss's largest block, bytes."""
    blocks: int
    """Blocks held at the analysed moment."""
    bytes: int
    """Bytes in these blocks."""
    where: AllocationOrigin
    """Origin of the loss's first block: the line that called the loss."""


def find_logits(peak: PeakMemory) -> Logits | None:
    """Find the logits, or return ``None`` if no loss held large blocks at the analysed moment."""
    h, lives = peak.history, peak.history.block_lifetimes
    in_loss = np.array([origin.loss for origin in h.origins])[lives.stack]
    in_pass = _is_in(peak, "activations", "earlier steps", "backward temporaries")
    is_held = lives.at(peak.event)
    is_large = lives.size >= MIN_SAVING_SHARE * max(peak.allocated, 1) / 4
    loss_rows = np.flatnonzero(in_loss & is_large & is_held & in_pass)
    if not len(loss_rows):
        return None
    sizes = np.unique(lives.size[loss_rows])
    same_size = np.isin(lives.size, np.concatenate([sizes, sizes // 2]))  # the latter in 16 bits
    # logits are made once per loss: a line that makes more blocks makes something else
    counts = np.bincount(lives.stack[lives.start_event >= 0] + 1, minlength=len(h.origins) + 1)
    is_frequent = counts[lives.stack + 1] > counts[lives.stack[loss_rows] + 1].max()
    is_flow = _is_in(peak, "backward temporaries")
    other_sizes = np.unique(lives.size[same_size & is_frequent & ~in_loss & ~is_flow & in_pass])
    same_size &= np.where(is_flow, ~np.isin(lives.size, other_sizes), ~is_frequent)
    rows = np.flatnonzero(in_pass & is_large & (in_loss | same_size))
    held_rows = rows[is_held[rows]]
    where = h.origins[int(lives.stack[loss_rows[0]])]
    total = int(lives.size[held_rows].sum())
    return Logits(rows, int(lives.size[loss_rows].max()), len(held_rows), total, where)


def _find_smaller_logits(peak: PeakMemory) -> MemoryChange | None:
    result = find_logits(peak)
    is_requested = _requests_logits(peak)
    if result is None and not is_requested:
        return None
    pieces = f"made in {LOSS_CHUNKS} pieces, one at a time"
    return MemoryChange(
        "smaller logits",
        np.empty(0, np.int64) if result is None else result.rows,
        1 / LOSS_CHUNKS,
        f"the request that failed is for logits, which are {pieces}"
        if result is None
        else f"the loss's {result.blocks} tensors about as large as the logits are {pieces}",
        where=peak.failed_at if result is None else result.where,
        request_share=1 / LOSS_CHUNKS if is_requested else 1.0,
    )


def _requests_logits(peak: PeakMemory) -> bool:
    """Return whether the failed request is for logits: at the same stack, earlier steps made blocks
    of the same size as a loss."""
    h, lives = peak.history, peak.history.block_lifetimes
    if h.failed_event is None or peak.request is None:
        return False
    in_loss = np.array([origin.loss for origin in h.origins])[lives.stack]
    same_stack = lives.stack == h.event_stack[h.failed_event]
    return bool(np.isin(lives.size[same_stack], lives.size[in_loss]).any())


def _find_autocast_changes(peak: PeakMemory) -> list[MemoryChange]:
    """Drop the copies of weights that only autocast's cache holds; copies that a backward pass
    needs stay. Without training, the weights themselves can have that type."""
    h, lives = peak.history, peak.history.block_lifetimes
    rows = np.flatnonzero(_is_in(peak, "autocast copies"))
    is_released = (
        np.array([origin.released for origin in h.origins])[lives.release[rows]] == "autocast"
    )
    cached = rows[is_released | ((lives.end_event[rows] == h.count) & (peak.trains is False))]
    changes = [
        MemoryChange(
            "autocast without cache",
            cached,
            0.0,
            "each copy is made again where it is used, and only one exists at a time",
            lives.start_event[cached] + 2,
            lives.end_event[cached],
            group="autocast",
        )
    ]
    weights = np.flatnonzero(_is_in(peak, "weights"))
    if len(weights) and (peak.trains is False or (len(rows) and not peak.trains)):
        changes.append(
            MemoryChange(
                "16-bit weights",
                np.concatenate([rows, weights]),
                np.repeat([0.0, 0.5], [len(rows), len(weights)]),
                "weights are in fp32, and 16 bits suffice; autocast then makes no copies",
                group="autocast",
            )
        )
    return changes


def _find_half_precision(peak: PeakMemory) -> MemoryChange | None:
    """Train under autocast: results of matrix products are half as large, and so are results of
    operators that keep the type. A 16-bit copy of each weight exists from the forward pass to the
    end of the backward pass. After PyTorch's own softmax, the next product keeps a copy too."""
    h, lives = peak.history, peak.history.block_lifetimes
    if any(origin.cast for origin in h.origins):
        return None
    is_made = _is_in(peak, "activations", "earlier steps") & (lives.start_event >= 0)
    forward = np.flatnonzero(is_made)[np.argsort(lives.start_event[is_made], kind="stable")]
    shares = np.ones(len(forward))
    latest_share: dict[int, float] = {}  # by size, as a proxy for the shape
    # sequential: the input of a block is known from earlier blocks
    for index, row in enumerate(forward.tolist()):
        output, size = h.origins[int(lives.stack[row])].output, int(lives.size[row])
        is_half = output == "product" or (output == "same type" and latest_share.get(size) == 0.5)
        latest_share[size] = shares[index] = 1.5 if output == "softmax" else 0.5 if is_half else 1.0
    rows, shares = forward[shares != 1], shares[shares != 1]
    weights = np.flatnonzero(_is_in(peak, "weights"))
    is_running = np.isin(h.phase, [PHASES.index("forward"), PHASES.index("backward")])
    start, end = np.flatnonzero(np.diff(is_running, prepend=False, append=False)).reshape(-1, 2).T
    return MemoryChange(
        "BF16 autocast",
        np.concatenate([rows, np.tile(weights, len(start))]),
        np.append(shares, np.full(len(weights) * len(start), 1.5)),
        "activations are in fp32; results of matrix products, and results made only from them, are "
        "then in 16 bits, with a copy of each weight until the backward pass ends",
        np.append(lives.start_event[rows], np.repeat(start, len(weights))),
        np.append(lives.end_event[rows], np.repeat(end - 1, len(weights))),
    )


# -- blocks that outlive their use
# ------------------------------------------------------------------------


def _find_references(peak: PeakMemory) -> MemoryChange | None:
    """Free blocks that each step leaves behind, else blocks of earlier steps, from the end of their
    step on."""
    h, lives = peak.history, peak.history.block_lifetimes
    _, marks = h.steps
    is_old = _is_in(peak, "earlier steps")
    lines = set(peak.growth.select("file", "line", "function").rows())
    is_growing = np.array(
        [(origin.file, origin.line, origin.function) in lines for origin in h.origins]
    )[lives.stack]
    is_growing &= lives.end_event == h.count
    rows = np.flatnonzero(is_old | is_growing)
    if not len(rows):
        return None
    where = h.origins[int(lives.stack[rows[np.argmax(lives.size[rows])]])]
    if lines:
        row = peak.growth.row(0, named=True)
        where = AllocationOrigin("own", row["file"], row["line"], row["function"])
    assumes = (
        "nothing needs what each step leaves behind there, but the newest step's may be in use"
        if lines
        else "nothing needs the outputs and losses of earlier steps any more"
    )
    later = np.append(marks, h.count)[np.searchsorted(marks, lives.start_event[rows], side="right")]
    start = np.where(lives.start_event[rows] < 0, -1, later)
    return MemoryChange("references", rows, 0.0, assumes, start, lives.end_event[rows],
                  None if where.file is None else where)  # fmt: skip


def _find_set_to_none(peak: PeakMemory) -> MemoryChange | None:
    """Free gradients that still exist in a forward pass although the optimizer has used them."""
    h, lives = peak.history, peak.history.block_lifetimes
    gradients = np.flatnonzero(_is_in(peak, "gradients"))
    phase = h.phase
    update_ends = np.flatnonzero(
        (phase[:-1] == PHASES.index("optimizer")) & (phase[1:] != PHASES.index("optimizer"))
    ) + 1  # fmt: skip
    backward = np.flatnonzero(phase == PHASES.index("backward"))
    rows, start, end = [], [], []
    for update_end in update_ends.tolist():  # one step per round
        next_backward = backward[backward >= update_end]
        end_event = int(next_backward[0]) if len(next_backward) else h.count
        kept_gradients = gradients[
            (lives.start_event[gradients] < update_end) & (lives.end_event[gradients] > update_end)
        ]
        rows.append(kept_gradients)
        start.append(np.full(len(kept_gradients), update_end))
        end.append(np.full(len(kept_gradients), end_event))
    if not rows:
        return None
    return MemoryChange(
        "set_to_none",
        np.concatenate(rows),
        0.0,
        "the optimizer has used the gradients: they are freed before the forward pass",
        np.concatenate(start),
        np.concatenate(end),
    )


# -- the optimizer --------------------------------------------------------------------------------


def _find_optimizer_changes(peak: PeakMemory) -> list[MemoryChange]:
    state = np.flatnonzero(_is_in(peak, "optimizer state"))
    large = state[peak.history.block_lifetimes.size[state] >= MIN_8_BIT_BYTES]
    return [
        MemoryChange("8-bit optimizer", large, STATE_8_BIT,
               "the state is in fp32 and all of it can be kept in 8 bits", group="state"),
        MemoryChange("16-bit optimizer state", state, 0.5,
               "the state is in fp32 and can be kept in bf16", group="state"),
        MemoryChange("offload optimizer state", state, 0.0,
               "the optimizer runs on the host: gradients go there, weights come back",
               group="state"),
        MemoryChange("fused optimizer",
               np.flatnonzero(_is_in(peak, "optimizer temporaries")), 0.0,
               "a fused kernel updates in place, without temporaries"),
    ]  # fmt: skip


def shard_changes(peak: PeakMemory, ranks: int) -> list[MemoryChange]:
    """Estimate ZeRO 1 to 3 (FSDP) over this number of ranks, which now hold the same. Stage 3 keeps
    the largest two weights gathered."""
    lives = peak.history.block_lifetimes
    parts = [
        np.flatnonzero(_is_in(peak, name)) for name in ("optimizer state", "gradients", "weights")
    ]
    is_held = lives.at(peak.event)
    total = int(lives.size[np.concatenate(parts)][is_held[np.concatenate(parts)]].sum())
    gathered = 2 * int(lives.size[parts[2]].max(initial=0))
    changes = []
    for stage in (1, 2, 3):
        kept_share = 1 / ranks
        if stage == 3:
            kept_share = min(1.0, kept_share + gathered / max(total, 1))
        changes.append(
            MemoryChange(f"ZeRO {stage}", np.concatenate(parts[:stage]), kept_share,
                   f"{ranks} ranks hold equal parts", group="sharding")
        )  # fmt: skip
    return [change for change in changes if len(change.rows)]


def _share_graph_pools(peak: PeakMemory) -> MemoryChange | None:
    """Merge private pools other than the largest: graphs that never run at once can share one."""
    h, lives = peak.history, peak.history.block_lifetimes
    rows = np.flatnonzero(_is_in(peak, "CUDA graph pools"))
    pools = h.segments.filter(h.segments["pool"].is_not_null()).sort("address")
    if not len(rows) or pools["pool"].n_unique() < 2:
        return None
    pool_index = np.searchsorted(pools["address"].to_numpy(), lives.address[rows], side="right") - 1
    names = np.array(pools["pool"].to_list())[np.maximum(pool_index, 0)]
    totals = {name: int(lives.size[rows[names == name]].sum()) for name in set(names.tolist())}
    largest = max(sorted(totals), key=lambda name: totals[name])
    return MemoryChange(
        "share graph pools",
        rows[names != largest],
        0.0,
        f"the graphs of {len(totals)} pools never run at once and need no outputs of each other",
    )
