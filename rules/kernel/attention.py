"""Unfused attention: which kernels it is, and how long fused kernels would take for the same."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, prod
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.rule import Threshold
from advisor.measure import Analysis
from advisor.measure.device.matmuls import parse_product
from advisor.measure.device.shapes import OpInputs, width_of
from advisor.measure.host.names import name_matches
from advisor.measure.host.operators import KERNEL_NS, attainable_roofs
from advisor.rules.citations import FLASH_2, FLASH_3
from advisor.rules.kernel import kernel_common

MATH = r"^aten::_scaled_dot_product_attention_math"
BETWEEN = ("elementwise", "copy", "layout", "random", "reduction")
"""Families of scaling, mask, cast and dropout between the products and the softmax."""
FORWARD = r"^aten::(bmm|baddbmm_?)$"
MAX_BETWEEN = 6
"""Kernels between product and softmax: scale, mask, casts, dropout."""

REACH = Threshold(0.45, "of the attainable rate: what a fused kernel reaches", FLASH_2)
BEST_REACH = Threshold(0.7, "of the attainable rate, at best", FLASH_2, FLASH_3)
TILE = 64
"""Fused kernels compute whole tiles of so many queries and keys. Heads narrower than that gain
nothing: exponentials take the time then."""
WIDTH_STEP = 32
"""Wider heads are filled up to a multiple of this."""
BACKWARD = 2.5
"""Products of the backward pass over those of the forward pass: five and two (FlashAttention 2)."""


class Blocks(NamedTuple):
    """Unfused attention's forward passes."""

    rows: kernel_common.Mask
    """Aligned with ``trace.gpu``: their kernels, those of PyTorch's own fallback included."""
    found: kernel_common.Mask
    """Those of product, softmax, product, and what is in between."""
    first: NDArray[np.int64]
    """Rows of ``trace.gpu``: the product before each softmax, the softmax, the product after it."""
    softmax: NDArray[np.int64]
    last: NDArray[np.int64]


class Fused(NamedTuple):
    """The same blocks as fused kernels at the attainable rate."""

    half_ns: float
    """With inputs of 16 bits, the wider ones cast."""
    full_ns: float
    """With inputs as they are: FP32 at the rate of FP32."""
    tokens: int
    """The longest sequence."""
    wide: bool
    """Inputs of some have more than 16 bits."""


def is_fallback_kernel(a: Analysis) -> kernel_common.Mask:
    """Aligned with ``trace.gpu``: kernels of PyTorch's own fallback."""
    return kernel_common.launched_under(a, MATH) & kernel_common.compute_rows(a)


def is_unfused_attention(a: Analysis) -> kernel_common.Mask:
    """Aligned with ``trace.gpu``: forward kernels of unfused attention. Their rates are low for
    that reason, and no other bottleneck."""
    return find_blocks(a).rows


def find_blocks(a: Analysis, max_between: int = MAX_BETWEEN) -> Blocks:
    """Product, softmax, product on one stream, with at most ``max_between`` kernels of scaling,
    mask, casts and dropout on each side of the softmax."""
    gpu, rows = a.trace.gpu, kernel_common.compute_rows(a)
    index = np.flatnonzero(rows)
    index = index[np.lexsort((gpu["ts"].to_numpy()[index], gpu["stream"].to_numpy()[index]))]
    found = np.zeros(len(rows), dtype=bool)
    if not len(index):
        return Blocks(found, found, index, index, index)
    family = a.kernels["family"].gather(index)
    op = a.kernels["op_name"].gather(index)
    softmax = (family == "softmax").fill_null(False).to_numpy()
    softmax &= ~name_matches(op, r"(?i)log_softmax|backward").to_numpy()
    products = name_matches(op, FORWARD).to_numpy() & (family == "gemm").fill_null(False).to_numpy()
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
    fits = products[begin] & products[end]
    fits &= (stream[begin] == stream[middle]) & (stream[end] == stream[middle])
    fits &= (middle - begin <= max_between + 1) & (end - middle <= max_between + 1)
    begin, middle, end = begin[fits], middle[fits], end[fits]
    edge = np.zeros(len(index) + 1, dtype=np.int64)
    np.add.at(edge, begin, 1)
    np.add.at(edge, end + 1, -1)
    found[index[np.cumsum(edge)[:-1] > 0]] = True
    return Blocks(found | is_fallback_kernel(a), found, index[begin], index[middle], index[end])


