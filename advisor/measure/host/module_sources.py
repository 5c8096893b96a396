"""Sources of modules in a trace: each turns rows of the host into nodes of a tree of names.

Events of modules (PyTorch), ranges named after modules (NVTX, ``record_function``), names of
operators that are paths (XLA), marks before and after the forward of a module (FSDP), Python frames
of ``forward``."""

import re
from collections.abc import Callable
from typing import Final, Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.trace import JAX, TENSORFLOW, Trace
from advisor.measure.host.names import distinct_names, name_matches
from advisor.measure.host.op_tree import MODULE
from advisor.measure.host.stacks import Rows, climb_stack, parent_rows, rows_around

MAX_NODES: Final = 20_000
"""Modules of one recording, at most; work of others belongs to the module around them."""
MAX_DEPTH: Final = 64
"""Nesting depth of modules, at most."""
SourceName = Literal["module events", "ranges", "operator names", "FSDP", "Python frames"]
Find = Callable[[Rows], Rows]
"""Function from rows of ``trace.cpu`` to nodes; -1: in no module."""


class ModuleTree:
    """Tree of module names by path."""

    def __init__(self) -> None:
        self.parent: list[int] = []
        self.name: list[str] = []
        self._depth: list[int] = []
        self._known: dict[tuple[int, str], int] = {}

    def insert(self, parent: int, names: tuple[str, ...]) -> int:
        """Return the node of these names below a node (-1: none); of names that begin as those of
        the outermost one around it, from there."""
        top = parent
        while top >= 0 and self.parent[top] >= 0:
            top = self.parent[top]
        node = -1 if len(names) > 1 and top >= 0 and self.name[top] == names[0] else parent
        for name in names:
            if (node, name) not in self._known:
                depth = 1 if node < 0 else self._depth[node] + 1
                if len(self.name) >= MAX_NODES or depth > MAX_DEPTH:
                    return node
                self._known[node, name] = len(self.name)
                self.parent.append(node)
                self.name.append(name)
                self._depth.append(depth)
            node = self._known[node, name]
        return node

    def graft(self) -> NDArray[np.int32]:
        """Return the node that stands for each: a module without one around it, say on a thread of
        the backward pass, is the one of its name elsewhere, if that is the only one."""
        target = list(range(len(self.name)))
        places: dict[str, list[int]] = {}
        for node, name in enumerate(self.name):
            if self.parent[node] >= 0:
                places.setdefault(name, []).append(node)
        below: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parent):
            below.setdefault(parent, []).append(node)
        for root in below.get(-1, []):
            named = places.get(self.name[root], [])
            place = _end(target, named[0]) if len(named) == 1 else root
            top = place
            while self.parent[top] >= 0:
                top = self.parent[top]
            if top == root:
                continue
            moves = [(root, place)]
            while moves:
                node, new = moves.pop()
                target[node] = new
                for child in below.get(node, []):
                    same = self._known.get((new, self.name[child]))
                    if same is None:
                        self.parent[child] = new
                        self._known[new, self.name[child]] = child
                    else:
                        moves.append((child, same))
        return np.array([_end(target, node) for node in target], dtype=np.int32)


def _end(target: list[int], node: int) -> int:
    while target[node] != node:
        node = target[node]
    return node


# -- where modules are recorded -------------------------------------------------------------------

_CLEAN = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", ""}
"""Names of wrappers, which are no layers."""
_PATH = (
    r"^(?:\w+[./])*(?:(?:\w*(?:layer|block)s?|stages?)[._ #]?|(?:h|resnets|experts)[._])"
    r"\[?\d+\]?(?:[./]\w+)*$"
)
_MODULE_MARK = r"'Module': '([\w.]+)'"
_FSDP = r"^FSDP::(pre|post)_forward \(([\w.]+)\)$"
_FORWARD = r"^(?:.*[/\\])?([^/\\(]+\.py)\((\d+)\): forward$"
_CALL = r"nn[/\\]modules[/\\]module\.py\(\d+\): _(?:wrapped_)?call_impl$"
_WRAPS = re.compile(r"^(?:transpose|jvp|vmap|remat|checkpoint|custom_\w+)\((.*)\)$")
_NO_SCOPE = re.compile(
    r"^(?:gradient_tape|replica_\d+|x?p?jit(?:\(.*\))?|while|body|cond|branch_\d+_fun|checkpoint|"
    r"remat\w*|rematted_computation|closed_call|shard_map|StatefulPartitionedCall|PartitionedCall)$"
)
_NUMBERED = re.compile(r"^(.*[^._ #\[])([._ #\[]+)(\d+)\]?$")


