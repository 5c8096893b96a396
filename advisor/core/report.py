"""Report: an analysis as plain data with a versioned schema. Renderers compute nothing."""

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
from advisor.core.charts import ReportCharts
from advisor.core.finding import Finding, HotLine, PassedCheck, SkippedCheck, unit_of
from advisor.core.layers import Layers, MeshAxis
from advisor.core.prices import Cost, EnergyUse
from advisor.core.ranks import Ranks
from advisor.core.report_file import decode_json, encode_json
from advisor.core.report_versions import from_version_1
from advisor.core.rule import Per
from advisor.core.run_directory import MAX_VALUE

SCHEMA = "advisor.report/2"

MAX_LINES = 400
"""Lines that ``print`` shows of a report or a comparison."""

Status = Literal["bottlenecks", "healthy", "limited"]


def render(subject: object, formats: str, name: str, **options: Any) -> str:
    """Return a subject in the format ``name`` of ``advisor.render.formats.<formats>``, for
    ``print`` and notebooks. The renderers lie far above and are imported by name, when needed."""
    home = import_module("advisor.render.formats")
    text: str = getattr(home, formats).render(name, subject, **options)
    return text


def limit_lines(text: str, rest: str) -> str:
    """Return the first MAX_LINES lines; the last then counts the others and adds ``rest``."""
    lines = text.rstrip("\n").split("\n")
    if len(lines) > MAX_LINES:
        from advisor.core.text import count_noun

        more = len(lines) - MAX_LINES
        lines[MAX_LINES:] = [f"… {count_noun(more, 'more line')}; {rest}"]
    return "\n".join(lines)


class Input(Struct, kw_only=True):
    """A trace that was read."""

    path: str
    """Path as it was given; ``-``: standard input."""
    rank: int | None
    """Number of the process; ``null``: neither in the file nor in its name."""
    window: int
    """Number of this recording of the rank, in order of time, from 0."""
    windows: int
    """Number of windows of this rank; only one is analysed."""
    events_read: int
    """Events that were kept."""
    events_dropped: dict[str, int]
    """Reason -> events that were left out."""
    bytes_read: int
    """Uncompressed size, bytes."""
    truncated: bool
    """Whether the file ends early: only what comes before is analysed."""
    damage: str | None = None
    """Error message of the unpacker or the JSON reader; ``null``: the file is sound."""
    format: str | None = None
    """Format of the file: ``kineto``, ``nsys``, ``rocpd`` …; ``null``: unknown."""
    record_shapes: bool | None = None
    """Whether shapes were recorded; ``null``: unknown."""
    with_stack: bool | None = None
    """Whether Python stacks were recorded, which slow the host; ``null``: unknown."""
    profile_memory: bool | None = None
    """Whether memory events were recorded; ``null``: unknown."""


class Scope(Struct, kw_only=True):
    """The rank, steps and device that the figures are about."""

    rank: int | None
    """Rank that the figures are of; ``null``: unknown."""
    step_source: str
    """Source of the steps: ``engine`` (marks of an inference engine), ``module calls`` or
    ``vocabulary look-ups`` of a model that infers, ``ProfilerStep``, ``recorder``, ``optimizer``,
    ``ranges``, ``device sequence`` or ``whole trace``; ``StepTraceAnnotation``, ``step_num``,
    ``program`` or ``device steps`` of JAX and TensorFlow; ``layer times`` of TensorRT; ``record``
    when no window was profiled and the figures are the recorder's own. Without a trace:
    ``snapshot``, ``counters``, ``Triton cache``, ``flight recorder``, ``network log`` or ``compile
    log``."""
    steps_found: int = 0
    """Steps in the trace, or in the range that was asked for."""
    steps_used: int = 0
    """Steps that are measured: whole ones that are no outliers."""
    outliers: list[str] = field(default_factory=list)
    """Names of the steps that were set aside as outliers."""
    span_ns: int = 0
    """Length of the analysed window, ns."""
    step_ns: float = 0.0
    """Mean duration of the used steps, ns."""
    step_min_ns: int = 0
    """Shortest used step, ns."""
    step_max_ns: int = 0
    """Longest used step, ns."""
    step_median_ns: float = 0.0
    """Median duration of the used steps, ns."""
    device: int | None = None
    """GPU that is analysed, the one with most work; ``null``: no device work."""
    device_name: str | None = None
    """Name of that GPU in the trace; ``null``: not recorded."""
    device_known: bool = False
    """Whether advisor/core/gpus has the GPU: only then are rooflines computed."""
    devices_seen: int = 0
    """Number of GPUs with work in the trace."""
    device_shared: str = ""
    """Description of other processes on the device; empty: none is known."""
    framework: str | None = None
    """Framework of the program: ``pytorch``, ``tensorflow``, ``jax``, ``cuda`` (C++ with CUDA or
    HIP and none of these); ``null``: unknown."""
    recorded_ns: int | None = None
    """Time from the first to the last recorded work of host or GPU, ns; ``span_ns`` is from the
    GPU's first work to its last. ``null``: there are steps, or no GPU work."""
    earlier_ns: int = 0
    """GPU work that was launched before the recording and ran in it, ns. It counts in no table of
    kernels and no gain."""
    behind_ns: int = 0
    """Time that the first work of a step waits in the GPU's queue (median), where the steps are
    the GPU's, ns."""

    @property
    def has_no_step_time(self) -> bool:
        """Whether the source is none of a trace, so that no step has a length."""
        return self.step_source in AUXILIARY_INPUTS_BY_NAME

    @property
    def per(self) -> Per:
        """Unit of the figures: ``step``, ``repetition`` or ``recording``."""
        return unit_of(self.step_source)


