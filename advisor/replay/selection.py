"""Selectors applied to the tables and the graph: the rows and nodes that an Edit selects. If it
selects nothing, the most similar names that it could have selected."""

import re
from collections.abc import Callable
from difflib import SequenceMatcher
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from msgspec.structs import replace

from advisor.core.errors import AdvisorError
from advisor.core.finding import Select
from advisor.core.intervals import Array, Bools, Intervals, Ints, covered_length, intersect, union
from advisor.measure import Analysis
from advisor.measure.comm.comms import list_collectives
from advisor.measure.comm.gloo import host_work, list_on_host, time_on_host
from advisor.measure.host.layers import LayerTable, matching_nodes, modules_around, work_nodes
from advisor.measure.host.names import name_matches
from advisor.measure.host.stacks import (
    Rows,
    climb_stack,
    is_operator,
    outermost_ancestor,
    parent_rows,
)
from advisor.measure.steps.named_intervals import select_instants
from advisor.replay.graph import EdgeKind, Graph, NodeKind


def selected_gpu(a: Analysis, select: Select, *, anywhere: bool = False) -> Bools:
    """Return the mask over ``trace.gpu`` of selected rows of the analysed device in the used steps
    or, if ``anywhere``, at any time."""
    gpu = a.trace.gpu
    mask: Bools = a.in_window.copy()
    if anywhere and a.device_id is not None:
        mask = (gpu["device"] == a.device_id).to_numpy().copy()
    if select.kind:
        mask &= gpu["kind"].is_in(list(select.kind)).to_numpy()
    if select.name:
        mask &= name_matches(gpu["name"], _check_pattern(select.name)).to_numpy()
    if select.family:
        mask &= a.kernels["family"].is_in(list(select.family)).fill_null(False).to_numpy()
    if select.copy:
        mask &= gpu["copy"].is_in(list(select.copy)).fill_null(False).to_numpy()
    if select.memory:
        memory_names = [select.memory.capitalize()]
        host_side = gpu["src"].is_in(memory_names) | gpu["dst"].is_in(memory_names)
        mask &= host_side.fill_null(False).to_numpy()
    if select.stream:
        mask &= gpu["stream"].is_in(list(select.stream)).to_numpy()
    if select.max_ns is not None:
        mask &= (gpu["dur"] <= select.max_ns).to_numpy()
    if select.max_bytes is not None:
        table = list_collectives(a)
        rows = table.filter(pl.col("bytes") <= select.max_bytes)["gpu"].to_numpy()
        mask &= np.isin(np.arange(len(mask)), rows)
    if select.correlation:
        mask &= gpu["correlation"].is_in(list(select.correlation)).fill_null(False).to_numpy()
    if select.layer:
        mask &= _in_layer(a, select.layer, work_nodes(a))
    if select.under:
        under = mask_under(a, select.under)
        start = gpu["op"].fill_null(-1).to_numpy()
        launch = gpu["launch"].fill_null(-1).to_numpy()
        mask &= np.where(start >= 0, under[start], False) | np.where(
            launch >= 0, under[launch], False
        )
    if select.at:
        launch = gpu["launch"].fill_null(-1).to_numpy()
        mask &= np.append(_mask_at_instants(a, select), False)[launch]
    return mask


def _mask_at_instants(a: Analysis, select: Select) -> Bools:
    """Return the mask over ``trace.cpu`` of rows that begin in the instants of ``Select.at``."""
    ts = a.trace.cpu["ts"].to_numpy()
    result: Bools = covered_length(ts, ts + 1, select_instants(a, select)) > 0
    return result


