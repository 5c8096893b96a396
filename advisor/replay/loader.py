"""Loader work that moves to worker processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from advisor.core.intervals import covered_length, union
from advisor.replay.graph import NEVER, Array, Edge
from advisor.replay.points import hand_over_ns

if TYPE_CHECKING:
    from advisor.replay.patch import Patch

SLOWED_SHARE = {"high": 0.0, "": 0.1, "low": 0.2}
"""Of the loading that is computed: what the rest of the step loses to workers that compute beside
it, with the same memory and caches. Past gains of workers were 80 to 100 % of a replay without it
(``predictions.jsonl``)."""


def more_workers(patch: Patch, weight: Array) -> None:
    """Changes the weights. Of edits about the same batches the one with most workers counts."""
    left = np.ones(len(patch.graph), dtype=bool)
    for workers, loaded in sorted(patch.workers, key=lambda edit: -edit[0]):
        _parallelize(patch, weight, workers, loaded[left[loaded]])
        left[loaded] = False


def _parallelize(patch: Patch, weight: Array, workers: int, loaded: Array) -> None:
    """``workers`` processes load (where there are some: that many times as many): batches come at
    their rate instead, uneven ones evened out by the queue. Their mean is known from those of the
    window, to twice its standard error."""
    graph = patch.graph
    into = np.isin(graph.dst, loaded)
    program = np.flatnonzero(into & (graph.edge == Edge.PROGRAM))
    cost = np.zeros(len(graph))
    cost[graph.dst[program]] = weight[program]
    hand = hand_over_ns(patch.a.trace, patch.a.step_ns, patch.assumption)
    weight[program] = np.minimum(weight[program], hand)
    rate = np.flatnonzero(into & (graph.edge == Edge.LOADER))
    multi = rate[weight[rate] > NEVER]
    if len(multi):
        steps = np.diff(np.searchsorted(graph.starts, graph.dst[multi], side="right"))
        later = weight[multi[1:]].sum() * steps / max(1, steps.sum())
        weight[multi] = np.append(weight[multi[:1]], later) * _more(patch, workers)
    single = rate[weight[rate] <= NEVER]
    if len(single):
        own = program[np.isin(graph.dst[program], graph.dst[single])]
        batches = cost[graph.dst[single]]
        off = 2 * float(batches.std()) / max(1, len(batches)) ** 0.5
        mean = float(batches.mean()) + off * {"low": 1, "high": -1}.get(patch.assumption, 0)
        length = max(float(graph.time[graph.starts[-1]]), 1.0)
        share = min(batches.sum() / length, 1.0)
        computed = _computed(patch, loaded, share)
        weight[single] = (max(mean, 0.0) + hand) * _slower(patch, computed, share, workers)
        slowed = SLOWED_SHARE[patch.assumption] * _computed_at_most(patch, share)
        left = max(slowed, _taken(patch, computed, share))
        batch = cost[graph.dst[own]]
        weight[own] = np.minimum(batch, hand) + left * batch


def _computed(patch: Patch, loaded: Array, share: float) -> float:
    """Share of the loading that is computed, and needs a core wherever it is done. What was waited
    for (storage, a sleep) needs none. Which is which follows from the operators recorded in there;
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
