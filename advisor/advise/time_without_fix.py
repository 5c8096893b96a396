"""Parts of the step's bar that no finding is about although they are as long as a listed gain, and
why no fix is offered for each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.advise.finding_text import explain_note
from advisor.advise.impact import MIN_GAIN_SHARE, WARNING_SHARE
from advisor.advise.program_wording import how_to_record_more
from advisor.advise.recording_limits import is_too_small, lost_records
from advisor.core import text as t
from advisor.core.finding import HOST_CODE, Edit, Finding
from advisor.core.intervals import covered_length, intersect, union
from advisor.core.report import Report
from advisor.core.report_time import TimeWithoutFix
from advisor.core.rule import Rule
from advisor.measure import Analysis
from advisor.replay.exposed_time import LAUNCH_CAUSES
from advisor.replay.selection import host_spans, selected_gaps, selected_gpu

MIN_SHARE: Final = 2 * MIN_GAIN_SHARE
"""Share of the step below which a part needs no word."""
MIN_TOUCHED: Final = 0.5
"""Share of a part that a finding's fix touches, from which the finding is about it."""
MIN_DIRECTION: Final = 0.1
"""Share of the exposed copies from which a direction of them has a reason of its own."""
DIRECTIONS: Final = {
    "HtoD": "to the GPU", "DtoH": "to the CPU", "DtoD": "within the GPU", "PtoP": "between GPUs",
}  # fmt: skip
REASONS: Final = {
    "unknown": "what the host does then is not recorded",
    "compile": "first calls do it, and later steps do not",
    "DtoH": "the host needs these values",
}
"""Reasons that hold for a part whatever the rules say."""
NO_RULE: Final = "no fix is known for it"


def find_time_without_fix(
    report: Report, a: Analysis, rules: Sequence[Rule], fired: Sequence[Finding]
) -> list[TimeWithoutFix]:
    """Return the parts of the bar as long as the smallest listed gain, or as a warning's, that no
    ranked or folded finding is about; those with one reason together. The end of the recording and
    the profiler are no such part. Empty where records are lost, or the trace is too small for
    advice. ``fired``: all that the rules found, also what the report leaves out."""
    if not report.time or lost_records(a) or is_too_small(a):
        return []
    step_ns, own = report.scope.step_ns, report.scope.framework
    gains = [
        f.impact.gain_ns
        for f in report.findings
        if f.priority and f.impact and f.impact.currency == "step_time" and f.impact.gain_ns
    ]
    least = max(MIN_SHARE * step_ns, min([WARNING_SHARE * step_ns, *gains]))
    parts = [
        (part.name, t.CLASS_LABELS.get(part.name, part.name), part.ns, part.share)
        for part in report.time
        if part.name not in ("compute", "idle")
    ]
    parts += [
        (part.cause, t.idle_label(part, own), part.ns, part.share)
        for part in report.idle
        if part.cause not in ("end", "profiler")
    ]
    why = _Reasons(report, a, rules, fired)
    result: dict[str, TimeWithoutFix] = {}
    for name, label, ns, share in parts:
        if ns < least or any(why.is_about(f, name) for f in report.findings):
            continue
        if not (reason := why.of_copies() if name == "copies" else why.of_part(name, name)):
            continue
        part = TimeWithoutFix([label], ns, share, reason)
        if (same := result.get(reason)) is not None:
            part = TimeWithoutFix([*same.labels, label], same.ns + ns, same.share + share, reason)
        result[reason] = part
    return list(result.values())


