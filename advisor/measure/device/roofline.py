"""Totals of kernels by family, by name with the roofline, and over the step (MFU); resident blocks
of a kernel on a multiprocessor, and waves of a grid.

Blocks: the calculation of NVIDIA's ``cuda_occupancy.h`` (CUDA 13.0,
``cudaOccMaxActiveBlocksPerMultiprocessor``), without the parts that a trace does not have:
barriers, thread block clusters, and a shared-memory carve-out that the program requested."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.intervals import Floats, Ints, covered_length
from advisor.core.trace import Device, Trace
from advisor.measure.device.families import MATRIX

if TYPE_CHECKING:
    from advisor.core.gpus import GpuSpec
    from advisor.measure import Analysis


_MIN_KNOWN_SHARE = 0.8
"""Minimum share of the time with known FLOPs or bytes for a rate, a roofline share or the MFU.
Below it the figure would describe something else."""


def sum_families(a: Analysis) -> pl.DataFrame:
    """Sum device time by family inside ``spans``: ``family``, ``count``, ``dur`` (ns summed),
    ``share`` (of summed compute and communication kernel time), ``flops`` and ``moved`` (sums of
    the known values, null if none is known). Copies and memsets are listed too."""
    rows = select_device_rows(a)
    kernels = rows.filter(pl.col("kind") == "kernel")["ns"].sum()
    return (
        rows.group_by("family")
        .agg(
            pl.len().cast(pl.Int64).alias("count"),
            pl.col("ns").sum().alias("dur"),
            _known_sum("flops"),
            _known_sum("moved"),
        )
        .with_columns(share=_ratio(pl.col("dur"), pl.lit(kernels)))
        .sort("dur", "family", descending=[True, False])
        .select("family", "count", "dur", "share", "flops", "moved")
    )


def sum_kernels(a: Analysis) -> pl.DataFrame:
    """Sum device time by kernel name inside ``spans``: ``name``, ``family``, ``count``, ``dur``
    (ns), ``share``, ``occupancy`` (time-weighted percent; null), ``blocks_per_sm`` (time-weighted;
    null), ``tensor_core``, ``flops_per_s``, ``bytes_per_s``, ``roofline`` (share of the attainable
    peak; null if not measured), ``op_name``; largest ``dur`` first.

    ``roofline`` is the shortest time by the device's peak and bandwidth, over the time taken:
    max(FLOPs / peak of the dtype, bytes / memory bandwidth) / duration. Kernels that are neither
    matrix products, convolutions nor attention are compared only with bandwidth if no peak is known
    for their dtype. It can exceed 1: data in L2 is faster than memory, and Winograd needs fewer
    FLOPs than are counted."""
    rows = select_device_rows(a).filter(pl.col("kind") == "kernel")
    total = rows["ns"].sum()
    rows = rows.with_columns(ideal=_estimate_ideal_ns(rows, a.hardware))
    by_parts = (
        rows.group_by("name", "family", "op_name", "tensor_core")
        .agg(
            pl.len().cast(pl.Int64).alias("count"),
            pl.col("ns").sum().alias("dur"),
            *(_time_weighted_sum(name) for name in ("occupancy", "blocks_per_sm")),
            *(_known_time(name) for name in ("occupancy", "blocks_per_sm")),
            *(_known_sum(name) for name in ("flops", "moved", "ideal")),
            *(_known_time(name) for name in ("flops", "moved", "ideal")),
        )
        .sort("dur", "name", "op_name", descending=[True, False, False], nulls_last=True)
    )
    # One row per name, with the family, unit and operator of its longest part.
    summed_columns = ["occupancy", "blocks_per_sm", "flops", "moved", "ideal"]
    return (
        by_parts.group_by("name", maintain_order=True)
        .agg(
            pl.col("family", "tensor_core", "op_name").first(),
            pl.col("count", "dur").sum(),
            *(
                pl.when(pl.col(column).is_not_null().any()).then(pl.col(column).sum()).alias(column)
                for column in summed_columns
            ),
            *(pl.col(f"{column}_ns").sum() for column in summed_columns),
        )
        .sort("dur", "name", descending=[True, False])
        .select(
            "name",
            "family",
            "count",
            "dur",
            _ratio(pl.col("dur"), pl.lit(total)).alias("share"),
            _ratio(pl.col("occupancy"), pl.col("occupancy_ns")).alias("occupancy"),
            _ratio(pl.col("blocks_per_sm"), pl.col("blocks_per_sm_ns")).alias("blocks_per_sm"),
            "tensor_core",
            _rate("flops").alias("flops_per_s"),
            _rate("moved").alias("bytes_per_s"),
            (_rate("ideal") / 1e9).alias("roofline"),
            "op_name",
        )
    )


MIN_FORMAT_SHARE = 0.5
"""Minimum share of the MFU in one number format for naming the format."""


class Utilization(NamedTuple):
    """FLOPs of the steps over the FLOPs that the device could do in their time."""

    share: float
    """Share, 0 to 1."""
    format: str | None
    """Number format of most of the FLOPs, such as ``FP32``, if its peak is below the device's
    16-bit tensor-core peak. Otherwise ``None``."""


def model_flop_utilization(a: Analysis) -> Utilization | None:
    """Return the model FLOP utilisation: FLOPs of all kernels with known shapes over the step time
    times the peak of their dtype. Work in several formats is compared with the peak of each.
    ``None`` if shapes or peak are unknown, or shapes cover less than _MIN_KNOWN_SHARE of GEMM,
    convolution and attention time."""
    hardware = a.hardware
    if hardware is None or not a.span_ns:
        return None
    rows = select_device_rows(a).filter(pl.col("kind") == "kernel")
    rows = rows.with_columns(peak=_find_peaks(rows, hardware))
    matrix = rows.filter(pl.col("family").is_in(list(MATRIX)))
    is_known = pl.col("flops").is_not_null() & (
        pl.col("peak").is_not_null() | (pl.col("flops") == 0)
    )
    time, known_ns = int(matrix["ns"].sum()), int(matrix.filter(is_known)["ns"].sum())
    if not time or known_ns < _MIN_KNOWN_SHARE * time:
        return None
    busy = rows.with_columns(busy=(pl.col("flops") / pl.col("peak")).fill_nan(None))
    formats = busy.group_by("dtype", "peak").agg(pl.col("busy").sum())
    formats = formats.sort("busy", "dtype", descending=True)
    total = float(busy["busy"].sum())
    name, peak, format_busy = formats.row(0)
    best_peak = hardware.peak("bf16") or hardware.peak("fp16") or 0.0
    is_below = peak is not None and peak < best_peak and format_busy >= MIN_FORMAT_SHARE * total
    return Utilization(total / (a.span_ns / 1e9), str(name).upper() if is_below else None)


def select_device_rows(a: Analysis) -> pl.DataFrame:
    """Return the device rows that count, with their columns of ``Analysis.kernels``. ``ns`` is the
    part of the duration inside the spans; FLOPs and bytes are cut in proportion."""
    gpu, kernels = a.trace.gpu, a.kernels
    index = np.flatnonzero(a.in_window)
    ts, dur = gpu["ts"].to_numpy()[index], gpu["dur"].to_numpy()[index]
    ns = covered_length(ts, ts + dur, a.spans)
    counted_share = pl.Series(ns / np.maximum(dur, 1))
    properties = kernels[index]
    return pl.DataFrame(
        {
            "row": index,
            "kind": gpu["kind"].gather(index),
            "name": gpu["name"].gather(index),
            "ns": ns,
            "blocks_per_sm": gpu["blocks_per_sm"].gather(index),
            "flops": properties["flops"] * counted_share,
            "moved": properties["moved"] * counted_share,
            **{
                name: properties[name]
                for name in ("family", "tensor_core", "dtype", "occupancy", "op_name", "op_row")
            },
        }
    )


def _find_peaks(rows: pl.DataFrame, hardware: GpuSpec) -> pl.Series:
    """Return the peak of each row's dtype, FLOP/s, or null if dtype or peak is unknown."""
    formats = rows["dtype"].unique().drop_nulls().to_list()
    peaks = {name: hardware.peak(name) for name in formats}
    known_peaks = {name: peak for name, peak in peaks.items() if peak is not None}
    format_names = rows["dtype"].cast(pl.String)
    if not known_peaks:
        return pl.Series([None], dtype=pl.Float64).new_from_index(0, rows.height)
    return format_names.replace_strict(known_peaks, default=None, return_dtype=pl.Float64)


