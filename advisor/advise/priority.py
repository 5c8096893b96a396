"""Order of the findings: by marginal gain, with symptoms and alternatives folded under what
explains them. Risks, whose effect is no step time, and notes stand apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from msgspec.structs import replace

from advisor.advise.impact import (
    MIN_GAIN_SHARE,
    WARNING_SHARE,
    gain_may_be_zero,
    may_matter,
    scales_to_run,
    without_gain,
)
from advisor.core.finding import HOST_CODE, Finding, are_alternatives
from advisor.core.rule import Rule
from advisor.measure import Analysis
from advisor.measure.device.kernel_profiles import ONE_LAUNCH
from advisor.replay.estimators import GainEstimator
from advisor.replay.selection import selected_gpu, selected_host

FOLD_BELOW = 0.25
"""Share of its own gain that a finding must keep after those before it, else it is a symptom."""
LEADS_FROM = 1 / 3
"""Share of a general idle-time finding's gain from which one that names the code behind it comes
first. Its fix is the smaller change, and leaves less to the other."""
MOSTLY_BUSY = 0.5
"""GPU-busy share of the step from which slow GPU work of its own comes first likewise."""
WAITS_LEAD_FROM = 0.10
"""Share of the step from which frequent waits for the GPU come before launching less, since no
graph can hold them, and work that need not be done before launching it faster. Launching itself is
reported from the same share."""

EQUAL_CONFIDENCE, EQUAL_GAIN = 0.1, 0.1
"""Difference of two confidences, and relative difference of two gains, up to which they count as
equal: both are estimates."""
VAGUE_WEIGHT = 0.5
"""Weight of a finding that names no place and may gain nothing."""

MAX_APART = 30
"""Number of launches between two waits for the GPU that do not fill its queue."""


@dataclass(frozen=True)
class PrioritizedFindings:
    """Findings of a report by where they are shown."""

    findings: list[Finding]
    """Ranked findings, then those that are folded under them."""
    risks: list[Finding]
    """Findings on memory, time over the run, or risks; the most certain first."""
    notes: list[Finding]

    def map_findings(self, change: Callable[[list[Finding]], list[Finding]]) -> PrioritizedFindings:
        return PrioritizedFindings(change(self.findings), self.risks, change(self.notes))

    @property
    def advice(self) -> list[Finding]:
        """Ranked findings of the analysed rank: the fixes to follow."""
        return [f for f in self.findings if f.priority is not None and not f.other_rank]


def _gain_per_launch(note: Finding) -> float:
    """Return the negative saving of one launch of a profiled kernel, ns, to sort by; 0: none."""
    return -sum(float(e.value or 0) for e in note.evidence if e.label == ONE_LAUNCH)


def prioritize(
    findings: Sequence[Finding], a: Analysis, estimator: GainEstimator, rules: Sequence[Rule] = ()
) -> PrioritizedFindings:
    """Return the findings in the order to follow them. One without replayed gain, although the
    device waits for it, becomes a note. One without gain by either estimate is left out.

    Gains stay those of the window; they are compared as they are in the run's own step."""
    floor = max(MIN_GAIN_SHARE * a.step_ns, estimator.error)
    candidates, unknown, notes, risks, unsure = [], [], [], [], []
    for finding in findings:
        impact = finding.impact
        timed = impact is not None and impact.currency == "step_time"
        gain = None if impact is None else impact.gain_ns
        if finding.informational and timed and gain is not None and gain < floor:
            notes += without_gain([finding], estimator, a, WARNING_SHARE * a.step_ns)
        elif gain_may_be_zero(finding, floor):
            if may_matter(finding, a.step_ns):
                unsure.append(finding)
        elif (
            finding.informational
            or impact is None
            or (impact.currency == "unpriced" and not finding.known_cost)
        ):
            notes.append(finding)
        elif not timed and not finding.known_cost and not _counts_in_run(finding):
            risks.append(finding)
        elif timed:
            candidates.append(finding)
        else:
            unknown.append(finding)
    scales = scales_to_run(candidates, a, estimator)
    ordered, dropped = _order(candidates, scales, estimator, floor, a)
    unknown += [finding for finding in dropped if finding.known_cost]
    dropped = [finding for finding in dropped if not finding.known_cost]
    ordered = _with_unknown(ordered, unknown)
    for risk in [each for each in risks if each.alternatives]:
        rival = next((f for f in ordered if f.alternatives == risk.alternatives), None)
        if rival is not None:
            risks.remove(risk)
            ordered.append(replace(risk, folded_under=rival.rule))
    ranked = [finding for finding in ordered if finding.priority is not None]
    notes += [note for note in unsure if not _is_covered(note, ranked, estimator)]
    alone = [finding for finding in dropped if not _is_part(finding, ranked, a)]
    notes += without_gain(alone, estimator, a, floor, ranked)
    notes.sort(key=_gain_per_launch)
    if ranked:
        general = {rule.id for rule in rules if rule.only_without_findings}
        notes = [note for note in notes if note.rule not in general]
    notes = _distinct(notes, ordered)
    return PrioritizedFindings(ordered, sorted(risks, key=lambda f: -f.confidence), notes)


