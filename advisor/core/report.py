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
from advisor.core.report_inference import InferenceByPhase
from advisor.core.report_kernels import AttainableRate, KernelCounters, OperatorRate, TritonKernel
from advisor.core.report_memory import MemorySample, MemoryView
from advisor.core.report_replay import Replay
from advisor.core.report_steps import (
    RunStepFigures,
    StepDurations,
    StepTime,
    StepVariation,
)
from advisor.core.report_time import (
    Family,
    HostShare,
    IdleCause,
    OperatorTime,
    TimeShare,
    TimeWithoutFix,
)
from advisor.core.report_versions import from_version_1, from_version_2
from advisor.core.rule import Per

SCHEMA = "advisor.report/3"

MAX_OUTPUT_LINES = 400
"""Maximum number of lines that ``print`` shows of a report or a comparison."""

Status = Literal["bottlenecks", "healthy", "limited"]


def render(subject: object, formats: str, name: str, **options: Any) -> str:
    """Return a subject in the format ``name`` of ``advisor.render.formats.<formats>``, for
    ``print`` and notebooks. Core may not depend on renderers, so they are imported by name."""
    module = import_module("advisor.render.formats")
    text: str = getattr(module, formats).render(name, subject, **options)
    return text


def limit_lines(text: str, hint: str) -> str:
    """Return the first MAX_OUTPUT_LINES lines. If there are more, add a line that counts them, and
    ``hint``."""
    lines = text.rstrip("\n").split("\n")
    if len(lines) > MAX_OUTPUT_LINES:
        from advisor.core.text import count_noun

        hidden = len(lines) - MAX_OUTPUT_LINES
        lines[MAX_OUTPUT_LINES:] = [f"… {count_noun(hidden, 'more line')}; {hint}"]
    return "\n".join(lines)


class Input(Struct, kw_only=True):
    """A trace that was read."""

    path: str
    """Path as given, or ``-`` for standard input."""
    rank: int | None
    """Rank of the process, or ``null`` if neither the file nor its name has it."""
    window: int
    """Number of this window of the rank, in order of time, from 0."""
    windows: int
    """Number of windows of this rank. Only one is analysed."""
    events_read: int
    """Events that were kept."""
    events_dropped: dict[str, int]
    """Number of events that were left out, by reason."""
    bytes_read: int
    """Uncompressed size, bytes."""
    truncated: bool
    """Whether the file is cut off. Only the part before that is analysed."""
    damage: str | None = None
    """Error message of the unpacker or the JSON reader, or ``null`` if the file is intact."""
    format: str | None = None
    """Format of the file: ``kineto``, ``nsys``, ``rocpd`` …, or ``null`` if unknown."""
    record_shapes: bool | None = None
    """Whether shapes were recorded, or ``null`` if unknown."""
    with_stack: bool | None = None
    """Whether Python stacks were recorded, which slow the host, or ``null`` if unknown."""
    profile_memory: bool | None = None
    """Whether memory events were recorded, or ``null`` if unknown."""


class Scope(Struct, kw_only=True):
    """The rank, steps and device that the figures are about."""

    rank: int | None
    """Rank of the figures, or ``null`` if unknown."""
    step_source: str
    """Source of the steps: ``engine`` (marks of an inference engine), ``module calls`` or
    ``vocabulary look-ups`` of a model that infers, ``ProfilerStep``, ``recorder``, ``optimizer``,
    ``ranges``, ``device sequence`` or ``whole trace``. For JAX and TensorFlow:
    ``StepTraceAnnotation``, ``step_num``, ``program`` or ``device steps``. For TensorRT: ``layer
    times``. ``record`` if no window was profiled and the figures are the recorder's own. Without a
    trace: ``snapshot``, ``counters``, ``Triton cache``, ``flight recorder``, ``network log`` or
    ``compile log``."""
    steps_found: int = 0
    """Number of steps in the trace, or in the requested range."""
    steps_used: int = 0
    """Number of measured steps: complete ones that are not outliers."""
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
    """Analysed GPU, the one with most work, or ``null`` without device work."""
    device_name: str | None = None
    """Name of the analysed GPU in the trace, or ``null`` if not recorded."""
    device_known: bool = False
    """Whether advisor/core/gpus contains the GPU. Rooflines are only computed then."""
    devices_seen: int = 0
    """Number of GPUs with work in the trace."""
    device_shared: str = ""
    """Description of other processes on the device. Empty if none is known."""
    framework: str | None = None
    """Framework of the program: ``pytorch``, ``tensorflow``, ``jax``, ``cuda`` (C++ with CUDA or
    HIP and none of these), or ``null`` if unknown."""
    recorded_ns: int | None = None
    """Time from the first to the last recorded work of host or GPU, ns. ``span_ns`` is from the
    GPU's first work to its last. ``null`` with steps, or without GPU work."""
    launched_before_ns: int = 0
    """GPU work that was launched before the recording and ran in it, ns. It is not part of any
    table of kernels or gain."""
    queue_delay_ns: int = 0
    """Median time that the first work of a step waits in the GPU's queue, ns, if steps are timed by
    the GPU's work."""

    @property
    def has_no_step_time(self) -> bool:
        """Whether the source is not a trace, so that steps have no duration."""
        return self.step_source in AUXILIARY_INPUTS_BY_NAME

    @property
    def per(self) -> Per:
        """Unit of the figures: ``step``, ``repetition`` or ``recording``."""
        return unit_of(self.step_source)


