"""Collectives of many ranks, matched and put on one clock, and the waits of ranks for each other.

Data is in columns: a cell is one collective on one rank, a row is one collective."""

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
    """Message size, bytes, or 0 if unknown."""
    size: int
    """Number of members of the group, or 0 if unknown."""
    synchronising: bool


@dataclass(frozen=True)
class JoinedCollectives:
    """Cells sorted by row. ``rank`` is an index in the list of summaries.

    ``start`` and ``end`` are ns on one clock (from the earliest start of all) if the rank is
    aligned, else on its own clock. ``exposed`` and ``work`` are as in ``Collectives``."""

    keys: list[CollectiveKey]
    rank: Ints
    row: Ints
    step: Ints
    """Step of each cell: row of the rank's ``RankSummary.steps``."""
    start: Floats
    end: Floats
    exposed: Floats
    work: Floats
    first_cell: Ints
    """First cell of each row, and the number of cells."""
    key: Ints
    """Key of each row: index in ``keys``."""
    clocks: Clocks
    dropped: int
    """Number of collectives that the summaries left out."""
    amount: Floats
    """Elements of each cell in an all-to-all, as in ``Collectives``."""
    index_on_rank: Ints
    """Index of each cell among its rank's collectives."""
    origin: int = 0
    """Time on the ranks' own clocks that corresponds to 0 of ``start`` and ``end``, ns."""

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
        """Number of members of each row's group, or 0 if unknown."""
        return np.array([key.size for key in self.keys], dtype=np.int64)[self.key]

    @property
    def group_code(self) -> Ints:
        """Code of each row, equal for collectives of one kind, size of group and message."""
        numbers: dict[tuple[str, int, int], int] = {}
        kinds = [
            numbers.setdefault((key_.kind, key_.size, key_.message), len(numbers))
            for key_ in self.keys
        ]
        return np.array(kinds, dtype=np.int64)[self.key]

    @property
    def matched(self) -> Bools:
        """Whether each row is a synchronising collective of two or more ranks, all aligned, and can
        be one collective."""
        if not self.rows:
            return np.zeros(0, dtype=np.bool_)
        is_aligned = np.isfinite(self.clocks.shift)[self.rank]
        all_aligned = np.minimum.reduceat(is_aligned.astype(np.int8), self.first_cell[:-1]) > 0
        return self.synchronising & all_aligned & (self.rank_count > 1) & ~self.clocks.mismatched


@dataclass(frozen=True)
class CollectiveWaits:
    """Arrivals at the matched collectives."""

    row: Ints
    """Row of ``JoinedCollectives``, by collective."""
    last_rank: Ints
    """Index of the rank that arrives last; -1 if all arrive within twice the error of the
    clocks."""
    skew: Floats
    """Last arrival minus the first, ns."""
    mean_wait: Floats
    """Mean wait of the other ranks, ns, or 0 if no rank is last."""
    transfer: Floats
    """Time from the last arrival to the (median) end, ns."""
    cells: Ints
    """Cells of these collectives."""
    wait: Floats
    """Wait of each of ``cells`` for the last arrival, ns."""
    exposed: Floats
    """Upper bound of each wait's exposed part, without compute, ns."""
    collective_count: Ints
    """Number of collectives that each rank takes part in, by index."""
    last_count: Ints
    """Number of collectives at which each rank is last, by index."""
    caused_ns: Floats
    """Sum of the mean waits that each rank causes for the others by being last, ns."""
    caused_exposed_ns: Floats
    """Exposed part of ``caused_ns``, ns."""


