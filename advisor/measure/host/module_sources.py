"""Sources of modules in a trace. Each source maps rows of the host to nodes of a tree of names.

Events of modules (PyTorch), the recorder's log of their calls, ranges named after modules (NVTX,
``record_function``), names of operators that are paths (XLA), marks before and after the forward of
a module (FSDP), Python frames of ``forward``."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.trace import JAX, TENSORFLOW, Trace
from advisor.measure.host.names import distinct_names, name_matches
from advisor.measure.host.op_tree import MODULE
from advisor.measure.host.stacks import Rows, climb_stack, parent_rows, rows_around

if TYPE_CHECKING:
    from advisor.measure import Analysis

MAX_NODES: Final = 20_000
"""Maximum modules of a recording. Work of further modules counts for the module around them."""
MAX_MODULE_DEPTH: Final = 64
"""Maximum nesting depth of modules."""
SourceName = Literal[
    "module events", "logged calls", "ranges", "operator names", "FSDP", "Python frames"
]
Find = Callable[[Rows], Rows]
"""Function from rows of ``trace.cpu`` to nodes, or -1 outside of modules."""


class ModuleTree:
    """Tree of module names by path."""

    def __init__(self) -> None:
        self.parent: list[int] = []
        self.name: list[str] = []
        self._depth: list[int] = []
        self._node_of_name: dict[tuple[int, str], int] = {}

    def insert(self, parent: int, names: tuple[str, ...]) -> int:
        """Return the node of these names below ``parent`` (-1 for none). If the names begin with
        the name of the outermost node around ``parent``, start there."""
        top = parent
        while top >= 0 and self.parent[top] >= 0:
            top = self.parent[top]
        node = -1 if len(names) > 1 and top >= 0 and self.name[top] == names[0] else parent
        for name in names:
            if (node, name) not in self._node_of_name:
                depth = 1 if node < 0 else self._depth[node] + 1
                if len(self.name) >= MAX_NODES or depth > MAX_MODULE_DEPTH:
                    return node
                self._node_of_name[node, name] = len(self.name)
                self.parent.append(node)
                self.name.append(name)
                self._depth.append(depth)
            node = self._node_of_name[node, name]
        return node

    def graft(self) -> NDArray[np.int32]:
        """Return the node that represents each node. A module without a parent, such as on a thread
        of the backward pass, is replaced by the only other module of its name."""
        target = list(range(len(self.name)))
        nodes_by_name: dict[str, list[int]] = {}
        for node, name in enumerate(self.name):
            if self.parent[node] >= 0:
                nodes_by_name.setdefault(name, []).append(node)
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parent):
            children.setdefault(parent, []).append(node)
        for root in children.get(-1, []):
            same_name = nodes_by_name.get(self.name[root], [])
            destination = _follow_targets(target, same_name[0]) if len(same_name) == 1 else root
            top = destination
            while self.parent[top] >= 0:
                top = self.parent[top]
            if top == root:
                continue
            moves = [(root, destination)]
            while moves:
                node, new_parent = moves.pop()
                target[node] = new_parent
                for child in children.get(node, []):
                    twin = self._node_of_name.get((new_parent, self.name[child]))
                    if twin is None:
                        self.parent[child] = new_parent
                        self._node_of_name[new_parent, self.name[child]] = child
                    else:
                        moves.append((child, twin))
        return np.array([_follow_targets(target, node) for node in target], dtype=np.int32)


def _follow_targets(target: list[int], node: int) -> int:
    while target[node] != node:
        node = target[node]
    return node


# -- where modules are recorded -------------------------------------------------------------------

_WRAPPER_NAMES = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", ""}
"""Names of wrappers, which are not layers."""
_MODULE_PATH = (
    r"^(?:\w+[./])*(?:(?:\w*(?:layer|block)s?|stages?)[._ #]?|(?:h|resnets|experts)[._])"
    r"\[?\d+\]?(?:[./]\w+)*$"
)
_MODULE_MARK = r"'Module': '([\w.]+)'"
_FSDP_MARK = r"^FSDP::(pre|post)_forward \(([\w.]+)\)$"
_FORWARD_FRAME = r"^(?:.*[/\\])?([^/\\(]+\.py)\((\d+)\): forward$"
_MODULE_CALL = r"nn[/\\]modules[/\\]module\.py\(\d+\): _(?:wrapped_)?call_impl$"
_TRANSFORMATION = re.compile(r"^(?:transpose|jvp|vmap|remat|checkpoint|custom_\w+)\((.*)\)$")
_NOT_A_SCOPE = re.compile(
    r"^(?:gradient_tape|replica_\d+|x?p?jit(?:\(.*\))?|while|body|cond|branch_\d+_fun|checkpoint|"
    r"remat\w*|rematted_computation|closed_call|shard_map|StatefulPartitionedCall|PartitionedCall)$"
)
_NUMBERED_NAME = re.compile(r"^(.*[^._ #\[])([._ #\[]+)(\d+)\]?$")


def split_number(name: str) -> tuple[str, str, int | None]:
    """Split ``layers.3`` into ``layers``, ``.``, 3; without a number into the name, "",
    ``None``."""
    result = _NUMBERED_NAME.match(name)
    if result is None or len(result[3]) > 9:
        return name, "", None
    return result[1], result[2], int(result[3])


def split_modules(path: str) -> tuple[str, ...]:
    """Return the modules of ``model.layers.0.mlp``, outermost first. A number belongs to the name
    before it, and wrappers are left out."""
    result: list[str] = []
    for part in re.split(r"[./]", path):
        if part in _WRAPPER_NAMES:
            continue
        if part.isdecimal() and result:
            result[-1] += f".{part}"
        else:
            result.append(part)
    return tuple(result[:MAX_MODULE_DEPTH])


def op_path(name: str) -> tuple[str, ...]:
    """Return the modules in the name that XLA gives an operator, without the operator, such as
    ``jit(step)/transpose(jvp(Model))/layer_0/dot_general``."""
    result: list[str] = []
    for part in name.split("/")[:-1]:
        while (inner := _TRANSFORMATION.match(part)) is not None:
            part = inner[1]
        if part and not _NOT_A_SCOPE.match(part):
            result.append(part)
    return tuple(result[:MAX_MODULE_DEPTH])


class Source(NamedTuple):
    """Modules that a source has recorded."""

    find: Find
    scopes: NDArray[np.int32]
    """Node that begins at each host row, or -1. Empty if modules are not rows."""
    calls: tuple[NDArray[np.int64], NDArray[np.int32]] | None = None
    """Begin of each call, ns, and its node, where these are not rows."""


def _find_nested(
    trace: Trace,
    tree: ModuleTree,
    rows: Rows,
    names: Callable[[str], tuple[str, ...]],
    *,
    in_order: bool = False,
) -> Source:
    """Find modules that are nested host rows. With ``in_order``, rows of one name in one call are
    different modules, numbered in order of time."""
    parent = parent_rows(trace)
    scope = np.zeros(len(parent), dtype=np.bool_)
    scope[rows] = True
    above = climb_stack(parent, scope, rows_around(parent, rows))
    texts, name_index = distinct_names(trace.cpu["name"].gather(rows))
    paths = [names(text) for text in texts]
    number = np.zeros(len(rows), dtype=np.int64)
    if in_order:
        frame = pl.DataFrame({"above": above, "which": name_index})
        order = pl.int_range(pl.len()).over("above", "which")
        number = np.where(above >= 0, frame.select(order).to_series().to_numpy(), 0)
    node = np.full(len(parent), -1, dtype=np.int32)
    count, remaining = max(1, len(paths)), np.arange(len(rows))
    largest = int(number.max(initial=0)) + 1
    for _ in range(MAX_MODULE_DEPTH):  # one round per level of modules
        parent_node = np.where(above[remaining] >= 0, node[np.maximum(above[remaining], 0)], -1)
        is_ready = (above[remaining] < 0) | (parent_node >= 0)
        level = remaining[is_ready]
        if not len(level):
            break
        key = (
            (parent_node[is_ready].astype(np.int64) + 1) * count + name_index[level]
        ) * largest + number[level]
        unique, inverse = np.unique(key, return_inverse=True)
        nodes = []
        for code in unique.tolist():
            path, position = paths[code // largest % count], code % largest
            if in_order and path and code // largest // count:
                path = (*path[:-1], f"{path[-1]} #{position}")
            nodes.append(tree.insert(code // largest // count - 1, path))
        node[rows[level]] = np.array(nodes, dtype=np.int32)[inverse]
        remaining = remaining[~is_ready]
    starts_node = node >= 0

    def find(wanted: Rows) -> Rows:
        row = climb_stack(parent, starts_node, wanted)
        return np.where(row >= 0, node[np.maximum(row, 0)], np.int32(-1))

    return Source(find, node)


def _find_module_events(a: Analysis, tree: ModuleTree) -> Source | None:
    """Find ``nn.Module: Linear_0``, named by the class and the module's number in the class."""
    trace = a.trace
    frames = np.flatnonzero((trace.cpu["kind"] == "python").to_numpy())
    rows = frames[name_matches(trace.cpu["name"].gather(frames), f"^{MODULE}").to_numpy()]
    if not len(rows):
        return None
    return _find_nested(trace, tree, rows, lambda name: (name.removeprefix(MODULE),))


