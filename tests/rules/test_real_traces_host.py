"""Input, host, sync, transfer and distributed rules on public real traces.

The figures they rest on are computed a second time here from the raw file, event by event.
"""

from __future__ import annotations

import bisect
import gzip
import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from advisor.advise.engine import Options, analyze
from advisor.advise.report_text import describe_all_fixes
from advisor.core import text as t
from advisor.core.finding import Finding
from advisor.core.report import Report
from advisor.render.formats import REPORTS
from tests.corpus_analyses import analyze_cached

pytestmark = pytest.mark.timed

Find = Callable[[str], str]
Event = dict[str, Any]

MINE = {
    "dataloader-wait",
    "single-process-loader",
    "launch-bound",
    "cuda-graphs-unused",
    "python-hot-spot",
    "cpu-before-first-kernel",
    "profiler-events",
    "implicit-sync",
    "data-dependent-shapes",
    "explicit-synchronize",
    "pageable-copies",
    "blocking-pinned-copy",
    "copies-not-overlapped",
    "device-copies",
    "exposed-communication",
    "poor-overlap",
    "small-collectives",
    "data-parallel",
    "straggler-rank",
    "graph-breaks",
}


def report(path: str) -> Report:
    return analyze_cached(path).report


def ranked(result: Report) -> list[Finding]:
    return [f for f in result.findings if f.priority is not None]


def mentioned_rules(result: Report) -> set[str]:
    """Rules of which a user reads anything: findings, folded ones, notes and risks."""
    return {f.rule for f in [*result.findings, *result.notes, *result.risks]} & MINE


def finding_or_note(result: Report, rule: str) -> Finding:
    return next(f for f in [*result.findings, *result.notes] if f.rule == rule)


def figure(finding: Finding, label: str) -> float:
    """The first figure whose label, with what it is of, begins so."""
    value = next(e.value for e in finding.evidence if t.evidence_label(e).startswith(label))
    assert isinstance(value, int | float)
    return float(value)


# -- a second computation, from the file's text ---------------------------------------------------


@cache
def raw(path: str) -> list[Event]:
    """Complete events of the file; times in ns from the first."""
    text = gzip.decompress(Path(path).read_bytes()).decode(errors="replace")
    events = [e for e in json.loads(text, strict=False)["traceEvents"] if e.get("ph") == "X"]
    first = min(float(e["ts"]) for e in events)
    for e in events:
        e["start"] = round((float(e["ts"]) - first) * 1000)
        e["end"] = e["start"] + round(float(e.get("dur", 0)) * 1000)
        e["kind"] = str(e.get("cat", "")).lower()
    return events


def steps(path: str) -> list[tuple[int, int]]:
    """ProfilerStep ranges, each up to the next."""
    marks = sorted(
        (e["start"], e["end"])
        for e in raw(path)
        if e["name"].startswith("ProfilerStep") and e["kind"] in ("user_annotation", "cpu_op")
    )
    return [
        (start, marks[i + 1][0] if i + 1 < len(marks) else end)
        for i, (start, end) in enumerate(marks)
    ]


def device(path: str) -> list[Event]:
    return sorted(
        (e for e in raw(path) if e["kind"] in ("kernel", "gpu_memcpy", "gpu_memset", "memcpy")),
        key=lambda e: e["start"],
    )


def merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    result: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def length_outside(spans: list[tuple[int, int]], holes: list[tuple[int, int]]) -> int:
    """Length of the union of ``spans`` that lies in none of ``holes``."""
    holes = merged(holes)
    starts = [start for start, _ in holes]
    total = 0
    for start, end in merged(spans):
        total += end - start
        at = max(0, bisect.bisect_right(starts, start) - 1)
        while at < len(holes) and holes[at][0] < end:
            total -= max(0, min(end, holes[at][1]) - max(start, holes[at][0]))
            at += 1
    return total


