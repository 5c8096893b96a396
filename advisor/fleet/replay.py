"""The job's steps run again from the ranks' own work: what is a change on some of them worth?

Max-plus: a rank comes to a collective when its own work has got that far, a collective begins when
the last of its group has come, and ends after its transfer; where a rank stood still for it, its
own work goes on then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from advisor.fleet.join import Joined
from advisor.fleet.profile import Profile
from advisor.fleet.summary import Summary

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

MAX_CELLS = 400_000
"""Collectives of all ranks that are replayed: fewer steps of more ranks."""
MAX_LEVELS = 60_000
MAX_ERROR = 0.1
"""Of the step: a replay that misses the measured one by more prices nothing."""
TOUCHING_NS = 1_000.0
"""A collective that begins within this of the end of the one before may have waited for it."""
BAND = 0.15
"""Of a gain, beside the replay's own error: what overlap hides may show once others are earlier."""


class Gain(NamedTuple):
    """ns a step."""

    gain: float
    low: float
    high: float


class _Level(NamedTuple):
    """Collectives that can be done at once: cells from ``begin`` to ``end``, and the first cell of
    each row in them."""

    begin: int
    end: int
    rows: Ints
    which: Ints


class Replay:
    """Some steps of all aligned ranks. Where ``reason`` says why not, nothing is replayed."""

    def __init__(self, summaries: Sequence[Summary], own: Profile, joined: Joined) -> None:
        self.reason = ""
        self.error: float | None = None
        """Replayed over measured step, less 1."""
        self.measured = 0.0
        """ns a step, mean of the replayed ranks and steps."""
        self.base = 0.0
        self._build(summaries, own, joined)
        if self.reason:
            return
        self.base = self.step()
        self.error = self.base / self.measured - 1 if self.measured > 0 else None
        if self.error is None or abs(self.error) > MAX_ERROR:
            self.reason = "the replay misses the measured step by more than 10 %"

    # -- what is replayed -------------------------------------------------------------------

    def _build(self, summaries: Sequence[Summary], own: Profile, joined: Joined) -> None:
        aligned = np.isfinite(joined.clocks.shift)
        if not aligned.any():
            self.reason = joined.clocks.reason or "the ranks are not on one clock"
            return
        ranks = len(summaries)
        column = _columns(summaries, own)
        of = column[joined.rank, joined.step]
        good = (of >= 0) & aligned[joined.rank] & (joined.step >= 0)
        chosen = _chosen(of[good], len(own.steps))
        good &= np.isin(of, chosen)
        if not good.any():
            self.reason = "the ranks have no steps in common"
            return
        self.columns = chosen
        place = np.full(len(own.steps) + 1, -1, dtype=np.int64)
        place[chosen] = np.arange(len(chosen))
        self.own = own.own_by_step[:, chosen]
        length = _lengths(summaries, column, chosen)
        self.whole = aligned & np.isfinite(self.own).all(axis=1) & np.isfinite(length).all(axis=1)
        if self.whole.sum() < 2:
            self.reason = "fewer than two ranks have the same steps"
            return
        good &= self.whole[joined.rank]
        cells = np.flatnonzero(good)
        if not len(cells):
            self.reason = "the steps have no collectives"
            return
        self._order(joined, cells, place[of[cells]], ranks)
        if not self.reason:
            self.measured = float(length[self.whole].mean())
            self.entry = _entries(summaries, column, chosen, joined)

    def _order(self, joined: Joined, cells: Ints, step: Ints, ranks: int) -> None:
        start, end = joined.start[cells], joined.end[cells]
        row = _rows(joined, cells)
        latest = np.full(int(row.max()) + 1, -np.inf)
        np.maximum.at(latest, row, start)
        transfer = np.maximum(end - latest[row], 0.0)
        # each rank's collectives in the order in which they were complete: cause before effect
        order = np.lexsort((start, row, latest[row], joined.rank[cells]))
        cells, step, row = cells[order], step[order], row[order]
        start, end, transfer = start[order], end[order], transfer[order]
        rank = joined.rank[cells]
        self.work = np.where(np.isfinite(self.own), self.own, 0.0)
        base = np.cumsum(self.work, axis=1) - self.work
        inside = self._progress(joined, cells, rank, step)
        flight = np.maximum(end - start - joined.exposed[cells], 0.0)
        self.rank, self.at, self.inside, self.flight = rank, step, inside, flight
        self.transfer = transfer
        self.kinds = [key.kind for key in joined.keys]
        self.key = joined.key[joined.row[cells]]
        self.matched = np.bincount(row)[row] > 1
        self.row = joined.row[cells]
        self.exposed = joined.exposed[cells]
        first = np.searchsorted(rank, np.arange(ranks + 1))
        self.first = first
        here = np.arange(len(cells))
        progress = base[rank, step] + inside
        until = progress + flight
        for each in range(ranks):  # waits of a rank are over one after the other
            part = slice(first[each], first[each + 1])
            until[part] = np.maximum.accumulate(until[part])
        stride = float(until.max()) + 1.0
        seen = np.searchsorted(until + stride * rank, progress + stride * rank + 0.5, side="right")
        self.before = np.minimum(seen, here) + rank
        """Slot whose delay each collective begins with."""
        previous = np.maximum(here - 1, 0)
        follows = (here > first[rank]) & (start >= end[previous] - TOUCHING_NS)
        self.follows = np.where(follows, previous, -1)
        self._level(row, rank, first, ranks)

    def _progress(self, joined: Joined, cells: Ints, rank: Ints, step: Ints) -> Floats:
        """Own time from the start of its step to each collective."""
        order = np.lexsort((joined.start[cells], step, rank))
        work = joined.work[cells][order]
        total = np.cumsum(work)
        new = np.ones(len(order), dtype=np.bool_)
        new[1:] = (rank[order][1:] != rank[order][:-1]) | (step[order][1:] != step[order][:-1])
        begin = np.flatnonzero(new)
        before = np.where(begin > 0, total[begin - 1], 0.0)
        found = np.empty(len(order))
        found[order] = total - before[np.cumsum(new) - 1]
        return found

    def _level(self, row: Ints, rank: Ints, first: Ints, ranks: int) -> None:
        """Which collectives can be done at once: all whose members have done theirs before."""
        size = np.bincount(row)
        waiting = np.zeros(len(size), dtype=np.int64)
        at = first[:-1].copy()
        parts: list[Ints] = []
        levels: list[_Level] = []
        moved = np.flatnonzero(at < first[1:])
        begin = 0
        while len(moved):
            now = row[at[moved]]
            np.add.at(waiting, now, 1)
            ready = waiting[now] == size[now]
            rows = np.unique(now[ready])
            if not len(rows) or len(levels) >= MAX_LEVELS:
                break
            # of all ranks that stand at one of these
            standing = np.flatnonzero(at < first[1:])
            mine = standing[np.isin(row[at[standing]], rows)]
            cells = at[mine]
            order = np.argsort(row[cells], kind="stable")
            cells = cells[order]
            edge = np.flatnonzero(np.concatenate([[True], row[cells][1:] != row[cells][:-1]]))
            which = np.cumsum(np.concatenate([[0], row[cells][1:] != row[cells][:-1]]))
            levels.append(_Level(begin, begin + len(cells), edge, which))
            parts.append(cells)
            begin += len(cells)
            at[mine] += 1
            moved = mine[at[mine] < first[1:][mine]]
        self.levels = levels
        self.cells = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
        if len(self.cells) < len(row):
            self.reason = "the collectives of the ranks are not in one order"

    # -- running it -------------------------------------------------------------------------

    def ends(
        self,
        factor: Floats | None = None,
        transfer: Floats | None = None,
        entry: Floats | None = None,
    ) -> Floats:
        """When each rank has done its steps, ns, with its own work in each step times ``factor``
        (rank x step), transfers of ``transfer`` ns (by cell), begun at ``entry`` (by rank)."""
        own = self.work if factor is None else self.work * factor
        base = np.cumsum(own, axis=1) - own
        pace = 1.0 if factor is None else factor[self.rank, self.at]
        progress = base[self.rank, self.at] + self.inside * pace
        until = progress + self.flight * pace
        for each in range(len(self.first) - 1):
            part = slice(self.first[each], self.first[each + 1])
            until[part] = np.maximum.accumulate(until[part])
        took = self.transfer if transfer is None else transfer
        ranks = len(self.first) - 1
        delay = np.empty(len(self.rank) + ranks)
        delay[self.first[:-1] + np.arange(ranks)] = self.entry if entry is None else entry
        slot = np.arange(len(self.rank)) + self.rank + 1
        done = np.empty(len(self.rank) + 1)
        done[-1] = -np.inf
        cells = self.cells
        # in the order of the levels, so that each level is a slice
        progress, until, took = progress[cells], until[cells], took[cells]
        before, follows, slot = self.before[cells], self.follows[cells], slot[cells]
        for begin, end, rows, which in self.levels:
            part = slice(begin, end)
            ready = np.maximum(progress[part] + delay[before[part]], done[follows[part]])
            over = np.maximum.reduceat(ready, rows)[which] + took[part]
            done[cells[part]] = over
            here = slot[part]
            delay[here] = np.maximum(delay[here - 1], over - until[part])
        final = delay[self.first[1:] + np.arange(ranks)]
        return np.asarray(own.sum(axis=1) + final)

    def step(
        self,
        factor: Floats | None = None,
        transfer: Floats | None = None,
        entry: Floats | None = None,
    ) -> float:
        """The job's step, ns: see :meth:`ends`."""
        took = self.ends(factor, transfer, entry) - self.entry
        return float(took[self.whole].mean()) / len(self.columns)

    def gain(
        self,
        factor: Floats | None = None,
        transfer: Floats | None = None,
        entry: Floats | None = None,
    ) -> Gain:
        """What the job's step is shorter by, ns, with its band."""
        if self.reason:
            raise ValueError(self.reason)
        gain = self.base - self.step(factor, transfer, entry)
        half = BAND * abs(gain) + min(abs(self.base - self.measured), abs(gain))
        return Gain(gain, max(0.0, gain - half), max(0.0, gain + half))

    def of_kind(self, kind: str) -> Bools:
        """Which of its collectives (cells) are of a kind."""
        return np.array([each == kind for each in self.kinds], dtype=np.bool_)[self.key]

    def ones(self) -> Floats:
        """Factors that change nothing."""
        return np.ones(self.own.shape)


