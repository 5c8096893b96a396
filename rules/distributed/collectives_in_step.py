"""Collectives in each step that training does not need: metrics, barriers, Python objects."""

import re
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np
import polars as pl

from advisor.core import text as t
from advisor.core.finding import Edit, Finding, Location, Outcomes, Select
from advisor.core.rule import Evidence, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.host.names import OPTIMIZER_STEP, name_matches
from advisor.measure.host.stacks import (
    ENGINE_NODE,
    climb_stack,
    hottest_line,
    parent_rows,
    share_in,
)
from advisor.measure.steps.steps import rows_in_steps
from advisor.rules.support.citations import CHOSEN
from advisor.rules.support.common import (
    Rows,
    amount_per_step,
    costliest_places,
    int_column,
    of_step,
    row_numbers,
    scale_edit,
    sum_column,
)
from advisor.testing import Examples, TraceBuilder

_FORWARD = r"^DistributedDataParallel\.forward$"
_COALESCED = r"^aten::(?:un)?flatten_dense_tensors$|^c10d::broadcast_$"
"""Operators of a broadcast of several tensors at once."""
_FUNCTION = r"^torch/distributed/distributed_c10d\.py\(\d+\): (?:{})$"
_BYTES = r"^(?:unsigned char|u?int8(?:_t)?|Byte|Char)$"


class _NeedlessKind(NamedTuple):
    """Kind of collective that training does not need in each step."""

    noun: str
    """Name of the collective in a sentence, in the singular."""
    calls: str
    """Functions of torch.distributed that issue it, as a regular expression."""
    remaining: tuple[float, float, float]
    """Share of the waits that remains with the fix: usual, at best, at worst."""


_KINDS = {
    "metrics": _NeedlessKind("all-reduce of metrics", "all_reduce|reduce", (0.1, 0.0, 0.5)),
    "barriers": _NeedlessKind("barrier", "barrier|monitored_barrier", (0.5, 0.0, 0.9)),
    "objects": _NeedlessKind(
        "exchange of Python objects", r"\w+_object(?:_list)?", (0.1, 0.0, 0.5)
    ),
    "whole tensors": _NeedlessKind("gather of whole tensors", "gather", (0.1, 0.0, 0.5)),
    "buffers": _NeedlessKind("broadcast of buffers", "broadcast", (0.0, 0.0, 0.5)),
}


