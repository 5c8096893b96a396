"""Alignment of thousands of ranks' clocks by the ends of collectives, which ranks leave together.

Time and memory grow with the number of collectives, not with the pairs of ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from advisor.core.intervals import Bools, Floats, Ints
from advisor.measure.ranks.summary_schema import MAX_CLOCK_DIFFERENCE_NS

END_TOLERANCE_NS = 1_000_000.0
"""Maximum difference of one collective's ends on two ranks, ns. It is up to 0.33 ms on a public
pair of traces (all-gather of 1 GiB over 64 ranks)."""
MIN_MATCHES = 3
"""Minimum shared collectives for knowing the error: one difference always agrees with itself."""
MIN_MATCHES_FOR_DRIFT = 12
"""Minimum collectives of a group that distinguish the drift of its clocks from scatter."""
MAX_DRIFT = 5e-4
"""Maximum drift of a clock: ten times that of a quartz clock. A larger drift counts as none."""
_MAX_ROUNDS = 6


@dataclass(frozen=True)
class Clocks:
    """Corrections that map each rank's clock to the common one: ``t + shift + drift * t``."""

    shift: Floats
    """Shift of each rank, ns, or NaN if not aligned."""
    drift: Floats
    error_ns: float | None
    """Median distance of an end from the median of the others' ends, for the worst hundredth of the
    ranks, ns. ``None`` if not aligned."""
    reason: str
    matched: int
    """Number of collectives shared by aligned ranks."""
    mismatched: Bools
    """Whether each row cannot be one collective."""


def group_medians(values: Floats, first: Ints) -> Floats:
    """Return the median of each non-empty range between neighbours of ``first``."""
    sizes = np.diff(first)
    result = np.empty(len(sizes))
    for count in np.unique(sizes).tolist():  # few distinct sizes: groups are of few sizes
        rows = np.flatnonzero(sizes == count)
        result[rows] = np.median(values[first[rows][:, None] + np.arange(count)], axis=1)
    return result