class StepDurations(Struct, frozen=True, kw_only=True):
    """Durations of the steps of one run, which a comparison with another run is made of."""

    run: int = 0
    """Number of the run, from 0: a baseline may hold several runs of one program."""
    source: Literal["recorder", "trace"]
    """Origin. ``recorder``: steps that no profiler slowed, without warm-up, the step after a
    profiled window and steps with an evaluation. ``trace``: the profiled steps that are used."""
    numbers: list[tuple[int, int]]
    """Numbers of the steps as ranges, first and last: steps between two ranges are set aside.
    Where steps are not numbered, their places in the recording."""
    durations_ns: list[int]
    """Durations, ns, in order of time; the last 5,000."""

    def __post_init__(self) -> None:
        if not all(0 <= ns < MAX_VALUE for ns in self.durations_ns):
            raise ValueError("the duration of a step is not a time")
        if sum(last - first + 1 for first, last in self.numbers) != len(self.durations_ns):
            raise ValueError("steps and their numbers differ in count")


OTHER_STEP_SHARE = 0.20
"""Relative difference from which a profiled step's shares say little of the run's own step."""
EQUAL_STEP_SHARE = 0.03
"""Relative difference below which two step times are called equal."""
VARYING_STEPS_SHARE = 0.10
"""Difference of mean and median, as a share of the median, from which step times vary."""


class StepTime(Struct, kw_only=True):
    """Step time of the run while nothing is profiled."""

    ns: float
    """Median of the steps that count (``StepRecords.timed``), ns."""
    mean_ns: float
    """Mean of these steps, ns."""
    window_ns: float | None = None
    """Mean step of the profiled window, whose trace the other figures are of, ns; ``null``: no
    window was profiled."""
    window_slowdown: float | None = None
    """Excess of the window's mean step over ``ns``, as a share of ``ns``; ``null``: no window."""
    busy_share: float | None = None
    """Share of the run's own step in which the device works; ``null``: no window, no
    device, or the steps vary."""
    profiler_overhead: float | None = None
    """Overhead of the profiler, as a share: the median of the window's steps over that of the
    unprofiled steps within 20 of it, less 1. ``null``: too few of either, or those vary as
    much."""
    nearby_ns: float | None = None
    """Median of the unprofiled steps within 20 of the window, ns; ``null``: too few."""
    share_beyond: float | None = None
    """Share of the run's steps that are at least as long as ``nearby_ns``; where that is shorter
    than ``ns``, at most as long."""
    in_warm_up: bool = False
    """Whether the window lies in the steps at the start that do not count."""
    atypical: bool = False
    """Whether the window is not typical of the run: ``nearby_ns`` differs from ``ns`` by 10% or
    more, and fewer than a quarter of the run's steps are as far off."""

    @property
    def varies(self) -> bool:
        """Whether a few steps are much longer than most, or shorter: mean and median differ."""
        return abs(self.mean_ns / self.ns - 1) >= VARYING_STEPS_SHARE

    @property
    def reference_ns(self) -> float:
        """Step time that a report leads with and that gains are shares of, ns: the mean where steps
        vary, because the run's duration is made of it, else the median."""
        return self.mean_ns if self.varies else self.ns

    @property
    def statistic(self) -> str:
        """Name of what ``reference_ns`` is of the run's steps."""
        return "mean" if self.varies else "median"

    @property
    def window_excess(self) -> float | None:
        """Excess of the window's mean step over ``reference_ns``, as a share of it; ``None``: no
        window was profiled."""
        return self.window_ns / self.reference_ns - 1 if self.window_ns else None

    @property
    def window_differs(self) -> bool:
        """Whether the window's mean step is another than the one that a report leads with."""
        return abs(self.window_excess or 0.0) >= EQUAL_STEP_SHARE

    @property
    def window_is_other(self) -> bool:
        """Whether the two differ so much that the shares of one say little of the other."""
        return abs(self.window_excess or 0.0) >= OTHER_STEP_SHARE

    @property
    def gain_scale(self) -> float | None:
        """The run's usual step over that of the window; ``None`` if no window was profiled."""
        return self.ns / self.window_ns if self.window_ns else None


