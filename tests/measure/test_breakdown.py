"""The breakdown of device time against a brute-force sweep over the raw events of a file."""

from __future__ import annotations

import gzip
import json
import re

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.measure import Analysis
from advisor.measure.device.families import CLASSES
from advisor.read import read_trace
from advisor.testing import TraceBuilder

ORDER = ("compute", "communication", "copies", "memset")


def sweep(works: list[tuple[float, float, str]], spans: list[tuple[float, float]]) -> dict:
    """Walk over all starts and ends in order of time; between two of them the first active class
    of ORDER gets the time, or ``idle``; outside ``spans`` nobody does."""
    edges: list[tuple[float, int, str]] = []
    for start, end, what in works:
        edges += [(start, 1, what), (end, -1, what)]
    for start, end in spans:
        edges += [(start, 1, "span"), (end, -1, "span")]
    active = dict.fromkeys((*ORDER, "span"), 0)
    total = dict.fromkeys((*ORDER, "idle", "busy"), 0.0)
    before = 0.0
    for time, change, what in sorted(edges):
        if active["span"]:
            winner = next((name for name in ORDER if active[name]), "idle")
            total[winner] += time - before
            total["busy"] += (time - before) * (winner != "idle")
        active[what] += change
        before = time
    return total


def raw_work(path: str, device: int) -> list[tuple[float, float, str]]:
    """Device events of a file as it is written, without our reader; microseconds."""
    with gzip.open(path) as file:
        events = json.load(file)
    events = events["traceEvents"] if isinstance(events, dict) else events
    kinds = {
        "kernel": "compute",
        "gpu_memcpy": "copies",
        "gpu_memset": "memset",
        "memcpy": "copies",
        "memset": "memset",
    }
    work = []
    for event in events:
        what = kinds.get(str(event.get("cat", "")).lower())
        if event.get("ph") != "X" or what is None:
            continue
        if int(event["args"].get("device", 0)) != device:
            continue
        if re.search(r"(?i)nccl|multimem_", event["name"]):
            what = "communication"
        start = float(event["ts"])
        work.append((start, start + float(event["dur"]), what))
    return work


@pytest.mark.parametrize(
    "name",
    [
        "a100_train_6steps",
        "v100_train_copy_heavy",
        "two_ranks_rank0",
        "two_ranks_rank1",
        "nccl_collectives",
        "b200_eager",
        "h100_bert_small_inference",
        "alexnet",
        "mi250_train",
        "mi210_gpu_only",
        "mi300_torch_compile",
        "event_sync_multi_stream",
    ],
)
def test_classes_of_a_real_trace_equal_a_sweep_over_its_raw_events(name, shared_trace):
    path = shared_trace(name)
    a = Analysis(read_trace(path))
    origin = raw_origin(path)
    spans = [
        (origin + s / 1e3, origin + e / 1e3)
        for s, e in zip(a.spans.start.tolist(), a.spans.end.tolist(), strict=True)
    ]
    expected = sweep(raw_work(path, a.device_id), spans)
    parts = a.breakdown
    window = a.span_ns / 1e3
    for what in (*ORDER, "idle", "busy"):
        measured = getattr(parts, what).total / 1e3
        # 0.1%, and what rounding to whole nanoseconds can move in a window
        tolerance = max(1e-3 * expected[what], 1e-6 * window)
        assert abs(measured - expected[what]) <= tolerance, what
    assert sum(parts.totals().values()) == a.span_ns


def raw_origin(path: str) -> float:
    """Smallest start of all timed events, microseconds."""
    with gzip.open(path) as file:
        events = json.load(file)
    events = events["traceEvents"] if isinstance(events, dict) else events
    taken = {
        "kernel",
        "gpu_memcpy",
        "gpu_memset",
        "memcpy",
        "memset",
        "cpu_op",
        "operator",
        "user_annotation",
        "python_function",
        "cuda_runtime",
        "cuda_driver",
        "runtime",
        "cuda_sync",
        "cpu_instant_event",
        "overhead",
        "cuda_profiler_range",
    }
    return min(
        float(e["ts"]) for e in events if str(e.get("cat", "")).lower() in taken and "ts" in e
    )


