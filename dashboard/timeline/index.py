"""The lane index: every slice of a rank's window in columns, lane after lane, ordered by start."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from advisor.core.intervals import Ints
from advisor.dashboard.timeline.pyramid import Level

if TYPE_CHECKING:
    from advisor.dashboard.timeline.counters import Counter

Source = Literal["steps", "cpu", "gpu", "gaps", "sync", "activity", "recorded"]
"""Table that a lane's rows are rows of: those of the trace, ``Analysis.steps.table``,
``Analysis.gaps``; ``activity``: rows of ``trace.cpu``, -1 none;
``recorded``: steps of the record."""

MOST_LANES = 4096
"""A hostile file can have any number of threads; what is left out is told in ``notes``."""
BLOCK = 16
"""Slices for which the longest duration is kept: long ones are found by it."""


@dataclass(frozen=True)
class Lane:
    """One row of the picture. Its slices are ``lo`` to ``hi`` of the columns; they do not
    overlap, so starts and ends are both in order."""

    group: int
    depth: int
    source: Source
    base: int
    """Category of slot 0."""
    lo: int
    hi: int


@dataclass(frozen=True)
class Group:
    """Lanes that belong together, under one label."""

    key: str
    """Stable: ``steps``, ``gaps``, ``stream:0:7``, ``thread:1`` …"""
    label: str
    kind: str
    """``steps``, ``phases``, ``idle``, ``stream``, ``collectives``, ``copies``, ``sync``,
    ``thread``, ``overhead``."""
    first: int
    """Number of its first lane."""
    count: int
    folded: bool = False
    """Starts collapsed: only its first lane is shown."""


@dataclass(frozen=True)
class Index:
    """Columns over all slices, aligned with each other. Times are ns of the trace."""

    start: Ints
    end: Ints
    """Never beyond the start of the next slice of the lane; details tell the true end."""
    name: NDArray[np.uint32]
    """Place in ``names``."""
    slot: NDArray[np.uint8]
    """Category within the lane's set."""
    row: NDArray[np.int32]
    """Row of the lane's source table, -1: none."""
    lanes: tuple[Lane, ...]
    groups: tuple[Group, ...]
    names: list[str]
    """Distinct names, those with most time first."""
    framework: str | None = field(default=None, kw_only=True)
    """What the program is written with: some categories are called otherwise there."""
    place: dict[str, NDArray[np.int32]]
    """``cpu`` and ``gpu``: aligned with the table, the slice that shows each row, -1: none."""
    longest: Ints
    """Longest duration of each BLOCK slices, ns."""
    pyramid: dict[int, Level]
    """Cells of the narrow slices, by level."""
    begin: int
    """First instant with anything, ns."""
    finish: int
    """Last one."""
    counters: tuple[Counter, ...] = ()
    notes: tuple[str, ...] = field(default=())
    """What is missing and why, a line each."""

    def __len__(self) -> int:
        return len(self.start)

    @property
    def nbytes(self) -> int:
        """Memory of the columns and cells, bytes, without the names."""
        own = self.start.nbytes + self.end.nbytes + self.name.nbytes + self.slot.nbytes
        own += self.row.nbytes + self.longest.nbytes
        own += sum(column.nbytes for column in self.place.values())
        cells = sum(
            level.first.nbytes + sum(column.nbytes for column in level.runs)
            for level in self.pyramid.values()
        )
        return own + cells + sum(c.ts.nbytes + c.value.nbytes for c in self.counters)

    def lane_of(self, position: int) -> int:
        """Number of the lane that a slice is in."""
        ends = [lane.hi for lane in self.lanes]
        return int(np.searchsorted(ends, position, side="right"))

    def within(self, lane: int, x0: int, x1: int) -> tuple[int, int]:
        """Positions of the lane's slices that end after ``x0`` and start before ``x1``."""
        of = self.lanes[lane]
        lo = of.lo + int(np.searchsorted(self.end[of.lo : of.hi], x0, side="right"))
        hi = of.lo + int(np.searchsorted(self.start[of.lo : of.hi], x1, side="left"))
        return lo, max(lo, hi)
