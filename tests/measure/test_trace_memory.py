"""Memory: peaks per step, allocating calls, recomputation; oracles by hand and by brute force."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.measure import Analysis
from advisor.measure.memory.trace_memory import ALLOCATIONS_SCHEMA, MEMORY_SCHEMA, find_recompute
from advisor.read import read_trace
from advisor.testing import TraceBuilder

GIB = 1 << 30
FORWARD = "torch/utils/checkpoint.py(354): checkpoint"
UNPACK = "torch/utils/checkpoint.py(1165): unpack_hook"
AGAIN = "torch/utils/checkpoint.py(1657): recompute_fn"
NODE = "autograd::engine::evaluate_function: ReluBackward0"


# -- peaks -------------------------------------------------------------------------------------


def test_the_peak_of_a_step_is_the_largest_total_in_it() -> None:
    b = TraceBuilder("A100")
    for top in (5, 3):
        with b.step():
            b.launch("gemm", 10)
            b.memory(GIB, 2 * GIB, 6 * GIB)
            b.memory((top - 2) * GIB, top * GIB, (top + 4) * GIB)
            b.memory(-top * GIB, 0, (top + 4) * GIB)
            b.host(100)
    table = b.analysis().memory
    assert dict(table.schema) == MEMORY_SCHEMA
    # the second step starts with 9 GiB reserved: what the first one left
    assert table["peak_allocated"].to_list() == [5 * GIB, 3 * GIB]
    assert table["peak_reserved"].to_list() == [9 * GIB, 9 * GIB]
    assert table["capacity"].to_list() == [85_094_825_984] * 2
    assert table["step"].to_list() == [0, 1]


def test_memory_allocated_before_a_step_still_counts_in_it() -> None:
    b = TraceBuilder()
    with b.step():
        b.memory(7 * GIB, 7 * GIB, 8 * GIB)
        b.host(10)
    with b.step():
        b.host(10)
    assert b.analysis().memory["peak_allocated"].to_list() == [7 * GIB, 7 * GIB]


def test_free_event_gives_the_earlier_allocated_total() -> None:
    b = TraceBuilder()
    with b.step():
        b.memory(-4 * GIB, 1 * GIB, 8 * GIB)
        b.host(10)
    assert b.analysis().memory["peak_allocated"].to_list() == [5 * GIB]


def test_step_before_the_first_event_has_no_peak() -> None:
    b = TraceBuilder()
    with b.step():
        b.host(10)
    with b.step():
        b.memory(GIB, GIB, GIB)
        b.host(10)
    assert b.analysis().memory["peak_allocated"].to_list() == [None, GIB]
    assert b.analysis().memory["peak_reserved"].to_list() == [None, GIB]


def test_devices_are_apart_and_host_memory_is_none() -> None:
    b = TraceBuilder("V100")
    with b.step():
        b.memory(GIB, GIB, GIB, device=0)
        b.memory(GIB, 3 * GIB, 4 * GIB, device=1)
        b.memory(GIB, 50 * GIB, 0, device=0)
        b.events[-1]["args"]["Device Type"] = 0
        b.host(10)
    table = b.analysis().memory
    assert table.select("device", "peak_allocated").rows() == [(0, GIB), (1, 3 * GIB)]
    # only device 0 is described in the file
    assert table["capacity"].to_list() == [16_945_512_448, None]


def test_allocator_without_reserved_memory_reports_none() -> None:
    b = TraceBuilder()
    with b.step():
        b.memory(GIB, GIB, 0)
        b.host(10)
    assert b.analysis().memory.row(0)[2:4] == (GIB, None)


def test_without_memory_events_the_table_is_empty() -> None:
    b = TraceBuilder()
    with b.step():
        b.launch("gemm", 10)
    assert b.analysis().memory.is_empty()
    assert dict(b.analysis().memory.schema) == MEMORY_SCHEMA


moves = st.lists(st.tuples(st.integers(0, 40), st.integers(-6, 9)), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(moves=moves)
def test_peaks_equal_a_replay_of_the_allocator(moves: list[tuple[int, int]]) -> None:
    b = TraceBuilder()
    allocated, history = 0, []
    clock = 0
    for wait, size in moves:
        size = max(size, -allocated)
        clock += wait
        allocated += size
        history.append((clock, size, allocated))
    for number in range(3):
        with b.step():
            b.host(200)
        start = 1000 + number * 200
        for at, size, total in history:
            if number * 200 <= at < (number + 1) * 200:
                now, b.now = b.now, start + at - number * 200
                b.memory(size, total, total + 10)
                b.now = now
    expected = []
    for number in range(3):
        low, high = number * 200, (number + 1) * 200
        levels = [total for at, _, total in history if low <= at < high]
        if history[0][0] < low:
            levels.append([total for at, _, total in history if at < low][-1])
        elif history[0][0] < high:
            levels.append(history[0][2] - history[0][1] if history[0][1] < 0 else 0)
        expected.append(max(levels, default=None))
    assert b.analysis().memory["peak_allocated"].to_list() == expected


# -- allocating calls --------------------------------------------------------------------------


def test_allocating_calls_are_listed_with_their_step_and_place() -> None:
    b = TraceBuilder()
    with b.step():
        with b.python("train.py(12): forward"), b.op("aten::empty"), b.python("torch/x.py(1): f"):
            b.call("cudaMalloc", 300)
        b.call("cudaLaunchKernel", 5)
    with b.step():
        b.call("cudaHostAlloc", 200)
        b.call("cudaFreeHost", 100)
        b.call("cudaFree", 50)
        b.call("cuMemCreate", 20)
    b.call("cudaMalloc", 70)
    a = b.analysis()
    table = a.allocations
    assert dict(table.schema) == ALLOCATIONS_SCHEMA
    assert table.select("call", "dur", "step").rows() == [
        ("malloc", 300_000, 0),
        ("host_alloc", 200_000, 1),
        ("host_free", 100_000, 1),
        ("free", 50_000, 1),
        ("malloc", 20_000, 1),
    ]
    cpu = a.trace.cpu
    first = table.row(0, named=True)
    assert str(cpu["name"][first["op"]]) == "aten::empty"
    assert str(cpu["name"][first["line"]]) == "train.py(12): forward"
    assert str(cpu["name"][first["host"]]) == "cudaMalloc"
    assert table.row(1, named=True)["op"] is None
    assert table.row(1, named=True)["line"] is None


def test_only_the_used_steps_count() -> None:
    b = TraceBuilder()
    for calls in (3, 0, 1):
        with b.step():
            for _ in range(calls):
                b.call("cudaMalloc", 10)
            b.host(100)
    assert b.analysis().allocations["step"].to_list() == [0, 0, 0, 2]
    assert Analysis(b.trace(), (1, None)).allocations["step"].to_list() == [2]
    assert Analysis(b.trace(), (1, 2)).allocations.is_empty()


def test_a_call_rounded_to_no_time_still_happened() -> None:
    b = TraceBuilder()
    with b.step():
        b.call("cudaMalloc", 0)
        b.host(10)
    assert b.analysis().allocations.height == 1


# -- recomputation -----------------------------------------------------------------------------


def forward(b: TraceBuilder, us: float = 100) -> None:
    with b.op("aten::addmm"):
        b.launch("gemm", us)


def checkpointed(*, reentrant: bool, steps: int = 2, stacks: bool = True) -> TraceBuilder:
    """A recording of torch 2.13: frames and nodes around what runs again, 100 µs per step; the
    forward pass is 100 µs too and the backward kernels 30 µs each."""
    b = TraceBuilder()
    for _ in range(steps):
        with b.step():
            if stacks:
                with b.python("train.py(3): step"), b.python(FORWARD):
                    forward(b)
            else:
                forward(b)
            if reentrant:
                with (
                    b.op("autograd::engine::evaluate_function: CheckpointFunctionBackward"),
                    b.op("CheckpointFunctionBackward"),
                ):
                    forward(b)
                    with b.op(NODE), b.op("ReluBackward0"):
                        b.launch("threshold_backward", 30)
            else:
                with b.op(NODE), b.op("ReluBackward0"):
                    if stacks:
                        with b.python(UNPACK), b.python(AGAIN):
                            forward(b)
                    else:
                        forward(b)
                    b.launch("threshold_backward", 30)
            b.sync()
    return b


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_is_the_forward_work_inside_backward(reentrant: bool) -> None:
    table = find_recompute(checkpointed(reentrant=reentrant).analysis())
    assert table is not None
    assert table.rows() == [(0, 1, 100_000, 100_000), (1, 1, 100_000, 100_000)]


def test_reentrant_recomputation_needs_no_stacks() -> None:
    table = find_recompute(checkpointed(reentrant=True, stacks=False).analysis())
    assert table is not None
    assert table["dur"].to_list() == [100_000, 100_000]


def test_forward_operators_inside_backward_are_recomputed() -> None:
    table = find_recompute(checkpointed(reentrant=False, stacks=False).analysis())
    assert table is not None
    assert table["dur"].to_list() == [100_000, 100_000]


def test_derivatives_with_own_operators_are_no_recomputation() -> None:
    b = TraceBuilder()
    with b.step():
        forward(b)
        with b.op(NODE), b.op("AddmmBackward0"), b.op("aten::mm"):
            b.launch("gemm", 30)
        b.sync()
    assert find_recompute(b.analysis()) is None


def test_checkpoint_without_backward_frames_is_not_reported() -> None:
    b = TraceBuilder()
    with b.step():
        with b.python(FORWARD):
            forward(b)
        with b.thread(2000), b.op(NODE):
            forward(b)
        b.sync()
    assert find_recompute(b.analysis()) is None


def test_stacks_without_checkpoint_show_no_recomputation() -> None:
    b = TraceBuilder()
    with b.step():
        with b.python("train.py(3): step"):
            forward(b)
        b.sync()
    table = find_recompute(b.analysis())
    assert table is not None
    assert table["dur"].to_list() == [0]


def test_backward_of_a_nested_checkpoint_is_recomputed_once() -> None:
    b = TraceBuilder()
    with b.step():
        with b.op("CheckpointFunctionBackward"):
            forward(b, 40)
            with b.op(NODE), b.op("CheckpointFunctionBackward"):
                forward(b, 50)
                with b.op(NODE):
                    b.launch("threshold_backward", 30)
        b.sync()
    table = find_recompute(b.analysis())
    assert table is not None
    assert table.row(0)[1:3] == (2, 90_000)


def test_a_collective_during_recomputation_is_not_compute() -> None:
    b = TraceBuilder()
    with b.step():
        with b.op("CheckpointFunctionBackward"):
            forward(b)
            b.collective("_allgather_base", 1 << 20, 500)
        b.sync()
    table = find_recompute(b.analysis())
    assert table is not None
    assert table["dur"].to_list() == [100_000]


def test_user_function_named_recompute_fn_is_not_counted() -> None:
    b = TraceBuilder()
    with b.step():
        with b.python("my/checkpoint.py(3): recompute_fn"):
            forward(b)
        b.sync()
    table = find_recompute(b.analysis())
    assert table is not None
    assert table["dur"].to_list() == [0]


def test_frames_of_a_recording_are_recognized(tmp_path: Path) -> None:
    """The names above, from the profiler itself: no device here, so kernels are put in by hand
    under every matrix product."""
    torch = pytest.importorskip("torch")
    from torch.profiler import ProfilerActivity, profile
    from torch.utils.checkpoint import checkpoint

    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    for reentrant in (True, False):
        x = torch.randn(4, 8, requires_grad=True)
        with profile(activities=[ProfilerActivity.CPU], with_stack=True) as p:
            checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
        path = tmp_path / "trace.json"
        p.export_chrome_trace(str(path))
        text = json.loads(path.read_text())
        products = [e for e in text["traceEvents"] if e.get("name") == "aten::addmm"]
        assert len(products) == 2  # forward, and again in backward
        for number, e in enumerate(products):
            args = {"correlation": 900_000 + number, "device": 0, "stream": 7}
            launch = {**e, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "dur": 0.1}
            kernel = {**e, "cat": "kernel", "name": "gemm", "dur": 3.0}
            text["traceEvents"] += [{**launch, "args": args}, {**kernel, "args": args}]
        path.write_text(json.dumps(text))
        table = find_recompute(Analysis(read_trace(str(path))))
        assert table is not None
        assert table["kernels"].sum() == 1


# -- real traces -------------------------------------------------------------------------------


def test_the_peak_of_a_real_trace_is_its_largest_device_total(shared_trace) -> None:  # type: ignore[no-untyped-def]
    path = shared_trace("h100_bert_small_inference")
    totals = [
        (e["args"]["Total Allocated"], e["args"]["Total Reserved"])
        for e in json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
        if e.get("name") == "[memory]" and e["args"]["Device Type"] == 1
    ]
    table = Analysis(read_trace(path)).memory
    assert table["peak_allocated"].max() == max(a for a, _ in totals)
    assert table["peak_reserved"].max() == max(r for _, r in totals)
    assert table["capacity"].to_list() == [85_018_279_936]


def test_a_healthy_real_training_step_allocates_nothing(shared_trace) -> None:  # type: ignore[no-untyped-def]
    a = Analysis(read_trace(shared_trace("a100_train_6steps")))
    assert a.allocations.is_empty()
    assert a.memory.is_empty()
    assert find_recompute(a) is None


def test_the_first_steps_of_a_real_script_allocate(shared_trace) -> None:  # type: ignore[no-untyped-def]
    path = shared_trace("alexnet")
    events = json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
    work = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    begin, end = (min(e["ts"] for e in work), max(e["ts"] + e["dur"] for e in work))
    names = [e["name"] for e in events if e.get("cat") == "cuda_runtime" and begin <= e["ts"] < end]
    assert names.count("cudaMalloc") == 23
    table = Analysis(read_trace(path)).allocations
    counts = dict(table.group_by("call").len().iter_rows())
    assert counts == {
        "malloc": names.count("cudaMalloc"),
        "free": names.count("cudaFree"),
        "host_alloc": names.count("cudaHostAlloc"),
    }
    assert table["ts"].is_sorted()
    assert (table["dur"] > 0).all()
