"""Reasons of a gain: what decides its range, and why it differs from the time in the evidence."""

import re
from typing import Final

from advisor.core import labels
from advisor.core import text as t
from advisor.core.finding import HOST_CODE, Finding, Impact
from advisor.core.report import Report

MAX_HIGH_RATIO, MAX_ZERO_RATIO = 2.0, 0.01
"""Maximum ratio of a range's high end to the gain without a reason for it, and maximum ratio of the
low end that counts as no gain."""
MAX_EVIDENCE_RATIO, MIN_EVIDENCE_RATIO = 1.01, 0.8
"""Ratios beyond which a difference is explained: maximum ratio of the gain to the time in the
evidence, and minimum ratio to what the fix should remove of it."""
MAX_ASSUMED_DIFFERENCE: Final = 0.1
"""Maximum difference between the share of the work that stays and the share assumed to stay."""
MIN_FULLY_BUSY_SHARE: Final = 0.95
"""Minimum GPU-busy share at which other GPU work limits a step, not the host."""


def gain_of(finding: Finding) -> int:
    """Return the gain, ns, or 0 if it was not estimated."""
    return 0 if finding.impact is None else finding.impact.gain_ns or 0


def is_replayed(finding: Finding) -> bool:
    """Return whether a finding's gain was estimated in a replay of its edits."""
    return bool(finding.edits) or (finding.impact is not None and finding.impact.kind == "replay")


def range_reasons(finding: Finding, report: Report) -> list[str]:
    """Say what decides a wide range. Empty if it is narrow."""
    impact = finding.impact
    if impact is None or not impact.gain_ns or impact.low_ns is None:
        return []
    ends = (impact.low_ns, impact.high_ns or impact.gain_ns)
    decided_by = (impact.low_by, impact.high_by)
    return explain_ends(finding, report, impact.gain_ns, ends, decided_by)


def explain_ends(
    finding: Finding,
    report: Report,
    gain: int,
    range_ns: tuple[int, int],
    decided_by: tuple[str, str],
) -> list[str]:
    """Say what decides the ends of a range that are far from the gain."""
    low, high = range_ns
    ends = []
    if low < t.WIDE_LOW * gain:
        ends.append(("low end", decided_by[0]))
    if high > MAX_HIGH_RATIO * gain:
        ends.append(("high end", decided_by[1]))
    # an assumption that has a range itself, or says what happens at worst
    ranged = [labels.clean(text) for text in finding.assumptions if _RANGED_PATTERN.search(text)]
    assumption = ranged[0] if ranged else _name_removed_parts(finding, report, (gain, *range_ns))
    if ends and {by for _, by in ends} <= {"assumption", ""} and finding.assumptions:
        if low < MAX_ZERO_RATIO * gain:
            if ranged and ranged[0].startswith("at worst"):
                rest = "; hiding the rest then saves nothing" * is_replayed(finding)
                return [f"low end 0: {ranged[0]}{rest}"]
            return [f"no gain unless {labels.clean((ranged or finding.assumptions)[0])}"]
        if assumption:
            return [f"range: {assumption}"]
        if [by for _, by in ends] == ["assumption"] and (
            worst := _name_worst_part(finding, report)
        ):
            return [f"low end: {worst}"]
    is_at_best = any(e.factor == 1 and e.best_factor not in (None, 1) for e in finding.edits)
    if is_at_best or {edit.op for edit in finding.edits} == {"overlap"}:
        by_best = _OTHER_WORK if is_at_best else "overlap"
        ends = [(end, by_best if (end, by) == ("high end", "assumption") else by)
                for end, by in ends]  # fmt: skip
    past_shares = {"low": t.format_share(low / gain), "high": t.format_share(high / gain)}
    if [by for _, by in ends] == ["past", "past"]:
        reason = DECIDED_BY["past"].format(past="{low} to {high}").format(**past_shares)
        return [f"range: {reason}"]
    reasons: dict[str, list[str]] = {}
    for end, by in ends:
        wording = {key: text.format(**past_shares) for key, text in ENDS_DIFFER[end].items()}
        reasons.setdefault(DECIDED_BY[by].format(assumed=assumption, **wording), []).append(end)
    return [f"{' and '.join(named_ends)}: {why}" for why, named_ends in reasons.items() if why]


