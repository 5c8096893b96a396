"""Python loops over samples or elements that one call could replace."""

import re
from contextlib import nullcontext

import msgspec
import numpy as np
import polars as pl

from advisor.core import labels
from advisor.core.finding import Finding, Outcomes, Select
from advisor.core.rule import Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.operator_arguments import inputs_at
from advisor.measure.device.shapes import MAX_LISTED
from advisor.measure.host.stacks import NODE_PREFIX
from advisor.replay.exposed_time import selected_host_time
from advisor.replay.selection import mask_under
from advisor.rules.support.citations import CHOSEN, CURED_RECORDINGS, XPROF
from advisor.rules.support.common import (
    amount_per_step,
    costliest_places,
    of_step,
    outermost_in_steps,
    scale_edit,
    sum_column,
)
from advisor.rules.support.kernel_work import exact_pattern
from advisor.rules.support.loop_operators import find_line_of_loop
from advisor.testing import Examples, TraceBuilder

_SAMPLE_PRODUCTS = re.compile(r"^aten::(?:linear|addmm|mm|matmul|mv|conv[123]d|convolution)$")
_RESULTS = (
    "item|_local_scalar_dense|is_nonzero|multinomial|bernoulli|argmax|max|topk|cat|add|add_|mul"
    r"|index_put_|copy_|\w*cell|lstm|gru|rnn_\w+|scaled_dot_product_attention"
)
_DEPENDS = re.compile(rf"^aten::(?:{_RESULTS}|lift_fresh|detach_)$|^autograd::|^Optimizer")
_CARRIES_RESULTS = re.compile(rf"^aten::(?:{_RESULTS})$")
"""Operators that may carry a result of one call into the next: reading and sampling it, joining two
activations, recurrent cells, keys and values; or updates of the weights."""
_COLLECTS = ("aten::stack", "aten::cat")
_SUMS = ("aten::add", "aten::add_")
_SUPPLIES = ("aten::select", "aten::slice", "aten::index", "aten::narrow")
_SPLITS = ("aten::unbind", "aten::split", "aten::chunk")
_JOIN = r"^aten::(?:stack|cat)$"
_EXCLUDED_LOOPS = r"^enumerate\(DataLoader\)|^Optimizer\."
"""Loops that collate samples into a batch, and loops over parameters."""
_MODEL_OPS = re.compile(r"^aten::(?:linear|addmm|mm|matmul|mv|conv[123]d|convolution|lstm|gru)$")
"""Operators of a model that is called per sample, which another rule reports."""
LIST = ("TensorList", "Scalar")