def host_wait_ns(path: str) -> int:
    """Idle time that ends with work launched only after the work before it had ended: host wait as
    HolisticTraceAnalysis defines it, over all streams; and the idle time at both ends, which it
    leaves out. ns."""
    calls = {
        e["args"]["correlation"]: e
        for e in raw(path)
        if e["kind"] in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    host = [e for e in raw(path) if e["kind"] in ("cpu_op", "user_annotation", "cuda_runtime")]
    marks = steps(path) or [(min(e["start"] for e in host), max(e["end"] for e in host))]
    total, busy_until = 0, marks[0][0]
    for work in device(path):
        call = calls.get(work["args"].get("correlation"))
        if work["start"] > busy_until and call is not None and call["start"] >= busy_until:
            total += work["start"] - busy_until
        busy_until = max(work["end"], busy_until)
    return total + max(0, marks[-1][1] - busy_until)


# -- training on A100: communication, and nothing about copies or launches ------------------------


def test_exposed_communication_leads_on_a100_training(shared_trace: Find) -> None:
    path = shared_trace("a100_train_6steps")
    result = report(path)
    assert ranked(result)[0].rule == "exposed-communication"
    work = device(path)
    first, last = steps(path)[0][0], steps(path)[-1][1]
    inside = [e for e in work if e["start"] < last and e["end"] > first]
    communication = [e for e in inside if "nccl" in e["name"].lower()]
    compute = [e for e in inside if e["kind"] == "kernel" and "nccl" not in e["name"].lower()]
    exposed = length_outside(
        [(e["start"], e["end"]) for e in communication],
        [(e["start"], e["end"]) for e in compute],
    )
    assert exposed == pytest.approx(87.9e6, rel=0.002)
    reported_ns = figure(ranked(result)[0], "exposed communication per step")
    assert reported_ns * 6 == pytest.approx(exposed, rel=0.002)


def test_a100_training_gets_no_pinning_or_launch_advice(
    shared_trace: Find,
) -> None:
    result = report(shared_trace("a100_train_6steps"))
    assert mentioned_rules(result) == {"exposed-communication", "implicit-sync"}
    assert {f.rule for f in result.findings} == {"exposed-communication"}
    praise = " ".join(g.text for g in result.passed)
    assert "from pinned memory" in praise and "DataLoader keeps up" in praise


def test_pageable_copies_to_host_are_judged_by_the_idle_time_they_leave(
    shared_trace: Find,
) -> None:
    import polars as pl

    from advisor.measure import Analysis
    from advisor.read import read_trace
    from advisor.rules.support.host_waits import select_blocking_calls

    path = shared_trace("a100_train_6steps")
    a = Analysis(read_trace(path))
    blocking = select_blocking_calls(a, pl.col("direction") == "DtoH")
    assert (blocking.table["kind"] == "memcpy").sum() == 60  # each with a sync that finds it done
    # by hand: idle time from the copy's end to the start of the next work of its thread
    calls = {
        e["args"]["correlation"]: e
        for e in raw(path)
        if e["kind"] == "runtime" or e["kind"] == "cuda_runtime"
    }
    work = device(path)
    busy = merged([(e["start"], e["end"]) for e in work])
    launches: dict[Any, list[tuple[int, int]]] = {}
    for e in work:
        call = calls.get(e["args"].get("correlation"))
        if call is not None:
            launches.setdefault(call["tid"], []).append((call["start"], e["start"]))
    for of_thread in launches.values():
        of_thread.sort()
    bound = 0
    copies = [e for e in work if "DtoH (Device -> Pageable)" in e["name"]]
    assert len(copies) == 60
    for copy in copies:
        call = calls[copy["args"]["correlation"]]
        following = [at for at in launches[call["tid"]] if at[0] > call["start"]]
        if following:
            until = following[0][1]
            idle = length_outside([(copy["end"], until)], busy) if until > copy["end"] else 0
            bound += min(idle, call["end"] - call["start"])
    assert blocking.total <= bound * 1.05
    assert bound < 0.02 * a.span_ns  # less than implicit-sync asks for, so it is rightly silent
    assert blocking.table["waited"].sum() > 10 * blocking.total  # while the host waited far longer


# -- launch-bound ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "busy"),
    [("h100_bert_small_inference", 0.07), ("b200_eager", 0.133), ("nccl_collectives", 0.236)],
)
def test_launch_bound_leads_where_the_host_is_late(
    shared_trace: Find, name: str, busy: float
) -> None:
    path = shared_trace(name)
    result = report(path)
    first = ranked(result)[0]
    assert first.rule == "launch-bound"
    assert result.busy_share == pytest.approx(busy, abs=0.005)
    assert "CUDA graphs" in first.fix
    # an engine is switched by its own options, not from inside
    assert ("cudagraph_mode" if name == "b200_eager" else "reduce-overhead") in first.code
    idle = figure(first, "idle for launches") * result.scope.steps_used
    # whatever else a late host does is in HTA's figure too, so it is the larger; but not by much
    assert 0.6 * host_wait_ns(path) <= idle <= 1.1 * host_wait_ns(path)


