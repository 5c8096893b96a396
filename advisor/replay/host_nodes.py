"""Host points: the moments on host threads that device work or other threads depend on.

Threads hand over to each other: while autograd's thread runs backward, the main thread is silent,
and vice versa. A silent thread waited for another if the other works inside the silence and not
across its borders, and little of the silence is left over. Then the silent thread's last event woke
the other thread, and the other's last event woke it. If the other thread ran backward nodes of
autograd this is certain, and any Python that was not recorded may be left over."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import polars as pl

from advisor.core.intervals import Array, Intervals, covered_length, intersect, union
from advisor.core.trace import LOADER, Trace
from advisor.measure.device.copies import copies_blocking_host
from advisor.measure.host.names import WORKERS, name_matches
from advisor.measure.host.stacks import ENGINE_NODE
from advisor.measure.host.syncs import calls_ended_by_stream
from advisor.replay.graph import NodeKind

STARVED_NS, STARVED_SHARE = 500_000, 0.05
"""Minimum length, in ns and as a share of the step, of a loader's call that waited for its workers.
A wait of a smaller share is irrelevant."""
CERTAIN_WAIT_NS, CERTAIN_WAIT_RATIO = 3_000_000, 3.0
"""Minimum length of a certain wait: in ns, as in the rules of loaders, or as a multiple of the
shortest tenth of the calls. Shorter calls may only take over a ready batch."""
READY_BATCH_NS = {"high": 200_000.0, "": 1_500_000.0, "low": 4_000_000.0}
"""Time to take over a ready batch from a loader worker, ns, by assumption. Public A100 traces: 0.1
to 0.3 ms; pairs of traces with four workers: 1.4 to 1.7 ms. Two busy cores: 1.5 ms for 8 KiB, 4 ms
for 2 MiB (``benchmarks/bench_hand_over.py``)."""
MIN_READY_BATCHES = 3
"""Minimum number of ready batches for their median to represent the others."""
SLOW_LAUNCH_NS = 50_000
"""Maximum length of a launch call that did nothing but launch, ns."""

_ORDER_BY_KIND = {
    NodeKind.SYNC_END: 0, NodeKind.LOADER_END: 0, NodeKind.STEP: 1, NodeKind.HANDOFF: 2,
    NodeKind.LAUNCH: 3, NodeKind.SYNC: 3, NodeKind.LOADER: 3,
}  # fmt: skip
"""Order of points at one instant of a thread: ends, then boundaries, hand-overs and starts."""
_INSTANT_ORDER = np.array([_ORDER_BY_KIND.get(kind, 0) for kind in NodeKind])


@dataclass
class HostNodes:
    """Columns of host points, unordered until :meth:`columns`."""

    parts: list[tuple[Array, Array, Array, Array]] = field(default_factory=list)

    def add(self, thread: Array, time: Array, kind: NodeKind, row: Array | None = None) -> None:
        owner = np.broadcast_to(np.asarray(thread), (len(time),))
        rows = np.full(len(time), -1) if row is None else np.asarray(row)
        self.parts.append((owner, np.asarray(time), np.full(len(time), kind), rows))

    def columns(self) -> tuple[Array, Array, Array, Array]:
        """Return (thread, time, kind, row) ordered by thread and time, without duplicates."""
        thread, time, kind, row = (
            np.concatenate(column).astype(np.int64) for column in zip(*self.parts, strict=True)
        )
        rank = _INSTANT_ORDER[kind]
        order = np.lexsort((row, rank, time, thread))
        thread, time, kind, row = (c[order] for c in (thread, time, kind, row))
        same = np.zeros(len(time), dtype=bool)
        same[1:] = (
            (thread[1:] == thread[:-1])
            & (time[1:] == time[:-1])
            & (kind[1:] == kind[:-1])
            & (row[1:] == row[:-1])
        )
        return thread[~same], time[~same], kind[~same], row[~same]


def launch_rows(trace: Trace, start: int, end: int) -> Array:
    """Return the rows of ``trace.cpu`` that are calls in [start, end) that put work on a device."""
    rows: Array = trace.gpu["launch"].drop_nulls().unique().sort().to_numpy()
    ts = trace.cpu["ts"].to_numpy()[rows]
    return rows[(ts >= start) & (ts < end)]


def wait_rows(trace: Trace, start: int, end: int) -> Array:
    """Return the rows of ``trace.cpu`` that are calls in [start, end) which may block the host.
    These are synchronising calls, synchronous copies, copies that blocked a call of any name, and
    long calls that returned as a stream ran empty."""
    cpu = trace.cpu
    call = cpu["call"].is_in(["sync_device", "sync_stream", "sync_event", "memcpy_blocking"])
    named = np.flatnonzero(call.fill_null(False).to_numpy())
    blocking = trace.gpu["launch"].to_numpy()[copies_blocking_host(trace)].astype(np.int64)
    rows: Array = np.unique(np.concatenate([named, blocking, calls_ended_by_stream(trace)]))
    ts = cpu["ts"].to_numpy()[rows]
    return rows[(ts >= start) & (ts < end)]


def loader_rows(
    trace: Trace, start: int, end: int, step_ns: float, *, ready: bool = False
) -> Array:
    """Return the rows of ``trace.cpu`` that ask for the next batch in [start, end). Without workers
    the call is the loading itself; with workers, only long calls, which waited for them, count,
    unless ``ready``. ``step_ns``: mean step time."""
    cpu = trace.cpu
    is_loader = name_matches(cpu["name"], LOADER)
    if not ready:
        is_loader &= _long_wait(trace, step_ns) | ~name_matches(cpu["name"], WORKERS)
    rows = np.flatnonzero(is_loader.to_numpy())
    ts = cpu["ts"].to_numpy()[rows]
    return rows[(ts >= start) & (ts < end)]


def ready_batch_ns(trace: Trace, step_ns: float, assumption: str) -> float:
    """Return the time to take over a ready batch from a worker, ns: the trace's median, else from
    ``READY_BATCH_NS``. ``assumption``: ``low`` or ``high`` gain."""
    cpu = trace.cpu
    ready = cpu.filter(name_matches(cpu["name"], WORKERS) & ~_long_wait(trace, step_ns))
    if ready.height < MIN_READY_BATCHES:
        return READY_BATCH_NS[assumption]
    return float(ready["dur"].median() or 0.0)  # type: ignore[arg-type]


def _long_wait(trace: Trace, step_ns: float) -> pl.Series:
    """Return which of the trace's host rows are long enough for a wait for the workers."""
    dur = trace.cpu["dur"]
    shortest = dur.filter(name_matches(trace.cpu["name"], WORKERS)).quantile(0.1)
    certain = min(CERTAIN_WAIT_NS, CERTAIN_WAIT_RATIO * (shortest or 0.0))
    return dur >= max(STARVED_NS, STARVED_SHARE * step_ns, certain)


