"""Communication that nothing hides: the device waits for the network."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from advisor.analysis import Analysis
from advisor.model import Edit, Evidence, Finding, Good, Location, Outcome, Rule, Select
from advisor.rules.common import counted, duration, of_step, per
from advisor.testing import TraceBuilder


class ExposedCommunication(Rule):
    """Collectives run while no compute kernel does, so the step waits for the network.

    Exposed time is the union of communication kernels minus the union of compute kernels, so
    time under compute costs nothing here, however long the collectives are. A collective also
    waits for the slowest rank inside its kernel: from one rank's trace that wait cannot be told
    from transfer, which is why the finding asks for the traces of all ranks when it is large.
    """

    id = "exposed-communication"
    title = "Communication is not hidden under compute"
    category = "distributed"
    validated = "real traces"
    validated_on = "A100 training, 6 steps (NCCL 19 % exposed); two ranks of 128 (27 % exposed)"
    references = (
        "https://pytorch.org/docs/stable/notes/ddp.html",
        "https://pytorch.org/docs/stable/fsdp.html",
    )

    min_share = 0.05  # of the step; TraceLens flags exposed communication from 5 %
    healthy_overlap = 0.8  # share hidden from which overlap is worth praising

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Compare exposed communication with the step."""
        if a.device_id is None or not a.breakdown.all_communication.total:
            return
        exposed = a.breakdown.communication.total
        total = a.breakdown.all_communication.total
        share = exposed / a.span_ns
        overlap = 1 - exposed / total
        if share < self.min_share:
            if overlap >= self.healthy_overlap:
                yield Good(text=f"{overlap:.0%} of communication runs under compute")
            return
        table = a.collectives
        by_kind = (
            table.group_by("collective")
            .agg(pl.col("exposed").sum(), pl.len())
            .sort("exposed", descending=True)
        )
        kinds = [
            f"{kind} {duration(ns / a.step_count)} in "
            f"{counted(max(1, round(count / a.step_count)), 'call')}"
            for kind, ns, count in by_kind.head(3).iter_rows()
        ]
        yield Finding(
            rule=self.id,
            title=self.title,
            summary=(
                f"{of_step(a, exposed)} the device only "
                f"communicates: {overlap:.0%} of communication runs under compute."
            ),
            evidence=[
                Evidence(f"exposed communication{per(a)}", exposed / a.step_count, "ns"),
                Evidence("share of the step", share, "share", self.min_share, "TraceLens"),
                Evidence(f"all communication{per(a)}", total / a.step_count, "ns"),
                Evidence("hidden under compute", overlap, "share"),
                Evidence("largest exposed", "; ".join(kinds)),
            ],
            where=self._worst(a, table),
            fix=(
                "Give collectives compute to hide under: let DDP overlap its buckets with "
                "backward (no work after backward that needs all gradients early, buckets "
                "of 25 to 100 MB), prefetch FSDP all-gathers, start all-to-alls before "
                "independent compute and wait as late as possible; then send fewer bytes."
            ),
            code=(
                "model = DDP(model, bucket_cap_mb=50, gradient_as_bucket_view=True,\n"
                "            static_graph=True)\n"
                "# FSDP2: fully_shard(block) for each block, then\n"
                "#   block.set_modules_to_forward_prefetch([next_block])\n"
                "# own collectives: work = dist.all_to_all_single(..., async_op=True)\n"
                "#   ... independent compute ...; work.wait()"
            ),
            check="Profile again: exposed communication a step falls, hidden share rises.",
            edits=[
                Edit(op="overlap", select=Select(on="gpu", family=("communication",)), ahead=True)
            ],
            confidence=0.85,
            assumptions=["there is independent compute left to hide the communication under"],
            falsified_by=(
                "traces of all ranks in which the other ranks arrive late at these collectives: "
                "then the wait is a straggler's, not the network's"
            ),
        )

    def _worst(self, a: Analysis, table: pl.DataFrame) -> list[Location]:
        """The collectives with most exposed time, by annotation or op."""
        found = []
        for row in table.sort("exposed", descending=True).head(3).iter_rows(named=True):
            file, line, function = a.location(row["op"])
            found.append(
                Location(
                    file=file,
                    line=line,
                    function=function,
                    op=row["annotation"] or row["collective"],
                    kernel=str(a.trace.gpu["name"][row["gpu"]]),
                    ts_ns=row["ts"],
                    dur_ns=row["dur"],
                )
            )
        return found

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """All-reduce after backward, nothing to hide it."""
        b = TraceBuilder()
        for _ in range(4):
            with b.step():
                with b.op("aten::mm", [[4096, 4096], [4096, 4096]], "c10::BFloat16"):
                    b.launch("ampere_bf16_s16816gemm_bf16_128x128", 3000)
                b.collective("allreduce", 100 << 20, 1000, wait=True)
                b.sync()
        return {"all-reduce after backward": b}

    @staticmethod
    def silent_on() -> dict[str, TraceBuilder]:
        """The same all-reduce while a long kernel runs; and none at all."""
        hidden = TraceBuilder()
        alone = TraceBuilder()
        for _ in range(4):
            with hidden.step():
                hidden.collective("allreduce", 100 << 20, 1000)
                with hidden.op("aten::mm", [[4096, 4096], [4096, 4096]], "c10::BFloat16"):
                    hidden.launch("ampere_bf16_s16816gemm_bf16_128x128", 3000)
                hidden.sync()
            with alone.step():
                with alone.op("aten::mm"):
                    alone.launch("ampere_bf16_s16816gemm_bf16_128x128", 3000)
                alone.sync()
        return {"hidden under compute": hidden, "no communication": alone}
