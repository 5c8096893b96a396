"""Replay of the job's steps from the ranks' own work, to estimate changes on some ranks.

Max-plus: a rank reaches a collective after its own work up to it. A collective begins when the last
rank of its group has arrived, and ends after its transfer. If a rank stood still for it, its own
work then continues."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from advisor.core.intervals import Bools, Floats, Ints
from advisor.measure.ranks.join import JoinedCollectives
from advisor.measure.ranks.rank_work import RankProfile
from advisor.measure.ranks.summary_schema import RankSummary
from advisor.replay.ledger import OTHERS, job_range

MAX_CELLS = 400_000
"""Maximum number of collectives of all ranks in a replay: more ranks get fewer steps."""
MAX_LEVELS = 60_000
MAX_ERROR = 0.1
"""Maximum error of a replay for estimates, as a share of the step."""
MAX_LOST_ERROR = 0.03
"""Maximum error with usual transfers instead of lost ranks' transfers, as a share of the step."""
TOUCHING_NS = 1_000.0
"""Maximum time after the end of a collective at which the next may have waited for it, ns."""
QUEUED_NS = 5_000.0
"""Maximum time after the end of a collective at which the next was queued on its stream, ns."""
MIN_STILL_NS, MIN_STILL_SHARE = 10_000.0, 0.03
"""Minimum exposed time, in ns and as a share of a collective's last part, for which a rank stood
still: kernels that hide a collective have gaps of a microsecond."""
MIN_PART_NS = 20_000.0
"""Minimum length of the last part of a collective, ns."""


class JobGain(NamedTuple):
    """Gain of the job and its range, ns per step."""

    gain: float
    low: float
    high: float


class JobChange(NamedTuple):
    """Changes to the measured job, ``None`` where unchanged."""

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
    """Collectives that can be computed at once: cells from ``start`` to ``end``, and the first cell
    of each of their rows."""

    start: int
    end: int
    rows: Ints
    which: Ints