class Crash(Struct, kw_only=True):
    """A rank that an exception ended."""

    rank: int
    """Number of the rank."""
    exception: str
    """Type of the exception."""
    message: str | None
    """Message of the exception; ``null``: not recorded."""
    steps: int | None
    """Steps that the rank had completed; ``null``: not recorded."""


class SampledFunction(Struct, frozen=True):
    """Function in which the CPU was sampled."""

    name: str
    """Function, as the profiler names it."""
    share: float
    """Share of the step, by the time from its samples to the next ones."""


class IdleCause(Struct, frozen=True):
    """Idle device time attributed to one cause, per step."""

    cause: str
    """Cause, one of ``measure.host.gaps.CAUSES``."""
    ns: float
    """Idle time per step, ns."""
    share: float
    """Share of the step."""
    functions: list[SampledFunction] = field(default_factory=list)
    """Functions that samples of the CPU show meanwhile, most first; empty: no samples."""
    outside_operators: bool = False
    """Whether an ``unknown`` cause is mostly code of the host outside recorded operators."""


class TimeShare(Struct, frozen=True):
    """Exclusive device time of one class, per step."""

    name: str
    """Class: ``compute``, ``communication``, ``copies``, ``memset`` or ``idle``, each only while
    none of those before it runs."""
    ns: float
    """Time per step, ns."""
    share: float
    """Share of the step."""


class TimeWithoutFix(Struct, frozen=True):
    """Parts of the step's time that no finding is about, and why no fix is offered for them."""

    labels: list[str]
    """Names of the parts, as beside the bar."""
    ns: float
    """Time per step, ns."""
    share: float
    """Share of the step."""
    why: str
    """Reason: it is too little for a fix, a note is about it, its check was skipped."""


class Family(Struct, frozen=True):
    """Device time of one kernel family per step, not exclusive of other streams."""

    name: str
    """Family, one of ``measure.device.families.FAMILIES``."""
    ns: float
    """Sum of the kernels' durations per step, ns."""
    share: float
    """Share of all device work: kernels, copies and memsets, their durations summed."""
    count: float
    """Kernels per step."""


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


class HostShare(Struct, frozen=True):
    """Host time of the main thread, per step."""

    name: str
    """Class, one of ``measure.steps.timeline.CLASSES``; without a trace, a phase of the record."""
    ns: float
    """Exclusive time per step, ns."""
    share: float
    """Share of the step; of the host's own, ``Report.host_step_ns``, where it runs ahead."""


class StepVariationPart(Struct, frozen=True):
    """A class of time, kernel, copy or operator that longer steps have more of."""

    name: str
    """Class of time (``idle: `` and its cause for idle time; without device work ``host: `` and its
    class), or name of a kernel, copy or operator."""
    ns: float
    """Mean excess of its time in a longer step over that in a shorter one, ns."""
    short_count: float | None = None
    """Mean number of runs in a shorter step; ``null``: it is no device work."""
    long_count: float | None = None
    """Mean number of runs in a longer step; ``null``: it is no device work."""


class StepVariation(Struct, frozen=True):
    """The longer half of the steps compared with the shorter half, and what makes them longer."""

    short_ns: float
    """Mean of the shorter half, ns."""
    long_ns: float
    """Mean of the longer half, ns."""
    classes: list[StepVariationPart] = field(default_factory=list)
    """Exclusive classes of the step's time that hold 15% of the difference or more, largest
    first."""
    work: list[StepVariationPart] = field(default_factory=list)
    """Device work that holds as much of the difference, hidden or not."""

    @property
    def difference_ns(self) -> float:
        """Mean of the longer half less that of the shorter half, ns."""
        return self.long_ns - self.short_ns


class OperatorTime(Struct, frozen=True):
    """Self time of one operator on the host, over all threads, per step."""

    name: str
    """Name as the profiler wrote it."""
    ns: float
    """Self time per step, ns."""
    share: float
    """Share of all operators' time."""
    count: float
    """Calls per step."""


class HardPart(Struct, frozen=True):
    """Accuracy of the replay for one kind of wait that is hard to reproduce."""

    name: str
    """Kind: syncs that waited, cross-stream starts, queue-blocked launches, waits between
    threads."""
    cases: int
    """Number of such waits in the replayed steps."""
    explained: float
    """Share of the time of these waits whose end the replay's own edges give."""
    error_ns: float
    """Median absolute error of the ends of these waits, ns."""
    time_ns: float
    """Total time of these waits in all replayed steps, ns."""


