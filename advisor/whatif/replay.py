"""Replay of a graph: one pass of maxima, in plain Python over lists.

A loop and not whole columns, because each node needs the replayed times of those before it; on
lists it costs about 0.2 µs a node.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from advisor.whatif.graph import NEVER, Array, Graph


@dataclass(frozen=True)
class Outcome:
    """Replayed times of all nodes (ends for device nodes) and of the steps, ns."""

    time: Array
    complete: Array
    """When each step was complete, its device work included; first entry: the window's start."""

    @property
    def period(self) -> float:
        """Steady-state time of one step: mean distance between completions, the first step left
        out where there are at least three."""
        skip = 1 if len(self.complete) > 3 else 0
        return float(self.complete[-1] - self.complete[skip]) / (len(self.complete) - 1 - skip)


class Plan:
    """A graph laid out for replaying: two edges a node in columns, the few others aside."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        order = np.argsort(graph.dst, kind="stable")
        dst = graph.dst[order]
        first = np.searchsorted(dst, np.arange(len(graph)))
        count = np.diff(np.append(first, len(dst)))
        self._slot = np.empty(len(order), dtype=np.int64)
        self._slot[order] = np.arange(len(order)) - first[dst]
        self._more = np.flatnonzero(self._slot >= 2)
        self._most = int(count.max()) if len(count) else 0

    def run(
        self, weight: Array | None = None, dur: Array | None = None, src: Array | None = None
    ) -> Array:
        """Replayed time of each node, with other weights, durations or sources if given."""
        g = self.graph
        weight = g.weight if weight is None else weight
        dur = g.dur if dur is None else dur
        src = g.src if src is None else src
        weight = np.where(g.from_start, weight - dur[src], weight)
        columns = []
        for slot in (0, 1):
            edges = np.flatnonzero(self._slot == slot)
            source = np.zeros(len(g), dtype=np.int64)
            value = np.full(len(g), NEVER)
            source[g.dst[edges]] = src[edges]
            value[g.dst[edges]] = weight[edges]
            columns += [source.tolist(), value.tolist()]
        more: dict[int, list[tuple[int, float]]] = {}
        for node, source_, value_ in zip(
            g.dst[self._more].tolist(),
            src[self._more].tolist(),
            weight[self._more].tolist(),
            strict=True,
        ):
            more.setdefault(node, []).append((source_, value_))
        time = [0.0] * len(g)
        for node, (a, wa, b, wb, d) in enumerate(zip(*columns, dur.tolist(), strict=True)):
            at = time[a] + wa
            other = time[b] + wb
            if other > at:
                at = other
            if node in more:
                for c, wc in more[node]:
                    other = time[c] + wc
                    if other > at:
                        at = other
            time[node] = at + d if at > 0.0 else d
        return np.array(time)

    def outcome(
        self, weight: Array | None = None, dur: Array | None = None, src: Array | None = None
    ) -> Outcome:
        """Replay and say when the steps were complete."""
        time = self.run(weight, dur, src)
        return Outcome(time, completions(self.graph, time))


def completions(graph: Graph, time: Array) -> Array:
    """When each step was complete: its end on the host, or its last device work if later."""
    host = time[graph.starts].astype(float)
    done = host.copy()
    for step, nodes in enumerate(graph.last):
        if len(nodes):
            done[step + 1] = max(done[step + 1], float(time[nodes].max()))
    # work left over from before the window is done when the first step begins or later
    return np.maximum.accumulate(done)
