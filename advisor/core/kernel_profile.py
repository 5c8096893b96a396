"""KernelProfiles: hardware counters of single kernels, as Nsight Compute and rocprof write them,
and what Triton compiled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Metric(NamedTuple):
    """One counter of one kernel."""

    value: float | str | None
    """In the metric's base unit where that is known (ns, bytes, Hz); ``None``: not collected."""
    unit: str = ""
    """``%``, ``ns``, ``byte``, ``byte/s``, ``Hz`` …; empty: a number, or not written."""


@dataclass(frozen=True)
class ToolAdvice:
    """What the profiler's own rule says of a kernel."""

    rule: str
    """Its identifier, such as ``SOLBottleneck``."""
    text: str
    """As the tool wrote it."""
    scope: str = ""
    """``global``: the estimate is of the kernel's time. ``local``: of one part of the hardware."""
    saved: float | None = None
    """Estimated decrease, as a share (0 to 1); ``None``: the tool gives none."""


class SampledLine(NamedTuple):
    """A line of a kernel's source in which warps were sampled."""

    file: str
    line: int
    samples: int
    stall: str
    """What most of these warps waited for (``selected``: they issued); empty: not collected."""


@dataclass(frozen=True)
class KernelProfile:
    """One profiled launch of a kernel; of rocprof, the mean of its launches."""

    name: str
    """As a person would call it: without arguments where the tool says so."""
    grid: tuple[int, int, int] | None
    """Blocks; ``None``: not recorded."""
    block: tuple[int, int, int] | None
    """Threads per block."""
    duration_ns: float | None
    """While profiled: clocks are usually locked to their base, and caches flushed."""
    metrics: dict[str, Metric]
    """Counters by the tool's raw name; of the details page by ``section/label`` where the raw name
    is not known."""
    advice: tuple[ToolAdvice, ...] = ()
    device: str = ""
    """Name of the GPU; empty: not recorded."""
    launches: int = 1
    """Launches that the metrics are means of."""
    signature: str = ""
    """The mangled or full name; empty: only ``name`` is known."""
    samples: int | None = None
    """Of warps, by program counter; ``None``: not collected."""
    lines: tuple[SampledLine, ...] = ()
    """Where those were, most first; empty: compiled without ``-lineinfo``, or not collected."""

    @property
    def hot_line(self) -> SampledLine | None:
        """The line in which half of the warps were sampled, or more."""
        first = self.lines[0] if self.lines else None
        return first if first is not None and first.samples >= 0.5 * (self.samples or 1) else None

    def number(self, name: str) -> float | None:
        """A counter's value; ``None``: not collected, or text."""
        metric = self.metrics.get(name)
        return metric.value if metric is not None and isinstance(metric.value, float) else None


class CompiledKernel(NamedTuple):
    """A kernel as Triton compiled it. Compilations that differ in nothing here but stages and place
    are one. ``None``: not in the cache."""

    name: str
    target: str
    """``sm_90``, ``gfx942``; empty: not recorded."""
    threads: int
    """Per block."""
    num_warps: int
    num_stages: tuple[int, ...]
    """Of all of them, ascending."""
    shared: int
    """Bytes of shared memory per block."""
    registers: int | None
    """Per thread; on AMD GPUs vector registers."""
    local: int | None
    """Bytes of local (AMD: private) memory per thread: spilled registers, and arrays."""
    spilled: int | None
    """Bytes of registers that were spilled there, per thread."""
    place: tuple[str, int] | None
    """File and line of the function; ``None``: not recorded, or several."""
    variants: int = 1
    """Compilations."""


@dataclass(frozen=True)
class KernelProfiles:
    """The kernels of one or several reports of a kernel profiler, or of a cache of Triton."""

    path: str
    tool: str
    """``Nsight Compute``, ``rocprof`` or ``Triton``."""
    kernels: tuple[KernelProfile, ...]
    dropped: dict[str, int] = field(default_factory=dict)
    """Reason -> rows or results that were left out."""
    compiled: tuple[CompiledKernel, ...] = ()

    @property
    def vendor(self) -> str:
        """Of the GPU, as in ``TraceMeta.vendor``."""
        amd = self.tool == "rocprof" or any(k.target.startswith("gfx") for k in self.compiled)
        return "amd" if amd else "nvidia"
