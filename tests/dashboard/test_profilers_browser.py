"""Files of other profilers and memory snapshots in a browser: timeline, advice and pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("dash")

from advisor.dashboard.timeline.detail_levels import ALL_CATEGORIES
from advisor.testing.allocator import GIB, MIB, FakeAllocator, Training
from tests.dashboard import test_timeline_browser as timeline
from tests.read import profiler_files as files
from tests.read import xspace_writer as xspace

COLOR_BY_KEY = {category.key: category.color for category in ALL_CATEGORIES}


def _write_jax_trace(path: Path) -> Path:
    path.write_bytes(xspace.jax_training())
    return path


FORMATS: dict[str, tuple[str, Callable[[Path], Path], str, str]] = {
    "nsys": ("solver.sqlite", files.nsys, "third", "cudaHostAlloc"),
    "xplane": ("host.xplane.pb", _write_jax_trace, "loop_fusion_2", "jax"),
    "rpd": ("run.rpd", files.rpd, "third", "hipDeviceSynchronize"),
    "rocpd": ("run.db", lambda path: files.rocpd(path, 4), "third", "hipStreamWaitEvent"),
    "rocprofv3": ("run_results.json", files.rocprof_json, "third", "hipStreamWaitEvent"),
}
"""File name, function that writes it, one of its kernels, and a word of its advice."""


@pytest.fixture(
    scope="module",
    params=[
        name if name not in ("rpd", "rocpd") else pytest.param(name, marks=pytest.mark.thorough)
        for name in FORMATS
    ],
)
def recording(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str, str]:
    name, make, kernel, word = FORMATS[request.param]
    return make(tmp_path_factory.mktemp(request.param) / name), kernel, word


def test_a_recording_is_drawn_with_advice_in_its_own_terms(
    recording: tuple[Path, str, str], dashboard_of: Any, open_tab: Callable[..., Any]
) -> None:
    """All checks of a format share one visit."""
    path, kernel, word = recording
    tab = open_tab(dashboard_of(path))
    seen = []
    for module in tab.visit_pages():
        if module == "timeline":
            _check_timeline(tab.page)
        elif module == "kernels":
            # the rows of the table are drawn after the page
            tab.page.wait_for_function(
                "name => document.querySelector('main').innerText.includes(name)", arg=kernel
            )
        elif module == "findings":
            text = tab.text()
            assert word in text
            assert "DataLoader(" not in text and "pin_memory" not in text
        assert tab.problems == [], module
        seen.append(module)
    assert {"timeline", "kernels", "findings"} < set(seen) and len(seen) > 5


def _check_timeline(page: Any) -> None:
    timeline.wait_for_view(page)
    seen = timeline.read_colors(page)
    drawn = [key for key, color in COLOR_BY_KEY.items() if seen[color] > 100]
    assert "step" in drawn
    assert any(key.startswith("gpu-") for key in drawn), drawn
    assert any(key.startswith("copy-htod") for key in drawn), drawn
    labels = page.locator(".tl-label .tl-text").all_inner_texts()
    assert any("stream" in text for text in labels)


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    m = FakeAllocator(total=4 * GIB)
    training = Training(m, leak=4 * MIB, logits=96 * MIB)
    for _ in range(9):
        training.step()
    return m.write(tmp_path_factory.mktemp("memory") / "memory.pickle")


def test_a_snapshot_is_drawn_with_its_advice(
    snapshot: Path, dashboard_of: Any, open_tab: Callable[..., Any]
) -> None:
    tab = open_tab(dashboard_of(snapshot))
    page = tab.open("/memory")
    page.wait_for_function("() => document.querySelectorAll('main .js-plotly-plot').length >= 2")
    text = page.locator("main").inner_text()
    assert "Left behind by each step" in text and "train.py" in text
    findings_text = tab.open("/findings").locator("main").inner_text()
    assert "The loss keeps several copies of the logits in memory" in findings_text
    assert tab.open("/").locator(".pill").first.inner_text() == "Memory problem found"
    assert len(list(tab.visit_pages())) > 5
    assert tab.problems == []


def test_the_memory_legend_fits_a_phone(
    snapshot: Path, dashboard_of: Any, open_tab: Callable[..., Any]
) -> None:
    page = open_tab(dashboard_of(snapshot), width=390).open("/memory")
    legend = page.locator(".figure .legend").first
    legend.locator(".traces").first.wait_for()
    names = legend.locator(".traces").count()
    assert names > 5
    assert legend.locator(".bg").evaluate("box => box.getBBox().height") >= 18 * names