# -- hand-over between host threads ----------------------------------------------------------------

MIN_SILENCE_NS = 50_000
"""Minimum length of a silence, ns: shorter silences are ordinary gaps between operators."""
MIN_AT_WORK_SHARE = 0.3
"""Minimum share of a silence in which the other thread works; with less it worked by chance."""
MAX_LEFT_OVER_SHARE = 0.3
MAX_LEFT_OVER_NS = 400_000
"""Maximum left-over part of a silence, ns: to wake a thread, and for Python around
``backward()``."""

OPERATOR_PATTERN = r"::|Backward\d*$"
"""Pattern of operators and autograd nodes. Other events in an operator's category are named ranges,
which do not show that their thread works."""
MAX_OVERRUN_SHARE = 0.05
"""Maximum share of the silence by which the other thread's work may cross its borders."""


class Handoff(NamedTuple):
    """Columns of hand-overs, times in ns. ``waiter`` fell silent at ``wait_start`` and continued at
    ``wait_end``; ``worker`` worked from ``work_start`` (-1 if it was already at work) to
    ``work_end``."""

    waiter: Array
    worker: Array
    wait_start: Array
    work_start: Array
    work_end: Array
    wait_end: Array


def find_handoffs(trace: Trace, threads: Array, start: int, end: int, waiting: Array) -> Handoff:
    """Find hand-overs among ``threads`` inside [start, end). ``waiting``: rows of ``trace.cpu``
    that explain a silence in another way (waits for the data loader)."""
    active = {int(t): _find_active(trace, int(t), start, end, waiting) for t in threads}
    engine = _find_engine_nodes(trace, active)
    busy = {t: _close_short_gaps(active_spans) for t, active_spans in active.items()}
    result: list[tuple[int, int, int, int, int, int]] = []
    for waiter in active:
        rows: dict[int, tuple[int, tuple[int, int, int, int, int, int]]] = {}
        for worker, other in active.items():
            if worker == waiter or not len(other):
                continue
            active_spans = _drop_blips(busy[waiter], busy[worker])
            left, back = active_spans.end[:-1], active_spans.start[1:]
            if not len(left):
                continue
            # a thread that has just been woken may tidy up after it has woken the other
            spare = np.maximum(MAX_OVERRUN_SHARE * (back - left), 0).astype(np.int64)
            first = np.searchsorted(other.end, left, side="right")
            index = np.minimum(first, len(other) - 1)
            tidying = (other.start[index] < left) & (other.end[index] - left <= spare)
            first = first + tidying
            last = np.searchsorted(other.start, back, side="left") - 1
            inside = (first <= last) & (first < len(other))
            at_first, at_last = np.minimum(first, len(other) - 1), np.maximum(last, 0)
            work_start, over = other.start[at_first], other.end[at_last] - back
            done = np.minimum(other.end[at_last], back - 1)
            left_over = (work_start - left) + (back - done)
            nodes = np.searchsorted(engine[worker], back) > np.searchsorted(engine[worker], left)
            nodes &= waiter == trace.main_thread
            shared_ns = intersect(busy[waiter], busy[worker]).total
            turns = shared_ns <= MAX_OVERRUN_SHARE * min(busy[waiter].total, busy[worker].total)
            at_work = covered_length(left, back, busy[worker]) >= MIN_AT_WORK_SHARE * (back - left)
            # already at work: the silent thread only waits for its end
            is_working = _is_inside(busy[worker], left, spare)
            fits = (
                inside
                & ~_is_inside(busy[worker], back, spare)
                & ((turns & at_work) | nodes)
                & (work_start >= left)
                & (over <= spare)
                & (
                    (left_over <= np.maximum(MAX_LEFT_OVER_SHARE * (back - left), MAX_LEFT_OVER_NS))
                    | nodes
                )
                & (left_over < back - left)
            )
            work_start = np.where(is_working, -1, work_start)
            for i in np.flatnonzero(fits).tolist():
                row = (waiter, worker, int(left[i]), int(work_start[i]), int(done[i]), int(back[i]))
                best = rows.get(row[-1])
                if best is None or left_over[i] < best[0]:
                    rows[row[-1]] = int(left_over[i]), row
        result += [row for _, row in rows.values()]
    table = _keep_one_waker(np.array(result, dtype=np.int64).reshape(-1, 6))
    return Handoff(*(table[:, i] for i in range(6)))