def align_cells(
    rank: Ints,
    first: Ints,
    start: Floats,
    end: Floats,
    usable: Bools,
    ranks: int,
    *,
    unix: bool,
    pairs: Bools | None = None,
) -> Clocks:
    """Estimate offsets and drifts of ``ranks`` clocks.

    ``rank``, ``start``, ``end`` are by cell, sorted by row. ``first`` has the first cell of each
    row and the number of cells. ``usable`` marks rows that no rank leaves before all have entered.
    ``pairs`` marks rows of a send and its receive, which also end at about the same time: they
    connect ranks that nothing else does (the stages of a pipeline).

    A rank that shares fewer than MIN_MATCHES collectives is not aligned. Rows that one rank leaves
    before another enters, by more than the error of ends, are not one collective. They are dropped
    and the offsets are estimated again. If most are dropped, the others are not reliable: no rank
    is aligned."""
    rank_counts = np.diff(first)
    is_impossible = np.zeros(len(rank_counts), dtype=np.bool_)
    unaligned = np.full(ranks, np.nan)
    if ranks < 2:
        return Clocks(unaligned, np.zeros(ranks), None, "only one rank is here", 0, is_impossible)
    is_used = usable & (rank_counts > 1)
    sends = _AlignmentPart(rank, first, pairs & (rank_counts == 2)) if pairs is not None else None
    if sends is not None and not len(sends.rows):
        sends = None
    if not is_used.any() and sends is None:
        reason = "the ranks have no collectives that can be matched"
        if usable.any():
            reason = "the ranks' collectives cannot be matched: no two ranks have the same one"
        return Clocks(unaligned, np.zeros(ranks), None, reason, 0, is_impossible)
    total = int(is_used.sum())
    shift, drift, spread = unaligned, np.zeros(ranks), unaligned
    for _ in range(_MAX_ROUNDS):  # each round drops impossible rows; usually one round is enough
        part = _AlignmentPart(rank, first, is_used)
        shift, drift, spread = part.align_ranks(end, ranks, sends)
        if not np.isfinite(spread).any() or not len(part.rows):
            break
        correction = shift[part.rank] + drift[part.rank] * end[part.cells]
        ends = end[part.cells] + correction
        starts = start[part.cells] + shift[part.rank] + drift[part.rank] * start[part.cells]
        # ranks with too few collectives say nothing about what is possible
        is_unplaced = ~np.isfinite(ends)
        last_in = np.maximum.reduceat(np.where(is_unplaced, -np.inf, starts), part.bounds[:-1])
        first_out = np.minimum.reduceat(np.where(is_unplaced, np.inf, ends), part.bounds[:-1])
        tolerance = min(2 * _worst(spread), END_TOLERANCE_NS)
        is_dropped = last_in > first_out + tolerance
        if not is_dropped.any():
            break
        is_impossible[part.rows[is_dropped]] = True
        is_used &= ~is_impossible
        if not is_used.any() and sends is None:
            break
    usable_rows = int(is_used.sum())
    if int(is_impossible.sum()) > usable_rows:
        reason = (
            f"of {total} collectives that look the same on several ranks, "
            f"{int(is_impossible.sum())} cannot be: one rank leaves before another enters"
        )
        return Clocks(unaligned, np.zeros(ranks), None, reason, 0, is_impossible)
    if not np.isfinite(shift).any():
        reason = f"no two ranks share more than {MIN_MATCHES - 1} collectives that can be matched"
        return Clocks(unaligned, np.zeros(ranks), None, reason, 0, is_impossible)
    clock_range = float(np.nanmax(shift) - np.nanmin(shift))
    if unix and clock_range > MAX_CLOCK_DIFFERENCE_NS:
        reason = f"the traces were recorded {clock_range / 1e9:.0f} s apart: not one run"
        return Clocks(unaligned, np.zeros(ranks), None, reason, 0, is_impossible)
    return Clocks(shift, drift, _worst(spread), "", usable_rows, is_impossible)


def _worst(spread: Floats) -> float:
    """Return the worst rank's spread, or the worst hundredth with a hundred ranks or more, so that
    a damaged rank does not hide the result of the others."""
    known = np.sort(spread[np.isfinite(spread)])
    if not len(known):
        return float("inf")
    return float(known[max(0, int(np.ceil(0.99 * len(known))) - 1)])


