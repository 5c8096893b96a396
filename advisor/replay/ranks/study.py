"""The summaries of a job's ranks, studied together: who differs, and what a change saves the job.

This is the one way for 2 ranks and for 1,024: matched, put on one clock, searched for outliers and
replayed, by whole columns."""

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
    describe_change,
    describe_reason,
    describe_subject,
    find_outliers,
    merge_outliers,
)
from advisor.measure.ranks.own_time import CLASSES, profile_ranks
from advisor.measure.ranks.summary_schema import (
    RankSummary,
    UnreadRank,
    find_clusters,
    select_main_run,
)
from advisor.measure.ranks.topology import RankTopology, find_stages
from advisor.replay.ranks.gains import estimate_gain, estimate_without_stragglers, no_transfers
from advisor.replay.ranks.ranks_replay import JobGain, RanksReplay

MIN_SHOWN_SHARE = 0.01
"""Least share of the ranks' steps that is shown."""
MAX_OUTLIERS = 20
ALONE_SHARE = 0.5
"""Share of their joint gain: ranks that gain less one by one are shown together."""
MIN_HELD_UP_SHARE = 0.005
"""Least gain in the replay, as a share of the step: with less, nobody is held up."""
MAX_SIGNIFICANCE = 0.9999
"""Largest significance reported: no model of chance is known better."""


