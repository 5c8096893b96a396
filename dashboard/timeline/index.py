"""The lane index: every slice of a rank's window in columns, lane after lane, ordered by start."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.intervals import Ints
from advisor.dashboard.timeline.counters import CounterSeries
from advisor.dashboard.timeline.detail_levels import (
    ALL,
    BASE,
    BLOCK,
    Category,
    DetailLevel,
    build_pyramid,
    category_label,
)

LaneSource = Literal["steps", "cpu", "gpu", "gaps", "sync", "activity", "recorded"]
"""Table that a lane's rows are rows of: those of the trace, ``Analysis.steps.table``,
``Analysis.gaps``; ``activity``: rows of ``trace.cpu``, -1 none;
``recorded``: steps of the record."""

MAX_LANES = 4096
"""Number of lanes: a hostile file can have any number; ``notes`` counts those left out."""


@dataclass(frozen=True)
class TimelineLane:
    """Row of the picture. Its slices are ``lo`` to ``hi`` of the columns; they do not overlap, so
    starts and ends are both in order."""

    group: int
    depth: int
    source: LaneSource
    base: int
    """Category of slot 0."""
    lo: int
    hi: int


@dataclass(frozen=True)
class LaneGroup:
    """Lanes that belong together, under one label."""

    key: str
    """Key that is stable: ``steps``, ``gaps``, ``stream:0:7``, ``thread:1`` …"""
    label: str
    kind: str
    """``steps``, ``phases``, ``idle``, ``stream``, ``collectives``, ``copies``, ``sync``,
    ``thread``, ``overhead``."""
    first_lane: int
    """Number of its first lane."""
    count: int
    folded: bool = False
    """Whether it starts collapsed: only its first lane is shown."""


@dataclass(frozen=True)
class TimelineIndex:
    """Columns over all slices, aligned with each other. Times are ns of the trace."""

    start: Ints
    end: Ints
    """Ends, never beyond the start of the lane's next slice; details have the true end."""
    name: NDArray[np.uint32]
    """Place in ``names``."""
    slot: NDArray[np.uint8]
    """Category within the lane's set."""
    row: NDArray[np.int32]
    """Row of the lane's source table, -1: none."""
    lanes: tuple[TimelineLane, ...]
    groups: tuple[LaneGroup, ...]
    names: list[str]
    """Distinct names, those with most time first."""
    framework: str | None = field(default=None, kw_only=True)
    """Framework of the program: some categories have other names there."""
    outside: bool = field(default=False, kw_only=True)
    """Whether idle time of an unknown cause is of code outside operators."""
    slice_of_row: dict[str, NDArray[np.int32]]
    """Slice that shows each row of the tables ``cpu`` and ``gpu``, aligned with them; -1: none."""
    longest: Ints
    """Longest duration of each BLOCK slices, ns."""
    pyramid: dict[int, DetailLevel]
    """Cells of the narrow slices, by level."""
    begin: int
    """First instant with any slice, ns."""
    finish: int
    """Last such instant, ns."""
    counters: tuple[CounterSeries, ...] = ()
    notes: tuple[str, ...] = field(default=())
    """Reasons why something is missing, a line each."""

    def __len__(self) -> int:
        return len(self.start)

    def lane_of(self, position: int) -> int:
        ends = [lane.hi for lane in self.lanes]
        return int(np.searchsorted(ends, position, side="right"))

    def category(self, position: int) -> str:
        """Name a slice's category in the words of the framework of the program."""
        lane = self.lanes[self.lane_of(position)]
        return category_label(ALL[lane.base + int(self.slot[position])], self)

    def within(self, lane: int, x0: int, x1: int) -> tuple[int, int]:
        """Return positions of the lane's slices that end after ``x0`` and start before ``x1``."""
        bounds = self.lanes[lane]
        lo = bounds.lo + int(np.searchsorted(self.end[bounds.lo : bounds.hi], x0, side="right"))
        hi = bounds.lo + int(np.searchsorted(self.start[bounds.lo : bounds.hi], x1, side="left"))
        return lo, max(lo, hi)


CategorySet = tuple[Category, ...]


