"""The way from a recording to the measured cure: fixes that a report only notes are tried as
well."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

pytestmark = [pytest.mark.timed, pytest.mark.slow]

PROGRAM = """
import gc
import torch
from torch.utils.data import DataLoader, TensorDataset
{head}
net = torch.nn.Sequential(*[torch.nn.Linear({width}, {width}) for _ in range(30)])
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for _ in range(100_000):
    optimizer.zero_grad()
    net(torch.randn(64, {width})).square().mean().backward()
    optimizer.step()
"""

CURES = {
    "debug-switches-off": ("torch.set_num_threads(1)\ntorch.autograd.set_detect_anomaly(True)", 16),
    "threads": ("torch.set_num_threads(16 * torch.get_num_threads())", 256),
}


def _run_try(tmp_path: Path, knob: str, *words: str) -> list[dict[str, Any]]:
    head, width = CURES[knob]
    (tmp_path / "train.py").write_text(PROGRAM.format(head=head, width=width))
    words = ("--budget", "400s", "--steps", "20", "--warmup", "6", "--format", "json", *words)
    result = subprocess.run(
        [sys.executable, "-m", "advisor", "try", "--no-progress", *words, "train.py"],
        cwd=tmp_path,
        env={**os.environ, "ADVISOR_LEDGER": str(tmp_path / "mine.jsonl")},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    trials: list[dict[str, Any]] = json.loads(result.stdout)["trials"]
    return [trial for trial in trials if trial["knob_setting"]["knob"] == knob]


@pytest.mark.parametrize("knob", CURES)
def test_notes_of_a_report_are_planned(knob: str, tmp_path: Path) -> None:
    assert _run_try(tmp_path, knob, "--dry-run")


def test_a_note_is_tried_and_its_gain_measured(tmp_path: Path) -> None:
    (trial,) = _run_try(tmp_path, "debug-switches-off", "--only", "debug-switches-off")
    # on a machine too busy to measure on the interval is wide; the gain is there all the same
    assert trial["outcome"] in ("gain", "unclear") and trial["gain"] > 0.1, trial
