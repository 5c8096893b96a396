"""Collectives of one rank, with keys that match them across ranks; and collectives that take longer
on some hosts after the last rank has arrived."""

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
from advisor.measure.ranks.outliers import MAX_CHANCE, MIN_EXCESS_SHARE, Deviation, JobMeasurements
from advisor.measure.ranks.summary_schema import Collectives, StepSummary, pack
from advisor.measure.ranks.topology import Members, find_members

SYNCHRONIZING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""Collectives that no rank can leave before every rank of its group has entered them. (A rank can
leave a broadcast, a reduce or a send before the others arrive.)"""
ALL_KINDS = (*SYNCHRONIZING, *(kind for kind in COLLECTIVES if kind not in SYNCHRONIZING))
_KEY_COLUMNS = ("group", "ranks", "collective", "bytes", "annotation", "source", "target")
_IS_PAIR = pl.col("source").is_not_null() & pl.col("target").is_not_null()
_DIGITS = re.compile(r"\d+")


def step_summaries(a: Analysis, steps: pl.DataFrame) -> list[StepSummary]:
    """Convert rows of the steps table, on the trace's own clock."""
    start = a.trace.meta.start_ns
    return [
        StepSummary(name, start + ts, start + end)
        for name, ts, end in steps.select("name", "ts", "end").iter_rows()
    ]


def collective_table(
    a: Analysis, steps: pl.DataFrame, kinds: Sequence[str] = ALL_KINDS
) -> pl.DataFrame:
    """List collectives of some steps (rows of the steps table), by their start. Collectives of two
    ranks match if group, kind, message size, annotation (without digits) and position agree:
    ``Seq`` if the profiler recorded it, else the n-th launched in the step of the same name, else
    the n-th of the trace. The message sizes of an all-to-all may differ between ranks. Without
    device work, the collectives are gloo's, on the host.

    Columns: ``group``, ``ranks``, ``collective``, ``bytes`` (null if unknown, or all-to-all),
    ``annotation`` (digits replaced; null), ``source`` and ``target`` (of a send; null),
    ``sequence`` (null), ``order`` (among collectives of the same key), ``label`` (the annotation as
    recorded), ``group_size`` (null), ``step`` (name of the step that launched it; null if matched
    by ``sequence``, or by position in the trace), ``at`` (row of ``steps``: the step that launched
    it, else the step in which it runs), ``start``, ``end`` (ns of the trace), ``amount`` (the
    larger of the elements that the rank sends and receives in an all-to-all; 0 for others), ``gpu``
    (row of ``trace.gpu``).
    """
    table = list_collectives(a)
    table = table.filter(pl.col("collective").is_in(kinds))
    marks, by_name = a.steps.marks, a.steps.are_numbered
    name = pl.Series([None], dtype=pl.String).new_from_index(0, table.height)
    if by_name and marks.height:
        # by launch, because the step in which it runs depends on how far the device is behind
        launch = table["launch_ts"].fill_null(-(1 << 62)).to_numpy()
        index = np.searchsorted(marks["ts"].to_numpy(), launch, side="right") - 1
        is_inside = (index >= 0) & (launch < marks["end"].to_numpy()[np.maximum(index, 0)])
        name = marks["name"].gather(np.maximum(index, 0)).set(pl.Series(~is_inside), None)
    is_all_to_all = pl.col("collective") == "all_to_all"
    # ranks of a pipeline count their sends separately: match them by source and target
    is_sequenced = pl.col("sequence").is_not_null() & ~_IS_PAIR
    elements = [pl.col(name) for name in ("given", "out") if name in table.columns]
    amount = pl.max_horizontal(*elements, pl.lit(0, dtype=pl.Int64))
    table = table.select(
        "group",
        "ranks",
        "collective",
        "group_size",
        "source",
        "target",
        sequence=pl.when(is_sequenced).then("sequence"),
        bytes=pl.when(~is_all_to_all).then("bytes"),
        step=pl.when(~is_sequenced).then(name),
        annotation=map_names(
            table["annotation"].cast(pl.Categorical),
            lambda annotation: _DIGITS.sub("#", annotation),
            pl.String,
        ),
        label="annotation",
        start="ts",
        end=pl.col("ts") + pl.col("dur"),
        amount=pl.when(is_all_to_all).then(amount).otherwise(0),
        gpu=pl.col("gpu").fill_null(-1),
    )
    if by_name:  # traces may begin at different collectives of those launched before the first step
        table = table.filter(pl.col("step").is_not_null() | pl.col("sequence").is_not_null())
    table = table.with_columns(order=pl.int_range(pl.len()).over(*_KEY_COLUMNS, "step", "sequence"))
    table = table.with_columns(at=_find_step_rows(table, steps))
    return table.filter(pl.col("at") >= 0).sort("start", "end", maintain_order=True)