class Replay(Struct, kw_only=True):
    """The replay that estimates the gains of the findings, and its accuracy."""

    step_ns: float
    """Replayed step without edits, ns: it differs from the measured one by the replay's error."""
    measured_ns: float
    """Measured step, ns."""
    step_error: float
    """Mean absolute error of the replayed steps, as a share of the step."""
    starts: int
    """Number of starts of device work in the replayed steps."""
    explained: float | None
    """Share of these starts that the graph explains within 5 µs; ``null``: no device work."""
    hard: list[HardPart]
    """Accuracy for each kind of wait that is hard to reproduce."""
    waits: float
    """Share of the steps that the host waits for the device."""
    waits_explained: float | None
    """Share of that waiting whose ends the replay's own edges give; ``null``: it never waits."""
    idle: float
    """Share of the steps that the device idles."""
    idle_explained: float | None
    """Share of that idle time whose ends the replay's own edges give; ``null``: it never idles."""
    steps: int
    """Number of consecutive steps that are replayed."""
    of_steps: int
    """Number of steps that were measured."""
    critical: dict[str, float]
    """Parts of the critical path, ns per step."""
    critical_after: dict[str, float]
    """Parts of the critical path once all ranked findings are fixed, ns per step."""
    step_after_ns: float
    """Measured step less what all ranked findings save together, ns."""
    busy_after_ns: float | None = None
    """Time in which the device works in that step, ns; ``null``: no device, or not replayed."""
    unprofiled: bool = False
    """Whether the critical path is of a step without the profiler's time on the host."""


class Phase(Struct, frozen=True):
    """Host time of one phase, over the recorded steps that count."""

    name: str
    """``data``, ``h2d``, ``forward``, ``backward``, ``optimizer``, ``other``, or the user's own."""
    ns: float
    """Mean time per step, ns."""
    share: float
    """Share of the step."""


class RecordedSteps(Struct, kw_only=True):
    """Figures of the recorder: steps around the profiled window, which no profiler slowed."""

    steps: int
    """Number of steps that were recorded."""
    used: int
    """Number of steps that count: after the warm-up, no window open, not the one after a window.
    Where the host runs ahead of the device, those that CUDA events timed."""
    median_ns: float | None
    """Median of the steps that count, ns; ``null``: there are none, or the host runs ahead and no
    step was timed on the device."""
    mean_ns: float | None
    """Mean of the steps that count, ns; ``null``: as for the median."""
    p99_ns: float | None
    """99th percentile of the steps that count, ns; ``null``: fewer than a hundred."""
    profiled_steps: int
    """Number of steps while a window was open."""
    profiled_median_ns: float | None
    """Median of the steps that windows kept, ns; ``null``: fewer than two."""
    profiler_overhead: float | None = field(name="observer_effect")
    """Overhead of the profiler, as ``StepTime.profiler_overhead``, but over the steps of all
    windows."""
    phases: list[Phase]
    """Host time by phase, largest first; adds up to the mean step on the host."""
    samples_per_second: float | None
    """Samples per second of this rank in the steps that count; ``null``: batch sizes unknown."""
    samples_per_step: int | None = None
    """Batch size in most steps, gradient accumulation included; ``null``: not recorded."""
    inference: bool = False
    """Whether the loop does not train: its steps are forwards, or calls of ``generate``."""
    outside_ns: int | None = None
    """Time between training steps, summed, ns: validation, checkpoints and the like; ``null``: the
    loop does not train."""
    outside_share: float | None = None
    """Share of that in the time of the steps after the first and of what lies between them;
    ``null``: as above."""
    ended: str | None
    """End of the run: ``finished``, ``exception``, ``interrupted`` or ``disk`` (nothing more could
    be written); ``null``: killed, or still going on."""
    windows: list[str]
    """Outcome of each profiled window, one line each."""
    program: str | None = None
    """File name of the program, ``train.py``; ``null``: not recorded."""


class RuleText(Struct, frozen=True, kw_only=True):
    """Documentation of a rule that found something."""

    id: str
    """Identifier, as in ``Finding.rule``."""
    title: str
    """Title: what the rule looks for."""
    category: str
    """Category, one of ``advisor.core.finding.Category``."""
    paragraphs: list[str]
    """Paragraphs of the text: what the rule looks for, why that costs time, how it is measured."""


