"""A loop in Python runs operators on one element at a time and joins the results."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import ClassVar

import numpy as np
import polars as pl

from advisor.core.finding import Finding, Outcomes, Select
from advisor.core.rule import Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.shapes import OpInputs
from advisor.replay.selection import under_names
from advisor.rules.citations import CHOSEN, XPROF
from advisor.rules.common import amount_per_step, costliest_places, of_step, scale_edit
from advisor.rules.host.unbatched_calls import CARRIES_RESULTS, is_scalar, outermost_operators
from advisor.rules.kernel.kernel_common import match_exactly
from advisor.testing import Examples, TraceBuilder

_JOIN = r"^aten::(?:stack|cat)$"
_LOADS = r"^enumerate\(DataLoader\)"
_PRODUCTS = re.compile(r"^aten::(?:linear|addmm|mm|matmul|mv|conv[123]d|convolution|lstm|gru)$")
"""Calls of a model for one sample: another rule."""
LIST = ("TensorList", "Scalar")
MAX_LISTED = 30
"""Tensors of a list whose sizes PyTorch's profiler writes."""
_NODE = "autograd::engine::evaluate_function: "


class LoopedOperators(Rule):
    """A loop in Python computes many small results one by one and joins them:
    ``torch.stack([x[n].mean(0) for n in neighbours])``. Each operator costs the host some
    microseconds, forward and backward, for hardly any arithmetic. One operator with indices does
    the same for all elements.

    Looked for are ``torch.stack`` or ``torch.cat`` of a long list, and operators that run 64 times
    or more in the step for each of them. The rule is silent where something between reads a
    result or joins two of them, as a recurrence does: then the order matters. Joins inside a
    DataLoader are batches. The gain is a lower bound: Python between the operators goes too, and
    is not counted.
    """

    id = "looped-operators"
    title = "A Python loop runs operators on one element at a time"
    sampled_part = "forward"
    validated_on = (
        "CPU recordings, torch 2.13: a mean over neighbours by node, 63 ms per step instead of 9"
    )
    references: ClassVar[tuple[str, ...]] = (
        "https://docs.pytorch.org/docs/stable/generated/torch.Tensor.index_add_.html",
        "https://docs.pytorch.org/docs/stable/generated/torch.Tensor.scatter_reduce_.html",
    )

    min_calls = Threshold(64, "calls of an operator for one join of their results", CHOSEN)
    min_share = Threshold(0.10, "of the step in the loop's operators and their backward", XPROF)
    factor = Threshold(0.1, "of the time, with one operator for all elements", CHOSEN)
    worst = Threshold(
        0.4, "of the time remains at most, where elements are work of their own", CHOSEN
    )

    fix = (
        "Replace the loop by operators on all elements: gather rows with one index tensor, sum or "
        "average groups with index_add or scatter_reduce, broadcast or use torch.vmap for the "
        "rest. Build index tensors once, outside of the step."
    )
    code = (
        "# source, target: index tensors, one entry per pair; made once\n"
        "total = torch.zeros_like(x).index_add(0, target, x[source])\n"
        "mean = total / count[:, None]   # not torch.stack([x[n].mean(0) for n in ...])"
    )
    verify = "Record again: the step has a few operators in place of thousands."
    falsified_by = "elements that need the result of the element before"
    assumptions = ("the elements do not need each other's results",)
    confidence = 0.7

    def check(self, a: Analysis) -> Outcomes:
        """The join of most tensors, and what runs as often before it."""
        if not a.span_ns or a.trace.inputs.is_empty() or a.steps.source == "whole trace":
            return
        table = outermost_operators(a)
        table = table.filter(~pl.Series(_in_loader(a, table["row"].to_numpy())))
        joins = _long_joins(a, table)
        if joins < a.step_count:
            return
        counts = table.group_by("name").agg(pl.len(), pl.col("ns").sum(), pl.col("inputs").first())
        counts = counts.filter(pl.col("len") >= self.min_calls * joins)
        chosen = counts["name"].to_list()
        forward = [name for name in chosen if not name.startswith(_NODE)]
        if not forward or any(_PRODUCTS.match(name) for name in forward):
            return
        if _carries_results(a, counts):
            return
        ns = int(counts["ns"].sum())
        if ns < self.min_share * a.span_ns:
            return
        loop = table.filter(pl.col("name").is_in(forward))
        each = round(len(loop) / len(forward) / a.step_count)
        names = ", ".join(loop.group_by("name").agg(pl.col("ns").sum()).sort("ns")["name"][-3:])
        yield Finding(
            summary=(
                f"A loop runs {names} about {each:,} times per step and joins the results with "
                f"one call. With their backward this takes {of_step(a, ns)}."
            ),
            evidence=[
                amount_per_step(a, "the loop's operators and their backward", ns),
                self.compare("calls of each", each / joins * a.step_count, "min_calls", "count"),
                self.compare("share", ns / a.span_ns, "min_share", per=a.per),
            ],
            where=costliest_places(a, loop["row"].to_numpy(), loop["ns"].to_numpy(), top=1),
            known_cost=True,
            edits=[
                scale_edit(
                    Select(on="host", kind=("op",), name=match_exactly(chosen)),
                    self.factor,
                    self.factor / 2,
                    self.worst,
                )
            ],
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "a mean by node": _graph(),
            "without gradients": _graph(trains=False),
            "a recurrence": (_graph(between="aten::add"), "_carries_results"),
            "a loop that reads results": (_graph(between="aten::item"), "_carries_results"),
            "a model for each sample": (_graph(between="aten::linear"), "_PRODUCTS"),
            "a batch is collated": (_graph(loader=True), "joins < a.step_count"),
            "few tensors": (_graph(count=12), "joins < a.step_count"),
            "a list of some tensors": (_graph(count=40), "min_calls"),
            "small beside the rest": (_graph(rest=200_000), "min_share"),
        }


