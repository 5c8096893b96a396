"""The loss over a large vocabulary holds several copies of the logits."""

import numpy as np

from advisor.core import text as t
from advisor.core.auxiliary_inputs import SNAPSHOT
from advisor.core.finding import Finding, Outcomes, SkippedCheck, impact_memory
from advisor.core.rule import Evidence, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.shapes import OpInputs
from advisor.measure.host.names import name_matches
from advisor.measure.memory.memory_savings import find_logits, find_savings
from advisor.measure.memory.peak_memory import PeakMemory
from advisor.measure.memory.trace_memory import measure_held, measure_peaks
from advisor.measure.steps.steps import rows_in_steps
from advisor.replay.selection import mask_launched_under
from advisor.rules.support import kernel_work
from advisor.rules.support.citations import (
    CHOSEN,
    LLAMA,
    PEAKS,
    SILENT_TRACES,
    TRIED_ON_TRACES,
    public_traces,
)
from advisor.rules.support.common import amount_per_step, costliest_places
from advisor.rules.support.device_memory import locate_allocation, snapshot_example
from advisor.testing import Examples, TraceBuilder

_LOG_SOFTMAX = r"^aten::_log_softmax$"
_LOSS_OPERATORS = r"^aten::(?:_log_softmax|nll_loss|cross_entropy_loss)"
_LOG_SOFTMAX_BACKWARD = r"^aten::_log_softmax_backward_data$"


def _recorded_peak(a: Analysis) -> int | None:
    """Return the largest peak of the run's steps, bytes, or ``None`` if it was not recorded."""
    peaks = np.zeros(0) if a.run_steps is None else a.run_steps.column("peak")
    peaks = peaks[~np.isnan(peaks)]
    return int(peaks.max()) or None if len(peaks) else None


