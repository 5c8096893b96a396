"""Operations of edits: what each of them removes from the graph."""

from collections.abc import Callable, Sequence

import numpy as np
import polars as pl

from advisor.core.finding import Edit, Operation, Select
from advisor.replay.edited_graph import GraphEdits
from advisor.replay.graph import NEVER, EdgeKind, NodeKind
from advisor.replay.selection import Selection, collectives_on_host, host_of_layer

GRAPH_LAUNCH_NS = 1_000.0
"""Approximate host time of a kernel inside a CUDA graph (NVIDIA, "Constant time launch", 2024: a
graph's launch costs a few µs plus well under 1 µs per node)."""
ROOFLINE_SHARE = 0.75
"""Share of the attainable rate that good kernels reach (TraceLens: 75% is the low target)."""


def collect(selected: Selection, edits: Sequence[Edit], assumption: str = "") -> GraphEdits:
    """Collect what edits remove together, counting each edit once. ``assumption``: see
    :class:`GraphEdits`."""
    result = GraphEdits(selected, assumption)
    # merging depends on the remaining waits
    for edit in sorted(dict.fromkeys(edits), key=lambda edit: edit.op == "merge"):
        factor = edit.factor
        if assumption == "low" and edit.worst_factor is not None:
            factor = edit.worst_factor
        if assumption == "high" and edit.best_factor is not None:
            factor = edit.best_factor
        OPERATIONS[edit.op](result, edit, factor)
    return result


def of_device(edits: GraphEdits, select: Select) -> bool:
    """Return False for collectives that run on the host because there is no device, else True."""
    return collectives_on_host(edits.a, select) is None


def remove(edits: GraphEdits, edit: Edit, factor: float | None) -> None:
    if not of_device(edits, edit.select):
        edits.shrink_host(edits.selected.host_time(edit.select), 0.0)
    elif edit.select.on == "gpu":
        edits.dropped[edits.selected.device_work(edit.select)] = True
        if (host := host_of_layer(edit.select)) is not None:
            edits.shrink_host(edits.selected.host_time(host), 0.0)
    else:
        edits.shrink_host(edits.selected.host_time(edit.select), 0.0)
        if edit.select.on == "host":
            edits.unblocked[edits.selected.wait_ends(edit.select)] = True


def scale(edits: GraphEdits, edit: Edit, factor: float | None) -> None:
    factor = 1.0 if factor is None else factor
    if not of_device(edits, edit.select):
        edits.shrink_host(edits.selected.host_time(edit.select), factor)
    elif edit.select.on == "gpu":
        edits.kept_share[edits.selected.device_work(edit.select)] *= factor
        if (host := host_of_layer(edit.select)) is not None:
            edits.shrink_host(edits.selected.host_time(host), factor)
    else:
        edits.shrink_host(edits.selected.host_time(edit.select), factor)


def roofline(edits: GraphEdits, edit: Edit, factor: float | None) -> None:
    """Speed up kernels below ``factor`` of their attainable rate until they reach it."""
    nodes = edits.selected.device_work(edit.select)
    target = edits.selected.roofline_ns[nodes] / (
        ROOFLINE_SHARE if factor is None else max(factor, 1e-3)
    )
    edits.max_dur[nodes] = np.fmin(edits.max_dur[nodes], target)


def resize(edits: GraphEdits, edit: Edit, factor: float | None) -> None:
    """Change the batch size. Work that fills the device grows with it. Work that leaves part of it
    empty grows once the device is full, or once its FLOPs and bytes take as long. Copies grow, and
    so does the loader's host time. Collectives of gradients, the optimizer and other host time
    stay. Judge the step by time per sample."""
    factor = 1.0 if factor is None else max(factor, 1e-3)
    nodes = edits.selected.device_work(edit.select)
    fill = np.nan_to_num(edits.selected.waves[nodes], nan=1.0)
    grown = np.maximum(1.0, fill * factor) / np.maximum(1.0, fill)
    kinds = edits.a.trace.gpu["kind"].gather(pl.Series(edits.graph.row[nodes]))
    grown = np.where((kinds == "kernel").to_numpy(), grown, factor)
    min_ns = edits.selected.roofline_ns[nodes] * factor / ROOFLINE_SHARE
    grown = np.fmax(grown, np.where(factor > 1, min_ns / np.maximum(edits.dur[nodes], 1.0), 0.0))
    grown = np.where(edits.selected.batch_independent[nodes], 1.0, grown)
    edits.kept_share[nodes] *= grown
    edits.max_dur[nodes] *= grown
    edits.batch *= factor


