"""How many blocks of a kernel fit on a multiprocessor at once, and how many waves a grid makes.

The calculation of NVIDIA's ``cuda_occupancy.h`` (CUDA 13.0,
``cudaOccMaxActiveBlocksPerMultiprocessor``), without what a trace does not tell: barriers, thread
block clusters, and a shared-memory carve-out that the program asked for.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.intervals import Floats, Ints
from advisor.core.trace import Device, Trace

REGISTER_UNIT = 256
"""Registers are allocated to a warp in units of 256 (cudaOccRegAllocationGranularity)."""
MAX_THREADS_PER_BLOCK = 1024
"""The same from compute capability 2.0 to 12.x (CUDA C++ Programming Guide)."""
RESERVED_SHARED = 1024
"""Bytes of shared memory that CUDA keeps a block from compute capability 8.0 on."""

_BLOCKS: dict[tuple[int, int], int] = {
    (3, 0): 16, (3, 2): 16, (3, 5): 16, (3, 7): 16,
    (5, 0): 32, (5, 2): 32, (5, 3): 32, (6, 0): 32, (6, 1): 32, (6, 2): 32,
    (7, 0): 32, (7, 2): 32, (7, 5): 16,
    (8, 0): 32, (8, 6): 16, (8, 7): 16, (8, 9): 24, (9, 0): 32,
    (10, 0): 32, (10, 1): 24, (10, 3): 32, (11, 0): 24, (12, 0): 24, (12, 1): 24,
}  # fmt: skip
"""Compute capability -> resident blocks an SM at most (cudaOccMaxBlocksPerMultiprocessor, and
the CUDA C++ Programming Guide's table of technical specifications)."""

_SIZES: dict[tuple[int, int], tuple[int, int]] = {
    (7, 0): (2048, 96), (7, 5): (1024, 64), (8, 0): (2048, 164), (8, 6): (1536, 100),
    (8, 7): (1536, 164), (8, 9): (1536, 100), (9, 0): (2048, 228), (10, 0): (2048, 228),
    (10, 3): (2048, 228), (12, 0): (1536, 100), (12, 1): (1536, 100),
}  # fmt: skip
"""Compute capability -> threads and KiB of shared memory of an SM at most (the same table)."""
_REGISTERS = 65_536
"""Of an SM, from compute capability 5.0 on (the same table)."""


def multiprocessor_limits(compute: tuple[int, int]) -> Device | None:
    """What an SM of a compute capability holds; ``None``: not known."""
    if (sizes := _SIZES.get(compute)) is None:
        return None
    threads, kilobytes = sizes
    return Device(
        0,
        compute=compute,
        max_threads_per_sm=threads,
        registers_per_sm=_REGISTERS,
        shared_per_sm=kilobytes << 10,
    )


def find_limiters(
    blocks: Floats, threads: Ints, registers: Ints, shared: Ints, device: Device
) -> NDArray[np.object_]:
    """What bounds :func:`active_blocks`: without it more would fit."""
    zero = np.zeros_like(registers)
    result = np.full(len(threads), "block sizes", dtype=object)
    for name, sizes in (("registers", (zero, shared)), ("shared memory", (registers, zero))):
        free = active_blocks(threads, *sizes, device)
        result = result if free is None else np.where(free > blocks, name, result)
    return result


def active_blocks(
    threads: Ints, registers: Ints, shared: Ints, device: Device, *, amd: bool = False
) -> Floats | None:
    """Blocks of a kernel that fit on one SM at once, one value a launch; NaN: it cannot run.

    ``threads`` a block, ``registers`` a thread, ``shared`` bytes per block (static and dynamic).
    ``None``: the device's limits are not known, or it is not NVIDIA's.
    """
    compute = device.compute
    limit = None if compute is None else _BLOCKS.get(compute)
    if amd or compute is None or limit is None:
        return None
    if device.max_threads_per_sm is None or device.registers_per_sm is None:
        return None
    if device.shared_per_sm is None or device.warp_size not in (None, 32):
        return None
    warps = np.maximum(-(-threads // 32), 1)
    by_warps = device.max_threads_per_sm // 32 // warps
    # Registers live in sub-partitions, and a warp in one of them.
    parts = 2 if compute == (6, 0) else 4
    each = -(-np.maximum(registers, 1) * 32 // REGISTER_UNIT) * REGISTER_UNIT
    by_registers = device.registers_per_sm // parts // each * parts // warps
    by_registers = np.where(registers > 0, by_registers, limit)
    # A launch is refused when its registers, rounded up to all four partitions, exceed a block's
    # (and on GP100, which has two, when the other Pascals could not run it).
    refused = each * -(-warps // 4) * 4 > device.registers_per_sm
    refused |= device.registers_per_sm // 4 // each * 4 < warps
    unit = 128 if compute >= (8, 0) else 256
    used = shared + (RESERVED_SHARED if compute >= (8, 0) else 0)
    used = -(-used // unit) * unit
    by_shared = np.where(used > 0, device.shared_per_sm // np.maximum(used, 1), limit)
    result = np.minimum(np.minimum(by_warps, by_registers), np.minimum(by_shared, limit))
    possible = (threads > 0) & (threads <= MAX_THREADS_PER_BLOCK) & (result > 0)
    possible &= ~(refused & (registers > 0)) & (shared >= 0) & (registers >= 0)
    return np.where(possible, result, np.nan).astype(np.float64)


class Residency(NamedTuple):
    """Aligned with ``trace.gpu``; null: not a kernel, or grid or device not recorded."""

    waves: pl.Series
    """Grid blocks over the blocks that the whole device holds at once. Below 1, part of the
    device has no work."""
    occupancy: pl.Series
    """Estimated achieved occupancy, percent: warps of the blocks that are resident on an SM on
    average, of the warps it can hold (Kineto's formula, not rounded)."""


def measure_residency(trace: Trace) -> Residency:
    """Waves and occupancy of every kernel.

    Active blocks are the profiler's own where the file has them, else :func:`active_blocks`.
    Where neither is known, occupancy is what the profiler wrote, except its zeros: it writes 0 for
    every kernel with more than 48 KiB of shared memory a block (it takes the limit without
    opt-in), which is most tensor-core GEMMs, and for what rounds to 0.
    """
    gpu = trace.gpu
    waves = np.full(gpu.height, np.nan)
    reported = _floats(gpu["occupancy"])
    occupancy = np.where(reported > 0, reported, np.nan)
    blocks, threads = _floats(gpu["blocks"]), _floats(gpu["threads"])
    profiled = _floats(gpu["active_blocks"])
    kernel = (gpu["kind"] == "kernel").to_numpy()
    for device in trace.meta.devices:
        if not device.sms:
            continue
        rows = np.flatnonzero(kernel & (gpu["device"] == device.id).fill_null(False).to_numpy())
        if not len(rows):
            continue
        active = np.where(profiled[rows] > 0, profiled[rows], np.nan)
        if np.isnan(active).any():
            computed = _computed(gpu, rows, device, trace.meta.vendor == "amd")
            if computed is not None:
                active = np.where(np.isnan(active), computed, active)
        each = blocks[rows] / device.sms
        waves[rows] = each / active
        if device.max_threads_per_sm:
            resident = np.minimum(each, active) * threads[rows] / device.max_threads_per_sm
            occupancy[rows] = np.where(np.isnan(resident), occupancy[rows], 100 * resident)
    return Residency(
        pl.Series("waves", waves).fill_nan(None), pl.Series("occupancy", occupancy).fill_nan(None)
    )


def _floats(column: pl.Series) -> Floats:
    values: Floats = column.cast(pl.Float64).fill_null(np.nan).to_numpy()
    return values


def _computed(
    gpu: pl.DataFrame, rows: NDArray[np.int64], device: Device, amd: bool
) -> Floats | None:
    columns: dict[str, Ints] = {}
    missing = np.zeros(len(rows), dtype=bool)
    for name in ("threads", "registers", "shared"):
        column = gpu[name].gather(rows)
        missing |= column.is_null().to_numpy()
        # Damaged files hold absurd figures; the bound keeps the arithmetic inside int64.
        columns[name] = column.cast(pl.Int64).fill_null(0).clip(-1, 1 << 31).to_numpy()
    result = active_blocks(**columns, device=device, amd=amd)
    return None if result is None else np.where(missing, np.nan, result)
