"""One answer for a folder of ranks, by whichever door it is asked: two ways of the command, Python,
the tools of an agent, the dashboard. And it is the right one, where the truth is known."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from advisor.advise.engine import Options, analyze
from advisor.core.report import Report
from advisor.dashboard.session import DashboardSession
from benchmarks.simulation import kineto
from benchmarks.simulation.programs import play, simulate

Run = Callable[..., tuple[int, str, str]]
ALONE = {"config": {}}


def gains(report: Report) -> list[Any]:
    """What is found and what it gains, in order."""
    return [(f.rule, f.title, f.impact, f.priority) for f in (*report.findings, *report.notes)]


def doors(folder: Path, advisor: Run) -> dict[str, list[Any]]:
    """The answers."""
    found = {"Python": gains(analyze(folder, Options(config={})))}
    for name, more in (("command", ()), ("--workers", ("--workers", 2))):
        code, shown, err = advisor("analyze", folder, "--format", "json", *more)
        assert (code, err) == (0, "")
        found[name] = gains(Report.from_json(shown))
    entry = DashboardSession([str(folder)], Options(config={})).load().entries[0]
    assert entry.report is not None
    found["dashboard"] = gains(entry.report)
    pytest.importorskip("mcp", reason="the mcp extra is not installed")
    from advisor.mcp.answers import AllowedFolders
    from advisor.mcp.tools import Tools

    found["agent"] = gains(Tools(AllowedFolders([folder]))._examined(str(folder), None).report)
    return found


def test_the_public_job_gets_one_answer(shared_file: Callable[[str], str], advisor: Run) -> None:
    folder = Path(shared_file("dlrm_8ranks/worker0.pt.trace.json.gz")).parent
    found = doors(folder, advisor)
    assert len({json.dumps(each, default=str) for each in found.values()}) == 1, found


@pytest.mark.parametrize(
    "ranks", [*(pytest.param(n, marks=pytest.mark.thorough) for n in (12, 16, 64)), 17]
)
def test_a_slow_gpu_is_named_with_its_gain_at_every_door(
    tmp_path: Path, advisor: Run, ranks: int
) -> None:
    played, truth = play(0, ranks, "slow_device", steps=3)
    played = simulate(replace(played.job, lost=(), cut=()))
    kineto.write(played, tmp_path)
    found = doors(tmp_path, advisor)
    assert len({json.dumps(each, default=str) for each in found.values()}) == 1, found
    rule, title, impact, _ = found["Python"][0]
    # with few kernels of 20 instances the rank is named, and its device left open
    assert rule in ("slow-device", "straggler-rank")
    assert f"rank {truth.ranks[0]} " in title.lower()
    assert impact.gain_ns == pytest.approx(truth.gain_ns, rel=0.1)
