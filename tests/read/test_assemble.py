"""Events to a trace: rows cleaned and counted, times in ns, every join made."""

from __future__ import annotations

import json
from typing import Any

import polars as pl
import pytest

from advisor.core import trace as schema
from advisor.core.trace import Trace
from advisor.read.registry import read_bytes

KERNEL_ARGS = {"device": 0, "stream": 7}


def read(*events: Any, **head: Any) -> Trace:
    return read_bytes(json.dumps({**head, "traceEvents": list(events)}).encode())


def event(cat: str, name: str, ts: Any, dur: Any, tid: Any = 1, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 1,
        "tid": tid,
        "ts": ts,
        "dur": dur,
        "args": args,
    }


def op(name: str, ts: Any, dur: Any, external: Any = None, **fields: Any) -> dict[str, Any]:
    args = {} if external is None else {"External id": external}
    return {**event("cpu_op", name, ts, dur, **args), **fields}


def runtime_call(
    ts: Any, correlation: Any, name: str = "cudaLaunchKernel", dur: Any = 1
) -> dict[str, Any]:
    return event("cuda_runtime", name, ts, dur, correlation=correlation)


def kernel(ts: Any, correlation: Any, name: str = "gemm", **args: Any) -> dict[str, Any]:
    return event("kernel", name, ts, 5, 7, **{**KERNEL_ARGS, "correlation": correlation, **args})


def column(frame: pl.DataFrame, name: str) -> list[Any]:
    series = frame[name]
    return series.cast(pl.String).to_list() if series.dtype == pl.Categorical else series.to_list()


def launches(trace: Trace) -> list[tuple[str | None, str | None]]:
    """Name of the launch and of the op of each device row."""
    names = column(trace.cpu, "name")
    return [
        (None if launch is None else names[launch], None if op is None else names[op])
        for launch, op in zip(trace.gpu["launch"], trace.gpu["op"], strict=True)
    ]


SCHEMAS = {
    "cpu": schema.CPU_SCHEMA,
    "gpu": schema.GPU_SCHEMA,
    "sync": schema.SYNC_SCHEMA,
    "memory": schema.MEMORY_SCHEMA,
    "counters": schema.COUNTER_SCHEMA,
    "inputs": schema.INPUTS_SCHEMA,
    "comms": schema.COMMS_SCHEMA,
    "threads": schema.THREADS_SCHEMA,
}


def test_every_frame_has_its_schema_whatever_is_in_it() -> None:
    full = read(
        op("aten::mm", 0, 9, 1),
        runtime_call(1, 5),
        kernel(3, 5),
        event("cuda_sync", "Stream Sync", 4, 2, stream=7, correlation=9, device=0),
        event("cuda_profiler_range", "gemm", 4, 2, cycles=5),
        {
            "ph": "i",
            "cat": "cpu_instant_event",
            "name": "[memory]",
            "pid": 1,
            "tid": 1,
            "ts": 2,
            "args": {"Total Allocated": 5, "Bytes": 5, "Device Type": 1, "Device Id": 0},
        },
    )
    for trace in (full, read(op("a", 0, 1)), read(kernel(0, 1))):
        for name, expected in SCHEMAS.items():
            assert dict(getattr(trace, name).schema) == expected, name
    for name in ("cpu", "gpu", "sync", "memory", "counters", "threads"):
        assert not getattr(full, name).is_empty(), name


# -- launches -----------------------------------------------------------------------------------


def test_kernel_finds_launch_by_correlation_and_its_operator() -> None:
    trace = read(
        op("aten::linear", 0, 100, 1),
        op("aten::addmm", 10, 50, 2),
        runtime_call(20, 77),
        op("aten::add", 70, 20, 3),
        runtime_call(75, 78),
        kernel(200, 78),
        kernel(100, 77),
    )
    assert launches(trace) == [
        ("cudaLaunchKernel", "aten::addmm"),
        ("cudaLaunchKernel", "aten::add"),
    ]
    assert trace.gpu["launch"].to_list() == [2, 4]


