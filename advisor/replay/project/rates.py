"""What a GPU attains, in the formats it has; and how one is found by a short name."""

from __future__ import annotations

import re
from typing import NamedTuple

from advisor.core.errors import AdvisorError
from advisor.core.gpus import GpuSpec, attainable, known

INSTEAD = {"tf32": "fp32", "bf16": "fp32"}
"""Formats that are computed in another one where a GPU has no unit for them: PyTorch does so."""
C2C_BYTES = 450e9
"""NVLink-C2C between Grace and its GPU, bytes/s in one direction: 900 GB/s in both (NVIDIA, "GH200
Grace Hopper Superchip" datasheet)."""
_C2C = ("GH200", "GB200", "GB300")
_MAX_NAMES = 6


class Found(NamedTuple):
    """A GPU by a short name."""

    gpu: GpuSpec
    others: tuple[str, ...]
    """Others that the name fits as well."""


def find(name: str) -> Found:
    """The GPU that its driver calls so; else the first whose name has all the words: ``h200``,
    ``a100 pcie 80gb``.

    AdvisorError: none has.
    """
    wanted = _words(name)
    called = [gpu for gpu in known() if name.strip().casefold() in map(str.casefold, gpu.names)]
    if len(called) == 1:
        return Found(called[0], ())
    fitting = [gpu for gpu in known() if wanted and wanted <= _words(gpu.name)]
    if not fitting:
        near = [gpu.name for gpu in known() if any(w in gpu.name.casefold() for w in wanted)]
        shown = near[:_MAX_NAMES] or [gpu.name for gpu in known() if gpu.link][:_MAX_NAMES]
        raise AdvisorError(f"no GPU {name!r} is known; there are {', '.join(shown)} …")
    exact = [gpu for gpu in fitting if _words(gpu.name) - {"nvidia", "amd"} == wanted]
    gpu = (exact or fitting)[0]
    return Found(gpu, tuple(other.name for other in fitting if other is not gpu))


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.casefold()))


def computed_in(gpu: GpuSpec, dtype: str) -> str | None:
    """The format in which a GPU computes work of one format; ``None``: it cannot.

    TF32 on AMD counts as fp32: PyTorch uses it there only where an environment variable allows.
    """
    if dtype == "tf32" and gpu.vendor == "amd":
        return "fp32"
    if gpu.peak(dtype) is not None:
        return dtype
    other = INSTEAD.get(dtype)
    return other if other is not None and gpu.peak(other) is not None else None


def matmul_rate(gpu: GpuSpec, dtype: str, *, half_sums: bool = False) -> float | None:
    """FLOP/s that matrix products attain. ``half_sums``: summed in fp16 too, at which GeForce cards
    are twice as fast; ``None``: the GPU cannot."""
    used = computed_in(gpu, dtype)
    result = attainable.matmul(gpu, used) if used is not None else None
    if result is None:
        return None
    twice = half_sums and used == "fp16" and "GeForce" in gpu.name
    return result.rate * (2.0 if twice else 1.0)


def memory_rate(gpu: GpuSpec) -> float:
    """Bytes/s that the GPU's own memory attains."""
    result = attainable.memory(gpu)
    return gpu.bandwidth if result is None else result.rate


def host_rate(gpu: GpuSpec) -> float | None:
    """Bytes/s between host and GPU in one direction; ``None``: not known."""
    if any(word in gpu.name for word in _C2C):
        return C2C_BYTES
    return gpu.pcie_bandwidth


def peer_rate(gpu: GpuSpec) -> float | None:
    """Bytes/s to other GPUs of the machine in one direction: its links, else the host interface."""
    return gpu.link_bandwidth or host_rate(gpu)
