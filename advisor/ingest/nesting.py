"""Call stacks from start and end times, over whole columns: parent and depth of every event."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
MAX_DEPTH = 1000
"""Events nested deeper than this get the ancestor at this depth as their parent."""
MAX_ROUNDS = 30


@dataclass(frozen=True)
class Nesting:
    """``parent``: row of the innermost event around each, -1 for none. ``depth``: 0 for those.
    ``end``: ends after repair. ``repaired``: how many ends had to be cut."""

    parent: NDArray[np.int32]
    depth: NDArray[np.int32]
    end: Ints
    repaired: int


def nest(thread: Ints, start: Ints, end: Ints) -> Nesting:
    """Nest events that are ordered by (thread, start, longest first). Times in ns.

    An event that starts inside another and outlasts it (clock rounding, asynchronous ranges) is
    cut to the end of the one around it. Events without duration count as 1 ns long here.
    """
    count = len(start)
    end = np.maximum(end, start + 1)
    if count == 0:
        empty = np.zeros(0, dtype=np.int32)
        return Nesting(empty, empty, end, 0)
    span = int(end.max() - start.min()) + 2
    offset = thread * span - int(start.min())
    repaired = np.zeros(count, dtype=bool)
    for _ in range(MAX_ROUNDS):
        parent, depth = _parents(start + offset, end + offset)
        inner = np.flatnonzero(parent >= 0)
        around = parent[inner]
        wrong = (end[inner] > end[around]) | (thread[inner] != thread[around])
        if not wrong.any():
            return Nesting(parent, depth, end, int(repaired.sum()))
        rows = inner[wrong]
        rows = rows[_sound_above(rows, parent, rows, count)]
        holder = parent[rows]
        open_ = (end[holder] > start[rows]) & (thread[holder] == thread[rows])
        rows, holder = rows[open_], holder[open_]
        if not len(rows):
            break
        end[rows] = end[holder]
        repaired[rows] = True
    return _one_by_one(thread, start, end, repaired)


def _parents(start: Ints, end: Ints) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Depth = events open at the start; parent = the last one before with a depth one less."""
    count = len(start)
    closed = np.searchsorted(np.sort(end, kind="stable"), start, side="right")
    depth = np.clip(np.arange(count) - closed, 0, MAX_DEPTH).astype(np.int32)
    order = np.argsort(depth.astype(np.uint16), kind="stable")
    bounds = np.searchsorted(depth[order], np.arange(int(depth.max()) + 2))
    parent = np.full(count, -1, dtype=np.int32)
    above = order[bounds[0] : bounds[1]]
    for level in range(1, len(bounds) - 1):
        rows = order[bounds[level] : bounds[level + 1]]
        place = np.searchsorted(above, rows) - 1
        found = place >= 0
        parent[rows[found]] = above[place[found]]
        above = rows
    return parent, depth


def _sound_above(
    rows: NDArray[np.intp], parent: NDArray[np.int32], wrong: NDArray[np.intp], count: int
) -> NDArray[np.bool_]:
    """Which rows have no wrong event among their ancestors: only those can be cut safely."""
    bad = np.zeros(count + 1, dtype=bool)
    bad[wrong] = True
    sound = np.ones(len(rows), dtype=bool)
    above = parent[rows]
    for _ in range(MAX_DEPTH):
        live = (above >= 0) & sound
        if not live.any():
            break
        sound[live] = ~bad[above[live]]
        above = np.where(above >= 0, parent[above], -1)
    return sound


def _one_by_one(thread: Ints, start: Ints, end: Ints, repaired: NDArray[np.bool_]) -> Nesting:
    """The same with a stack, for input so tangled that whole-column repair does not settle."""
    parent = np.full(len(start), -1, dtype=np.int32)
    depth = np.zeros(len(start), dtype=np.int32)
    stack: list[int] = []
    ends = end.tolist()
    current = None
    for row, (owner, begin) in enumerate(zip(thread.tolist(), start.tolist(), strict=True)):
        if owner != current:
            stack, current = [], owner
        while stack and ends[stack[-1]] <= begin:
            stack.pop()
        if stack:
            parent[row] = stack[-1]
            if ends[row] > ends[stack[-1]]:
                ends[row] = ends[stack[-1]]
                repaired[row] = True
        depth[row] = len(stack)
        if len(stack) < MAX_DEPTH:
            stack.append(row)
    return Nesting(parent, depth, np.array(ends, dtype=np.int64), int(repaired.sum()))
