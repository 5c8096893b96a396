"""Public traces replayed: unchanged they come out as measured, and fixes at what can be worked out
by hand. What the figures mean is in docs/whatif.md."""

from __future__ import annotations

import functools
import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from naive_twin import naive_twin
from whatif_by_hand import Job

from advisor.advise.engine import analyze
from advisor.measure import Analysis
from advisor.read import open_run, read_trace
from advisor.replay.edit_language import parse_edit
from advisor.replay.window_replayer import WindowReplayer
from advisor.testing import TraceBuilder

Find = Callable[[str], str]

NAMED = ["a100_train_6steps", "nccl_collectives", "h100_bert_small_inference", "b200_eager"]
OTHERS = [
    "alexnet",
    "event_sync",
    "event_sync_multi_stream",
    "mi210_gpu_only",
    "mi250_train",
    "mi300_torch_compile",
    "simple_add",
    "two_ranks_rank0",
    "two_ranks_rank1",
    "v100_train_copy_heavy",
]


@functools.lru_cache(maxsize=16)
def replayed(path: str) -> WindowReplayer:
    return WindowReplayer(Analysis(read_trace(path)))


def impact(replayer: WindowReplayer, *lines: str) -> float:
    """The gain of edits, as a share of the measured step."""
    return replayer.gain([parse_edit(line) for line in lines]) / replayer.measured.period


@pytest.mark.parametrize("name", NAMED)
def test_steps_are_replayed_within_2_percent(shared_trace: Find, name: str) -> None:
    quality = replayed(shared_trace(name)).quality
    assert quality.step_error <= 0.02
    assert quality.explained is not None
    assert quality.explained >= 0.97


@pytest.mark.parametrize("name", OTHERS)
def test_other_real_traces_are_replayed_within_5_percent(shared_trace: Find, name: str) -> None:
    assert replayed(shared_trace(name)).quality.step_error <= 0.05


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("v100_train_copy_heavy", 0.9),
        ("alexnet", 0.9),
        # 98 starts of a first run: launches that load their kernel start it before they return,
        # and staging a pageable copy takes 5 to 25 µs more or less
        ("simple_add", 0.85),
        # 3 of 5 and 4 of 6 would be the next lower figures
        ("event_sync", 0.8),
        ("event_sync_multi_stream", 0.8),
    ],
)
def test_kernel_starts_are_explained_with_recorded_waits(
    shared_trace: Find, name: str, share: float
) -> None:
    explained = replayed(shared_trace(name)).quality.explained
    assert explained is not None
    assert explained >= share


@pytest.mark.parametrize(
    ("name", "part", "cases", "share"),
    [
        ("a100_train_6steps", "syncs that waited", 50, 0.95),
        ("a100_train_6steps", "cross-stream starts", 20, 0.9),
        ("a100_train_6steps", "waits between threads", 12, 0.95),
        ("v100_train_copy_heavy", "syncs that waited", 40, 0.85),
        ("v100_train_copy_heavy", "cross-stream starts", 20, 0.95),
        ("nccl_collectives", "waits between threads", 6, 0.95),
        ("alexnet", "syncs that waited", 15, 0.95),
        ("simple_add", "syncs that waited", 15, 0.95),
    ],
)
def test_the_hard_parts_alone_are_explained(
    shared_trace: Find, name: str, part: str, cases: int, share: float
) -> None:
    result = {h.name: h for h in replayed(shared_trace(name)).quality.hard}
    assert result[part].cases >= cases
    assert result[part].explained >= share


def test_the_explained_share_shows_filtered_syncs_and_kernels(
    shared_trace: Find,
) -> None:
    explained = replayed(shared_trace("two_ranks_rank0")).quality.explained
    assert explained is not None
    assert explained < 0.5


