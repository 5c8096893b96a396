"""Layers: the time of each module, with equal modules merged, and modules slower than equal ones.

Work of the backward pass belongs to the module whose forward operator created its node."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core import layers as data
from advisor.core.intervals import covered_length
from advisor.measure.device.families import MATRIX
from advisor.measure.host.module_sources import (
    SOURCES,
    Find,
    ModuleTree,
    Source,
    SourceName,
    split_number,
)
from advisor.measure.host.op_tree import measure_inclusive_time, measure_self_time
from advisor.measure.host.stacks import Rows, climb_stack, is_operator, parent_rows
from advisor.measure.memory.memory_origin import measure_layer_memory
from advisor.measure.steps.steps import step_of

if TYPE_CHECKING:
    from advisor.measure import Analysis

MIN_SOURCE_SHARE: Final = 0.5
"""Minimum share of the time with a module at which no other source is tried."""
_MIN_KNOWN_SHARE: Final = 0.8
"""Minimum share of a module's time with known FLOPs or bytes for a rate of the module."""
MIN_EQUALS: Final = 4
"""Minimum number of equal modules for an outlier."""
MAX_EQUALS_SPREAD: Final = 0.25
"""Maximum range of the other modules, as a share of their median, for equal modules."""
MIN_LONGER_SHARE: Final = 0.1
"""Minimum share of the median by which an outlier takes longer."""

_MAX_GROUPS, _MAX_KINDS, _MAX_OUTLIERS = 400, 100, 20
"""Maximum number of entries of each list in a report."""

NODES_SCHEMA: dict[str, Any] = {
    "node": pl.Int32, "parent": pl.Int32, "name": pl.String, "kind": pl.String, "calls": pl.Int64,
    "kernels": pl.Int64, "self": pl.Int64, "ns": pl.Int64, "backward": pl.Int64,
    "flops": pl.Float64, "moved": pl.Float64,
}  # fmt: skip


@dataclass(frozen=True)
class LayerTable:
    """Modules and their time."""

    source: SourceName
    """Name of the source that recorded the modules."""
    nodes: pl.DataFrame
    """Modules by their path, parents before children: ``node``, ``parent`` (null if outermost),
    ``name``, ``kind`` (the name without its number), ``calls`` (inside ``spans``; null if not
    recorded), ``kernels`` (pieces of work), ``self`` (ns of work outside its children), ``ns``
    (including its children), ``backward`` (the part of ``ns`` in the backward pass), ``flops`` and
    ``moved`` (bytes; null if known for less than ``_MIN_KNOWN_SHARE`` of the time). Sums over the
    window; without device work ``ns`` is self time of operators on the host."""
    total_ns: int
    """Time of all work inside ``spans``, ns."""
    pieces: int
    """Number of pieces of all work."""
    steps: NDArray[np.float64]
    """Time of each node (row) in each used step (column), ns."""
    on_device: bool
    """Whether the work ran on the device."""
    find: Find
    """Function from rows of ``trace.cpu`` to nodes, or -1 outside of modules."""
    scopes: NDArray[np.int32]
    """Aligned with ``trace.cpu``: the node that begins at a row, or -1. Empty if modules are not
    rows."""

    def path(self, node: int) -> list[int]:
        """Return the node and its ancestors, outermost first."""
        parents = self.nodes["parent"].to_list()
        result = [node]
        while parents[result[-1]] is not None:
            result.append(parents[result[-1]])
        return result[::-1]


# -- whose time it is -----------------------------------------------------------------------------


