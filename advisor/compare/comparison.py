"""A Comparison: what differs between two runs, as plain data with a versioned schema."""

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


MIN_MATCHED = 0.2
"""Share of the device time in work that both have, below which they are different programs."""


class Side(Struct, kw_only=True):
    """One of the two runs."""

    path: str
    """As it was given."""
    rank: int | None
    """The rank that is compared; ``null``: unknown."""
    window: int
    """Which recording of the rank."""
    ranks: int
    """How many ranks there are."""
    status: str
    """Of its report."""
    verdict: str
    """Of its report: one sentence."""
    device_name: str | None
    """GPU; ``null``: unknown, or no device work."""
    step_source: str
    """What a step was taken to be."""
    steps_used: int
    """Profiled steps that are measured."""
    step_ns: float
    """Their mean duration, ns."""
    record_shapes: bool | None
    """Recorded with shapes; ``null``: unknown."""
    with_stack: bool | None
    """Recorded with Python stacks, which slow the host; ``null``: unknown."""
    profile_memory: bool | None
    """Recorded with memory events; ``null``: unknown."""
    truncated: bool
    """The file ends early."""
    samples: int | None = None
    """Batch size in most of the recorder's steps, gradient accumulation included; ``null``: not
    recorded."""
    crash: str = ""
    """Which ranks an exception ended, in a sentence; empty: none that is recorded."""
    framework: str | None = None
    """What the program is written with, as in a report's ``scope``; ``null``: unknown."""


class Distribution(Struct, kw_only=True):
    """Durations of steps."""

    count: int
    """Steps."""
    mean_ns: float
    """ns."""
    median_ns: float
    """ns."""
    p10_ns: float
    """A tenth of the steps are shorter, ns."""
    p90_ns: float
    """A tenth of the steps are longer, ns."""
    min_ns: float
    """The shortest, ns."""
    max_ns: float
    """The longest, ns."""
    autocorrelation: float | None
    """Correlation of neighbouring steps; ``null``: fewer than three, or all equal."""
    durations_ns: list[int]
    """The durations, in order; at most 2,000, evenly chosen."""
    runs: int = 1
    """Runs that the steps come from."""


class StepTimeChange(Struct, kw_only=True):
    """How long steps take before and after, and how far that differs."""

    verdict: Verdict
    """``slower`` or ``faster``: the interval of the difference excludes 0. ``no difference``: it
    includes 0. ``not measured``: see ``reason``."""
    source: str
    """``recorder``: unprofiled steps, from boundary to boundary on the host, or on the device
    where the host runs ahead of it. ``trace``: the profiled
    steps of the window. Empty: neither."""
    before: Distribution | None = None
    """``null``: no steps."""
    after: Distribution | None = None
    """``null``: no steps."""
    statistic: str = ""
    """What is compared: ``mean`` or ``median``."""
    method: str = ""
    """How the interval was computed."""
    paired: bool = False
    """Steps of the same number are compared with each other."""
    level: float = 0.95
    """Of the interval."""
    difference_ns: float | None = None
    """After minus before, ns; ``null``: not measured."""
    low_ns: float | None = None
    """Lower end of its interval, ns."""
    high_ns: float | None = None
    """Upper end, ns."""
    share: float | None = None
    """The difference as a share of before: 0.1 is 10% slower."""
    share_low: float | None = None
    """Lower end."""
    share_high: float | None = None
    """Upper end."""
    reason: str = ""
    """Why there is no verdict."""
    notes: list[str] = field(default_factory=list)
    """What the figures do not show, one sentence each."""


class Amount(Struct, kw_only=True):
    """One figure on both sides."""

    group: str
    """``time`` (exclusive device time), ``idle`` (by cause), ``host``, ``kernels`` (by family). Of
    snapshots, at the peak: ``memory`` and ``memory by line``. Of a model that is served:
    ``phases`` and ``parts`` of a layer. By kind of module, what changed most first: ``layers``
    (own time) and ``memory by layer`` (kept). Else ``figures``."""
    name: str
    """Class, cause, family, or what is measured."""
    unit: str
    """``ns`` (per step), ``share`` (0 to 1), ``bytes``, ``count``, ``J``, or a currency."""
    before: float | None
    """``null``: not measured."""
    after: float | None
    """``null``: not measured."""


class FindingChange(Struct, kw_only=True):
    """A finding and whether it is new, fixed, kept or replaced."""

    change: Change
    """``fixed``: the rule ran and no longer finds it. ``replaced``: so too, but what does the work
    now takes longer. ``unchecked``: the rule could not check
    again. ``unchecked before``: it is there now, and could not be checked before."""
    rule: str
    """Identifier of the rule."""
    title: str
    """What is (or was) wrong."""
    category: str
    """Of the rule."""
    place: str
    """Where; empty: unknown."""
    same_place: bool | None
    """``remaining``: at a place it was at before; ``null``: a place is unknown."""
    before_priority: int | None = None
    """Its priority before; ``null``: not there, or not ranked."""
    after_priority: int | None = None
    """The same after."""
    before_gain_ns: int | None = None
    """Gain of its fix alone before, ns per step; ``null``: not there, or no gain in step time."""
    after_gain_ns: int | None = None
    """The same after."""
    reason: str = ""
    """Why it is unchecked; ``remaining``: why one report does not list it."""


