"""Collectives of many ranks, matched and put on one clock, and ranks' waits for each other.

All of it in whole columns: a cell is one collective on one rank, a row is one collective."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from advisor.core.errors import AdvisorError
from advisor.core.intervals import Bools, Floats, Ints
from advisor.measure.ranks.align import Clocks, align_cells, group_medians
from advisor.measure.ranks.summary_schema import Collectives, RankSummary, unpack

COLUMNS = ("key", "order", "step", "start", "end", "exposed", "work")


@dataclass(frozen=True)
class CollectiveKey:
    """Properties that all collectives with one key share."""

    kind: str
    group: str
    message: int
    """Message size, bytes; 0: not known."""
    size: int
    """Number of members of the group; 0: not known."""
    synchronising: bool


@dataclass(frozen=True)
class JoinedCollectives:
    """Cells sorted by row. ``rank`` and others that say "place" index the list of summaries.

    ``start``, ``end`` are ns on one clock (from the earliest start of all) where the rank is
    aligned, else on its own; ``exposed`` and ``work`` as in ``Collectives``."""

    keys: list[CollectiveKey]
    rank: Ints
    row: Ints
    step: Ints
    """Step of each cell: row of that rank's ``RankSummary.steps``."""
    start: Floats
    end: Floats
    exposed: Floats
    work: Floats
    first_cell: Ints
    """First cell of each row, and one past the last of all."""
    key: Ints
    """Key of each row: place in ``keys``."""
    clocks: Clocks
    dropped: int
    """Number of collectives that summaries left out."""
    amount: Floats
    """Elements of each cell in an all-to-all, as in ``Collectives``."""
    index_on_rank: Ints
    """Place of each cell among its rank's collectives."""
    origin: int = 0
    """Time on the ranks' own clocks at which ``start`` and ``end`` are 0, ns."""

    @property
    def rows(self) -> int:
        return len(self.key)

    @property
    def rank_count(self) -> Ints:
        """Number of ranks that have each row."""
        return np.diff(self.first_cell)

    @property
    def synchronising(self) -> Bools:
        """Whether no rank leaves a collective before all have entered it, by row."""
        return np.array([key.synchronising for key in self.keys], dtype=np.bool_)[self.key]

    @property
    def is_send(self) -> Bools:
        """Whether each row is a send and its receive."""
        return np.array([key.kind == "send_recv" for key in self.keys], dtype=np.bool_)[self.key]

    @property
    def group_sizes(self) -> Ints:
        """Number of members of each row's group; 0: not known."""
        return np.array([key.size for key in self.keys], dtype=np.int64)[self.key]

    @property
    def group_code(self) -> Ints:
        """Code of each row, equal for collectives of one kind, size of group and message."""
        numbers: dict[tuple[str, int, int], int] = {}
        kinds = [numbers.setdefault((k.kind, k.size, k.message), len(numbers)) for k in self.keys]
        return np.array(kinds, dtype=np.int64)[self.key]

    @property
    def matched(self) -> Bools:
        """Whether each row is a synchronising collective of two or more ranks, all of them aligned,
        that can be one collective."""
        if not self.rows:
            return np.zeros(0, dtype=np.bool_)
        aligned = np.isfinite(self.clocks.shift)[self.rank]
        every = np.minimum.reduceat(aligned.astype(np.int8), self.first_cell[:-1]) > 0
        return self.synchronising & every & (self.rank_count > 1) & ~self.clocks.mismatched


@dataclass(frozen=True)
class CollectiveWaits:
    """Arrivals at the matched collectives."""

    row: Ints
    """Row of ``JoinedCollectives``, by collective."""
    last_rank: Ints
    """Place of the rank that arrives last; -1: all within twice the error of the clocks."""
    skew: Floats
    """Last arrival less the first, ns."""
    mean_wait: Floats
    """Mean wait of the other ranks, ns; 0 where nobody is last."""
    transfer: Floats
    """Time from the last arrival to the (median) end, ns."""
    cells: Ints
    """Cells of these collectives."""
    wait: Floats
    """Wait of each of ``cells`` for the last arrival, ns."""
    exposed: Floats
    """Upper bound of each wait's exposed part, with no compute, ns."""
    collective_count: Ints
    """Number of collectives that each rank takes part in, by place."""
    last_count: Ints
    """Number of collectives at which each rank is last, by place."""
    caused_ns: Floats
    """Mean wait of the others that each rank causes by being last, summed, ns."""
    caused_exposed_ns: Floats
    """Exposed part of ``caused_ns``, ns."""


