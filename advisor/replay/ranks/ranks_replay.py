"""Replay of the job's steps from the ranks' own work: the gain of a change on some of them.

Max-plus: a rank comes to a collective when its own work has got that far, a collective begins when
the last of its group has come, and ends after its transfer; where a rank stood still for it, its
own work goes on then."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from advisor.core.intervals import Bools, Floats, Ints
from advisor.measure.ranks.join import JoinedCollectives
from advisor.measure.ranks.own_time import RankProfile
from advisor.measure.ranks.summary_schema import RankSummary
from advisor.replay.predictions import OTHERS, job_band

MAX_CELLS = 400_000
"""Maximum number of collectives of all ranks in a replay: more ranks get fewer steps."""
MAX_LEVELS = 60_000
MAX_ERROR = 0.1
"""Largest error of a replay that is used for estimates, as a share of the step."""
MAX_LOST_ERROR = 0.03
"""Largest error with usual transfers for those of lost ranks, as a share of the step."""
TOUCHING_NS = 1_000.0
"""Time after the end of a collective within which the next one may have waited for it, ns."""
QUEUED_NS = 5_000.0
"""Time after it within which the next one was queued behind it on its stream, ns."""
STOOD_NS, STOOD_SHARE = 10_000.0, 0.03
"""Exposed time, ns and share of a collective's last part, above which a rank stood still for it:
between kernels that hide one there are gaps of a microsecond."""
LAST_NS = 20_000.0
"""Minimum length of the last part of a collective, ns."""


class JobGain(NamedTuple):
    """Gain of the job and its range, ns per step."""

    gain: float
    low: float
    high: float


class JobChange(NamedTuple):
    """Changes to the measured job; ``None``: unchanged."""

    work: Floats | None = None
    """Own work before each collective (cell), ns."""
    tail: Floats | None = None
    """Own work of each rank after its last collective, ns."""
    transfer: Floats | None = None
    """Transfer of each collective (cell), ns."""
    removed: Bools | None = None
    """Whether each collective (cell) is removed, so that no rank waits there."""
    entry: Floats | None = None
    """Start of each rank, ns on the common clock."""


class _Level(NamedTuple):
    """Collectives that can be computed at once: cells from ``begin`` to ``end``, and the first cell
    of each row in them."""

    begin: int
    end: int
    rows: Ints
    which: Ints


class RanksReplay:
    """Replay of some steps of all aligned ranks; a ``reason`` says why nothing is replayed."""

    def __init__(
        self, summaries: Sequence[RankSummary], own: RankProfile, joined: JoinedCollectives
    ) -> None:
        self.reason = ""
        self.error: float | None = None
        """Replayed over measured step, less 1."""
        self.transfer: Floats = np.zeros(0)
        """Transfer of each collective (cell), ns from the last arrival to the end."""
        self.measured_ns = 0.0
        """Mean step of the replayed ranks and steps, ns."""
        self.replayed_ns = 0.0
        self._build(summaries, own, joined)
        if self.reason:
            return
        self.replayed_ns = self.step()
        self.error = self.replayed_ns / self.measured_ns - 1 if self.measured_ns > 0 else None
        self._without_the_lost()
        if self.error is None or abs(self.error) > MAX_ERROR:
            self.reason = "the replay misses the measured step by more than 10%"

    def _without_the_lost(self) -> None:
        """Correct collectives that lack members: their time holds the wait for these. Where other
        groups show such a transfer's time, and the steps stay as measured with it, it is used
        instead. Then the delay of the lost ranks no longer bounds the others."""
        kept = self.transfer
        self.transfer = np.fmin(kept, self.usual_transfer)
        if (self.transfer == kept).all() or self.measured_ns <= 0:
            return
        base = self.step()
        error = base / self.measured_ns - 1
        if abs(error) > MAX_LOST_ERROR:
            self.transfer = kept
            return
        self.replayed_ns, self.error = base, error

    # -- what is replayed -------------------------------------------------------------------

    def _build(
        self, summaries: Sequence[RankSummary], own: RankProfile, joined: JoinedCollectives
    ) -> None:
        aligned = np.isfinite(joined.clocks.shift)
        if not aligned.any():
            self.reason = joined.clocks.reason or "the ranks are not on one clock"
            return
        ranks = len(summaries)
        column = _columns(summaries, own)
        of = column[joined.rank, joined.step]
        good = (of >= 0) & aligned[joined.rank] & (joined.step >= 0)
        good &= np.isin(of, _common_steps(np.isfinite(own.own_ns_by_step) & aligned[:, None]))
        chosen = _steps_within_limit(of[good], len(own.steps))
        good &= np.isin(of, chosen)
        if not good.any():
            self.reason = "the ranks have no steps in common"
            return
        self.columns = chosen
        place = np.full(len(own.steps) + 1, -1, dtype=np.int64)
        place[chosen] = np.arange(len(chosen))
        self.own_ns = own.own_ns_by_step[:, chosen]
        length = _lengths(summaries, column, chosen)
        self.complete_ranks = (
            aligned & np.isfinite(self.own_ns).all(axis=1) & np.isfinite(length).all(axis=1)
        )
        if self.complete_ranks.sum() < 2:
            self.reason = "fewer than two ranks have the same steps"
            return
        good &= self.complete_ranks[joined.rank]
        cells = np.flatnonzero(good)
        if not len(cells):
            self.reason = "the steps have no collectives"
            return
        self._order(joined, cells, place[of[cells]], ranks)
        if not self.reason:
            self.measured_ns = float(length[self.complete_ranks].mean())
            self.entry = _entries(summaries, column, chosen, joined)

    def _order(self, joined: JoinedCollectives, cells: Ints, step: Ints, ranks: int) -> None:
        start, end = joined.start[cells], joined.end[cells]
        row = _rows(joined, cells)
        latest = np.full(int(row.max()) + 1, -np.inf)
        np.maximum.at(latest, row, start)
        transfer = np.maximum(end - latest[row], 0.0)
        usual = _usual_transfer(joined, cells, transfer)
        # each rank's collectives in the order in which they were complete: cause before effect
        order = np.lexsort((start, row, latest[row], joined.rank[cells]))
        cells, step, row = cells[order], step[order], row[order]
        start, end, transfer = start[order], end[order], transfer[order]
        self.usual_transfer = usual[order]
        rank = joined.rank[cells]
        self.rank, self.step_of_cell = rank, step
        progress, own = self._measured_progress(joined, cells, rank, step)
        first = np.searchsorted(rank, np.arange(ranks + 1))
        self.first_cell = first
        self.work = np.diff(progress, prepend=0.0)
        new = first[:-1][first[:-1] < first[1:]]
        self.work[new] = progress[new]
        self.tail = own.copy()
        there = first[1:] > first[:-1]
        self.tail[there] -= progress[first[1:][there] - 1]
        self.hidden_ns = np.maximum(end - start - joined.exposed[cells], 0.0)
        self.transfer = transfer
        self.keys = joined.keys
        self.kinds = [key.kind for key in joined.keys]
        self.key = joined.key[joined.row[cells]]
        self.row = joined.row[cells]
        self.amount = joined.amount[cells]
        self.exposed = joined.exposed[cells]
        sent = joined.is_send[self.row]
        stood = _stood_still(rank, start, end, progress, self.hidden_ns)
        self.sends_unwaited = sent & ~stood
        """Sends that nobody waited for: they end as the receiver comes, and the work goes on."""
        here = np.arange(len(cells))
        self.previous_in_group = _before_in_group(joined, self.row, rank, _partners(row, rank))
        self.waited_for = _waited_for(rank, start, end)
        queued = (self.previous_in_group >= 0) & (start <= end[self.previous_in_group] + QUEUED_NS)
        queued |= self.waited_for >= 0
        each = np.where(np.isfinite(self.own_ns), self.own_ns, 0.0)
        done = np.cumsum(each, axis=1)[rank, step]
        stop = _next_stop(stood, rank * len(self.columns) + step, end)
        self.blocked_at = np.where(stop >= 0, (progress + self.hidden_ns)[stop], done)
        """Own time of the rank up to where it needs each collective to have ended. That is where it
        stood still for it; for a hidden one, for a later one, or the end of its step."""
        self.issued_at = _issue_times(
            progress, queued, row, done - each[rank, step], each[rank, step]
        )
        """Own time of the rank up to where each was issued."""
        until = _in_collective_order(self.blocked_at.copy(), first)
        stride = float(until.max()) + 1.0
        seen = np.searchsorted(
            until + stride * rank, self.issued_at + stride * rank + 0.5, side="right"
        )
        # what began while the rank stood still for another was not held up by that one
        over = _in_collective_order(np.where(stood, end, 0.0), first)
        stride = float(end.max()) + 1.0
        seen = np.minimum(
            seen,
            np.searchsorted(over + stride * rank, start + stride * rank + TOUCHING_NS, "right"),
        )
        self.delay_slot = np.clip(seen, first[rank], here) + rank
        """Slot of the delay with which each collective begins."""
        self._build_levels(row, first)

    def _measured_progress(
        self, joined: JoinedCollectives, cells: Ints, rank: Ints, step: Ints
    ) -> tuple[Floats, Floats]:
        """Return the rank's own time from the first step's start to each collective, and in all of
        the steps by rank, ns."""
        own = np.where(np.isfinite(self.own_ns), self.own_ns, 0.0)
        base = np.cumsum(own, axis=1) - own
        # as the summaries have them, whose `work` counts from the one before
        order = np.lexsort((joined.end[cells], joined.start[cells], step, rank))
        total = np.cumsum(joined.work[cells][order])
        code = (rank * len(self.columns) + step)[order]
        begin = np.flatnonzero(np.concatenate([[True], code[1:] != code[:-1]]))
        before = np.concatenate([[0.0], total])[begin]
        inside = np.empty(len(cells))
        inside[order] = total - np.repeat(before, np.diff(np.append(begin, len(code))))
        return base[rank, step] + inside, own.sum(axis=1)

    def _progress(self, work: Floats) -> Floats:
        """Return the rank's own time up to each collective, ns."""
        total = np.concatenate([[0.0], np.cumsum(work)])
        return np.asarray(total[1:] - total[self.first_cell[:-1]][self.rank])

    def _own(self, work: Floats, tail: Floats) -> Floats:
        """Return each rank's own time in all of the steps, ns."""
        return np.asarray(np.bincount(self.rank, work, len(tail)) + tail)

    def _build_levels(self, row: Ints, first: Ints) -> None:
        """Build the levels of collectives that can be computed at once: all earlier are done."""
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
            own = standing[np.isin(row[at[standing]], rows)]
            cells = at[own]
            order = np.argsort(row[cells], kind="stable")
            cells = cells[order]
            edge = np.flatnonzero(np.concatenate([[True], row[cells][1:] != row[cells][:-1]]))
            which = np.cumsum(np.concatenate([[0], row[cells][1:] != row[cells][:-1]]))
            levels.append(_Level(begin, begin + len(cells), edge, which))
            parts.append(cells)
            begin += len(cells)
            at[own] += 1
            moved = own[at[own] < first[1:][own]]
        self.levels = levels
        self.cells = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
        if len(self.cells) < len(row):
            self.reason = "the collectives of the ranks are not in one order"

    # -- running it -------------------------------------------------------------------------

    def ends(self, change: JobChange | None = None) -> Floats:
        """Return when each rank has done its steps with the change, ns on the common clock."""
        change = change or JobChange()
        work = self.work if change.work is None else change.work
        tail = self.tail if change.tail is None else change.tail
        transfer, entry = change.transfer, change.entry
        own = self._own(work, tail)
        progress, until = self.issued_at, self.blocked_at
        if change.work is not None or change.tail is not None:
            # the same places in the work that is left
            progress, until = (
                self._rescale_points(work, tail, progress),
                self._rescale_points(work, tail, until),
            )
        until = _in_collective_order(until.copy(), self.first_cell)
        took = self.transfer if transfer is None else transfer
        ranks = len(self.first_cell) - 1
        delay = np.empty(len(self.rank) + ranks)
        delay[self.first_cell[:-1] + np.arange(ranks)] = self.entry if entry is None else entry
        slot = np.arange(len(self.rank)) + self.rank + 1
        done = np.empty(len(self.rank) + 1)
        done[-1] = -np.inf
        cells = self.cells
        # in the order of the levels, so that each level is a slice
        progress, until, took = progress[cells], until[cells], took[cells]
        before, slot = self.delay_slot[cells], slot[cells]
        follows, same = self.waited_for[cells], self.previous_in_group[cells]
        free = np.where(self.sends_unwaited[cells], np.inf, 0.0)
        gone = None if change.removed is None else change.removed[cells]
        for begin, end, rows, which in self.levels:
            part = slice(begin, end)
            ready = np.maximum(progress[part] + delay[before[part]], done[follows[part]])
            ready = np.maximum(ready, done[same[part]])
            over = np.maximum.reduceat(ready, rows)[which] + took[part]
            if gone is not None:
                over = np.where(gone[part], ready + took[part], over)
            done[cells[part]] = over
            here = slot[part]
            delay[here] = np.maximum(delay[here - 1], over - until[part] - free[part])
        final = delay[self.first_cell[1:] + np.arange(ranks)]
        return np.asarray(own + final)

    def _rescale_points(self, work: Floats, tail: Floats, points: Floats) -> Floats:
        """Return the same points of the work as in the measured steps, where it takes ``work``."""
        ranks = np.arange(len(tail))
        after = self.first_cell[1:]  # behind the last collective of each rank stands its end
        old = np.insert(self._progress(self.work), after, self._own(self.work, self.tail))
        new = np.insert(self._progress(work), after, self._own(work, tail))
        owner = np.insert(self.rank, after, ranks)
        stride = float(max(old.max(), new.max(), points.max())) + 1.0
        knots = np.maximum.accumulate(old + stride * owner)
        values = np.maximum.accumulate(new + stride * owner)
        begins = np.concatenate([[0], after[:-1] + ranks[1:]])
        knots = np.insert(knots, begins, stride * ranks)
        values = np.insert(values, begins, stride * ranks)
        result = np.interp(points + stride * self.rank, knots, values)
        return np.asarray(result - stride * self.rank)

    def step(self, change: JobChange | None = None) -> float:
        """Return the job's step, ns: see :meth:`ends`."""
        took = self.ends(change) - self.entry
        return float(took[self.complete_ranks].mean()) / len(self.columns)

    def gain(self, change: JobChange, kind: str = OTHERS) -> JobGain:
        """Return by how much the job's step is shorter, ns, with its range: past errors of
        predictions of that kind (see :func:`job_band`), and the replay's own error.

        Raises ValueError: nothing is replayed."""
        if self.reason:
            raise ValueError(self.reason)
        gain = self.replayed_ns - self.step(change)
        band, error = job_band(kind), min(abs(self.replayed_ns - self.measured_ns), abs(gain))
        low, high = sorted((gain * min(1.0, band.low), gain * max(1.0, band.high)))
        return JobGain(gain, max(0.0, low - error), max(0.0, high + error))

    def scaled_work(self, factor: Floats) -> JobChange:
        """Return the own work of each rank in each step times ``factor`` (ranks x steps)."""
        return JobChange(
            work=self.work * factor[self.rank, self.step_of_cell], tail=self.tail * factor[:, -1]
        )

    def order_in_step(self) -> Ints:
        """Return each collective's place in its rank's step, from 0."""
        code = self.rank * len(self.columns) + self.step_of_cell
        new = np.concatenate([[True], code[1:] != code[:-1]])
        begin = np.flatnonzero(new)
        result: Ints = np.arange(len(code)) - begin[np.cumsum(new) - 1]
        return result

    def runs_same_program(self, stage: Ints) -> Bools:
        """Return, by collective, whether its rank has as many in that step as most of its stage."""
        ranks, steps = len(self.tail), len(self.columns)
        counts = np.bincount(self.rank * steps + self.step_of_cell, minlength=ranks * steps)
        counts = counts.reshape(ranks, steps)
        same = np.zeros((ranks, steps), dtype=np.bool_)
        for name in np.unique(stage):
            rows = np.flatnonzero((stage == name) & self.complete_ranks)
            if len(rows):
                same[rows] = counts[rows] == np.median(counts[rows], axis=0)
        return same[self.rank, self.step_of_cell]

    def of_kind(self, kind: str) -> Bools:
        """Return which collectives (cells) are of a kind."""
        return np.array([each == kind for each in self.kinds], dtype=np.bool_)[self.key]


