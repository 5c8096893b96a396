"""Layers that run on rows after an index has repeated them."""

from typing import Any, ClassVar, NamedTuple

import numpy as np

from advisor.core.finding import Finding, Outcomes
from advisor.core.rule import Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.operator_arguments import inputs_at
from advisor.measure.device.shapes import Shape
from advisor.measure.host.stacks import NODE_PREFIX
from advisor.rules.support.citations import CHOSEN, SILENT_INPUTS, XPROF
from advisor.rules.support.common import (
    amount_per_step,
    costliest_places,
    of_step,
    outermost_in_steps,
)
from advisor.rules.support.kernel_work import scale_operators, time_of_operators, with_backward
from advisor.testing import Examples, TraceBuilder

GATHERS = ("aten::index", "aten::index_select", "aten::embedding")
LAYERS = ("aten::linear", "aten::addmm", "aten::matmul", "aten::mm")


class Repeated(NamedTuple):
    """A layer on gathered rows."""

    source: Shape
    """Shape that the rows are taken from."""
    gathered: int
    """Number of gathered rows."""
    layer: int
    """Row of ``trace.cpu`` of the layer."""


class LayerAfterGather(Rule):
    """A layer runs on gathered rows, of which many are the same: ``layer(x[index])`` with more
    entries in the index than rows in ``x``. Graph networks do so for the nodes of each edge, and
    models with few classes for their embeddings. ``layer(x)[index]`` computes each row once, and
    gives the same.

    The rule finds a product whose input an index made right before it. The index must take at least
    twice as many rows as there are. Sequence numbers show which nodes of the backward pass belong
    to the product.

    The gain is the repeated share of the product, forward and backward. The gather then copies the
    layer's outputs in place of its inputs, which takes longer or shorter as their width differs."""

    id = "layer-after-gather"
    title = "A layer computes the same rows many times, after an index repeats them"
    found_in = ("recorded/gathered_nodes.slow",)
    silent_in = SILENT_INPUTS
    validation_note = (
        "a CPU recording, torch 2.13, and its cure: 42 ms predicted (11 to 66), 30 measured"
    )
    references = (
        "https://pytorch-geometric.readthedocs.io/en/latest/tutorial/create_gnn.html",
        "https://docs.pytorch.org/docs/stable/generated/torch.index_select.html",
    )

    min_share = Threshold(0.05, "of the step in repeated rows", XPROF)
    min_repeats = Threshold(2.0, "times as many rows in the index as in its source", CHOSEN)

    fix = (
        "Apply the layer to all rows once, then take the rows by the index. It works on each row "
        "alone, so the results are the same."
    )
    code = "messages = layer(x)[index]     # not layer(x[index])"
    verify = "Record again: the product has as many rows as the source. Compare the results."
    falsified_by = "a layer whose result depends on the other rows, such as batch norm in training"
    assumptions = ("the layer works on each row alone",)
    inference: ClassVar[dict[str, Any]] = {
        "falsified_by": "a layer whose result depends on the other rows"
    }
    needs_shapes = True
    confidence = 0.85

    def check(self, a: Analysis) -> Outcomes:
        if not a.span_ns:
            return
        gathers = _find_repeated(a, self.min_repeats)
        if not gathers:
            return
        rows = np.array([each.layer for each in gathers])
        every, backward_rows = with_backward(a, rows)
        ns = time_of_operators(a, every)
        needed = sum(each.source[0] for each in gathers) / sum(each.gathered for each in gathers)
        saved = [ns * (1 - needed), ns * (1 - 0.5 * needed), ns * max(0.0, 0.8 - 2 * needed)]
        if saved[0] < self.min_share * a.span_ns:
            return
        largest = max(gathers, key=lambda each: each.gathered)
        backward = " With its backward pass this" if len(backward_rows) else " This"
        yield Finding(
            summary=(
                f"A layer computes {largest.gathered:,} rows that an index takes from "
                f"{largest.source[0]:,}: {1 - needed:.0%} of them are repeated.{backward} takes "
                f"{of_step(a, ns)}."
            ),
            evidence=[
                amount_per_step(a, "time of the layers", ns),
                amount_per_step(a, "calls of such layers", len(gathers), "count"),
                self.compare(
                    "rows of the index over rows of its source",
                    largest.gathered / largest.source[0],
                    "min_repeats",
                    "count",
                ),
                self.compare_share(a, "work on repeated rows", saved[0]),
            ],
            where=costliest_places(a, rows, top=1),
            edits=[scale_operators(a, every, saved)],
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "nodes of each edge": _build_model(),
            "on a GPU": _build_model(gpu="A100"),
            "in inference": _build_model(trains=False),
            "a part of the rows": (_build_model(edges=300), "not gathers"),
            "something in between": (_build_model(between="aten::tanh"), "not gathers"),
            "other widths": (_build_model(width=32), "not gathers"),
            "hardly any time": (_build_model(us=20), "min_share"),
        }


def _find_repeated(a: Analysis, min_repeats: float) -> list[Repeated]:
    """Return the layers whose input an index right before them took from fewer rows."""
    table = outermost_in_steps(a)
    rows, names, inputs = (table[name].to_list() for name in ("row", "name", "inputs"))
    gathers = []
    for at, name in enumerate(names[:-1]):
        if name not in GATHERS or names[at + 1] not in LAYERS:
            continue
        if inputs[at] is None or inputs[at + 1] is None:
            continue
        source, operands = inputs_at(a, inputs[at]).tensor(0), inputs_at(a, inputs[at + 1]).tensors
        data = operands[1 if names[at + 1] == "aten::addmm" else 0] if len(operands) > 1 else None
        if source is None or data is None or len(source.shape) != 2 or len(data.shape) < 2:
            continue
        gathered = data.elements // max(1, data.shape[-1])
        if data.shape[-1] == source.shape[1] and gathered >= min_repeats * source.shape[0] > 0:
            gathers.append(Repeated(source.shape, gathered, rows[at + 1]))
    return gathers


def _build_model(
    *,
    gpu: str | None = None,
    edges: int = 8000,
    width: int = 64,
    between: str = "",
    trains: bool = True,
    us: float = 4000,
) -> TraceBuilder:
    """Build steps of a layer on the nodes of all edges, for 1,000 nodes of 64 features."""
    b = TraceBuilder(gpu=gpu)
    for number in b.steps():
        sequence = 10 * number if trains else None
        b.compute("aten::layer_norm", 3000, [[1000, 64]])
        b.compute("aten::index", 300, [[1000, 64], []])
        if between:
            b.compute(between, 100, [[edges, width]])
        b.compute("aten::linear", us, [[edges, width], [64, width]], sequence=sequence)
        if trains:
            b.compute(f"{NODE_PREFIX}AddmmBackward0", 2 * us, [], sequence=sequence)
        b.sync()
    return b
