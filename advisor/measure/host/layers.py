"""Layers: the time of each module, with equal modules merged, and modules slower than their equals.

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

ENOUGH_TIME_SHARE: Final = 0.5
"""Share of the time with a module from which no other source is tried."""
MIN_KNOWN_SHARE: Final = 0.8
"""Share of a module's time whose FLOPs or bytes must be known for its rate."""
MIN_EQUALS: Final = 4
"""Equal modules from which on one can be an outlier."""
MAX_EQUALS_SPREAD: Final = 0.25
"""Range of the others, as a share of their median, up to which they are equals."""
MIN_LONGER_SHARE: Final = 0.1
"""Share of the median by which an outlier must be longer."""

MAX_GROUPS, MAX_KINDS, MAX_OUTLIERS = 400, 100, 20
"""Entries of each list in a report, at most."""

NODES_SCHEMA: dict[str, Any] = {
    "node": pl.Int32, "parent": pl.Int32, "name": pl.String, "kind": pl.String, "calls": pl.Int64,
    "kernels": pl.Int64, "own": pl.Int64, "ns": pl.Int64, "backward": pl.Int64,
    "flops": pl.Float64, "moved": pl.Float64,
}  # fmt: skip


@dataclass(frozen=True)
class LayerTable:
    """Modules and their time."""

    source: SourceName
    """Name of the source that recorded the modules."""
    nodes: pl.DataFrame
    """Modules by their path, parents before children: ``node``, ``parent`` (null: outermost),
    ``name``, ``kind`` (the name without its number), ``calls`` (inside ``spans``; null: not
    recorded), ``kernels`` (pieces of work), ``own`` (ns of work outside its children), ``ns`` (with
    them), ``backward`` (the part of ``ns`` in the backward pass), ``flops`` and ``moved`` (bytes;
    null: known for less than ``MIN_KNOWN_SHARE`` of the time that they are of). Sums over the
    window; without device work ``ns`` is own host time of operators."""
    total_ns: int
    """Time of all work inside ``spans``, ns."""
    pieces: int
    """Number of pieces of that work."""
    steps: NDArray[np.float64]
    """Time of each node (line) in each used step (column), ns."""
    on_device: bool
    """Whether the work is the device's."""
    find: Find
    """Function from rows of ``trace.cpu`` to nodes, -1: outside of modules."""
    scopes: NDArray[np.int32]
    """Aligned with ``trace.cpu``: the node that begins at a row, -1: none; empty: modules are not
    rows."""

    def path(self, node: int) -> list[int]:
        """Return the node and those around it, outermost first."""
        up = self.nodes["parent"].to_list()
        result = [node]
        while up[result[-1]] is not None:
            result.append(up[result[-1]])
        return result[::-1]


# -- whose time it is -----------------------------------------------------------------------------


def measure_layers(a: Analysis) -> LayerTable | None:
    """Measure work by module: the device's, else that of operators on the host. From the source
    that knows the module of most of the time, the first in ``SOURCES`` that knows half of it.
    ``None``: no modules were recorded around any of it."""
    work = None
    best: tuple[int, SourceName, ModuleTree, Source, Rows, Rows] | None = None
    for name, read in SOURCES.items():
        tree = ModuleTree()
        source = read(a.trace, tree)
        if source is None:
            continue
        if work is None:
            work = _work(a)
        node, backward = _assign(a, source[0], work)
        known = int(work["ns"].to_numpy()[node >= 0].sum())
        if known and (best is None or known > best[0]):
            best = known, name, tree, source, node, backward
        if known >= ENOUGH_TIME_SHARE * max(1, int(work["ns"].sum())):
            break
    if best is None or work is None:
        return None
    _, name, tree, (find, scopes), node, backward = best
    # PyTorch numbers the modules of a class, so that a name is one module
    target = tree.graft() if name == "module events" else np.arange(len(tree.name), dtype=np.int32)

    def find_node(rows: Rows) -> Rows:
        found = find(rows)
        return np.where(found >= 0, target[np.maximum(found, 0)], np.int32(-1))

    at = np.flatnonzero(scopes >= 0)
    scopes[at] = target[scopes[at]]
    node = np.where(node >= 0, target[np.maximum(node, 0)], -1)
    nodes, steps = _sums(a, tree, target, scopes, work, node, backward)
    total = int(work["ns"].sum())
    on_device = a.device_id is not None
    return LayerTable(name, nodes, total, work.height, steps, on_device, find_node, scopes)