def _keep_one_waker(table: Array) -> Array:
    """Keep one hand-over per stretch of work, by the thread with the smallest usual left-over."""
    pair = table[:, 0] * (table[:, :2].max(initial=0) + 1) + table[:, 1]
    left_over = np.maximum(table[:, 3] - table[:, 2], 0) + (table[:, 5] - table[:, 4])
    medians = {p: float(np.median(left_over[pair == p])) for p in np.unique(pair).tolist()}
    order = np.lexsort((left_over, [medians[p] for p in pair.tolist()]))
    _, first = np.unique(table[order][:, [1, 4]], axis=0, return_index=True)
    return table[np.sort(order[first])]


def _is_inside(busy: Intervals, time: Array, spare: Array) -> Array:
    """Return whether each instant is in a busy stretch, more than ``spare`` from its borders."""
    if not len(busy):
        return np.zeros(len(time), dtype=bool)
    index = np.maximum(np.searchsorted(busy.start, time, side="right") - 1, 0)
    result: Array = (busy.start[index] + spare < time) & (time + spare < busy.end[index])
    return result


def _close_short_gaps(active: Intervals) -> Intervals:
    """Return the intervals with gaps shorter than ``MIN_SILENCE_NS`` closed."""
    if not len(active):
        return active
    is_gap = active.start[1:] - active.end[:-1] >= MIN_SILENCE_NS
    return Intervals(active.start[np.append(True, is_gap)], active.end[np.append(is_gap, True)])


def _drop_blips(active: Intervals, busy: Intervals) -> Intervals:
    """Return a thread's stretches of work without short stretches in the middle of another thread's
    work: a waiting thread that checks a lock still waits."""
    if len(active) < 3 or not len(busy):
        return active
    index = np.maximum(np.searchsorted(busy.start, active.start, side="right") - 1, 0)
    amidst = (busy.start[index] < active.start) & (active.end < busy.end[index])
    around = np.append(active.start[1:], active.end[-1]) - np.append(
        active.start[0], active.end[:-1]
    )
    length = active.end - active.start
    is_kept = ~(amidst & (length <= MAX_OVERRUN_SHARE * (around - length)))
    is_kept[[0, -1]] = True
    return Intervals(active.start[is_kept], active.end[is_kept])


def _find_engine_nodes(trace: Trace, active: dict[int, Intervals]) -> dict[int, Array]:
    """Return the start times of backward nodes by thread, in order."""
    rows = np.flatnonzero(name_matches(trace.cpu["name"], ENGINE_NODE).to_numpy())
    thread, ts = trace.cpu["thread"].to_numpy()[rows], trace.cpu["ts"].to_numpy()[rows]
    return {owner: np.sort(ts[thread == owner]) for owner in active}


def _find_active(trace: Trace, thread: int, start: int, end: int, waiting: Array) -> Intervals:
    """Return when the thread ran operators or runtime calls. Python frames and ranges span waits,
    so only the instants at which they are entered or left count."""
    cpu = trace.cpu.with_row_index("row").filter(
        (pl.col("thread") == thread)
        & (
            pl.col("kind").is_in(["op", "runtime", "python", "annotation"])
            | pl.col("row").is_in(waiting.tolist())
        )
        & (pl.col("ts") < end)
        & (pl.col("ts") + pl.col("dur") >= start)
    )
    is_range = (cpu["kind"] == "op") & ~name_matches(cpu["name"], OPERATOR_PATTERN)
    only_edges = cpu["kind"].is_in(["python", "annotation"]) | is_range
    frame = (only_edges & ~cpu["row"].is_in(waiting.tolist())).to_numpy()
    ts, until = cpu["ts"].to_numpy(), (cpu["ts"] + cpu["dur"]).to_numpy()
    instants = np.concatenate([ts[frame], until[frame]])
    active_start = np.concatenate([ts[~frame], instants])
    return union(
        active_start, np.maximum(np.concatenate([until[~frame], instants]), active_start + 1)
    )
