"""Pinned host memory is allocated in the training loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import polars as pl

from advisor.core import text as t
from advisor.core.finding import Edit, Evidence, Finding, Outcome, Rule, Select, Threshold
from advisor.measure import Analysis
from advisor.rules.common import column, places, rows, total
from advisor.rules.elsewhere import in_any_language
from advisor.rules.sources import CACHING_ALLOCATOR, OURS
from advisor.testing import TraceBuilder

_CALLS = r"HostAlloc|MallocHost|HostRegister|AllocHost"


class PinnedAllocationInLoop(Rule):
    """Pinned (page-locked) host memory is allocated in the middle of training. Each such call
    (``cudaHostAlloc``, ``cudaHostRegister``) locks pages one by one and takes milliseconds; it also
    synchronises with the device in many drivers. PyTorch keeps pinned blocks for reuse, so after
    the first steps no such call should be left.

    Steady state: calls in at least three used steps, one a step or more on average, the first used
    step left out. Usual causes are ``.pin_memory()`` on tensors whose size grows or changes from
    step to step, blocks that are still in use because their copies wait, and ``cudaHostRegister``
    called by hand.

    The price is the idle time of the device that is blamed on these calls: one in a loader's thread
    or under queued work costs nothing.
    """

    id = "pinned-allocation-in-loop"
    title = "Pinned host memory is allocated in the loop"
    category = "memory"
    silent_in = (
        "traces/a100_train_6steps",
        "traces/v100_train_copy_heavy",
        "traces/two_ranks_rank0",
        "traces/b200_eager",
    )
    validated_on = (
        "silent on A100 and V100 training (pinned copies, no such call); never seen to fire"
    )
    references = (
        "https://pytorch.org/tutorials/intermediate/pinmem_nonblock.html",
        "https://docs.nvidia.com/cuda/cuda-c-best-practices-guide/index.html#pinned-memory",
    )

    min_steps = Threshold(
        3, "steps with such calls: once or twice is warm-up or an evaluation", OURS
    )
    min_a_step = Threshold(
        1.0,
        "calls a step, over the steps after the first: in steady state pinned blocks are reused",
        CACHING_ALLOCATOR,
    )

    fix = (
        "Pin in the DataLoader (pin_memory=True), or allocate the pinned buffer once, as "
        "large as the largest batch, and copy each batch into it."
    )
    code = (
        "staging = torch.empty(max_batch_shape, dtype=dtype, pin_memory=True)   # once\n"
        "for batch in loader:\n"
        "    copied.synchronize()                     # the copy of the step before\n"
        "    part = staging[: len(batch)].copy_(batch)\n"
        "    x = part.to(device, non_blocking=True)\n"
        "    copied.record()                          # copied = torch.cuda.Event()"
    )
    verify = "Profile later steps again: no cudaHostAlloc inside them."
    falsified_by = "the same window some hundred steps later has no such calls: then it was warm-up"
    assumptions = ("the device has other work as soon as the host is not held",)
    confidence = 0.85

    elsewhere: ClassVar = in_any_language(
        "Pin host memory once, before the loop, and use it again: pinning takes far longer than "
        "the copy.",
        cuda="cudaHostAlloc or cudaHostRegister once; not in each iteration.",
    )

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Count pinned allocations in the steps after the first."""
        used = a.steps.used
        if a.device_id is None or used.height <= self.min_steps:
            return
        calls = a.allocations.filter(
            (pl.col("call") == "host_alloc") & (pl.col("step") != used["index"][0])
        )
        steps = used.height - 1
        rate = calls.height / steps
        if calls["step"].n_unique() < self.min_steps or rate < self.min_a_step:
            return
        time = total(calls["dur"])
        yield Finding(
            summary=(
                f"{t.count_noun(round(rate), 'allocation')} of pinned host memory a step, "
                f"{t.format_duration(time / calls.height)} each, although the warm-up is over."
            ),
            evidence=[
                Evidence("pinned allocations", rate, "count", *self.limit("min_a_step"), per=a.per),
                Evidence(
                    "steps with such calls",
                    calls["step"].n_unique(),
                    "count",
                    *self.limit("min_steps"),
                ),
                Evidence("host time in these calls", time / steps, "ns", per=a.per),
            ],
            where=places(a, rows(calls["host"]), column(calls, "dur")),
            edits=[Edit(op="remove", select=Select(on="gap", cause=("allocation",), name=_CALLS))],
        )

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """A new pinned buffer in every step, while the device waits."""
        b = TraceBuilder()
        for _ in range(6):
            with b.step():
                with b.python("train.py(40): train_step"), b.op("aten::_pin_memory"):
                    b.call("cudaHostAlloc", 2500)
                b.copy("HtoD", 8 << 20)
                _train(b)
        return {"a new buffer each step": b}

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """Warm-up only; under queued work; device memory; two steps of five."""
        warm, hidden, device, rare = (TraceBuilder() for _ in range(4))
        for step in range(6):
            with warm.step():
                if step < 2:
                    warm.call("cudaHostAlloc", 2500)
                _train(warm)
            with hidden.step():
                hidden.run("aten::mm", "ampere_sgemm_128x64_nn", 9000)
                hidden.call("cudaHostAlloc", 2500)
                hidden.run("aten::mm", "ampere_sgemm_128x64_nn", 9000)
                hidden.sync()
            with device.step():
                device.call("cudaMalloc", 2500)
                _train(device)
            with rare.step():
                if step in (2, 4):
                    for _ in range(4):
                        rare.call("cudaHostAlloc", 500)
                _train(rare)
        return {
            "warm-up": (warm, "calls['step'].n_unique() < self.min_steps"),
            "the device has work queued": (hidden, "worth"),
            "device memory": (device, "calls['step'].n_unique() < self.min_steps"),
            "two steps only": (rare, "min_steps"),
        }


def _train(b: TraceBuilder) -> None:
    b.run("aten::mm", "ampere_sgemm_128x64_nn", 1000, times=4)
    b.sync()
