"""The process runs on the other socket than its GPU."""

from __future__ import annotations

from collections.abc import Iterator

from advisor.core.finding import Evidence, Finding, Outcome, Rule
from advisor.measure import Analysis
from advisor.rules.recorded import measure_it, record
from advisor.testing import TraceBuilder


class NumaMismatch(Rule):
    """The CPUs that the process is pinned to belong to another NUMA node than its GPU: launches and
    copies cross the link between the sockets, and pinned host memory lies on the far side.

    Read from the process's affinity and the PCI device's node. A process that may run on several
    nodes is left alone: where it really runs is the scheduler's choice. Virtual machines often hide
    the nodes; then nothing is known.
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

    verify = "Record again: the nodes are the same; copies to the device are faster."
    falsified_by = "the same copy bandwidth from both nodes"
    confidence = 0.9

    fix = "Pin the process, and its memory, to node {node}."
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
                f"The process may run on the CPUs of node {cpus} only; its GPU hangs on node "
                f"{gpu}. Every launch and every copy crosses the link between them."
            ),
            evidence=[
                Evidence("NUMA node of the GPU", gpu),
                Evidence("NUMA nodes of the process", cpus),
                Evidence("CPUs of the process", recorded.record.rank.cpus, "count"),
            ],
            impact=measure_it("how much slower the far side is, only a copy from each side shows"),
            fix=self.fix.format(node=gpu),
            code=self.code.format(node=gpu),
        )

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """Pinned to node 0, the GPU on node 1."""
        return {"the other socket": _run(1, [0])}

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """The same node; not pinned; the machine does not tell."""
        return {
            "the same node": (_run(1, [1]), "gpu in own"),
            "not pinned": (_run(1, [0, 1]), "gpu in own"),
            "a machine that does not tell": (_run(None, [0]), "not isinstance(gpu, int)"),
        }


def _run(gpu: int | None, cpus: list[int]) -> TraceBuilder:
    b = TraceBuilder()
    flags = {"numa_node_cpus": cpus, "numa_nodes": 2}
    b.record_of_run(flags=flags if gpu is None else {**flags, "numa_node_gpu": gpu}).steps(10, 10)
    return b