def _stood_still(rank: Ints, start: Floats, end: Floats, progress: Floats, flight: Floats) -> Bools:
    """Return whether each rank stood still for each of its collectives until that ended. Exposed
    parts may come from standing still for another. The starts and ends of all show the rank's own
    progress, and so how much of the last part it stood still."""
    when, got = np.concatenate([start, end]), np.concatenate([progress, progress + flight])
    owner = np.concatenate([rank, rank])
    stride = float(end.max() - min(start.min(), 0.0)) + LAST_NS + 1.0
    order = np.argsort(when + stride * owner, kind="stable")
    known = (when + stride * owner)[order]
    index = order[np.maximum(np.searchsorted(known, end - LAST_NS + stride * rank, "right") - 1, 0)]
    inside = (owner[index] == rank) & (when[index] >= start)
    part = end - np.where(inside, when[index], start)
    still = part - (progress + flight - np.where(inside, got[index], progress))
    return np.asarray(still > STOOD_NS + STOOD_SHARE * part)


def _next_stop(stood: Bools, which: Ints, end: Floats) -> Ints:
    """Return for each cell the next of its rank and step (``which``) to end, itself included, for
    which the rank stood still; -1: there is none."""
    stops = np.flatnonzero(stood)
    if not len(stops):
        return np.full(len(stood), -1, dtype=np.int64)
    stride = float(end.max() - min(end.min(), 0.0)) + 1.0
    stops = stops[np.argsort((end + stride * which)[stops], kind="stable")]
    index = np.searchsorted((end + stride * which)[stops], end + stride * which, side="left")
    result = stops[np.minimum(index, len(stops) - 1)]
    return np.where((index < len(stops)) & (which[result] == which), result, -1)


