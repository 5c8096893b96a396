"""The folder of all runs, given where one is meant: they are listed, with what to type."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import advisor
from advisor.cli.output import MAX_RUNS
from advisor.core.run_directory import EVENTS, MANIFEST, STEPS, Event, Manifest, StepRow
from advisor.testing import TraceBuilder
from advisor.tune.report import FILE

Cli = Callable[..., Any]
DAY = 86_400 * 10**9


def record(folder: Path, day: int, steps: int, *command: str) -> Path:
    """A run of one rank with a trace."""
    rank = folder / "rank0"
    rank.mkdir(parents=True)
    manifest = Manifest(run_id=folder.name, started_unix_ns=day * DAY, command=list(command))
    (folder / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    lines = [msgspec.json.encode(StepRow(n=n, t=n * 1000, dur=1000)) for n in range(steps)]
    (rank / STEPS).write_bytes(b"\n".join(lines) + b"\n")
    b = TraceBuilder()
    for _ in range(3):
        with b.step(), b.op("aten::mm"):
            b.launch("gemm", 900)
            b.sync()
    b.write(rank / "trace_w0.json.gz")
    return folder


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with two runs in ``runs``."""
    monkeypatch.chdir(tmp_path)
    record(
        tmp_path / "runs" / "2026-11-20_a", 20_000, 12, "/usr/bin/python3", "train.py", "--lr", "1"
    )
    record(tmp_path / "runs" / "2026-11-21_b", 20_001, 345, "torchrun", "\x1b[2Jbig.py")
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        "whatif runs -e 'scale work 0'",
        "report runs/ --html x.html",
        "whatif . --rank 0 -e 'scale work 0'",
        "compare runs/2026-11-20_a runs",
        "export runs --perfetto x.json",
        "dashboard runs runs/2026-11-20_a --no-browser",
    ],
)
def test_folder_of_runs_lists_runs_and_commands(project: Path, advisor: Cli, words: str) -> None:
    result = advisor(*shlex.split(words))
    assert (result.code, result.out) == (2, "")
    newest, older, last = result.err.splitlines()
    assert newest.split()[0] == str(Path("runs/2026-11-21_b"))
    assert "345 steps" in newest and "torchrun" in newest and "\x1b" not in result.err
    assert "12 steps" in older and "train.py --lr 1" in older and "python3" not in older
    assert "2024-10-0" in older  # 20,000 days after 1970
    typed = shlex.split(last.partition("choose one: advisor ")[2])
    place_of_runs = next(
        i for i, word in enumerate(shlex.split(words)) if word in ("runs", "runs/", ".")
    )
    wanted = shlex.split(words)
    wanted[place_of_runs] = "runs/2026-11-21_b"
    assert typed == wanted


def test_analyze_takes_the_newest_usable_run_and_explains_it(project: Path, advisor: Cli) -> None:
    runs = project / "runs"
    (runs / "2026-11-20_a/rank0" / EVENTS).write_bytes(
        msgspec.json.encode(Event(t=10**9, kind="end", data={"reason": "finished"}))
    )  # the newer one, without an end, was killed
    result = advisor("analyze", "runs/", "--format", "json")
    assert result.code == 0
    assert json.loads(result.out)["inputs"][0]["path"].startswith("runs/2026-11-21_b")
    *which, another, blank = result.err.splitlines()
    text = " ".join(line.strip() for line in which)
    assert text.startswith("runs/2026-11-21_b, the newest of 2 runs:") and ", 345 steps," in text
    assert max(map(len, which)) <= 80 and not blank
    trial = record(runs / "2026-11-22_c", 20_002, 12, "train.py")
    (trial / FILE).write_text("{}")
    started = record(runs / "2026-11-23_d", 20_003, 0, "killed.py") / "rank0"
    (started / STEPS).unlink()
    (started / "trace_w0.json.gz").unlink()
    result = advisor("analyze", "runs/", "--format", "json")
    assert json.loads(result.out)["inputs"][0]["path"].startswith("runs/2026-11-21_b")
    *lines, another, _ = result.err.splitlines()
    assert lines[0].startswith("runs/2026-11-21_b, the newest of 4 runs that can be analysed:")
    assert [line for line in lines if line.startswith("skipped")] == [
        "skipped: runs/2026-11-23_d, no steps recorded",
        "skipped: runs/2026-11-22_c, a trial of advisor try",
    ]
    for n in range(MAX_RUNS):
        record(runs / f"2024-01-{n:02}_e", 19_000 + n, 12, "train.py")
    all_runs = f"the newest of {MAX_RUNS + 4} runs that can be analysed:"
    assert all_runs in advisor("analyze", "runs/", "--format", "json").err
    typed = shlex.split(another.removeprefix("another: advisor "))
    assert typed[0] == "analyze" and (project / typed[1]).is_dir() and "11-21" not in typed[1]


def test_the_list_is_harmless_and_has_damaged_runs(project: Path, advisor: Cli) -> None:
    (project / "runs/2026-11-20_a" / MANIFEST).write_bytes(b"\xff" * 10)
    (project / "runs/2026-11-20_a/rank0" / STEPS).unlink()
    for n in range(40):
        (project / f"runs/2026-10-{n:02}").mkdir()
        (project / f"runs/2026-10-{n:02}" / MANIFEST).write_text("[" * 5000)
    result = advisor("whatif", "runs")
    lines = result.err.splitlines()
    assert result.code == 2 and len(lines) == 22
    assert "and 22 older runs" in lines[-2]
    assert "choose one: advisor whatif runs/2026-11-21_b" in lines[-1]


def test_traces_beside_runs_are_read(project: Path) -> None:
    assert advisor.open("runs/2026-11-20_a").ranks == [0]
    with pytest.raises(
        advisor.AdvisorError, match=r"2 runs in it; give one, such as runs.2026-11-21"
    ):
        advisor.open("runs")
    (project / "runs/2026-11-20_a/rank0/trace_w0.json.gz").rename(project / "runs/mine.json.gz")
    assert any(
        str(t.meta.path).endswith("mine.json.gz") for t in advisor.open("runs").traces.values()
    )
