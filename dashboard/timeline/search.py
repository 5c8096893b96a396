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
from advisor.dashboard.timeline.detail_levels import ALL
from advisor.dashboard.timeline.index import TimelineIndex
from advisor.measure import Analysis
from advisor.measure.host.gaps import CAUSES, is_outside_operators
from advisor.replay.selection import selected_gaps, selected_gpu, selected_host

MAX_NAMES = 8


class SearchHits(NamedTuple):
    """Slices that were found: ``position`` in order of the index, ``order`` puts them in order of
    time; a slice drawn twice (a copy on its stream and among the copies) counts once."""

    position: NDArray[np.int32]
    order: NDArray[np.int32]
    """Positions, in order of start."""
    names: NDArray[np.int64]
    """Numbers of the found names."""


_TWICE = ("collectives", "copies", "phases")
"""Groups whose slices are in another lane too."""


def search(index: TimelineIndex, query: str) -> SearchHits:
    """Find slices whose name contains the lower-case text; an empty text finds nothing."""
    wanted = np.array([query != "" and query in name.lower() for name in index.names], dtype=bool)
    position = np.flatnonzero(wanted[index.name]).astype(np.int32)
    once = np.ones(len(position), dtype=bool)
    for lane in index.lanes:
        if index.groups[lane.group].kind in _TWICE:
            a, b = np.searchsorted(position, [lane.lo, lane.hi])
            once[a:b] = False
    distinct = position[once]
    order = distinct[np.argsort(index.start[distinct], kind="stable")]
    return SearchHits(position, order, np.flatnonzero(wanted))


def step_through(
    index: TimelineIndex, hits: SearchHits, current: int | None, since: int, back: bool
) -> dict[str, Any]:
    """Return the found slice after (or before) slice ``current``, or after the instant ``since``;
    it goes round at the end."""
    total = len(hits.order)
    names = [index.names[i][:200] for i in hits.names[:MAX_NAMES].tolist()]
    answer: dict[str, Any] = {"total": total, "names": names, "distinct": len(hits.names)}
    if not total:
        return answer
    matches = np.flatnonzero(hits.order == (-1 if current is None else current))
    if len(matches):
        place = (int(matches[0]) + (-1 if back else 1)) % total
    else:
        start = index.start[hits.order]
        place = int(np.searchsorted(start, since, side="left"))
        place = (place - 1 if back else place) % total
    position = int(hits.order[place])
    return answer | {"at": place, **locate_slice(index, position)}


def locate_slice(index: TimelineIndex, position: int) -> dict[str, Any]:
    """Return a slice's place as JSON: ``id``, ``lane``, ``ts`` and ``dur`` (ns), ``name``."""
    return {
        "id": position,
        "lane": index.lane_of(position),
        "ts": int(index.start[position]),
        "dur": int(index.end[position] - index.start[position]),
        "name": index.names[int(index.name[position])][:300],
    }


_SIDES: tuple[Literal["left", "right"], ...] = ("left", "right")
_FIRST = ("stream", "idle", "thread", "collectives", "copies", "phases", "steps")


def slice_starting(index: TimelineIndex, t: int, dur: int | None) -> dict[str, Any] | None:
    """Find the slice that begins at an instant, of that duration if one is given and there is one;
    device work before idle gaps before host work, inner before outer."""
    best: tuple[tuple[bool, int, int], int] | None = None
    for lane in index.lanes:
        if lane.source == "activity":
            continue
        start = index.start[lane.lo : lane.hi]
        a, b = (lane.lo + int(np.searchsorted(start, t, side=side)) for side in _SIDES)
        if b <= a:
            continue
        position = a + int(np.argmax(index.end[a:b]))
        kind = index.groups[lane.group].kind
        other = dur is not None and int(index.end[position]) - t != dur
        order = (other, _FIRST.index(kind) if kind in _FIRST else len(_FIRST), -lane.depth)
        if best is None or order < best[0]:
            best = order, position
    return None if best is None else locate_slice(index, best[1])


MAX_PLACES = 20
LABEL = 60
"""Length of a place's name, characters."""


def keyed_findings(report: Report) -> dict[str, Finding]:
    """Return findings by their keys in addresses: ``Report.by_id``, with ``~`` for ``#``."""
    return {key.replace("#", "~"): finding for key, finding in report.by_id().items()}


def finding_summary(key: str, finding: Finding) -> dict[str, Any]:
    """Return a finding as the timeline shows it: title, rank and places with ``ts`` and ``dur``."""
    timed = [p for p in finding.where if p.ts_ns is not None][:MAX_PLACES]
    short = labels_by_name((p.kernel or p.op for p in timed), LABEL)
    places = [
        {"ts": p.ts_ns, "dur": p.dur_ns or 0, "label": short.get(p.kernel or p.op or "", "")}
        for p in timed
    ]
    return {
        "key": key, "rule": finding.rule, "title": finding.title, "severity": finding.severity,
        "rank": finding.trace_rank, "edits": len(finding.edits), "places": places,
    }  # fmt: skip


def affected_slices(a: Analysis, index: TimelineIndex, finding: Finding) -> NDArray[np.bool_]:
    """Find slices of the index that the finding's edits would change."""
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
            continue  # a rule's pattern that is none: nothing to outline
    affected = np.zeros(len(index), dtype=bool)
    masks = {"gpu": gpu, "cpu": cpu, "gaps": gaps}
    for lane in index.lanes:
        mask = masks.get(lane.source)
        if mask is not None and mask.any():
            affected[lane.lo : lane.hi] = mask[index.row[lane.lo : lane.hi]]
    return affected


MAX_RANGE_NAMES = 40
_CLASSES = ("compute", "communication", "copies", "memset", "idle")
_HOST_OPS = ("host-op", "host-loader")


def range_statistics(a: Analysis, index: TimelineIndex, x0: int, x1: int) -> dict[str, Any]:
    """Measure the device time, kernels and operators in [x0, x1).

    ``device``: exclusive classes of the analysed device's time, as in ``Analysis.breakdown``, in
    the part of the range that belongs to analysed steps (``measured``, ns); ``None`` without any.
    ``idle``: that idle time by cause. ``kernels`` and ``operators``: by name ``count``, ``total``
    (ns inside the range, operators with what they call) and ``mean`` (of whole durations, ns)."""
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
    own, outside = a.trace.meta.framework, is_outside_operators(a)
    return [
        {
            "cause": CAUSES[i],
            "label": cause_label(CAUSES[i], own, outside=outside),
            "ns": int(total[i]),
        }
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
        for i in order[:MAX_RANGE_NAMES].tolist()
    ]
    return {"rows": rows, "names": len(there), "count": len(name), "total": int(overlap.sum())}


def _inside(
    index: TimelineIndex, lanes: list[int], keys: tuple[str, ...] | None, x0: int, x1: int
) -> tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.int64]]:
    """Return name, duration inside the range and whole duration of the slices in it."""
    names, overlaps, durations = ([np.zeros(0, kind)] for kind in (np.uint32, np.int64, np.int64))
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
    return np.concatenate(names), np.concatenate(overlaps), np.concatenate(durations)


def longest_slices(
    index: TimelineIndex, lanes: list[int], x0: int, x1: int, max_slices: int
) -> dict[str, Any]:
    """Return the longest slices in view, in order of start; ``total``: how many are in view."""
    spans = [index.within(number, x0, x1) for number in lanes]
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
                "category": index.category(position),
            }
        )
    return {"rows": rows, "total": total}
