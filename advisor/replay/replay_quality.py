"""Quality of a replay: how much of the measured waiting its edges explain. Also the critical path.

A replayed step as long as the measured step proves little: a replay that copies every host time
from the trace achieves this and explains nothing. A fix changes the waits. So two sums are compared
with the trace: the time that the host waited for the device, and the time that the device was idle.
A wait is explained, except for the error with which the graph's edges give its end, with all else
as measured. A wait copied from the trace, without a known cause, is not explained."""

from typing import NamedTuple

import numpy as np
import polars as pl

from advisor.core.intervals import Array
from advisor.core.report_replay import HardPart
from advisor.replay.graph import NEVER, EdgeKind, Graph, NodeKind

EXPLAINED_NS = 5_000
MAX_STEP_ERROR = 0.10
"""Maximum step error of a replay for estimates, as a share. Lumos, a replay of the same kind of
traces, reports 3% on average."""
MIN_EXPLAINED = 0.70
"""Minimum share that the edges must explain of the starts of device work, of the host's waiting
time, and of the device's idle time. Public traces: 0.75 to 1.0; 0.4 if synchronising calls and part
of the kernels were filtered out."""
MIN_RELEVANT_SHARE = 0.05
"""Minimum share of the steps at which waiting or idle time is relevant."""


class ReplayQuality(NamedTuple):
    """Measures of the quality of a replay."""

    step_error: float
    """Mean absolute error of the replayed against the measured steps, as a share of the step."""
    total_error: float
    """Signed error of the whole run of steps, as a share of it."""
    explained: float | None
    """Share of device starts that the graph's edges explain within 5 µs."""
    starts: int
    hard: list[HardPart]
    steps: int
    """Number of consecutive steps that are replayed. One or two used steps are too few where work
    of a step runs into the next; others are then replayed with them."""
    of_steps: int
    """Number of used steps."""
    waits: float
    """Share of the steps that the host waits for the device."""
    waits_explained: float | None
    """Explained share of the host's waiting time, or ``None`` if it never waits."""
    idle: float
    """Share of the steps in which the device is idle."""
    idle_explained: float | None
    """Explained share of the device's idle time, or ``None`` if it is never idle."""

    @property
    def unusable_reason(self) -> str:
        """Reason why the replay gives no estimates. Empty if it reproduces and explains the
        steps."""
        if not self.step_error <= MAX_STEP_ERROR:
            return (
                f"a replay misses the measured steps by {self.step_error:.0%} (at most "
                f"{MAX_STEP_ERROR:.0%} is accepted)"
            )
        if self.explained is not None and self.explained < MIN_EXPLAINED:
            return (
                f"the trace does not show what {1 - self.explained:.0%} of the {self.starts:,} "
                f"pieces of device work waited for (at most {1 - MIN_EXPLAINED:.0%} is accepted)"
            )
        for subject, share, explained in (
            ("the host waits for the device", self.waits, self.waits_explained),
            ("the device idles", self.idle, self.idle_explained),
        ):
            if share > MIN_RELEVANT_SHARE and explained is not None and explained < MIN_EXPLAINED:
                return (
                    f"{subject} {share:.0%} of the time, and a replay explains "
                    f"{explained:.0%} of that (at least {MIN_EXPLAINED:.0%} is required)"
                )
        return ""


class WaitTimes(NamedTuple):
    """Waits and the explained part of each, in columns of ns."""

    time: Array
    explained: Array
    error: Array
    """Error of the wait's end according to the edges."""

    @property
    def share(self) -> float | None:
        """Explained share of the time, or ``None`` without waits."""
        total = float(self.time.sum())
        return float(self.explained.sum()) / total if total > 0 else None


def explain_waits(
    graph: Graph, nodes: Array, time: Array, kinds: tuple[EdgeKind, ...]
) -> WaitTimes:
    """Return how edges of these kinds explain waits that took ``time`` and ended at ``nodes``; the
    start of device work ends a wait."""
    base = graph.time[graph.src] - np.where(graph.from_start, graph.dur[graph.src], 0)
    is_of_kind = np.isin(graph.edge, [kind.value for kind in kinds]) & (graph.src > 0)
    allowed = np.full(len(graph), NEVER)
    np.maximum.at(allowed, graph.dst[is_of_kind], (base + graph.weight)[is_of_kind])
    error = allowed[nodes] - (graph.time - graph.dur)[nodes]
    explained = np.clip(time - np.abs(error), 0.0, None)
    return WaitTimes(time.astype(float), explained, error)


