"""Collectives summed up: what each kind costs, and how late ranks come to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

if TYPE_CHECKING:
    from advisor.measure import Analysis
    from advisor.measure.ranks.ranks import Skew


def sum_collectives(a: Analysis) -> pl.DataFrame:
    """Collectives inside ``spans`` of one kind, message size, group size, dtype and annotation:
    ``collective``, ``bytes``, ``group_size``, ``dtype``, ``annotation``, ``count``, ``dur`` and
    ``exposed`` (ns summed over the window), ``bus_gbps`` (median; null: not known); largest
    ``exposed``, then ``dur`` first."""
    return (
        a.collectives.with_columns(pl.col("collective", "dtype").cast(pl.String))
        .group_by("collective", "bytes", "group_size", "dtype", "annotation")
        .agg(
            pl.len().cast(pl.Int64).alias("count"),
            pl.col("dur").sum(),
            pl.col("exposed").sum(),
            pl.col("bus_gbps").median(),
        )
        .sort("exposed", "dur", "collective", descending=[True, True, False])
    )


def sum_skew(skew: Skew) -> pl.DataFrame:
    """Arrivals at collectives of one kind, message size and annotation: ``collective``, ``bytes``,
    ``annotation``, ``count``, ``skew_ns`` (mean of last - first arrival), ``worst_ns``,
    ``wait_ns`` (mean wait of the others, summed, a step), ``last`` (the rank that is last most
    often; null: none is) and ``last_count``; largest ``wait_ns`` first."""
    return (
        skew.collectives.with_columns(pl.col("collective").cast(pl.String))
        .group_by("collective", "bytes", "annotation")
        .agg(
            pl.len().cast(pl.Int64).alias("count"),
            pl.col("skew_ns").mean(),
            pl.col("skew_ns").max().alias("worst_ns"),
            (pl.col("mean_wait_ns").sum() / skew.steps).alias("wait_ns"),
            pl.col("last").drop_nulls().mode().sort().first(),
            pl.col("last").drop_nulls().unique_counts().max().alias("last_count"),
        )
        .sort("wait_ns", "skew_ns", "collective", descending=[True, True, False])
    )