def test_the_small_bert_is_sixty_kernels(shared_trace: Find) -> None:
    path = shared_trace("h100_bert_small_inference")
    assert sum(e["kind"] == "kernel" for e in raw(path)) == 60
    assert figure(ranked(report(path))[0], "launches per step") == 61  # and one copy


def test_repeated_kernels_are_named_by_launch_bound(
    shared_trace: Find,
) -> None:
    path = shared_trace("nccl_collectives")
    graphs = finding_or_note(report(path), "cuda-graphs-unused")
    assert graphs.folded_under == "launch-bound"
    spans = steps(path)
    starts = {
        e["args"]["correlation"]: e["start"]
        for e in raw(path)
        if e["kind"] == "cuda_runtime" and "correlation" in e.get("args", {})
    }
    sequences = [
        [
            e["name"]
            for e in device(path)
            if e["kind"] == "kernel"
            and low <= starts.get(e["args"]["correlation"], -1) < high
            and e["args"]["stream"] == 7
        ]
        for low, high in spans
    ]
    assert len(sequences) == 3 and len(sequences[0]) > 500
    assert sequences[0] == sequences[1] == sequences[2]


def test_busy_device_is_named_beside_a_host_critical_path(shared_trace: Find) -> None:
    """The products take 8.51 ms of the 9.24 ms that are left, and nothing of the path: the host
    launches the last of them just before it runs. 84 fills and additions of gradients end."""
    result = report(shared_trace("linear_2080ti_launch_bound"))
    assert result.replay is not None and result.replay.busy_after_ns is not None
    busy = next(part.ns for part in result.time if part.name == "compute")
    assert result.replay.busy_after_ns == pytest.approx(busy - 746e3, rel=0.02)
    text = describe_all_fixes(result)
    assert "9.24 ms (up to 2.6× faster)" in text  # an upper end has no busy share
    (note,) = [each for each in result.notes if each.rule == "fp32-matmul"]
    assert "77% of kernel time" in note.summary and note.impact is not None
    assert note.impact.reason.startswith(
        "the fix gains little by itself, as the host sets the pace"
    )


def test_mostly_ahead_host_is_not_the_only_limit(
    shared_trace: Find,
) -> None:
    """The queue is full from the fifth to the 29th of 30.7 ms, and empty at the end."""
    path = shared_trace("pairs/particle_batch128")
    report = analyze(path, Options(config={}))
    text = REPORTS.render("terminal", report, details=True)
    assert "critical path: 100% on the host" in text
    words = " ".join(text.split())
    assert "on the host (the GPU works in 86% of the recording)" in words
    assert "a faster host saves at most 14%" in words
    assert "GPU busy 86%" in words


def test_the_hot_python_function_of_b200_is_on_the_device_s_way(shared_trace: Find) -> None:
    path = shared_trace("b200_eager")
    finding = finding_or_note(report(path), "python-hot-spot")
    assert finding.folded_under == "launch-bound"
    place = finding.where[0]
    assert (place.file, place.function) == (
        "flashinfer/fused_moe/core.py",
        "trtllm_fp4_block_scale_moe_op",
    )
    # by hand: idle device time inside the function but in no operator or runtime call
    frames = [e for e in raw(path) if re.search(r"core\.py\(1633\): trtllm_fp4_block", e["name"])]
    assert len(frames) == 36
    spans = [(e["start"], e["end"]) for e in frames]
    thread = frames[0]["tid"]
    other = [  # not those around the function: a custom operator calls it
        (e["start"], e["end"])
        for e in raw(path)
        if e["tid"] == thread
        and e["kind"] in ("cpu_op", "cuda_runtime", "cuda_driver")
        and any(start <= e["start"] and e["end"] <= end for start, end in spans)
    ]
    busy = [(e["start"], e["end"]) for e in device(path)]
    idle = figure(finding, "GPU idle in these functions")
    # an upper bound: other user functions that it calls have their own time
    assert (
        0.5 * length_outside(spans, other + busy)
        <= idle
        <= 1.02 * length_outside(spans, other + busy)
    )


@pytest.mark.parametrize("name", ["a100_train_6steps", "v100_train_copy_heavy", "mi210_gpu_only"])
def test_launch_bound_is_silent_on_busy_devices(shared_trace: Find, name: str) -> None:
    assert not mentioned_rules(report(shared_trace(name))) & {"launch-bound", "cuda-graphs-unused"}


