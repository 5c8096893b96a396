"""Calls that block the host until the GPU is done, and the GPU idle time that follows them."""

from typing import NamedTuple

import numpy as np
import polars as pl
from msgspec.structs import replace
from numpy.typing import NDArray

from advisor.core import text as t
from advisor.core.finding import Edit, Location, Select
from advisor.core.intervals import covered_length
from advisor.measure import Analysis
from advisor.measure.host.device_reads import outermost_aten
from advisor.replay.selection import selected_host
from advisor.rules.support.common import (
    MAX_CORRELATIONS,
    costliest_places,
    int_column,
    per_step,
    row_numbers,
)


class BlockingCalls(NamedTuple):
    """Blocking calls: rows of ``Analysis.syncs``, with their cost."""

    table: pl.DataFrame
    idle: NDArray[np.int64]
    """GPU idle time after each call, ns. Only the last part counts, as long as the host was
    blocked: without the call the host would be ahead by that time at most."""

    @property
    def total(self) -> int:
        """Sum of ``idle``, ns."""
        return int(self.idle.sum())

    @property
    def reads(self) -> int:
        """Number of reads and waits that the GPU idles after. A copy and its wait are one."""
        return len(np.unique(number_reads(self.table)[self.idle > 0]))

    def per_step(self, a: Analysis) -> int:
        """Return the number of reads per step, at least 1."""
        return max(1, round(self.reads / a.step_count))


TO_DEVICE_PINNED = (pl.col("direction") == "HtoD").fill_null(False) & (
    pl.col("memory") == "Pinned"
).fill_null(False)
"""Waits for copies from pinned memory to the device."""
COPY_CALLS = (
    Select(on="host", call=("memcpy", "sync_stream"), under=r"^aten::(?:to|_to_copy|copy_)$"),
)
"""Candidate of :func:`async_edit` that selects waits for copies of PyTorch."""
PINNED_CALLS = (
    Select(on="host", call=("sync_stream",), under=r"^aten::(?:to|_to_copy|copy_)$"),
    Select(on="host", call=("memcpy_blocking",)),
)
"""Candidates of :func:`async_edit` that select waits for copies from pinned memory."""


def select_blocking_calls(a: Analysis, condition: pl.Expr) -> BlockingCalls:
    """Return the rows of ``Analysis.syncs`` that meet ``condition``, without the profiler's own.

    ``condition`` may use two more columns: ``direction`` and ``memory`` (``Pinned``, ``Pageable``
    …, the host side) of the copy that the host waits for, null if there is none or it was not
    recorded."""
    gpu = a.trace.gpu
    copies = pl.DataFrame(
        {name: gpu[name].gather(a.syncs["copy"]) for name in ("copy", "src", "dst")}
    ).select(
        direction=pl.col("copy").cast(pl.String),
        memory=pl.when(pl.col("copy") == "HtoD").then("src").otherwise("dst").cast(pl.String),
    )
    table = a.syncs.hstack(copies).filter(condition & ~pl.col("profiler"))
    end = int_column(table, "idle_end")
    start = np.maximum(int_column(table, "idle_ts"), end - int_column(table, "waited"))
    return BlockingCalls(table, covered_length(start, end, a.breakdown.idle))


def with_operators(a: Analysis, blocking: BlockingCalls) -> BlockingCalls:
    """Add the GPU idle time in the operators around these calls: without the call, the host does
    not spend that time either. Several calls of an operator share it."""
    table, cpu = blocking.table, a.trace.cpu
    host = row_numbers(table["host"])
    around = outermost_aten(a)[host]
    row = np.where(around >= 0, around, host)
    start = cpu["ts"].to_numpy()[row]
    end = start + cpu["dur"].to_numpy()[row]
    until = int_column(table, "idle_end")
    since = np.maximum(int_column(table, "idle_ts"), until - int_column(table, "waited"))
    idle = a.breakdown.idle
    around_idle = covered_length(start, end, idle)
    overlap = np.maximum(start, since), np.maximum(np.minimum(end, until), np.maximum(start, since))
    around_idle -= covered_length(*overlap, idle)
    _, group, calls = np.unique(row, return_inverse=True, return_counts=True)
    return BlockingCalls(table, blocking.idle + around_idle // calls[group])


def locate_blocking(a: Analysis, blocking: BlockingCalls) -> list[Location]:
    """Find the places that lose most. The worst instance is the call that blocked."""
    instance = number_reads(blocking.table)
    return costliest_places(
        a, row_numbers(blocking.table["host"]), blocking.idle, instance=instance
    )


def number_reads(syncs: pl.DataFrame) -> NDArray[np.int64]:
    """Return the read that each of these calls belongs to. A copy and the wait for it are one."""
    return row_numbers(syncs.select(pl.coalesce("op", "host")).to_series())


def count_causes(a: Analysis, blocking: BlockingCalls) -> str:
    """Return ``aten::item 3 per step, aten::nonzero 1 per step``, the costliest first, or ``12
    times`` for a recording without steps. Programs not written with PyTorch show the runtime calls'
    names."""
    table = blocking.table.with_columns(lost=pl.Series(blocking.idle))
    if not a.trace.meta.is_pytorch:
        names = a.trace.cpu["name"].gather(row_numbers(table["host"])).cast(pl.String)
        table = table.with_columns(cause=names)
    by_cause = (
        table.group_by("cause")
        .agg(pl.col("lost").sum(), pl.coalesce("op", "host").n_unique().alias("len"))
        .sort("lost", "len", "cause", descending=[True, True, False])
    )
    return ", ".join(
        f"{cause} {_format_count(a, count)}" for cause, _, count in by_cause.head(3).iter_rows()
    )


def _format_count(a: Analysis, count: int) -> str:
    per = per_step(a)
    return f"{t.format_number(count / a.step_count)}{per}" if per else t.count_noun(count, "time")


def async_edit(a: Analysis, blocking: BlockingCalls, *candidates: Select) -> Edit:
    """Make these calls asynchronous: with the first candidate that selects every costly one of them
    and no other costly call, else call by call. A common copy direction of all is selected too."""
    costly_syncs = a.syncs.filter((pl.col("idle_ns") > 0) & ~pl.col("profiler"))
    calls = row_numbers(blocking.table["host"])
    costly_calls = calls[blocking.idle > 0]
    others = np.setdiff1d(row_numbers(costly_syncs["host"]), costly_calls)
    directions = blocking.table["direction"].unique().to_list()
    for select in candidates:
        if len(directions) == 1 and directions[0] is not None:
            select = replace(select, copy=(directions[0],))
        is_selected = selected_host(a, select)
        if is_selected[costly_calls].all() and not is_selected[others].any():
            return Edit(op="make_async", select=select)
    return make_calls_async(a, calls[np.argsort(-blocking.idle, kind="stable")])


def make_calls_async(a: Analysis, calls: NDArray[np.int64]) -> Edit:
    """Make single runtime calls asynchronous, the first ``MAX_CORRELATIONS`` of them."""
    ids = a.trace.cpu["correlation"].gather(calls[:MAX_CORRELATIONS]).drop_nulls().unique().sort()
    select = Select(on="host", kind=("runtime",), correlation=tuple(ids.to_list()))
    return Edit(op="make_async", select=select)
