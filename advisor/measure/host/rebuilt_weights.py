"""Weights that each forward pass makes again from stored ones, although nothing trains them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from advisor.core.intervals import EMPTY, Intervals, intersect, union
from advisor.measure.device.shapes import OpInputs, Tensor, width_of
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

CAST, NORM, OPERAND = "cast", "weight norm", "operand"
"""Kinds: another type, as ``autocast`` needs it; direction times length (``weight_norm``); the
large operand of a product, made by operators of its own shape right before."""
_LAYER = r"^aten::(?:linear|addmm|conv\dd|conv_transpose\dd|convolution)$"
_NORM = r"^aten::_weight_norm$"
_CAST, _COPY = r"^aten::to$", r"^aten::_to_copy$"
_PRODUCT = r"^aten::(?:linear|matmul|mm|addmm)$"
_MAKES = (
    r"^aten::(?:div|mul|add|sub|rsub|to|clone|contiguous|linalg_\w+|norm|clamp_min|rsqrt|pow)_?$"
)
_VIEWS = r"^aten::(?:t|numpy_T|transpose|permute|view|expand|expand_as|unsqueeze|detach|alias)$"
MIN_LARGER = 16
"""Ratio of a product's operands from which the larger one is taken for stored: a weight, or the
index that queries are compared with."""
MAX_MAKING = 12
"""Largest number of operators that make one operand."""
SCHEMA = {"row": pl.Int64, "kind": pl.String}


def rebuilt_weights(a: Analysis) -> pl.DataFrame:
    """List host operators that make a layer's weight or bias again: ``row`` of ``trace.cpu``,
    ``kind``. Those that the backward pass goes through train the stored weight: they are left out.

    A cast is an ``aten::to`` that copies, inside a layer that autocast was given, with the shape
    and type of the layer's second or third input. Needs shapes, as the operands of products do;
    these are looked for in inference only."""
    cpu, parent = a.trace.cpu, parent_rows(a.trace)
    operator = is_operator(a.trace)
    norm = np.flatnonzero(operator & name_matches(cpu["name"], _NORM).to_numpy())
    copying = np.flatnonzero(operator & name_matches(cpu["name"], _COPY).to_numpy())
    cast = rows_around(parent, copying)
    layer = rows_around(parent, cast)
    is_cast = np.append(name_matches(cpu["name"], _CAST).to_numpy(), False)
    is_layer = np.append(name_matches(cpu["name"], _LAYER).to_numpy(), False)
    inside = is_cast[cast] & is_layer[layer]
    cast, layer = cast[inside], layer[inside]
    cast = cast[_of_weight(a, cast, layer)]
    operand = _made_operands(a)
    rows = np.concatenate([cast, norm, operand]).astype(np.int64)
    kinds = [CAST] * len(cast) + [NORM] * len(norm) + [OPERAND] * len(operand)
    table = pl.DataFrame({"row": rows, "kind": kinds}, schema=SCHEMA).unique(maintain_order=True)
    making = np.zeros(cpu.height, dtype=bool)
    making[rows] = True
    trained = climb_stack(parent, making, np.unique(a.forward_op[a.forward_op >= 0]))
    return table.filter(~pl.col("row").is_in(np.unique(trained).tolist()))


def _of_weight(a: Analysis, cast: NDArray[np.int32], layer: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Return which casts have the shape of a wide weight or bias that their layer was given."""
    pairs = pl.DataFrame(
        {"own": a.trace.cpu["inputs"].gather(cast), "given": a.trace.cpu["inputs"].gather(layer)}
    )
    known = dict[tuple[int | None, int | None], bool]()
    for own, given in pairs.unique().iter_rows():
        known[own, given] = (
            own is not None
            and given is not None
            and _is_among(_tensors(a, own)[:1], _tensors(a, given)[1:3])
        )
    return np.array([known[pair] for pair in pairs.iter_rows()], dtype=bool)