def collectives_on_host(a: Analysis, select: Select) -> pl.DataFrame | None:
    """Return the selected rows of ``comm.gloo.list_on_host``, for a selector of communication
    without a device; else ``None``. ``under`` is matched around the operator that started them."""
    if a.device_id is not None or select.on != "gpu" or "communication" not in select.family:
        return None
    table = list_on_host(a)
    mask = np.ones(table.height, dtype=bool)
    if select.name:
        names = a.trace.cpu["name"].gather(table["host"])
        mask &= name_matches(names, _check_pattern(select.name)).to_numpy()
    if select.under:
        mask &= mask_under(a, select.under)[table["op"].fill_null(-1).to_numpy()]
    if select.max_ns is not None:
        mask &= (table["dur"] <= select.max_ns).to_numpy()
    if select.max_bytes is not None:
        mask &= (table["bytes"] <= select.max_bytes).fill_null(False).to_numpy()
    return table.filter(pl.Series(mask))


def is_communication(a: Analysis, select: Select) -> bool:
    """Return whether a selector selects communication and nothing else."""
    if select.on != "gpu":
        return False
    if a.device_id is None:
        return collectives_on_host(a, select) is not None
    chosen = selected_gpu(a, select)
    return bool(chosen.any()) and bool(a.kernels["communication"].to_numpy()[chosen].all())


def waits_on_host(a: Analysis, select: Select) -> Intervals | None:
    """Return when a process waits for selected host collectives and computes nothing, inside the
    used steps, or ``None`` for other selectors."""
    table = collectives_on_host(a, select)
    return None if table is None else time_on_host(a, table)[1]


def selected_host(a: Analysis, select: Select) -> Bools:
    """Return the mask over ``trace.cpu`` of the selected host events."""
    cpu = a.trace.cpu
    mask = np.ones(cpu.height, dtype=bool)
    if select.kind:
        mask &= cpu["kind"].is_in(list(select.kind)).to_numpy()
    if select.name:
        mask &= name_matches(cpu["name"], _check_pattern(select.name)).to_numpy()
    if select.call:
        mask &= cpu["call"].is_in(list(select.call)).fill_null(False).to_numpy()
    if select.copy:
        mask &= _find_copy_calls(a, select.copy)
    if select.under:
        mask &= mask_under(a, select.under)[:-1]
    if select.layer:
        mask &= _in_layer(a, select.layer, modules_around(a, np.arange(cpu.height)).node)
    if select.max_ns is not None:
        mask &= (cpu["dur"] <= select.max_ns).to_numpy()
    if select.correlation:
        mask &= cpu["correlation"].is_in(list(select.correlation)).fill_null(False).to_numpy()
    if select.at and select.at != "loop":
        mask &= _mask_at_instants(a, select)
    return mask


def host_spans(a: Analysis, select: Select) -> tuple[Ints, ...]:
    """Return ``(thread, ts, dur)`` of the selected host events, ns; with ``at="loop"`` also of the
    time between two of them on one thread in one step with no other operator or call in between.
    For repeated work (``EXCLUSIVE_INSTANTS``) it is all time of the thread from begin to end,
    including the Python between its events."""
    cpu, mask = a.trace.cpu, selected_host(a, select)
    if select.at in EXCLUSIVE_INSTANTS and select == Select(on="host", at=select.at):
        return _find_exclusive_spans(a, mask, select_instants(a, select))
    table = cpu.select("thread", "ts", "dur").filter(pl.Series(mask))
    if select.at == "loop":
        table = pl.concat([table, _find_time_between(a, mask).cast(table.schema)])
    return tuple(table[name].to_numpy() for name in ("thread", "ts", "dur"))


EXCLUSIVE_INSTANTS = (
    "recompute", "second_forward", "repeated_backward", "rebuilt_weights", "unused_gradient",
    "without_gradient", "evaluation",
)  # fmt: skip
"""Instants of ``Select.at`` in which a thread does only the named work."""


def _find_exclusive_spans(a: Analysis, mask: Bools, stretches: Intervals) -> tuple[Ints, ...]:
    """Return ``(thread, ts, dur)`` of intervals, each on the thread with most of its events."""
    rows = a.trace.cpu.select("thread", "ts").filter(pl.Series(mask))
    index = np.searchsorted(stretches.start, rows["ts"].to_numpy(), side="right") - 1
    counts = rows.select("thread", place=pl.Series(index)).group_by("place", "thread").len()
    owner = counts.sort("len", "thread").unique("place", keep="last").sort("place")
    position = owner["place"].to_numpy()
    start = stretches.start[position]
    return owner["thread"].to_numpy(), start, stretches.end[position] - start


