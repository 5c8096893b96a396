"""Casts between 16-bit formats and FP32 directly before and after products in FP32."""

from math import prod

import numpy as np

from advisor.core.intervals import Bools
from advisor.measure import Analysis
from advisor.measure.device.operator_arguments import inputs_at
from advisor.measure.device.shapes import OpInputs, bare_type_name
from advisor.measure.host.names import name_matches

_CAST_PATTERN = r"^aten::copy_$"
_SIXTEEN_BIT_TYPES = ("half", "bfloat16")


def find_casts(a: Analysis, fp32: Bools, matrix: Bools) -> Bools:
    """Return the rows of ``trace.gpu`` that cast an operand of an FP32 product from 16 bits, or its
    result to 16 bits. ``fp32`` marks the kernels of FP32 products, ``matrix`` those of all
    products. No other cast or product is nearer, and the tensor has as many values as the operand
    or the result."""
    gpu, cpu = a.trace.gpu, a.trace.cpu
    launched = gpu["op"].fill_null(-1).to_numpy().astype(np.int64)
    ops = np.where(a.in_window, launched, -1)
    is_copy = np.append(name_matches(cpu["name"], _CAST_PATTERN).to_numpy(), False)
    products, fp32_products = (np.unique(ops[mask & (ops >= 0)]) for mask in (matrix, fp32))
    counts: dict[int, tuple[set[int], set[int]]] = {}
    read_casts: dict[int, tuple[bool, int] | None] = {}
    index = cpu["inputs"].fill_null(-1).to_numpy()
    copies = np.unique(ops[is_copy[ops]])
    casts = [row for row in copies.tolist() if _read_cast(a, index[row], read_casts) is not None]
    ts, thread = cpu["ts"].to_numpy(), cpu["thread"].to_numpy()
    events = np.union1d(casts, products).astype(np.int64)
    events = events[np.lexsort((ts[events], thread[events]))]
    is_fp32 = np.isin(events, fp32_products)
    adjacent: list[int] = []
    for position in np.flatnonzero(np.isin(events, casts)).tolist():
        cast = _read_cast(a, index[events[position]], read_casts)
        neighbor = position + (1 if cast is not None and cast[0] else -1)
        if cast is None or not 0 <= neighbor < len(events) or not is_fp32[neighbor]:
            continue
        if thread[events[neighbor]] == thread[events[position]]:
            values = _count_values(a, index[events[neighbor]], counts)[0 if cast[0] else 1]
            if cast[1] in values:
                adjacent.append(events[position])
    return np.isin(ops, adjacent) & (ops >= 0)


def _read_cast(
    a: Analysis, index: int, cache: dict[int, tuple[bool, int] | None]
) -> tuple[bool, int] | None:
    """Return (whether a cast goes from 16 bits to FP32 and not back, its number of values)."""
    if index < 0:
        return None
    if index not in cache:
        inputs = inputs_at(a, index)
        target, source = inputs.tensor(0), inputs.tensor(1)
        formats = [
            None if tensor is None else bare_type_name(tensor.dtype) for tensor in (target, source)
        ]
        widens = formats[0] == "float" and formats[1] in _SIXTEEN_BIT_TYPES
        narrows = formats[1] == "float" and formats[0] in _SIXTEEN_BIT_TYPES
        cache[index] = (widens, target.elements) if target and (widens or narrows) else None
    return cache[index]


def _count_values(
    a: Analysis, index: int, cache: dict[int, tuple[set[int], set[int]]]
) -> tuple[set[int], set[int]]:
    """Return the numbers of values of a product's operands, and of its result."""
    if index < 0:
        return set(), set()
    if index not in cache:
        inputs: OpInputs = inputs_at(a, index)
        shapes = [tensor.shape for tensor in inputs.tensors]
        result_sizes = set()
        if len(shapes) >= 2 and len(shapes[-1]) >= 2 and len(shapes[-2]) >= 2:
            result_sizes.add(prod(shapes[-2][:-1]) * shapes[-1][-1])
        cache[index] = {prod(shape) for shape in shapes}, result_sizes
    return cache[index]
