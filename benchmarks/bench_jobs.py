"""Diagnoses of simulated jobs, compared with what is wrong with them.

    python -m benchmarks.bench_jobs                       # 200 jobs with a fault, 100 without
    python -m benchmarks.bench_jobs --write docs/ranks-accuracy.md
    python -m benchmarks.bench_jobs --ranks 512 --job out.json    # one job's ranks
    python -m benchmarks.bench_jobs --calibrate                   # the shipped ledger

The figures that are written are of seeds from 1,000,000 on, on which nothing was developed.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec

from advisor.replay.ledger import (
    JOB_COVERAGE,
    SHIPPED,
    Prediction,
    fault_kind,
    shipped_predictions,
)
from advisor.replay.ranks.rank_comparison import compare_ranks
from benchmarks.shipped_ledger import replace
from benchmarks.simulation.jobs import FAULTS, HEALTHY, FaultTruth
from benchmarks.simulation.programs import MIN_FAULT_SHARE, play
from benchmarks.simulation.score import KIND, Score, judge
from benchmarks.simulation.summaries import summarize_all

CALIBRATED = 2_000
"""First seed of the jobs that ranges come from; below 10,000 too."""
EACH = 14
"""Jobs of each fault, likewise."""
REPORTED = 1_000_000
"""First seed of what is reported; development was on seeds below 10,000."""
MESHES = "\n## Another device mesh\n"


class Case(NamedTuple):
    """A job and its diagnosis."""

    seed: int
    layout: str
    truth: FaultTruth
    score: Score
    play_s: float
    summarize_s: float
    diagnose_s: float
    bytes: int


def one(seed: int, ranks: int, kind: str | None) -> Case:
    """Simulate, sum up, diagnose, judge."""
    begin = time.perf_counter()
    played, truth = play(seed, ranks, kind)
    played_at = time.perf_counter()
    summaries, unread = summarize_all(played)
    summarized_at = time.perf_counter()
    comparison = compare_ranks(summaries, unread)
    assert comparison is not None
    ranks_found = comparison.ranks
    diagnosed_at = time.perf_counter()
    layout = played.job.layout
    score = judge(ranks_found, truth, played.job.cut)
    times = played_at - begin, summarized_at - played_at, diagnosed_at - summarized_at
    return Case(seed, layout, truth, score, *times, len(msgspec.json.encode(ranks_found)))


def cases(
    first: int, faulty: int, healthy: int, ranks: int, kind: str | None
) -> Iterator[tuple[int, int, str | None]]:
    """Arguments of :func:`one`: faults in turn, so that each kind is there as often."""
    for number in range(faulty):
        yield first + number, ranks, kind or FAULTS[number % len(FAULTS)]
    for number in range(healthy):
        yield first + 500_000 + number, ranks, HEALTHY


def table(results: list[Case], ranks: int) -> str:
    """The results, as Markdown."""
    lines = [
        "| fault | jobs | kind right | kind and who right | others blamed | predicted ÷ true gain "
        "| true gain in the range | width of the range ÷ gain |",
        "|---|---|---|---|---|---|---|---|",
    ]
    by_kind: dict[str, list[Case]] = defaultdict(list)
    for case in results:
        by_kind[case.truth.kind].append(case)
    faulty = [case for case in results if case.truth.kind != HEALTHY]
    order = [name for name in FAULTS if name in by_kind]
    for name, cases_of in [*((n, by_kind[n]) for n in order), ("**all faults**", faulty)]:
        if not cases_of:
            continue
        count = len(cases_of)
        scores = [case.score for case in cases_of]
        ratios = [
            case.score.gain_ns / case.truth.gain_ns
            for case in cases_of
            if case.score.gain_ns is not None
        ]
        inside = [score.inside for score in scores if score.inside is not None]
        widths = [score.width for score in scores if score.width is not None]
        lines.append(
            f"| {name.replace('_', ' ')} | {count} | {_share(s.kind for s in scores)} "
            f"| {_share(s.right for s in scores)} | {_share(s.wrong_blames > 0 for s in scores)} "
            f"| {f'{statistics.median(ratios):.2f}' if ratios else 'no estimate'} "
            f"| {_share(inside) if inside else 'no range'} "
            f"| {f'{statistics.median(widths):.2f}' if widths else 'no range'} |"
        )
    healthy = by_kind.get(HEALTHY, [])
    if healthy:
        alarms = sum(not case.score.right for case in healthy)
        lines += ["", f"False alarms on jobs without a fault: {alarms} of {len(healthy)}."]
    read = statistics.mean(case.diagnose_s for case in results)
    lines.append(
        f"\nA diagnosis of {ranks} ranks took {read:.2f} s on average "
        f"({platform.machine()}, Python {platform.python_version()}), "
        f"without reading files."
    )
    return "\n".join(lines)


def predictions(results: list[Case], ranks: int) -> list[Prediction]:
    """Lines of the shipped ledger, ns: of each fault that was found."""
    return [
        Prediction(
            source="job",
            program=f"seed {case.seed}, {ranks} ranks",
            kind=fault_kind(KIND[case.truth.kind], moves=case.truth.moves),
            change=f"without {case.truth.kind.replace('_', ' ')}",
            unit="ns",
            predicted=round(case.score.gain_ns),
            measured=round(case.truth.gain_ns),
        )
        for case in results
        if case.score.gain_ns
    ]


def _share(values: Iterator[bool] | list[bool]) -> str:
    every = list(values)
    return f"{sum(every)} ({sum(every) / len(every):.0%})"


def seeds() -> str:
    """Seeds of the jobs that the ranges come from."""
    jobs = [row.program for row in shipped_predictions() if row.source == "job"]
    return f"{jobs[0]} to {jobs[-1]}"


def page(text: str, arguments: argparse.Namespace) -> str:
    """docs/ranks-accuracy.md."""
    kinds = "\n".join(f"| {fault.replace('_', ' ')} | {KIND[fault]} |" for fault in FAULTS)
    return f"""# Accuracy of job diagnoses

