"""Rules about the device mesh against simulated jobs with planted faults: how often the range of a
gain contains what the cured job is faster by, and whether the cured job is left alone.

    python -m benchmarks.bench_mesh_rules [--jobs 20]
"""

from __future__ import annotations

import argparse
import tempfile
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import advisor
from advisor.advise.options import Options
from advisor.core.finding import Finding
from advisor.core.report import Report
from benchmarks.simulation.engine import SimulatedRun
from benchmarks.simulation.jobs import RANKS_PER_HOST
from benchmarks.simulation.kineto import trace
from benchmarks.simulation.planted import FAULTS, PlantedFault, draw_planted
from benchmarks.simulation.programs import simulate


class Outcome(NamedTuple):
    """The result for a planted fault. Times are ns per step; ``None``: nothing was found."""

    truth: float
    step: float
    gain: float | None
    low: float
    high: float
    cured: bool
    """Nothing is found in the cured job."""

    @property
    def covered(self) -> bool:
        """The range contains the truth."""
        return self.gain is not None and self.low <= self.truth <= self.high


def judge(rule: str, planted: PlantedFault, folder: Path) -> Outcome:
    """The first rank of the faulty job and of the cured one, analysed."""
    faulty, cured = simulate(planted.faulty), simulate(planted.cured)
    result = find(rule, faulty, planted.network, folder)
    impact = None if result is None else result.impact
    known = impact is not None and impact.gain_ns is not None
    return Outcome(
        truth=faulty.step_ns - cured.step_ns,
        step=faulty.step_ns,
        gain=float(impact.gain_ns or 0) if impact is not None and known else None,
        low=0.0 if impact is None else float(impact.low_ns or 0),
        high=0.0 if impact is None else float(impact.high_ns or 0),
        cured=find(rule, cured, planted.network, folder) is None,
    )


def find(rule: str, played: SimulatedRun, network: float | None, folder: Path) -> Finding | None:
    """Find what a rule finds on the first rank of a job."""
    report = report_of_first_rank(played, network, folder)
    return next((each for each in report.findings if each.rule == rule), None)


def report_of_first_rank(played: SimulatedRun, network: float | None, folder: Path) -> Report:
    """Report on the trace of rank 0, which is written into the folder."""
    path = folder / "rank0.json"
    path.write_bytes(trace(played, 0))
    return advisor.analyze(path, Options(node_size=RANKS_PER_HOST, node_bandwidth=network))


def main() -> None:
    """Waits for batches of loaders that are not torch's are recorded, with their kind."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=20)
    jobs = parser.parse_args().jobs
    for rule in FAULTS:
        with tempfile.TemporaryDirectory() as folder:
            outcomes = [
                judge(rule, planted, Path(folder)) for planted in islice(draw_planted(rule), jobs)
            ]
        result = [each for each in outcomes if each.gain is not None]
        missed = [each for each in outcomes if each.gain is None and each.truth > 0.05 * each.step]
        wrong = [each for each in result if each.truth <= 0]
        print(
            f"{rule:20} {jobs} jobs: found {len(result)}, missed {len(missed)} that cost 5%; "
            f"range contains the truth in {sum(each.covered for each in result)} of {len(result)}; "
            f"no better without it {len(wrong)}; cured jobs left alone "
            f"{sum(each.cured for each in outcomes)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
