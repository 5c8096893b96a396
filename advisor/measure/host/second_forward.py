"""Forward passes of a training step that repeat one which the backward pass goes through."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from advisor.core.intervals import EMPTY, Intervals, intersect, union
from advisor.measure.device.families import are_layers
from advisor.measure.host.stacks import (
    climb_stack,
    is_operator,
    outermost_operator,
    parent_rows,
)

if TYPE_CHECKING:
    from advisor.measure import Analysis

MIN_LAYERS = 4
"""Layers of a forward pass, at least: two networks of fewer may have equal shapes by chance."""


def second_forwards(a: Analysis) -> Intervals:
    """Find host time of layers that run a second time in a step with inputs of the same shapes. No
    backward pass goes through them: a forward for metrics, or another model of the same kind. Empty
    unless each layer of the trained forward pass comes again, in most steps."""
    main = a.trace.main_thread
    if main is None or not (a.forward_op >= 0).any():
        return EMPTY
    table = _layers(a, main)
    marks = a.steps.marks.filter("used")
    begin, end = (marks[name].to_numpy() for name in ("ts", "end"))
    step = np.searchsorted(begin, table["ts"].to_numpy(), side="right") - 1
    inside = (step >= 0) & (table["ts"].to_numpy() < end[np.maximum(step, 0)])
    table = table.with_columns(step=step).filter(pl.Series(inside))
    found = [_repeated(each) for _, each in table.group_by("step", maintain_order=True)]
    found = [each for each in found if len(each)]
    if 2 * len(found) <= len(begin):
        return EMPTY
    spans = np.concatenate(found)
    return intersect(union(spans[:, 0], spans[:, 1]), a.steps.host_spans)


def _layers(a: Analysis, main: int) -> pl.DataFrame:
    """List outermost layers of the main thread in order of time: ``ts``, ``end``, ``key`` (operator
    and shapes), ``trained``."""
    trace, cpu = a.trace, a.trace.cpu
    operator = is_operator(trace)
    outermost = outermost_operator(trace)
    rows = np.flatnonzero((outermost == np.arange(len(outermost))) & operator)
    own = cpu[rows].select("name", "inputs", "ts", "dur", "thread").with_columns(row=rows)
    graph = climb_stack(
        parent_rows(trace), operator, np.unique(a.forward_op[a.forward_op >= 0]), top=True
    )
    own = own.with_columns(trained=pl.Series(np.isin(rows, graph)))
    own = own.filter((pl.col("thread") == main) & pl.col("inputs").is_not_null())
    own = own.filter(are_layers(own["name"])).sort("ts")
    return own.select(
        "ts",
        "trained",
        end=pl.col("ts") + pl.col("dur"),
        key=pl.struct(pl.col("name").to_physical(), "inputs").rank("dense"),
    )


def _repeated(step: pl.DataFrame) -> np.ndarray:
    """Return (begin, end) of each stretch of layers in one step that repeat trained ones."""
    trained = step["trained"].to_numpy()
    key = step["key"].to_numpy()
    wanted, others = Counter(key[trained].tolist()), Counter(key[~trained].tolist())
    none = np.empty((0, 2), dtype=np.int64)
    if wanted.total() < MIN_LAYERS or any(others[k] < n for k, n in wanted.items()):
        return none
    again = ~trained & np.isin(key, list(wanted))
    first = again & ~np.append(False, again[:-1])
    last = again & ~np.append(again[1:], False)
    return np.column_stack([step["ts"].to_numpy()[first], step["end"].to_numpy()[last]])
