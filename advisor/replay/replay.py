"""Replay of a graph: one pass of maxima, in plain Python over lists.

A loop and not whole columns, because each node needs the replayed times of those before it; on
lists it costs about 0.2 µs a node."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from advisor.replay.graph import NEVER, Array, EdgeKind, Graph, NodeKind

MIN_STEADY = 3
"""Minimum number of steps of a window that is replayed from the state in which it ended."""
MAX_PASSES = 6
STEADY = 0.003
"""Change of the period between passes, as a share, below which it is steady."""


@dataclass(frozen=True)
class ReplayedSteps:
    """Replayed times of all nodes (ends for device nodes) and of the steps, ns."""

    time: Array
    step_ends: Array
    """Completion times of the steps, device work included; the first is the window's start."""
    cycle_steps: int = 1
    """Number of steps after which the loop repeats itself, where every n-th one is long."""

    @property
    def period(self) -> float:
        """Steady-state time of one step, ns: mean distance between completions, without the first
        step (or cycle) where there are enough."""
        enough = len(self.step_ends) > 3 and len(self.step_ends) > 2 * self.cycle_steps
        skip = self.cycle_steps if enough else 0
        return float(self.step_ends[-1] - self.step_ends[skip]) / (len(self.step_ends) - 1 - skip)


class ReplayPlan:
    """A graph laid out for replaying: two edges a node in columns, the few others aside."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        crowded = graph.edge == EdgeKind.CONTENTION
        order = np.lexsort((crowded, graph.dst))
        dst = graph.dst[order]
        first = np.searchsorted(dst, np.arange(len(graph)))
        self._slot = np.empty(len(order), dtype=np.int64)
        self._slot[order] = np.arange(len(order)) - first[dst]
        self._slot[crowded] += 2  # aside, and after the others
        self._more = order[self._slot[order] >= 2]

    @cached_property
    def _carry(self) -> CarriedState:
        return CarriedState(self.graph)

    def run(self, weight: Array | None = None, dur: Array | None = None) -> Array:
        """Replay once and return each node's time, with other weights or durations if given."""
        return replay_layout(self.lay_out(weight, dur))

    def steady_step(self, weight: Array | None = None, dur: Array | None = None) -> float:
        """Return the steady-state time of one step, ns.

        The window begins with the host as far ahead of the device as it was when measured, which an
        edit changes. So it is replayed again from the state in which it ended, until the time it
        takes no longer changes. Windows of fewer than three steps are too short for that."""
        steps = len(self.graph.step_boundaries) - 1
        layout = self.lay_out(weight, dur)
        time = replay_layout(layout)
        complete = completion_times(self.graph, time)
        if steps < MIN_STEADY or self.graph.step_boundaries[-1] == 0:
            return ReplayedSteps(time, complete, self.graph.cycle_steps).period
        weights = self.graph.weight if weight is None else weight

        def ended() -> tuple[float, float]:
            return float(completion_times(self.graph, time)[-1]), float(
                time[self.graph.step_boundaries[-1]]
            )

        def again(idle: bool) -> tuple[float, float]:
            nonlocal time
            host = float(time[self.graph.step_boundaries[-1]])
            state = self._carry.next_state(time, host, weights, idle=idle)
            time = replay_layout(layout.starting_from([state]))
            return ended()

        return steady_period(steps, ended(), again)

    def lay_out(self, weight: Array | None, dur: Array | None) -> GraphArrays:
        """Return the lists that :func:`replay_layout` goes through, with other numbers if given."""
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
        more: dict[int, list[tuple[int, float, bool]]] = {}
        for node, source_, value_, crowded in zip(
            g.dst[self._more].tolist(),
            g.src[self._more].tolist(),
            weight[self._more].tolist(),
            (g.edge[self._more] == EdgeKind.CONTENTION).tolist(),
            strict=True,
        ):
            more.setdefault(node, []).append((source_, value_, crowded))
        return GraphArrays(sources[0], values[0], sources[1], values[1], dur.tolist(), more)


class CarriedClocks(NamedTuple):
    """State that a replayed window takes over from the one before."""

    fixed_times: dict[int, float]
    """Times of nodes that are known, ns from the window's start."""
    earliest_starts: dict[int, float]
    """Earliest starts of nodes, ns; they replace what was measured from the start."""
    source: int = 0
    """Node that stands for the window's start."""


