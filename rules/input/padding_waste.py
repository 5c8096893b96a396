"""A large part of each batch is padding."""

from __future__ import annotations

import numpy as np

from advisor.core.finding import Edit, Finding, Impact, Outcomes, Select
from advisor.core.rule import Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.steps.step_records import StepRecords
from advisor.rules.citations import CHOSEN, CURED_RECORDINGS
from advisor.rules.common import impact_per_step, recorded_steps, scale_edit, steps_seen
from advisor.testing import Examples, TraceBuilder


class PaddingWaste(Rule):
    """Sequences of a batch are padded to the longest of them, and the model computes on the padding
    too. The share of padding is the share of the work on tokens that nobody uses.

    The recorder samples the share of padding in the batch's mask while that is on the CPU. Masks
    made on the GPU are not sampled. Reported from 20% on, from at least three samples.

    The gain counts all GPU work of the model, except the optimizer and communication, as linear in
    the number of tokens. Attention is quadratic, so it gains more; work that does not fill the GPU
    gains less. Without a GPU in the trace the gain comes from the phases forward and backward.
    """

    id = "padding-waste"
    title = "A large part of each batch is padding"
    reads_record = True
    found_in = ("workloads/padding_waste",)
    silent_in = (*CURED_RECORDINGS, "workloads/padding_waste")
    validation_note = "a CPU recording of batches padded to one length; silent with buckets"
    references = (
        "https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments",
        "https://pytorch.org/docs/stable/nested.html",
    )

    min_padding = Threshold(0.20, "of the tokens", CHOSEN)
    min_samples = Threshold(3, "batches sampled", CHOSEN)

    fix = (
        "Batch sequences of similar length, and pad to the longest of the batch, not to a fixed "
        "length. Or pack several sequences into one, with an attention mask between them."
    )
    code = (
        "# Hugging Face Trainer:\n"
        '# TrainingArguments(train_sampling_strategy="group_by_length"),\n'
        "# before Transformers 5: group_by_length=True\n"
        "order = sorted(range(len(dataset)), key=lengths.__getitem__)\n"
        "starts = range(0, len(order), batch_size)\n"
        "batches = [order[i : i + batch_size] for i in starts]\n"
        "random.shuffle(batches)\n"
        "loader = DataLoader(\n"
        "    dataset, batch_sampler=batches, collate_fn=pad_to_longest)"
    )
    verify = "Record again: the share of padding falls, and samples per second rise."
    falsified_by = "the same time per sample with batches of equal lengths"
    assumptions = ("the model's time is proportional to the tokens of a batch",)
    confidence = 0.8

    def check(self, a: Analysis) -> Outcomes:
        """Average the sampled share of padding."""
        recorded = recorded_steps(a)
        padding = recorded.column("padding")
        padding = padding[recorded.after_warmup & ~np.isnan(padding)]
        if len(padding) < self.min_samples:
            return
        mean = float(padding.mean())
        if mean < self.min_padding:
            return
        edits, impact = self._effect(a, recorded, mean)
        yield Finding(
            summary=(
                f"{mean:.0%} of the tokens are padding, {padding.min():.0%} to "
                f"{padding.max():.0%} per batch. The model computes on them for nothing."
            ),
            evidence=[
                self.compare("padding", mean, "min_padding"),
                self.compare("batches sampled", len(padding), "min_samples", "count"),
                steps_seen(recorded),
            ],
            edits=edits,
            impact=impact,
        )

    @staticmethod
    def _effect(
        a: Analysis, recorded: StepRecords, mean: float
    ) -> tuple[list[Edit], Impact | None]:
        """Cut work of the kernels that the tokens pass through; without a device, time in the
        model."""
        if a.device_id is not None:
            edit = scale_edit(
                Select(on="gpu", kind=("kernel",), family=_TOKENS),
                1 - mean,
                (1 - mean) ** 2,
                1 - 0.5 * mean,
            )
            return [edit], None
        model = sum(
            float(np.median(values))
            for name in ("forward", "backward")
            if (values := recorded.phase(name)) is not None
        )
        gain = mean * model
        method = "share of padding x forward and backward"
        return [], impact_per_step(
            a, gain, low=0.5 * gain, method=method, of_median=True, of_host=False
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "on the CPU": _run(0.4),
            "on a GPU": _run(0.4, device=True),
            "little": (_run(0.1), "min_padding"),
            "no mask": (_run(None), "len(padding) < self.min_samples"),
            "sampled twice": (_run(0.4, samples=2), "min_samples"),
        }


_TOKENS = (
    "gemm", "convolution", "attention", "softmax", "normalisation", "elementwise", "reduction",
    "layout", "embedding", "random", "loss",
)  # fmt: skip
"""Kernel families whose work grows with the tokens of a batch."""


def _run(padding: float | None, *, samples: int = 30, device: bool = False) -> TraceBuilder:
    b = TraceBuilder()
    for _ in b.steps(4 if device else 0):
        b.run("aten::mm", "ampere_sgemm_128x64_nn", 9000, [[512, 512], [512, 512]])
        b.sync()
    r = b.record_of_run()
    for n in range(60):
        fields = {} if padding is None or n < 60 - samples else {"padding": padding}
        r.step(10, forward=3, backward=6, fields=fields)
    return b
