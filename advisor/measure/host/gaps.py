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
from advisor.measure.steps.timeline import CLASS_CODE, CLASSES, LOADING, HostPieces, cut_at_points

if TYPE_CHECKING:
    from advisor.measure import Analysis

HOST_CAUSES = ("dispatch", "python", "unknown")
"""Causes of idle time in which the host computes or does unrecorded work."""
CAUSES = (
    "loader",  # waiting for the DataLoader
    "sync",  # blocked in a synchronising call
    "copy",  # in a copy that blocked the host
    "dispatch",  # in operators, on the way to the launch
    "python",  # in Python frames
    "communication",  # in calls of MPI
    "host_code",  # in code that CPU samples show
    "launch",  # in launch calls, and in the latency between them and the start of the work
    "compile",  # starting CUDA, loading code, compiling, capturing a graph: work of a first call
    "allocation",  # cudaMalloc, cudaFree, pinned memory
    "profiler",  # the profiler itself
    "stream",  # launched, but waiting for an event of another stream
    "device",  # launched, but waiting for an event of another device of this process
    "other_thread",  # waiting for another thread that recorded nothing
    "end",  # after the last device work of the trace, in its last sync or in nothing recorded
    "unknown",  # Python without stacks, no recorded event, launched long ago for no visible reason
)
Cause = pl.Enum(CAUSES)

GAPS_SCHEMA: dict[str, Any] = {
    "ts": pl.Int64,  # ns
    "dur": pl.Int64,  # ns
    "step": pl.Int32,
    "cause": Cause,
    "thread": pl.Int32,  # row of trace.threads; null if none
    "host": pl.Int32,  # row of trace.cpu that is blamed; null if none
    "line": pl.Int32,  # row of the user's innermost frame around it; null without stacks
    "next": pl.Int32,  # row of trace.gpu that ended the gap; null at the end of the window
    "gap": pl.Int32,  # number of the gap that the piece belongs to
}

LATENCY_NS = 50_000
"""Maximum delay of ready work for which the launch itself is blamed, ns. The delay begins with the
launch call's return, or the end of the previous work. Measured between queued work: at most 11 us
(A100), 12 us (A100, NCCL) and 16 us (V100, including graph launches). A longer wait needs a
recorded reason, and without one it is unknown."""
MAX_FOLLOWED_THREADS = 4
"""Maximum number of threads that are searched for a cause while the launching thread did nothing
recorded: the main thread and the threads that launch the most. Autograd has one thread per device;
more threads only cost time."""

_CAUSE_CODES = {name: code for code, name in enumerate(CAUSES)}
_CAUSE_OF_CLASS = np.array(
    [
        _CAUSE_CODES["end"] if name == "drain" else _CAUSE_CODES.get(name, _CAUSE_CODES["unknown"])
        for name in CLASSES
    ],
    dtype=np.int8,
)
_UNEXPLAINED = (CLASS_CODE["unknown"], CLASS_CODE["unrecorded"], CLASS_CODE["other_thread"])


class _Blame(NamedTuple):
    """Pieces of gaps: index of the interval, start and end (ns), cause, thread and host row."""

    interval: NDArray[np.int64]
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
    """Find the device's idle gaps and their causes, clipped to ``spans``, which add up to the idle
    time. A gap with several causes is split into consecutive pieces. The columns are those of
    GAPS_SCHEMA, ordered by ``ts``.

    A gap is blamed on the thread that launched the work which ended it. Until that launch began,
    each piece has the class of the thread's activity (``timeline.CLASSES``), or if nothing was
    recorded, the class of what the main thread or another launching thread was doing then. From the
    launch on the cause is ``launch``, or ``stream`` (``device``) if a stream had to wait for an
    event before this launch and work of another stream (device) ended last. If the launched work
    waits longer than LATENCY_NS without this reason, the cause is ``unknown``. Pieces under
    ``overhead`` rows of the profiler are ``profiler`` (or ``compile`` if they load code). Without a
    next launch, the main thread gives the cause, and unexplained time is the ``end``.

    For ``unknown`` and ``end``, ``host`` is the innermost annotation around, if any. ``line`` has
    no fallback; for the backward pass see ``Analysis.location``."""
    idle = a.breakdown.idle
    if a.device_id is None or not len(idle):
        return pl.DataFrame(schema=GAPS_SCHEMA)
    used = a.steps.used
    step_spans = Intervals(used["ts"].to_numpy(), used["end"].to_numpy())
    part = intersect(idle, step_spans)
    gap = np.searchsorted(idle.start, part.start, side="right") - 1
    ended_by = _find_next_work(a, idle.end)[gap]
    blame = _find_causes(a, part, ended_by)
    is_first = np.ones(len(blame.interval), dtype=bool)
    is_first[1:] = blame.interval[1:] != blame.interval[:-1]
    for column in (blame.cause, blame.thread, blame.host):
        is_first[1:] |= column[1:] != column[:-1]
    first = np.flatnonzero(is_first)
    last = np.append(first[1:], len(is_first)) - 1
    host, interval = blame.host[first], blame.interval[first]
    return pl.DataFrame(
        {
            "ts": blame.start[first],
            "dur": blame.end[last] - blame.start[first],
            "step": step_of(a.steps, blame.start[first]),
            "cause": pl.Series(CAUSES, dtype=Cause).gather(blame.cause[first]),
            "thread": nullable_rows(blame.thread[first]),
            "host": nullable_rows(host),
            # row -1 selects the last entry, which means no event
            "line": nullable_rows(np.append(a.user_frame, np.int32(-1))[host]),
            "next": nullable_rows(ended_by[interval]),
            "gap": gap[interval],
        },
        schema=GAPS_SCHEMA,
        strict=False,
    )


