"""Timeline index: all slices of a rank's window as columns, lane by lane, sorted by start."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.intervals import Ints
from advisor.dashboard.timeline.counters import CounterSeries
from advisor.dashboard.timeline.detail_levels import (
    ALL_CATEGORIES,
    BLOCK_SIZE,
    FIRST_CATEGORY,
    Category,
    DetailLevel,
    build_pyramid,
    category_label,
)

LaneSource = Literal["steps", "cpu", "gpu", "gaps", "sync", "activity", "recorded"]
"""Table that the rows of a lane's slices belong to.

``cpu``, ``gpu`` and ``sync`` are tables of the trace; ``steps`` and ``gaps`` of the analysis.
``activity``: rows of ``trace.cpu``, -1 for none. ``recorded``: steps of the record."""

_MAX_LANES = 4096
"""Limit of the number of lanes, for hostile files. ``notes`` counts the omitted ones."""


@dataclass(frozen=True)
class TimelineLane:
    """Row of the timeline. Its slices are ``first_slice`` to ``end_slice`` of the columns.

    They do not overlap, so their starts and their ends are sorted."""

    group: int
    depth: int
    source: LaneSource
    base: int
    """Index of the category with slot 0 in ``ALL_CATEGORIES``."""
    first_slice: int
    end_slice: int


@dataclass(frozen=True)
class LaneGroup:
    """Group of lanes under one label."""

    key: str
    """Key for addresses, such as ``steps``, ``gaps``, ``stream:0:7``, ``thread:1``."""
    label: str
    kind: str
    """``steps``, ``phases``, ``idle``, ``stream``, ``collectives``, ``copies``, ``sync``,
    ``thread``, ``overhead``."""
    first_lane: int
    """Index of its first lane."""
    count: int
    folded: bool = False
    """Whether it starts collapsed, with only its first lane shown."""


@dataclass(frozen=True)
class TimelineIndex:
    """Columns over all slices. Times are ns of the trace."""

    start: Ints
    end: Ints
    """Ends, cut at the start of the lane's next slice. Details have the true end."""
    name: NDArray[np.uint32]
    """Index into ``names``."""
    slot: NDArray[np.uint8]
    """Category, relative to the lane's ``base``."""
    row: NDArray[np.int32]
    """Row of the lane's source table, -1 for none."""
    lanes: tuple[TimelineLane, ...]
    groups: tuple[LaneGroup, ...]
    names: list[str]
    """Distinct names, by total time, the largest first."""
    framework: str | None = field(default=None, kw_only=True)
    """Framework of the program, which determines some labels."""
    idle_outside_operators: bool = field(default=False, kw_only=True)
    """Whether idle time of unknown cause is labeled as code outside operators."""
    slice_of_row: dict[str, NDArray[np.int32]]
    """Slice of each row of the tables ``cpu`` and ``gpu``, -1 for none."""
    longest_per_block: Ints
    """Longest duration in each block of BLOCK_SIZE slices, ns."""
    pyramid: dict[int, DetailLevel]
    """Runs of cells of the narrow slices, by level."""
    first_ns: int
    """Start of the first slice, ns."""
    last_ns: int
    """End of the last slice, ns."""
    counters: tuple[CounterSeries, ...] = ()
    notes: tuple[str, ...] = field(default=())
    """Notes on missing data, a line each."""

    def __len__(self) -> int:
        return len(self.start)

    def lane_of(self, position: int) -> int:
        """Return the index of a slice's lane."""
        ends = [lane.end_slice for lane in self.lanes]
        return int(np.searchsorted(ends, position, side="right"))

    def category_name(self, position: int) -> str:
        """Return the label of a slice's category."""
        lane = self.lanes[self.lane_of(position)]
        return category_label(ALL_CATEGORIES[lane.base + int(self.slot[position])], self)

    def slice_range(self, lane: int, x0: int, x1: int) -> tuple[int, int]:
        """Return the range of a lane's slices that end after ``x0`` and start before ``x1``."""
        bounds = self.lanes[lane]
        lo = bounds.first_slice + int(
            np.searchsorted(self.end[bounds.first_slice : bounds.end_slice], x0, side="right")
        )
        hi = bounds.first_slice + int(
            np.searchsorted(self.start[bounds.first_slice : bounds.end_slice], x1, side="left")
        )
        return lo, max(lo, hi)


