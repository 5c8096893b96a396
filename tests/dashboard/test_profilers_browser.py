"""A program in C++, recorded with Nsight Systems, in the browser."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("dash")


def _files() -> ModuleType:
    file = Path(__file__).resolve().parents[1] / "ingest" / "profiler_files.py"
    spec = util.spec_from_file_location("dashboard_profiler_files", file)
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = _files().nsys(tmp_path_factory.mktemp("nsys") / "solver.sqlite")
    return made


def test_a_file_of_nsight_systems_is_shown_and_speaks_of_cuda(
    export: Path, show: Any, tab: Callable[..., Any]
) -> None:
    t = tab(show(export))
    page = t.open("/")
    page.locator("main h1").wait_for()
    assert "GPU busy 60%" in page.locator("main").inner_text()
    # the table's rows come after the page
    t.open("/kernels").wait_for_function(
        "() => document.querySelector('main').innerText.includes('third')"
    )
    told = t.open("/findings").locator("main").inner_text()
    assert "DataLoader(" not in told
    t.open("/timeline").locator("main h1").wait_for()