def measure_layers(a: Analysis) -> LayerTable | None:
    """Measure work by module: the device's work, else the work of operators on the host. Use the
    first source in ``SOURCES`` that knows the module of half of the time, else the one that knows
    most. ``None`` if no modules were recorded around any work."""
    work = None
    best: tuple[int, SourceName, ModuleTree, Source, Rows, Rows] | None = None
    for name, read in SOURCES.items():
        tree = ModuleTree()
        source = read(a, tree)
        if source is None:
            continue
        if work is None:
            work = _list_work(a)
        node, backward = _assign_nodes(a, source.find, work)
        known_ns = int(work["ns"].to_numpy()[node >= 0].sum())
        if known_ns and (best is None or known_ns > best[0]):
            best = known_ns, name, tree, source, node, backward
        if known_ns >= MIN_SOURCE_SHARE * max(1, int(work["ns"].sum())):
            break
    if best is None or work is None:
        return None
    _, name, tree, source, node, backward = best
    # PyTorch numbers the modules of a class, so a name is one module
    target = tree.graft() if name == "module events" else np.arange(len(tree.name), dtype=np.int32)

    def find_node(rows: Rows) -> Rows:
        nodes_found = source.find(rows)
        return np.where(nodes_found >= 0, target[np.maximum(nodes_found, 0)], np.int32(-1))

    scopes = source.scopes
    scope_rows = np.flatnonzero(scopes >= 0)
    scopes[scope_rows] = target[scopes[scope_rows]]
    node = np.where(node >= 0, target[np.maximum(node, 0)], -1)
    nodes, steps = _sum_nodes(a, tree, target, source, work, node, backward)
    total = int(work["ns"].sum())
    on_device = a.device_id is not None
    return LayerTable(name, nodes, total, work.height, steps, on_device, find_node, scopes)


def _list_work(a: Analysis) -> pl.DataFrame:
    """Return the work to assign: ``host`` and ``other`` (rows of ``trace.cpu`` that show its
    module, or -1), ``ns`` (inside the spans), ``ts``, and ``gpu`` (row of device work, or -1)."""
    trace = a.trace
    if a.device_id is None:
        rows = np.flatnonzero(is_operator(trace))
        ns = np.maximum(measure_self_time(a, measure_inclusive_time(a))[rows], 0)
        rows, ns = rows[ns > 0], ns[ns > 0]
        no_rows = np.full(len(rows), -1)
        columns = {"host": rows, "other": no_rows, "gpu": no_rows}
        return pl.DataFrame({**columns, "ns": ns, "ts": trace.cpu["ts"].to_numpy()[rows]})
    rows = np.flatnonzero(a.in_window)
    gpu = trace.gpu[rows]
    ts = gpu["ts"].to_numpy()
    launch = gpu["launch"].fill_null(-1).to_numpy().astype(np.int64)
    op = gpu["op"].fill_null(-1).to_numpy().astype(np.int64)
    if trace.meta.capture is not None:  # for captured work, use the captured operator
        launch = np.where(op >= trace.meta.capture.row, op, launch)
    ns = covered_length(ts, ts + gpu["dur"].to_numpy(), a.spans)
    return pl.DataFrame({"host": launch, "other": op, "gpu": rows, "ns": ns, "ts": ts})


def work_nodes(a: Analysis) -> Rows:
    """Return the node of each piece of work, aligned with ``trace.gpu``; -1 outside of modules."""
    gpu = a.trace.gpu
    host, other = (gpu[name].fill_null(-1).to_numpy().astype(np.int64) for name in ("launch", "op"))
    if a.layers is None:
        return np.full(gpu.height, -1)
    if a.trace.meta.capture is not None:
        host = np.where(other >= a.trace.meta.capture.row, other, host)
    return _assign_nodes(a, a.layers.find, pl.DataFrame({"host": host, "other": other}))[0]


def matching_nodes(layers: LayerTable, pattern: str) -> NDArray[np.bool_]:
    """Return which nodes a pattern selects, with their descendants: by name, by kind, or by path
    (names from the outermost, with dots between); ``*`` and ``?`` as in file names."""
    rows = layers.nodes.select("parent", "name", "kind").iter_rows()
    paths: list[str] = []
    result: list[bool] = []
    for parent, name, kind in rows:  # nodes: parents come first
        paths.append(name if parent is None else f"{paths[parent]}.{name}")
        is_match = any(fnmatchcase(text, pattern) for text in (name, kind, paths[-1]))
        result.append(is_match or (parent is not None and result[parent]))
    return np.array(result, dtype=np.bool_)


