"""Device work and the causes of its start: its launch, its stream, other streams' events."""

from typing import NamedTuple

import numpy as np
import polars as pl

from advisor.core.intervals import Array
from advisor.core.trace import Trace
from advisor.replay.graph import REACH_NS, EdgeKind, EdgeList, Graph, NodeKind, median_with_default
from advisor.replay.host_nodes import SLOW_LAUNCH_NS

TOLERANCE_NS = 5_000
"""Maximum difference between a start and what its edges allow for the start to be explained, ns."""
SLACK_NS = 1_500
"""Difference between timestamps of one trace that rounding to whole µs explains, ns."""
LONG_CALL_RATIO = 1.5
"""Minimum ratio to the median of its name at which a launch call belongs to a separate group."""


class DeviceWork(NamedTuple):
    """Device rows of the window, ordered by start; columns in ns of the trace."""

    row: Array
    ts: Array
    dur: Array
    lane: Array
    lanes: list[tuple[int, int]]
    launch: Array
    """Row of ``trace.cpu`` of the launch call, or -1 if launched outside the window."""
    launch_ts: Array
    """Start of the launch call, or the smallest integer where unknown."""
    group: Array
    """Index into ``groups``; latencies are measured per group."""
    groups: list[str]
    """Names of the groups: the launching call and, for copies, the direction and host memory."""
    kind: Array
    """0 kernel, 1 copy, 2 memset."""
    launch_overhead: Array
    """Host time inside the launch call before the work reaches the device, ns."""
    previous: Array
    """Index of the previous work on its stream, or -1."""
    on_step_threads: Array
    """Whether the main thread, or one that takes turns with it, launched the work. A launch outside
    the window counts like the stream's other work, or as true if nothing is known."""
    step_threads: list[int]
    """Main thread and the threads that take turns with it."""
    in_step: Array
    """Whether a step thread launched the work, or one that launches equally often in each step.
    Other threads have a pace of their own."""


def device_work(trace: Trace, bounds: Array, threads: list[int], blocking: Array) -> DeviceWork:
    """Return the device rows launched in the window, or running in it if launched before or
    unknown. Rows launched before may end after it, if work launched in it follows on their stream:
    then the host runs far ahead. ``bounds``: step boundaries, ns; the window is from the first to
    the last. ``threads``: see ``DeviceWork.step_threads``. ``blocking``: rows of ``trace.cpu`` that
    may block the host."""
    start, end = int(bounds[0]), int(bounds[-1])
    gpu = trace.gpu.with_row_index("row").with_columns(pl.col("row").cast(pl.Int64))
    launch = gpu["launch"].fill_null(-1).to_numpy()
    ts, dur = gpu["ts"].to_numpy(), gpu["dur"].to_numpy()
    launch_ts = np.full(len(ts), np.iinfo(np.int64).min)
    has_launch = launch >= 0
    launch_ts[has_launch] = trace.cpu["ts"].to_numpy()[launch[has_launch]]
    launched_inside = (launch_ts >= start) & (launch_ts < end)
    frame = gpu.with_columns(last=pl.Series(np.where(launched_inside, ts, end)))
    until = frame.select(pl.col("last").max().over("device", "stream")).to_series().to_numpy()
    inside = launched_inside | ((launch_ts < start) & (ts + dur > start) & (ts < until))
    gpu = gpu.filter(pl.Series(inside))
    row = gpu["row"].to_numpy()
    launch, launch_ts = launch[row], launch_ts[row]
    launch = np.where(launch_ts >= start, launch, -1)
    pairs = gpu.select("device", "stream").unique(maintain_order=True)
    numbered = pairs.with_columns(lane=pl.int_range(pl.len()))
    lane = gpu.join(numbered, on=["device", "stream"], how="left", maintain_order="left")["lane"]
    group, groups = _group_launches(trace, gpu, launch)
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
        in_step=np.ones(len(launch), dtype=bool),
    )
    own_threads = _find_step_work(trace, work)
    return work._replace(
        previous=_find_previous(work),
        on_step_threads=own_threads,
        in_step=own_threads | _launches_equally_often(trace, work, bounds),
    )


