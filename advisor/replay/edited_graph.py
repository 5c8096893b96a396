"""Graph with edits: each edit says what it removes, and all are applied at once.

So the order of edits does not matter, and a repeated edit counts once. Where edits overlap, device
work and each instant of host time keep the product of the factors. A launch or wait is removed if
any edit removes it."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import polars as pl

from advisor.core.finding import Edit
from advisor.core.intervals import (
    EMPTY,
    Array,
    Intervals,
    covered_length,
    intervals_of,
    subtract,
    union_of,
)
from advisor.replay.graph import NEVER, EdgeKind, Graph, NodeKind
from advisor.replay.host_nodes import ready_batch_ns
from advisor.replay.overlap import move_to_streams
from advisor.replay.selection import Selection, collectives_on_host, selected_gaps, selected_host


class EditedGraph(NamedTuple):
    """Dependency graph of one rank with edits applied."""

    graph: Graph
    weight: Array
    dur: Array
    """Duration of each node, ns."""


@dataclass
class HostTime:
    """Host time of one thread that remains after the edits."""

    parts: list[tuple[Intervals, float]] = field(default_factory=list)
    """Instants, and their remaining share."""
    captured: list[tuple[Intervals, float]] = field(default_factory=list)
    """Instants removed from edges, each down to a minimum, ns: the cost of a CUDA graph's node."""


