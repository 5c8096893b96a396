"""Weights that each forward pass rebuilds from stored ones, although nothing trains them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from advisor.core.intervals import EMPTY, Intervals, intersect, union
from advisor.measure.device.shapes import Tensor, read_inputs, width_of
from advisor.measure.host.constant_tensors import constant_tensors
from advisor.measure.host.names import name_matches
from advisor.measure.host.stacks import (
    climb_stack,
    is_operator,
    outermost_rows,
    parent_rows,
    rows_around,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from advisor.measure import Analysis

CAST, NORM, OPERAND, CONSTANT = "cast", "weight norm", "operand", "constant"
"""Kinds: a cast to another type, as ``autocast`` needs it; direction times length
(``weight_norm``); the large operand of a product, made by operators of its own shape directly
before it; a tensor that depends on no input."""
_LAYER_OPS = r"^aten::(?:linear|addmm|conv\dd|conv_transpose\dd|convolution)$"
_NORM_OPS = r"^aten::_weight_norm$"
_CAST_OPS, _COPY_OPS = r"^aten::to$", r"^aten::_to_copy$"
_PRODUCT_OPS = r"^aten::(?:linear|matmul|mm|addmm)$"
_MAKING_OPS = (
    r"^aten::(?:div|mul|add|sub|rsub|to|clone|contiguous|linalg_\w+|norm|clamp_min|rsqrt|pow)_?$"
)
_VIEW_OPS = r"^aten::(?:t|numpy_T|transpose|permute|view|expand|expand_as|unsqueeze|detach|alias)$"
MIN_SIZE_RATIO = 16
"""Minimum size ratio of a product's operands at which the larger one is assumed to be stored: a
weight, or the index that queries are compared with."""
MAX_MAKING_OPS = 12
"""Maximum number of operators that make one operand."""
SCHEMA = {"row": pl.Int64, "kind": pl.String}


def rebuilt_weights(a: Analysis) -> pl.DataFrame:
    """List host operators that rebuild a layer's weight or bias, or another tensor that stays the
    same (:func:`constant_tensors`): ``row`` of ``trace.cpu``, ``kind``. Operators that the backward
    pass goes through train the stored weight and are excluded.

    A cast is an ``aten::to`` that copies, inside a layer under autocast, with the shape and type of
    the layer's second or third input. Casts and operands of products need recorded shapes; operands
    are searched only in inference."""
    cpu, parent = a.trace.cpu, parent_rows(a.trace)
    is_op = is_operator(a.trace)
    norm = np.flatnonzero(is_op & name_matches(cpu["name"], _NORM_OPS).to_numpy())
    copying = np.flatnonzero(is_op & name_matches(cpu["name"], _COPY_OPS).to_numpy())
    cast = rows_around(parent, copying)
    layer = rows_around(parent, cast)
    is_cast = np.append(name_matches(cpu["name"], _CAST_OPS).to_numpy(), False)
    is_layer = np.append(name_matches(cpu["name"], _LAYER_OPS).to_numpy(), False)
    is_cast_in_layer = is_cast[cast] & is_layer[layer]
    cast, layer = cast[is_cast_in_layer], layer[is_cast_in_layer]
    cast = cast[_have_weight_shape(a, cast, layer)]
    operand = _find_made_operands(a)
    parts = {CAST: cast, NORM: norm, OPERAND: operand, CONSTANT: constant_tensors(a)}
    rows = np.concatenate(list(parts.values())).astype(np.int64)
    kinds = [kind for kind, part in parts.items() for _ in part]
    table = pl.DataFrame({"row": rows, "kind": kinds}, schema=SCHEMA)
    table = table.unique("row", maintain_order=True)
    rebuilds = np.zeros(cpu.height, dtype=bool)
    rebuilds[rows] = True
    trained = climb_stack(parent, rebuilds, np.unique(a.forward_op[a.forward_op >= 0]))
    return table.filter(~pl.col("row").is_in(np.unique(trained).tolist()))


def _have_weight_shape(
    a: Analysis, cast: NDArray[np.int32], layer: NDArray[np.int32]
) -> NDArray[np.bool_]:
    """Return which casts have the shape of a wide weight or bias of their layer's inputs."""
    pairs = pl.DataFrame(
        {"own": a.trace.cpu["inputs"].gather(cast), "given": a.trace.cpu["inputs"].gather(layer)}
    )
    by_pair = dict[tuple[int | None, int | None], bool]()
    for cast_inputs, layer_inputs in pairs.unique().iter_rows():
        by_pair[cast_inputs, layer_inputs] = (
            cast_inputs is not None
            and layer_inputs is not None
            and _is_cast_of_weight(
                _read_tensors(a, cast_inputs)[:1], _read_tensors(a, layer_inputs)[1:3]
            )
        )
    return np.array([by_pair[pair] for pair in pairs.iter_rows()], dtype=bool)


