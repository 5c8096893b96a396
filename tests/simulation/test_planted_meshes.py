"""Rules about the device mesh on jobs with planted faults; ``benchmarks.bench_mesh_rules`` draws
more of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.bench_mesh_rules import find, judge, report_of_first_rank
from benchmarks.simulation.planted import FAULTS, few_micro_batches
from benchmarks.simulation.programs import simulate
from tests.measure.test_mesh import LAYOUTS, job_of

SEEDS = {
    "tensor-across-nodes": (12, 20, 34, 42),
    "small-gathers": (44, 59, 63, 72),
    # all up to 28 that cost 5% or more; of 3, the range begins just below 1% of the step
    "pipeline-bubble": (2, 16, 19, 3, 20, 28),
}


@pytest.mark.parametrize(
    ("rule", "seeds"),
    [
        *((rule, SEEDS[rule][: len(SEEDS[rule]) // 2]) for rule in FAULTS),
        *(pytest.param(rule, SEEDS[rule], marks=pytest.mark.thorough) for rule in FAULTS),
    ],
)
def test_gain_of_a_planted_fault_matches_the_cured_job(
    rule: str, seeds: tuple[int, ...], tmp_path: Path
) -> None:
    result = []
    for seed in seeds:
        planted = FAULTS[rule](seed)
        assert planted is not None
        result.append(judge(rule, planted, tmp_path))
    assert sum(each.covered for each in result) >= 0.8 * len(result), result
    assert all(each.truth > 0 for each in result)
    if rule != "pipeline-bubble":
        assert all(each.cured for each in result)


@pytest.mark.parametrize("seed", [35, 69])
def test_ranks_stay_where_they_are_if_others_would_send_more(seed: int, tmp_path: Path) -> None:
    """Tensor parallelism crosses nodes, but the gradients or the experts would cross instead."""
    planted = FAULTS["tensor-across-nodes"](seed)
    assert planted is not None
    result = judge("tensor-across-nodes", planted, tmp_path)
    assert result.truth < 0 and result.gain is None


def test_many_micro_batches_leave_no_bubble_to_report(tmp_path: Path) -> None:
    planted = few_micro_batches(3)
    assert planted is not None
    stages = planted.faulty.pp
    filled = replace(planted.cured, micro_batches=4 * stages)
    assert find("pipeline-bubble", simulate(filled), None, tmp_path) is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_healthy_jobs_have_no_fault_of_their_mesh(layout: str, tmp_path: Path) -> None:
    """Their pipelines have few micro-batches, which is no fault of the simulation."""
    played = simulate(job_of(LAYOUTS[layout][0]))
    result = {each.rule for each in report_of_first_rank(played, None, tmp_path).findings}
    assert not result & {"tensor-across-nodes", "small-gathers"}
