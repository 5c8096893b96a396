"""Ranks on one clock: how far their clocks are apart, by the ends of collectives."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.measure.comm.comms import describe, describe_on_host, has_host_collectives
from advisor.measure.host.names import map_names

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from advisor.measure import Analysis

SYNCHRONISING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""No rank can leave one of these before every rank of its group has entered it. (A rank can leave
a broadcast, a reduce or a send before the others have come.)"""

_SAME = (
    "group",
    "ranks",
    "collective",
    "bytes",
    "annotation",
    "step",
    "sequence",
    "source",
    "target",
)
_DIGITS = re.compile(r"\d+")
_KEY = (*_SAME, "order", "count")
Times = NDArray[np.float64]


class Matches(NamedTuple):
    """Collectives that are on two or more ranks. Row i of the matrices is row i of ``table``,
    column j is rank ``ranks[j]``; NaN: that rank does not have it. ns from the start of that
    rank's own trace."""

    table: pl.DataFrame
    ranks: tuple[int, ...]
    start: Times
    end: Times

    def only(self, cells: NDArray[np.bool_]) -> Matches:
        """Only some cells of the matrices, and of the collectives those that two ranks have."""
        kept = cells.sum(axis=1) > 1
        start, end = (np.where(cells, t, np.nan)[kept] for t in (self.start, self.end))
        table = self.table.filter(pl.Series(kept, dtype=pl.Boolean))
        return Matches(table, self.ranks, start, end)


@dataclass(frozen=True)
class Alignment:
    """The clocks of several ranks, compared at the ends of the collectives they share."""

    matched: int
    """Collectives that two or more aligned ranks share."""
    error_ns: float | None
    """How well their ends agree once the clocks are aligned: median distance of an end from the
    middle of the other ranks' ends, of the worst rank, ns. ``None``: not aligned."""
    reason: str
    """Why ranks could not be aligned; empty when they could."""
    offset_ns: dict[int, int] = field(default_factory=dict)
    """Rank -> what to add to its clock to get the clock of the reference rank (whose value is 0),
    ns. Only aligned ranks."""
    shift_ns: dict[int, int] = field(default_factory=dict)
    """Rank -> what to add to times of its trace to get times of the reference's trace, ns."""
    unaligned: tuple[int, ...] = ()
    """Ranks left out: they share no collective with the others, or used no device where others
    did."""
    matches: Matches | None = field(default=None, repr=False, compare=False)


def align(ranks: Mapping[int, Analysis]) -> Alignment:
    """Put ranks on one clock by the ends of matched collectives: all ranks leave one together.

    A collective of one rank is that of another when group, kind, message size, annotation
    (digits apart) and place agree: ``Seq`` where the profiler recorded it, else the n-th such
    launched in the same ``ProfilerStep#N`` (or recorder's step), else the n-th such of the trace;
    for the last two both ranks must have equally many. The message sizes of an all-to-all may
    differ between ranks.

    Where no rank has device work, the collectives are those of gloo, in threads of the hosts.
    """
    from advisor.measure.ranks.align import align_cells

    known = {number: a for number, a in ranks.items() if a.device_id is not None}
    if not known:
        known = {number: a for number, a in ranks.items() if has_host_collectives(a)}
    if len(ranks) < 2:
        return Alignment(0, None, "only one rank is here")
    if len(known) < 2:
        return Alignment(0, None, "fewer than two ranks have device work", unaligned=tuple(ranks))
    matches = match_collectives(known)
    there = np.isfinite(matches.end)
    column = np.nonzero(there)[1]
    begin = np.array([known[n].trace.meta.start_ns for n in matches.ranks], dtype=np.int64)
    begin -= begin.min()
    clocks = align_cells(
        column,
        np.append(0, np.cumsum(there.sum(axis=1))),
        matches.start[there] + begin[column],
        matches.end[there] + begin[column],
        np.ones(len(there), dtype=np.bool_),
        len(known),
        unix=all(a.trace.meta.clock == "unix" for a in known.values()),
    )
    if clocks.reason:
        return Alignment(0, None, clocks.reason, unaligned=tuple(ranks))
    placed = np.isfinite(clocks.shift)
    matches = matches.only(there & placed & ~clocks.broken[:, None])
    offset = clocks.shift.copy()
    for place in np.flatnonzero(placed).tolist():  # in the middle of what the rank shares
        ends = matches.end[:, place]
        offset[place] += clocks.drift[place] * (np.nanmedian(ends) + begin[place])
    reference = int(np.flatnonzero(clocks.shift == 0)[0])
    offset -= offset[reference]
    moved = offset + begin - begin[reference]
    numbers = [matches.ranks[place] for place in np.flatnonzero(placed)]
    return Alignment(
        matched=matches.table.height,
        error_ns=clocks.error_ns,
        reason="",
        offset_ns=dict(zip(numbers, np.rint(offset[placed]).astype(int).tolist(), strict=True)),
        shift_ns=dict(zip(numbers, np.rint(moved[placed]).astype(int).tolist(), strict=True)),
        unaligned=tuple(n for n in ranks if n not in numbers),
        matches=matches,
    )


