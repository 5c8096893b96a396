"""Calls that allocate memory through the driver in the training loop, although PyTorch caches it.

The rules of this family differ in the calls that they count."""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import polars as pl

from advisor.core import text as t
from advisor.core.finding import Edit, Finding, Location, Outcomes, PassedCheck, Select
from advisor.core.intervals import covered_length, intersect, intervals_of, union
from advisor.core.memory_changes import EXPANDABLE
from advisor.core.rule import Evidence, Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.host.names import name_matches
from advisor.measure.steps.steps import rows_in_steps
from advisor.rules.support.citations import (
    CACHING_ALLOCATOR,
    SILENT_TRACES,
    TENSORBOARD,
    TRIED_ON_TRACES,
)
from advisor.rules.support.common import (
    amount_per_step,
    costliest_places,
    int_column,
    locate_row,
    of_step,
    row_numbers,
    scale_edit,
    sum_column,
)
from advisor.rules.support.device_memory import DRIVER_CALLS, frees_of_empty_cache, run_product
from advisor.rules.support.framework_advice import STAGING_CODE, in_any_language
from advisor.testing import Examples, TraceBuilder


class DriverAllocationRule(Rule):
    """Base of the rules about one kind of driver call that allocates or frees memory."""

    min_steps = Threshold(
        3, "steps with these calls: once or twice is warm-up or an evaluation", TRIED_ON_TRACES
    )
    min_a_step = Threshold(
        1.0,
        "calls per step after the first step: a steady state has none",
        CACHING_ALLOCATOR,
    )

    verify = "Profile later steps again: they make no such calls."
    falsified_by = "no such calls some hundred steps later: then it was warm-up"
    assumptions = ("the GPU has other work as soon as the host is free",)

    looks_at: ClassVar[Mapping[str, str]] = {
        "allocation": "fewer than {min_steps} marked steps make such calls: they may be warm-up"
    }

    _calls: ClassVar[dict[str, str]]
    """Calls to count, as ``Analysis.allocations`` names them, and CUDA's name of each."""
    _label: ClassVar[str]
    _select: ClassVar[Select]
    """Calls that the fix removes."""

    def _summarize(self, calls: pl.DataFrame, steps: int) -> str:
        raise NotImplementedError

    def _locate_calls(self, a: Analysis, calls: pl.DataFrame) -> list[Location]:
        return costliest_places(a, row_numbers(calls["host"]), int_column(calls, "dur"))

    def check(self, a: Analysis) -> Outcomes:
        used = a.steps.used
        if a.device_id is None or used.height <= self.min_steps:
            return
        is_counted = pl.col("call").is_in(list(self._calls))
        calls = a.allocations.filter(is_counted & (pl.col("step") != used["index"][0]))
        steps = used.height - 1
        if calls.is_empty():
            if "none" in self.terms and (a.trace.cpu["kind"] == "runtime").any():
                amd = a.trace.meta.vendor == "amd"
                none_text = self.terms["none"].replace("cuda", "hip" if amd else "cuda")
                yield PassedCheck(text=f"{none_text} in the last {steps} steps")
            return
        rate = calls.height / steps
        if calls["step"].n_unique() < self.min_steps or rate < self.min_a_step:
            return
        yield Finding(
            summary=self._summarize(calls, steps),
            evidence=[
                self.compare(self._label, rate, "min_a_step", "count", per=a.per),
                self.compare(
                    "steps with these calls", calls["step"].n_unique(), "min_steps", "count"
                ),
                Evidence(
                    "host time in these calls", sum_column(calls["dur"]) / steps, "ns", per=a.per
                ),
            ],
            where=self._locate_calls(a, calls),
            edits=[Edit(op="remove", select=self._select)],
        )


