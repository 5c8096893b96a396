"""Idle gaps of the device, and what the thread that launched the next work was doing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.intervals import Intervals, Ints, intersect, union
from advisor.measure.host.new_shapes import ONE_OFF, first_calls
from advisor.measure.host.stacks import nullable_rows
from advisor.measure.steps.steps import step_of
from advisor.measure.steps.timeline import CLASSES, CODE, LOADING, HostPieces, cut_at_points

if TYPE_CHECKING:
    from advisor.measure import Analysis

HOST_CAUSES = ("dispatch", "python", "unknown")
"""Causes of idle time in which the host computes, or does what was not recorded."""
CAUSES = (
    "loader",  # waiting for the DataLoader
    "sync",  # blocked in a synchronising call
    "copy",  # in a copy that held the host
    "dispatch",  # in operators, on the way to the launch
    "python",  # in Python frames
    "communication",  # in calls of MPI
    "host_code",  # in code that samples of the CPU show
    "launch",  # in launch calls, and in the latency between them and the start of the work
    "compile",  # starting CUDA, loading code, compiling, capturing a graph: what a first call does
    "allocation",  # cudaMalloc, cudaFree, pinned memory
    "profiler",  # the profiler itself
    "stream",  # launched, but waiting for an event of another stream or device
    "other_thread",  # waiting for another thread that recorded nothing
    "end",  # after the last device work of the trace, in its last sync or nothing that is recorded
    "unknown",  # Python without stacks, no recorded event, launched long ago for no visible reason
)
Cause = pl.Enum(CAUSES)

GAPS_SCHEMA: dict[str, Any] = {
    "ts": pl.Int64,  # ns
    "dur": pl.Int64,  # ns
    "step": pl.Int32,
    "cause": Cause,
    "thread": pl.Int32,  # row of trace.threads; null: none
    "host": pl.Int32,  # row of trace.cpu that is blamed; null: none
    "line": pl.Int32,  # row of the innermost frame of the user's around it; null: no stacks
    "next": pl.Int32,  # row of trace.gpu that ended the gap; null: end of the window
    "gap": pl.Int32,  # number of the gap that the piece belongs to
}

LATENCY_NS = 50_000
"""Longest delay of ready work, ns, for which the launch itself is blamed. It begins with the launch
call's return, or the end of the work before. Measured between queued work: at most 11 us (A100), 12
us (A100, NCCL) and 16 us (V100, graph launches included); a longer wait has a reason that must be
seen, so without one it is unknown."""
MAX_FOLLOWED = 4
"""Threads that are searched for a cause while the launching one did nothing recorded: the main
thread and those that launch most. Autograd has one thread a device; more only cost time."""

_CAUSE = {name: code for code, name in enumerate(CAUSES)}
_OF_CLASS = np.array(
    [_CAUSE["end"] if name == "drain" else _CAUSE.get(name, _CAUSE["unknown"]) for name in CLASSES],
    dtype=np.int8,
)
_UNEXPLAINED = (CODE["unknown"], CODE["unrecorded"], CODE["other_thread"])


class _Blame(NamedTuple):
    """Pieces of gaps: ``which`` interval, start and end (ns), cause, thread and host row."""

    which: NDArray[np.int64]
    start: Ints
    end: Ints
    cause: NDArray[np.int8]
    thread: NDArray[np.int32]
    host: NDArray[np.int32]

    def take(self, rows: NDArray[Any]) -> _Blame:
        """Return the pieces at ``rows``, in that order."""
        return _Blame._make(column[rows] for column in self)

    def join(self, other: _Blame) -> _Blame:
        pairs: Iterable[Any] = zip(self, other, strict=True)
        return _Blame._make(np.concatenate(pair) for pair in pairs)


def idle_gaps(a: Analysis) -> pl.DataFrame:
    """Find the device's idle gaps and their causes, clipped to ``spans``: they add up to the idle
    time. A gap with several causes is split into consecutive pieces; the columns are those of
    GAPS_SCHEMA, ordered by ``ts``.

    A gap is blamed on the thread that launched the work which ended it. Until that launch began,
    each piece has the class of what the thread was doing (``timeline.CLASSES``); where that is
    nothing recorded, what the main thread or another launching thread was doing then. From the
    launch on it is ``launch``, or ``stream`` when a stream had to wait for an event before this
    launch and work of another stream or device ended last; a wait of the launched work that is
    longer than LATENCY_NS and has no such reason is ``unknown``. Pieces under ``overhead`` rows of
    the profiler are ``profiler`` (or ``compile`` where they load code). Without a next launch the
    main thread is asked, and what stays unexplained is the ``end``.

    For ``unknown`` and ``end``, ``host`` is the innermost annotation around, if any. ``line`` has
    no fallback: see ``Analysis.location`` for the backward pass."""
    idle = a.breakdown.idle
    if a.device_id is None or not len(idle):
        return pl.DataFrame(schema=GAPS_SCHEMA)
    used = a.steps.used
    steps = Intervals(used["ts"].to_numpy(), used["end"].to_numpy())
    part = intersect(idle, steps)
    gap = np.searchsorted(idle.start, part.start, side="right") - 1
    ended_by = _next_work(a, idle.end)[gap]
    blame = _blame(a, part, ended_by)
    fresh = np.ones(len(blame.which), dtype=bool)
    fresh[1:] = blame.which[1:] != blame.which[:-1]
    for column in (blame.cause, blame.thread, blame.host):
        fresh[1:] |= column[1:] != column[:-1]
    first = np.flatnonzero(fresh)
    last = np.append(first[1:], len(fresh)) - 1
    host, which = blame.host[first], blame.which[first]
    return pl.DataFrame(
        {
            "ts": blame.start[first],
            "dur": blame.end[last] - blame.start[first],
            "step": step_of(a.steps, blame.start[first]),
            "cause": pl.Series(CAUSES, dtype=Cause).gather(blame.cause[first]),
            "thread": nullable_rows(blame.thread[first]),
            "host": nullable_rows(host),
            "line": nullable_rows(_frames(a, host)),
            "next": nullable_rows(ended_by[which]),
            "gap": gap[which],
        },
        schema=GAPS_SCHEMA,
        strict=False,
    )


def queued_idle_ns(a: Analysis) -> int:
    """Return the idle time for no recorded reason although work is queued for the device, ns: its
    launch has returned."""
    kind = a.trace.cpu["kind"].gather(a.gaps["host"])
    queued = (a.gaps["cause"] == "unknown") & (kind == "runtime").fill_null(False)
    return int(a.gaps["dur"].filter(queued).sum())


def is_outside_operators(a: Analysis) -> bool:
    """Return whether idle time of an unknown cause is mostly code of the host outside recorded
    operators."""
    unknown = int(a.gaps["dur"].filter(a.gaps["cause"] == "unknown").sum())
    return bool((a.trace.cpu["kind"] == "op").any()) and queued_idle_ns(a) < unknown / 2


def operators_after_gaps(a: Analysis) -> pl.DataFrame:
    """Return the outermost aten operators that launched the work after idle time outside operators:
    ``name`` (null: launched by none), ``dur`` (its sum, ns) and ``count`` of the gaps, longest time
    first."""
    gaps = a.gaps.filter(pl.col("cause") == "unknown")
    launch = a.trace.gpu["launch"].gather(gaps["next"])
    top = a.outermost_aten[launch.fill_null(0).to_numpy()] if gaps.height else np.zeros(0, int)
    top = np.where(launch.is_null().to_numpy(), -1, top)
    name = a.trace.cpu["name"].gather(nullable_rows(top.astype(np.int32))).cast(pl.String)
    table = gaps.select("dur", "gap", name=name).group_by("name")
    return table.agg(pl.col("dur").sum(), count=pl.col("gap").n_unique()).sort(
        "dur", "name", descending=[True, False]
    )


def _blame(a: Analysis, part: Intervals, ended_by: NDArray[np.int64]) -> _Blame:
    cpu = a.trace.cpu
    count = len(part)
    launch = np.full(count, -1, dtype=np.int64)
    if a.trace.gpu.height:
        row = a.trace.gpu["launch"].fill_null(-1).to_numpy()[np.maximum(ended_by, 0)]
        launch = np.where(ended_by >= 0, row, -1)
    known = launch >= 0
    index = np.maximum(launch, 0)
    main = a.trace.main_thread
    thread = np.full(count, -1, dtype=np.int32)
    called = np.full(count, np.iinfo(np.int64).max)
    returned = called.copy()
    if cpu.height:
        ts = cpu["ts"].to_numpy()
        thread = np.where(known, cpu["thread"].to_numpy()[index], -1).astype(np.int32)
        called = np.where(known, ts[index], called)
        returned = np.where(known, ts[index] + cpu["dur"].to_numpy()[index], returned)
    tail = ended_by < 0
    if main is not None:
        thread[tail] = main
    # until the launch call returned: what the thread was doing (the call itself included)
    upto = np.minimum(np.maximum(returned, part.start), part.end)
    host_side = _follow(a, a.timeline.pieces_within(thread, part.start, upto), thread)
    host_side = _one_off(a, _overhead(a, host_side))
    # after it: the work is queued and the device does not run it yet
    queued = np.flatnonzero(upto < part.end)
    late = part.end[queued] - upto[queued] > LATENCY_NS
    cause = np.where(late, _CAUSE["unknown"], _CAUSE["launch"]).astype(np.int8)
    waits = _stream_waits(a, part, queued, ended_by[queued], launch[queued])
    cause[waits >= 0] = _CAUSE["stream"]
    by = np.where(waits >= 0, waits, launch[queued]).astype(np.int32)
    joined = host_side.join(
        _Blame(queued, upto[queued], part.end[queued], cause, thread[queued], by)
    )
    end = tail[joined.which] & (joined.cause == _CAUSE["unknown"])
    joined.cause[end] = _CAUSE["end"]
    return joined.take(np.argsort(joined.start, kind="stable"))


def _follow(a: Analysis, pieces: HostPieces, thread: NDArray[np.int32]) -> _Blame:
    """Find the pieces' causes; where a thread did nothing that explains them, other threads'."""
    blame = _Blame(
        pieces.interval,
        pieces.start,
        pieces.end,
        _OF_CLASS[pieces.code],
        thread[pieces.interval].astype(np.int32),
        pieces.row,
    )
    dark = np.isin(pieces.code, _UNEXPLAINED)
    # a loop over at most MAX_FOLLOWED threads: each is asked only about what is still dark
    for other in _launching_threads(a):
        rows = np.flatnonzero(dark & (blame.thread != other) & (blame.thread >= 0))
        if not len(rows):
            continue
        seen = a.timeline.pieces_within(
            np.full(len(rows), other), blame.start[rows], blame.end[rows]
        )
        explains = ~np.isin(seen.code, _UNEXPLAINED)
        if not explains.any():
            continue
        kept = np.ones(len(dark), dtype=bool)
        kept[rows] = False
        again = blame.take(rows[seen.interval])
        followed = _Blame(
            again.which,
            seen.start,
            seen.end,
            np.where(explains, _OF_CLASS[seen.code], again.cause).astype(np.int8),
            np.where(explains, other, again.thread).astype(np.int32),
            np.where(explains, seen.row, again.host).astype(np.int32),
        )
        blame = blame.take(np.flatnonzero(kept)).join(followed)
        dark = np.concatenate([dark[kept], ~explains])
    return blame


def _launching_threads(a: Analysis) -> list[int]:
    """List the main thread, then those that launch most work of the analysed device."""
    gpu, cpu = a.trace.gpu, a.trace.cpu
    launch = gpu["launch"].filter((gpu["device"] == a.device_id) & gpu["launch"].is_not_null())
    counts = np.bincount(cpu["thread"].gather(launch).to_numpy()) if len(launch) else np.zeros(0)
    order = [int(t) for t in np.argsort(-counts, kind="stable") if counts[t]]
    main = a.trace.main_thread
    first = [] if main is None else [main]
    return [*first, *(t for t in order if t != main)][:MAX_FOLLOWED]


def _overhead(a: Analysis, blame: _Blame) -> _Blame:
    """Blame what lies under ``overhead`` rows on them.

    They do not tell their thread. Loading code happens on the thread that needs it, so it
    explains everything but a wait for data or for another thread; the profiler's buffers are
    handled inside CUDA calls, or on a thread of their own, where they delay nobody."""
    cpu = a.trace.cpu
    rows = np.flatnonzero((cpu["kind"] == "overhead").to_numpy())
    if not len(rows) or not len(blame.which):
        return blame
    loads = cpu["name"].gather(rows).cast(pl.String).str.contains(LOADING).to_numpy()
    ts = cpu["ts"].to_numpy()[rows]
    end = ts + cpu["dur"].to_numpy()[rows]
    calls = ("launch", "dispatch", "copy", "allocation", "sync")
    for chosen, cause, over in (
        (loads, "compile", (*calls, "python", "unknown")),
        (~loads, "profiler", calls),
    ):
        blame = _under(blame, rows[chosen], ts[chosen], end[chosen], cause, over)
    return blame


def _one_off(a: Analysis, blame: _Blame) -> _Blame:
    """Blame time in costly first calls on compiling: loading, searching, compiling, once
    (``step_differences.py``) or for each new shape (``new_shapes.py``)."""
    calls = first_calls(a)
    ts = calls["ts"].to_numpy()
    end = ts + calls["dur"].to_numpy()
    return _under(blame, calls["host"].to_numpy(), ts, end, "compile", ONE_OFF)


def _under(
    blame: _Blame, rows: Ints, ts: Ints, end: Ints, cause: str, over: tuple[str, ...]
) -> _Blame:
    """Give pieces under host rows [ts, end) their cause, if the present one is in ``over``."""
    spans = union(ts, end)
    if not len(spans) or not len(blame.which):
        return blame
    # cut at both ends of each: the parts after an even point lie inside one
    low = min(int(blame.start.min()), int(spans.start[0])) - 1
    key = np.concatenate([[low], np.stack([spans.start, spans.end], axis=1).ravel()])
    which, at, begin, finish = cut_at_points(key, blame.start, blame.end)
    blame = blame.take(which)
    hit = (at % 2 == 1) & np.isin(blame.cause, [_CAUSE[name] for name in over])
    order = np.argsort(ts, kind="stable")
    by = rows[order[np.maximum(np.searchsorted(ts[order], begin, side="right") - 1, 0)]]
    return blame._replace(
        start=begin,
        end=finish,
        cause=np.where(hit, _CAUSE[cause], blame.cause).astype(np.int8),
        host=np.where(hit, by, blame.host).astype(np.int32),
    )


def _stream_waits(
    a: Analysis,
    part: Intervals,
    queued: NDArray[np.int64],
    ended_by: NDArray[np.int64],
    launch: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Find the ``cudaStreamWaitEvent`` that held queued work: its host row, else -1.

    It held the work when the thread called it after its previous launch on the work's stream, and
    the device work that ended last before the gap's end ran on another stream or device, until
    LATENCY_NS before the work began."""
    gpu, cpu = a.trace.gpu, a.trace.cpu
    none = np.full(len(queued), -1, dtype=np.int64)
    wait_rows = np.flatnonzero((cpu["call"] == "stream_wait").fill_null(False).to_numpy())
    if not len(wait_rows) or not len(queued):
        return none
    place = np.searchsorted(wait_rows, launch) - 1
    wait = np.where(place >= 0, wait_rows[np.maximum(place, 0)], -1)
    thread = cpu["thread"].to_numpy()
    wait = np.where((wait >= 0) & (thread[np.maximum(wait, 0)] == thread[launch]), wait, -1)
    # previous launch on the same stream of the same device
    devices, device = np.unique(gpu["device"].fill_null(-1).to_numpy(), return_inverse=True)
    _, stream = np.unique(gpu["stream"].fill_null(-1).to_numpy(), return_inverse=True)
    lane = stream * len(devices) + device
    row = gpu["launch"].fill_null(-1).to_numpy().astype(np.int64)
    order = np.lexsort((row, lane))
    key = lane[order] * (cpu.height + 2) + row[order] + 1
    before = np.searchsorted(key, lane[ended_by] * (cpu.height + 2) + launch + 1, side="left") - 1
    index = order[np.maximum(before, 0)]
    previous = np.where((before >= 0) & (lane[index] == lane[ended_by]), row[index], -1)
    # whose end came last before this work could start
    end = (gpu["ts"] + gpu["dur"]).to_numpy()
    by_end = np.argsort(end, kind="stable")
    latest = np.searchsorted(end[by_end], part.end[queued], side="right") - 1
    releaser = by_end[np.maximum(latest, 0)]
    elsewhere = (latest >= 0) & (lane[releaser] != lane[ended_by])
    elsewhere &= part.end[queued] - end[releaser] <= LATENCY_NS
    return np.where((wait > previous) & elsewhere, wait, -1)


