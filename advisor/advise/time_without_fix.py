"""Parts of the step's bar that no finding covers although they are as long as a listed gain, and
why no fix is offered for each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.advise.finding_text import explain_note
from advisor.advise.impact import MIN_GAIN_SHARE, WARNING_SHARE
from advisor.advise.program_wording import ACTIVITIES, ask_to_record, how_to_record_more, tool_of
from advisor.advise.recording_limits import explain_lost_records, is_too_small
from advisor.core import text as t
from advisor.core.finding import HOST_CODE, Edit, Finding
from advisor.core.intervals import covered_length, intersect, union
from advisor.core.report import Report
from advisor.core.report_time import TimeWithoutFix
from advisor.core.rule import Rule
from advisor.measure import Analysis
from advisor.replay.exposed_time import LAUNCH_CAUSES
from advisor.replay.selection import host_spans, selected_gaps, selected_gpu

MIN_UNEXPLAINED_SHARE: Final = 2 * MIN_GAIN_SHARE
"""Minimum share of the step at which a part is mentioned."""
MIN_TOUCHED_SHARE: Final = 0.5
"""Minimum share of a part that a finding's fix changes, for the finding to cover the part."""
MIN_DIRECTION_SHARE: Final = 0.1
"""Minimum share of the exposed copies at which a direction has a reason of its own."""
DIRECTIONS: Final = {
    "HtoD": "to the GPU", "DtoH": "to the CPU", "DtoD": "within the GPU", "PtoP": "between GPUs",
}  # fmt: skip
REASONS: Final = {
    "unknown": "the host's work in this time is not recorded",
    "compile": "only first calls take this time, not later steps",
    "DtoH": "the host needs these values",
}
"""Reasons for a part that do not depend on the rules."""
STACKS: Final = "with_stack=True"
OPERATORS_TOO: Final = f"{ACTIVITIES} and {STACKS}"
"""Option that records what the host does, and options for a trace without operators."""
NO_RULE: Final = "advisor has no rule for it"


HOST_PARTS = ("loader",)
"""Classes of host time of a program on the CPU that count: in others the program computes."""


def find_time_without_fix(
    report: Report, a: Analysis, rules: Sequence[Rule], fired: Sequence[Finding]
) -> list[TimeWithoutFix]:
    """Return the parts of the bar that no ranked or folded finding covers, although they are as
    long as the smallest listed gain or a warning's gain. Parts with the same reason are merged. The
    end of the recording and the profiler do not count. Empty if records are lost, or if the trace
    is too small for advice. ``fired``: all findings of the rules, including those the report leaves
    out."""
    if explain_lost_records(a) or is_too_small(a):
        return []
    step_ns, framework = report.scope.step_ns, report.scope.framework
    gains = [
        f.impact.gain_ns
        for f in report.findings
        if f.priority and f.impact and f.impact.currency == "step_time" and f.impact.gain_ns
    ]
    min_ns = max(MIN_UNEXPLAINED_SHARE * step_ns, min([WARNING_SHARE * step_ns, *gains]))
    if report.scope.device is None:
        parts = [
            (part.name, t.host_label(part.name, framework), part.ns, part.share)
            for part in report.host
            if part.name in HOST_PARTS
        ]
    else:
        parts = [
            (part.name, t.CLASS_LABELS.get(part.name, part.name), part.ns, part.share)
            for part in report.time
            if part.name not in ("compute", "idle")
        ]
        parts += [
            (part.cause, t.idle_label(part, framework), part.ns, part.share)
            for part in report.idle
            if part.cause not in ("end", "profiler")
        ]
    reasons = _Reasons(report, a, rules, fired)
    result: dict[str, TimeWithoutFix] = {}
    for name, label, ns, share in parts:
        if ns < min_ns or any(reasons.is_about(f, name) for f in report.findings):
            continue
        if not (
            reason := reasons.explain_copies()
            if name == "copies"
            else reasons.explain_part(name, name)
        ):
            continue
        part = TimeWithoutFix([label], ns, share, reason)
        if (previous := result.get(reason)) is not None:
            part = TimeWithoutFix(
                [*previous.labels, label], previous.ns + ns, previous.share + share, reason
            )
        result[reason] = part
    return list(result.values())


