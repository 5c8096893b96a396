"""Replay of a graph: one pass of maxima, in Python over lists.

It is a loop, not an operation on columns, because each node needs the replayed times of earlier
nodes. On lists it costs about 0.2 µs per node."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from advisor.core.intervals import Array
from advisor.replay.graph import MAX_BATCH_RATIO, NEVER, EdgeKind, Graph, NodeKind

MIN_STEADY = 3
"""Minimum number of steps of a window that is replayed again from its final state."""
_MAX_PASSES = 6
MAX_STEADY_CHANGE = 0.003
"""Maximum change of the period between passes, as a share, at which it is steady."""


@dataclass(frozen=True)
class ReplayedSteps:
    """Replayed times of all nodes (ends for device nodes) and of the steps, ns."""

    time: Array
    step_ends: Array
    """Completion times of the steps, including device work; the first is the window's start."""
    cycle_steps: int = 1
    """Number of steps after which the loop repeats itself, if every n-th step is long."""

    @property
    def period(self) -> float:
        """Steady-state time of one step, ns: mean distance between completions, without the first
        step (or cycle) if there are enough."""
        enough = len(self.step_ends) > 3 and len(self.step_ends) > 2 * self.cycle_steps
        skip = self.cycle_steps if enough else 0
        return float(self.step_ends[-1] - self.step_ends[skip]) / (len(self.step_ends) - 1 - skip)


class ReplayPlan:
    """Layout of a graph for replaying: two edges per node in columns, and the few further edges
    separately."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        crowded = graph.edge == EdgeKind.CONTENTION
        order = np.lexsort((crowded, graph.dst))
        dst = graph.dst[order]
        first = np.searchsorted(dst, np.arange(len(graph)))
        self._slot = np.empty(len(order), dtype=np.int64)
        self._slot[order] = np.arange(len(order)) - first[dst]
        self._slot[crowded] += 2  # separately, and after the others
        self._further_edges = order[self._slot[order] >= 2]

    @cached_property
    def _carried_state(self) -> CarriedState:
        return CarriedState(self.graph)

    def run(self, weight: Array | None = None, dur: Array | None = None) -> Array:
        """Replay once and return each node's time, with other weights or durations if given."""
        return replay_layout(self.lay_out(weight, dur))

    def steady_step(self, weight: Array | None = None, dur: Array | None = None) -> float:
        """Return the steady-state time of one step, ns.

        The window begins with the measured distance of the host ahead of the device, which an edit
        changes. So it is replayed again from its final state, until its duration no longer changes.
        Windows of fewer than three steps are too short for this."""
        steps = len(self.graph.step_boundaries) - 1
        layout = self.lay_out(weight, dur)
        time = replay_layout(layout)
        complete = completion_times(self.graph, time)
        if steps < MIN_STEADY or self.graph.step_boundaries[-1] == 0:
            return ReplayedSteps(time, complete, self.graph.cycle_steps).period
        weights = self.graph.weight if weight is None else weight

        def measure_end() -> tuple[float, float]:
            return float(completion_times(self.graph, time)[-1]), float(
                time[self.graph.step_boundaries[-1]]
            )

        def replay_again(idle: bool) -> tuple[float, float]:
            nonlocal time
            host = float(time[self.graph.step_boundaries[-1]])
            state = self._carried_state.next_state(time, host, weights, idle=idle)
            time = replay_layout(layout.starting_from([state]))
            return measure_end()

        return steady_period(steps, measure_end(), replay_again)

    def lay_out(self, weight: Array | None, dur: Array | None) -> GraphArrays:
        """Return the lists for :func:`replay_layout`, with other weights or durations if given."""
        g = self.graph
        weight = g.weight if weight is None else weight
        dur = g.dur if dur is None else dur
        weight = np.where(g.from_start, weight - dur[g.src], weight)
        sources: list[list[int]] = []
        values: list[list[float]] = []
        for slot in (0, 1):
            edges = np.flatnonzero(self._slot == slot)
            source = np.zeros(len(g), dtype=np.int64)
            value = np.full(len(g), NEVER)
            source[g.dst[edges]] = g.src[edges]
            value[g.dst[edges]] = weight[edges]
            sources.append(source.tolist())
            values.append(value.tolist())
        further: dict[int, list[tuple[int, float, bool]]] = {}
        for node, source_, value_, crowded in zip(
            g.dst[self._further_edges].tolist(),
            g.src[self._further_edges].tolist(),
            weight[self._further_edges].tolist(),
            (g.edge[self._further_edges] == EdgeKind.CONTENTION).tolist(),
            strict=True,
        ):
            further.setdefault(node, []).append((source_, value_, crowded))
        return GraphArrays(sources[0], values[0], sources[1], values[1], dur.tolist(), further)


