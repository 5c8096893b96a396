"""Edges that release a blocked host thread: from the device work that a call waits for."""

from typing import NamedTuple

import numpy as np
import polars as pl

from advisor.core.intervals import union
from advisor.core.trace import Trace
from advisor.measure.host.names import name_matches
from advisor.measure.host.syncs import clock_tolerance_ns, recorded_waits, work_past_return_ns
from advisor.replay.device_work import SLACK_NS, DeviceWork, device_nodes
from advisor.replay.graph import (
    CALL_NS,
    FEW,
    Array,
    EdgeKind,
    EdgeList,
    Graph,
    Latencies,
    NodeKind,
    median_with_default,
)
from advisor.replay.host_nodes import SLOW_LAUNCH_NS

COLLECTIVE = r"^(nccl|rccl|msccl)"
OWN_WORK = ("memcpy", "memcpy_blocking", "launch", "graph_launch", "memset")
"""Calls that wait for what they launch, if they wait."""
MAX_SYNC_RETURN_NS = 100_000
"""Maximum delay of a call's return after work that it waited for, ns."""


def add_sync_edges(trace: Trace, graph: Graph, edges: EdgeList, work: DeviceWork) -> None:
    """Add edges into the ends of blocking calls, which replace their measured ends."""
    begin = np.flatnonzero(graph.kind == NodeKind.SYNC)
    done = np.flatnonzero(graph.kind == NodeKind.SYNC_END)
    node = device_nodes(graph, work) if len(work.row) else np.zeros(0, dtype=np.int64)
    add_queue_edges(trace, graph, edges, work, node)
    if not len(done):
        return
    start_of = {int(r): int(n) for r, n in zip(graph.row[begin], begin, strict=True)}
    real = np.array([int(r) in start_of for r in graph.row[done]])
    done = done[real]
    begin = np.array([start_of[int(r)] for r in graph.row[done]], dtype=np.int64)
    row = graph.row[done]
    call = trace.cpu["call"].gather(pl.Series(row)).fill_null("other").to_list()
    called = graph.time[begin] + graph.origin
    ended = graph.time[done] + graph.origin
    own = _own_work(work)
    apart = np.maximum(clock_tolerance_ns(trace), work_past_return_ns(trace, row))
    awaited = _awaited(trace, work, row, call, called, ended, own, apart)
    last = np.array(
        [max(((work.ts + work.dur)[w].max(initial=0)), 0) if len(w) else 0 for w in awaited]
    )
    # a call that stages what it copies may return before the last piece has arrived
    own_part = np.array(
        [len(w) > 0 and work.launch[w[0]] == r for w, r in zip(awaited, row, strict=True)]
    )
    late = np.where(own_part, np.maximum(apart, (last - called) // 2), apart)
    waited = (last > called + 2_000) & (last <= ended + late)
    idle = ~waited & (ended - called < SLOW_LAUNCH_NS)
    latencies = graph.latencies
    latencies.sync_call = median_with_default((ended - called)[idle], latencies.sync_call)
    sync_return = _sync_return(ended - last, waited, _kinds(work, awaited, own_part), latencies)
    # what the device cannot have held up is the call's own cost (lazy loading, locks)
    cost = np.where(waited | (ended - called < SLOW_LAUNCH_NS), latencies.sync_call, ended - called)
    edges.drop_program(done)
    edges.add(begin, done, np.minimum(cost, np.maximum(ended - called, 1.0)), EdgeKind.PROGRAM)
    counts = [len(sources) for sources in awaited]
    source = np.concatenate(awaited).astype(np.int64)
    edges.add(node[source], np.repeat(done, counts), np.repeat(sync_return, counts), EdgeKind.SYNC)
    graph.hard["syncs that waited"] = done[waited], (ended - called)[waited]


def _own_work(work: DeviceWork) -> dict[int, Array]:
    """Return the work of each launching call; a copy may be several packets."""
    known = np.flatnonzero(work.launch >= 0)
    known = known[np.argsort(work.launch[known], kind="stable")]
    calls, first = np.unique(work.launch[known], return_index=True)
    ends = np.append(first, len(known))[1:]
    return {
        int(call): known[begin:end]
        for call, begin, end in zip(calls.tolist(), first.tolist(), ends.tolist(), strict=True)
    }


def _kinds(work: DeviceWork, awaited: list[Array], own: Array) -> list[str]:
    """Return each call's kind: the group of the copy that it waits for and launched, else empty."""
    return [
        work.groups[work.group[result[0]]] if own_part else ""
        for result, own_part in zip(awaited, own.tolist(), strict=True)
    ]


def _sync_return(delay: Array, waited: Array, kinds: list[str], latencies: Latencies) -> Array:
    """Return each call's delay from its work's end to its return, ns: the median of its kind, or
    its own where the kind was seen too seldom. Sets ``latencies.sync_return``."""
    near = waited & (np.abs(delay) < MAX_SYNC_RETURN_NS)
    names = np.array(kinds)
    latencies.sync_return = median_with_default(delay[near & (names == "")], latencies.sync_return)
    result = np.full(len(delay), latencies.sync_return)
    for kind in set(kinds) - {""}:
        own = names == kind
        sample = delay[near & own]
        if len(sample) >= FEW:
            result[own] = float(np.median(sample))
        else:
            result[own] = np.where(near[own], delay[own], latencies.sync_return)
    return result


def _awaited(
    trace: Trace,
    work: DeviceWork,
    row: Array,
    call: list[str],
    called: Array,
    ended: Array,
    own: dict[int, Array],
    apart: Array,
) -> list[Array]:
    """Return the device work (indices) that each blocking call waits for: of each stream concerned
    the last launched before the call; for a copy the copy itself."""
    marks = recorded_waits(trace, row)
    lane_of = {stream: number for number, (_, stream) in enumerate(work.lanes)}
    recorded = {
        int(row[at]): [number for number, (_, other) in enumerate(work.lanes) if other == stream]
        for at, stream in marks.filter(pl.col("kind") == "stream").select("at", "on").iter_rows()
    }
    events = _Events(trace, work, row, marks, lane_of)
    by_lane = [np.flatnonzero(work.lane == lane) for lane in range(len(work.lanes))]
    by_lane = [lane[np.argsort(work.launch_ts[lane], kind="stable")] for lane in by_lane]
    launch_ts = [work.launch_ts[lane] for lane in by_lane]
    thread = trace.cpu["thread"].to_numpy()
    launched = np.flatnonzero((work.launch >= 0) & ~_collectives(trace, work))
    launched = launched[np.argsort(work.launch_ts[launched], kind="stable")]
    ends = work.ts + work.dur
    owner = np.where(work.launch >= 0, thread[work.launch], -1)
    result = []
    for number, which in enumerate(row.tolist()):  # a few calls per step; each looks at few streams
        begin, end = called[number], ended[number]
        if which in own and call[number] in OWN_WORK:
            result.append(own[which])
            continue
        if call[number] == "sync_event":
            result.append(events.awaited_work(which, begin, end))
            continue
        last = []
        for lane, ts in zip(by_lane, launch_ts, strict=True):
            place = int(np.searchsorted(ts, begin)) - 1
            if place >= 0:
                last.append(int(lane[place]))
        candidates = np.array(last, dtype=np.int64)
        possible = candidates[ends[candidates] <= end + apart[number]]
        # what other threads launch on their own comes before the call by chance: it counts only
        # where nothing else explains the wait
        near = ends[possible] > max(begin, end - MAX_SYNC_RETURN_NS)
        own_threads = work.on_step_threads[possible]
        if thread[which] not in work.step_threads:
            own_threads = owner[possible] == thread[which]
        if end - begin <= 3 * CALL_NS or (near & own_threads).any() or not near.any():
            possible = possible[own_threads]
        if call[number] == "sync_device":
            result.append(possible)
            continue
        if which in recorded:
            own_part = possible[np.isin(work.lane[possible], recorded[which])]
        else:
            # most likely the stream that the thread used last, collectives apart: these run on
            # streams of the library's own, which programs do not wait for
            place = int(np.searchsorted(work.launch_ts[launched], begin)) - 1
            recent = launched[max(0, place - 32) : place + 1]
            recent = recent[thread[work.launch[recent]] == thread[which]]
            used = work.lane[possible] == work.lane[recent[-1]] if len(recent) else slice(0)
            own_part = possible[used]
        near = possible[ends[possible] > max(begin, end - MAX_SYNC_RETURN_NS)]
        if end - begin > 3 * CALL_NS and len(near) and not np.isin(own_part, near).any():
            # it waited longer: the stream was waiting for another one, or it was another stream
            own_part = np.append(own_part, near[np.argmax(ends[near])])
        result.append(own_part)
    return result


def _collectives(trace: Trace, work: DeviceWork) -> Array:
    """Return which work runs on a stream that only has collectives."""
    names = trace.gpu["name"].gather(pl.Series(work.row))
    talks = name_matches(names, COLLECTIVE).to_numpy()
    size = len(work.lanes)
    rest = np.bincount(work.lane[~talks], minlength=size)
    result: Array = (rest == 0)[work.lane]
    return result


class _Events:
    """Device work that ``cudaEventSynchronize`` waits for: the last before the event's record,
    which may lie far behind later launches."""

    def __init__(
        self,
        trace: Trace,
        work: DeviceWork,
        row: Array,
        marks: pl.DataFrame,
        lane_of: dict[int, int],
    ) -> None:
        self.ends = work.ts + work.dur
        self.launch_ts = work.launch_ts
        launched = np.flatnonzero(work.launch >= 0)
        records = trace.cpu.filter(pl.col("call") == "event_record")
        self.record_ts = records["ts"].to_numpy()
        order = launched[np.argsort(work.launch_ts[launched], kind="stable")]
        owner = trace.cpu["thread"].to_numpy()[work.launch[order]]
        self.marked = np.full(len(self.record_ts), -1, dtype=np.int64)
        for thread in records["thread"].unique().to_list():
            # an event is recorded on the stream in use: after the thread's last launch
            own = order[owner == thread]
            rows = np.flatnonzero((records["thread"] == thread).to_numpy())
            place = np.searchsorted(work.launch_ts[own], self.record_ts[rows]) - 1
            if len(own):
                self.marked[rows] = np.where(place >= 0, own[np.maximum(place, 0)], -1)
        self.recorded: dict[int, int] = {}
        """Work by row of the call, where ``cuda_sync`` rows name the record."""
        of_events = marks.filter((pl.col("kind") == "event") & pl.col("recorded").is_not_null())
        for at, stream, recorded in of_events.select("at", "on", "recorded").iter_rows():
            before = np.flatnonzero(
                (work.lane == lane_of.get(stream, -1)) & (work.launch_ts < recorded)
            )
            if len(before):
                self.recorded[int(row[at])] = int(before[np.argmax(work.launch_ts[before])])

    def awaited_work(self, which: int, begin: float, end: float) -> Array:
        """Return the work that a call waited for, as recorded. Else, for a long call, the recorded
        work that ended last before its return. Empty: a call that did not wait does not show its
        work."""
        waited = end - begin > 3 * CALL_NS
        recorded = self.recorded.get(which, -1)
        ended = self.ends[recorded] if recorded >= 0 else np.inf
        # later than its own work: its stream was waiting for another one
        if ended <= end + SLACK_NS and (not waited or ended > max(begin, end - MAX_SYNC_RETURN_NS)):
            return np.array([recorded])
        if not waited:
            return np.zeros(0, dtype=np.int64)
        marked = self.marked[(self.marked >= 0) & (self.record_ts < begin)]
        for candidates in (marked, np.flatnonzero(self.launch_ts < begin)):
            ends = self.ends[candidates]
            near = candidates[
                (ends <= end + SLACK_NS) & (ends > max(begin, end - MAX_SYNC_RETURN_NS))
            ]
            if len(near):
                return near[[np.argmax(self.ends[near])]]
        return np.zeros(0, dtype=np.int64)


# -- the launch queue ------------------------------------------------------------------------------

MIN_QUEUE = 128
"""Minimum number of pending launches that may block; HTA takes the queue to hold 1024."""
SIMILAR = 0.02
"""Share by which the number of pending launches may differ between blocked ones."""
MIN_BLOCKED = 16
AT_ONCE_NS = 5_000
"""Maximum delay of a blocked launch's return after the start of the work that made room, ns."""
MIN_AT_ONCE = 0.7


class _Lane(NamedTuple):
    """The queue of one stream; each entry is the first device work of a launch call."""

    entries: Array
    """Indices of device work in order of launch, those launched before the window first."""
    before_window: int
    """Number of entries launched before the window."""
    depth: int
    """Length of the queue: a launch waits until the entry this far before it has started."""


def add_queue_edges(
    trace: Trace, graph: Graph, edges: EdgeList, work: DeviceWork, node: Array
) -> None:
    """Add edges to launches that find the queue full: they return as work a queue ahead starts.

    The length is measured from launches that waited; where there are none the host never got that
    far ahead. Kernels of one CUDA graph take one place."""
    if not (work.launch >= 0).any():
        return
    lanes = [_lane(trace, work, number) for number in range(len(work.lanes))]
    result = [lane for lane in lanes if lane is not None]
    if not result:
        return
    target, source = [], []
    for lane in result:
        place = np.arange(max(lane.before_window, lane.depth), len(lane.entries))
        target.append(lane.entries[place])
        source.append(lane.entries[place - lane.depth])
    dst, src = np.concatenate(target), np.concatenate(source)
    point = np.full(trace.cpu.height, -1, dtype=np.int64)
    launching = np.flatnonzero(graph.kind == NodeKind.LAUNCH)
    point[graph.row[launching]] = launching
    call = work.launch[dst]
    launch = point[call]
    after = _next_points(graph)[np.maximum(launch, 0)]
    good = (launch >= 0) & (after >= 0) & ~np.isin(call, graph.row[graph.kind == NodeKind.SYNC])
    launch, after, src, call = launch[good], after[good], src[good], call[good]
    length = trace.cpu["dur"].to_numpy()[call].astype(float)
    rest = graph.time[after] - graph.time[launch] - length
    returned = graph.time[launch] + length + graph.origin
    blocked = (length > CALL_NS) & (np.abs(returned - work.ts[src]) <= 2 * AT_ONCE_NS)
    edges.shorten(launch[blocked], after[blocked], CALL_NS + rest[blocked])
    lane, begin = graph.lane[launch[blocked]], graph.time[launch[blocked]]
    for thread in np.unique(lane).tolist():
        own_part = lane == thread
        graph.queue_waits[thread] = union(
            begin[own_part] + CALL_NS, (begin + length[blocked])[own_part]
        )
    # nor does the launch hold its own work back for as long as it waited
    waited = np.isin(work.launch, call[blocked])
    work.launch_overhead[waited] = np.minimum(work.launch_overhead[waited], CALL_NS)
    edges.add(node[src], after, rest, EdgeKind.QUEUE, from_start=True)
    graph.hard["queue-blocked launches"] = after[blocked], length[blocked] - CALL_NS


def _lane(trace: Trace, work: DeviceWork, number: int) -> _Lane | None:
    """Return the queue of a stream, or ``None`` if no launch waited for room in it."""
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
    """Return the queue's length from slow launches with much pending; ``None`` if they disagree."""
    seen = back[slow & (back >= MIN_QUEUE)]
    if len(seen) < 3:
        return None
    depth = float(np.median(seen))
    # those that were slow for another reason find any number
    return round(depth) if np.median(np.abs(seen - depth)) <= SIMILAR * depth else None


def _plateau(back: Array, place: Array, returned: Array, started: Array, able: Array) -> int | None:
    """Return the queue's length from many launches that each waited shortly; else ``None``. Never
    is more pending, and each returns as the work a queue's length before it starts."""
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
    """Return the next host point on the same thread, -1: none."""
    host = np.flatnonzero((graph.kind != NodeKind.DEVICE) & (graph.kind != NodeKind.SOURCE))
    order = host[np.argsort(graph.lane[host], kind="stable")]
    result = np.full(len(graph), -1, dtype=np.int64)
    same = graph.lane[order][1:] == graph.lane[order][:-1]
    result[order[:-1][same]] = order[1:][same]
    return result
