"""Sentences and table cells of a Comparison, for any renderer."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from advisor.compare.amounts import memory_change_verdict, phase_verdict
from advisor.core import labels
from advisor.core import text as t
from advisor.core.finding import GUESSED_STEP_SOURCES
from advisor.core.report_steps import EQUAL_STEP_SHARE

if TYPE_CHECKING:
    from advisor.compare.comparison import (
        Amount,
        ComparedWork,
        Comparison,
        FindingChange,
        Side,
        StepTimeChange,
    )

_MIN_CHANGE_SHARE = 0.005
"""Share of the longer step below which the tables leave out a row of the breakdown. The JSON has
all rows."""
_MIN_WORK_SHARE = 0.001
"""Share of the longer step below which an operator's change is shown but not judged."""
NOISE = f"changes of less than {_MIN_CHANGE_SHARE:.1%} of the step, or 1% of another figure"
MAX_WORK = 10
MAX_PATH_LENGTH = 200
"""Maximum length of a path in a command, in characters."""
MAX_LABEL = 30
"""Width of a label in the table of work, in characters."""
MIN_STEPS_FOR_PERCENTILES = 10
CHANGE_TITLES = {
    "fixed": "fixed",
    "replaced": "gone, but the replacement takes longer",
    "new": "new",
    "remaining": "remaining",
    "unchecked": "not checked again",
    "unchecked before": "not checked before",
    "only before": "only before",
    "only after": "only after",
    "in both": "in both",
}
CHANGE_ORDER = (
    "new", "only after", "fixed", "replaced", "only before", "remaining", "in both", "unchecked",
    "unchecked before",
)  # fmt: skip
MORE_IS_BETTER = ("GPU busy", "communication hidden", "MFU")
"""Names of the figures for which more is better; for all others, less is."""

FigureVerdict = Literal["better", "worse", "new", "gone", ""]
"""Judgement of a change. ``new`` and ``gone``: one side lacks it, and another line has its
replacement. Empty if it is too small to matter, not shown to be a change, or not measured."""


class ComparedFigure(NamedTuple):
    """A figure on both sides, with a judgement of its change."""

    group: str
    """Group as in ``Amount``, or ``steps`` or ``work`` for the other tables."""
    name: str
    """Name as in ``Amount``, or the full name of what ``label`` shortens."""
    label: str
    before: float | None
    """Value before in the figure's unit, or ns; ``None`` if not measured."""
    after: float | None
    texts: tuple[str, str]
    """Both values as text."""
    change: str
    """Difference with its sign. Empty if there is none, or it was not measured."""
    verdict: FigureVerdict

    @property
    def is_noise(self) -> bool:
        """Whether the figure is measured on both sides, and changed too little to matter."""
        return not self.verdict and self.before is not None and self.after is not None


def write_comparison_verdict(comparison: Comparison) -> str:
    """Write the verdict in one sentence, after a sentence for each run that crashed."""
    steps = comparison.steps
    snapshots = [side.step_source == "snapshot" for side in (comparison.before, comparison.after)]
    text = memory_change_verdict(comparison) if all(snapshots) else phase_verdict(comparison)
    if text:
        pass
    elif comparison.other_programs:
        return " ".join([*_describe_crashes(comparison), _write_other_programs(comparison)])
    elif steps.difference_ns is None or steps.share is None:
        text = _write_without_steps(comparison)
        if is_unjudged(comparison):
            return " ".join([*_describe_crashes(comparison), f"{text}."])
    else:
        pair = _format_pair(steps)
        if steps.verdict == "no difference":
            text = (
                f"No difference in step time can be shown: {pair} ({format_step_interval(steps)})"
            )
        else:
            amount = t.format_share(abs(steps.share))
            change = f"{amount} {'less' if steps.share < 0 else 'more'} time"
            text = f"{steps.verdict.capitalize()}: {pair}, {change} ({_format_size(steps)})"
        if comparison.other_shapes:
            text = f"On other input shapes, such as another batch size, {t.lower_first(text)}"
    counts = Counter(item.change for item in comparison.findings)
    parts = [f"{counts[kind]} {kind}" for kind in ("fixed", "new", "remaining") if counts[kind]]
    if unchecked := counts["unchecked"] + counts["unchecked before"]:
        parts.append(f"{unchecked} not checked on both sides")
    if counts["replaced"]:
        parts.append(f"{counts['replaced']} replaced by slower work")
    text = f"{text}. Findings: {', '.join(parts)}." if parts else f"{text}."
    return " ".join([*_describe_crashes(comparison), text, *describe_other_load(comparison)])


