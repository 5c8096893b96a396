"""The true cost of a fault is the time that the job is shorter by when it runs again without the
fault."""

from __future__ import annotations

from collections import Counter

import pytest

from advisor.replay.ledger import (
    OTHERS,
    fault_kind,
    job_range,
    job_ranges,
    shipped_predictions,
)
from advisor.replay.ranks.rank_comparison import compare_ranks
from benchmarks.simulation.programs import play
from benchmarks.simulation.score import KIND, judge
from benchmarks.simulation.summaries import summarize_all


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        ("slow_link", 102),  # sends of a pipeline cross it
        ("slow_link", 103),  # between hosts every group crosses it
        ("slow_link", 104),  # half of the groups of one kind do, a few of another
        ("expert_imbalance", 104),  # most of it is the all-to-alls'
        ("pipeline_imbalance", 102),  # four stages: pairs of two communicators on a rank
    ],
)
def test_predicted_is_true(kind: str, seed: int) -> None:
    played, truth = play(seed, 64, kind)
    comparison = compare_ranks(*summarize_all(played))
    assert comparison is not None
    assert comparison.ranks.replay_error == pytest.approx(0, abs=0.01)
    score = judge(comparison.ranks, truth, played.job.cut)
    assert score.right, score.reported
    assert score.gain_ns == pytest.approx(truth.gain_ns, rel=0.05)


def test_ranges_are_of_many_jobs_and_hold_right_predictions() -> None:
    assert job_range("no such kind") == job_ranges()[OTHERS]
    names = {fault_kind(kind, moves=fault == "moving") for fault, kind in KIND.items()}
    assert set(job_ranges()) <= names | {OTHERS}
    jobs = Counter(row.kind for row in shipped_predictions() if row.source == "job")
    for kind, ratios in job_ranges().items():
        assert kind == OTHERS or jobs[kind] >= 9
        assert 0 < ratios.low < ratios.high < 3
