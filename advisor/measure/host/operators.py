"""Operators by shape against what the device attains: rate, bound, efficiency, time to be saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core import gpus
from advisor.core.report_kernels import AttainableRate, OperatorRate
from advisor.measure.device.families import MATRIX, Family
from advisor.measure.device.roofline import select_device_rows
from advisor.measure.device.shapes import FORMATS, Format

if TYPE_CHECKING:
    from advisor.core.gpus import Attainable, GpuSpec
    from advisor.measure import Analysis

KERNEL_NS = 3_000
"""Time of every call that a kernel takes for starting and ending, ns, however little it does. The
shortest hundredth of the kernels of eight public traces takes 1 to 5 µs."""
SHORT_NS = 25_000
"""Longest call that counts as bound by launches, ns, where its work would take less than
``KERNEL_NS``. A kernel of a millisecond with as little to do is not: it is slow."""
MIN_SHARE = 0.01
"""Share of kernel time from which a product shows what the device attains."""

BOUNDS = ("compute", "memory", "launch", "unknown")
Bound = pl.Enum(BOUNDS)

SCHEMA: dict[str, Any] = {
    "op": pl.String, "inputs": pl.Int64, "family": Family, "dtype": Format,
    "tensor_core": pl.Boolean, "kernel": pl.String, "calls": pl.Int64, "kernels": pl.Int64,
    "dur": pl.Int64, "share": pl.Float64, "flops": pl.Float64, "moved": pl.Float64,
    "flops_per_s": pl.Float64, "bytes_per_s": pl.Float64, "attainable_flops_per_s": pl.Float64,
    "attainable_bytes_per_s": pl.Float64, "bound": Bound, "efficiency": pl.Float64,
    "saved": pl.Float64, "longest": pl.Int64,
}  # fmt: skip


class Roofs(NamedTuple):
    """Attainable rates of a device; empty and None: not known."""

    matmul: dict[str, gpus.Attainable]
    """Rate of matrix products by number format."""
    memory: gpus.Attainable | None


def attainable_roofs(hardware: GpuSpec | None) -> Roofs:
    """Return the attainable rates of a GPU, by format and for its memory."""
    if hardware is None:
        return Roofs({}, None)
    result = {dtype: gpus.attainable_matmul(hardware, dtype) for dtype in FORMATS}
    rates = {dtype: rate for dtype, rate in result.items() if rate is not None}
    return Roofs(rates, gpus.attainable_bandwidth(hardware))


def measure_operators(a: Analysis) -> pl.DataFrame:
    """Compare operators by shape with attainable rates: one row per operator and inputs, inside
    ``spans``, without communication: ``op`` (null: of a graph, or not linked), ``inputs`` (row of
    ``trace.inputs``; null: not recorded), ``family``, ``dtype``, ``tensor_core`` and ``kernel`` (of
    its longest kernel), ``calls``, ``kernels``, ``dur`` (ns), ``share`` (of kernel time without
    communication), ``flops``, ``moved`` (bytes; null: not known), ``flops_per_s``, ``bytes_per_s``,
    ``attainable_flops_per_s``, ``attainable_bytes_per_s``, ``bound`` (``compute``, ``memory``,
    ``launch``, ``unknown``), ``efficiency`` (0 to 1; null: not judged), ``saved`` (ns that it would
    take less at the attainable rate; null), ``longest`` (row of ``trace.gpu``); largest ``dur``
    first.

    A row is one operator with one set of inputs. The time is that of all kernels that its calls
    launched, helpers (transposes, split-K reductions) included. What it could take is
    ``max(FLOPs / matmul rate, bytes / memory rate)`` at the rates that were measured on such a GPU
    (``hardware.attainable``), plus ``KERNEL_NS`` a call; matrix products, convolutions and
    attention need both, other operators are compared with memory alone. ``efficiency`` is that time
    over the one taken, at most 1: where data stays in L2, or Winograd needs fewer FLOPs than are
    counted, the rate is no limit. Where launches bind it, efficiency and saving are null: more work
    a launch is the cure."""
    rows = _kernels(a)
    if rows.is_empty():
        return pl.DataFrame(schema=SCHEMA)
    total = rows["ns"].sum()
    heaviest = pl.col("ns").arg_max()
    # Kernels of graphs and of launches outside the recording have no operator: by kernel name.
    own = pl.when(pl.col("op").is_null()).then(pl.col("kernel"))
    table = (
        rows.with_columns(own.alias("alone"))
        .group_by("op", "inputs", "alone")
        .agg(
            *(pl.col(name).get(heaviest) for name in ("kernel", "family", "tensor_core")),
            pl.col("dtype").sort_by("ns", descending=True).drop_nulls().first(),
            pl.col("call").n_unique().cast(pl.Int64).alias("calls"),
            pl.len().cast(pl.Int64).alias("kernels"),
            pl.col("ns").sum().alias("dur"),
            *(
                pl.when(pl.col(n).is_not_null().any()).then(pl.col(n).sum()).alias(n)
                for n in ("flops", "moved")
            ),
            pl.col("row").get(heaviest).alias("longest"),
        )
        .with_columns(
            pl.col("op", "kernel").cast(pl.String),
            calls=pl.when(pl.col("op").is_null()).then("kernels").otherwise("calls"),
        )
    )
    table = table.with_columns(
        share=pl.col("dur") / max(total, 1), flops_per_s=_rate("flops"), bytes_per_s=_rate("moved")
    )
    return (
        _against_roofs(table, _reached(table, attainable_roofs(a.hardware), a.hardware))
        .sort("dur", "op", "kernel", "inputs", descending=[True, False, False, False])
        .select(pl.col(name).cast(kind) for name, kind in SCHEMA.items())
    )


def _reached(table: pl.DataFrame, limits: Roofs, hardware: GpuSpec | None) -> Roofs:
    """Return the rates, raised to what products of this recording reach: that is a measurement too.
    They never exceed the peak: FLOPs are counted by shape."""
    if hardware is None:
        return limits
    matmuls = table.filter((pl.col("family") == "gemm") & (pl.col("share") >= MIN_SHARE))
    fastest = matmuls.group_by(pl.col("dtype").cast(pl.String)).agg(pl.col("flops_per_s").max())
    matmul = dict(limits.matmul)
    for dtype, rate in fastest.drop_nulls().iter_rows():
        result, peak = matmul.get(dtype), hardware.peak(dtype)
        if result is not None and peak is not None:
            matmul[dtype] = result._replace(rate=max(result.rate, min(rate, peak)))
    return Roofs(matmul, limits.memory)


def rows_of(a: Analysis, operators: pl.DataFrame) -> NDArray[np.bool_]:
    """Find the kernels of some rows of ``Analysis.rooflines``, aligned with ``trace.gpu``."""
    kernels = _kernels(a).with_columns(pl.col("op", "kernel").cast(pl.String))
    linked = operators.filter(pl.col("op").is_not_null())
    chosen = kernels.join(linked, on=["op", "inputs"], how="semi", nulls_equal=True)
    result = np.zeros(a.trace.gpu.height, dtype=np.bool_)
    result[chosen["row"].to_numpy()] = True
    return result


def share_in(a: Analysis, rows: NDArray[np.bool_]) -> pl.DataFrame:
    """Return the part of each operator's time in the selected rows of ``trace.gpu``: ``op``,
    ``inputs``, ``part`` (0 to 1)."""
    kernels = _kernels(a).with_columns(pl.col("op").cast(pl.String))
    inside = pl.Series(rows[kernels["row"].to_numpy()])
    return (
        kernels.with_columns(within=kernels["ns"] * inside)
        .group_by("op", "inputs")
        .agg(part=pl.col("within").sum() / pl.col("ns").sum().clip(lower_bound=1))
    )


def _kernels(a: Analysis) -> pl.DataFrame:
    """List the kernels of the window, without communication; ``ns``: the part inside the spans,
    FLOPs and bytes cut in proportion."""
    rows = select_device_rows(a).filter(
        (pl.col("kind") == "kernel") & (pl.col("family") != "communication")
    )
    inputs = a.trace.cpu["inputs"].gather(rows["op_row"]).cast(pl.Int64)
    return rows.rename({"name": "kernel", "op_row": "call", "op_name": "op"}).with_columns(
        inputs=inputs
    )


def _against_roofs(table: pl.DataFrame, limits: Roofs) -> pl.DataFrame:
    rates = {name: result.rate for name, result in limits.matmul.items()}
    memory = None if limits.memory is None else limits.memory.rate
    matrix = pl.col("family").is_in(list(MATRIX))
    matmul = (
        pl.col("dtype").cast(pl.String).replace_strict(rates, default=None, return_dtype=pl.Float64)
        if rates
        else pl.lit(None, dtype=pl.Float64)
    )
    table = table.with_columns(
        attainable_flops_per_s=pl.when(matrix).then(matmul),
        attainable_bytes_per_s=pl.lit(memory, dtype=pl.Float64),
    ).with_columns(
        compute_ns=pl.col("flops") / pl.col("attainable_flops_per_s") * 1e9,
        memory_ns=pl.col("moved") / pl.col("attainable_bytes_per_s") * 1e9,
    )
    both = pl.when(pl.col("compute_ns").is_not_null() & pl.col("memory_ns").is_not_null()).then(
        pl.max_horizontal("compute_ns", "memory_ns")
    )
    table = table.with_columns(
        ideal=pl.when(matrix).then(both).otherwise("memory_ns"), fixed=pl.col("calls") * KERNEL_NS
    )
    best = pl.col("ideal") + pl.col("fixed")
    short = pl.col("dur") <= SHORT_NS * pl.col("calls")
    by_launch = (pl.col("fixed") >= pl.col("ideal")) & short
    by_compute = pl.col("compute_ns").fill_null(0.0) >= pl.col("memory_ns")
    judged = pl.col("ideal").is_not_null() & ~by_launch & (pl.col("dur") > 0)
    return table.with_columns(
        bound=pl.when(pl.col("ideal").is_null())
        .then(pl.lit("unknown"))
        .when(by_launch)
        .then(pl.lit("launch"))
        .when(by_compute)
        .then(pl.lit("compute"))
        .otherwise(pl.lit("memory"))
        .cast(Bound),
        efficiency=pl.when(judged).then((best / pl.col("dur")).clip(upper_bound=1.0)),
        saved=pl.when(judged).then((pl.col("dur") - best).clip(lower_bound=0.0)),
    )


def _rate(name: str) -> pl.Expr:
    return pl.when(pl.col("dur") > 0).then(pl.col(name) / pl.col("dur") * 1e9)


# -- for the report --------------------------------------------------------------------------------

MAX_ROWS = 50
"""Operators in a report, those with most time; the CSV file has all."""
MAX_TENSORS = 4
"""Tensors of an operator whose shapes are written out, at most."""


def rooflines(a: Analysis, limit: int | None = MAX_ROWS) -> list[OperatorRate]:
    """List operators by shape, those with most device time first. ``limit``: ``None`` for all."""
    table = a.rooflines if limit is None else a.rooflines.head(limit)
    rows = table.drop("kernels", "inputs", "longest").rename(
        {"op": "name", "dur": "ns", "moved": "bytes", "saved": "saved_ns"}
    )
    rows = rows.with_columns(pl.col("family", "dtype", "bound").cast(pl.String))
    dims = a.trace.inputs["dims"].gather(table["inputs"])
    result = []
    for shapes, row in zip(dims, rows.iter_rows(named=True), strict=True):
        row["calls"] = calls = max(row["calls"], 1)
        parts = {name: row[name] / a.step_count for name in ("calls", "ns")}
        parts["saved_ns"] = _each(row["saved_ns"], a.step_count)
        parts |= {name: _each(row[name], calls) for name in ("flops", "bytes")}
        result.append(OperatorRate(shapes=shape_text(shapes), **(row | parts)))
    return result


def list_attainable_rates(a: Analysis) -> list[AttainableRate]:
    """List the rates behind the table, of the formats that occur in it, and of memory."""
    limits = attainable_roofs(a.hardware)
    held = (
        a.rooflines.filter(pl.col("attainable_flops_per_s").is_not_null())
        .select(pl.col("dtype").cast(pl.String), "attainable_flops_per_s")
        .unique()
        .sort("dtype")
    )
    result = [_attainable(name, rate, limits.matmul[name]) for name, rate in held.iter_rows()]
    if limits.memory is not None and not a.rooflines.is_empty():
        result.append(_attainable("memory", limits.memory.rate, limits.memory))
    return result


def _attainable(of: str, rate: float, known: Attainable) -> AttainableRate:
    if known.source is not None:
        return AttainableRate(of=of, rate=rate, source=known.source.title, url=known.source.url)
    source = "the fastest product of this recording" if rate > known.rate else None
    return AttainableRate(of=of, rate=rate, source=source, url=None)


def shape_text(dims: str | None) -> str | None:
    """Format shapes of the tensors among an operator's inputs, ``[8, 1024] [1024, 4096]``;
    ``None``: not recorded. Lists of tensors are written in parentheses; excess is cut with dots."""
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