def test_the_external_id_is_a_fallback_only() -> None:
    trace = read(
        op("aten::right", 0, 100, 1),
        runtime_call(20, 77),
        kernel(100, 77, **{"External id": 2}),
        op("aten::other", 200, 5, 2),
        kernel(300, 99, **{"External id": 2}),
        kernel(400, 98, **{"External id": 55}),
        kernel(500, 97),
        kernel(600, 96, **{"external id": 1}),
    )
    assert launches(trace) == [
        ("cudaLaunchKernel", "aten::right"),
        (None, "aten::other"),  # launched outside the window: kept, and marked
        (None, None),
        (None, None),
        (None, "aten::right"),
    ]


def test_a_launch_without_an_op_around_it_falls_back_too() -> None:
    trace = read(
        event("python_function", "main.py(1): run", 0, 500),
        runtime_call(20, 7),
        kernel(30, 7),
        runtime_call(40, 8),
        kernel(50, 8, **{"External id": 3}),
        op("aten::mm", 600, 5, 3),
    )
    assert launches(trace) == [("cudaLaunchKernel", None), ("cudaLaunchKernel", "aten::mm")]


def test_ids_may_be_strings() -> None:
    trace = read(
        op("aten::mm", "0", "100.5", "4"), runtime_call("20", "77", dur="2"), kernel("30", "77")
    )
    assert launches(trace) == [("cudaLaunchKernel", "aten::mm")]
    assert trace.cpu["dur"].to_list() == [100_500, 2000]
    assert trace.cpu["external"].to_list() == [4, None]
    assert trace.gpu["correlation"].to_list() == [77]


def test_one_graph_launch_has_many_kernels() -> None:
    trace = read(
        op("aten::graph", 0, 50, 1),
        runtime_call(10, 5, "cudaGraphLaunch"),
        *[kernel(20 + 10 * i, 5, **{"graph id": 3}) for i in range(4)],
    )
    assert launches(trace) == [("cudaGraphLaunch", "aten::graph")] * 4
    assert trace.cpu["call"].to_list() == [None, "graph_launch"]
    assert trace.gpu["graph"].to_list() == [3] * 4


def test_triton_launches_through_the_driver() -> None:
    driver = {**runtime_call(20, 5, "cuLaunchKernel"), "cat": "cuda_driver"}
    trace = read(
        op("triton_poi_fused_add_0", 0, 50, 1), driver, kernel(30, 5, "triton_poi_fused_add_0")
    )
    assert launches(trace) == [("cuLaunchKernel", "triton_poi_fused_add_0")]
    assert trace.cpu["call"].to_list() == [None, "launch"]


def test_a_wait_or_an_event_record_launches_nothing() -> None:
    """Both calls have correlation ids of their own, which ``cuda_sync`` rows refer to."""
    for name in ("cudaEventRecord", "cudaStreamSynchronize", "cudaStreamWaitEvent"):
        assert launches(read(runtime_call(0, 5, name), kernel(10, 5))) == [(None, None)]


def test_call_of_unknown_name_is_classified_by_its_work() -> None:
    trace = read(
        runtime_call(0, 1, "INVALID"),
        kernel(10, 1),
        runtime_call(20, 2, "INVALID"),
        runtime_call(30, 3, "INVALID"),
        event("gpu_memcpy", "Memcpy DtoD", 40, 1, 7, correlation=3),
        runtime_call(50, 4, "cudaNewGraphThing"),
        kernel(60, 4),
        kernel(70, 4),
    )
    assert trace.cpu["call"].to_list() == ["launch", "other", "memcpy", "graph_launch"]


def test_no_correlation_is_not_a_launch() -> None:
    for nothing in (-1, None, "x", 1 << 70):
        trace = read(runtime_call(0, nothing), kernel(10, nothing))
        assert launches(trace) == [(None, None)]
        assert trace.gpu["correlation"].to_list() == [None]


# -- times --------------------------------------------------------------------------------------


def test_microseconds_become_nanoseconds_from_the_start() -> None:
    trace = read(op("a", 1661203462584767, 3), op("b", 1661203462584768, 1))
    assert trace.cpu["ts"].to_list() == [0, 1000]
    assert trace.meta.start_ns == 1661203462584767000
    assert trace.meta.clock == "unix"
    trace = read(op("a", 1365627949868.561, 3.25), op("b", 1365627949869.562, 0.001))
    assert trace.cpu["ts"].to_list() == [0, 1001]
    assert trace.cpu["dur"].to_list() == [3250, 1]


