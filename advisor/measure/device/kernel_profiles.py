"""Kernels with hardware counters and kernels that Triton compiled: their limits and their launches
in a trace."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core import labels
from advisor.core.finding import Edit, Select
from advisor.core.kernel_profile import CompiledKernel, KernelProfile
from advisor.core.trace import Device
from advisor.measure.device.kernel_names import TENSOR_CORE
from advisor.measure.device.roofline import (
    RESERVED_SHARED,
    active_blocks,
    find_limiters,
    multiprocessor_limits,
)
from advisor.measure.host.names import name_matches

if TYPE_CHECKING:
    from advisor.measure import Analysis

Limit = Literal["compute", "DRAM", "L2", "L1", "latency", "unknown"]
MIN_BUSY_PERCENT = 60.0
"""Minimum percent of a unit's peak at which it limits a kernel; below it, latency does. Nsight
Compute's SpeedOfLight rule has the same limit."""

ONE_LAUNCH = "saved by one launch of each, at most"
"""Evidence text of an estimated gain for kernels that no trace has."""
MAX_SELECTED = 500
"""Maximum number of launches an edit selects one by one, if others of the name differ in size."""
TENSOR_PIPE = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
"""Use of the tensor cores."""
UNITS: dict[Limit, tuple[str, ...]] = {
    "compute": (
        "sm__throughput.avg.pct_of_peak_sustained_elapsed",
        TENSOR_PIPE,
        "System Speed-of-Light/VALU Utilization",
        "System Speed-of-Light/MFMA Utilization",
    ),
    "DRAM": (
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
        "dram__throughput.avg.pct_of_peak_sustained_elapsed",
        "System Speed-of-Light/L2-Fabric Read BW",
        "System Speed-of-Light/L2-Fabric Write BW",
    ),
    "L2": (
        "lts__throughput.avg.pct_of_peak_sustained_elapsed",
        "System Speed-of-Light/L2 Cache BW",
    ),
    "L1": (
        "l1tex__throughput.avg.pct_of_peak_sustained_active",
        "System Speed-of-Light/vL1D Cache BW",
        "System Speed-of-Light/Theoretical LDS Bandwidth",
    ),
}
"""Unit -> metrics of its use, percent of its peak. The highest collected value counts."""
LIMITERS = {
    "registers": "launch__occupancy_limit_registers",
    "shared memory": "launch__occupancy_limit_shared_mem",
    "warps per block": "launch__occupancy_limit_warps",
    "blocks per SM": "launch__occupancy_limit_blocks",
    "barriers": "launch__occupancy_limit_barriers",
}
"""Resource -> metric of the resident blocks of a multiprocessor that it allows."""
STALL_METRIC = re.compile(r"smsp__average_warps_issue_stalled_(\w+?)_per_issue_active\.ratio")
NON_STALL_STATES = ("selected", "not_selected")
"""Warp states that are not stalls."""


LABEL_WIDTH = 38


class ProfiledKernel(NamedTuple):
    """Counters of one kernel. Shares are percent of a peak, or ``None`` if not collected."""

    profile: KernelProfile
    label: str
    """Short name in sentences and tables."""
    limit: Limit
    """Busiest unit. ``latency`` if no unit is busy. ``unknown`` if no unit was measured, or not the
    tensor cores that the kernel computes on."""
    use: dict[Limit, float]
    """Use of each unit, percent of its peak."""
    occupancy: float | None
    """Achieved occupancy, percent."""
    theoretical: float | None
    """Theoretical occupancy that registers, shared memory and block size allow, percent."""
    limiter: str | None
    """Resource of LIMITERS that allows the fewest blocks."""
    waves: float | None
    """Blocks of the grid over the blocks that run at once."""
    stalls: dict[str, float]
    """Stall reason -> share of the cycles between two instructions of a warp, largest first."""
    bytes: float | None
    """DRAM traffic of one launch, bytes."""
    on_tensor_cores: bool
    """Whether it computes on tensor cores, by its counters, or by its name without counters."""
    rows: NDArray[np.int64]
    """Rows of ``trace.gpu`` that launch it in the used steps, empty if none or without a trace."""

    @property
    def busiest(self) -> float | None:
        """Use of the busiest unit, percent."""
        return max(self.use.values(), default=None)

    @property
    def bandwidth(self) -> float | None:
        """DRAM traffic over the profiled duration, bytes per second."""
        if self.bytes is None or not self.profile.duration_ns:
            return None
        return self.bytes / self.profile.duration_ns * 1e9


