"""Steps take very different times."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from advisor.core import text as t
from advisor.core.finding import Evidence, Finding, Outcome, Rule, SkippedCheck, Threshold
from advisor.core.run_directory import Host
from advisor.measure import Analysis
from advisor.measure.steps.record import Floats, StepRecords
from advisor.rules.host.stalls import blame, find_stalls
from advisor.rules.recorded import over_the_run, record, steps_seen
from advisor.rules.sources import CHOSEN, GPUPROF
from advisor.testing import TraceBuilder


class StepJitter(Rule):
    """Some steps take at least twice as long as the median, at no regular distances, so that the
    mean step is well above the usual one. In a job of several ranks every rank waits for the
    slowest of each step, so jitter of one costs all.

    Reported where the 99th percentile is at least twice the median (gpuprof) and steps beyond that
    lose 3 % of the time, of a hundred steps or more that count. Where other programs use a quarter
    of the machine's CPUs the rule abstains: they are the likelier cause. Steps whose batch has
    another shape than most are compared among their own: sequences of different lengths are no
    jitter. The summary names the phase that is longer in the long steps, and how much of it is
    garbage collection.
    """

    id = "step-jitter"
    title = "Some steps take much longer than most"
    category = "host"
    reads_record = True
    silent_in = (
        "recorded/anomaly.cured",
        "recorded/gc_pauses.cured",
        "recorded/worker_respawn.cured",
    )
    references = ("https://www.usenix.org/conference/osdi25/presentation/lin-jinkun",)

    min_steps = Threshold(100, "steps that count", CHOSEN)
    min_ratio = Threshold(2.0, "99th percentile over median", GPUPROF)
    min_excess = Threshold(0.03, "of the time, lost in steps beyond that ratio", CHOSEN)
    max_others = Threshold(
        0.25, "of the machine's CPUs: other programs are then the likelier cause", CHOSEN
    )

    fix = (
        "Follow the phase that is longer: 'data' is the loader (a slow sample, a full "
        "disk), 'between steps' the wait for a batch that is no DataLoader's and what the "
        "loop does besides, 'other' the loop's own code or another program on the "
        "machine. Garbage collection can be moved to fixed steps; a longer 'forward' with "
        "new shapes is recompilation or autotuning."
    )
    verify = "Record again: the 99th percentile comes closer to the median."
    falsified_by = "a longer run whose steps are alike"
    confidence = 0.6

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Compare the tail with the median."""
        recorded = record(a)
        if recorded.count < self.min_steps or not recorded.median:
            return
        used = recorded.used
        dur = recorded.dur[used].astype(np.float64)
        expected = _expected(dur, recorded.column("shapes")[used], recorded.column("samples")[used])
        ratio = float(np.quantile(dur / expected, 0.99))
        long = dur > self.min_ratio * expected
        lost = float((dur - expected)[long].sum())
        excess = lost / float(dur.sum())
        stalls = find_stalls(recorded)
        if ratio < self.min_ratio or excess < self.min_excess or stalls.every is not None:
            return
        if len(stalls.rows) < 2:
            return  # one may be chance
        causes = [(name, ns) for name, ns in blame(recorded, stalls)[:3] if ns > 0]
        parts = ", ".join(f"{name} {t.format_duration(ns)}" for name, ns in causes)
        others = _others(recorded)
        if others is not None and others >= self.max_others:
            yield SkippedCheck(
                what="whether steps are uneven by themselves",
                why=f"other programs used {others:.0%} of the machine's CPUs meanwhile",
                record="a run on a machine of one's own",
            )
            return
        yield Finding(
            summary=(
                f"One step in a hundred takes {ratio:.1f} times the usual "
                f"{t.format_duration(recorded.median)} or more; together the long ones lose "
                f"{t.format_duration(lost)}. What is longer in them: {parts or 'not told'}."
            ),
            evidence=[
                Evidence(
                    "99th percentile over the usual step", ratio, "", *self.limit("min_ratio")
                ),
                Evidence(
                    "lost in long steps, of all time", excess, "share", *self.limit("min_excess")
                ),
                Evidence("long steps", len(stalls.rows), "count"),
                Evidence("longest phase in them", causes[0][0] if causes else None),
                Evidence("CPUs used by other programs", others, "share", *self.limit("max_others")),
                steps_seen(recorded),
            ],
            impact=over_the_run(lost, method="what the long steps take beyond the usual one"),
        )

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """Now and then a step of five times the usual length."""
        return {"irregular long steps": _run(lambda n: 50 if n in _LONG else 10)}

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """Even steps; regular ones; longer batches; one step; a short run."""
        return {
            "even steps": (_run(lambda n: 10 + n % 3), "ratio < self.min_ratio"),
            "at regular distances": (
                _run(lambda n: 60 if n % 20 == 19 else 10),
                "stalls.every is not None",
            ),
            "batches of another shape": (
                _run(lambda n: 50 if n in _LONG else 10, shapes=True),
                "ratio < self.min_ratio",
            ),
            "one step": (_run(lambda n: 500 if n == 150 else 10), "ratio < self.min_ratio"),
            "a crowded machine": (
                _run(lambda n: 50 if n in _LONG else 10, machine=99),
                "max_others",
            ),
            "a short run": (_run(lambda n: 50 if n in _LONG else 10, steps=80), "min_steps"),
        }


_LONG = {31, 44, 45, 77, 90, 121, 150, 171, 190, 223}


def _others(recorded: StepRecords) -> float | None:
    """Share of the machine's CPUs that other programs use; ``None``: not sampled."""
    machine, own = recorded.host("cpu"), recorded.host("process_cpu")
    total = recorded.record.rank.cpus_total
    if len(machine) < 3 or len(own) < 3 or not total:
        return None
    return max(0.0, float(machine.mean()) / 100 - float(own.mean()) / 100 / total)


def _expected(dur: Floats, shapes: Floats, samples: Floats) -> Floats:
    """The usual length of each step: the median of those with the same batch shape, where there
    are at least five of them, else of all."""
    expected = np.full(len(dur), float(np.median(dur)))
    kind = np.where(np.isnan(shapes), samples, shapes)
    for value in np.unique(kind[~np.isnan(kind)]):
        same = kind == value
        if same.sum() >= 5:
            expected[same] = float(np.median(dur[same]))
    floor: Floats = np.maximum(expected, 1.0)
    return floor


def _run(
    ms: object, *, shapes: bool = False, steps: int = 300, machine: float = 20
) -> TraceBuilder:
    assert callable(ms)
    b = TraceBuilder()
    r = b.record_of_run(cpus_total=8)
    for n in range(steps):
        length = float(ms(n))
        told = {"shapes": int(length > 20)} if shapes else {}
        r.step(length, forward=5, fields=told)
    r.watch(host=Host(cpu=machine, process_cpu=100))
    return b
