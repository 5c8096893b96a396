"""Changes of findings between two runs, matched by rule and place; unchecked is never fixed.

A rule reports a finding only above a share of the step, so a finding disappears from a report when
the step grows around it, and appears when the step shrinks. The finding's Edits describe events, so
the other run can be searched for them and their gain estimated: that shows whether it is gone."""

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

_MIN_KEPT_SHARE = 0.6
"""Minimum share of a finding's gain, or of the time in its events, at which it is still there. A
fix removes more than 40%."""
_OPERATIONS_THAT_KEEP_EVENTS = ("overlap", "make_async", "resize")
"""Edit operations that keep the events in place."""
NOT_SEARCHED = "a saved report cannot be searched, so it may be gone or only too small to report"


class RemainingFinding(NamedTuple):
    """A finding that is in a run whose report does not list it."""

    gain_ns: int | None
    """Gain in that run, ns per step, or ``None`` if it has none in step time."""
    why: str
    """Reason why the report does not list it."""


Pair = tuple["Finding | None", "Finding | None"]
Search = Callable[["Finding", bool], "RemainingFinding | None"]


def compare_findings(
    before: Report, after: Report, search: Search | None
) -> list[tuple[FindingChange, Finding | None]]:
    """Return what became of every finding that is more than a note on one side, and the finding
    before. If one is fixed or new together with those that the report lists under it, only the
    first is returned: they are one cause. ``search`` looks for a finding of the run before (True)
    or after (False) in the other one. ``None`` if there are only reports: what one of them lacks is
    then unchecked."""
    pairs = pair_up(before, after)
    changes = [(describe_change(pair, before, after, search), pair[0]) for pair in pairs]
    for change, _ in changes if search is None else ():
        if change.change == "fixed" and not change.reason:
            change.change, change.reason = "unchecked", NOT_SEARCHED
        elif change.change == "new":
            change.change, change.reason = "unchecked before", NOT_SEARCHED
    first = {(c.rule, c.change) for c, _ in changes if c.change in ("fixed", "new")}
    return [
        result
        for result, pair in zip(changes, pairs, strict=True)
        if not any((f.folded_under, result[0].change) in first for f in pair if f is not None)
    ]


def pair_up(before: Report, after: Report) -> list[Pair]:
    """Pair findings of one rule on both sides: first findings that share a place, then the others
    in order. A finding that became a note (its gain is too small now) is still there."""
    pairs: list[Pair] = []
    left, right = _list_shown(before), _list_shown(after)
    rules = dict.fromkeys(f.rule for f in (*left, *right))
    for rule in rules:
        old = [f for f in (*left, *before.notes) if f.rule == rule]
        new = [f for f in (*right, *after.notes) if f.rule == rule]
        notes = {id(f) for f in (*before.notes, *after.notes)}
        matched: list[tuple[Finding, Finding]] = []
        for nearby in (True, False):
            for finding in list(old):
                match = next((f for f in new if not nearby or same_place(finding, f)), None)
                if match is not None:
                    matched.append((finding, match))
                    old.remove(finding)
                    new.remove(match)
        pairs += [pair for pair in matched if not (id(pair[0]) in notes and id(pair[1]) in notes)]
        pairs += [(f, None) for f in old if id(f) not in notes]
        pairs += [(None, f) for f in new if id(f) not in notes]
    return sorted(pairs, key=_largest_gain, reverse=True)


def _list_shown(report: Report) -> list[Finding]:
    return [*report.findings, *report.risks]


def _largest_gain(pair: Pair) -> int:
    return max((_step_gain(f) or 0 for f in pair if f is not None), default=0)


def describe_change(
    pair: Pair, before: Report, after: Report, search: Search | None
) -> FindingChange:
    """Describe how one finding, or one pair, changed."""
    old, new = pair
    change: Change
    is_same_place, reason = None, ""
    gains = [_step_gain(f) if f is not None else None for f in pair]
    if old is not None and new is not None:
        change, is_same_place = "remaining", same_place(old, new)
    elif old is not None:
        reason = _explain_unchecked(after, before, old.rule)
        change = "unchecked" if reason else "fixed"
        successor = _find_successor(old, before, after)
        replacement = None if reason else _find_slower_replacement(old, before, after)
        if replacement is not None:
            change, reason = "replaced", replacement
        elif not reason and successor is not None:
            reason = f"the rule no longer applies; at its place now: {successor.title}"
        elif not reason and search and (remaining := search(old, True)) is not None:
            change, reason, gains[1] = "remaining", f"after: {remaining.why}", remaining.gain_ns
    else:
        assert new is not None
        reason = _explain_unchecked(before, after, new.rule)
        change = "unchecked before" if reason else "new"
        if not reason and _find_successor(new, after, before) is not None:
            pass  # another cause was reported at its place before
        elif not reason and search and (remaining := search(new, False)) is not None:
            change, reason, gains[0] = "remaining", f"before: {remaining.why}", remaining.gain_ns
    finding = new or old
    assert finding is not None
    return FindingChange(
        change=change,
        rule=finding.rule,
        title=finding.title,
        category=finding.category,
        place=" · ".join(t.location_names(finding.where[0])[:2]) if finding.where else "",
        same_place=is_same_place,
        before_priority=old.priority if old is not None else None,
        after_priority=new.priority if new is not None else None,
        before_gain_ns=gains[0],
        after_gain_ns=gains[1],
        reason=reason,
    )