# -- communication across and within ranks --------------------------------------------------------


def test_exposed_communication_leads_on_two_ranks(shared_trace: Find) -> None:
    path = shared_trace("two_ranks_rank0")
    first = ranked(report(path))[0]
    assert first.rule == "exposed-communication"
    assert figure(first, "exposed communication per step") * 2 == pytest.approx(337e6, rel=0.003)
    why = " ".join(n.what for n in report(path).not_checked)
    assert "while work is queued for it" in why  # kernels were filtered out of this file


def test_two_of_many_ranks_make_no_straggler_of_little_wait(
    shared_trace: Find, tmp_path: Path
) -> None:
    for rank in (0, 1):
        source = Path(shared_trace(f"two_ranks_rank{rank}"))
        (tmp_path / source.name).symlink_to(source)
    result = analyze(tmp_path, Options(config={}))
    assert ranked(result)[0].rule == "exposed-communication"
    assert "straggler-rank" not in mentioned_rules(result)


# -- copies within the device ---------------------------------------------------------------------


def test_copies_around_cuda_graphs_lead_on_v100_training(shared_trace: Find) -> None:
    path = shared_trace("v100_train_copy_heavy")
    result = report(path)
    copies = finding_or_note(result, "device-copies")
    assert copies.priority == 1
    assert "CUDA graph" in copies.fix
    spans = steps(path)
    inside = [e for e in device(path) if e["start"] < spans[-1][1] and e["end"] > spans[0][0]]
    within = [(e["start"], e["end"]) for e in inside if "DtoD" in e["name"]]
    kernels = [(e["start"], e["end"]) for e in inside if e["kind"] == "kernel"]
    reported_ns = figure(copies, "exposed copy time within the GPU") * 6
    assert reported_ns == pytest.approx(length_outside(within, kernels), rel=0.01)
    assert {"exposed-communication", "device-copies"} == mentioned_rules(result)


# -- everything else: nothing silly ---------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "alexnet",
        "simple_add",
        "triton_example",
        "event_sync",
        "event_sync_multi_stream",
        "mi210_gpu_only",
        "mi250_train",
        "mi300_torch_compile",
        "no_gpu_rank",
        "cupti_counters",
        "old_capitalised_categories",
    ],
)
def test_tiny_and_foreign_traces_get_no_advice_of_ours(shared_trace: Find, name: str) -> None:
    assert mentioned_rules(report(shared_trace(name))) == set()


# -- a recording of our own -----------------------------------------------------------------------


def test_loader_without_workers_differs_from_one_with_workers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from time import sleep

    from torch.profiler import ProfilerActivity, profile, schedule
    from torch.utils.data import DataLoader, Dataset

    class SlowDataset(Dataset[Any]):
        def __len__(self) -> int:
            return 1000

        def __getitem__(self, index: int) -> Any:
            sleep(0.004)
            return torch.zeros(8)

    def record(workers: int) -> Report:
        batches = iter(DataLoader(SlowDataset(), batch_size=8, num_workers=workers))
        path = tmp_path / f"{workers}.json"
        with profile(
            activities=[ProfilerActivity.CPU],
            schedule=schedule(wait=0, warmup=1, active=4),
            on_trace_ready=lambda p: p.export_chrome_trace(str(path)),
        ) as profiler:
            for _ in range(5):
                next(batches)
                sleep(0.01)
                profiler.step()
        return report(str(path))

    without_workers = finding_or_note(record(0), "single-process-loader")
    # eight samples of 4 ms are all of a batch that can be spread over workers
    assert figure(without_workers, "exposed loading per step") >= 8 * 4e6
    assert without_workers.impact is not None and (without_workers.impact.share or 0) > 0.3
    assert not mentioned_rules(record(1)) & {"single-process-loader"}


def test_waits_that_leave_no_idle_time_are_a_note_with_replayed_gain(
    shared_trace: Find,
) -> None:
    """60 blocking copies to the host hold it for 75 of 465 ms; the device idles after them for
    0.7% only, but the host, which is late for most launches, loses that much of its lead."""
    report = analyze(shared_trace("a100_train_6steps"))
    assert [f.rule for f in report.findings] == ["exposed-communication"]
    (note,) = [f for f in report.notes if f.rule == "implicit-sync"]
    assert note.impact is not None and note.impact.gain_ns is not None
    # never more than the host waited, 12.5 ms per step by summing the calls
    assert 3e6 < note.impact.gain_ns < 12.6e6
