"""Ranks side by side: who keeps whom waiting, and who communicates in the open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.intervals import Intervals, covered_length, subtract
from advisor.measure.comm.comms import host_work
from advisor.measure.ranks.clocks import Alignment, Times, align

if TYPE_CHECKING:
    from collections.abc import Mapping

    from advisor.measure import Analysis

__all__ = ["Alignment", "Skew", "align", "exposed_by_rank", "skew", "working"]

STRAGGLERS_SCHEMA: dict[str, Any] = {
    "rank": pl.Int64,
    "collectives": pl.Int64,
    "last": pl.Int64,
    "last_share": pl.Float64,
    "caused_wait_ns": pl.Float64,
    "caused_exposed_ns": pl.Float64,
    "wait_ns": pl.Float64,
    "exposed_wait_ns": pl.Float64,
}


class Skew(NamedTuple):
    """Arrivals at collectives, among the ranks whose traces are here.

    A rank whose trace is not here may be later than all of them: then everybody waits for it, and
    that wait is in nobody's figures. ``collectives.complete`` says where all members are here.

    ``collectives``: a row a collective inside the used steps of all its ranks: ``collective``,
    ``group``, ``bytes``, ``annotation``, ``label``, ``step``, ``seen`` (ranks here), ``complete``
    (all members are here; null: group size not known), ``last`` (rank that arrives last; null:
    all arrive within twice the alignment error), ``skew_ns`` (last arrival - first),
    ``mean_wait_ns`` (of the others; null: nobody is last).

    ``arrivals``: a row a collective and rank: ``row`` (of ``collectives``), ``rank``,
    ``arrival_ns`` (start of its kernel on the reference rank's trace), ``wait_ns`` (until the
    last rank arrives), ``exposed_wait_ns`` (the part with no compute kernel on that rank; where
    there is no device, with no operator).

    ``stragglers``: a row a rank: ``rank``, ``collectives`` (it takes part in), ``last`` (at which
    it arrives last), ``last_share`` (their share), and per step: ``caused_wait_ns`` (summed over
    those: mean wait of the others), ``caused_exposed_ns`` (its exposed part, the time that they
    lose), ``wait_ns`` and ``exposed_wait_ns`` (its own, for others).
    """

    collectives: pl.DataFrame
    arrivals: pl.DataFrame
    stragglers: pl.DataFrame
    steps: int
    """Steps over which the figures per step are taken."""


def skew(ranks: Mapping[int, Analysis], alignment: Alignment) -> Skew:
    """How late each rank comes to the collectives, and what that costs the others.

    Raises ValueError when ``alignment`` says that the ranks could not be aligned: then skew is
    not measured.
    """
    matches = alignment.matches
    if matches is None or alignment.error_ns is None:
        raise ValueError(f"skew is not measured: {alignment.reason}")
    columns = [c for c, number in enumerate(matches.ranks) if number in alignment.shift_ns]
    numbers = [matches.ranks[c] for c in columns]
    shift = np.array([alignment.shift_ns[n] for n in numbers], dtype=np.float64)
    start, end = matches.start[:, columns], matches.end[:, columns]
    there = np.isfinite(start)
    usable = there.sum(axis=1) > 1
    for c, number in enumerate(numbers):
        usable &= ~there[:, c] | _touches(ranks[number], start[:, c], end[:, c])
    table = matches.table.filter(pl.Series(usable, dtype=pl.Boolean))
    start, there = start[usable], there[usable]
    arrival = start + shift
    error = alignment.error_ns
    latest = np.nanmax(arrival, axis=1) if len(arrival) else np.zeros(0)
    wait = latest[:, None] - arrival
    spread = np.nanmax(wait, axis=1) if len(wait) else np.zeros(0)
    # among those that arrive at the same instant (traces in whole microseconds) none is last
    late = np.where(there, wait, np.inf) <= 0
    decided = (spread > 2 * error) & (late.sum(axis=1) == 1)
    last = np.where(decided, late.argmax(axis=1), -1) if len(late) else np.zeros(0, dtype=int)
    exposed = np.full(wait.shape, np.nan)
    for c, number in enumerate(numbers):
        a, rows = ranks[number], there[:, c]
        begin = start[rows, c].astype(np.int64)
        until = begin + wait[rows, c].astype(np.int64)
        exposed[rows, c] = covered_length(begin, until, subtract(a.spans, working(a)))

    others = there.copy()
    others[np.arange(len(last))[last >= 0], last[last >= 0]] = False
    peers = np.maximum(others.sum(axis=1), 1)
    mean_wait = np.where(others, wait, 0).sum(axis=1) / peers
    mean_exposed = np.where(others, exposed, 0).sum(axis=1) / peers
    steps = _common_steps([ranks[n] for n in numbers])
    who = pl.Series([*numbers, None], dtype=pl.Int64)
    seen = pl.Series(there.sum(axis=1), dtype=pl.Int64)
    collectives = table.select(
        "collective", "group", "bytes", "annotation", "label", "step"
    ).with_columns(
        seen=seen,
        complete=seen == table["group_size"],
        last=who.gather(np.where(last >= 0, last, len(numbers))),
        skew_ns=spread,
        mean_wait_ns=pl.Series(mean_wait).set(pl.Series(last < 0), None),
    )
    row, column = np.nonzero(there)
    arrivals = pl.DataFrame(
        {
            "row": row,
            "rank": np.array(numbers)[column],
            "arrival_ns": np.rint(arrival[there]).astype(np.int64),
            "wait_ns": np.rint(wait[there]).astype(np.int64),
            "exposed_wait_ns": exposed[there].astype(np.int64),
        }
    )
    lines = []
    for c, number in enumerate(numbers):
        took, caused = int(there[:, c].sum()), last == c
        lines.append(
            (
                number,
                took,
                int(caused.sum()),
                float(caused.sum()) / took if took else None,
                float(mean_wait[caused].sum()) / steps,
                float(mean_exposed[caused].sum()) / steps,
                float(np.nansum(wait[:, c])) / steps,
                float(np.nansum(exposed[:, c])) / steps,
            )
        )
    stragglers = pl.DataFrame(lines, schema=STRAGGLERS_SCHEMA, orient="row")
    return Skew(collectives, arrivals, stragglers, steps)


def working(a: Analysis) -> Intervals:
    """When a rank computes: kernels on its device, operators on a host without one."""
    return host_work(a) if a.device_id is None else a.breakdown.compute


def _touches(a: Analysis, start: Times, end: Times) -> NDArray[np.bool_]:
    """Which intervals (NaN: none) touch the used steps."""
    low, high = (np.nan_to_num(t, nan=-1.0).astype(np.int64) for t in (start, end))
    return covered_length(low, high, a.spans) > 0


def _common_steps(analyses: list[Analysis]) -> int:
    """Used steps that all ranks have, by name; at least 1."""
    names = [set(a.steps.used["name"].to_list()) for a in analyses]
    return max(1, len(set.intersection(*names)))


def exposed_by_rank(ranks: Mapping[int, Analysis]) -> pl.DataFrame:
    """Communication a rank and step, ns: ``rank``, ``step`` (name), ``step_ns``, ``exposed`` (not
    under compute), ``communication`` (all). Ranks without device work are left out."""
    parts = []
    for number, a in ranks.items():
        if a.device_id is None:
            continue
        used = a.steps.used
        start, end = used["ts"].to_numpy(), used["end"].to_numpy()
        parts.append(
            pl.DataFrame(
                {
                    "rank": np.full(used.height, number, dtype=np.int64),
                    "step": used["name"],
                    "step_ns": used["dur"],
                    "exposed": covered_length(start, end, a.breakdown.communication),
                    "communication": covered_length(start, end, a.breakdown.all_communication),
                }
            )
        )
    schema = {"rank": pl.Int64, "step": pl.String} | dict.fromkeys(
        ("step_ns", "exposed", "communication"), pl.Int64
    )
    return pl.concat(parts) if parts else pl.DataFrame(schema=schema)