def _find_ranges(a: Analysis, tree: ModuleTree) -> Source | None:
    """Find ``model.layers.0.mlp``, ``layer_3``, and the ranges of vLLM's hooks."""
    trace = a.trace
    ranges = np.flatnonzero((trace.cpu["kind"] == "annotation").to_numpy())
    names = trace.cpu["name"].gather(ranges)
    is_module = name_matches(names, f"{_MODULE_PATH}|{_MODULE_MARK}").to_numpy()
    if not is_module.any():
        return None
    texts, name_index = distinct_names(names)
    marks = [re.search(_MODULE_MARK, text) for text in texts]
    paths = [
        split_modules(mark[1] if mark else text) for text, mark in zip(texts, marks, strict=True)
    ]
    is_layer = np.zeros(len(texts) + 1, dtype=np.bool_)
    is_layer[name_index[is_module]] = True
    roots = {paths[i][0] for i in np.flatnonzero(is_layer[:-1]) if len(paths[i]) > 1}
    for i, text in enumerate(texts):  # distinct names: model.embed_tokens next to model.layers.0
        if paths[i] and paths[i][0] in roots and re.fullmatch(r"\w+(?:[./]\w+)*", text):
            is_layer[i] = True
    path_of_name = dict(zip(texts, paths, strict=True))
    return _find_nested(trace, tree, ranges[is_layer[name_index]], path_of_name.__getitem__)


