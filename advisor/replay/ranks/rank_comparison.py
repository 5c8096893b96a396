"""Comparison of a job's ranks by their summaries: which differ, and what a change saves the job.

Two ranks and 1,024 ranks take the same way: they are matched, put on one clock, searched for
outliers and replayed, by whole columns."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from advisor.core.intervals import Floats
from advisor.core.ranks import (
    FEW_RANKS,
    MissingRanks,
    Outlier,
    RankLine,
    Ranks,
    RanksWhatIf,
    StepSpread,
)
from advisor.core.ranks import format_ranks as rank_numbers
from advisor.core.rule import Evidence
from advisor.core.text import format_count, format_duration, format_share, list_names
from advisor.measure.ranks.collectives import slow_links
from advisor.measure.ranks.join import match_collectives, measure_waits
from advisor.measure.ranks.outliers import (
    Deviation,
    JobMeasurements,
    describe_deviation,
    describe_reason,
    describe_subject,
    find_outliers,
    merge_outliers,
)
from advisor.measure.ranks.rank_work import CLASSES, profile_ranks
from advisor.measure.ranks.summary_schema import (
    RankSummary,
    UnreadRank,
    find_clusters,
    select_main_run,
)
from advisor.measure.ranks.topology import RankTopology, find_stages
from advisor.replay.ranks.gains import estimate_gain, estimate_without_stragglers, no_transfers
from advisor.replay.ranks.ranks_replay import JobGain, RanksReplay

_MIN_SHOWN_SHARE = 0.01
"""Minimum share of the ranks' steps that is shown."""
_MAX_OUTLIERS = 20
MIN_ALONE_SHARE = 0.5
"""Minimum share of their joint gain that ranks gain one by one; with less they are shown
together."""
MIN_HELD_UP_SHARE = 0.005
"""Minimum gain in the replay, as a share of the step: with less, no rank is delayed."""
MAX_SIGNIFICANCE = 0.9999
"""Maximum reported significance: no model of chance is more exact."""


