"""A Comparison: the differences between two runs, as plain data with a versioned schema."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from advisor.core.report import limit_lines, render
from advisor.core.report_file import decode_json, encode_json

SCHEMA = "advisor.comparison/2"

Verdict = Literal["slower", "faster", "no difference", "not measured"]
Change = Literal[
    "fixed", "replaced", "new", "remaining", "unchecked", "unchecked before", "only before",
    "only after", "in both",
]  # fmt: skip
GateAnswer = Literal["passed", "not shown", "regression"]


class Side(Struct, kw_only=True):
    """Side of a comparison: a run and its recording."""

    path: str
    """Path or name of the run, as given."""
    rank: int | None
    """Number of the compared rank, or ``null`` if unknown."""
    window: int
    """Number of the compared window."""
    ranks: int
    """Number of ranks."""
    status: str
    """Status of the run's report."""
    verdict: str
    """Verdict of the run's report, one sentence."""
    device_name: str | None
    """Model of the GPU, or ``null`` if it is unknown or did no work."""
    on_cpu: bool = False
    """Whether operators were recorded and no GPU work."""
    step_source: str
    """Source of the steps, as in a report's ``scope``."""
    steps_used: int
    """Number of measured profiled steps."""
    step_ns: float
    """Mean duration of the measured steps, ns."""
    record_shapes: bool | None
    """Whether input shapes were recorded, or ``null`` if unknown."""
    with_stack: bool | None
    """Whether Python stacks were recorded, which slow the host, or ``null`` if unknown."""
    profile_memory: bool | None
    """Whether memory events were recorded, or ``null`` if unknown."""
    truncated: bool
    """Whether the file ends early."""
    samples: int | None = None
    """Batch size in most of the recorder's steps, gradient accumulation included, or ``null`` if
    not recorded."""
    other_programs_ns: float | None = None
    """Time of the mean step in which other programs had the main thread's cores, as in a report's
    ``recorded``, ns, or ``null`` if not sampled."""
    crash: str = ""
    """Sentence about the ranks that an exception ended. Empty if none is recorded."""
    framework: str | None = None
    """Framework of the program, as in a report's ``scope``, or ``null`` if unknown."""


class Distribution(Struct, kw_only=True):
    """Distribution of step durations."""

    count: int
    """Number of steps."""
    mean_ns: float
    """Mean duration, ns."""
    median_ns: float
    """Median duration, ns."""
    p10_ns: float
    """10th percentile of the durations, ns."""
    p90_ns: float
    """90th percentile of the durations, ns."""
    min_ns: float
    """Shortest duration, ns."""
    max_ns: float
    """Longest duration, ns."""
    autocorrelation: float | None
    """Correlation of neighbouring steps, or ``null`` if fewer than three steps or all are equal."""
    durations_ns: list[int]
    """Durations in order, ns: at most 2,000, evenly chosen."""
    runs: int = 1
    """Number of runs that the steps come from."""


class StepTimeChange(Struct, kw_only=True):
    """Step times before and after, and the difference with its confidence interval."""

    verdict: Verdict
    """Verdict. ``slower`` or ``faster``: the interval of the difference excludes 0. ``no
    difference``: it includes 0. ``not measured``: see ``reason``."""
    source: str
    """Source of the steps. ``recorder``: unprofiled steps, from boundary to boundary on the host,
    or on the device where the host runs ahead of it. ``trace``: the profiled steps of the window.
    Empty if there are neither."""
    before: Distribution | None = None
    """Step durations before, or ``null`` without steps."""
    after: Distribution | None = None
    """Step durations after, or ``null`` without steps."""
    statistic: str = ""
    """Compared statistic: ``mean`` or ``median``."""
    method: str = ""
    """Method that computed the interval."""
    paired: bool = False
    """Whether steps of the same number are compared with each other."""
    between_runs: bool = False
    """Whether the interval comes from how far runs of a side differ, as steps show less."""
    level: float = 0.95
    """Confidence level of the interval."""
    difference_ns: float | None = None
    """Step time after minus before, ns, or ``null`` if not measured."""
    low_ns: float | None = None
    """Lower end of the difference's interval, ns."""
    high_ns: float | None = None
    """Upper end of the difference's interval, ns."""
    share: float | None = None
    """Difference as a share of the step time before: 0.1 is 10% slower."""
    share_low: float | None = None
    """Lower end of the interval, as a share of the step time before."""
    share_high: float | None = None
    """Upper end of the interval, as a share of the step time before."""
    reason: str = ""
    """Reason why there is no verdict. Empty if there is one."""
    notes: list[str] = field(default_factory=list)
    """Caveats on what the figures show, one sentence each."""

    def centers(self) -> list[float | None]:
        """Return the compared statistic before and after, ns, or ``None`` without steps."""
        name = f"{self.statistic or 'median'}_ns"
        return [getattr(side, name, None) for side in (self.before, self.after)]


