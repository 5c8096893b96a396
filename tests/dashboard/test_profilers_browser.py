"""Files of other profilers, and memory snapshots, in the browser: the timeline draws what is in
them, the advice is in the program's own terms, and nothing goes wrong on any page."""

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

COLOUR = {category.key: category.color for category in ALL_CATEGORIES}


def _jax(path: Path) -> Path:
    path.write_bytes(xspace.jax_training())
    return path


FORMATS: dict[str, tuple[str, Callable[[Path], Path], str, str]] = {
    "nsys": ("solver.sqlite", files.nsys, "third", "cudaHostAlloc"),
    "xplane": ("host.xplane.pb", _jax, "loop_fusion_2", "jax"),
    "rpd": ("run.rpd", files.rpd, "third", "hipDeviceSynchronize"),
    "rocpd": ("run.db", lambda path: files.rocpd(path, 4), "third", "hipStreamWaitEvent"),
    "rocprofv3": ("run_results.json", files.rocprof_json, "third", "hipStreamWaitEvent"),
}
"""The file's name, what makes it, one of its kernels, and a word of its advice."""


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


def test_a_recording_is_drawn_and_advised_in_its_own_terms_and_every_page_opens(
    recording: tuple[Path, str, str], show: Any, tab: Callable[..., Any]
) -> None:
    """One visit for all that is claimed of a format."""
    path, kernel, word = recording
    t = tab(show(path))
    seen = []
    for module in t.walk():
        if module == "timeline":
            _it_is_drawn(t.page)
        elif module == "kernels":
            # the table's rows come after the page
            t.page.wait_for_function(
                "name => document.querySelector('main').innerText.includes(name)", arg=kernel
            )
        elif module == "findings":
            told = t.text()
            assert word in told
            assert "DataLoader(" not in told and "pin_memory" not in told
        assert t.wrong == [], module
        seen.append(module)
    assert {"timeline", "kernels", "findings"} < set(seen) and len(seen) > 5


def _it_is_drawn(page: Any) -> None:
    timeline.settle(page)
    seen = timeline.colours(page)
    drawn = [key for key, colour in COLOUR.items() if seen[colour] > 100]
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


def test_a_snapshot_is_drawn_and_its_advice_is_there(
    snapshot: Path, show: Any, tab: Callable[..., Any]
) -> None:
    t = tab(show(snapshot))
    page = t.open("/memory")
    page.wait_for_function("() => document.querySelectorAll('main .js-plotly-plot').length >= 2")
    told = page.locator("main").inner_text()
    assert "Left behind by each step" in told and "train.py" in told
    found = t.open("/findings").locator("main").inner_text()
    assert "The loss keeps several copies of the logits in memory" in found
    assert t.open("/").locator(".pill").first.inner_text() == "Memory problem found"
    assert len(list(t.walk())) > 5
    assert t.wrong == []


def test_on_a_telephone_the_legend_of_memory_is_whole(
    snapshot: Path, show: Any, tab: Callable[..., Any]
) -> None:
    page = tab(show(snapshot), width=390).open("/memory")
    legend = page.locator(".figure .legend").first
    legend.locator(".traces").first.wait_for()
    names = legend.locator(".traces").count()
    assert names > 5
    assert legend.locator(".bg").evaluate("box => box.getBBox().height") >= 18 * names
