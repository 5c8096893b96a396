"""Sentences about the findings of a report: gain, range and its reasons, order, caveats, notes."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Final

from advisor.advise.impact import MIN_GAIN_SHARE, WARNING_SHARE
from advisor.advise.priority import EQUAL_GAIN, PRECISION, is_more_certain
from advisor.advise.program_wording import ACTIVITIES
from advisor.core import labels
from advisor.core import text as t
from advisor.core.finding import (
    HOST_CODE,
    LATER_STEPS_FIRST,
    Finding,
    Impact,
    Location,
    are_alternatives,
)
from advisor.core.report import Report
from advisor.core.trace import KINETO

Line = tuple[str, list[str]]
"""Label of a line, and the parts that follow it."""


def ranked_findings(report: Report) -> list[Finding]:
    """Return the findings that are not folded under another, the most valuable first."""
    return [finding for finding in report.findings if finding.folded_under is None]


def largest_fix(report: Report) -> Finding | None:
    """Return the ranked finding with the largest gain, or ``None`` if no gain was estimated."""
    return max(filter(_gain_ns, ranked_findings(report)), key=_gain_ns, default=None)


def _gain_ns(finding: Finding) -> int:
    """Return the gain, ns, or 0 if it was not estimated."""
    return 0 if finding.impact is None else finding.impact.gain_ns or 0


def is_replayed(finding: Finding) -> bool:
    """Return whether a finding's gain was estimated in a replay of its edits."""
    return bool(finding.edits) or (finding.impact is not None and finding.impact.kind == "replay")


SMALL_SHARE: Final = 2 * MIN_GAIN_SHARE
"""Minimum gain, as a share of the step, of a first fix: twice the difference between two runs."""


POSSIBLE: Final = "a possibility (advisor is {} sure of the cause)"
"""Words for an uncertain cause, in a verdict, a finding and a note."""
MIN_SURE: Final = 0.5
"""Confidence below which every text calls a cause a possibility."""


def is_unsure(finding: Finding) -> bool:
    """Return whether another cause is more likely than the finding's."""
    return finding.confidence < MIN_SURE


def is_unseen_code(finding: Finding) -> bool:
    """Return whether a finding is about code of which no line is recorded, so that its fix may gain
    nothing."""
    impact = finding.impact
    if finding.subject != HOST_CODE or finding.where or impact is None:
        return False
    return bool(impact.gain_ns) and not impact.low_ns


def is_small(finding: Finding) -> bool:
    """Return whether a finding gains too little to be fixed first."""
    impact = finding.impact
    if impact is None or impact.currency != "step_time" or finding.known_cost:
        return False
    return impact.share is not None and impact.share < SMALL_SHARE


def has_large_gain(report: Report) -> bool:
    """Return whether some finding explains a notable part of the step."""
    return any(not is_small(finding) for finding in ranked_findings(report))


def counted_steps(report: Report) -> int:
    """Return the number of steps in which events are counted, or 1 if no steps are marked."""
    return 1 if report.per == "recording" else max(1, report.scope.steps_used)


def host_operator_time(report: Report, finding: Finding) -> float | None:
    """Return the time per step, ns, that a finding shows, if it is time of the host's operators, of
    which a place is a part. ``None`` if a device works: its time is not that of operators."""
    shown = finding.shown_time
    of_operators = {
        ("op" in edit.select.kind and edit.op in ("scale", "remove")) for edit in finding.edits
    }
    if report.scope.device is not None or of_operators != {True} or shown is None:
        return None
    return None if isinstance(shown.value, str) else shown.value


def distinct_places(finding: Finding, limit: int = 3) -> list[Location]:
    """Return the places of a finding, worst first, without repeated names."""
    result: dict[object, Location] = {}
    for place in finding.where:
        result.setdefault(
            (place.file, place.line, place.function, place.op, place.kernel, place.step), place
        )
    return list(result.values())[:limit]


def new_sentences(summary: str, said: str) -> str:
    """Return the sentences of a summary that a text does not contain already."""
    result, rest = [], summary
    while rest:
        sentence, rest = t.split_sentences(rest, 0)
        result += [sentence] * (sentence not in said)
    return " ".join(result)


SAMPLED_LINE: Final = "stack samples point to"