class GraphArrays(NamedTuple):
    """Two edges a node (source, weight) in columns, durations, and the further edges: source,
    weight, and whether it holds only while the source runs (contention; last of all)."""

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
        second, dur, more = self.second, list(self.dur), dict(self.further_edges)
        for fixed_times, earliest_starts, source in states:
            for node, at in fixed_times.items():
                first[node], first_weight[node] = source, at
                second_weight[node], dur[node] = NEVER, 0.0
                more.pop(node, None)
            for node, at in earliest_starts.items():
                first_weight[node] = NEVER if first[node] == source else first_weight[node]
                second_weight[node] = NEVER if second[node] == source else second_weight[node]
                others = [edge for edge in more.get(node, []) if edge[0] != source]
                more[node] = [(source, at, False), *others]
        return GraphArrays(first, first_weight, second, second_weight, dur, more)


def steady_period(
    steps: int, ended: tuple[float, float], replay_again: Callable[[bool], tuple[float, float]]
) -> float:
    """Return the time of one step once repeated replays of a window take equally long, ns.

    ``ended``: when all was complete and when the host was done with the last step, ns from the
    window's start. ``replay_again(idle)`` replays from the state of that moment, as if the device
    had nothing left to do if ``idle``, and returns the same of its end."""
    end, host = ended
    period, ahead = np.inf, end - host
    for number in range(MAX_PASSES):
        # falling behind for long: begin with an idle device and see how far ahead it gets
        idle = number == MAX_PASSES // 2
        last_end, last_host, last_period, last_ahead = end, host, period, ahead
        end, host = replay_again(idle)
        period = (last_host + end - last_end) / steps
        ahead = end - host
        falling = last_ahead - ahead > STEADY * steps * period and ahead > 0
        if not falling and not idle and abs(period - last_period) <= STEADY * period:
            break
    return period


def replay_layout(layout: GraphArrays) -> Array:
    """Replay a layout in one pass and return the time of each node, ns."""
    first, first_weight, second, second_weight, dur, more = layout
    time = [0.0] * len(first)
    for node, (a, wa, b, wb, d) in enumerate(
        zip(first, first_weight, second, second_weight, dur, strict=True)
    ):
        at = time[a] + wa
        other = time[b] + wb
        if other > at:
            at = other
        if node in more:
            for c, wc, crowded in more[node]:
                other = time[c] + wc
                # work that is ready waits for a kernel that fills the device if that runs then
                if other > at and (not crowded or time[c] - dur[c] < at):
                    at = other
        time[node] = at + d if at > 0.0 else d
    return np.array(time)


class CarriedState:
    """Converter of the state at the end of a window into that at its start: the last launches stand
    for those before the window."""

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
            own = device[graph.lane[device] == lane]
            before, inside = own[before_window[own]], own[~before_window[own]]
            if not len(inside):
                continue
            place = len(inside) - len(before) + np.arange(len(before))
            self.launched_before_window += before.tolist()
            self.stands_for += np.where(place >= 0, inside[np.maximum(place, 0)], -1).tolist()
            self.first.append(int(inside[0]))
            self.final.append(int(inside[-1]))
        self._measure_loader()
        self._find_crossing_edges()

    def _find_crossing_edges(self) -> None:
        """Find the edges from the first step into the second, and the nodes that they would join if
        the last step came before the first: those at the same place of their thread or stream."""
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
            now, first = members[int(key[target]), 1], members[int(key[target]), 0]
            same = len(now) == len(first)
            self.into.append(int(first[np.searchsorted(now, target)]) if same else -1)
        for k in {int(key[n]) for n in graph.src[self.between]}:
            zero, last = members[k, 0], members[k, steps - 1]
            if len(zero) == len(last):
                self.out_of |= dict(zip(zero.tolist(), last.tolist(), strict=True))

    def _measure_loader(self) -> None:
        """Measure the time from the window's last awaited batch to the next window's first, ns."""
        graph = self.graph
        self.loader = np.flatnonzero(graph.edge == EdgeKind.LOADER)
        if len(self.loader):
            first, last = graph.time[graph.dst[self.loader[[0, -1]]]]
            self.batch_gap = float(first + graph.time[graph.step_boundaries[-1]] - last)

    def _next_batch_gap(self, weight: Array) -> float:
        """Return the gap between batches at the rate of other weights, ns."""
        rate, before = weight[self.loader], self.graph.weight[self.loader]
        if rate.min() <= NEVER:
            return NEVER
        if before.min() <= NEVER:
            return float(rate[-1])
        return self.batch_gap * float(rate.sum()) / max(float(before.sum()), 1.0)

    def next_state(self, time: Array, host: float, weight: Array, *, idle: bool) -> CarriedClocks:
        """Return the state after a replay in which the host was done with the last step at
        ``host``: times of nodes launched before the window, and earliest starts. ``idle``: as if
        the device had nothing left to do."""
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
                    begin = float(time[other]) - host + float(weight[edge])
                    earliest_starts[node] = max(earliest_starts.get(node, 0.0), begin)
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
    # work left over from before the window is done when the first step begins or later
    return np.maximum.accumulate(done)
