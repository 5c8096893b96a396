"""A large part of each batch is padding."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from advisor.core import text as t
from advisor.core.finding import Edit, Finding, Impact, Outcomes, Select
from advisor.core.rule import Evidence, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.shapes import OpInputs
from advisor.rules.support.citations import CHOSEN, CURED_RECORDINGS
from advisor.rules.support.common import (
    impact_per_step,
    is_share,
    outermost_in_steps,
    run_steps_of,
    scale_edit,
    steps_seen,
)
from advisor.testing import Examples, TraceBuilder


class Padding(NamedTuple):
    """Shares of padding, one per sampled batch."""

    all: NDArray[Any]
    beyond: NDArray[Any] | None
    """Share beyond the longest sequence of the batch, or ``None`` if it was not recorded."""
    length: int | None
    """Median number of tokens of a padded sequence, or ``None`` if it was not recorded."""
    split: float | None = None
    """Share of positions that would be gone if each batch were split in two, if batches are sorted
    by length, or ``None``."""
    unit: str = "tokens"
    """Parts of a sequence: ``tokens`` or, for features, ``frames``."""


class PaddingWaste(Rule):
    """Sequences are padded to one length, and the model computes on the padding too. The share of
    padding is the share of the work on unused tokens.

    The recorder samples one forward in five: a mask among its inputs, else the ids of a model with
    an embedding. There, padding is one id that ends, or begins, most rows. In models without an
    embedding it samples sequences of features, such as spectrograms, and waveforms. There, padding
    is a constant that ends rows at different places. Inputs on a GPU are not read. Their copy on
    the CPU is read as the program uploads it. The rule reports 20% and more, from at least three
    samples.

    Padding beyond the longest sequence of the batch holds no token of any row. Padding to the
    longest sequence removes it, and results stay the same. The remaining padding needs batches of
    similar lengths.

    Rows that are already in the order of their lengths have batches of similar lengths. Then only
    smaller batches help, and the recorder measures what is gone if each batch is split in two.

    The gain counts all GPU work of the model, except the optimizer and communication, as linear in
    the number of tokens. Attention is quadratic, so it gains more. Work that does not fill the GPU
    gains less. Without a GPU in the trace the gain comes from the phases forward and backward.
    Operators with the padded length twice in a shape count as quadratic there.

    Traps: layers that drop padding themselves gain nothing. Where the trace has packed or nested
    sequences, nothing is reported."""

    id = "padding-waste"
    title = "A large part of each batch is padding"
    reads_record = True
    found_in = ("workloads/padding_waste", "recorded/padding.slow")
    silent_in = (*CURED_RECORDINGS, "workloads/padding_waste")
    validation_note = (
        "CPU recordings of batches padded to one length; silent with buckets, and with batches "
        "padded to their longest sequence"
    )
    references = (
        "https://huggingface.co/docs/transformers/pad_truncation",
        "https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments",
        "https://pytorch.org/docs/stable/nested.html",
    )

    min_padding = Threshold(0.20, "of the tokens", CHOSEN)
    min_samples = Threshold(3, "batches sampled", CHOSEN)
    min_sorted_share = Threshold(
        0.8, "of the sampled batches have their rows in the order of their lengths", CHOSEN
    )

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
    cases = {
        "beyond the longest": {
            "title": "Batches are padded beyond their longest sequence",
            "fix": (
                "Pad each batch to its longest sequence, not to a fixed length; the results stay "
                "the same. Where shapes must repeat (torch.compile, CUDA graphs), round the length "
                "up to one of a few."
            ),
            "code": (
                'batch = tokenizer(texts, padding="longest", truncation=True,\n'
                '                  return_tensors="pt")          # not padding="max_length"\n'
                "# own collate_fn: pad to the longest of the batch\n"
                "ids = torch.nn.utils.rnn.pad_sequence(\n"
                "    rows, batch_first=True, padding_value=pad_id)"
            ),
            "falsified_by": "the same time per batch with every batch cut to its longest sequence",
        },
        "sorted": {
            "fix": (
                "Form batches by the number of tokens, with fewer rows where sequences are long. "
                "They are sorted by length already, but differ too much within a batch."
            ),
            "code": (
                "batch, longest = [], 0\n"
                "for row in sorted(rows, key=len):\n"
                "    longest = max(longest, len(row))\n"
                "    if batch and longest * (len(batch) + 1) > max_tokens:\n"
                "        run(batch)\n"
                "        batch, longest = [], len(row)\n"
                "    batch.append(row)\n"
                "run(batch)"
            ),
        },
        "requests": {
            "fix": (
                "Sort the sequences by length before they are divided into batches, and put the "
                "results back in their order. Pad each batch to its longest sequence."
            ),
            "code": (
                "order = sorted(range(len(rows)), key=lambda i: len(rows[i]))\n"
                "for start in range(0, len(order), batch_size):\n"
                "    chosen = order[start : start + batch_size]\n"
                "    outputs[chosen] = model(pad([rows[i] for i in chosen]))"
            ),
        },
        "frames": {
            "code": (
                "# in collate_fn: pad to the longest of the batch\n"
                "x = torch.nn.utils.rnn.pad_sequence(features, batch_first=True)\n"
                "# for strides or CUDA graphs: round up to a multiple, such as 64\n"
                "x = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[1] % 64))"
            )
        },
    }

    def check(self, a: Analysis) -> Outcomes:
        padding = _read_samples(a, self.min_sorted_share)
        if len(padding.all) < self.min_samples:
            return
        mean = float(padding.all.mean())
        if mean < self.min_padding:
            return
        if not a.trace.cpu.is_empty() and a.trace.cpu["name"].cast(str).str.contains(_PACKS).any():
            return
        beyond = None if padding.beyond is None else float(padding.beyond.mean())
        is_beyond = beyond is not None and beyond >= self.min_padding
        removed = beyond if beyond is not None and is_beyond else mean
        is_sorted = False
        if padding.split is not None and not is_beyond:
            if padding.split < self.min_padding:
                return
            is_sorted, removed = True, padding.split
        model_ns = self._model_time(a)
        edits, impact = self._estimate_effect(a, removed, padding.length, model_ns)
        span = f"{t.format_share(padding.all.min())} to {t.format_share(padding.all.max())}"
        summary = (
            f"{mean:.0%} of the {padding.unit} are padding, {span} per batch. "
            "The model computes on them for nothing"
        )
        if model_ns:
            summary += f"; forward and backward take {t.format_duration(model_ns)} of each step"
        summary += "."
        if is_beyond:
            summary += (
                f" {beyond:.0%} of the {padding.unit} are beyond the longest sequence of their "
                "batch."
            )
        evidence = [
            self.compare("padding, share of the tokens", mean, "min_padding"),
            self.compare("batches sampled", len(padding.all), "min_samples", "count"),
            steps_seen(run_steps_of(a)),
        ]
        if beyond is not None:
            evidence.insert(1, Evidence("padding beyond the longest sequence", beyond, "share"))
        if padding.length is not None:
            evidence.insert(1, Evidence("padded length", padding.length, "count"))
        texts = self.case("beyond the longest") if is_beyond else {}
        if is_beyond and padding.unit == "frames":
            texts |= self.case("frames")
        elif is_sorted:
            texts = self.case("sorted")
        elif not is_beyond and run_steps_of(a).inference:
            texts = self.case("requests")
        yield Finding(
            summary=summary,
            evidence=evidence,
            edits=edits,
            impact=impact,
            **texts,
        )

    @staticmethod
    def _model_time(a: Analysis) -> float:
        """Return the time in the model in the run's step, ns, or 0 where a device computes."""
        if a.device_id is not None:
            return 0.0
        phases = (run_steps_of(a).phase(name) for name in ("forward", "backward"))
        return sum(float(np.median(values)) for values in phases if values is not None)

    @staticmethod
    def _estimate_effect(
        a: Analysis, removed: float, length: int | None, model_ns: float
    ) -> tuple[list[Edit], Impact | None]:
        """Cut work of the kernels that the tokens pass through. Without a device, cut time in the
        model. ``removed`` is the share of the tokens that the fix removes."""
        left = 1 - removed
        if a.device_id is not None:
            edit = scale_edit(
                Select(on="gpu", kind=("kernel",), family=_FAMILIES),
                left,
                left**2,
                1 - 0.5 * removed,
            )
            return [edit], None
        quadratic = _quadratic_share(a, length)
        gain = model_ns * removed * (1 + quadratic * left)
        return [], impact_per_step(
            a,
            gain,
            low=0.5 * gain,
            high=max(gain, model_ns * (1 - left**2)) if quadratic else None,
            method="share of padding x forward and backward",
            of_median=True,
            of_host=False,
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "on the CPU": _build_run(0.4),
            "on a GPU": _build_run(0.4, device=True),
            "beyond the longest sequence": _build_run(None, beyond=0.3),
            "beyond the longest sequence, on a GPU": _build_run(None, beyond=0.3, device=True),
            "frames beyond the longest sequence": _build_run(None, beyond=0.3, signal=True),
            "within the longest sequence": _build_run(None, beyond=0.0),
            "in requests": _build_run(None, beyond=0.0, trains=False),
            "sorted, of very different lengths": _build_run(None, beyond=0.0, split=0.25),
            "sorted": (
                _build_run(None, beyond=0.0, split=0.1),
                "padding.split < self.min_padding",
            ),
            "little": (_build_run(0.1), "min_padding"),
            "no mask": (_build_run(None), "len(padding.all) < self.min_samples"),
            "sampled twice": (_build_run(0.4, samples=2), "min_samples"),
            "nested tensors": (
                _build_run(None, beyond=0.3, device=True, op="aten::_nested_tensor_from_mask"),
                "contains(_PACKS)",
            ),
        }


