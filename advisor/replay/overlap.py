"""Work that moves to streams of its own, beside what waited for it.

Moved work keeps its launch, the events it waits for and its inputs: unless it copies to the device,
what its stream ran before it. Work of one name stays in order. What waited for it (its stream,
another one, the host) waits instead for what the moved work waited for, and for the same work one
step earlier; in a recording without steps, for the one of that name before it. A wait for the whole
device still waits for it, unless it is issued earlier too; so does the end of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from advisor.replay.graph import NEVER, Array, EdgeKind, Graph, NodeKind, add_edges

if TYPE_CHECKING:
    from advisor.replay.edited_graph import GraphEdits

WAITING = (EdgeKind.STREAM, EdgeKind.CROSS_STREAM, EdgeKind.SYNC, EdgeKind.QUEUE)
"""Kinds of edges out of moved work by which something else waits for it."""


def move_to_streams(patch: GraphEdits, weight: Array) -> tuple[Graph, Array]:
    """Return the graph and its weights with the moved work on streams of its own."""
    graph, trace = patch.graph, patch.a.trace
    moved = patch.moved  # what is removed too takes no time, where it goes
    nodes = np.flatnonzero(moved)
    marked = patch.a.steps.source != "whole trace"
    step, group = _steps(graph), _groups(patch)
    earlier = _earlier(graph, group, step, marked=marked)
    uploads = np.zeros(len(graph), dtype=bool)
    uploads[nodes] = (
        (trace.gpu["copy"].gather(pl.Series(graph.row[nodes])) == "HtoD").fill_null(False)
    ).to_numpy()
    more: list[tuple[int, int, float, int]] = []
    live = np.flatnonzero(weight > NEVER)
    leads_in = moved[graph.dst[live]] & np.isin(
        graph.edge[live], [EdgeKind.STREAM, EdgeKind.CROSS_STREAM]
    )
    stands: dict[int, dict[int, tuple[int, float]]] = {}
    """Work that the moved work's place in its stream still waits for, by lane, with the delay."""
    awaited: dict[int, dict[int, int]] = {}
    """Earlier work of each group that is waited for in place of the moved work."""
    last_of: dict[int, int] = {}
    edges_in: dict[int, list[int]] = {}
    for edge in live[leads_in].tolist():
        edges_in.setdefault(int(graph.dst[edge]), []).append(edge)
    src, kind, lane = graph.src.tolist(), graph.edge.tolist(), graph.lane.tolist()
    for node in nodes.tolist():  # each needs those before it; only work that moves
        place: dict[int, tuple[int, float]] = {}
        since: dict[int, int] = {}
        own = int(group[node])
        gap = 0.0
        for edge in edges_in.get(node, ()):
            source, ordered = src[edge], kind[edge] == EdgeKind.STREAM
            delay = 0.0 if ordered else float(weight[edge])
            gap = float(weight[edge]) if ordered else gap
            if moved[source]:
                for key, (first, wait) in stands[source].items():
                    place[key] = max(place.get(key, (-1, 0.0)), (first, wait + delay))
                for key, first in awaited[source].items():
                    since[key] = max(since.get(key, -1), first)
            else:
                place[lane[source]] = max(place.get(lane[source], (-1, 0.0)), (source, delay))
        if earlier[node] >= 0:
            since[own] = max(since.get(own, -1), int(earlier[node]))
        stands[node], awaited[node] = place, since
        if not uploads[node] or patch.merged[node]:
            more += [(s, node, w + gap, EdgeKind.CROSS_STREAM) for s, w in place.values()]
        if own in last_of:
            more.append((last_of[own], node, gap, EdgeKind.STREAM))
        last_of[own] = node
    weight = weight.copy()
    for edge in live[moved[graph.src[live]]].tolist():
        source, target, delay = src[edge], int(graph.dst[edge]), float(weight[edge])
        in_order = kind[edge] == EdgeKind.STREAM
        how = EdgeKind.CROSS_STREAM if graph.kind[target] == NodeKind.DEVICE else EdgeKind.SYNC
        if kind[edge] in WAITING and not (moved[target] and in_order):
            for first, wait in stands[source].values():
                own = in_order and lane[first] == lane[target]
                more.append((first, target, wait + delay, EdgeKind.STREAM if own else how))
            if not moved[target] and kind[edge] != EdgeKind.QUEUE:
                more += [(s, target, delay, how) for s in awaited[source].values()]
        weight[edge] = NEVER
    weight[moved[graph.dst] & np.isin(graph.edge, [EdgeKind.CONTENTION, EdgeKind.STREAM])] = NEVER
    more += _awaited_by_device_syncs(patch, nodes, group)
    lanes = np.where(moved, int(graph.lane.max()) + 1 + group, graph.lane)
    return add_edges(graph, weight, more, lane=lanes, last_nodes=_with_moved(graph, nodes, group))


