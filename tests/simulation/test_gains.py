"""What a fault costs is what the job is shorter by when it is run again without the fault."""

from __future__ import annotations

import pytest

from advisor.advise.ranks.diagnose import diagnose
from advisor.replay.ranks.bands import OTHERS, band_name, bands
from benchmarks.simulation.programs import play
from benchmarks.simulation.score import KIND, judge
from benchmarks.simulation.summaries import summarise_all


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
    report = diagnose(*summarise_all(played))
    assert report.replay_error == pytest.approx(0, abs=0.01)
    score = judge(report, truth, played.job.cut)
    assert score.right, score.told
    assert score.gain_ns == pytest.approx(truth.gain_ns, rel=0.05)


def test_bands_are_of_many_jobs_and_hold_what_is_predicted_right() -> None:
    told = bands()
    assert told.of("no such kind") == told.kinds[OTHERS]
    names = {band_name(kind, moves=fault == "moving") for fault, kind in KIND.items()}
    assert set(told.kinds) <= names | {OTHERS}
    for band in told.kinds.values():
        assert band.jobs >= 9
        assert 0 < band.low < band.high < 3
