"""The live page beside a training that really goes on, recorded by our own recorder."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from advisor.core.run_directory import STEPS, trace_name
from advisor.dashboard.loaded_runs import DashboardSession


def until(what: Callable[[], Any], seconds: float = 60.0) -> Any:
    """What it gives once that is something."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = what()
        if found:
            return found
        time.sleep(0.1)
    pytest.fail(f"not within {seconds:.0f} s")


def tiles(page: Any) -> dict[str, str]:
    names = page.locator(".tile dt").all_inner_texts()
    values = page.locator(".tile dd").all_inner_texts()
    return dict(zip(names, values, strict=False))


def look(page: Any, counts: list[int]) -> None:
    """Note the number of steps that is shown."""
    page.wait_for_timeout(200)
    steps = tiles(page).get("Steps", "").split("\n")[0]
    counts += [int(steps)] if steps.isdigit() else []


def test_the_page_moves_with_the_training_and_shows_findings_once_a_window_lands(
    recording_process: Any, served: Any, tab: Any
) -> None:
    run, process = recording_process(480, 0.012)  # 120 steps of some 0.1 s, and validation
    try:
        until((run / "rank0" / STEPS).exists)
        session = DashboardSession([str(run)], is_live=True)
        session.start()
        with served(session) as shown:
            t = tab(shown)
            page = t.open("/live")
            assert page.get_by_text("No findings yet").or_(page.locator("#live-body .tile")).count()
            counts: list[int] = []
            until(lambda: len(set(counts)) >= 4 or look(page, counts), 20)
            assert counts == sorted(counts)
            assert "running" in tiles(page)["Steps"]
            assert {"data", "forward", "backward"} <= set(t.text("#live-body div.legend").split())
            until((run / "rank0" / trace_name(0)).exists)
            # what the recorded steps alone tell may be there before; the window says more
            page.get_by_text("of window 0").wait_for()
            loaded = session.entries[0].loaded
            assert loaded is not None and loaded.report.scope.step_source == "ProfilerStep"
            first = next(f for f in loaded.report.findings if f.folded_under is None)
            assert first.category == "input"
            assert first.title in t.text("#live-body ol.lines")
            assert "Host memory" in t.text("#live-body")
            assert process.wait(60) == 0
            page.locator(".tile dd", has_text="ended").first.wait_for()
            assert tiles(page)["Steps"].split("\n")[0] == "120"
            assert t.wrong == []
    finally:
        process.kill()
        process.wait()
