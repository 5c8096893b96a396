"""Intervals of the step that selectors and rules refer to by name, and the calls that take the time
of given host ranges, such as a loader's fetches."""

import re
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.finding import Edit, Select
from advisor.core.intervals import EMPTY, Intervals, intersect, intervals_of, subtract, union
from advisor.measure import Analysis
from advisor.measure.host.names import name_matches
from advisor.measure.host.op_tree import measure_inclusive_time, measure_self_time
from advisor.measure.host.stacks import (
    CodeOwner,
    Rows,
    code_owners,
    innermost_ancestor,
    is_operator,
    outermost_ancestor,
    outermost_operator,
    outermost_rows,
    parent_rows,
)
from advisor.measure.inference.inference_steps import ENGINE

REGION = r"^Torch-Compiled Region"
"""Complete execution of a function that torch.compile rewrote: graph, bytecode, and the calls of
the rewritten function. After a graph break, the rest is a separate function, so its region is
*inside* the region of the first part (seen with torch 2.13)."""
GRAPH = r"^CompiledFunction$|^(?:## )?Call CompiledFxGraph|^CompiledFxGraph"
"""Execution of one compiled graph."""
GRAPH_CODE = r"^(?:## )?Call CompiledFxGraph|^CompiledFxGraph"
"""The code of one compiled graph, without the entry into it."""
BACKWARD_GRAPH = r"^autograd::engine::evaluate_function: \w*CompiledFunctionBackward"
RESUME = r"torch_dynamo_resume_in_"
"""Python frames of the function after a break; their line is where the graph broke."""


GRAPH_BREAK_CAUSES = ("dispatch", "launch", "python", "unknown")
"""Causes of the idle gaps that a graph break may cause."""


def remove_breaks(region: tuple[str, ...] = ()) -> Edit:
    """Return the edit that removes idle time at graph breaks, or only those before some
    functions."""
    where = Select(on="gap", cause=GRAPH_BREAK_CAUSES, at="graph_break", region=region)
    return Edit(op="remove", select=where)


def step_starts(a: Analysis) -> Intervals:
    """Return intervals from each used step's start to the first device work launched in it.

    A step without launches has no interval, and neither does a window without steps."""
    used = a.steps.used
    gpu, cpu = a.trace.gpu, a.trace.cpu
    if a.device_id is None or a.steps.source == "whole trace" or cpu.is_empty():
        return EMPTY
    work = gpu.filter((pl.col("device") == a.device_id) & pl.col("launch").is_not_null())
    launched = cpu["ts"].gather(work["launch"]).to_numpy()
    order = np.argsort(launched, kind="stable")
    # the earliest start of all work launched from here on
    earliest_start = np.minimum.accumulate(work["ts"].to_numpy()[order][::-1])[::-1]
    start, end = used["ts"].to_numpy(), used["end"].to_numpy()
    position = np.searchsorted(launched[order], start, side="left")
    index = np.minimum(position, max(len(earliest_start) - 1, 0))
    if not len(earliest_start):
        return EMPTY
    has_work = (position < len(earliest_start)) & (launched[order][index] < end)
    return union(start[has_work], np.minimum(earliest_start[index], end)[has_work])


def broken_regions(a: Analysis) -> NDArray[np.int64]:
    """Return compiled regions (rows of ``trace.cpu``) inside others, which follow a graph break."""
    is_region = name_matches(a.trace.cpu["name"], REGION).to_numpy()
    if not is_region.any():
        return np.zeros(0, dtype=np.int64)
    parent = parent_rows(a.trace)
    outer_region = innermost_ancestor(parent, is_region)
    rows = np.flatnonzero(is_region & (parent >= 0))
    return rows[outer_region[parent[rows]] >= 0]


def graph_breaks(a: Analysis, regions: tuple[str, ...] = ()) -> Intervals:
    """Find host time from the end of one compiled graph to the start of the next across a break.

    This time covers the code at which the graph broke, guards, and entry and exit of the two
    functions. ``regions``: only functions with these numbers (``1`` of ``Torch-Compiled Region:
    1/0``).
    """
    rows = broken_regions(a)
    cpu = a.trace.cpu
    if regions:
        numbers = "|".join(map(re.escape, regions))
        rows = rows[name_matches(cpu["name"], f"{REGION}: (?:{numbers})/").to_numpy()[rows]]
    if not len(rows):
        return EMPTY
    graph = np.flatnonzero(name_matches(cpu["name"], GRAPH).to_numpy())
    is_region = name_matches(cpu["name"], REGION).to_numpy()
    parent = parent_rows(a.trace)
    outer_region = innermost_ancestor(parent, is_region)[parent[rows]]
    ts = cpu["ts"].to_numpy()
    end = ts + cpu["dur"].to_numpy()
    start, stop = ts[outer_region].copy(), ts[rows].copy()
    if len(graph):
        # rows of one thread are in order of time, so the graph run last before a row is the
        # graph row before it, and the next one the row after it
        position = np.searchsorted(graph, rows)
        previous_graph = graph[np.maximum(position - 1, 0)]
        is_inside = (
            (position > 0) & (previous_graph > outer_region) & (end[previous_graph] <= ts[rows])
        )
        start = np.where(is_inside, end[previous_graph], start)
        next_graph = graph[np.minimum(position, len(graph) - 1)]
        is_inside = (position < len(graph)) & (ts[next_graph] < end[rows]) & (next_graph > rows)
        is_inside &= cpu["thread"].to_numpy()[next_graph] == cpu["thread"].to_numpy()[rows]
        stop = np.where(is_inside, ts[next_graph], stop)
    return intersect(union(start, stop), a.spans)


