"""Times of device work on another GPU, and of matrix products in a narrower number format, with the
quantising of their inputs.

A kernel keeps its efficiency: its time beyond the shortest kernel's changes like its roofline,
``max(FLOPs / matmul rate, bytes / memory rate)`` on one GPU over the same on the other, at attained
rates. Kernels without shapes follow their family: matrix products the geometric mean of both rates,
with both as the range, and other kernels the memory rate.

Kernels in narrower formats reach a part of the ideal reduction. ``FORMATS`` has this part and its
range from published tables (``benchmarks/precision.json``, compared by
``benchmarks/bench_precision.py``). Quantising takes its bytes at the memory rate, at least the
shortest kernel each, as torchao counts (``torchao/testing/training/roofline_utils.py``)."""

from collections.abc import Callable
from functools import partial
from typing import Final, Literal, NamedTuple

import numpy as np
import polars as pl

from advisor.core import gpus
from advisor.core.gpus import GpuSpec
from advisor.core.intervals import Array
from advisor.measure import Analysis
from advisor.measure.device.families import MATRIX
from advisor.measure.host.operators import KERNEL_NS

SHORTEST_NS = {"nvidia": 1_800.0, "amd": 3_600.0}
"""Time of the shortest kernels by vendor, ns: the median over public traces of their shortest
hundredth (ten of NVIDIA GPUs: 1.0 to 5.7 µs; two of AMD's: 2.4 and 4.9)."""
MAX_SHORTEST_NS = 6_000.0
"""Maximum used length of a trace's shortest hundredth, ns: above it all its kernels are long."""
MAX_NODE_GPUS = 8
"""Maximum number of GPUs that one machine's links join: larger groups cross a network, which
stays."""

KINDS = ("compute", "memory", "mixture", "unknown", "launch", "copy", "link", "unchanged")
"""Kinds of device work. ``compute``, ``memory``: by FLOPs and bytes, or a family that only moves
data. ``mixture``: matrix products of unknown shapes. ``unknown``: unknown family. ``launch``: as
short as the shortest kernels. ``copy``: between host and device. ``link``: between GPUs."""
KIND_CODE = {name: code for code, name in enumerate(KINDS)}


class ScaledDeviceWork(NamedTuple):
    """Factors on the times of device work, aligned with ``trace.gpu``."""

    factor: Array
    """New duration over the old one."""
    low: Array
    high: Array
    """Upper end of the factor; ``low`` and ``high`` cover limits that the recording leaves open."""
    kind: Array
    """Codes of ``KINDS``."""
    missing: tuple[str, ...]
    """Formats without a unit on the GPU that it does not replace by another format."""
    instead: tuple[tuple[str, str], ...]
    """Formats with the format in which the GPU computes them instead."""


def shortest_kernel(durations: Array, vendor: str) -> float:
    """Return the time of this trace's shortest kernels, ns, or a usual time if it has none."""
    if not len(durations):
        return SHORTEST_NS[vendor]
    result = float(np.percentile(durations, 1))
    return result if result <= MAX_SHORTEST_NS else SHORTEST_NS[vendor]


