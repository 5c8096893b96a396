"""Queries on the index: slices by name, the slices of a finding, statistics of a range."""

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from advisor.core.errors import AdvisorError
from advisor.core.finding import Finding
from advisor.core.intervals import Intervals, intersect
from advisor.core.labels import labels_by_name
from advisor.core.report import Report
from advisor.core.text import cause_label
from advisor.dashboard.timeline.detail_levels import ALL_CATEGORIES
from advisor.dashboard.timeline.index import TimelineIndex
from advisor.measure import Analysis
from advisor.measure.host.gaps import CAUSES, is_outside_operators
from advisor.replay.selection import selected_gaps, selected_gpu, selected_host

MAX_MATCHED_NAMES = 8


class SearchHits(NamedTuple):
    """Slices that match a search.

    A slice that is drawn in two lanes, such as a copy, is counted once in ``order``."""

    position: NDArray[np.int32]
    order: NDArray[np.int32]
    """Positions of distinct slices, by start."""
    names: NDArray[np.int64]
    """Numbers of the matching names."""


_DUPLICATE_KINDS = ("collectives", "copies", "phases")
"""Kinds of groups whose slices are also in another lane."""


def search(index: TimelineIndex, query: str) -> SearchHits:
    """Find the slices whose name contains a lower-case text. Empty text matches none."""
    matches = np.array([query != "" and query in name.lower() for name in index.names], dtype=bool)
    position = np.flatnonzero(matches[index.name]).astype(np.int32)
    is_counted = np.ones(len(position), dtype=bool)
    for lane in index.lanes:
        if index.groups[lane.group].kind in _DUPLICATE_KINDS:
            first, end = np.searchsorted(position, [lane.first_slice, lane.end_slice])
            is_counted[first:end] = False
    distinct = position[is_counted]
    order = distinct[np.argsort(index.start[distinct], kind="stable")]
    return SearchHits(position, order, np.flatnonzero(matches))


def find_next_match(
    index: TimelineIndex, hits: SearchHits, current: int | None, since_ns: int, is_backward: bool
) -> dict[str, Any]:
    """Return the match after (or before) slice ``current``, or else after ``since_ns``, as JSON.

    The search wraps around at the end."""
    total = len(hits.order)
    names = [index.names[i][:200] for i in hits.names[:MAX_MATCHED_NAMES].tolist()]
    answer: dict[str, Any] = {"total": total, "names": names, "distinct": len(hits.names)}
    if not total:
        return answer
    matches = np.flatnonzero(hits.order == (-1 if current is None else current))
    if len(matches):
        match_number = (int(matches[0]) + (-1 if is_backward else 1)) % total
    else:
        start = index.start[hits.order]
        match_number = int(np.searchsorted(start, since_ns, side="left"))
        match_number = (match_number - 1 if is_backward else match_number) % total
    position = int(hits.order[match_number])
    return answer | {"at": match_number, **locate_slice(index, position)}


def locate_slice(index: TimelineIndex, position: int) -> dict[str, Any]:
    """Return a slice as JSON: ``id``, ``lane``, ``ts`` and ``dur`` (ns), ``name``."""
    return {
        "id": position,
        "lane": index.lane_of(position),
        "ts": int(index.start[position]),
        "dur": int(index.end[position] - index.start[position]),
        "name": index.names[int(index.name[position])][:300],
    }


_SIDES: tuple[Literal["left", "right"], ...] = ("left", "right")
_KIND_ORDER = ("stream", "idle", "thread", "collectives", "copies", "phases", "steps")


def find_slice_starting(
    index: TimelineIndex, start_ns: int, duration_ns: int | None
) -> dict[str, Any] | None:
    """Find the slice that starts at an instant, if possible with the given duration.

    Device work has priority over idle gaps, and those over host work; inner slices over outer."""
    best: tuple[tuple[bool, int, int], int] | None = None
    for lane in index.lanes:
        if lane.source == "activity":
            continue
        start = index.start[lane.first_slice : lane.end_slice]
        first, stop = (
            lane.first_slice + int(np.searchsorted(start, start_ns, side=side)) for side in _SIDES
        )
        if stop <= first:
            continue
        position = first + int(np.argmax(index.end[first:stop]))
        kind = index.groups[lane.group].kind
        differs = duration_ns is not None and int(index.end[position]) - start_ns != duration_ns
        order = (
            differs,
            _KIND_ORDER.index(kind) if kind in _KIND_ORDER else len(_KIND_ORDER),
            -lane.depth,
        )
        if best is None or order < best[0]:
            best = order, position
    return None if best is None else locate_slice(index, best[1])