def test_thread_waiting_for_launching_threads_is_not_critical(
    shared_file: Find,
) -> None:
    """TensorFlow's executors launch all 688 pieces of work; 30% of the step the GPU waits for them,
    so launching less is advice, by what it exposes. Fusing the kernels launches less, too."""
    report = analyze(shared_file("xla/tf_gpu_multi_worker.xplane.pb.gz"))
    match = next(each for each in report.findings if each.rule == "launch-bound")
    assert match.impact is not None
    assert match.impact.low_ns is not None
    assert match.impact.high_ns is not None
    assert match.folded_under == report.findings[0].rule == "unfused-elementwise"
    assert 0 < match.impact.low_ns < match.impact.high_ns <= 6_410_429
    assert any("other threads launch 100% of the work" in limit for limit in report.limits)


def test_naive_twin_gets_the_total_right_and_explains_no_time(
    shared_trace: Find,
) -> None:
    """A right total alone proves nothing. Where streams wait for each other it is wrong as well."""
    replayer = replayed(shared_trace("a100_train_6steps"))
    twin = naive_twin(replayer.graph)
    assert twin.step_error < replayer.quality.step_error < 0.02
    assert twin.hard["syncs that waited"] is None
    assert twin.hard["cross-stream starts"] == 0
    replayer = replayed(shared_trace("v100_train_copy_heavy"))
    assert naive_twin(replayer.graph).step_error > 3 * replayer.quality.step_error


# -- fixes ---------------------------------------------------------------------------------------


def test_noncritical_collectives_gain_less_than_exposed(
    shared_trace: Find,
) -> None:
    """Collectives are exposed for 13 to 24% of the steps of this run, and taking that for the
    gain is the mistake that replaying is there to avoid: the host's own work takes 65 of 77 ms
    (``order="none"``: what is left when it waits for no other stream at all), so that nothing
    done to collectives can gain more than 12 to 18% of a step. And that much only if none of
    its waits were for kernels as well: with every order kept that was seen, free collectives
    gain 8%. The replay, which knows nothing of this reckoning, must lie between, step by step
    near the lower end: its waits are the orders that were seen, but for a few.
    """
    path = shared_trace("a100_train_6steps")
    job = Job(path)
    measured = np.array(job.lengths)
    unchanged = np.array(job.replay(free=False, order="all"))
    assert unchanged == pytest.approx(measured, rel=0.02)
    free = np.array(job.replay(free=True, order="all"))
    most = np.array(job.replay(free=True, order="none"))
    low = float((unchanged - free).sum() / measured.sum())
    high = float((measured - most).sum() / measured.sum())
    exposed = float(sum(job.exposed_collectives()) / measured.sum())
    assert low == pytest.approx(0.08, abs=0.01)
    assert high == pytest.approx(0.155, abs=0.01)
    assert exposed > high

    replayer = replayed(path)
    edits = [parse_edit("overlap comm")]
    assert low - 0.01 <= impact(replayer, "overlap comm") <= high
    steps = np.diff(replayer.step_times(edits).time[replayer.graph.step_boundaries]) / 1e3
    assert steps.sum() == pytest.approx(free.sum(), rel=0.02)
    # without the profiler, which lengthens host times, the host limits less
    assert replayer.gain_range(edits).high / replayer.measured.period >= 0.12


def test_pinning_hidden_host_to_device_copies_gains_nothing(
    shared_trace: Find,
) -> None:
    replayer = replayed(shared_trace("a100_train_6steps"))
    for line in ("overlap copy:HtoD", "scale copy:HtoD 0.3"):
        assert abs(impact(replayer, line)) < 0.002


def raw(path: str) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return [e for e in events if e.get("ph") == "X"]


def union_length(spans: list[tuple[float, float]]) -> float:
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


