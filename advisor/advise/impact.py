"""Gain of a finding, with its range, severity and confidence: the one module that computes any of
these.

A gain is a replay of the steps with the finding's edits in it. Where a window cannot be replayed
well (``WindowReplayer.unusable_reason``), an upper bound stands in for it and says so: the exposed
time of the events that the edits touch, that is device work that nothing else covers, or host time
during which the device is idle."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import ceil, isfinite, sqrt

import polars as pl
from msgspec.structs import replace

from advisor.advise.recording_limits import lost_records
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
from advisor.core.report_steps import StepTime
from advisor.core.rule import Evidence, Rule
from advisor.measure import Analysis
from advisor.measure.host.gaps import device_waits
from advisor.measure.steps.step_records import StepRecords
from advisor.replay.estimators import REPLAY, BoundEstimator, GainEstimator
from advisor.replay.exposed_time import leaves_device_work, remaining_device_time
from advisor.replay.host_nodes import ready_batch_ns
from advisor.replay.operations import GRAPH_LAUNCH_NS
from advisor.replay.predictions import GainInterval, widened_by_rule, worst_case
from advisor.replay.window_replayer import GainRange

MIN_GAIN_SHARE = 0.01
"""Share of the step below whose gain a finding is a note: two profiled runs differ by about as
much."""
CRITICAL_SHARE, WARNING_SHARE = 0.20, 0.05
"""Smallest gains of critical findings and warnings, as shares of the step (XProf's for input)."""
UNSEEN_SHARE = 0.05
"""Share of the step from which a gain may make loader workers too slow that keep up now."""
MAX_PROCESSES = 64
"""Largest number of processes that is advised."""
UNPROVEN_CONFIDENCE = 0.7
"""Factor on the confidence of a rule proven on synthetic examples only. Its range is as wide as the
worst prediction so far was wrong. Such findings compete with the others."""
ATYPICAL_WINDOW_CONFIDENCE = 0.85
"""Factor on the confidence in a finding from a window that differs from its run."""

# -- confidence ------------------------------------------------------------------------------------


def lower_confidence(finding: Finding, factor: float, why: str) -> Finding:
    """Return the finding with its confidence multiplied by ``factor``, and the reason noted."""
    return replace(
        finding,
        confidence=finding.confidence * factor,
        confidence_notes=[*finding.confidence_notes, why],
    )


NEAR_LIMIT = 0.05
"""Difference to a threshold, as a share of it, up to which a finding says how near it is."""


def _note_near_limit(finding: Finding) -> Finding:
    """Note the measured value that only just makes it a finding."""
    near = next(
        (
            each
            for each in finding.evidence
            if each.threshold
            and isinstance(each.value, float)
            and abs(each.value / each.threshold - 1) <= NEAR_LIMIT
        ),
        None,
    )
    if near is None:
        return finding
    value, limit = (t.format_value(x, near.unit) for x in (near.value, near.threshold))
    how = f"close to its limit of {limit}: {near.label} {value}"
    return replace(finding, confidence_notes=[*finding.confidence_notes, how])


def weigh_confidence(finding: Finding, rule: Rule, a: Analysis) -> Finding:
    """Return the finding with its confidence lowered for its rule's and the window's weaknesses."""
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
        why = "steps are where the device's work repeats, nothing marks them"
        finding = lower_confidence(finding, 0.9, why)
    if marked and a.step_count < 3:
        finding = lower_confidence(
            finding, 0.85, f"only {t.count_noun(a.step_count, 'step')} measured"
        )
    if a.trace.meta.truncated:
        finding = lower_confidence(finding, 0.9, "the file is truncated")
    if a.varying_kernels.are_most:
        finding = lower_confidence(finding, 0.6, "like kernels differ in duration")
    return finding


def note_rank_counts(
    findings: Iterable[Finding], counts: Mapping[str, int], ranks: int
) -> list[Finding]:
    """Note on each finding on how many of the ranks its rule found it."""
    return [
        replace(
            finding,
            confidence_notes=[
                *finding.confidence_notes,
                f"seen on {counts[finding.rule]} of {ranks} ranks",
            ],
        )
        for finding in findings
    ]


# -- gain and range --------------------------------------------------------------------------------


def estimate_impact(finding: Finding, a: Analysis, estimator: GainEstimator) -> Finding:
    """Return the finding with its impact: the rule's own figure (memory, risk), or what its edits
    save. The own figure of a rule that changes one rank is used if that rank is not replayed."""
    own = finding.impact
    if own is not None and own.currency == "step_time" and finding.edits:
        if all(edit.rank in estimator.ranks for edit in finding.edits):
            own = None
        else:
            finding = replace(finding, edits=[])
    if own is not None:
        if own.currency == "step_time":
            finding = replace(finding, severity=severity_of_share(own.share))
        return finding
    if not finding.edits:
        return _not_estimated(finding, "no gain can be estimated from this trace")
    if why := lost_records(a):
        return replace(_not_estimated(finding, why), edits=[])
    return _of_edits(finding, a, estimator)


def _not_estimated(finding: Finding, why: str) -> Finding:
    return replace(finding, impact=impact_without_gain(why))


def _of_edits(finding: Finding, a: Analysis, estimator: GainEstimator) -> Finding:
    """Estimate the gain of a finding's edits, its range widened by errors of past predictions."""
    saved = estimator.gain_range(finding.edits)
    if finding.moved_ns is not None:
        hand_over = ready_batch_ns(a.trace, a.step_ns, "low")
        most_of_it = saved.gain - saved.low < hand_over
        low_by: RangeCause = "hand-over" if most_of_it else saved.low_by
        saved = saved._replace(low=max(0.0, saved.low - hand_over), low_by=low_by)
    limit = min(saved.max_gain, a.step_ns)
    if finding.validation == "synthetic" and not estimator.is_calibrated(finding.edits):
        low, high = worst_case(saved.low, saved.high, limit)
        saved = saved._replace(low=low, high=high, low_by="not proven", high_by="not proven")
    device = "" if a.device is None or a.device.name is None else a.device.name
    own = GainInterval(saved.low, saved.high)
    band, why = widened_by_rule(finding.rule, device, saved.gain, own, limit)
    if why:
        saved = saved._replace(
            low=band.low,
            high=band.high,
            low_by="past" if band.low < saved.low else saved.low_by,
            high_by="past" if band.high > saved.high else saved.high_by,
        )
        finding = lower_confidence(finding, 1.0, f"{why}, and the range allows for that")
    operations = {(edit.op, edit.select.on) for edit in finding.edits}
    if finding.shown_time is not None and operations == {("scale", "gpu"), ("make_async", "host")}:
        # beyond the time of these copies, it is launches after them that become earlier
        cost = float(finding.shown_time.value or 0)
        if cost < saved.low:
            saved = saved._replace(low=cost, low_by="late launches")
    finding = with_gain(finding, saved, a, estimator.method)
    share = finding.impact.share if finding.impact is not None else None
    if estimator.unseen_loader and (share or 0.0) >= UNSEEN_SHARE:
        finding = lower_confidence(
            finding,
            0.85,
            "the loader's workers keep up with these steps; whether they do with shorter ones is "
            "not in the trace",
        )
    return finding


def with_gain(
    finding: Finding, saved: GainRange, a: Analysis, method: str, *, of_job: bool = False
) -> Finding:
    """Return the finding with a gain per step, and the severity that follows from it."""
    share = saved.gain / a.step_ns if a.step_ns else None
    impact = Impact(
        currency="step_time",
        gain_ns=round(saved.gain),
        low_ns=round(min(saved.low, saved.gain)),
        high_ns=None
        if finding.known_cost
        else round(max(saved.gain, min(saved.high, saved.max_gain))),
        share=share,
        method=f"lower bound ({method})" if finding.known_cost else method,
        kind="lower bound"
        if finding.known_cost
        else "replay"
        if method == REPLAY
        else "upper bound",
        per=a.per,
        most_ns=round(max(saved.gain, saved.max_gain)) if isfinite(saved.max_gain) else None,
        low_by=saved.low_by,
        high_by=saved.high_by,
        of_job=of_job,
    )
    return replace(finding, impact=impact, severity=severity_of_share(share))


def severity_of_share(share: float | None) -> Severity:
    """Return critical, warning or info, by the share of the step that the fix saves."""
    if share is None or share < WARNING_SHARE:
        return "info"
    return "critical" if share >= CRITICAL_SHARE else "warning"


def gain_may_be_zero(finding: Finding, floor: float) -> bool:
    """Return whether a finding is unproven and may gain nothing: no ground to call a run slow."""
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
    """Return findings without replayed gain whose exposed time is ``floor`` (ns per step) or more,
    or at the high end of its range enough for a warning. Each says what sets the step's pace
    instead, and whether it may gain more after the fixes of ``before``. Others gain nothing by
    either estimate. Without a GPU the pace is that of the host's
    own work: only a lack of cores can explain those."""
    path = estimator.critical_path() if findings else {}
    if not path:
        return []
    kept = []
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
        reason = f"gains little alone: {reason} ({share} of the critical path)"
        why = ""
        if part == "host" and a.device_id is None:
            free = None if a.recorded is None else a.recorded.free_cores
            if free is None or free >= 1 or finding.edits[0].op != "parallelize":
                continue
            reason = "no core is free"
            why = f"Other processes do not shorten the {a.per}: {reason} for them."
        elif part == "loader" and finding.edits[0].op == "parallelize":
            # its own pace: what it moves to workers takes the cores that the step computes on
            cores = "" if a.recorded is None else _used_cores(a.recorded)
            reason = cores or "how many cores are free is not recorded"
            why = (
                f"In the replay, workers do not shorten the {a.per}: {reason}. Make the loading "
                "itself cheaper, or measure workers: advisor try --only workers."
            )
        if exposed.gain >= floor or exposed.high >= max(floor, WARNING_SHARE * a.step_ns):
            noted = replace(finding, summary=f"{finding.summary} {why}".rstrip())
            kept.append(_not_estimated(noted, f"{reason}{_after(finding, before, estimator, a)}"))
    return kept


def _after(
    finding: Finding, before: Sequence[Finding], estimator: GainEstimator, a: Analysis
) -> str:
    """Say that a finding may gain more after other fixes; empty: too little for a warning."""
    applied = [edit for each in before if estimator.overlaps(each) for edit in each.edits]
    if not applied or not estimator.overlaps(finding):
        return ""
    if estimator.marginal(finding.edits, applied) < WARNING_SHARE * a.step_ns:
        return ""
    return "; after the fixes above it may gain more: measure again then"


def _used_cores(recorded: StepRecords) -> str:
    """Say how many cores the run used: ``1.9 of 2 cores are used``; empty: not recorded."""
    cores, free = recorded.record.rank.cpus, recorded.free_cores
    return "" if cores is None or free is None else f"{cores - free:.1f} of {cores} cores are used"


# -- work that moves to other processes ----------------------------------------------------------


def limit_to_cores(findings: Sequence[Finding], a: Analysis) -> list[Finding]:
    """Set the number of worker processes in findings that move work to them: as many as the step
    after all fixes needs. Fewer cores limit the gain."""
    cores = None if a.record is None else a.record.rank.cpus
    left = a.step_ns - sum(f.marginal_gain_ns or 0 for f in findings if not f.other_rank)
    result = []
    for finding in findings:
        impact, moved = finding.impact, finding.moved_ns
        if moved is not None and impact is not None:
            after = min(left, a.step_ns - (impact.gain_ns or 0))
            workers = ceil(moved / max(after, moved / MAX_PROCESSES))
            if cores is not None and workers >= cores:
                workers = max(1, cores - 1)
            finding = _bounded(finding, max(0.0, a.step_ns - moved / workers), a.step_ns)
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


def _bounded(finding: Finding, max_gain: float, step_ns: float) -> Finding:
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
        most_ns=max_gain if impact.most_ns is None else min(impact.most_ns, max_gain),
    )
    return _marginal(replace(finding, impact=changed), lambda ns: min(ns, max_gain))


