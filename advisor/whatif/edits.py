"""Edits applied to a graph: other weights, durations and sources for its edges and nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from advisor.intervals import EMPTY, Intervals, covered, join, subtract, union
from advisor.select import selected_gaps, selected_gpu, selected_host
from advisor.whatif.graph import NEVER, Array, Edge, Graph, Node

if TYPE_CHECKING:
    from advisor.analysis import Analysis
    from advisor.model import Edit, Select

GRAPH_LAUNCH_NS = 1_000.0
"""Host time a kernel costs inside a CUDA graph, about (NVIDIA, "Constant time launch", 2024:
a graph's launch costs a few µs plus well under 1 µs a node)."""
ROOFLINE_SHARE = 0.75
"""Share of the attainable rate that good kernels reach (TraceLens: 75 % is the low target)."""
CROSS_NS = 2_000.0
"""From the end of one stream's work to the start of another's that waited for it."""
HAND_BATCH_NS = 200_000.0
"""Taking over a batch that a loader worker has ready."""


class Selected:
    """What selectors pick out of a graph, each looked up once however often it is replayed."""

    def __init__(self, a: Analysis, graph: Graph) -> None:
        self.a = a
        self.graph = graph
        self._known: dict[tuple[str, Select], Any] = {}

    def _once(self, what: str, select: Select, find: Callable[[Select], Any]) -> Any:
        key = (what, select)
        if key not in self._known:
            self._known[key] = find(select)
        return self._known[key]

    def work(self, select: Select) -> Array:
        """Device nodes."""
        found: Array = self._once("work", select, self._find_work)
        return found

    def _find_work(self, select: Select) -> Array:
        # work launched in the last steps runs after them when the host is ahead
        device = self.graph.device
        return device[selected_gpu(self.a, select, anywhere=True)[self.graph.row[device]]]

    def rows(self, select: Select) -> Array:
        """Aligned with ``trace.cpu``, and one more at the end: False."""
        found: Array = self._once(
            "rows", select, lambda s: np.append(selected_host(self.a, s), False)
        )
        return found

    def waits(self, select: Select) -> Array:
        """Ends of blocking calls and of waits for the loader."""
        done = np.flatnonzero(np.isin(self.graph.kind, [Node.RELEASED, Node.LOADED]))
        return done[self.rows(select)[self.graph.row[done]]]

    def held(self, select: Select) -> dict[int, Intervals]:
        """Host time by thread, ns from the window's start: of host events, or of idle gaps (what
        the launching thread did meanwhile)."""
        found: dict[int, Intervals] = self._once("held", select, self._find_held)
        return found

    def _find_held(self, select: Select) -> dict[int, Intervals]:
        if select.on == "gap":
            rows = np.flatnonzero(selected_gaps(self.a, select))
            table, thread = self.a.gaps, self.a.gaps["thread"].fill_null(-1).to_numpy()[rows]
        else:
            rows = np.flatnonzero(self.rows(select)[:-1])
            table, thread = self.a.trace.cpu, self.a.trace.cpu["thread"].to_numpy()[rows]
        return self.by_thread(thread, table["ts"].to_numpy()[rows], table["dur"].to_numpy()[rows])

    def by_thread(self, thread: Array, ts: Array, dur: Array) -> dict[int, Intervals]:
        """Intervals of each thread, ns from the window's start, inside the window."""
        start = ts - self.graph.origin
        inside = (start + dur > 0) & (start < float(self.graph.time.max()))
        thread, start, dur = thread[inside], start[inside], dur[inside]
        return {
            int(t): union(start[thread == t], (start + dur)[thread == t]) for t in np.unique(thread)
        }

    @cached_property
    def bound(self) -> Array:
        """For each node, the shortest time its kernel can take on this device by FLOPs and bytes,
        ns; NaN where one of shapes, dtype and device is not known."""
        found = np.full(len(self.graph), np.nan)
        gpu, kernels = self.a.hardware, self.a.kernels
        if gpu is None:
            return found
        device = self.graph.device
        rows = pl.Series(self.graph.row[device])
        flops = kernels["flops"].gather(rows).cast(pl.Float64).fill_null(np.nan).to_numpy()
        moved = kernels["moved"].gather(rows).cast(pl.Float64).fill_null(np.nan).to_numpy()
        dtypes = kernels["dtype"].gather(rows).cast(pl.String)
        peaks = {d: gpu.peak(d) for d in dtypes.unique().drop_nulls().to_list()}
        peak = np.array([(peaks.get(d) if d else None) or np.nan for d in dtypes.to_list()])
        memory = moved / gpu.bandwidth if gpu.bandwidth else np.full(len(moved), np.nan)
        found[device] = np.fmax(flops / peak, memory) * 1e9
        return found

    @cached_property
    def fill(self) -> Array:
        """For each node, how often its kernel fills the device (waves; else blocks per SM)."""
        found = np.full(len(self.graph), np.nan)
        device = self.graph.device
        rows = pl.Series(self.graph.row[device])
        waves = self.a.kernels["waves"].gather(rows).cast(pl.Float64).fill_null(np.nan).to_numpy()
        blocks = self.a.trace.gpu["blocks_per_sm"].gather(rows).fill_null(np.nan).to_numpy()
        found[device] = np.where(np.isfinite(waves), waves, blocks)
        return found

    @cached_property
    def fixed(self) -> Array:
        """For each node: its time does not depend on the batch (collectives, optimizer)."""
        found = np.zeros(len(self.graph), dtype=bool)
        device = self.graph.device
        family = self.a.kernels["family"].gather(pl.Series(self.graph.row[device]))
        found[device] = (
            family.cast(pl.String).is_in(["communication", "optimizer"]).fill_null(False)
        )
        return found

    def around_launches(self, nodes: Array) -> dict[int, Intervals]:
        """Host time that goes when the launches of this work become part of a CUDA graph: from
        each launch to the next one of them in its step if nothing else happens between them; on
        the way to the first and after the last, their outermost operator only."""
        graph = self.graph
        launch = np.flatnonzero((graph.edge == Edge.LAUNCH) & np.isin(graph.dst, nodes))
        chosen = np.zeros(len(graph), dtype=bool)
        chosen[graph.src[launch]] = True
        chosen[0] = False
        points = np.flatnonzero(chosen)
        if not len(points):
            return {}
        begin, end = self._outermost_ops(graph.row[points])
        host = np.flatnonzero((graph.kind != Node.DEVICE) & (graph.kind != Node.SOURCE))
        order = host[np.argsort(graph.lane[host], kind="stable")]
        place = np.empty(len(graph), dtype=np.int64)
        place[order] = np.arange(len(order))
        step = np.searchsorted(graph.time[graph.starts], graph.time, side="right")
        low, high = begin.astype(float), end.astype(float)
        for bound, shift in ((low, -1), (high, 1)):
            at = place[points] + shift
            other = order[np.clip(at, 0, len(order) - 1)]
            real = (at >= 0) & (at < len(order)) & (graph.lane[other] == graph.lane[points])
            joined = real & chosen[other] & (step[other] == step[points])
            nearest = np.maximum if shift < 0 else np.minimum
            cut = np.where(real, nearest(bound, graph.time[other]), bound)
            bound[:] = np.where(joined, graph.time[other], cut)
        lane = graph.lane[points]
        return {int(t): union(low[lane == t], high[lane == t]) for t in np.unique(lane)}

    def _outermost_ops(self, rows: Array) -> tuple[Array, Array]:
        """Start and end of the outermost operator around each call (else of the call itself), ns
        from the window's start."""
        cpu = self.a.trace.cpu
        parent = cpu["parent"].fill_null(-1).to_numpy()
        operator = (cpu["kind"] == "op").to_numpy()
        found, at = rows.copy(), parent[rows]
        while (at >= 0).any():  # as many rounds as events are nested
            found = np.where((at >= 0) & operator[np.maximum(at, 0)], at, found)
            at = np.where(at >= 0, parent[np.maximum(at, 0)], -1)
        begin = cpu["ts"].to_numpy()[found] - self.graph.origin
        return begin, begin + cpu["dur"].to_numpy()[found]


class Patch:
    """Mutable copies of a graph's numbers; each edit changes them in place, so edits compose."""

    def __init__(self, selected: Selected, dur: Array | None = None) -> None:
        """``dur``: what its work takes instead, where collectives are replayed with other ranks
        (``together``): without the wait for these."""
        graph = selected.graph
        self.selected = selected
        self.a = selected.a
        self.graph = graph
        self.weight = graph.weight.copy()
        self.together = dur is not None
        self.assumption = ""
        self.dur = graph.dur.copy() if dur is None else dur.copy()
        self.src = graph.src.copy()
        self.gone: dict[int, Intervals] = {}
        """Host time that edits removed, by thread."""
        self.lane = graph.lane
        self.added: list[tuple[Array, Array]] = []
        """(source, target) of waits that edits brought: of one stream, or the host, for another."""
        self.free = np.zeros(len(graph), dtype=bool)
        """Ends of blocking calls that no longer wait."""
        self.dropped = np.zeros(len(graph), dtype=bool)
        """Device work that is not done any more."""
        self.punctual = np.zeros(len(graph), dtype=bool)
        """Collectives that keep no other rank waiting."""

    def apply(self, edits: Sequence[Edit], assumption: str = "") -> Patch:
        """Apply edits one after the other. ``assumption``: ``low`` or ``high`` takes the factors
        that make the gain small or large."""
        for edit in edits:
            factor = edit.factor
            if assumption == "low" and edit.factor_high is not None:
                factor = edit.factor_high
            if assumption == "high" and edit.factor_low is not None:
                factor = edit.factor_low
            self.assumption = assumption
            getattr(self, f"_{edit.op}")(edit, factor)
        return self

    def widened(self) -> tuple[Graph, Array, Array]:
        """The graph as it is to be replayed, with its weights and sources: the one that was
        patched, unless edits changed streams or what these wait for."""
        if self.lane is self.graph.lane:
            return self.graph, self.weight, self.src
        added = [(s[~self.free[d]], d[~self.free[d]]) for s, d in self.added]
        src = np.concatenate([self.src, *(s for s, _ in added)])
        dst = np.concatenate([self.graph.dst, *(d for _, d in added)])
        more = len(src) - len(self.src)
        wait = np.full(more, self.graph.facts.get("cross-stream latency", CROSS_NS))
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

    # -- operations -------------------------------------------------------------------------

    def _remove(self, edit: Edit, factor: float | None) -> None:
        if edit.select.on == "gpu":
            self._drop_work(self.selected.work(edit.select))
        else:
            self._shrink_host(self.selected.held(edit.select), 0.0)
            if edit.select.on == "host":
                self._let_go(self.selected.waits(edit.select))

    def _scale(self, edit: Edit, factor: float | None) -> None:
        factor = 1.0 if factor is None else factor
        if edit.select.on == "gpu":
            self.dur[self.selected.work(edit.select)] *= factor
        else:
            held = self.selected.held(edit.select)
            self._shrink_host(held, factor)

    def _roofline(self, edit: Edit, factor: float | None) -> None:
        """Kernels that reach less than ``factor`` of their attainable rate come to reach it."""
        nodes = self.selected.work(edit.select)
        bound = self.selected.bound[nodes]
        target = bound / (ROOFLINE_SHARE if factor is None else max(factor, 1e-3))
        known = np.isfinite(target)
        self.dur[nodes[known]] = np.minimum(self.dur[nodes[known]], target[known])

    def _resize(self, edit: Edit, factor: float | None) -> None:
        """Another batch size. Work that fills the device grows with it; work that leaves part of
        it empty grows once it is full, copies grow with it; collectives of gradients and the
        optimizer stay. Host time stays, but for the loader's. Steps are then to be judged by time
        a sample."""
        factor = 1.0 if factor is None else max(factor, 1e-3)
        nodes = self.selected.work(edit.select)
        fill = np.nan_to_num(self.selected.fill[nodes], nan=1.0)
        grown = np.maximum(1.0, fill * factor) / np.maximum(1.0, fill)
        kinds = self.a.trace.gpu["kind"].gather(pl.Series(self.graph.row[nodes]))
        grown = np.where((kinds == "kernel").to_numpy(), grown, factor)
        fixed = self.selected.fixed[nodes]
        self.dur[nodes] *= np.where(fixed, 1.0, grown)
        loaded = np.flatnonzero(self.graph.kind == Node.LOADED)
        into = np.isin(self.graph.dst, loaded) & np.isin(
            self.graph.edge, [Edge.PROGRAM, Edge.LOADER]
        )
        self.weight[into & (self.weight > 0)] *= factor

    def _punctual(self, edit: Edit, factor: float | None) -> None:
        """A rank that keeps nobody waiting. Without the other ranks' replay: ``factor`` of the
        collectives' time remains, if that is told."""
        nodes = self.selected.work(edit.select)
        if self.together:
            self.punctual[nodes] = True
        elif factor is not None:
            self.dur[nodes] *= factor

    def _asynchronous(self, edit: Edit, factor: float | None) -> None:
        self._let_go(self.selected.waits(edit.select))

    def _spread(self, edit: Edit, factor: float | None) -> None:
        """Loader work moves to ``workers`` processes (where there are some: to that many times as
        many): batches come at their rate instead, uneven ones evened out by the queue. Their mean
        is known from those of the window, to twice its standard error."""
        workers = max(1, edit.workers or 1)
        graph = self.graph
        chosen = self.selected.rows(edit.select)
        loaded = np.flatnonzero(graph.kind == Node.LOADED)
        loaded = loaded[chosen[graph.row[loaded]]]
        into = np.isin(graph.dst, loaded)
        program = np.flatnonzero(into & (graph.edge == Edge.PROGRAM))
        cost = np.zeros(len(graph))
        cost[graph.dst[program]] = self.weight[program]
        self.weight[program] = np.minimum(self.weight[program], HAND_BATCH_NS)
        rate = np.flatnonzero(into & (graph.edge == Edge.LOADER))
        multi = rate[self.weight[rate] > NEVER]
        if len(multi):
            steps = np.diff(np.searchsorted(graph.starts, graph.dst[multi], side="right"))
            later = self.weight[multi[1:]].sum() * steps / max(1, steps.sum())
            self.weight[multi] = np.append(self.weight[multi[:1]], later) / workers
        single = rate[self.weight[rate] <= NEVER]
        if len(single):
            batches = cost[graph.dst[single]]
            off = 2 * float(batches.std()) / max(1, len(batches)) ** 0.5
            mean = float(batches.mean()) + off * {"low": 1, "high": -1}.get(self.assumption, 0)
            self.weight[single] = max(mean, 0.0) / workers

    def _overlap(self, edit: Edit, factor: float | None) -> None:
        """The work moves to a stream of its own: what comes after it, on the device or the host,
        no longer waits for it, except for the same work of the step before. Only a wait of the
        host for the whole device still does, unless the work is issued earlier too."""
        graph = self.graph
        moved = np.zeros(len(graph), dtype=bool)
        moved[self.selected.work(edit.select)] = True
        device = graph.device
        order = device[np.argsort(graph.lane[device], kind="stable")]
        same_lane = np.zeros(len(order), dtype=bool)
        same_lane[1:] = graph.lane[order][1:] == graph.lane[order][:-1]
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
        earlier = self._a_step_earlier(np.flatnonzero(moved))
        before, after = earlier[self.src[leaves]], graph.dst[leaves]
        self.added.append((before[before >= 0], after[before >= 0]))
        self.lane = np.where(moved, self.lane + int(self.lane.max()) + 1, self.lane)
        self._redirect(np.flatnonzero(leaves), last_stay[self.src[leaves]])
        self._redirect(np.flatnonzero(enters), last_move[graph.dst[enters]])
        crossing = np.isin(graph.edge, [Edge.CROSS, Edge.CONTENTION, Edge.RELEASE])
        whole = np.zeros(len(graph), dtype=bool)
        if not edit.ahead or self.assumption == "low":
            whole[self._device_syncs()] = True
        freed = np.flatnonzero(crossing & moved[self.src] & ~moved[graph.dst] & ~whole[graph.dst])
        self._redirect(freed, earlier[self.src[freed]])
        self._still_awaited(np.flatnonzero(moved), np.flatnonzero(whole))
        crowded = (graph.edge == Edge.CONTENTION) & ~moved[self.src] & moved[graph.dst]
        self.weight[crowded] = NEVER

    def _merge(self, edit: Edit, factor: float | None) -> None:
        """Neighbours on a stream become one kernel that takes ``factor`` of their time; the
        launches and operators of all but the first go."""
        graph = self.graph
        chosen = np.zeros(len(graph), dtype=bool)
        chosen[self.selected.work(edit.select)] = True
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
        if edit.select.on != "gpu":
            held = self.selected.held(edit.select)
        else:
            held = self.selected.around_launches(self.selected.work(edit.select))
        self._shrink_host(held, 0.0, floor=cost)
        for thread, time in held.items():
            self._shorten_launches(thread, time)

    # -- changes ----------------------------------------------------------------------------

    def _redirect(self, edges: Array, sources: Array) -> None:
        """Let edges come from other nodes; from none (-1) switches them off."""
        good = (sources >= 0) & (sources < self.graph.dst[edges])
        self.src[edges[good]] = sources[good]
        self.weight[edges[~good]] = NEVER

    def _device_syncs(self) -> Array:
        """Ends of the calls that wait for the whole device."""
        done = np.flatnonzero(self.graph.kind == Node.RELEASED)
        call = self.a.trace.cpu["call"].gather(pl.Series(self.graph.row[done]))
        found: Array = done[(call == "sync_device").fill_null(False).to_numpy()]
        return found

    def _still_awaited(self, moved: Array, syncs: Array) -> None:
        """Calls that wait for the whole device wait for the last moved work launched before."""
        graph = self.graph
        launch = np.flatnonzero((graph.edge == Edge.LAUNCH) & np.isin(graph.dst, moved))
        if not len(syncs) or not len(launch):
            return
        launch = launch[np.argsort(graph.src[launch], kind="stable")]
        waits = np.flatnonzero(graph.kind == Node.WAIT)
        begin = dict(zip(graph.row[waits].tolist(), waits.tolist(), strict=True))
        called = np.array([begin.get(int(r), 0) for r in graph.row[syncs]])
        place = np.searchsorted(graph.src[launch], called) - 1
        known = place >= 0
        source, target = graph.dst[launch[place[known]]], syncs[known]
        forward = source < target
        self.added.append((source[forward], target[forward]))

    def _a_step_earlier(self, nodes: Array) -> Array:
        """For each graph node among ``nodes``: the one at the same place one step before, -1."""
        graph = self.graph
        found = np.full(len(graph), -1)
        step = graph.steps_of_launch()[nodes]
        for number in np.unique(step[step > 0]).tolist():
            now, before = nodes[step == number], nodes[step == number - 1]
            if len(now) == len(before):
                found[now] = before
        return found

    def _drop_work(self, nodes: Array, *, operators: bool = False) -> None:
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
            self.selected.by_thread(
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
        """Scale the host time inside the intervals (by thread, ns from the window's start), but
        for what an earlier edit removed already and what launches spent waiting for room."""
        graph = self.graph
        program = np.flatnonzero((graph.edge == Edge.PROGRAM) & (self.src > 0))
        lane = graph.lane[graph.dst[program]]
        for thread, time in held.items():
            mine = program[lane == thread]
            begin, end = graph.time[self.src[mine]], graph.time[graph.dst[mine]]
            gone = join(self.gone.get(thread, EMPTY), graph.hidden.get(thread, EMPTY))
            fresh = subtract(time, gone)
            if factor == 0.0:
                self.gone[thread] = join(gone, time)
            inside = covered(begin.astype(np.int64), end.astype(np.int64), fresh)
            # a wait's own call is what remains of it; its released end is computed
            real = graph.kind[graph.dst[mine]] != Node.RELEASED
            less = np.where(real, inside * (1.0 - factor), 0.0)
            changed = less != 0
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
        inside = covered(
            begin.astype(np.int64),
            end.astype(np.int64),
            subtract(time, graph.hidden.get(thread, EMPTY)),
        )
        self.weight[launch] = np.maximum(self.weight[launch] - inside, 0.0)

    def _let_go(self, ends: Array) -> None:
        """Blocking calls that no longer wait: they cost what a call costs."""
        graph = self.graph
        self.free[ends] = True
        into = np.isin(graph.dst, ends)
        self.weight[into & np.isin(graph.edge, [Edge.RELEASE, Edge.LOADER])] = NEVER
        program = into & (graph.edge == Edge.PROGRAM)
        cost = graph.facts.get("call", 5_000.0)
        self.weight[program] = np.minimum(self.weight[program], cost)
