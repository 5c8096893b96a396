"""Ranks on one clock: how far their clocks are apart, and who keeps whom waiting."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.analysis.comms import describe
from advisor.analysis.names import map_names
from advisor.intervals import covered, subtract

if TYPE_CHECKING:
    from collections.abc import Mapping

    from advisor.analysis import Analysis

SYNCHRONISING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""No rank can leave one of these before every rank of its group has entered it. (A rank can leave
a broadcast, a reduce or a send before the others have come.)"""

MAX_CLOCK_DIFFERENCE_NS = 60 * 10**9
"""Hosts of one job keep Unix time to well under a second (NTP); traces whose collectives fall
together only when their clocks are moved by minutes are of different runs of one script."""

_SAME = ("group", "ranks", "collective", "bytes", "annotation", "step", "sequence")
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

    def keep(self, rows: NDArray[np.bool_]) -> Matches:
        """Only some of the collectives."""
        table = self.table.filter(pl.Series(rows, dtype=pl.Boolean))
        return Matches(table, self.ranks, self.start[rows], self.end[rows])


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
    spread_ns: dict[int, float] = field(default_factory=dict)
    """Rank -> its own ``error_ns``."""
    unaligned: tuple[int, ...] = ()
    """Ranks left out: they share no collective with the others, or used no device."""
    matches: Matches | None = field(default=None, repr=False, compare=False)


def align(ranks: Mapping[int, Analysis]) -> Alignment:
    """Put ranks on one clock by the ends of matched collectives: all ranks leave one together.

    A collective of one rank is that of another when group, kind, message size, annotation
    (digits apart) and place agree: ``Seq`` where the profiler recorded it, else the n-th such
    launched in the same ``ProfilerStep#N`` (or recorder's step), else the n-th such of the trace;
    for the last two both ranks must have equally many. The message sizes of an all-to-all may
    differ between ranks.

    The offset of a rank is the median difference of its ends from those of the ranks that are
    placed already, beginning with the one that shares most. A check that needs no threshold
    follows: nobody leaves a collective before the last rank has entered. Matches that break it
    by more than the error are not one collective: they are dropped and the offsets taken again.
    When most are, nothing is known about the others either: not aligned.
    """
    known = {number: a for number, a in ranks.items() if a.device_id is not None}
    if len(ranks) < 2:
        return Alignment(0, None, "only one rank is here")
    if len(known) < 2:
        return Alignment(0, None, "fewer than two ranks have device work", unaligned=tuple(ranks))
    found = match_collectives(known)
    if not found.table.height:
        reason = "the ranks have no collectives that can be matched"
        return Alignment(0, None, reason, unaligned=tuple(ranks))
    matches, shift, spread = _settle(found)
    if matches.table.height * 2 < found.table.height or not matches.table.height:
        reason = (
            f"of {found.table.height} collectives that look the same on several ranks, "
            f"{found.table.height - matches.table.height} cannot be: one rank leaves before "
            "another enters"
        )
        return Alignment(0, None, reason, unaligned=tuple(ranks))
    placed = np.flatnonzero(np.isfinite(shift))
    numbers = [found.ranks[column] for column in placed]
    moved = {n: round(ns) for n, ns in zip(numbers, shift[placed].tolist(), strict=True)}
    first = known[found.ranks[int(np.flatnonzero(shift == 0)[0])]].trace.meta
    offset = {n: moved[n] + first.start_ns - known[n].trace.meta.start_ns for n in numbers}
    apart = max(map(abs, offset.values()))
    unix = all(known[n].trace.meta.clock == "unix" for n in numbers)
    if unix and apart > MAX_CLOCK_DIFFERENCE_NS:
        reason = f"the traces were recorded {apart / 1e9:.0f} s apart: not one run"
        return Alignment(0, None, reason, unaligned=tuple(ranks))
    return Alignment(
        matched=matches.table.height,
        error_ns=float(np.max(spread[placed])),
        reason="",
        offset_ns=offset,
        shift_ns=moved,
        spread_ns=dict(zip(numbers, spread[placed].tolist(), strict=True)),
        unaligned=tuple(n for n in ranks if n not in moved),
        matches=matches,
    )


