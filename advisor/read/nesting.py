"""Call stacks from start and end times, over whole columns: parent and depth of every event."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from advisor.core.event_kinds import CPU_KINDS
from advisor.core.intervals import Ints

MAX_NESTING_DEPTH = 1000
"""Maximum depth. Deeper events get the ancestor at this depth as their parent."""
MAX_ROUNDS = 6
"""Maximum number of repairs over whole columns; then rows are repaired one by one. Real traces
need one or two."""
MAX_TANGLED = 20_000
"""Number of crossing events above which rows are repaired one by one immediately."""

OPENING_ROWS = 32
"""Maximum number of rows before a range that may hold the frames that opened it. Real traces have
about three such rows and the calls that these frames made."""

ROWS_PER_PART = 1 << 19
"""Number of rows that are ordered and nested at a time, if threads and their outermost events allow
such a cut. The work needs a hundred bytes per row."""

_KEY_LIMIT = 1 << 62
_ANNOTATION, _PYTHON = CPU_KINDS.index("annotation"), CPU_KINDS.index("python")
# Ranks that tell which of two host events with the same start and length is the outer one.
_OUTER_FIRST = np.array(
    [{"annotation": 0, "python": 1, "op": 2, "runtime": 3}.get(kind, 4) for kind in CPU_KINDS],
    dtype=np.int8,
)


@dataclass(frozen=True)
class Nesting:
    """Call stacks. ``parent``: row of the innermost event around each event, -1 if there is none.
    ``depth``: 0 for events without a parent. ``end``: ends after repair. ``repaired``: number of
    ends that were cut."""

    parent: NDArray[np.int32]
    depth: NDArray[np.int32]
    end: Ints
    repaired: int


def stack_order(thread: Any, start: Ints, dur: Ints, kind: Any) -> NDArray[np.intp]:
    """Return the row order by (thread, start, longest first, outer kind first)."""
    if len(start) <= ROWS_PER_PART:
        return _stack_order(thread, start, dur, kind)
    few = int(thread.max()) < 1 << 16  # 16-bit numbers are sorted by counting
    order = np.argsort(thread.astype(np.uint16) if few else thread, kind="stable")
    ends = np.cumsum(np.bincount(thread))
    first = 0
    while first < len(order):  # whole threads, enough of them for a full part
        last = int(ends[np.searchsorted(ends, min(first + ROWS_PER_PART, len(order)))])
        rows = order[first:last]
        order[first:last] = rows[_stack_order(thread[rows], start[rows], dur[rows], kind[rows])]
        first = last
    return order


def _stack_order(thread: Any, start: Ints, dur: Ints, kind: Any) -> NDArray[np.intp]:
    span = int(start.max()) + 1
    if (int(thread.max()) + 1) * span > _KEY_LIMIT:
        return np.lexsort((_OUTER_FIRST[kind], -dur, start, thread))
    key = thread.astype(np.int64) * span + start
    order = np.argsort(key, kind="stable")  # most input is nearly sorted
    key = key[order]
    tied = np.zeros(len(key), dtype=bool)
    equal = key[1:] == key[:-1]
    tied[1:] |= equal
    tied[:-1] |= equal
    ties = np.flatnonzero(tied)
    if len(ties):
        rows = order[ties]
        order[ties] = rows[np.lexsort((_OUTER_FIRST[kind[rows]], -dur[rows], key[ties]))]
    return order


def independent_stretches(thread: Any, start: Ints, dur: Ints) -> Iterator[slice]:
    """Yield slices of rows that can be nested independently by :func:`release_ranges` and
    :func:`nest`, of about ROWS_PER_PART rows if possible. Rows are ordered as for :func:`nest`."""
    first, count = 0, len(start)
    while first < count:
        cut = first + ROWS_PER_PART
        if cut < count:
            thread_begin = max(first, int(np.searchsorted(thread, thread[cut - 1])))
            latest_end = int((start[thread_begin:cut] + np.maximum(dur[thread_begin:cut], 1)).max())
        while cut < count:
            window = slice(cut, cut + ROWS_PER_PART)
            end_before = start[window] + np.maximum(dur[window], 1)
            next_latest = max(latest_end, int(end_before.max()))
            end_before[1:], end_before[0] = end_before[:-1].copy(), latest_end
            np.maximum.accumulate(end_before, out=end_before)
            is_cut = (start[window] >= end_before) | (thread[window] != thread[cut - 1])
            cut_index = int(is_cut.argmax())
            if is_cut[cut_index]:
                cut += cut_index
                break
            latest_end, cut = next_latest, cut + ROWS_PER_PART
        yield slice(first, min(cut, count))
        first = cut


def release_ranges(kind: Any, thread: Any, start: Ints, end: Ints) -> Ints:
    """Return ends for :func:`nest`, where frames that opened a range end at the start of the range.

    With Python stacks, a ``record_function`` range starts inside ``__enter__`` and the frames below
    it, which return soon after. If the range were cut to the end of those frames, it would lose
    the events that run inside it. Of two crossing events, the one that loses less is cut. Rows are
    ordered as for :func:`nest`."""
    end = np.array(end)
    ranges = np.flatnonzero(kind == _ANNOTATION)
    for offset in range(1, OPENING_ROWS + 1):
        range_rows = ranges[ranges >= offset]
        frame_rows = range_rows - offset
        lost = end[frame_rows] - start[range_rows]
        crossing = (
            (kind[frame_rows] == _PYTHON) & (thread[frame_rows] == thread[range_rows]) & (lost > 0)
        )
        crossing &= lost < end[range_rows] - end[frame_rows]
        end[frame_rows[crossing]] = start[range_rows[crossing]]
    return end


def nest(thread: Any, start: Ints, end: Ints) -> Nesting:
    """Nest events that are ordered by (thread, start, longest first). Times in ns.

    An event that starts inside another and outlasts it (clock rounding, asynchronous ranges) is
    cut to the end of the outer event. Events without duration count as 1 ns long here."""
    count = len(start)
    end = np.maximum(end, start + 1)
    repaired = np.zeros(count, dtype=bool)
    if count == 0:
        empty = np.zeros(0, dtype=np.int32)
        return Nesting(empty, empty, end, 0)
    span = int(end.max() - start.min()) + 2
    if (int(thread.max()) + 1) * span > _KEY_LIMIT:
        return _nest_one_by_one(thread, start, end, repaired)
    starts = thread.astype(np.int64)  # one thread after another on one axis
    starts *= span
    starts += start
    for _ in range(MAX_ROUNDS):
        ends = starts + (end - start)
        parent, depth = _find_parents(starts, ends)
        inner = np.flatnonzero(parent >= 0)
        overlong = inner[end[inner] > end[parent[inner]]]
        if not len(overlong):
            return Nesting(parent, depth, end, int(repaired.sum()))
        if len(overlong) > MAX_TANGLED:
            break
        rows = overlong[_mask_certain_rows(overlong, starts, ends, parent)]
        if not len(rows):
            break
        end[rows] = end[parent[rows]]
        repaired[rows] = True
    return _nest_one_by_one(thread, start, end, repaired)


def _find_parents(start: Ints, end: Ints) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return parents (the last event one level up) and depths (number of enclosing events)."""
    count = len(start)
    open_ = np.arange(count)
    open_ -= np.searchsorted(np.sort(end, kind="stable"), start, side="right")
    depth = np.clip(open_, 0, MAX_NESTING_DEPTH, out=open_).astype(np.int32)
    del open_
    order = np.argsort(depth.astype(np.uint16), kind="stable")
    bounds = np.searchsorted(depth[order], np.arange(int(depth.max()) + 2))
    parent = np.full(count, -1, dtype=np.int32)
    above = order[bounds[0] : bounds[1]]
    for level in range(1, len(bounds) - 1):
        rows = order[bounds[level] : bounds[level + 1]]
        parent[rows] = above[np.searchsorted(above, rows) - 1]
        above = rows
    return parent, depth


