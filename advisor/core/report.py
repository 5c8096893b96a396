"""Report: what was found, as plain data with a versioned schema. Renderers compute nothing."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from advisor.core.auxiliary_inputs import (
    AUXILIARY_INPUTS_BY_NAME,
    CompileLog,
    FlightRecord,
    NetworkLog,
)
from advisor.core.charts import Views
from advisor.core.finding import Finding, HotLine, PassedCheck, SkippedCheck, unit_of
from advisor.core.layers import Layers, MeshAxis
from advisor.core.prices import Cost, EnergyUse
from advisor.core.ranks import Ranks
from advisor.core.report_file import decode_json, encode_json
from advisor.core.rule import Per
from advisor.core.run_directory import MAX_VALUE

SCHEMA = "advisor.report/2"

MAX_LINES = 400
"""Lines that ``print`` shows of a report or a comparison."""

Status = Literal["bottlenecks", "healthy", "limited"]


def render(subject: object, formats: str, name: str, **options: Any) -> str:
    """A subject in the format ``name`` of ``advisor.render.formats.<formats>``, for ``print`` and
    notebooks. The renderers lie far above and are imported by name, when something is printed."""
    home = import_module("advisor.render.formats")
    text: str = getattr(home, formats).render(name, subject, **options)
    return text


def limit_lines(text: str, rest: str) -> str:
    """The first MAX_LINES lines, without the last line end; ``rest``: where the others are."""
    lines = text.rstrip("\n").split("\n")
    if len(lines) > MAX_LINES:
        from advisor.core.text import count_noun

        more = len(lines) - MAX_LINES
        lines[MAX_LINES:] = [f"… {count_noun(more, 'more line')}; {rest}"]
    return "\n".join(lines)


class Input(Struct, kw_only=True):
    """One trace that was read."""

    path: str
    """As it was given; ``-``: standard input."""
    rank: int | None
    """``null``: neither in the file nor in its name."""
    window: int
    """Which recording of this rank, in order of time, from 0."""
    windows: int
    """How many windows this rank has; only one is analysed."""
    events_read: int
    """Events that were kept."""
    events_dropped: dict[str, int]
    """Reason -> events that were left out."""
    bytes_read: int
    """Uncompressed size, bytes."""
    truncated: bool
    """The file ends early: only what comes before is analysed."""
    damage: str | None = None
    """What the unpacker or the JSON reader complained of."""
    format: str | None = None
    """Of the file: ``kineto``, ``nsys``, ``rocpd`` …; ``null``: unknown."""
    record_shapes: bool | None = None
    """Recorded with shapes; ``null``: unknown."""
    with_stack: bool | None = None
    """Recorded with Python stacks, which slow the host; ``null``: unknown."""
    profile_memory: bool | None = None
    """Recorded with memory events; ``null``: unknown."""


class Scope(Struct, kw_only=True):
    """What the figures are about."""

    rank: int | None
    """The rank that the figures are of."""
    step_source: str
    """``engine`` (marks of an inference engine), ``module calls`` or ``vocabulary look-ups`` of a
    model that infers, ``ProfilerStep``, ``recorder``, ``optimizer``, ``ranges``,
    ``device sequence`` or ``whole trace``; ``StepTraceAnnotation``, ``step_num`` or ``program`` of
    JAX and TensorFlow; ``record`` when no window was profiled and the figures are the recorder's
    own. Of a source without a trace it is ``snapshot``, ``counters``, ``Triton cache``,
    ``flight recorder``, ``network log`` or ``compile log``."""
    steps_found: int = 0
    """Steps in the trace, or in the range that was asked for."""
    steps_used: int = 0
    """Steps that are measured: whole ones that are no outliers."""
    outliers: list[str] = field(default_factory=list)
    """Names of the steps that were set aside."""
    span_ns: int = 0
    """Length of the analysed window, ns."""
    step_ns: float = 0.0
    """Mean duration of the used steps, ns."""
    step_min_ns: int = 0
    """The shortest used step, ns."""
    step_max_ns: int = 0
    """The longest used step, ns."""
    step_median_ns: float = 0.0
    """Of the used steps, ns."""
    device: int | None = None
    """The GPU that is analysed, the one with most work; ``null``: no device work."""
    device_name: str | None = None
    """As the trace has it."""
    device_known: bool = False
    """There is an entry in advisor/core/gpus: rooflines can be measured."""
    devices_seen: int = 0
    """GPUs with work in the trace."""
    framework: str | None = None
    """``pytorch``, ``tensorflow``, ``jax``, ``cuda`` (C++ with CUDA or HIP and none of these);
    ``null``: unknown."""
    recorded_ns: int | None = None
    """Without steps, from the first to the last recorded work of host or GPU, ns: ``span_ns`` is
    the part from the GPU's first work to its last. ``null``: there are steps, or no GPU work."""
    earlier_ns: int = 0
    """GPU work that was launched before the recording and ran in it, ns: in no table of kernels and
    no gain."""

    @property
    def has_no_step_time(self) -> bool:
        """Of a source without a trace alone: no step has a length."""
        return self.step_source in AUXILIARY_INPUTS_BY_NAME

    @property
    def per(self) -> Per:
        """The unit of the figures: a step, a recording."""
        return unit_of(self.step_source)


