"""A saved report holds the steps of its run: it compares as exactly as the run does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

import advisor
from advisor.compare import compare
from advisor.compare.statistics import welch_interval
from advisor.core.errors import AdvisorError
from advisor.core.report import Report
from advisor.testing import TraceBuilder

Make = Callable[..., TraceBuilder]
Record = Callable[..., Path]


def saved_report(run: Path | str) -> Report:
    """The report of a run, written and read back."""
    return Report.from_json(advisor.analyze(run).to_json())


def test_two_saved_reports_compare_as_their_runs_do(
    write_recording: Record, training: Make
) -> None:
    random = np.random.default_rng(0)
    for name, us, wait in (("a", 1000, 5000.0), ("b", 1030, 0.0)):
        write_recording(name, list(random.normal(us, 40, 120)), training(wait=wait), samples=32)
    folder = Path(str(write_recording("c", [1000.0] * 60, training(), samples=32))).parent
    for before, after in (("a", "b"), ("b", "a"), ("a", "a"), ("a", "c")):
        runs = [folder / before, folder / after]
        of_runs, of_reports = compare(*runs), compare(*map(saved_report, runs))
        assert of_reports.steps == of_runs.steps
        assert of_reports.steps.source == "recorder" and of_reports.steps.verdict != "not measured"
        assert of_reports.amounts == of_runs.amounts
        assert (of_reports.before.samples, of_reports.before.record_shapes) == (
            32,
            of_runs.before.record_shapes,
        )
        assert compare(runs[0], saved_report(runs[1])).steps == of_runs.steps


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("pairs/loader_autograd_workers0", "pairs/loader_autograd_workers4"),
        ("alexnet", "v100_train_copy_heavy"),
        pytest.param("alexnet", "a100_train_6steps", marks=pytest.mark.thorough),
    ],
)
def test_reports_of_real_traces_compare_as_the_traces_do(
    shared_trace: Callable[[str], str], before: str, after: str
) -> None:
    paths = [shared_trace(name) for name in (before, after)]
    assert compare(*map(saved_report, paths)).steps == compare(*paths).steps


def test_saved_reports_give_the_same_interval_as_steps(training: Make, tmp_path: Path) -> None:
    paths = [training(gemm=us, steps=4).write(tmp_path / f"{us}.json") for us in (900.0, 1300.0)]
    reports = [saved_report(path) for path in paths]
    samples = [np.array(r.step_durations[0].durations_ns, dtype=float) for r in reports]
    interval = welch_interval(*samples)  # four steps: independent ones
    comparison = compare(*reports).steps
    assert (comparison.low_ns, comparison.high_ns) == (interval.low, interval.high)


def test_a_long_run_keeps_its_last_steps_and_their_numbers(
    write_recording: Record, training: Make
) -> None:
    durations = [1000.0 + n % 7 for n in range(6000)]
    (steps, _) = saved_report(write_recording("long", durations, training())).step_durations
    assert steps.numbers == [(1000, 5999)]
    assert steps.durations_ns == [int(us * 1000) for us in durations[1000:]]


def test_excluded_steps_are_missing_from_step_numbers(tmp_path: Path) -> None:
    b = TraceBuilder()
    for number in range(9):
        with b.step(), b.op("aten::mm"):
            b.launch("gemm", 90_000 if number == 4 else 900 + number)
            b.sync()
    report = saved_report(b.write(tmp_path / "t.json"))
    (steps,) = report.step_durations
    (outlier,) = report.scope.outliers
    aside = int(outlier.rpartition("#")[2])
    assert [last + 1 for _, last in steps.numbers[:-1]] == [aside]
    assert len(steps.durations_ns) == report.scope.steps_used == 8


def test_report_without_steps_gets_instructions(training: Make, tmp_path: Path) -> None:
    """Reports that were written before reports held their steps."""
    path = training().write(tmp_path / "a.json")
    old = msgspec.structs.replace(saved_report(path), step_durations=[])
    comparison = compare(old, path)
    assert comparison.steps.verdict == "not measured"
    assert (
        "the report before does not contain its steps; analyze the trace again"
        in comparison.verdict
    )
    assert comparison.amounts == compare(path, path).amounts


@pytest.mark.parametrize(
    "steps",
    [
        '{"source": "trace", "durations_ns": [-1], "numbers": [[0, 0]]}',
        '{"source": "trace", "durations_ns": [5, 5], "numbers": [[0, 0]]}',
        '{"source": "trace", "durations_ns": [5, 5], "numbers": [[0, 999999999999]]}',
        '{"source": "trace", "durations_ns": [1, "x"], "numbers": [[0, 1]]}',
        '{"source": "other", "durations_ns": [], "numbers": []}',
    ],
)
def test_damaged_steps_are_not_a_report(training: Make, tmp_path: Path, steps: str) -> None:
    report = advisor.analyze(training().write(tmp_path / "a.json")).to_dict()
    report["step_durations"] = [msgspec.json.decode(steps)]
    with pytest.raises(AdvisorError, match="not a report"):
        Report.from_json(msgspec.json.encode(report))


def test_python_takes_reports_and_traces_together(training: Make, tmp_path: Path) -> None:
    path = training().write(tmp_path / "a.json")
    report = advisor.analyze(path)
    assert "of the run before" in compare(report, path).limits[0]
    assert "of both runs" in compare(report, report).limits[0]
