"""Operators far from the device's rates, on public traces, and what became of them afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from advisor.advise.rule_runner import RULE_FAILED
from advisor.core.finding import Finding
from advisor.measure import Analysis
from advisor.read import open_run
from tests.corpus_analyses import analyze_cached

NEW = {"slow-attention", "slow-gemm", "slow-convolution", "low-bandwidth", "handwritten-operator"}


def findings_by_rule(path: str) -> dict[str, Finding]:
    report = analyze_cached(path).report
    return {finding.rule: finding for finding in (*report.findings, *report.notes)}


def test_rms_norm_and_rotary_embedding_are_named(
    shared_trace: Callable[[str], str],
) -> None:
    """49 normalisations and 48 rotary embeddings a pass: 24 layers, two of each, and one at the
    end; the general finding on pointwise chains is folded under it."""
    rules = findings_by_rule(shared_trace("h100_qwen_inference"))
    named = rules["handwritten-operator"]
    assert named.priority == 1
    evidence = {item.label: str(item.value) for item in named.evidence}
    assert evidence["RMS normalisation"].startswith("49 per step")
    assert evidence["rotary embedding"].startswith("48 per step")
    assert "F.rms_norm" in named.fix
    assert rules["unfused-elementwise"].folded_under == "handwritten-operator"


def test_chains_found_by_a_walk_over_the_operators_are_the_same(
    shared_trace: Callable[[str], str],
) -> None:
    a = analyze_cached(shared_trace("h100_qwen_inference")).main
    rows = np.flatnonzero(a.in_window & (a.trace.gpu["kind"] == "kernel").to_numpy())
    rows = rows[np.argsort(a.trace.gpu["ts"].to_numpy()[rows], kind="stable")]
    ops = [str(a.kernels["op_name"][int(row)]).removeprefix("aten::").rstrip("_") for row in rows]
    seen = {"rms": 0, "rope": 0}
    for at in range(len(ops)):
        rest = [op for op in ops[at : at + 12] if op not in ("copy", "to")]
        if ops[at] == "pow" and rest[1:5] == ["mean", "add", "rsqrt", "mul"]:
            seen["rms"] += 1
        if ops[at] == "mul" and rest[1:5] == ["neg", "cat", "mul", "add"]:
            seen["rope"] += 1
    assert seen == {"rms": 49, "rope": 48}


def test_16_bit_attention_gains_its_prediction(shared_trace: Callable[[str], str]) -> None:
    """The same 144 calls of fused attention before and after: fp32 in the memory-efficient kernel,
    then 16 bits in flash attention."""
    before = analyze_cached(shared_trace("pairs/sam_2_fp32_few_syncs"))
    (after,) = open_run([shared_trace("pairs/sam_3_bf16_compiled_sdpa")]).traces.values()
    spent = []
    for a in (before.main, Analysis(after)):
        attention = (a.kernels["family"] == "attention").to_numpy() & a.in_window
        spent.append((int(attention.sum()), int(a.trace.gpu["dur"].to_numpy()[attention].sum())))
    assert spent[0][0] == spent[1][0] == 144
    measured = spent[0][1] - spent[1][1]
    finding = findings_by_rule(shared_trace("pairs/sam_2_fp32_few_syncs"))["slow-attention"]
    impact = finding.impact
    assert impact is not None and impact.gain_ns is not None
    assert impact.gain_ns == pytest.approx(measured, rel=0.15)
    assert (impact.low_ns or 0) < measured < (impact.high_ns or 0)
    assert "FP32" in finding.summary


def test_a_convolution_without_matrix_cores_is_named(shared_trace: Callable[[str], str]) -> None:
    finding = findings_by_rule(shared_trace("mi300x_kernels_after_steps"))["slow-convolution"]
    assert "matrix cores" in finding.summary
    assert "MIOPEN_FIND" in finding.code


@pytest.mark.parametrize(
    "name",
    ["a100_train_6steps", "v100_train_copy_heavy", "b200_eager", "h100_bert_small_inference",
     "mi210_gpu_only", "mi300_torch_compile", "linear_2080ti_launch_bound"],
)  # fmt: skip
def test_healthy_and_launch_bound_operators_are_not_slow(
    name: str, shared_trace: Callable[[str], str]
) -> None:
    assert not NEW & set(findings_by_rule(shared_trace(name)))
    failed = [
        item
        for item in analyze_cached(shared_trace(name)).report.not_checked
        if RULE_FAILED in item.why
    ]
    assert failed == []  # silent because it looked, not because it broke


def test_operators_bound_by_launches_are_never_far_below(
    shared_trace: Callable[[str], str],
) -> None:
    table = analyze_cached(shared_trace("b200_eager")).main.rooflines
    launch = table.filter(pl.col("bound") == "launch")
    assert launch.height > 0
    assert launch["saved"].null_count() == launch["efficiency"].null_count() == launch.height


BUSY = (
    "a100_train_6steps",
    "v100_train_copy_heavy",
    "h100_qwen_inference",
    "pairs/sam_2_fp32_few_syncs",
    "pairs/sam_3_bf16_compiled_sdpa",
    "pairs/particle_batch128",
)


def test_products_and_memory_bound_operators_reach_known_rates(
    shared_trace: Callable[[str], str],
) -> None:
    """The figures that the thresholds come from: per trace, the median of the operators that take
    half a percent of kernel time or more."""
    memory = ["elementwise", "reduction", "copy", "layout", "softmax", "normalisation", "pooling"]
    medians: dict[str, list[float]] = {"gemm": [], "memory": []}
    for name in BUSY:
        table = analyze_cached(shared_trace(name)).main.rooflines
        table = table.filter(
            pl.col("op").is_not_null()
            & (pl.col("share") > 0.005)
            & pl.col("bound").cast(pl.String).is_in(["compute", "memory"])
        )
        for kind, families in (("gemm", ["gemm"]), ("memory", memory)):
            one = table.filter(pl.col("family").is_in(families))["efficiency"].median()
            assert isinstance(one, float)
            medians[kind].append(one)
    assert [min(medians["gemm"]), max(medians["gemm"])] == pytest.approx([0.38, 0.98], abs=0.01)
    assert [min(medians["memory"]), max(medians["memory"])] == pytest.approx([0.51, 0.97], abs=0.01)


H100 = Path(__file__).parents[1] / "corpus/h100"


def test_no_step_with_a_double_backward_is_advised_to_compile() -> None:
    """TanhBackwardBackward0 runs in each step, of forces that are differentiated again."""
    rules = findings_by_rule(str(H100 / "numpy_double"))
    assert all("torch.compile(" not in each.code for each in rules.values())
    fusing = rules["unfused-elementwise"]
    assert fusing.informational and not fusing.edits
    assert fusing.fix == "Compile only functions that are differentiated once."
    assert "torch.compile does not support double backward" in repr(fusing.impact)


@pytest.mark.parametrize("name", ["gpt2_eager_attention", "checkpointed"])
def test_transformers_gelu_is_changed_in_the_configuration(name: str) -> None:
    gelu = findings_by_rule(str(H100 / name))["handwritten-operator"]
    assert 'activation_function = "gelu_pytorch_tanh"' in gelu.code
    assert "F.gelu" not in gelu.fix


def test_an_optimizer_that_takes_sparse_gradients_stays() -> None:
    rules = findings_by_rule(str(H100 / "ads_ranker"))
    assert "Adagrad takes sparse gradients" in rules["dense-embedding-gradient"].fix
    assert "torch.optim" not in rules["dense-embedding-gradient"].code
    # the update of the whole table takes most of the time
    assert rules["dense-embedding-gradient"].where[0].op == "aten::_foreach_addcdiv_"


def test_filled_buffer_is_not_advised_if_the_copy_is_slow() -> None:
    """aten::copy_ is 97% and more of each pin_memory()."""
    pins = findings_by_rule(str(H100 / "pin_each_step"))["pinned-allocation-in-loop"]
    assert "staging" not in pins.code
    assert "99% of pin_memory() is the copy" in pins.fix


def test_batches_without_a_loader_are_pinned_by_the_program() -> None:
    copies = findings_by_rule(str(H100 / "big_uploads"))["pageable-copies"]
    assert "DataLoader" not in copies.code
    assert "uploads.synchronize()" in copies.fix and len(copies.code.splitlines()) <= 12


@pytest.mark.parametrize(
    "name", ["image_loader", "ping_pong", "pin_each_step", "photo_tagger", "points_max_split"]
)
def test_larger_batch_is_not_advised_without_headroom(
    name: str,
) -> None:
    assert "batch-headroom" not in findings_by_rule(str(H100 / name))


def test_one_pause_in_a_run_is_not_a_rate() -> None:
    pauses = findings_by_rule(str(H100 / "photo_tagger")).get("gc-pauses")
    assert pauses is None or pauses.informational


def test_vocabulary_risk_is_not_reported_with_free_memory() -> None:
    result = analyze_cached(str(H100 / "checkpointed")).report
    assert "huge-vocabulary" not in {each.rule for each in result.risks}


def test_launches_that_more_samples_share_leave_the_note_on_room() -> None:
    assert "batch-headroom" in findings_by_rule(str(H100 / "face_gan"))


@pytest.mark.parametrize("name", ["face_gan", "seg_val_hist"])
def test_channels_last_network_has_no_transpose_finding(name: str) -> None:
    """The tensors have strides [c·h·w, 1, w·c, c], and the kernels read them so."""
    slow = findings_by_rule(str(H100 / name))["low-bandwidth"]
    assert "batch_norm" in slow.summary
    assert "transposed" not in slow.summary
    assert "contiguous" not in slow.code


@pytest.mark.parametrize(
    "name",
    ["face_gan", "seg_val_hist", "image_loader", "ads_ranker", "wide_embedding", "vocabulary"],
)
def test_advice_does_not_repeat_recorded_settings(name: str) -> None:
    result = analyze_cached(str(H100 / name))
    run_steps = result.main.run_steps
    assert run_steps is not None
    known = {
        "cudnn.benchmark = True": run_steps.flag("cudnn.benchmark") is True,
        'set_float32_matmul_precision("high")': run_steps.flag("float32_matmul_precision")
        == "high",
        "matmul.allow_tf32 = True": run_steps.flag("cuda.matmul.allow_tf32") is True,
        "cudnn.allow_tf32 = True": run_steps.flag("cudnn.allow_tf32") is True,
        "pin_memory=True": any(each.get("pin_memory") for each in run_steps.loaders),
        "persistent_workers=True": any(
            each.get("persistent_workers") for each in run_steps.loaders
        ),
    }
    assert any(known.values())
    for finding in (*result.report.findings, *result.report.notes):
        repeated_lines = [
            line for line, already in known.items() if already and line in finding.code
        ]
        assert not repeated_lines, finding.rule