def _name_removed_parts(finding: Finding, report: Report, gains: tuple[int, int, int]) -> str:
    """Say which share of the finding's time the ``gains`` are: usually, at worst and at best. Empty
    if the edits do not share one range, or if time and gains are not of the same step."""
    ranges = {
        (edit.factor, edit.best_factor, edit.worst_factor)
        for edit in finding.edits
        if edit.best_factor is not None or edit.worst_factor is not None
    }
    if len(ranges) != 1:
        return ""
    usual, _, worst = (1.0 if factor is None else factor for factor in ranges.pop())
    if usual == 1:
        return ""
    if any(edit.op == "make_async" for edit in finding.edits):
        return "it depends on how much of the idle time around these calls the fix ends"
    if worst == 1:
        return ""
    time_in_step = _find_time_in_step(finding, report)
    if not time_in_step or max(gains) > MAX_EVIDENCE_RATIO * time_in_step:
        return ""
    removed, low, high = (t.format_share(min(1.0, gain / time_in_step)) for gain in gains)
    return f"{_REMOVED_SHARE} {removed} of this time ({low} to {high})"


def _name_worst_part(finding: Finding, report: Report) -> str:
    """Say which share of the finding's time the fix removes at worst. Empty if an assumption does
    not decide it, or if time and gain are not of the same step."""
    time_in_step, low = (
        _find_time_in_step(finding, report),
        finding.impact and finding.impact.low_ns,
    )
    has_worst = any(edit.worst_factor is not None for edit in finding.edits)
    if not has_worst or not low or low > time_in_step:
        return ""
    return f"at worst the fix removes {t.format_share(low / time_in_step)} of this time"


def _find_time_in_step(finding: Finding, report: Report) -> float:
    """Return the finding's time in the step of its gain, in ns. 0 if it is not known there."""
    shown_ns = 0.0 if finding.shown_time is None else float(finding.shown_time.value or 0)
    if report.step is None or not report.step.window_differs:
        return shown_ns
    # On the CPU, all work is shorter in the run's step by the same ratio.
    return shown_ns * _find_step_ratio(report) if report.scope.device is None else 0.0


def _find_step_ratio(report: Report) -> float:
    """Return the ratio of the run's step to the profiled one, at most 1. 1 if a note need not tell
    them apart."""
    scale = min(1.0, report.gain_scale or 1.0)
    return scale if scale < 1 - MAX_ASSUMED_DIFFERENCE else 1.0


_REMOVED_SHARE: Final = "the fix removes about"
"""Beginning of a range's reason that gives shares."""


_RANGED_PATTERN: Final = re.compile(r"[\d%] to \d|at worst|at best")
"""Pattern of assumptions that state their own range."""
_OTHER_WORK: Final = "beside"
"""Cause of a high end if an edit usually changes nothing, but shortens other work at best."""
DECIDED_BY: Final = {
    "": "",
    _OTHER_WORK: "at best the fix shortens other work too",
    "overlap": "at best other work hides all of this time",
    "assumption": "{assumed}",
    "faster host": "the host runs faster without the profiler, and {faster}",
    "slower host": "the host may be slower than estimated{slower}",
    "hand-over": "results are handed over from other processes",
    "replay error": "the replay without changes differs from the measured step by as much",
    "shared cores": "collectives take cores from the work that overlaps them",
    "past": "where such fixes were measured, they gained {past} of the estimate",
    "not proven": "this estimate has been checked on few programs",
    "device work": "at best only the GPU's own work remains",
    "late launches": "only the time of these calls is saved, as no launch after them comes earlier",
}
ENDS_DIFFER: Final = {
    "low end": {
        "faster": "leaves less idle time",
        "slower": "",
        "past": "as little as {low}",
    },
    "high end": {
        "faster": "limits the step less",
        "slower": ", and then leaves more idle time",
        "past": "up to {high}",
    },
}
"""Words in ``DECIDED_BY`` that differ between the low and the high end."""
WHY_MORE: Final = {
    "make_async": "without the wait the host launches later work earlier{late}",
    "without_gradient": "the kernels around the wait go too, and later work is launched earlier",
    "round_trip": "the CPU's work between these copies is saved too",
    "drop_launch": "idle time before the first launch, and of other causes, is saved too",
    "parallelize": "the launches after it come earlier too",
    "overlap": "what waits for these copies or collectives starts earlier too",
}


