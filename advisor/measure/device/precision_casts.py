"""Casts between 16-bit formats and FP32 right before and after products in FP32."""

from math import prod

import numpy as np

from advisor.core.intervals import Bools
from advisor.measure import Analysis
from advisor.measure.device.operator_arguments import inputs_at
from advisor.measure.device.shapes import OpInputs, bare_type_name
from advisor.measure.host.names import name_matches

_CAST = r"^aten::copy_$"
_SHORT = ("half", "bfloat16")


def find_casts(a: Analysis, fp32: Bools, matrix: Bools) -> Bools:
    """Return the rows of ``trace.gpu`` that cast an operand of a product in FP32 from 16 bits, or
    its result to them. ``fp32``, ``matrix``: kernels of such products, and of all. No other cast or
    product is nearer, and the tensor has as many values as the operand or the result."""
    gpu, cpu = a.trace.gpu, a.trace.cpu
    launched = gpu["op"].fill_null(-1).to_numpy().astype(np.int64)
    ops = np.where(a.in_window, launched, -1)
    named = np.append(name_matches(cpu["name"], _CAST).to_numpy(), False)
    products, slow = (np.unique(ops[mask & (ops >= 0)]) for mask in (matrix, fp32))
    sizes: dict[int, tuple[set[int], set[int]]] = {}
    kinds: dict[int, tuple[bool, int] | None] = {}
    index = cpu["inputs"].fill_null(-1).to_numpy()
    copies = np.unique(ops[named[ops]])
    casts = [row for row in copies.tolist() if _kind(a, index[row], kinds) is not None]
    ts, thread = cpu["ts"].to_numpy(), cpu["thread"].to_numpy()
    events = np.union1d(casts, products).astype(np.int64)
    events = events[np.lexsort((ts[events], thread[events]))]
    is_slow = np.isin(events, slow)
    around: list[int] = []
    for at in np.flatnonzero(np.isin(events, casts)).tolist():
        kind = _kind(a, index[events[at]], kinds)
        near = at + (1 if kind is not None and kind[0] else -1)
        if kind is None or not 0 <= near < len(events) or not is_slow[near]:
            continue
        if thread[events[near]] == thread[events[at]]:
            values = _sizes(a, index[events[near]], sizes)[0 if kind[0] else 1]
            if kind[1] in values:
                around.append(events[at])
    return np.isin(ops, around) & (ops >= 0)


def _kind(
    a: Analysis, index: int, known: dict[int, tuple[bool, int] | None]
) -> tuple[bool, int] | None:
    """Return whether a cast goes from 16 bits to FP32, else back, and its number of values."""
    if index < 0:
        return None
    if index not in known:
        inputs = inputs_at(a, index)
        to, source = inputs.tensor(0), inputs.tensor(1)
        formats = [None if each is None else bare_type_name(each.dtype) for each in (to, source)]
        widens = formats[0] == "float" and formats[1] in _SHORT
        narrows = formats[1] == "float" and formats[0] in _SHORT
        known[index] = (widens, to.elements) if to and (widens or narrows) else None
    return known[index]


def _sizes(
    a: Analysis, index: int, known: dict[int, tuple[set[int], set[int]]]
) -> tuple[set[int], set[int]]:
    """Return how many values the operands of a product have, and its result."""
    if index < 0:
        return set(), set()
    if index not in known:
        inputs: OpInputs = inputs_at(a, index)
        shapes = [tensor.shape for tensor in inputs.tensors]
        outcome = set()
        if len(shapes) >= 2 and len(shapes[-1]) >= 2 and len(shapes[-2]) >= 2:
            outcome.add(prod(shapes[-2][:-1]) * shapes[-1][-1])
        known[index] = {prod(shape) for shape in shapes}, outcome
    return known[index]
