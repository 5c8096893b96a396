"""The gradient of an embedding is a whole table, although a step uses few rows."""

import re
from functools import partial
from typing import Any

import numpy as np
import polars as pl

from advisor.core.finding import Edit, Finding, Outcomes, Select
from advisor.core.intervals import covered_length
from advisor.core.rule import Evidence, Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.embedding_tables import MAX_DESCRIBED, Table, find_tables
from advisor.measure.device.operator_arguments import inputs_at
from advisor.measure.host import stacks
from advisor.measure.host.names import name_matches
from advisor.replay.selection import mask_under
from advisor.rules.support import kernel_work
from advisor.rules.support.citations import CHOSEN, CURED_RECORDINGS, SPARSE_UPDATE, XPROF
from advisor.rules.support.common import (
    amount_per_step,
    costliest_places,
    of_step,
    runs_code_of,
    scale_edit,
)
from advisor.testing import Examples, TraceBuilder

BACKWARD = r"^aten::(?:embedding|_embedding_bag)_dense_backward$"
BACKWARD_NODE = rf"{BACKWARD}|^autograd::engine::evaluate_function: Embedding(?:Bag)?Backward\d*$"
"""Backward node. On a GPU it also sums several lookups' gradients, each as large as the table."""
OTHER_PARTS = (r"^torch::autograd::AccumulateGrad$", r"^Optimizer\.step#")
"""Patterns of the other parts with work on whole tables."""
_OPTIMIZER = r"^Optimizer\.step#(\w+)\.step$"
MIN_PLACE_SHARE = 0.5
"""Minimum share of an operator's values at which its kernels are places of the finding."""
SPARSE_OPTIMIZERS = {"Adagrad", "SGD"}
"""Optimizers of PyTorch for all parameters that also take sparse gradients."""
LIGHTNING = r"(?:^|/)(?:pytorch_)?lightning/"