def _partners(row: Ints, rank: Ints) -> Ints:
    """Return the other's rank for each cell in a row of two; -1: it is alone, or with several."""
    result = np.full(len(row), -1, dtype=np.int64)
    order = np.argsort(row, kind="stable")
    first = np.flatnonzero(np.concatenate([[True], row[order][1:] != row[order][:-1]]))
    two = first[np.diff(np.append(first, len(row))) == 2]
    result[order[two]], result[order[two + 1]] = rank[order[two + 1]], rank[order[two]]
    return result


def _before_in_group(joined: JoinedCollectives, row: Ints, rank: Ints, partner: Ints) -> Ints:
    """Return for each cell the one before it of its rank and group, which run one after the other;
    -1: none. Cells are in order of their ranks. Sends are of pairs of ranks: PyTorch gives each
    pair of a group a communicator of its own, and a stream."""
    names: dict[str, int] = {}
    group = np.array([names.setdefault(key.group, len(names)) for key in joined.keys])
    pair = np.where(joined.is_send[row], partner, -2)
    of = group[joined.key[row]] * (int(rank.max(initial=0)) + 3) + pair + 2
    order = np.lexsort((np.arange(len(row)), of, rank))
    result = np.full(len(row), -1, dtype=np.int64)
    same = (of[order][1:] == of[order][:-1]) & (rank[order][1:] == rank[order][:-1])
    result[order[1:][same]] = order[:-1][same]
    return result