class StepDurations(Struct, frozen=True, kw_only=True):
    """Durations of the steps of one run, which a comparison with another run is made of."""

    run: int = 0
    """Which run, from 0: a baseline may hold several runs of one program."""
    source: Literal["recorder", "trace"]
    """``recorder``: steps that no profiler slowed, without warm-up, the step after a profiled
    window and steps with an evaluation. ``trace``: the profiled steps that are used."""
    numbers: list[tuple[int, int]]
    """Numbers of the steps as ranges, first and last: steps between two ranges are set aside.
    Where steps are not numbered, their places in the recording."""
    durations_ns: list[int]
    """ns, in order of time; the last 5,000."""

    def __post_init__(self) -> None:
        if not all(0 <= ns < MAX_VALUE for ns in self.durations_ns):
            raise ValueError("the duration of a step is not a time")
        if sum(last - first + 1 for first, last in self.numbers) != len(self.durations_ns):
            raise ValueError("steps and their numbers differ in count")


VARYING_STEPS_SHARE = 0.10
"""A mean that differs from the median by more than this share of it tells another story."""


class StepTime(Struct, kw_only=True):
    """What the run's own steps take while nothing is profiled."""

    ns: float
    """Median of the steps that count (``StepRecords.timed``), ns."""
    mean_ns: float
    """Their mean, ns."""
    window_ns: float | None = None
    """Mean step of the profiled window, whose trace the other figures are of, ns; ``null``: no
    window was profiled."""
    window_slowdown: float | None = None
    """How much longer the window's mean step is than ``ns``, as a share of it."""
    profiler_overhead: float | None = None
    """What the profiler adds, as a share: the median of the window's steps compared with that of
    the unprofiled steps within 20 of them. ``null``: too few of either."""
    nearby_ns: float | None = None
    """The latter median, ns."""
    share_beyond: float | None = None
    """Share of the run's steps that are at least as long as ``nearby_ns``; where that is shorter
    than ``ns``, at most as long."""
    in_warm_up: bool = False
    """The window lies in the steps at the start that do not count."""
    atypical: bool = False
    """The window is not typical of the run: ``nearby_ns`` differs from ``ns`` by 10% or more, and
    fewer than a quarter of the run's steps are as far off."""

    @property
    def varies(self) -> bool:
        """A few steps are much longer than most, or shorter."""
        return abs(self.mean_ns / self.ns - 1) >= VARYING_STEPS_SHARE

    @property
    def reference_ns(self) -> float:
        """The step that a report leads with and that gains are shares of: the mean where steps
        vary, because the run takes as many of it, else the median, ns."""
        return self.mean_ns if self.varies else self.ns


class Crash(Struct, kw_only=True):
    """A rank that an exception ended."""

    rank: int
    """Its number."""
    exception: str
    """The type of the exception."""
    message: str | None
    """What it says; ``null``: not recorded."""
    steps: int | None
    """Steps that the rank had made; ``null``: not recorded."""


class IdleCause(Struct, frozen=True):
    """Idle device time attributed to one cause, per step."""

    cause: str
    """One of ``measure.host.gaps.CAUSES``."""
    ns: float
    """Per step, ns."""
    share: float
    """Of the step."""


class TimeShare(Struct, frozen=True):
    """Exclusive device time of one class, per step."""

    name: str
    """``compute``, ``communication``, ``copies``, ``memset`` or ``idle``, each only while none of
    those before it runs."""
    ns: float
    """Per step, ns."""
    share: float
    """Of the step."""


class Family(Struct, frozen=True):
    """Device time of one kernel family per step, not exclusive of other streams."""

    name: str
    """One of ``measure.device.families.FAMILIES``."""
    ns: float
    """Durations summed, per step, ns."""
    share: float
    """Of all device work: kernels, copies and memsets, their durations summed."""
    count: float
    """Kernels per step."""


