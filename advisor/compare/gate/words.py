"""A Decision in words, the same in all formats."""

from __future__ import annotations

from advisor.compare.gate.decide import Decision, Figure
from advisor.core import text as t

TITLES = {
    "passed": "Not slower",
    "not shown": "Not shown to be slower",
    "regression": "Regression",
}
LIMIT = 10
"""Findings that are listed of each kind."""


def headline(d: Decision) -> str:
    """``Not slower: 12.1 ms → 12.2 ms (+0.8%, 95% interval −0.2% to +1.8%)``."""
    interval = f"{d.level:.0%} interval {signed(d.share_low)} to {signed(d.share_high)}"
    pair = f"{t.format_duration(d.before_ns)} → {t.format_duration(d.after_ns)}"
    return f"{TITLES[d.answer]}: {pair} a step ({signed(d.share)}, {interval})"


def signed(share: float) -> str:
    """``+1.2%``, with a minus sign that is one; no sign for nothing."""
    text = f"{share:+.1%}"
    return "0.0%" if text in ("+0.0%", "-0.0%") else text.replace("-", "−")


def figure(item: Figure) -> str:
    """``memory peak 1.0 GB → 1.2 GB``."""
    return f"{item.name} {amount(item, item.before)} → {amount(item, item.after)}"


def amount(item: Figure, value: float | None) -> str:
    """One side of a figure, with its unit."""
    return t.format_value(value, item.unit)


def about(d: Decision) -> list[str]:
    """Which steps were held against each other, and how."""
    which = "unprofiled steps" if d.source == "recorder" else "profiled steps"
    pairs = ", held against each other by their numbers" if d.paired else ""
    return [
        f"{d.steps[0]:,} and {d.steps[1]:,} {which}{pairs}; difference of the {d.statistic}s; "
        f"{d.method}"
    ]