def test_unix_times_with_decimals_keep_their_nanoseconds() -> None:
    text = b",".join(
        b'{"ph":"X","cat":"cpu_op","name":"a","pid":1,"tid":%d,"ts":%s,"dur":0.007}' % (i, ts)
        for i, ts in enumerate(
            [b"1713800000000000.123", b"1713800000000000.130", b"1713800000000001"]
        )
    )
    trace = read_bytes(b"[" + text + b"]")
    assert sorted(trace.cpu["ts"].to_list()) == [0, 7, 877]
    assert trace.meta.start_ns == 1713800000000000123


def test_the_base_time_is_added() -> None:
    base = 1_700_000_000_000_000_123
    trace = read(op("a", 5.5, 1), baseTimeNanoseconds=base)
    assert trace.meta.start_ns == base + 5500
    assert trace.meta.clock == "unix"
    assert read(op("a", 5.5, 1), baseTimeNanoseconds=str(base)).meta.start_ns == base + 5500
    assert read(op("a", 5.5, 1)).meta.clock == "arbitrary"
    assert read(op("a", 5.5, 1), baseTimeNanoseconds=0).meta.clock == "arbitrary"


def test_events_may_come_in_any_order() -> None:
    events = [
        op("a", 0, 100, 1),
        op("b", 10, 50, 2),
        runtime_call(20, 7),
        op("c", 65, 5, 3),
        kernel(90, 7),
    ]
    for turned in (events, events[::-1], events[2:] + events[:2]):
        trace = read(*turned)
        assert column(trace.cpu, "name") == ["a", "b", "cudaLaunchKernel", "c"]
        assert trace.cpu["parent"].to_list() == [None, 0, 1, 0]
        assert trace.cpu["depth"].to_list() == [0, 1, 2, 1]
        assert launches(trace) == [("cudaLaunchKernel", "b")]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"dur": -1}, "negative duration"),
        ({"dur": None}, "no duration"),
        ({"dur": "x"}, "no duration"),
        ({"dur": 1e12}, "absurd duration"),
        ({"dur": 1e300}, "absurd duration"),
        ({"ts": None}, "no start time"),
        ({"ts": "soon"}, "no start time"),
        ({"ts": 0}, "absurd start time"),
        ({"ts": 1e18}, "absurd start time"),
        ({"ts": -1e300}, "absurd start time"),
    ],
)
def test_an_event_without_usable_times_is_dropped_and_counted(
    fields: dict[str, Any], reason: str
) -> None:
    start = 1661203462584767
    sound = [op("a", start + i, 1) for i in range(5)] + [kernel(start + 3, 1)]
    trace = read(*sound, {**op("bad", start, 1), **fields}, {**kernel(start, 1), **fields})
    assert (trace.cpu.height, trace.gpu.height) == (5, 1)
    assert trace.meta.events_dropped == {reason: 2}
    assert trace.meta.end_ns < 10_000_000
    assert trace.meta.events_read == 8


def test_an_event_without_a_duration_key_is_dropped_too() -> None:
    bad = op("bad", 3, 1)
    del bad["dur"]
    assert read(op("a", 0, 9), bad).meta.events_dropped == {"no duration": 1}


def test_the_end_is_the_last_end_of_anything() -> None:
    assert read(op("a", 10, 5), kernel(12, 1)).meta.end_ns == 7000
    assert read(op("a", 10, 5)).meta.end_ns == 5000


# -- nesting ------------------------------------------------------------------------------------


def test_a_range_keeps_its_length_where_a_frame_is_cut() -> None:
    """profiler.step() opens ProfilerStep in one Python frame and closes it in another."""
    trace = read(
        event("python_function", "step", 0, 100),
        event("user_annotation", "ProfilerStep#1", 90, 1000),
        event("python_function", "late", 5, 96),
        op("aten::mm", 500, 10),
    )
    rows = dict(zip(column(trace.cpu, "name"), trace.cpu["dur"].to_list(), strict=True))
    assert rows["ProfilerStep#1"] == 1_000_000
    assert rows["late"] < 95_001
    assert rows["aten::mm"] == 10_000


