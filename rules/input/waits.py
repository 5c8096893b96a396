"""How long the step waits for the DataLoader, and how much of that the device stands idle."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.analysis.names import matches
from advisor.intervals import covered, intersect, union
from advisor.rules.common import rows

if TYPE_CHECKING:
    from advisor.analysis import Analysis

SINGLE = r"^enumerate\(Data(?:Loader|Pipe)\)#_SingleProcessDataLoaderIter\b"
"""The iterator PyTorch names when ``num_workers=0``."""
OTHERS = r"^enumerate\(Data(?:Loader|Pipe)\)#(?:[^_]|_[^S]|_S[^i])"
"""Every other iterator: worker processes, or a DataPipe."""


class Waits(NamedTuple):
    """Waits of the thread that drives the step, inside the used steps."""

    host: NDArray[np.int64]
    """Rows of ``trace.cpu``: the ``__next__`` ranges, outermost only."""
    total: int
    """Their union, ns."""
    exposed: int
    """The part that keeps the step from going on: the device is idle and its next work is held up
    by the wait. Without device work in the trace, all of it. ns."""
    each: NDArray[np.int64]
    """Exposed part of each row of ``host``, ns."""
    by_step: NDArray[np.int64]
    """Exposed part in each used step, ns."""


def find_waits(a: Analysis, pattern: str) -> Waits | None:
    """Waits whose range matches ``pattern``; ``None``: there are none in the used steps."""
    cpu = a.trace.cpu
    named = matches(cpu["name"], pattern) & cpu["kind"].is_in(["annotation", "op"])
    if a.device_id is None and a.trace.main_thread is not None:
        named &= cpu["thread"] == a.trace.main_thread
    found = np.flatnonzero(named.to_numpy())
    if not len(found):
        return None
    # a nested loader's range lies inside another one's: the outer one has its time already
    inner = np.isin(rows(cpu["parent"])[found], found)
    found = found[~inner]
    ts = cpu["ts"].to_numpy()[found]
    end = ts + cpu["dur"].to_numpy()[found]
    inside = covered(ts, end, a.spans) > 0
    found, ts, end = found[inside], ts[inside], end[inside]
    if not len(found):
        return None
    wait = intersect(union(ts, end), a.spans)
    exposed = wait
    if a.device_id is not None:
        gaps = a.gaps.filter(pl.col("cause") == "loader")
        blamed = np.isin(rows(gaps["host"]), found)
        start = gaps["ts"].to_numpy()[blamed]
        exposed = intersect(union(start, start + gaps["dur"].to_numpy()[blamed]), a.spans)
    used = a.steps.used
    by_step = covered(used["ts"].to_numpy(), used["end"].to_numpy(), exposed)
    return Waits(found, wait.total, exposed.total, covered(ts, end, exposed), by_step)


def recurs(waits: Waits, minimum: float) -> bool:
    """The wait is more than one step's accident: without the worst step, the others still lose
    ``minimum`` ns on average. With fewer than three steps there is nothing to compare."""
    if len(waits.by_step) < 3:
        return True
    rest = waits.by_step.sum() - waits.by_step.max()
    return bool(rest / (len(waits.by_step) - 1) >= minimum)
