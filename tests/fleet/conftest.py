"""Reports of jobs, whose figures are known because they were written down here."""

from __future__ import annotations

import random

import pytest

from advisor.fleet.report import (
    Alike,
    JobFinding,
    JobReport,
    Missing,
    Odd,
    Row,
    Spread,
    WhatIf,
)

NASTY = "<img src=x onerror=\"window.hit=1\">"  # fmt: skip
CLASSES = ["compute", "communication", "copies", "idle"]


def job(ranks: int = 512, *, nasty: str = "", slow: int = 7) -> JobReport:
    """A job of like ranks on hosts of eight, of which one computes 20 % longer; steps some 100 ms.
    ``nasty`` stands in all names."""
    draw = random.Random(1)
    rows = []
    for rank in range(ranks):
        compute = 60e6 * (1.2 if rank == slow else 1.0) * draw.uniform(0.995, 1.005)
        step = max(98e6, min(102e6, draw.gauss(100e6, 0.6e6)))
        copies = 2e6 * draw.uniform(0.9, 1.1)
        waits = max(0.0, 30e6 - (compute - 60e6))
        values = [compute, waits, copies, max(0.0, step - compute - waits - copies)]
        host = f"node-{rank // 8:03}{nasty}"
        rows.append(Row(rank, host, f"/runs/job{nasty}/rank{rank}.json.gz", step, values))
    middle = dict(zip(CLASSES, [60e6, 30e6, 2e6, 8e6], strict=True))
    slower = dict(zip(CLASSES, [72e6, 18e6, 2e6, 8e6], strict=True))
    return JobReport(
        version="1.0",
        source=f"/runs/job{nasty}",
        verdict=f"Rank {slow} computes 20% slower and the others wait for it{nasty}",
        world=ranks + 2,
        read=ranks,
        missing=[
            Missing(ranks=f"{ranks}-{ranks + 1}", count=2, why=f"access denied{nasty}", path=nasty)
        ],
        device=f"NVIDIA H100{nasty}",
        hosts=-(-ranks // 8),
        step=Spread(least=98e6, low=99.2e6, median=100e6, high=100.8e6, most=102e6),
        classes=[*CLASSES],
        alike=[
            Alike(
                name=f"most{nasty}",
                ranks=f"0-{slow - 1}, {slow + 1}-{ranks - 1}",
                count=ranks - 1,
                step_ns=100e6,
                time=middle,
            ),
            Alike(name="computes longer", ranks=str(slow), count=1, step_ns=100e6, time=slower),
        ],
        odd=[
            Odd(
                what="rank",
                name=str(slow),
                ranks=str(slow),
                kind="compute",
                moves=False,
                waited_ns=11.5e6,
                last_share=0.97,
                sure=0.9999,
                why=f"72 ms of compute where the median rank has 60 ms{nasty}",
            ),
            Odd(
                what="host",
                name=f"node-003{nasty}",
                ranks="24-31",
                kind="network",
                moves=True,
                sure=0.95,
            ),
        ],
        findings=[
            JobFinding(
                rule="slow-rank",
                title=f"Rank {slow} is slower than the others{nasty}",
                summary=f"All ranks wait 11.5 ms a step for it.{nasty}",
                fix=f"Drain its node.{nasty}",
                severity="warning",
                ranks=str(slow),
                count=1,
                gain_ns=11.5e6,
                low_ns=11e6,
                high_ns=12e6,
                place=f"train.py:12{nasty}",
                verify=f"Profile again.{nasty}",
            )
        ],
        what_if=[
            WhatIf(
                text=f"rank {slow} as fast as the median{nasty}",
                gain_ns=11.5e6,
                low_ns=11e6,
                high_ns=12e6,
            )
        ],
        rows=rows,
        aligned=ranks,
        error_ns=20e3,
        not_checked={f"a rule{nasty}": f"nothing of it was recorded{nasty}"},
        bytes_read=ranks * 20_000_000,
        seconds=120.0,
    )


@pytest.fixture
def make_job() -> object:
    """:func:`job`."""
    return job
