"""Collectives of one rank, each with the key that matches it with other ranks'; and collectives
that take longer where some hosts take part, after the last rank has come."""

import hashlib
import re
from collections.abc import Sequence

import numpy as np
import polars as pl

from advisor.core.intervals import Floats, Ints, covered_length
from advisor.core.ranks import format_ranks
from advisor.measure import Analysis
from advisor.measure.comm.comms import list_collectives
from advisor.measure.comm.messages import COLLECTIVES
from advisor.measure.host.names import map_names
from advisor.measure.ranks.align import group_medians
from advisor.measure.ranks.outliers import MAX_CHANCE, MIN_SHARE, Deviation, JobMeasurements
from advisor.measure.ranks.summary_schema import Collectives, StepSummary, pack
from advisor.measure.ranks.topology import Members, find_members

SYNCHRONISING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""Collectives that no rank can leave before every rank of its group has entered them. (A rank can
leave a broadcast, a reduce or a send before the others have come.)"""
ALL_KINDS = (*SYNCHRONISING, *(kind for kind in COLLECTIVES if kind not in SYNCHRONISING))
_KEY = ("group", "ranks", "collective", "bytes", "annotation", "source", "target")
_PAIR = pl.col("source").is_not_null() & pl.col("target").is_not_null()
_DIGITS = re.compile(r"\d+")


def step_summaries(a: Analysis, steps: pl.DataFrame) -> list[StepSummary]:
    """Convert rows of the steps table, on the trace's own clock."""
    begin = a.trace.meta.start_ns
    return [
        StepSummary(name, begin + ts, begin + end)
        for name, ts, end in steps.select("name", "ts", "end").iter_rows()
    ]


def collective_table(
    a: Analysis, steps: pl.DataFrame, kinds: Sequence[str] = ALL_KINDS
) -> pl.DataFrame:
    """List collectives of some steps (rows of the steps table), by their start. A collective of one
    rank is another's when group, kind, message size, annotation (digits apart) and place agree:
    ``Seq`` where the profiler recorded it, else the n-th such launched in the step of the same
    name, else the n-th such of the trace. The message sizes of an all-to-all may differ between
    ranks. Where there is no device work, the collectives are those of gloo, on the host.

    ``group``, ``ranks``, ``collective``, ``bytes`` (null: not known, or all-to-all), ``annotation``
    (digits replaced; null), ``source`` and ``target`` (of a send; null), ``sequence`` (null),
    ``order`` (among those of the same key), ``label`` (the annotation as recorded), ``group_size``
    (null), ``step`` (name of the step that launched it; null: matched by ``sequence``, or by place
    in the trace), ``at`` (row of ``steps``: that which launched it, else that in which it runs),
    ``start``, ``end`` (ns of the trace), ``amount`` (elements that the rank gives or gets in an
    all-to-all, whichever are more; 0: another kind, or not known), ``gpu`` (row of ``trace.gpu``).
    """
    table = list_collectives(a)
    table = table.filter(pl.col("collective").is_in(kinds))
    marks, stepped = a.steps.marks, a.steps.are_numbered
    name = pl.Series([None], dtype=pl.String).new_from_index(0, table.height)
    if stepped and marks.height:
        # by launch: which step it runs in depends on how far the device is behind
        launch = table["launch_ts"].fill_null(-(1 << 62)).to_numpy()
        index = np.searchsorted(marks["ts"].to_numpy(), launch, side="right") - 1
        inside = (index >= 0) & (launch < marks["end"].to_numpy()[np.maximum(index, 0)])
        name = marks["name"].gather(np.maximum(index, 0)).set(pl.Series(~inside), None)
    own_amount = pl.col("collective") == "all_to_all"
    # ranks of a pipeline count their sends each for itself: they are matched by who sends to whom
    recorded = pl.col("sequence").is_not_null() & ~_PAIR
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
        start="ts",
        end=pl.col("ts") + pl.col("dur"),
        amount=pl.when(own_amount).then(amount).otherwise(0),
        gpu=pl.col("gpu").fill_null(-1),
    )
    if stepped:  # the traces may begin at different ones of those launched before the first step
        table = table.filter(pl.col("step").is_not_null() | pl.col("sequence").is_not_null())
    table = table.with_columns(order=pl.int_range(pl.len()).over(*_KEY, "step", "sequence"))
    table = table.with_columns(at=_rows_of_steps(table, steps))
    return table.filter(pl.col("at") >= 0).sort("start", "end", maintain_order=True)


