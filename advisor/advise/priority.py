"""Order of the findings: by marginal gain, with symptoms and alternatives folded under what
explains them. Risks, which do not affect the step time, and notes are kept apart.

1. Findings with a gain per step are candidates. Those that may gain nothing, or whose gain is
   unknown, become notes; what costs memory or time over the run becomes a risk.
2. Of the waiting candidates, the one with the largest gain × confidence is next. One that is about
   as certain and gains clearly more, or about as much at a higher low end, goes before it.
3. A finding that names code goes before a general one on the same idle time, if it saves a third of
   that. So does a part of a function, or of the loading, before the whole.
4. Its gain after the fixes chosen before decides: an alternative to one of them, or a finding that
   keeps a quarter or less, is folded under it; what gains too little is left out, or is a note.
5. Gains that no replay can order are inserted by their share of the run."""

from __future__ import annotations

import math
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
from advisor.core.finding import HOST_CODE, WHOLE_STEP, Finding, are_alternatives
from advisor.core.rule import Rule
from advisor.core.trace import LOADER
from advisor.measure import Analysis
from advisor.measure.device.kernel_profiles import ONE_LAUNCH
from advisor.replay.estimators import GainEstimator
from advisor.replay.selection import selected_gpu, selected_host

MIN_KEPT_SHARE = 0.25
"""Share of its own gain below which a finding, after the findings before it, is a symptom."""
MIN_LEADING_SHARE = 1 / 3
"""Minimum gain of a finding that names the code behind idle time, as a share of a general finding's
gain, to come first. Its fix is the smaller change, and leaves less to the other."""
MOSTLY_BUSY = 0.5
"""Minimum GPU-busy share of the step at which slow GPU work comes first in the same way."""
MIN_LEADING_WAITS_SHARE = 0.10
"""Minimum share of the step at which frequent waits for the GPU come before launching less, since
no graph can contain them, and needless work before launching it faster. Launching itself is
reported from the same share."""

EQUAL_CONFIDENCE, EQUAL_GAIN = 0.1, 0.1
"""Difference of two confidences, and relative difference of two gains, up to which they count as
equal: both are estimates."""
PRECISION = "precision"
"""Alternatives whose fix changes results. Of equal gains, they are not preferred."""
VAGUE_WEIGHT = 0.5
"""Weight of a finding that names no place and may gain nothing."""

MAX_LAUNCHES_APART = 30
"""Maximum number of launches between two waits for the GPU that do not fill its queue."""


@dataclass(frozen=True)
class PrioritizedFindings:
    """Findings of a report by the place where they are shown."""

    findings: list[Finding]
    """Ranked findings, then the findings folded under them."""
    risks: list[Finding]
    """Findings on memory, time over the run, or risks, the most certain first."""
    notes: list[Finding]

    def map_findings(self, change: Callable[[list[Finding]], list[Finding]]) -> PrioritizedFindings:
        return PrioritizedFindings(change(self.findings), self.risks, change(self.notes))

    @property
    def advice(self) -> list[Finding]:
        """Ranked findings of the analysed rank: the fixes to follow."""
        return [f for f in self.findings if f.priority is not None and not f.other_rank]


def _gain_per_launch(note: Finding) -> float:
    """Return the saving per launch of a profiled kernel, ns. 0 if there is none."""
    return sum(float(e.value or 0) for e in note.evidence if e.label == ONE_LAUNCH)


def prioritize(
    findings: Sequence[Finding], a: Analysis, estimator: GainEstimator, rules: Sequence[Rule] = ()
) -> PrioritizedFindings:
    """Return the findings in the order to follow them. A finding without replayed gain becomes a
    note if the device waits for it. A finding without gain by either estimate is left out.

    The gains stay those of the window, but are compared as they are in the run's own step."""
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
            or (impact.currency == "unknown" and not finding.costs_more_than_recorded)
        ):
            notes.append(finding)
        elif not timed and not finding.costs_more_than_recorded and not _counts_in_run(finding):
            risks.append(finding)
        elif timed:
            candidates.append(finding)
        else:
            unknown.append(finding)
    scales = scales_to_run(candidates, a, estimator)
    ordered, left_out = _Ordering(candidates, scales, estimator, floor, a).run()
    unknown += [finding for finding in left_out if finding.costs_more_than_recorded]
    left_out = [finding for finding in left_out if not finding.costs_more_than_recorded]
    ordered = _insert_unknown(ordered, unknown)
    for risk in [each for each in risks if each.alternatives]:
        rival = next((f for f in ordered if f.alternatives == risk.alternatives), None)
        if rival is not None:
            risks.remove(risk)
            ordered.append(replace(risk, folded_under=rival.rule))
    ranked = [finding for finding in ordered if finding.priority is not None]
    notes += [note for note in unsure if not _is_covered(note, ranked, estimator)]
    unexplained = [finding for finding in left_out if not _is_part(finding, ranked, a)]
    notes += without_gain(unexplained, estimator, a, floor, ranked)
    notes.sort(key=_gain_per_launch, reverse=True)
    if ranked:
        general = {rule.id for rule in rules if rule.only_without_findings}
        notes = [note for note in notes if note.rule not in general]
    notes = _drop_repeated_notes(notes, ordered)
    return PrioritizedFindings(ordered, sorted(risks, key=lambda f: -f.confidence), notes)


