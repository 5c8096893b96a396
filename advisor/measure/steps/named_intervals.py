"""Intervals of the step that selectors and rules name; and the calls that take the time of given
host ranges, such as a loader's fetches."""

import re
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.finding import Edit, Select
from advisor.core.intervals import EMPTY, Intervals, intersect, subtract, union
from advisor.measure import Analysis
from advisor.measure.host.names import name_matches
from advisor.measure.host.op_tree import measure_inclusive_time, measure_self_time
from advisor.measure.host.stacks import (
    Rows,
    frame_ranks,
    innermost_ancestor,
    is_operator,
    outermost_ancestor,
    outermost_operator,
    outermost_rows,
    parent_rows,
)
from advisor.measure.inference.passes import ENGINE

REGION = r"^Torch-Compiled Region"
"""Execution of a function that torch.compile rewrote, all of it: graph, bytecode, and what the
rewritten function calls. Where the graph breaks, what follows is a function of its own, so its
region lies *inside* that of the first part (seen with torch 2.13)."""
GRAPH = r"^CompiledFunction$|^(?:## )?Call CompiledFxGraph|^CompiledFxGraph"
"""Execution of one compiled graph."""
GRAPH_CODE = r"^(?:## )?Call CompiledFxGraph|^CompiledFxGraph"
"""The code of one compiled graph, without the way into it."""
BACKWARD_GRAPH = r"^autograd::engine::evaluate_function: \w*CompiledFunctionBackward"
RESUME = r"torch_dynamo_resume_in_"
"""Python frames of the function after a break; their line is where the graph broke."""


GRAPH_BREAK_CAUSES = ("dispatch", "launch", "python", "unknown")
"""Causes of the idle gaps that a graph break may cause."""


def remove_breaks(region: tuple[str, ...] = ()) -> Edit:
    """Return the edit that removes idle time at graph breaks, or at those into some functions."""
    where = Select(on="gap", cause=GRAPH_BREAK_CAUSES, at="graph_break", region=region)
    return Edit(op="remove", select=where)


def step_starts(a: Analysis) -> Intervals:
    """Return intervals from each used step's start to the first device work launched in it.

    A step that launches nothing has none; neither has a window without steps."""
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
    """Return rows of ``trace.cpu``: compiled regions in another one, which follow a graph break."""
    region = name_matches(a.trace.cpu["name"], REGION).to_numpy()
    if not region.any():
        return np.zeros(0, dtype=np.int64)
    parent = parent_rows(a.trace)
    around = innermost_ancestor(parent, region)
    rows = np.flatnonzero(region & (parent >= 0))
    return rows[around[parent[rows]] >= 0]


