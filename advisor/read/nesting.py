"""Call stacks from start and end times, over whole columns: parent and depth of every event."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from advisor.core.intervals import Ints
from advisor.read.trace_events import HOST_KINDS

MAX_DEPTH = 1000
"""Greatest depth; deeper events get the ancestor at this depth as their parent."""
MAX_ROUNDS = 6
"""Most repairs over whole columns; the rest is done one by one. Real traces need one or two."""
MAX_TANGLED = 20_000
"""Crossing events from which the repair is done one by one at once."""

OPENING_ROWS = 32
"""Most rows before a range that may hold the frames that opened it; real traces have about three,
and what else these frames called."""

ROWS_PER_PART = 1 << 19
"""Rows that are ordered and nested at once, if threads and their outermost events end so soon: the
work needs a hundred bytes per row."""

_KEY_LIMIT = 1 << 62
_ANNOTATION, _PYTHON = HOST_KINDS.index("annotation"), HOST_KINDS.index("python")
# Which of two host events with the same start and length is the outer one.
_OUTER_FIRST = np.array(
    [{"annotation": 0, "python": 1, "op": 2, "runtime": 3}.get(kind, 4) for kind in HOST_KINDS],
    dtype=np.int8,
)


@dataclass(frozen=True)
class Nesting:
    """Call stacks. ``parent``: row of the innermost event around each, -1 for none; ``depth``: 0
    for those. ``end``: ends after repair. ``repaired``: number of ends that were cut."""

    parent: NDArray[np.int32]
    depth: NDArray[np.int32]
    end: Ints
    repaired: int


def stack_order(thread: Any, start: Ints, dur: Ints, kind: Any) -> NDArray[np.intp]:
    """Return the order by (thread, start, longest first, outer kind first)."""
    if len(start) <= ROWS_PER_PART:
        return _stack_order(thread, start, dur, kind)
    few = int(thread.max()) < 1 << 16  # such are sorted by counting
    order = np.argsort(thread.astype(np.uint16) if few else thread, kind="stable")
    ends = np.cumsum(np.bincount(thread))
    first = 0
    while first < len(order):  # whole threads, so many that it pays
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
    same = np.zeros(len(key), dtype=bool)
    equal = key[1:] == key[:-1]
    same[1:] |= equal
    same[:-1] |= equal
    ties = np.flatnonzero(same)
    if len(ties):
        rows = order[ties]
        order[ties] = rows[np.lexsort((_OUTER_FIRST[kind[rows]], -dur[rows], key[ties]))]
    return order


def independent_stretches(thread: Any, start: Ints, dur: Ints) -> Iterator[slice]:
    """Yield slices of rows that nest in none of each other's, for :func:`release_ranges` and
    :func:`nest`, of about ROWS_PER_PART rows if possible. Rows are ordered as for :func:`nest`."""
    first, count = 0, len(start)
    while first < count:
        cut = first + ROWS_PER_PART
        if cut < count:
            own = max(first, int(np.searchsorted(thread, thread[cut - 1])))
            latest = int((start[own:cut] + np.maximum(dur[own:cut], 1)).max())
        while cut < count:
            some = slice(cut, cut + ROWS_PER_PART)
            before = start[some] + np.maximum(dur[some], 1)
            last = max(latest, int(before.max()))
            before[1:], before[0] = before[:-1].copy(), latest
            np.maximum.accumulate(before, out=before)
            free = (start[some] >= before) | (thread[some] != thread[cut - 1])
            place = int(free.argmax())
            if free[place]:
                cut += place
                break
            latest, cut = last, cut + ROWS_PER_PART
        yield slice(first, min(cut, count))
        first = cut


def release_ranges(kind: Any, thread: Any, start: Ints, end: Ints) -> Ints:
    """Return ends for :func:`nest`: frames that opened a range end where the range starts.

    With Python stacks, a ``record_function`` range starts inside ``__enter__`` and the frames below
    it, which return soon after: what then runs inside the range would be lost to it, were the
    range cut to the end of those frames. Of two that cross, the one that loses less is cut.
    Rows are ordered as for :func:`nest`."""
    end = np.array(end)
    ranges = np.flatnonzero(kind == _ANNOTATION)
    for back in range(1, OPENING_ROWS + 1):
        inner = ranges[ranges >= back]
        frame = inner - back
        lost = end[frame] - start[inner]
        crossing = (kind[frame] == _PYTHON) & (thread[frame] == thread[inner]) & (lost > 0)
        crossing &= lost < end[inner] - end[frame]
        end[frame[crossing]] = start[inner[crossing]]
    return end


def nest(thread: Any, start: Ints, end: Ints) -> Nesting:
    """Nest events that are ordered by (thread, start, longest first). Times in ns.

    An event that starts inside another and outlasts it (clock rounding, asynchronous ranges) is
    cut to the end of the one around it. Events without duration count as 1 ns long here."""
    count = len(start)
    end = np.maximum(end, start + 1)
    repaired = np.zeros(count, dtype=bool)
    if count == 0:
        empty = np.zeros(0, dtype=np.int32)
        return Nesting(empty, empty, end, 0)
    span = int(end.max() - start.min()) + 2
    if (int(thread.max()) + 1) * span > _KEY_LIMIT:
        return _one_by_one(thread, start, end, repaired)
    begin = thread.astype(np.int64)  # one thread after another on one axis
    begin *= span
    begin += start
    for _ in range(MAX_ROUNDS):
        finish = begin + (end - start)
        parent, depth = _parents(begin, finish)
        inner = np.flatnonzero(parent >= 0)
        wrong = inner[end[inner] > end[parent[inner]]]
        if not len(wrong):
            return Nesting(parent, depth, end, int(repaired.sum()))
        if len(wrong) > MAX_TANGLED:
            break
        rows = wrong[_certain(wrong, begin, finish, parent)]
        if not len(rows):
            break
        end[rows] = end[parent[rows]]
        repaired[rows] = True
    return _one_by_one(thread, start, end, repaired)


def _parents(start: Ints, end: Ints) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return parent (the last event with a depth one less) and depth (events open at the start)."""
    count = len(start)
    open_ = np.arange(count)
    open_ -= np.searchsorted(np.sort(end, kind="stable"), start, side="right")
    depth = np.clip(open_, 0, MAX_DEPTH, out=open_).astype(np.int32)
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


