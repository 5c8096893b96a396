"""A run held against a baseline: slower or not, how sure that is, and what to answer."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct, field

import advisor
from advisor.compare.dependent import difference
from advisor.compare.gate.baseline import Baseline, Known
from advisor.compare.statistics import LEVEL
from advisor.compare.steps import PERIODS
from advisor.core.errors import AdvisorError
from advisor.core.finding import REPEATED

SCHEMA = "advisor.gate/1"

HOUR_NS = 3.6e12

Answer = Literal["passed", "not shown", "regression"]


class Bounds(Struct, frozen=True, kw_only=True):
    """What a run may differ by."""

    slower: float = 0.05
    """Of the step, as a share of the baseline's."""
    memory: float | None = None
    """Of the memory peak; ``null``: anything."""
    strict: bool = False
    """A step that is not shown to be within the bound fails too."""


class Figure(Struct, frozen=True, kw_only=True):
    """One figure on both sides."""

    name: str
    """What is measured."""
    unit: str
    """``bytes``, ``J``, or the letters of a currency."""
    before: float | None
    """``null``: not measured."""
    after: float | None
    """``null``: not measured."""


class Decision(Struct, kw_only=True):
    """What a gate answers, and why. ``to_json`` has the schema ``SCHEMA``."""

    schema: str = SCHEMA
    """Name and number of this schema."""
    version: str = ""
    """Of advisor."""
    answer: Answer
    """``passed``: the whole interval is within the bound. ``regression``: all of it is above, or
    the memory is. ``not shown``: it reaches to either side."""
    failed: bool
    """The exit code is 1."""
    reasons: list[str]
    """A sentence for each bound."""
    bounds: Bounds
    """That the run was held against."""
    source: str
    """``recorder``: unprofiled steps. ``trace``: profiled ones."""
    steps: list[int]
    """How many there are before and after."""
    paired: bool
    """Steps of the same number are held against each other."""
    statistic: str
    """``mean`` or ``median``."""
    method: str
    """How the interval was got."""
    level: float
    """Of the interval."""
    before_ns: float
    """The step of the baseline, ns."""
    after_ns: float
    """The step of the run, ns."""
    share: float
    """The difference as a share of the baseline's step: 0.1 is 10 % slower."""
    share_low: float
    """Lower end of its interval."""
    share_high: float
    """Upper end."""
    figures: list[Figure] = field(default_factory=list)
    """What else was measured."""
    new: list[Known] = field(default_factory=list)
    """Findings of rules that found nothing in the baseline."""
    gone: list[Known] = field(default_factory=list)
    """Findings of rules that find nothing in the run."""
    limits: list[str] = field(default_factory=list)
    """What keeps the two from being comparable, in a sentence each."""

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts and lists, as in the JSON."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    def to_json(self) -> bytes:
        """The JSON text, indented by two."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


def decide(before: Baseline, after: Baseline, bounds: Bounds | None = None) -> Decision:
    """Hold a run against a baseline.

    Raises AdvisorError where the two cannot be held against each other: other GPUs, other batches,
    profiled steps against unprofiled ones, or too few steps.
    """
    bounds = bounds or Bounds()
    _comparable(before, after)
    alike = bool(before.numbers) and before.numbers == after.numbers
    same = before.durations_ns == after.durations_ns
    paired = alike and (same or not _periods(before, after))
    found = difference(before.durations, after.durations, paired=paired)
    if found is None or found.before <= 0:
        counts = f"{len(before.durations_ns)} and {len(after.durations_ns)}"
        raise AdvisorError(f"{counts} steps cannot tell slower from noise")
    low, high = found.low / found.before, found.high / found.before
    answer: Answer = "not shown"
    if low > bounds.slower:
        answer = "regression"
    elif high <= bounds.slower:
        answer = "passed"
    memory = _memory(before, after, bounds)
    failed = answer == "regression" or memory[0] or (bounds.strict and answer == "not shown")
    ran, known = {f.rule for f in after.findings}, {f.rule for f in before.findings}
    return Decision(
        version=advisor.__version__,
        answer="regression" if memory[0] else answer,
        failed=failed,
        reasons=[_step_reason(answer, bounds), *memory[1]],
        bounds=bounds,
        source=after.source,
        steps=[len(before.durations_ns), len(after.durations_ns)],
        paired=paired,
        statistic=found.statistic,
        method=found.method,
        level=LEVEL,
        before_ns=found.before,
        after_ns=found.after,
        share=found.amount / found.before,
        share_low=low,
        share_high=high,
        figures=_figures(before, after, found.before, found.after),
        new=[f for f in after.findings if f.rule not in known],
        gone=[f for f in before.findings if f.rule not in ran],
        limits=_limits(before, after),
    )


def _comparable(before: Baseline, after: Baseline) -> None:
    if before.source != after.source:
        kinds = {"recorder": "unprofiled", "trace": "profiled"}
        raise AdvisorError(
            f"the baseline's steps are {kinds.get(before.source, 'other')} ones and the run's are "
            f"{kinds.get(after.source, 'other')}: record both the same way, and save the baseline "
            "again"
        )
    if None not in (before.device_name, after.device_name) and (
        before.device_name != after.device_name
    ):
        raise AdvisorError(
            f"the baseline is of {before.device_name} and the run of {after.device_name}: keep a "
            "baseline for each GPU"
        )
    if None not in (before.samples, after.samples) and before.samples != after.samples:
        raise AdvisorError(
            f"a step has {before.samples} samples in the baseline and {after.samples} in the run: "
            "save the baseline again"
        )
    if before.ranks != after.ranks:
        raise AdvisorError(
            f"the baseline has {before.ranks} ranks and the run {after.ranks}: save the baseline "
            "again"
        )


def _step_reason(answer: Answer, bounds: Bounds) -> str:
    bound = f"{bounds.slower:+.1%}"
    if answer == "regression":
        return f"slower: all of the interval is above the bound of {bound}"
    if answer == "passed":
        return f"not slower: all of the interval is within the bound of {bound}"
    strict = "; that fails under --strict" if bounds.strict else ""
    return f"not shown: the interval reaches to either side of the bound of {bound}{strict}"


def _memory(before: Baseline, after: Baseline, bounds: Bounds) -> tuple[bool, list[str]]:
    """(it is a regression, what to say of it)."""
    if bounds.memory is None:
        return False, []
    one, other = before.memory_peak_bytes, after.memory_peak_bytes
    if not one or other is None:
        raise AdvisorError("--max-memory: the memory peak was not measured on both sides")
    share = other / one - 1
    more = share > bounds.memory
    where = "above" if more else "within"
    return more, [f"memory peak {share:+.1%}: {where} the bound of {bounds.memory:+.1%}"]


def _figures(before: Baseline, after: Baseline, *steps: float) -> list[Figure]:
    found = []
    for name, unit, sides in (
        ("memory peak", "bytes", [before.memory_peak_bytes, after.memory_peak_bytes]),
        ("energy a step", "J", [before.joules, after.joules]),
    ):
        if sides != [None, None]:
            found.append(Figure(name=name, unit=unit, before=sides[0], after=sides[1]))
    paid = after if after.per_hour is not None else before
    if paid.per_hour is not None:  # both at one price: it is the program that is judged
        costs = [1000 * ns * paid.per_hour / HOUR_NS for ns in steps]
        name = "cost of 1,000 steps"
        found.append(Figure(name=name, unit=paid.currency, before=costs[0], after=costs[1]))
    return found


def _periods(before: Baseline, after: Baseline) -> bool:
    """Nothing marked the steps of a trace: they are counted from wherever the recording began."""
    told = [one.step_source for one in (before, after) if one.source == "trace"]
    return REPEATED in told


def _limits(before: Baseline, after: Baseline) -> list[str]:
    found = []
    if _periods(before, after):
        found.append(PERIODS)
    if before.durations_ns == after.durations_ns:
        found.append("Both have the very same steps: the run is the baseline's own.")
    if after.source == "trace":
        found.append(
            "Profiled steps, which the profiler slows: runs of advisor record are held against "
            "each other by their unprofiled steps."
        )
    if min(len(before.durations_ns), len(after.durations_ns)) < 40:
        found.append(
            "Few steps: where one depends much on the next, the true interval is wider. Record "
            "40 or more."
        )
    found.append("One run each: another run of the same program may differ by more.")
    if after.ranks > 1:
        found.append(f"Of {after.ranks} ranks one is measured (rank {after.rank}).")
    return found