def _find_time_between(a: Analysis, mask: Bools) -> pl.DataFrame:
    cpu = a.trace.cpu
    called = cpu["kind"].is_in(["op", "runtime"]).to_numpy()
    outer = outermost_ancestor(parent_rows(a.trace), called) == np.arange(cpu.height)
    outer = (
        cpu.select("thread", "ts", end=pl.col("ts") + pl.col("dur"), chosen=pl.Series(mask))
        .filter(pl.Series(outer))
        .sort("thread", "ts")
    )
    step = np.searchsorted(a.steps.used["ts"].to_numpy(), outer["ts"].to_numpy(), side="right")
    following = pl.col("ts", "chosen", "step").shift(-1).over("thread").name.prefix("next_")
    return (
        outer.with_columns(step=pl.Series(step))
        .with_columns(following)
        .filter(
            pl.col("chosen")
            & pl.col("next_chosen")
            & (pl.col("next_step") == pl.col("step"))
            & (pl.col("next_ts") > pl.col("end"))
        )
        .select("thread", ts="end", dur=pl.col("next_ts") - pl.col("end"))
    )


def _in_layer(a: Analysis, pattern: str, nodes: Rows) -> Bools:
    """Return whether rows are of the modules that a pattern names."""
    if a.layers is None:
        return np.zeros(len(nodes), dtype=bool)
    return np.append(matching_nodes(a.layers, pattern), False)[nodes]


def host_of_layer(select: Select) -> Select | None:
    """Return the selector of a layer's host events if its device work is selected without further
    conditions, else ``None``."""
    host_select = Select(on="host", layer=select.layer)
    return host_select if select.layer and select == replace(host_select, on="gpu") else None


def _find_copy_calls(a: Analysis, directions: tuple[str, ...]) -> Bools:
    """Return the mask over ``trace.cpu`` of calls that copy in these directions or wait for
    copies."""
    copies = a.trace.gpu["copy"].is_in(list(directions)).fill_null(False).to_numpy()
    rows = a.trace.gpu["launch"].filter(pl.Series(copies)).drop_nulls().to_numpy()
    awaited = a.syncs.filter(pl.col("copy").is_not_null()).select("host", "copy")
    result = np.zeros(a.trace.cpu.height, dtype=bool)
    result[rows] = True
    result[awaited["host"].filter(pl.Series(copies[awaited["copy"].to_numpy()])).to_numpy()] = True
    return result


def selected_gaps(a: Analysis, select: Select) -> Bools:
    """Return the mask over ``Analysis.gaps`` of the selected gaps."""
    gaps = a.gaps
    mask = np.ones(gaps.height, dtype=bool)
    if select.cause:
        mask &= gaps["cause"].is_in(list(select.cause)).to_numpy()
    if select.under:
        host = gaps["host"].fill_null(-1).to_numpy()
        mask &= mask_under(a, select.under)[host]
    if select.name:
        named = name_matches(a.trace.cpu["name"], _check_pattern(select.name)).to_numpy()
        host = gaps["host"].fill_null(-1).to_numpy()
        mask &= np.append(named, False)[host]
    if select.max_ns is not None:
        mask &= (gaps["dur"] <= select.max_ns).to_numpy()
    if select.at:
        ts = gaps["ts"].to_numpy()
        mask &= covered_length(ts, ts + gaps["dur"].to_numpy(), select_instants(a, select)) > 0
    return mask


