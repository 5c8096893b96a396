"""One clock for a thousand ranks, from the ends of the collectives that they leave together.

Time and memory grow with the number of collectives, not with pairs of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from advisor.analysis.clocks import END_TOLERANCE_NS, MAX_CLOCK_DIFFERENCE_NS, MIN_MATCHES

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

MIN_FOR_DRIFT = 24
"""Collectives of a rank from which its clock's drift is told from scatter."""
MAX_DRIFT = 5e-4
"""Ten times what a quartz clock may drift: what looks like more is no drift."""
ROUNDS = 6


@dataclass(frozen=True)
class Clocks:
    """What brings each rank's clock to the common one: ``t + shift + drift * t``."""

    shift: Floats
    """By rank, ns; NaN: not aligned."""
    drift: Floats
    error_ns: float | None
    """Median distance of an end from the middle of the others' ends, of the worst hundredth of the
    ranks, ns; ``None``: not aligned."""
    reason: str
    matched: int
    """Collectives of two or more aligned ranks."""
    broken: Bools
    """By row: it cannot be one collective."""


def medians(values: Floats, first: Ints) -> Floats:
    """Median of each stretch between neighbours of ``first`` (none is empty)."""
    size = np.diff(first)
    found = np.empty(len(size))
    for count in np.unique(size).tolist():  # few distinct sizes: groups are of few sizes
        rows = np.flatnonzero(size == count)
        found[rows] = np.median(values[first[rows][:, None] + np.arange(count)], axis=1)
    return found


def align_cells(
    rank: Ints, first: Ints, start: Floats, end: Floats, usable: Bools, ranks: int, *, unix: bool
) -> Clocks:
    """Offsets and drifts of ``ranks`` clocks.

    ``rank``, ``start``, ``end``: by cell, sorted by row; ``first``: first cell of each row and the
    number of cells; ``usable``: rows that nobody leaves before all have entered.
    """
    seen = np.diff(first)
    broken = np.zeros(len(seen), dtype=np.bool_)
    nothing = np.full(ranks, np.nan)
    if ranks < 2:
        return Clocks(nothing, np.zeros(ranks), None, "only one rank is here", 0, broken)
    use = usable & (seen > 1)
    if not use.any():
        reason = "the ranks have no collectives that can be matched"
        return Clocks(nothing, np.zeros(ranks), None, reason, 0, broken)
    total = int(use.sum())
    shift, drift, spread = nothing, np.zeros(ranks), nothing
    for _ in range(ROUNDS):  # each drops collectives that cannot be one; most need one round
        part = _Part(rank, first, use)
        shift, drift, spread = part.settle(end, ranks)
        if not np.isfinite(spread).any():
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
        if not use.any():
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
    """Of the worst rank; of a hundred and more the worst in a hundred, so that one that is damaged
    does not hide what the others tell."""
    known = np.sort(spread[np.isfinite(spread)])
    if not len(known):
        return float("inf")
    return float(known[max(0, int(np.ceil(0.99 * len(known))) - 1)])