def _assign_nodes(a: Analysis, find: Find, work: pl.DataFrame) -> tuple[Rows, Rows]:
    """Return the node of each piece of work (or -1), and whether the backward pass did it."""
    host, other = work["host"].to_numpy(), work["other"].to_numpy()
    node = find(host)
    missing = np.flatnonzero((node < 0) & (other >= 0))
    node[missing] = find(other[missing])
    backward = np.zeros(len(node), dtype=np.bool_)
    missing = np.flatnonzero(node < 0)
    if len(missing):
        forward_ops = _find_forward_ops(a, np.where(host >= 0, host, other)[missing])
        node[missing] = find(forward_ops)
        backward[missing] = node[missing] >= 0
    return node, backward


def _find_forward_ops(a: Analysis, rows: Rows) -> Rows:
    """Return the forward operator of each row of the backward pass, or -1."""
    if not a.trace.cpu.height:
        return rows
    return np.where(rows >= 0, a.forward_op[np.maximum(rows, 0)], np.int32(-1))


def _sum_nodes(
    a: Analysis,
    tree: ModuleTree,
    target: NDArray[np.int32],
    source: Source,
    work: pl.DataFrame,
    node: Rows,
    backward: Rows,
) -> tuple[pl.DataFrame, NDArray[np.float64]]:
    """Return ``LayerTable.nodes`` and time per step. Nodes that were merged into others, or have
    neither calls nor time, are left out."""
    count = len(target)
    ns = work["ns"].to_numpy()
    is_assigned = node >= 0
    self_ns = np.bincount(node[is_assigned], ns[is_assigned], minlength=count)
    kernels = np.bincount(node[is_assigned], minlength=count)
    in_backward = is_assigned & backward
    columns = {
        "self": self_ns,
        "ns": self_ns.copy(),
        "backward": np.bincount(node[in_backward], ns[in_backward], minlength=count),
        "kernels": kernels,
    }
    work_sums: dict[str, NDArray[np.float64]] = {}
    if a.device_id is not None:
        work_sums = _sum_known_work(a, work, node, count)
    steps = _time_per_step(a, work, node, count)
    parent = np.array(tree.parent, dtype=np.int64)
    depth = np.zeros(count, dtype=np.int64)
    for index in np.flatnonzero(target == np.arange(count)).tolist():
        ancestor = parent[index]
        while ancestor >= 0:
            depth[index] += 1
            ancestor = parent[ancestor]
    for index in np.argsort(-depth, kind="stable").tolist():  # nodes: children before parents
        if parent[index] >= 0 and target[index] == index:
            for values in (*columns.values(), *work_sums.values(), steps):
                if values is not self_ns:
                    values[parent[index]] += values[index]
    scopes = source.scopes
    rows = np.flatnonzero(scopes >= 0)
    calls = _count_calls(a, rows, source, count)
    is_kept = columns["ns"] > 0
    if source.calls is None:  # else containers are called too, whose time is their modules'
        is_kept |= calls > 0
    kept_nodes = np.flatnonzero((target == np.arange(count)) & is_kept)
    kept_nodes = kept_nodes[np.lexsort((kept_nodes, depth[kept_nodes]))]
    new_index = np.full(count, -1, dtype=np.int64)
    new_index[kept_nodes] = np.arange(len(kept_nodes))
    target[:] = new_index[target]
    scopes[rows] = np.where(scopes[rows] >= 0, new_index[scopes[rows]], -1)
    new_parent = np.where(parent[kept_nodes] >= 0, new_index[np.maximum(parent[kept_nodes], 0)], -1)
    names = [tree.name[index] for index in kept_nodes.tolist()]
    data: dict[str, Any] = {
        "node": np.arange(len(kept_nodes)), "parent": new_parent, "name": names,
        "kind": [split_number(name)[0] for name in names], "calls": calls[kept_nodes],
        **{name: values[kept_nodes].astype(np.int64) for name, values in columns.items()},
        "flops": None, "moved": None,
    }  # fmt: skip
    if work_sums:
        work_of = {name: values[kept_nodes] for name, values in work_sums.items()}
        data |= _keep_mostly_known(work_of, columns["ns"][kept_nodes])
    frame = pl.DataFrame(data).select(
        pl.col(name).cast(kind) for name, kind in NODES_SCHEMA.items()
    )
    positive = [
        pl.when(pl.col(name) > 0).then(pl.col(name)) for name in ("calls", "flops", "moved")
    ]
    frame = frame.with_columns(pl.when(pl.col("parent") >= 0).then(pl.col("parent")), *positive)
    return frame, steps[kept_nodes]