class Amount(Struct, kw_only=True):
    """A figure on both sides."""

    group: str
    """Group: ``time`` (exclusive device time), ``idle`` (by cause), ``host``, ``kernels`` (by
    family). For snapshots, at the peak: ``memory`` and ``memory by line``. For a served model:
    ``phases`` and ``parts`` of a layer. By kind of module, largest change first: ``layers`` (own
    time) and ``memory by layer`` (kept). Else ``figures``."""
    name: str
    """Name of the class, cause, family or other quantity."""
    unit: str
    """Unit: ``ns`` (per step), ``share`` (0 to 1), ``bytes``, ``count``, ``J``, or a currency."""
    before: float | None
    """Value before, or ``null`` if not measured."""
    after: float | None
    """Value after, or ``null`` if not measured."""
    outside_operators: bool = False
    """Whether idle time of an ``unknown`` cause is in code outside operators, in all runs that have
    it."""


class FindingChange(Struct, kw_only=True):
    """A finding, and whether it is new, fixed, remaining or replaced."""

    change: Change
    """Change: ``fixed`` if the rule ran and no longer finds it. ``replaced`` if, in addition, what
    does the work now takes longer. ``unchecked`` if the rule could not check again. ``unchecked
    before`` if it is there now, and could not be checked before. ``only before``, ``only after`` or
    ``in both`` if the two are not comparable, so that neither is a fix of the other."""
    rule: str
    """Identifier of the rule."""
    title: str
    """Title of the problem that is, or was, found."""
    category: str
    """Category of the rule."""
    place: str
    """Place where the problem is worst. Empty if unknown."""
    same_place: bool | None
    """Whether a ``remaining`` finding is at the same place, or ``null`` if a place is unknown."""
    before_priority: int | None = None
    """Priority of the finding before, or ``null`` if absent or not ranked."""
    after_priority: int | None = None
    """Priority of the finding after, or ``null`` if absent or not ranked."""
    before_gain_ns: int | None = None
    """Gain of its fix alone before, ns per step, or ``null`` if absent or without gain in step
    time."""
    after_gain_ns: int | None = None
    """Gain of its fix alone after, ns per step, or ``null`` if absent or without gain in step
    time."""
    reason: str = ""
    """Reason why it is unchecked or, for ``remaining``, why one report does not list it."""


class RealisedGain(Struct, kw_only=True):
    """Predicted saving of the fixes, compared with the measured saving."""

    rules: list[str]
    """Rules of the findings that were fixed and had an estimated gain."""
    predicted_ns: float | None = None
    """Predicted saving, ns per step: all changes replayed together on the run before."""
    predicted_low_ns: float | None = None
    """Lower end of the predicted range, ns per step."""
    predicted_high_ns: float | None = None
    """Upper end of the predicted range, ns per step."""
    method: str = ""
    """Method of the prediction: ``replay``, or an upper bound."""
    measured_ns: float | None = None
    """Measured saving, ns per step: step time before minus after."""
    measured_low_ns: float | None = None
    """Lower end of the measured saving's interval, ns per step."""
    measured_high_ns: float | None = None
    """Upper end of the measured saving's interval, ns per step."""
    agrees: bool | None = None
    """Whether the interval and the range overlap, or the two differ by at most a tenth. For an
    upper bound: whether the saving may be within it. ``null`` if not compared, or if both fit
    and the interval includes 0."""
    reason: str = ""
    """Reason why the two are not compared."""


class ComparedWork(Struct, kw_only=True):
    """Device work of one operator on inputs of one shape, or of one kernel, per step. Names are
    matched in full and shortened to 300 characters."""

    op: str | None
    """Innermost operator around the launch, or ``null`` if unknown."""
    shape: str | None
    """Dimensions of its inputs as JSON, cut in the middle when longer than 1,000 characters;
    ``null`` if not compared by shape."""
    before_ns: float
    """Summed durations before, ns per step."""
    after_ns: float
    """Summed durations after, ns per step."""
    before_count: float
    """Number of device events per step before."""
    after_count: float
    """Number of device events per step after."""
    before_kernels: list[str]
    """Names of the kernels before, longest-running first, at most three."""
    after_kernels: list[str]
    """Names of the kernels after, longest-running first, at most three. They differ on another
    GPU."""