class RanksReplay:
    """Replay of some steps of all aligned ranks. ``reason`` says why nothing is replayed, if so."""

    def __init__(
        self, summaries: Sequence[RankSummary], own: RankProfile, joined: JoinedCollectives
    ) -> None:
        self.reason = ""
        self.error: float | None = None
        """Replayed over measured step, minus 1."""
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
        self._correct_lost_ranks()
        if self.error is None or abs(self.error) > MAX_ERROR:
            self.reason = "the replay misses the measured step by more than 10%"

    def _correct_lost_ranks(self) -> None:
        """Correct collectives that lack members: their time includes the wait for these. If other
        groups show the time of such a transfer, and the steps stay as measured with it, it is used
        instead. Then the delay of the lost ranks no longer limits the others."""
        measured = self.transfer
        self.transfer = np.fmin(measured, self.usual_transfer)
        if (self.transfer == measured).all() or self.measured_ns <= 0:
            return
        base = self.step()
        error = base / self.measured_ns - 1
        if abs(error) > MAX_LOST_ERROR:
            self.transfer = measured
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
        column = _find_columns(summaries, own)
        columns = column[joined.rank, joined.step]
        is_used = (columns >= 0) & aligned[joined.rank] & (joined.step >= 0)
        is_used &= np.isin(
            columns, _choose_steps(np.isfinite(own.work_ns_by_step) & aligned[:, None])
        )
        # the first steps that together have at most MAX_CELLS collectives, or one step
        counts = np.bincount(columns[is_used], minlength=len(own.steps))
        present = np.flatnonzero(counts)
        fits = np.cumsum(counts[present]) <= MAX_CELLS
        chosen = present[fits] if fits.any() else present[:1]
        is_used &= np.isin(columns, chosen)
        if not is_used.any():
            self.reason = "the ranks have no steps in common"
            return
        self.columns = chosen
        position = np.full(len(own.steps) + 1, -1, dtype=np.int64)
        position[chosen] = np.arange(len(chosen))
        self.work_ns = own.work_ns_by_step[:, chosen]
        length = _find_lengths(summaries, column, chosen)
        self.complete_ranks = (
            aligned & np.isfinite(self.work_ns).all(axis=1) & np.isfinite(length).all(axis=1)
        )
        if self.complete_ranks.sum() < 2:
            self.reason = "fewer than two ranks have the same steps"
            return
        is_used &= self.complete_ranks[joined.rank]
        cells = np.flatnonzero(is_used)
        if not len(cells):
            self.reason = "the steps have no collectives"
            return
        self._order(joined, cells, position[columns[cells]], ranks)
        if not self.reason:
            self.measured_ns = float(length[self.complete_ranks].mean())
            self.entry = _find_entries(summaries, column, chosen, joined)

    def _order(self, joined: JoinedCollectives, cells: Ints, step: Ints, ranks: int) -> None:
        start, end = joined.start[cells], joined.end[cells]
        row = _number_rows(joined, cells)
        latest = np.full(int(row.max()) + 1, -np.inf)
        np.maximum.at(latest, row, start)
        transfer = np.maximum(end - latest[row], 0.0)
        usual = _find_usual_transfer(joined, cells, transfer)
        # each rank's collectives in the order of their completion: cause before effect
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
        nonempty = first[:-1][first[:-1] < first[1:]]
        self.work[nonempty] = progress[nonempty]
        self.tail = own.copy()
        has_cells = first[1:] > first[:-1]
        self.tail[has_cells] -= progress[first[1:][has_cells] - 1]
        self.hidden_ns = np.maximum(end - start - joined.exposed[cells], 0.0)
        self.transfer = transfer
        self.keys = joined.keys
        self.kinds = [key.kind for key in joined.keys]
        self.key = joined.key[joined.row[cells]]
        self.row = joined.row[cells]
        self.amount = joined.amount[cells]
        self.exposed = joined.exposed[cells]
        is_send = joined.is_send[self.row]
        stood = _find_stops(rank, start, end, progress, self.hidden_ns)
        self.sends_unwaited = is_send & ~stood
        """Whether each is a send for which no rank waited: it ends when the receiver arrives, and
        the work continues."""
        index = np.arange(len(cells))
        self.previous_in_group = _find_previous(joined, self.row, rank, _find_partners(row, rank))
        self.waited_for = _find_waited_for(rank, start, end)
        queued = (self.previous_in_group >= 0) & (start <= end[self.previous_in_group] + QUEUED_NS)
        queued |= self.waited_for >= 0
        work_ns = np.where(np.isfinite(self.work_ns), self.work_ns, 0.0)
        done = np.cumsum(work_ns, axis=1)[rank, step]
        stop = _find_next_stop(stood, rank * len(self.columns) + step, end)
        self.blocked_at = np.where(stop >= 0, (progress + self.hidden_ns)[stop], done)
        """Own time of the rank until it needs the end of each collective: until it stood still for
        it or, if it is hidden, for a later one, or until the end of its step."""
        self.issued_at = _find_issued(
            progress, queued, row, done - work_ns[rank, step], work_ns[rank, step]
        )
        """Own time of the rank until each collective was issued."""
        needed_at = _order_ends(self.blocked_at.copy(), first)
        stride = float(needed_at.max()) + 1.0
        seen = np.searchsorted(
            needed_at + stride * rank, self.issued_at + stride * rank + 0.5, side="right"
        )
        # collectives that began while the rank stood still for another did not wait for it
        stops = _order_ends(np.where(stood, end, 0.0), first)
        stride = float(end.max()) + 1.0
        seen = np.minimum(
            seen,
            np.searchsorted(stops + stride * rank, start + stride * rank + TOUCHING_NS, "right"),
        )
        self.delay_slot = np.clip(seen, first[rank], index) + rank
        """Index of the delay with which each collective begins."""
        self._build_levels(row, first)

    def _measured_progress(
        self, joined: JoinedCollectives, cells: Ints, rank: Ints, step: Ints
    ) -> tuple[Floats, Floats]:
        """Return the rank's own time from the first step's start to each collective, and each
        rank's total own time, ns."""
        own = np.where(np.isfinite(self.work_ns), self.work_ns, 0.0)
        base = np.cumsum(own, axis=1) - own
        # in the order of the summaries, whose `work` counts from the previous collective
        order = np.lexsort((joined.end[cells], joined.start[cells], step, rank))
        total = np.cumsum(joined.work[cells][order])
        code = (rank * len(self.columns) + step)[order]
        start = np.flatnonzero(np.concatenate([[True], code[1:] != code[:-1]]))
        before = np.concatenate([[0.0], total])[start]
        inside = np.empty(len(cells))
        inside[order] = total - np.repeat(before, np.diff(np.append(start, len(code))))
        return base[rank, step] + inside, own.sum(axis=1)

    def _progress(self, work: Floats) -> Floats:
        """Return the rank's own time up to each collective, ns."""
        total = np.concatenate([[0.0], np.cumsum(work)])
        return np.asarray(total[1:] - total[self.first_cell[:-1]][self.rank])

    def _own_totals(self, work: Floats, tail: Floats) -> Floats:
        """Return each rank's own time in all of the steps, ns."""
        return np.asarray(np.bincount(self.rank, work, len(tail)) + tail)

    def _build_levels(self, row: Ints, first: Ints) -> None:
        """Build the levels of collectives that can be computed at once, after all earlier
        levels."""
        size = np.bincount(row)
        waiting = np.zeros(len(size), dtype=np.int64)
        position = first[:-1].copy()
        parts: list[Ints] = []
        levels: list[_Level] = []
        moved = np.flatnonzero(position < first[1:])
        start = 0
        while len(moved):
            rows_now = row[position[moved]]
            np.add.at(waiting, rows_now, 1)
            ready = waiting[rows_now] == size[rows_now]
            rows = np.unique(rows_now[ready])
            if not len(rows) or len(levels) >= MAX_LEVELS:
                break
            # of all ranks that are at one of these
            standing = np.flatnonzero(position < first[1:])
            at_ready = standing[np.isin(row[position[standing]], rows)]
            cells = position[at_ready]
            order = np.argsort(row[cells], kind="stable")
            cells = cells[order]
            edge = np.flatnonzero(np.concatenate([[True], row[cells][1:] != row[cells][:-1]]))
            row_index = np.cumsum(np.concatenate([[0], row[cells][1:] != row[cells][:-1]]))
            levels.append(_Level(start, start + len(cells), edge, row_index))
            parts.append(cells)
            start += len(cells)
            position[at_ready] += 1
            moved = at_ready[position[at_ready] < first[1:][at_ready]]
        self.levels = levels
        self.cells = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
        if len(self.cells) < len(row):
            self.reason = "the collectives of the ranks are not in one order"

    # -- running it -------------------------------------------------------------------------

    def ends(self, change: JobChange | None = None) -> Floats:
        """Return when each rank has finished its steps with the change, ns on the common clock."""
        change = change or JobChange()
        work = self.work if change.work is None else change.work
        tail = self.tail if change.tail is None else change.tail
        transfer, entry = change.transfer, change.entry
        own_totals = self._own_totals(work, tail)
        progress, needed_at = self.issued_at, self.blocked_at
        if change.work is not None or change.tail is not None:
            # the same points in the remaining work
            progress, needed_at = (
                self._rescale_points(work, tail, progress),
                self._rescale_points(work, tail, needed_at),
            )
        needed_at = _order_ends(needed_at.copy(), self.first_cell)
        transfers = self.transfer if transfer is None else transfer
        ranks = len(self.first_cell) - 1
        delay = np.empty(len(self.rank) + ranks)
        delay[self.first_cell[:-1] + np.arange(ranks)] = self.entry if entry is None else entry
        slot = np.arange(len(self.rank)) + self.rank + 1
        done = np.empty(len(self.rank) + 1)
        done[-1] = -np.inf
        cells = self.cells
        # in the order of the levels, so that each level is a slice
        progress, needed_at, transfers = progress[cells], needed_at[cells], transfers[cells]
        before, slot = self.delay_slot[cells], slot[cells]
        follows, same = self.waited_for[cells], self.previous_in_group[cells]
        free = np.where(self.sends_unwaited[cells], np.inf, 0.0)
        removed = None if change.removed is None else change.removed[cells]
        for start, end, rows, which in self.levels:
            part = slice(start, end)
            ready = np.maximum(progress[part] + delay[before[part]], done[follows[part]])
            ready = np.maximum(ready, done[same[part]])
            ends = np.maximum.reduceat(ready, rows)[which] + transfers[part]
            if removed is not None:
                ends = np.where(removed[part], ready + transfers[part], ends)
            done[cells[part]] = ends
            slots = slot[part]
            delay[slots] = np.maximum(delay[slots - 1], ends - needed_at[part] - free[part])
        final = delay[self.first_cell[1:] + np.arange(ranks)]
        return np.asarray(own_totals + final)

    def _rescale_points(self, work: Floats, tail: Floats, points: Floats) -> Floats:
        """Return the points of the measured steps on the scale of other ``work``."""
        ranks = np.arange(len(tail))
        after = self.first_cell[1:]  # after the last collective of each rank comes its end
        old = np.insert(self._progress(self.work), after, self._own_totals(self.work, self.tail))
        new = np.insert(self._progress(work), after, self._own_totals(work, tail))
        owner = np.insert(self.rank, after, ranks)
        stride = float(max(old.max(), new.max(), points.max())) + 1.0
        knots = np.maximum.accumulate(old + stride * owner)
        values = np.maximum.accumulate(new + stride * owner)
        starts = np.concatenate([[0], after[:-1] + ranks[1:]])
        knots = np.insert(knots, starts, stride * ranks)
        values = np.insert(values, starts, stride * ranks)
        result = np.interp(points + stride * self.rank, knots, values)
        return np.asarray(result - stride * self.rank)

    def step(self, change: JobChange | None = None) -> float:
        """Return the job's step, ns: see :meth:`ends`."""
        durations = self.ends(change) - self.entry
        return float(durations[self.complete_ranks].mean()) / len(self.columns)

    def gain(self, change: JobChange, kind: str = OTHERS) -> JobGain:
        """Return by how much the job's step is shorter, ns, with its range: past errors of
        predictions of this kind (see :func:`job_range`), and the replay's own error.

        Raises ValueError if nothing is replayed."""
        if self.reason:
            raise ValueError(self.reason)
        gain = self.replayed_ns - self.step(change)
        ratios, error = job_range(kind), min(abs(self.replayed_ns - self.measured_ns), abs(gain))
        low, high = sorted((gain * min(1.0, ratios.low), gain * max(1.0, ratios.high)))
        return JobGain(gain, max(0.0, low - error), max(0.0, high + error))

    def scaled_work(self, factor: Floats) -> JobChange:
        """Return the own work of each rank in each step times ``factor`` (ranks x steps)."""
        return JobChange(
            work=self.work * factor[self.rank, self.step_of_cell], tail=self.tail * factor[:, -1]
        )

    def order_in_step(self) -> Ints:
        """Return each collective's index in its rank's step."""
        code = self.rank * len(self.columns) + self.step_of_cell
        new = np.concatenate([[True], code[1:] != code[:-1]])
        start = np.flatnonzero(new)
        result: Ints = np.arange(len(code)) - start[np.cumsum(new) - 1]
        return result

    def runs_same_program(self, stage: Ints) -> Bools:
        """Return, by collective, whether its rank has the usual number for its stage in that
        step."""
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


