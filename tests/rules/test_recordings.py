"""Rules about a recorded run, on recordings: each fires on the slow one, and not on its cure.

``tests/data/recorded`` holds what `advisor record` and `advisor workloads run` wrote on two busy
cores without a GPU (torch 2.13); of those with a trace, one window.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from advisor.advise.engine import Options, analyze
from advisor.advise.rule_loading import load_rules
from advisor.advise.rule_runner import run_rules
from advisor.core.finding import Finding
from advisor.core.report import Report
from advisor.core.text import first_sentence
from advisor.measure.steps.run_steps import RunSteps
from advisor.read import open_run
from advisor.rules.optimizer.unused_gradients import _find_reference
from advisor.testing import TraceBuilder

RECORDED = Path(__file__).parents[1] / "data" / "recorded"
KINDS = ("slow", "cured")
CORPUS = Path(__file__).parents[1] / "corpus"
CASES = {
    "gc_pauses": "gc-pauses",
    "worker_respawn": "workers-respawned",
    "anomaly": "debug-switches",
    "leak": "memory-leak",
    "threads": "thread-oversubscription",
    "workers": "loader-workers",
    "waiting_loop": "loop-phases",
    "histograms": "loop-phases",
    "unfrozen": "unused-gradients",
    "evaluation_graphs": "evaluation-graphs",
    "saving": "saving-time",
    "training_mode": "training-mode",
    "dense_embedding": "dense-embedding-gradient",
    "slices": "slice-gradients",
    "grown_cache": "growing-concatenation",
    "experts": "dense-experts",
    "pictures": "pointwise-before-part",
    "sliding_window": "growing-concatenation",
    "growing_metric": "growing-inputs",
    "last_position": "dropped-positions",
    "step_evaluation": "step-evaluation",
    "gaussian_process": "explicit-inverse",
    "triplets": "looped-operators",
    "micro_batches": "small-micro-batches",
    "hooks": "module-hooks",
    "one_by_one": "unbatched-calls",
    "float64": "double-precision",
    "no_cache": "prefix-recomputed",
    "embedded_prefix": "prefix-recomputed",
    "second_forward": "second-forward",
    "table_in_forward": "forward-code",
    "single_tensor": "single-tensor-optimizer",
    "quadrature": "slow-operator-arguments",
    "pairs": "pairwise-broadcast",
    "plates": "separable-filter",
    "constant_kernel": "rebuilt-weights",
    "product_order": "product-order",
    "picture_answers": "constant-projections",
    "text_encoder": "same-input-again",
    "grouped_heads": "repeated-keys-values",
    "gloo_metrics": "collectives-in-step",
    "gloo_accumulation": "missing-no-sync",
    "gloo_parameters": "small-collectives",
    "rank_evaluation": "straggler-rank",
    "unsharded": "unsharded-loading",
    "gathered_nodes": "layer-after-gather",
    "contention": "cpu-contention",
    "worker_cpu": "cpu-bound-transforms",
    "joined_list": "joined-list",
    "embedding_bag": "dense-embedding-gradient",
    "dense_graph": "mostly-zero-operand",
    "reverb": "long-filter",
    "page_faults": "page-faults",
    "confusion": "mostly-zero-operand",
    "transcribe": "dropped-positions",
    "static_cache": "unfilled-cache",
    "memory_bank": "slow-operator-arguments",
    "dropout_samples": "repeated-trunk",
    "clip_frames": "dropped-positions",
    "modes": "scattered-matrices",
    "year_windows": "whole-record-items",
}


def findings(name: str) -> dict[str, Finding]:
    report = analyze(RECORDED / name, Options(config={}))
    return {f.rule: f for f in (*report.findings, *report.risks, *report.notes)}


@pytest.mark.parametrize("name", CASES)
def test_the_slow_recording_has_the_finding_and_its_cure_has_not(name: str) -> None:
    assert CASES[name] in findings(f"{name}.slow")
    assert CASES[name] not in findings(f"{name}.cured")


@pytest.mark.parametrize(
    "name",
    [
        *(
            "clip_frames",
            "dense_embedding",
            "dense_graph",
            "dropout_samples",
            "constant_kernel",
            "contention",
            "embedded_prefix",
            "embedding_bag",
            "experts",
            "float64",
            "gathered_nodes",
            "gaussian_process",
            "gloo_accumulation",
            "growing_metric",
        ),
        *(
            "hooks",
            "joined_list",
            "last_position",
            "memory_bank",
            "modes",
            "micro_batches",
            "one_by_one",
            "pairs",
            "picture_answers",
            "plates",
            "page_faults",
            "product_order",
            "rank_evaluation",
            "reverb",
            "second_forward",
            "static_cache",
        ),
        *("single_tensor", "slices", "sliding_window", "table_in_forward", "unfrozen"),
        "unsharded",
        "worker_cpu",
    ],
)
def test_the_saving_of_the_cure_lies_in_the_range_of_the_gain(name: str) -> None:
    """The recordings are those whose cure changes nothing else; the saving is between the
    medians of both runs."""
    slow, cured = (
        analyze(RECORDED / f"{name}.{kind}", Options(config={})) for kind in ("slow", "cured")
    )
    assert slow.step is not None and cured.step is not None
    match = next(f.impact for f in slow.findings if f.rule == CASES[name])
    assert match is not None and match.low_ns is not None and match.high_ns is not None
    assert match.low_ns <= slow.step.ns - cured.step.ns <= match.high_ns


def test_work_of_one_rank_is_named_with_its_function() -> None:
    first = analyze(RECORDED / "rank_evaluation.slow", Options(config={})).findings[0]
    assert first.title == "Rank 0 does work that the others do not"
    assert first.where[0].function == "Board.update"


def test_loop_function_is_reported_with_main_cost_and_line() -> None:
    """A window of past values is kept by concatenation in ``Window.push``, which is nearly all of
    the loop's own code: the general finding would gain more, and says less."""
    report = analyze(RECORDED / "sliding_window.slow", Options(config={}))
    first, second = report.findings[:2]
    assert (first.rule, first.where[0].function) == ("growing-concatenation", "Window.push")
    assert first.where[0].line == 14
    assert (second.rule, second.folded_under) == ("loop-phases", first.rule)


