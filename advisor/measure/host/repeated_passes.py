"""Passes of a training step that run more often than once: layers that run forward a second time,
and nodes of the autograd graph that run backward again."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from advisor.core.intervals import EMPTY, Intervals, covered_length, intersect, union
from advisor.measure.device.families import find_layer_operators
from advisor.measure.host.device_reads import backward_nodes
from advisor.measure.host.names import name_matches
from advisor.measure.host.stacks import (
    BACKWARD,
    ENGINE_NODE,
    climb_stack,
    is_operator,
    outermost_rows,
    parent_rows,
)
from advisor.measure.steps.steps import step_of

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
    rows = outermost_rows(trace)
    own = cpu[rows].select("name", "inputs", "ts", "dur", "thread").with_columns(row=rows)
    graph = climb_stack(
        parent_rows(trace), operator, np.unique(a.forward_op[a.forward_op >= 0]), top=True
    )
    own = own.with_columns(trained=pl.Series(np.isin(rows, graph)))
    own = own.filter((pl.col("thread") == main) & pl.col("inputs").is_not_null())
    own = own.filter(find_layer_operators(own["name"])).sort("ts")
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


def repeated_backwards(a: Analysis) -> Intervals:
    """Find host time in which autograd nodes run that run again later in the step, or did in an
    earlier one: a graph that ``retain_graph=True`` keeps goes backward several times.

    A node is known by its name and its forward operator's sequence number. Gradients that are
    accumulated after it count with it. Nodes with derivatives of their own (``create_graph=True``)
    are left out: a gradient of a gradient needs them twice. But where two such passes of a step
    begin at one node, the same output is differentiated twice: what both run counts once, with its
    own derivatives."""
    cpu = a.trace.cpu
    rows = np.flatnonzero(name_matches(cpu["name"], ENGINE_NODE).to_numpy())
    if not len(rows):
        return EMPTY
    table = cpu[rows].select("sequence", "thread", "ts", end=pl.col("ts") + pl.col("dur"))
    table = table.with_columns(
        name=cpu["name"].gather(rows).to_physical(),
        row=pl.Series(rows),
        again=pl.Series(np.isin(rows, differentiated_nodes(a))),
        step=pl.Series(step_of(a.steps, table["ts"].to_numpy())),
    ).sort("thread", "ts")
    key = ("sequence", "name")
    later = pl.col("ts") < pl.col("ts").max().over(*key, "step")
    earlier = pl.col("step") > pl.col("step").min().over(*key)
    twice = _differentiated_twice(a, table)
    excess = ((later | earlier) & ~pl.col("again").any().over(*key)) | twice
    table = table.with_columns(
        excess=pl.when(pl.col("sequence").is_not_null() & pl.col("step").is_not_null()).then(excess)
    )
    # gradients that are accumulated have no number: they belong to the node before them
    table = table.with_columns(
        pl.col("excess").forward_fill().over("thread").fill_null(value=False)
    )
    stretch = (pl.col("excess") != pl.col("excess").shift(1)).fill_null(value=True).cum_sum()
    spans = (
        table.with_columns(stretch=stretch.over("thread"))
        .filter("excess")
        .group_by("thread", "stretch", maintain_order=True)
        .agg(pl.col("ts").min(), pl.col("end").max())
    )
    return intersect(union(spans["ts"].to_numpy(), spans["end"].to_numpy()), a.steps.host_spans)


def differentiated_nodes(a: Analysis) -> np.ndarray:
    """Return rows of ``trace.cpu``: autograd nodes with derivatives of their own. Operators inside
    a node have a number of their own only if they make nodes in turn."""
    around = backward_nodes(a)
    number = a.trace.cpu["sequence"].fill_null(-1).to_numpy()
    return np.unique(around[(around >= 0) & (number >= 0) & (number != number[around])])


def _differentiated_twice(a: Analysis, table: pl.DataFrame) -> pl.Series:
    """Return which nodes of ``table`` (sorted by thread and time) are of passes with derivatives of
    their own that begin at the same node as a later one, or are derivatives of these nodes. The
    engine runs the nodes of a pass from the largest sequence number down: a larger one begins the
    next pass."""
    number = pl.col("sequence").forward_fill().over("thread")
    table = table.with_columns(number=number)
    begins = (pl.col("number") > pl.col("number").shift(1).over("thread")).fill_null(value=True)
    table = table.with_columns(part=begins.cum_sum().over("thread"))
    part = ("thread", "part")
    table = table.with_columns(
        root=pl.col("number").first().over(*part),
        kind=pl.col("name").first().over(*part),
        learns=pl.col("again").any().over(*part),
    )
    same = ("step", "thread", "root", "kind", "learns")
    last = pl.col("part").max().over(*same)
    both = pl.col("part").n_unique().over(*same, "sequence", "name") > 1
    first = pl.col("learns") & (pl.col("part") < last) & both & pl.col("step").is_not_null()
    twice = table.select(first.fill_null(value=False)).to_series()
    if not twice.any():
        return twice
    spans = table.filter(twice)
    own = union(spans["ts"].to_numpy(), spans["end"].to_numpy())
    cpu = a.trace.cpu
    makes = pl.Series(~name_matches(cpu["name"], BACKWARD)) & cpu["sequence"].is_not_null()
    # operators that make no node carry the number of the next one that does
    makers = cpu.filter(makes).group_by("sequence").agg(pl.col("ts").max())
    ts = makers["ts"].to_numpy()
    derived = makers.filter(pl.Series(covered_length(ts, ts + 1, own) > 0))["sequence"]
    return twice | table["sequence"].is_in(derived.implode()).fill_null(value=False)
