"""Findings of the kernel, memory and optimizer rules on public real traces, checked by hand.

The oracle is the trace file itself, read as plain JSON beside the code under test: names and
durations of its events, and the alignment that CUTLASS writes into the names of its kernels.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import polars as pl
import pytest

from advisor.advise.engine import analyze
from advisor.advise.rule_loading import load_rules
from advisor.advise.rule_runner import run_rules
from advisor.core import text as t
from advisor.core.finding import Finding, Outcome, PassedCheck
from advisor.core.report import Report
from advisor.core.rule import Evidence
from advisor.measure import Analysis
from advisor.measure.device.shapes import Tensor
from advisor.measure.host.operators import shares_of_operators
from advisor.rules.kernel.misaligned_gemm import GemmLayout, MisalignedGemm
from advisor.rules.support import kernel_work
from tests.corpus_analyses import analyze_cached

Find = Callable[[str], str]

OURS = {
    rule.id
    for rule in load_rules(config={})
    if rule.category in ("kernel", "memory", "optimizer")
    and rule.__module__.startswith("advisor.rules.")
}
LAUNCH_BOUND = ["b200_eager", "h100_bert_small_inference", "nccl_collectives"]
COMMUNICATION = re.compile(r"(?i)nccl|multimem")


@lru_cache(maxsize=8)
def raw(path: str) -> list[dict[str, Any]]:
    """The complete events of a file."""
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    return [e for e in events if e.get("ph") == "X" and isinstance(e.get("dur"), int | float)]


def kernels(path: str) -> list[dict[str, Any]]:
    return [e for e in raw(path) if str(e.get("cat", "")).lower() == "kernel"]


def time_of(events: list[dict[str, Any]], pattern: str = "") -> float:
    """Summed duration, ns."""
    return 1000 * sum(e["dur"] for e in events if re.search(pattern, e["name"]))


def analysis(path: str) -> Analysis:
    return analyze_cached(path).main


def rule_outcomes(path: str, rule_id: str, **options: float) -> list[Outcome]:
    (rule,) = [r for r in load_rules(config={rule_id: options}) if r.id == rule_id]
    return list(rule.check(analysis(path)))


def finding(path: str, rule_id: str, **options: float) -> Finding:
    (only_finding,) = [o for o in rule_outcomes(path, rule_id, **options) if isinstance(o, Finding)]
    return only_finding


def has_finding(path: str, rule_id: str, **options: float) -> bool:
    return any(isinstance(o, Finding) for o in rule_outcomes(path, rule_id, **options))


def figure(shown_finding: Finding, label: str) -> float:
    (evidence,) = [e for e in shown_finding.evidence if t.evidence_label(e) == label]
    assert isinstance(evidence.value, int | float)
    return float(evidence.value)


def report(path: str) -> Report:
    return analyze_cached(path).report


def ranked_rules(path: str) -> set[str]:
    """Rules with a ranked finding."""
    return {f.rule for f in report(path).findings}


# -- precision ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "b200_eager",  # nvjet, TensorRT-LLM's bmm
        "h100_bert_small_inference",  # wmma_tensorop
        "a100_train_6steps",  # TF32 is on, a few misaligned shapes are left in sgemm
        "two_ranks_rank0",
        "mi300_torch_compile",
        "nccl_collectives",  # TF32 convolutions; one classifier in sgemm
    ],
)
def test_used_tensor_cores_are_not_advised(shared_trace: Find, name: str) -> None:
    assert not has_finding(shared_trace(name), "fp32-matmul", min_step_share=0.0)


def test_slow_tensor_cores_are_no_passed_check(shared_trace: Find) -> None:
    outcomes = rule_outcomes(shared_trace("h100_bert_small_inference"), "fp32-matmul")
    assert [o for o in outcomes if isinstance(o, PassedCheck)] == []


@pytest.mark.parametrize("name", ["b200_eager"])
def test_tensor_core_use_in_bf16_is_praised(shared_trace: Find, name: str) -> None:
    path = shared_trace(name)
    assert not [k["name"] for k in kernels(path) if re.search(r"sgemm|simt", k["name"])]
    (praise,) = [o for o in rule_outcomes(path, "fp32-matmul") if isinstance(o, PassedCheck)]
    assert praise.text.startswith("100% of GEMM and convolution time")


def test_v100_matrix_products_in_fp32_are_found_with_their_share(shared_trace: Find) -> None:
    path = shared_trace("v100_train_copy_heavy")
    result = finding(path, "fp32-matmul")
    # split-K reductions, epilogues and vector products are no matrix kernels
    # nor are kernels whose call is not in the file work of these steps: they were queued before
    runtime = [e for e in raw(path) if str(e.get("cat", "")).lower() in ("runtime", "cuda_runtime")]
    called = {e["args"]["correlation"] for e in runtime}
    product_kernels = [e for e in kernels(path) if e["args"]["correlation"] in called]
    assert len(kernels(path)) > len(product_kernels)
    by_hand = time_of(product_kernels, r"sgemm") / time_of(product_kernels)
    assert figure(result, "FP32 matrix time, share of kernel time") == pytest.approx(
        by_hand, rel=0.02
    )
    assert 0.2 < by_hand < 0.3


def test_a_v100_gets_mixed_precision_advice_and_not_tf32(shared_trace: Find) -> None:
    result = finding(shared_trace("v100_train_copy_heavy"), "fp32-matmul")
    assert "float16" in result.code and "GradScaler" in result.code
    assert "set_float32_matmul_precision" not in result.code
    assert "fp32-matmul" in ranked_rules(shared_trace("v100_train_copy_heavy"))


def test_v100_estimate_matches_a_tensor_core_run(shared_trace: Find) -> None:
    """The A100 trace is of the same kind of model: its matrix time in TF32, stretched by the
    ratio of the memory bandwidths (1555 and 900 GB/s), lies inside the range."""
    v100, a100 = shared_trace("v100_train_copy_heavy"), shared_trace("a100_train_6steps")
    now = time_of(kernels(v100), r"gemm")
    then = time_of(kernels(a100), r"gemm")
    (edit,) = finding(v100, "fp32-matmul").edits
    assert edit.best_factor is not None and edit.worst_factor is not None
    assert edit.best_factor < then / now * 1555 / 900 < edit.worst_factor


# -- alignment ------------------------------------------------------------------------------


def test_kernel_name_layout_gives_its_alignment(
    shared_trace: Find,
) -> None:
    """CUTLASS writes the elements a load takes into the name: alignment of TF32 products follows
    from their shapes and the nn/nt/tn in the name, M left out unless A is transposed."""
    right = wrong = 0
    for name in ("a100_train_6steps", "two_ranks_rank0"):
        trace = analysis(shared_trace(name)).trace
        op = trace.gpu["op"]
        table = zip(
            trace.gpu["name"].cast(pl.String),
            trace.cpu["name"].gather(op),
            trace.inputs["dims"].gather(trace.cpu["inputs"].gather(op)),
            strict=True,
        )
        for kernel, called, dims in table:
            match = re.search(r"s1688gemm_\w*_[nt][nt]_align(\d)", kernel)
            if match is None or called not in ("aten::mm", "aten::bmm", "aten::addmm"):
                continue
            at = 1 if called == "aten::addmm" else 0
            a, b = (Tensor(tuple(d), "float", None) for d in json.loads(dims)[at : at + 2])
            is_misaligned = GemmLayout(a, b).misaligned(kernel, 4)
            assert is_misaligned is not None
            if (not is_misaligned) == (match.group(1) == "4"):
                right += 1
            else:
                wrong += 1
    assert right > 1900
    assert wrong <= 4  # slices whose row length is not the dimension


def test_misaligned_tf32_products_of_the_a100_run_are_found(shared_trace: Find) -> None:
    path = shared_trace("a100_train_6steps")
    result = finding(path, "misaligned-gemm")
    narrow = time_of(kernels(path), r"_align1>")  # by their own names
    fallen = time_of(kernels(path), r"sgemm|gemmk1")  # off the tensor cores, most for alignment
    a_step = figure(result, "misaligned products per step")
    assert narrow <= 6 * a_step <= narrow + fallen
    text = " ".join(str(e.value) for e in result.evidence if e.label == "shape")
    assert "647" in text
    assert "M =" not in text


@pytest.mark.parametrize("name", ["two_ranks_rank0", "two_ranks_rank1"])
def test_misaligned_two_rank_run_is_limited_by_something_else(
    shared_trace: Find, name: str
) -> None:
    path = shared_trace(name)  # 45 and 47% busy
    assert not has_finding(path, "misaligned-gemm")
    result = finding(path, "misaligned-gemm", min_busy=0.0)
    narrow = time_of(kernels(path), r"_align1>")
    fallen = time_of(kernels(path), r"sgemm|gemmk1")
    assert narrow <= 2 * figure(result, "misaligned products per step") <= narrow + fallen


def test_large_aligned_products_reach_attainable_rates(
    shared_trace: Find,
) -> None:
    """A100 in TF32 and bfloat16, H100 and MI300X in bfloat16; products of 30 µs and more."""
    names = [
        *("a100_train_6steps", "h100_qwen_inference", "mi300_timesformer_inference"),
        *("mi300_torch_compile", "pairs/sam_3_bf16_compiled_sdpa"),
    ]
    for name in names:
        (rule,) = [r for r in load_rules(config={}) if isinstance(r, MisalignedGemm)]
        a = analysis(shared_trace(name))
        gemm = kernel_work.family_mask(a, "gemm") & kernel_work.compute_mask(a)
        misaligned, undecided, _, _ = rule._judge(a, gemm)
        table = a.rooflines.filter((pl.col("family") == "gemm") & (pl.col("bound") == "compute"))
        table = table.filter(pl.col("tensor_core") & (pl.col("dtype") != "fp32"))
        part = shares_of_operators(a, misaligned | undecided)
        table = table.join(part, on=["op", "inputs"], nulls_equal=True).filter(pl.col("part") < 0.1)
        ideal = table["dur"] * table["efficiency"]
        large = ideal >= 30_000 * table["calls"]
        reached = ideal.filter(large).sum() / table["dur"].filter(large).sum()
        assert 0.7 <= reached <= 1.0, name


def test_no_product_of_the_b200_is_flagged_for_its_odd_m(shared_trace: Find) -> None:
    assert rule_outcomes(shared_trace("b200_eager"), "misaligned-gemm", min_busy=0.0) == []


def test_only_the_vocabulary_product_of_bert_is_misaligned(shared_trace: Find) -> None:
    """26 products, all with 141 tokens; one has 30522 columns and ran on an align2 kernel."""
    path = shared_trace("h100_bert_small_inference")
    assert not has_finding(path, "misaligned-gemm")  # 7% busy: too little to report
    result = finding(path, "misaligned-gemm", min_busy=0.0)
    shapes = [e.value for e in result.evidence if e.label == "shape"]
    assert shapes == ["aten::addmm [141, 512] x [512, 30522]: N = 30522 (pad to 30528)"]
    assert [k["name"] for k in kernels(path) if re.search(r"_align[124]>", k["name"])] == [
        where.kernel for where in result.where
    ]


# -- layout ---------------------------------------------------------------------------------


def test_miopen_transposes_are_found_without_operators(shared_trace: Find) -> None:
    path = shared_trace("mi210_gpu_only")
    result = finding(path, "layout-transposes")
    moving = time_of(kernels(path), r"^batched_transpose")
    convolving = time_of(kernels(path), r"igemm_(fwd|bwd|wrw)|^MIOpenConv|naive_conv")
    assert figure(result, "layout transposes of the recording") == pytest.approx(moving, rel=1e-6)
    assert figure(result, "layout transposes, share of convolution time") == pytest.approx(
        moving / (moving + convolving), abs=0.02
    )
    assert "MIOPEN" in result.code
    assert "layout-transposes" in ranked_rules(path)


def test_transposes_are_no_finding_in_a_host_bound_step(shared_trace: Find) -> None:
    path = shared_trace("nccl_collectives")  # busy 24%
    assert not has_finding(path, "layout-transposes")
    result = finding(path, "layout-transposes", min_busy=0.0)
    moving = time_of(kernels(path), r"nchwToNhwc|nhwcToNchw")
    assert figure(result, "layout transposes per step") == pytest.approx(moving / 3, rel=1e-6)


# -- small kernels --------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAUNCH_BOUND)
def test_a_device_that_waits_gets_no_advice_on_kernels(shared_trace: Find, name: str) -> None:
    path = shared_trace(name)
    kernel_rules = {r.id for r in load_rules(config={}) if r.category == "kernel"}
    named = {f.rule for f in (*report(path).findings, *report(path).notes)}
    assert not named & kernel_rules


def test_an_all_reduce_is_not_a_small_grid(shared_trace: Find) -> None:
    """The profiler's own figures say that 49% of kernel time has less than one block per
    multiprocessor; without communication it is 19% of compute time."""
    path = shared_trace("a100_train_6steps")
    compute = [k for k in kernels(path) if not COMMUNICATION.search(k["name"])]
    by_row = re.compile(r"::reduce_kernel|GammaBeta")  # a block for each row or channel
    small = [k for k in compute if k["args"]["blocks per SM"] < 1 and not by_row.search(k["name"])]
    naive = [k for k in kernels(path) if k["args"]["blocks per SM"] < 1]
    assert time_of(naive) / time_of(kernels(path)) > 0.45
    assert not has_finding(path, "small-grids")
    result = finding(path, "small-grids", min_share=0.1)
    share = figure(result, "small kernels, share of compute time")
    assert share == pytest.approx(time_of(small) / time_of(compute), rel=0.02)


@pytest.mark.parametrize(
    "name", ["a100_train_6steps", "v100_train_copy_heavy", "two_ranks_rank0", "b200_eager"]
)
@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ("small-grids", {"min_share": 0.001, "min_busy": 0.0}),
        ("low-occupancy", {"min_share": 0.001, "min_busy": 0.0}),
        ("wave-quantisation", {"min_share": 0.001, "min_busy": 0.0}),
        ("unfused-elementwise", {"min_share": 0.001, "min_busy": 0.0}),
    ],
)
def test_communication_is_never_called_a_bad_kernel(
    shared_trace: Find, name: str, rule: str, options: dict[str, float]
) -> None:
    path = shared_trace(name)
    for outcome in rule_outcomes(path, rule, **options):
        if isinstance(outcome, Finding):
            assert not [w.kernel for w in outcome.where if COMMUNICATION.search(w.kernel or "")]
            for edit in outcome.edits:
                assert "communication" not in edit.select.family


def test_healthy_traces_get_no_occupancy_or_fusion_advice(shared_trace: Find) -> None:
    """The profiler writes an occupancy of 0 for the A100's tensor-core kernels (48 KiB of shared
    memory and more), and 25% of kernel time is below 40% by what it writes."""
    path = shared_trace("a100_train_6steps")
    low = [k for k in kernels(path) if k["args"]["est. achieved occupancy %"] < 40]
    assert time_of(low) / time_of(kernels(path)) > 0.25
    for rule in ("low-occupancy", "wave-quantisation", "unfused-elementwise"):
        assert not has_finding(path, rule)


# -- attention ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["h100_bert_small_inference", "b200_eager", "mi300_torch_compile"])
def test_fused_attention_is_praised(shared_trace: Find, name: str) -> None:
    path = shared_trace(name)
    (praise,) = rule_outcomes(path, "unfused-attention")
    assert isinstance(praise, PassedCheck)
    attention = time_of(kernels(path), r"(?i)flash_fwd|fmhaSm100|attn_fwd")
    share = re.search(r"\((\d+)% of kernel time\)", praise.text)
    assert share is not None
    assert int(share.group(1)) == round(100 * attention / time_of(kernels(path)))


@pytest.mark.parametrize(
    "name", ["a100_train_6steps", "v100_train_copy_heavy", "two_ranks_rank0", "nccl_collectives"]
)
def test_products_of_embeddings_are_not_attention(shared_trace: Find, name: str) -> None:
    """The recommender models multiply batches of embeddings, two of them beside a softmax."""
    assert rule_outcomes(shared_trace(name), "unfused-attention", min_share=0.0005) == []


# -- memory and optimizer -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a100_train_6steps", "v100_train_copy_heavy"])
def test_no_allocation_in_steady_state_is_praised(shared_trace: Find, name: str) -> None:
    path = shared_trace(name)
    assert not [e for e in raw(path) if re.fullmatch(r"cuda(Malloc|Free)\w*", e["name"])]
    assert [type(o) for o in rule_outcomes(path, "allocations-in-loop")] == [PassedCheck]
    assert rule_outcomes(path, "empty-cache-in-loop") == []


@pytest.mark.parametrize("name", ["alexnet", "simple_add"])
def test_allocations_at_the_start_are_not_a_loop(shared_trace: Find, name: str) -> None:
    path = shared_trace(name)
    assert len([e for e in raw(path) if e["name"] == "cudaMalloc"]) == 24
    assert rule_outcomes(path, "allocations-in-loop") == []
    assert rule_outcomes(path, "empty-cache-in-loop") == []


def test_an_almost_empty_h100_has_no_memory_risk(shared_trace: Find) -> None:
    path = shared_trace("h100_bert_small_inference")
    assert rule_outcomes(path, "memory-near-capacity") == []
    assert rule_outcomes(path, "recompute-with-free-memory") == []


def test_unrecorded_memory_is_requested_not_guessed(shared_trace: Find) -> None:
    options = [m.record for m in report(shared_trace("a100_train_6steps")).not_checked]
    assert "profile_memory=True" in options
    assert "with_stack=True" in options


@pytest.mark.parametrize("name", ["a100_train_6steps", "v100_train_copy_heavy"])
def test_apex_fused_adam_is_not_a_single_tensor_optimizer(shared_trace: Find, name: str) -> None:
    path = shared_trace(name)
    a_step = len([k for k in kernels(path) if "AdamFunctor" in k["name"]]) / 6
    (praise,) = rule_outcomes(path, "single-tensor-optimizer")
    assert isinstance(praise, PassedCheck)
    assert "8 kernels per step" in praise.text
    assert a_step == pytest.approx(8, abs=2)  # V100: the window cuts into a seventh step


# -- all files ------------------------------------------------------------------------------


def test_every_finding_of_ours_is_complete_and_inside_its_bounds(public_trace: str) -> None:
    a = analysis(public_trace)
    rules = [r for r in load_rules(config={}) if r.id in OURS]
    result = run_rules(-1, a, rules)
    for finding in result.findings:
        assert finding.summary and finding.fix and finding.verify and finding.where
        assert all(isinstance(e, Evidence) for e in finding.evidence)
        for edit in finding.edits:
            low, middle, high = edit.best_factor, edit.factor, edit.worst_factor
            if low is not None and middle is not None and high is not None:
                assert 0 <= low <= middle <= high <= 1


def test_qwen_finding_is_pointwise_rms_norm(shared_trace: Find) -> None:
    """A device 92% busy, more than a third of it in chains of pointwise kernels."""
    report = analyze(shared_trace("h100_qwen_inference"))
    assert report.status == "bottlenecks"
    assert report.findings[0].rule == "handwritten-operator"
    assert report.findings[0].title.startswith("RMS normalisation")
    general = next(f for f in report.findings if f.rule == "unfused-elementwise")
    assert general.folded_under == "handwritten-operator"


# -- code fits the program of the trace ----------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rule", "says", "never"),
    [
        # BF16 products, doubles in masks and resizing
        ("pairs/sam_3_bf16_compiled_sdpa", "double-precision", "mask.to", "model.float()"),
        # FP16 autocast (325 kernels of halves, none of bfloat16), six batch norms
        ("pairs/particle_batch128", "rebuilt-weights", "to(torch.float16)", "torch.bfloat16"),
        (
            "pairs/particle_batch128",
            "rebuilt-weights",
            'if "norm" not in type(module)',
            "torch.bfloat16",
        ),
        ("h100_qwen_inference", "handwritten-operator", "to_qwen2()", "to_llama"),
        # no module of these is one for which Hugging Face has fused attention
        ("mi300_timesformer_inference", "unfused-attention", "sdpa_kernel", "from_pretrained"),
        ("pairs/particle_batch128", "unfused-attention", "sdpa_kernel", "from_pretrained"),
        # a V100 has no units for BF16
        ("v100_train_copy_heavy", "exposed-communication", "FP16", "BF16"),
    ],
)
def test_code_keeps_the_precision_and_the_model_of_the_trace(
    shared_trace: Find, name: str, rule: str, says: str, never: str
) -> None:
    match = next(each for each in report(shared_trace(name)).findings if each.rule == rule)
    assert says in f"{match.fix} {match.code}"
    assert never not in f"{match.fix} {match.code}"


@pytest.mark.parametrize("name", ["h100_qwen_inference", "mi300_timesformer_inference"])
def test_smaller_batch_is_not_advised_with_free_memory(shared_trace: Find, name: str) -> None:
    result = report(shared_trace(name))
    assert result.memory_peak_bytes is not None and result.memory_capacity_bytes is not None
    assert result.memory_peak_bytes < 0.1 * result.memory_capacity_bytes
    assert "half the batch" not in {each.change for view in result.memory for each in view.savings}