def split_number(name: str) -> tuple[str, str, int | None]:
    """Split ``layers.3`` into ``layers``, ``.``, 3; without a number: the name, "", ``None``."""
    result = _NUMBERED.match(name)
    if result is None or len(result[3]) > 9:
        return name, "", None
    return result[1], result[2], int(result[3])


def split_modules(path: str) -> tuple[str, ...]:
    """Return the modules of ``model.layers.0.mlp``, outermost first: a number belongs to the name
    before it, and wrappers are left out."""
    result: list[str] = []
    for part in re.split(r"[./]", path):
        if part in _CLEAN:
            continue
        if part.isdecimal() and result:
            result[-1] += f".{part}"
        else:
            result.append(part)
    return tuple(result[:MAX_DEPTH])


def op_path(name: str) -> tuple[str, ...]:
    """Return the modules in the name that XLA gives an operator, such as
    ``jit(step)/transpose(jvp(Model))/layer_0/dot_general``: without the operator."""
    result: list[str] = []
    for part in name.split("/")[:-1]:
        while (inner := _WRAPS.match(part)) is not None:
            part = inner[1]
        if part and not _NO_SCOPE.match(part):
            result.append(part)
    return tuple(result[:MAX_DEPTH])


Source = tuple[Find, NDArray[np.int32]]
"""Function that finds nodes, and ``LayerTable.scopes``: the node that begins at each host row."""