def match_collectives(summaries: Sequence[RankSummary]) -> JoinedCollectives:
    """Match the collectives of all ranks and put them on one clock.

    Raises AdvisorError if a summary's columns do not fit together."""
    keys, parts = _read_cells(summaries)
    cells = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    del parts
    order = np.lexsort((cells["start"], cells["rank"], *_matching_columns(cells)))
    cells = {name: values[order] for name, values in cells.items()}
    is_first = np.zeros(len(order), dtype=np.bool_)
    if len(order):
        is_first[0] = True
        for column in _matching_columns(cells):
            is_first[1:] |= column[1:] != column[:-1]
    row = _split_rows(np.cumsum(is_first) - 1, cells, keys)
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
    is_synchronizing = np.array([item.synchronising for item in keys], dtype=np.bool_)
    usable = is_synchronizing[key] if len(key) else np.zeros(0, dtype=np.bool_)
    is_send = np.array([item.kind == "send_recv" for item in keys], dtype=np.bool_)
    pairs = is_send[key] if len(key) else usable
    has_unix_clock = all(summary.clock == "unix" for summary in summaries)
    clocks = align_cells(
        cells["rank"], bounds, start, end, usable, len(summaries), unix=has_unix_clock, pairs=pairs
    )
    shift = np.where(np.isfinite(clocks.shift), clocks.shift, 0.0)[cells["rank"]]
    drift = clocks.drift[cells["rank"]]
    return JoinedCollectives(
        keys=keys,
        rank=cells["rank"],
        row=row.astype(np.int64),
        step=cells["step"],
        start=start + shift + drift * start,
        end=end + shift + drift * end,
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


def _matching_columns(cells: dict[str, Ints]) -> tuple[Ints, ...]:
    return cells["order"], cells["count"], cells["mark"], cells["key"]


def _read_cells(
    summaries: Sequence[RankSummary],
) -> tuple[list[CollectiveKey], list[dict[str, Ints]]]:
    """Return the distinct keys of all ranks, and each rank's cells with indices in that list."""
    numbers: dict[str, int] = {}
    marks: dict[str, int] = {}
    keys: list[CollectiveKey] = []
    extra_names = ("rank", "mark", "count", "amount", "source")
    empty = {name: np.zeros(0, dtype=np.int64) for name in (*COLUMNS, *extra_names)}
    parts = [empty]
    for index_of_rank, summary in enumerate(summaries):
        result = summary.collectives
        if result is None or not result.key.count:
            continue
        columns = {name: unpack(getattr(result, name)) for name in COLUMNS}
        columns["amount"] = (
            np.zeros(result.key.count, dtype=np.int64)
            if result.amount is None
            else unpack(result.amount)
        )
        _check_columns(columns, result, len(summary.steps))
        key_rows = np.empty(len(result.keys), dtype=np.int64)
        for index, text in enumerate(result.keys):
            if text not in numbers:
                numbers[text] = len(keys)
                keys.append(_read_key(result, index))
            key_rows[index] = numbers[text]
        is_sequenced = np.array(result.sequenced or [False] * len(result.keys), dtype=np.bool_)
        names = [marks.setdefault(step.name, len(marks)) for step in summary.steps]
        mark = np.array([*names, -1], dtype=np.int64)[columns["step"]]
        mark[is_sequenced[columns["key"]]] = -1
        # ranks with different counts of cells with the same key and step do not match
        _, inverse, counts = np.unique(
            columns["key"] * (int(mark.max(initial=0)) + 2) + mark + 1,
            return_inverse=True,
            return_counts=True,
        )
        count = np.asarray(counts[inverse], dtype=np.int64)
        count[is_sequenced[columns["key"]]] = 0
        columns["key"] = key_rows[columns["key"]]
        more_columns = {"rank": np.full(len(mark), index_of_rank), "source": np.arange(len(mark))}
        parts.append({**columns, **more_columns, "mark": mark, "count": count})
    return keys, parts


def _check_columns(columns: dict[str, Ints], result: Collectives, steps: int) -> None:
    lengths = {len(values) for values in columns.values()}
    by_key = (result.synchronising, result.group, result.size, result.kind, result.message)
    is_valid = (
        len(lengths) == 1
        and all(len(keyed_rows) == len(result.keys) for keyed_rows in by_key)
        and (not result.sequenced or len(result.sequenced) == len(result.keys))
        and columns["key"].min() >= 0
        and columns["key"].max() < len(result.keys)
        and columns["step"].min() >= -1
        and columns["step"].max() < steps
        and bool((columns["end"] >= columns["start"]).all())
    )
    if not is_valid:
        raise AdvisorError("a rank's summary is damaged")


def _read_key(result: Collectives, index: int) -> CollectiveKey:
    return CollectiveKey(
        result.kind[index],
        result.group[index],
        result.message[index],
        result.size[index],
        result.synchronising[index],
    )


def _split_rows(row: Ints, cells: dict[str, Ints], keys: list[CollectiveKey]) -> Ints:
    """Split rows that cannot be one collective: a rank occurs twice, there are more ranks than
    members, or it is unknown which of several sends belongs to which receive."""
    if not len(row):
        return row
    rows = int(row[-1]) + 1
    is_twice = np.zeros(rows, dtype=np.bool_)
    is_same = (row[1:] == row[:-1]) & (cells["rank"][1:] == cells["rank"][:-1])
    is_twice[row[1:][is_same]] = True
    rank_counts = np.bincount(row, minlength=rows)
    key = np.zeros(rows, dtype=np.int64)
    key[row] = cells["key"]
    size = np.array([item.size for item in keys], dtype=np.int64)[key]
    is_send = np.array([item.kind == "send_recv" for item in keys], dtype=np.bool_)[key]
    is_split = is_twice | ((size > 0) & (rank_counts > size)) | (is_send & (rank_counts != 2))
    is_alone = is_split[row]
    split = row.copy()
    split[is_alone] = rows + np.arange(int(is_alone.sum()))
    return split


def measure_waits(joined: JoinedCollectives, rows_counted: Bools | None = None) -> CollectiveWaits:
    """Measure how late each rank arrives at the collectives, and the waits that it causes.

    ``rows_counted`` marks the rows that count, by default all."""
    ranks = len(joined.clocks.shift)
    matched = joined.matched if rows_counted is None else joined.matched & rows_counted
    rows = np.flatnonzero(matched)
    cells = np.flatnonzero(matched[joined.row]) if len(rows) else rows
    size = joined.rank_count[rows]
    bounds = np.concatenate([[0], np.cumsum(size)]).astype(np.int64)
    row_index = np.repeat(np.arange(len(rows)), size)
    empty = np.zeros(0)
    if not len(rows):
        zeros = np.zeros(ranks)
        count = np.zeros(ranks, dtype=np.int64)
        return CollectiveWaits(
            rows, rows, empty, empty, empty, cells, empty, empty, count, count, zeros, zeros
        )
    arrival, end = joined.start[cells], joined.end[cells]
    latest = np.maximum.reduceat(arrival, bounds[:-1])
    wait = latest[row_index] - arrival
    skew = np.maximum.reduceat(wait, bounds[:-1])
    exposed = np.minimum(wait, joined.exposed[cells])
    error = joined.clocks.error_ns or 0.0
    latest_cell = wait <= 0
    decided = (skew > 2 * error) & (np.add.reduceat(latest_cell.astype(np.int64), bounds[:-1]) == 1)
    last = np.full(len(rows), -1, dtype=np.int64)
    is_last = latest_cell & decided[row_index]
    last[row_index[is_last]] = joined.rank[cells[is_last]]
    other_count = np.maximum(size - 1, 1)
    mean_wait = np.where(decided, np.add.reduceat(wait, bounds[:-1]) / other_count, 0.0)
    mean_exposed = np.add.reduceat(np.where(is_last, 0.0, exposed), bounds[:-1]) / other_count
    has_last = last >= 0
    transfer = np.maximum(group_medians(end, bounds) - latest, 0.0)
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
        last_count=np.bincount(last[has_last], minlength=ranks),
        caused_ns=_sum_by_rank(last[has_last], mean_wait[has_last], ranks),
        caused_exposed_ns=_sum_by_rank(last[has_last], mean_exposed[has_last], ranks),
    )