@dataclass(frozen=True)
class RankComparison:
    """Ranks of a job, compared and replayable."""

    job: JobMeasurements
    replay: RanksReplay
    """Replay of the ranks; if its ``reason`` is not empty, nothing is replayed."""
    missing: tuple[MissingRanks, ...]
    notes: dict[str, str]

    @property
    def numbers(self) -> list[int]:
        """Numbers of the ranks, in the order of the summaries."""
        return self.job.topology.ranks

    @property
    def replayed(self) -> list[int]:
        """Ranks that are replayed together. Empty if there are none."""
        if self.replay.reason:
            return []
        return [
            n
            for n, complete in zip(self.numbers, self.replay.complete_ranks, strict=True)
            if complete
        ]

    def summary_index(self, rank: int) -> int | None:
        """Return the index of a rank in the summaries, or ``None`` if it is not among them."""
        return self.numbers.index(rank) if rank in self.numbers else None

    @cached_property
    def outliers(self) -> list[tuple[Deviation, JobGain | None]]:
        """Ranks that differ, with the gain of the job's step without the difference (``None`` if
        not replayed), largest gain first."""
        replayed = not self.replay.reason
        result = [*find_outliers(self.job), *slow_links(self.job)]
        deviations: list[tuple[Deviation, JobGain | None]] = []
        for deviation in self._merge_deviations(result) if replayed else result:
            # a rank that is not replayed (its file is truncated) has no estimate
            is_replayed = (
                replayed and self.replay.complete_ranks[list(deviation.members.rank_indices)].any()
            )
            gain = estimate_gain(self.job, self.replay, deviation) if is_replayed else None
            if gain is None or gain.gain >= MIN_HELD_UP_SHARE * self.job.step_ns:
                deviations.append((deviation, gain))
        deviations.sort(key=lambda item: -(item[0].excess_ns if item[1] is None else item[1].gain))
        return deviations[:_MAX_OUTLIERS]

    def _merge_deviations(self, result: list[Deviation]) -> list[Deviation]:
        """Merge ranks that differ in the same way if only all together delay the job: each alone
        gains little while the next rank is as late."""
        deviations: list[Deviation] = []
        for kind in dict.fromkeys(each.kind for each in result):
            same = [each for each in result if each.kind == kind]
            single = [each for each in same if each.members.unit == "rank" and not each.rank_varies]
            if (
                kind != "network"
                and len(single) > 1
                and not any(each.arrives_late for each in single)
            ):
                joint = merge_outliers(self.job, single)
                gains = [estimate_gain(self.job, self.replay, each).gain for each in single]
                alone = sum(max(0.0, gain) for gain in gains)
                if alone < MIN_ALONE_SHARE * estimate_gain(self.job, self.replay, joint).gain:
                    same = [joint, *(each for each in same if each not in single)]
            deviations += same
        return deviations

    @cached_property
    def values(self) -> Floats:
        """Time by rank and class (``CLASSES``, then ``waiting``), ns per step. Waits for others are
        separate from transfers. NaN if not measured."""
        own, result, joined = self.job.profile, self.job.waits, self.job.joined
        open_wait = np.bincount(
            joined.rank[result.cells], weights=result.exposed, minlength=len(own.step_ns)
        )
        steps = np.maximum(np.array([np.isfinite(row).sum() for row in own.work_ns_by_step]), 1)
        communication = own.values[:, -1]
        waiting = np.minimum(open_wait / steps, communication)
        return np.column_stack([own.values[:, :-1], communication - waiting, waiting])

    def exposed(self) -> list[Evidence]:
        """Return the share of all ranks' steps that is exposed communication: by rank if there are
        few, by kind, and the waiting in it. Empty if not measured."""
        joined, step = self.job.joined, self.job.profile.step_ns
        waiting = self.values[:, -1]
        exposed = self.values[:, -2] + waiting
        valid = np.isfinite(exposed) & (step > 0)
        total_ns = float(step[valid].sum())
        if total_ns <= 0:
            return []
        result = [Evidence("exposed, all ranks", float(exposed[valid].sum()) / total_ns, "share")]
        if valid.sum() <= FEW_RANKS:
            shares = zip(self.numbers, valid, exposed / np.maximum(step, 1.0), strict=True)
            texts = [
                f"{rank} {format_share(share)}" for rank, is_shown, share in shares if is_shown
            ]
            result.append(Evidence("exposed by rank", ", ".join(texts)))
        steps = np.array([max(1, len(summary.steps)) for summary in self.job.summaries])
        of_rank, ns = valid[joined.rank], joined.exposed / steps[joined.rank]
        key = joined.key[joined.row]
        kinds: dict[str, float] = {}
        totals = np.bincount(key[of_rank], ns[of_rank], len(joined.keys)).tolist()
        for number, kind_ns in enumerate(totals):
            name = joined.keys[number].kind.replace("_", "-")
            kinds[name] = kinds.get(name, 0.0) + kind_ns
        result += [
            Evidence(f"exposed in {name}", kind_ns / total_ns, "share")
            for name, kind_ns in sorted(kinds.items(), key=lambda item: -item[1])
            if kind_ns >= _MIN_SHOWN_SHARE * total_ns
        ]
        waiting_share = float(np.nansum(waiting[valid])) / total_ns
        if waiting_share >= _MIN_SHOWN_SHARE:
            result.append(Evidence("exposed in waiting for the last rank", waiting_share, "share"))
        return result

    @property
    def late(self) -> str:
        """Names of the ranks that the others wait for: ``rank 7``. Empty if none is known."""
        deviations = [
            each for each, _ in self.outliers if each.arrives_late and not each.rank_varies
        ]
        return (
            list_names([describe_subject(self.job, each) for each in deviations], 3)
            if deviations
            else ""
        )

    @cached_property
    def ranks(self) -> Ranks:
        job, clocks = self.job, self.job.joined.clocks
        classes = [*CLASSES, "waiting"]
        return Ranks(
            lines=self._list_ranks(),
            aligned=clocks.error_ns is not None,
            alignment_error_ns=clocks.error_ns,
            note=self._explain_clocks(),
            world=max((s.world for s in job.summaries), default=0),
            hosts=len({s.host for s in job.summaries if s.host}),
            step=_summarize_steps(job.profile.step_ns),
            classes=classes,
            clusters=find_clusters(job.summaries, self.values, classes, job.stage),
            outliers=[self._describe_outlier(*each) for each in self.outliers],
            what_if=self._list_what_ifs(),
            missing=list(self.missing),
            replay_error=self.replay.error,
            not_checked=self._list_unchecked(),
        )

    def _list_ranks(self) -> list[RankLine]:
        result, steps = self.job.waits, max(1, len(self.job.profile.steps))
        is_aligned = np.isfinite(self.job.joined.clocks.shift)
        lines = []
        for place, s in enumerate(self.job.summaries):
            count = int(result.collective_count[place])
            step = sum(s.time.values())
            lines.append(
                RankLine(
                    rank=s.rank,
                    step_ns=s.step_ns,
                    busy_share=1 - s.time.get("idle", 0.0) / step if step else None,
                    communication_ns=s.time.get("communication") if s.time else None,
                    idle_ns=s.time.get("idle") if s.time else None,
                    last_share=int(result.last_count[place]) / count if count else None,
                    caused_wait_ns=float(result.caused_ns[place]) / steps
                    if is_aligned[place]
                    else None,
                    host=s.host,
                    path=s.path,
                    time=[
                        round(ns) if np.isfinite(ns) else None for ns in self.values[place].tolist()
                    ],
                )
            )
        return lines

    def _explain_clocks(self) -> str:
        clocks = self.job.joined.clocks
        if clocks.error_ns is None:
            return f"Skew between ranks is not measured: {clocks.reason}."
        return (
            f"The ranks are put on one clock by the ends of {format_count(clocks.matched)} matched "
            f"collectives, accurate to {format_duration(clocks.error_ns)}. 'Comes last': share of "
            "the collectives that the rank enters last. 'Others wait': how long each of them waits "
            "for it, whether compute hides that or not; this is not a gain, as other ranks may "
            "then be late. A late rank's own step is short: it does not wait."
        )

    def _describe_outlier(self, deviation: Deviation, gain: JobGain | None) -> Outlier:
        index, result = list(deviation.members.rank_indices), self.job.waits
        count, last = int(result.collective_count[index].sum()), int(result.last_count[index].sum())
        steps, p_value = max(1, len(self.job.profile.steps)), deviation.members.p_value
        return Outlier(
            unit=deviation.members.unit,
            name=deviation.members.name,
            ranks=rank_numbers([self.numbers[place] for place in index]),
            kind=deviation.kind,
            moves=deviation.rank_varies,
            excess_ns=deviation.excess_ns,
            reason=describe_reason(self.job, deviation),
            waited_ns=float(result.caused_ns[index].sum()) / steps if len(result.row) else None,
            last_share=last / count if count else None,
            significance=None if p_value >= 1 else min(MAX_SIGNIFICANCE, 1 - p_value),
            gain_ns=None if gain is None else gain.gain,
            low_ns=None if gain is None else gain.low,
            high_ns=None if gain is None else gain.high,
        )

    def _list_what_ifs(self) -> list[RanksWhatIf]:
        changes = [
            (describe_deviation(self.job, each), gain) for each, gain in self.outliers if gain
        ]
        if not self.replay.reason:
            no_stragglers = estimate_without_stragglers(self.job, self.replay)
            caused = self.job.waits.caused_ns / max(1, len(self.job.profile.steps))
            late = [
                number
                for number, ns in zip(self.numbers, caused.tolist(), strict=True)
                if ns >= MIN_HELD_UP_SHARE * self.job.step_ns
            ]
            names = f" (ranks {rank_numbers(late)} are late)" if len(late) > 1 else ""
            if len(late) == len(self.numbers):
                names = " (each of them is late at times)"
            two = len(self.numbers) == 2
            change = "both ranks equally fast" if two else "every rank as fast as the median"
            changes.append((f"{change}{names}", no_stragglers))
            for kind in sorted({key.kind for key in self.job.joined.keys}):
                name = kind.replace("_", "-")
                hidden = no_transfers(self.replay, kind)
                changes.append((f"every {name} transfer hidden, at best", hidden))
        return [
            RanksWhatIf(text=text, gain_ns=gain.gain, low_ns=gain.low, high_ns=gain.high)
            for text, gain in sorted(changes, key=lambda item: -item[1].gain)
            if gain.gain >= MIN_HELD_UP_SHARE * self.job.step_ns
        ]

    def _list_unchecked(self) -> dict[str, str]:
        result = dict(self.notes)
        if self.replay.reason:
            result["gains for the job"] = self.replay.reason
        damaged = [s.rank for s in self.job.summaries if s.damage]
        if damaged:
            result["the work of damaged files"] = (
                f"ranks {rank_numbers(damaged)} are compared by the steps before the damage alone"
            )
        if self.job.joined.dropped:
            result["all collectives"] = (
                f"{format_count(self.job.joined.dropped)} of later steps are left out to keep "
                "summaries "
                "small"
            )
        return result


