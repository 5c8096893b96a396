"""Host time by thread and class, and the user's lines that take most Python time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.intervals import covered_length, intersect, union
from advisor.measure.host.names import name_matches
from advisor.measure.host.new_shapes import ONE_OFF, first_calls
from advisor.measure.host.stacks import (
    BACKWARD,
    ancestor_chains,
    frame_ranks,
    innermost_ancestor,
    nullable_rows,
    parent_rows,
    parse_frame,
)
from advisor.measure.steps.timeline import CLASSES, CODE

if TYPE_CHECKING:
    from advisor.measure import Analysis

HOST_CLASSES = (*CLASSES, "autograd")
"""Classes of host time. ``autograd``: nothing on this thread explains the time, and another one is
in the backward pass: ``Tensor.backward`` returns when that is through."""

BACKWARD_RANGE = r"(?i)^(?:[#\[( ]*|.*[.:/ ])backward(?:[ _]pass)?[\]#) ]*$"
"""Range that a program puts around its backward pass: ``## backward ##``, ``loss.backward``."""
HOST_SCHEMA: dict[str, Any] = {
    "thread": pl.Int32,  # row of trace.threads
    "class": pl.Enum(HOST_CLASSES),
    "ns": pl.Int64,  # exclusive, inside the used steps by the host's times
}
HOT_SCHEMA: dict[str, Any] = {
    "frame": pl.Int32,  # row of trace.cpu: the call that took longest
    "name": pl.String,  # as the profiler wrote it
    "file": pl.String,
    "line": pl.Int64,
    "function": pl.String,
    "critical_ns": pl.Int64,
    "count": pl.Int64,
    "total_ns": pl.Int64,
    "gaps": pl.Int64,
}
_ONE_OFF = [CODE[name] for name in ONE_OFF]
MIN_FRAME_SHARE = 0.5
"""Part of a gap's Python time that a frame must hold to be blamed for it."""
MAX_CULPRITS = 3
"""Frames that may share the blame of one gap."""
MAX_ENCLOSED_SHARE = 0.05
"""Part of a step's device work from which a call that launches it is more than a preparation."""


def host_breakdown(a: Analysis) -> pl.DataFrame:
    """Sum host time by thread and class: the columns of HOST_SCHEMA, a row for each with any time.

    The classes of one thread add up to the analysed window, by the host's own marks where it runs
    ahead: what it does after its last step is no part of a step. What costly first calls do is
    ``compile``, as in ``Analysis.gaps``. ``unrecorded`` is the time in
    which the thread has no event, be it idle or running what was not recorded."""
    line = a.timeline
    ns = covered_length(line.start, line.end, a.steps.host_spans)
    size = len(HOST_CLASSES)
    totals = np.bincount(line.thread * size + line.code, weights=ns, minlength=1)
    totals = np.append(totals, np.zeros(size * line.threads + 1 - len(totals)))
    calls = first_calls(a)
    threads = a.trace.cpu["thread"].gather(calls["host"]).to_numpy()
    ts = calls["ts"].to_numpy()
    end = ts + calls["dur"].to_numpy()
    for each in np.unique(threads).tolist():  # of the threads with such calls, one to three
        own = np.flatnonzero((line.thread == each) & np.isin(line.code, _ONE_OFF))
        once = intersect(union(ts[threads == each], end[threads == each]), a.steps.host_spans)
        spent = covered_length(line.start[own], line.end[own], once)
        np.subtract.at(totals, each * size + line.code[own], spent)
        totals[each * size + CODE["compile"]] += spent.sum()
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
    """Find time of the main thread that nothing on it explains while another thread runs the engine
    of autograd: (thread, class it has in the timeline, ns inside the used steps)."""
    main = a.trace.main_thread
    cpu = a.trace.cpu
    if main is None or not cpu.height:
        return []
    thread = cpu["thread"].to_numpy()
    nodes = name_matches(cpu["name"], BACKWARD).to_numpy()
    engine = nodes & (thread != main)
    if not engine.any():  # its thread is not recorded: the program's own range is left
        ranges = (cpu["kind"] == "annotation").to_numpy() & (thread == main)
        ranges &= name_matches(cpu["name"], BACKWARD_RANGE).to_numpy()
        dur = cpu["dur"].to_numpy()
        if dur[nodes].sum() < MIN_FRAME_SHARE * dur[ranges].sum():  # else this thread computes it
            engine = ranges
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
        result.append((main, CODE[name], int(covered_length(begin, end, a.steps.host_spans).sum())))
    return result


def python_gaps(a: Analysis) -> pl.DataFrame:
    """Find idle time of the device by the Python code that causes it: the rows of ``Analysis.gaps``
    with cause ``python`` and a user frame, with ``frame``, the row of ``trace.cpu`` to blame.

    That is the deepest frame of the user's code or of an installed library that holds most
    (MIN_FRAME_SHARE) of the gap's Python time, or most of what deeper ones leave of it; where there
    is none, of any code. A frame in which much of the device's work is launched too is none of
    them: for the code between its calls, ``frame`` is null."""
    table = a.gaps.filter(pl.col("cause") == "python", pl.col("line").is_not_null())
    frame = np.full(table.height, -1, dtype=np.int64)
    prepares = (a.trace.cpu["kind"] == "python").to_numpy() & ~_launching(a)
    own = frame_ranks(a.trace) > 0
    for wanted in (prepares & own, prepares):
        left = np.flatnonzero(frame < 0)
        if len(left):
            frame[left] = _most_of_each(a, table[left], wanted)
    return table.with_columns(frame=nullable_rows(frame))


