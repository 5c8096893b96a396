"""Two matrix products that may be a chain of three matrices, and the work of both orders."""

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

from advisor.measure.device.matmuls import MatrixProduct, broadcast_shapes, parse_product
from advisor.measure.device.shapes import OpInputs, Shape

SPARSE_MM, LINEAR = "aten::_sparse_mm", "aten::linear"
CHAIN_PRODUCTS = [
    SPARSE_MM,
    LINEAR,
    *(f"aten::{op}" for op in "mm bmm matmul addmm baddbmm".split()),
]
SPARSE_PRODUCTS = ((0, 3), (0, 2), (1, 2))
"""Products that multiply a sparse matrix, by its position in the chain: one of the program's order
(0, 1) and one of the other order (2, 3)."""


class ProductChain(NamedTuple):
    """A product of three matrices: ``outer`` [rows, inner], ``middle`` [inner, joined] and
    ``third`` [joined, columns]. The program multiplies outer and middle first."""

    sizes: Shape
    """Rows, inner, joined and columns."""
    batches: Shape
    """Number of matrices of outer, middle and third."""
    sparse: int | None
    """Position of a sparse matrix among the three."""
    reverse: bool
    """Whether the program computes ``third (middle outer)`` and not ``(outer middle) third``."""
    result: Shape
    """Shape of the first product's result."""

    def describe(self) -> str:
        """Return the sizes of the three matrices in the program's order."""
        sizes = self.sizes[::-1] if self.reverse else self.sizes
        return " · ".join(f"[{x:,} × {y:,}]" for x, y in pairwise(sizes))

    def scale_times(
        self,
        times: Sequence[int],
        trained: Sequence[bool],
        element_cost: float,
        conversion_cost: float,
    ) -> float:
        """Return the time of both products in the other order, ns. ``times`` are those of the first
        and second product, and ``trained`` whether each has a backward pass. ``element_cost`` and
        ``conversion_cost`` are factors of ``product-order``."""
        rows, inner, joined, columns = self.sizes
        outer_batch, middle_batch, third_batch = self.batches
        outer, middle = (trained[0] and self.sparse != position for position in (0, 1))
        third = trained[1] and self.sparse != 2
        left, right = max(outer_batch, middle_batch), max(middle_batch, third_batch)
        products = (
            (outer_batch, middle_batch, rows, inner, joined, outer + middle),
            (left, third_batch, rows, joined, columns, (outer or middle) + third),
            (middle_batch, third_batch, inner, joined, columns, middle + third),
            (outer_batch, right, rows, inner, columns, outer + (middle or third)),
        )
        sparse = () if self.sparse is None else SPARSE_PRODUCTS[self.sparse]
        costs = []
        for number, (batch, other_batch, x, y, z, gradients) in enumerate(products):
            work = max(batch, other_batch) * x * y * z
            cost = work + element_cost * (batch * x * y + other_batch * y * z + work / max(y, 1))
            if self.sparse is not None and number in sparse:
                cost = conversion_cost + work / max(
                    1, prod(self.sizes[self.sparse : self.sparse + 2])
                )
            costs.append(max(cost, 1) * (1 + gradients))
        if not sparse:
            return sum(times) * (costs[2] + costs[3]) / (costs[0] + costs[1])
        before, after = sparse
        remaining = times[before] * costs[after] / costs[before]
        return remaining + times[1 - before] * costs[5 - after] / costs[1 - before]


def _read_matrices(name: str, x: OpInputs) -> tuple[MatrixProduct, list[Shape], list[bool]] | None:
    """Return a product, the shapes of its two matrices, and whether each is sparse."""
    product = parse_product("aten::mm" if name == SPARSE_MM else name, x)
    if product is None:
        return None
    left, right = product.a.shape, product.b.shape
    shapes = [left if len(left) > 1 else (1, *left), right if len(right) > 1 else (*right, 1)]
    if name == LINEAR:
        shapes[1] = right[::-1]
    # dense matrices have strides
    has_no_strides = [one.strides == () and len(one.shape) == 2 for one in (product.a, product.b)]
    return product, shapes, [has_no_strides[0] or name == SPARSE_MM, has_no_strides[1]]


def parse_chain(name: str, x: OpInputs, second_name: str, y: OpInputs) -> ProductChain | None:
    """Return the chain of two products, or ``None`` if the second does not multiply the result of
    the first with another matrix."""
    first, second = _read_matrices(name, x), _read_matrices(second_name, y)
    if first is None or second is None or first[0].added is not None:
        return None
    (left, right), (operands, is_sparse) = first[1], second[1:]
    batch = broadcast_shapes(left[:-2], right[:-2]) or ()
    rows, inner, joined = left[-2], first[0].k, right[-1]
    result, swapped = (*batch, rows, joined), (*batch, joined, rows)
    if [one.shape in (result, swapped) for one in y.tensors].count(True) != 1:
        return None
    position = next((at for at in (0, 1) if operands[at] in (result, swapped)), None)
    if position is None:
        return None
    other = operands[1 - position]
    batches, sparse = [prod(left[:-2]), prod(right[:-2])], first[2]
    if (operands[position] == result) == (position == 1):  # the second sums over its rows
        rows, joined, batches, sparse = joined, rows, batches[::-1], sparse[::-1]
    sparse = [*sparse, is_sparse[1 - position]]
    if sparse.count(True) > 1:
        return None
    return ProductChain(
        sizes=(rows, inner, joined, other[-2 if position else -1]),
        batches=(*batches, prod(other[:-2])),
        sparse=sparse.index(True) if True in sparse else None,
        reverse=position == 1,
        result=result,
    )
