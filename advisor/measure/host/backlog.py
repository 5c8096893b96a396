"""What the device had queued: work launched before the recording, and hosts that run ahead."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.intervals import covered_length, union
from advisor.core.trace import Trace

Times = NDArray[np.int64]

AHEAD_SHARE = 0.05
"""Part of a step that its first work must wait in the queue for the host to run ahead. Launch
latency is some 10 us; a step that is bound by the host has its device wait, not its work."""
MIN_STEPS = 3
"""Fewer have no middle: their marks and their queue are those of the window's ends."""
WAITING = ("sync_device", "sync_stream", "sync_event", "memcpy", "memcpy_blocking")
"""Classes of calls that may hold the host until the device is done."""
NEVER = np.iinfo(np.int64).max


class Queue(NamedTuple):
    """Steps as the device saw them."""

    start: Times
    """First device work of each step began, ns."""
    end: Times
    """First device work of the next step began, or the last of this one ended, ns."""
    ahead_ns: float
    """How long a step's first work waited in the queue (median)."""


def analysed_device(trace: Trace) -> int | None:
    """The device with most device time; ``None``: no device work."""
    if trace.gpu.is_empty():
        return None
    totals = trace.gpu.group_by("device").agg(pl.col("dur").sum()).sort("dur", "device")
    return int(totals["device"][-1])


def earlier(trace: Trace) -> NDArray[np.bool_]:
    """Aligned with ``trace.gpu``: launched before the recording began.

    Its launch is not in the file, though calls of the host are, and it ran before the first work
    of its stream whose launch is (streams run their work in order). Work without a launch that
    came later lost its record instead.
    """
    gpu, cpu = trace.gpu, trace.cpu
    launch = gpu["launch"].fill_null(-1).to_numpy()
    unknown = launch < 0
    if not unknown.any() or unknown.all() or cpu.is_empty():
        return np.zeros(gpu.height, dtype=np.bool_)
    lanes = gpu.select(pl.struct("device", "stream").rank("dense").cast(pl.Int64)).to_series()
    lane = lanes.fill_null(0).to_numpy()
    ts = gpu["ts"].to_numpy()
    first = np.full(int(lane.max()) + 1, NEVER)
    np.minimum.at(first, lane[~unknown], ts[~unknown])
    # a stream on which nothing was launched meanwhile: what began before anything else could
    first[first == NEVER] = int(ts[~unknown].min())
    return np.asarray(unknown & (ts < first[lane]))


def device_steps(trace: Trace, start: Times, end: Times, *, closed: bool) -> Queue | None:
    """The steps [start, end) of the host as the device's; ``None``: the device keeps up with them.

    The host runs ahead when the first work of a step, in the median, waits for more than
    AHEAD_SHARE of a step behind other work. Then the host's marks say how fast it can launch, and
    the step is the device's period: from the first work of a step to the first of the next.
    ``closed``: the marks include the last step's own work (ranges), else the host launched on.
    """
    gpu, device = trace.gpu, analysed_device(trace)
    if device is None or len(start) < MIN_STEPS:
        return None
    rows = np.flatnonzero(
        (gpu["launch"].is_not_null() & (gpu["device"] == device)).fill_null(False).to_numpy()
    )
    if not len(rows):
        return None
    called = trace.cpu["ts"].to_numpy()[gpu["launch"].to_numpy()[rows].astype(np.int64)]
    began = gpu["ts"].to_numpy()[rows]
    ended = began + gpu["dur"].to_numpy()[rows]
    step = np.searchsorted(start, called, side="right") - 1
    inside = (step >= 0) & (called < end[np.maximum(step, 0)])
    count = len(start)
    last = np.full(count, -1, dtype=np.int64)
    np.maximum.at(last, step[inside], ended[inside])
    if (last < 0).any():
        return None  # a step that launched nothing has no place on the device
    place = np.flatnonzero(inside)
    _, index = np.unique(step[place], return_index=True)  # rows are in order of ts
    first = began[place[index]]
    if not closed:
        after = called >= end[-1]
        last[-1] = began[after].min() if after.any() else last[-1]
    waited = first - called[place[index]]
    upto = np.where(np.append(start[1:] == end[:-1], False), np.append(first[1:], NEVER), last)
    length = upto - first
    if (length <= 0).any() or np.median(waited) < AHEAD_SHARE * np.median(length):
        return None
    if not _behind_work(trace, device, called[place[index]], first):
        return None
    queue = Queue(first, upto, float(np.median(waited)))
    if not closed and abs(int(length.sum()) / int((end - start).sum()) - 1) < AHEAD_SHARE:
        return None  # periods between marks: as long as the device's while the queue is steady
    return queue


def drained(trace: Trace, start: int, end: int, *, held: bool = False) -> int | None:
    """When the analysed device was done with work launched before the recording, and its own work
    of [start, end) could begin. ``None``: that was not what it was busy with from ``start`` on.

    ``held``: only if the host did nothing but wait for that: from ``start`` on it launched nothing
    before, and a call of it that waits for the device spans that moment."""
    rows = earlier(trace)
    if not rows.any():
        return None
    gpu = trace.gpu
    rows &= (gpu["device"] == analysed_device(trace)).fill_null(False).to_numpy()
    ts = gpu["ts"].to_numpy()
    ended = ts + gpu["dur"].to_numpy()
    own = ts[~rows & (ended > start) & (gpu["device"] == analysed_device(trace)).to_numpy()]
    done = int(ended[rows].max(initial=start))
    if not start < done < end or not len(own) or own.min() < done:
        return None
    if held and not _held(trace, start, done):
        return None
    busy = union(ts[rows], ended[rows])
    covered = covered_length(np.array([start]), np.array([done]), busy)[0]
    return done if covered >= 0.5 * (done - start) else None


def _held(trace: Trace, start: int, done: int) -> bool:
    """The host launched nothing from ``start`` to ``done``, and waits for the device there."""
    cpu = trace.cpu
    called = cpu["ts"].gather(trace.gpu["launch"].drop_nulls().unique())
    waits = (
        cpu["call"].cast(pl.String).is_in(WAITING)
        & (cpu["ts"] < done)
        & (cpu["ts"] + cpu["dur"] >= done)
    ).fill_null(False)
    return bool(waits.any()) and not called.is_between(start, done, closed="left").any()


def _behind_work(trace: Trace, device: int, called: Times, began: Times) -> bool:
    """Most of what first work waited for, the device was at work."""
    gpu = trace.gpu.filter(pl.col("device") == device)
    ts = gpu["ts"].to_numpy()
    busy = union(ts, ts + gpu["dur"].to_numpy())
    waited = int((began - called).sum())
    return waited > 0 and int(covered_length(called, began, busy).sum()) >= 0.5 * waited