def line_not_recorded(report: Report, finding: Finding) -> str:
    """Say how to record the line of code of the first finding. Empty if it has one, or if this kind
    of recording never has one."""
    traced = report.inputs[0] if report.inputs else None
    if traced is None or traced.format != KINETO or traced.with_stack is not False:
        return ""
    if finding.priority != 1 or not finding.where or any(p.file for p in finding.where):
        return ""
    for other in report.findings:
        place = other.where[0] if other.where and other.folded_under == finding.rule else None
        if place is not None and place.file:
            return f"{SAMPLED_LINE} {t.location_names(place)[0]}"
    how = "with_stack=True" if report.recorded is None else "advisor record --deep"
    if not any(part.name == "dispatch" for part in report.host):
        how = f"{ACTIVITIES} and with_stack=True"  # stacks alone do not link a kernel to a line
    return "" if how in finding.summary + finding.fix else f"line not recorded; {how} shows it"


def named_places(
    finding: Finding, limit: int = 3, *, name_width: int = 48, path_width: int = 60
) -> list[tuple[Location, list[str]]]:
    """Return distinct places with their names, see :func:`~advisor.core.text.location_names`.
    Shortened names of kernels and operators stay distinct within a finding."""
    result = distinct_places(finding, limit)
    short = labels.labels_by_name((name for p in result for name in (p.op, p.kernel)), name_width)
    return [
        (place, t.location_names(place, name_width=name_width, path_width=path_width, short=short))
        for place in result
    ]


MAX_SHOWN_LINES = 8


def hot_lines(report: Report) -> list[tuple[str, str, str]]:
    """Return (share of the samples, place, text) of the hottest lines."""
    return [
        (
            t.format_share(line.share),
            f"{t.shorten_path(line.file, 50)}:{line.line}",
            labels.shorten(labels.clean(line.text), 80),
        )
        for line in report.hot_lines[:MAX_SHOWN_LINES]
    ]


def folded_findings(report: Report, finding: Finding) -> list[Finding]:
    """Return the symptoms and alternatives that a finding already covers."""
    covered, result = [finding], []
    sampled = line_not_recorded(report, finding).startswith(SAMPLED_LINE)
    for other in report.findings:
        if sampled and other.subject == HOST_CODE:
            continue  # the line of that finding is already shown as the place of this one
        # an alternative with the same edits repeats a finding
        repeated = (
            other.alternatives and other.edits and any(o.edits == other.edits for o in covered)
        )
        if other.folded_under == finding.rule and not repeated:
            covered.append(other)
            result.append(other)
    return result


def describe_gain(finding: Finding, report: Report | None = None, *, alone: bool = False) -> str:
    """Describe what a fix gains, the same on every screen: ``about 5.4 ms (4.3–5.4 ms), 41%``. A
    time without a unit is per step; with ``alone`` the unit is always named."""
    impact = finding.impact
    if impact is None or impact.gain_ns is None:
        return t.format_gain(finding)
    if finding.after_fix is not None:
        count = (finding.priority or 2) - 1
        condition = "another fix" if report is None else "fix 1"
        if report is not None and count > 1:
            condition = "fixes 1 and 2" if count == 2 else f"fixes 1 to {count}"
        return f"no gain by itself, about {describe_marginal_gain(finding)} after {condition}"
    amount = t.format_saving(impact)
    if not amount.startswith(("up to ", "at least ")):
        amount = f"about {amount}"
    unit = "" if impact.unit == "step" and not alone else f" {t.format_per(impact.unit)}"
    gain_range = t.format_gain_range(finding)
    if amount.startswith("up to ") and not impact.low_ns:
        gain_range = None  # "up to" says it
    shown_range = f" ({gain_range.replace(' to ', '–')})" if gain_range else ""
    share = f", {t.format_share(impact.share)}" if impact.share is not None else ""
    return f"{amount}{unit}{shown_range}{share}"


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


def gain_conditions(finding: Finding, report: Report) -> list[str]:
    """Say what a gain depends on: its range, other fixes, a rank; and why it exceeds the
    evidence. The most important first."""
    reasons, is_little = range_reasons(finding, report), may_gain_little(finding)
    return [
        *(reasons if is_little else ()),
        *order_parts(finding, report),
        *beyond_evidence(finding, report),
        *(() if is_little else reasons),
        *_warn_of_stacks(finding, report),
    ]


