"""Binary answer to a view, which ``assets/timeline/data.js`` reads.

Little endian throughout. A header of 72 bytes, then columns one after another, each beginning at a
multiple of 8 bytes (zeros between)::

    0   4s   "ATL1"
    4   u32  slices n
    8   u32  runs m
    12  u32  flagged runs f
    16  u32  counters c
    20  u32  pixels p of each counter
    24  u32  level k: a cell is 2^k ns
    28  u32  slices in view, drawn either way
    32  f64  view's x0, ns of the trace
    40  f64  view's x1
    48  f64  cell0: start of cell 0 of the runs, ns of the trace
    56  f64  what it took to make, ms
    64  u32  version of the data: changes when a live run's next window was read
    68  u32  0

    slices   f64[n] start - x0, f64[n] duration, u32[n] name, u32[n] id, u16[n] lane,
             u8[n] category, u8[n] flags (1: of the finding in focus, 2: found by the search)
    runs     u16[m] lane, u32[m] cell, u16[m] cells wide, u8[m] category, u8[m] cover (of 255)
    flagged  u16[f] lane, u32[f] cell, u16[f] cells wide, u8[f] flags
    counters f32[c * p] least, f32[c * p] largest (NaN: no value)
"""

import struct

import numpy as np
from numpy.typing import NDArray

from advisor.dashboard.timeline.counters import sample_counter
from advisor.dashboard.timeline.detail_levels import VisibleSlices
from advisor.dashboard.timeline.index import TimelineIndex

MAGIC = b"ATL1"
HEADER = struct.Struct("<4s7I4d2I")
MAX_WIDTH = 65535

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
    ms: float = 0.0,
    version: int = 0,
) -> bytes:
    """Encode the answer to a view; ``counters``: which of the index's are wanted."""
    x0, x1 = span
    positions = view.position
    base = np.array([lane.base for lane in index.lanes] or [0], dtype=np.int64)
    slice_flags = (
        flags[positions] if flags is not None else np.zeros(len(positions), dtype=np.uint8)
    )
    low = int(view.runs.cell[0]) if len(view.runs.cell) else 0
    for cells in (view.runs.cell, view.flagged.cell):
        low = min(low, int(cells.min())) if len(cells) else low
    slices = (
        index.start[positions] - x0, index.end[positions] - index.start[positions],
        index.name[positions], positions, view.lane, base[view.lane] + index.slot[positions],
        slice_flags,
    )  # fmt: skip
    runs = view.runs
    sampled = [sample_counter(index.counters[i], x0, x1, px) for i in counters]
    both = np.stack(sampled) if sampled else np.zeros((0, 2, px))
    head = HEADER.pack(
        MAGIC,
        len(positions),
        len(runs.cell),
        len(view.flagged.cell),
        len(counters),
        px,
        view.k,
        min(view.slice_count, 2**32 - 1),
        x0,
        x1,
        index.begin + (low << view.k),
        ms,
        version,
        0,
    )
    columns = [
        *zip(slices, _SLICES, strict=True),
        *zip(
            (
                runs.lane,
                runs.cell - low,
                np.minimum(runs.width, MAX_WIDTH),
                base[runs.lane] + runs.slot,
                runs.cover,
            ),
            _RUNS,
            strict=True,
        ),
        *zip(
            (
                view.flagged.lane,
                view.flagged.cell - low,
                np.minimum(view.flagged.width, MAX_WIDTH),
                view.flagged.flags,
            ),
            _FLAGGED,
            strict=True,
        ),
        (both[:, 0], "<f4"),
        (both[:, 1], "<f4"),
    ]
    parts = [head]
    for column, kind in columns:
        data = np.ascontiguousarray(column).astype(kind).tobytes()
        parts += [data, b"\0" * (-len(data) % 8)]
    return b"".join(parts)
