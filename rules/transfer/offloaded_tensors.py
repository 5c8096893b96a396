"""Weights or activations that live on the host and are copied in each step (offloading)."""

import polars as pl

from advisor.core import text as t
from advisor.core.finding import Finding, Outcomes, Select
from advisor.core.intervals import intersect
from advisor.core.rule import Evidence, Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.memory.trace_memory import measure_held
from advisor.rules.support.citations import CHOSEN, ENGINE_FLOOR, PINNED_BLOG, SILENT_TRACES
from advisor.rules.support.common import (
    MOSTLY_OFFLOADED,
    amount_per_step,
    busy_intervals,
    device_places,
    of_step,
    per_step,
    scale_edit,
    sum_column,
)
from advisor.rules.support.host_waits import COPY_CALLS, async_edit, select_blocking_calls
from advisor.testing import Examples, TraceBuilder

MAX_RESERVED = 0.9
"""Maximum share of GPU memory in use with the tensors on the GPU, at which they certainly fit."""


class OffloadedTensors(Rule):
    """Tensors that live on the host are copied to the GPU in each step, between its kernels. CPU
    offload does so with weights: accelerate's ``device_map``, diffusers'
    ``enable_model_cpu_offload``. ``save_on_cpu`` does so with activations. The forward pass copies
    them to the host, and the backward pass back.

    Inputs are copied before the kernels of a step. Weights come between them, and in the same sizes
    in each step. Uploads of one size alone may be micro-batches or tiles, and few bytes may be
    inputs in many parts: both are not reported.
    Activations come back in the sizes that left.

    Tensors that stay on the GPU need no copies. Where memory lacks, copies from pinned memory on a
    separate stream can hide behind compute, as far as there is compute."""

    id = "offloaded-tensors"
    title = "Weights are copied to the GPU again in each step"
    silent_in = SILENT_TRACES
    references = (
        "https://huggingface.co/docs/accelerate/concept_guides/big_model_inference",
        "https://huggingface.co/docs/diffusers/optimization/memory",
        "https://docs.pytorch.org/docs/stable/autograd.html#torch.autograd.graph.save_on_cpu",
    )

    min_share = Threshold(0.02, "of the step in exposed copies of these tensors", ENGINE_FLOOR)
    min_offloaded_share = Threshold(
        MOSTLY_OFFLOADED, "of the exposed copies between host and GPU", CHOSEN
    )
    pinned_speedup = Factor(2.0, "times as fast, copies from pinned memory", PINNED_BLOG)
    worst_pinned_speedup = Factor(1.15, "times as fast, where the host is fast", PINNED_BLOG)

    fix = (
        "Keep the weights on the GPU. If they do not fit, store them in fewer bits, or offload "
        "fewer layers. Copy what stays on the host ahead of its use, from pinned memory on a "
        "separate stream (diffusers: enable_group_offload with use_stream=True)."
    )
    code = (
        "# in place of CPU offload: all weights on the GPU, in 16 bits\n"
        "model = model.to(device, torch.bfloat16)"
    )
    cases = {
        "activations": {
            "title": "Activations are copied to the host and back in each step",
            "fix": "Keep the activations on the GPU. If they do not fit, recompute the cheap ones "
            "(checkpointing) in place of copying them. Copy what must leave to pinned memory, on a "
            "separate stream.",
            "code": "# in place of save_on_cpu(): recompute the block\n"
            "from torch.utils.checkpoint import checkpoint\n"
            "x = checkpoint(block, x, use_reentrant=False)",
            "assumptions": (
                "tensors that stay on the GPU cost no copies at best; recomputing them takes "
                "compute that is not in the gain",
            ),
        }
    }
    verify = "Profile again: no copies between the kernels of a step."
    falsified_by = "other contents of the copied tensors in each step"
    assumptions = (
        "weights that stay on the GPU cost no copies at best; pinned copies are "
        "{pinned_speedup:g} times as fast ({worst_pinned_speedup:g} at worst)",
    )
    confidence = 0.8

    def check(self, a: Analysis) -> Outcomes:
        if a.device_id is None or a.copies.is_empty():
            return
        offloaded = a.offloaded
        if offloaded is None or offloaded.share < self.min_offloaded_share:
            return
        copies = offloaded.copies
        busy = busy_intervals(a, copies)
        exposed = intersect(busy, a.breakdown.copies).total
        if exposed < self.min_share * a.span_ns:
            return
        hideable = max(0, a.breakdown.busy.total - exposed) / max(1, busy.total)
        is_pageable = (copies["memory"] == "pageable").all()
        size = sum_column(copies["bytes"]) / a.step_count
        case = self.case("activations") if offloaded.kind == "activations" else {}
        blocking = select_blocking_calls(a, pl.col("direction").is_in(["HtoD", "DtoH"]))
        fits, memory = _compare_memory(a, size)
        yield Finding(
            summary=(
                f"{t.count_noun(round(copies.height / a.step_count), 'copy')}{per_step(a)} between "
                f"kernels, {t.format_bytes(size)} in all, cost "
                f"{of_step(a, exposed)}: the same sizes in each step."
            ),
            evidence=[
                amount_per_step(a, "exposed copy time", exposed),
                self.compare_share(a, "exposed copy time", exposed),
                amount_per_step(a, "bytes copied", sum_column(copies["bytes"]), "bytes"),
                self.compare(
                    "their share of exposed copies", offloaded.share, "min_offloaded_share"
                ),
                *memory,
            ],
            where=device_places(a, copies),
            edits=[
                scale_edit(
                    Select(on="gpu", kind=("memcpy",), copy=("HtoD", "DtoH")),
                    *self._remaining_shares(hideable, fits=fits, is_pageable=is_pageable),
                ),
                *([async_edit(a, blocking, *COPY_CALLS)] if blocking.total else []),
            ],
            **case,
        )

    def _remaining_shares(
        self, hideable: float, *, fits: bool, is_pageable: bool
    ) -> tuple[float, float, float]:
        """Return the share of the copies that is left: expected, at best, at worst. ``hideable``:
        time of other work, as a share of the copies' time."""
        pinned = 1 / self.pinned_speedup if is_pageable else 1.0
        worst = 1 / self.worst_pinned_speedup if is_pageable else max(0.0, 1 - 0.5 * hideable)
        expected = 0.0 if fits else max(0.0, pinned - hideable)
        return expected, 0.0, max(expected, worst)

    @staticmethod
    def examples() -> Examples:
        return {
            "weights": _build_inference([4, 16, 4, 64]),
            "weights in pinned memory": _build_inference([4, 16, 4, 64], pinned=True),
            "activations": _build_training(back=True),
            "micro-batches": (_build_inference([16]), "offloaded is None"),
            "inputs in many parts": (_build_inference([1, 2, 3, 4]), "offloaded is None"),
            "few layers": (_build_inference([4, 16, 64], layers=1), "offloaded is None"),
            "results to the host": (_build_training(back=False), "offloaded is None"),
        }