def _group_launches(trace: Trace, gpu: pl.DataFrame, launch: Array) -> tuple[Array, list[str]]:
    """Return each work's group and the groups' names, for launch latencies. A group has one
    launching call, unusually long or not, and for copies one direction and memory."""
    if trace.cpu.is_empty():
        call = pl.Series("call", [None] * gpu.height, dtype=pl.String)
        length = pl.Series("length", [None] * gpu.height, dtype=pl.Int64)
    else:
        rows = pl.Series(np.where(launch >= 0, launch, 0))
        call = trace.cpu["name"].gather(rows).alias("call").cast(pl.String)
        call = call.set(pl.Series(launch < 0), None)
        length = trace.cpu["dur"].gather(rows).alias("length")
    labels = gpu.with_columns(call, length).select(
        "call",
        long=pl.when(pl.col("length") > LONG_CALL_RATIO * pl.col("length").median().over("call"))
        .then(pl.lit("long"))
        .otherwise(pl.lit("")),
        # the call itself takes over copies of up to 64 KB from pageable memory
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


def _find_step_work(trace: Trace, work: DeviceWork) -> Array:
    has_launch = work.launch >= 0
    own_threads = np.ones(len(has_launch), dtype=bool)
    if not has_launch.any():
        return own_threads
    own_threads[has_launch] = np.isin(
        trace.cpu["thread"].to_numpy()[work.launch[has_launch]], work.step_threads
    )
    if not own_threads[has_launch].any():
        return np.ones(len(has_launch), dtype=bool)
    size = len(work.lanes)
    background = np.bincount(work.lane[has_launch], minlength=size) > 0
    background &= np.bincount(work.lane[has_launch & own_threads], minlength=size) == 0
    own_threads[~has_launch] = ~background[work.lane[~has_launch]]
    return own_threads


def _launches_equally_often(trace: Trace, work: DeviceWork, bounds: Array) -> Array:
    """Return which work belongs to a thread with as many launches in each step as in the others."""
    result = work.launch < 0
    if result.all():
        return result
    thread = np.where(result, -1, trace.cpu["thread"].to_numpy()[work.launch])
    for owner in np.unique(thread[~result]):
        launches, _ = np.histogram(work.launch_ts[thread == owner], bounds)
        result[thread == owner] = launches.min() == launches.max()
    return result


def _launch_overhead(trace: Trace, gpu: pl.DataFrame, launch: Array, blocking: Array) -> Array:
    """Return how long each launch call delays its work, ns: until its return, or until the work's
    start if that comes first in a long call. 0 for unknown calls and for calls that last until
    their work is done: ``blocking`` rows, and all pageable copies."""
    overhead = np.zeros(len(launch))
    called = launch >= 0
    if called.any():
        length = trace.cpu["dur"].to_numpy()[launch[called]]
        passed = (gpu["ts"].to_numpy()[called] - trace.cpu["ts"].to_numpy()[launch[called]]).clip(0)
        overhead[called] = np.where(length > SLOW_LAUNCH_NS, np.minimum(length, passed), length)
    pageable = gpu["src"].eq_missing("Pageable") | gpu["dst"].eq_missing("Pageable")
    copy = (gpu["kind"] == "memcpy").to_numpy()
    return np.where((copy & pageable.to_numpy()) | np.isin(launch, blocking), 0.0, overhead)


def _find_previous(work: DeviceWork) -> Array:
    """Return the previous work on the stream of each, or -1. It is the last that had ended at its
    start: work of one stream overlaps in CUDA graphs and with programmatic dependent launch."""
    result = np.full(len(work.row), -1, dtype=np.int64)
    for lane in range(len(work.lanes)):
        members = np.flatnonzero(work.lane == lane)
        ends = (work.ts + work.dur)[members]
        by_end = np.argsort(ends, kind="stable")
        index = np.searchsorted(ends[by_end], work.ts[members] + SLACK_NS, side="right") - 1
        # not itself (very short work), nor anything that starts later
        candidate = members[by_end[np.maximum(index, 0)]]
        in_order = np.append(-1, members[:-1])
        is_valid = (index >= 0) & (candidate < members)
        result[members] = np.where(is_valid, candidate, -1)
        # the usual case: the one that started just before, if it had ended
        before_end = np.where(in_order >= 0, (work.ts + work.dur)[in_order], 0)
        usual = (in_order >= 0) & (before_end <= work.ts[members] + SLACK_NS)
        result[members] = np.where(usual, in_order, result[members])
    return result


def add_stream_edges(trace: Trace, graph: Graph, edges: EdgeList, work: DeviceWork) -> None:
    """Add launch, stream-order and cross-stream edges into all device nodes."""
    if not len(work.row):
        return
    node = device_nodes(graph, work)
    latency = graph.latencies.launch[work.group] + work.launch_overhead
    # work begins before the end of the previous work only where it did so in the recording: work
    # that began on an idle stream has no wait in its duration
    in_turn = (work.previous >= 0) & (work.ts >= (work.ts + work.dur)[work.previous])
    gap = graph.latencies.gap[work.group]
    gap = np.where(in_turn, np.maximum(gap, 0.0), gap)
    launched = np.flatnonzero(work.launch >= 0)
    call = np.full(max(trace.cpu.height, 1), 0, dtype=np.int64)
    points = np.flatnonzero(graph.kind == NodeKind.LAUNCH)
    call[graph.row[points]] = points
    src = call[work.launch[launched]]
    edges.add(src, node[launched], np.maximum(latency[launched], 0.0), EdgeKind.LAUNCH)
    chained = np.flatnonzero(work.previous >= 0)
    edges.add(node[work.previous[chained]], node[chained], gap[chained], EdgeKind.STREAM)
    # first on its stream and launched before the window: it starts at its recorded time
    unanchored = np.flatnonzero((work.launch < 0) & (work.previous < 0))
    edges.add(
        np.zeros(len(unanchored), dtype=np.int64),
        node[unanchored],
        np.maximum(0.0, (work.ts[unanchored] - graph.origin).astype(float)),
        EdgeKind.LAUNCH,
    )
    allowed = np.maximum(
        np.where(work.launch >= 0, work.launch_ts + np.maximum(latency, 0.0), -np.inf),
        np.where(work.previous >= 0, (work.ts + work.dur)[work.previous] + gap, -np.inf),
    )
    _add_cross_edges(trace, graph, edges, work, node, allowed)


def device_nodes(graph: Graph, work: DeviceWork) -> Array:
    nodes = graph.device
    by_row = np.full(int(work.row.max()) + 1 if len(work.row) else 1, 0, dtype=np.int64)
    by_row[graph.row[nodes]] = nodes
    return by_row[work.row]


def _add_cross_edges(
    trace: Trace, graph: Graph, edges: EdgeList, work: DeviceWork, node: Array, allowed: Array
) -> None:
    """Add the waits of one stream for another: recorded waits and waits inferred from late starts,
    else waits that the calls suggest and the times do not contradict."""
    recorded = _recorded_waits(trace, work)
    late = (work.ts - allowed > TOLERANCE_NS) & np.isfinite(allowed)
    inferred = _infer_waits(trace, work, np.flatnonzero(late))
    unexplained = late.copy()
    unexplained[inferred[1]] = False
    _add_contention(trace, edges, work, node, np.flatnonzero(unexplained), allowed)
    implied = _implied_waits(trace, work) if not len(recorded[0]) else (recorded[0][:0],) * 2
    dst = np.concatenate([recorded[1], inferred[1], implied[1]])
    src = np.concatenate([recorded[0], inferred[0], implied[0]])
    delay = work.ts[dst] - (work.ts + work.dur)[src]
    consistent = delay >= -SLACK_NS
    src, dst = src[consistent], dst[consistent]
    if not len(src):
        return
    binding = late[dst] & (delay[consistent] <= REACH_NS)
    sample = delay[consistent][binding]
    graph.latencies.cross_stream = median_with_default(sample, graph.latencies.cross_stream)
    # the stream waits, not the copy: a copy may move to another stream
    following = _find_next_kernel(work)[dst]
    is_copy = (work.kind[dst] != 0) & (following >= 0)
    pairs = np.unique(
        np.stack([np.append(src, src[is_copy]), np.append(dst, following[is_copy])]), axis=1
    )
    edges.add(node[pairs[0]], node[pairs[1]], graph.latencies.cross_stream, EdgeKind.CROSS_STREAM)
    waited = np.unique(dst[binding])
    graph.hard["cross-stream starts"] = node[waited], (work.ts - allowed)[waited]


def _find_next_kernel(work: DeviceWork) -> Array:
    """Return the index of the next kernel on the stream of each piece of work, or -1."""
    result = np.full(len(work.row), -1, dtype=np.int64)
    for lane in range(len(work.lanes)):
        members = np.flatnonzero(work.lane == lane)
        kernel = np.where(work.kind[members] == 0, np.arange(len(members)), len(members))
        nearest = np.minimum.accumulate(kernel[::-1])[::-1]
        nearest = np.append(nearest[1:], len(members))
        result[members] = np.append(members, -1)[nearest]
    return result


def _add_contention(
    trace: Trace, edges: EdgeList, work: DeviceWork, node: Array, late: Array, allowed: Array
) -> None:
    """Add edges into work that was ready while a kernel of another stream filled the device. It
    starts when that kernel's last blocks are scheduled: one wave before its end."""
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
    for target in kernels.tolist():  # only kernels whose late start has no other reason
        index = int(np.searchsorted(ends, work.ts[target] - REACH_NS))
        for source in full[index : index + 64].tolist():
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
    ).iter_rows():  # a loop over at most a few hundred events
        if stream not in lane_of or other not in lane_of:
            continue
        before = np.flatnonzero((work.lane == lane_of[other]) & (work.launch_ts < recorded))
        after = np.flatnonzero((work.lane == lane_of[stream]) & (work.launch_ts > called))
        if len(before) and len(after):
            src.append(before[np.argmax(work.launch_ts[before])])
            dst.append(after[np.argmin(work.launch_ts[after])])
    return np.array(src, dtype=np.int64), np.array(dst, dtype=np.int64)


