"""Differences between steps: one-off costs of a recording (a first call loads code, searches
algorithms or compiles kernels), and the longer half of the steps compared with the shorter half."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import polars as pl

from advisor.core.intervals import Intervals, covered_length, intervals_of, union
from advisor.core.report_steps import StepVariation, StepVariationPart
from advisor.measure.device.families import CLASSES
from advisor.measure.steps.timeline import CLASSES as HOST

if TYPE_CHECKING:
    from advisor.measure import Analysis


_MIN_TIMES_LONGER = 10.0
"""Minimum ratio of a first call to the median of later calls at which it did additional work: first
calls that only warm caches take two or three times as long."""
MIN_EXCESS_NS = 1_000_000
"""Minimum excess of a first call, ns: loading a module, searching or compiling takes longer."""
MAX_BUSY = 0.2
"""Maximum share of the call in which the device works: a call that waits for it is not a cost."""
_MIN_EXCESS_SHARE = 0.05
"""Minimum share of a call in the analysed time: shorter ones may be slow by chance."""
MIN_LONE_SHARE = 0.5
"""Minimum share of a single call in the analysed time, if no other step shows that it does not
recur."""
NOT_A_FUNCTION = r"::|#|Backward\d*$|^cu[A-Z]|^hip[A-Z]"
"""Pattern of operators, marks and nodes of autograd. Anything else in the operators' category is a
function compiled by TorchScript, under its own name."""
CALLS = ("launch", "graph_launch", "module_load", "malloc", "host_alloc", "free", "other")

ONE_OFF_SCHEMA: dict[str, Any] = {
    "host": pl.Int64,  # row of trace.cpu
    "name": pl.String,
    "ts": pl.Int64,  # ns
    "dur": pl.Int64,  # ns
    "usual": pl.Float64,  # ns: median of the later calls; start-up: time in calls; null if none
    "count": pl.Int64,  # calls of this kind, including this one
}
CAPTURE = "capture of a CUDA graph"
LOADING = "start-up around"
_SETUP_CALLS = ("other", "malloc", "free", "host_alloc", "host_free", "event_query")
"""Calls, other than the loading of code, that set something up or query something."""


def find_one_off_rows(a: Analysis) -> pl.DataFrame:
    """Find host rows that did something once, with the columns of ONE_OFF_SCHEMA, outermost first.

    These are captures of graphs, and intervals in which a thread only loads GPU code, unless the
    steps do so. They also include an operator's first call with given inputs, and a runtime call
    that is the first of its name or within such an operator, if it took _MIN_TIMES_LONGER as long
    as the median of later calls while the device idled. Of nested operators, the innermost with
    nearly all of the time is named. A call without a later one may be slow every time. It counts
    only if it is a compiled function (TorchScript) whose time nothing recorded inside explains, and
    either other steps do without it or it takes MIN_LONE_SHARE of the analysed time."""
    cpu = a.trace.cpu
    if cpu.is_empty() or a.device_id is None:
        return pl.DataFrame(schema=ONE_OFF_SCHEMA)
    captures = pl.concat([_find_captures(a), _find_loading(a)])
    new_shape_time = a.new_shape_spans
    rows = cpu.with_row_index("host").filter(
        (pl.col("kind") == "op") | pl.col("call").cast(pl.String).is_in(CALLS)
    )
    key_columns = ["name", "inputs"]
    long_calls = rows.select("host", "ts", "dur", "thread", "parent", *key_columns).filter(
        pl.col("dur") >= max(MIN_EXCESS_NS, _MIN_EXCESS_SHARE * a.span_ns)
    )
    if long_calls.is_empty():
        return captures
    same_calls = rows.join(
        long_calls.select(key_columns).unique(), on=key_columns, how="semi", nulls_equal=True
    )
    groups = same_calls.group_by(key_columns).agg(
        first=pl.col("host").sort_by("ts").first(),
        usual=pl.col("dur").sort_by("ts").slice(1).median(),
        count=pl.len().cast(pl.Int64),
    )
    long_calls = long_calls.join(groups, on=key_columns, nulls_equal=True)
    min_share = _MIN_EXCESS_SHARE if a.steps.used.height > 2 else MIN_LONE_SHARE
    is_lone = (pl.col("count") == 1) & pl.Series(
        _measure_self_time(a, long_calls) >= min_share * a.span_ns
    )
    is_lone &= ~pl.col("name").cast(pl.String).str.contains(NOT_A_FUNCTION)
    is_slow_first = (pl.col("count") > 2) & (pl.col("dur") > _MIN_TIMES_LONGER * pl.col("usual"))
    result = long_calls.filter(
        (pl.col("host") == pl.col("first")) & (is_slow_first.fill_null(False) | is_lone)
    )
    ts, dur = result["ts"].to_numpy(), result["dur"].to_numpy()
    busy = covered_length(ts, ts + dur, busy_in_recording(a))
    # calls that most steps repeat because their shapes are new are not start-up
    result = result.filter(
        pl.Series(
            (busy <= MAX_BUSY * dur) & (2 * covered_length(ts, ts + dur, new_shape_time) <= dur)
        )
    )
    calls = _keep_innermost(result).select(
        pl.col("host").cast(pl.Int64), pl.col("name").cast(pl.String), "ts", "dur", "usual", "count"
    )
    return pl.concat([captures, calls]) if captures.height else calls


def _find_loading(a: Analysis) -> pl.DataFrame:
    """Find long sequences of calls of a thread that load GPU code (``cuModuleLoad…``,
    ``cuLibraryLoad…`` and HIP's), with nothing else recorded between them and the device idle: a
    library starts up. Empty if more than half of the steps have one."""
    rows = a.trace.cpu.with_row_index("host").select(
        pl.col("host").cast(pl.Int64), "thread", "ts", "dur", "name", "call",
        loads=(pl.col("call") == "module_load").fill_null(False),
        quiet=((pl.col("kind") == "runtime") & pl.col("call").cast(pl.String).is_in(_SETUP_CALLS))
        .fill_null(False),
    )  # fmt: skip
    if int(rows["loads"].sum()) < 2:
        return pl.DataFrame(schema=ONE_OFF_SCHEMA)
    rows = rows.sort("thread", "ts").with_columns(
        stretch=(~(pl.col("loads") | pl.col("quiet"))).cum_sum().over("thread")
    )
    loading = (
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
    is_long = pl.col("dur") >= max(MIN_EXCESS_NS, _MIN_EXCESS_SHARE * a.span_ns)
    loading = loading.filter(
        is_long, pl.Series(covered_length(*_start_and_end(loading), busy_in_recording(a)) == 0)
    )
    steps = a.steps.used.height
    in_steps = covered_length(*_start_and_end(loading), a.spans)
    if steps > 2 and int((in_steps > 0).sum()) > steps / 2:
        return pl.DataFrame(schema=ONE_OFF_SCHEMA)
    return loading.select(
        "host",
        pl.format("{} {}", pl.lit(LOADING), "name").alias("name"),
        "ts",
        "dur",
        "usual",
        "count",
    )


def busy_in_recording(a: Analysis) -> Intervals:
    """Return the intervals in which the analysed device works, inside the steps or not."""
    return intervals_of(a.trace.gpu.filter(pl.col("device") == a.device_id))


def _find_captures(a: Analysis) -> pl.DataFrame:
    """Find long captures of graphs, each from its begin to its end on the same thread. Empty if
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
    is_end = ~pl.col("begins").shift(-1) & (pl.col("thread") == pl.col("thread").shift(-1))
    captures = marks.with_columns(dur=end - pl.col("ts"), ends=is_end).filter("begins", "ends")
    in_steps = covered_length(*_start_and_end(captures), a.spans)
    steps = a.steps.used.height
    if steps > 2 and int((in_steps > 0).sum()) > steps / 2:
        return pl.DataFrame(schema=ONE_OFF_SCHEMA)
    is_long = pl.col("dur") >= max(MIN_EXCESS_NS, _MIN_EXCESS_SHARE * a.span_ns)
    return captures.filter(is_long).select(
        pl.col("host").cast(pl.Int64),
        pl.lit(CAPTURE).alias("name"),
        "ts",
        "dur",
        pl.lit(None, pl.Float64).alias("usual"),
        pl.lit(captures.height, pl.Int64).alias("count"),
    )


def _start_and_end(rows: pl.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    ts = rows["ts"].to_numpy()
    return ts, ts + rows["dur"].to_numpy()


def _measure_self_time(a: Analysis, rows: pl.DataFrame) -> np.ndarray:
    """Return the self time of host rows, outside what was recorded inside them, ns."""
    cpu = a.trace.cpu
    inner = cpu.select("ts", "dur", host="parent").join(rows.select("host"), on="host", how="semi")
    ts, dur = rows["ts"].to_numpy(), rows["dur"].to_numpy()
    self_ns: np.ndarray = dur - covered_length(ts, ts + dur, intervals_of(inner))
    return self_ns


def _keep_innermost(result: pl.DataFrame) -> pl.DataFrame:
    """Drop rows that contain another row of nearly the same length."""
    result = result.sort("ts", "dur", descending=[False, True])
    ts, dur, thread = (result[column].to_numpy() for column in ("ts", "dur", "thread"))
    is_kept = np.ones(len(ts), dtype=np.bool_)
    for row in range(len(ts) - 1):  # a few rows: first calls of milliseconds
        is_inside = (thread == thread[row]) & (ts >= ts[row]) & (ts + dur <= ts[row] + dur[row])
        is_inside[: row + 1] = False
        is_kept[row] = not (is_inside & (dur >= 0.8 * dur[row])).any()
    return result.filter(pl.Series(is_kept))


_MIN_STEPS = 4
"""Minimum number of steps for halves, so that one unusual step does not represent a half."""
_MIN_SPREAD = 1.3
"""Minimum ratio of the longest to the shortest step for comparing the halves."""
_MIN_NAMED_SHARE = 0.15
"""Minimum share of the difference for listing a class or a kind of work."""
_MAX_PARTS = 4


def compare_halves(a: Analysis) -> StepVariation | None:
    """Compare the longer half of the used steps with the shorter half; a median step is in neither.
    ``None`` if the steps are similar, or too few. Without device work, it compares the main
    thread's time by class, and operators by self time. All classes together would add up to the
    difference."""
    used = a.steps.used
    if used.height < _MIN_STEPS or (a.device_id is None and a.trace.main_thread is None):
        return None
    dur = used["dur"].to_numpy()
    if dur.max() < _MIN_SPREAD * max(int(dur.min()), 1):
        return None
    order = np.argsort(dur, kind="stable")
    half = len(order) // 2
    short_half, long_half = order[:half], order[-half:]
    difference = float(dur[long_half].mean() - dur[short_half].mean())
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
        work = _list_operators(a)
    for cause, cause_start, cause_end in _host_parts(a) if a.device_id is None else _idle_parts(a):
        amounts[cause] = covered_length(start, end, union(cause_start, cause_end))
    classes = [
        StepVariationPart(name, float(values[long_half].mean() - values[short_half].mean()))
        for name, values in amounts.items()
    ]
    return StepVariation(
        float(dur[short_half].mean()),
        float(dur[long_half].mean()),
        _largest_parts(classes, difference),
        _largest_parts(_sum_by_name(a, work, short_half, long_half), difference),
    )


def _idle_parts(a: Analysis) -> list[tuple[str, np.ndarray, np.ndarray]]:
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


def _host_parts(a: Analysis) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Return (class, starts, ends) of the main thread's activity."""
    timeline = a.timeline
    is_main = timeline.thread == a.trace.main_thread
    start, end, code = timeline.start[is_main], timeline.end[is_main], timeline.code[is_main]
    return [
        (f"host: {HOST[host_class]}", start[code == host_class], end[code == host_class])
        for host_class in np.unique(code).tolist()
    ]


def _list_operators(a: Analysis) -> _Work:
    """Return operators of the main thread, as pieces in which nothing runs below them."""
    timeline = a.timeline
    is_operator_time = (timeline.thread == a.trace.main_thread) & (
        timeline.code == HOST.index("dispatch")
    )
    is_operator_time &= timeline.row >= 0
    start = timeline.start[is_operator_time]
    return _Work(
        a.trace.cpu["name"].gather(timeline.row[is_operator_time]),
        pl.Series(start),
        pl.Series(timeline.end[is_operator_time] - start),
    )


def _sum_by_name(
    a: Analysis, work: _Work, short: np.ndarray, long: np.ndarray
) -> list[StepVariationPart]:
    """Sum time by name inside the steps of each half. A piece counts in the step where it
    starts."""
    used = a.steps.used
    ts = work.ts.to_numpy()
    order = np.argsort(used["ts"].to_numpy(), kind="stable")
    starts = used["ts"].to_numpy()[order]
    index = np.searchsorted(starts, ts, side="right") - 1
    step = np.where(index >= 0, order[np.maximum(index, 0)], -1)
    in_step = (index >= 0) & (ts < used["end"].to_numpy()[step])
    side_of_step = np.zeros(used.height, dtype=np.int8)
    side_of_step[short], side_of_step[long] = -1, 1
    side = np.where(in_step, side_of_step[np.maximum(step, 0)], 0)
    steps_per_half = len(short)
    table = (
        pl.DataFrame({"name": work.name, "side": side, "dur": work.dur})
        .filter(pl.col("side") != 0)
        .group_by("name")
        .agg(
            (pl.col("dur") * pl.col("side")).sum().alias("ns") / steps_per_half,
            (pl.col("side") == -1).sum().alias("short") / steps_per_half,
            (pl.col("side") == 1).sum().alias("long") / steps_per_half,
        )
        .sort(-pl.col("ns"), pl.col("name").cast(pl.String))
        .head(20)
    )
    return [
        StepVariationPart(str(name), float(ns), float(short_count), float(long_count))
        for name, ns, short_count, long_count in table.iter_rows()
    ]


def _largest_parts(parts: list[StepVariationPart], difference: float) -> list[StepVariationPart]:
    large_parts = [part for part in parts if part.ns >= _MIN_NAMED_SHARE * difference]
    return sorted(large_parts, key=lambda part: -part.ns)[:_MAX_PARTS]
