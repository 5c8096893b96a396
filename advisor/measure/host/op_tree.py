"""Operators and modules by the device time that they launch, as a table and as a tree of names."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.intervals import Intervals, covered_length
from advisor.measure.host.names import map_names, name_matches
from advisor.measure.host.stacks import innermost_ancestor, is_operator, parent_rows

if TYPE_CHECKING:
    from advisor.measure import Analysis

MODULE = "nn.Module: "
"""Prefix of the frames of modules when modules were recorded."""
MAX_NODES = 500
"""Nodes with which a drawing of the tree stays quick, at most."""
REST = "(rest)"

TREE_SCHEMA: dict[str, Any] = {
    "node": pl.Int32, "parent": pl.Int32, "name": pl.String, "count": pl.Int64, "ns": pl.Int64,
}  # fmt: skip
TABLE_SCHEMA: dict[str, Any] = {
    "name": pl.String,
    "count": pl.Int64,
    "device": pl.Int64,
    "host": pl.Int64,
}

_NUMBER = re.compile(r"^(?:nn\.Module: (.+)_|(ProfilerStep|step |.*_iter)#)\d+$")


def op_table(a: Analysis) -> pl.DataFrame:
    """Sum operators inside ``spans`` by name: ``name``, ``count`` (calls that touch the spans),
    ``device`` (ns of the device work launched directly by it, no operator in between; on the
    analysed device, inside the spans), ``host`` (its self time on the host, ns, inside the host's
    own steps: without the events inside it); largest ``device``, then ``host`` first."""
    cpu = a.trace.cpu
    is_op = is_operator(a.trace)
    rows = np.flatnonzero(is_op)
    if not len(rows):
        return pl.DataFrame(schema=TABLE_SCHEMA)
    inside = measure_inclusive_time(a, a.steps.host_spans)
    own = measure_self_time(a, inside)
    device = np.zeros(cpu.height, dtype=np.int64)
    at, ns = _device_rows(a, "op")
    np.add.at(device, at, ns)
    touched = rows[(inside[rows] > 0) | (device[rows] > 0)]
    frame = pl.DataFrame(
        {
            "name": cpu["name"].gather(touched),
            "device": device[touched],
            "host": np.maximum(own[touched], 0),
        }
    )
    return (
        frame.group_by("name")
        .agg(pl.len().cast(pl.Int64).alias("count"), pl.col("device").sum(), pl.col("host").sum())
        .with_columns(pl.col("name").cast(pl.String))
        .sort("device", "host", "name", descending=[True, True, False])
        .select(*TABLE_SCHEMA)
    )


def range_table(a: Analysis) -> pl.DataFrame:
    """Sum ranges of the thread that drives the step inside ``spans`` by name: ``name``, ``host``
    (self time, ns), ``count``; largest first. Steps are none, and numbers at the end of a name
    (``block 7``) do not tell ranges apart."""
    cpu = a.trace.cpu
    if a.trace.main_thread is None:
        return pl.DataFrame(schema={"name": pl.String, "host": pl.Int64, "count": pl.Int64})
    steps = set(a.steps.table["name"])
    rows = np.flatnonzero(
        (
            (cpu["kind"] == "annotation")
            & (cpu["thread"] == a.trace.main_thread)
            & ~name_matches(cpu["name"], a.trace.meta.step_names)
            & ~map_names(cpu["name"], steps.__contains__, pl.Boolean).fill_null(True)
        ).to_numpy()
    )
    inside = measure_inclusive_time(a)
    touched = rows[inside[rows] > 0]
    host = measure_self_time(a, inside)[touched].clip(0)
    frame = pl.DataFrame({"name": cpu["name"].gather(touched), "host": host})
    return (
        frame.group_by(pl.col("name").cast(pl.String).str.replace(r"(?:\s|#|_)\d+$", ""))
        .agg(pl.col("host").sum(), pl.len().cast(pl.Int64).alias("count"))
        .sort("host", "name", descending=[True, False])
    )


def op_tree(a: Analysis, limit: int = MAX_NODES) -> pl.DataFrame:
    """Merge modules, operators and annotations inside ``spans`` by their path of names.

    ``node``, ``parent`` (null: outermost), ``name``, ``count`` (events merged), ``ns``: device time
    launched inside it, on the analysed device; without device work its host time. Both are sums
    over the window. ``ProfilerStep#5`` and ``ProfilerStep#6`` are one name, ``Linear_0`` and
    ``Linear_1`` too. Below what launches several kernels itself, as a graph does, are those with a
    hundredth of the time, ``kernel: name``. Never more than ``limit`` nodes: the largest are kept,
    and what is left of a node that lost children is a child called ``(rest)``. Largest first among
    siblings; a parent precedes its children."""
    cpu = a.trace.cpu
    kept = is_operator(a.trace) | (cpu["kind"] == "annotation").to_numpy()
    kept |= (cpu["kind"] == "python").to_numpy() & name_matches(
        cpu["name"], f"^{MODULE}"
    ).to_numpy()
    if not kept.any():
        return pl.DataFrame(schema=TREE_SCHEMA)
    parent = parent_rows(a.trace)
    near = innermost_ancestor(parent, kept)
    above = np.where(parent >= 0, near[np.maximum(parent, 0)], -1)
    weight = np.zeros(cpu.height, dtype=np.int64)
    index, ns = _device_rows(a, "launch")
    held = near[index] >= 0
    np.add.at(weight, near[index[held]], ns[held])
    on_host = not weight.any()
    rows = np.flatnonzero(kept)
    inside = measure_inclusive_time(a)
    if on_host:
        weight = np.where(kept, inside, 0)
    group, first, up = _merge(cpu["name"], rows, above, cpu.height)
    total = np.zeros(len(first), dtype=np.int64)
    np.add.at(total, group[rows], weight[rows])
    touched = rows[(inside[rows] > 0) | (weight[rows] > 0)]
    count = np.bincount(group[touched], minlength=len(first))
    if not on_host:
        for node in range(len(first) - 1, -1, -1):  # nodes, not events: children after parents
            if up[node] >= 0:
                total[up[node]] += total[node]
    names = map_names(cpu["name"].gather(first), _plain, pl.String).to_list()
    if not on_host:
        own = _own_kernels(a, np.where(near >= 0, group[np.maximum(near, 0)], -1))
        total, count = np.append(total, own["ns"]), np.append(count, own["count"])
        up, names = np.append(up, own["node"]), names + own["name"].to_list()
    return largest_nodes(total, count, up, names, limit)


def _own_kernels(a: Analysis, node: NDArray[np.int64]) -> pl.DataFrame:
    """Sum the kernels that nodes launch themselves: ``node``, ``name``, ``ns``, ``count``. Those
    with at least a hundredth of all, of nodes that launch several kinds. ``node``: of each row of
    ``trace.cpu``, -1: none."""
    gpu = a.trace.gpu
    launch = gpu["launch"].fill_null(-1).to_numpy().astype(np.int64)
    index, ns = _device_rows(a, "launch")
    use = pl.Series(a.in_window & (launch >= 0))
    rows = pl.DataFrame(
        {"node": node[index], "name": gpu["name"].filter(use).cast(pl.String), "ns": ns}
    )
    sums = rows.filter(pl.col("node") >= 0).group_by("node", "name", maintain_order=True)
    table = sums.agg(pl.col("ns").sum(), pl.len().cast(pl.Int64).alias("count"))
    large = table.filter(pl.len().over("node") > 1, pl.col("ns") >= MIN_KERNEL * ns.sum())
    return large.with_columns(name=KERNEL + pl.col("name"))


KERNEL = "kernel: "
"""Beginning of a kernel's name in the tree."""
MIN_KERNEL = 0.01
"""Share of all time from which a kernel is in the tree."""