def _estimate_ideal_ns(rows: pl.DataFrame, hardware: GpuSpec | None) -> pl.Series:
    """Return each row's shortest time on the device, ns, or null if work or limits are unknown."""
    if hardware is None:
        return pl.Series([None], dtype=pl.Float64).new_from_index(0, rows.height)
    frame = rows.select("family", "flops", "moved", peak=_find_peaks(rows, hardware))
    memory = pl.col("moved") / hardware.bandwidth * 1e9
    arithmetic = pl.col("flops") / pl.col("peak") * 1e9
    roofline = pl.when(arithmetic.is_not_null() & memory.is_not_null()).then(
        pl.max_horizontal(arithmetic, memory)
    )
    is_matrix = pl.col("family").is_in(list(MATRIX))
    ideal = pl.when(is_matrix).then(roofline).otherwise(pl.coalesce(roofline, memory))
    return frame.select(ideal.alias("ideal"))["ideal"]


def _known_sum(name: str) -> pl.Expr:
    """Sum the known values, or return null if there are none."""
    return pl.when(pl.col(name).is_not_null().any()).then(pl.col(name).sum()).alias(name)


def _time_weighted_sum(name: str) -> pl.Expr:
    """Sum a value weighted by its time."""
    product = pl.col(name) * pl.col("ns")
    return pl.when(product.is_not_null().any()).then(product.sum()).alias(name)


