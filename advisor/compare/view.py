"""A Comparison as words and table cells, for any renderer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Literal, NamedTuple

from advisor.compare.verdict import interval, per, signed
from advisor.core import text as t

if TYPE_CHECKING:
    from advisor.compare.data import Amount, Comparison, FindingChange, Side, StepTimes, Work

SMALL = 0.005
"""Share of the longer step below which a row of the breakdown is left out of the tables (the JSON
has all)."""
SMALL_WORK = 0.001
"""The same for one operator of the table of work: its change is shown, and not judged."""
MAX_WORK = 10
WIDTH = 30
"""Characters of a label in the table of work."""
ENOUGH_FOR_PERCENTILES = 10
TITLES = {
    "fixed": "fixed",
    "new": "new",
    "remaining": "remaining",
    "unchecked": "not checked again",
    "unchecked before": "not checked before",
}
ORDER = ("new", "fixed", "remaining", "unchecked", "unchecked before")


MORE_IS_BETTER = ("GPU busy", "communication hidden", "MFU")
"""Figures of ``amounts``; of all others, times and bytes, less is better."""

Judged = Literal["better", "worse", "new", "gone", ""]
"""Of a change; ``new`` and ``gone``: one side has none of it, and what stands in for it is in
another line; empty: too small to matter, not shown to be one, or not measured."""


class Line(NamedTuple):
    """One figure on both sides, with what its change means."""

    group: str
    """As in ``Amount``; ``steps`` and ``work`` for the other tables."""
    name: str
    """As in ``Amount``; the whole name of what has a short label."""
    label: str
    before: float | None
    """ns, or what the unit is; ``None``: not measured."""
    after: float | None
    texts: tuple[str, str]
    """Both as they are shown."""
    change: str
    """The difference with its sign; empty: none, or not measured."""
    judged: Judged


class Table(NamedTuple):
    """Cells as text; the first column is words, the others are figures."""

    head: list[str]
    rows: list[list[str]]


def sides(c: Comparison) -> list[tuple[str, list[str]]]:
    """What the two are: (label, parts)."""
    return [("before", _side(c.before)), ("after", _side(c.after))]


def _side(side: Side) -> list[str]:
    parts = [t.shorten_path(side.path, 60)]
    if side.rank is not None:
        parts.append(f"rank {side.rank}")
    parts.append(side.device_name or "GPU not told")
    if side.samples is not None:
        parts.append(f"{t.count_noun(side.samples, 'sample')} a step")
    return parts


def _table(title: str, lines: list[Line]) -> Table:
    rows = [[line.label, *line.texts, line.change] for line in lines]
    return Table([title, "before", "after", "difference"], rows)


def step_table(c: Comparison) -> Table | None:
    """Distributions of step times side by side."""
    lines = step_lines(c)
    return _table("step time", lines) if lines else None


def step_lines(c: Comparison) -> list[Line]:
    """The same as lines. They are better or worse only when a difference is shown."""
    one, other = c.steps.before, c.steps.after
    if one is None or other is None:
        return []
    texts = (t.format_count(one.count), t.format_count(other.count))
    found = [Line("steps", "steps", "steps", one.count, other.count, texts, "", "")]
    few = min(one.count, other.count) < ENOUGH_FOR_PERCENTILES
    shown = c.steps.verdict in ("slower", "faster")
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
        before, after = getattr(one, field), getattr(other, field)
        if before is None or after is None:
            continue
        judged = _judged(before, after, 0.0) if shown else ""
        change = relative(before, after)
        texts = (t.format_duration(before), t.format_duration(after))
        found.append(Line("steps", label, label, before, after, texts, change, judged))
    return found


def _judged(
    before: float | None, after: float | None, least: float, *, more: bool = False
) -> Judged:
    """``least``: a change below it does not matter. ``more``: more of it is better."""
    if before is None or after is None or abs(after - before) <= least:
        return ""
    if not more and (not before or not after):
        return "gone" if before else "new"
    return "better" if (after > before) == more else "worse"


def step_notes(steps: StepTimes) -> list[str]:
    """How the difference was judged, and what the figures do not show."""
    if steps.difference_ns is None:
        return []
    low, high = t.format_change(steps.low_ns or 0.0), t.format_change(steps.high_ns or 0.0)
    found = [
        f"Difference of the {steps.statistic}s: {t.format_change(steps.difference_ns)}, "
        f"{interval(steps)} ({low} to {high}; {steps.method})."
    ]
    return [*found, *steps.notes]


def breakdown(c: Comparison) -> Table:
    """Where the step's time goes, side by side."""
    return _table("", breakdown_lines(c))


def breakdown_lines(c: Comparison) -> list[Line]:
    """The same as lines; a change of less than ``SMALL`` of the longer step is not judged, nor one
    of less than a percent of another figure."""
    whole = max(c.before.step_ns, c.after.step_ns, 1.0)
    groups = {amount.group for amount in c.amounts}
    wanted = ["time", "idle", "kernels"] if "time" in groups else ["host"]
    found = []
    for group in [*wanted, "figures"]:
        for amount in c.amounts:
            if amount.group != group:
                continue
            largest = max(amount.before or 0.0, amount.after or 0.0)
            if amount.unit == "ns" and largest < SMALL * whole:
                continue
            least = {"ns": SMALL * whole, "share": 0.01}.get(amount.unit, 0.01 * largest)
            more = amount.name in MORE_IS_BETTER
            judged = _judged(amount.before, amount.after, least, more=more)
            if judged in ("new", "gone") and group in ("time", "idle", "host"):
                judged = "worse" if judged == "new" else "better"  # nothing stands in for idling
            found.append(
                Line(
                    group,
                    amount.name,
                    _label(amount, c.after.framework),
                    amount.before,
                    amount.after,
                    (_value(amount.before, amount.unit), _value(amount.after, amount.unit)),
                    _change(amount),
                    judged,
                )
            )
    return found