class CollectivesInStep(Rule):
    """Ranks wait in each step for collectives that training does not need. These are all-reduces of
    single numbers, barriers, Python objects and whole tensors gathered on one rank. The buffers
    that DistributedDataParallel sends in each forward pass belong to them. Each costs its latency,
    and makes the ranks wait for the slowest one once more.

    The rule looks at gloo, where ranks train on CPUs: its collectives hold the process that calls
    them. With GPUs, reads of their results show it (implicit-sync). For buffers, the time is that
    in which the host flattens them into one tensor and back. All-reduces of up to 1 KiB outside the
    backward pass are *metrics*. Between it and the optimizer, where programs reduce gradients by
    hand, the limit is 16 bytes. An all-gather or broadcast of bytes carries pickled *objects*, with
    an all-gather of their lengths before it. *Whole tensors* go to one rank with ``gather``.
    *Buffers* are broadcasts in the forward pass of DistributedDataParallel. With
    ``broadcast_buffers=False`` each rank keeps its own. That is the same for constants, and makes
    the running statistics of BatchNorm differ between ranks.

    The rule counts the time in which no operator runs on the rank. The gain is what the replay
    of all ranks saves without these collectives. For one rank alone, half of the time at
    barriers counts. The other half is waiting for ranks that also come later to the next
    collective."""

    id = "collectives-in-step"
    title = "Each step waits for collectives that training does not need"
    references = (
        "https://pytorch.org/docs/stable/distributed.html#collective-functions",
        "https://pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html",
    )

    found_in = ("recorded/gloo_metrics.slow", "traces/nccl_collectives")
    silent_in = ("recorded/gloo_accumulation.cured", "recorded/gloo_parameters.cured")
    validation_note = (
        "CPU recordings of two ranks: eight metrics reduced in each step; buffers of a network "
        "on two GPUs. Silent where that is done every 20 steps, and on gradients reduced by DDP "
        "and by hand"
    )

    min_share = Threshold(0.05, "of the step, in which the rank waits for them", CHOSEN)
    max_bytes = Threshold(1024, "bytes of an all-reduce: some numbers, not gradients", CHOSEN)
    max_scalar_bytes = Threshold(16, "bytes of one between backward pass and optimizer", CHOSEN)

    fix = (
        "Add the numbers up on each rank, and all-reduce them together every N steps or once per "
        "epoch. Log the local value in between."
    )
    code = (
        "total = torch.zeros((), device=device)   # once, before the loop\n"
        "# In each step, add on this rank only, without .item().\n"
        "total += loss.detach()\n"
        "if step % 100 == 99:\n"
        "    # To sum several numbers, stack them in one tensor.\n"
        "    dist.all_reduce(total)\n"
        "    print(total.item() / (100 * dist.get_world_size()))\n"
        "    total.zero_()"
    )
    verify = "Record again: fewer collectives per step, and a shorter step."
    falsified_by = "a step that needs their result, such as early stopping on a global loss"
    assumptions = ("the step can go on without their result",)
    confidence = 0.8
    cases: ClassVar[dict[str, dict[str, Any]]] = {
        "barriers": {
            "title": "Each step waits at barriers",
            "fix": "Remove the barriers from the step. Collectives order the ranks by themselves: "
            "the all-reduce of the gradients waits for all of them. Keep a barrier only where "
            "ranks share something else, such as a file.",
            "code": "# no dist.barrier() in the step; once, where rank 0 prepares data:\n"
            "if dist.get_rank() == 0:\n"
            "    prepare_dataset()\n"
            "dist.barrier()",
            "falsified_by": "ranks that exchange data outside torch.distributed in each step",
            "assumptions": ("nothing but collectives passes between the ranks in a step",),
        },
        "objects": {
            "title": "Each step sends Python objects between ranks",
            "fix": "Collect the objects on each rank and gather them every N steps, or once per "
            "epoch. Send numbers as one tensor: objects are pickled, and take two all-gathers.",
            "code": "history.append(stats)                   # on this rank\n"
            "if step % 100 == 99:\n"
            "    parts = [None] * dist.get_world_size()\n"
            "    dist.all_gather_object(parts, history)\n"
            "    history.clear()",
        },
        "whole tensors": {
            "title": "Each step gathers whole tensors on one rank",
            "fix": "Compute the metric's counts on each rank, and all-reduce these few numbers "
            "every N steps. Gather whole tensors only where the metric needs all of them at once, "
            "and at evaluation.",
            "code": "hits = torch.zeros((), device=device)   # once, before the loop\n"
            "# In each step, each rank counts its own.\n"
            "hits += (logits.argmax(1) == target).sum()\n"
            "if step % 100 == 99:\n"
            "    dist.all_reduce(hits)",
        },
        "buffers": {
            "title": "DistributedDataParallel broadcasts buffers in each forward pass",
            "fix": "Set broadcast_buffers=False where buffers are constants, or where each rank "
            "may keep its own BatchNorm statistics. Or convert BatchNorm to SyncBatchNorm, or "
            "make constants plain attributes.",
            "code": "# keep your other arguments\nmodel = DDP(model, broadcast_buffers=False)",
            "falsified_by": "buffers that ranks change in different ways, and must agree on",
            "assumptions": ("ranks need not agree on the buffers in each step",),
        },
    }
    inference: ClassVar[dict[str, Any]] = {
        "title": "Each step waits for collectives that inference does not need",
        "fix": "Add the numbers up on each rank, and all-reduce them together at the end.",
        "falsified_by": "a step that needs their result",
        "code": "total += scores.sum()                    # on this rank, without .item()\n"
        "...\n"
        "dist.all_reduce(total)                  # once, at the end",
    }

    def check(self, a: Analysis) -> Outcomes:
        if a.device_id is not None:
            yield from self._check_buffers(a)
            return
        if not a.breakdown.all_communication.total:
            return
        for kind, table in self._split_by_kind(a):
            exposed = sum_column(table["exposed"])
            if exposed < self.min_share * a.span_ns:
                continue
            count = table.height / a.step_count
            size = sum_column(table["bytes"]) / table.height
            number = max(1, round(count))
            noun, _, suffix = _KINDS[kind].noun.partition(" ")
            collectives = " ".join([t.count_noun(number, noun), *([suffix] if suffix else [])])
            yield Finding(
                summary=(
                    f"Waiting for {collectives} takes {of_step(a, exposed)}."
                    + (f" Each sends {t.format_bytes(size)}." if kind != "barriers" else "")
                ),
                evidence=[
                    amount_per_step(a, "collectives", table.height, "count"),
                    amount_per_step(a, "waiting for these collectives", exposed),
                    self.compare_share(a, "waiting for these collectives", exposed),
                    *([Evidence("mean message", size, "bytes")] if kind != "barriers" else []),
                ],
                where=_locate_calls(a, kind, table),
                edits=list(_build_edits(kind, table)),
                **(self.case(kind) if kind in self.cases else {}),
            )

    def _check_buffers(self, a: Analysis) -> Outcomes:
        """Check the host time that sends buffers to other GPUs: the host flattens them into one
        tensor and back, while the GPU waits for its next launch."""
        names, parent = a.trace.cpu["name"], parent_rows(a.trace)
        rows = np.flatnonzero(name_matches(names, _COALESCED).to_numpy())
        forward = name_matches(names, _FORWARD).to_numpy()
        if not len(rows) or not name_matches(names, "^c10d::broadcast_$").any():
            return
        if (climb_stack(parent, forward, rows) < 0).any():
            return  # something else is flattened too, which stays
        ns = int(a.trace.cpu["dur"].gather(rows_in_steps(a, rows)).sum())
        if ns < self.min_share * a.span_ns:
            return
        usual, best, worst = _KINDS["buffers"].remaining
        yield Finding(
            summary=f"Flattening, sending and unflattening buffers takes {of_step(a, ns)} on the "
            "host, before the forward pass begins.",
            evidence=[
                amount_per_step(a, "host time of the broadcasts", ns),
                self.compare_share(a, "host time of the broadcasts", ns),
            ],
            where=costliest_places(a, rows),
            edits=[
                scale_edit(Select(on="gpu", under=_COALESCED), usual, best, worst),
                scale_edit(Select(on="host", kind=("op",), under=_COALESCED), usual, best, worst),
            ],
            **self.case("buffers"),
        )

    def _split_by_kind(self, a: Analysis) -> Iterator[tuple[str, pl.DataFrame]]:
        """Return the needless collectives in the used steps, by kind."""
        table = a.collectives
        parent, names = parent_rows(a.trace), a.trace.cpu["name"]
        op = row_numbers(table["op"])
        is_inside = {
            pattern: climb_stack(parent, name_matches(names, pattern).to_numpy(), op) >= 0
            for pattern in (ENGINE_NODE, _FORWARD)
        }
        table = table.with_columns(
            name=names.gather(table["host"]).cast(pl.String),
            backward=pl.Series(is_inside[ENGINE_NODE], dtype=pl.Boolean),
            gradients=_is_after_backward(a, op),
            forward=pl.Series(is_inside[_FORWARD], dtype=pl.Boolean),
            pickled=pl.col("dtype").str.contains(_BYTES).fill_null(False),
        ).filter(~pl.col("backward"))
        is_barrier = pl.col("name").str.contains("barrier")
        kind = pl.col("collective").cast(pl.String)
        lengths = (kind == "all_gather") & (pl.col("dtype") == "long int") & pl.col("pickled").any()
        max_bytes = pl.when("gradients").then(self.max_scalar_bytes).otherwise(self.max_bytes)
        is_small = (pl.col("bytes") <= max_bytes).fill_null(False)
        table = table.with_columns(
            needless=pl.when(is_barrier)
            .then(pl.lit("barriers"))
            .when(pl.col("pickled") | (lengths & is_small))
            .then(pl.lit("objects"))
            .when((kind == "broadcast") & pl.col("forward"))
            .then(pl.lit("buffers"))
            .when(pl.col("name").str.contains(r":gather$"))
            .then(pl.lit("whole tensors"))
            .when(kind.is_in(["all_reduce", "reduce"]) & is_small)
            .then(pl.lit("metrics"))
        )
        for name in _KINDS:
            rows = table.filter(pl.col("needless") == name)
            if rows.height:
                yield name, rows

    @staticmethod
    def examples() -> Examples:
        return {
            "a loss in each step": _build_steps(("allreduce", 4, "float"), count=8),
            "barriers": _build_steps(("barrier", 0, "float"), count=3),
            "objects": _build_steps(
                ("allgather", 8, "long int"), ("allgather", 9000, "unsigned char")
            ),
            "logits on rank 0": _build_steps(("gather", 1 << 20, "float")),
            "buffers": _build_steps(("broadcast", 1 << 20, "float"), forward=True),
            "gradients": (_build_steps(("allreduce", 1 << 20, "float")), "rows.height"),
            "gradients by hand": (
                _build_steps(("allreduce", 400, "float"), by_hand=True),
                "rows.height",
            ),
            "buffers, with GPUs": _build_gpu_steps(),
            "little in the buffers": (_build_gpu_steps(us=1), "ns < self.min_share * a.span_ns"),
            "a short metric": (_build_steps(("allreduce", 4, "float"), us=100), "min_share"),
        }


