"""The allocator's history and snapshot around a recording: what is switched on, and off again.

There is no allocator here: torch's own entry points are replaced by ones that note who calls.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from advisor.core.run_directory import SNAPSHOT
from advisor.recorder.watchers import MAX_HISTORY_ENTRIES, OutOfMemoryHook
from advisor.testing.allocator import MIB, FakeAllocator

pytestmark = pytest.mark.timed

Calls = list[tuple[Any, ...]]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """A torch that looks as if it had initialised a GPU."""
    calls: Calls = []
    m = FakeAllocator()
    m.alloc(3 * MIB)

    def log_call(name: str) -> Any:
        return lambda *given, **named: calls.append((name, given, named))

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 3 * MIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 20 * MIB)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", log_call("history"))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda file: m.write(Path(file)))
    monkeypatch.setattr(
        torch._C, "_cuda_attach_out_of_memory_observer", log_call("observe"), raising=False
    )
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: False, raising=False)
    return calls


def make_hook(history: int) -> tuple[OutOfMemoryHook, list[dict[str, Any]]]:
    reports: list[dict[str, Any]] = []
    return OutOfMemoryHook(reports.append, history), reports


def test_memory_history_is_off_by_default(cuda: Calls) -> None:
    oom, _ = make_hook(0)
    oom.install()
    oom.close()
    assert [call[0] for call in cuda] == ["observe"]


@pytest.mark.parametrize(("max_entries", "kept"), [(5000, 5000), (1 << 60, MAX_HISTORY_ENTRIES)])
def test_history_is_bounded_and_switched_off_at_the_end(
    max_entries: int, kept: int, cuda: Calls
) -> None:
    oom, _ = make_hook(max_entries)
    oom.install()
    oom.install()
    oom.close()
    oom.close()
    names = [call for call in cuda if call[0] == "history"]
    assert len(names) == 2
    assert names[0][2]["max_entries"] == kept and names[0][1] == ("all",)
    assert names[1][1] == (None,)


def test_user_memory_history_is_unchanged(cuda: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: True)
    oom, _ = make_hook(5000)
    oom.install()
    oom.close()
    assert [call[0] for call in cuda] == ["observe"]


def test_a_torch_that_cannot_is_reported_and_trains_on(
    cuda: Calls, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def raise_runtime_error(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", raise_runtime_error)
    oom, _ = make_hook(5000)
    oom.install()
    oom.close()
    assert "no memory history" in caplog.text


def test_snapshot_is_taken_at_the_failure(cuda: Calls, tmp_path: Path) -> None:
    from advisor.read.formats.memory_snapshot.tables import read_snapshot

    oom, reports = make_hook(5000)
    oom.folder = tmp_path
    oom.install()
    observer = next(call[1][0] for call in cuda if call[0] == "observe")
    observer(0, 1, 2, 3)
    written = (tmp_path / SNAPSHOT).stat().st_mtime_ns
    oom.on_exception(torch.OutOfMemoryError("CUDA out of memory."))
    assert (tmp_path / SNAPSHOT).stat().st_mtime_ns == written  # not once more, after the frees
    assert reports[0]["snapshot"] == SNAPSHOT and reports[0]["allocated"] == 3 * MIB
    snapshot = read_snapshot([(tmp_path / SNAPSHOT).read_bytes()], "x")
    assert int(snapshot.segments["total"].sum()) == 20 * MIB