def beyond_evidence(finding: Finding, report: Report) -> list[str]:
    """Say why the gain is larger than the time in the evidence, or far below what the fix should
    remove of it. Empty if neither is the case."""
    impact = finding.impact
    if impact is None or impact.currency != "step_time" or not impact.gain_ns:
        return []
    shown = finding.shown_time
    if shown is None:
        return []
    amount = t.format_duration(float(shown.value or 0))
    in_summary = amount in t.shorten_evidence(finding.summary)
    label = labels.clean(shown.label)
    copies_ns = sum(part.ns for part in report.time if part.name == "copies")
    if label == "exposed copy time" and t.format_duration(copies_ns) != amount:
        label = "exposed time of these copies"
    duration = f"the {amount} {'below' if in_summary else f'of {label}'}"
    operations: list[str] = [edit.op for edit in finding.edits]
    if why := _explain_faster_copies(finding, report):
        return [why]
    if why := _explain_smaller_gain(finding, report, float(shown.value or 0)):
        return [f"the gain is less than {duration}: {why}"]
    if impact.gain_ns <= MAX_EVIDENCE_RATIO * float(shown.value or 0):
        return []
    if report.replay is not None and report.replay.steps > report.replay.of_steps:
        return [
            f"the gain is that of {report.replay.steps} steps, {duration} of "
            f"{report.replay.of_steps}"
        ]
    scale = max(1.0, report.gain_scale or 1.0)
    of_run = impact.gain_ns <= MAX_EVIDENCE_RATIO * scale * float(shown.value or 0)
    if of_run:
        return [f"the gain is more than {duration}: {_contrast_steps(report)}"]
    if report.scope.device is None and not impact.is_job_gain:
        return []
    why = "the launches of this work, and the gaps in it, are saved too"
    if {*operations} == {"scale"} and all(edit.select.on == "gpu" for edit in finding.edits):
        why = "other kernels become faster too"
    for edit_target in ("round_trip", "without_gradient"):
        if any(edit.select.at == edit_target for edit in finding.edits):
            operations = [edit_target]
    why = next((WHY_MORE[name] for name in WHY_MORE if name in operations), why)
    why = why.format(late=describe_late_launches(report))
    if impact.is_job_gain:
        why = "other ranks gain too, and wait less for each other"
    return [f"the gain is more than {duration}: {why}"]


def _explain_faster_copies(finding: Finding, report: Report) -> str:
    """Say why a step without pinning in the loop is shorter than its device work now. Empty if it
    is not."""
    busy_ns = (report.busy_share or 0.0) * report.scope.step_ns
    pins = all("pin_memory" in (edit.select.name or "") for edit in finding.edits)
    if (
        not finding.edits
        or not pins
        or report.step_ns - gain_of(finding) >= (1 - PIN_MARGIN) * busy_ns
    ):
        return ""
    return (
        f"the step then takes less than the GPU's {t.format_duration(busy_ns)} of work now: copies "
        "to the GPU are faster while the host copies nothing"
    )


PIN_MARGIN: Final = 0.02
"""Difference between a step and its device work, as a share, that needs no reason."""


def _is_fully_busy(report: Report) -> bool:
    """Return whether the device is so busy in the run's step that the host hardly delays it. An
    unknown busy share counts as busy."""
    scale = min(1.0, report.gain_scale or 1.0)
    return report.busy_share is None or report.busy_share >= MIN_FULLY_BUSY_SHARE * scale


