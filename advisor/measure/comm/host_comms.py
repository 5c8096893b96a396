"""Collectives of processes that train on CPUs: gloo runs them in threads of the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.intervals import Intervals, intersect, union
from advisor.measure.comm.messages import COLLECTIVES, kind_of
from advisor.measure.host.names import map_names, name_matches

if TYPE_CHECKING:
    from advisor.measure import Analysis

WORK = r"^gloo:"
"""How PyTorch begins the names of the ranges around gloo's work (ProcessGroupGloo.cpp)."""
WAITS = r"^(_?c10d|gloo:)"
"""Operators that start a collective or wait for one: a thread in them does not work."""


def has_host_collectives(a: Analysis) -> bool:
    """Whether there is no device, and gloo has run."""
    return a.device_id is None and bool(_rows(a).size)


def describe_on_host(a: Analysis) -> pl.DataFrame:
    """Every collective of gloo in the whole trace, by start; of a trace without device work.

    Columns, as far as ``comms.describe`` has them: ``collective``, ``ts`` and
    ``dur`` (ns), ``launch_ts``, ``group_size`` (all of the job; null: not told). ``bytes``,
    ``group``, ``ranks``, ``sequence`` and ``annotation`` are null: gloo's ranges tell none of it.

    Several threads work at a queue of collectives, and all of them may wait for the same process.
    So that no wait counts twice, a collective begins when the one before it has ended, as it does
    on a device's stream.
    """
    cpu = a.trace.cpu[_rows(a)].sort("ts")
    ts = cpu["ts"].to_numpy()
    end = np.maximum.accumulate(ts + cpu["dur"].to_numpy()) if len(ts) else ts
    start = ts.copy()
    start[1:] = np.maximum(ts[1:], end[:-1])
    nothing = pl.lit(None)
    return pl.DataFrame({"ts": start, "dur": np.maximum(end - start, 0), "launch_ts": ts}).select(
        pl.all(),
        collective=map_names(cpu["name"], kind_of, pl.String).cast(
            pl.Enum(COLLECTIVES), strict=False
        ),
        bytes=nothing.cast(pl.Int64),
        group=nothing.cast(pl.String),
        group_size=pl.lit(a.trace.meta.world_size, dtype=pl.Int64),
        ranks=nothing.cast(pl.String),
        sequence=nothing.cast(pl.Int64),
        source=nothing.cast(pl.Int64),
        target=nothing.cast(pl.Int64),
        annotation=nothing.cast(pl.String),
    )


def host_work(a: Analysis) -> Intervals:
    """When operators run on any thread of the host, inside ``spans``; not those that start a
    collective or wait for one, and what runs inside of those."""
    cpu = a.trace.cpu
    rows = ((cpu["kind"] == "op") & ~name_matches(cpu["name"], WAITS)).to_numpy()
    ts = cpu["ts"].to_numpy()[rows]
    return intersect(union(ts, ts + cpu["dur"].to_numpy()[rows]), a.spans)


def _rows(a: Analysis) -> NDArray[np.int64]:
    cpu = a.trace.cpu
    return np.flatnonzero(
        ((cpu["kind"] == "annotation") & name_matches(cpu["name"], WORK)).to_numpy()
    )
