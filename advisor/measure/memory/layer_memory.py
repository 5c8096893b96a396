"""Memory by layer: what the calls of each module allocate, keep, and need at most, from the
allocator events of a trace (``profile_memory=True``) or from the stacks of a snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.intervals import covered_length
from advisor.measure.memory.trace_memory import find_running

if TYPE_CHECKING:
    from advisor.measure import Analysis
    from advisor.measure.host.layers import LayerTable
    from advisor.measure.memory.post_mortem import PostMortem

HOST_MEMORY = -1
"""Device of the host's allocator events."""


class LayerMemory(NamedTuple):
    """Bytes by node of a ``LayerTable``, in the same order; what modules inside do is included."""

    allocated: NDArray[np.int64]
    """In its calls, summed over the window. The backward pass is in no call."""
    kept: NDArray[np.int64]
    """The same less what the calls release; negative: they release what others allocated."""
    peak: NDArray[np.int64] | None
    """The most that one call adds to what was allocated when it began; ``None``: the ends of calls
    were not recorded."""


def measure_layer_memory(a: Analysis, layers: LayerTable) -> LayerMemory | None:
    """Events of the analysed device, without one of the host's memory, each in the call of the
    thread that it happens in. ``None``: none was recorded in any module."""
    device = HOST_MEMORY if a.device_id is None else a.device_id
    events = a.trace.memory.filter((pl.col("device") == device) & (pl.col("bytes") != 0))
    if events.is_empty():
        return None
    events = events.with_columns(pl.col("thread").fill_null(-1))
    events = events.sort("thread", "ts", maintain_order=True)
    ts, thread = events["ts"].to_numpy(), events["thread"].to_numpy()
    inside = covered_length(ts, ts + 1, a.spans) > 0
    node = layers.find(find_running(a, thread, ts)).astype(np.int64)
    known = inside & (node >= 0)
    if not known.any():
        return None
    change = events["bytes"].to_numpy()
    count = layers.nodes.height
    kept = _sums(node[known], change[known], count)
    grown = known & (change > 0)
    allocated = _sums(node[grown], change[grown], count)
    parent = layers.nodes["parent"].fill_null(-1).to_list()
    for each in reversed(range(count)):  # nodes: parents come first
        if parent[each] >= 0:
            kept[parent[each]] += kept[each]
            allocated[parent[each]] += allocated[each]
    return LayerMemory(allocated, kept, _peaks(a, layers, thread, ts, change))


def _sums(node: NDArray[np.int64], size: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    result = np.zeros(count, dtype=np.int64)
    np.add.at(result, node, size)
    return result


def _peaks(
    a: Analysis,
    layers: LayerTable,
    thread: NDArray[np.int32],
    ts: NDArray[np.int64],
    change: NDArray[np.int64],
) -> NDArray[np.int64] | None:
    """By node, over its calls in the window; ``thread``, ``ts`` and ``change`` of the events, in
    the order of threads and times."""
    cpu = a.trace.cpu
    rows = np.flatnonzero(layers.scopes >= 0)
    if not len(rows) or layers.source == "FSDP":  # its rows are marks, not calls
        return None
    start, dur, own = (cpu[name].gather(rows).to_numpy() for name in ("ts", "dur", "thread"))
    shown = covered_length(start, start + np.maximum(dur, 1), a.spans) > 0
    result = np.zeros(layers.nodes.height, dtype=np.int64)
    level = np.append(np.cumsum(change), 0)
    for number in np.unique(thread).tolist():  # a handful of threads
        begin, end = np.searchsorted(thread, [number, number + 1])
        calls = np.flatnonzero(shown & (own == number))
        first = begin + np.searchsorted(ts[begin:end], start[calls])
        last = begin + np.searchsorted(ts[begin:end], start[calls] + dur[calls], side="right")
        some = last > first
        calls, first, last = calls[some], first[some], last[some]
        if not len(calls):
            continue
        edges = np.stack([first, last], axis=1).ravel()
        most = np.maximum.reduceat(level, edges)[::2]
        rise = most - np.where(first > 0, level[first - 1], 0)
        np.maximum.at(result, layers.scopes[rows[calls]], rise)
    return result


# -- of a snapshot, by the frames of its allocations -----------------------------------------------

MAX_DEPTH = 64
"""Calls of modules inside one another."""


class ModuleCall(NamedTuple):
    """Blocks that were held at the moment, made inside a module's ``forward``. Bytes."""

    file: str
    """Of the module's ``forward``."""
    line: int | None
    """In the file of the ``forward`` around it, which calls it there; ``None``: outermost."""
    parent: int | None
    """Place in the list of the call around it."""
    blocks: int
    size: int
    """With the calls inside."""
    own: int
    """Outside of these."""


def held_by_module(post: PostMortem) -> list[ModuleCall]:
    """A call after the one around it, the largest first among siblings. Modules that are called
    from the same line (blocks in a loop) are one. Empty: no stack contains a ``forward``."""
    history, rows = post.history, post.held_rows
    stack, size = history.lives.stack[rows], history.lives.size[rows]
    nodes: dict[tuple[int, str, int | None], int] = {}
    parent: list[int] = []
    own: list[int] = []
    blocks: list[int] = []
    unique, inverse = np.unique(stack, return_inverse=True)
    sums = np.bincount(inverse, size, minlength=len(unique)).astype(np.int64).tolist()
    counts = np.bincount(inverse, minlength=len(unique)).tolist()
    for number, total, count in zip(unique.tolist(), sums, counts, strict=True):
        frames = history.snapshot.stacks[number] if number >= 0 else ()
        chain = [f for f in reversed(frames) if f.name == "forward" and f.line > 0][:MAX_DEPTH]
        node, around = -1, None
        for frame in chain:
            key = node, frame.file, None if around is None else around.line
            if key not in nodes:
                nodes[key] = len(parent)
                parent.append(node)
                own.append(0)
                blocks.append(0)
            node, around = nodes[key], frame
            blocks[node] += count
        if chain:
            own[node] += total
    whole = own.copy()
    for each in reversed(range(len(parent))):  # the call around it has the smaller number
        if parent[each] >= 0:
            whole[parent[each]] += whole[each]
    below: dict[int, list[int]] = {}
    for each, up in enumerate(parent):
        below.setdefault(up, []).append(each)
    keys = list(nodes)
    result: list[ModuleCall] = []
    left: list[tuple[int, int | None]] = [
        (each, None) for each in _smallest_first(below, -1, whole)
    ]
    while left:
        each, place = left.pop()
        _, file, line = keys[each]
        result.append(ModuleCall(file, line, place, blocks[each], whole[each], own[each]))
        left += [(child, len(result) - 1) for child in _smallest_first(below, each, whole)]
    return result


def _smallest_first(below: dict[int, list[int]], node: int, size: list[int]) -> list[int]:
    return sorted(below.get(node, []), key=lambda each: size[each])