def test_a100_job_has_known_exposed_nccl_and_busy_share(shared_trace):
    # published by the trace's own project for these six steps, and by hand from the file
    a = Analysis(read_trace(shared_trace("a100_train_6steps")))
    assert a.breakdown.communication.total / 1e6 == pytest.approx(87.9, rel=1e-3)
    assert a.breakdown.busy.total / a.span_ns == pytest.approx(0.84, abs=0.005)


def test_rank_0_of_the_pair_exposes_337_ms_of_nccl(shared_trace):
    a = Analysis(read_trace(shared_trace("two_ranks_rank0")))
    assert a.breakdown.communication.total / 1e6 == pytest.approx(337, rel=1e-3)


work = st.lists(
    st.tuples(
        st.sampled_from(["kernel", "comm", "copy", "memset"]),
        st.integers(0, 60),  # start, us after the first
        st.integers(1, 20),  # duration, us
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(work, st.integers(1, 80))
def test_each_instant_counts_once_for_its_first_class(items, length):
    b = TraceBuilder()
    with b.step():
        b.host(length)
    names = {
        "kernel": "gemm",
        "comm": "ncclDevKernel_AllReduce",
        "copy": "Memcpy HtoD",
        "memset": "Memset (Device)",
    }
    classes = {"kernel": "compute", "comm": "communication", "copy": "copies", "memset": "memset"}
    for number, (kind, start, dur) in enumerate(items):
        cat = {"copy": "gpu_memcpy", "memset": "gpu_memset"}.get(kind, "kernel")
        b.events.append(
            {
                "ph": "X",
                "cat": cat,
                "name": names[kind],
                "pid": 0,
                "tid": number,
                "ts": 1000 + start,
                "dur": dur,
                "args": {"device": 0, "stream": number, "correlation": 0},
            }
        )
    a = b.analysis()
    spans = [(s, e) for s, e in zip(a.spans.start.tolist(), a.spans.end.tolist(), strict=True)]
    expected = sweep([(s * 1e3, (s + d) * 1e3, classes[kind]) for kind, s, d in items], spans)
    assert {name: getattr(a.breakdown, name).total for name in (*ORDER, "idle", "busy")} == expected


def test_classes_by_hand():
    b = TraceBuilder(launch_us=5, latency_us=3)
    with b.step():
        b.launch("gemm", 100)  # launched at 5, runs 8 .. 108
        b.launch("ncclDevKernel_AllReduce", 200, stream=20)  # 13 .. 213
        b.copy("HtoD", 1000, 300, stream=21, op=None)  # 18 .. 318
        b.memset(100, 20, stream=22)  # 23 .. 43
        b.host(480)  # the step ends at 500
    parts = b.analysis().breakdown
    # idle: 0 .. 8 and 318 .. 500
    assert parts.totals() == {
        "compute": 100_000,
        "communication": 105_000,
        "copies": 105_000,
        "memset": 0,
        "idle": 190_000,
    }
    assert parts.all_communication.total == 200_000
    assert parts.communication_overlap == pytest.approx(95 / 200)


def test_steps_share_out_the_totals():
    b = TraceBuilder()
    for size in (100, 300, 200, 150):
        with b.step():
            b.launch("gemm", size)
            b.sync()
            b.host(50)
    a = b.analysis()
    table = a.breakdown.per_step
    assert table["step"].to_list() == a.steps.used["index"].to_list()
    for name in CLASSES:
        assert table[name].sum() == a.breakdown.totals()[name]
    sums = table.select(pl.sum_horizontal(CLASSES)).to_series()
    assert sums.to_list() == a.steps.used["dur"].to_list()


def test_trace_without_device_work_has_no_idle_time():
    b = TraceBuilder(gpu=None)
    with b.step(), b.op("aten::mm"):
        b.host(100)
    parts = b.analysis().breakdown
    assert parts.idle.total == 0
    assert parts.per_step["idle"].to_list() == [None]
    assert parts.communication_overlap is None


def test_only_the_analyzed_device_counts():
    b = TraceBuilder()
    with b.step():
        b.launch("gemm", 100)
        b.host(500)
    b.events.append(
        {
            "ph": "X",
            "cat": "kernel",
            "name": "gemm",
            "pid": 1,
            "tid": 7,
            "ts": 1200,
            "dur": 50,
            "args": {"device": 1, "stream": 7, "correlation": 0},
        }
    )
    a = b.analysis()
    assert a.device_id == 0
    assert a.breakdown.busy.total == 100_000