def _time_per_step(a: Analysis, work: pl.DataFrame, node: Rows, count: int) -> NDArray[np.float64]:
    """Return ns of each node's own work (row) in each used step (column)."""
    order = a.steps.used["index"].to_list()
    column_of_step = {index: i for i, index in enumerate(order)}
    step = step_of(a.steps, work["ts"].to_numpy()).to_list()
    column = np.array([column_of_step.get(step_index, -1) for step_index in step], dtype=np.int64)
    steps = np.zeros((count, max(1, len(order))))
    is_shown = (node >= 0) & (column >= 0)
    np.add.at(steps, (node[is_shown], column[is_shown]), work["ns"].to_numpy()[is_shown])
    return steps


def _count_calls(a: Analysis, rows: Rows, source: Source, count: int) -> Rows:
    """Count each node's calls inside the spans, without captured calls. ``rows`` are the rows at
    which a node begins."""
    if source.calls is not None:
        begins, nodes = source.calls
        return np.bincount(nodes[covered_length(begins, begins + 1, a.spans) > 0], minlength=count)
    if not len(rows):
        return np.zeros(count, dtype=np.int64)
    ts, dur = (a.trace.cpu[name].gather(rows).to_numpy() for name in ("ts", "dur"))
    called = rows[covered_length(ts, ts + np.maximum(dur, 1), a.spans) > 0]
    if a.trace.meta.capture is not None:
        called = called[called < a.trace.meta.capture.row]
    return np.bincount(source.scopes[called], minlength=count)


def _keep_mostly_known(
    work_sums: dict[str, NDArray[np.float64]], ns: NDArray[Any]
) -> dict[str, NDArray[np.float64]]:
    """Return FLOPs and bytes of nodes; -1 if known for less than ``_MIN_KNOWN_SHARE`` of the
    time."""
    matrix_ns, moved_ns = work_sums["matrix"], work_sums["moved_ns"]
    flops_known = (matrix_ns > 0) & (work_sums["sure"] >= _MIN_KNOWN_SHARE * matrix_ns)
    moved_known = (ns > 0) & (moved_ns >= _MIN_KNOWN_SHARE * ns)
    return {
        "flops": np.where(flops_known, work_sums["flops"], -1),
        "moved": np.where(moved_known, work_sums["moved"], -1),
    }


def _sum_known_work(
    a: Analysis, work: pl.DataFrame, node: Rows, count: int
) -> dict[str, NDArray[np.float64]]:
    """Sum each node's own work: known FLOPs and bytes, the time of matrix work and its part with
    known FLOPs, and the time of work with known bytes."""
    rows, ns = work["gpu"].to_numpy(), work["ns"].to_numpy()
    kernels = a.kernels[rows]
    flops, moved = (kernels[name].cast(pl.Float64).to_numpy() for name in ("flops", "moved"))
    counted_share = ns / np.maximum(a.trace.gpu["dur"].gather(rows).to_numpy(), 1)
    is_matrix = kernels["family"].cast(pl.String).is_in(list(MATRIX)).fill_null(False).to_numpy()
    is_assigned = node >= 0

    def summed(values: NDArray[Any], is_wanted: NDArray[Any]) -> NDArray[np.float64]:
        is_chosen = is_assigned & is_wanted
        return np.bincount(node[is_chosen], values[is_chosen], minlength=count).astype(np.float64)

    return {
        "flops": summed(flops * counted_share, ~np.isnan(flops)),
        "moved": summed(moved * counted_share, ~np.isnan(moved)),
        "matrix": summed(ns, is_matrix),
        "sure": summed(ns, is_matrix & ~np.isnan(flops)),
        "moved_ns": summed(ns, ~np.isnan(moved)),
    }


# -- equal layers ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class EqualLayers:
    """Modules of one kind that contain the same kinds and have the same ancestors."""

    parent: int | None
    """Index of the parent group, or ``None`` if outermost."""
    depth: int
    nodes: list[int]
    """Nodes of the modules, in order."""
    label: str
    """Common name, such as ``layers.0–23``."""