class DenseEmbeddingGradient(Rule):
    """The backward pass of ``nn.Embedding`` and ``nn.EmbeddingBag`` fills a gradient as large as
    the table with zeros. It then adds the rows that the batch looked up. The optimizer reads and
    writes the whole table and its state. With ``sparse=True`` the gradient holds the looked-up rows
    alone, and SparseAdam, Adagrad and SGD touch no others.

    The rule fires where a step looks up less than a tenth of the rows, and this work takes much of
    the step. It is silent for a table that is also multiplied (an output layer with tied weights):
    its gradient is dense anyway.

    The gain is the time of the backward operator, and of operators of the optimizer and of gradient
    accumulation whose input has the table's shape. The share of rows in use is subtracted. Several
    lookups in one table make a gradient each, and their sum counts too.

    On a CPU a sparse gradient costs more than its rows: it is sorted, added up and scattered, by
    one thread. This cost is subtracted. Small tables are faster with dense gradients."""

    id = "dense-embedding-gradient"
    title = "The whole embedding table is updated for a few rows"
    needs_shapes = True
    training_only = True
    found_in = (
        "recorded/dense_embedding.slow",
        "recorded/embedding_bag.slow",
        "traces/h100/ads_ranker",
    )
    silent_in = CURED_RECORDINGS
    validation_note = "CPU recordings of both layers, torch 2.13, and their cures"
    references = (
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.Embedding.html",
        "https://docs.pytorch.org/docs/stable/generated/torch.optim.SparseAdam.html",
    )

    min_ratio = Threshold(10, "rows of the table for each row that a step looks up", CHOSEN)
    min_share = Threshold(0.05, "of the step in this work", XPROF)
    worst_factor = Factor(
        0.5, "of the time remains at most: other sparse kernels replace it", CHOSEN
    )
    us_per_table = Factor(250, "µs of a CPU for each table with a sparse gradient", SPARSE_UPDATE)
    ns_per_value = Factor(8, "ns of a CPU for each value looked up in it", SPARSE_UPDATE)
    best_sparse_factor = Factor(0.2, "times that, at best: SGD, repeated rows", SPARSE_UPDATE)
    worst_sparse_factor = Factor(2, "times that, at worst: SparseAdam", SPARSE_UPDATE)

    fix = (
        "Make the gradient sparse, and give the table an optimizer of its own: SparseAdam, Adagrad "
        "or SGD. Other parameters keep their optimizer. SparseAdam updates the moments of "
        "looked-up rows only: compare the loss."
    )
    code = (
        "table = torch.nn.Embedding(rows, size, sparse=True)\n"
        "optimizers = [\n"
        "    torch.optim.SparseAdam(table.parameters(), lr=lr),   # updates used rows\n"
        "    torch.optim.Adam(other_parameters, lr=lr),\n"
        "]"
    )
    cases = {
        "the optimizer takes sparse gradients": {
            "fix": "Make the gradient sparse, as {optimizer} takes sparse gradients.",
            "code": "table = torch.nn.{layer}(rows, size, sparse=True)",
            "falsified_by": "weight decay or clipping, which need the gradient of every row",
            "references": (
                "https://docs.pytorch.org/docs/stable/generated/torch.nn.Embedding.html",
            ),
        },
        "Lightning": {
            "fix": f"{fix} In Lightning, two optimizers need self.automatic_optimization = False."
        },
    }
    verify = "Record again: no operator of the optimizer has the table's shape."
    falsified_by = "weight decay or clipping that needs the gradient of every row"
    assumptions = ("the optimizer may leave rows alone that a step does not use",)
    confidence = 0.8

    def check(self, a: Analysis) -> Outcomes:
        if not a.span_ns:
            return
        if not name_matches(a.trace.cpu["name"], BACKWARD).any():
            return
        tables = [table for table in find_tables(a) if table.rows >= self.min_ratio * table.used]
        if not tables:
            return
        work = _TableWork(a, tables)
        if work.ns < self.min_share * a.span_ns:
            return
        largest = max(tables, key=lambda table: table.rows * table.size)
        yield Finding(
            summary=(
                f"A step looks up at most {largest.used:,} of the {largest.rows:,} rows of an "
                f"embedding, and its gradient and update work on all of them: "
                f"{of_step(a, work.ns)}."
            ),
            evidence=[
                self.compare(
                    "rows of the table for each that a step looks up",
                    largest.rows / largest.used,
                    "min_ratio",
                    "",
                ),
                Evidence(
                    "size of the table's gradient, values", largest.rows * largest.size, "count"
                ),
                amount_per_step(a, "time of work on whole tables", work.ns),
                amount_per_step(a, "time of making the gradient of the table", work.gradient_ns),
                self.compare_share(a, "time of work on whole tables", work.ns),
            ],
            where=kernel_work.kernel_locations(a, work.kernels)
            if work.kernels.any()
            else costliest_places(a, work.backward, work.cost, top=1),
            breaks="" if a.device_id is None else "sizes repeat",
            edits=work.edits(*self._remaining(a, tables, work.ns / max(a.step_count, 1))),
            assumptions=[
                *self.assumptions,
                "small tables keep dense gradients, which are faster"
                if a.device_id is None
                else "no CUDA graph has to hold this part of the step: sizes of sparse gradients "
                "vary from step to step",
            ],
            **self._advise(a, largest, work.optimizers),
        )

    def _remaining(self, a: Analysis, tables: list[Table], ns: float) -> tuple[float, float, float]:
        """Return the share that remains of ``ns`` (per step) of work on these tables: expected, at
        best, at worst."""
        largest = max(tables, key=lambda table: table.rows * table.size)
        expected, best = largest.used / largest.rows, 0.0
        worst = expected
        if a.device_id is None:
            values = sum(table.used * table.size for table in tables)
            cost = (len(tables) * self.us_per_table * 1e3 + values * self.ns_per_value) / ns
            expected, best, worst = (
                cost,
                self.best_sparse_factor * cost,
                self.worst_sparse_factor * cost,
            )
        return min(expected, 1.0), min(best, 1.0), min(max(worst, self.worst_factor), 1.0)

    def _advise(self, a: Analysis, table: Table, optimizers: set[str]) -> dict[str, Any]:
        """Return the texts that fit the table, and the optimizers that update tables."""
        layer = "EmbeddingBag" if table.is_bag else "Embedding"
        if optimizers and optimizers <= SPARSE_OPTIMIZERS:
            name = " and ".join(sorted(optimizers))
            return self.case("the optimizer takes sparse gradients", optimizer=name, layer=layer)
        texts = self.case("Lightning") if runs_code_of(a, LIGHTNING) else {}
        return texts | {"code": self.code.replace("nn.Embedding(", f"nn.{layer}(")}

    @staticmethod
    def examples() -> Examples:
        return {
            "few rows of many": _build_recommender(),
            "on a CPU": _build_recommender(gpu=None),
            "bags": _build_recommender(bag="mean"),
            "bags of the largest value, which take no sparse gradient": (
                _build_recommender(bag="max"),
                "not tables",
            ),
            "a small vocabulary": (_build_recommender(rows=2000), "not tables"),
            "tied weights": (_build_recommender(tied=True), "not tables"),
            "a sparse gradient": (_build_recommender(sparse=True), "name_matches"),
            "hardly any time": (_build_recommender(us=2), "min_share"),
        }


