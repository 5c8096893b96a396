"""The axes of the mesh: of simulated jobs whose axes are known, and by hand."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import advisor
from advisor.advise.options import Options
from advisor.measure import Analysis
from advisor.measure.comm.links import NodeLinks, find_link
from advisor.measure.comm.mesh import read_description, report_mesh
from advisor.read import ReadOptions, read_trace
from advisor.testing import TraceBuilder
from benchmarks.simulation.jobs import HEALTHY, Job, draw
from benchmarks.simulation.kineto import trace, write
from benchmarks.simulation.programs import simulate

RANK = 3
MIB = 1 << 20
LAYOUTS: dict[str, tuple[Callable[[Job], bool], dict[str, tuple[str, int]]]] = {
    "ddp": (lambda j: j.layout == "ddp", {"data": ("all_reduce", 16)}),
    "fsdp": (lambda j: j.layout == "fsdp", {"sharded data": ("all_gather", 16)}),
    "hybrid": (
        lambda j: j.layout == "hybrid",
        {"sharded data": ("all_gather", 8), "data": ("all_reduce", 2)},
    ),
    "tensor, pipeline and data": (
        lambda j: j.layout == "parallel" and j.tp == 4 and j.pp == 2,
        {
            "tensor": ("all_reduce", 4),
            "pipeline": ("send_recv", 2),
            "data": ("all_reduce", 2),
        },
    ),
    "tensor and data": (
        lambda j: j.layout == "parallel" and j.tp == 8,
        {"tensor": ("all_reduce", 8), "data": ("all_reduce", 2)},
    ),
    "experts": (
        lambda j: j.layout == "experts" and j.ep == 8,
        {"expert": ("all_to_all", 8), "data": ("all_reduce", 16)},
    ),
    "all of them": (
        lambda j: j.layout == "experts" and (j.tp, j.pp, j.ep) == (2, 2, 2),
        {
            "expert": ("all_to_all", 2),
            "tensor": ("all_reduce", 2),
            "pipeline": ("send_recv", 2),
            "data": ("all_reduce", 4),
        },
    ),
}


def job_of(wanted: Callable[[Job], bool]) -> Job:
    jobs = (draw(seed, 16, HEALTHY, steps=2) for seed in range(2000))
    return replace(next(job for job in jobs if wanted(job)), lost=(), cut=())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mesh_of_a_simulated_job_is_found_with_or_without_names(
    layout: str, tmp_path: Path
) -> None:
    wanted, axes = LAYOUTS[layout]
    played = simulate(job_of(wanted))
    named = trace(played, RANK)
    bare = re.sub(rb'("Process Group Description"): "[^"]*"', rb'\1: "undefined"', named)
    result = []
    for number, data in enumerate((named, bare)):
        path = tmp_path / f"{number}.json"
        path.write_bytes(data)
        a = Analysis(read_trace(path))
        mesh = {axis.axis: axis for axis in report_mesh(a)}
        result.append(mesh)
        assert sum(axis.ns for axis in mesh.values()) == pytest.approx(
            a.collectives["dur"].sum() / a.step_count
        )
        assert all(RANK in axis.ranks for axis in mesh.values())
    assert not any(axis.named for axis in result[1].values())
    for mesh in result:
        found_axes = {
            "expert" if name == "all-to-all" else name: (next(iter(axis.collectives)), axis.size)
            for name, axis in mesh.items()
        }
        assert found_axes == axes


def test_axes_have_wait_and_transfer_and_the_pipeline_a_bubble(tmp_path: Path) -> None:
    """A simulated job of two nodes: the wait is until the last member arrives, on the true
    clock; the pipeline's bubble is (p - 1) / (m + p - 1)."""
    wanted, _ = LAYOUTS["tensor, pipeline and data"]
    played = simulate(job_of(wanted))
    job, talks = played.job, played.talks
    write(played, tmp_path)
    report = advisor.analyze(tmp_path, Options(rank=None, node_bandwidth=25.0))
    mesh = {axis.axis: axis for axis in report.mesh}
    own_rank = report.scope.rank
    key = [talks[name] for name in ("row", "sequence", "step", "stream")]
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, each in enumerate(zip(*(column.tolist() for column in key), strict=True)):
        groups.setdefault(each, []).append(index)
    names = {"tensor": "tp", "data": "dp"}
    for axis, name in names.items():
        waits = []
        for members in groups.values():
            calls = played.calls[talks["spec"][members[0]]]
            own_rows = [m for m in members if talks["rank"][m] == own_rank]
            if calls.groups == name and own_rows:
                waits.append(talks["start"][members].max() - talks["start"][own_rows[0]])
        waited = sum(waits) / job.steps
        assert mesh[axis].waiting_ns == pytest.approx(waited, rel=0.1, abs=60_000), axis
    rate = job.rate["tp"] * 2 * (job.tp - 1) / job.tp
    assert 0.6 * rate < (mesh["tensor"].bus_gb_per_s or 0) <= rate
    assert (mesh["tensor"].link, mesh["tensor"].link_name) == ("node", "NVLink 3")
    assert (mesh["pipeline"].link, mesh["pipeline"].link_gb_per_s) == ("network", 25.0)
    assert mesh["pipeline"].micro_batches == job.micro_batches
    assert mesh["pipeline"].bubble == pytest.approx((job.pp - 1) / (job.micro_batches + job.pp - 1))
    step = sum(share.ns for share in report.time)
    assert mesh["pipeline"].idle_ns == pytest.approx((mesh["pipeline"].bubble or 0) * step, rel=0.3)
    one = Options(read=ReadOptions(ranks=str(own_rank)))
    axes_of_rank = {axis.axis: axis for axis in advisor.analyze(tmp_path, one).mesh}
    assert axes_of_rank["tensor"].waiting_ns is None


