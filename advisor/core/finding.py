"""Finding, Edit, Impact and the other data types of advice. Every folder may import this module."""

from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple

from msgspec import Struct, field
from msgspec.structs import force_setattr

from advisor.core.rule import Evidence, Per

Severity = Literal["info", "warning", "critical"]
Category = Literal[
    "input", "host", "sync", "transfer", "kernel", "memory", "optimizer", "compile", "distributed",
    "hardware", "inference",
]  # fmt: skip
GainKind = Literal["", "replay", "recorded", "upper bound", "lower bound"]
Currency = Literal["step_time", "run_time", "memory", "risk", "unknown"]
Validation = Literal["real traces", "recordings", "synthetic"]
RangeCause = Literal[
    "", "assumption", "faster host", "slower host", "hand-over", "replay error", "shared cores",
    "past", "not proven", "device work", "late launches",
]  # fmt: skip
"""Cause of an end of a gain's range: the finding's own assumption, a host that is faster without
the profiler, a host that is slower than expected, the hand-over of results from other processes,
the error of the replay, cores shared with other work, errors of past estimates, the largest of
these errors if a rule is not proven, the device work that the fix leaves, or launches that stay
late. Empty if nothing decides it."""
StepProperty = Literal["", "sizes repeat"]
"""Property of a step. ``sizes repeat``: every step launches the same kernels on the same sizes."""
Instants = Literal[
    "", "step_start", "graph_break", "between_steps", "read_loop", "after_read", "round_trip",
    "recompute", "second_forward", "repeated_backward", "rebuilt_weights", "unused_gradient",
    "new_shape", "graph_entry", "without_gradient", "evaluation", "loop",
]  # fmt: skip
"""Contexts that ``Select.at`` names. Its docstring describes each."""
Operation = Literal[
    "remove", "scale", "roofline", "overlap", "make_async", "merge", "drop_launch", "parallelize",
    "resize", "remove_skew",
]  # fmt: skip


GUESSED_STEP_SOURCES = ("device sequence", "repeating ranges")
"""``Steps.source`` of unmarked steps. A repetition may be only a part of an iteration."""

LAYER_TIMES = "layer times"
"""``Steps.source`` of one inference of which only layer times are known. Their sum is the step."""


def unit_of(step_source: str) -> Per:
    """Return the unit of figures, by the source of their steps (``Scope.step_source``)."""
    if step_source in GUESSED_STEP_SOURCES:
        return "repetition"
    if step_source == LAYER_TIMES:
        return "inference"
    return "recording" if step_source == "whole trace" else "step"


