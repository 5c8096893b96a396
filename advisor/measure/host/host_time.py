"""Host time by thread and class, and the user's lines that take the most Python time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.intervals import covered_length, intersect, intervals_of, union
from advisor.measure.host.names import name_matches
from advisor.measure.host.new_shapes import ONE_OFF, first_calls
from advisor.measure.host.stacks import (
    BACKWARD,
    CodeOwner,
    ancestor_chains,
    code_owners,
    innermost_ancestor,
    nullable_rows,
    parent_rows,
    parse_frame,
)
from advisor.measure.steps.timeline import CLASS_CODE, CLASSES

if TYPE_CHECKING:
    from advisor.measure import Analysis

HOST_CLASSES = (*CLASSES, "autograd")
"""Classes of host time. ``autograd`` is time that nothing on this thread explains while another
thread is in the backward pass: ``Tensor.backward`` returns when the pass ends."""

BACKWARD_RANGE = r"(?i)^(?:[#\[( ]*|.*[.:/ ])backward(?:[ _]pass)?[\]#) ]*$"
"""Pattern of a program's range around its backward pass: ``## backward ##``, ``loss.backward``."""
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
_ONE_OFF_CODES = [CLASS_CODE[name] for name in ONE_OFF]
MIN_FRAME_SHARE = 0.5
"""Minimum share of a gap's Python time in a frame that is blamed for it."""
MAX_CULPRITS = 3
"""Maximum number of frames that share the blame for one gap."""
MAX_PREPARING_SHARE = 0.05
"""Maximum share of a step's device work in a call that only prepares work."""


def host_breakdown(a: Analysis) -> pl.DataFrame:
    """Sum host time by thread and class: the columns of HOST_SCHEMA, without rows of zero time.

    The classes of one thread add up to the analysed window, by the host's own marks if it runs
    ahead: work after its last step belongs to no step. Costly first calls count as ``compile``, as
    in ``Analysis.gaps``. ``unrecorded`` is the time in which the thread has no event, whether it is
    idle or runs unrecorded code."""
    timeline = a.timeline
    ns = covered_length(timeline.start, timeline.end, a.steps.host_spans)
    class_count = len(HOST_CLASSES)
    totals = np.bincount(timeline.thread * class_count + timeline.code, weights=ns, minlength=1)
    totals = np.append(totals, np.zeros(class_count * timeline.threads + 1 - len(totals)))
    calls = first_calls(a)
    threads = a.trace.cpu["thread"].gather(calls["host"]).to_numpy()
    ts = calls["ts"].to_numpy()
    end = ts + calls["dur"].to_numpy()
    for caller in np.unique(threads).tolist():  # threads with first calls, one to three
        one_off_pieces = np.flatnonzero(
            (timeline.thread == caller) & np.isin(timeline.code, _ONE_OFF_CODES)
        )
        spans = intersect(union(ts[threads == caller], end[threads == caller]), a.steps.host_spans)
        call_ns = covered_length(
            timeline.start[one_off_pieces], timeline.end[one_off_pieces], spans
        )
        np.subtract.at(totals, caller * class_count + timeline.code[one_off_pieces], call_ns)
        totals[caller * class_count + CLASS_CODE["compile"]] += call_ns.sum()
    for thread, code, waited in _find_backward_waits(a):
        totals[thread * class_count + code] -= waited
        totals[thread * class_count + HOST_CLASSES.index("autograd")] += waited
    # bincount adds floats: exact up to 2**53 ns, 104 days
    filled = np.flatnonzero(totals)
    return pl.DataFrame(
        {
            "thread": filled // class_count,
            "class": pl.Series(HOST_CLASSES, dtype=pl.Enum(HOST_CLASSES)).gather(
                filled % class_count
            ),
            "ns": np.rint(totals[filled]).astype(np.int64),
        },
        schema=HOST_SCHEMA,
        strict=False,
    )


def _find_backward_waits(a: Analysis) -> list[tuple[int, int, int]]:
    """Find time of the main thread that nothing on it explains while another thread runs the
    autograd engine: (thread, class in the timeline, ns inside the used steps)."""
    main = a.trace.main_thread
    cpu = a.trace.cpu
    if main is None or not cpu.height:
        return []
    thread = cpu["thread"].to_numpy()
    is_node = name_matches(cpu["name"], BACKWARD).to_numpy()
    engine = is_node & (thread != main)
    if not engine.any():  # its thread is not recorded: use the program's own range
        is_range = (cpu["kind"] == "annotation").to_numpy() & (thread == main)
        is_range &= name_matches(cpu["name"], BACKWARD_RANGE).to_numpy()
        dur = cpu["dur"].to_numpy()
        if (
            dur[is_node].sum() < MIN_FRAME_SHARE * dur[is_range].sum()
        ):  # else this thread computes it
            engine = is_range
    if not engine.any():
        return []
    rows = np.flatnonzero(engine)
    runs = intervals_of(cpu, rows)
    timeline = a.timeline
    result = []
    for name in ("unknown", "unrecorded"):
        unexplained = np.flatnonzero(
            (timeline.thread == main) & (timeline.code == CLASS_CODE[name])
        )
        start, end = timeline.start[unexplained], timeline.end[unexplained]
        # from the first node to the last one inside the dark time: between two nodes the engine
        # looks for the next
        first = np.searchsorted(runs.end, start, side="right")
        last = np.searchsorted(runs.start, end, side="left") - 1
        overlaps = last >= first
        start, end, first, last = (start[overlaps], end[overlaps], first[overlaps], last[overlaps])
        start = np.maximum(start, runs.start[first])
        end = np.minimum(end, runs.end[last])
        result.append(
            (main, CLASS_CODE[name], int(covered_length(start, end, a.steps.host_spans).sum()))
        )
    return result


