"""A pipeline's stages wait because its schedule has few micro-batches."""

import polars as pl

from advisor.core import text as t
from advisor.core.finding import Finding, Outcomes, PassedCheck
from advisor.core.rule import Evidence, Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.comm.links import bubble_share, select_collectives
from advisor.measure.comm.mesh import count_micro_batches, count_passes, pipeline_wait
from advisor.rules.support.citations import CHOSEN, GPIPE, INTERLEAVED, SILENT_TRACES
from advisor.rules.support.common import (
    amount_per_step,
    device_places,
    of_step,
    scale_edit,
    sum_column,
)
from advisor.testing import Examples, TraceBuilder

WORST_GAIN_SHARE = 0.2
"""Share of the gain that is left if smaller micro-batches lose the remainder in their kernels."""


class PipelineBubble(Rule):
    """The stages of a pipeline wait while it fills and drains. With p stages and m micro-batches
    that takes (p - 1) / (m + p - 1) of its time. With several stages on each rank (interleaved
    schedule) the same micro-batches have a smaller bubble: m v in place of m, with v stages.

    Micro-batches are the sends of the most frequent size to one rank in a step. The wait is the
    exposed time of sends and receives beyond the shortest of each size. Only as much of it as the
    formula gives is due to the schedule. Unequal stages or late ranks cause the remainder: record
    all ranks. If all forward passes of a step are before its backward passes (GPipe), memory holds
    the activations of all micro-batches. One forward, one backward (1F1B) holds those of p."""

    id = "pipeline-bubble"
    title = "The pipeline waits while it fills and drains"
    training_only = True
    silent_in = SILENT_TRACES
    references = (
        "https://arxiv.org/abs/2104.04473",
        "https://docs.pytorch.org/docs/stable/distributed.pipelining.html",
    )
    sources = (GPIPE, INTERLEAVED)

    max_micro_batches_per_stage = Threshold(4.0, "micro-batches per stage", GPIPE)
    min_share = Threshold(0.05, "of the step, the bubble by formula and as measured", CHOSEN)
    stages_per_rank = Factor(2, "stages on each rank in the interleaved schedule", CHOSEN)

    fix = (
        "Use an interleaved schedule with two stages on each rank. Or cut the batch into more, "
        "smaller micro-batches: four per stage and more, as long as kernels stay large. Both halve "
        "the bubble, and send activations more often."
    )
    code = (
        "from torch.distributed.pipelining import ScheduleInterleaved1F1B\n"
        "schedule = ScheduleInterleaved1F1B(stages, n_microbatches=4 * len(stages))\n"
        "# Megatron-LM: --num-layers-per-virtual-pipeline-stage <layers / (2 p)>"
    )
    verify = "Profile again: 'advisor analyze TRACE --by mesh' shows a smaller bubble."
    falsified_by = "the same wait with twice as many micro-batches: then a stage is late"
    assumptions = (
        "the layers of a stage can be divided, and the link carries twice as many activations",
    )
    confidence = 0.75

    def check(self, a: Analysis) -> Outcomes:
        if a.device_id is None or a.forward_only or a.span_ns == 0:
            return
        rows = a.collectives.filter(pl.col("axis") == "pipeline")
        size = None if rows.is_empty() else rows["group_size"].max()
        slots = None if size is None else count_micro_batches(a, rows)
        if slots is None or not isinstance(size, int) or size < 2:
            return
        if slots / size >= self.max_micro_batches_per_stage:
            yield PassedCheck(text=f"{slots} micro-batches fill a pipeline of {size} stages")
            return
        wait = pipeline_wait(rows)
        bubble = bubble_share(size, slots)
        share = min(bubble, wait / a.span_ns)
        if share < self.min_share:
            return
        idle = share * a.span_ns
        interleaved_bubble = bubble_share(size, self.stages_per_rank * slots)
        # (p - 1) slots of time become (p - 1) / v
        saved = idle * (1 - 1 / self.stages_per_rank)
        select, part = select_collectives(a, rows)
        factor = 1 - part * saved / max(1, sum_column(rows["dur"]))
        is_gpipe = slots > size and count_passes(a) == 1
        memory_text = (
            f"All {slots} forward passes run before the first backward pass (GPipe): 1F1B keeps "
            f"activations of {size} micro-batches in place of {slots}."
        )
        extra = wait - bubble * a.span_ns
        more = (
            f" {t.format_duration(extra / a.step_count)} more is not part of the bubble: a stage "
            "takes longer, or a rank is late."
            if extra > 0.5 * bubble * a.span_ns
            else ""
        )
        yield Finding(
            summary=(
                f"{slots} micro-batches through {size} stages leave a bubble of {bubble:.0%} by "
                f"formula. This rank waits in sends and receives for {of_step(a, wait)}.{more}"
            ),
            evidence=[
                Evidence("stages of the pipeline", size, "count"),
                Evidence("micro-batches", slots, "count"),
                self.compare(
                    "micro-batches per stage", slots / size, "max_micro_batches_per_stage", "count"
                ),
                self.compare("bubble by formula", bubble, "min_share", "share"),
                Evidence("bubble with an interleaved schedule", interleaved_bubble, "share"),
                amount_per_step(a, "waiting in sends and receives", wait),
            ],
            where=device_places(a, rows, "exposed"),
            edits=[scale_edit(select, factor, factor, 1 - (1 - factor) * WORST_GAIN_SHARE)],
            fix=f"{self.fix} {memory_text if is_gpipe else ''}".strip(),
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "four micro-batches": _build_stage(4, 3600),
            "sixteen micro-batches": (_build_stage(16, 3600), "max_micro_batches_per_stage"),
            "no wait": (_build_stage(4, 20), "share < self.min_share"),
        }


def _build_stage(slots: int, wait: float) -> TraceBuilder:
    """Build the first of four stages, GPipe: it waits for the first micro-batch's gradients."""
    b = TraceBuilder(rank=0, world_size=4)
    for _ in b.steps(4):
        for _ in range(slots):
            b.run("aten::mm", "ampere_sgemm_128x64_nn", 400)
            b.collective("send", 8 << 20, 60, group_size=4, ends=(0, 1))
        for number in range(slots):
            with b.op("autograd::engine::evaluate_function: MmBackward0"):
                us = 60 + (0 if number else wait)
                b.collective("recv", 8 << 20, us, group_size=4, ends=(1, 0), wait=True)
                b.launch("ampere_sgemm_128x64_nn", 800)
        b.sync()
    return b