def _find_stops(rank: Ints, start: Floats, end: Floats, progress: Floats, flight: Floats) -> Bools:
    """Return whether each rank stood still for each of its collectives until its end. Exposed parts
    may come from standing still for another collective. The starts and ends of all collectives show
    the rank's own progress, and so how long it stood still in the last part."""
    times, own_times = np.concatenate([start, end]), np.concatenate([progress, progress + flight])
    owner = np.concatenate([rank, rank])
    stride = float(end.max() - min(start.min(), 0.0)) + MIN_PART_NS + 1.0
    order = np.argsort(times + stride * owner, kind="stable")
    sorted_times = (times + stride * owner)[order]
    index = order[
        np.maximum(np.searchsorted(sorted_times, end - MIN_PART_NS + stride * rank, "right") - 1, 0)
    ]
    inside = (owner[index] == rank) & (times[index] >= start)
    part = end - np.where(inside, times[index], start)
    still = part - (progress + flight - np.where(inside, own_times[index], progress))
    return np.asarray(still > MIN_STILL_NS + MIN_STILL_SHARE * part)


def _find_next_stop(is_stop: Bools, code: Ints, end: Floats) -> Ints:
    """Return for each cell the next cell of its rank and step (``code``) to end, or itself, for
    which the rank stood still, or -1."""
    stops = np.flatnonzero(is_stop)
    if not len(stops):
        return np.full(len(is_stop), -1, dtype=np.int64)
    stride = float(end.max() - min(end.min(), 0.0)) + 1.0
    stops = stops[np.argsort((end + stride * code)[stops], kind="stable")]
    index = np.searchsorted((end + stride * code)[stops], end + stride * code, side="left")
    result = stops[np.minimum(index, len(stops) - 1)]
    return np.where((index < len(stops)) & (code[result] == code), result, -1)