class _AlignmentPart:
    """Cells of the selected rows."""

    def __init__(self, rank: Ints, first: Ints, use: Bools) -> None:
        self.rows = np.flatnonzero(use)
        size = np.diff(first)[self.rows]
        self.bounds = np.concatenate([[0], np.cumsum(size)]).astype(np.int64)
        row_index = np.repeat(np.arange(len(self.rows)), size)
        self.row_index = row_index
        self.cells = (
            first[self.rows][row_index] + np.arange(len(row_index)) - self.bounds[:-1][row_index]
        )
        self.rank = rank[self.cells]
        order = np.argsort(self.rank, kind="stable")
        self.by_rank = order
        self.rank_bounds = np.searchsorted(
            self.rank[order], np.arange(int(rank.max(initial=-1)) + 2)
        )

    def align_ranks(
        self, end: Floats, ranks: int, sends: _AlignmentPart | None
    ) -> tuple[Floats, Floats, Floats]:
        """Return shift, drift and spread by rank, or NaN if not placed."""
        ends = end[self.cells]
        counts = np.bincount(self.rank, minlength=ranks)
        shift, drift = self._place_ranks(ends, ranks, sends, end)
        if sends is not None:
            counts = counts + np.bincount(sends.rank, minlength=ranks)
        shift[counts < MIN_MATCHES] = np.nan
        is_placed = np.isfinite(shift)
        if not is_placed.any():
            return shift, drift, np.full(ranks, np.nan)
        for _ in range(2):
            residual = self._residual(ends, shift, drift)
            for rank_number in np.flatnonzero(is_placed).tolist():
                if len(cells := self._cells_of(rank_number)):
                    shift[rank_number] += float(np.median(residual[cells]))
        residual = self._residual(ends, shift, drift)
        spread = np.full(ranks, np.nan)
        # distance from the others' median: from the median of all, times k / (k - 1)
        count = np.diff(self.bounds)[self.row_index]
        distance = np.abs(residual) * count / (count - 1)
        for rank_number in np.flatnonzero(is_placed).tolist():
            if len(cells := self._cells_of(rank_number)):
                spread[rank_number] = np.median(distance[cells])
        if sends is not None:  # ranks that only send and receive: half of the error of pairs
            pair_error = np.abs(sends._residual(end[sends.cells], shift, drift))
            for rank_number in np.flatnonzero(is_placed & ~np.isfinite(spread)).tolist():
                if len(cells := sends._cells_of(rank_number)):
                    spread[rank_number] = np.median(pair_error[cells])
        reference = int(np.argmax(np.where(is_placed, counts, -1)))
        return shift - shift[reference], drift - drift[reference], spread

    def _cells_of(self, rank: int) -> Ints:
        if rank + 1 >= len(self.rank_bounds):
            return self.by_rank[:0]
        result: Ints = self.by_rank[self.rank_bounds[rank] : self.rank_bounds[rank + 1]]
        return result

    def _residual(self, ends: Floats, shift: Floats, drift: Floats) -> Floats:
        """Return the median of each end's row minus the end, ns."""
        corrected = ends + shift[self.rank] + drift[self.rank] * ends
        is_known = np.isfinite(corrected)
        if is_known.all():
            return np.asarray(group_medians(corrected, self.bounds)[self.row_index] - corrected)
        medians = np.full(len(self.rows), np.nan)
        known_cells = np.flatnonzero(is_known)
        rows, start = np.unique(self.row_index[known_cells], return_index=True)
        medians[rows] = group_medians(corrected[known_cells], np.append(start, len(known_cells)))
        return np.asarray(medians[self.row_index] - corrected)

    def _place_ranks(
        self, ends: Floats, ranks: int, sends: _AlignmentPart | None, end: Floats
    ) -> tuple[Floats, Floats]:
        """Estimate offsets and drifts: first of the members of each group among themselves, then of
        each group relative to groups with common ranks. Unconnected groups are then joined by
        sends."""
        shift, drift = np.full(ranks, np.nan), np.zeros(ranks)
        groups = self._group_rows(ranks) if len(self.rows) else []
        aligned = [(members, *_align_members(ends[cells])) for members, cells in groups]
        of_rank: dict[int, list[int]] = {}
        for number, (members, _, _) in enumerate(aligned):
            for rank in members.tolist():
                of_rank.setdefault(rank, []).append(number)
        weight = [len(cells) * len(members) for members, cells in groups]
        island = np.full(ranks, -1, dtype=np.int64)
        remaining = set(range(len(groups)))
        islands = 0
        while remaining:  # one island of connected groups per round
            reached = [
                max(remaining, key=lambda number: (weight[number], -groups[number][0].min()))
            ]
            shift[aligned[reached[0]][0][0]] = 0.0
            remaining -= set(reached)
            for number in reached:  # the list grows: groups in the order in which they are reached
                members, offset, group_drift = aligned[number]
                is_known = np.isfinite(shift[members])
                offset_shift = float(np.median(shift[members][is_known] + offset[is_known]))
                drift_shift = float(np.median(drift[members][is_known] + group_drift[is_known]))
                added = members[~is_known]
                shift[added], drift[added] = (
                    offset_shift - offset[~is_known],
                    drift_shift - group_drift[~is_known],
                )
                island[members] = islands
                near = {other for rank in members.tolist() for other in of_rank[rank]} & remaining
                reached += sorted(near, key=lambda other: (-weight[other], other))
                remaining -= near
            islands += 1
        if sends is not None:
            unconnected = np.setdiff1d(np.unique(sends.rank), np.flatnonzero(island >= 0))
            island[unconnected] = islands + np.arange(len(unconnected))
            shift[unconnected] = 0.0
            sends.align_islands(end[sends.cells], island, shift, drift)
        largest = np.argmax(np.bincount(island[island >= 0])) if (island >= 0).any() else -1
        shift[island != largest] = np.nan
        return shift, drift

    def align_islands(self, ends: Floats, island: Ints, shift: Floats, drift: Floats) -> None:
        """Align islands of ranks with each other by the ends of the pairs between them."""
        corrected = ends + shift[self.rank] + drift[self.rank] * ends
        cell_a, cell_b = self.bounds[:-1], self.bounds[:-1] + 1  # the cells of each pair
        rank_a, rank_b = self.rank[cell_a], self.rank[cell_b]
        for _ in range(len(np.unique(island[self.rank]))):  # each round joins two islands
            island_a, island_b = island[rank_a], island[rank_b]
            crossing = np.flatnonzero(island_a != island_b)
            if not len(crossing):
                return
            low, high = (
                np.minimum(island_a, island_b)[crossing],
                np.maximum(island_a, island_b)[crossing],
            )
            pair_codes, pair_index, counts = np.unique(
                low * (int(island.max()) + 1) + high, return_inverse=True, return_counts=True
            )
            largest = int(np.argmax(counts))
            rows = crossing[pair_index == largest]
            kept_island, moved_island = divmod(int(pair_codes[largest]), int(island.max()) + 1)
            is_a_kept = island_a[rows] == kept_island
            kept_ends = np.where(is_a_kept, corrected[cell_a[rows]], corrected[cell_b[rows]])
            moved_ends = np.where(is_a_kept, corrected[cell_b[rows]], corrected[cell_a[rows]])
            offset, drifts = _align_members(np.column_stack([kept_ends, moved_ends]))
            drift_shift, offset_shift = float(drifts[0] - drifts[1]), float(offset[0] - offset[1])
            members = np.flatnonzero(island == moved_island)
            shift[members] += offset_shift
            drift[members] += drift_shift
            cells = np.isin(self.rank, members)
            corrected[cells] += offset_shift + drift_shift * ends[cells]
            island[members] = kept_island

    def _group_rows(self, ranks: int) -> list[tuple[Ints, Ints]]:
        """Group rows with the same members: (members, cells as rows x members)."""
        # a row's members as one number: ranks hashed and summed
        seeds = np.random.default_rng(7).integers(1, 1 << 62, size=ranks, dtype=np.int64)
        member_hash = np.add.reduceat(seeds[self.rank], self.bounds[:-1])
        size = np.diff(self.bounds)
        order = np.lexsort((size, member_hash))
        changed = (member_hash[order][1:] != member_hash[order][:-1]) | (
            size[order][1:] != size[order][:-1]
        )
        result = []
        for rows in np.split(order, np.flatnonzero(changed) + 1):
            cells = self.bounds[rows][:, None] + np.arange(size[rows[0]])
            result.append((self.rank[cells[0]], cells))
        return result


def _align_members(ends: Floats) -> tuple[Floats, Floats]:
    """Return offset and drift of each member (column) from the mean of the members, at time 0. Each
    row is a collective, in any order. Drift is 0 with too few collectives."""
    means = ends.mean(axis=1)
    deviations = ends - means[:, None]
    drifts = np.zeros(ends.shape[1])
    if len(ends) >= MIN_MATCHES_FOR_DRIFT:
        order = np.argsort(means, kind="stable")
        third_size = len(ends) // 3
        early, late = order[:third_size], order[-third_size:]
        length = float(np.median(means[late]) - np.median(means[early]))
        if length > 0:
            drifts = (
                np.median(deviations[late], axis=0) - np.median(deviations[early], axis=0)
            ) / length
            drifts[np.abs(drifts) > MAX_DRIFT] = 0.0
    return np.median(deviations - drifts * means[:, None], axis=0), drifts
