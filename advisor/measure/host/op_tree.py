"""Operators and modules by the device time that they launch, as a table and a tree of names."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.intervals import Bools, Intervals, covered_length
from advisor.measure.host.names import map_names, name_matches
from advisor.measure.host.stacks import innermost_ancestor, is_operator, parent_rows

if TYPE_CHECKING:
    from advisor.measure import Analysis

MODULE = "nn.Module: "
"""Prefix of module frames if modules were recorded."""
_MAX_NODES = 500
"""Maximum number of nodes, so that drawing the tree stays fast."""
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

_NUMBERED_NAME = re.compile(r"^(?:nn\.Module: (.+)_|(ProfilerStep|step |.*_iter)#)\d+$")


def op_table(a: Analysis, among: Bools | None = None) -> pl.DataFrame:
    """Sum operators inside ``spans`` by name: ``name``, ``count`` (calls that touch the spans),
    ``device`` (ns of the device work launched directly by it, with no operator in between, on the
    analysed device and inside the spans), ``host`` (its self time on the host, ns, inside the
    host's own steps, without the events inside it); largest ``device``, then ``host`` first.
    ``among``: which rows of ``trace.cpu`` to take, by default all."""
    cpu = a.trace.cpu
    is_op = is_operator(a.trace)
    rows = np.flatnonzero(is_op if among is None else is_op & among)
    if not len(rows):
        return pl.DataFrame(schema=TABLE_SCHEMA)
    inside = measure_inclusive_time(a, a.steps.host_spans)
    self_ns = measure_self_time(a, inside)
    device = np.zeros(cpu.height, dtype=np.int64)
    launching_rows, ns = _find_device_time(a, "op")
    np.add.at(device, launching_rows, ns)
    touching = rows[(inside[rows] > 0) | (device[rows] > 0)]
    frame = pl.DataFrame(
        {
            "name": cpu["name"].gather(touching),
            "device": device[touching],
            "host": np.maximum(self_ns[touching], 0),
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
    (self time, ns), ``count``; largest first. Step ranges are excluded, and numbers at the end of a
    name (``block 7``) are ignored."""
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
    touching = rows[inside[rows] > 0]
    host = measure_self_time(a, inside)[touching].clip(0)
    frame = pl.DataFrame({"name": cpu["name"].gather(touching), "host": host})
    return (
        frame.group_by(pl.col("name").cast(pl.String).str.replace(r"(?:\s|#|_)\d+$", ""))
        .agg(pl.col("host").sum(), pl.len().cast(pl.Int64).alias("count"))
        .sort("host", "name", descending=[True, False])
    )


def op_tree(a: Analysis, limit: int = _MAX_NODES) -> pl.DataFrame:
    """Merge modules, operators and annotations inside ``spans`` by their path of names.

    ``node``, ``parent`` (null if outermost), ``name``, ``count`` (events merged), ``ns``: device
    time launched inside it, on the analysed device, or its host time without device work. Both are
    sums over the window. ``ProfilerStep#5`` and ``ProfilerStep#6`` count as one name, as do
    ``Linear_0`` and ``Linear_1``. A node that launches several kernels itself, such as a graph, has
    children ``kernel: name`` for kernels with a hundredth of the time. At most ``limit`` nodes: the
    largest are kept, and the remaining time of a node that lost children is a child called
    ``(rest)``. Largest first among siblings; a parent precedes its children."""
    cpu = a.trace.cpu
    is_shown = is_operator(a.trace) | (cpu["kind"] == "annotation").to_numpy()
    is_shown |= (cpu["kind"] == "python").to_numpy() & name_matches(
        cpu["name"], f"^{MODULE}"
    ).to_numpy()
    if not is_shown.any():
        return pl.DataFrame(schema=TREE_SCHEMA)
    parent = parent_rows(a.trace)
    shown_ancestor = innermost_ancestor(parent, is_shown)
    above = np.where(parent >= 0, shown_ancestor[np.maximum(parent, 0)], -1)
    weight = np.zeros(cpu.height, dtype=np.int64)
    index, ns = _find_device_time(a, "launch")
    has_ancestor = shown_ancestor[index] >= 0
    np.add.at(weight, shown_ancestor[index[has_ancestor]], ns[has_ancestor])
    on_host = not weight.any()
    rows = np.flatnonzero(is_shown)
    inside = measure_inclusive_time(a)
    if on_host:
        weight = np.where(is_shown, inside, 0)
    group, first_rows, up = _merge_names(cpu["name"], rows, above, cpu.height)
    total = np.zeros(len(first_rows), dtype=np.int64)
    np.add.at(total, group[rows], weight[rows])
    touching = rows[(inside[rows] > 0) | (weight[rows] > 0)]
    count = np.bincount(group[touching], minlength=len(first_rows))
    if not on_host:
        for node in range(len(first_rows) - 1, -1, -1):  # nodes, not events: children after parents
            if up[node] >= 0:
                total[up[node]] += total[node]
    names = map_names(cpu["name"].gather(first_rows), _strip_number, pl.String).to_list()
    if not on_host:
        kernels = _sum_own_kernels(
            a, np.where(shown_ancestor >= 0, group[np.maximum(shown_ancestor, 0)], -1)
        )
        total, count = np.append(total, kernels["ns"]), np.append(count, kernels["count"])
        up, names = (np.append(up, kernels["node"]), names + kernels["name"].to_list())
    return largest_nodes(total, count, up, names, limit)


def _sum_own_kernels(a: Analysis, node: NDArray[np.int64]) -> pl.DataFrame:
    """Sum the kernels that nodes launch themselves: ``node``, ``name``, ``ns``, ``count``. Keep
    kernels with at least a hundredth of all time, of nodes that launch several kinds. The argument
    ``node`` has the node of each row of ``trace.cpu``, or -1."""
    gpu = a.trace.gpu
    launch = gpu["launch"].fill_null(-1).to_numpy().astype(np.int64)
    index, ns = _find_device_time(a, "launch")
    is_used = pl.Series(a.in_window & (launch >= 0))
    rows = pl.DataFrame(
        {"node": node[index], "name": gpu["name"].filter(is_used).cast(pl.String), "ns": ns}
    )
    sums = rows.filter(pl.col("node") >= 0).group_by("node", "name", maintain_order=True)
    table = sums.agg(pl.col("ns").sum(), pl.len().cast(pl.Int64).alias("count"))
    large_kernels = table.filter(
        pl.len().over("node") > 1, pl.col("ns") >= MIN_KERNEL_SHARE * ns.sum()
    )
    return large_kernels.with_columns(name=KERNEL + pl.col("name"))


KERNEL = "kernel: "
"""Prefix of a kernel's name in the tree."""
MIN_KERNEL_SHARE = 0.01
"""Minimum share of all time for a kernel in the tree."""


def _strip_number(name: str) -> str:
    numbered = _NUMBERED_NAME.match(name)
    return (numbered[1] or numbered[2]).strip() if numbered else name.removeprefix(MODULE)


def measure_inclusive_time(a: Analysis, spans: Intervals | None = None) -> NDArray[np.int64]:
    """Return each host row's inclusive time inside the spans, by default ``Analysis.spans``, ns. If
    the host runs ahead, its own steps are in ``Steps.host_spans``."""
    ts = a.trace.cpu["ts"].to_numpy()
    inside = a.spans if spans is None else spans
    return covered_length(ts, ts + a.trace.cpu["dur"].to_numpy(), inside)


def measure_self_time(a: Analysis, inside: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return each host row's self time, ns: ``inside`` minus the time of its children."""
    self_ns = inside.copy()
    parent = parent_rows(a.trace)
    has_parent = parent >= 0
    np.subtract.at(self_ns, parent[has_parent], inside[has_parent])
    return self_ns


def _find_device_time(a: Analysis, column: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return host rows that a column of the window's device work points at, and its ns inside."""
    gpu = a.trace.gpu
    rows = gpu[column].fill_null(-1).to_numpy().astype(np.int64)
    is_used = a.in_window & (rows >= 0)
    ts = gpu["ts"].to_numpy()[is_used]
    return rows[is_used], covered_length(ts, ts + gpu["dur"].to_numpy()[is_used], a.spans)


def _merge_names(
    names: pl.Series, rows: NDArray[np.int64], above: NDArray[np.int32], height: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Build the tree of names: the node of each host row, one row of each node, its parent node.
    Each round handles one level: a row's node follows from its parent's node and its own name."""
    plain = map_names(names.gather(rows), _strip_number, pl.Categorical).to_physical().to_numpy()
    code = np.zeros(height, dtype=np.int64)
    code[rows] = plain
    code_count = int(plain.max()) + 1
    group = np.full(height, -1, dtype=np.int64)
    first_rows: list[NDArray[np.int64]] = []
    parent_nodes: list[NDArray[np.int64]] = []
    node_count = 0
    level, remaining = rows[above[rows] < 0], rows[above[rows] >= 0]
    while len(level):
        parent = np.where(above[level] >= 0, group[np.maximum(above[level], 0)], -1)
        key = (parent + 1) * code_count + code[level]
        unique, first_index, inverse = np.unique(key, return_index=True, return_inverse=True)
        group[level] = node_count + inverse
        first_rows.append(level[first_index])
        parent_nodes.append(unique // code_count - 1)
        node_count += len(unique)
        ready = group[above[remaining]] >= 0
        level, remaining = remaining[ready], remaining[~ready]
    return group, np.concatenate(first_rows), np.concatenate(parent_nodes)


def largest_nodes(
    total: NDArray[np.int64],
    count: NDArray[np.int64],
    up: NDArray[np.int64],
    names: list[str],
    limit: int,
) -> pl.DataFrame:
    """Keep the largest nodes with their parents, and the remaining time of nodes that lost
    children."""
    order = np.lexsort((np.arange(len(total)), -total))
    chosen = order[total[order] > 0]
    # a parent is at least as large as its child and older, so it comes before it in this order;
    # half of the nodes may be needed for remaining time of the others
    chosen = chosen[: max(1, limit // 2)]
    number_of_node = {int(node): i for i, node in enumerate(chosen)}
    sums = dict.fromkeys(number_of_node, 0)
    rows = []
    for node in map(int, chosen):
        parent = number_of_node.get(int(up[node]))
        rows.append((number_of_node[node], parent, names[node], int(count[node]), int(total[node])))
        if parent is not None:
            sums[int(up[node])] += int(total[node])
    incomplete = {
        int(up[n]) for n in np.flatnonzero(total > 0) if int(n) not in number_of_node and up[n] >= 0
    }
    for node in [n for n in number_of_node if n in incomplete]:
        remaining = int(total[node]) - sums[node]
        if remaining > 0:
            rows.append((len(rows), number_of_node[node], REST, 0, remaining))
    return pl.DataFrame(rows, schema=TREE_SCHEMA, orient="row")
