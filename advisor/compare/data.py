"""A Comparison: what differs between two runs, as plain data with a versioned schema."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from advisor.core.report import bounded, render
from advisor.core.saved import decoded

SCHEMA = "advisor.comparison/1"

Verdict = Literal["slower", "faster", "no difference", "not measured"]
Change = Literal["fixed", "new", "remaining", "unchecked", "unchecked before"]


class Side(Struct, kw_only=True):
    """One of the two runs."""

    path: str
    """As it was given."""
    rank: int | None
    """The rank that is compared; ``null``: not told."""
    window: int
    """Which recording of the rank."""
    ranks: int
    """How many ranks there are."""
    status: str
    """Of its report."""
    verdict: str
    """Of its report: one sentence."""
    device_name: str | None
    """GPU; ``null``: not told, or no device work."""
    step_source: str
    """What a step was taken to be."""
    steps_used: int
    """Profiled steps that are measured."""
    step_ns: float
    """Their mean duration, ns."""
    record_shapes: bool | None
    """Recorded with shapes."""
    with_stack: bool | None
    """Recorded with Python stacks, which slow the host."""
    profile_memory: bool | None
    """Recorded with memory events."""
    truncated: bool
    """The file ends early."""
    samples: int | None = None
    """Batch size in most of the recorder's steps, gradient accumulation included; ``null``: not
    recorded."""
    crash: str = ""
    """Which ranks an exception ended, in a sentence; empty: none that is told."""
    framework: str | None = None
    """What the program is written with, as in a report's ``scope``; ``null``: not told."""


class Distribution(Struct, kw_only=True):
    """Durations of steps."""

    count: int
    """Steps."""
    mean_ns: float
    """ns."""
    median_ns: float
    """ns."""
    p10_ns: float | None
    """A tenth of the steps are shorter, ns; ``null``: a saved report does not tell."""
    p90_ns: float | None
    """A tenth are longer, ns; ``null``: the same."""
    min_ns: float
    """The shortest, ns."""
    max_ns: float
    """The longest, ns."""
    autocorrelation: float | None
    """Correlation of neighbouring steps; ``null``: fewer than three, or all alike."""
    durations_ns: list[float]
    """The durations, in order; at most 2,000, evenly chosen. Empty: a saved report does not hold
    them."""


class StepTimes(Struct, kw_only=True):
    """How long the steps take, before and after."""

    verdict: Verdict
    """``slower`` or ``faster``: the interval of the difference leaves out 0. ``no difference``: it
    does not, so none is shown. ``not measured``: see ``reason``."""
    source: str
    """``recorder``: unprofiled steps, host time from boundary to boundary. ``trace``: the profiled
    steps of the window. Empty: neither."""
    before: Distribution | None = None
    """``null``: no steps."""
    after: Distribution | None = None
    """``null``: no steps."""
    statistic: str = ""
    """What is compared: ``mean`` or ``median``."""
    method: str = ""
    """How the interval was got."""
    level: float = 0.95
    """Of the interval."""
    difference_ns: float | None = None
    """After minus before, ns; ``null``: not measured."""
    low_ns: float | None = None
    """Lower end of its interval, ns."""
    high_ns: float | None = None
    """Upper end, ns."""
    share: float | None = None
    """The difference as a share of before: 0.1 is 10 % slower."""
    share_low: float | None = None
    """Lower end."""
    share_high: float | None = None
    """Upper end."""
    reason: str = ""
    """Why there is no verdict."""
    notes: list[str] = field(default_factory=list)
    """What the figures do not show, in a sentence each."""


class Amount(Struct, kw_only=True):
    """One figure on both sides."""

    group: str
    """``time`` (exclusive device time), ``idle`` (by cause), ``host``, ``kernels`` (by family), or
    ``figures``."""
    name: str
    """Class, cause, family, or what is measured."""
    unit: str
    """``ns`` (a step), ``share`` (0 to 1), ``bytes``, ``count``, ``J``, or a currency's letters."""
    before: float | None
    """``null``: not measured."""
    after: float | None
    """``null``: not measured."""