def estimate_fused_time(a: Analysis, blocks: Blocks) -> Fused | None:
    """How long fused kernels take for the same forward passes at the attainable rate: for the FLOPs
    of whole tiles, or for the bytes of queries, keys, values and results, whichever takes longer.
    ``None``: shapes or rates are not known.

    Compared with the memory-efficient kernel in FP32 on an A100 (mask generation, five shapes of 7
    to 4,096 tokens and heads of 16 to 80): 15 to 24 TFLOP/s of whole tiles, of 15 attainable; by
    the FLOPs of the shapes alone 0.1 to 14.
    """
    limits = attainable_roofs(a.hardware)
    half, full = (limits.matmul.get(name) for name in ("fp16", "fp32"))
    if half is None or full is None or limits.memory is None:
        return None
    known = tokens = 0
    in_half = in_full = 0.0
    wide = False
    for size, calls in _sizes(a, blocks):
        flops = 2.0 * size.batch * _fill(size.queries, TILE) * _fill(size.keys, TILE)
        flops *= _fill_width(size.width) + _fill_width(size.value_width)
        elements = size.batch * (size.queries + size.keys) * (size.width + size.value_width)
        read_ns = 1e9 * elements / limits.memory.rate
        in_half += calls * (max(1e9 * flops / half.rate, min(size.bytes, 2) * read_ns) + KERNEL_NS)
        rate = full.rate if size.bytes > 2 else half.rate
        in_full += calls * (max(1e9 * flops / rate, size.bytes * read_ns) + KERNEL_NS)
        known += calls
        tokens = max(tokens, size.queries, size.keys)
        wide |= size.bytes > 2
    if not known:
        return None
    # blocks without shapes, and the rest of the fallback, are taken to be like the others
    more = len(blocks.first) / known
    more *= kernel_common.summed_duration(a, blocks.rows) / max(
        1, kernel_common.summed_duration(a, blocks.found)
    )
    return Fused(in_half * more, in_full * more, tokens, wide)


class _Size(NamedTuple):
    """Of one attention: ``batch`` (heads included) times [queries, width] x [width, keys], and
    [queries, keys] x [keys, value_width]."""

    batch: int
    queries: int
    keys: int
    width: int
    value_width: int
    bytes: int
    """Of an element."""


def _sizes(a: Analysis, blocks: Blocks) -> Iterator[tuple[_Size, int]]:
    """The sizes of the blocks as far as they are recorded, and how many have each."""
    gpu, cpu = a.trace.gpu, a.trace.cpu
    columns: dict[str, pl.Series] = {}
    for number, kernels in enumerate((blocks.first, blocks.softmax, blocks.last)):
        op = gpu["op"].gather(kernels)
        columns[f"op {number}"] = cpu["name"].gather(op).cast(pl.String)
        columns[f"inputs {number}"] = cpu["inputs"].gather(op)
    for *calls, count in pl.DataFrame(columns).group_by(pl.all()).len().iter_rows():
        inputs = [read_inputs(a, row) for row in calls[1::2]]
        scores = inputs[1] and inputs[1].tensor(0)
        first, last = (
            None if (given := inputs[n]) is None else parse_product(calls[2 * n] or "", given)
            for n in (0, 2)
        )
        if not scores or len(scores.shape) < 2 or not scores.elements or not last:
            continue
        value_width = last.batch * last.m * last.n * last.k // scores.elements
        size = width_of(last.a.dtype)
        if not size or not value_width:
            continue
        # a bias that is a product too (relative positions) may stand before the softmax
        of_scores = first and first.batch * first.m * first.n == scores.elements
        *batch, queries, keys = scores.shape
        width = first.k if first and of_scores else value_width
        yield _Size(prod(batch), queries, keys, width, value_width, size), count


def read_inputs(a: Analysis, row: int | None) -> OpInputs | None:
    """A row of ``trace.inputs``."""
    if row is None:
        return None
    given = a.trace.inputs.row(row, named=True)
    return OpInputs(*(given[name] or "" for name in ("dims", "types", "strides", "concrete")))


def _fill(size: int, tile: int) -> int:
    return ceil(size / tile) * tile


def _fill_width(width: int) -> int:
    return max(TILE, _fill(width, WIDTH_STEP))
