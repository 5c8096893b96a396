"""Measure by brute force how much of the host's waiting and of the device's idle time a replay
explains.

Counted in time, from the tables of the trace. Of the replay only its edges are used, and each end
is computed from them as if all else happened as measured.

- The host **waited** in a call of the runtime, whatever its name, if the call returned within
  100 µs of the end of the last device work that some stream had been given by then (for an event:
  of any work): from the call's start to that end. A copy that the call makes itself, and whose end
  it does not see, held it until the copy began, if the device had just come free then.
- The device was **idle** between two pieces of its work when nothing ran on any stream.
- **Explained** is what passes two tests. The end computed from the edges, all else as measured:
  what it is off by is not explained. And taking the cause away: a wait that is still there when
  device work takes no time, or idle time that is still there when the host takes none, was copied
  from the trace and not explained, however right its end.

Not among the waits: calls that launch a kernel (these wait where the queue is full), loaders, other
threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import polars as pl

from advisor.replay.graph import NEVER, EdgeKind, Graph, NodeKind

if TYPE_CHECKING:
    from advisor.measure import Analysis
    from advisor.replay.replay import ReplayPlan

SHORT_NS = 20_000
"""Calls up to this long are not looked at: that is what a call costs."""
AFTER_NS = 100_000
"""A call that returns later than this after the work ended did not wait for it alone."""
CLOCK_NS = 5_000
"""Tolerance for a call that returns before the work's recorded end: there are two clocks."""


class ExplainedTime(NamedTuple):
    """Times in ns over the replayed window, shares from 0 to 1; ``None``: there was none."""

    waited: float
    waits: int
    waits_explained: float | None
    idle: float
    idle_explained: float | None
    idle_twin: float | None
    """The same with launches and the order of streams alone, which is what a twin has that
    copies all host times. Of the waits it explains none."""


def explained_time(a: Analysis, plan: ReplayPlan) -> ExplainedTime:
    """Measure the steps that a plan replays."""
    graph = plan.graph
    row, waited = waits(a, graph)
    sync_ready_ns = _ready_times(graph, [EdgeKind.SYNC])
    sync_ends = np.flatnonzero(graph.kind == NodeKind.SYNC_END)
    node = dict(zip(graph.row[sync_ends].tolist(), sync_ends.tolist(), strict=True))
    sync_starts = np.flatnonzero(graph.kind == NodeKind.SYNC)
    start = dict(zip(graph.row[sync_starts].tolist(), sync_starts.tolist(), strict=True))
    free = plan.run(dur=np.zeros(len(graph)))
    lasted = a.trace.cpu["dur"].to_numpy()
    explained = 0.0
    for which, length in zip(row.tolist(), waited.tolist(), strict=True):
        at, since = node.get(which), start.get(which)
        if at is not None and since is not None and np.isfinite(sync_ready_ns[at]):
            off = abs(float(sync_ready_ns[at] - graph.time[at]))
            vanished_ns = float(lasted[which]) - float(free[at] - free[since])
            explained += max(0.0, min(length - off, vanished_ns))
    after, gap = idle(graph, graph.time)
    every = [e for e in EdgeKind if e != EdgeKind.PROGRAM]
    explained_ns, twin = (
        float(
            np.maximum(
                gap - np.abs(_ready_times(graph, kinds)[after] - _start(graph)[after]), 0
            ).sum()
        )
        for kinds in (every, [EdgeKind.LAUNCH, EdgeKind.STREAM])
    )
    host = (graph.edge == EdgeKind.PROGRAM) & (graph.weight > NEVER)
    instant = plan.run(weight=np.where(host, 0.0, graph.weight))
    unexplained = idle(graph, instant)[1]
    unexplained = float(
        unexplained[unexplained > SHORT_NS].sum()
    )  # not what lies between any two kernels
    explained_ns = max(0.0, min(explained_ns, float(gap.sum()) - unexplained))
    return ExplainedTime(
        float(waited.sum()),
        len(row),
        explained / float(waited.sum()) if waited.sum() else None,
        float(gap.sum()),
        explained_ns / float(gap.sum()) if gap.sum() else None,
        twin / float(gap.sum()) if gap.sum() else None,
    )


