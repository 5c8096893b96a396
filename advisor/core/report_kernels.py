"""Kernels: a report's rates of operators, hardware counters and compiled kernels, as plain data."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field


class OperatorRate(Struct, frozen=True, kw_only=True):
    """An operator with one set of inputs, compared with what the device attains."""

    name: str | None
    """Name as the profiler wrote it; ``null``: the kernel is of a CUDA graph, or is not linked."""
    shapes: str | None
    """Shapes of its tensors; ``null``: not recorded."""
    family: str
    """Family of its kernels, one of ``measure.device.families.FAMILIES``."""
    dtype: str | None
    """Number format that it computes in; ``null``: not known."""
    kernel: str
    """Name of its longest kernel."""
    tensor_core: bool | None
    """Whether that kernel runs on tensor or matrix cores; ``null``: unknown."""
    calls: float
    """Calls per step."""
    ns: float
    """Sum of the durations of all kernels that it launches, per step, ns."""
    share: float
    """Share of kernel time, communication left out."""
    flops: float | None
    """Floating-point operations of one call; ``null``: not known."""
    bytes: float | None
    """Bytes that one call reads and writes at least; ``null``: not known."""
    flops_per_s: float | None
    """FLOP/s reached; ``null``: not known."""
    bytes_per_s: float | None
    """Bytes/s reached; ``null``: not known."""
    attainable_flops_per_s: float | None
    """FLOP/s that matrix products reach on this device in this format; ``null``: no matrix work, or
    not known."""
    attainable_bytes_per_s: float | None
    """Bytes/s that a copy reaches in this device's memory; ``null``: unknown device."""
    bound: Literal["compute", "memory", "launch", "unknown"]
    """Limit of the operator at the attainable rates. ``launch``: starting the kernel takes longer
    than its work. ``unknown``: FLOPs, bytes or the device's rates are not known."""
    efficiency: float | None
    """Time at the attainable rates over the time taken, at most 1. ``null``: not judged."""
    saved_ns: float | None
    """Time per step that the attainable rates would save, ns; ``null``: not judged."""


class AttainableRate(Struct, frozen=True, kw_only=True):
    """A rate that the device can reach, with which operators are compared."""

    of: str
    """Number format whose matrix products reach the rate; or ``memory``."""
    rate: float
    """Rate, FLOP/s or bytes/s."""
    source: str | None
    """Public measurement that the rate comes from, or that it is the fastest product of this
    recording. ``null``: no measurement of this device was found. The rate is then the datasheet's
    peak times the share that the vendor's measured devices reach of theirs."""
    url: str | None
    """Address of that measurement; ``null``: it has none."""


class KernelLine(Struct, frozen=True, kw_only=True):
    """A line of a kernel's source in which warps were sampled."""

    file: str
    """Source file."""
    line: int
    """Line in ``file``."""
    share: float
    """Share of the kernel's samples."""
    stall: str
    """Most frequent stall reason of these warps; empty: not collected."""


class KernelCounters(Struct, kw_only=True):
    """A kernel with its hardware counters, from a report of Nsight Compute or rocprof."""

    name: str
    """Name as the profiler wrote it."""
    short: str
    """Short name: without arguments, namespaces and casts."""
    file: str = ""
    """Name of its report without suffixes, where another run has such a kernel too; else empty."""
    grid: list[int] | None
    """Grid size, blocks per dimension; ``null``: not recorded."""
    block: list[int] | None
    """Block size, threads per dimension; ``null``: not recorded."""
    duration_ns: float | None
    """Duration of one launch while it was profiled, ns; clocks are usually locked then."""
    profiled: int = 1
    """Number of launches that these figures are means of."""
    limit: str
    """Limit of the kernel: the busiest unit (``compute``, ``DRAM``, ``L2``, ``L1``) where it is
    busy, ``latency`` where none is, ``unknown`` where none was measured."""
    use: dict[str, float]
    """Unit -> share of its peak (0 to 1)."""
    occupancy: float | None
    """Achieved occupancy: share of the warps that a multiprocessor holds; ``null``: unknown."""
    theoretical_occupancy: float | None
    """Occupancy that registers, shared memory and block size admit; ``null``: not collected."""
    occupancy_limiter: str | None
    """Resource that admits the fewest blocks; ``null``: not collected."""
    waves: float | None
    """Number of waves: blocks of the grid over those that run at once; ``null``: not collected."""
    stalls: dict[str, float]
    """Share of the cycles between two instructions of a warp, by stall reason, the five largest."""
    dram_bytes: float | None
    """Bytes that one launch reads from and writes to DRAM; ``null``: not collected."""
    bandwidth: float | None
    """DRAM traffic, bytes per second; ``null``: not collected."""
    launches: float | None
    """Launches per step in the trace; ``null``: no trace, or it has none of them."""
    step_ns: float | None
    """Time of these launches per step in the trace, ns; ``null``: as above."""
    gain_ns: int | None
    """Time saved per step in the replay if the kernel's busiest unit were busy all the time, ns: an
    upper bound. ``null``: as above, or not replayed."""
    advice: list[str]
    """Messages of the profiler's own rules, with their estimates."""
    lines: list[KernelLine] = field(default_factory=list)
    """Source lines of the warps when they were sampled, most frequent first. Empty: not collected,
    or the kernel was compiled without ``-lineinfo``."""


class TritonKernel(Struct, kw_only=True):
    """A kernel as Triton compiled it, from its cache. ``null`` in a field: not recorded there."""

    name: str
    """Name as in the trace."""
    file: str | None
    """Source file of the function; ``null`` also where it is in several."""
    line: int | None
    """Line of the function in ``file``."""
    target: str
    """Target of the compiler: ``sm_90``, ``gfx942``; empty: not recorded."""
    num_warps: int
    """Warps per block."""
    num_stages: list[int]
    """Numbers of stages of software pipelining, over all ``variants``."""
    registers: int | None
    """Registers per thread; on AMD GPUs vector registers."""
    shared_bytes: int
    """Shared memory per block."""
    local_bytes: int | None
    """Local memory per thread: spilled registers, and arrays of the program."""
    spilled_bytes: int | None
    """Spilled registers per thread."""
    occupancy: float | None
    """Theoretical occupancy: what registers, shared memory and block size admit (0 to 1)."""
    occupancy_limiter: str | None
    """``registers``, ``shared memory`` or ``block sizes``; ``null`` also at full occupancy."""
    variants: int
    """Number of compilations in the cache with these figures."""
    launches: float | None
    """Launches per step in the trace; ``null``: no trace, or none that is surely of this kernel."""
    step_ns: float | None
    """Time of these launches per step in the trace, ns; ``null``: as above."""