def _groups(patch: GraphEdits) -> Array:
    """Return the number of the stream of its own for each piece of work, by its stream and name."""
    graph = patch.graph
    device = graph.device
    name = patch.a.trace.gpu["name"].to_physical().gather(pl.Series(graph.row[device])).to_numpy()
    result = np.zeros(len(graph), dtype=np.int64)
    keys = np.stack([graph.lane[device], name.astype(np.int64)])
    result[device] = np.unique(keys, axis=1, return_inverse=True)[1].ravel()
    return result


def _steps(graph: Graph) -> Array:
    """Return the step (from 0) of each node, device work by its launch where that is known."""
    step = graph.steps_of_launch()
    order = np.searchsorted(graph.step_boundaries, np.arange(len(graph)), side="right") - 1
    last = len(graph.step_boundaries) - 2
    result: Array = np.clip(np.where(step < 0, order, step), 0, last)
    return result


def _earlier(graph: Graph, group: Array, step: Array, *, marked: bool) -> Array:
    """Return the work that is awaited in place of each, -1: none. With steps it is the one at the
    same place one step earlier, or that step's last where their number differs. Without steps it is
    the one before it; for the first, itself."""
    result = np.full(len(graph), -1)
    device = graph.device
    order = device[np.lexsort((device, group[device]))]
    if len(graph.step_boundaries) == 2:
        if not marked:
            same = np.append(False, group[order][1:] == group[order][:-1])
            result[order] = np.where(same, np.append(-1, order[:-1]), order)
        return result
    key = group[order] * len(graph.step_boundaries) + step[order]
    members = np.split(order, np.flatnonzero(np.diff(key)) + 1)
    by_key = {(int(group[m[0]]), int(step[m[0]])): m for m in members}
    for (own, number), now in by_key.items():
        then = by_key.get((own, number - 1))
        if then is not None:
            result[now] = then if len(then) == len(now) else then[-1]
    return result


def _awaited_by_device_syncs(
    patch: GraphEdits, nodes: Array, group: Array
) -> list[tuple[int, int, float, int]]:
    """Return edges into waits for the whole device, from each name's last moved work."""
    graph = patch.graph
    done = np.flatnonzero((graph.kind == NodeKind.SYNC_END) & ~patch.unblocked)
    call = patch.a.trace.cpu["call"].gather(pl.Series(graph.row[done]))
    done = done[(call == "sync_device").fill_null(False).to_numpy()]
    edges = np.flatnonzero((graph.edge == EdgeKind.SYNC) & np.isin(graph.dst, done))
    more = []
    for place, node in _latest(graph, nodes[~patch.issued_earlier[nodes]], group, graph.src[edges]):
        edge = edges[place]
        more.append((node, int(graph.dst[edge]), float(graph.weight[edge]), int(EdgeKind.SYNC)))
    return more


def _latest(graph: Graph, nodes: Array, group: Array, upto: Array) -> list[tuple[int, int]]:
    """Return (place in ``upto``, node) pairs: the last moved work of each name on the stream of
    each of these pieces of work, up to it."""
    result = []
    for own in np.unique(group[nodes]).tolist():
        members = nodes[group[nodes] == own]
        here = np.flatnonzero(graph.lane[upto] == graph.lane[members[0]])
        index = np.searchsorted(members, upto[here], side="right") - 1
        real = index >= 0
        result += list(zip(here[real].tolist(), members[index[real]].tolist(), strict=True))
    return result


def _with_moved(graph: Graph, nodes: Array, group: Array) -> list[Array]:
    """Return the device nodes that each step needs to be complete, moved work included."""
    result = []
    for last in graph.last_nodes:
        moved = [node for _, node in _latest(graph, nodes, group, last)]
        result.append(np.union1d(last, np.array(moved, dtype=np.int64)))
    return result
