"""Device memory is allocated or freed in the training loop."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from advisor.analysis import Analysis
from advisor.model import Edit, Evidence, Finding, Good, Location, Outcome, Rule, Select
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
    title = "Device memory is allocated in the training loop"
    category = "memory"
    validated = "synthetic"
    validated_on = (
        "silent where it must be: A100 and V100 training (no such call in six steps), AlexNet (24 "
        "cudaMalloc at the start); never seen to fire"
    )
    references = (
        "https://pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf",
    )

    min_steps = 3  # with such calls: once or twice is warm-up or an evaluation
    min_a_step = 1.0  # calls a step, over the steps after the first

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
                yield Good(text=f"no cudaMalloc or cudaFree in the last {steps} steps")
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
            rule=self.id,
            title=self.title,
            summary=(
                f"Every step calls the driver for memory ({told} a step) although the warm-up is "
                "over: cudaFree waits for the whole device, and cudaMalloc holds the host."
            ),
            evidence=[
                Evidence("allocation calls a step", rate, "count", self.min_a_step,
                         "none in steady state: the allocator caches"),
                Evidence("steps with such calls", calls["step"].n_unique(), "count",
                         self.min_steps),
                Evidence("host time in these calls a step", int(calls["dur"].sum()) / steps, "ns"),
            ],
            where=self._where(a, calls),
            fix=(
                "Keep shapes the same from step to step (pad or bucket lengths, drop_last=True), "
                "let the allocator grow its segments instead of freeing them, and lower the peak "
                "if memory is full."
            ),
            code=(
                "# shell, before starting (older PyTorch: PYTORCH_CUDA_ALLOC_CONF)\n"
                "export PYTORCH_ALLOC_CONF=expandable_segments:True\n"
                "# and fixed shapes\n"
                "loader = DataLoader(dataset, drop_last=True, pin_memory=True, ...)"
            ),
            check=(
                "Profile later steps again: no cudaMalloc or cudaFree inside them, and "
                "torch.cuda.memory_stats()['num_alloc_retries'] stays 0."
            ),
            edits=[Edit(op="remove", select=Select(on="gap", cause=("allocation",)))],
            confidence=0.8,
            assumptions=["the device has other work as soon as the host is not held"],
            falsified_by=(
                "the same window some hundred steps later has no such calls: then it was warm-up"
            ),
        )  # fmt: skip

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
    def silent_on() -> dict[str, TraceBuilder]:
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
            with none.step():
                _product(none, 3000)
                none.sync()
        return {"warm-up": warm, "the device has work queued": hidden, "none": none}


def _product(b: TraceBuilder, us: float) -> None:
    with b.op("aten::mm", [[4096, 4096], [4096, 4096]], "c10::BFloat16"):
        b.launch("ampere_bf16_s16816gemm_bf16_128x128_ldg8_nn", us)