def _label(amount: Amount, framework: str | None) -> str:
    match amount.group:
        case "time":
            return t.CLASS_LABELS.get(amount.name, t.cause_label(amount.name, framework))
        case "idle":
            return f"– {t.cause_label(amount.name, framework)}"
        case "host":
            return t.host_label(amount.name, framework)
        case "kernels":
            return f"kernels: {amount.name}"
    return amount.name


def _value(value: float | None, unit: str) -> str:
    return "–" if value is None else t.format_value(value, unit)


def _change(amount: Amount) -> str:
    if amount.before is None or amount.after is None:
        return ""
    change = amount.after - amount.before
    if amount.unit == "share":
        return f"{change * 100:+.1f} points".replace("-", "−") if change else ""
    if not change:
        return ""
    if amount.unit == "ns":
        return t.format_change(change)
    return f"{'+' if change > 0 else '−'}{t.format_value(abs(change), amount.unit)}"


def relative(before: float, after: float) -> str:
    """Change as a share of before."""
    return signed((after - before) / before) if before and after != before else ""


def findings(c: Comparison) -> list[tuple[str, list[FindingChange]]]:
    """Findings by what became of them: (title, findings), new ones first."""
    found = []
    for change in ORDER:
        items = [item for item in c.findings if item.change == change]
        if items:
            found.append((TITLES[change], items))
    return found


def finding(item: FindingChange, each: str = " a step") -> list[str]:
    """One finding: its parts. ``each``: what a worth is of, see ``verdict.per``."""
    parts = [item.title]
    gains = [item.before_gain_ns, item.after_gain_ns]
    if item.change == "remaining" and None not in gains:
        parts.append(f"worth {t.format_duration(gains[0])} → {t.format_duration(gains[1])}{each}")
    elif any(gain is not None for gain in gains):
        parts.append(f"worth {t.format_duration(next(g for g in gains if g is not None))}{each}")
    if item.place:
        moved = " (elsewhere before)" if item.same_place is False else ""
        parts.append(f"{item.place}{moved}")
    if item.reason:
        parts.append(item.reason)
    return parts


def realised(c: Comparison) -> list[str]:
    """Predicted against realised gain, in sentences."""
    r = c.realised
    if not r.rules or r.predicted_ns is None:
        return []
    bound = "up to " if r.method != "replay" else ""
    text = (
        f"Fixing {', '.join(r.rules)} was predicted to save "
        f"{bound}{t.format_duration(r.predicted_ns)}{per(c)}"
    )
    if r.predicted_low_ns is not None and r.predicted_high_ns is not None and not bound:
        text += f" ({t.format_range(r.predicted_low_ns, r.predicted_high_ns)})"
    if r.measured_ns is None or r.measured_low_ns is None or r.measured_high_ns is None:
        return [f"{text}. Not compared with what was gained: {r.reason}."]
    what = "became shorter" if r.measured_ns >= 0 else "became longer"
    text += f"; it {what} by {t.format_duration(abs(r.measured_ns))}"
    text += f" ({t.format_range(r.measured_low_ns, r.measured_high_ns)} shorter)."
    if r.agrees is None:
        return [text, f"They are not held against each other: {r.reason}."]
    if r.agrees:
        return [text, "The two agree. Whatever else changed between the runs is in the second."]
    return [
        text,
        "The two do not agree: something else changed too, or the prediction was wrong.",
    ]


def work(c: Comparison, most: int = MAX_WORK) -> Table | None:
    """Device work that differs, by operator and shape."""
    lines = work_lines(c, most)
    return _table(f"device work{per(c)}", lines) if lines else None


def work_lines(c: Comparison, most: int = MAX_WORK, width: int = WIDTH) -> list[Line]:
    """The same as lines, with labels of at most ``width`` characters."""
    items: list[Work] = []
    for item in c.work:
        if abs(item.after_ns - item.before_ns) < 0.5 or len(items) == most:
            break
        items.append(item)
    names = [work_name(item) for item in items]
    whole = max(c.before.step_ns, c.after.step_ns, 1.0)
    return [
        Line(
            "work",
            name,
            label,
            item.before_ns,
            item.after_ns,
            (
                _work_side(item.before_ns, item.before_count),
                _work_side(item.after_ns, item.after_count),
            ),
            t.format_change(item.after_ns - item.before_ns),
            _judged(item.before_ns, item.after_ns, SMALL_WORK * whole),
        )
        for item, name, label in zip(items, names, t.distinct_labels(names, width), strict=True)
    ]


def _work_side(ns: float, count: float) -> str:
    return f"{t.format_duration(ns)} / {t.format_count(count)}×" if count else "–"


def work_name(item: Work) -> str:
    """The operator with the shapes of its inputs, else the kernel."""
    if item.op is None:
        return (item.before_kernels or item.after_kernels or ["unknown"])[0]
    return f"{t.clean(item.op)} {shape(item.shape)}".rstrip()


def shape(dims: str | None) -> str:
    """``[[8, 128], [128, 64], []]`` as ``8×128, 128×64``."""
    if dims is None:
        return ""
    try:
        lists = json.loads(dims)
    except ValueError:
        return ""
    if not isinstance(lists, list):
        return ""
    return ", ".join("×".join(map(str, one)) for one in lists if isinstance(one, list) and one)