def test_event_outlasting_its_parent_is_cut_and_counted() -> None:
    trace = read(op("a", 0, 10), op("b", 5, 8), op("c", 11, 1))
    assert trace.cpu["dur"].to_list() == [10_000, 5000, 1000]
    assert trace.cpu["parent"].to_list() == [None, 0, None]
    assert trace.meta.nesting_repaired == 1


def test_equal_spans_nest_by_kind() -> None:
    same = [
        runtime_call(0, 1, dur=10),
        op("op", 0, 10),
        event("python_function", "frame", 0, 10),
        event("user_annotation", "range", 0, 10),
    ]
    for events in (same, same[::-1]):
        assert column(read(*events).cpu, "name") == ["range", "frame", "op", "cudaLaunchKernel"]


# -- the other tables ---------------------------------------------------------------------------


def test_threads_are_the_busiest_first_and_have_their_names() -> None:
    trace = read(
        op("a", 0, 1, tid=5),
        op("b", 0, 1, tid="6"),
        op("c", 2, 1, tid=6),
        op("d", 3, 1, tid=6.0),
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 6, "args": {"name": "thread 6 (main)"}},
        {
            "ph": "i",
            "name": "[memory]",
            "pid": 1,
            "tid": 9,
            "ts": 1,
            "args": {"Total Allocated": 1, "Bytes": 1},
        },
    )
    assert trace.threads.rows() == [
        ("1", "6", "thread 6 (main)"),
        ("1", "5", None),
        ("1", "9", None),
    ]
    assert trace.cpu["thread"].to_list() == [0, 0, 0, 1]
    assert trace.memory["thread"].to_list() == [2]


def test_memory_events() -> None:
    def memory(ts: float, **args: Any) -> dict[str, Any]:
        return {
            "ph": "i",
            "cat": "cpu_instant_event",
            "name": "[memory]",
            "pid": 1,
            "tid": 1,
            "ts": ts,
            "args": args,
        }

    trace = read(
        op("a", 0, 100),
        memory(
            30,
            Bytes=-512,
            Addr=140_000_000_000_000,
            **{"Total Allocated": 0, "Total Reserved": 2048, "Device Type": 1, "Device Id": 3},
        ),
        memory(20, Bytes=64, **{"Total Allocated": 64, "Device Type": 0, "Device Id": -1}),
        memory(10, other=5),
    )
    assert trace.memory.select(
        "ts", "bytes", "address", "allocated", "reserved", "device"
    ).rows() == [
        (20_000, 64, None, 64, None, -1),
        (30_000, -512, 140_000_000_000_000, 0, 2048, 3),
    ]
    assert trace.meta.profile_memory is True


def test_sync_rows() -> None:
    trace = read(
        op("a", 0, 100),
        event(
            "cuda_sync",
            "Stream Wait Event",
            9,
            0,
            7,
            stream=20,
            device=1,
            correlation=5,
            wait_on_stream=7,
            wait_on_cuda_event_record_corr_id=3,
        ),
        event("cuda_sync", "Context Sync", 5, 2, 7, stream=-1, device=0, correlation=4),
        event("cuda_sync", "Something New", 6, 2, 7, stream=-1, device=0, correlation=4),
    )
    assert trace.sync.rows() == [
        (5000, 2000, "context", 0, None, 4, None, None),
        (9000, 0, "stream_wait", 1, 20, 5, 7, 3),
    ]
    assert trace.meta.sync_events


def test_copies_have_a_direction_and_memories() -> None:
    def copy(name: str, **args: Any) -> dict[str, Any]:
        return event("gpu_memcpy", name, 0, 5, 7, **KERNEL_ARGS, **args)

    trace = read(
        copy("Memcpy HtoD (Pageable -> Device)", bytes=100, **{"memory bandwidth (GB/s)": 0.02}),
        copy("Memcpy DtoH (Device -> Pinned)", bytes="8", **{"Memory bandwidth (GB/s)": 0.5}),
        copy("CopyHostToDevice"),
        copy("Memcpy HtoD (Host -> Device)"),
        copy("Memcpy P2P"),
        copy("?"),
        kernel(1, 1),
    )
    copies = trace.gpu.filter(pl.col("kind") == "memcpy")
    assert copies["copy"].to_list() == ["HtoD", "DtoH", "HtoD", "HtoD", "PtoP", "other"]
    assert column(copies, "src") == ["Pageable", "Device", None, None, None, None]
    assert column(copies, "dst") == ["Device", "Pinned", None, "Device", None, None]
    assert copies["bytes"].to_list() == [100, 8, None, None, None, None]
    assert copies["gbps"].to_list() == [0.02, 0.5, None, None, None, None]
    assert trace.gpu.filter(pl.col("kind") == "kernel")["copy"].to_list() == [None]