def _find_step_rows(table: pl.DataFrame, steps: pl.DataFrame) -> pl.Series:
    """Return the step that launched each collective, or -1. A collective with a sequence number is
    not matched by its step, so it belongs to the step in which it runs."""
    starts, ends = steps["ts"].to_numpy(), steps["end"].to_numpy()
    index = np.searchsorted(starts, table["start"].to_numpy(), side="right") - 1
    is_inside = np.zeros(len(index), dtype=np.bool_)
    if len(starts):
        is_inside = (index >= 0) & (table["end"].to_numpy() <= ends[np.maximum(index, 0)])
    row_of_name = {name: row for row, name in enumerate(steps["name"].to_list())}
    launched = [row_of_name.get(name, -1) for name in table["step"].to_list()]
    by_time = pl.Series(np.where(is_inside, index, -1), dtype=pl.Int64)
    return pl.Series(launched, dtype=pl.Int64).zip_with(table["step"].is_not_null(), by_time)


def pack_collectives(a: Analysis, table: pl.DataFrame, steps: pl.DataFrame) -> Collectives | None:
    """Pack rows of :func:`collective_table` for sending, or return ``None`` without rows."""
    if table.is_empty():
        return None
    start, end, step = (table[name].to_numpy() for name in ("start", "end", "at"))
    exposed_time, step_start = a.breakdown.communication, steps["ts"].to_numpy()
    previous_start = np.concatenate([start[:1], start[:-1]])
    is_first = np.concatenate([[True], step[1:] != step[:-1]])
    previous_start[is_first] = np.minimum(step_start[step[is_first]], start[is_first])
    table = table.with_columns(
        text=pl.concat_str(
            [pl.col(name).cast(pl.String).fill_null("") for name in _KEY_COLUMNS], separator="|"
        ),
        known=pl.col("sequence").is_not_null(),
    )
    distinct = table.select("text", "known", *_KEY_COLUMNS, "group_size").unique(
        subset=["text", "known"], maintain_order=True
    )
    row_of_key = {
        is_pair: index for index, is_pair in enumerate(distinct.select("text", "known").iter_rows())
    }
    key_index = np.array(
        [row_of_key[is_pair] for is_pair in table.select("text", "known").iter_rows()],
        dtype=np.int64,
    )
    order = table.select(pl.when("known").then("sequence").otherwise("order").cast(pl.Int64))
    offset, amount = a.trace.meta.start_ns, table["amount"].to_numpy()
    return Collectives(
        keys=[short_key(*key) for key in distinct.select("known", *_KEY_COLUMNS).iter_rows()],
        key=pack(key_index),
        order=pack(order.to_series().to_numpy()),
        step=pack(step),
        start=pack(start + offset),
        end=pack(end + offset),
        exposed=pack(covered_length(start, end, exposed_time)),
        work=pack(start - previous_start - covered_length(previous_start, start, exposed_time)),
        synchronising=[kind in SYNCHRONIZING for kind in distinct["collective"].to_list()],
        group=[str(name)[:80] if name is not None else "" for name in distinct["group"].to_list()],
        size=[
            2 if is_pair else size or 0
            for size, is_pair in distinct.select("group_size", _IS_PAIR).iter_rows()
        ],
        kind=distinct["collective"].to_list(),
        message=distinct["bytes"].fill_null(0).to_list(),
        sequenced=distinct["known"].to_list(),
        amount=pack(amount) if amount.any() else None,
    )


def short_key(
    is_sequenced: bool,
    group: str | None,
    ranks: str | None,
    kind: str,
    size: int | None,
    annotation: str | None,
    source: int | None = None,
    target: int | None = None,
) -> str:
    """Build the short key that matches a collective across ranks, with a digest of the members."""
    members = "" if ranks is None else hashlib.blake2s(ranks.encode(), digest_size=6).hexdigest()
    parts = (
        "s" if is_sequenced else "n",
        (group or "")[:80],
        members,
        kind,
        size,
        annotation or "",
    )
    text = "|".join("" if part is None else str(part) for part in parts)
    if source is not None and target is not None:
        text += f"|{source}>{target}"
    if len(text) <= 160:
        return text
    return f"{text[:120]}#{hashlib.blake2s(text.encode(), digest_size=6).hexdigest()}"