def equal_layers(layers: LayerTable) -> list[EqualLayers]:
    """Merge equal modules of the tree, parents before children, largest first among siblings."""
    parent, kinds = layers.nodes["parent"].to_list(), layers.nodes["kind"].to_list()
    names, ns = layers.nodes["name"].to_list(), layers.nodes["ns"].to_list()
    children: list[list[int]] = [[] for _ in parent]
    roots: list[int] = []
    for node, parent_node in enumerate(parent):
        (roots if parent_node is None else children[parent_node]).append(node)
    numbers: dict[tuple[str, frozenset[int]], int] = {}
    content_key = [0] * len(parent)
    for node in reversed(range(len(parent))):
        key = kinds[node], frozenset(content_key[child] for child in children[node])
        content_key[node] = numbers.setdefault(key, len(numbers))

    def grouped(nodes: list[int]) -> list[list[int]]:
        groups: dict[int, list[int]] = {}
        for node in nodes:
            groups.setdefault(content_key[node], []).append(node)
        return sorted(groups.values(), key=lambda group: sum(ns[node] for node in group))

    result: list[EqualLayers] = []
    todo: list[tuple[int | None, int, list[int]]] = [(None, 0, group) for group in grouped(roots)]
    while todo:
        parent_group, depth, group = todo.pop()
        label = range_label([names[node] for node in group])
        result.append(EqualLayers(parent_group, depth, sorted(group), label))
        index, members = len(result) - 1, [child for node in group for child in children[node]]
        todo.extend((index, depth + 1, members_group) for members_group in grouped(members))
    return result


def range_label(names: list[str]) -> str:
    """Name equal modules: ``layers.0–23``, or their kind if the numbers are not a range."""
    distinct = list(dict.fromkeys(names))
    if len(distinct) == 1:
        return distinct[0]
    parts = [split_number(name) for name in distinct]
    numbers = sorted(number for *_, number in parts if number is not None)
    prefixes = {part[:2] for part in parts}
    kind, separator = parts[0][:2]
    if len(prefixes) > 1 or len(numbers) < len(distinct):
        return kind
    if numbers[-1] - numbers[0] + 1 != len(numbers):
        return kind
    return f"{kind}{separator}{numbers[0]}–{numbers[-1]}"


@dataclass(frozen=True)
class UnequalLayer:
    """A module that takes longer than equal modules."""

    node: int
    equals: EqualLayers
    ns: float
    """Median time over the steps, ns."""
    median: float
    """Median time of the others, ns."""
    slowest_part: str | None
    """Kind of the module inside it with most of the difference, or ``None``."""


def find_unequal_layers(layers: LayerTable, groups: list[EqualLayers]) -> list[UnequalLayer]:
    """Find modules that contain others and take longer than equal modules, beyond their spread: the
    distance to the longest of the others is larger than their range. The median over the steps is
    compared. The longest come first."""
    time = np.median(layers.steps, axis=1)
    kinds, parent = layers.nodes["kind"].to_list(), layers.nodes["parent"].to_list()
    children: dict[int, list[int]] = {}
    for node, parent_node in enumerate(parent):
        if parent_node is not None:
            children.setdefault(parent_node, []).append(node)
    result = []
    for group in groups:
        if len(group.nodes) < MIN_EQUALS or group.nodes[0] not in children:
            continue
        times = time[group.nodes]
        longest = int(np.argmax(times))
        others = np.delete(times, longest)
        median_ns, spread = float(np.median(others)), float(np.ptp(others))
        if median_ns <= 0 or spread > MAX_EQUALS_SPREAD * median_ns:
            continue
        if times[longest] <= max(others.max() + spread, (1 + MIN_LONGER_SHARE) * median_ns):
            continue
        node = group.nodes[longest]
        child_times: list[Counter[str]] = []
        for member in group.nodes:
            sums: Counter[str] = Counter()
            for child in children.get(member, []):
                sums[kinds[child]] += float(time[child])  # type: ignore[assignment]
            child_times.append(sums)
        other_sums = [sums for i, sums in enumerate(child_times) if i != longest]
        excess = {
            kind: value - float(np.median([sums[kind] for sums in other_sums]))
            for kind, value in child_times[longest].items()
        }
        slowest_part = max(excess, key=excess.__getitem__, default=None)
        if slowest_part is not None and excess[slowest_part] < (times[longest] - median_ns) / 2:
            slowest_part = None
        result.append(UnequalLayer(node, group, float(times[longest]), median_ns, slowest_part))
    # the parents of a longer module are longer too: name only the innermost one
    outlier_nodes = {outlier.node for outlier in result}
    ancestors = {parent_node for node in outlier_nodes for parent_node in layers.path(node)[:-1]}
    return sorted(
        (item for item in result if item.node not in ancestors),
        key=lambda item: item.median - item.ns,
    )