class UnbatchedCalls(Rule):
    """A model is called once per sample (``torch.stack([net(x) for x in batch])``). Each call costs
    the host its operators, and the backward pass as many nodes. A single call with the whole batch
    does the arithmetic in hardly more time than one sample.

    The rule looks for products with the input of one sample: a vector, or a first dimension of 1.
    They repeat 16 times or more in each step with equal shapes. Operators around them take samples
    out of a batch or join as many results. The rule is silent if a call may need the result of the
    previous one. Code between the calls then reads or samples a result, joins two activations
    (recurrent cells, residuals, keys and values), or runs a backward pass. A loop over equal layers
    takes nothing out of a batch and joins nothing."""

    id = "unbatched-calls"
    sampled_part = "forward"
    title = "The model is called once per sample"
    validation_note = (
        "CPU recordings, torch 2.13: 64 calls per step, 5.2 ms instead of 0.6 with one; silent on "
        "layers of one size, a recurrent loop and rollouts"
    )
    found_in = ("recorded/one_by_one.slow",)
    silent_in = CURED_RECORDINGS
    references = ("https://docs.pytorch.org/docs/stable/generated/torch.vmap.html",)

    min_calls = Threshold(16, "calls per step with equal shapes", CHOSEN)
    min_share = Threshold(0.10, "of the step in these calls and their backward", XPROF)
    min_calls_share = Threshold(0.9, "of the calls", CHOSEN)
    factor = Factor(0.15, "of the time in one call", CHOSEN)
    best_factor, worst_factor = (
        Factor(0.03, "of the time in one call, if a sample is hardly any work", CHOSEN),
        Factor(0.5, "of the time in one call, if a sample is much work", CHOSEN),
    )

    fix = (
        "Call the model once with the whole batch: modules accept a batch dimension. If the code "
        "is written for one sample, torch.vmap does the same. Pad samples of different lengths, or "
        "sort them into groups of one length."
    )
    code = "out = net(batch)                  # not torch.stack([net(x) for x in batch])"
    verify = "Record again: the operators of the model run once per step."
    falsified_by = "calls that need the result of the previous call"
    assumptions = ("the calls do not need each other's results",)
    needs_shapes = True
    confidence = 0.7

    def check(self, a: Analysis) -> Outcomes:
        if not a.span_ns or a.steps.source == "whole trace":
            return
        table = outermost_in_steps(a)
        products = table.filter(pl.col("name").str.contains(_SAMPLE_PRODUCTS.pattern))
        counted = products.group_by("name", "inputs").agg(pl.len()).sort("len", "name", "inputs")
        min_count = self.min_calls * a.step_count
        candidates = [
            row
            for row in counted.filter(pl.col("len") >= min_count).iter_rows()
            if _is_one_sample(a, row[1])
        ]
        if not candidates:
            return
        name, inputs, count = candidates[-1]
        calls = table.filter((pl.col("name") == name) & (pl.col("inputs") == inputs))["row"]
        between = table.filter(pl.col("row").is_between(calls.min(), calls.max()))
        between = between.with_columns(step=_step_of(a, between["ts"].to_numpy()))
        step_spans = between.filter(pl.col("row").is_in(calls.implode()))
        step_spans = step_spans.group_by("step").agg(
            pl.col("ts").min().alias("start"), pl.col("ts").max().alias("end")
        )
        between = between.join(step_spans, on="step").filter(
            (pl.col("ts") >= pl.col("start")) & (pl.col("ts") <= pl.col("end"))
        )
        joins = between.filter(pl.col("name").str.contains(_DEPENDS.pattern))
        is_dependent = any(not _is_scalar(a, index) for index in joins["inputs"].to_list())
        if is_dependent:
            return
        if not _is_over_batch(a, table, count, self.min_calls_share):
            return
        names = (
            between.group_by("name")
            .agg(pl.len())
            .filter(pl.col("len") >= self.min_calls_share * count)
        )
        nodes = (
            table.filter(pl.col("name").str.starts_with(NODE_PREFIX)).group_by("name").agg(pl.len())
        )
        nodes = nodes.filter(pl.col("len") >= self.min_calls_share * count)
        loop_names = [*names["name"].to_list(), *nodes["name"].to_list()]
        select = Select(on="host", kind=("op",), name=exact_pattern(loop_names), at="loop")
        ns = selected_host_time(a, select).total
        if ns < self.min_share * a.span_ns:
            return
        number = round(count / a.step_count)
        yield Finding(
            summary=(
                f"{labels.clean(name)} runs {number} times per step on one sample each, with equal "
                "shapes. These calls, their backward and the code between them take "
                f"{of_step(a, ns)}."
            ),
            evidence=[
                amount_per_step(a, "calls, their backward and the code between", ns),
                self.compare("calls on one sample", number, "min_calls", "count", per=a.per),
                self.compare_share(a, "calls, their backward and the code between", ns),
            ],
            where=costliest_places(a, calls.to_numpy(), np.ones(len(calls), dtype=np.int64), top=1),
            edits=[scale_edit(select, self.factor, self.best_factor, self.worst_factor)],
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "one sample at a time": _build_calls(),
            "a recurrent loop": (_build_calls("aten::add"), "is_dependent"),
            "a rollout": (_build_calls("aten::item"), "is_dependent"),
            "layers of one size": (_build_calls(batch=False), "not _is_over_batch"),
            "a batch in each call": (_build_calls(rows=8), "not candidates"),
            "a few calls": (_build_calls(count=6), "min_calls"),
            "small compared with the step": (_build_calls(other_us=200_000), "min_share"),
        }