def _sum_by_rank(rank: Ints, values: Floats, ranks: int) -> Floats:
    return np.bincount(rank, weights=values, minlength=ranks).astype(np.float64)


# -- one rank's waits ------------------------------------------------------------------------------


def collective_waits(joined: JoinedCollectives, place: int) -> pl.DataFrame:
    """List the collectives in the steps of one rank (``place`` is its index in the summaries):
    ``collective``, ``group`` (its name, or empty), ``bytes`` and ``size`` (0 if unknown), ``step``,
    ``wait`` (ns until the last member arrives), ``transfer`` (ns from then to its end) and
    ``complete`` (whether all members have summaries and are on one clock; otherwise a missing
    member may arrive later).

    A send and its receive wait for each other too: a receiver waits for the sender's compute."""
    schema = {
        "collective": pl.String, "group": pl.String, "bytes": pl.Int64, "size": pl.Int64,
        "step": pl.Int64, "wait": pl.Float64, "transfer": pl.Float64, "complete": pl.Boolean,
    }  # fmt: skip
    if not joined.rows:
        return pl.DataFrame(schema=schema)
    aligned = np.isfinite(joined.clocks.shift)[joined.rank]
    size = joined.group_sizes
    all_aligned = np.minimum.reduceat(aligned.astype(np.int8), joined.first_cell[:-1]) > 0
    complete = all_aligned & (joined.rank_count == size) & ~joined.clocks.mismatched
    latest = np.maximum.reduceat(np.where(aligned, joined.start, -np.inf), joined.first_cell[:-1])
    row_of_cell = np.repeat(np.arange(joined.rows), joined.rank_count)
    cells = np.flatnonzero((joined.rank == place) & (joined.step >= 0))
    row = row_of_cell[cells]
    start, end = joined.start[cells], joined.end[cells]
    last_arrival = np.clip(latest[row], start, end)
    keys = [joined.keys[number] for number in joined.key[row].tolist()]
    return pl.DataFrame(
        {
            "collective": [key.kind for key in keys],
            "group": [key.group for key in keys],
            "bytes": [key.message for key in keys],
            "size": size[row],
            "step": joined.step[cells],
            "wait": last_arrival - start,
            "transfer": end - last_arrival,
            "complete": complete[row],
        },
        schema=schema,
    )
