"""Construction of the dependency graph of consecutive steps from the tables of a trace."""

import numpy as np
import polars as pl

from advisor.core.intervals import Array
from advisor.core.trace import BLOCKING_CALLS, Trace
from advisor.measure import Analysis
from advisor.measure.host.names import WORKERS, name_matches
from advisor.measure.host.syncs import work_past_return_ns
from advisor.measure.steps.steps import OUTLIER_FACTOR, find_rhythm
from advisor.replay.device_work import DeviceWork, add_stream_edges, device_nodes, device_work
from advisor.replay.graph import (
    MAX_BATCH_RATIO,
    NEVER,
    EdgeKind,
    EdgeList,
    Graph,
    NodeKind,
    measure_latencies,
)
from advisor.replay.host_nodes import (
    READY_BATCH_NS,
    Handoff,
    HostNodes,
    find_handoffs,
    launch_rows,
    loader_rows,
    wait_rows,
)
from advisor.replay.sync_edges import add_sync_edges

_MAX_NODES = 30_000
"""Maximum number of nodes of one replay, which takes about 15 ms. Longer recordings are represented
by consecutive steps in their middle."""


def representative_steps(a: Analysis) -> tuple[int, int]:
    """Return the run of steps to replay: its first row of the steps table and one after its last.
    It is the longest run of used steps, or its middle beyond ``_MAX_NODES`` nodes, at least three
    if there are three. If every n-th step is long, it has whole cycles. If long steps leave no
    three others in a row, they belong to the loop, and are replayed as well. Without a device no
    step runs into the next, so that one or two are enough."""
    used = a.steps.table["used"].to_numpy()
    group = _longest_run(used)
    if 0 < len(group) < 3 and a.device_id is not None:
        all_steps = _longest_run((a.steps.table["dur"] > 0).to_numpy())
        group = all_steps if len(all_steps) >= 3 else group
    if not len(group):
        return 0, 0
    first, last = int(group[0]), int(group[-1]) + 1
    work = 2.2 * a.trace.gpu.height * (last - first) / max(1, len(used))
    if work > _MAX_NODES and last - first > 3:
        keep = max(3, int((last - first) * _MAX_NODES / work))
        first += (last - first - keep) // 2
        last = first + keep
    return last - (last - first) // (cycle := _cycle_steps(a, first, last)) * cycle, last


def _longest_run(wanted: Array) -> Array:
    rows = np.flatnonzero(wanted)
    return max(np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1), key=len)


def _cycle_steps(a: Analysis, first: int, last: int) -> int:
    """Return n if every n-th of these steps is long, or 1 if they are similar, or the long steps
    are irregular."""
    dur = a.steps.table["dur"].to_numpy()[first:last]
    if not len(dur) or dur.max() <= OUTLIER_FACTOR * dur.min():
        return 1
    cycle = find_rhythm(np.flatnonzero(dur > (dur.min() + dur.max()) / 2), dur)
    return cycle if cycle is not None and cycle <= len(dur) else 1