# -- of the window, of the run ---------------------------------------------------------------------


def scale_to_run(
    findings: Sequence[Finding], a: Analysis, estimator: GainEstimator
) -> list[Finding]:
    """Scale gains found in a window to the run's own step. Those that a rule derived from the
    record are of that step already."""
    step = step_time(a)
    result = []
    for finding in findings:
        if finding.edits or finding.impact is None or not finding.impact.of_run:
            of_ns = (estimator.reference_ns(finding.edits) if finding.edits else None) or a.step_ns
            finding = _carry_over(finding, step, a, of_ns)
            finding = _match_loading(finding, a)
            finding = _leave_device_work(finding, a, step)
        result.append(_share_of_reference(finding, step))
    return result


def scales_to_run(
    findings: Sequence[Finding], a: Analysis, estimator: GainEstimator
) -> list[float]:
    """Return the ratio of each finding's gain in the run's own step to that in the window."""
    scaled = [finding.impact for finding in scale_to_run(findings, a, estimator)]
    gains = [(f.impact, of_run) for f, of_run in zip(findings, scaled, strict=True)]
    return [
        (of_run.gain_ns or 0) / of_window.gain_ns
        if of_window is not None and of_window.gain_ns and of_run is not None
        else 1.0
        for of_window, of_run in gains
    ]