MIN_LOAD_SHARE = 0.1
"""Minimum change of the time that other programs take, as a share of the longer step, that a
verdict mentions."""


def describe_other_load(c: Comparison) -> list[str]:
    """Say that other programs took more of the cores on one side, if this took much of a step."""
    before, after = c.before.other_programs_ns, c.after.other_programs_ns
    step_ns = max(c.before.step_ns, c.after.step_ns)
    if before is None or after is None or abs(after - before) < MIN_LOAD_SHARE * step_ns:
        return []
    times = f"{t.format_duration(before)} of each step before and {t.format_duration(after)} after"
    return [f"Other programs took the cores for {times}: record again on a quiet machine."]


def write_badge(comparison: Comparison) -> str:
    """Write the verdict in two or three words."""
    words = {"no difference": "No significant difference"}
    verdict = comparison.steps.verdict
    return "Not comparable" if is_unjudged(comparison) else words.get(verdict, verdict.capitalize())


def is_unjudged(comparison: Comparison) -> bool:
    """Return whether there is no verdict: different programs or, without steps, other input shapes,
    and no phases of a server to compare."""
    c = comparison
    other_work = c.other_shapes and c.steps.difference_ns is None
    return (bool(c.other_programs) or other_work) and not phase_verdict(c)


def _write_other_programs(comparison: Comparison) -> str:
    """Write the sentence that replaces the verdict if the two look like different programs."""
    text = "These look like different programs, so neither is called faster"
    steps = comparison.steps
    if steps.difference_ns is None:
        return f"{text}."
    return f"{text}: a step takes {_format_pair(steps, between=' and ')}."


def _write_without_steps(comparison: Comparison) -> str:
    """Write the verdict where step times are not compared. It begins with what is known instead."""
    steps = comparison.steps
    no_steps = f"step times are not compared: {steps.reason.partition('; ')[0]}"
    if has_guessed_steps(comparison) and steps.before is not None and steps.after is not None:
        intervals = [t.format_duration(side.mean_ns) for side in (steps.before, steps.after)]
        return f"GPU work repeats every {' → '.join(intervals)}, but {no_steps}"
    if spans := _recording_lengths(comparison):
        before, after = spans
        text = f"From the first GPU work to the last: {' → '.join(map(t.format_duration, spans))}"
        if comparison.other_shapes:
            text = t.lower_first(text)
            return f"Not comparable: other input shapes, such as another batch size; {text}"
        direction = "longer" if after > before else "shorter"
        if (share := t.format_share(abs(after / before - 1))) not in ("0%", "<1%"):
            text += f" ({share} {direction})"
        return f"{text}, if both did the same work"
    return f"Step times are not compared: {steps.reason}"


def _recording_lengths(comparison: Comparison) -> tuple[float, float] | None:
    """Return the lengths of two recordings without steps, ns, or ``None`` if one has steps or no
    device time."""
    times = [each for each in comparison.amounts if each.group == "time"]
    if not times or not is_of_whole_recordings(comparison):
        return None
    before, after = (
        sum(getattr(each, side) or 0.0 for each in times) for side in ("before", "after")
    )
    return (before, after) if before > 0 and after > 0 else None


def has_guessed_steps(comparison: Comparison) -> bool:
    """Return whether a side's steps are repetitions of device work that nothing marks."""
    return bool(
        {comparison.before.step_source, comparison.after.step_source} & {*GUESSED_STEP_SOURCES}
    )


def _describe_crashes(comparison: Comparison) -> list[str]:
    """Return a sentence for each run that crashed and so is not comparable with a complete run."""
    sides = (("before", comparison.before), ("after", comparison.after))
    return [
        f"The run {which} crashed: {t.lower_first(side.crash)}"
        for which, side in sides
        if side.crash
    ]


