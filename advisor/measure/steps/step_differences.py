"""Differences between steps: one-off costs of a recording (code loaded, algorithms searched,
kernels compiled, at a first call), and the longer half of the steps beside the shorter one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import polars as pl

from advisor.core.intervals import Intervals, covered_length, union
from advisor.core.report_steps import StepVariation, StepVariationPart
from advisor.measure.device.families import CLASSES
from advisor.measure.steps.timeline import CLASSES as HOST

if TYPE_CHECKING:
    from advisor.measure import Analysis


TIMES_LATER = 10.0
"""Ratio of a first call to the median of the later ones, from which it did something else besides:
first calls that only warm caches take two or three times as long."""
MIN_EXCESS_NS = 1_000_000
"""Excess of a first call that counts, ns: loading a module, searching or compiling takes longer."""
MAX_BUSY = 0.2
"""Part of the call during which the device may be at work: a call that waits for it is no cost."""
MIN_SHARE = 0.05
"""Part of what is analysed below which a call distorts no figure, and may be slow by chance."""
LONE_SHARE = 0.5
"""Part of what is analysed from which a call without a later one counts, where no other step shows
that it does not come again."""
NO_FUNCTION = r"::|#|Backward\d*$|^cu[A-Z]|^hip[A-Z]"
"""Operators, marks and nodes of autograd. Anything else in the operators' category is a function
compiled by TorchScript, under its own name."""
CALLS = ("launch", "graph_launch", "module_load", "malloc", "host_alloc", "free", "other")

ONE_OFF_SCHEMA: dict[str, Any] = {
    "host": pl.Int64,  # row of trace.cpu
    "name": pl.String,
    "ts": pl.Int64,  # ns
    "dur": pl.Int64,  # ns
    "usual": pl.Float64,  # ns: median of the later calls, start-up: time in calls; null: none
    "count": pl.Int64,  # calls of this kind, this one included
}
CAPTURE = "capture of a CUDA graph"
LOADING = "start-up around"
_QUIET = ("other", "malloc", "free", "host_alloc", "host_free", "event_query")
"""Calls that set something up or ask for something, beside the loading of code."""


def find_one_off_rows(a: Analysis) -> pl.DataFrame:
    """Find host rows that did something once, columns of ONE_OFF_SCHEMA, outermost first.

    Captures of graphs, and stretches in which a thread only loads GPU code, unless the steps do so.
    An operator's first call with given inputs, and a
    runtime call at the first of its name, or within such an operator, that took TIMES_LATER as long
    as the median of the later ones while the device idled. Of operators inside each other the
    innermost that holds nearly all of it is named. A call that has no later one may be slow every
    time. It is judged where it is a compiled function (TorchScript) whose time nothing recorded
    inside explains: when other steps do without it, or when it takes LONE_SHARE of what is
    analysed."""
    cpu = a.trace.cpu
    if cpu.is_empty() or a.device_id is None:
        return pl.DataFrame(schema=ONE_OFF_SCHEMA)
    captures = pl.concat([_captures(a), _loading(a)])
    anew = a.new_shape_spans
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
    busy = covered_length(ts, ts + dur, busy_in_recording(a))
    # what most steps do again, because their shapes are new, is no start-up
    result = result.filter(
        pl.Series((busy <= MAX_BUSY * dur) & (2 * covered_length(ts, ts + dur, anew) <= dur))
    )
    calls = _innermost(result).select(
        pl.col("host").cast(pl.Int64), pl.col("name").cast(pl.String), "ts", "dur", "usual", "count"
    )
    return pl.concat([captures, calls]) if captures.height else calls


def _loading(a: Analysis) -> pl.DataFrame:
    """Find long stretches from a call that loads GPU code (``cuModuleLoad…``, ``cuLibraryLoad…``,
    HIP's too) to the next ones of its thread, with nothing else recorded between them and the
    device idle: a library starts up. Empty where more than half of the steps have one."""
    rows = a.trace.cpu.with_row_index("host").select(
        pl.col("host").cast(pl.Int64), "thread", "ts", "dur", "name", "call",
        loads=(pl.col("call") == "module_load").fill_null(False),
        quiet=((pl.col("kind") == "runtime") & pl.col("call").cast(pl.String).is_in(_QUIET))
        .fill_null(False),
    )  # fmt: skip
    if int(rows["loads"].sum()) < 2:
        return pl.DataFrame(schema=ONE_OFF_SCHEMA)
    rows = rows.sort("thread", "ts").with_columns(
        stretch=(~(pl.col("loads") | pl.col("quiet"))).cum_sum().over("thread")
    )
    found = (
        rows.filter("loads")
        .group_by("thread", "stretch", maintain_order=True)
        .agg(
            pl.col("host").first(),
            pl.col("name").first().cast(pl.String),
            pl.col("ts").min(),
            end=(pl.col("ts") + pl.col("dur")).max(),
            usual=pl.col("dur").sum().cast(pl.Float64),
            count=pl.len().cast(pl.Int64),
        )
        .filter(pl.col("count") > 1)
        .with_columns(dur=pl.col("end") - pl.col("ts"))
    )
    long = pl.col("dur") >= max(MIN_EXCESS_NS, MIN_SHARE * a.span_ns)
    found = found.filter(long, pl.Series(covered_length(*_span(found), busy_in_recording(a)) == 0))
    steps = a.steps.used.height
    inside = covered_length(*_span(found), a.spans)
    if steps > 2 and int((inside > 0).sum()) > steps / 2:
        return pl.DataFrame(schema=ONE_OFF_SCHEMA)
    return found.select(
        "host",
        pl.format("{} {}", pl.lit(LOADING), "name").alias("name"),
        "ts",
        "dur",
        "usual",
        "count",
    )


def busy_in_recording(a: Analysis) -> Intervals:
    """Return when the analysed device works, inside the steps or not."""
    gpu = a.trace.gpu.filter(pl.col("device") == a.device_id)
    return union(gpu["ts"].to_numpy(), (gpu["ts"] + gpu["dur"]).to_numpy())


def _captures(a: Analysis) -> pl.DataFrame:
    """Find long captures of graphs, each from its begin to its end on the same thread; empty where
    more than half of the steps capture."""
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
    """Return the self time of host rows, outside what was recorded inside them, ns."""
    cpu = a.trace.cpu
    inside = cpu.select("ts", "dur", host="parent").join(rows.select("host"), on="host", how="semi")
    ts, dur = rows["ts"].to_numpy(), rows["dur"].to_numpy()
    begin = inside["ts"].to_numpy()
    own: np.ndarray = dur - covered_length(
        ts, ts + dur, union(begin, begin + inside["dur"].to_numpy())
    )
    return own


def _innermost(result: pl.DataFrame) -> pl.DataFrame:
    """Drop rows that hold another one of nearly their length."""
    result = result.sort("ts", "dur", descending=[False, True])
    ts, dur, thread = (result[c].to_numpy() for c in ("ts", "dur", "thread"))
    keep = np.ones(len(ts), dtype=np.bool_)
    for i in range(len(ts) - 1):  # a few rows: first calls of milliseconds
        inside = (thread == thread[i]) & (ts >= ts[i]) & (ts + dur <= ts[i] + dur[i])
        inside[: i + 1] = False
        keep[i] = not (inside & (dur >= 0.8 * dur[i])).any()
    return result.filter(pl.Series(keep))


MIN_STEPS = 4
"""Steps that are needed for halves: one step's accident would stand for all."""
MIN_SPREAD = 1.3
"""Ratio of the longest to the shortest step from which the halves are compared."""
NAMED_SHARE = 0.15
"""Part of the difference from which a class or a piece of work is listed."""
LIMIT = 4


def compare_halves(a: Analysis) -> StepVariation | None:
    """Compare the longer half of the used steps with the shorter one; a median step is in neither.
    ``None``: the steps are similar, or too few. Without device work it compares the main thread's
    time by its classes, and operators by their self time. All classes together would add up to the
    difference."""
    used = a.steps.used
    if used.height < MIN_STEPS or (a.device_id is None and a.trace.main_thread is None):
        return None
    dur = used["dur"].to_numpy()
    if dur.max() < MIN_SPREAD * max(int(dur.min()), 1):
        return None
    order = np.argsort(dur, kind="stable")
    half = len(order) // 2
    short, long = order[:half], order[-half:]
    difference = float(dur[long].mean() - dur[short].mean())
    if difference <= 0:
        return None
    start, end = used["ts"].to_numpy(), used["end"].to_numpy()
    amounts = {}
    if a.device_id is not None:
        table = a.breakdown.per_step
        amounts = {name: table[name].to_numpy() for name in CLASSES if name != "idle"}
        gpu, rows = a.trace.gpu, np.flatnonzero(a.on_device)
        work = _Work(*(gpu[name].gather(rows) for name in ("name", "ts", "dur")))
    else:
        work = _operators(a)
    for cause, begin, finish in _host(a) if a.device_id is None else _idle(a):
        amounts[cause] = covered_length(start, end, union(begin, finish))
    classes = [
        StepVariationPart(name, float(each[long].mean() - each[short].mean()))
        for name, each in amounts.items()
    ]
    return StepVariation(
        float(dur[short].mean()),
        float(dur[long].mean()),
        _largest(classes, difference),
        _largest(_by_name(a, work, short, long), difference),
    )


def _idle(a: Analysis) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Return (cause, starts, ends) of idle time."""
    parts = a.gaps.select("cause", "ts", "dur").with_columns(pl.col("cause").cast(pl.String))
    return [
        (f"idle: {cause}", rows["ts"].to_numpy(), (rows["ts"] + rows["dur"]).to_numpy())
        for (cause,), rows in sorted(parts.partition_by("cause", as_dict=True).items())
    ]


class _Work(NamedTuple):
    """Pieces of work, or of operators."""

    name: pl.Series
    ts: pl.Series
    dur: pl.Series


def _host(a: Analysis) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Return (class, starts, ends) of the main thread's time."""
    line = a.timeline
    own = line.thread == a.trace.main_thread
    start, end, code = line.start[own], line.end[own], line.code[own]
    return [
        (f"host: {HOST[which]}", start[code == which], end[code == which])
        for which in np.unique(code).tolist()
    ]


def _operators(a: Analysis) -> _Work:
    """Return operators of the main thread, each piece in which nothing runs below it."""
    line = a.timeline
    own = (line.thread == a.trace.main_thread) & (line.code == HOST.index("dispatch"))
    own &= line.row >= 0
    start = line.start[own]
    return _Work(
        a.trace.cpu["name"].gather(line.row[own]),
        pl.Series(start),
        pl.Series(line.end[own] - start),
    )


def _by_name(
    a: Analysis, work: _Work, short: np.ndarray, long: np.ndarray
) -> list[StepVariationPart]:
    """Sum time by name inside the steps of each half, a piece in the step where it starts."""
    used = a.steps.used
    ts = work.ts.to_numpy()
    order = np.argsort(used["ts"].to_numpy(), kind="stable")
    starts = used["ts"].to_numpy()[order]
    index = np.searchsorted(starts, ts, side="right") - 1
    step = np.where(index >= 0, order[np.maximum(index, 0)], -1)
    inside = (index >= 0) & (ts < used["end"].to_numpy()[step])
    half = np.zeros(used.height, dtype=np.int8)
    half[short], half[long] = -1, 1
    side = np.where(inside, half[np.maximum(step, 0)], 0)
    size = len(short)
    table = (
        pl.DataFrame({"name": work.name, "side": side, "dur": work.dur})
        .filter(pl.col("side") != 0)
        .group_by("name")
        .agg(
            (pl.col("dur") * pl.col("side")).sum().alias("ns") / size,
            (pl.col("side") == -1).sum().alias("short") / size,
            (pl.col("side") == 1).sum().alias("long") / size,
        )
        .sort(-pl.col("ns"), pl.col("name").cast(pl.String))
        .head(20)
    )
    return [
        StepVariationPart(str(name), float(ns), float(few), float(many))
        for name, ns, few, many in table.iter_rows()
    ]


def _largest(parts: list[StepVariationPart], difference: float) -> list[StepVariationPart]:
    kept = [part for part in parts if part.ns >= NAMED_SHARE * difference]
    return sorted(kept, key=lambda part: -part.ns)[:LIMIT]
