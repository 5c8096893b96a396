"""What became of the findings: matched by rule and place, never mistaking unseen for fixed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import PurePath
from typing import TYPE_CHECKING

from advisor.compare.data import Change, FindingChange
from advisor.core import text as t

if TYPE_CHECKING:
    from advisor.compare.remaining import Remaining
    from advisor.core.finding import Finding, Location
    from advisor.core.report import Report

Pair = tuple["Finding | None", "Finding | None"]
Search = Callable[["Finding", bool], "Remaining | None"]


def _nowhere(finding: Finding, before: bool) -> Remaining | None:
    return None


def compare_findings(
    before: Report, after: Report, search: Search = _nowhere
) -> list[tuple[FindingChange, Finding | None]]:
    """Every finding of either report that is more than a note on one side, what became of it, and
    how it was before. ``search`` looks for a finding of the run before (True) or after (False) in
    the other one."""
    pairs = pair_up(before, after)
    return [(describe(pair, before, after, search), pair[0]) for pair in pairs]


def pair_up(before: Report, after: Report) -> list[Pair]:
    """Findings of one rule on both sides: those that share a place first, then the others in
    their order. A finding that sank to a note (worth too little now) is still there."""
    pairs: list[Pair] = []
    left, right = _shown(before), _shown(after)
    rules = dict.fromkeys(f.rule for f in (*left, *right))
    for rule in rules:
        old = [f for f in (*left, *before.notes) if f.rule == rule]
        new = [f for f in (*right, *after.notes) if f.rule == rule]
        noted = {id(f) for f in (*before.notes, *after.notes)}
        matched: list[tuple[Finding, Finding]] = []
        for near in (True, False):
            for one in list(old):
                other = next((f for f in new if not near or same_place(one, f)), None)
                if other is not None:
                    matched.append((one, other))
                    old.remove(one)
                    new.remove(other)
        pairs += [pair for pair in matched if not (id(pair[0]) in noted and id(pair[1]) in noted)]
        pairs += [(f, None) for f in old if id(f) not in noted]
        pairs += [(None, f) for f in new if id(f) not in noted]
    return sorted(pairs, key=_worth, reverse=True)


def _shown(report: Report) -> list[Finding]:
    return [*report.findings, *report.risks]


def _worth(pair: Pair) -> int:
    return max((_gain(f) or 0 for f in pair if f is not None), default=0)


def describe(pair: Pair, before: Report, after: Report, search: Search) -> FindingChange:
    """What became of one."""
    old, new = pair
    change: Change
    same, reason = None, ""
    gains = [_gain(f) if f is not None else None for f in pair]
    if old is not None and new is not None:
        change, same = "remaining", same_place(old, new)
    elif old is not None:
        reason = _unseen(after, before, old.rule)
        change = "unchecked" if reason else "fixed"
        successor = _successor(old, before, after)
        if not reason and successor is not None:
            reason = f"the rule no longer applies; its place is now told as: {successor.title}"
        elif not reason and (remaining := search(old, True)) is not None:
            change, reason, gains[1] = "remaining", f"after: {remaining.why}", remaining.gain_ns
    else:
        assert new is not None
        reason = _unseen(before, after, new.rule)
        change = "unchecked before" if reason else "new"
        if not reason and _successor(new, after, before) is not None:
            pass  # what was told of its place before has another cause
        elif not reason and (remaining := search(new, False)) is not None:
            change, reason, gains[0] = "remaining", f"before: {remaining.why}", remaining.gain_ns
    shown = new or old
    assert shown is not None
    return FindingChange(
        change=change,
        rule=shown.rule,
        title=shown.title,
        category=shown.category,
        place=place(shown),
        same_place=same,
        before_rank=old.rank if old is not None else None,
        after_rank=new.rank if new is not None else None,
        before_gain_ns=gains[0],
        after_gain_ns=gains[1],
        reason=reason,
    )


def _successor(finding: Finding, own: Report, other: Report) -> Finding | None:
    """Who speaks of a finding's place in the other report, and does not in its own: the events are
    there in both (a wait for the loader), and their cause, and so the fix, is another."""
    known = {f.rule for f in (*_shown(own), *own.notes)}
    for candidate in _shown(other):
        akin = candidate.rule not in known and candidate.category == finding.category
        if akin and same_place(finding, candidate):
            return candidate
    return None


def _gain(finding: Finding) -> int | None:
    impact = finding.impact
    return impact.gain_ns if impact is not None and impact.currency == "step_time" else None


def _unseen(report: Report, other: Report, rule: str) -> str:
    """Why a rule that found something in the other run could not look here; empty: it could."""
    for item in report.not_checked:
        if rule in item.rule.split(", "):
            return item.why
    if report.busy_share is None and other.busy_share is not None:
        return "no GPU work in the trace"
    if not report.host and other.host:
        return "no host events in the trace"
    return ""


def place(finding: Finding) -> str:
    """Where it is worst, in a line."""
    return " · ".join(t.location_names(finding.where[0])[:2]) if finding.where else ""


def same_place(one: Finding, other: Finding) -> bool | None:
    """They share a place, told as closely as both tell it; ``None``: one tells none.

    Line numbers move when code is edited and folders differ between machines, so code is known by
    file name and function; kernels by their name without arguments.
    """
    if not one.where or not other.where:
        return None
    for tell in (_code, _op, _kernel):
        mine, theirs = _set(map(tell, one.where)), _set(map(tell, other.where))
        if mine and theirs:
            return bool(mine & theirs)
    return None


def _set(values: Iterable[str | None]) -> set[str]:
    return {value for value in values if value}


def _code(location: Location) -> str | None:
    if location.file is None:
        return None
    return f"{PurePath(location.file).name}:{location.function or location.line or ''}"


def _op(location: Location) -> str | None:
    # generated names number their instances: CppNode<X> of one build is the same in another
    return re.sub(r"\d{3,}", "#", location.op) if location.op else None


def _kernel(location: Location) -> str | None:
    return t.kernel_label(location.kernel, 80) if location.kernel else None
