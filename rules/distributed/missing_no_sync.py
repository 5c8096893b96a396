"""DDP reduces gradients in every backward pass although several make one optimizer step."""

from collections import Counter
from typing import NamedTuple

import numpy as np
import polars as pl

from advisor.core import text as t
from advisor.core.finding import Edit, Finding, Outcomes, PassedCheck, Select, SkippedCheck
from advisor.core.rule import Evidence, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.comm.comms import in_window, list_collectives
from advisor.measure.host.names import OPTIMIZER_STEP, name_matches
from advisor.measure.host.stacks import climb_stack, parent_rows
from advisor.rules.support.citations import SILENT_TRACES, TRIED_ON_TRACES
from advisor.rules.support.common import (
    Rows,
    amount_per_step,
    device_places,
    remove_collectives,
    row_numbers,
    sum_column,
)
from advisor.testing import Examples, TraceBuilder

_FORWARD = r"^DistributedDataParallel\.forward$"
_HOOK = r"^autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
_BROADCAST = r"(?i)broadcast"
_BUCKET_COPY = r"^torch\.distributed\.ddp\.reducer::"


class SyncedMicroBatches(NamedTuple):
    """Micro-batches of optimizer steps, and what each reduces."""

    table: pl.DataFrame
    """All-reduces of gradients, in order of launch: ``gpu``, ``bytes``, ``dur``, ``op``, ``inside``
    (it runs in the used steps), ``unit`` (number of the optimizer step), ``of`` (number of the
    micro-batch in it), ``last`` (that micro-batch is the last before the optimizer)."""
    counts: Rows
    """Number of micro-batches of each optimizer step complete in the trace, 0 for others."""


