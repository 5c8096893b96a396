"""Public real traces: every row is there, every join is the one a plain reading finds."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from advisor.core.errors import AdvisorError
from advisor.core.trace import Trace
from advisor.read import ReadOptions, read_trace
from advisor.read.registry import read_bytes

HOST = {
    "cpu_op": "op",
    "operator": "op",
    "user_annotation": "annotation",
    "cuda_driver": "runtime",
    "python_function": "python",
    "cuda_runtime": "runtime",
    "runtime": "runtime",
    "overhead": "overhead",
}
DEVICE = {
    "kernel": "kernel",
    "gpu_memcpy": "memcpy",
    "memcpy": "memcpy",
    "gpu_memset": "memset",
    "memset": "memset",
}
NO_LAUNCH = ("synchronize", "eventrecord", "eventquery", "streamwaitevent", "streamquery")
Find = Callable[[str], str]


def read_json_events(path: str) -> list[dict[str, Any]]:
    """Read the events with the json module."""
    document = json.loads(gzip.decompress(Path(path).read_bytes()))
    result: list[dict[str, Any]] = (
        document if isinstance(document, list) else document["traceEvents"]
    )
    return result


def events_of_kind(
    events: list[dict[str, Any]], categories: dict[str, str]
) -> list[dict[str, Any]]:
    return [
        {**event, "kind": categories[str(event.get("cat")).lower()]}
        for event in events
        if event["ph"] == "X" and str(event.get("cat")).lower() in categories
    ]


@pytest.fixture(scope="module")
def trace_and_events(public_trace: str) -> tuple[Trace, list[dict[str, Any]]]:
    return read_trace(public_trace), read_json_events(public_trace)


def test_every_event_is_in_its_table(trace_and_events: tuple[Trace, list[dict[str, Any]]]) -> None:
    trace, events = trace_and_events
    assert trace.meta.events_read == len(events)
    assert trace.meta.events_dropped == {}
    assert not trace.meta.truncated
    for frame, categories in ((trace.cpu, HOST), (trace.gpu, DEVICE)):
        expected = Counter((e["kind"], e["name"]) for e in events_of_kind(events, categories))
        assert Counter(zip(frame["kind"], frame["name"].cast(pl.String), strict=True)) == expected
    categories = Counter(str(event.get("cat")) for event in events if event["ph"] == "X")
    assert trace.sync.height == categories["cuda_sync"]
    counters = [e for e in events if e.get("cat") == "cuda_profiler_range"]
    assert trace.counters.height == sum(len(e["args"]) for e in counters)
    memory = [e for e in events if e["name"] == "[memory]"]
    assert trace.memory.height == len(memory)
    assert trace.memory["bytes"].sum() == sum(e["args"]["Bytes"] for e in memory)


def test_times_are_the_files(trace_and_events: tuple[Trace, list[dict[str, Any]]]) -> None:
    """Exact to the nanosecond: starts of everything, and durations of device work."""
    trace, events = trace_and_events
    others = [e for e in events if e.get("cat") in ("cuda_sync", "cuda_profiler_range")]
    timed = [
        *events_of_kind(events, HOST | DEVICE),
        *others,
        *(e for e in events if e["name"] == "[memory]"),
    ]
    origin = min(e["ts"] for e in timed)
    for frame, categories in ((trace.cpu, HOST), (trace.gpu, DEVICE)):
        expected = sorted(
            round((e["ts"] - origin) * 1000) for e in events_of_kind(events, categories)
        )
        assert frame["ts"].sort().to_list() == expected
    expected = sorted(round(e["dur"] * 1000) for e in events_of_kind(events, DEVICE))
    assert trace.gpu["dur"].sort().to_list() == expected
    assert trace.meta.clock == "unix"


def test_launches_and_operators_match_a_plain_reading(
    trace_and_events: tuple[Trace, list[dict[str, Any]]],
) -> None:
    trace, events = trace_and_events
    calls = {
        e["args"]["correlation"]: e
        for e in events_of_kind(events, HOST)
        if e["kind"] == "runtime" and not any(w in e["name"].lower() for w in NO_LAUNCH)
    }
    device = sorted(
        events_of_kind(events, DEVICE), key=lambda e: (e["args"]["correlation"], e["ts"], e["name"])
    )
    rows = trace.gpu.with_columns(pl.col("name").cast(pl.String)).sort("correlation", "ts", "name")
    correlations = trace.cpu["correlation"].gather(rows["launch"]).to_list()
    expected = [
        e["args"]["correlation"] if e["args"]["correlation"] in calls else None for e in device
    ]
    assert correlations == expected
    assert rows["stream"].to_list() == [e["args"]["stream"] for e in device]
    assert rows["device"].to_list() == [e["args"]["device"] for e in device]
    grids = [e["args"].get("grid") for e in device]
    assert rows["blocks"].to_list() == [g and g[0] * g[1] * g[2] for g in grids]
    assert rows["bytes"].to_list() == [e["args"].get("bytes") for e in device]
    occupancy = [e["args"].get("est. achieved occupancy %") for e in device]
    assert rows["occupancy"].to_list() == occupancy


def test_parents_hold_their_children(trace_and_events: tuple[Trace, list[dict[str, Any]]]) -> None:
    trace, _ = trace_and_events
    cpu = trace.cpu.with_row_index("row").with_columns(end=pl.col("ts") + pl.col("dur"))
    inner = cpu.filter(pl.col("parent").is_not_null())
    outer = cpu.select("ts", "end", "dur", "thread", "depth", "kind")[inner["parent"].to_numpy()]
    assert (inner["thread"] == outer["thread"]).all()
    assert (inner["depth"] == outer["depth"] + 1).all()
    assert (inner["ts"] >= outer["ts"]).all()
    assert (inner["parent"] < inner["row"]).all()
    zero = outer["dur"] == 0  # counts as one nanosecond long
    ranges = inner["kind"] == "annotation"  # keep their length
    assert ((inner["end"] <= outer["end"]) | zero | ranges).all()
    assert (
        cpu.filter(pl.col("parent").is_null())["depth"].to_list().count(0)
        == cpu["parent"].null_count()
    )


def test_ops_around_launches_are_the_innermost(
    trace_and_events: tuple[Trace, list[dict[str, Any]]],
) -> None:
    trace, _ = trace_and_events
    cpu = trace.cpu
    kind, parent = cpu["kind"].to_list(), cpu["parent"].to_list()
    external = {}
    for row, (k, e) in enumerate(zip(kind, cpu["external"], strict=True)):
        if k == "op" and e is not None:
            external.setdefault(e, row)
    for launch, op, identity in trace.gpu.select("launch", "op", "external").iter_rows():
        row = launch
        while row is not None and kind[row] != "op":
            row = parent[row]
        assert op == (row if row is not None else external.get(identity))


LARGE = 1 << 20
"""Bytes of a packed file from which its pieces are larger."""


def test_exact_and_small_pieces_and_processes_change_nothing(public_trace: str) -> None:
    path = public_trace
    in_one_piece = read_trace(path)
    times = 50 if Path(path).stat().st_size > LARGE else 1
    for options in (
        ReadOptions(piece_bytes=20_000 * times),
        ReadOptions(piece_bytes=100_000 * times, parallel_from=0, processes=2),
    ):
        trace = read_trace(path, options)
        for frame in ("cpu", "gpu"):
            assert_frame_equal(
                getattr(in_one_piece, frame).drop("comm", "inputs", strict=False),
                getattr(trace, frame).drop("comm", "inputs", strict=False),
                categorical_as_str=True,
            )
        for frame in ("sync", "memory", "counters", "threads"):
            assert_frame_equal(
                getattr(in_one_piece, frame), getattr(trace, frame), categorical_as_str=True
            )


# -- figures published or counted by hand -------------------------------------------------------


def test_a100(shared_trace: Find) -> None:
    """109k events, 6 ProfilerSteps, 150 pinned HtoD copies and 60 pageable DtoH copies."""
    trace = read_trace(shared_trace("a100_train_6steps"))
    assert trace.meta.events_read == 109_123
    assert (trace.meta.rank, trace.meta.world_size, trace.meta.vendor) == (3, 8, "nvidia")
    steps = trace.cpu.filter(pl.col("name").cast(pl.String).str.starts_with("ProfilerStep"))
    assert steps.height == 6
    copies = trace.gpu.filter(pl.col("kind") == "memcpy").with_columns(
        pl.col("src", "dst").cast(pl.String)
    )
    assert copies.filter(copy="HtoD", src="Pinned").height == 150
    assert copies.filter(copy="HtoD", src="Pageable").height == 0
    assert copies.filter(copy="DtoH", dst="Pageable").height == 60
    assert trace.gpu["launch"].null_count() == 0


def test_v100(shared_trace: Find) -> None:
    """4,856 copies and CUDA graphs; work launched before the window is kept and marked."""
    trace = read_trace(shared_trace("v100_train_copy_heavy"))
    assert (trace.gpu["kind"] == "memcpy").sum() == 4856
    assert (trace.cpu["call"] == "graph_launch").sum() == 12
    assert trace.gpu["launch"].null_count() > 0
    per_launch = trace.gpu.group_by("launch").len()
    graphs = trace.cpu.with_row_index("launch").filter(pl.col("call") == "graph_launch")
    graphs = graphs.with_columns(pl.col("launch").cast(pl.Int32)).join(per_launch, on="launch")
    assert graphs["len"].max() > 10


def test_stacks_and_memory(shared_trace: Find) -> None:
    trace = read_trace(shared_trace("h100_bert_small_inference"))
    assert trace.meta.with_stack is trace.meta.profile_memory is trace.meta.record_shapes is True
    assert trace.memory.height == 236
    assert (trace.gpu["kind"] == "kernel").sum() == 60


def test_calls_that_caused_device_work_are_launches(
    trace_and_events: tuple[Trace, list[dict[str, Any]]],
) -> None:
    """Whatever a device row's launch is called, its class says that it launches."""
    trace, _ = trace_and_events
    call = trace.cpu["call"].gather(trace.gpu["launch"].drop_nulls())
    assert set(call) <= {"launch", "graph_launch", "memcpy", "memcpy_blocking", "memset"}


