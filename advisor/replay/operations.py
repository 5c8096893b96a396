"""The operations of edits: each changes a patch in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from advisor.core.intervals import covered_length, union
from advisor.replay.graph import NEVER, Array, Edge, Node
from advisor.replay.overlap import give_streams, overlap
from advisor.replay.patch import Patch
from advisor.replay.points import hand_over_ns

if TYPE_CHECKING:
    from advisor.core.finding import Edit, Operation

GRAPH_LAUNCH_NS = 1_000.0
"""Host time a kernel costs inside a CUDA graph, about (NVIDIA, "Constant time launch", 2024:
a graph's launch costs a few µs plus well under 1 µs a node)."""
SLOWED_SHARE = {"high": 0.0, "": 0.1, "low": 0.2}
"""Of the loading that is computed: what the rest of the step loses to workers that compute beside
it, with the same memory and caches. Past gains of workers were 80 to 100 % of a replay without it
(``predictions.jsonl``)."""
ROOFLINE_SHARE = 0.75
"""Share of the attainable rate that good kernels reach (TraceLens: 75 % is the low target)."""


def apply(patch: Patch, edits: Sequence[Edit], assumption: str = "") -> Patch:
    """Apply edits one after the other; returns the patch. ``assumption``: ``low`` or ``high`` takes
    the factors that make the gain small or large."""
    patch.assumption = assumption
    for edit in edits:
        factor = edit.factor
        if assumption == "low" and edit.factor_high is not None:
            factor = edit.factor_high
        if assumption == "high" and edit.factor_low is not None:
            factor = edit.factor_low
        OPERATIONS[edit.op](patch, edit, factor)
    give_streams(patch)
    return patch


def remove(patch: Patch, edit: Edit, factor: float | None) -> None:
    if edit.select.on == "gpu":
        patch.drop_work(patch.selected.work(edit.select))
    else:
        patch.shrink_host(patch.selected.held(edit.select), 0.0)
        if edit.select.on == "host":
            patch.let_go(patch.selected.waits(edit.select))


def scale(patch: Patch, edit: Edit, factor: float | None) -> None:
    factor = 1.0 if factor is None else factor
    if edit.select.on == "gpu":
        patch.dur[patch.selected.work(edit.select)] *= factor
    else:
        patch.shrink_host(patch.selected.held(edit.select), factor)


def roofline(patch: Patch, edit: Edit, factor: float | None) -> None:
    """Kernels that reach less than ``factor`` of their attainable rate come to reach it."""
    nodes = patch.selected.work(edit.select)
    bound = patch.selected.bound[nodes]
    target = bound / (ROOFLINE_SHARE if factor is None else max(factor, 1e-3))
    known = np.isfinite(target)
    patch.dur[nodes[known]] = np.minimum(patch.dur[nodes[known]], target[known])


def resize(patch: Patch, edit: Edit, factor: float | None) -> None:
    """Another batch size. Work that fills the device grows with it; work that leaves part of
    it empty grows once it is full, copies grow with it; collectives of gradients and the
    optimizer stay. Host time stays, but for the loader's. Steps are then to be judged by time
    a sample."""
    factor = 1.0 if factor is None else max(factor, 1e-3)
    nodes = patch.selected.work(edit.select)
    fill = np.nan_to_num(patch.selected.fill[nodes], nan=1.0)
    grown = np.maximum(1.0, fill * factor) / np.maximum(1.0, fill)
    kinds = patch.a.trace.gpu["kind"].gather(pl.Series(patch.graph.row[nodes]))
    grown = np.where((kinds == "kernel").to_numpy(), grown, factor)
    fixed = patch.selected.fixed[nodes]
    patch.dur[nodes] *= np.where(fixed, 1.0, grown)
    loaded = np.flatnonzero(patch.graph.kind == Node.LOADED)
    into = np.isin(patch.graph.dst, loaded) & np.isin(patch.graph.edge, [Edge.PROGRAM, Edge.LOADER])
    patch.weight[into & (patch.weight > 0)] *= factor


def punctual(patch: Patch, edit: Edit, factor: float | None) -> None:
    """A rank that keeps nobody waiting. Without the other ranks' replay: ``factor`` of the
    collectives' time remains, if that is told."""
    nodes = patch.selected.work(edit.select)
    if patch.joint:
        patch.punctual[nodes] = True
    elif factor is not None:
        patch.dur[nodes] *= factor


def asynchronous(patch: Patch, edit: Edit, factor: float | None) -> None:
    patch.let_go(patch.selected.waits(edit.select))


def merge(patch: Patch, edit: Edit, factor: float | None) -> None:
    """Neighbours on a stream become one kernel that takes ``factor`` of their time; the
    launches and operators of all but the first go. Not across a step's end, nor across a
    moment that the host or another stream waits for: what comes after it may depend on that."""
    graph = patch.graph
    chosen = np.zeros(len(graph), dtype=bool)
    chosen[patch.selected.work(edit.select)] = True
    device = graph.device
    order = device[np.argsort(graph.lane[device], kind="stable")]
    own = chosen[order]
    first = own.copy()
    awaited = np.zeros(len(graph), dtype=bool)
    outward = np.isin(graph.edge, [Edge.RELEASE, Edge.CROSS]) & (patch.weight > NEVER)
    awaited[patch.src[outward]] = True
    step = graph.steps_of_launch()[order]
    apart = awaited[order][:-1] | (step[1:] != step[:-1])
    apart |= graph.lane[order][1:] != graph.lane[order][:-1]
    first[1:] &= apart | ~own[:-1]
    run = np.cumsum(first)[own] - 1
    nodes = order[own]
    if not len(nodes):
        return
    total = np.bincount(run, weights=patch.dur[nodes])
    heads = order[first]
    rest = nodes[~first[own]]
    patch.drop_work(rest, operators=True)
    patch.dur[heads] = total * (1.0 if factor is None else factor)


def drop_launch(patch: Patch, edit: Edit, factor: float | None) -> None:
    """Host time around launches goes, but for what a graph's node costs."""
    cost = GRAPH_LAUNCH_NS if edit.host_ns is None else float(edit.host_ns)
    if edit.select.on != "gpu":
        held = patch.selected.held(edit.select)
    else:
        held = patch.selected.around_launches(patch.selected.work(edit.select))
    patch.shrink_host(held, 0.0, floor=cost)
    for thread, time in held.items():
        patch.shorten_launches(thread, time)


def spread(patch: Patch, edit: Edit, factor: float | None) -> None:
    """Loader work moves to ``workers`` processes (where there are some: to that many times as
    many): batches come at their rate instead, uneven ones evened out by the queue. Their mean
    is known from those of the window, to twice its standard error."""
    workers = max(1, edit.workers or 1)
    graph = patch.graph
    chosen = patch.selected.rows(edit.select)
    loaded = np.flatnonzero(graph.kind == Node.LOADED)
    loaded = loaded[chosen[graph.row[loaded]]]
    into = np.isin(graph.dst, loaded)
    program = np.flatnonzero(into & (graph.edge == Edge.PROGRAM))
    cost = np.zeros(len(graph))
    cost[graph.dst[program]] = patch.weight[program]
    hand = hand_over_ns(patch.a.trace, patch.a.step_ns, patch.assumption)
    patch.weight[program] = np.minimum(patch.weight[program], hand)
    rate = np.flatnonzero(into & (graph.edge == Edge.LOADER))
    multi = rate[patch.weight[rate] > NEVER]
    if len(multi):
        steps = np.diff(np.searchsorted(graph.starts, graph.dst[multi], side="right"))
        later = patch.weight[multi[1:]].sum() * steps / max(1, steps.sum())
        patch.weight[multi] = np.append(patch.weight[multi[:1]], later) * _more(patch, workers)
    single = rate[patch.weight[rate] <= NEVER]
    if len(single):
        own = program[np.isin(graph.dst[program], graph.dst[single])]
        batches = cost[graph.dst[single]]
        off = 2 * float(batches.std()) / max(1, len(batches)) ** 0.5
        mean = float(batches.mean()) + off * {"low": 1, "high": -1}.get(patch.assumption, 0)
        length = max(float(graph.time[graph.starts[-1]]), 1.0)
        share = min(batches.sum() / length, 1.0)
        computed = _computed(patch, loaded, share)
        patch.weight[single] = (max(mean, 0.0) + hand) * _slower(patch, computed, share, workers)
        slowed = SLOWED_SHARE[patch.assumption] * _computed_at_most(patch, share)
        left = max(slowed, _taken(patch, computed, share))
        batch = cost[graph.dst[own]]
        patch.weight[own] = np.minimum(batch, hand) + left * batch


def _computed(patch: Patch, loaded: Array, share: float) -> float:
    """Share of the loading that is computed, and needs a core wherever it is done. What was waited
    for (storage, a sleep) needs none. Which is which is told by the operators recorded in there;
    under the pessimistic assumption all of it is, as far as the CPU time of the process allows.
    ``share``: the loading's own, of the step."""
    if patch.assumption == "low":
        return _computed_at_most(patch, share)
    graph, cpu = patch.graph, patch.a.trace.cpu
    rows = graph.row[loaded]
    begin, thread = cpu["ts"].to_numpy()[rows], cpu["thread"].to_numpy()[rows]
    end = begin + cpu["dur"].to_numpy()[rows]
    at_work = 0
    for owner in np.unique(thread):
        own = cpu.filter((pl.col("thread") == int(owner)) & (pl.col("kind") == "op"))
        busy = union(own["ts"].to_numpy(), (own["ts"] + own["dur"]).to_numpy())
        at_work += int(covered_length(begin, end, busy)[thread == owner].sum())
    return at_work / max(1, int((end - begin).sum()))


def _computed_at_most(patch: Patch, share: float) -> float:
    """The same as far as the CPU time of the process allows; not recorded: all of it."""
    recorded = patch.a.recorded
    known = None if recorded is None else recorded.computed(share, on_host=patch.a.trains_on_host)
    return 1.0 if known is None else known


def _slower(patch: Patch, computed: float, share: float, workers: int) -> float:
    """What a batch takes with so many workers, as a share of what it took before: what is computed
    has the cores that are free, and the main thread's while that loads no longer."""
    recorded = patch.a.recorded
    free = None if recorded is None else recorded.free_cores
    if free is None:
        return 1 / workers
    cores = max(min(workers, free + share), 1e-3)
    return computed / cores + (1 - computed) / workers


def _more(patch: Patch, times: int) -> float:
    """What a batch takes with so many times the workers, as a share of what it took before. What
    the workers compute gets the cores that they have and those that are free; the main thread has
    one (or PyTorch's threads, where the step computes on the host), under the pessimistic
    assumption none. Workers that wait for storage need none."""
    recorded = patch.a.recorded
    if recorded is None or recorded.free_cores is None or recorded.used_cores is None:
        return 1 / times
    threads = recorded.flag("num_threads") if patch.a.trains_on_host else None
    main = float(threads) if isinstance(threads, int) else 1.0
    own = max(0.0, recorded.used_cores - (0.0 if patch.assumption == "low" else main))
    return max(1 / times, own / max(own + recorded.free_cores, 1e-9))


def _taken(patch: Patch, computed: float, share: float) -> float:
    """Share of the loading that the step goes on to take where it is computed on the host, on the
    cores that workers would need. Under the optimistic assumption all cores share the loss. Without
    a recording nobody knows the cores: all or none."""
    if not patch.a.trains_on_host:
        return 0.0
    recorded = patch.a.recorded
    taken = None if recorded is None else recorded.taken(share, computed)
    if recorded is None or taken is None:
        return computed if patch.assumption == "low" else 0.0
    return taken / (recorded.record.rank.cpus or 1) if patch.assumption == "high" else taken


OPERATIONS: dict[Operation, Callable[[Patch, Edit, float | None], None]] = {
    "remove": remove,
    "scale": scale,
    "roofline": roofline,
    "resize": resize,
    "overlap": overlap,
    "asynchronous": asynchronous,
    "merge": merge,
    "drop_launch": drop_launch,
    "spread": spread,
    "punctual": punctual,
}