def _infer_waits(trace: Trace, work: DeviceWork, late: Array) -> tuple[Array, Array]:
    """Return (source, target) work of waits that explain ``late`` starts. The source is the work of
    another stream that ended just before and was launched earlier. If the trace has calls that let
    a stream wait, one of them must be in between."""
    none = np.zeros(0, dtype=np.int64)
    if not len(late):
        return none, none
    ends = work.ts + work.dur
    by_end = np.argsort(ends, kind="stable")
    sorted_ends = ends[by_end]
    calls = trace.cpu.filter(pl.col("call") == "stream_wait")["ts"].sort().to_numpy()
    sources, targets = [], []
    upto = np.searchsorted(sorted_ends, work.ts[late] + SLACK_NS, side="right")
    since = np.searchsorted(sorted_ends, work.ts[late] - REACH_NS, side="left")
    launched_before = np.where(
        work.previous >= 0, work.launch_ts[work.previous], np.iinfo(np.int64).min
    )
    for target, low, high in zip(late.tolist(), since.tolist(), upto.tolist(), strict=True):
        # a loop over late starts only: each has a few candidates
        in_trace = (
            launched_before[target] > np.iinfo(np.int64).min
        )  # else it may be before the trace
        if len(calls) and work.launch[target] >= 0 and in_trace:
            first, last = np.searchsorted(calls, [launched_before[target], work.launch_ts[target]])
            if first == last:
                continue
        for index in range(high - 1, max(low, high - 64) - 1, -1):
            source = int(by_end[index])
            if (
                work.lane[source] != work.lane[target]
                and source < target
                and (work.on_step_threads[source] or not work.on_step_threads[target])
                and (work.launch[target] < 0 or work.launch_ts[source] < work.launch_ts[target])
            ):
                sources.append(source)
                targets.append(target)
                break
    return np.array(sources, dtype=np.int64), np.array(targets, dtype=np.int64)


