"""The same kernel on several ranks: a device that is slower than its peers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

if TYPE_CHECKING:
    from collections.abc import Mapping

    from advisor.measure import Analysis

MIN_INSTANCES = 20
"""Fewer instances on a rank do not make a median worth comparing."""
COUNT_TOLERANCE = 0.1
"""Ranks whose numbers of instances differ by more than this share do not run the same mix."""

_KEY = ("name", "blocks", "threads")
SCHEMA: dict[str, Any] = {
    "rank": pl.Int64,
    "name": pl.String,
    "blocks": pl.Int64,
    "threads": pl.Int32,
    "count": pl.Int64,
    "dur": pl.Int64,
    "median": pl.Float64,
    "peer_median": pl.Float64,
    "ratio": pl.Float64,
    "peers": pl.Int64,
}


def compare_kernels(ranks: Mapping[int, Analysis], min_count: int = MIN_INSTANCES) -> pl.DataFrame:
    """Compute kernels of the same name and launch size on several ranks, inside the used steps.

    A row a rank and kernel: ``rank``, ``name``, ``blocks``, ``threads`` (a block), ``count``,
    ``dur`` (summed, ns), ``median`` (duration, ns), ``peer_median`` (median of the medians of the
    ranks compared with, ns), ``ratio`` (median / peer_median; above 1: slower here), ``peers``
    (ranks compared with). Only kernels that this rank and a peer ran at least ``min_count``
    times, equally often within 10 %, and whose size was recorded. Durations of one kernel also
    depend on what runs beside it and on inputs that the launch size does not tell.
    """
    parts = [_by_kernel(a, number) for number, a in ranks.items() if a.device_id is not None]
    if len(parts) < 2:
        return pl.DataFrame(schema=SCHEMA)
    every = pl.concat(parts).filter((pl.col("count") >= min_count) & (pl.col("median") > 0))
    pairs = every.join(every, on=_KEY, suffix="_peer").filter(pl.col("rank") != pl.col("rank_peer"))
    larger = pl.max_horizontal("count", "count_peer")
    alike = (pl.col("count") - pl.col("count_peer")).abs() <= COUNT_TOLERANCE * larger
    return (
        pairs.filter(alike)
        .group_by("rank", *_KEY)
        .agg(
            pl.col("count", "dur", "median").first(),
            pl.col("median_peer").median().alias("peer_median"),
            pl.len().cast(pl.Int64).alias("peers"),
        )
        .with_columns(ratio=pl.col("median") / pl.col("peer_median"))
        .with_columns(pl.col("name").cast(pl.String))
        .sort("dur", "rank", "name", "blocks", "threads", descending=[True, *[False] * 4])
        .select(pl.col(name).cast(dtype) for name, dtype in SCHEMA.items())
    )


def _by_kernel(a: Analysis, rank: int) -> pl.DataFrame:
    compute = (a.trace.gpu["kind"] == "kernel").to_numpy() & a.in_window
    compute &= ~a.kernels["communication"].to_numpy()
    return (
        a.trace.gpu.select("dur", *_KEY)
        .filter(pl.Series(compute), pl.col("blocks").is_not_null())
        .group_by(*_KEY)
        .agg(
            pl.len().cast(pl.Int64).alias("count"),
            pl.col("dur").sum(),
            pl.col("dur").median().alias("median"),
        )
        .with_columns(rank=pl.lit(rank, dtype=pl.Int64))
    )


def device_speed(kernels: pl.DataFrame) -> pl.DataFrame:
    """How much slower each rank's device is than its peers', from :func:`compare_kernels`.

    ``rank``, ``ratio`` (median of its kernels' ratios, weighted by their time: half of the
    compared time runs at this ratio or a larger one), ``kernels``, ``compared_ns`` (their time).
    """
    rows = []
    for (rank,), table in kernels.group_by("rank", maintain_order=True):
        table = table.sort("ratio")
        weight = np.cumsum(table["dur"].to_numpy())
        middle = int(np.searchsorted(weight, weight[-1] / 2))
        rows.append((rank, table["ratio"][middle], table.height, int(weight[-1])))
    schema = {
        "rank": pl.Int64,
        "ratio": pl.Float64,
        "kernels": pl.Int64,
        "compared_ns": pl.Int64,
    }
    return pl.DataFrame(rows, schema=schema, orient="row").sort("rank")
