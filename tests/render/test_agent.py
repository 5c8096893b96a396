"""The report for a coding agent: short, stable ids, and right answers to what agents ask."""

from __future__ import annotations

import re
from functools import cache

import pytest

from advisor import analyze
from advisor.core.report import Report
from advisor.render.formats import REPORTS
from benchmarks.public_traces import path_of
from tests.corpus_analyses import analyze_cached

MAX_TOKENS = 1500
"""Limit in tokens of four characters, which fits English text and code."""

QUESTIONS = (
    ("pairs/loader_profiler_workers0", "what first?", r"## single-process-loader:"),
    ("pairs/loader_profiler_workers0", "how long is a step?", r"step_ns: 15479\d{4} \(per step\)"),
    ("pairs/loader_profiler_workers0", "how many steps?", r"steps: 6 of 6 \(ProfilerStep\)"),
    ("pairs/loader_profiler_workers0", "how busy is the GPU?", r"gpu_busy_share: 0\.70"),
    ("pairs/loader_profiler_workers0", "what do I change?", r"num_workers=\d"),
    ("pairs/loader_profiler_workers0", "and then?", r"next: .*advisor compare"),
    ("pairs/loader_profiler_workers0", "what is the MFU?", r"mfu: not measured"),
    ("pairs/loader_profiler_workers4", "is loading still slow?", r"(?!.*single-process-loader)"),
    ("pairs/particle_batch2", "what limits it?", r"## launch-bound:"),
    ("pairs/particle_batch2", "are there steps?", r"\(whole trace\)"),
    ("pairs/particle_batch128", "is it launch-bound?", r"(?!.*## launch-bound)"),
    ("pairs/sam_1_fp32_many_syncs", "what first?", r"## host-reads:"),
    ("pairs/sam_2_fp32_few_syncs", "is precision an issue?", r"## mixed-precision-off:"),
    ("pairs/sam_2_fp32_few_syncs", "how busy?", r"gpu_busy_share: 0\.9"),
    (
        "pairs/sam_3_bf16_compiled_sdpa",
        "is precision an issue?",
        r"(?!.*## (?:fp32-matmul|mixed-precision-off))",
    ),
    ("h100_bert_small_inference", "what first?", r"## launch-bound:"),
    ("h100_bert_small_inference", "how busy is the GPU?", r"gpu_busy_share: 0\.0[67]"),
    ("h100_qwen_inference", "is it GPU-bound?", r"gpu_busy_share: 0\.9"),
    ("h100_qwen_inference", "what is unfused?", r"RMS normalisation"),
    ("linear_2080ti_launch_bound", "how many steps were set aside?", r"steps: 37 of 39"),
    ("linear_2080ti_launch_bound", "what first?", r"## launch-bound:"),
    ("a100_train_6steps", "what first?", r"## exposed-communication:"),
    ("a100_train_6steps", "how busy is the GPU?", r"gpu_busy_share: 0\.8[34]"),
    ("v100_train_copy_heavy", "what are all the copies?", r"## device-copies:"),
    ("v100_train_copy_heavy", "are tensor cores used?", r"## fp32-matmul:"),
    ("mi300_timesformer_inference", "is attention fused?", r"## unfused-attention:"),
    ("mi300_timesformer_inference", "which function?", r"_preprocess_image|_decode|video"),
    ("mi300x_kernels_after_steps", "what is slow?", r"## slow-convolution:"),
    ("no_gpu_rank", "how busy is the GPU?", r"gpu_busy_share: not measured"),
    ("no_gpu_rank", "what do I fix?", r"do not invent a fix"),
    ("a100_kernels_lost", "how busy is the GPU?", r"gpu_busy_share: not measured"),
    ("alexnet", "what do I fix?", r"do not invent a fix"),
)
"""Trace, question, and a pattern of the answer; ``(?!.*x)``: x is not said."""


def report(name: str) -> Report:
    return analyze_cached(str(path_of(f"{name}.json.gz"))).report


@cache
def render_for_agent(name: str) -> str:
    return REPORTS.render("agent", report(name))


@pytest.mark.parametrize(("name", "question", "expected"), QUESTIONS)
def test_questions_that_agents_ask_are_answered(name: str, question: str, expected: str) -> None:
    text = render_for_agent(name)
    if expected.startswith("(?!"):
        assert re.match(expected, text, re.DOTALL), question
    else:
        assert re.search(expected, text), question


@pytest.mark.parametrize("name", sorted({name for name, _, _ in QUESTIONS}))
def test_the_agent_format_is_short_and_has_the_ids_of_the_report(name: str) -> None:
    text = render_for_agent(name)
    assert len(text) <= 4 * MAX_TOKENS
    named = report(name).by_id()
    assert set(re.findall(r"^## (\S+):", text, re.MULTILINE)) <= set(named)
    for key, finding in named.items():
        if f"## {key}:" in text and finding.impact is not None:
            assert f"gain_ns: {finding.impact.gain_ns} (" in text
    assert "\x1b" not in text and "\u202e" not in text


def test_ids_are_numbered_from_the_second_of_a_rule_on() -> None:
    result = report("v100_train_copy_heavy")
    assert list(result.by_id())[: len(result.findings)] == [f.rule for f in result.findings]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("memory/windows_training.pickle.gz", "saving: offload activations frees 118"),
        ("ncu/sparse_matmul_a10g.ncu-rep.gz", "fix: Choose a grid of whole waves"),
        ("mi300_torch_compile.json.gz", "next: measure the slow kernels: rocprof-compute profile"),
    ],
)
def test_agent_and_terminal_show_the_same_action(name: str, says: str) -> None:
    text = REPORTS.render("agent", analyze(str(path_of(name))))
    assert says in text and "do not invent a fix" not in text