def _find_partners(row: Ints, rank: Ints) -> Ints:
    """Return the other rank for each cell in a row of two, or -1 in rows of another size."""
    result = np.full(len(row), -1, dtype=np.int64)
    order = np.argsort(row, kind="stable")
    first = np.flatnonzero(np.concatenate([[True], row[order][1:] != row[order][:-1]]))
    two = first[np.diff(np.append(first, len(row))) == 2]
    result[order[two]], result[order[two + 1]] = rank[order[two + 1]], rank[order[two]]
    return result


def _find_previous(joined: JoinedCollectives, row: Ints, rank: Ints, partner: Ints) -> Ints:
    """Return for each cell the previous cell of its rank and group, which run one after the other,
    or -1. Cells are in order of their ranks. Sends belong to pairs of ranks: PyTorch gives each
    pair of a group a separate communicator and stream."""
    names: dict[str, int] = {}
    group = np.array([names.setdefault(key.group, len(names)) for key in joined.keys])
    pair = np.where(joined.is_send[row], partner, -2)
    groups = group[joined.key[row]] * (int(rank.max(initial=0)) + 3) + pair + 2
    order = np.lexsort((np.arange(len(row)), groups, rank))
    result = np.full(len(row), -1, dtype=np.int64)
    same = (groups[order][1:] == groups[order][:-1]) & (rank[order][1:] == rank[order][:-1])
    result[order[1:][same]] = order[:-1][same]
    return result


