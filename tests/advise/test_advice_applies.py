"""Advice is for the program in the file: its libraries, its GPU, its copies, its lines."""

from __future__ import annotations

from pathlib import Path

import pytest

import advisor
from advisor.advise.finding_text import describe_gain
from advisor.core.report import Report
from advisor.measure import Analysis
from advisor.measure.host.sampled_code import line_of_operator
from advisor.read.directory import open_run
from advisor.render.formats import REPORTS

CORPUS = Path(__file__).parents[1] / "corpus"


def report_of(name: str) -> Report:
    return advisor.analyze(str(CORPUS / name))


def test_transformers_attention_is_set_where_the_model_loads() -> None:
    """The program loads GPT-2 with attn_implementation="eager", and has no attention of its own."""
    finding = next(
        f for f in report_of("h100/gpt2_eager_attention").findings if f.rule == "unfused-attention"
    )
    assert 'from_pretrained(\n    name, attn_implementation="sdpa")' in finding.code
    assert "transformers' own code" in finding.fix


def test_blocks_of_transformers_are_not_to_be_rewritten() -> None:
    finding = report_of("h100/checkpointed").findings[0]
    assert finding.rule == "recompute-with-free-memory"
    assert "gradient_checkpointing_disable()" in finding.code
    assert "self.blocks" not in finding.code


def test_tf32_is_not_advised_on_a_gpu_without_it() -> None:
    """Kernels of a V100 that use tensor cores are named s884, and the switch is not there."""
    findings = report_of("v100_train_copy_heavy.json.gz").findings
    (precision,) = [f for f in findings if f.rule == "fp32-matmul"]
    assert "s884" in precision.verify and "tf32" not in precision.verify
    assert "allow_tf32" not in precision.falsified_by


def test_the_line_of_an_upload_is_not_that_of_a_cast() -> None:
    """Line 38 is ``host.to(dev)``; autocast makes the other copies, inside ``model(x)``."""
    report = report_of("h100/blocking_upload")
    places = [place for finding in report.findings for place in finding.where if place.file]
    assert {place.line for place in places} == {38}
    assert not any("copy_kernel" in (place.kernel or "") for place in places)


def test_a_line_is_of_the_place_with_most_of_a_finding() -> None:
    """Driver calls are spread over the model's operators: layer_norm's line 31 has a third. The
    thread waits for the GPU in line 128, ``loss.backward()``, which reads no value. Launches are
    the forward pass's, whose function with most samples is named."""
    findings = report_of("h100/points_max_split").findings
    places = {f.rule: f.where[0] for f in findings if f.where}
    assert (places.pop("launch-bound").function or "").endswith(".forward")
    assert places and not any(place.file for place in places.values())
    run = open_run(str(CORPUS / "h100/gpt2_eager_attention"))
    (trace,) = run.traces.values()
    assert run.recording is not None
    a = Analysis(trace, None, run.recording.ranks[0])
    assert a.run_steps is not None and line_of_operator(a, "aten::_local_scalar_dense") is None


def test_fused_attention_in_fp32_is_no_finding() -> None:
    """144 calls of the memory-efficient kernel; before, the program had 144 softmax kernels."""
    after = report_of("pairs/sam_2_fp32_few_syncs.json.gz")
    assert any("attention runs fused (13%" in check.text for check in after.passed)
    assert "unfused-attention" not in {finding.rule for finding in after.findings}


def test_gain_after_other_fixes_names_these_fixes() -> None:
    """Products in tensor cores gain nothing alone, nor after the second fix alone; 3.96 ms after
    the first, 8.18 after both."""
    report = report_of("pairs/loader_autograd_workers0.json.gz")
    (late,) = [finding for finding in report.findings if finding.after_fix]
    assert (late.rule, late.after_fix) == ("fp32-matmul", "single-process-loader")
    assert describe_gain(late, report).endswith(" after fixes 1 and 2")


def test_loader_worker_fix_excludes_pinning() -> None:
    findings = report_of("pairs/loader_autograd_workers0.json.gz").findings
    code = {finding.rule: finding.code for finding in findings}
    assert "num_workers" in code["single-process-loader"]
    assert "pin_memory" not in code["single-process-loader"]
    assert "pin_memory" in code["pageable-copies"]


def test_time_between_steps_is_given_as_one_share() -> None:
    page = " ".join(REPORTS.render("terminal", report_of("h100/seg_val_hist"), width=80).split())
    assert "46% of the time after the first step" in page
    assert "between steps 3%" not in page


@pytest.mark.parametrize("name", ["h100/doc_finder", "h100/voice_stream", "h100/latent_sampler"])
def test_links_match_the_rebuilt_weights(name: str) -> None:
    topic = {"doc_finder": "normalize", "voice_stream": "parametrize", "latent_sampler": "amp"}
    (finding,) = [f for f in report_of(name).findings if f.rule == "rebuilt-weights"]
    assert [topic[Path(name).name] in link for link in finding.references] == [True]


def test_reads_that_break_a_graph_are_counted() -> None:
    (finding,) = [f for f in report_of("h100/compiled_breaks").findings if f.rule == "graph-breaks"]
    assert "8 calls of .item() per step" in finding.fix  # the program reads 8 values per step
    assert "export TORCH_LOGS=graph_breaks" in finding.code.splitlines()