def match_collectives(summaries: Sequence[RankSummary]) -> JoinedCollectives:
    """Match the collectives of all ranks and put them on one clock.

    Raises AdvisorError: a summary's columns do not belong together."""
    keys, parts = _cells(summaries)
    cells = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    del parts
    order = np.lexsort((cells["start"], cells["rank"], *_identity(cells)))
    cells = {name: values[order] for name, values in cells.items()}
    new = np.zeros(len(order), dtype=np.bool_)
    if len(order):
        new[0] = True
        for column in _identity(cells):
            new[1:] |= column[1:] != column[:-1]
    row = _split(np.cumsum(new) - 1, cells, keys)
    order = np.argsort(row, kind="stable")
    cells = {name: values[order] for name, values in cells.items()}
    row = row[order]
    first = np.flatnonzero(np.concatenate([[True], row[1:] != row[:-1]])) if len(row) else row
    origin = int(cells["start"].min()) if len(row) else 0
    start = (cells["start"] - origin).astype(np.float64)
    end = (cells["end"] - origin).astype(np.float64)
    row = np.cumsum(np.concatenate([[True], row[1:] != row[:-1]])) - 1 if len(row) else row
    key = cells["key"][first] if len(row) else row
    bounds = np.append(first, len(row)).astype(np.int64)
    sync = np.array([each.synchronising for each in keys], dtype=np.bool_)
    usable = sync[key] if len(key) else np.zeros(0, dtype=np.bool_)
    sent = np.array([each.kind == "send_recv" for each in keys], dtype=np.bool_)
    pairs = sent[key] if len(key) else usable
    unix = all(summary.clock == "unix" for summary in summaries)
    clocks = align_cells(
        cells["rank"], bounds, start, end, usable, len(summaries), unix=unix, pairs=pairs
    )
    moved = np.where(np.isfinite(clocks.shift), clocks.shift, 0.0)[cells["rank"]]
    drift = clocks.drift[cells["rank"]]
    return JoinedCollectives(
        keys=keys,
        rank=cells["rank"],
        row=row.astype(np.int64),
        step=cells["step"],
        start=start + moved + drift * start,
        end=end + moved + drift * end,
        exposed=cells["exposed"].astype(np.float64),
        work=cells["work"].astype(np.float64),
        first_cell=bounds,
        key=key.astype(np.int64),
        clocks=clocks,
        amount=cells["amount"].astype(np.float64),
        index_on_rank=cells["source"],
        dropped=sum(s.collectives.dropped for s in summaries if s.collectives is not None),
        origin=origin,
    )


def _identity(cells: dict[str, Ints]) -> tuple[Ints, ...]:
    return cells["order"], cells["count"], cells["mark"], cells["key"]


