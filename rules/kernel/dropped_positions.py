"""A layer computes all positions, and only some of its results are used."""

from math import prod
from typing import Any, ClassVar, NamedTuple

import numpy as np
import polars as pl

from advisor.core.finding import Finding, Outcomes
from advisor.core.rule import Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.operator_arguments import TAKES, inputs_at, range_taken
from advisor.measure.device.shapes import OpInputs
from advisor.measure.host.stacks import NODE_PREFIX
from advisor.measure.steps.steps import rows_in_steps
from advisor.rules.support.citations import CHOSEN, CURED_RECORDINGS, SILENT_TRACES, XPROF
from advisor.rules.support.common import (
    amount_per_step,
    backward_operators,
    costliest_places,
    of_step,
    outermost_in_steps,
)
from advisor.rules.support.kernel_work import scale_operators, time_of_operators
from advisor.testing import Examples, TraceBuilder

Shape = tuple[int, ...]
PRODUCTS = {"aten::linear": -2, "aten::matmul": -1, "aten::addmm": -1, "aten::mm": -1}
"""Products -> the dimension of the last operand that is the width of the result."""
BETWEEN = ("aten::_unsafe_view", "aten::add", "aten::add_", "aten::div", "aten::mul", "aten::to")
"""Operators between a product and the part that is taken of it; they keep its shape."""
MAX_BETWEEN = 6
END = str(2**63 - 1)
"""End of a slice without one."""


class Dropped(NamedTuple):
    """Calls of a layer of which one part is used."""

    shape: Shape
    """Shape of the result."""
    kept: float
    """Share of the result that is used."""
    part: str
    """The part, as Python writes it."""
    made: list[int]
    """Rows of ``trace.cpu`` that compute the whole result …"""
    through: list[int]
    """… and of all operators from there to the part."""


class DroppedPositions(Rule):
    """A layer computes its result at every position, and the next line takes a part of it:
    ``model.head(hidden)[:, -1]``. Recommenders and classifiers of sequences do so, and
    generation that computes logits of the whole prompt. The product runs forward for nothing at the
    other positions. Backward it multiplies their zeros.

    Found is a product whose result has one reader in the step, which takes half of the rows or
    less. Features are no rows. Nodes of the backward pass belong to it by their sequence numbers. A
    result with another reader is needed, and nothing is reported.

    The gain is the dropped share of this work. A smaller product runs at a lower rate, which the
    range allows for. Layers before it that work on each position alone may be skipped too; that is
    not counted."""

    id = "dropped-positions"
    title = "A layer computes positions that are then dropped"
    found_in: ClassVar[tuple[str, ...]] = ("recorded/last_position.slow",)
    silent_in: ClassVar[tuple[str, ...]] = (
        "recorded/last_position.cured",
        *SILENT_TRACES,
        *CURED_RECORDINGS,
    )
    validation_note = (
        "a CPU recording, torch 2.13, and its cure: 10.1 ms predicted, 9.4 ms measured. Another, "
        "in no test: 24.1 ms predicted, 22.6 ms measured"
    )
    references = ("https://docs.pytorch.org/docs/stable/tensor_view.html",)

    min_share = Threshold(0.05, "of the step in work on what is dropped", XPROF)
    max_kept = Threshold(0.5, "of the result is used: with more, little is dropped", CHOSEN)

    fix = (
        "Take the positions before the layer, not after it. It works on each position alone, so "
        "the results stay the same. Layers before it that do so too come after the selection."
    )
    code = "result = layer(hidden[{part}])     # not layer(hidden)[{part}]"
    verify = "Record again: the product has fewer rows. Compare the results."
    falsified_by = "other code that reads the whole result, in steps that are not recorded"
    assumptions = ("only this part of the result is used",)
    confidence = 0.9

    def check(self, a: Analysis) -> Outcomes:
        if not a.span_ns or not a.step_count or a.trace.inputs.is_empty():
            return
        for found in self._find(a):
            made = np.array(found.made)
            learnt = rows_in_steps(a, backward_operators(a, np.array(found.through)))
            rows = np.concatenate([made, learnt])
            ns = time_of_operators(a, rows)
            saved = [ns * (1 - left * found.kept) for left in (1, 0.5)]
            saved.append(ns * max(0.0, 0.8 - 2 * found.kept))
            if saved[0] < self.min_share * a.span_ns:
                continue
            sizes = " × ".join(f"{size:,}" for size in found.shape)
            backward = " With its backward pass this" if len(learnt) else " This"
            yield Finding(
                summary=(
                    f"A layer computes {sizes} results, and {found.kept:.0%} of them are used: "
                    f"[{found.part}].{backward} takes {of_step(a, ns)}."
                ),
                evidence=[
                    amount_per_step(a, "time of the layer", ns),
                    amount_per_step(a, "calls", len(found.made), "count"),
                    self.compare("part that is used", found.kept, "max_kept"),
                    self.compare("dropped", saved[0] / a.span_ns, "min_share", per=a.per),
                ],
                where=costliest_places(a, made),
                edits=[scale_operators(a, rows, saved)],
                code=self.code.format(part=found.part),
            )

    def _find(self, a: Analysis) -> list[Dropped]:
        """Return layers whose result is dropped in part, by its shape and that part."""
        table = outermost_in_steps(a)
        taken = table.filter(pl.col("name").is_in(TAKES)).drop_nulls("inputs")
        known = {
            at: part
            for name, at in taken.select("name", "inputs").unique().iter_rows()
            if (part := _part(name, inputs_at(a, at))) is not None
        }
        parts = {at: part for at, part in known.items() if part[1] <= self.max_kept}
        if not parts:
            return []
        rows, names, inputs = (table[name].to_list() for name in ("row", "name", "inputs"))
        keeps = [
            name in BETWEEN or (at in known and known[at][1] == 1 and name in TAKES)
            for name, at in zip(names, inputs, strict=True)
        ]
        found: dict[tuple[Shape, str], Dropped] = {}
        needed: set[Shape] = set()
        made = [
            (first, at)
            for at, (name, each) in enumerate(zip(names, inputs, strict=True))
            if each in parts and name in TAKES
            if (first := _product_before(names, keeps, at)) is not None
            if _shape_of_product(a, names[first], inputs[first]) == parts[each][0]
        ]
        if not made:
            return []
        shapes = {
            at: {tensor.shape for tensor in inputs_at(a, at).tensors}
            for at in table["inputs"].drop_nulls().unique()
        }
        for first, at in made:
            shape, kept, index = parts[inputs[at]]
            again = (
                n
                for n in range(at, len(rows))
                if inputs[n] == inputs[first] and names[n] == names[first]
            )
            readers = [
                n
                for n in range(first + 1, next(again, len(rows)))
                if inputs[n] is not None
                and shape in shapes[inputs[n]]
                and not (n < at and keeps[n])
            ]
            if readers != [at]:
                needed.add(shape)
                continue
            one = found.setdefault((shape, index), Dropped(shape, kept, index, [], []))
            one.made.append(rows[first])
            one.through.extend(rows[first : at + 1])
        return [one for one in found.values() if one.shape not in needed]

    @staticmethod
    def examples() -> Examples:
        return {
            "logits of the last position": _model(),
            "on a GPU": _model(gpu="A100"),
            "in inference": _model(trains=False),
            "the first four positions": _model(taker="aten::slice", args=["1", "0", "4", "1"]),
            "after slices of everything": _model(whole=True),
            "all but the last": (
                _model(taker="aten::slice", args=["1", "0", "31", "1"]),
                "not parts",
            ),
            "some features": (_model(args=["2", "0"]), "not parts"),
            "read again": (_model(also="aten::mean"), "readers != [at]"),
            "a part of something else": (_model(product="aten::tanh"), "not made"),
            "hardly any time": (_model(us=20), "min_share"),
        }