class IndexBuilder:
    """Lanes in the order of the picture; ``index`` joins their columns."""

    def __init__(self, shown: Callable[[str], str] = str) -> None:
        self.names = NameTable(shown)
        self.columns: list[tuple[NDArray[Any], ...]] = []
        self.lanes: list[TimelineLane] = []
        self.groups: list[LaneGroup] = []
        self.size = 0
        self.notes: list[str] = []

    def group(
        self,
        key: str,
        label: str,
        kind: str,
        parts: list[tuple[LaneSource, CategorySet, Ints, Ints, Any, Any, Any]],
        folded: bool = False,
    ) -> None:
        """Add a group of lanes: (source, set, start, end, name, slot, row) each."""
        parts = [part for part in parts if len(part[2])]
        room = MAX_LANES - len(self.lanes)
        if len(parts) > room:
            self.notes.append(f"{label}: {len(parts) - room} lanes are not shown")
            parts = parts[: max(room, 0)]
        if not parts:
            return
        first = len(self.lanes)
        for depth, (source, categories, start, end, name, slot, row) in enumerate(parts):
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
            self.lanes.append(TimelineLane(number, depth, source, BASE[categories], lo, self.size))
        self.groups.append(LaneGroup(key, label, kind, first, len(parts), folded))

    def tracks(
        self,
        key: str,
        label: str,
        kind: str,
        source: LaneSource,
        categories: CategorySet,
        columns: tuple[Any, ...],
        folded: bool = False,
    ) -> None:
        """Add slices that may overlap: (start, end, name, slot, row), in any order."""
        start, end, name, slot, row = (np.asarray(column) for column in columns)
        if not len(start):
            return
        order = np.argsort(start, kind="stable")
        start, end, name, slot, row = (c[order] for c in (start, end, name, slot, row))
        track = assign_tracks(start, end)
        parts = [
            (source, categories, start[rows], end[rows], name[rows], slot[rows], row[rows])
            for rows in (np.flatnonzero(track == n) for n in range(int(track.max()) + 1))
        ]
        self.group(key, label, kind, parts, folded)

    def index(self, counters: tuple[CounterSeries, ...] = ()) -> TimelineIndex:
        """Build the index of all lanes; ``place`` is left empty."""
        start, end, name, slot, row = (
            np.concatenate([*(column[i] for column in self.columns), np.zeros(0, dtype=kind)])
            for i, kind in enumerate((np.int64, np.int64, np.uint32, np.uint8, np.int32))
        )
        self.columns.clear()
        name, names = self.names.sort_by_time(name, end - start)
        begin = int(start.min()) if len(start) else 0
        finish = max(int(end.max()) if len(end) else 0, begin + 1)
        bounds = [(lane.lo, lane.hi) for lane in self.lanes]
        return TimelineIndex(
            start=start,
            end=end,
            name=name,
            slot=slot,
            row=row,
            lanes=tuple(self.lanes),
            groups=tuple(self.groups),
            names=names,
            slice_of_row={},
            longest=_longest(end - start),
            pyramid=build_pyramid(bounds, start, end, slot, begin, finish - begin),
            begin=begin,
            finish=finish,
            counters=counters,
            notes=tuple(self.notes),
        )


def _longest(duration: Ints) -> Ints:
    """Return the longest of each BLOCK durations."""
    if not len(duration):
        return duration
    longest: Ints = np.maximum.reduceat(duration, np.arange(0, len(duration), BLOCK))
    return longest


class NameTable:
    """Table of names, collected from all tables."""

    def __init__(self, shown: Callable[[str], str] = str) -> None:
        """``shown``: what a name is called where that is not what it is."""
        self._number: dict[str, int] = {}
        self._shown = shown

    def number_of(self, text: str) -> int:
        text = self._shown(text)
        return self._number.setdefault(text, len(self._number))

    def column(self, names: pl.Series) -> NDArray[np.uint32]:
        """Number a column of categories or strings; null is the empty name."""
        if names.dtype == pl.String:
            names = names.cast(pl.Categorical)
        unique = names.unique().drop_nulls()
        codes = unique.to_physical().to_numpy().astype(np.int64)
        missing = int(codes.max()) + 1 if len(codes) else 0
        table = np.full(
            missing + 1, self.number_of("") if names.null_count() else 0, dtype=np.uint32
        )
        # one look at each distinct name
        table[codes] = [self.number_of(text) for text in unique.cast(pl.String).to_list()]
        numbers: NDArray[np.uint32] = table[names.to_physical().fill_null(missing).to_numpy()]
        return numbers

    def sort_by_time(
        self, name: NDArray[np.uint32], duration: Ints
    ) -> tuple[NDArray[np.uint32], list[str]]:
        """Renumber names so that those with most time come first; return numbers and names."""
        texts = list(self._number)
        total = np.bincount(name, weights=duration, minlength=len(texts))
        order = np.argsort(-total, kind="stable")
        renewed = np.empty(len(texts), dtype=np.uint32)
        renewed[order] = np.arange(len(texts), dtype=np.uint32)
        return renewed[name], [texts[i] for i in order]


MAX_TRACKS = 12
"""Number of tracks: more would fill the screen; slices without a free track go to the last."""
MAX_LOOPED = 300_000
"""Number of overlapping slices that are placed one by one: about 0.2 s."""


def assign_tracks(start: Ints, end: Ints, max_tracks: int = MAX_TRACKS) -> NDArray[np.int64]:
    """Return each slice's track (ordered by start): the first free one, at most ``max_tracks``.

    Slices that overlap none are on track 0. Beyond MAX_LOOPED overlapping slices they take
    turns, whether a track is free or not."""
    track = np.zeros(len(start), dtype=np.int64)
    if len(start) < 2:
        return track
    latest_end = np.maximum.accumulate(end)
    clash = np.zeros(len(start), dtype=bool)
    clash[1:] = start[1:] < latest_end[:-1]
    rows = np.flatnonzero(clash)
    if not len(rows):
        return track
    if len(rows) > MAX_LOOPED:
        track[rows] = np.arange(1, len(rows) + 1) % max_tracks
        return track
    # Where a slice goes depends on where those before it went: a loop over the overlapping ones
    # only, each stretch of which begins with the slice before it.
    first = rows[np.append(True, np.diff(rows) > 1)] - 1
    look = np.union1d(rows, first)
    free: list[int] = []
    for row, begin, finish, new in zip(
        look.tolist(), start[look].tolist(), end[look].tolist(), ~clash[look], strict=True
    ):
        if new:
            free = []
        for number, until in enumerate(free):
            if until <= begin:
                free[number] = finish
                track[row] = number
                break
        else:
            if len(free) < max_tracks:
                free.append(finish)
            else:
                free[-1] = max(free[-1], finish)
            track[row] = len(free) - 1
    return track