def minor_conditions(finding: Finding, report: Report) -> list[str]:
    """Return the conditions that a page may omit: no other figure of the page contradicts them, and
    no gain near zero depends on them."""
    stacks, impact, shown = _warn_of_stacks(finding, report), finding.impact, finding.shown_time
    exceeds = (
        impact is not None
        and shown is not None
        and (impact.high_ns or 0) > MAX_EVIDENCE_RATIO * float(shown.value or 0)
    )
    if {edit.op for edit in finding.edits} == {"remove_skew"}:
        stacks = [*beyond_evidence(finding, report), *stacks]
    needs_reason = exceeds or may_gain_little(finding)
    return stacks if needs_reason else [*range_reasons(finding, report), *stacks]


MIN_SURE_STEPS: Final = 3
"""Minimum number of profiled steps for a certain gain, where no other steps are known."""
MAX_STEP_RATIO: Final = 2.0
"""Maximum ratio of the longest profiled step to the shortest for a certain gain."""
_CONDITIONS: Final = ("If ", LATER_STEPS_FIRST)
"""Beginnings of fixes that help only under a condition."""


def is_conditional(finding: Finding, report: Report) -> bool:
    """Return whether a gain depends on what the trace does not show: the cause is unsure, the fix
    has a condition, stacks slowed the host, or few or uneven steps show it."""
    impact = finding.impact
    return (
        is_unsure(finding)
        or (impact is not None and impact.low_by == "late launches")
        or finding.fix.startswith(_CONDITIONS)
        or bool(_warn_of_stacks(finding, report))
        or bool(describe_weak_steps(report))
    )


def describe_weak_steps(report: Report) -> str:
    """Say that few or uneven profiled steps decide all gains, where no other steps are known. Empty
    if they do not."""
    scope = report.scope
    if report.per != "step" or report.recorded is not None or scope.has_no_step_time:
        return ""
    if 0 < scope.steps_used < MIN_SURE_STEPS:
        return "too few to show how steps vary: record 5"
    uneven = scope.step_max_ns > MAX_STEP_RATIO * scope.step_min_ns > 0
    return "the steps differ, so a gain may too: record more" if uneven else ""


def _warn_of_stacks(finding: Finding, report: Report) -> list[str]:
    """Say that the gain is smaller without Python stacks, if the trace has them, if no other steps
    are known, and if the fix ends the GPU's waits for launches or for Python code."""
    traced = report.inputs[0] if report.inputs else None
    is_python = any("python" in (*edit.select.cause, *edit.select.kind) for edit in finding.edits)
    has_lines = any(place.file for place in finding.where)
    if traced is None or not (traced.with_stack or has_lines) or report.recorded is not None:
        return []
    if not is_python and not any(edit.op == "drop_launch" for edit in finding.edits):
        return []
    return ["recording Python stacks slowed the host, so the gain without them is smaller"]


def may_gain_little(finding: Finding) -> bool:
    """Return whether the gain may be near zero, so that its condition must be next to it."""
    impact = finding.impact
    if impact is None or impact.low_ns is None:
        return False
    return impact.low_ns < MAX_NEAR_ZERO_RATIO * (impact.gain_ns or 0)


MAX_NEAR_ZERO_RATIO: Final = 0.25
"""Ratio of a range's low end to the gain below which the fix may gain little."""


def range_reasons(finding: Finding, report: Report) -> list[str]:
    """Say what decides a wide range. Empty if it is narrow."""
    impact = finding.impact
    if impact is None or not impact.gain_ns or impact.low_ns is None:
        return []
    ends = (impact.low_ns, impact.high_ns or impact.gain_ns)
    decided_by = (impact.low_by, impact.high_by)
    return _explain_ends(finding, report, impact.gain_ns, ends, decided_by)


