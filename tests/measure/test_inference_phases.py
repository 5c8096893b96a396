"""Inference by phase: an engine's marks, module calls and look-ups; graphs; attention's work."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from advisor.advise.engine import analyze
from advisor.advise.options import Options
from advisor.core.errors import AdvisorError
from advisor.core.report import Report
from advisor.core.report_inference import InferenceByPhase
from advisor.measure import Analysis
from advisor.measure.inference.annotations import StepMark, Sums, parse_mark
from advisor.measure.inference.graphs import attach_capture, count_missing_records
from advisor.measure.inference.inference_steps import Heads, attention_cost
from advisor.measure.inference.phases import measure_inference
from advisor.read import open_run
from advisor.render.formats import REPORTS
from advisor.testing import TraceBuilder

CORPUS = Path(__file__).parents[1] / "corpus"
VLLM = CORPUS / "serving/vllm_decode_full/replay.json.gz"
CAPTURE = CORPUS / "serving/vllm_decode_full/capture.json.gz"
SGLANG = CORPUS / "serving/sglang_prefill/replay.json.gz"
LOOPS = Path(__file__).with_name("decode_loops.py")


def _events(path: Path) -> dict[str, Any]:
    with gzip.open(path) as file:
        result: dict[str, Any] = json.load(file)
    return result


def _inference(report: Report) -> InferenceByPhase:
    assert report.inference is not None
    return report.inference


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk55086sqsq32sqsk55086)",
            ("vllm", "decode", 32, 32, 32, None, Sums(32, 55086, 32, 55086)),
        ),
        (
            "execute_context_1(888_788544)_generation_0(0)",
            ("vllm", "prefill", 1, 888, 1, Sums(888, 888, 788544, 788544), None),
        ),
        ("execute_context_2(6144)_generation_3(3)", ("vllm", "mixed", 5, 6147, 5, None, None)),
        # drafts of three tokens: how many of the 128 come out is not recorded
        ("execute_context_0(0)_generation_32(128)", ("vllm", "decode", 32, 128, None, None, None)),
        ("execute_new_0_cached_7", ("vllm", "decode", 7, 7, 7, None, None)),
        ("execute_new_1_cached_7", ("vllm", "mixed", 8, None, 8, None, None)),
        ("step[DECODE bs=32]", ("sglang", "decode", 32, 32, 32, None, None)),
        ("step[EXTEND bs=15 toks=15360]", ("sglang", "prefill", 15, 15360, 15, None, None)),
        (
            "step[DECODE bs=2 g_sqsq=2 g_sqsk=30 g_sk=30]",
            ("sglang", "decode", 2, 2, 2, None, Sums(2, 30, 2, 30)),
        ),
        (
            "step[MIXED bs=2 c=1 g=1 c_sq=5 c_sk=8 c_sqsq=25 c_sqsk=40 "
            "g_sq=1 g_sk=12 g_sqsq=1 g_sqsk=12]",
            ("sglang", "mixed", 2, 6, 2, Sums(5, 8, 25, 40), Sums(1, 12, 1, 12)),
        ),
        ("step[TARGET_VERIFY bs=4]", ("sglang", "decode", 4, None, None, None, None)),
        ("step[DRAFT_EXTEND bs=4]", ("sglang", "draft", 4, None, 0, None, None)),
        (
            "decode[bs=117/128 tok=117 d=117 sqsq=117 sqsk=239616 sk=239616]",
            ("atom", "decode", 117, 117, 117, None, Sums(117, 239616, 117, 239616)),
        ),
        (
            "prefill[bs=2 tok=14721 ctx=[7803, 6918]]",
            ("atom", "prefill", 2, 14721, 2, None, None),
        ),
        (
            "[Executor] _forward_step 12: 1 ctx reqs, 100 ctx tokens, 8 gen reqs",
            ("tensorrt-llm", "mixed", 9, 108, 9, None, None),
        ),
        (
            "[Executor] _forward_step: 0 ctx reqs, 8 gen reqs",
            ("tensorrt-llm", "decode", 8, 8, 8, None, None),
        ),
    ],
)
def test_marks_tell_phase_requests_and_tokens(name: str, expected: tuple[Any, ...]) -> None:
    assert parse_mark(name) == StepMark(*expected)


@pytest.mark.parametrize(
    "name",
    [
        f"execute_context_{'9' * 5000}(1)_generation_0(0)",
        "step[IDLE bs=0]",
        "execute_context_x",
        "ProfilerStep#3",
        "step[",
        "decode",
        "",
    ],
)
def test_other_names_are_not_marks(name: str) -> None:
    assert parse_mark(name) is None


@pytest.mark.parametrize("path", [VLLM, SGLANG])
def test_a_step_is_the_devices_own_span(path: Path) -> None:
    """Counted from the file's events: the work that the innermost mark launched."""
    events = _events(path)["traceEvents"]
    marks = [e for e in events if e.get("cat") == "user_annotation"]
    mark = max(marks, key=lambda e: e["ts"])
    calls = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e.get("cat") == "cuda_runtime" and "correlation" in e.get("args", {})
    }
    work = [
        e
        for e in events
        if e.get("cat") in ("kernel", "gpu_memcpy")
        and calls.get(e["args"]["correlation"], 0) >= mark["ts"]
    ]
    last = max(e["ts"] + e["dur"] for e in work)
    first = min(e["ts"] for e in work)
    first = mark["ts"] if first - mark["ts"] < 0.05 * (last - first) else first
    covered, reached = 0.0, first
    for event in sorted(work, key=lambda e: e["ts"]):
        end = event["ts"] + event["dur"]
        covered += max(0.0, end - max(reached, event["ts"]))
        reached = max(reached, end)
    inference = _inference(report := analyze(path))
    (phase,) = inference.phases
    assert phase.ns == pytest.approx((last - first) * 1e3, rel=1e-3)
    assert phase.busy_share == pytest.approx(covered / (last - first), abs=0.01)
    assert report.busy_share == pytest.approx(phase.busy_share, abs=0.02)
    assert phase.tokens_per_s == pytest.approx(phase.tokens / (last - first) * 1e6, rel=1e-3)


