"""Activation checkpointing recomputes although memory is free."""

import numpy as np

from advisor.core.finding import Edit, Finding, Location, Outcomes, Select, SkippedCheck
from advisor.core.intervals import covered_length, intersect
from advisor.core.rule import Evidence, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.host.names import name_matches
from advisor.measure.host.stacks import NODE_PREFIX
from advisor.measure.memory.trace_memory import REENTRANT, find_recompute, measure_held
from advisor.replay.selection import mask_under
from advisor.rules.support.citations import CHECKPOINT, TRIED_ON_TRACES, public_traces
from advisor.rules.support.common import (
    TRANSFORMERS,
    amount_per_step,
    locate_row,
    of_step,
    remove_at,
    runs_code_of,
    scale_edit,
)
from advisor.rules.support.device_memory import GIB, run_product, skip_without_events
from advisor.testing import Examples, TraceBuilder

BACKWARD_NODES = r"^autograd::engine::evaluate_function|Backward"


class RecomputeWithFreeMemory(Rule):
    """Activation checkpointing drops activations in the forward pass and recomputes them in the
    backward pass. That is about one more forward pass per step, in exchange for memory. Where a
    third of the memory stays free, part of that exchange gains nothing.

    The rule recognizes recomputed kernels by what launched them. With ``use_reentrant=False`` and
    stacks that is a Python frame ``recompute_fn`` of ``torch/utils/checkpoint.py``. Without stacks,
    forward operators inside a node of PyTorch's own derivatives show it. The node asked for a saved
    tensor. With ``use_reentrant=True`` it is the op ``CheckpointFunctionBackward`` outside the
    autograd nodes inside it. The gain is that of a replay without these kernels and the host time
    of their launches. The hooks that pack and unpack each saved tensor in Python are not recorded;
    the high end includes all idle time of Python. The rule shows how much memory is free, not how
    much the activations need. Turn checkpointing off for some blocks, look at the peak, and
    continue. On a CPU the free memory is not recorded, and recomputation is reported without it."""

    id = "recompute-with-free-memory"
    title = "Activation checkpointing recomputes although memory is free"
    training_only = True
    found_in = ("traces/h100/checkpointed",)
    silent_in = public_traces("b200_eager h100_bert_small_inference pairs/particle_batch128")
    validation_note = (
        "frames and operator as PyTorch 2.13 records them. Fires without stacks on an H100, whose "
        "step without checkpointing took 78 ms instead of 134"
    )
    references = (
        "https://pytorch.org/docs/stable/checkpoint.html",
        "https://pytorch.org/blog/activation-checkpointing-techniques/",
    )

    min_share = Threshold(
        0.10, "of the step; full recomputation is about a quarter of it", CHECKPOINT
    )
    min_host_share = Threshold(
        0.22, "of the step on a CPU, where a part may be recomputed for its memory", CHECKPOINT
    )
    max_reserved = Threshold(
        0.70, "of capacity: above it the memory may be needed", TRIED_ON_TRACES
    )

    fix = (
        "Turn checkpointing off, or checkpoint only every second block, and check the peak of "
        "memory. Or "
        "keep small outputs and recompute only large ones (selective checkpointing)."
    )
    code = (
        "for i, block in enumerate(self.blocks):\n"
        "    if self.training and i % 2 == 0:      # was: every block\n"
        "        x = checkpoint(block, x, use_reentrant=False)\n"
        "    else:\n"
        "        x = block(x)"
    )
    verify = "torch.cuda.max_memory_reserved() stays below 90%, and the step is shorter."
    falsified_by = "a larger peak in another phase (evaluation, longer sequences)"
    assumptions = (
        "the activations fit into the free memory",
        "hooks that pack and unpack saved tensors cost nothing: they are not recorded (at best "
        "they take all Python time between operators)",
    )
    confidence = 0.75
    cases = {
        "transformers' own blocks": {
            "fix": "Turn checkpointing off, and check the peak of memory. Where it does not fit, "
            "recompute less: a smaller batch, or checkpoint blocks of your own choice.",
            "code": "model.gradient_checkpointing_disable()\n"
            "# or leave gradient_checkpointing=True out of TrainingArguments",
        },
        "on a CPU": {
            "title": "Activation checkpointing recomputes the forward pass",
            "verify": "Record again: the step is shorter, and the host's memory is not full.",
        },
    }

    def check(self, a: Analysis) -> Outcomes:
        if a.device_id is None:
            share = intersect(a.recompute_time, a.spans).total / max(1, a.span_ns)
            if not a.trains_on_host or share < self.min_host_share:
                return
            yield self._report_host(a, share)
            return
        if not a.breakdown.compute.total:
            return
        training = name_matches(a.trace.cpu["name"], BACKWARD_NODES).any()
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
        launching = intersect(a.recompute_time, a.breakdown.idle).total
        recomputed = int(table["busy"].sum()) + launching
        share = recomputed / a.span_ns
        if share < self.min_share:
            return
        reserved, capacity = measure_held(a)
        subject = f"whether free memory could save recomputation ({share:.0%} of the step)"
        if reserved is None:
            yield skip_without_events(a, subject)
            return
        if not capacity:
            why = "the trace does not record how much memory the GPU has"
            yield SkippedCheck(what=subject, why=why, record="profile_memory=True")
            return
        reserved_share = reserved / capacity
        if reserved_share >= self.max_reserved:
            return
        free_bytes = capacity - reserved
        yield Finding(
            summary=(
                f"Recomputing activations takes {of_step(a, recomputed)}, while "
                f"{free_bytes / GIB:.1f} GiB ({1 - reserved_share:.0%}) of GPU memory stay free."
            ),
            evidence=[
                self.compare("recomputation, share", share, "min_share", per=a.per),
                amount_per_step(a, "recomputation", recomputed),
                amount_per_step(a, "GPU idle while the recomputation is launched", launching),
                Evidence("peak reserved", reserved, "bytes"),
                self.compare("peak reserved, share of capacity", reserved_share, "max_reserved"),
            ],
            where=self._locate_checkpoint(a),
            edits=[
                *remove_at("recompute", gaps=True),
                # at best, all Python between operators packs and unpacks tensors
                scale_edit(Select(on="gap", cause=("python", "unknown")), 1.0, 0.0, 1.0),
            ],
            **(self.case("transformers' own blocks") if runs_code_of(a, TRANSFORMERS) else {}),
        )

    def _report_host(self, a: Analysis, share: float) -> Finding:
        """Report recomputation of a training on the CPU, whose free memory is not recorded."""
        recomputed = share * a.span_ns
        return Finding(
            summary=f"Recomputing activations takes {of_step(a, recomputed)}.",
            evidence=[
                self.compare("recomputation, share", share, "min_host_share", per=a.per),
                amount_per_step(a, "recomputation", recomputed),
            ],
            where=self._locate_checkpoint(a),
            edits=[Edit(op="remove", select=Select(on="host", at="recompute"))],
            **self.case("on a CPU"),
            **(self.case("transformers' own blocks") if runs_code_of(a, TRANSFORMERS) else {}),
        )

    def _locate_checkpoint(self, a: Analysis) -> list[Location]:
        """Find the user's line that calls ``checkpoint``."""
        cpu = a.trace.cpu
        is_checkpoint = mask_under(a, r"torch/utils/checkpoint\.py\(\d+\): checkpoint$")[:-1]
        rows = np.flatnonzero(is_checkpoint & (cpu["kind"] == "python").to_numpy())
        if not len(rows):
            rows = np.flatnonzero(mask_under(a, REENTRANT)[:-1])
        if not len(rows):
            ts = cpu["ts"].to_numpy()
            in_recompute = covered_length(ts, ts + 1, a.recompute_time) > 0
            rows = np.flatnonzero(in_recompute & (cpu["kind"] == "op").to_numpy())
        if not len(rows):
            return []
        first_row = int(rows[0])
        ts, dur = cpu["ts"][first_row], cpu["dur"][first_row]
        return [locate_row(a, first_row, op="torch.utils.checkpoint", ts_ns=ts, dur_ns=dur)]

    @staticmethod
    def examples() -> Examples:
        return {
            "use_reentrant=False": _build_step(40_000_000_000),
            "use_reentrant=True": _build_step(40_000_000_000, reentrant=True),
            "on a CPU": _build_host_step(15),
            "a short block on a CPU": (_build_host_step(8), "share < self.min_host_share"),
            "memory is full": (_build_step(78_000_000_000), "max_reserved"),
            "memory is not recorded": (_build_step(None), "reserved is None"),
            "use_reentrant=False, without stacks": _build_step_without_stacks(),
            "one small block": (_build_step(40_000_000_000, us=100), "min_share"),
        }


