"""Limits of the host that the record's telemetry shows: the CPU quota and NUMA placement."""

from __future__ import annotations

from collections.abc import Iterator

from advisor.core import text as t
from advisor.core.finding import Evidence, Finding, Outcome, Rule, Source, Threshold
from advisor.core.run_directory import Host
from advisor.measure import Analysis
from advisor.rules.recorded import measure_it, record
from advisor.rules.sources import ENGINE_FLOOR
from advisor.testing import TraceBuilder


class CpuQuota(Rule):
    """The container has a quota of CPU time per period (usually 100 ms). Once it is spent, the
    kernel stops every thread of the container until the next period, the training loop and kernel
    launches included. Short bursts, such as those of DataLoader workers, use it up although the
    average is low.

    The kernel counts how long threads were stopped (``cpu.stat``), summed over CPUs. Reported from
    1 % of the run's time on.
    """

    id = "cpu-quota"
    title = "The container's CPU quota throttles the process"
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
        "Raise the container's CPU limit or remove it. Until then, start fewer DataLoader workers "
        "and threads than the quota allows."
    )
    code = "# Kubernetes: resources.limits.cpu; Docker: --cpus; Slurm: --cpus-per-task"
    verify = "Record again: the throttled time does not grow."
    falsified_by = "the same median step without a quota"
    confidence = 0.8

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Compare the kernel's counter with the run's time."""
        recorded = record(a)
        samples = [(ns, host) for ns, host in recorded.hosts if host.throttled is not None]
        if len(samples) < 2 or samples[-1][0] <= samples[0][0]:
            return
        (begin, first), (end, last) = samples[0], samples[-1]
        stopped = 1e3 * ((last.throttled or 0) - (first.throttled or 0))
        time = float(end - begin)
        if stopped < self.min_share * time:
            return
        periods = (last.throttled_periods or 0) - (first.throttled_periods or 0)
        yield Finding(
            summary=(
                "The CPU quota stopped threads of this container for "
                f"{t.format_duration(stopped)} in "
                f"{t.format_duration(time)}, in {periods} periods."
            ),
            evidence=[
                Evidence("threads stopped", stopped, "ns"),
                Evidence("over the run's time", stopped / time, "share", *self.limit("min_share")),
                Evidence("periods", periods, "count"),
                Evidence("CPUs that the quota allows", recorded.record.rank.cpus, "count"),
            ],
            impact=measure_it("the record does not show which steps it delayed"),
        )

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """A tenth of the time."""
        return {"a tenth of the time": _throttled(0.1)}

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """Never stopped; hardly ever; not recorded."""
        return {
            "never": (_throttled(0.0), "stopped < self.min_share * time"),
            "hardly ever": (_throttled(0.001), "min_share"),
            "not recorded": (_throttled(None), "len(samples) < 2"),
        }


class NumaMismatch(Rule):
    """The process is pinned to CPUs of another NUMA node than its GPU. Launches and copies cross
    the link between the sockets, and pinned host memory is on the far side.

    Read from the process's affinity and the PCI device's node. A process that may run on several
    nodes is left alone: the scheduler chooses where it runs. Virtual machines often hide the nodes;
    then nothing is known.
    """

    id = "numa-mismatch"
    title = "The process is pinned to another NUMA node than its GPU"
    category = "host"
    knobs = ("affinity",)
    reads_record = True
    references = (
        "https://docs.nvidia.com/deeplearning/performance/index.html",
        "https://pytorch.org/docs/stable/elastic/numa.html",
    )

    verify = "Record again: the nodes are the same, and copies to the GPU are faster."
    falsified_by = "the same copy bandwidth from both nodes"
    confidence = 0.9

    fix = "Pin the process and its memory to node {node}."
    code = (
        "numactl --cpunodebind={node} --membind={node} python train.py\n"
        "# torchrun (PyTorch 2.8 and later): --numa-binding=node"
    )

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Compare the two nodes."""
        recorded = record(a)
        gpu, own = recorded.flag("numa_node_gpu"), recorded.flag("numa_node_cpus")
        if not isinstance(gpu, int) or not isinstance(own, list) or not own or gpu in own:
            return
        cpus = ", ".join(str(node) for node in own[:8])
        yield Finding(
            summary=(
                f"The process may only run on the CPUs of node {cpus}, but its GPU is attached to "
                f"node {gpu}. Every launch and every copy crosses the link between them."
            ),
            evidence=[
                Evidence("NUMA node of the GPU", gpu),
                Evidence("NUMA nodes of the process", cpus),
                Evidence("CPUs of the process", recorded.record.rank.cpus, "count"),
            ],
            impact=measure_it("only a copy from each node shows how much slower the far one is"),
            fix=self.fix.format(node=gpu),
            code=self.code.format(node=gpu),
        )

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """Pinned to node 0, the GPU on node 1."""
        return {"the other socket": _pinned(1, [0])}

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """The same node; not pinned; a machine that does not report its nodes."""
        return {
            "the same node": (_pinned(1, [1]), "gpu in own"),
            "not pinned": (_pinned(1, [0, 1]), "gpu in own"),
            "nodes not recorded": (_pinned(None, [0]), "not isinstance(gpu, int)"),
        }


def _throttled(share: float | None) -> TraceBuilder:
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


def _pinned(gpu: int | None, cpus: list[int]) -> TraceBuilder:
    b = TraceBuilder()
    flags = {"numa_node_cpus": cpus, "numa_nodes": 2}
    b.record_of_run(flags=flags if gpu is None else {**flags, "numa_node_gpu": gpu}).steps(10, 10)
    return b