def _drop_repeated_notes(notes: Sequence[Finding], ordered: Sequence[Finding]) -> list[Finding]:
    """Leave out notes that are alternatives to an earlier finding or note."""
    result: list[Finding] = []
    for note in notes:
        shown = {each.alternatives for each in (*ordered, *result)} - {""}
        if note.alternatives not in shown:
            result.append(note)
    return result


def _is_covered(note: Finding, ranked: Sequence[Finding], estimator: GainEstimator) -> bool:
    """Return whether ranked fixes save nearly all that the note's fix would save, so that both are
    about the same time."""
    applied = [edit for other in ranked if estimator.overlaps(other) for edit in other.edits]
    if not applied or not estimator.overlaps(note):
        return False
    alone = estimator.marginal(note.edits, [])
    return alone > 0 and estimator.marginal(note.edits, applied) < MIN_KEPT_SHARE * alone


MIN_SAME_WORK_SHARE = 0.9
"""A finding gets no note if a ranked fix changes this share of its device time."""


def _is_part(finding: Finding, ranked: Sequence[Finding], a: Analysis) -> bool:
    """Return whether a ranked fix changes the same device work in the same way. A note saying that
    this work gains nothing would contradict it."""
    gpu_edits = [edit for edit in finding.edits if edit.select.on == "gpu"]
    if len(gpu_edits) < len(finding.edits) or a.device_id is None or not gpu_edits:
        return False
    work = np.logical_or.reduce([selected_gpu(a, edit.select) for edit in gpu_edits])
    ops = {edit.op for edit in gpu_edits}
    dur = a.trace.gpu["dur"].to_numpy()
    return any(
        float(dur[work & selected_gpu(a, edit.select)].sum())
        >= MIN_SAME_WORK_SHARE * float(dur[work].sum())
        for other in ranked
        for edit in other.edits
        if edit.op in ops and edit.select.on == "gpu"
    )


def _counts_in_run(finding: Finding) -> bool:
    """Return whether a finding certainly saves much of the run, though not in each step."""
    impact = finding.impact
    if impact is None or impact.currency != "run_time" or not impact.gain_ns:
        return False
    return finding.share_of_step * (impact.low_ns or 0) / impact.gain_ns >= WARNING_SHARE


def _insert_unknown(ordered: list[Finding], others: list[Finding]) -> list[Finding]:
    """Insert findings that a replay cannot order: gains over the run by their share, and unknown
    gains before small ones and before findings that name no cause."""
    if not others:
        return ordered
    inserted = [f for f in ordered if f.priority is not None]
    for finding in sorted(others, key=lambda each: each.share_of_step):
        share = finding.share_of_step or WARNING_SHARE
        index = next(
            (
                n
                for n, other in enumerate(inserted)
                if other.share_of_step < share or is_vague(other)
            ),
            len(inserted),
        )
        inserted.insert(index, finding)
    ranked = [replace(finding, priority=position) for position, finding in enumerate(inserted, 1)]
    return ranked + [f for f in ordered if f.priority is None]


@dataclass(eq=False)
class _Candidate:
    """A finding that waits for its place."""

    finding: Finding
    scale: float
    """Ratio of its gain in the run's step to that in the window's."""
    latest: float
    """Marginal gain when it was last computed, ns of the window's step."""

    @property
    def weighted_gain(self) -> float:
        """Latest gain in the run's step, less if the finding is vague."""
        return self.latest * self.scale * (VAGUE_WEIGHT if is_vague(self.finding) else 1.0)

    @property
    def low_end(self) -> float:
        """Low end of its range, in proportion to the latest gain."""
        impact = self.finding.impact
        if impact is None or not impact.gain_ns:
            return 0.0
        return self.weighted_gain * (impact.low_ns or 0) / impact.gain_ns


