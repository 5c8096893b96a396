"""Accumulation of gradients over micro-batches that are too small to keep the device busy."""

from collections import Counter
from typing import NamedTuple

import numpy as np
import polars as pl

from advisor.core.finding import Finding, Outcomes, Select
from advisor.core.intervals import intersect, union
from advisor.core.rule import Evidence, Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.host.names import OPTIMIZER_STEP, name_matches
from advisor.measure.host.stacks import NODE_PREFIX
from advisor.measure.steps.steps import rows_in_steps
from advisor.rules.support.citations import CHOSEN, SILENT_INPUTS
from advisor.rules.support.common import (
    amount_per_step,
    costliest_places,
    has_trainer,
    of_step,
    outermost_in_steps,
    scale_edit,
)
from advisor.rules.support.kernel_work import exact_pattern
from advisor.testing import Examples, TraceBuilder

_ACCUMULATES = f"{NODE_PREFIX}torch::autograd::AccumulateGrad"
_NORM = r"^aten::(?:linalg_vector_)?norm$|^aten::_foreach_norm$"
_LAYER = r"^aten::(?:linear|addmm|mm|bmm|conv[123]d|convolution|lstm|gru|embedding)$"


class MicroBatches(NamedTuple):
    """Equal micro-batches of each step, each a forward and a backward pass."""

    number: int
    """Number of micro-batches per optimizer step."""
    operators: pl.DataFrame
    """Outermost operators of the micro-batches: ``row, name, ts, ns, inputs``."""
    starts: list[int]
    """Start of the first micro-batch of each step, ns."""
    ends: list[int]
    """End of the last micro-batch of each step, ns."""
    clipped: bool
    """Whether the norm of the gradients is computed after each micro-batch."""

    @property
    def accumulate(self) -> bool:
        """Whether each micro-batch adds to the gradients of weights."""
        added = self.operators["name"] == _ACCUMULATES
        return int(added.sum()) >= self.number * len(self.starts)