def test_search_in_a_list_is_named_with_its_line() -> None:
    """Negatives are drawn again while they are in the user's list; the cure has a set beside it,
    and is still a loop in Python."""
    slow, cured = (analyze(RECORDED / f"negatives.{kind}", Options(config={})) for kind in KINDS)
    finding = slow.findings[0]
    assert finding.title.endswith("looks for values in a list")
    assert "line 44 (InteractionLog.has_seen)" in finding.fix
    assert finding.impact is not None and slow.step is not None and cured.step is not None
    low, high = finding.impact.low_ns, finding.impact.high_ns
    assert low is not None and high is not None
    assert low <= slow.step.ns - cured.step.ns <= high
    assert not any("list" in each.title for each in (*cured.findings, *cured.notes))


def test_filter_line_differs_from_model_convolutions() -> None:
    """Both are in forward, and the model's take longer."""
    where = findings("plates.slow")["separable-filter"].where
    assert (where[0].function, where[0].line) == ("LocalContrast.blur", 21)


def test_sleeping_and_evaluating_loop_is_reported_first() -> None:
    """0.1 s of sleep in each step; evaluation on 280,000 samples every twenty steps."""
    report = analyze(RECORDED / "waiting_loop.slow", Options(config={}))
    first = report.findings[0]
    assert first.rule == "loop-phases" and first.impact is not None
    assert first.impact.gain_ns == pytest.approx(100e6, rel=0.1)
    assert "unknown" not in report.verdict
    shares = {f.rule: f for f in (*report.risks, *report.notes)}["time-between-steps"].evidence
    assert shares[0].value == pytest.approx(report.recorded.outside_ns)  # type: ignore[union-attr]