def _part(name: str, x: OpInputs) -> tuple[Shape, float, str] | None:
    """Return the shape that a part is taken of, its share and its index; ``None``: it is not
    recorded, or of the features."""
    tensor, dim = x.tensor(0), x.argument(1)
    if tensor is None or not isinstance(dim, int):
        return None
    shape = tensor.shape
    if not -len(shape) <= dim < len(shape) or not prod(shape):
        return None
    size, before = shape[dim], dim % len(shape)
    taken = range_taken(name, x, dim, size)
    by = x.argument(4) if name == "aten::slice" else 1
    if taken is None or not isinstance(by, int) or by < 1:
        return None
    begin, end = max(0, taken[0]), taken[1]
    kept = len(range(begin, end, by))
    if not kept or (before == len(shape) - 1 and kept < size):
        return None
    one = name == "aten::select"
    index = f"{x.argument(2)}" if one else f"{begin}:{end}" + f":{by}" * (by > 1)
    return shape, kept / size, ":, " * before + index


def _product_before(names: list[str], keeps: list[bool], at: int) -> int | None:
    """Return the product right before an operator; those between them keep its shape."""
    for n in range(at - 1, max(-1, at - 1 - MAX_BETWEEN), -1):
        if names[n] in PRODUCTS:
            return n
        if not keeps[n]:
            return None
    return None


def _shape_of_product(a: Analysis, name: str, index: int | None) -> Shape | None:
    """Return the shape of a product's result; ``None``: not recorded, or of vectors."""
    factors = [] if index is None else [tensor.shape for tensor in inputs_at(a, index).tensors]
    if name == "aten::addmm":
        factors = factors[1:]
    if len(factors) < 2 or min(map(len, factors[:2])) < 2:
        return None
    return (*factors[0][:-1], factors[1][PRODUCTS[name]])


def _model(
    *,
    gpu: str | None = None,
    product: str = "aten::linear",
    taker: str = "aten::select",
    args: list[str] | None = None,
    also: str = "",
    whole: bool = False,
    trains: bool = True,
    us: float = 3000,
) -> TraceBuilder:
    """Sequences of 32 positions, and logits over 6,000 classes."""
    b = TraceBuilder(gpu=gpu)
    logits, hidden = [16, 32, 6000], [16, 32, 96]
    args = ["1", "-1"] if args is None else args

    for number in b.steps():
        sequence = 10 * number if trains else None
        b.compute("aten::tanh", 5000, [hidden])
        b.compute(product, us, [hidden, [6000, 96], [6000]], sequence=sequence)
        part: dict[str, Any] = {} if sequence is None else {"sequence": sequence + 1}
        if whole:
            sizes = [logits, [], [], [], []]
            b.on_host("aten::slice", 2, sizes, concrete=["", "0", "0", END, "1"])
        b.on_host(taker, 5, [logits, *([[]] * len(args))], concrete=["", *args], **part)
        if also:
            b.compute(also, 100, [logits])
        for at, node in enumerate(("SelectBackward0", "AddmmBackward0") if trains else ()):
            name = f"{NODE_PREFIX}{node}"
            b.compute(name, (us / 8, 2 * us)[at], [], sequence=10 * number + 1 - at)
        b.on_host("aten::gelu", 300)
        b.sync()
    return b