def remove_skew(edits: GraphEdits, edit: Edit, factor: float | None) -> None:
    """Let a rank keep no other rank waiting, which only the replay of all ranks shows. In the
    replay of one rank ``factor`` of the collectives' time remains, if given."""
    if factor is not None:
        edits.kept_share[edits.selected.device_work(edit.select)] *= factor


def overlap(edits: GraphEdits, edit: Edit, factor: float | None) -> None:
    """Move the work to a separate stream: see ``overlap.py``. Collectives on the host hide behind
    the steps' other work, if there is enough and cores are free for both; under the pessimistic
    assumption they do not hide at all."""
    if not of_device(edits, edit.select):
        hidden = edits.selected.hidden_on_host(edit.select)
        share = {"low": 0.0, "high": 1.0}.get(edits.assumption, 0.5) if edit.ahead else 1.0
        edits.shrink_host(edits.selected.host_time(edit.select), 1.0 - share * hidden)
        return
    nodes = edits.selected.device_work(edit.select)
    edits.moved[nodes] = True
    if edit.ahead and edits.assumption != "low":
        edits.issued_earlier[nodes] = True


def make_async(edits: GraphEdits, edit: Edit, factor: float | None) -> None:
    """Make blocking calls stop waiting: each then costs as much as a call that does not block."""
    edits.unblocked[edits.selected.wait_ends(edit.select)] = True


def merge(edits: GraphEdits, edit: Edit, factor: float | None) -> None:
    """Merge neighbours on a stream into one kernel that takes ``factor`` of their time. The
    launches and operators of all kernels but the first are removed. Kernels are not merged across a
    step's end or work that the host or another stream waits for: the next kernel may depend on
    it."""
    if not of_device(edits, edit.select):
        edits.shrink_host(edits.selected.host_time(edit.select), 1.0 if factor is None else factor)
        return
    graph = edits.graph
    chosen = np.zeros(len(graph), dtype=bool)
    chosen[edits.selected.device_work(edit.select)] = True
    device = graph.device
    order = device[np.argsort(graph.lane[device], kind="stable")]
    is_chosen = chosen[order]
    awaited = np.zeros(len(graph), dtype=bool)
    outward = np.isin(graph.edge, [EdgeKind.SYNC, EdgeKind.CROSS_STREAM]) & (graph.weight > NEVER)
    awaited[graph.src[outward & ~edits.unblocked[graph.dst]]] = True
    step = graph.steps_of_launch()[order]
    joined = is_chosen[1:] & is_chosen[:-1] & ~awaited[order][:-1] & (step[1:] == step[:-1])
    joined &= graph.lane[order][1:] == graph.lane[order][:-1]
    edits.merged[order[1:][joined]] = True
    edits.kept_share[chosen] *= 1.0 if factor is None else factor


def drop_launch(edits: GraphEdits, edit: Edit, factor: float | None) -> None:
    """Remove host time around launches, except the cost of a CUDA graph's node."""
    cost = GRAPH_LAUNCH_NS if edit.host_ns is None else float(edit.host_ns)
    if edit.select.on != "gpu":
        edits.capture(edits.selected.host_time(edit.select), cost)
    else:
        nodes = edits.selected.device_work(edit.select)
        edits.capture(edits.selected.launch_time(nodes), cost)


def parallelize(edits: GraphEdits, edit: Edit, factor: float | None) -> None:
    """Move loader work to worker processes: see ``edited_graph.py``."""
    loaded = np.flatnonzero(edits.graph.kind == NodeKind.LOADER_END)
    chosen = edits.selected.host_mask(edit.select)[edits.graph.row[loaded]]
    edits.workers.append((max(1, edit.workers or 1), loaded[chosen]))


OPERATIONS: dict[Operation, Callable[[GraphEdits, Edit, float | None], None]] = {
    "remove": remove, "scale": scale, "roofline": roofline, "resize": resize, "overlap": overlap,
    "make_async": make_async, "merge": merge, "drop_launch": drop_launch,
    "parallelize": parallelize, "remove_skew": remove_skew,
}  # fmt: skip
