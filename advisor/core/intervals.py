"""Interval arithmetic over columns. Intervals are half open, times int64 nanoseconds."""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    import polars as pl

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Array = NDArray[Any]


class Intervals(NamedTuple):
    """A set of instants, as disjoint intervals in order of time."""

    start: Ints
    end: Ints

    @property
    def total(self) -> int:
        """Total length of the intervals, ns."""
        return int((self.end - self.start).sum())

    def __len__(self) -> int:
        return len(self.start)


EMPTY = Intervals(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


def union(start: ArrayLike, end: ArrayLike) -> Intervals:
    """Return the instants covered by at least one interval. Intervals may overlap, in any order."""
    s = np.asarray(start, dtype=np.int64)
    e = np.asarray(end, dtype=np.int64)
    keep = e > s
    if not keep.all():
        s, e = s[keep], e[keep]
    if not len(s):
        return EMPTY
    order = np.argsort(s, kind="stable")
    s, e = s[order], np.maximum.accumulate(e[order])
    first = np.empty(len(s), dtype=bool)
    first[0] = True
    np.greater(s[1:], e[:-1], out=first[1:])
    starts = np.flatnonzero(first)
    return Intervals(s[starts], e[np.append(starts[1:] - 1, len(s) - 1)])


def intervals_of(events: "pl.DataFrame", rows: Any = slice(None)) -> Intervals:
    """Return the instants covered by events (columns ``ts`` and ``dur``), or by some ``rows``."""
    ts = events["ts"].to_numpy()[rows]
    return union(ts, ts + events["dur"].to_numpy()[rows])


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """Return the instants of ``a`` that are not in ``b``."""
    if not len(a) or not len(b):
        return a
    return intersect(a, _invert(b))


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """Return the instants that are in both."""
    if not len(a) or not len(b):
        return EMPTY
    first = np.searchsorted(b.end, a.start, side="right")
    last = np.searchsorted(b.start, a.end, side="left")
    count = np.maximum(last - first, 0)
    total = int(count.sum())
    if not total:
        return EMPTY
    which = np.repeat(np.arange(len(a)), count)
    offset = np.arange(total) - np.repeat(np.cumsum(count) - count, count)
    other = np.repeat(first, count) + offset
    return Intervals(
        np.maximum(a.start[which], b.start[other]), np.minimum(a.end[which], b.end[other])
    )


def union_of(*sets: Intervals) -> Intervals:
    """Return the instants that are in any of the sets."""
    return union(np.concatenate([s.start for s in sets]), np.concatenate([s.end for s in sets]))


def _invert(a: Intervals) -> Intervals:
    """Return all instants outside ``a`` in the range of int64."""
    lowest, highest = np.iinfo(np.int64).min // 4, np.iinfo(np.int64).max // 4
    return Intervals(np.append(lowest, a.end), np.append(a.start, highest))


def gaps(a: Intervals, start: int, end: int) -> Intervals:
    """Return the instants of [start, end) outside ``a``."""
    return subtract(union([start], [end]), a)


def covered_length(start: ArrayLike, end: ArrayLike, covering: Intervals) -> Ints:
    """Return the length of each given interval inside the set ``covering``, ns."""
    s = np.asarray(start, dtype=np.int64)
    e = np.maximum(np.asarray(end, dtype=np.int64), s)
    if not len(covering):
        return np.zeros(len(s), dtype=np.int64)
    return _measure_before(e, covering) - _measure_before(s, covering)


def _measure_before(t: Ints, covering: Intervals) -> Ints:
    """Return the length of the set ``covering`` before each instant of ``t``, ns."""
    lengths = covering.end - covering.start
    total_before = np.concatenate([[0], np.cumsum(lengths)])
    position = np.searchsorted(covering.start, t, side="right") - 1
    index = np.maximum(position, 0)
    inside = np.clip(t - covering.start[index], 0, lengths[index])
    return np.where(position < 0, 0, total_before[index] + inside)
