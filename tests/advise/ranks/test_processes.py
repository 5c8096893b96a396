"""Measuring a job in processes of this machine: real ones, which are really killed."""

from __future__ import annotations

import os
import signal
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

import advisor
from advisor.advise.ranks.job import Done, count_ranks, is_many, study
from advisor.advise.ranks.sources import RemoteFile
from advisor.advise.ranks.task import Order, Wanted, perform
from advisor.advise.ranks.work import processes
from advisor.core.errors import AdvisorError
from advisor.core.pool import ProcessPool, WorkerDied
from advisor.measure.ranks.job_report import JobReport
from advisor.measure.ranks.summary import Summary, decode

Same = Callable[[JobReport], bytes]


def packed(path: Path, wanted: Wanted | None = None) -> bytes:
    source = RemoteFile(url=str(path), at=str(path), rank=0)
    return msgspec.msgpack.encode(Order(source=source, wanted=wanted or Wanted()))


def test_a_killed_process_changes_nothing_and_a_damaged_file_fails_alone(
    fleet: Any, same: Same
) -> None:
    whole = study([str(fleet.folder)], workers=2, wanted=fleet.wanted)
    assert (whole.read, whole.missing) == (fleet.ranks, [])
    assert [row.rank for row in whole.rows] == list(range(fleet.ranks))
    fleet.trap(3, "once")
    seen: list[tuple[int, int]] = []

    def told(done: Done) -> None:
        seen.append((done.ranks, done.total))

    again = study([str(fleet.folder)], workers=2, wanted=fleet.wanted, told=told)
    assert not (fleet.rules / "rank3.json.once").exists(), "nobody was killed"
    assert same(again) == same(whole)
    assert seen == [(n, fleet.ranks) for n in range(fleet.ranks + 1)]
    assert advisor.analyze_job is study
    (fleet.folder / "rank2.json").write_text('{"traceEvents": [')
    fleet.trap(5, "always")
    partly = study([str(fleet.folder)], workers=2, wanted=fleet.wanted)
    assert partly.read == fleet.ranks - 2
    told_ = {item.ranks: item.why for item in partly.missing}
    assert set(told_) == {"2", "5"}
    assert "killed by signal 9, 3 times" in told_["5"]
    assert str(fleet.folder) not in told_["2"]


def test_a_file_that_is_never_done_is_ended(fleet: Any) -> None:
    fleet.trap(1, "waits")
    report = study([str(fleet.folder)], ranks="1-2", workers=2, wanted=fleet.wanted, seconds=25.0)
    assert [item.ranks for item in report.missing] == ["1"]
    assert "not done within 25 s" in report.missing[0].why


def test_no_process_is_left_behind_not_even_a_busy_one(fleet: Any) -> None:
    fleet.trap(0, "waits")
    with processes(1) as crew:
        crew.submit(perform, packed(fleet.folder / "rank0.json", fleet.wanted))
        deadline = time.monotonic() + 60
        while not (pids := crew.pids) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_process_that_is_killed_between_two_orders_is_replaced(fleet: Any) -> None:
    with processes(1) as crew:
        assert isinstance(
            decode(crew.submit(perform, packed(fleet.folder / "rank0.json")).result(60)), Summary
        )
        (pid,) = crew.pids
        os.kill(pid, signal.SIGKILL)
        with suppress(WorkerDied):  # where it was handed over before the end was seen
            crew.submit(perform, packed(fleet.folder / "rank1.json")).result(60)
        found = crew.submit(perform, packed(fleet.folder / "rank1.json")).result(60)
        assert isinstance(decode(found), Summary)
        assert pid not in crew.pids


def test_a_process_is_replaced_after_so_many_files(fleet: Any) -> None:
    with ProcessPool(1, recycle=2) as crew:
        seen = []
        for rank in range(4):
            answer: Future[bytes] = crew.submit(perform, packed(fleet.folder / f"rank{rank}.json"))
            assert isinstance(decode(answer.result(60)), Summary)
            seen.append(crew.pids)
    first = seen[0][0]
    assert first not in seen[2]


def test_a_job_of_which_nothing_can_be_read_is_one_line(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"rank{rank}.json").write_text("{")
    with pytest.raises(AdvisorError, match=r"none of the 2 files can be read; first: .*rank0"):
        study([str(tmp_path)], workers=1)


def test_ranks_in_an_archive_are_fetched_by_the_workers(fleet: Any, tmp_path: Path) -> None:
    pytest.importorskip("fsspec", reason="the remote extra is not installed")
    archive = tmp_path / "job.zip"
    with zipfile.ZipFile(archive, "w") as made:
        for file in sorted(fleet.folder.iterdir()):
            made.write(file, f"gpu-01/{file.name}")
    place = f"zip://gpu-01/*.json::{archive}"
    assert count_ranks([place]) == fleet.ranks
    here, there = (study([one], workers=2) for one in (str(fleet.folder), place))
    assert [row.rank for row in there.rows] == list(range(fleet.ranks))
    assert [row.step_ns for row in there.rows] == [row.step_ns for row in here.rows]
    assert [row.host for row in there.rows] == ["gpu-01"] * fleet.ranks
    assert there.rows[2].path == f"zip://gpu-01/rank2.json::{archive}"


def test_a_fault_of_the_comparison_is_one_line(fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def diagnose(*_: object, **__: object) -> JobReport:
        raise ValueError("zero-size\narray")

    monkeypatch.setattr("advisor.advise.ranks.diagnose.diagnose", diagnose)
    with pytest.raises(AdvisorError, match=r"cannot be compared, .*ValueError: zero-size array"):
        study([str(fleet.folder)], ranks="0", workers=1)


def test_ranks_are_counted_by_names_and_windows_of_one_rank_are_not(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"trace_{number}.json").write_text("{}")
    assert count_ranks([str(tmp_path)]) == 0
    for number in range(3):
        for window in range(2):
            (tmp_path / f"host_{number}.{window}.pt.trace.json").write_text("{}")
    assert count_ranks([str(tmp_path)]) == 3
    (tmp_path / "rank7").mkdir()
    (tmp_path / "rank7" / "trace.json").write_text("{}")
    assert count_ranks([str(tmp_path)]) == 4
    assert count_ranks([str(tmp_path / "nowhere")]) == 0


def test_more_files_elsewhere_than_are_held_at_once_are_measured_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = [RemoteFile(f"s3://b/{n}.json", f"s3://b/{n}.json") for n in range(65)]
    monkeypatch.setattr("advisor.advise.ranks.job.locate", lambda _: there)
    assert is_many(["s3://b/"])
    there.pop()
    assert not is_many(["s3://b/"])