class _TableWork:
    """Work on whole tables in the analysed window: the backward operator, accumulation of its
    gradient, and the optimizer's operators."""

    def __init__(self, a: Analysis, tables: list[Table]) -> None:
        cpu = a.trace.cpu
        self._on_gpu = a.device_id is not None
        ts = cpu["ts"].to_numpy()
        in_window = covered_length(ts, ts + 1, a.steps.host_spans) > 0
        shapes = {(table.rows, table.size) for table in tables}
        share = self._measure_shares(a, shapes)
        backward = name_matches(cpu["name"], BACKWARD).to_numpy()
        # the node around it sums gradients of several look-ups, and frees them
        node = name_matches(cpu["name"], BACKWARD_NODE).to_numpy()
        share[backward | node] = self._is_in_table(a, np.flatnonzero(backward | node), shapes)
        self._gradient_pattern = BACKWARD_NODE if self._on_gpu or node.any() else BACKWARD
        self.backward = np.flatnonzero(backward & in_window & (share > 0)).astype(np.int64)
        self.cost = np.ones(len(self.backward), dtype=np.int64)
        """Cost of each row of ``backward``, its time on a CPU."""
        if not self._on_gpu:
            self.cost = cpu["dur"].to_numpy()[self.backward]
        self.kernels = np.zeros(a.trace.gpu.height, dtype=np.bool_)
        """Kernels that mostly work on these tables, of all parts, aligned with ``trace.gpu``."""
        names = cpu["name"].cast(pl.String).str.extract(_OPTIMIZER).drop_nulls().unique()
        self.optimizers = {
            name
            for name in names
            if (share > 0)[mask_under(a, rf"^Optimizer\.step#{re.escape(name)}\.step$")[:-1]].any()
        }
        """Names of the optimizers that update these tables."""
        self._parts: list[tuple[Select, float]] = []
        self.ns = self.gradient_ns = 0.0
        for pattern in (self._gradient_pattern, *OTHER_PARTS):
            in_part = mask_under(a, pattern)[:-1] & in_window
            table_ns, total_ns = self._sum(a, in_part, share)
            self.ns += table_ns
            self.gradient_ns = table_ns if pattern == self._gradient_pattern else self.gradient_ns
            if table_ns:
                self._parts.append((self._build_select(pattern), table_ns / total_ns))
        if not self._on_gpu and self.optimizers:
            # freeing the gradients of tables takes time on a CPU, those of other layers hardly any
            pattern = rf"^Optimizer\.zero_grad#(?:{'|'.join(sorted(self.optimizers))})\.zero_grad$"
            freeing = name_matches(cpu["name"], pattern).to_numpy() & in_window
            if freeing.any():
                self.ns += float(cpu["dur"].to_numpy()[freeing].sum())
                self._parts.append((Select(on="host", kind=("annotation",), name=pattern), 1.0))

    @staticmethod
    def _is_in_table(a: Analysis, rows: np.ndarray, shapes: set[tuple[int, int]]) -> list[bool]:
        """Return for each backward row whether its look-up is in one of the tables, or unknown."""
        forward = a.forward_op[rows]
        inputs = a.trace.cpu["inputs"].fill_null(-1).to_numpy()[forward]
        inputs = np.where(forward >= 0, inputs, -1)
        table = {index: inputs_at(a, index).tensor(0) for index in np.unique(inputs) if index >= 0}
        is_in_table = {index: x is None or x.shape in shapes for index, x in table.items()}
        return [is_in_table.get(index, True) for index in inputs]

    @staticmethod
    def _measure_shares(a: Analysis, shapes: set[tuple[int, int]]) -> np.ndarray:
        """Return the tables' share of each operator's values, aligned with ``trace.cpu``."""
        described = a.trace.cpu["inputs"].drop_nulls().unique().sort()[:MAX_DESCRIBED]
        share = np.zeros(len(a.trace.inputs) + 1)
        for index in described:
            inputs = inputs_at(a, index)
            lists = [shape for at in range(len(inputs)) for shape in inputs.shapes(at)]
            operands = [tensor.shape for tensor in inputs.tensors] + lists
            sizes = [float(np.prod(shape)) for shape in operands]
            of_tables = sum(s for shape, s in zip(operands, sizes, strict=True) if shape in shapes)
            share[index] = of_tables / max(sum(sizes), 1.0)
        share_of_row: np.ndarray = share[a.trace.cpu["inputs"].fill_null(-1).to_numpy()]
        return share_of_row

    def _sum(self, a: Analysis, in_part: np.ndarray, share: np.ndarray) -> tuple[float, float]:
        """Return the time on the tables and the time of all work there, ns."""
        ops = stacks.is_operator(a.trace) & in_part
        if self._on_gpu:
            launch = a.trace.gpu["launch"].fill_null(-1).to_numpy()
            operator_row = stacks.innermost_ancestor(stacks.parent_rows(a.trace), ops & (share > 0))
            is_chosen = np.append(in_part, False)[launch] & a.in_window
            weight = np.append(share, 0.0)[np.append(operator_row, -1)[launch]]
            dur = a.trace.gpu["dur"].to_numpy()
            self.kernels |= is_chosen & (weight >= MIN_PLACE_SHARE)
        else:
            parent = stacks.parent_rows(a.trace)
            is_chosen = ops & (np.append(stacks.innermost_ancestor(parent, ops), -1)[parent] < 0)
            weight, dur = share, a.trace.cpu["dur"].to_numpy()
        return float((dur * weight)[is_chosen].sum()), float(dur[is_chosen].sum())

    def _build_select(self, pattern: str) -> Select:
        if self._on_gpu:
            return Select(on="gpu", under=pattern)
        if pattern == self._gradient_pattern:
            return Select(on="host", kind=("op",), name=pattern)
        return Select(on="host", kind=("op",), under=pattern)

    def edits(self, remains: float, best: float, worst: float) -> list[Edit]:
        """Return edits that leave these shares of the time on whole tables."""
        return [
            scale_edit(select, *(1 - share * (1 - kept) for kept in (remains, best, worst)))
            for select, share in self._parts
        ]


def _build_recommender(
    *,
    gpu: str | None = "A100",
    rows: int = 400_000,
    tied: bool = False,
    sparse: bool = False,
    us: float = 900,
    bag: str | None = None,
) -> TraceBuilder:
    b = TraceBuilder(gpu=gpu)
    compute = partial(b.compute, kernel="at::native::vectorized_elementwise_kernel")
    table = [rows, 32]
    mode = None if bag is None else ["", "", "", "False", {"mean": "1", "max": "2"}[bag]]
    backward = (
        "aten::embedding_dense_backward" if bag is None else "aten::_embedding_bag_dense_backward"
    )

    for _ in b.steps(5):
        if mode is None:
            compute("aten::embedding", 20, [table, [512]])
        else:
            compute("aten::embedding_bag", 20, [table, [512], [32], [], []], concrete=mode)
        compute("aten::mm", 200, [[512, 32], [32, rows] if tied else [32, 64]])
        if not sparse:
            compute(backward, us, [[512, 32], [512], [], [], []])
            with b.range("Optimizer.step#Adam.step"):
                compute("aten::lerp_", us, [table, table, []])
                compute("aten::lerp_", 10, [[32, 64], [32, 64], []])
    return b