def is_of_whole_recordings(comparison: Comparison) -> bool:
    """Return whether neither side has marked steps, so that figures are of whole recordings."""
    sources = {comparison.before.step_source, comparison.after.step_source}
    return sources == {"whole trace"}


def per_suffix(comparison: Comparison) -> str:
    """Return what follows a figure: `` per step``, `` per repetition``, or nothing for totals."""
    if is_of_whole_recordings(comparison):
        return ""
    return " per repetition" if has_guessed_steps(comparison) else " per step"


def format_step_interval(steps: StepTimeChange) -> str:
    """Format the difference's interval: ``−2.1% to +0.3% with 95% confidence``."""
    if steps.share_low is None or steps.share_high is None:
        return t.NOT_MEASURED
    low, high = t.format_share_change(steps.share_low), t.format_share_change(steps.share_high)
    return f"{low} to {high} with {steps.level:.0%} confidence"


def _format_size(steps: StepTimeChange) -> str:
    """Format the interval of a shown difference without signs: ``2.1% to 3.3% with 95%
    confidence``."""
    assert steps.share_low is not None and steps.share_high is not None
    low, high = sorted((abs(steps.share_low), abs(steps.share_high)))
    return f"{low:.1%} to {high:.1%} with {steps.level:.0%} confidence"


def describe_sides(c: Comparison) -> list[tuple[str, list[str]]]:
    """Describe the two runs as (label, parts)."""
    return [("before", _describe_side(c.before)), ("after", _describe_side(c.after))]


def _describe_side(side: Side) -> list[str]:
    parts = [t.shorten_path(side.path, 60)]
    if side.rank is not None:
        parts.append(f"rank {side.rank}")
    parts.append(side.device_name or ("CPU" if side.on_cpu else "GPU model not recorded"))
    if side.samples is not None:
        parts.append(f"{t.count_noun(side.samples, 'sample')} per step")
    return parts


def step_lines(c: Comparison) -> list[ComparedFigure]:
    """Return the distributions of step times side by side. A figure is better or worse only if a
    difference is shown."""
    old, new = c.steps.before, c.steps.after
    if old is None or new is None:
        return []
    texts = (t.format_count(old.count), t.format_count(new.count))
    result = [ComparedFigure("steps", "steps", "steps", old.count, new.count, texts, "", "")]
    few = min(old.count, new.count) < MIN_STEPS_FOR_PERCENTILES
    is_shown = c.steps.verdict in ("slower", "faster") and not is_unjudged(c)
    for label, field in (
        ("mean", "mean_ns"),
        ("median", "median_ns"),
        ("10th percentile", "p10_ns"),
        ("90th percentile", "p90_ns"),
        ("shortest", "min_ns"),
        ("longest", "max_ns"),
    ):
        if few and field in ("p10_ns", "p90_ns"):
            continue
        before, after = getattr(old, field), getattr(new, field)
        verdict = _judge_change(before, after, 0.0) if is_shown else ""
        change = (
            t.format_share_change((after - before) / before) if before and after != before else ""
        )
        texts = (t.format_duration(before), t.format_duration(after))
        result.append(ComparedFigure("steps", label, label, before, after, texts, change, verdict))
    return result


def _judge_change(
    before: float | None, after: float | None, max_noise: float, *, more_is_better: bool = False
) -> FigureVerdict:
    """Judge a change. A change of at most ``max_noise`` has no meaning."""
    if before is None or after is None or abs(after - before) <= max_noise:
        return ""
    if not more_is_better and (not before or not after):
        return "gone" if before else "new"
    return "better" if (after > before) == more_is_better else "worse"


def step_notes(steps: StepTimeChange) -> list[str]:
    """Say how the steps changed, then the caveats. Empty if the change is not measured."""
    if steps.difference_ns is None:
        return []
    low, high = steps.low_ns or 0.0, steps.high_ns or 0.0
    became, how = "is the same", "longer" if steps.difference_ns > 0 else "shorter"
    if steps.difference_ns:
        became = f"became {t.format_duration(abs(steps.difference_ns))} {how}"
    ends = [t.format_duration(abs(end)) for end in (low, high)]
    between = f"{ends[0]} shorter and {ends[1]} longer"
    if low * high > 0:  # in the direction of the difference, the smaller end first
        between = f"{ends[low < 0]} and {ends[low > 0]} {how}"
    result = [
        f"The {steps.statistic} step {became}. With {steps.level:.0%} confidence it is between "
        f"{between}."
    ]
    return [*result, *steps.notes]