def _find_made_operands(a: Analysis) -> NDArray[np.int64]:
    """Return the outermost operators that make the large matrix of a product from one of the same
    shape, directly before the product, at least once per step. In inference the matrix is stored,
    so these operators could run once."""
    cpu = a.trace.cpu
    outer = outermost_rows(a.trace)
    none = np.zeros(0, dtype=np.int64)
    if not a.forward_only or not len(outer) or a.trace.inputs.is_empty():
        return none
    names = cpu["name"].gather(outer)
    is_product, is_making, is_view = (
        name_matches(names, pattern).to_numpy()
        for pattern in (_PRODUCT_OPS, _MAKING_OPS, _VIEW_OPS)
    )
    inputs = cpu["inputs"].gather(outer).fill_null(-1).to_list()
    thread = cpu["thread"].gather(outer).to_list()
    tensors = cache(lambda row: _read_tensors(a, row) if row >= 0 else [])
    by_shape: dict[tuple[int, ...], list[list[int]]] = {}
    for index in np.flatnonzero(is_product).tolist():
        shape = _find_stored_shape(tensors(inputs[index]), addmm=names[index] == "aten::addmm")
        if shape is None:
            continue
        chain = []
        for previous in range(index - 1, max(-1, index - 1 - MAX_MAKING_OPS), -1):
            sizes = {tuple(sorted(tensor.shape)) for tensor in tensors(inputs[previous])}
            matching = sizes & {shape, (1, shape[1])}
            if (
                thread[previous] != thread[index]
                or not matching
                or not (is_making[previous] or is_view[previous])
            ):
                break
            if is_making[previous]:
                chain.append(previous)
        if any(shape in {tuple(sorted(item.shape)) for item in tensors(inputs[n])} for n in chain):
            by_shape.setdefault(shape, []).append(chain)
    making = [
        n for chains in by_shape.values() if len(chains) >= a.step_count for c in chains for n in c
    ]
    return outer[sorted(set(making))].astype(np.int64) if making else none


def _find_stored_shape(tensors: list[Tensor], *, addmm: bool) -> tuple[int, ...] | None:
    """Return the sorted shape of a product's second operand if it is a floating-point matrix much
    larger than the first. A transposed matrix has the same sorted shape."""
    pair = tensors[1:3] if addmm else tensors[:2]
    if len(pair) < 2 or len(pair[1].shape) != 2 or "loat" not in pair[1].dtype.lower():
        return None
    if pair[1].elements < MIN_SIZE_RATIO * max(pair[0].elements, 1):
        return None
    return tuple(sorted(pair[1].shape))


def _read_tensors(a: Analysis, row: int) -> list[Tensor]:
    return read_inputs(a.trace.inputs, row).tensors


def _is_cast_of_weight(cast_tensors: list[Tensor], weights: list[Tensor]) -> bool:
    return bool(cast_tensors) and any(
        cast_tensors[0].shape == weight.shape
        and cast_tensors[0].dtype == weight.dtype
        and (width_of(weight.dtype) or 0) > 2
        for weight in weights
    )


def rebuilt_weights_time(a: Analysis) -> Intervals:
    """Find host time of the operators in :func:`rebuilt_weights`. Python time before an operator
    counts beyond the median between outermost operators: a parametrization runs as a module."""
    rows = a.rebuilt_weights["row"].to_numpy()
    if not len(rows):
        return EMPTY
    ts, dur, thread = (a.trace.cpu[name].to_numpy() for name in ("ts", "dur", "thread"))
    end = ts + dur
    outer = outermost_rows(a.trace)
    pauses = np.maximum(ts[outer][1:] - end[outer][:-1], 0)
    pauses = pauses[thread[outer][1:] == thread[outer][:-1]]
    usual_pause = int(np.median(pauses)) if len(pauses) else 0
    previous = np.maximum(rows - 1, 0)  # it ended earlier, or is around the row
    silence_start = np.where(end[previous] <= ts[rows], end[previous], ts[previous] + 1)
    silence = np.where(thread[previous] == thread[rows], ts[rows] - silence_start, 0)
    start = ts[rows] - np.maximum(silence - usual_pause, 0)
    return intersect(union(start, end[rows]), a.steps.host_spans)