def _work(a: Analysis) -> pl.DataFrame:
    """Return the work to assign: ``host`` and ``other`` (rows of cpu that say whose it is, -1:
    none), ``ns`` (inside the spans), ``ts``, and of device work ``gpu`` (its row)."""
    trace = a.trace
    if a.device_id is None:
        rows = np.flatnonzero(is_operator(trace))
        ns = np.maximum(measure_self_time(a, measure_inclusive_time(a))[rows], 0)
        rows, ns = rows[ns > 0], ns[ns > 0]
        none = np.full(len(rows), -1)
        columns = {"host": rows, "other": none, "gpu": none}
        return pl.DataFrame({**columns, "ns": ns, "ts": trace.cpu["ts"].to_numpy()[rows]})
    rows = np.flatnonzero(a.in_window)
    gpu = trace.gpu[rows]
    ts = gpu["ts"].to_numpy()
    launch = gpu["launch"].fill_null(-1).to_numpy().astype(np.int64)
    op = gpu["op"].fill_null(-1).to_numpy().astype(np.int64)
    if trace.meta.capture is not None:  # there the operator is the captured one
        launch = np.where(op >= trace.meta.capture.row, op, launch)
    ns = covered_length(ts, ts + gpu["dur"].to_numpy(), a.spans)
    return pl.DataFrame({"host": launch, "other": op, "gpu": rows, "ns": ns, "ts": ts})


def work_nodes(a: Analysis) -> Rows:
    """Return the node of each piece of work, aligned with ``trace.gpu``; -1: outside of modules."""
    gpu = a.trace.gpu
    host, other = (gpu[name].fill_null(-1).to_numpy().astype(np.int64) for name in ("launch", "op"))
    if a.layers is None:
        return np.full(gpu.height, -1)
    if a.trace.meta.capture is not None:
        host = np.where(other >= a.trace.meta.capture.row, other, host)
    return _assign(a, a.layers.find, pl.DataFrame({"host": host, "other": other}))[0]


def matching_nodes(layers: LayerTable, pattern: str) -> NDArray[np.bool_]:
    """Return which nodes a pattern selects, with their descendants: by name, by kind, or by path
    (names from the outermost, with dots between); ``*`` and ``?`` as in file names."""
    rows = layers.nodes.select("parent", "name", "kind").iter_rows()
    paths: list[str] = []
    result: list[bool] = []
    for up, name, kind in rows:  # nodes: parents come first
        paths.append(name if up is None else f"{paths[up]}.{name}")
        own = any(fnmatchcase(text, pattern) for text in (name, kind, paths[-1]))
        result.append(own or (up is not None and result[up]))
    return np.array(result, dtype=np.bool_)


def _assign(a: Analysis, find: Find, work: pl.DataFrame) -> tuple[Rows, Rows]:
    """Return the node of each piece of work (-1: none), and whether the backward pass did it."""
    host, other = work["host"].to_numpy(), work["other"].to_numpy()
    node = find(host)
    missing = np.flatnonzero((node < 0) & (other >= 0))
    node[missing] = find(other[missing])
    backward = np.zeros(len(node), dtype=np.bool_)
    missing = np.flatnonzero(node < 0)
    if len(missing):
        begun = _forward(a, np.where(host >= 0, host, other)[missing])
        node[missing] = find(begun)
        backward[missing] = node[missing] >= 0
    return node, backward


def _forward(a: Analysis, rows: Rows) -> Rows:
    """Return the forward operator behind each row, -1: none."""
    if not a.trace.cpu.height:
        return rows
    return np.where(rows >= 0, a.forward_op[np.maximum(rows, 0)], np.int32(-1))


