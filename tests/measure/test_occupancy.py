"""Active blocks, waves and occupancy against NVIDIA's published figures, its own header where a
toolkit is installed, and what Kineto wrote into real traces."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from advisor.core.trace import Device
from advisor.measure import Analysis
from advisor.measure.device.roofline import active_blocks
from advisor.read import read_trace
from advisor.testing import TraceBuilder

# Threads, registers and shared memory an SM, as cudaGetDeviceProperties reports them.
LIMITS: dict[tuple[int, int], tuple[int, int, int, int]] = {
    (6, 0): (2048, 65536, 65536, 49152),
    (6, 1): (2048, 65536, 98304, 49152),
    (7, 0): (2048, 65536, 98304, 98304),
    (7, 5): (1024, 65536, 65536, 65536),
    (8, 0): (2048, 65536, 167936, 166912),
    (8, 6): (1536, 65536, 102400, 101376),
    (8, 9): (1536, 65536, 102400, 101376),
    (9, 0): (2048, 65536, 233472, 232448),
    (10, 0): (2048, 65536, 233472, 232448),
    (12, 0): (1536, 65536, 102400, 101376),
}


def device(compute: tuple[int, int], sms: int = 100) -> Device:
    threads, registers, shared, optin = LIMITS[compute]
    return Device(
        0,
        sms=sms,
        compute=compute,
        max_threads_per_sm=threads,
        registers_per_sm=registers,
        shared_per_sm=shared,
        shared_per_block_optin=optin,
        warp_size=32,
    )


def blocks(compute: tuple[int, int], threads: int, registers: int, shared: int = 0) -> float:
    result = active_blocks(
        np.array([threads]), np.array([registers]), np.array([shared]), device(compute)
    )
    assert result is not None
    return float(result[0])


def test_the_two_examples_of_nvidias_best_practices_guide() -> None:
    """Section "Calculating Occupancy", compute capability 7.0: 37 registers give 12 blocks of 128
    threads (75%), but only four of 320 threads (63%)."""
    assert blocks((7, 0), 128, 37) == 12
    assert 12 * 128 / 2048 == 0.75
    assert blocks((7, 0), 320, 37) == 4
    assert round(4 * 320 / 2048, 2) == 0.62  # printed there as 63%


@pytest.mark.parametrize(
    ("compute", "threads", "registers", "shared", "expected", "why"),
    [
        ((8, 0), 1024, 32, 0, 2, "2048 threads an SM"),
        ((8, 0), 32, 16, 0, 32, "32 blocks an SM"),
        ((8, 6), 32, 16, 0, 16, "16 blocks an SM"),
        ((8, 9), 32, 16, 0, 24, "24 blocks an SM"),
        ((7, 5), 1024, 32, 0, 1, "1024 threads an SM on Turing"),
        # 255 registers: ceil(255 * 32 / 256) * 256 = 8192 a warp, two warps in each of the four
        # partitions of 16384: eight warps, and a block of 128 threads has four.
        ((8, 0), 128, 255, 0, 2, "registers"),
        ((8, 0), 256, 255, 0, 1, "registers"),
        # 48 KiB and the reserved 1 KiB: 50176 bytes, three times in 167936.
        ((8, 0), 128, 32, 49152, 3, "shared memory with 1 KiB reserved"),
        # The same on Volta, with nothing reserved: two in 98304.
        ((7, 0), 128, 32, 49152, 2, "shared memory"),
        # 100 bytes become 256 on Volta: 384 would fit, 32 blocks are the limit.
        ((7, 0), 64, 16, 100, 32, "blocks an SM"),
        # A Hopper GEMM with 226 KiB and 168 registers.
        ((9, 0), 384, 168, 231424, 1, "shared memory"),
        ((9, 0), 128, 32, 232448, 1, "the most a block may have"),
    ],
)
def test_hand_computed_limits(
    compute: tuple[int, int], threads: int, registers: int, shared: int, expected: int, why: str
) -> None:
    assert blocks(compute, threads, registers, shared) == expected, why


def test_launches_that_cannot_exist_have_no_figure() -> None:
    assert np.isnan(blocks((8, 0), 1025, 32))
    assert np.isnan(blocks((8, 0), 0, 32))
    assert np.isnan(blocks((8, 0), 1024, 128))  # 32 warps of 4096 registers: twice what there is
    assert np.isnan(blocks((8, 0), 128, 32, 1 << 20))


def test_an_unknown_device_has_no_figure() -> None:
    one = np.array([128])
    known = device((8, 0))
    for unknown in (
        Device(0),
        Device(
            0,
            compute=(99, 0),
            max_threads_per_sm=2048,
            registers_per_sm=65536,
            shared_per_sm=167936,
            warp_size=32,
        ),
        Device(0, compute=(9, 0), max_threads_per_sm=2048, shared_per_sm=65536, warp_size=64),
    ):
        assert active_blocks(one, one, one, unknown) is None
    assert active_blocks(one, one, one, known, amd=True) is None


HEADER = next(
    (
        path
        for root in ("/usr/local/cuda/include", "/usr/local/cuda-13.0/include")
        if (path := Path(root) / "cuda_occupancy.h").exists()
    ),
    None,
)

ORACLE = """
#include <stddef.h>
#include "cuda_occupancy.h"
extern "C" int active(int major, int minor, int threads_sm, int registers_sm, size_t shared_sm,
                      size_t optin, int threads, int registers, size_t shared) {
    cudaOccDeviceProp p;
    p.computeMajor = major; p.computeMinor = minor; p.maxThreadsPerBlock = 1024;
    p.maxThreadsPerMultiprocessor = threads_sm; p.regsPerBlock = registers_sm;
    p.regsPerMultiprocessor = registers_sm; p.warpSize = 32; p.sharedMemPerBlock = 49152;
    p.sharedMemPerMultiprocessor = shared_sm; p.numSms = 100; p.sharedMemPerBlockOptin = optin;
    p.reservedSharedMemPerBlock = major >= 8 ? 1024 : 0;
    cudaOccFuncAttributes f;
    f.maxThreadsPerBlock = 1024; f.numRegs = registers; f.sharedSizeBytes = 0;
    f.partitionedGCConfig = PARTITIONED_GC_OFF; f.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    f.maxDynamicSharedSizeBytes = optin; f.numBlockBarriers = 0;
    cudaOccDeviceState s;
    cudaOccResult r;
    if (cudaOccMaxActiveBlocksPerMultiprocessor(&r, &p, &f, &s, threads, shared)) return -1;
    return r.activeBlocksPerMultiprocessor;
}
"""


@pytest.mark.skipif(
    HEADER is None or shutil.which("g++") is None, reason="no CUDA toolkit header, or no g++"
)
@pytest.mark.parametrize("compute", list(LIMITS))
def test_random_launches_agree_with_nvidias_own_header(
    compute: tuple[int, int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    library = tmp_path_factory.getbasetemp() / "occupancy.so"
    if not library.exists():
        source = library.with_suffix(".cc")
        source.write_text(ORACLE)
        command = ["g++", "-shared", "-fPIC", f"-I{HEADER.parent}", "-o", library, source]
        subprocess.run(command, check=True)
    oracle = ctypes.CDLL(str(library)).active
    oracle.argtypes = [ctypes.c_int] * 4 + [ctypes.c_size_t] * 2 + [ctypes.c_int] * 2
    oracle.argtypes += [ctypes.c_size_t]
    rng = np.random.default_rng(7)
    count = 3000
    threads, registers = rng.integers(1, 1025, count), rng.integers(1, 256, count)
    limits = LIMITS[compute]
    shared = np.where(rng.random(count) < 0.3, 0, rng.integers(0, limits[3], count))
    result = active_blocks(threads, registers, shared, device(compute))
    assert result is not None
    expected = [
        oracle(*compute, *limits, int(t), int(r), int(s))
        for t, r, s in zip(threads, registers, shared, strict=True)
    ]
    # The header also refuses blocks whose shared memory with the reserved part exceeds opt-in.
    fits = shared + (1024 if compute >= (8, 0) else 0) <= limits[3]
    assert (np.nan_to_num(result)[fits] == np.array(expected)[fits]).all()
    assert len(set(expected)) > 8


@pytest.mark.parametrize(
    "name",
    [
        "a100_train_6steps",
        "v100_train_copy_heavy",
        "h100_bert_small_inference",
        "b200_eager",
        "nccl_collectives",
        "alexnet",
    ],
)
def test_occupancy_matches_kineto_up_to_rounding(name: str, shared_trace) -> None:
    """Kineto asks cudaOccMaxActiveBlocksPerMultiprocessor, without opt-in to large shared memory,
    so its 0 for more than 48 KiB a block is wrong; ours is not."""
    a = Analysis(read_trace(shared_trace(name)))
    gpu = a.trace.gpu.with_columns(ours=a.kernels["occupancy"])
    gpu = gpu.filter((pl.col("kind") == "kernel") & pl.col("occupancy").is_not_null())
    small = gpu.filter(pl.col("shared") <= 48 * 1024 - 1024)
    assert small.height > 20
    assert (small["ours"] - small["occupancy"]).abs().max() <= 0.501
    large = gpu.filter(pl.col("shared") > 48 * 1024)
    assert (large["occupancy"] == 0).all()
    assert (large["ours"] > 0).all()


def test_waves_are_grid_blocks_over_resident_blocks() -> None:
    b = TraceBuilder("A100")
    with b.step():
        b.launch("one", 10, blocks=864, threads=256, registers=32)  # 8 fit: 864 = 8 * 108
        b.launch("two_and_a_half", 10, blocks=2160, threads=256, registers=32)
        b.launch("quarter", 10, blocks=54, threads=1024, registers=32)  # 2 fit: 54 of 216
        b.copy("DtoD", 1 << 20)
    kernels = b.analysis().kernels
    assert kernels["waves"].to_list() == [1.0, 2.5, 0.25, None]
    # Half a block an SM on average: 0.5 * 1024 of 2048 threads.
    assert kernels["occupancy"].to_list() == [100.0, 100.0, 25.0, None]


def test_the_profilers_own_active_blocks_come_first() -> None:
    b = TraceBuilder("A100")
    with b.step():
        b.launch("limited_by_barriers", 10, blocks=432, threads=256, registers=32)
    b.events[-1]["args"]["occupancy"] = {"activeBlocksPerMultiprocessor": 4}
    kernels = b.analysis().kernels
    assert kernels["waves"].to_list() == [1.0]
    assert kernels["occupancy"].to_list() == [50.0]


def test_waves_are_unmeasured_without_device_properties() -> None:
    b = TraceBuilder(None)
    with b.step():
        b.launch("a", 10, blocks=864, occupancy=37)
        b.launch("b", 10, blocks=864, occupancy=0)  # rounded, or more than 48 KiB of shared memory
    kernels = b.analysis().kernels
    assert kernels["waves"].to_list() == [None, None]
    assert kernels["occupancy"].to_list() == [37.0, None]


def test_an_absurd_launch_does_no_harm() -> None:
    b = TraceBuilder("A100")
    with b.step():
        b.launch("x", 10, blocks=1 << 62, threads=1 << 30, registers=1 << 30, shared=1 << 62)
        b.launch("y", 10, blocks=0, threads=0, registers=0, shared=0)
    assert b.analysis().kernels["waves"].to_list() == [None, None]
