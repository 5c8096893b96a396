"""Finding, Edit, Impact and the other vocabulary of advice. Every folder may import it."""

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
Currency = Literal["step_time", "run_time", "memory", "risk", "unpriced"]
Validation = Literal["real traces", "recordings", "synthetic"]
RangeCause = Literal[
    "", "assumption", "faster host", "slower host", "hand-over", "replay error", "shared cores",
    "past", "not proven", "device work", "late launches",
]  # fmt: skip
"""Cause of an end of a gain's range: the finding's own assumption; a host that is faster
without the profiler; one that is slower than expected, as while it is profiled; taking results over
from other processes; the error of the replay; past estimates of the kind, and how far off they
were; the worst of them, where a rule is not proven; the device work that the fix leaves; launches
that are late with the fix too. Empty: nothing."""
StepProperty = Literal["", "sizes repeat"]
"""Property of a step. ``sizes repeat``: every step launches the same kernels on the same sizes."""
Instants = Literal[
    "", "step_start", "graph_break", "between_steps", "read_loop", "after_read", "round_trip",
    "recompute", "second_forward", "repeated_backward", "rebuilt_weights", "unused_gradient",
    "new_shape", "graph_entry", "without_gradient", "loop",
]  # fmt: skip
"""Contexts that ``Select.at`` names; its docstring says what each is."""
Operation = Literal[
    "remove", "scale", "roofline", "overlap", "make_async", "merge", "drop_launch", "parallelize",
    "resize", "remove_skew",
]  # fmt: skip


GUESSED_STEP_SOURCES = ("device sequence", "repeating ranges")
"""``Steps.source`` of steps that nothing marks: what repeats may be part of an iteration."""

LAYER_TIMES = "layer times"
"""``Steps.source`` of one inference that is known by the times of its layers alone: their sum."""


def unit_of(step_source: str) -> Per:
    """Return the unit that figures are of, by the source of their steps (``Scope.step_source``)."""
    if step_source in GUESSED_STEP_SOURCES:
        return "repetition"
    if step_source == LAYER_TIMES:
        return "inference"
    return "recording" if step_source == "whole trace" else "step"