def mask_under(a: Analysis, pattern: str) -> Bools:
    """Return which rows of ``trace.cpu`` match the name or are inside such a row, and a last
    False."""
    cpu = a.trace.cpu
    named = name_matches(cpu["name"], _check_pattern(pattern)).to_numpy()
    result = np.append(named, False)
    if named.any():
        # a named row covers all rows of its thread that start inside it
        rows = np.flatnonzero(named)
        thread = cpu["thread"].to_numpy()
        ts = cpu["ts"].to_numpy()
        end = ts + cpu["dur"].to_numpy()
        span = int(end.max()) + 1
        key = thread.astype(np.int64) * span + ts
        last_end = np.maximum.accumulate(thread[rows].astype(np.int64) * span + end[rows])
        last = np.searchsorted(rows, np.arange(len(key)), side="right") - 1
        result[:-1] = (last >= 0) & (key < last_end[np.maximum(last, 0)])
    return result


def mask_launched_under(a: Analysis, pattern: str) -> Bools:
    """Return which rows of ``trace.gpu`` were launched inside a host event with a matching name."""
    under: Bools = mask_under(a, pattern)  # its last entry means "no launch in the window"
    rows: Bools = under[a.trace.gpu["launch"].fill_null(-1).to_numpy()]
    return rows


@lru_cache(maxsize=512)
def _check_pattern(pattern: str) -> str:
    """Return the pattern. Raises AdvisorError if it is not a regular expression."""
    try:
        re.compile(pattern)
        pl.Series(["x"]).str.contains(pattern)
    except (re.error, pl.exceptions.ComputeError) as error:
        raise AdvisorError(f"{pattern!r} is not a regular expression: {error}") from None
    return pattern


# -- what selectors select in a graph ------------------------------------------------------------


