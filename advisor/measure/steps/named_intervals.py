"""Stretches of the step that selectors and rules call by name."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.finding import Edit, Select
from advisor.core.intervals import EMPTY, Intervals, intersect, union
from advisor.measure.host.names import name_matches
from advisor.measure.host.stacks import innermost_ancestor, parent_rows
from advisor.measure.serving.passes import ENGINE

if TYPE_CHECKING:
    from advisor.measure import Analysis

REGION = r"^Torch-Compiled Region"
"""Execution of a function that torch.compile rewrote, all of it: graph, bytecode, and what the
rewritten function calls. Where the graph breaks, what follows is a function of its own, so its
region lies *inside* that of the first part (seen with torch 2.13)."""
GRAPH = r"^CompiledFunction$|^(?:## )?Call CompiledFxGraph|^CompiledFxGraph"
"""Execution of one compiled graph."""
RESUME = r"torch_dynamo_resume_in_"
"""Python frames of what follows a break; their line is where the graph broke."""


GRAPH_BREAK_CAUSES = ("dispatch", "launch", "python", "unknown")
"""Of the idle gaps that a graph break may cause."""


def remove_breaks(region: tuple[str, ...] = ()) -> Edit:
    """No idle time at graph breaks, or at those that lead into some compiled functions."""
    where = Select(on="gap", cause=GRAPH_BREAK_CAUSES, at="graph_break", region=region)
    return Edit(op="remove", select=where)


def step_starts(a: Analysis) -> Intervals:
    """From the start of each used step to the first device work that was launched in it.

    A step that launches nothing has none; neither has a window without steps.
    """
    used = a.steps.used
    gpu, cpu = a.trace.gpu, a.trace.cpu
    if a.device_id is None or a.steps.source == "whole trace" or cpu.is_empty():
        return EMPTY
    own = gpu.filter((pl.col("device") == a.device_id) & pl.col("launch").is_not_null())
    launched = cpu["ts"].gather(own["launch"]).to_numpy()
    order = np.argsort(launched, kind="stable")
    # the earliest start of all work launched from here on
    first = np.minimum.accumulate(own["ts"].to_numpy()[order][::-1])[::-1]
    start, end = used["ts"].to_numpy(), used["end"].to_numpy()
    place = np.searchsorted(launched[order], start, side="left")
    index = np.minimum(place, max(len(first) - 1, 0))
    if not len(first):
        return EMPTY
    result = (place < len(first)) & (launched[order][index] < end)
    return union(start[result], np.minimum(first[index], end)[result])


def broken_regions(a: Analysis) -> NDArray[np.int64]:
    """Rows of ``trace.cpu``: compiled regions inside another one, which follow a graph break."""
    region = name_matches(a.trace.cpu["name"], REGION).to_numpy()
    if not region.any():
        return np.zeros(0, dtype=np.int64)
    parent = parent_rows(a.trace)
    around = innermost_ancestor(parent, region)
    rows = np.flatnonzero(region & (parent >= 0))
    return rows[around[parent[rows]] >= 0]


def graph_breaks(a: Analysis, regions: tuple[str, ...] = ()) -> Intervals:
    """Host time from the end of one compiled graph to the start of the next across a break.

    That is the code at which the graph broke, guards, and the way in and out of the two functions.
    ``regions``: only before functions with these numbers (``1`` of ``Torch-Compiled Region: 1/0``).
    """
    rows = broken_regions(a)
    cpu = a.trace.cpu
    if regions:
        own = "|".join(map(re.escape, regions))
        rows = rows[name_matches(cpu["name"], f"{REGION}: (?:{own})/").to_numpy()[rows]]
    if not len(rows):
        return EMPTY
    graph = np.flatnonzero(name_matches(cpu["name"], GRAPH).to_numpy())
    region = name_matches(cpu["name"], REGION).to_numpy()
    parent = parent_rows(a.trace)
    outer = innermost_ancestor(parent, region)[parent[rows]]
    ts = cpu["ts"].to_numpy()
    end = ts + cpu["dur"].to_numpy()
    begin, finish = ts[outer].copy(), ts[rows].copy()
    if len(graph):
        # rows of one thread are in order of time, so the graph run last before a row is the
        # graph row before it, and the next one the row after it
        place = np.searchsorted(graph, rows)
        before = graph[np.maximum(place - 1, 0)]
        inside = (place > 0) & (before > outer) & (end[before] <= ts[rows])
        begin = np.where(inside, end[before], begin)
        after = graph[np.minimum(place, len(graph) - 1)]
        inside = (place < len(graph)) & (ts[after] < end[rows]) & (after > rows)
        inside &= cpu["thread"].to_numpy()[after] == cpu["thread"].to_numpy()[rows]
        finish = np.where(inside, ts[after], finish)
    return intersect(union(begin, finish), a.spans)


def between_steps(a: Analysis) -> Intervals:
    """From the last device work of an engine's step to the first of the next, where the next one
    follows: an engine that waits for requests pauses for longer than half a period."""
    passes = a.passes
    if passes is None or passes.source != ENGINE:
        return EMPTY
    first, last = (passes.table[name].drop_nulls().sort().to_numpy() for name in ("first", "last"))
    if len(first) < 2:
        return EMPTY
    begin, end = np.maximum.accumulate(last)[:-1], first[1:]
    near = end - begin <= 0.5 * np.median(np.diff(first))
    return intersect(union(begin[near], np.maximum(begin, end)[near]), a.spans)


def select_instants(a: Analysis, select: Select) -> Intervals:
    """The instants that ``Select.at`` names, as intervals."""
    if select.at == "graph_break":
        return graph_breaks(a, select.region)
    return step_starts(a) if select.at == "step_start" else between_steps(a)
