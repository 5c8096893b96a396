"""Host time by class, and the lines that take most Python time."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.advise.engine import Options, analyze
from advisor.measure import Analysis
from advisor.measure.host.host_time import HOST_SCHEMA, HOT_SCHEMA, python_gaps, python_hot_spots
from advisor.measure.host.stacks import (
    SampledStack,
    line_of_function,
    line_of_share,
    normalize_operator_name,
)
from advisor.measure.steps.timeline import CLASSES
from advisor.read import read_trace
from advisor.testing import TraceBuilder

CORPUS = Path(__file__).parents[1] / "corpus"


def classes(a: Analysis, thread: int | None = None) -> dict[str, float]:
    """Time of one thread by class, us; of the main thread by default."""
    table = a.host.filter(pl.col("thread") == (a.trace.main_thread if thread is None else thread))
    return {str(name): ns / 1e3 for name, ns in table.select("class", "ns").iter_rows()}


def test_each_instant_of_a_thread_has_one_class():
    b = TraceBuilder(launch_us=5, latency_us=3)
    with b.step():
        b.loader_wait(100)
        with b.python("train.py(1): step"):  # 0.5 us before and after what is inside
            b.host(20)
            with b.op("aten::mm", host_us=2):  # and 0.5 after
                b.launch("gemm", 50)  # a call of 5; runs 130.5 .. 180.5
                b.call("cudaMalloc", 30)
        with b.range("## logging ##"):
            b.host(7)
        b.sync()  # 165.5 .. 180.5
        b.host(9)
        b.launch("gemm", 1)  # a call until 194.5; runs 197.5 .. 198.5, where the step ends
    assert classes(b.analysis()) == {
        "loader": 100,
        "python": 21,
        "dispatch": 2.5,
        "launch": 10,
        "allocation": 30,
        "unknown": 16,
        "sync": 15,
        "unrecorded": 4,
    }


def test_other_threads_have_own_and_unrecorded_time():
    b = TraceBuilder(launch_us=5, latency_us=3)
    with b.step():
        with b.thread(2000), b.op("MulBackward0", host_us=40):
            b.launch("gemm", 1)
        b.host(100)
    a = b.analysis()
    other = 1 - int(a.trace.main_thread)
    assert classes(a, other) == {"dispatch": 40.5, "launch": 5, "unrecorded": 100}


def test_wait_for_the_backward_thread_has_its_own_class():
    b = TraceBuilder(launch_us=5, latency_us=3)
    node = "autograd::engine::evaluate_function: MulBackward0"
    with b.step():
        with b.op("aten::mul", host_us=10):
            pass
        for _ in range(2):
            with b.thread(2000), b.op(node, host_us=40):
                pass
            with b.thread(2000):
                b.host(3)  # the engine looks for the next node
        b.host(100)
    class_times = classes(b.analysis())
    # from the first node to the last: what comes after it is explained by nothing
    assert class_times["autograd"] == pytest.approx(2 * 40.5 + 3, abs=1)
    assert class_times["unknown"] == pytest.approx(100 + 3, abs=1)


@pytest.mark.parametrize(
    "frame",
    [
        "<built-in function _cuda_synchronize>",
        "<built-in method synchronize of torch.cuda.Event object at 0x7f>",
        "<built-in method item of Tensor object at 0x7f>",
    ],
)
def test_builtin_waiting_for_the_device_is_no_python_time(frame: str):
    b = TraceBuilder()
    with b.step(), b.python("train.py(1): step"):
        b.launch("gemm", 50)
        with b.python(frame):
            b.host(300)
        b.host(20)
    a = b.analysis()
    class_times = classes(a)
    assert class_times["sync"] == pytest.approx(300, abs=2)
    assert class_times["python"] == pytest.approx(20, abs=2)
    assert python_hot_spots(a).is_empty()


def test_queue_drain_after_the_last_step_belongs_to_no_step():
    b = TraceBuilder(launch_us=5)
    for _ in range(5):  # 20 us of the host, 1 ms of the device
        with b.step():
            for _ in range(4):
                b.launch("gemm", 250)
    b.sync()  # some 5 ms
    a = b.analysis()
    assert a.steps.host_spans.total < 0.1 * a.span_ns
    assert classes(a)["launch"] == pytest.approx(5 * 20, abs=1)
    assert "drain" not in classes(a)


@pytest.mark.parametrize("stacks", [False, True])
def test_waiting_for_queued_work_is_not_a_cost_of_the_profiler(stacks):
    b = TraceBuilder(launch_us=5, latency_us=3)
    with b.step(), b.python("train.py(1): main") if stacks else nullcontext():
        b.launch("gemm", 300)
        with b.python("torch/profiler/profiler.py(9): stop") if stacks else nullcontext():
            b.sync()
    class_times = classes(b.analysis())
    assert class_times["drain"] == pytest.approx(303, abs=2)
    assert class_times.get("profiler", 0) <= 2  # the frame's own


def test_queue_drain_is_recognized_in_a_real_trace(shared_trace):
    """hipDeviceSynchronize is the last call of this trace, and returns with the last kernel."""
    a = Analysis(read_trace(shared_trace("mi210_gpu_only")))
    items = dict(a.host.filter(pl.col("thread") == a.trace.main_thread)["class", "ns"].iter_rows())
    last = a.trace.cpu.filter(pl.col("name") == "hipDeviceSynchronize")
    assert last.height == 1
    assert items["drain"] == pytest.approx(last["dur"][0], rel=0.05)
    assert "profiler" not in items


REAL = ["a100_train_6steps", "v100_train_copy_heavy", "two_ranks_rank0", "nccl_collectives",
        "h100_bert_small_inference", "b200_eager", "alexnet", "mi250_train", "mi210_gpu_only",
        "cupti_counters", "no_gpu_rank", "mi300x_kernels_after_steps"]  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_the_classes_of_each_thread_add_up_to_the_window(name, shared_trace):
    a = Analysis(read_trace(shared_trace(name)))
    sums = a.host.group_by("thread").agg(pl.col("ns").sum())
    assert sums.height >= 1
    assert set(sums["ns"]) == {a.steps.host_spans.total}
    assert (a.host["ns"] > 0).all()
    assert a.host.schema == pl.Schema(HOST_SCHEMA)


@pytest.mark.parametrize("name", ["h100_bert_small_inference", "mi250_train"])
def test_call_time_of_a_class_equals_its_rows(name, shared_trace):
    """Launch and allocation calls are leaves of the tree, so their rows' own times add up."""
    a = Analysis(read_trace(shared_trace(name)))
    cpu = a.trace.cpu.filter(pl.col("dur") > 0)
    from advisor.core.intervals import covered_length

    ts = cpu["ts"].to_numpy()
    inside = covered_length(ts, ts + cpu["dur"].to_numpy(), a.spans)
    calls = cpu["call"].is_in(["malloc", "free", "host_alloc", "host_free"]).fill_null(False)
    expected = int(inside[calls.to_numpy()].sum())
    assert a.host.filter(pl.col("class") == "allocation")["ns"].sum() == expected


