"""Work that the longer half of the steps has more of than the shorter half."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable

import numpy as np
import polars as pl
import pytest

from advisor.advise.engine import Options, analyze
from advisor.advise.recording_limits import longer_steps
from advisor.measure import Analysis
from advisor.measure.steps.step_differences import compare_halves
from advisor.read import read_trace
from advisor.testing import TraceBuilder

Shared = Callable[[str], str]


def steps(*loads: float, kernels: tuple[int, ...] | None = None) -> TraceBuilder:
    """A step each: a wait of so many µs for the loader, and one or more products of 1 ms."""
    b = TraceBuilder()
    for load, count in zip(loads, kernels or (1,) * len(loads), strict=True):
        with b.step():
            if load:
                b.loader_wait(load)
            for _ in range(count):
                with b.op("aten::mm"):
                    b.launch("gemm", 1000)
            b.sync()
    return b


def test_the_difference_of_the_halves_is_identified_by_cause():
    a = steps(0, 2000, 100, 2500, 0, 3000).analysis()
    differences = compare_halves(a)
    assert differences is not None
    # halves: 0, 100, 0 and 2000, 2500, 3000
    assert differences.difference_ns == pytest.approx(1e3 * (7500 - 100) / 3, rel=0.01)
    (loader,) = differences.classes
    assert (loader.name, loader.ns) == (
        "idle: loader",
        pytest.approx(differences.difference_ns, rel=0.02),
    )
    assert differences.work == []
    assert "(data loader) 2.47 ms" in longer_steps(a)


def test_steps_that_run_more_work_are_reported_as_such():
    a = steps(0, 0, 0, 0, kernels=(1, 3, 1, 3)).analysis()
    differences = compare_halves(a)
    assert differences is not None
    (product,) = differences.work
    assert (product.name, product.short_count, product.long_count) == ("gemm", 1, 3)
    assert product.ns == pytest.approx(2e6, rel=0.01)
    assert "1 times in a shorter step, 3 in a longer one" in longer_steps(a)


def test_without_a_device_the_main_threads_time_counts():
    b = TraceBuilder(gpu=None)
    for load, mul in ((500, 100), (3500, 900), (500, 100), (3500, 900)):
        with b.step():
            b.loader_wait(load)
            with b.op("aten::mul", host_us=mul):
                pass
    differences = compare_halves(b.analysis())
    assert differences is not None
    assert [part.name for part in differences.classes] == ["host: loader", "host: dispatch"]
    assert differences.classes[0].ns == pytest.approx(3e6, rel=0.01)
    (mul,) = differences.work
    assert (mul.name, mul.short_count, mul.long_count) == ("aten::mul", 1, 1)
    assert mul.ns == pytest.approx(8e5, rel=0.01)


@pytest.mark.parametrize("loads", [(0, 0, 0, 0, 0), (100, 150, 120, 90), (0, 3000, 0)])
def test_even_steps_and_few_steps_have_no_halves(loads: tuple[float, ...]):
    assert compare_halves(steps(*loads).analysis()) is None


def test_long_steps_of_a_real_recording_are_explained(shared_trace: Shared):
    path = shared_trace("v100_train_copy_heavy")
    report = analyze(path, Options(config={})).step_variation
    assert report is not None
    # by the file's own rows: the collectives that start inside each step
    with gzip.open(path) as file:
        events = json.loads(file.read())["traceEvents"]
    a = Analysis(read_trace(path))
    mark = a.trace.cpu.filter(pl.col("name").cast(pl.String).str.starts_with("ProfilerStep#"))[0]
    (same,) = {
        e["ts"]
        for e in events
        if e.get("name") == mark["name"][0] and str(e.get("cat")).lower() != "gpu_user_annotation"
    }
    shift = same - mark["ts"][0] / 1e3
    reduce = [
        (e["ts"] - shift, e["dur"])
        for e in events
        if "AllReduce" in str(e.get("name")) and str(e.get("cat")).lower() == "kernel"
    ]
    used = a.steps.used
    order = np.argsort(used["dur"].to_numpy(), kind="stable")
    starts, ends = used["ts"].to_numpy() / 1e3, used["end"].to_numpy() / 1e3
    each = [sum(d for t, d in reduce if s <= t < e) for s, e in zip(starts, ends, strict=True)]
    half = len(order) // 2
    more = np.mean([each[i] for i in order[-half:]]) - np.mean([each[i] for i in order[:half]])
    (all_reduce,) = [part for part in report.work if "AllReduce" in part.name]
    assert all_reduce.ns / 1e3 == pytest.approx(more, rel=0.02)
