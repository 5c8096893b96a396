"""Alignment of a thousand ranks' clocks by the ends of collectives, which ranks leave together.

Time and memory grow with the number of collectives, not with pairs of ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from advisor.core.intervals import Bools, Floats, Ints
from advisor.measure.ranks.summary_schema import MAX_CLOCK_DIFFERENCE_NS

END_TOLERANCE_NS = 1_000_000.0
"""Largest difference of one collective's ends on two ranks, ns: up to 0.33 ms on a public pair of
traces (all-gather of 1 GiB over 64 ranks)."""
MIN_MATCHES = 3
"""Shared collectives from which the error is known: one difference always agrees with itself."""
MIN_FOR_DRIFT = 12
"""Collectives of a group from which the drift of its clocks differs from scatter."""
MAX_DRIFT = 5e-4
"""Largest drift of a clock: ten times a quartz clock's; more is taken for no drift."""
ROUNDS = 6


@dataclass(frozen=True)
class Clocks:
    """Corrections that bring each rank's clock to the common one: ``t + shift + drift * t``."""

    shift: Floats
    """Shift of each rank, ns; NaN: not aligned."""
    drift: Floats
    error_ns: float | None
    """Median distance of an end from the median of the others' ends, of the worst hundredth of the
    ranks, ns; ``None``: not aligned."""
    reason: str
    matched: int
    """Number of collectives of two or more aligned ranks."""
    mismatched: Bools
    """Whether each row cannot be one collective."""


