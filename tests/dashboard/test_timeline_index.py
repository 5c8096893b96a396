"""Timeline index, its tracks and counters, compared with arithmetic by hand and plain loops."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.core.run_directory import GpuSample, RankInfo, RankRecord, Sample
from advisor.dashboard.timeline.counters import CounterSeries, counter_series, sample_counter
from advisor.dashboard.timeline.detail_levels import ALL_CATEGORIES
from advisor.dashboard.timeline.details import describe_slice
from advisor.dashboard.timeline.index import assign_tracks
from advisor.dashboard.timeline.index_builder import build_index
from advisor.dashboard.timeline.queries import (
    find_longest_slices,
    find_next_match,
    find_slice_starting,
    measure_range,
    search,
)
from advisor.measure import Analysis
from advisor.read import read_trace
from advisor.testing import TraceBuilder


def training_loop(steps: int = 3) -> TraceBuilder:
    b = TraceBuilder(gpu="A100", rank=0)
    for _ in range(steps):
        with b.step():
            b.loader_wait(500)
            with b.op("aten::copy_", [[64, 3, 8, 8]]):
                b.copy("HtoD", 1 << 20)
            for _ in range(5):
                with b.op("aten::mm", [[64, 64], [64, 64]], "float"):
                    b.launch("ampere_sgemm_64x64", 40, blocks=16)
    return b


@pytest.fixture(scope="module")
def small() -> Analysis:
    return Analysis(training_loop().trace())


def test_every_event_is_drawn_once_in_its_thread_or_stream(small):
    index = build_index(small)
    trace = small.trace
    assert (index.slice_of_row["gpu"] >= 0).all()
    assert (index.slice_of_row["cpu"] >= 0).all()
    for name, frame in (("gpu", trace.gpu), ("cpu", trace.cpu)):
        at = index.slice_of_row[name]
        assert (index.start[at] == frame["ts"].to_numpy()).all()
        assert (index.end[at] == (frame["ts"] + frame["dur"]).to_numpy()).all()
        assert [index.names[i] for i in index.name[at]] == frame["name"].cast(str).to_list()


@pytest.mark.parametrize(
    "name",
    [
        "a100_train_6steps",
        "h100_bert_small_inference",
        "no_gpu_rank",
        "mi210_gpu_only",
        "event_sync_multi_stream",
        "cupti_counters",
        "nccl_collectives",
        "simple_add",
    ],
)
def test_lanes_of_real_traces_are_in_order_and_do_not_overlap(shared_trace, name):
    a = Analysis(read_trace(shared_trace(name)))
    index = build_index(a)
    assert len(index.lanes) == sum(group.count for group in index.groups)
    for lane in index.lanes:
        start, end = (
            index.start[lane.first_slice : lane.end_slice],
            index.end[lane.first_slice : lane.end_slice],
        )
        assert lane.end_slice > lane.first_slice
        assert (end >= start).all()
        assert (start[1:] >= end[:-1]).all()
    assert (index.slice_of_row["gpu"] >= 0).all()
    shown = index.slice_of_row["cpu"] >= 0
    assert shown.sum() == a.trace.cpu.height
    total = a.gaps["dur"].sum()
    idle = [lane for lane in index.lanes if lane.source == "gaps"]
    assert (
        sum(int((index.end - index.start)[g.first_slice : g.end_slice].sum()) for g in idle)
        == total
    )


def test_missing_data_is_noted():
    b = TraceBuilder(gpu=None)
    with b.step(), b.op("aten::mm", [[2, 2], [2, 2]]):
        pass
    index = build_index(Analysis(b.trace()))
    assert any("no GPU work" in note for note in index.notes)
    assert not any(g.kind in ("stream", "idle", "copies") for g in index.groups)


def test_an_empty_trace_has_an_index_without_lanes(small):
    trace = replace(small.trace, cpu=small.trace.cpu.clear(), gpu=small.trace.gpu.clear())
    index = build_index(Analysis(trace))
    assert len(index) == 0
    assert index.lanes == ()
    assert index.last_ns > index.first_ns


# -- tracks -----------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 25)), max_size=40))
def test_tracks_are_minimal_and_without_overlap(pairs):
    pairs.sort(key=lambda p: p[0])
    start = np.array([p[0] for p in pairs], dtype=np.int64)
    end = start + np.array([p[1] for p in pairs], dtype=np.int64)
    track = assign_tracks(start, end, max_tracks=100)
    deepest = 0
    for i in range(len(pairs)):
        for j in range(i):
            if track[i] == track[j]:
                assert start[i] >= end[j]
        deepest = max(deepest, sum(1 for j in range(i) if end[j] > start[i]) + 1)
    assert (track.max(initial=-1) + 1) <= deepest


def test_slices_beyond_the_last_track_share_it():
    start = np.arange(30, dtype=np.int64)
    assert assign_tracks(start, start + 1000, max_tracks=4).max() == 3


# -- counters ---------------------------------------------------------------------------------


def test_a_pixel_has_the_smallest_and_largest_value_from_the_first_sample_on():
    counter = CounterSeries(
        "c", "c", "%", np.array([10, 20, 21, 22]), np.array([5.0, 7, 1, 3]), None
    )
    low, high = sample_counter(counter, 0, 40, 8)
    assert np.isnan(low[:2]).all()
    # pixels of 5 ns: [10,15) has 5, [15,20) holds it, [20,25) began with 5 and saw 7, 1, 3
    assert low[2:].tolist() == [5, 5, 1, 3, 3, 3]
    assert high[2:].tolist() == [5, 5, 7, 3, 3, 3]


def test_a_sample_is_shown_for_a_limited_time():
    counter = CounterSeries("c", "c", "%", np.array([0, 100]), np.array([50.0, 60]), 30)
    low, _ = sample_counter(counter, 0, 200, 20)
    assert low[:4].tolist() == [50, 50, 50, 50]
    assert np.isnan(low[4:10]).all()
    assert low[10:14].tolist() == [60, 60, 60, 60]
    assert np.isnan(low[14:]).all()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 9)), max_size=30),
    st.integers(-50, 200),
    st.integers(16, 200),
    st.integers(1, 40),
)
def test_counters_equal_a_check_of_every_instant(samples, x0, span, px):
    samples.sort(key=lambda s: s[0])
    ts = np.array([s[0] for s in samples], dtype=np.int64)
    counter = CounterSeries("c", "c", "", ts, np.array([float(s[1]) for s in samples]), None)
    low, high = sample_counter(counter, x0, x0 + span, px)
    cut = [x0 + -(-i * span // px) for i in range(px + 1)]
    for i in range(px):
        inside = [v for t, v in samples if cut[i] <= t < cut[i + 1]]
        before = [v for t, v in samples if t < cut[i]]
        values = inside + before[-1:]
        if values:
            assert (low[i], high[i]) == (min(values), max(values))
        else:
            assert np.isnan(low[i])


def test_recorder_samples_are_converted_to_the_trace_clock(small):
    start = small.trace.meta.start_ns
    rank = RankInfo(anchor_unix_ns=start + 1_000, anchor_perf_ns=500)
    samples = [
        Sample(t=500 + 100_000 * i, gpus=[GpuSample(power=250_000, utilisation=None)])
        for i in range(3)
    ]
    record = RankRecord(rank=rank, samples=samples)
    result = counter_series(Analysis(small.trace, rank_record=record))
    if small.trace.meta.clock != "unix":
        assert result == ()
        return
    assert [c.label for c in result] == ["GPU 0 · power"]
    assert result[0].ts.tolist() == [1_000, 101_000, 201_000]
    assert result[0].value.tolist() == [250.0, 250.0, 250.0]


# -- search, details, statistics --------------------------------------------------------------


def test_search_steps_through_matches_by_time_and_wraps_around(small):
    index = build_index(small)
    hits = search(index, "sgemm")
    assert len(hits.order) == small.trace.gpu.filter(small.trace.gpu["kind"] == "kernel").height
    seen, at = [], None
    for _ in range(len(hits.order) + 1):
        result = find_next_match(index, hits, at, index.first_ns, is_backward=False)
        at = result["id"]
        seen.append(result["ts"])
    assert seen[:-1] == sorted(small.trace.gpu.filter(small.trace.gpu["kind"] == "kernel")["ts"])
    assert seen[-1] == seen[0]
    assert find_next_match(index, hits, at, index.first_ns, is_backward=True)["ts"] == seen[-2]


def test_a_copy_in_two_lanes_matches_once(small):
    index = build_index(small)
    copies = small.trace.gpu.filter(small.trace.gpu["kind"] == "memcpy").height
    assert len(search(index, "memcpy htod").order) == copies
    assert len(search(index, "memcpy htod").position) == 2 * copies


def test_device_work_has_priority_at_an_instant(small):
    index = build_index(small)
    row = small.trace.gpu.row(3, named=True)
    result = find_slice_starting(index, row["ts"], row["dur"])
    assert result is not None and result["id"] == index.slice_of_row["gpu"][3]
    assert find_slice_starting(index, index.last_ns + 5, None) is None


def test_a_kernel_links_to_its_launch_and_operator(small):
    index = build_index(small)
    gpu, cpu = small.trace.gpu, small.trace.cpu
    row = int(np.flatnonzero((gpu["kind"] == "kernel").to_numpy())[2])
    result = describe_slice(small, index, int(index.slice_of_row["gpu"][row]))
    launch = gpu["launch"][row]
    links = {link["kind"]: link for link in result["links"]}
    assert links["launched by"]["ts"] == cpu["ts"][launch]
    assert links["operator"]["name"] == "aten::mm"
    facts = {label: value for label, value, _ in result["facts"]}
    assert facts["launch to start"] == gpu["ts"][row] - cpu["ts"][launch]
    assert facts["blocks"] == 16
    back = describe_slice(small, index, int(index.slice_of_row["cpu"][launch]))
    assert [x["id"] for x in back["links"] if x["kind"] == "launched"] == [result["id"]]


KINDS = ("called from", "contains")


def test_an_operator_has_the_device_work_of_its_children():
    b = TraceBuilder(gpu="A100", rank=0)
    with b.step(), b.op("aten::linear", [[8, 8]]):
        for name in ("one", "two"):
            with b.op("aten::mm", [[8, 8]]):
                b.launch(name, 30, blocks=4)
    b.launch("three", 30, blocks=4)
    a = Analysis(b.trace())
    index = build_index(a)
    row = a.trace.cpu["name"].cast(str).to_list().index("aten::linear")
    result = describe_slice(a, index, int(index.slice_of_row["cpu"][row]))
    assert [x["name"] for x in result["links"] if x["kind"] == "launched"] == ["one", "two"]
    names = {kind: [x["name"] for x in result["links"] if x["kind"] == kind] for kind in KINDS}
    assert names == {"called from": ["ProfilerStep#0"], "contains": ["aten::mm", "aten::mm"]}
    assert {f[0]: f[1] for f in result["facts"]}["GPU time"] == 60_000


def test_statistics_of_the_whole_trace_equal_the_analysis(small):
    index = build_index(small)
    result = measure_range(small, index, index.first_ns, index.last_ns)
    assert result["device"] == small.breakdown.totals()
    assert result["measured"] == small.span_ns
    kernels = small.trace.gpu
    by_name = {row["name"]: row for row in result["kernels"]["rows"]}
    assert by_name["ampere_sgemm_64x64"]["count"] == 15
    instances = kernels.filter(kernels["name"].cast(str) == "ampere_sgemm_64x64")
    assert by_name["ampere_sgemm_64x64"]["total"] == instances["dur"].sum()
    assert sum(c["ns"] for c in result["idle"]) == small.gaps["dur"].sum()


def test_statistics_of_a_range_only_count_its_part(small):
    index = build_index(small)
    gpu = small.trace.gpu
    row = gpu.filter(gpu["kind"] == "kernel").row(0, named=True)
    half = row["ts"] + row["dur"] // 2
    result = measure_range(small, index, half, half + 16)
    assert result["kernels"]["rows"] == [
        {"name": "ampere_sgemm_64x64", "count": 1, "total": 16, "mean": float(row["dur"])}
    ]
    assert result["device"]["compute"] == 16


def test_the_table_has_the_longest_slices_by_start(small):
    index = build_index(small)
    lanes = list(range(len(index.lanes)))
    result = find_longest_slices(index, lanes, index.first_ns, index.last_ns, 20)
    durations = (index.end - index.start).tolist()
    assert result["total"] == len(index)
    assert sorted(row["dur"] for row in result["rows"]) == sorted(durations)[-20:]
    assert [row["ts"] for row in result["rows"]] == sorted(row["ts"] for row in result["rows"])
    assert all(row["category"] in {c.label for c in ALL_CATEGORIES} for row in result["rows"])


def test_a_run_without_a_window_shows_its_recorded_steps():
    b = TraceBuilder()
    run = b.record_of_run()
    for _ in range(30):
        run.step(10_000, data=4_000)
    a = b.analysis()
    assert a.record_only
    index = build_index(a)
    assert [group.kind for group in index.groups] == ["steps"]
    assert len(index) == 30
    first = a.run_steps.steps[0]
    assert index.start.tolist() == [step.t - first.t for step in a.run_steps.steps]
    facts = {label: value for label, value, _ in describe_slice(a, index, 20)["facts"]}
    assert facts["data (host)"] == first.phases["data"]
    assert any(counter.key == "phase:data" for counter in index.counters)