CategorySet = tuple[Category, ...]


class IndexBuilder:
    """Builder of an index. Lanes are added from top to bottom."""

    def __init__(self, rename: Callable[[str], str] = str) -> None:
        self.names = NameTable(rename)
        self.columns: list[tuple[NDArray[Any], ...]] = []
        self.lanes: list[TimelineLane] = []
        self.groups: list[LaneGroup] = []
        self.size = 0
        self.notes: list[str] = []

    def add_group(
        self,
        key: str,
        label: str,
        kind: str,
        parts: list[tuple[LaneSource, CategorySet, Ints, Ints, Any, Any, Any]],
        folded: bool = False,
    ) -> None:
        """Add a group of lanes: (source, categories, start, end, name, slot, row) each."""
        parts = [part for part in parts if len(part[2])]
        free_lanes = _MAX_LANES - len(self.lanes)
        if len(parts) > free_lanes:
            self.notes.append(f"{label}: {len(parts) - free_lanes} lanes are not shown")
            parts = parts[: max(free_lanes, 0)]
        if not parts:
            return
        first_lane = len(self.lanes)
        for depth, (source, categories, start, end, name, slot, row) in enumerate(parts):
            end = np.maximum(end, start)
            # in a hostile or repaired file slices may overlap: cut each at the next one
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
            self.lanes.append(
                TimelineLane(number, depth, source, FIRST_CATEGORY[categories], lo, self.size)
            )
        self.groups.append(LaneGroup(key, label, kind, first_lane, len(parts), folded))

    def add_tracks(
        self,
        key: str,
        label: str,
        kind: str,
        source: LaneSource,
        categories: CategorySet,
        columns: tuple[Any, ...],
        folded: bool = False,
    ) -> None:
        """Add slices that may overlap: columns (start, end, name, slot, row), unsorted."""
        start, end, name, slot, row = (np.asarray(column) for column in columns)
        if not len(start):
            return
        order = np.argsort(start, kind="stable")
        start, end, name, slot, row = (column[order] for column in (start, end, name, slot, row))
        track = assign_tracks(start, end)
        parts = [
            (source, categories, start[rows], end[rows], name[rows], slot[rows], row[rows])
            for rows in (np.flatnonzero(track == number) for number in range(int(track.max()) + 1))
        ]
        self.add_group(key, label, kind, parts, folded)

    def build(self, counters: tuple[CounterSeries, ...] = ()) -> TimelineIndex:
        """Build the index of all lanes. ``slice_of_row`` stays empty."""
        start, end, name, slot, row = (
            np.concatenate([*(column[i] for column in self.columns), np.zeros(0, dtype=dtype)])
            for i, dtype in enumerate((np.int64, np.int64, np.uint32, np.uint8, np.int32))
        )
        self.columns.clear()
        name, names = self.names.sort_by_time(name, end - start)
        first_ns = int(start.min()) if len(start) else 0
        last_ns = max(int(end.max()) if len(end) else 0, first_ns + 1)
        bounds = [(lane.first_slice, lane.end_slice) for lane in self.lanes]
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
            longest_per_block=_longest_per_block(end - start),
            pyramid=build_pyramid(bounds, start, end, slot, first_ns, last_ns - first_ns),
            first_ns=first_ns,
            last_ns=last_ns,
            counters=counters,
            notes=tuple(self.notes),
        )