def host_waits(graph: Graph) -> WaitTimes:
    """Return the host's waits for the device: blocking calls, and launches into a full queue."""
    starts = np.flatnonzero(graph.kind == NodeKind.SYNC)
    ends = np.flatnonzero(graph.kind == NodeKind.SYNC_END)
    start = dict(zip(graph.row[starts].tolist(), graph.time[starts].tolist(), strict=True))
    since = np.array([start.get(row, np.inf) for row in graph.row[ends].tolist()])
    duration = graph.time[ends] - since - graph.latencies.sync_call
    is_wait = duration > 0
    calls = explain_waits(graph, ends[is_wait], duration[is_wait], (EdgeKind.SYNC,))
    full, time = graph.hard.get("queue-blocked launches", _NO_WAITS)
    queue = explain_waits(graph, full, time, (EdgeKind.QUEUE,))
    return WaitTimes(*(np.concatenate(pair) for pair in zip(calls, queue, strict=True)))


def device_idle(graph: Graph, lanes: Array) -> WaitTimes:
    """Return the idle times of these lanes, each ended by the start of work. Idle time before work
    launched before the window is excluded, because unrecorded work may have run."""
    device = graph.device[np.isin(graph.lane[graph.device], lanes)]
    start = (graph.time - graph.dur)[device]
    order = np.argsort(start, kind="stable")
    device, start = device[order], start[order]
    before = np.maximum.accumulate(np.append(0.0, graph.time[device]))[:-1]
    gap = start - before
    unanchored = graph.dst[(graph.edge == EdgeKind.LAUNCH) & (graph.src == 0)]
    idle = (gap > 0) & ~np.isin(device, unanchored)
    return explain_waits(graph, device[idle], gap[idle], _START_EDGES)


def measure_hard_parts(graph: Graph) -> list[HardPart]:
    """Return the quality of each hard part alone."""
    result = []
    for name, (nodes, time) in graph.hard.items():
        if len(nodes):
            part = explain_waits(graph, nodes, time, _EDGES_BY_PART.get(name, _START_EDGES))
            share, error = part.share, float(np.median(np.abs(part.error)))
            result.append(
                HardPart(
                    name, len(nodes), 1.0 if share is None else share, error, float(time.sum())
                )
            )
    return result


_NO_WAITS = (np.zeros(0, dtype=np.int64), np.zeros(0))
_START_EDGES = (EdgeKind.LAUNCH, EdgeKind.STREAM, EdgeKind.CROSS_STREAM, EdgeKind.CONTENTION)
_EDGES_BY_PART = {
    "syncs that waited": (EdgeKind.SYNC,),
    "queue-blocked launches": (EdgeKind.QUEUE,),
    "waits between threads": (EdgeKind.HANDOFF,),
}


# -- the critical path -----------------------------------------------------------------------------

MAX_GAP_SHARE = 0.02
"""Maximum share of gaps in a path back over a busy device. If a device is hardly ever idle, a host
that launches just in time is critical too, but shortening it gains nothing."""


class CriticalPath(NamedTuple):
    """Chain of binding edges back from the last completion, latest first, in columns.

    ``edge`` is the edge that decided the time of ``node``, -1 for device work itself; ``ns`` is its
    length on the path. The lengths add up to the end of the last step."""

    edge: Array
    node: Array
    ns: Array