def test_sampled_function_of_a_sixth_of_the_step_is_reported() -> None:
    """Histograms of weights and gradients take 13% of the step: less than what is reported without
    a name, more than half of it."""
    report = analyze(RECORDED / "histograms.slow", Options(config={}))
    first = report.findings[0]
    assert first.rule == "loop-phases"
    assert (first.where[0].file, first.where[0].function) == ("histograms.py", "Tracker.histogram")
    assert "share of this function" in [e.label for e in first.evidence]


def test_garbage_collection_cost_matches_the_measured_saving() -> None:
    means = []
    for variant in ("slow", "cured"):
        recording = open_run(RECORDED / f"gc_pauses.{variant}").recording
        assert recording is not None
        mean = RunSteps(recording.ranks[0]).mean
        assert mean is not None
        means.append(mean)
    impact = findings("gc_pauses.slow")["gc-pauses"].impact
    assert impact is not None and impact.gain_ns is not None
    # one run each on a busy machine: 15% of what was saved is within their spread
    assert impact.gain_ns == pytest.approx(means[0] - means[1], rel=0.15)


@pytest.mark.parametrize("name", sorted(p.name for p in RECORDED.iterdir()))
def test_phases_of_every_recorded_step_add_up(name: str) -> None:
    recording = open_run(RECORDED / name).recording
    assert recording is not None and recording.problems == []
    for step in recording.ranks[0].steps:
        assert sum(step.phases.values()) == step.dur


@pytest.mark.parametrize("name", sorted(p.name for p in RECORDED.iterdir()))
def test_gains_of_a_report_are_shares_of_one_step(name: str) -> None:
    report = analyze(RECORDED / name, Options(config={}))
    for finding in (*report.findings, *report.notes):
        impact = finding.impact
        if impact is not None and impact.currency == "step_time" and impact.gain_ns:
            assert impact.share == pytest.approx(impact.gain_ns / report.step_ns)


def test_verdict_claims_no_saving_of_unnamed_code() -> None:
    verdict = analyze(RECORDED / "leak.slow", Options(config={})).verdict
    assert (
        "A fix saves" not in verdict and verdict.count("advisor record --deep python base.py") == 1
    )
    assert "the 22 GiB left are full in 4,030 steps" in verdict


@pytest.mark.parametrize(
    ("name", "rule"),
    [("growing_metric.slow", "growing-inputs"), ("worker_respawn.slow", "workers-respawned")],
)
def test_time_of_a_known_cause_is_not_the_loops_own_code_too(name: str, rule: str) -> None:
    report = analyze(RECORDED / name, Options(config={}))
    assert [finding.rule for finding in report.findings] == [rule]


H100 = Path(__file__).parents[1] / "corpus" / "h100"


@cache
def on_h100(name: str) -> Report:
    return analyze(H100 / name, Options(config={}))


def text_of(name: str, rule: str) -> Finding:
    report = on_h100(name)
    return next(f for f in (*report.findings, *report.notes, *report.risks) if f.rule == rule)


@pytest.mark.parametrize(
    ("name", "rule", "title"),
    [
        ("asr_beam", "new-input-shapes", "cuDNN attention plans again for each new input shape"),
        ("latent_sampler", "rebuilt-weights", "Autocast casts frozen weights again in each step"),
        ("voice_stream", "rebuilt-weights", "weight_norm is computed again in each forward pass"),
        ("citation_gcn", "unfused-messages", "Gather and scatter-add in place of a sparse product"),
    ],
)
def test_titles_name_the_wasted_work(name: str, rule: str, title: str) -> None:
    assert text_of(name, rule).title == title


@pytest.mark.parametrize(
    ("name", "removed"),
    [
        ("latent_sampler", "the casts are gone"),
        ("voice_stream", "no weight is normalised"),
        ("doc_finder", "nothing comes before the product"),
    ],
)
def test_the_evidence_of_the_fix_is_about_the_repeated_work(name: str, removed: str) -> None:
    assert removed in text_of(name, "rebuilt-weights").verify


def test_a_gelu_by_hand_has_the_page_of_gelu_to_read() -> None:
    (link,) = text_of("gpt2_eager_attention", "handwritten-operator").references
    assert link.endswith("torch.nn.functional.gelu.html")


