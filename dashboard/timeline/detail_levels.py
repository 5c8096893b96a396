"""Level of detail of a view, and the categories that give slices their colors.

A view has wide slices as they are. Narrow slices are combined into cells of 2**level ns."""

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


BLOCK_SIZE = 16
"""Number of slices that share one entry of ``TimelineIndex.longest_per_block``."""
_MAX_SLICES = 20_000
"""Number of slices in one answer. A view with more has wider cells."""


class FlaggedRuns(NamedTuple):
    """Runs of cells with flagged narrow slices."""

    lane: NDArray[np.uint16]
    cell: NDArray[np.int64]
    width: NDArray[np.int64]
    flags: NDArray[np.uint8]


class VisibleSlices(NamedTuple):
    """Slices and cells of a view. Cell c begins at first_ns + (c << level), and is 2**level ns."""

    level: int
    position: NDArray[np.int64]
    """Positions in the index of the slices that are two cells or longer."""
    lane: NDArray[np.uint16]
    """Lanes of these slices."""
    runs: CellRuns
    """Runs of cells, for the shorter slices."""
    flagged: FlaggedRuns
    slice_count: int
    """Number of slices in view, wide and narrow."""


def select_visible(
    index: TimelineIndex,
    lanes: Sequence[int],
    x0: int,
    x1: int,
    px: int,
    flags: NDArray[np.uint8] | None = None,
    max_slices: int = _MAX_SLICES,
) -> VisibleSlices:
    """Select the slices and cells to draw for [x0, x1), ns, of the given lanes on ``px`` pixels.

    ``flags``: a byte per slice of the index. Narrow slices with a nonzero byte are in ``flagged``.
    Cells at the edge of the view are complete."""
    lanes = sorted(set(lanes))
    level = max(((x1 - x0) // px).bit_length() - 1, 0)  # cells of half a pixel to one pixel
    spans = [(number, *index.slice_range(number, x0, x1)) for number in lanes]
    spans = [span for span in spans if span[2] > span[1]]
    wide_slices = _find_wide_slices(index, spans, 2 << level)
    while sum(map(len, wide_slices)) > max_slices and level < 60:
        level += 1
        wide_slices = _find_wide_slices(index, spans, 2 << level)
    position = np.concatenate([*wide_slices, np.zeros(0, dtype=np.int64)])
    lane_numbers = np.repeat(
        np.array([span[0] for span in spans], dtype=np.uint16),
        [len(positions) for positions in wide_slices],
    )
    # whole cells, which may extend beyond the view
    first_cell, last_cell = (
        max(x0 - index.first_ns, 0) >> level,
        max(x1 - 1 - index.first_ns, 0) >> level,
    )
    if level in index.pyramid:
        runs = _stored_runs(index, lanes, level, first_cell, last_cell)
    else:
        runs = _compute_runs(index, lanes, level, first_cell, last_cell)
    flagged = _find_flagged_runs(index, lanes, level, first_cell, last_cell, flags)
    return VisibleSlices(
        level,
        position,
        lane_numbers,
        runs,
        flagged,
        sum(end_slice - first_slice for _, first_slice, end_slice in spans),
    )


def _find_wide_slices(
    index: TimelineIndex, spans: list[tuple[int, int, int]], min_ns: int
) -> list[NDArray[np.int64]]:
    """Find the slices of at least ``min_ns`` in each span: (lane, first slice, end)."""
    wide = []
    for _, first_slice, end_slice in spans:
        block_longest = index.longest_per_block[
            first_slice // BLOCK_SIZE : (end_slice - 1) // BLOCK_SIZE + 1
        ]
        blocks = np.flatnonzero(block_longest >= min_ns) + first_slice // BLOCK_SIZE
        rows = (blocks[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).ravel()
        rows = rows[(rows >= first_slice) & (rows < end_slice)]
        wide.append(rows[index.end[rows] - index.start[rows] >= min_ns])
    return wide


def _stored_runs(
    index: TimelineIndex, lanes: Sequence[int], level: int, first_cell: int, last_cell: int
) -> CellRuns:
    """Return the runs of cells ``first_cell`` to ``last_cell`` from a stored level."""
    stored_level = index.pyramid[level]
    parts = []
    for number in lanes:
        first_run, end_run = (
            int(stored_level.first_run[number]),
            int(stored_level.first_run[number + 1]),
        )
        cell = stored_level.runs.cell[first_run:end_run]
        first = max(int(np.searchsorted(cell, first_cell, side="right")) - 1, 0)
        end = int(np.searchsorted(cell, last_cell, side="right"))
        if end > first:
            parts.append(np.arange(first_run + first, first_run + end))
    if not parts:
        return EMPTY_RUNS
    runs = stored_level.runs.take(np.concatenate(parts))
    runs = runs._replace(cell=runs.cell.astype(np.int64), width=runs.width.astype(np.int64))
    return _clip_runs(runs, first_cell, last_cell)


def _clip_runs(runs: CellRuns, first_cell: int, last_cell: int) -> CellRuns:
    """Clip runs to the cells ``first_cell`` to ``last_cell``, both included."""
    end = np.minimum(runs.cell + runs.width, last_cell + 1)
    cell = np.maximum(runs.cell, first_cell)
    return runs._replace(cell=cell, width=end - cell).take(end > cell)


def _compute_runs(
    index: TimelineIndex, lanes: Sequence[int], level: int, first_cell: int, last_cell: int
) -> CellRuns:
    """Compute the runs of cells ``first_cell`` to ``last_cell`` from the slices."""
    parts = _find_narrow_slices(index, lanes, level, first_cell, last_cell)
    if not parts:
        return EMPTY_RUNS
    positions = np.concatenate([rows for _, rows in parts])
    lane_numbers = np.array([lane for lane, _ in parts], dtype=np.int64)
    # lanes are renumbered from 0, so that keys stay small
    lane = np.repeat(np.arange(len(parts)), [len(rows) for _, rows in parts])
    base = index.first_ns + (first_cell << level)
    cells = count_cells((last_cell - first_cell + 1) << level, level) + 2
    # shifted by two cells: a narrow slice starts at most two cells before the first one
    start = index.start[positions] - base + (2 << level)
    end = index.end[positions] - base + (2 << level)
    narrow = Slices(lane, start, end, index.slot[positions])
    times = sum_cell_times(narrow, level, cells + 2)
    runs = build_cell_runs(times, level, cells + 2)
    runs = runs._replace(
        lane=lane_numbers[runs.lane].astype(np.uint16), cell=runs.cell + first_cell - 2
    )
    return _clip_runs(runs, first_cell, last_cell)


def _find_narrow_slices(
    index: TimelineIndex, lanes: Sequence[int], level: int, first_cell: int, last_cell: int
) -> list[tuple[int, NDArray[np.int64]]]:
    """Find the narrow slices that touch the cells ``first_cell`` to ``last_cell``, by lane."""
    x0, x1 = index.first_ns + (first_cell << level), index.first_ns + ((last_cell + 1) << level)
    parts = []
    for number in lanes:
        # from one ns earlier: a slice without duration at x0 ends there and counts as 1 ns
        first_slice, end_slice = index.slice_range(number, x0 - 1, x1)
        rows = np.arange(first_slice, end_slice)
        start, end = index.start[first_slice:end_slice], index.end[first_slice:end_slice]
        rows = rows[(end - start < 2 << level) & (np.maximum(end, start + 1) > x0)]
        if len(rows):
            parts.append((number, rows))
    return parts


def _find_flagged_runs(
    index: TimelineIndex,
    lanes: Sequence[int],
    level: int,
    first_cell: int,
    last_cell: int,
    flags: NDArray[np.uint8] | None,
) -> FlaggedRuns:
    """Find the cells in which flagged narrow slices start."""
    no_cells = np.zeros(0, dtype=np.int64)
    no_runs = FlaggedRuns(no_cells.astype(np.uint16), no_cells, no_cells, no_cells.astype(np.uint8))
    if flags is None:
        return no_runs
    x0, x1 = index.first_ns + (first_cell << level), index.first_ns + ((last_cell + 1) << level)
    keys, values = [], []
    for number in lanes:
        first_slice, end_slice = index.slice_range(number, x0 - 1, x1)
        rows = np.flatnonzero(flags[first_slice:end_slice]) + first_slice
        rows = rows[index.end[rows] - index.start[rows] < 2 << level]
        cell = np.maximum((index.start[rows] - index.first_ns) >> level, first_cell)
        keys.append((number << 32) + cell - first_cell)
        values.append(flags[rows])
    key = np.concatenate([*keys, no_cells])
    if not len(key):
        return no_runs
    value = np.concatenate(values)
    cell_starts = np.flatnonzero(np.append(True, key[1:] != key[:-1]))
    key, value = key[cell_starts], np.bitwise_or.reduceat(value, cell_starts)
    run_starts = np.flatnonzero(
        np.append(True, (key[1:] != key[:-1] + 1) | (value[1:] != value[:-1]))
    )
    width = np.diff(np.append(run_starts, len(key)))
    first = key[run_starts]
    cell = first_cell + (first & ((1 << 32) - 1))
    return FlaggedRuns((first >> 32).astype(np.uint16), cell, width, value[run_starts])


COVER_STEP = 8
"""Step of a cell's coverage. With 32 levels, runs of equal cells are long."""
SLICES_PER_CELL = 8
"""Mean number of slices per cell in the finest stored level.

A view in finer cells touches so few slices that it is computed from them directly."""
MIN_CELLS_PER_LEVEL = 128
"""Number of cells that the coarsest level has, at least."""
_MAX_LEVEL = 62


class CellRuns(NamedTuple):
    """Runs of equal cells, ordered by (lane, cell)."""

    lane: NDArray[np.uint16]
    cell: NDArray[np.int64]
    width: NDArray[np.int64]
    slot: NDArray[np.uint8]
    """Slot of the category with the most time in the cell; the lower slot if two are equal."""
    cover: NDArray[np.uint8]
    """Share of the cell that narrow slices cover, 1 to 255, rounded up to COVER_STEP."""

    def take(self, selection: NDArray[Any]) -> CellRuns:
        """Return the selected runs."""
        return CellRuns(*(column[selection] for column in self))


class CellTimes(NamedTuple):
    """Time by cell and slot. ``key = (lane * cells + cell) * MAX_SLOTS + slot``; sorted, unique."""

    key: Ints
    time: NDArray[np.float64]


class DetailLevel(NamedTuple):
    """Runs of all lanes at one level: lane i has ``first_run[i]`` to ``first_run[i + 1]``."""

    first_run: NDArray[np.int64]
    runs: CellRuns


class Slices(NamedTuple):
    """Slices to be combined into cells. Times are ns from the start of the index.

    A slice without duration counts as 1 ns."""

    lane: NDArray[np.int64]
    start: Ints
    end: Ints
    slot: NDArray[np.uint8]


def sum_cell_times(slices: Slices, level: int, cells: int) -> CellTimes:
    """Sum the time of narrow slices in each cell. A narrow slice is shorter than two cells."""
    first = slices.start >> level
    end = np.maximum(slices.end, slices.start + 1)
    last = (end - 1) >> level
    keys, weights = [], []
    # a slice shorter than two cells touches at most three
    for step in range(3):
        cell = first + step
        touched = np.flatnonzero(cell <= last) if step else slice(None)
        cells_hit = cell[touched]
        overlap = np.minimum(end[touched], (cells_hit + 1) << level)
        overlap -= np.maximum(slices.start[touched], cells_hit << level)
        keys.append((slices.lane[touched] * cells + cells_hit) * MAX_SLOTS + slices.slot[touched])
        weights.append(overlap)
    return sum_by_key(np.concatenate(keys), np.concatenate(weights))


def sum_by_key(key: Ints, weight: NDArray[np.generic]) -> CellTimes:
    """Sum the weights of equal keys. The result is sorted by key."""
    if not len(key):
        return CellTimes(key, np.zeros(0))
    order = np.argsort(key, kind="stable")
    key = key[order]
    key_starts = np.flatnonzero(np.append(True, key[1:] != key[:-1]))
    return CellTimes(key[key_starts], np.add.reduceat(weight[order], key_starts).astype(np.float64))


def build_cell_runs(times: CellTimes, level: int, cells: int) -> CellRuns:
    """Find the dominant category of each cell, and join equal neighbors into runs."""
    cell_keys = times.key // MAX_SLOTS
    if not len(cell_keys):
        return EMPTY_RUNS
    cell_starts = np.flatnonzero(np.append(True, cell_keys[1:] != cell_keys[:-1]))
    count = np.diff(np.append(cell_starts, len(cell_keys)))
    largest = np.maximum.reduceat(times.time, cell_starts)
    total = np.add.reduceat(times.time, cell_starts)
    slot = (times.key % MAX_SLOTS).astype(np.int64)
    slot[times.time < np.repeat(largest, count)] = MAX_SLOTS
    dominant_slot = np.minimum.reduceat(slot, cell_starts).astype(np.uint8)
    distinct_cells = cell_keys[cell_starts]
    lane, cell = distinct_cells // cells, distinct_cells % cells
    share = np.minimum(total / float(1 << level), 1.0)
    cover = np.clip(np.ceil(share * 255 / COVER_STEP) * COVER_STEP, 1, 255).astype(np.uint8)
    starts_run = np.ones(len(distinct_cells), dtype=bool)
    starts_run[1:] = (
        (distinct_cells[1:] != distinct_cells[:-1] + 1)
        | (lane[1:] != lane[:-1])
        | (dominant_slot[1:] != dominant_slot[:-1])
        | (cover[1:] != cover[:-1])
    )
    run_starts = np.flatnonzero(starts_run)
    width = np.diff(np.append(run_starts, len(distinct_cells)))
    return CellRuns(
        lane[run_starts].astype(np.uint16),
        cell[run_starts],
        width,
        dominant_slot[run_starts],
        cover[run_starts],
    )


EMPTY_RUNS = CellRuns(
    np.zeros(0, dtype=np.uint16),
    np.zeros(0, dtype=np.int64),
    np.zeros(0, dtype=np.int64),
    np.zeros(0, dtype=np.uint8),
    np.zeros(0, dtype=np.uint8),
)


def count_cells(length: int, level: int) -> int:
    """Count the cells of a level that cover a length, and one more for slices that end with it."""
    return (length >> level) + 2


def stored_levels(slices: int, length: int) -> range:
    """Return the levels to store for an index of this many slices and ns."""
    target_cells = max(slices // SLICES_PER_CELL, MIN_CELLS_PER_LEVEL)
    finest = max((length // target_cells).bit_length() - 1, 0)
    coarsest = max((length // MIN_CELLS_PER_LEVEL).bit_length() - 1, finest)
    return range(finest, min(coarsest, _MAX_LEVEL) + 1)


def build_pyramid(
    bounds: Sequence[tuple[int, int]],
    start: Ints,
    end: Ints,
    slot: NDArray[np.uint8],
    first_ns: int,
    length: int,
) -> dict[int, DetailLevel]:
    """Build the runs of every stored level. ``bounds``: first and end slice of each lane.

    Each level joins pairs of cells of the level below and adds the slices that became narrow."""
    count = np.array([end_slice - first_slice for first_slice, end_slice in bounds], dtype=np.int64)
    lanes = np.arange(len(bounds), dtype=np.int64)
    levels: dict[int, DetailLevel] = {}
    times: CellTimes | None = None
    dur = np.maximum(end - start, 1)
    for level in stored_levels(len(start), length):
        cells = count_cells(length, level)
        is_new = dur < 2 << level
        if times is not None:
            is_new &= dur >= 1 << level
        rows = np.flatnonzero(is_new)
        lane = np.repeat(lanes, count)[rows]
        added = sum_cell_times(
            Slices(lane, start[rows] - first_ns, end[rows] - first_ns, slot[rows]), level, cells
        )
        if times is not None:
            cells_below = count_cells(length, level - 1)
            cell_keys = times.key // MAX_SLOTS
            joined_keys = (
                cell_keys // cells_below * cells + (cell_keys % cells_below >> 1)
            ) * MAX_SLOTS + times.key % MAX_SLOTS
            added = sum_by_key(
                np.concatenate([joined_keys, added.key]), np.concatenate([times.time, added.time])
            )
        times = added
        runs = build_cell_runs(times, level, cells)
        levels[level] = DetailLevel(
            np.searchsorted(runs.lane, np.arange(len(bounds) + 1)), _with_small_types(runs)
        )
    return levels


def _with_small_types(runs: CellRuns) -> CellRuns:
    """Return the runs with 32-bit cells and widths, which are enough for stored levels."""
    return runs._replace(cell=runs.cell.astype(np.uint32), width=runs.width.astype(np.uint32))


class Category(NamedTuple):
    """Category of slices. ``key`` stays the same between releases."""

    key: str
    label: str
    color: str
    """CSS color, the same as on the other pages."""


STEP_CATEGORIES = (
    Category("step", "step", "#7f8aa3"),
    Category("step-aside", "step not analysed", "#b5b5bd"),
)
PHASE_CATEGORIES = tuple(
    Category(f"phase-{name}", name, theme.color_of("phases", name)) for name in theme.PHASE_COLORS
)
IDLE_CATEGORIES = tuple(
    Category(f"idle-{name}", cause_label(name), theme.color_of("idle", name)) for name in CAUSES
)
KERNEL_CATEGORIES = tuple(
    Category(f"gpu-{name}", name, theme.color_of("kernels", name)) for name in FAMILIES
)
COPY_CATEGORIES = (
    Category("copy-htod", "host to device", theme.CLASS_COLORS["copies"]),
    Category("copy-htod-pageable", "host to device, pageable", "#d98a3d"),
    Category("copy-dtoh", "device to host", "#6c8fd9"),
    Category("copy-dtoh-pageable", "device to host, pageable", "#c96a4a"),
    Category("copy-dtod", "on the device", "#5fa8a0"),
    Category("copy-ptop", "device to device", "#8a7fd6"),
    Category("copy-other", "other copy", theme.OTHER_COLOR),
    Category("copy-memset", "memset", theme.CLASS_COLORS["memset"]),
)
SYNC_CATEGORIES = tuple(
    Category(f"sync-{name}", f"{name.replace('_', ' ')} sync", theme.color_of("idle", "sync"))
    for name in SYNC_KINDS
)
ACTIVITY_CATEGORIES = tuple(
    Category(f"act-{name}", host_label(name), theme.color_of("host", name)) for name in CLASSES
)
HOST_CATEGORIES = (
    Category("host-op", "operator", theme.color_of("host", "dispatch")),
    Category("host-range", "range", "#7f8aa3"),
    Category("host-python", "Python, libraries", "#c9b78a"),
    Category("host-user", "Python, your code", theme.color_of("host", "python")),
    Category("host-launch", "launch", theme.color_of("host", "launch")),
    Category("host-sync", "sync", theme.color_of("host", "sync")),
    Category("host-copy", "copy call", theme.color_of("host", "copy")),
    Category("host-allocation", "allocation", theme.color_of("host", "allocation")),
    Category("host-load", "code loading", theme.color_of("host", "compile")),
    Category("host-call", "other runtime call", "#94a35a"),
    Category("host-loader", "data loader", theme.color_of("host", "loader")),
    Category("host-overhead", "profiler overhead", theme.color_of("host", "profiler")),
)

ALL_CATEGORIES = (
    *STEP_CATEGORIES,
    *PHASE_CATEGORIES,
    *IDLE_CATEGORIES,
    *KERNEL_CATEGORIES,
    *COPY_CATEGORIES,
    *SYNC_CATEGORIES,
    *ACTIVITY_CATEGORIES,
    *HOST_CATEGORIES,
)
"""Categories of all sets. The browser gets an index into this tuple."""

CATEGORY_SETS = (
    STEP_CATEGORIES,
    PHASE_CATEGORIES,
    IDLE_CATEGORIES,
    KERNEL_CATEGORIES,
    COPY_CATEGORIES,
    SYNC_CATEGORIES,
    ACTIVITY_CATEGORIES,
    HOST_CATEGORIES,
)
FIRST_CATEGORY = {categories: ALL_CATEGORIES.index(categories[0]) for categories in CATEGORY_SETS}
"""Index of each set's first category in ``ALL_CATEGORIES``. A slice's slot is relative to it."""

SET_TITLES = (
    (STEP_CATEGORIES, "Steps"),
    (PHASE_CATEGORIES, "Phases"),
    (IDLE_CATEGORIES, "Idle, by cause"),
    (KERNEL_CATEGORIES, "GPU work"),
    (COPY_CATEGORIES, "Copies"),
    (SYNC_CATEGORIES, "Syncs"),
    (ACTIVITY_CATEGORIES, "Thread activity"),
    (HOST_CATEGORIES, "Host calls"),
)
"""Category sets with their titles in a legend."""

MAX_SLOTS = max(len(categories) for categories in FIRST_CATEGORY)
"""Number of categories in the largest set."""


def category_label(category: Category, index: TimelineIndex) -> str:
    """Return a category's label, in the terms of the program's framework."""
    kind, _, name = category.key.partition("-")
    if kind == "idle" or category.key == "host-loader":
        return cause_label(name, index.framework, outside=index.idle_outside_operators)
    if kind == "act":
        return host_label(name, index.framework)
    return category.label