def _compare_memory(a: Analysis, size: float) -> tuple[bool, list[Evidence]]:
    """Return whether ``size`` more bytes certainly fit on the GPU, and the evidence."""
    used_bytes, capacity = measure_held(a)
    if used_bytes is None or not capacity:
        return False, []
    return used_bytes + size <= MAX_RESERVED * capacity, [
        Evidence("GPU memory that stays free", max(0, capacity - used_bytes), "bytes"),
        Evidence("bytes copied to it per step", size, "bytes"),
    ]


def _build_inference(sizes: list[int], *, layers: int = 4, pinned: bool = False) -> TraceBuilder:
    """Build steps of layers whose weights, of these sizes in MiB, are copied first."""
    b = TraceBuilder()
    for _ in b.steps():
        for size in sizes * layers:
            b.copy("HtoD", size << 20, pinned=pinned, blocking=not pinned)
            b.product(100)
        b.sync()
    return b


def _build_training(*, back: bool) -> TraceBuilder:
    """Build a forward pass that copies its activations to the host, and a backward pass that copies
    them back."""
    b = TraceBuilder()
    for _ in b.steps():
        for _ in range(8):
            b.product(500)
            b.copy("DtoH", 32 << 20)
        for _ in range(8):
            with b.op("autograd::engine::evaluate_function: AddmmBackward0"):
                if back:
                    b.copy("HtoD", 32 << 20)
                b.product(1000)
        b.sync()
    return b