def graph_breaks(a: Analysis, regions: tuple[str, ...] = ()) -> Intervals:
    """Find host time from the end of one compiled graph to the start of the next across a break.

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


def graph_entries(a: Analysis) -> Intervals:
    """Find host time of functions whose graph breaks, forward and backward, outside the code of
    their compiled graphs: guards, the ways in and out of each graph, and what runs between them."""
    rows = broken_regions(a)
    if not len(rows):
        return EMPTY
    cpu = a.trace.cpu
    names = cpu["name"]
    region = name_matches(names, REGION).to_numpy()
    around = np.unique(outermost_ancestor(parent_rows(a.trace), region)[rows])
    backward = np.flatnonzero(name_matches(names, BACKWARD_GRAPH).to_numpy())
    graph = np.flatnonzero(name_matches(names, GRAPH_CODE).to_numpy())
    ts = cpu["ts"].to_numpy()
    end = ts + cpu["dur"].to_numpy()
    whole = np.concatenate([around, backward])
    inside = union(ts[graph], end[graph])
    return intersect(subtract(union(ts[whole], end[whole]), inside), a.spans)


def between_steps(a: Analysis) -> Intervals:
    """Return intervals from an engine step's last device work to the next step's first. Only if the
    next one follows: an engine that waits for requests pauses for longer than half a period."""
    passes = a.passes
    if passes is None or passes.source != ENGINE:
        return EMPTY
    first, last = (passes.table[name].drop_nulls().sort().to_numpy() for name in ("first", "last"))
    if len(first) < 2:
        return EMPTY
    begin, end = np.maximum.accumulate(last)[:-1], first[1:]
    near = end - begin <= 0.5 * np.median(np.diff(first))
    return intersect(union(begin[near], np.maximum(begin, end)[near]), a.spans)


def without_gradient(a: Analysis) -> Intervals:
    """Find runs of operators of the main thread that keep nothing for a gradient, inside a forward
    pass that does, and in which the host waits: it reads the size of a result. PyTorch numbers the
    nodes of the graph; operators of one run have the number of the node that comes next. What makes
    that node ends a run; uploads and reads by the loop begin another."""
    cpu = a.trace.cpu
    around, outer = outermost_operator(a.trace), outermost_rows(a.trace)
    outer = outer[(cpu["thread"] == a.trace.main_thread).fill_null(False).to_numpy()[outer]]
    ts = cpu["ts"].to_numpy()[outer]
    table = pl.DataFrame(
        {
            "ts": ts,
            "end": ts + cpu["dur"].to_numpy()[outer],
            "node": cpu["sequence"].gather(outer).forward_fill(),
            "reads": np.isin(outer, around[a.syncs["host"].to_numpy()]),
            "apart": name_matches(cpu["name"].gather(outer), r"^aten::(?:to|copy_|item)$"),
        }
    )
    begins = (pl.col("node") != pl.col("node").shift(1)) | pl.col("apart")
    begins |= pl.col("apart").shift(1)
    table = table.with_columns(
        run=begins.fill_null(True).cum_sum(),
        makes_node=(pl.col("node").shift(-1) > pl.col("node")).fill_null(False),
    )
    runs = (
        table.filter(pl.col("makes_node").any().over("run"), ~pl.col("makes_node"))
        .group_by("run")
        .agg(pl.col("ts").min(), pl.col("end").max(), pl.col("reads").any())
        .filter("reads")
    )
    return intersect(union(runs["ts"].to_numpy(), runs["end"].to_numpy()), a.spans)


def select_instants(a: Analysis, select: Select) -> Intervals:
    """Return the instants that ``Select.at`` names, as intervals."""
    if select.at == "graph_break":
        return graph_breaks(a, select.region)
    return _INSTANTS[select.at](a)


_INSTANTS: dict[str, Callable[[Analysis], Intervals]] = {
    "step_start": step_starts, "between_steps": between_steps,
    "read_loop": attrgetter("read_loops"), "after_read": attrgetter("after_reads"),
    "round_trip": attrgetter("trip_intervals"), "recompute": attrgetter("recompute_time"),
    "second_forward": attrgetter("second_forwards"),
    "repeated_backward": attrgetter("repeated_backwards"),
    "rebuilt_weights": attrgetter("rebuilt_weights_time"),
    "unused_gradient": attrgetter("unused_gradient_work.spans"),
    "new_shape": attrgetter("new_shape_spans"), "graph_entry": graph_entries,
    "without_gradient": without_gradient,
}  # fmt: skip
"""Name -> intervals; those that edits of one finding use repeatedly are cached."""


CONTENTS_SCHEMA: dict[str, Any] = {
    "frame": pl.Int32,  # row of trace.cpu: innermost frame of user code inside, null: none
    "callee": pl.Int32,  # what that frame calls (or, without one, the outermost call inside)
    "leaf": pl.Int32,  # the call below it that holds most of its time
    "ns": pl.Int64,
    "leaf_ns": pl.Int64,
    "count": pl.Int64,  # calls of the callee
}
LIMIT = 50
HOLDS = 0.5
"""Share of a call's time from which the call below it is followed."""