class Select(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Selection of the events that an :class:`Edit` touches. Every given field must match.

    Selectors name events by their properties, never by row number. So a person can write an Edit,
    store it, and apply it to another window of the same job."""

    on: Literal["gpu", "host", "gap"]
    """Device work, host events (ops, Python frames, runtime calls), or idle gaps of the device."""
    kind: tuple[str, ...] = ()
    """``gpu``: kernel, memcpy, memset. ``host``: op, annotation, python, runtime."""
    name: str = ""
    """Regular expression searched in the event's own name."""
    under: str = ""
    """Regular expression searched in the names of the host events around the event. For device
    work, they are around its launch. For a gap, it is the event that causes the gap."""
    layer: str = ""
    """Module whose device work is selected, including modules inside it. It is given by its name,
    kind or path, with ``*`` and ``?`` as in file names. Without other fields, ``remove`` and
    ``scale`` change its host time too."""
    family: tuple[str, ...] = ()
    """Kernel families, as in ``Analysis.kernels`` (``gemm``, ``softmax``, ``communication`` …). In
    a trace without a device, ``communication`` is gloo's collectives and the waits for them."""
    copy: tuple[str, ...] = ()
    """Copy directions: HtoD, DtoH, DtoD, PtoP, HtoH. For host calls, the direction of the copy that
    they make or wait for."""
    memory: Literal["", "pageable", "pinned"] = ""
    """Host side of a copy."""
    call: tuple[str, ...] = ()
    """Runtime call classes, as in the ``call`` column of ``Trace.cpu``."""
    cause: tuple[str, ...] = ()
    """Idle-gap causes, as in ``Analysis.gaps``."""
    at: Instants = ""
    """Context. ``loop``, for ``host``: also the thread's time from one event to the next, if no
    other operator or call is between them. This is the Python of a loop. All others name instants.
    They select gaps that overlap them, host events that begin in them, and device work launched in
    them. ``step_start``: before the first device work of their step. ``graph_break``: from one
    compiled graph to the next across a break. ``graph_entry``: in functions whose graph breaks,
    outside the code of their graphs. ``between_steps``: from the end of an inference engine's step
    to the first work of the next. ``read_loop``: in a loop that reads one device value after the
    other. ``after_read``: from the end of a read of data to the next launch. ``round_trip``: from a
    copy to the host to the end of the copy back. ``recompute``: while the backward pass recomputes
    activations. ``second_forward``: in layers that repeat those of the trained forward pass.
    ``repeated_backward``: in nodes of the autograd graph that run again. ``rebuilt_weights``: while
    weights that nothing trains are cast or normalised. ``unused_gradient``: while gradients are
    computed for parameters that no optimizer has. ``new_shape``: while an operator prepares for an
    input shape that occurs for the first time. ``without_gradient``: in runs of operators without
    gradient around a read of a size, inside a trained forward pass. ``evaluation``: in calls of a
    trained module in evaluation mode, which each step makes."""
    region: tuple[str, ...] = ()
    """Compiled functions, by number (``1`` of ``Torch-Compiled Region: 1/0``), for ``graph_break``.
    Only breaks that lead into them are selected."""
    stream: tuple[int, ...] = ()
    """CUDA streams of the events."""
    max_ns: int | None = None
    """Maximum duration of the events, ns."""
    max_bytes: int | None = None
    """Maximum message size of the collectives, bytes."""
    correlation: tuple[int, ...] = ()
    """CUDA correlation ids: the identity of a launch and its device work inside one trace."""


class Edit(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A change that a fix would make to the step: an operation over selected events."""

    op: Operation
    """Operation: ``remove`` the events; ``scale`` their durations by ``factor``; bring kernels to
    ``factor`` of their ``roofline``; ``overlap`` them with other work (another stream); make
    blocking host calls return at once (``make_async``); ``merge`` kernels into one; ``drop_launch``
    cost (CUDA graph, compile); ``parallelize`` loading over ``workers``; ``resize`` the batch by
    ``factor``; ``remove_skew``: the collectives of a rank keep no other rank waiting."""
    select: Select
    """Events that the operation is applied to."""
    factor: float | None = None
    """Factor of the central estimate. ``scale`` and ``merge``: new duration over old. ``roofline``:
    share of the attainable rate that is reached. ``resize``: new batch size over old."""
    best_factor: float | None = None
    """Factor under the optimistic assumption (larger gain)."""
    worst_factor: float | None = None
    """Factor under the pessimistic assumption (smaller gain). ``overlap``: share of the saving that
    is then lost."""
    workers: int | None = None
    """Number of workers that share the host work (``parallelize``)."""
    host_ns: int | None = None
    """Host time that remains for each launch, ns (``drop_launch``)."""
    ahead: bool = False
    """Whether an ``overlap`` is also issued earlier. It then ends before the host waits for the
    whole device, if the overlapping work is long enough. Not under the pessimistic assumption."""
    rank: int | None = None
    """Rank that alone changes if several are replayed together. With ``None`` all ranks change,
    because a change to the program affects all of them. ``remove_skew`` needs it."""


class Impact(Struct, frozen=True, kw_only=True):
    """Saving of a fix, in one currency. Currencies are never converted."""

    currency: Currency
    """Currency: time per step, time over the run, memory, risk, or no figure."""
    gain_ns: int | None = None
    """Time saved per step (``step_time``) or over the run (``run_time``), central estimate, ns."""
    low_ns: int | None = None
    """Lower end of the gain's range, ns."""
    high_ns: int | None = None
    """Upper end of the gain's range, ns."""
    share: float | None = None
    """Share of ``gain_ns`` in the measured step, or in the run (0 to 1)."""
    freed_bytes: int | None = None
    """Device memory freed, bytes (``memory``)."""
    method: str = ""
    """Method of the estimate, as text: ``upper bound (exposed time)``, ``replay``."""
    kind: GainKind = ""
    """Kind of the method: the gain is replayed, recorded time, or a bound. Empty if the gain is not
    time."""
    reason: str = ""
    """Reason why there is no figure (``unknown`` and ``risk``)."""
    per: Per | None = None
    """Unit of the gain, or ``null`` for the step or the run, by the currency."""
    bound_ns: int | None = None
    """Time that the fix's edits touch, ns: an upper bound of the range. ``null`` if not limited."""
    low_by: RangeCause = ""
    """Cause that decides the lower end of the range."""
    high_by: RangeCause = ""
    """Cause that decides the upper end of the range."""
    is_run_gain: bool = False
    """Whether the gain refers to the run's own step, from its record, not to a profiled step."""
    is_job_gain: bool = False
    """Whether the gain is the job's, including savings and waits of other ranks."""

    def __post_init__(self) -> None:
        """Set the kind if it is missing, as in reports of earlier versions."""
        if not self.kind and self.gain_ns is not None:
            kinds: tuple[GainKind, ...] = ("replay", "upper bound", "lower bound")
            matching = (kind for kind in kinds if self.method.startswith(kind))
            force_setattr(self, "kind", next(matching, "recorded"))

    @property
    def unit(self) -> Per:
        """Unit of the gain: ``per`` if it is given, else the step or the run."""
        if self.per is not None:
            return self.per
        return "step" if self.currency == "step_time" else "run"


def impact_without_gain(reason: str) -> Impact:
    """Return an impact without a figure, with the reason."""
    return Impact(currency="unknown", reason=reason)


def impact_risk(reason: str) -> Impact:
    """Return a risk, without a figure. ``reason`` says what may happen."""
    return Impact(currency="risk", reason=reason)


def impact_memory(size: int, method: str) -> Impact:
    """Return the impact of a fix that frees GPU memory, bytes."""
    return Impact(currency="memory", freed_bytes=size, method=method)


class Location(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Place of a finding: a line of the user's code if there are stacks, else operator and
    kernel."""

    file: str | None = None
    """Source file."""
    line: int | None = None
    """Line in ``file``."""
    function: str | None = None
    """Function around the line."""
    sampled_share: float | None = None
    """Share of stack samples that show the line, which is the line's share of the operator in the
    step. ``null`` if the line was recorded, not sampled."""
    layer: str | None = None
    """Modules of the model: ``48 RMSNorm in layers.0–23``."""
    around_layer: bool = False
    """Whether the line is code around the model. The layer then says more."""
    op: str | None = None
    """Operator, or annotation."""
    kernel: str | None = None
    """Name of the device work."""
    step: str | None = None
    """Step of the worst instance."""
    ts_ns: int | None = None
    """Start of the worst instance, ns on the trace's clock."""
    dur_ns: int | None = None
    """Duration of the worst instance, ns."""
    count: int | None = None
    """Number of instances in the analysed window."""
    share: float | None = None
    """Share of the finding's time that ``op`` and ``kernel`` take at this place (0 to 1)."""
    counted: str = ""
    """Name of what is counted, such as ``gap`` (between device work). Empty for calls or
    kernels."""


WHOLE_STEP: Final = "whole step"
"""Subject of findings on what slows down all of the step's work, whatever the work is."""
LATER_STEPS_FIRST: Final = "Profile later steps first"
"""Beginning of a fix for steps that are not like later ones: its gain is not certain."""
HOST_CODE: Final = "host code"
"""Subject of findings on all code of a place, whatever it does. Other fixes may save the same host
time."""


class Finding(Struct, frozen=True, kw_only=True):
    """A detected bottleneck: evidence, fix, and the Edit that says what the fix changes. The engine
    fills in missing fields from the rule (``Rule.complete``). A finding is immutable: each stage
    returns a new one (``msgspec.structs.replace``)."""

    rule: str = ""
    """Identifier of the rule."""
    title: str = ""
    """Title: what is wrong, in one line."""
    summary: str
    """Summary in one or two sentences: what was measured and why it costs time."""
    fix: str = ""
    """Advice: what to do."""
    code: str = ""
    """The fix as a snippet the user can paste."""
    verify: str = ""
    """Way to check that the fix worked."""
    evidence: Sequence[Evidence] = field(default_factory=list)
    """Measured facts behind the finding."""
    where: Sequence[Location] = field(default_factory=list)
    """Places that cost most, worst first."""
    edits: Sequence[Edit] = field(default_factory=list)
    """Changes that the fix makes, for its estimate and what-if."""
    confidence: float = 0.0
    """Confidence in the cause, 0 to 1, before the engine lowers it for short windows."""
    confidence_notes: Sequence[str] = field(default_factory=list)
    """Reasons why the confidence was lowered."""
    assumptions: Sequence[str] = field(default_factory=list)
    """Assumptions that the gain rests on."""
    falsified_by: str = ""
    """Observation that would prove the finding wrong."""
    offloaded_ns: float | None = None
    """Host time per step that the fix moves to other processes, ns. With N processes, the step
    takes at least 1/N of it. ``{workers}`` in the texts is replaced by the number that keeps up."""
    alternatives: str = ""
    """Name of a group of findings in which one fix replaces the others (for example ``fuse``)."""
    needs: StepProperty = ""
    """Property of the step that the fix needs."""
    breaks: StepProperty = ""
    """Property that the step loses with the fix. The fix excludes fixes that need this property."""
    impact: Impact | None = None
    """Impact that the rule itself estimates (memory, risk). The engine estimates step time."""
    informational: bool = False
    """Whether the finding is a note, never ranked and never counted as a bottleneck."""
    costs_more_than_recorded: bool = False
    """Whether the cause certainly slows every step, by more than is recorded. The finding is then
    ranked even without a gain, and a gain is a lower bound."""
    # filled in by the engine
    category: str = ""
    """Category of the rule."""
    subject: str = ""
    """Work that the finding is about, if several rules look at it, such as ``attention``."""
    severity: Severity = "info"
    """Severity, by the share of the step that the fix saves."""
    priority: int | None = None
    """Position in the order of fixes, from 1, or ``null`` if not ranked."""
    marginal_gain_ns: int | None = None
    """Time that the fix still saves per step after the fixes ranked before it, ns. ``impact`` is
    the saving of the fix alone."""
    marginal_low_ns: int | None = None
    """Lower end of the range of ``marginal_gain_ns``, ns."""
    marginal_high_ns: int | None = None
    """Upper end of the range of ``marginal_gain_ns``, ns."""
    marginal_low_by: RangeCause = ""
    """Cause that decides ``marginal_low_ns``, as in ``impact.low_by``."""
    marginal_high_by: RangeCause = ""
    """Cause that decides ``marginal_high_ns``, as in ``impact.high_by``."""
    after_fix: str | None = None
    """Rule id of the finding that must be fixed first for this one to pay."""
    folded_under: str | None = None
    """Rule id of the finding that already explains this one."""
    other_rank: bool = False
    """Whether it was found on a rank other than the reported one. The gain is then that rank's."""
    validation: str = ""
    """Level of validation of the rule: ``real traces``, ``recordings`` or ``synthetic``."""
    references: Sequence[str] = field(default_factory=list)
    """References: where to read more."""
    device: int | None = None
    """GPU on which the finding was made."""
    trace_rank: int | None = None
    """Rank on which the finding was made."""

    @property
    def share_of_step(self) -> float:
        """Share of the step that the fix gains, or 0 if unknown."""
        return (self.impact.share or 0.0) if self.impact is not None else 0.0

    @property
    def shown_time(self) -> Evidence | None:
        """Time that the finding is about, from its evidence, or ``None`` if the evidence has no
        time."""
        timed = (e for e in self.evidence if e.unit == "ns" and e.per is not None and e.value)
        return next(timed, None)


MissingData = Literal["no stacks", "other load on the CPUs", "GPU unknown", "no shapes", ""]
"""Names of data that the first advice may depend on, most important first."""


class SkippedCheck(Struct, frozen=True, kw_only=True):
    """A check that a rule skipped, with the reason and what to record for it."""

    what: str
    """Name of the check."""
    why: str
    """Data that was missing."""
    record: str = ""
    """Recording option that would allow the check (``record_shapes=True`` …)."""
    rule: str = ""
    """Rules that skipped the check."""
    missing: MissingData = ""
    """Name of the missing data, if the first advice may depend on it."""


class Limit(NamedTuple):
    """Limit of a recording: what it cannot show, or leaves out."""

    text: str
    """A sentence or two."""
    name: str = ""
    """Name in a few words, if the verdict depends on it."""


class PassedCheck(Struct, frozen=True, kw_only=True):
    """A check that passed: something the run already does well."""

    text: str
    """Statement of what the run does well, with the figure that shows it."""
    rule: str = ""
    """Rule that checked it."""


Outcome = Finding | SkippedCheck | PassedCheck
Outcomes = Iterator[Outcome]
"""Results that ``Rule.check`` yields."""


class HotLine(Struct, frozen=True, kw_only=True):
    """A line of Python that takes much CPU time, from a Scalene pass. Shares refer to all CPU
    samples of that pass, including start-up. They compare lines, not steps."""

    file: str
    """Source file."""
    line: int
    """Line in ``file``."""
    text: str
    """Text of the line."""
    function: str | None
    """Function around the line, or ``null`` outside functions."""
    share: float
    """Share of the line in all samples."""
    python: float
    """Part of ``share`` in the interpreter."""
    native: float
    """Part of ``share`` in native code called by the line."""
    system: float
    """Part of ``share`` in the operating system's kernel, or waiting."""


def are_alternatives(one: Finding, other: Finding) -> bool:
    """Return whether one fix replaces the other, or takes away what the other needs."""
    if one.alternatives and one.alternatives == other.alternatives:
        return True
    pairs = ((one, other), (other, one))
    return any(breaker.breaks and breaker.breaks == own.needs for breaker, own in pairs)