def _waited_for(rank: Ints, start: Floats, end: Floats) -> Ints:
    """Return for each cell the one of its rank at whose end it began at once; -1: none."""
    stride = float(end.max() - min(start.min(), 0.0)) + 1.0
    order = np.argsort(end + stride * rank, kind="stable")
    ends = (end + stride * rank)[order]
    index = np.searchsorted(ends, start + stride * rank + TOUCHING_NS, side="right") - 1
    result = order[np.maximum(index, 0)]
    near = (index >= 0) & (rank[result] == rank) & (start - end[result] <= QUEUED_NS)
    near &= result < np.arange(len(rank))
    return np.where(near, result, -1)


def _issue_times(progress: Floats, queued: Bools, row: Ints, base: Floats, own: Floats) -> Floats:
    """Return the own time up to where each collective was issued. One queued behind another began
    later than it was issued. A collective's ranks run one program: it was issued at the least part
    of its step's work (``own``, after ``base``) at which it began on any of them."""
    with np.errstate(divide="ignore", invalid="ignore"):
        part = (progress - base) / own
    least = np.full(int(row.max()) + 1, np.inf)
    known = np.isfinite(part)
    np.minimum.at(least, row[known], part[known])
    bounded = base + least[row] * own
    return np.where(queued & np.isfinite(bounded), np.minimum(progress, bounded), progress)