class MissingNoSync(Rule):
    """DistributedDataParallel reduces gradients over all ranks in every backward pass unless you
    use ``no_sync()``. With gradient accumulation k backward passes make one optimizer step, and
    only the sum of their gradients is needed. Yet the gradients are sent k times.

    A *pass* begins with each ``DistributedDataParallel.forward`` range; passes up to the same
    ``Optimizer.step`` range belong together. Reductions of gradients are the all-reduces launched
    from the hooks that run as gradients are accumulated (``AccumulateGrad``). So reductions of
    tensor parallelism, SyncBatchNorm, metrics and gradient norms are not among them. The rule fires
    when in each complete optimizer step every pass reduces messages of the same sizes. All but the
    last set of them are needless: (k - 1) / k of the bytes. So are broadcasts of buffers: a forward
    pass after one inside ``no_sync()`` sends none.

    The rule is silent when two optimizers step one after the other, because two models of the same
    architecture could be trained side by side. It does not judge fully sharded data parallelism:
    there ``no_sync`` keeps whole gradients in memory, and leaving it out is often right."""

    id = "missing-no-sync"
    title = "Gradient accumulation without no_sync: DDP reduces gradients in every pass"
    training_only = True
    found_in = ("recorded/gloo_accumulation.slow",)
    silent_in = SILENT_TRACES
    validation_note = (
        "CPU recordings of two ranks that accumulate four passes, without no_sync and with it. "
        "Silent on the A100, V100 and nccl_collectives trainings and on two_ranks (one pass per "
        "step). In the A100 training with every second optimizer range renamed it finds the 3 of 6 "
        "messages that are then needless. Their bytes are those that the file's shapes give. "
        "PyTorch 2.13 names hooks, passes and optimizer so, with and without no_sync (recorded on "
        "the CPU)"
    )
    knobs = ("ddp-no-sync",)
    references = (
        "https://pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html#torch.nn.parallel.DistributedDataParallel.no_sync",
        "https://pytorch.org/docs/stable/notes/ddp.html",
    )

    min_steps = Threshold(
        2, "complete optimizer steps that show it: one may be a coincidence", TRIED_ON_TRACES
    )

    fix = (
        "Run all passes but the last of an optimizer step, forward included, inside "
        "model.no_sync(): gradients then add up locally and are reduced once. With Hugging Face "
        "Accelerate, use accelerator.accumulate(model)."
    )
    code = (
        "from contextlib import nullcontext\n"
        "for i, batch in enumerate(loader):\n"
        "    last = (i + 1) % {passes} == 0\n"
        "    with nullcontext() if last else model.no_sync():\n"
        "        (loss_fn(model(batch)) / {passes}).backward()\n"
        "    if last:\n"
        "        optimizer.step()\n"
        "        optimizer.zero_grad()"
    )
    verify = (
        "Profile again: all-reduces appear only in the last backward pass before each "
        "Optimizer.step, and the loss curve stays the same."
    )
    falsified_by = (
        "code that reads reduced gradients after each pass, or two models of one "
        "architecture with one optimizer"
    )
    assumptions = ("the gradients of the passes are only summed, not used one by one",)
    confidence = 0.85

    def check(self, a: Analysis) -> Outcomes:
        micro_batches = find_micro_batches(a)
        if micro_batches is None:
            return
        table, units = micro_batches.table, np.flatnonzero(micro_batches.counts >= 2)
        steps = [_count_sizes(table, int(unit), int(micro_batches.counts[unit])) for unit in units]
        if len(steps) < self.min_steps or not any(sum(map(len, step)) for step in steps):
            return
        if any(None in sizes for step in steps for sizes in step):
            if sum(map(bool, steps[0])) > 1:
                yield SkippedCheck(
                    what="whether gradient accumulation reduces gradients more than once",
                    why="the sizes of the collectives are not recorded",
                    record="record_shapes=True",
                )
            return
        k = int(micro_batches.counts[units[0]])
        if all(not sizes for step in steps for sizes in step[:-1]):
            yield PassedCheck(
                text=f"gradients of {k} passes are reduced once, before the optimizer step"
            )
            return
        if any(not step[0] or any(sizes != step[0] for sizes in step) for step in steps):
            return
        needless = table.filter(~pl.col("last"))
        needless = needless.filter("inside")
        if needless.is_empty():
            return
        once_bytes = sum(size * count for size, count in steps[0][0].items() if size is not None)
        sent_bytes = float(np.mean([_sum_bytes(step) for step in steps]))
        time_ns = int(needless["dur"].sum()) / a.step_count
        yield Finding(
            summary=(
                f"Needless reductions take {t.format_duration(time_ns)} {t.format_per(a.per)}: "
                f"each of {k} backward passes per optimizer step reduces gradients over all ranks, "
                f"{t.format_bytes(sent_bytes)} instead of {t.format_bytes(once_bytes)}."
            ),
            evidence=[
                Evidence("passes per optimizer step", k, "count", 2, "one pass needs no no_sync"),
                self.compare(
                    "optimizer steps with needless reductions", len(steps), "min_steps", "count"
                ),
                Evidence("gradients reduced per optimizer step", sent_bytes, "bytes"),
                Evidence("gradients of one pass", once_bytes, "bytes"),
                amount_per_step(a, "needless reductions", needless.height, "count"),
                Evidence("time of the needless reductions", time_ns, "ns", per=a.per),
            ],
            where=device_places(a, needless, "dur"),
            edits=[
                remove_collectives(a, needless, sum_column(table.filter("inside")["dur"]), _HOOK),
                *_scale_copies(a, k),
                *_scale_broadcasts(a, k),
            ],
            code=self.code.format(passes=k),
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "two passes, each reduced": _build_training([[8, 25], [8, 25]]),
            "four passes, a profiler step each": _build_training([[25, 25]] * 4, profiled="pass"),
            "two passes on CPUs": _build_training([[8, 25], [8, 25]], gpu=None),
            "buffers are broadcast too": _build_training([[8]] * 4, gpu=None, broadcast_us=500),
            "no_sync is used": (
                _build_training([[], [8, 25]]),
                "all((not sizes for step in steps for sizes in step[:-1]))",
            ),
            "one pass, equal buckets": (_build_training([[25, 25]]), "len(steps) < self.min_steps"),
            "tensor parallelism repeats, gradients do not": (
                _build_training([[], [25]], tensor=8),
                "all((not sizes for step in steps for sizes in step[:-1]))",
            ),
            "one pass reduces more": (
                _build_training([[8], [8, 25]]),
                "any((not step[0] or any((sizes != step[0] for sizes in",
            ),
            "two optimizers": (
                _build_training([[8, 25], [8, 25]], optimizers=2),
                "micro_batches is None",
            ),
            "sizes are not recorded": (
                _build_training([[8, 25], [8, 25]], arguments=False),
                "any((None in sizes for step in steps for sizes in step))",
            ),
        }


def find_micro_batches(a: Analysis) -> SyncedMicroBatches | None:
    """Find the micro-batches of the optimizer steps, or ``None`` if no accumulation shows."""
    cpu = a.trace.cpu
    forward, _ = _find_outermost(a, _FORWARD)
    start, end = _find_outermost(a, OPTIMIZER_STEP)
    if len(forward) < 2 or len(start) < 2:
        return None
    # how many optimizers ended before each micro-batch began: the optimizer step it works for
    unit = np.searchsorted(end, forward, side="right")
    if not np.isin(np.arange(1, len(start)), unit).all():
        return None  # an optimizer step without a micro-batch since the one before
    first_batch = np.searchsorted(unit, unit)
    counts = np.bincount(unit, minlength=len(start) + 1)
    complete = counts.copy()
    complete[[0, len(start)]] = 0  # cut off by the ends of the trace
    usual = int(complete.max())
    reductions = list_collectives(a).filter(
        (pl.col("collective") == "all_reduce") & pl.col("launch_ts").is_not_null()
    )
    launch = row_numbers(reductions["op"])
    if a.device_id is not None:
        launch = row_numbers(a.trace.gpu["launch"].gather(reductions["gpu"]))
    is_hook = (cpu["kind"] == "op").to_numpy() & name_matches(cpu["name"], _HOOK).to_numpy()
    reductions = reductions.filter(
        pl.Series(climb_stack(parent_rows(a.trace), is_hook, launch) >= 0, dtype=pl.Boolean)
    )
    batch_index = np.searchsorted(forward, reductions["launch_ts"].to_numpy(), side="right") - 1
    position = batch_index - first_batch[batch_index]
    own_unit = unit[batch_index]
    remaining = counts[own_unit] - 1 - position
    is_last = np.where(own_unit == len(start), position >= usual - 1, remaining == 0)
    columns = ("gpu", "ts", "dur", "bytes", "op", "launch_ts")
    table = reductions.select(*columns, inside=in_window(a, reductions)).with_columns(
        unit=pl.Series(own_unit), of=pl.Series(position), last=pl.Series(is_last)
    )
    return SyncedMicroBatches(table.filter(pl.Series(batch_index >= 0)).sort("launch_ts"), complete)


