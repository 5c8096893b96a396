"""The page of the network path and of collectives that hang; the overview of such files alone."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from advisor.dashboard.loaded_runs import DashboardSession

READ = Path(__file__).parents[1] / "read"


@pytest.fixture
def opened(served: Any, tab: Any) -> Callable[..., tuple[list[str], str]]:
    """The menu, and a page's text, of a folder."""

    def read(folder: Path, path: str) -> tuple[list[str], str]:
        with served(DashboardSession([str(folder)]).load()) as shown:
            t = tab(shown)
            t.open(path)
            menu = t.page.locator("nav.side li").all_inner_texts()
            text: str = t.text("main")
            assert t.wrong == []
        return [item.strip() for item in menu], text

    return read


def logs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log of a job on two nodes that talk over TCP, and through host memory inside of one."""
    monkeypatch.syspath_prepend(str(READ / "nccl"))
    import logs as nccl

    monkeypatch.delitem(sys.modules, "logs")
    text = nccl.job(network="Socket", across="NET/Socket/{gpu}", within="SHM/direct/direct")
    (folder / "nccl.node0.log").write_text(text)
    (folder / "topology.txt").write_text(nccl.matrix(4, "NV12"))
    return folder


def test_logs_of_nccl_alone_say_what_to_fix_and_what_each_connection_is(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = logs(tmp_path, monkeypatch)
    menu, text = opened(folder, "/")
    assert menu == ["Overview", "Findings", "Network"]
    assert "Problems found" in text
    assert "What to fix first" in text and "Enable peer access" in text
    _, text = opened(folder, "/network")
    assert "SHM\tthrough host memory\t6" in text
    assert "NV12\tNVLink\t6" in text
    assert "NET/Socket\tbetween nodes, over TCP\t2" in text


def test_dumps_of_the_flight_recorder_show_who_waits_where(opened: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(READ / "flight" / "never_calls", tmp_path / "dumps")
    _, text = opened(folder, "/network")
    assert "rank 2\tnot called\tlast call: all_reduce 1\t[8] Float" in text
    assert "ranks 0-1, 3\twaiting\tall_reduce 2\t[16] Float" in text
    assert "train.py:29" in text
    _, text = opened(folder, "/findings")
    assert "Make every rank reach this call" in text and "EVIDENCE" in text.upper()


def test_healthy_dumps_say_so(opened: Any) -> None:
    _, text = opened(READ / "flight" / "healthy", "/network")
    assert "all calls match and have ended" in text
