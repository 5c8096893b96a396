"""Matrix products with a dense matrix that is nearly all zeros."""

from math import prod
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from advisor.core.finding import Finding, Outcomes
from advisor.core.rule import Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.matmuls import MATRIX_PRODUCTS, parse_product
from advisor.measure.device.operator_arguments import inputs_at
from advisor.measure.device.shapes import OpInputs
from advisor.measure.host.stacks import NODE_PREFIX
from advisor.rules.support.citations import CHOSEN, PEAKS, SILENT_INPUTS, SLOW_ARGUMENTS, XPROF
from advisor.rules.support.common import (
    amount_per_step,
    costliest_places,
    of_step,
    outermost_in_steps,
)
from advisor.rules.support.kernel_work import scale_operators, time_of_operators, with_backward
from advisor.testing import Examples, TraceBuilder

ZERO, PUT, SCATTER = "aten::zero_", "aten::index_put_", "aten::scatter_"
ONE_HOT, ZEROS = "aten::one_hot", "aten::zeros"
MAKING = (ZERO, SCATTER, "aten::to", "aten::_to_copy")
"""Operators that make one-hot vectors, or copy them: their first input has the shape."""

Shape = tuple[int, int]


class SparseMatrix(NamedTuple):
    """A dense matrix of zeros in which few entries are set."""

    shape: Shape
    """Rows and columns; leading dimensions count as rows."""
    entries: int
    """Number of entries that are set."""
    is_one_hot: bool
    """Whether each row has one entry, put there by an index for each row."""

    @property
    def density(self) -> float:
        """Share of the entries that are set."""
        return self.entries / prod(self.shape)