def graph_entries(a: Analysis) -> Intervals:
    """Find host time of functions whose graph breaks, forward and backward, outside the code of
    their compiled graphs: guards, entry and exit of each graph, and the code between them."""
    rows = broken_regions(a)
    if not len(rows):
        return EMPTY
    cpu = a.trace.cpu
    names = cpu["name"]
    is_region = name_matches(names, REGION).to_numpy()
    outer_regions = np.unique(outermost_ancestor(parent_rows(a.trace), is_region)[rows])
    backward = np.flatnonzero(name_matches(names, BACKWARD_GRAPH).to_numpy())
    graphs = np.flatnonzero(name_matches(names, GRAPH_CODE).to_numpy())
    spans = intervals_of(cpu, np.concatenate([outer_regions, backward]))
    return intersect(subtract(spans, intervals_of(cpu, graphs)), a.spans)


def between_steps(a: Analysis) -> Intervals:
    """Return intervals from an engine step's last device work to the next step's first. Pauses
    longer than half a period are excluded, because then the engine waits for requests."""
    inference_steps = a.inference_steps
    if inference_steps is None or inference_steps.source != ENGINE:
        return EMPTY
    first, last = (
        inference_steps.table[name].drop_nulls().sort().to_numpy() for name in ("first", "last")
    )
    if len(first) < 2:
        return EMPTY
    start, end = np.maximum.accumulate(last)[:-1], first[1:]
    is_near = end - start <= 0.5 * np.median(np.diff(first))
    return intersect(union(start[is_near], np.maximum(start, end)[is_near]), a.spans)


def without_gradient(a: Analysis) -> Intervals:
    """Find runs of operators of the main thread that keep nothing for a gradient, inside a forward
    pass that does, and in which the host waits to read the size of a result. PyTorch numbers the
    nodes of the graph, and operators of one run have the number of the next node. The operator that
    creates the node ends a run; uploads and reads by the loop begin another."""
    cpu = a.trace.cpu
    operator_of_row, outer = outermost_operator(a.trace), outermost_rows(a.trace)
    outer = outer[(cpu["thread"] == a.trace.main_thread).fill_null(False).to_numpy()[outer]]
    ts = cpu["ts"].to_numpy()[outer]
    table = pl.DataFrame(
        {
            "ts": ts,
            "end": ts + cpu["dur"].to_numpy()[outer],
            "node": cpu["sequence"].gather(outer).forward_fill(),
            "reads": np.isin(outer, operator_of_row[a.syncs["host"].to_numpy()]),
            "apart": name_matches(cpu["name"].gather(outer), r"^aten::(?:to|copy_|item)$"),
        }
    )
    begins_run = (pl.col("node") != pl.col("node").shift(1)) | pl.col("apart")
    begins_run |= pl.col("apart").shift(1)
    table = table.with_columns(
        run=begins_run.fill_null(True).cum_sum(),
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
    "evaluation": attrgetter("step_evaluations"),
    "repeated_backward": attrgetter("repeated_backwards"),
    "rebuilt_weights": attrgetter("rebuilt_weights_time"),
    "unused_gradient": attrgetter("unused_gradient_work.spans"),
    "new_shape": attrgetter("new_shape_spans"), "graph_entry": graph_entries,
    "without_gradient": without_gradient,
}  # fmt: skip
"""Name -> intervals; intervals that edits of one finding use repeatedly are cached."""


CONTENTS_SCHEMA: dict[str, Any] = {
    "frame": pl.Int32,  # row of trace.cpu: innermost frame of user code inside, null if none
    "callee": pl.Int32,  # call by that frame (or, without a frame, the outermost call inside)
    "leaf": pl.Int32,  # the call below it that takes most of its time
    "ns": pl.Int64,
    "leaf_ns": pl.Int64,
    "count": pl.Int64,  # calls of the callee
}
_MAX_KINDS = 50
MIN_FOLLOWED_SHARE = 0.5
"""Minimum share of a call's time in a call below it for following that call."""


