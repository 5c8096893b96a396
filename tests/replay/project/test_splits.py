"""GPU counts and splits: the meshes that are tried, money by hand, and price files."""

from __future__ import annotations

from pathlib import Path

import pytest

from advisor.core.errors import AdvisorError
from advisor.core.prices import read_prices
from advisor.measure import Analysis
from advisor.measure.comm.links import NodeLinks
from advisor.read import read_trace
from advisor.replay.project.mesh import Mesh, MeshProjector, parse_mesh
from advisor.replay.project.splits import Instance, candidate_meshes, compare_splits, read_instance
from benchmarks.simulation.kineto import trace
from benchmarks.simulation.meshes import draw_pair, play_mesh


@pytest.fixture(scope="module")
def analysis(tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    """Analysis of the first rank of a simulated job of dp=2,tp=4."""
    pair = draw_pair(5)
    path = tmp_path_factory.mktemp("splits") / "rank0.json"
    path.write_bytes(trace(play_mesh(pair.model, pair.recorded), 0))
    return Analysis(read_trace(path))


def test_splits_keep_the_pipeline_and_stay_inside_a_node() -> None:
    items = list(candidate_meshes(Mesh(dp=2, tp=2, pp=2), 32, 8))
    assert items == [
        Mesh(dp=16, tp=1, pp=2), Mesh(dp=8, tp=2, pp=2), Mesh(dp=4, tp=4, pp=2),
        Mesh(dp=2, tp=8, pp=2),
    ]  # fmt: skip
    assert all(mesh.world == 32 for mesh in items)
    assert list(candidate_meshes(Mesh(pp=3), 8, 8)) == []


def test_cost_is_of_the_same_samples_by_hand(analysis: Analysis) -> None:
    """GPUs x time x price at 2 per hour and GPU, divided by how many more samples each step has."""
    projector = MeshProjector(analysis, None, NodeLinks(8, 25.0))
    rows = compare_splits(projector, [8, 16], 2.0)
    same = next(row for row in rows if row.mesh == str(projector.measured))
    assert same.speed == pytest.approx(1.0)
    assert same.cost == pytest.approx(8 * 2.0 * analysis.step_ns / 3.6e12 * 1e6)
    for row in rows:
        if row.step_ns is None:
            assert row.refused and row.cost is None
            continue
        assert row.low_ns is not None and row.high_ns is not None and row.cost is not None
        assert row.low_ns <= row.step_ns <= row.high_ns
        projected = projector.on(
            next(m for m in candidate_meshes(projector.measured, row.gpus, 8) if str(m) == row.mesh)
        )
        assert row.cost == pytest.approx(row.gpus * 2.0 * row.step_ns / 3.6e6 / projected.batch)
    for count in (8, 16):
        speeds = [row.speed or 0.0 for row in rows if row.gpus == count]
        assert speeds == sorted(speeds, reverse=True)


def test_a_split_across_an_unknown_network_is_refused(analysis: Analysis) -> None:
    rows = compare_splits(MeshProjector(analysis, None, NodeLinks(8)), [16], None)
    assert rows and all("--node-bandwidth" in row.refused for row in rows)
    (row,) = compare_splits(MeshProjector(analysis, Mesh(pp=8), NodeLinks(8)), [12], None)
    assert "does not divide" in row.refused


def test_an_instance_is_read_from_the_price_file(tmp_path: Path) -> None:
    file = tmp_path / "prices.toml"
    file.write_text('h200 = 3.0\n[instances."p5en"]\ngpu = "h200"\ngpus = 8\nprice = 63.3\n')
    assert read_prices(file).price_of("NVIDIA H200").per_hour == 3.0  # type: ignore[union-attr]
    table = {"p5en": {"gpu": "h200", "gpus": 8, "price": 63.3, "network": 50, "cores": 192}}
    assert read_instance(table, "p5en") == Instance("h200", 8, 63.3, 50, 192)


@pytest.mark.parametrize(
    "entry",
    [
        None, 5, {}, {"gpu": "h200"}, {"gpu": "h200", "gpus": 0}, {"gpu": "h200", "gpus": True},
        {"gpu": "h200", "gpus": 8, "price": "a"}, {"gpu": "h200", "gpus": 8, "price": -1},
        {"gpu": "h200", "gpus": 8, "nic": 3}, {"gpu": "h200", "gpus": 8, "price": float("nan")},
    ],
)  # fmt: skip
def test_an_invalid_instance_is_refused(entry: object) -> None:
    with pytest.raises(AdvisorError, match="instance"):
        read_instance({"x": entry} if entry is not None else {}, "x")


def test_nodes_are_shared_by_each_number_of_gpus(analysis: Analysis) -> None:
    """Two machines: tensor parallelism stays within half of the GPUs, whatever their number."""
    projector = MeshProjector(analysis, None, NodeLinks(8, 25.0))
    rows = compare_splits(projector, [4, 8, 16], None, nodes=2)
    largest = {
        count: max(parse_mesh(row.mesh).tp for row in rows if row.gpus == count)
        for count in (4, 8, 16)
    }
    assert largest == {4: 2, 8: 4, 16: 8}


def test_the_recorded_mesh_on_more_nodes_sends_over_the_network(analysis: Analysis) -> None:
    """dp=2,tp=4 of one node of 8 on two nodes of 4: its gradients cross, and nothing else does."""
    projector = MeshProjector(analysis, None, NodeLinks(8, 5.0))
    assert projector.measured == Mesh(dp=2, tp=4)
    small_nodes = projector.with_node_size(4)
    within_node, across_nodes = (
        projector.on(projector.measured),
        small_nodes.on(small_nodes.measured),
    )
    assert within_node.step_ns == pytest.approx(analysis.step_ns)
    assert across_nodes.step_ns > within_node.step_ns
    axes = {each.axis: each for each in across_nodes.axes}
    assert axes["dp"].then_ns > 10 * axes["dp"].ns
    same = next(each for each in within_node.axes if each.axis == "tp")
    assert axes["tp"].then_ns == pytest.approx(same.then_ns)


def test_an_epoch_costs_its_steps(analysis: Analysis) -> None:
    projector = MeshProjector(analysis, None, NodeLinks(8, 25.0))
    million = compare_splits(projector, [8], 2.0)
    epoch = compare_splits(projector, [8], 2.0, steps=500)
    assert [row.cost for row in epoch] == [
        pytest.approx((row.cost or 0.0) * 500 / 1e6) for row in million
    ]