_Choice = tuple[_Candidate, float]
"""A candidate and its marginal gain, ns of the window's step."""


class _Ordering:
    """Findings by marginal gain, weighed by confidence, the largest first.

    Each choice assumes that the fixes chosen before are made. A finding that then keeps almost no
    gain is folded under the one that took most of it. So is an alternative of a chosen finding. A
    finding that gains nothing alone, but ``WARNING_SHARE`` of the step after others, gets
    ``after_fix``. One that never pays is left out."""

    def __init__(
        self,
        findings: Sequence[Finding],
        scales: Sequence[float],
        estimator: GainEstimator,
        floor: float,
        a: Analysis,
    ) -> None:
        """Make candidates of the findings. ``scales``: ratios of their gains in the run's step to
        their gains in the window's. ``floor``: smallest gain to rank, ns."""
        self._candidates = [
            _Candidate(finding, scale, _get_gain(finding))
            for finding, scale in zip(findings, scales, strict=True)
        ]
        self._waiting = list(self._candidates)
        self._estimator, self._floor, self._a = estimator, floor, a
        self._chosen: list[Finding] = []
        self._folded: list[Finding] = []

    def run(self) -> tuple[list[Finding], list[Finding]]:
        """Return the ranked findings, then the folded ones without priority; and those left out."""
        shown: set[_Candidate] = set()
        while self._waiting:
            choice = self._choose_next()
            general = choice[0].finding
            if removes_whole_idle_kind(general):
                choice = self._choose_named_cause(choice)
            elif _is_of_all_code(general) or _moves_all_loading(general):
                choice = self._choose_cause_inside(choice)
            self._waiting.remove(choice[0])
            if self._place(*choice):
                shown.add(choice[0])
        left_out = [each.finding for each in self._candidates if each not in shown]
        return self._chosen + self._folded, left_out

    def _gain(self, finding: Finding) -> float:
        return marginal_gain(finding, self._chosen, self._estimator)

    def _place(self, candidate: _Candidate, gain: float) -> bool:
        """Rank a candidate, or fold it under a chosen one. Return whether it is shown."""
        best, chosen, floor = candidate.finding, self._chosen, self._floor
        own_gain = _get_gain(best)
        rival = next((c for c in chosen if are_alternatives(c, best)), None)
        slowed = 1.0 if best.subject == WHOLE_STEP else _share_left(best, chosen)
        if rival is None and chosen and gain < MIN_KEPT_SHARE * slowed * own_gain:
            rival = min(chosen, key=lambda c: marginal_gain(best, [c], self._estimator))
        if rival is not None:
            if own_gain < floor:
                return False
            self._folded.append(replace(best, folded_under=rival.rule))
            return True
        if gain < (slowed * floor if own_gain >= floor else WARNING_SHARE * self._a.step_ns):
            return False
        prerequisite = None
        if own_gain < floor and chosen:  # without this fix, most of the gain is lost
            prerequisite = max(chosen, key=lambda c: marginal_gain(best, [c], self._estimator)).rule
        ranked = _set_marginal_range(best, gain, chosen, self._estimator)
        chosen.append(replace(ranked, priority=len(chosen) + 1, after_fix=prerequisite))
        return True

    def _choose_next(self) -> _Choice:
        """Return the candidate to choose next, and its marginal gain. It has the largest gain ×
        weight in the run's step, unless another that is about as certain gains clearly more, or
        gains about as much, has a clearly higher low end and keeps the results.

        Gains mostly shrink as other fixes are made, so a gain is computed again only if its last
        value could still win. Gains near zero are computed again every time, because a fix may
        begin to pay once another has moved the bottleneck."""
        waiting = self._waiting
        largest = max(abs(each.latest) for each in self._candidates)
        fresh: set[_Candidate] = set()
        while True:
            heaviest = max(
                waiting, key=lambda c: (c.weighted_gain * c.finding.confidence, c.finding.rule)
            )
            larger = [
                each
                for each in waiting
                if each.weighted_gain > (1 + EQUAL_GAIN) * heaviest.weighted_gain
                and not is_more_certain(heaviest.finding, each.finding)
            ]
            best = max(larger, key=lambda c: c.weighted_gain, default=heaviest)
            safer = [
                each
                for each in waiting
                if (1 + EQUAL_GAIN) * each.weighted_gain >= best.weighted_gain
                and each.low_end > (1 + EQUAL_GAIN) * best.low_end
                and each.finding.alternatives != PRECISION
                and not is_more_certain(best.finding, each.finding)
            ]
            best = max(safer, key=lambda c: c.low_end, default=best)
            hopeless = [c for c in waiting if c.latest < 0.01 * largest and c not in fresh]
            outdated = [*({heaviest, best} - fresh)] or (hopeless if self._chosen else [])
            if not outdated:
                return best, best.latest
            for each in outdated:
                each.latest = self._gain(each.finding)
                fresh.add(each)

    def _choose_named_cause(self, general: _Choice) -> _Choice:
        """Return what to choose before a general candidate that gains more: one that names code
        whose fix saves much, or else the general one."""
        result, max_gain, a = general, 0.0, self._a
        is_mostly_idle = a.breakdown.busy.total < MOSTLY_BUSY * a.span_ns
        drops_launches = any(edit.op == "drop_launch" for edit in general[0].finding.edits)
        for candidate in self._waiting:
            finding = candidate.finding
            if finding.other_rank or not finding.edits or removes_whole_idle_kind(finding):
                continue
            if is_mostly_idle and all(edit.select.on == "gpu" for edit in finding.edits):
                continue
            scale = candidate.scale / general[0].scale if general[0].scale else 1.0
            min_gain = MIN_LEADING_SHARE * general[1]
            if drops_launches and MIN_LEADING_WAITS_SHARE * a.step_ns < min_gain:
                removes_work = all(edit.op == "remove" for edit in finding.edits)
                if removes_work or _fills_queue(finding, a):
                    min_gain = MIN_LEADING_WAITS_SHARE * a.step_ns
            min_gain = max(max_gain, min_gain)
            if _get_gain(finding) * scale < min_gain:
                continue
            gain = self._gain(finding)
            if gain * scale >= min_gain:
                max_gain = gain * scale
                result = candidate, gain
        return result

    def _choose_cause_inside(self, general: _Choice) -> _Choice:
        """Return what to choose before a candidate on all code of a function or all loading: one
        that says what takes much of its time, or else the general one."""
        min_gain = MIN_LEADING_SHARE * general[1] * general[0].scale
        causes = [
            (candidate, gain)
            for candidate in self._waiting
            if candidate.finding.edits
            and _is_inside(candidate.finding, general[0].finding)
            and (gain := self._gain(candidate.finding)) * candidate.scale >= min_gain
        ]
        return max(causes, key=lambda each: each[1] * each[0].scale, default=general)


