"""FSDP gathers its parameters in many small pieces: its units are small."""

import math
from typing import Any

import numpy as np
import polars as pl

from advisor.core import text as t
from advisor.core.finding import Finding, Outcomes
from advisor.core.rule import Evidence, Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.comm.links import (
    ATTAINED_SHARE,
    SIMPLE,
    count_local,
    find_link,
    find_node_links,
    group_ranks,
    ring_latency,
    select_collectives,
)
from advisor.measure.comm.messages import bus_factor
from advisor.rules.support.citations import (
    CHOSEN,
    ENGINE_FLOOR,
    NCCL_OVERHEAD,
    NCCL_TUNING,
    SILENT_TRACES,
    TRIED_ON_TRACES,
)
from advisor.rules.support.common import (
    amount_per_step,
    device_places,
    example_steps,
    of_step,
    scale_edit,
    sum_column,
)
from advisor.testing import Examples, TraceBuilder

WORST_GAIN_SHARE = 0.2
"""Share of the gain that is left if a pass's first gather, which nothing hides, becomes longer."""


class SmallGathers(Rule):
    """FSDP gathers the parameters of each unit that it wraps, and scatters its gradients. Each
    collective pays the latency of a ring over all ranks. Small units pay it often, and the step
    waits for it. Larger units send the same bytes in fewer collectives.

    A gather is small if less than half of its shortest time is transfer. Transfer is its bytes at
    0.8 of the link's datasheet rate, or of ``--node-bandwidth`` across nodes. The rest is latency,
    up to what NCCL's own model gives for as many ranks. The rule abstains where the rate is
    unknown, or which ranks share a node. The gain is that of units so large that latency is a fifth
    of a gather."""

    id = "small-gathers"
    title = "FSDP gathers many small units"
    alternatives = "small-messages"
    silent_in = SILENT_TRACES
    references = (
        "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html",
        "https://docs.pytorch.org/docs/stable/fsdp.html",
    )
    sources = (NCCL_TUNING, NCCL_OVERHEAD)

    min_count = Threshold(20.0, "small gathers per step", TRIED_ON_TRACES)
    max_transfer_share = Threshold(0.5, "of a gather's shortest time that its bytes take", CHOSEN)
    min_share = Threshold(0.01, "of the step, exposed in small gathers and scatters", ENGINE_FLOOR)
    target_latency_share = Factor(0.2, "of a gather's time that is latency in larger units", CHOSEN)

    fix = (
        "Wrap larger units, about {units} times as large as these, so that a gather has some "
        "{size}. Wrap whole transformer blocks, or several of them together, and not single "
        "layers. The parameters of one more unit are then gathered at once."
    )
    code = (
        "# FSDP2: one group for several blocks; wrap nothing inside of them\n"
        "for i in range(0, len(model.layers), n):\n"
        "    fully_shard(list(model.layers[i:i + n]))\n"
        "fully_shard(model)\n\n"
        "# or, with FSDP1\n"
        "policy = functools.partial(size_based_auto_wrap_policy,\n"
        "                           min_num_params=100_000_000)\n"
        "# keep your other arguments\n"
        "model = FSDP(model, auto_wrap_policy=policy)"
    )
    verify = "Profile again: fewer all-gathers per step, each of more bytes."
    falsified_by = "all_gather_perf of nccl-tests with the same size at the link's bandwidth"
    assumptions = ("the parameters of a larger unit fit into the memory",)
    confidence = 0.7

    def check(self, a: Analysis) -> Outcomes:
        if a.device_id is None or not a.breakdown.all_communication.total:
            return
        table = a.collectives.filter(
            pl.col("axis") == "sharded data",
            pl.col("collective").is_in(["all_gather", "reduce_scatter"]),
        )
        if table.is_empty() or table["bytes"].null_count():
            return
        table = _add_latency(a, table)
        small = table.filter(pl.col("transfer") < self.max_transfer_share * pl.col("shortest"))
        count = small.filter(pl.col("collective") == "all_gather").height / a.step_count
        if count < self.min_count:
            return
        share = sum_column(small["exposed"]) / a.span_ns
        if share < self.min_share:
            return
        latency = float(small["latency"].mean())  # type: ignore[arg-type]
        transfer = float(small["transfer"].mean())  # type: ignore[arg-type]
        size = float(small["bytes"].median())  # type: ignore[arg-type]
        # n of them in one: latency / (latency + n transfer) is the target
        units = max(
            2, math.ceil(latency * (1 / self.target_latency_share - 1) / max(transfer, 1.0))
        )
        units = min(units, max(2, round(count)))
        saved = float(small["latency"].sum()) * (1 - 1 / units)
        select, part = select_collectives(a, small)
        factor = 1 - part * saved / max(1, sum_column(small["dur"]))
        yield Finding(
            summary=(
                f"{count:.0f} gathers {t.format_per(a.per)} have a median of "
                f"{t.format_bytes(size)}. {latency / (latency + transfer):.0%} of the shortest "
                f"ones' time is latency, and they are exposed for "
                f"{of_step(a, sum_column(small['exposed']))}."
            ),
            evidence=[
                self.compare("small gathers", count, "min_count", "count", per=a.per),
                Evidence("median small gather", size, "bytes"),
                self.compare(
                    "share of a small gather's time that its bytes take",
                    transfer / (latency + transfer),
                    "max_transfer_share",
                    "share",
                ),
                amount_per_step(a, "latency of the small gathers", float(small["latency"].sum())),
                amount_per_step(
                    a, "exposed small gathers and scatters", sum_column(small["exposed"])
                ),
                self.compare(
                    "exposed small gathers and scatters, share of the step", share, "min_share"
                ),
            ],
            where=device_places(a, small, "exposed"),
            edits=[scale_edit(select, factor, factor, 1 - (1 - factor) * WORST_GAIN_SHARE)],
            fix=self.fix.format(units=units, size=t.format_bytes(units * size)),
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "a unit a layer": _build_units(60, 1 << 20, 60),
            "large units": (_build_units(30, 128 << 20, 700), "count < self.min_count"),
            "few units": (_build_units(8, 1 << 20, 60), "count < self.min_count"),
            "hidden": (_build_units(60, 1 << 20, 60, compute=800), "min_share"),
            "nodes unknown": (_build_units(60, 1 << 20, 60, node=0), "count < self.min_count"),
        }