def _is_after_backward(a: Analysis, op: Rows) -> pl.Series:
    """Return which of these rows are between a backward pass and the optimizer's step after it.
    Nothing of the forward pass or optimizer is between the last node of autograd and the row, and
    the optimizer comes next."""
    cpu = a.trace.cpu
    ranges = (ENGINE_NODE, OPTIMIZER_STEP)
    marks = [np.flatnonzero(name_matches(cpu["name"], pattern)) for pattern in ranges]
    rows = np.concatenate(marks)
    kind_of_row = np.repeat([0, 1], [len(mark) for mark in marks])
    ts = cpu["ts"].to_numpy()
    order = np.argsort(ts[rows], kind="stable")
    position = np.searchsorted(ts[rows][order], np.append(ts, 0)[op])
    kinds = np.concatenate([[-1], kind_of_row[order], [-1]])
    return pl.Series((kinds[position] == 0) & (kinds[position + 1] == 1) & (op >= 0))


def _locate_calls(a: Analysis, kind: str, table: pl.DataFrame) -> list[Location]:
    """Find the user's lines that call them: by stacks of the window, else by sampled stacks."""
    places = costliest_places(a, row_numbers(table["op"]), int_column(table, "exposed"))
    if a.run_steps is None or any(place.file for place in places):
        return places
    calls = _FUNCTION.format(_KINDS[kind].calls)
    line = hottest_line(share_in(a.run_steps.stacks, calls)[1])
    return places if line is None else [line.location, *places]


