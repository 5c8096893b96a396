"""Host time by thread and class, and the user's lines that take most Python time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from advisor.core.intervals import covered_length, union
from advisor.measure.host.names import name_matches
from advisor.measure.host.stacks import BACKWARD, parse_frame
from advisor.measure.steps.timeline import CLASSES, CODE

if TYPE_CHECKING:
    from advisor.measure import Analysis

HOST_CLASSES = (*CLASSES, "autograd")
"""``autograd``: nothing on this thread explains the time, and another one is in the backward pass:
``Tensor.backward`` returns when that is through."""

HOST_SCHEMA: dict[str, Any] = {
    "thread": pl.Int32,  # row of trace.threads
    "class": pl.Enum(HOST_CLASSES),
    "ns": pl.Int64,  # exclusive, inside the used steps
}
HOT_SCHEMA: dict[str, Any] = {
    "frame": pl.Int32,  # row of trace.cpu: the call that took longest
    "name": pl.String,  # as the profiler wrote it
    "file": pl.String,
    "line": pl.Int64,
    "function": pl.String,
    "ns": pl.Int64,
    "critical_ns": pl.Int64,
    "count": pl.Int64,
}


def host_breakdown(a: Analysis) -> pl.DataFrame:
    """See ``Analysis.host``: the columns of HOST_SCHEMA, a row for each class with any time.

    The classes of one thread add up to the analysed window: ``unrecorded`` is the time in which
    the thread has no event, be it idle or running what was not recorded.
    """
    line = a.timeline
    ns = covered_length(line.start, line.end, a.spans)
    size = len(HOST_CLASSES)
    totals = np.bincount(line.thread * size + line.code, weights=ns, minlength=1)
    totals = np.append(totals, np.zeros(size * line.threads + 1 - len(totals)))
    for thread, code, waited in _in_backward(a):
        totals[thread * size + code] -= waited
        totals[thread * size + HOST_CLASSES.index("autograd")] += waited
    # bincount adds floats: exact up to 2**53 ns, 104 days
    cell = np.flatnonzero(totals)
    return pl.DataFrame(
        {
            "thread": cell // size,
            "class": pl.Series(HOST_CLASSES, dtype=pl.Enum(HOST_CLASSES)).gather(cell % size),
            "ns": np.rint(totals[cell]).astype(np.int64),
        },
        schema=HOST_SCHEMA,
        strict=False,
    )


def _in_backward(a: Analysis) -> list[tuple[int, int, int]]:
    """Time of the main thread that nothing on it explains while another thread runs the engine of
    autograd: (thread, class it has in the timeline, ns inside the used steps)."""
    main = a.trace.main_thread
    cpu = a.trace.cpu
    if main is None or not cpu.height:
        return []
    thread = cpu["thread"].to_numpy()
    engine = name_matches(cpu["name"], BACKWARD).to_numpy() & (thread != main)
    if not engine.any():
        return []
    rows = np.flatnonzero(engine)
    ts = cpu["ts"].to_numpy()[rows]
    runs = union(ts, ts + cpu["dur"].to_numpy()[rows])
    line = a.timeline
    result = []
    for name in ("unknown", "unrecorded"):
        dark = np.flatnonzero((line.thread == main) & (line.code == CODE[name]))
        begin, end = line.start[dark], line.end[dark]
        # from the first node to the last one inside the dark time: between two nodes the engine
        # looks for the next
        low = np.searchsorted(runs.end, begin, side="right")
        high = np.searchsorted(runs.start, end, side="left") - 1
        some = high >= low
        begin, end, low, high = begin[some], end[some], low[some], high[some]
        begin = np.maximum(begin, runs.start[low])
        end = np.minimum(end, runs.end[high])
        result.append((main, CODE[name], int(covered_length(begin, end, a.spans).sum())))
    return result


def python_hot_spots(a: Analysis) -> pl.DataFrame:
    """Python time by line of the user's code; the columns are those of HOT_SCHEMA, most
    ``critical_ns`` first. Empty without Python stacks.

    ``ns`` is the time inside the used steps in which the innermost user frame is this one and no
    operator, CUDA call or data loader is running: the frame itself and what it calls in the
    standard library, in PyTorch's Python code and in built-ins. ``critical_ns`` is the part of it
    in which the device was idle and waited for this thread. ``count`` is the number of calls that
    touch the used steps. ``line`` is where the function begins, as the profiler records it.
    """
    cpu = a.trace.cpu
    line = a.timeline
    rows = np.flatnonzero((line.code == CODE["python"]) & (line.row >= 0))
    frame = a.user_frame[line.row[rows]] if len(rows) else np.zeros(0, dtype=np.int32)
    rows, frame = rows[frame >= 0], frame[frame >= 0]
    if not len(rows):
        return pl.DataFrame(schema=HOT_SCHEMA)
    spent = pl.DataFrame(
        {"frame": frame, "ns": covered_length(line.start[rows], line.end[rows], a.spans)}
    ).filter(pl.col("ns") > 0)
    critical = a.gaps.filter(pl.col("cause") == "python", pl.col("line").is_not_null()).select(
        pl.col("line").alias("frame"), pl.col("dur").alias("critical_ns")
    )
    both = pl.concat([spent, critical], how="diagonal")
    by_name = (
        both.with_columns(cpu.select("name", "dur")[both["frame"].to_numpy()])
        .group_by("name")
        .agg(
            pl.col("frame").sort_by("dur").last(),
            pl.col("ns").sum(),
            pl.col("critical_ns").sum(),
        )
    )
    calls = cpu.select("name", "ts", "dur", "kind").filter(
        pl.col("kind") == "python", pl.col("name").is_in(by_name["name"].implode())
    )
    ts = calls["ts"].to_numpy()
    calls = calls.filter(pl.Series(covered_length(ts, ts + calls["dur"].to_numpy(), a.spans) > 0))
    counts = calls.group_by("name").agg(pl.len().cast(pl.Int64).alias("count"))
    table = by_name.join(counts, on="name", how="left").with_columns(
        pl.col("name").cast(pl.String), pl.col("count").fill_null(0)
    )
    frames = [parse_frame(name) for name in table["name"]]
    return (
        table.with_columns(
            pl.Series("file", [f.file if f else None for f in frames], dtype=pl.String),
            pl.Series("line", [f.line if f else None for f in frames], dtype=pl.Int64),
            pl.Series("function", [f.function if f else None for f in frames], dtype=pl.String),
        )
        .select(pl.col(name).cast(dtype) for name, dtype in HOT_SCHEMA.items())
        .sort("critical_ns", "ns", "name", descending=[True, True, False])
    )