def scale_device_work(a: Analysis, source: GpuSpec, target: GpuSpec) -> ScaledDeviceWork:
    """Return the factors of all device work of a trace that was recorded on ``source``."""
    gpu, kernels = a.trace.gpu, a.kernels
    size = gpu.height
    dur = np.maximum(gpu["dur"].to_numpy().astype(float), 1.0)
    is_kernel = (gpu["kind"] == "kernel").to_numpy()
    rows = _TimeRatios(a, source, target)
    kind = np.full(size, KIND_CODE["unchanged"], dtype=np.int64)
    work, low, high = np.ones(size), np.ones(size), np.ones(size)

    family = kernels["family"].cast(pl.String).fill_null("other")
    matrix = is_kernel & family.is_in(list(MATRIX)).to_numpy()
    link = kernels["communication"].fill_null(value=False).to_numpy() & is_kernel
    nameless = is_kernel & (family == "other").to_numpy() & ~rows.known
    by_memory = (is_kernel & ~matrix & ~nameless & ~link) | (gpu["kind"] == "memset").to_numpy()

    work[by_memory] = low[by_memory] = high[by_memory] = rows.memory
    kind[by_memory] = KIND_CODE["memory"]
    recorded = matrix & rows.known
    work[recorded] = low[recorded] = high[recorded] = rows.roofline[recorded]
    kind[recorded] = np.where(rows.computes[recorded], KIND_CODE["compute"], KIND_CODE["memory"])
    for chosen, name in ((matrix & ~rows.known, "mixture"), (nameless, "unknown")):
        ends = np.stack([rows.compute[chosen], np.full(int(chosen.sum()), rows.memory)])
        work[chosen] = np.sqrt(ends.prod(axis=0))
        low[chosen], high[chosen] = ends.min(axis=0), ends.max(axis=0)
        kind[chosen] = KIND_CODE[name]

    # A kernel with fewer blocks than processors leaves some empty, a different share on each GPU.
    # Libraries split matrix products differently for another GPU: half of the effect, and all of it
    # in the range.
    fill = rows.fill(recorded, by_memory)
    computing = is_kernel & ~link
    low[computing] = np.minimum(low, low * fill)[computing]
    high[computing] = np.maximum(high, high * fill)[computing]
    work[computing] = (work * np.where(matrix, np.sqrt(fill), fill))[computing]

    base = shortest_kernel(dur[computing], source.vendor)
    target_base = base + SHORTEST_NS[target.vendor] - SHORTEST_NS[source.vendor]
    fixed = np.minimum(dur, base)
    fixed_after = np.maximum(target_base, 0.0) * fixed / base
    factors = [(fixed_after + (dur - fixed) * part) / dur for part in (work, low, high)]
    for values, changed in zip((work, low, high), factors, strict=True):
        values[computing] = changed[computing]
    kind[computing & (dur <= 1.5 * base)] = KIND_CODE["launch"]

    _scale_copies(gpu, source, target, rows.memory, (work, low, high, kind))
    _scale_collectives(a, link, source, target, (work, low, high, kind))
    missing, instead = _find_replaced_formats(kernels.filter(pl.Series(matrix)), source, target)
    return ScaledDeviceWork(work, low, high, kind, missing, instead)


def _find_replaced_formats(
    matrices: pl.DataFrame, source: GpuSpec, target: GpuSpec
) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Return formats without a unit on the target, and formats that it computes in another
    format."""
    missing, instead = set(), set()
    used = matrices.select(
        pl.col("dtype").cast(pl.String), convolves=pl.col("family") == "convolution"
    )
    for dtype, convolves in used.drop_nulls().unique().iter_rows():
        new = find_compute_format(target, format_on_target(dtype, convolves, source, target))
        if new is None:
            missing.add(dtype)
        elif new != find_compute_format(source, dtype):
            instead.add((f"{dtype} of convolutions" if new == "tf32" else dtype, new))
    return tuple(sorted(missing)), tuple(sorted(instead))


class _TimeRatios:
    """Ratios of a kernel's times, target over source."""

    def __init__(self, a: Analysis, source: GpuSpec, target: GpuSpec) -> None:
        kernels = a.kernels
        memory = memory_rate(source), memory_rate(target)
        self.memory = memory[0] / memory[1]
        formats = kernels["dtype"].cast(pl.String).fill_null("")
        half = a.trace.gpu["name"].cast(pl.String).str.contains(r"f16f16_f16f16_f16|h16816|h1688")
        convolves = kernels["family"].cast(pl.String) == "convolution"
        works = list(zip(formats, half, convolves.fill_null(value=False), strict=True))
        rates = {
            (d, h, c): (
                _matmul_rate(source, d, h),
                _matmul_rate(target, format_on_target(d, c, source, target), h),
            )
            for d, h, c in set(works)
        }
        pairs = [rates[work] for work in works]
        old_rates, new_rates = (np.array([pair[i] for pair in pairs], dtype=float) for i in (0, 1))

        def products_on(gpu: GpuSpec, dtype: str, half: bool, convolves: bool) -> float:
            return _matmul_rate(gpu, format_on_target(dtype, convolves, source, gpu), half)

        per_sm = a.trace.gpu["blocks_per_sm"].cast(pl.Float64).fill_null(np.nan).to_numpy()
        blocks = np.maximum(np.round(per_sm * source.sms), 1.0)
        # of products, and of moving bytes: time with this number of blocks over time with enough
        # blocks
        fills = []
        for gpu in (source, target):
            processors = {
                (d, h, c): _find_processors(gpu, partial(products_on, dtype=d, half=h, convolves=c))
                for d, h, c in rates
            }
            counts = np.array([processors[work] for work in works], dtype=float)
            both = counts, _find_processors(gpu, memory_rate)
            fills.append([np.nan_to_num(np.maximum(n / blocks, 1.0), nan=1.0) for n in both])
        self._fills = [new_rates / old_rates for old_rates, new_rates in zip(*fills, strict=True)]
        self.compute = np.where(
            np.isfinite(old_rates / new_rates), old_rates / new_rates, self.memory
        )
        flops, moved = (
            kernels[name].cast(pl.Float64).fill_null(np.nan).to_numpy()
            for name in ("flops", "moved")
        )
        with np.errstate(invalid="ignore", divide="ignore"):
            ideal = [
                np.maximum(flops / rate, moved / bandwidth)
                for rate, bandwidth in zip((old_rates, new_rates), memory, strict=True)
            ]
            self.roofline = ideal[1] / ideal[0]
            filled = [
                np.maximum(flops / rate * fill[0], moved / bandwidth * fill[1])
                for rate, bandwidth, fill in zip((old_rates, new_rates), memory, fills, strict=True)
            ]
            self._recorded_fill = filled[1] / filled[0] / self.roofline
            self.computes = flops / old_rates >= moved / memory[0]
        self.known = np.isfinite(self.roofline) & (self.roofline > 0)

    def fill(self, recorded: Array, by_memory: Array) -> Array:
        """Return the source's used share of processors over the target's, by what limits a kernel:
        ``recorded`` FLOPs and bytes, memory, or either."""
        products, memory = self._fills
        either = np.sqrt(products * memory)
        result: Array = np.where(recorded, self._recorded_fill, np.where(by_memory, memory, either))
        return result