def _cells(summaries: Sequence[RankSummary]) -> tuple[list[CollectiveKey], list[dict[str, Ints]]]:
    """Return the distinct keys of all ranks, and each rank's cells with rows of that list."""
    numbers: dict[str, int] = {}
    marks: dict[str, int] = {}
    keys: list[CollectiveKey] = []
    more = ("rank", "mark", "count", "amount", "source")
    nothing = {name: np.zeros(0, dtype=np.int64) for name in (*COLUMNS, *more)}
    parts = [nothing]
    for place, summary in enumerate(summaries):
        result = summary.collectives
        if result is None or not result.key.count:
            continue
        columns = {name: unpack(getattr(result, name)) for name in COLUMNS}
        columns["amount"] = (
            np.zeros(result.key.count, dtype=np.int64)
            if result.amount is None
            else unpack(result.amount)
        )
        _check(columns, result, len(summary.steps))
        own = np.empty(len(result.keys), dtype=np.int64)
        for index, text in enumerate(result.keys):
            if text not in numbers:
                numbers[text] = len(keys)
                keys.append(_key(result, index))
            own[index] = numbers[text]
        recorded = np.array(result.sequenced or [False] * len(result.keys), dtype=np.bool_)
        names = [marks.setdefault(step.name, len(marks)) for step in summary.steps]
        mark = np.array([*names, -1], dtype=np.int64)[columns["step"]]
        mark[recorded[columns["key"]]] = -1
        count = _count(columns["key"], mark)
        count[recorded[columns["key"]]] = 0
        columns["key"] = own[columns["key"]]
        more_columns = {"rank": np.full(len(mark), place), "source": np.arange(len(mark))}
        parts.append({**columns, **more_columns, "mark": mark, "count": count})
    return keys, parts


def _check(columns: dict[str, Ints], result: Collectives, steps: int) -> None:
    lengths = {len(values) for values in columns.values()}
    by_key = (result.synchronising, result.group, result.size, result.kind, result.message)
    fits = (
        len(lengths) == 1
        and all(len(keyed_rows) == len(result.keys) for keyed_rows in by_key)
        and (not result.sequenced or len(result.sequenced) == len(result.keys))
        and columns["key"].min() >= 0
        and columns["key"].max() < len(result.keys)
        and columns["step"].min() >= -1
        and columns["step"].max() < steps
        and bool((columns["end"] >= columns["start"]).all())
    )
    if not fits:
        raise AdvisorError("a rank's summary is damaged")


def _key(result: Collectives, index: int) -> CollectiveKey:
    return CollectiveKey(
        result.kind[index],
        result.group[index],
        result.message[index],
        result.size[index],
        result.synchronising[index],
    )


def _count(key: Ints, mark: Ints) -> Ints:
    """Count the cells of the same key and step: ranks with other counts do not match."""
    _, inverse, counts = np.unique(
        key * (int(mark.max(initial=0)) + 2) + mark + 1, return_inverse=True, return_counts=True
    )
    return np.asarray(counts[inverse], dtype=np.int64)


def _split(row: Ints, cells: dict[str, Ints], keys: list[CollectiveKey]) -> Ints:
    """Split rows that cannot be one collective: a rank is in it twice, there are more ranks than
    members, or nothing says which of several sends belongs to which receive."""
    if not len(row):
        return row
    rows = int(row[-1]) + 1
    twice = np.zeros(rows, dtype=np.bool_)
    same = (row[1:] == row[:-1]) & (cells["rank"][1:] == cells["rank"][:-1])
    twice[row[1:][same]] = True
    seen = np.bincount(row, minlength=rows)
    key = np.zeros(rows, dtype=np.int64)
    key[row] = cells["key"]
    size = np.array([each.size for each in keys], dtype=np.int64)[key]
    pair = np.array([each.kind == "send_recv" for each in keys], dtype=np.bool_)[key]
    apart = twice | ((size > 0) & (seen > size)) | (pair & (seen != 2))
    lone = apart[row]
    split = row.copy()
    split[lone] = rows + np.arange(int(lone.sum()))
    return split


