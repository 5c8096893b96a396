"""The report's table of operators by shape, and the rates that they are compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import polars as pl

from advisor.core.report import AttainableRate, OperatorRate
from advisor.measure.host.operators import roofs

if TYPE_CHECKING:
    from advisor.core.gpus.attainable import Attainable
    from advisor.measure import Analysis

MAX_ROWS = 50
"""Operators in a report, those with most time; the CSV file has all."""
MAX_TENSORS = 4
"""Tensors of an operator whose shapes are written out."""


def rooflines(a: Analysis, most: int | None = MAX_ROWS) -> list[OperatorRate]:
    """Operators by shape, those with most device time first. ``most``: ``None`` for all."""
    table = a.rooflines if most is None else a.rooflines.head(most)
    dims = a.trace.inputs["dims"].gather(table["inputs"])
    steps = a.step_count
    result = []
    text = table.with_columns(pl.col("family", "dtype", "bound").cast(pl.String))
    for row, shapes in zip(text.iter_rows(named=True), dims, strict=True):
        calls = max(row["calls"], 1)
        result.append(
            OperatorRate(
                name=row["op"],
                shapes=shape_text(shapes),
                family=row["family"],
                dtype=row["dtype"],
                kernel=row["kernel"],
                tensor_core=row["tensor_core"],
                calls=calls / steps,
                ns=row["dur"] / steps,
                share=row["share"],
                flops=_each(row["flops"], calls),
                bytes=_each(row["moved"], calls),
                flops_per_s=row["flops_per_s"],
                bytes_per_s=row["bytes_per_s"],
                attainable_flops_per_s=row["attainable_flops_per_s"],
                attainable_bytes_per_s=row["attainable_bytes_per_s"],
                bound=row["bound"],
                efficiency=row["efficiency"],
                saved_ns=_each(row["saved"], steps),
            )
        )
    return result


def attained(a: Analysis) -> list[AttainableRate]:
    """The rates behind the table, of the formats that occur in it, and of memory."""
    limits = roofs(a.hardware)
    held = (
        a.rooflines.filter(pl.col("attainable_flops_per_s").is_not_null())
        .select(pl.col("dtype").cast(pl.String), "attainable_flops_per_s")
        .unique()
        .sort("dtype")
    )
    result = [_rate(name, rate, limits.matmul[name]) for name, rate in held.iter_rows()]
    if limits.memory is not None and not a.rooflines.is_empty():
        result.append(_rate("memory", limits.memory.rate, limits.memory))
    return result


def _rate(of: str, rate: float, known: Attainable) -> AttainableRate:
    if known.source is not None:
        return AttainableRate(of=of, rate=rate, source=known.source.title, url=known.source.url)
    source = "the fastest product of this recording" if rate > known.rate else None
    return AttainableRate(of=of, rate=rate, source=source, url=None)


def shape_text(dims: str | None) -> str | None:
    """Shapes of the tensors among an operator's inputs, ``[8, 1024] [1024, 4096]``; ``None``: not
    recorded. Lists of tensors are written in parentheses; what is too much is cut with dots."""
    if not dims:
        return None
    try:
        shapes = msgspec.json.decode(dims)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return None
    if not isinstance(shapes, list):
        return None
    written = [text for shape in shapes if (text := _one(shape))]
    more = " …" if len(written) > MAX_TENSORS else ""
    return " ".join(written[:MAX_TENSORS]) + more


def _one(shape: object) -> str:
    if not isinstance(shape, list) or not shape:
        return ""
    if all(isinstance(size, int) for size in shape):
        return "[" + ", ".join(map(str, shape[:8])) + "]"
    inside = [text for each in shape[:2] if (text := _one(each))]
    return f"({' '.join(inside)}{' …' if len(shape) > 2 else ''})" if inside else ""


def _each(value: float | None, count: int) -> float | None:
    return None if value is None else value / count
