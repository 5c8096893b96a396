"""Named stretches of a step: before its first device work, and across graph breaks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import advisor
from advisor.core.finding import Edit, Select
from advisor.measure import Analysis
from advisor.measure.steps.named_intervals import (
    broken_regions,
    graph_breaks,
    step_starts,
    without_gradient,
)
from advisor.read import read_trace
from advisor.replay.exposed_time import exposed_intervals
from advisor.testing import TraceBuilder

CORPUS = Path(__file__).parents[1] / "corpus"


def test_step_start_lasts_to_its_first_launched_work() -> None:
    b = TraceBuilder(launch_us=5, latency_us=3)
    for _ in range(3):
        with b.step():
            b.host(100)
            with b.op("aten::mm", host_us=2):
                b.launch("gemm", 50)
            b.sync()
    # 100 of host, 2 of operator, 5 of launch call, 3 of latency
    assert step_starts(b.analysis()).total == 3 * 110_000


def test_work_queued_by_the_step_before_is_not_counted() -> None:
    b = TraceBuilder(launch_us=5, latency_us=3)
    with b.step():
        b.launch("gemm", 500)
    with b.step():
        b.host(100)
        b.launch("gemm", 50)
    # the host runs ahead, so steps begin with the device's work, at 8 and 508; the second launch
    # is in the first of them
    starts = step_starts(b.analysis())
    assert (starts.start.tolist(), starts.end.tolist()) == ([8_000], [508_000])


def test_window_without_steps_or_device_has_no_step_starts() -> None:
    b, host = TraceBuilder(), TraceBuilder(gpu=None)
    with b.op("aten::mm"):
        b.launch("gemm", 50)
    with host.step():
        host.host(100)
    assert len(step_starts(b.analysis())) == 0
    assert len(step_starts(host.analysis())) == 0


def test_graph_break_lasts_until_the_next_graph_starts() -> None:
    b = TraceBuilder()
    with b.step(), b.op("Torch-Compiled Region: 0/0", host_us=10):
        with b.op("CompiledFunction", host_us=50):
            pass
        b.host(30)  # what broke the graph
        with b.op("TorchDynamo Cache Lookup", host_us=4):
            pass
        with b.op("Torch-Compiled Region: 1/0", host_us=10), b.op("CompiledFunction", host_us=50):
            pass
    a = b.analysis()
    assert len(broken_regions(a)) == 1
    # 30, the lookup's 4 + 0.5, and 10 on the way into the next function
    assert graph_breaks(a).total == 44_500


def test_a_gap_selector_at_a_moment_gains_the_part_inside_it() -> None:
    b = TraceBuilder(launch_us=5, latency_us=3)
    for _ in range(3):
        with b.step():
            with b.python("train.py(3): prepare"):
                b.host(99)  # and 0.5 on either side
            b.launch("gemm", 50)
            b.sync()
            with b.python("train.py(9): log"):
                b.host(199)
    a = b.analysis()

    def idle_ns(at: Any) -> int:
        return exposed_intervals(
            a, Edit(op="remove", select=Select(on="gap", cause=("python",), at=at))
        ).total

    assert idle_ns("step_start") == 3 * 100_000
    assert idle_ns("") == 3 * 300_000
    assert idle_ns("graph_break") == 0


def test_region_after_a_graph_break_is_nested_in_the_one_before(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch.profiler import ProfilerActivity, profile

    class ModelWithBreak(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            x = torch.relu(self.layer(x))
            torch._dynamo.graph_break()
            x = torch.relu(self.layer(x))
            torch._dynamo.graph_break()
            return self.layer(x)

    model, x = ModelWithBreak(), torch.randn(4, 8)
    breaks = torch._dynamo.explain(model)(x).graph_break_count
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(3):
        compiled(x).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        compiled(x).sum().backward()
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    a = Analysis(read_trace(path))
    assert breaks == 2
    assert len(broken_regions(a)) == breaks
    assert 0 < graph_breaks(a).total < a.span_ns


def test_region_without_gradient_is_one_normalized_graph() -> None:
    """A graph convolution normalises its graph (one ``pow_``, one ``nonzero`` whose size is read),
    then multiplies by its weights, which have a gradient."""
    run = advisor.open(CORPUS / "h100" / "citation_gcn")
    a = Analysis(next(iter(run.traces.values())))
    result = without_gradient(a)
    cpu = a.trace.cpu.select("ts", pl.col("name").cast(pl.String))

    def interval_of_calls(name: str) -> list[int]:
        ts = cpu.filter(pl.col("name") == name)["ts"].to_numpy()
        place = np.searchsorted(result.start, ts, side="right") - 1
        return place[(place >= 0) & (ts < result.end[np.maximum(place, 0)])].tolist()

    # 3 in each of 5 steps, but that the recording begins in one
    assert len(result) == 14
    assert interval_of_calls("aten::pow_") == interval_of_calls("aten::nonzero") == list(range(14))
    assert (
        not interval_of_calls("aten::mm")
        and not interval_of_calls("aten::scatter_add")
        and not interval_of_calls("aten::relu")
    )
