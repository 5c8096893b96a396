"""How much of one rank's collectives is waiting for the others, where their traces are here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

if TYPE_CHECKING:
    from advisor.measure.ranks.join import Joined


def collective_waits(joined: Joined, place: int) -> pl.DataFrame:
    """The collectives of the steps of one rank (``place`` in the summaries): ``collective``,
    ``group`` (its name; empty: none), ``bytes`` and ``size`` (0: unknown), ``step``, ``wait`` (ns
    until the last member arrives), ``transfer`` (ns from there to its end) and ``complete`` (all
    members are here and on one clock; otherwise one that is not may come later).

    A send and its receive wait for each other too: a taker for what is computed before it is sent.
    """
    schema = {
        "collective": pl.String, "group": pl.String, "bytes": pl.Int64, "size": pl.Int64,
        "step": pl.Int64, "wait": pl.Float64, "transfer": pl.Float64, "complete": pl.Boolean,
    }  # fmt: skip
    if not joined.rows:
        return pl.DataFrame(schema=schema)
    aligned = np.isfinite(joined.clocks.shift)[joined.rank]
    size = np.array([key.size for key in joined.keys], dtype=np.int64)[joined.key]
    every = np.minimum.reduceat(aligned.astype(np.int8), joined.first[:-1]) > 0
    complete = every & (joined.seen == size) & ~joined.clocks.broken
    latest = np.maximum.reduceat(np.where(aligned, joined.start, -np.inf), joined.first[:-1])
    which = np.repeat(np.arange(joined.rows), joined.seen)
    cells = np.flatnonzero((joined.rank == place) & (joined.step >= 0))
    row = which[cells]
    start, end = joined.start[cells], joined.end[cells]
    arrived = np.clip(latest[row], start, end)
    keys = [joined.keys[number] for number in joined.key[row].tolist()]
    return pl.DataFrame(
        {
            "collective": [key.kind for key in keys],
            "group": [key.group for key in keys],
            "bytes": [key.message for key in keys],
            "size": size[row],
            "step": joined.step[cells],
            "wait": arrived - start,
            "transfer": end - arrived,
            "complete": complete[row],
        },
        schema=schema,
    )