def describe_nodes(a: Analysis, nodes: list[int]) -> str | None:
    """Name the modules of these nodes: ``48 RMSNorm in layers.0–23``. ``None`` if they are of
    several kinds, or outside of modules."""
    layers, distinct = a.layers, np.unique(nodes)
    if layers is None or not len(distinct) or distinct[0] < 0:
        return None
    kinds, names = layers.nodes["kind"].to_list(), layers.nodes["name"].to_list()
    paths = [layers.path(int(node)) for node in distinct]
    if len({tuple(kinds[node] for node in path) for path in paths}) > 1:
        return None
    levels = [sorted(set(level)) for level in zip(*paths, strict=True)]
    numbered = [level for level in levels[:-1] if len(level) > 1]
    label = range_label([names[node] for node in levels[-1]])
    if numbered:
        outer_label = range_label([names[node] for node in numbered[0]])
        return f"{len(levels[-1])} {kinds[levels[-1][0]]} in {outer_label}"
    return f"{label} in {names[levels[-2][0]]}" if len(levels) > 1 else label


@dataclass(frozen=True)
class ModulesAround:
    """Modules around each of some host rows."""

    node: Rows
    """Node around each row, or -1."""
    group: Rows
    """Number shared by rows in modules of the same kind, inside the same kinds, if the user's line
    is outside of the module. -1 if the line is inside the module."""


def modules_around(a: Analysis, rows: Rows) -> ModulesAround:
    """Find the modules around host rows, or for the backward pass around the forward operators."""
    layers = a.layers
    no_nodes = np.full(len(rows), -1, dtype=np.int64)
    if layers is None:
        return ModulesAround(no_nodes, no_nodes)
    node, start = layers.find(rows), rows
    if (node < 0).any():
        start = np.where(node < 0, _find_forward_ops(a, rows), rows)
        node = layers.find(start)
    module_row = no_nodes
    if len(layers.scopes):
        module_row = climb_stack(parent_rows(a.trace), layers.scopes >= 0, start)
    frame = np.where(start >= 0, a.user_frame[np.maximum(start, 0)], -1)
    kinds: dict[tuple[int, str], int] = {}
    group: list[int] = []
    for parent, kind in layers.nodes.select("parent", "kind").iter_rows():  # nodes, not events
        key = -1 if parent is None else group[parent], kind
        group.append(kinds.setdefault(key, len(kinds)))
    outside = (node >= 0) & ((frame < 0) | (frame < module_row))
    return ModulesAround(node, np.where(outside, np.array(group)[np.maximum(node, 0)], -1))


# -- for the report -----------------------------------------------------------