def test_cuda_initialization_is_start_up_not_allocation(shared_trace):
    """AlexNet's first convolution takes 10.84 s, 6.01 of them in the first cudaFree, and its first
    pooling 0.83 s. Host and idle time call that the same."""
    a = Analysis(read_trace(shared_trace("alexnet")))
    host = dict(a.host.filter(pl.col("thread") == a.trace.main_thread)["class", "ns"].iter_rows())
    idle = dict(a.gaps.group_by("cause").agg(pl.col("dur").sum()).iter_rows())
    assert host["compile"] == pytest.approx(10.84e9 + 0.83e9, rel=0.005)
    assert idle["compile"] == pytest.approx(host["compile"], rel=0.005)
    assert host["allocation"] < 1.2e9


# -- the timeline ------------------------------------------------------------------------------


@st.composite
def trees(draw):
    """Nested and overlapping ranges on two threads, as raw events: (thread, start, duration)."""
    count = draw(st.integers(1, 12))
    return [
        (draw(st.integers(1, 2)), draw(st.integers(0, 30)), draw(st.integers(0, 15)))
        for _ in range(count)
    ]


@settings(max_examples=60, deadline=None)
@given(trees())
def test_the_timeline_is_the_innermost_operator_at_each_instant(events):
    b = TraceBuilder(gpu=None)
    for number, (thread, start, dur) in enumerate(events):
        b.events.append(
            {
                "ph": "X",
                "cat": "cpu_op",
                "name": f"op{number}",
                "pid": 1,
                "tid": thread,
                "ts": start,
                "dur": dur,
                "args": {},
            }
        )
    a = b.analysis()
    cpu, line = a.trace.cpu, a.timeline
    ts, end = cpu["ts"].to_numpy(), (cpu["ts"] + cpu["dur"]).to_numpy()
    owner = cpu["thread"].to_numpy()
    for thread in range(a.trace.threads.height):
        for instant in range(500, int(end.max()) + 500, 1000):
            seen = line.pieces_within([thread], [instant], [instant + 1])
            assert len(seen.interval) == 1
            inside = np.flatnonzero((owner == thread) & (ts <= instant) & (end > instant))
            assert int(seen.row[0]) == (int(inside[-1]) if len(inside) else -1)
    # back to back, from the first instant to the last, on each thread
    begin, finish = line.start, line.end
    same = line.thread[1:] == line.thread[:-1]
    assert (begin[1:][same] == finish[:-1][same]).all()
    assert (finish > begin).all()