def _rows_of_steps(table: pl.DataFrame, steps: pl.DataFrame) -> pl.Series:
    """Return the step that launched each collective, -1: none. What has a sequence number is not
    matched by its step: then it is of the step it runs in."""
    begin, until = steps["ts"].to_numpy(), steps["end"].to_numpy()
    index = np.searchsorted(begin, table["start"].to_numpy(), side="right") - 1
    inside = np.zeros(len(index), dtype=np.bool_)
    if len(begin):
        inside = (index >= 0) & (table["end"].to_numpy() <= until[np.maximum(index, 0)])
    named = {name: row for row, name in enumerate(steps["name"].to_list())}
    launched = [named.get(name, -1) for name in table["step"].to_list()]
    by_time = pl.Series(np.where(inside, index, -1), dtype=pl.Int64)
    return pl.Series(launched, dtype=pl.Int64).zip_with(table["step"].is_not_null(), by_time)


def pack_collectives(a: Analysis, table: pl.DataFrame, steps: pl.DataFrame) -> Collectives | None:
    """Pack rows of :func:`collective_table` to send them; ``None``: there are none."""
    if table.is_empty():
        return None
    start, end, step = (table[name].to_numpy() for name in ("start", "end", "at"))
    idle, begin = a.breakdown.communication, steps["ts"].to_numpy()
    before = np.concatenate([start[:1], start[:-1]])
    first = np.concatenate([[True], step[1:] != step[:-1]])
    before[first] = np.minimum(begin[step[first]], start[first])
    table = table.with_columns(
        text=pl.concat_str(
            [pl.col(name).cast(pl.String).fill_null("") for name in _KEY], separator="|"
        ),
        known=pl.col("sequence").is_not_null(),
    )
    distinct = table.select("text", "known", *_KEY, "group_size").unique(
        subset=["text", "known"], maintain_order=True
    )
    row = {pair: at for at, pair in enumerate(distinct.select("text", "known").iter_rows())}
    of = np.array([row[pair] for pair in table.select("text", "known").iter_rows()], dtype=np.int64)
    order = table.select(pl.when("known").then("sequence").otherwise("order").cast(pl.Int64))
    offset, amount = a.trace.meta.start_ns, table["amount"].to_numpy()
    return Collectives(
        keys=[short_key(*each) for each in distinct.select("known", *_KEY).iter_rows()],
        key=pack(of),
        order=pack(order.to_series().to_numpy()),
        step=pack(step),
        start=pack(start + offset),
        end=pack(end + offset),
        exposed=pack(covered_length(start, end, idle)),
        work=pack(start - before - covered_length(before, start, idle)),
        synchronising=[kind in SYNCHRONISING for kind in distinct["collective"].to_list()],
        group=[str(name)[:80] if name is not None else "" for name in distinct["group"].to_list()],
        size=[
            2 if pair else size or 0
            for size, pair in distinct.select("group_size", _PAIR).iter_rows()
        ],
        kind=distinct["collective"].to_list(),
        message=distinct["bytes"].fill_null(0).to_list(),
        sequenced=distinct["known"].to_list(),
        amount=pack(amount) if amount.any() else None,
    )


def short_key(
    known: bool,
    group: str | None,
    ranks: str | None,
    kind: str,
    size: int | None,
    annotation: str | None,
    source: int | None = None,
    target: int | None = None,
) -> str:
    """Build the short key that matches a collective across ranks: the members' list as a digest."""
    members = "" if ranks is None else hashlib.blake2s(ranks.encode(), digest_size=6).hexdigest()
    parts = ("s" if known else "n", (group or "")[:80], members, kind, size, annotation or "")
    text = "|".join("" if part is None else str(part) for part in parts)
    if source is not None and target is not None:
        text += f"|{source}>{target}"
    if len(text) <= 160:
        return text
    return f"{text[:120]}#{hashlib.blake2s(text.encode(), digest_size=6).hexdigest()}"


