"""Calls in which a library prepares an operator for input shapes that come for the first time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from advisor.core.intervals import Intervals, covered_length, union
from advisor.measure.host.names import name_matches
from advisor.measure.host.op_tree import measure_self_time
from advisor.measure.steps.step_differences import MAX_BUSY, busy_in_recording
from advisor.measure.steps.steps import step_of_call

if TYPE_CHECKING:
    from advisor.measure import Analysis

MIN_OWN_NS = 1_000_000
"""Self time from which a call prepares something, ns: dispatch takes some 5 to 150 µs."""
TIMES_LATER = 10.0
"""Ratio of that to the time of calls whose shapes have come before."""
MIN_STEPS = 3
"""Steps with such calls: the first of a run, and one with a smaller last batch, are no habit."""
MIN_STEPS_SHARE = 0.5
"""Share of the steps above which shapes keep changing: fewer are a start-up that ends."""
MAX_SLOW_REPEATS = 0.1
"""Part of the calls with shapes seen before that may be as slow: above it, shapes are no cause."""
CALL_NS = 10_000
"""Code of a library around each of its CUDA calls, ns: a recurrent layer launches thousands."""
REPEATED_NS = 100_000.0
"""Time of a repeated call where none is in the trace, ns: 50 to 120 µs on an H100."""
PREPARED = (
    r"^aten::(?:cudnn_convolution\w*|miopen_\w*convolution\w*|convolution_backward"
    r"|_cudnn_attention_(?:forward|backward)|_cudnn_rnn(?:_backward)?|miopen_rnn\w*"
    r"|addmm|mm|bmm|baddbmm|_addmm_activation|_scaled_mm|_grouped_mm|_scaled_grouped_mm)$"
)
"""Operators whose libraries plan per shape, so that no repeated call has to show it."""
_TRIAL = r"^(?:cuda|hip)EventSynchronize$"

ONE_OFF = ("allocation", "launch", "dispatch", "python", "unknown")
"""Classes of host time that costly first calls are instead of."""

NEW_SHAPES_SCHEMA: dict[str, Any] = {
    "host": pl.Int64,  # row of trace.cpu
    "name": pl.String,
    "step": pl.Int32,  # index of the used step
    "ts": pl.Int64,  # ns
    "dur": pl.Int64,  # ns
    "own": pl.Int64,  # self time without CALL_NS for each CUDA call inside, ns
    "usual": pl.Float64,  # median time of calls with repeated shapes, ns; null: none
    "trials": pl.Int64,  # algorithms that are timed inside; 0: none
}


def first_calls(a: Analysis) -> pl.DataFrame:
    """Costly first calls, which start, load, search or compile once (``step_differences.py``) or
    for each new shape: ``host`` (row of trace.cpu), ``ts`` and ``dur``, ns."""
    tables = (a.one_off_costs, a.new_shape_calls)
    return pl.concat([table.select("host", "ts", "dur") for table in tables])


def new_shape_calls(a: Analysis) -> pl.DataFrame:
    """Find operators that take long on the first sight of their input shapes, and short afterwards,
    in most of the steps: columns of NEW_SHAPES_SCHEMA, in order of time.

    Long is the self time, outside of everything recorded inside and without CALL_NS for each CUDA
    call: MIN_OWN_NS, and TIMES_LATER the time of calls whose shapes and types have come before.
    Where the trace has no such calls, PREPARED names the operators. Trials are waits for an event
    inside, as in a search of algorithms. Without recorded shapes, a device or enough steps the
    table is empty."""
    cpu = a.trace.cpu
    empty = pl.DataFrame(schema=NEW_SHAPES_SCHEMA)
    known = (cpu["kind"] == "op") & cpu["inputs"].is_not_null()
    used = a.steps.used.height
    if a.device_id is None or a.steps.source == "whole trace" or used < MIN_STEPS:
        return empty
    if not (known & (cpu["dur"] >= MIN_OWN_NS)).any():
        return empty
    inside = cpu["parent"].filter(cpu["kind"] == "runtime").drop_nulls().to_numpy()
    own = measure_self_time(a, cpu["dur"].to_numpy().astype(np.int64))
    own -= CALL_NS * np.bincount(inside, minlength=cpu.height)
    calls = cpu.with_row_index("host").with_columns(own=pl.Series(own))
    calls = calls.select(
        pl.col("host").cast(pl.Int64), "name", "ts", "dur", "own", "inputs"
    ).filter(known)
    slow = pl.col("own") >= MIN_OWN_NS
    calls = calls.filter(slow.any().over("name"))
    if calls.is_empty():
        return empty
    kinds = a.trace.inputs.select(shapes=pl.struct("dims", "types").rank("dense"))
    calls = (
        calls.with_columns(shapes=kinds["shapes"].gather(calls["inputs"]))
        .sort("ts")
        .with_columns(again=~pl.struct("name", "shapes").is_first_distinct())
        .with_columns(
            usual=pl.col("dur").filter("again").median().over("name"),
            slow_again=slow.filter("again").mean().over("name"),
        )
    )
    listed = name_matches(calls["name"], PREPARED)
    repeats = pl.col("usual").is_not_null()
    shown = repeats & (pl.col("slow_again") <= MAX_SLOW_REPEATS)
    shown &= pl.col("own") >= TIMES_LATER * pl.col("usual")
    calls = calls.filter(~pl.col("again") & slow & (shown | (~repeats & pl.Series(listed))))
    calls = _with_trials(a, calls)
    calls = calls.with_columns(step=step_of_call(a.steps, calls["ts"].to_numpy())).filter(
        pl.col("step").is_not_null()
    )
    steps = pl.col("step").n_unique().over("name")
    calls = calls.filter((steps >= MIN_STEPS) & (steps > MIN_STEPS_SHARE * used))
    return calls.select(
        pl.col(name).cast(pl.String if name == "name" else dtype)
        for name, dtype in NEW_SHAPES_SCHEMA.items()
    )


def _with_trials(a: Analysis, calls: pl.DataFrame) -> pl.DataFrame:
    """Count the trial runs in each call. Drop calls without any in which the device works."""
    cpu = a.trace.cpu
    parent = cpu["parent"].filter(name_matches(cpu["name"], _TRIAL)).drop_nulls().to_numpy()
    count = np.bincount(parent, minlength=cpu.height)[calls["host"].to_numpy()]
    ts, dur = calls["ts"].to_numpy(), calls["dur"].to_numpy()
    idle = covered_length(ts, ts + dur, busy_in_recording(a)) <= MAX_BUSY * dur
    count = np.where(count > 1, count, 0)
    return calls.with_columns(trials=pl.Series(count)).filter(pl.Series(idle | (count > 1)))


def new_shape_spans(a: Analysis) -> Intervals:
    """Return when such calls run."""
    calls = a.new_shape_calls
    ts = calls["ts"].to_numpy()
    return union(ts, ts + calls["dur"].to_numpy())