@pytest.mark.parametrize("name", ["h100_bert_small_inference", "b200_eager"])
def test_launch_bound_steps_shrink_to_remaining_work(shared_trace: Find, name: str) -> None:
    """Each step has launches only between its first operator that launches and its last. Left
    are the host before and after these (by hand, from the file) and 1 µs per launch; the device
    works 309 of 4,426 µs and 11.6 of 87.4 ms. The step cannot be shorter than either, nor longer
    than both and the gaps between kernels."""
    path = shared_trace(name)
    replayer = replayed(path)
    events = raw(path)
    device = [e for e in events if e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    busy = union_length([(e["ts"], e["ts"] + e["dur"]) for e in device])
    ids = {e["args"]["correlation"] for e in device}
    calls = [
        e
        for e in events
        if e["cat"] in ("cuda_runtime", "cuda_driver") and e["args"].get("correlation") in ids
    ]
    first, last = min(e["ts"] for e in calls), max(e["ts"] + e["dur"] for e in calls)
    around = [
        e
        for e in events
        if e["cat"] == "cpu_op"
        and (e["ts"] <= first < e["ts"] + e["dur"] or e["ts"] < last <= e["ts"] + e["dur"])
    ]
    begin = min([first, *(e["ts"] for e in around)])
    end = max([last, *(e["ts"] + e["dur"] for e in around)])
    step = replayer.measured.period / 1e3
    remains = step - (end - begin) + len(calls)
    after = replayer.period([parse_edit("graph work")]) / 1e3
    limit = max(busy, remains)
    assert 0.98 * limit <= after <= busy + remains + 3 * len(device)
    assert step - after >= 0.9 * (step - limit)


# -- speed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a100_train_6steps", "v100_train_copy_heavy"])
def test_a_replay_takes_less_than_50_ms_for_10000_device_events(
    shared_trace: Find, name: str
) -> None:
    replayer = replayed(shared_trace(name))
    plan, best = replayer.plan, float("inf")
    for _ in range(5):  # the best of several: other processes share the cores
        begin = time.thread_time()
        plan.run()
        best = min(best, time.thread_time() - begin)
    assert best <= 0.050 * replayer.quality.starts / 10_000


# -- the critical path ---------------------------------------------------------------------------


def test_the_critical_path_of_a_busy_device_is_the_devices(shared_trace: Find) -> None:
    """Every trace is tried: a device that works nine tenths of the time leaves the host no more."""
    busy = {}
    for path in sorted(Path(shared_trace("alexnet")).parent.glob("*.json.gz")):
        replayer = replayed(str(path))
        a = replayer.a
        if a.device_id is None or a.steps.used.is_empty() or replayer.unusable_reason:
            continue
        if a.breakdown.busy.total >= 0.9 * a.span_ns:
            parts = replayer.critical_path_parts()
            host = parts.get("host", 0.0) + parts.get("loader", 0.0)
            busy[path.name] = host / sum(parts.values())
    assert len(busy) >= 3
    assert {path: share for path, share in busy.items() if share > 0.1} == {}


def test_work_launched_before_the_window_is_not_critical(shared_file: Find) -> None:
    """Both GPUs begin with a queue of earlier work, of 9.7 ms and of 315 ms."""
    for name in ("mi300x_kernels_after_steps.json.gz", "h100/vocabulary"):
        run = open_run(shared_file(name))
        replayer = WindowReplayer(Analysis(run.traces[min(run.traces)]))
        parts = replayer.critical_path_parts()
        assert sum(parts.values()) == pytest.approx(replayer.period(()), rel=0.001)
        assert parts["compute"] >= 0.99 * sum(parts.values())


def test_just_in_time_host_does_not_limit_a_busy_device() -> None:
    """Each kernel starts 2 to 3 µs after the one before it, as its launch arrives."""
    b = TraceBuilder()
    for _ in range(4):
        with b.step():
            for _ in range(50):
                with b.op("aten::mm"):
                    b.launch("ampere_sgemm_128x64_nn", 99)
                b.host(94.5)
    a = Analysis(b.trace())
    assert a.breakdown.busy.total >= 0.97 * a.span_ns
    parts = WindowReplayer(a).critical_path_parts()
    assert parts["compute"] >= 0.9 * sum(parts.values())


def test_a_recording_without_steps_is_replayed_whole(shared_trace: Callable[[str], str]) -> None:
    """The host waits beyond the device's last work: 5.98 ms, not the 1.98 ms before the wait."""
    replayer = WindowReplayer(Analysis(read_trace(shared_trace("mi210_gpu_only"))))
    assert replayer.measured.period == pytest.approx(replayer.a.step_ns, rel=0.01)
    assert replayer.quality.starts == replayer.a.trace.gpu.height
