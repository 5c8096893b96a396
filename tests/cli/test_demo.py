"""``advisor demo``: records here and now, and says what it needs when it cannot."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from advisor.cli import demo
from advisor.core.errors import install_command
from advisor.core.report import Report

pytestmark = pytest.mark.timed

Run = Callable[..., tuple[int, str, str]]


def test_demo_without_torch_shows_its_install_command(
    advisor: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    code, out, err = advisor("demo", "--record")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert install_command("torch") in err


def test_demo_without_torch_shows_a_gpu_trace_and_the_gain(
    advisor: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measured means are those of the public pair, and the range of gains is that of the
    scoreboard. It meets the predicted range."""
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    code, out, _ = advisor("demo")
    assert code == 0
    assert "compute           107 ms" in out
    predicted = re.search(r"predicted  ([\d.]+) ms less per step \(([\d.]+) to ([\d.]+) ms\)", out)
    means = "155 ms → 128 ms on the host, 117 ms on the GPU"
    measured = re.search(rf"measured   (([\d.]+) to ([\d.]+)) ms less: {means}", out)
    assert predicted is not None and measured is not None
    assert float(predicted[2]) <= float(measured[3]) <= float(predicted[3])
    row = f"| {predicted[1]} ({predicted[2]} to {predicted[3]}) | {measured[1]} | yes |"
    for page, text in (("README", f"saved {measured[1]} ms"), ("docs/scoreboard", row)):
        assert text in (Path(__file__).parents[2] / f"{page}.md").read_text("utf-8")
    assert f"gain     about {predicted[1]} ms" in out
    assert "with 2 or 4 workers" in out and "· 1× per step\n" in out


def test_the_demo_takes_the_option_that_it_names_and_its_command_runs(advisor: Run) -> None:
    code, out, _ = advisor("demo", "--details")
    assert code == 0 and "Not shown (--details)" not in out
    command = next(line for line in out.splitlines() if line.startswith("$ "))
    assert Path(command.split()[-1]).exists()


def test_the_demo_report_comes_in_other_formats(advisor: Run) -> None:
    code, out, _ = advisor("demo", "--format", "json")
    assert code == 0
    assert Report.from_json(out).scope.steps_used == 6


def test_options_of_recording_need_record(advisor: Run) -> None:
    code, out, err = advisor("demo", "--device", "cpu")
    assert (code, out) == (2, "")
    assert "need --record" in err


needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="records with torch, which is not installed"
)


@needs_torch
def test_demo_records_analyzes_and_optionally_keeps_a_trace(advisor: Run, tmp_path: Path) -> None:
    code, out, _ = advisor(
        "demo",
        "--record",
        "--folder",
        tmp_path / "kept",
        "--device",
        "cpu",
        "--steps",
        "4",
        "--format",
        "json",
    )
    assert code == 0
    report = Report.from_json(out)
    assert report.scope.steps_found == 4
    assert report.busy_share is None
    trace = tmp_path / "kept" / "simple_cnn.json.gz"
    assert report.inputs[0].path == str(trace)
    assert trace.stat().st_size > 1000


@needs_torch
def test_missing_device_is_one_line_error(advisor: Run) -> None:
    code, out, err = advisor("demo", "--record", "--device", "tpu")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_make_demo_ends_with_a_working_command() -> None:
    root, bin_ = Path(__file__).parents[2], Path(sys.executable).parent
    if not (root / "Makefile").is_file():
        pytest.skip("not a checkout")
    words = [
        "make",
        "--no-print-directory",
        "demo",
        "-o",
        ".venv/.base",
        f"BIN={bin_}",
        "STAMP=/nowhere",
    ]
    result = subprocess.run(words, cwd=root, capture_output=True, text=True, check=True)
    next_lines = result.stdout.rpartition("Next, ")[2].splitlines()
    assert next_lines[1].split()[:2] == [f"{bin_}/advisor", "analyze"]
    subprocess.run(next_lines[1].split(), cwd=root, capture_output=True, check=True)
    assert next_lines[2].startswith('". .venv/bin/activate"')
    assert next_lines[-1].endswith('pip install -e ".[record,dashboard,mcp]"')