_MAX_PLACES = 20
LABEL_LENGTH = 60
"""Length limit of a place's name, characters."""


def findings_by_key(report: Report) -> dict[str, Finding]:
    """Return findings by their key in an address: the id, with ``~`` instead of ``#``."""
    return {key.replace("#", "~"): finding for key, finding in report.by_id().items()}


def summarize_finding(key: str, finding: Finding) -> dict[str, Any]:
    """Return a finding as JSON: title, rank, and places with ``ts`` and ``dur``, ns."""
    places_with_time = [place for place in finding.where if place.ts_ns is not None][:_MAX_PLACES]
    labels = labels_by_name((place.kernel or place.op for place in places_with_time), LABEL_LENGTH)
    places = [
        {
            "ts": place.ts_ns,
            "dur": place.dur_ns or 0,
            "label": labels.get(place.kernel or place.op or "", ""),
        }
        for place in places_with_time
    ]
    return {
        "key": key, "rule": finding.rule, "title": finding.title, "severity": finding.severity,
        "rank": finding.trace_rank, "edits": len(finding.edits), "places": places,
    }  # fmt: skip


def find_affected_slices(a: Analysis, index: TimelineIndex, finding: Finding) -> NDArray[np.bool_]:
    """Return a mask of the slices that the finding's edits change."""
    gpu = np.zeros(a.trace.gpu.height, dtype=bool)
    cpu = np.zeros(a.trace.cpu.height, dtype=bool)
    gaps = np.zeros(a.gaps.height, dtype=bool)
    for edit in finding.edits:
        try:
            if edit.select.on == "gpu":
                gpu |= selected_gpu(a, edit.select)
            elif edit.select.on == "host":
                cpu |= selected_host(a, edit.select)
            else:
                gaps |= selected_gaps(a, edit.select)
        except AdvisorError:
            continue  # an invalid pattern of a rule selects nothing
    affected = np.zeros(len(index), dtype=bool)
    masks = {"gpu": gpu, "cpu": cpu, "gaps": gaps}
    for lane in index.lanes:
        mask = masks.get(lane.source)
        if mask is not None and mask.any():
            affected[lane.first_slice : lane.end_slice] = mask[
                index.row[lane.first_slice : lane.end_slice]
            ]
    return affected


MAX_RANGE_NAMES = 40
_DEVICE_CLASSES = ("compute", "communication", "copies", "memset", "idle")
_HOST_OPS = ("host-op", "host-loader")


def measure_range(a: Analysis, index: TimelineIndex, x0: int, x1: int) -> dict[str, Any]:
    """Measure device time, kernels and operators in [x0, x1), ns. Return them as JSON.

    ``measured``: time in analysed steps, ns. ``device``: its exclusive classes, as in
    ``Analysis.breakdown``, or ``None`` if there is none. ``idle``: idle time by cause, ns.
    ``kernels``, ``operators`` and ``calls``: by name ``count``, ``total`` (ns inside the range,
    children included) and ``mean`` (of whole durations, ns)."""
    selection = Intervals(np.array([x0]), np.array([x1]))
    analysed = intersect(a.spans, selection)
    device = None
    if a.device_id is not None and analysed.total:
        device = {
            name: intersect(getattr(a.breakdown, name), selection).total for name in _DEVICE_CLASSES
        }
    return {
        "x0": x0,
        "x1": x1,
        "measured": analysed.total if device is not None else 0,
        "device": device,
        "idle": _idle_by_cause(a, x0, x1) if device is not None else [],
        "kernels": _sum_by_name(index, _lanes_of_kind(index, "stream"), None, x0, x1),
        "operators": _sum_by_name(index, _lanes_of_kind(index, "thread"), _HOST_OPS, x0, x1),
        "calls": _sum_by_name(index, _lanes_of_kind(index, "thread"), _RUNTIME_CALLS, x0, x1),
    }


_RUNTIME_CALLS = (
    "host-launch",
    "host-sync",
    "host-copy",
    "host-allocation",
    "host-load",
    "host-call",
)


