"""Host waits: what they waited for, and the idle time they left, by hand and on real traces."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.measure import Analysis
from advisor.measure.host.syncs import SYNCS_SCHEMA, profiler_syncs
from advisor.read import read_trace
from advisor.testing import TraceBuilder


def only_row(a: Analysis, **where: object) -> dict:
    """The one row that is there."""
    table = a.syncs.filter(**where)
    assert table.height == 1, table
    return table.row(0, named=True)


def program(**options: object) -> TraceBuilder:
    return TraceBuilder(launch_us=5, latency_us=3, **options)  # type: ignore[arg-type]


def test_idle_time_after_a_sync_lasts_from_awaited_to_next_work():
    b = program()
    with b.step():
        b.launch("gemm", 100)  # called 0 .. 5, runs 8 .. 108
        b.sync()  # 5 .. 108
        b.host(50)
        b.launch("gemm", 10)  # called at 158, runs from 166
    sync = only_row(b.analysis())
    assert (sync["ts"], sync["dur"], sync["kind"]) == (5_000, 103_000, "device")
    assert sync["waited"] == 100_000
    assert sync["idle_ns"] == 58_000
    assert (sync["idle_ts"], sync["idle_end"]) == (108_000, 166_000)
    assert sync["cause"] == "torch.cuda.synchronize"
    assert not sync["profiler"]


def test_a_sync_that_finds_its_work_done_costs_nothing():
    b = program()
    with b.step():
        b.launch("gemm", 10)  # 8 .. 18
        b.host(100)
        b.sync()  # 105 .. 106
        b.host(50)
        b.launch("gemm", 10)
    sync = only_row(b.analysis())
    assert (sync["waited"], sync["idle_ns"], sync["idle_ts"]) == (0, 0, None)


def test_sync_leaves_no_idle_time_while_another_stream_works():
    b = program()
    with b.step():
        b.launch("gemm", 100)  # 8 .. 108
        b.launch("long", 1000, stream=20)  # 13 .. 1013
        b.sync("cudaStreamSynchronize", stream=7)  # until 108
        b.host(50)
        b.launch("gemm", 10)
    # the thread's last work is on stream 20, so what is awaited must be seen from the time
    sync = only_row(b.analysis())
    assert sync["kind"] == "stream"
    assert sync["idle_ns"] == 0
    assert sync["waited"] == 108_000 - 10_000


def test_cuda_sync_rows_name_the_awaited_stream():
    b = program(cuda_sync_rows=True)
    with b.step():
        b.launch("gemm", 100)  # 8 .. 108
        b.launch("side", 60, stream=20)  # 13 .. 73
        b.sync("cudaStreamSynchronize", stream=7)  # until 108
        b.host(50)
        b.launch("gemm", 10)  # called at 158, runs from 166
    sync = only_row(b.analysis())
    assert (sync["idle_ts"], sync["idle_ns"]) == (108_000, 58_000)


def test_value_read_is_named_after_the_called_operator():
    b = program()
    with b.step():
        b.launch("gemm", 100)
        with b.python("train.py(7): log"), b.op("aten::is_nonzero"):
            b.item()
        b.launch("gemm", 10)
    a = b.analysis()
    sync = only_row(a)
    assert sync["cause"] == "aten::is_nonzero"
    assert a.trace.cpu["name"][sync["op"]] == "aten::_local_scalar_dense"
    assert a.location(sync["line"]) == ("train.py", 7, "log")
    assert a.trace.gpu["copy"][sync["copy"]] == "DtoH"


@pytest.mark.parametrize(
    ("around", "cause"),
    [
        (["aten::index", "aten::nonzero"], "aten::index"),
        (["aten::masked_select"], "aten::masked_select"),
        (["aten::unique_dim"], "aten::unique_dim"),
        (["aten::_unique2"], "aten::_unique2"),
        (["aten::repeat_interleave"], "aten::repeat_interleave"),
        (["aten::to", "aten::_to_copy", "aten::copy_"], "aten::to"),
        (["mylib::decode"], "mylib::decode"),
        (["mylib::decode", "aten::item"], "aten::item"),
    ],
)
def test_causes(around, cause):
    b = program()
    with b.step():
        b.launch("gemm", 100)
        spans = [b.op(name) for name in around]
        for span in spans:
            span.__enter__()
        b.copy("DtoH", 4, 1.5, pinned=False, op=None)
        for span in reversed(spans):
            span.__exit__(None, None, None)
        b.launch("gemm", 10)
    assert only_row(b.analysis())["cause"] == cause


@pytest.mark.parametrize(
    ("call", "cause"),
    [
        ("cudaDeviceSynchronize", "torch.cuda.synchronize"),
        ("cudaStreamSynchronize", "torch.cuda.Stream.synchronize"),
        ("cudaEventSynchronize", "torch.cuda.Event.synchronize"),
        ("hipDeviceSynchronize", "torch.cuda.synchronize"),
    ],
)
def test_a_sync_under_no_operator_is_an_explicit_one(call, cause):
    b = program()
    with b.step():
        b.launch("gemm", 100)
        b.sync(call)
        b.launch("gemm", 10)
    assert only_row(b.analysis())["cause"] == cause


def test_sync_in_the_optimizer_belongs_to_the_optimizer():
    b = program()
    with b.step(), b.range("Optimizer.step#FusedAdam.step"):
        b.launch("gemm", 100)
        b.sync("cudaStreamSynchronize", stream=7)
        b.launch("gemm", 10)
    assert only_row(b.analysis())["cause"] == "Optimizer.step#FusedAdam.step"


def test_reading_a_tensor_of_the_host_is_not_a_sync():
    b = program()
    with b.step():
        b.launch("gemm", 100)
        for _ in range(50):
            with b.op("aten::item"), b.op("aten::_local_scalar_dense"):
                pass
    assert b.analysis().syncs.is_empty()


def blocking_copy(
    b: TraceBuilder, us: float, begins: float, lasts: float, memory: str, api: str
) -> None:
    """A copy call of ``us``; its copy begins ``begins`` us after it and takes ``lasts``."""
    correlation = 100_000 + len(b.events)
    start = b.now + begins
    b.call(api, us, correlation)
    b.events.append(
        {
            "ph": "X",
            "cat": "gpu_memcpy",
            "name": f"Memcpy DtoH (Device -> {memory})",
            "pid": 0,
            "tid": 7,
            "ts": start,
            "dur": lasts,
            "args": {"device": 0, "stream": 7, "correlation": correlation, "bytes": 4},
        }
    )


def test_pageable_copy_and_its_sync_count_once():
    b = program()
    with b.step():
        b.launch("gemm", 100)  # 8 .. 108
        with b.op("aten::_local_scalar_dense", host_us=0):
            blocking_copy(
                b, 115, 103, 2, "Pageable", "cudaMemcpyAsync"
            )  # 5 .. 120, copies 108 .. 110
            b.call("cudaStreamSynchronize", 3)  # 120 .. 123
        b.host(26.5)
        b.launch("gemm", 10)  # called at 150, runs from 158
    a = b.analysis()
    assert a.syncs["kind"].to_list() == ["memcpy", "stream"]
    first, second = a.syncs.iter_rows(named=True)
    assert first["call"] == "cudaMemcpyAsync"
    assert first["waited"] == 102_000
    assert (first["idle_ts"], first["idle_ns"]) == (110_000, 48_000)
    assert (second["waited"], second["idle_ns"]) == (0, 0)
    assert first["copy"] == second["copy"]


def test_long_pinned_asynchronous_copy_is_no_sync():
    b = program()
    with b.step():
        blocking_copy(b, 115, 50, 2, "Pinned", "cudaMemcpyAsync")
        b.launch("gemm", 10)
    assert b.analysis().syncs.is_empty()


def test_the_synchronous_copy_call_is_a_sync():
    b = program()
    with b.step():
        b.launch("gemm", 20)  # 8 .. 28
        blocking_copy(b, 60, 30, 20, "Pinned", "cudaMemcpy")  # 5 .. 65, copies 35 .. 55
        b.launch("gemm", 10)  # called at 65, runs from 73
    sync = only_row(b.analysis())
    assert (sync["kind"], sync["cause"], sync["idle_ns"]) == ("memcpy", "cudaMemcpy", 18_000)


def test_two_syncs_in_a_row_share_the_idle_time_between_them():
    b = program()
    with b.step():
        b.launch("gemm", 100)  # 8 .. 108
        b.sync()  # 5 .. 108
        with b.thread(2000):
            b.launch("other", 50)  # called 108 .. 113, runs 116 .. 166
        b.sync()  # 113 .. 166
        b.host(20)
        b.launch("gemm", 10)  # called at 186, runs from 194
    a = b.analysis()
    assert a.syncs["idle_ns"].to_list() == [8_000, 28_000]
    assert a.syncs["idle_ns"].sum() == a.breakdown.idle.total - 8_000  # before the first kernel


def test_final_device_sync_belongs_to_the_profiler():
    b = program()
    for _ in range(3):
        with b.step():
            b.launch("gemm", 100)
            b.sync()
    b.sync()
    table = b.analysis().syncs
    assert table["profiler"].to_list() == [False, False, False]
    with b.step(3):
        b.sync()
        b.host(100)
    last = b.analysis().syncs.tail(1)
    assert last["profiler"].to_list() == [True]
    assert last["idle_ns"].to_list() == [0]


def test_sync_before_other_work_is_not_the_profilers():
    b = program()
    with b.step():
        b.launch("gemm", 100)
        b.sync()
        b.launch("gemm", 100)
    assert not only_row(b.analysis())["profiler"]


def test_with_stacks_the_frames_name_the_synchronizing_line():
    b = program()
    with b.step(), b.python("train.py(1): main"):
        b.launch("gemm", 100)
        with b.python("torch/cuda/__init__.py(975): synchronize"):
            b.sync()
        b.host(10)
        with (
            b.python("torch/autograd/profiler.py(363): __exit__"),
            b.python("torch/cuda/__init__.py(975): synchronize"),
        ):
            b.sync()
    assert b.analysis().syncs["profiler"].to_list() == [False, True]
    # and the user's own, when it is the last call of the trace
    b = program()
    with b.step(), b.python("train.py(1): main"):
        b.launch("gemm", 100)
        with b.python("torch/cuda/__init__.py(975): synchronize"):
            b.sync()
    assert b.analysis().syncs["profiler"].to_list() == [False]


def test_only_calls_inside_the_used_steps_count():
    b = program()
    for _ in range(4):
        with b.step():
            b.launch("gemm", 100)
            b.sync()
    table = Analysis(b.trace(), (1, 3)).syncs
    assert table["step"].to_list() == [1, 2]


def test_event_syncs_by_record_and_by_time():
    # with the record, what is awaited ends at 108; else the last work that ends during the call
    for rows, released in ((True, 108_000), (False, 128_000)):
        b = program()
        with b.step():
            b.launch("gemm", 100)  # 8 .. 108
            record = b._next()
            b.call("cudaEventRecord", 1, record)  # 5 .. 6
            b.launch("late", 20)  # 6 .. 11, runs 108 .. 128: not awaited
            call = b._next()
            start = b.now
            b.call("cudaEventSynchronize", 129, call)  # 11 .. 140
            b.host(50)
            b.launch("gemm", 10)  # called at 190, runs from 198
        if rows:
            b.events.append(
                {
                    "ph": "X",
                    "cat": "cuda_sync",
                    "name": "Event Sync",
                    "pid": 0,
                    "tid": 7,
                    "ts": start,
                    "dur": 129,
                    "args": {
                        "cuda_sync_kind": "Event Sync",
                        "stream": -1,
                        "correlation": call,
                        "wait_on_stream": 7,
                        "wait_on_cuda_event_record_corr_id": record,
                        "device": 0,
                    },
                }
            )
        sync = only_row(b.analysis())
        assert sync["kind"] == "event"
        assert sync["idle_ts"] == released
        assert sync["idle_ns"] == 198_000 - 128_000  # the device idles when the late work has ended


def test_columns_match_the_schema_with_and_without_rows():
    b = program()
    with b.step():
        b.launch("gemm", 10)
    assert b.analysis().syncs.schema == pl.Schema(SYNCS_SCHEMA)
    with b.step():
        b.item()
    assert b.analysis().syncs.schema == pl.Schema(SYNCS_SCHEMA)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["launch", "side", "sync", "stream", "item", "host", "other"]),
            st.integers(1, 50),
        ),
        min_size=1,
        max_size=15,
    )
)
def test_idle_times_of_a_thread_never_count_an_instant_twice(program_of):
    b = program()
    with b.step():
        for action, us in program_of:
            if action == "launch":
                b.launch("gemm", us)
            elif action == "side":
                b.launch("side", us, stream=20)
            elif action == "sync":
                b.sync()
            elif action == "stream":
                b.sync("cudaStreamSynchronize", stream=7)
            elif action == "item":
                b.item()
            elif action == "host":
                b.host(us)
            else:
                with b.thread(2000):
                    b.launch("other", us)
    a = b.analysis()
    assert a.syncs["idle_ns"].sum() <= a.breakdown.idle.total
    spans = a.syncs.filter(pl.col("idle_ns") > 0).sort("idle_ts")
    begin, end = spans["idle_ts"].to_numpy(), spans["idle_end"].to_numpy()
    assert (begin[1:] >= end[:-1]).all()
    assert (a.syncs["waited"] <= a.syncs["dur"]).all()


# -- real traces -------------------------------------------------------------------------------


def test_the_60_pageable_copies_of_the_a100_job(shared_trace):
    """All 60 held the host (76 ms of calls for 0.1 ms of copying), nearly always while the device
    worked on another stream, and the stream syncs right after them wait for nothing more."""
    a = Analysis(read_trace(shared_trace("a100_train_6steps")))
    copies = a.syncs.filter(kind="memcpy")
    assert copies.height == 60
    assert copies["cause"].value_counts().sort("cause").rows() == [
        ("aten::item", 24),
        ("aten::to", 36),
    ]
    assert copies["dur"].sum() / 1e6 == pytest.approx(75.663, abs=1e-3)
    streams = a.syncs.filter(kind="stream")
    assert streams.height == 60
    assert streams["idle_ns"].sum() == 0
    assert 0 < a.syncs["idle_ns"].sum() < 0.02 * a.span_ns
    assert a.syncs["copy"].is_not_null().all()


@pytest.mark.parametrize(
    ("name", "reads", "waiting"),
    [
        ("a100_train_6steps", 30, 24),
        ("v100_train_copy_heavy", 30, 24),
        ("no_gpu_rank", 5, 0),
        ("b200_eager", 4, 0),
    ],
)
def test_reads_of_host_tensors_are_not_syncs(name, reads, waiting, shared_trace):
    """The trap of rules that go by names: aten::item of a tensor that is on the host."""
    a = Analysis(read_trace(shared_trace(name)))
    cpu = a.trace.cpu
    assert (cpu["name"] == "aten::_local_scalar_dense").sum() == reads
    inside = a.syncs.filter(cause="aten::item")
    around = cpu["parent"].gather(inside["host"])
    assert around.n_unique() == waiting
    assert set(cpu["name"].gather(around)) <= {"aten::_local_scalar_dense"}


def test_single_read_of_bert_step_leaves_154_us(shared_trace):
    a = Analysis(read_trace(shared_trace("h100_bert_small_inference")))
    read = only_row(a, cause="aten::is_nonzero")
    # by hand from the file: the copy ends, and the next kernel starts that much later
    gpu, cpu = a.trace.gpu, a.trace.cpu
    end = gpu["ts"][read["copy"]] + gpu["dur"][read["copy"]]
    launched = cpu["ts"].gather(gpu["launch"].fill_null(0))
    following = gpu["ts"].filter(launched > cpu["ts"][read["host"]]).min()
    assert read["idle_ns"] == following - end == 153_855
    assert only_row(a, kind="device")["cause"] == "torch.cuda.synchronize"


@pytest.mark.parametrize("name", ["alexnet", "simple_add", "mi210_gpu_only", "triton_example"])
def test_the_closing_sync_of_a_real_trace_is_the_profilers(name, shared_trace):
    trace = read_trace(shared_trace(name))
    rows = np.flatnonzero((trace.cpu["call"] == "sync_device").fill_null(False).to_numpy())
    ts = trace.cpu["ts"].to_numpy()
    assert profiler_syncs(trace).tolist() == [rows[np.argmax(ts[rows])]]


@pytest.mark.parametrize("name", ["a100_train_6steps", "v100_train_copy_heavy", "two_ranks_rank0"])
def test_idle_times_after_syncs_of_real_traces_are_the_devices(name, shared_trace):
    a = Analysis(read_trace(shared_trace(name)))
    table = a.syncs.filter(pl.col("idle_ns") > 0)
    begin, end = table["idle_ts"].to_numpy(), table["idle_end"].to_numpy()
    idle = a.breakdown.idle
    # instant by instant at the resolution of the file, which is whole microseconds
    idle_us = np.zeros(a.trace.meta.end_ns // 1000 + 2, dtype=bool)
    for s, e in zip(idle.start // 1000, idle.end // 1000, strict=True):
        idle_us[s:e] = True
    expected = [
        int(idle_us[s:e].sum()) * 1000 for s, e in zip(begin // 1000, end // 1000, strict=True)
    ]
    assert table["idle_ns"].to_list() == expected
