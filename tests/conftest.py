"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

sys.path.append(str(Path(__file__).resolve().parents[1]))  # benchmarks

from benchmarks import public_traces
from tests import corpus_analyses
from tests.corpus_analyses import find_corpus_file

# the tests use no ledger of the user
os.environ["ADVISOR_LEDGER"] = os.devnull + "/ledger.jsonl"
# one thread a test process: the processes of a parallel run share the cores already
os.environ.setdefault("POLARS_MAX_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else a pool that imports torch again
# a property is about results: how long an example takes is the machine's
hypothesis.settings.register_profile("advisor", deadline=None)
hypothesis.settings.load_profile("advisor")
# Examples must not depend on which of the product's modules, with which constants, a worker has
# imported: what fails here would pass there.
providers.HypothesisProvider._local_constants = Constants()  # type: ignore[assignment]

REQUIRED = "ADVISOR_REQUIRE_BROWSER"
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PUBLIC = (
    "a100_train_6steps",
    "alexnet",
    "b200_eager",
    "cupti_counters",
    "event_sync",
    "event_sync_multi_stream",
    "h100_bert_small_inference",
    "mi210_gpu_only",
    "mi250_train",
    "mi300_torch_compile",
    "nccl_collectives",
    "no_gpu_rank",
    "old_capitalised_categories",
    "simple_add",
    "triton_example",
    "two_ranks_rank0",
    "two_ranks_rank1",
    "v100_train_copy_heavy",
)
"""Public real traces of every kind of GPU and every version of the profiler."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Two processes more than there are cores: a third of the tests' time they wait for a browser,
    for a program that they started, or for a timer."""
    return (os.cpu_count() or 1) + 2


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that may be tried again, since they depend on how the machine runs a program
    meanwhile. The summary lists each test that needed it. Further members of a kind run with
    ``ADVISOR_THOROUGH``."""
    if not os.environ.get("ADVISOR_THOROUGH"):
        thorough_items = [item for item in items if item.get_closest_marker("thorough")]
        config.hook.pytest_deselected(items=thorough_items)
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]
    # first those that wait for programs of their own, so that none of them ends the run alone;
    # last those of the corpus's files, file by file: what they analyse is kept for the next test
    own_group_folders = ("tune", "packaging", "mcp")
    items.sort(key=lambda item: (item.path.parent.name not in own_group_folders, file_of(item)))
    for item in items:
        if item.get_closest_marker("timed") or "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=2))


def file_of(item: pytest.Item) -> str:
    """Name of the corpus's file that a test is about; "" for other tests."""
    return find_corpus_file(item.callspec.params.values()) if hasattr(item, "callspec") else ""


def pytest_collection_finish() -> None:
    _settle_heap()


@pytest.fixture(autouse=True, scope="module")
def _freeze_heap() -> Iterator[None]:
    """Exclude the modules that a test file imported from later garbage collections."""
    yield
    _settle_heap()


def _settle_heap() -> None:
    """Exclude all objects so far from garbage collection: they would take 0.3 s each time."""
    gc.collect()
    gc.freeze()


corpus_analyses.share()  # before a test file imports what is shared


@pytest.fixture(autouse=True, scope="session")
def _shared_reports(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A folder of reports that all processes of a run share."""
    base = tmp_path_factory.getbasetemp()
    parallel = "PYTEST_XDIST_WORKER" in os.environ
    corpus_analyses.reports = (base.parent if parallel else base) / "reports"
    corpus_analyses.reports.mkdir(exist_ok=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that replaces functions or variables gets analyses of its own."""

    def patched() -> bool:
        patch = getattr(item, "funcargs", {}).get("monkeypatch")
        return patch is not None and bool(patch._setattr or patch._setitem)

    corpus_analyses.patched = patched


@pytest.fixture
def no_shared_analysis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share no analysis, for a test that two analyses of one file are the same."""
    monkeypatch.setattr(corpus_analyses, "patched", lambda: True)


def public_file(name: str) -> str:
    """Path of a public file, of ``tests/corpus`` or beside the checkout; skips where absent."""
    path = public_traces.find(name)
    if path is None:
        pytest.skip(f"{name} is neither in tests/corpus nor in {public_traces.BESIDE}")
    return str(path)


@pytest.fixture(scope="session")
def shared_trace() -> Callable[[str], str]:
    """``shared_trace("alexnet")``: path of a public real trace; skips where it is absent."""

    def find(name: str) -> str:
        return public_file(f"{name}.json.gz")

    return find


@pytest.fixture(scope="module", params=PUBLIC)
def public_trace(request: pytest.FixtureRequest, shared_trace: Callable[[str], str]) -> str:
    """Path of each of them in turn; all tests of a file on one, then all on the next."""
    return shared_trace(request.param)


@pytest.fixture(scope="session")
def shared_file() -> Callable[[str], str]:
    """``shared_file("nsys/a.sqlite")``: path of a public file of any kind; skips where absent."""
    return public_file


def no_browser(why: str) -> None:
    """Skip, or fail where a browser is required."""
    if os.environ.get(REQUIRED):
        pytest.fail(f"{REQUIRED} is set, but {why}")
    pytest.skip(why)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, driven by Playwright."""
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        no_browser("playwright is not installed")
    with sync_playwright() as playwright:
        bundled = playwright.chromium.executable_path
        executable = os.environ.get("ADVISOR_CHROMIUM") or shutil.which("chromium")
        executable = executable or shutil.which("chromium-browser") or shutil.which("google-chrome")
        if executable is None and not Path(bundled).exists():
            no_browser("no Chromium is installed (apt install chromium, or playwright install)")
        chromium = playwright.chromium.launch(executable_path=executable or bundled, args=ARGUMENTS)
        yield chromium
        chromium.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was skipped, one line per reason (``-rs`` gives one for each place)."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        location = report.longrepr
        reasons[location[2] if isinstance(location, tuple) else str(location)] += 1
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"SKIPPED [{count}] {reason.removeprefix('Skipped: ')}")