def queued_idle_ns(a: Analysis) -> int:
    """Return the idle time for no recorded reason although work is queued for the device (its
    launch has returned), ns."""
    kind = a.trace.cpu["kind"].gather(a.gaps["host"])
    is_queued = (a.gaps["cause"] == "unknown") & (kind == "runtime").fill_null(False)
    return int(a.gaps["dur"].filter(is_queued).sum())


def is_outside_operators(a: Analysis) -> bool:
    """Return whether idle time of unknown cause is mostly host code outside recorded operators."""
    unknown = int(a.gaps["dur"].filter(a.gaps["cause"] == "unknown").sum())
    return bool((a.trace.cpu["kind"] == "op").any()) and queued_idle_ns(a) < unknown / 2


def operators_after_gaps(a: Analysis) -> pl.DataFrame:
    """Return the outermost aten operators that launched the work after idle time outside operators:
    ``name`` (null if launched by none), ``dur`` (sum of the gaps, ns) and ``count`` of the gaps,
    longest time first."""
    gaps = a.gaps.filter(pl.col("cause") == "unknown")
    launch = a.trace.gpu["launch"].gather(gaps["next"])
    top = a.outermost_aten[launch.fill_null(0).to_numpy()] if gaps.height else np.zeros(0, int)
    top = np.where(launch.is_null().to_numpy(), -1, top)
    name = a.trace.cpu["name"].gather(nullable_rows(top.astype(np.int32))).cast(pl.String)
    table = gaps.select("dur", "gap", name=name).group_by("name")
    return table.agg(pl.col("dur").sum(), count=pl.col("gap").n_unique()).sort(
        "dur", "name", descending=[True, False]
    )


def _find_causes(a: Analysis, part: Intervals, ended_by: NDArray[np.int64]) -> _Blame:
    cpu = a.trace.cpu
    count = len(part)
    launch = np.full(count, -1, dtype=np.int64)
    if a.trace.gpu.height:
        row = a.trace.gpu["launch"].fill_null(-1).to_numpy()[np.maximum(ended_by, 0)]
        launch = np.where(ended_by >= 0, row, -1)
    has_launch = launch >= 0
    index = np.maximum(launch, 0)
    main = a.trace.main_thread
    thread = np.full(count, -1, dtype=np.int32)
    call_start = np.full(count, np.iinfo(np.int64).max)
    call_end = call_start.copy()
    if cpu.height:
        ts = cpu["ts"].to_numpy()
        thread = np.where(has_launch, cpu["thread"].to_numpy()[index], -1).astype(np.int32)
        call_start = np.where(has_launch, ts[index], call_start)
        call_end = np.where(has_launch, ts[index] + cpu["dur"].to_numpy()[index], call_end)
    is_at_end = ended_by < 0
    if main is not None:
        thread[is_at_end] = main
    # until the launch call returned: the thread's activity, including the call itself
    host_end = np.minimum(np.maximum(call_end, part.start), part.end)
    host_side = _follow_threads(a, a.timeline.pieces_within(thread, part.start, host_end), thread)
    host_side = _blame_first_calls(a, _blame_overhead(a, host_side))
    # afterwards: the work is queued, but the device does not run it yet
    queued = np.flatnonzero(host_end < part.end)
    is_late = part.end[queued] - host_end[queued] > LATENCY_NS
    cause = np.where(is_late, _CAUSE_CODES["unknown"], _CAUSE_CODES["launch"]).astype(np.int8)
    waits, of_device = _find_stream_waits(a, part, queued, ended_by[queued], launch[queued])
    cause[waits >= 0] = _CAUSE_CODES["stream"]
    cause[of_device] = _CAUSE_CODES["device"]
    blamed_row = np.where(waits >= 0, waits, launch[queued]).astype(np.int32)
    blame = host_side.join(
        _Blame(queued, host_end[queued], part.end[queued], cause, thread[queued], blamed_row)
    )
    is_unexplained_end = is_at_end[blame.interval] & (blame.cause == _CAUSE_CODES["unknown"])
    blame.cause[is_unexplained_end] = _CAUSE_CODES["end"]
    return blame.take(np.argsort(blame.start, kind="stable"))