def format_on_target(dtype: str, convolves: bool, source: GpuSpec, target: GpuSpec) -> str:
    """Return the format of the same work on the target. PyTorch computes fp32 convolutions in TF32
    if there is a unit for it (``torch.backends.cudnn.allow_tf32`` is on by default, but not the
    switch for matrix products)."""
    new = (
        find_compute_format(source, "tf32") != "tf32"
        and find_compute_format(target, "tf32") == "tf32"
    )
    return "tf32" if convolves and dtype == "fp32" and new else dtype


def _matmul_rate(gpu: GpuSpec, dtype: str, half: bool) -> float:
    """Return FLOP/s, NaN if unknown. If no format is recorded, fp32 represents the chip."""
    result = matmul_rate(gpu, dtype or "fp32", half_sums=bool(half))
    return np.nan if result is None else result


def _find_processors(target: GpuSpec, rate: Callable[[GpuSpec], float]) -> float:
    """Return the processors that a kernel of few blocks has to fill: the target's, or fewer, so
    that one has the rate of a lesser GPU's processor. Larger GPUs are not slower for having more of
    them."""
    target_rate = rate(target)
    lesser = [
        gpu
        for gpu in gpus.known_gpus()
        if gpus.is_at_least_as_fast(target, gpu) and rate(gpu) <= target_rate
    ]
    return min([float(target.sms), *(gpu.sms * target_rate / rate(gpu) for gpu in lesser)])


