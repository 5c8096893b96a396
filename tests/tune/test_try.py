"""``advisor try`` from the command line: a slow loader, its cure, and what is kept."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from advisor.cli import run as cli
from advisor.cli.try_ import parse_time
from advisor.core.errors import AdvisorError
from advisor.render.formats import TRIALS
from advisor.replay import ledger
from advisor.tune.knob import KnobSetting
from advisor.tune.pipeline import save_trials
from advisor.tune.report import (
    CombinedTrial,
    Trial,
    TrialReport,
    format_gain_interval,
    write_trial_headline,
)

pytest.importorskip("torch")

pytestmark = pytest.mark.timed

SLOW = """
import time
import torch
from torch.utils.data import DataLoader, Dataset
torch.set_num_threads(1)

class Items(Dataset):
    def __len__(self): return 1 << 16
    def __getitem__(self, i):
        time.sleep(0.004)  # waiting takes no core: so it is on a busy machine too
        return torch.full((8,), i % 7 / 7)

def main():
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for batch in DataLoader(Items(), batch_size=16):
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()
    print("never")

if __name__ == "__main__":
    main()
"""


def command(folder: Path, *words: str, **more: str) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(SLOW)
    env = {**os.environ, "ADVISOR_LEDGER": str(folder / "mine.jsonl"), **more}
    return subprocess.Popen(
        [sys.executable, "-m", "advisor", "try", "--no-progress", *words],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_cure_wins_within_its_prediction_and_is_remembered(tmp_path: Path) -> None:
    words = ("--budget", "600s", "--steps", "12", "--warmup", "8", "--out", "run")
    process = command(
        tmp_path, *words, "--only", "workers=2", "--remember", "--format", "json", "train.py"
    )
    out, err = process.communicate(timeout=1500)
    assert process.returncode == 0, err
    report = TrialReport.from_json(out.encode())
    (best,) = report.trials
    assert best.knob_setting == KnobSetting("workers", 2)
    # a machine too busy to measure on leaves a gain of unknown size: nothing to win or remember
    if best.is_known:
        assert best.outcome == "gain"
        assert report.together is not None
    assert best.losses == "equal"
    assert "+    for batch in DataLoader(Items(), batch_size=16, num_workers=" in best.diff
    assert report.repeats is True
    assert (tmp_path / "train.py").read_text() == SLOW
    lines = ledger.read_ledger(tmp_path / "run" / ledger.FILE).predictions
    measured = best.is_known and best.runs > 1 and best.predicted is not None
    assert {line.rule for line in lines} == ({"single-process-loader"} if measured else set())
    assert ledger.read_ledger(tmp_path / "mine.jsonl").predictions == lines
    if lines:
        assert b"train" not in (tmp_path / "mine.jsonl").read_bytes()
    for width in (60, 80, 120):
        lines = TRIALS.render("terminal", report, width=width).splitlines()
        assert max(map(len, lines)) <= width
    assert "<html" in TRIALS.render("html", report)


def make_trial(**changes: object) -> Trial:
    """A trial that was promised a half and measured twice."""
    fields: dict[str, object] = {
        "rule": "single-process-loader",
        "knob_setting": KnobSetting("workers", 2),
        "title": "Workers",
        "safety": "exact",
        "outcome": "gain",
        "predicted": 0.5,
        "predicted_low": 0.3,
        "predicted_high": 0.6,
        "gain": 0.48,
        "gain_low": 0.45,
        "gain_high": 0.51,
        "runs": 2,
    }
    return Trial(**{**fields, **changes})  # type: ignore[arg-type]


def test_predictions_and_measurements_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADVISOR_LEDGER", str(tmp_path / "mine.jsonl"))
    program = ["python", "train.py"]
    trials = [
        make_trial(),
        make_trial(rule="once", runs=1),
        make_trial(rule="wide", gain_low=0.3, gain_high=0.6),
        make_trial(rule="no-promise", predicted=None),
        make_trial(rule="dropped", outcome="dropped"),
    ]
    report = TrialReport(version="1", program=program, trials=trials)
    save_trials(report, tmp_path, remember=True)
    lines = ledger.read_ledger(tmp_path / ledger.FILE).predictions
    assert [(line.rule, line.predicted, line.measured) for line in lines] == [
        ("single-process-loader", 0.5, 0.48)
    ]
    assert ledger.read_ledger(tmp_path / "mine.jsonl").predictions == lines
    assert b"train.py" not in (tmp_path / "mine.jsonl").read_bytes()
    save_trials(report, tmp_path, remember=False)
    assert len(ledger.read_ledger(tmp_path / "mine.jsonl").predictions) == 1


def test_interrupted_trial_keeps_known_results(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    words = ("--steps", "12", "--warmup", "8", "--out", "run", "train.py")
    process = command(tmp_path, *words, TMPDIR=str(tmp_path / "tmp"))
    # the recording was the first
    while not list((tmp_path / "tmp").glob("advisor-*/run2")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 130, err
    assert "Interrupted" in out
    report = json.loads((tmp_path / "run" / "trials.json").read_text())
    assert report["interrupted"] is True
    assert {trial["outcome"] for trial in report["trials"]} >= {"not run"}


HANGS = """
import os, socket, time
import torch
with socket.create_connection(("127.0.0.1", PORT)) as connection:
    connection.sendall(str(os.getpid()).encode())
