"""A Comparison: the differences between two runs, as plain data with a versioned schema."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from advisor.core.report import limit_lines, render
from advisor.core.report_file import decode_json, encode_json

SCHEMA = "advisor.comparison/2"

Verdict = Literal["slower", "faster", "no difference", "not measured"]
Change = Literal["fixed", "replaced", "new", "remaining", "unchecked", "unchecked before"]
GateAnswer = Literal["passed", "not shown", "regression"]


MIN_MATCHED, MIN_MATCHED_RENAMED = 0.2, 0.3
"""Share of time in work of both runs, below which they are different programs: of any, and where
their files have different names."""


class Side(Struct, kw_only=True):
    """Side of a comparison: a run and its recording."""

    path: str
    """Path or name of the run, as given."""
    rank: int | None
    """Number of the compared rank; ``null``: unknown."""
    window: int
    """Number of the rank's window that is compared."""
    ranks: int
    """Number of ranks."""
    status: str
    """Status of its report."""
    verdict: str
    """Verdict of its report, one sentence."""
    device_name: str | None
    """Model of the GPU; ``null``: unknown, or no device work."""
    step_source: str
    """Source of the steps, as in a report's ``scope``."""
    steps_used: int
    """Number of profiled steps that are measured."""
    step_ns: float
    """Mean duration of those steps, ns."""
    record_shapes: bool | None
    """Whether input shapes were recorded; ``null``: unknown."""
    with_stack: bool | None
    """Whether Python stacks were recorded, which slow the host; ``null``: unknown."""
    profile_memory: bool | None
    """Whether memory events were recorded; ``null``: unknown."""
    truncated: bool
    """Whether the file ends early."""
    samples: int | None = None
    """Batch size in most of the recorder's steps, gradient accumulation included; ``null``: not
    recorded."""
    crash: str = ""
    """Ranks that an exception ended, in a sentence; empty: none is recorded."""
    framework: str | None = None
    """Framework of the program, as in a report's ``scope``; ``null``: unknown."""


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
    """Correlation of neighbouring steps; ``null``: fewer than three steps, or all equal."""
    durations_ns: list[int]
    """Durations in order, ns; at most 2,000, evenly chosen."""
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
    Empty: neither."""
    before: Distribution | None = None
    """Step durations before; ``null``: no steps."""
    after: Distribution | None = None
    """Step durations after; ``null``: no steps."""
    statistic: str = ""
    """Statistic that is compared: ``mean`` or ``median``."""
    method: str = ""
    """Method that computed the interval."""
    paired: bool = False
    """Whether steps of the same number are compared with each other."""
    level: float = 0.95
    """Confidence level of the interval."""
    difference_ns: float | None = None
    """Step time after minus before, ns; ``null``: not measured."""
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
    """Reason why there is no verdict; empty: there is one."""
    notes: list[str] = field(default_factory=list)
    """Caveats on what the figures show, one sentence each."""

    def centers(self) -> list[float | None]:
        """Return the compared statistic before and after, ns; ``None``: no steps."""
        name = f"{self.statistic or 'median'}_ns"
        return [getattr(side, name, None) for side in (self.before, self.after)]


class Amount(Struct, kw_only=True):
    """A figure on both sides."""

    group: str
    """``time`` (exclusive device time), ``idle`` (by cause), ``host``, ``kernels`` (by family). Of
    snapshots, at the peak: ``memory`` and ``memory by line``. Of a model that is served:
    ``phases`` and ``parts`` of a layer. By kind of module, what changed most first: ``layers``
    (own time) and ``memory by layer`` (kept). Else ``figures``."""
    name: str
    """Name of the class, cause, family or other quantity."""
    unit: str
    """Unit: ``ns`` (per step), ``share`` (0 to 1), ``bytes``, ``count``, ``J``, or a currency."""
    before: float | None
    """Value before; ``null``: not measured."""
    after: float | None
    """Value after; ``null``: not measured."""
    outside_operators: bool = False
    """Whether idle time of an ``unknown`` cause is of code outside operators, in all runs that have
    it."""


class FindingChange(Struct, kw_only=True):
    """A finding, and whether it is new, fixed, remaining or replaced."""

    change: Change
    """``fixed``: the rule ran and no longer finds it. ``replaced``: so too, but what does the work
    now takes longer. ``unchecked``: the rule could not check
    again. ``unchecked before``: it is there now, and could not be checked before."""
    rule: str
    """Identifier of the rule."""
    title: str
    """Title of the problem that is, or was, found."""
    category: str
    """Category of the rule."""
    place: str
    """Place where the problem is worst; empty: unknown."""
    same_place: bool | None
    """Whether a ``remaining`` finding is at the same place; ``null``: a place is unknown."""
    before_priority: int | None = None
    """Priority of the finding before; ``null``: not there, or not ranked."""
    after_priority: int | None = None
    """Priority of the finding after; ``null``: not there, or not ranked."""
    before_gain_ns: int | None = None
    """Gain of its fix alone before, ns per step; ``null``: not there, or no gain in step time."""
    after_gain_ns: int | None = None
    """Gain of its fix alone after, ns per step; ``null``: not there, or no gain in step time."""
    reason: str = ""
    """Reason why it is unchecked; for ``remaining``, why one report does not list it."""


class RealisedGain(Struct, kw_only=True):
    """Predicted saving of the fixes, compared with the measured one."""

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
    """Whether the interval and the range overlap, or the two differ by a tenth at most. For an
    upper bound: whether the saving may be within it. ``null``: not compared."""
    reason: str = ""
    """Reason why the two are not compared."""


class ComparedWork(Struct, kw_only=True):
    """Device work of one operator on inputs of one shape, or of one kernel, per step. Names are
    matched in full and shortened to 300 characters."""

    op: str | None
    """Innermost operator around the launch; ``null``: unknown."""
    shape: str | None
    """Dimensions of its inputs as JSON, cut in the middle when longer than 1,000 characters;
    ``null``: not compared by shape."""
    before_ns: float
    """Summed durations before, ns per step."""
    after_ns: float
    """Summed durations after, ns per step."""
    before_count: float
    """Number of device events before, per step; 0: none."""
    after_count: float
    """Number of device events after, per step; 0: none."""
    before_kernels: list[str]
    """Names of the kernels before, the longest-running first; at most three."""
    after_kernels: list[str]
    """Names of the kernels after, likewise; on another GPU they differ."""


class Bounds(Struct, frozen=True, kw_only=True):
    """Bounds within which a run may differ from its baseline."""

    slower: float = 0.05
    """Largest allowed slowdown, as a share of the baseline's step time."""
    memory: float | None = None
    """Largest allowed growth of the memory peak, as a share; ``null``: not checked."""
    strict: bool = False
    """Whether a step that is not shown to be within its bound fails too."""


