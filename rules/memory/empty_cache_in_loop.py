"""torch.cuda.empty_cache() in the training loop."""

import polars as pl

from advisor.core.finding import Edit, Finding, Outcomes
from advisor.core.memory_changes import EXPANDABLE
from advisor.core.rule import Evidence, Rule, Threshold
from advisor.measure import Analysis
from advisor.rules.support.citations import SILENT_TRACES, TRIED_ON_TRACES
from advisor.rules.support.common import amount_per_step, locate_row
from advisor.rules.support.device_memory import DRIVER_CALLS, frees_of_empty_cache, run_product
from advisor.testing import Examples, TraceBuilder


class EmptyCacheInLoop(Rule):
    """``torch.cuda.empty_cache()`` returns all cached memory to the driver, which waits for the
    whole GPU. The next step asks for it again, block by block. The call lowers no peak, because the
    allocator would have reused the same memory.

    With Python stacks the call itself is recorded. Without them it shows as a burst of two or more
    ``cudaFree`` outside any operator, with ``cudaMalloc`` after it, in at least three steps.
    ``empty_cache`` is called from Python, whereas the allocator itself frees from inside
    ``aten::empty`` when memory is full."""

    id = "empty-cache-in-loop"
    title = "empty_cache() in the loop makes the allocator start over"
    knobs = ("keep-cache",)
    silent_in = SILENT_TRACES
    validation_note = "the frame as PyTorch 2.13 records it; has not fired on a real trace"
    references = (
        "https://pytorch.org/docs/stable/generated/torch.cuda.memory.empty_cache.html",
        "https://pytorch.org/docs/stable/notes/cuda.html#cuda-memory-management",
    )

    min_steps = Threshold(3, "steps with the call: between phases it does no harm", TRIED_ON_TRACES)
    min_share_of_steps = Threshold(0.5, "of the used steps", TRIED_ON_TRACES)
    min_burst = Threshold(2, "cudaFree calls in a row", TRIED_ON_TRACES)

    fix = (
        "Remove the call from the loop. Use it between phases only, such as after an evaluation "
        "with other shapes. If memory runs out without it, use expandable segments or lower the "
        "peak."
    )
    code = (
        "# remove from the loop:  torch.cuda.empty_cache()\n# against fragmentation:\n" + EXPANDABLE
    )
    verify = "Profile again: no cudaFree and no cudaMalloc in the steps, and no idle gap there."
    falsified_by = "no empty_cache in the loop and its callbacks"
    assumptions = ("the step fits into the same peak without the call",)

    confidence = 0.95
    cases = {"without stacks": {"confidence": 0.7}}

    def check(self, a: Analysis) -> Outcomes:
        """Find the frees of empty_cache, with or without stacks."""
        if a.device_id is None or a.allocations.is_empty():
            return
        calls = a.allocations.filter(pl.col("call").is_in(["malloc", "free"]))
        frees, with_stack = frees_of_empty_cache(a, self.min_burst)
        needed_steps = max(self.min_steps, self.min_share_of_steps * a.step_count)
        if frees["step"].n_unique() < needed_steps:
            return
        mallocs = calls.filter(pl.col("call") == "malloc")
        bursts = frees["host"].len() / a.step_count
        if mallocs["step"].n_unique() < self.min_steps:
            return
        worst = frees.sort("dur", descending=True).row(0, named=True)
        yield Finding(
            summary=(
                f"{frees['step'].n_unique()} of {a.step_count} steps return cached memory to the "
                f"driver ({bursts:.0f} cudaFree per step) and allocate it again "
                f"({mallocs.height / a.step_count:.0f} cudaMalloc per step)."
            ),
            evidence=[
                self.compare(
                    "steps with empty_cache()", frees["step"].n_unique(), "min_steps", "count"
                ),
                Evidence("cudaFree calls", bursts, "count", per=a.per),
                amount_per_step(a, "cudaMalloc calls", mallocs.height, "count"),
                amount_per_step(a, "host time in cudaFree and cudaMalloc", int(calls["dur"].sum())),
            ],
            where=[
                locate_row(
                    a,
                    worst["host"],
                    op="torch.cuda.empty_cache" if with_stack else "cudaFree",
                    ts_ns=worst["ts"],
                    dur_ns=worst["dur"],
                    count=frees.height,
                )
            ],
            edits=[Edit(op="remove", select=DRIVER_CALLS)],
            confidence_notes=[]
            if with_stack
            else ["without Python stacks: inferred from cudaFree bursts outside any operator"],
            **({} if with_stack else self.case("without stacks")),
        )

    @staticmethod
    def examples() -> Examples:
        once, full, none = TraceBuilder(), TraceBuilder(), TraceBuilder()
        for step in once.steps(6):
            if step == 3:
                for _ in range(3):
                    once.call("cudaFree", 300)
            run_product(once)
            once.sync()
        for _ in full.steps(6):
            run_product(full)
            full.sync()
            with full.op("aten::empty"):
                for _ in range(3):
                    full.call("cudaFree", 300)
                full.call("cudaMalloc", 300)
            run_product(full)
            full.sync()
        for _ in none.steps(6):
            run_product(none)
            none.sync()
        return {
            "with stacks": _build_loop(stacks=True),
            "without stacks": _build_loop(stacks=False),
            "once": (once, "frees['step'].n_unique() < needed_steps"),
            "the allocator frees because memory is full": (
                full,
                "frees['step'].n_unique() < needed_steps",
            ),
            "none": (none, "a.allocations.is_empty()"),
        }


def _build_loop(*, stacks: bool) -> TraceBuilder:
    b = TraceBuilder()

    def body() -> None:
        b.sync()
        for _ in range(4):
            b.call("cudaFree", 200)

    for _ in b.steps(6):
        with b.op("aten::empty"):
            for _ in range(4):
                b.call("cudaMalloc", 250)
        run_product(b)
        if stacks:
            with (
                b.python("train.py(40): train"),
                b.python("torch/cuda/memory.py(172): empty_cache"),
            ):
                body()
        else:
            body()
    return b
