"""Chains of two matrix products that are computed in the expensive order."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import polars as pl

from advisor.core.finding import Finding, Outcomes
from advisor.core.rule import Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.operator_arguments import inputs_at
from advisor.measure.device.product_chains import (
    CHAIN_PRODUCTS,
    SPARSE_MM,
    ProductChain,
    parse_chain,
)
from advisor.measure.device.shapes import OpInputs, Shape
from advisor.measure.host.names import name_matches
from advisor.measure.host.stacks import NODE_PREFIX
from advisor.measure.steps.steps import rows_in_steps
from advisor.rules.support.citations import CHOSEN, SILENT_INPUTS, SLOW_ARGUMENTS, XPROF
from advisor.rules.support.common import (
    Rows,
    amount_per_step,
    backward_operators,
    costliest_places,
    of_step,
    outermost_in_steps,
)
from advisor.rules.support.kernel_work import scale_operators, time_of_operators
from advisor.rules.support.launch_gaps import is_compiled
from advisor.testing import Examples, TraceBuilder

VIEWS = [
    f"aten::{op}"
    for op in "t numpy_T mT adjoint transpose permute view reshape expand squeeze unsqueeze detach "
    "alias".split()
]


class ProductOrder(Rule):
    """Two matrix products of three matrices run in the expensive order. ``(A B) C`` and ``A (B C)``
    are equal, but can differ much in cost. A sparse matrix times 500 columns, projected to 64
    columns afterwards, is one example. ``X.T @ X @ w`` and attention without a softmax,
    ``(q @ k.T) @ v``, are others.

    The rule finds two outermost products in a row with nothing but views between them. The result
    of the first must be an input of the second. No other operator may read a tensor of its shape
    before the backward pass begins or the step ends, as it might need the result. A first product
    with a bias is not reported. ``(A B + b) C`` equals ``A (B C) + b C``, which needs another line.

    The cost of an order is its multiply-adds plus ``element_cost`` for each element of its
    matrices, forward and backward. The number of non-zeros of a sparse matrix is not recorded. Its
    time is scaled by the number of columns that it is multiplied with, plus ``conversion_cost``
    columns. Both factors were measured on one CPU thread."""

    id = "product-order"
    title = "Two matrix products in a row run in the expensive order"
    found_in = ("recorded/product_order.slow",)
    silent_in = SILENT_INPUTS
    validation_note = (
        "a CPU recording of attention without a softmax and its cure, torch 2.13: 55% of the step "
        "predicted, 57% measured; a graph network with sparse products: 22% and 22%"
    )
    references = ("https://docs.pytorch.org/docs/stable/generated/torch.linalg.multi_dot.html",)

    min_share = Threshold(0.05, "of the step is saved", XPROF)
    max_remaining_share = Threshold(
        0.5, "of the pair's arithmetic remains; with more, the gain is uncertain", CHOSEN
    )
    element_cost = Factor(20, "multiply-adds take as long as reading one element", SLOW_ARGUMENTS)
    best_element_cost = Factor(0, "multiply-adds, at best", SLOW_ARGUMENTS)
    worst_element_cost = Factor(60, "multiply-adds, at worst", SLOW_ARGUMENTS)
    conversion_cost = Factor(
        100, "columns take as long as reading the sparse matrix", SLOW_ARGUMENTS
    )
    best_conversion_cost = Factor(10, "columns, at best", SLOW_ARGUMENTS)
    worst_conversion_cost = Factor(250, "columns, at worst", SLOW_ARGUMENTS)

    fix = "Compute the cheaper product first: move the parentheses. Results differ by rounding."
    code = (
        "x = adj @ (x @ weight)          # not (adj @ x) @ weight\n"
        "out = q @ (k.mT @ v)            # not (q @ k.mT) @ v\n"
        "# two-dimensional dense matrices, in the cheapest order\n"
        "y = torch.linalg.multi_dot((a, b, c))"
    )
    cases: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "from the left": {},
        "from the right": {
            "code": "y = (a @ b) @ c          # not a @ (b @ c)\n"
            "# two-dimensional dense matrices, in the cheapest order\n"
            "y = torch.linalg.multi_dot((a, b, c))"
        },
    }
    verify = (
        "Record again: the first product of the pair has a smaller result. Compare the results."
    )
    falsified_by = "code that needs the first product's result for itself"
    assumptions = ("only the second product reads the first one's result",)
    sampled_part = "forward"
    needs_shapes = True
    confidence = 0.85

    def check(self, a: Analysis) -> Outcomes:
        if not a.span_ns or is_compiled(a):
            return
        by_case: dict[str, list[tuple[ProductChain, Rows, Rows, list[float]]]] = {}
        for chain, pairs in _find_chains(a):
            rows, ns, *left = self._estimate(a, chain, pairs)
            if self.max_remaining_share * ns >= left[1] > 0:
                case = "from the right" if chain.reverse else "from the left"
                estimate = chain, pairs, rows, [ns, *(ns - remaining for remaining in left)]
                by_case.setdefault(case, []).append(estimate)
        for case, estimates in by_case.items():
            ns, *saved = (sum(one[3][index] for one in estimates) for index in range(4))
            if saved[0] < self.min_share * a.span_ns:
                continue
            chain = max(estimates, key=lambda one: one[3][1])[0]
            products = np.concatenate([pairs.ravel() for _, pairs, _, _ in estimates])
            rows = np.concatenate([rows for _, _, rows, _ in estimates])
            backward = (
                " With their backward pass they take" if len(rows) > len(products) else " They take"
            )
            yield Finding(
                summary=(
                    f"Two products in a row compute {chain.describe()} {case}.{backward} "
                    f"{of_step(a, ns)}. In the other order {1 - saved[0] / ns:.0%} of it remains."
                ),
                evidence=[
                    amount_per_step(a, "time of these products", ns),
                    amount_per_step(a, "pairs of products", len(products) // 2, "count"),
                    self.compare(
                        "arithmetic that remains", 1 - saved[1] / ns, "max_remaining_share"
                    ),
                    self.compare_share(a, "time saved", saved[0]),
                ],
                where=costliest_places(a, products, top=1),
                edits=[scale_operators(a, rows, saved)],
                **self.case(case),
            )

    def _estimate(
        self, a: Analysis, chain: ProductChain, pairs: Rows
    ) -> tuple[Rows, float, float, float, float]:
        """Return the rows of the products with their backward pass, their time, and what remains of
        it in the other order (expected, at best, at worst), ns."""
        backward = [rows_in_steps(a, backward_operators(a, rows)) for rows in pairs.T]
        parts = [np.concatenate(rows) for rows in zip(pairs.T, backward, strict=True)]
        times = [time_of_operators(a, rows) for rows in parts]
        trained = [len(rows) > 0 for rows in backward]
        expected, best, worst = (
            chain.scale_times(times, trained, element_cost, conversion_cost)
            for element_cost, conversion_cost in (
                (self.element_cost, self.conversion_cost),
                (self.best_element_cost, self.best_conversion_cost),
                (self.worst_element_cost, self.worst_conversion_cost),
            )
        )
        return np.concatenate(parts), sum(times), expected, best, worst

    @staticmethod
    def examples() -> Examples:
        adjacency, features = [6000, 6000], [6000, 500]
        attention = ([16, 1024, 32], [16, 32, 1024], [16, 1024, 32])
        return {
            "aggregation before projection": _build_chain(
                adjacency, features, [500, 64], sparse=True
            ),
            "in training": _build_chain(adjacency, features, [500, 64], sparse=True, trains=True),
            "on a GPU": _build_chain(adjacency, features, [500, 64], sparse=True, gpu="A100"),
            "attention without a softmax": _build_chain(*attention, trains=True),
            "a vector at the end": _build_chain([512, 4000], [4000, 512], [512]),
            "two layers in a row": _build_chain([64, 128, 64], [64, 1024], [1024, 64]),
            "a transposed result": _build_chain([2000, 16], [16, 2000], [2000, 16], view="aten::t"),
            "from the right": _build_chain([2000, 16], [16, 2000], [8, 2000], reverse=True),
            "compiled": (
                _build_chain(*attention, around="Torch-Compiled Region: 0/0"),
                "is_compiled(a)",
            ),
            "a softmax between": (_build_chain(*attention, view="aten::softmax"), "len(pairs)"),
            "a kernel of no operator between": (
                _build_chain(*attention, gpu="A100", view="launch"),
                "len(pairs)",
            ),
            "a third less arithmetic": (
                _build_chain([512, 512], [512, 512], [512, 256]),
                "max_remaining_share",
            ),
            "an adapter": (
                _build_chain([4096, 1024], [1024, 8], [8, 1024]),
                "self.max_remaining_share",
            ),
            "nearly square": (
                _build_chain([512, 500], [500, 520], [520, 510]),
                "self.max_remaining_share",
            ),
            "read again": (_build_chain(*attention, read_by="aten::sum"), "not unshared"),
            "read again in a list": (_build_chain(*attention, read_by="aten::cat"), "not unshared"),
            "a bias in the first": (_build_chain(*attention, op="aten::baddbmm"), "chain is None"),
            "the result with itself": (
                _build_chain([500, 20], [20, 500], [500, 500]),
                "chain is None",
            ),
            "two sparse matrices": (
                _build_chain(adjacency, adjacency, features, sparse=True, strides=[[], []]),
                "chain is None",
            ),
            "little of the step": (_build_chain(*attention, rest=900_000), "min_share"),
        }


def _find_chains(a: Analysis) -> Iterator[tuple[ProductChain, Rows]]:
    """Yield chains by names and inputs, with the rows of ``trace.cpu`` of both products as two
    columns."""
    table = outermost_in_steps(a)
    segment, launched = _number_segments(a, table)
    is_product = (table["name"].is_in(CHAIN_PRODUCTS) & table["inputs"].is_not_null()).to_numpy()
    others = np.flatnonzero(~table["name"].is_in(VIEWS).to_numpy())
    is_next = (np.diff(segment[others]) == 0) & (np.diff(launched[others]) == 0)
    pairs = np.flatnonzero(is_next & is_product[others[:-1]] & is_product[others[1:]])
    if not len(pairs):
        return
    first, second = others[pairs], others[pairs + 1]
    columns = [table["name", "inputs"][index] for index in (first, second)]
    columns[1].columns = ["second name", "second inputs"]
    columns.append(pl.DataFrame({"first": first, "second": second}))
    calls = pl.concat(columns, how="horizontal")
    used: set[int] = set()
    for group in calls.partition_by(calls.columns[:4], maintain_order=True):
        name, x, second_name, y, *_ = group.row(0)
        chain = parse_chain(name, inputs_at(a, x), second_name, inputs_at(a, y))
        if chain is None:
            continue
        places = [pair for pair in group[:, 4:].rows() if used.isdisjoint(pair)]
        unshared = _select_unshared(a, table["inputs"], segment, places, chain.result)
        if not unshared:
            continue
        used.update(place for pair in unshared for place in pair)
        yield chain, table["row"].to_numpy()[np.array(unshared)]


def _number_segments(a: Analysis, table: pl.DataFrame) -> tuple[Rows, Rows]:
    """Number the stretches of operators of one thread, and count the kernels launched before each
    operator outside of operators. A stretch ends where a step ends or a backward node begins."""
    cpu, gpu, ts = a.trace.cpu, a.trace.gpu, table["ts"].to_numpy()
    nodes = cpu["ts"].filter(name_matches(cpu["name"], f"^{NODE_PREFIX}"))
    launches = cpu["ts"].gather(gpu["launch"].filter(gpu["op"].is_null()).drop_nulls())
    steps, nodes_begun, launched = (
        np.searchsorted(instants.sort().to_numpy(), ts, side="right")
        for instants in (a.steps.marks["ts"], nodes, launches)
    )
    keys = np.stack([cpu["thread"].gather(table["row"]).to_numpy(), steps, nodes_begun])
    changes = (np.diff(keys, prepend=-1) != 0).any(axis=0)
    return np.cumsum(changes), launched


def _select_unshared(
    a: Analysis, inputs: pl.Series, segment: Rows, pairs: list[tuple[int, int]], result: Shape
) -> list[tuple[int, int]]:
    """Return the pairs whose first result no later operator of the segment reads: none has an input
    of its shape. ``pairs`` are positions in ``inputs``."""
    shapes = {result, (*result[:-2], result[-1], result[-2])}
    distinct = inputs.drop_nulls().unique().to_list()
    readers = [index for index in distinct if not shapes.isdisjoint(_shapes(inputs_at(a, index)))]
    reads = inputs.is_in(readers).fill_null(False).to_numpy().copy()
    for first, second in pairs:
        reads[first + 1 : second + 1] = False
    count = np.cumsum(reads)
    ends = np.searchsorted(segment, segment[[second for _, second in pairs]], side="right") - 1
    return [pair for pair, end in zip(pairs, ends, strict=True) if count[end] == count[pair[1]]]


def _shapes(x: OpInputs) -> list[Shape]:
    """Return the shapes of all tensors, those in lists included."""
    lists = (shape for position in range(len(x)) for shape in x.shapes(position))
    return [*(tensor.shape for tensor in x.tensors), *lists]


def _build_chain(
    *matrices: list[int],
    op: str = "aten::matmul",
    view: str = "",
    reverse: bool = False,
    sparse: bool = False,
    strides: list[list[int]] | None = None,
    trains: bool = False,
    gpu: str | None = None,
    around: str = "",
    read_by: str = "",
    rest: float = 2000,
) -> TraceBuilder:
    """Build steps that multiply three matrices: the first two, then their result with the third."""
    b = TraceBuilder(gpu=gpu)
    left, right, third = matrices
    result = [*left[:-1], right[-1]]
    if sparse:
        op, strides = SPARSE_MM, strides or [[], [right[-1], 1]]
    for number in b.steps():
        sequence: dict[str, Any] = {"sequence": 10 * number} if trains else {}
        first = [result, left, right] if op == "aten::baddbmm" else [left, right]
        second = [third, result] if reverse else [result, third]
        with b.range(around or "forward"):
            b.compute(op, 4000, first, strides=strides, **sequence)
            if view == "launch":
                b.launch("fused_activation", 5)
            elif view:
                b.on_host(view, 2, [result])
            sequence = {name: value + 1 for name, value in sequence.items()}
            b.compute("aten::matmul", 400 if sparse else 4000, second, **sequence)
        if read_by:
            in_list = read_by == "aten::cat"
            types = "TensorList" if in_list else "float"
            b.on_host(read_by, 5, [[result] if in_list else result], types)
        b.compute("aten::gelu", rest, [[7, 7]])
        for node in range(2 * trains):
            sequence = {"sequence": 10 * number + 1 - node}
            b.compute(f"{NODE_PREFIX}MmBackward0", 600, **sequence)
        b.sync()
    return b
