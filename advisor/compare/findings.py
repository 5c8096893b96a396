"""Changes of findings between two runs, matched by rule and place; unchecked is never fixed.

A rule reports from a share of the step on, so a finding disappears from a report when the step
grows around it, and appears when the step shrinks. Its Edits name events by what they are, so they
can be searched for, and their gain estimated, in the other run: that tells whether it is gone."""

import re
from collections.abc import Callable
from pathlib import PurePath
from typing import NamedTuple

from advisor.advise.engine import AnalysisResult
from advisor.advise.impact import MIN_GAIN_SHARE
from advisor.compare.comparison import Change, FindingChange
from advisor.core import labels
from advisor.core import text as t
from advisor.core.finding import Edit, Finding, Location
from advisor.core.report import Report
from advisor.measure import Analysis
from advisor.replay.selection import selected_gaps, selected_gpu, selected_host

MIN_KEPT = 0.6
"""Share of a finding's gain, or of the time in its events, from which it is still there. A fix
takes away more than 40%."""
_OPERATIONS_THAT_KEEP_EVENTS = ("overlap", "make_async", "resize")
"""Edit operations after which the events are still there, as they should be."""
NOT_SEARCHED = "a saved report cannot be searched, so it may be gone or only too small to report"


class RemainingFinding(NamedTuple):
    """A finding that is in a run whose report does not list it."""

    gain_ns: int | None
    """Gain in that run, ns per step; ``None``: none in step time."""
    why: str
    """Reason why the report does not list it."""


Pair = tuple["Finding | None", "Finding | None"]
Search = Callable[["Finding", bool], "RemainingFinding | None"]


def compare_findings(
    before: Report, after: Report, search: Search | None
) -> list[tuple[FindingChange, Finding | None]]:
    """Return what became of every finding that is more than a note on one side, and the finding
    before. ``search`` looks for a finding of the run before (True) or after (False) in the other
    one. ``None``: there are only reports, and what one lacks is unchecked."""
    pairs = pair_up(before, after)
    changes = [(describe_change(pair, before, after, search), pair[0]) for pair in pairs]
    for change, _ in changes if search is None else ():
        if change.change == "fixed" and not change.reason:
            change.change, change.reason = "unchecked", NOT_SEARCHED
        elif change.change == "new":
            change.change, change.reason = "unchecked before", NOT_SEARCHED
    return changes


def pair_up(before: Report, after: Report) -> list[Pair]:
    """Pair findings of one rule on both sides: those that share a place first, then the others in
    order. A finding that became a note (its gain is too small now) is still there."""
    pairs: list[Pair] = []
    left, right = _shown(before), _shown(after)
    rules = dict.fromkeys(f.rule for f in (*left, *right))
    for rule in rules:
        old = [f for f in (*left, *before.notes) if f.rule == rule]
        new = [f for f in (*right, *after.notes) if f.rule == rule]
        noted = {id(f) for f in (*before.notes, *after.notes)}
        matched: list[tuple[Finding, Finding]] = []
        for near in (True, False):
            for item in list(old):
                other = next((f for f in new if not near or same_place(item, f)), None)
                if other is not None:
                    matched.append((item, other))
                    old.remove(item)
                    new.remove(other)
        pairs += [pair for pair in matched if not (id(pair[0]) in noted and id(pair[1]) in noted)]
        pairs += [(f, None) for f in old if id(f) not in noted]
        pairs += [(None, f) for f in new if id(f) not in noted]
    return sorted(pairs, key=_largest_gain, reverse=True)


def _shown(report: Report) -> list[Finding]:
    return [*report.findings, *report.risks]


def _largest_gain(pair: Pair) -> int:
    return max((_gain(f) or 0 for f in pair if f is not None), default=0)


def describe_change(
    pair: Pair, before: Report, after: Report, search: Search | None
) -> FindingChange:
    """Describe how one finding, or one pair, changed."""
    old, new = pair
    change: Change
    same, reason = None, ""
    gains = [_gain(f) if f is not None else None for f in pair]
    if old is not None and new is not None:
        change, same = "remaining", same_place(old, new)
    elif old is not None:
        reason = _why_unchecked(after, before, old.rule)
        change = "unchecked" if reason else "fixed"
        successor = _successor(old, before, after)
        replacement = None if reason else _slower_replacement(old, before, after)
        if replacement is not None:
            change, reason = "replaced", replacement
        elif not reason and successor is not None:
            reason = f"the rule no longer applies; at its place now: {successor.title}"
        elif not reason and search and (remaining := search(old, True)) is not None:
            change, reason, gains[1] = "remaining", f"after: {remaining.why}", remaining.gain_ns
    else:
        assert new is not None
        reason = _why_unchecked(before, after, new.rule)
        change = "unchecked before" if reason else "new"
        if not reason and _successor(new, after, before) is not None:
            pass  # another cause was reported at its place before
        elif not reason and search and (remaining := search(new, False)) is not None:
            change, reason, gains[0] = "remaining", f"before: {remaining.why}", remaining.gain_ns
    shown = new or old
    assert shown is not None
    return FindingChange(
        change=change,
        rule=shown.rule,
        title=shown.title,
        category=shown.category,
        place=" · ".join(t.location_names(shown.where[0])[:2]) if shown.where else "",
        same_place=same,
        before_priority=old.priority if old is not None else None,
        after_priority=new.priority if new is not None else None,
        before_gain_ns=gains[0],
        after_gain_ns=gains[1],
        reason=reason,
    )