class AllocationsInLoop(DriverAllocationRule):
    """The loop calls ``cudaMalloc`` or ``cudaFree`` after its first steps, when PyTorch's caching
    allocator cannot serve a tensor from memory that it holds. ``cudaFree`` waits for the whole GPU,
    ``cudaMalloc`` takes up to milliseconds, and the GPU idles meanwhile.

    Steady state: calls in at least three used steps, one per step or more on average, without the
    first used step, which may be warm-up. Usual causes are shapes that change from step to step,
    and ``empty_cache()`` in the loop (its own rule). Others are a peak so near to the capacity that
    blocks are freed and allocated again, and a caching allocator that is switched off. Pinned host
    allocations (``cudaHostAlloc``) have their own rule.

    The gain is that of a replay without these calls. A ``cudaMalloc`` while the GPU has work queued
    costs nothing, unless the host is late afterwards."""

    id = "allocations-in-loop"
    title = "The loop allocates GPU memory through the driver"
    knobs = ("expandable-segments",)
    found_in = ("traces/h100/points_max_split",)
    silent_in = SILENT_TRACES
    validation_note = (
        "silent where it must be: A100 and V100 training (no such call in six steps), AlexNet (24 "
        "cudaMalloc at the start). Fires on an H100 under max_split_size_mb:32, where batches vary"
    )
    references = (
        "https://pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf",
    )

    fix = (
        "Let the allocator's segments grow (expandable_segments), in place of settings such as "
        "max_split_size_mb. If memory is full, lower the peak first. Keep shapes the same from "
        "step to step: pad or bucket lengths."
    )
    code = EXPANDABLE
    verify = (
        "Profile later steps again: no cudaMalloc or cudaFree inside them, and "
        "torch.cuda.memory_stats()['num_alloc_retries'] stays 0."
    )
    confidence = 0.8

    max_emptied_steps = Threshold(
        0.5, "of the steps call empty_cache(), which has a rule of its own", TRIED_ON_TRACES
    )

    framework_advice = in_any_language(
        "Allocate once, before the loop, and reuse the memory, or take it from a pool.",
        cuda="Use cudaMallocAsync from a pool with a high release threshold in place of cudaMalloc "
        "and cudaFree, which make the whole GPU wait.",
        code="uint64_t all = UINT64_MAX;\n"
        "cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &all);\n"
        "cudaMallocAsync(&p, bytes, stream);",
        verify="Profile later steps again: no calls inside them allocate or free GPU memory.",
        terms={"none": "no cudaMalloc or cudaFree"},
    )

    _calls = {"malloc": "cudaMalloc", "free": "cudaFree"}
    _label = "allocation calls"
    terms: Mapping[str, str] = {"none": "no cudaMalloc or cudaFree"}
    _select = DRIVER_CALLS

    def check(self, a: Analysis) -> Outcomes:
        """Count the calls, unless ``empty_cache()`` in the loop is their cause."""
        if a.device_id is None:
            return
        emptied = frees_of_empty_cache(a)[0]["step"].n_unique()
        if emptied < max(self.min_steps, self.max_emptied_steps * a.step_count):
            yield from super().check(a)

    def _summarize(self, calls: pl.DataFrame, steps: int) -> str:
        by_call = dict(calls.group_by("call").len().iter_rows())
        rates = " and ".join(
            f"{by_call[call] / steps:.1f} {name}"
            for call, name in self._calls.items()
            if by_call.get(call)
        )
        count = calls["step"].n_unique()
        subject = "Each step calls" if count == steps else f"{count} of {steps} steps call"
        ns = t.format_duration(sum_column(calls["dur"]) / steps)
        return (
            f"{subject} the driver for memory after the warm-up: {rates} per step take {ns} on "
            "the host. cudaFree waits for the whole GPU, and cudaMalloc blocks the host."
        )

    def _locate_calls(self, a: Analysis, calls: pl.DataFrame) -> list[Location]:
        """Find the lines (else the ops) with most time in such calls."""
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
        return [
            locate_row(
                a,
                row["host"],
                op=row["op_name"] or row["name"],
                ts_ns=row["ts"],
                dur_ns=row["dur"],
                count=row["len"],
            )
            for row in top.iter_rows(named=True)
        ]

    @staticmethod
    def examples() -> Examples:
        b, warm, hidden, none, emptied = (TraceBuilder() for _ in range(5))
        for _ in emptied.steps(6):
            with emptied.op("aten::empty"):
                emptied.call("cudaMalloc", 600)
                emptied.call("cudaMalloc", 600)
            run_product(emptied, 1000)
            emptied.sync()
            emptied.call("cudaFree", 400)
            emptied.call("cudaFree", 400)
        for _ in b.steps(6):
            run_product(b, 1000)
            b.sync()
            with b.op("aten::empty"):
                b.call("cudaFree", 400)
                b.call("cudaMalloc", 600)
            run_product(b, 1000)
            b.sync()
        for step in warm.steps(6):
            if step < 2:
                warm.call("cudaMalloc", 1500)
            run_product(warm, 3000)
            warm.sync()
        for _ in hidden.steps(6):
            run_product(hidden, 5000)
            hidden.call("cudaMalloc", 600)
            run_product(hidden, 5000)
            hidden.sync()
        for _ in none.steps(6):
            run_product(none, 3000)
            none.sync()
        return {
            "a new size each step": b,
            "warm-up": (warm, "calls['step'].n_unique() < self.min_steps"),
            "the GPU has work queued": (hidden, "no gain"),
            "none": (none, "calls.is_empty()"),
            "empty_cache() in the loop": (emptied, "max_emptied_steps"),
        }


