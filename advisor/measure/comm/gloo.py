"""Collectives of processes without a device, which gloo's threads run on the host."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.intervals import EMPTY, Intervals, intersect, intervals_of, subtract
from advisor.measure.comm.messages import bytes_of, collective_facts, kind_of
from advisor.measure.host.names import map_names, name_matches
from advisor.measure.host.stacks import climb_stack, nullable_rows, parent_rows

if TYPE_CHECKING:
    from advisor.measure import Analysis

Rows = NDArray[np.int64]

GLOO_WORK = r"^gloo:"
"""Prefix of the ranges that PyTorch puts around gloo's work (ProcessGroupGloo.cpp)."""
COLLECTIVE_WAITS = r"^(_?c10d|gloo:)"
"""Operators that start a collective or wait for one: a thread in them does not work."""
_STARTING_OPS, _WAITING_OP = r"^_?c10d\w*::", r"::wait_tensor$"
_PREFIX = re.compile(r"^(?:_?c10d\w*::|gloo:)")


def has_host_collectives(a: Analysis) -> bool:
    """Return whether there is no device but gloo has run."""
    return a.device_id is None and bool(_find_ranges(a).size)


def list_on_host(a: Analysis) -> pl.DataFrame:
    """List every collective of gloo in a trace without device work, by start.

    Columns: those of ``messages.collective_facts``, ``host`` (row of ``trace.cpu``: gloo's range),
    ``op`` (row of the operator that started it; null if not in the trace), ``ts``, ``dur`` and
    ``launch_ts`` (ns). A barrier counts as an all-reduce of one byte. ``group`` and ``ranks`` are
    null and ``group_size`` is the size of the job, because gloo's ranges do not name their group.

    A collective begins when it is called, because waking gloo's thread is part of its cost. Several
    threads process a queue of collectives, and all of them may wait for the same process. So that
    no wait counts twice, a collective begins no earlier than the previous one ends, as on a
    device's stream."""
    trace = a.trace
    rows = _find_ranges(a)
    rows = rows[np.argsort(trace.cpu["ts"].to_numpy()[rows], kind="stable")]
    cpu = trace.cpu[rows]
    ts = cpu["ts"].to_numpy()
    end = np.maximum.accumulate(ts + cpu["dur"].to_numpy()) if len(ts) else ts
    op = _find_starting_ops(a, rows)
    call_ts = np.where(op >= 0, np.append(trace.cpu["ts"].to_numpy(), 0)[op], ts)
    start = call_ts.copy()
    start[1:] = np.maximum(call_ts[1:], end[:-1])
    nulls = pl.Series([None], dtype=pl.Int32).new_from_index(0, len(rows))
    work = pl.DataFrame({"launch": pl.Series(rows, dtype=pl.Int32), "op": nulls, "comm": nulls})
    kinds = map_names(cpu["name"], kind_of, pl.String)
    facts = collective_facts(trace, work, kinds, trace.meta.world_size)
    return facts.with_columns(
        bytes=pl.coalesce("bytes", _count_sent_bytes(a, rows)),
        annotation=_find_annotations(a, op),
        host=pl.Series(rows, dtype=pl.Int32),
        op=nullable_rows(op),
        ts=start,
        dur=np.maximum(end - start, 0),
        launch_ts=call_ts,
    )


def host_work(a: Analysis) -> Intervals:
    """Return the intervals inside ``spans`` in which an operator runs on any host thread. Operators
    that start a collective or wait for one are left out, with their children."""
    cpu = a.trace.cpu
    rows = ((cpu["kind"] == "op") & ~name_matches(cpu["name"], COLLECTIVE_WAITS)).to_numpy()
    return intersect(intervals_of(cpu, rows), a.spans)


def time_on_host(a: Analysis, table: pl.DataFrame | None = None) -> tuple[Intervals, Intervals]:
    """Return the intervals inside ``spans`` in which these rows of :func:`list_on_host` run
    (default: all of them), and the part in which no operator runs."""
    if table is None:
        if not has_host_collectives(a):
            return EMPTY, EMPTY
        table = list_on_host(a)
    all_time = intersect(intervals_of(table), a.spans)
    return all_time, subtract(all_time, host_work(a))