def report_layers(a: Analysis) -> data.Layers | None:
    """Build ``Report.layers``: groups of equal modules, kinds and outliers, per step."""
    layers = a.layers
    if layers is None:
        return None
    nodes, per_step = layers.nodes, 1 / a.step_count
    groups = equal_layers(layers)
    time = {index: int(nodes["ns"].gather(group.nodes).sum()) for index, group in enumerate(groups)}
    is_trained = bool(nodes["backward"].sum())
    memory = measure_layer_memory(a, layers)
    nodes = nodes.with_columns(
        allocated=None if memory is None else pl.Series(memory.allocated),
        kept=None if memory is None else pl.Series(memory.net_allocated),
        peak=None if memory is None or memory.peak is None else pl.Series(memory.peak),
    )
    largest = sorted(sorted(time, key=lambda index: (-time[index], index))[:_MAX_GROUPS])
    new_index = {index: number for number, index in enumerate(largest)}
    rows = []
    for index in largest:
        group = groups[index]
        members = nodes[group.nodes]
        ns = time[index]
        known_sums = {name: _sum_known(members, name) for name in ("flops", "moved")}
        per_second = {
            name: None if value is None else value / ns * 1e9 for name, value in known_sums.items()
        }
        calls, allocated, kept_memory = (
            _sum_known(members, name) for name in ("calls", "allocated", "kept")
        )
        rows.append(
            data.Layer(
                name=group.label,
                kind=str(members["kind"][0]),
                parent=None if group.parent is None else new_index[group.parent],
                modules=members.height,
                calls=None if calls is None else calls * per_step,
                ns=ns * per_step,
                self_ns=int(members["self"].sum()) * per_step,
                share=ns / max(1, layers.total_ns),
                backward_ns=int(members["backward"].sum()) * per_step if is_trained else None,
                kernels=int(members["kernels"].sum()) * per_step,
                flops=None if known_sums["flops"] is None else known_sums["flops"] * per_step,
                bytes=None if known_sums["moved"] is None else known_sums["moved"] * per_step,
                flops_per_s=per_second["flops"],
                bytes_per_s=per_second["moved"],
                allocated_bytes=None if allocated is None else allocated * per_step,
                kept_bytes=None if kept_memory is None else kept_memory * per_step,
                peak_bytes=cast(int | None, members["peak"].max()),
            )
        )
    names = nodes["name"].to_list()
    roots = nodes.filter(pl.col("parent").is_null())
    return data.Layers(
        source=layers.source,
        on_device=layers.on_device,
        total_ns=layers.total_ns * per_step,
        outside_ns=(layers.total_ns - int(roots["ns"].sum())) * per_step,
        outside_kernels=(layers.pieces - int(roots["kernels"].sum())) * per_step,
        layers=rows,
        more=len(groups) - len(rows),
        kinds=_list_kinds(nodes, layers.total_ns, per_step),
        outliers=[
            data.LayerOutlier(
                name=names[outlier.node],
                path=[names[node] for node in layers.path(outlier.node)[:-1]],
                equals=outlier.equals.label,
                ns=outlier.ns,
                usual_ns=outlier.median,
                part=outlier.slowest_part,
            )
            for outlier in find_unequal_layers(layers, groups)[:_MAX_OUTLIERS]
        ],
    )


def _sum_known(nodes: pl.DataFrame, name: str) -> float | None:
    """Sum a column, or return ``None`` if a module with time has no value, or all are null."""
    values = nodes[name]
    unknown = values.is_null() & (nodes["ns"] > 0)
    return None if unknown.any() or values.is_null().all() else float(values.sum())


def _list_kinds(nodes: pl.DataFrame, total: int, per_step: float) -> list[data.LayerKind]:
    kinds, parent = nodes["kind"].to_list(), nodes["parent"].to_list()
    outer_kinds: list[frozenset[str]] = []
    for parent_node in parent:  # nodes: parents come first
        outer_kinds.append(
            frozenset() if parent_node is None else outer_kinds[parent_node] | {kinds[parent_node]}
        )
    outer = pl.Series([kind not in names for kind, names in zip(kinds, outer_kinds, strict=True)])
    table = (
        nodes.with_columns(outer=outer)
        .group_by("kind", maintain_order=True)
        .agg(
            pl.len().alias("modules"),
            pl.col("calls").sum(),
            pl.col("self").sum(),
            pl.col("ns", "kept").filter(pl.col("outer")).sum(),
            pl.col("peak").max(),
            known=pl.col("kept").count(),
        )
        .sort("self", "ns", "kind", descending=[True, True, False])
        .head(_MAX_KINDS)
    )
    return [
        data.LayerKind(
            kind=row["kind"],
            modules=row["modules"],
            calls=row["calls"] * per_step if row["calls"] else None,
            ns=row["ns"] * per_step,
            self_ns=row["self"] * per_step,
            share=row["self"] / max(1, total),
            kept_bytes=row["kept"] * per_step if row["known"] else None,
            peak_bytes=row["peak"],
        )
        for row in table.iter_rows(named=True)
    ]
