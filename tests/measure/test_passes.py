"""Detect from a recording whether a loop trains; advice follows from it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from advisor.advise.engine import analyze
from advisor.measure import Analysis
from advisor.read import open_run
from advisor.testing import TraceBuilder

FOR_TRAINING = re.compile(
    r"loss curve|optimizer|zero_grad|backward\(|learning rate|criterion", re.I
)


def _steps(*ops: str) -> TraceBuilder:
    b = TraceBuilder("A100")
    for _ in range(4):
        with b.step():
            for op in ops:
                with b.op(op, [[64, 64], [64, 64]], "float"):
                    b.launch("cutlass_tensorop_s1688dgrad_optimized_tf32", 100)
            b.sync()
    return b


@pytest.mark.parametrize(
    ("ops", "forward_only"),
    [
        (["aten::conv_transpose2d"], True),
        (["aten::mm", "autograd::engine::evaluate_function: MmBackward0"], False),
        (["aten::mm", "aten::convolution_backward"], False),
        (["aten::mm", "Optimizer.step#SGD.step"], False),
        (["mine::op"], False),
    ],
)
def test_the_recording_shows_whether_the_loop_trains(
    ops: list[str], forward_only: bool, tmp_path: Path
) -> None:
    run = open_run(_steps(*ops).write(tmp_path / "t.json"))
    assert Analysis(run.window(run.ranks[0])).forward_only is forward_only


@pytest.mark.parametrize("name", ["pairs/sam_1_fp32_many_syncs", "pairs/sam_2_fp32_few_syncs"])
def test_inference_gets_no_advice_for_training(
    name: str, shared_trace: Callable[[str], str]
) -> None:
    report = analyze(shared_trace(name))
    for finding in (*report.findings, *report.risks, *report.notes):
        advice = " ".join((finding.fix, finding.code or "", finding.verify or ""))
        assert not FOR_TRAINING.search(advice), finding.rule