def _scale_copies(
    gpu: pl.DataFrame,
    source: GpuSpec,
    target: GpuSpec,
    memory: float,
    into: tuple[Array, Array, Array, Array],
) -> None:
    """Scale copies by their interface, except pageable memory, which the host stages."""
    work, low, high, kind = into
    copying = (gpu["kind"] == "memcpy").to_numpy()
    direction = gpu["copy"].cast(pl.String).fill_null("")
    host = copying & direction.is_in(["HtoD", "DtoH"]).to_numpy()
    on_device = copying & (direction == "DtoD").to_numpy()
    peers = copying & (direction == "PtoP").to_numpy()
    work[on_device] = low[on_device] = high[on_device] = memory
    kind[on_device] = KIND_CODE["memory"]
    for chosen, old_rate, new_rate, name in (
        (host, host_rate(source), host_rate(target), "copy"),
        (peers, peer_rate(source), peer_rate(target), "link"),
    ):
        ratio = 1.0 if old_rate is None or new_rate is None else old_rate / new_rate
        work[chosen] = ratio
        low[chosen], high[chosen] = min(ratio, 1.0), max(ratio, 1.0)
        kind[chosen] = KIND_CODE[name]
    pageable = np.zeros(gpu.height, dtype=bool)
    for side in ("src", "dst"):
        pageable |= (
            (gpu[side].cast(pl.String).str.to_lowercase() == "pageable")
            .fill_null(value=False)
            .to_numpy()
        )
    work[host & pageable] = 1.0


def _scale_collectives(
    a: Analysis,
    link: Array,
    source: GpuSpec,
    target: GpuSpec,
    into: tuple[Array, Array, Array, Array],
) -> None:
    """Scale collectives by the links for their bytes, and by the rank's own device work for their
    waits. The shares are estimated from bytes and group if these are recorded. Groups of more than
    ``MAX_NODE_GPUS`` cross a network, which stays."""
    if not link.any():
        return
    work, low, high, kind = into
    old_rate, new_rate = peer_rate(source), peer_rate(target)
    ratio = 1.0 if old_rate is None or new_rate is None else old_rate / new_rate
    dur = a.trace.gpu["dur"].to_numpy().astype(float)
    others = (a.trace.gpu["kind"] == "kernel").to_numpy() & ~link
    waits = float((work * dur)[others].sum() / dur[others].sum()) if dur[others].sum() else 1.0
    ends = sorted((ratio, waits, 1.0))
    work[link] = np.sqrt(ratio * waits)
    low[link], high[link] = ends[0], ends[-1]
    kind[link] = KIND_CODE["link"]
    table = a.collectives.filter(pl.col("bytes").is_not_null() & pl.col("group_size").is_not_null())
    for row, size, group in table.select("gpu", "bytes", "group_size").iter_rows():
        if not link[row] or not old_rate:
            continue
        # a ring moves 2 (n - 1) / n of an all-reduce's bytes through each link, other collectives
        # half
        share = min(
            2.0 * (group - 1) / max(group, 1) * size / old_rate * 1e9 / max(dur[row], 1.0), 1.0
        )
        work[row] = share * (1.0 if group > MAX_NODE_GPUS else ratio) + (1 - share) * waits


# -- what a GPU attains ----------------------------------------------------------------------------

REPLACEMENT_FORMATS = {"tf32": "fp32", "bf16": "fp32"}
"""Formats that PyTorch computes in another format if a GPU has no unit for them."""
C2C_BYTES = 450e9
"""Rate of NVLink-C2C between Grace and its GPU, bytes/s in one direction: 900 GB/s in both (NVIDIA,
"GH200 Grace Hopper Superchip" datasheet)."""
_C2C = ("GH200", "GB200", "GB300")


def find_compute_format(gpu: GpuSpec, dtype: str) -> str | None:
    """Return the format in which a GPU computes work of one format, or ``None`` if it cannot.

    TF32 on AMD counts as fp32: PyTorch uses it there only if an environment variable allows it."""
    if dtype == "tf32" and gpu.vendor == "amd":
        return "fp32"
    if gpu.peak(dtype) is not None:
        return dtype
    other = REPLACEMENT_FORMATS.get(dtype)
    return other if other is not None and gpu.peak(other) is not None else None


def matmul_rate(gpu: GpuSpec, dtype: str, *, half_sums: bool = False) -> float | None:
    """Return the FLOP/s that matrix products attain, or ``None`` if the GPU cannot compute them.
    ``half_sums``: sums in fp16 too, in which GeForce cards are twice as fast."""
    used = find_compute_format(gpu, dtype)
    result = gpus.attainable_matmul(gpu, used) if used is not None else None
    if result is None:
        return None
    is_doubled = half_sums and used == "fp16" and "GeForce" in gpu.name
    return result.rate * (2.0 if is_doubled else 1.0)


