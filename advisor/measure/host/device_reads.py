"""Host time around reads of device values: loops of reads, work on the values, and round trips
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
    intervals_of,
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

MIN_LOOP_READS = 10
"""Minimum number of consecutive reads, each after the same operators, that form a loop."""
MAX_READS_PER_ROUND = 4
"""Maximum number of different reads in one round of a loop."""
MAX_OPERATORS_BETWEEN = 5
"""Maximum operators from one read of a loop to the next: with more, the loop does other work."""
VALUE = r"^aten::(?:item|is_nonzero|_local_scalar_dense|equal|allclose)$"
COPY = r"^aten::(?:to|_to_copy|copy_|_copy_from\w*)$"
"""Operators that read a value (VALUE) or copy (COPY), without those that read an output's size."""
_MIN_BYTES = 4096
"""Minimum bytes of a read of data: single values are logged or compared, not processed."""
MIN_WORK_NS = 200_000
"""Minimum host time without a launch after a read that counts as work, ns."""
_MIN_OPERATOR_SHARE = 0.5
"""Minimum share of CPU operators in the time between a copy to the host and the copy back: they are
the work that the data was fetched for."""
DELIBERATE = r"^Optimizer\.step#|(?i)offload|save_on_cpu|saved_tensors_hooks"
"""Ranges and frames in which data is kept on the host on purpose."""

TRIPS_SCHEMA: dict[str, Any] = {
    "gpu": pl.Int64,  # row of trace.gpu: the copy to the host
    "back": pl.Int64,  # row of trace.gpu: the copy back
    "bytes": pl.Int64,
    "launch": pl.Int64,  # row of trace.cpu that made the first copy
    "start": pl.Int64,  # ns: the outermost operator around the first copy begins
    "end": pl.Int64,  # ns: the outermost operator around the second ends
}


class _Reads(NamedTuple):
    """Reads of device values that the host waited for, in order of time."""

    copy: NDArray[np.int64]
    """Rows of ``trace.gpu``."""
    top: NDArray[np.int64]
    """Rows of ``trace.cpu``: the outermost aten operator around, else the call itself."""


def _find_reads(a: Analysis) -> _Reads:
    gpu = a.trace.gpu
    syncs = a.syncs.filter(~pl.col("profiler") & pl.col("copy").is_not_null())
    syncs = syncs.filter((gpu["copy"].gather(syncs["copy"]) == "DtoH").fill_null(False))
    host = syncs["host"].to_numpy().astype(np.int64)
    top = a.outermost_aten[host]
    top = np.where(top >= 0, top, host)
    top, first_index = np.unique(top, return_index=True)
    copy = syncs["copy"].to_numpy().astype(np.int64)[first_index]
    order = np.argsort(a.trace.cpu["ts"].to_numpy()[top], kind="stable")
    return _Reads(copy[order], top[order].astype(np.int64))


def outermost_aten(a: Analysis) -> NDArray[np.int64]:
    """Return the outermost aten operator around each row, aligned with ``trace.cpu``, or -1. A
    compiled function or autograd node around it does not count."""
    is_aten = name_matches(a.trace.cpu["name"], r"^aten::").to_numpy() & is_operator(a.trace)
    return outermost_ancestor(parent_rows(a.trace), is_aten).astype(np.int64)


def backward_nodes(a: Analysis) -> NDArray[np.int64]:
    """Return the autograd node around each row, aligned with ``trace.cpu``, or -1."""
    is_node = name_matches(a.trace.cpu["name"], ENGINE_NODE).to_numpy()
    return innermost_ancestor(parent_rows(a.trace), is_node & is_operator(a.trace)).astype(np.int64)


def read_loops(a: Analysis) -> Intervals:
    """Find host time of loops that read one device value after another, each after the same
    operators, such as a norm and an ``item()`` for every parameter."""
    if a.device_id is None or a.syncs.is_empty():
        return EMPTY
    cpu = a.trace.cpu
    tops = a.outermost_aten
    outermost = np.flatnonzero(tops == np.arange(len(tops)))
    reads = np.intersect1d(_find_reads(a).top, outermost)
    reads = reads[name_matches(cpu["name"], f"{VALUE}|{COPY}").to_numpy()[reads]]
    if len(reads) <= MIN_LOOP_READS:
        return EMPTY
    positions = np.searchsorted(outermost, reads)
    names = cpu["name"].to_physical().to_numpy()[outermost]
    thread = cpu["thread"].to_numpy()[outermost]
    is_repeat = np.zeros(len(positions), dtype=bool)
    recent_keys: list[bytes] = []
    for index in range(1, len(positions)):  # at most thousands per step, with some operators each
        first_operator, end_operator = positions[index - 1] + 1, positions[index] + 1
        if (
            thread[first_operator - 1] != thread[end_operator - 1]
            or end_operator - first_operator > MAX_OPERATORS_BETWEEN
        ):
            recent_keys = []
            continue
        key = names[first_operator:end_operator].tobytes()
        is_repeat[index] = key in recent_keys
        recent_keys = [*recent_keys[1 - MAX_READS_PER_ROUND :], key]
    edges = np.flatnonzero(np.diff(np.concatenate([[0], is_repeat.astype(np.int8), [0]])))
    loop_start, end = edges[::2], edges[1::2] - 1
    is_loop = end - loop_start + 1 >= MIN_LOOP_READS
    ts = cpu["ts"].to_numpy()
    start = ts[outermost[positions[loop_start[is_loop] - 1] + 1]]
    finish = ts[reads[end[is_loop]]] + cpu["dur"].to_numpy()[reads[end[is_loop]]]
    return intersect(union(start, finish), a.spans)