class Bounds(Struct, frozen=True, kw_only=True):
    """Bounds within which a run may differ from its baseline."""

    slower: float = 0.05
    """Largest allowed slowdown, as a share of the baseline's step time."""
    memory: float | None = None
    """Largest allowed growth of the memory peak, as a share, or ``null`` if not checked."""
    strict: bool = False
    """Whether a step time that is not shown to be within its bound also fails."""


class Decision(Struct, frozen=True, kw_only=True):
    """Decision of a gate: whether the run is slower than its bounds allow."""

    answer: GateAnswer
    """Answer: ``passed`` if the whole interval is within the bound. ``regression`` if all of it, or
    the memory peak, is above. ``not shown`` if it extends to both sides."""
    failed: bool
    """Whether the gate fails, with exit code 1."""
    reasons: list[str]
    """Reasons for the decision, one sentence for each bound."""
    bounds: Bounds
    """Bounds that were applied."""
    detectable: float
    """Smallest slowdown that these steps would show as a regression, as a share of the baseline."""


class Comparison(Struct, kw_only=True):
    """Comparison of two runs. ``to_dict`` has the schema ``SCHEMA``."""

    schema: str = SCHEMA
    """Name and number of this schema."""
    version: str = ""
    """Version of advisor."""
    verdict: str
    """Verdict of the comparison, one sentence."""
    before: Side
    """Run that is the reference."""
    after: Side
    """Run that is compared with it."""
    same_device: bool | None
    """Whether both ran on the same GPU model, or ``null`` if unknown."""
    steps: StepTimeChange
    """Step times and their difference."""
    amounts: list[Amount] = field(default_factory=list)
    """Figures of the breakdown, side by side."""
    findings: list[FindingChange] = field(default_factory=list)
    """Findings of either run, and what became of them."""
    realised: RealisedGain
    """Predicted and measured saving of the fixes."""
    work: list[ComparedWork] = field(default_factory=list)
    """Device work by operator and shape, largest difference first; at most 500."""
    work_rest: ComparedWork | None = None
    """Sum of the device work that ``work`` omits, or ``null`` if it omits none."""
    matched: float | None = None
    """Share of both sides' device time in operators and shapes that both have, or ``null`` without
    device time."""
    other_programs: str = ""
    """Reason why the two look like different programs, without a full stop. Empty if they do
    not."""
    other_shapes: bool = False
    """Whether only the input shapes differ: ``work`` is then by operator alone."""
    kernels: list[ComparedWork] = field(default_factory=list)
    """Device work by kernel name, ordered like ``work``. Empty if the GPUs, and so the kernels,
    differ."""
    kernels_rest: ComparedWork | None = None
    """Sum of the device work that ``kernels`` omits, or ``null`` if it omits none."""
    limits: list[str] = field(default_factory=list)
    """Reasons why the two are hard to compare, one sentence each."""
    decision: Decision | None = None
    """Decision of a gate, or ``null`` if no bounds were given."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts and lists, as in the JSON."""
        result: dict[str, Any] = msgspec.to_builtins(self)
        return result

    def to_json(self) -> bytes:
        """Return the JSON text, indented by two."""
        return encode_json(self)

    @classmethod
    def from_json(cls, text: bytes | str) -> Comparison:
        """Read what :meth:`to_json` wrote. Raises AdvisorError for anything else."""
        return decode_json(text, cls, "comparison", SCHEMA)

    def __repr__(self) -> str:
        """Return the verdict in one line."""
        from advisor.core.labels import clean, shorten

        return f"<Comparison: {shorten(clean(self.verdict), 180)}>"

    def __str__(self) -> str:
        """Return what ``advisor compare`` prints on a terminal of 80 columns."""
        return limit_lines(render(self, "COMPARISONS", "terminal"), "to_dict() has all")

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows."""
        return render(self, "COMPARISONS", "notebook")

    def findings_with(self, *changes: Change) -> list[FindingChange]:
        """Return the findings with one of these changes, largest gain first."""
        return [item for item in self.findings if item.change in changes]

    def find_amount(self, name: str) -> Amount | None:
        """Return one of the ``figures`` by name, or ``None`` if neither side measured it."""
        figures = (item for item in self.amounts if item.group == "figures")
        return next((item for item in figures if item.name == name), None)
