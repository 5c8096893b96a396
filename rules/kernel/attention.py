"""Which kernels are unfused attention."""

from __future__ import annotations

import numpy as np

from advisor.measure import Analysis
from advisor.measure.host.names import name_matches
from advisor.rules.kernel import facts

MATH = r"^aten::_scaled_dot_product_attention_math"
BETWEEN = ("elementwise", "copy", "layout", "random", "reduction")
"""Families of scaling, mask, cast and dropout between the products and the softmax."""
FORWARD = r"^aten::(bmm|baddbmm_?)$"
SOFTMAX = r"^aten::(_softmax|_softmax_backward_data|_masked_softmax|_safe_softmax)$"
MAX_BETWEEN = 6
"""Kernels between product and softmax: scale, mask, casts, dropout."""


def fallback(a: Analysis) -> facts.Mask:
    """Aligned with ``trace.gpu``: kernels of PyTorch's own fallback."""
    return facts.launched_under(a, MATH) & facts.compute_rows(a)


def unfused(a: Analysis, max_between: int = MAX_BETWEEN) -> facts.Mask:
    """Aligned with ``trace.gpu``: forward kernels of unfused attention. Their rates are low for
    that reason, and no other bottleneck."""
    under = fallback(a)
    return under | _blocks(a, facts.compute_rows(a) & ~under, max_between)


def _blocks(a: Analysis, rows: facts.Mask, max_between: int) -> facts.Mask:
    """Forward kernels of product, softmax, product on one stream, and what is in between."""
    gpu = a.trace.gpu
    index = np.flatnonzero(rows)
    index = index[np.lexsort((gpu["ts"].to_numpy()[index], gpu["stream"].to_numpy()[index]))]
    unfused = np.zeros(len(rows), dtype=bool)
    if not len(index):
        return unfused
    family = a.kernels["family"].gather(index)
    op = a.kernels["op_name"].gather(index)
    softmax = (family == "softmax").fill_null(False).to_numpy()
    softmax &= ~name_matches(op, r"(?i)log_softmax|backward").to_numpy()
    product = name_matches(op, FORWARD).to_numpy() & (family == "gemm").fill_null(False).to_numpy()
    passing = family.is_in(list(BETWEEN)).fill_null(False).to_numpy()
    stream = gpu["stream"].to_numpy()[index]
    place = np.arange(len(index))
    stop = ~passing & ~softmax
    # the last kernel before, and the first after, that is neither passing nor a softmax
    before = np.maximum.accumulate(np.where(stop, place, -1))
    after = np.minimum.accumulate(np.where(stop, place, len(index))[::-1])[::-1]
    middle = np.flatnonzero(softmax)
    begin, end = before[middle], after[middle]
    fits = (begin >= 0) & (end < len(index))
    middle, begin, end = middle[fits], begin[fits], end[fits]
    fits = product[begin] & product[end]
    fits &= (stream[begin] == stream[middle]) & (stream[end] == stream[middle])
    fits &= (middle - begin <= max_between + 1) & (end - middle <= max_between + 1)
    edge = np.zeros(len(index) + 1, dtype=np.int64)
    np.add.at(edge, begin[fits], 1)
    np.add.at(edge, end[fits] + 1, -1)
    unfused[index[np.cumsum(edge)[:-1] > 0]] = True
    return unfused