def profiled_kernels(a: Analysis) -> list[ProfiledKernel]:
    """List the kernels of the profiles given with a trace, or of profiles alone, in their order."""
    profiles = a.trace.meta.kernel_profiles
    if profiles is None:
        return []
    rows = _find_launches(a, profiles.kernels)
    keys = [labels.clean(kernel_key(profile.name)) for profile in profiles.kernels]
    labels_by_key = label_kernels(keys)
    return [
        _build_profiled_kernel(profile, labels_by_key[key], kernel_rows)
        for profile, key, kernel_rows in zip(profiles.kernels, keys, rows, strict=True)
    ]


def is_reference(name: str) -> bool:
    """Return whether a kernel is, by its name, a reference implementation for checking others."""
    return re.search(r"(?<![a-z])[Rr]eference(?![a-z])", name) is not None


def label_kernels(keys: Iterable[str]) -> dict[str, str]:
    """Shorten the names of a report's kernels, by key, consistently in all parts of the report."""
    labels_by_key = labels.labels_by_name(sorted(set(keys)), LABEL_WIDTH)
    heads = Counter(label.partition("…")[0] for label in labels_by_key.values())
    return {
        key: f"{head}…>"
        if tail and len(tail) <= MAX_UNINFORMATIVE_END and heads[head] == 1
        else label
        for key, label in labels_by_key.items()
        for head, _, tail in [label.partition("…")]
    }


MAX_UNINFORMATIVE_END = 3
"""Maximum length of the end of a cut name that carries no information: ``Kernel<Gemm…cu``."""


def shorten_kernel(a: Analysis, k: ProfiledKernel, share: float) -> Edit | None:
    """Return the edit that shortens a kernel's launches in the trace by ``share`` at best, and not
    at all at worst. ``None`` if the trace has no launches, or they cannot be selected."""
    if not len(k.rows):
        return None
    gpu = a.trace.gpu
    name = str(gpu["name"][int(k.rows[0])])
    select = Select(on="gpu", kind=("kernel",), name=f"^{re.escape(name)}$")
    if int((gpu["name"] == name).to_numpy()[a.in_window].sum()) != len(k.rows):
        correlations = gpu["correlation"].gather(k.rows).drop_nulls().unique().to_list()
        if not 0 < len(correlations) <= MAX_SELECTED:
            return None
        select = Select(on="gpu", kind=("kernel",), correlation=tuple(correlations))
    return Edit(
        op="scale", select=select, factor=1 - share, best_factor=1 - share, worst_factor=1.0
    )


def _build_profiled_kernel(
    profile: KernelProfile, label: str, rows: NDArray[np.int64]
) -> ProfiledKernel:
    use = {
        busiest_unit: max(values)
        for busiest_unit, names in UNITS.items()
        if (values := [value for name in names if (value := profile.number(name)) is not None])
    }
    limit: Limit = "unknown"
    if use:
        busiest_unit = max(use, key=use.__getitem__)
        limit = busiest_unit if use[busiest_unit] >= MIN_BUSY_PERCENT else "latency"
    uses_tensor_cores = _uses_tensor_cores(profile)
    if limit == "latency" and uses_tensor_cores and profile.number(TENSOR_PIPE) is None:
        limit = "unknown"  # its target unit was not measured
    blocks_by_resource = {
        resource: count
        for resource, name in LIMITERS.items()
        if (count := profile.number(name)) is not None and count > 0
    }
    return ProfiledKernel(
        profile,
        label,
        limit,
        use,
        occupancy=_first_metric(
            profile,
            "sm__warps_active.avg.pct_of_peak_sustained_active",
            "System Speed-of-Light/Wavefront Occupancy",
        ),
        theoretical=_first_metric(profile, "sm__maximum_warps_per_active_cycle_pct"),
        limiter=min(blocks_by_resource, key=blocks_by_resource.__getitem__)
        if blocks_by_resource
        else None,
        waves=_first_metric(profile, "launch__waves_per_multiprocessor"),
        stalls=_stall_shares(profile),
        bytes=_dram_bytes(profile),
        on_tensor_cores=uses_tensor_cores,
        rows=rows,
    )


_TENSOR_COUNTERS = re.compile(
    r"sm__(?:ops_path_tensor|(?:inst_executed_)?pipe_tensor)\w*\.(?:sum|avg\.pct_of_peak_\w+)$"
)


def _uses_tensor_cores(profile: KernelProfile) -> bool:
    counts = [
        value
        for name in profile.metrics
        if _TENSOR_COUNTERS.match(name) and (value := profile.number(name)) is not None
    ]
    if counts:
        return max(counts) > 0
    return bool(name_matches(pl.Series([profile.name]), TENSOR_CORE)[0])


