"""The brute force that says how much of waiting and idle time a replay explains."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from explained_time import SHORT_NS, explained_time, idle, waits
from rewriting import events, load

from advisor import Analysis
from advisor.core.finding import Edit, Select
from advisor.read import read_trace
from advisor.replay.graph import NEVER, EdgeKind, NodeKind
from advisor.replay.replay import ReplayPlan
from advisor.replay.window_replayer import WindowReplayer
from advisor.testing import TraceBuilder

Find = Callable[[str], str]


@functools.lru_cache(maxsize=8)
def replay(path: str) -> WindowReplayer:
    return WindowReplayer(Analysis(read_trace(path)))


def test_a_call_waits_for_the_device_whatever_its_name(shared_trace: Find) -> None:
    """``hipMemcpyWithStream``: 94.4 ms for the attention before it, 1.7 ms for its own copy."""
    replayer = replay(shared_trace("mi300_timesformer_inference"))
    row, waited = waits(replayer.a, replayer.graph)
    names = replayer.a.trace.cpu["name"].gather(row).cast(str).to_list()
    assert names == ["hipMemcpyWithStream"] * 2
    assert waited.max() / 1e6 == pytest.approx(94.4, abs=0.1)


def test_a_pageable_copy_waits_for_the_work_before_it(shared_trace: Find) -> None:
    """Read from the file, by hand: each upload's call holds the host from its start until the
    copy begins, when the step before is done; it returns before the copy has ended."""
    path = shared_trace("pairs/loader_profiler_workers4")
    complete_events = [e for e in events(load(path)) if e.get("ph") == "X"]
    copies = {
        e["args"]["correlation"]: e["ts"]
        for e in complete_events
        if e.get("cat") == "Memcpy" and "HtoD (Pageable" in e["name"]
    }
    copy_waits = [
        copies[e["args"]["correlation"]] - e["ts"]
        for e in complete_events
        if e["name"] == "cudaMemcpyAsync" and e["args"].get("correlation") in copies
    ]
    uploads = [us for us in copy_waits if us > 1_000]
    assert len(uploads) == 6
    replayer = replay(path)
    _, waited = waits(replayer.a, replayer.graph)
    assert np.sort(waited)[-6:] / 1e3 == pytest.approx(sorted(uploads), abs=1)


def test_copied_waits_are_unexplained_despite_a_right_total(
    shared_trace: Find,
) -> None:
    replayer = replay(shared_trace("a100_train_6steps"))
    graph = replayer.graph
    released = graph.kind[graph.dst] == NodeKind.SYNC_END
    weight = graph.weight.copy()
    weight[released & (graph.edge == EdgeKind.SYNC)] = NEVER
    copied = released & (graph.edge == EdgeKind.PROGRAM)
    weight[copied] = (graph.time[graph.dst] - graph.time[graph.src])[copied]
    plan = ReplayPlan(replace(graph, weight=weight))
    assert plan.run()[graph.step_boundaries] == pytest.approx(
        graph.time[graph.step_boundaries], rel=0.03
    )
    after_change, before = (
        explained_time(replayer.a, plan),
        explained_time(replayer.a, replayer.plan),
    )
    assert after_change.waited == before.waited > 0.1 * replayer.a.step_ns
    assert after_change.waits_explained == 0
    assert before.waits_explained is not None
    assert before.waits_explained > 0.9


def test_idle_time_left_without_host_time_is_unexplained(
    shared_trace: Find,
) -> None:
    """Launches that are late by themselves: all host time is taken for latency."""
    replayer = replay(shared_trace("pairs/loader_profiler_workers0"))
    graph = replayer.graph
    before = explained_time(replayer.a, replayer.plan)
    launch = graph.edge == EdgeKind.LAUNCH
    weight = graph.weight.copy()
    weight[launch] = (graph.time - graph.dur)[graph.dst[launch]]
    source = np.where(launch, 0, graph.src)
    result = explained_time(replayer.a, ReplayPlan(replace(graph, weight=weight, src=source)))
    assert result.idle == before.idle
    assert before.idle_explained is not None
    assert before.idle_explained > 0.9
    gap = idle(graph, graph.time)[1]
    between_kernels = float(gap[gap <= SHORT_NS].sum() / gap.sum())
    assert between_kernels < 0.1
    assert result.idle_explained == pytest.approx(between_kernels, abs=0.01)


@pytest.mark.parametrize("ahead_us", [0.0, 6.0])
def test_wait_ending_before_its_work_is_still_a_wait(tmp_path: Path, ahead_us: float) -> None:
    """Nsight Systems may put device work 7 µs later than the host's clock has it: then the call
    returns before the short copy even begins that it waited for."""
    b = TraceBuilder(cuda_sync_rows=True)
    for _ in b.steps(5):
        for _ in range(20):
            b.launch("gemm", 400)
        b.copy("HtoD", 8, 0.8, pinned=True)
        b.sync("cudaStreamSynchronize", stream=7)
        b.host(300)
    on_device = ("kernel", "gpu_memcpy", "gpu_memset")
    for event in b.events:
        if event.get("cat") in on_device:
            event["ts"] += ahead_us
    replayer = replay(str(b.write(tmp_path / "trace.json")))
    quality = replayer.quality
    assert not replayer.unusable_reason
    assert quality.step_error < 0.01
    assert quality.waits > 0.8
    assert quality.waits_explained is not None and quality.waits_explained > 0.99
    halved = Edit(op="scale", select=Select(on="gpu", name="gemm"), factor=0.5)
    assert replayer.gain([halved]) == pytest.approx(20 * 200e3, rel=0.02)