def _find_waited_for(rank: Ints, start: Floats, end: Floats) -> Ints:
    """Return for each cell the cell of its rank at whose end it began at once, or -1."""
    stride = float(end.max() - min(start.min(), 0.0)) + 1.0
    order = np.argsort(end + stride * rank, kind="stable")
    ends = (end + stride * rank)[order]
    index = np.searchsorted(ends, start + stride * rank + TOUCHING_NS, side="right") - 1
    result = order[np.maximum(index, 0)]
    is_near = (index >= 0) & (rank[result] == rank) & (start - end[result] <= QUEUED_NS)
    is_near &= result < np.arange(len(rank))
    return np.where(is_near, result, -1)


def _find_issued(progress: Floats, queued: Bools, row: Ints, base: Floats, own: Floats) -> Floats:
    """Return the own time until each collective was issued. A collective queued behind another
    began later than it was issued. A collective's ranks run one program: it was issued at the
    smallest part of its step's work (``own``, after ``base``) at which it began on any of them."""
    with np.errstate(divide="ignore", invalid="ignore"):
        part = (progress - base) / own
    min_part = np.full(int(row.max()) + 1, np.inf)
    is_known = np.isfinite(part)
    np.minimum.at(min_part, row[is_known], part[is_known])
    bounded = base + min_part[row] * own
    return np.where(queued & np.isfinite(bounded), np.minimum(progress, bounded), progress)


