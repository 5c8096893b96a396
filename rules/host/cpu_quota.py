"""The container's CPU quota stops the process."""

from __future__ import annotations

from collections.abc import Iterator

from advisor.core import text as t
from advisor.core.finding import Evidence, Finding, Outcome, Rule, Source, Threshold
from advisor.measure import Analysis
from advisor.rules.recorded import measure_it, record
from advisor.rules.sources import ENGINE_FLOOR
from advisor.testing import TraceBuilder


class CpuQuota(Rule):
    """The container may use so much CPU time a period (100 ms as a rule); once that is spent, the
    kernel stops every thread of it, the training loop and the launching of kernels included, until
    the next period. Short bursts, as of DataLoader workers, use it up although the average is low.

    The kernel counts for how long threads were stopped (``cpu.stat``), summed over CPUs: it is
    compared with the time the run took, from 1 % on.
    """

    id = "cpu-quota"
    title = "The container's CPU quota stops the process"
    category = "host"
    reads_record = True
    sources = (
        Source(
            "kernel documentation: a period of 100 ms",
            "https://docs.kernel.org/scheduler/sched-bwc.html",
        ),
    )
    references = ("https://docs.kernel.org/scheduler/sched-bwc.html",)

    min_share = Threshold(0.01, "throttled time over the run's time", ENGINE_FLOOR)

    fix = (
        "Give the container more CPU time, or none that is limited; until then start fewer "
        "DataLoader workers and threads than the quota allows."
    )
    code = "# Kubernetes: resources.limits.cpu; Docker: --cpus; Slurm: --cpus-per-task"
    verify = "Record again: the counter stands still."
    falsified_by = "the same median step without a quota"
    confidence = 0.8

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Compare the kernel's counter with the run's time."""
        recorded = record(a)
        told = [(at, host) for at, host in recorded.hosts if host.throttled is not None]
        if len(told) < 2 or told[-1][0] <= told[0][0]:
            return
        stopped = 1e3 * ((told[-1][1].throttled or 0) - (told[0][1].throttled or 0))
        time = float(told[-1][0] - told[0][0])
        if stopped < self.min_share * time:
            return
        periods = (told[-1][1].throttled_periods or 0) - (told[0][1].throttled_periods or 0)
        yield Finding(
            summary=(
                f"In {t.format_duration(time)} the kernel stopped threads of this container for "
                f"{t.format_duration(stopped)} in {periods} periods, because its quota of CPU "
                "time was "
                "spent."
            ),
            evidence=[
                Evidence("threads stopped", stopped, "ns"),
                Evidence("over the run's time", stopped / time, "share", *self.limit("min_share")),
                Evidence("periods", periods, "count"),
                Evidence("CPUs that the quota allows", recorded.record.rank.cpus, "count"),
            ],
            impact=measure_it("which steps it held up is not in the record"),
        )

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """A tenth of the time."""
        return {"a tenth of the time": _run(0.1)}

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """Never stopped; hardly; not told."""
        return {
            "never": (_run(0.0), "stopped < self.min_share * time"),
            "hardly ever": (_run(0.001), "min_share"),
            "not told": (_run(None), "len(told) < 2"),
        }


def _run(share: float | None) -> TraceBuilder:
    from advisor.core.run_directory import Host

    b = TraceBuilder()
    r = b.record_of_run(cpus=4)
    r.steps(100, 10)
    us = 100 * 10_000

    def host(passed: float) -> Host:
        if share is None:
            return Host()
        return Host(throttled=round(passed * share * us), throttled_periods=round(passed * 10))

    r.watch(host=host)
    return b