def test_recorder_peak_is_used_without_allocator_events() -> None:
    report = on_h100("checkpointed")
    (reserved,) = [
        each.value
        for each in text_of("checkpointed", "recompute-with-free-memory").evidence
        if each.label == "peak reserved"
    ]
    assert report.memory_peak_bytes == reserved
    assert text_of("checkpointed", "batch-headroom").summary.startswith("The run holds 8.57 GiB")
    assert any("GPU memory: what holds it at its peak" in s.what for s in report.not_checked)


def test_removed_allocator_events_are_not_requested() -> None:
    report = analyze(H100.parent / "serving" / "vllm_decode_full", Options(config={}))
    (skipped,) = [s for s in report.not_checked if s.what.startswith("GPU memory")]
    assert "cut out of this file" in skipped.why and not skipped.record


def test_ratios_of_rows_are_numbers_and_no_percentages() -> None:
    evidence = text_of("ads_ranker", "dense-embedding-gradient").evidence[0]
    assert evidence.unit == "" and evidence.value == pytest.approx(27.01, abs=0.01)


def test_counts_of_longer_steps_are_given_per_step() -> None:
    """The V100's longer half runs 5 such kernels in 3 steps, the shorter half 2."""
    report = analyze(H100.parent / "v100_train_copy_heavy.json.gz", Options(config={}))
    (line,) = [each for each in report.limits if "The longer half" in each]
    assert "(0.7 times in a shorter step, 1.7 in a longer one)" in line


def test_library_waits_name_the_library_function() -> None:
    """The place is the program's own line, the wait is PyTorch Geometric's: what it has to do."""
    report = analyze(str(CORPUS / "h100/citation_gcn"), Options(config={}))
    finding = next(f for f in report.findings if f.rule == "data-dependent-shapes")
    assert "add_remaining_self_loops (torch_geometric/utils/loop.py)" in finding.fix
    assert "cached=True" in finding.code and "mask" not in finding.code


@pytest.mark.parametrize(
    ("method", "code"), [("forward", "metrics.update("), ("update", "validate_args=False")]
)
def test_a_metric_in_the_loop_is_named_with_its_line_by_samples(method: str, code: str) -> None:
    b = TraceBuilder()
    for _ in b.steps():
        b.product(300, 6)
        with b.op("aten::_unique2"), b.op("aten::_local_scalar_dense"):
            b.copy("DtoH", 8, 1.5, pinned=False, op=None)
        b.host(200)
        b.product(300, 6)
    run = b.record_of_run()
    run.steps(60, 10, forward=4, backward=5)
    frames = [
        "train.py(70): main",
        "train.py(40): step",
        f"torchmetrics/metric.py(315): Metric.{method}",
        "torchmetrics/functional/stat_scores.py(320): _validate",
        "torch/functional.py(967): _unique_impl",
    ]
    run.event("stacks", frames=frames, stacks=[[20, [0, 1, 2, 3, 4]], [60, [0]]])
    result = run_rules(0, b.analysis(), load_rules()).findings
    result = [each for each in result if each.rule == "data-dependent-shapes"]
    assert len(result) == 1 and code in result[0].code
    assert result[0].where[0].line == 40
    assert "_validate (torchmetrics/functional/stat_scores.py)" in result[0].fix


@pytest.mark.parametrize("batch", [2, 32, 64])
def test_larger_batch_is_advised_for_an_idle_gpu_with_memory(batch: int) -> None:
    """Batches of 32 and 128 took the same time there; with 128 no launch is late."""
    report = analyze(str(CORPUS / f"pairs/particle_batch{batch}.json.gz"), Options(config={}))
    finding = next(f for f in report.findings if f.rule == "launch-bound")
    assert finding.fix.startswith("If shapes repeat, replay the kernels as CUDA graphs; first")
    assert ". Or double the batch, then measure: that raises throughput." in finding.fix
    assert "first remove 5 waits for the GPU: aten::item" in first_sentence(finding.fix)
    assert (
        "torch.where(ok, x, y)" in finding.code and "torch.cat([batch, next_batch])" in finding.code
    )


