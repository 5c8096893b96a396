"""A comparison of two recorded runs is a past prediction where one fix was tested."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from advisor import cli
from advisor.advise.engine import Options
from advisor.compare import compare
from advisor.compare.compare import append_prediction, prediction_of
from advisor.replay import ledger
from advisor.testing import TraceBuilder

Record = Callable[..., Path]
STEPS = [11_000.0 + n % 3 for n in range(30)]


def training(wait: float = 0.0) -> TraceBuilder:
    """Steps with a wait for the loader and 1 ms of the host's work."""
    b = TraceBuilder("A100")
    for number in range(8):
        with b.step():
            if wait:
                b.loader_wait(wait + number % 3, workers=0)
            with b.op("aten::mm", [[512, 512], [512, 512]], "c10::BFloat16"):
                b.launch("ampere_bf16_gemm", 900)
            b.host(970 + number % 3)
    return b


@pytest.fixture
def runs(write_recording: Record) -> tuple[Path, Path]:
    """Two runs. Before: 10 of 11 ms are a wait for the loader. After: no wait."""
    return (
        write_recording("before", STEPS, training(wait=10_000)),
        write_recording("after", [us - 10_000 for us in STEPS], training()),
    )


def lines(run: Path) -> list[ledger.Prediction]:
    return ledger.read_ledger(run / ledger.FILE).predictions


def test_fix_with_estimate_is_recorded_in_the_later_run(
    runs: tuple[Path, Path],
) -> None:
    before, after = runs
    c = compare(before, after, Options(config={}))
    assert append_prediction(c, after / ledger.FILE, unix=7)
    (line,) = lines(after)
    assert lines(before) == []
    assert (line.unix, line.source, line.rule) == (7, "compare", "single-process-loader")
    # by hand: 10 of 11 ms, of which the replay keeps what hides behind the device
    assert line.measured == pytest.approx(10 / 11, abs=0.01)
    assert line.measured_low <= line.measured <= line.measured_high
    assert line.low <= line.predicted <= line.high
    # workers cost the step a tenth of what they compute, and 1.5 ms to hand a batch over
    assert line.predicted == pytest.approx((10 - 1 - 1.5) / 11, abs=0.02)
    assert line.inside is (line.low <= line.measured <= line.high)
    assert line.device == "NVIDIA A100-SXM4-80GB"
    assert not append_prediction(c, after / ledger.FILE, unix=8), "it was compared before"
    assert len(lines(after)) == 1


def test_the_ledger_names_no_program_file_or_host(runs: tuple[Path, Path]) -> None:
    before, after = runs
    append_prediction(compare(before, after, Options(config={})), after / ledger.FILE, unix=1)
    text = (after / ledger.FILE).read_text()
    assert not any(word in text for word in (str(before.parent), "before", "gemm", "sgemm"))


def test_predictions_are_appended_for_fixes_in_runs_only(
    runs: tuple[Path, Path], tmp_path: Path
) -> None:
    before, after = runs
    assert prediction_of(compare(before, before, Options(config={})), unix=1) is None
    assert not append_prediction(
        compare(after, before, Options(config={})), tmp_path / "l.jsonl", unix=1
    )
    files = [training(wait=wait).write(tmp_path / f"{wait}.json") for wait in (10_000.0, 0.0)]
    c = compare(files[0], files[1], Options(config={}))
    assert prediction_of(c, unix=1) is not None, "there is something to say"
    assert not append_prediction(c, tmp_path / "l.jsonl", unix=1), (
        "and no folder of a run to say it in"
    )
    assert not list(tmp_path.glob("*.jsonl"))


def test_two_simultaneous_fixes_give_no_prediction(runs: tuple[Path, Path]) -> None:
    from msgspec.structs import replace

    c = compare(*runs, Options(config={}))
    two = replace(c, realised=replace(c.realised, rules=("one", "other")))
    assert prediction_of(two, unix=1) is None


def test_command_line_appends_predictions_only_on_request(
    runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "own.jsonl"
    monkeypatch.setenv(ledger.VARIABLE, str(file))
    before, after = map(str, runs)
    assert cli.run(["compare", before, after]) == 0
    assert not file.exists() and not lines(runs[1])
    assert cli.run(["compare", before, after, "--remember"]) == 0
    assert len(ledger.read_ledger(file).predictions) == 1 and not lines(runs[1])