def measure_waits(joined: JoinedCollectives, rows_counted: Bools | None = None) -> CollectiveWaits:
    """Measure how late each rank arrives at the collectives, and the waits that it causes.

    ``rows_counted``: which rows count; default: all."""
    ranks = len(joined.clocks.shift)
    matched = joined.matched if rows_counted is None else joined.matched & rows_counted
    rows = np.flatnonzero(matched)
    cells = np.flatnonzero(matched[joined.row]) if len(rows) else rows
    size = joined.rank_count[rows]
    at = np.concatenate([[0], np.cumsum(size)]).astype(np.int64)
    which = np.repeat(np.arange(len(rows)), size)
    none = np.zeros(0)
    if not len(rows):
        zeros = np.zeros(ranks)
        count = np.zeros(ranks, dtype=np.int64)
        return CollectiveWaits(
            rows, rows, none, none, none, cells, none, none, count, count, zeros, zeros
        )
    arrival, end = joined.start[cells], joined.end[cells]
    latest = np.maximum.reduceat(arrival, at[:-1])
    wait = latest[which] - arrival
    skew = np.maximum.reduceat(wait, at[:-1])
    exposed = np.minimum(wait, joined.exposed[cells])
    error = joined.clocks.error_ns or 0.0
    latest_cell = wait <= 0
    decided = (skew > 2 * error) & (np.add.reduceat(latest_cell.astype(np.int64), at[:-1]) == 1)
    last = np.full(len(rows), -1, dtype=np.int64)
    chosen = latest_cell & decided[which]
    last[which[chosen]] = joined.rank[cells[chosen]]
    others = np.maximum(size - 1, 1)
    mean_wait = np.where(decided, np.add.reduceat(wait, at[:-1]) / others, 0.0)
    mean_exposed = np.add.reduceat(np.where(chosen, 0.0, exposed), at[:-1]) / others
    known = last >= 0
    transfer = np.maximum(group_medians(end, at) - latest, 0.0)
    return CollectiveWaits(
        row=rows,
        last_rank=last,
        skew=skew,
        mean_wait=mean_wait,
        transfer=transfer,
        cells=cells,
        wait=wait,
        exposed=exposed,
        collective_count=np.bincount(joined.rank[cells], minlength=ranks),
        last_count=np.bincount(last[known], minlength=ranks),
        caused_ns=_summed(last[known], mean_wait[known], ranks),
        caused_exposed_ns=_summed(last[known], mean_exposed[known], ranks),
    )


def _summed(rank: Ints, values: Floats, ranks: int) -> Floats:
    return np.bincount(rank, weights=values, minlength=ranks).astype(np.float64)


# -- one rank's waits ------------------------------------------------------------------------------


def collective_waits(joined: JoinedCollectives, place: int) -> pl.DataFrame:
    """List the collectives in the steps of one rank (``place`` in the summaries): ``collective``,
    ``group`` (its name; empty: none), ``bytes`` and ``size`` (0: unknown), ``step``, ``wait`` (ns
    until the last member arrives), ``transfer`` (ns from there to its end) and ``complete`` (all
    members are here and on one clock; otherwise one that is not may come later).

    A send and its receive wait for each other too: a receiver for what its sender computes."""
    schema = {
        "collective": pl.String, "group": pl.String, "bytes": pl.Int64, "size": pl.Int64,
        "step": pl.Int64, "wait": pl.Float64, "transfer": pl.Float64, "complete": pl.Boolean,
    }  # fmt: skip
    if not joined.rows:
        return pl.DataFrame(schema=schema)
    aligned = np.isfinite(joined.clocks.shift)[joined.rank]
    size = joined.group_sizes
    every = np.minimum.reduceat(aligned.astype(np.int8), joined.first_cell[:-1]) > 0
    complete = every & (joined.rank_count == size) & ~joined.clocks.mismatched
    latest = np.maximum.reduceat(np.where(aligned, joined.start, -np.inf), joined.first_cell[:-1])
    which = np.repeat(np.arange(joined.rows), joined.rank_count)
    cells = np.flatnonzero((joined.rank == place) & (joined.step >= 0))
    row = which[cells]
    start, end = joined.start[cells], joined.end[cells]
    arrived = np.clip(latest[row], start, end)
    keys = [joined.keys[number] for number in joined.key[row].tolist()]
    return pl.DataFrame(
        {
            "collective": [key.kind for key in keys],
            "group": [key.group for key in keys],
            "bytes": [key.message for key in keys],
            "size": size[row],
            "step": joined.step[cells],
            "wait": arrived - start,
            "transfer": end - arrived,
            "complete": complete[row],
        },
        schema=schema,
    )