def _follow_threads(a: Analysis, pieces: HostPieces, thread: NDArray[np.int32]) -> _Blame:
    """Find the causes of the pieces, from other threads if their own does not explain them."""
    blame = _Blame(
        pieces.interval,
        pieces.start,
        pieces.end,
        _CAUSE_OF_CLASS[pieces.code],
        thread[pieces.interval].astype(np.int32),
        pieces.row,
    )
    is_unexplained = np.isin(pieces.code, _UNEXPLAINED)
    # a loop over at most MAX_FOLLOWED_THREADS threads, each only for the pieces still unexplained
    for other in _launching_threads(a):
        rows = np.flatnonzero(is_unexplained & (blame.thread != other) & (blame.thread >= 0))
        if not len(rows):
            continue
        other_pieces = a.timeline.pieces_within(
            np.full(len(rows), other), blame.start[rows], blame.end[rows]
        )
        is_explained = ~np.isin(other_pieces.code, _UNEXPLAINED)
        if not is_explained.any():
            continue
        is_kept = np.ones(len(is_unexplained), dtype=bool)
        is_kept[rows] = False
        original = blame.take(rows[other_pieces.interval])
        explained = _Blame(
            original.interval,
            other_pieces.start,
            other_pieces.end,
            np.where(is_explained, _CAUSE_OF_CLASS[other_pieces.code], original.cause).astype(
                np.int8
            ),
            np.where(is_explained, other, original.thread).astype(np.int32),
            np.where(is_explained, other_pieces.row, original.host).astype(np.int32),
        )
        blame = blame.take(np.flatnonzero(is_kept)).join(explained)
        is_unexplained = np.concatenate([is_unexplained[is_kept], ~is_explained])
    return blame


def _launching_threads(a: Analysis) -> list[int]:
    """List the main thread, then the threads that launch the most work of the analysed device."""
    gpu, cpu = a.trace.gpu, a.trace.cpu
    launch = gpu["launch"].filter((gpu["device"] == a.device_id) & gpu["launch"].is_not_null())
    counts = np.bincount(cpu["thread"].gather(launch).to_numpy()) if len(launch) else np.zeros(0)
    order = [int(thread) for thread in np.argsort(-counts, kind="stable") if counts[thread]]
    main = a.trace.main_thread
    leading = [] if main is None else [main]
    return [*leading, *(thread for thread in order if thread != main)][:MAX_FOLLOWED_THREADS]


def _blame_overhead(a: Analysis, blame: _Blame) -> _Blame:
    """Blame ``overhead`` rows for the time under them.

    These rows do not name their thread. Loading code happens on the thread that needs it, so it
    explains everything except a wait for data or for another thread. The profiler's buffers are
    handled inside CUDA calls, or on a separate thread, where they delay nothing."""
    cpu = a.trace.cpu
    rows = np.flatnonzero((cpu["kind"] == "overhead").to_numpy())
    if not len(rows) or not len(blame.interval):
        return blame
    is_loading = cpu["name"].gather(rows).cast(pl.String).str.contains(LOADING).to_numpy()
    ts = cpu["ts"].to_numpy()[rows]
    end = ts + cpu["dur"].to_numpy()[rows]
    calls = ("launch", "dispatch", "copy", "allocation", "sync")
    for is_chosen, cause, replaced in (
        (is_loading, "compile", (*calls, "python", "unknown")),
        (~is_loading, "profiler", calls),
    ):
        blame = _blame_rows(blame, rows[is_chosen], ts[is_chosen], end[is_chosen], cause, replaced)
    return blame


def _blame_first_calls(a: Analysis, blame: _Blame) -> _Blame:
    """Blame time in costly first calls on compiling. They load, search or compile, once
    (``step_differences.py``) or for each new shape (``new_shapes.py``)."""
    calls = first_calls(a)
    ts = calls["ts"].to_numpy()
    end = ts + calls["dur"].to_numpy()
    return _blame_rows(blame, calls["host"].to_numpy(), ts, end, "compile", ONE_OFF)


