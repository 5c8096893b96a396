"""Sentences about the findings of a report: gain, range and its reasons, order, caveats, notes."""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from advisor.advise.gain_reasons import (
    MAX_EVIDENCE_RATIO,
    beyond_evidence,
    describe_late_launches,
    explain_ends,
    gain_of,
    range_reasons,
)
from advisor.advise.impact import MIN_GAIN_SHARE, SEEN, WARNING_SHARE
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
    return max(filter(gain_of, ranked_findings(report)), key=gain_of, default=None)


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
    if impact is None or impact.currency != "step_time" or finding.costs_more_than_recorded:
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


def new_sentences(summary: str, text: str) -> str:
    """Return the sentences of a summary that a text does not contain already."""
    result, rest = [], summary
    while rest:
        sentence, rest = t.split_sentences(rest, 0)
        result += [sentence] * (sentence not in text)
    return " ".join(result)


def describe_evidence(finding: Finding, said: str) -> str:
    """Return the sentences of a finding's summary that a text does not contain, after the rank
    that they are about if the report is of another."""
    sentences = new_sentences(finding.summary, said)
    if not sentences or not finding.other_rank or finding.trace_rank is None:
        return sentences
    return f"On rank {finding.trace_rank}: {t.lower_first(sentences)}"


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
    Shortened names of kernels and operators stay distinct within a finding. PyTorch's own kernels
    are named by their operators."""
    result = [_without_own_kernel(place) for place in distinct_places(finding, limit)]
    if len({(p.file, p.line, p.layer, p.op, p.kernel) for p in result}) < len(result):
        result = distinct_places(finding, limit)
    short = labels.labels_by_name((name for p in result for name in (p.op, p.kernel)), name_width)
    return [
        (place, t.location_names(place, name_width=name_width, path_width=path_width, short=short))
        for place in result
    ]


def _without_own_kernel(place: Location) -> Location:
    """Return a place without a kernel of PyTorch's, which its operator names better."""
    is_own = place.op is not None and "at::native" in (place.kernel or "")
    return replace(place, kernel=None) if is_own else place


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


def gain_conditions(finding: Finding, report: Report) -> list[str]:
    """Say what a gain depends on: its cause, range and other fixes; and why it exceeds the
    evidence. The most important first."""
    reasons, is_little = range_reasons(finding, report), may_gain_little(finding)
    return [
        *_explain_low_confidence(finding),
        *(reasons if is_little else ()),
        *order_parts(finding, report),
        *beyond_evidence(finding, report),
        *(() if is_little else reasons),
        *_warn_of_stacks(finding, report),
    ]


MAX_CONFIDENCE_NOTES: Final = 2


def _explain_low_confidence(finding: Finding) -> list[str]:
    """Say why another cause is more likely than the finding's. Empty if none is."""
    notes = [note.split(": ")[0] for note in finding.confidence_notes]
    reasons = [note for note in notes if not note.startswith(SEEN)][:MAX_CONFIDENCE_NOTES]
    if not reasons or not is_unsure(finding):
        return []
    why = labels.clean("; ".join(reasons))
    return [f"{t.format_share(finding.confidence)} sure of the cause: {why}"]


def minor_conditions(finding: Finding, report: Report) -> list[str]:
    """Return the conditions that a page may omit: no other figure of the page contradicts them, and
    no gain near zero depends on them."""
    stacks, impact, shown = _warn_of_stacks(finding, report), finding.impact, finding.shown_time
    exceeds = (
        impact is not None
        and shown is not None
        and (impact.high_ns or 0) > MAX_EVIDENCE_RATIO * float(shown.value or 0)
    )
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


def order_parts(finding: Finding, report: Report) -> list[str]:
    """Say how the fixes above change a finding's gain."""
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
            parts[-1] += explain_larger_gain_after(finding, report)
        if finding.marginal_low_ns is not None and finding.marginal_high_ns is not None:
            ends = (finding.marginal_low_ns, finding.marginal_high_ns)
            decided_by = (finding.marginal_low_by, finding.marginal_high_by)
            why = explain_ends(finding, report, marginal_gain, ends, decided_by)
            is_new = why and why != range_reasons(finding, report)
            parts[-1] += f"; {'; '.join(why)}" if is_new else ""
    parts += _explain_order(finding, report)
    return parts


def explain_larger_gain_after(finding: Finding, report: Report) -> str:
    """Say why a fix gains more after the fixes before it. Empty if that is unknown."""
    if any(edit.op == "make_async" for edit in finding.edits):
        late_launches = "" if beyond_evidence(finding, report) else describe_late_launches(report)
        return f"; the host then waits here for the GPU, and launches late{late_launches}"
    if any(edit.op == "drop_launch" for edit in finding.edits):
        return "; the GPU then waits more for launches"
    if any(edit.select.on == "gpu" for edit in finding.edits):
        return "; the host then delays the GPU less"
    return ""


def _explain_order(finding: Finding, report: Report) -> list[str]:
    """Say why a finding comes before a later one that gains more, the largest of those. Empty if no
    later one gains more."""
    priority = finding.priority
    if priority is None or finding.impact is None or finding.impact.currency != "step_time":
        return []
    later = [f for f in fixes_of_step(report) if (f.priority or 0) > priority and not f.after_fix]
    largest = max(later, key=gain_of, default=finding)
    gain, largest_gain = (t.format_duration(gain_of(each)) for each in (finding, largest))
    if gain_of(largest) <= gain_of(finding) or largest_gain == gain:
        return []
    why = "it is the smaller change, so make it first"
    drops_launches = any(edit.op == "drop_launch" for edit in largest.edits)
    marginal_gain = finding.marginal_gain_ns if priority > 1 else None
    if (marginal_gain or 0) >= (largest.marginal_gain_ns or 0) and marginal_gain is not None:
        why = "after the fixes above it saves more"
    elif is_more_certain(finding, largest) and (
        gain_of(largest) * largest.confidence < gain_of(finding) * finding.confidence
    ):
        share, lower = (
            t.format_share(finding.confidence),
            t.format_share(largest.confidence),
        )
        why = f"its cause is more certain ({share}, not {lower})"
    elif gain_of(largest) <= (1 + EQUAL_GAIN) * gain_of(finding):
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


def describe_caveats(finding: Finding, sentences: Sequence[str] = ()) -> list[str]:
    """List why a finding may be wrong: what lowered its confidence, and what it assumes.
    ``sentences`` are already shown, and not repeated."""

    def new(caveats: Sequence[str]) -> list[str]:
        return [
            each for each in caveats if not any(labels.clean(each) in text for text in sentences)
        ]

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