def measure_contents(a: Analysis, ranges: NDArray[np.int64]) -> pl.DataFrame:
    """Find the calls that take the time of host rows: CONTENTS_SCHEMA's columns, largest ``ns``
    first.

    Each instant of the ranges belongs to the innermost frame of the user's code that runs inside
    the range then, and to the call by that frame: a library's function, a built-in, an operator, or
    itself (``callee`` = ``frame``). If no user code is recorded inside, it belongs to the outermost
    installed library's frame, or without stacks to the outermost operator. Instants without
    recorded events inside are not in the table. ``ns`` counts only time inside the used steps. Rows
    are the longest calls of their kind. At most _MAX_KINDS kinds are listed, and their times add up
    to no more than the time of the ranges."""
    cpu = a.trace.cpu
    empty = pl.DataFrame(schema=CONTENTS_SCHEMA)
    if not len(ranges):
        return empty
    parent = parent_rows(a.trace)
    is_range = np.zeros(cpu.height, dtype=bool)
    is_range[ranges] = True
    range_row = innermost_ancestor(parent, is_range)
    is_below = (range_row >= 0) & ~is_range
    rows = np.flatnonzero(is_below)
    if not len(rows):
        return empty
    owner = np.where(is_below, code_owners(a.trace), 0).astype(np.int8)
    frame = innermost_ancestor(parent, is_range | (owner == CodeOwner.USER))
    frame = np.where((frame >= 0) & ~is_range[np.maximum(frame, 0)], frame, -1).astype(np.int32)
    callee = _find_callees(a, parent, frame, owner, is_below)
    self_ns = measure_self_time(a, np.where(is_below, measure_inclusive_time(a), 0))
    attributed = rows[(callee[rows] >= 0) & (self_ns[rows] > 0)]
    if not len(attributed):
        return empty
    name = cpu["name"].to_physical().to_numpy()
    table = pl.DataFrame(
        {
            "frame": frame[attributed],
            "callee": callee[attributed],
            "frame_name": np.where(
                frame[attributed] >= 0, name[frame[attributed]].astype(np.int64), -1
            ),
            "callee_name": _strip_addresses(cpu["name"].gather(callee[attributed])),
            "ns": self_ns[attributed],
        }
    )
    kinds = (
        table.group_by("frame_name", "callee_name")
        .agg(pl.col("frame").first(), pl.col("callee"), pl.col("ns").sum())
        .sort("ns", "callee_name", descending=[True, False])
        .head(_MAX_KINDS)
    )
    result = []
    for row in kinds.iter_rows(named=True):
        calls = np.unique(np.asarray(row["callee"], dtype=np.int64))
        longest = int(calls[np.argmax(cpu["dur"].to_numpy()[calls])])
        is_itself = frame[longest] == longest
        leaf, leaf_ns = (-1, 0) if is_itself else _find_leaf(a, parent, calls, frame)
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


def _strip_addresses(names: pl.Series) -> pl.Series:
    """Remove the addresses of objects from names, so that a method of two tensors has one name."""
    return names.cast(pl.String).str.replace(r" object at 0x[0-9a-fA-F]+", "")


def _find_callees(
    a: Analysis, parent: Rows, frame: Rows, owner: NDArray[np.int8], is_below: NDArray[np.bool_]
) -> Rows:
    """Return the call of the user's frame around each row; see :func:`measure_contents`."""
    rows = np.arange(len(parent), dtype=np.int32)
    is_direct = (frame >= 0) & ((frame == rows) | (frame == parent))
    outermost = outermost_ancestor(parent, is_operator(a.trace) & is_below)
    if (owner == CodeOwner.LIBRARY).any():
        library = outermost_ancestor(parent, owner == CodeOwner.LIBRARY)
        outermost = np.where(library >= 0, library, outermost)
    return np.where(frame >= 0, innermost_ancestor(parent, is_direct), outermost).astype(np.int32)


def _find_leaf(a: Analysis, parent: Rows, calls: NDArray[np.int64], frame: Rows) -> tuple[int, int]:
    """Find the deepest call, below calls of one kind, that takes at least MIN_FOLLOWED_SHARE of
    their time, and its time. The search follows the longest name within the same user frame."""
    cpu = a.trace.cpu
    dur = cpu["dur"].to_numpy()
    order = np.argsort(parent, kind="stable")
    parents = parent[order]
    index, parent_ns, leaf, leaf_ns = calls, int(dur[calls].sum()), -1, 0
    for _ in range(200):
        low = np.searchsorted(parents, index, side="left")
        high = np.searchsorted(parents, index, side="right")
        children = order[
            np.concatenate([np.arange(start, stop) for start, stop in zip(low, high, strict=True)])
        ]
        children = children[frame[children] != children]
        if not len(children):
            break
        name_index = _strip_addresses(cpu["name"].gather(children)).rank("dense").to_numpy() - 1
        ns_by_name = np.bincount(name_index, weights=dur[children])
        heaviest = int(np.argmax(ns_by_name))
        if ns_by_name[heaviest] < MIN_FOLLOWED_SHARE * parent_ns:
            break
        index = children[name_index == heaviest]
        leaf, leaf_ns = int(index[np.argmax(dur[index])]), int(ns_by_name[heaviest])
    return leaf, leaf_ns