def _most_of_each(a: Analysis, table: pl.DataFrame, wanted: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Find the wanted row to blame for each piece of a gap, -1: none. See :func:`python_gaps`."""
    cpu, parent = a.trace.cpu, parent_rows(a.trace)
    above = ancestor_chains(parent, innermost_ancestor(parent, wanted)[table["host"].to_numpy()])
    piece, level = np.nonzero(above >= 0)
    rows = above[piece, level]
    piece, rows = piece[wanted[rows]], rows[wanted[rows]]
    around = pl.DataFrame(
        {
            "piece": piece,
            "row": rows,
            "name": cpu["name"].to_physical().gather(rows),
            "depth": cpu["depth"].gather(rows),
            "gap": table["gap"].gather(piece),
            "dur": table["dur"].gather(piece),
        }
    )
    around = around.sort("depth").unique(["piece", "name"], keep="last", maintain_order=True)
    frame = np.full(table.height, -1, dtype=np.int64)
    for _ in range(MAX_CULPRITS):
        held = pl.col("dur").sum()
        left = around.unique("piece").group_by("gap").agg(held.alias("left"))
        each = around.group_by("gap", "name").agg(held.alias("held"), pl.col("depth").max())
        most = each.join(left, on="gap").filter(pl.col("held") >= MIN_FRAME_SHARE * pl.col("left"))
        deepest = most.sort("depth", "held").unique("gap", keep="last", maintain_order=True)
        blamed = around.join(deepest.select("gap", "name"), on=["gap", "name"])
        if blamed.is_empty():
            break
        frame[blamed["piece"].to_numpy()] = blamed["row"].to_numpy()
        around = around.join(blamed.select("piece"), on="piece", how="anti")
    return frame


def _launching(a: Analysis) -> NDArray[np.bool_]:
    """Return which host rows launch more than MAX_ENCLOSED_SHARE of a step's device work."""
    cpu, gpu = a.trace.cpu, a.trace.gpu
    rows = np.flatnonzero(a.in_window & gpu["launch"].is_not_null().to_numpy())
    launch = gpu["launch"].gather(rows).to_numpy()
    launch, which = np.unique(launch, return_inverse=True)  # rows are in order of thread and time
    work = np.append(0, np.cumsum(np.bincount(which, gpu["dur"].to_numpy()[rows])))
    ts, thread = cpu["ts"].to_numpy(), cpu["thread"].to_numpy().astype(np.int64)
    end = ts + cpu["dur"].to_numpy()
    low = int(ts.min(initial=0))
    stride = int(end.max(initial=0)) - low + 2
    key = thread[launch] * stride + ts[launch] - low
    until = np.searchsorted(key, thread * stride + end - low)
    inside = work[until] - work[np.searchsorted(key, thread * stride + ts - low)]
    result: NDArray[np.bool_] = inside > MAX_ENCLOSED_SHARE * a.breakdown.busy.total / a.step_count
    return result


def python_hot_spots(a: Analysis) -> pl.DataFrame:
    """Find Python code that leaves the device idle; the columns are those of HOT_SCHEMA, most
    ``critical_ns`` first. Empty without Python stacks. See :func:`python_gaps`.

    ``critical_ns`` is the time inside the used steps in which the device idles and waits for this
    code; ``gaps`` the number of the device's gaps. ``count`` and ``total_ns`` are of all calls of
    the function that begin in the used steps, hidden or not; ``frame`` is the longest of them.
    ``line`` is where the function begins, as the profiler records it."""
    cpu = a.trace.cpu
    table = python_gaps(a).drop_nulls("frame")
    table = table.with_columns(cpu["name"].gather(table["frame"]))
    table = table.group_by("name").agg(
        pl.col("dur").sum().alias("critical_ns"),
        pl.col("gap").n_unique().alias("gaps"),
        pl.col("frame").unique(),
    )
    rows = np.flatnonzero(cpu["name"].is_in(table["name"].implode()).to_numpy())
    blamed = np.isin(rows, table["frame"].explode().to_numpy())
    ts = cpu["ts"].to_numpy()[rows]
    rows = rows[blamed | (covered_length(ts, ts + 1, a.steps.host_spans) > 0)]
    calls = pl.DataFrame(
        {
            "name": cpu["name"].gather(rows),
            "frame": pl.Series(rows, dtype=pl.Int32),
            "dur": cpu["dur"].gather(rows),
        }
    )
    calls = calls.group_by("name").agg(
        pl.col("frame").sort_by("dur").last(),
        pl.len().alias("count"),
        pl.col("dur").sum().alias("total_ns"),
    )
    table = table.drop("frame").join(calls, on="name").with_columns(pl.col("name").cast(pl.String))
    frames = [parse_frame(name) for name in table["name"]]
    return (
        table.with_columns(
            pl.Series("file", [f.file if f else None for f in frames], dtype=pl.String),
            pl.Series("line", [f.line if f else None for f in frames], dtype=pl.Int64),
            pl.Series("function", [f.function if f else None for f in frames], dtype=pl.String),
        )
        .select(pl.col(name).cast(dtype) for name, dtype in HOT_SCHEMA.items())
        .sort("critical_ns", "name", descending=[True, False])
    )
