"""Reports of jobs, whose figures are known because they were written down here."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from advisor.advise.engine import Options, analyze
from advisor.core.ranks import (
    MissingRanks,
    Outlier,
    RankCluster,
    RankLine,
    Ranks,
    RanksWhatIf,
    StepSpread,
)
from advisor.core.report import Report
from advisor.read import ReadOptions
from advisor.testing import TraceBuilder

NASTY = "<img src=x onerror=\"window.hit=1\">"  # fmt: skip
CLASSES = ["compute", "communication", "copies", "idle"]


def job(ranks: int = 512, *, nasty: str = "", slow: int = 7) -> Ranks:
    """Equal ranks on hosts of eight, of which one computes 20% longer; steps some 100 ms.
    ``nasty`` stands in all names."""
    draw = random.Random(1)
    lines = []
    for rank in range(ranks):
        compute = 60e6 * (1.2 if rank == slow else 1.0) * draw.uniform(0.995, 1.005)
        step = max(98e6, min(102e6, draw.gauss(100e6, 0.6e6)))
        copies = 2e6 * draw.uniform(0.9, 1.1)
        waits = max(0.0, 30e6 - (compute - 60e6))
        values = [compute, waits, copies, max(0.0, step - compute - waits - copies)]
        host = f"node-{rank // 8:03}{nasty}"
        lines.append(line(rank, step, values, host, f"/runs/job{nasty}/rank{rank}.json.gz"))
    middle = dict(zip(CLASSES, [60e6, 30e6, 2e6, 8e6], strict=True))
    slower = dict(zip(CLASSES, [72e6, 18e6, 2e6, 8e6], strict=True))
    missing = MissingRanks(
        ranks=f"{ranks}-{ranks + 1}", count=2, why=f"access denied{nasty}", path=nasty
    )
    changes = RanksWhatIf(
        text=f"rank {slow} as fast as the median{nasty}", gain_ns=11.5e6, low_ns=11e6, high_ns=12e6
    )
    return Ranks(
        lines=lines,
        aligned=True,
        alignment_error_ns=20e3,
        note=f"Ranks put on one clock.{nasty}",
        world=ranks + 2,
        missing=[missing],
        hosts=-(-ranks // 8),
        step=StepSpread(min=98e6, low=99.2e6, median=100e6, high=100.8e6, max=102e6),
        classes=[*CLASSES],
        clusters=[
            RankCluster(
                name=f"most{nasty}",
                ranks=f"0-{slow - 1}, {slow + 1}-{ranks - 1}",
                count=ranks - 1,
                step_ns=100e6,
                time=middle,
            ),
            RankCluster(
                name="computes longer", ranks=str(slow), count=1, step_ns=100e6, time=slower
            ),
        ],
        outliers=[
            Outlier(
                unit="rank",
                name=str(slow),
                ranks=str(slow),
                kind="compute",
                moves=False,
                excess_ns=12e6,
                waited_ns=11.5e6,
                last_share=0.97,
                significance=0.9999,
                reason=f"72 ms of compute where the median rank has 60 ms{nasty}",
            ),
            Outlier(
                unit="host",
                name=f"node-003{nasty}",
                ranks="24-31",
                kind="network",
                moves=True,
                excess_ns=3e6,
                significance=0.95,
            ),
        ],
        what_if=[changes],
        not_checked={f"a rule{nasty}": f"nothing of it was recorded{nasty}"},
    )


def line(
    rank: int, step_ns: float, values: list[float | None], host: str = "", path: str = ""
) -> RankLine:
    """A rank whose classes took these times."""
    return RankLine(
        rank=rank,
        step_ns=step_ns,
        busy_share=None,
        communication_ns=None,
        idle_ns=None,
        host=host,
        path=path,
        time=values,
    )


@pytest.fixture
def make_job() -> Callable[..., Ranks]:
    """Return :func:`job`."""
    return job


@pytest.fixture
def make_line() -> Callable[..., RankLine]:
    """Return :func:`line`."""
    return line


@pytest.fixture
def hostile_name() -> str:
    """A name that is markup to whoever does not escape it."""
    return NASTY


RULE = """
import os, signal, time
from pathlib import Path
from typing import Any
from advisor.core.rule import Rule

HERE = Path(__file__).parent


class Trap(Rule):
    '''Kills its process or waits in it where a file beside it says so.'''

    id = "trap"
    category = "host"

    def check(self, a):
        name = Path(a.trace.meta.path).name
        if (HERE / f"{name}.always").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        once = HERE / f"{name}.once"
        if once.exists():
            once.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        if (HERE / f"{name}.waits").exists():
            time.sleep(600)
        return iter(())
"""
"""A rule of somebody's own, which runs where ranks are measured."""


@dataclass
class JobFolder:
    """Traces of a job in a folder, and a folder of rules with faults injected into them."""

    folder: Path
    rules: Path
    ranks: int

    def inject_worker_fault(self, rank: int, kind: str) -> None:
        """Kill (``once``, ``always``) or stall (``waits``) the worker that measures a rank."""
        (self.rules / f"rank{rank}.json.{kind}").touch()

    def analyze(self, ranks: str = "", **options: Any) -> Report:
        """Analyze the job with the injected faults."""
        read = ReadOptions(ranks=ranks)
        chosen = Options(rules_folder=self.rules, config={}, read=read, **options)
        return analyze(self.folder, chosen)


@pytest.fixture
def job_folder(tmp_path: Path) -> JobFolder:
    """Six ranks of two steps; rank n computes n µs longer."""
    folder_of_job = JobFolder(tmp_path / "job", tmp_path / "traps", 6)
    folder_of_job.folder.mkdir()
    folder_of_job.rules.mkdir()
    (folder_of_job.rules / "trap.py").write_text(RULE)
    for rank in range(folder_of_job.ranks):
        b = TraceBuilder()
        for _ in range(2):
            with b.step(), b.op("aten::mm", [[512, 512], [512, 512]], "float"):
                b.launch("ampere_sgemm_128x64_nn", 900 + rank)
                b.sync()
        b.write(folder_of_job.folder / f"rank{rank}.json")
    return folder_of_job
