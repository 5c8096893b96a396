"""FLOPs and bytes of attention in prefill and decode, from the sums that an engine's marks carry.

With q new tokens of a request that attends to k tokens, causal: the i-th new token attends to
k - q + i, together qk - q(q - 1)/2 pairs, each of which takes 2 FLOPs for the score and 2 for the
value, an element of a head (https://arxiv.org/abs/2205.14135, section 3.1). Keys and values are
read once, queries and results once.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl

from advisor.core.trace import Trace
from advisor.measure.device.shapes import OpInputs
from advisor.measure.serving.annotations import Mark, Sums

if TYPE_CHECKING:
    from advisor.measure import Analysis

WINDOWED = r"[Ss]liding|[Cc]hunked|[Ww]indow|[Ll]ocal|[Ss]parse|[Tt]opk"
"""Kernels that attend to less than all tokens: by how much is not recorded."""
HELPERS = r"reduce|[Mm]erge|combine|metadata|prepare|quant"
NARROW = r"(?i)e4m3|e5m2|fp8|float8|f8_"
"""Keys and values in one byte, whatever the operator's inputs are in."""
LATENT = 576
"""Elements of a token's cache in DeepSeek's latent attention: 512 of keys and values and 64 that
carry positions (https://arxiv.org/abs/2412.19437, section 4.2)."""


class Heads(NamedTuple):
    """Shape of one attention operator."""

    queries: int
    keys: int
    """Heads of keys and values."""
    size: int
    """Elements of a head of queries and keys."""
    value: int
    """Of values."""
    width: int
    """Bytes an element."""


def read_heads(trace: Trace, row: int) -> Heads | None:
    """Heads of an operator whose inputs are (tokens, heads, size): queries, keys, values. ``None``:
    not recorded so."""
    inputs = trace.cpu["inputs"][row]
    if inputs is None:
        return None
    described = OpInputs(*(str(text) for text in trace.inputs.select("dims", "types").row(inputs)))
    query, key, value = (described.tensor(place) for place in range(3))
    if query is None or key is None or len(query.shape) != 3 or len(key.shape) not in (2, 3):
        return None
    wide = key.width
    if wide is None or query.shape[2] != key.shape[-1] or not query.shape[1]:
        return None
    keys = key.shape[1] if len(key.shape) == 3 else 1
    size = value.shape[-1] if value is not None and len(value.shape) == len(key.shape) else None
    return Heads(query.shape[1], keys, key.shape[-1], size or key.shape[-1], wide)


def count_pairs(sums: Sums) -> float:
    """Pairs of a new token and one that it attends to, of all requests."""
    return sums.qk - (sums.qq - sums.q) / 2


def attention_cost(mark: Mark, shape: Heads, *, narrow: bool) -> tuple[float, float] | None:
    """FLOPs and bytes of one attention operator in a step; ``None``: the mark has no sums."""
    kinds = [sums for sums in (mark.prefill, mark.decode) if sums is not None]
    if not kinds:
        return None
    flops = sum(2.0 * shape.queries * (shape.size + shape.value) * count_pairs(s) for s in kinds)
    cached = shape.size if shape.size == LATENT else shape.keys * (shape.size + shape.value)
    width = 1 if narrow else shape.width
    moved = sum(
        s.k * cached * width + s.q * shape.queries * (shape.size + shape.value) * shape.width
        for s in kinds
    )
    return flops, float(moved)


def with_attention(a: Analysis, measured: pl.DataFrame) -> pl.DataFrame:
    """``Analysis.kernels`` with FLOPs and bytes of attention that shapes alone do not tell. Where
    the bytes are more than the memory can deliver, the kernel reads less than all tokens, and
    nothing is known of it."""
    trace, passes = a.trace, a.passes
    if passes is None:
        return measured
    owner = passes.owner
    wanted = (
        (measured["family"] == "attention")
        & measured["moved"].is_null()
        & measured["op_row"].is_not_null()
    )
    rows = np.flatnonzero(wanted.fill_null(False).to_numpy() & (owner >= 0))
    if not len(rows):
        return measured
    flops = measured["flops"].fill_null(np.nan).to_numpy().astype(np.float64).copy()
    moved = measured["moved"].fill_null(np.nan).to_numpy().astype(np.float64).copy()
    dur = trace.gpu["dur"].gather(rows).to_list()
    bandwidth = float("inf") if a.hardware is None else a.hardware.bandwidth
    shapes: dict[int | None, Heads | None] = {}
    ops = measured["op_row"].gather(rows).to_list()
    texts = trace.gpu["name"].gather(rows).cast(pl.String).to_list()
    for row, op, name, ns in zip(rows.tolist(), ops, texts, dur, strict=True):
        place = trace.cpu["inputs"][op]
        if place not in shapes:
            shapes[place] = read_heads(trace, op)
        shape = shapes[place]
        if shape is None or re.search(f"{WINDOWED}|{HELPERS}", name):
            continue
        narrow = re.search(NARROW, name) is not None
        work = attention_cost(passes.marks[owner[row]], shape, narrow=narrow)
        if work is not None and work[1] * 1e9 <= bandwidth * max(ns, 1):
            flops[row], moved[row] = work
    return measured.with_columns(
        flops=pl.Series(flops).fill_nan(None), moved=pl.Series(moved).fill_nan(None)
    )