def build_graph(a: Analysis) -> Graph:
    trace = a.trace
    steps = representative_steps(a)
    table = a.steps.marks[steps[0] : steps[1]]
    bounds = np.append(table["ts"].to_numpy(), host_end(a, table)).astype(np.int64)
    start, end = int(bounds[0]), int(bounds[-1])

    points = HostNodes()
    waiting = wait_rows(trace, start, end)
    launching = launch_rows(trace, start, end)
    step_ns = (end - start) / table.height
    loading = loader_rows(trace, start, end, step_ns)
    cpu_ts = trace.cpu["ts"].to_numpy()
    cpu_end = cpu_ts + np.maximum(trace.cpu["dur"].to_numpy(), 1)
    cpu_thread = trace.cpu["thread"].to_numpy()
    for rows, node_kind in (
        (launching, NodeKind.LAUNCH),
        (waiting, NodeKind.SYNC),
        (loading, NodeKind.LOADER),
    ):
        points.add(cpu_thread[rows], cpu_ts[rows], node_kind, rows)
    points.add(cpu_thread[waiting], cpu_end[waiting], NodeKind.SYNC_END, waiting)
    points.add(cpu_thread[loading], cpu_end[loading], NodeKind.LOADER_END, loading)
    main = trace.main_thread
    if main is not None:
        points.add(np.array(main), bounds, NodeKind.STEP)
    threads = np.unique(cpu_thread[np.concatenate([launching, waiting, loading])])
    if main is not None and main not in threads:
        threads = np.append(threads, main)
    loader_calls = loader_rows(trace, start, end, step_ns, ready=True)
    handoffs = find_handoffs(trace, threads, start, end, loader_calls)
    for thread_id, times in (
        (handoffs.waiter, handoffs.wait_start),
        (handoffs.worker, handoffs.work_start),
        (handoffs.worker, handoffs.work_end),
        (handoffs.waiter, handoffs.wait_end),
    ):
        points.add(thread_id, times, NodeKind.HANDOFF)
    thread, times, kind, row = points.columns()
    inside = (times >= start) & (times <= end)
    thread, times, kind, row = (c[inside] for c in (thread, times, kind, row))
    order_time = _move_behind_awaited(trace, thread, times, kind, row)

    step_threads = _find_step_threads(main, handoffs)
    work = device_work(trace, bounds, step_threads, waiting)
    graph = _merge_nodes(thread, times, kind, row, order_time, work, start)
    graph.latencies = measure_latencies(work)
    edges = EdgeList(graph)
    _add_program_edges(edges, graph)
    add_sync_edges(trace, graph, edges, work)
    _add_loader_edges(edges, graph, trace)
    _add_handoff_edges(edges, graph, handoffs, start)
    add_stream_edges(trace, graph, edges, work)
    edges.write_to_graph()
    graph.steps = steps
    graph.cycle_steps = _cycle_steps(a, *steps)
    graph.step_boundaries = _find_boundaries(graph, bounds - start)
    graph.last_nodes = _find_last_work(trace, graph, work, bounds)
    graph.background_lanes = np.setdiff1d(work.lane, work.lane[work.on_step_threads])
    graph.launched_before_window = _find_launched_before(graph, work)
    return graph


def host_end(a: Analysis, table: pl.DataFrame) -> int:
    """Return when the main thread finished the last step, ns. The steps table may end with the
    step's device work, which is replayed, not copied. A recording without steps ends when a wait
    for this work returns."""
    trace = a.trace
    end, start = int(table["end"][-1]), int(table["ts"][-1])
    if trace.main_thread is None:
        return end
    cpu = trace.cpu.filter(
        (pl.col("thread") == trace.main_thread)
        & (pl.col("ts") >= start)
        & (pl.col("ts") < end)
        & (pl.col("kind") != "overhead")
    ).select("ts", "name", "kind", "call", until=pl.col("ts") + pl.col("dur"))
    if a.steps.source == "whole trace":
        wait = cpu.filter(pl.col("call").is_in(BLOCKING_CALLS) & (pl.col("until") > end))
        end = max([end, *wait["until"]])
    mark = cpu.filter(
        (pl.col("ts") == start)
        & (pl.col("kind") == "annotation")
        & (pl.col("name").cast(pl.String) == table["name"][-1])
    )
    candidates = mark if mark.height else cpu.filter(pl.col("until") <= end)
    ends: list[int] = candidates["until"].sort().to_list()
    return min([end, *ends[-1:]])


def _move_behind_awaited(
    trace: Trace, thread: Array, time: Array, kind: Array, row: Array
) -> Array:
    """Return the times of the points, moved behind the end of the work for which their thread has
    waited. If the trace's clocks disagree, a wait may seem to end earlier. In the new order every
    edge leads forward."""
    result = time.copy()
    back = np.flatnonzero(kind == NodeKind.SYNC_END)
    result[back] += work_past_return_ns(trace, row[back])
    for owner in np.unique(thread[back]):
        on_thread = thread == owner
        result[on_thread] = np.maximum.accumulate(result[on_thread])
    return result