def _sums(
    a: Analysis,
    tree: ModuleTree,
    target: NDArray[np.int32],
    scopes: NDArray[np.int32],
    work: pl.DataFrame,
    node: Rows,
    backward: Rows,
) -> tuple[pl.DataFrame, NDArray[np.float64]]:
    """Return ``LayerTable.nodes`` and time per step; nodes that were grafted away have no parent,
    calls or time, and are left out of the table's order by their place at its end."""
    count = len(target)
    ns = work["ns"].to_numpy()
    inside = node >= 0
    own = np.bincount(node[inside], ns[inside], minlength=count)
    kernels = np.bincount(node[inside], minlength=count)
    used = inside & backward
    columns = {
        "own": own,
        "ns": own.copy(),
        "backward": np.bincount(node[used], ns[used], minlength=count),
        "kernels": kernels,
    }
    known: dict[str, NDArray[np.float64]] = {}
    if a.device_id is not None:
        known = _known_work(a, work, node, count)
    steps = _time_per_step(a, work, node, count)
    parent = np.array(tree.parent, dtype=np.int64)
    depth = np.zeros(count, dtype=np.int64)
    for each in np.flatnonzero(target == np.arange(count)).tolist():
        up = parent[each]
        while up >= 0:
            depth[each] += 1
            up = parent[up]
    for each in np.argsort(-depth, kind="stable").tolist():  # nodes: children before parents
        if parent[each] >= 0 and target[each] == each:
            for values in (*columns.values(), *known.values(), steps):
                if values is not own:
                    values[parent[each]] += values[each]
    rows = np.flatnonzero(scopes >= 0)
    calls = _count_calls(a, rows, scopes, count)
    kept = np.flatnonzero((target == np.arange(count)) & ((columns["ns"] > 0) | (calls > 0)))
    kept = kept[np.lexsort((kept, depth[kept]))]
    new = np.full(count, -1, dtype=np.int64)
    new[kept] = np.arange(len(kept))
    target[:] = new[target]
    scopes[rows] = np.where(scopes[rows] >= 0, new[scopes[rows]], -1)
    up = np.where(parent[kept] >= 0, new[np.maximum(parent[kept], 0)], -1)
    names = [tree.name[each] for each in kept.tolist()]
    data: dict[str, Any] = {
        "node": np.arange(len(kept)), "parent": up, "name": names,
        "kind": [split_number(name)[0] for name in names], "calls": calls[kept],
        **{name: values[kept].astype(np.int64) for name, values in columns.items()}, "flops": None,
        "moved": None,
    }  # fmt: skip
    if known:
        work_of = {name: values[kept] for name, values in known.items()}
        data |= _mostly_known(work_of, columns["ns"][kept])
    frame = pl.DataFrame(data).select(
        pl.col(name).cast(kind) for name, kind in NODES_SCHEMA.items()
    )
    positive = [
        pl.when(pl.col(name) > 0).then(pl.col(name)) for name in ("calls", "flops", "moved")
    ]
    frame = frame.with_columns(pl.when(pl.col("parent") >= 0).then(pl.col("parent")), *positive)
    return frame, steps[kept]


def _time_per_step(a: Analysis, work: pl.DataFrame, node: Rows, count: int) -> NDArray[np.float64]:
    """Return ns of each node's own work (line) in each used step (column)."""
    order = a.steps.used["index"].to_list()
    place = {index: i for i, index in enumerate(order)}
    step = step_of(a.steps, work["ts"].to_numpy()).to_list()
    column = np.array([place.get(each, -1) for each in step], dtype=np.int64)
    steps = np.zeros((count, max(1, len(order))))
    shown = (node >= 0) & (column >= 0)
    np.add.at(steps, (node[shown], column[shown]), work["ns"].to_numpy()[shown])
    return steps


def _count_calls(a: Analysis, rows: Rows, scopes: NDArray[np.int32], count: int) -> Rows:
    """Count each node's calls inside the spans, the captured ones left out. ``rows``: those at
    which a node of ``scopes`` begins."""
    if not len(rows):
        return np.zeros(count, dtype=np.int64)
    ts, dur = (a.trace.cpu[name].gather(rows).to_numpy() for name in ("ts", "dur"))
    called = rows[covered_length(ts, ts + np.maximum(dur, 1), a.spans) > 0]
    if a.trace.meta.capture is not None:
        called = called[called < a.trace.meta.capture.row]
    return np.bincount(scopes[called], minlength=count)


def _mostly_known(
    known: dict[str, NDArray[np.float64]], ns: NDArray[Any]
) -> dict[str, NDArray[np.float64]]:
    """Return FLOPs and bytes of nodes; -1: known for less than ``MIN_KNOWN_SHARE`` of the time."""
    matrix, moved = known["matrix"], known["moved_ns"]
    flops_known = (matrix > 0) & (known["sure"] >= MIN_KNOWN_SHARE * matrix)
    moved_known = (ns > 0) & (moved >= MIN_KNOWN_SHARE * ns)
    return {
        "flops": np.where(flops_known, known["flops"], -1),
        "moved": np.where(moved_known, known["moved"], -1),
    }


