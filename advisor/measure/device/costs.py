"""Work and traffic of a trace's operators, each distinct operator and input worked out once."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.trace import Trace
from advisor.measure.device.dtypes import FORMATS
from advisor.measure.device.flops import flops
from advisor.measure.device.matmuls import convolution, product
from advisor.measure.device.shapes import OpInputs, main_dtype
from advisor.measure.device.traffic import moved
from advisor.measure.host.launches import NONE, Rows

Floats = NDArray[np.float64]


class Costs(NamedTuple):
    """One entry an operator row asked for; NaN: not known."""

    flops: Floats
    moved: Floats
    dtype: NDArray[np.int8]
    """Place in FORMATS; -1: not told."""
    vector: NDArray[np.bool_]
    """A product with a vector: too little reuse for matrix units."""
    relayout: NDArray[np.bool_]
    """A copy between equal types whose strides differ: it only changes the order of the data."""
    gradients: NDArray[np.int8]
    """Convolution backward: how many of the input's and the weight's gradient it computes."""


def costs(trace: Trace, ops: Rows) -> Costs:
    """Costs of rows of ``trace.cpu`` (-1 gives nothing)."""
    count = len(ops)
    inputs = np.full(count, NONE, dtype=np.int64)
    names = np.zeros(count, dtype=np.int64)
    there = np.flatnonzero(ops >= 0)
    if len(there):
        inputs[there] = trace.cpu["inputs"].gather(ops[there]).fill_null(NONE).to_numpy()
        physical = trace.cpu["name"].gather(ops[there]).to_physical()
        names[there] = physical.fill_null(0).to_numpy()
    known = np.flatnonzero(inputs >= 0)
    keys, where = np.unique(names[known] << 32 | inputs[known], return_inverse=True)
    result = Costs(
        np.full(count, np.nan),
        np.full(count, np.nan),
        np.full(count, NONE, dtype=np.int8),
        np.zeros(count, dtype=np.bool_),
        np.zeros(count, dtype=np.bool_),
        np.zeros(count, dtype=np.int8),
    )
    if not len(keys):
        return result
    first = np.zeros(len(keys), dtype=np.int64)
    first[where] = known
    spelled = trace.cpu["name"].gather(ops[first]).cast(pl.String).to_list()
    rows = trace.inputs[(keys & 0xFFFFFFFF).tolist()].rows()
    # A loop over the distinct pairs of operator and inputs: some hundreds, whatever the length.
    table = [
        _cost(name, OpInputs(*(text or "" for text in row)))
        for name, row in zip(spelled, rows, strict=True)
    ]
    columns: tuple[NDArray[Any], ...] = tuple(result)
    for column, values in zip(columns, zip(*table, strict=True), strict=True):
        column[known] = np.array(values, dtype=column.dtype)[where]
    return result


def _cost(name: str, x: OpInputs) -> tuple[float, float, int, bool, bool, int]:
    work, traffic, dtype = flops(name, x), moved(name, x), main_dtype(name, x)
    matrix = product(name, x)
    conv = convolution(name, x)
    return (
        np.nan if work is None else work,
        np.nan if traffic is None else traffic,
        NONE if dtype is None else FORMATS.index(dtype),
        matrix is not None and matrix.vector,
        name == "aten::copy_" and _relayout(x),
        sum(conv.output_mask[:2]) if conv is not None and conv.backward else 0,
    )


def _relayout(x: OpInputs) -> bool:
    target, source = x.tensor(0), x.tensor(1)
    if target is None or source is None or target.strides is None or source.strides is None:
        return False
    if target.dtype != source.dtype or target.shape != source.shape:
        return False
    if source.stored != source.elements or target.elements < 2:
        return False  # a broadcast is written out
    order = zip(target.shape, target.strides, source.strides, strict=False)
    return any(to != of for size, to, of in order if size > 1)
