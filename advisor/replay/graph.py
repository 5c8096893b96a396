"""The dependency graph of a run of steps: nodes, edges and what each stands for.

A node is a moment: a point on a host thread, or the end of a piece of device work. An edge says
"not before": the node comes no earlier than the edge's source plus its weight. Replaying is then
one pass in order of time, taking the maximum over the edges that lead into each node.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from advisor.core.intervals import Intervals
from advisor.replay.latencies import Latencies

Array = NDArray[Any]
NEVER = -1e18
"""Weight of an edge that is switched off, ns."""


class Node(IntEnum):
    """What a node stands for."""

    SOURCE = 0  # the start of the window
    LAUNCH = 1  # start of a call that puts work on the device
    WAIT = 2  # start of a call that blocks the host
    RELEASED = 3  # its end
    MARK = 4  # start or end of activity that hands over to another thread
    STEP = 5  # a step boundary on the main thread
    LOADER = 6  # start of a wait for the data loader
    LOADED = 7  # its end
    DEVICE = 8  # end of a piece of device work


class Edge(IntEnum):
    """What an edge stands for."""

    PROGRAM = 0  # host time on a thread
    LAUNCH = 1  # launch call -> device work
    STREAM = 2  # order of one stream
    CROSS = 3  # a stream waits for another one's event
    RELEASE = 4  # device work -> host call that waited for it
    QUEUE = 5  # start of device work -> launch that found the queue full
    HANDOVER = 6  # one host thread wakes another
    LOADER = 7  # the loader's workers produce at their own rate
    CONTENTION = 8  # a kernel that fills the device -> work that waits for room
    MEETING = 9  # ranks that come to a collective -> all of them go on


@dataclass
class Graph:
    """Nodes in an order in which every edge leads forward. Times in ns from the window's start."""

    kind: Array
    """Node kinds, uint8."""
    row: Array
    """Row of ``trace.gpu`` (device nodes) or ``trace.cpu`` (host nodes), -1: none."""
    lane: Array
    """Host thread, or number of the (device, stream) pair of device nodes."""
    time: Array
    """Measured: when it happened; ends for device nodes."""
    dur: Array
    """Device work: duration; host points: 0."""
    src: Array
    dst: Array
    weight: Array
    edge: Array
    """Edge kinds, uint8."""
    from_start: Array
    """The edge leaves from the start of device work instead of its end."""
    lanes: list[tuple[int, int]]
    """(device, stream) of each lane of device nodes."""
    starts: Array
    """Node of each step boundary: one more than there are steps."""
    last: list[Array]
    """For each step: device nodes that must be done for it to be complete (last a lane)."""
    origin: int
    """Trace time of the window's start, ns."""
    steps: tuple[int, int]
    """First step and one after the last, indices into the steps table."""
    turn: int = 1
    """After how many steps the loop repeats itself, where every n-th one is long."""
    early: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Device nodes launched before the window: what the host was ahead by when it began."""
    others: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Lanes of device work that only threads launch which work on their own."""
    hidden: dict[int, Intervals] = field(default_factory=dict)
    """By host thread: time in launch calls that was a wait for room in the queue."""
    latencies: Latencies = field(default_factory=Latencies)
    hard: dict[str, tuple[Array, Array]] = field(default_factory=dict)
    """The hard parts by name: nodes with which a wait ends, and how long each waited, ns."""

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def device(self) -> Array:
        """Device nodes."""
        return np.flatnonzero(self.kind == Node.DEVICE)

    def steps_of_launch(self) -> Array:
        """For each node the step (from 0) of the window in which it came, for device work that in
        which it was launched; -1: before the window or not known."""
        step = np.searchsorted(self.starts, np.arange(len(self)), side="right") - 1
        launch = np.flatnonzero((self.edge == Edge.LAUNCH) & (self.src > 0))
        step[self.device] = -1
        step[self.dst[launch]] = step[self.src[launch]]
        return step

    def local_start(self) -> Array:
        """For each node, when its edges allow it, given that all others happen as measured."""
        base = self.time[self.src] - np.where(self.from_start, self.dur[self.src], 0)
        allowed = np.full(len(self), NEVER)
        np.maximum.at(allowed, self.dst, base + self.weight)
        return allowed
