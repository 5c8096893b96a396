"""Copies: direction, host memory, bandwidth, work that hid them, and whether they blocked the
host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.intervals import covered_length, subtract, union_of
from advisor.core.trace import Copy, Trace

if TYPE_CHECKING:
    from advisor.measure import Analysis

COPIES_SCHEMA: dict[str, Any] = {
    "gpu": pl.Int32,  # row of trace.gpu
    "ts": pl.Int64,  # ns
    "dur": pl.Int64,  # ns
    "copy": Copy,
    "memory": pl.String,  # pageable, pinned; null if not recorded, or without a host side
    "bytes": pl.Int64,
    "gbps": pl.Float64,  # GB/s
    "exposed": pl.Int64,  # ns not under compute or communication, inside the used steps
    "blocking": pl.Boolean,  # the host was blocked until it ended
    "stream": pl.Int64,
    "op": pl.Int32,  # row of trace.cpu
    "line": pl.Int32,  # row of the user's Python frame
    "step": pl.Int32,
    "same_stream": pl.Boolean,  # on the stream with the most compute; null without compute
}

MIN_BLOCKED_SHARE = 0.5
"""Minimum share of a copy that its call overlaps when it blocks the host. Measured: pageable
device-to-host calls end 8 to 12 us after their copy (A100, V100); large pageable host-to-device
calls return some 10 us before the copy of 35 ms ends (the last pieces are staged); small staged
ones and pinned ones return before the copy begins."""


def host_memory(trace: Trace) -> pl.Series:
    """Return ``pageable`` or ``pinned`` for the host side of a copy, aligned with ``trace.gpu``;
    null if the file does not say, the memory is managed, or no host memory takes part."""
    side = trace.gpu.select(
        pl.when(pl.col("copy") == "HtoD")
        .then("src")
        .when(pl.col("copy") == "DtoH")
        .then("dst")
        .otherwise(None)
        .cast(pl.String)
        .str.to_lowercase()
        .alias("memory")
    )["memory"]
    return side.set(~side.is_in(["pageable", "pinned"]).fill_null(True), None)


def copies_blocking_host(trace: Trace) -> NDArray[np.bool_]:
    """Find copies between host and device whose own call blocked the host, aligned with
    ``trace.gpu``.

    The call must last through most of the copy (see MIN_BLOCKED_SHARE). True for copies from or to
    memory that is not known to be pinned, and for pinned ones through the synchronous API."""
    gpu = trace.gpu
    rows = np.flatnonzero(
        gpu.select(pl.col("copy").is_in(["HtoD", "DtoH"]) & pl.col("launch").is_not_null())
        .to_series()
        .fill_null(False)
        .to_numpy()
    )
    is_blocking = np.zeros(gpu.height, dtype=bool)
    if not len(rows):
        return is_blocking
    launch = gpu["launch"].gather(rows)
    call = trace.cpu.select("ts", "dur", "call")[launch.to_numpy()]
    ts, dur = gpu["ts"].to_numpy()[rows], gpu["dur"].to_numpy()[rows]
    start = call["ts"].to_numpy()
    end = start + call["dur"].to_numpy()
    overlap = np.minimum(end, ts + dur) - np.maximum(start, ts)
    long_enough = (overlap >= MIN_BLOCKED_SHARE * dur) & (end >= ts)
    is_synchronous = (call["call"] == "memcpy_blocking").fill_null(False).to_numpy()
    is_pinned = (host_memory(trace).gather(rows) == "pinned").fill_null(False).to_numpy()
    is_blocking[rows] = long_enough & (is_synchronous | ~is_pinned)
    return is_blocking


def compute_stream(a: Analysis) -> int | None:
    """Return the stream with the most compute time in the used steps, or ``None`` without
    compute."""
    rows = (a.trace.gpu["kind"] == "kernel").to_numpy() & a.in_window
    rows &= ~a.kernels["communication"].to_numpy()
    work = a.trace.gpu.select("stream", "dur").filter(pl.Series(rows))
    if work.is_empty():
        return None
    totals = work.group_by("stream").agg(pl.col("dur").sum()).sort("dur", "stream")
    return int(totals["stream"][-1])


def find_copies(a: Analysis) -> pl.DataFrame:
    """Find copies inside ``spans``, with the columns of COPIES_SCHEMA, ordered by ``ts``.

    ``exposed`` is measured for each copy separately. An instant in which two exposed copies run
    counts in both rows, so the sum may exceed ``breakdown.copies``."""
    from advisor.measure.host.stacks import frame_of
    from advisor.measure.steps.steps import step_of

    trace = a.trace
    gpu = trace.gpu
    rows = np.flatnonzero(
        (gpu["kind"] == "memcpy").to_numpy() & a.on_device & ~a.kernels["communication"].to_numpy()
    )
    work = gpu[rows]
    ts, dur = work["ts"].to_numpy(), work["dur"].to_numpy()
    breakdown = a.breakdown
    uncovered = subtract(a.spans, union_of(breakdown.compute, breakdown.all_communication))
    copy_syncs = a.syncs.filter(pl.col("copy").is_not_null())
    is_blocking = copies_blocking_host(trace)[rows] | np.isin(rows, copy_syncs["copy"].to_numpy())
    main_stream = compute_stream(a)
    op = work["op"]
    return pl.DataFrame(
        {
            "gpu": rows,
            "ts": ts,
            "dur": dur,
            "copy": work["copy"],
            "memory": host_memory(trace).gather(rows),
            "bytes": work["bytes"],
            "gbps": work["gbps"],
            "exposed": covered_length(ts, ts + dur, uncovered),
            "blocking": is_blocking,
            "stream": work["stream"],
            "op": op,
            "line": frame_of(a, work["launch"].fill_null(op)),
            "step": step_of(a.steps, ts, ts + dur),
            "same_stream": (
                work["stream"] == main_stream
                if main_stream is not None
                else pl.Series([None], dtype=pl.Boolean).new_from_index(0, len(rows))
            ),
        },
        schema=COPIES_SCHEMA,
        strict=False,
    )


MIN_UPLOADS_BETWEEN_KERNELS, MIN_UPLOAD_SIZES = 8, 3
"""Minimum number of uploads per step that follow a kernel, and of their sizes, for weights. The
uploads of micro-batches and tiles have one size, and a smaller one for a remainder."""
MIN_UPLOAD_BYTES = 65_536


def repeated_uploads(a: Analysis) -> pl.DataFrame:
    """Return the rows of ``a.copies`` that upload the same between kernels in each step: weights
    that live on the host. None without at least two used steps, or if a step copies as much back,
    as offloaded activations do."""
    large = a.copies.filter(pl.col("bytes") >= MIN_UPLOAD_BYTES, pl.col("step").is_not_null())
    uploads = large.filter(pl.col("copy") == "HtoD")
    if a.step_count < 2 or uploads.is_empty():
        return uploads.clear()
    kernel_ts = a.trace.gpu["ts"].filter(a.trace.gpu["kind"] == "kernel").sort().to_numpy()
    before = np.searchsorted(kernel_ts, uploads["ts"].to_numpy())
    starts = a.steps.table["ts"].gather(uploads["step"]).to_numpy()
    is_between = before > np.searchsorted(kernel_ts, starts)
    # the first of several in a row
    is_first = np.append(True, np.diff(before) > 0)
    between = uploads.filter(pl.Series(is_between))
    steps = between["step"].n_unique()
    count = int((is_between & is_first).sum()) / max(1, steps)
    by_size = between.group_by("bytes", "step").len().group_by("bytes").agg("len")
    same = by_size.filter(
        pl.col("len").list.len() == steps, pl.col("len").list.min() == pl.col("len").list.max()
    )
    fetched = int(large.filter(pl.col("copy") == "DtoH")["bytes"].sum() or 0)
    is_repeated = (
        steps >= 2
        and steps >= a.step_count - 1
        and count >= MIN_UPLOADS_BETWEEN_KERNELS
        and same.height >= MIN_UPLOAD_SIZES
        and (a.forward_only or fetched < 0.5 * int(between["bytes"].sum() or 0))
    )
    return between.join(same, on="bytes", how="semi") if is_repeated else uploads.clear()
