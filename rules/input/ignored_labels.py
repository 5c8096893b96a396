"""The loss ignores a large part of the labels."""

from typing import NamedTuple

import numpy as np
import polars as pl

from advisor.core.finding import Edit, Finding, Impact, Location, Outcomes, Select
from advisor.core.intervals import intervals_of
from advisor.core.rule import Evidence, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.matmuls import MATRIX_PRODUCTS
from advisor.measure.device.shapes import OpInputs
from advisor.measure.host.stacks import line_of_function
from advisor.measure.steps.steps import rows_in_steps
from advisor.rules.support.citations import CHOSEN
from advisor.rules.support.common import (
    MAX_CORRELATIONS,
    Rows,
    amount_per_step,
    costliest_places,
    impact_per_step,
    is_share,
    of_step,
    run_steps_of,
    scale_edit,
)
from advisor.testing import Examples, TraceBuilder

OF_TABLES = ("embedding", "index", "optim", "adam", "foreach")
"""Parts of names of operators on a table as wide as the vocabulary, which make no logits."""


class LogitWork(NamedTuple):
    """Operators of the analysed steps that make logits, or the loss and gradients from them."""

    rows: Rows
    vocabulary: int
    positions: int
    """Number of positions with logits in one pass."""
    ns: int
    """Time of these operators on the host, ns."""


class IgnoredLabels(Rule):
    """Logits are computed at every position, and the loss ignores many of them. In instruction
    tuning the prompt has the label -100; in masked language models all tokens have it except the
    masked ones. The last layer multiplies each position with the whole vocabulary, forward and
    backward, for no benefit.

    The recorder looks at the labels among the inputs of one forward in five, and at the labels of
    losses that its stack samples meet. The counted work has a shape of positions x vocabulary, or
    multiplies with the vocabulary. Logits of fewer positions than labels are selected already, and
    nothing is reported.

    The gain is the ignored share of that work. Selecting the positions costs little. On the CPU it
    may be more: large tensors are also freed outside operators."""

    id = "ignored-labels"
    title = "Logits are computed for labels that the loss ignores"
    training_only = True
    reads_record = True
    validation_note = (
        "CPU recordings, in no test. Instruction tuning, 76% of the labels ignored: 38.9 ms "
        "predicted, 49.5 ms measured. Masked items of a recommender, 86% ignored: 43.7 ms "
        "predicted, 33 ms measured"
    )
    references = (
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html",
        "https://huggingface.co/docs/trl/sft_trainer#train-on-completion-only",
    )

    min_ignored_share = Threshold(0.20, "of the labels", CHOSEN)
    min_samples = Threshold(3, "forwards or losses sampled", CHOSEN)
    min_share = Threshold(0.05, "of the step in work on the logits", CHOSEN)
    min_vocabulary = Threshold(1000, "classes: a language model's", CHOSEN)
    min_position_share = Threshold(0.8, "of the labels' number, else they are selected", CHOSEN)

    fix = (
        "Select the positions that have a label before the last layer. Loss and gradients stay the "
        "same."
    )
    code = (
        "# a causal model: first hidden, labels = hidden[:, :-1], labels[:, 1:]\n"
        "keep = labels != -100                  # or your ignore_index\n"
        "loss = F.cross_entropy(lm_head(hidden[keep]), labels[keep])"
    )
    verify = "Record again: the products with the vocabulary have fewer rows; the loss is the same."
    falsified_by = "logits that something else reads, such as a metric or a distillation"
    assumptions = ("only the loss uses the logits",)
    confidence = 0.85

    def check(self, a: Analysis) -> Outcomes:
        shares, size = _read_samples(a, self.min_vocabulary)
        if len(shares) < self.min_samples:
            return
        ignored = float(np.mean(shares))
        if ignored < self.min_ignored_share:
            return
        work = _find_logit_work(a, int(self.min_vocabulary))
        if work is None or work.positions < self.min_position_share * size:
            return
        edits, impact = self._effect(a, work, ignored)
        ns = _measure_device_ns(a, edits) if edits else work.ns
        if ns < self.min_share * a.span_ns:
            return
        line = line_of_function(run_steps_of(a).stacks, "cross_entropy")
        yield Finding(
            summary=(
                f"The loss ignores {ignored:.0%} of the labels, and logits over "
                f"{work.vocabulary:,} tokens are computed at each position. This takes "
                f"{of_step(a, ns)}."
            ),
            evidence=[
                self.compare("labels that the loss ignores", ignored, "min_ignored_share"),
                Evidence("positions with logits, per pass", work.positions, "count"),
                amount_per_step(a, "time of the logits, their loss and gradients", ns),
                self.compare_share(a, "time of the logits, their loss and gradients", ns),
            ],
            where=_find_products(a, work) if line is None else [line.location],
            edits=edits,
            impact=impact,
        )

    @staticmethod
    def _effect(a: Analysis, work: LogitWork, ignored: float) -> tuple[list[Edit], Impact | None]:
        """Scale the kernels of this work. Without a device, return its share of the run's step."""
        if a.device_id is not None:
            gpu = a.trace.gpu
            rows = gpu.filter(gpu["op"].is_in(work.rows) & pl.Series(a.in_window))["correlation"]
            ids = tuple(rows.drop_nulls().unique().sort()[:MAX_CORRELATIONS])
            used_share = 1 - ignored
            select = Select(on="gpu", kind=("kernel",), correlation=ids)
            return [scale_edit(select, used_share, 0.9 * used_share, 1 - 0.7 * ignored)], None
        share = work.ns / max(a.span_ns, 1)
        gain = ignored * share * (run_steps_of(a).median or a.step_ns)
        method = "ignored share x time of the logits"
        impact = impact_per_step(
            a, gain, low=0.6 * gain, high=1.3 * gain, method=method, of_median=True, of_host=False
        )
        return [], impact

    @staticmethod
    def examples() -> Examples:
        return {
            "on the CPU": _build_tuning(),
            "on a GPU": _build_tuning(gpu="A100"),
            "few are ignored": (_build_tuning(ignored=0.1), "min_ignored_share"),
            "sampled twice": (_build_tuning(samples=2), "min_samples"),
            "selected already": (_build_tuning(positions=256), "min_position_share"),
            "little work": (_build_tuning(us=20), "min_share"),
            "few classes": (_build_tuning(vocabulary=100), "work is None"),
        }


