"""FSDP gathers the same parameters again in every micro-batch."""

import numpy as np
import polars as pl

from advisor.core import text as t
from advisor.core.finding import Finding, Outcomes
from advisor.core.rule import Evidence, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.comm.mesh import forward_passes
from advisor.rules.support.citations import FULLY_SHARD, SILENT_TRACES, TRACELENS
from advisor.rules.support.common import (
    Rows,
    amount_per_step,
    device_places,
    remove_collectives,
    sum_column,
)
from advisor.testing import Examples, TraceBuilder


class RepeatedGathers(Rule):
    """Fully sharded data parallelism gathers the same parameters in each pass (micro-batch) of an
    optimizer step, and frees them again. Where memory allows, keep them gathered until the last
    backward pass.

    A pass begins with the first device work that is launched after a backward pass (autograd's
    nodes) and before another one of the same step. Gathers of parameters are the all-gathers of
    process groups that shard data. Those of the second and later passes are repeated, if each pass
    gathers as many bytes as the first. Only exposed time counts: gathers that compute hides cost
    little."""

    id = "repeated-gathers"
    title = "FSDP gathers the same parameters in each micro-batch"
    training_only = True
    category = "distributed"
    silent_in = SILENT_TRACES
    references = (
        "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html",
        "https://docs.pytorch.org/docs/stable/fsdp.html",
    )

    min_share = Threshold(0.05, "of the step, exposed in repeated gathers", TRACELENS)
    min_passes = Threshold(2, "passes: one has to gather each parameter for its step", FULLY_SHARD)

    fix = (
        "Keep the parameters gathered between the micro-batches of an optimizer step: "
        "set_reshard_after_backward(False) on all but the last. It takes up to {size} more memory "
        "on each GPU. If that is too much, use fewer, larger micro-batches, or shard within a "
        "node (hybrid sharding)."
    )
    code = (
        "for i, batch in enumerate(micro_batches):\n"
        "    last = i == len(micro_batches) - 1\n"
        "    model.set_reshard_after_backward(last)\n"
        "    model.set_requires_gradient_sync(last)   # reduce once; whole gradients stay\n"
        "    (loss_fn(model(batch)) / len(micro_batches)).backward()\n"
        "optimizer.step()"
    )
    verify = "Profile again: all-gathers appear only in the first micro-batch of a step."
    falsified_by = "an optimizer step in each pass, or memory that does not hold the parameters"
    assumptions = ("the gathered parameters of all layers fit into the memory",)
    confidence = 0.75

    def check(self, a: Analysis) -> Outcomes:
        if a.device_id is None or not a.breakdown.all_communication.total:
            return
        table = a.collectives.filter(
            pl.col("axis") == "sharded data", pl.col("collective") == "all_gather"
        )
        if table.is_empty() or table["bytes"].null_count():
            return
        starts = forward_passes(a)
        table = _add_pass(a, table, starts)
        micro_batches = int(table["passes"].to_numpy().max())
        if micro_batches < self.min_passes:
            return
        pass_bytes = table.group_by("step", "pass").agg(pl.col("bytes").sum()).sort("step", "pass")
        first_bytes = pass_bytes.group_by("step").agg(pl.col("bytes").first().alias("first"))
        if (
            not pass_bytes.join(first_bytes, on="step")
            .select((pl.col("bytes") == pl.col("first")).all())
            .item()
        ):
            return
        repeated = table.filter(pl.col("pass") > 0)
        share = sum_column(repeated["exposed"]) / a.span_ns
        if share < self.min_share:
            return
        size = float(first_bytes["first"].to_numpy().mean())
        repeated_ns = sum_column(repeated["dur"])
        times = a.trace.gpu["dur"].to_numpy()[a.in_window & a.kernels["communication"].to_numpy()]
        yield Finding(
            summary=(
                f"Each of {micro_batches} micro-batches gathers {t.format_bytes(size)} of "
                "parameters. The repeated all-gathers are exposed for "
                f"{t.format_duration(sum_column(repeated['exposed']) / a.step_count)} "
                f"{t.format_per(a.per)}."
            ),
            evidence=[
                self.compare("passes that gather", micro_batches, "min_passes", "count"),
                Evidence("bytes gathered in each pass", size, "bytes"),
                amount_per_step(a, "repeated all-gathers", repeated.height, "count"),
                amount_per_step(a, "time of the repeated all-gathers", repeated_ns),
                amount_per_step(a, "exposed repeated all-gathers", sum_column(repeated["exposed"])),
                self.compare(
                    "exposed repeated all-gathers, share of the step", share, "min_share", "share"
                ),
            ],
            where=device_places(a, repeated, "exposed"),
            edits=[remove_collectives(a, repeated, int(times.sum()))],
            fix=self.fix.format(size=t.format_bytes(size)),
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "four micro-batches": _build_training(4),
            "two micro-batches": _build_training(2),
            "one micro-batch": (_build_training(1), "micro_batches < self.min_passes"),
            "kept between micro-batches": (
                _build_training(4, kept=True),
                "micro_batches < self.min_passes",
            ),
            "hidden": (_build_training(4, gather_us=5), "min_share"),
        }


def _add_pass(a: Analysis, table: pl.DataFrame, starts: Rows) -> pl.DataFrame:
    """Add ``pass`` of each gather in its step, from 0, and the number of ``passes`` that gather."""
    launch = a.trace.cpu["ts"].gather(a.trace.gpu["launch"].gather(table["gpu"]))
    launch_ts = launch.fill_null(table["ts"]).to_numpy()
    pass_number = np.searchsorted(starts, launch_ts, side="right") - 1
    result = table.with_columns(number=pl.Series(pass_number))
    first_pass = pl.col("number").min().over("step")
    return result.with_columns((pl.col("number") - first_pass).alias("pass")).with_columns(
        passes=pl.col("pass").n_unique().over("step")
    )


def _build_training(
    micro_batches: int, *, kept: bool = False, gather_us: float = 400
) -> TraceBuilder:
    """Build FSDP over two layers: gathers before each, gradients scattered after it."""
    b = TraceBuilder()
    for _ in range(5):
        with b.step():
            for number in range(micro_batches):
                for _ in range(2):
                    if not (kept and number):
                        b.collective("_allgather_base", 64 << 20, gather_us, wait=True)
                    b.run("aten::mm", "ampere_sgemm_128x64_nn", 800)
                for _ in range(2):
                    with b.op("autograd::engine::evaluate_function: MmBackward0"):
                        b.launch("ampere_sgemm_128x64_nn", 1600)
                        b.collective("_reduce_scatter_base", 64 << 20, 200)
            b.wait_stream(7, 20)
            with b.range("Optimizer.step#AdamW.step"), b.op("aten::_fused_adamw_"):
                b.launch("multi_tensor_apply_kernel", 300)
            b.sync()
    return b