class Decision(Struct, frozen=True, kw_only=True):
    """Decision of a gate: whether the run is slower than its bounds allow."""

    answer: GateAnswer
    """``passed``: the whole interval is within the bound. ``regression``: all of it is above, or
    the memory peak is. ``not shown``: it reaches to both sides."""
    failed: bool
    """Whether the gate fails, with exit code 1."""
    reasons: list[str]
    """Reasons for the decision, one sentence for each bound."""
    bounds: Bounds
    """Bounds that were applied."""
    detectable: float
    """Smallest slowdown that these steps would show as a regression, as a share of before."""


class Comparison(Struct, kw_only=True):
    """Two runs side by side. ``to_dict`` has the schema ``SCHEMA``."""

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
    """Whether both ran on the same GPU model; ``null``: unknown."""
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
    """Sum of the device work that ``work`` leaves out; ``null``: none."""
    matched: float | None = None
    """Share of both sides' device time in operators and shapes that both have; ``null``: none."""
    other_programs: str = ""
    """Reason why the reports look like those of different programs, without a full stop; empty:
    they do not. Where ``matched`` is known, that decides."""
    other_shapes: bool = False
    """Whether only the input shapes differ: ``work`` is then by operator alone."""
    kernels: list[ComparedWork] = field(default_factory=list)
    """Device work by kernel name, likewise; empty if the GPUs differ, as their kernels do."""
    kernels_rest: ComparedWork | None = None
    """Sum of the device work that ``kernels`` leaves out; ``null``: none."""
    limits: list[str] = field(default_factory=list)
    """Reasons why the two are hard to compare, one sentence each."""
    decision: Decision | None = None
    """Decision of a gate; ``null``: no bounds were given."""

    @property
    def is_of_other_programs(self) -> bool:
        """Whether the work of the two has next to nothing in common."""
        if self.matched is None:
            return bool(self.other_programs)
        return self.matched < MIN_MATCHED and not self.other_shapes

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
        """Return one of the ``figures`` by name; ``None`` if neither side measured it."""
        figures = (item for item in self.amounts if item.group == "figures")
        return next((item for item in figures if item.name == name), None)
