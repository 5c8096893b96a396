"""Costs that a recording has once: code loaded, algorithms searched, kernels compiled, at a first
call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from advisor.core.intervals import covered_length, union

if TYPE_CHECKING:
    from advisor.measure import Analysis

TIMES_LATER = 10.0
"""A first call this many times as long as the median of the later ones did something else besides:
first calls that only warm caches take two or three times as long."""
MIN_EXCESS_NS = 1_000_000
"""Loading a module, searching an algorithm or compiling takes milliseconds to seconds."""
MAX_BUSY = 0.2
"""Part of the call during which the device may be at work: a call that waits for it is no cost."""
MIN_SHARE = 0.05
"""Part of what is analysed below which a call distorts no figure, and may be slow by chance."""
LONE_SHARE = 0.5
"""Part of what is analysed that a call without another one takes by itself, where no other step
shows that it does not come again."""
NO_FUNCTION = r"::|#|Backward\d*$|^cu[A-Z]|^hip[A-Z]"
"""Operators, marks and nodes of autograd. What else is an operator by its category is a function
that was compiled: by TorchScript under its own name."""
CALLS = ("launch", "graph_launch", "module_load", "malloc", "host_alloc", "free", "other")

ONE_OFF_SCHEMA: dict[str, Any] = {
    "host": pl.Int64,  # row of trace.cpu
    "name": pl.String,
    "ts": pl.Int64,  # ns
    "dur": pl.Int64,  # ns
    "usual": pl.Float64,  # ns: median of the later calls; null: it is the only one, or a capture
    "count": pl.Int64,  # calls of this kind, this one included
}
CAPTURE = "capture of a CUDA graph"


def one_off(a: Analysis) -> pl.DataFrame:
    """Host rows that did something once, columns of ONE_OFF_SCHEMA, outermost first.

    Captures of graphs, unless the steps capture. An operator's first call with given inputs, and
    a runtime call at the first of its name, or within such an operator, that took TIMES_LATER as
    long as the median of the later ones while the device idled. Of operators inside each other
    the innermost that holds nearly all of it is named. A call that has no later one may be slow
    every time. It is judged where it is a compiled function (TorchScript) whose time nothing
    recorded inside explains: when other steps do without it, or when it takes LONE_SHARE of what
    is analysed.
    """
    cpu = a.trace.cpu
    if cpu.is_empty() or a.device_id is None:
        return pl.DataFrame(schema=ONE_OFF_SCHEMA)
    captures = _captures(a)
    rows = cpu.with_row_index("host").filter(
        (pl.col("kind") == "op") | pl.col("call").cast(pl.String).is_in(CALLS)
    )
    key = ["name", "inputs"]
    long = rows.select("host", "ts", "dur", "thread", "parent", *key).filter(
        pl.col("dur") >= max(MIN_EXCESS_NS, MIN_SHARE * a.span_ns)
    )
    if long.is_empty():
        return captures
    same = rows.join(long.select(key).unique(), on=key, how="semi", nulls_equal=True)
    groups = same.group_by(key).agg(
        first=pl.col("host").sort_by("ts").first(),
        usual=pl.col("dur").sort_by("ts").slice(1).median(),
        count=pl.len().cast(pl.Int64),
    )
    long = long.join(groups, on=key, nulls_equal=True)
    least = MIN_SHARE if a.steps.used.height > 2 else LONE_SHARE
    lone = (pl.col("count") == 1) & pl.Series(_own_time(a, long) >= least * a.span_ns)
    lone &= ~pl.col("name").cast(pl.String).str.contains(NO_FUNCTION)
    again = (pl.col("count") > 2) & (pl.col("dur") > TIMES_LATER * pl.col("usual"))
    result = long.filter((pl.col("host") == pl.col("first")) & (again.fill_null(False) | lone))
    ts, dur = result["ts"].to_numpy(), result["dur"].to_numpy()
    gpu = a.trace.gpu.filter(pl.col("device") == a.device_id)
    began = gpu["ts"].to_numpy()
    busy = covered_length(ts, ts + dur, union(began, began + gpu["dur"].to_numpy()))
    result = result.filter(pl.Series(busy <= MAX_BUSY * dur))
    calls = _innermost(result).select(
        pl.col("host").cast(pl.Int64), pl.col("name").cast(pl.String), "ts", "dur", "usual", "count"
    )
    return pl.concat([captures, calls]) if captures.height else calls


def _captures(a: Analysis) -> pl.DataFrame:
    """From the begin of each capture of a graph to its end on the same thread, those that are long;
    none where more than half of the steps capture."""
    marks = a.trace.cpu.with_row_index("host").filter(pl.col("call") == "graph_capture")
    marks = marks.select(
        "host",
        "thread",
        "ts",
        "dur",
        begins=pl.col("name").cast(pl.String).str.contains("(?i)begin"),
    ).sort("thread", "ts")
    end = (pl.col("ts") + pl.col("dur")).shift(-1)
    ends = ~pl.col("begins").shift(-1) & (pl.col("thread") == pl.col("thread").shift(-1))
    found = marks.with_columns(dur=end - pl.col("ts"), ends=ends).filter("begins", "ends")
    inside = covered_length(*_span(found), a.spans)
    steps = a.steps.used.height
    if steps > 2 and int((inside > 0).sum()) > steps / 2:
        return pl.DataFrame(schema=ONE_OFF_SCHEMA)
    long = pl.col("dur") >= max(MIN_EXCESS_NS, MIN_SHARE * a.span_ns)
    return found.filter(long).select(
        pl.col("host").cast(pl.Int64),
        pl.lit(CAPTURE).alias("name"),
        "ts",
        "dur",
        pl.lit(None, pl.Float64).alias("usual"),
        pl.lit(found.height, pl.Int64).alias("count"),
    )


def _span(rows: pl.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    ts = rows["ts"].to_numpy()
    return ts, ts + rows["dur"].to_numpy()


def _own_time(a: Analysis, rows: pl.DataFrame) -> np.ndarray:
    """Time of host rows outside what was recorded inside them, ns."""
    cpu = a.trace.cpu
    inside = cpu.select("ts", "dur", host="parent").join(rows.select("host"), on="host", how="semi")
    ts, dur = rows["ts"].to_numpy(), rows["dur"].to_numpy()
    begin = inside["ts"].to_numpy()
    own: np.ndarray = dur - covered_length(
        ts, ts + dur, union(begin, begin + inside["dur"].to_numpy())
    )
    return own


def _innermost(result: pl.DataFrame) -> pl.DataFrame:
    """Without rows that hold another one of nearly their length."""
    result = result.sort("ts", "dur", descending=[False, True])
    ts, dur, thread = (result[c].to_numpy() for c in ("ts", "dur", "thread"))
    keep = np.ones(len(ts), dtype=np.bool_)
    for i in range(len(ts) - 1):  # a few rows: first calls of milliseconds
        inside = (thread == thread[i]) & (ts >= ts[i]) & (ts + dur <= ts[i] + dur[i])
        inside[: i + 1] = False
        keep[i] = not (inside & (dur >= 0.8 * dur[i])).any()
    return result.filter(pl.Series(keep))