def removes_whole_idle_kind(finding: Finding) -> bool:
    """Return whether a finding removes a kind of idle time, such as launching, as a whole."""
    return bool(finding.edits) and all(
        edit.select.on == "gap"
        and not (edit.select.under or edit.select.name)
        and edit.select.at in ("", "step_start")
        for edit in finding.edits
    )


def _is_of_all_code(finding: Finding) -> bool:
    """Return whether a finding is about all code of a place, whatever the code does."""
    return finding.subject == HOST_CODE and not finding.edits


def _moves_all_loading(finding: Finding) -> bool:
    """Return whether a finding moves all loading to workers, whatever it does."""
    return bool(finding.edits) and all(edit.op == "parallelize" for edit in finding.edits)


def _is_inside(finding: Finding, general: Finding) -> bool:
    """Return whether a finding says what takes the time of a general one: code of the same
    function, or a part of the loading."""
    if _moves_all_loading(general):
        return any(
            edit.op in ("scale", "remove") and edit.select.name == LOADER for edit in finding.edits
        )
    functions = {place.function for place in general.where} - {None}
    return any(place.function in functions for place in finding.where[:1])


def _fills_queue(finding: Finding, a: Analysis) -> bool:
    """Return whether only this finding's waits keep the host from filling the GPU's queue."""
    removed_waits = [
        selected_host(a, edit.select) for edit in finding.edits if edit.op == "make_async"
    ]
    if not removed_waits or a.syncs.is_empty():
        return False
    waits = a.syncs.filter(~pl.col("profiler")).with_columns(wait=pl.coalesce("op", "host"))
    remaining_waits = waits.filter(
        pl.Series(~np.logical_or.reduce(removed_waits)[waits["host"].to_numpy()])
    )
    launches = int(a.in_window.sum())
    before, after = waits["wait"].n_unique(), remaining_waits["wait"].n_unique()
    return MAX_LAUNCHES_APART * after <= launches < MAX_LAUNCHES_APART * before


