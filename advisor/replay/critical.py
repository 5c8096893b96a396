"""The critical path of a replay: what the steps' time is made of when it cannot be shortened
without touching something on it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from advisor.replay.graph import NEVER, Array, Edge, Graph, Node

NEAR = 0.02
"""A way back over a busy device may leave this share of it to gaps: where a device hardly idles,
the host that launches just in time is critical as well, and yet nothing gets shorter with it."""


class Path(NamedTuple):
    """The chain of binding edges back from the last completion, latest first, in columns.

    ``edge`` is the edge that decided when ``node`` came, -1 for device work itself; ``ns`` is how
    much of the path it is. They add up to the end of the last step.
    """

    edge: Array
    node: Array
    ns: Array


def critical_path(graph: Graph, time: Array, weight: Array, dur: Array) -> Path:
    """Follow from each node the edge that arrived last, from the last completion to the source.
    Of two that arrive almost together (see ``NEAR``), the one over the device."""
    if not len(graph.dst):  # nothing happened in these steps
        nothing = np.zeros(0, dtype=np.int64)
        return Path(edge=nothing, node=nothing, ns=np.zeros(0))
    host, work = int(graph.starts[-1]), graph.last[-1].tolist() if graph.last else []
    binding, stream = _binding(graph, time, weight, dur)
    node = max([host, *work], key=lambda n: time[n])
    end, left = float(time[node]), 0.0
    device = max(work, key=lambda n: time[n], default=host)
    if time[device] >= (1 - NEAR) * end:
        node, left = device, end - float(time[device])
    start = (time - dur).tolist()
    arrived = np.where(stream >= 0, time[graph.src[stream]] + weight[stream], NEVER).tolist()
    source, last, over = graph.src.tolist(), binding.tolist(), stream.tolist()
    launched = (graph.edge[np.maximum(binding, 0)] == Edge.LAUNCH).tolist()
    chain, chosen = [], []
    while node > 0:  # a walk: each node is known only from the one after it
        edge = last[node]
        if launched[node] and edge >= 0:
            gap = start[node] - arrived[node]
            if left + gap <= NEAR * (end - start[node]):
                edge, left = over[node], left + gap
        if edge < 0:
            break
        chain.append(node)
        chosen.append(edge)
        node = source[edge]
    nodes, edges = np.array(chain, dtype=np.int64), np.array(chosen, dtype=np.int64)
    begin = time[nodes] - dur[nodes]
    worked = dur[nodes] > 0
    # what the host still did when the device was done is its own
    rest = binding[[host]] if chain and chain[0] != host else binding[:0]
    tail = np.full(len(rest), end - time[nodes[0]] if chain else 0.0)
    return Path(
        edge=np.concatenate([np.full(int(worked.sum()), -1), edges, rest]),
        node=np.concatenate([nodes[worked], nodes, np.full(len(rest), host)]),
        ns=np.concatenate([dur[nodes[worked]], begin - time[graph.src[edges]], tail]),
    )


def _binding(graph: Graph, time: Array, weight: Array, dur: Array) -> tuple[Array, Array]:
    """For each node the edge that arrives last, and that of its stream; -1: none."""
    binding = np.full(len(graph), -1, dtype=np.int64)
    stream = binding.copy()
    own = np.flatnonzero((graph.edge == Edge.STREAM) & (weight > NEVER))
    stream[graph.dst[own]] = own
    value = np.where(graph.from_start, weight - dur[graph.src], weight)
    arrive = time[graph.src] + value
    # contention that did not come about
    idle = (graph.edge == Edge.CONTENTION) & (arrive > (time - dur)[graph.dst] + 1.0)
    arrive[idle] = NEVER
    starts = np.flatnonzero(np.append(True, graph.dst[1:] != graph.dst[:-1]))
    latest = np.maximum.reduceat(arrive, starts)
    count = np.diff(np.append(starts, len(arrive)))
    last = np.flatnonzero(arrive >= np.repeat(latest, count))
    binding[graph.dst[last[::-1]]] = last[::-1]
    return binding, stream


def composition(
    graph: Graph, time: Array, weight: Array, dur: Array, communication: pl.Series
) -> dict[str, float]:
    """Critical path summed by what it consists of, ns: ``host``, ``compute``, ``communication``,
    ``loader``, ``latency``. ``communication``: aligned with ``trace.gpu``."""
    path = critical_path(graph, time, weight, dur)
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
    return {
        name: float(path.ns[own_part].sum()) for name, own_part in parts.items() if own_part.any()
    }