def _known_work(
    a: Analysis, work: pl.DataFrame, node: Rows, count: int
) -> dict[str, NDArray[np.float64]]:
    """Sum each node's own work: FLOPs and bytes that are known, the time of matrix work and the
    part of it with known FLOPs, the time of work with known bytes."""
    rows, ns = work["gpu"].to_numpy(), work["ns"].to_numpy()
    kernels = a.kernels[rows]
    flops, moved = (kernels[name].cast(pl.Float64).to_numpy() for name in ("flops", "moved"))
    part = ns / np.maximum(a.trace.gpu["dur"].gather(rows).to_numpy(), 1)
    matrix = kernels["family"].cast(pl.String).is_in(list(MATRIX)).fill_null(False).to_numpy()
    inside = node >= 0

    def summed(values: NDArray[Any], wanted: NDArray[Any]) -> NDArray[np.float64]:
        chosen = inside & wanted
        return np.bincount(node[chosen], values[chosen], minlength=count).astype(np.float64)

    return {
        "flops": summed(flops * part, ~np.isnan(flops)),
        "moved": summed(moved * part, ~np.isnan(moved)),
        "matrix": summed(ns, matrix),
        "sure": summed(ns, matrix & ~np.isnan(flops)),
        "moved_ns": summed(ns, ~np.isnan(moved)),
    }


# -- equal layers ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class EqualLayers:
    """Modules of one kind that contain the same kinds, below the same ones."""

    parent: int | None
    """Place of the group around it; ``None``: outermost."""
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
    for node, up in enumerate(parent):
        (roots if up is None else children[up]).append(node)
    numbers: dict[tuple[str, frozenset[int]], int] = {}
    content = [0] * len(parent)
    for node in reversed(range(len(parent))):
        key = kinds[node], frozenset(content[child] for child in children[node])
        content[node] = numbers.setdefault(key, len(numbers))

    def grouped(nodes: list[int]) -> list[list[int]]:
        groups: dict[int, list[int]] = {}
        for node in nodes:
            groups.setdefault(content[node], []).append(node)
        return sorted(groups.values(), key=lambda group: sum(ns[node] for node in group))

    result: list[EqualLayers] = []
    left: list[tuple[int | None, int, list[int]]] = [(None, 0, group) for group in grouped(roots)]
    while left:
        up_group, depth, group = left.pop()
        label = range_label([names[node] for node in group])
        result.append(EqualLayers(up_group, depth, sorted(group), label))
        place, inside = len(result) - 1, [child for node in group for child in children[node]]
        left.extend((place, depth + 1, below) for below in grouped(inside))
    return result


def range_label(names: list[str]) -> str:
    """Name equal modules: ``layers.0–23``, or their kind where the numbers are no range."""
    distinct = list(dict.fromkeys(names))
    if len(distinct) == 1:
        return distinct[0]
    parts = [split_number(name) for name in distinct]
    numbers = sorted(number for *_, number in parts if number is not None)
    heads = {part[:2] for part in parts}
    kind, mark = parts[0][:2]
    if len(heads) > 1 or len(numbers) < len(distinct):
        return kind
    if numbers[-1] - numbers[0] + 1 != len(numbers):
        return kind
    return f"{kind}{mark}{numbers[0]}–{numbers[-1]}"


@dataclass(frozen=True)
class UnequalLayer:
    """A module that takes longer than its equals."""

    node: int
    equals: EqualLayers
    ns: float
    """Median time over the steps, ns."""
    median: float
    """Median time of the others, ns."""
    slowest_part: str | None
    """Kind of the module inside it with most of the difference; ``None``: it has none."""