class Selection:
    """Nodes, rows and times that selectors select in a graph, each looked up once."""

    def __init__(self, a: Analysis, graph: Graph) -> None:
        self.a = a
        self.graph = graph
        self._cache: dict[tuple[str, Select], Any] = {}

    def _look_up(self, kind: str, select: Select, find: Callable[[Select], Any]) -> Any:
        key = (kind, select)
        if key not in self._cache:
            self._cache[key] = find(select)
        return self._cache[key]

    def device_work(self, select: Select) -> Array:
        result: Array = self._look_up("work", select, self._find_work)
        return result

    def _find_work(self, select: Select) -> Array:
        # work launched in the last steps runs after them when the host is ahead
        device = self.graph.device
        return device[selected_gpu(self.a, select, anywhere=True)[self.graph.row[device]]]

    def host_mask(self, select: Select) -> Array:
        """Return the mask over ``trace.cpu`` of selected host events, with a last False."""
        result: Array = self._look_up(
            "rows", select, lambda s: np.append(selected_host(self.a, s), False)
        )
        return result

    def wait_ends(self, select: Select) -> Array:
        """Return the nodes at which selected blocking calls and waits for the loader end."""
        done = np.flatnonzero(np.isin(self.graph.kind, [NodeKind.SYNC_END, NodeKind.LOADER_END]))
        return done[self.host_mask(select)[self.graph.row[done]]]

    def host_time(self, select: Select) -> dict[int, Intervals]:
        """Return selected host time by thread, ns from the window's start: of host events, of idle
        gaps (the launching thread's time) or, without a device, of the main thread's waits for
        collectives."""
        result: dict[int, Intervals] = self._look_up("host", select, self._find_host_time)
        return result

    def _find_host_time(self, select: Select) -> dict[int, Intervals]:
        if (waits := waits_on_host(self.a, select)) is not None:
            main = np.full(len(waits), self.a.trace.main_thread or 0)
            return self.thread_intervals(main, waits.start, waits.end - waits.start)
        if select.on == "gap" and select.at == "round_trip":
            # launching threads wait for the thread that works on the data, which no event shows
            away = select_instants(self.a, select)
            launch = self.a.trace.gpu["launch"].drop_nulls().unique()
            thread = self.a.trace.cpu["thread"].gather(launch).unique().to_numpy()
            count = len(thread)
            return self.thread_intervals(
                np.repeat(thread, len(away)),
                np.tile(away.start, count),
                np.tile(away.end - away.start, count),
            )
        if select.on == "gap":
            rows = np.flatnonzero(selected_gaps(self.a, select))
            gaps = self.a.gaps[rows]
            return self.thread_intervals(
                gaps["thread"].fill_null(-1).to_numpy(),
                gaps["ts"].to_numpy(),
                gaps["dur"].to_numpy(),
            )
        return self.thread_intervals(*host_spans(self.a, select))

    def thread_intervals(self, thread: Array, ts: Array, dur: Array) -> dict[int, Intervals]:
        """Return the intervals of each thread inside the window, ns from its start."""
        start = ts - self.graph.origin
        inside = (start + dur > 0) & (start < float(self.graph.time.max()))
        thread, start, dur = thread[inside], start[inside], dur[inside]
        return {
            int(t): union(start[thread == t], (start + dur)[thread == t]) for t in np.unique(thread)
        }

    @cached_property
    def roofline_ns(self) -> Array:
        """Shortest time of each node's kernel on this device by FLOPs and bytes, ns, or NaN if
        shapes, dtype or device are unknown."""
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
    def waves(self) -> Array:
        """Number of times that each node's kernel fills the device (waves, else blocks per SM)."""
        result = np.full(len(self.graph), np.nan)
        device = self.graph.device
        rows = pl.Series(self.graph.row[device])
        waves = self.a.kernels["waves"].gather(rows).cast(pl.Float64).fill_null(np.nan).to_numpy()
        blocks = self.a.trace.gpu["blocks_per_sm"].gather(rows).fill_null(np.nan).to_numpy()
        result[device] = np.where(np.isfinite(waves), waves, blocks)
        return result

    @cached_property
    def batch_independent(self) -> Array:
        """Whether each node's time is independent of the batch (collectives, optimizer)."""
        result = np.zeros(len(self.graph), dtype=bool)
        device = self.graph.device
        family = self.a.kernels["family"].gather(pl.Series(self.graph.row[device]))
        result[device] = (
            family.cast(pl.String).is_in(["communication", "optimizer"]).fill_null(False)
        )
        return result

    def hidden_on_host(self, select: Select) -> float:
        """Return the share of the waits for host collectives that the rest of the steps' work could
        hide; 0 if there are none."""
        waits = waits_on_host(self.a, select)
        if waits is None or not waits.total:
            return 0.0
        overlap = intersect(host_work(self.a), self.a.breakdown.all_communication).total
        return min(1.0, (host_work(self.a).total - overlap) / waits.total)

    def launch_time(self, nodes: Array) -> dict[int, Intervals]:
        """Return host time saved when the launches of this work become part of a CUDA graph, by
        thread. It lasts from each launch to the next in its step if nothing is between them. Before
        the first and after the last launch, it is only their outermost operator."""
        graph = self.graph
        launch = np.flatnonzero((graph.edge == EdgeKind.LAUNCH) & np.isin(graph.dst, nodes))
        chosen = np.zeros(len(graph), dtype=bool)
        chosen[graph.src[launch]] = True
        chosen[0] = False
        points = np.flatnonzero(chosen)
        if not len(points):
            return {}
        start, end = self._outermost_ops(graph.row[points])
        host = np.flatnonzero((graph.kind != NodeKind.DEVICE) & (graph.kind != NodeKind.SOURCE))
        order = host[np.argsort(graph.lane[host], kind="stable")]
        position = np.empty(len(graph), dtype=np.int64)
        position[order] = np.arange(len(order))
        step = np.searchsorted(graph.time[graph.step_boundaries], graph.time, side="right")
        low, high = start.astype(float), end.astype(float)
        for bound, shift in ((low, -1), (high, 1)):
            index = position[points] + shift
            other = order[np.clip(index, 0, len(order) - 1)]
            valid = (index >= 0) & (index < len(order)) & (graph.lane[other] == graph.lane[points])
            is_joined = valid & chosen[other] & (step[other] == step[points])
            nearest = np.maximum if shift < 0 else np.minimum
            limit = np.where(valid, nearest(bound, graph.time[other]), bound)
            bound[:] = np.where(is_joined, graph.time[other], limit)
        lane = graph.lane[points]
        return {int(t): union(low[lane == t], high[lane == t]) for t in np.unique(lane)}

    def _outermost_ops(self, rows: Array) -> tuple[Array, Array]:
        """Return start and end of the outermost operator around each call (else of the call
        itself), ns from the window's start."""
        trace = self.a.trace
        cpu = trace.cpu
        outermost = climb_stack(parent_rows(trace), is_operator(trace), rows, top=True)
        result = np.where(outermost >= 0, outermost, rows)
        start = cpu["ts"].to_numpy()[result] - self.graph.origin
        return start, start + cpu["dur"].to_numpy()[result]