class OperatorRate(Struct, frozen=True, kw_only=True):
    """An operator with one set of inputs, compared with what the device attains."""

    name: str | None
    """As the profiler wrote it; ``null``: the kernel belongs to a CUDA graph, or is not linked."""
    shapes: str | None
    """Of its tensors; ``null``: not recorded."""
    family: str
    """One of ``measure.device.families.FAMILIES``."""
    dtype: str | None
    """What it computes in; ``null``: not known."""
    kernel: str
    """Its longest kernel."""
    tensor_core: bool | None
    """That kernel runs on tensor or matrix cores; ``null``: unknown."""
    calls: float
    """Per step."""
    ns: float
    """Durations of all kernels that it launched summed, per step, ns."""
    share: float
    """Of kernel time, communication left out."""
    flops: float | None
    """Floating-point operations of one call; ``null``: not known."""
    bytes: float | None
    """What one call reads and writes at least; ``null``: not known."""
    flops_per_s: float | None
    """FLOP/s reached."""
    bytes_per_s: float | None
    """Bytes/s reached."""
    attainable_flops_per_s: float | None
    """FLOP/s that matrix products reach on this device in this format; ``null``: no matrix work, or
    not known."""
    attainable_bytes_per_s: float | None
    """Bytes/s that a copy reaches in this device's memory; ``null``: unknown device."""
    bound: Literal["compute", "memory", "launch", "unknown"]
    """What limits it at the attainable rates. ``launch``: starting the kernel takes longer than its
    work. ``unknown``: FLOPs, bytes or the device's rates are not known."""
    efficiency: float | None
    """Time at the attainable rates over the time taken, at most 1.
    ``null``: not judged."""
    saved_ns: float | None
    """Time per step that the attainable rates would save, ns; ``null``: not judged."""


class AttainableRate(Struct, frozen=True, kw_only=True):
    """A rate that operators are compared with."""

    of: str
    """A number format, of matrix products; or ``memory``."""
    rate: float
    """FLOP/s, or bytes/s."""
    source: str | None
    """Public measurement that it comes from, or that it is the fastest product of this recording;
    ``null``: none was found for this device, and it is the datasheet's peak times the share that
    the vendor's measured devices reach of theirs."""
    url: str | None
    """Where to read it; ``null``: nowhere."""


class HostShare(Struct, frozen=True):
    """Host time of the main thread, per step."""

    name: str
    """One of ``measure.steps.timeline.CLASSES``; without a trace, a phase of the record."""
    ns: float
    """Per step, ns, exclusive."""
    share: float
    """Of the step."""


class StepVariationPart(Struct, frozen=True):
    """What longer steps have more of."""

    name: str
    """A class of time (``idle: `` and its cause for idle time; without device work ``host: `` and
    its class), or a kernel, copy or operator."""
    ns: float
    """How much more of it a longer step has, mean, ns."""
    short_count: float | None = None
    """Of device work: how often it runs in a shorter step, mean."""
    long_count: float | None = None
    """In a longer step."""


class StepVariation(Struct, frozen=True):
    """The longer half of the steps beside the shorter half: what makes them longer."""

    short_ns: float
    """Mean of the shorter half."""
    long_ns: float
    """Mean of the longer half."""
    classes: list[StepVariationPart] = field(default_factory=list)
    """Exclusive classes of the step's time that hold 15% of the difference or more, largest
    first."""
    work: list[StepVariationPart] = field(default_factory=list)
    """Device work that does, hidden or not."""


class OperatorTime(Struct, frozen=True):
    """Host time of one operator, on all threads, without what it calls."""

    name: str
    """As the profiler wrote it."""
    ns: float
    """Per step, ns."""
    share: float
    """Of all operators' time."""
    count: float
    """Calls per step."""


class HardPart(Struct, frozen=True):
    """How well one of the hard parts of the replay is reproduced."""

    name: str
    """Syncs that waited, cross-stream starts, queue-blocked launches, thread hand-overs."""
    cases: int
    """How many there are in the replayed steps."""
    explained: float
    """Share of the time that was waited there whose end the replay's own edges give."""
    error_ns: float
    """Median absolute error of those ends, ns."""
    time_ns: float
    """How long was waited there, in all replayed steps, ns."""


class Replay(Struct, kw_only=True):
    """The replay that prices the findings, and how far to trust it."""

    step_ns: float
    """Replayed step without edits: the measured one, off by the error of the replay, ns."""
    measured_ns: float
    """The measured step, ns."""
    step_error: float
    """Mean absolute error of the replayed steps, share of the step."""
    starts: int
    """Device starts in the replayed steps."""
    explained: float | None
    """Share of them that the graph explains within 5 µs; ``null``: no device work."""
    hard: list[HardPart]
    """The hard parts alone."""
    waits: float
    """Share of the steps that the host waits for the device."""
    waits_explained: float | None
    """Share of that time whose ends the replay's own edges give; ``null``: it never waits."""
    idle: float
    """Share of the steps that the device idles."""
    idle_explained: float | None
    """Share of that time whose ends the replay's own edges give; ``null``: it never idles."""
    steps: int
    """Consecutive steps that are replayed."""
    of_steps: int
    """Steps that were measured."""
    critical: dict[str, float]
    """What the critical path consists of, ns per step."""
    critical_after: dict[str, float]
    """The same once all ranked findings are fixed: where the bottleneck moves to."""
    step_after_ns: float
    """The measured step less what all ranked findings save in a replay, ns."""