def _columns(summaries: Sequence[RankSummary], own: RankProfile) -> Ints:
    """Return the row of ``RankProfile.steps`` by rank and row of its steps; -1: not one of them."""
    at = {name: column for column, name in enumerate(own.steps)}
    most = max(len(summary.steps) for summary in summaries) + 1
    result = np.full((len(summaries), most), -1, dtype=np.int64)
    for place, summary in enumerate(summaries):
        names = [at.get(step.name, -1) for step in summary.steps]
        result[place, : len(names)] = names
    return result


def _common_steps(there: Bools) -> Ints:
    """Return the steps (columns) to replay: those with the most steps of ranks (rows) that have
    them all. A rank whose recording ends sooner shortens the replay or is left out of it."""
    have = there.sum(axis=0)
    sets = [np.flatnonzero(have >= least) for least in np.unique(have[have > 1])]
    whole = [len(steps) * int(there[:, steps].all(axis=1).sum()) for steps in sets]
    return sets[int(np.argmax(whole))] if sets else np.flatnonzero(have)


def _steps_within_limit(of: Ints, steps: int) -> Ints:
    """Return the first steps that together have at most ``MAX_CELLS`` collectives, at least one."""
    counts = np.bincount(of, minlength=steps)
    there = np.flatnonzero(counts)
    fits = np.cumsum(counts[there]) <= MAX_CELLS
    return there[fits] if fits.any() else there[:1]


