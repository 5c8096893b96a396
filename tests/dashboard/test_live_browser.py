"""Live page during a real training that ``advisor record`` records."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from advisor.core.run_directory import STEPS, trace_name
from advisor.dashboard.loaded_runs import DashboardSession


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Return the first true result of a condition, or fail after a timeout."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        result = condition()
        if result:
            return result
        time.sleep(0.1)
    pytest.fail(f"not within {seconds:.0f} s")


def tiles(page: Any) -> dict[str, str]:
    names = page.locator(".tile dt").all_inner_texts()
    values = page.locator(".tile dd").all_inner_texts()
    return dict(zip(names, values, strict=False))


def note_steps(page: Any, counts: list[int]) -> None:
    """Append the displayed number of steps."""
    page.wait_for_timeout(200)
    steps = tiles(page).get("Steps", "").split("\n")[0]
    counts += [int(steps)] if steps.isdigit() else []


def test_the_page_follows_the_training_and_shows_the_findings_of_a_window(
    recording_process: Any, serve_session: Any, open_tab: Any
) -> None:
    run, process = recording_process(480, 0.012)  # 120 steps of some 0.1 s, and validation
    try:
        wait_for((run / "rank0" / STEPS).exists)
        session = DashboardSession([str(run)], is_live=True)
        session.start()
        with serve_session(session) as dashboard:
            tab = open_tab(dashboard)
            page = tab.open("/live")
            assert page.get_by_text("No findings yet").or_(page.locator("#live-body .tile")).count()
            counts: list[int] = []
            wait_for(lambda: len(set(counts)) >= 4 or note_steps(page, counts), 20)
            assert counts == sorted(counts)
            assert "running" in tiles(page)["Steps"]
            assert {"data", "forward", "backward"} <= set(tab.text("#live-body div.legend").split())
            wait_for((run / "rank0" / trace_name(0)).exists)
            # findings of the recorded steps may appear before; those of the window follow
            page.get_by_text("of window 0").wait_for()
            loaded = session.entries[0].loaded
            assert loaded is not None and loaded.report.scope.step_source == "ProfilerStep"
            first = next(  # other tests may take the cores
                f
                for f in loaded.report.findings
                if f.folded_under is None and f.rule != "cpu-contention"
            )
            assert first.category == "input"
            assert first.title in tab.text("#live-body ol.lines")
            assert "Host memory" in tab.text("#live-body")
            assert process.wait(60) == 0
            page.locator(".tile dd", has_text="ended").first.wait_for()
            assert tiles(page)["Steps"].split("\n")[0] == "120"
            assert tab.problems == []
    finally:
        process.kill()
        process.wait()
