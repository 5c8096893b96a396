"""Host waits for the device: the work waited for, and the bubble left on the device."""

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

IDLE_CALL_NS = 20_000
"""Duration from which a sync did wait, ns: one that finds its work done returns in 3 to 8 us in
public A100, V100 and H100 traces."""

SYNCS_SCHEMA: dict[str, Any] = {
    "host": pl.Int32,  # row of trace.cpu: the runtime call
    "ts": pl.Int64,  # ns
    "dur": pl.Int64,  # ns
    "call": pl.String,  # its name
    "kind": pl.Enum(KINDS),
    "waited": pl.Int64,  # ns of the call during which the device was working
    "bubble": pl.Int64,  # ns the device then idled because the host had been held
    "bubble_ts": pl.Int64,  # from the end of the awaited work, ns …
    "bubble_end": pl.Int64,  # … to the thread's next device work, ns; null: no bubble
    "op": pl.Int32,  # row of trace.cpu: the innermost operator around; null: none
    "cause": pl.String,  # aten::item, torch.cuda.synchronize, …
    "copy": pl.Int32,  # row of trace.gpu: the copy it waits for; null: none
    "line": pl.Int32,  # row of the user's Python frame; null: none
    "step": pl.Int32,
    "profiler": pl.Boolean,  # issued by the profiler itself at the end of its window
}

# Operators that say by their name why the host needs a value of the device. The outermost one
# around a sync is its cause: aten::is_nonzero calls aten::item calls aten::_local_scalar_dense.
_TELLING = (
    r"^aten::(?:item|is_nonzero|_local_scalar_dense|nonzero\w*|argwhere|where|\w*unique\w*"
    r"|masked_select|masked_scatter_?|index|index_put_?|_index_put_impl_|repeat_interleave"
    r"|bincount|histc|multinomial|equal|allclose|tensor_split|_pack_padded_sequence|_ctc_loss"
    r"|linalg_\w+|_linalg_\w+|cholesky\w*|to|_to_copy|copy_|_copy_from\w*)$"
)
_TELLING_RANGE = r"^Optimizer\.|clip_grad|grad_scaler\.py\("
_PROFILER_FRAME = r"(?:^|/)torch/(?:autograd/)?profiler(?:/\w+)?\.py\("
_NO_OP = {
    "device": "torch.cuda.synchronize",
    "stream": "torch.cuda.Stream.synchronize",
    "event": "torch.cuda.Event.synchronize",
}