def _distinct(notes: Sequence[Finding], ordered: Sequence[Finding]) -> list[Finding]:
    """Leave out notes about the same time as a finding or a note before them: alternatives."""
    result: list[Finding] = []
    for note in notes:
        said = {each.alternatives for each in (*ordered, *result)} - {""}
        if note.alternatives not in said:
            result.append(note)
    return result


def _is_covered(note: Finding, ranked: Sequence[Finding], estimator: GainEstimator) -> bool:
    """Return whether ranked fixes take nearly all that the note's fix would save: it is about the
    same time."""
    applied = [edit for other in ranked if estimator.overlaps(other) for edit in other.edits]
    if not applied or not estimator.overlaps(note):
        return False
    alone = estimator.marginal(note.edits, [])
    return alone > 0 and estimator.marginal(note.edits, applied) < FOLD_BELOW * alone


SAME_WORK = 0.9
"""Share of a finding's device time that a ranked fix changes too, from which it has no note."""


def _is_part(finding: Finding, ranked: Sequence[Finding], a: Analysis) -> bool:
    """Return whether a ranked fix changes the same device work, in the same way. A note that this
    work gains nothing would contradict it."""
    own = [edit for edit in finding.edits if edit.select.on == "gpu"]
    if len(own) < len(finding.edits) or a.device_id is None or not own:
        return False
    work = np.logical_or.reduce([selected_gpu(a, edit.select) for edit in own])
    ops = {edit.op for edit in own}
    dur = a.trace.gpu["dur"].to_numpy()
    return any(
        float(dur[work & selected_gpu(a, edit.select)].sum()) >= SAME_WORK * float(dur[work].sum())
        for other in ranked
        for edit in other.edits
        if edit.op in ops and edit.select.on == "gpu"
    )


def _counts_in_run(finding: Finding) -> bool:
    """Return whether a finding surely saves much of the run, though not of each step."""
    impact = finding.impact
    if impact is None or impact.currency != "run_time" or not impact.gain_ns:
        return False
    return finding.share_of_step * (impact.low_ns or 0) / impact.gain_ns >= WARNING_SHARE


def _with_unknown(ordered: list[Finding], others: list[Finding]) -> list[Finding]:
    """Insert findings that no replay orders: gains over the run by their share, and unknown gains
    ahead of the small ones, and of those that name no cause."""
    if not others:
        return ordered
    placed = [f for f in ordered if f.priority is not None]
    for finding in sorted(others, key=lambda each: each.share_of_step):
        share = finding.share_of_step or WARNING_SHARE
        index = next(
            (n for n, other in enumerate(placed) if other.share_of_step < share or is_vague(other)),
            len(placed),
        )
        placed.insert(index, finding)
    ranked = [replace(finding, priority=place) for place, finding in enumerate(placed, 1)]
    return ranked + [f for f in ordered if f.priority is None]