def find_outliers(layers: LayerTable, groups: list[EqualLayers]) -> list[UnequalLayer]:
    """Find modules that contain others and take longer than their equals, beyond the spread of
    these: the distance to the longest of the others is larger than their range. Per step the median
    is compared. The longest come first."""
    time = np.median(layers.steps, axis=1)
    kinds, parent = layers.nodes["kind"].to_list(), layers.nodes["parent"].to_list()
    children: dict[int, list[int]] = {}
    for node, up in enumerate(parent):
        if up is not None:
            children.setdefault(up, []).append(node)
    result = []
    for group in groups:
        if len(group.nodes) < MIN_EQUALS or group.nodes[0] not in children:
            continue
        own = time[group.nodes]
        longest = int(np.argmax(own))
        others = np.delete(own, longest)
        usual, spread = float(np.median(others)), float(np.ptp(others))
        if usual <= 0 or spread > MAX_EQUALS_SPREAD * usual:
            continue
        if own[longest] <= max(others.max() + spread, (1 + MIN_LONGER_SHARE) * usual):
            continue
        node = group.nodes[longest]
        inside: list[Counter[str]] = []
        for each in group.nodes:
            sums: Counter[str] = Counter()
            for child in children.get(each, []):
                sums[kinds[child]] += float(time[child])  # type: ignore[assignment]
            inside.append(sums)
        rest = [sums for i, sums in enumerate(inside) if i != longest]
        more = {
            kind: value - float(np.median([sums[kind] for sums in rest]))
            for kind, value in inside[longest].items()
        }
        part = max(more, key=more.__getitem__, default=None)
        if part is not None and more[part] < (own[longest] - usual) / 2:
            part = None
        result.append(UnequalLayer(node, group, float(own[longest]), usual, part))
    # what contains a longer module is longer itself: the innermost one is named
    named = {outlier.node for outlier in result}
    inner = {up for node in named for up in layers.path(node)[:-1]}
    return sorted((o for o in result if o.node not in inner), key=lambda o: o.median - o.ns)


def describe_nodes(a: Analysis, nodes: list[int]) -> str | None:
    """Name the modules of these nodes: ``48 RMSNorm in layers.0–23``; ``None``: of several kinds,
    or outside of modules."""
    layers, distinct = a.layers, np.unique(nodes)
    if layers is None or not len(distinct) or distinct[0] < 0:
        return None
    kinds, names = layers.nodes["kind"].to_list(), layers.nodes["name"].to_list()
    paths = [layers.path(int(node)) for node in distinct]
    if len({tuple(kinds[node] for node in path) for path in paths}) > 1:
        return None
    levels = [sorted(set(level)) for level in zip(*paths, strict=True)]
    numbered = [level for level in levels[:-1] if len(level) > 1]
    own = range_label([names[node] for node in levels[-1]])
    if numbered:
        around_it = range_label([names[node] for node in numbered[0]])
        return f"{len(levels[-1])} {kinds[levels[-1][0]]} in {around_it}"
    return f"{own} in {names[levels[-2][0]]}" if len(levels) > 1 else own


@dataclass(frozen=True)
class ModulesAround:
    """Modules around each of some host rows."""

    node: Rows
    """Node around each row, -1: none."""
    group: Rows
    """Number shared by rows in modules of the same kind, inside the same kinds, where the user's
    line is outside of the module; -1: the line says where it is."""


def modules_around(a: Analysis, rows: Rows) -> ModulesAround:
    """Find the modules around host rows; for the backward pass those of its forward."""
    layers = a.layers
    none = np.full(len(rows), -1, dtype=np.int64)
    if layers is None:
        return ModulesAround(none, none)
    node, start = layers.find(rows), rows
    if (node < 0).any():
        start = np.where(node < 0, _forward(a, rows), rows)
        node = layers.find(start)
    begin = none
    if len(layers.scopes):
        begin = climb_stack(parent_rows(a.trace), layers.scopes >= 0, start)
    frame = np.where(start >= 0, a.user_frame[np.maximum(start, 0)], -1)
    kinds: dict[tuple[int, str], int] = {}
    group: list[int] = []
    for up, kind in layers.nodes.select("parent", "kind").iter_rows():  # nodes, not events
        key = -1 if up is None else group[up], kind
        group.append(kinds.setdefault(key, len(kinds)))
    outside = (node >= 0) & ((frame < 0) | (frame < begin))
    return ModulesAround(node, np.where(outside, np.array(group)[np.maximum(node, 0)], -1))


# -- for the report -----------------------------------------------------------