class HugeVocabulary(Rule):
    """A language model's cross entropy makes a log-softmax as large as the logits (tokens x
    vocabulary). It keeps this tensor for the backward pass, and makes a gradient of the same size
    there. With vocabularies of 32,000 and more these can be the largest tensors of the whole step,
    and decide the largest batch. In chunks, or fused with the last linear layer, none of them has
    to exist in full.

    The rule looks at ``aten::_log_softmax`` over the last dimension in training (its backward is in
    the trace). It counts when one call's tensor takes a tenth of the peak memory, of the trace or
    of the recorded run. Where no peak is recorded, it is a tenth of the GPU's memory. Where half of
    the GPU's memory is free at the peak, freeing more has no use. The memory named is the
    log-softmax and one gradient. The logits themselves, and an upcast to fp32 before, come on top.

    The rule needs shapes. A loss that is already computed in chunks is not reported.

    A memory snapshot shows the same without shapes, alone or with a trace. It has the blocks
    that the loss held at the peak or when memory ran out. Others have the same or half the size.
    It does not show the vocabulary, so it may be a loss over the classes of pixels as well.
    Chunks help there too."""

    id = "huge-vocabulary"
    title = "The loss keeps several copies of the logits in memory"
    training_only = True
    auxiliary_inputs = (SNAPSHOT,)
    found_in = public_traces("memory/h100_training")
    silent_in = SILENT_TRACES
    validation_note = (
        "a snapshot of a loss over 16,000 classes. In traces, operators, shapes and arguments as "
        "PyTorch 2.13 records them"
    )
    references = ("https://github.com/linkedin/Liger-Kernel", "https://arxiv.org/abs/2411.09009")

    min_vocabulary = Threshold(
        32000,
        "tokens: with fewer than LLaMA, the logits are seldom among the largest tensors",
        LLAMA,
    )
    min_asking_ns = Threshold(
        1_000_000, "ns of such a call: at 2 TB/s this reads and writes 1 GiB", PEAKS
    )
    min_memory = Threshold(0.10, "of the peak, for one call's tensor", TRIED_ON_TRACES)
    min_used_memory_share = Threshold(
        0.5,
        "of the GPU's memory at the peak: with more of it free, savings have no use",
        CHOSEN,
    )

    fix = (
        "Fuse the last linear layer and the loss (Liger Kernel, cut cross entropy). That makes "
        "the logits in chunks and keeps only their gradient with respect to the input. Or compute "
        "the loss in chunks of tokens under checkpoint."
    )
    code = (
        "# the loss without whole logits: pip install liger-kernel\n"
        "from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss\n"
        "loss = LigerFusedLinearCrossEntropyLoss()(\n"
        "    head.weight, hidden.flatten(0, -2), target.flatten(), head.bias)"
    )
    verify = "torch.cuda.max_memory_allocated() falls; the loss stays the same."
    falsified_by = "torch.cuda.memory._snapshot() shows the peak elsewhere"
    assumptions = ("memory peaks at the loss, where all activations are alive",)
    confidence = 0.7
    cases = {
        "as a snapshot shows it": {
            "title": "The loss keeps several copies of the logits in memory",
            "assumptions": ("the loss can be computed in eight pieces, one at a time",),
            "falsified_by": "blocks of that size that belong to something else",
            "confidence": 0.8,
        }
    }

    def check(self, a: Analysis) -> Outcomes:
        outcomes = list(self._check_trace(a))
        in_trace = any(isinstance(outcome, Finding) for outcome in outcomes)
        snapshots = [] if in_trace else [self._check_snapshot(peak) for peak in a.peak_memories]
        yield from [finding for finding in snapshots if finding is not None] or outcomes

    def _check_snapshot(self, peak: PeakMemory) -> Finding | None:
        logits = find_logits(peak)
        saved = {way.name: way.bytes for way in find_savings(peak)}.get("smaller logits")
        if logits is None or not saved or logits.largest < self.min_memory * max(peak.allocated, 1):
            return None
        share = logits.largest / max(peak.allocated, 1)
        when = "when memory ran out" if peak.history.failed_event is not None else "at the peak"
        return Finding(
            summary=(
                f"The loss kept {t.count_noun(logits.blocks, 'tensor')} about as large as the "
                f"logits {when}: {t.format_bytes(logits.bytes)} of the "
                f"{t.format_bytes(peak.allocated)} in tensors."
            ),
            evidence=[
                Evidence("largest block of the loss", logits.largest, "bytes"),
                self.compare(
                    "blocks of the loss, share of the memory in tensors", share, "min_memory"
                ),
                Evidence("blocks of its size, or half of it", logits.blocks, "count"),
                Evidence("memory in these blocks", logits.bytes, "bytes"),
            ],
            where=locate_allocation(logits.where, logits.blocks),
            impact=impact_memory(saved, "the snapshot's peak, with one piece in eight at a time"),
            **self.case("as a snapshot shows it"),
        )

    def _check_trace(self, a: Analysis) -> Outcomes:
        cpu = a.trace.cpu
        if a.device_id is None or not name_matches(cpu["name"], _LOG_SOFTMAX_BACKWARD).any():
            return
        calls = rows_in_steps(a, np.flatnonzero(name_matches(cpu["name"], _LOG_SOFTMAX).to_numpy()))
        if not len(calls):
            return
        inputs = cpu["inputs"].gather(calls)
        if inputs.null_count() == len(calls):
            kernels = mask_launched_under(a, _LOG_SOFTMAX) & a.in_window
            if (a.trace.gpu["dur"].to_numpy()[kernels] >= self.min_asking_ns).any():
                yield SkippedCheck(
                    what="how much memory the loss over the vocabulary takes",
                    why="shapes are not recorded",
                    missing="no shapes",
                    record="record_shapes=True",
                )
            return
        bytes_by_row = {
            row: self._count_bytes(OpInputs(*a.trace.inputs.row(row)))
            for row in inputs.drop_nulls().unique().to_list()
        }
        sizes = np.array([bytes_by_row.get(row, 0) for row in inputs.to_list()], dtype=np.int64)
        largest = int(sizes.max())
        if not largest:
            return
        reserved, allocated, _ = measure_peaks(a)
        tensors = allocated or (None if reserved else _recorded_peak(a))
        peak = tensors or reserved
        held_bytes, total = measure_held(a)
        if held_bytes and total and held_bytes < self.min_used_memory_share * total:
            return
        capacity = peak or (a.device.memory_bytes if a.device else None)
        if not capacity or largest < self.min_memory * capacity:
            return
        source = part = "of the GPU's memory"
        if peak:
            part = "of the peak"
            state = "in tensors" if tensors else "reserved"
            source = f"of the {t.format_bytes(peak)} {state} at the peak"
        tensor = OpInputs(*a.trace.inputs.row(int(inputs[int(sizes.argmax())]))).tensor(0)
        shape = " x ".join(f"{n:,}" for n in tensor.shape) if tensor else ""
        loss = mask_launched_under(a, _LOSS_OPERATORS) & a.in_window
        yield Finding(
            summary=(
                f"The log-softmax of {shape} takes {t.format_bytes(largest)} "
                f"({largest / capacity:.0%} {source}). Its gradient takes as much again."
            ),
            evidence=[
                Evidence("largest log-softmax", largest, "bytes"),
                self.compare(f"share {part}", largest / capacity, "min_memory"),
                self.compare(
                    "last dimension of the log-softmax",
                    tensor.shape[-1] if tensor else None,
                    "min_vocabulary",
                    "count",
                ),
                amount_per_step(a, "GPU time of the loss", kernel_work.summed_duration(a, loss)),
            ],
            where=costliest_places(a, calls.astype(np.int64), sizes),
            impact=impact_memory(2 * largest, "log-softmax and one gradient of its size"),
        )

    def _count_bytes(self, inputs: OpInputs) -> int:
        """Return the bytes of the result, or 0 if it is not over a vocabulary, or unknown."""
        tensor = inputs.tensor(0)
        if tensor is None or not tensor.shape or tensor.shape[-1] < self.min_vocabulary:
            return 0
        last_dim = len(tensor.shape) - 1
        dim = inputs.argument(1)
        if dim not in (-1, last_dim) if dim is not None else last_dim != 1:
            return 0  # over another dimension; if it is not recorded, only matrices count
        return tensor.elements * (tensor.width or 0)

    @staticmethod
    def examples() -> Examples:
        """Build losses of 20,480 tokens over 128,256 words in fp32 (9.8 GiB), or with a known
        peak."""
        return {
            "a tenth of the GPU": _build_training([20480, 128256]),
            "a tenth of the peak": _build_training([10240, 128256], peak=44 << 30),
            "a snapshot's peak": snapshot_example(logits=96 << 20),
            "chunks": (_build_training([1024, 128256], peak=60 << 30), "min_memory"),
            "a small vocabulary": (
                _build_training([262144, 8192], peak=50 << 30),
                "min_vocabulary",
            ),
            "classes of pixels, last dimension wide": (
                _build_training([2, 64, 512, 32768], dim="1"),
                "not largest",
            ),
            "no backward": (
                _build_training([20480, 128256], backward=False),
                "not name_matches(cpu['name'], _LOG_SOFTMAX_BACKWARD).any()",
            ),
            "the rest is much larger": (
                _build_training([4096, 128256], peak=60 << 30),
                "min_memory",
            ),
            "no shapes": (_build_training(None), "inputs.null_count() == len(calls)"),
            "most of the GPU's memory is free": (
                _build_training([4096, 128256], peak=16 << 30),
                "min_used_memory_share",
            ),
            "a snapshot in which the loss is small": (
                snapshot_example(logits=16 << 20),
                "min_memory",
            ),
            "a snapshot without a loss": (snapshot_example(logits=0), "logits is None"),
        }


def _build_training(
    dims: list[int] | None, *, dim: str = "1", peak: int | None = None, backward: bool = True
) -> TraceBuilder:
    b = TraceBuilder()
    if dims is not None and len(dims) == 2 and dim == "1":
        dim = "-1"
    shapes = None if dims is None else [dims, [], []]
    for _ in b.steps():
        if peak is not None:
            b.memory(1 << 20, peak, peak + (1 << 30))
        with (
            b.op("aten::cross_entropy_loss"),
            b.op(
                "aten::_log_softmax",
                shapes,
                ["float", "Scalar", "Scalar"],
                concrete=["", dim, "False"],
            ),
        ):
            b.launch("cunn_SoftMaxForward", 3000)
        if backward:
            b.run("aten::_log_softmax_backward_data", "cunn_SoftMaxBackward", 3000)
        b.sync()
    return b
