"""Gain of a change for the job, from its saving on each rank, in a replay of all ranks together."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from advisor.core.finding import Edit, Finding
from advisor.core.report_replay import Replay
from advisor.measure import Analysis
from advisor.measure.ranks.outliers import Deviation, edits_of
from advisor.measure.ranks.rank_summary import summarize_rank
from advisor.measure.ranks.summary_schema import unpack_findings
from advisor.replay.estimators import GainEstimator, estimator_for
from advisor.replay.ranks.gains import (
    change_without,
    combine_changes,
    match_ranks_to_median,
    saving_change,
    without_collectives,
)
from advisor.replay.ranks.rank_comparison import RankComparison, compare_ranks
from advisor.replay.ranks.ranks_replay import JobChange, JobGain
from advisor.replay.selection import is_communication
from advisor.replay.window_replayer import GainRange

COMMUNICATION_CATEGORIES = ("distributed", "communication")
"""Categories of findings that save transfers; waits for other ranks remain."""
Key = tuple["Edit", ...]
"""All edits of one finding."""
OfRank = Callable[[int], GainEstimator | None]
"""Function from a rank to the estimator of its own savings, or ``None`` without its trace."""


class RankSavings(NamedTuple):
    """Savings of a change on single ranks."""

    saved: dict[int, float]
    """Savings of the ranks alone, ns per step, by index of the rank in the comparison."""
    gain: GainRange
    """Gain on the shown rank alone."""
    reported_rank: bool
    """Whether the shown rank is the analysed rank."""
    communication: bool


class RanksEstimator(GainEstimator):
    """Estimator that replays all ranks. Each rank's savings come from its own replay. The job gains
    what waits between ranks leave of these savings.

    A change to a program affects all ranks. If a rule found nothing on a rank, the problem may be
    below its threshold there: then the rank's own estimator (``of_rank``) gives its saving, else it
    saves nothing. Changes without a finding are added with :meth:`add_change`."""

    def __init__(
        self,
        own: GainEstimator,
        comparison: RankComparison,
        rank: int,
        findings: Sequence[Finding] = (),
        of_rank: OfRank | None = None,
    ) -> None:
        self.own = own
        self.comparison = comparison
        self.place = comparison.summary_index(rank)
        self._estimate = of_rank
        self.method, self.error, self.reason = own.method, own.error, own.reason
        self.ranks = tuple(comparison.replayed)
        self.unseen_loader = own.unseen_loader
        self._savings: dict[Key, RankSavings] = {}
        self._parts: dict[Key, tuple[Key, ...]] = {}
        self._deviations: dict[Key, tuple[Deviation | None, JobGain | None]] = {}
        self._key_of: dict[Edit, Key] = {}
        self._saved: dict[tuple[Key, ...], float] = {}
        self._changes: dict[Key, JobChange] = {}
        self._savings_by_rule = _collect_savings(comparison)
        for deviation, gain in comparison.outliers:
            key = tuple(edits_of(comparison.job, deviation))
            self._deviations.setdefault(key, (deviation, gain))
            self._register(key)
        counts: Counter[str] = Counter()
        for finding in findings:
            if (gain_alone := _find_own_gain(finding)) is not None:
                saved = self._savings_by_rule[finding.rule, counts[finding.rule]]
                own_saved = {} if self.place is None else {self.place: gain_alone.gain}
                self._note_saving(finding, {**saved, **own_saved}, gain_alone, own=True)
            counts[finding.rule] += 1

    def _note_saving(
        self, finding: Finding, saved: dict[int, float], gain: GainRange, *, own: bool
    ) -> None:
        key = tuple(finding.edits)
        of_program = all(e.rank is None and not e.select.correlation for e in key)
        if of_program and self._estimate is not None:
            missing = (each for each in enumerate(self.comparison.numbers) if each[0] not in saved)
            each = {place: self._estimate(number) for place, number in missing}
            saved = saved | {p: r.marginal(key, ()) for p, r in each.items() if r is not None}
        savings = RankSavings(saved, gain, own, finding.category in COMMUNICATION_CATEGORIES)
        self._savings.setdefault(key, savings)
        self._register(key)

    def add_change(self, edits: Sequence[Edit], a: Analysis) -> None:
        """Add a change without a finding. ``a``: the analysis of the shown rank, the only rank on
        which correlation ids select anything."""
        key = tuple(edits)
        if key in self._parts or not key:
            return
        parts: list[Key] = []
        others = list(dict.fromkeys(edits))
        for outlier in self._deviations:
            if set(outlier) <= set(others):
                parts.append(outlier)
                others = [edit for edit in others if edit not in outlier]
        skew_edits = tuple(edit for edit in others if edit.op == "remove_skew")
        if skew_edits:
            parts.append(skew_edits)
            self._add_late_ranks(skew_edits)
        others = [edit for edit in others if edit.op != "remove_skew"]
        transfers = [is_communication(a, edit.select) for edit in others]
        for communication in (False, True):
            part = tuple(
                e for e, kind in zip(others, transfers, strict=True) if kind is communication
            )
            if part:
                parts.append(part)
                self._add_edits(part, communication=communication)
        self._parts[key] = tuple(parts)

    def _add_late_ranks(self, key: Key) -> None:
        """Add a change to ranks that keep others waiting and are not outliers."""
        named = [edit.rank for edit in key if edit.rank is not None]
        places = [place for n in named if (place := self.comparison.summary_index(n)) is not None]
        change = match_ranks_to_median(self.comparison.job, self.comparison.replay, places)
        self._changes[key] = change
        self._deviations[key] = (None, self.comparison.replay.gain(change))

    def _add_edits(self, key: Key, *, communication: bool) -> None:
        """Add edits by which each rank saves time in its own replay."""
        saved: dict[int, float] = {}
        ranges: dict[int, GainRange] = {}
        for place, number in enumerate(self.comparison.numbers):
            is_own = place == self.place
            own_edits = tuple(
                edit
                for edit in key
                if edit.rank in (None, number) and (is_own or not edit.select.correlation)
            )
            estimator = self.own if is_own or self._estimate is None else self._estimate(number)
            if not own_edits or estimator is None:
                continue
            if is_own or own_edits != key or any(edit.rank is not None for edit in own_edits):
                ranges[place] = estimator.gain_range(own_edits).limited
                saved[place] = ranges[place].gain
            else:
                saved[place] = estimator.marginal(own_edits, ())
        order = sorted(ranges, key=lambda place: (place != self.place, -saved[place], place))
        gain = ranges[order[0]] if order else GainRange(0.0, 0.0, 0.0)
        savings = RankSavings(saved, gain, self.place in ranges, communication)
        self._savings.setdefault(key, savings)

    def _register(self, key: Key) -> None:
        for edit in key:
            self._key_of.setdefault(edit, key)

    def is_estimated(self, finding: Finding) -> bool:
        """Return whether a finding belongs to single ranks and has an estimated gain."""
        return tuple(finding.edits) in self._savings and _find_own_gain(finding) is not None

    def other_findings(self, rules: set[str]) -> list[Finding]:
        """Return the findings of rules that found nothing on the analysed rank, each from the rank
        with the median gain."""
        result = []
        for (rule, number), saved in self._savings_by_rule.items():
            if rule in rules or number:
                continue
            place = sorted(saved, key=lambda index: (saved[index], index))[len(saved) // 2]
            details = unpack_findings(self.comparison.job.summaries[place].details)
            finding = next((detail for detail in details if detail.rule == rule), None)
            if finding is None:
                continue
            if (gain := _find_own_gain(finding)) is not None:
                self._note_saving(finding, saved, gain, own=False)
            result.append(replace(finding, other_rank=True))
        return result

    def ranks_with(self, rule: str) -> int:
        """Return the number of ranks on which a rule found something."""
        return len(self._savings_by_rule[rule, 0])

    def reference_ns(self, edits: Sequence[Edit] = ()) -> float | None:
        """Return the rank's own step, to which its savings refer. Changes of deviating ranks and of
        collectives refer to the measured job."""
        key = tuple(edits)
        is_job_gain = key in self._deviations or self._without_collectives(key) is not None
        return None if is_job_gain else self.own.reference_ns(edits)

    def gain_range(self, edits: Sequence[Edit], applied: Sequence[Edit] = ()) -> GainRange:
        """Estimate the job's gain from edits; after other edits the range keeps its relative
        width."""
        if applied:
            before, marginal = self.gain_range(edits), self.marginal(edits, applied)
            if before.gain < 0:  # it makes the step longer
                return GainRange(marginal, marginal, marginal)
            marginal = max(0.0, marginal)
            share = marginal / before.gain if before.gain > 0 else 0.0
            return GainRange(marginal, before.low * share, max(marginal, before.high * share))
        parts = self._parts.get(tuple(edits), (tuple(edits),))
        if len(parts) > 1:
            return self._range_of_parts(edits, parts)
        key = parts[0]
        if key in self._deviations and (gain := self._deviations[key][1]) is not None:
            return GainRange(*gain)
        savings = self._savings.get(key)
        if savings is None:
            return self.own.gain_range(edits)
        saved, alone = self._joint_gain(edits), savings.gain
        replay = self.comparison.replay
        error = min(abs(replay.replayed_ns - replay.measured_ns), abs(saved))
        low, high = (
            saved * (end / alone.gain) if alone.gain > 0 else saved
            for end in (alone.low, alone.high)
        )
        low, high = min(saved, low) - error, max(saved, high) + error
        if alone.gain >= 0:  # else it makes the rank slower
            saved, low = max(0.0, saved), max(0.0, low)
        if savings.communication:
            # work that is issued earlier also fills waits, if every rank has some: no rank gets
            # faster than its own work
            ranks = np.flatnonzero(replay.complete_ranks).tolist()
            absorbed = min(savings.saved.get(place, 0.0) for place in ranks)
            if absorbed > high:
                high, alone = absorbed, alone._replace(high_by="assumption")
        if saved <= alone.gain:  # if more, other ranks gain too, and wait less for each other
            high = max(saved, min(high, alone.high))
        return alone._replace(gain=saved, low=low, high=high)

    def _range_of_parts(self, edits: Sequence[Edit], parts: Sequence[Key]) -> GainRange:
        """Return the gain of several changes together; its range has their relative width."""
        saved = self._joint_gain(edits)
        ranges = [self.gain_range(part) for part in parts]
        total = sum(part.gain for part in ranges)
        ends = (sum(part.low for part in ranges), sum(part.high for part in ranges))
        low, high = (saved * end / total if total > 0 else saved for end in ends)
        return GainRange(saved, min(saved, low), max(saved, high))

    def overlaps(self, finding: Finding) -> bool:
        savings = self._savings.get(tuple(finding.edits))
        if not finding.other_rank or savings is None:
            return super().overlaps(finding)
        return savings.saved.get(-1 if self.place is None else self.place, 0.0) > 0

    def is_calibrated(self, edits: Sequence[Edit]) -> bool:
        return tuple(edits) in self._deviations

    def marginal(self, edits: Sequence[Edit], applied: Sequence[Edit]) -> float:
        return self._joint_gain([*applied, *edits]) - self._joint_gain(applied)

    def critical_path(self) -> dict[str, float]:
        return self.own.critical_path()

    def describe_replay(self, edits: Sequence[Edit], left: float) -> Replay | None:
        own_edits = [edit for edit in edits if self._key_of.get(edit) not in self._deviations]
        return self.own.describe_replay(own_edits, left)

    def _joint_gain(self, edits: Sequence[Edit]) -> float:
        """Return how much all these edits together save in the job's step, ns."""
        named = (key for e in edits if (key := self._key_of.get(e)) is not None)
        keys = self._parts.get(tuple(edits)) or tuple(dict.fromkeys(named))
        if not keys:
            return 0.0
        if keys not in self._saved:
            replay = self.comparison.replay
            change = combine_changes(replay, self._list_changes(keys))
            self._saved[keys] = replay.replayed_ns - replay.step(change)
        return self._saved[keys]

    def _list_changes(self, keys: Sequence[Key]) -> list[JobChange]:
        job, replay = self.comparison.job, self.comparison.replay
        changes: list[JobChange] = []
        applied: list[Edit] = []
        for key in keys:
            if key in self._deviations:
                deviation = self._deviations[key][0]
                if key not in self._changes and deviation is not None:
                    self._changes[key] = change_without(job, replay, deviation)[0]
                changes.append(self._changes[key])
                continue
            savings = self._savings[key]
            if (without := self._without_collectives(key)) is not None:
                changes.append(without)
                continue
            share = 1.0  # remaining share after the earlier changes
            alone = 0.0 if self.place is None else savings.saved.get(self.place, 0.0)
            if savings.reported_rank or alone > 0:
                alone = savings.gain.gain if savings.reported_rank else alone
                if applied and alone > 0:
                    share = self.own.marginal(key, applied) / alone
                applied += key
            saved = np.zeros(len(job.summaries))
            for place, ns in savings.saved.items():
                saved[place] = ns * max(0.0, share)
            changes.append(saving_change(replay, saved, communication=savings.communication))
        return changes

    def _without_collectives(self, key: Key) -> JobChange | None:
        """Return the job without the collectives that all edits of a finding remove, or ``None`` if
        an edit selects something else."""
        parts = [without_collectives(self.comparison.replay, edit) for edit in key]
        if not parts or None in parts:
            return None
        return combine_changes(self.comparison.replay, [part for part in parts if part is not None])


