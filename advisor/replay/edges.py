"""The edges of a graph that is being built."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from advisor.replay.graph import Array, Edge, Graph


class EdgeList:
    """Edges in columns; a later edge may replace the program edge into a node."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._parts: list[tuple[Array, ...]] = []

    def add(
        self, src: Array, dst: Array, weight: Array | float, kind: Edge, *, from_start: bool = False
    ) -> None:
        """Append edges; those that do not lead forward in the node order are left out."""
        src, dst = np.asarray(src, dtype=np.int64), np.asarray(dst, dtype=np.int64)
        weight = np.broadcast_to(np.asarray(weight, dtype=float), src.shape)
        good = src < dst
        count = int(good.sum())
        self._parts.append(
            (
                src[good],
                dst[good],
                weight[good],
                np.full(count, kind, dtype=np.uint8),
                np.full(count, from_start),
            )
        )

    def drop_program(self, nodes: Array) -> None:
        """Forget the program edges into these nodes: something else decides when they come."""
        self._parts = [
            tuple(c[~((p[3] == Edge.PROGRAM) & np.isin(p[1], nodes))] for c in p)
            for p in self._parts
        ]

    def shorten(self, src: Array, dst: Array, weight: Array) -> None:
        """Cut the program edges between pairs of points down to ``weight``."""
        limit = np.full(len(self.graph), np.inf)
        limit[dst] = weight
        source = np.full(len(self.graph), -1, dtype=np.int64)
        source[dst] = src
        for part in self._parts:
            index = (part[3] == Edge.PROGRAM) & (source[part[1]] == part[0])
            part[2][index] = np.minimum(part[2][index], limit[part[1][index]])

    def store(self) -> None:
        """Put them into the graph, ordered by the node they lead into."""
        columns = [np.concatenate(c) for c in zip(*self._parts, strict=True)]
        order = np.argsort(columns[1], kind="stable")
        g = self.graph
        g.src, g.dst, g.weight, g.edge, g.from_start = (c[order] for c in columns)


def with_edges(
    graph: Graph, weight: Array, more: list[tuple[int, int, float, int]], **changed: object
) -> tuple[Graph, Array]:
    """The graph with further edges (source, target, weight, kind) and with fields changed."""
    src, dst, value, kind = (np.array(c) for c in zip(*more, strict=True)) if more else _NO_EDGES
    dst = np.concatenate([graph.dst, dst.astype(np.int64)])
    order = np.argsort(dst, kind="stable")
    weight = np.concatenate([weight, value.astype(float)])[order]
    columns = {
        "src": np.concatenate([graph.src, src.astype(np.int64)]),
        "dst": dst,
        "edge": np.concatenate([graph.edge, kind.astype(np.uint8)]),
        "from_start": np.concatenate([graph.from_start, np.zeros(len(src), dtype=bool)]),
    }
    columns = {name: column[order] for name, column in columns.items()}
    return replace(graph, weight=weight, **columns, **changed), weight  # type: ignore[arg-type]


_NO_EDGES = (np.zeros(0), np.zeros(0), np.zeros(0), np.zeros(0))