REPEATED_WORK_SHARE = 0.02
"""Share by which the device work of a run's usual step may be less than the window's. Six runs of
the H100 programs that the device paces have steps of 0 to 4% less than the window's work, a seventh
of 20%; median 1.4%."""


def _leave_device_work(finding: Finding, a: Analysis, step: StepTime | None) -> Finding:
    """Limit a gain and its range to the step less the device work that the fix leaves: no step is
    shorter. Collectives of several ranks may end earlier, because they wait less."""
    impact = finding.impact
    if impact is None or impact.currency != "step_time" or not finding.edits or finding.other_rank:
        return finding
    whole = a.step_ns if step is None else step.reference_ns
    limit = max(0.0, whole - _device_work_left(a, [finding], whole))
    if any(edit.op == "drop_launch" for edit in finding.edits):
        # a kernel of a graph starts about as long after the one before it as a node costs
        starts = GRAPH_LAUNCH_NS * int(a.in_window.sum()) / max(a.step_count, 1)
        finding = _at_most(finding, max(0.0, limit - starts), whole)
    if step is not None and not leaves_device_work(finding.edits):
        finding = _at_most(finding, limit, whole)
        limit += REPEATED_WORK_SHARE * (whole - limit)
    finding = _bounded(finding, limit, whole)
    impact = finding.impact
    if impact is not None and impact.high_ns is None and a.device_id is not None:
        # more than is recorded may go, but no device work that stays
        high = round(max(limit, impact.gain_ns or 0))
        finding = replace(finding, impact=replace(impact, high_ns=high, high_by="device work"))
    return finding


