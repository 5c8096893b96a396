"""Device memory is allocated or freed in the training loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import polars as pl

from advisor.core.finding import (
    Edit,
    Evidence,
    Finding,
    Location,
    Outcome,
    PassedCheck,
    Rule,
    Select,
    Threshold,
)
from advisor.measure import Analysis
from advisor.rules.elsewhere import in_any_language
from advisor.rules.sources import CACHING_ALLOCATOR, OURS
from advisor.testing import TraceBuilder


class AllocationsInLoop(Rule):
    """After the first steps PyTorch's caching allocator serves every tensor from memory it holds.
    ``cudaMalloc`` and ``cudaFree`` in a later step mean that it could not: ``cudaFree`` waits for
    the whole device, ``cudaMalloc`` takes up to milliseconds, and the device runs dry meanwhile.

    Steady state: calls in at least three used steps, one a step or more on average, the first used
    step left out (it may be warm-up). Usual causes are shapes that change from step to step,
    ``empty_cache()`` in the loop (its own rule), a peak so near to the capacity that blocks are
    freed and taken again, and the caching allocator switched off. Pinned host allocations
    (``cudaHostAlloc``) have a rule of their own.

    The price is the idle time of the device that is blamed on allocation, not the calls' duration:
    a ``cudaMalloc`` while the device has work queued costs nothing.
    """

    id = "allocations-in-loop"
    title = "Device memory is allocated in the loop"
    category = "memory"
    knobs = ("expandable-segments",)
    silent_in = (
        "traces/a100_train_6steps",
        "traces/v100_train_copy_heavy",
        "traces/two_ranks_rank0",
        "traces/b200_eager",
    )
    validated_on = (
        "silent where it must be: A100 and V100 training (no such call in six steps), AlexNet (24 "
        "cudaMalloc at the start); never seen to fire"
    )
    references = (
        "https://pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf",
    )

    min_steps = Threshold(
        3, "steps with such calls: once or twice is warm-up or an evaluation", OURS
    )
    min_a_step = Threshold(
        1.0,
        "calls a step, over the steps after the first: in steady state the allocator makes none",
        CACHING_ALLOCATOR,
    )

    fix = (
        "Keep shapes the same from step to step (pad or bucket lengths, drop_last=True), "
        "let the allocator grow its segments instead of freeing them, and lower the peak "
        "if memory is full."
    )
    code = (
        "# shell, before starting (older PyTorch: PYTORCH_CUDA_ALLOC_CONF)\n"
        "export PYTORCH_ALLOC_CONF=expandable_segments:True\n"
        "# and fixed shapes\n"
        "loader = DataLoader(dataset, drop_last=True, pin_memory=True, ...)"
    )
    verify = (
        "Profile later steps again: no cudaMalloc or cudaFree inside them, and "
        "torch.cuda.memory_stats()['num_alloc_retries'] stays 0."
    )
    falsified_by = "the same window some hundred steps later has no such calls: then it was warm-up"
    assumptions = ("the device has other work as soon as the host is not held",)
    confidence = 0.8

    elsewhere: ClassVar = in_any_language(
        "Allocate once, before the loop, and use the memory again; or take it from a pool.",
        cuda="cudaMallocAsync from a pool whose release threshold is set high, in place of "
        "cudaMalloc and cudaFree, which make the whole device wait.",
        code="uint64_t all = UINT64_MAX;\n"
        "cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &all);\n"
        "cudaMallocAsync(&p, bytes, stream);",
    )

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Count allocation calls in the steps after the first."""
        used = a.steps.used
        if a.device_id is None or used.height <= self.min_steps:
            return
        first = used["index"][0]
        device = pl.col("call").is_in(["malloc", "free"])
        calls = a.allocations.filter(device & (pl.col("step") != first))
        steps = used.height - 1
        if calls.is_empty():
            if (a.trace.cpu["kind"] == "runtime").any():
                yield PassedCheck(text=f"no cudaMalloc or cudaFree in the last {steps} steps")
            return
        rate = calls.height / steps
        if calls["step"].n_unique() < self.min_steps or rate < self.min_a_step:
            return
        by_call = dict(calls.group_by("call").len().iter_rows())
        words = {"malloc": "cudaMalloc", "free": "cudaFree"}
        told = ", ".join(
            f"{by_call[key] / steps:.1f} {name}" for key, name in words.items() if by_call.get(key)
        )
        yield Finding(
            summary=(
                f"Every step calls the driver for memory ({told} a step) although the warm-up is "
                "over: cudaFree waits for the whole device, and cudaMalloc holds the host."
            ),
            evidence=[
                Evidence("allocation calls", rate, "count", *self.limit("min_a_step"), per=a.per),
                Evidence(
                    "steps with such calls",
                    calls["step"].n_unique(),
                    "count",
                    *self.limit("min_steps"),
                ),
                Evidence(
                    "host time in these calls", int(calls["dur"].sum()) / steps, "ns", per=a.per
                ),
            ],
            where=self._where(a, calls),
            edits=[Edit(op="remove", select=Select(on="gap", cause=("allocation",)))],
        )

    def _where(self, a: Analysis, calls: pl.DataFrame) -> list[Location]:
        """The lines (else the ops) with most time in such calls."""
        table = calls.with_columns(
            op_name=a.trace.cpu["name"].gather(calls["op"]),
            name=a.trace.cpu["name"].gather(calls["host"]),
        )
        top = (
            table.sort("dur", descending=True)
            .group_by("line", "op_name", maintain_order=True)
            .agg(
                pl.len(),
                pl.col("dur").sum().alias("total"),
                pl.col("host", "ts", "dur", "name").first(),
            )
            .sort("total", descending=True)
            .head(3)
        )
        found = []
        for row in top.iter_rows(named=True):
            file, line, function = a.location(row["host"])
            found.append(
                Location(
                    file=file,
                    line=line,
                    function=function,
                    op=row["op_name"] or row["name"],
                    ts_ns=row["ts"],
                    dur_ns=row["dur"],
                    count=row["len"],
                )
            )
        return found

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """Sizes that change each step: a cudaMalloc and a cudaFree in the middle of it."""
        b = TraceBuilder()
        for _ in range(6):
            with b.step():
                _product(b, 1000)
                b.sync()
                with b.op("aten::empty"):
                    b.call("cudaFree", 400)
                    b.call("cudaMalloc", 600)
                _product(b, 1000)
                b.sync()
        return {"a new size each step": b}

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """Warm-up only; under queued work; none."""
        warm = TraceBuilder()
        hidden = TraceBuilder()
        none = TraceBuilder()
        for step in range(6):
            with warm.step():
                if step < 2:
                    warm.call("cudaMalloc", 1500)
                _product(warm, 3000)
                warm.sync()
            with hidden.step():
                _product(hidden, 5000)
                hidden.call("cudaMalloc", 600)
                _product(hidden, 5000)
                hidden.sync()
            with none.step():
                _product(none, 3000)
                none.sync()
        return {
            "warm-up": (warm, "calls['step'].n_unique() < self.min_steps"),
            "the device has work queued": (hidden, "worth"),
            "none": (none, "calls.is_empty()"),
        }


def _product(b: TraceBuilder, us: float) -> None:
    with b.op("aten::mm", [[4096, 4096], [4096, 4096]], "c10::BFloat16"):
        b.launch("ampere_bf16_s16816gemm_bf16_128x128_ldg8_nn", us)
