"""Host points: the moments on host threads that device work or other threads depend on.

Threads hand over to each other: while autograd's thread runs backward the main thread is silent,
and the other way round. A silent thread waited for another if that works inside the silence and not
across its borders, and little of the silence is left over. Then the first one's last event woke the
other, and the other's last event woke it. Where the other one ran backward nodes of autograd that
is certain, and what is left over may be any Python that was not recorded."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import polars as pl

from advisor.core.intervals import Intervals, covered_length, intersect, union
from advisor.core.trace import LOADER, Trace
from advisor.measure.device.copies import copies_blocking_host
from advisor.measure.host.names import WORKERS, name_matches
from advisor.measure.host.stacks import ENGINE_NODE
from advisor.measure.host.syncs import calls_ended_by_stream
from advisor.replay.graph import Array, NodeKind

STARVED_NS, STARVED_SHARE = 500_000, 0.05
"""Minimum length, ns and share of the step, of a call of a loader with workers that waited for
them. Handing over a batch that is ready takes less, and a wait of a smaller share decides
nothing."""
READY_BATCH_NS = {"high": 200_000.0, "": 1_500_000.0, "low": 4_000_000.0}
"""Time to take over a batch that a loader worker has ready, ns, by assumption. Public A100 traces:
0.1 to 0.3 ms; pairs of traces with four workers: 1.4 to 1.7 ms. Two busy cores: 1.5 ms for 8 KiB, 4
ms for 2 MiB (``benchmarks/bench_hand_over.py``)."""
MIN_READY = 3
"""Minimum number of ready batches for their median to stand for the others."""
SLOW_LAUNCH_NS = 50_000
"""Length above which a launch call did something else than launch, or waited, ns."""

_ORDER = {
    NodeKind.SYNC_END: 0, NodeKind.LOADER_END: 0, NodeKind.STEP: 1, NodeKind.HANDOFF: 2,
    NodeKind.LAUNCH: 3, NodeKind.SYNC: 3, NodeKind.LOADER: 3,
}  # fmt: skip
"""Order at one instant of a thread: ends, then boundaries, then hand-overs, then starts."""
_AT_ONE_INSTANT = np.array([_ORDER.get(kind, 0) for kind in NodeKind])


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
        rank = _AT_ONE_INSTANT[kind]
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
    These are synchronising calls, synchronous copies, copies that held their call whatever its
    name, and long calls that returned as a stream ran empty."""
    cpu = trace.cpu
    call = cpu["call"].is_in(["sync_device", "sync_stream", "sync_event", "memcpy_blocking"])
    named = np.flatnonzero(call.fill_null(False).to_numpy())
    held = trace.gpu["launch"].to_numpy()[copies_blocking_host(trace)].astype(np.int64)
    rows: Array = np.unique(np.concatenate([named, held, calls_ended_by_stream(trace)]))
    ts = cpu["ts"].to_numpy()[rows]
    return rows[(ts >= start) & (ts < end)]


def loader_rows(trace: Trace, start: int, end: int, step_ns: float) -> Array:
    """Return the rows of ``trace.cpu`` that ask for the next batch in [start, end). Without workers
    the call is the loading itself; with workers only long calls count, which waited for them.
    ``step_ns``: mean step time."""
    cpu = trace.cpu
    starved = (_long_wait(trace, step_ns) | ~name_matches(cpu["name"], WORKERS)).to_numpy()
    rows = np.flatnonzero(name_matches(cpu["name"], LOADER).to_numpy() & starved)
    ts = cpu["ts"].to_numpy()[rows]
    return rows[(ts >= start) & (ts < end)]


def ready_batch_ns(trace: Trace, step_ns: float, assumption: str) -> float:
    """Return the time to take over a batch that a worker has ready, ns: the trace's median, else as
    ``READY_BATCH_NS`` has it. ``assumption``: ``low`` or ``high``, of the gain."""
    cpu = trace.cpu
    ready = cpu.filter(name_matches(cpu["name"], WORKERS) & ~_long_wait(trace, step_ns))
    if ready.height < MIN_READY:
        return READY_BATCH_NS[assumption]
    return float(ready["dur"].median() or 0.0)  # type: ignore[arg-type]