class LoopedOperators(Rule):
    """A loop in Python computes many small results one by one and joins them:
    ``torch.stack([x[n].mean(0) for n in neighbours])``. Each operator costs the host some
    microseconds, forward and backward, for hardly any arithmetic. One operator with indices does
    the same for all elements.

    The rule looks for ``torch.stack`` or ``torch.cat`` of a long list, and operators that run 64
    times or more in the step for each. A sum of one number at a time counts as such a join, if the
    loop takes as many elements out of a tensor. The rule is silent if code in
    between reads a result or joins two of them, as a recurrence does, because then the order
    matters. Joins inside a DataLoader make batches and do not count. Python between the loop's
    operators counts too.

    Nested loops have many short joins: a loop over states in a loop over time. With 8 inner loops
    or more in a step, one of the two has independent elements, whatever its operators read."""

    id = "looped-operators"
    title = "A Python loop runs operators on one element at a time"
    sampled_part = "forward"
    validation_note = (
        "CPU recordings, torch 2.13. A triplet loss by sample: 30 ms predicted, 49.3 to 24.6 ms "
        "measured. A mean over neighbours by node: 63 ms per step instead of 9"
    )
    found_in = ("recorded/triplets.slow",)
    silent_in = CURED_RECORDINGS
    references = (
        "https://docs.pytorch.org/docs/stable/generated/torch.Tensor.index_add_.html",
        "https://docs.pytorch.org/docs/stable/generated/torch.Tensor.scatter_reduce_.html",
    )

    min_calls = Threshold(64, "calls of an operator for one join of their results", CHOSEN)
    min_nested_loops = Threshold(8, "inner loops per step, each with a join of its own", CHOSEN)
    max_call_us = Threshold(100, "µs per operator of an inner loop; longer ones do work", CHOSEN)
    min_share = Threshold(0.10, "of the step in the loop's operators and their backward", XPROF)
    factor = Factor(0.1, "of the time, with one operator for all elements", CHOSEN)
    worst_factor = Factor(0.4, "of the time remains at most, if elements are much work", CHOSEN)

    fix = (
        "Replace the loop with operators on all elements. Gather rows with one index tensor, and "
        "sum or average groups with index_add or scatter_reduce. Broadcast or use torch.vmap for "
        "other code. Build index tensors once, outside the step."
    )
    code = (
        "# source, target: index tensors, one entry per pair; made once\n"
        "total = torch.zeros_like(x).index_add(0, target, x[source])\n"
        "mean = total / count.unsqueeze(1)   # not torch.stack([x[n].mean(0) for n in ...])"
    )
    verify = "Record again: the step has a few operators in place of thousands."
    falsified_by = "elements that need the result of the previous element"
    assumptions = ("the elements do not need each other's results",)
    needs_shapes = True
    confidence = 0.7

    def check(self, a: Analysis) -> Outcomes:
        if not a.span_ns or a.steps.source == "whole trace":
            return
        table = outermost_in_steps(a)
        table = table.filter(~pl.Series(_is_excluded(a, table["row"].to_numpy())))
        joins, is_nested = _count_long_joins(a, table) or self._count_sums(a, table), False
        calls_per_join = float(self.min_calls)
        if joins < a.step_count:
            joins, elements = _count_short_joins(a, table)
            is_nested = joins >= self.min_nested_loops * a.step_count
            calls_per_join = elements / max(joins, 1)
            if not is_nested or elements < self.min_calls * a.step_count:
                return
        counts = table.group_by("name").agg(pl.len(), pl.col("ns").sum(), pl.col("inputs").first())
        counts = counts.filter(pl.col("len") >= calls_per_join * joins)
        loop_names = counts["name"].to_list()
        forward = [name for name in loop_names if not name.startswith(NODE_PREFIX)]
        if not forward or any(_MODEL_OPS.match(name) for name in forward):
            return
        if not is_nested and _carries_results(a, counts):
            return  # of nested loops, one has independent elements
        if is_nested and sum_column(counts["ns"]) > self.max_call_us * 1e3 * sum_column(
            counts["len"]
        ):
            return
        select = Select(on="host", kind=("op",), name=exact_pattern(loop_names), at="loop")
        ns = selected_host_time(a, select).total
        if ns < self.min_share * a.span_ns:
            return
        loop = table.filter(pl.col("name").is_in(forward))
        number = round(len(loop) / len(forward) / a.step_count)
        names = ", ".join(
            loop.group_by("name").agg(pl.col("ns").sum()).sort("ns", "name")["name"][-3:]
        )
        yield Finding(
            summary=(
                f"A loop runs {names} about {number:,} times per step and joins the results. "
                f"With their backward and the code between this takes {of_step(a, ns)}."
            ),
            evidence=[
                amount_per_step(a, "the loop and its backward", ns),
                self.compare("calls of each operator", number, "min_calls", "count", per=a.per),
                self.compare_share(a, "the loop and its backward", ns),
            ],
            where=[
                *find_line_of_loop(a, loop["row"].to_numpy()),
                *costliest_places(a, loop["row"].to_numpy(), loop["ns"].to_numpy(), top=1),
            ],
            costs_more_than_recorded=True,
            edits=[scale_edit(select, self.factor, self.factor / 2, self.worst_factor)],
        )

    def _count_sums(self, a: Analysis, table: pl.DataFrame) -> int:
        """Return the number of sums that a loop adds up one number at a time, one for each step,
        if it takes as many elements out of a tensor. 0 if it does not."""
        min_count = self.min_calls * a.step_count
        added = table.filter(pl.col("name").is_in(_SUMS))["inputs"]
        numbers = sum(_is_scalar(a, index) for index in added)
        taken = table["name"].is_in(_SUPPLIES).sum()
        return a.step_count if min(numbers, taken) >= min_count else 0

    @staticmethod
    def examples() -> Examples:
        return {
            "the largest of each row": _build_graph(between="aten::max"),
            "a sum of losses": _build_graph(sums=True),
            "a sum over parameters": (_build_graph(sums=True, supply=""), "not is_nested"),
            "a mean by node": _build_graph(),
            "without gradients": _build_graph(trains=False),
            "a recurrence": (_build_graph(between="aten::add"), "_carries_results"),
            "a loop that reads results": (_build_graph(between="aten::item"), "_carries_results"),
            "a model for each sample": (_build_graph(between="aten::linear"), "_MODEL_OPS"),
            "a batch is collated": (_build_graph(loader=True), "not is_nested"),
            "nested loops": _build_graph(count=12, between="aten::add", loops=10),
            "few tensors": (_build_graph(count=12), "not is_nested"),
            "a few nested loops": (_build_graph(count=20, loops=4), "min_nested_loops"),
            "nested loops over large tensors": (
                _build_graph(count=12, loops=10, us=300),
                "max_call_us",
            ),
            "a list of some tensors": (_build_graph(count=40), "min_calls"),
            "small compared with the step": (_build_graph(other_us=200_000), "min_share"),
        }


