"""Records that the profiler lost: launches whose device work is not in the file."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from advisor.core.trace import Trace
from advisor.measure.host.backlog import earlier

TOLD_SHARE = 0.01
"""Part of the launches from which holes are told, and nothing is concluded from idle time: a file
without losses has none, so this only leaves room for launches that failed."""


class Lost(NamedTuple):
    """Launches of kernels in the recording, and those whose kernel is not in it."""

    launches: int
    lost: int

    @property
    def told(self) -> bool:
        """So many that what looks idle may be a hole in the records."""
        return self.lost > TOLD_SHARE * self.launches


def lost_records(trace: Trace) -> Lost:
    """Counts kernel launches with a correlation id that no device row has.

    Not counted: launches into a graph that is being captured, which run nothing; launches after
    the last one whose kernel is there, which the recording may have ended before; a launch inside
    another (the runtime's call around the driver's) whose kernel is tied to one of the two; and
    as many as there are device rows that could not be tied to their launch.
    """
    cpu, gpu = trace.cpu, trace.gpu
    call = cpu["call"]
    launching = (call.is_in(["launch"]) & cpu["correlation"].is_not_null()).fill_null(False)
    rows = np.flatnonzero(launching.to_numpy())
    if not len(rows):
        return Lost(0, 0)
    parent = cpu["parent"].fill_null(-1).to_numpy()
    seen = np.zeros(cpu.height, dtype=np.bool_)
    seen[gpu["launch"].drop_nulls().to_numpy()] = True
    launch = launching.to_numpy()
    around = parent[rows]
    nested = (around >= 0) & launch[np.maximum(around, 0)]
    inner, outer = rows[nested], around[nested]
    seen[outer] |= seen[inner]
    rows = rows[~nested]
    ts = cpu["ts"].to_numpy()[rows]
    there = seen[rows]
    if there.any():
        inside = ts <= ts[there].max()
        rows, ts, there = rows[inside], ts[inside], there[inside]
    there |= _captured(trace, rows)
    untied = int((gpu["launch"].is_null().to_numpy() & ~earlier(trace)).sum())
    return Lost(len(rows), max(0, int((~there).sum()) - untied))


def _captured(trace: Trace, rows: np.ndarray) -> np.ndarray:
    """Which host rows lie between the begin and the end of a capture on their thread."""
    cpu = trace.cpu
    at = np.flatnonzero((cpu["call"] == "graph_capture").fill_null(False).to_numpy())
    if not len(at):
        return np.zeros(len(rows), dtype=np.bool_)
    begins = cpu["name"].gather(at).cast(pl.String).str.contains("(?i)begin").to_numpy()
    # rows are ordered by (thread, ts): the marker before a row is on its thread or is another's
    place = np.searchsorted(at, rows) - 1
    thread = cpu["thread"].to_numpy()
    before = at[np.maximum(place, 0)]
    return np.asarray(
        (place >= 0) & begins[np.maximum(place, 0)] & (thread[before] == thread[rows])
    )