def interval_method(steps: StepTimeChange) -> list[str]:
    """Say how the interval of the difference was computed. Empty if it is not measured."""
    is_known = steps.difference_ns is not None
    return [f"The interval of the step time: {steps.method}."] if is_known else []


def breakdown_lines(c: Comparison) -> list[ComparedFigure]:
    """Return where the step's time goes, side by side. Changes below ``_MIN_CHANGE_SHARE`` of the
    longer step, or below 1% of another figure, are not judged."""
    groups = {amount.group for amount in c.amounts}
    wanted = ["time", "idle", "kernels"] if "time" in groups else ["host"]
    return figures_of(c, [*wanted, "figures", "counters"])


def figures_of(c: Comparison, groups: Sequence[str]) -> list[ComparedFigure]:
    """Return the amounts of some groups as table lines, without short times."""
    result, unjudged = [], is_unjudged(c)
    for group in groups:
        total = max(c.before.step_ns, c.after.step_ns, 1.0)
        if group == "parts":  # per token
            part_ns = (max(a.before or 0.0, a.after or 0.0) for a in c.amounts if a.group == group)
            total = max(part_ns, default=total)
        for amount in c.amounts:
            if amount.group != group:
                continue
            largest = max(amount.before or 0.0, amount.after or 0.0)
            if amount.unit == "ns" and largest < _MIN_CHANGE_SHARE * total and group != "phases":
                continue
            max_noise = {"ns": _MIN_CHANGE_SHARE * total, "share": 0.01}.get(
                amount.unit, 0.01 * largest
            )
            is_gain = amount.name in MORE_IS_BETTER
            verdict = _judge_change(amount.before, amount.after, max_noise, more_is_better=is_gain)
            if verdict in ("new", "gone") and group in ("time", "idle", "host"):
                verdict = "worse" if verdict == "new" else "better"  # nothing replaces idle time
            verdict = "" if unjudged else verdict
            result.append(
                ComparedFigure(
                    group,
                    amount.name,
                    _format_label(amount, c.after.framework),
                    amount.before,
                    amount.after,
                    (
                        _format_value(amount.before, amount.unit),
                        _format_value(amount.after, amount.unit),
                    ),
                    _format_change(amount),
                    verdict,
                )
            )
    return result


def _format_label(amount: Amount, framework: str | None) -> str:
    match amount.group:
        case "time":
            return t.CLASS_LABELS.get(amount.name, t.cause_label(amount.name, framework))
        case "idle":
            label = t.cause_label(amount.name, framework, outside=amount.outside_operators)
            return f"– {label}"
        case "host":
            return t.host_label(amount.name, framework)
        case "kernels":
            return f"kernels: {amount.name}"
    return amount.name


def _format_value(value: float | None, unit: str) -> str:
    return t.EMPTY_CELL if value is None else t.format_value(value, unit)


def _format_change(amount: Amount) -> str:
    if amount.before is None or amount.after is None:
        return ""
    change = amount.after - amount.before
    if amount.unit == "share":
        return t.with_sign(change, f"{abs(change) * 100:.1f} points") if change else ""
    if not change:
        return ""
    if amount.unit == "ns":
        return t.format_change(change)
    return t.with_sign(change, t.format_value(abs(change), amount.unit))


def group_findings(c: Comparison) -> list[tuple[str, list[FindingChange]]]:
    """Group the findings by their change: (title, findings), new ones first."""
    result: dict[str, list[FindingChange]] = {}
    for change in CHANGE_ORDER:
        items = [item for item in c.findings if item.change == change]
        if items:
            result.setdefault(CHANGE_TITLES[change], []).extend(items)
    return list(result.items())