class GraphEdits:
    """Collector of the changes that edits make to a graph; :meth:`build` applies them to a copy."""

    def __init__(self, selected: Selection, assumption: str = "") -> None:
        """Set ``assumption`` to ``low`` or ``high`` to take the factors that make the gain small or
        large."""
        graph = selected.graph
        self.selected = selected
        self.a = selected.a
        self.graph = graph
        self.assumption = assumption
        self.dur = graph.dur
        self.kept_share = np.ones(len(graph))
        """Share of each node's duration that remains."""
        self.max_dur = np.full(len(graph), np.inf)
        """Maximum duration of each node, ns."""
        self.dropped = np.zeros(len(graph), dtype=bool)
        """Whether each node is device work that no longer runs."""
        self.merged = np.zeros(len(graph), dtype=bool)
        """Whether each node is merged into the kernel before it."""
        self.moved = np.zeros(len(graph), dtype=bool)
        """Whether each node runs on a separate stream."""
        self.issued_earlier = np.zeros(len(graph), dtype=bool)
        """Whether each moved node is also issued earlier."""
        self.unblocked = np.zeros(len(graph), dtype=bool)
        """Whether each node is the end of a blocking call that no longer waits."""
        self.host: dict[int, HostTime] = {}
        """Remaining host time by thread."""
        self.workers: list[tuple[int, Array]] = []
        """Number of loader workers, and the ends of the waits for the loader to which it
        applies."""
        self.batch = 1.0
        """New batch size over old."""

    def count(self, edit: Edit) -> int:
        """Count the events of the replayed steps that an edit selects."""
        graph = self.graph
        first, last = graph.origin, graph.origin + float(graph.time[graph.step_boundaries[-1]])
        if (table := collectives_on_host(self.a, edit.select)) is not None:
            ts = table["launch_ts"].to_numpy()
            return int(((ts >= first) & (ts < last)).sum())
        if edit.select.on == "gpu":
            return len(self.selected.device_work(edit.select))
        if edit.select.on == "gap":
            ts = self.a.gaps["ts"].to_numpy()[selected_gaps(self.a, edit.select)]
        else:
            ts = self.a.trace.cpu["ts"].to_numpy()[selected_host(self.a, edit.select)]
        return int(((ts >= first) & (ts < last)).sum())

    # -- what edits take away ---------------------------------------------------------------

    def shrink_host(self, intervals: dict[int, Intervals], factor: float) -> None:
        """Scale the host time inside the intervals (by thread, ns from the window's start)."""
        for thread, time in intervals.items():
            self.host.setdefault(thread, HostTime()).parts.append((time, factor))

    def capture(self, intervals: dict[int, Intervals], cost: float) -> None:
        """Remove host time around launches, except ``cost`` ns each, and the launches' latency."""
        for thread, time in intervals.items():
            self.host.setdefault(thread, HostTime()).captured.append((time, cost))

    # -- all at once ------------------------------------------------------------------------

    def build(self, real_share: Array | None = None) -> EditedGraph:
        """Return the graph with all edits applied. ``real_share``: share of each edge's time that
        would remain without a profiler."""
        graph, weight = self.graph, self.graph.weight.copy()
        dur = np.minimum(self.dur * self.kept_share, np.maximum(self.max_dur, 0.0))
        dur[self.dropped] = 0.0
        gone = self.dropped | self.merged
        into = gone[graph.dst]
        stream = graph.edge == EdgeKind.STREAM
        # its stream still waits for the same events
        weight[into & ~stream & (graph.edge != EdgeKind.CROSS_STREAM)] = NEVER
        weight[into & stream] = np.minimum(weight[into & stream], 0.0)
        # work that starts before its stream's last work ends (programmatic dependent launch) still
        # does, but by less if it is shorter, so that it does not end earlier
        early = np.flatnonzero(stream & (weight < 0) & (weight > NEVER))
        targets = graph.dst[early]
        excess = np.maximum(-weight[early] - self.dur[targets], 0.0)
        shares = np.minimum(dur[targets] / np.maximum(self.dur[targets], 1.0), 1.0)
        weight[early] = (weight[early] + excess) * shares - excess
        self._shrink_host_edges(weight)
        if self.batch != 1.0:
            loaded = graph.kind[graph.dst] == NodeKind.LOADER_END
            weight[loaded & np.isin(graph.edge, _LOADING_EDGES) & (weight > 0)] *= self.batch
        more_workers(self, weight)
        into = self.unblocked[graph.dst]
        weight[into & np.isin(graph.edge, [EdgeKind.SYNC, EdgeKind.LOADER])] = NEVER
        program = into & (graph.edge == EdgeKind.PROGRAM)
        weight[program] = np.minimum(weight[program], graph.latencies.sync_call)
        if real_share is not None:
            weight *= real_share
        if (self.moved & ~self.dropped).any():
            graph, weight = move_to_streams(self, weight)
        return EditedGraph(graph, weight, dur)

    def _shrink_host_edges(self, weight: Array) -> None:
        graph = self.graph
        host = {thread: HostTime(list(h.parts), h.captured) for thread, h in self.host.items()}
        for thread, calls in self._find_removed_calls().items():
            host.setdefault(thread, HostTime()).parts.append((calls, 0.0))
        program = np.flatnonzero((graph.edge == EdgeKind.PROGRAM) & (graph.src > 0))
        # of a wait, the call itself remains; its released end is computed
        program = program[graph.kind[graph.dst[program]] != NodeKind.SYNC_END]
        lane = graph.lane[graph.dst[program]]
        launch = np.flatnonzero((graph.edge == EdgeKind.LAUNCH) & (graph.src > 0))
        for thread, time in host.items():
            edges = program[lane == thread]
            start, end = graph.time[graph.src[edges]], graph.time[graph.dst[edges]]
            hidden = graph.queue_waits.get(thread, EMPTY)
            remaining = np.maximum(
                weight[edges] - saved_between(start, end, time.parts, hidden), 0.0
            )
            if time.captured:
                floor = np.full(len(edges), np.inf)
                for part, cost in time.captured:
                    inside = _covered(start, end, part) > 0
                    floor[inside] = np.minimum(floor[inside], cost)
                parts = [*time.parts, *((part, 0.0) for part, _ in time.captured)]
                shortest = np.maximum(weight[edges] - saved_between(start, end, parts, hidden), 0.0)
                shortest = np.maximum(shortest, np.minimum(floor, weight[edges]))
                remaining = np.minimum(remaining, shortest)
                self._shorten_launches(
                    weight,
                    launch,
                    thread,
                    subtract(union_of(*(part for part, _ in time.captured)), hidden),
                )
            weight[edges] = remaining

    def _shorten_launches(self, weight: Array, launch: Array, thread: int, time: Intervals) -> None:
        """Remove the intervals from the time by which launch calls delay their work."""
        graph = self.graph
        edges = launch[graph.lane[graph.src[launch]] == thread]
        start = graph.time[graph.src[edges]]
        end = start + self.a.trace.cpu["dur"].to_numpy()[graph.row[graph.src[edges]]]
        is_active = weight[edges] > NEVER
        shorter = np.maximum(weight[edges] - _covered(start, end, time), 0.0)
        weight[edges] = np.where(is_active, shorter, weight[edges])

    def _find_removed_calls(self) -> dict[int, Intervals]:
        """Return, by thread, the host time of calls that no longer launch anything, and of the
        operators of merged kernels that launch nothing else."""
        gpu, cpu, device = self.a.trace.gpu, self.a.trace.cpu, self.graph.device
        row = self.graph.row
        gone = self.dropped | self.merged
        if not gone.any():
            return {}

        def calls(column: str, nodes: Array) -> Array:
            result: Array = gpu[column].gather(pl.Series(row[nodes])).fill_null(-1).to_numpy()
            return result

        stays = device[~gone[device]]
        launch = np.setdiff1d(calls("launch", np.flatnonzero(gone)), calls("launch", stays))
        operator = np.setdiff1d(calls("op", np.flatnonzero(self.merged)), calls("op", stays))
        rows = np.union1d(launch, operator)
        rows = rows[rows >= 0]
        return self.selected.thread_intervals(
            *(cpu[column].to_numpy()[rows] for column in ("thread", "ts", "dur"))
        )


