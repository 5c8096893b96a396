"""A graph with other weights, durations and sources: what operations change, and how."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from advisor.core.intervals import EMPTY, Intervals, covered_length, join, subtract
from advisor.replay.graph import NEVER, Array, Edge, Graph, Node
from advisor.replay.selected import Selected
from advisor.replay.selection import selected_gaps, selected_host

if TYPE_CHECKING:
    from advisor.core.finding import Edit


class Patch:
    """Mutable copies of a graph's numbers; each operation changes them in place, so that edits
    compose."""

    def __init__(self, selected: Selected, dur: Array | None = None) -> None:
        """``dur``: what its work takes instead, where collectives are replayed with other ranks:
        without the wait for these."""
        graph = selected.graph
        self.selected = selected
        self.a = selected.a
        self.graph = graph
        self.weight = graph.weight.copy()
        self.joint = dur is not None
        """Replayed with other ranks."""
        self.assumption = ""
        """``low`` or ``high``: the gain is to come out small or large."""
        self.dur = graph.dur.copy() if dur is None else dur.copy()
        self.src = graph.src.copy()
        self.gone: dict[int, Intervals] = {}
        """Host time that edits removed, by thread."""
        self.lane = graph.lane
        self.moved: list[tuple[Array, bool]] = []
        """What ``overlap`` edits move to streams of their own, and whether it is issued earlier."""
        self.added: list[tuple[Array, Array]] = []
        """(source, target) of waits that edits brought: of one stream, or the host, for another."""
        self.unblocked = np.zeros(len(graph), dtype=bool)
        """Ends of blocking calls that no longer wait."""
        self.dropped = np.zeros(len(graph), dtype=bool)
        """Device work that is not done any more."""
        self.punctual = np.zeros(len(graph), dtype=bool)
        """Collectives that keep no other rank waiting."""

    def widened(self) -> tuple[Graph, Array, Array]:
        """The graph as it is to be replayed, with its weights and sources: the one that was
        patched, unless edits changed streams or what these wait for."""
        if self.lane is self.graph.lane:
            return self.graph, self.weight, self.src
        added = [(s[~self.unblocked[d]], d[~self.unblocked[d]]) for s, d in self.added]
        src = np.concatenate([self.src, *(s for s, _ in added)])
        dst = np.concatenate([self.graph.dst, *(d for _, d in added)])
        more = len(src) - len(self.src)
        wait = np.full(more, self.graph.latencies.cross_stream)
        weight = np.concatenate([self.weight, wait])
        edge = np.concatenate([self.graph.edge, np.full(more, Edge.CROSS, dtype=np.uint8)])
        from_start = np.concatenate([self.graph.from_start, np.zeros(more, dtype=bool)])
        order = np.argsort(dst, kind="stable")
        graph = replace(
            self.graph,
            lane=self.lane,
            src=src[order],
            dst=dst[order],
            weight=weight[order],
            edge=edge[order],
            from_start=from_start[order],
        )
        return graph, graph.weight, graph.src

    def count(self, edit: Edit) -> int:
        """How many events of the replayed steps an edit selects."""
        graph = self.graph
        if edit.select.on == "gpu":
            return len(self.selected.work(edit.select))
        first, last = graph.origin, graph.origin + float(graph.time[graph.starts[-1]])
        if edit.select.on == "gap":
            ts = self.a.gaps["ts"].to_numpy()[selected_gaps(self.a, edit.select)]
        else:
            ts = self.a.trace.cpu["ts"].to_numpy()[selected_host(self.a, edit.select)]
        return int(((ts >= first) & (ts < last)).sum())

    # -- changes ----------------------------------------------------------------------------

    def redirect(self, edges: Array, sources: Array) -> None:
        """Let edges come from other nodes; from none (-1) switches them off."""
        good = (sources >= 0) & (sources < self.graph.dst[edges])
        self.src[edges[good]] = sources[good]
        self.weight[edges[~good]] = NEVER

    def drop_work(self, nodes: Array, *, operators: bool = False) -> None:
        """Device work that is not done: it takes no time, waits for nothing but what its stream
        waits for, and its launch costs the host nothing (nor, if told, its operator)."""
        graph = self.graph
        gone = np.zeros(len(graph), dtype=bool)
        gone[nodes] = True
        self.dropped |= gone
        self.dur[nodes] = 0.0
        into = gone[graph.dst]
        stream = graph.edge == Edge.STREAM
        # its stream still waits for the events it was told to wait for
        self.weight[into & ~stream & (graph.edge != Edge.CROSS)] = NEVER
        self.weight[into & stream] = 0.0
        gpu = self.a.trace.gpu
        rows = gpu["op" if operators else "launch"].to_numpy()[graph.row[nodes]]
        if operators:
            calls = gpu["launch"].to_numpy()[graph.row[nodes]]
            rows = np.where(np.isnan(rows.astype(float)), calls, rows)
        rows = rows[~np.isnan(rows.astype(float))].astype(np.int64)
        if operators:
            # an operator that also launches work that stays must stay
            kept = gpu["op"].to_numpy()[graph.row[graph.device[~gone[graph.device]]]]
            rows = rows[~np.isin(rows, kept[~np.isnan(kept.astype(float))])]
        cpu = self.a.trace.cpu
        self.shrink_host(
            self.selected.by_thread(
                cpu["thread"].to_numpy()[rows],
                cpu["ts"].to_numpy()[rows],
                cpu["dur"].to_numpy()[rows],
            ),
            0.0,
        )

    def shrink_host(self, held: dict[int, Intervals], factor: float, *, floor: float = 0.0) -> None:
        """Scale the host time inside the intervals (by thread, ns from the window's start), but
        for what an earlier edit removed already and what launches spent waiting for room."""
        graph = self.graph
        program = np.flatnonzero((graph.edge == Edge.PROGRAM) & (self.src > 0))
        lane = graph.lane[graph.dst[program]]
        for thread, time in held.items():
            own = program[lane == thread]
            begin, end = graph.time[self.src[own]], graph.time[graph.dst[own]]
            gone = join(self.gone.get(thread, EMPTY), graph.hidden.get(thread, EMPTY))
            fresh = subtract(time, gone)
            if factor == 0.0:
                self.gone[thread] = join(gone, time)
            inside = covered_length(begin.astype(np.int64), end.astype(np.int64), fresh)
            # a wait's own call is what remains of it; its released end is computed
            real = graph.kind[graph.dst[own]] != Node.RELEASED
            less = np.where(real, inside * (1.0 - factor), 0.0)
            changed = less != 0
            edges = own[changed]
            left = self.weight[edges] - less[changed]
            self.weight[edges] = np.maximum(left, np.minimum(floor, self.weight[edges]))

    def shorten_launches(self, thread: int, time: Intervals) -> None:
        """Launch calls inside the intervals no longer hold their work back by their length."""
        graph = self.graph
        launch = np.flatnonzero((graph.edge == Edge.LAUNCH) & (self.src > 0))
        launch = launch[graph.lane[self.src[launch]] == thread]
        begin = graph.time[self.src[launch]]
        end = begin + self.a.trace.cpu["dur"].to_numpy()[graph.row[self.src[launch]]]
        inside = covered_length(
            begin.astype(np.int64),
            end.astype(np.int64),
            subtract(time, graph.hidden.get(thread, EMPTY)),
        )
        self.weight[launch] = np.maximum(self.weight[launch] - inside, 0.0)

    def let_go(self, ends: Array) -> None:
        """Blocking calls that no longer wait: they cost what a call costs."""
        graph = self.graph
        self.unblocked[ends] = True
        into = np.isin(graph.dst, ends)
        self.weight[into & np.isin(graph.edge, [Edge.RELEASE, Edge.LOADER])] = NEVER
        program = into & (graph.edge == Edge.PROGRAM)
        self.weight[program] = np.minimum(self.weight[program], graph.latencies.call)
