"""Activation checkpointing although memory is free."""

from __future__ import annotations

import numpy as np

from advisor.core.finding import Edit, Finding, Location, Outcomes, Select, SkippedCheck
from advisor.core.rule import Evidence, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.host.names import name_matches
from advisor.measure.memory.trace_memory import find_recompute
from advisor.replay.selection import rows_under
from advisor.rules.citations import CHECKPOINT, OURS, public_traces
from advisor.rules.common import amount_per_step, locate_row, of_each_step
from advisor.rules.kernel import kernel_common
from advisor.rules.memory.device_memory import GIB, measure_peaks, run_product
from advisor.testing import Examples, TraceBuilder

RECOMPUTE = r"torch/utils/checkpoint\.py\(\d+\): (\w+\.)*recompute_fn\b"
BACKWARD = r"^autograd::engine::evaluate_function|Backward"
REENTRANT = r"^CheckpointFunctionBackward$"


class RecomputeWithFreeMemory(Rule):
    """Activation checkpointing drops activations in the forward pass and recomputes them in the
    backward pass: about one more forward pass per step, in exchange for memory. Where a third of
    the memory stays free, part of that exchange gains nothing.

    Recomputed kernels are recognized by what launched them: a Python frame ``recompute_fn`` of
    ``torch/utils/checkpoint.py`` (``use_reentrant=False``, needs stacks), or the op
    ``CheckpointFunctionBackward`` outside the autograd nodes inside it (``use_reentrant=True``).
    The rule shows how much memory is free, not how much the activations need: turn checkpointing
    off for some blocks, look at the peak, and go on.
    """

    id = "recompute-with-free-memory"
    title = "Activation checkpointing recomputes although memory is free"
    silent_in = public_traces("b200_eager h100_bert_small_inference pairs/particle_batch128")
    validation_note = (
        "frames and operator as PyTorch 2.13 records them; has not fired on a real trace"
    )
    references = (
        "https://pytorch.org/docs/stable/checkpoint.html",
        "https://pytorch.org/blog/activation-checkpointing-techniques/",
    )

    min_share = Threshold(
        0.10, "of the step; full recomputation is about a quarter of it", CHECKPOINT
    )
    max_reserved = Threshold(0.70, "of capacity: above it the memory may be needed", OURS)

    fix = (
        "Turn checkpointing off, or checkpoint only every second block, and look at the peak. Or "
        "keep small outputs and recompute only large ones (selective checkpointing)."
    )
    code = (
        "# Hugging Face: model.gradient_checkpointing_disable()\n"
        "for i, block in enumerate(self.blocks):\n"
        "    if self.training and i % 2 == 0:      # was: every block\n"
        "        x = checkpoint(block, x, use_reentrant=False)\n"
        "    else:\n"
        "        x = block(x)"
    )
    verify = "torch.cuda.max_memory_reserved() stays below 90%, and the step is shorter."
    falsified_by = "a larger peak in another phase (evaluation, longer sequences)"
    assumptions = ("the activations fit into the free memory",)
    confidence = 0.75

    def check(self, a: Analysis) -> Outcomes:
        """Compare recomputed GPU time with the step, and peak memory with the capacity."""
        if a.device_id is None or not a.breakdown.compute.total:
            return
        training = name_matches(a.trace.cpu["name"], BACKWARD).any()
        if not training:
            return  # nothing to recompute for
        table = find_recompute(a)
        if table is None:
            yield SkippedCheck(
                what="activation recomputation",
                why="the trace has no Python stacks around the backward pass",
                record="with_stack=True",
            )
            return
        recomputed = int(table["busy"].sum())
        share = recomputed / a.span_ns
        if share < self.min_share:
            return
        reserved, _, capacity = measure_peaks(a)
        if reserved is None or not capacity:
            yield SkippedCheck(
                what=f"whether free memory could save recomputation ({share:.0%} of the step)",
                why="allocator events are not recorded"
                if reserved is None
                else "the trace does not record how much memory the GPU has",
                record="profile_memory=True",
            )
            return
        full = reserved / capacity
        if full >= self.max_reserved:
            return
        free = capacity - reserved
        select, factor = self._select(a)
        yield Finding(
            summary=(
                f"Recomputing activations takes {share:.0%} {of_each_step(a)}, while "
                f"{free / GIB:.1f} "
                f"GiB ({1 - full:.0%}) of GPU memory stay free."
            ),
            evidence=[
                self.compare("recomputation, share", share, "min_share", per=a.per),
                amount_per_step(a, "recomputation", recomputed),
                Evidence("peak reserved", reserved, "bytes"),
                self.compare("peak reserved, share of capacity", full, "max_reserved"),
            ],
            where=self._where(a),
            edits=[
                Edit(op="remove", select=select)
                if factor is None
                else Edit(op="scale", select=select, factor=factor)
            ],
        )

    def _select(self, a: Analysis) -> tuple[Select, float | None]:
        """The recomputed kernels; and, where the op holds backward work too, what stays of it."""
        if (kernel_common.rows_launched_under(a, RECOMPUTE) & kernel_common.kernel_rows(a)).any():
            return Select(on="gpu", under=RECOMPUTE), None
        total = kernel_common.summed_duration(
            a, kernel_common.rows_launched_under(a, REENTRANT) & a.in_window
        )
        table = find_recompute(a)
        again = 0 if table is None else int(table["dur"].sum())
        return Select(on="gpu", under=REENTRANT), max(0.0, 1 - again / max(1, total))

    def _where(self, a: Analysis) -> list[Location]:
        """The user's line that calls ``checkpoint``."""
        cpu = a.trace.cpu
        named = rows_under(a, r"torch/utils/checkpoint\.py\(\d+\): checkpoint$")[:-1]
        rows = np.flatnonzero(named & (cpu["kind"] == "python").to_numpy())
        if not len(rows):
            rows = np.flatnonzero(rows_under(a, REENTRANT)[:-1])
        if not len(rows):
            return []
        first = int(rows[0])
        ts, dur = cpu["ts"][first], cpu["dur"][first]
        return [locate_row(a, first, op="torch.utils.checkpoint", ts_ns=ts, dur_ns=dur)]

    @staticmethod
    def examples() -> Examples:
        return {
            "use_reentrant=False": _step(40_000_000_000),
            "use_reentrant=True": _step(40_000_000_000, reentrant=True),
            "memory is full": (_step(78_000_000_000), "max_reserved"),
            "memory is not recorded": (_step(None), "reserved is None"),
            "one small block": (_step(40_000_000_000, us=100), "min_share"),
        }


def _step(reserved: int | None, us: float = 1000, *, reentrant: bool = False) -> TraceBuilder:
    b = TraceBuilder()

    def backward() -> None:
        with b.op("autograd::engine::evaluate_function: MmBackward0"):
            run_product(b, 2000)

    for _ in b.steps():
        if reserved is not None:
            b.memory(1 << 20, reserved - (1 << 30), reserved)
        with (
            b.python("train.py(30): forward"),
            b.python("torch/utils/checkpoint.py(354): checkpoint"),
        ):
            run_product(b, 1000)
        if reentrant:
            node = "autograd::engine::evaluate_function: CheckpointFunctionBackward"
            with b.op(node), b.op("CheckpointFunctionBackward"):
                run_product(b, us)
                backward()
        else:
            with b.op("autograd::engine::evaluate_function: MmBackward0"):
                with (
                    b.python("torch/utils/checkpoint.py(1165): unpack_hook"),
                    b.python("torch/utils/checkpoint.py(1657): recompute_fn"),
                ):
                    run_product(b, us)
                run_product(b, 2000)
        b.sync()
    return b