_FAMILIES = (
    "gemm", "convolution", "attention", "softmax", "normalisation", "elementwise", "reduction",
    "layout", "embedding", "indexing", "random", "loss",
)  # fmt: skip
"""Kernel families whose work grows with the tokens of a batch."""
_PACKS = r"_nested_tensor_from_mask|_pack_padded_sequence|_nested_from_padded"
"""Operators that drop padding before the layers compute."""


def _read_samples(a: Analysis, min_sorted_share: float) -> Padding:
    """Return the samples of forward passes, or of the loader's batches if those are more. Batches
    are sorted if ``min_sorted_share`` of them have their rows in the order of length."""
    run_steps = run_steps_of(a)
    column = run_steps.column("padding")
    column = column[run_steps.after_warmup & ~np.isnan(column)]
    events = [
        (share, beyond, event.get("columns"))
        for event in run_steps.rank_record.events_of("padding")
        if is_share(share := event.get("padding")) and is_share(beyond := event.get("beyond"))
    ]
    if not events or len(events) < len(column):
        return Padding(column, None, None)
    shares = np.array([row[:2] for row in events], dtype=np.float64)
    lengths = [length for *_, length in events if isinstance(length, int) and length > 0]
    is_signal = any(event.get("signal") for event in run_steps.rank_record.events_of("padding"))
    length = int(np.median(lengths)) if lengths else None
    unit = "frames" if is_signal else "tokens"
    split = [
        share
        for event in run_steps.rank_record.events_of("padding")
        if is_share(share := event.get("split"))
    ]
    is_sorted = len(split) >= min_sorted_share * len(events)
    gone = float(np.mean(split)) if is_sorted else None
    return Padding(shares[:, 0], shares[:, 1], length, gone, unit)