def test_amd_names(shared_trace: Find) -> None:
    for name in ("mi250_train", "mi300_torch_compile", "mi210_gpu_only"):
        trace = read_trace(shared_trace(name))
        assert trace.meta.vendor == "amd"
        assert (trace.cpu["call"] == "launch").sum() > 0


def test_the_old_capitalised_spelling(shared_trace: Find) -> None:
    trace = read_trace(shared_trace("old_capitalised_categories"))
    assert set(trace.cpu["kind"]) == {"runtime"}
    assert (trace.gpu["kind"] == "kernel").sum() == 4
    assert trace.gpu["launch"].null_count() == 0


def test_triton_through_the_driver(shared_trace: Find) -> None:
    trace = read_trace(shared_trace("triton_example"))
    launch = trace.gpu["launch"].to_list()
    assert len(launch) == 1
    assert trace.cpu["call"][launch[0]] == "launch"


@pytest.mark.parametrize("name", ["event_sync", "triton_example", "old_capitalised_categories"])
def test_a_real_trace_cut_anywhere_keeps_the_whole_events(name: str, shared_trace: Find) -> None:
    text = gzip.decompress(Path(shared_trace(name)).read_bytes())
    events = json.loads(text)["traceEvents"]
    decoder, shown = json.JSONDecoder(), text.decode()
    at = shown.index("[", shown.index('"traceEvents"')) + 1
    ends = []
    for _ in events:
        while shown[at] in " \n,":
            at += 1
        _, at = decoder.raw_decode(shown, at)
        ends.append(at)
    for cut in range(ends[5], len(text), 131):
        try:
            trace = read_bytes(text[:cut])
        except AdvisorError:
            assert cut < ends[-1]  # only what cannot be used came before the cut
            continue
        assert trace.meta.events_read == sum(end <= cut for end in ends)
        assert trace.meta.truncated
