"""Simulated jobs: hosts, streams and collectives behave as real ones, and faults as they say."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.simulation.engine import COMPUTE_STREAM, SimulatedRun
from benchmarks.simulation.jobs import FAULTS, HEALTHY, LAYOUTS, Job, draw
from benchmarks.simulation.measured import measured
from benchmarks.simulation.programs import MIN_FAULT_SHARE, play, simulate


def of_layout(layout: str, kind: str = HEALTHY, **given: object) -> Job:
    """The first job of a layout, on true clocks."""
    for seed in range(200):
        job = draw(seed, 16, kind, steps=2)
        if job.layout == layout:
            return replace(job, offset_ns=0.0, drift=0.0, lost=(), cut=(), **given)
    raise AssertionError(layout)


def kernel_time(played: SimulatedRun) -> np.ndarray:
    """ns by rank."""
    table = played.kernels
    return np.bincount(table["rank"], weights=table["end"] - table["start"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_collective_ends_after_every_rank_arrived(layout: str) -> None:
    played = simulate(of_layout(layout))
    talks = played.talks
    met: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for spec, row, sequence, start, end in zip(
        *(talks[c] for c in ("spec", "row", "sequence", "start", "end")), strict=True
    ):
        call = played.calls[spec]
        if call.kind not in ("send", "recv"):
            met.setdefault((row, sequence), []).append((start, end))
    assert met
    for (row, _), times in met.items():
        groups = next(g for g in played.job.groups.values() if g.first <= row < g.first + 500)
        assert len(times) <= 16 and groups.members.shape[1] >= 2
        last_in = max(start for start, _ in times)
        assert min(end for _, end in times) > last_in
        assert max(end for _, end in times) - min(end for _, end in times) < 100_000
    sizes = {groups.members.shape[1] for groups in played.job.groups.values()}
    assert {len(times) for times in met.values()} <= sizes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_streams_run_their_work_in_order_and_after_its_launch(layout: str) -> None:
    played = simulate(of_layout(layout))
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for table in (played.kernels, played.talks):
        assert (table["start"] >= table["called"]).all()
        assert (table["call"] >= table["op"]).all() and (table["called"] <= table["closed"]).all()
        streams = table.get("stream", np.full(len(table["rank"]), COMPUTE_STREAM))
        for rank, stream, start, end in zip(
            table["rank"], streams, table["start"], table["end"], strict=True
        ):
            lanes.setdefault((rank, stream), []).append((start, end))
    for work in lanes.values():
        assert all(first[1] <= second[0] for first, second in pairwise(sorted(work)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_host_events_do_not_overlap(layout: str) -> None:
    played = simulate(of_layout(layout))
    for rank in (0, 15):
        busy = []
        for table in (played.kernels, played.talks, played.reads):
            is_own = table["rank"] == rank
            busy += list(zip(table["op"][is_own], table["closed"][is_own], strict=True))
        assert all(first[1] <= second[0] for first, second in pairwise(sorted(busy)))


def test_throttled_device_slows_kernels_by_its_factor() -> None:
    job = of_layout("ddp", "slow_device")
    assert job.fault is not None
    with_fault, without = kernel_time(simulate(job)), kernel_time(simulate(job.mended()))
    ratio = with_fault / without
    guilty = job.fault.ranks[0]
    assert ratio[guilty] == pytest.approx(job.fault.factor, rel=1e-4)
    assert np.delete(ratio, guilty) == pytest.approx(1.0, rel=1e-6)


def test_late_loader_of_one_rank_delays_all_ranks() -> None:
    job = of_layout("ddp", "slow_input")
    assert job.fault is not None
    one = replace(job.fault, unit="rank", ranks=(3,), wait_ns=20e6)
    late = simulate(replace(job, fault=one)).step_ns - simulate(job.mended()).step_ns
    assert late == pytest.approx(20e6, rel=0.25)


def test_experts_share_a_constant_number_of_tokens() -> None:
    job = of_layout("experts", "expert_imbalance")
    assert job.fault is not None
    played = simulate(job)
    talks = played.talks
    kinds = np.array([call.kind == "all_to_all" for call in played.calls])[talks["spec"]]
    got = talks["out"][kinds & (talks["sequence"] == 1)]
    mean = talks["given"][kinds & (talks["sequence"] == 1)].mean()
    assert got.mean() == pytest.approx(mean, rel=0.1)
    assert got.max() > 1.3 * mean


def test_longer_stage_runs_more_kernels_not_slower_ones() -> None:
    job = of_layout("parallel", "pipeline_imbalance")
    assert job.fault is not None
    ran = np.bincount(simulate(job).kernels["rank"])
    before = np.bincount(simulate(replace(job, fault=None)).kernels["rank"])
    inside = np.isin(np.arange(16), job.fault.ranks)
    assert (ran[inside] > before[inside]).all() and (ran[~inside] == before[~inside]).all()


def test_mended_pipeline_spreads_the_excess_of_one_stage() -> None:
    job = of_layout("parallel", "pipeline_imbalance")
    job = replace(job, noise=0.0, chip=0.0)
    without = kernel_time(simulate(replace(job, fault=None)))
    longer, even = kernel_time(simulate(job)), kernel_time(simulate(job.mended()))
    assert even.sum() == pytest.approx(longer.sum(), rel=1e-6)
    assert (even - without) == pytest.approx((even - without).mean(), rel=1e-3)


def test_slow_link_slows_only_its_groups() -> None:
    job = of_layout("hybrid", "slow_link")
    assert job.fault is not None
    host = replace(job.fault, unit="host", index=1, ranks=tuple(range(8, 16)), factor=3.0)
    lengths = []
    for each in (replace(job, fault=host), job.mended()):
        played = simulate(each)
        talks = played.talks
        shard = np.array([call.groups == "shard" for call in played.calls])[talks["spec"]]
        least = [
            (talks["end"] - talks["start"])[shard & (talks["rank"] // 8 == number)].min()
            for number in (0, 1)
        ]
        lengths.append(least)
    (same, slow), (same_before, before) = lengths
    assert same == pytest.approx(same_before, rel=0.05)
    assert slow > 2 * before


@pytest.mark.parametrize("kind", FAULTS)
def test_fault_costs_its_declared_time(kind: str) -> None:
    played, truth = play(11, 16, kind, steps=3)
    assert truth.kind == kind and truth.step_ns == played.step_ns
    assert truth.gain_ns >= MIN_FAULT_SHARE * truth.step_ns
    mended_step_ns = simulate(played.job.mended()).step_ns
    assert truth.step_ns - truth.gain_ns == pytest.approx(mended_step_ns)


def test_the_same_seed_is_the_same_job() -> None:
    first, second = (play(5, 16, "moving", steps=2)[0] for _ in range(2))
    assert (first.kernels["start"] == second.kernels["start"]).all()
    assert (
        play(6, 16, "moving", steps=2)[0].kernels["start"][:9] != first.kernels["start"][:9]
    ).any()


def test_lost_ranks_are_never_the_faulty_rank() -> None:
    for seed in range(40):
        job = draw(seed, 16)
        assert job.fault is not None
        if len(job.fault.ranks) == 1:
            assert not set(job.fault.ranks) & {*job.lost, *job.cut}
        assert not set(job.lost) & set(job.cut)


def test_the_measurements_name_their_sources() -> None:
    known = measured()
    assert all("MIT" in source for source in known.sources.values())
    assert {"gemm", "attention", "elementwise"} <= known.kernel_ns.keys()
    for values in (*known.kernel_ns.values(), *known.host_ns.values()):
        assert len(values) == len(known.quantiles) and values == sorted(values)


def test_rank_count_not_filling_hosts_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        draw(0, 20)
