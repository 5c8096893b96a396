"""Copies: direction, host memory, bandwidth, work that hid them, and whether they blocked the
host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

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

_MIN_BLOCKED_SHARE = 0.5
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

    The call must last through most of the copy (see _MIN_BLOCKED_SHARE). True for copies from or to
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
    long_enough = (overlap >= _MIN_BLOCKED_SHARE * dur) & (end >= ts)
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


# -- tensors that live on the host -----------------------------------------------------------------

MIN_RUNS = 4
"""Minimum number of runs of copies per step, with kernels in between, of one direction."""
MIN_UPLOAD_RUNS, MIN_UPLOAD_SIZES = 8, 3
"""Minimum number of runs of uploads per step, and of their sizes, without copies back. The uploads
of micro-batches and tiles have one size, and a smaller one for a remainder."""
MIN_MATCHED_SHARE = 0.8
"""Minimum share of the uploaded bytes in copies that match others by their size."""
MIN_WEIGHT_BYTES = 256 << 20
"""Minimum bytes of weights per step. Inputs in many parts, such as the features of a recommender,
are smaller."""
MIN_OFFLOAD_BYTES = 65_536


class Offloaded(NamedTuple):
    """Copies of tensors that live on the host between their uses."""

    kind: str
    """``weights``, or ``activations`` that the forward pass copies to the host."""
    copies: pl.DataFrame
    """Rows of ``Analysis.copies``."""
    share: float
    """Their share of the exposed copies between host and device."""


def find_offloaded(a: Analysis) -> Offloaded | None:
    """Find tensors that live on the host: copies between the kernels of each step, where inputs
    come before them.

    Weights are uploaded in the same sizes in each step. Where the sizes that a training step copies
    to the host come back later, they are activations; without training they are weights that are
    moved away after use. Copies behind each other without a kernel in between are one run."""
    large = a.copies.filter(
        pl.col("bytes") >= MIN_OFFLOAD_BYTES,
        pl.col("step").is_not_null(),
        pl.col("copy").is_in(["HtoD", "DtoH"]),
    )
    if large.is_empty():
        return None
    uploads, fetches = _between_kernels(a, large)
    if uploads is None:
        return None
    if fetches is not None and _match_sizes(uploads, fetches):
        kind, copies = "weights" if a.forward_only else "activations", [uploads, fetches]
    elif (repeated := _repeated(a, uploads)) is not None:
        kind, copies = "weights", [repeated]
    else:
        return None
    rows = pl.concat(copies)
    every = a.copies.filter(pl.col("copy").is_in(["HtoD", "DtoH"]))["exposed"].sum()
    return Offloaded(kind, rows, int(rows["exposed"].sum()) / max(1, int(every)))


def _between_kernels(
    a: Analysis, copies: pl.DataFrame
) -> tuple[pl.DataFrame | None, pl.DataFrame | None]:
    """Return the uploads and the copies to the host after the first kernel of their step, with
    their ``run``. ``None`` for a direction that is not in several runs per step."""
    is_kernel = (a.trace.gpu["kind"] == "kernel").to_numpy() & a.on_device
    kernel_ts = np.sort(a.trace.gpu["ts"].to_numpy()[is_kernel])
    starts = a.steps.table["ts"].gather(copies["step"]).to_numpy()
    run = np.searchsorted(kernel_ts, copies["ts"].to_numpy())
    chosen = copies.with_columns(run=pl.Series(run))
    chosen = chosen.filter(pl.Series(run > np.searchsorted(kernel_ts, starts)))
    uploads, fetches = (chosen.filter(pl.col("copy") == copy) for copy in ("HtoD", "DtoH"))
    min_runs = MIN_RUNS * a.step_count
    return (
        uploads if uploads["run"].n_unique() >= min_runs else None,
        fetches if fetches["run"].n_unique() >= min_runs else None,
    )


def _match_sizes(uploads: pl.DataFrame, fetches: pl.DataFrame) -> bool:
    """Return whether most uploaded bytes were copied to the host in the same sizes."""
    counts = (each.group_by("step", "bytes").len() for each in (uploads, fetches))
    matched = next(counts).join(next(counts), on=["step", "bytes"], suffix="_back")
    both = (pl.min_horizontal("len", "len_back") * pl.col("bytes")).sum()
    total = int(uploads["bytes"].sum())
    return int(matched.select(both).item() or 0) >= MIN_MATCHED_SHARE * total


def _repeated(a: Analysis, uploads: pl.DataFrame) -> pl.DataFrame | None:
    """Return uploads of the sizes that occur equally often in each step, ``None`` if too few."""
    steps = uploads["step"].n_unique()
    by_size = uploads.group_by("bytes", "step").len().group_by("bytes").agg("len")
    same = by_size.filter(
        pl.col("len").list.len() == steps, pl.col("len").list.min() == pl.col("len").list.max()
    )
    if steps < max(2, a.step_count - 1) or same.height < MIN_UPLOAD_SIZES:
        return None
    if uploads["run"].n_unique() < MIN_UPLOAD_RUNS * steps:
        return None
    repeated = uploads.join(same, on="bytes", how="semi")
    return repeated if int(repeated["bytes"].sum()) >= MIN_WEIGHT_BYTES * steps else None