def _find_ranges(a: Analysis) -> Rows:
    cpu = a.trace.cpu
    return np.flatnonzero(
        ((cpu["kind"] == "annotation") & name_matches(cpu["name"], GLOO_WORK)).to_numpy()
    )


def _count_sent_bytes(a: Analysis, ranges: Rows) -> pl.Series:
    """Return the input bytes of each range, for kinds without their own message (a gather), and 1
    for a barrier. Null if not recorded."""
    inputs = a.trace.cpu["inputs"].gather(ranges)
    sent = {code: bytes_of(a.trace, code) for code in inputs.drop_nulls().unique().to_list()}
    is_barrier = name_matches(a.trace.cpu["name"].gather(ranges), "barrier").to_list()
    return pl.Series(
        [
            1 if barrier else sent.get(code)
            for code, barrier in zip(inputs.to_list(), is_barrier, strict=True)
        ],
        dtype=pl.Int64,
    )


def _find_word(name: str) -> str:
    """Return the word that a range shares with its operator's name: ``all_reduce``, ``barrier``."""
    word = re.sub(r"[^a-z]", "", _PREFIX.sub("", name.lower()))
    return "barrier" if "barrier" in word else kind_of(word) or word


def _find_starting_ops(a: Analysis, ranges: Rows) -> Rows:
    """Find the row of the operator that started each range, or -1. gloo starts work in call order:
    the n-th range of a kind belongs to the n-th earlier operator of that kind. The remaining ranges
    are matched without the kind, since gloo's reduce-scatter is an all-reduce."""
    cpu = a.trace.cpu
    names = cpu["name"]
    is_call = (
        (cpu["kind"] == "op")
        & name_matches(names, _STARTING_OPS)
        & ~name_matches(names, _WAITING_OP)
    )
    is_start = is_call.to_numpy()
    parent = parent_rows(a.trace)
    rows = np.flatnonzero(is_start)
    rows = rows[climb_stack(parent, is_start, np.append(parent, -1)[rows]) < 0]
    rows = rows[np.argsort(cpu["ts"].to_numpy()[rows], kind="stable")]
    ts = cpu["ts"].to_numpy()
    words = [map_names(names.gather(group), _find_word, pl.String) for group in (ranges, rows)]
    result = np.full(len(ranges), -1, dtype=np.int64)
    is_free = np.ones(len(rows), dtype=np.bool_)
    for word in [*words[0].drop_nulls().unique().sort(), None]:
        is_open, is_candidate = result < 0, is_free
        if word is not None:
            is_open, is_candidate = (
                part & (texts == word).fill_null(False).to_numpy()
                for part, texts in zip((is_open, is_candidate), words, strict=True)
            )
        open_ranges, candidates = np.flatnonzero(is_open), np.flatnonzero(is_candidate)
        call_index = _match_in_order(ts[rows[candidates]], ts[ranges[open_ranges]])
        is_matched = call_index >= 0
        result[open_ranges[is_matched]] = rows[candidates[call_index[is_matched]]]
        is_free[candidates[call_index[is_matched]]] = False
    return result


def _match_in_order(call_ts: Rows, range_ts: Rows) -> Rows:
    """Match each range with its call, both in order of time, or return -1. Each call has one range,
    which begins after the call."""
    if not len(range_ts):
        return np.zeros(0, dtype=np.int64)
    earlier_calls = np.searchsorted(call_ts, range_ts, side="right")
    index = np.arange(len(range_ts))
    offset = np.minimum.accumulate(np.append(1, earlier_calls[:-1] - index[:-1]))
    call_index = index - 1 + offset
    return np.where(call_index < earlier_calls, call_index, -1)


def _find_annotations(a: Analysis, op: Rows) -> pl.Series:
    """Return the user's nearest annotation around each operator, without step marks."""
    cpu = a.trace.cpu
    is_user = (cpu["kind"] == "annotation") & ~name_matches(cpu["name"], a.trace.meta.step_names)
    nearest = climb_stack(parent_rows(a.trace), is_user.to_numpy(), op)
    return cpu["name"].gather(nullable_rows(nearest)).cast(pl.String)