def _mask_certain_rows(
    overlong: NDArray[np.intp], start: Ints, end: Ints, parent: NDArray[np.int32]
) -> NDArray[np.bool_]:
    """Return a mask of the overlong rows that can certainly be cut to the end of their parent.

    Between the end of its parent and its own end, an overlong row counts as open. Events that
    start in this leak get a wrong depth, and perhaps a wrong parent. A row is certain if neither
    it nor any of its ancestors starts in a leak, and none of its ancestors leaks."""
    parents = parent[overlong]
    starts_inside = end[parents] > start[overlong]
    leak_from = np.where(starts_inside, end[parents], start[overlong])  # else in another's leak
    first = np.searchsorted(start, leak_from, side="left")
    last = np.searchsorted(start, end[overlong], side="left")
    open_leaks = np.zeros(len(start) + 1, dtype=np.int64)
    np.add.at(open_leaks, first, 1)
    np.add.at(open_leaks, last, -1)
    in_leak = np.cumsum(open_leaks)[:-1] > 0
    certain = starts_inside & ~in_leak[overlong]
    in_leak[overlong] = True
    pending = np.flatnonzero(certain)
    ancestors = parents[pending]
    while len(pending):  # one round per level
        leaky = in_leak[ancestors]
        certain[pending[leaky]] = False
        pending, ancestors = pending[~leaky], parent[ancestors[~leaky]]
        pending, ancestors = pending[ancestors >= 0], ancestors[ancestors >= 0]
    return certain


def _nest_one_by_one(thread: Any, start: Ints, end: Ints, repaired: NDArray[np.bool_]) -> Nesting:
    """Nest with a stack, for input so tangled that whole-column repair does not converge."""
    parents = [-1] * len(start)
    depths = [0] * len(start)
    stack: list[int] = []
    ends = end.tolist()
    current = None
    for row, (row_thread, row_start) in enumerate(
        zip(thread.tolist(), start.tolist(), strict=True)
    ):
        if row_thread != current:
            stack, current = [], row_thread
        while stack and ends[stack[-1]] <= row_start:
            stack.pop()
        if stack:
            parent_row = stack[-1]
            parents[row] = parent_row
            if ends[row] > ends[parent_row]:
                ends[row] = ends[parent_row]
                repaired[row] = True
        depths[row] = len(stack)
        if len(stack) < MAX_NESTING_DEPTH:
            stack.append(row)
    return Nesting(
        np.array(parents, dtype=np.int32),
        np.array(depths, dtype=np.int32),
        np.array(ends, dtype=np.int64),
        int(repaired.sum()),
    )
