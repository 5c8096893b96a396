"""Gain of a change for the job: its saving on each rank, in a replay of all ranks together."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from advisor.core.finding import Edit, Finding
from advisor.core.report_replay import Replay
from advisor.measure import Analysis
from advisor.measure.ranks.outliers import Deviation, edits_of
from advisor.measure.ranks.rank_summary import summarise_rank
from advisor.measure.ranks.summary_schema import unpack_findings
from advisor.replay.estimators import GainEstimator, estimator_for
from advisor.replay.ranks.gains import (
    change_without,
    combine_changes,
    match_ranks_to_median,
    saving_change,
    without_collectives,
)
from advisor.replay.ranks.ranks_replay import JobChange, JobGain
from advisor.replay.ranks.study import Study, study_ranks
from advisor.replay.selection import is_communication
from advisor.replay.window_replayer import GainRange

COMMUNICATION = ("distributed", "communication")
"""Categories of findings that save transfers; what a rank waits for the others remains."""
Key = tuple["Edit", ...]
"""Edits of one finding, all of them."""
OfRank = Callable[[int], GainEstimator | None]
"""Function of a rank: the estimator of what it saves alone; ``None``: its trace is not here."""


class RankSavings(NamedTuple):
    """Savings of a change on single ranks."""

    saved: dict[int, float]
    """Savings of the ranks alone, ns per step, by index of the rank in the study."""
    gain: GainRange
    """Gain on the rank that the change is shown for, alone."""
    reported_rank: bool
    """Whether that is the analysed rank."""
    communication: bool


class RanksEstimator(GainEstimator):
    """Estimator that replays all ranks. The analysed rank's savings come from its own replay, those
    of others from theirs. The job gains what waits between ranks leave of that.

    A change to a program is one on all ranks. Where a rule found nothing on a rank, what it looks
    for may be below its threshold there: then the rank saves what its own estimator says
    (``of_rank``), else nothing. Changes that are no finding's are added with :meth:`add_change`."""

    def __init__(
        self,
        own: GainEstimator,
        study: Study,
        rank: int,
        findings: Sequence[Finding] = (),
        of_rank: OfRank | None = None,
    ) -> None:
        self.own = own
        self.study = study
        self.place = study.summary_index(rank)
        self._of_rank = of_rank
        self.method, self.error, self.reason = own.method, own.error, own.reason
        self.ranks = tuple(study.replayed)
        self.unseen_loader = own.unseen_loader
        self._known: dict[Key, RankSavings] = {}
        self._parts: dict[Key, tuple[Key, ...]] = {}
        self._deviations: dict[Key, tuple[Deviation | None, JobGain | None]] = {}
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
        of_program = all(e.rank is None and not e.select.correlation for e in key)
        if of_program and self._of_rank is not None:
            silent = (each for each in enumerate(self.study.numbers) if each[0] not in saved)
            each = {place: self._of_rank(number) for place, number in silent}
            saved = saved | {p: r.marginal(key, ()) for p, r in each.items() if r is not None}
        known = RankSavings(saved, gain, own, finding.category in COMMUNICATION)
        self._known.setdefault(key, known)
        self._name(key)

    def add_change(self, edits: Sequence[Edit], a: Analysis) -> None:
        """Add a change that is no finding's. ``a``: the analysis of the rank it is shown for, the
        only one on which correlation ids select anything."""
        key = tuple(edits)
        if key in self._parts or not key:
            return
        parts: list[Key] = []
        left = list(dict.fromkeys(edits))
        for outlier in self._deviations:
            if set(outlier) <= set(left):
                parts.append(outlier)
                left = [edit for edit in left if edit not in outlier]
        late = tuple(edit for edit in left if edit.op == "remove_skew")
        if late:
            parts.append(late)
            self._add_late(late)
        left = [edit for edit in left if edit.op != "remove_skew"]
        talk = [is_communication(a, edit.select) for edit in left]
        for wanted in (False, True):
            part = tuple(e for e, there in zip(left, talk, strict=True) if there is wanted)
            if part:
                parts.append(part)
                self._add_edits(part, communication=wanted)
        self._parts[key] = tuple(parts)

    def _add_late(self, key: Key) -> None:
        """Add a change to ranks that keep others waiting and are no outlier."""
        named = [edit.rank for edit in key if edit.rank is not None]
        places = [place for n in named if (place := self.study.summary_index(n)) is not None]
        change = match_ranks_to_median(self.study.job, self.study.replay, places)
        self._changes[key] = change
        self._deviations[key] = (None, self.study.replay.gain(change))

    def _add_edits(self, key: Key, *, communication: bool) -> None:
        """Add edits that each rank saves something by, in its own replay."""
        saved: dict[int, float] = {}
        ranges: dict[int, GainRange] = {}
        for place, number in enumerate(self.study.numbers):
            shown = place == self.place
            own = tuple(
                edit
                for edit in key
                if edit.rank in (None, number) and (shown or not edit.select.correlation)
            )
            alone = self.own if shown or self._of_rank is None else self._of_rank(number)
            if not own or alone is None:
                continue
            if shown or own != key or any(edit.rank is not None for edit in own):
                ranges[place] = alone.gain_range(own).limited
                saved[place] = ranges[place].gain
            else:
                saved[place] = alone.marginal(own, ())
        order = sorted(ranges, key=lambda place: (place != self.place, -saved[place], place))
        gain = ranges[order[0]] if order else GainRange(0.0, 0.0, 0.0)
        known = RankSavings(saved, gain, self.place in ranges, communication)
        self._known.setdefault(key, known)

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

    def reference_ns(self, edits: Sequence[Edit] = ()) -> float | None:
        """Return the own step of the rank, of which its savings are. Ranks that deviate, and
        collectives, are changed in the job as it was measured."""
        key = tuple(edits)
        of_job = key in self._deviations or self._without_collectives(key) is not None
        return None if of_job else self.own.reference_ns(edits)

    def gain_range(self, edits: Sequence[Edit], applied: Sequence[Edit] = ()) -> GainRange:
        """Estimate the job's gain by edits; after others the range keeps its relative width."""
        if applied:
            first, left = self.gain_range(edits), self.marginal(edits, applied)
            if first.gain < 0:  # it makes the step longer
                return GainRange(left, left, left)
            left = max(0.0, left)
            share = left / first.gain if first.gain > 0 else 0.0
            return GainRange(left, first.low * share, max(left, first.high * share))
        parts = self._parts.get(tuple(edits), (tuple(edits),))
        if len(parts) > 1:
            return self._range_of_parts(edits, parts)
        key = parts[0]
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
        low, high = min(saved, low) - error, max(saved, high) + error
        if alone.gain >= 0:  # else it makes the rank slower
            saved, low = max(0.0, saved), max(0.0, low)
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

    def _range_of_parts(self, edits: Sequence[Edit], parts: Sequence[Key]) -> GainRange:
        """Return the gain of several changes together; its range is as wide as theirs."""
        saved = self._joint_gain(edits)
        each = [self.gain_range(part) for part in parts]
        whole = sum(part.gain for part in each)
        ends = (sum(part.low for part in each), sum(part.high for part in each))
        low, high = (saved * end / whole if whole > 0 else saved for end in ends)
        return GainRange(saved, min(saved, low), max(saved, high))

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
        named = (key for e in edits if (key := self._key_of.get(e)) is not None)
        keys = self._parts.get(tuple(edits)) or tuple(dict.fromkeys(named))
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
                deviation = self._deviations[key][0]
                if key not in self._changes and deviation is not None:
                    self._changes[key] = change_without(job, replay, deviation)[0]
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
                saved[place] = ns * max(0.0, share)
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


def estimate_ranks(
    analyses: Mapping[int, Analysis], rank: int, own: GainEstimator
) -> tuple[RanksEstimator | None, str]:
    """Return the estimator of a job's ranks for changes to them, shown for one of them, whose own
    estimator is given. ``None``, with the reason: they cannot be replayed together."""
    study = study_ranks([summarise_rank(a, number) for number, a in analyses.items()])
    if study is None or study.summary_index(rank) is None:
        return None, "they are not of one run"
    if study.replay.reason:
        return None, study.replay.reason
    made = {rank: own}

    def of_rank(number: int) -> GainEstimator | None:
        if number not in made:
            made[number] = estimator_for(analyses[number], number)
        return made[number]

    return RanksEstimator(own, study, rank, of_rank=of_rank), ""