def _explain_smaller_gain(finding: Finding, report: Report, shown_ns: float) -> str:
    """Say why the fix gains far less than the time that it removes. Empty if it does not, or if the
    cause is unknown."""
    impact = finding.impact
    if impact is None or not impact.gain_ns:
        return ""
    operations = {edit.op for edit in finding.edits}
    if operations == {"remove_skew"} and impact.gain_ns < MIN_EVIDENCE_RATIO * shown_ns:
        return "the others then wait for the next rank"
    if report.scope.device is None:
        return _explain_smaller_cpu_gain(finding, report, shown_ns)
    if impact.is_job_gain:
        is_partial = impact.gain_ns < MIN_EVIDENCE_RATIO * shown_ns
        return (
            "it is the whole job's, whose ranks wait for each other"
            if is_partial and operations & _LAUNCH_OR_OVERLAP
            else ""
        )
    if finding.subject == HOST_CODE and not is_replayed(finding):  # both are of the run's step
        is_less = impact.gain_ns < MIN_EVIDENCE_RATIO * shown_ns
        return "the GPU works during a part of it" if is_less else ""
    targets = {edit.select.on for edit in finding.edits}
    scale = min(1.0, report.gain_scale or 1.0)
    remaining = 1.0 - impact.gain_ns / max(shown_ns, 1.0)
    factors = [edit.factor or 0.0 for edit in finding.edits if edit.select.on != "gap"]
    is_faster = (
        operations <= {"scale", "merge"} and targets == {"gpu"} and max(factors, default=0) > 0
    )
    if operations <= {"remove", "scale", "merge"} and targets == {"gpu"} and _is_fully_busy(report):
        if remaining <= 1 - MIN_EVIDENCE_RATIO:
            return ""
        if is_faster and remaining <= max(factors) + MAX_ASSUMED_DIFFERENCE:
            return _explain_rest(finding, report, remaining)
    is_of_part = all(edit.select.under for edit in finding.edits)
    # of work, not of the idle time around it
    of_work = {e.op for e in finding.edits if (e.op, e.select.on) != ("scale", "gap")}
    if "drop_launch" in operations and (is_of_part or of_work == {"drop_launch"}):
        return _explain_remaining_idle(report, remaining, is_of_part=is_of_part)
    removed = shown_ns * (1.0 - max(factors, default=0.0))  # at least
    if impact.gain_ns >= MIN_EVIDENCE_RATIO * removed:
        return (
            _explain_rest(finding, report, remaining)
            if is_faster and remaining > 1 - MIN_EVIDENCE_RATIO
            else ""
        )
    if operations == {"overlap"}:
        return _explain_little_overlap(report, impact, shown_ns)
    if of_work == {"make_async"}:
        return "the GPU works during the rest of these waits"
    if not operations <= {"remove", "scale", "merge"}:
        return ""
    if "gpu" in targets and report.busy_share:
        scale = min(1.0, scale / report.busy_share)  # device work takes as long in both steps
    reasons = [_contrast_steps(report)] if scale < 1 - MAX_ASSUMED_DIFFERENCE else []
    if impact.gain_ns < MIN_EVIDENCE_RATIO * scale * removed:
        if targets == {"host"}:
            reasons.append("the GPU works during the rest of it")
        elif "gpu" in targets and report.busy_share is not None:
            reasons.append(
                "other GPU work overlaps it"
                if _is_fully_busy(report)
                and not _leaves_idle(report, impact.gain_ns, scale * removed)
                else "the host then limits the step"
            )
    return ", and ".join(reasons)


MAX_GRAPH_COST_SHARE: Final = 0.6
"""Maximum share of idle time before launches that the profiler and launches of graphs explain."""
_LAUNCH_OR_OVERLAP: Final = {"drop_launch", "overlap"}
"""Edits whose whole time goes if no other rank delays the step."""


def _explain_remaining_idle(report: Report, remaining_share: float, *, is_of_part: bool) -> str:
    """Say why much of the idle time before launches remains without them. Empty if it does not."""
    if remaining_share <= 1 - MIN_EVIDENCE_RATIO:
        return ""
    if is_of_part:
        return "only a part of it is in what is replayed"
    if _find_step_ratio(report) < 1:
        return _contrast_steps(report)
    if remaining_share > MAX_GRAPH_COST_SHARE:
        return "the host then limits the step"
    return "the profiler lengthens launches, and graphs have launches too"


