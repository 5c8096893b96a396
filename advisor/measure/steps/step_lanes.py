"""A step as lanes of strips, one lane per stream, its time in a bounded number of cells."""

from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.intervals import covered_length
from advisor.measure import Analysis

CELLS = 900
"""Number of cells across the step; a screen shows no more of them."""
MAX_STREAMS = 8
CLASSES = ("compute", "communication", "copies", "memset")


class CellRun(NamedTuple):
    """Neighbouring cells of one kind."""

    kind: str
    first: int
    last: int
    """Cell after the last one."""


class Lane(NamedTuple):
    """Row of the picture: a stream, or idle time."""

    label: str
    runs: list[CellRun]
    busy: float
    """Share of the step in which there is anything on it."""


class StepLanes(NamedTuple):
    step: str
    """Name of the step."""
    dur_ns: int
    lanes: list[Lane]
    """Lanes of streams, those with most work first, then of idle time by cause."""
    omitted_streams: int
    """Number of streams with work that are left out."""


def build_step_lanes(a: Analysis) -> StepLanes | None:
    """Build the lanes of the used step closest to the median duration and the mean busy share;
    ``None``: no device work in it."""
    used = a.steps.used
    if used.is_empty() or a.device_id is None:
        return None
    dur = used["dur"].to_numpy()
    busy = covered_length(used["ts"], used["end"], a.breakdown.busy) / np.maximum(dur, 1)
    chosen = int(np.argmin(np.abs(dur / np.median(dur) - 1) + np.abs(busy - busy.mean())))
    begin, end = int(used["ts"][chosen]), int(used["end"][chosen])
    gpu = a.trace.gpu
    ts = gpu["ts"].to_numpy()
    stop = ts + gpu["dur"].to_numpy()
    rows = np.flatnonzero(a.in_window & (ts < end) & (stop > begin))
    if not len(rows):
        return None
    kind = _kinds(a, rows)
    stream = gpu["stream"].to_numpy()[rows]
    lanes = []
    for number in np.unique(stream).tolist():
        own = stream == number
        grid = _grid(ts[rows][own], stop[rows][own], kind[own], begin, end, len(CLASSES))
        lanes.append(_lane(f"stream {number}", grid, CLASSES, begin, end))
    lanes.sort(key=lambda lane: -lane.busy)
    more = max(0, len(lanes) - MAX_STREAMS)
    return StepLanes(
        step=str(used["name"][chosen]),
        dur_ns=end - begin,
        lanes=[*lanes[:MAX_STREAMS], *_idle(a, begin, end)],
        omitted_streams=more,
    )


def _kinds(a: Analysis, rows: NDArray[np.intp]) -> NDArray[np.int64]:
    kind = a.trace.gpu["kind"].gather(rows)
    result = np.zeros(len(rows), dtype=np.int64)
    result[(kind == "memcpy").to_numpy()] = 2
    result[(kind == "memset").to_numpy()] = 3
    result[a.kernels["communication"].gather(rows).to_numpy()] = 1
    return result


def _idle(a: Analysis, begin: int, end: int) -> list[Lane]:
    gaps = a.gaps.filter((pl.col("ts") < end) & (pl.col("ts") + pl.col("dur") > begin))
    if gaps.is_empty():
        return []
    from advisor.measure.host.gaps import CAUSES

    ts = gaps["ts"].to_numpy()
    cause = gaps["cause"].to_physical().to_numpy().astype(np.int64)
    grid = _grid(ts, ts + gaps["dur"].to_numpy(), cause, begin, end, len(CAUSES))
    return [_lane("idle", grid, CAUSES, begin, end)]


def _grid(
    start: NDArray[np.int64],
    stop: NDArray[np.int64],
    kind: NDArray[np.int64],
    begin: int,
    end: int,
    kinds: int,
) -> NDArray[np.float64]:
    """Return the time of each kind (row) in each cell (column), ns."""
    width = (end - begin) / CELLS
    low = (np.clip(start, begin, end) - begin) / width
    high = (np.clip(stop, begin, end) - begin) / width
    # The integral of "something runs" is piecewise linear: corners at the ends of all events, read
    # off at the edges of the cells.
    grid = np.zeros((kinds, CELLS))
    edges = np.arange(CELLS + 1)
    for number in range(kinds):
        own = kind == number
        if own.any():
            corners = np.sort(low[own]), np.sort(high[own])
            grid[number] = np.diff(_ramp(edges, corners[0]) - _ramp(edges, corners[1])) * width
    return grid


def _ramp(at: NDArray[np.int64], corners: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum max(0, at - corner) over all corners."""
    before = np.searchsorted(corners, at)
    total = np.append(0.0, np.cumsum(corners))
    result: NDArray[np.float64] = at * before - total[before]
    return result


def _lane(
    label: str, grid: NDArray[np.float64], names: tuple[str, ...], begin: int, end: int
) -> Lane:
    """Draw a lane: each cell shows the kind that takes most of it, if anything takes a tenth of it;
    a lone short event still shows, in the cell it is in."""
    width = (end - begin) / CELLS
    filled = np.minimum(grid.sum(axis=0), width)
    top = grid.argmax(axis=0)
    neighbours = np.maximum(np.append(filled[1:], 0), np.append(0, filled[:-1]))
    seen = (filled >= 0.1 * width) | ((filled > 0) & (neighbours < 0.1 * width))
    code = np.where(seen, top, -1)
    change = np.flatnonzero(np.diff(code)) + 1
    starts = np.concatenate([[0], change]).tolist()
    ends = np.concatenate([change, [CELLS]]).tolist()
    runs = [
        CellRun(names[code[first]], first, last)
        for first, last in zip(starts, ends, strict=True)
        if code[first] >= 0
    ]
    return Lane(label, runs, float(filled.sum()) / max(end - begin, 1))