def _quadratic_share(a: Analysis, length: int | None) -> float:
    """Return the share of the operators' time whose work grows with the square of ``length``: an
    input has that size twice, or the operator is attention."""
    if length is None or a.trace.cpu.is_empty():
        return 0.0
    ops = outermost_in_steps(a)
    total_ns, quadratic_ns = 0, 0
    table = a.trace.inputs
    has_twice: dict[int, bool] = {}
    for name, ns, index in ops.select("name", "ns", "inputs").iter_rows():
        total_ns += ns
        if index is not None and index not in has_twice:
            row = table.row(index, named=True)
            has_twice[index] = _has_twice(OpInputs(row["dims"], row["types"]), length)
        if "attention" in name or (index is not None and has_twice[index]):
            quadratic_ns += ns
    return quadratic_ns / total_ns if total_ns else 0.0


def _has_twice(inputs: OpInputs, length: int) -> bool:
    tensors = (inputs.tensor(index) for index in range(len(inputs)))
    return any(tensor is not None and tensor.shape.count(length) >= 2 for tensor in tensors)


def _build_run(
    padding: float | None,
    *,
    samples: int = 30,
    device: bool = False,
    beyond: float | None = None,
    op: str = "aten::mm",
    signal: bool = False,
    split: float | None = None,
    trains: bool = True,
) -> TraceBuilder:
    b = TraceBuilder()
    for _ in b.steps(4 if device else 0):
        b.run(op, "ampere_sgemm_128x64_nn", 9000, [[512, 512], [512, 512]])
        b.sync()
    r = b.record_of_run()
    for n in range(60):
        fields = {} if padding is None or n < 60 - samples else {"padding": padding}
        r.step(10, forward=3, **({"backward": 6} if trains else {}), fields=fields)
    for _ in range(0 if beyond is None else 6):
        fields = {"signal": True} if signal else {}
        fields |= {} if split is None else {"split": split}
        r.event("padding", padding=0.4, beyond=beyond, rows=8, columns=160, **fields)
    return b