def _made_operands(a: Analysis) -> NDArray[np.int64]:
    """Return the outermost operators that make the large matrix of a product from one of its own
    shape, right before the product, once a step or more. In inference it is stored: what makes it
    could run once."""
    cpu = a.trace.cpu
    outer = outermost_rows(a.trace)
    none = np.zeros(0, dtype=np.int64)
    if not a.forward_only or not len(outer) or a.trace.inputs.is_empty():
        return none
    names = cpu["name"].gather(outer)
    product, makes, views = (
        name_matches(names, pattern).to_numpy() for pattern in (_PRODUCT, _MAKES, _VIEWS)
    )
    inputs = cpu["inputs"].gather(outer).fill_null(-1).to_list()
    thread = cpu["thread"].gather(outer).to_list()
    tensors = cache(lambda row: _tensors(a, row) if row >= 0 else [])
    by_shape: dict[tuple[int, ...], list[list[int]]] = {}
    for at in np.flatnonzero(product).tolist():
        shape = _stored_operand(tensors(inputs[at]), addmm=names[at] == "aten::addmm")
        if shape is None:
            continue
        chain = []
        for before in range(at - 1, max(-1, at - 1 - MAX_MAKING), -1):
            sizes = {tuple(sorted(each.shape)) for each in tensors(inputs[before])}
            same = sizes & {shape, (1, shape[1])}
            if thread[before] != thread[at] or not same or not (makes[before] or views[before]):
                break
            if makes[before]:
                chain.append(before)
        if any(shape in {tuple(sorted(e.shape)) for e in tensors(inputs[n])} for n in chain):
            by_shape.setdefault(shape, []).append(chain)
    found = [
        n for chains in by_shape.values() if len(chains) >= a.step_count for c in chains for n in c
    ]
    return outer[sorted(set(found))].astype(np.int64) if found else none


def _stored_operand(tensors: list[Tensor], *, addmm: bool) -> tuple[int, ...] | None:
    """Return the sorted shape of a product's second operand if it is a much larger matrix of
    floating point numbers than the first; a transposed one has the same."""
    pair = tensors[1:3] if addmm else tensors[:2]
    if len(pair) < 2 or len(pair[1].shape) != 2 or "loat" not in pair[1].dtype.lower():
        return None
    if pair[1].elements < MIN_LARGER * max(pair[0].elements, 1):
        return None
    return tuple(sorted(pair[1].shape))


def _tensors(a: Analysis, row: int) -> list[Tensor]:
    inputs = a.trace.inputs
    return OpInputs(inputs["dims"][row], inputs["types"][row]).tensors


def _is_among(own: list[Tensor], weights: list[Tensor]) -> bool:
    return bool(own) and any(
        own[0].shape == weight.shape
        and own[0].dtype == weight.dtype
        and (width_of(weight.dtype) or 0) > 2
        for weight in weights
    )


def rebuilt_weights_time(a: Analysis) -> Intervals:
    """Find host time of the operators in :func:`rebuilt_weights`. The Python before one counts as
    far as it exceeds the median between outermost operators: a parametrization runs as a module."""
    rows = a.rebuilt_weights["row"].to_numpy()
    if not len(rows):
        return EMPTY
    ts, dur, thread = (a.trace.cpu[name].to_numpy() for name in ("ts", "dur", "thread"))
    end = ts + dur
    outer = outermost_rows(a.trace)
    usual = np.maximum(ts[outer][1:] - end[outer][:-1], 0)
    usual = usual[thread[outer][1:] == thread[outer][:-1]]
    typical = int(np.median(usual)) if len(usual) else 0
    before = np.maximum(rows - 1, 0)  # it has ended, or it is around the row
    since = np.where(end[before] <= ts[rows], end[before], ts[before] + 1)
    silence = np.where(thread[before] == thread[rows], ts[rows] - since, 0)
    begin = ts[rows] - np.maximum(silence - typical, 0)
    return intersect(union(begin, end[rows]), a.steps.host_spans)
