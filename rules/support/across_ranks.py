"""Findings across ranks, built from the outliers found and the gains that the replay estimated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from advisor.core import labels
from advisor.core import text as t
from advisor.core.finding import Finding, Impact, Location, unit_of
from advisor.core.rule import Evidence
from advisor.measure.host.stacks import parse_frame
from advisor.measure.ranks.outliers import describe_reason, describe_subject

if TYPE_CHECKING:
    from advisor.core.rule import Per
    from advisor.measure.ranks.outliers import Deviation, JobMeasurements
    from advisor.replay.ranks.rank_comparison import RankComparison
    from advisor.replay.ranks.ranks_replay import JobGain

MIN_READ_SHARE = 0.9
"""Minimum share of the job's ranks that must be read: an unread rank may be later still."""

WAIT_LABEL = "exposed wait of the others"


def find_unit(comparison: RankComparison) -> Per:
    """Return the unit of the job's figures, such as per step."""
    return unit_of(comparison.job.summaries[0].step_source)


def finding_of(
    comparison: RankComparison, deviation: Deviation, gain: JobGain | None, title: str
) -> Finding:
    """Build the finding of a deviation: evidence, places and edits, and the gain where the ranks
    are not replayed."""
    from advisor.measure.ranks.outliers import edits_of

    job, result, per = comparison.job, comparison.job.waits, find_unit(comparison)
    index, steps = list(deviation.members.rank_indices), max(1, len(job.profile.steps))
    subject = describe_subject(job, deviation)
    taken, lasts = int(result.collective_count[index].sum()), int(result.last_count[index].sum())
    waited_ns = float(result.caused_exposed_ns[index].sum()) / steps
    error_ns = job.joined.clocks.error_ns
    world_size = max((s.world for s in job.summaries), default=0)
    enough_ranks_read = len(job.summaries) >= MIN_READ_SHARE * world_size
    label = "transfer time above the same of other groups"
    if deviation.kind != "network":
        label = "own work above the others'" if not deviation.arrives_late else WAIT_LABEL
    evidence = [
        Evidence("rank", job.topology.ranks[index[0]])
        if len(index) == 1
        else Evidence("ranks", subject),
        Evidence(label, deviation.excess_ns, "ns", per=per),
        Evidence(
            "share of the ranks' step",
            deviation.excess_ns / job.step_ns if job.step_ns else None,
            "share",
        ),
        *(
            Evidence(f"{name} above the others'", ns, "ns", per=per)
            for name, ns in deviation.excess_by_class.items()
            if ns > 0
        ),
    ]
    if taken:
        evidence.append(Evidence("arrives last at", lasts / taken, "share"))
        if label != WAIT_LABEL:
            evidence.append(Evidence(WAIT_LABEL, waited_ns, "ns", per=per))
    if error_ns is not None:
        evidence.append(Evidence("error of the clocks' alignment", error_ns, "ns"))
    impact = None
    if gain is None:
        shared_ns = subtract_redistributed_work(job, deviation, waited_ns)
        impact = Impact(
            currency="step_time",
            gain_ns=round(shared_ns),
            low_ns=0,
            high_ns=round(waited_ns),
            share=shared_ns / job.step_ns if job.step_ns else None,
            method="mean exposed wait of the other ranks",
            kind="recorded",
            per=per,
        )
    return Finding(
        title=title,
        summary=f"{t.upper_first(subject)}: {describe_reason(job, deviation)}.",
        evidence=evidence,
        where=[*_place_of_frame(deviation.frame), *_find_longest_waits(job, index)],
        edits=edits_of(job, deviation),
        impact=impact,
        confidence=0.8 if enough_ranks_read else 0.5,
        confidence_notes=[]
        if enough_ranks_read
        else ["not all ranks of the job were read: another rank may be later still"],
        falsified_by=f"a run in which the hosts of {subject} and of others are swapped, and the "
        "same ranks are late",
    )


def subtract_redistributed_work(job: JobMeasurements, deviation: Deviation, ns: float) -> float:
    """Return a gain, ns, minus the part of evenly dealt work that the other ranks take over."""
    if deviation.kind not in ("imbalance", "pipeline"):
        return ns
    return ns * (1 - len(deviation.members.rank_indices) / len(job.summaries))


def _place_of_frame(name: str) -> list[Location]:
    frame = parse_frame(name)
    return [] if frame is None else [frame.location]


def _find_longest_waits(job: JobMeasurements, rank_indices: list[int]) -> list[Location]:
    """Return the collectives with the longest waits for these ranks."""
    result = job.waits
    rows = np.flatnonzero(np.isin(result.last_rank, rank_indices))
    rows = rows[np.argsort(-result.mean_wait[rows], kind="stable")][:3]
    places = []
    for row in rows.tolist():
        number = int(result.row[row])
        key, cell = job.joined.keys[job.joined.key[number]], int(job.joined.first_cell[number])
        summary, step = job.summaries[job.joined.rank[cell]], int(job.joined.step[cell])
        places.append(
            Location(
                op=labels.clean(key.kind).replace("_", "-"),
                step=summary.steps[step].name if 0 <= step < len(summary.steps) else None,
                dur_ns=round(float(result.mean_wait[row])),
            )
        )
    return places