def waits(a: Analysis, graph: Graph) -> tuple[Any, Any]:
    """(row of ``trace.cpu``, ns waited) of each call in the window that waited for the device."""
    cpu, gpu = a.trace.cpu, a.trace.gpu
    begin, end = graph.origin, graph.origin + float(graph.time[graph.step_boundaries].max())
    if not graph.step_boundaries[-1]:
        end = graph.origin + float(graph.time.max())
    long = (cpu["kind"] == "runtime") & (cpu["dur"] > SHORT_NS) & cpu["ts"].is_between(begin, end)
    starts_kernel = gpu["launch"].filter(gpu["kind"] == "kernel").drop_nulls().unique()
    row = np.setdiff1d(np.flatnonzero(long.to_numpy()), starts_kernel.to_numpy())
    called = cpu["ts"].to_numpy()[row]
    returned = called + cpu["dur"].to_numpy()[row]
    launched = cpu["ts"].gather(gpu["launch"].fill_null(0)).to_numpy()
    known = gpu["launch"].is_not_null().to_numpy()
    ts = gpu["ts"].to_numpy()
    # what runs before all that was launched in the recording was given to its stream before it
    first = float(ts[known].min()) if known.any() else np.inf
    work = gpu.select("device", "stream", until=pl.col("ts") + pl.col("dur")).with_columns(
        given=np.where(known, launched, np.where(ts < first, -1, ts))
    )
    last = np.full(len(row), -1.0)

    def tied(ended: Any, which: Any) -> None:
        good = (ended > called[which]) & (ended <= returned[which] + CLOCK_NS)
        good &= returned[which] - ended <= AFTER_NS
        last[which] = np.where(good, np.maximum(last[which], ended), last[which])

    everything = np.arange(len(row))
    for _, stream in work.group_by("device", "stream"):
        lane = stream.sort("given")
        ends = np.maximum.accumulate(lane["until"].to_numpy())
        # what the call itself puts on the stream counts
        place = np.searchsorted(lane["given"].to_numpy(), called, side="right") - 1
        tied(np.where(place >= 0, ends[np.maximum(place, 0)], -1), everything)
    event = everything[(cpu["call"].gather(row) == "sync_event").fill_null(False).to_numpy()]
    if len(event) and work.height:
        ends = np.sort(work["until"].to_numpy())
        place = np.searchsorted(ends, returned[event] + CLOCK_NS, side="right") - 1
        tied(np.where(place >= 0, ends[np.maximum(place, 0)], -1), event)
    copies = gpu.filter((pl.col("kind") == "memcpy") & pl.col("launch").is_in(row))
    ends = np.sort(work["until"].to_numpy())
    at = np.searchsorted(row, copies["launch"].to_numpy())
    began = copies["ts"].to_numpy()
    before = ends[np.maximum(np.searchsorted(ends, began, side="right") - 1, 0)] if len(at) else at
    is_held = (began <= returned[at]) & (before > called[at]) & (before <= began)
    is_held &= (began - before <= AFTER_NS) & (last[at] < 0)
    last[at[is_held]] = began[is_held]
    is_wait = last >= 0
    return row[is_wait], np.minimum(last, returned)[is_wait] - called[is_wait]


def idle(graph: Graph, time: Any) -> tuple[Any, Any]:
    """(the node that ends it, ns) of each time in the window at which the device did nothing,
    when nodes come at ``time``."""
    device = graph.device
    start = (time - graph.dur)[device]
    order = np.argsort(start, kind="stable")
    device, start = device[order], start[order]
    until = np.maximum.accumulate(time[device])
    gap = start[1:] - until[:-1]
    return device[1:][gap > 0], gap[gap > 0]


def _start(graph: Graph) -> Any:
    return graph.time - graph.dur


def _ready_times(graph: Graph, kinds: list[EdgeKind]) -> Any:
    """Earliest start of each node by edges of these kinds, all else as measured."""
    kept = np.isin(graph.edge, kinds)
    src = graph.src[kept]
    base = graph.time[src] - np.where(graph.from_start[kept], graph.dur[src], 0)
    allowed = np.full(len(graph), -np.inf)
    np.maximum.at(allowed, graph.dst[kept], base + graph.weight[kept])
    return allowed