def describe_finding(item: FindingChange, each: str = " per step") -> list[str]:
    """Describe a finding in parts. ``each`` follows its gain, see ``per_suffix``."""
    parts = [item.title]
    gains = [item.before_gain_ns, item.after_gain_ns]
    if item.change in ("remaining", "in both") and None not in gains:
        parts.append(f"gain {t.format_duration(gains[0])} → {t.format_duration(gains[1])}{each}")
    elif any(gain is not None for gain in gains):
        label = "estimated gain" if item.change in ("fixed", "replaced", "only before") else "gain"
        parts.append(f"{label} {t.format_duration(next(g for g in gains if g is not None))}{each}")
    if item.place:
        moved = " (elsewhere before)" if item.same_place is False else ""
        parts.append(f"{item.place}{moved}")
    if item.reason:
        parts.append(item.reason)
    return parts


def next_fix(c: Comparison) -> str:
    """Name the first fix of the later run. Empty if it has none, or the programs differ."""
    ranked = [item for item in c.findings if item.after_priority is not None]
    if not ranked or is_unjudged(c):
        return ""
    first = min(ranked, key=lambda item: item.after_priority or 0)
    gain = ""
    if first.after_gain_ns:
        gain = f": {t.format_duration(first.after_gain_ns)}{per_suffix(c)}"
        if first.before_gain_ns is not None:
            gain += f", {t.format_duration(first.before_gain_ns)} before"
    path = shlex.quote(t.shorten_path(c.after.path, MAX_PATH_LENGTH))
    return f"{first.title}{gain}. Its fix: advisor analyze {path}"


def describe_realised_gain(c: Comparison) -> list[str]:
    """Describe what fixes were predicted to save, and what they saved."""
    r = c.realised
    if not r.rules or r.predicted_ns is None or is_unjudged(c):
        return []
    bound = "up to " if r.method != "replay" else ""
    titles = {item.rule: item.title for item in c.findings}
    fixed = t.list_names(f"'{titles.get(rule, rule)}'" for rule in r.rules)
    text = (
        f"Fixing {fixed} was predicted to save "
        f"{bound}{t.format_duration(r.predicted_ns)}{per_suffix(c)}"
    )
    if r.predicted_low_ns is not None and r.predicted_high_ns is not None and not bound:
        text += f" ({t.format_range(r.predicted_low_ns, r.predicted_high_ns)})"
    if r.measured_ns is None or r.measured_low_ns is None or r.measured_high_ns is None:
        return [f"{text}. The gain was not measured: {r.reason}."]
    direction, low, high = "shorter", r.measured_low_ns, r.measured_high_ns
    if r.measured_ns < 0:
        direction, low, high = "longer", -high, -low
    text += f". The step became {t.format_duration(abs(r.measured_ns))} {direction}"
    interval = f"{t.format_range(low, high)} {direction}"
    if low < 0 < high:
        opposite = "longer" if direction == "shorter" else "shorter"
        interval = f"{t.format_duration(-low)} {opposite} to {t.format_duration(high)} {direction}"
    text += f" ({interval} with 95% confidence)."
    if r.agrees is None:
        return [text, f"Prediction and gain are not compared: {r.reason}."]
    if r.agrees:
        return [text, "The two agree. Other changes between the runs are in the measured gain too."]
    return [text, "The two do not agree: something else changed too, or the prediction was wrong."]


def work_lines(
    c: Comparison, limit: int = MAX_WORK, width: int = MAX_LABEL
) -> list[ComparedFigure]:
    """Return the device work that differs, by operator and shape, with labels of at most ``width``
    characters."""
    items: list[ComparedWork] = []
    for item in c.work:
        if abs(item.after_ns - item.before_ns) < 0.5 or len(items) == limit:
            break
        items.append(item)
    names, unjudged = [work_name(item) for item in items], is_unjudged(c)
    total = max(c.before.step_ns, c.after.step_ns, 1.0)
    return [
        ComparedFigure(
            "work",
            name,
            label,
            item.before_ns,
            item.after_ns,
            (
                _format_work(item.before_ns, item.before_count),
                _format_work(item.after_ns, item.after_count),
            ),
            t.format_change(item.after_ns - item.before_ns),
            ""
            if unjudged
            else _judge_change(item.before_ns, item.after_ns, _MIN_WORK_SHARE * total),
        )
        for item, name, label in zip(
            items, names, labels.distinct_labels(names, width), strict=True
        )
    ]