def _step_of(a: Analysis, ts: np.ndarray) -> np.ndarray:
    """Return the number of the analysed step at each time, starting with 1."""
    step: np.ndarray = np.searchsorted(a.steps.used["ts"].to_numpy(), ts, side="right")
    return step


def _is_one_sample(a: Analysis, index: int | None) -> bool:
    """Return whether the first input is one sample: a vector, or a first dimension of 1."""
    tensor = None if index is None else inputs_at(a, index).tensor(0)
    if tensor is None or tensor.elements < 2:
        return False
    return len(tensor.shape) == 1 or tensor.shape[0] == 1


def _is_scalar(a: Analysis, index: int | None) -> bool:
    """Return whether all tensors are single numbers, such as a sum of losses."""
    tensors = [] if index is None else inputs_at(a, index).tensors
    return bool(tensors) and all(tensor.elements <= 1 for tensor in tensors)


def _is_over_batch(a: Analysis, table: pl.DataFrame, count: int, min_share: float) -> bool:
    """Return whether samples are taken out of a batch, or as many results are joined."""
    samples_per_step = min_share * count / a.step_count
    supplies = table.filter(pl.col("name").is_in(_SUPPLIES))
    if len(supplies) >= min_share * count:
        return True
    unbound = table.filter(pl.col("name").is_in(_SPLITS))["inputs"].drop_nulls().unique()
    for index in unbound.to_list():
        tensor = inputs_at(a, index).tensor(0)
        if tensor is not None and any(
            samples_per_step <= size <= 2 * samples_per_step for size in tensor.shape
        ):
            return True
    collects = table.filter(pl.col("name").is_in(_COLLECTS))["inputs"].drop_nulls().unique()
    return any(_list_length(a, index) >= samples_per_step for index in collects.to_list())


