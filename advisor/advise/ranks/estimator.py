"""Gain of a finding for the job: its saving on each rank, in a replay of all ranks together."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec.structs import replace

from advisor.advise.impact import GainEstimator, GainRange
from advisor.measure.ranks.outliers import edits_of
from advisor.measure.ranks.summary import unpack_findings
from advisor.replay.ranks.gains import (
    change_without,
    combine_changes,
    saving_change,
    without_collectives,
)
from advisor.replay.ranks.ranks_replay import JobChange, JobGain

if TYPE_CHECKING:
    from advisor.core.finding import Edit, Finding
    from advisor.core.report import Replay
    from advisor.measure.ranks.outliers import Deviation
    from advisor.replay.ranks.study import Study

COMMUNICATION = ("distributed", "communication")
"""Categories of findings that save transfers; what a rank waits for the others remains."""
Key = tuple["Edit", ...]
"""Edits of one finding, all of them."""
Saving = Callable[[int, "Key"], float | None]
"""Function of rank and edits: what they save on it alone, ns per step; ``None``: no trace here."""


class RankSavings(NamedTuple):
    """Savings of a finding on single ranks."""

    saved: dict[int, float]
    """Savings of the ranks alone, ns per step, by index of the rank in the study."""
    gain: GainRange
    """Gain on the rank that the finding is shown for, alone."""
    reported_rank: bool
    """Whether that is the analysed rank."""
    communication: bool


class RanksEstimator(GainEstimator):
    """Estimator that replays all ranks. The analysed rank's savings come from its own replay, those
    of others from theirs. The job gains what waits between ranks leave of that.

    A change to a program is one on all ranks. Where a rule found nothing on a rank, what it looks
    for may be below its threshold there: then the rank saves what ``saving`` says, else nothing.
    """

    def __init__(
        self,
        own: GainEstimator,
        study: Study,
        rank: int,
        findings: Sequence[Finding],
        saving: Saving | None = None,
    ) -> None:
        self.own = own
        self.study = study
        self.place = study.summary_index(rank)
        self._saving = saving
        self.method, self.error, self.reason = own.method, own.error, own.reason
        self.ranks = tuple(study.replayed)
        self.unseen_loader = own.unseen_loader
        self._known: dict[Key, RankSavings] = {}
        self._deviations: dict[Key, tuple[Deviation, JobGain | None]] = {}
        self._key_of: dict[Edit, Key] = {}
        self._saved: dict[tuple[Key, ...], float] = {}
        self._changes: dict[Key, JobChange] = {}
        self._of_rule = _by_rule(study)
        for deviation, gain in study.outliers:
            key = tuple(edits_of(study.job, deviation))
            self._deviations.setdefault(key, (deviation, gain))
            self._name(key)
        counts: Counter[str] = Counter()
        for finding in findings:
            if (alone := _alone(finding)) is not None:
                saved = self._of_rule[finding.rule, counts[finding.rule]]
                own_saved = {} if self.place is None else {self.place: alone.gain}
                self._note_saving(finding, {**saved, **own_saved}, alone, own=True)
            counts[finding.rule] += 1

    def _note_saving(
        self, finding: Finding, saved: dict[int, float], gain: GainRange, *, own: bool
    ) -> None:
        key = tuple(finding.edits)
        of_program = all(
            e.rank is None and not (e.select.correlation or e.select.stream) for e in key
        )
        if self._saving is not None and of_program:
            silent = (each for each in enumerate(self.study.numbers) if each[0] not in saved)
            each = {place: self._saving(number, key) for place, number in silent}
            saved = saved | {place: ns for place, ns in each.items() if ns is not None}
        known = RankSavings(saved, gain, own, finding.category in COMMUNICATION)
        self._known.setdefault(key, known)
        self._name(key)

    def _name(self, key: Key) -> None:
        for edit in key:
            self._key_of.setdefault(edit, key)

    def is_estimated(self, finding: Finding) -> bool:
        """Tell whether a finding is of single ranks, with an estimated gain."""
        return tuple(finding.edits) in self._known and _alone(finding) is not None

    def other_findings(self, rules: set[str]) -> list[Finding]:
        """Return the findings of rules that found nothing on the analysed rank, each as on the rank
        with the median gain."""
        result = []
        for (rule, number), saved in self._of_rule.items():
            if rule in rules or number:
                continue
            place = sorted(saved, key=lambda index: (saved[index], index))[len(saved) // 2]
            details = unpack_findings(self.study.job.summaries[place].details)
            finding = next((each for each in details if each.rule == rule), None)
            if finding is None:
                continue
            if (gain := _alone(finding)) is not None:
                self._note_saving(finding, saved, gain, own=False)
            result.append(replace(finding, other_rank=True))
        return result

    def ranks_with(self, rule: str) -> int:
        """Return the number of ranks on which a rule found something."""
        return len(self._of_rule[rule, 0])

    def gain_range(self, edits: Sequence[Edit], applied: Sequence[Edit] = ()) -> GainRange:
        """Estimate the job's gain by edits; after others the range keeps its relative width."""
        if applied:
            first, left = self.gain_range(edits), max(0.0, self.marginal(edits, applied))
            share = left / first.gain if first.gain > 0 else 0.0
            return GainRange(left, first.low * share, max(left, first.high * share))
        key = tuple(edits)
        if key in self._deviations and (gain := self._deviations[key][1]) is not None:
            return GainRange(*gain)
        known = self._known.get(key)
        if known is None:
            return self.own.gain_range(edits)
        saved, alone = self._joint_gain(edits), known.gain
        replay = self.study.replay
        error = min(abs(replay.replayed_ns - replay.measured_ns), abs(saved))
        low, high = (
            saved * (end / alone.gain) if alone.gain > 0 else saved
            for end in (alone.low, alone.high)
        )
        low, high = max(0.0, min(saved, low) - error), max(saved, high) + error
        saved = max(0.0, saved)
        if known.communication:
            # work that is issued ahead also takes up waits, as far as every rank has some: none
            # gets faster than its own work
            ranks = np.flatnonzero(replay.complete_ranks).tolist()
            absorbed = min(known.saved.get(place, 0.0) for place in ranks)
            if absorbed > high:
                high, alone = absorbed, alone._replace(high_by="assumption")
        if saved <= alone.gain:  # more: other ranks gain too, and wait less for each other
            high = max(saved, min(high, alone.high))
        return alone._replace(gain=saved, low=low, high=high)

    def overlaps(self, finding: Finding) -> bool:
        known = self._known.get(tuple(finding.edits))
        if not finding.other_rank or known is None:
            return super().overlaps(finding)
        return known.saved.get(-1 if self.place is None else self.place, 0.0) > 0

    def is_calibrated(self, edits: Sequence[Edit]) -> bool:
        return tuple(edits) in self._deviations

    def marginal(self, edits: Sequence[Edit], applied: Sequence[Edit]) -> float:
        return self._joint_gain([*applied, *edits]) - self._joint_gain(applied)

    def critical_path(self) -> dict[str, float]:
        return self.own.critical_path()

    def describe_replay(self, edits: Sequence[Edit], left: float) -> Replay | None:
        own = [edit for edit in edits if self._key_of.get(edit) not in self._deviations]
        return self.own.describe_replay(own, left)

    def _joint_gain(self, edits: Sequence[Edit]) -> float:
        """Return what all these edits together save in the job's step, ns."""
        keys = tuple(dict.fromkeys(key for e in edits if (key := self._key_of.get(e)) is not None))
        if not keys:
            return 0.0
        if keys not in self._saved:
            replay = self.study.replay
            change = combine_changes(replay, self._changes_of(keys))
            self._saved[keys] = replay.replayed_ns - replay.step(change)
        return self._saved[keys]

    def _changes_of(self, keys: Sequence[Key]) -> list[JobChange]:
        job, replay = self.study.job, self.study.replay
        changes: list[JobChange] = []
        applied: list[Edit] = []
        for key in keys:
            if key in self._deviations:
                if key not in self._changes:
                    self._changes[key] = change_without(job, replay, self._deviations[key][0])[0]
                changes.append(self._changes[key])
                continue
            known = self._known[key]
            if (without := self._without_collectives(key)) is not None:
                changes.append(without)
                continue
            share = 1.0  # what is left of it after those before
            alone = 0.0 if self.place is None else known.saved.get(self.place, 0.0)
            if known.reported_rank or alone > 0:
                alone = known.gain.gain if known.reported_rank else alone
                if applied and alone > 0:
                    share = self.own.marginal(key, applied) / alone
                applied += key
            saved = np.zeros(len(job.summaries))
            for place, ns in known.saved.items():
                saved[place] = max(0.0, ns * share)
            changes.append(saving_change(replay, saved, communication=known.communication))
        return changes

    def _without_collectives(self, key: Key) -> JobChange | None:
        """Return the job without the collectives that all edits of a finding remove; ``None`` if an
        edit is of something else."""
        parts = [without_collectives(self.study.replay, edit) for edit in key]
        if not parts or None in parts:
            return None
        return combine_changes(self.study.replay, [part for part in parts if part is not None])


def _alone(finding: Finding) -> GainRange | None:
    """Return the gain in the rank's own replay; ``None`` if the finding gains no time per step."""
    impact = finding.impact
    if impact is None or impact.currency != "step_time" or not finding.edits:
        return None
    gain = float(impact.gain_ns or 0)
    return GainRange(
        gain,
        float(impact.low_ns or 0),
        gain if impact.high_ns is None else impact.high_ns,
        low_by=impact.low_by,
        high_by=impact.high_by,
    )


def _by_rule(study: Study) -> defaultdict[tuple[str, int], dict[int, float]]:
    """Return what each rank saves alone, by rule and by the finding's number within the rule."""
    result: defaultdict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    for place, summary in enumerate(study.job.summaries):
        counts: Counter[str] = Counter()
        for advice in summary.findings:
            result[advice.rule, counts[advice.rule]][place] = advice.gain_ns or 0.0
            counts[advice.rule] += 1
    return result
