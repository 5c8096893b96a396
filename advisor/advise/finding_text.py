"""Sentences on the findings of a report: gain, range and its reasons, order, caveats, notes."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Final

from advisor.advise.impact import MIN_GAIN_SHARE, WARNING_SHARE
from advisor.advise.priority import EQUAL_GAIN, is_more_certain
from advisor.advise.program_wording import ACTIVITIES
from advisor.core import labels
from advisor.core import text as t
from advisor.core.finding import HOST_CODE, Finding, Impact, Location, are_alternatives
from advisor.core.report import Report
from advisor.core.trace import KINETO

Line = tuple[str, list[str]]
"""Label of a line, and the parts that follow it."""


def ranked_findings(report: Report) -> list[Finding]:
    """Return the findings that are not folded under another, the most valuable first."""
    return [finding for finding in report.findings if finding.folded_under is None]


def is_replayed(finding: Finding) -> bool:
    """Return whether a finding's gain was estimated in a replay of its edits."""
    return bool(finding.edits) or (finding.impact is not None and finding.impact.kind == "replay")


SMALL_SHARE: Final = 2 * MIN_GAIN_SHARE
"""Share of the step below which a gain is not the first to fix: twice what two runs differ by."""


POSSIBLE: Final = "a possibility (confidence in the cause {})"
"""Words for a cause that is not sure, in a verdict, a finding and a note."""
MIN_SURE: Final = 0.5
"""Confidence below which a cause is called a possibility wherever it stands."""


def is_unsure(finding: Finding) -> bool:
    """Return whether a finding's cause is more likely to be another."""
    return finding.confidence < MIN_SURE


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
    """Return the number of steps that events are counted in; 1: none is marked."""
    return 1 if report.per == "recording" else max(1, report.scope.steps_used)


def distinct_places(finding: Finding, limit: int = 3) -> list[Location]:
    """Return where a finding is, worst first, without repeated names."""
    result: dict[object, Location] = {}
    for place in finding.where:
        result.setdefault(
            (place.file, place.line, place.function, place.op, place.kernel, place.step), place
        )
    return list(result.values())[:limit]


SAMPLED_LINE: Final = "stack samples point to"


def line_not_recorded(report: Report, finding: Finding) -> str:
    """Say how to record the line of code of the first finding; empty if it has one, or this kind of
    recording never has."""
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
        how = f"{ACTIVITIES} and with_stack=True"  # stacks alone tie no kernel to a line
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
    said, result = [finding], []
    sampled = line_not_recorded(report, finding).startswith(SAMPLED_LINE)
    for other in report.findings:
        if sampled and other.subject == HOST_CODE:
            continue  # its line is the place of this one
        # an alternative that changes the same says the same again
        same = other.alternatives and other.edits and any(o.edits == other.edits for o in said)
        if other.folded_under == finding.rule and not same:
            said.append(other)
            result.append(other)
    return result


def describe_gain(finding: Finding, report: Report | None = None, *, alone: bool = False) -> str:
    """Describe what a fix gains, the same on every screen: ``about 5.4 ms (4.3–5.4 ms), 41%``. A
    time without a unit is per step; with ``alone`` the unit is always named."""
    impact = finding.impact
    if impact is None or impact.gain_ns is None:
        return t.format_gain(finding)
    if finding.pays_after is not None:
        above = (finding.priority or 2) - 1
        after = "another fix" if report is None else f"fixes 1–{above}" if above > 1 else "fix 1"
        return f"none alone, about {describe_marginal_gain(finding)} after {after}"
    amount = t.format_saving(impact)
    if not amount.startswith(("up to ", "at least ")):
        amount = f"about {amount}"
    unit = "" if impact.unit == "step" and not alone else f" {t.format_per(impact.unit)}"
    spread = t.format_gain_range(finding)
    if amount.startswith("up to ") and not impact.low_ns:
        spread = None  # "up to" says it
    ends = f" ({spread.replace(' to ', '–')})" if spread else ""
    share = f", {t.format_share(impact.share)}" if impact.share is not None else ""
    return f"{amount}{unit}{ends}{share}"


