"""Edits applied to a graph: other weights, durations and sources for its edges and nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from advisor.intervals import Intervals, covered, union
from advisor.select import selected_gaps, selected_gpu, selected_host
from advisor.whatif.graph import NEVER, Array, Edge, Graph, Node

if TYPE_CHECKING:
    from advisor.analysis import Analysis
    from advisor.model import Edit

GRAPH_LAUNCH_NS = 1_000.0
"""Host time a kernel costs inside a CUDA graph, about (NVIDIA, "Constant time launch", 2024:
a graph's launch costs a few µs plus well under 1 µs a node)."""
HAND_BATCH_NS = 200_000.0
"""Taking over a batch that a loader worker has ready."""


class Patch:
    """Mutable copies of a graph's numbers; each edit changes them in place, so edits compose."""

    def __init__(self, a: Analysis, graph: Graph) -> None:
        self.a = a
        self.graph = graph
        self.weight = graph.weight.copy()
        self.dur = graph.dur.copy()
        self.src = graph.src.copy()

    def apply(self, edits: Sequence[Edit], assumption: str = "") -> Patch:
        """Apply edits one after the other. ``assumption``: ``low`` or ``high`` takes the factors
        that make the gain small or large."""
        for edit in edits:
            factor = edit.factor
            if assumption == "low" and edit.factor_high is not None:
                factor = edit.factor_high
            if assumption == "high" and edit.factor_low is not None:
                factor = edit.factor_low
            getattr(self, f"_{edit.op}")(edit, factor)
        return self

    def count(self, edit: Edit) -> int:
        """How many events of the replayed steps an edit selects."""
        graph = self.graph
        if edit.select.on == "gpu":
            return len(self._work(edit))
        first, last = graph.origin, graph.origin + float(graph.time[graph.starts[-1]])
        if edit.select.on == "gap":
            ts = self.a.gaps["ts"].to_numpy()[selected_gaps(self.a, edit.select)]
        else:
            ts = self.a.trace.cpu["ts"].to_numpy()[selected_host(self.a, edit.select)]
        return int(((ts >= first) & (ts < last)).sum())

    # -- operations -------------------------------------------------------------------------

    def _remove(self, edit: Edit, factor: float | None) -> None:
        if edit.select.on == "gpu":
            self._drop_work(self._work(edit))
        elif edit.select.on == "host":
            self._shrink_host(self._host_time(edit), 0.0)
            self._let_go(self._waits(edit))
        else:
            self._shrink_host(self._gap_time(edit), 0.0)

    def _scale(self, edit: Edit, factor: float | None) -> None:
        factor = 1.0 if factor is None else factor
        if edit.select.on == "gpu":
            self.dur[self._work(edit)] *= factor
        else:
            held = self._host_time(edit) if edit.select.on == "host" else self._gap_time(edit)
            self._shrink_host(held, factor)

    def _asynchronous(self, edit: Edit, factor: float | None) -> None:
        self._let_go(self._waits(edit))

    def _spread(self, edit: Edit, factor: float | None) -> None:
        """Loader work moves to ``workers`` processes: batches come at their rate instead."""
        workers = max(1, edit.workers or 1)
        graph = self.graph
        chosen = self._rows(edit)
        loaded = np.flatnonzero(graph.kind == Node.LOADED)
        loaded = loaded[chosen[graph.row[loaded]]]
        into = np.isin(graph.dst, loaded)
        program = np.flatnonzero(into & (graph.edge == Edge.PROGRAM))
        cost = np.zeros(len(graph))
        cost[graph.dst[program]] = self.weight[program]
        self.weight[program] = np.minimum(self.weight[program], HAND_BATCH_NS)
        rate = np.flatnonzero(into & (graph.edge == Edge.LOADER) & (self.src > 0))
        multi = self.weight[rate] > NEVER
        self.weight[rate] = np.where(
            multi, self.weight[rate] / workers, cost[graph.dst[rate]] / workers
        )

    def _overlap(self, edit: Edit, factor: float | None) -> None:
        """The work moves to a stream of its own: what comes after it no longer waits, except
        for the same work of the step before."""
        graph = self.graph
        moved = np.zeros(len(graph), dtype=bool)
        moved[self._work(edit)] = True
        device = graph.device
        order = device[np.argsort(graph.lane[device], kind="stable")]
        same_lane = np.append(False, graph.lane[order][1:] == graph.lane[order][:-1])
        # the last node at or before each that stays, and the last before it that moves
        position = np.arange(len(order))
        lane_start = np.maximum.accumulate(np.where(same_lane, 0, position))
        stays = np.maximum.accumulate(np.where(~moved[order], position, -1))
        moves = np.maximum.accumulate(np.where(moved[order], position, -1))
        stays = np.where(stays >= lane_start, stays, -1)
        before_moves = np.append(-1, moves[:-1])
        before_moves = np.where(before_moves >= lane_start, before_moves, -1)
        last_stay, last_move = np.full(len(graph), -1), np.full(len(graph), -1)
        last_stay[order] = np.where(stays >= 0, order[np.maximum(stays, 0)], -1)
        last_move[order] = np.where(before_moves >= 0, order[np.maximum(before_moves, 0)], -1)
        stream = graph.edge == Edge.STREAM
        leaves = stream & moved[self.src] & ~moved[graph.dst]
        enters = stream & ~moved[self.src] & moved[graph.dst]
        self._redirect(np.flatnonzero(leaves), last_stay[self.src[leaves]])
        self._redirect(np.flatnonzero(enters), last_move[graph.dst[enters]])
        crossing = np.isin(graph.edge, [Edge.CROSS, Edge.CONTENTION])
        freed = np.flatnonzero(crossing & moved[self.src] & ~moved[graph.dst])
        self._redirect(freed, self._a_step_earlier(np.flatnonzero(moved))[self.src[freed]])
        crowded = (graph.edge == Edge.CONTENTION) & ~moved[self.src] & moved[graph.dst]
        self.weight[crowded] = NEVER

    def _merge(self, edit: Edit, factor: float | None) -> None:
        """Neighbours on a stream become one kernel that takes ``factor`` of their time; the
        launches and operators of all but the first go."""
        graph = self.graph
        chosen = np.zeros(len(graph), dtype=bool)
        chosen[self._work(edit)] = True
        device = graph.device
        order = device[np.argsort(graph.lane[device], kind="stable")]
        mine = chosen[order]
        first = mine.copy()
        first[1:] &= ~(mine[:-1] & (graph.lane[order][1:] == graph.lane[order][:-1]))
        run = np.cumsum(first)[mine] - 1
        nodes = order[mine]
        if not len(nodes):
            return
        total = np.bincount(run, weights=self.dur[nodes])
        heads = order[first]
        rest = nodes[~first[mine]]
        self._drop_work(rest, operators=True)
        self.dur[heads] = total * (1.0 if factor is None else factor)

    def _drop_launch(self, edit: Edit, factor: float | None) -> None:
        """Host time around launches goes, but for what a graph's node costs."""
        cost = GRAPH_LAUNCH_NS if edit.host_ns is None else float(edit.host_ns)
        if edit.select.on == "gap":
            held = self._gap_time(edit)
        elif edit.select.on == "host":
            held = self._host_time(edit)
        else:
            held = self._before_launches(self._work(edit))
        self._shrink_host(held, 0.0, floor=cost)
        for thread, time in held.items():
            self._shorten_launches(thread, time)

    # -- what is selected -------------------------------------------------------------------

    def _work(self, edit: Edit) -> Array:
        device = self.graph.device
        return device[selected_gpu(self.a, edit.select)[self.graph.row[device]]]

    def _rows(self, edit: Edit) -> Array:
        """Aligned with ``trace.cpu`` (one more row at the end: False)."""
        return np.append(selected_host(self.a, edit.select), False)

    def _waits(self, edit: Edit) -> Array:
        """Ends of selected blocking calls."""
        done = np.flatnonzero(np.isin(self.graph.kind, [Node.RELEASED, Node.LOADED]))
        return done[self._rows(edit)[self.graph.row[done]]]

    def _host_time(self, edit: Edit) -> dict[int, Intervals]:
        cpu = self.a.trace.cpu
        rows = np.flatnonzero(selected_host(self.a, edit.select))
        return self._by_thread(
            cpu["thread"].to_numpy()[rows], cpu["ts"].to_numpy()[rows], cpu["dur"].to_numpy()[rows]
        )

    def _gap_time(self, edit: Edit) -> dict[int, Intervals]:
        gaps = self.a.gaps
        rows = np.flatnonzero(selected_gaps(self.a, edit.select))
        return self._by_thread(
            gaps["thread"].fill_null(-1).to_numpy()[rows],
            gaps["ts"].to_numpy()[rows],
            gaps["dur"].to_numpy()[rows],
        )

    def _by_thread(self, thread: Array, ts: Array, dur: Array) -> dict[int, Intervals]:
        ts = ts - self.graph.origin
        return {
            int(t): union(ts[thread == t], (ts + dur)[thread == t]) for t in np.unique(thread)
        }

    def _before_launches(self, nodes: Array) -> dict[int, Intervals]:
        """Host time from the point before each launch of the work to the end of its call."""
        graph = self.graph
        launch = np.flatnonzero((graph.edge == Edge.LAUNCH) & np.isin(graph.dst, nodes))
        points = np.unique(graph.src[launch])
        points = points[points > 0]
        program = np.flatnonzero((graph.edge == Edge.PROGRAM) & np.isin(graph.dst, points))
        program = program[graph.src[program] > 0]
        begin = graph.time[graph.src[program]]
        point = graph.dst[program]
        end = graph.time[point] + self.a.trace.cpu["dur"].to_numpy()[graph.row[point]]
        return {
            int(t): union(begin[graph.lane[point] == t], end[graph.lane[point] == t])
            for t in np.unique(graph.lane[point])
        }

    # -- changes ----------------------------------------------------------------------------

    def _redirect(self, edges: Array, sources: Array) -> None:
        """Let edges come from other nodes; from none (-1) switches them off."""
        good = (sources >= 0) & (sources < self.graph.dst[edges])
        self.src[edges[good]] = sources[good]
        self.weight[edges[~good]] = NEVER

    def _a_step_earlier(self, nodes: Array) -> Array:
        """For each graph node among ``nodes``: the one at the same place one step before, -1."""
        graph = self.graph
        found = np.full(len(graph), -1)
        step = np.searchsorted(graph.starts, nodes, side="right")
        for number in np.unique(step)[1:]:
            now, before = nodes[step == number], nodes[step == number - 1]
            if len(now) == len(before):
                found[now] = before
        return found

    def _drop_work(self, nodes: Array, *, operators: bool = False) -> None:
        """Device work that is not done: it takes no time, waits for nothing but its place on
        the stream, and its launch costs the host nothing (nor, if told, its operator)."""
        graph = self.graph
        gone = np.zeros(len(graph), dtype=bool)
        gone[nodes] = True
        self.dur[nodes] = 0.0
        into = gone[graph.dst]
        stream = graph.edge == Edge.STREAM
        self.weight[into & ~stream] = NEVER
        self.weight[into & stream] = 0.0
        self.weight[gone[self.src] & stream & ~into] -= self._gap_after(nodes)
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
        self._shrink_host(
            self._by_thread(
                cpu["thread"].to_numpy()[rows],
                cpu["ts"].to_numpy()[rows],
                cpu["dur"].to_numpy()[rows],
            ),
            0.0,
        )

    def _gap_after(self, nodes: Array) -> float:
        """The gap a stream shows between two pieces of work: one less when one goes."""
        return min((v for k, v in self.graph.facts.items() if k == "gap kernel"), default=0.0)

    def _shrink_host(
        self, held: dict[int, Intervals], factor: float, *, floor: float = 0.0
    ) -> None:
        """Scale the host time inside the intervals (by thread, ns from the window's start)."""
        graph = self.graph
        program = np.flatnonzero((graph.edge == Edge.PROGRAM) & (self.src > 0))
        lane = graph.lane[graph.dst[program]]
        for thread, time in held.items():
            mine = program[lane == thread]
            begin, end = graph.time[self.src[mine]], graph.time[graph.dst[mine]]
            inside = covered(begin.astype(np.int64), end.astype(np.int64), time)
            # a wait's own call is what remains of it; its released end is computed
            real = graph.kind[graph.dst[mine]] != Node.RELEASED
            less = np.where(real, inside * (1.0 - factor), 0.0)
            changed = less > 0
            edges = mine[changed]
            left = self.weight[edges] - less[changed]
            self.weight[edges] = np.maximum(left, np.minimum(floor, self.weight[edges]))

    def _shorten_launches(self, thread: int, time: Intervals) -> None:
        """Launch calls inside the intervals no longer hold their work back by their length."""
        graph = self.graph
        launch = np.flatnonzero((graph.edge == Edge.LAUNCH) & (self.src > 0))
        launch = launch[graph.lane[self.src[launch]] == thread]
        begin = graph.time[self.src[launch]]
        end = begin + self.a.trace.cpu["dur"].to_numpy()[graph.row[self.src[launch]]]
        inside = covered(begin.astype(np.int64), end.astype(np.int64), time)
        self.weight[launch] = np.maximum(self.weight[launch] - inside, 0.0)

    def _let_go(self, ends: Array) -> None:
        """Blocking calls that no longer wait: they cost what a call costs."""
        graph = self.graph
        into = np.isin(graph.dst, ends)
        self.weight[into & np.isin(graph.edge, [Edge.RELEASE, Edge.LOADER])] = NEVER
        program = into & (graph.edge == Edge.PROGRAM)
        cost = graph.facts.get("call", 5_000.0)
        self.weight[program] = np.minimum(self.weight[program], cost)
