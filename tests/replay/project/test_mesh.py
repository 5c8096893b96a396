"""The step on another mesh: parsed, recovered, by hand, and against simulated jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from advisor.core.errors import AdvisorError
from advisor.measure import Analysis
from advisor.measure.comm.links import BASE_NS, NETWORK_HOP_NS, NODE_HOP_NS, NodeLinks
from advisor.read import read_trace
from advisor.replay.project.mesh import (
    MIDDLE,
    Mesh,
    MeshProjector,
    parse_mesh,
)
from benchmarks.simulation.kineto import trace
from benchmarks.simulation.meshes import draw_pair, play_mesh

SEED = 5  # dp=2,tp=4 to dp=8,tp=2, in one second
NODE = 8


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """File of the first rank of a simulated job of dp=2,tp=4."""
    pair = draw_pair(SEED)
    assert pair.recorded == Mesh(dp=2, tp=4)
    path = tmp_path_factory.mktemp("mesh") / "rank0.json"
    path.write_bytes(trace(play_mesh(pair.model, pair.recorded), 0))
    return path


@pytest.fixture(scope="module")
def analysis(file: Path) -> Analysis:
    return Analysis(read_trace(file))


@pytest.fixture(scope="module")
def projector(analysis: Analysis) -> MeshProjector:
    return MeshProjector(analysis, None, NodeLinks(NODE, 25.0))


@pytest.mark.parametrize(
    ("text", "mesh"),
    [
        ("dp=8,tp=4", Mesh(8, 4)), ("tp=2", Mesh(tp=2)), ("pp=2, dp=4", Mesh(4, pp=2)),
        ("dp=8,ep=4,cp=2", Mesh(8, cp=2, ep=4)),
    ],
)  # fmt: skip
def test_a_mesh_is_read_by_its_axes(text: str, mesh: Mesh) -> None:
    assert parse_mesh(text) == mesh
    assert parse_mesh(str(mesh)) == mesh


@pytest.mark.parametrize(
    "text", ["", "dp", "dp=0", "dp=-1", "dp=2,dp=2", "xp=2", "dp=2,ep=4", "dp=9999999999", "dp=²"]
)
def test_an_invalid_mesh_is_refused(text: str) -> None:
    with pytest.raises(AdvisorError, match="--mesh"):
        parse_mesh(text)


def test_the_recorded_mesh_is_recovered_and_stays_as_measured(projector: MeshProjector) -> None:
    result = projector.on(projector.measured)
    assert projector.measured == Mesh(dp=2, tp=4)
    assert result.step_ns == pytest.approx(result.measured_step_ns)
    assert result.throughput == pytest.approx(1.0)


def test_collectives_take_as_long_as_a_ring_by_hand(projector: MeshProjector) -> None:
    """An all-reduce of S bytes over n ranks moves 2 (n - 1) / n S and takes 2 (n - 1) steps; across
    nodes a ring enters each node once, over all of its NICs."""
    near, far = projector._node_rates[MIDDLE], 25.0
    size = 64 << 20
    inside = projector.transfer(Mesh(dp=2, tp=4), "tp", "all_reduce", size, MIDDLE)
    assert inside == pytest.approx(BASE_NS[MIDDLE] + 6 * NODE_HOP_NS[MIDDLE] + 1.5 * size / near)
    # 16 ranks of two nodes of 8: 30 steps, 3 of them between nodes
    across = projector.transfer(Mesh(dp=16), "dp", "all_gather", size, MIDDLE)
    rate = min(near, projector._network_rates[MIDDLE] * 8)
    latency = 14 * NODE_HOP_NS[MIDDLE] + NETWORK_HOP_NS[MIDDLE]
    assert across == pytest.approx(BASE_NS[MIDDLE] + latency + 15 / 16 * size / rate)
    # one rank of a node alone: one NIC
    within_node = projector.transfer(Mesh(dp=2, tp=8), "dp", "all_reduce", size, MIDDLE)
    assert within_node > size / far


def test_a_pipeline_waits_by_the_formula(projector: MeshProjector) -> None:
    """(p - 1) / m of the work, over again what the step takes without."""
    few = projector.on(Mesh(dp=1, tp=4, pp=2), micro_batches=2)
    many = projector.on(Mesh(dp=1, tp=4, pp=2), micro_batches=16)
    assert few.then_bubble_ns / (few.step_ns - few.then_bubble_ns) < 0.5 + 0.01
    assert few.then_bubble_ns > many.then_bubble_ns > 0
    assert projector.on(Mesh(dp=2, tp=4)).then_bubble_ns == 0


def test_half_the_tensor_parallel_ranks_have_twice_the_products(projector: MeshProjector) -> None:
    result = projector.on(Mesh(dp=4, tp=2))
    assert 1.2 < result.then_compute_ns / result.compute_ns < 2.05
    assert result.low_ns < result.step_ns < result.high_ns
    assert result.batch == 2
    assert projector.on(Mesh(dp=4, tp=2), same_batch=True).step_ns < result.step_ns


def test_unrecorded_values_are_reported_and_not_guessed(analysis: Analysis) -> None:
    with pytest.raises(AdvisorError, match="--node-size"):
        MeshProjector(analysis).on(Mesh(dp=4, tp=2))
    with pytest.raises(AdvisorError, match="--node-bandwidth"):
        MeshProjector(analysis, None, NodeLinks(NODE)).on(Mesh(dp=16, tp=4))
    with pytest.raises(AdvisorError, match="experts"):
        MeshProjector(analysis, None, NodeLinks(NODE)).on(Mesh(dp=4, tp=2, ep=2))
    with pytest.raises(AdvisorError, match="gradients"):
        MeshProjector(analysis, Mesh(tp=8), NodeLinks(NODE)).on(Mesh(dp=2, tp=4))
    assert MeshProjector(analysis, None, NodeLinks(NODE)).on(Mesh(dp=4, tp=2)).memory is None


@pytest.mark.parametrize("seed", [1, 4, 12, 22])
def test_the_other_mesh_of_a_simulated_job_is_near(seed: int, tmp_path: Path) -> None:
    """Fast pairs; docs/ranks-accuracy.md has many."""
    pair = draw_pair(seed)
    path = tmp_path / "rank0.json"
    path.write_bytes(trace(play_mesh(pair.model, pair.recorded), 0))
    a = Analysis(read_trace(path))
    result = MeshProjector(a, None, NodeLinks(NODE, pair.model.network_rate)).on(pair.target)
    truth = play_mesh(pair.model, pair.target).step_ns
    assert result.step_ns == pytest.approx(truth, rel=0.2)
    assert result.low_ns <= truth <= result.high_ns