def compare_ranks(
    summaries: Sequence[RankSummary], unread: Sequence[UnreadRank] = ()
) -> RankComparison | None:
    """Compare the ranks of one job and prepare their replay. ``None`` if there is no rank.

    Raises AdvisorError if a summary's columns do not belong together."""
    ordered, others, notes = select_main_run(summaries)
    if not ordered:
        return None
    joined, own = match_collectives(ordered), profile_ranks(ordered)
    stage = find_stages(joined, len(ordered), len(own.steps))
    job = JobMeasurements(ordered, own, joined, measure_waits(joined), stage, RankTopology(ordered))
    return RankComparison(
        job, RanksReplay(ordered, own, joined), _group_missing([*unread, *others]), notes
    )


def _group_missing(unread: Sequence[UnreadRank]) -> tuple[MissingRanks, ...]:
    by_reason: dict[str, list[UnreadRank]] = defaultdict(list)
    for rank in unread:
        by_reason[rank.why].append(rank)
    return tuple(
        MissingRanks(
            ranks=rank_numbers([rank.rank for rank in ranks if rank.rank >= 0]),
            count=len(ranks),
            why=why,
            path=ranks[0].path,
        )
        for why, ranks in sorted(by_reason.items(), key=lambda item: -len(item[1]))
    )


def _summarize_steps(steps: Floats) -> StepSpread | None:
    positive = steps[steps > 0]
    if not len(positive):
        return None
    minimum, low, median, high, maximum = np.quantile(positive, [0, 0.1, 0.5, 0.9, 1]).tolist()
    return StepSpread(min=minimum, low=low, median=median, high=high, max=maximum)
