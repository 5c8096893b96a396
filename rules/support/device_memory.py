"""Functions of the memory rules: peaks of GPU memory in a trace and over a run, and its holders."""

from contextlib import suppress
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.finding import Location, Select, SkippedCheck
from advisor.core.intervals import Floats
from advisor.measure import Analysis
from advisor.measure.memory.peak_memory import PeakMemory
from advisor.replay.selection import mask_under
from advisor.rules.support.common import run_steps_of
from advisor.testing import TraceBuilder

GIB = 1 << 30

LOWER_PEAK = (
    "Lower the peak: bf16 autocast, activation checkpointing of the largest blocks, a sharded or "
    "8-bit optimizer, or a smaller micro-batch with gradient accumulation."
)
LOWER_PEAK_INFERENCE = (
    "Lower the peak: 16-bit weights, inference_mode, fewer requests at a time, fused attention, or "
    "a shorter or quantized key-value cache."
)
LOWER_PEAK_UNKNOWN = (
    "Lower the peak: 16-bit weights, a smaller batch, fused attention. Where the program trains "
    "also activation checkpointing, or a sharded or 8-bit optimizer."
)
EMPTY_CACHE = r"\bempty_?[cC]ache\b"
"""Pattern of ``torch/cuda/memory.py(…): empty_cache`` and ``<built-in … _cuda_emptyCache>``."""
DRIVER_CALLS = Select(on="host", call=("malloc", "free"))


def frees_of_empty_cache(a: Analysis, min_burst: int = 2) -> tuple[pl.DataFrame, bool]:
    """Return the frees that ``torch.cuda.empty_cache()`` makes (rows of ``Analysis.allocations``),
    and whether Python stacks prove it. Without stacks: frees outside any operator, ``min_burst`` or
    more in a row with no allocation between. The allocator itself frees inside operators."""
    calls = a.allocations.filter(pl.col("call").is_in(["malloc", "free"]))
    free: NDArray[np.bool_] = (calls["call"] == "free").to_numpy()
    under_empty_cache = free & mask_under(a, EMPTY_CACHE)[calls["host"].to_numpy()]
    if under_empty_cache.any():
        return calls.filter(pl.Series(under_empty_cache)), True
    free = free & calls["op"].is_null().to_numpy()
    burst = np.cumsum(np.append(True, free[1:] != free[:-1])) if len(free) else np.zeros(0, int)
    burst_length = np.bincount(burst)[burst] if len(burst) else burst
    return calls.filter(pl.Series(free & (burst_length >= min_burst))), False


def skip_without_events(a: Analysis, what: str) -> SkippedCheck:
    """Return the skipped check of a trace without allocator events: not recorded, or recorded and
    then cut out of the file."""
    if a.trace.meta.profile_memory:
        why = "the profiler recorded allocator events, but they are cut out of this file"
        return SkippedCheck(what=what, why=why, record="")
    why = "allocator events are not recorded"
    return SkippedCheck(what=what, why=why, record="profile_memory=True")


def locate_holders(peak: PeakMemory) -> list[Location]:
    """Find the user's lines that held most memory at the moment that the snapshot is read at."""
    holders = peak.by_line.filter(peak.by_line["file"].is_not_null()).head(3)
    return [
        Location(file=row["file"], line=row["line"], function=row["function"], count=row["blocks"])
        for row in holders.iter_rows(named=True)
    ]


def line_name(file: str | None, line: int | None) -> str:
    """Return ``train.py:12``, or ``""`` if it was not recorded."""
    if not file or line is None:
        return ""
    return f"{file.replace(chr(92), '/').rsplit('/', 1)[-1]}:{line}"


def locate_allocation(
    place: Any, count: int | None = None, op: str | None = None
) -> list[Location]:
    """Return where a part of a snapshot was allocated. Empty if no stack of it was recorded."""
    if place is None or place.file is None:
        return []
    return [Location(file=place.file, line=place.line, function=place.function, count=count, op=op)]


def held_by_others(a: Analysis) -> int:
    """Return the maximum that other processes held of the rank's GPU, bytes, or 0 if unknown."""
    return max((gpu.processes_bytes or 0 for gpu in run_steps_of(a).gpus), default=0)


def last_known(values: Floats) -> float | None:
    valid = values[~np.isnan(values)]
    return float(valid[-1]) if len(valid) else None


def measure_growth(values: Floats) -> tuple[float, bool]:
    """Return (growth of a series over its length, whether it grows steadily).

    Growth is measured by the lowest values of eight equal blocks (four of a short series), so that
    peaks of long sequences and caches that fill up do not count. Steady means that at least six of
    seven blocks (all of a short series) are above the one before, and the last half still grows at
    half the rate of the first or more."""
    values = values[~np.isnan(values)]
    blocks = 8 if len(values) >= 24 else 4
    if len(values) < 2 * blocks:
        return 0.0, False
    low = np.array([part.min() for part in np.array_split(values, blocks)])
    rises = np.diff(low) > 0
    middle = len(low) // 2
    early = (low[middle] - low[0]) / middle
    late = (low[-1] - low[middle]) / (blocks - 1 - middle)
    falls = 1 if blocks == 8 else 0
    steady = bool(rises.sum() >= blocks - 1 - falls and late >= 0.5 * early and late > 0)
    return float((low[-1] - low[0]) * blocks / (blocks - 1)), steady


def snapshot_example(
    b: TraceBuilder | None = None,
    *,
    steps: int = 3,
    total: int = 80 << 30,
    history: bool = True,
    **training: Any,
) -> TraceBuilder:
    """Return an example with the memory snapshot of ``steps`` training steps on a GPU of ``total``
    bytes, or of fewer if memory runs out. ``training`` are arguments of the simulated training."""
    from advisor.testing.allocator import DeviceFull, FakeAllocator, Training

    b = b or TraceBuilder()
    allocator = FakeAllocator(total=total, history=history)
    with suppress(DeviceFull):
        program = Training(allocator, **training)
        for _ in range(steps):
            program.step()
    b.memory_snapshot(allocator)
    return b


def run_product(b: TraceBuilder, us: float = 2000) -> None:
    """Run a matrix product in bf16, for examples."""
    with b.op("aten::mm", [[4096, 4096], [4096, 4096]], "c10::BFloat16"):
        b.launch("ampere_bf16_s16816gemm_bf16_128x128_ldg8_nn", us)