def memory_rate(gpu: GpuSpec) -> float:
    """Return the bytes/s that the GPU's own memory attains."""
    result = gpus.attainable_bandwidth(gpu)
    return gpu.bandwidth if result is None else result.rate


def host_rate(gpu: GpuSpec) -> float | None:
    """Return bytes/s between host and GPU in one direction, or ``None`` if unknown."""
    if any(word in gpu.name for word in _C2C):
        return C2C_BYTES
    return gpu.pcie_bandwidth


def peer_rate(gpu: GpuSpec) -> float | None:
    """Return bytes/s to the machine's other GPUs in one direction: links, else host, else
    ``None``."""
    return gpu.link_bandwidth or host_rate(gpu)


Role = Literal["inference", "forward", "input gradient", "weight gradient"]
Three = tuple[float, float, float]
"""Values under the optimistic, the central and the pessimistic assumption."""


class MatmulFormat(NamedTuple):
    """Number format or sparsity of the weights, and perhaps of the other factor."""

    unit: str | None
    """Format of the GPU table at whose rate it is multiplied, or ``None`` for the recorded format's
    rate."""
    weight: float
    """Bytes per weight, including scales; for ``2:4``, a share of the recorded width."""
    inputs: float | None
    """Bytes per activation or gradient, including scales, or ``None`` if unchanged."""
    blocks: bool
    """Whether it is scaled by blocks, so that no maximum of the whole tensor is needed."""
    training: bool
    """Whether a training recipe is more than a prototype."""
    least: dict[str, tuple[int, int]]
    """First compute capability with the unit, by vendor."""
    compute: Three
    """Factors on the ideal time where arithmetic limits."""
    memory: Three
    """Factors on the ideal time where memory limits."""
    saves: str
    """Name of the format in a sentence."""


MEAN_RATES: Final = {("NVIDIA B300", "fp4"): 5_093e12}
"""FLOP/s of twelve products of a 5B model together, quantised in advance (Transformer Engine, "GEMM
profiling"): 38% of the datasheet. Not the fastest of a search, so not in the GPU table."""
SPARSE: Final = "2:4"
MULTIPLE: Final = 16
"""Divisor of both dimensions of a weight that 8 bits and below require (``torch._scaled_mm``,
``torch._int_mm``)."""
FORMATS: Final[dict[str, MatmulFormat]] = {
    "fp8": MatmulFormat(
        "fp8", 1.0, 1.0, False, True, {"nvidia": (8, 9), "amd": (9, 4)},
        (0.9, 1.05, 1.35), (1.0, 1.1, 1.35), "FP8",
    ),
    "mxfp8": MatmulFormat(
        "fp8", 1 + 1 / 32, 1 + 1 / 32, True, True, {"nvidia": (10, 0), "amd": (9, 5)},
        (0.9, 1.05, 1.35), (1.0, 1.1, 1.35), "MXFP8",
    ),
    "nvfp4": MatmulFormat(
        "fp4", 0.5 + 1 / 16, 0.5 + 1 / 16, True, True, {"nvidia": (10, 0)},
        (0.9, 1.05, 1.35), (1.0, 1.1, 1.35), "NVFP4",
    ),
    "int8": MatmulFormat(
        "int8", 1.0, 1.0, False, False, {"nvidia": (7, 5), "amd": (9, 0)},
        (0.9, 1.05, 1.35), (1.0, 1.1, 1.35), "INT8",
    ),
    "int8-weights": MatmulFormat(
        None, 1.0, None, False, False, {"nvidia": (8, 0), "amd": (9, 0)},
        (1.0, 1.4, 1.7), (1.0, 1.1, 1.4), "INT8 weights",
    ),
    "int4-weights": MatmulFormat(
        None, 0.5 + 4 / 128, None, False, False, {"nvidia": (8, 0), "amd": (9, 0)},
        (1.0, 1.4, 1.7), (1.0, 1.3, 1.9), "INT4 weights",
    ),
    SPARSE: MatmulFormat(
        None, 0.5 + 1 / 16, None, False, False, {"nvidia": (8, 0)},
        (1.0, 1.4, 3.2), (1.0, 1.2, 1.6), "2:4 sparsity",
    ),
}  # fmt: skip


