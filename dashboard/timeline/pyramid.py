"""Narrow slices as cells of 2^k ns: which category fills each cell, ready for every zoom.

At level k a slice shorter than two cells is *narrow*: it is drawn through the cells it touches, all
longer ones as they are. Cells lie on one grid, from the index's beginning, so what a cell shows
does not depend on the view, and a zoomed-out view costs what is drawn, not what there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from advisor.core.intervals import Ints
from advisor.dashboard.timeline.categories import SLOTS

COVER_STEP = 8
"""Coverage is told in 32 steps, so that runs of equal cells are long."""
SLICES_PER_CELL = 8
"""The finest stored level has about this many slices of the whole index for each cell: a view of
some thousand cells of a finer one touches few enough slices to be looked at one by one."""
COARSEST_CELLS = 128
"""No level has fewer cells than this."""
LAST = 62


class Runs(NamedTuple):
    """Runs of equal cells, ordered by (lane, cell)."""

    lane: NDArray[np.uint16]
    cell: NDArray[np.int64]
    width: NDArray[np.int64]
    slot: NDArray[np.uint8]
    """The category with most time in the cell (the lower number of equals), within its set."""
    cover: NDArray[np.uint8]
    """Share of the cell that narrow slices cover, rounded up to COVER_STEP, 1 to 255."""


class Times(NamedTuple):
    """Time by cell and slot: ``key = (lane * cells + cell) * SLOTS + slot``, ordered, distinct."""

    key: Ints
    time: NDArray[np.float64]


class Level(NamedTuple):
    """The runs of all lanes at one level; those of lane i are ``first[i]`` to ``first[i + 1]``."""

    first: NDArray[np.int64]
    runs: Runs


class Slices(NamedTuple):
    """Slices to be drawn as cells; times are ns from the index's beginning. A slice of no
    duration counts as 1 ns."""

    lane: NDArray[np.int64]
    start: Ints
    end: Ints
    slot: NDArray[np.uint8]


def times(slices: Slices, k: int, cells: int) -> Times:
    """Time that narrow slices spend in each cell. Each is at most two cells long."""
    first = slices.start >> k
    end = np.maximum(slices.end, slices.start + 1)
    last = (end - 1) >> k
    keys, weights = [], []
    # a slice shorter than two cells touches at most three
    for step in range(3):
        cell = first + step
        touched = np.flatnonzero(cell <= last) if step else slice(None)
        at = cell[touched]
        inside = np.minimum(end[touched], (at + 1) << k)
        inside -= np.maximum(slices.start[touched], at << k)
        keys.append((slices.lane[touched] * cells + at) * SLOTS + slices.slot[touched])
        weights.append(inside)
    return summed(np.concatenate(keys), np.concatenate(weights))


def summed(key: Ints, weight: NDArray[np.generic]) -> Times:
    """Weights of equal keys added up, keys in order."""
    if not len(key):
        return Times(key, np.zeros(0))
    order = np.argsort(key, kind="stable")
    key = key[order]
    fresh = np.flatnonzero(np.append(True, key[1:] != key[:-1]))
    return Times(key[fresh], np.add.reduceat(weight[order], fresh).astype(np.float64))


def runs_of(found: Times, k: int, cells: int) -> Runs:
    """The dominant category of each cell, equal neighbours joined."""
    place = found.key // SLOTS
    if not len(place):
        return NO_RUNS
    fresh = np.flatnonzero(np.append(True, place[1:] != place[:-1]))
    count = np.diff(np.append(fresh, len(place)))
    most = np.maximum.reduceat(found.time, fresh)
    total = np.add.reduceat(found.time, fresh)
    slot = (found.key % SLOTS).astype(np.int64)
    slot[found.time < np.repeat(most, count)] = SLOTS
    top = np.minimum.reduceat(slot, fresh).astype(np.uint8)
    at = place[fresh]
    lane, cell = at // cells, at % cells
    share = np.minimum(total / float(1 << k), 1.0)
    cover = np.clip(np.ceil(share * 255 / COVER_STEP) * COVER_STEP, 1, 255).astype(np.uint8)
    new = np.ones(len(at), dtype=bool)
    new[1:] = (
        (at[1:] != at[:-1] + 1)
        | (lane[1:] != lane[:-1])
        | (top[1:] != top[:-1])
        | (cover[1:] != cover[:-1])
    )
    head = np.flatnonzero(new)
    width = np.diff(np.append(head, len(at)))
    return Runs(lane[head].astype(np.uint16), cell[head], width, top[head], cover[head])


NO_RUNS = Runs(
    np.zeros(0, dtype=np.uint16),
    np.zeros(0, dtype=np.int64),
    np.zeros(0, dtype=np.int64),
    np.zeros(0, dtype=np.uint8),
    np.zeros(0, dtype=np.uint8),
)


def cells_of(length: int, k: int) -> int:
    """Cells of a level that cover a length (and one more, for what ends with it)."""
    return (length >> k) + 2


def stored_levels(slices: int, length: int) -> range:
    """Levels that are kept for an index of so many slices and ns: none where it is small."""
    want = max(slices // SLICES_PER_CELL, COARSEST_CELLS)
    low = max((length // want).bit_length() - 1, 0)
    high = max((length // COARSEST_CELLS).bit_length() - 1, low)
    return range(low, min(high, LAST) + 1)


def build_pyramid(
    bounds: Sequence[tuple[int, int]],
    start: Ints,
    end: Ints,
    slot: NDArray[np.uint8],
    begin: int,
    length: int,
) -> dict[int, Level]:
    """Runs of every stored level. ``bounds``: first and last slice of each lane.

    Each level is the one below it with pairs of cells joined, and the slices that became narrow.
    """
    count = np.array([hi - lo for lo, hi in bounds], dtype=np.int64)
    lanes = np.arange(len(bounds), dtype=np.int64)
    levels: dict[int, Level] = {}
    found: Times | None = None
    dur = np.maximum(end - start, 1)
    for k in stored_levels(len(start), length):
        cells = cells_of(length, k)
        fresh = dur < 2 << k
        if found is not None:
            fresh &= dur >= 1 << k
        at = np.flatnonzero(fresh)
        lane = np.repeat(lanes, count)[at]
        added = times(Slices(lane, start[at] - begin, end[at] - begin, slot[at]), k, cells)
        if found is not None:
            was = cells_of(length, k - 1)
            place = found.key // SLOTS
            wider = (place // was * cells + (place % was >> 1)) * SLOTS + found.key % SLOTS
            added = summed(
                np.concatenate([wider, added.key]), np.concatenate([found.time, added.time])
            )
        found = added
        runs = runs_of(found, k, cells)
        levels[k] = Level(np.searchsorted(runs.lane, np.arange(len(bounds) + 1)), _small(runs))
    return levels


def _small(runs: Runs) -> Runs:
    """The same in fewer bytes: cells of stored levels fit 32 bits."""
    return runs._replace(cell=runs.cell.astype(np.uint32), width=runs.width.astype(np.uint32))