def _columns(summaries: Sequence[Summary], own: Profile) -> Ints:
    """By rank and row of its steps: row of ``Profile.steps``; -1: not one of them."""
    at = {name: column for column, name in enumerate(own.steps)}
    most = max(len(summary.steps) for summary in summaries) + 1
    found = np.full((len(summaries), most), -1, dtype=np.int64)
    for place, summary in enumerate(summaries):
        names = [at.get(step.name, -1) for step in summary.steps]
        found[place, : len(names)] = names
    return found


def _chosen(of: Ints, steps: int) -> Ints:
    """The first steps that all together have not too many collectives."""
    counts = np.bincount(of, minlength=steps)
    there = np.flatnonzero(counts)
    fits = np.cumsum(counts[there]) <= MAX_CELLS
    return there[fits] if fits.any() else there[:1]


def _lengths(summaries: Sequence[Summary], column: Ints, chosen: Ints) -> Floats:
    place = {step: at for at, step in enumerate(chosen.tolist())}
    found = np.full((len(summaries), len(chosen)), np.nan)
    for rank, summary in enumerate(summaries):
        for row, step in enumerate(summary.steps):
            at = place.get(int(column[rank, row]), -1)
            if at >= 0:
                found[rank, at] = step.end - step.start
    return found


def _entries(summaries: Sequence[Summary], column: Ints, chosen: Ints, joined: Joined) -> Floats:
    """When each rank begins with the first of the steps, ns on the common clock, from the earliest;
    the median where it is not known."""
    found = np.full(len(summaries), np.nan)
    clocks = joined.clocks
    for rank, summary in enumerate(summaries):
        for row, step in enumerate(summary.steps):
            if column[rank, row] == chosen[0] and np.isfinite(clocks.shift[rank]):
                when = float(step.start - joined.origin)
                found[rank] = when + clocks.shift[rank] + clocks.drift[rank] * when
    found -= np.nanmin(found)
    return np.where(np.isfinite(found), found, np.nanmedian(found))


def _rows(joined: Joined, cells: Ints) -> Ints:
    """Rows in which ranks wait for each other, numbered anew; each other cell is one of its own."""
    together = joined.matched.copy()
    pair = np.array([key.kind == "send_recv" for key in joined.keys], dtype=np.bool_)
    together |= pair[joined.key] & (joined.seen == 2)
    row = joined.row[cells]
    alone = ~together[row]
    row = row.copy()
    row[alone] = joined.rows + np.arange(int(alone.sum()))
    return np.unique(row, return_inverse=True)[1].astype(np.int64)
