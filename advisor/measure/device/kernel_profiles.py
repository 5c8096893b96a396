"""Kernels with hardware counters, and those that Triton compiled: their limits, and their launches
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
BUSY_PERCENT = 60.0
"""Percent of a unit's peak from which it limits a kernel; below it, latency does. Nsight Compute's
SpeedOfLight rule divides at the same figure."""

ONE_LAUNCH = "saved by one launch of each, at most"
"""Evidence text of an estimated gain for kernels that no trace has."""
MAX_NAMED = 500
"""Launches that an edit selects one by one, at most, where others of the name differ in size."""
PIPE = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
"""Use of the tensor cores."""
UNITS: dict[Limit, tuple[str, ...]] = {
    "compute": (
        "sm__throughput.avg.pct_of_peak_sustained_elapsed",
        PIPE,
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
"""Unit -> metrics of its use, percent of its peak; the greatest that was collected counts."""
LIMITERS = {
    "registers": "launch__occupancy_limit_registers",
    "shared memory": "launch__occupancy_limit_shared_mem",
    "warps per block": "launch__occupancy_limit_warps",
    "blocks per SM": "launch__occupancy_limit_blocks",
    "barriers": "launch__occupancy_limit_barriers",
}
"""Resource -> metric of the resident blocks of a multiprocessor that it admits."""
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+?)_per_issue_active\.ratio")
NO_STALLS = ("selected", "not_selected")
"""Warp states that are no stalls."""


LABEL_WIDTH = 38


class ProfiledKernel(NamedTuple):
    """Counters of one kernel. Shares are percent of a peak; ``None``: not collected."""

    profile: KernelProfile
    label: str
    """Short name in sentences and tables."""
    limit: Limit
    """Busiest unit; ``latency``: no unit is busy; ``unknown``: none was measured, or not the tensor
    cores that it computes on."""
    use: dict[Limit, float]
    """Use of each unit, percent of its peak."""
    occupancy: float | None
    """Achieved occupancy, percent."""
    theoretical: float | None
    """Theoretical occupancy that registers, shared memory and block size admit, percent."""
    limiter: str | None
    """Resource of LIMITERS that admits the fewest blocks."""
    waves: float | None
    """Blocks of the grid over those that run at once."""
    stalls: dict[str, float]
    """Stall reason -> share of the cycles between two instructions of a warp, greatest first."""
    bytes: float | None
    """DRAM traffic of one launch, bytes."""
    on_tensor_cores: bool
    """Whether it computes on tensor cores, by its counters, or by its name where none tell."""
    rows: NDArray[np.int64]
    """Rows of ``trace.gpu`` that are launches of it in the used steps; empty: none, or no trace."""

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
    """List the kernels of the profiles beside a trace, or of profiles alone, in their order."""
    profiles = a.trace.meta.kernel_profiles
    if profiles is None:
        return []
    rows = _launches(a, profiles.kernels)
    keys = [labels.clean(kernel_key(each.name)) for each in profiles.kernels]
    named = label_kernels(keys)
    return [
        _measured(each, named[key], own)
        for each, key, own in zip(profiles.kernels, keys, rows, strict=True)
    ]


def is_reference(name: str) -> bool:
    """Tell whether a kernel is by its name a plain computation that others are checked against."""
    return re.search(r"(?<![a-z])[Rr]eference(?![a-z])", name) is not None


def label_kernels(keys: Iterable[str]) -> dict[str, str]:
    """Shorten the names of a report's kernels, by their keys, the same in all its parts."""
    named = labels.labels_by_name(sorted(set(keys)), LABEL_WIDTH)
    heads = Counter(label.partition("…")[0] for label in named.values())
    return {
        key: f"{head}…>" if tail and len(tail) <= MAX_STUB and heads[head] == 1 else label
        for key, label in named.items()
        for head, _, tail in [label.partition("…")]
    }


MAX_STUB = 3
"""Characters of the end of a cut name that say nothing: ``Kernel<Gemm…cu``."""


def shorten_kernel(a: Analysis, k: ProfiledKernel, share: float) -> Edit | None:
    """Return the edit that shortens a kernel's launches in the trace by ``share`` at best, and not
    at all at worst; ``None``: the trace has none of them, or they cannot be selected."""
    if not len(k.rows):
        return None
    gpu = a.trace.gpu
    name = str(gpu["name"][int(k.rows[0])])
    select = Select(on="gpu", kind=("kernel",), name=f"^{re.escape(name)}$")
    if int((gpu["name"] == name).to_numpy()[a.in_window].sum()) != len(k.rows):
        chosen = gpu["correlation"].gather(k.rows).drop_nulls().unique().to_list()
        if not 0 < len(chosen) <= MAX_NAMED:
            return None
        select = Select(on="gpu", kind=("kernel",), correlation=tuple(chosen))
    return Edit(op="scale", select=select, factor=1 - share, factor_low=1 - share, factor_high=1.0)