def group_medians(values: Floats, first: Ints) -> Floats:
    """Return the median of each stretch between neighbours of ``first`` (none is empty)."""
    size = np.diff(first)
    result = np.empty(len(size))
    for count in np.unique(size).tolist():  # few distinct sizes: groups are of few sizes
        rows = np.flatnonzero(size == count)
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

    ``rank``, ``start``, ``end``: by cell, sorted by row; ``first``: first cell of each row and the
    number of cells; ``usable``: rows that nobody leaves before all have entered; ``pairs``: rows of
    a send and its receive, which end together too, about: they join what nothing else does (the
    stages of a pipeline).

    A rank that shares fewer than MIN_MATCHES is not aligned. Rows that one rank leaves before
    another enters, by more than the error of ends, are not one collective: they are dropped and the
    offsets taken again. When most are, nothing is known about the others: nobody is aligned."""
    seen = np.diff(first)
    broken = np.zeros(len(seen), dtype=np.bool_)
    nothing = np.full(ranks, np.nan)
    if ranks < 2:
        return Clocks(nothing, np.zeros(ranks), None, "only one rank is here", 0, broken)
    use = usable & (seen > 1)
    sends = _AlignmentPart(rank, first, pairs & (seen == 2)) if pairs is not None else None
    if sends is not None and not len(sends.rows):
        sends = None
    if not use.any() and sends is None:
        reason = "the ranks have no collectives that can be matched"
        if usable.any():
            reason = "the ranks' collectives cannot be matched: no two ranks have the same one"
        return Clocks(nothing, np.zeros(ranks), None, reason, 0, broken)
    total = int(use.sum())
    shift, drift, spread = nothing, np.zeros(ranks), nothing
    for _ in range(ROUNDS):  # each drops collectives that cannot be one; most need one round
        part = _AlignmentPart(rank, first, use)
        shift, drift, spread = part.align_ranks(end, ranks, sends)
        if not np.isfinite(spread).any() or not len(part.rows):
            break
        move = shift[part.rank] + drift[part.rank] * end[part.cells]
        ends = end[part.cells] + move
        starts = start[part.cells] + shift[part.rank] + drift[part.rank] * start[part.cells]
        # ranks with too few are no measure of what is possible
        out = ~np.isfinite(ends)
        last_in = np.maximum.reduceat(np.where(out, -np.inf, starts), part.at[:-1])
        first_out = np.minimum.reduceat(np.where(out, np.inf, ends), part.at[:-1])
        tolerance = min(2 * _worst(spread), END_TOLERANCE_NS)
        impossible = last_in > first_out + tolerance
        if not impossible.any():
            break
        broken[part.rows[impossible]] = True
        use &= ~broken
        if not use.any() and sends is None:
            break
    left = int(use.sum())
    if int(broken.sum()) > left:
        reason = (
            f"of {total} collectives that look the same on several ranks, {int(broken.sum())} "
            "cannot be: one rank leaves before another enters"
        )
        return Clocks(nothing, np.zeros(ranks), None, reason, 0, broken)
    if not np.isfinite(shift).any():
        reason = f"no two ranks share more than {MIN_MATCHES - 1} collectives that can be matched"
        return Clocks(nothing, np.zeros(ranks), None, reason, 0, broken)
    apart = float(np.nanmax(shift) - np.nanmin(shift))
    if unix and apart > MAX_CLOCK_DIFFERENCE_NS:
        reason = f"the traces were recorded {apart / 1e9:.0f} s apart: not one run"
        return Clocks(nothing, np.zeros(ranks), None, reason, 0, broken)
    return Clocks(shift, drift, _worst(spread), "", left, broken)


def _worst(spread: Floats) -> float:
    """Return the worst rank's spread; of a hundred ranks and more the worst in a hundred, so that a
    damaged one does not hide what the others tell."""
    known = np.sort(spread[np.isfinite(spread)])
    if not len(known):
        return float("inf")
    return float(known[max(0, int(np.ceil(0.99 * len(known))) - 1)])


class _AlignmentPart:
    """Cells of some of the rows."""

    def __init__(self, rank: Ints, first: Ints, use: Bools) -> None:
        self.rows = np.flatnonzero(use)
        size = np.diff(first)[self.rows]
        self.at = np.concatenate([[0], np.cumsum(size)]).astype(np.int64)
        which = np.repeat(np.arange(len(self.rows)), size)
        self.which = which
        self.cells = first[self.rows][which] + np.arange(len(which)) - self.at[:-1][which]
        self.rank = rank[self.cells]
        order = np.argsort(self.rank, kind="stable")
        self.by_rank = order
        self.bounds = np.searchsorted(self.rank[order], np.arange(int(rank.max(initial=-1)) + 2))

    def align_ranks(
        self, end: Floats, ranks: int, sends: _AlignmentPart | None
    ) -> tuple[Floats, Floats, Floats]:
        """Return shift, drift and spread by rank; NaN: not placed."""
        ends = end[self.cells]
        counts = np.bincount(self.rank, minlength=ranks)
        shift, drift = self._place(ends, ranks, sends, end)
        if sends is not None:
            counts = counts + np.bincount(sends.rank, minlength=ranks)
        shift[counts < MIN_MATCHES] = np.nan
        placed = np.isfinite(shift)
        if not placed.any():
            return shift, drift, np.full(ranks, np.nan)
        for _ in range(2):
            residual = self._residual(ends, shift, drift)
            for each in np.flatnonzero(placed).tolist():
                if len(cells := self._of(each)):
                    shift[each] += float(np.median(residual[cells]))
        residual = self._residual(ends, shift, drift)
        spread = np.full(ranks, np.nan)
        # distance from the others' middle: from the middle of all, times k / (k - 1)
        count = np.diff(self.at)[self.which]
        far = np.abs(residual) * count / (count - 1)
        for each in np.flatnonzero(placed).tolist():
            if len(cells := self._of(each)):
                spread[each] = np.median(far[cells])
        if sends is not None:  # of ranks that only send and receive: half of what pairs miss
            apart = np.abs(sends._residual(end[sends.cells], shift, drift))
            for each in np.flatnonzero(placed & ~np.isfinite(spread)).tolist():
                if len(cells := sends._of(each)):
                    spread[each] = np.median(apart[cells])
        reference = int(np.argmax(np.where(placed, counts, -1)))
        return shift - shift[reference], drift - drift[reference], spread

    def _of(self, rank: int) -> Ints:
        if rank + 1 >= len(self.bounds):
            return self.by_rank[:0]
        result: Ints = self.by_rank[self.bounds[rank] : self.bounds[rank + 1]]
        return result

    def _residual(self, ends: Floats, shift: Floats, drift: Floats) -> Floats:
        """Return how much earlier each end is than the median of its row, ns."""
        moved = ends + shift[self.rank] + drift[self.rank] * ends
        there = np.isfinite(moved)
        if there.all():
            return np.asarray(group_medians(moved, self.at)[self.which] - moved)
        middle = np.full(len(self.rows), np.nan)
        kept = np.flatnonzero(there)
        rows, begin = np.unique(self.which[kept], return_index=True)
        middle[rows] = group_medians(moved[kept], np.append(begin, len(kept)))
        return np.asarray(middle[self.which] - moved)

    def _place(
        self, ends: Floats, ranks: int, sends: _AlignmentPart | None, end: Floats
    ) -> tuple[Floats, Floats]:
        """Estimate offsets and drifts: of the members of each group among themselves, then group by
        group, each brought to those that it shares ranks with; what is not connected by that is
        then joined by sends."""
        shift, drift = np.full(ranks, np.nan), np.zeros(ranks)
        groups = self._groups(ranks) if len(self.rows) else []
        inside = [(members, *_within(ends[cells])) for members, cells in groups]
        of_rank: dict[int, list[int]] = {}
        for number, (members, _, _) in enumerate(inside):
            for rank in members.tolist():
                of_rank.setdefault(rank, []).append(number)
        weight = [len(cells) * len(members) for members, cells in groups]
        island = np.full(ranks, -1, dtype=np.int64)
        left = set(range(len(groups)))
        islands = 0
        while left:  # an island of connected groups a round
            reached = [max(left, key=lambda number: (weight[number], -groups[number][0].min()))]
            shift[inside[reached[0]][0][0]] = 0.0
            left -= set(reached)
            for number in reached:  # grows: groups in the order in which they are reached
                members, offset, lean = inside[number]
                known = np.isfinite(shift[members])
                level = float(np.median(shift[members][known] + offset[known]))
                turn = float(np.median(drift[members][known] + lean[known]))
                fresh = members[~known]
                shift[fresh], drift[fresh] = level - offset[~known], turn - lean[~known]
                island[members] = islands
                around = {other for rank in members.tolist() for other in of_rank[rank]} & left
                reached += sorted(around, key=lambda other: (-weight[other], other))
                left -= around
            islands += 1
        if sends is not None:
            alone = np.setdiff1d(np.unique(sends.rank), np.flatnonzero(island >= 0))
            island[alone] = islands + np.arange(len(alone))
            shift[alone] = 0.0
            sends.align_islands(end[sends.cells], island, shift, drift)
        largest = np.argmax(np.bincount(island[island >= 0])) if (island >= 0).any() else -1
        shift[island != largest] = np.nan
        return shift, drift

    def align_islands(self, ends: Floats, island: Ints, shift: Floats, drift: Floats) -> None:
        """Move islands of ranks to each other, by the ends of the pairs between them."""
        moved = ends + shift[self.rank] + drift[self.rank] * ends
        item, two = self.at[:-1], self.at[:-1] + 1  # the cells of each pair
        here, there = self.rank[item], self.rank[two]
        for _ in range(len(np.unique(island[self.rank]))):  # each joins two islands
            a, b = island[here], island[there]
            across = np.flatnonzero(a != b)
            if not len(across):
                return
            low, high = np.minimum(a, b)[across], np.maximum(a, b)[across]
            names, which, counts = np.unique(
                low * (int(island.max()) + 1) + high, return_inverse=True, return_counts=True
            )
            most = int(np.argmax(counts))
            rows = across[which == most]
            keep, move = divmod(int(names[most]), int(island.max()) + 1)
            kept_first = a[rows] == keep
            kept = np.where(kept_first, moved[item[rows]], moved[two[rows]])
            other = np.where(kept_first, moved[two[rows]], moved[item[rows]])
            offset, lean = _within(np.column_stack([kept, other]))
            turn, level = float(lean[0] - lean[1]), float(offset[0] - offset[1])
            members = np.flatnonzero(island == move)
            shift[members] += level
            drift[members] += turn
            cells = np.isin(self.rank, members)
            moved[cells] += level + turn * ends[cells]
            island[members] = keep

    def _groups(self, ranks: int) -> list[tuple[Ints, Ints]]:
        """Group rows with the same members: (members, cells as rows x members)."""
        # a row's members as one number: ranks hashed and summed
        seed = np.random.default_rng(7).integers(1, 1 << 62, size=ranks, dtype=np.int64)
        mark = np.add.reduceat(seed[self.rank], self.at[:-1])
        size = np.diff(self.at)
        order = np.lexsort((size, mark))
        changed = (mark[order][1:] != mark[order][:-1]) | (size[order][1:] != size[order][:-1])
        result = []
        for rows in np.split(order, np.flatnonzero(changed) + 1):
            cells = self.at[rows][:, None] + np.arange(size[rows[0]])
            result.append((self.rank[cells[0]], cells))
        return result


def _within(ends: Floats) -> tuple[Floats, Floats]:
    """Return offset and drift of each member (column) from the mean of the members, at time 0; each
    row is a collective, in order of time or not. Drift is 0 where there are too few to tell."""
    middle = ends.mean(axis=1)
    apart = ends - middle[:, None]
    lean = np.zeros(ends.shape[1])
    if len(ends) >= MIN_FOR_DRIFT:
        order = np.argsort(middle, kind="stable")
        third = len(ends) // 3
        early, late = order[:third], order[-third:]
        length = float(np.median(middle[late]) - np.median(middle[early]))
        if length > 0:
            lean = (np.median(apart[late], axis=0) - np.median(apart[early], axis=0)) / length
            lean[np.abs(lean) > MAX_DRIFT] = 0.0
    return np.median(apart - lean * middle[:, None], axis=0), lean