class Gemm(NamedTuple):
    """Matrix product, [m, k] x [k, n], of ``width`` bytes per element."""

    m: int
    n: int
    k: int
    dtype: str
    width: int
    role: Role


class ProductEstimate(NamedTuple):
    """Estimated times of one call, ns."""

    kernel: Three
    quantize: Three
    """Time of the kernels that quantise its inputs, in addition to the recorded format's
    kernels."""
    launches: Three
    """Number of kernels that quantise its inputs."""

    @property
    def total(self) -> Three:
        """Time of the product and of quantising together."""
        best, middle, worst = (sum(pair) for pair in zip(self.kernel, self.quantize, strict=True))
        return best, middle, worst


def missing_unit(name: str, gpu: GpuSpec, *, training: bool) -> str:
    """Return why a GPU gains nothing from a format, or lacks a known rate. Empty if it gains."""
    narrow = FORMATS[name]
    min_capability = narrow.least.get(gpu.vendor)
    if min_capability is None or tuple(gpu.compute) < min_capability:
        return f"{gpu.name} has no unit for {narrow.saves}"
    if narrow.unit is not None and gpu.peak(narrow.unit) is None:
        return f"no source for the rate of {narrow.saves} on {gpu.name} is known"
    if training and not narrow.training:
        return f"{narrow.saves} is for inference; training with it is a prototype at most"
    return ""


def estimate_product(gemm: Gemm, name: str, gpu: GpuSpec, old_ns: float) -> ProductEstimate | None:
    """Estimate a product that took ``old_ns`` in a narrower format. ``None`` if the rate of the
    recorded format is unknown, or it is already narrow."""
    narrow = FORMATS[name]
    used = find_compute_format(gpu, gemm.dtype)
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
    width, bandwidth = gemm.width, memory_rate(gpu)
    inputs = width if narrow.inputs is None else narrow.inputs
    weight = narrow.weight * (width if name == SPARSE else 1.0)
    if gemm.role == "weight gradient":
        weight = inputs
    before = max(flops / rate.rate, (first + second + out) * width / bandwidth)
    moved = first * inputs + second * weight + out * width
    fixed = min(float(KERNEL_NS), old_ns)

    def kernel(compute: float, memory: float) -> float:
        ratio = max(flops / new_rate * compute, moved / bandwidth * memory) / before
        return fixed + (old_ns - fixed) * ratio

    best, middle, worst = map(kernel, narrow.compute, narrow.memory)
    quantize, launches = _estimate_quantizing(gemm, narrow, gpu, first, second)
    return ProductEstimate((best, middle, worst), quantize, launches)


def _estimate_quantizing(
    gemm: Gemm, narrow: MatmulFormat, gpu: GpuSpec, first: float, second: float
) -> tuple[Three, Three]:
    """Return time and number of the kernels that quantise one call's inputs. Weights of a model
    that is not trained were quantised in advance. ``first`` and ``second``: elements of its
    inputs."""
    if narrow.inputs is None or gemm.role == "weight gradient":
        return (0.0, 0.0, 0.0), (0.0, 0.0, 0.0)
    read, cast = gemm.width, gemm.width + narrow.inputs  # to find the maximum; to convert
    scan = 0 if narrow.blocks else read
    plans: tuple[tuple[tuple[float, int], ...], ...]
    if gemm.role == "inference":  # at best, the previous operator writes the narrow format
        plans = ((), ((first * cast, 1),), ((first * (read + cast), 3),))
    else:  # both layouts are written, for the forward pass and for the gradients
        rescan = scan if gemm.role == "forward" else 0
        plans = (
            ((first * (cast + narrow.inputs), 1), (second * cast, 1)),
            ((first * (scan + cast + narrow.inputs), 2), (second * (rescan + cast), 2)),
            ((first * 2 * (read + cast), 3), (second * (read + cast), 3)),
        )
    bandwidth, min_ns = memory_rate(gpu), float(KERNEL_NS)
    times = [
        sum(max(size / bandwidth * 1e9, count * min_ns) for size, count in plan) for plan in plans
    ]
    counts = [float(sum(count for _, count in plan)) for plan in plans]
    return (times[0], times[1], times[2]), (counts[0], counts[1], counts[2])