MIN_GROUPS = 3
"""Minimum number of groups with the same kind of collective for calling one of them slower."""


def transfer_excess(job: JobMeasurements, without: frozenset[int] = frozenset()) -> list[Floats]:
    """Measure transfer time above the median of the same kind and size in other groups, by rank,
    per step: first of all kinds together, then of each kind. NaN if there is nothing to compare
    with. Collectives of the ranks in ``without`` are excluded."""
    joined, waits = job.joined, job.waits
    ranks = len(job.summaries)
    excess = np.full(len(waits.row), np.nan)
    group, kind = _number_groups(job)
    members = joined.rank[waits.cells]
    row_index = np.repeat(np.arange(len(waits.row)), joined.rank_count[waits.row])
    is_excluded = np.zeros(len(waits.row), dtype=np.bool_)
    is_excluded[row_index[np.isin(members, sorted(without))]] = True
    for kind_code in np.unique(kind).tolist():
        rows = np.flatnonzero((kind == kind_code) & ~is_excluded)
        groups, inverse = np.unique(group[rows], return_inverse=True)
        if len(groups) < MIN_GROUPS:
            continue
        order = np.argsort(inverse, kind="stable")
        bounds = np.searchsorted(inverse[order], np.arange(len(groups) + 1))
        medians = group_medians(waits.transfer[rows][order], bounds)
        excess[rows] = medians[inverse] - np.median(medians)
    is_known = np.isfinite(excess)
    result = []
    for rows in (
        is_known,
        *(is_known & (kind == kind_code) for kind_code in np.unique(kind[is_known]).tolist()),
    ):
        cells = np.flatnonzero(rows[row_index])
        total = np.bincount(members[cells], weights=excess[row_index[cells]], minlength=ranks)
        has_rows = np.bincount(members[cells], minlength=ranks) > 0
        result.append(np.where(has_rows, total / max(1, len(job.profile.steps)), np.nan))
    return result


def _number_groups(job: JobMeasurements) -> tuple[Ints, Ints]:
    """Number each collective's set of members, and its combination of kind, message and size."""
    joined, waits = job.joined, job.waits
    if not len(waits.row):
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    seed = np.random.default_rng(11).integers(1, 1 << 62, len(job.summaries), dtype=np.int64)
    sizes = joined.rank_count[waits.row]
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    group = np.add.reduceat(seed[joined.rank[waits.cells]], starts)
    kinds: dict[tuple[str, int, int], int] = {}
    labels = [
        (joined.keys[key].kind, joined.keys[key].message, joined.keys[key].size or size)
        for key, size in zip(joined.key[waits.row].tolist(), sizes.tolist(), strict=True)
    ]
    kind = np.array([kinds.setdefault(label, len(kinds)) for label in labels], dtype=np.int64)
    return group, kind


def slow_links(job: JobMeasurements) -> list[Deviation]:
    """Find hosts or racks (ranks, if hosts are unknown) whose collectives take longer, one after
    another, each without the effects of those found before."""
    deviations: list[Deviation] = []
    explained: frozenset[int] = frozenset()
    floor = MIN_EXCESS_SHARE * job.step_ns
    if floor <= 0:
        return deviations
    while len(deviations) < 5:
        by_kind = transfer_excess(job, explained)
        # if half of the groups of one kind have a slow member, their scatter hides the others
        for excess in by_kind:
            if members := find_members(excess, floor, MAX_CHANCE / len(by_kind), job.topology):
                break
        else:
            return deviations
        worst = _merge_same(job, members, excess)
        deviations.append(
            Deviation("network", worst, float(np.nanmean(excess[list(worst.rank_indices)])))
        )
        explained |= set(worst.rank_indices)
    return deviations


def _merge_same(job: JobMeasurements, candidates: list[Members], excess: Floats) -> Members:
    """Merge the worst outlier with ranks that share its collectives and so its excess."""
    worst = candidates[0]
    if worst.unit != "rank":
        return worst
    worst_excess = float(excess[worst.rank_indices[0]])
    similar = [
        who
        for who in candidates
        if who.unit == "rank"
        and abs(excess[who.rank_indices[0]] - worst_excess) < 0.1 * worst_excess
    ]
    indices = tuple(sorted(index for who in similar for index in who.rank_indices))
    if len(indices) == 1:
        return worst
    name = format_ranks([job.topology.ranks[index] for index in indices])
    return Members("rank", name, indices, worst.p_value)