def _build_step(reserved: int | None, us: float = 1000, *, reentrant: bool = False) -> TraceBuilder:
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


def _build_step_without_stacks() -> TraceBuilder:
    b = TraceBuilder()
    gemm, shape = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_nn", [[4096, 4096], [4096, 4096]]

    def node(*, recomputes: bool) -> None:
        name = "AddmmBackward0"
        with b.op(f"autograd::engine::evaluate_function: {name}"), b.op(name):
            if recomputes:
                for op in ("aten::layer_norm", "aten::addmm", "aten::gelu"):
                    b.run(op, gemm, 500, shape)
            b.run("aten::mm", gemm, 500, shape, times=2)

    for _ in b.steps():
        b.memory(1 << 20, 39_000_000_000, 40_000_000_000)
        run_product(b, 1000)
        for _ in range(4):
            node(recomputes=True)
            for _ in range(3):
                node(recomputes=False)
        b.sync()
    return b


def _build_host_step(ms: float) -> TraceBuilder:
    b = TraceBuilder(None)
    shapes, node = [[64, 64], [64, 64]], f"{NODE_PREFIX}CheckpointFunctionBackward"
    for _ in b.steps():
        b.on_host("aten::linear", 20_000, shapes)
        with b.op(node), b.op("CheckpointFunctionBackward"):
            b.on_host("aten::linear", 1000 * ms, shapes)
            b.on_host(f"{NODE_PREFIX}AddmmBackward0", 20_000)
        b.sync()
    return b
