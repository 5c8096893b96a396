"""The launch queue: how far the host can run ahead of a stream, seen from launches that waited."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl

from advisor.core.intervals import union
from advisor.replay.device import DeviceWork
from advisor.replay.graph import Array, Edge, Graph, Node
from advisor.replay.latencies import CALL_NS
from advisor.replay.points import SLOW_LAUNCH_NS

if TYPE_CHECKING:
    from advisor.core.trace import Trace
    from advisor.replay.edges import EdgeList

MIN_QUEUE = 128
"""Fewer pending launches never block; HTA takes the queue to hold 1024."""
SIMILAR = 0.02
"""Blocked launches all find as much pending, but for this share."""
MIN_BLOCKED = 16
AT_ONCE_NS = 5_000
"""A blocked launch returns this soon after the work that made room for it has started."""
MIN_AT_ONCE = 0.7


class _Lane(NamedTuple):
    """The queue of one stream; each entry is the first device work of a launch call."""

    entries: Array
    """Indices of device work in order of launch, those launched before the window first."""
    early: int
    """How many were launched before the window."""
    depth: int
    """A launch waits until the entry this far before it has started."""


def queue_edges(
    trace: Trace,
    graph: Graph,
    edges: EdgeList,
    work: DeviceWork,
    node: Array,
) -> None:
    """A launch that finds the queue full returns when the work a queue's length ahead starts.

    The length is measured from launches that waited; where there are none the host never got that
    far ahead. Kernels of one CUDA graph take one place.
    """
    if not (work.launch >= 0).any():
        return
    lanes = [_lane(trace, work, number) for number in range(len(work.lanes))]
    result = [lane for lane in lanes if lane is not None]
    if not result:
        return
    target, source = [], []
    for lane in result:
        place = np.arange(max(lane.early, lane.depth), len(lane.entries))
        target.append(lane.entries[place])
        source.append(lane.entries[place - lane.depth])
    dst, src = np.concatenate(target), np.concatenate(source)
    point = np.full(trace.cpu.height, -1, dtype=np.int64)
    launching = np.flatnonzero(graph.kind == Node.LAUNCH)
    point[graph.row[launching]] = launching
    call = work.launch[dst]
    launch = point[call]
    after = _next_points(graph)[np.maximum(launch, 0)]
    good = (launch >= 0) & (after >= 0) & ~np.isin(call, graph.row[graph.kind == Node.WAIT])
    launch, after, src, call = launch[good], after[good], src[good], call[good]
    length = trace.cpu["dur"].to_numpy()[call].astype(float)
    rest = graph.time[after] - graph.time[launch] - length
    returned = graph.time[launch] + length + graph.origin
    blocked = (length > CALL_NS) & (np.abs(returned - work.ts[src]) <= 2 * AT_ONCE_NS)
    edges.shorten(launch[blocked], after[blocked], CALL_NS + rest[blocked])
    lane, begin = graph.lane[launch[blocked]], graph.time[launch[blocked]]
    for thread in np.unique(lane).tolist():
        own_part = lane == thread
        graph.hidden[thread] = union(begin[own_part] + CALL_NS, (begin + length[blocked])[own_part])
    # nor does the launch hold its own work back for as long as it waited
    waited = np.isin(work.launch, call[blocked])
    work.own[waited] = np.minimum(work.own[waited], CALL_NS)
    edges.add(node[src], after, rest, Edge.QUEUE, from_start=True)
    graph.hard["queue-blocked launches"] = after[blocked], length[blocked] - CALL_NS


def _lane(trace: Trace, work: DeviceWork, number: int) -> _Lane | None:
    """The queue of a stream if launches waited for room in it."""
    own = np.flatnonzero((work.lane == number) & (work.launch >= 0))
    if not len(own):
        return None
    own = own[np.lexsort((work.ts[own], work.launch_ts[own]))]
    _, first = np.unique(work.launch[own], return_index=True)
    own = own[np.sort(first)]
    before = np.flatnonzero(
        (work.lane == number) & (work.launch < 0) & (work.ts < work.ts[own].min())
    )
    if len(before):  # a graph's kernels share their call's correlation
        ids = trace.gpu["correlation"].gather(pl.Series(work.row[before]))
        known = ids.fill_null(-1).to_numpy()
        known = np.where(known < 0, -2 - np.arange(len(known)), known)
        before = before[np.sort(np.unique(known, return_index=True)[1])]
    entries = np.concatenate([before, own])
    if len(entries) < MIN_QUEUE:
        return None
    call = work.launch[own]
    dur = trace.cpu["dur"].to_numpy()[call]
    single = (trace.cpu["call"].gather(pl.Series(call)) == "launch").to_numpy()
    returned = work.launch_ts[own] + dur
    started = np.maximum.accumulate(work.ts[entries])
    place = np.arange(len(before), len(entries))
    # how far back the last entry is that had started when the call returned
    back = place - np.searchsorted(started, returned + AT_ONCE_NS // 2, side="right") + 1
    depth = _depth(back, single & (dur > SLOW_LAUNCH_NS))
    if depth is None:
        depth = _plateau(back, place, returned, started, single & (dur > CALL_NS))
    return None if depth is None else _Lane(entries, len(before), depth)


def _depth(back: Array, slow: Array) -> int | None:
    """From slow launches while much was pending, if they all found about as much."""
    seen = back[slow & (back >= MIN_QUEUE)]
    if len(seen) < 3:
        return None
    depth = float(np.median(seen))
    # those that were slow for another reason find any number
    return round(depth) if np.median(np.abs(seen - depth)) <= SIMILAR * depth else None


def _plateau(back: Array, place: Array, returned: Array, started: Array, able: Array) -> int | None:
    """From launches that waited too short to be seen by that: many, with nothing more pending at
    any time, which return as the work a queue's length before them starts."""
    seen = back[able & (back >= MIN_QUEUE)]
    if len(seen) < MIN_BLOCKED:
        return None
    values, counts = np.unique(seen, return_counts=True)
    depth = int(values[np.argmax(counts)])
    full = np.flatnonzero(able & (np.abs(back - depth) <= 1))
    if len(full) < MIN_BLOCKED or depth < (1 - SIMILAR) * back.max():
        return None
    late = returned[full] - started[np.maximum(place[full] - depth, 0)]
    at_once = np.abs(late) <= AT_ONCE_NS
    return depth if at_once.mean() >= MIN_AT_ONCE else None


def _next_points(graph: Graph) -> Array:
    """The next host point on the same thread, -1: none."""
    host = np.flatnonzero((graph.kind != Node.DEVICE) & (graph.kind != Node.SOURCE))
    order = host[np.argsort(graph.lane[host], kind="stable")]
    result = np.full(len(graph), -1, dtype=np.int64)
    same = graph.lane[order][1:] == graph.lane[order][:-1]
    result[order[:-1][same]] = order[1:][same]
    return result