def _settle(found: Matches) -> tuple[Matches, Times, Times]:
    """Shift and spread of each rank, from the matches that can be one collective."""
    matches = found
    while True:  # each round drops matches, so it ends
        shift = _shifts(matches.end)
        there = np.isfinite(matches.end + shift)
        enough = there.sum(axis=1) > 1
        matches = matches.keep(enough)
        there = there[enough]
        if not len(there):
            return matches, shift, np.full(len(shift), np.nan)
        ends = matches.end + shift
        # distance from the others' middle: from the middle of all, times k / (k - 1)
        count = there.sum(axis=1, keepdims=True)
        far = np.abs(ends - np.nanmedian(ends, axis=1, keepdims=True)) * count / (count - 1)
        spread = np.full(len(shift), np.nan)
        some = there.any(axis=0)
        spread[some] = np.nanmedian(far[:, some], axis=0)
        last_in = np.nanmax(np.where(there, matches.start + shift, np.nan), axis=1)
        possible = last_in <= np.nanmin(ends, axis=1) + 2 * float(np.nanmax(spread))
        if possible.all():
            return matches, np.where(some, shift, np.nan), spread
        matches = matches.keep(possible)


def _shifts(end: Times) -> Times:
    """What to add to each column so that ends agree; NaN: no chain of shared rows leads there."""
    there = np.isfinite(end)
    shift = np.full(end.shape[1], np.nan)
    first = int(np.argmax(there.sum(axis=0)))
    shift[first] = 0.0
    total = np.where(there[:, first], end[:, first], 0.0)
    placed = there[:, first].astype(np.int64)
    left = set(range(end.shape[1])) - {first}
    while left:  # a rank a round
        common = {c: int((there[:, c] & (placed > 0)).sum()) for c in left}
        best = max(left, key=lambda c: (common[c], -c))
        if not common[best]:
            break
        both = there[:, best] & (placed > 0)
        shift[best] = np.median(total[both] / placed[both] - end[both, best])
        left.remove(best)
        total += np.where(there[:, best], end[:, best] + shift[best], 0.0)
        placed += there[:, best]
    return shift


def match_collectives(ranks: Mapping[int, Analysis]) -> Matches:
    """Synchronising collectives, of the whole traces, that two or more ranks have: see align.

    ``table``: ``collective``, ``group``, ``ranks``, ``bytes`` (null: not known, or all-to-all),
    ``group_size`` (null), ``annotation`` (digits replaced; null), ``step`` (name of the step it
    was launched in; null: matched by ``sequence`` or by place in the trace), ``sequence`` (null),
    ``order``, ``seen`` (ranks).
    """
    numbers = tuple(ranks)
    stepped = all(a.steps.source in ("ProfilerStep", "recorder") for a in ranks.values())
    every = pl.concat([_keyed(a, n, stepped=stepped) for n, a in ranks.items()])
    # what one rank has twice under one key cannot be told apart
    doubled = every.group_by(*_KEY, "rank").len().filter(pl.col("len") > 1).select(_KEY)
    table = (
        every.join(doubled, on=_KEY, how="anti", nulls_equal=True)
        .group_by(*_KEY)
        .agg(pl.len().alias("seen"), pl.col("group_size").first(), pl.col("start").min())
        .filter(pl.col("seen") > 1)
        .sort("start")
        .drop("start")
        .with_row_index("row")
    )
    start = np.full((table.height, len(numbers)), np.nan)
    end = start.copy()
    found = every.join(table.select(*_KEY, "row"), on=_KEY, nulls_equal=True)
    column = {number: c for c, number in enumerate(numbers)}
    at = found["row"].to_numpy(), np.array([column[n] for n in found["rank"]], dtype=np.int64)
    start[at], end[at] = found["start"].to_numpy(), found["end"].to_numpy()
    return Matches(table.drop("row", "count"), numbers, start, end)


