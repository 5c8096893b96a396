"""Host time around reads of device values: loops of reads, work on what was read, and round trips
through the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.intervals import (
    EMPTY,
    Intervals,
    covered_length,
    intersect,
    subtract,
    union,
    union_of,
)
from advisor.core.trace import LOADER
from advisor.measure.host.names import name_matches
from advisor.measure.host.stacks import (
    ENGINE_NODE,
    climb_stack,
    innermost_ancestor,
    is_operator,
    outermost_ancestor,
    outermost_operator,
    parent_rows,
)

if TYPE_CHECKING:
    from advisor.measure import Analysis

MIN_REPEATS = 10
"""Reads in a row, each after the same operators, from which they are a loop."""
PATTERNS = 4
"""Different reads in one round of a loop, at most."""
MAX_APART = 5
"""Operators from one read of a loop to the next, at most: with more, the loop does other work."""
VALUE = r"^aten::(?:item|is_nonzero|_local_scalar_dense|equal|allclose)$"
COPY = r"^aten::(?:to|_to_copy|copy_|_copy_from\w*)$"
"""Operators that read a value (VALUE) or copy (COPY); not those that read an output's size."""
MIN_BYTES = 4096
"""Size from which a read is of data, bytes: single values are logged or compared, not worked on."""
MIN_WORK_NS = 200_000
"""Host time without a launch after a read, ns, from which it is work."""
MIN_OPERATORS = 0.5
"""Share of the time between a copy to the host and the copy back that CPU operators must fill: they
are the work that the data was fetched for."""
DELIBERATE = r"^Optimizer\.step#|(?i)offload|save_on_cpu|saved_tensors_hooks"
"""Ranges and frames in which data is kept on the host on purpose."""

TRIPS_SCHEMA: dict[str, Any] = {
    "gpu": pl.Int64,  # row of trace.gpu: the copy to the host
    "back": pl.Int64,  # row of trace.gpu: the copy back
    "bytes": pl.Int64,
    "launch": pl.Int64,  # row of trace.cpu that made the first copy
    "begin": pl.Int64,  # ns: the outermost operator around the first copy begins
    "end": pl.Int64,  # ns: the outermost operator around the second ends
}


class _Reads(NamedTuple):
    """Reads of device values that the host waited for, in order of time."""

    copy: NDArray[np.int64]
    """Rows of ``trace.gpu``."""
    top: NDArray[np.int64]
    """Rows of ``trace.cpu``: the outermost aten operator around, else the call itself."""


def _reads(a: Analysis) -> _Reads:
    gpu = a.trace.gpu
    syncs = a.syncs.filter(~pl.col("profiler") & pl.col("copy").is_not_null())
    syncs = syncs.filter((gpu["copy"].gather(syncs["copy"]) == "DtoH").fill_null(False))
    host = syncs["host"].to_numpy().astype(np.int64)
    top = a.outermost_aten[host]
    top = np.where(top >= 0, top, host)
    top, first = np.unique(top, return_index=True)
    copy = syncs["copy"].to_numpy().astype(np.int64)[first]
    order = np.argsort(a.trace.cpu["ts"].to_numpy()[top], kind="stable")
    return _Reads(copy[order], top[order].astype(np.int64))


def outermost_aten(a: Analysis) -> NDArray[np.int64]:
    """Return the outermost aten operator around each row, aligned with ``trace.cpu``; -1: none. It
    is not the compiled function or the autograd node that it runs in."""
    named = name_matches(a.trace.cpu["name"], r"^aten::").to_numpy() & is_operator(a.trace)
    return outermost_ancestor(parent_rows(a.trace), named).astype(np.int64)


def backward_nodes(a: Analysis) -> NDArray[np.int64]:
    """Return the autograd node around each row, aligned with ``trace.cpu``; -1: none."""
    node = name_matches(a.trace.cpu["name"], ENGINE_NODE).to_numpy()
    return innermost_ancestor(parent_rows(a.trace), node & is_operator(a.trace)).astype(np.int64)


def read_loops(a: Analysis) -> Intervals:
    """Find host time of loops that read one device value after the other, each after the same
    operators: a norm and an ``item()`` for every parameter."""
    if a.device_id is None or a.syncs.is_empty():
        return EMPTY
    cpu = a.trace.cpu
    tops = a.outermost_aten
    outer = np.flatnonzero(tops == np.arange(len(tops)))
    reads = np.intersect1d(_reads(a).top, outer)
    reads = reads[name_matches(cpu["name"], f"{VALUE}|{COPY}").to_numpy()[reads]]
    if len(reads) <= MIN_REPEATS:
        return EMPTY
    place = np.searchsorted(outer, reads)
    names = cpu["name"].to_physical().to_numpy()[outer]
    thread = cpu["thread"].to_numpy()[outer]
    again = np.zeros(len(place), dtype=bool)
    seen: list[bytes] = []
    for number in range(1, len(place)):  # thousands a step at most, some operators each
        first, last = place[number - 1] + 1, place[number] + 1
        if thread[first - 1] != thread[last - 1] or last - first > MAX_APART:
            seen = []
            continue
        key = names[first:last].tobytes()
        again[number] = key in seen
        seen = [*seen[1 - PATTERNS :], key]
    edge = np.flatnonzero(np.diff(np.concatenate([[0], again.astype(np.int8), [0]])))
    begin, end = edge[::2], edge[1::2] - 1
    long = end - begin + 1 >= MIN_REPEATS
    ts = cpu["ts"].to_numpy()
    start = ts[outer[place[begin[long] - 1] + 1]]
    finish = ts[reads[end[long]]] + cpu["dur"].to_numpy()[reads[end[long]]]
    return intersect(union(start, finish), a.spans)


