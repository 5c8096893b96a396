"""Passes of a training step that run more than once: layers that run forward a second time, and
nodes of the autograd graph that run backward again."""

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
"""Minimum layers of a forward pass: two smaller networks may have equal shapes by chance."""


def second_forwards(a: Analysis) -> Intervals:
    """Find host time of layers that run a second time in a step with inputs of the same shapes. No
    backward pass goes through them: a forward for metrics, or another model of the same kind. Empty
    unless each layer of the trained forward pass runs again, in most steps."""
    main = a.trace.main_thread
    if main is None or not (a.forward_op >= 0).any():
        return EMPTY
    table = _list_layers(a, main)
    marks = a.steps.marks.filter("used")
    start, end = (marks[name].to_numpy() for name in ("ts", "end"))
    step = np.searchsorted(start, table["ts"].to_numpy(), side="right") - 1
    is_inside = (step >= 0) & (table["ts"].to_numpy() < end[np.maximum(step, 0)])
    table = table.with_columns(step=step).filter(pl.Series(is_inside))
    repeats = [_find_repeated(layers) for _, layers in table.group_by("step", maintain_order=True)]
    repeats = [layers for layers in repeats if len(layers)]
    if 2 * len(repeats) <= len(start):
        return EMPTY
    spans = np.concatenate(repeats)
    return intersect(union(spans[:, 0], spans[:, 1]), a.steps.host_spans)


def _list_layers(a: Analysis, main: int) -> pl.DataFrame:
    """List outermost layers of the main thread in order of time: ``ts``, ``end``, ``key`` (operator
    and shapes), ``trained``."""
    trace, cpu = a.trace, a.trace.cpu
    is_op = is_operator(trace)
    rows = outermost_rows(trace)
    layers = cpu[rows].select("name", "inputs", "ts", "dur", "thread").with_columns(row=rows)
    trained_rows = climb_stack(
        parent_rows(trace), is_op, np.unique(a.forward_op[a.forward_op >= 0]), top=True
    )
    layers = layers.with_columns(trained=pl.Series(np.isin(rows, trained_rows)))
    layers = layers.filter((pl.col("thread") == main) & pl.col("inputs").is_not_null())
    layers = layers.filter(find_layer_operators(layers["name"])).sort("ts")
    return layers.select(
        "ts",
        "trained",
        end=pl.col("ts") + pl.col("dur"),
        key=pl.struct(pl.col("name").to_physical(), "inputs").rank("dense"),
    )


def _find_repeated(step: pl.DataFrame) -> np.ndarray:
    """Return (begin, end) of each sequence of layers in one step that repeats trained layers."""
    trained = step["trained"].to_numpy()
    key = step["key"].to_numpy()
    trained_counts, other_counts = Counter(key[trained].tolist()), Counter(key[~trained].tolist())
    nothing = np.empty((0, 2), dtype=np.int64)
    if trained_counts.total() < MIN_LAYERS or any(
        other_counts[layer] < count for layer, count in trained_counts.items()
    ):
        return nothing
    is_repeat = ~trained & np.isin(key, list(trained_counts))
    is_first = is_repeat & ~np.append(False, is_repeat[:-1])
    is_last = is_repeat & ~np.append(is_repeat[1:], False)
    return np.column_stack([step["ts"].to_numpy()[is_first], step["end"].to_numpy()[is_last]])


def repeated_backwards(a: Analysis) -> Intervals:
    """Find host time of autograd nodes that run again later in the step, or ran in an earlier step:
    a graph kept by ``retain_graph=True`` goes backward several times.

    A node is identified by its name and its forward operator's sequence number. Gradients that are
    accumulated after it count with it. Nodes with derivatives of their own (``create_graph=True``)
    are excluded, because a gradient of a gradient needs them twice. But if two such passes of a
    step begin at one node, the same output is differentiated twice. Nodes that both passes run
    count once, with their own derivatives."""
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
    identity = ("sequence", "name")
    runs_later = pl.col("ts") < pl.col("ts").max().over(*identity, "step")
    ran_earlier = pl.col("step") > pl.col("step").min().over(*identity)
    runs_twice = _find_differentiated_twice(a, table)
    is_excess = ((runs_later | ran_earlier) & ~pl.col("again").any().over(*identity)) | runs_twice
    table = table.with_columns(
        excess=pl.when(pl.col("sequence").is_not_null() & pl.col("step").is_not_null()).then(
            is_excess
        )
    )
    # accumulated gradients have no number: they belong to the node before them
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
    """Return autograd nodes with derivatives of their own, as rows of ``trace.cpu``. Operators
    inside a node have their own number only if they create nodes in turn."""
    node = backward_nodes(a)
    sequence = a.trace.cpu["sequence"].fill_null(-1).to_numpy()
    return np.unique(node[(node >= 0) & (sequence >= 0) & (sequence != sequence[node])])


def _find_differentiated_twice(a: Analysis, table: pl.DataFrame) -> pl.Series:
    """Return which nodes of ``table`` (sorted by thread and time) run twice: nodes of passes with
    derivatives of their own that begin at the same node as a later pass, and the derivatives of
    these nodes. The engine runs the nodes of a pass from the largest sequence number down, so a
    larger number begins the next pass."""
    number = pl.col("sequence").forward_fill().over("thread")
    table = table.with_columns(number=number)
    starts = (pl.col("number") > pl.col("number").shift(1).over("thread")).fill_null(value=True)
    table = table.with_columns(part=starts.cum_sum().over("thread"))
    pass_columns = ("thread", "part")
    table = table.with_columns(
        root=pl.col("number").first().over(*pass_columns),
        kind=pl.col("name").first().over(*pass_columns),
        learns=pl.col("again").any().over(*pass_columns),
    )
    same_pass_kind = ("step", "thread", "root", "kind", "learns")
    last_pass = pl.col("part").max().over(*same_pass_kind)
    in_both = pl.col("part").n_unique().over(*same_pass_kind, "sequence", "name") > 1
    first = pl.col("learns") & (pl.col("part") < last_pass) & in_both & pl.col("step").is_not_null()
    twice = table.select(first.fill_null(value=False)).to_series()
    if not twice.any():
        return twice
    spans = table.filter(twice)
    twice_spans = union(spans["ts"].to_numpy(), spans["end"].to_numpy())
    cpu = a.trace.cpu
    creates_node = pl.Series(~name_matches(cpu["name"], BACKWARD)) & cpu["sequence"].is_not_null()
    # operators that create no node carry the number of the next one that does
    creators = cpu.filter(creates_node).group_by("sequence").agg(pl.col("ts").max())
    ts = creators["ts"].to_numpy()
    derived = creators.filter(pl.Series(covered_length(ts, ts + 1, twice_spans) > 0))["sequence"]
    return twice | table["sequence"].is_in(derived.implode()).fill_null(value=False)
