"""What lets a blocked host thread go on: the device work that a call waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from advisor.whatif.device import SLACK_NS, DeviceWork, device_nodes
from advisor.whatif.graph import Array, Edge, Graph, Node
from advisor.whatif.points import SLOW_LAUNCH_NS

if TYPE_CHECKING:
    from advisor.trace import Trace
    from advisor.whatif.build import _Edges

CALL_NS = 5_000.0
RELEASE_NS = 8_000.0
MIN_QUEUE = 128
"""Fewer pending launches never block; HTA takes the queue to hold 1024."""


def release_edges(
    trace: Trace, graph: Graph, edges: _Edges, work: DeviceWork, facts: dict[str, float]
) -> None:
    """Edges into the ends of blocking calls, which replace their measured ends."""
    begin = np.flatnonzero(graph.kind == Node.WAIT)
    done = np.flatnonzero(graph.kind == Node.RELEASED)
    node = device_nodes(graph, work) if len(work.row) else np.zeros(0, dtype=np.int64)
    _queue_edges(trace, graph, edges, work, node, facts)
    if not len(done):
        graph.hard["syncs that waited"] = done
        return
    start_of = {int(r): int(n) for r, n in zip(graph.row[begin], begin, strict=True)}
    real = np.array([int(r) in start_of for r in graph.row[done]])
    done = done[real]
    begin = np.array([start_of[int(r)] for r in graph.row[done]], dtype=np.int64)
    row = graph.row[done]
    call = trace.cpu["call"].gather(pl.Series(row)).to_list()
    called = graph.time[begin] + graph.origin
    ended = graph.time[done] + graph.origin
    awaited = _awaited(trace, work, row, call, called, ended)
    last = np.array(
        [max(((work.ts + work.dur)[w].max(initial=0)), 0) if len(w) else 0 for w in awaited]
    )
    waited = (last > called + 2_000) & (last <= ended + SLACK_NS)
    idle = ~waited & (ended - called < SLOW_LAUNCH_NS)
    facts["call"] = float(np.median((ended - called)[idle])) if idle.sum() >= 3 else CALL_NS
    lag = (ended - last)[waited]
    facts["release"] = float(np.median(lag[lag < 100_000])) if waited.sum() >= 3 else RELEASE_NS
    # what the device cannot have held up is the call's own cost (lazy loading, locks)
    own = np.where(waited | (ended - called < SLOW_LAUNCH_NS), facts["call"], ended - called)
    edges.drop_program(done)
    edges.add(begin, done, np.minimum(own, np.maximum(ended - called, 1.0)), Edge.PROGRAM)
    for target, sources in zip(done.tolist(), awaited, strict=True):
        if len(sources):
            edges.add(node[sources], np.full(len(sources), target), facts["release"], Edge.RELEASE)
    graph.hard["syncs that waited"] = done[waited]


def _awaited(
    trace: Trace, work: DeviceWork, row: Array, call: list[str], called: Array, ended: Array
) -> list[Array]:
    """Device work (indices) that each blocking call waits for: the last of each stream concerned
    that was launched before the call (a copy: itself)."""
    told = _told_streams(trace, work, row)
    by_lane = [np.flatnonzero(work.lane == lane) for lane in range(len(work.lanes))]
    by_lane = [lane[np.argsort(work.launch_ts[lane], kind="stable")] for lane in by_lane]
    launch_ts = [work.launch_ts[lane] for lane in by_lane]
    own_copy = {int(r): i for i, r in enumerate(work.launch) if r >= 0}
    thread = trace.cpu["thread"].to_numpy()
    launched = np.flatnonzero(work.launch >= 0)
    launched = launched[np.argsort(work.launch_ts[launched], kind="stable")]
    ends = work.ts + work.dur
    found = []
    for number, which in enumerate(row.tolist()):  # a few calls a step; each looks at few streams
        begin, end = called[number], ended[number]
        if which in own_copy and call[number] in ("memcpy", "memcpy_blocking"):
            found.append(np.array([own_copy[which]]))
            continue
        last = []
        for lane, ts in zip(by_lane, launch_ts, strict=True):
            place = int(np.searchsorted(ts, begin)) - 1
            if place >= 0:
                last.append(int(lane[place]))
        candidates = np.array(last, dtype=np.int64)
        possible = candidates[ends[candidates] <= end + SLACK_NS]
        if call[number] == "sync_device":
            found.append(possible)
        elif which in told:
            lanes = told[which]
            found.append(possible[np.isin(work.lane[possible], lanes)])
        elif end - begin > 3 * CALL_NS and len(possible):
            # it waited: for the stream whose work ended last before the call returned
            best = possible[np.argmax(ends[possible])]
            found.append(np.array([best]) if ends[best] > begin else np.zeros(0, dtype=np.int64))
        else:
            place = int(np.searchsorted(work.launch_ts[launched], begin)) - 1
            recent = launched[max(0, place - 32) : place + 1]
            mine = recent[thread[work.launch[recent]] == thread[which]]
            same = possible[work.lane[possible] == work.lane[mine[-1]]] if len(mine) else possible
            found.append(same[:1] if call[number] == "sync_stream" else same[:0])
    return found


def _told_streams(trace: Trace, work: DeviceWork, row: Array) -> dict[int, Array]:
    """Call row -> lanes it waits for, where ``cuda_sync`` rows tell."""
    rows = trace.sync.filter(pl.col("kind").is_in(["stream", "event"]))
    if rows.is_empty():
        return {}
    rows = rows.with_columns(
        on=pl.when(pl.col("kind") == "event").then("wait_stream").otherwise("stream")
    ).filter(pl.col("on").is_not_null() & pl.col("correlation").is_not_null())
    stream = dict(zip(rows["correlation"].to_list(), rows["on"].to_list(), strict=True))
    ids = trace.cpu["correlation"].gather(pl.Series(row)).to_list()
    found = {}
    for which, correlation in zip(row.tolist(), ids, strict=True):
        if correlation in stream:
            found[which] = np.array(
                [lane for lane, (_, s) in enumerate(work.lanes) if s == stream[correlation]]
            )
    return found


def _queue_edges(
    trace: Trace,
    graph: Graph,
    edges: _Edges,
    work: DeviceWork,
    node: Array,
    facts: dict[str, float],
) -> None:
    """A launch that finds the queue full returns when the work a queue's length ahead starts.

    The length is measured from launches that were slow while much was pending, and all about as
    much; where there are none the host never got that far ahead. Kernels of one CUDA graph take
    one place.
    """
    graph.hard["queue-blocked launches"] = np.zeros(0, dtype=np.int64)
    launched = np.flatnonzero(work.launch >= 0)
    if not len(launched):
        return
    # one entry a launch call: its first device work
    order = launched[np.lexsort((work.ts[launched], work.launch_ts[launched]))]
    _, first = np.unique(work.launch[order], return_index=True)
    entries = order[np.sort(first)]
    dur = trace.cpu["dur"].to_numpy()[work.launch[entries]]
    single = (trace.cpu["call"].gather(pl.Series(work.launch[entries])) == "launch").to_numpy()
    returned = work.launch_ts[entries] + dur
    blocked_dst, blocked_src, depth_of = [], [], []
    launching = np.flatnonzero(graph.kind == Node.LAUNCH)
    for lane in range(len(work.lanes)):
        mine = np.flatnonzero(work.lane[entries] == lane)
        if len(mine) < MIN_QUEUE:
            continue
        starts = work.ts[entries[mine]]
        running = np.maximum.accumulate(starts)
        # pending when the call returns: launched before, not yet started
        pending = np.arange(len(mine)) - np.searchsorted(running, returned[mine], side="right")
        slow = single[mine] & (dur[mine] > SLOW_LAUNCH_NS) & (pending >= MIN_QUEUE)
        depth = float(np.median(pending[slow])) if slow.sum() >= 3 else np.inf
        # blocked launches all see the same depth; slow for another reason they see any
        if not np.isfinite(depth) or np.median(np.abs(pending[slow] - depth)) > 0.02 * depth:
            continue
        depth_of.append(depth)
        full = np.flatnonzero(pending >= depth - 2)
        source = full - int(depth)
        full, source = full[source >= 0], source[source >= 0]
        blocked_dst += entries[mine[full]].tolist()
        blocked_src += entries[mine[source]].tolist()
    if not blocked_dst:
        return
    facts["queue depth"] = float(max(depth_of))
    target, source = np.array(blocked_dst), np.array(blocked_src)
    point = np.full(trace.cpu.height, -1, dtype=np.int64)
    point[graph.row[launching]] = launching
    call = work.launch[target]
    launch = point[call]
    after = _next_points(graph)[np.maximum(launch, 0)]
    good = (launch >= 0) & (after >= 0) & ~np.isin(call, graph.row[graph.kind == Node.WAIT])
    launch, after, source, call = launch[good], after[good], source[good], call[good]
    length = trace.cpu["dur"].to_numpy()[call].astype(float)
    rest = graph.time[after] - graph.time[launch] - length
    edges.shorten(launch, after, CALL_NS + rest)
    edges.add(node[source], after, rest, Edge.QUEUE, from_start=True)
    graph.hard["queue-blocked launches"] = after[length > SLOW_LAUNCH_NS]


def _next_points(graph: Graph) -> Array:
    """The next host point on the same thread, -1: none."""
    host = np.flatnonzero((graph.kind != Node.DEVICE) & (graph.kind != Node.SOURCE))
    order = host[np.argsort(graph.lane[host], kind="stable")]
    found = np.full(len(graph), -1, dtype=np.int64)
    same = graph.lane[order][1:] == graph.lane[order][:-1]
    found[order[:-1][same]] = order[1:][same]
    return found