def _long_joins(a: Analysis, table: pl.DataFrame) -> int:
    """Calls of stack or cat with a list of more than 30 tensors: the profiler leaves out the sizes
    of longer lists."""
    joins = table.filter(pl.col("name").str.contains(_JOIN) & pl.col("inputs").is_not_null())
    inputs = a.trace.inputs.select("dims", "types")
    shapes = [OpInputs(*inputs.row(index)).shapes(0) for index in joins["inputs"]]
    return sum(not listed or len(listed) > MAX_LISTED for listed in shapes)


def _carries_results(a: Analysis, often: pl.DataFrame) -> bool:
    """Whether an operator of the loop reads a result, or joins two."""
    return any(
        CARRIES_RESULTS.match(name) and not is_scalar(a, index)
        for name, index in often.select("name", "inputs").iter_rows()
    )


def _in_loader(a: Analysis, rows: np.ndarray) -> np.ndarray:
    inside: np.ndarray = under_names(a, _LOADS)[rows]
    return inside


def _graph(
    *,
    count: int = 100,
    trains: bool = True,
    between: str = "",
    loader: bool = False,
    rest: float = 300,
) -> TraceBuilder:
    b = TraceBuilder(gpu=None)
    for _ in b.steps(4):
        with b.range("enumerate(DataLoader)#_X.__next__") if loader else nullcontext():
            for _ in range(count):
                b.on_host("aten::index", 15)
                b.on_host("aten::mean", 15)
                if between:
                    with b.op(between, [[4, 32], [4, 32]], host_us=5):
                        pass
            with b.op("aten::stack", [[], []] if count > 30 else [[[32]] * count, []], LIST):
                b.host(100)
        b.on_host("aten::softmax", rest)
        for _ in range(count if trains else 0):
            b.on_host("autograd::engine::evaluate_function: MeanBackward1", 20)
    return b