def _explain_ends(
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
                rest = "; in the replay, hiding the rest saves nothing" * is_replayed(finding)
                return [f"the range begins at 0: {ranged[0]}{rest}"]
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
    shown = _find_time_in_step(finding, report)
    if not shown or max(gains) > MAX_EVIDENCE_RATIO * shown:
        return ""
    removed, low, high = (t.format_share(min(1.0, gain / shown)) for gain in gains)
    return f"{_REMOVED_SHARE} {removed} of this time ({low} to {high})"


def _name_worst_part(finding: Finding, report: Report) -> str:
    """Say which share of the finding's time the fix removes at worst. Empty if an assumption does
    not decide it, or if time and gain are not of the same step."""
    shown, low = _find_time_in_step(finding, report), finding.impact and finding.impact.low_ns
    has_worst = any(edit.worst_factor is not None for edit in finding.edits)
    if not has_worst or not low or low > shown:
        return ""
    return f"at worst the fix removes {t.format_share(low / shown)} of this time"


def _find_time_in_step(finding: Finding, report: Report) -> float:
    """Return the finding's time in the step of its gain, in ns. 0 if it is not known there."""
    shown = 0.0 if finding.shown_time is None else float(finding.shown_time.value or 0)
    if report.step is None or not report.step.window_differs:
        return shown
    # On the CPU, all work is shorter in the run's step by the same ratio.
    return shown * _find_step_ratio(report) if report.scope.device is None else 0.0


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
    "slower host": "the host may be slower than estimated, and {slower}",
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
        "slower": "then limits the step",
        "past": "as little as {low}",
    },
    "high end": {
        "faster": "limits the step less",
        "slower": "then leaves more idle time",
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
    why = why.format(late=_describe_late_launches(report))
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
        or report.step_ns - _gain_ns(finding) >= (1 - PIN_MARGIN) * busy_ns
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
    if "drop_launch" in operations and all(edit.select.under for edit in finding.edits):
        return (
            "only a part of it is in what is replayed" if remaining > 1 - MIN_EVIDENCE_RATIO else ""
        )
    # of work, not of the idle time around it
    of_work = {e.op for e in finding.edits if (e.op, e.select.on) != ("scale", "gap")}
    if of_work == {"drop_launch"} and remaining > 1 - MIN_EVIDENCE_RATIO:
        if scale < 1 - MAX_ASSUMED_DIFFERENCE:
            return _contrast_steps(report)
        if remaining > MAX_GRAPH_COST_SHARE:
            return "the host then limits the step"
        return "the profiler lengthens launches, and graphs have launches too"
    removed = shown_ns * (1.0 - max(factors, default=0.0))  # at least
    if impact.gain_ns >= MIN_EVIDENCE_RATIO * removed:
        return (
            _explain_rest(finding, report, remaining)
            if is_faster and remaining > 1 - MIN_EVIDENCE_RATIO
            else ""
        )
    if operations == {"overlap"}:
        compute = sum(part.ns for part in report.time if part.name == "compute")
        if impact.gain_ns <= compute < shown_ns:
            at_best = "; at best, work for which the GPU now waits hides the rest"
            return "too little other GPU work can hide it" + at_best * (
                (impact.high_ns or 0) > compute
            )
        reason = "little of the other work is independent of it"
        return reason if _is_fully_busy(report) else "the host then limits the step"
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


def _explain_smaller_cpu_gain(finding: Finding, report: Report, shown_ns: float) -> str:
    """Say why a fix of a CPU program gains far less than its time in the evidence. Empty if it does
    not, or if the cause is unknown."""
    gain_ns = _gain_ns(finding)
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


def order_parts(finding: Finding, report: Report) -> list[str]:
    """Say how the fixes above change a finding's gain, and which rank it is on."""
    parts = []
    gain = finding.impact.gain_ns if finding.impact is not None else None
    marginal_gain = finding.marginal_gain_ns
    if finding.after_fix is not None:
        earlier_title = next((f.title for f in report.findings if f.rule == finding.after_fix), "")
        earlier_title = labels.clean(earlier_title) or labels.clean(finding.after_fix)
        parts.append(f"gains only after '{earlier_title}'")
    elif (
        gain is not None
        and marginal_gain is not None
        and finding.priority != 1
        and (abs(marginal_gain - gain) > 0.05 * gain)
    ):
        prefix = "more, " if marginal_gain > gain else ""
        parts.append(f"after the fixes above it saves {prefix}{describe_marginal_gain(finding)}")
        if marginal_gain > gain:
            parts[-1] += _explain_larger_gain_after(finding, report)
        if finding.marginal_low_ns is not None and finding.marginal_high_ns is not None:
            ends = (finding.marginal_low_ns, finding.marginal_high_ns)
            decided_by = (finding.marginal_low_by, finding.marginal_high_by)
            why = _explain_ends(finding, report, marginal_gain, ends, decided_by)
            is_new = why and why != range_reasons(finding, report)
            parts[-1] += f"; {'; '.join(why)}" if is_new else ""
    parts += _explain_order(finding, report)
    if finding.other_rank and finding.trace_rank is not None:
        parts.append(f"on rank {finding.trace_rank}")
    return parts


def _explain_larger_gain_after(finding: Finding, report: Report) -> str:
    """Say why a fix gains more after the fixes before it. Empty if that is unknown."""
    if any(edit.op == "make_async" for edit in finding.edits):
        late_launches = "" if beyond_evidence(finding, report) else _describe_late_launches(report)
        return f"; the host then waits here for the GPU, and launches late{late_launches}"
    if any(edit.op == "drop_launch" for edit in finding.edits):
        return "; the GPU then waits more for launches"
    if any(edit.select.on == "gpu" for edit in finding.edits):
        return "; the host then delays the GPU less"
    return ""


LATE_CAUSES: Final = ("launch", "dispatch", "python", "host_code", "unknown")
"""Causes of idle time that do not occur while the host is ahead of the GPU."""


def _describe_late_launches(report: Report) -> str:
    """Say how long the GPU idles because work is launched late. Empty if it does not."""
    late = sum(cause.ns for cause in report.idle if cause.cause in LATE_CAUSES)
    per = t.format_per(report.per)
    return (
        f" (late launches leave the GPU idle for {t.format_duration(late)} {per})" if late else ""
    )


def _explain_order(finding: Finding, report: Report) -> list[str]:
    """Say why a finding comes before a later one that gains more, the largest of those. Empty if no
    later one gains more."""
    priority = finding.priority
    if priority is None or finding.impact is None or finding.impact.currency != "step_time":
        return []
    later = [f for f in fixes_of_step(report) if (f.priority or 0) > priority and not f.after_fix]
    largest = max(later, key=_gain_ns, default=finding)
    gain, largest_gain = (t.format_duration(_gain_ns(each)) for each in (finding, largest))
    if _gain_ns(largest) <= _gain_ns(finding) or largest_gain == gain:
        return []
    why = "it is the smaller change, so make it first"
    drops_launches = any(edit.op == "drop_launch" for edit in largest.edits)
    marginal_gain = finding.marginal_gain_ns if priority > 1 else None
    if (marginal_gain or 0) >= (largest.marginal_gain_ns or 0) and marginal_gain is not None:
        why = "after the fixes above it saves more"
    elif is_more_certain(finding, largest) and (
        _gain_ns(largest) * largest.confidence < _gain_ns(finding) * finding.confidence
    ):
        share, lower = (
            t.format_share(finding.confidence),
            t.format_share(largest.confidence),
        )
        why = f"its cause is more certain ({share}, not {lower})"
    elif _gain_ns(largest) <= (1 + EQUAL_GAIN) * _gain_ns(finding):
        why = "the two gains are about equal"
        other_low = 0 if largest.impact is None else largest.impact.low_ns or 0
        if largest.alternatives == PRECISION:
            why = "the two gains are about equal, and this fix keeps the results"
        elif (finding.impact.low_ns or 0) > other_low:
            why = "the gains are about equal, and this one's range starts higher"
    elif drops_launches and any(edit.op == "make_async" for edit in finding.edits):
        why = "a CUDA graph cannot be captured around its waits"
    elif drops_launches and finding.edits and all(edit.op == "remove" for edit in finding.edits):
        why = "needless work is better removed than launched faster"
    return [f"ranked above '{labels.clean(largest.title)}' ({largest_gain}): {why}"]


def describe_marginal_gain(finding: Finding) -> str:
    """Describe the gain after the findings before this one: ``2.34 ms (1.9–2.5 ms)``."""
    gain = t.format_duration(finding.marginal_gain_ns)
    if finding.marginal_low_ns is None or finding.marginal_high_ns is None:
        return gain
    low, high = (t.format_duration(n) for n in (finding.marginal_low_ns, finding.marginal_high_ns))
    if low == high:
        return gain
    ends = t.format_range(finding.marginal_low_ns, finding.marginal_high_ns)
    return f"{gain} ({ends.replace(' to ', '–')})"


def shared_caveats(findings: Sequence[Finding]) -> list[str]:
    """List the notes that lower the confidence of several findings, each note once."""
    counts = Counter(note for finding in findings for note in finding.confidence_notes)
    return [labels.clean(note) for note, count in counts.items() if count > 1]


def describe_caveats(finding: Finding, said: Sequence[str] = ()) -> list[str]:
    """List why a finding may be wrong: what lowered its confidence, and what it assumes. ``said``:
    sentences already shown, which are not repeated."""

    def new(caveats: Sequence[str]) -> list[str]:
        return [each for each in caveats if not any(labels.clean(each) in text for text in said)]

    result = new(finding.confidence_notes)
    if assumptions := new(finding.assumptions):
        result.append(f"assumes: {'; '.join(assumptions)}")
    if finding.falsified_by:
        result.append(f"wrong if you see: {finding.falsified_by}")
    return [labels.clean(caveat) for caveat in result]


def covered_line(finding: Finding, other: Finding) -> tuple[str, str]:
    """Describe a folded finding with its gain and its fix, after the label ``or`` for an
    alternative, or ``also`` for a symptom."""
    alternative = are_alternatives(finding, other)
    condition = "instead of this fix" if alternative else "alone"
    title, fix = labels.clean(other.title), t.split_sentences(other.fix, 0)[0]
    names = t.location_names(other.where[0])[:1] if other.where and not alternative else []
    location = "".join(f" ({name})" for name in names if not title.startswith("Line "))
    gain = f"{title}{location}: {describe_gain(other)}, {condition}"
    return ("or" if alternative else "also"), ". ".join(filter(None, (gain, fix)))


MIN_LARGE_NOTE_SHARE: Final = 0.2
"""Minimum share of the step that a note is about, to be shown outside the details."""


def is_large_note(note: Finding, report: Report) -> bool:
    """Return whether a note is about much of the step and its fix may gain. A note stays a detail
    if a replay showed that it gains little."""
    impact = note.impact
    if report.step_ns <= 0 or (impact is not None and impact.gain_ns is None and note.edits):
        return False
    return share_of_note(note, report) >= MIN_LARGE_NOTE_SHARE


def share_of_note(note: Finding, report: Report) -> float:
    """Return the share of the step that a note is about, or may gain if that is more."""
    impact, time = note.impact, note.shown_time
    share = 0.0 if impact is None else impact.share or 0.0
    about = 0.0 if time is None else float(time.value or 0.0) / max(report.scope.step_ns, 1.0)
    return max(share, about)


def is_notable_note(note: Finding, report: Report) -> bool:
    """Return whether a note gets its own line: it may gain as much as the smallest listed fix, and
    enough for a warning."""
    gain = 0 if note.impact is None or not note_gain(note) else note.impact.gain_ns or 0
    listed = [impact.gain_ns or 0 for impact in gains_of_findings(report) if impact.unit != "run"]
    return gain >= max(WARNING_SHARE * report.step_ns, min(listed, default=0))


def explain_note(finding: Finding) -> str:
    """Say why a finding is a note and is not ranked."""
    impact = finding.impact
    if impact is not None and impact.currency == "unknown":
        return labels.clean(impact.reason)
    if finding.validation == "synthetic":
        return "not proven on real traces, and may gain nothing"
    # a rule may itself mark its finding as an opportunity rather than a fault
    return POSSIBLE.format(t.format_share(finding.confidence))


def note_gain(finding: Finding) -> str:
    """Describe what a note could gain: ``if so, 3.82 ms to 12.6 ms``. Empty if that is unknown."""
    impact = finding.impact
    if impact is None or impact.currency != "step_time" or not impact.gain_ns:
        return ""
    return f"if so, {t.format_gain_range(finding) or describe_gain(finding)}"


def fixes_of_step(report: Report) -> list[Finding]:
    """Return the ranked findings whose gain is within the step, not in the time between steps."""
    return [f for f in ranked_findings(report) if f.impact is None or f.impact.unit != "run"]


def gains_of_findings(report: Report) -> list[Impact]:
    """Return the gains of the ranked findings that have one."""
    impacts = (f.impact for f in ranked_findings(report))
    return [impact for impact in impacts if impact is not None and impact.gain_ns]