WIDE_HIGH, NO_GAIN = 2.0, 0.01
"""Ends of the range, over the gain, beyond which their reasons are given; and the low end that
counts as no gain."""
MAX_BEYOND_EVIDENCE, MIN_OF_EVIDENCE = 1.01, 0.8
"""Ratios of gain to the time in the evidence beyond which the difference is explained: above the
first, and below the second of what the fix should remove of it."""
AS_ASSUMED: Final = 0.1
"""Difference up to which the share of the work that stays is what the fix is assumed to leave."""
MIN_DEVICE_BOUND_SHARE: Final = 0.95
"""GPU busy share from which not the host but other GPU work limits a step."""


def gain_conditions(finding: Finding, report: Report) -> list[str]:
    """Say what a gain depends on: its range, other fixes, a rank; and why it exceeds the
    evidence. The most important first."""
    ends, little = range_reasons(finding), may_gain_little(finding)
    return [
        *(ends if little else ()),
        *order_parts(finding, report),
        *beyond_evidence(finding, report),
        *(() if little else ends),
        *_with_stacks(finding, report),
    ]


def minor_conditions(finding: Finding, report: Report) -> list[str]:
    """Return those of the conditions without which a page can do: what no other figure of the page
    contradicts, and no gain near zero depends on."""
    stacks = _with_stacks(finding, report)
    return stacks if may_gain_little(finding) else [*range_reasons(finding), *stacks]


def _with_stacks(finding: Finding, report: Report) -> list[str]:
    """Say that the gain is smaller without the Python stacks, where they are in a trace of unknown
    other steps, and the fix ends the GPU's waits for launches or for Python code."""
    traced = report.inputs[0] if report.inputs else None
    python = any("python" in (*edit.select.cause, *edit.select.kind) for edit in finding.edits)
    lines = any(place.file for place in finding.where)
    if traced is None or not (traced.with_stack or lines) or report.recorded is not None:
        return []
    if not python and not any(edit.op == "drop_launch" for edit in finding.edits):
        return []
    return ["expect less without Python stacks, which slow the host while they are recorded"]


def may_gain_little(finding: Finding) -> bool:
    """Return whether the gain may be near zero, so that its condition belongs beside it."""
    impact = finding.impact
    if impact is None or impact.low_ns is None:
        return False
    return impact.low_ns < NEAR_ZERO * (impact.gain_ns or 0)


NEAR_ZERO: Final = 0.25
"""Part of the gain below which the low end of its range counts as little."""


def range_reasons(finding: Finding) -> list[str]:
    """Say what decides a wide range; empty if it is narrow."""
    impact = finding.impact
    if impact is None or not impact.gain_ns or impact.low_ns is None:
        return []
    ends = (impact.low_ns, impact.high_ns or impact.gain_ns)
    return _reasons(finding, impact.gain_ns, ends, (impact.low_by, impact.high_by))


def _reasons(
    finding: Finding, gain: int, range_ns: tuple[int, int], decided_by: tuple[str, str]
) -> list[str]:
    """Say what decides those ends of a range that lie far from the gain."""
    low, high = range_ns
    ends = []
    if low < t.WIDE_LOW * gain:
        ends.append(("low end", decided_by[0]))
    if high > WIDE_HIGH * gain:
        ends.append(("high end", decided_by[1]))
    # the assumption that has a range itself, or says what happens at worst
    ranged = [labels.clean(text) for text in finding.assumptions if RANGED.search(text)]
    assumed = ranged[0] if ranged else _parts_removed(finding, low / gain, high / gain)
    if ends and {by for _, by in ends} <= {"assumption", ""} and finding.assumptions:
        if low < NO_GAIN * gain:
            if ranged and ranged[0].startswith("at worst"):
                return [f"the range begins at 0: {ranged[0]}"]
            return [f"no gain unless {labels.clean((ranged or finding.assumptions)[0])}"]
        if assumed:
            return [f"range: {assumed}"]
    beside = any(e.factor == 1 and e.factor_low not in (None, 1) for e in finding.edits)
    if beside or {edit.op for edit in finding.edits} == {"overlap"}:
        by_best = BESIDE if beside else "overlap"
        ends = [(end, by_best if (end, by) == ("high end", "assumption") else by)
                for end, by in ends]  # fmt: skip
    past = {"low": t.format_share(low / gain), "high": t.format_share(high / gain)}
    if [by for _, by in ends] == ["past", "past"]:
        both = DECIDED_BY["past"].format(past="{low} to {high}").format(**past)
        return [f"range: {both}"]
    assumed = assumed or "programs differ in how much of this time the fix removes"
    reasons: dict[str, list[str]] = {}
    for end, by in ends:
        words = {key: text.format(**past) for key, text in ENDS_DIFFER[end].items()}
        reasons.setdefault(DECIDED_BY[by].format(assumed=assumed, **words), []).append(end)
    return [f"{' and '.join(which)}: {why}" for why, which in reasons.items() if why]


