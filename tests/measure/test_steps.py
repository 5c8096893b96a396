"""The spans of time that are analysed: found, closed, set aside, selected."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import zstandard

from advisor.advise.engine import analyze, analyze_in_full
from advisor.core.finding import GUESSED_STEP_SOURCES
from advisor.core.trace import Trace
from advisor.measure import Analysis
from advisor.measure.steps.steps import find_steps, recorded_extent, step_of
from advisor.measure.steps.unmarked_steps import range_groups
from advisor.read import read_trace
from advisor.testing import TraceBuilder
from benchmarks.public_traces import CORPUS


def loop(lengths: list[float], between: float = 0.0) -> TraceBuilder:
    """Build a trace with one ProfilerStep of each length, us, and ``between`` after each."""
    b = TraceBuilder()
    for length in lengths:
        with b.step():
            b.host(length)
        b.host(between)
    return b


def test_a_step_lasts_until_the_next_one_starts():
    steps = find_steps(loop([100, 120, 110], between=5).trace())
    assert steps.source == "ProfilerStep"
    assert steps.table["name"].to_list() == ["ProfilerStep#0", "ProfilerStep#1", "ProfilerStep#2"]
    assert steps.table["dur"].to_list() == [105_000, 125_000, 110_000]
    assert steps.spans.total == 340_000
    assert len(steps.spans) == 1


def test_a_pause_between_steps_belongs_to_none():
    b = loop([100, 100])
    b.host(1000)  # an evaluation, say: more than half a step
    with b.step():
        b.host(100)
    steps = find_steps(b.trace())
    assert steps.table["dur"].to_list() == [100_000, 100_000, 100_000]
    assert len(steps.spans) == 2


def test_the_last_step_ends_with_the_work_it_launched():
    b = loop([100, 100])
    with b.step():
        b.launch("gemm", 400)  # called at 200, runs from 208 to 608
        b.host(95)
    steps = find_steps(b.trace())
    assert steps.table["end"][-1] == 608_000


def test_work_launched_after_the_last_step_does_not_lengthen_it():
    b = loop([100, 100])
    b.launch("gemm", 400)
    assert find_steps(b.trace()).table["end"][-1] == 200_000


def test_truncated_last_step_is_not_used():
    steps = find_steps(loop([100, 110, 90, 10]).trace())
    assert steps.table["used"].to_list() == [True, True, True, False]


def test_truncated_step_is_not_one_of_the_three_kept():
    # without the 10 there are three: the long one stays, however long it is
    steps = find_steps(loop([100, 1000, 90, 10]).trace())
    assert steps.table["used"].to_list() == [True, True, True, False]


def test_short_last_step_with_the_same_operators_is_used():
    b = TraceBuilder()
    for pause in (900, 10):
        with b.step():
            for _ in range(4):
                b.launch("gemm", 10)
            b.host(pause)
    assert find_steps(b.trace()).table["used"].to_list() == [True, True]


def recording_of(name: str) -> Path:
    return CORPUS / "h100" / name / "rank0" / "trace_w0.json.zst"


def read_content(file: Path) -> dict[str, Any]:
    with zstandard.open(file) as content:
        return json.load(content)


@pytest.mark.parametrize("kept", [1, 2])
@pytest.mark.parametrize("name", ["tab_cross_width", "vocabulary", "healthy_lm"])
def test_last_steps_alone_last_as_long_where_the_host_runs_ahead(name, kept, tmp_path):
    content = read_content(recording_of(name))
    whole, events = tmp_path / "whole.json", content["traceEvents"]
    whole.write_text(json.dumps(content))
    marks = {
        event["ts"]
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith("ProfilerStep#")
    }
    start = sorted(marks)[-kept]
    recorded = [e for e in events if e.get("ph") == "M" or e.get("ts", 0) >= start]
    part = tmp_path / "part.json"
    part.write_text(json.dumps(content | {"traceEvents": recorded}))
    expected, result = analyze_in_full(str(whole)), analyze_in_full(str(part))
    assert result.main.step_count == kept
    mean = expected.main.span_ns / expected.main.step_count
    assert result.main.span_ns / kept == pytest.approx(mean, rel=0.06)
    first, of_whole = ([f.rule for f in r.report.findings[:1]] for r in (result, expected))
    assert first == of_whole


def test_a_long_step_is_measured_but_set_aside():
    steps = find_steps(loop([400, 100, 101, 99, 100]).trace())
    assert steps.table["outlier"].to_list() == [True, False, False, False, False]
    assert steps.used["index"].to_list() == [1, 2, 3, 4]
    assert steps.table["dur"][0] == 400_000


def test_three_steps_stay_three_whatever_their_length():
    assert not find_steps(loop([100, 1000, 100]).trace()).table["outlier"].any()
    four = find_steps(loop([100, 1000, 100, 100]).trace())
    assert four.table["outlier"].to_list() == [False, True, False, False]


def test_steps_that_vary_a_lot_have_no_outlier():
    # median 200, distances to it 100, 100, 0, 100, 100: five of them allow 700
    assert not find_steps(loop([100, 100, 200, 300, 300]).trace()).table["outlier"].any()


@pytest.mark.parametrize(
    ("select", "expected"),
    [((1, 3), [1, 2]), ((None, 2), [0, 1]), ((-1, None), [3]), ((2, None), [2, 3]), ((9, 12), [])],
)
def test_a_range_of_steps_can_be_selected(select, expected):
    trace = loop([100, 100, 100, 100]).trace()
    assert find_steps(trace, select).used["index"].to_list() == expected


def test_a_selected_cut_off_step_alone_is_kept():
    assert find_steps(loop([100, 100, 10]).trace(), (2, 3)).used["index"].to_list() == [2]


def test_the_recorders_own_ranges_are_the_second_choice():
    b = TraceBuilder()
    for number in range(3):
        with b.range(f"advisor::step {number}"):
            b.host(100)
    assert find_steps(b.trace()).source == "recorder"


def optimizer_loop(names: list[str], steps: int) -> TraceBuilder:
    b = TraceBuilder()
    for _ in range(steps):
        b.host(90)
        for name in names:
            with b.range(name):
                b.host(10)
    return b


def test_unmarked_steps_last_between_optimizer_steps():
    steps = find_steps(optimizer_loop(["Optimizer.step#AdamW.step"], 5).trace())
    assert steps.source == "optimizer"
    assert steps.table["dur"].to_list() == [100_000] * 4


def test_two_optimizers_in_a_loop_are_one_step():
    names = ["Optimizer.step#Shampoo.step", "Optimizer.step#EMAOptimizer.step"]
    steps = find_steps(optimizer_loop(names, 5).trace())
    assert steps.table["dur"].to_list() == [110_000] * 4


@pytest.mark.parametrize("updates", [1, 2, 3])
def test_optimizers_of_one_class_are_one_step_if_their_operators_differ(updates):
    b = TraceBuilder()
    for _ in range(4):
        for number in range(updates):
            for layer in range(5 + 5 * number):
                with b.op("aten::conv2d" if layer % 2 else "aten::relu"):
                    b.host(10)
            with b.range("Optimizer.step#Adam.step"):
                b.host(10)
    steps = find_steps(b.trace())
    assert steps.source == "optimizer" and steps.table.height == 3
    assert np.ptp(steps.table["dur"].to_numpy()) == 0


def test_steps_without_marks_are_the_devices_if_the_hosts_vary(tmp_path):
    file = recording_of("healthy_lm")
    content = read_content(file)
    events = content["traceEvents"]
    unmarked = [e for e in events if not str(e.get("name")).startswith("ProfilerStep#")]
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps(content | {"traceEvents": unmarked}))
    steps = Analysis(read_trace(str(trace))).steps
    expected = Analysis(read_trace(str(file))).steps
    assert (steps.source, expected.source) == ("optimizer", "ProfilerStep")
    assert steps.used["dur"].mean() == pytest.approx(expected.used["dur"].mean(), rel=0.03)


def test_too_few_optimizer_steps_are_not_period():
    steps = find_steps(optimizer_loop(["Optimizer.step#AdamW.step"], 3).trace())
    assert steps.source == "whole trace"
    assert steps.table["dur"].to_list() == [300_000 - 90_000]  # from the first event to the last


def test_without_steps_the_devices_own_span_counts():
    b = TraceBuilder()
    b.overhead("Buffer Flush", 500)
    with b.op("aten::mm", host_us=10):
        b.launch("gemm", 50)  # 515 .. 565 after a call at 510; the op ends at 515.5
    trace = b.trace()
    assert recorded_extent(trace) == (500_000, 568_000)
    assert find_steps(trace).spans.total == 50_000


def test_recording_starts_at_queued_work_after_a_hole():
    b = TraceBuilder()
    with b.op("aten::copy_", host_us=10):
        b.launch("prologue", 2)
    with b.op("aten::mm", host_us=10):
        b.launch("gemm", 900, after=500_000)  # queued at once; what ran before it was cut out
    spans = find_steps(b.trace()).spans
    assert (spans.start[0], spans.total) == (499_000_000, 900_000)


@pytest.mark.parametrize("waits", [True, False])
def test_work_launched_before_the_recording_is_always_cut(waits: bool):
    b = TraceBuilder()
    with b.step():
        for number in range(10):  # 1000 .. 5990, launched before
            b._device("kernel", "earlier", 490, 7, 1000 + number, {}, 1000 + 500 * number)
        if waits:
            b.host(4000)
            b.sync()
        else:
            b.host(4000)
        with b.op("aten::mm", host_us=10):
            b.launch("gemm", 900)  # 5990 .. 6890 unless the host waited
    steps = find_steps(b.trace())
    assert steps.table["ts"].to_list() == [4_990_000]


def test_work_of_no_length_is_counted():
    b = TraceBuilder()
    with b.op("aten::mm", host_us=10):
        b.launch("gemm", 50)
    with b.op("aten::fill_", host_us=10):
        b.launch("fill", 0)
    with b.op("aten::mm", host_us=10):
        b.launch("gemm", 50)
    assert int(Analysis(b.trace()).in_window.sum()) == 3


def test_steps_of_another_thread_are_not_mixed_in():
    b = loop([100, 100, 100])
    with b.thread(2000), b.range("ProfilerStep#7"):
        b.host(100)
    assert find_steps(b.trace()).table.height == 3


def test_step_of_an_instant_and_first_step_of_an_interval():
    steps = find_steps(loop([400, 100, 101, 99, 100]).trace())  # step 0 is set aside
    at = np.array([0, 400_000, 499_999, 500_000, 799_999, 800_000])
    assert step_of(steps, at).to_list() == [None, 1, 1, 2, 4, None]
    start, end = np.array([300_000, 300_000]), np.array([400_000, 400_001])
    assert step_of(steps, start, end).to_list() == [None, 1]


def test_no_instants_and_no_steps_are_not_trouble():
    trace = loop([100]).trace()
    assert len(step_of(find_steps(trace), np.zeros(0, dtype=np.int64))) == 0
    assert step_of(find_steps(trace, (5, 6)), np.array([3])).to_list() == [None]


@pytest.mark.parametrize(
    ("name", "source", "count", "window_ms"),
    [
        # ProfilerStep starts to the end of the last one's device work, read from the files by hand
        ("a100_train_6steps", "ProfilerStep", 6, 465.171),
        ("v100_train_copy_heavy", "ProfilerStep", 6, 745.277),
        ("h100_bert_small_inference", "ProfilerStep", 1, 4.426),
        ("mi250_train", "ProfilerStep", 1, 9.325),
    ],
)
def test_steps_of_real_traces(name, source, count, window_ms, shared_trace):
    a = Analysis(read_trace(shared_trace(name)))
    assert (a.steps.source, a.step_count) == (source, count)
    assert a.span_ns / 1e6 == pytest.approx(window_ms, abs=1e-3)
    names = a.steps.used.select(pl.col("name").str.contains(r"^ProfilerStep#\d+$"))
    assert names.to_series().all()


def program(iterations: int = 10, *, start_up: bool = True) -> TraceBuilder:
    """A solver without marks: start-up runs some of the loop's kernels, then the loop."""
    b = TraceBuilder()
    if start_up:
        for kernel in ("init", "spmv", "axpy"):
            b.launch(kernel, 30)
        b.host(5_000)
    for _ in range(iterations):
        for kernel in ("spmv", "dot", "axpy", "dot", "norm"):
            b.launch(kernel, 200)
        b.sync()
        b.host(400)
    return b