_MAX_COMPARED = 3_000
"""Maximum number of names compared with the pattern, most time first."""
_MAX_WORDS = 8
MAX_WORD = 60
"""Maximum number of compared characters of a word."""

_KIND_NAMES = {
    "kernel": "kernels", "memcpy": "copies", "memset": "memsets", "op": "operators",
    "python": "Python frames", "annotation": "ranges", "runtime": "runtime calls",
}  # fmt: skip


class NearMatches(NamedTuple):
    """Names of one kind that a selector could have selected."""

    kind: str
    """Kind of the names: ``kernels``, ``operators``, ``idle causes`` …"""
    names: tuple[str, ...]
    """Distinct names, the most similar to the pattern first, then by time."""
    unmatched: str
    """Part of the selector that nothing matches. Empty if there is nothing of the kind."""


def find_near_matches(a: Analysis, select: Select) -> NearMatches:
    """Find names in the steps, of the kind that a selector selects.

    One part of the selector at a time is omitted, beginning with ``under``. If the others select
    something, nothing matches the part, and the names are possible replacements."""
    if select.under and _time_by_name(a, wide := replace(select, under="")):
        surrounding = _sum_surrounding_names(a, wide)
        kind = "operators, ranges and Python frames around it"
        return NearMatches(kind, _sort_names(surrounding, select.under), f"under:{select.under}")
    select = replace(select, under="")
    if select.layer:
        layers = a.layers
        times = (
            {}
            if layers is None
            else {**dict(layers.nodes.select("name", "ns").iter_rows()), **_module_times(layers)}
        )
        return NearMatches("modules", _sort_names(times, select.layer), f"layer:{select.layer}")
    kind = _kind_of_events(select)
    if select.on == "gap":
        return NearMatches(
            kind, _sort_names(_sum_causes(a), " ".join(select.cause)), " ".join(select.cause)
        )
    if select.copy:
        return NearMatches(
            "copy directions", _sort_names(_sum_copies(a), select.copy[0]), select.copy[0]
        )
    if select.family and not select.name:
        name = " ".join(select.family)
        return NearMatches("kernel families", _sort_names(_sum_families(a), name), name)
    return NearMatches(
        kind, _sort_names(_time_by_name(a, replace(select, name="")), select.name), select.name
    )


def selects_anything(a: Analysis, select: Select) -> bool:
    """Return whether the steps contain anything that a selector selects."""
    if select.on == "gap":
        return bool(selected_gaps(a, select).any())
    if select.on == "host":
        return bool(selected_host(a, select).any())
    collectives = collectives_on_host(a, select)
    return bool(selected_gpu(a, select).any()) or (
        collectives is not None and not collectives.is_empty()
    )


def largest_targets(a: Analysis, most: int) -> list[tuple[str, float]]:
    """Return targets of edits with their time in all steps, ns, longest first: families of kernels,
    copies, and causes of idle time."""
    groups = {"family": _sum_families(a), "copy": _sum_copies(a), "gap": _sum_causes(a)}
    targets = [
        (f"{kind}:{name}", float(ns))
        for kind, times in groups.items()
        for name, ns in times.items()
    ]
    return sorted(targets, key=lambda pair: -pair[1])[:most]


