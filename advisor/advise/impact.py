"""Gain of a finding, with its range, severity and confidence. Only this module computes them.

A gain is a replay of the steps with the finding's edits in it. Where a window cannot be replayed
well (``WindowReplayer.unusable_reason``), an upper bound replaces it and is marked as one: the
exposed time of the events that the edits touch. That is device work that nothing else covers, or
host time during which the device is idle."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import ceil, isfinite, sqrt

import numpy as np
import polars as pl
from msgspec.structs import replace

from advisor.advise.recording_limits import explain_lost_records
from advisor.advise.report_fields import MIN_APART_SHARE, step_time
from advisor.core import text as t
from advisor.core.finding import (
    GUESSED_STEP_SOURCES,
    Finding,
    Impact,
    RangeCause,
    Severity,
    impact_without_gain,
)
from advisor.core.intervals import Intervals, intersect, intervals_of, subtract, union_of
from advisor.core.report_steps import StepTime
from advisor.core.rule import Evidence, Rule
from advisor.measure import Analysis
from advisor.measure.host.gaps import device_waits
from advisor.measure.steps.run_steps import RunSteps
from advisor.replay.estimators import REPLAY, BoundEstimator, GainEstimator
from advisor.replay.exposed_time import (
    leaves_device_work,
    remaining_device_time,
    selected_host_time,
)
from advisor.replay.host_nodes import ready_batch_ns
from advisor.replay.ledger import GainInterval, widened_by_rule, worst_case
from advisor.replay.operations import GRAPH_LAUNCH_NS
from advisor.replay.window_replayer import GainRange
from advisor.rules.support.loader_waits import LOADING_CALL, OUTSIDE_OPERATORS

MIN_GAIN_SHARE = 0.01
"""Minimum gain of a ranked finding, as a share of the step. Smaller ones are notes, because two
profiled runs differ by about as much."""
CRITICAL_SHARE, WARNING_SHARE = 0.20, 0.05
"""Minimum gains of critical findings and of warnings, as shares of the step (XProf's for input)."""
UNSEEN_SHARE = 0.05
"""Minimum gain, as a share of the step, after which loader workers that keep up now may not."""
MAX_PROCESSES = 64
"""Maximum number of processes that is advised."""
UNPROVEN_CONFIDENCE = 0.7
"""Factor on the confidence of a rule proven on synthetic examples only. The range of its gain is as
wide as the largest error of a prediction so far. These findings compete with the others."""
ATYPICAL_WINDOW_CONFIDENCE = 0.85
"""Factor on the confidence of a finding from a window that is not typical of its run."""

# -- confidence ------------------------------------------------------------------------------------


def lower_confidence(finding: Finding, factor: float, why: str) -> Finding:
    """Return the finding with its confidence multiplied by ``factor``, and the reason noted."""
    return replace(
        finding,
        confidence=finding.confidence * factor,
        confidence_notes=[*finding.confidence_notes, why],
    )


MAX_NEAR_DISTANCE = 0.05
"""Maximum distance to a threshold, as a share of it, at which a finding notes how near it is."""


def _note_near_limit(finding: Finding) -> Finding:
    """Note a measured value that is so close to its threshold that it barely counts."""
    near = next(
        (
            each
            for each in finding.evidence
            if each.threshold
            and isinstance(each.value, float)
            and abs(each.value / each.threshold - 1) <= MAX_NEAR_DISTANCE
        ),
        None,
    )
    if near is None:
        return finding
    value, limit = (t.format_value(x, near.unit) for x in (near.value, near.threshold))
    note = f"close to its limit of {limit}: {near.label} {value}"
    return replace(finding, confidence_notes=[*finding.confidence_notes, note])


def weigh_confidence(finding: Finding, rule: Rule, a: Analysis) -> Finding:
    """Lower the finding's confidence for weaknesses of its rule and of the window."""
    finding = _note_near_limit(finding)
    if rule.validation == "synthetic":
        why = "not proven on real traces, on synthetic examples only"
        finding = lower_confidence(finding, UNPROVEN_CONFIDENCE, why)
    if a.trace.meta.example or rule.reads_record or a.only_input:
        return finding
    marked = a.steps.source != "whole trace"
    if not marked:
        why = "no steps in the trace: start-up and shut-down may be inside"
        finding = lower_confidence(finding, 0.8, why)
    elif a.steps.source in GUESSED_STEP_SOURCES:
        why = "nothing marks the steps, they are where the device's work repeats"
        finding = lower_confidence(finding, 0.9, why)
    if marked and a.step_count < 3:
        finding = lower_confidence(
            finding, 0.85, f"only {t.count_noun(a.step_count, 'step')} measured"
        )
    if a.trace.meta.truncated:
        finding = lower_confidence(finding, 0.9, "the file is truncated")
    if a.varying_kernels.are_most:
        finding = lower_confidence(finding, 0.6, "identical kernels differ in duration")
    return finding


SEEN = "seen on "
"""Beginning of the note on how many ranks have a finding."""


def note_rank_counts(
    findings: Iterable[Finding], counts: Mapping[str, int], ranks: int
) -> list[Finding]:
    """Note on each finding how many of the ranks have it."""
    return [
        replace(
            finding,
            confidence_notes=[
                *finding.confidence_notes,
                f"{SEEN}{counts[finding.rule]} of {ranks} ranks",
            ],
        )
        for finding in findings
    ]


# -- gain and range --------------------------------------------------------------------------------


def estimate_impact(finding: Finding, a: Analysis, estimator: GainEstimator) -> Finding:
    """Return the finding with its impact: the rule's own figure (memory, risk), or the time that
    its edits save. If the edits change a rank that is not replayed, the rule's own figure is
    used."""
    rule_impact = finding.impact
    if rule_impact is not None and rule_impact.currency == "step_time" and finding.edits:
        if all(edit.rank in estimator.ranks for edit in finding.edits):
            rule_impact = None
        else:
            finding = replace(finding, edits=[])
    if rule_impact is not None:
        if rule_impact.currency == "step_time":
            finding = replace(finding, severity=severity_of_share(rule_impact.share))
        return finding
    if not finding.edits:
        return _without_estimate(finding, "no gain can be estimated from this trace")
    if why := explain_lost_records(a):
        return replace(_without_estimate(finding, why), edits=[])
    return _estimate_edits(finding, a, estimator)


def _without_estimate(finding: Finding, why: str) -> Finding:
    return replace(finding, impact=impact_without_gain(why))


def _estimate_edits(finding: Finding, a: Analysis, estimator: GainEstimator) -> Finding:
    """Estimate the gain of a finding's edits, and widen its range by past errors."""
    saved = estimator.gain_range(finding.edits)
    if finding.offloaded_ns is not None:
        hand_over = ready_batch_ns(a.trace, a.step_ns, "low")
        is_most = saved.gain - saved.low < hand_over
        low_by: RangeCause = "hand-over" if is_most else saved.low_by
        saved = saved._replace(low=max(0.0, saved.low - hand_over), low_by=low_by)
    bound = min(saved.bound, a.step_ns)
    if a.device_id is None and finding.shown_time is not None:
        # an edit selects operators by name, and so may select more calls than the fix changes
        bound = min(bound, max(saved.gain, float(finding.shown_time.value or 0)))
        saved = saved._replace(high=min(saved.high, bound), bound=bound)
    if finding.validation == "synthetic" and not estimator.is_calibrated(finding.edits):
        low, high = worst_case(saved.low, saved.high, bound)
        saved = saved._replace(low=low, high=high, low_by="not proven", high_by="not proven")
    device = "" if a.device is None or a.device.name is None else a.device.name
    interval = GainInterval(saved.low, saved.high)
    interval, why = widened_by_rule(finding.rule, device, saved.gain, interval, bound)
    if why:
        saved = saved._replace(
            low=interval.low,
            high=interval.high,
            low_by="past" if interval.low < saved.low else saved.low_by,
            high_by="past" if interval.high > saved.high else saved.high_by,
        )
        finding = lower_confidence(finding, 1.0, f"{why}, and the range allows for that")
    operations = {(edit.op, edit.select.on) for edit in finding.edits}
    if finding.shown_time is not None and operations == {("scale", "gpu"), ("make_async", "host")}:
        # a gain beyond the time of these copies comes from earlier launches after them
        cost = float(finding.shown_time.value or 0)
        if cost < saved.low:
            saved = saved._replace(low=cost, low_by="late launches")
    finding = with_gain(finding, saved, a, estimator.method)
    share = finding.impact.share if finding.impact is not None else None
    if estimator.unseen_loader and (share or 0.0) >= UNSEEN_SHARE:
        finding = lower_confidence(
            finding,
            0.85,
            "the loader's workers keep up with these steps; the trace does not show whether they "
            "keep up with shorter ones",
        )
    return finding


def with_gain(
    finding: Finding,
    saved: GainRange,
    a: Analysis,
    method: str,
    *,
    is_job_gain: bool = False,
) -> Finding:
    """Return the finding with a gain per step, and the severity that follows from it."""
    share = saved.gain / a.step_ns if a.step_ns else None
    impact = Impact(
        currency="step_time",
        gain_ns=round(saved.gain),
        low_ns=round(min(saved.low, saved.gain)),
        high_ns=None
        if finding.costs_more_than_recorded
        else round(max(saved.gain, min(saved.high, saved.bound))),
        share=share,
        method=f"lower bound ({method})" if finding.costs_more_than_recorded else method,
        kind="lower bound"
        if finding.costs_more_than_recorded
        else "replay"
        if method == REPLAY
        else "upper bound",
        per=a.per,
        bound_ns=round(max(saved.gain, saved.bound)) if isfinite(saved.bound) else None,
        low_by=saved.low_by,
        high_by=saved.high_by,
        is_job_gain=is_job_gain,
    )
    return replace(finding, impact=impact, severity=severity_of_share(share))


def severity_of_share(share: float | None) -> Severity:
    """Return critical, warning or info, by the share of the step that the fix saves."""
    if share is None or share < WARNING_SHARE:
        return "info"
    return "critical" if share >= CRITICAL_SHARE else "warning"


def gain_may_be_zero(finding: Finding, floor: float) -> bool:
    """Return whether a finding is unproven and may gain nothing, and must not call a run slow."""
    impact = finding.impact
    return (
        finding.validation == "synthetic"
        and impact is not None
        and impact.currency == "step_time"
        and (impact.low_ns or 0) < floor
    )


def may_matter(finding: Finding, step_ns: float) -> bool:
    """Return whether an unproven finding could gain enough for a warning."""
    impact = finding.impact
    return impact is None or (impact.high_ns or impact.gain_ns or 0) >= WARNING_SHARE * step_ns


DEVICE_PARTS = ("compute", "communication", "copying")


def without_gain(
    findings: Sequence[Finding],
    estimator: GainEstimator,
    a: Analysis,
    floor: float,
    before: Sequence[Finding] = (),
) -> list[Finding]:
    """Return findings without replayed gain whose exposed time is at least ``floor`` (ns per step),
    or enough for a warning at the high end of its range. Each says what sets the step's pace
    instead, and whether it may gain more after the fixes of ``before``. Other findings gain nothing
    by either estimate. Without a GPU, the host's own work sets the pace, and only a lack of cores
    can explain a finding without gain."""
    path = estimator.critical_path() if findings else {}
    if not path:
        return []
    capped = []
    bound = BoundEstimator(a)
    part, longest = max(path.items(), key=lambda item: item[1])
    share = t.format_share(longest / max(sum(path.values()), 1.0))
    who = t.path_label(part, a.trace.meta.framework)
    who = f"other {who}" if part in DEVICE_PARTS else who
    for finding in findings:
        if finding.other_rank or not finding.edits:
            continue
        exposed = bound.gain_range(finding.edits)
        launches = part == "host" and any(edit.op == "drop_launch" for edit in finding.edits)
        reason = f"{'other work of the host' if launches else who} sets the pace"
        reason = f"the fix gains little by itself, as {reason} ({share} of the critical path)"
        why = ""
        if part == "host" and a.device_id is None:
            free = None if a.run_steps is None else a.run_steps.free_cores
            if free is None or free >= 1 or finding.edits[0].op != "parallelize":
                continue
            reason = f"no core is free, so workers do not help{_advise_cheaper(finding)}"
            why = f"Workers do not shorten the {a.per}, as no core is free for them."
        elif part == "loader" and finding.edits[0].op == "parallelize":
            # work moved to workers takes the cores that the step computes on
            cores = "" if a.run_steps is None else _describe_used_cores(a.run_steps)
            cores = cores or "how many cores are free is not recorded"
            reason = f"{cores}, so workers do not help{_advise_cheaper(finding)}"
            why = (
                f"In the replay, workers do not shorten the {a.per}: {cores}. Make the loading "
                "itself cheaper, or measure workers: advisor try --only workers."
            )
        if exposed.gain >= floor or exposed.high >= max(floor, WARNING_SHARE * a.step_ns):
            explained = replace(finding, summary=f"{finding.summary} {why}".rstrip())
            capped.append(
                _without_estimate(
                    explained, f"{reason}{_describe_gain_after(finding, before, estimator, a)}"
                )
            )
    return capped


def _advise_cheaper(finding: Finding) -> str:
    """Advise to make loading cheaper, with the recorded call that takes most of it. Empty if the
    finding is of other work."""
    if finding.category != "input":
        return ""
    calls = (each for each in finding.evidence if each.label.startswith(LOADING_CALL))
    for call in calls:
        name = re.split(r" \(| per ", call.label.removeprefix(LOADING_CALL), maxsplit=1)[0]
        if name != OUTSIDE_OPERATORS:
            duration = t.format_value(call.value, call.unit)
            return f": make the loading cheaper ({name} takes {duration})"
    return ": make the loading cheaper"


def _describe_gain_after(
    finding: Finding, before: Sequence[Finding], estimator: GainEstimator, a: Analysis
) -> str:
    """Say that a finding may gain more after other fixes. Empty if it may not."""
    applied = [edit for each in before if estimator.overlaps(each) for edit in each.edits]
    if not applied or not estimator.overlaps(finding):
        return ""
    if estimator.marginal(finding.edits, applied) < WARNING_SHARE * a.step_ns:
        return ""
    return "; it may gain more after the fixes above: measure again then"


def _describe_used_cores(run_steps: RunSteps) -> str:
    """Say how many cores the run used: ``1.9 of 2 cores are used``. Empty if unknown."""
    cores, free = run_steps.rank_record.rank.cpus, run_steps.free_cores
    return "" if cores is None or free is None else f"{cores - free:.1f} of {cores} cores are used"


# -- work that moves to other processes ----------------------------------------------------------


def limit_to_cores(findings: Sequence[Finding], a: Analysis) -> list[Finding]:
    """Set the number of worker processes in findings that move work to them, to what the step needs
    after all fixes. Fewer cores limit the gain."""
    cores = None if a.rank_record is None else a.rank_record.rank.cpus
    left = a.step_ns - sum(f.marginal_gain_ns or 0 for f in findings if not f.other_rank)
    result = []
    for finding in findings:
        impact, moved = finding.impact, finding.offloaded_ns
        if moved is not None and impact is not None:
            after = min(left, a.step_ns - (impact.gain_ns or 0))
            workers = ceil(moved / max(after, moved / MAX_PROCESSES))
            if cores is not None and workers >= cores:
                workers = max(1, cores - 1)
            finding = _limit_gain(finding, max(0.0, a.step_ns - moved / workers), a.step_ns)
            finding = replace(
                finding,
                fix=finding.fix.replace("{workers}", str(workers)),
                code=finding.code.replace("{workers}", str(workers)),
                assumptions=[
                    text.replace("{workers}", t.count_noun(workers, "core"))
                    for text in finding.assumptions
                ],
            )
        result.append(finding)
    return result


def _limit_gain(finding: Finding, max_gain: float, step_ns: float) -> Finding:
    """Return the finding with its gain and range limited to ``max_gain``, ns per step."""
    impact = finding.impact
    if (
        impact is None
        or impact.gain_ns is None
        or max(impact.gain_ns, impact.high_ns or 0) <= max_gain
    ):
        return finding
    max_gain = round(max_gain)
    gain = min(impact.gain_ns, max_gain)
    changed = replace(
        impact,
        gain_ns=gain,
        low_ns=min(impact.low_ns or 0, max_gain),
        high_ns=None if impact.high_ns is None else min(impact.high_ns, max_gain),
        share=gain / step_ns,
        bound_ns=max_gain if impact.bound_ns is None else min(impact.bound_ns, max_gain),
    )
    return _change_marginal_gain(replace(finding, impact=changed), lambda ns: min(ns, max_gain))


# -- of the window, of the run ---------------------------------------------------------------------


def scale_to_run(
    findings: Sequence[Finding], a: Analysis, estimator: GainEstimator
) -> list[Finding]:
    """Scale gains found in a window to the run's own step. Gains that a rule derived from the
    record already refer to that step."""
    step = step_time(a)
    result = []
    for finding in findings:
        if finding.edits or finding.impact is None or not finding.impact.is_run_gain:
            of_ns = (estimator.reference_ns(finding.edits) if finding.edits else None) or a.step_ns
            finding = _convert_to_run(finding, step, a, of_ns)
            finding = _match_loading(finding, a)
            finding = _limit_to_phases(finding, a, step)
            finding = _leave_device_work(finding, a, step)
        result.append(_set_reference_share(finding, step))
    return result


def scales_to_run(
    findings: Sequence[Finding], a: Analysis, estimator: GainEstimator
) -> list[float]:
    """Return the ratio of each finding's gain in the run's own step to that in the window."""
    run_impacts = [finding.impact for finding in scale_to_run(findings, a, estimator)]
    impact_pairs = [(f.impact, in_run) for f, in_run in zip(findings, run_impacts, strict=True)]
    return [
        (in_run.gain_ns or 0) / in_window.gain_ns
        if in_window is not None and in_window.gain_ns and in_run is not None
        else 1.0
        for in_window, in_run in impact_pairs
    ]


REPEATED_WORK_SHARE = 0.02
"""Share by which the device work of a run's usual step may be less than the window's. Of seven runs
of device-bound H100 programs, six have steps 0 to 4% shorter than the window's work, and one 20%
shorter. The median is 1.4%."""


RECORDED_PHASES = ("data", "forward", "backward", "optimizer")
"""Phases of a step that the recorder times in every step, and marks in a window."""


def _limit_to_phases(finding: Finding, a: Analysis, step: StepTime | None) -> Finding:
    """Limit a gain and its range on a CPU to the time that the run's own step spends in the phases
    whose work the fix changes. Other programs may delay any phase of a short window."""
    run_steps, impact = a.run_steps, finding.impact
    if step is None or run_steps is None or a.device_id is not None or not finding.edits:
        return finding
    if impact is None or impact.is_job_gain or not impact.gain_ns:
        return finding
    on_host = [edit.select for edit in finding.edits if edit.select.on == "host"]
    if not on_host or not {edit.op for edit in finding.edits} <= {"scale", "remove"}:
        return finding
    changed_spans = union_of(*(selected_host_time(a, select) for select in on_host))
    other_spans = a.spans
    limit, other_ns = 0.0, step.reference_ns

    def changed_in_run(spans: Intervals, run_ns: float) -> float:
        in_window = spans.total / a.step_count
        changed_ns = intersect(changed_spans, spans).total / a.step_count
        return min(changed_ns * max(1.0, run_ns / max(in_window, 1.0)), run_ns)

    for phase in RECORDED_PHASES:
        is_phase = (a.trace.cpu["name"] == f"{t.RECORDER_RANGE}{phase}").fill_null(False)
        spans = intersect(intervals_of(a.trace.cpu, is_phase), other_spans)
        phase_ns = step.reference_ns * (run_steps.share(phase) or 0.0)
        limit += changed_in_run(spans, phase_ns)
        other_spans, other_ns = subtract(other_spans, spans), other_ns - phase_ns
    limit += changed_in_run(other_spans, max(0.0, other_ns))
    changed_ns = changed_spans.total / a.step_count
    limit += _ended_page_faults(a, changed_ns)
    usual_ns = changed_ns * min(1.0, step.reference_ns / a.step_ns)
    if impact.gain_ns > limit and limit < usual_ns:
        finding = _scale_gain(finding, limit / usual_ns)
    return _limit_gain(finding, limit, step.reference_ns)


def _leave_device_work(finding: Finding, a: Analysis, step: StepTime | None) -> Finding:
    """Limit a gain and its range to the step minus the device work that the fix leaves, as no step
    is shorter. Collectives of several ranks may end earlier, because they wait less."""
    impact = finding.impact
    if impact is None or impact.currency != "step_time" or not finding.edits or finding.other_rank:
        return finding
    step_ns = a.step_ns if step is None else step.reference_ns
    limit = max(0.0, step_ns - _device_work_left(a, [finding], step_ns))
    if any(edit.op == "drop_launch" for edit in finding.edits):
        # consecutive kernels of a graph start about one node's cost apart
        starts = GRAPH_LAUNCH_NS * int(a.in_window.sum()) / max(a.step_count, 1)
        finding = _limit_point_gain(finding, max(0.0, limit - starts), step_ns)
    if step is not None and not leaves_device_work(finding.edits):
        finding = _limit_point_gain(finding, limit, step_ns)
        limit += REPEATED_WORK_SHARE * (step_ns - limit)
    finding = _limit_gain(finding, limit, step_ns)
    impact = finding.impact
    if impact is not None and impact.high_ns is None and a.device_id is not None:
        # the fix may save more than is recorded, but not device work that stays
        high = round(max(limit, impact.gain_ns or 0))
        finding = replace(finding, impact=replace(impact, high_ns=high, high_by="device work"))
    return finding


def _device_work_left(
    a: Analysis, fixed: Sequence[Finding], step_ns: float, *, earlier: bool = False
) -> float:
    """Return the device work that the fixes leave in a step of ``step_ns``, ns. ``earlier``:
    include work launched before the recording, which no edit selects."""
    if a.device_id is None:
        return 0.0
    edits = [edit for finding in fixed for edit in finding.edits]
    is_job_gain = any(f.impact is not None and f.impact.is_job_gain for f in fixed)
    own_rank_only = all(edit.rank is None for edit in edits) and not is_job_gain
    remaining = remaining_device_time(a, edits, communication=own_rank_only)
    busy = a.breakdown.busy.total / max(a.step_count, 1)
    if earlier:
        remaining += max(0.0, busy - a.device_busy(a.in_window).total / max(a.step_count, 1))
    # the share also holds where the run's steps differ from the window's
    return remaining * step_ns / a.step_ns if busy > step_ns else remaining


def limit_together(findings: Sequence[Finding], a: Analysis) -> list[Finding]:
    """Limit what each ranked finding saves in the run's step after the findings before it. Together
    they leave the device work that none of their edits selects. A finding that then saves next to
    nothing is folded under the first."""
    step = step_time(a)
    remaining = step_ns = a.step_ns if step is None else step.reference_ns
    ranked: list[Finding] = []
    folded: list[Finding] = []
    fixed: list[Finding] = []
    for finding in findings:
        saved = finding.marginal_gain_ns
        if finding.priority is None:
            folded.append(finding)
            continue
        if saved is not None and not finding.other_rank:
            fixed.append(finding)
            device_work = _device_work_left(a, fixed, step_ns, earlier=bool(ranked))
            max_saving = max(0, round(remaining - device_work))
            if ranked and max_saving < MIN_GAIN_SHARE * step_ns <= saved:
                fixed.pop()
                folded.append(replace(finding, priority=None, folded_under=ranked[0].rule))
                continue
            finding = _change_marginal_gain(finding, partial(min, max_saving))
            remaining -= min(saved, max_saving)
        ranked.append(replace(finding, priority=len(ranked) + 1))
    return ranked + folded


def _limit_point_gain(finding: Finding, gain_ns: float, step_ns: float) -> Finding:
    """Limit the finding's gain to ``gain_ns``, but not the high end of its range."""
    impact = finding.impact
    if impact is None or impact.gain_ns is None or impact.gain_ns <= gain_ns:
        return finding
    limited = _limit_gain(finding, gain_ns, step_ns)
    assert limited.impact is not None
    ends = replace(limited.impact, high_ns=impact.high_ns, bound_ns=impact.bound_ns)
    return replace(limited, impact=ends, marginal_high_ns=finding.marginal_high_ns)


def _set_reference_share(finding: Finding, step: StepTime | None) -> Finding:
    """Return the finding with its gain as a share of the step that the report leads with."""
    impact = finding.impact
    if step is None or impact is None or impact.currency != "step_time" or impact.gain_ns is None:
        return finding
    share = impact.gain_ns / step.reference_ns
    severity = severity_of_share(share)
    return replace(finding, impact=replace(impact, share=share), severity=severity)


MIN_KEPT_WORK_SHARE = 0.4
"""Minimum time of other work in the run's step, as a share of its time at the same scale as the
whole step. The profiler may lengthen that work more than the work that a fix removes."""


def _convert_to_run(finding: Finding, step: StepTime | None, a: Analysis, of_ns: float) -> Finding:
    """Convert a gain in a step of ``of_ns`` to the run's step.

    Device work that a fix removes takes as long in both steps, and idle time of the device scales
    with the idle time of the step (:func:`_make_converter`). If the run's steps are longer, or if
    there is no device, a gain keeps its share of the step.

    The range widens for two unknowns. Work that a fix removes, on the device or in an operator on
    the host, may take as long without the profiler as in the window. And steps longer than the
    window's need not have more of the cause. It also widens by the sampling error of the few steps
    in a window."""
    impact = finding.impact
    if step is None or step.gain_scale is None or impact is None or impact.gain_ns is None:
        return finding
    if impact.currency != "step_time":
        return finding
    scale = step.ns / of_ns
    convert = _make_converter(finding, step, a, of_ns) or scale.__mul__
    low_ns = impact.gain_ns if impact.low_ns is None else impact.low_ns
    high_ns = impact.gain_ns if impact.high_ns is None else impact.high_ns
    low, high = min(convert(low_ns), scale * low_ns), max(convert(high_ns), scale * high_ns)
    if scale < 1 and (step.profiler_overhead is None or step.profiler_overhead >= MIN_APART_SHARE):
        work_left = (
            _device_work_left(a, [finding], step.ns)
            if a.device_id is not None
            else MIN_KEPT_WORK_SHARE * scale * max(0.0, of_ns - high_ns)
        )
        high = max(high, min(high_ns, step.ns - work_left))
    if scale > 1 + MIN_APART_SHARE:
        low = min(low, low_ns)
    error = _sampling_error(a)
    if impact.kind != "upper bound":
        low, high = low * (1 - error), high * (1 + error)
    if a.device_id is None and impact.bound_ns is not None:
        # no fix saves more than the work that it changes, in whichever step this takes longer,
        # and its share of the page faults that the window ended
        faults = _ended_page_faults(a, impact.bound_ns)
        kept_scale = MIN_KEPT_WORK_SHARE * min(1.0, step.ns / a.step_ns)
        other_work = kept_scale * max(0.0, a.step_ns - impact.bound_ns)
        bound = min(max(1.0, scale) * impact.bound_ns + faults, step.ns - other_work)
        if len(a.steps.used) < MIN_SAMPLED_STEPS:
            bound *= 1 + error
        high = min(high + faults, bound)
    finding = replace(
        finding,
        impact=replace(
            impact,
            gain_ns=round(convert(impact.gain_ns)),
            low_ns=round(low),
            high_ns=None if impact.high_ns is None else round(high),
            bound_ns=None
            if impact.bound_ns is None
            else round(max(high, convert(impact.bound_ns))),
        ),
    )
    finding = _change_marginal_gain(finding, lambda ns: round(convert(ns)))
    if not step.atypical:
        return finding
    why = "the profiled window is not like the rest of the run"
    return lower_confidence(finding, ATYPICAL_WINDOW_CONFIDENCE, why)


def _ended_page_faults(a: Analysis, work_ns: float) -> float:
    """Return the share of this work in the page faults that the window ended, ns per step."""
    saved_ns = None if a.run_steps is None else a.run_steps.saved_by_window
    return (saved_ns or 0.0) * min(1.0, work_ns / a.step_ns)


MIN_SAMPLED_STEPS = 3
"""Minimum number of a window's steps that show how much steps vary."""


def _sampling_error(a: Analysis) -> float:
    """Return the sampling error of the window's mean step, as a share of it: 1.28 standard errors,
    which cover four of five cases. If the window has too few steps, the run's own steps show how
    much they vary."""
    steps = a.steps.used["dur"].to_numpy().astype(float)
    known = steps
    if len(steps) < MIN_SAMPLED_STEPS:
        known = np.array([]) if a.run_steps is None else a.run_steps.dur[a.run_steps.used]
    if len(known) < MIN_SAMPLED_STEPS:
        return 0.0
    return min(1.0, 1.28 * float(known.std(ddof=1)) / (sqrt(len(steps)) * float(known.mean())))


def _make_converter(
    finding: Finding, step: StepTime, a: Analysis, of_ns: float
) -> Callable[[float], float] | None:
    """Return a function that converts a gain in a step of ``of_ns`` to the run's usual step. Device
    work that the edits touch scales with the run's device work, and idle time with the run's idle
    time. ``None`` if there are no edits, if the device hardly idles, if only idle time is touched
    and the run has none, or if the run's steps are clearly longer, for whatever reason."""
    if not finding.edits or a.device_id is None:
        return None
    busy = a.breakdown.busy.total / max(a.step_count, 1)
    if not busy < of_ns or step.ns > (1 + MIN_APART_SHARE) * of_ns:
        return None
    touched = max(0.0, busy - _device_work_left(a, [finding], a.step_ns))
    if not touched and busy >= step.ns:
        return None
    device_scale = min(1.0, step.ns / busy) if busy else 1.0
    idle_scale = max(0.0, step.ns - busy) / (of_ns - busy)

    def convert(gain_ns: float) -> float:
        on_device = min(gain_ns, touched)
        return device_scale * on_device + idle_scale * (gain_ns - on_device)

    return convert


def _change_marginal_gain(finding: Finding, change: Callable[[int], int]) -> Finding:
    """Return the finding with ``change`` applied to its marginal gain and its range."""
    names = ("marginal_gain_ns", "marginal_low_ns", "marginal_high_ns")
    gains = {name: getattr(finding, name) for name in names}
    return replace(finding, **{n: change(ns) for n, ns in gains.items() if ns is not None})


MIN_LOADING_RATIO = 1.25
"""Minimum ratio of the run's loading share to the window's at which a loader's gain is scaled to
the run's steps."""


def _match_loading(finding: Finding, a: Analysis) -> Finding:
    """Limit a loader fix's gain to the time that the run's own steps spend on getting data. If that
    is clearly more than in the window's steps, scale the gain up."""
    impact, run_steps = finding.impact, a.run_steps
    share = None if run_steps is None else run_steps.share("data")
    if run_steps is None or share is None or not any(e.op == "parallelize" for e in finding.edits):
        return finding
    if impact is None or impact.currency != "step_time" or impact.gain_ns is None:
        return finding
    step = run_steps.median or 0.0
    if not step:
        return finding
    max_gain = round(share * step)
    inside = _loading_share(a)
    if inside and share > MIN_LOADING_RATIO * inside and run_steps.used.sum() >= MIN_RUN_STEPS:
        finding = _scale_gain(finding, share / inside)
        evidence = Evidence("getting data, in the run's own steps", share * step, "ns", per="step")
        finding = replace(finding, evidence=[evidence, *finding.evidence])
        why = f"the run's own steps spend {share:.0%} on getting data, the window's steps "
        finding = lower_confidence(
            finding, 1.0, f"{why}{inside:.0%}: the gain is for the run's steps"
        )
        waits = device_waits(a)
        return _limit_gain(
            finding,
            max_gain if waits is None else min(max_gain, round(waits)),
            step,
        )
    if impact.gain_ns <= max_gain:
        return finding
    finding = _limit_gain(finding, max_gain, step)
    why = f"the run's own steps spend {share:.0%} on getting data, less than the window's steps"
    return lower_confidence(finding, 1.0, why)


MIN_RUN_STEPS = 20
"""Minimum number of a run's steps at which its mean loading says more than the window's."""


def _loading_share(a: Analysis) -> float:
    """Return the share of the analysed steps that the main thread spends in a loader."""
    loading = a.host.filter(
        (pl.col("thread") == a.trace.main_thread) & (pl.col("class") == "loader")
    )
    return float(loading["ns"].sum()) / max(a.span_ns, 1) if a.trace.main_thread is not None else 0


def _scale_gain(finding: Finding, factor: float) -> Finding:
    """Return the finding with its gain multiplied by ``factor``. The low end of its range does not
    rise."""
    impact = finding.impact
    if impact is None or impact.gain_ns is None:
        return finding
    return replace(
        _change_marginal_gain(finding, lambda ns: round(ns * factor)),
        impact=replace(
            impact,
            gain_ns=round(impact.gain_ns * factor),
            low_ns=None if impact.low_ns is None else round(impact.low_ns * min(1.0, factor)),
            high_ns=None if impact.high_ns is None else round(impact.high_ns * factor),
            bound_ns=None if impact.bound_ns is None else round(impact.bound_ns * factor),
            share=None if impact.share is None else impact.share * factor,
        ),
        severity=severity_of_share(None if impact.share is None else impact.share * factor),
    )