class Select(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Selection of the events that an :class:`Edit` touches: every field that is given must match.

    Selectors name events by what they are, never by row number. So a person can write an Edit,
    store it, and apply it to another window of the same job."""

    on: Literal["gpu", "host", "gap"]
    """Device work, host events (ops, Python frames, runtime calls), or idle gaps of the device."""
    kind: tuple[str, ...] = ()
    """``gpu``: kernel, memcpy, memset. ``host``: op, annotation, python, runtime."""
    name: str = ""
    """Regular expression searched in the event's own name."""
    under: str = ""
    """Regular expression searched in the names of the host events around it. For device work
    these are around its launch; for a gap it is the event that is blamed."""
    layer: str = ""
    """Module whose device work is selected, with that of the modules in it. It is given by its
    name, its kind or its path, with ``*`` and ``?`` as in file names. Without other fields,
    ``remove`` and ``scale`` change its host time too."""
    family: tuple[str, ...] = ()
    """Kernel families, as in ``Analysis.kernels`` (``gemm``, ``softmax``, ``communication`` …).
    ``communication`` in a trace without a device: gloo's collectives, and the waits for them."""
    copy: tuple[str, ...] = ()
    """Copy directions: HtoD, DtoH, DtoD, PtoP, HtoH; of host calls, those that copy so or wait for
    such a copy."""
    memory: Literal["", "pageable", "pinned"] = ""
    """Host side of a copy."""
    call: tuple[str, ...] = ()
    """Runtime call classes, as in the ``call`` column of ``Trace.cpu``."""
    cause: tuple[str, ...] = ()
    """Idle-gap causes, as in ``Analysis.gaps``."""
    at: Instants = ""
    """Context. ``host``: ``loop``, also the thread's time from one of the events to the next, if no
    other operator or call lies between. That is the Python of a loop. All others name instants:
    gaps count that meet them, host events that begin in them, device work that is launched in them.
    ``step_start``: before the first device work of their step. ``graph_break``: from one compiled
    graph to the next across a break. ``graph_entry``: in functions whose graph breaks, outside the
    code of their graphs. ``between_steps``: from the end of an inference engine's step to the first
    work of the next. ``read_loop``: in a loop that reads one device value after the other.
    ``after_read``: from the end of a read of data to the next launch. ``round_trip``: from a copy
    to the host to the end of the copy back. ``recompute``: while the backward pass recomputes
    activations. ``second_forward``: in layers that repeat those of the trained forward pass.
    ``repeated_backward``: in nodes of the autograd graph that run again.
    ``rebuilt_weights``: while weights that nothing trains are cast or normalised.
    ``unused_gradient``: while gradients are computed of parameters that no optimizer holds.
    ``new_shape``: while an operator prepares for an input shape that comes for the first time.
    ``without_gradient``: in runs of operators without gradient around a read of a size, inside a
    trained forward pass."""
    region: tuple[str, ...] = ()
    """Compiled functions, by number (``1`` of ``Torch-Compiled Region: 1/0``), into which a break
    must lead to be selected; for ``graph_break``."""
    stream: tuple[int, ...] = ()
    """CUDA streams of the events."""
    max_ns: int | None = None
    """Largest duration of the events, ns."""
    max_bytes: int | None = None
    """Largest message of the collectives, bytes."""
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
    factor_low: float | None = None
    """Factor under the optimistic assumption (larger gain)."""
    factor_high: float | None = None
    """Factor under the pessimistic assumption (smaller gain). ``overlap``: share of what it saves
    that it then does not."""
    workers: int | None = None
    """Number of workers that share the host work (``parallelize``)."""
    host_ns: int | None = None
    """Host time that remains for each launch, ns (``drop_launch``)."""
    ahead: bool = False
    """Whether an ``overlap`` is also issued earlier. So it is done when the host waits for the
    whole device, as far as the work beside it lasts. Not under the pessimistic assumption."""
    rank: int | None = None
    """Rank that alone is changed where several are replayed together; ``None``: each in the same
    way, because a change to a program is a change on all ranks. ``remove_skew`` needs it."""


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
    """Words for the method of the estimate: ``upper bound (exposed time)``, ``replay``."""
    kind: GainKind = ""
    """Kind of the method: the gain is replayed, recorded time, or a bound. Empty: no time."""
    reason: str = ""
    """Reason why there is no figure (``unpriced`` and ``risk``)."""
    per: Per | None = None
    """Unit that the gain is of; ``null``: the step, or the run, by the currency."""
    most_ns: int | None = None
    """Time that the fix's edits touch, ns: an upper bound of the range. ``null``: not limited."""
    low_by: RangeCause = ""
    """Cause that decides the lower end."""
    high_by: RangeCause = ""
    """Cause that decides the upper end."""
    of_run: bool = False
    """Whether the gain is of the run's own step, by its record, and not of a profiled one."""
    of_job: bool = False
    """Whether the gain is the job's: what other ranks save and wait is in it."""

    def __post_init__(self) -> None:
        """Set the kind where it is not given, as in reports of earlier versions."""
        if not self.kind and self.gain_ns is not None:
            kinds: tuple[GainKind, ...] = ("replay", "upper bound", "lower bound")
            known = (kind for kind in kinds if self.method.startswith(kind))
            force_setattr(self, "kind", next(known, "recorded"))

    @property
    def unit(self) -> Per:
        """Unit that the gain is of: ``per`` if it is given, else the step or the run."""
        if self.per is not None:
            return self.per
        return "step" if self.currency == "step_time" else "run"


def impact_without_gain(reason: str) -> Impact:
    """Return an impact without a figure, and the reason for it."""
    return Impact(currency="unpriced", reason=reason)


def impact_risk(reason: str) -> Impact:
    """Return a risk, without a figure; ``reason`` says what may happen."""
    return Impact(currency="risk", reason=reason)


def impact_memory(size: int, method: str) -> Impact:
    """Return GPU memory that a fix frees, bytes, as an impact."""
    return Impact(currency="memory", freed_bytes=size, method=method)


class Location(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Place where it happens: a line of the user's code if there are stacks, else op and kernel."""

    file: str | None = None
    """Source file."""
    line: int | None = None
    """Line in ``file``."""
    function: str | None = None
    """Function around the line."""
    sampled_share: float | None = None
    """Share of stack samples by which alone the line is known, which is the line's share of the
    operator in the step; ``null``: the line was recorded."""
    layer: str | None = None
    """Modules of the model: ``48 RMSNorm in layers.0–23``."""
    around_layer: bool = False
    """Whether the line is of code around the model: the layer then says more."""
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
    """Name of what is counted, such as ``gap`` (between device work); else calls, or kernels."""


HOST_CODE: Final = "host code"
"""Subject of findings on all code of a place, whatever it does: what other fixes save of the host's
time may be the same time."""


class Finding(Struct, frozen=True, kw_only=True):
    """A detected bottleneck: evidence, fix, and the Edit that says what the fix changes. What its
    rule says of all findings need not be given: the engine fills it in (``Rule.complete``). It
    never changes: each stage returns a new one (``msgspec.structs.replace``)."""

    rule: str = ""
    """Identifier of the rule."""
    title: str = ""
    """Title: what is wrong, in a line."""
    summary: str
    """Summary in one or two sentences: what was measured and why it costs time."""
    fix: str = ""
    """Advice: what to do."""
    code: str = ""
    """The fix as a snippet the user can paste."""
    verify: str = ""
    """Way to see that the fix worked."""
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
    moved_ns: float | None = None
    """Host time per step that the fix moves to other processes, ns. With N of them the step takes
    at least an Nth of it. ``{workers}`` in the texts becomes how many keep up."""
    alternatives: str = ""
    """Name of the group of findings of which one fix replaces the others (for example ``fuse``)."""
    needs: StepProperty = ""
    """Property of the step that the fix needs."""
    breaks: StepProperty = ""
    """Property that the step loses with the fix: it excludes fixes that need it."""
    impact: Impact | None = None
    """Impact that the rule itself estimates (memory, risk); the engine estimates step time."""
    informational: bool = False
    """Whether it is shown among the notes, never ranked, never counted as a bottleneck."""
    known_cost: bool = False
    """Whether it slows every step for certain, by more than is recorded: ranked even without a
    gain, and a gain is a lower bound."""
    # filled in by the engine
    category: str = ""
    """Category of the rule."""
    subject: str = ""
    """Work that it is about, where several rules look at that: ``attention``."""
    severity: Severity = "info"
    """Severity, by the share of the step that the fix saves."""
    priority: int | None = None
    """Place in the order of fixes, from 1; ``null``: not ranked."""
    marginal_gain_ns: int | None = None
    """Time that the fix still saves per step after the findings ranked before it are fixed, ns.
    ``impact`` is what it saves alone."""
    marginal_low_ns: int | None = None
    """Lower end of the range of ``marginal_gain_ns``, ns."""
    marginal_high_ns: int | None = None
    """Upper end of the range of ``marginal_gain_ns``, ns."""
    marginal_low_by: RangeCause = ""
    """Cause that decides that lower end, as in ``impact.low_by``."""
    marginal_high_by: RangeCause = ""
    """Cause that decides that upper end."""
    pays_after: str | None = None
    """Rule id of the finding that must be fixed first for this one to pay."""
    folded_under: str | None = None
    """Rule id of the finding that already explains this one."""
    other_rank: bool = False
    """Whether it was found on another rank than the one reported; its gain is that rank's."""
    validation: str = ""
    """Level of validation of the rule: ``real traces``, ``recordings`` or ``synthetic``."""
    references: Sequence[str] = field(default_factory=list)
    """References: where to read more."""
    device: int | None = None
    """GPU on which it was found."""
    trace_rank: int | None = None
    """Rank on which it was found."""

    @property
    def share_of_step(self) -> float:
        """Share of the step that the fix gains; 0: unknown."""
        return (self.impact.share or 0.0) if self.impact is not None else 0.0

    @property
    def shown_time(self) -> Evidence | None:
        """Time that the finding is about, from its evidence; ``None``: the evidence has none."""
        timed = (e for e in self.evidence if e.unit == "ns" and e.per is not None and e.value)
        return next(timed, None)


MissingData = Literal["no stacks", "other load on the CPUs", "GPU unknown", "no shapes", ""]
"""Names of data that the first advice may depend on, the most important first."""


class SkippedCheck(Struct, frozen=True, kw_only=True):
    """A check that a rule skipped: what it could not check, why, and what to record to allow it."""

    what: str
    """Name of the check."""
    why: str
    """Data that was missing."""
    record: str = ""
    """Recording option that would allow it (``record_shapes=True`` …)."""
    rule: str = ""
    """Rules that abstained."""
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
    """Rule that looked."""


Outcome = Finding | SkippedCheck | PassedCheck
Outcomes = Iterator[Outcome]
"""Results that ``Rule.check`` yields."""


class HotLine(Struct, frozen=True, kw_only=True):
    """A line of Python that takes much CPU time, from Scalene's pass. Shares are of all CPU samples
    of that pass, start-up included: they compare lines, not steps."""

    file: str
    """Source file."""
    line: int
    """Line in ``file``."""
    text: str
    """Text of the line."""
    function: str | None
    """Function around the line; ``null``: none."""
    share: float
    """Share of the line in all samples."""
    python: float
    """Part of ``share`` that is in the interpreter."""
    native: float
    """Part of ``share`` that is in native code which the line called."""
    system: float
    """Part of ``share`` that is in the kernel, or waiting."""


def are_alternatives(one: Finding, other: Finding) -> bool:
    """Return whether one fix replaces the other, or takes away what the other needs."""
    if one.alternatives and one.alternatives == other.alternatives:
        return True
    pairs = ((one, other), (other, one))
    return any(breaker.breaks and breaker.breaks == own.needs for breaker, own in pairs)