class MemoryHolder(Struct, frozen=True, kw_only=True):
    """Memory of a device that one line of the program held, or leaves behind."""

    category: str
    """Category, one of ``measure.memory.memory_kinds.CATEGORIES``."""
    file: str | None
    """Source file of the user's line; ``null``: no frame of the user's is in the stack."""
    line: int | None
    """Line in ``file``."""
    function: str | None
    """Function around the line."""
    blocks: int
    """Number of blocks; of growth: of steps that left something behind."""
    bytes: int
    """Bytes that were asked for; of churn and growth: per step."""
    label: str | None = None
    """Label that the user's metadata gives the blocks; ``null``: none."""


class ModuleMemory(Struct, frozen=True, kw_only=True):
    """Memory that allocations inside one module's ``forward`` held, by their stacks. Modules that
    are called from the same line are one."""

    file: str
    """Source file of the ``forward``."""
    line: int | None
    """Line of the call, in the file of the module around it; ``null``: there is none."""
    parent: int | None
    """Index in ``MemoryView.modules`` of the module around it; ``null``: outermost."""
    blocks: int
    """Number of blocks, those of the modules inside included."""
    bytes: int
    """Bytes that were asked for, by the modules inside too."""
    own_bytes: int
    """Bytes of the module alone, without the modules inside."""


class MemorySaving(Struct, frozen=True, kw_only=True):
    """Memory that a change would have freed. Savings overlap."""

    change: str
    """Name of the change, from ``measure.memory.memory_savings``."""
    bytes: int
    """Bytes by which the change lowers the peak of the history."""
    assumes: str
    """Assumption that the figure rests on."""
    cost: str = ""
    """Cost of the change in each step; ``none``: no work is added."""
    file: str | None = None
    """Source file of the line that would change; ``null``: no one line."""
    line: int | None = None
    """Line in ``file``."""


class MemoryPool(Struct, frozen=True, kw_only=True):
    """Segments of one pool, stream and kind, when the snapshot was taken. Bytes."""

    name: str
    """Name: ``large``, ``small``, with the private pool's id, ``expandable`` and the stream."""
    segments: int
    """Number of segments."""
    reserved: int
    """Bytes taken from the driver."""
    allocated: int
    """Bytes in tensors, rounded up."""
    free: int
    """Bytes free for the next request of this pool and stream."""
    largest: int
    """Size of the largest free block, bytes."""


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


class MemorySample(Struct, frozen=True, kw_only=True):
    """Memory of the fullest device of one snapshot, at its own moment: of a rank, or of a series
    over a run. Bytes."""

    name: str
    """Name of the file, or of the rank."""
    allocated: int
    """Bytes in tensors."""
    reserved: int
    """Bytes in segments."""
    categories: list[MemoryHolder]
    """Parts of ``allocated`` by category, without lines."""


class MemoryView(Struct, kw_only=True):
    """Memory of a device when it ran out, else at its peak, from a snapshot. Bytes are those that
    were asked for, unless stated otherwise."""

    device: int
    """Number of the GPU; -1: the host, as far as the profiler saw its allocators."""
    source: str = "allocator"
    """Origin of the figures: the ``allocator``'s snapshot, the profiler's memory ``timeline``, the
    allocator events of a ``trace``."""
    file: str = ""
    """Name of the snapshot's file; empty: it is the trace itself."""
    at: str
    """Moment shown: ``out of memory``, ``peak``, or ``snapshot`` where no history was recorded."""
    allocated: int
    """Bytes in tensors at that moment."""
    reserved: int
    """Bytes in segments at that moment; 0: not recorded."""
    trains: bool | None = None
    """Whether the program trains; ``null``: unknown."""
    end_allocated: int | None = None
    """Bytes in tensors when the snapshot was taken; ``null``: its segments are not recorded."""
    end_reserved: int | None = None
    """Bytes in segments when the snapshot was taken; ``null``: as above."""
    end_free: int | None = None
    """Free bytes in these segments; ``null``: as above."""
    end_largest: int | None = None
    """Largest free piece of them, bytes; ``null``: as above."""
    returnable: int | None = None
    """Part of ``end_free`` that ``torch.cuda.empty_cache()`` would give back to the driver:
    segments that hold no tensor and are of no CUDA graph. ``null``: unknown."""
    peak: int
    """Largest number of bytes in tensors over the history."""
    request: int | None
    """Bytes of the request that failed; ``null``: none did."""
    driver_free: int | None
    """Bytes that the driver still had free at that moment; ``null``: unknown."""
    events: int
    """Number of events in the history; 0: none was recorded."""
    from_start: bool
    """Whether the history has the allocation of every block."""
    categories: list[MemoryHolder]
    """Parts of ``allocated`` by category, without lines; their sum is ``allocated``."""
    bases: list[MemoryHolder] = field(default_factory=list)
    """Parts of ``allocated`` by the evidence for their category: ``call path``, ``lifetime``,
    ``size pattern`` or ``none``."""
    lifetimes: list[MemoryHolder] = field(default_factory=list)
    """Parts of ``allocated`` by lifetime: older than the history, kept to its end, or freed."""
    held: list[MemoryHolder]
    """Parts of ``allocated`` by line, largest first."""
    modules: list[ModuleMemory] = field(default_factory=list)
    """Parts of ``allocated`` by module, each before those inside it; at most 400. Empty: no stacks
    were recorded, or nothing was held of what modules allocated."""
    pools: list[MemoryPool]
    """Segments by pool when the snapshot was taken."""
    placement: str
    """Reason why the request could not be placed; empty: none failed, or unknown."""
    step_source: str
    """Marks of the steps; empty: there are none, and churn and growth are not measured."""
    steps: int
    """Number of whole steps in the history."""
    churn_bytes: float | None
    """Bytes allocated per step; ``null``: not measured."""
    churn: list[MemoryHolder]
    """Memory that is allocated and freed again within a step, by line, most bytes first."""
    growth: list[MemoryHolder]
    """Memory that each step leaves behind and that is held to the end, by line."""
    savings: list[MemorySaving]
    """Changes that would have freed most, largest first."""
    series: list[MemorySample] = field(default_factory=list)
    """Snapshots of the same rank over a run, in order of time. Empty: there is one."""
    grows: list[MemoryHolder] = field(default_factory=list)
    """Lines that hold more in each snapshot of the series; bytes are per ``grows_per``."""
    grows_per: str = ""
    """Unit of ``grows``: ``step`` where the names of the files number steps, else ``snapshot``."""


