"""Kernels summed up: by family, by name against the roofline, and over the step (MFU)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from advisor.core.intervals import covered_length
from advisor.measure.device.families import MATRIX

if TYPE_CHECKING:
    from advisor.core.gpus import GpuSpec
    from advisor.measure import Analysis

KNOWN_SHARE = 0.8
"""A rate, a roofline share or the MFU is given when at least this share of the time it describes
has known FLOPs or bytes; below it the figure would describe something else."""


def sum_families(a: Analysis) -> pl.DataFrame:
    """Device time by family inside ``spans``: ``family``, ``count``, ``dur`` (ns summed), ``share``
    (of summed compute and communication kernel time), ``flops`` and ``moved`` (those that are
    known, null when none is). Copies and memsets are listed too."""
    rows = in_spans(a)
    kernels = rows.filter(pl.col("kind") == "kernel")["ns"].sum()
    return (
        rows.group_by("family")
        .agg(
            pl.len().cast(pl.Int64).alias("count"),
            pl.col("ns").sum().alias("dur"),
            _known_sum("flops"),
            _known_sum("moved"),
        )
        .with_columns(share=_ratio(pl.col("dur"), pl.lit(kernels)))
        .sort("dur", "family", descending=[True, False])
        .select("family", "count", "dur", "share", "flops", "moved")
    )


def sum_kernels(a: Analysis) -> pl.DataFrame:
    """Device time by kernel name inside ``spans``: ``name``, ``family``, ``count``, ``dur`` (ns),
    ``share``, ``occupancy`` (time-weighted percent; null), ``blocks_per_sm`` (time-weighted; null),
    ``tensor_core``, ``flops_per_s``, ``bytes_per_s``, ``roofline`` (share of the attainable peak;
    null: not measured), ``op_name``; largest ``dur`` first.

    ``roofline``: the time that the device's peak and bandwidth allow, over the time taken:
    max(FLOPs / peak of the dtype, bytes / memory bandwidth) / duration. Kernels that are neither
    matrix products, convolutions nor attention are compared with bandwidth alone when no peak is
    known for their dtype. It can exceed 1: data in L2 is faster than memory, and Winograd needs
    fewer FLOPs than are counted.
    """
    rows = in_spans(a).filter(pl.col("kind") == "kernel")
    total = rows["ns"].sum()
    rows = rows.with_columns(ideal=_ideal_ns(rows, a.hardware))
    by_parts = (
        rows.group_by("name", "family", "op_name", "tensor_core")
        .agg(
            pl.len().cast(pl.Int64).alias("count"),
            pl.col("ns").sum().alias("dur"),
            *(_weighted(name) for name in ("occupancy", "blocks_per_sm")),
            *(_time_with(name) for name in ("occupancy", "blocks_per_sm")),
            *(_known_sum(name) for name in ("flops", "moved", "ideal")),
            *(_time_with(name) for name in ("flops", "moved", "ideal")),
        )
        .sort("dur", "name", "op_name", descending=[True, False, False], nulls_last=True)
    )
    # One row a name; what it mostly is stands for it.
    summed = ["occupancy", "blocks_per_sm", "flops", "moved", "ideal"]
    return (
        by_parts.group_by("name", maintain_order=True)
        .agg(
            pl.col("family", "tensor_core", "op_name").first(),
            pl.col("count", "dur").sum(),
            *(
                pl.when(pl.col(n).is_not_null().any()).then(pl.col(n).sum()).alias(n)
                for n in summed
            ),
            *(pl.col(f"{n}_ns").sum() for n in summed),
        )
        .sort("dur", "name", descending=[True, False])
        .select(
            "name",
            "family",
            "count",
            "dur",
            _ratio(pl.col("dur"), pl.lit(total)).alias("share"),
            _ratio(pl.col("occupancy"), pl.col("occupancy_ns")).alias("occupancy"),
            _ratio(pl.col("blocks_per_sm"), pl.col("blocks_per_sm_ns")).alias("blocks_per_sm"),
            "tensor_core",
            _rate("flops").alias("flops_per_s"),
            _rate("moved").alias("bytes_per_s"),
            (_rate("ideal") / 1e9).alias("roofline"),
            "op_name",
        )
    )


def model_flop_utilisation(a: Analysis) -> float | None:
    """Model FLOP utilisation: FLOPs of all kernels with known shapes over the step time times the
    peak of their dtype (0 to 1). Work in several formats is compared with the peak of each.
    ``None``: shapes or peak not known, or shapes cover less than KNOWN_SHARE of GEMM, convolution
    and attention time."""
    hardware = a.hardware
    if hardware is None or not a.span_ns:
        return None
    rows = in_spans(a).filter(pl.col("kind") == "kernel")
    rows = rows.with_columns(peak=_peaks(rows, hardware))
    matrix = rows.filter(pl.col("family").is_in(list(MATRIX)))
    known = pl.col("flops").is_not_null() & (pl.col("peak").is_not_null() | (pl.col("flops") == 0))
    time, known_ns = int(matrix["ns"].sum()), int(matrix.filter(known)["ns"].sum())
    if not time or known_ns < KNOWN_SHARE * time:
        return None
    busy = rows.select((pl.col("flops") / pl.col("peak")).fill_nan(None).sum()).item()
    return float(busy) / (a.span_ns / 1e9)


def in_spans(a: Analysis) -> pl.DataFrame:
    """The device rows that count, with what ``Analysis.kernels`` says of them. ``ns`` is the part
    of the duration inside the spans; FLOPs and bytes are cut in proportion."""
    gpu, kernels = a.trace.gpu, a.kernels
    index = np.flatnonzero(a.in_window)
    ts, dur = gpu["ts"].to_numpy()[index], gpu["dur"].to_numpy()[index]
    ns = covered_length(ts, ts + dur, a.spans)
    part = pl.Series(ns / np.maximum(dur, 1))
    chosen = kernels[index]
    return pl.DataFrame(
        {
            "row": index,
            "kind": gpu["kind"].gather(index),
            "name": gpu["name"].gather(index),
            "ns": ns,
            "blocks_per_sm": gpu["blocks_per_sm"].gather(index),
            "flops": chosen["flops"] * part,
            "moved": chosen["moved"] * part,
            **{
                name: chosen[name]
                for name in ("family", "tensor_core", "dtype", "occupancy", "op_name", "op_row")
            },
        }
    )


def _peaks(rows: pl.DataFrame, hardware: GpuSpec) -> pl.Series:
    """Peak of each row's dtype, FLOP/s; null: dtype or peak not known."""
    formats = rows["dtype"].unique().drop_nulls().to_list()
    peaks = {name: hardware.peak(name) for name in formats}
    known = {name: peak for name, peak in peaks.items() if peak is not None}
    text = rows["dtype"].cast(pl.String)
    if not known:
        return pl.Series([None], dtype=pl.Float64).new_from_index(0, rows.height)
    return text.replace_strict(known, default=None, return_dtype=pl.Float64)


