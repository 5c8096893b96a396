"""Device work and what lets it start: its launch, its stream, other streams' events."""

from typing import NamedTuple

import numpy as np
import polars as pl

from advisor.core.trace import Trace
from advisor.replay.graph import (
    REACH_NS,
    Array,
    EdgeKind,
    EdgeList,
    Graph,
    NodeKind,
    median_with_default,
)
from advisor.replay.host_nodes import SLOW_LAUNCH_NS

TOLERANCE_NS = 5_000
"""A start within this of what its edges allow is explained."""
SLACK_NS = 1_500
"""Difference between timestamps of one trace that rounding to whole µs explains, ns."""
LONG_CALL = 1.5
"""Factor over the median of their name beyond which launch calls form a group of their own."""


class DeviceWork(NamedTuple):
    """Device rows of the window, ordered by start; columns in ns of the trace."""

    row: Array
    ts: Array
    dur: Array
    lane: Array
    lanes: list[tuple[int, int]]
    launch: Array
    """Row of ``trace.cpu`` of the launch call; -1: launched outside the window."""
    launch_ts: Array
    """Start of the launch call; the smallest integer where it is unknown."""
    group: Array
    """Index into ``groups``; latencies are measured per group."""
    groups: list[str]
    """Names of the groups: the launching call, and for copies the direction and host memory."""
    kind: Array
    """0 kernel, 1 copy, 2 memset."""
    launch_overhead: Array
    """Host time inside the launch call before the device can know of the work, ns."""
    previous: Array
    """Index of the work before it on its stream, -1: none."""
    on_step_threads: Array
    """Whether the work was launched by the main thread or one that takes turns with it. Where the
    launch lies outside the window: as the stream's other work; true where nothing is known."""
    step_threads: list[int]
    """Main thread and those that take turns with it."""


def device_work(
    trace: Trace, start: int, end: int, threads: list[int], blocking: Array
) -> DeviceWork:
    """Return the device rows launched in [start, end), or running in it if launched before or
    unknown. Those launched before may end after it, if work launched in it follows on their stream:
    the host runs far ahead. ``threads``: see ``DeviceWork.step_threads``. ``blocking``: rows of
    ``trace.cpu`` that may block the host."""
    gpu = trace.gpu.with_row_index("row").with_columns(pl.col("row").cast(pl.Int64))
    launch = gpu["launch"].fill_null(-1).to_numpy()
    ts, dur = gpu["ts"].to_numpy(), gpu["dur"].to_numpy()
    launch_ts = np.full(len(ts), np.iinfo(np.int64).min)
    known = launch >= 0
    launch_ts[known] = trace.cpu["ts"].to_numpy()[launch[known]]
    own = (launch_ts >= start) & (launch_ts < end)
    last = gpu.with_columns(last=pl.Series(np.where(own, ts, end)))
    until = last.select(pl.col("last").max().over("device", "stream")).to_series().to_numpy()
    inside = own | ((launch_ts < start) & (ts + dur > start) & (ts < until))
    gpu = gpu.filter(pl.Series(inside))
    row = gpu["row"].to_numpy()
    launch, launch_ts = launch[row], launch_ts[row]
    launch = np.where(launch_ts >= start, launch, -1)
    pairs = gpu.select("device", "stream").unique(maintain_order=True)
    numbered = pairs.with_columns(lane=pl.int_range(pl.len()))
    lane = gpu.join(numbered, on=["device", "stream"], how="left", maintain_order="left")["lane"]
    group, groups = _groups(trace, gpu, launch)
    work = DeviceWork(
        row=row,
        ts=ts[row],
        dur=dur[row],
        lane=lane.to_numpy().astype(np.int64),
        lanes=[(int(d), int(s)) for d, s in pairs.iter_rows()],
        launch=launch,
        launch_ts=launch_ts,
        group=group,
        groups=groups,
        kind=gpu["kind"].to_physical().to_numpy().astype(np.int64),
        launch_overhead=_launch_overhead(trace, gpu, launch, blocking),
        previous=np.zeros(0, dtype=np.int64),
        on_step_threads=np.ones(len(launch), dtype=bool),
        step_threads=threads,
    )
    return work._replace(previous=_previous(work), on_step_threads=_on_step_threads(trace, work))