@dataclass(frozen=True)
class _Reasons:
    """Reasons why no fix is offered for parts of the time."""

    report: Report
    a: Analysis
    rules: Sequence[Rule]
    fired: Sequence[Finding]

    def of_copies(self) -> str:
        """Say it by direction; empty: findings are about all of the copies."""
        table = self.a.copies.group_by(pl.col("copy").cast(pl.String)).agg(pl.col("exposed").sum())
        whole = max(1, int(table["exposed"].to_numpy().sum()))
        parts = []
        for direction, ns in table.sort("exposed", descending=True).iter_rows():
            where = DIRECTIONS.get(direction)
            if where is None or ns < MIN_DIRECTION * whole:
                continue
            why = f"({self.of_part('copies', direction)})"
            ranked = (f for f in self.report.findings if f.priority is not None)
            fix = next((f for f in ranked if self._rule_looks(f, direction)), None)
            if fix is not None:
                why = f"belong to fix {fix.priority}"
            parts.append(f"{t.format_duration(ns / self.a.step_count)} {where} {why}")
        return "; ".join(parts)

    def of_part(self, part: str, kind: str) -> str:
        """Say why there is none for a part, or a kind of it: a note says so, the fix gains nothing,
        or it is too little for the rules that look at it."""
        for note in self.report.notes:
            if self.is_about(note, part) or self._rule_looks(note, kind):
                return f"{explain_note(note)} (note '{note.title}')"
        for finding in self.fired:
            if self._rule_looks(finding, kind):
                return f"in the replay a fix gains too little ('{finding.title}')"
        looking = [rule for rule in self.rules if kind in rule.looks_at]
        own = (rule.fill_thresholds((rule.looks_at[kind],))[0] for rule in looking)
        result = "; ".join(dict.fromkeys(own)) or REASONS.get(kind, NO_RULE)
        how = how_to_record_more("with_stack=True", self.a)
        stacks = kind == "unknown" and self.report.host and not self.a.trace.meta.with_stack
        return f"{result}; {how} shows it" if stacks and how else result

    def is_about(self, finding: Finding, part: str) -> bool:
        """Return whether a finding is about a part: its rule looks at it, or its fix touches most
        of it; without edits, one on all code of a place is about the host's own time."""
        if self._rule_looks(finding, part):
            return True
        if not finding.edits:
            return finding.subject == HOST_CODE and part in LAUNCH_CAUSES
        if part in ("communication", "copies", "memset"):
            return _touched_work(self.a, part, finding.edits) >= MIN_TOUCHED
        return _touched_idle(self.a, part, finding.edits) >= MIN_TOUCHED

    def _rule_looks(self, finding: Finding, kind: str) -> bool:
        return any(rule.id == finding.rule and kind in rule.looks_at for rule in self.rules)


def _touched_work(a: Analysis, part: str, edits: Sequence[Edit]) -> float:
    """Return the share of a class of exposed device time in which work runs that edits select."""
    exposed = getattr(a.breakdown, part)
    mask = np.zeros(a.trace.gpu.height, dtype=bool)
    for edit in edits:
        if edit.select.on == "gpu":
            mask |= selected_gpu(a, edit.select)
    work = a.trace.gpu.filter(pl.Series(mask))
    ts, dur = work["ts"].to_numpy(), work["dur"].to_numpy()
    touched = intersect(union(ts, ts + dur), exposed).total
    return float(touched / max(1, exposed.total))


def _touched_idle(a: Analysis, cause: str, edits: Sequence[Edit]) -> float:
    """Return the share of the idle time for a cause that edits select, or whose host work they
    do."""
    of_cause = (a.gaps["cause"] == cause).to_numpy()
    ts, dur = a.gaps["ts"].to_numpy(), a.gaps["dur"].to_numpy()
    touched = np.zeros(len(ts))
    for each in _idle_of(a, edits):
        touched = np.maximum(touched, each)
    return float(touched[of_cause].sum()) / max(1, int(dur[of_cause].sum()))


def _idle_of(a: Analysis, edits: Sequence[Edit]) -> Iterator[NDArray[Any]]:
    ts, dur = a.gaps["ts"].to_numpy(), a.gaps["dur"].to_numpy()
    for edit in edits:
        if edit.select.on == "gap":
            yield dur * selected_gaps(a, edit.select)
        elif edit.op == "drop_launch":
            yield dur * a.gaps["cause"].is_in(LAUNCH_CAUSES).to_numpy()
        elif edit.select.on == "host":
            _, begin, length = host_spans(a, edit.select)
            yield covered_length(ts, ts + dur, union(begin, begin + length))