@dataclass(frozen=True)
class Study:
    """Ranks of a job, compared and replayable."""

    job: JobMeasurements
    replay: RanksReplay
    """Replay of the ranks; where its ``reason`` is not empty, nothing is replayed."""
    missing: tuple[MissingRanks, ...]
    notes: dict[str, str]

    @property
    def numbers(self) -> list[int]:
        """Numbers of the ranks, in the order of the summaries."""
        return self.job.topology.ranks

    @property
    def replayed(self) -> list[int]:
        """Ranks that are replayed together; empty: none are."""
        if self.replay.reason:
            return []
        return [
            n for n, there in zip(self.numbers, self.replay.complete_ranks, strict=True) if there
        ]

    def summary_index(self, rank: int) -> int | None:
        """Return the place of a rank in the summaries; ``None``: it is not among them."""
        return self.numbers.index(rank) if rank in self.numbers else None

    @cached_property
    def outliers(self) -> list[tuple[Deviation, JobGain | None]]:
        """Ranks that differ, with the gain of the job's step without that (``None``: not replayed);
        the largest gain first."""
        replayed = not self.replay.reason
        result = [*find_outliers(self.job), *slow_links(self.job)]
        kept: list[tuple[Deviation, JobGain | None]] = []
        for deviation in self._merged(result) if replayed else result:
            # a rank that is not replayed (its file is cut off) has no estimate
            there = (
                replayed and self.replay.complete_ranks[list(deviation.members.rank_indices)].any()
            )
            gain = estimate_gain(self.job, self.replay, deviation) if there else None
            if gain is None or gain.gain >= MIN_HELD_UP_SHARE * self.job.step_ns:
                kept.append((deviation, gain))
        kept.sort(key=lambda item: -(item[0].excess_ns if item[1] is None else item[1].gain))
        return kept[:MAX_OUTLIERS]

    def _merged(self, result: list[Deviation]) -> list[Deviation]:
        """Merge ranks that differ in the same way where only all together hold the job up: each
        alone gains little while the next one is as late."""
        kept: list[Deviation] = []
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
                if alone < ALONE_SHARE * estimate_gain(self.job, self.replay, joint).gain:
                    same = [joint, *(each for each in same if each not in single)]
            kept += same
        return kept

    @cached_property
    def values(self) -> Floats:
        """Time by rank and class (``CLASSES``, then ``waiting``), ns per step. Waits for others are
        apart from transfers. NaN: not measured."""
        own, result, joined = self.job.profile, self.job.waits, self.job.joined
        open_wait = np.bincount(
            joined.rank[result.cells], weights=result.exposed, minlength=len(own.step_ns)
        )
        steps = np.maximum(np.array([np.isfinite(row).sum() for row in own.own_ns_by_step]), 1)
        communication = own.values[:, -1]
        waiting = np.minimum(open_wait / steps, communication)
        return np.column_stack([own.values[:, :-1], communication - waiting, waiting])

    def exposed(self) -> list[Evidence]:
        """Return the share of all ranks' steps that is exposed communication: by rank where they
        are few, by kind, and the waiting in it. Empty: not measured."""
        joined, step = self.job.joined, self.job.profile.step_ns
        waiting = self.values[:, -1]
        exposed = self.values[:, -2] + waiting
        known = np.isfinite(exposed) & (step > 0)
        whole = float(step[known].sum())
        if whole <= 0:
            return []
        result = [Evidence("exposed, all ranks", float(exposed[known].sum()) / whole, "share")]
        if known.sum() <= FEW_RANKS:
            shares = zip(self.numbers, known, exposed / np.maximum(step, 1.0), strict=True)
            each = [f"{rank} {format_share(share)}" for rank, there, share in shares if there]
            result.append(Evidence("exposed by rank", ", ".join(each)))
        steps = np.array([max(1, len(summary.steps)) for summary in self.job.summaries])
        of_rank, ns = known[joined.rank], joined.exposed / steps[joined.rank]
        key = joined.key[joined.row]
        kinds: dict[str, float] = {}
        totals = np.bincount(key[of_rank], ns[of_rank], len(joined.keys)).tolist()
        for number, total in enumerate(totals):
            name = joined.keys[number].kind.replace("_", "-")
            kinds[name] = kinds.get(name, 0.0) + total
        result += [
            Evidence(f"exposed in {name}", total / whole, "share")
            for name, total in sorted(kinds.items(), key=lambda item: -item[1])
            if total >= MIN_SHOWN_SHARE * whole
        ]
        late = float(np.nansum(waiting[known])) / whole
        if late >= MIN_SHOWN_SHARE:
            result.append(Evidence("exposed in waiting for the last rank", late, "share"))
        return result

    @property
    def late(self) -> str:
        """Name the ranks that the others wait for: ``rank 7``; empty: none is known."""
        late = [each for each, _ in self.outliers if each.arrives_late and not each.rank_varies]
        return list_names([describe_subject(self.job, each) for each in late], 3) if late else ""

    @cached_property
    def ranks(self) -> Ranks:
        job, clocks = self.job, self.job.joined.clocks
        classes = [*CLASSES, "waiting"]
        return Ranks(
            lines=self._lines(),
            aligned=clocks.error_ns is not None,
            alignment_error_ns=clocks.error_ns,
            note=self._note(),
            world=max((s.world for s in job.summaries), default=0),
            hosts=len({s.host for s in job.summaries if s.host}),
            step=_spread(job.profile.step_ns),
            classes=classes,
            clusters=find_clusters(job.summaries, self.values, classes, job.stage),
            outliers=[self._outlier(*each) for each in self.outliers],
            what_if=self._what_if(),
            missing=list(self.missing),
            replay_error=self.replay.error,
            not_checked=self._not_checked(),
        )

    def _lines(self) -> list[RankLine]:
        result, steps = self.job.waits, max(1, len(self.job.profile.steps))
        placed = np.isfinite(self.job.joined.clocks.shift)
        lines = []
        for place, s in enumerate(self.job.summaries):
            taken = int(result.collective_count[place])
            step = sum(s.time.values())
            lines.append(
                RankLine(
                    rank=s.rank,
                    step_ns=s.step_ns,
                    busy_share=1 - s.time.get("idle", 0.0) / step if step else None,
                    communication_ns=s.time.get("communication") if s.time else None,
                    idle_ns=s.time.get("idle") if s.time else None,
                    last_share=int(result.last_count[place]) / taken if taken else None,
                    caused_wait_ns=float(result.caused_ns[place]) / steps
                    if placed[place]
                    else None,
                    host=s.host,
                    path=s.path,
                    time=[
                        round(ns) if np.isfinite(ns) else None for ns in self.values[place].tolist()
                    ],
                )
            )
        return lines

    def _note(self) -> str:
        clocks = self.job.joined.clocks
        if clocks.error_ns is None:
            return f"Skew between ranks is not measured: {clocks.reason}."
        return (
            f"The ranks are put on one clock by the ends of {format_count(clocks.matched)} matched "
            f"collectives, accurate to {format_duration(clocks.error_ns)}. 'Comes last': share of "
            "the collectives that the rank enters last. 'Others wait': how long each of them waits "
            "for it, whether compute hides that or not; it is no gain, as other ranks may be late "
            "then. A late rank's own step is short: it waits for nobody."
        )

    def _outlier(self, deviation: Deviation, gain: JobGain | None) -> Outlier:
        index, result = list(deviation.members.rank_indices), self.job.waits
        taken, last = int(result.collective_count[index].sum()), int(result.last_count[index].sum())
        steps, chance = max(1, len(self.job.profile.steps)), deviation.members.p_value
        return Outlier(
            unit=deviation.members.unit,
            name=deviation.members.name,
            ranks=rank_numbers([self.numbers[place] for place in index]),
            kind=deviation.kind,
            moves=deviation.rank_varies,
            excess_ns=deviation.excess_ns,
            reason=describe_reason(self.job, deviation),
            waited_ns=float(result.caused_ns[index].sum()) / steps if len(result.row) else None,
            last_share=last / taken if taken else None,
            significance=None if chance >= 1 else min(MAX_SIGNIFICANCE, 1 - chance),
            gain_ns=None if gain is None else gain.gain,
            low_ns=None if gain is None else gain.low,
            high_ns=None if gain is None else gain.high,
        )

    def _what_if(self) -> list[RanksWhatIf]:
        changes = [(describe_change(self.job, each), gain) for each, gain in self.outliers if gain]
        if not self.replay.reason:
            every = estimate_without_stragglers(self.job, self.replay)
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
            same = "both ranks equally fast" if two else "every rank as fast as the median"
            changes.append((f"{same}{names}", every))
            for kind in sorted({key.kind for key in self.job.joined.keys}):
                name = kind.replace("_", "-")
                hidden = no_transfers(self.replay, kind)
                changes.append((f"every {name} transfer hidden, at best", hidden))
        return [
            RanksWhatIf(text=text, gain_ns=gain.gain, low_ns=gain.low, high_ns=gain.high)
            for text, gain in sorted(changes, key=lambda item: -item[1].gain)
            if gain.gain >= MIN_HELD_UP_SHARE * self.job.step_ns
        ]

    def _not_checked(self) -> dict[str, str]:
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


