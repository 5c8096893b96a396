"""Work that moves to a stream of its own, beside what it was in the way of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from advisor.replay.graph import NEVER, Array, Edge, Graph, Node

if TYPE_CHECKING:
    from advisor.core.finding import Edit
    from advisor.replay.patch import Patch


def overlap(patch: Patch, edit: Edit, factor: float | None) -> None:
    """The work moves to a stream of its own: what comes after it, on the device or the host,
    no longer waits for it, except for the same work of the step before. Only a wait of the
    host for the whole device still does, unless the work is issued earlier too."""
    moved = np.zeros(len(patch.graph), dtype=bool)
    moved[patch.selected.work(edit.select)] = True
    patch.moved.append((moved, bool(edit.ahead and patch.assumption != "low")))


def give_streams(patch: Patch) -> None:
    """Give the work of all ``overlap`` edits its streams: at once, for what stays must not wait
    for what another of them has moved."""
    if not patch.moved:
        return
    graph = patch.graph
    group = np.zeros(len(graph), dtype=np.int64)
    for number, (moved, _) in enumerate(patch.moved, start=1):
        group[moved & (group == 0)] = number
    device = graph.device
    order = device[np.argsort(graph.lane[device], kind="stable")]
    position = np.arange(len(order))
    place = np.full(len(graph), -1)
    place[order] = position
    same_lane = np.zeros(len(order), dtype=bool)
    same_lane[1:] = graph.lane[order][1:] == graph.lane[order][:-1]
    lane_start = np.maximum.accumulate(np.where(same_lane, 0, position))

    def latest(number: int) -> Array:
        """For each node the last of a group at or before it on its stream, -1: none."""
        last = np.maximum.accumulate(np.where(group[order] == number, position, -1))
        last = np.where(last >= lane_start, last, -1)
        result = np.full(len(graph), -1)
        result[order] = np.where(last >= 0, order[np.maximum(last, 0)], -1)
        return result

    stream = np.flatnonzero(graph.edge == Edge.STREAM)
    before, after = graph.src[stream], graph.dst[stream]
    crossing = np.isin(graph.edge, [Edge.CROSS, Edge.CONTENTION, Edge.RELEASE])
    stays = latest(0)
    leaves = stream[(group[before] > 0) & (group[after] == 0)]
    left, next_ = graph.src[leaves], graph.dst[leaves]
    patch.redirect(leaves, stays[left])
    syncs = _device_syncs(patch)
    for number, (_, ahead) in enumerate(patch.moved, start=1):
        own_part = np.flatnonzero(group == number)
        moves, earlier = latest(number), _a_step_earlier(graph, own_part)
        enters = stream[(group[after] == number) & (group[before] != number)]
        patch.redirect(enters, moves[graph.src[enters]])
        # what stays waits for the same work of the step before
        last = moves[left]
        since = np.where(stays[left] >= 0, place[np.maximum(stays[left], 0)], -1)
        between = (last >= 0) & (place[np.maximum(last, 0)] > since)
        source = np.where(between, earlier[np.maximum(last, 0)], -1)
        patch.added.append((source[source >= 0], next_[source >= 0]))
        whole = np.zeros(len(graph), dtype=bool)
        if not ahead:
            whole[syncs] = True
        freed = crossing & (group[patch.src] == number) & (group[graph.dst] == 0)
        edges = np.flatnonzero(freed & ~whole[graph.dst])
        patch.redirect(edges, earlier[patch.src[edges]])
        _await_moved(patch, own_part, np.flatnonzero(whole))
    crowded = (graph.edge == Edge.CONTENTION) & (group[patch.src] == 0) & (group[graph.dst] > 0)
    patch.weight[crowded] = NEVER
    own = graph.lane + (int(graph.lane.max()) + 1) * group
    patch.lane = np.where(group > 0, own, graph.lane)


def _device_syncs(patch: Patch) -> Array:
    """Ends of the calls that wait for the whole device."""
    done = np.flatnonzero(patch.graph.kind == Node.RELEASED)
    call = patch.a.trace.cpu["call"].gather(pl.Series(patch.graph.row[done]))
    result: Array = done[(call == "sync_device").fill_null(False).to_numpy()]
    return result


def _await_moved(patch: Patch, moved: Array, syncs: Array) -> None:
    """Calls that wait for the whole device wait for the last moved work launched before."""
    graph = patch.graph
    launch = np.flatnonzero((graph.edge == Edge.LAUNCH) & np.isin(graph.dst, moved))
    if not len(syncs) or not len(launch):
        return
    launch = launch[np.argsort(graph.src[launch], kind="stable")]
    waits = np.flatnonzero(graph.kind == Node.WAIT)
    begin = dict(zip(graph.row[waits].tolist(), waits.tolist(), strict=True))
    called = np.array([begin.get(int(r), 0) for r in graph.row[syncs]])
    place = np.searchsorted(graph.src[launch], called) - 1
    known = place >= 0
    source, target = graph.dst[launch[place[known]]], syncs[known]
    forward = source < target
    patch.added.append((source[forward], target[forward]))


def _a_step_earlier(graph: Graph, nodes: Array) -> Array:
    """For each graph node among ``nodes``: the one at the same place one step before, -1."""
    result = np.full(len(graph), -1)
    step = graph.steps_of_launch()[nodes]
    for number in np.unique(step[step > 0]).tolist():
        now, before = nodes[step == number], nodes[step == number - 1]
        if len(now) == len(before):
            result[now] = before
    return result
