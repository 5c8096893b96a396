"""Two memory snapshots side by side: what holds more or less, by category, line and lifetime."""

from __future__ import annotations

from collections.abc import Iterable

from advisor.compare.comparison import Amount, Comparison
from advisor.core import text as t
from advisor.core.report import MemoryHolder, Report

GROUP, LINES = "memory", "memory by line"
LIFETIMES = ("there before the history", "made and kept to its end", "made and freed again")
MIN_CHANGE = 0.01
"""Of the larger peak: less is no change."""
WHY = {
    "autocast copies": "Autocast keeps a 16-bit copy of each weight until its region ends.",
    "earlier steps": "Outputs of the step before are still there.",
    "optimizer temporaries": "The peak is in the optimizer's step.",
    "gradients": "Gradients are there at the peak.",
}
"""What a category that grew means, where the name alone does not say it."""


def memory_amounts(before: Report, after: Report) -> list[Amount]:
    """Peak, categories, lifetimes and lines of the fullest device of both, in bytes. What one side
    does not list is 0 there. Empty: one of them has no snapshot."""
    if not before.memory or not after.memory:
        return []
    one, other = before.memory[0], after.memory[0]
    made = [
        _amount(GROUP, "in tensors at the peak", one.allocated, other.allocated),
        _amount(GROUP, "reserved then", one.reserved, other.reserved),
    ]
    for group, items in ((GROUP, ("categories", "lifetimes")), (LINES, ("held",))):
        for attribute in items:
            sums = [_sums(getattr(view, attribute)) for view in (one, other)]
            names = dict.fromkeys((*sums[0], *sums[1]))
            pairs = {name: (sums[0].get(name, 0), sums[1].get(name, 0)) for name in names}
            rows = [_amount(group, name, *pair) for name, pair in pairs.items() if any(pair)]
            made += sorted(rows, key=lambda row: -abs(_difference(row)))
    return made


def _sums(holders: Iterable[MemoryHolder]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for each in holders:
        name = each.category
        if each.file is not None:
            path = t.clean(each.file).replace(chr(92), "/")
            name = f"{t.shorten_path(path, 24)}:{each.line} {each.category}"
        sums[name] = sums.get(name, 0) + each.bytes
    return sums


def _amount(group: str, name: str, before: int, after: int) -> Amount:
    return Amount(group=group, name=name, unit="bytes", before=before, after=after)


def _difference(row: Amount) -> float:
    return (row.after or 0) - (row.before or 0)


def memory_verdict(c: Comparison) -> str:
    """What changed at the peak, and why, in two sentences or three; empty: no snapshots."""
    rows = [row for row in c.amounts if row.group == GROUP]
    if not rows:
        return ""
    peak = rows[0]
    before, after = peak.before or 0.0, peak.after or 0.0
    pair = f"{t.format_bytes(before)} → {t.format_bytes(after)}"
    least = MIN_CHANGE * max(before, after, 1)
    parts = [
        row for row in rows[2:] if row.name not in LIFETIMES and abs(_difference(row)) >= least
    ]
    listed = ", ".join(f"{row.name} {signed_bytes(_difference(row))}" for row in parts[:3])
    change = after - before
    if abs(change) < least:
        text = f"Memory at the peak stays the same: {pair}"
        return f"{text}. What differs: {listed}" if listed else text
    rises = "rises" if change > 0 else "falls"
    share = f"{abs(change) / max(before, 1):.0%}"
    why = [WHY[row.name] for row in parts if row.name in WHY and _difference(row) > 0][:1]
    text = f"Memory at the peak {rises} by {share}: {pair} ({listed})."
    return " ".join([text, *why]).removesuffix(".")


def signed_bytes(size: float) -> str:
    """A difference in bytes, with its sign."""
    return f"{'+' if size > 0 else '-'}{t.format_bytes(abs(size))}"
