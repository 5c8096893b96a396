"""A step as lanes of cells, one lane per stream, with a bounded number of cells."""

from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.intervals import covered_length
from advisor.measure import Analysis

CELLS = 900
"""Number of cells across the step: a screen cannot show more."""
MAX_STREAMS = 8
CLASSES = ("compute", "communication", "copies", "memset")


class CellRun(NamedTuple):
    """Neighbouring cells of one kind."""

    kind: str
    first: int
    last: int
    """Cell after the last one."""


class Lane(NamedTuple):
    """Lane of the picture: a stream, or idle time."""

    label: str
    runs: list[CellRun]
    busy: float
    """Share of the step with work or idle time on the lane."""


class StepLanes(NamedTuple):
    step: str
    """Name of the step."""
    dur_ns: int
    lanes: list[Lane]
    """Lanes of streams, the busiest first, then the lane of idle time by cause."""
    omitted_streams: int
    """Number of streams with work that are not shown."""


def build_step_lanes(a: Analysis) -> StepLanes | None:
    """Build the lanes of the used step closest to the median duration and the mean busy share.
    ``None`` if it has no device work."""
    used = a.steps.used
    if used.is_empty() or a.device_id is None:
        return None
    dur = used["dur"].to_numpy()
    busy = covered_length(used["ts"], used["end"], a.breakdown.busy) / np.maximum(dur, 1)
    chosen = int(np.argmin(np.abs(dur / np.median(dur) - 1) + np.abs(busy - busy.mean())))
    start, end = int(used["ts"][chosen]), int(used["end"][chosen])
    gpu = a.trace.gpu
    ts = gpu["ts"].to_numpy()
    stop = ts + gpu["dur"].to_numpy()
    rows = np.flatnonzero(a.in_window & (ts < end) & (stop > start))
    if not len(rows):
        return None
    kind = _kind_codes(a, rows)
    stream = gpu["stream"].to_numpy()[rows]
    lanes = []
    for stream_id in np.unique(stream).tolist():
        on_stream = stream == stream_id
        grid = _fill_cells(
            ts[rows][on_stream], stop[rows][on_stream], kind[on_stream], start, end, len(CLASSES)
        )
        lanes.append(_build_lane(f"stream {stream_id}", grid, CLASSES, start, end))
    lanes.sort(key=lambda lane: -lane.busy)
    omitted = max(0, len(lanes) - MAX_STREAMS)
    return StepLanes(
        step=str(used["name"][chosen]),
        dur_ns=end - start,
        lanes=[*lanes[:MAX_STREAMS], *_build_idle_lanes(a, start, end)],
        omitted_streams=omitted,
    )


def _kind_codes(a: Analysis, rows: NDArray[np.intp]) -> NDArray[np.int64]:
    kind = a.trace.gpu["kind"].gather(rows)
    result = np.zeros(len(rows), dtype=np.int64)
    result[(kind == "memcpy").to_numpy()] = 2
    result[(kind == "memset").to_numpy()] = 3
    result[a.kernels["communication"].gather(rows).to_numpy()] = 1
    return result


def _build_idle_lanes(a: Analysis, start: int, end: int) -> list[Lane]:
    gaps = a.gaps.filter((pl.col("ts") < end) & (pl.col("ts") + pl.col("dur") > start))
    if gaps.is_empty():
        return []
    from advisor.measure.host.gaps import CAUSES

    ts = gaps["ts"].to_numpy()
    cause = gaps["cause"].to_physical().to_numpy().astype(np.int64)
    grid = _fill_cells(ts, ts + gaps["dur"].to_numpy(), cause, start, end, len(CAUSES))
    return [_build_lane("idle", grid, CAUSES, start, end)]


def _fill_cells(
    start: NDArray[np.int64],
    stop: NDArray[np.int64],
    kind: NDArray[np.int64],
    step_start: int,
    step_end: int,
    kinds: int,
) -> NDArray[np.float64]:
    """Return the time of each kind (row) in each cell (column), ns."""
    width = (step_end - step_start) / CELLS
    low = (np.clip(start, step_start, step_end) - step_start) / width
    high = (np.clip(stop, step_start, step_end) - step_start) / width
    # The integral of "something runs" is piecewise linear, with corners at the ends of all events.
    # It is evaluated at the edges of the cells.
    grid = np.zeros((kinds, CELLS))
    edges = np.arange(CELLS + 1)
    for code in range(kinds):
        of_kind = kind == code
        if of_kind.any():
            corners = np.sort(low[of_kind]), np.sort(high[of_kind])
            grid[code] = np.diff(_ramps(edges, corners[0]) - _ramps(edges, corners[1])) * width
    return grid


def _ramps(points: NDArray[np.int64], corners: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum max(0, at - corner) over all corners."""
    corners_before = np.searchsorted(corners, points)
    total = np.append(0.0, np.cumsum(corners))
    result: NDArray[np.float64] = points * corners_before - total[corners_before]
    return result


def _build_lane(
    label: str, grid: NDArray[np.float64], names: tuple[str, ...], start: int, end: int
) -> Lane:
    """Draw a lane. Each cell shows the kind that takes most of it, if at least a tenth is filled. A
    single short event is still shown in its cell."""
    width = (end - start) / CELLS
    filled = np.minimum(grid.sum(axis=0), width)
    largest_kind = grid.argmax(axis=0)
    neighbors = np.maximum(np.append(filled[1:], 0), np.append(0, filled[:-1]))
    is_shown = (filled >= 0.1 * width) | ((filled > 0) & (neighbors < 0.1 * width))
    code = np.where(is_shown, largest_kind, -1)
    changes = np.flatnonzero(np.diff(code)) + 1
    starts = np.concatenate([[0], changes]).tolist()
    ends = np.concatenate([changes, [CELLS]]).tolist()
    runs = [
        CellRun(names[code[first]], first, last)
        for first, last in zip(starts, ends, strict=True)
        if code[first] >= 0
    ]
    return Lane(label, runs, float(filled.sum()) / max(end - start, 1))