def _order(
    findings: list[Finding],
    scales: list[float],
    estimator: GainEstimator,
    floor: float,
    a: Analysis,
) -> tuple[list[Finding], list[Finding]]:
    """Return the findings by marginal gain, weighed by confidence, the largest first; and those
    left out.
    ``scales``: ratios of the findings' gains in the run's step to those in the window's.

    Each choice is made as if the findings chosen before were done. What then keeps almost nothing
    is folded under the one that took most of it, and so are alternatives of a chosen finding.
    What gains nothing alone but ``WARNING_SHARE`` of the step after others is shown with
    ``pays_after``; what never pays is left out. Folded findings come last, without a rank."""
    waiting = list(range(len(findings)))
    latest = [_own_gain(finding) for finding in findings]
    chosen: list[Finding] = []
    folded: list[Finding] = []
    shown: set[int] = set()
    while waiting:
        index, gain = _best(findings, scales, waiting, latest, chosen, estimator)
        if removes_whole_idle_kind(findings[index]):
            general = index, gain
            index, gain = _named_cause(findings, scales, waiting, general, chosen, estimator, a)
        elif _is_of_all_code(findings[index]):
            index, gain = _cause_inside(findings, scales, waiting, (index, gain), chosen, estimator)
        waiting.remove(index)
        best, alone = findings[index], _own_gain(findings[index])
        rival = next((c for c in chosen if are_alternatives(c, best)), None)
        if rival is None and chosen and gain < FOLD_BELOW * alone:
            rival = min(chosen, key=lambda c: marginal_gain(best, [c], estimator))
        if rival is not None:
            if alone >= floor:
                folded.append(replace(best, folded_under=rival.rule))
                shown.add(index)
        elif gain >= (floor if alone >= floor else WARNING_SHARE * a.step_ns):
            after = None
            if alone < floor and chosen:  # the one without which most of the gain stays out
                after = max(chosen, key=lambda c: marginal_gain(best, [c], estimator)).rule
            place = len(chosen) + 1
            ranged = _with_range(best, gain, chosen, estimator)
            chosen.append(replace(ranged, priority=place, pays_after=after))
            shown.add(index)
    return chosen + folded, [f for index, f in enumerate(findings) if index not in shown]


def removes_whole_idle_kind(finding: Finding) -> bool:
    """Return whether a finding removes a kind of idle time (launching, allocation), with no
    cause."""
    return bool(finding.edits) and all(
        edit.select.on == "gap"
        and not (edit.select.under or edit.select.name)
        and edit.select.at in ("", "step_start")
        for edit in finding.edits
    )


def _named_cause(
    findings: list[Finding],
    scales: list[float],
    waiting: list[int],
    general: tuple[int, float],
    chosen: list[Finding],
    estimator: GainEstimator,
    a: Analysis,
) -> tuple[int, float]:
    """Return the finding to choose before a general one that gains more, and its gain. It names
    code whose fix saves much; if there is none, it is the general one."""
    result, most = general, 0.0
    idles = a.breakdown.busy.total < MOSTLY_BUSY * a.span_ns
    captures = any(edit.op == "drop_launch" for edit in findings[general[0]].edits)
    for index in waiting:
        finding = findings[index]
        if finding.other_rank or not finding.edits or removes_whole_idle_kind(finding):
            continue
        if idles and all(edit.select.on == "gpu" for edit in finding.edits):
            continue
        scale = scales[index] / scales[general[0]] if scales[general[0]] else 1.0
        least = LEADS_FROM * general[1]
        if captures and WAITS_LEAD_FROM * a.step_ns < least:
            needless = all(edit.op == "remove" for edit in finding.edits)
            if needless or _fills_queue(finding, a):
                least = WAITS_LEAD_FROM * a.step_ns
        least = max(most, least)
        if _own_gain(finding) * scale < least:
            continue
        gain = marginal_gain(finding, chosen, estimator)
        if gain * scale >= least:
            most = gain * scale
            result = index, gain
    return result


def _is_of_all_code(finding: Finding) -> bool:
    """Return whether a finding is on all code of a place, whatever it does."""
    return finding.subject == HOST_CODE and not finding.edits


def _cause_inside(
    findings: list[Finding],
    scales: list[float],
    waiting: list[int],
    whole: tuple[int, float],
    chosen: list[Finding],
    estimator: GainEstimator,
) -> tuple[int, float]:
    """Return the finding to choose before one on all code of a function: one that says what takes
    much of its time, in the same function; if there is none, it is that on all code."""
    here = {place.function for place in findings[whole[0]].where} - {None}
    least = LEADS_FROM * whole[1] * scales[whole[0]]
    inside = [
        (index, gain)
        for index in waiting
        if findings[index].edits
        and any(place.function in here for place in findings[index].where[:1])
        and (gain := marginal_gain(findings[index], chosen, estimator)) * scales[index] >= least
    ]
    return max(inside, key=lambda each: each[1] * scales[each[0]], default=whole)


def _fills_queue(finding: Finding, a: Analysis) -> bool:
    """Return whether only this finding's waits keep the host from getting ahead of the GPU and
    filling its queue."""
    gone = [selected_host(a, edit.select) for edit in finding.edits if edit.op == "make_async"]
    if not gone or a.syncs.is_empty():
        return False
    waits = a.syncs.filter(~pl.col("profiler")).with_columns(wait=pl.coalesce("op", "host"))
    stays = waits.filter(pl.Series(~np.logical_or.reduce(gone)[waits["host"].to_numpy()]))
    launches = int(a.in_window.sum())
    before, after = waits["wait"].n_unique(), stays["wait"].n_unique()
    return MAX_APART * after <= launches < MAX_APART * before