@pytest.mark.parametrize(
    ("ranks", "machine", "crosses"),
    [
        ([0, 8], NodeLinks(), None), ([0, 8], NodeLinks(8), True), ([0, 7], NodeLinks(8), False),
        ([0, 1], NodeLinks(hosts={0: "a", 1: "b"}), True),
        ([0, 1], NodeLinks(8, hosts={0: "a", 1: "a"}), False),
    ],
)  # fmt: skip
def test_group_crosses_nodes_by_hosts_or_node_size(
    ranks: list[int], machine: NodeLinks, crosses: bool | None
) -> None:
    link = find_link(step_of(("forward", "allreduce", 4)).analysis(), ranks, 2, machine)
    assert (None if link is None else link.crosses) is crosses


@pytest.mark.parametrize(
    ("description", "axis"),
    [
        ("mesh_tp", "tensor"), ("tp:0", "tensor"), ("TENSOR_MODEL_PARALLEL_GROUP", "tensor"),
        ("dp_shard_cp", "sharded data"), ("mesh_dp_replicate", "data"), ("fsdp", "sharded data"),
        ("DATA_PARALLEL_GROUP_WITH_CP", "data"), ("EXPERT_DATA_PARALLEL_GROUP", "data"),
        ("EXPERT_MODEL_PARALLEL_GROUP", "expert"), ("PIPELINE_MODEL_PARALLEL_GROUP", "pipeline"),
        ("mesh_pp", "pipeline"), ("CONTEXT_PARALLEL_GROUP", "context"), ("ep", "expert"),
        ("default_pg", None), ("undefined", None), (None, None), ("TENSOR_AND_DATA", None),
    ],
)  # fmt: skip
def test_group_description_names_at_most_one_axis(
    description: str | None, axis: str | None
) -> None:
    assert read_description(description) == axis


def step_of(*parts: tuple[str, str, int]) -> TraceBuilder:
    """Two steps: ``(pass, collective, MiB)``, each beside a product."""
    b = TraceBuilder()
    for _ in range(2):
        with b.step():
            for place, kind, size in parts:
                if place == "backward":
                    with b.op("autograd::engine::evaluate_function: MmBackward0"):
                        b.run("aten::mm", "gemm", 50, [[64, 64], [64, 64]])
                        b.collective(kind, size * MIB, 100)
                else:
                    b.run("aten::mm", "gemm", 50, [[64, 64], [64, 64]])
                    b.collective(kind, size * MIB, 100)
            b.sync()
    return b


@pytest.mark.parametrize(
    ("parts", "axes"),
    [
        ([("forward", "allreduce", 8), ("backward", "allreduce", 8)], ["tensor"]),
        ([("forward", "mm", 0), ("backward", "allreduce", 8), ("after", "allreduce", 8)], ["data"]),
        (
            [("forward", "_allgather_base", 8), ("backward", "_allgather_base", 8)],
            ["sharded data"],
        ),
        (
            [
                ("forward", "_allgather_base", 8),
                ("forward", "_reduce_scatter_base", 8),
                ("backward", "_allgather_base", 8),
                ("backward", "_reduce_scatter_base", 8),
            ],
            ["tensor"],
        ),
        ([("forward", "_allgather_base", 8), ("backward", "_reduce_scatter_base", 8)],
         ["sharded data"]),
        ([("forward", "all_to_all", 8), ("backward", "all_to_all", 8)], ["all-to-all"]),
        ([("forward", "broadcast", 8)], ["unknown"]),
    ],
)  # fmt: skip
def test_the_traffic_tells_the_axis(parts: list[tuple[str, str, int]], axes: list[str]) -> None:
    parts = [part for part in parts if part[1] != "mm"]
    if parts[-1][0] == "after":
        parts.insert(0, ("backward", "allreduce", 8))
    assert [axis.axis for axis in report_mesh(step_of(*parts).analysis())] == axes


def test_training_without_recorded_backward_has_no_known_axis() -> None:
    b = TraceBuilder()
    with b.step():
        b.run("aten::mm", "gemm", 50, [[64, 64], [64, 64]])
        b.collective("allreduce", 8 * MIB, 100)
        b.run("Optimizer.step#SGD.step", "multi_tensor_apply", 50)
        b.sync()
    assert [axis.axis for axis in report_mesh(b.analysis())] == ["unknown"]


def test_figures_by_hand() -> None:
    """Two steps of two all-reduces of 8 MiB, 100 µs each, on eight ranks, nothing beside them."""
    (axis,) = report_mesh(
        step_of(("forward", "allreduce", 8), ("backward", "allreduce", 8)).analysis()
    )
    assert (axis.calls, axis.bytes, axis.size) == (2.0, 16 * MIB, 8)
    assert axis.ranks == list(range(8)) and axis.collectives == {"all_reduce": 4}
    assert axis.ns == pytest.approx(200_000, rel=0.01)
    assert axis.bus_gb_per_s == pytest.approx(8 * MIB * 2 * 7 / 8 / 100e3, rel=0.01)


def test_tensor_parallel_collectives_get_no_bucket_advice(tmp_path: Path) -> None:
    b = step_of(*[("forward", "allreduce", 64), ("backward", "allreduce", 64)] * 3)
    report = advisor.analyze(b.write(tmp_path / "t.json"))
    match = next(each for each in report.findings if each.rule == "exposed-communication")
    assert "tensor-parallel" in match.fix and "bucket" not in match.fix + match.code
    assert any("(tensor)" in str(each.value) for each in match.evidence)