def _device_work_left(
    a: Analysis, fixed: Sequence[Finding], step_ns: float, *, earlier: bool = False
) -> float:
    """Return the device work that the fixes leave in a step of ``step_ns``, ns. ``earlier``: with
    that launched before the recording, which no edit selects."""
    if a.device_id is None:
        return 0.0
    edits = [edit for finding in fixed for edit in finding.edits]
    of_job = any(f.impact is not None and f.impact.of_job for f in fixed)
    own = all(edit.rank is None for edit in edits) and not of_job
    left = remaining_device_time(a, edits, communication=own)
    busy = a.breakdown.busy.total / max(a.step_count, 1)
    if earlier:
        left += max(0.0, busy - a.device_busy(a.in_window).total / max(a.step_count, 1))
    # if the run's steps are other ones than the window's, the share is the same
    return left * step_ns / a.step_ns if busy > step_ns else left


def limit_together(findings: Sequence[Finding], a: Analysis) -> list[Finding]:
    """Limit what each ranked finding saves after those before it, in the run's step: all together
    leave the device work that none of their edits selects. What then saves next to nothing is
    folded under the first."""
    step = step_time(a)
    left = whole = a.step_ns if step is None else step.reference_ns
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
            stays = _device_work_left(a, fixed, whole, earlier=bool(ranked))
            most = max(0, round(left - stays))
            if ranked and most < MIN_GAIN_SHARE * whole <= saved:
                fixed.pop()
                folded.append(replace(finding, priority=None, folded_under=ranked[0].rule))
                continue
            finding = _marginal(finding, partial(min, most))
            left -= min(saved, most)
        ranked.append(replace(finding, priority=len(ranked) + 1))
    return ranked + folded