def test_phase_names_its_limit() -> None:
    (decode,) = _inference(analyze(VLLM)).phases
    assert (decode.name, decode.limit) == ("decode", "memory")
    report = analyze(SGLANG)
    (prefill,) = _inference(report).phases
    # 15 prompts of 15,360 tokens in all
    assert "--batch-size 15 --input-len 1024" in report.profile_kernels[0]
    assert (prefill.name, prefill.limit) == ("prefill", "compute")
    assert prefill.attainable_ns is not None
    assert prefill.attainable_ns < prefill.ns
    (eager,) = _inference(analyze(CORPUS / "b200_eager.json.gz")).phases
    assert (eager.name, eager.limit, eager.tokens) == ("prefill", "host", 888)


def test_an_inferred_limit_has_no_measured_share() -> None:
    """97% of the kernel time has neither FLOPs nor bytes: 100% memory would contradict that."""
    report = analyze(VLLM)
    (decode,) = _inference(report).phases
    assert decode.limit_inferred and decode.attainable_ns is None
    text = " ".join(REPORTS.render("terminal", report, width=120).split())
    assert "the limit, memory, is inferred" in text and "memory 100%" not in text
    assert not _inference(analyze(SGLANG)).phases[0].limit_inferred


RECORDED = Path(__file__).parents[1] / "data" / "recorded"


def test_recomputing_passes_are_counted() -> None:
    """The new token is embedded at the end of a step. Attention has 29, 30 and 31 tokens of 4
    sequences, in steps of 55.17, 75.28 and 94.67 ms: 120 tokens per step for 4 new ones."""
    path = RECORDED / "embedded_prefix.slow"
    inference = _inference(analyze(path))
    (phase,) = inference.phases
    assert (phase.name, phase.steps) == ("decode, no KV cache", 3)
    assert (phase.requests, phase.tokens) == (4, 120)
    assert phase.ns == pytest.approx((55.174234 + 75.281825 + 94.670423) / 3 * 1e6, rel=1e-3)
    assert inference.output_tokens_per_s == pytest.approx(12 / 0.2251265, rel=0.01)