def _longest_per_block(duration: Ints) -> Ints:
    """Return the longest duration in each block of BLOCK_SIZE slices."""
    if not len(duration):
        return duration
    longest: Ints = np.maximum.reduceat(duration, np.arange(0, len(duration), BLOCK_SIZE))
    return longest


class NameTable:
    """Table of distinct names, collected from all tables."""

    def __init__(self, rename: Callable[[str], str] = str) -> None:
        """``rename``: returns the displayed name of a recorded name."""
        self._numbers: dict[str, int] = {}
        self._rename = rename

    def number_of(self, text: str) -> int:
        """Return the number of a name. A new name gets the next number."""
        text = self._rename(text)
        return self._numbers.setdefault(text, len(self._numbers))

    def number_column(self, names: pl.Series) -> NDArray[np.uint32]:
        """Return the numbers of a column of names. Null becomes the empty name."""
        if names.dtype == pl.String:
            names = names.cast(pl.Categorical)
        unique = names.unique().drop_nulls()
        codes = unique.to_physical().to_numpy().astype(np.int64)
        missing = int(codes.max()) + 1 if len(codes) else 0
        table = np.full(
            missing + 1, self.number_of("") if names.null_count() else 0, dtype=np.uint32
        )
        # one lookup per distinct name
        table[codes] = [self.number_of(text) for text in unique.cast(pl.String).to_list()]
        numbers: NDArray[np.uint32] = table[names.to_physical().fill_null(missing).to_numpy()]
        return numbers

    def sort_by_time(
        self, name: NDArray[np.uint32], duration: Ints
    ) -> tuple[NDArray[np.uint32], list[str]]:
        """Renumber names by total time, the largest first. Return numbers and names."""
        texts = list(self._numbers)
        total = np.bincount(name, weights=duration, minlength=len(texts))
        order = np.argsort(-total, kind="stable")
        new_numbers = np.empty(len(texts), dtype=np.uint32)
        new_numbers[order] = np.arange(len(texts), dtype=np.uint32)
        return new_numbers[name], [texts[i] for i in order]


MAX_TRACKS = 12
"""Limit of the number of tracks. Slices without a free track go to the last one."""
MAX_PLACED_SLICES = 300_000
"""Number of overlapping slices that are placed one by one, which takes about 0.2 s."""


def assign_tracks(start: Ints, end: Ints, max_tracks: int = MAX_TRACKS) -> NDArray[np.int64]:
    """Return the track of each slice, the first free one of ``max_tracks``. Slices are sorted.

    Slices without overlap are on track 0. More than MAX_PLACED_SLICES overlapping slices are
    distributed over the tracks in turn, even if a track is not free."""
    track = np.zeros(len(start), dtype=np.int64)
    if len(start) < 2:
        return track
    latest_end = np.maximum.accumulate(end)
    overlaps = np.zeros(len(start), dtype=bool)
    overlaps[1:] = start[1:] < latest_end[:-1]
    rows = np.flatnonzero(overlaps)
    if not len(rows):
        return track
    if len(rows) > MAX_PLACED_SLICES:
        track[rows] = np.arange(1, len(rows) + 1) % max_tracks
        return track
    # The track of a slice depends on the slices before it, so this is a loop: over the overlapping
    # slices, and the slice before each cluster of them.
    first = rows[np.append(True, np.diff(rows) > 1)] - 1
    candidates = np.union1d(rows, first)
    track_ends: list[int] = []
    for row, slice_start, slice_end, starts_cluster in zip(
        candidates.tolist(),
        start[candidates].tolist(),
        end[candidates].tolist(),
        ~overlaps[candidates],
        strict=True,
    ):
        if starts_cluster:
            track_ends = []
        for number, free_from in enumerate(track_ends):
            if free_from <= slice_start:
                track_ends[number] = slice_end
                track[row] = number
                break
        else:
            if len(track_ends) < max_tracks:
                track_ends.append(slice_end)
            else:
                track_ends[-1] = max(track_ends[-1], slice_end)
            track[row] = len(track_ends) - 1
    return track
