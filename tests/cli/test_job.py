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

from advisor.advise.ranks.job import MAX_RANKS_IN_MEMORY, RanksDone
from advisor.cli.analyze import RankProgress, reaches_severity
from advisor.cli.output import Progress
from advisor.core.finding import Finding
from advisor.core.report import Report
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


def test_ranks_compare_equally_together_and_one_by_one(
    advisor: Run, ranks: Callable[[int], Path]
) -> None:
    folder = ranks(3)
    in_memory_report, worker_report = (
        json.loads(advisor("analyze", folder, *more, "--format", "json")[1])
        for more in ((), ("--workers", 2))
    )
    for field in ("schema", "findings", "notes", "ranks"):
        assert in_memory_report[field] == worker_report[field], field
    assert [line["rank"] for line in worker_report["ranks"]["lines"]] == [0, 1, 2]
    code, out, _ = advisor("analyze", folder, "--ranks", "0,2", "--format", "json")
    assert code == 0
    assert [line["rank"] for line in json.loads(out)["ranks"]["lines"]] == [0, 2]


@pytest.mark.parametrize("more", [[], ["--workers", "2"]])
def test_single_rank_is_shown_with_data_of_all_ranks(
    advisor: Run, ranks: Callable[[int], Path], more: list[str]
) -> None:
    folder = ranks(3)
    first, last = (
        json.loads(advisor("analyze", folder, *more, "--rank", n, "--format", "json")[1])
        for n in (0, 2)
    )
    assert (first["scope"]["rank"], last["scope"]["rank"]) == (0, 2)
    assert first["ranks"] == last["ranks"] and len(last["ranks"]["lines"]) == 3
    gains = [[f["impact"]["gain_ns"] for f in each["findings"]] for each in (first, last)]
    assert gains[0] == gains[1] and gains[0]


def test_ranks_are_selected_without_numbers_in_file_names(advisor: Run, tmp_path: Path) -> None:
    for rank in range(4):
        b = TraceBuilder(rank=rank, world_size=4)
        for _ in range(4):
            with b.step(), b.op("aten::mm"):
                b.launch("gemm", 900)
        b.write(tmp_path / f"host{9 - rank}_4{rank}7.1700000000.pt.trace.json")
    for more in ([], ["--workers", "2"]):
        line = ["analyze", tmp_path, *more, "--ranks", "1-2", "--format", "json"]
        code, out, err = advisor(*line)
        assert (code, err) == (0, "")
        assert [each["rank"] for each in json.loads(out)["ranks"]["lines"]] == [1, 2]
        code, _, err = advisor("analyze", tmp_path, *more, "--ranks", "7")
        assert code == 2 and "--ranks 7: no trace of these" in err and err.count("\n") == 1


def test_many_ranks_are_read_one_by_one_and_one_can_be_selected(
    advisor: Run, ranks: Callable[[int], Path], tmp_path: Path
) -> None:
    folder = ranks(MAX_RANKS_IN_MEMORY + 1)
    out = tmp_path / "job.html"
    code, output, err = advisor("analyze", folder, "--output", out)
    assert (code, output, err) == (0, "", "")
    assert f"rank {MAX_RANKS_IN_MEMORY}" in out.read_text()
    code, output, err = advisor("analyze", folder / "rank3.json", "--format", "json")
    assert (code, err) == (0, "")
    assert json.loads(output)["ranks"] is None


def test_tables_and_sarif_are_of_a_job_too(
    advisor: Run, ranks: Callable[[int], Path], tmp_path: Path
) -> None:
    folder = ranks(2)
    code, _, err = advisor("analyze", folder, "--workers", 1, "--csv", tmp_path / "tables")
    assert code == 0 and "findings.csv" in err
    code, out, _ = advisor("analyze", folder, "--workers", 1, "--format", "sarif")
    assert code == 0 and json.loads(out)["version"] == "2.1.0"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--workers", "2", "--cluster", "tcp://127.0.0.1:1"], "choose one"),
        (["--workers", "2", "--rank", "7"], "--rank 7: not measured (ranks present: 0, 1)"),
        (["--ranks", "7", "--workers", "1"], "--ranks 7: no trace of these"),
        (["--ranks", "2-1"], "give ranks and ranges"),
        (["--workers", "2", "--format", "word"], "word"),
        (["--workers", "0"], "--workers"),
    ],
)
def test_exclusive_options_are_one_line_error(
    advisor: Run, ranks: Callable[[int], Path], arguments: list[str], why: str
) -> None:
    code, out, err = advisor("analyze", ranks(2), *arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert why in err


def test_a_redacted_report_of_a_job_has_no_private_names(
    advisor: Run, tmp_path: Path, ranks: Callable[[int], Path]
) -> None:
    folder = ranks(2)
    secret = tmp_path / "gpu-tarrasque-17"
    folder.rename(secret)
    code, out, _ = advisor("analyze", secret, "--workers", 1, "--format", "json")
    assert code == 0
    assert "tarrasque" in out
    code, out, _ = advisor("analyze", secret, "--workers", 1, "--redact", "--format", "json")
    assert code == 0
    assert "tarrasque" not in out


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
def test_findings_fail_from_a_severity_on(severity: Any, level: Any, code: int) -> None:
    report = cast(
        "Report",
        SimpleNamespace(findings=[Finding(rule="r", summary="", severity=severity)], risks=[]),
    )
    assert int(level is not None and reaches_severity(report, level)) == code


def test_the_bar_tells_how_many_ranks_are_done_of_how_many() -> None:
    messages: list[str] = []
    progress_bar = cast("Progress", SimpleNamespace(show=messages.append))
    for read, unread in ((0, 0), (2, 1), (5, 1)):
        RankProgress(progress_bar)(RanksDone(total=6, read=read, unread=unread))
    assert messages == [
        f"[{'.' * 24}] 0 of 6 ranks",
        f"[{'#' * 12}{'.' * 12}] 3 of 6 ranks, 1 not read",
        "comparing the ranks",
    ]


WAITING = """
import time
from advisor.core.rule import Rule


class Waits(Rule):
    '''Never ends.'''

    id = "waits"
    category = "host"

    def check(self, a):
        time.sleep(600)
        return iter(())
"""


def test_ctrl_c_ends_the_command_and_its_processes(
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