class MostlyZeroOperand(Rule):
    """A matrix product multiplies by a dense matrix that is nearly all zeros: an adjacency matrix
    of a sparse graph, or one-hot vectors of ids. All zeros are read and multiplied. Only the rows
    that belong to set entries are needed: ``index_select`` takes them and ``index_add`` sums them,
    a sparse matrix does both, and for one-hot vectors an embedding is enough.

    The rule sees a matrix of zeros that is filled by an index (``a[rows, columns] = values``,
    ``scatter_``, ``one_hot``) in the window, and how many entries are set. Then it looks for
    products in the forward pass with an operand of this shape. No product before them has a result
    of this shape, so it is no activation. Matrices that were made before the window are not seen.

    The remaining time grows with the density: the share of the entries that are set. On a GPU dense
    products are faster in comparison, and only a sparser matrix gains.

    Making one-hot vectors takes time too: zeros, an index, and a copy of another type. It belongs
    to the gain. A product of two matrices of one-hot vectors counts pairs, as for a confusion
    matrix. Counting by an index takes a small part of the time on a CPU. It was not measured on a
    GPU."""

    id = "mostly-zero-operand"
    title = "Matrix products multiply by a dense matrix that is nearly all zeros"
    found_in = (
        "recorded/dense_graph.slow",
        "recorded/confusion.slow",
    )
    silent_in = SILENT_INPUTS
    validation_note = (
        "CPU recordings, torch 2.13, and their cures: a graph (58.2 ms predicted, 60 ms measured) "
        "and a confusion matrix (11.9 ms predicted, 13.7 ms measured)"
    )
    references = (
        "https://pytorch-geometric.readthedocs.io/en/latest/advanced/batching.html",
        "https://docs.pytorch.org/docs/stable/generated/torch.Tensor.index_add_.html",
    )

    min_entries = Threshold(65_536, "entries of the matrix, set or not", CHOSEN)
    min_share = Threshold(0.05, "of the step, of products with zeros", XPROF)
    remaining_ratio = Factor(50, "times the density remains, on a CPU", SLOW_ARGUMENTS)
    device_remaining_ratio = Factor(
        400, "times the density remains, by bandwidth and FLOP rate in FP32", PEAKS
    )
    best_remaining = Factor(0.5, "of the remaining time, at best", SLOW_ARGUMENTS)
    worst_remaining = Factor(3, "times the remaining time, at worst", CHOSEN)
    counting = Factor(0.05, "of the time remains where pairs are counted by an index", CHOSEN)
    worst_counting = Factor(0.3, "of the time remains then, at worst", CHOSEN)

    fix = (
        "Keep the pairs of rows and columns with their values, and sum the rows that belong "
        "together with index_add. torch.sparse.mm and torch_geometric do the same."
    )
    code = (
        "# pairs (target, source) with values w, instead of a matrix A\n"
        "rows = h.index_select(0, source) * w[:, None]\n"
        "h = torch.zeros_like(h).index_add(0, target, rows)   # was: A @ h"
    )
    cases = {
        "one-hot": {
            "title": "One-hot vectors are multiplied by a matrix",
            "fix": "Look the rows up: the product of one-hot vectors and a matrix is an embedding.",
            "code": "y = F.embedding(ids, table)   # was: F.one_hot(ids, n).float() @ table",
        },
        "counted pairs": {
            "title": "Pairs are counted by a product of one-hot vectors",
            "fix": "Count the pairs by their index: one number for each pair of classes.",
            "code": "# matrix: the sums so far; target and prediction: flat, without ignored\n"
            "pairs = target * classes + prediction\n"
            "counts = torch.bincount(pairs, minlength=classes**2)\n"
            "matrix += counts.view(classes, classes)",
        },
    }
    verify = "Record again: the products are gone. Compare the results."
    falsified_by = "entries that are set in another way than by index"
    assumptions = ("the matrix has no other entries",)
    needs_shapes = True
    confidence = 0.8

    def check(self, a: Analysis) -> Outcomes:
        if not a.span_ns:
            return
        matrices = self._find_matrices(a)
        if not matrices:
            return
        products = _find_products(a, matrices)
        if not products:
            return
        largest = max(products, key=lambda matrix: time_of_operators(a, products[matrix]))
        similar = [m for m in products if m.is_one_hot == largest.is_one_hot]
        forward_rows = np.unique(np.concatenate([products[matrix] for matrix in similar]))
        rows, _ = with_backward(a, forward_rows)
        ns = time_of_operators(a, rows)
        ratio = self.remaining_ratio if a.device_id is None else self.device_remaining_ratio
        left = min(ns, ns * ratio * max(matrix.density for matrix in similar))
        remaining = (left, self.best_remaining * left, min(ns, self.worst_remaining * left))
        making_rows = _find_making(a, similar) if largest.is_one_hot else np.zeros(0, dtype=int)
        rows = np.concatenate([rows, making_rows])
        ns = time_of_operators(a, rows)
        counts_pairs = _count_pairs(a, forward_rows, similar)
        if counts_pairs and a.device_id is None:
            remaining = (self.counting * ns, 0.0, self.worst_counting * ns)
        saved = tuple(max(0.0, ns - each) for each in remaining)
        if saved[0] < self.min_share * a.span_ns:
            return
        height, width = largest.shape
        yield Finding(
            summary=(
                f"Making and multiplying one-hot vectors of {height:,} × {width:,} takes "
                f"{of_step(a, ns)}."
                if len(making_rows)
                else f"Products with a matrix of {height:,} × {width:,}, in which at most "
                f"{largest.entries:,} entries are set, take {of_step(a, ns)}."
            ),
            evidence=[
                amount_per_step(a, "products with the matrix", len(forward_rows), "count"),
                amount_per_step(a, "time of the products", ns),
                self.compare("entries of the matrix", height * width, "min_entries", "count"),
                self.compare_share(a, "time of products with zeros", saved[0]),
            ],
            where=costliest_places(a, np.concatenate([forward_rows, making_rows])),
            edits=[scale_operators(a, rows, saved)],
            **(
                self.case("counted pairs" if counts_pairs else "one-hot")
                if largest.is_one_hot
                else {}
            ),
        )

    def _find_matrices(self, a: Analysis) -> dict[Shape, SparseMatrix]:
        """Return the matrices of zeros that are filled by index, by shape: the densest of each."""
        cpu = a.trace.cpu
        fills = cpu.with_row_index("row").filter(
            pl.col("name").cast(pl.String).is_in([ZERO, PUT, SCATTER])
            & pl.col("inputs").is_not_null()
        )
        entries: dict[Shape, int] = {}
        result: dict[Shape, SparseMatrix] = {}
        for name, inputs in fills.sort("ts").select("name", "inputs").iter_rows():
            x = inputs_at(a, inputs)
            shape = _parse_shape(x, 0)
            if shape is None or prod(shape) < self.min_entries:
                continue
            if name == ZERO:
                entries[shape] = 0
            elif shape in entries:
                entries[shape] += _count_set(x, str(name), shape)
                best = max(entries[shape], result[shape].entries if shape in result else 0)
                is_one_hot = name == SCATTER and _has_index_for_each_row(x, shape)
                result[shape] = SparseMatrix(shape, best, is_one_hot)
        return {shape: matrix for shape, matrix in result.items() if matrix.density < 1}

    @staticmethod
    def examples() -> Examples:
        return {
            "an adjacency matrix": _build_training(),
            "on a GPU": _build_training(gpu="A100", entries=800),
            "one-hot vectors": _build_training(shape=(512, 2000), fill=SCATTER, entries=512),
            "counted pairs": _build_counting(),
            "in inference": _build_training(trains=False),
            "a dense graph": (_build_training(entries=28_000), "min_share"),
            "too dense for a GPU": (_build_training(gpu="A100", entries=3_500), "min_share"),
            "a small matrix": (_build_training(shape=(200, 200)), "not matrices"),
            "one value for an unknown number": (_build_training(entries=1), "not matrices"),
            "an activation of its shape": (_build_training(activation=True), "not products"),
            "no product": (_build_training(us=0), "not products"),
        }