def _long_wait(trace: Trace, step_ns: float) -> pl.Series:
    return trace.cpu["dur"] >= max(STARVED_NS, STARVED_SHARE * step_ns)


# -- hand-over between host threads ----------------------------------------------------------------

MIN_SILENCE_NS = 50_000
"""Minimum length of a silence, ns: shorter ones are ordinary gaps between operators."""
MIN_AT_WORK = 0.3
"""Minimum share of a silence that the other thread works in it, or it was there by chance."""
LEFT_OVER_SHARE = 0.3
LEFT_OVER_NS = 400_000
"""Maximum of a silence left over, ns: to wake a thread, and for Python around ``backward()``."""

OPERATOR = r"::|Backward\d*$"
"""Pattern of operators and autograd nodes. Other events with an operator's category are named
ranges, which do not show that their thread works."""
OVERRUN_SHARE = 0.05
"""Share of the silence by which the other thread's work may reach across its borders."""


class Handoff(NamedTuple):
    """Columns of hand-overs, times in ns. ``waiter`` fell silent at ``wait_start`` and went on at
    ``wait_end``; ``worker`` worked from ``work_start`` (-1: it was at work already) to
    ``work_end``."""

    waiter: Array
    worker: Array
    wait_start: Array
    work_start: Array
    work_end: Array
    wait_end: Array


def find_handoffs(trace: Trace, threads: Array, start: int, end: int, waiting: Array) -> Handoff:
    """Find hand-overs among ``threads`` inside [start, end). ``waiting``: rows of ``trace.cpu``
    that explain a silence otherwise (waits for the data loader)."""
    active = {int(t): _active(trace, int(t), start, end, waiting) for t in threads}
    engine = _engine(trace, active)
    busy = {t: _without_short_gaps(own) for t, own in active.items()}
    result: list[tuple[int, int, int, int, int, int]] = []
    for waiter in active:
        rows: dict[int, tuple[int, tuple[int, int, int, int, int, int]]] = {}
        for worker, theirs in active.items():
            if worker == waiter or not len(theirs):
                continue
            own = _without_blips(busy[waiter], busy[worker])
            left, back = own.end[:-1], own.start[1:]
            if not len(left):
                continue
            # a thread that just has been woken may tidy up after it has woken the other
            spare = np.maximum(OVERRUN_SHARE * (back - left), 0).astype(np.int64)
            first = np.searchsorted(theirs.end, left, side="right")
            index = np.minimum(first, len(theirs) - 1)
            tidying = (theirs.start[index] < left) & (theirs.end[index] - left <= spare)
            first = first + tidying
            last = np.searchsorted(theirs.start, back, side="left") - 1
            inside = (first <= last) & (first < len(theirs))
            at_first, at_last = np.minimum(first, len(theirs) - 1), np.maximum(last, 0)
            began, over = theirs.start[at_first], theirs.end[at_last] - back
            done = np.minimum(theirs.end[at_last], back - 1)
            rest = (began - left) + (back - done)
            nodes = np.searchsorted(engine[worker], back) > np.searchsorted(engine[worker], left)
            nodes &= waiter == trace.main_thread
            both = intersect(busy[waiter], busy[worker]).total
            turns = both <= OVERRUN_SHARE * min(busy[waiter].total, busy[worker].total)
            at_work = covered_length(left, back, busy[worker]) >= MIN_AT_WORK * (back - left)
            # already at work: the silence is only waiting for its end
            half = _inside(busy[worker], left, spare)
            fits = (
                inside
                & ~_inside(busy[worker], back, spare)
                & ((turns & at_work) | nodes)
                & (began >= left)
                & (over <= spare)
                & ((rest <= np.maximum(LEFT_OVER_SHARE * (back - left), LEFT_OVER_NS)) | nodes)
                & (rest < back - left)
            )
            began = np.where(half, -1, began)
            for i in np.flatnonzero(fits).tolist():
                row = (waiter, worker, int(left[i]), int(began[i]), int(done[i]), int(back[i]))
                known = rows.get(row[-1])
                if known is None or rest[i] < known[0]:
                    rows[row[-1]] = int(rest[i]), row
        result += [row for _, row in rows.values()]
    table = _one_waker(np.array(result, dtype=np.int64).reshape(-1, 6))
    return Handoff(*(table[:, i] for i in range(6)))