_LOADING_EDGES = (EdgeKind.PROGRAM, EdgeKind.LOADER)


def _covered(start: Array, end: Array, covering: Intervals) -> Array:
    result: Array = covered_length(start.astype(np.int64), end.astype(np.int64), covering)
    return result


def saved_between(
    start: Array, end: Array, parts: list[tuple[Intervals, float]], hidden: Intervals
) -> Array:
    """Return the time removed from ``start`` to ``end``, ns. Each instant keeps the product of the
    shares of all parts that cover it; ``hidden`` instants remain complete."""
    if not parts:
        return np.zeros(len(start))
    bounds = np.unique(np.concatenate([c for p in [*parts, (hidden, 1.0)] for c in p[0]]))
    shares = np.ones(len(bounds))
    for time, share in [*parts, (hidden, np.nan)]:
        change = np.zeros(len(bounds), dtype=np.int64)
        change[np.searchsorted(bounds, time.start)] += 1
        change[np.searchsorted(bounds, time.end)] -= 1
        inside = np.cumsum(change) > 0
        shares[inside] = 1.0 if np.isnan(share) else shares[inside] * share
    removed = np.append(0.0, np.cumsum((1.0 - shares[:-1]) * np.diff(bounds)))
    if not len(bounds):
        return np.zeros(len(start))
    result: Array = np.interp(end, bounds, removed) - np.interp(start, bounds, removed)
    return result


# -- loader work that moves to worker processes ----------------------------------------------------

LOST_LOADING_SHARE = {"high": 0.0, "": 0.1, "low": 0.2}
"""Share of the computed loading that the step loses to workers on the same memory and caches, by
assumption. Measured gains of workers were 80 to 100% of a replay without this loss
(``shipped_ledger.jsonl``)."""


def more_workers(edits: GraphEdits, weight: Array) -> None:
    """Apply loader edits to the weights; for the same batches, the edit with most workers
    counts."""
    is_open = np.ones(len(edits.graph), dtype=bool)
    for workers, loaded in sorted(edits.workers, key=lambda edit: -edit[0]):
        _add_workers(edits, weight, workers, loaded[is_open[loaded]])
        is_open[loaded] = False


def _add_workers(edits: GraphEdits, weight: Array, workers: int, loaded: Array) -> None:
    """Let ``workers`` processes load, or this multiple of the present workers. Batches come at
    their mean rate, since the queue evens them out. The window's batches give the mean, to twice
    its standard error."""
    graph = edits.graph
    into = np.isin(graph.dst, loaded)
    program = np.flatnonzero(into & (graph.edge == EdgeKind.PROGRAM))
    cost = np.zeros(len(graph))
    cost[graph.dst[program]] = weight[program]
    hand = ready_batch_ns(edits.a.trace, edits.a.step_ns, edits.assumption)
    weight[program] = np.minimum(weight[program], hand)
    rate = np.flatnonzero(into & (graph.edge == EdgeKind.LOADER))
    multi = rate[weight[rate] > NEVER]
    if len(multi):
        steps = np.diff(np.searchsorted(graph.step_boundaries, graph.dst[multi], side="right"))
        later = weight[multi[1:]].sum() * steps / max(1, steps.sum())
        weight[multi] = np.append(weight[multi[:1]], later) * _batch_share_with_more_workers(
            edits, workers
        )
    single = rate[weight[rate] <= NEVER]
    if len(single):
        edges = program[np.isin(graph.dst[program], graph.dst[single])]
        batches = cost[graph.dst[single]]
        deviation = 2 * float(batches.std()) / max(1, len(batches)) ** 0.5
        mean = float(batches.mean()) + deviation * {"low": 1, "high": -1}.get(edits.assumption, 0)
        length = max(float(graph.time[graph.step_boundaries[-1]]), 1.0)
        share = min(batches.sum() / length, 1.0)
        computed = _computed_share(edits, loaded, share)
        weight[single] = (max(mean, 0.0) + hand) * _batch_share_with_workers(
            edits, computed, share, workers
        )
        slowed = LOST_LOADING_SHARE[edits.assumption] * _max_computed_share(edits, share)
        delay_share = max(slowed, _loading_share_left(edits, computed, share))
        batch = cost[graph.dst[edges]]
        weight[edges] = np.minimum(batch, hand) + delay_share * batch


