"""A diagnosis is right when it first blames the right ranks, and for the right thing."""

from __future__ import annotations

from typing import Any

from advisor.core.ranks import Outlier, RankLine, Ranks
from benchmarks.simulation.jobs import HEALTHY, FaultTruth
from benchmarks.simulation.score import judge

TRUTH = FaultTruth("slow_input", "host", "rack0-node01", tuple(range(8, 16)), False, 100e6, 20e6)


def report(*outliers: Outlier, ranks: int = 32) -> Ranks:
    lines = [
        RankLine(rank=n, step_ns=100e6, busy_share=None, communication_ns=None, idle_ns=None)
        for n in range(ranks)
    ]
    return Ranks(
        lines=lines, aligned=True, alignment_error_ns=1e3, note="", outliers=list(outliers)
    )


def make_outlier(kind: str, ranks: str, **given: Any) -> Outlier:
    fields = {"unit": "host", "name": "x", "ranks": ranks, "kind": kind, "moves": False}
    return Outlier(**fields | {"excess_ns": 20e6} | given)


def test_host_name_or_all_its_ranks_are_right() -> None:
    assert judge(report(make_outlier("input", "8-15")), TRUTH).right
    each = [make_outlier("input", str(rank), unit="rank") for rank in range(8, 16)]
    assert judge(report(*each), TRUTH).right


def test_missing_or_additional_ranks_are_wrong() -> None:
    some = judge(report(make_outlier("input", "8-14")), TRUTH)
    assert some.kind and not some.who
    assert not judge(report(make_outlier("input", "7-15")), TRUTH).who


def test_ranks_that_were_not_read_need_not_be_named() -> None:
    ranks = report(make_outlier("input", "8-14"))
    ranks.lines = [line for line in ranks.lines if line.rank != 15]
    assert judge(ranks, TRUTH).right


def test_rank_with_truncated_file_may_be_omitted() -> None:
    for ranks in ("8-14", "8-15"):
        assert judge(report(make_outlier("input", ranks)), TRUTH, cut=(15,)).right


def test_wrong_first_kind_is_wrong_despite_later_ones() -> None:
    wrong = judge(report(make_outlier("network", "8-15"), make_outlier("input", "8-15")), TRUTH)
    assert not wrong.kind and wrong.who and wrong.wrong_blames == 1
    after = judge(report(make_outlier("input", "8-15"), make_outlier("host", "3")), TRUTH)
    assert after.right and after.wrong_blames == 1


def test_empty_report_is_right_only_for_healthy_job() -> None:
    healthy = FaultTruth(HEALTHY, "", "", (), False, 100e6, 0.0)
    assert judge(report(), healthy).right and not judge(report(), TRUTH).right
    assert not judge(report(make_outlier("host", "3")), healthy).right


def test_a_moving_fault_is_reported_as_moving() -> None:
    truth = FaultTruth("moving", "", "", (), True, 100e6, 20e6)
    assert judge(report(make_outlier("imbalance", "0-31", moves=True)), truth).right
    assert not judge(report(make_outlier("imbalance", "3")), truth).right


def test_score_takes_the_gain_of_the_right_outlier() -> None:
    outlier = make_outlier("input", "8-15", gain_ns=19e6, low_ns=15e6, high_ns=22e6)
    score = judge(report(outlier), TRUTH)
    assert score.gain_ns == 19e6 and score.inside is True
    low = make_outlier("input", "8-15", gain_ns=9e6, low_ns=5e6, high_ns=12e6)
    assert judge(report(low), TRUTH).inside is False
    assert judge(report(make_outlier("input", "8-15")), TRUTH).inside is None