def _parts_removed(finding: Finding, least: float, most: float) -> str:
    """Say which parts of the time the fix removes at worst and at best, which make its gain
    ``least`` and ``most`` times as large; empty: it does not have one such range."""
    ranges = {
        (edit.factor, edit.factor_low, edit.factor_high)
        for edit in finding.edits
        if edit.factor_low is not None or edit.factor_high is not None
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
    parts = ((1 - usual) * times for times in (1.0, least, most))
    removed, low, high = (t.format_share(min(part, 1.0)) for part in parts)
    return f"we assume that the fix removes {removed} of this time ({low} to {high})"


RANGED: Final = re.compile(r"[\d%] to \d|at worst|at best")
"""Assumptions that say how far what they assume may be off."""
BESIDE: Final = "beside"
"""Cause of a high end where an edit expects no change, and some at best."""
DECIDED_BY: Final = {
    "": "",
    BESIDE: "at best the fix shortens other work too",
    "overlap": "at best other work hides all of this time",
    "assumption": "{assumed}",
    "faster host": "the host runs faster without the profiler, and {faster}",
    "slower host": "the host may be slower than estimated, and {slower}",
    "hand-over": "results are handed over from other processes",
    "replay error": "the replay without changes misses the measured step by as much",
    "shared cores": "collectives take cores from the work beside them",
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
"""Words of DECIDED_BY that differ by end."""
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
    remove of it. Empty if it is neither."""
    impact = finding.impact
    if impact is None or impact.currency != "step_time" or not impact.gain_ns:
        return []
    shown = finding.shown_time
    if shown is None:
        return []
    amount = t.format_duration(float(shown.value or 0))
    below = amount in t.first_sentence(finding.summary)
    time = f"the {amount} {'below' if below else f'of {labels.clean(shown.label)}'}"
    operations: list[str] = [edit.op for edit in finding.edits]
    if why := _why_less(finding, report, float(shown.value or 0)):
        return [f"the gain is less than {time}: {why}"]
    if impact.gain_ns <= MAX_BEYOND_EVIDENCE * float(shown.value or 0):
        return []
    scale = max(1.0, report.gain_scale or 1.0)
    of_run = impact.gain_ns <= MAX_BEYOND_EVIDENCE * scale * float(shown.value or 0)
    if of_run or (report.scope.device is None and not impact.of_job):
        return [f"the gain is more than {time}: {_two_steps(report)}"]
    why = "the launches of this work, and the gaps in it, are saved too"
    if {*operations} == {"scale"} and all(edit.select.on == "gpu" for edit in finding.edits):
        why = "other kernels become faster too"
    for at in ("round_trip", "without_gradient"):
        if any(edit.select.at == at for edit in finding.edits):
            operations = [at]
    why = next((WHY_MORE[name] for name in WHY_MORE if name in operations), why)
    why = why.format(late=_late_launches(report))
    if impact.of_job:
        why = "other ranks gain too, and wait less for each other"
    return [f"the gain is more than {time}: {why}"]


def _is_busy(report: Report) -> bool:
    """Whether the device is busy so long in the run's step that the host hardly holds it up; so it
    is where that is unknown."""
    scale = min(1.0, report.gain_scale or 1.0)
    return report.busy_share is None or report.busy_share >= MIN_DEVICE_BOUND_SHARE * scale


def _why_less(finding: Finding, report: Report, shown_ns: float) -> str:
    """Say why the fix gains far less than the time that it removes; empty: it does not, or the
    cause is unknown."""
    impact = finding.impact
    if impact is None or not impact.gain_ns or impact.of_job:
        return ""
    operations = {edit.op for edit in finding.edits}
    if report.scope.device is None:
        hidden = operations == {"overlap"} and impact.gain_ns < MIN_OF_EVIDENCE * shown_ns
        return "little independent work is left to hide it under" if hidden else ""
    places = {edit.select.on for edit in finding.edits}
    scale = min(1.0, report.gain_scale or 1.0)
    left = 1.0 - impact.gain_ns / max(shown_ns, 1.0)
    factors = [edit.factor or 0.0 for edit in finding.edits if edit.select.on != "gap"]
    faster = operations <= {"scale", "merge"} and places == {"gpu"} and max(factors, default=0) > 0
    if operations <= {"remove", "scale", "merge"} and places == {"gpu"} and _is_busy(report):
        if left <= 1 - MIN_OF_EVIDENCE:
            return ""
        if faster and left <= max(factors) + AS_ASSUMED:
            return _what_remains(finding, left)
    if "drop_launch" in operations and all(edit.select.under for edit in finding.edits):
        return "only a part of it is in what is replayed" if left > 1 - MIN_OF_EVIDENCE else ""
    if operations == {"drop_launch"} and report.recorded is None and left > 1 - MIN_OF_EVIDENCE:
        return "the profiler lengthens launches, and graphs have launches too"
    removed = shown_ns * (1.0 - max(factors, default=0.0))  # at least
    if impact.gain_ns >= MIN_OF_EVIDENCE * removed:
        return _what_remains(finding, left) if faster and left > 1 - MIN_OF_EVIDENCE else ""
    if operations == {"overlap"}:
        compute = sum(part.ns for part in report.time if part.name == "compute")
        if impact.gain_ns <= compute < shown_ns:
            return "too little other GPU work can hide it"
        independent = "little of the other work is independent of it"
        return independent if _is_busy(report) else "the host then limits the step"
    if operations == {"make_async"}:
        return "the GPU works during the rest of these waits"
    if not operations <= {"remove", "scale", "merge"}:
        return ""
    reasons = [_two_steps(report)] if scale < 1 else []
    if impact.gain_ns < MIN_OF_EVIDENCE * scale * removed:
        if places == {"host"}:
            reasons.append("the GPU works during the rest of it")
        elif "gpu" in places and report.busy_share is not None:
            reasons.append(
                "other GPU work runs beside it"
                if _is_busy(report) and not _leaves_idle(report, impact.gain_ns, scale * removed)
                else "the host then limits the step"
            )
    return ", and ".join(reasons)


def _what_remains(finding: Finding, left: float) -> str:
    """Say what share is left of work that a fix makes faster, and why."""
    why = "the work remains and becomes faster"
    if any(edit.factor == 1.0 for edit in finding.edits):
        why = "part of the work keeps its time"
    elif all("communication" in edit.select.family for edit in finding.edits):
        why = "the transfer itself remains"
    return f"about {t.format_share(left)} of it stays, as {why}"


def _leaves_idle(report: Report, gain_ns: float, removed_ns: float) -> bool:
    """Return whether the device is busy for less than ``MIN_DEVICE_BOUND_SHARE`` of the step that a
    fix leaves, which removes ``removed_ns`` of its work."""
    work = (report.busy_share or 0.0) * report.scope.step_ns * min(1.0, report.gain_scale or 1.0)
    return work - removed_ns < MIN_DEVICE_BOUND_SHARE * (report.step_ns - gain_ns)


def _two_steps(report: Report) -> str:
    """Say that a finding's time is of the profiled step, and its gain of the run's."""
    step = report.step
    if step is None or step.window_ns is None:
        return "a step of the run is not as long as a profiled one"
    profiled, own = t.format_duration(step.window_ns), t.format_duration(step.reference_ns)
    return f"that time is of the profiled step ({profiled}), the gain is of the run's ({own})"


def order_parts(finding: Finding, report: Report) -> list[str]:
    """Say how the fixes above change a finding's gain, and on which rank it is."""
    parts = []
    own = finding.impact.gain_ns if finding.impact is not None else None
    left = finding.marginal_gain_ns
    if finding.pays_after is not None:
        before = next((f.title for f in report.findings if f.rule == finding.pays_after), "")
        before = labels.clean(before) or labels.clean(finding.pays_after)
        parts.append(f"gains only after '{before}'")
    elif (
        own is not None
        and left is not None
        and finding.priority != 1
        and (abs(left - own) > 0.05 * own)
    ):
        more = "more, " if left > own else ""
        parts.append(f"after the fixes above it saves {more}{describe_marginal_gain(finding)}")
        if left > own:
            parts[-1] += _why_more_after(finding, report)
        if finding.marginal_low_ns is not None and finding.marginal_high_ns is not None:
            ends = (finding.marginal_low_ns, finding.marginal_high_ns)
            by = (finding.marginal_low_by, finding.marginal_high_by)
            why = _reasons(finding, left, ends, by)
            parts[-1] += f"; {'; '.join(why)}" if why and why != range_reasons(finding) else ""
    parts += _why_before(finding, report)
    if finding.other_rank and finding.trace_rank is not None:
        parts.append(f"on rank {finding.trace_rank}")
    return parts


def _why_more_after(finding: Finding, report: Report) -> str:
    """Say why a fix gains more after those before it; empty: unknown."""
    if any(edit.op == "make_async" for edit in finding.edits):
        late = "" if beyond_evidence(finding, report) else _late_launches(report)
        return f"; the host then waits here for the GPU, and launches late{late}"
    if any(edit.op == "drop_launch" for edit in finding.edits):
        return "; the GPU then waits more for launches"
    if any(edit.select.on == "gpu" for edit in finding.edits):
        return "; the host then holds the GPU up less"
    return ""


LATE_CAUSES: Final = ("launch", "dispatch", "python", "host_code", "unknown")
"""Causes of idle time that a host ahead of the GPU does not let arise."""


def _late_launches(report: Report) -> str:
    """Say how long the GPU idles because work is launched late; empty: not at all."""
    late = sum(cause.ns for cause in report.idle if cause.cause in LATE_CAUSES)
    per = t.format_per(report.per)
    return (
        f" (late launches leave the GPU idle for {t.format_duration(late)} {per})" if late else ""
    )


def _why_before(finding: Finding, report: Report) -> list[str]:
    """Say why a finding comes before the one after it that gains most, if that gains more; empty:
    none does."""

    def gain(other: Finding) -> int:
        return 0 if other.impact is None else other.impact.gain_ns or 0

    place = finding.priority
    if place is None or finding.impact is None or finding.impact.currency != "step_time":
        return []
    after = [f for f in fixes_of_step(report) if (f.priority or 0) > place and not f.pays_after]
    most = max(after, key=gain, default=finding)
    more = t.format_duration(gain(most))
    if gain(most) <= gain(finding) or more == t.format_duration(gain(finding)):
        return []
    why = "its fix is the smaller change, and leaves less to the other"
    launches = any(edit.op == "drop_launch" for edit in most.edits)
    kept = finding.marginal_gain_ns if place > 1 else None
    if (kept or 0) >= (most.marginal_gain_ns or 0) and kept is not None:
        why = "after the fixes above it saves more"
    elif is_more_certain(finding, most) and (
        gain(most) * most.confidence < gain(finding) * finding.confidence
    ):
        sure, less = t.format_share(finding.confidence), t.format_share(most.confidence)
        why = f"its cause is more certain ({sure}, not {less})"
    elif gain(most) <= (1 + EQUAL_GAIN) * gain(finding):
        why = "the two gains are about equal"
    elif launches and any(edit.op == "make_async" for edit in finding.edits):
        why = "a CUDA graph cannot be captured around its waits"
    elif launches and finding.edits and all(edit.op == "remove" for edit in finding.edits):
        why = "work that need not be done need not be launched faster"
    return [f"ranked above '{labels.clean(most.title)}' ({more}): {why}"]


def describe_marginal_gain(finding: Finding) -> str:
    """Describe what a finding gains after those before it: ``2.34 ms (1.9–2.5 ms)``."""
    gain = t.format_duration(finding.marginal_gain_ns)
    if finding.marginal_low_ns is None or finding.marginal_high_ns is None:
        return gain
    low, high = (t.format_duration(n) for n in (finding.marginal_low_ns, finding.marginal_high_ns))
    if low == high:
        return gain
    ends = t.format_range(finding.marginal_low_ns, finding.marginal_high_ns)
    return f"{gain} ({ends.replace(' to ', '–')})"


def shared_caveats(findings: Sequence[Finding]) -> list[str]:
    """List what lowers the confidence of several findings, each once."""
    counts = Counter(note for finding in findings for note in finding.confidence_notes)
    return [labels.clean(note) for note, count in counts.items() if count > 1]


def describe_caveats(finding: Finding, said: Sequence[str] = ()) -> list[str]:
    """List why a finding may be wrong: what lowered its confidence, what it assumes. ``said``:
    sentences above, which are not repeated."""

    def new(caveats: Sequence[str]) -> list[str]:
        return [each for each in caveats if not any(labels.clean(each) in text for text in said)]

    result = new(finding.confidence_notes)
    if assumptions := new(finding.assumptions):
        result.append(f"assumes: {'; '.join(assumptions)}")
    if finding.falsified_by:
        result.append(f"wrong if you see: {finding.falsified_by}")
    return [labels.clean(caveat) for caveat in result]


def covered_line(finding: Finding, other: Finding) -> tuple[str, str]:
    """Name a folded finding, its gain and its fix: (``or``, …) for an alternative, (``also``, …)
    for a symptom."""
    alternative = are_alternatives(finding, other)
    how = "instead of this fix" if alternative else "alone"
    title, fix = labels.clean(other.title), t.split_sentences(other.fix, 0)[0]
    names = t.location_names(other.where[0])[:1] if other.where and not alternative else []
    place = "".join(f" ({name})" for name in names if not title.startswith("Line "))
    gain = f"{title}{place}: {describe_gain(other)}, {how}"
    return ("or" if alternative else "also"), ". ".join(filter(None, (gain, fix)))


LARGE_NOTE: Final = 0.2
"""Share of the step that a note is about from which it is not left to the details."""


def is_large_note(note: Finding, report: Report) -> bool:
    """Return whether a note is about much of the step, and its fix may gain: where a replay showed
    that it gains little, it stays a detail."""
    impact = note.impact
    if report.step_ns <= 0 or (impact is not None and impact.gain_ns is None and note.edits):
        return False
    return share_of_note(note, report) >= LARGE_NOTE


def share_of_note(note: Finding, report: Report) -> float:
    """Return the share of the step that a note is about, or may gain if that is more."""
    impact, time = note.impact, note.shown_time
    share = 0.0 if impact is None else impact.share or 0.0
    about = 0.0 if time is None else float(time.value or 0.0) / max(report.scope.step_ns, 1.0)
    return max(share, about)


def is_notable_note(note: Finding, report: Report) -> bool:
    """Return whether a note may gain as much as the smallest listed fix, and enough for a warning:
    it has a line of its own."""
    gain = 0 if note.impact is None or not note_gain(note) else note.impact.gain_ns or 0
    listed = [impact.gain_ns or 0 for impact in gains_of_findings(report) if impact.unit != "run"]
    return gain >= max(WARNING_SHARE * report.step_ns, min(listed, default=0))


def explain_note(finding: Finding) -> str:
    """Say why a finding is a note and not ranked."""
    impact = finding.impact
    if impact is not None and impact.currency == "unpriced":
        return labels.clean(impact.reason)
    if finding.validation == "synthetic":
        return "not proven on real traces, and may gain nothing"
    # a rule may say so itself of what it sees: a chance, and nothing that is wrong
    return POSSIBLE.format(t.format_share(finding.confidence))


def note_gain(finding: Finding) -> str:
    """Describe what a note could gain: ``if so, 3.82 ms to 12.6 ms``; empty if unknown."""
    impact = finding.impact
    if impact is None or impact.currency != "step_time" or not impact.gain_ns:
        return ""
    return f"if so, {t.format_gain_range(finding) or describe_gain(finding)}"


def fixes_of_step(report: Report) -> list[Finding]:
    """Return the ranked findings whose gain is of the step, not of the time between steps."""
    return [f for f in ranked_findings(report) if f.impact is None or f.impact.unit != "run"]


def gains_of_findings(report: Report) -> list[Impact]:
    """Return the gains of the ranked findings that have one."""
    found = (f.impact for f in ranked_findings(report))
    return [impact for impact in found if impact is not None and impact.gain_ns]
