"""Work that moves to separate streams, in parallel with the work that waited for it.

Moved work keeps its launch, the events it waits for and its inputs: unless it copies to the device,
these are what its stream ran before it. Work of one name stays in order. What waited for it (its
stream, another stream, the host) waits instead for what the moved work waited for, and for the same
work one step earlier; in a recording without steps, for the previous work of that name. A wait for
the whole device still waits for it, unless it is also issued earlier; so does the end of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from advisor.core.intervals import Array
from advisor.replay.graph import NEVER, EdgeKind, Graph, NodeKind, add_edges

if TYPE_CHECKING:
    from advisor.replay.edited_graph import GraphEdits

WAITING_EDGES = (EdgeKind.STREAM, EdgeKind.CROSS_STREAM, EdgeKind.SYNC, EdgeKind.QUEUE)
"""Kinds of edges out of moved work by which something else waits for it."""


def move_to_streams(edits: GraphEdits, weight: Array) -> tuple[Graph, Array]:
    """Return the graph and its weights with the moved work on separate streams."""
    graph, trace = edits.graph, edits.a.trace
    moved = edits.moved  # removed work takes no time there
    nodes = np.flatnonzero(moved)
    marked = edits.a.steps.source != "whole trace"
    step, group = _find_steps(graph), _number_streams(edits)
    earlier = _find_earlier(graph, group, step, marked=marked)
    uploads = np.zeros(len(graph), dtype=bool)
    uploads[nodes] = (
        (trace.gpu["copy"].gather(pl.Series(graph.row[nodes])) == "HtoD").fill_null(False)
    ).to_numpy()
    extra: list[tuple[int, int, float, int]] = []
    live = np.flatnonzero(weight > NEVER)
    leads_in = moved[graph.dst[live]] & np.isin(
        graph.edge[live], [EdgeKind.STREAM, EdgeKind.CROSS_STREAM]
    )
    waits_of: dict[int, dict[int, tuple[int, float]]] = {}
    """Work that the moved work's old position in its stream still waits for, by lane, with the
    delay."""
    awaited: dict[int, dict[int, int]] = {}
    """Earlier work of each group that others wait for instead of the moved work."""
    last_of: dict[int, int] = {}
    edges_in: dict[int, list[int]] = {}
    for edge in live[leads_in].tolist():
        edges_in.setdefault(int(graph.dst[edge]), []).append(edge)
    src, kind, lane = graph.src.tolist(), graph.edge.tolist(), graph.lane.tolist()
    for node in nodes.tolist():  # each depends on the earlier ones; only moved work
        waits: dict[int, tuple[int, float]] = {}
        older: dict[int, int] = {}
        in_stream = int(group[node])
        gap = 0.0
        for edge in edges_in.get(node, ()):
            source, ordered = src[edge], kind[edge] == EdgeKind.STREAM
            delay = 0.0 if ordered else float(weight[edge])
            gap = float(weight[edge]) if ordered else gap
            if moved[source]:
                for key, (first, wait) in waits_of[source].items():
                    waits[key] = max(waits.get(key, (-1, 0.0)), (first, wait + delay))
                for key, first in awaited[source].items():
                    older[key] = max(older.get(key, -1), first)
            else:
                waits[lane[source]] = max(waits.get(lane[source], (-1, 0.0)), (source, delay))
        if earlier[node] >= 0:
            older[in_stream] = max(older.get(in_stream, -1), int(earlier[node]))
        waits_of[node], awaited[node] = waits, older
        if not uploads[node] or edits.merged[node]:
            extra += [(s, node, w + gap, EdgeKind.CROSS_STREAM) for s, w in waits.values()]
        if in_stream in last_of:
            extra.append((last_of[in_stream], node, gap, EdgeKind.STREAM))
        last_of[in_stream] = node
    weight = weight.copy()
    for edge in live[moved[graph.src[live]]].tolist():
        source, target, delay = src[edge], int(graph.dst[edge]), float(weight[edge])
        in_order = kind[edge] == EdgeKind.STREAM
        edge_kind = (
            EdgeKind.CROSS_STREAM if graph.kind[target] == NodeKind.DEVICE else EdgeKind.SYNC
        )
        if kind[edge] in WAITING_EDGES and not (moved[target] and in_order):
            for first, wait in waits_of[source].values():
                in_stream = in_order and lane[first] == lane[target]
                extra.append(
                    (first, target, wait + delay, EdgeKind.STREAM if in_stream else edge_kind)
                )
            if not moved[target] and kind[edge] != EdgeKind.QUEUE:
                extra += [(s, target, delay, edge_kind) for s in awaited[source].values()]
        weight[edge] = NEVER
    weight[moved[graph.dst] & np.isin(graph.edge, [EdgeKind.CONTENTION, EdgeKind.STREAM])] = NEVER
    extra += _edges_to_device_syncs(edits, nodes, group)
    lanes = np.where(moved, int(graph.lane.max()) + 1 + group, graph.lane)
    return add_edges(graph, weight, extra, lane=lanes, last_nodes=_add_moved(graph, nodes, group))


def _number_streams(edits: GraphEdits) -> Array:
    """Return the number of the separate stream for each piece of work, by its stream and name."""
    graph = edits.graph
    device = graph.device
    name = edits.a.trace.gpu["name"].to_physical().gather(pl.Series(graph.row[device])).to_numpy()
    result = np.zeros(len(graph), dtype=np.int64)
    keys = np.stack([graph.lane[device], name.astype(np.int64)])
    result[device] = np.unique(keys, axis=1, return_inverse=True)[1].ravel()
    return result


def _find_steps(graph: Graph) -> Array:
    """Return the step (from 0) of each node, for device work by its launch if known."""
    step = graph.steps_of_launch()
    order = np.searchsorted(graph.step_boundaries, np.arange(len(graph)), side="right") - 1
    last = len(graph.step_boundaries) - 2
    result: Array = np.clip(np.where(step < 0, order, step), 0, last)
    return result


def _find_earlier(graph: Graph, group: Array, step: Array, *, marked: bool) -> Array:
    """Return the work that others await instead of each, or -1. With steps it is the work at the
    same position one step earlier, or that step's last work if their number differs. Without steps
    it is the previous work or, for the first, itself."""
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
    for (stream, index), current in by_key.items():
        previous = by_key.get((stream, index - 1))
        if previous is not None:
            result[current] = previous if len(previous) == len(current) else previous[-1]
    return result


def _edges_to_device_syncs(
    edits: GraphEdits, nodes: Array, group: Array
) -> list[tuple[int, int, float, int]]:
    """Return edges into waits for the whole device, from each name's last moved work."""
    graph = edits.graph
    done = np.flatnonzero((graph.kind == NodeKind.SYNC_END) & ~edits.unblocked)
    call = edits.a.trace.cpu["call"].gather(pl.Series(graph.row[done]))
    done = done[(call == "sync_device").fill_null(False).to_numpy()]
    edges = np.flatnonzero((graph.edge == EdgeKind.SYNC) & np.isin(graph.dst, done))
    extra = []
    for index, node in _find_latest(
        graph, nodes[~edits.issued_earlier[nodes]], group, graph.src[edges]
    ):
        edge = edges[index]
        extra.append((node, int(graph.dst[edge]), float(graph.weight[edge]), int(EdgeKind.SYNC)))
    return extra


def _find_latest(graph: Graph, nodes: Array, group: Array, upto: Array) -> list[tuple[int, int]]:
    """Return pairs of an index into ``upto`` and a node: the last moved work of each name on the
    stream of each of these pieces of work, up to it."""
    result = []
    for stream in np.unique(group[nodes]).tolist():
        members = nodes[group[nodes] == stream]
        rows = np.flatnonzero(graph.lane[upto] == graph.lane[members[0]])
        index = np.searchsorted(members, upto[rows], side="right") - 1
        valid = index >= 0
        result += list(zip(rows[valid].tolist(), members[index[valid]].tolist(), strict=True))
    return result


def _add_moved(graph: Graph, nodes: Array, group: Array) -> list[Array]:
    """Return the device nodes that each step needs to be complete, moved work included."""
    result = []
    for last in graph.last_nodes:
        moved = [node for _, node in _find_latest(graph, nodes, group, last)]
        result.append(np.union1d(last, np.array(moved, dtype=np.int64)))
    return result