After this page you know how often `advisor` finds the right cause and the right ranks in a job.

A job of many ranks is diagnosed from each rank's measurements. Whether a diagnosis is right can
only be said where the truth is known, so jobs are simulated. `benchmarks/simulation/` plays the
hosts, the streams and the collectives of every rank. Kernel lengths, launch times and rates of
collectives are drawn from public traces (`benchmarks/simulation/measured.json` names them).
Kernels vary by 1 to 3%, devices by some 0.4%, clocks by up to 5 ms and 50 ppm. Up to three ranks
are lost or truncated. Layouts: DDP, FSDP, FSDP within hosts, tensor and pipeline
parallel, experts. The same job with the same noise is then played without the fault: the
difference is the true gain. Every fault costs at least {MIN_FAULT_SHARE:.0%} of the step.

A diagnosis is right if it names the kind of the fault first, and exactly its ranks. Ranks with
incomplete files do not count. A slow link can be located only where groups differ: with one
group of all ranks, nothing among the ranks shows where it is. The loss of such groups is still
part of the true gain.

A gain's range is as wide as predictions were off on other jobs ({seeds()}; `--calibrate`), so
that {JOB_COVERAGE:.0%} of true gains should be within it.

{arguments.jobs} jobs with a fault and {arguments.healthy} without, {arguments.ranks} ranks each,
seeds from {arguments.seed:,} on:

{text}

| fault | reported as |
|---|---|
{kinds}

What this does not show: how often such faults are found in real jobs, whose programs are less
regular than ours. Files of simulated jobs give the same numbers (`tests/simulation`).

Again: `python -m benchmarks.bench_jobs --write docs/ranks-accuracy.md`
"""


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--healthy", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--seed", type=int, default=REPORTED)
    parser.add_argument("--kind", choices=(*FAULTS, HEALTHY))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--calibrate", action="store_true", help="write shipped_ledger.jsonl")
    parser.add_argument("--job", type=Path, help="write the ranks of one job as JSON instead")
    parser.add_argument("--files", type=Path, help="write the Kineto files of one job instead")
    parser.add_argument("--verbose", action="store_true", help="a line a job that is not right")
    arguments = parser.parse_args()
    if arguments.job or arguments.files:
        single(arguments)
        return
    if arguments.calibrate:
        arguments.seed, arguments.jobs, arguments.healthy = CALIBRATED, len(FAULTS) * EACH, 0
    job_arguments = list(
        cases(arguments.seed, arguments.jobs, arguments.healthy, arguments.ranks, arguments.kind)
    )
    if arguments.workers > 1:
        with ProcessPoolExecutor(arguments.workers) as pool:
            items = list(pool.map(one, *zip(*job_arguments, strict=True), chunksize=4))
    else:
        items = [one(*each) for each in job_arguments]
    if arguments.verbose:
        for case in items:
            if not case.score.right or case.score.wrong_blames:
                print(describe(case))
    if arguments.calibrate:
        replace(SHIPPED, "job", predictions(items, arguments.ranks))
    text = table(items, arguments.ranks)
    print(text)
    if arguments.write:
        # the section of bench_meshes stays
        old = arguments.write.read_text(encoding="utf-8") if arguments.write.exists() else ""
        _, mark, rest = old.partition(MESHES)
        arguments.write.write_text(page(text, arguments) + mark + rest, encoding="utf-8")


def describe(case: Case) -> str:
    """Describe a job in one line."""
    truth = case.truth
    share, step = truth.gain_ns / truth.step_ns, truth.step_ns / 1e6
    who = f"{truth.unit} {truth.name} ({len(truth.ranks)} ranks)"
    return (
        f"seed {case.seed} {case.layout}: {truth.kind} {who}, {share:.0%} of {step:.1f} ms; "
        f"reported: {case.score.reported or 'nothing'}"
    )


def single(arguments: argparse.Namespace) -> None:
    """Run a single job: write its report, or its files."""
    played, truth = play(arguments.seed, arguments.ranks, arguments.kind)
    print(truth)
    if arguments.files:
        from benchmarks.simulation.kineto import write

        print(len(write(played, arguments.files)), "files")
    if arguments.job:
        summaries, unread = summarize_all(played)
        comparison = compare_ranks(summaries, unread)
        assert comparison is not None
        arguments.job.write_bytes(msgspec.json.encode(comparison.ranks))
        print(judge(comparison.ranks, truth, played.job.cut))


if __name__ == "__main__":
    main()
