"""Host waits for the device: the awaited work, and the idle time that they leave on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.intervals import Ints, covered_length
from advisor.core.trace import BLOCKING_CALLS, Trace
from advisor.measure.device.copies import copies_blocking_host
from advisor.measure.host.names import map_names, name_matches
from advisor.measure.host.stacks import (
    climb_stack,
    frame_of,
    is_operator,
    nullable_rows,
    parent_rows,
    parse_frame,
)

if TYPE_CHECKING:
    from advisor.measure import Analysis

SYNC_CALLS = {"sync_device": "device", "sync_stream": "stream", "sync_event": "event"}
KINDS = ("device", "stream", "event", "memcpy")

MAX_IDLE_CALL_NS = 20_000
"""Maximum duration of a sync that did not wait, ns. In public A100, V100 and H100 traces, a sync
whose work is already done returns in 3 to 8 us."""

SYNCS_SCHEMA: dict[str, Any] = {
    "host": pl.Int32,  # row of trace.cpu: the runtime call
    "ts": pl.Int64,  # ns
    "dur": pl.Int64,  # ns
    "call": pl.String,  # its name
    "kind": pl.Enum(KINDS),
    "waited": pl.Int64,  # ns of the call during which the device was working
    "idle_ns": pl.Int64,  # ns that the device then idled because the host had been blocked
    "idle_ts": pl.Int64,  # end of the awaited work, ns; null without idle time
    "idle_end": pl.Int64,  # start of the thread's next device work, ns; null without idle time
    "op": pl.Int32,  # row of trace.cpu: the innermost operator around; null if none
    "cause": pl.String,  # aten::item, torch.cuda.synchronize, …
    "copy": pl.Int32,  # row of trace.gpu: the copy it waits for; null if none
    "line": pl.Int32,  # row of the user's Python frame; null if none
    "step": pl.Int32,
    "profiler": pl.Boolean,  # issued by the profiler itself at the end of its window
}

# Operators whose names show why the host needs a value from the device. The outermost one around a
# sync is its cause: aten::is_nonzero calls aten::item calls aten::_local_scalar_dense.
_SYNCING_OPS = (
    r"^aten::(?:item|is_nonzero|_local_scalar_dense|nonzero\w*|argwhere|where|\w*unique\w*"
    r"|masked_select|masked_scatter_?|index|index_put_?|_index_put_impl_|repeat_interleave"
    r"|bincount|histc|multinomial|equal|allclose|tensor_split|_pack_padded_sequence|_ctc_loss"
    r"|linalg_\w+|_linalg_\w+|cholesky\w*|to|_to_copy|copy_|_copy_from\w*)$"
)
_SYNCING_RANGES = r"^Optimizer\.|clip_grad|grad_scaler\.py\("
_PROFILER_FRAME = r"(?:^|/)torch/(?:autograd/)?profiler(?:/\w+)?\.py\("
_FUNCTION_OF_KIND = {
    "device": "torch.cuda.synchronize",
    "stream": "torch.cuda.Stream.synchronize",
    "event": "torch.cuda.Event.synchronize",
}


def find_syncs(a: Analysis) -> pl.DataFrame:
    """Find the host's waits for the device, with the columns of SYNCS_SCHEMA, ordered by ``ts``.

    There is one row for each synchronising runtime call that starts inside the used steps.
    ``idle_ns`` counts only if the call blocked the host, that is, if the awaited work ended after
    the call began. A call whose work is already done costs nothing, as does a call after which the
    thread launches nothing more. The idle time ends at the next release of the thread, so the waits
    of one thread never count an instant twice. Removing a sync lets the host run ahead by at most
    ``waited``, so ``waited`` limits the gain if it is below ``idle_ns``.

    ``copy`` is the copy between host and device that the thread launched last before the call and
    in the same operator. For a copy that blocked the host itself (kind ``memcpy``), it is that
    copy.

    A device sync waits for all work launched before. A stream sync waits for the last work launched
    before on the stream in ``cuda_sync`` rows, else on the stream that this thread used last. An
    event sync waits for the work in those rows, else the last work that ended during the call."""
    from advisor.measure.steps.steps import step_of

    trace = a.trace
    cpu = trace.cpu
    rows, kind, copy = _find_calls(trace)
    ts = cpu["ts"].to_numpy()[rows]
    selected = np.flatnonzero(covered_length(ts, ts + 1, a.spans) > 0)
    selected = selected[np.argsort(ts[selected], kind="stable")]
    rows, kind, copy, ts = rows[selected], kind[selected], copy[selected], ts[selected]
    dur = cpu["dur"].to_numpy()[rows]
    end = ts + dur
    work = _LaunchOrder.of(a)
    thread = cpu["thread"].to_numpy()
    parent, is_op = parent_rows(trace), is_operator(trace)
    op = climb_stack(parent, is_op, rows)
    copy = np.where(copy >= 0, copy, _find_copies_before(trace, work, rows, op))
    release = _find_releases(trace, work, rows, kind, copy, ts, end)
    next_start = work.start_of_next(rows, thread)
    profiler = np.isin(rows, profiler_syncs(trace))
    idle_start, idle_end = _find_idle_after(thread[rows], ts, release, next_start)
    idle_ns = covered_length(idle_start, idle_end, a.breakdown.idle)
    return pl.DataFrame(
        {
            "host": rows,
            "ts": ts,
            "dur": dur,
            "call": cpu["name"].gather(rows).cast(pl.String),
            "kind": pl.Series([KINDS[k] for k in kind.tolist()], dtype=pl.Enum(KINDS)),
            "waited": covered_length(ts, end, a.breakdown.busy),
            "idle_ns": idle_ns,
            "idle_ts": pl.Series(idle_start).set(pl.Series(idle_ns == 0), None),
            "idle_end": pl.Series(idle_end).set(pl.Series(idle_ns == 0), None),
            "op": nullable_rows(op),
            "cause": _name_causes(trace, rows, kind, op),
            "copy": nullable_rows(copy),
            "line": frame_of(a, pl.Series(rows)),
            "step": step_of(a.steps, ts),
            "profiler": profiler,
        },
        schema=SYNCS_SCHEMA,
        strict=False,
    )


def profiler_syncs(trace: Trace) -> NDArray[np.int64]:
    """Find device synchronisations that the profiler issues itself: rows of ``trace.cpu``.

    With Python stacks, they are the calls under the profiler's own frames. Without stacks, it is
    the last call of the trace if no device work is launched after it: nearly every trace ends with
    such a call (the profiler's ``__exit__`` calls ``torch.cuda.synchronize``)."""
    cpu = trace.cpu
    rows = np.flatnonzero((cpu["call"] == "sync_device").fill_null(False).to_numpy())
    if not len(rows):
        return rows
    is_python = (cpu["kind"] == "python").to_numpy()
    parent = parent_rows(trace)
    frames_around = climb_stack(parent, is_python, rows)
    is_profiler = np.zeros(len(rows), dtype=bool)
    if (frames_around >= 0).any():
        is_profiler_frame = is_python & name_matches(cpu["name"], _PROFILER_FRAME).to_numpy()
        is_profiler = climb_stack(parent, is_profiler_frame, rows) >= 0
    ts = cpu["ts"].to_numpy()
    launch = trace.gpu["launch"].drop_nulls().to_numpy()
    last = np.argmax(ts[rows])
    nothing_after = not len(launch) or ts[launch].max() < ts[rows[last]]
    if frames_around[last] < 0 and nothing_after:
        is_profiler[last] = True
    return rows[is_profiler]


class _LaunchOrder(NamedTuple):
    """Device work of the analysed device in the order of its launches.

    Rows of ``trace.cpu`` are ordered by (thread, start), so launch rows are in program order on
    each thread."""

    row: NDArray[np.int64]
    """Rows of ``trace.gpu`` with a known launch, ordered by launch row."""
    launch: NDArray[np.int64]
    start: Ints
    thread: NDArray[np.int32]
    by_time: NDArray[np.int64]
    """All rows of ``trace.gpu`` on the device, ordered by the time of their launch."""
    launched: Ints
    """Time of the launch of ``by_time``, or the start of the work if the launch is unknown."""
    end: Ints
    """End of ``by_time``."""

    @classmethod
    def of(cls, a: Analysis) -> _LaunchOrder:
        gpu, cpu = a.trace.gpu, a.trace.cpu
        rows = np.flatnonzero((gpu["device"] == (a.device_id or 0)).fill_null(False).to_numpy())
        launch = gpu["launch"].fill_null(-1).to_numpy()[rows].astype(np.int64)
        start = gpu["ts"].to_numpy()[rows]
        end = start + gpu["dur"].to_numpy()[rows]
        has_launch = launch >= 0
        launch_time = start.copy()
        launch_time[has_launch] = cpu["ts"].to_numpy()[launch[has_launch]]
        by_time = np.argsort(launch_time, kind="stable")
        order = np.flatnonzero(has_launch)[np.argsort(launch[has_launch], kind="stable")]
        return cls(
            rows[order],
            launch[order],
            start[order],
            cpu["thread"].to_numpy()[launch[order]],
            rows[by_time],
            launch_time[by_time],
            end[by_time],
        )

    def start_of_next(self, rows: NDArray[np.int64], thread: NDArray[np.int32]) -> Ints:
        """Return the start of the thread's next launched work after each host row, or -1."""
        if not len(self.row):
            return np.full(len(rows), -1, dtype=np.int64)
        position = np.searchsorted(self.launch, rows, side="right")
        index = np.minimum(position, len(self.row) - 1)
        is_valid = (position < len(self.row)) & (self.thread[index] == thread[rows])
        return np.where(is_valid, self.start[index], -1)

    def last_before(self, rows: NDArray[np.int64], thread: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return the row of ``trace.gpu`` that the thread last launched before each host row, or
        -1."""
        if not len(self.row):
            return np.full(len(rows), -1, dtype=np.int64)
        position = np.searchsorted(self.launch, rows, side="left") - 1
        index = np.maximum(position, 0)
        is_valid = (position >= 0) & (self.thread[index] == thread[rows])
        return np.where(is_valid, self.row[index], -1)


def _find_calls(trace: Trace) -> tuple[NDArray[np.int64], NDArray[np.int8], NDArray[np.int64]]:
    """Return host rows that wait, their kind (index of KINDS) and, for copies, the copy's row."""
    call = trace.cpu["call"]
    parts = [np.flatnonzero((call == name).fill_null(False).to_numpy()) for name in SYNC_CALLS]
    copies = np.flatnonzero(copies_blocking_host(trace))
    copying = trace.gpu["launch"].gather(copies).to_numpy().astype(np.int64)
    copying, first_index = np.unique(copying, return_index=True)
    rows = np.concatenate([*parts, copying])
    kind = np.repeat(
        np.arange(len(KINDS), dtype=np.int8), [len(part) for part in (*parts, copying)]
    )
    copy = np.full(len(rows), -1, dtype=np.int64)
    copy[kind == KINDS.index("memcpy")] = copies[first_index]
    return rows, kind, copy


def _find_copies_before(
    trace: Trace, work: _LaunchOrder, rows: NDArray[np.int64], op: NDArray[np.int32]
) -> NDArray[np.int64]:
    """Return the copy between host and device launched last in the same operator, or -1."""
    gpu = trace.gpu
    last_row = work.last_before(rows, trace.cpu["thread"].to_numpy())
    if not gpu.height or not len(rows):
        return last_row
    index = np.maximum(last_row, 0)
    is_copy = gpu["copy"].is_in(["HtoD", "DtoH"]).fill_null(False).to_numpy()[index]
    launch = gpu["launch"].fill_null(-1).to_numpy()[index].astype(np.int64)
    is_same_op = climb_stack(parent_rows(trace), is_operator(trace), launch) == op
    return np.where((last_row >= 0) & is_copy & is_same_op, last_row, -1)


def _find_releases(
    trace: Trace,
    work: _LaunchOrder,
    rows: NDArray[np.int64],
    kind: NDArray[np.int8],
    copy: NDArray[np.int64],
    ts: Ints,
    end: Ints,
) -> Ints:
    """Return the end of each call's awaited work, ns; -1 if it had ended before or is unknown."""
    gpu, cpu = trace.gpu, trace.cpu
    result = np.full(len(rows), -1, dtype=np.int64)
    if not len(work.by_time) or not len(rows):
        return result
    gpu_end = (gpu["ts"] + gpu["dur"]).to_numpy()
    is_memcpy = kind == KINDS.index("memcpy")
    result[is_memcpy] = gpu_end[copy[is_memcpy]]

    is_device_sync = kind == KINDS.index("device")
    latest = np.maximum.accumulate(work.end)
    before_index = np.searchsorted(work.launched, ts[is_device_sync], side="right") - 1
    result[is_device_sync] = np.where(before_index >= 0, latest[np.maximum(before_index, 0)], -1)

    # a stream: the one in cuda_sync rows, else the one this thread used last
    codes, stream_of = np.unique(gpu["stream"].to_numpy()[work.by_time], return_inverse=True)
    last_row = work.last_before(rows, cpu["thread"].to_numpy())
    stream = np.where(last_row >= 0, gpu["stream"].to_numpy()[np.maximum(last_row, 0)], -(1 << 62))
    launched_until = ts.copy()
    marks = recorded_waits(trace, rows)
    marked = marks["at"].to_numpy()
    is_recorded, has_event_time = np.zeros(len(rows), dtype=bool), np.zeros(len(rows), dtype=bool)
    is_recorded[marked], has_event_time[marked] = True, marks["recorded"].is_not_null().to_numpy()
    stream[marked] = marks["on"].to_numpy()
    launched_until[has_event_time] = marks["recorded"].drop_nulls().to_numpy()
    code_index = np.searchsorted(codes, stream)
    stream_index = np.minimum(code_index, len(codes) - 1)
    is_event_sync = kind == KINDS.index("event")
    is_usable = (codes[stream_index] == stream) & (kind == KINDS.index("stream"))
    is_usable |= (codes[stream_index] == stream) & is_event_sync & has_event_time
    # one sorted axis of (stream, launch time); the running maximum restarts with each stream
    low, stride = int(min(work.launched.min(), ts.min())), int(work.launched.max() + 2)
    stride = max(stride, int(work.end.max()) + 2, int(end.max()) + 2) - low
    key = stream_of * stride + (work.launched - low)
    order = np.argsort(key, kind="stable")
    latest = np.maximum.accumulate(stream_of[order] * stride + (work.end[order] - low))
    end_key = stream_index * stride + np.maximum(launched_until - low, 0)
    before_index = np.searchsorted(key[order], end_key, side="right") - 1
    position = np.maximum(before_index, 0)
    is_found = is_usable & (before_index >= 0) & (stream_of[order][position] == stream_index)
    result = np.where(is_found, latest[position] - stream_index * stride + low, result)

    # An event without a record, or a stream that was guessed wrong (its work outlasts the call, or
    # had ended before a call that did wait): the last work that ended during the call released it.
    has_waited = end - ts > MAX_IDLE_CALL_NS
    is_guessed = (
        ~is_memcpy & ~is_device_sync & ~is_recorded & has_waited & (~is_found | (result <= ts))
    )
    is_guessed |= ~is_memcpy & (result > end)
    ends = np.sort(work.end)
    before_index = np.searchsorted(ends, end, side="right") - 1
    result = np.where(
        is_guessed, np.where(before_index >= 0, ends[np.maximum(before_index, 0)], -1), result
    )
    return np.where(result > ts, np.minimum(result, end), -1)


def recorded_waits(trace: Trace, rows: NDArray[np.int64]) -> pl.DataFrame:
    """Read the ``cuda_sync`` rows of calls (rows of ``trace.cpu``) that wait for a stream or an
    event: ``at`` (index in ``rows``), ``kind``, ``on`` (the stream), ``recorded`` (ns, when the
    event was recorded; null for a stream, or if unknown)."""
    cpu = trace.cpu
    calls = pl.DataFrame({"correlation": cpu["correlation"].gather(rows)}).with_row_index("at")
    records = (
        cpu.lazy()
        .filter(pl.col("call") == "event_record", pl.col("correlation").is_not_null())
        .select(pl.col("correlation").alias("wait_correlation"), pl.col("ts").alias("recorded"))
        .unique("wait_correlation", keep="first")
    )
    waits = (
        trace.sync.lazy()
        .filter(pl.col("kind").is_in(["stream", "event"]), pl.col("correlation").is_not_null())
        .unique("correlation", keep="first")
        .join(records, on="wait_correlation", how="left")
        .select(
            "correlation",
            "kind",
            pl.when(pl.col("kind") == "stream").then("stream").otherwise("wait_stream").alias("on"),
            "recorded",
        )
    )
    joined = calls.lazy().join(waits, on="correlation", how="inner").collect()
    return joined.filter(pl.col("on").is_not_null()).sort("at")


def _find_idle_after(
    thread: NDArray[np.int32], ts: Ints, released: Ints, following: Ints
) -> tuple[Ints, Ints]:
    """Return intervals from each release to the thread's next work or next release, ns. They are
    empty if the host was not blocked, or the thread launched nothing more."""
    starts = np.zeros(len(ts), dtype=np.int64)
    ends = starts.copy()
    blocked = np.flatnonzero(released >= 0)
    if not len(blocked):
        return starts, ends
    order = blocked[np.lexsort((ts[blocked], thread[blocked]))]
    release = released[order]
    stop = np.where(following[order] >= 0, following[order], release)
    same_thread = thread[order][1:] == thread[order][:-1]
    stop[:-1] = np.where(same_thread, np.minimum(stop[:-1], release[1:]), stop[:-1])
    starts[order], ends[order] = release, np.maximum(stop, release)
    return starts, ends


def _name_causes(
    trace: Trace, rows: NDArray[np.int64], kind: NDArray[np.int8], op: NDArray[np.int32]
) -> pl.Series:
    """Name the cause of each wait: the outermost operator of _SYNCING_OPS, else the nearest
    optimizer, gradient clipping or scaler range, else the innermost operator, else the call."""
    cpu = trace.cpu
    if not len(rows):
        return pl.Series([], dtype=pl.String)
    parent = parent_rows(trace)
    is_op = is_operator(trace)
    syncing_op = climb_stack(
        parent, is_op & name_matches(cpu["name"], _SYNCING_OPS).to_numpy(), rows, top=True
    )
    is_range = ~is_op & (cpu["kind"] != "runtime").to_numpy()
    is_range &= name_matches(cpu["name"], _SYNCING_RANGES).to_numpy()
    range_row = climb_stack(parent, is_range, rows)
    row = np.where(syncing_op >= 0, syncing_op, np.where(range_row >= 0, range_row, op))
    names = map_names(cpu["name"].gather(np.maximum(row, 0)), _shorten_cause, pl.String)
    calls = cpu["name"].gather(rows).cast(pl.String)
    fallback = pl.Series(
        [
            _FUNCTION_OF_KIND.get(KINDS[kind_code], call)
            for kind_code, call in zip(kind.tolist(), calls, strict=True)
        ]
    )
    return names.zip_with(pl.Series(row >= 0), fallback)


def _shorten_cause(name: str) -> str:
    """Shorten a cause: drop a frame's line, and keep ``Optimizer.step#AdamW.step`` as it is."""
    frame = parse_frame(name)
    return name if frame is None else f"{frame.file}: {frame.function}"


ROUNDING_NS = 1_500
"""Maximum difference of timestamps in one trace from rounding to whole µs, ns."""
_MAX_CLOCK_DIFFERENCE_NS = 20_000
"""Maximum time from a call's end to the end of the work it waited for, ns, for any clocks."""
MIN_LONG_CALL_NS = 50_000
"""Minimum duration of a call that may have waited, ns."""
MAX_RETURN_NS = 20_000
"""Maximum time in which a call that waited returns, ns (public A100, V100, H100 and MI300 traces: 3
to 12 µs)."""
MAX_LATE_SHARE = 0.02
"""Maximum additional return time as a share of the call's duration: the host is busy waking up."""
MIN_SIMILAR_CALLS, _MIN_SIMILAR_SHARE = 3, 0.6
"""Number of long calls of one name at which this share of them must end with work of a stream."""
MIN_SINGLE_CALL_NS = 1_000_000
"""Minimum duration of a call whose name has fewer long calls, ns. The last work of a stream ends
near the return of such a call by chance one time in fifty."""


def clock_tolerance_ns(trace: Trace) -> int:
    """Return how long after a call's return the awaited work may end by the trace's clocks, ns. It
    is the 95th percentile of late ends (:func:`work_past_return_ns`), at least ``ROUNDING_NS``.
    """
    excess = work_past_return_ns(trace, np.arange(trace.cpu.height))
    excess = excess[excess > 0]
    return max(ROUNDING_NS, int(np.quantile(excess, 0.95))) if len(excess) else ROUNDING_NS


def work_past_return_ns(trace: Trace, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Measure how long after the return of each call (``rows`` of ``trace.cpu``) the awaited device
    work ends in the trace, ns. 0 if it ended before, or it is uncertain that the call waited.

    Calls that certainly waited are blocking copies to the host, and waits for a stream that the
    trace names, which end with the last work launched on it before. If the work ends later, the two
    clocks of the trace disagree: up to 4 µs with AMD's profiler, 7 µs with Nsight Systems."""
    cpu, gpu = trace.cpu, trace.gpu
    calls = cpu.select("ts", "call", until=pl.col("ts") + pl.col("dur"))[rows].with_row_index("at")
    work = gpu.filter(pl.col("launch").is_not_null()).select(
        "copy", "launch", on="stream", until=pl.col("ts") + pl.col("dur")
    )
    work = work.with_columns(launched=cpu["ts"].gather(work["launch"])).sort("launched")
    copy_ends = work.filter(pl.col("copy") == "DtoH").group_by("launch").agg(pl.col("until").max())
    copy_calls = (
        calls.with_columns(launch=pl.Series(rows, dtype=copy_ends["launch"].dtype))
        .filter(pl.col("call") == "memcpy_blocking")
        .join(copy_ends, on="launch", suffix="_work")
    )
    waits = recorded_waits(trace, rows).filter(pl.col("kind") == "stream").select("at", "on")
    stream_calls = (
        calls.join(waits.with_columns(pl.col("at").cast(calls["at"].dtype)), on="at")
        .filter(pl.col("call") == "sync_stream")
        .sort("ts")
        .join_asof(
            work.select("on", "launched", until_work="until"),
            left_on="ts",
            right_on="launched",
            by="on",
            check_sortedness=False,
        )
    )
    result = np.zeros(len(rows), dtype=np.int64)
    for part in (copy_calls, stream_calls):
        excess = part.select("at", over=pl.col("until_work") - pl.col("until"))
        excess = excess.filter(pl.col("over").is_between(1, _MAX_CLOCK_DIFFERENCE_NS - 1))
        result[excess["at"].to_numpy()] = excess["over"].to_numpy()
    return result


def calls_ended_by_stream(trace: Trace) -> NDArray[np.int64]:
    """Find long runtime calls that wait although their names do not say so: rows of ``trace.cpu``.
    They return when the last work of a stream that was launched before them ends."""
    cpu, gpu = trace.cpu, trace.gpu
    is_long = (cpu["kind"] == "runtime") & (cpu["dur"] >= MIN_LONG_CALL_NS)
    is_long &= ~cpu["call"].is_in(BLOCKING_CALLS).fill_null(False)
    rows = np.flatnonzero(is_long.to_numpy())
    launch = gpu["launch"].fill_null(-1).to_numpy().astype(np.int64)
    has_launch = launch >= 0
    if not len(rows) or not has_launch.any():
        return rows[:0]
    start = cpu["ts"].to_numpy()[rows]
    dur = cpu["dur"].to_numpy()[rows]
    ends_with_work = np.zeros(len(rows), dtype=bool)
    max_late = np.maximum(MAX_RETURN_NS, MAX_LATE_SHARE * dur)
    tolerance = clock_tolerance_ns(trace)
    launched, ends = cpu["ts"].to_numpy(), (gpu["ts"] + gpu["dur"]).to_numpy()
    streams = gpu.select(pl.struct("device", "stream").rank("dense"))["device"].to_numpy()
    for stream in np.unique(streams[has_launch]):  # a handful of streams
        stream_rows = np.flatnonzero(has_launch & (streams == stream))
        stream_rows = stream_rows[np.argsort(launched[launch[stream_rows]], kind="stable")]
        latest_end = np.maximum.accumulate(ends[stream_rows])
        last_before = np.searchsorted(launched[launch[stream_rows]], start, side="left") - 1
        awaited_end = np.where(last_before >= 0, latest_end[np.maximum(last_before, 0)], -1)
        # with CUDA_LAUNCH_BLOCKING a launch waits for its own work, which is most of its time
        own_work = np.minimum(last_before + 1, len(stream_rows) - 1)
        work_ns = gpu["dur"].to_numpy()[stream_rows[own_work]]
        awaited_end = np.where(
            (launch[stream_rows[own_work]] == rows) & (2 * work_ns > dur),
            latest_end[own_work],
            awaited_end,
        )
        delay = start + dur - awaited_end
        ends_with_work |= (
            (awaited_end > start + dur // 2) & (delay >= -tolerance) & (delay <= max_late)
        )
    names = cpu["name"].gather(rows).to_physical().to_numpy()
    _, name_index, count = np.unique(names, return_inverse=True, return_counts=True)
    ending_share = np.bincount(name_index, weights=ends_with_work)[name_index] / count[name_index]
    is_certain = np.where(
        count[name_index] >= MIN_SIMILAR_CALLS,
        ending_share >= _MIN_SIMILAR_SHARE,
        dur >= MIN_SINGLE_CALL_NS,
    )
    return rows[ends_with_work & is_certain]