def _implied_waits(trace: Trace, work: DeviceWork) -> tuple[Array, Array]:
    """Return (source, target) work of waits that delayed nothing, from the calls. After
    ``cudaStreamWaitEvent`` the thread's next launch waits: on a side stream for the stream used
    before, and back on that stream for the last used side stream."""
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
    index = np.unique(np.searchsorted(key, wanted))
    index = index[(index > 0) & (index < len(order))]
    index = index[owner[index] == owner[index - 1]]
    target, before = order[index], order[index - 1]
    side = work.lane[target] != work.lane[before]
    src, dst = [before[side]], [target[side]]
    # back on the same stream: the last side-stream work launched before, if it had ended
    busiest = np.argmax(np.bincount(work.lane)) if len(work.lane) else 0
    others = np.flatnonzero((work.lane != busiest) & (work.launch >= 0) & work.on_step_threads)
    others = others[np.argsort(work.launch_ts[others], kind="stable")]
    back = target[~side]
    if len(others) and len(back):
        latest = np.searchsorted(work.launch_ts[others], work.launch_ts[back]) - 1
        is_valid = latest >= 0
        src.append(others[latest[is_valid]])
        dst.append(back[is_valid])
    source, goal = np.concatenate(src), np.concatenate(dst)
    different = work.lane[source] != work.lane[goal]
    forward = (
        different & (source < goal) & (work.on_step_threads[source] | ~work.on_step_threads[goal])
    )
    return source[forward], goal[forward]
