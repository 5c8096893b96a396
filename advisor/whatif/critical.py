"""The critical path of a replay: what the steps' time is made of when it cannot be shortened
without touching something on it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from advisor.whatif.graph import NEVER, Array, Edge, Graph, Node


class Path(NamedTuple):
    """The chain of binding edges back from the last completion, latest first, in columns.

    ``edge`` is the edge that decided when ``node`` came, -1 for device work itself; ``ns`` is how
    much of the path it is. They add up to the end of the last step.
    """

    edge: Array
    node: Array
    ns: Array


def critical_path(graph: Graph, time: Array, weight: Array, dur: Array, src: Array) -> Path:
    """Follow from each node the edge that arrived last, from the last completion to the source."""
    if not len(graph.dst):  # nothing happened in these steps
        nothing = np.zeros(0, dtype=np.int64)
        return Path(edge=nothing, node=nothing, ns=np.zeros(0))
    finals = [int(graph.starts[-1]), *graph.last[-1].tolist()] if graph.last else [0]
    binding = _binding(graph, time, weight, dur, src)
    before = np.where(binding >= 0, src[binding], 0).tolist()
    node = max(finals, key=lambda n: time[n])
    chain = []
    while node > 0:  # a walk: each node is known only from the one after it
        chain.append(node)
        node = before[node]
    nodes = np.array(chain, dtype=np.int64)
    edges = binding[nodes]
    nodes, edges = nodes[edges >= 0], edges[edges >= 0]
    begin = time[nodes] - dur[nodes]
    work = dur[nodes] > 0
    return Path(
        edge=np.concatenate([np.full(int(work.sum()), -1), edges]),
        node=np.concatenate([nodes[work], nodes]),
        ns=np.concatenate([dur[nodes[work]], begin - time[src[edges]]]),
    )


def _binding(graph: Graph, time: Array, weight: Array, dur: Array, src: Array) -> Array:
    """For each node the edge that arrives last, -1: none."""
    binding = np.full(len(graph), -1, dtype=np.int64)
    if not len(graph.dst):
        return binding
    value = np.where(graph.from_start, weight - dur[src], weight)
    arrive = time[src] + value
    # contention that did not come about
    idle = (graph.edge == Edge.CONTENTION) & (arrive > (time - dur)[graph.dst] + 1.0)
    arrive[idle] = NEVER
    starts = np.flatnonzero(np.append(True, graph.dst[1:] != graph.dst[:-1]))
    latest = np.maximum.reduceat(arrive, starts)
    count = np.diff(np.append(starts, len(arrive)))
    last = np.flatnonzero(arrive >= np.repeat(latest, count))
    binding[graph.dst[last[::-1]]] = last[::-1]
    return binding


def composition(
    graph: Graph, time: Array, weight: Array, dur: Array, src: Array, communication: pl.Series
) -> dict[str, float]:
    """Critical path summed by what it consists of, ns: ``host``, ``compute``, ``communication``,
    ``loader``, ``latency``. ``communication``: aligned with ``trace.gpu``."""
    path = critical_path(graph, time, weight, dur, src)
    own = path.edge < 0
    kind = np.where(own, Edge.LAUNCH.value, graph.edge[np.maximum(path.edge, 0)])
    row = np.where(own, graph.row[path.node], 0)
    talks = communication.to_numpy()[row] & own if len(communication) else np.zeros_like(own)
    host = ~own & np.isin(kind, [Edge.PROGRAM.value, Edge.HANDOVER.value])
    fed = (~own & (kind == Edge.LOADER.value)) | (
        host & (graph.kind[path.node] == Node.LOADED.value)
    )
    parts = {
        "communication": talks,
        "compute": own & ~talks,
        "loader": fed,
        "host": host & ~fed,
        "latency": ~own & ~host & ~fed,
    }
    return {name: float(path.ns[mine].sum()) for name, mine in parts.items() if mine.any()}