def _list_length(a: Analysis, index: int) -> int:
    """Return the length of the tensor list that is the first input; 0 if it is not a list."""
    try:
        dims = msgspec.json.decode(a.trace.inputs["dims"][index])
    except (msgspec.DecodeError, RecursionError):
        return 0
    first = dims[0] if isinstance(dims, list) and dims else None
    return len(first) if isinstance(first, list) and all(isinstance(x, list) for x in first) else 0


def _build_calls(
    between: str = "", *, batch: bool = True, rows: int = 0, count: int = 32, other_us: float = 1000
) -> TraceBuilder:
    b = TraceBuilder(gpu=None)
    shape = [rows, 128] if rows else [128]
    for _ in b.steps():
        for _ in range(count):
            b.on_host("aten::linear", 60, [shape, [256, 128], [256]])
            b.on_host("aten::relu", 10, [[256]])
            if between:
                b.on_host(between, 2, [[256], [256]])
        if batch:
            b.on_host("aten::stack", 20, [[[256]] * count])
        for _ in range(count):
            b.on_host(f"{NODE_PREFIX}AddmmBackward0", 80)
        b.on_host("aten::lerp_", other_us)
    return b


def _count_long_joins(a: Analysis, table: pl.DataFrame) -> int:
    """Return the number of stack or cat calls on more than 30 tensors. The profiler leaves out the
    sizes of longer lists."""
    joins = table.filter(pl.col("name").str.contains(_JOIN) & pl.col("inputs").is_not_null())
    shapes = [inputs_at(a, index).shapes(0) for index in joins["inputs"]]
    return sum(not listed or len(listed) > MAX_LISTED for listed in shapes)


MIN_SHORT_LIST = 4
"""Minimum length of a list that an inner loop joins: code without a loop joins two or three."""


def _count_short_joins(a: Analysis, table: pl.DataFrame) -> tuple[int, int]:
    """Return the number of stack calls on lists of known length, and how many tensors they join."""
    joins = table.filter((pl.col("name") == "aten::stack") & pl.col("inputs").is_not_null())
    lengths = [_list_length(a, index) for index in joins["inputs"].to_list()]
    lengths = [length for length in lengths if length >= MIN_SHORT_LIST]
    return len(lengths), sum(lengths)


def _carries_results(a: Analysis, loop_ops: pl.DataFrame) -> bool:
    """Return whether an operator of the loop reads a result or joins two."""
    return any(
        _CARRIES_RESULTS.match(name) and not _is_scalar(a, index) and not _reduces(a, name, index)
        for name, index in loop_ops.select("name", "inputs").iter_rows()
    )


def _reduces(a: Analysis, name: str, index: int | None) -> bool:
    """Return whether an operator is the maximum of one whole tensor, without a dimension."""
    return name == "aten::max" and index is not None and len(inputs_at(a, index)) == 1


def _is_excluded(a: Analysis, rows: np.ndarray) -> np.ndarray:
    is_excluded: np.ndarray = mask_under(a, _EXCLUDED_LOOPS)[rows]
    return is_excluded


def _build_graph(
    *,
    count: int = 100,
    trains: bool = True,
    between: str = "",
    loader: bool = False,
    sums: bool = False,
    supply: str = "aten::index",
    loops: int = 1,
    us: float = 15,
    other_us: float = 300,
) -> TraceBuilder:
    b = TraceBuilder(gpu=None)
    for _ in b.steps(4):
        with b.range("enumerate(DataLoader)#_X.__next__") if loader else nullcontext():
            for number in range(1, loops * count + 1):
                b.on_host(supply or "aten::pow", us)
                b.on_host("aten::mean", us)
                if between:
                    shapes = [[4, 32]] if between == "aten::max" else [[4, 32], [4, 32]]
                    b.on_host(between, 5, shapes)
                if sums:
                    b.on_host("aten::add", 5, [[], []])
                elif number % count == 0:
                    tensors = [] if count > 30 else [[32]] * count
                    with b.op("aten::stack", [tensors, []], LIST):
                        b.host(100)
        b.on_host("aten::softmax", other_us)
        for _ in range(loops * count if trains else 0):
            b.on_host("autograd::engine::evaluate_function: MeanBackward1", 20)
    return b
