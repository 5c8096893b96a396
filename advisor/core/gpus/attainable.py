"""The rates that kernels do reach on a GPU: measured, else as GPUs of the same vendor do.

A datasheet's peak is a ceiling that no kernel comes near: the fastest matrix product that anybody
measured reaches 51 to 108% of it, a STREAM triad 69 to 89% of the memory's. What a kernel could
save is therefore judged by what others reached.
"""

from __future__ import annotations

from functools import cache
from statistics import median_low
from typing import NamedTuple

from advisor.core.gpus import GpuSpec, GpuTable, known_gpus


class Attainable(NamedTuple):
    """A rate, FLOP/s or bytes/s."""

    rate: float
    source: GpuTable | None
    """Where it was measured; ``None``: nobody's figure was found, and it is the peak times what
    the vendor's other GPUs reach of theirs (the lower median)."""


def attainable_matmul(gpu: GpuSpec, dtype: str) -> Attainable | None:
    """Of matrix products with inputs in ``dtype``; ``None``: the GPU has no peak for the format."""
    measured = gpu.measured_matmul(dtype)
    if measured is not None:
        return Attainable(measured.rate * 1e12, measured.source)
    peak = gpu.peak(dtype)
    share = _usual(gpu.vendor)[0]
    return None if peak is None or share is None else Attainable(peak * share, None)


def attainable_bandwidth(gpu: GpuSpec) -> Attainable | None:
    """Of the GPU's own memory, read and written together."""
    measured = gpu.measured.memory
    if measured is not None:
        return Attainable(measured.rate * 1e9, measured.source)
    share = _usual(gpu.vendor)[1]
    return None if share is None else Attainable(gpu.bandwidth * share, None)


@cache
def _usual(vendor: str) -> tuple[float | None, float | None]:
    """What a vendor's GPUs reach of their peaks, in matrix products and in memory."""
    products, memories = set(), set()
    for gpu in known_gpus():
        if gpu.vendor != vendor:
            continue
        for dtype, rate in gpu.measured.matmul.items():
            peak = gpu.peak(dtype)
            if peak is not None:
                products.add(rate.rate * 1e12 / peak)
        if gpu.measured.memory is not None:
            memories.add(gpu.measured.memory.rate / gpu.memory_gb_per_s)
    return tuple(median_low(sorted(s)) if s else None for s in (products, memories))  # type: ignore[return-value]