def _read_samples(a: Analysis, classes: float) -> tuple[list[float], float]:
    """Return the ignored share of each sample, without losses over fewer classes, and the median
    number of labels."""
    valid = [
        (share, rows * columns)
        for event in run_steps_of(a).rank_record.events_of("labels")
        if is_share(share := event.get("ignored"))
        if isinstance(rows := event.get("rows"), int)
        if isinstance(columns := event.get("columns"), int)
        if (count := event.get("classes")) is None or (isinstance(count, int) and count >= classes)
    ]
    return [share for share, _ in valid], float(np.median([n for _, n in valid] or [0]))


def _find_logit_work(a: Analysis, min_classes: int) -> LogitWork | None:
    """Find the operators on logits by the largest log-softmax over ``min_classes`` or more, or
    return ``None`` if none has a backward pass."""
    cpu, inputs = a.trace.cpu, a.trace.inputs
    if inputs.is_empty():
        return None
    name = cpu["name"].cast(pl.String)
    ops = (cpu["kind"] == "op") & cpu["inputs"].is_not_null()
    rows = rows_in_steps(a, np.flatnonzero(ops.to_numpy()))
    table = pl.DataFrame({"row": rows, "name": name.gather(rows), "at": cpu["inputs"].gather(rows)})
    if not (table["name"] == "aten::_log_softmax_backward_data").any():
        return None
    shapes = {
        index: [
            tuple(x.shape) for x in OpInputs(inputs["dims"][index], inputs["types"][index]).tensors
        ]
        for index in table["at"].unique().to_list()
    }
    softmax = table.filter(pl.col("name") == "aten::_log_softmax")["at"].unique().to_list()
    logits = [shapes[index][0] for index in softmax if shapes[index] and shapes[index][0]]
    largest = max(logits, key=lambda shape: int(np.prod(shape)), default=())
    if not largest or largest[-1] < min_classes:
        return None
    vocabulary, size = largest[-1], int(np.prod(largest))

    def makes_logits(op: str, index: int) -> bool:
        wide_shapes = [shape for shape in shapes[index] if vocabulary in shape]
        if not wide_shapes or any(part in op for part in OF_TABLES):
            return False
        return op in MATRIX_PRODUCTS or any(
            2 * int(np.prod(shape)) >= size for shape in wide_shapes
        )

    logit_rows = [row for row, op, index in table.iter_rows() if makes_logits(op, index)]
    positions, ns = size // vocabulary, intervals_of(cpu, logit_rows).total
    return LogitWork(np.array(logit_rows), vocabulary, positions, ns)


def _find_products(a: Analysis, work: LogitWork) -> list[Location]:
    """Return the place of the forward product that makes the logits."""
    names = a.trace.cpu["name"].gather(work.rows).cast(pl.String)
    is_forward = names.is_in(MATRIX_PRODUCTS).to_numpy() & (a.forward_op[work.rows] < 0)
    return costliest_places(a, work.rows[is_forward], top=1)


def _measure_device_ns(a: Analysis, edits: list[Edit]) -> int:
    ids = edits[0].select.correlation
    return int(a.trace.gpu.filter(a.trace.gpu["correlation"].is_in(ids))["dur"].sum())


def _build_tuning(
    *,
    ignored: float = 0.75,
    samples: int = 8,
    positions: int = 1024,
    vocabulary: int = 32000,
    us: float = 3000,
    gpu: str | None = None,
) -> TraceBuilder:
    """Build instruction tuning with 8 rows of 128 labels."""
    b = TraceBuilder(gpu=gpu)

    logits = [positions, vocabulary]
    for _ in b.steps():
        b.compute("aten::mm", 9000, [[1024, 512], [512, 512]])
        b.compute("aten::mm", us, [[positions, 512], [512, vocabulary]])
        b.compute("aten::_log_softmax", us / 3, [logits])
        with b.range("advisor::backward"):
            b.compute("aten::_log_softmax_backward_data", us / 3, [logits, logits])
            b.compute("aten::mm", us, [[vocabulary, positions], [positions, 512]])
            b.compute("aten::mm", 9000, [[1024, 512], [512, 512]])
        b.sync()
    r = b.record_of_run()
    r.steps(60, 10, forward=4, backward=5)
    for _ in range(samples):
        r.event("labels", ignored=ignored, rows=8, columns=128)
    return b
