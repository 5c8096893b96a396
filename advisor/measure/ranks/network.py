"""Collectives that take longer where some hosts take part, after the last rank has come."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from advisor.core.intervals import Floats, Ints
from advisor.core.ranks import format_ranks
from advisor.measure.ranks.align import group_medians
from advisor.measure.ranks.members import Members, find_members
from advisor.measure.ranks.outliers import MAX_CHANCE, MIN_SHARE, Deviation

if TYPE_CHECKING:
    from advisor.measure.ranks.outliers import Job


MIN_GROUPS = 3
"""Of the same kind of collective, to say that one of them is slower."""


def transfer_excess(job: Job, without: frozenset[int] = frozenset()) -> list[Floats]:
    """Transfer time above the middle of the same kind and size in other groups, by rank, per step:
    of all together, then of each kind by itself. NaN: nothing to compare with. Collectives of the
    ranks in ``without`` take no part."""
    joined, waits = job.joined, job.waits
    ranks = len(job.summaries)
    excess = np.full(len(waits.row), np.nan)
    group, kind = _groups(job)
    member = joined.rank[waits.cells]
    which = np.repeat(np.arange(len(waits.row)), joined.seen[waits.row])
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
        result.append(np.where(there, total / max(1, len(job.own.steps)), np.nan))
    return result


def _groups(job: Job) -> tuple[Ints, Ints]:
    """By collective: the number of its members' set, and of its kind, message and size."""
    joined, waits = job.joined, job.waits
    if not len(waits.row):
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    seed = np.random.default_rng(11).integers(1, 1 << 62, len(job.summaries), dtype=np.int64)
    sizes = joined.seen[waits.row]
    at = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    group = np.add.reduceat(seed[joined.rank[waits.cells]], at)
    kinds: dict[tuple[str, int, int], int] = {}
    labels = [
        (joined.keys[key].kind, joined.keys[key].message, joined.keys[key].size or size)
        for key, size in zip(joined.key[waits.row].tolist(), sizes.tolist(), strict=True)
    ]
    kind = np.array([kinds.setdefault(each, len(kinds)) for each in labels], dtype=np.int64)
    return group, kind


def slow_links(job: Job) -> list[Deviation]:
    """Hosts or racks (ranks, where hosts are not known) whose collectives take longer; one after
    the other, each without what those found before have caused."""
    deviations: list[Deviation] = []
    done: frozenset[int] = frozenset()
    floor = MIN_SHARE * job.step_ns
    if floor <= 0:
        return deviations
    while len(deviations) < 5:
        every = transfer_excess(job, done)
        # where half of the groups of one kind have a slow member, their scatter hides the others
        for excess in every:
            if who := find_members(excess, floor, MAX_CHANCE / len(every), job.places):
                break
        else:
            return deviations
        worst = _same(job, who, excess)
        deviations.append(
            Deviation("network", worst, float(np.nanmean(excess[list(worst.places)])))
        )
        done |= set(worst.places)
    return deviations


def _same(job: Job, who: list[Members], excess: Floats) -> Members:
    """The worst; ranks that share its collectives, and so have the same figure, belong to it."""
    worst = who[0]
    if worst.unit != "rank":
        return worst
    level = float(excess[worst.places[0]])
    similar = [
        w for w in who if w.unit == "rank" and abs(excess[w.places[0]] - level) < 0.1 * level
    ]
    places = tuple(sorted(place for w in similar for place in w.places))
    if len(places) == 1:
        return worst
    name = format_ranks([job.places.ranks[place] for place in places])
    return Members("rank", name, places, worst.chance)
