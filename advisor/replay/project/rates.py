"""What a GPU attains, in the formats it has; and how one is found by a short name."""

from __future__ import annotations

from advisor.core.gpus import GpuSpec, attainable

INSTEAD = {"tf32": "fp32", "bf16": "fp32"}
"""Formats that are computed in another one where a GPU has no unit for them: PyTorch does so."""
C2C_BYTES = 450e9
"""NVLink-C2C between Grace and its GPU, bytes/s in one direction: 900 GB/s in both (NVIDIA, "GH200
Grace Hopper Superchip" datasheet)."""
_C2C = ("GH200", "GB200", "GB300")


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
