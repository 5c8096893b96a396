"""Host points: the moments on host threads that device work or other threads depend on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from advisor.analysis.names import matches
from advisor.whatif.graph import Array, Node

if TYPE_CHECKING:
    from advisor.trace import Trace

LOADER = r"^enumerate\(Data(Loader|Pipe)\)#"
WORKERS = r"^enumerate\(Data(Loader|Pipe)\)#_MultiProcessing"
STARVED_NS = 500_000
"""A loader call longer than this waited for its workers, or did their work: handing over a batch
that is ready takes 0.1 to 0.3 ms."""
SLOW_LAUNCH_NS = 50_000
"""A launch call longer than this did something else than launch, or waited."""


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
        # at one instant: ends before boundaries before starts
        rank = np.array([0, 5, 5, 0, 2, 1, 5, 0, 0, 0])[kind]
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
    got somewhere: synchronising calls, synchronous copies, and copies from or to pageable memory
    that did not return before they were done."""
    cpu, gpu = trace.cpu, trace.gpu
    call = cpu["call"].is_in(["sync_device", "sync_stream", "sync_event", "memcpy_blocking"])
    named = np.flatnonzero(call.fill_null(False).to_numpy())
    copies = gpu.filter(
        (pl.col("kind") == "memcpy")
        & pl.col("launch").is_not_null()
        & (pl.col("src").eq_missing("Pageable") | pl.col("dst").eq_missing("Pageable"))
    )
    launch = copies["launch"].to_numpy()
    call_end = (cpu["ts"] + cpu["dur"]).to_numpy()[launch]
    held = call_end >= (copies["ts"] + copies["dur"]).to_numpy() - 2_000
    rows: Array = np.unique(np.concatenate([named, launch[held]]))
    ts = cpu["ts"].to_numpy()[rows]
    return rows[(ts >= start) & (ts < end)]


def loaders(trace: Trace, start: int, end: int) -> Array:
    """Rows of ``trace.cpu``: calls for the next batch in [start, end): without worker processes
    the work itself, otherwise those that took long and so were waits for them."""
    cpu = trace.cpu
    starved = (cpu["dur"] >= STARVED_NS).to_numpy() | ~matches(cpu["name"], WORKERS).to_numpy()
    rows = np.flatnonzero(matches(cpu["name"], LOADER).to_numpy() & starved)
    ts = cpu["ts"].to_numpy()[rows]
    return rows[(ts >= start) & (ts < end)]