def _find_outermost(a: Analysis, pattern: str) -> tuple[Rows, Rows]:
    """Return starts and ends of ranges, without those inside another range."""
    cpu = a.trace.cpu
    is_range = cpu["kind"].is_in(["annotation", "op"]) & name_matches(cpu["name"], pattern)
    ranges = cpu.filter(is_range).select("ts", "dur").sort("ts", "dur", descending=[False, True])
    start = ranges["ts"].to_numpy().astype(np.int64)
    end = start + ranges["dur"].to_numpy()
    before = np.maximum.accumulate(np.append(np.int64(-1), end))[:-1]
    return start[start >= before], end[start >= before]


def _count_sizes(table: pl.DataFrame, unit: int, count: int) -> list[Counter[int | None]]:
    """Count message sizes of each micro-batch of one optimizer step."""
    rows = table.filter(pl.col("unit") == unit)
    return [Counter(rows["bytes"].filter(rows["of"] == index).to_list()) for index in range(count)]


def _sum_bytes(step: list[Counter[int | None]]) -> int:
    return sum((size or 0) * count for sizes in step for size, count in sizes.items())


def _scale_copies(a: Analysis, micro_batches: int) -> list[Edit]:
    """Return the edit of gradient copies into and out of buckets if the host computes, else
    none."""
    if a.device_id is not None:
        return []
    select = Select(on="host", kind=("op",), name=_BUCKET_COPY)
    return [Edit(op="scale", select=select, factor=1 / micro_batches)]


def _scale_broadcasts(a: Analysis, micro_batches: int) -> list[Edit]:
    """Return the edit of buffer broadcasts: a forward after one inside ``no_sync()`` sends none."""
    table = a.collectives.filter(pl.col("collective").cast(pl.String) == "broadcast")
    is_forward = name_matches(a.trace.cpu["name"], _FORWARD).to_numpy()
    if not (climb_stack(parent_rows(a.trace), is_forward, row_numbers(table["op"])) >= 0).any():
        return []
    select = Select(on="gpu", family=("communication",), name=_BROADCAST, under=_FORWARD)
    return [Edit(op="scale", select=select, factor=1 / micro_batches)]


def _build_training(
    micro_batches: list[list[int]],
    *,
    profiled: str = "step",
    tensor: int = 0,
    optimizers: int = 1,
    arguments: bool = True,
    gpu: str | None = "A100",
    broadcast_us: float = 0,
) -> TraceBuilder:
    """Build micro-batches that reduce buckets of these MiB. Each layer reduces ``tensor`` MiB."""
    b = TraceBuilder(gpu)

    def compute(us: float) -> None:
        if gpu is None:
            b.host(us)
        else:
            b.launch("ampere_sgemm_128x64_nn", us)

    def run_micro_batch(buckets: list[int]) -> None:
        with b.range("DistributedDataParallel.forward"):
            if broadcast_us:
                b.host_collective("broadcast", 1344, broadcast_us, wait=True)
            with b.op("aten::mm"):
                compute(800)
                if tensor:
                    b.collective("allreduce", tensor << 20, 100, group="tp")
        with b.op("autograd::engine::evaluate_function: MmBackward0"):
            compute(1000)
            if tensor:
                b.collective("allreduce", tensor << 20, 100, group="tp")
        for mib in buckets:
            with b.op("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"):
                if gpu is None:
                    b.host_collective("allreduce", mib << 20, mib * 60)
                else:
                    b.collective("allreduce", mib << 20, mib * 60, arguments=arguments)
        if gpu is None:
            b.host(sum(buckets) * 60)
        else:
            b.wait_stream(7, 20)

    def finish() -> None:
        for _ in range(optimizers):
            with b.range("Optimizer.step#AdamW.step"), b.op("aten::_fused_adamw_"):
                compute(300)
        if gpu is not None:
            b.sync()

    for _ in range(5):
        if profiled == "step":
            with b.step():
                for buckets in micro_batches:
                    run_micro_batch(buckets)
                finish()
        else:
            for n, buckets in enumerate(micro_batches):
                with b.step():
                    run_micro_batch(buckets)
                    if n == len(micro_batches) - 1:
                        finish()
    return b