def _add_latency(a: Analysis, table: pl.DataFrame) -> pl.DataFrame:
    """Add ``shortest`` of each kind, size and group, ``transfer`` of its bytes, and ``latency``,
    ns. Rows of groups whose link or rate is unknown are left out."""
    machine = find_node_links(a)
    keys = ["collective", "bytes", "group_size", "ranks"]
    times = table.group_by(keys).agg(pl.col("dur").quantile(0.1).alias("shortest"))
    rows = []
    for kind, size, group, ranks, shortest in times.iter_rows():
        members = group_ranks(ranks)
        link = find_link(a, members, group, machine)
        factor = bus_factor(kind, group)
        if link is None or not link.gb_per_s or factor is None:
            continue
        local = count_local(members, machine) if link.crosses else group
        rate = ATTAINED_SHARE * link.gb_per_s * (local if link.crosses else 1)
        transfer = size * factor / rate
        max_latency = ring_latency(kind, group, local, SIMPLE)
        rows.append((kind, size, group, ranks, shortest, transfer,
                     float(np.clip(shortest - transfer, 0.0, max_latency))))  # fmt: skip
    schema: dict[str, Any] = {**times.schema, "transfer": pl.Float64, "latency": pl.Float64}
    latencies = pl.DataFrame(rows, schema=schema, orient="row")
    return table.join(latencies, on=keys, how="inner", nulls_equal=True)


def _build_units(
    count: int, size: int, us: float, *, compute: float = 40, node: int = 8
) -> TraceBuilder:
    """Build FSDP over ``count`` units: gathers before each, gradients scattered after it."""
    from advisor.core.auxiliary_inputs import NetworkLog

    def body(b: TraceBuilder) -> None:
        for _ in range(count):
            b.collective("_allgather_base", size, us, wait=compute < us)
            b.run("aten::mm", "ampere_sgemm_128x64_nn", compute)
        for _ in range(count):
            with b.op("autograd::engine::evaluate_function: MmBackward0"):
                b.launch("ampere_sgemm_128x64_nn", 2 * compute)
                b.collective("_reduce_scatter_base", size, us)
        b.wait_stream(7, 20)

    b = example_steps(body)
    if node:
        b.logs["network"] = NetworkLog(files=1, hosts=1, ranks=node, node_ranks=node)
    return b