class MatchedKernel(NamedTuple):
    """A kernel that Triton compiled, and its launches."""

    kernel: CompiledKernel
    occupancy: float | None
    """Theoretical occupancy, percent, or ``None`` if registers or the GPU's limits are unknown."""
    limiter: str | None
    """Limit: ``registers``, ``shared memory``, ``block sizes``. ``None`` if 100% or unknown."""
    rows: NDArray[np.int64]
    """Rows of ``trace.gpu`` in the used steps. Empty if there are none, no trace, or another
    compilation that the trace does not distinguish."""


def compiled_kernels(a: Analysis) -> list[MatchedKernel]:
    """List the kernels of a Triton cache, given alone or with a trace."""
    profiles = a.trace.meta.kernel_profiles
    if profiles is None or not profiles.compiled:
        return []
    rows = _find_compiled_launches(a, profiles.compiled)
    return [
        MatchedKernel(kernel, *_find_theoretical_occupancy(kernel, a.device), kernel_rows)
        for kernel, kernel_rows in zip(profiles.compiled, rows, strict=True)
    ]


def _find_theoretical_occupancy(
    k: CompiledKernel, device: Device | None
) -> tuple[float | None, str | None]:
    """Return the occupancy, percent, and what limits it. ``device`` is the device of the trace."""
    match = re.fullmatch(r"sm_(\d{1,2})(\d)a?", k.target)
    compute = None if match is None else (int(match[1]), int(match[2]))
    if compute is None or k.registers is None:
        return None, None
    if device is None or device.compute != compute:
        device = multiprocessor_limits(compute)
    if device is None or not device.max_threads_per_sm:
        return None, None
    threads, registers, shared = (
        np.array([size], np.int64) for size in (k.threads, k.registers, k.shared)
    )
    blocks = active_blocks(threads, registers, shared, device)
    if blocks is None or np.isnan(blocks[0]):
        return None, None
    percent = float(100 * blocks[0] * k.threads / device.max_threads_per_sm)
    return percent, None if percent >= 100 else str(
        find_limiters(blocks, threads, registers, shared, device)[0]
    )


def _find_compiled_launches(
    a: Analysis, kernels: tuple[CompiledKernel, ...]
) -> list[NDArray[np.int64]]:
    """Return rows of ``trace.gpu`` by kernel. A row matches by name and by the recorded threads,
    registers, shared memory and architecture, and it must match no other kernel."""
    result = [np.zeros(0, dtype=np.int64)] * len(kernels)
    kernels_by_name: dict[str, list[int]] = {}
    for index, kernel in enumerate(kernels):
        if _is_for_device(kernel, a.device):
            kernels_by_name.setdefault(kernel.name, []).append(index)
    gpu = a.trace.gpu
    is_used = a.in_window & (gpu["kind"] == "kernel").to_numpy()
    sizes = ["threads", "registers", "shared"]
    table = gpu.select(
        pl.int_range(pl.len()).alias("row"),
        pl.col("name").cast(pl.String).str.strip_suffix(".kd"),
        *sizes,
    ).filter(pl.Series(is_used, dtype=pl.Boolean))
    table = table.filter(pl.col("name").is_in(list(kernels_by_name)))
    for (name, *launch_sizes), part in table.partition_by("name", *sizes, as_dict=True).items():
        matches = [
            index
            for index in kernels_by_name[str(name)]
            if _matches_launch(kernels[index], *launch_sizes)
        ]
        if len(matches) > 1:
            matches = [index for index in matches if kernels[index].shared == launch_sizes[2]]
        if len(matches) == 1:
            rows = part["row"].to_numpy().astype(np.int64)
            result[matches[0]] = np.concatenate([result[matches[0]], rows])
    return result


def _is_for_device(k: CompiledKernel, device: Device | None) -> bool:
    """Return whether a kernel is compiled for this GPU. Unknown targets or devices match."""
    if device is None or device.compute is None or not k.target.startswith("sm_"):
        return True
    return k.target.rstrip("a") == "sm_{}{}".format(*device.compute)


def _matches_launch(k: CompiledKernel, threads: Any, registers: Any, shared: Any) -> bool:
    """Return whether a launch fits a kernel. Some profilers add CUDA's part to shared memory."""
    return (
        threads in (None, k.threads)
        and (k.registers is None or registers in (None, 0, k.registers))
        and shared in (None, k.shared, k.shared + RESERVED_SHARED)
    )


def _first_metric(profile: KernelProfile, *names: str) -> float | None:
    return next((value for name in names if (value := profile.number(name)) is not None), None)