def _one_waker(table: Array) -> Array:
    """Keep one hand-over per stretch of work: by the thread that usually leaves least over."""
    pair = table[:, 0] * (table[:, :2].max(initial=0) + 1) + table[:, 1]
    rest = np.maximum(table[:, 3] - table[:, 2], 0) + (table[:, 5] - table[:, 4])
    usual = {p: float(np.median(rest[pair == p])) for p in np.unique(pair).tolist()}
    order = np.lexsort((rest, [usual[p] for p in pair.tolist()]))
    _, first = np.unique(table[order][:, [1, 4]], axis=0, return_index=True)
    return table[np.sort(order[first])]


def _inside(busy: Intervals, time: Array, spare: Array) -> Array:
    """Return whether each instant lies in a busy stretch, more than ``spare`` from its borders."""
    if not len(busy):
        return np.zeros(len(time), dtype=bool)
    index = np.maximum(np.searchsorted(busy.start, time, side="right") - 1, 0)
    result: Array = (busy.start[index] + spare < time) & (time + spare < busy.end[index])
    return result


def _without_short_gaps(active: Intervals) -> Intervals:
    """Return the intervals with gaps closed that are shorter than ``MIN_SILENCE_NS``."""
    if not len(active):
        return active
    apart = active.start[1:] - active.end[:-1] >= MIN_SILENCE_NS
    return Intervals(active.start[np.append(True, apart)], active.end[np.append(apart, True)])


def _without_blips(own: Intervals, busy: Intervals) -> Intervals:
    """Return a thread's stretches of work without short ones in the midst of another thread's: a
    waiting thread that looks at a lock still waits."""
    if len(own) < 3 or not len(busy):
        return own
    index = np.maximum(np.searchsorted(busy.start, own.start, side="right") - 1, 0)
    amidst = (busy.start[index] < own.start) & (own.end < busy.end[index])
    around = np.append(own.start[1:], own.end[-1]) - np.append(own.start[0], own.end[:-1])
    length = own.end - own.start
    kept = ~(amidst & (length <= OVERRUN_SHARE * (around - length)))
    kept[[0, -1]] = True
    return Intervals(own.start[kept], own.end[kept])


def _engine(trace: Trace, active: dict[int, Intervals]) -> dict[int, Array]:
    """Return the start times of backward nodes by thread, in order."""
    rows = np.flatnonzero(name_matches(trace.cpu["name"], ENGINE_NODE).to_numpy())
    thread, ts = trace.cpu["thread"].to_numpy()[rows], trace.cpu["ts"].to_numpy()[rows]
    return {owner: np.sort(ts[thread == owner]) for owner in active}


def _active(trace: Trace, thread: int, start: int, end: int, waiting: Array) -> Intervals:
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
    named = (cpu["kind"] == "op") & ~name_matches(cpu["name"], OPERATOR)
    only_edges = cpu["kind"].is_in(["python", "annotation"]) | named
    frame = (only_edges & ~cpu["row"].is_in(waiting.tolist())).to_numpy()
    ts, until = cpu["ts"].to_numpy(), (cpu["ts"] + cpu["dur"]).to_numpy()
    instants = np.concatenate([ts[frame], until[frame]])
    begin = np.concatenate([ts[~frame], instants])
    return union(begin, np.maximum(np.concatenate([until[~frame], instants]), begin + 1))