def _measured(profile: KernelProfile, label: str, rows: NDArray[np.int64]) -> ProfiledKernel:
    use = {
        unit: max(known)
        for unit, names in UNITS.items()
        if (known := [x for name in names if (x := profile.number(name)) is not None])
    }
    limit: Limit = "unknown"
    if use:
        unit = max(use, key=use.__getitem__)
        limit = unit if use[unit] >= BUSY_PERCENT else "latency"
    tensor = _on_tensor_cores(profile)
    if limit == "latency" and tensor and profile.number(PIPE) is None:
        limit = "unknown"  # the unit that it is written for was not measured
    blocks = {
        what: admitted
        for what, name in LIMITERS.items()
        if (admitted := profile.number(name)) is not None and admitted > 0
    }
    return ProfiledKernel(
        profile,
        label,
        limit,
        use,
        occupancy=_first(
            profile,
            "sm__warps_active.avg.pct_of_peak_sustained_active",
            "System Speed-of-Light/Wavefront Occupancy",
        ),
        theoretical=_first(profile, "sm__maximum_warps_per_active_cycle_pct"),
        limiter=min(blocks, key=blocks.__getitem__) if blocks else None,
        waves=_first(profile, "launch__waves_per_multiprocessor"),
        stalls=_stalls(profile),
        bytes=_dram_bytes(profile),
        on_tensor_cores=tensor,
        rows=rows,
    )


_TENSOR_COUNTERS = re.compile(
    r"sm__(?:ops_path_tensor|(?:inst_executed_)?pipe_tensor)\w*\.(?:sum|avg\.pct_of_peak_\w+)$"
)


def _on_tensor_cores(profile: KernelProfile) -> bool:
    counted = [
        value
        for name in profile.metrics
        if _TENSOR_COUNTERS.match(name) and (value := profile.number(name)) is not None
    ]
    if counted:
        return max(counted) > 0
    return bool(name_matches(pl.Series([profile.name]), TENSOR_CORE)[0])


class MatchedKernel(NamedTuple):
    """A kernel that Triton compiled, and its launches."""

    kernel: CompiledKernel
    occupancy: float | None
    """Theoretical occupancy, percent; ``None``: registers or the GPU's limits are not known."""
    limiter: str | None
    """Limit: ``registers``, ``shared memory``, ``block sizes``; ``None``: as above, or 100%."""
    rows: NDArray[np.int64]
    """Rows of ``trace.gpu`` in the used steps; empty: none, no trace, or another compilation that
    nothing in the trace distinguishes."""


def compiled_kernels(a: Analysis) -> list[MatchedKernel]:
    """List the kernels of a cache of Triton, alone or beside a trace."""
    profiles = a.trace.meta.kernel_profiles
    if profiles is None or not profiles.compiled:
        return []
    rows = _compiled_launches(a, profiles.compiled)
    return [
        MatchedKernel(each, *_theoretical(each, a.device), own)
        for each, own in zip(profiles.compiled, rows, strict=True)
    ]


def _theoretical(k: CompiledKernel, device: Device | None) -> tuple[float | None, str | None]:
    """Return the occupancy, percent, and what limits it. ``device``: that of the trace."""
    found = re.fullmatch(r"sm_(\d{1,2})(\d)a?", k.target)
    compute = None if found is None else (int(found[1]), int(found[2]))
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


def _compiled_launches(a: Analysis, kernels: tuple[CompiledKernel, ...]) -> list[NDArray[np.int64]]:
    """Return rows of ``trace.gpu`` by kernel: those of its name whose threads, registers, shared
    memory and architecture, where recorded, are its own and no other kernel's."""
    result = [np.zeros(0, dtype=np.int64)] * len(kernels)
    named: dict[str, list[int]] = {}
    for place, kernel in enumerate(kernels):
        if _is_of(kernel, a.device):
            named.setdefault(kernel.name, []).append(place)
    gpu = a.trace.gpu
    used = a.in_window & (gpu["kind"] == "kernel").to_numpy()
    sizes = ["threads", "registers", "shared"]
    table = gpu.select(
        pl.int_range(pl.len()).alias("row"),
        pl.col("name").cast(pl.String).str.strip_suffix(".kd"),
        *sizes,
    ).filter(pl.Series(used, dtype=pl.Boolean))
    table = table.filter(pl.col("name").is_in(list(named)))
    for (name, *found), part in table.partition_by("name", *sizes, as_dict=True).items():
        own = [place for place in named[str(name)] if _fits(kernels[place], *found)]
        if len(own) > 1:
            own = [place for place in own if kernels[place].shared == found[2]]
        if len(own) == 1:
            rows = part["row"].to_numpy().astype(np.int64)
            result[own[0]] = np.concatenate([result[own[0]], rows])
    return result


def _is_of(k: CompiledKernel, device: Device | None) -> bool:
    """Return whether a kernel is compiled for this GPU, as far as both are known."""
    if device is None or device.compute is None or not k.target.startswith("sm_"):
        return True
    return k.target.rstrip("a") == "sm_{}{}".format(*device.compute)


