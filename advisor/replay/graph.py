"""Dependency graph of consecutive steps: nodes, edges and their meaning.

A node is a moment: a point on a host thread, or the end of a piece of device work. An edge is a
lower limit: its target comes no earlier than its source plus its weight. Replaying is one pass in
order of time that takes the maximum over the edges into each node."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from advisor.core.intervals import Array, Intervals

if TYPE_CHECKING:
    from advisor.replay.device_work import DeviceWork

NEVER = -1e18
"""Weight of an edge that is switched off, ns."""
MAX_BATCH_RATIO = 2.0
"""Maximum ratio of a batch's time to the usual one at which the loader's workers never rested."""


# -- latencies, measured from the trace ------------------------------------------------------------

LAUNCH_NS, GAP_NS = 2_000.0, 1_500.0
"""Default launch latency and gap between kernels of one stream, ns, if the trace has too few
cases."""
CROSS_STREAM_NS = 2_000.0
CALL_NS = 5_000.0
SYNC_RETURN_NS = 8_000.0
REACH_NS = 15_000
"""Maximum event and scheduling latency of a start after another stream's work, ns."""
_MAX_LATENCY_NS, MAX_STAGING_NS = 50_000, 2_000_000
"""Maximum latencies, ns; measured idle: 1 to 17 µs for kernels, 55 to 260 µs for staged copies."""
BUSY_NS = 2_000
"""Minimum idle time of a device before a launch call for it to count as idle, ns."""
QUEUED_NS = 20_000
"""Minimum time from launch to room on the stream, ns, for work not to have waited for its
launch."""
FEW, ENOUGH = 3, 5
"""Minimum number of cases for a median: of all device work, and of one group or kind."""


@dataclass
class Latencies:
    """Median latencies, ns, with defaults for cases that are too rare in the trace."""

    launch: Array = field(default_factory=lambda: np.zeros(0))
    """Launch latency by group of device work (``DeviceWork.groups``): from the end of the launch
    call to the start on an idle stream. It may be negative."""
    gap: Array = field(default_factory=lambda: np.zeros(0))
    """Gap by group: from the end of one piece of work to the start of the next on its stream, if
    the next had been launched long before."""
    cross_stream: float = CROSS_STREAM_NS
    """Latency from the end of one stream's work to the start of another stream's work that
    waited."""
    sync_call: float = CALL_NS
    """Cost of a call that may block the host but did not."""
    sync_return: float = SYNC_RETURN_NS
    """Latency from the end of the awaited work to the return of the call that waited for it."""


def median_with_default(sample: Array, default: float) -> float:
    """Return the median of a sample, or ``default`` if it has fewer than ``FEW`` values."""
    return float(np.median(sample)) if len(sample) >= FEW else default