class Quantiles(Struct, frozen=True):
    """Quantiles of durations, ns. ``null``: too few, below 10 for the 90th and 100 for the 99th."""

    median_ns: float
    """50th percentile, ns."""
    p90_ns: float | None
    """90th percentile, ns."""
    p99_ns: float | None
    """99th percentile, ns."""
    max_ns: float
    """Longest duration, ns."""


class InferencePhase(Struct, frozen=True, kw_only=True):
    """Steps of one kind (prefill, decode …) of a model that is served."""

    name: str
    """Kind: ``prefill``, ``decode``, ``mixed`` (prompts and decoding together), ``draft``, or the
    class of the model that is called."""
    steps: int
    """Number of steps."""
    requests: float | None
    """Mean number of requests per step; ``null``: not recorded."""
    tokens: float | None
    """Mean number of new tokens that a step computes; ``null``: not recorded."""
    ns: float
    """Mean duration of a step, ns: from its first device work to its last, and from the host's
    start where the device waited for it. Without device work it is the host's time."""
    quantiles: Quantiles
    """Quantiles of the steps' durations."""
    ns_per_token: float | None
    """Time of the steps over the tokens that they compute, ns; ``null``: not recorded."""
    tokens_per_s: float | None
    """Tokens per second while such steps run; ``null``: not recorded."""
    busy_share: float | None
    """Share of the steps' time in which the device works; ``null``: no device work, or its records
    are incomplete."""
    limit: str | None
    """Limit that takes most of the steps' time, without the host time that the profiler adds where
    that is known: ``host`` (the device waits), ``memory``, ``compute``, ``communication``;
    ``null``: unknown."""
    limit_share: float | None
    """Share of this time that the limit takes; ``null``: unknown."""
    limit_inferred: bool = False
    """Whether the limit is inferred from the number of tokens and the kinds of kernels. Then FLOPs
    and bytes of most of the kernel time are unknown."""
    attainable_ns: float | None
    """Duration of a step if each kernel ran at the rates measured on such a device, ns. Kernels
    whose work is unknown keep their time. ``null``: less than half of the kernel time is known."""
    known_share: float | None
    """Share of kernel time whose FLOPs or bytes are known; ``null``: no device work."""
    jitter: str = ""
    """Main difference of the longest steps from the rest; empty: they are similar, or too few."""
    roles: dict[str, float] = field(default_factory=dict)
    """Device time by part of a layer (``attention``, ``dense gemm``, ``moe experts`` …), mean per
    step, ns, the longest first."""


class GraphReplays(Struct, frozen=True, kw_only=True):
    """CUDA or HIP graphs that were replayed."""

    launches: int
    """Number of calls that launch a graph."""
    kernels: int
    """Number of recorded pieces of device work of all graphs."""
    per_step: float
    """Launches per step: 1 is a full graph, more are pieces."""
    matched: float | None = None
    """Share of the work that a capture trace names; ``null``: none was given."""
    missing: int = 0
    """Number of pieces of device work that must have run and are not in the recording."""