class Phase(Struct, frozen=True):
    """Host time of one phase, of the recorded steps that count."""

    name: str
    """``data``, ``h2d``, ``forward``, ``backward``, ``optimizer``, ``other``, or the user's own."""
    ns: float
    """Mean per step, ns."""
    share: float
    """Of the step."""


class RecordedSteps(Struct, kw_only=True):
    """What the recorder measured around the profiled window: steps that no profiler slowed."""

    steps: int
    """Steps that were recorded."""
    used: int
    """Steps that count: after the warm-up, no window open, not the one after a window.
    Where the host runs ahead of the device, those that CUDA events timed."""
    median_ns: float | None
    """Of the steps that count; ``null``: there are none, or the host runs ahead and nothing says
    what a step takes."""
    mean_ns: float | None
    """Of the steps that count."""
    p99_ns: float | None
    """99th percentile of the steps that count; ``null``: fewer than a hundred."""
    profiled_steps: int
    """Steps while a window was open."""
    profiled_median_ns: float | None
    """Median of the steps that windows kept; ``null``: fewer than two."""
    observer_effect: float | None
    """How much longer these are than the unprofiled ones around them, as a share of those;
    ``null``: one kind is missing."""
    phases: list[Phase]
    """Host time by phase, largest first; adds up to the mean step on the host."""
    samples_per_second: float | None
    """Batch sizes over the time of the steps that count, this rank; ``null``: sizes unknown."""
    samples_per_step: int | None = None
    """Batch size in most steps, gradient accumulation included; ``null``: not recorded."""
    inference: bool = False
    """The loop does not train: its steps are forwards, or calls of ``generate``."""
    outside_ns: int | None = None
    """Between training steps, all of them: validation, checkpoints and the like; ``null``: the loop
    does not train."""
    outside_share: float | None = None
    """Of the time of all steps and of what lies between them."""
    ended: str | None
    """``finished``, ``exception``, ``interrupted`` or ``disk`` (nothing more could be written);
    ``null``: killed, or still going on."""
    windows: list[str]
    """What became of each profiled window."""


class RuleText(Struct, frozen=True, kw_only=True):
    """The documentation of a rule that found something."""

    id: str
    """As in ``Finding.rule``."""
    title: str
    """What it looks for."""
    category: str
    """One of ``advisor.core.finding.Category``."""
    paragraphs: list[str]
    """Of its documentation: what it looks for, why that costs time, how it is measured."""


class MemoryHolder(Struct, frozen=True, kw_only=True):
    """What one line held, or leaves behind, of a device's memory."""

    category: str
    """One of ``measure.memory.memory_kinds.CATEGORIES``."""
    file: str | None
    """Source file of the user's line; ``null``: no such frame."""
    line: int | None
    """Line in it."""
    function: str | None
    """Function around it."""
    blocks: int
    """How many; of growth: steps that left something behind."""
    bytes: int
    """Asked for, bytes; of churn and growth: per step."""
    label: str | None = None
    """The user's metadata; ``null``: none."""


class ModuleMemory(Struct, frozen=True, kw_only=True):
    """What was held of the allocations inside one module's ``forward``, by their stacks. Modules
    that are called from the same line are one."""

    file: str
    """Source file of the ``forward``."""
    line: int | None
    """Of the call, in the file of the module around it; ``null``: there is none."""
    parent: int | None
    """Place in ``MemoryView.modules`` of the module around it; ``null``: outermost."""
    blocks: int
    """How many, with the modules inside."""
    bytes: int
    """Asked for, with the modules inside."""
    own_bytes: int
    """In none of the modules inside."""


class MemorySaving(Struct, frozen=True, kw_only=True):
    """What a change would have freed. Savings overlap."""

    change: str
    """One of those in ``measure.memory.memory_savings``."""
    bytes: int
    """By which it lowers the highest point of the history."""
    assumes: str
    """What the figure takes for granted."""
    file: str | None = None
    """The line that it is about; ``null``: no one line."""
    line: int | None = None
    """Line in it."""


class MemoryPool(Struct, frozen=True, kw_only=True):
    """Segments of one pool, stream and kind, when the snapshot was taken. Bytes."""

    name: str
    """``large``, ``small``, with the private pool's id, ``expandable`` and the stream."""
    segments: int
    """How many."""
    reserved: int
    """Taken from the driver."""
    allocated: int
    """In tensors, rounded up."""
    free: int
    """Free for the next request of this pool and stream."""
    largest: int
    """The largest free block."""


class KernelLine(Struct, frozen=True, kw_only=True):
    """A line of a kernel's source in which warps were sampled."""

    file: str
    """Source file."""
    line: int
    """Line in it."""
    share: float
    """Of the kernel's samples."""
    stall: str
    """What most of these warps waited for; empty: not collected."""