def find_syncs(a: Analysis) -> pl.DataFrame:
    """Find the host's waits for the device, a row a synchronising runtime call inside ``spans``;
    the columns are those of SYNCS_SCHEMA, ordered by ``ts``.

    One row for each call that starts inside the used steps. ``bubble`` counts only when the call
    held the host, that is when the work it waited for ended after the call began; a call that finds
    its work done costs nothing, and so does one after which the thread launches nothing any more.
    It ends where the next sync of the thread takes over, so the bubbles of one thread never count
    an instant twice. Removing a sync lets the host run ahead by at most ``waited``, so that is a
    bound of the gain where it is below ``bubble``.

    ``copy`` is the copy between host and device that the thread launched last before the call and
    in the same operator; a copy that held the host itself (kind ``memcpy``) is its own.

    The awaited work is: of a device, all work launched before; of a stream, the last work launched
    on it before (the stream as ``cuda_sync`` rows tell it, else the one this thread used last); of
    an event, as those rows tell it, else the last work that ended during the call."""
    from advisor.measure.steps.steps import step_of

    trace = a.trace
    cpu = trace.cpu
    rows, kind, copy = _calls(trace)
    ts = cpu["ts"].to_numpy()[rows]
    chosen = np.flatnonzero(covered_length(ts, ts + 1, a.spans) > 0)
    chosen = chosen[np.argsort(ts[chosen], kind="stable")]
    rows, kind, copy, ts = rows[chosen], kind[chosen], copy[chosen], ts[chosen]
    dur = cpu["dur"].to_numpy()[rows]
    end = ts + dur
    work = _LaunchOrder.of(a)
    thread = cpu["thread"].to_numpy()
    parent, is_op = parent_rows(trace), is_operator(trace)
    op = climb_stack(parent, is_op, rows)
    copy = np.where(copy >= 0, copy, _copy_before(trace, work, rows, op))
    released = _released(trace, work, rows, kind, copy, ts, end)
    following = work.start_of_next(rows, thread)
    profiler = np.isin(rows, profiler_syncs(trace))
    begin, until = _bubbles(thread[rows], ts, released, following)
    bubble = covered_length(begin, until, a.breakdown.idle)
    return pl.DataFrame(
        {
            "host": rows,
            "ts": ts,
            "dur": dur,
            "call": cpu["name"].gather(rows).cast(pl.String),
            "kind": pl.Series([KINDS[k] for k in kind.tolist()], dtype=pl.Enum(KINDS)),
            "waited": covered_length(ts, end, a.breakdown.busy),
            "bubble": bubble,
            "bubble_ts": pl.Series(begin).set(pl.Series(bubble == 0), None),
            "bubble_end": pl.Series(until).set(pl.Series(bubble == 0), None),
            "op": nullable_rows(op),
            "cause": _causes(trace, rows, kind, op),
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

    With Python stacks, those under the profiler's own frames. Without, the last one of the trace
    when no device work is launched after it: nearly every trace ends with one (the profiler's
    ``__exit__`` calls ``torch.cuda.synchronize``)."""
    cpu = trace.cpu
    rows = np.flatnonzero((cpu["call"] == "sync_device").fill_null(False).to_numpy())
    if not len(rows):
        return rows
    python = (cpu["kind"] == "python").to_numpy()
    parent = parent_rows(trace)
    around = climb_stack(parent, python, rows)
    own = np.zeros(len(rows), dtype=bool)
    if (around >= 0).any():
        frames = python & name_matches(cpu["name"], _PROFILER_FRAME).to_numpy()
        own = climb_stack(parent, frames, rows) >= 0
    ts = cpu["ts"].to_numpy()
    launch = trace.gpu["launch"].drop_nulls().to_numpy()
    last = np.argmax(ts[rows])
    nothing_after = not len(launch) or ts[launch].max() < ts[rows[last]]
    if around[last] < 0 and nothing_after:
        own[last] = True
    return rows[own]


class _LaunchOrder(NamedTuple):
    """Device work of the analysed device in the order of its launches.

    Rows of ``trace.cpu`` are ordered by (thread, start), so sorting by launch row is program
    order on each thread."""

    row: NDArray[np.int64]
    """Rows of ``trace.gpu`` with a known launch, ordered by launch row."""
    launch: NDArray[np.int64]
    start: Ints
    thread: NDArray[np.int32]
    by_time: NDArray[np.int64]
    """All rows of ``trace.gpu`` on the device, ordered by the time of their launch."""
    launched: Ints
    """Time of the launch of ``by_time``; the start of the work itself where it is not known."""
    end: Ints
    """End of ``by_time``."""

    @classmethod
    def of(cls, a: Analysis) -> _LaunchOrder:
        gpu, cpu = a.trace.gpu, a.trace.cpu
        own = np.flatnonzero((gpu["device"] == (a.device_id or 0)).fill_null(False).to_numpy())
        launch = gpu["launch"].fill_null(-1).to_numpy()[own].astype(np.int64)
        start = gpu["ts"].to_numpy()[own]
        end = start + gpu["dur"].to_numpy()[own]
        known = launch >= 0
        moment = start.copy()
        moment[known] = cpu["ts"].to_numpy()[launch[known]]
        by_time = np.argsort(moment, kind="stable")
        order = np.flatnonzero(known)[np.argsort(launch[known], kind="stable")]
        return cls(
            own[order],
            launch[order],
            start[order],
            cpu["thread"].to_numpy()[launch[order]],
            own[by_time],
            moment[by_time],
            end[by_time],
        )

    def start_of_next(self, rows: NDArray[np.int64], thread: NDArray[np.int32]) -> Ints:
        """Return the start of the thread's next launched work after each host row, else -1."""
        if not len(self.row):
            return np.full(len(rows), -1, dtype=np.int64)
        place = np.searchsorted(self.launch, rows, side="right")
        index = np.minimum(place, len(self.row) - 1)
        result = (place < len(self.row)) & (self.thread[index] == thread[rows])
        return np.where(result, self.start[index], -1)

    def last_before(self, rows: NDArray[np.int64], thread: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return the row of gpu last launched by the thread before each host row, else -1."""
        if not len(self.row):
            return np.full(len(rows), -1, dtype=np.int64)
        place = np.searchsorted(self.launch, rows, side="left") - 1
        index = np.maximum(place, 0)
        result = (place >= 0) & (self.thread[index] == thread[rows])
        return np.where(result, self.row[index], -1)


def _calls(trace: Trace) -> tuple[NDArray[np.int64], NDArray[np.int8], NDArray[np.int64]]:
    """Return host rows that wait, their kind (index of KINDS) and, for copies, the copy's row."""
    call = trace.cpu["call"]
    parts = [np.flatnonzero((call == name).fill_null(False).to_numpy()) for name in SYNC_CALLS]
    copies = np.flatnonzero(copies_blocking_host(trace))
    held = trace.gpu["launch"].gather(copies).to_numpy().astype(np.int64)
    held, first = np.unique(held, return_index=True)
    rows = np.concatenate([*parts, held])
    kind = np.repeat(np.arange(len(KINDS), dtype=np.int8), [len(p) for p in (*parts, held)])
    copy = np.full(len(rows), -1, dtype=np.int64)
    copy[kind == KINDS.index("memcpy")] = copies[first]
    return rows, kind, copy


def _copy_before(
    trace: Trace, work: _LaunchOrder, rows: NDArray[np.int64], op: NDArray[np.int32]
) -> NDArray[np.int64]:
    """Return the copy between host and device launched last, in the same operator; else -1."""
    gpu = trace.gpu
    last = work.last_before(rows, trace.cpu["thread"].to_numpy())
    if not gpu.height or not len(rows):
        return last
    index = np.maximum(last, 0)
    is_copy = gpu["copy"].is_in(["HtoD", "DtoH"]).fill_null(False).to_numpy()[index]
    launch = gpu["launch"].fill_null(-1).to_numpy()[index].astype(np.int64)
    same = climb_stack(parent_rows(trace), is_operator(trace), launch) == op
    return np.where((last >= 0) & is_copy & same, last, -1)


def _released(
    trace: Trace,
    work: _LaunchOrder,
    rows: NDArray[np.int64],
    kind: NDArray[np.int8],
    copy: NDArray[np.int64],
    ts: Ints,
    end: Ints,
) -> Ints:
    """Return the end of each call's awaited work, ns; -1: it had ended before, or is not known."""
    gpu, cpu = trace.gpu, trace.cpu
    result = np.full(len(rows), -1, dtype=np.int64)
    if not len(work.by_time) or not len(rows):
        return result
    gpu_end = (gpu["ts"] + gpu["dur"]).to_numpy()
    memcpy = kind == KINDS.index("memcpy")
    result[memcpy] = gpu_end[copy[memcpy]]

    device = kind == KINDS.index("device")
    latest = np.maximum.accumulate(work.end)
    place = np.searchsorted(work.launched, ts[device], side="right") - 1
    result[device] = np.where(place >= 0, latest[np.maximum(place, 0)], -1)

    # a stream: the one cuda_sync tells, else the one this thread used last
    codes, stream_of = np.unique(gpu["stream"].to_numpy()[work.by_time], return_inverse=True)
    last = work.last_before(rows, cpu["thread"].to_numpy())
    stream = np.where(last >= 0, gpu["stream"].to_numpy()[np.maximum(last, 0)], -(1 << 62))
    before = ts.copy()
    marks = recorded_waits(trace, rows)
    index = marks["at"].to_numpy()
    recorded, of_event = np.zeros(len(rows), dtype=bool), np.zeros(len(rows), dtype=bool)
    recorded[index], of_event[index] = True, marks["recorded"].is_not_null().to_numpy()
    stream[index] = marks["on"].to_numpy()
    before[of_event] = marks["recorded"].drop_nulls().to_numpy()
    known = np.searchsorted(codes, stream)
    on = np.minimum(known, len(codes) - 1)
    event = kind == KINDS.index("event")
    usable = (codes[on] == stream) & (kind == KINDS.index("stream"))
    usable |= (codes[on] == stream) & event & of_event
    # one sorted axis of (stream, launch time); the running maximum restarts with each stream
    low, stride = int(min(work.launched.min(), ts.min())), int(work.launched.max() + 2)
    stride = max(stride, int(work.end.max()) + 2, int(end.max()) + 2) - low
    key = stream_of * stride + (work.launched - low)
    order = np.argsort(key, kind="stable")
    latest = np.maximum.accumulate(stream_of[order] * stride + (work.end[order] - low))
    asked = on * stride + np.maximum(before - low, 0)
    place = np.searchsorted(key[order], asked, side="right") - 1
    position = np.maximum(place, 0)
    good = usable & (place >= 0) & (stream_of[order][position] == on)
    result = np.where(good, latest[position] - on * stride + low, result)

    # An event without a record, or a stream that was guessed wrong (its work outlasts the call, or
    # had ended before a call that did wait): what released the call is then the last work that
    # ended while it lasted.
    waits = end - ts > IDLE_CALL_NS
    guess = ~memcpy & ~device & ~recorded & waits & (~good | (result <= ts))
    guess |= ~memcpy & (result > end)
    ends = np.sort(work.end)
    place = np.searchsorted(ends, end, side="right") - 1
    result = np.where(guess, np.where(place >= 0, ends[np.maximum(place, 0)], -1), result)
    return np.where(result > ts, np.minimum(result, end), -1)


def recorded_waits(trace: Trace, rows: NDArray[np.int64]) -> pl.DataFrame:
    """Read the ``cuda_sync`` rows of calls (rows of ``trace.cpu``) that wait for a stream or an
    event: ``at`` (place in ``rows``), ``kind``, ``on`` (the stream), ``recorded`` (ns, when the
    event was recorded; null: a stream, or not known)."""
    cpu = trace.cpu
    asked = pl.DataFrame({"correlation": cpu["correlation"].gather(rows)}).with_row_index("at")
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
    joined = asked.lazy().join(waits, on="correlation", how="inner").collect()
    return joined.filter(pl.col("on").is_not_null()).sort("at")


def _bubbles(
    thread: NDArray[np.int32], ts: Ints, released: Ints, following: Ints
) -> tuple[Ints, Ints]:
    """Return intervals from each release to the thread's next work or next release, ns; empty when
    the host was not held, or when the thread launched nothing any more."""
    begin = np.zeros(len(ts), dtype=np.int64)
    until = begin.copy()
    held = np.flatnonzero(released >= 0)
    if not len(held):
        return begin, until
    order = held[np.lexsort((ts[held], thread[held]))]
    since = released[order]
    to = np.where(following[order] >= 0, following[order], since)
    same = thread[order][1:] == thread[order][:-1]
    to[:-1] = np.where(same, np.minimum(to[:-1], since[1:]), to[:-1])
    begin[order], until[order] = since, np.maximum(to, since)
    return begin, until


def _causes(
    trace: Trace, rows: NDArray[np.int64], kind: NDArray[np.int8], op: NDArray[np.int32]
) -> pl.Series:
    """Describe why the host waited. The outermost telling operator, else the nearest optimizer,
    gradient clipping or scaler range, else the innermost operator, else the call."""
    cpu = trace.cpu
    if not len(rows):
        return pl.Series([], dtype=pl.String)
    parent = parent_rows(trace)
    is_op = is_operator(trace)
    telling = climb_stack(
        parent, is_op & name_matches(cpu["name"], _TELLING).to_numpy(), rows, top=True
    )
    ranges = ~is_op & (cpu["kind"] != "runtime").to_numpy()
    ranges &= name_matches(cpu["name"], _TELLING_RANGE).to_numpy()
    around = climb_stack(parent, ranges, rows)
    row = np.where(telling >= 0, telling, np.where(around >= 0, around, op))
    names = map_names(cpu["name"].gather(np.maximum(row, 0)), _short, pl.String)
    calls = cpu["name"].gather(rows).cast(pl.String)
    fallback = pl.Series(
        [_NO_OP.get(KINDS[k], call) for k, call in zip(kind.tolist(), calls, strict=True)]
    )
    return names.zip_with(pl.Series(row >= 0), fallback)


def _short(name: str) -> str:
    """Shorten a cause: ``Optimizer.step#AdamW.step`` as it is; a frame without its line."""
    frame = parse_frame(name)
    return name if frame is None else f"{frame.file}: {frame.function}"


CLOCKS_NS = 1_500
"""Difference of timestamps in one trace that rounding to whole µs may cause, ns."""
MAX_CLOCKS_NS = 20_000
"""Longest time from a call's end to that of work it waited for, ns, whatever the clocks say."""
LONG_CALL_NS = 50_000
"""Duration from which a call may have waited, ns."""
RETURN_NS = 20_000
"""Time within which a call that waited returns, ns (public A100, V100, H100 and MI300 traces: 3 to
12 µs)."""
LATE_SHARE = 0.02
"""Share of their length that longer calls may take more: the host is busy waking up."""
MIN_SIMILAR, SIMILAR = 3, 0.6
"""Number of long calls of one name from which this share of them must be tied to a stream."""
ALONE_NS = 1_000_000
"""Duration from which a call counts that was long less often, ns: within it, the last work of a
stream ends near its return by chance one time in fifty."""


def clock_tolerance_ns(trace: Trace) -> int:
    """Return how long after a call's return the awaited work may end by the trace's clocks, ns: the
    95th percentile of those that do (see :func:`work_past_return_ns`), and ``CLOCKS_NS`` at least.
    """
    over = work_past_return_ns(trace, np.arange(trace.cpu.height))
    over = over[over > 0]
    return max(CLOCKS_NS, int(np.quantile(over, 0.95))) if len(over) else CLOCKS_NS


def work_past_return_ns(trace: Trace, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Measure how long after the return of each call (``rows`` of ``trace.cpu``) the trace has the
    awaited device work end, ns; 0: not at all, or not sure that it waited.

    Sure are blocking copies to the host, and waits for a stream that the trace names, for the last
    work that was launched on it before. Then the two clocks of the trace disagree: up to 4 µs with
    AMD's profiler, 7 µs with Nsight Systems."""
    cpu, gpu = trace.cpu, trace.gpu
    calls = cpu.select("ts", "call", until=pl.col("ts") + pl.col("dur"))[rows].with_row_index("at")
    work = gpu.filter(pl.col("launch").is_not_null()).select(
        "copy", "launch", on="stream", until=pl.col("ts") + pl.col("dur")
    )
    work = work.with_columns(launched=cpu["ts"].gather(work["launch"])).sort("launched")
    copied = work.filter(pl.col("copy") == "DtoH").group_by("launch").agg(pl.col("until").max())
    own = (
        calls.with_columns(launch=pl.Series(rows, dtype=copied["launch"].dtype))
        .filter(pl.col("call") == "memcpy_blocking")
        .join(copied, on="launch", suffix="_work")
    )
    waits = recorded_waits(trace, rows).filter(pl.col("kind") == "stream").select("at", "on")
    of_stream = (
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
    for part in (own, of_stream):
        over = part.select("at", over=pl.col("until_work") - pl.col("until"))
        over = over.filter(pl.col("over").is_between(1, MAX_CLOCKS_NS - 1))
        result[over["at"].to_numpy()] = over["over"].to_numpy()
    return result


def calls_ended_by_stream(trace: Trace) -> NDArray[np.int64]:
    """Find long runtime calls that wait, though not by their name: rows of ``trace.cpu``. They
    return as the last work of a stream ends that was launched before them."""
    cpu, gpu = trace.cpu, trace.gpu
    long = (cpu["kind"] == "runtime") & (cpu["dur"] >= LONG_CALL_NS)
    long &= ~cpu["call"].is_in(BLOCKING_CALLS).fill_null(False)
    rows = np.flatnonzero(long.to_numpy())
    launch = gpu["launch"].fill_null(-1).to_numpy().astype(np.int64)
    known = launch >= 0
    if not len(rows) or not known.any():
        return rows[:0]
    begin = cpu["ts"].to_numpy()[rows]
    dur = cpu["dur"].to_numpy()[rows]
    tied = np.zeros(len(rows), dtype=bool)
    late = np.maximum(RETURN_NS, LATE_SHARE * dur)
    apart = clock_tolerance_ns(trace)
    launched, ends = cpu["ts"].to_numpy(), (gpu["ts"] + gpu["dur"]).to_numpy()
    streams = gpu.select(pl.struct("device", "stream").rank("dense"))["device"].to_numpy()
    for stream in np.unique(streams[known]):  # a handful of streams
        own_part = np.flatnonzero(known & (streams == stream))
        own_part = own_part[np.argsort(launched[launch[own_part]], kind="stable")]
        last = np.maximum.accumulate(ends[own_part])
        place = np.searchsorted(launched[launch[own_part]], begin, side="left") - 1
        ended = np.where(place >= 0, last[np.maximum(place, 0)], -1)
        # with CUDA_LAUNCH_BLOCKING a launch waits for what it launches, which is most of its time
        own = np.minimum(place + 1, len(own_part) - 1)
        work = gpu["dur"].to_numpy()[own_part[own]]
        ended = np.where((launch[own_part[own]] == rows) & (2 * work > dur), last[own], ended)
        after = begin + dur - ended
        tied |= (ended > begin + dur // 2) & (after >= -apart) & (after <= late)
    names = cpu["name"].gather(rows).to_physical().to_numpy()
    _, of, count = np.unique(names, return_inverse=True, return_counts=True)
    share = np.bincount(of, weights=tied)[of] / count[of]
    sure = np.where(count[of] >= MIN_SIMILAR, share >= SIMILAR, dur >= ALONE_NS)
    return rows[tied & sure]
