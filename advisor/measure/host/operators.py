"""Operators by shape, compared with attainable rates: rate, bound, efficiency and saving."""

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
"""Time that every kernel takes to start and end, ns, however little it does. The shortest hundredth
of the kernels of eight public traces takes 1 to 5 µs."""
MAX_LAUNCH_BOUND_NS = 25_000
"""Maximum duration of a call that counts as launch-bound, ns, if its work would take less than
``KERNEL_NS``. A kernel that takes a millisecond for so little work is slow, not launch-bound."""
MIN_PRODUCT_SHARE = 0.01
"""Minimum share of kernel time at which a product shows the attainable rate."""

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
    """Attainable rates of a device, empty and None if unknown."""

    matmul: dict[str, gpus.Attainable]
    """Rate of matrix products by number format."""
    memory: gpus.Attainable | None


def attainable_roofs(hardware: GpuSpec | None) -> Roofs:
    """Return the attainable rates of a GPU, by format and for its memory."""
    if hardware is None:
        return Roofs({}, None)
    by_format = {dtype: gpus.attainable_matmul(hardware, dtype) for dtype in FORMATS}
    rates = {dtype: rate for dtype, rate in by_format.items() if rate is not None}
    return Roofs(rates, gpus.attainable_bandwidth(hardware))