def _merge_nodes(
    thread: Array, time: Array, kind: Array, row: Array, key: Array, work: DeviceWork, start: int
) -> Graph:
    """Merge all nodes in order of time: host points by ``key``, device work by its start."""
    hosts, devices = len(time), len(work.row)
    # work that runs when the window begins counts from the beginning
    work_start = np.maximum(work.ts, start)
    when = np.concatenate([[start - 1], key, work_start])
    tie = np.concatenate([[0], np.ones(hosts), np.full(devices, 2)])
    # host points of a thread at one instant keep their order
    inner = np.concatenate([[0], np.arange(hosts), np.arange(devices)])
    order = np.lexsort((inner, tie, when))
    kinds = np.concatenate([[NodeKind.SOURCE], kind, np.full(devices, NodeKind.DEVICE)]).astype(
        np.uint8
    )
    ends = np.concatenate([[start], time, work.ts + work.dur])
    dur = np.concatenate([np.zeros(1 + hosts), work.ts + work.dur - work_start]).astype(float)
    rows = np.concatenate([[-1], row, work.row])
    lane = np.concatenate([[-1], thread, work.lane])
    none = np.zeros(0, dtype=np.int64)
    return Graph(
        kind=kinds[order],
        row=rows[order],
        lane=lane[order],
        time=(ends[order] - start).astype(float),
        dur=dur[order],
        src=none,
        dst=none,
        weight=none.astype(float),
        edge=none.astype(np.uint8),
        from_start=none.astype(bool),
        lanes=work.lanes,
        step_boundaries=none,
        last_nodes=[],
        origin=start,
        steps=(0, 0),
    )


def _same_as_before(values: Array) -> Array:
    """Return which values equal the previous value; the first never does."""
    same = np.zeros(len(values), dtype=bool)
    same[1:] = values[1:] == values[:-1]
    return same


def _add_program_edges(edges: EdgeList, graph: Graph) -> None:
    """Add host time between a thread's consecutive points; the first of each follows the source."""
    host = np.flatnonzero((graph.kind != NodeKind.DEVICE) & (graph.kind != NodeKind.SOURCE))
    order = host[np.argsort(graph.lane[host], kind="stable")]
    same = _same_as_before(graph.lane[order])
    first = order[~same]
    edges.add(np.zeros(len(first), dtype=np.int64), first, graph.time[first], EdgeKind.PROGRAM)
    src, dst = order[np.flatnonzero(same) - 1], order[same]
    edges.add(src, dst, graph.time[dst] - graph.time[src], EdgeKind.PROGRAM)


def _add_loader_edges(edges: EdgeList, graph: Graph, trace: Trace) -> None:
    """Add the edges of the loader: a starved loader delivers at the rate of its workers, whenever
    it is asked. Without workers the call is host time. Its rate edge is switched off, for edits
    that move the work to workers."""
    requests = np.flatnonzero(graph.kind == NodeKind.LOADER)
    loaded = np.flatnonzero(graph.kind == NodeKind.LOADER_END)
    if not len(loaded):
        return
    by_row = {int(r): int(n) for r, n in zip(graph.row[requests], requests, strict=True)}
    start = np.array([by_row.get(int(r), 0) for r in graph.row[loaded]])
    names = trace.cpu["name"].gather(pl.Series(graph.row[loaded]))
    workers = name_matches(names, WORKERS).to_numpy()
    served = loaded[workers]
    edges.drop_program(served)
    wait = graph.time[served] - graph.time[start[workers]]
    edges.add(start[workers], served, np.minimum(wait, READY_BATCH_NS[""]), EdgeKind.PROGRAM)
    before = _skip_rests_of_workers(graph, trace, np.append(0, loaded[:-1]), loaded)
    rate = np.where(workers, graph.time[loaded] - graph.time[before], NEVER)
    edges.add(before, loaded, rate, EdgeKind.LOADER)


def _skip_rests_of_workers(graph: Graph, trace: Trace, before: Array, loaded: Array) -> Array:
    """Return the nodes from which workers load for each of ``loaded``: the awaited batch before it,
    ``before``, or a later node of the same thread if they rested because enough batches were ready.
    They did where batches in between were ready at once and each took over ``MAX_BATCH_RATIO``
    times as long as usual."""
    cpu = trace.cpu
    requests = cpu["ts"].filter(name_matches(cpu["name"], WORKERS)).sort().to_numpy()
    number = np.searchsorted(requests, cpu["ts"].to_numpy()[graph.row[loaded]])
    batches = np.diff(number)
    if len(batches) < 2 or batches.min() < 1:
        return before
    per_batch = np.diff(graph.time[loaded]) / batches
    usual = float(np.quantile(per_batch, 0.5, method="lower"))
    source = before.copy()
    for i in np.flatnonzero((batches > 1) & (per_batch > MAX_BATCH_RATIO * usual)) + 1:
        latest = graph.time[loaded[i]] - batches[i - 1] * usual
        thread = np.flatnonzero(graph.lane[: loaded[i]] == graph.lane[loaded[i]])
        source[i] = max(before[i], thread[graph.time[thread] <= latest].max(initial=0))
    return source


