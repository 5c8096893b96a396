"""The naive twin of the replay: host times verbatim, streams in order, no syncs.

What stands beside the replay's own figures, so that these can be judged: where the host drives
the device, a twin that copies every host time from the trace gets the total right and has
explained nothing. It is given the replay's launch latencies and stream gaps, no more.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from advisor.replay.graph import EdgeKind, Graph
from advisor.replay.replay import completion_times
from advisor.replay.replay_quality import EXPLAINED_NS

COMPUTED = ("cross-stream starts",)
"""Hard parts that the twin computes at all: the others are host times, which it copies."""


class Twin(NamedTuple):
    """Figures of the twin, defined as the replay's are."""

    step_error: float
    explained: float
    hard: dict[str, float | None]
    """Share explained by hard part; ``None``: copied from the trace."""


def naive_twin(graph: Graph) -> Twin:
    """Replay a graph with its launch and stream edges only, all host points as measured."""
    kept = np.isin(graph.edge, [EdgeKind.LAUNCH, EdgeKind.STREAM])
    src, dst, weight = graph.src[kept], graph.dst[kept], graph.weight[kept]
    time = graph.time.copy()
    allowed = np.full(len(graph), -np.inf)
    np.maximum.at(allowed, dst, graph.time[src] + weight)
    late = np.abs(allowed - (graph.time - graph.dur)) > EXPLAINED_NS
    edges: dict[int, list[tuple[int, float]]] = {}
    for a, b, w in zip(src.tolist(), dst.tolist(), weight.tolist(), strict=True):
        edges.setdefault(b, []).append((a, w))
    for node in graph.device.tolist():  # in order: each needs those before it
        start = max((time[a] + w for a, w in edges.get(node, [])), default=0.0)
        time[node] = max(start, 0.0) + graph.dur[node]
    measured = np.diff(completion_times(graph, graph.time))
    error = np.abs(np.diff(completion_times(graph, time)) - measured).sum()
    device = graph.device
    return Twin(
        step_error=float(error / max(measured.sum(), 1.0)),
        explained=float((~late[device]).mean()) if len(device) else 1.0,
        hard={
            name: float((~late[nodes]).mean()) if name in COMPUTED else None
            for name, (nodes, _) in graph.hard.items()
            if len(nodes)
        },
    )