@dataclass(frozen=True)
class _Reasons:
    """Reasons why no fix is offered for parts of the time."""

    report: Report
    a: Analysis
    rules: Sequence[Rule]
    fired: Sequence[Finding]

    def explain_copies(self) -> str:
        """Say why copies have no fix, by direction. Empty if findings cover all copies."""
        table = self.a.copies.group_by(pl.col("copy").cast(pl.String)).agg(pl.col("exposed").sum())
        total_ns = max(1, int(table["exposed"].to_numpy().sum()))
        parts = []
        for direction, ns in table.sort("exposed", descending=True).iter_rows():
            direction_text = DIRECTIONS.get(direction)
            if direction_text is None or ns < MIN_DIRECTION_SHARE * total_ns:
                continue
            why = f"({self.explain_part('copies', direction)})"
            ranked = (f for f in self.report.findings if f.priority is not None)
            fix = next((f for f in ranked if self._rule_looks(f, direction)), None)
            if fix is not None:
                why = f"belong to fix {fix.priority}"
            parts.append(f"{t.format_duration(ns / self.a.step_count)} {direction_text} {why}")
        return "; ".join(parts)

    def explain_part(self, part: str, kind: str) -> str:
        """Say why a part, or a kind of it, has no fix: a note says so, the fix gains nothing, or
        the part is too small for the rules that look at it."""
        for note in self.report.notes:
            if self.is_about(note, part) or self._rule_looks(note, kind):
                return explain_note(note)
        for finding in self.fired:
            if self._rule_looks(finding, kind):
                return f"to {t.lower_first(t.first_clause(finding.fix))} gains too little"
        rules = [rule for rule in self.rules if kind in rule.looks_at]
        texts = (rule.fill_thresholds((rule.looks_at[kind],))[0] for rule in rules)
        result = "; ".join(dict.fromkeys(texts)) or REASONS.get(kind, NO_RULE)
        lacks_operators = all(part.name != "dispatch" for part in self.report.host)
        lacks_operators &= tool_of(self.a.trace.meta) is None
        recording = how_to_record_more(OPERATORS_TOO if lacks_operators else STACKS, self.a)
        needs_stacks = kind == "unknown" and self.report.host and not self.a.trace.meta.with_stack
        return f"{result}. {ask_to_record(recording)}" if needs_stacks and recording else result

    def is_about(self, finding: Finding, part: str) -> bool:
        """Return whether a finding covers a part: its rule looks at the part, or its fix touches
        most of it. A finding without edits on all code of a place covers the host's own time."""
        if self._rule_looks(finding, part) or (part == "loader" and finding.category == "input"):
            return True
        if not finding.edits:
            return finding.subject == HOST_CODE and part in LAUNCH_CAUSES
        if part in ("communication", "copies", "memset"):
            return _measure_touched_work(self.a, part, finding.edits) >= MIN_TOUCHED_SHARE
        return _measure_touched_idle_time(self.a, part, finding.edits) >= MIN_TOUCHED_SHARE

    def _rule_looks(self, finding: Finding, kind: str) -> bool:
        return any(rule.id == finding.rule and kind in rule.looks_at for rule in self.rules)


def _measure_touched_work(a: Analysis, part: str, edits: Sequence[Edit]) -> float:
    """Return the share of a class of exposed device time in which the edits' work runs."""
    exposed = getattr(a.breakdown, part)
    mask = np.zeros(a.trace.gpu.height, dtype=bool)
    for edit in edits:
        if edit.select.on == "gpu":
            mask |= selected_gpu(a, edit.select)
    work = a.trace.gpu.filter(pl.Series(mask))
    ts, dur = work["ts"].to_numpy(), work["dur"].to_numpy()
    touched = intersect(union(ts, ts + dur), exposed).total
    return float(touched / max(1, exposed.total))


def _measure_touched_idle_time(a: Analysis, cause: str, edits: Sequence[Edit]) -> float:
    """Return the share of a cause's idle time whose gaps or host work the edits select."""
    of_cause = (a.gaps["cause"] == cause).to_numpy()
    ts, dur = a.gaps["ts"].to_numpy(), a.gaps["dur"].to_numpy()
    touched = np.zeros(len(ts))
    for each in _iterate_touched_gaps(a, edits):
        touched = np.maximum(touched, each)
    return float(touched[of_cause].sum()) / max(1, int(dur[of_cause].sum()))


def _iterate_touched_gaps(a: Analysis, edits: Sequence[Edit]) -> Iterator[NDArray[Any]]:
    ts, dur = a.gaps["ts"].to_numpy(), a.gaps["dur"].to_numpy()
    for edit in edits:
        if edit.select.on == "gap":
            yield dur * selected_gaps(a, edit.select)
        elif edit.op == "drop_launch":
            yield dur * a.gaps["cause"].is_in(LAUNCH_CAUSES).to_numpy()
        elif edit.select.on == "host":
            _, start, length = host_spans(a, edit.select)
            yield covered_length(ts, ts + dur, union(start, start + length))