PIN_OPERATORS = r"^aten::_?pin_memory$"


class PinnedAllocationInLoop(DriverAllocationRule):
    """Pinned (page-locked) host memory is allocated in the middle of training. Each such call
    (``cudaHostAlloc``, ``cudaHostRegister``) locks pages one by one and takes milliseconds. In many
    drivers it also synchronizes with the GPU. PyTorch keeps pinned blocks for reuse, so no such
    call should be left after the first steps.

    Steady state: calls in at least three used steps, one per step or more on average, without the
    first used step. Usual causes are ``.pin_memory()`` on tensors whose size grows or changes from
    step to step, and manual calls of ``cudaHostRegister``. Another is blocks that are still in use
    because their copies wait.

    The gain is the GPU idle time that these calls cause: a call in a loader's thread, or while work
    is queued, costs nothing.

    PyTorch keeps the blocks, but ``.pin_memory()`` copies the whole batch into one each time, on
    the thread that calls it. Where the loop itself does so, and that takes a notable part of the
    step, the rule names the operator instead. This needs no driver call. The low end of the
    range keeps half of this time. A batch that is new in each step is still copied, into a
    buffer that stays."""

    id = "pinned-allocation-in-loop"
    title = "The loop allocates pinned host memory"
    found_in = ("traces/h100/pin_each_step",)
    silent_in = SILENT_TRACES
    validation_note = (
        "silent on A100 and V100 training (pinned copies, no such call). Fires on an H100 where "
        "each step pins its batch"
    )
    references = (
        "https://pytorch.org/tutorials/intermediate/pinmem_nonblock.html",
        "https://docs.nvidia.com/cuda/cuda-c-best-practices-guide/index.html#pinned-memory",
    )

    fix = (
        "Pin in the DataLoader (pin_memory=True). Or allocate one pinned buffer as large as the "
        "largest batch, and copy each batch into it."
    )
    code = STAGING_CODE
    verify = "Profile later steps again: no cudaHostAlloc inside them."
    confidence = 0.85
    min_share = Threshold(0.05, "of the step in pin_memory(), as for a loader", TENSORBOARD)
    min_copy_share = Threshold(
        0.5, "of pin_memory() is the copy: a buffer saves little", TRIED_ON_TRACES
    )
    remaining_pin_share = Factor(
        0.0, "of pin_memory() remains: the loader's thread pins, ahead", TRIED_ON_TRACES
    )
    worst_remaining_pin_share = Factor(
        0.5, "of it remains, at worst: the copy into a buffer that stays", TRIED_ON_TRACES
    )
    cases = {
        "pin_memory() in the loop": {
            "title": "Each step pins its batch again",
            "verify": "Profile again: no aten::pin_memory on the thread of the loop.",
            "falsified_by": "the same step time with one pinned batch that is used in each step",
            "assumptions": ("the loader's thread has the time to pin the next batch",),
        },
        "pin_memory() copies": {
            "fix": "Pin in the thread of a DataLoader with workers (pin_memory=True), or pin data "
            "that stays the same once, before the loop. A pinned buffer that the loop fills would "
            "save little: {copied:.0%} of pin_memory() is the copy.",
            "code": "# keep your other arguments\n"
            "loader = DataLoader(..., num_workers=2, pin_memory=True)\n"
            "for batch in loader:\n"
            "    x = batch.to(device, non_blocking=True)\n\n"
            "# or, for data that stays the same: once, before the loop\n"
            "batches = [batch.pin_memory() for batch in batches]",
        },
    }

    framework_advice = in_any_language(
        "Pin host memory once, before the loop, and reuse it: pinning takes far longer than the "
        "copy.",
        cuda="Call cudaHostAlloc or cudaHostRegister once, not in each iteration.",
    )

    _calls = {"host_alloc": "cudaHostAlloc"}
    _label = "pinned allocations"
    _select = Select(
        on="gap", cause=("allocation",), name=r"HostAlloc|MallocHost|HostRegister|AllocHost"
    )

    def _summarize(self, calls: pl.DataFrame, steps: int) -> str:
        count = t.count_noun(round(calls.height / steps), "allocation")
        return (
            f"The loop makes {count} of pinned host memory per step after the warm-up. Each takes "
            f"{t.format_duration(sum_column(calls['dur']) / calls.height)}."
        )

    def check(self, a: Analysis) -> Outcomes:
        """Count the driver's calls; without any, pinning that the loop does itself."""
        calls = list(super().check(a))
        yield from calls or self._check_pinning(a)

    def _check_pinning(self, a: Analysis) -> Outcomes:
        if a.device_id is None or a.step_count < self.min_steps:
            return
        cpu, main = a.trace.cpu, a.trace.main_thread
        if main is None:
            return
        is_pin = name_matches(cpu["name"], PIN_OPERATORS) & (cpu["thread"] == main)
        rows = rows_in_steps(a, np.flatnonzero(is_pin.fill_null(False).to_numpy()))
        pinning = intervals_of(cpu, rows)
        used = a.steps.used
        by_step = covered_length(used["ts"].to_numpy(), used["end"].to_numpy(), pinning)
        share = pinning.total / a.span_ns
        copies = rows_in_steps(a, np.flatnonzero((cpu["name"] == "aten::copy_").to_numpy()))
        copy_start = cpu["ts"].to_numpy()[copies]
        copying = union(copy_start, copy_start + cpu["dur"].to_numpy()[copies])
        copied = intersect(copying, pinning).total / max(pinning.total, 1)
        if (by_step > 0).sum() < max(self.min_steps, a.step_count / 2) or share < self.min_share:
            return
        yield Finding(
            summary="pin_memory() copies a batch into pinned memory on the thread of the loop, "
            f"for {of_step(a, pinning.total)}.",
            evidence=[
                amount_per_step(a, "host time in pin_memory()", pinning.total),
                self.compare("copying the batch, share of pin_memory()", copied, "min_copy_share"),
                self.compare("host time in pin_memory(), share", share, "min_share", per=a.per),
                self.compare(
                    "steps with pin_memory()", int((by_step > 0).sum()), "min_steps", "count"
                ),
            ],
            where=costliest_places(a, rows, top=1),
            edits=[
                scale_edit(
                    Select(on="host", kind=("op",), name=PIN_OPERATORS),
                    self.remaining_pin_share,
                    self.remaining_pin_share,
                    self.worst_remaining_pin_share,
                )
            ],
            **self.case("pin_memory() in the loop"),
            **(
                self.case("pin_memory() copies", copied=copied)
                if copied >= self.min_copy_share
                else {}
            ),
        )

    @staticmethod
    def examples() -> Examples:
        b, warm, hidden, device, rare, pins, small = (TraceBuilder() for _ in range(7))
        for builder, us in ((pins, 4000), (small, 100)):
            for _ in builder.steps(6):
                with builder.op("aten::pin_memory"), builder.op("aten::_pin_memory"):
                    builder.on_host("aten::copy_", us)
                builder.copy("HtoD", 8 << 20)
                builder.product(1000, 4, wait=True)
        for _ in b.steps(6):
            with b.python("train.py(40): train_step"), b.op("aten::_pin_memory"):
                b.call("cudaHostAlloc", 2500)
            b.copy("HtoD", 8 << 20)
            b.product(1000, 4, wait=True)
        for step in warm.steps(6):
            if step < 2:
                warm.call("cudaHostAlloc", 2500)
            warm.product(1000, 4, wait=True)
        for _ in hidden.steps(6):
            hidden.product(9000)
            hidden.call("cudaHostAlloc", 2500)
            hidden.product(9000, wait=True)
        for _ in device.steps(6):
            device.call("cudaMalloc", 2500)
            device.product(1000, 4, wait=True)
        for step in rare.steps(6):
            if step in (2, 4):
                for _ in range(4):
                    rare.call("cudaHostAlloc", 500)
            rare.product(1000, 4, wait=True)
        return {
            "a new buffer each step": b,
            "pin_memory() each step": pins,
            "a small batch is pinned": (small, "min_share"),
            "warm-up": (warm, "(by_step > 0).sum() <"),
            "the GPU has work queued": (hidden, "no gain"),
            "GPU memory": (device, "(by_step > 0).sum() <"),
            "two steps only": (rare, "min_steps"),
        }
