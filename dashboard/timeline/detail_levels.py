"""Level of detail: how a view is drawn, wide slices as they are, narrow ones as cells; and the
categories of slices, which give the timeline its colours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from advisor.core.intervals import Ints
from advisor.core.text import cause_label, host_label
from advisor.core.trace import SYNC_KINDS
from advisor.dashboard import theme
from advisor.measure.device.families import FAMILIES
from advisor.measure.host.gaps import CAUSES
from advisor.measure.steps.timeline import CLASSES

if TYPE_CHECKING:
    from advisor.dashboard.timeline.index import TimelineIndex


BLOCK = 16
"""Number of slices for which the longest duration is kept: long ones are found by it."""
MAX_SLICES = 20_000
"""Number of slices in one answer; a view with more is answered in wider cells."""


class FlaggedRuns(NamedTuple):
    """Runs of cells with flagged narrow slices."""

    lane: NDArray[np.uint16]
    cell: NDArray[np.int64]
    width: NDArray[np.int64]
    flags: NDArray[np.uint8]


class VisibleSlices(NamedTuple):
    """Slices and cells of a view. Cell c is [begin + (c << k), begin + ((c + 1) << k))."""

    k: int
    position: NDArray[np.int64]
    """Slices of two cells and more: their places in the index."""
    lane: NDArray[np.uint16]
    """Lanes of these slices."""
    runs: CellRuns
    """Cells of the shorter slices."""
    flagged: FlaggedRuns
    slice_count: int
    """Number of slices in view, drawn either way."""


def level_of_detail(
    index: TimelineIndex,
    lanes: Sequence[int],
    x0: int,
    x1: int,
    px: int,
    flags: NDArray[np.uint8] | None = None,
    max_slices: int = MAX_SLICES,
) -> VisibleSlices:
    """Choose the slices and cells to draw of [x0, x1) of the given lanes on ``px`` pixels.

    ``flags``: a byte for each slice of the index; narrow slices that have one are
    in ``flagged``. Cells at the edge of the view are complete."""
    lanes = sorted(set(lanes))
    k = max(((x1 - x0) // px).bit_length() - 1, 0)  # cells of half a pixel to one pixel
    spans = [(number, *index.within(number, x0, x1)) for number in lanes]
    spans = [span for span in spans if span[2] > span[1]]
    wide = _wide(index, spans, 2 << k)
    while sum(map(len, wide)) > max_slices and k < 60:
        k += 1
        wide = _wide(index, spans, 2 << k)
    position = np.concatenate([*wide, np.zeros(0, dtype=np.int64)])
    owner = np.repeat(np.array([s[0] for s in spans], dtype=np.uint16), [len(f) for f in wide])
    # whole cells, which may reach beyond the view
    low, high = max(x0 - index.begin, 0) >> k, max(x1 - 1 - index.begin, 0) >> k
    if k in index.pyramid:
        runs = _stored(index, lanes, k, low, high)
    else:
        runs = _computed(index, lanes, k, low, high)
    marked = _flagged(index, lanes, k, low, high, flags)
    return VisibleSlices(k, position, owner, runs, marked, sum(hi - lo for _, lo, hi in spans))


def _wide(
    index: TimelineIndex, spans: list[tuple[int, int, int]], least: int
) -> list[NDArray[np.int64]]:
    """Find slices of at least so many ns in each span, through the longest of each block."""
    wide = []
    for _, lo, hi in spans:
        block = index.longest[lo // BLOCK : (hi - 1) // BLOCK + 1]
        blocks = np.flatnonzero(block >= least) + lo // BLOCK
        rows = (blocks[:, None] * BLOCK + np.arange(BLOCK)).ravel()
        rows = rows[(rows >= lo) & (rows < hi)]
        wide.append(rows[index.end[rows] - index.start[rows] >= least])
    return wide


def _stored(index: TimelineIndex, lanes: Sequence[int], k: int, low: int, high: int) -> CellRuns:
    level = index.pyramid[k]
    parts = []
    for number in lanes:
        a, b = int(level.first_run[number]), int(level.first_run[number + 1])
        cell = level.runs.cell[a:b]
        lo = max(int(np.searchsorted(cell, low, side="right")) - 1, 0)
        hi = int(np.searchsorted(cell, high, side="right"))
        if hi > lo:
            parts.append(np.arange(a + lo, a + hi))
    if not parts:
        return EMPTY_RUNS
    runs = level.runs.take(np.concatenate(parts))
    runs = runs._replace(cell=runs.cell.astype(np.int64), width=runs.width.astype(np.int64))
    return _cut(runs, low, high)


def _cut(runs: CellRuns, low: int, high: int) -> CellRuns:
    """Cut runs to the cells ``low`` to ``high``."""
    end = np.minimum(runs.cell + runs.width, high + 1)
    cell = np.maximum(runs.cell, low)
    return runs._replace(cell=cell, width=end - cell).take(end > cell)


def _computed(index: TimelineIndex, lanes: Sequence[int], k: int, low: int, high: int) -> CellRuns:
    parts = _narrow(index, lanes, k, low, high)
    if not parts:
        return EMPTY_RUNS
    positions = np.concatenate([rows for _, rows in parts])
    number = np.array([lane for lane, _ in parts], dtype=np.int64)
    # lanes are numbered as they come, so that keys stay small
    lane = np.repeat(np.arange(len(parts)), [len(rows) for _, rows in parts])
    base = index.begin + (low << k)
    cells = cell_count((high - low + 1) << k, k) + 2
    # shifted by two cells: what begins before the first cell reaches at most two back
    start = index.start[positions] - base + (2 << k)
    end = index.end[positions] - base + (2 << k)
    narrow = Slices(lane, start, end, index.slot[positions])
    times = cell_times(narrow, k, cells + 2)
    runs = cell_runs(times, k, cells + 2)
    runs = runs._replace(lane=number[runs.lane].astype(np.uint16), cell=runs.cell + low - 2)
    return _cut(runs, low, high)


def _narrow(
    index: TimelineIndex, lanes: Sequence[int], k: int, low: int, high: int
) -> list[tuple[int, NDArray[np.int64]]]:
    """Find narrow slices that touch the cells, by lane."""
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
    index: TimelineIndex,
    lanes: Sequence[int],
    k: int,
    low: int,
    high: int,
    flags: NDArray[np.uint8] | None,
) -> FlaggedRuns:
    """Find cells of flagged narrow slices. One that touches several marks the one it begins in."""
    none = np.zeros(0, dtype=np.int64)
    nothing = FlaggedRuns(none.astype(np.uint16), none, none, none.astype(np.uint8))
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
    first = key[head]
    cell = low + (first & ((1 << 32) - 1))
    return FlaggedRuns((first >> 32).astype(np.uint16), cell, width, value[head])


COVER_STEP = 8
"""Step of coverage, which has 32 levels, so that runs of equal cells are long."""
SLICES_PER_CELL = 8
"""The finest stored level has about this many slices of the whole index for each cell: a view of
some thousand cells of a finer one touches few enough slices to be looked at one by one."""
COARSEST_CELLS = 128
"""Number of cells that every level has at least."""
MAX_LEVEL = 62


class CellRuns(NamedTuple):
    """Runs of equal cells, ordered by (lane, cell)."""

    lane: NDArray[np.uint16]
    cell: NDArray[np.int64]
    width: NDArray[np.int64]
    slot: NDArray[np.uint8]
    """Category with most time in the cell (the lower number of equals), within its set."""
    cover: NDArray[np.uint8]
    """Share of the cell that narrow slices cover, rounded up to COVER_STEP, 1 to 255."""

    def take(self, chosen: NDArray[Any]) -> CellRuns:
        return CellRuns(*(column[chosen] for column in self))


class CellTimes(NamedTuple):
    """Time by cell and slot: ``key = (lane * cells + cell) * SLOTS + slot``, ordered, distinct."""

    key: Ints
    time: NDArray[np.float64]


class DetailLevel(NamedTuple):
    """Runs of all lanes at one level; lane i has ``first_run[i]`` to ``first_run[i + 1]``."""

    first_run: NDArray[np.int64]
    runs: CellRuns


class Slices(NamedTuple):
    """Slices to be drawn as cells; times are ns from the index's beginning. A slice of no
    duration counts as 1 ns."""

    lane: NDArray[np.int64]
    start: Ints
    end: Ints
    slot: NDArray[np.uint8]


def cell_times(slices: Slices, k: int, cells: int) -> CellTimes:
    """Sum the time that narrow slices spend in each cell. Each is at most two cells long."""
    first = slices.start >> k
    end = np.maximum(slices.end, slices.start + 1)
    last = (end - 1) >> k
    keys, weights = [], []
    # a slice shorter than two cells touches at most three
    for step in range(3):
        cell = first + step
        touched = np.flatnonzero(cell <= last) if step else slice(None)
        cells_hit = cell[touched]
        overlap = np.minimum(end[touched], (cells_hit + 1) << k)
        overlap -= np.maximum(slices.start[touched], cells_hit << k)
        keys.append((slices.lane[touched] * cells + cells_hit) * SLOTS + slices.slot[touched])
        weights.append(overlap)
    return sum_by_key(np.concatenate(keys), np.concatenate(weights))


def sum_by_key(key: Ints, weight: NDArray[np.generic]) -> CellTimes:
    """Add up weights of equal keys, keys in order."""
    if not len(key):
        return CellTimes(key, np.zeros(0))
    order = np.argsort(key, kind="stable")
    key = key[order]
    fresh = np.flatnonzero(np.append(True, key[1:] != key[:-1]))
    return CellTimes(key[fresh], np.add.reduceat(weight[order], fresh).astype(np.float64))


def cell_runs(times: CellTimes, k: int, cells: int) -> CellRuns:
    """Return the dominant category of each cell, equal neighbours joined."""
    place = times.key // SLOTS
    if not len(place):
        return EMPTY_RUNS
    fresh = np.flatnonzero(np.append(True, place[1:] != place[:-1]))
    count = np.diff(np.append(fresh, len(place)))
    largest = np.maximum.reduceat(times.time, fresh)
    total = np.add.reduceat(times.time, fresh)
    slot = (times.key % SLOTS).astype(np.int64)
    slot[times.time < np.repeat(largest, count)] = SLOTS
    top = np.minimum.reduceat(slot, fresh).astype(np.uint8)
    places = place[fresh]
    lane, cell = places // cells, places % cells
    share = np.minimum(total / float(1 << k), 1.0)
    cover = np.clip(np.ceil(share * 255 / COVER_STEP) * COVER_STEP, 1, 255).astype(np.uint8)
    new = np.ones(len(places), dtype=bool)
    new[1:] = (
        (places[1:] != places[:-1] + 1)
        | (lane[1:] != lane[:-1])
        | (top[1:] != top[:-1])
        | (cover[1:] != cover[:-1])
    )
    head = np.flatnonzero(new)
    width = np.diff(np.append(head, len(places)))
    return CellRuns(lane[head].astype(np.uint16), cell[head], width, top[head], cover[head])


EMPTY_RUNS = CellRuns(
    np.zeros(0, dtype=np.uint16),
    np.zeros(0, dtype=np.int64),
    np.zeros(0, dtype=np.int64),
    np.zeros(0, dtype=np.uint8),
    np.zeros(0, dtype=np.uint8),
)


def cell_count(length: int, k: int) -> int:
    """Count cells of a level that cover a length (and one more, for what ends with it)."""
    return (length >> k) + 2


def stored_levels(slices: int, length: int) -> range:
    """Return levels that are kept for an index of so many slices and ns: none where it is small."""
    want = max(slices // SLICES_PER_CELL, COARSEST_CELLS)
    low = max((length // want).bit_length() - 1, 0)
    high = max((length // COARSEST_CELLS).bit_length() - 1, low)
    return range(low, min(high, MAX_LEVEL) + 1)


def build_pyramid(
    bounds: Sequence[tuple[int, int]],
    start: Ints,
    end: Ints,
    slot: NDArray[np.uint8],
    begin: int,
    length: int,
) -> dict[int, DetailLevel]:
    """Build the runs of every stored level. ``bounds``: first and last slice of each lane.

    Each level is the one below it with pairs of cells joined, and the slices that became narrow."""
    count = np.array([hi - lo for lo, hi in bounds], dtype=np.int64)
    lanes = np.arange(len(bounds), dtype=np.int64)
    levels: dict[int, DetailLevel] = {}
    times: CellTimes | None = None
    dur = np.maximum(end - start, 1)
    for k in stored_levels(len(start), length):
        cells = cell_count(length, k)
        fresh = dur < 2 << k
        if times is not None:
            fresh &= dur >= 1 << k
        rows = np.flatnonzero(fresh)
        lane = np.repeat(lanes, count)[rows]
        added = cell_times(
            Slices(lane, start[rows] - begin, end[rows] - begin, slot[rows]), k, cells
        )
        if times is not None:
            was = cell_count(length, k - 1)
            place = times.key // SLOTS
            wider = (place // was * cells + (place % was >> 1)) * SLOTS + times.key % SLOTS
            added = sum_by_key(
                np.concatenate([wider, added.key]), np.concatenate([times.time, added.time])
            )
        times = added
        runs = cell_runs(times, k, cells)
        levels[k] = DetailLevel(
            np.searchsorted(runs.lane, np.arange(len(bounds) + 1)), _small(runs)
        )
    return levels


def _small(runs: CellRuns) -> CellRuns:
    """Return the same runs in fewer bytes: cells of stored levels fit 32 bits."""
    return runs._replace(cell=runs.cell.astype(np.uint32), width=runs.width.astype(np.uint32))


class Category(NamedTuple):
    """Category of slices. ``key`` is stable."""

    key: str
    label: str
    colour: str
    """Colour, as on the other pages where they show the same."""


STEPS = (
    Category("step", "step", "#7f8aa3"),
    Category("step-aside", "step not analysed", "#b5b5bd"),
)
PHASES = tuple(
    Category(f"phase-{name}", name, theme.colour_of("phases", name)) for name in theme.PHASES
)
IDLE = tuple(
    Category(f"idle-{name}", cause_label(name), theme.colour_of("idle", name)) for name in CAUSES
)
KERNELS = tuple(
    Category(f"gpu-{name}", name, theme.colour_of("kernels", name)) for name in FAMILIES
)
COPIES = (
    Category("copy-htod", "host to device", theme.CLASSES["copies"]),
    Category("copy-htod-pageable", "host to device, pageable", "#d98a3d"),
    Category("copy-dtoh", "device to host", "#6c8fd9"),
    Category("copy-dtoh-pageable", "device to host, pageable", "#c96a4a"),
    Category("copy-dtod", "on the device", "#5fa8a0"),
    Category("copy-ptop", "device to device", "#8a7fd6"),
    Category("copy-other", "other copy", theme.PLAIN),
    Category("copy-memset", "memset", theme.CLASSES["memset"]),
)
SYNCS = tuple(
    Category(f"sync-{name}", f"{name.replace('_', ' ')} sync", theme.colour_of("idle", "sync"))
    for name in SYNC_KINDS
)
ACTIVITY = tuple(
    Category(f"act-{name}", host_label(name), theme.colour_of("host", name)) for name in CLASSES
)
HOST = (
    Category("host-op", "operator", theme.colour_of("host", "dispatch")),
    Category("host-range", "range", "#7f8aa3"),
    Category("host-python", "Python, libraries", "#c9b78a"),
    Category("host-user", "Python, your code", theme.colour_of("host", "python")),
    Category("host-launch", "launch", theme.colour_of("host", "launch")),
    Category("host-sync", "sync", theme.colour_of("host", "sync")),
    Category("host-copy", "copy call", theme.colour_of("host", "copy")),
    Category("host-allocation", "allocation", theme.colour_of("host", "allocation")),
    Category("host-load", "code loading", theme.colour_of("host", "compile")),
    Category("host-call", "other runtime call", "#94a35a"),
    Category("host-loader", "data loader", theme.colour_of("host", "loader")),
    Category("host-overhead", "profiler overhead", theme.colour_of("host", "profiler")),
)

ALL = (*STEPS, *PHASES, *IDLE, *KERNELS, *COPIES, *SYNCS, *ACTIVITY, *HOST)
"""Categories of all sets; the browser gets a category's place in here."""

SETS = (STEPS, PHASES, IDLE, KERNELS, COPIES, SYNCS, ACTIVITY, HOST)
BASE = {part: ALL.index(part[0]) for part in SETS}
"""Place of each set's first category: a lane holds one set, its slices the place in the set."""

TITLES = (
    (STEPS, "Steps"), (PHASES, "Phases"), (IDLE, "Idle, by cause"), (KERNELS, "GPU work"),
    (COPIES, "Copies"), (SYNCS, "Syncs"), (ACTIVITY, "Thread activity"), (HOST, "Host calls"),
)  # fmt: skip
"""Sets with their titles, for a legend."""

SLOTS = max(len(part) for part in BASE)
"""Size of the largest set."""


def category_label(category: Category, run: TimelineIndex) -> str:
    """Return a category's label, in the words of the framework that the program is written with."""
    kind, _, name = category.key.partition("-")
    if kind == "idle" or category.key == "host-loader":
        return cause_label(name, run.framework, outside=run.outside)
    if kind == "act":
        return host_label(name, run.framework)
    return category.label
