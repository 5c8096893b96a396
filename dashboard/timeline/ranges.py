"""Statistics of a range: what ran in it by name, and how busy the device was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from advisor.core.intervals import Intervals, intersect
from advisor.core.text import cause_label
from advisor.dashboard.timeline.categories import ALL, category_label
from advisor.dashboard.timeline.search import locate
from advisor.measure.host.gaps import CAUSES

if TYPE_CHECKING:
    from advisor.dashboard.timeline.index import TimelineIndex
    from advisor.measure import Analysis

MAX_NAMES = 40
MAX_ROWS = 100
_CLASSES = ("compute", "communication", "copies", "memset", "idle")
_HOST_OPS = ("host-op", "host-loader")


def range_statistics(a: Analysis, index: TimelineIndex, x0: int, x1: int) -> dict[str, Any]:
    """What lies in [x0, x1).

    ``device``: exclusive classes of the analysed device's time, as in ``Analysis.breakdown``, in
    the part of the range that belongs to analysed steps (``measured``, ns); ``None`` without any.
    ``idle``: that idle time by cause. ``kernels`` and ``operators``: by name ``count``, ``total``
    (ns inside the range, operators with what they call) and ``mean`` (of whole durations, ns).
    """
    selection = Intervals(np.array([x0]), np.array([x1]))
    analysed = intersect(a.spans, selection)
    device = None
    if a.device_id is not None and analysed.total:
        device = {name: intersect(getattr(a.breakdown, name), selection).total for name in _CLASSES}
    return {
        "x0": x0,
        "x1": x1,
        "measured": analysed.total if device is not None else 0,
        "device": device,
        "idle": _idle(a, x0, x1) if device is not None else [],
        "kernels": _by_name(index, _of_kind(index, "stream"), None, x0, x1),
        "operators": _by_name(index, _of_kind(index, "thread"), _HOST_OPS, x0, x1),
        "calls": _by_name(index, _of_kind(index, "thread"), _CALLS, x0, x1),
    }


_CALLS = ("host-launch", "host-sync", "host-copy", "host-allocation", "host-load", "host-call")


def _idle(a: Analysis, x0: int, x1: int) -> list[dict[str, Any]]:
    gaps = a.gaps
    ts = gaps["ts"].to_numpy()
    end = ts + gaps["dur"].to_numpy()
    overlap = np.maximum(np.minimum(end, x1) - np.maximum(ts, x0), 0)
    cause = gaps["cause"].to_physical().to_numpy()
    total = np.bincount(cause, weights=overlap, minlength=len(CAUSES))
    order = np.argsort(-total, kind="stable").tolist()
    framework = a.trace.meta.framework
    return [
        {"cause": CAUSES[i], "label": cause_label(CAUSES[i], framework), "ns": int(total[i])}
        for i in order
        if total[i]
    ]


def _of_kind(index: TimelineIndex, kind: str) -> list[int]:
    return [
        number
        for number, lane in enumerate(index.lanes)
        if index.groups[lane.group].kind == kind and lane.source != "activity"
    ]


def _by_name(
    index: TimelineIndex, lanes: list[int], keys: tuple[str, ...] | None, x0: int, x1: int
) -> dict[str, Any]:
    name, overlap, durations = _inside(index, lanes, keys, x0, x1)
    if not len(name):
        return {"rows": [], "names": 0, "count": 0, "total": 0}
    count = np.bincount(name, minlength=len(index.names))
    total = np.bincount(name, weights=overlap, minlength=len(index.names))
    full = np.bincount(name, weights=durations, minlength=len(index.names))
    there = np.flatnonzero(count)
    order = there[np.argsort(-total[there], kind="stable")]
    rows = [
        {
            "name": index.names[i][:300],
            "count": int(count[i]),
            "total": int(total[i]),
            "mean": float(full[i] / count[i]),
        }
        for i in order[:MAX_NAMES].tolist()
    ]
    return {"rows": rows, "names": len(there), "count": len(name), "total": int(overlap.sum())}


def _inside(
    index: TimelineIndex, lanes: list[int], keys: tuple[str, ...] | None, x0: int, x1: int
) -> tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.int64]]:
    """Name, duration inside the range and whole duration of the slices in it."""
    names, overlaps, durations = [], [], []
    for number in lanes:
        lo, hi = index.within(number, x0, x1)
        if hi <= lo:
            continue
        start, end = index.start[lo:hi], index.end[lo:hi]
        name = index.name[lo:hi]
        if keys is not None:
            base = index.lanes[number].base
            slots = [i - base for i, category in enumerate(ALL) if category.key in keys]
            wanted = np.isin(index.slot[lo:hi], slots)
            start, end, name = start[wanted], end[wanted], name[wanted]
        names.append(name)
        overlaps.append(np.minimum(end, x1) - np.maximum(start, x0))
        durations.append(end - start)
    if not names:
        return np.zeros(0, np.uint32), np.zeros(0, np.int64), np.zeros(0, np.int64)
    return np.concatenate(names), np.concatenate(overlaps), np.concatenate(durations)


def longest_slices(
    index: TimelineIndex, lanes: list[int], x0: int, x1: int, most: int
) -> dict[str, Any]:
    """The longest slices in view, in order of start; ``total``: how many there are in view."""
    spans = [index.within(number, x0, x1) for number in lanes]
    total = sum(hi - lo for lo, hi in spans)
    best: list[NDArray[np.int64]] = []
    for lo, hi in spans:
        dur = index.end[lo:hi] - index.start[lo:hi]
        positions = np.arange(lo, hi)
        if len(positions) > most:
            positions = lo + np.argpartition(-dur, most)[:most]
        best.append(positions)
    longest = np.concatenate([*best, np.zeros(0, dtype=np.int64)])
    dur = index.end[longest] - index.start[longest]
    longest = longest[np.argsort(-dur, kind="stable")[:most]]
    longest = longest[np.argsort(index.start[longest], kind="stable")]
    rows = []
    for position in longest.tolist():
        lane = index.lanes[index.lane_of(position)]
        rows.append(
            {
                **locate(index, position),
                "group": index.groups[lane.group].label,
                "category": category_label(
                    ALL[lane.base + int(index.slot[position])], index.framework
                ),
            }
        )
    return {"rows": rows, "total": total}
