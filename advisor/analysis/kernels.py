"""What each kernel is and does: family, dtype, FLOPs, bytes, tensor cores, waves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from advisor.analysis.names import matches

if TYPE_CHECKING:
    from advisor.analysis import Analysis

COMMUNICATION = r"(?i)nccl|rccl|multimem_|nvshmem|cross_device_reduce|one_shot_all_reduce"


def measure_kernels(a: Analysis) -> pl.DataFrame:
    """See ``Analysis.kernels``."""
    gpu = a.trace.gpu
    return pl.DataFrame({"communication": matches(gpu["name"], COMMUNICATION)})