def _get_gain(finding: Finding) -> float:
    impact = finding.impact
    return float(impact.gain_ns or 0) if impact is not None else 0.0


def is_more_certain(finding: Finding, other: Finding) -> bool:
    """Return whether a finding's cause is notably more certain than another's."""
    return finding.confidence - other.confidence > EQUAL_CONFIDENCE + 1e-9


def is_vague(finding: Finding) -> bool:
    """Return whether a finding names no place and may gain nothing."""
    impact = finding.impact
    timed = impact is not None and impact.currency == "step_time"
    return timed and not finding.where and impact is not None and not impact.low_ns


def marginal_gain(finding: Finding, chosen: Sequence[Finding], estimator: GainEstimator) -> float:
    """Return what a finding's fix saves after the chosen findings' fixes, ns per step."""
    return _gain_beside(finding, chosen, estimator) * _share_left(finding, chosen)


def _share_left(finding: Finding, chosen: Sequence[Finding]) -> float:
    """Return the share of a gain that is left where the finding or a chosen one is of the whole
    step: what slows down all work slows down less of it, and removed work was slowed down too."""
    if finding.subject == WHOLE_STEP:
        return max(0.0, 1 - sum(map(_share_saved, chosen)))
    slowing = (other for other in chosen if other.subject == WHOLE_STEP)
    return math.prod(1 - min(1.0, _share_saved(other)) for other in slowing)


def _share_saved(finding: Finding) -> float:
    """Return the share of the step that a chosen finding's fix saves after those before it."""
    gain = _get_gain(finding)
    return finding.share_of_step * (finding.marginal_gain_ns or 0) / gain if gain else 0.0


def _gain_beside(finding: Finding, chosen: Sequence[Finding], estimator: GainEstimator) -> float:
    """Return what is left of a gain by the edits of the chosen findings, or by the code of the
    chosen findings inside of it, ns per step."""
    if _is_of_all_code(finding):
        return _get_gain(finding) * (1 - _share_seen(finding, chosen))
    if not chosen or not estimator.overlaps(finding):
        return _get_gain(finding)
    applied = [edit for c in chosen if estimator.overlaps(c) for edit in c.edits]
    return estimator.marginal(finding.edits, applied)


def _share_seen(finding: Finding, chosen: Sequence[Finding]) -> float:
    """Return the share of a finding on all code of a place that chosen fixes may already save. Host
    time that they save elsewhere does not count. If the place is unknown, it does."""
    functions = {place.function for place in finding.where}
    saved = sum(
        _share_saved(other)
        for other in chosen
        if not (other.edits and all(edit.select.on == "gpu" for edit in other.edits))
        and not any(place.file and place.function not in functions for place in other.where[:1])
    )
    return min(1.0, saved / finding.share_of_step) if finding.share_of_step else 0.0


def _set_marginal_range(
    finding: Finding, gain: float, chosen: list[Finding], estimator: GainEstimator
) -> Finding:
    """Return the finding with its gain after the chosen findings, and the causes of its range."""
    finding = replace(finding, marginal_gain_ns=round(gain))
    applied = [edit for c in chosen if estimator.overlaps(c) for edit in c.edits]
    left = _share_left(finding, chosen)
    if not applied or not estimator.overlaps(finding):
        impact = finding.impact
        if impact is None:
            return finding
        return replace(
            finding,
            marginal_low_ns=impact.low_ns and round(left * impact.low_ns),
            marginal_high_ns=impact.high_ns and round(left * impact.high_ns),
            marginal_low_by=impact.low_by,
            marginal_high_by=impact.high_by,
        )
    saved = estimator.gain_range(finding.edits, applied)
    return replace(
        finding,
        marginal_low_ns=round(max(0.0, min(left * saved.low, gain))),
        marginal_high_ns=round(max(gain, left * saved.high)),
        marginal_low_by=saved.low_by,
        marginal_high_by=saved.high_by,
    )