def _plain(name: str) -> str:
    numbered = _NUMBER.match(name)
    return (numbered[1] or numbered[2]).strip() if numbered else name.removeprefix(MODULE)


def measure_inclusive_time(a: Analysis, spans: Intervals | None = None) -> NDArray[np.int64]:
    """Return each host row's inclusive time inside the spans, by default ``Analysis.spans``, ns.
    Where the host runs ahead, what it does in its own steps is in ``Steps.host_spans``."""
    ts = a.trace.cpu["ts"].to_numpy()
    inside = a.spans if spans is None else spans
    return covered_length(ts, ts + a.trace.cpu["dur"].to_numpy(), inside)


def measure_self_time(a: Analysis, inside: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return each host row's self time, ns: ``inside`` without that of its children."""
    own = inside.copy()
    parent = parent_rows(a.trace)
    below = parent >= 0
    np.subtract.at(own, parent[below], inside[below])
    return own


def _device_rows(a: Analysis, column: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return host rows that a column of the window's device work points at, and its ns inside."""
    gpu = a.trace.gpu
    rows = gpu[column].fill_null(-1).to_numpy().astype(np.int64)
    use = a.in_window & (rows >= 0)
    ts = gpu["ts"].to_numpy()[use]
    return rows[use], covered_length(ts, ts + gpu["dur"].to_numpy()[use], a.spans)


def _merge(
    names: pl.Series, rows: NDArray[np.int64], above: NDArray[np.int32], height: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Build the tree of names: the node of each host row, a row of each node, its parent node. One
    round a level: rows whose parent has a node get theirs from that and their name."""
    plain = map_names(names.gather(rows), _plain, pl.Categorical).to_physical().to_numpy()
    code = np.zeros(height, dtype=np.int64)
    code[rows] = plain
    codes = int(plain.max()) + 1
    group = np.full(height, -1, dtype=np.int64)
    first: list[NDArray[np.int64]] = []
    up: list[NDArray[np.int64]] = []
    made = 0
    level, left = rows[above[rows] < 0], rows[above[rows] >= 0]
    while len(level):
        parent = np.where(above[level] >= 0, group[np.maximum(above[level], 0)], -1)
        key = (parent + 1) * codes + code[level]
        unique, where, inverse = np.unique(key, return_index=True, return_inverse=True)
        group[level] = made + inverse
        first.append(level[where])
        up.append(unique // codes - 1)
        made += len(unique)
        ready = group[above[left]] >= 0
        level, left = left[ready], left[~ready]
    return group, np.concatenate(first), np.concatenate(up)


def largest_nodes(
    total: NDArray[np.int64],
    count: NDArray[np.int64],
    up: NDArray[np.int64],
    names: list[str],
    limit: int,
) -> pl.DataFrame:
    """Keep the largest nodes, each with its parents, and the rest of those that lost children."""
    order = np.lexsort((np.arange(len(total)), -total))
    chosen = order[total[order] > 0]
    # a parent is at least as large as its child and older, so it comes before it in this order;
    # half of the nodes may be needed for the rests of the others
    chosen = chosen[: max(1, limit // 2)]
    number = {int(node): i for i, node in enumerate(chosen)}
    sums = dict.fromkeys(number, 0)
    rows = []
    for node in map(int, chosen):
        parent = number.get(int(up[node]))
        rows.append((number[node], parent, names[node], int(count[node]), int(total[node])))
        if parent is not None:
            sums[int(up[node])] += int(total[node])
    lost = {int(up[n]) for n in np.flatnonzero(total > 0) if int(n) not in number and up[n] >= 0}
    for node in [n for n in number if n in lost]:
        left = int(total[node]) - sums[node]
        if left > 0:
            rows.append((len(rows), number[node], REST, 0, left))
    return pl.DataFrame(rows, schema=TREE_SCHEMA, orient="row")