@pytest.mark.parametrize("name", ["grown_cache.slow", "embedded_prefix.cured", "no_cache.cured"])
def test_a_phase_has_the_time_of_the_steps_above_it(name: str) -> None:
    """Look-ups at the end of a step: what follows the last one, 60 µs, is no step."""
    (phase,) = _inference(analyze(RECORDED / name)).phases
    assert phase.name == "decode"
    profiled = Analysis(open_run(RECORDED / name).window(0)).step_ns
    assert phase.ns == pytest.approx(profiled, rel=0.02)  # 1% lies between two marks


def test_truncated_last_pass_is_left_out() -> None:
    """The passes are not marked: each goes from look-up to look-up, and to 5 µs after the last."""
    b = TraceBuilder(None)
    for number in range(4):
        with b.op("aten::embedding", [[4000, 64], [2, 1]], ["float", "long int"]):
            b.host(5)
        for _ in range(10 if number < 3 else 0):
            with b.op("aten::mm", [[2, 64], [64, 64]], host_us=100):
                pass
    inference_steps = b.analysis().inference_steps
    assert inference_steps is not None and inference_steps.source == "vocabulary look-ups"
    assert inference_steps.table.height == 3


# -- graphs ------------------------------------------------------------------------------------


def _without_kernels(path: Path, keep: Callable[[int, int], bool]) -> dict[str, Any]:
    """The file without kernels of its graph replays for which ``keep(place, count)`` is false."""
    data = _events(path)
    events = data["traceEvents"]
    launches = {e["args"]["correlation"] for e in events if "GraphLaunch" in str(e.get("name", ""))}
    kernels = [
        e
        for e in events
        if e.get("cat") in ("kernel", "Kernel") and e["args"].get("correlation") in launches
    ]
    kernels.sort(key=lambda e: e["ts"])
    removed = {id(e) for i, e in enumerate(kernels) if not keep(i, len(kernels))}
    assert removed
    data["traceEvents"] = [e for e in events if id(e) not in removed]
    return data


GRAPHS = [VLLM, CORPUS / "v100_train_copy_heavy.json.gz"]


@pytest.mark.parametrize("path", GRAPHS)
def test_complete_replays_miss_nothing(path: Path) -> None:
    (trace,) = open_run(path).traces.values()
    expected, missing = count_missing_records(trace)
    assert expected > 400
    assert missing == 0


@pytest.mark.parametrize("path", GRAPHS)
@pytest.mark.parametrize(
    "keep",
    [
        lambda i, n: i % 10 != 5,
        lambda i, n: i % 2 == 0,
        lambda i, n: not n // 3 < i < 2 * n // 3,
        lambda i, n: i % 50 == 0,
        lambda i, n: i < n // 2,
        lambda i, n: i > n // 2,
    ],
    ids=["a tenth", "half", "the middle", "nearly all", "the second half", "the first half"],
)
def test_lost_records_of_graphs_leave_no_busy_share(
    path: Path, keep: Callable[[int, int], bool], tmp_path: Path
) -> None:
    file = tmp_path / "lost.json"
    file.write_text(json.dumps(_without_kernels(path, keep)))
    report = analyze(file)
    assert report.busy_share is None
    assert (report.time, report.idle) == ([], [])
    assert "lost about" in report.verdict
    assert "record fewer steps" in report.verdict
    assert "busy" not in report.verdict.replace("No busy share", "")


def test_capture_names_its_replayed_operators() -> None:
    """The file of the capture has the kernels' names too, which the trace leaves out."""
    events = _events(CAPTURE)["traceEvents"]
    begin, end = (
        next(e["ts"] for e in events if what in str(e.get("name")))
        for what in ("StreamBeginCapture", "StreamEndCapture")
    )
    launches = sorted(
        (e["ts"], e["args"]["kernel"])
        for e in events
        if "kernel" in e.get("args", {})
        and e.get("cat") == "cuda_runtime"
        and begin < e["ts"] < end
    )
    (trace,), (capture,) = (open_run(p).traces.values() for p in (VLLM, CAPTURE))
    joined = attach_capture(trace, capture)
    assert joined.meta.capture is not None
    assert joined.meta.capture.matched == 1
    replayed = np.flatnonzero(
        (joined.cpu["call"].gather(joined.gpu["launch"]) == "graph_launch").to_numpy()
    )
    assert joined.gpu["name"].gather(replayed).to_list() == [name for _, name in launches]
    a = Analysis(joined)
    names = a.kernels["op_name"].gather(replayed).cast(str).to_list()
    assert names.count("vllm::unified_attention_with_output") == 36  # 24 layers, 12 in two parts
    products = [r for r in a.rooflines.iter_rows(named=True) if r["op"] == "aten::addmm"]
    assert [row["calls"] for row in products] == [24, 24, 24]
    assert a.trace.cpu["ts"].max() == trace.cpu["ts"].max()
    of_trace = a.host.filter(a.host["thread"] < trace.threads.height)
    assert of_trace.equals(Analysis(trace).host)


