"""Several ranks replayed at once: a collective begins when the last of them has come to it.

The graphs of the ranks become one. A collective that is on several of them is split: its node
keeps what it took once all were there; a node before it, the arrival, takes over all that it had
to wait for; and a node that all ranks share comes with the last arrival. So what a rank spends
waiting inside a collective is computed from the others' replay, never copied.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from advisor.measure.ranks.join import measure_waits
from advisor.measure.ranks.skew import Alignment, align_ranks
from advisor.replay.device_work import SLACK_NS
from advisor.replay.graph import NEVER, Array, EdgeKind, Graph, NodeKind
from advisor.replay.graph_builder import MAX_NODES, representative_steps
from advisor.replay.replay import (
    MIN_STEADY,
    CarriedState,
    Layout,
    ReplayedSteps,
    ReplayPlan,
    State,
    completion_times,
    replay_layout,
    steady_period,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from advisor.measure import Analysis
    from advisor.replay.edited_graph import EditedGraph

MAX_RANKS = 4
"""Maximum number of ranks replayed together: the analysed one, and those most often last. Waits for
the other ranks stay in the collectives as measured."""
MAX_JOINT_NODES = 2 * MAX_NODES
"""Maximum number of nodes of these ranks together, about."""


class JointRanks(NamedTuple):
    """Ranks that are replayed together, the analysed one first, and the collectives they share."""

    ranks: tuple[int, ...]
    analyses: tuple[Analysis, ...]
    steps: tuple[tuple[int, int], ...]
    """Rows of each rank's steps table, first and one after the last: the same steps for all."""
    shift: tuple[int, ...]
    """Shift of each rank's trace times to one clock, ns."""
    row: Array
    """Row of ``trace.gpu`` by collective (rows) and rank (columns); -1: not on this rank."""


