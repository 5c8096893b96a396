"""Idle gaps and who is to blame: by hand for each cause, by a walk through the events for all."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.measure import Analysis
from advisor.measure.host.gaps import CAUSES, GAPS_SCHEMA, operators_after_gaps
from advisor.read import read_trace
from advisor.testing import TraceBuilder

REAL = [
    "a100_train_6steps",
    "v100_train_copy_heavy",
    "two_ranks_rank0",
    "two_ranks_rank1",
    "nccl_collectives",
    "h100_bert_small_inference",
    "b200_eager",
    "alexnet",
    "simple_add",
    "mi250_train",
    "mi210_gpu_only",
    "mi300_torch_compile",
    "triton_example",
    "event_sync",
    "event_sync_multi_stream",
    "old_capitalised_categories",
]


class Scene:
    """A step of three parts: a kernel, then what the host does, then a second kernel.

    The first kernel runs from 1010 to 1110 us (its operator from 1000, its call from 1002 to
    1007), so the host is free at 1007.5 and the device from 1110.
    """

    def __init__(self) -> None:
        self.b = TraceBuilder(launch_us=5, latency_us=3)
        self.step = self.b.step()
        self.step.__enter__()
        with self.b.op("aten::mm", host_us=2):
            self.b.launch("first", 100)

    def finish(self, **launch: float) -> Analysis:
        """Launch the second kernel (2 us of operator, 5 of call, 3 of latency) and end with it."""
        with self.b.op("aten::mm", host_us=2):
            self.b.launch("second", 1000, **launch)
        self.step.__exit__(None, None, None)
        return self.b.analysis()


def causes_of_gap(a: Analysis, gap: int = 1) -> dict[str, float]:
    """Cause -> us of one gap (gap 0 is before the first kernel)."""
    table = a.gaps.filter(pl.col("gap") == gap).group_by("cause").agg(pl.col("dur").sum())
    return {str(cause): dur / 1e3 for cause, dur in table.iter_rows()}


def host_name(a: Analysis, cause: str) -> str | None:
    """Name of the host event that the longest piece with this cause is blamed on."""
    piece = a.gaps.filter(pl.col("cause") == cause).sort("dur").tail(1)
    row = piece["host"][0]
    return None if row is None else str(a.trace.cpu["name"][int(row)])


# -- one cause at a time -----------------------------------------------------------------------


def test_gap_before_the_first_kernel_is_dispatch_and_launch():
    a = Scene().finish()
    assert causes_of_gap(a, 0) == {"dispatch": 2, "launch": 8}


def test_waiting_for_the_loader():
    s = Scene()
    s.b.loader_wait(500)  # 1007.5 .. 1507.5, so the device waits from 1110
    a = s.finish()
    assert causes_of_gap(a) == {"loader": 397.5, "dispatch": 2, "launch": 8}
    assert "DataLoader" in str(host_name(a, "loader"))


def test_operators_inside_the_loader_are_the_loaders():
    s = Scene()
    name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    with s.b.range(name), s.b.op("aten::stack", host_us=499.5):
        pass
    a = s.finish()
    assert causes_of_gap(a)["loader"] == 397.5
    assert host_name(a, "loader") == name


def test_sync_ending_with_its_work_blames_following_host_time():
    s = Scene()
    s.b.sync()  # until 1110
    with s.b.python("train.py(3): log"):
        s.b.host(49)
    assert causes_of_gap(s.finish()) == {"python": 50, "dispatch": 2, "launch": 8}


def test_sync_outlasting_its_work_is_the_cause():
    s = Scene()
    s.b.call("cudaDeviceSynchronize", 200)  # until 1207.5
    a = s.finish()
    assert causes_of_gap(a) == {"sync": 97.5, "dispatch": 2, "launch": 8}
    assert host_name(a, "sync") == "cudaDeviceSynchronize"


def blocking_copy(b: TraceBuilder, us: float, begins: float, lasts: float, kind: str) -> None:
    """A cudaMemcpyAsync call of ``us`` whose copy runs within, ``begins`` us after the call."""
    correlation = 100_000 + len(b.events)
    start = b.now + begins
    b.call("cudaMemcpyAsync", us, correlation)
    b.events.append(
        {
            "ph": "X",
            "cat": "gpu_memcpy",
            "name": kind,
            "pid": 0,
            "tid": 7,
            "ts": start,
            "dur": lasts,
            "args": {"device": 0, "stream": 7, "correlation": correlation, "bytes": 1000},
        }
    )


def test_a_pageable_copy_that_holds_the_host():
    s = Scene()
    with s.b.op("aten::copy_", host_us=200):  # 1007.5 .. 1207.5
        blocking_copy(s.b, 80, 50, 30, "Memcpy HtoD (Pageable -> Device)")  # staged until 1257.5
    a = s.finish()
    assert causes_of_gap(a, 1) == {"dispatch": 97.5, "copy": 50}
    # after it: 0.5 us of its operator, then the next operator
    assert causes_of_gap(a, 2) == {"dispatch": 2.5, "launch": 8}


def test_the_call_of_a_pinned_copy_is_a_launch():
    s = Scene()
    with s.b.op("aten::copy_", host_us=200):
        blocking_copy(s.b, 80, 50, 30, "Memcpy HtoD (Pinned -> Device)")
    assert causes_of_gap(s.finish(), 1) == {"dispatch": 97.5, "launch": 50}


def test_python_frames_and_their_line():
    s = Scene()
    with s.b.python("train.py(12): step"), s.b.python("json/decoder.py(3): decode"):
        s.b.host(300)
    a = s.finish()
    assert causes_of_gap(a)["python"] == pytest.approx(1309.5 - 1110)
    piece = a.gaps.filter(pl.col("cause") == "python").sort("dur").tail(1)
    assert a.location(piece["line"][0])[0] == "train.py"
    assert host_name(a, "python") == "json/decoder.py(3): decode"


def test_unrecorded_time_is_unknown_and_named_by_its_range():
    s = Scene()
    with s.b.range("## optimizer ##"):
        s.b.host(300)
    a = s.finish()
    assert causes_of_gap(a) == {"unknown": 197.5, "dispatch": 2, "launch": 8}
    assert host_name(a, "unknown") == "## optimizer ##"


def test_the_operators_after_time_outside_operators():
    """197.5 us before the second kernel (aten::mm) and 595 before the third (inside aten::linear,
    whose aten::addmm launches it)."""
    s = Scene()
    s.b.host(300)
    with s.b.op("aten::mm", host_us=2):
        s.b.launch("second", 100)
    s.b.host(700)
    with s.b.op("aten::linear"), s.b.op("aten::addmm", host_us=2):
        s.b.launch("third", 100)
    s.step.__exit__(None, None, None)
    a = s.b.analysis()
    table = operators_after_gaps(a)
    assert table["name"].to_list() == ["aten::linear", "aten::mm"]
    unknown = a.gaps.filter(pl.col("cause") == "unknown")
    by_hand = dict(unknown.group_by("gap").agg(pl.col("dur").sum()).sort("gap").iter_rows())
    assert table["dur"].to_list() == sorted(by_hand.values(), reverse=True)
    assert min(by_hand.values()) == 197_500 and table["count"].to_list() == [1, 1]


@pytest.mark.parametrize("call", ["cudaMalloc", "cudaFree", "cudaHostAlloc", "hipFree"])
def test_allocating_inside_an_operator(call):
    s = Scene()
    with s.b.op("aten::empty", host_us=10):
        s.b.call(call, 289.5)  # 1017.5 .. 1307; the operator ends at 1307.5
    a = s.finish()
    assert causes_of_gap(a) == {"allocation": 197, "dispatch": 2.5, "launch": 8}
    assert host_name(a, "allocation") == call


def test_other_cuda_calls_belong_to_their_operator():
    s = Scene()
    with s.b.op("aten::empty", host_us=10):
        s.b.call("cudaFuncSetAttribute", 289.5)
    a = s.finish()
    assert causes_of_gap(a) == {"dispatch": 199.5, "launch": 8}


def test_compiling_and_all_that_happens_in_it():
    s = Scene()
    with s.b.range("entire_frame_compile (dynamo_timed)"), s.b.op("aten::add", host_us=299.5):
        pass
    assert causes_of_gap(s.finish())["compile"] == 197.5


def test_running_compiled_code_is_dispatch():
    s = Scene()
    with s.b.range("Torch-Compiled Region: 0/0"), s.b.range("## Call CompiledFxGraph fab ##"):
        s.b.host(300)
    assert causes_of_gap(s.finish()) == {"dispatch": 199.5, "launch": 8}


def test_loading_code_is_compiling():
    s = Scene()
    s.b.call("cuModuleLoadData", 300)
    assert causes_of_gap(s.finish())["compile"] == 197.5


def test_profiler_buffer_time_is_profiler_overhead():
    s = Scene()
    with s.b.op("aten::empty", host_us=150):  # 1007.5 .. 1157.5
        s.b.overhead("Activity Buffer Request", 100)
        s.b.host(49.5)
    assert causes_of_gap(s.finish()) == {
        "profiler": 100,
        "dispatch": 47.5 + 49.5 + 0.5 + 2,
        "launch": 8,
    }


def test_lazy_loading_inside_an_operator_is_compiling():
    s = Scene()
    with s.b.op("aten::empty", host_us=150):
        s.b.overhead("Lazy Function Loading", 100)
    assert causes_of_gap(s.finish()) == {"compile": 100, "dispatch": 47.5 + 0.5 + 2, "launch": 8}


def test_profiler_buffers_do_not_delay_data_waits():
    s = Scene()
    with s.b.range("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"):
        s.b.overhead("Buffer Flush", 300)
    assert causes_of_gap(s.finish()) == {"loader": 197.5, "dispatch": 2, "launch": 8}


def test_the_profilers_own_frames():
    s = Scene()
    with s.b.python("train.py(1): main"), s.b.python("torch/profiler/profiler.py(821): step"):
        s.b.host(298)
    assert causes_of_gap(s.finish())["profiler"] == pytest.approx(1307 - 1110)


def test_waiting_for_the_event_of_another_stream():
    s = Scene()
    s.b.launch("side", 500, stream=20)  # 1015.5 .. 1515.5
    s.b.wait_stream(7, 20)
    a = s.finish(after=1550)  # ready at 1515.5, begins at 1550
    assert causes_of_gap(a, 1) == {"stream": 34.5}
    assert host_name(a, "stream") == "cudaStreamWaitEvent"


def test_another_stream_is_not_blamed_long_after_its_work():
    s = Scene()
    s.b.launch("side", 500, stream=20)  # 1015.5 .. 1515.5
    s.b.wait_stream(7, 20)
    assert causes_of_gap(s.finish(after=1600), 1) == {"unknown": 84.5}


def test_event_ready_before_its_stream_causes_no_gap():
    s = Scene()
    s.b.launch("side", 10, stream=20)  # over at 1025.5
    s.b.wait_stream(7, 20)
    assert causes_of_gap(s.finish(after=1116), 1) == {"launch": 6}


def test_stream_wait_delays_only_the_work_after_it():
    s = Scene()
    s.b.launch("side", 500, stream=20)  # 1015.5 .. 1515.5
    s.b.wait_stream(7, 20)
    s.b.launch("between", 10)  # 1515.5 .. 1525.5
    s.b.launch("side again", 84.5, stream=20)  # 1515.5 .. 1600
    assert causes_of_gap(s.finish(after=1640), 1) == {"launch": 40}


def test_work_of_no_duration_ends_no_gap():
    s = Scene()
    for ts in (1200, 1307.5 + 10):  # in the gap, and where the second kernel begins
        s.b.events.append(
            {
                "ph": "X",
                "cat": "kernel",
                "name": "empty",
                "pid": 0,
                "tid": 9,
                "ts": ts,
                "dur": 0,
                "args": {"device": 0, "stream": 9, "correlation": 0},
            }
        )
    s.b.loader_wait(300)
    a = s.finish()
    assert causes_of_gap(a) == {"loader": 197.5, "dispatch": 2, "launch": 8}
    assert a.trace.gpu["name"].gather(a.gaps["next"]).unique().len() == 2  # first and second


def test_last_sync_does_not_delay_later_launches():
    s = Scene()
    s.b.call("cudaDeviceSynchronize", 200)
    s.step.__exit__(None, None, None)
    assert causes_of_gap(s.b.analysis()) == {"end": 97.5}


def test_unexplained_delay_of_queued_kernel_is_unknown():
    s = Scene()
    s.b.launch("side", 500, stream=20)
    assert causes_of_gap(s.finish(after=1600), 1) == {"unknown": 84.5}


def test_short_gap_between_queued_kernels_is_launch_latency():
    s = Scene()
    assert causes_of_gap(s.finish(after=1116), 1) == {"launch": 6}


def test_gap_before_kernel_with_unrecorded_launch_is_unknown():
    s = Scene()
    s.step.__exit__(None, None, None)
    s.b.events.append(
        {
            "ph": "X",
            "cat": "kernel",
            "name": "stray",
            "pid": 0,
            "tid": 7,
            "ts": 1300,
            "dur": 50,
            "args": {"device": 0, "stream": 7, "correlation": 987_654},
        }
    )
    with s.b.step():
        s.b.host(1000)
    a = s.b.analysis()
    assert causes_of_gap(a) == {"unknown": 190}
    assert a.gaps.filter(pl.col("gap") == 1)["thread"].to_list() == [None]


def test_gap_is_blamed_on_the_working_thread():
    s = Scene()
    with s.b.op("aten::nll_loss", host_us=299.5):  # the main thread, until 1307.5
        pass
    with s.b.thread(2000), s.b.op("autograd::engine::evaluate_function: MmBackward0", host_us=2):
        s.b.launch("backward", 100)
    s.step.__exit__(None, None, None)
    a = s.b.analysis()
    assert causes_of_gap(a) == {"dispatch": 199.5, "launch": 8}
    by_thread = a.gaps.filter(gap=1, cause="dispatch").sort("ts")
    names = a.trace.threads["tid"].gather(by_thread["thread"]).to_list()
    assert names == ["1000", "2000"]
    assert by_thread["dur"].to_list() == [197_500, 2_000]


def test_wait_for_backward_follows_the_backward_thread():
    s = Scene()
    wait = "<built-in method run_backward of torch._C._EngineBase object at 0x7f>"
    with s.b.python("train.py(9): main"), s.b.python(wait):
        with s.b.thread(2000), s.b.op("AddBackward0", host_us=100):
            s.b.launch("backward", 10)  # called at 1108.5, runs 1116.5 .. 1126.5
            s.b.host(200)  # until 1314: the engine's thread is in its operator
        s.b.host(85.5)  # and then nobody shows what it does
    a = s.finish()
    after = causes_of_gap(a, 2)
    assert after["dispatch"] == pytest.approx(1314 - 1126.5 + 2)
    assert after["other_thread"] == pytest.approx(85.5 + 0.5)
    assert "run_backward" in str(host_name(a, "other_thread"))


def test_gap_after_the_last_work_is_host_time_then_step_end():
    s = Scene()
    s.b.host(200)  # 1007.5 .. 1207.5
    with s.b.op("aten::cpu_work", host_us=29.5):
        pass
    s.step.__exit__(None, None, None)
    a = s.b.analysis()
    assert causes_of_gap(a) == {"end": 97.5, "dispatch": 30}
    assert a.gaps.filter(pl.col("gap") == 1)["next"].to_list() == [None, None]


def test_the_window_ends_but_the_next_step_is_known():
    b = TraceBuilder()
    for _ in range(3):
        with b.step():
            b.launch("gemm", 20)
            b.loader_wait(200)
    a = Analysis(b.trace(), (0, 1))
    tail = a.gaps.filter(pl.col("gap") == 1)
    assert tail["cause"].to_list() == ["loader"]
    assert tail["next"].to_list() == [1]  # the kernel of the step after


def test_pieces_do_not_cross_steps():
    b = TraceBuilder(launch_us=5, latency_us=3)
    with b.step():
        b.launch("gemm", 10)
        b.loader_wait(100)
    with b.step():
        b.loader_wait(100)
        b.launch("gemm", 100)
    pieces = b.analysis().gaps.filter(cause="loader")
    assert pieces["step"].to_list() == [0, 1]
    assert pieces["dur"].to_list() == [105_000 - 18_000, 100_000]


def test_no_gap_causes_without_a_device():
    b = TraceBuilder(gpu=None)
    with b.step(), b.op("aten::mm"):
        b.host(10)
    assert b.analysis().gaps.is_empty()


def test_call_in_a_range_outlasting_its_parent_is_found():
    # asynchronous ranges overlap what is around them; the tree must not lose the rest
    s = Scene()
    s.b.events.append(
        {
            "ph": "X",
            "cat": "user_annotation",
            "name": "async range",
            "pid": 1000,
            "tid": 1000,
            "ts": 1005,
            "dur": 190,
            "args": {},
        }
    )
    with s.b.op("aten::slow", host_us=299.5):
        pass
    assert causes_of_gap(s.finish()) == {"dispatch": 199.5, "launch": 8}


# -- all of them: an independent walk through the events -----------------------------------------


class EventWalk:
    """The cause of each instant of idle time, found by looking at every event."""

    LAUNCHES = ("launch", "graph_launch", "memset")

    def __init__(self, a: Analysis) -> None:
        self.a = a
        cpu, gpu = a.trace.cpu, a.trace.gpu
        self.ts, self.end = cpu["ts"].to_numpy(), (cpu["ts"] + cpu["dur"]).to_numpy()
        self.thread = cpu["thread"].to_numpy()
        self.parent = cpu["parent"].fill_null(-1).to_list()
        self.kind, self.call = cpu["kind"].to_list(), cpu["call"].to_list()
        self.name = cpu["name"].cast(pl.String).to_list()
        self.start = gpu["ts"].to_numpy()
        is_work = (gpu["device"] == a.device_id).to_numpy() & (gpu["dur"] > 0).to_numpy()
        self.rows = np.flatnonzero(is_work)
        self.launch = gpu["launch"].fill_null(-1).to_list()

    def causes(self, instant: int, gap_end: int) -> set[str]:
        """Acceptable causes of an instant in a gap that ends at ``gap_end``."""
        after = self.rows[self.start[self.rows] >= gap_end]
        thread, launched = self.a.trace.main_thread, None
        if len(after):
            launched = self.launch[after[0]]
            if launched < 0:
                return {"unknown"}
            thread = int(self.thread[launched])
            if instant >= self.end[launched]:
                return {"launch", "stream", "unknown"}
        classes = self.classes_at(thread, instant)
        if classes is not None:
            return classes
        others = {int(t) for t in self.thread} - {thread}
        seen = [c for t in others if (c := self.classes_at(t, instant)) is not None]
        return {"unknown", "other_thread", "end"}.union(*seen)

    def classes_at(self, thread: int, instant: int) -> set[str] | None:
        inside = (self.thread == thread) & (self.ts <= instant) & (self.end > instant)
        around = np.flatnonzero(inside).tolist()
        if any("DataLoader)#" in self.name[row] for row in around):
            return {"loader"}
        row = around[-1] if around else -1
        while row >= 0:
            kind, call, name = self.kind[row], self.call[row], self.name[row]
            if kind == "overhead":
                return None
            if kind == "op":
                return {"dispatch", "profiler", "compile"}
            if kind == "python":
                return {"python", "profiler", "compile", "other_thread"}
            if kind == "annotation" and name.startswith(("nccl:", "## Call Compiled")):
                return {"dispatch"}
            if kind == "runtime":
                if call in ("memcpy", "memcpy_blocking"):
                    return {"launch", "copy", "profiler", "compile"}
                if call in self.LAUNCHES:
                    return {"launch", "profiler", "compile"}
                if str(call).startswith("sync"):
                    return {"sync", "profiler", "end"}
                if call in ("malloc", "free", "host_alloc", "host_free"):
                    return {"allocation", "compile"}  # the first cudaFree sets CUDA up
                if call in ("module_load", "graph_capture"):
                    return {"compile"}
            row = self.parent[row]
        return None


def assert_matches_walk(a: Analysis, instants: int) -> None:
    """Pieces are in order, complete and, at random instants, what the walk finds."""
    table, idle = a.gaps, a.breakdown.idle
    ts, dur = table["ts"].to_numpy(), table["dur"].to_numpy()
    assert (dur > 0).all()
    assert (ts[1:] >= (ts + dur)[:-1]).all()
    assert int(dur.sum()) == idle.total
    per_gap = table.group_by("gap").agg(pl.col("dur").sum()).sort("gap")
    assert per_gap["dur"].to_list() == (idle.end - idle.start).tolist()
    step = table["step"].to_numpy()
    begin, end = (a.steps.table[name].to_numpy() for name in ("ts", "end"))
    assert ((ts >= begin[step]) & (ts + dur <= end[step])).all()
    if not len(ts):
        return
    walk = EventWalk(a)
    random = np.random.default_rng(0)
    # by pieces, so that short ones are seen, and by time, so that long ones are
    by_time = random.choice(len(ts), instants, p=dur / dur.sum())
    for piece in [*random.integers(0, len(ts), instants).tolist(), *by_time.tolist()]:
        instant = int(ts[piece] + random.integers(0, dur[piece]))
        gap_end = int(idle.end[table["gap"][piece]])
        expected = walk.causes(instant, gap_end)
        assert table["cause"][piece] in expected, (piece, instant, table.row(piece, named=True))


@pytest.mark.parametrize("name", REAL)
def test_gap_causes_of_a_real_trace_equal_a_direct_walk(name, shared_trace):
    assert_matches_walk(Analysis(read_trace(shared_trace(name))), 150)


ACTIONS = """
    launch launch_side op python host loader sync item copy pageable malloc wait backward
    range stray graph
    """.split()
actions = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(1, 60)), max_size=14)


def perform(b: TraceBuilder, action: str, us: int) -> None:
    match action:
        case "launch":
            with b.op("aten::mm"):
                b.launch("gemm", us)
        case "launch_side":
            b.launch("side", us, stream=20, after=b.now + us)
        case "op":
            with b.op("aten::view", host_us=us):
                pass
        case "python":
            with b.python("train.py(1): f"):
                b.host(us)
        case "host":
            b.host(us)
        case "loader":
            b.loader_wait(us)
        case "sync":
            b.sync()
        case "item":
            b.item()
        case "copy":
            b.copy("HtoD", 1000, us)
        case "pageable":
            with b.op("aten::copy_"):
                blocking_copy(b, us + 10, 5, us, "Memcpy DtoH (Device -> Pageable)")
        case "malloc":
            b.call("cudaMalloc", us)
        case "wait":
            b.wait_stream(7, 20)
        case "backward":
            with b.thread(2000), b.op("MmBackward0", host_us=us):
                b.launch("backward", us)
        case "range":
            with b.range("## part ##"):
                b.host(us)
        case "stray":
            b.events.append(
                {
                    "ph": "X",
                    "cat": "kernel",
                    "name": "stray",
                    "pid": 0,
                    "tid": 9,
                    "ts": b.now + us,
                    "dur": us,
                    "args": {"device": 0, "stream": 9, "correlation": 0},
                }
            )
        case "graph":
            b.graph_launch([("a", us), ("b", 1)])


@settings(max_examples=60, deadline=None)
@given(st.lists(actions, min_size=1, max_size=4))
def test_any_program_is_blamed_completely_and_as_a_walk_finds(steps):
    b = TraceBuilder(latency_us=2.5)
    for step in steps:
        with b.step():
            b.host(1)
            for action, us in step:
                perform(b, action, us)
    assert_matches_walk(b.analysis(), 12)


# -- figures of real traces ----------------------------------------------------------------------


def shares(a: Analysis) -> dict[str, float]:
    """Idle time by cause, ms."""
    table = a.gaps.group_by("cause").agg(pl.col("dur").sum())
    return dict.fromkeys(CAUSES, 0.0) | {str(c): d / 1e6 for c, d in table.iter_rows()}


def test_bert_step_with_stacks_has_no_unknown_gaps(shared_trace):
    a = Analysis(read_trace(shared_trace("h100_bert_small_inference")))
    shares_found = shares(a)
    assert shares_found["unknown"] == 0
    assert shares_found["python"] + shares_found["dispatch"] + shares_found["launch"] > 0.95 * sum(
        shares_found.values()
    )


def test_without_stacks_the_unknown_share_is_reported(shared_trace):
    a = Analysis(read_trace(shared_trace("a100_train_6steps")))
    shares_found = shares(a)
    assert shares_found["python"] == 0
    assert 0.1 < shares_found["unknown"] / sum(shares_found.values()) < 0.4
    assert shares_found["loader"] < 0.01 * sum(shares_found.values())  # 0.42 ms in six steps


def test_trace_without_most_device_work_is_mostly_unknown(shared_trace):
    """1,204 of 259,690 consecutive correlation ids are in the file, so what kept the device busy
    in most gaps is not: kernels start up to 100 ms after their launch for no visible reason."""
    shares_found = shares(Analysis(read_trace(shared_trace("two_ranks_rank0"))))
    assert shares_found["unknown"] > 0.8 * sum(shares_found.values())


def test_profiler_share_of_b200_step_equals_overhead_rows(shared_trace):
    a = Analysis(read_trace(shared_trace("b200_eager")))
    cpu = a.trace.cpu.filter(pl.col("kind") == "overhead")
    rows = {str(n): d for n, d in cpu.group_by("name").agg(pl.col("dur").sum()).iter_rows()}
    shares_found = shares(a)
    assert shares_found["profiler"] == pytest.approx(rows["Activity Buffer Request"] / 1e6)
    assert 0.8 * rows["Lazy Function Loading"] <= shares_found["compile"] * 1e6
    assert shares_found["compile"] * 1e6 <= rows["Lazy Function Loading"]


def test_columns_match_the_schema():
    a = Scene().finish()
    assert a.gaps.schema == pl.Schema(GAPS_SCHEMA)


def test_device_work_without_any_host_event_is_unknown():
    b = TraceBuilder()
    for ts in (1000, 1200):
        b.events.append(
            {
                "ph": "X",
                "cat": "kernel",
                "name": "gemm",
                "pid": 0,
                "tid": 7,
                "ts": ts,
                "dur": 50,
                "args": {"device": 0, "stream": 7, "correlation": 1},
            }
        )
    a = b.analysis()
    assert causes_of_gap(a, 0) == {"unknown": 150}
    assert a.host.is_empty()
    assert a.syncs.is_empty()


def test_waiting_for_another_device_of_the_process() -> None:
    b = TraceBuilder()
    with b.step():
        b.run("aten::mm", "ampere_sgemm_128x64_nn", 1000)
        b.wait_stream(8, on=7)
        with b.op("aten::mm"):
            b.launch("ampere_sgemm_128x64_nn", 2500, stream=8)
            b.events[-1]["args"]["device"] = b.events[-1]["pid"] = 1
        b.wait_stream(7, on=8)
        b.run("aten::add", "vectorized_elementwise_kernel", 2000)
        b.sync()
    waits = b.analysis().gaps.filter(pl.col("cause") == "device")
    assert waits["dur"].sum() == pytest.approx(2_500_000, rel=0.02)