class _Part:
    """The cells of some of the rows."""

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
        self.bounds = np.searchsorted(self.rank[order], np.arange(int(rank.max()) + 2))

    def settle(self, end: Floats, ranks: int) -> tuple[Floats, Floats, Floats]:
        """Shift, drift and spread by rank; NaN: not placed."""
        ends = end[self.cells]
        counts = np.bincount(self.rank, minlength=ranks)
        shift = self._place(ends, ranks)
        shift[counts < MIN_MATCHES] = np.nan
        drift = np.zeros(ranks)
        placed = np.isfinite(shift)
        if not placed.any():
            return shift, drift, np.full(ranks, np.nan)
        for turn in range(4):
            residual = self._residual(ends, shift, drift)
            self._correct(ends, residual, shift, drift, slope=turn > 0)
        residual = self._residual(ends, shift, drift)
        spread = np.full(ranks, np.nan)
        # distance from the others' middle: from the middle of all, times k / (k - 1)
        count = np.diff(self.at)[self.which]
        far = np.abs(residual) * count / (count - 1)
        for each in np.flatnonzero(placed).tolist():
            spread[each] = np.median(far[self._of(each)])
        reference = int(np.argmax(np.where(placed, counts, -1)))
        return shift - shift[reference], drift - drift[reference], spread

    def _of(self, rank: int) -> Ints:
        if rank + 1 >= len(self.bounds):
            return self.by_rank[:0]
        found: Ints = self.by_rank[self.bounds[rank] : self.bounds[rank + 1]]
        return found

    def _residual(self, ends: Floats, shift: Floats, drift: Floats) -> Floats:
        """How much earlier each end is than the middle of its row."""
        moved = ends + shift[self.rank] + drift[self.rank] * ends
        there = np.isfinite(moved)
        if there.all():
            return np.asarray(medians(moved, self.at)[self.which] - moved)
        middle = np.full(len(self.rows), np.nan)
        kept = np.flatnonzero(there)
        rows, begin = np.unique(self.which[kept], return_index=True)
        middle[rows] = medians(moved[kept], np.append(begin, len(kept)))
        return np.asarray(middle[self.which] - moved)

    def _correct(
        self, ends: Floats, residual: Floats, shift: Floats, drift: Floats, *, slope: bool
    ) -> None:
        """Move each rank to the middle of its residuals, and turn it where they lean."""
        for rank in np.flatnonzero(np.isfinite(shift)).tolist():
            cells = self._of(rank)
            left = residual[cells]
            if slope and len(cells) >= MIN_FOR_DRIFT:
                when = ends[cells]
                third = len(cells) // 3
                order = np.argsort(when, kind="stable")
                early, late = order[:third], order[-third:]
                length = float(np.median(when[late]) - np.median(when[early]))
                lean = float(np.median(left[late]) - np.median(left[early]))
                if length > 0 and abs(lean) < MAX_DRIFT * length:
                    drift[rank] += lean / length
                    left = left - lean / length * when
            shift[rank] += float(np.median(left))

    def _place(self, ends: Floats, ranks: int) -> Floats:
        """First offsets: group by group, each group brought to those that it shares ranks with."""
        shift = np.full(ranks, np.nan)
        relative = ends - medians(ends, self.at)[self.which]
        groups = self._groups(ranks)
        inside: list[tuple[Ints, Floats]] = []
        for members, cells in groups:
            # the cells of a group are a matrix: a row a collective, a column a member
            inside.append((members, np.median(relative[cells], axis=0)))
        of_rank: dict[int, list[int]] = {}
        for number, (members, _) in enumerate(inside):
            for rank in members.tolist():
                of_rank.setdefault(rank, []).append(number)
        weight = [len(cells) * len(members) for members, cells in groups]
        done: set[int] = set()
        start = int(np.argmax(weight))
        members, middle = inside[start]
        shift[members] = -middle
        queue = [start]
        while queue:  # groups in the order in which they are reached
            reached = queue.pop(0)
            if reached in done:
                continue
            done.add(reached)
            members, middle = inside[reached]
            known = np.isfinite(shift[members])
            level = float(np.median(shift[members][known] + middle[known]))
            fresh = members[~known]
            shift[fresh] = level - middle[~known]
            around = {
                number
                for rank in members.tolist()
                for number in of_rank[rank]
                if number not in done
            }
            queue += sorted(around, key=lambda number: (-weight[number], number))
        return shift

    def _groups(self, ranks: int) -> list[tuple[Ints, Ints]]:
        """Rows with the same members: (members, cells as rows x members)."""
        # a row's members as one number: ranks hashed and summed
        seed = np.random.default_rng(7).integers(1, 1 << 62, size=ranks, dtype=np.int64)
        mark = np.add.reduceat(seed[self.rank], self.at[:-1])
        size = np.diff(self.at)
        order = np.lexsort((size, mark))
        changed = (mark[order][1:] != mark[order][:-1]) | (size[order][1:] != size[order][:-1])
        found = []
        for rows in np.split(order, np.flatnonzero(changed) + 1):
            cells = self.at[rows][:, None] + np.arange(size[rows[0]])
            found.append((self.rank[cells[0]], cells))
        return found