def _find_fsdp_modules(a: Analysis, tree: ModuleTree) -> Source | None:
    """Find modules between FSDP's ranges before and after their forward."""
    cpu = a.trace.cpu
    ranges = np.flatnonzero((cpu["kind"] == "annotation").to_numpy())
    rows = ranges[name_matches(cpu["name"].gather(ranges), _FSDP_MARK).to_numpy()]
    if not len(rows):
        return None
    ts, thread = cpu["ts"].to_numpy(), cpu["thread"].to_numpy()
    end = ts + cpu["dur"].to_numpy()
    texts = cpu["name"].gather(rows).cast(pl.String).str.extract_groups(_FSDP_MARK).struct.unnest()
    edges: dict[int, tuple[list[int], list[int]]] = {}
    node = np.full(cpu.height, -1, dtype=np.int32)
    open_calls: dict[int, list[tuple[str, int]]] = {}
    order = rows[np.lexsort((ts[rows], thread[rows]))]
    mark_of_row = dict(zip(rows.tolist(), texts.rows(), strict=True))
    for row in order.tolist():  # two marks per call
        mark, name = mark_of_row[row]
        stack = open_calls.setdefault(int(thread[row]), [])
        if mark == "pre":
            node[row] = tree.insert(-1, split_modules(name))
            stack.append((name, int(node[row])))
            instant = int(ts[row])
        elif any(name == other for other, _ in stack):
            while stack.pop()[0] != name:
                pass
            instant = int(end[row])
        else:
            continue
        instants, nodes = edges.setdefault(int(thread[row]), ([], []))
        instants.append(instant)
        nodes.append(stack[-1][1] if stack else -1)

    def find(wanted: Rows) -> Rows:
        result = np.full(len(wanted), -1, dtype=np.int32)
        for thread_id, (instants, nodes) in edges.items():
            of_thread = np.flatnonzero((wanted >= 0) & (thread[np.maximum(wanted, 0)] == thread_id))
            index = np.searchsorted(np.array(instants), ts[wanted[of_thread]], side="right")
            result[of_thread] = np.array([-1, *nodes], dtype=np.int32)[index]
        return result

    return Source(find, node)


