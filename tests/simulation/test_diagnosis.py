"""Diagnoses of a few simulated jobs; ``benchmarks.bench_jobs`` holds hundreds against the truth."""

from __future__ import annotations

import msgspec
import pytest

from advisor.core.ranks import Ranks
from advisor.replay.ranks.rank_comparison import compare_ranks
from benchmarks.simulation.jobs import FAULTS, HEALTHY
from benchmarks.simulation.programs import play
from benchmarks.simulation.score import Score, judge
from benchmarks.simulation.summaries import summarize_all

RANKS = 32


def diagnose_seed(seed: int, kind: str) -> Score:
    """Diagnose a small job and judge it by its truth; its report survives being sent."""
    played, truth = play(seed, RANKS, kind)
    comparison = compare_ranks(*summarize_all(played))
    assert comparison is not None
    ranks = comparison.ranks
    assert ranks.world == RANKS and len(ranks.lines) == RANKS - len(played.job.lost)
    assert msgspec.json.decode(msgspec.json.encode(ranks), type=Ranks) == ranks
    return judge(ranks, truth, played.job.cut)


def test_nearly_all_faults_are_reported_with_kind_and_location() -> None:
    jobs = [(seed, FAULTS[seed % len(FAULTS)]) for seed in range(2 * len(FAULTS))]
    result = {job: diagnose_seed(*job) for job in jobs}
    wrong = {job: score.reported for job, score in result.items() if not score.right}
    assert len(wrong) <= 1, wrong
    assert sum(score.wrong_blames for score in result.values()) <= 1


def test_the_reported_cost_of_a_fault_is_about_right() -> None:
    for seed, kind in ((0, "slow_device"), (5, "slow_input"), (3, "slow_host")):
        played, truth = play(seed, RANKS, kind)
        comparison = compare_ranks(*summarize_all(played))
        assert comparison is not None
        score = judge(comparison.ranks, truth)
        assert score.gain_ns == pytest.approx(truth.gain_ns, rel=0.3)


def test_jobs_without_a_fault_raise_no_alarm() -> None:
    reported = [diagnose_seed(seed, HEALTHY).reported for seed in range(8)]
    assert reported == [""] * len(reported)