def _keyed(a: Analysis, rank: int, *, stepped: bool) -> pl.DataFrame:
    """Synchronising collectives of one rank, with the key that they are matched by."""
    table = describe(a).filter(pl.col("collective").is_in(SYNCHRONISING))
    marks = a.steps.table
    name = pl.Series([None], dtype=pl.String).new_from_index(0, table.height)
    if stepped and marks.height:
        # by launch: which step it runs in depends on how far the device is behind
        launch = table["launch_ts"].fill_null(-(1 << 62)).to_numpy()
        at = np.searchsorted(marks["ts"].to_numpy(), launch, side="right") - 1
        inside = (at >= 0) & (launch < marks["end"].to_numpy()[np.maximum(at, 0)])
        name = marks["name"].gather(np.maximum(at, 0)).set(pl.Series(~inside), None)
    own_amount = pl.col("collective") == "all_to_all"
    recorded = pl.col("sequence").is_not_null()
    table = table.select(
        "group",
        "ranks",
        "collective",
        "sequence",
        "group_size",
        bytes=pl.when(~own_amount).then("bytes"),
        step=pl.when(~recorded).then(name),
        annotation=map_names(
            table["annotation"].cast(pl.Categorical), lambda n: _DIGITS.sub("#", n), pl.String
        ),
        start=pl.col("ts").cast(pl.Float64),
        end=(pl.col("ts") + pl.col("dur")).cast(pl.Float64),
        rank=pl.lit(rank, dtype=pl.Int64),
    )
    if stepped:  # the traces may begin at different ones of those launched before the first step
        table = table.filter(pl.col("step").is_not_null() | recorded)
    return table.with_columns(order=pl.int_range(pl.len()).over(_SAME), count=pl.len().over(_SAME))


# -- who waits for whom ------------------------------------------------------------------------

STRAGGLERS_SCHEMA: dict[str, Any] = {
    "rank": pl.Int64,
    "collectives": pl.Int64,
    "last": pl.Int64,
    "last_share": pl.Float64,
    "caused_wait_ns": pl.Float64,
    "caused_exposed_ns": pl.Float64,
    "wait_ns": pl.Float64,
    "exposed_wait_ns": pl.Float64,
}


class Skew(NamedTuple):
    """Arrivals at collectives, among the ranks whose traces are here.

    A rank whose trace is not here may be later than all of them: then everybody waits for it, and
    that wait is in nobody's figures. ``collectives.complete`` says where all members are here.

    ``collectives``: a row a collective inside the used steps of all its ranks: ``collective``,
    ``group``, ``bytes``, ``annotation``, ``step``, ``seen`` (ranks here), ``complete`` (all members
    are here; null: group size not known), ``last`` (rank that arrives last; null: all arrive
    within twice the alignment error), ``skew_ns`` (last arrival - first), ``mean_wait_ns`` (of
    the others; null: nobody is last).

    ``arrivals``: a row a collective and rank: ``row`` (of ``collectives``), ``rank``,
    ``arrival_ns`` (start of its kernel on the reference rank's trace), ``wait_ns`` (until the
    last rank arrives), ``exposed_wait_ns`` (the part with no compute kernel on that rank).

    ``stragglers``: a row a rank: ``rank``, ``collectives`` (it takes part in), ``last`` (at which
    it arrives last), ``last_share`` (their share), and, ns a step: ``caused_wait_ns`` (summed over
    those: mean wait of the others), ``caused_exposed_ns`` (its exposed part, the time that they
    lose), ``wait_ns`` and ``exposed_wait_ns`` (its own, for others).
    """

    collectives: pl.DataFrame
    arrivals: pl.DataFrame
    stragglers: pl.DataFrame
    steps: int
    """Steps over which the figures a step are taken."""