def _stall_shares(profile: KernelProfile) -> dict[str, float]:
    cycles = {
        match[1]: value
        for name in profile.metrics
        if (match := STALL_METRIC.fullmatch(name)) is not None
        and (value := profile.number(name)) is not None
    }
    total = sum(cycles.values())
    stalls = {
        name: count for name, count in cycles.items() if name not in NON_STALL_STATES and count > 0
    }
    ordered = sorted(stalls.items(), key=lambda item: -item[1])
    return {name: count / total for name, count in ordered} if total > 0 else {}


def _dram_bytes(profile: KernelProfile) -> float | None:
    """Return the bytes read and written. rocprof counts the bytes that L2 fetches and writes."""
    for names in (("dram__bytes_read.sum", "dram__bytes_write.sum"), ("FETCH_SIZE", "WRITE_SIZE")):
        parts = [profile.number(name) for name in names]
        if None not in parts:
            return sum(part for part in parts if part is not None)
    return None


def _find_launches(a: Analysis, kernels: tuple[KernelProfile, ...]) -> list[NDArray[np.int64]]:
    """Find each profile's launches: rows of ``trace.gpu`` in the used steps of the same kernel and
    size. If several profiles have the same kernel and size (one per launch), the first gets the
    launches, since their counters differ only by noise."""
    no_rows = np.zeros(0, dtype=np.int64)
    gpu = a.trace.gpu
    if gpu.is_empty():
        return [no_rows] * len(kernels)
    is_used = a.in_window & (gpu["kind"] == "kernel").to_numpy()
    table = gpu.select(
        pl.int_range(pl.len()).alias("row"), pl.col("name").cast(pl.String), "blocks", "threads"
    ).filter(pl.Series(is_used))
    table = table.with_columns(key=pl.col("name").replace_strict(_kernel_keys(table), default=None))
    groups: dict[str, pl.DataFrame] = {
        str(key): part for (key,), part in table.partition_by("key", as_dict=True).items()
    }
    result: list[NDArray[np.int64]] = []
    taken: set[tuple[str, int | None, int | None]] = set()
    for kernel in kernels:
        key = kernel_key(kernel.name)
        blocks, threads = (
            None if size is None else size[0] * size[1] * size[2]
            for size in (kernel.grid, kernel.block)
        )
        if key not in groups or (key, blocks, threads) in taken:
            result.append(no_rows)
            continue
        taken.add((key, blocks, threads))
        launches = groups[key]
        for column, expected in (("blocks", blocks), ("threads", threads)):
            if expected is not None and launches[column].null_count() < launches.height:
                launches = launches.filter(pl.col(column) == expected)
        result.append(launches["row"].to_numpy().astype(np.int64))
    return result


def _kernel_keys(table: pl.DataFrame) -> dict[str, str]:
    return {name: kernel_key(name) for name in table["name"].unique().to_list() if name}


_LAMBDA = re.compile(r"[\[{]?\s*lambda\s*\(([^()]*)\)\s*(?:#|\(instance )(\d+)\)?\s*[\]}]?")
"""Lambdas: ``{lambda(int)#2}`` of CUPTI, ``[lambda(int) (instance 2)]`` of Nsight Compute."""


_UNNAMED = re.compile(r"\(anonymous namespace\)|\bunnamed>")


@cache
def kernel_key(name: str) -> str:
    """Return a kernel's name without parts that differ by profiler: arguments, namespaces, casts,
    spaces. ``void at::native::foo<(int)4, float>(int)`` is ``foo<4,float>``."""
    text = re.sub(
        r"\((?:unsigned )?(?:int|long|bool|short|char|long long)\)(?=[\w-])", "", name[:4096]
    )
    text = _UNNAMED.sub("unnamed", labels.RETURN_TYPE.sub("", text))
    text = _LAMBDA.sub(r"#\2{\1}", text)
    text = _strip_arguments(text).removesuffix(".kd")
    text = re.sub(r"(?<![\w:])(?:void|static)\s+(?=[\w<])", "", text)
    text = re.sub(r"(?:\b[A-Za-z_]\w*)?::", "", text)
    text = re.sub(r"\s+|(?<=\d)(?:ull|ul|ll|u|l)\b|const\b", "", text)
    return re.sub(r">\((?:[^()]|\([^()]*\))*\)(?=#|>)", ">", text)


def _strip_arguments(name: str) -> str:
    """Cut a name at the parenthesis of the function's arguments, the last one outside templates."""
    depth, cut = 0, len(name)
    for index in range(len(name) - 1, -1, -1):
        if name[index] == ")":
            depth += 1
        elif name[index] == "(":
            depth -= 1
            if depth == 0:
                cut = index
                break
        elif depth == 0 and not name[index].isspace():
            return name
    return name[:cut] if cut else name