def test_the_replay_of_a_folder_with_a_capture_is_analyzed() -> None:
    both = analyze(CAPTURE.parent)
    report = analyze(VLLM, Options(config={}, capture=str(CAPTURE)))
    assert both.inference == report.inference is not None
    assert both.scope == report.scope
    assert [f.title for f in both.findings] == [f.title for f in report.findings]
    text = " ".join(REPORTS.render("terminal", both, details=True).split())
    # experts have no recorded weights: what a step could take at best is not known
    (decode,) = _inference(both).phases
    assert decode.attainable_ns is None
    assert decode.known_share is not None
    unknown = 100 - round(100 * decode.known_share)
    assert f"FLOPs and bytes of {unknown}% of its kernel time are not recorded" in text
    # counters are collected from what the engine can run without its server
    assert "-- vllm bench latency --model MODEL --batch-size 32" in text
    assert "--input-len" not in text  # a decode step does not say how long its prompts were
    # both files are there: none is asked for
    assert "--capture" not in both.verdict
    verdict = analyze(VLLM).verdict
    assert "advisor analyze replay.json.gz --capture FILE" in verdict


def test_fewer_kernels_than_were_captured_are_lost_records() -> None:
    (trace,), (capture,) = (open_run(p).traces.values() for p in (VLLM, CAPTURE))
    thin = trace.gpu.filter(np.arange(trace.gpu.height) != 100)
    assert count_missing_records(attach_capture(replace(trace, gpu=thin), capture)) == (421, 1)


def test_a_capture_without_graphs_is_refused() -> None:
    with pytest.raises(AdvisorError, match="no graph is captured"):
        analyze(VLLM, Options(capture=str(SGLANG)))


# -- work --------------------------------------------------------------------------------------


def test_attention_by_hand() -> None:
    """Two prompts of 3 and 5 tokens: 6 + 15 pairs. 4 heads of 8, 2 of keys and values, bf16."""
    heads = Heads(queries=4, keys=2, size=8, value=8, width=2)
    mark = StepMark("vllm", "prefill", 2, 8, 2, Sums(8, 8, 9 + 25, 9 + 25))
    assert attention_cost(mark, heads, narrow=False) == (
        4 * 4 * 8 * 21,
        8 * 2 * 2 * 8 * 2 + 8 * 4 * 2 * 8 * 2,
    )
    # one new token each, after 10 and 20: every pair counts
    decode = StepMark("vllm", "decode", 2, 2, 2, None, Sums(2, 30, 2, 30))
    work = attention_cost(decode, heads, narrow=True)
    assert work == (4 * 4 * 8 * 30, 30 * 2 * 2 * 8 + 2 * 4 * 2 * 8 * 2)
    assert attention_cost(StepMark("vllm", "decode", 2), heads, narrow=False) is None


def test_latent_attention_reads_one_cache() -> None:
    """DeepSeek's: 576 elements a token, of which 512 are the values too."""
    heads = Heads(queries=16, keys=1, size=576, value=512, width=2)
    work = attention_cost(
        StepMark("sglang", "decode", 1, 1, 1, None, Sums(1, 100, 1, 100)), heads, narrow=False
    )
    assert work == (2 * 16 * (576 + 512) * 100, 100 * 576 * 2 + 16 * (576 + 512) * 2)


