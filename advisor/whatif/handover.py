"""Hand-over between host threads: who waits for whom, from when they work.

While autograd's thread runs backward the main thread has nothing to say, and the other way
round. So where one thread falls silent, another works inside that silence and nowhere across its
borders, and little of the silence is left over, the first one waited for the second: its last
event woke the other, the other's last event woke it. Where the other one ran backward nodes of
autograd there is no doubt, and what is left over may be any Python that was not recorded.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from advisor.analysis.names import matches
from advisor.intervals import Intervals, union
from advisor.trace import Trace
from advisor.whatif.graph import Array

MIN_SILENCE_NS = 50_000
"""Shorter silences are ordinary gaps between operators."""
LEFT_OVER_SHARE = 0.3
LEFT_OVER_NS = 400_000
"""Waking a thread takes tens of µs, plus what Python does around ``backward()``."""

ENGINE = r"^autograd::engine::evaluate_function"
OVERRUN_SHARE = 0.05
"""Of the silence: how far the work of the other thread may reach across its borders."""


class Handover(NamedTuple):
    """``waiter`` fell silent at ``left``; ``worker`` worked from ``began`` to ``done``; ``waiter``
    went on at ``back``. All columns, times in ns."""

    waiter: Array
    worker: Array
    left: Array
    began: Array
    done: Array
    back: Array


def find_handovers(trace: Trace, threads: Array, start: int, end: int, waiting: Array) -> Handover:
    """Hand-overs among ``threads`` inside [start, end). ``waiting``: rows of ``trace.cpu`` that
    explain a silence otherwise (waits for the data loader)."""
    active = {int(t): _active(trace, int(t), start, end, waiting) for t in threads}
    engine = _engine(trace, active)
    found: list[tuple[int, int, int, int, int, int]] = []
    for waiter, own in active.items():
        silence = own.start[1:] - own.end[:-1] >= MIN_SILENCE_NS
        left, back = own.end[:-1][silence], own.start[1:][silence]
        if not len(left):
            continue
        best = np.full(len(left), np.iinfo(np.int64).max)
        rows: dict[int, tuple[int, int, int, int, int, int]] = {}
        for worker, theirs in active.items():
            if worker == waiter or not len(theirs):
                continue
            # a thread that just has been woken may tidy up after it has woken the other
            spare = np.maximum(OVERRUN_SHARE * (back - left), 0).astype(np.int64)
            first = np.searchsorted(theirs.end, left, side="right")
            at = np.minimum(first, len(theirs) - 1)
            tidying = (theirs.start[at] < left) & (theirs.end[at] - left <= spare)
            first = first + tidying
            last = np.searchsorted(theirs.start, back, side="left") - 1
            inside = (first <= last) & (first < len(theirs))
            at_first, at_last = np.minimum(first, len(theirs) - 1), np.maximum(last, 0)
            began, over = theirs.start[at_first], theirs.end[at_last] - back
            done = np.minimum(theirs.end[at_last], back - 1)
            rest = (began - left) + (back - done)
            nodes = np.searchsorted(engine[worker], back) > np.searchsorted(engine[worker], left)
            fits = (
                inside
                & (began >= left)
                & (over <= spare)
                & ((rest <= np.maximum(LEFT_OVER_SHARE * (back - left), LEFT_OVER_NS)) | nodes)
                & (rest < back - left)
                & (rest < best)
            )
            for i in np.flatnonzero(fits).tolist():
                rows[i] = (waiter, worker, int(left[i]), int(began[i]), int(done[i]), int(back[i]))
            best = np.where(fits, rest, best)
        found += rows.values()
    table = np.array(found, dtype=np.int64).reshape(-1, 6)
    return Handover(*(table[:, i] for i in range(6)))


def _engine(trace: Trace, active: dict[int, Intervals]) -> dict[int, Array]:
    """When backward nodes began, by thread, in order."""
    rows = np.flatnonzero(matches(trace.cpu["name"], ENGINE).to_numpy())
    thread, ts = trace.cpu["thread"].to_numpy()[rows], trace.cpu["ts"].to_numpy()[rows]
    return {owner: np.sort(ts[thread == owner]) for owner in active}


def _active(trace: Trace, thread: int, start: int, end: int, waiting: Array) -> Intervals:
    """When the thread ran operators or runtime calls. Python frames and ranges span waits, but a
    thread that enters or leaves a Python frame runs at that instant."""
    cpu = trace.cpu.with_row_index("row").filter(
        (pl.col("thread") == thread)
        & (
            pl.col("kind").is_in(["op", "runtime", "python"])
            | pl.col("row").is_in(waiting.tolist())
        )
        & (pl.col("ts") < end)
        & (pl.col("ts") + pl.col("dur") >= start)
    )
    frame = (cpu["kind"] == "python").to_numpy()
    ts, until = cpu["ts"].to_numpy(), (cpu["ts"] + cpu["dur"]).to_numpy()
    instants = np.concatenate([ts[frame], until[frame]])
    begin = np.concatenate([ts[~frame], instants])
    return union(begin, np.maximum(np.concatenate([until[~frame], instants]), begin + 1))
