"""The critical path of a replay: what the steps' time is made of when it cannot be shortened
without touching something on it."""

from __future__ import annotations

import numpy as np
import polars as pl

from advisor.whatif.graph import Array, Edge, Graph, Node


def critical_path(
    graph: Graph, time: Array, weight: Array, dur: Array, src: Array
) -> list[tuple[int, int, float]]:
    """The chain of binding edges back from the last completion, latest first: (edge, node, ns).

    ``edge`` is the index of the edge that decided when ``node`` came, -1 for device work itself;
    ``ns`` is how much of the path it is. They add up to the end of the last step.
    """
    finals = [int(graph.starts[-1]), *graph.last[-1].tolist()] if graph.last else []
    if not finals:
        return []
    node = max(finals, key=lambda n: time[n])
    first = np.searchsorted(graph.dst, np.arange(len(graph) + 1))
    value = np.where(graph.from_start, weight - dur[src], weight)
    path = []
    while node > 0:
        if dur[node] > 0:
            path.append((-1, node, float(dur[node])))
        edges = np.arange(first[node], first[node + 1])
        if not len(edges):
            break
        arrive = time[src[edges]] + value[edges]
        edge = int(edges[np.argmax(arrive)])
        begin = time[node] - dur[node]
        path.append((edge, node, float(begin - time[src[edge]])))
        node = int(src[edge])
    return path


def composition(
    graph: Graph, time: Array, weight: Array, dur: Array, src: Array, communication: pl.Series
) -> dict[str, float]:
    """Critical path summed by what it consists of, ns: ``host``, ``compute``, ``communication``,
    ``loader``, ``latency``. ``communication``: aligned with ``trace.gpu``."""
    total: dict[str, float] = {}
    communicates = communication.to_numpy()
    for edge, node, ns in critical_path(graph, time, weight, dur, src):
        if edge < 0:
            name = "communication" if communicates[graph.row[node]] else "compute"
        elif graph.edge[edge] in (Edge.PROGRAM, Edge.HANDOVER):
            name = "loader" if graph.kind[node] == Node.LOADED else "host"
        elif graph.edge[edge] == Edge.LOADER:
            name = "loader"
        else:
            name = "latency"
        total[name] = total.get(name, 0.0) + ns
    return total
