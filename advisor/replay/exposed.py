"""Exposed time: what an edit can save at most, where the steps cannot be replayed.

Of the events that an edit touches, the instants at which nothing but them keeps the step from going
on: device work that nothing else covers, host time during which the device is idle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from advisor.core.intervals import EMPTY, Intervals, intersect, join, subtract, union
from advisor.measure.steps.instants import MOMENTS
from advisor.replay.selection import selected_gaps, selected_gpu, selected_host

if TYPE_CHECKING:
    from advisor.core.finding import Edit
    from advisor.measure import Analysis
    from advisor.replay.selection import Mask


class Claim(NamedTuple):
    """Instants of the window that a fix would save, and which share of them."""

    time: Intervals
    share: float
    share_low: float
    """Of the time, under the pessimistic assumption (smaller gain)."""
    share_high: float


def claim(a: Analysis, edit: Edit) -> Claim:
    time = exposed(a, edit)
    if edit.op in ("scale", "merge", "punctual") and edit.factor is not None:
        middle = 1 - edit.factor
        low = 1 - (edit.factor_high if edit.factor_high is not None else edit.factor)
        high = 1 - (edit.factor_low if edit.factor_low is not None else edit.factor)
        return Claim(time, max(0.0, middle), max(0.0, low), max(0.0, high))
    return Claim(time, 1.0, 1.0, 1.0)


def exposed(a: Analysis, edit: Edit) -> Intervals:
    """The instants at which only the selected events keep the step from going on."""
    select = edit.select
    if select.on == "gpu":
        mask = selected_gpu(a, select)
        rest = a.device_busy(a.in_window & ~mask)
        return subtract(a.device_busy(mask), rest)
    if select.on == "gap":
        rows = selected_gaps(a, select)
        ts = a.gaps["ts"].to_numpy()[rows]
        result = union(ts, ts + a.gaps["dur"].to_numpy()[rows])
        return intersect(result, MOMENTS[select.at](a)) if select.at else result
    mask = selected_host(a, select)
    if edit.op == "asynchronous":
        return _bubbles(a, mask)
    cpu = a.trace.cpu
    ts = cpu["ts"].to_numpy()[mask]
    held = union(ts, ts + cpu["dur"].to_numpy()[mask])
    idle = a.breakdown.idle if a.device_id is not None else a.spans
    return intersect(held, idle)


def _bubbles(a: Analysis, mask: Mask) -> Intervals:
    """Idle time that the selected synchronising calls leave behind them."""
    syncs = a.syncs
    if syncs.is_empty():
        return EMPTY
    rows = mask[syncs["host"].to_numpy()]
    start = syncs["bubble_ts"].fill_null(0).to_numpy()[rows]
    end = syncs["bubble_end"].fill_null(0).to_numpy()[rows]
    # without the call the host would be ahead by what it waited in it, and by no more
    ahead = syncs["waited"].to_numpy()[rows]
    return intersect(union(np.maximum(start, end - ahead), end), a.breakdown.idle)


def gain(parts: list[Claim], claimed: Intervals = EMPTY) -> tuple[float, float, float]:
    """Time saved inside the window beyond what is claimed already: (central, low, high), ns.

    Edits of one finding that touch the same instants count them once, for the first edit.
    """
    central = low = high = 0.0
    taken = claimed
    for part in parts:
        fresh = subtract(part.time, taken).total
        central += fresh * part.share
        low += fresh * part.share_low
        high += fresh * part.share_high
        taken = join(taken, part.time)
    return central, low, high


def touched(parts: list[Claim]) -> Intervals:
    """All instants that the claims touch."""
    return join(EMPTY, *(part.time for part in parts))
