"""Arithmetic on a whole tensor of which only a small part is used."""

from functools import partial
from itertools import groupby
from math import prod
from typing import Any, ClassVar, NamedTuple

import numpy as np

from advisor.core.finding import Finding, Outcomes
from advisor.core.rule import Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.operator_arguments import TAKES, inputs_at, range_taken
from advisor.measure.device.shapes import OpInputs, Shape
from advisor.rules.support.citations import CHOSEN, SILENT_INPUTS, XPROF
from advisor.rules.support.common import (
    amount_per_step,
    costliest_places,
    of_step,
    outermost_in_steps,
)
from advisor.rules.support.kernel_work import scale_operators, time_of_operators
from advisor.testing import Examples, TraceBuilder

CHANNEL_ARITHMETIC = frozenset(
    f"aten::{name}{end}" for name in ("add", "div", "mul", "sub") for end in ("", "_")
)
RESIZES = (
    "aten::upsample_bilinear2d", "aten::_upsample_bilinear2d_aa", "aten::upsample_bicubic2d",
    "aten::_upsample_bicubic2d_aa", "aten::upsample_nearest2d", "aten::adaptive_avg_pool2d",
)  # fmt: skip
"""Weighted means of pixels. Per-channel arithmetic gives the same result before and after them."""
_INDEX_OPS = ("aten::index", "aten::index_select")
MAX_READERS = 16
"""Number of operators after the arithmetic in which the rule looks for readers of its result."""


class Wasted(NamedTuple):
    """Arithmetic on one shape, and the part of its result that is used."""

    shape: Shape
    used: float
    """Share of the result's elements that the following operators use."""
    resized: bool
    rows: list[int]
    """Rows of ``trace.cpu``."""


class PointwiseBeforePart(Rule):
    """Arithmetic runs on a whole tensor, and the next operator takes a small part of the result, or
    makes it smaller. For example, a picture is normalised and then resized, or a dataset is
    normalised in each step and then indexed. The same arithmetic on the smaller part gives the same
    result.

    The rule finds consecutive additions, products and quotients with numbers or with one number per
    channel. All operators that read the result take parts of it or resize it. If a picture is
    resized, the other operand must be the same for all pixels."""

    id = "pointwise-before-part"
    title = "Arithmetic on a whole tensor of which a part is used"
    found_in = ("recorded/pictures.slow",)
    silent_in = SILENT_INPUTS
    validation_note = (
        "a CPU recording, torch 2.13, and its cure, on a busy machine. A service that normalised "
        "frames before it resized them, not in the tests: 20 to 22 ms predicted, 24 to 32 ms "
        "measured"
    )
    references = ("https://docs.pytorch.org/docs/stable/tensor_view.html",)

    min_share = Threshold(0.05, "of the step in arithmetic on unused elements", XPROF)
    max_used_share = Threshold(0.5, "of the elements are used: with more, little is saved", CHOSEN)

    fix = (
        "Take the part first, then compute. If the result is the same in each step, such as a "
        "normalised dataset, compute it once instead."
    )
    code = "batch = (data[index] - mean) / std     # not ((data - mean) / std)[index]"
    cases: ClassVar[dict[str, dict[str, Any]]] = {
        "a picture is resized": {
            "fix": "Resize and crop first, then scale and normalise. Arithmetic that is the same "
            "for all pixels of a channel gives the same on the smaller picture.",
            "code": 'x = F.interpolate(x, size=size, mode="bilinear", antialias=True)\n'
            "x = (x / 255 - mean) / std     # not before F.interpolate",
        }
    }
    verify = "Record again: this arithmetic has smaller shapes. Compare the results."
    falsified_by = "other code that reads the whole result, in steps that are not recorded"
    assumptions = ("only this part of the result is used",)
    needs_shapes = True
    confidence = 0.85

    def check(self, a: Analysis) -> Outcomes:
        if not a.span_ns:
            return
        wasted = _find_wasted(a)
        if not wasted:
            return
        for arithmetic in wasted:
            rows = np.array(arithmetic.rows)
            ns = time_of_operators(a, rows)
            saved = (1 - arithmetic.used) * ns
            if arithmetic.used > self.max_used_share:
                continue
            if saved < self.min_share * a.span_ns:
                continue
            sizes = " × ".join(f"{size:,}" for size in arithmetic.shape)
            effect = "makes it smaller" if arithmetic.resized else "takes a part of it"
            yield Finding(
                summary=(
                    f"Arithmetic on {sizes} elements takes {of_step(a, ns)}, and what reads the "
                    f"result {effect}: {arithmetic.used:.0%} of as many elements are left."
                ),
                evidence=[
                    amount_per_step(a, "time of this arithmetic", ns),
                    amount_per_step(a, "calls of this arithmetic", len(rows), "count"),
                    self.compare(
                        "part of the elements that is used", arithmetic.used, "max_used_share"
                    ),
                    self.compare_share(a, "arithmetic on unused elements", saved),
                ],
                where=costliest_places(a, rows),
                edits=[scale_operators(a, rows, (saved, ns, 0.8 * saved))],
                **(self.case("a picture is resized") if arithmetic.resized else {}),
            )

    @staticmethod
    def examples() -> Examples:
        return {
            "normalised, then resized": _build_pictures(),
            "on a GPU": _build_pictures(gpu="A100"),
            "a dataset, then indexed": _build_pictures(taker="aten::index"),
            "a picture, then cropped": _build_pictures(taker="aten::slice"),
            "most of it is taken": (
                _build_pictures(taker="aten::slice", end="1000"),
                "self.max_used_share",
            ),
            "another reads it": (_build_pictures(reader=True), "not wasted"),
            "with a mask of pixels": (_build_pictures(other=[1, 1, 1080, 1920]), "not wasted"),
            "hardly any time": (_build_pictures(us=20), "min_share"),
        }