def _known_time(name: str) -> pl.Expr:
    return pl.col("ns").filter(pl.col(name).is_not_null()).sum().alias(f"{name}_ns")


def _ratio(part: pl.Expr, total: pl.Expr) -> pl.Expr:
    """Return ``part / whole``; null where ``total`` is not positive."""
    return pl.when(total > 0).then(part / total)


def _rate(name: str) -> pl.Expr:
    """Return an amount per second of the time for which it is known, or null if too little time."""
    known_ns = pl.col(f"{name}_ns")
    return pl.when((known_ns > 0) & (known_ns >= _MIN_KNOWN_SHARE * pl.col("dur"))).then(
        pl.col(name) / known_ns * 1e9
    )


REGISTER_UNIT = 256
"""Unit in which registers are allocated to a warp (cudaOccRegAllocationGranularity)."""
MAX_THREADS_PER_BLOCK = 1024
"""Maximum threads of a block, compute capability 2.0 to 12.x (CUDA C++ Programming Guide)."""
RESERVED_SHARED = 1024
"""Bytes of shared memory that CUDA reserves per block from compute capability 8.0 on."""

_MAX_BLOCKS_PER_SM: dict[tuple[int, int], int] = {
    (3, 0): 16, (3, 2): 16, (3, 5): 16, (3, 7): 16,
    (5, 0): 32, (5, 2): 32, (5, 3): 32, (6, 0): 32, (6, 1): 32, (6, 2): 32,
    (7, 0): 32, (7, 2): 32, (7, 5): 16,
    (8, 0): 32, (8, 6): 16, (8, 7): 16, (8, 9): 24, (9, 0): 32,
    (10, 0): 32, (10, 1): 24, (10, 3): 32, (11, 0): 24, (12, 0): 24, (12, 1): 24,
}  # fmt: skip
"""Compute capability -> maximum resident blocks per SM (cudaOccMaxBlocksPerMultiprocessor, and the
CUDA C++ Programming Guide's table of technical specifications)."""

_SM_SIZES: dict[tuple[int, int], tuple[int, int]] = {
    (7, 0): (2048, 96), (7, 5): (1024, 64), (8, 0): (2048, 164), (8, 6): (1536, 100),
    (8, 7): (1536, 164), (8, 9): (1536, 100), (9, 0): (2048, 228), (10, 0): (2048, 228),
    (10, 3): (2048, 228), (12, 0): (1536, 100), (12, 1): (1536, 100),
}  # fmt: skip
"""Compute capability -> maximum threads and KiB of shared memory per SM (the same table)."""
_REGISTERS_PER_SM = 65_536
"""Registers of an SM, from compute capability 5.0 on (the same table)."""


def multiprocessor_limits(compute: tuple[int, int]) -> Device | None:
    """Return the limits of an SM of a compute capability, or ``None`` if unknown."""
    if (sizes := _SM_SIZES.get(compute)) is None:
        return None
    threads, kilobytes = sizes
    return Device(
        0,
        compute=compute,
        max_threads_per_sm=threads,
        registers_per_sm=_REGISTERS_PER_SM,
        shared_per_sm=kilobytes << 10,
    )


def find_limiters(
    blocks: Floats, threads: Ints, registers: Ints, shared: Ints, device: Device
) -> NDArray[np.object_]:
    """Name the resource that limits :func:`active_blocks`: without it more blocks would fit."""
    zero = np.zeros_like(registers)
    result = np.full(len(threads), "block sizes", dtype=object)
    for name, sizes in (("registers", (zero, shared)), ("shared memory", (registers, zero))):
        free = active_blocks(threads, *sizes, device)
        result = result if free is None else np.where(free > blocks, name, result)
    return result