def _groups(trace: Trace, gpu: pl.DataFrame, launch: Array) -> tuple[Array, list[str]]:
    """Return each work's group and the groups' names, for launch latencies. Groups go by launching
    call and whether it was unusually long; copies by direction and memory too."""
    if trace.cpu.is_empty():
        call = pl.Series("call", [None] * gpu.height, dtype=pl.String)
        length = pl.Series("length", [None] * gpu.height, dtype=pl.Int64)
    else:
        known = pl.Series(np.where(launch >= 0, launch, 0))
        call = trace.cpu["name"].gather(known).alias("call").cast(pl.String)
        call = call.set(pl.Series(launch < 0), None)
        length = trace.cpu["dur"].gather(known).alias("length")
    labels = gpu.with_columns(call, length).select(
        "call",
        long=pl.when(pl.col("length") > LONG_CALL * pl.col("length").median().over("call"))
        .then(pl.lit("long"))
        .otherwise(pl.lit("")),
        # copies of up to 64 KB from pageable memory are handed over with the call
        small=pl.when(pl.col("bytes").fill_null(0) <= 1 << 16)
        .then(pl.lit("small"))
        .otherwise(pl.lit("large")),
        copy=pl.col("copy").cast(pl.String).fill_null(""),
        src=pl.col("src").cast(pl.String).fill_null(""),
        kind=pl.col("kind").cast(pl.String),
    )
    joined = pl.concat_str(pl.col("*").fill_null("?"), separator=" ").alias("key")
    keys = labels.select(joined)["key"]
    names = keys.unique(maintain_order=True).to_list()
    index = {name: number for number, name in enumerate(names)}
    codes = np.array([index[key] for key in keys.to_list()], dtype=np.int64)
    return codes, [str(n) for n in names]


def _on_step_threads(trace: Trace, work: DeviceWork) -> Array:
    known = work.launch >= 0
    own_threads = np.ones(len(known), dtype=bool)
    if not known.any():
        return own_threads
    own_threads[known] = np.isin(
        trace.cpu["thread"].to_numpy()[work.launch[known]], work.step_threads
    )
    if not own_threads[known].any():
        return np.ones(len(known), dtype=bool)
    size = len(work.lanes)
    background = np.bincount(work.lane[known], minlength=size) > 0
    background &= np.bincount(work.lane[known & own_threads], minlength=size) == 0
    own_threads[~known] = ~background[work.lane[~known]]
    return own_threads


def _launch_overhead(trace: Trace, gpu: pl.DataFrame, launch: Array, blocking: Array) -> Array:
    """Return how long each launch call holds its work back, ns: to its return, or to the work's
    start if that comes first in a long call. 0 for unknown calls and for those that last until
    their work is done: ``blocking`` rows, and all pageable copies."""
    own = np.zeros(len(launch))
    known = launch >= 0
    if known.any():
        length = trace.cpu["dur"].to_numpy()[launch[known]]
        passed = (gpu["ts"].to_numpy()[known] - trace.cpu["ts"].to_numpy()[launch[known]]).clip(0)
        own[known] = np.where(length > SLOW_LAUNCH_NS, np.minimum(length, passed), length)
    pageable = gpu["src"].eq_missing("Pageable") | gpu["dst"].eq_missing("Pageable")
    copy = (gpu["kind"] == "memcpy").to_numpy()
    return np.where((copy & pageable.to_numpy()) | np.isin(launch, blocking), 0.0, own)


def _previous(work: DeviceWork) -> Array:
    """Return the work before each on its stream, -1: none. It is the last that had ended at its
    start: work of one stream overlaps in CUDA graphs and with programmatic dependent launch."""
    result = np.full(len(work.row), -1, dtype=np.int64)
    for lane in range(len(work.lanes)):
        own = np.flatnonzero(work.lane == lane)
        ends = (work.ts + work.dur)[own]
        by_end = np.argsort(ends, kind="stable")
        place = np.searchsorted(ends[by_end], work.ts[own] + SLACK_NS, side="right") - 1
        # not itself (very short work), nor anything that starts later
        candidate = own[by_end[np.maximum(place, 0)]]
        in_order = np.append(-1, own[:-1])
        good = (place >= 0) & (candidate < own)
        result[own] = np.where(good, candidate, -1)
        # the usual case: the one that started just before, if it had ended
        before_end = np.where(in_order >= 0, (work.ts + work.dur)[in_order], 0)
        usual = (in_order >= 0) & (before_end <= work.ts[own] + SLACK_NS)
        result[own] = np.where(usual, in_order, result[own])
    return result