def _find_columns(summaries: Sequence[RankSummary], own: RankProfile) -> Ints:
    """Return the row of ``RankProfile.steps`` by rank and row of its steps, or -1."""
    column_of = {name: column for column, name in enumerate(own.steps)}
    width = max(len(summary.steps) for summary in summaries) + 1
    result = np.full((len(summaries), width), -1, dtype=np.int64)
    for place, summary in enumerate(summaries):
        names = [column_of.get(step.name, -1) for step in summary.steps]
        result[place, : len(names)] = names
    return result


def _choose_steps(has_step: Bools) -> Ints:
    """Return the steps (columns) to replay: as many steps as possible over all ranks (rows) that
    have all of them. A rank whose recording ends earlier shortens the replay or is excluded."""
    counts = has_step.sum(axis=0)
    sets = [np.flatnonzero(counts >= count) for count in np.unique(counts[counts > 1])]
    sizes = [len(steps) * int(has_step[:, steps].all(axis=1).sum()) for steps in sets]
    return sets[int(np.argmax(sizes))] if sets else np.flatnonzero(counts)


def _find_lengths(summaries: Sequence[RankSummary], column: Ints, chosen: Ints) -> Floats:
    place = {step: index for index, step in enumerate(chosen.tolist())}
    result = np.full((len(summaries), len(chosen)), np.nan)
    for rank, summary in enumerate(summaries):
        for row, step in enumerate(summary.steps):
            column_index = place.get(int(column[rank, row]), -1)
            if column_index >= 0:
                result[rank, column_index] = step.end - step.start
    return result


def _find_entries(
    summaries: Sequence[RankSummary], column: Ints, chosen: Ints, joined: JoinedCollectives
) -> Floats:
    """Return when each rank begins the first of the steps, ns on the common clock from the
    earliest, or the median if unknown."""
    result = np.full(len(summaries), np.nan)
    clocks = joined.clocks
    for rank, summary in enumerate(summaries):
        for row, step in enumerate(summary.steps):
            if column[rank, row] == chosen[0] and np.isfinite(clocks.shift[rank]):
                start = float(step.start - joined.origin)
                result[rank] = start + clocks.shift[rank] + clocks.drift[rank] * start
    result -= np.nanmin(result)
    return np.where(np.isfinite(result), result, np.nanmedian(result))


def _number_rows(joined: JoinedCollectives, cells: Ints) -> Ints:
    """Return each cell's renumbered row; ranks wait for each other only within a row."""
    together = joined.matched | joined.is_send & (joined.rank_count == 2)
    row = joined.row[cells]
    alone = ~together[row]
    row = row.copy()
    row[alone] = joined.rows + np.arange(int(alone.sum()))
    return np.unique(row, return_inverse=True)[1].astype(np.int64)


def _find_usual_transfer(joined: JoinedCollectives, cells: Ints, transfer: Floats) -> Floats:
    """Return usual transfers of cells that lack members: the median of complete collectives of the
    same kind, size and message, ns. NaN if none is missing, or there are no complete ones."""
    result = np.full(len(cells), np.nan)
    row = joined.row[cells]
    kind_code, size = joined.group_code[row], joined.group_sizes[row]
    present_ranks = np.bincount(row)[row]  # of the ranks that are replayed
    is_incomplete = (size > 0) & (present_ranks < size)
    for kind in np.unique(kind_code[is_incomplete]).tolist():
        is_complete = (kind_code == kind) & ~is_incomplete
        if is_complete.any():
            result[(kind_code == kind) & is_incomplete] = np.median(transfer[is_complete])
    return result


def _order_ends(until: Floats, first: Ints) -> Floats:
    """Return the ends of waits in the order of each rank's collectives."""
    for start, end in zip(first[:-1].tolist(), first[1:].tolist(), strict=True):
        until[start:end] = np.maximum.accumulate(until[start:end])
    return until
