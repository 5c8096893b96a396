"""``advisor demo``: records here and now, and says what it needs when it cannot."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from advisor.cli import demo
from advisor.core.errors import install
from advisor.core.report import Report

pytestmark = pytest.mark.timed

Run = Callable[..., tuple[int, str, str]]


def test_without_torch_it_says_how_to_install_it(
    advisor: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    code, out, err = advisor("demo")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert install("record") in err


needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="records with torch, which is not installed"
)


@needs_torch
def test_it_records_a_trace_analyses_it_and_keeps_it_when_asked(
    advisor: Run, tmp_path: Path
) -> None:
    code, out, _ = advisor(
        "demo", "--folder", tmp_path / "kept", "--device", "cpu", "--steps", "4", "--format", "json"
    )
    assert code == 0
    report = Report.from_json(out)
    assert report.scope.steps_found == 4
    assert report.busy_share is None
    trace = tmp_path / "kept" / "simple_cnn.json.gz"
    assert report.inputs[0].path == str(trace)
    assert trace.stat().st_size > 1000


@needs_torch
def test_a_device_that_is_not_here_is_one_line(advisor: Run) -> None:
    code, out, err = advisor("demo", "--device", "tpu")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
