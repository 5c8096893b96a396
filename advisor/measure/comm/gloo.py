"""Collectives of processes without a device, which gloo's threads run on the host."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.intervals import EMPTY, Intervals, intersect, subtract, union
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
_STARTS, _WAIT = r"^_?c10d\w*::", r"::wait_tensor$"
_PREFIX = re.compile(r"^(?:_?c10d\w*::|gloo:)")


def has_host_collectives(a: Analysis) -> bool:
    """Return whether there is no device, and gloo has run."""
    return a.device_id is None and bool(_ranges(a).size)


def list_on_host(a: Analysis) -> pl.DataFrame:
    """List every collective of gloo in the whole trace, by start; of a trace without device work.

    Columns: those of ``messages.collective_facts``, ``host`` (row of ``trace.cpu``: gloo's range),
    ``op`` (row of the operator that started it; null: it is not in the trace), ``ts``, ``dur`` and
    ``launch_ts`` (ns). A barrier is an all-reduce of one byte. ``group`` and ``ranks`` are null,
    ``group_size`` is that of the job: gloo's ranges do not say whose they are.

    A collective begins when it is called, because waking gloo's thread is part of what it costs.
    Several threads work at a queue of collectives, and all of them may wait for the same process.
    So that no wait counts twice, it begins no earlier than the one before it has ended, as it does
    on a device's stream."""
    trace = a.trace
    rows = _ranges(a)
    rows = rows[np.argsort(trace.cpu["ts"].to_numpy()[rows], kind="stable")]
    cpu = trace.cpu[rows]
    ts = cpu["ts"].to_numpy()
    end = np.maximum.accumulate(ts + cpu["dur"].to_numpy()) if len(ts) else ts
    op = _started_by(a, rows)
    called = np.where(op >= 0, np.append(trace.cpu["ts"].to_numpy(), 0)[op], ts)
    start = called.copy()
    start[1:] = np.maximum(called[1:], end[:-1])
    none = pl.Series([None], dtype=pl.Int32).new_from_index(0, len(rows))
    work = pl.DataFrame({"launch": pl.Series(rows, dtype=pl.Int32), "op": none, "comm": none})
    kinds = map_names(cpu["name"], kind_of, pl.String)
    facts = collective_facts(trace, work, kinds, trace.meta.world_size)
    return facts.with_columns(
        bytes=pl.coalesce("bytes", _sent(a, rows)),
        annotation=_annotation(a, op),
        host=pl.Series(rows, dtype=pl.Int32),
        op=nullable_rows(op),
        ts=start,
        dur=np.maximum(end - start, 0),
        launch_ts=called,
    )


def host_work(a: Analysis) -> Intervals:
    """Return the intervals inside ``spans`` in which an operator runs on any host thread. Operators
    that start a collective or wait for one are left out, with their children."""
    cpu = a.trace.cpu
    rows = ((cpu["kind"] == "op") & ~name_matches(cpu["name"], COLLECTIVE_WAITS)).to_numpy()
    ts = cpu["ts"].to_numpy()[rows]
    return intersect(union(ts, ts + cpu["dur"].to_numpy()[rows]), a.spans)


def time_on_host(a: Analysis, table: pl.DataFrame | None = None) -> tuple[Intervals, Intervals]:
    """Return the intervals inside ``spans`` in which these rows of :func:`list_on_host` run
    (default: all of them), and the part in which no operator runs."""
    if table is None:
        if not has_host_collectives(a):
            return EMPTY, EMPTY
        table = list_on_host(a)
    ts = table["ts"].to_numpy()
    every = intersect(union(ts, ts + table["dur"].to_numpy()), a.spans)
    return every, subtract(every, host_work(a))


def _ranges(a: Analysis) -> Rows:
    cpu = a.trace.cpu
    return np.flatnonzero(
        ((cpu["kind"] == "annotation") & name_matches(cpu["name"], GLOO_WORK)).to_numpy()
    )


def _sent(a: Analysis, ranges: Rows) -> pl.Series:
    """Return the bytes given to each range of a kind without a message of its own (a gather), and 1
    for a barrier; null: not recorded."""
    inputs = a.trace.cpu["inputs"].gather(ranges)
    sent = {code: bytes_of(a.trace, code) for code in inputs.drop_nulls().unique().to_list()}
    barrier = name_matches(a.trace.cpu["name"].gather(ranges), "barrier").to_list()
    return pl.Series(
        [
            1 if idle else sent.get(code)
            for code, idle in zip(inputs.to_list(), barrier, strict=True)
        ],
        dtype=pl.Int64,
    )


def _word(name: str) -> str:
    """Return the word that a range shares with its operator's name: ``all_reduce``, ``barrier``."""
    word = re.sub(r"[^a-z]", "", _PREFIX.sub("", name.lower()))
    return "barrier" if "barrier" in word else kind_of(word) or word


def _started_by(a: Analysis, ranges: Rows) -> Rows:
    """Find the row of the operator that started each range, -1: none. gloo starts work in call
    order: the n-th range of a kind is of the n-th operator of that kind before it. The rest is
    matched without the kind: gloo's reduce-scatter is an all-reduce."""
    cpu = a.trace.cpu
    names = cpu["name"]
    called = (cpu["kind"] == "op") & name_matches(names, _STARTS) & ~name_matches(names, _WAIT)
    starts = called.to_numpy()
    parent = parent_rows(a.trace)
    rows = np.flatnonzero(starts)
    rows = rows[climb_stack(parent, starts, np.append(parent, -1)[rows]) < 0]
    rows = rows[np.argsort(cpu["ts"].to_numpy()[rows], kind="stable")]
    ts = cpu["ts"].to_numpy()
    words = [map_names(names.gather(each), _word, pl.String) for each in (ranges, rows)]
    result = np.full(len(ranges), -1, dtype=np.int64)
    free = np.ones(len(rows), dtype=np.bool_)
    for word in [*words[0].drop_nulls().unique().sort(), None]:
        own, calls = result < 0, free
        if word is not None:
            own, calls = (
                part & (texts == word).fill_null(False).to_numpy()
                for part, texts in zip((own, calls), words, strict=True)
            )
        place, candidates = np.flatnonzero(own), np.flatnonzero(calls)
        taken = _in_order(ts[rows[candidates]], ts[ranges[place]])
        known = taken >= 0
        result[place[known]] = rows[candidates[taken[known]]]
        free[candidates[taken[known]]] = False
    return result


def _in_order(called: Rows, began: Rows) -> Rows:
    """Match each range with its call, both in order of time, -1: none. Each call has one range, and
    none that begins before it."""
    if not len(began):
        return np.zeros(0, dtype=np.int64)
    before = np.searchsorted(called, began, side="right")
    place = np.arange(len(began))
    left = np.minimum.accumulate(np.append(1, before[:-1] - place[:-1]))
    taken = place - 1 + left
    return np.where(taken < before, taken, -1)


def _annotation(a: Analysis, op: Rows) -> pl.Series:
    """Return the user's nearest annotation around each operator, without the steps'."""
    cpu = a.trace.cpu
    user = (cpu["kind"] == "annotation") & ~name_matches(cpu["name"], a.trace.meta.step_names)
    near = climb_stack(parent_rows(a.trace), user.to_numpy(), op)
    return cpu["name"].gather(nullable_rows(near)).cast(pl.String)