def _at_most(finding: Finding, gain_ns: float, step_ns: float) -> Finding:
    """Return the finding with its gain, not the high end of its range, limited to ``gain_ns``."""
    impact = finding.impact
    if impact is None or impact.gain_ns is None or impact.gain_ns <= gain_ns:
        return finding
    limited = _bounded(finding, gain_ns, step_ns)
    assert limited.impact is not None
    ends = replace(limited.impact, high_ns=impact.high_ns, most_ns=impact.most_ns)
    return replace(limited, impact=ends, marginal_high_ns=finding.marginal_high_ns)


def _share_of_reference(finding: Finding, step: StepTime | None) -> Finding:
    """Return the finding with its gain as a share of the step that the report leads with."""
    impact = finding.impact
    if step is None or impact is None or impact.currency != "step_time" or impact.gain_ns is None:
        return finding
    share = impact.gain_ns / step.reference_ns
    severity = severity_of_share(share)
    return replace(finding, impact=replace(impact, share=share), severity=severity)


def _carry_over(finding: Finding, step: StepTime | None, a: Analysis, of_ns: float) -> Finding:
    """Convert a gain that is a saving of a step of ``of_ns`` to the run's step.

    Device work that a fix ends takes as long in both, and the time in which the device idles
    changes as that of the whole step does (:func:`_of_the_run`). Where the run's steps are longer,
    and without a device, a gain keeps its share of the step.

    The range widens by what this cannot know: work that a fix ends, on the device or of an operator
    on the host, may take as long without the profiler as it did in the window; and steps that are
    longer than the window's need not have more of the cause. The few steps of a window have more or
    less of it than the run's, as far as they differ from each other."""
    impact = finding.impact
    if step is None or step.gain_scale is None or impact is None or impact.gain_ns is None:
        return finding
    if impact.currency != "step_time":
        return finding
    scale = step.ns / of_ns
    convert = _of_the_run(finding, step, a, of_ns) or scale.__mul__
    least = impact.gain_ns if impact.low_ns is None else impact.low_ns
    most = impact.gain_ns if impact.high_ns is None else impact.high_ns
    low, high = min(convert(least), scale * least), max(convert(most), scale * most)
    if scale < 1 and (step.profiler_overhead is None or step.profiler_overhead >= MIN_APART_SHARE):
        high = max(high, min(most, step.ns - _device_work_left(a, [finding], step.ns)))
    if scale > 1 + MIN_APART_SHARE:
        low = min(low, least)
    if impact.kind != "upper bound":
        low, high = low * (1 - (error := _sampling_error(a))), high * (1 + error)
    finding = replace(
        finding,
        impact=replace(
            impact,
            gain_ns=round(convert(impact.gain_ns)),
            low_ns=round(low),
            high_ns=None if impact.high_ns is None else round(high),
            most_ns=None if impact.most_ns is None else round(max(high, convert(impact.most_ns))),
        ),
    )
    finding = _marginal(finding, lambda ns: round(convert(ns)))
    if not step.atypical:
        return finding
    why = "the profiled window is not like the rest of the run"
    return lower_confidence(finding, ATYPICAL_WINDOW_CONFIDENCE, why)


def _sampling_error(a: Analysis) -> float:
    """Return how far the window's mean step may be from that of all, as a share of it: 1.28
    standard errors, which hold four of five."""
    taken = a.steps.used["dur"].to_numpy().astype(float)
    if len(taken) < 3:
        return 0.0
    return min(1.0, 1.28 * float(taken.std(ddof=1)) / (sqrt(len(taken)) * float(taken.mean())))