def _slower_replacement(old: Finding, before: Report, after: Report) -> str | None:
    """Say that another finding about the same work now takes at least as much time. ``None`` if
    none does, or a time is unknown."""
    known = {f.rule for f in (*_shown(before), *before.notes)}
    time = old.shown_time
    for new in (*_shown(after), *after.notes):
        taken = new.shown_time
        if not old.subject or new.subject != old.subject or new.rule in known:
            continue
        if time is None or taken is None or time.per != taken.per:
            continue
        if float(taken.value or 0) >= float(time.value or 0):
            times = [t.format_duration(float(each.value or 0)) for each in (time, taken)]
            return f"what replaces it takes longer, {' → '.join(times)}: {new.title}"
    return None


def _successor(finding: Finding, own: Report, other: Report) -> Finding | None:
    """Return the finding that only the other report has at the same place; ``None`` if there is
    none. The events are there in both runs (a wait for the loader), but cause and fix differ."""
    known = {f.rule for f in (*_shown(own), *own.notes)}
    for candidate in _shown(other):
        similar = candidate.rule not in known and candidate.category == finding.category
        if similar and same_place(finding, candidate):
            return candidate
    return None


def _gain(finding: Finding) -> int | None:
    impact = finding.impact
    return impact.gain_ns if impact is not None and impact.currency == "step_time" else None


def _why_unchecked(report: Report, other: Report, rule: str) -> str:
    """Return why a rule of the other run's finding could not check here; empty if it could."""
    for item in report.not_checked:
        if rule in item.rule.split(", "):
            return item.why
    if report.busy_share is None and other.busy_share is not None:
        return "no GPU work in the trace"
    if not report.host and other.host:
        return "no host events in the trace"
    return ""


def find_remaining(
    finding: Finding, own: AnalysisResult, other: AnalysisResult
) -> RemainingFinding | None:
    """Look for a finding of one run in the other; ``None``: it is not there, or cannot be known."""
    impact = finding.impact
    if impact is None or impact.gain_ns is None or impact.currency != "step_time":
        return None
    if not finding.edits or finding.other_rank or impact.gain_ns <= 0:
        return None
    if any(edit.select.correlation for edit in finding.edits):
        return None  # ids of one trace mean nothing in another
    if own.estimator.method == other.estimator.method:
        gain = other.estimator.gain_range(finding.edits).gain
        if gain >= MIN_KEPT * impact.gain_ns:
            return RemainingFinding(round(gain), _why_not_listed(gain, other.main))
    edits = [edit for edit in finding.edits if edit.op not in _OPERATIONS_THAT_KEEP_EVENTS]
    here = sum(_selected_time(own.main, edit) for edit in edits)
    there = sum(_selected_time(other.main, edit) for edit in edits)
    if here > 0 and there >= MIN_KEPT * here:
        return RemainingFinding(None, "still there, but the step does not wait for it")
    return None


def _why_not_listed(gain: float, a: Analysis) -> str:
    """Return why a rule does not report a gain of that size, ns per step."""
    if gain < MIN_GAIN_SHARE * a.step_ns:
        return f"its gain is too small a share of the {a.per} to report"
    share = f"{gain / a.step_ns:.0%} of the {a.per}"
    return f"below a threshold of the rule, though it would save {share}"


def _selected_time(a: Analysis, edit: Edit) -> float:
    """Return the time in the events that an edit selects, ns per step."""
    select = edit.select
    if select.on == "gpu":
        times = a.trace.gpu["dur"].to_numpy()[selected_gpu(a, select)]
    elif select.on == "gap":
        times = a.gaps["dur"].to_numpy()[selected_gaps(a, select)]
    else:
        times = a.trace.cpu["dur"].to_numpy()[selected_host(a, select)]
    return float(times.sum()) / a.step_count


def same_place(item: Finding, other: Finding) -> bool | None:
    """Tell whether two findings share a place, as precisely as both have it; ``None``: unknown.

    Line numbers move when code is edited and folders differ between machines, so code is known by
    file name and function; kernels by their name without arguments."""
    if not item.where or not other.where:
        return None
    for name in (_code, _op, _kernel):
        names = [{name(location) for location in each.where} - {None, ""} for each in (item, other)]
        if all(names):
            return bool(names[0] & names[1])
    return None


def _code(location: Location) -> str | None:
    if location.file is None:
        return None
    return f"{PurePath(location.file).name}:{location.function or location.line or ''}"


def _op(location: Location) -> str | None:
    # generated names number their instances: CppNode<X> of one build is the same in another
    return re.sub(r"\d{3,}", "#", location.op) if location.op else None


def _kernel(location: Location) -> str | None:
    return labels.kernel_label(location.kernel, 80) if location.kernel else None