def _parse_shape(x: OpInputs, position: int) -> Shape | None:
    """Return rows and columns of a tensor, or ``None`` if it is no matrix."""
    tensor = x.tensor(position)
    if tensor is None or len(tensor.shape) < 2:
        return None
    return prod(tensor.shape[:-1]), tensor.shape[-1]


def _count_set(x: OpInputs, name: str, shape: Shape) -> int:
    """Return the number of entries that a call sets at most; all of them if it is not recorded: of
    a single value, the number of its places is unknown."""
    counted = x.tensor(2)
    if counted is None or (name == PUT and prod(counted.shape) <= 1):
        return prod(shape)
    return prod(counted.shape)


def _has_index_for_each_row(x: OpInputs, shape: Shape) -> bool:
    """Return whether a call sets one entry in each row."""
    index = _parse_shape(x, 2)
    return index == (shape[0], 1)


def _find_making(a: Analysis, matrices: list[SparseMatrix]) -> np.ndarray:
    """Return the rows of operators that make the one-hot matrices, or copy them to another type."""
    shapes = {matrix.shape for matrix in matrices}
    table = outermost_in_steps(a).filter(pl.col("name").is_in([ONE_HOT, ZEROS, *MAKING]))
    rows = []
    for row, name, inputs in table.drop_nulls("inputs").select("row", "name", "inputs").iter_rows():
        x = inputs_at(a, inputs)
        if name == ONE_HOT:
            ids, width = x.tensor(0), x.argument(1)
            zero_shape = None if ids is None else (prod(ids.shape), width)
        elif name == ZEROS:
            sizes = x.argument(0)
            sizes = sizes if isinstance(sizes, list) and len(sizes) > 1 else [0]
            zero_shape = prod(sizes[:-1]), sizes[-1]
        else:
            zero_shape = _parse_shape(x, 0)
        if zero_shape in shapes:
            rows.append(row)
    return np.array(rows, dtype=int)