def _fits(k: CompiledKernel, threads: Any, registers: Any, shared: Any) -> bool:
    """Compare a launch with a kernel. Some profilers add CUDA's own part to shared memory."""
    return (
        threads in (None, k.threads)
        and (k.registers is None or registers in (None, 0, k.registers))
        and shared in (None, k.shared, k.shared + RESERVED_SHARED)
    )


def _first(profile: KernelProfile, *names: str) -> float | None:
    return next((x for name in names if (x := profile.number(name)) is not None), None)


def _stalls(profile: KernelProfile) -> dict[str, float]:
    cycles = {
        found[1]: value
        for name in profile.metrics
        if (found := STALL.fullmatch(name)) is not None
        and (value := profile.number(name)) is not None
    }
    total = sum(cycles.values())
    kept = {name: n for name, n in cycles.items() if name not in NO_STALLS and n > 0}
    ordered = sorted(kept.items(), key=lambda each: -each[1])
    return {name: n / total for name, n in ordered} if total > 0 else {}


def _dram_bytes(profile: KernelProfile) -> float | None:
    """Return the bytes read and written; rocprof counts what L2 fetches and writes."""
    for names in (("dram__bytes_read.sum", "dram__bytes_write.sum"), ("FETCH_SIZE", "WRITE_SIZE")):
        parts = [profile.number(name) for name in names]
        if None not in parts:
            return sum(part for part in parts if part is not None)
    return None


def _launches(a: Analysis, kernels: tuple[KernelProfile, ...]) -> list[NDArray[np.int64]]:
    """Find each profile's launches: rows of ``trace.gpu`` in the used steps of the same kernel and
    size. Where several profiles are of one kernel and size (one per launch), the first has them:
    their counters differ by noise alone."""
    none = np.zeros(0, dtype=np.int64)
    gpu = a.trace.gpu
    if gpu.is_empty():
        return [none] * len(kernels)
    used = a.in_window & (gpu["kind"] == "kernel").to_numpy()
    table = gpu.select(
        pl.int_range(pl.len()).alias("row"), pl.col("name").cast(pl.String), "blocks", "threads"
    ).filter(pl.Series(used))
    table = table.with_columns(key=pl.col("name").replace_strict(_keys(table), default=None))
    groups: dict[str, pl.DataFrame] = {
        str(key): part for (key,), part in table.partition_by("key", as_dict=True).items()
    }
    result: list[NDArray[np.int64]] = []
    taken: set[tuple[str, int | None, int | None]] = set()
    for kernel in kernels:
        key = kernel_key(kernel.name)
        blocks, threads = (
            None if each is None else each[0] * each[1] * each[2]
            for each in (kernel.grid, kernel.block)
        )
        if key not in groups or (key, blocks, threads) in taken:
            result.append(none)
            continue
        taken.add((key, blocks, threads))
        own = groups[key]
        for column, size in (("blocks", blocks), ("threads", threads)):
            if size is not None and own[column].null_count() < own.height:
                own = own.filter(pl.col(column) == size)
        result.append(own["row"].to_numpy().astype(np.int64))
    return result


def _keys(table: pl.DataFrame) -> dict[str, str]:
    return {name: kernel_key(name) for name in table["name"].unique().to_list() if name}


_LAMBDA = re.compile(r"[\[{]?\s*lambda\s*\(([^()]*)\)\s*(?:#|\(instance )(\d+)\)?\s*[\]}]?")
"""Lambdas: ``{lambda(int)#2}`` of CUPTI, ``[lambda(int) (instance 2)]`` of Nsight Compute."""


_UNNAMED = re.compile(r"\(anonymous namespace\)|\bunnamed>")


@cache
def kernel_key(name: str) -> str:
    """Return a kernel's name without what profilers write differently: arguments, namespaces, casts
    and spaces. ``void at::native::foo<(int)4, float>(int)`` is ``foo<4,float>``."""
    text = re.sub(
        r"\((?:unsigned )?(?:int|long|bool|short|char|long long)\)(?=[\w-])", "", name[:4096]
    )
    text = _UNNAMED.sub("unnamed", labels.RETURN_TYPE.sub("", text))
    text = _LAMBDA.sub(r"#\2{\1}", text)
    text = _without_arguments(text).removesuffix(".kd")
    text = re.sub(r"(?<![\w:])(?:void|static)\s+(?=[\w<])", "", text)
    text = re.sub(r"(?:\b[A-Za-z_]\w*)?::", "", text)
    text = re.sub(r"\s+|(?<=\d)(?:ull|ul|ll|u|l)\b|const\b", "", text)
    return re.sub(r">\((?:[^()]|\([^()]*\))*\)(?=#|>)", ">", text)


def _without_arguments(name: str) -> str:
    """Cut a name at the parenthesis of the function's arguments: the last one outside templates."""
    depth, cut = 0, len(name)
    for at in range(len(name) - 1, -1, -1):
        if name[at] == ")":
            depth += 1
        elif name[at] == "(":
            depth -= 1
            if depth == 0:
                cut = at
                break
        elif depth == 0 and not name[at].isspace():
            return name
    return name[:cut] if cut else name