def _blame_rows(
    blame: _Blame, rows: Ints, ts: Ints, end: Ints, cause: str, replaced: tuple[str, ...]
) -> _Blame:
    """Set ``cause`` for pieces under host rows [ts, end) whose present cause is in ``replaced``."""
    spans = union(ts, end)
    if not len(spans) or not len(blame.interval):
        return blame
    # cut at both ends of each span; the parts after a span's start are inside it
    low = min(int(blame.start.min()), int(spans.start[0])) - 1
    cuts = np.concatenate([[low], np.stack([spans.start, spans.end], axis=1).ravel()])
    piece, point, start, finish = cut_at_points(cuts, blame.start, blame.end)
    blame = blame.take(piece)
    is_blamed = (point % 2 == 1) & np.isin(blame.cause, [_CAUSE_CODES[name] for name in replaced])
    order = np.argsort(ts, kind="stable")
    blamed_row = rows[order[np.maximum(np.searchsorted(ts[order], start, side="right") - 1, 0)]]
    return blame._replace(
        start=start,
        end=finish,
        cause=np.where(is_blamed, _CAUSE_CODES[cause], blame.cause).astype(np.int8),
        host=np.where(is_blamed, blamed_row, blame.host).astype(np.int32),
    )


def _find_stream_waits(
    a: Analysis,
    part: Intervals,
    queued: NDArray[np.int64],
    ended_by: NDArray[np.int64],
    launch: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Find the ``cudaStreamWaitEvent`` that delayed queued work: its host row, or -1, and whether
    the work waited for another device.

    It delayed the work if the thread called it after its previous launch on the work's stream, and
    the device work that ended last before the gap's end ran on another stream or device and ended
    at most LATENCY_NS before the work began. For another device, any thread may have called it:
    autograd has one per device."""
    gpu, cpu = a.trace.gpu, a.trace.cpu
    no_wait = np.full(len(queued), -1, dtype=np.int64), np.zeros(len(queued), dtype=bool)
    wait_rows = np.flatnonzero((cpu["call"] == "stream_wait").fill_null(False).to_numpy())
    if not len(wait_rows) or not len(queued):
        return no_wait
    wait_index = np.searchsorted(wait_rows, launch) - 1
    wait = np.where(wait_index >= 0, wait_rows[np.maximum(wait_index, 0)], -1)
    thread = cpu["thread"].to_numpy()
    is_own_call = (wait >= 0) & (thread[np.maximum(wait, 0)] == thread[launch])
    # previous launch on the same stream of the same device
    devices, device = np.unique(gpu["device"].fill_null(-1).to_numpy(), return_inverse=True)
    _, stream = np.unique(gpu["stream"].fill_null(-1).to_numpy(), return_inverse=True)
    lane = stream * len(devices) + device
    row = gpu["launch"].fill_null(-1).to_numpy().astype(np.int64)
    order = np.lexsort((row, lane))
    key = lane[order] * (cpu.height + 2) + row[order] + 1
    previous_index = (
        np.searchsorted(key, lane[ended_by] * (cpu.height + 2) + launch + 1, side="left") - 1
    )
    index = order[np.maximum(previous_index, 0)]
    previous = np.where((previous_index >= 0) & (lane[index] == lane[ended_by]), row[index], -1)
    # the work that ended last before this work could start
    end = (gpu["ts"] + gpu["dur"]).to_numpy()
    by_end = np.argsort(end, kind="stable")
    latest = np.searchsorted(end[by_end], part.end[queued], side="right") - 1
    releaser = by_end[np.maximum(latest, 0)]
    is_elsewhere = (latest >= 0) & (lane[releaser] != lane[ended_by])
    is_elsewhere &= part.end[queued] - end[releaser] <= LATENCY_NS
    is_other_device = is_elsewhere & (device[releaser] != device[ended_by])
    delayed = (wait > previous) & is_elsewhere & (is_own_call | is_other_device)
    return np.where(delayed, wait, -1), delayed & is_other_device


def _find_next_work(a: Analysis, end: Ints) -> NDArray[np.int64]:
    """Return the row of ``trace.gpu`` of the first work that starts at or after each instant, or
    -1.

    Directly after a gap, it is the work that ended the gap. At the end of the used steps, it is the
    work that the host was preparing."""
    gpu = a.trace.gpu
    rows = np.flatnonzero(
        ((gpu["device"] == a.device_id) & (gpu["dur"] > 0)).fill_null(False).to_numpy()
    )
    ts = gpu["ts"].to_numpy()[rows]
    position = np.searchsorted(ts, end, side="left")
    index = np.minimum(position, len(rows) - 1)
    return np.where(position < len(rows), rows[index], -1) if len(rows) else np.full(len(end), -1)


def device_waits(a: Analysis) -> float | None:
    """Estimate how long a GPU idles in the run's mean step, ns: the step minus the GPU's work per
    step. ``None`` if the host computes the steps, or no window shows the GPU's work."""
    mean = None if a.run_steps is None else a.run_steps.mean
    if a.trains_on_host or a.device_id is None or mean is None:
        return None
    return max(0.0, mean - a.breakdown.busy.total / a.step_count)