def match_collectives(ranks: Mapping[int, Analysis]) -> Matches:
    """Synchronising collectives, of the whole traces, that two or more ranks have: see align.

    ``table``: ``collective``, ``group``, ``ranks``, ``bytes`` (null: not known, or all-to-all),
    ``group_size`` (null), ``annotation`` (digits replaced; null), ``label`` (as one rank has it;
    null), ``step`` (name of the step it was launched in; null: matched by ``sequence`` or by place
    in the trace), ``sequence`` (null), ``order``, ``seen`` (ranks).
    """
    numbers = tuple(ranks)
    stepped = all(a.steps.numbered for a in ranks.values())
    every = pl.concat([keyed(a, n, stepped=stepped) for n, a in ranks.items()])
    # what one rank has twice under one key is ambiguous
    doubled = every.group_by(*_KEY, "rank").len().filter(pl.col("len") > 1).select(_KEY)
    table = (
        every.join(doubled, on=_KEY, how="anti", nulls_equal=True)
        .group_by(*_KEY)
        .agg(pl.len().alias("seen"), pl.col("group_size", "label").first(), pl.col("start").min())
        .filter(pl.col("seen") > 1)
        .sort("start")
        .drop("start")
        .with_row_index("row")
    )
    start = np.full((table.height, len(numbers)), np.nan)
    end = start.copy()
    result = every.join(table.select(*_KEY, "row"), on=_KEY, nulls_equal=True)
    column = {number: c for c, number in enumerate(numbers)}
    index = result["row"].to_numpy(), np.array([column[n] for n in result["rank"]], dtype=np.int64)
    start[index], end[index] = result["start"].to_numpy(), result["end"].to_numpy()
    return Matches(table.drop("row", "count"), numbers, start, end)


def keyed(
    a: Analysis, rank: int, *, stepped: bool, kinds: Sequence[str] = SYNCHRONISING
) -> pl.DataFrame:
    """Collectives of one rank, by their start, with the key that they are matched by:
    ``group``, ``ranks``, ``collective``, ``bytes``, ``annotation``, ``step`` (see
    :func:`match_collectives`), ``sequence``, ``order`` and ``count`` (among those of the same
    key), ``label`` (the annotation as recorded), ``group_size``, ``start``, ``end`` (ns of the
    trace), ``rank``, ``amount`` (elements that the rank gives or gets in an all-to-all, whichever
    are more; 0: another kind, or not known)."""
    described = describe_on_host(a) if a.device_id is None else describe(a)
    table = described.filter(pl.col("collective").is_in(kinds))
    marks = a.steps.marks
    name = pl.Series([None], dtype=pl.String).new_from_index(0, table.height)
    if stepped and marks.height:
        # by launch: which step it runs in depends on how far the device is behind
        launch = table["launch_ts"].fill_null(-(1 << 62)).to_numpy()
        index = np.searchsorted(marks["ts"].to_numpy(), launch, side="right") - 1
        inside = (index >= 0) & (launch < marks["end"].to_numpy()[np.maximum(index, 0)])
        name = marks["name"].gather(np.maximum(index, 0)).set(pl.Series(~inside), None)
    own_amount = pl.col("collective") == "all_to_all"
    # ranks of a pipeline count their sends each for itself: they are matched by who sends to whom
    pair = pl.col("source").is_not_null() & pl.col("target").is_not_null()
    recorded = pl.col("sequence").is_not_null() & ~pair
    elements = [pl.col(name) for name in ("given", "out") if name in table.columns]
    amount = pl.max_horizontal(*elements, pl.lit(0, dtype=pl.Int64))
    table = table.select(
        "group",
        "ranks",
        "collective",
        "group_size",
        "source",
        "target",
        sequence=pl.when(recorded).then("sequence"),
        bytes=pl.when(~own_amount).then("bytes"),
        step=pl.when(~recorded).then(name),
        annotation=map_names(
            table["annotation"].cast(pl.Categorical), lambda n: _DIGITS.sub("#", n), pl.String
        ),
        label="annotation",
        start=pl.col("ts").cast(pl.Float64),
        end=(pl.col("ts") + pl.col("dur")).cast(pl.Float64),
        rank=pl.lit(rank, dtype=pl.Int64),
        amount=pl.when(own_amount).then(amount).otherwise(0),
    )
    if stepped:  # the traces may begin at different ones of those launched before the first step
        table = table.filter(pl.col("step").is_not_null() | pl.col("sequence").is_not_null())
    return table.with_columns(order=pl.int_range(pl.len()).over(_SAME), count=pl.len().over(_SAME))