def _of_the_run(
    finding: Finding, step: StepTime, a: Analysis, of_ns: float
) -> Callable[[float], float] | None:
    """Return what converts a gain of a step of ``of_ns`` to one of the run's usual step: of device
    work that the edits touch, as much as the run has of the window's; of the idle time, the run's
    over that step's. ``None``: there are no edits, the device hardly idles, its idle time alone is
    touched and the run has none, or the run's steps are clearly longer, for whatever reason."""
    if not finding.edits or a.device_id is None:
        return None
    busy = a.breakdown.busy.total / max(a.step_count, 1)
    if not busy < of_ns or step.ns > (1 + MIN_APART_SHARE) * of_ns:
        return None
    touched = max(0.0, busy - _device_work_left(a, [finding], a.step_ns))
    if not touched and busy >= step.ns:
        return None
    device = min(1.0, step.ns / busy) if busy else 1.0
    idle = max(0.0, step.ns - busy) / (of_ns - busy)

    def convert(gain_ns: float) -> float:
        on_device = min(gain_ns, touched)
        return device * on_device + idle * (gain_ns - on_device)

    return convert


def _marginal(finding: Finding, change: Callable[[int], int]) -> Finding:
    """Return the finding with ``change`` applied to its marginal gain and its range."""
    names = ("marginal_gain_ns", "marginal_low_ns", "marginal_high_ns")
    given = {name: getattr(finding, name) for name in names}
    return replace(finding, **{n: change(ns) for n, ns in given.items() if ns is not None})


MORE_LOADING = 1.25
"""Ratio of the loading shares of the run's and the window's steps from which a loader's gain is of
the run's."""


def _match_loading(finding: Finding, a: Analysis) -> Finding:
    """Limit a loader fix's gain to the time that the run's own steps spend on getting data. If they
    spend clearly more than the window's steps, scale the gain up."""
    impact, recorded = finding.impact, a.recorded
    share = None if recorded is None else recorded.share("data")
    if recorded is None or share is None or not any(e.op == "parallelize" for e in finding.edits):
        return finding
    if impact is None or impact.currency != "step_time" or impact.gain_ns is None:
        return finding
    step = recorded.median or 0.0
    if not step:
        return finding
    most = round(share * step)
    inside = _loading_share(a)
    if inside and share > MORE_LOADING * inside and recorded.used.sum() >= MIN_RUN_STEPS:
        finding = _scaled(finding, share / inside)
        loading = Evidence("getting data, in the run's own steps", share * step, "ns", per="step")
        finding = replace(finding, evidence=[loading, *finding.evidence])
        why = f"the run's own steps spend {share:.0%} on getting data, those of the window "
        finding = lower_confidence(finding, 1.0, f"{why}{inside:.0%}: the gain is of the run's")
        waits = device_waits(a)
        return _bounded(finding, most if waits is None else min(most, round(waits)), step)
    if impact.gain_ns <= most:
        return finding
    finding = _bounded(finding, most, step)
    why = f"the run's own steps spend {share:.0%} on getting data, less than those of the window"
    return lower_confidence(finding, 1.0, why)


MIN_RUN_STEPS = 20
"""Number of a run's steps from which its mean loading says more than the window's."""


def _loading_share(a: Analysis) -> float:
    """Return the share of the analysed steps that the main thread spends in a loader."""
    loading = a.host.filter(
        (pl.col("thread") == a.trace.main_thread) & (pl.col("class") == "loader")
    )
    return float(loading["ns"].sum()) / max(a.span_ns, 1) if a.trace.main_thread is not None else 0


def _scaled(finding: Finding, times: float) -> Finding:
    """Return the finding with its gain multiplied by ``times``; the low end of its range stays."""
    impact = finding.impact
    if impact is None or impact.gain_ns is None:
        return finding
    return replace(
        _marginal(finding, lambda ns: round(ns * times)),
        impact=replace(
            impact,
            gain_ns=round(impact.gain_ns * times),
            high_ns=None if impact.high_ns is None else round(impact.high_ns * times),
            most_ns=None if impact.most_ns is None else round(impact.most_ns * times),
            share=None if impact.share is None else impact.share * times,
        ),
        severity=severity_of_share(None if impact.share is None else impact.share * times),
    )