def add_stream_edges(trace: Trace, graph: Graph, edges: EdgeList, work: DeviceWork) -> None:
    """Add launch, stream-order and cross-stream edges into all device nodes."""
    if not len(work.row):
        return
    node = device_nodes(graph, work)
    latency = graph.latencies.launch[work.group] + work.launch_overhead
    # work begins before the end of that before it only where it did so in the recording: what began
    # on an idle stream has none of the wait in its duration
    apart = (work.previous >= 0) & (work.ts >= (work.ts + work.dur)[work.previous])
    gap = graph.latencies.gap[work.group]
    gap = np.where(apart, np.maximum(gap, 0.0), gap)
    launched = np.flatnonzero(work.launch >= 0)
    call = np.full(max(trace.cpu.height, 1), 0, dtype=np.int64)
    points = np.flatnonzero(graph.kind == NodeKind.LAUNCH)
    call[graph.row[points]] = points
    src = call[work.launch[launched]]
    edges.add(src, node[launched], np.maximum(latency[launched], 0.0), EdgeKind.LAUNCH)
    chained = np.flatnonzero(work.previous >= 0)
    edges.add(node[work.previous[chained]], node[chained], gap[chained], EdgeKind.STREAM)
    # first on its stream and launched before the window: it starts when it was seen to
    adrift = np.flatnonzero((work.launch < 0) & (work.previous < 0))
    edges.add(
        np.zeros(len(adrift), dtype=np.int64),
        node[adrift],
        np.maximum(0.0, (work.ts[adrift] - graph.origin).astype(float)),
        EdgeKind.LAUNCH,
    )
    allowed = np.maximum(
        np.where(work.launch >= 0, work.launch_ts + np.maximum(latency, 0.0), -np.inf),
        np.where(work.previous >= 0, (work.ts + work.dur)[work.previous] + gap, -np.inf),
    )
    _cross(trace, graph, edges, work, node, allowed)


def device_nodes(graph: Graph, work: DeviceWork) -> Array:
    nodes = graph.device
    by_row = np.full(int(work.row.max()) + 1 if len(work.row) else 1, 0, dtype=np.int64)
    by_row[graph.row[nodes]] = nodes
    return by_row[work.row]


def _cross(
    trace: Trace, graph: Graph, edges: EdgeList, work: DeviceWork, node: Array, allowed: Array
) -> None:
    """Add the waits of one stream for another: recorded ones, those inferred from late starts, else
    those that the calls suggest and the times do not contradict."""
    recorded = _recorded_waits(trace, work)
    late = (work.ts - allowed > TOLERANCE_NS) & np.isfinite(allowed)
    seen = _seen_waits(trace, work, np.flatnonzero(late))
    late_still = late.copy()
    late_still[seen[1]] = False
    _contention(trace, edges, work, node, np.flatnonzero(late_still), allowed)
    implied = _implied_waits(trace, work) if not len(recorded[0]) else (recorded[0][:0],) * 2
    dst = np.concatenate([recorded[1], seen[1], implied[1]])
    src = np.concatenate([recorded[0], seen[0], implied[0]])
    delay = work.ts[dst] - (work.ts + work.dur)[src]
    consistent = delay >= -SLACK_NS
    src, dst = src[consistent], dst[consistent]
    if not len(src):
        return
    binding = late[dst] & (delay[consistent] <= REACH_NS)
    sample = delay[consistent][binding]
    graph.latencies.cross_stream = median_with_default(sample, graph.latencies.cross_stream)
    # the stream waits, not the copy: what if that goes elsewhere?
    after = _next_kernel(work)[dst]
    behind = (work.kind[dst] != 0) & (after >= 0)
    pairs = np.unique(
        np.stack([np.append(src, src[behind]), np.append(dst, after[behind])]), axis=1
    )
    edges.add(node[pairs[0]], node[pairs[1]], graph.latencies.cross_stream, EdgeKind.CROSS_STREAM)
    waited = np.unique(dst[binding])
    graph.hard["cross-stream starts"] = node[waited], (work.ts - allowed)[waited]