def python_gaps(a: Analysis) -> pl.DataFrame:
    """Find idle time of the device by the Python code that causes it: the rows of ``Analysis.gaps``
    with cause ``python`` and a user frame, plus ``frame``, the row of ``trace.cpu`` to blame.

    ``frame`` is the deepest frame of the user's code or of an installed library with most
    (MIN_FRAME_SHARE) of the gap's Python time, or most of the time that deeper frames leave; if
    there is none, the deepest frame of any code. Frames that also launch much of the device's work
    are never blamed: for the code between their calls, ``frame`` is null."""
    table = a.gaps.filter(pl.col("cause") == "python", pl.col("line").is_not_null())
    frame = np.full(table.height, -1, dtype=np.int64)
    is_preparing = (a.trace.cpu["kind"] == "python").to_numpy() & ~_is_launching(a)
    is_user_code = code_owners(a.trace) >= CodeOwner.LIBRARY
    for wanted in (is_preparing & is_user_code, is_preparing):
        unblamed = np.flatnonzero(frame < 0)
        if len(unblamed):
            frame[unblamed] = _find_blamed_rows(a, table[unblamed], wanted)
    return table.with_columns(frame=nullable_rows(frame))


def _find_blamed_rows(
    a: Analysis, table: pl.DataFrame, wanted: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Find the ``wanted`` row to blame for each piece of a gap, or -1. See :func:`python_gaps`."""
    cpu, parent = a.trace.cpu, parent_rows(a.trace)
    chains = ancestor_chains(parent, innermost_ancestor(parent, wanted)[table["host"].to_numpy()])
    piece, level = np.nonzero(chains >= 0)
    rows = chains[piece, level]
    piece, rows = piece[wanted[rows]], rows[wanted[rows]]
    above = pl.DataFrame(
        {
            "piece": piece,
            "row": rows,
            "name": cpu["name"].to_physical().gather(rows),
            "depth": cpu["depth"].gather(rows),
            "gap": table["gap"].gather(piece),
            "dur": table["dur"].gather(piece),
        }
    )
    above = above.sort("depth").unique(["piece", "name"], keep="last", maintain_order=True)
    frame = np.full(table.height, -1, dtype=np.int64)
    for _ in range(MAX_CULPRITS):
        total_ns = pl.col("dur").sum()
        remaining = above.unique("piece").group_by("gap").agg(total_ns.alias("left"))
        by_name = above.group_by("gap", "name").agg(total_ns.alias("held"), pl.col("depth").max())
        candidates = by_name.join(remaining, on="gap").filter(
            pl.col("held") >= MIN_FRAME_SHARE * pl.col("left")
        )
        deepest = candidates.sort("depth", "held").unique("gap", keep="last", maintain_order=True)
        blamed = above.join(deepest.select("gap", "name"), on=["gap", "name"])
        if blamed.is_empty():
            break
        frame[blamed["piece"].to_numpy()] = blamed["row"].to_numpy()
        above = above.join(blamed.select("piece"), on="piece", how="anti")
    return frame


def _is_launching(a: Analysis) -> NDArray[np.bool_]:
    """Return which host rows launch more than MAX_PREPARING_SHARE of a step's device work."""
    cpu, gpu = a.trace.cpu, a.trace.gpu
    rows = np.flatnonzero(a.in_window & gpu["launch"].is_not_null().to_numpy())
    launch = gpu["launch"].gather(rows).to_numpy()
    launch, index = np.unique(launch, return_inverse=True)  # rows are in order of thread and time
    work_before = np.append(0, np.cumsum(np.bincount(index, gpu["dur"].to_numpy()[rows])))
    ts, thread = cpu["ts"].to_numpy(), cpu["thread"].to_numpy().astype(np.int64)
    end = ts + cpu["dur"].to_numpy()
    origin = int(ts.min(initial=0))
    stride = int(end.max(initial=0)) - origin + 2
    key = thread[launch] * stride + ts[launch] - origin
    end_index = np.searchsorted(key, thread * stride + end - origin)
    launched_ns = (
        work_before[end_index] - work_before[np.searchsorted(key, thread * stride + ts - origin)]
    )
    result: NDArray[np.bool_] = (
        launched_ns > MAX_PREPARING_SHARE * a.breakdown.busy.total / a.step_count
    )
    return result


def python_hot_spots(a: Analysis) -> pl.DataFrame:
    """Find Python code that leaves the device idle, with the columns of HOT_SCHEMA, most
    ``critical_ns`` first. Empty without Python stacks. See :func:`python_gaps`.

    ``critical_ns`` is the time inside the used steps in which the device idles and waits for this
    code, and ``gaps`` is the number of the device's gaps. ``count`` and ``total_ns`` cover all
    calls of the function that begin in the used steps, hidden or not; ``frame`` is the longest
    call. ``line`` is where the function begins, as the profiler records it."""
    cpu = a.trace.cpu
    table = python_gaps(a).drop_nulls("frame")
    table = table.with_columns(cpu["name"].gather(table["frame"]))
    table = table.group_by("name").agg(
        pl.col("dur").sum().alias("critical_ns"),
        pl.col("gap").n_unique().alias("gaps"),
        pl.col("frame").unique(),
    )
    rows = np.flatnonzero(cpu["name"].is_in(table["name"].implode()).to_numpy())
    is_blamed = np.isin(rows, table["frame"].explode().to_numpy())
    ts = cpu["ts"].to_numpy()[rows]
    rows = rows[is_blamed | (covered_length(ts, ts + 1, a.steps.host_spans) > 0)]
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
