"""A program in which no step is seen is profiled for a moment, and nothing else is."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from advisor import analyze
from advisor.recorder import timed_window
from advisor.recorder.timed_window import TimedWindow

from .recording_checks import only_rank

pytestmark = pytest.mark.timed

Program = Callable[..., "subprocess.CompletedProcess[str]"]

SHORT = """
import time
from advisor.recorder import timed_window
timed_window.WAIT_SECONDS, timed_window.WINDOW_SECONDS = 0.3, 0.5
"""
"""The start of the program, short so that the test need not wait."""
SOLVER = """
import torch
def smooth(u):
    return (u.roll(1, 0) + u.roll(-1, 0)) / 2
u = torch.rand(2000, 50)
from advisor.recorder.session import current_session
windows, end = current_session().windows, time.monotonic() + 60
while not windows.has_timed and time.monotonic() < end:
    u = smooth(u)
end = time.monotonic() + 1  # its stacks are sampled
while time.monotonic() < end:
    u = smooth(u)
"""
RECORD = ("-m", "advisor", "record", "--output", "run")


def test_a_solver_of_tensor_operators_has_a_trace_without_steps(
    program: Program, tmp_path: Path
) -> None:
    result = program(SHORT + SOLVER, before=RECORD)
    assert result.returncode == 0 and "nothing was recorded" not in result.stderr
    record = only_rank(tmp_path / "run")
    assert not record.steps
    (opened, closed) = record.events_of("window")
    assert opened["state"] == "open" and closed["state"] == "done" and closed["file"]
    assert any("smooth" in frame for each in record.events_of("stacks") for frame in each["frames"])
    report = analyze(tmp_path / "run")
    assert report.recorded is not None and report.recorded.steps == 0
    assert report.operators[0].name.startswith("aten::")
    assert "advisor.step()" in report.verdict and "runs on the CPU" in report.verdict
    assert 100e6 < report.scope.span_ns < 20e9


def test_without_operators_the_window_is_empty(program: Program, tmp_path: Path) -> None:
    busy = "import torch\nend = time.monotonic() + 3\nwhile time.monotonic() < end: sum(range(999))"
    result = program(SHORT + busy, before=RECORD)
    assert "nothing was recorded" in result.stderr and not (tmp_path / "run").exists()


def test_training_that_follows_has_windows_of_its_own(program: Program, tmp_path: Path) -> None:
    training = """
model = torch.nn.Linear(50, 50)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(60):
    model(u).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    program(SHORT + SOLVER + training, before=RECORD)
    record = only_rank(tmp_path / "run")
    assert len(record.steps) == 60
    assert [file.name for file in Path(record.folder).glob("trace*")] == ["trace_w1.json.gz"]
    assert not any("smooth" in f for each in record.events_of("stacks") for f in each["frames"])
    report = analyze(tmp_path / "run")
    assert report.scope.step_source != "whole trace"


def test_waiting_main_thread_is_called_back_in_time() -> None:
    calls: list[Any] = []

    class Session:
        listening = True
        on_watched_thread = staticmethod(lambda: True)

    thread = TimedWindow(Session())  # type: ignore[arg-type]
    timed_window._Request.action = lambda: calls.append(1)
    timed_window._Request.until = 0.0
    assert timed_window._run_request(0) == 0 and not calls
    assert thread is not None


def test_a_failure_in_the_call_back_goes_to_the_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    problems: list[BaseException] = []

    class Session:
        listening = True
        on_watched_thread = staticmethod(lambda: True)
        on_internal_error = staticmethod(problems.append)

    thread = TimedWindow(Session())  # type: ignore[arg-type]

    def raise_os_error() -> None:
        raise OSError("mine")

    thread._run_safely(raise_os_error)
    assert [str(each) for each in problems] == ["mine"]