def _next_kernel(work: DeviceWork) -> Array:
    """Return the index of the next kernel on the stream of each piece of work, -1: none."""
    result = np.full(len(work.row), -1, dtype=np.int64)
    for lane in range(len(work.lanes)):
        own = np.flatnonzero(work.lane == lane)
        kernel = np.where(work.kind[own] == 0, np.arange(len(own)), len(own))
        nearest = np.minimum.accumulate(kernel[::-1])[::-1]
        nearest = np.append(nearest[1:], len(own))
        result[own] = np.append(own, -1)[nearest]
    return result


def _contention(
    trace: Trace, edges: EdgeList, work: DeviceWork, node: Array, late: Array, allowed: Array
) -> None:
    """Add edges into work that was ready while a kernel of another stream filled the device. It
    starts when that kernel's last blocks are handed out: one wave before its end."""
    gpu = trace.gpu
    device = trace.working_device(work.lanes[0][0]) if work.lanes else None
    if not len(late) or device is None or device.sms is None:
        return
    limit = device.max_threads_per_sm or 2048
    blocks, threads, occupancy = (
        gpu[name].fill_null(0).to_numpy()[work.row].astype(float)
        for name in ("blocks", "threads", "occupancy")
    )
    share = np.where(occupancy > 0, occupancy / 100.0, 1.0)
    room = device.sms * np.maximum(1.0, np.floor(limit * share / np.maximum(threads, 1.0)))
    waves = blocks / room
    end = work.ts + work.dur
    tail = work.dur / np.maximum(waves, 1.0)
    full = np.flatnonzero(waves >= 1.0)
    if not len(full):
        return
    full = full[np.argsort(end[full], kind="stable")]
    ends = end[full]
    src, dst, weight = [], [], []
    kernels = late[work.kind[late] == 0]
    for target in kernels.tolist():  # only kernels that start late for no other reason
        place = int(np.searchsorted(ends, work.ts[target] - REACH_NS))
        for source in full[place : place + 64].tolist():
            early = end[source] - work.ts[target]
            if (
                work.lane[source] != work.lane[target]
                and work.ts[source] < allowed[target] < end[source]
                and early <= 2 * tail[source] + SLACK_NS
            ):
                src.append(node[source])
                dst.append(node[target])
                weight.append(-float(tail[source]) if tail[source] > TOLERANCE_NS else 0.0)
                break
    edges.add(
        np.array(src, dtype=np.int64),
        np.array(dst, dtype=np.int64),
        np.array(weight),
        EdgeKind.CONTENTION,
    )


def _recorded_waits(trace: Trace, work: DeviceWork) -> tuple[Array, Array]:
    """Return (source, target) work of the recorded ``Stream Wait Event`` rows."""
    rows = trace.sync.filter(
        (pl.col("kind") == "stream_wait")
        & pl.col("stream").is_not_null()
        & pl.col("wait_stream").is_not_null()
    )
    none = np.zeros(0, dtype=np.int64)
    if rows.is_empty() or trace.cpu.is_empty():
        return none, none
    ids = trace.cpu.filter(pl.col("correlation").is_not_null()).select("correlation", "ts")
    ids = ids.unique("correlation", keep="first")
    rows = rows.join(ids.rename({"ts": "called"}), on="correlation", how="left")
    rows = rows.join(
        ids.rename({"ts": "recorded", "correlation": "wait_correlation"}),
        on="wait_correlation",
        how="left",
    ).with_columns(pl.col("called").fill_null(pl.col("ts")))
    rows = rows.with_columns(pl.col("recorded").fill_null(pl.col("called")))
    src, dst = [], []
    lane_of = {stream: lane for lane, (_, stream) in enumerate(work.lanes)}
    for stream, other, called, recorded in rows.select(
        "stream", "wait_stream", "called", "recorded"
    ).iter_rows():  # a loop over events that people record a few hundred of
        if stream not in lane_of or other not in lane_of:
            continue
        before = np.flatnonzero((work.lane == lane_of[other]) & (work.launch_ts < recorded))
        after = np.flatnonzero((work.lane == lane_of[stream]) & (work.launch_ts > called))
        if len(before) and len(after):
            src.append(before[np.argmax(work.launch_ts[before])])
            dst.append(after[np.argmin(work.launch_ts[after])])
    return np.array(src, dtype=np.int64), np.array(dst, dtype=np.int64)


