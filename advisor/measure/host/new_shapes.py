"""Calls in which a library prepares an operator for input shapes that occur for the first time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from advisor.core.intervals import Intervals, covered_length, intervals_of
from advisor.measure.host.names import name_matches
from advisor.measure.host.op_tree import measure_self_time
from advisor.measure.steps.step_differences import MAX_BUSY, busy_in_recording
from advisor.measure.steps.steps import step_of_call

if TYPE_CHECKING:
    from advisor.measure import Analysis

MIN_SELF_NS = 1_000_000
"""Minimum self time at which a call prepares something, ns. Dispatch takes some 5 to 150 µs."""
_MIN_TIMES_LONGER = 10.0
"""Minimum ratio of the self time to the time of calls with repeated shapes."""
_MIN_STEPS = 3
"""Minimum steps with slow calls: a run's first step and a smaller last batch do not recur."""
_MIN_STEPS_SHARE = 0.5
"""Share of the steps above which shapes keep changing. Fewer steps are a start-up that ends."""
MAX_SLOW_REPEATS = 0.1
"""Maximum share of slow calls among repeated shapes. Above it, shapes are not the cause."""
CUDA_CALL_NS = 10_000
"""Time of a library's own code around each CUDA call, ns. A recurrent layer launches thousands."""
REPEATED_NS = 100_000.0
"""Assumed time of a repeated call if the trace has none, ns: 50 to 120 µs on an H100."""
PREPARED = (
    r"^aten::(?:cudnn_convolution\w*|miopen_\w*convolution\w*|convolution_backward"
    r"|_cudnn_attention_(?:forward|backward)|_cudnn_rnn(?:_backward)?|miopen_rnn\w*"
    r"|addmm|mm|bmm|baddbmm|_addmm_activation|_scaled_mm|_grouped_mm|_scaled_grouped_mm)$"
)
"""Operators whose libraries plan per shape, so that no repeated call is needed as evidence."""
_EVENT_WAIT = r"^(?:cuda|hip)EventSynchronize$"

ONE_OFF = ("allocation", "launch", "dispatch", "python", "unknown")
"""Classes of host time that costly first calls replace."""

NEW_SHAPES_SCHEMA: dict[str, Any] = {
    "host": pl.Int64,  # row of trace.cpu
    "name": pl.String,
    "step": pl.Int32,  # index of the used step
    "ts": pl.Int64,  # ns
    "dur": pl.Int64,  # ns
    "self_ns": pl.Int64,  # self time without CUDA_CALL_NS for each CUDA call inside, ns
    "usual": pl.Float64,  # median time of calls with repeated shapes, ns; null if there are none
    "timed_algorithms": pl.Int64,  # number of algorithms that are timed inside
}


def first_calls(a: Analysis) -> pl.DataFrame:
    """List costly first calls, which start, load, search or compile once (``step_differences.py``)
    or for each new shape: ``host`` (row of trace.cpu), ``ts``, ``dur``, ns."""
    tables = (a.one_off_costs, a.new_shape_calls)
    return pl.concat([table.select("host", "ts", "dur") for table in tables])


def new_shape_calls(a: Analysis) -> pl.DataFrame:
    """Find operators that are slow when their input shapes first occur, and fast afterwards, in
    most of the steps: columns of NEW_SHAPES_SCHEMA, in order of time.

    An operator is slow if its self time, without CUDA_CALL_NS for each CUDA call, is at least
    MIN_SELF_NS, and _MIN_TIMES_LONGER times the time of calls with repeated shapes and types. If
    the trace has no repeated calls, PREPARED names the operators. Timed algorithms are counted
    by the waits for an event inside. Without recorded shapes, a device or enough steps the
    table is empty."""
    cpu = a.trace.cpu
    empty = pl.DataFrame(schema=NEW_SHAPES_SCHEMA)
    is_known = (cpu["kind"] == "op") & cpu["inputs"].is_not_null()
    used_steps = a.steps.used.height
    if a.device_id is None or a.steps.source == "whole trace" or used_steps < _MIN_STEPS:
        return empty
    if not (is_known & (cpu["dur"] >= MIN_SELF_NS)).any():
        return empty
    around_runtime = cpu["parent"].filter(cpu["kind"] == "runtime").drop_nulls().to_numpy()
    self_ns = measure_self_time(a, cpu["dur"].to_numpy().astype(np.int64))
    self_ns -= CUDA_CALL_NS * np.bincount(around_runtime, minlength=cpu.height)
    calls = cpu.with_row_index("host").with_columns(self_ns=pl.Series(self_ns))
    calls = calls.select(
        pl.col("host").cast(pl.Int64), "name", "ts", "dur", "self_ns", "inputs"
    ).filter(is_known)
    is_slow = pl.col("self_ns") >= MIN_SELF_NS
    calls = calls.filter(is_slow.any().over("name"))
    if calls.is_empty():
        return empty
    shape_ranks = a.trace.inputs.select(shapes=pl.struct("dims", "types").rank("dense"))
    calls = (
        calls.with_columns(shapes=shape_ranks["shapes"].gather(calls["inputs"]))
        .sort("ts")
        .with_columns(again=~pl.struct("name", "shapes").is_first_distinct())
        .with_columns(
            usual=pl.col("dur").filter("again").median().over("name"),
            slow_again=is_slow.filter("again").mean().over("name"),
        )
    )
    is_prepared = name_matches(calls["name"], PREPARED)
    is_repeated = pl.col("usual").is_not_null()
    is_slower = is_repeated & (pl.col("slow_again") <= MAX_SLOW_REPEATS)
    is_slower &= pl.col("self_ns") >= _MIN_TIMES_LONGER * pl.col("usual")
    calls = calls.filter(
        ~pl.col("again") & is_slow & (is_slower | (~is_repeated & pl.Series(is_prepared)))
    )
    calls = _count_timed_algorithms(a, calls)
    calls = calls.with_columns(step=step_of_call(a.steps, calls["ts"].to_numpy())).filter(
        pl.col("step").is_not_null()
    )
    steps = pl.col("step").n_unique().over("name")
    calls = calls.filter((steps >= _MIN_STEPS) & (steps > _MIN_STEPS_SHARE * used_steps))
    return calls.select(
        pl.col(name).cast(pl.String if name == "name" else dtype)
        for name, dtype in NEW_SHAPES_SCHEMA.items()
    )


def _count_timed_algorithms(a: Analysis, calls: pl.DataFrame) -> pl.DataFrame:
    """Count the algorithms that each call times. Drop calls that time none if the device works
    meanwhile."""
    cpu = a.trace.cpu
    parent = cpu["parent"].filter(name_matches(cpu["name"], _EVENT_WAIT)).drop_nulls().to_numpy()
    count = np.bincount(parent, minlength=cpu.height)[calls["host"].to_numpy()]
    ts, dur = calls["ts"].to_numpy(), calls["dur"].to_numpy()
    idle = covered_length(ts, ts + dur, busy_in_recording(a)) <= MAX_BUSY * dur
    count = np.where(count > 1, count, 0)
    return calls.with_columns(timed_algorithms=pl.Series(count)).filter(
        pl.Series(idle | (count > 1))
    )


def new_shape_spans(a: Analysis) -> Intervals:
    """Return the intervals in which the calls of ``new_shape_calls`` run."""
    return intervals_of(a.new_shape_calls)