time.sleep(3600)
"""


def test_a_signal_to_the_trial_ends_the_program_too(tmp_path: Path) -> None:
    """SIGTERM is what CI and servers send; the program has a session of its own."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(600)
        (tmp_path / "hangs.py").write_text(HANGS.replace("PORT", str(server.getsockname()[1])))
        process = command(tmp_path, "--out", "run", "hangs.py")
        connection, _ = server.accept()
        with connection:
            pid = int(connection.recv(20))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=600)
    deadline = time.monotonic() + 300
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(pid)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_program_without_training_is_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print('hello')")
    assert cli(["try", "--no-progress", "train.py"]) == 2
    assert capsys.readouterr().err.startswith("advisor: nothing was recorded: ")
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").write_text("{}")
    assert cli(["try", "run", "--budget", "5"]) == 2  # not taken for a program
    assert "options go before the run" in capsys.readouterr().err
    assert cli(["try", "train.py", "--budget", "90s"]) == 2
    out, err = capsys.readouterr()
    assert "put it before the program, or -- before the program if it has this" in err
    assert "hello" not in out + err  # it did not run


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("10m", 600), ("1h", 3600)])
def test_budgets_have_units(text: str, seconds: float) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "-5s", "10 days", "1e9"])
def test_invalid_budget_is_one_line_error(text: str) -> None:
    with pytest.raises(AdvisorError, match="--budget"):
        parse_time(text)


def test_trial_without_a_winner_is_reported() -> None:
    trial = Trial(rule="r", knob_setting=KnobSetting("threads", 2), title="", safety="reordered",
                  outcome="no gain")  # fmt: skip
    assert write_trial_headline(TrialReport(trials=[trial])) == ("No gain is shown in 1 trial.")
    trial.outcome = "unclear"
    other = Trial(rule="r", knob_setting=KnobSetting("threads", 1), title="", safety="reordered")
    headline = write_trial_headline(TrialReport(trials=[trial, other]))
    assert "The runs of 1 differ too much to tell" in headline and "--budget" in headline
    assert (
        write_trial_headline(TrialReport(verdict="All is well.")) == "Nothing to try. All is well."
    )


def test_the_headline_of_an_interrupted_run_names_its_gains() -> None:
    trials = [
        Trial(rule="r", knob_setting=KnobSetting("workers", workers), title="", safety="exact",
              outcome="gain", gain=gain, gain_low=gain - 0.1, gain_high=gain + 0.1)
        for workers, gain in ((1, 0.4), (2, 0.5))
    ]  # fmt: skip
    report = TrialReport(trials=trials[:1], interrupted=True)
    assert write_trial_headline(report) == (
        "Interrupted; results so far. workers=1: a step takes 30 to 50% less time."
    )
    report.trials = trials
    assert write_trial_headline(report) == (
        "Interrupted; results so far. workers=2: a step takes 40 to 60% less time. "
        "1 other gain below; not tried together."
    )


def test_the_headline_of_a_combination_has_savings_of_one_sign() -> None:
    trial = Trial(rule="r", knob_setting=KnobSetting("workers", 2), title="", safety="exact")
    report = TrialReport(trials=[trial], step_ns=200e6, together=CombinedTrial(
        knob_settings=[trial.knob_setting], step_ns=110e6, gain=0.45, gain_low=0.34,
        gain_high=0.55))  # fmt: skip
    assert write_trial_headline(report) == (
        "workers=2: 200 ms → 110 ms per step (45% less; 34 to 55% with 95% confidence)."
    )


def test_a_budget_that_recording_used_up_is_named_and_its_trials_listed_once() -> None:
    trials = [
        Trial(rule="r", knob_setting=KnobSetting("workers", workers), title="", safety="exact",
              why="the budget was spent")
        for workers in (2, 1)
    ]  # fmt: skip
    report = TrialReport(trials=trials, out_of_budget=True, seconds=60, processes=1)
    text = TRIALS.render("terminal", report)
    assert text.startswith("Nothing was tried: recording used 60 s. Try again with a larger")
    assert "1 process, 60 s" in text
    assert text.count("the budget was spent") == 1 and "workers=2, workers=1" in text


def test_intervals_have_a_minus_sign_and_an_end() -> None:
    assert format_gain_interval(-0.123, 0.48) == "−12 to 48%"
    assert format_gain_interval(-3.5, 0.48) == "−100% or less to 48%"
    assert format_gain_interval(-0.001, -0.2) == "0 to −20%"