def report_layers(a: Analysis) -> data.Layers | None:
    """Build ``Report.layers``: groups of equal modules, kinds and outliers, per step."""
    layers = a.layers
    if layers is None:
        return None
    nodes, per_step = layers.nodes, 1 / a.step_count
    groups = equal_layers(layers)
    time = {place: int(nodes["ns"].gather(group.nodes).sum()) for place, group in enumerate(groups)}
    trained = bool(nodes["backward"].sum())
    memory = measure_layer_memory(a, layers)
    nodes = nodes.with_columns(
        allocated=None if memory is None else pl.Series(memory.allocated),
        kept=None if memory is None else pl.Series(memory.net_allocated),
        peak=None if memory is None or memory.peak is None else pl.Series(memory.peak),
    )
    chosen = sorted(sorted(time, key=lambda place: (-time[place], place))[:MAX_GROUPS])
    new = {place: number for number, place in enumerate(chosen)}
    rows = []
    for place in chosen:
        group = groups[place]
        own = nodes[group.nodes]
        ns = time[place]
        known = {name: _sum_known(own, name) for name in ("flops", "moved")}
        per_second = {
            name: None if value is None else value / ns * 1e9 for name, value in known.items()
        }
        calls, allocated, kept = (_sum_known(own, name) for name in ("calls", "allocated", "kept"))
        rows.append(
            data.Layer(
                name=group.label,
                kind=str(own["kind"][0]),
                parent=None if group.parent is None else new[group.parent],
                modules=own.height,
                calls=None if calls is None else calls * per_step,
                ns=ns * per_step,
                own_ns=int(own["own"].sum()) * per_step,
                share=ns / max(1, layers.total_ns),
                backward_ns=int(own["backward"].sum()) * per_step if trained else None,
                kernels=int(own["kernels"].sum()) * per_step,
                flops=None if known["flops"] is None else known["flops"] * per_step,
                bytes=None if known["moved"] is None else known["moved"] * per_step,
                flops_per_s=per_second["flops"],
                bytes_per_s=per_second["moved"],
                allocated_bytes=None if allocated is None else allocated * per_step,
                kept_bytes=None if kept is None else kept * per_step,
                peak_bytes=cast(int | None, own["peak"].max()),
            )
        )
    names = nodes["name"].to_list()
    inside = nodes.filter(pl.col("parent").is_null())
    return data.Layers(
        source=layers.source,
        on_device=layers.on_device,
        total_ns=layers.total_ns * per_step,
        outside_ns=(layers.total_ns - int(inside["ns"].sum())) * per_step,
        outside_kernels=(layers.pieces - int(inside["kernels"].sum())) * per_step,
        layers=rows,
        more=len(groups) - len(rows),
        kinds=_kinds(nodes, layers.total_ns, per_step),
        outliers=[
            data.LayerOutlier(
                name=names[each.node],
                path=[names[node] for node in layers.path(each.node)[:-1]],
                equals=each.equals.label,
                ns=each.ns,
                usual_ns=each.median,
                part=each.slowest_part,
            )
            for each in find_outliers(layers, groups)[:MAX_OUTLIERS]
        ],
    )


def _sum_known(nodes: pl.DataFrame, name: str) -> float | None:
    """Sum a column; ``None``: a module with time has no value, or all are null."""
    values = nodes[name]
    unknown = values.is_null() & (nodes["ns"] > 0)
    return None if unknown.any() or values.is_null().all() else float(values.sum())


def _kinds(nodes: pl.DataFrame, total: int, per_step: float) -> list[data.LayerKind]:
    kinds, parent = nodes["kind"].to_list(), nodes["parent"].to_list()
    around_it: list[frozenset[str]] = []
    for up in parent:  # nodes: parents come first
        around_it.append(frozenset() if up is None else around_it[up] | {kinds[up]})
    outer = pl.Series([kind not in names for kind, names in zip(kinds, around_it, strict=True)])
    table = (
        nodes.with_columns(outer=outer)
        .group_by("kind", maintain_order=True)
        .agg(
            pl.len().alias("modules"),
            pl.col("calls").sum(),
            pl.col("own").sum(),
            pl.col("ns", "kept").filter(pl.col("outer")).sum(),
            pl.col("peak").max(),
            known=pl.col("kept").count(),
        )
        .sort("own", "ns", "kind", descending=[True, True, False])
        .head(MAX_KINDS)
    )
    return [
        data.LayerKind(
            kind=row["kind"],
            modules=row["modules"],
            calls=row["calls"] * per_step if row["calls"] else None,
            ns=row["ns"] * per_step,
            own_ns=row["own"] * per_step,
            share=row["own"] / max(1, total),
            kept_bytes=row["kept"] * per_step if row["known"] else None,
            peak_bytes=row["peak"],
        )
        for row in table.iter_rows(named=True)
    ]