class CarriedClocks(NamedTuple):
    """State that a replayed window takes over from the previous window."""

    fixed_times: dict[int, float]
    """Times of nodes that are known, ns from the window's start."""
    earliest_starts: dict[int, float]
    """Earliest starts of nodes, ns; they replace edges measured from the window's start."""
    source: int = 0
    """Node at the window's start."""


class GraphArrays(NamedTuple):
    """Two edges per node (source, weight) in columns, durations, and further edges: source, weight,
    and whether the edge applies only while the source runs (contention, which comes last)."""

    first: list[int]
    first_weight: list[float]
    second: list[int]
    second_weight: list[float]
    dur: list[float]
    further_edges: dict[int, list[tuple[int, float, bool]]]

    def starting_from(self, states: Iterable[CarriedClocks]) -> GraphArrays:
        """Return the layout with windows that begin in other states."""
        first, first_weight, second_weight = (
            list(self.first),
            list(self.first_weight),
            list(self.second_weight),
        )
        second, dur, further = self.second, list(self.dur), dict(self.further_edges)
        for fixed_times, earliest_starts, source in states:
            for node, start in fixed_times.items():
                first[node], first_weight[node] = source, start
                second_weight[node], dur[node] = NEVER, 0.0
                further.pop(node, None)
            for node, start in earliest_starts.items():
                first_weight[node] = NEVER if first[node] == source else first_weight[node]
                second_weight[node] = NEVER if second[node] == source else second_weight[node]
                others = [edge for edge in further.get(node, []) if edge[0] != source]
                further[node] = [(source, start, False), *others]
        return GraphArrays(first, first_weight, second, second_weight, dur, further)


def steady_period(
    steps: int, ended: tuple[float, float], replay_again: Callable[[bool], tuple[float, float]]
) -> float:
    """Return the time of one step, ns, once repeated replays of a window take equally long.

    ``ended``: when all was complete and when the host finished the last step, ns from the window's
    start. ``replay_again(idle)`` replays from this state, with an idle device if ``idle``, and
    returns the same two times."""
    end, host = ended
    period, ahead = np.inf, end - host
    for index in range(_MAX_PASSES):
        # the host keeps falling behind: begin with an idle device and see how far ahead it gets
        idle = index == _MAX_PASSES // 2
        last_end, last_host, last_period, last_ahead = end, host, period, ahead
        end, host = replay_again(idle)
        period = (last_host + end - last_end) / steps
        ahead = end - host
        is_falling = last_ahead - ahead > MAX_STEADY_CHANGE * steps * period and ahead > 0
        if not is_falling and not idle and abs(period - last_period) <= MAX_STEADY_CHANGE * period:
            break
    return period


def replay_layout(layout: GraphArrays) -> Array:
    """Replay a layout in one pass and return the time of each node, ns."""
    first, first_weight, second, second_weight, dur, further = layout
    time = [0.0] * len(first)
    for node, (a, wa, b, wb, d) in enumerate(
        zip(first, first_weight, second, second_weight, dur, strict=True)
    ):
        latest = time[a] + wa
        other = time[b] + wb
        if other > latest:
            latest = other
        if node in further:
            for c, wc, crowded in further[node]:
                other = time[c] + wc
                # ready work waits for a kernel that fills the device at this time
                if other > latest and (not crowded or time[c] - dur[c] < latest):
                    latest = other
        time[node] = latest + d if latest > 0.0 else d
    return np.array(time)