def _find_operator_modules(a: Analysis, tree: ModuleTree) -> Source | None:
    """Find modules in the operators of XLA and TensorFlow, whose names are paths of scopes."""
    trace = a.trace
    if trace.meta.framework not in (TENSORFLOW, JAX):
        return None
    rows = trace.gpu["op"].drop_nulls().unique().sort().to_numpy()
    rows = rows[name_matches(trace.cpu["name"].gather(rows), r"^[^/]+/").to_numpy()]
    if not len(rows):
        return None
    find = _find_nested(trace, tree, rows, op_path).find
    return Source(find, np.empty(0, dtype=np.int32))


def _find_forward_frames(a: Analysis, tree: ModuleTree) -> Source | None:
    """Find ``forward`` in Python frames, called by a module."""
    trace = a.trace
    cpu = trace.cpu
    frames = np.flatnonzero((cpu["kind"] == "python").to_numpy())
    rows = frames[name_matches(cpu["name"].gather(frames), _FORWARD_FRAME).to_numpy()]
    callers = rows_around(parent_rows(trace), rows)
    rows, callers = rows[callers >= 0], callers[callers >= 0]
    rows = rows[name_matches(cpu["name"].gather(callers), _MODULE_CALL).to_numpy()]
    if not len(rows):
        return None

    def name(text: str) -> tuple[str, ...]:
        file, line = re.match(_FORWARD_FRAME, text).groups()  # type: ignore[union-attr]
        return (f"{file}:{line}",)

    return _find_nested(trace, tree, rows, name, in_order=True)


def _find_logged_calls(a: Analysis, tree: ModuleTree) -> Source | None:
    """Find the modules in the recorder's log of their calls."""
    calls = a.module_calls
    if calls is None:
        return None
    nodes = [tree.insert(-1, split_modules(path)) for path in calls.paths]
    node_of_place = np.array([*nodes, -1], dtype=np.int32)

    def find(wanted: Rows) -> Rows:
        return node_of_place[calls.find(a.trace, wanted)]

    begins, places = calls.calls
    return Source(find, np.empty(0, dtype=np.int32), (begins, node_of_place[places]))


SOURCES: Final[dict[SourceName, Callable[[Analysis, ModuleTree], Source | None]]] = {
    "module events": _find_module_events,
    "logged calls": _find_logged_calls,
    "ranges": _find_ranges,
    "operator names": _find_operator_modules,
    "FSDP": _find_fsdp_modules,
    "Python frames": _find_forward_frames,
}
