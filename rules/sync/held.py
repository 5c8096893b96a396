"""Syncs of one kind, and the device time that removing them could win back."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.finding import Edit, Location, Select
from advisor.core.intervals import covered_length
from advisor.measure.host.names import name_matches
from advisor.measure.host.stacks import nearest, parents
from advisor.rules.common import column, of_pytorch, places, rows

if TYPE_CHECKING:
    from advisor.measure import Analysis

MAX_CORRELATIONS = 500
"""An Edit names single calls only up to this many; beyond, the report would be mostly numbers."""


class Held(NamedTuple):
    """Some of ``Analysis.syncs`` and what they cost."""

    table: pl.DataFrame
    lost: NDArray[np.int64]
    """Device time a row, ns: idle time in the bubble it leaves, but only in the last part of it,
    as long as the host waited: without the sync the host would be ahead by that and no more."""

    @property
    def total(self) -> int:
        """Sum of ``lost``, ns."""
        return int(self.lost.sum())


def held_by(a: Analysis, which: pl.Expr) -> Held:
    """The rows of ``Analysis.syncs`` that ``which`` selects; never those of the profiler itself.

    Two columns more may be used in ``which``: ``direction`` and ``memory`` (``Pinned``,
    ``Pageable`` …, the host side) of the copy that is waited for; null: no copy, or not told.
    """
    gpu = a.trace.gpu
    ends = pl.DataFrame(
        {name: gpu[name].gather(a.syncs["copy"]) for name in ("copy", "src", "dst")}
    )
    told = ends.select(
        direction=pl.col("copy").cast(pl.String),
        memory=pl.when(pl.col("copy") == "HtoD").then("src").otherwise("dst").cast(pl.String),
    )
    table = a.syncs.hstack(told).filter(which & ~pl.col("profiler"))
    end = column(table, "bubble_end")
    start = np.maximum(column(table, "bubble_ts"), end - column(table, "waited"))
    return Held(table, covered_length(start, end, a.breakdown.idle))


def where(a: Analysis, held: Held) -> list[Location]:
    """The places that lose most; the worst instance is the call that waited."""
    return places(a, rows(held.table["host"]), held.lost)


def causes(a: Analysis, held: Held) -> str:
    """``aten::item 12 times, aten::nonzero 3 times``, by what they lose; by the calls' own names
    where the program is none of PyTorch's."""
    table = held.table.with_columns(lost=pl.Series(held.lost))
    if not of_pytorch(a):
        own = a.trace.cpu["name"].gather(rows(table["host"])).cast(pl.String)
        table = table.with_columns(cause=own)
    by = (
        table.group_by("cause")
        .agg(pl.col("lost").sum(), pl.len())
        .sort("lost", "len", "cause", descending=[True, True, False])
    )
    return ", ".join(f"{cause} {count} times" for cause, _, count in by.head(3).iter_rows())


def edit(a: Analysis, held: Held, *candidates: Select) -> Edit:
    """Make these calls asynchronous: by what they are, with the first candidate that selects all
    that cost something and no other costly sync, else call by call."""
    costly = a.syncs.filter((pl.col("bubble") > 0) & ~pl.col("profiler"))
    mine = rows(held.table["host"])[held.lost > 0]
    others = np.setdiff1d(rows(costly["host"]), mine)
    for select in candidates:
        if _selects(a, select, mine).all() and not _selects(a, select, others).any():
            return Edit(op="asynchronous", select=select)
    worst = rows(held.table["host"])[np.argsort(-held.lost, kind="stable")]
    ids = a.trace.cpu["correlation"].gather(worst[:MAX_CORRELATIONS]).drop_nulls().unique().sort()
    select = Select(on="host", kind=("runtime",), correlation=tuple(ids.to_list()))
    return Edit(op="asynchronous", select=select)


def _selects(a: Analysis, select: Select, calls: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which of these runtime calls a selector with ``under`` or ``call`` picks."""
    cpu = a.trace.cpu
    chosen = np.ones(len(calls), dtype=bool)
    if select.under:
        named = name_matches(cpu["name"], select.under).to_numpy()
        chosen &= nearest(parents(a.trace), named)[calls] >= 0
    if select.call:
        chosen &= cpu["call"].gather(calls).is_in(list(select.call)).to_numpy()
    return chosen
