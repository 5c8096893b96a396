"""Measuring a job in processes of this machine: real ones, which are really killed."""

from __future__ import annotations

import os
import signal
import time
import zipfile
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from advisor.advise.engine import Options, analyze
from advisor.advise.ranks.job import MAX_RANKS_IN_MEMORY, RanksDone, files_summarized_apart
from advisor.advise.ranks.task import MeasureTask, run_task
from advisor.advise.ranks.worker_pool import start_processes
from advisor.core.errors import AdvisorError
from advisor.core.pool import ProcessPool, WorkerDied
from advisor.measure.ranks.summary_schema import RankSummary, decode
from advisor.read.remote.urls import RemoteFile


def packed(path: Path, wanted: Options | None = None) -> bytes:
    source = RemoteFile(url=str(path), at=str(path), rank=0)
    return MeasureTask(source=source, wanted=wanted or Options()).encoded()


def test_killed_worker_is_retried_and_damaged_file_fails_alone(job_folder: Any) -> None:
    undisturbed = job_folder.analyze(workers=2)
    assert undisturbed.ranks.missing == []
    assert [line.rank for line in undisturbed.ranks.lines] == list(range(job_folder.ranks))
    job_folder.inject_worker_fault(3, "once")
    seen: list[tuple[int, int]] = []

    def progress(done: RanksDone) -> None:
        seen.append((done.ranks, done.total))

    after_kill = job_folder.analyze(workers=2, on_progress=progress)
    assert not (job_folder.rules / "rank3.json.once").exists(), "nobody was killed"
    assert after_kill == undisturbed
    assert seen == [(n, job_folder.ranks) for n in range(job_folder.ranks + 1)]
    (job_folder.folder / "rank2.json").write_text('{"traceEvents": [')
    job_folder.inject_worker_fault(5, "always")
    partly = job_folder.analyze(workers=2).ranks
    assert len(partly.lines) == job_folder.ranks - 2
    reasons = {item.ranks: item.why for item in partly.missing}
    assert set(reasons) == {"2", "5"}
    assert "killed by signal 9, 3 times" in reasons["5"]
    assert str(job_folder.folder) not in reasons["2"]


def test_endless_file_is_stopped(job_folder: Any) -> None:
    job_folder.inject_worker_fault(1, "waits")
    ranks = job_folder.analyze("1-2", workers=2, seconds=30.0).ranks
    assert [item.ranks for item in ranks.missing] == ["1"]
    assert "not done within 30 s" in ranks.missing[0].why


def test_busy_worker_processes_are_not_left_behind(job_folder: Any) -> None:
    job_folder.inject_worker_fault(0, "waits")
    with start_processes(1) as crew:
        crew.submit(
            run_task,
            packed(job_folder.folder / "rank0.json", Options(rules_folder=Path(job_folder.rules))),
        )
        deadline = time.monotonic() + 60
        while not (pids := crew.pids) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_process_killed_between_tasks_is_replaced(job_folder: Any) -> None:
    with start_processes(1) as crew:
        assert isinstance(
            decode(crew.submit(run_task, packed(job_folder.folder / "rank0.json")).result(60)),
            RankSummary,
        )
        (pid,) = crew.pids
        os.kill(pid, signal.SIGKILL)
        with suppress(WorkerDied):  # where it was handed over before the end was seen
            crew.submit(run_task, packed(job_folder.folder / "rank1.json")).result(60)
        result = crew.submit(run_task, packed(job_folder.folder / "rank1.json")).result(60)
        assert isinstance(decode(result), RankSummary)
        assert pid not in crew.pids


def test_process_is_replaced_after_its_file_limit(job_folder: Any) -> None:
    with ProcessPool(1, recycle=2) as crew:
        seen = []
        for rank in range(4):
            answer: Future[bytes] = crew.submit(
                run_task, packed(job_folder.folder / f"rank{rank}.json")
            )
            assert isinstance(decode(answer.result(60)), RankSummary)
            seen.append(crew.pids)
    first = seen[0][0]
    assert first not in seen[2]


def test_unreadable_job_is_one_line_error(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"rank{rank}.json").write_text("{")
    with pytest.raises(AdvisorError, match=r"none of the 2 files can be read; first: .*rank0"):
        analyze(tmp_path, Options(workers=1))


def test_ranks_in_an_archive_are_fetched_by_the_workers(job_folder: Any, tmp_path: Path) -> None:
    pytest.importorskip("fsspec", reason="the remote extra is not installed")
    archive = tmp_path / "job.zip"
    with zipfile.ZipFile(archive, "w") as zip_file:
        for file in sorted(job_folder.folder.iterdir()):
            zip_file.write(file, f"gpu-01/{file.name}")
    place = f"zip://gpu-01/*.json::{archive}"
    reports = [analyze(one, Options(workers=2)) for one in (str(job_folder.folder), place)]
    local_lines, archive_lines = ([] if r.ranks is None else r.ranks.lines for r in reports)
    assert [line.rank for line in archive_lines] == list(range(job_folder.ranks))
    assert [line.step_ns for line in archive_lines] == [line.step_ns for line in local_lines]
    assert [line.host for line in archive_lines] == ["gpu-01"] * job_folder.ranks
    assert archive_lines[2].path == f"zip://gpu-01/rank2.json::{archive}"


def test_comparison_failure_is_one_line_error(
    job_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def comparison(*_: object, **__: object) -> None:
        raise ValueError("zero-size\narray")

    monkeypatch.setattr("advisor.replay.ranks.rank_comparison.compare_ranks", comparison)
    with pytest.raises(AdvisorError, match=r"cannot be compared, .*ValueError: zero-size array"):
        job_folder.analyze("0-1", workers=1)


def test_windows_of_one_rank_count_as_one_rank(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"trace_{number}.json").write_text("{}")
    assert not files_summarized_apart([str(tmp_path)], Options())
    for number in range(MAX_RANKS_IN_MEMORY - 1):
        for window in range(2):
            (tmp_path / f"host_{number}.{window}.pt.trace.json").write_text("{}")
    assert not files_summarized_apart([str(tmp_path)], Options())
    for number in (70, 71):
        (tmp_path / f"rank{number}").mkdir()
        (tmp_path / f"rank{number}" / "trace.json").write_text("{}")
    assert files_summarized_apart([str(tmp_path)], Options())
    assert not files_summarized_apart([str(tmp_path / "nowhere")], Options())


def test_excess_remote_files_are_measured_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    remote_files = [RemoteFile(f"s3://b/{n}.json", f"s3://b/{n}.json") for n in range(65)]
    monkeypatch.setattr("advisor.advise.ranks.job.locate_traces", lambda *_: remote_files)
    assert files_summarized_apart(["s3://b/"], Options())
    remote_files.pop()
    assert not files_summarized_apart(["s3://b/"], Options())