def measure_contents(a: Analysis, ranges: NDArray[np.int64]) -> pl.DataFrame:
    """Find the calls that take the time of host rows: CONTENTS_SCHEMA's columns, most ``ns`` first.

    Each instant of the ranges belongs to the innermost frame of the user's code that runs inside
    the range then, and to what that frame has called: a library's function, a built-in, an
    operator, or itself (``callee`` = ``frame``). Where no user code is recorded inside, it belongs
    to the outermost installed library's frame, without stacks to the outermost operator. Instants
    in which nothing inside is recorded are not in the table. ``ns`` counts what lies inside the
    used steps; rows are the longest calls of their kind; at most LIMIT kinds are listed, and their
    times add up to no more than the ranges'."""
    cpu = a.trace.cpu
    empty = pl.DataFrame(schema=CONTENTS_SCHEMA)
    if not len(ranges):
        return empty
    parent = parent_rows(a.trace)
    is_range = np.zeros(cpu.height, dtype=bool)
    is_range[ranges] = True
    top = innermost_ancestor(parent, is_range)
    below = (top >= 0) & ~is_range
    rows = np.flatnonzero(below)
    if not len(rows):
        return empty
    rank = np.where(below, frame_ranks(a.trace), 0).astype(np.int8)
    frame = innermost_ancestor(parent, is_range | (rank == 2))
    frame = np.where((frame >= 0) & ~is_range[np.maximum(frame, 0)], frame, -1).astype(np.int32)
    callee = _called(a, parent, frame, rank, below)
    own = measure_self_time(a, np.where(below, measure_inclusive_time(a), 0))
    known = rows[(callee[rows] >= 0) & (own[rows] > 0)]
    if not len(known):
        return empty
    name = cpu["name"].to_physical().to_numpy()
    table = pl.DataFrame(
        {
            "frame": frame[known],
            "callee": callee[known],
            "frame_name": np.where(frame[known] >= 0, name[frame[known]].astype(np.int64), -1),
            "callee_name": _names(cpu["name"].gather(callee[known])),
            "ns": own[known],
        }
    )
    kinds = (
        table.group_by("frame_name", "callee_name")
        .agg(pl.col("frame").first(), pl.col("callee"), pl.col("ns").sum())
        .sort("ns", "callee_name", descending=[True, False])
        .head(LIMIT)
    )
    result = []
    for row in kinds.iter_rows(named=True):
        calls = np.unique(np.asarray(row["callee"], dtype=np.int64))
        longest = int(calls[np.argmax(cpu["dur"].to_numpy()[calls])])
        itself = frame[longest] == longest
        leaf, leaf_ns = (-1, 0) if itself else _leaf(a, parent, calls, frame)
        result.append(
            {
                "frame": None if row["frame"] < 0 else int(frame[longest]),
                "callee": longest,
                "leaf": leaf if leaf >= 0 else longest,
                "ns": row["ns"],
                "leaf_ns": leaf_ns if leaf >= 0 else row["ns"],
                "count": len(calls),
            }
        )
    return pl.DataFrame(result, schema=CONTENTS_SCHEMA)


def _names(names: pl.Series) -> pl.Series:
    """Remove the addresses of objects from names: a method of two tensors is one thing."""
    return names.cast(pl.String).str.replace(r" object at 0x[0-9a-fA-F]+", "")


def _called(
    a: Analysis, parent: Rows, frame: Rows, rank: NDArray[np.int8], below: NDArray[np.bool_]
) -> Rows:
    """Return the call of the user's frame around each row; see :func:`measure_contents`."""
    here = np.arange(len(parent), dtype=np.int32)
    direct = (frame >= 0) & ((frame == here) | (frame == parent))
    alone = outermost_ancestor(parent, is_operator(a.trace) & below)
    if (rank == 1).any():
        library = outermost_ancestor(parent, rank == 1)
        alone = np.where(library >= 0, library, alone)
    return np.where(frame >= 0, innermost_ancestor(parent, direct), alone).astype(np.int32)


def _leaf(a: Analysis, parent: Rows, calls: NDArray[np.int64], frame: Rows) -> tuple[int, int]:
    """Find the deepest call, below calls of one kind, that holds at least HOLDS of their time; and
    its time. The search follows the heaviest name (its user frame stays the same)."""
    cpu = a.trace.cpu
    dur = cpu["dur"].to_numpy()
    order = np.argsort(parent, kind="stable")
    above = parent[order]
    index, held, best, best_ns = calls, int(dur[calls].sum()), -1, 0
    for _ in range(200):
        low = np.searchsorted(above, index, side="left")
        high = np.searchsorted(above, index, side="right")
        children = order[np.concatenate([np.arange(x, y) for x, y in zip(low, high, strict=True)])]
        children = children[frame[children] != children]
        if not len(children):
            break
        which = _names(cpu["name"].gather(children)).rank("dense").to_numpy() - 1
        spent = np.bincount(which, weights=dur[children])
        heaviest = int(np.argmax(spent))
        if spent[heaviest] < HOLDS * held:
            break
        index = children[which == heaviest]
        best, best_ns = int(index[np.argmax(dur[index])]), int(spent[heaviest])
    return best, best_ns