class _Following(NamedTuple):
    """Intervals from the end of each read to the start of the host's next launch, ns."""

    begin: NDArray[np.int64]
    end: NDArray[np.int64]
    launch: NDArray[np.int64]
    """Row of ``trace.cpu`` of the next launch; -1: there is none."""


def _following(a: Analysis, reads: _Reads) -> _Following:
    cpu = a.trace.cpu
    ts = cpu["ts"].to_numpy()
    launches = a.trace.gpu["launch"].drop_nulls().unique().to_numpy().astype(np.int64)
    launches = launches[np.argsort(ts[launches], kind="stable")]
    tops = outermost_operator(a.trace)
    begin = ts[reads.top] + cpu["dur"].to_numpy()[reads.top]
    place = np.searchsorted(ts[launches], begin, side="left")
    known = place < len(launches)
    launch = np.where(known, launches[np.minimum(place, len(launches) - 1)], -1)
    top = np.where(tops[launch] >= 0, tops[launch], launch)
    end = np.where(known, np.maximum(ts[top], begin), begin)
    return _Following(begin, end, launch)


def _loading(a: Analysis) -> Intervals:
    """Return waits for the next batch."""
    cpu = a.trace.cpu
    rows = name_matches(cpu["name"], LOADER).to_numpy()
    ts = cpu["ts"].to_numpy()[rows]
    return union(ts, ts + cpu["dur"].to_numpy()[rows])


def find_time_after_reads(a: Analysis) -> Intervals:
    """Find host time from the end of a read of data to the next launch, without waits for the next
    batch: the host works on what it has read, and launches nothing meanwhile. Round trips are left
    out."""
    if a.device_id is None or a.syncs.is_empty():
        return EMPTY
    reads = _reads(a)
    size = a.trace.gpu["bytes"].gather(reads.copy).fill_null(0).to_numpy()
    reads = _Reads(reads.copy[size >= MIN_BYTES], reads.top[size >= MIN_BYTES])
    if not len(reads.top):
        return EMPTY
    begin, end, _ = _following(a, reads)
    loading = _loading(a)
    long = end - begin - covered_length(begin, end, loading) >= MIN_WORK_NS
    apart = union_of(loading, a.trip_intervals)
    return intersect(subtract(union(begin[long], end[long]), apart), a.spans)


def round_trips(a: Analysis) -> pl.DataFrame:
    """Find copies to the host that the next launch copies back, byte for byte, after operators on
    the CPU: the columns of TRIPS_SCHEMA. Data that is kept on the host on purpose is left out."""
    empty = pl.DataFrame(schema=TRIPS_SCHEMA)
    if a.device_id is None or a.syncs.is_empty():
        return empty
    reads = _reads(a)
    if not len(reads.top):
        return empty
    cpu, gpu = a.trace.cpu, a.trace.gpu
    follow = _following(a, reads)
    copies = gpu.with_row_index("back").filter(
        (pl.col("copy") == "HtoD") & pl.col("launch").is_not_null()
    )
    back = dict(zip(copies["launch"].to_list(), copies["back"].to_list(), strict=True))
    second = np.array([back.get(int(row), -1) for row in follow.launch], dtype=np.int64)
    size = gpu["bytes"].fill_null(0).to_numpy()
    good = (second >= 0) & (size[reads.copy] >= MIN_BYTES) & (size[reads.copy] == size[second])
    tops = outermost_operator(a.trace)
    own = np.flatnonzero(tops == np.arange(len(tops)))
    ts, dur = cpu["ts"].to_numpy(), cpu["dur"].to_numpy()
    at_work = union(ts[own], ts[own] + dur[own])
    inside = covered_length(follow.begin, follow.end, at_work)
    good &= inside >= np.maximum(MIN_OPERATORS * (follow.end - follow.begin), 1)
    kept = name_matches(cpu["name"], DELIBERATE).to_numpy()
    good &= climb_stack(parent_rows(a.trace), kept, reads.top) < 0
    good &= climb_stack(parent_rows(a.trace), kept, follow.launch) < 0
    after = np.where(tops[follow.launch] >= 0, tops[follow.launch], follow.launch)
    return pl.DataFrame(
        {
            "gpu": reads.copy[good],
            "back": second[good],
            "bytes": size[reads.copy[good]],
            "launch": gpu["launch"].gather(reads.copy[good]),
            "begin": ts[reads.top[good]],
            "end": (ts + dur)[after[good]],
        },
        schema=TRIPS_SCHEMA,
        strict=False,
    )


def trip_intervals(a: Analysis) -> Intervals:
    """Return the intervals of round trips: to the host, work there, and back."""
    trips = a.round_trips
    return intersect(union(trips["begin"].to_numpy(), trips["end"].to_numpy()), a.spans)