def active_blocks(
    threads: Ints, registers: Ints, shared: Ints, device: Device, *, amd: bool = False
) -> Floats | None:
    """Count the blocks of a kernel that fit on one SM at once, for each launch. NaN if it cannot
    run.

    ``threads`` per block, ``registers`` per thread, ``shared`` bytes per block (static and
    dynamic). ``None`` if the device's limits are unknown, or it is not an NVIDIA GPU."""
    compute = device.compute
    limit = None if compute is None else _MAX_BLOCKS_PER_SM.get(compute)
    if amd or compute is None or limit is None:
        return None
    if device.max_threads_per_sm is None or device.registers_per_sm is None:
        return None
    if device.shared_per_sm is None or device.warp_size not in (None, 32):
        return None
    warps = np.maximum(-(-threads // 32), 1)
    by_warps = device.max_threads_per_sm // 32 // warps
    # Registers are in sub-partitions, and a warp is in one of them.
    parts = 2 if compute == (6, 0) else 4
    registers_per_warp = -(-np.maximum(registers, 1) * 32 // REGISTER_UNIT) * REGISTER_UNIT
    by_registers = device.registers_per_sm // parts // registers_per_warp * parts // warps
    by_registers = np.where(registers > 0, by_registers, limit)
    # A launch is refused when its registers, rounded up to all four partitions, exceed a block's
    # (and on GP100, which has two, when the other Pascals could not run it).
    is_refused = registers_per_warp * -(-warps // 4) * 4 > device.registers_per_sm
    is_refused |= device.registers_per_sm // 4 // registers_per_warp * 4 < warps
    shared_unit = 128 if compute >= (8, 0) else 256
    shared_used = shared + (RESERVED_SHARED if compute >= (8, 0) else 0)
    shared_used = -(-shared_used // shared_unit) * shared_unit
    by_shared = np.where(shared_used > 0, device.shared_per_sm // np.maximum(shared_used, 1), limit)
    result = np.minimum(np.minimum(by_warps, by_registers), np.minimum(by_shared, limit))
    is_possible = (threads > 0) & (threads <= MAX_THREADS_PER_BLOCK) & (result > 0)
    is_possible &= ~(is_refused & (registers > 0)) & (shared >= 0) & (registers >= 0)
    return np.where(is_possible, result, np.nan).astype(np.float64)


class Residency(NamedTuple):
    """Waves and occupancy, aligned with ``trace.gpu``. Null if not a kernel, or not recorded."""

    waves: pl.Series
    """Grid blocks over the blocks that the whole device holds at once. Below 1, part of the
    device has no work."""
    occupancy: pl.Series
    """Estimated achieved occupancy, percent: mean resident warps of an SM over the warps it can
    hold (Kineto's formula, not rounded)."""


def measure_residency(trace: Trace) -> Residency:
    """Measure waves and occupancy of every kernel.

    Active blocks are the profiler's own if the file has them, else :func:`active_blocks`. If
    neither is known, occupancy is what the profiler wrote, except zeros. It writes 0 for every
    kernel with more than 48 KiB of shared memory per block (it takes the limit without opt-in),
    which is most tensor-core GEMMs, and for values that round to 0."""
    gpu = trace.gpu
    waves = np.full(gpu.height, np.nan)
    reported = _to_floats(gpu["occupancy"])
    occupancy = np.where(reported > 0, reported, np.nan)
    blocks, threads = _to_floats(gpu["blocks"]), _to_floats(gpu["threads"])
    profiled_blocks = _to_floats(gpu["active_blocks"])
    is_kernel = (gpu["kind"] == "kernel").to_numpy()
    for device in trace.meta.devices:
        if not device.sms:
            continue
        rows = np.flatnonzero(is_kernel & (gpu["device"] == device.id).fill_null(False).to_numpy())
        if not len(rows):
            continue
        active = np.where(profiled_blocks[rows] > 0, profiled_blocks[rows], np.nan)
        if np.isnan(active).any():
            computed = _compute_active_blocks(gpu, rows, device, trace.meta.vendor == "amd")
            if computed is not None:
                active = np.where(np.isnan(active), computed, active)
        blocks_per_sm = blocks[rows] / device.sms
        waves[rows] = blocks_per_sm / active
        if device.max_threads_per_sm:
            resident = np.minimum(blocks_per_sm, active) * threads[rows] / device.max_threads_per_sm
            occupancy[rows] = np.where(np.isnan(resident), occupancy[rows], 100 * resident)
    return Residency(
        pl.Series("waves", waves).fill_nan(None), pl.Series("occupancy", occupancy).fill_nan(None)
    )


def _to_floats(column: pl.Series) -> Floats:
    values: Floats = column.cast(pl.Float64).fill_null(np.nan).to_numpy()
    return values


def _compute_active_blocks(
    gpu: pl.DataFrame, rows: NDArray[np.int64], device: Device, amd: bool
) -> Floats | None:
    columns: dict[str, Ints] = {}
    is_missing = np.zeros(len(rows), dtype=bool)
    for name in ("threads", "registers", "shared"):
        column = gpu[name].gather(rows)
        is_missing |= column.is_null().to_numpy()
        # Damaged files hold absurd figures; the bound keeps the arithmetic inside int64.
        columns[name] = column.cast(pl.Int64).fill_null(0).clip(-1, 1 << 31).to_numpy()
    blocks = active_blocks(**columns, device=device, amd=amd)
    return None if blocks is None else np.where(is_missing, np.nan, blocks)