def _seen_waits(trace: Trace, work: DeviceWork, late: Array) -> tuple[Array, Array]:
    """Return (source, target) work of waits that explain ``late`` starts. The source is the work of
    another stream that ended just before and was launched earlier. Where the trace has such calls,
    the host must have let a stream wait in the meantime."""
    none = np.zeros(0, dtype=np.int64)
    if not len(late):
        return none, none
    ends = work.ts + work.dur
    by_end = np.argsort(ends, kind="stable")
    sorted_ends = ends[by_end]
    calls = trace.cpu.filter(pl.col("call") == "stream_wait")["ts"].sort().to_numpy()
    found_src, found_dst = [], []
    upto = np.searchsorted(sorted_ends, work.ts[late] + SLACK_NS, side="right")
    since = np.searchsorted(sorted_ends, work.ts[late] - REACH_NS, side="left")
    launched_before = np.where(
        work.previous >= 0, work.launch_ts[work.previous], np.iinfo(np.int64).min
    )
    for target, low, high in zip(late.tolist(), since.tolist(), upto.tolist(), strict=True):
        # a loop over late starts only: each has a handful of candidates
        known = launched_before[target] > np.iinfo(np.int64).min  # else it may lie before the trace
        if len(calls) and work.launch[target] >= 0 and known:
            first, last = np.searchsorted(calls, [launched_before[target], work.launch_ts[target]])
            if first == last:
                continue
        for place in range(high - 1, max(low, high - 64) - 1, -1):
            source = int(by_end[place])
            if (
                work.lane[source] != work.lane[target]
                and source < target
                and (work.on_step_threads[source] or not work.on_step_threads[target])
                and (work.launch[target] < 0 or work.launch_ts[source] < work.launch_ts[target])
            ):
                found_src.append(source)
                found_dst.append(target)
                break
    return np.array(found_src, dtype=np.int64), np.array(found_dst, dtype=np.int64)


def _implied_waits(trace: Trace, work: DeviceWork) -> tuple[Array, Array]:
    """Return (source, target) work of waits that delayed nothing, from the calls. After
    ``cudaStreamWaitEvent`` the thread's next launch waits: on a side stream for the stream used
    before, on that stream for the side stream used last."""
    none = np.zeros(0, dtype=np.int64)
    calls = trace.cpu.filter(pl.col("call") == "stream_wait").select("thread", "ts")
    launched = np.flatnonzero(work.launch >= 0)
    if calls.is_empty() or not len(launched):
        return none, none
    thread = trace.cpu["thread"].to_numpy()[work.launch[launched]]
    order = launched[np.lexsort((launched, work.launch_ts[launched], thread))]
    owner = trace.cpu["thread"].to_numpy()[work.launch[order]].astype(np.int64)
    span = int(max(work.launch_ts[order].max(), int(calls["ts"].to_numpy().max()))) + 2
    key = owner * span + work.launch_ts[order]
    wanted = calls["thread"].to_numpy().astype(np.int64) * span + calls["ts"].to_numpy()
    place = np.unique(np.searchsorted(key, wanted))
    place = place[(place > 0) & (place < len(order))]
    place = place[owner[place] == owner[place - 1]]
    target, before = order[place], order[place - 1]
    side = work.lane[target] != work.lane[before]
    src, dst = [before[side]], [target[side]]
    # back on the same stream: the latest side-stream work launched before, if it had ended
    busiest = np.argmax(np.bincount(work.lane)) if len(work.lane) else 0
    others = np.flatnonzero((work.lane != busiest) & (work.launch >= 0) & work.on_step_threads)
    others = others[np.argsort(work.launch_ts[others], kind="stable")]
    back = target[~side]
    if len(others) and len(back):
        at = np.searchsorted(work.launch_ts[others], work.launch_ts[back]) - 1
        good = at >= 0
        src.append(others[at[good]])
        dst.append(back[good])
    source, goal = np.concatenate(src), np.concatenate(dst)
    different = work.lane[source] != work.lane[goal]
    forward = (
        different & (source < goal) & (work.on_step_threads[source] | ~work.on_step_threads[goal])
    )
    return source[forward], goal[forward]
