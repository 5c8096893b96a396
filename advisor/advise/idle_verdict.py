"""Sentences of a verdict on why the GPU idles, and on what to record if that is unknown."""

import polars as pl

from advisor.advise.program_wording import ACTIVITIES, ask_to_record, how_to_record_more
from advisor.advise.recording_limits import LATER_STEPS, schedule_of
from advisor.advise.verdict_parts import MAJORITY_SHARE, MAX_HEALTHY_STEP_RATIO
from advisor.core import labels
from advisor.core import text as t
from advisor.core.finding import Finding
from advisor.core.intervals import covered_length
from advisor.core.report import Report
from advisor.core.report_time import IdleCause
from advisor.measure import Analysis
from advisor.measure.host.gaps import queued_idle_ns

MIN_IDLE_SHARE = 0.2
"""Minimum share of the step at which the verdict names a second cause of idle time."""


def explain_idle_without_fix(report: Report, a: Analysis) -> str:
    """Say why the GPU idles without a known fix, and how to record more about it."""
    causes = [part for part in report.idle if part.share >= MIN_IDLE_SHARE][:2]
    causes = causes or list(report.idle[:1])
    if not causes:
        return "."
    if [part.cause for part in causes] == ["unknown"]:
        return f". {_explain_unknown_idle(report, a, causes[0].share)}"
    framework, meta = report.scope.framework, a.trace.meta
    named = [
        f"{t.idle_label(part, framework)}{_name_sampled(part)} ({t.format_share(part.share)}"
        for part in causes
    ]
    named[0] += f" of the {report.per}"
    named_causes = {part.cause for part in causes}
    recording = how_to_record_more("with_stack=True", a)
    later = f" after a few steps{schedule_of(meta, ': ', LATER_STEPS)}" * (
        "compile" in named_causes
    )
    more = f" with {recording}" if "unknown" in named_causes and recording else ""
    advice = "No rule of advisor finds a fix with a significant gain."
    if later or more:
        advice = f"Record{later}{',' * bool(later and more)}{more}."
    advice = _name_longest_range(report) * ("unknown" in named_causes) + advice
    scope = report.scope
    if (
        "compile" in named_causes
        and scope.step_max_ns > MAX_HEALTHY_STEP_RATIO * scope.step_min_ns > 0
    ):
        shortest, steps = (
            t.format_duration(scope.step_min_ns),
            t.count_noun(scope.steps_used, "step"),
        )
        advice = f"Some of the {steps} compile: the shortest takes {shortest}. {advice}"
    idle_share = sum(part.share for part in report.idle)
    are_most = sum(part.share for part in causes) > MAJORITY_SHARE * idle_share
    most = "Most" if are_most else "The largest part"
    return f". {most} of its idle time: {') and '.join(named)}). {advice}"


def _name_longest_range(report: Report) -> str:
    """Name the program's range that takes longest. Empty if none takes much of the time."""
    longest = max(report.ranges, key=lambda each: each.share, default=None)
    if longest is None or longest.share < MIN_RANGE_SHARE:
        return ""
    name, share = labels.shorten(labels.clean(longest.name), 48), t.format_share(longest.share)
    return f"Longest range: {name} ({share}). "


MIN_RANGE_SHARE = 0.1
"""Minimum share of the recording at which a range of the host is named."""


def explain_idle(report: Report, a: Analysis) -> str:
    """Say why the GPU idles, or what to record if that is unknown. Only if this idle time is longer
    than what all fixes gain, and than any work, and if identical kernels do not vary."""
    if a.varying_kernels.are_most:
        return ""
    gain = sum(map(_compute_marginal_share, report.findings))
    largest = max([gain, *(part.share for part in report.time if part.name != "idle")])
    share = sum(part.share for part in report.idle if part.cause == "unknown")
    if share > largest:
        return f" {_explain_unknown_idle(report, a, share)}"
    on_cpu = [part for part in report.idle if part.cause in _ON_CPU]
    if sum(part.share for part in on_cpu) <= largest:
        waits = sum(part.share for part in report.idle if part.cause == "dispatch")
        operators = _name_blocking_calls(a) if waits >= max(gain, MIN_IDLE_SHARE) else ""
        return f" {operators}" * bool(operators)
    named = [part for part in on_cpu if part.share >= MIN_ON_CPU_SHARE]
    causes = t.list_names(
        f"{t.format_share(part.share)}{f' of the {report.per}' * (part is named[0])} during "
        f"{_ON_CPU[part.cause]}{_name_sampled(part)}"
        for part in named
    )
    return f" The GPU idles for {causes}."


