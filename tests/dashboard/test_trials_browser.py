"""Page of trials: estimated and measured gains, and names that stay text."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from advisor.tune.knob import KnobSetting
from advisor.tune.report import FILE, CombinedTrial, Trial, TrialReport

HOSTILE = '<img src=x onerror="window.hit=1">'


def build_report() -> TrialReport:
    workers, frozen = KnobSetting("workers", 4), KnobSetting("gc-freeze")
    return TrialReport(
        program=["python", HOSTILE],
        step_ns=20e6,
        steps=60,
        processes=9,
        seconds=75.0,
        repeats=True,
        confined=True,
        trials=[
            Trial(
                rule="single-process-loader",
                knob_setting=workers,
                title="DataLoader workers",
                safety="exact",
                outcome="gain",
                predicted=0.5,
                predicted_low=0.4,
                predicted_high=0.6,
                gain=0.45,
                gain_low=0.43,
                gain_high=0.47,
                inside=True,
                runs=2,
                losses="equal",
                host_bytes=322_000_000,
                lines="DataLoader(..., num_workers=4)",
                diff=f"-DataLoader(x)  # {HOSTILE}\n+DataLoader(x, num_workers=4)\n",
            ),
            Trial(
                rule="gc-pauses",
                knob_setting=frozen,
                title="no garbage collection within steps",
                safety="exact",
                outcome="dropped",
                why=f"out of memory: {HOSTILE}",
            ),
        ],
        together=CombinedTrial(
            knob_settings=[workers], step_ns=11e6, gain=0.45, gain_low=0.43, gain_high=0.47
        ),
    )


def test_trials_are_shown_with_their_change_and_names_as_text(
    recorded_run: Callable[[], Path], tmp_path: Path, dashboard_of: Any, open_tab: Any
) -> None:
    run = tmp_path / "run"
    shutil.copytree(recorded_run(), run)
    (run / FILE).write_bytes(build_report().to_json())
    tab = open_tab(dashboard_of(run))
    tab.open("/trials")
    body = tab.text("body")
    for words in (
        "workers=4: 20 ms → 11 ms",
        "40 to 60%",
        "43 to 47%",
        "in range",
        "dropped",
        f"out of memory: {HOSTILE}",
        "single-process-loader",
        "gc-pauses",
        "322 MB host",
        "+DataLoader(x, num_workers=4)",
        HOSTILE,
    ):
        assert words in body, words
    assert tab.page.evaluate("window.hit") is None
    assert tab.problems == []
    (run / FILE).write_text("{")
    tab.open("/trials?again=1")
    assert "These trials cannot be read" in tab.text("body")