def test_waits_stay_outside_of_captured_dense_layers() -> None:
    """A short report shows the first sentence of a fix, and the code."""
    report = analyze(str(CORPUS / "dlrm_8ranks/worker0.pt.trace.json.gz"), Options(config={}))
    finding = next(f for f in report.findings if f.rule == "launch-bound")
    dense = "Replay only the dense layers as CUDA graphs; leave the 4 waits per step for the GPU"
    assert finding.fix.startswith(dense)
    assert "6 waits per step come from torchrec" in finding.fix and "model.dense" in finding.code


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("a100_train_6steps", "all2all_tw_data:wait, for 5.75 ms"),
        ("v100_train_copy_heavy", ":init, for 27.7 ms"),
    ],
)
def test_active_pipeline_advice_names_its_blocking_call(name: str, blocks: str) -> None:
    """The pipeline's ranges are ``## sparse_data_dist ##`` and ``## wait_sparse_data_dist ##``."""
    report = analyze(str(CORPUS / f"{name}.json.gz"), Options(config={}))
    finding = next(f for f in report.findings if f.rule == "exposed-communication")
    assert "TrainPipelineSparseDist" not in finding.code and "next batch" not in finding.fix
    assert "TrainPipelineSparseDist is on already" in finding.fix and blocks in finding.fix


@pytest.mark.parametrize(
    ("name", "absent", "present"),
    [
        ("h100_bert_small_inference", "attention", "a larger batch"),  # it runs fused
        ("linear_2080ti_launch_bound", "attention", "a larger batch"),  # linear layers alone
        ("nccl_collectives", "attention", "a larger batch"),  # a ResNet
        ("pairs/particle_batch2", "optimizer", "fused attention"),  # eight blocks of bmm, softmax
    ],
)
def test_launch_advice_fits_the_trace(name: str, absent: str, present: str) -> None:
    report = analyze(str(CORPUS / f"{name}.json.gz"), Options(config={}))
    finding = next(f for f in report.findings if f.rule == "launch-bound")
    otherwise = finding.fix.partition("Otherwise")[2]
    assert absent not in otherwise and present in otherwise


@pytest.mark.parametrize(
    ("name", "says"),
    [
        # 8 cudaEventSynchronize in each DistributedDataParallel.forward, of no operator
        ("nccl_collectives", "8 waits per step come from DDP's own timers"),
        # one in what measures the model, and one inside it, in transformers' mask of attention
        (
            "h100_bert_small_inference",
            "1 wait per step comes from transformers (modeling_attn_mask_utils.py:429): one graph",
        ),
    ],
)
def test_waits_of_a_library_or_of_a_measurement_are_not_reported(name: str, says: str) -> None:
    report = analyze(str(CORPUS / f"{name}.json.gz"), Options(config={}))
    finding = next(f for f in report.findings if f.rule == "launch-bound")
    assert says in finding.fix
    assert "remove" not in finding.fix and "profile.py" not in finding.fix
    early = "Profile later steps first, as DDP adds waits" in finding.fix.partition(". ")[0]
    assert early == ("DDP" in says)


def test_time_between_steps_is_a_share_after_the_first_step() -> None:
    """2.12 s of evaluation in the 4.67 s of steps 1 to 95; the first step takes 2.8 s itself."""
    view = analyze(str(H100 / "seg_val_hist"), Options(config={})).recorded
    assert view is not None and view.outside_share == pytest.approx(0.45, abs=0.01)


@pytest.mark.parametrize(
    ("modules", "name"),
    [
        (["teacher.blocks.*.c2", "teacher.stem"], "teacher"),
        (["ref_model.layers.*"], "ref_model"),
        (["teacher.stem", "student.stem"], ""),
        (["base_model.model.layers.*"], ""),  # adapters lie under this name too
        (["vgg.features.*"], ""),  # gradients of a perceptual loss go through it
        (["layers.*"], ""),
    ],
)
def test_network_of_constant_outputs_runs_without_gradients(modules: list[str], name: str) -> None:
    assert _find_reference(modules) == name
