"""Device work of two runs, matched by operator and input shape, or by kernel name."""

from typing import Any

import numpy as np
import polars as pl

from advisor.compare.comparison import ComparedWork
from advisor.core.intervals import covered_length
from advisor.core.labels import shorten
from advisor.measure import Analysis

_MAX_ROWS = 500
COPY_OPERATOR = "aten::copy_"
_MAX_KERNELS = 3
_MAX_NAME_LENGTH, MAX_SHAPE_LENGTH = 300, 1000
"""Maximum lengths of a name and a shape, in characters. Names of C++ templates and compiled regions
have thousands."""

_WORK_KEY = ("op", "shape")


def compare_work(
    before: Analysis, after: Analysis, *, shapes: bool = True
) -> tuple[list[ComparedWork], ComparedWork | None]:
    """Return device time per step by operator and shape: (largest differences, the others summed).

    The operator is the innermost around the launch, with its own inputs; work that no operator
    launched is identified by its kernel. Work is matched by operator alone if only one side has
    shapes, or without ``shapes``. Kernel names do not matter, so the same program on two GPUs is
    matched too.
    """
    shapes = shapes and can_match_by_shape(before, after)
    sides = [operators(a, shapes=shapes) for a in (before, after)]
    return _join_sides(sides, _WORK_KEY)


def compare_kernels(
    before: Analysis, after: Analysis
) -> tuple[list[ComparedWork], ComparedWork | None]:
    """Return device time per step by kernel name alone, as ``compare_work`` does."""
    sides = [
        measure_device_work(a)
        .group_by("kernel")
        .agg(pl.col("ns", "count").sum())
        .with_columns(
            op=pl.lit(None, pl.String),
            shape=pl.lit(None, pl.String),
            kernels=pl.concat_list("kernel"),
        )
        for a in (before, after)
    ]
    return _join_sides(sides, ("kernel",))


def matched_share(work: list[ComparedWork], rest: ComparedWork | None) -> float | None:
    """Return the share of both sides' device time in rows that both have, or ``None`` without work.

    Work that is not in the rows counts as matched: it differs too little to be shown. Copies are
    ignored, because all programs have them."""
    rows = [row for row in work if row.op != COPY_OPERATOR] or list(work)
    rows += [rest] if rest is not None else []
    total = sum(row.before_ns + row.after_ns for row in rows)
    both = sum(row.before_ns + row.after_ns for row in rows if row.before_count and row.after_count)
    if not any(row.before_count for row in rows) or not any(row.after_count for row in rows):
        return None
    return both / total if total else None


def can_match_by_shape(before: Analysis, after: Analysis) -> bool:
    """Return whether both sides have shapes, so that work can be matched by them."""
    return not before.trace.inputs.is_empty() and not after.trace.inputs.is_empty()


def measure_device_work(a: Analysis) -> pl.DataFrame:
    """Return device work of the used steps by operator, inputs and kernel: ``op`` (name),
    ``inputs`` (row of ``Trace.inputs``), ``kernel``, ``ns`` and ``count``, both per step. Only the
    part of an event inside the steps counts."""
    trace = a.trace
    gpu = trace.gpu[np.flatnonzero(a.in_window)]
    ts = gpu["ts"].to_numpy()
    inside_ns = covered_length(ts, ts + gpu["dur"].to_numpy(), a.spans)
    op = gpu["op"].cast(pl.Int64)
    frame = pl.DataFrame(
        {
            "op": trace.cpu["name"].gather(op),
            "inputs": trace.cpu["inputs"].gather(op),
            "kernel": gpu["name"],
            "ns": inside_ns,
        }
    )
    return (
        frame.group_by("op", "inputs", "kernel")
        .agg(pl.col("ns").sum(), pl.len().alias("count"))
        .with_columns(
            pl.col("op", "kernel").cast(pl.String),
            pl.col("ns", "count").cast(pl.Float64) / a.step_count,
        )
    )


def operators(a: Analysis, *, shapes: bool) -> pl.DataFrame:
    """Return device work by operator and shape: ``op``, ``shape``, ``ns``, ``count``, ``kernels``
    (longest-running first) and ``kernel``, which identifies work without an operator."""
    work = measure_device_work(a)
    shape = pl.lit(None, pl.String)
    if shapes:
        work = work.with_columns(shape=a.trace.inputs["dims"].gather(work["inputs"].cast(pl.Int64)))
        shape = pl.col("shape")
    return (
        work.with_columns(shape=shape)
        .group_by("op", "shape", "kernel")
        .agg(pl.col("ns", "count").sum())
        .sort("ns", "kernel", descending=[True, False])
        .with_columns(
            # work without an operator is identified by its kernel
            own=pl.when(pl.col("op").is_null()).then(pl.col("kernel"))
        )
        .group_by("op", "shape", "own", maintain_order=True)
        .agg(pl.col("ns", "count").sum(), pl.col("kernel").head(_MAX_KERNELS).alias("kernels"))
        .rename({"own": "kernel"})
    )


def _join_sides(
    sides: list[pl.DataFrame], key: tuple[str, ...]
) -> tuple[list[ComparedWork], ComparedWork | None]:
    keys = [*dict.fromkeys((*key, "kernel"))]
    left, right = (
        side.select(*keys, *(pl.col(c).alias(f"{name}_{c}") for c in ("ns", "count", "kernels")))
        for name, side in zip(("before", "after"), sides, strict=True)
    )
    joined = left.join(right, on=keys, how="full", coalesce=True, nulls_equal=True)
    figures = [f"{name}_{c}" for name in ("before", "after") for c in ("ns", "count")]
    joined = (
        joined.with_columns(pl.col(figures).fill_null(0.0))
        .with_columns(difference=(pl.col("after_ns") - pl.col("before_ns")).abs())
        .with_columns(larger=pl.max_horizontal("after_ns", "before_ns"))
        .sort("difference", "larger", *keys, descending=[True, True, *[False] * len(keys)])
    )
    largest, remaining = joined.head(_MAX_ROWS), joined.tail(max(0, joined.height - _MAX_ROWS))
    rows = [_build_work(row) for row in largest.to_dicts()]
    if remaining.is_empty():
        return rows, None
    totals = remaining.select(pl.col(figures).sum()).to_dicts()[0]
    return rows, _build_work(totals)


def _build_work(row: dict[str, Any]) -> ComparedWork:
    return ComparedWork(
        op=_shorten_name(row.get("op")),
        shape=_shorten_name(row.get("shape"), MAX_SHAPE_LENGTH),
        before_ns=row["before_ns"],
        after_ns=row["after_ns"],
        before_count=row["before_count"],
        after_count=row["after_count"],
        before_kernels=[_shorten_name(name) or "" for name in row.get("before_kernels") or []],
        after_kernels=[_shorten_name(name) or "" for name in row.get("after_kernels") or []],
    )


def _shorten_name(text: str | None, max_length: int = _MAX_NAME_LENGTH) -> str | None:
    return text if text is None else shorten(text, max_length)