def critical_path(graph: Graph, time: Array, weight: Array, dur: Array) -> CriticalPath:
    """Follow from each node the edge that arrived last, from the last completion to the source. Of
    two edges that arrive almost together (see ``MAX_GAP_SHARE``) take the edge over the device."""
    if not len(graph.dst):  # nothing happened in these steps
        nothing = np.zeros(0, dtype=np.int64)
        return CriticalPath(edge=nothing, node=nothing, ns=np.zeros(0))
    host, work = (
        int(graph.step_boundaries[-1]),
        graph.last_nodes[-1].tolist() if graph.last_nodes else [],
    )
    binding, stream = _find_binding(graph, time, weight, dur)
    node = max([host, *work], key=lambda n: time[n])
    end, gap_sum = float(time[node]), 0.0
    device = max(work, key=lambda n: time[n], default=host)
    if time[device] >= (1 - MAX_GAP_SHARE) * end:
        node, gap_sum = device, end - float(time[device])
    start = (time - dur).tolist()
    arrived = np.where(stream >= 0, time[graph.src[stream]] + weight[stream], NEVER).tolist()
    source, binding_edges, stream_edges = graph.src.tolist(), binding.tolist(), stream.tolist()
    launched = (graph.edge[np.maximum(binding, 0)] == EdgeKind.LAUNCH).tolist()
    chain, chosen = [], []
    while node > 0:  # a walk: each node is known only from its successor
        edge = binding_edges[node]
        if launched[node] and edge >= 0:
            gap = start[node] - arrived[node]
            if gap_sum + gap <= MAX_GAP_SHARE * (end - start[node]):
                edge, gap_sum = stream_edges[node], gap_sum + gap
        if edge < 0:
            break
        chain.append(node)
        chosen.append(edge)
        node = source[edge]
    nodes, edges = np.array(chain, dtype=np.int64), np.array(chosen, dtype=np.int64)
    node_start = time[nodes] - dur[nodes]
    has_work = dur[nodes] > 0
    # the host's work after the end of device work is on the path
    host_edge = binding[[host]] if chain and chain[0] != host else binding[:0]
    tail = np.full(len(host_edge), end - time[nodes[0]] if chain else 0.0)
    return CriticalPath(
        edge=np.concatenate([np.full(int(has_work.sum()), -1), edges, host_edge]),
        node=np.concatenate([nodes[has_work], nodes, np.full(len(host_edge), host)]),
        ns=np.concatenate([dur[nodes[has_work]], node_start - time[graph.src[edges]], tail]),
    )


def _find_binding(graph: Graph, time: Array, weight: Array, dur: Array) -> tuple[Array, Array]:
    """Return each node's edge that arrives last, and its stream's edge, or -1."""
    binding = np.full(len(graph), -1, dtype=np.int64)
    stream = binding.copy()
    stream_edges = np.flatnonzero((graph.edge == EdgeKind.STREAM) & (weight > NEVER))
    stream[graph.dst[stream_edges]] = stream_edges
    value = np.where(graph.from_start, weight - dur[graph.src], weight)
    arrive = time[graph.src] + value
    # contention that did not happen
    idle = (graph.edge == EdgeKind.CONTENTION) & (arrive > (time - dur)[graph.dst] + 1.0)
    arrive[idle] = NEVER
    starts = np.flatnonzero(np.append(True, graph.dst[1:] != graph.dst[:-1]))
    latest = np.maximum.reduceat(arrive, starts)
    count = np.diff(np.append(starts, len(arrive)))
    latest_edges = np.flatnonzero(arrive >= np.repeat(latest, count))
    binding[graph.dst[latest_edges[::-1]]] = latest_edges[::-1]
    return binding, stream


def path_composition(
    graph: Graph,
    time: Array,
    weight: Array,
    dur: Array,
    communication: pl.Series,
    copies: pl.Series,
) -> dict[str, float]:
    """Return the critical path's time by component, ns: ``host``, ``compute``, ``copying``,
    ``communication``, ``loader``, ``latency``. Work launched before the window belongs to an
    earlier step. ``communication``, ``copies``: aligned with ``trace.gpu``."""
    path = critical_path(graph, time, weight, dur)
    device, done = np.isin(path.node, graph.device), time[path.node]
    before = device & (graph.steps_of_launch()[path.node] < 0)
    first = np.min(done[device & ~before], initial=np.inf)
    since = np.max(done[before & (done < first)], initial=NEVER)
    if first < np.inf:  # else no launch is recorded
        path = CriticalPath(*(column[done > since] for column in path))
    is_work = path.edge < 0
    kind = np.where(is_work, EdgeKind.LAUNCH.value, graph.edge[np.maximum(path.edge, 0)])
    row = np.where(is_work, graph.row[path.node], 0)
    comm, copying = (
        column.to_numpy()[row] & is_work if len(column) else np.zeros_like(is_work)
        for column in (communication, copies)
    )
    host = ~is_work & np.isin(kind, [EdgeKind.PROGRAM.value, EdgeKind.HANDOFF.value])
    loading = (~is_work & (kind == EdgeKind.LOADER.value)) | (
        host & (graph.kind[path.node] == NodeKind.LOADER_END.value)
    )
    parts = {
        "communication": comm, "copying": copying, "compute": is_work & ~comm & ~copying,
        "loader": loading, "host": host & ~loading, "latency": ~is_work & ~host & ~loading,
    }  # fmt: skip
    return {
        name: float(path.ns[own_part].sum()) for name, own_part in parts.items() if own_part.any()
    }