class KernelCounters(Struct, kw_only=True):
    """A kernel with its hardware counters, from a report of Nsight Compute or rocprof."""

    name: str
    """As the profiler wrote it."""
    short: str
    """Without arguments, namespaces and casts."""
    grid: list[int] | None
    """Blocks; ``null``: not recorded."""
    block: list[int] | None
    """Threads per block."""
    duration_ns: float | None
    """Of one launch while it was profiled, ns; clocks are usually locked then."""
    profiled: int = 1
    """Launches that these figures are means of."""
    limit: str
    """The busiest unit (``compute``, ``DRAM``, ``L2``, ``L1``) where it is busy, ``latency`` where
    none is, ``unknown`` where none was measured."""
    use: dict[str, float]
    """Unit -> share of its peak (0 to 1)."""
    occupancy: float | None
    """Achieved, share of the warps that a multiprocessor holds."""
    theoretical_occupancy: float | None
    """What registers, shared memory and block size admit."""
    occupancy_limiter: str | None
    """What admits the fewest blocks."""
    waves: float | None
    """Blocks of the grid over those that run at once."""
    stalls: dict[str, float]
    """The five largest reasons -> share of the cycles between two instructions of a warp."""
    dram_bytes: float | None
    """Read and written by one launch."""
    bandwidth: float | None
    """DRAM traffic, bytes per second."""
    launches: float | None
    """Launches per step in the trace; ``null``: no trace, or it has none of them."""
    step_ns: float | None
    """Their time per step in the trace, ns; ``null``: as above."""
    gain_ns: int | None
    """Saved per step in the replay if its busiest unit were busy all the time, ns: at most that
    can be gained; ``null``: as above, or not replayed."""
    advice: list[str]
    """What the profiler's own rules say, with their estimates."""
    lines: list[KernelLine] = field(default_factory=list)
    """Where the warps were when they were sampled, most first; empty: not collected, or the kernel
    was compiled without ``-lineinfo``."""


class TritonKernel(Struct, kw_only=True):
    """A kernel as Triton compiled it, from its cache. ``null``: not recorded there."""

    name: str
    """As in the trace."""
    file: str | None
    """Source file of the function; ``null`` also where it is in several."""
    line: int | None
    """Line of the function in it."""
    target: str
    """``sm_90``, ``gfx942``; empty: not recorded."""
    num_warps: int
    """Warps per block."""
    num_stages: list[int]
    """Stages of software pipelining, of all ``variants``."""
    registers: int | None
    """Per thread; on AMD GPUs vector registers."""
    shared_bytes: int
    """Shared memory per block."""
    local_bytes: int | None
    """Local memory per thread: spilled registers, and arrays of the program."""
    spilled_bytes: int | None
    """Spilled registers per thread."""
    occupancy: float | None
    """Theoretical: what registers, shared memory and block size admit (0 to 1)."""
    occupancy_limiter: str | None
    """``registers``, ``shared memory``, ``block sizes``; ``null`` also at full occupancy."""
    variants: int
    """Compilations in the cache with these figures."""
    launches: float | None
    """Launches per step in the trace; ``null``: no trace, or none that is surely of this kernel."""
    step_ns: float | None
    """Their time per step in the trace, ns; ``null``: as above."""


class MemorySample(Struct, frozen=True, kw_only=True):
    """The fullest device of one snapshot, at its own moment: of a rank, or of a series over a run.
    Bytes."""

    name: str
    """Of the file, or of the rank."""
    allocated: int
    """In tensors."""
    reserved: int
    """In segments."""
    categories: list[MemoryHolder]
    """Of ``allocated``, without lines."""


