"""Copies: direction, host memory, bandwidth, what hid them, and whether they held the host."""

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
    "memory": pl.String,  # pageable, pinned; null: not recorded, or no host side
    "bytes": pl.Int64,
    "gbps": pl.Float64,  # GB/s
    "exposed": pl.Int64,  # ns not under compute or communication, inside the used steps
    "blocking": pl.Boolean,  # the host was held until it ended
    "stream": pl.Int64,
    "op": pl.Int32,  # row of trace.cpu
    "line": pl.Int32,  # row of the user's Python frame
    "step": pl.Int32,
    "same_stream": pl.Boolean,  # on the stream that most compute runs on; null: no compute
}

HELD_SHARE = 0.5
"""A copy call held the host when it lasted through at least this share of the copy. Measured:
pageable device-to-host calls end 8 to 12 us after their copy (A100, V100); large pageable
host-to-device calls return some 10 us before the copy of 35 ms ends (the last pieces are staged);
small staged ones and pinned ones return before the copy begins."""


def host_memory(trace: Trace) -> pl.Series:
    """Return ``pageable`` or ``pinned`` for the host side of a copy, aligned with ``trace.gpu``;
    null where the file does not tell, the memory is managed, or no host memory takes part."""
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
    """Find copies between host and device whose own call held the host, aligned with ``trace.gpu``.

    True for copies from or to memory that is not known to be pinned, when the call lasted through
    most of the copy (see HELD_SHARE), and for pinned ones through the synchronous API."""
    gpu = trace.gpu
    rows = np.flatnonzero(
        gpu.select(pl.col("copy").is_in(["HtoD", "DtoH"]) & pl.col("launch").is_not_null())
        .to_series()
        .fill_null(False)
        .to_numpy()
    )
    held = np.zeros(gpu.height, dtype=bool)
    if not len(rows):
        return held
    launch = gpu["launch"].gather(rows)
    call = trace.cpu.select("ts", "dur", "call")[launch.to_numpy()]
    ts, dur = gpu["ts"].to_numpy()[rows], gpu["dur"].to_numpy()[rows]
    begin = call["ts"].to_numpy()
    end = begin + call["dur"].to_numpy()
    shared = np.minimum(end, ts + dur) - np.maximum(begin, ts)
    long_enough = (shared >= HELD_SHARE * dur) & (end >= ts)
    synchronous = (call["call"] == "memcpy_blocking").fill_null(False).to_numpy()
    pinned = (host_memory(trace).gather(rows) == "pinned").fill_null(False).to_numpy()
    held[rows] = long_enough & (synchronous | ~pinned)
    return held


def compute_stream(a: Analysis) -> int | None:
    """Return the stream with most compute kernel time in the used steps; ``None``: no compute."""
    rows = (a.trace.gpu["kind"] == "kernel").to_numpy() & a.in_window
    rows &= ~a.kernels["communication"].to_numpy()
    work = a.trace.gpu.select("stream", "dur").filter(pl.Series(rows))
    if work.is_empty():
        return None
    totals = work.group_by("stream").agg(pl.col("dur").sum()).sort("dur", "stream")
    return int(totals["stream"][-1])


def find_copies(a: Analysis) -> pl.DataFrame:
    """Find copies inside ``spans``; the columns are those of COPIES_SCHEMA, ordered by ``ts``.

    ``exposed`` is measured for each copy alone: where two exposed copies run at once the instant
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
    parts = a.breakdown
    bare = subtract(a.spans, union_of(parts.compute, parts.all_communication))
    waited = a.syncs.filter(pl.col("copy").is_not_null())
    held = copies_blocking_host(trace)[rows] | np.isin(rows, waited["copy"].to_numpy())
    main = compute_stream(a)
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
            "exposed": covered_length(ts, ts + dur, bare),
            "blocking": held,
            "stream": work["stream"],
            "op": op,
            "line": frame_of(a, work["launch"].fill_null(op)),
            "step": step_of(a.steps, ts, ts + dur),
            "same_stream": (
                work["stream"] == main
                if main is not None
                else pl.Series([None], dtype=pl.Boolean).new_from_index(0, len(rows))
            ),
        },
        schema=COPIES_SCHEMA,
        strict=False,
    )