def test_missing_thread_is_unrecorded():
    b = TraceBuilder(gpu=None)
    with b.op("aten::mm"):
        b.host(10)
    seen = b.analysis().timeline.pieces_within([-1, 0, 99], [0, 0, 0], [5, 5, 5])
    assert seen.interval.tolist() == [0, 1, 2]
    assert [CLASSES[code] for code in seen.code] == ["unrecorded", "dispatch", "unrecorded"]


# -- hot spots ---------------------------------------------------------------------------------


def test_python_time_goes_to_the_users_innermost_function():
    b = TraceBuilder(launch_us=5, latency_us=3)
    with b.step(), b.python("train.py(1): main"):
        for _ in range(2):
            with b.python("metrics.py(8): update"), b.python("json/encoder.py(4): encode"):
                b.host(100)
        with b.op("aten::mm", host_us=50):
            b.launch("gemm", 10)
        b.host(30)
    spots = python_hot_spots(b.analysis())
    # the code between the calls of main, which launches the work too, is nobody's
    assert spots["name"].to_list() == ["metrics.py(8): update"]
    # each frame takes 0.5 us before and after what it contains
    assert spots["critical_ns"].to_list() == [2 * 102_000]
    assert spots["count"].to_list() == [2]
    first = spots.row(0, named=True)
    assert (first["file"], first["line"], first["function"]) == ("metrics.py", 8, "update")
    assert spots.schema == pl.Schema(HOT_SCHEMA)


def test_python_time_is_critical_only_while_the_device_is_idle():
    b = TraceBuilder(launch_us=5, latency_us=3)
    with b.step(), b.python("train.py(1): main"):  # 0
        b.launch("gemm", 100)  # called at 0.5, runs 8.5 .. 108.5
        with b.python("train.py(9): prepare"):
            b.host(150)  # until 156.5
        b.launch("gemm", 10)
        b.sync()
    a = b.analysis()
    (spot,) = python_hot_spots(a).iter_rows(named=True)
    assert spot["critical_ns"] == 48_000  # from 108.5, the end of the first
    between = python_gaps(a).filter(pl.col("frame").is_null())["dur"].sum()
    assert 0 < between < 3_000  # main's own


def test_without_stacks_there_are_no_hot_spots():
    b = TraceBuilder()
    with b.step(), b.op("aten::mm"):
        b.host(10)
    assert python_hot_spots(b.analysis()).is_empty()


@pytest.mark.parametrize("name", ["h100_bert_small_inference", "b200_eager"])
def test_hot_spots_hold_python_gaps_without_kernels(name, shared_trace):
    a = Analysis(read_trace(shared_trace(name)))
    table, cpu, gpu = python_gaps(a), a.trace.cpu, a.trace.gpu
    assert table["dur"].sum() >= 0.95 * a.gaps.filter(cause="python")["dur"].sum()
    assert python_hot_spots(a)["critical_ns"].sum() == table.drop_nulls("frame")["dur"].sum()
    launched = cpu[gpu["launch"].drop_nulls()]["ts"].to_numpy()
    work = gpu.filter(pl.col("launch").is_not_null())["dur"].to_numpy()
    for row in table["frame"].drop_nulls().unique():
        ts, dur = cpu["ts"][row], cpu["dur"][row]
        assert work[(launched >= ts) & (launched < ts + dur)].sum() <= 0.051 * work.sum()


def test_hottest_line_of_b200_step_is_its_quantized_experts(shared_trace):
    top = python_hot_spots(Analysis(read_trace(shared_trace("b200_eager")))).row(0, named=True)
    assert top["file"] == "flashinfer/fused_moe/core.py"
    assert (top["function"], top["count"]) == ("trtllm_fp4_block_scale_moe_op", 36)  # a layer each


