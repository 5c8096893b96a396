"""How far a replay can be trusted, in time: how much of the waiting it explains by its own edges.

That the replayed step is as long as the measured one proves little: a twin that copies every host
time from the trace gets that right and has explained nothing. What a fix changes is who waits for
whom. So two sums are compared with the trace: the time that the host waited for the device, and the
time that the device idled. Of each wait counts as explained what lies beyond the error with which
the graph's own edges give its end, all else being as measured; a wait that is carried over from the
trace, because nothing was found that it may have waited for, counts as not explained.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from advisor.replay.graph import NEVER, Array, Edge, Graph, Node

EXPLAINED_NS = 5_000
MAX_STEP_ERROR = 0.10
"""A replay that misses the measured steps by more than this prices nothing. Lumos, a replay of
the same kind of traces, reports 3 % on average."""
MIN_EXPLAINED = 0.70
"""Nor does one whose edges explain less than this share of the starts of device work, of the time
that the host waits, or of the time that the device idles (public traces: 0.75 to 1.0; 0.4 where
synchronising calls and part of the kernels were filtered out)."""
MATTERS = 0.05
"""Share of the steps below which waiting or idling decides nothing."""


class PartQuality(NamedTuple):
    """How well one of the hard parts of the model is reproduced, given all else as measured."""

    name: str
    cases: int
    explained: float
    """Share of the time that was waited there."""
    error_ns: float
    """Median absolute error of the ends."""
    time_ns: float
    """How long was waited there, in all replayed steps."""


class Quality(NamedTuple):
    """How far the replay can be trusted."""

    step_error: float
    """Mean absolute error of the replayed against the measured steps, as a share of the step."""
    total_error: float
    """Signed error of the whole run of steps, as a share of it."""
    explained: float | None
    """Share of device starts that the graph's edges explain within 5 µs."""
    starts: int
    hard: tuple[PartQuality, ...]
    steps: int
    """How many consecutive steps are replayed."""
    of_steps: int
    """How many there are."""
    waits: float
    """Share of the steps that the host waits for the device."""
    waits_explained: float | None
    """Share of that time that is explained; ``None``: it never waits."""
    idle: float
    """Share of the steps that the device idles."""
    idle_explained: float | None
    """Share of that time that is explained; ``None``: it never idles."""

    @property
    def unusable(self) -> str:
        """Why it prices nothing; empty: it reproduces the steps and explains their waiting."""
        if not self.step_error <= MAX_STEP_ERROR:
            return (
                f"a replay misses the measured steps by {self.step_error:.0%} (at most "
                f"{MAX_STEP_ERROR:.0%} is accepted)"
            )
        if self.explained is not None and self.explained < MIN_EXPLAINED:
            return (
                f"what {1 - self.explained:.0%} of the {self.starts:,} pieces of device "
                f"work waited for is not in the trace (at most {1 - MIN_EXPLAINED:.0%} is accepted)"
            )
        for what, share, explained in (
            ("the host waits for the device", self.waits, self.waits_explained),
            ("the device idles", self.idle, self.idle_explained),
        ):
            if share > MATTERS and explained is not None and explained < MIN_EXPLAINED:
                return (
                    f"{what} {share:.0%} of the time, and a replay explains "
                    f"{explained:.0%} of that (at least {MIN_EXPLAINED:.0%} is asked)"
                )
        return ""


class Waiting(NamedTuple):
    """Waits and how much of each is explained, in columns of ns."""

    time: Array
    explained: Array
    error: Array
    """Of the end, as the edges give it."""

    @property
    def share(self) -> float | None:
        """Share of the time that is explained; ``None``: nobody waited."""
        total = float(self.time.sum())
        return float(self.explained.sum()) / total if total > 0 else None


def waiting(graph: Graph, nodes: Array, time: Array, kinds: tuple[Edge, ...]) -> Waiting:
    """How the ends (or starts, of device work) at ``nodes`` of waits that took ``time`` are
    explained by edges of these kinds."""
    base = graph.time[graph.src] - np.where(graph.from_start, graph.dur[graph.src], 0)
    own = np.isin(graph.edge, [kind.value for kind in kinds]) & (graph.src > 0)
    allowed = np.full(len(graph), NEVER)
    np.maximum.at(allowed, graph.dst[own], (base + graph.weight)[own])
    error = allowed[nodes] - (graph.time - graph.dur)[nodes]
    explained = np.clip(time - np.abs(error), 0.0, None)
    return Waiting(time.astype(float), explained, error)


def host_waits(graph: Graph) -> Waiting:
    """Waits of the host for the device: blocking calls, and launches that found the queue full."""
    begun = np.flatnonzero(graph.kind == Node.WAIT)
    done = np.flatnonzero(graph.kind == Node.RELEASED)
    begin = dict(zip(graph.row[begun].tolist(), graph.time[begun].tolist(), strict=True))
    since = np.array([begin.get(row, np.inf) for row in graph.row[done].tolist()])
    took = graph.time[done] - since - graph.latencies.call
    real = took > 0
    calls = waiting(graph, done[real], took[real], (Edge.RELEASE,))
    full, time = graph.hard.get("queue-blocked launches", _NOTHING)
    queue = waiting(graph, full, time, (Edge.QUEUE,))
    return Waiting(*(np.concatenate(pair) for pair in zip(calls, queue, strict=True)))


def device_idle(graph: Graph, lanes: Array) -> Waiting:
    """Stretches in which no work runs on these lanes, ended by the start of some."""
    device = graph.device[np.isin(graph.lane[graph.device], lanes)]
    start = (graph.time - graph.dur)[device]
    order = np.argsort(start, kind="stable")
    device, start = device[order], start[order]
    before = np.maximum.accumulate(np.append(0.0, graph.time[device]))[:-1]
    gap = start - before
    idle = gap > 0
    return waiting(graph, device[idle], gap[idle], _STARTS)


def hard_parts(graph: Graph) -> tuple[PartQuality, ...]:
    """Each hard part alone."""
    result = []
    for name, (nodes, time) in graph.hard.items():
        if len(nodes):
            part = waiting(graph, nodes, time, _EDGES.get(name, _STARTS))
            share, error = part.share, float(np.median(np.abs(part.error)))
            result.append(
                PartQuality(
                    name, len(nodes), 1.0 if share is None else share, error, float(time.sum())
                )
            )
    return tuple(result)


_NOTHING = (np.zeros(0, dtype=np.int64), np.zeros(0))
_STARTS = (Edge.LAUNCH, Edge.STREAM, Edge.CROSS, Edge.CONTENTION)
_EDGES = {
    "syncs that waited": (Edge.RELEASE,),
    "queue-blocked launches": (Edge.QUEUE,),
    "thread hand-overs": (Edge.HANDOVER,),
}