class Crash(Struct, kw_only=True):
    """A rank that ended with an exception."""

    rank: int
    """Number of the rank."""
    exception: str
    """Type of the exception."""
    message: str | None
    """Message of the exception, or ``null`` if not recorded."""
    steps: int | None
    """Number of steps that the rank had completed, or ``null`` if not recorded."""


class RuleText(Struct, frozen=True, kw_only=True):
    """Documentation of a rule with findings."""

    id: str
    """Identifier, as in ``Finding.rule``."""
    title: str
    """Title: what the rule looks for."""
    category: str
    """Category, one of ``advisor.core.finding.Category``."""
    paragraphs: list[str]
    """Paragraphs of the text: what the rule looks for, why that costs time, how it is measured."""


class Report(Struct, kw_only=True):
    """An analysis: all data that a renderer or the dashboard needs, in the schema ``SCHEMA``."""

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
    """Exclusive time by class. It adds up to the step. Empty without device work in the trace."""
    busy_share: float | None = None
    """Share of the step during which the GPU works, or ``null`` without device work or with lost
    records."""
    communication_ns: float | None = None
    """Communication per step, hidden or not, ns, or ``null`` if there is none or if records were
    lost."""
    communication_overlap: float | None = None
    """Share of communication that runs under compute, or ``null`` if there is none or if records
    were lost."""
    idle: list[IdleCause] = field(default_factory=list)
    """Idle time of the device by cause. It adds up to the idle time."""
    unknown_idle_share: float | None = None
    """Share of the idle time whose cause is unknown, or ``null`` without idle time or if records
    were lost."""
    without_fix: list[TimeWithoutFix] = field(default_factory=list)
    """Parts of the time as long as a listed gain that no finding covers, each with a reason."""
    host: list[HostShare] = field(default_factory=list)
    """Exclusive time of the main thread by class, largest first."""
    host_step_ns: float | None = None
    """Mean step by the host's own marks, ns, if the host runs ahead of the device. If ``null``,
    ``host`` and ``time`` refer to the same step."""
    step_variation: StepVariation | None = None
    """Difference of long and short steps, or ``null`` if they are similar or fewer than four."""
    operators: list[OperatorTime] = field(default_factory=list)
    """Operators that take most host time, at most ten, if the trace has no device work."""
    operator_names: list[str] = field(default_factory=list)
    """Names of PyTorch's operators, backward passes and compiled regions in the trace, sorted, at
    most 500. They show whether two reports are of one program. Empty in older reports."""
    ranges: list[OperatorTime] = field(default_factory=list)
    """Ranges of the program on the thread that drives the step, if there are no operators. At most
    ten with most time, without the steps. Shares are of the step."""
    families: list[Family] = field(default_factory=list)
    """Kernel time by family, largest first."""
    rooflines: list[OperatorRate] = field(default_factory=list)
    """Operators by shape, the fifty with most device time, longest first."""
    attainable: list[AttainableRate] = field(default_factory=list)
    """Rates with which ``rooflines`` compares operators. Empty if the device is unknown."""
    layers: Layers | None = None
    """Time by module, or ``null`` if no modules were recorded around any work."""
    mesh: list[MeshAxis] = field(default_factory=list)
    """Communication by axis of the device mesh, the most exposed time first."""
    mfu: float | None = None
    """Model FLOPs utilisation, 0 to 1: FLOPs of the step over its duration and the GPU's peak."""
    mfu_format: str | None = None
    """Number format of the peak in ``mfu``, such as ``FP32``, if it is below the GPU's 16-bit
    tensor core peak. ``null`` otherwise."""
    memory_peak_bytes: int | None = None
    """Peak of the device memory that the allocator reserved, bytes, or ``null`` if not recorded."""
    memory_capacity_bytes: int | None = None
    """Capacity of the device's memory, bytes, or ``null`` if unknown."""
    findings: list[Finding] = field(default_factory=list)
    """Findings whose fixes save time per step, by priority, then the findings folded under them."""
    risks: list[Finding] = field(default_factory=list)
    """Findings about memory, risk or time over the run, which are ranked separately."""
    notes: list[Finding] = field(default_factory=list)
    """Informational findings: not proven on real traces yet, or with a gain too small to act on."""
    passed: list[PassedCheck] = field(default_factory=list)
    """Checks that passed: what the run already does well."""
    not_checked: list[SkippedCheck] = field(default_factory=list)
    """Skipped checks, each with what to record for it."""
    limits: list[str] = field(default_factory=list)
    """Limits of this trace: what it cannot show, one sentence each."""
    main_limit: str = ""
    """Name of the limit that matters most for the verdict. Empty if none matters."""
    ranks: Ranks | None = None
    """Comparison of the ranks, or ``null`` for one rank."""
    replay: Replay | None = None
    """Replay of the steps. If it failed or was inaccurate, ``null``, and gains are upper bounds."""
    step: StepTime | None = None
    """Step time of the run outside the profiler. ``null`` for a trace alone or too few steps; see
    ``scope`` then."""
    step_durations: list[StepDurations] = field(default_factory=list)
    """Durations of the steps, one entry per source, and per run in a baseline of several runs.
    Empty if steps are not marked, or in older reports."""
    crashes: list[Crash] = field(default_factory=list)
    """Ranks that ended with an exception, in order of time."""
    recorded: RunStepFigures | None = None
    """Figures of the recorder for every step, or ``null`` for a trace alone."""
    energy: EnergyUse | None = None
    """Energy of the GPUs while steps ran, or ``null`` if not sampled."""
    cost: Cost | None = None
    """Cost per step, or ``null`` without a price."""
    hot_lines: list[HotLine] = field(default_factory=list)
    """Python lines that take most CPU time, largest first. Empty without a Scalene pass."""
    memory: list[MemoryView] = field(default_factory=list)
    """Memory by device, from a snapshot or a trace's allocator events, the fullest device first.
    Empty if neither was recorded."""
    memory_ranks: list[MemorySample] = field(default_factory=list)
    """Snapshots of several ranks side by side. Empty for fewer than two."""
    kernel_counters: list[KernelCounters] = field(default_factory=list)
    """Kernels with hardware counters, sorted by gain per step, or by time without a trace."""
    triton_kernels: list[TritonKernel] = field(default_factory=list)
    """Kernels that Triton compiled, first those that spill and take time. Empty without a Triton
    cache."""
    profile_kernels: list[str] = field(default_factory=list)
    """Commands that collect hardware counters of the slow kernels and read them, and their cost.
    Empty if no kernel is slow, or if the counters are already in the report."""
    rules: list[RuleText] = field(default_factory=list)
    """Rules of all findings, risks and notes, by id."""
    inference: InferenceByPhase | None = None
    """Inference by phase, or ``null`` if the program trains or nothing marks its steps."""
    compilation: CompileLog | None = None
    """Logs of torch.compile, or ``null`` if none were given."""
    flight: FlightRecord | None = None
    """Dumps of PyTorch's flight recorder, or ``null`` if none were given."""
    network: NetworkLog | None = None
    """Logs of NCCL and topologies, or ``null`` if none were given."""
    charts: ReportCharts | None = None
    """Charts of the report as data, or ``null`` in older reports."""

    @property
    def step_ns(self) -> float:
        """Step time that gains are shares of, ns: the run's own, or else the trace's mean step."""
        return self.scope.step_ns if self.step is None else self.step.reference_ns

    @property
    def gain_scale(self) -> float | None:
        """Median step of the run over the window's mean step, or ``None`` if one of them is
        missing."""
        return None if self.step is None else self.step.gain_scale

    @property
    def per(self) -> Per:
        """Unit of the figures: the step, or the recording if no step is marked."""
        return self.scope.per

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain dicts and lists, as in the JSON."""
        result: dict[str, Any] = msgspec.to_builtins(self)
        return result

    def by_id(self) -> dict[str, Finding]:
        """Return findings, risks and notes by a stable id: the rule's id, numbered from the second
        finding on (``gpu-idle#2``)."""
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
        """Return the output of ``advisor analyze`` at 80 columns, up to MAX_OUTPUT_LINES lines."""
        text = render(self, "REPORTS", "terminal")
        return limit_lines(text, "to_dict() has all")

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows."""
        return render(self, "REPORTS", "notebook")

    @classmethod
    def from_json(cls, text: bytes | str) -> Report:
        """Read a report that :meth:`to_json` wrote. Raises AdvisorError for anything else."""
        older = {"advisor.report/1": from_version_1, "advisor.report/2": from_version_2}
        return decode_json(text, cls, "report", SCHEMA, older=older)
