"""Host points: the moments on host threads that device work or other threads depend on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from advisor.core.trace import LOADER
from advisor.measure.device.copies import held_by_copy
from advisor.measure.host.names import WORKERS, name_matches
from advisor.measure.host.syncs import tied_calls
from advisor.replay.graph import Array, Node

if TYPE_CHECKING:
    from advisor.core.trace import Trace

STARVED_NS, STARVED_SHARE = 500_000, 0.05
"""A call of a loader with workers that takes longer than this, and than this share of the step,
waited for them. Handing over a batch that is ready takes less; and that workers fall short of a
step by so little that the wait decides nothing would be chance."""
HAND_BATCH_NS = {"high": 200_000.0, "": 1_500_000.0, "low": 4_000_000.0}
"""Taking over a batch that a loader worker has ready, by assumption: 0.1 to 0.3 ms in public A100
traces, 1.4 to 1.7 ms in the pairs of traces with four workers, 1.5 ms for 8 KiB and 4 ms for 2 MiB
on two busy cores (``benchmarks/bench_hand_over.py``)."""
MIN_READY = 3
"""Batches that were ready, from which their median stands for the others."""
SLOW_LAUNCH_NS = 50_000
"""A launch call longer than this did something else than launch, or waited."""

_ORDER = {
    Node.RELEASED: 0,
    Node.LOADED: 0,
    Node.STEP: 1,
    Node.MARK: 2,
    Node.LAUNCH: 3,
    Node.WAIT: 3,
    Node.LOADER: 3,
}
"""At one instant of a thread: ends, then boundaries, then hand-overs, then starts."""
_AT_ONE_INSTANT = np.array([_ORDER.get(kind, 0) for kind in Node])


@dataclass
class Points:
    """Columns of host points, unordered until :meth:`arrays`."""

    thread: list[Array] = field(default_factory=list)
    time: list[Array] = field(default_factory=list)
    kind: list[Array] = field(default_factory=list)
    row: list[Array] = field(default_factory=list)

    def add(self, thread: Array, time: Array, kind: Node, row: Array | None = None) -> None:
        """Append points of one kind."""
        count = len(time)
        self.thread.append(np.broadcast_to(np.asarray(thread), (count,)))
        self.time.append(np.asarray(time, dtype=np.int64))
        self.kind.append(np.full(count, kind, dtype=np.uint8))
        self.row.append(np.full(count, -1) if row is None else np.asarray(row))

    def arrays(self) -> tuple[Array, Array, Array, Array]:
        """(thread, time, kind, row) ordered by thread and time; duplicates removed."""
        thread, time, kind, row = (
            np.concatenate(c).astype(np.int64)
            for c in (self.thread, self.time, self.kind, self.row)
        )
        rank = _AT_ONE_INSTANT[kind]
        order = np.lexsort((row, rank, time, thread))
        thread, time, kind, row = (c[order] for c in (thread, time, kind, row))
        same = np.zeros(len(time), dtype=bool)
        same[1:] = (
            (thread[1:] == thread[:-1])
            & (time[1:] == time[:-1])
            & (kind[1:] == kind[:-1])
            & (row[1:] == row[:-1])
        )
        return thread[~same], time[~same], kind[~same], row[~same]


def launches(trace: Trace, start: int, end: int) -> Array:
    """Rows of ``trace.cpu``: calls in [start, end) that put work on a device."""
    rows: Array = trace.gpu["launch"].drop_nulls().unique().sort().to_numpy()
    ts = trace.cpu["ts"].to_numpy()[rows]
    return rows[(ts >= start) & (ts < end)]


def waits(trace: Trace, start: int, end: int) -> Array:
    """Rows of ``trace.cpu``: calls in [start, end) that may block the host until the device has
    got somewhere: synchronising calls, synchronous copies, copies that held their call whatever
    its name, and long calls that returned as a stream ran empty."""
    cpu = trace.cpu
    call = cpu["call"].is_in(["sync_device", "sync_stream", "sync_event", "memcpy_blocking"])
    named = np.flatnonzero(call.fill_null(False).to_numpy())
    held = trace.gpu["launch"].to_numpy()[held_by_copy(trace)].astype(np.int64)
    rows: Array = np.unique(np.concatenate([named, held, tied_calls(trace)]))
    ts = cpu["ts"].to_numpy()[rows]
    return rows[(ts >= start) & (ts < end)]


def loaders(trace: Trace, start: int, end: int, step_ns: float) -> Array:
    """Rows of ``trace.cpu``: calls for the next batch in [start, end): without worker processes
    the work itself, otherwise those that took long and so were waits for them. ``step_ns``: mean
    time of a step."""
    cpu = trace.cpu
    starved = (_long_wait(trace, step_ns) | ~name_matches(cpu["name"], WORKERS)).to_numpy()
    rows = np.flatnonzero(name_matches(cpu["name"], LOADER).to_numpy() & starved)
    ts = cpu["ts"].to_numpy()[rows]
    return rows[(ts >= start) & (ts < end)]


def hand_over_ns(trace: Trace, step_ns: float, assumption: str) -> float:
    """What taking over a batch costs that a worker has ready: what the trace shows of such batches,
    else what it was measured to. ``assumption``: ``low`` or ``high``, of the gain."""
    cpu = trace.cpu
    ready = cpu.filter(name_matches(cpu["name"], WORKERS) & ~_long_wait(trace, step_ns))
    if ready.height < MIN_READY:
        return HAND_BATCH_NS[assumption]
    return float(ready["dur"].median() or 0.0)  # type: ignore[arg-type]


def _long_wait(trace: Trace, step_ns: float) -> pl.Series:
    return trace.cpu["dur"] >= max(STARVED_NS, STARVED_SHARE * step_ns)