def measure_latencies(work: DeviceWork) -> Latencies:
    """Measure start latencies from starts that had nothing else to wait for."""
    before = work.previous
    ended = np.where(before >= 0, (work.ts + work.dur)[before], np.iinfo(np.int64).min // 2)
    has_launch = work.launch >= 0
    ready = work.launch_ts + work.launch_overhead
    # nothing on any stream: otherwise it may wait for an event of another stream
    latest = np.maximum.accumulate(np.append(np.iinfo(np.int64).min // 2, work.ts + work.dur))[:-1]
    idle = has_launch & (latest < work.launch_ts - BUSY_NS)
    delay = work.ts - ready
    # a longer delay is not a latency but a wait, such as for another stream's event; copies from
    # pageable memory are staged first, and their call is not counted
    staged = (work.kind == 1) & (work.launch_overhead == 0)
    idle &= (work.ts > work.launch_ts) & (delay < np.where(staged, MAX_STAGING_NS, _MAX_LATENCY_NS))
    queued = has_launch & (ready + QUEUED_NS < ended)
    gap = work.ts - ended
    queued &= np.abs(gap) < REACH_NS
    # the length of a call does not affect the gap
    base_names = [name.replace(" long ", "  ") for name in work.groups]
    similar = np.array([base_names.index(name) for name in base_names], dtype=np.int64)
    return Latencies(
        launch=_measure_by_group(delay, idle, work, np.arange(len(work.groups)), LAUNCH_NS),
        gap=_measure_by_group(gap, queued, work, similar, GAP_NS),
    )


def _measure_by_group(
    values: Array, chosen: Array, work: DeviceWork, similar: Array, default: float
) -> Array:
    """Return the median of each group and its similar groups, else of its kind (kernel, copy or
    memset), else of all device work."""
    overall = median_with_default(values[chosen], default)
    kind_medians = {}
    for kind in np.unique(work.kind).tolist():
        sample = values[chosen & (work.kind == kind)]
        kind_medians[kind] = float(np.median(sample)) if len(sample) >= ENOUGH else overall
    result = np.zeros(len(work.groups))
    for index in range(len(work.groups)):
        sample = values[chosen & (similar[work.group] == similar[index])]
        kind = int(work.kind[work.group == index][0])
        result[index] = float(np.median(sample)) if len(sample) >= ENOUGH else kind_medians[kind]
    return result


# -- nodes and edges -------------------------------------------------------------------------------


class NodeKind(IntEnum):
    """Kind of moment of a node."""

    SOURCE = 0  # the start of the window
    LAUNCH = 1  # start of a call that puts work on the device
    SYNC = 2  # start of a call that blocks the host
    SYNC_END = 3  # its end
    HANDOFF = 4  # start or end of activity that hands over to another thread
    STEP = 5  # a step boundary on the main thread
    LOADER = 6  # start of a wait for the data loader
    LOADER_END = 7  # its end
    DEVICE = 8  # end of a piece of device work


class EdgeKind(IntEnum):
    """Kind of dependency of an edge."""

    PROGRAM = 0  # host time on a thread
    LAUNCH = 1  # launch call -> device work
    STREAM = 2  # order of one stream
    CROSS_STREAM = 3  # a stream waits for another stream's event
    SYNC = 4  # device work -> host call that waited for it
    QUEUE = 5  # start of device work -> launch that found the queue full
    HANDOFF = 6  # one host thread wakes another
    LOADER = 7  # the loader's workers produce at their own rate
    CONTENTION = 8  # a kernel that fills the device -> work that waits for room


@dataclass
class Graph:
    """Graph whose nodes are in an order in which every edge leads forward. Times are in ns from the
    window's start."""

    kind: Array
    """Kind of each node, uint8."""
    row: Array
    """Row of ``trace.gpu`` (device nodes) or ``trace.cpu`` (host nodes), or -1."""
    lane: Array
    """Host thread, or number of the (device, stream) pair of device nodes."""
    time: Array
    """Measured time of each node; for device work, its end."""
    dur: Array
    """Duration of device work; 0 for host points."""
    src: Array
    dst: Array
    weight: Array
    edge: Array
    """Kind of each edge, uint8."""
    from_start: Array
    """Whether the edge leaves from the start of device work instead of its end."""
    lanes: list[tuple[int, int]]
    """(device, stream) of each lane of device nodes."""
    step_boundaries: Array
    """Node of each step boundary; there is one more boundary than steps."""
    last_nodes: list[Array]
    """Device nodes that complete each step: the last of each lane."""
    origin: int
    """Trace time of the window's start, ns."""
    steps: tuple[int, int]
    """First step and one after the last, indices into the steps table."""
    cycle_steps: int = 1
    """Number of steps after which the loop repeats itself, if every n-th step is long."""
    launched_before_window: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Device nodes launched before the window: the host was ahead by these when it began."""
    background_lanes: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Lanes with only work of other threads, for which the step does not wait."""
    queue_waits: dict[int, Intervals] = field(default_factory=dict)
    """Time in launch calls spent waiting for room in the queue, by host thread."""
    latencies: Latencies = field(default_factory=Latencies)
    hard: dict[str, tuple[Array, Array]] = field(default_factory=dict)
    """Nodes at which waits end, and the length of each wait, ns, by name of the model's hard
    part."""

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def device(self) -> Array:
        return np.flatnonzero(self.kind == NodeKind.DEVICE)

    def steps_of_launch(self) -> Array:
        """Return the window's step (from 0) of each node; for device work, the step of its launch.
        -1 if launched before the window, or unknown."""
        step = np.searchsorted(self.step_boundaries, np.arange(len(self)), side="right") - 1
        launch = np.flatnonzero((self.edge == EdgeKind.LAUNCH) & (self.src > 0))
        step[self.device] = -1
        step[self.dst[launch]] = step[self.src[launch]]
        return step

    def earliest_time(self) -> Array:
        """Return the earliest time that each node's edges allow, with other nodes as measured,
        ns."""
        base = self.time[self.src] - np.where(self.from_start, self.dur[self.src], 0)
        allowed = np.full(len(self), NEVER)
        np.maximum.at(allowed, self.dst, base + self.weight)
        return allowed


# -- edges while a graph is built ------------------------------------------------------


class EdgeList:
    """List of edges in columns. A later edge may replace the program edge into a node."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._parts: list[tuple[Array, ...]] = []

    def add(
        self,
        src: Array,
        dst: Array,
        weight: Array | float,
        kind: EdgeKind,
        *,
        from_start: bool = False,
    ) -> None:
        """Append edges, except edges that do not lead forward in the node order."""
        src, dst = np.asarray(src, dtype=np.int64), np.asarray(dst, dtype=np.int64)
        weight = np.broadcast_to(np.asarray(weight, dtype=float), src.shape)
        is_forward = src < dst
        count = int(is_forward.sum())
        self._parts.append(
            (
                src[is_forward],
                dst[is_forward],
                weight[is_forward],
                np.full(count, kind, dtype=np.uint8),
                np.full(count, from_start),
            )
        )

    def drop_program(self, nodes: Array) -> None:
        """Remove the program edges into these nodes, whose times other edges decide."""
        self._parts = [
            tuple(c[~((p[3] == EdgeKind.PROGRAM) & np.isin(p[1], nodes))] for c in p)
            for p in self._parts
        ]

    def shorten(self, src: Array, dst: Array, weight: Array) -> None:
        """Shorten the program edges between pairs of points to ``weight``."""
        limit = np.full(len(self.graph), np.inf)
        limit[dst] = weight
        source = np.full(len(self.graph), -1, dtype=np.int64)
        source[dst] = src
        for part in self._parts:
            index = (part[3] == EdgeKind.PROGRAM) & (source[part[1]] == part[0])
            part[2][index] = np.minimum(part[2][index], limit[part[1][index]])

    def write_to_graph(self) -> None:
        """Write the edges into the graph, ordered by the node they lead into."""
        columns = [np.concatenate(c) for c in zip(*self._parts, strict=True)]
        order = np.argsort(columns[1], kind="stable")
        g = self.graph
        g.src, g.dst, g.weight, g.edge, g.from_start = (c[order] for c in columns)


def add_edges(
    graph: Graph, weight: Array, extra: list[tuple[int, int, float, int]], **changed: object
) -> tuple[Graph, Array]:
    """Return the graph with further edges (source, target, weight, kind) and changed fields."""
    src, dst, value, kind = (np.array(c) for c in zip(*extra, strict=True)) if extra else _NO_EDGES
    dst = np.concatenate([graph.dst, dst.astype(np.int64)])
    order = np.argsort(dst, kind="stable")
    weight = np.concatenate([weight, value.astype(float)])[order]
    columns = {
        "src": np.concatenate([graph.src, src.astype(np.int64)]),
        "dst": dst,
        "edge": np.concatenate([graph.edge, kind.astype(np.uint8)]),
        "from_start": np.concatenate([graph.from_start, np.zeros(len(src), dtype=bool)]),
    }
    columns = {name: column[order] for name, column in columns.items()}
    return replace(graph, weight=weight, **columns, **changed), weight  # type: ignore[arg-type]


_NO_EDGES = (np.zeros(0), np.zeros(0), np.zeros(0), np.zeros(0))
