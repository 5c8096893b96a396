"""Network page: the network path and hanging collectives, and the overview of such files alone."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from advisor.dashboard.loaded_runs import DashboardSession

READER_TESTS = Path(__file__).parents[1] / "read"


@pytest.fixture
def read_page(serve_session: Any, open_tab: Any) -> Callable[..., tuple[list[str], str]]:
    """Return a function that reads the menu and a page's text for a folder."""

    def read(folder: Path, path: str) -> tuple[list[str], str]:
        with serve_session(DashboardSession([str(folder)]).load()) as dashboard:
            tab = open_tab(dashboard)
            tab.open(path)
            menu = tab.page.locator("nav.side li").all_inner_texts()
            text: str = tab.text("main")
            assert tab.problems == []
        return [item.strip() for item in menu], text

    return read


def write_logs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write logs of a job on two nodes, with TCP between nodes and host memory inside a node."""
    monkeypatch.syspath_prepend(str(READER_TESTS / "nccl"))
    import logs as nccl

    monkeypatch.delitem(sys.modules, "logs")
    text = nccl.job(network="Socket", across="NET/Socket/{gpu}", within="SHM/direct/direct")
    (folder / "nccl.node0.log").write_text(text)
    (folder / "topology.txt").write_text(nccl.matrix(4, "NV12"))
    return folder


def test_nccl_logs_give_a_fix_and_describe_each_connection(
    read_page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_logs(tmp_path, monkeypatch)
    menu, text = read_page(folder, "/")
    assert menu == ["Overview", "Findings", "Network"]
    assert "Problems found" in text
    assert "What to fix first" in text and "Enable peer access" in text
    _, text = read_page(folder, "/network")
    assert "SHM\tthrough host memory\t6" in text
    assert "NV12\tNVLink\t6" in text
    assert "NET/Socket\tbetween nodes, over TCP\t2" in text


def test_flight_recorder_dumps_show_waiting_ranks_and_their_calls(
    read_page: Any, tmp_path: Path
) -> None:
    folder = shutil.copytree(READER_TESTS / "flight" / "never_calls", tmp_path / "dumps")
    _, text = read_page(folder, "/network")
    assert "rank 2\tnot called\tlast call: all_reduce 1\t[8] Float" in text
    assert "ranks 0-1, 3\twaiting\tall_reduce 2\t[16] Float" in text
    assert "train.py:29" in text
    _, text = read_page(folder, "/findings")
    assert "Make every rank reach this call" in text and "EVIDENCE" in text.upper()


def test_healthy_dumps_are_reported_as_such(read_page: Any) -> None:
    _, text = read_page(READER_TESTS / "flight" / "healthy", "/network")
    assert "all calls match and have ended" in text