def _add_handoff_edges(edges: EdgeList, graph: Graph, result: Handoff, start: int) -> None:
    marks = np.flatnonzero(graph.kind == NodeKind.HANDOFF)
    node_at = {
        (int(lane), round(time)): int(node)
        for lane, time, node in zip(graph.lane[marks], graph.time[marks], marks, strict=True)
    }

    def nodes(owner: Array, time: Array) -> Array:
        return np.array(
            [node_at.get((int(o), int(t) - start), 0) for o, t in zip(owner, time, strict=True)],
            dtype=np.int64,
        )

    left, work_start = (
        nodes(result.waiter, result.wait_start),
        nodes(result.worker, result.work_start),
    )
    done, back = nodes(result.worker, result.work_end), nodes(result.waiter, result.wait_end)
    pairs_of = [(left, work_start), (done, back)]
    forward = [(src > 0) & (src < dst) for src, dst in pairs_of]
    woken = np.concatenate([dst[good] for (_, dst), good in zip(pairs_of, forward, strict=True)])
    edges.drop_program(woken)
    for (src, dst), real in zip(pairs_of, forward, strict=True):
        pairs = np.unique(np.stack([src[real], dst[real]]), axis=1)
        edges.add(pairs[0], pairs[1], graph.time[pairs[1]] - graph.time[pairs[0]], EdgeKind.HANDOFF)
    silent = np.zeros(len(graph))
    silent[back[forward[1]]] = (graph.time[back] - graph.time[left])[forward[1]]
    woken = np.unique(woken)
    graph.hard["waits between threads"] = woken, silent[woken]


def _find_boundaries(graph: Graph, bounds: Array) -> Array:
    steps = np.flatnonzero(graph.kind == NodeKind.STEP)
    if len(steps) >= len(bounds):
        return steps[np.searchsorted(graph.time[steps], bounds)]
    # without a host thread, the source is each boundary, and device work alone decides
    return np.zeros(len(bounds), dtype=np.int64)


def _find_launched_before(graph: Graph, work: DeviceWork) -> Array:
    """Return device nodes launched before the window, ahead of their stream's first launch."""
    if not len(work.row):
        return np.zeros(0, dtype=np.int64)
    launched = work.launch >= 0
    first = np.full(len(work.lanes), -1, dtype=np.int64)
    lanes, index = np.unique(work.lane[launched], return_index=True)
    first[lanes] = np.flatnonzero(launched)[index]
    before_window = ~launched & (np.arange(len(launched)) < first[work.lane])
    return device_nodes(graph, work)[before_window]


def _find_step_threads(main: int | None, handoffs: Handoff) -> list[int]:
    """Return the main thread and the threads that take turns with it. Empty if it is unknown."""
    if main is None:
        return []
    pairs = np.stack([handoffs.waiter, handoffs.worker])
    result = np.array([main])
    while True:  # as many rounds as threads hand over to each other in a row
        partners = pairs[:, np.isin(pairs, result).any(axis=0)]
        extended = np.union1d(result, partners)
        if len(extended) == len(result):
            return [int(t) for t in result]
        result = extended


def _find_last_work(trace: Trace, graph: Graph, work: DeviceWork, bounds: Array) -> list[Array]:
    """Return the last device node of each lane launched in each step (or started, if unknown). Work
    that background threads launch is not part of the step."""
    nodes = device_nodes(graph, work)[work.on_step_threads] if len(work.row) else graph.device
    nodes = np.sort(nodes)
    launch = trace.gpu["launch"].gather(pl.Series(graph.row[nodes])).fill_null(-1).to_numpy()
    ts = trace.gpu["ts"].to_numpy()[graph.row[nodes]]
    if trace.cpu.height:
        ts = np.where(launch >= 0, trace.cpu["ts"].to_numpy()[launch], ts)
    step = np.searchsorted(bounds, ts, side="right") - 1
    result = []
    for index in range(len(bounds) - 1):
        members = nodes[step == index]
        _, last = np.unique(graph.lane[members][::-1], return_index=True)
        result.append(members[::-1][last])
    return result