def _nested(
    trace: Trace,
    tree: ModuleTree,
    rows: Rows,
    names: Callable[[str], tuple[str, ...]],
    *,
    in_order: bool = False,
) -> Source:
    """Find modules that are host rows with others inside them. ``in_order``: rows of one name in
    one call are different modules, numbered in order of time."""
    parent = parent_rows(trace)
    scope = np.zeros(len(parent), dtype=np.bool_)
    scope[rows] = True
    above = climb_stack(parent, scope, rows_around(parent, rows))
    texts, which = distinct_names(trace.cpu["name"].gather(rows))
    known = [names(text) for text in texts]
    number = np.zeros(len(rows), dtype=np.int64)
    if in_order:
        frame = pl.DataFrame({"above": above, "which": which})
        counted = pl.int_range(pl.len()).over("above", "which")
        number = np.where(above >= 0, frame.select(counted).to_series().to_numpy(), 0)
    node = np.full(len(parent), -1, dtype=np.int32)
    count, left = max(1, len(known)), np.arange(len(rows))
    largest = int(number.max(initial=0)) + 1
    for _ in range(MAX_DEPTH):  # one round a level of modules
        up = np.where(above[left] >= 0, node[np.maximum(above[left], 0)], -1)
        ready = (above[left] < 0) | (up >= 0)
        now = left[ready]
        if not len(now):
            break
        key = ((up[ready].astype(np.int64) + 1) * count + which[now]) * largest + number[now]
        unique, inverse = np.unique(key, return_inverse=True)
        made = []
        for each in unique.tolist():
            path, place = known[each // largest % count], each % largest
            if in_order and path and each // largest // count:
                path = (*path[:-1], f"{path[-1]} #{place}")
            made.append(tree.insert(each // largest // count - 1, path))
        node[rows[now]] = np.array(made, dtype=np.int32)[inverse]
        left = left[~ready]
    begins = node >= 0

    def find(wanted: Rows) -> Rows:
        row = climb_stack(parent, begins, wanted)
        return np.where(row >= 0, node[np.maximum(row, 0)], np.int32(-1))

    return find, node


def _module_events(trace: Trace, tree: ModuleTree) -> Source | None:
    """Find ``nn.Module: Linear_0``: the class, and a number for each module of the class."""
    frames = np.flatnonzero((trace.cpu["kind"] == "python").to_numpy())
    rows = frames[name_matches(trace.cpu["name"].gather(frames), f"^{MODULE}").to_numpy()]
    if not len(rows):
        return None
    return _nested(trace, tree, rows, lambda name: (name.removeprefix(MODULE),))


def _ranges(trace: Trace, tree: ModuleTree) -> Source | None:
    """Find ``model.layers.0.mlp``, ``layer_3``, and the ranges of vLLM's hooks."""
    ranges = np.flatnonzero((trace.cpu["kind"] == "annotation").to_numpy())
    names = trace.cpu["name"].gather(ranges)
    found = name_matches(names, f"{_PATH}|{_MODULE_MARK}").to_numpy()
    if not found.any():
        return None
    texts, which = distinct_names(names)
    marks = [re.search(_MODULE_MARK, text) for text in texts]
    paths = [
        split_modules(mark[1] if mark else text) for text, mark in zip(texts, marks, strict=True)
    ]
    layer = np.zeros(len(texts) + 1, dtype=np.bool_)
    layer[which[found]] = True
    tops = {paths[i][0] for i in np.flatnonzero(layer[:-1]) if len(paths[i]) > 1}
    for i, text in enumerate(texts):  # distinct names: model.embed_tokens beside model.layers.0
        if paths[i] and paths[i][0] in tops and re.fullmatch(r"\w+(?:[./]\w+)*", text):
            layer[i] = True
    known = dict(zip(texts, paths, strict=True))
    return _nested(trace, tree, ranges[layer[which]], known.__getitem__)


def _marked(trace: Trace, tree: ModuleTree) -> Source | None:
    """Find modules between FSDP's ranges before and after their forward."""
    cpu = trace.cpu
    ranges = np.flatnonzero((cpu["kind"] == "annotation").to_numpy())
    rows = ranges[name_matches(cpu["name"].gather(ranges), _FSDP).to_numpy()]
    if not len(rows):
        return None
    ts, thread = cpu["ts"].to_numpy(), cpu["thread"].to_numpy()
    end = ts + cpu["dur"].to_numpy()
    texts = cpu["name"].gather(rows).cast(pl.String).str.extract_groups(_FSDP).struct.unnest()
    edges: dict[int, tuple[list[int], list[int]]] = {}
    node = np.full(cpu.height, -1, dtype=np.int32)
    open_calls: dict[int, list[tuple[str, int]]] = {}
    order = rows[np.lexsort((ts[rows], thread[rows]))]
    text = dict(zip(rows.tolist(), texts.rows(), strict=True))
    for row in order.tolist():  # two marks a call
        which, name = text[row]
        stack = open_calls.setdefault(int(thread[row]), [])
        if which == "pre":
            node[row] = tree.insert(-1, split_modules(name))
            stack.append((name, int(node[row])))
            instant = int(ts[row])
        elif any(name == other for other, _ in stack):
            while stack.pop()[0] != name:
                pass
            instant = int(end[row])
        else:
            continue
        at, inside = edges.setdefault(int(thread[row]), ([], []))
        at.append(instant)
        inside.append(stack[-1][1] if stack else -1)

    def find(wanted: Rows) -> Rows:
        result = np.full(len(wanted), -1, dtype=np.int32)
        for number, (at, inside) in edges.items():
            own = np.flatnonzero((wanted >= 0) & (thread[np.maximum(wanted, 0)] == number))
            place = np.searchsorted(np.array(at), ts[wanted[own]], side="right")
            result[own] = np.array([-1, *inside], dtype=np.int32)[place]
        return result

    return find, node


def _op_names(trace: Trace, tree: ModuleTree) -> Source | None:
    """Find modules in the operators of XLA and TensorFlow, whose names are paths of scopes."""
    if trace.meta.framework not in (TENSORFLOW, JAX):
        return None
    rows = trace.gpu["op"].drop_nulls().unique().sort().to_numpy()
    rows = rows[name_matches(trace.cpu["name"].gather(rows), r"^[^/]+/").to_numpy()]
    if not len(rows):
        return None
    find, _ = _nested(trace, tree, rows, op_path)
    return find, np.empty(0, dtype=np.int32)


def _frames(trace: Trace, tree: ModuleTree) -> Source | None:
    """Find ``forward`` in Python frames, called by a module."""
    cpu = trace.cpu
    frames = np.flatnonzero((cpu["kind"] == "python").to_numpy())
    rows = frames[name_matches(cpu["name"].gather(frames), _FORWARD).to_numpy()]
    above = rows_around(parent_rows(trace), rows)
    rows, above = rows[above >= 0], above[above >= 0]
    rows = rows[name_matches(cpu["name"].gather(above), _CALL).to_numpy()]
    if not len(rows):
        return None

    def name(text: str) -> tuple[str, ...]:
        file, line = re.match(_FORWARD, text).groups()  # type: ignore[union-attr]
        return (f"{file}:{line}",)

    return _nested(trace, tree, rows, name, in_order=True)


SOURCES: Final[dict[SourceName, Callable[[Trace, ModuleTree], Source | None]]] = {
    "module events": _module_events,
    "ranges": _ranges,
    "operator names": _op_names,
    "FSDP": _marked,
    "Python frames": _frames,
}
