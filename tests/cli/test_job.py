"""``advisor analyze`` of jobs of many ranks: when it is one, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import typer

from advisor.advise.ranks.job import MANY, Done
from advisor.cli.job import exit_if_hit, say_done
from advisor.cli.output import Progress
from advisor.measure.ranks.job_report import JobFinding, JobReport
from advisor.testing import TraceBuilder

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ranks(tmp_path: Path) -> Callable[[int], Path]:
    """A folder of so many ranks, each waiting for its loader."""

    def make(count: int) -> Path:
        folder = tmp_path / "job"
        folder.mkdir()
        b = TraceBuilder()
        for _ in range(4):
            with b.step():
                b.loader_wait(10_000, workers=0)
                with b.op("aten::mm", [[512, 512], [512, 512]], "float"):
                    b.launch("ampere_sgemm_128x64_nn", 900)
                b.sync()
        first = b.write(folder / "rank0.json")
        for rank in range(1, count):
            (folder / f"rank{rank}.json").write_bytes(first.read_bytes())
        return folder

    return make


def test_a_few_ranks_are_compared_in_full_unless_they_are_asked_for_one_by_one(
    advisor: Run, ranks: Callable[[int], Path]
) -> None:
    folder = ranks(3)
    code, shown, err = advisor("analyze", folder, "--format", "json")
    assert (code, err) == (0, "")
    assert json.loads(shown)["schema"] != "advisor.job/1"
    code, shown, err = advisor("analyze", folder, "--workers", 2, "--format", "json")
    assert (code, err) == (0, "")
    found = json.loads(shown)
    assert found["schema"] == "advisor.job/1"
    assert [row[0] for row in found["rows"]] == [0, 1, 2]
    code, shown, _ = advisor("analyze", folder, "--ranks", "0,2", "--format", "json")
    assert code == 0
    assert [row[0] for row in json.loads(shown)["rows"]] == [0, 2]


def test_many_ranks_are_a_job_by_themselves_and_one_of_them_is_not(
    advisor: Run, ranks: Callable[[int], Path], tmp_path: Path
) -> None:
    folder = ranks(MANY + 1)
    out = tmp_path / "job.html"
    code, shown, err = advisor("analyze", folder, "--output", out)
    assert (code, shown, err) == (0, "", "")
    assert f"{MANY + 1} ranks read" in out.read_text()
    code, shown, err = advisor("analyze", folder / "rank3.json", "--format", "json")
    assert (code, err) == (0, "")
    assert json.loads(shown)["schema"] != "advisor.job/1"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["--workers", "2", "--cluster", "tcp://127.0.0.1:1"], "choose one"),
        (["--workers", "2", "--rank", "1"], "--rank is of one rank and --workers of many"),
        (["--ranks", "0-1", "--csv", "tables"], "--csv is of one rank and --ranks of many"),
        (["--ranks", "7"], "--ranks 7: no trace of these"),
        (["--ranks", "2-1"], "give ranks and ranges"),
        (["--workers", "2", "--format", "sarif"], "cannot be written as sarif"),
        (["--workers", "0"], "--workers"),
    ],
)
def test_what_does_not_go_together_is_one_line(
    advisor: Run, ranks: Callable[[int], Path], given: list[str], why: str
) -> None:
    code, out, err = advisor("analyze", ranks(2), *given)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert why in err


def test_a_job_is_told_without_private_names_where_that_is_wanted(
    advisor: Run, tmp_path: Path, ranks: Callable[[int], Path]
) -> None:
    folder = ranks(2)
    secret = tmp_path / "gpu-tarrasque-17"
    folder.rename(secret)
    code, shown, _ = advisor("analyze", secret, "--workers", 1, "--format", "json")
    assert code == 0
    assert "tarrasque" in shown
    code, shown, _ = advisor("analyze", secret, "--workers", 1, "--redact", "--format", "json")
    assert code == 0
    assert "tarrasque" not in shown


@pytest.mark.parametrize(
    ("severity", "level", "code"),
    [
        ("critical", "critical", 1),
        ("warning", "critical", 0),
        ("warning", "warning", 1),
        ("info", "warning", 0),
        ("critical", None, 0),
    ],
)
def test_findings_of_a_job_fail_as_those_of_a_rank_do(severity: str, level: Any, code: int) -> None:
    finding = JobFinding(rule="r", title="", summary="", severity=severity)
    try:
        exit_if_hit(JobReport(findings=[finding]), level)
        found = 0
    except typer.Exit as left:
        found = left.exit_code
    assert found == code


def test_the_bar_tells_how_many_ranks_are_done_of_how_many() -> None:
    said: list[str] = []
    shown = cast("Progress", SimpleNamespace(say=said.append))
    for done in (Done(total=6), Done(total=6, read=2, unread=1), Done(total=6, read=5, unread=1)):
        say_done(shown, done)
    assert said == [
        f"[{'.' * 24}] 0 of 6 ranks",
        f"[{'#' * 12}{'.' * 12}] 3 of 6 ranks, 1 not read",
        "comparing the ranks",
    ]


WAITING = """
import time
from advisor.core.finding import Rule


class Waits(Rule):
    '''Never ends.'''

    id = "waits"
    category = "host"

    def check(self, a):
        time.sleep(600)
        return iter(())
"""


def test_ctrl_c_ends_the_command_and_the_processes_that_it_started(
    tmp_path: Path, ranks: Callable[[int], Path]
) -> None:
    psutil = pytest.importorskip("psutil")
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "waits.py").write_text(WAITING)
    command = [sys.executable, "-m", "advisor", "analyze", str(ranks(2)), "--workers", "2"]
    started = subprocess.Popen(
        [*command, "--rules", str(tmp_path / "rules")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 120
        children: list[Any] = []
        while len(children) < 2 and time.monotonic() < deadline:
            children = psutil.Process(started.pid).children()
            time.sleep(0.05)
        assert len(children) == 2
        os.killpg(started.pid, signal.SIGINT)  # as a terminal does
        assert started.wait(120) == 130
        _, alive = psutil.wait_procs(children, timeout=60)
        assert alive == []
    finally:
        started.kill()
        started.communicate()
