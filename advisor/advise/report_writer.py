"""Assembly of a report from findings and measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

import advisor
from advisor.advise.kernel_counters import (
    ANY_PROGRAM,
    build_counter_views,
    build_triton_views,
    profiling_command,
)
from advisor.advise.memory import build_memory_views, memory_of_rank
from advisor.advise.priority import MOSTLY_BUSY
from advisor.advise.recording_limits import (
    explain_lost_records,
    is_too_small,
    list_limits,
    one_off_costs,
    part_of_step,
)
from advisor.advise.report_charts import build_charts
from advisor.advise.report_fields import (
    build_ranks_view,
    build_recorded_view,
    energy_use,
    list_inputs,
    measure_fields,
    step_durations,
    step_time,
)
from advisor.advise.report_text import step_after_fixes
from advisor.advise.time_without_fix import find_time_without_fix
from advisor.advise.verdict import MIN_LEADING_ONE_OFF_SHARE, write_verdict
from advisor.core.auxiliary_inputs import CompileLog
from advisor.core.finding import Limit
from advisor.core.intervals import intersect, intervals_of
from advisor.core.report import Crash, Report, RuleText
from advisor.core.text import lower_first
from advisor.measure.steps.named_intervals import GRAPH_BREAK_CAUSES, graph_breaks, remove_breaks

if TYPE_CHECKING:
    from advisor.advise.priority import PrioritizedFindings
    from advisor.advise.rule_runner import RankFindings
    from advisor.core.finding import Finding, HotLine, SkippedCheck
    from advisor.core.rule import Rule
    from advisor.core.trace import Run
    from advisor.measure import Analysis
    from advisor.measure.ranks.summary_schema import RankSummary
    from advisor.replay.estimators import GainEstimator
    from advisor.replay.ranks.rank_comparison import RankComparison


def write_report(
    run: Run,
    analyses: Mapping[int, Analysis],
    checked: RankFindings,
    ranked: PrioritizedFindings,
    estimator: GainEstimator,
    rules: Sequence[Rule],
    hot: Sequence[HotLine] = (),
    problems: Sequence[str] = (),
    ranks: RankComparison | None = None,
    summaries: Sequence[RankSummary] = (),
) -> Report:
    """Write the report of the first rank, with findings on other ranks and across them. ``hot``:
    hottest lines of Python. ``problems``: faults of files next to the traces. ``ranks``: comparison
    of all ranks. ``summaries``: ranks that were measured elsewhere."""
    a = next(iter(analyses.values()))
    samples = {number: memory_of_rank(each, number) for number, each in analyses.items()}
    samples |= {each.rank: each.memory for each in summaries}
    memory_ranks = [each for _, each in sorted(samples.items()) if each is not None]
    limits = [*list_limits(a, run), *_explain_bounds(estimator, ranked.findings)]
    report = Report(
        version=advisor.__version__,
        status="limited",
        verdict="",
        inputs=list_inputs(run, analyses),
        findings=_without_shares(ranked.findings) if part_of_step(a) else ranked.findings,
        notes=ranked.notes,
        risks=ranked.risks,
        passed=checked.passed,
        not_checked=_merge_skipped_checks(checked.skipped),
        limits=[*(limit.text for limit in limits), *problems],
        main_limit=next((limit.name for limit in limits if limit.name), ""),
        ranks=build_ranks_view(analyses, ranks),
        step=step_time(a),
        step_durations=step_durations(a),
        crashes=find_crashes(run),
        recorded=build_recorded_view(
            a, None if run.recording is None else run.recording.manifest.program
        ),
        energy=energy_use(analyses),
        hot_lines=list(hot),
        rules=_list_rule_texts(rules, [*ranked.findings, *ranked.risks, *ranked.notes]),
        memory=build_memory_views(a),
        memory_ranks=memory_ranks if len(memory_ranks) > 1 else [],
        kernel_counters=build_counter_views(a, estimator),
        triton_kernels=build_triton_views(a),
        compilation=build_compile_log(a, estimator),
        flight=a.flight,
        network=a.trace.meta.network,
        **measure_fields(a),
    )
    command_line = None if run.recording is None else run.recording.manifest.shell_command
    if command_line is not None:
        lists = {"findings": report.findings, "notes": report.notes, "risks": report.risks}
        report = replace(
            report, **{name: _with_command(command_line, items) for name, items in lists.items()}
        )
    report = _with_next_steps(
        report, a, rules, checked.findings, profiling_command(report, a, command_line)
    )
    remaining_share = step_after_fixes(report) / report.step_ns if report.step_ns else 1.0
    edits = [edit for finding in ranked.advice for edit in finding.edits]
    report = replace(report, replay=estimator.describe_replay(edits, remaining_share))
    sharing = {rule.id for rule in rules if rule.verdict_role == "shared GPU"}
    for note in (each for each in report.notes if each.rule in sharing):
        sharing_note = lower_first(note.summary).rstrip(".")
        report = replace(report, scope=replace(report.scope, device_shared=sharing_note))
    status, text = write_verdict(report, a, rules)
    report = replace(report, status=status, verdict=text)
    return replace(report, charts=build_charts(report))


def _without_shares(findings: Sequence[Finding]) -> list[Finding]:
    """Return findings on a part of a step without shares of that part."""
    return [
        replace(
            f,
            severity="info" if f.severity == "info" else "warning",
            impact=f.impact and replace(f.impact, share=None),
        )
        for f in findings
    ]


def _with_next_steps(
    report: Report,
    a: Analysis,
    rules: Sequence[Rule],
    findings: Sequence[Finding],
    command: Sequence[str] | None,
) -> Report:
    """Return the report with time that no finding covers, and the ``command`` that profiles slow
    kernels. Both are left out if they say nothing about the step."""
    is_start_up = not report.findings and one_off_costs(a).share >= MIN_LEADING_ONE_OFF_SHARE
    if not is_start_up and not part_of_step(a):
        report = replace(report, without_fix=find_time_without_fix(report, a, rules, findings))
    if is_start_up:
        report = replace(report, inference=None)  # its passes are not typical
    is_waiting = (
        a.unprofiled_busy_share or 0.0
    ) < MOSTLY_BUSY  # faster kernels would only wait longer
    if command is not None and not is_too_small(a) and not is_start_up and not is_waiting:
        report = replace(report, profile_kernels=list(command))
    return report


def _with_command(line: str, findings: Sequence[Finding]) -> list[Finding]:
    """Insert the run's own command line into code that starts a program."""
    return [
        replace(f, code=f.code.replace(ANY_PROGRAM, line), fix=f.fix.replace(ANY_PROGRAM, line))
        for f in findings
    ]


