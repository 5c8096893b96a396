"""Attention in separate kernels: which ones they are."""

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
    """Aligned with ``trace.gpu``: forward kernels of attention that runs as separate ones. Their
    rates are low because of that, and not another bottleneck."""
    under = fallback(a)
    return under | _blocks(a, facts.compute_rows(a) & ~under, max_between)


def _blocks(a: Analysis, rows: facts.Mask, max_between: int) -> facts.Mask:
    """Forward kernels of product, softmax, product on one stream, and what is in between."""
    gpu = a.trace.gpu
    at = np.flatnonzero(rows)
    at = at[np.lexsort((gpu["ts"].to_numpy()[at], gpu["stream"].to_numpy()[at]))]
    found = np.zeros(len(rows), dtype=bool)
    if not len(at):
        return found
    family = a.kernels["family"].gather(at)
    op = a.kernels["op_name"].gather(at)
    softmax = (family == "softmax").fill_null(False).to_numpy()
    softmax &= ~name_matches(op, r"(?i)log_softmax|backward").to_numpy()
    product = name_matches(op, FORWARD).to_numpy() & (family == "gemm").fill_null(False).to_numpy()
    passing = family.is_in(list(BETWEEN)).fill_null(False).to_numpy()
    stream = gpu["stream"].to_numpy()[at]
    place = np.arange(len(at))
    stop = ~passing & ~softmax
    # the last kernel before, and the first after, that is neither passing nor a softmax
    before = np.maximum.accumulate(np.where(stop, place, -1))
    after = np.minimum.accumulate(np.where(stop, place, len(at))[::-1])[::-1]
    s = np.flatnonzero(softmax)
    b, e = before[s], after[s]
    fits = (b >= 0) & (e < len(at))
    s, b, e = s[fits], b[fits], e[fits]
    fits = product[b] & product[e] & (stream[b] == stream[s]) & (stream[e] == stream[s])
    fits &= (s - b <= max_between + 1) & (e - s <= max_between + 1)
    edge = np.zeros(len(at) + 1, dtype=np.int64)
    np.add.at(edge, b[fits], 1)
    np.add.at(edge, e[fits] + 1, -1)
    found[at[np.cumsum(edge)[:-1] > 0]] = True
    return found