def _computed_share(edits: GraphEdits, loaded: Array, share: float) -> float:
    """Return the computed share of the loading, which needs a core in any process. Waits (storage,
    a sleep) need none. The operators recorded during loading distinguish the two. Under the
    pessimistic assumption all is computed, up to the process's CPU time. ``share``: loading as a
    share of the step."""
    if edits.assumption == "low":
        return _max_computed_share(edits, share)
    graph, cpu = edits.graph, edits.a.trace.cpu
    rows = graph.row[loaded]
    start, thread = cpu["ts"].to_numpy()[rows], cpu["thread"].to_numpy()[rows]
    end = start + cpu["dur"].to_numpy()[rows]
    at_work = 0
    for owner in np.unique(thread):
        operators = cpu.filter((pl.col("thread") == int(owner)) & (pl.col("kind") == "op"))
        busy = intervals_of(operators)
        at_work += int(covered_length(start, end, busy)[thread == owner].sum())
    return at_work / max(1, int((end - start).sum()))


def _max_computed_share(edits: GraphEdits, share: float) -> float:
    """Return the largest computed share that the process's CPU time allows, or 1 if not
    recorded."""
    run_steps = edits.a.run_steps
    share_limit = (
        None
        if run_steps is None
        else run_steps.computing_share(share, on_host=edits.a.trains_on_host)
    )
    return 1.0 if share_limit is None else share_limit


def _batch_share_with_workers(
    edits: GraphEdits, computed: float, share: float, workers: int
) -> float:
    """Return a batch's time with ``workers`` over its time before. Computing uses the free cores,
    and the main thread's core once it no longer loads."""
    run_steps = edits.a.run_steps
    free = None if run_steps is None else run_steps.free_cores
    if free is None:
        return 1 / workers
    cores = max(min(workers, free + share), 1e-3)
    return computed / cores + (1 - computed) / workers


def _batch_share_with_more_workers(edits: GraphEdits, times: int) -> float:
    """Return a batch's time with ``times`` the workers over its time before. Computing uses the
    workers' own cores and the free cores. The main thread keeps one core, or one per PyTorch thread
    where the step computes on the host, or none under the pessimistic assumption. Workers that wait
    for storage need no core."""
    run_steps = edits.a.run_steps
    if run_steps is None or run_steps.free_cores is None or run_steps.used_cores is None:
        return 1 / times
    threads = run_steps.flag("num_threads") if edits.a.trains_on_host else None
    main = float(threads) if isinstance(threads, int) else 1.0
    worker_cores = max(0.0, run_steps.used_cores - (0.0 if edits.assumption == "low" else main))
    return max(1 / times, worker_cores / max(worker_cores + run_steps.free_cores, 1e-9))


def _loading_share_left(edits: GraphEdits, computed: float, share: float) -> float:
    """Return the share of the loading that still delays a step computed on the host, because
    workers need its cores. Under the optimistic assumption all cores share the loss. Without
    recorded cores: ``computed`` if pessimistic, else 0."""
    if not edits.a.trains_on_host:
        return 0.0
    run_steps = edits.a.run_steps
    taken = None if run_steps is None else run_steps.remaining_loading_share(share, computed)
    if run_steps is None or taken is None:
        return computed if edits.assumption == "low" else 0.0
    return taken / (run_steps.rank_record.rank.cpus or 1) if edits.assumption == "high" else taken
