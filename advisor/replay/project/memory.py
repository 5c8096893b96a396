"""Whether a step's memory fits into another GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import polars as pl

if TYPE_CHECKING:
    from advisor.core.gpus import GpuSpec
    from advisor.measure import Analysis

USABLE = 0.92
"""Share of the memory as sold that a driver hands out, at least: a T4's 16 GiB are 14.8."""
CONTEXT_BYTES = 600 << 20
"""What the driver and the libraries take beside the allocator, about: a CUDA context with cuBLAS
and cuDNN loaded is 300 to 900 MiB."""


class Fit(NamedTuple):
    """The step's memory against a GPU's. Bytes; null: not recorded."""

    verdict: Literal["fits", "tight", "too small", "not measured"]
    """``tight``: what is allocated fits, what the allocator has reserved does not."""
    allocated: int | None
    reserved: int | None
    capacity: int


def fit(a: Analysis, target: GpuSpec) -> Fit:
    """The largest peak on the analysed device, with what the driver takes beside: of the steps by
    the allocator's events, else of the run by the recorder's samples."""
    usable = int(target.memory_bytes * USABLE)
    mine = a.memory.filter(pl.col("device") == a.device_id)
    peaks: list[int | None] = []
    for name in ("peak_allocated", "peak_reserved"):
        top = mine[name].max() if mine.height else None
        peaks.append(top if isinstance(top, int) else None)
    allocated, reserved = peaks
    if allocated is None and reserved is None and a.record is not None:
        steps = a.record.steps
        allocated = max((step.peak for step in steps if step.peak), default=None)
        reserved = max((step.reserved for step in steps if step.reserved), default=None)
    if allocated is None and reserved is None:
        return Fit("not measured", None, None, target.memory_bytes)
    least = allocated if allocated is not None else reserved
    most = reserved if reserved is not None else allocated
    assert least is not None and most is not None
    if least + CONTEXT_BYTES > usable:
        return Fit("too small", allocated, reserved, target.memory_bytes)
    roomy = allocated is not None and reserved is not None and most + CONTEXT_BYTES <= usable
    return Fit("fits" if roomy else "tight", allocated, reserved, target.memory_bytes)