class InferenceByPhase(Struct, kw_only=True):
    """Steps by phase of a model that is used and not trained."""

    engine: str | None
    """Inference engine: ``vllm``, ``sglang`` …; ``null``: none, or unknown."""
    source: str
    """Marks of the steps: ``engine``, ``module calls``, ``ProfilerStep`` or ``vocabulary
    look-ups``."""
    phases: list[InferencePhase]
    """Phases by total time, the longest first."""
    between: Quantiles | None
    """Quantiles of the gaps between two steps; ``null``: there is one step, or none has a gap."""
    between_share: float | None
    """Share of the time from the first step to the end of the last that lies between steps;
    ``null``: one step."""
    output_tokens_per_s: float | None
    """Tokens that are put out, over the time from the first step to the end of the last; ``null``:
    not recorded, or drafts are verified."""
    graphs: GraphReplays | None = None
    """Replays of CUDA or HIP graphs; ``null``: none was replayed."""


class Report(Struct, kw_only=True):
    """An analysis: all that a renderer or the dashboard needs, in the schema ``SCHEMA``."""

    schema: str = SCHEMA
    """Name and number of this schema."""
    version: str = ""
    """Version of advisor."""
    status: Status
    """Outcome. ``bottlenecks``: a fix would pay. ``healthy``: none would. ``limited``: too little
    is known for either."""
    verdict: str
    """Result in one sentence."""
    inputs: list[Input]
    """Traces that were read, one per rank."""
    scope: Scope
    """Steps and device that the figures are about."""
    time: list[TimeShare] = field(default_factory=list)
    """Exclusive time by class; adds up to the step. Empty: no device work in the trace."""
    busy_share: float | None = None
    """Share of the step during which the GPU works; ``null``: no device work, or lost records."""
    communication_ns: float | None = None
    """Communication per step, hidden or not, ns; ``null``: none, or lost records."""
    communication_overlap: float | None = None
    """Share of communication that runs under compute; ``null``: none, or lost records."""
    idle: list[IdleCause] = field(default_factory=list)
    """Idle time of the device by cause; adds up to the idle time."""
    unknown_idle_share: float | None = None
    """Share of the idle time whose cause is unknown; ``null``: no idle time, or lost records."""
    without_fix: list[TimeWithoutFix] = field(default_factory=list)
    """Parts of the time as long as a listed gain that no finding is about, and why."""
    host: list[HostShare] = field(default_factory=list)
    """Exclusive time of the main thread by class, largest first."""
    host_step_ns: float | None = None
    """Mean step by the host's own marks, ns, where it runs ahead of the device; ``null``: it does
    not, and ``host`` is of the same step as ``time``."""
    step_variation: StepVariation | None = None
    """Difference of long and short steps; ``null``: they are similar, or fewer than four."""
    operators: list[OperatorTime] = field(default_factory=list)
    """Operators that take most host time, at most ten, where the trace has no device work."""
    ranges: list[OperatorTime] = field(default_factory=list)
    """Ranges of the program on the thread that drives the step, where there are no operators: those
    with most time, at most ten. None is a step itself; shares are of the step."""
    families: list[Family] = field(default_factory=list)
    """Kernel time by family, largest first."""
    rooflines: list[OperatorRate] = field(default_factory=list)
    """Operators by shape, the fifty with most device time, longest first."""
    attainable: list[AttainableRate] = field(default_factory=list)
    """Rates with which ``rooflines`` compares them. Empty: unknown device."""
    layers: Layers | None = None
    """Time by module; ``null``: no modules were recorded around any work."""
    mesh: list[MeshAxis] = field(default_factory=list)
    """Communication by axis of the device mesh, the most exposed time first."""
    mfu: float | None = None
    """Model FLOPs utilisation, 0 to 1: FLOPs of the step over its duration and the GPU's peak."""
    mfu_format: str | None = None
    """Number format whose peak that is mostly of, where it is below the GPU's on tensor cores of 16
    bits: ``FP32``; ``null``: it is not."""
    memory_peak_bytes: int | None = None
    """Peak of the device memory that the allocator reserved, bytes; ``null``: not recorded."""
    memory_capacity_bytes: int | None = None
    """Capacity of the device's memory, bytes; ``null``: unknown."""
    findings: list[Finding] = field(default_factory=list)
    """Findings whose fixes save time per step, by priority; then those folded under them."""
    risks: list[Finding] = field(default_factory=list)
    """Findings about memory, risk or time over the run, which are ranked separately."""
    notes: list[Finding] = field(default_factory=list)
    """Findings for information: not proven on real traces yet, or a gain too small to act on."""
    passed: list[PassedCheck] = field(default_factory=list)
    """Checks that passed: what the run already does well."""
    not_checked: list[SkippedCheck] = field(default_factory=list)
    """Checks that were skipped, each with what to record to allow it."""
    limits: list[str] = field(default_factory=list)
    """Limits of this trace: what it cannot show, one sentence each."""
    ranks: Ranks | None = None
    """Comparison of the ranks; ``null``: one rank."""
    replay: Replay | None = None
    """Replay of the steps; ``null``: it failed or was not accurate, and gains are upper bounds."""
    step: StepTime | None = None
    """Step time of the run outside the profiler; ``null``: a trace alone, or too few steps, and
    ``scope`` has what there is."""
    step_durations: list[StepDurations] = field(default_factory=list)
    """Durations of the steps, one entry per source, and per run in a baseline of several. Empty:
    steps are not marked, or the report was written before reports held them."""
    crashes: list[Crash] = field(default_factory=list)
    """Ranks that an exception ended, in order of time."""
    recorded: RecordedSteps | None = None
    """Figures of the recorder for every step; ``null``: a trace alone."""
    energy: EnergyUse | None = None
    """Energy of the GPUs while steps ran; ``null``: not sampled."""
    cost: Cost | None = None
    """Cost per step; ``null``: no price was given."""
    hot_lines: list[HotLine] = field(default_factory=list)
    """Python lines that take most CPU time, largest first. Empty: no pass of Scalene was made."""
    memory: list[MemoryView] = field(default_factory=list)
    """Memory by device, from a snapshot or a trace's allocator events, the fullest device first.
    Empty: neither was recorded."""
    memory_ranks: list[MemorySample] = field(default_factory=list)
    """Snapshots of several ranks side by side. Empty: fewer than two."""
    kernel_counters: list[KernelCounters] = field(default_factory=list)
    """Kernels with hardware counters, by their gain per step; without a trace by time."""
    triton_kernels: list[TritonKernel] = field(default_factory=list)
    """Kernels that Triton compiled, those first that spill and take time. Empty: no Triton cache
    was given."""
    profile_kernels: list[str] = field(default_factory=list)
    """Command that collects hardware counters of the kernels that matter, and what it costs. Empty:
    none is slow, or their counters are here."""
    rules: list[RuleText] = field(default_factory=list)
    """Rules of all findings, risks and notes, by id."""
    inference: InferenceByPhase | None = field(default=None, name="serving")
    """Inference by phase; ``null``: the program trains, or nothing marks its steps."""
    compilation: CompileLog | None = None
    """Logs of torch.compile; ``null``: none were given."""
    flight: FlightRecord | None = None
    """Dumps of PyTorch's flight recorder; ``null``: none were given."""
    network: NetworkLog | None = None
    """Logs of NCCL and topologies; ``null``: none were given."""
    charts: ReportCharts | None = None
    """Charts of the report as data; ``null``: written before there were any."""

    @property
    def step_ns(self) -> float:
        """Step time that gains are shares of, ns: the run's own, else the mean of the trace's."""
        return self.scope.step_ns if self.step is None else self.step.reference_ns

    @property
    def gain_scale(self) -> float | None:
        """Median step of the run over the window's mean step; ``None``: one of them is missing."""
        return None if self.step is None else self.step.gain_scale

    @property
    def per(self) -> Per:
        """Unit of the figures: the step, or the recording when no step is marked."""
        return self.scope.per

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain dicts and lists, as in the JSON."""
        result: dict[str, Any] = msgspec.to_builtins(self)
        return result

    def by_id(self) -> dict[str, Finding]:
        """Return findings, risks and notes by a stable id: the rule, numbered from the second on
        (``gpu-idle#2``)."""
        seen: dict[str, int] = {}
        result = {}
        for finding in (*self.findings, *self.risks, *self.notes):
            number = seen[finding.rule] = seen.get(finding.rule, 0) + 1
            result[finding.rule if number == 1 else f"{finding.rule}#{number}"] = finding
        return result

    def to_json(self) -> bytes:
        """Return the JSON text, indented by two."""
        return encode_json(self)

    def __repr__(self) -> str:
        """Return one line: status, number of findings, verdict."""
        from advisor.core.labels import clean, shorten
        from advisor.core.text import count_noun

        result = count_noun(len(self.findings), "finding")
        return f"<Report {self.status}, {result}: {shorten(clean(self.verdict), 160)}>"

    def __str__(self) -> str:
        """Return what ``advisor analyze`` prints on 80 columns, at most MAX_LINES lines."""
        text = render(self, "REPORTS", "terminal")
        return limit_lines(text, "to_dict() has all")

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows."""
        return render(self, "REPORTS", "notebook")

    @classmethod
    def from_json(cls, text: bytes | str) -> Report:
        """Read a report that :meth:`to_json` wrote. Raises AdvisorError for anything else."""
        return decode_json(text, cls, "report", SCHEMA, older={"advisor.report/1": from_version_1})