def test_attention_that_outruns_the_memory_is_not_known() -> None:
    """A sliding window reads less than the mark says: half of this model's layers have one."""
    (trace,), (capture,) = (open_run(p).traces.values() for p in (VLLM, CAPTURE))
    joined = attach_capture(trace, capture)
    a = Analysis(joined)
    names = joined.gpu["name"].cast(str)
    flops = a.kernels["flops"]
    attention = flops.filter(names == "kernel_unified_attention_3d")
    assert attention.to_list() == [2 * 64 * (64 + 64) * 55086] * 12
    assert flops.filter(names == "kernel_unified_attention_2d").null_count() == 12


# -- loops that decode, recorded here ----------------------------------------------------------


def _record_loop(loop: str, path: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, str(LOOPS), loop, str(path), *options]
    completed = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(completed.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize(
    ("loop", "options"),
    [
        pytest.param("generate", [], id="generate"),
        pytest.param("by-hand", ["--stacks"], id="by-hand-stacks"),
        pytest.param("generate", ["--stacks"], id="generate-stacks", marks=pytest.mark.thorough),
        pytest.param("by-hand", [], id="by-hand", marks=pytest.mark.thorough),
    ],
)
def test_a_loop_that_decodes_has_its_phases(loop: str, options: list[str], tmp_path: Path) -> None:
    if loop == "generate":
        pytest.importorskip("transformers")
    file = tmp_path / "loop.json"
    expected = _record_loop(loop, file, *options)
    inference = _inference(report := analyze(file))
    phases = {phase.name: phase for phase in inference.phases}
    assert set(phases) == {"prefill", "decode"}
    assert (phases["prefill"].steps, phases["decode"].steps) == (
        expected["prefill"],
        expected["decode"],
    )
    assert phases["prefill"].tokens == expected["prompt"]
    assert phases["decode"].tokens == phases["decode"].requests == expected["batch"]
    assert report.scope.steps_found == expected["prefill"] + expected["decode"]
    events = json.loads(file.read_text())["traceEvents"]
    if options:
        name = "nn.Module: LlamaForCausalLM_0" if loop == "generate" else "nn.Module: Model_0"
        calls = [e for e in events if e.get("name") == name]
    else:
        calls = [e for e in events if e.get("name") == "aten::embedding"]
        calls.append({"ts": max(e["ts"] + e["dur"] for e in events if e.get("cat") == "cpu_op")})
    ends = [e["ts"] + e["dur"] for e in calls] if options else [e["ts"] for e in calls[1:]]
    rate = (
        expected["batch"]
        * (expected["prefill"] + expected["decode"])
        / (max(ends) - calls[0]["ts"])
        * 1e6
    )
    assert inference.output_tokens_per_s == pytest.approx(rate, rel=0.01)


def test_continuous_batching_by_its_marks(tmp_path: Path) -> None:
    file = tmp_path / "engine.json"
    steps = _record_loop("engine", file)["steps"]
    inference = _inference(analyze(file))
    counted = {"prefill": 0, "decode": 0, "mixed": 0}
    for joined, _, running in steps:
        counted["mixed" if joined and running else "prefill" if joined else "decode"] += 1
    assert {phase.name: phase.steps for phase in inference.phases} == counted
    (decode,) = (phase for phase in inference.phases if phase.name == "decode")
    events = json.loads(file.read_text())["traceEvents"]
    marks = [e for e in events if str(e.get("name")).startswith("execute_context_0(")]
    total = sum(e["dur"] for e in marks)
    assert decode.ns * decode.steps == pytest.approx(total * 1e3, rel=1e-6)
    tokens = sum(running for joined, _, running in steps if not joined)
    assert decode.tokens_per_s == pytest.approx(tokens / total * 1e6, rel=1e-6)
    assert inference.between is not None


def test_training_has_no_phases() -> None:
    assert analyze(CORPUS / "a100_train_6steps.json.gz").inference is None


def test_decode_ranges_are_steps_only_with_work_inside() -> None:
    """A loader that decodes pictures."""
    b = TraceBuilder("A100")
    for _ in range(4):
        with b.range("decode"):
            b.host(100)
        b.run("aten::mm", "sm80_xmma_gemm_f16", 50, times=4)
    assert measure_inference(b.analysis()) is None
