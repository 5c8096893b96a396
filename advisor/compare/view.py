"""A Comparison as words and table cells, for any renderer."""

from __future__ import annotations

import json
from typing import NamedTuple

from advisor.compare.compare import interval, signed
from advisor.compare.data import Amount, Comparison, FindingChange, Side, StepTimes, Work
from advisor.report import text as t

SMALL = 0.005
"""Share of the longer step below which a row of the breakdown is left out of the tables (the JSON
has all)."""
MOST_WORK = 10
ENOUGH_FOR_PERCENTILES = 10
TITLES = {
    "fixed": "fixed",
    "new": "new",
    "remaining": "remaining",
    "unchecked": "not checked again",
    "unchecked before": "not checked before",
}
ORDER = ("new", "fixed", "remaining", "unchecked", "unchecked before")


class Table(NamedTuple):
    """Cells as text; the first column is words, the others are figures."""

    head: list[str]
    rows: list[list[str]]


def sides(c: Comparison) -> list[tuple[str, list[str]]]:
    """What the two are: (label, parts)."""
    return [("before", _side(c.before)), ("after", _side(c.after))]


def _side(side: Side) -> list[str]:
    parts = [t.path(side.path, 60)]
    if side.rank is not None:
        parts.append(f"rank {side.rank}")
    parts.append(side.device_name or "GPU not told")
    if side.samples is not None:
        parts.append(f"{side.samples} samples a step")
    return parts


def step_table(c: Comparison) -> Table | None:
    """Distributions of step times side by side."""
    one, other = c.steps.before, c.steps.after
    if one is None or other is None:
        return None
    rows = [["steps", t.count(one.count), t.count(other.count), ""]]
    few = min(one.count, other.count) < ENOUGH_FOR_PERCENTILES
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
        rows.append([label, *precise([before, after]), relative(before, after)])
    return Table(["step time", "before", "after", "difference"], rows)


def precise(values: list[float]) -> list[str]:
    """Durations in the unit of the largest, with four digits of it: differences of a percent are
    to be seen."""
    largest = max(values)
    scale, unit = (1e9, "s") if largest >= 10e9 else (1e6, "ms") if largest >= 1e6 else (1e3, "µs")
    digits = 3 if largest < 10 * scale else 2 if largest < 100 * scale else 1
    return [f"{value / scale:,.{digits}f} {unit}" for value in values]


def step_notes(steps: StepTimes) -> list[str]:
    """How the difference was judged, and what the figures do not show."""
    if steps.difference_ns is None:
        return []
    low, high = t.times([steps.low_ns or 0.0, steps.high_ns or 0.0])
    found = [
        f"Difference of the {steps.statistic}s: {difference(steps.difference_ns)}, "
        f"{interval(steps)} ({low} to {high}; {steps.method})."
    ]
    return [*found, *steps.notes]


def breakdown(c: Comparison) -> Table:
    """Where the step's time goes, side by side."""
    whole = max(c.before.step_ns, c.after.step_ns, 1.0)
    groups = {amount.group for amount in c.amounts}
    wanted = ["time", "idle", "kernels"] if "time" in groups else ["host"]
    rows = []
    for group in [*wanted, "figures"]:
        for amount in c.amounts:
            if amount.group != group:
                continue
            largest = max(amount.before or 0.0, amount.after or 0.0)
            if amount.unit == "ns" and largest < SMALL * whole:
                continue
            rows.append(
                [
                    _label(amount),
                    _value(amount.before, amount.unit),
                    _value(amount.after, amount.unit),
                    _change(amount),
                ]
            )
    return Table(["", "before", "after", "difference"], rows)


def _label(amount: Amount) -> str:
    match amount.group:
        case "time":
            return t.LABELS.get(amount.name, t.cause_label(amount.name))
        case "idle":
            return f"– {t.cause_label(amount.name)}"
        case "host":
            return t.host_label(amount.name)
        case "kernels":
            return f"kernels: {amount.name}"
    return amount.name


def _value(value: float | None, unit: str) -> str:
    return "–" if value is None else t.value(value, unit)


def _change(amount: Amount) -> str:
    if amount.before is None or amount.after is None:
        return ""
    change = amount.after - amount.before
    if amount.unit == "share":
        return f"{change * 100:+.1f} points".replace("-", "−") if change else ""
    if not change:
        return ""
    if amount.unit == "ns":
        return difference(change)
    return f"{'+' if change > 0 else '−'}{t.value(abs(change), amount.unit)}"


def difference(ns: float) -> str:
    """A difference in time with its sign: ``+3.1 ms``."""
    return t.time(0) if not ns else f"{'+' if ns > 0 else '−'}{t.time(abs(ns))}"


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


def finding(item: FindingChange) -> list[str]:
    """One finding: its parts."""
    parts = [item.title]
    gains = [item.before_gain_ns, item.after_gain_ns]
    if item.change == "remaining" and None not in gains:
        parts.append(f"worth {t.time(gains[0])} → {t.time(gains[1])} a step")
    elif any(gain is not None for gain in gains):
        parts.append(f"worth {t.time(next(g for g in gains if g is not None))} a step")
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
        f"Fixing {', '.join(r.rules)} was predicted to save {bound}{t.time(r.predicted_ns)} a step"
    )
    if r.predicted_low_ns is not None and r.predicted_high_ns is not None and not bound:
        text += f" ({t.between(r.predicted_low_ns, r.predicted_high_ns)})"
    if r.measured_ns is None or r.measured_low_ns is None or r.measured_high_ns is None:
        return [f"{text}. Not compared with what was gained: {r.reason}."]
    what = "became shorter" if r.measured_ns >= 0 else "became longer"
    text += f"; it {what} by {t.time(abs(r.measured_ns))}"
    text += f" ({t.between(r.measured_low_ns, r.measured_high_ns)} shorter)."
    if r.agrees is None:
        return [text, f"They are not held against each other: {r.reason}."]
    if r.agrees:
        return [text, "The two agree. Whatever else changed between the runs is in the second."]
    return [
        text,
        "The two do not agree: something else changed too, or the prediction was wrong.",
    ]


def work(c: Comparison, most: int = MOST_WORK) -> Table | None:
    """Device work that differs, by operator and shape."""
    rows: list[list[str]] = []
    for item in c.work:
        change = item.after_ns - item.before_ns
        if abs(change) < 0.5 or len(rows) == most:
            break
        rows.append(
            [
                work_name(item),
                _work_side(item.before_ns, item.before_count),
                _work_side(item.after_ns, item.after_count),
                difference(change),
            ]
        )
    return Table(["device work a step", "before", "after", "difference"], rows) if rows else None


def _work_side(ns: float, count: float) -> str:
    return f"{t.time(ns)} / {t.count(count)}×" if count else "–"


def work_name(item: Work, width: int = 30) -> str:
    """The operator with its shape, else the kernel."""
    if item.op is None:
        return t.kernel((item.before_kernels or item.after_kernels or ["unknown"])[0], width)
    text = t.clean(item.op)
    dims = shape(item.shape)
    if dims and len(text) + 4 < width:
        return f"{text} {t.shorten(dims, width - len(text) - 1)}"
    return t.shorten(text, width)


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