class MemoryView(Struct, kw_only=True):
    """A device's memory when it ran out, else at its peak, from a snapshot. Bytes are those that
    were asked for, unless stated otherwise."""

    device: int
    """Number of the GPU; -1: the host, as far as the profiler saw its allocators."""
    source: str = "allocator"
    """What it was made of: the ``allocator``'s snapshot, the profiler's memory ``timeline``, the
    allocator events of a ``trace``."""
    file: str = ""
    """Name of the snapshot's file; empty: it is the trace itself."""
    at: str
    """``out of memory``, ``peak``, or ``snapshot`` where no history was recorded."""
    allocated: int
    """In tensors then."""
    reserved: int
    """In segments then; 0: not recorded."""
    returnable: int | None = None
    """Of ``reserved``, what ``torch.cuda.empty_cache()`` would give back to the driver: segments
    that hold no tensor and are of no CUDA graph. ``null``: unknown, as it is for the peak, whose
    segments are not recorded."""
    peak: int
    """Most in tensors over the history."""
    request: int | None
    """Of the request that failed; ``null``: none did."""
    driver_free: int | None
    """What the driver still had then; ``null``: unknown."""
    events: int
    """Of the history; 0: none was recorded."""
    from_start: bool
    """The history has every block's beginning."""
    categories: list[MemoryHolder]
    """Of ``allocated``, without lines; adds up to it."""
    bases: list[MemoryHolder] = field(default_factory=list)
    """The same by what the category rests on: ``call path``, ``lifetime``, ``size pattern`` or
    ``none``."""
    lifetimes: list[MemoryHolder] = field(default_factory=list)
    """The same by lifetime: there before the history, made in it and kept to its end, or freed."""
    held: list[MemoryHolder]
    """By line, largest first."""
    modules: list[ModuleMemory] = field(default_factory=list)
    """By module, a module before those inside it; at most 400. Empty: no stacks were recorded, or
    nothing was held of what modules allocated."""
    pools: list[MemoryPool]
    """When the snapshot was taken."""
    placement: str
    """Why the request could not be placed; empty: none failed, or unknown."""
    step_source: str
    """What marks the steps; empty: nothing does, and churn and growth are not measured."""
    steps: int
    """Whole steps in the history."""
    churn_bytes: float | None
    """Allocated per step; ``null``: not measured."""
    churn: list[MemoryHolder]
    """Allocated and freed again within a step, most bytes first."""
    growth: list[MemoryHolder]
    """Left behind by each step and held to the end."""
    savings: list[MemorySaving]
    """What would have freed most."""
    series: list[MemorySample] = field(default_factory=list)
    """Snapshots of the same rank over a run, in order of time. Empty: there is one."""
    grows: list[MemoryHolder] = field(default_factory=list)
    """Lines that hold more in each snapshot of the series; bytes are per ``grows_per``."""
    grows_per: str = ""
    """``step`` where the names of the files number them, else ``snapshot``."""


class Quantiles(Struct, frozen=True):
    """Of durations, ns. ``null``: too few of them, 10 for the 90th and 100 for the 99th."""

    median_ns: float
    """50th percentile."""
    p90_ns: float | None
    """90th percentile."""
    p99_ns: float | None
    """99th percentile."""
    max_ns: float
    """The longest."""


class ServingPhase(Struct, frozen=True, kw_only=True):
    """Steps of one kind of a model that is served."""

    name: str
    """``prefill``, ``decode``, ``mixed`` (prompts and decoding together), ``draft``, or the class
    of the model that is called."""
    steps: int
    """How many."""
    requests: float | None
    """Mean per step; ``null``: not recorded."""
    tokens: float | None
    """New tokens that a step computes, mean; ``null``: not recorded."""
    ns: float
    """Mean of a step, ns: from its first device work to its last, and from the host's start where
    the device waited for it. Without device work it is the host's time."""
    quantiles: Quantiles
    """Of the steps."""
    ns_per_token: float | None
    """Time of the steps over the tokens that they compute, ns; ``null``: not recorded."""
    tokens_per_s: float | None
    """The reverse, while such steps run."""
    busy_share: float | None
    """Of the steps' time, in which the device works; ``null``: no device work, or its records are
    incomplete."""
    limit: str | None
    """What takes most of the steps' time: ``host`` (the device waits), ``memory``, ``compute``,
    ``communication``; ``null``: unknown."""
    limit_share: float | None
    """Of the steps' time."""
    attainable_ns: float | None
    """A step if each kernel ran at the rates that were measured on such a device, kernels whose
    work is unknown as they did, ns; ``null``: less than half of the kernel time is known."""
    known_share: float | None
    """Of kernel time, whose FLOPs or bytes are known."""
    jitter: str = ""
    """What the longest steps have more of; empty: they are similar, or too few."""
    roles: dict[str, float] = field(default_factory=dict)
    """Device time by part of a layer (``attention``, ``dense gemm``, ``moe experts`` …), mean per
    step, ns, the longest first."""


class GraphReplays(Struct, frozen=True, kw_only=True):
    """CUDA or HIP graphs that were replayed."""

    launches: int
    """Calls that launch a graph."""
    kernels: int
    """Device work of all of them that was recorded."""
    per_step: float
    """Launches per step: 1 is a full graph, more are pieces."""
    matched: float | None = None
    """Share of the work that a capture trace names; ``null``: none was given."""
    missing: int = 0
    """Device work that must have run, and is not in the recording."""


class Serving(Struct, kw_only=True):
    """A model that is used and not trained: its steps by phase."""

    engine: str | None
    """``vllm``, ``sglang`` …; ``null``: none, or unknown."""
    source: str
    """What marks a step: ``engine``, ``module calls`` or ``vocabulary look-ups``."""
    phases: list[ServingPhase]
    """By time, the longest first."""
    between: Quantiles | None
    """Gaps between two steps; ``null``: there is one step, or none has a gap."""
    between_share: float | None
    """Share of the time from the first step to the end of the last that lies between steps;
    ``null``: one step."""
    output_tokens_per_s: float | None
    """Tokens that come out over the time from the first step to the end of the last; ``null``: not
    recorded, or drafts are verified."""
    graphs: GraphReplays | None = None
    """``null``: none was replayed."""


