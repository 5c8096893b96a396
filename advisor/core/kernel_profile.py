"""KernelProfiles: hardware counters of single kernels, as Nsight Compute and rocprof write them,
and what Triton compiled."""

from dataclasses import dataclass, field
from typing import NamedTuple


class Metric(NamedTuple):
    """A counter of one kernel."""

    value: float | str | None
    """Value in the base unit where that is known (ns, bytes, Hz); ``None``: not collected."""
    unit: str = ""
    """Unit: ``%``, ``ns``, ``byte``, ``byte/s``, ``Hz`` …; empty: a number, or not written."""


@dataclass(frozen=True)
class ToolAdvice:
    """Message of the profiler's own rule on a kernel."""

    rule: str
    """Identifier of the rule, such as ``SOLBottleneck``."""
    text: str
    """Text as the tool wrote it."""
    scope: str = ""
    """Scope of the estimate: ``global``, the kernel's time; ``local``, a part of the hardware."""
    saved: float | None = None
    """Estimated decrease, as a share (0 to 1); ``None``: the tool gives none."""


class SampledLine(NamedTuple):
    """A line of a kernel's source in which warps were sampled."""

    file: str
    line: int
    samples: int
    stall: str
    """Most frequent stall reason of the warps (``selected``: they issued); empty: unknown."""


@dataclass(frozen=True)
class KernelProfile:
    """A profiled launch of a kernel; of rocprof, the mean of its launches."""

    name: str
    """Short name, without arguments where the tool says so."""
    grid: tuple[int, int, int] | None
    """Grid size, blocks per dimension; ``None``: not recorded."""
    block: tuple[int, int, int] | None
    """Block size, threads per dimension; ``None``: not recorded."""
    duration_ns: float | None
    """Duration while profiled, ns: clocks are usually locked to their base, and caches flushed."""
    metrics: dict[str, Metric]
    """Counters by the tool's raw name; of the details page by ``section/label`` where the raw name
    is not known."""
    advice: tuple[ToolAdvice, ...] = ()
    device: str = ""
    """Name of the GPU; empty: not recorded."""
    compute: tuple[int, int] | None = None
    """Compute capability of the GPU; ``None``: not recorded."""
    launches: int = 1
    """Number of launches that the metrics are means of."""
    signature: str = ""
    """Mangled or full name; empty: only ``name`` is known."""
    samples: int | None = None
    """Number of samples of warps, by program counter; ``None``: not collected."""
    lines: tuple[SampledLine, ...] = ()
    """Lines of these samples, most first; empty: not collected, or no ``-lineinfo``."""
    file: str = ""
    """Name of its report without suffixes, where another run has a kernel of this name too."""

    @property
    def hot_line(self) -> SampledLine | None:
        """Line in which half of the warps were sampled, or more; ``None``: there is none."""
        first = self.lines[0] if self.lines else None
        return first if first is not None and first.samples >= 0.5 * (self.samples or 1) else None

    def number(self, name: str) -> float | None:
        """Return a counter's value; ``None``: not collected, or text."""
        metric = self.metrics.get(name)
        return metric.value if metric is not None and isinstance(metric.value, float) else None


class CompiledKernel(NamedTuple):
    """A kernel as Triton compiled it. Compilations that differ in nothing here but stages and place
    are one. ``None`` in a field: not in the cache."""

    name: str
    target: str
    """Target of the compiler: ``sm_90``, ``gfx942``; empty: not recorded."""
    threads: int
    """Threads per block."""
    num_warps: int
    num_stages: tuple[int, ...]
    """Numbers of pipelining stages of all compilations, ascending."""
    shared: int
    """Shared memory per block, bytes."""
    registers: int | None
    """Registers per thread; on AMD GPUs vector registers."""
    local: int | None
    """Local (AMD: private) memory per thread, bytes: spilled registers, and arrays."""
    spilled: int | None
    """Registers that were spilled to local memory, bytes per thread."""
    place: tuple[str, int] | None
    """File and line of the function; ``None``: not recorded, or several."""
    variants: int = 1
    """Number of compilations that are counted as this one."""


@dataclass(frozen=True)
class KernelProfiles:
    """Kernels of one or several reports of a kernel profiler, or of a Triton cache."""

    path: str
    tool: str
    """Name of the tool: ``Nsight Compute``, ``rocprof`` or ``Triton``."""
    kernels: tuple[KernelProfile, ...]
    dropped: dict[str, int] = field(default_factory=dict)
    """Number of rows or results that were left out, by reason."""
    compiled: tuple[CompiledKernel, ...] = ()

    @property
    def vendor(self) -> str:
        """Vendor of the GPU, as in ``TraceMeta.vendor``."""
        amd = self.tool == "rocprof" or any(k.target.startswith("gfx") for k in self.compiled)
        return "amd" if amd else "nvidia"