def _ideal_ns(rows: pl.DataFrame, hardware: GpuSpec | None) -> pl.Series:
    """Shortest time the device allows each row, ns; null: FLOPs, bytes or limits not known."""
    if hardware is None:
        return pl.Series([None], dtype=pl.Float64).new_from_index(0, rows.height)
    frame = rows.select("family", "flops", "moved", peak=_peaks(rows, hardware))
    memory = pl.col("moved") / hardware.bandwidth * 1e9
    arithmetic = pl.col("flops") / pl.col("peak") * 1e9
    both = pl.when(arithmetic.is_not_null() & memory.is_not_null()).then(
        pl.max_horizontal(arithmetic, memory)
    )
    matrix = pl.col("family").is_in(list(MATRIX))
    ideal = pl.when(matrix).then(both).otherwise(pl.coalesce(both, memory))
    return frame.select(ideal.alias("ideal"))["ideal"]


def _known_sum(name: str) -> pl.Expr:
    """Sum of the known values; null when none is known."""
    return pl.when(pl.col(name).is_not_null().any()).then(pl.col(name).sum()).alias(name)


def _weighted(name: str) -> pl.Expr:
    """Sum of a value times the time it held."""
    product = pl.col(name) * pl.col("ns")
    return pl.when(product.is_not_null().any()).then(product.sum()).alias(name)


def _time_with(name: str) -> pl.Expr:
    return pl.col("ns").filter(pl.col(name).is_not_null()).sum().alias(f"{name}_ns")


def _ratio(part: pl.Expr, whole: pl.Expr) -> pl.Expr:
    """``part / whole``; null where ``whole`` is not positive."""
    return pl.when(whole > 0).then(part / whole)


def _rate(name: str) -> pl.Expr:
    """Amount a second of the time it is known for; null when that is too little of the time."""
    time = pl.col(f"{name}_ns")
    return pl.when((time > 0) & (time >= KNOWN_SHARE * pl.col("dur"))).then(
        pl.col(name) / time * 1e9
    )