def study_ranks(
    summaries: Sequence[RankSummary], unread: Sequence[UnreadRank] = ()
) -> Study | None:
    """Compare the ranks of one job and prepare their replay; ``None``: there is no rank.

    Raises AdvisorError: a summary's columns do not belong together."""
    ordered, others, notes = select_main_run(summaries)
    if not ordered:
        return None
    joined, own = match_collectives(ordered), profile_ranks(ordered)
    stage = find_stages(joined, len(ordered), len(own.steps))
    job = JobMeasurements(ordered, own, joined, measure_waits(joined), stage, RankTopology(ordered))
    return Study(job, RanksReplay(ordered, own, joined), _missing([*unread, *others]), notes)


def _missing(unread: Sequence[UnreadRank]) -> tuple[MissingRanks, ...]:
    by_reason: dict[str, list[UnreadRank]] = defaultdict(list)
    for each in unread:
        by_reason[each.why].append(each)
    return tuple(
        MissingRanks(
            ranks=rank_numbers([each.rank for each in those if each.rank >= 0]),
            count=len(those),
            why=why,
            path=those[0].path,
        )
        for why, those in sorted(by_reason.items(), key=lambda item: -len(item[1]))
    )


def _spread(steps: Floats) -> StepSpread | None:
    known = steps[steps > 0]
    if not len(known):
        return None
    least, low, median, high, most = np.quantile(known, [0, 0.1, 0.5, 0.9, 1]).tolist()
    return StepSpread(min=least, low=low, median=median, high=high, max=most)