def measure_operators(a: Analysis) -> pl.DataFrame:
    """Compare operators by shape with attainable rates: one row per operator and inputs, inside
    ``spans``, without communication: ``op`` (null for a graph, or if not linked), ``inputs`` (row
    of ``trace.inputs``; null if not recorded), ``family``, ``dtype``, ``tensor_core`` and
    ``kernel`` (of its longest kernel), ``calls``, ``kernels``, ``dur`` (ns), ``share`` (of kernel
    time without communication), ``flops``, ``moved`` (bytes; null if unknown), ``flops_per_s``,
    ``bytes_per_s``, ``attainable_flops_per_s``, ``attainable_bytes_per_s``, ``bound`` (``compute``,
    ``memory``, ``launch``, ``unknown``), ``efficiency`` (0 to 1; null if not judged), ``saved`` (ns
    saved at the attainable rate; null), ``longest`` (row of ``trace.gpu``); largest ``dur`` first.

    A row is one operator with one set of inputs. The time covers all kernels that its calls
    launched, including helpers (transposes, split-K reductions). The attainable time is ``max(FLOPs
    / matmul rate, bytes / memory rate)`` at the rates measured on this GPU model
    (``hardware.attainable``), plus ``KERNEL_NS`` per call. Matrix products, convolutions and
    attention need both rates; other operators are compared only with memory. ``efficiency`` is the
    attainable time over the time taken, at most 1: if data stays in L2, or Winograd needs fewer
    FLOPs than are counted, the rate is not a limit. For launch-bound operators, efficiency and
    saving are null, since only more work per launch helps."""
    rows = _list_kernels(a)
    if rows.is_empty():
        return pl.DataFrame(schema=SCHEMA)
    total = rows["ns"].sum()
    heaviest = pl.col("ns").arg_max()
    # Kernels of graphs and of launches outside the recording have no operator: group them by name.
    unlinked_name = pl.when(pl.col("op").is_null()).then(pl.col("kernel"))
    table = (
        rows.with_columns(unlinked_name.alias("alone"))
        .group_by("op", "inputs", "alone")
        .agg(
            *(pl.col(name).get(heaviest) for name in ("kernel", "family", "tensor_core")),
            pl.col("dtype").sort_by("ns", descending=True).drop_nulls().first(),
            pl.col("call").n_unique().cast(pl.Int64).alias("calls"),
            pl.len().cast(pl.Int64).alias("kernels"),
            pl.col("ns").sum().alias("dur"),
            *(
                pl.when(pl.col(column).is_not_null().any()).then(pl.col(column).sum()).alias(column)
                for column in ("flops", "moved")
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
        _compare_with_roofs(
            table, _raise_to_reached(table, attainable_roofs(a.hardware), a.hardware)
        )
        .sort("dur", "op", "kernel", "inputs", descending=[True, False, False, False])
        .select(pl.col(name).cast(dtype) for name, dtype in SCHEMA.items())
    )


def _raise_to_reached(table: pl.DataFrame, limits: Roofs, hardware: GpuSpec | None) -> Roofs:
    """Return the rates, raised to those that products of this recording reach. They never exceed
    the peak, since FLOPs are counted by shape."""
    if hardware is None:
        return limits
    matmuls = table.filter((pl.col("family") == "gemm") & (pl.col("share") >= MIN_PRODUCT_SHARE))
    fastest = matmuls.group_by(pl.col("dtype").cast(pl.String)).agg(pl.col("flops_per_s").max())
    matmul = dict(limits.matmul)
    for dtype, rate in fastest.drop_nulls().iter_rows():
        limit, peak = matmul.get(dtype), hardware.peak(dtype)
        if limit is not None and peak is not None:
            matmul[dtype] = limit._replace(rate=max(limit.rate, min(rate, peak)))
    return Roofs(matmul, limits.memory)


def operator_mask(a: Analysis, operators: pl.DataFrame) -> NDArray[np.bool_]:
    """Find the kernels of some rows of ``Analysis.rooflines``, aligned with ``trace.gpu``."""
    kernels = _list_kernels(a).with_columns(pl.col("op", "kernel").cast(pl.String))
    linked = operators.filter(pl.col("op").is_not_null())
    selected = kernels.join(linked, on=["op", "inputs"], how="semi", nulls_equal=True)
    is_selected = np.zeros(a.trace.gpu.height, dtype=np.bool_)
    is_selected[selected["row"].to_numpy()] = True
    return is_selected


def shares_of_operators(a: Analysis, rows: NDArray[np.bool_]) -> pl.DataFrame:
    """Return the share of each operator's time in the selected rows of ``trace.gpu``: ``op``,
    ``inputs``, ``part`` (0 to 1)."""
    kernels = _list_kernels(a).with_columns(pl.col("op").cast(pl.String))
    is_inside = pl.Series(rows[kernels["row"].to_numpy()])
    return (
        kernels.with_columns(within=kernels["ns"] * is_inside)
        .group_by("op", "inputs")
        .agg(part=pl.col("within").sum() / pl.col("ns").sum().clip(lower_bound=1))
    )


def _list_kernels(a: Analysis) -> pl.DataFrame:
    """List the kernels of the window, without communication. ``ns`` is the part inside the spans;
    FLOPs and bytes are cut in proportion."""
    rows = select_device_rows(a).filter(
        (pl.col("kind") == "kernel") & (pl.col("family") != "communication")
    )
    inputs = a.trace.cpu["inputs"].gather(rows["op_row"]).cast(pl.Int64)
    return rows.rename({"name": "kernel", "op_row": "call", "op_name": "op"}).with_columns(
        inputs=inputs
    )


def _compare_with_roofs(table: pl.DataFrame, limits: Roofs) -> pl.DataFrame:
    rates = {name: limit.rate for name, limit in limits.matmul.items()}
    memory = None if limits.memory is None else limits.memory.rate
    is_matrix = pl.col("family").is_in(list(MATRIX))
    matmul = (
        pl.col("dtype").cast(pl.String).replace_strict(rates, default=None, return_dtype=pl.Float64)
        if rates
        else pl.lit(None, dtype=pl.Float64)
    )
    table = table.with_columns(
        attainable_flops_per_s=pl.when(is_matrix).then(matmul),
        attainable_bytes_per_s=pl.lit(memory, dtype=pl.Float64),
    ).with_columns(
        compute_ns=pl.col("flops") / pl.col("attainable_flops_per_s") * 1e9,
        memory_ns=pl.col("moved") / pl.col("attainable_bytes_per_s") * 1e9,
    )
    roofline_ns = pl.when(
        pl.col("compute_ns").is_not_null() & pl.col("memory_ns").is_not_null()
    ).then(pl.max_horizontal("compute_ns", "memory_ns"))
    table = table.with_columns(
        ideal=pl.when(is_matrix).then(roofline_ns).otherwise("memory_ns"),
        fixed=pl.col("calls") * KERNEL_NS,
    )
    attainable_ns = pl.col("ideal") + pl.col("fixed")
    is_short = pl.col("dur") <= MAX_LAUNCH_BOUND_NS * pl.col("calls")
    is_launch_bound = (pl.col("fixed") >= pl.col("ideal")) & is_short
    is_compute_bound = pl.col("compute_ns").fill_null(0.0) >= pl.col("memory_ns")
    is_judged = pl.col("ideal").is_not_null() & ~is_launch_bound & (pl.col("dur") > 0)
    return table.with_columns(
        bound=pl.when(pl.col("ideal").is_null())
        .then(pl.lit("unknown"))
        .when(is_launch_bound)
        .then(pl.lit("launch"))
        .when(is_compute_bound)
        .then(pl.lit("compute"))
        .otherwise(pl.lit("memory"))
        .cast(Bound),
        efficiency=pl.when(is_judged).then((attainable_ns / pl.col("dur")).clip(upper_bound=1.0)),
        saved=pl.when(is_judged).then((pl.col("dur") - attainable_ns).clip(lower_bound=0.0)),
    )


def _rate(name: str) -> pl.Expr:
    return pl.when(pl.col("dur") > 0).then(pl.col(name) / pl.col("dur") * 1e9)


# -- for the report --------------------------------------------------------------------------------

_MAX_ROWS = 50
"""Maximum number of operators in a report, longest first; the CSV file has all."""
_MAX_TENSORS = 4
"""Maximum number of tensors of an operator whose shapes are shown."""


def rooflines(a: Analysis, limit: int | None = _MAX_ROWS) -> list[OperatorRate]:
    """List operators by shape, those with the most device time first. No ``limit`` lists all."""
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
        parts["saved_ns"] = _divide(row["saved_ns"], a.step_count)
        parts |= {name: _divide(row[name], calls) for name in ("flops", "bytes")}
        result.append(OperatorRate(shapes=shape_text(shapes), **(row | parts)))
    return result


def list_attainable_rates(a: Analysis) -> list[AttainableRate]:
    """List the rates used in the table: those of its formats and of memory."""
    limits = attainable_roofs(a.hardware)
    rates_by_format = (
        a.rooflines.filter(pl.col("attainable_flops_per_s").is_not_null())
        .select(pl.col("dtype").cast(pl.String), "attainable_flops_per_s")
        .unique()
        .sort("dtype")
    )
    result = [
        _build_attainable_rate(name, rate, limits.matmul[name])
        for name, rate in rates_by_format.iter_rows()
    ]
    if limits.memory is not None and not a.rooflines.is_empty():
        result.append(_build_attainable_rate("memory", limits.memory.rate, limits.memory))
    return result


def _build_attainable_rate(subject: str, rate: float, published: Attainable) -> AttainableRate:
    if published.source is not None:
        return AttainableRate(
            of=subject, rate=rate, source=published.source.title, url=published.source.url
        )
    source = "the fastest product of this recording" if rate > published.rate else None
    return AttainableRate(of=subject, rate=rate, source=source, url=None)


def shape_text(dims: str | None) -> str | None:
    """Format shapes of the tensors among an operator's inputs, ``[8, 1024] [1024, 4096]``, or
    ``None`` if not recorded. Lists of tensors are in parentheses; excess is cut with dots."""
    if not dims:
        return None
    try:
        shapes = msgspec.json.decode(dims)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return None
    if not isinstance(shapes, list):
        return None
    texts = [text for shape in shapes if (text := _format_shape(shape))]
    ellipsis = " …" if len(texts) > _MAX_TENSORS else ""
    return " ".join(texts[:_MAX_TENSORS]) + ellipsis


def _format_shape(shape: object) -> str:
    if not isinstance(shape, list) or not shape:
        return ""
    if all(isinstance(size, int) for size in shape):
        return "[" + ", ".join(map(str, shape[:8])) + "]"
    texts = [text for item in shape[:2] if (text := _format_shape(item))]
    return f"({' '.join(texts)}{' …' if len(shape) > 2 else ''})" if texts else ""


def _divide(value: float | None, count: int) -> float | None:
    return None if value is None else value / count
