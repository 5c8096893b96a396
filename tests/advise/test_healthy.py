"""Recordings called healthy were checked: rates, single long steps, numbers of collectives."""

from __future__ import annotations

import re
from pathlib import Path

from advisor.advise.engine import Options, analyze
from advisor.core.report import Report
from advisor.rules.distributed.small_collectives import UnbucketedGradients
from advisor.testing import TraceBuilder


def report_of(b: TraceBuilder, tmp_path: Path) -> Report:
    return analyze(b.write(tmp_path / "trace.json"), Options(config={}))


def work(b: TraceBuilder) -> None:
    """30 times 0.137 TFLOP, at 88% of what an A100 attains (271 TFLOP/s)."""
    shapes = [[4096, 4096], [4096, 4096]]
    for _ in range(30):
        with b.op("aten::mm", shapes, "c10::BFloat16"):
            b.launch("ampere_bf16_s16816gemm_bf16_128x128_ldg8_tn", 576)


def test_busy_steps_of_one_length_are_healthy(tmp_path: Path) -> None:
    b = TraceBuilder("A100")
    for _ in range(6):
        with b.step():
            work(b)
            b.sync()
    assert report_of(b, tmp_path).status == "healthy"


def test_prefill_with_slow_attention_is_not_healthy() -> None:
    file = Path(__file__).parents[1] / "corpus/serving/sglang_prefill/replay.json.gz"
    report = analyze(file, Options(config={}))
    assert report.status == "limited"
    assert "At the rates that this GPU reaches in benchmarks" in report.verdict
    assert "its kernels would take 114 ms (23%) less" in report.verdict


def test_checkpointing_step_is_named_with_its_duration(tmp_path: Path) -> None:
    b = TraceBuilder("A100")
    for number in range(6):
        with b.step():
            work(b)
            b.sync()
            if number == 3:
                with b.python("torch/serialization.py(900): save"):
                    b.host(120_000)
    report = report_of(b, tmp_path)
    assert report.status == "limited" and "One step takes 1" in report.verdict
    (finding,) = [f for f in (*report.risks, *report.notes) if f.rule == "long-step"]
    assert "#3 takes 8× as long" in finding.title
    assert "120 ms of it in torch/serialization.py(900): save" in finding.summary
    assert "async_save" in finding.code


def test_attention_at_a_third_of_its_rate_is_not_healthy(tmp_path: Path) -> None:
    """0.55 TFLOP take 5.8 ms at 35% of 271 TFLOP/s."""
    b = TraceBuilder("A100")
    shape = [8, 4096, 16, 64]
    for _ in range(6):
        with b.step():
            work(b)
            for _ in range(2):
                inputs = [shape, shape, shape, [], [], [], [], [], [], []]
                dtypes = ["c10::BFloat16"] * 3 + [""] * 4 + ["Scalar"] * 3
                concrete = [""] * 8 + ["0.", "0"]
                with b.op("aten::_efficient_attention_forward", inputs, dtypes, concrete=concrete):
                    b.launch("void pytorch_flash::flash_fwd_kernel", 5800)
            b.sync()
    report = report_of(b, tmp_path)
    assert report.status != "healthy"
    rate = r"attention kernels \(\d+% of kernel time\) reach 35% of their"
    assert re.search(rate, report.verdict)


def test_hundreds_of_hidden_all_reduces_are_named(tmp_path: Path) -> None:
    examples = UnbucketedGradients.examples().values()
    (example,) = (each for each in examples if not isinstance(each, tuple))
    report = report_of(example, tmp_path)
    assert report.status != "healthy"
    assert any("150 all-reduces" in note.title for note in report.notes)