def _next_work(a: Analysis, end: Ints) -> NDArray[np.int64]:
    """Return the row of gpu of the first work that starts at or after each instant, -1: none.

    Right after a gap that is the work that ended it; at the end of the used steps it is what the
    host was preparing then."""
    gpu = a.trace.gpu
    rows = np.flatnonzero(
        ((gpu["device"] == a.device_id) & (gpu["dur"] > 0)).fill_null(False).to_numpy()
    )
    ts = gpu["ts"].to_numpy()[rows]
    place = np.searchsorted(ts, end, side="left")
    index = np.minimum(place, len(rows) - 1)
    return np.where(place < len(rows), rows[index], -1) if len(rows) else np.full(len(end), -1)


def _frames(a: Analysis, host: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return each host row's user frame; -1 finds the last entry, which stands for no event."""
    return np.append(a.user_frame, np.int32(-1))[host]


def device_waits(a: Analysis) -> float | None:
    """Estimate how long a GPU idles in the run's mean step, ns: that step less the GPU's work in
    one. ``None``: the host computes the steps, or no window shows what the GPU does."""
    mean = None if a.recorded is None else a.recorded.mean
    if a.trains_on_host or a.device_id is None or mean is None:
        return None
    return max(0.0, mean - a.breakdown.busy.total / a.step_count)
