"""How long a matrix product takes in a narrower number format, with what quantising its inputs
costs.

A kernel keeps its efficiency, as on another GPU (``moves.py``): what it takes beyond the shortest
kernel changes as its roofline does. Of the ideal step down, kernels in narrower formats reach a
part; ``slower`` has that part and its range from published tables (``benchmarks/precision.json``,
compared by ``benchmarks/bench_precision.py``). Quantising is bytes at the memory rate, and at least
the shortest kernel each, as torchao counts them (``torchao/testing/training/roofline_utils.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from advisor.core import gpus
from advisor.measure.host.operators import KERNEL_NS
from advisor.replay.project.device_scaling import computed_in, memory_rate

if TYPE_CHECKING:
    from advisor.core.gpus import GpuSpec

Role = Literal["inference", "forward", "input gradient", "weight gradient"]
Three = tuple[float, float, float]
"""Under the optimistic assumption, the central one, the pessimistic one."""


class Narrow(NamedTuple):
    """A number format, or a sparsity, of the weights and perhaps of what they are multiplied by."""

    unit: str | None
    """Format of the GPU table at whose rate it is multiplied; ``None``: at that of the recorded
    format."""
    weight: float
    """Bytes of a weight, its scales included; of ``2:4``: as a share of the recorded width."""
    inputs: float | None
    """Bytes of an activation or gradient, its scales included; ``None``: they stay."""
    blocks: bool
    """Scaled by blocks: no maximum of the whole tensor is looked for."""
    training: bool
    """Whether a training recipe is more than a prototype."""
    least: dict[str, tuple[int, int]]
    """By vendor: the first compute capability with the unit."""
    compute: Three
    """Times the ideal time where arithmetic limits."""
    memory: Three
    """The same where memory does."""
    saves: str
    """What to call it in a sentence."""


MEAN_RATES: Final = {("NVIDIA B300", "fp4"): 5_093e12}
"""FLOP/s of twelve products of a 5B model together, quantised before (Transformer Engine, "GEMM
profiling"): 38% of the datasheet. Not the fastest of a search, so not in the GPU table."""
SPARSE: Final = "2:4"
MULTIPLE: Final = 16
"""Of which both dimensions of a weight must be a multiple in 8 bits and below
(``torch._scaled_mm``, ``torch._int_mm``)."""
FORMATS: Final[dict[str, Narrow]] = {
    "fp8": Narrow(
        "fp8", 1.0, 1.0, False, True, {"nvidia": (8, 9), "amd": (9, 4)},
        (0.9, 1.05, 1.35), (1.0, 1.1, 1.35), "FP8",
    ),
    "mxfp8": Narrow(
        "fp8", 1 + 1 / 32, 1 + 1 / 32, True, True, {"nvidia": (10, 0), "amd": (9, 5)},
        (0.9, 1.05, 1.35), (1.0, 1.1, 1.35), "MXFP8",
    ),
    "nvfp4": Narrow(
        "fp4", 0.5 + 1 / 16, 0.5 + 1 / 16, True, True, {"nvidia": (10, 0)},
        (0.9, 1.05, 1.35), (1.0, 1.1, 1.35), "NVFP4",
    ),
    "int8": Narrow(
        "int8", 1.0, 1.0, False, False, {"nvidia": (7, 5), "amd": (9, 0)},
        (0.9, 1.05, 1.35), (1.0, 1.1, 1.35), "INT8",
    ),
    "int8-weights": Narrow(
        None, 1.0, None, False, False, {"nvidia": (8, 0), "amd": (9, 0)},
        (1.0, 1.4, 1.7), (1.0, 1.1, 1.4), "INT8 weights",
    ),
    "int4-weights": Narrow(
        None, 0.5 + 4 / 128, None, False, False, {"nvidia": (8, 0), "amd": (9, 0)},
        (1.0, 1.4, 1.7), (1.0, 1.3, 1.9), "INT4 weights",
    ),
    SPARSE: Narrow(
        None, 0.5 + 1 / 16, None, False, False, {"nvidia": (8, 0)},
        (1.0, 1.4, 3.2), (1.0, 1.2, 1.6), "2:4 sparsity",
    ),
}  # fmt: skip


class Gemm(NamedTuple):
    """A matrix product, [m, k] x [k, n], of ``width`` bytes an element."""

    m: int
    n: int
    k: int
    dtype: str
    width: int
    role: Role


class Estimate(NamedTuple):
    """Times of one call, ns."""

    kernel: Three
    quantise: Three
    """Kernels that quantise its inputs, beyond those of the recorded format."""
    launches: Three
    """How many of them there are."""

    @property
    def total(self) -> Three:
        """Both together."""
        best, middle, worst = (sum(pair) for pair in zip(self.kernel, self.quantise, strict=True))
        return best, middle, worst


def missing_unit(name: str, gpu: GpuSpec, *, training: bool) -> str:
    """Why a GPU gains nothing from a format, or its rate is not known; empty: it has the unit."""
    narrow = FORMATS[name]
    least = narrow.least.get(gpu.vendor)
    if least is None or tuple(gpu.compute) < least:
        return f"{gpu.name} has no unit for {narrow.saves}"
    if narrow.unit is not None and gpu.peak(narrow.unit) is None:
        return f"no source for the rate of {narrow.saves} on {gpu.name} is known"
    if training and not narrow.training:
        return f"{narrow.saves} is for inference; training with it is a prototype at most"
    return ""


def estimate_product(gemm: Gemm, name: str, gpu: GpuSpec, old_ns: float) -> Estimate | None:
    """A product that took ``old_ns``, in a narrower format; ``None``: the rate of the recorded
    format is not known, or it is narrow already."""
    narrow = FORMATS[name]
    used = computed_in(gpu, gemm.dtype)
    rate = gpus.attainable_matmul(gpu, used) if used is not None else None
    if rate is None or gemm.dtype in ("fp8", "int8"):
        return None
    new_rate = rate.rate * (2.0 if name == SPARSE else 1.0)
    if narrow.unit is not None:
        result = gpus.attainable_matmul(gpu, narrow.unit)
        assert result is not None
        new_rate = MEAN_RATES.get((gpu.name, narrow.unit), result.rate)
    flops = 2.0 * gemm.m * gemm.n * gemm.k
    first, second, out = float(gemm.m * gemm.k), float(gemm.k * gemm.n), float(gemm.m * gemm.n)
    width, band = gemm.width, memory_rate(gpu)
    inputs = width if narrow.inputs is None else narrow.inputs
    weight = narrow.weight * (width if name == SPARSE else 1.0)
    if gemm.role == "weight gradient":
        weight = inputs
    before = max(flops / rate.rate, (first + second + out) * width / band)
    moved = first * inputs + second * weight + out * width
    fixed = min(float(KERNEL_NS), old_ns)

    def kernel(compute: float, memory: float) -> float:
        ratio = max(flops / new_rate * compute, moved / band * memory) / before
        return fixed + (old_ns - fixed) * ratio

    best, middle, worst = map(kernel, narrow.compute, narrow.memory)
    quantise, launches = _quantise(gemm, narrow, gpu, first, second)
    return Estimate((best, middle, worst), quantise, launches)


def _quantise(
    gemm: Gemm, narrow: Narrow, gpu: GpuSpec, first: float, second: float
) -> tuple[Three, Three]:
    """Time and number of the kernels that quantise what one call multiplies. Weights of a model
    that is not trained were quantised before. ``first`` and ``second``: elements of its inputs."""
    if narrow.inputs is None or gemm.role == "weight gradient":
        return (0.0, 0.0, 0.0), (0.0, 0.0, 0.0)
    read, cast = gemm.width, gemm.width + narrow.inputs  # to find the maximum; to convert
    look = 0 if narrow.blocks else read
    plans: tuple[tuple[tuple[float, int], ...], ...]
    if gemm.role == "inference":  # at best the operator before it writes the narrow format
        plans = ((), ((first * cast, 1),), ((first * (read + cast), 3),))
    else:  # both layouts are written, for the forward pass and for the gradients
        again = look if gemm.role == "forward" else 0
        plans = (
            ((first * (cast + narrow.inputs), 1), (second * cast, 1)),
            ((first * (look + cast + narrow.inputs), 2), (second * (again + cast), 2)),
            ((first * 2 * (read + cast), 3), (second * (read + cast), 3)),
        )
    band, least = memory_rate(gpu), float(KERNEL_NS)
    times = [sum(max(size / band * 1e9, count * least) for size, count in plan) for plan in plans]
    counts = [float(sum(count for _, count in plan)) for plan in plans]
    return (times[0], times[1], times[2]), (counts[0], counts[1], counts[2])