class RealisedGain(Struct, kw_only=True):
    """What the fixes were predicted to save, compared with what they saved."""

    rules: list[str]
    """The findings that were fixed and had an estimated gain."""
    predicted_ns: float | None = None
    """All their changes replayed together on the run before, ns saved per step."""
    predicted_low_ns: float | None = None
    """Lower end of its range."""
    predicted_high_ns: float | None = None
    """Upper end of its range."""
    method: str = ""
    """``replay``, or an upper bound."""
    measured_ns: float | None = None
    """Before minus after, ns per step."""
    measured_low_ns: float | None = None
    """Lower end of its interval."""
    measured_high_ns: float | None = None
    """Upper end."""
    agrees: bool | None = None
    """The interval and the range overlap, or the two differ by a tenth at most. For an upper bound:
    the measured gain may be within it. ``null``: not compared."""
    reason: str = ""
    """Why they are not compared."""


class ComparedWork(Struct, kw_only=True):
    """Device work of one operator on inputs of one shape, or of one kernel, per step. Names are
    matched in full and shortened to 300 characters."""

    op: str | None
    """Innermost operator around the launch; ``null``: unknown."""
    shape: str | None
    """Dimensions of its inputs as JSON, cut in the middle when longer than 1,000 characters;
    ``null``: not compared by shape."""
    before_ns: float
    """Durations summed, ns per step."""
    after_ns: float
    """The same after."""
    before_count: float
    """How many per step; 0: none."""
    after_count: float
    """The same after."""
    before_kernels: list[str]
    """Names, the longest-running first; at most three."""
    after_kernels: list[str]
    """The same after: on another GPU they differ."""


class Bounds(Struct, frozen=True, kw_only=True):
    """By how much a run may differ from its baseline."""

    slower: float = 0.05
    """Step time, as a share of the baseline's."""
    memory: float | None = None
    """Memory peak, as a share of the baseline's; ``null``: not checked."""
    strict: bool = False
    """A step that is not shown to be within its bound fails too."""


class Decision(Struct, frozen=True, kw_only=True):
    """Is the run slower than it may be?"""

    answer: GateAnswer
    """``passed``: the whole interval is within the bound. ``regression``: all of it is above, or
    the memory peak is. ``not shown``: it reaches to both sides."""
    failed: bool
    """The exit code is 1."""
    reasons: list[str]
    """One sentence for each bound."""
    bounds: Bounds
    """What was allowed."""
    detectable: float
    """The smallest slowdown that these steps would show as a regression, as a share of before."""


class Comparison(Struct, kw_only=True):
    """Two runs side by side. ``to_dict`` has the schema ``SCHEMA``."""

    schema: str = SCHEMA
    """Name and number of this schema."""
    version: str = ""
    """Of advisor."""
    verdict: str
    """One sentence."""
    before: Side
    """The run that is compared with."""
    after: Side
    """The run that is compared."""
    same_device: bool | None
    """Both ran on the same GPU model; ``null``: unknown."""
    steps: StepTimeChange
    """Step times and their difference."""
    amounts: list[Amount] = field(default_factory=list)
    """The breakdown side by side."""
    findings: list[FindingChange] = field(default_factory=list)
    """Fixed, new and remaining findings."""
    realised: RealisedGain
    """Predicted and measured gain."""
    work: list[ComparedWork] = field(default_factory=list)
    """Device work by operator and shape, largest difference first; at most 500."""
    work_rest: ComparedWork | None = None
    """The others, summed; ``null``: none."""
    matched: float | None = None
    """Share of both sides' device time in operators and shapes that both have; ``null``: none."""
    other_shapes: bool = False
    """The same operators run on other input shapes: ``work`` is by operator alone."""
    kernels: list[ComparedWork] = field(default_factory=list)
    """Device work by kernel name, the same way; empty when the GPUs differ: their kernels do."""
    kernels_rest: ComparedWork | None = None
    """The others, summed; ``null``: none."""
    limits: list[str] = field(default_factory=list)
    """What makes the two hard to compare, one sentence each."""
    decision: Decision | None = None
    """Whether the run may be slower by this much; ``null``: nobody asked."""

    @property
    def is_of_other_programs(self) -> bool:
        """The device work of the two has next to nothing in common."""
        return self.matched is not None and self.matched < MIN_MATCHED and not self.other_shapes

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts and lists, as in the JSON."""
        result: dict[str, Any] = msgspec.to_builtins(self)
        return result

    def to_json(self) -> bytes:
        """The JSON text, indented by two."""
        return encode_json(self)

    @classmethod
    def from_json(cls, text: bytes | str) -> Comparison:
        """Read what :meth:`to_json` wrote. Raises AdvisorError for anything else."""
        return decode_json(text, cls, "comparison", SCHEMA)

    def __repr__(self) -> str:
        """One line: the verdict."""
        from advisor.core.labels import clean, shorten

        return f"<Comparison: {shorten(clean(self.verdict), 180)}>"

    def __str__(self) -> str:
        """What ``advisor compare`` prints, for a terminal of 80 columns."""
        return limit_lines(render(self, "COMPARISONS", "terminal"), "to_dict() has all")

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return render(self, "COMPARISONS", "notebook")

    def findings_with(self, *changes: Change) -> list[FindingChange]:
        """The findings that changed like this, largest gain first."""
        return [item for item in self.findings if item.change in changes]

    def find_amount(self, name: str) -> Amount | None:
        """One of the ``figures``; ``None``: measured on neither side."""
        figures = (item for item in self.amounts if item.group == "figures")
        return next((item for item in figures if item.name == name), None)