def _find_wasted(a: Analysis) -> list[Wasted]:
    """Return arithmetic whose result is only read in part, by shape."""
    table = outermost_in_steps(a)
    names, rows = table["name"].to_list(), table["row"].to_list()
    if not any(name in RESIZES or name in TAKES or name in _INDEX_OPS for name in names):
        return []
    inputs = {at: inputs_at(a, at) for at in table["inputs"].drop_nulls().unique()}
    calls = [inputs.get(at) for at in table["inputs"]]
    shapes = map(_arithmetic_shape, names, calls)
    by_shape: dict[Shape, Wasted] = {}
    fully_read: set[Shape] = set()
    end = 0
    for shape, run in groupby(shapes):
        start, end = end, end + len(list(run))
        if shape is None:
            continue
        part = _part_used(shape, names, calls, start, end)
        if part is None:
            fully_read.add(shape)
        else:
            by_shape.setdefault(shape, Wasted(shape, *part, [])).rows.extend(rows[start:end])
    return [wasted for wasted in by_shape.values() if wasted.shape not in fully_read]


def _arithmetic_shape(name: str, x: OpInputs | None) -> Shape | None:
    """Return the shape of arithmetic on a tensor of at least two dimensions. ``None`` for other
    operators, or if the result is larger than that tensor."""
    first = None if x is None or name not in CHANNEL_ARITHMETIC else x.tensor(0)
    if first is None or x is None or len(first.shape) < 2 or not prod(first.shape):
        return None
    other_shapes = [shape.shape for shape in x.tensors[1:]]
    all_fit = all(
        len(shape) <= len(first.shape) and prod(shape) <= prod(first.shape)
        for shape in other_shapes
    )
    return first.shape if all_fit else None


def _part_used(
    shape: Shape, names: list[str], calls: list[OpInputs | None], start: int, end: int
) -> tuple[float, bool] | None:
    """Return the share of the result that the operators from ``end`` on use, and whether they
    resize it. ``None`` if all of it is read, or no reader was found."""
    by_channel = all(
        tensor.shape[-2:] in ((1, 1), (1,), ())
        for x in calls[start:end]
        if x is not None
        for tensor in x.tensors[1:]
    )
    used, resized = 0.0, False
    for n in range(end, min(len(names), end + MAX_READERS)):
        x = calls[n]
        if x is None or not any(tensor.shape == shape for tensor in x.tensors):
            continue
        if names[n] in CHANNEL_ARITHMETIC and n > end:
            break  # the next one begins
        share = _used_share(names[n], x, shape)
        if share is None or (names[n] in RESIZES and not by_channel):
            return None
        used, resized = used + share, resized or names[n] in RESIZES
    return (used, resized) if used else None


def _used_share(name: str, x: OpInputs, shape: Shape) -> float | None:
    """Return the share of a tensor's elements that an operator uses, or ``None`` if it reads
    all."""
    first = x.tensor(0)
    if first is None or first.shape != shape:
        return None
    if name in RESIZES:
        size = x.integers(1)
        return prod(size) / prod(shape[-len(size) :]) if size else None
    if name in TAKES and isinstance(dim := x.argument(1), int) and -len(shape) <= dim < len(shape):
        taken = range_taken(name, x, dim, shape[dim])
        return None if taken is None else max(0, taken[1] - taken[0]) / shape[dim]
    if name in _INDEX_OPS:
        index = x.shapes(1)[:1] if name == "aten::index" else [one.shape for one in x.tensors[1:2]]
        return prod(index[0]) / shape[0] if index else None
    return None


def _build_pictures(
    *, gpu: str | None = None, taker: str = RESIZES[1], end: str = "224", reader: bool = False,
    other: list[int] | None = None, us: float = 4000,
) -> TraceBuilder:  # fmt: skip
    b = TraceBuilder(gpu=gpu)
    compute = partial(b.compute, kernel="vectorized_elementwise_kernel")
    shape, channel = [1000, 3, 1080, 1920], other or [1, 3, 1, 1]

    for _ in b.steps():
        compute("aten::sub", us, [shape, channel, []])
        compute("aten::div", us, [shape, channel])
        if taker == "aten::index":
            compute(taker, 100, [shape, [[32]]], ["float", "TensorList"])
        elif taker == "aten::slice":
            compute(taker, 3, [shape, [], [], [], []], concrete=["", "2", "0", end, "1"])
        else:
            compute(taker, 500, [shape, [], [], []], concrete=["", "[256, 455]", "False", ""])
        if reader:
            compute("aten::mean", 300, [shape])
        compute("aten::conv2d", 9000, [[1, 3, 224, 224], [64, 3, 7, 7]])
        b.sync()
    return b
