"""KernelProfiles: hardware counters of single kernels from Nsight Compute and rocprof, and kernels
compiled by Triton."""

from dataclasses import dataclass, field
from typing import NamedTuple


class Metric(NamedTuple):
    """A counter of one kernel."""

    value: float | str | None
    """Value in the base unit if that is known (ns, bytes, Hz), or ``None`` if not collected."""
    unit: str = ""
    """Unit: ``%``, ``ns``, ``byte``, ``byte/s``, ``Hz`` … Empty for a plain number or no unit."""


@dataclass(frozen=True)
class ToolAdvice:
    """Message of the profiler's own rule on a kernel."""

    rule: str
    """Identifier of the rule, such as ``SOLBottleneck``."""
    text: str
    """Text as the tool wrote it."""
    scope: str = ""
    """Scope of the estimate: ``global`` for the kernel's time, ``local`` for a part of the
    hardware."""
    saved: float | None = None
    """Estimated decrease, as a share (0 to 1), or ``None`` if the tool gives none."""


class SampledLine(NamedTuple):
    """A line of a kernel's source in which warps were sampled."""

    file: str
    line: int
    samples: int
    stall: str
    """Most frequent stall reason of the warps (``selected``: they issued). Empty if unknown."""


@dataclass(frozen=True)
class KernelProfile:
    """A profiled launch of a kernel, or for rocprof the mean of its launches."""

    name: str
    """Short name, without arguments if the tool leaves them out."""
    grid: tuple[int, int, int] | None
    """Grid size, blocks per dimension, or ``None`` if not recorded."""
    block: tuple[int, int, int] | None
    """Block size, threads per dimension, or ``None`` if not recorded."""
    duration_ns: float | None
    """Duration while profiled, ns. Clocks are usually locked to their base, and caches flushed."""
    metrics: dict[str, Metric]
    """Counters by the tool's raw name, or by ``section/label`` of the details page if the raw name
    is unknown."""
    advice: tuple[ToolAdvice, ...] = ()
    device: str = ""
    """Name of the GPU. Empty if not recorded."""
    compute: tuple[int, int] | None = None
    """Compute capability of the GPU, or ``None`` if not recorded."""
    launches: int = 1
    """Number of launches over which the metrics are averaged."""
    signature: str = ""
    """Mangled or full name. Empty if only ``name`` is known."""
    samples: int | None = None
    """Number of samples of warps, by program counter, or ``None`` if not collected."""
    lines: tuple[SampledLine, ...] = ()
    """Lines of the samples, most frequent first. Empty if not collected or without
    ``-lineinfo``."""
    file: str = ""
    """Name of its report without suffixes, if another run has a kernel of the same name."""

    @property
    def hot_line(self) -> SampledLine | None:
        """Line in which at least half of the warps were sampled, or ``None`` if there is none."""
        first = self.lines[0] if self.lines else None
        return first if first is not None and first.samples >= 0.5 * (self.samples or 1) else None

    def number(self, name: str) -> float | None:
        """Return a counter's value, or ``None`` if it was not collected or is text."""
        metric = self.metrics.get(name)
        return metric.value if metric is not None and isinstance(metric.value, float) else None


class CompiledKernel(NamedTuple):
    """A kernel as Triton compiled it. Compilations that only differ in stages and place are merged.
    A field is ``None`` if the cache lacks it."""

    name: str
    target: str
    """Target of the compiler: ``sm_90``, ``gfx942``. Empty if not recorded."""
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
    """File and line of the function, or ``None`` if not recorded, or if there are several."""
    variants: int = 1
    """Number of merged compilations."""


@dataclass(frozen=True)
class KernelProfiles:
    """Kernels from one or more reports of a kernel profiler, or from a Triton cache."""

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