class FindingChange(Struct, kw_only=True):
    """What became of a finding."""

    change: Change
    """``fixed``: the rule looked and finds it no more. ``unchecked``: the rule could not look
    again. ``unchecked before``: it is there now, and could not be looked for before."""
    rule: str
    """Identifier of the rule."""
    title: str
    """What is (or was) wrong."""
    category: str
    """Of the rule."""
    place: str
    """Where; empty: not told."""
    same_place: bool | None
    """``remaining``: at a place it was at before; ``null``: a place is not told."""
    before_rank: int | None = None
    """Place in the order of worth before; ``null``: not there, or not ranked."""
    after_rank: int | None = None
    """The same after."""
    before_gain_ns: int | None = None
    """Worth a step alone before, ns; ``null``: not there, or worth no time a step."""
    after_gain_ns: int | None = None
    """The same after."""
    reason: str = ""
    """Why it is unchecked; ``remaining``: why one report does not have it."""


class Realised(Struct, kw_only=True):
    """What the fixes were predicted to save, against what the step became shorter by."""

    rules: list[str]
    """The findings that were fixed and had a price."""
    predicted_ns: float | None = None
    """All their changes replayed together on the run before, ns saved a step."""
    predicted_low_ns: float | None = None
    """Lower end of the band."""
    predicted_high_ns: float | None = None
    """Upper end of the band."""
    method: str = ""
    """``replay``, or an upper bound."""
    measured_ns: float | None = None
    """Before minus after, ns a step."""
    measured_low_ns: float | None = None
    """Lower end of its interval."""
    measured_high_ns: float | None = None
    """Upper end."""
    agrees: bool | None = None
    """The interval and the band overlap, or the two differ by a tenth at most; for an upper bound:
    the measured gain may be within it; ``null``: not compared."""
    reason: str = ""
    """Why they are not compared."""


class Work(Struct, kw_only=True):
    """Device work of one operator on inputs of one shape, or of one kernel, a step. Names are
    matched whole and given with at most 300 characters."""

    op: str | None
    """Innermost operator around the launch; ``null``: not told."""
    shape: str | None
    """Dimensions of its inputs as JSON, cut in the middle when longer than 1,000 characters;
    ``null``: not compared by shape."""
    before_ns: float
    """Durations summed, ns a step."""
    after_ns: float
    """The same after."""
    before_count: float
    """How many a step; 0: none."""
    after_count: float
    """The same after."""
    before_kernels: list[str]
    """Names, the longest-running first; at most three."""
    after_kernels: list[str]
    """The same after: on another GPU they differ."""


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
    """Both ran on the same model of GPU; ``null``: not told."""
    steps: StepTimes
    """Step times and their difference."""
    amounts: list[Amount] = field(default_factory=list)
    """The breakdown side by side."""
    findings: list[FindingChange] = field(default_factory=list)
    """Fixed, new and remaining findings."""
    realised: Realised
    """Predicted against realised gain."""
    work: list[Work] = field(default_factory=list)
    """Device work by operator and shape, largest difference first; at most 500."""
    work_rest: Work | None = None
    """The others, summed; ``null``: none."""
    matched: float | None = None
    """Share of both sides' device time in operators and shapes that both have; ``null``: none."""
    kernels: list[Work] = field(default_factory=list)
    """Device work by kernel name, the same way; empty when the GPUs differ: their kernels do."""
    kernels_rest: Work | None = None
    """The others, summed; ``null``: none."""
    limits: list[str] = field(default_factory=list)
    """What keeps the two from being comparable, in a sentence each."""

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts and lists, as in the JSON."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    def to_json(self) -> bytes:
        """The JSON text, indented by two."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    @classmethod
    def from_json(cls, text: bytes | str) -> Comparison:
        """Read what :meth:`to_json` wrote. Raises AdvisorError for anything else."""
        return decoded(text, cls, "comparison", SCHEMA)

    def __repr__(self) -> str:
        """One line: the verdict."""
        from advisor.core.text import clean, shorten

        return f"<Comparison: {shorten(clean(self.verdict), 180)}>"

    def __str__(self) -> str:
        """What ``advisor compare`` prints, for a terminal of 80 columns."""
        return bounded(render(self, "COMPARISONS", "terminal"), "to_dict() has all")

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return render(self, "COMPARISONS", "notebook")

    def of(self, change: Change) -> list[FindingChange]:
        """The findings that fared like this, those worth most first."""
        return [item for item in self.findings if item.change == change]