class _NextLaunches(NamedTuple):
    """Intervals from the end of each read to the start of the host's next launch, ns."""

    start: NDArray[np.int64]
    end: NDArray[np.int64]
    launch: NDArray[np.int64]
    """Row of ``trace.cpu`` of the next launch, or -1."""


def _find_next_launches(a: Analysis, reads: _Reads) -> _NextLaunches:
    cpu = a.trace.cpu
    ts = cpu["ts"].to_numpy()
    launches = a.trace.gpu["launch"].drop_nulls().unique().to_numpy().astype(np.int64)
    launches = launches[np.argsort(ts[launches], kind="stable")]
    tops = outermost_operator(a.trace)
    start = ts[reads.top] + cpu["dur"].to_numpy()[reads.top]
    next_index = np.searchsorted(ts[launches], start, side="left")
    has_next = next_index < len(launches)
    launch = np.where(has_next, launches[np.minimum(next_index, len(launches) - 1)], -1)
    top = np.where(tops[launch] >= 0, tops[launch], launch)
    end = np.where(has_next, np.maximum(ts[top], start), start)
    return _NextLaunches(start, end, launch)


def find_time_after_reads(a: Analysis) -> Intervals:
    """Find host time from the end of a read of data to the next launch, without waits for the next
    batch. The host works on the data and launches nothing meanwhile. Round trips are excluded."""
    if a.device_id is None or a.syncs.is_empty():
        return EMPTY
    reads = _find_reads(a)
    size = a.trace.gpu["bytes"].gather(reads.copy).fill_null(0).to_numpy()
    reads = _Reads(reads.copy[size >= _MIN_BYTES], reads.top[size >= _MIN_BYTES])
    if not len(reads.top):
        return EMPTY
    start, end, _ = _find_next_launches(a, reads)
    loading = intervals_of(a.trace.cpu, name_matches(a.trace.cpu["name"], LOADER).to_numpy())
    is_work = end - start - covered_length(start, end, loading) >= MIN_WORK_NS
    excluded = union_of(loading, a.trip_intervals)
    return intersect(subtract(union(start[is_work], end[is_work]), excluded), a.spans)


def round_trips(a: Analysis) -> pl.DataFrame:
    """Find copies to the host that the next launch copies back, byte for byte, after operators on
    the CPU: the columns of TRIPS_SCHEMA. Data that is kept on the host on purpose is excluded."""
    empty = pl.DataFrame(schema=TRIPS_SCHEMA)
    if a.device_id is None or a.syncs.is_empty():
        return empty
    reads = _find_reads(a)
    if not len(reads.top):
        return empty
    cpu, gpu = a.trace.cpu, a.trace.gpu
    next_launches = _find_next_launches(a, reads)
    copies = gpu.with_row_index("back").filter(
        (pl.col("copy") == "HtoD") & pl.col("launch").is_not_null()
    )
    back_of_launch = dict(zip(copies["launch"].to_list(), copies["back"].to_list(), strict=True))
    copy_back = np.array(
        [back_of_launch.get(int(row), -1) for row in next_launches.launch], dtype=np.int64
    )
    sizes = gpu["bytes"].fill_null(0).to_numpy()
    is_round_trip = (
        (copy_back >= 0)
        & (sizes[reads.copy] >= _MIN_BYTES)
        & (sizes[reads.copy] == sizes[copy_back])
    )
    tops = outermost_operator(a.trace)
    outermost = np.flatnonzero(tops == np.arange(len(tops)))
    ts, dur = cpu["ts"].to_numpy(), cpu["dur"].to_numpy()
    operator_time = union(ts[outermost], ts[outermost] + dur[outermost])
    worked = covered_length(next_launches.start, next_launches.end, operator_time)
    is_round_trip &= worked >= np.maximum(
        _MIN_OPERATOR_SHARE * (next_launches.end - next_launches.start), 1
    )
    is_deliberate = name_matches(cpu["name"], DELIBERATE).to_numpy()
    is_round_trip &= climb_stack(parent_rows(a.trace), is_deliberate, reads.top) < 0
    is_round_trip &= climb_stack(parent_rows(a.trace), is_deliberate, next_launches.launch) < 0
    last_operator = np.where(
        tops[next_launches.launch] >= 0, tops[next_launches.launch], next_launches.launch
    )
    return pl.DataFrame(
        {
            "gpu": reads.copy[is_round_trip],
            "back": copy_back[is_round_trip],
            "bytes": sizes[reads.copy[is_round_trip]],
            "launch": gpu["launch"].gather(reads.copy[is_round_trip]),
            "start": ts[reads.top[is_round_trip]],
            "end": (ts + dur)[last_operator[is_round_trip]],
        },
        schema=TRIPS_SCHEMA,
        strict=False,
    )


def trip_intervals(a: Analysis) -> Intervals:
    """Return the intervals of round trips: copy to the host, work there, and copy back."""
    trips = a.round_trips
    return intersect(union(trips["start"].to_numpy(), trips["end"].to_numpy()), a.spans)