def _certain(
    wrong: NDArray[np.intp], start: Ints, end: Ints, parent: NDArray[np.int32]
) -> NDArray[np.bool_]:
    """Return which of the wrong rows can certainly be cut to the end of their parent.

    A wrong row leaks: between the end of its parent and its own end it counts as open, and what
    starts there has a wrong depth, hence perhaps a wrong parent. A row is certain when neither
    it nor any row above it starts in a leak, and none of those above it leaks itself."""
    holder = parent[wrong]
    held = end[holder] > start[wrong]
    leak_from = np.where(held, end[holder], start[wrong])  # not held: itself in another's leak
    first = np.searchsorted(start, leak_from, side="left")
    last = np.searchsorted(start, end[wrong], side="left")
    inside = np.zeros(len(start) + 1, dtype=np.int64)
    np.add.at(inside, first, 1)
    np.add.at(inside, last, -1)
    bad = np.cumsum(inside)[:-1] > 0
    sound = held & ~bad[wrong]
    bad[wrong] = True
    live = np.flatnonzero(sound)
    above = holder[live]
    while len(live):  # one round a level
        hit = bad[above]
        sound[live[hit]] = False
        live, above = live[~hit], parent[above[~hit]]
        live, above = live[above >= 0], above[above >= 0]
    return sound


def _one_by_one(thread: Any, start: Ints, end: Ints, repaired: NDArray[np.bool_]) -> Nesting:
    """Nest with a stack, for input so tangled that whole-column repair does not settle."""
    parents = [-1] * len(start)
    depths = [0] * len(start)
    stack: list[int] = []
    ends = end.tolist()
    current = None
    for row, (owner, begin) in enumerate(zip(thread.tolist(), start.tolist(), strict=True)):
        if owner != current:
            stack, current = [], owner
        while stack and ends[stack[-1]] <= begin:
            stack.pop()
        if stack:
            above = stack[-1]
            parents[row] = above
            if ends[row] > ends[above]:
                ends[row] = ends[above]
                repaired[row] = True
        depths[row] = len(stack)
        if len(stack) < MAX_DEPTH:
            stack.append(row)
    return Nesting(
        np.array(parents, dtype=np.int32),
        np.array(depths, dtype=np.int32),
        np.array(ends, dtype=np.int64),
        int(repaired.sum()),
    )
