"""Device memory over time: the curve, its peak, and what was held then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.measure.host.stacks import locate

if TYPE_CHECKING:
    from advisor.measure import Analysis

HELD_SCHEMA: dict[str, Any] = {
    "op": pl.String,
    "file": pl.String,
    "line": pl.Int64,
    "blocks": pl.Int64,
    "bytes": pl.Int64,
}
MAX_POINTS = 4_000


def memory_devices(a: Analysis) -> list[int]:
    """Devices with allocator events, in order (-1 is the host's memory, left out)."""
    devices = a.trace.memory.filter(pl.col("device") >= 0)["device"].unique().sort()
    return [int(device) for device in devices]


def memory_curve(a: Analysis, device: int, most: int = MAX_POINTS) -> pl.DataFrame:
    """Bytes in tensors and bytes held by the allocator over the whole recording: ``ts``,
    ``allocated``, ``reserved`` (null: the allocator does not tell). Values hold until the next
    row. Long curves are thinned to about ``most`` rows: of each stretch its lowest and highest
    ``allocated`` are kept, so that no peak is lost."""
    events = _events(a, device).select("ts", "allocated", "reserved")
    if events.height <= most:
        return events
    bucket = np.arange(events.height) * (most // 2) // events.height
    kept = (
        events.with_row_index("row")
        .group_by(pl.Series("bucket", bucket), maintain_order=True)
        .agg(
            pl.col("row").get(pl.col("allocated").arg_min()).alias("low"),
            pl.col("row").get(pl.col("allocated").arg_max()).alias("high"),
        )
    )
    rows = np.unique(np.concatenate([kept["low"].to_numpy(), kept["high"].to_numpy()]))
    return events[rows]


class Peak(NamedTuple):
    """The moment at which most bytes were in tensors."""

    ts: int
    """ns."""
    allocated: int
    """Bytes in tensors."""
    reserved: int | None
    """Bytes held by the allocator then; the difference is its cache and fragmentation."""
    before: int
    """Bytes of it that were allocated before the recording began: who did is not recorded."""
    held: pl.DataFrame
    """The rest by who allocated it: ``op`` (outermost operator at that moment, null: none),
    ``file`` and ``line`` (of the user's code; null: no stacks), ``blocks``, ``bytes``; largest
    first."""


def memory_peak(a: Analysis, device: int) -> Peak | None:
    """What was held at the peak of a device; ``None``: no allocator events.

    A block is held when it was allocated before the peak and not freed by then; each is tied to
    the host event that was running on its thread. Without ``Total Allocated`` in the file there
    is no peak to find.
    """
    events = _events(a, device)
    if events.is_empty() or events["allocated"].is_null().all():
        return None
    index = int(events["allocated"].arg_max() or 0)
    upto = events[: index + 1]
    # the last event of an address tells whether its block is held
    last = upto.with_row_index("row").group_by("address").agg(pl.col("row").max())
    held = upto[np.sort(last["row"].to_numpy())].filter(pl.col("bytes") > 0)
    total = int(events["allocated"][index])
    reserved = events["reserved"][index]
    own = int(held["bytes"].sum())
    return Peak(
        ts=int(events["ts"][index]),
        allocated=total,
        reserved=int(reserved) if reserved else None,
        before=max(0, total - own),
        held=_by_owner(a, held),
    )


def _events(a: Analysis, device: int) -> pl.DataFrame:
    events = a.trace.memory.filter(pl.col("device") == device).sort("ts", maintain_order=True)
    return events.with_columns(reserved=pl.when(pl.col("reserved") > 0).then("reserved"))


def _by_owner(a: Analysis, held: pl.DataFrame) -> pl.DataFrame:
    if held.is_empty():
        return pl.DataFrame(schema=HELD_SCHEMA)
    row = _running(a, held["thread"].fill_null(-1).to_numpy(), held["ts"].to_numpy())
    op = _outermost_op(a, row)
    frame = np.where(row >= 0, a.user_frame[np.maximum(row, 0)], -1) if a.trace.cpu.height else row
    missing = (frame < 0) & (row >= 0)
    if missing.any():
        frame[missing] = a.forward_frame[row[missing]]
    groups = (
        pl.DataFrame({"op_row": op, "frame": frame, "bytes": held["bytes"]})
        .with_columns(op=a.trace.cpu["name"].gather(pl.Series(op).set(pl.Series(op < 0), None)))
        .group_by("op", "frame")
        .agg(pl.len().cast(pl.Int64).alias("blocks"), pl.col("bytes").sum())
        .sort("bytes", "blocks", descending=True)
    )
    places = [locate(a, int(row)) if row >= 0 else (None, None, None) for row in groups["frame"]]
    return groups.select(
        pl.col("op").cast(pl.String),
        pl.Series("file", [place[0] for place in places], dtype=pl.String),
        pl.Series("line", [place[1] for place in places], dtype=pl.Int64),
        "blocks",
        "bytes",
    )


def _running(a: Analysis, thread: NDArray[np.int32], ts: NDArray[np.int64]) -> NDArray[np.int32]:
    """Innermost host row that is running on a thread at an instant, -1: none."""
    cpu = a.trace.cpu
    result = np.full(len(ts), -1, dtype=np.int32)
    if cpu.is_empty():
        return result
    starts, ends = cpu["ts"].to_numpy(), (cpu["ts"] + cpu["dur"]).to_numpy()
    threads, parent = cpu["thread"].to_numpy(), cpu["parent"].fill_null(-1).to_numpy()
    for number in np.unique(thread):  # a handful of threads
        low, high = np.searchsorted(threads, [number, number + 1])
        own = np.flatnonzero(thread == number)
        index = low + np.searchsorted(starts[low:high], ts[own], side="right") - 1
        index = np.where(index >= low, index, -1)
        while (late := (index >= 0) & (ends[np.maximum(index, 0)] < ts[own])).any():
            index[late] = parent[index[late]]  # as often as stacks are deep
        result[own] = index
    return result


def _outermost_op(a: Analysis, rows: NDArray[np.int32]) -> NDArray[np.int32]:
    from advisor.measure.host.stacks import climb_stack, operators, parents

    if not len(rows) or a.trace.cpu.is_empty():
        return np.full(len(rows), -1, dtype=np.int32)
    return climb_stack(parents(a.trace), operators(a.trace), rows.astype(np.int64), top=True)