def without_marks(b: TraceBuilder) -> Trace:
    trace = b.trace()
    return replace(trace, meta=replace(trace.meta, format="nsys"))


def test_a_start_up_fragment_is_not_a_step():
    steps = find_steps(without_marks(program()))
    assert steps.source in GUESSED_STEP_SOURCES
    used = steps.used["dur"].to_numpy() / 1e3
    assert 9 <= len(used) <= 10  # of the last one, nothing says when the next would have begun
    assert used == pytest.approx(np.full(len(used), np.median(used)), rel=0.05)


def test_repetition_is_found_despite_waiting_collectives(
    shared_file: Callable[[str], str],
) -> None:
    """50 steps after 12.4 s of start-up; their collectives take 20 to 49 ms each step."""
    report = analyze(shared_file("rocprof/rocprofv3_mi350x_training.json.gz"))
    assert (report.per, report.scope.steps_found) == ("repetition", 50)
    assert report.busy_share == pytest.approx(0.82, abs=0.01)
    assert any("12.7 s before the repetitions are left out" in limit for limit in report.limits)


def test_guessed_steps_repeat_and_candidate_ranges_are_named():
    b = TraceBuilder()
    for layer in range(12):
        with b.range(f"layer {layer}"):
            for kernel in ("gemm", "softmax", "gemm2"):
                b.launch(kernel, 200)
    trace = without_marks(b)
    a = Analysis(trace)
    assert (a.steps.source, a.per) == ("repeating ranges", "repetition")
    (group,) = range_groups(trace)
    assert (group.name, group.marks.height, group.is_step_range) == ("layer 0", 12, False)
    assert group.share == pytest.approx(1.0)


def test_ranges_that_the_program_calls_steps_are_steps():
    b = TraceBuilder()
    for number in range(5):
        with b.range(f"train_step {number}"):
            b.launch("gemm", 200)
    a = Analysis(without_marks(b))
    assert (a.steps.source, a.per) == ("ranges", "step")