def _find_own_gain(finding: Finding) -> GainRange | None:
    """Return the gain in the rank's own replay, or ``None`` if the finding gains no time per
    step."""
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


def _collect_savings(comparison: RankComparison) -> defaultdict[tuple[str, int], dict[int, float]]:
    """Return each rank's own saving, by rule and by the finding's number within the rule."""
    result: defaultdict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    for place, summary in enumerate(comparison.job.summaries):
        counts: Counter[str] = Counter()
        for advice in summary.findings:
            result[advice.rule, counts[advice.rule]][place] = advice.gain_ns or 0.0
            counts[advice.rule] += 1
    return result


def estimate_ranks(
    analyses: Mapping[int, Analysis], rank: int, own: GainEstimator
) -> tuple[RanksEstimator | None, str]:
    """Return the estimator for changes to a job's ranks, shown for one rank with its ``own``
    estimator. ``None``, with the reason, if they cannot be replayed together."""
    comparison = compare_ranks([summarize_rank(a, number) for number, a in analyses.items()])
    if comparison is None or comparison.summary_index(rank) is None:
        return None, "they belong to different runs"
    if comparison.replay.reason:
        return None, comparison.replay.reason
    estimators = {rank: own}

    def of_rank(number: int) -> GainEstimator | None:
        if number not in estimators:
            estimators[number] = estimator_for(analyses[number], number)
        return estimators[number]

    return RanksEstimator(own, comparison, rank, of_rank=of_rank), ""
