"""Edges that release a blocked host thread, from the device work for which a call waits."""

from typing import NamedTuple

import numpy as np
import polars as pl

from advisor.core.intervals import Array, union
from advisor.core.trace import Trace
from advisor.measure.host.names import name_matches
from advisor.measure.host.syncs import clock_tolerance_ns, recorded_waits, work_past_return_ns
from advisor.replay.device_work import SLACK_NS, DeviceWork, device_nodes
from advisor.replay.graph import (
    CALL_NS,
    FEW,
    EdgeKind,
    EdgeList,
    Graph,
    Latencies,
    NodeKind,
    median_with_default,
)
from advisor.replay.host_nodes import SLOW_LAUNCH_NS

COLLECTIVE_PATTERN = r"^(nccl|rccl|msccl)"
OWN_WORK_CALLS = ("memcpy", "memcpy_blocking", "launch", "graph_launch", "memset")
"""Calls that wait for their own work, if they wait."""
MAX_SYNC_RETURN_NS = 100_000
"""Maximum delay of a call's return after the awaited work, ns."""


def add_sync_edges(trace: Trace, graph: Graph, edges: EdgeList, work: DeviceWork) -> None:
    """Add edges into the ends of blocking calls, which replace their measured ends."""
    start = np.flatnonzero(graph.kind == NodeKind.SYNC)
    done = np.flatnonzero(graph.kind == NodeKind.SYNC_END)
    node = device_nodes(graph, work) if len(work.row) else np.zeros(0, dtype=np.int64)
    add_queue_edges(trace, graph, edges, work, node)
    if not len(done):
        return
    start_of = {int(r): int(n) for r, n in zip(graph.row[start], start, strict=True)}
    is_known = np.array([int(r) in start_of for r in graph.row[done]])
    done = done[is_known]
    start = np.array([start_of[int(r)] for r in graph.row[done]], dtype=np.int64)
    row = graph.row[done]
    call = trace.cpu["call"].gather(pl.Series(row)).fill_null("other").to_list()
    called = graph.time[start] + graph.origin
    ended = graph.time[done] + graph.origin
    by_call = _group_by_call(work)
    tolerance = np.maximum(clock_tolerance_ns(trace), work_past_return_ns(trace, row))
    awaited = _find_awaited(trace, work, row, call, called, ended, by_call, tolerance)
    last_end = np.array(
        [max(((work.ts + work.dur)[w].max(initial=0)), 0) if len(w) else 0 for w in awaited]
    )
    # a call that stages its copy may return before the last piece has arrived
    is_own = np.array(
        [len(w) > 0 and work.launch[w[0]] == r for w, r in zip(awaited, row, strict=True)]
    )
    allowed_delay = np.where(is_own, np.maximum(tolerance, (last_end - called) // 2), tolerance)
    waited = (last_end > called + 2_000) & (last_end <= ended + allowed_delay)
    idle = ~waited & (ended - called < SLOW_LAUNCH_NS)
    latencies = graph.latencies
    latencies.sync_call = median_with_default((ended - called)[idle], latencies.sync_call)
    sync_return = _measure_return(
        ended - last_end, waited, _find_kinds(work, awaited, is_own), latencies
    )
    # time that the device cannot explain is the call's own cost (lazy loading, locks)
    cost = np.where(waited | (ended - called < SLOW_LAUNCH_NS), latencies.sync_call, ended - called)
    edges.drop_program(done)
    edges.add(start, done, np.minimum(cost, np.maximum(ended - called, 1.0)), EdgeKind.PROGRAM)
    counts = [len(sources) for sources in awaited]
    source = np.concatenate(awaited).astype(np.int64)
    edges.add(node[source], np.repeat(done, counts), np.repeat(sync_return, counts), EdgeKind.SYNC)
    graph.hard["syncs that waited"] = done[waited], (ended - called)[waited]


def _group_by_call(work: DeviceWork) -> dict[int, Array]:
    """Return the work of each launching call; a copy may have several packets."""
    launched = np.flatnonzero(work.launch >= 0)
    launched = launched[np.argsort(work.launch[launched], kind="stable")]
    calls, first = np.unique(work.launch[launched], return_index=True)
    ends = np.append(first, len(launched))[1:]
    return {
        int(call): launched[start:end]
        for call, start, end in zip(calls.tolist(), first.tolist(), ends.tolist(), strict=True)
    }


def _find_kinds(work: DeviceWork, awaited: list[Array], own: Array) -> list[str]:
    """Return each call's kind: the group of its own copy that it waits for, else empty."""
    return [
        work.groups[work.group[result[0]]] if own_part else ""
        for result, own_part in zip(awaited, own.tolist(), strict=True)
    ]


def _measure_return(delay: Array, waited: Array, kinds: list[str], latencies: Latencies) -> Array:
    """Return each call's delay from its work's end to its return, ns: the median of its kind, or
    its own delay if the kind is too rare. Sets ``latencies.sync_return``."""
    near = waited & (np.abs(delay) < MAX_SYNC_RETURN_NS)
    names = np.array(kinds)
    latencies.sync_return = median_with_default(delay[near & (names == "")], latencies.sync_return)
    result = np.full(len(delay), latencies.sync_return)
    for kind in set(kinds) - {""}:
        is_kind = names == kind
        sample = delay[near & is_kind]
        if len(sample) >= FEW:
            result[is_kind] = float(np.median(sample))
        else:
            result[is_kind] = np.where(near[is_kind], delay[is_kind], latencies.sync_return)
    return result


def _find_awaited(
    trace: Trace,
    work: DeviceWork,
    row: Array,
    call: list[str],
    called: Array,
    ended: Array,
    by_call: dict[int, Array],
    tolerance: Array,
) -> list[Array]:
    """Return the device work (indices) that each blocking call waits for: on each relevant stream,
    the last work launched before the call; for a copy, the copy itself."""
    marks = recorded_waits(trace, row)
    lane_of = {stream: index for index, (_, stream) in enumerate(work.lanes)}
    recorded = {
        int(row[mark]): [index for index, (_, other) in enumerate(work.lanes) if other == stream]
        for mark, stream in marks.filter(pl.col("kind") == "stream").select("at", "on").iter_rows()
    }
    events = _EventRecords(trace, work, row, marks, lane_of)
    by_lane = [np.flatnonzero(work.lane == lane) for lane in range(len(work.lanes))]
    by_lane = [lane[np.argsort(work.launch_ts[lane], kind="stable")] for lane in by_lane]
    launch_ts = [work.launch_ts[lane] for lane in by_lane]
    thread = trace.cpu["thread"].to_numpy()
    launched = np.flatnonzero((work.launch >= 0) & ~_find_collective_work(trace, work))
    launched = launched[np.argsort(work.launch_ts[launched], kind="stable")]
    ends = work.ts + work.dur
    owner = np.where(work.launch >= 0, thread[work.launch], -1)
    result = []
    for index, call_row in enumerate(row.tolist()):  # a few calls per step, each with few streams
        start, end = called[index], ended[index]
        if call_row in by_call and call[index] in OWN_WORK_CALLS:
            result.append(by_call[call_row])
            continue
        if call[index] == "sync_event":
            result.append(events.awaited_work(call_row, start, end))
            continue
        last_launched = []
        for lane, ts in zip(by_lane, launch_ts, strict=True):
            position = int(np.searchsorted(ts, start)) - 1
            if position >= 0:
                last_launched.append(int(lane[position]))
        candidates = np.array(last_launched, dtype=np.int64)
        possible = candidates[ends[candidates] <= end + tolerance[index]]
        # independent work of other threads comes before the call by chance: it counts only if
        # nothing else explains the wait
        is_near = ends[possible] > max(start, end - MAX_SYNC_RETURN_NS)
        own_threads = work.on_step_threads[possible]
        if thread[call_row] not in work.step_threads:
            own_threads = owner[possible] == thread[call_row]
        if end - start <= 3 * CALL_NS or (is_near & own_threads).any() or not is_near.any():
            possible = possible[own_threads]
        elif thread[call_row] in work.step_threads:
            possible = possible[work.in_step[possible]]  # another pace: the wait keeps its length
        if call[index] == "sync_device":
            result.append(possible)
            continue
        if call_row in recorded:
            waited_for = possible[np.isin(work.lane[possible], recorded[call_row])]
        else:
            # most likely the stream that the thread used last, except for collectives, which run on
            # the library's own streams, for which programs do not wait
            position = int(np.searchsorted(work.launch_ts[launched], start)) - 1
            recent = launched[max(0, position - 32) : position + 1]
            recent = recent[thread[work.launch[recent]] == thread[call_row]]
            used = work.lane[possible] == work.lane[recent[-1]] if len(recent) else slice(0)
            waited_for = possible[used]
        is_near = possible[ends[possible] > max(start, end - MAX_SYNC_RETURN_NS)]
        if end - start > 3 * CALL_NS and len(is_near) and not np.isin(waited_for, is_near).any():
            # it waited longer: its stream waited for another stream, or it was another stream
            waited_for = np.append(waited_for, is_near[np.argmax(ends[is_near])])
        result.append(waited_for)
    return result


def _find_collective_work(trace: Trace, work: DeviceWork) -> Array:
    """Return which work runs on a stream with only collectives."""
    names = trace.gpu["name"].gather(pl.Series(work.row))
    is_collective = name_matches(names, COLLECTIVE_PATTERN).to_numpy()
    size = len(work.lanes)
    other_counts = np.bincount(work.lane[~is_collective], minlength=size)
    result: Array = (other_counts == 0)[work.lane]
    return result


class _EventRecords:
    """Device work for which ``cudaEventSynchronize`` waits: the last before the event's record,
    possibly long before later launches."""

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
            of_thread = order[owner == thread]
            rows = np.flatnonzero((records["thread"] == thread).to_numpy())
            position = np.searchsorted(work.launch_ts[of_thread], self.record_ts[rows]) - 1
            if len(of_thread):
                self.marked[rows] = np.where(position >= 0, of_thread[np.maximum(position, 0)], -1)
        self.recorded: dict[int, int] = {}
        """Work by row of the call, if ``cuda_sync`` rows name the record."""
        of_events = marks.filter((pl.col("kind") == "event") & pl.col("recorded").is_not_null())
        for mark, stream, recorded in of_events.select("at", "on", "recorded").iter_rows():
            before = np.flatnonzero(
                (work.lane == lane_of.get(stream, -1)) & (work.launch_ts < recorded)
            )
            if len(before):
                self.recorded[int(row[mark])] = int(before[np.argmax(work.launch_ts[before])])

    def awaited_work(self, call_row: int, start: float, end: float) -> Array:
        """Return the recorded work that a call waited for. Else, for a long call, return the
        recorded work that ended last before its return. Empty for other calls, which did not wait
        and show no work."""
        blocked = end - start > 3 * CALL_NS
        recorded = self.recorded.get(call_row, -1)
        ended = self.ends[recorded] if recorded >= 0 else np.inf
        # later than its own work: its stream waited for another stream
        if ended <= end + SLACK_NS and (
            not blocked or ended > max(start, end - MAX_SYNC_RETURN_NS)
        ):
            return np.array([recorded])
        if not blocked:
            return np.zeros(0, dtype=np.int64)
        marked = self.marked[(self.marked >= 0) & (self.record_ts < start)]
        for candidates in (marked, np.flatnonzero(self.launch_ts < start)):
            ends = self.ends[candidates]
            recent = candidates[
                (ends <= end + SLACK_NS) & (ends > max(start, end - MAX_SYNC_RETURN_NS))
            ]
            if len(recent):
                return recent[[np.argmax(self.ends[recent])]]
        return np.zeros(0, dtype=np.int64)


# -- the launch queue ------------------------------------------------------------------------------

MIN_QUEUE_LENGTH = 128
"""Minimum number of pending launches that may block; HTA assumes a queue of 1024."""
MAX_DEPTH_SPREAD = 0.02
"""Maximum relative difference in the number of pending launches between blocked launches."""
MIN_BLOCKED = 16
AT_ONCE_NS = 5_000
"""Maximum delay of a blocked launch's return after the start of the work that made room, ns."""
MIN_AT_ONCE_SHARE = 0.7


class _LaunchQueue(NamedTuple):
    """Queue of one stream; each entry is the first device work of a launch call."""

    entries: Array
    """Indices of device work in order of launch, beginning with work launched before the window."""
    before_window: int
    """Number of entries launched before the window."""
    depth: int
    """Length of the queue: a launch waits until the entry this number of places before it has
    started."""


def add_queue_edges(
    trace: Trace, graph: Graph, edges: EdgeList, work: DeviceWork, node: Array
) -> None:
    """Add edges to launches that find the queue full: they return as work one queue length ahead
    starts.

    The length is measured from launches that waited; without any, the host never got that far
    ahead. Kernels of one CUDA graph take one place."""
    if not (work.launch >= 0).any():
        return
    lanes = [_find_queue(trace, work, number) for number in range(len(work.lanes))]
    result = [lane for lane in lanes if lane is not None]
    if not result:
        return
    target, source = [], []
    for lane in result:
        position = np.arange(max(lane.before_window, lane.depth), len(lane.entries))
        target.append(lane.entries[position])
        source.append(lane.entries[position - lane.depth])
    dst, src = np.concatenate(target), np.concatenate(source)
    point = np.full(trace.cpu.height, -1, dtype=np.int64)
    launching = np.flatnonzero(graph.kind == NodeKind.LAUNCH)
    point[graph.row[launching]] = launching
    call = work.launch[dst]
    launch = point[call]
    after = _find_next_points(graph)[np.maximum(launch, 0)]
    valid = (launch >= 0) & (after >= 0) & ~np.isin(call, graph.row[graph.kind == NodeKind.SYNC])
    launch, after, src, call = launch[valid], after[valid], src[valid], call[valid]
    length = trace.cpu["dur"].to_numpy()[call].astype(float)
    host_ns = graph.time[after] - graph.time[launch] - length
    returned = graph.time[launch] + length + graph.origin
    blocked = (length > CALL_NS) & (np.abs(returned - work.ts[src]) <= 2 * AT_ONCE_NS)
    edges.shorten(launch[blocked], after[blocked], CALL_NS + host_ns[blocked])
    lane, start = graph.lane[launch[blocked]], graph.time[launch[blocked]]
    for thread in np.unique(lane).tolist():
        of_thread = lane == thread
        graph.queue_waits[thread] = union(
            start[of_thread] + CALL_NS, (start + length[blocked])[of_thread]
        )
    # the launch does not delay its own work while it waits, either
    waited = np.isin(work.launch, call[blocked])
    work.launch_overhead[waited] = np.minimum(work.launch_overhead[waited], CALL_NS)
    edges.add(node[src], after, host_ns, EdgeKind.QUEUE, from_start=True)
    graph.hard["queue-blocked launches"] = after[blocked], length[blocked] - CALL_NS


def _find_queue(trace: Trace, work: DeviceWork, number: int) -> _LaunchQueue | None:
    """Return the queue of a stream, or ``None`` if no launch waited for room in it."""
    launched = np.flatnonzero((work.lane == number) & (work.launch >= 0))
    if not len(launched):
        return None
    launched = launched[np.lexsort((work.ts[launched], work.launch_ts[launched]))]
    _, first = np.unique(work.launch[launched], return_index=True)
    launched = launched[np.sort(first)]
    before = np.flatnonzero(
        (work.lane == number) & (work.launch < 0) & (work.ts < work.ts[launched].min())
    )
    if len(before):  # a graph's kernels share their call's correlation
        ids = trace.gpu["correlation"].gather(pl.Series(work.row[before]))
        ids_of_graph = ids.fill_null(-1).to_numpy()
        ids_of_graph = np.where(ids_of_graph < 0, -2 - np.arange(len(ids_of_graph)), ids_of_graph)
        before = before[np.sort(np.unique(ids_of_graph, return_index=True)[1])]
    entries = np.concatenate([before, launched])
    if len(entries) < MIN_QUEUE_LENGTH:
        return None
    call = work.launch[launched]
    dur = trace.cpu["dur"].to_numpy()[call]
    single = (trace.cpu["call"].gather(pl.Series(call)) == "launch").to_numpy()
    returned = work.launch_ts[launched] + dur
    started = np.maximum.accumulate(work.ts[entries])
    position = np.arange(len(before), len(entries))
    # distance back to the last entry that had started when the call returned
    pending = position - np.searchsorted(started, returned + AT_ONCE_NS // 2, side="right") + 1
    depth = _measure_depth(pending, single & (dur > SLOW_LAUNCH_NS))
    if depth is None:
        depth = _find_plateau(pending, position, returned, started, single & (dur > CALL_NS))
    return None if depth is None else _LaunchQueue(entries, len(before), depth)


def _measure_depth(back: Array, slow: Array) -> int | None:
    """Return the queue's length from slow launches with much pending work, or ``None`` if they
    differ."""
    pending = back[slow & (back >= MIN_QUEUE_LENGTH)]
    if len(pending) < 3:
        return None
    depth = float(np.median(pending))
    # launches that were slow for another reason have any number
    return round(depth) if np.median(np.abs(pending - depth)) <= MAX_DEPTH_SPREAD * depth else None


def _find_plateau(
    back: Array, index: Array, returned: Array, started: Array, may_block: Array
) -> int | None:
    """Return the queue's length from many launches that each waited briefly, else ``None``. There
    is never more pending work, and each launch returns as the work one queue length before it
    starts."""
    pending = back[may_block & (back >= MIN_QUEUE_LENGTH)]
    if len(pending) < MIN_BLOCKED:
        return None
    values, counts = np.unique(pending, return_counts=True)
    depth = int(values[np.argmax(counts)])
    full = np.flatnonzero(may_block & (np.abs(back - depth) <= 1))
    if len(full) < MIN_BLOCKED or depth < (1 - MAX_DEPTH_SPREAD) * back.max():
        return None
    late = returned[full] - started[np.maximum(index[full] - depth, 0)]
    at_once = np.abs(late) <= AT_ONCE_NS
    return depth if at_once.mean() >= MIN_AT_ONCE_SHARE else None


def _find_next_points(graph: Graph) -> Array:
    """Return the next host point on the same thread, or -1."""
    host = np.flatnonzero((graph.kind != NodeKind.DEVICE) & (graph.kind != NodeKind.SOURCE))
    order = host[np.argsort(graph.lane[host], kind="stable")]
    result = np.full(len(graph), -1, dtype=np.int64)
    is_same_thread = graph.lane[order][1:] == graph.lane[order][:-1]
    result[order[:-1][is_same_thread]] = order[1:][is_same_thread]
    return result