def _build_edits(kind: str, table: pl.DataFrame) -> Iterator[Edit]:
    """Yield edits that scale these collectives, selected by their name and largest message."""
    usual, best, worst = _KINDS[kind].remaining
    for name, rows in table.group_by("name", maintain_order=True):
        select = Select(
            on="gpu",
            family=("communication",),
            name=f"^{re.escape(str(name[0]))}$",
            under=_FORWARD if kind == "buffers" else "",
            max_bytes=int(np.max(int_column(rows, "bytes"))),
        )
        yield Edit(op="scale", select=select, factor=usual, best_factor=best, worst_factor=worst)


def _build_steps(
    *kinds: tuple[str, int, str],
    count: int = 1,
    us: float = 800,
    forward: bool = False,
    by_hand: bool = False,
) -> TraceBuilder:
    b = TraceBuilder(None, rank=0, world_size=2)
    for _ in b.steps():
        if forward:
            with b.range("DistributedDataParallel.forward"):
                b.host_collective(*kinds[0][:2], us, dtype=kinds[0][2], wait=True)
        b.on_host("aten::mm", 3000)
        with b.op("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"):
            b.host_collective("allreduce", 1 << 20, 500)
        b.on_host("aten::mm", 3000)
        for _ in range(0 if forward else count):
            for kind, size, dtype in kinds:
                b.host_collective(kind, size, us, dtype=dtype, wait=True)
        if by_hand:
            with b.range("Optimizer.step#SGD.step"):
                b.on_host("aten::add_", 100)
    return b


def _build_gpu_steps(us: float = 300) -> TraceBuilder:
    b = TraceBuilder(rank=0, world_size=2)
    for _ in b.steps():
        with b.range("DistributedDataParallel.forward"):
            for op in ("aten::flatten_dense_tensors", "c10d::broadcast_"):
                b.run(op, "CatArrayBatchedCopy", 5, host_us=us)
            b.on_host("aten::unflatten_dense_tensors", 2 * us)
            b.run("aten::mm", "ampere_sgemm_128x64_nn", 20, times=100, host_us=30)
    return b