def _find_slower_replacement(old: Finding, before: Report, after: Report) -> str | None:
    """Say that another finding about the same work now takes at least as much time. ``None`` if no
    finding does, or a time is unknown."""
    rules_before = {f.rule for f in (*_list_shown(before), *before.notes)}
    old_time = old.shown_time
    for new in (*_list_shown(after), *after.notes):
        new_time = new.shown_time
        if not old.subject or new.subject != old.subject or new.rule in rules_before:
            continue
        if old_time is None or new_time is None or old_time.per != new_time.per:
            continue
        if float(new_time.value or 0) >= float(old_time.value or 0):
            times = [t.format_duration(float(each.value or 0)) for each in (old_time, new_time)]
            return f"what replaces it takes longer, {' → '.join(times)}: {new.title}"
    return None


def _find_successor(finding: Finding, report: Report, other_report: Report) -> Finding | None:
    """Return the finding that only the other report has at the same place, or ``None``. The events
    are in both runs (a wait for the loader), but cause and fix differ."""
    own_rules = {f.rule for f in (*_list_shown(report), *report.notes)}
    for candidate in _list_shown(other_report):
        similar = candidate.rule not in own_rules and candidate.category == finding.category
        if similar and same_place(finding, candidate):
            return candidate
    return None


def _step_gain(finding: Finding) -> int | None:
    impact = finding.impact
    return impact.gain_ns if impact is not None and impact.currency == "step_time" else None


def _explain_unchecked(report: Report, other: Report, rule: str) -> str:
    """Return why the rule of a finding of ``other`` could not check here. Empty if it could."""
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
    """Look for a finding of one run in the other. ``None`` if it is absent or unknown."""
    impact = finding.impact
    if impact is None or impact.gain_ns is None or impact.currency != "step_time":
        return None
    if not finding.edits or finding.other_rank or impact.gain_ns <= 0:
        return None
    if any(edit.select.correlation for edit in finding.edits):
        return None  # ids of one trace mean nothing in another
    if own.estimator.method == other.estimator.method:
        gain = other.estimator.gain_range(finding.edits).gain
        if gain >= _MIN_KEPT_SHARE * impact.gain_ns:
            return RemainingFinding(round(gain), _explain_unlisted(gain, other.main))
    edits = [edit for edit in finding.edits if edit.op not in _OPERATIONS_THAT_KEEP_EVENTS]
    own_ns = sum(_sum_selected_time(own.main, edit) for edit in edits)
    other_ns = sum(_sum_selected_time(other.main, edit) for edit in edits)
    if own_ns > 0 and other_ns >= _MIN_KEPT_SHARE * own_ns:
        return RemainingFinding(None, "still there, but the step does not wait for it")
    return None


def _explain_unlisted(gain: float, a: Analysis) -> str:
    """Return why a rule does not report a gain of this size, ns per step."""
    if gain < MIN_GAIN_SHARE * a.step_ns:
        return f"its gain is too small a share of the {a.per} to report"
    share = f"{gain / a.step_ns:.0%} of the {a.per}"
    return f"below a threshold of the rule, though it would save {share}"


def _sum_selected_time(a: Analysis, edit: Edit) -> float:
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
    """Return whether two findings share a place, as precisely as both name it; ``None`` if unknown.

    Line numbers move when code is edited and folders differ between machines, so code is identified
    by file name and function, and a kernel by its name without arguments."""
    if not item.where or not other.where:
        return None
    for key in (_code_key, _op_key, _kernel_key):
        keys = [{key(location) for location in each.where} - {None, ""} for each in (item, other)]
        if all(keys):
            return bool(keys[0] & keys[1])
    return None


def _code_key(location: Location) -> str | None:
    if location.file is None:
        return None
    return f"{PurePath(location.file).name}:{location.function or location.line or ''}"


def _op_key(location: Location) -> str | None:
    # generated names contain instance numbers: CppNode<X> of one build is the same in another
    return re.sub(r"\d{3,}", "#", location.op) if location.op else None


def _kernel_key(location: Location) -> str | None:
    return labels.kernel_label(location.kernel, 80) if location.kernel else None
