"""Encoding of the binary answer to a view, which ``assets/timeline/data.js`` decodes.

All numbers are little-endian. A header of 72 bytes is followed by columns. Each column starts at a
multiple of 8 bytes, with zeros as padding::

    0   4s   "ATL1"
    4   u32  slices n
    8   u32  runs m
    12  u32  flagged runs f
    16  u32  counters c
    20  u32  pixels p of each counter
    24  u32  level k: a cell is 2^k ns
    28  u32  slices in view, wide and narrow
    32  f64  view's x0, ns of the trace
    40  f64  view's x1
    48  f64  cell0: start of cell 0 of the runs, ns of the trace
    56  f64  time to compute the answer, ms
    64  u32  version of the data, which changes with each window of a live run
    68  u32  0

    slices   f64[n] start - x0, f64[n] duration, u32[n] name, u32[n] id, u16[n] lane,
             u8[n] category, u8[n] flags (1: slice of the focused finding, 2: search match)
    runs     u16[m] lane, u32[m] cell, u16[m] width in cells, u8[m] category, u8[m] cover of 255
    flagged  u16[f] lane, u32[f] cell, u16[f] width in cells, u8[f] flags
    counters f32[c * p] smallest, f32[c * p] largest value (NaN: no value)
"""

import struct

import numpy as np
from numpy.typing import NDArray

from advisor.dashboard.timeline.counters import sample_counter
from advisor.dashboard.timeline.detail_levels import VisibleSlices
from advisor.dashboard.timeline.index import TimelineIndex

MAGIC = b"ATL1"
HEADER = struct.Struct("<4s7I4d2I")
_MAX_WIDTH = 65535

_SLICES = ("<f8", "<f8", "<u4", "<u4", "<u2", "u1", "u1")
_RUNS = ("<u2", "<u4", "<u2", "u1", "u1")
_FLAGGED = ("<u2", "<u4", "<u2", "u1")


def encode_view(
    index: TimelineIndex,
    view: VisibleSlices,
    span: tuple[int, int],
    px: int,
    counters: list[int],
    flags: NDArray[np.uint8] | None = None,
    duration_ms: float = 0.0,
    version: int = 0,
) -> bytes:
    """Encode the answer to a view. ``counters``: indices of the counters to include."""
    x0, x1 = span
    positions = view.position
    base = np.array([lane.base for lane in index.lanes] or [0], dtype=np.int64)
    slice_flags = (
        flags[positions] if flags is not None else np.zeros(len(positions), dtype=np.uint8)
    )
    first_cell = int(view.runs.cell[0]) if len(view.runs.cell) else 0
    for cells in (view.runs.cell, view.flagged.cell):
        first_cell = min(first_cell, int(cells.min())) if len(cells) else first_cell
    slices = (
        index.start[positions] - x0, index.end[positions] - index.start[positions],
        index.name[positions], positions, view.lane, base[view.lane] + index.slot[positions],
        slice_flags,
    )  # fmt: skip
    runs = view.runs
    sampled_counters = [sample_counter(index.counters[i], x0, x1, px) for i in counters]
    counter_bounds = np.stack(sampled_counters) if sampled_counters else np.zeros((0, 2, px))
    header = HEADER.pack(
        MAGIC,
        len(positions),
        len(runs.cell),
        len(view.flagged.cell),
        len(counters),
        px,
        view.level,
        min(view.slice_count, 2**32 - 1),
        x0,
        x1,
        index.first_ns + (first_cell << view.level),
        duration_ms,
        version,
        0,
    )
    columns = [
        *zip(slices, _SLICES, strict=True),
        *zip(
            (
                runs.lane,
                runs.cell - first_cell,
                np.minimum(runs.width, _MAX_WIDTH),
                base[runs.lane] + runs.slot,
                runs.cover,
            ),
            _RUNS,
            strict=True,
        ),
        *zip(
            (
                view.flagged.lane,
                view.flagged.cell - first_cell,
                np.minimum(view.flagged.width, _MAX_WIDTH),
                view.flagged.flags,
            ),
            _FLAGGED,
            strict=True,
        ),
        (counter_bounds[:, 0], "<f4"),
        (counter_bounds[:, 1], "<f4"),
    ]
    parts = [header]
    for column, dtype in columns:
        data = np.ascontiguousarray(column).astype(dtype).tobytes()
        parts += [data, b"\0" * (-len(data) % 8)]
    return b"".join(parts)
