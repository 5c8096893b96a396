"""Latencies: what this device and its driver take between two events, measured from the trace."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from advisor.replay.device import DeviceWork
    from advisor.replay.graph import Array

LAUNCH_NS, GAP_NS = 2_000.0, 1_500.0
"""Launch latency and gap between kernels of one stream where the trace shows too few of them."""
CROSS_STREAM_NS = 2_000.0
CALL_NS = 5_000.0
RELEASE_NS = 8_000.0
REACH_NS = 15_000
"""How long after another stream's work a released start may come: event and scheduling latency."""
MAX_LATENCY_NS, MAX_STAGING_NS = 50_000, 2_000_000
"""Measured on idle streams: 1 to 17 µs for kernels, 55 to 260 µs to stage a pageable copy."""
BUSY_NS = 2_000
"""A device that ended this long before a launch call was idle when it came."""
QUEUED_NS = 20_000
"""Work that was launched this long before its stream had room did not wait for its launch."""
FEW, ENOUGH = 3, 5
"""Cases that a median is taken of: of all of a kind, and of one group of it."""


@dataclass
class Latencies:
    """Medians, ns; a usual value stands in for what the trace shows too seldom."""

    launch: Array = field(default_factory=lambda: np.zeros(0))
    """By group of device work (``DeviceWork.groups``): from the end of the launch call to the
    start on an idle stream; may be negative."""
    gap: Array = field(default_factory=lambda: np.zeros(0))
    """By group: from the end of one piece of work to the start of the next of its stream, when
    that had long been launched."""
    cross_stream: float = CROSS_STREAM_NS
    """From the end of one stream's work to the start of another's that waited for it."""
    call: float = CALL_NS
    """What a call costs that may block the host, and did not."""
    release: float = RELEASE_NS
    """From the end of the awaited work to the return of the call that waited for it."""


def median_or(sample: Array, usual: float) -> float:
    """The median of a sample; the usual value where there are too few."""
    return float(np.median(sample)) if len(sample) >= FEW else usual


def measure(work: DeviceWork) -> Latencies:
    """The latencies of starts, from starts that had nothing else to wait for."""
    before = work.previous
    ended = np.where(before >= 0, (work.ts + work.dur)[before], np.iinfo(np.int64).min // 2)
    known = work.launch >= 0
    ready = work.launch_ts + work.own
    # nothing on any stream: otherwise an event of another one may be what it waits for
    latest = np.maximum.accumulate(np.append(np.iinfo(np.int64).min // 2, work.ts + work.dur))[:-1]
    idle = known & (latest < work.launch_ts - BUSY_NS)
    delay = work.ts - ready
    # longer is no latency but a wait, for another stream's event say; copies from pageable memory
    # are staged first, and their call is not counted
    staged = (work.kind == 1) & (work.own == 0)
    idle &= (work.ts > work.launch_ts) & (delay < np.where(staged, MAX_STAGING_NS, MAX_LATENCY_NS))
    queued = known & (ready + QUEUED_NS < ended)
    gap = work.ts - ended
    queued &= np.abs(gap) < REACH_NS
    # the length of a call has no say in the gap
    bare = [name.replace(" long ", "  ") for name in work.groups]
    similar = np.array([bare.index(name) for name in bare], dtype=np.int64)
    return Latencies(
        launch=_by_group(delay, idle, work, np.arange(len(work.groups)), LAUNCH_NS),
        gap=_by_group(gap, queued, work, similar, GAP_NS),
    )


def _by_group(
    values: Array, chosen: Array, work: DeviceWork, similar: Array, usual: float
) -> Array:
    """The median of each group, with those similar to it; else that of its kind (kernel, copy or
    memset), else that of all device work."""
    every = median_or(values[chosen], usual)
    of_kind = {}
    for kind in np.unique(work.kind).tolist():
        sample = values[chosen & (work.kind == kind)]
        of_kind[kind] = float(np.median(sample)) if len(sample) >= ENOUGH else every
    result = np.zeros(len(work.groups))
    for number in range(len(work.groups)):
        sample = values[chosen & (similar[work.group] == similar[number])]
        kind = int(work.kind[work.group == number][0])
        result[number] = float(np.median(sample)) if len(sample) >= ENOUGH else of_kind[kind]
    return result