def _lengths(summaries: Sequence[RankSummary], column: Ints, chosen: Ints) -> Floats:
    place = {step: at for at, step in enumerate(chosen.tolist())}
    result = np.full((len(summaries), len(chosen)), np.nan)
    for rank, summary in enumerate(summaries):
        for row, step in enumerate(summary.steps):
            index = place.get(int(column[rank, row]), -1)
            if index >= 0:
                result[rank, index] = step.end - step.start
    return result


def _entries(
    summaries: Sequence[RankSummary], column: Ints, chosen: Ints, joined: JoinedCollectives
) -> Floats:
    """Return when each rank begins the first of the steps, ns on the common clock from the
    earliest; the median where it is unknown."""
    result = np.full(len(summaries), np.nan)
    clocks = joined.clocks
    for rank, summary in enumerate(summaries):
        for row, step in enumerate(summary.steps):
            if column[rank, row] == chosen[0] and np.isfinite(clocks.shift[rank]):
                when = float(step.start - joined.origin)
                result[rank] = when + clocks.shift[rank] + clocks.drift[rank] * when
    result -= np.nanmin(result)
    return np.where(np.isfinite(result), result, np.nanmedian(result))


def _rows(joined: JoinedCollectives, cells: Ints) -> Ints:
    """Return each cell's row, numbered anew; ranks wait for each other only within a row."""
    together = joined.matched | joined.is_send & (joined.rank_count == 2)
    row = joined.row[cells]
    alone = ~together[row]
    row = row.copy()
    row[alone] = joined.rows + np.arange(int(alone.sum()))
    return np.unique(row, return_inverse=True)[1].astype(np.int64)


def _usual_transfer(joined: JoinedCollectives, cells: Ints, transfer: Floats) -> Floats:
    """Return usual transfers of cells that lack members: the median of complete collectives of the
    same kind, size and message, ns. NaN: none is lacking, or there are none."""
    result = np.full(len(cells), np.nan)
    row = joined.row[cells]
    of, size = joined.group_code[row], joined.group_sizes[row]
    seen = np.bincount(row)[row]  # of the ranks that are replayed
    lacking = (size > 0) & (seen < size)
    for kind in np.unique(of[lacking]).tolist():
        whole = (of == kind) & ~lacking
        if whole.any():
            result[(of == kind) & lacking] = np.median(transfer[whole])
    return result


def _in_collective_order(until: Floats, first: Ints) -> Floats:
    """Return the ends of waits put in the order of each rank's collectives."""
    for begin, end in zip(first[:-1].tolist(), first[1:].tolist(), strict=True):
        until[begin:end] = np.maximum.accumulate(until[begin:end])
    return until