def test_unrecorded_kernel_arguments_are_null_not_zero() -> None:
    unrecorded = (
        "bytes",
        "gbps",
        "blocks",
        "threads",
        "registers",
        "shared",
        "blocks_per_sm",
        "warps_per_sm",
        "occupancy",
        "active_blocks",
        "limits",
        "graph",
        "comm",
        "external",
        "copy",
        "src",
        "dst",
    )
    row = read(kernel(0, 1)).gpu.row(0, named=True)
    assert {key: row[key] for key in unrecorded} == dict.fromkeys(unrecorded)
    recorded = read(kernel(0, 1, **{"est. achieved occupancy %": 0, "shared memory": 0})).gpu.row(
        0, named=True
    )
    assert (recorded["occupancy"], recorded["shared"]) == (0.0, 0)


def test_numbers_too_large_for_their_column_are_null() -> None:
    row = read(
        {
            **kernel(
                0,
                1,
                block=[1 << 31, 1, 1],
                grid=[1 << 31] * 3,
                device=1 << 40,
                stream=1e300,
                **{"registers per thread": 1e30, "blocks per SM": 1e999, "graph id": -(1 << 70)},
            )
        }
    ).gpu.row(0, named=True)
    assert (row["threads"], row["registers"], row["blocks_per_sm"]) == (None, None, None)
    assert (row["device"], row["stream"]) == (0, 0)


def test_collectives_are_described_once() -> None:
    args = {
        "Collective name": "allreduce",
        "In msg nelems": 1024,
        "Out msg nelems": "1024",
        "Group size": 8,
        "dtype": "Float",
        "Process Group Name": "0",
        "Process Group Ranks": [0, 1],
        "Seq": 5,
        "In split size": [],
        "Process Group Description": "default_pg",
    }
    hostile = {**args, "Seq": 1 << 80, "Group size": {"a": [1 << 80]}, "Collective name": None}
    trace = read(kernel(0, 1, **args), kernel(5, 2, **args), kernel(9, 3, **hostile), kernel(12, 4))
    assert trace.gpu["comm"].to_list() == [0, 0, 1, None]
    first, second = trace.comms.rows(named=True)
    assert first == {
        "collective": "allreduce",
        "in_elements": 1024,
        "out_elements": 1024,
        "group_size": 8,
        "dtype": "Float",
        "group": "0",
        "group_description": "default_pg",
        "ranks": "[0, 1]",
        "in_split": "[]",
        "out_split": None,
        "sequence": 5,
        "source": None,
        "target": None,
    }
    assert (second["collective"], second["group_size"], second["sequence"]) == (None, None, None)


def test_inputs_are_rows_of_texts() -> None:
    dims = {"Input Dims": [[2, 3]], "Input type": ["float"]}
    full = {**dims, "Input Strides": [[3, 1]], "Concrete Inputs": ["\u00e9"]}
    trace = read(
        event("cpu_op", "a", 0, 1, **dims),
        event("cpu_op", "b", 2, 1, **full),
        event("cpu_op", "c", 4, 1, **dims),
        event("cpu_op", "d", 6, 1),
    )
    assert trace.cpu["inputs"].to_list() == [0, 1, 0, None]
    assert trace.inputs.rows() == [
        ("[[2, 3]]", '["float"]', "", ""),
        ("[[2, 3]]", '["float"]', "[[3, 1]]", '["\\u00e9"]'),
    ]
    assert trace.meta.record_shapes is True


def test_very_many_threads_are_not_trouble() -> None:
    events = [op(f"n{i % 7}", 1661203462584767 + i, 5, tid=i) for i in range(60_000)]
    trace = read(*events, op("late", 1661203462584767 + 80_000_000_000, 1))
    assert trace.cpu.height == 60_001
    assert trace.cpu["depth"].max() == 0
    assert trace.threads.height == 60_000
