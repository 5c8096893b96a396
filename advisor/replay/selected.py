"""What the selectors of edits pick out of a graph, and what is known of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from advisor.core.intervals import Intervals, union
from advisor.measure.host.stacks import climb_stack, operators, parents
from advisor.replay.graph import Array, Edge, Graph, Node
from advisor.replay.selection import selected_gaps, selected_gpu, selected_host

if TYPE_CHECKING:
    from advisor.core.finding import Select
    from advisor.measure import Analysis


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
        result: Array = self._once("work", select, self._find_work)
        return result

    def _find_work(self, select: Select) -> Array:
        # work launched in the last steps runs after them when the host is ahead
        device = self.graph.device
        return device[selected_gpu(self.a, select, anywhere=True)[self.graph.row[device]]]

    def rows(self, select: Select) -> Array:
        """Aligned with ``trace.cpu``, and one more at the end: False."""
        result: Array = self._once(
            "rows", select, lambda s: np.append(selected_host(self.a, s), False)
        )
        return result

    def waits(self, select: Select) -> Array:
        """Ends of blocking calls and of waits for the loader."""
        done = np.flatnonzero(np.isin(self.graph.kind, [Node.RELEASED, Node.LOADED]))
        return done[self.rows(select)[self.graph.row[done]]]

    def host_time(self, select: Select) -> dict[int, Intervals]:
        """Host time by thread, ns from the window's start: of host events, or of idle gaps (what
        the launching thread did meanwhile)."""
        result: dict[int, Intervals] = self._once("host", select, self._find_host_time)
        return result

    def _find_host_time(self, select: Select) -> dict[int, Intervals]:
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
        result = np.full(len(self.graph), np.nan)
        gpu, kernels = self.a.hardware, self.a.kernels
        if gpu is None:
            return result
        device = self.graph.device
        rows = pl.Series(self.graph.row[device])
        flops = kernels["flops"].gather(rows).cast(pl.Float64).fill_null(np.nan).to_numpy()
        moved = kernels["moved"].gather(rows).cast(pl.Float64).fill_null(np.nan).to_numpy()
        dtypes = kernels["dtype"].gather(rows).cast(pl.String)
        peaks = {d: gpu.peak(d) for d in dtypes.unique().drop_nulls().to_list()}
        peak = np.array([(peaks.get(d) if d else None) or np.nan for d in dtypes.to_list()])
        memory = moved / gpu.bandwidth if gpu.bandwidth else np.full(len(moved), np.nan)
        result[device] = np.fmax(flops / peak, memory) * 1e9
        return result

    @cached_property
    def fill(self) -> Array:
        """For each node, how often its kernel fills the device (waves; else blocks per SM)."""
        result = np.full(len(self.graph), np.nan)
        device = self.graph.device
        rows = pl.Series(self.graph.row[device])
        waves = self.a.kernels["waves"].gather(rows).cast(pl.Float64).fill_null(np.nan).to_numpy()
        blocks = self.a.trace.gpu["blocks_per_sm"].gather(rows).fill_null(np.nan).to_numpy()
        result[device] = np.where(np.isfinite(waves), waves, blocks)
        return result

    @cached_property
    def fixed(self) -> Array:
        """For each node: its time does not depend on the batch (collectives, optimizer)."""
        result = np.zeros(len(self.graph), dtype=bool)
        device = self.graph.device
        family = self.a.kernels["family"].gather(pl.Series(self.graph.row[device]))
        result[device] = (
            family.cast(pl.String).is_in(["communication", "optimizer"]).fill_null(False)
        )
        return result

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
            index = place[points] + shift
            other = order[np.clip(index, 0, len(order) - 1)]
            real = (index >= 0) & (index < len(order)) & (graph.lane[other] == graph.lane[points])
            joined = real & chosen[other] & (step[other] == step[points])
            nearest = np.maximum if shift < 0 else np.minimum
            cut = np.where(real, nearest(bound, graph.time[other]), bound)
            bound[:] = np.where(joined, graph.time[other], cut)
        lane = graph.lane[points]
        return {int(t): union(low[lane == t], high[lane == t]) for t in np.unique(lane)}

    def _outermost_ops(self, rows: Array) -> tuple[Array, Array]:
        """Start and end of the outermost operator around each call (else of the call itself), ns
        from the window's start."""
        trace = self.a.trace
        cpu = trace.cpu
        outermost = climb_stack(parents(trace), operators(trace), rows, top=True)
        result = np.where(outermost >= 0, outermost, rows)
        begin = cpu["ts"].to_numpy()[result] - self.graph.origin
        return begin, begin + cpu["dur"].to_numpy()[result]