class SmallMicroBatches(Rule):
    """The step runs several forward and backward passes before the optimizer, and each consists of
    short calls. A call costs the host as much for one sample as for a few: Python, dispatch, waking
    threads or launching a kernel. One pass over a larger micro-batch has this cost only once. The
    sum of the gradients stays the same.

    Passes are equal by the shapes of their layers, and one optimizer step follows them. Operators
    of 0.3 ms or more count as real work, which grows with the batch. On a GPU only the host's time
    shrinks: nothing is saved if the device sets the pace.

    Where the norm of the gradients is computed after each pass, they are clipped pass by pass, as
    in differentially private training. Then a larger micro-batch would change the result, and
    ``vmap`` over the samples does not.

    Passes that do not add to gradients of weights do not count, nor do those with ``aten::sign``
    between them. In meta-learning and in attacks on the input a pass needs the result of the
    previous one."""

    id = "small-micro-batches"
    title = "Gradients are accumulated over small micro-batches"
    needs_shapes = True
    training_only = True
    sampled_part = "backward"
    found_in = (
        "recorded/micro_batches.slow",
        "recorded/gloo_accumulation.slow",
        "recorded/gloo_accumulation.cured",  # cured of another fault
    )
    silent_in = SILENT_INPUTS
    validation_note = (
        "a CPU recording, torch 2.13, and its cure: 3.31 ms predicted, 4.04 ms measured. A "
        "classifier of single sentences, not in the tests: 124 ms predicted, 120 ms measured"
    )
    references = (
        "https://huggingface.co/docs/transformers/perf_train_gpu_one#gradient-accumulation",
    )

    min_passes = Threshold(4, "equal passes for one optimizer step", CHOSEN)
    max_call_us = Threshold(300, "µs, the median of an operator; longer ones are real work", CHOSEN)
    min_share = Threshold(0.3, "of the step in short calls of these passes", CHOSEN)
    saved_share = Factor(0.9, "of what a larger micro-batch can save at most", CHOSEN)
    worst_saved_share = Factor(0.4, "of it, if half of the calls' time is real work", CHOSEN)

    fix = (
        "Use a larger micro-batch and proportionally fewer accumulation steps, as far as memory "
        "allows. The gradients are the same; batch norm and dropout see different samples."
    )
    code = (
        "micro_batch = {count} * micro_batch        # as far as memory allows\n"
        "accumulation_steps = accumulation_steps // {count}"
    )
    cases = {
        "per-sample gradients": {
            "title": "Gradients are computed and clipped pass by pass",
            "fix": "Compute the gradients of all samples in one pass with torch.func, and clip "
            "each. A larger micro-batch would clip their sum.",
            "code": "from torch.func import functional_call, grad, vmap\n"
            "def sample_loss(weights, x, y):\n"
            "    out = functional_call(model, weights, (x[None],))\n"
            "    return F.cross_entropy(out, y[None])    # your loss\n"
            "weights = {n: p.detach() for n, p in model.named_parameters()}\n"
            "per_sample = vmap(grad(sample_loss), (None, 0, 0))\n"
            "grads = per_sample(weights, x, y)   # name: one row per sample",
            "verify": "Record again: one pass per step, with the same loss after some steps.",
            "falsified_by": "layers that vmap cannot run, such as batch norm, or dropout without "
            "randomness='different'",
        },
        "Hugging Face's Trainer": {
            "code": "TrainingArguments(..., per_device_train_batch_size={count} * batch,\n"
            "    gradient_accumulation_steps=steps // {count})"
        },
    }
    verify = "Record again: fewer passes per step, and more samples per second."
    falsified_by = "passes that need the result of the previous one, or a batch that does not fit"
    assumptions = ("memory for a larger micro-batch is free",)
    confidence = 0.75

    def check(self, a: Analysis) -> Outcomes:
        if not a.span_ns or a.is_device_bound:
            return
        micro_batches = _find_micro_batches(a)
        if micro_batches is None:
            return
        if micro_batches.number < self.min_passes or not micro_batches.accumulate:
            return
        is_short = pl.col("ns").median().over("name") <= self.max_call_us * 1000
        short, long = (
            micro_batches.operators.filter(is_short),
            micro_batches.operators.filter(~is_short),
        )
        batch_spans = union(np.array(micro_batches.starts), np.array(micro_batches.ends))
        ts, dur = (long[name].to_numpy() for name in ("ts", "ns"))
        ns = batch_spans.total - intersect(batch_spans, union(ts, ts + dur)).total
        if ns < self.min_share * a.span_ns:
            return
        gain = 1 - 1 / micro_batches.number
        layers = micro_batches.operators.filter(pl.col("name").str.contains(_LAYER))
        select = Select(
            on="host",
            kind=("op",),
            name=exact_pattern(sorted(short["name"].unique().to_list())),
            at="loop",
        )
        code = self.case("Hugging Face's Trainer")["code"] if has_trainer(a) else self.code
        yield Finding(
            summary=(
                f"{micro_batches.number} equal passes run for each optimizer step. Short calls and "
                f"the time between them take {of_step(a, ns)}."
            ),
            evidence=[
                self.compare(
                    "passes per optimizer step", micro_batches.number, "min_passes", "count"
                ),
                amount_per_step(a, "short calls and time between them", ns),
                self.compare_share(a, "short calls and time between them", ns),
                Evidence(
                    "calls per pass", len(short) / len(batch_spans) / micro_batches.number, "count"
                ),
            ],
            where=costliest_places(a, layers["row"].to_numpy(), layers["ns"].to_numpy(), top=1),
            edits=[
                scale_edit(
                    select, 1 - self.saved_share * gain, 1 - gain, 1 - self.worst_saved_share * gain
                )
            ],
            **(
                self.case("per-sample gradients")
                if micro_batches.clipped
                else {"code": code.format(count=micro_batches.number)}
            ),
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "eight passes of a few samples": _build_training(),
            "on a GPU that waits": _build_training(gpu="A100"),
            "in Hugging Face's Trainer": _build_training(trainer="transformers"),
            "clipped gradients of each sample": _build_training(between="aten::norm"),
            "one pass": (_build_training(micro_batches=1), "min_passes"),
            "gradients of the input": (_build_training(weights=False), "micro_batches.accumulate"),
            "an attack on the input": (
                _build_training(between="aten::sign"),
                "micro_batches is None",
            ),
            "three models": (_build_training(micro_batches=6, models=3), "micro_batches is None"),
            "an update after each pass": (_build_training(updates=True), "micro_batches is None"),
            "long calls": (_build_training(backward_us=400), "min_share"),
            "the GPU sets the pace": (_build_training(gpu="A100", us=900), "a.is_device_bound"),
        }