def _count_pairs(a: Analysis, rows: np.ndarray, matrices: list[SparseMatrix]) -> bool:
    """Return whether both operands of the products are one-hot matrices."""
    shapes = {matrix.shape for matrix in matrices if matrix.is_one_hot}
    shapes |= {shape[::-1] for shape in shapes}
    for inputs in a.trace.cpu["inputs"].gather(rows):
        x = inputs_at(a, inputs)
        if not {_parse_shape(x, 0), _parse_shape(x, 1)} <= shapes:
            return False
    return bool(shapes)


def _find_products(
    a: Analysis, matrices: dict[Shape, SparseMatrix]
) -> dict[SparseMatrix, np.ndarray]:
    """Return the rows of forward products with each matrix, without those of the shape of an
    earlier product's result."""
    table = outermost_in_steps(a).sort("ts").filter(pl.col("name").is_in(MATRIX_PRODUCTS))
    rows: dict[SparseMatrix, list[int]] = {}
    zero_shapes: set[Shape] = set()
    for row, name, inputs in table.drop_nulls("inputs").select("row", "name", "inputs").iter_rows():
        x = inputs_at(a, inputs)
        product = parse_product(name, x)
        if product is None:
            continue
        for position in (0, 1, 2) if name == "aten::addmm" else (0, 1):
            shape = _parse_shape(x, position)
            for each in {shape, shape[::-1]} if shape is not None else ():
                if each in matrices and each not in zero_shapes:
                    rows.setdefault(matrices[each], []).append(row)
        zero_shapes.add((product.batch * product.m, product.n))
    return {
        matrix: np.unique(found)
        for matrix, found in rows.items()
        if matrix.shape not in zero_shapes
    }


def _build_training(
    *,
    gpu: str | None = None,
    shape: Shape = (1200, 1200),
    fill: str = PUT,
    entries: int = 3_000,
    us: float = 4000,
    trains: bool = True,
    activation: bool = False,
) -> TraceBuilder:
    """Build layers of a graph network with an adjacency matrix."""
    b = TraceBuilder(gpu=gpu)
    for number in b.steps():
        with b.op("aten::zeros", [[], [], [], [], []]):
            b.compute(ZERO, 20, [list(shape)])
        if fill == PUT:
            values = [entries] if entries > 1 else []
            b.compute(fill, 20, [list(shape), [], values, []])
        else:
            b.compute(fill, 20, [list(shape), [], [entries, 1], []])
        height, width = shape
        if activation:
            b.compute("aten::linear", 500, [[height, 64], [width, 64], [width]])
        sequence: dict[str, Any] = {"sequence": number} if trains else {}
        if us:
            b.compute("aten::matmul", us, [list(shape), [width, 96]], **sequence)
        b.compute("aten::tanh", 5000, [[1200, 96]])
        if trains and us:
            b.compute(f"{NODE_PREFIX}MmBackward0", us, [], sequence=number)
        b.on_host("aten::gelu", 300)
        b.sync()
    return b


def _build_counting() -> TraceBuilder:
    """Build the counts of a confusion matrix, by a product of one-hot vectors of 19 classes."""
    b = TraceBuilder(gpu=None)
    for _ in b.steps():
        for _ in range(2):
            with b.op("aten::one_hot", [[72_192], []], concrete=["", "19"]):
                b.compute(ZERO, 2000, [[72_192, 19]])
                b.compute(SCATTER, 600, [[72_192, 19], [], [72_192, 1], []])
            b.compute("aten::to", 500, [[72_192, 19], [], [], [], []])
        b.compute("aten::matmul", 1700, [[19, 72_192], [72_192, 19]])
        b.compute("aten::conv2d", 9000, [[2, 3, 192, 192], [40, 3, 3, 3]])
    return b