def _module_times(layers: LayerTable) -> dict[str, float]:
    return dict(layers.nodes.group_by("kind").agg(pl.col("ns").sum().cast(pl.Float64)).iter_rows())


def _kind_of_events(select: Select) -> str:
    if select.on == "gap":
        return "idle causes"
    if select.call:
        return "blocking calls"
    if select.family:
        return "collectives" if select.family == ("communication",) else "kernels"
    kinds = [_KIND_NAMES.get(kind, kind) for kind in select.kind]
    return " and ".join(kinds) or ("device work" if select.on == "gpu" else "host events")


def _time_by_name(a: Analysis, select: Select) -> dict[str, float]:
    """Return the total time of selected events by name, ns."""
    if select.on == "gap":
        return _sum_causes(a) if selected_gaps(a, select).any() else {}
    if select.on == "gpu":
        rows, table = selected_gpu(a, select, anywhere=True), a.trace.gpu
    else:
        rows, table = selected_host(a, select), a.trace.cpu
    return _sum_by_name(table["name"], table["dur"], rows)


def _sum_by_name(names: pl.Series, dur: pl.Series, rows: np.ndarray) -> dict[str, float]:
    table = pl.DataFrame({"name": names, "dur": dur}).filter(pl.Series(rows))
    table = table.group_by("name").agg(pl.col("dur").sum()).drop_nulls()
    result = table.with_columns(pl.col("name").cast(pl.String)).sort(
        ["dur", "name"], descending=[True, False]
    )
    return dict(zip(result["name"], result["dur"], strict=True))


def _sum_surrounding_names(a: Analysis, select: Select) -> dict[str, float]:
    """Return names and times of the host events on the threads of the selected events."""
    kinds = pl.Series(["op", "annotation", "python"])
    cpu = a.trace.cpu
    rows = cpu["kind"].cast(pl.String).is_in(kinds.implode()).to_numpy()
    if select.on == "host":
        threads = cpu["thread"].filter(pl.Series(selected_host(a, select))).unique()
        rows = rows & cpu["thread"].is_in(threads.implode()).to_numpy()
    return _sum_by_name(cpu["name"], cpu["dur"], rows)


def _sum_causes(a: Analysis) -> dict[str, float]:
    gaps = a.gaps
    return _sum_by_name(
        gaps["cause"].cast(pl.String), gaps["dur"], np.ones(gaps.height, dtype=bool)
    )


def _sum_copies(a: Analysis) -> dict[str, float]:
    gpu = a.trace.gpu
    return _sum_by_name(gpu["copy"].cast(pl.String), gpu["dur"], a.in_window)


def _sum_families(a: Analysis) -> dict[str, float]:
    if a.device_id is None:
        return {}
    return dict(zip(a.families["family"].cast(pl.String), a.families["dur"], strict=True))


def _sort_names(weights: dict[str, float], pattern: str) -> tuple[str, ...]:
    """Return the names sorted by their mean similarity to the pattern's words."""
    wanted = [word.lower()[:MAX_WORD] for word in re.findall(r"\w+", pattern)][:_MAX_WORDS]
    names = sorted(weights, key=lambda name: (-weights[name], name))

    @cache
    def ratio(candidate: str, word: str) -> float:
        return SequenceMatcher(None, candidate, word).ratio()

    def score(name: str) -> float:
        words = re.findall(r"[A-Za-z]+\d*|\w+", name[: 10 * MAX_WORD].lower())
        scores = [
            max((ratio(item, word[:MAX_WORD]) for word in words), default=0.0) for item in wanted
        ]
        return sum(scores) / len(scores)

    if not wanted:
        return tuple(names)
    compared = sorted(names[:_MAX_COMPARED], key=lambda name: -round(score(name), 2))
    return (*compared, *names[_MAX_COMPARED:])
