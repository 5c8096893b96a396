"""Kernels: a report's operator rates, hardware counters and compiled kernels, as plain data."""

from typing import Literal

from msgspec import Struct, field


class OperatorRate(Struct, frozen=True, kw_only=True):
    """An operator with one set of inputs, compared with the device's attainable rates."""

    name: str | None
    """Name as the profiler wrote it, or ``null`` if the kernel is part of a CUDA graph or is not
    linked."""
    shapes: str | None
    """Shapes of its tensors, or ``null`` if not recorded."""
    family: str
    """Family of its kernels, one of ``measure.device.families.FAMILIES``."""
    dtype: str | None
    """Number format of its computation, or ``null`` if unknown."""
    kernel: str
    """Name of its longest kernel."""
    tensor_core: bool | None
    """Whether the longest kernel runs on tensor or matrix cores, or ``null`` if unknown."""
    calls: float
    """Calls per step."""
    ns: float
    """Total duration of all kernels that it launches, per step, ns."""
    share: float
    """Share of kernel time without communication."""
    flops: float | None
    """Floating-point operations of one call, or ``null`` if unknown."""
    bytes: float | None
    """Minimum number of bytes that one call reads and writes, or ``null`` if unknown."""
    flops_per_s: float | None
    """FLOP/s reached, or ``null`` if unknown."""
    bytes_per_s: float | None
    """Bytes/s reached, or ``null`` if unknown."""
    attainable_flops_per_s: float | None
    """FLOP/s that matrix products reach on this device in this format. ``null`` if unknown or
    without matrix work."""
    attainable_bytes_per_s: float | None
    """Bytes/s that a copy reaches in this device's memory, or ``null`` for an unknown device."""
    bound: Literal["compute", "memory", "launch", "unknown"]
    """Limit of the operator at the attainable rates. ``launch``: starting the kernel takes longer
    than its work. ``unknown``: FLOPs, bytes or the device's rates are unknown."""
    efficiency: float | None
    """Time at the attainable rates over the measured time, at most 1, or ``null`` if not judged."""
    saved_ns: float | None
    """Time per step that the attainable rates would save, ns, or ``null`` if not judged."""


class AttainableRate(Struct, frozen=True, kw_only=True):
    """A rate that the device can reach, to compare operators with."""

    of: str
    """Number format of matrix products with this rate, or ``memory``."""
    rate: float
    """Rate, FLOP/s or bytes/s."""
    source: str | None
    """Public measurement behind the rate, or a note that it is the fastest product of this
    recording. ``null`` if this device was never measured. The rate is then the datasheet's peak
    times the share of their peaks that the vendor's measured devices reach."""
    url: str | None
    """Address of the measurement, or ``null``."""


class KernelLine(Struct, frozen=True, kw_only=True):
    """A line of a kernel's source in which warps were sampled."""

    file: str
    """Source file."""
    line: int
    """Line in ``file``."""
    share: float
    """Share of the kernel's samples."""
    stall: str
    """Most frequent stall reason of the line's warps. Empty if not collected."""


class KernelCounters(Struct, kw_only=True):
    """A kernel with hardware counters, from a report of Nsight Compute or rocprof."""

    name: str
    """Name as the profiler wrote it."""
    short: str
    """Short name: without arguments, namespaces and casts."""
    file: str = ""
    """Name of its report without suffixes, if another run has the same kernel. Empty otherwise."""
    grid: list[int] | None
    """Grid size, blocks per dimension, or ``null`` if not recorded."""
    block: list[int] | None
    """Block size, threads per dimension, or ``null`` if not recorded."""
    duration_ns: float | None
    """Duration of one profiled launch, ns. Profilers usually lock the clocks."""
    profiled: int = 1
    """Number of launches over which the figures are averaged."""
    limit: str
    """Limit of the kernel: the busiest unit (``compute``, ``DRAM``, ``L2``, ``L1``), ``latency`` if
    no unit is busy, ``unknown`` if none was measured."""
    use: dict[str, float]
    """Share of its peak (0 to 1), by unit."""
    occupancy: float | None
    """Achieved occupancy: share of the warps that a multiprocessor can hold, or ``null``."""
    theoretical_occupancy: float | None
    """Occupancy that registers, shared memory and block size allow, or ``null`` if not
    collected."""
    occupancy_limiter: str | None
    """Resource that allows the fewest blocks, or ``null`` if not collected."""
    waves: float | None
    """Number of waves: blocks of the grid over blocks that run at once, or ``null``."""
    stalls: dict[str, float]
    """Share of the cycles between two instructions of a warp, for the five largest stall
    reasons."""
    dram_bytes: float | None
    """Bytes that one launch reads from and writes to DRAM, or ``null`` if not collected."""
    bandwidth: float | None
    """DRAM traffic, bytes per second, or ``null`` if not collected."""
    launches: float | None
    """Launches per step in the trace, or ``null`` if it has none."""
    step_ns: float | None
    """Time of the kernel's launches per step in the trace, ns, or ``null`` as for ``launches``."""
    gain_ns: int | None
    """Time saved per step in the replay if the kernel's busiest unit were always busy, ns: an upper
    bound. ``null`` without a trace or a replay."""
    advice: list[str]
    """Messages of the profiler's own rules, with their estimates."""
    lines: list[KernelLine] = field(default_factory=list)
    """Source lines in which warps were sampled, most frequent first. Empty if not collected, or if
    the kernel was compiled without ``-lineinfo``."""


class TritonKernel(Struct, kw_only=True):
    """A kernel as Triton compiled it, from its cache. A field is ``null`` if the cache lacks it."""

    name: str
    """Name as in the trace."""
    file: str | None
    """Source file of the function, or ``null`` also if it is in several files."""
    line: int | None
    """Line of the function in ``file``."""
    target: str
    """Target of the compiler: ``sm_90``, ``gfx942``. Empty if not recorded."""
    num_warps: int
    """Warps per block."""
    num_stages: list[int]
    """Numbers of stages of software pipelining, over all ``variants``."""
    registers: int | None
    """Registers per thread. On AMD GPUs, vector registers."""
    shared_bytes: int
    """Shared memory per block."""
    local_bytes: int | None
    """Local memory per thread: spilled registers, and arrays of the program."""
    spilled_bytes: int | None
    """Spilled registers per thread."""
    occupancy: float | None
    """Theoretical occupancy (0 to 1) that registers, shared memory and block size allow."""
    occupancy_limiter: str | None
    """``registers``, ``shared memory`` or ``block sizes``; ``null`` also at full occupancy."""
    variants: int
    """Number of compilations in the cache with the same figures."""
    launches: float | None
    """Launches per step in the trace, or ``null`` if none is certainly of this kernel."""
    step_ns: float | None
    """Time of the kernel's launches per step in the trace, ns, or ``null`` as for ``launches``."""
