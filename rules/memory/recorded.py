"""Device memory over a run, from the allocator's counters at the end of every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from advisor.rules.recorded import record

if TYPE_CHECKING:
    from advisor.measure import Analysis
    from advisor.measure.steps.record import Floats

GIB = 1 << 30


def capacity(a: Analysis) -> int | None:
    """Memory of the rank's GPU, bytes; ``None``: not recorded."""
    recorded = record(a)
    device = next(iter(recorded.record.rank.devices), None)
    if device is not None and device.total_bytes:
        return device.total_bytes
    totals = recorded.gpu("memory_total")
    return int(totals.max()) if len(totals) else None


def last(values: Floats) -> float | None:
    """The last value that was measured."""
    known = values[~np.isnan(values)]
    return float(known[-1]) if len(known) else None


def growth(values: Floats) -> tuple[float, bool]:
    """(what a series grows by over its length, whether it grows steadily).

    By the lowest values of eight equal blocks (four of a short series), so that peaks of long
    sequences and caches that fill up do not count: steady means that at least six of seven blocks
    (all of a short series) are above the one before, and that the last half still grows at half the
    rate of the first or more.
    """
    values = values[~np.isnan(values)]
    blocks = 8 if len(values) >= 24 else 4
    if len(values) < 2 * blocks:
        return 0.0, False
    low = np.array([part.min() for part in np.array_split(values, blocks)])
    rises = np.diff(low) > 0
    middle = len(low) // 2
    first = (low[middle] - low[0]) / middle
    second = (low[-1] - low[middle]) / (blocks - 1 - middle)
    missing = 1 if blocks == 8 else 0
    steady = bool(rises.sum() >= blocks - 1 - missing and second >= 0.5 * first and second > 0)
    return float((low[-1] - low[0]) * blocks / (blocks - 1)), steady