def _own_gain(finding: Finding) -> float:
    impact = finding.impact
    return float(impact.gain_ns or 0) if impact is not None else 0.0


def is_more_certain(finding: Finding, other: Finding) -> bool:
    """Return whether a finding's cause is so much more certain than another's that it counts."""
    return finding.confidence - other.confidence > EQUAL_CONFIDENCE + 1e-9


def is_vague(finding: Finding) -> bool:
    """Return whether a finding names no place and may gain nothing."""
    impact = finding.impact
    timed = impact is not None and impact.currency == "step_time"
    return timed and not finding.where and impact is not None and not impact.low_ns


def _best(
    findings: list[Finding],
    scales: list[float],
    waiting: list[int],
    latest: list[float],
    chosen: list[Finding],
    estimator: GainEstimator,
) -> tuple[int, float]:
    """Return the finding to choose next of those waiting, and its marginal gain in the window's
    step: the one with the largest gain × weight in the run's step, unless one that is about as
    certain gains clearly more.

    Gains mostly shrink as others are done, so each is looked at again only when its last gain
    could still win; what gained nothing is looked at again every time, because a fix may begin to
    pay once another has moved the bottleneck. ``latest`` is brought up to date."""
    largest = max(map(abs, latest), default=0.0)
    fresh: set[int] = set()

    def gain(index: int) -> float:
        vague = VAGUE_WEIGHT if is_vague(findings[index]) else 1.0
        return latest[index] * scales[index] * vague

    while True:
        heaviest = max(waiting, key=lambda i: (gain(i) * findings[i].confidence, findings[i].rule))
        more = [
            i
            for i in waiting
            if gain(i) > (1 + EQUAL_GAIN) * gain(heaviest)
            and not is_more_certain(findings[heaviest], findings[i])
        ]
        best = max(more, key=gain, default=heaviest)
        hopeless = [i for i in waiting if latest[i] < 0.01 * largest and i not in fresh]
        again = [*({heaviest, best} - fresh)] or (hopeless if chosen else [])
        if not again:
            return best, latest[best]
        for index in again:
            latest[index] = marginal_gain(findings[index], chosen, estimator)
            fresh.add(index)


def marginal_gain(finding: Finding, chosen: Sequence[Finding], estimator: GainEstimator) -> float:
    """Return what a finding's fix saves after those of the chosen ones, ns per step."""
    if _is_of_all_code(finding):
        return _own_gain(finding) * (1 - _share_seen(finding, chosen))
    if not chosen or not estimator.overlaps(finding):
        return _own_gain(finding)
    applied = [edit for c in chosen if estimator.overlaps(c) for edit in c.edits]
    return estimator.marginal(finding.edits, applied)


def _share_seen(finding: Finding, chosen: Sequence[Finding]) -> float:
    """Return the share of a finding on all code of a place that chosen fixes may already save. Time
    of the host that they save elsewhere is other time; where it is unknown, it is the same."""
    here = {place.function for place in finding.where}
    saved = sum(
        other.share_of_step * (other.marginal_gain_ns or 0) / _own_gain(other)
        for other in chosen
        if _own_gain(other)
        and not (other.edits and all(edit.select.on == "gpu" for edit in other.edits))
        and not any(place.file and place.function not in here for place in other.where[:1])
    )
    return min(1.0, saved / finding.share_of_step) if finding.share_of_step else 0.0


def _with_range(
    finding: Finding, gain: float, chosen: list[Finding], estimator: GainEstimator
) -> Finding:
    """Return the finding with its gain after the chosen ones, and what decides its range."""
    finding = replace(finding, marginal_gain_ns=round(gain))
    applied = [edit for c in chosen if estimator.overlaps(c) for edit in c.edits]
    if not applied or not estimator.overlaps(finding):
        impact = finding.impact
        if impact is None:
            return finding
        return replace(
            finding,
            marginal_low_ns=impact.low_ns,
            marginal_high_ns=impact.high_ns,
            marginal_low_by=impact.low_by,
            marginal_high_by=impact.high_by,
        )
    saved = estimator.gain_range(finding.edits, applied)
    return replace(
        finding,
        marginal_low_ns=round(max(0.0, min(saved.low, gain))),
        marginal_high_ns=round(max(gain, saved.high)),
        marginal_low_by=saved.low_by,
        marginal_high_by=saved.high_by,
    )
