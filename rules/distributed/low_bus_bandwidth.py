"""Large collectives use less of the link between GPUs than NCCL attains."""

from advisor.core.finding import Edit, Finding, Outcomes, PassedCheck, SkippedCheck
from advisor.core.rule import Evidence, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.comm.links import LARGE_MESSAGE_BYTES, scale_collectives
from advisor.rules.support.citations import CHOSEN, ENGINE_FLOOR, NCCL_OVERHEAD
from advisor.rules.support.common import example_steps
from advisor.testing import Examples, TraceBuilder


class LowBusBandwidth(Rule):
    """Large collectives inside a node are far slower than the link between its GPUs. The path is
    not NVLink, has few channels, or another process uses it.

    Bus bandwidth is defined as in nccl-tests: bytes, times 2 (n - 1) / n for an all-reduce, over
    the kernel's time. This time includes waits for late ranks. These differ from call to call, so a
    slow link shows as messages that all have nearly the same rate; else the rule abstains. The
    fastest is compared with 0.8 of the datasheet's rate of the link, which NCCL attains. Groups
    whose ranks are not known to share a node are left out, as are GPUs whose link is unknown.
    NCCL's log (``NCCL_DEBUG=INFO``) says which ranks share a node, and often why it is slow."""

    id = "low-bus-bandwidth"
    title = "Collectives use little of the link between GPUs"
    alternatives = "network-path"
    references = (
        "https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md",
        "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html",
    )
    sources = (NCCL_OVERHEAD,)

    max_share = Threshold(0.5, "of what NCCL attains of the link", CHOSEN)
    min_agreement = Threshold(0.8, "slowest tenth of the rates over the fastest", CHOSEN)
    min_count = Threshold(6, "large collectives", CHOSEN)
    min_exposed_share = Threshold(0.01, "of the step, exposed communication", ENGINE_FLOOR)

    fix = (
        "Find the path: run with NCCL_DEBUG=INFO and analyze the log with this trace. Then "
        "measure the link alone with all_reduce_perf of nccl-tests. Where it is fast there, ranks "
        "arrive at different times, or compute takes the multiprocessors that NCCL needs."
    )
    code = (
        "export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET,GRAPH,ENV\n"
        "export NCCL_DEBUG_FILE=traces/nccl.%h.%p.log\n"
        "nvidia-smi topo -m > traces/topology.txt\n"
        "all_reduce_perf -b 64M -e 1G -f 2 -g 8"
    )
    verify = "Profile again: the bus bandwidth of large messages is near the attainable rate."
    falsified_by = "all_reduce_perf on the same GPUs with the same bus bandwidth"
    confidence = 0.6

    def check(self, a: Analysis) -> Outcomes:
        if a.device_id is None or a.span_ns == 0:
            return
        scaled = scale_collectives(a, across=False)
        if scaled is None:
            return
        exposed = a.breakdown.communication.total / a.span_ns
        if exposed < self.min_exposed_share:
            return
        share = scaled.measured / scaled.attainable
        if share >= self.max_share:
            yield PassedCheck(
                text=f"large collectives reach {share:.0%} of what NCCL attains of the link"
            )
            return
        if scaled.calls < self.min_count or scaled.agreement < self.min_agreement:
            yield SkippedCheck(
                what="whether the link between GPUs is slow",
                why="waits for other ranks and a slow link look the same here",
                record="the traces of all ranks, or NCCL's log next to the trace",
            )
            return
        yield Finding(
            summary=(
                f"The fastest of the collectives of {LARGE_MESSAGE_BYTES >> 20} MiB and more "
                f"reaches {scaled.measured:.0f} GB/s of bus bandwidth, {share:.0%} of the "
                f"{scaled.attainable:.0f} GB/s that NCCL attains of the link."
            ),
            evidence=[
                Evidence("measured bus bandwidth", scaled.measured * 1e9, "bytes/s"),
                Evidence("attainable bus bandwidth", scaled.attainable * 1e9, "bytes/s"),
                self.compare("measured share of the attainable bus bandwidth", share, "max_share"),
                self.compare(
                    "slowest tenth of the rates over the fastest", scaled.agreement, "min_agreement"
                ),
            ],
            edits=[
                Edit(
                    op="scale",
                    select=scaled.select,
                    factor=scaled.factor,
                    worst_factor=(1 + scaled.factor) / 2,
                )
            ],
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "an eighth of NVLink": _build_all_reduce(30.0),
            "most of NVLink": (_build_all_reduce(200.0), "max_share"),
            "waits that differ": (_build_all_reduce(30.0, wait=40_000), "min_agreement"),
            "nodes unknown": (_build_all_reduce(30.0, node=None), "scaled is None"),
            "small messages": (_build_all_reduce(30.0, size=1 << 20), "scaled is None"),
        }


def _build_all_reduce(
    gb_per_s: float, node: int | None = 8, size: int = 256 << 20, wait: float = 0.0
) -> TraceBuilder:
    """Build steps with an exposed all-reduce of 8 ranks at this bus bandwidth."""
    from advisor.core.auxiliary_inputs import NetworkLog

    us = size * 2 * 7 / 8 / gb_per_s / 1e3

    def body(b: TraceBuilder) -> None:
        b.run("aten::mm", "ampere_bf16_s16816gemm_bf16_128x128", 3000)
        for late in (0.0, wait):
            b.collective("allreduce", size, us + late, group_size=8, wait=True)

    b = example_steps(body)
    if node is not None:
        b.logs["network"] = NetworkLog(files=1, hosts=1, ranks=8, node_ranks=node)
    return b