MIN_GROUPS = 3
"""Groups with the same kind of collective that are needed to call one of them slower."""


def transfer_excess(job: JobMeasurements, without: frozenset[int] = frozenset()) -> list[Floats]:
    """Measure transfer time above the median of the same kind and size in other groups, by rank,
    per step: of all together, then of each kind by itself. NaN: nothing to compare with.
    Collectives of the ranks in ``without`` take no part."""
    joined, waits = job.joined, job.waits
    ranks = len(job.summaries)
    excess = np.full(len(waits.row), np.nan)
    group, kind = _groups(job)
    member = joined.rank[waits.cells]
    which = np.repeat(np.arange(len(waits.row)), joined.rank_count[waits.row])
    left_out = np.zeros(len(waits.row), dtype=np.bool_)
    left_out[which[np.isin(member, sorted(without))]] = True
    for item in np.unique(kind).tolist():
        rows = np.flatnonzero((kind == item) & ~left_out)
        groups, inverse = np.unique(group[rows], return_inverse=True)
        if len(groups) < MIN_GROUPS:
            continue
        order = np.argsort(inverse, kind="stable")
        first = np.searchsorted(inverse[order], np.arange(len(groups) + 1))
        middles = group_medians(waits.transfer[rows][order], first)
        excess[rows] = middles[inverse] - np.median(middles)
    known = np.isfinite(excess)
    result = []
    for rows in (known, *(known & (kind == item) for item in np.unique(kind[known]).tolist())):
        cells = np.flatnonzero(rows[which])
        total = np.bincount(member[cells], weights=excess[which[cells]], minlength=ranks)
        there = np.bincount(member[cells], minlength=ranks) > 0
        result.append(np.where(there, total / max(1, len(job.profile.steps)), np.nan))
    return result


def _groups(job: JobMeasurements) -> tuple[Ints, Ints]:
    """Number each collective's set of members, and its kind, message and size."""
    joined, waits = job.joined, job.waits
    if not len(waits.row):
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    seed = np.random.default_rng(11).integers(1, 1 << 62, len(job.summaries), dtype=np.int64)
    sizes = joined.rank_count[waits.row]
    at = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    group = np.add.reduceat(seed[joined.rank[waits.cells]], at)
    kinds: dict[tuple[str, int, int], int] = {}
    labels = [
        (joined.keys[key].kind, joined.keys[key].message, joined.keys[key].size or size)
        for key, size in zip(joined.key[waits.row].tolist(), sizes.tolist(), strict=True)
    ]
    kind = np.array([kinds.setdefault(each, len(kinds)) for each in labels], dtype=np.int64)
    return group, kind


def slow_links(job: JobMeasurements) -> list[Deviation]:
    """Find hosts or racks (ranks, where hosts are not known) whose collectives take longer; one
    after the other, each without what those found before have caused."""
    deviations: list[Deviation] = []
    done: frozenset[int] = frozenset()
    floor = MIN_SHARE * job.step_ns
    if floor <= 0:
        return deviations
    while len(deviations) < 5:
        every = transfer_excess(job, done)
        # where half of the groups of one kind have a slow member, their scatter hides the others
        for excess in every:
            if who := find_members(excess, floor, MAX_CHANCE / len(every), job.topology):
                break
        else:
            return deviations
        worst = _same(job, who, excess)
        deviations.append(
            Deviation("network", worst, float(np.nanmean(excess[list(worst.rank_indices)])))
        )
        done |= set(worst.rank_indices)
    return deviations


def _same(job: JobMeasurements, who: list[Members], excess: Floats) -> Members:
    """Merge the worst with ranks that share its collectives, and so have the same figure."""
    worst = who[0]
    if worst.unit != "rank":
        return worst
    level = float(excess[worst.rank_indices[0]])
    similar = [
        w for w in who if w.unit == "rank" and abs(excess[w.rank_indices[0]] - level) < 0.1 * level
    ]
    places = tuple(sorted(place for w in similar for place in w.rank_indices))
    if len(places) == 1:
        return worst
    name = format_ranks([job.topology.ranks[place] for place in places])
    return Members("rank", name, places, worst.p_value)