def _list_rule_texts(rules: Sequence[Rule], findings: Sequence[Finding]) -> list[RuleText]:
    """Return the descriptions of the rules of these findings."""
    rule_ids = {finding.rule for finding in findings}
    return [
        RuleText(
            id=rule.id, title=rule.title, category=str(rule.category), paragraphs=rule.paragraphs()
        )
        for rule in rules
        if rule.id in rule_ids
    ]


def _explain_bounds(estimator: GainEstimator, findings: Sequence[Finding]) -> list[Limit]:
    """Say why gains are not replayed. Empty if they are, or if there are no findings."""
    if not findings or not estimator.reason:
        return []
    text = f"Gains are exposed time, not replayed: {estimator.reason}."
    return [Limit(text, "gains not replayed")]


def _merge_skipped_checks(items: Sequence[SkippedCheck]) -> list[SkippedCheck]:
    """Merge skipped checks that have the same reason."""
    merged: dict[tuple[str, str], SkippedCheck] = {}
    for item in items:
        key = (item.why, item.record)
        if key in merged:
            entry = merged[key]
            what = entry.what if item.what in entry.what else f"{entry.what}; {item.what}"
            rules = entry.rule if item.rule in entry.rule else f"{entry.rule}, {item.rule}"
            item = replace(entry, what=what, rule=rules)
        merged[key] = item
    return list(merged.values())


MAX_BREAKS = 20
"""Maximum number of graph breaks whose gain is replayed."""


def build_compile_log(a: Analysis, estimator: GainEstimator) -> CompileLog | None:
    """Return the logs of torch.compile, with the cost of each graph break in the trace's steps."""
    log = a.trace.meta.compilation
    if log is None or a.record_only or a.device_id is None:
        return log
    times = {row["name"]: row for row in a.hot_kernels.iter_rows(named=True)}
    kernels = [
        replace(each, calls=row["count"] / a.step_count, ns=row["dur"] / a.step_count)
        if (row := times.get(each.name)) is not None
        else each
        for each in log.kernels
    ]
    log = replace(log, kernels=sorted(kernels, key=lambda each: -(each.ns or 0.0)))
    if explain_lost_records(a):
        return log
    gaps = a.gaps.filter(a.gaps["cause"].is_in(GRAPH_BREAK_CAUSES))
    idle = intervals_of(gaps)
    breaks = []
    for index, each in enumerate(log.breaks):
        break_spans = graph_breaks(a, tuple(each.frames)) if each.frames else None
        if index < MAX_BREAKS and break_spans is not None and break_spans.total:
            each = replace(
                each,
                idle_ns=intersect(idle, break_spans).total / a.step_count,
                gain_ns=estimator.gain_range([remove_breaks(tuple(each.frames))]).gain,
            )
        breaks.append(each)
    return replace(log, breaks=breaks)


def find_crashes(run: Run) -> list[Crash]:
    """Return the crashes of ranks in order of time, without interruptions by the user."""
    result = []
    for number, record in (run.recording.ranks if run.recording is not None else {}).items():
        ends = [event for event in record.events if event.kind == "end"]
        if not ends or ends[-1].data.get("reason") != "exception":
            continue
        end = ends[-1]
        message = end.data.get("message") or end.data.get("text")
        steps = end.data.get("steps")
        crash = Crash(
            rank=number,
            exception=str(end.data.get("exception") or "an exception")[:100],
            message=str(message)[:300] if message else None,
            steps=steps if isinstance(steps, int) and not isinstance(steps, bool) else None,
        )
        end_ns, perf_ns, unix_ns = end.t, record.rank.anchor_perf_ns, record.rank.anchor_unix_ns
        if perf_ns is not None and unix_ns is not None:
            end_ns += unix_ns - perf_ns
        result.append((end_ns, crash))
    return [crash for _, crash in sorted(result, key=lambda item: item[0])]