def skew(ranks: Mapping[int, Analysis], alignment: Alignment) -> Skew:
    """How late each rank comes to the collectives, and what that costs the others.

    Raises ValueError when ``alignment`` says that the ranks could not be aligned: then skew is
    not measured.
    """
    matches = alignment.matches
    if matches is None or alignment.error_ns is None:
        raise ValueError(f"skew is not measured: {alignment.reason}")
    columns = [c for c, number in enumerate(matches.ranks) if number in alignment.shift_ns]
    numbers = [matches.ranks[c] for c in columns]
    shift = np.array([alignment.shift_ns[n] for n in numbers], dtype=np.float64)
    start, end = matches.start[:, columns], matches.end[:, columns]
    there = np.isfinite(start)
    usable = there.sum(axis=1) > 1
    for c, number in enumerate(numbers):
        usable &= ~there[:, c] | _touches(ranks[number], start[:, c], end[:, c])
    table = matches.table.filter(pl.Series(usable, dtype=pl.Boolean))
    start, there = start[usable], there[usable]
    arrival = start + shift
    error = alignment.error_ns
    latest = np.nanmax(arrival, axis=1) if len(arrival) else np.zeros(0)
    wait = latest[:, None] - arrival
    spread = np.nanmax(wait, axis=1) if len(wait) else np.zeros(0)
    # among those that arrive at the same instant (traces in whole microseconds) none is last
    late = np.where(there, wait, np.inf) <= 0
    decided = (spread > 2 * error) & (late.sum(axis=1) == 1)
    last = np.where(decided, late.argmax(axis=1), -1) if len(late) else np.zeros(0, dtype=int)
    exposed = np.full(wait.shape, np.nan)
    for c, number in enumerate(numbers):
        a, rows = ranks[number], there[:, c]
        begin = start[rows, c].astype(np.int64)
        until = begin + wait[rows, c].astype(np.int64)
        exposed[rows, c] = covered(begin, until, subtract(a.spans, a.breakdown.compute))

    others = there.copy()
    others[np.arange(len(last))[last >= 0], last[last >= 0]] = False
    peers = np.maximum(others.sum(axis=1), 1)
    mean_wait = np.where(others, wait, 0).sum(axis=1) / peers
    mean_exposed = np.where(others, exposed, 0).sum(axis=1) / peers
    steps = _common_steps([ranks[n] for n in numbers])
    who = pl.Series([*numbers, None], dtype=pl.Int64)
    seen = pl.Series(there.sum(axis=1), dtype=pl.Int64)
    collectives = table.select("collective", "group", "bytes", "annotation", "step").with_columns(
        seen=seen,
        complete=seen == table["group_size"],
        last=who.gather(np.where(last >= 0, last, len(numbers))),
        skew_ns=spread,
        mean_wait_ns=pl.Series(mean_wait).set(pl.Series(last < 0), None),
    )
    row, column = np.nonzero(there)
    arrivals = pl.DataFrame(
        {
            "row": row,
            "rank": np.array(numbers)[column],
            "arrival_ns": np.rint(arrival[there]).astype(np.int64),
            "wait_ns": np.rint(wait[there]).astype(np.int64),
            "exposed_wait_ns": exposed[there].astype(np.int64),
        }
    )
    lines = []
    for c, number in enumerate(numbers):
        took, caused = int(there[:, c].sum()), last == c
        lines.append((
            number,
            took,
            int(caused.sum()),
            float(caused.sum()) / took if took else None,
            float(mean_wait[caused].sum()) / steps,
            float(mean_exposed[caused].sum()) / steps,
            float(np.nansum(wait[:, c])) / steps,
            float(np.nansum(exposed[:, c])) / steps,
        ))  # fmt: skip
    stragglers = pl.DataFrame(lines, schema=STRAGGLERS_SCHEMA, orient="row")
    return Skew(collectives, arrivals, stragglers, steps)


def _touches(a: Analysis, start: Times, end: Times) -> NDArray[np.bool_]:
    """Which intervals (NaN: none) touch the used steps."""
    low, high = (np.nan_to_num(t, nan=-1.0).astype(np.int64) for t in (start, end))
    return covered(low, high, a.spans) > 0


def _common_steps(analyses: list[Analysis]) -> int:
    """Used steps that all ranks have, by name; at least 1."""
    names = [set(a.steps.used["name"].to_list()) for a in analyses]
    return max(1, len(set.intersection(*names)))


def exposed_by_rank(ranks: Mapping[int, Analysis]) -> pl.DataFrame:
    """Communication a rank and step, ns: ``rank``, ``step`` (name), ``step_ns``, ``exposed`` (not
    under compute), ``communication`` (all). Ranks without device work are left out."""
    parts = []
    for number, a in ranks.items():
        if a.device_id is None:
            continue
        used = a.steps.used
        start, end = used["ts"].to_numpy(), used["end"].to_numpy()
        parts.append(
            pl.DataFrame(
                {
                    "rank": np.full(used.height, number, dtype=np.int64),
                    "step": used["name"],
                    "step_ns": used["dur"],
                    "exposed": covered(start, end, a.breakdown.communication),
                    "communication": covered(start, end, a.breakdown.all_communication),
                }
            )
        )
    schema = {"rank": pl.Int64, "step": pl.String} | dict.fromkeys(
        ("step_ns", "exposed", "communication"), pl.Int64
    )
    return pl.concat(parts) if parts else pl.DataFrame(schema=schema)
