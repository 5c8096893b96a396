"""Level of detail: what to draw of a view, wide slices as they are, narrow ones as cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from advisor.dashboard.timeline.index import BLOCK, Index
from advisor.dashboard.timeline.pyramid import NO_RUNS, Runs, Slices, cells_of, runs_of, times

MOST_SLICES = 20_000
"""Slices of one answer; a view with more is answered in wider cells."""
MOST_PX = 8192


class Flagged(NamedTuple):
    """Runs of cells with flagged narrow slices."""

    lane: NDArray[np.uint16]
    cell: NDArray[np.int64]
    width: NDArray[np.int64]
    flags: NDArray[np.uint8]


class View(NamedTuple):
    """What to draw. Cell c is [begin + (c << k), begin + ((c + 1) << k))."""

    k: int
    position: NDArray[np.int64]
    """Slices of two cells and more: places in the index."""
    lane: NDArray[np.uint16]
    """Their lanes."""
    runs: Runs
    """Cells of the shorter ones."""
    flagged: Flagged
    seen: int
    """Slices in view, drawn either way."""


def level_for(x0: int, x1: int, px: int) -> int:
    """The level whose cells are half a pixel to one pixel wide."""
    return max(((x1 - x0) // px).bit_length() - 1, 0)


def level_of_detail(
    index: Index,
    lanes: Sequence[int],
    x0: int,
    x1: int,
    px: int,
    flags: NDArray[np.uint8] | None = None,
    most: int = MOST_SLICES,
) -> View:
    """What to draw of [x0, x1) of the given lanes on ``px`` pixels.

    ``flags``: a byte for each slice of the index; narrow slices that have one are told as
    ``flagged``. What lies in a cell is told in full even where the view cuts the cell.
    """
    lanes = sorted(set(lanes))
    k = level_for(x0, x1, px)
    spans = [(number, *index.within(number, x0, x1)) for number in lanes]
    spans = [span for span in spans if span[2] > span[1]]
    found = _wide(index, spans, 2 << k)
    while sum(map(len, found)) > most and k < 60:
        k += 1
        found = _wide(index, spans, 2 << k)
    position = np.concatenate([*found, np.zeros(0, dtype=np.int64)])
    owner = np.repeat(np.array([s[0] for s in spans], dtype=np.uint16), [len(f) for f in found])
    # whole cells, which may reach beyond the view
    low, high = max(x0 - index.begin, 0) >> k, max(x1 - 1 - index.begin, 0) >> k
    if k in index.pyramid:
        runs = _stored(index, lanes, k, low, high)
    else:
        runs = _computed(index, lanes, k, low, high)
    marked = _flagged(index, lanes, k, low, high, flags)
    return View(k, position, owner, runs, marked, sum(hi - lo for _, lo, hi in spans))


def _wide(index: Index, spans: list[tuple[int, int, int]], least: int) -> list[NDArray[np.int64]]:
    """Slices of at least so many ns in each span, found through the longest of each block."""
    found = []
    for _, lo, hi in spans:
        block = index.longest[lo // BLOCK : (hi - 1) // BLOCK + 1]
        at = np.flatnonzero(block >= least) + lo // BLOCK
        if not len(at):
            found.append(at)
            continue
        rows = (at[:, None] * BLOCK + np.arange(BLOCK)).ravel()
        rows = rows[(rows >= lo) & (rows < hi)]
        found.append(rows[index.end[rows] - index.start[rows] >= least])
    return found


def _stored(index: Index, lanes: Sequence[int], k: int, low: int, high: int) -> Runs:
    level = index.pyramid[k]
    parts = []
    for number in lanes:
        a, b = int(level.first[number]), int(level.first[number + 1])
        cell = level.runs.cell[a:b]
        lo = max(int(np.searchsorted(cell, low, side="right")) - 1, 0)
        hi = int(np.searchsorted(cell, high, side="right"))
        if hi > lo:
            parts.append(np.arange(a + lo, a + hi))
    if not parts:
        return NO_RUNS
    at, of = np.concatenate(parts), level.runs
    cell, width = of.cell[at].astype(np.int64), of.width[at].astype(np.int64)
    return _cut(Runs(of.lane[at], cell, width, of.slot[at], of.cover[at]), low, high)


def _cut(runs: Runs, low: int, high: int) -> Runs:
    """Only what lies in cells ``low`` to ``high``."""
    end = np.minimum(runs.cell + runs.width, high + 1)
    cell = np.maximum(runs.cell, low)
    kept = end > cell
    width = (end - cell)[kept]
    return Runs(runs.lane[kept], cell[kept], width, runs.slot[kept], runs.cover[kept])


def _computed(index: Index, lanes: Sequence[int], k: int, low: int, high: int) -> Runs:
    parts = _narrow(index, lanes, k, low, high)
    if not parts:
        return NO_RUNS
    at = np.concatenate([rows for _, rows in parts])
    number = np.array([lane for lane, _ in parts], dtype=np.int64)
    # lanes are numbered as they come, so that keys stay small
    lane = np.repeat(np.arange(len(parts)), [len(rows) for _, rows in parts])
    base = index.begin + (low << k)
    cells = cells_of((high - low + 1) << k, k) + 2
    # shifted by two cells: what begins before the first cell reaches at most two back
    start = index.start[at] - base + (2 << k)
    end = index.end[at] - base + (2 << k)
    narrow = Slices(lane, start, end, index.slot[at])
    inside = times(narrow, k, cells + 2)
    runs = runs_of(inside, k, cells + 2)
    runs = runs._replace(lane=number[runs.lane].astype(np.uint16), cell=runs.cell + low - 2)
    return _cut(runs, low, high)


def _narrow(
    index: Index, lanes: Sequence[int], k: int, low: int, high: int
) -> list[tuple[int, NDArray[np.int64]]]:
    """Narrow slices that touch the cells, by lane."""
    x0, x1 = index.begin + (low << k), index.begin + ((high + 1) << k)
    parts = []
    for number in lanes:
        # from one ns before: a slice of no duration at x0 ends there and counts as 1 ns
        lo, hi = index.within(number, x0 - 1, x1)
        rows = np.arange(lo, hi)
        start, end = index.start[lo:hi], index.end[lo:hi]
        rows = rows[(end - start < 2 << k) & (np.maximum(end, start + 1) > x0)]
        if len(rows):
            parts.append((number, rows))
    return parts


def _flagged(
    index: Index,
    lanes: Sequence[int],
    k: int,
    low: int,
    high: int,
    flags: NDArray[np.uint8] | None,
) -> Flagged:
    """Cells of flagged narrow slices. A slice that touches several marks the one it begins in."""
    none = np.zeros(0, dtype=np.int64)
    nothing = Flagged(none.astype(np.uint16), none, none, none.astype(np.uint8))
    if flags is None:
        return nothing
    x0, x1 = index.begin + (low << k), index.begin + ((high + 1) << k)
    keys, values = [], []
    for number in lanes:
        lo, hi = index.within(number, x0 - 1, x1)
        rows = np.flatnonzero(flags[lo:hi]) + lo
        rows = rows[index.end[rows] - index.start[rows] < 2 << k]
        cell = np.maximum((index.start[rows] - index.begin) >> k, low)
        keys.append((number << 32) + cell - low)
        values.append(flags[rows])
    key = np.concatenate([*keys, none])
    if not len(key):
        return nothing
    value = np.concatenate(values)
    fresh = np.flatnonzero(np.append(True, key[1:] != key[:-1]))
    key, value = key[fresh], np.bitwise_or.reduceat(value, fresh)
    head = np.flatnonzero(np.append(True, (key[1:] != key[:-1] + 1) | (value[1:] != value[:-1])))
    width = np.diff(np.append(head, len(key)))
    at = key[head]
    cell = low + (at & ((1 << 32) - 1))
    return Flagged((at >> 32).astype(np.uint16), cell, width, value[head])