def _compute_marginal_share(finding: Finding) -> float:
    """Return what a ranked fix saves after the fixes before it, as a share of the step."""
    impact = finding.impact
    if finding.priority is None or impact is None or not impact.gain_ns:
        return 0.0
    after = impact.gain_ns if finding.marginal_gain_ns is None else finding.marginal_gain_ns
    return (impact.share or 0.0) * after / impact.gain_ns


_ON_CPU = {"host_code": "the program's CPU code", "communication": "MPI calls"}
"""Causes of idle time for which no rule has a fix."""
MIN_ON_CPU_SHARE = 0.05
"""Minimum share of the step at which a cause of ``_ON_CPU`` is named."""


def _name_sampled(part: IdleCause) -> str:
    """Name the functions sampled during this idle time. Empty without samples."""
    names = [
        f"{labels.shorten(each.name, 40)} {t.format_share(each.share)}" for each in part.functions
    ]
    return f" ({', '.join(names)})" if names else ""


def _explain_unknown_idle(report: Report, a: Analysis, share: float) -> str:
    """Say that the trace does not show why the GPU idles for this share, and what to record. Stacks
    cannot explain idle time while work is queued for the GPU."""
    idle = f"The trace does not show why the GPU idles for {t.format_share(share)}"
    idle += f" of the {report.per}"
    recording = how_to_record_more("with_stack=True" if report.host else ACTIVITIES, a)
    recording = f"{ask_to_record(recording)}." if recording else ""
    recording = " ".join(filter(None, [_name_blocking_calls(a), recording]))
    queued = queued_idle_ns(a) / max(a.span_ns, 1)
    if queued < MIN_QUEUED_SHARE:
        return " ".join(part for part in (f"{idle}.", recording) if part)
    why = "events were filtered out, or another process uses the GPU"
    if share - queued < MIN_QUEUED_SHARE:
        return f"{idle} while work is queued for it: {why}. {UNFILTERED}"
    return (
        f"{idle}; {t.format_share(queued)} is with work queued. "
        f"{UNFILTERED_WITH_STACKS if 'with_stack' in recording else UNFILTERED}"
    )


def _name_blocking_calls(a: Analysis) -> str:
    """Name operators that block the host for long in a call or two per step, with little recorded
    inside. Calls that prepare for new shapes do not count. Empty if there are none."""
    if a.trace.main_thread is None:
        return ""
    cpu = a.trace.cpu.with_row_index("row")
    inside = cpu.group_by("parent").agg(pl.col("dur").sum().alias("inside"))
    ts = cpu["ts"].to_numpy()
    ops = cpu.filter(
        (pl.col("kind") == "op") & (pl.col("thread") == a.trace.main_thread),
        pl.Series(covered_length(ts, ts + 1, a.steps.host_spans) > 0),
        ~pl.col("row").is_in(a.new_shape_calls["host"].implode()),
    ).join(inside, left_on="row", right_on="parent", how="left")
    self_time = pl.col("dur") - pl.col("inside").fill_null(0)
    long_calls = ops.with_columns(self_ns=self_time).filter(
        pl.col("self_ns") >= MIN_QUEUED_SHARE * a.step_ns
    )
    table = (
        long_calls.group_by(pl.col("name").cast(pl.String))
        .agg(pl.col("self_ns").sum())
        .sort("self_ns")
    )
    named = [
        f"{labels.shorten(labels.clean(name), 40)} ({t.format_duration(ns / a.step_count)} per "
        f"{a.per})"
        for name, ns in table.reverse().head(2).iter_rows()
        if ns >= MIN_IDLE_SHARE / 2 * a.span_ns
    ]
    return f"A few calls block the host: {' and '.join(named)}." if named else ""


MIN_QUEUED_SHARE = 0.05
"""Minimum share of the step at which idle time with queued work is reported on its own."""
UNFILTERED = "Record all activities on a free GPU."
UNFILTERED_WITH_STACKS = "Record stacks on a free GPU."
