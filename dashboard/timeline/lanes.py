"""Lanes put together: groups of slices in the order of the picture, joined into one index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from advisor.core.intervals import Ints
from advisor.dashboard.timeline.categories import BASE, Category
from advisor.dashboard.timeline.counters import Counter
from advisor.dashboard.timeline.index import BLOCK, MOST_LANES, Group, Index, Lane, Source
from advisor.dashboard.timeline.naming import Names
from advisor.dashboard.timeline.pyramid import build_pyramid
from advisor.dashboard.timeline.tracks import lay

Set = tuple[Category, ...]


class Lanes:
    """Lanes in the order of the picture; ``index`` joins their columns."""

    def __init__(self, shown: Callable[[str], str] = str) -> None:
        self.names = Names(shown)
        self.columns: list[tuple[NDArray[Any], ...]] = []
        self.lanes: list[Lane] = []
        self.groups: list[Group] = []
        self.size = 0
        self.notes: list[str] = []

    def group(
        self,
        key: str,
        label: str,
        kind: str,
        parts: list[tuple[Source, Set, Ints, Ints, Any, Any, Any]],
        folded: bool = False,
    ) -> None:
        """Add a group of lanes: (source, set, start, end, name, slot, row) each."""
        parts = [part for part in parts if len(part[2])]
        room = MOST_LANES - len(self.lanes)
        if len(parts) > room:
            self.notes.append(f"{label}: {len(parts) - room} lanes are left out")
            parts = parts[: max(room, 0)]
        if not parts:
            return
        first = len(self.lanes)
        for depth, (source, of, start, end, name, slot, row) in enumerate(parts):
            end = np.maximum(end, start)
            # a hostile or repaired file: what would overlap is shown up to the next slice
            end[:-1] = np.minimum(end[:-1], start[1:])
            self.columns.append(
                (
                    start,
                    end,
                    np.asarray(name, dtype=np.uint32),
                    np.asarray(slot, dtype=np.uint8),
                    np.asarray(row, dtype=np.int32),
                )
            )
            lo, self.size = self.size, self.size + len(start)
            number = len(self.groups)
            self.lanes.append(Lane(number, depth, source, BASE[of], lo, self.size))
        self.groups.append(Group(key, label, kind, first, len(parts), folded))

    def tracks(
        self,
        key: str,
        label: str,
        kind: str,
        source: Source,
        of: Set,
        columns: tuple[Any, ...],
        folded: bool = False,
    ) -> None:
        """Add slices that may overlap: (start, end, name, slot, row), in any order."""
        start, end, name, slot, row = (np.asarray(column) for column in columns)
        if not len(start):
            return
        order = np.argsort(start, kind="stable")
        start, end, name, slot, row = (c[order] for c in (start, end, name, slot, row))
        track = lay(start, end)
        parts = [
            (source, of, start[at], end[at], name[at], slot[at], row[at])
            for at in (np.flatnonzero(track == n) for n in range(int(track.max()) + 1))
        ]
        self.group(key, label, kind, parts, folded)

    def index(self, counters: tuple[Counter, ...] = ()) -> Index:
        """The index of all lanes; ``place`` is left empty."""
        start, end, name, slot, row = (
            np.concatenate([*(column[i] for column in self.columns), np.zeros(0, dtype=kind)])
            for i, kind in enumerate((np.int64, np.int64, np.uint32, np.uint8, np.int32))
        )
        self.columns.clear()
        name, names = self.names.by_time(name, end - start)
        begin = int(start.min()) if len(start) else 0
        finish = max(int(end.max()) if len(end) else 0, begin + 1)
        bounds = [(lane.lo, lane.hi) for lane in self.lanes]
        return Index(
            start=start,
            end=end,
            name=name,
            slot=slot,
            row=row,
            lanes=tuple(self.lanes),
            groups=tuple(self.groups),
            names=names,
            place={},
            longest=_longest(end - start),
            pyramid=build_pyramid(bounds, start, end, slot, begin, finish - begin),
            begin=begin,
            finish=finish,
            counters=counters,
            notes=tuple(self.notes),
        )


def _longest(duration: Ints) -> Ints:
    """Longest of each BLOCK durations."""
    if not len(duration):
        return duration
    found: Ints = np.maximum.reduceat(duration, np.arange(0, len(duration), BLOCK))
    return found