def _format_work(ns: float, count: float) -> str:
    return f"{t.format_duration(ns)} / {t.format_count(count)}×" if count else t.EMPTY_CELL


def work_name(item: ComparedWork) -> str:
    """Return the operator with its input shapes, or the kernel's name without one."""
    if item.op is None:
        return (item.before_kernels or item.after_kernels or ["unknown"])[0]
    return f"{labels.clean(item.op)} {format_shape(item.shape)}".rstrip()


def format_shape(dims: str | None) -> str:
    """Format ``[[8, 128], [128, 64], []]`` as ``8×128, 128×64``; empty if it is unreadable."""
    if dims is None:
        return ""
    try:
        lists = json.loads(dims)
    except ValueError:
        return ""
    if not isinstance(lists, list):
        return ""
    return ", ".join("×".join(map(str, item)) for item in lists if isinstance(item, list) and item)


# -- the decision of a gate ---------------------------------------------------------------------

HEADLINES = {
    "passed": "Not slower",
    "not shown": "Not shown to be slower",
    "regression": "Regression",
}
MAX_GATE_FINDINGS = 10
"""Maximum number of new, and of gone, findings that a gate lists."""
GATE_FIGURES = ("memory peak", "energy per step", "cost of 1,000 steps", "cost")


def write_headline(c: Comparison) -> str:
    """Write ``Not slower: 12.1 ms → 12.2 ms per step (+0.8%, −0.2% to +1.8% with 95%
    confidence)``."""
    assert c.decision is not None
    pair = _format_pair(c.steps, " per step")
    title = HEADLINES[c.decision.answer]
    change = t.format_share_change(c.steps.share)
    return f"{title}: {pair} ({change}, {format_step_interval(c.steps)})"


def format_step_times(steps: StepTimeChange) -> list[str]:
    """Format the step times before and after, in the compared statistic."""
    return list(map(t.format_duration, steps.centers()))


def _format_pair(steps: StepTimeChange, per: str = "", between: str = " → ") -> str:
    """Write both step times, and name the statistic where mean and median differ: a run's own
    report may begin with the other."""
    sides = [side for side in (steps.before, steps.after) if side is not None]
    differ = any(abs(s.mean_ns / s.median_ns - 1) >= EQUAL_STEP_SHARE for s in sides if s.median_ns)
    suffix = {"mean": " on average", "median": " in the median"}[steps.statistic] if differ else ""
    return f"{between.join(format_step_times(steps))}{per}{suffix}"


def gate_sensitivity(c: Comparison) -> str:
    """Say how many steps were compared, and the detectable slowdown."""
    assert c.decision is not None
    before, after = c.steps.before, c.steps.after
    assert before is not None and after is not None
    kind = "unprofiled" if c.steps.source == "recorder" else "profiled"
    return (
        f"In {before.count:,} and {after.count:,} {kind} steps, a slowdown of "
        f"{c.decision.detectable:.1%} or more would show as a regression."
    )


def gate_method(steps: StepTimeChange) -> list[str]:
    """Say how the steps were compared, and the caveats."""
    pairs = "Steps are paired by their numbers. " if steps.paired else ""
    how = f"{pairs}Difference of the {steps.statistic}s: {steps.method}."
    return [how, *steps.notes]


def gate_figures(c: Comparison) -> list[Amount]:
    """Return the figures that a gate shows in addition to the step time."""
    return [a for a in c.amounts if a.group == "figures" and a.name in GATE_FIGURES]


def gate_findings(c: Comparison) -> list[tuple[str, list[FindingChange]]]:
    """Return the ranked findings that only the run has, and findings that only the baseline has."""
    new = [
        item
        for item in c.findings_with("new", "unchecked before")
        if item.after_priority is not None
    ]
    gone = [
        item
        for item in c.findings_with("fixed", "replaced", "unchecked")
        if item.before_priority is not None
    ]
    return [("new", new[:MAX_GATE_FINDINGS]), ("gone", gone[:MAX_GATE_FINDINGS])]