def _find_micro_batches(a: Analysis) -> MicroBatches | None:
    """Return the equal micro-batches of all analysed steps, or ``None`` if they differ."""
    table = outermost_in_steps(a).sort("ts")
    cpu = a.trace.cpu
    updates = rows_in_steps(a, np.flatnonzero(name_matches(cpu["name"], OPTIMIZER_STEP).to_numpy()))
    if len(updates) != a.step_count:
        return None
    step = np.searchsorted(cpu["ts"].to_numpy()[updates], table["ts"].to_numpy())
    node = table["name"].str.starts_with(NODE_PREFIX).to_numpy()
    layer = table["name"].str.contains(_LAYER).to_numpy()
    batch_starts, ends, kinds = _split_micro_batches(step, node, layer, table["inputs"].to_list())
    counts = Counter(step_number for step_number, _ in batch_starts)
    if len(set(counts.values())) != 1 or len(counts) != a.step_count or len(set(kinds)) != 1:
        return None
    in_batch = np.zeros(len(table), dtype=bool)
    for (_, batch_start), end in zip(batch_starts, ends, strict=True):
        in_batch[batch_start : end + 1] = True
    count = counts[batch_starts[0][0]]

    def after_batches(pattern: str) -> np.ndarray:
        """Return how many micro-batches of their step precede these operators: 0 for all."""
        rows = np.flatnonzero(table["name"].str.contains(pattern).to_numpy())
        return np.searchsorted([batch_start for _, batch_start in batch_starts], rows) % count

    if after_batches("^aten::sign$").any():
        return None
    normed = after_batches(_NORM)
    clipped_batches = len(np.unique(normed[normed > 0]))
    starts, ends_ns = table["ts"].to_numpy(), (table["ts"] + table["ns"]).to_numpy()
    return MicroBatches(
        count,
        table.filter(pl.Series(in_batch)),
        [int(starts[batch_start]) for _, batch_start in batch_starts[::count]],
        [int(ends_ns[end]) for end in ends[count - 1 :: count]],
        clipped_batches == count - 1,
    )


def _split_micro_batches(
    step: np.ndarray, node: np.ndarray, layer: np.ndarray, inputs: list[int | None]
) -> tuple[list[tuple[int, int]], list[int], list[tuple[int | None, ...]]]:
    """Return the micro-batches, each from its first layer to its last backward node: (step, first
    row), last row, and the inputs of its layers."""
    batch_starts: list[tuple[int, int]] = []
    ends: list[int] = []
    kinds: list[tuple[int | None, ...]] = []
    layers: list[int] = []
    end = -1
    for row in [*np.flatnonzero(node | layer).tolist(), None]:  # None marks the end
        if layers and end >= 0 and (row is None or layer[row] or step[row] != step[layers[0]]):
            batch_starts.append((int(step[layers[0]]), layers[0]))
            ends.append(end)
            kinds.append(tuple(inputs[n] for n in layers))
            layers, end = [], -1
        if row is not None and layer[row]:
            layers.append(row)
        elif row is not None and layers:
            end = row
    return batch_starts, ends, kinds


def _build_training(
    *,
    gpu: str | None = None,
    micro_batches: int = 8,
    models: int = 1,
    updates: bool = False,
    us: float = 60,
    backward_us: float = 60,
    trainer: str = "",
    weights: bool = True,
    between: str = "",
) -> TraceBuilder:
    """Build micro-batches of one model, or of ``models`` in turn, with 20 layers each."""
    b = TraceBuilder(gpu=gpu)

    def run(name: str, shapes: list[list[int]] | None, host_us: float) -> None:
        with b.op(name, shapes, host_us=60 if gpu else host_us):
            if gpu:
                b.launch("ampere_sgemm_128x64_nn", us / 10 if us < 100 else us)

    for _ in b.steps():
        for number in range(micro_batches):
            width = 64 + 8 * (number % models)
            for _ in range(20):
                run("aten::linear", [[8, width], [width, width], [width]], us)
            for _ in range(20):
                run(f"{NODE_PREFIX}AddmmBackward0", None, backward_us)
                if weights:
                    b.on_host(_ACCUMULATES, 5)
            if between:
                b.on_host(between, 5)
            if updates:
                with b.range("Optimizer.step#SGD.step"):
                    b.on_host("aten::_foreach_add_", 30)
        if not updates:
            with b.range("Optimizer.step#SGD.step"):
                b.on_host("aten::_foreach_add_", 30)
        b.sync()
    if trainer:
        r = b.record_of_run()
        r.event("loader", id=1, workers=0, trainer=trainer)
        r.steps(60, 20, forward=9, backward=9)
    return b