def test_frame_preparation_is_attributed_to_its_slow_part(shared_trace):
    """The stacks of the file show 267 ms of preprocessing: 160 ms in 128 calls for images, 54 ms
    for reading the video."""
    spots = python_hot_spots(Analysis(read_trace(shared_trace("mi300_timesformer_inference"))))
    assert spots["function"].head(2).to_list() == ["_preprocess_image", "read_video_pyav"]
    assert spots["critical_ns"].head(2).to_list() == pytest.approx([160e6, 54e6], rel=0.01)
    assert spots["count"].head(2).to_list() == [128, 1]
    assert not {"run_on_input", "run_torch_profiler"} & {*spots["function"]}


def test_call_is_found_by_time_share_of_its_line():
    """Sixty of a hundred samples wait in the backward pass, thirty in line 12, ten in line 13 and
    below it in a library."""
    main = "train.py(40): main"
    stacks = [
        SampledStack(60, (main, "train.py(20): step", "torch/_tensor.py(631): Tensor.backward")),
        SampledStack(30, (main, "train.py(12): step")),
        SampledStack(10, (main, "train.py(13): step", "torch/nn/functional.py(9): relu")),
    ]

    def line(share, of=stacks):
        result = line_of_share(of, share)
        return None if result is None else (result.location.line, result.share)

    assert line(0.33) == (12, 0.3) and line(0.7) == (20, 0.6)
    assert line(0.2) is None  # as near to line 12 as to line 13
    assert line(0.45) is None  # nothing takes so much
    assert line(0.1) is None  # too little
    assert line(0.33, [stack._replace(samples=2) for stack in stacks]) is None  # six samples


def test_line_is_named_by_the_calling_function():
    names = {"aten::_unique2": "unique", "_unique_impl": "unique", "aten::nonzero": "nonzero"}
    names |= {"aten::fft_rfft": "rfft", "torch.fft.rfft": "rfft", "aten::linalg_norm": "norm"}
    assert {name: normalize_operator_name(name) for name in names} == names
    checks = ("torchmetrics/functional/stat.py(5): _check", "torch/functional.py(9): _unique_impl")
    stacks = [
        SampledStack(20, ("train.py(30): main", "train.py(40): step", *checks)),
        SampledStack(2, ("train.py(30): main", "torch/functional.py(9): _unique_impl")),
        SampledStack(18, ("train.py(30): main", "train.py(41): unique")),  # the user's own
    ]
    result = line_of_function(stacks, "unique")
    assert result is not None and (result.location.line, result.share) == (40, 0.5)
    assert result.library_function == "_check (torchmetrics/functional/stat.py)"
    assert line_of_function(stacks, "bincount") is None
    assert line_of_function([stack._replace(samples=3) for stack in stacks], "unique") is None
    two = [stacks[0], stacks[1]._replace(samples=20)]
    assert line_of_function(two, "unique") is None  # two lines share it
    in_c = [SampledStack(20, ("train.py(30): main", "train.py(50): push"), "torch.cat")]
    result = line_of_function([*stacks, *in_c], "cat")
    assert result is not None and (result.location.line, result.location.function) == (50, "push")
    numpy = [SampledStack(20, in_c[0].frames, "numpy.cat")]
    assert line_of_function([*stacks, *numpy], "cat") is None


@pytest.mark.parametrize("name", ["big_uploads", "blocking_upload"])
def test_copy_is_attributed_to_its_planted_line_without_stacks(name):
    path = CORPUS / "h100" / "programs" / f"{name}.py"
    planted = [n for n, code in enumerate(path.read_text().splitlines(), 1) if "# FAULT" in code]
    report = analyze(CORPUS / "h100" / name, Options(config={}))
    place = report.findings[0].where[0]
    assert [place.line] == planted and place.file is not None and place.file.endswith(f"{name}.py")
    assert place.sampled_share is not None and place.op == "aten::copy_"


def test_range_around_backward_waits_for_an_unrecorded_thread(shared_trace):
    """``## backward ##`` lasts 34.2 ms, with two short nodes of autograd before other threads."""
    a = Analysis(read_trace(shared_trace("no_gpu_rank")))
    class_times = classes(a, a.trace.main_thread)
    assert class_times["autograd"] == pytest.approx(34_160, rel=0.01)


def test_first_stream_setup_is_no_dispatch(shared_trace):
    """The first cudaStreamCreateWithFlags takes 1.30 s."""
    a = Analysis(read_trace(shared_trace("cupti_counters")))
    assert classes(a, a.trace.main_thread)["compile"] == pytest.approx(1_300_411, rel=0.01)