def _explain_little_overlap(report: Report, impact: Impact, shown_ns: float) -> str:
    """Say why other work hides far less than the time in the evidence."""
    compute = sum(part.ns for part in report.time if part.name == "compute")
    if (impact.gain_ns or 0) <= compute < shown_ns:
        at_best = "; at best, work for which the GPU now waits hides the rest"
        is_hidden_at_best = (impact.high_ns or 0) > compute
        return "too little other GPU work can hide it" + at_best * is_hidden_at_best
    if _is_fully_busy(report):
        return "little of the other work is independent of it"
    return "the host then limits the step"


def _explain_smaller_cpu_gain(finding: Finding, report: Report, shown_ns: float) -> str:
    """Say why a fix of a CPU program gains far less than its time in the evidence. Empty if it does
    not, or if the cause is unknown."""
    gain_ns = gain_of(finding)
    operations = {edit.op for edit in finding.edits}
    ratio = _find_step_ratio(report)
    if gain_ns >= MIN_EVIDENCE_RATIO * shown_ns:
        return ""
    reasons = [_contrast_steps(report)] if ratio < 1 else []
    remaining = 1.0 - gain_ns / max(ratio * shown_ns, 1.0)
    if operations == {"overlap"} and remaining > 1 - MIN_EVIDENCE_RATIO:
        reasons.append("little independent work is left to run meanwhile")
    is_scaled = operations == {"scale"} and any(edit.factor for edit in finding.edits)
    if is_scaled and remaining > 1 - MIN_EVIDENCE_RATIO and not _gives_share(finding, report):
        reasons.append(f"about {t.format_share(remaining)} of the work stays")
    return "; ".join(reasons)


def _explain_rest(finding: Finding, report: Report, remaining_share: float) -> str:
    """Say what share of the work remains that a fix makes faster, and why. Empty if the reason of
    the range says which share goes."""
    if _gives_share(finding, report):
        return ""
    why = "the work remains and becomes faster"
    if any(edit.factor == 1.0 for edit in finding.edits):
        why = "part of the work keeps its time"
    elif all("communication" in edit.select.family for edit in finding.edits):
        why = "the transfer itself remains"
    return f"about {t.format_share(remaining_share)} of it stays, as {why}"


def _gives_share(finding: Finding, report: Report) -> bool:
    """Return whether the reason of the range says which share of the time goes."""
    return any(_REMOVED_SHARE in reason for reason in range_reasons(finding, report))


def _leaves_idle(report: Report, gain_ns: float, removed_ns: float) -> bool:
    """Return whether a fix that removes ``removed_ns`` of device work leaves a step in which the
    device is busy for less than ``MIN_FULLY_BUSY_SHARE``."""
    work = (report.busy_share or 0.0) * report.scope.step_ns * min(1.0, report.gain_scale or 1.0)
    return work - removed_ns < MIN_FULLY_BUSY_SHARE * (report.step_ns - gain_ns)


def _contrast_steps(report: Report) -> str:
    """Say that a finding's time refers to the profiled step, and its gain to the run's step."""
    step = report.step
    if step is None or step.window_ns is None:
        return "a step of the run is not as long as a profiled one"
    profiled, usual = t.format_duration(step.window_ns), t.format_duration(step.reference_ns)
    return f"that time is for the profiled step ({profiled}), the gain for the run's step ({usual})"


LATE_CAUSES: Final = ("launch", "dispatch", "python", "host_code", "unknown")
"""Causes of idle time that do not occur while the host is ahead of the GPU."""


def describe_late_launches(report: Report) -> str:
    """Say how long the GPU idles because work is launched late. Empty if it does not."""
    late = sum(cause.ns for cause in report.idle if cause.cause in LATE_CAUSES)
    per = t.format_per(report.per)
    return (
        f" (late launches leave the GPU idle for {t.format_duration(late)} {per})" if late else ""
    )