def _idle_by_cause(a: Analysis, x0: int, x1: int) -> list[dict[str, Any]]:
    """Return idle time in [x0, x1) by cause, the largest first, ns."""
    gaps = a.gaps
    ts = gaps["ts"].to_numpy()
    end = ts + gaps["dur"].to_numpy()
    overlap = np.maximum(np.minimum(end, x1) - np.maximum(ts, x0), 0)
    cause = gaps["cause"].to_physical().to_numpy()
    total = np.bincount(cause, weights=overlap, minlength=len(CAUSES))
    order = np.argsort(-total, kind="stable").tolist()
    framework, outside = a.trace.meta.framework, is_outside_operators(a)
    return [
        {
            "cause": CAUSES[i],
            "label": cause_label(CAUSES[i], framework, outside=outside),
            "ns": int(total[i]),
        }
        for i in order
        if total[i]
    ]


def _lanes_of_kind(index: TimelineIndex, kind: str) -> list[int]:
    """Return the lanes in groups of a kind, without lanes of activity."""
    return [
        number
        for number, lane in enumerate(index.lanes)
        if index.groups[lane.group].kind == kind and lane.source != "activity"
    ]


def _sum_by_name(
    index: TimelineIndex, lanes: list[int], keys: tuple[str, ...] | None, x0: int, x1: int
) -> dict[str, Any]:
    """Sum count and time by name in [x0, x1), the largest time first."""
    name, overlap, durations = _slices_in_range(index, lanes, keys, x0, x1)
    count = np.bincount(name, minlength=len(index.names))
    total = np.bincount(name, weights=overlap, minlength=len(index.names))
    whole_total = np.bincount(name, weights=durations, minlength=len(index.names))
    present = np.flatnonzero(count)
    order = present[np.argsort(-total[present], kind="stable")]
    rows = [
        {
            "name": index.names[i][:300],
            "count": int(count[i]),
            "total": int(total[i]),
            "mean": float(whole_total[i] / count[i]),
        }
        for i in order[:MAX_RANGE_NAMES].tolist()
    ]
    return {"rows": rows, "names": len(present), "count": len(name), "total": int(overlap.sum())}


def _slices_in_range(
    index: TimelineIndex, lanes: list[int], keys: tuple[str, ...] | None, x0: int, x1: int
) -> tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.int64]]:
    """Return name, duration inside [x0, x1) and whole duration of the slices in it, ns.

    ``keys``: keys of the categories to include; ``None``: all."""
    names, overlaps, durations = ([np.zeros(0, kind)] for kind in (np.uint32, np.int64, np.int64))
    for number in lanes:
        lo, hi = index.slice_range(number, x0, x1)
        if hi <= lo:
            continue
        start, end = index.start[lo:hi], index.end[lo:hi]
        name = index.name[lo:hi]
        if keys is not None:
            base = index.lanes[number].base
            slots = [i - base for i, category in enumerate(ALL_CATEGORIES) if category.key in keys]
            is_wanted = np.isin(index.slot[lo:hi], slots)
            start, end, name = start[is_wanted], end[is_wanted], name[is_wanted]
        names.append(name)
        overlaps.append(np.minimum(end, x1) - np.maximum(start, x0))
        durations.append(end - start)
    return np.concatenate(names), np.concatenate(overlaps), np.concatenate(durations)


def find_longest_slices(
    index: TimelineIndex, lanes: list[int], x0: int, x1: int, max_slices: int
) -> dict[str, Any]:
    """Return the longest slices in [x0, x1), by start, as JSON; ``total`` counts all."""
    spans = [index.slice_range(number, x0, x1) for number in lanes]
    total = sum(hi - lo for lo, hi in spans)
    best: list[NDArray[np.int64]] = []
    for lo, hi in spans:
        dur = index.end[lo:hi] - index.start[lo:hi]
        positions = np.arange(lo, hi)
        if len(positions) > max_slices:
            positions = lo + np.argpartition(-dur, max_slices)[:max_slices]
        best.append(positions)
    longest = np.concatenate([*best, np.zeros(0, dtype=np.int64)])
    dur = index.end[longest] - index.start[longest]
    longest = longest[np.argsort(-dur, kind="stable")[:max_slices]]
    longest = longest[np.argsort(index.start[longest], kind="stable")]
    rows = []
    for position in longest.tolist():
        lane = index.lanes[index.lane_of(position)]
        rows.append(
            {
                **locate_slice(index, position),
                "group": index.groups[lane.group].label,
                "category": index.category_name(position),
            }
        )
    return {"rows": rows, "total": total}