def find_joint_ranks(rank: int, ranks: Mapping[int, Analysis]) -> JointRanks | None:
    """Find the ranks to replay with ``rank``. ``None``: there are no others, they cannot be put on
    one clock, or they do not have the same steps."""
    if len(ranks) < 2 or ranks[rank].steps.used.is_empty() or ranks[rank].device_id is None:
        return None
    alignment = align_ranks(ranks)
    if alignment.joined is None or rank not in alignment.shift_ns:
        return None
    chosen = _latest(rank, alignment)
    a = ranks[rank]
    first, last = representative_steps(a, min(MAX_NODES, MAX_JOINT_NODES // len(chosen)))
    names = a.steps.table["name"][first:last].to_list()
    steps = {number: _same_steps(ranks[number], names) for number in chosen}
    there = [number for number in chosen if steps[number] is not None]
    if len(there) < 2 or rank not in there:
        return None
    numbers = list(alignment.shift_ns)
    row = _rows(alignment)[:, [numbers.index(number) for number in there]]
    row = row[(row >= 0).sum(axis=1) > 1]
    if not len(row):
        return None
    return JointRanks(
        ranks=tuple(there),
        analyses=tuple(ranks[n] for n in there),
        steps=tuple(found for n in there if (found := steps[n]) is not None),
        shift=tuple(alignment.shift_ns[n] for n in there),
        row=row,
    )


def _latest(rank: int, alignment: Alignment) -> list[int]:
    """Return the rank itself, then those that the others wait for longest, at most MAX_RANKS."""
    assert alignment.joined is not None
    found, numbers = measure_waits(alignment.joined), list(alignment.shift_ns)
    late = found.last_rank >= 0
    caused = np.bincount(found.last_rank[late], found.skew[late], len(numbers))
    order = sorted(zip(-caused, numbers, strict=True))
    return [rank, *(n for _, n in order if n != rank)][:MAX_RANKS]


def _rows(alignment: Alignment) -> Array:
    """Return rows of ``trace.gpu`` by matched collective and aligned rank (column); -1: none."""
    joined, cells = alignment.joined, alignment.cells
    assert joined is not None and cells is not None
    result = np.full((joined.rows, len(alignment.shift_ns)), -1, dtype=np.int64)
    own = np.flatnonzero(joined.matched[joined.row])
    result[joined.row[own], joined.rank[own]] = cells["gpu"].to_numpy()[own]
    return result


def _same_steps(a: Analysis, names: list[str]) -> tuple[int, int] | None:
    """Return the rows of the consecutive steps of these names; ``None``: the rank lacks them."""
    own = a.steps.table["name"].to_list()
    if a.trace.main_thread is None or not names or names[0] not in own:
        return None
    first = own.index(names[0])
    return (first, first + len(names)) if own[first : first + len(names)] == names else None


# -- several ranks as one graph --------------------------------------------------------------------


class JointTimes(NamedTuple):
    """Replay of one rank, ns from its window's start."""

    time: Array
    dur: Array
    """Durations; of shared collectives from the rank's own arrival on."""


class JointReplay:
    """The graphs of several ranks, replayed as one."""

    def __init__(self, joint: JointRanks, graphs: Sequence[Graph]) -> None:
        self.graphs = list(graphs)
        begin = [g.origin + s for g, s in zip(graphs, joint.shift, strict=True)]
        self.offset = np.array(begin, dtype=float) - min(begin)
        """Start of each rank's window, ns from the start of the first one."""
        self.shared_nodes = self._shared(joint)
        """Node by shared collective (rows) and rank (columns); -1: not there."""
        self.shared_nodes = self._order()
        self._known: ReplayPlan | None = None

    def _shared(self, joint: JointRanks) -> Array:
        """Return the nodes of collectives that two or more ranks launched in the window."""
        result = np.full(joint.row.shape, -1, dtype=np.int64)
        for column, (graph, a) in enumerate(zip(self.graphs, joint.analyses, strict=True)):
            node = np.full(a.trace.gpu.height + 1, -1, dtype=np.int64)
            node[graph.row[graph.device]] = graph.device
            node[graph.row[graph.launched_before_window]] = -1
            node[-1] = -1
            result[:, column] = node[joint.row[:, column]]
        kept: Array = result[(result >= 0).sum(axis=1) > 1]
        return kept

    @property
    def members(self) -> list[Array]:
        """Nodes of each rank's shared collectives."""
        return [c[c >= 0] for c in self.shared_nodes.T]

    @cached_property
    def transfer(self) -> list[Array]:
        """Durations of each rank's nodes, ns; of shared collectives from the last arrival on."""
        start = np.full(self.shared_nodes.shape, np.nan)
        end = start.copy()
        for column, graph in enumerate(self.graphs):
            there = self.shared_nodes[:, column] >= 0
            nodes = self.shared_nodes[there, column]
            end[there, column] = graph.time[nodes] + self.offset[column]
            start[there, column] = end[there, column] - graph.dur[nodes]
        last = np.nanmax(start, axis=1) if len(start) else np.zeros(0)
        result = []
        for column, graph in enumerate(self.graphs):
            there = self.shared_nodes[:, column] >= 0
            nodes = self.shared_nodes[there, column]
            dur = graph.dur.copy()
            dur[nodes] = np.clip(end[there, column] - last[there], 0.0, graph.dur[nodes])
            result.append(dur)
        return result

    # -- the order of all nodes -------------------------------------------------------------

    def _order(self) -> Array:
        """Give each node a place after all that it may depend on. Collectives that contradict each
        other (then clocks or matches are wrong) are given up; return those that are left."""
        node = self.shared_nodes
        kept = np.ones(len(node), dtype=bool)
        while True:
            stuck = self._try_order(node[kept])
            if stuck is None:
                return node[kept]
            kept[np.flatnonzero(kept)[stuck]] = False

    def _try_order(self, node: Array) -> int | None:
        """Place these collectives and all nodes; return one without a place, or None."""
        stops = [_stops(graph, node[:, r]) for r, graph in enumerate(self.graphs)]
        missing = (node >= 0).sum(axis=1)
        self.arrival_index = [np.zeros(len(g), dtype=np.int64) for g in self.graphs]
        """Place of each node; of a shared collective: of the arrival at it."""
        self.all_arrived = np.full(len(node), -1, dtype=np.int64)
        """Place of the node that comes with the last arrival, by collective; the collective's own
        nodes follow it, in order of the ranks."""
        next_stop, done = [0] * len(stops), [0] * len(stops)
        places = 0
        moved = True
        while moved:  # each round passes a stop of at least one rank
            moved = False
            for rank, own in enumerate(stops):
                upto = done[rank]
                while next_stop[rank] < len(own):
                    cut, arrives, collective = own[next_stop[rank]]
                    if not arrives and self.all_arrived[collective] < 0:
                        upto = max(upto, cut)
                        break
                    next_stop[rank] += 1
                    moved = True
                    if arrives:
                        upto = cut
                        missing[collective] -= 1
                        places = self._assign_indices(rank, done[rank], upto, places)
                        done[rank] = upto
                        if not missing[collective]:
                            self.all_arrived[collective] = places
                            places += 1 + int((node[collective] >= 0).sum())
                else:
                    upto = len(self.graphs[rank])
                places = self._assign_indices(rank, done[rank], upto, places)
                done[rank] = upto
        waiting = [own[n][2] for own, n in zip(stops, next_stop, strict=True) if n < len(own)]
        self.node_count = places
        return waiting[0] if waiting else None

    def _assign_indices(self, rank: int, first: int, last: int, places: int) -> int:
        self.arrival_index[rank][first:last] = places + np.arange(last - first)
        return places + last - first

    @cached_property
    def end_index(self) -> list[Array]:
        """Place of each node of each rank; of a shared collective: of its end."""
        result = []
        count = np.cumsum(self.shared_nodes >= 0, axis=1)
        for rank, slot in enumerate(self.arrival_index):
            there = self.shared_nodes[:, rank] >= 0
            place = slot.copy()
            place[self.shared_nodes[there, rank]] = self.all_arrived[there] + count[there, rank]
            result.append(place)
        return result

    # -- replaying ----------------------------------------------------------------------------

    def run(self, ranks: Sequence[EditedGraph]) -> list[JointTimes]:
        """Replay once, from the state that was measured."""
        return self._split(replay_layout(self._lay_out(ranks)), self.offset)

    def steady_step(self, ranks: Sequence[EditedGraph], member: int = 0) -> float:
        """Return the steady-state time of one step of one rank, ns. See ``ReplayPlan.steady_step``:
        all ranks begin again in the state in which they ended."""
        layout = self._lay_out(ranks)
        offset = self.offset
        done = self._split(replay_layout(layout), offset)
        graph = ranks[member].graph
        steps = len(graph.step_boundaries) - 1
        complete = completion_times(graph, done[member].time)
        if steps < MIN_STEADY or graph.step_boundaries[-1] == 0:
            return ReplayedSteps(done[member].time, complete, graph.cycle_steps).period
        carries = [
            known if p.graph is g else CarriedState(p.graph)
            for p, g, known in zip(ranks, self.graphs, self.carried_states, strict=True)
        ]

        def hosts() -> Array:
            return np.array(
                [d.time[g.step_boundaries[-1]] for d, g in zip(done, self.graphs, strict=True)]
            )

        def ended() -> tuple[float, float]:
            return float(completion_times(graph, done[member].time)[-1]), float(hosts()[member])

        def again(idle: bool) -> tuple[float, float]:
            nonlocal done, offset
            host = hosts()
            states = []
            for rank, (patched, carry) in enumerate(zip(ranks, carries, strict=True)):
                state = carry.next_state(
                    done[rank].time, float(host[rank]), patched.weight, idle=idle
                )
                states.append(self._to_joint_state(rank, state))
            offset = offset + host - (offset + host).min()
            begun = layout.starting_from(states)
            for rank, at in enumerate(offset.tolist()):
                begun.dur[int(self.arrival_index[rank][0])] = at
            done = self._split(replay_layout(begun), offset)
            return ended()

        return steady_period(steps, ended(), again)

    @cached_property
    def carried_states(self) -> list[CarriedState]:
        """Converter of each rank's state at the end of the window to its start."""
        return [CarriedState(g) for g in self.graphs]

    def _to_joint_state(self, rank: int, state: State) -> State:
        slot, place = self.arrival_index[rank], self.end_index[rank]
        return State(
            {int(place[n]): at for n, at in state.fixed_times.items()},
            {int(slot[n]): at for n, at in state.earliest_starts.items()},
            int(slot[0]),
        )

    def _split(self, time: Array, offset: Array) -> list[JointTimes]:
        result = []
        for rank, (slot, place) in enumerate(zip(self.arrival_index, self.end_index, strict=True)):
            result.append(JointTimes(time[place] - offset[rank], time[place] - time[slot]))
        return result

    def _lay_out(self, ranks: Sequence[EditedGraph]) -> Layout:
        """Lay out the edges of all ranks in one list of nodes."""
        columns: list[tuple[Array, ...]] = []
        dur = np.zeros(self.node_count)
        for rank, patched in enumerate(ranks):
            graph, slot, place = patched.graph, self.arrival_index[rank], self.end_index[rank]
            dur[place] = patched.dur
            dur[slot[0]] = self.offset[rank]
            src = np.where(graph.from_start, slot[graph.src], place[graph.src])
            dst = slot[graph.dst]
            # what an edit made to depend on something that is not before it here
            weight = np.where(src < dst, patched.weight, NEVER)
            columns.append((np.minimum(src, dst), dst, weight, graph.edge, graph.from_start))
            columns.append(self._collective_edges(rank, patched))
        src, dst, weight, edge, from_start = (np.concatenate(c) for c in zip(*columns, strict=True))
        usual = all(p.graph is g for p, g in zip(ranks, self.graphs, strict=True))
        if not usual or self._known is None:
            joint = replace(
                self.graphs[0],
                kind=np.full(self.node_count, NodeKind.DEVICE, dtype=np.uint8),
                src=src,
                dst=dst,
                weight=weight,
                edge=edge,
                from_start=from_start,
                dur=dur,
            )
            plan = ReplayPlan(joint)
            self._known = plan if usual else self._known
        else:
            plan = self._known
        return plan.lay_out(weight, dur)

    def _collective_edges(self, rank: int, patched: EditedGraph) -> tuple[Array, ...]:
        """Return the edges of one rank's arrivals at the shared collectives, and of their ends."""
        there = self.shared_nodes[:, rank] >= 0
        node, all_arrived = self.shared_nodes[there, rank], self.all_arrived[there]
        slot, place = self.arrival_index[rank][node], self.end_index[rank][node]
        alone, no_skew = np.isin(node, patched.removed_collectives), np.isin(node, patched.no_skew)
        none = np.zeros(len(node))
        comes = np.where(alone | no_skew, NEVER, none)
        goes = np.where(alone, NEVER, none)
        src, dst = (
            np.concatenate([slot, all_arrived, slot]),
            np.concatenate([all_arrived, place, place]),
        )
        weight = np.concatenate([comes, goes, none])
        kind = np.full(len(src), EdgeKind.COLLECTIVE, dtype=np.uint8)
        return src, dst, weight, kind, np.zeros(len(src), dtype=bool)


def _stops(graph: Graph, node: Array) -> list[tuple[int, bool, int]]:
    """Return where the order of one rank's nodes depends on the others: (nodes before it, is it an
    arrival, collective), in order. A collective must end before the first node that may depend on
    it, which comes at its end or later."""
    collective = np.flatnonzero(node >= 0)
    members = node[collective]
    when = np.maximum.accumulate(graph.time - graph.dur)
    after = np.searchsorted(when, graph.time[members] - SLACK_NS)
    first = np.full(len(graph), len(graph), dtype=np.int64)
    late = ~graph.from_start
    np.minimum.at(first, graph.src[late], graph.dst[late])
    after = np.maximum(np.minimum(after, first[members]), members + 1)
    arrivals = [(int(n) + 1, True, int(m)) for n, m in zip(members, collective, strict=True)]
    ends = [(int(n), False, int(m)) for n, m in zip(after, collective, strict=True)]
    return sorted(arrivals + ends, key=lambda stop: (stop[0], not stop[1]))