class CarriedState:
    """Converter of the state at the end of a window into the state at its start: the last launches
    replace the launches before the window."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        device = graph.device
        before_window = np.zeros(len(graph), dtype=bool)
        before_window[graph.launched_before_window] = True
        self.launched_before_window: list[int] = []
        self.stands_for: list[int] = []
        self.first: list[int] = []
        self.final: list[int] = []
        for lane in np.setdiff1d(graph.lane[device], graph.background_lanes):
            nodes = device[graph.lane[device] == lane]
            before, inside = nodes[before_window[nodes]], nodes[~before_window[nodes]]
            if not len(inside):
                continue
            index = len(inside) - len(before) + np.arange(len(before))
            self.launched_before_window += before.tolist()
            self.stands_for += np.where(index >= 0, inside[np.maximum(index, 0)], -1).tolist()
            self.first.append(int(inside[0]))
            self.final.append(int(inside[-1]))
        self._measure_loader()
        self._find_crossing_edges()

    def _find_crossing_edges(self) -> None:
        """Find the edges from the first step into the second, and the nodes that they would join if
        the last step came before the first: nodes at the same position of their thread or
        stream."""
        graph = self.graph
        step = graph.steps_of_launch()
        crossing = np.isin(graph.edge, [EdgeKind.CROSS_STREAM, EdgeKind.SYNC, EdgeKind.HANDOFF])
        crossing &= (step[graph.src] == 0) & (step[graph.dst] == 1)
        self.between = np.flatnonzero(crossing)
        key = len(NodeKind) * graph.lane.astype(np.int64) + graph.kind
        steps = len(graph.step_boundaries) - 1
        members = {
            (int(k), s): np.flatnonzero((key == k) & (step == s))
            for k in np.unique(key[np.append(graph.src[self.between], graph.dst[self.between])])
            for s in {0, 1, steps - 1}
        }
        self.into: list[int] = []
        self.out_of: dict[int, int] = {}
        for edge in self.between.tolist():
            target = int(graph.dst[edge])
            targets, first = members[int(key[target]), 1], members[int(key[target]), 0]
            is_same_count = len(targets) == len(first)
            self.into.append(int(first[np.searchsorted(targets, target)]) if is_same_count else -1)
        for k in {int(key[n]) for n in graph.src[self.between]}:
            first_members, last = members[k, 0], members[k, steps - 1]
            if len(first_members) == len(last):
                self.out_of |= dict(zip(first_members.tolist(), last.tolist(), strict=True))

    def _measure_loader(self) -> None:
        """Measure the time from the window's last awaited batch to the next window's first, ns. The
        steps between them take at most ``MAX_BATCH_RATIO`` times as long as others with an awaited
        batch: in longer ones the workers rested."""
        graph = self.graph
        self.loader = np.flatnonzero(graph.edge == EdgeKind.LOADER)
        if not len(self.loader):
            return
        awaited = graph.dst[self.loader[[0, -1]]]
        first, last = graph.time[awaited]
        self.batch_gap = float(first + graph.time[graph.step_boundaries[-1]] - last)
        steps = int(np.diff(np.searchsorted(graph.step_boundaries, awaited, side="right"))[0])
        across = len(graph.step_boundaries) - 1 - steps
        rate = graph.weight[self.loader[1:]]
        if steps and across > 1 and rate.min() > NEVER:
            usual = across * float(rate.sum()) / steps
            if self.batch_gap > MAX_BATCH_RATIO * usual:
                self.batch_gap = usual

    def _next_batch_gap(self, weight: Array) -> float:
        """Return the gap between batches at the rate of other weights, ns."""
        rate, before = weight[self.loader], self.graph.weight[self.loader]
        if rate.min() <= NEVER:
            return NEVER
        if before.min() <= NEVER:
            return float(rate[-1])
        return self.batch_gap * float(rate.sum()) / max(float(before.sum()), 1.0)

    def next_state(self, time: Array, host: float, weight: Array, *, idle: bool) -> CarriedClocks:
        """Return the state after a replay in which the host finished the last step at ``host``:
        times of nodes launched before the window, and earliest starts. ``idle``: assume an idle
        device."""
        fixed_times = dict.fromkeys(self.launched_before_window, 0.0)
        earliest_starts: dict[int, float] = {}
        if not idle:
            for node, other in zip(self.launched_before_window, self.stands_for, strict=True):
                fixed_times[node] = float(time[other]) - host if other >= 0 else 0.0
            for node, other in zip(self.first, self.final, strict=True):
                earliest_starts[node] = float(time[other]) - host
            for edge, node in zip(self.between.tolist(), self.into, strict=True):
                other = self.out_of.get(int(self.graph.src[edge]), -1)
                if node >= 0 and other >= 0 and weight[edge] > NEVER and node not in fixed_times:
                    start = float(time[other]) - host + float(weight[edge])
                    earliest_starts[node] = max(earliest_starts.get(node, 0.0), start)
        if len(self.loader):
            first, last = int(self.graph.dst[self.loader[0]]), int(self.graph.dst[self.loader[-1]])
            after = self._next_batch_gap(weight)
            if after > NEVER:
                earliest_starts[first] = float(time[last]) - host + after
        return CarriedClocks(fixed_times, earliest_starts)


def completion_times(graph: Graph, time: Array) -> Array:
    """Return when each step was complete on the host and, if later, on the device, ns."""
    host = time[graph.step_boundaries].astype(float)
    done = host.copy()
    for step, nodes in enumerate(graph.last_nodes):
        if len(nodes):
            done[step + 1] = max(done[step + 1], float(time[nodes].max()))
    # work from before the window ends when the first step begins, or later
    return np.maximum.accumulate(done)