class Report(Struct, kw_only=True):
    """Everything a renderer or the dashboard needs. ``to_dict`` has the schema ``SCHEMA``."""

    schema: str = SCHEMA
    """Name and number of this schema."""
    version: str = ""
    """Of advisor."""
    status: Status
    """``bottlenecks``: a fix would pay. ``healthy``: none would. ``limited``: too little is known
    for either."""
    verdict: str
    """One sentence."""
    inputs: list[Input]
    """The traces, one a rank."""
    scope: Scope
    """Which steps of which device the figures are about."""
    time: list[TimeShare] = field(default_factory=list)
    """Adds up to the step. Empty: no device work in the trace."""
    busy_share: float | None = None
    """Share of the step during which the GPU does anything."""
    communication_ns: float | None = None
    """All communication per step, hidden or not."""
    communication_overlap: float | None = None
    """Share of communication that runs under compute."""
    idle: list[IdleCause] = field(default_factory=list)
    """Adds up to the idle time."""
    unknown_idle_share: float | None = None
    """Share of the idle time that could not be blamed."""
    host: list[HostShare] = field(default_factory=list)
    """The main thread's time, largest first."""
    step_variation: StepVariation | None = None
    """What makes one step longer than another; ``null``: they are similar, or fewer than four."""
    operators: list[OperatorTime] = field(default_factory=list)
    """Without device work in the trace: the operators that take most host time, at most ten."""
    ranges: list[OperatorTime] = field(default_factory=list)
    """Without operators: ranges of the program on the thread that drives the step, those with
    most time, at most ten. None is a step itself; shares are of the step."""
    families: list[Family] = field(default_factory=list)
    """Kernel time by kind, largest first."""
    rooflines: list[OperatorRate] = field(default_factory=list)
    """Operators by shape, the fifty with most device time, longest first."""
    attainable: list[AttainableRate] = field(default_factory=list)
    """The rates that ``rooflines`` holds them against. Empty: unknown device."""
    layers: Layers | None = None
    """Time by module; ``null``: no modules were recorded around any work."""
    mesh: list[MeshAxis] = field(default_factory=list)
    """Communication by axis of the device mesh, the most exposed first."""
    mfu: float | None = None
    """FLOPs of the step over its duration and the device's peak, 0 to 1."""
    memory_peak_bytes: int | None = None
    """Most device memory the allocator reserved."""
    memory_capacity_bytes: int | None = None
    """Device memory there is."""
    findings: list[Finding] = field(default_factory=list)
    """Findings whose fixes save time per step, by priority; then those folded under them."""
    risks: list[Finding] = field(default_factory=list)
    """Findings about memory, risk or time over the run: other currencies, ranked separately."""
    notes: list[Finding] = field(default_factory=list)
    """Informational: not proven on real traces yet, or a gain too small to act on."""
    passed: list[PassedCheck] = field(default_factory=list)
    """What the run already does well."""
    not_checked: list[SkippedCheck] = field(default_factory=list)
    """What could not be checked, and what to record to allow it."""
    limits: list[str] = field(default_factory=list)
    """What this trace cannot show, one sentence each."""
    ranks: Ranks | None = None
    """Ranks side by side; ``null``: one rank."""
    replay: Replay | None = None
    """``null``: the window could not be replayed well, and gains are upper bounds."""
    step: StepTime | None = None
    """The run's own step; ``null``: a trace alone, or too few steps, and ``scope`` has what there
    is."""
    step_durations: list[StepDurations] = field(default_factory=list)
    """One entry per source, and per run in a baseline of several. Empty: steps are not marked, or
    the report was written before reports held them."""
    crashes: list[Crash] = field(default_factory=list)
    """Ranks that an exception ended, the one that ended first first."""
    recorded: RecordedSteps | None = None
    """What the recorder measured of every step; ``null``: a trace alone."""
    energy: EnergyUse | None = None
    """Of the GPUs while steps ran; ``null``: not sampled."""
    cost: Cost | None = None
    """Cost per step; ``null``: no price was given."""
    hot_lines: list[HotLine] = field(default_factory=list)
    """Python lines that take most CPU time, largest first. Empty: no pass of Scalene was made."""
    memory: list[MemoryView] = field(default_factory=list)
    """What a memory snapshot, or a trace's allocator events, show: one entry a device, the fullest
    first. Empty: neither was recorded."""
    memory_ranks: list[MemorySample] = field(default_factory=list)
    """The snapshots of several ranks side by side. Empty: fewer than two."""
    kernel_counters: list[KernelCounters] = field(default_factory=list)
    """Kernels with hardware counters, by what they can gain per step; without a trace by time."""
    triton_kernels: list[TritonKernel] = field(default_factory=list)
    """Kernels that Triton compiled, those first that spill and take time. Empty: no cache of it was
    given."""
    profile_kernels: list[str] = field(default_factory=list)
    """The command that collects hardware counters of the kernels that matter, and what it costs;
    empty: none is slow, or their counters are here."""
    rules: list[RuleText] = field(default_factory=list)
    """The rules of all findings, risks and notes, by id."""
    serving: Serving | None = None
    """Steps of inference by phase; ``null``: the program trains, or nothing marks them."""
    compilation: CompileLog | None = None
    """Logs of torch.compile; ``null``: none were given."""
    flight: FlightRecord | None = None
    """Dumps of PyTorch's flight recorder; ``null``: none were given."""
    network: NetworkLog | None = None
    """Logs of NCCL and topologies; ``null``: none were given."""
    views: Views | None = None
    """The report's pictures as data; ``null``: written before there were any."""

    @property
    def step_ns(self) -> float:
        """The step that gains are of: the run's own, else the mean of the trace's, ns."""
        return self.scope.step_ns if self.step is None else self.step.reference_ns

    @property
    def gain_scale(self) -> float | None:
        """The run's usual step over that of the window; ``None``: there are not both."""
        step = self.step
        return step.ns / step.window_ns if step is not None and step.window_ns else None

    @property
    def per(self) -> Per:
        """What the figures are of: the step, or the recording when no step is marked."""
        return self.scope.per

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts and lists, as in the JSON."""
        result: dict[str, Any] = msgspec.to_builtins(self)
        return result

    def by_id(self) -> dict[str, Finding]:
        """Findings, risks and notes by a stable id: the rule, numbered from the second on
        (``gpu-idle#2``)."""
        seen: dict[str, int] = {}
        result = {}
        for finding in (*self.findings, *self.risks, *self.notes):
            number = seen[finding.rule] = seen.get(finding.rule, 0) + 1
            result[finding.rule if number == 1 else f"{finding.rule}#{number}"] = finding
        return result

    def to_json(self) -> bytes:
        """The JSON text, indented by two."""
        return encode_json(self)

    def __repr__(self) -> str:
        """One line: status, verdict, how many findings."""
        from advisor.core.labels import clean, shorten
        from advisor.core.text import count_noun

        result = count_noun(len(self.findings), "finding")
        return f"<Report {self.status}, {result}: {shorten(clean(self.verdict), 160)}>"

    def __str__(self) -> str:
        """What ``advisor analyze`` prints, for a terminal of 80 columns: at most MAX_LINES."""
        text = render(self, "REPORTS", "terminal")
        return limit_lines(text, "to_dict() has all")

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return render(self, "REPORTS", "notebook")

    @classmethod
    def from_json(cls, text: bytes | str) -> Report:
        """Read a report written by :meth:`to_json`. Raises AdvisorError for anything else."""
        return decode_json(text, cls, "report", SCHEMA, older={"advisor.report/1": _from_version_1})


_ORDER = {"rank": "priority"}
_OF_FINDINGS = {
    "worth": "impact",
    "rank_gain_ns": "marginal_gain_ns",
    "check": "verify",
    **_ORDER,
}
_NAMES_SINCE_VERSION_1 = {
    "": {"good": "passed", "uneven": "step_variation"},
    "step": {
        "longer": "window_slowdown",
        "cost": "profiler_overhead",
        "around_ns": "nearby_ns",
        "as_far": "share_beyond",
        "first": "in_warm_up",
        "unlike": "atypical",
    },
    "findings": _OF_FINDINGS,
    "risks": _OF_FINDINGS,
    "notes": _OF_FINDINGS,
    "cost.fixes": _ORDER,
    "views.stairs.measured": _ORDER,
    "views.stairs.fixes": _ORDER,
}
"""By place in the report: what its fields were called, and are called."""
_OPERATIONS_SINCE_VERSION_1 = {
    "asynchronous": "make_async",
    "spread": "parallelize",
    "punctual": "remove_skew",
}


def _from_version_1(report: dict[str, Any]) -> dict[str, Any]:
    """JSON of ``advisor.report/1`` as JSON of this version: fields have other names."""
    report["schema"] = SCHEMA
    for place, names in _NAMES_SINCE_VERSION_1.items():
        result: Any = report
        for key in place.split(".") if place else ():
            result = result.get(key) if isinstance(result, dict) else None
        for item in result if isinstance(result, list) else [result]:
            if isinstance(item, dict):
                for old in names.keys() & item.keys():
                    item[names[old]] = item.pop(old)
                for edit in item.get("edits") or ():
                    if isinstance(edit, dict) and isinstance(op := edit.get("op"), str):
                        edit["op"] = _OPERATIONS_SINCE_VERSION_1.get(op, op)
    return report
