"""A run directory is analysed with what is in it: all of it, or what a killed run left."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from advisor.advise.engine import Options, analyze
from advisor.core.errors import AdvisorError
from advisor.core.report import Report
from advisor.core.run_directory import RankRecord
from advisor.read import open_run
from advisor.render.formats import REPORTS
from advisor.replay.result import what_if
from advisor.testing import TraceBuilder
from advisor.testing.record import RecordBuilder, write_run

OPTIONS = Options(config={})
MS = 1_000_000


def training(steps: int = 60, *, ended: bool = True) -> RankRecord:
    """10 ms steps, of which data takes 6; each of three profiled steps takes 15."""
    r = RecordBuilder()
    r.event("window", window=0, state="open", reason="schedule")
    for number in range(steps):
        inside = 20 <= number < 23
        r.step(15 if inside else 10, data=6, forward=1, window=0 if inside else None)
    r.event("window", window=0, state="done", file="trace_w0.json.gz")
    if ended:
        r.event("end", steps=steps, reason="finished")
    return r.build()


def window() -> bytes:
    b = TraceBuilder()
    for _ in range(4):
        with b.step():
            b.loader_wait(3000)
            with b.op("aten::mm"):
                b.launch("ampere_sgemm_128x64_nn", 6000)
            b.sync()
    return b.json()


def report_of(folder: Path) -> Report:
    return analyze(folder, OPTIONS)


def test_a_run_whose_window_was_never_reached_still_gives_a_report(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {0: training()})
    report = report_of(folder)
    assert report.recorded is not None and report.recorded.steps == 60
    # 10 warm-up steps, three profiled ones and the one after them do not count
    assert report.recorded.used == 60 - 10 - 3 - 1
    assert report.recorded.median_ns == 10 * MS and report.scope.step_ns == 10 * MS
    assert report.scope.step_source == "record"
    shares = {phase.name: phase.share for phase in report.recorded.phases}
    assert shares == {"data": 0.6, "other": 0.3, "forward": 0.1}
    assert sum(phase.ns for phase in report.recorded.phases) == 10 * MS
    assert report.status != "healthy"
    assert report.verdict.startswith("The program runs on the CPU.") and "60%" in report.verdict
    assert "no profiled window" in REPORTS.render("terminal", report)
    assert any("on the device" in item.what for item in report.not_checked)
    for text in (REPORTS.render("terminal", report), REPORTS.render("markdown", report)):
        assert "data" in text and "60%" in text and "46 of 60 recorded" in text
    assert Report.from_json(report.to_json()).recorded == report.recorded


def test_the_observer_effect_is_profiled_against_unprofiled_steps(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {0: training()})
    (folder / "rank0" / "trace_w0.json.gz").write_bytes(gzip.compress(window()))
    report = report_of(folder)
    assert report.recorded is not None
    assert report.recorded.profiled_median_ns == 15 * MS
    assert report.recorded.observer_effect == pytest.approx(0.5)
    assert report.scope.step_source == "ProfilerStep" and report.time
    assert report.recorded.windows == ["window 0: done"]
    text = " ".join(REPORTS.render("terminal", report).split())
    assert "median 10 ms without the profiler" in text and "the profiler adds 50%" in text


def test_a_run_that_was_killed_is_analysed_up_to_its_last_whole_line(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {0: training(ended=False)})
    steps = folder / "rank0" / "steps.jsonl"
    steps.write_bytes(steps.read_bytes()[:-7])
    packed = gzip.compress(window())
    (folder / "rank0" / "trace_w0.json.gz").write_bytes(packed[: len(packed) // 2])
    report = report_of(folder)
    assert report.recorded is not None and report.recorded.steps == 59
    assert report.recorded.ended is None
    assert any("1 damaged line" in line for line in report.limits)


def test_a_window_that_cannot_be_read_is_told_and_the_record_remains(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {0: training()})
    (folder / "rank0" / "trace_w0.json.gz").write_bytes(b"not a trace")
    report = report_of(folder)
    assert report.scope.step_source == "record"
    assert any("trace_w0" in line for line in report.limits)


def test_windows_keep_the_numbers_of_their_names(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {0: training(), 1: training()})
    (folder / "rank1" / "trace_w2.json.gz").write_bytes(gzip.compress(window()))
    (folder / "rank1" / "scalene.json").write_text("{}")
    run = open_run(folder)
    assert list(run.traces) == [(1, 2)] and run.problems == ()
    assert run.traces[1, 2].meta.rank == 1


def test_only_the_window_that_is_analysed_is_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {0: training(), 1: training()})
    for rank, number in ((0, 0), (0, 1), (0, 2), (1, 1)):
        (folder / f"rank{rank}" / f"trace_w{number}.json.gz").write_bytes(gzip.compress(window()))
    first = open_run(folder, window="first")
    assert list(first.traces) == [(0, 0), (1, 1)] and first.unread == ((0, 1), (0, 2))
    assert list(open_run(folder, window=2).traces) == [(0, 2)]
    report = report_of(folder)
    assert (report.inputs[0].window, report.inputs[0].windows) == (0, 3)
    (folder / "rank0" / "trace_w0.json.gz").write_bytes(b"not a trace")
    assert list(open_run(folder, window="first").traces) == [(0, 1), (1, 1)]
    assert analyze(folder, Options(config={}, window=2)).inputs[0].window == 2
    with pytest.raises(AdvisorError, match=r"no window 7 of rank 0 \(windows present: 0 to 2\)"):
        analyze(folder, Options(config={}, window=7))


def test_one_profiled_rank_of_several_is_the_one_reported(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {number: training() for number in range(3)})
    (folder / "rank1" / "trace_w0.json.gz").write_bytes(gzip.compress(window()))
    report = report_of(folder)
    assert report.scope.rank == 1 and report.ranks is not None
    assert [line.rank for line in report.ranks.lines] == [1, 0, 2]
    assert [line.step_ns for line in report.ranks.lines][1:] == [10 * MS, 10 * MS]
    assert "profiled" in report.ranks.note


def test_a_rank_can_be_chosen(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {0: training(), 1: training(steps=30)})
    report = analyze(folder, Options(config={}, rank=1))
    assert report.recorded is not None and report.recorded.steps == 30
    with pytest.raises(AdvisorError, match="nothing of rank 7"):
        analyze(folder, Options(config={}, rank=7))


def test_a_run_in_which_nothing_was_recorded_is_one_line(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {})
    with pytest.raises(AdvisorError, match="no process has recorded anything"):
        report_of(folder)


def test_a_run_without_a_single_step_says_so(tmp_path: Path) -> None:
    report = report_of(write_run(tmp_path / "run", {0: RankRecord(rank=training().rank)}))
    assert report.status == "limited" and "No step was recorded." in report.limits
    REPORTS.render("terminal", report)


def test_nothing_can_be_replayed_without_a_window(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "run", {0: training()}))
    with pytest.raises(AdvisorError, match="nothing to replay"):
        what_if(run, ["remove host sync"])


def test_a_trace_alone_has_one_line_for_all_that_needs_a_record(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_bytes(window())
    report = report_of(file)
    assert report.recorded is None
    lines = [item for item in report.not_checked if item.record == "advisor record"]
    assert len(lines) <= 1


def test_a_run_that_mostly_evaluates_says_so_first(tmp_path: Path) -> None:
    r = RecordBuilder()
    for number in range(60):
        r.step(10, forward=4, backward=6, evaluation=100 if number % 5 == 0 else 0)
    r.event("end", steps=60, reason="finished")
    seldom = RecordBuilder()
    seldom.steps(60, 10, forward=4, backward=6)
    seldom.event("end", steps=60, reason="finished")
    often, never = (
        report_of(write_run(tmp_path / name, {0: record.build()})).verdict
        for name, record in (("often", r), ("never", seldom))
    )
    # 11 of 12 evaluations come after the first step: 1.1 s beside 0.6 s of steps
    assert often.startswith("65% of the run lies between the training steps: evaluation")
    assert "between the training steps" not in never
