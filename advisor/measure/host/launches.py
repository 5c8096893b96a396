"""Device work and its launches: the responsible operator, lost records, work queued before the
recording, and hosts that run ahead."""

from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.intervals import covered_length, intervals_of, union
from advisor.core.trace import BLOCKING_CALLS, Trace
from advisor.measure.device.families import FAMILY_CODE, SDPA, op_families
from advisor.measure.host.names import distinct_names, name_matches
from advisor.measure.host.stacks import climb_stack, rows_around

Rows = NDArray[np.int64]
NO_ROW = -1

_OPTIMIZER = r"^Optimizer\.step"


class Launches(NamedTuple):
    """Operators around each launch, aligned with ``trace.gpu``: rows of ``trace.cpu``, or -1."""

    innermost_op: Rows
    """Innermost operator around the launch. None for work of a CUDA graph, whose kernels the
    operator around the graph launch did not launch; a capture names those that did."""
    op: Rows
    """Innermost operator that does work of a known family."""
    outer_op: Rows
    """Next operator of a known family around ``op``."""
    family: NDArray[np.int8]
    """Family code of ``op``, or -1."""
    outer_family: NDArray[np.int8]
    """Family code of ``outer_op``, or -1."""
    optimizer: NDArray[np.bool_]
    """Whether it was launched inside ``Optimizer.step``."""
    sdpa: Rows
    """Innermost ``scaled_dot_product_attention`` operator around the launch."""


def find_launches(trace: Trace) -> Launches:
    """Find the operators around each launch.

    Each distinct launching row is searched once; several kernels of one operator share the result.
    """
    cpu, gpu = trace.cpu, trace.gpu
    inner = _to_rows(gpu["op"])
    launch = _to_rows(gpu["launch"])
    is_graph_launch = (cpu["call"] == "graph_launch").fill_null(False).to_numpy()
    if is_graph_launch.any():
        in_graph = (launch >= 0) & is_graph_launch[np.maximum(launch, 0)]
        first_captured = cpu.height if trace.meta.capture is None else trace.meta.capture.row
        inner = np.where(in_graph & (inner < first_captured), NO_ROW, inner)
    parent = _to_rows(cpu["parent"])
    codes = _find_family_codes(cpu)
    start, start_index = np.unique(np.where(inner >= 0, inner, launch), return_inverse=True)
    ops, op_index = np.unique(inner, return_inverse=True)
    has_family = codes >= 0
    op = climb_stack(parent, has_family, ops)
    outer = climb_stack(parent, has_family, rows_around(parent, op))
    op, outer = op[op_index], outer[op_index]
    return Launches(
        innermost_op=inner,
        op=op,
        outer_op=outer,
        family=_codes_at(codes, op),
        outer_family=_codes_at(codes, outer),
        optimizer=_find_around(cpu, parent, start, "annotation", _OPTIMIZER)[start_index] >= 0,
        sdpa=_find_around(cpu, parent, start, "op", SDPA)[start_index],
    )


def _to_rows(column: pl.Series) -> Rows:
    rows: Rows = column.fill_null(NO_ROW).cast(pl.Int64).to_numpy()
    return rows


def _codes_at(codes: NDArray[np.int8], rows: Rows) -> NDArray[np.int8]:
    if not len(codes):
        return np.full(len(rows), NO_ROW, dtype=np.int8)
    return np.where(rows >= 0, codes[np.maximum(rows, 0)], NO_ROW).astype(np.int8)


def _find_around(cpu: pl.DataFrame, parent: Rows, rows: Rows, kind: str, pattern: str) -> Rows:
    """Return the nearest host row of a kind and name at or around each row, or -1."""
    rows_of_kind = np.flatnonzero((cpu["kind"] == kind).to_numpy())
    has_name = name_matches(cpu["name"].gather(rows_of_kind), pattern).to_numpy()
    if not has_name.any():
        return np.full(len(rows), NO_ROW, dtype=np.int64)
    is_match = np.zeros(cpu.height, dtype=np.bool_)
    is_match[rows_of_kind[has_name]] = True
    return climb_stack(parent, is_match, rows)


def _find_family_codes(cpu: pl.DataFrame) -> NDArray[np.int8]:
    """Return operators' family codes, aligned with ``trace.cpu``; -1 without operator or family."""
    codes = np.full(cpu.height, NO_ROW, dtype=np.int8)
    op_rows = np.flatnonzero((cpu["kind"] == "op").to_numpy())
    texts, name_index = distinct_names(cpu["name"].gather(op_rows))
    if texts.is_empty():
        return codes
    of_name = op_families(texts).replace_strict(FAMILY_CODE, default=NO_ROW, return_dtype=pl.Int8)
    codes[op_rows] = np.append(of_name.fill_null(NO_ROW).to_numpy(), np.int8(NO_ROW))[name_index]
    return codes


MIN_REPORTED_SHARE = 0.01
"""Minimum share of lost launches at which losses are reported and nothing is concluded from idle
time. A file without losses has none, so this only allows for failed launches."""


class LostRecords(NamedTuple):
    """Number of kernel launches in the recording, and of launches without their kernel."""

    launches: int
    lost: int
    replayed: int = 0
    """Lost launches of graph replays, whose missing time is unknown."""
    truncated: bool = False
    """Whether the file is cut off. Profilers write the host's operators first and the rest in no
    order of time, so device work may be missing anywhere."""

    @property
    def reported(self) -> bool:
        """Whether enough records are lost that apparent idle time may be missing work."""
        return self.truncated or self.lost > MIN_REPORTED_SHARE * self.launches

    @property
    def has_lost_replays(self) -> bool:
        """Whether enough records of graph replays are lost to report it."""
        return self.reported and self.replayed > 0


def count_lost_records(trace: Trace) -> LostRecords:
    """Count kernel launches with a correlation id that no device row has.

    These launches do not count:

    - Launches into a graph that is being captured: they run nothing.
    - Launches after the last one with a kernel: the recording may have ended before their kernels.
    - A launch inside another (the driver's call in the runtime's), if one of them has the kernel.
    - As many launches as there are device rows without a link to their launch.
    - Launches of an id with as many device rows as launches (merged traces of several processes).
    """
    cpu, gpu = trace.cpu, trace.gpu
    call = cpu["call"]
    launching = (call.is_in(["launch"]) & cpu["correlation"].is_not_null()).fill_null(False)
    rows = np.flatnonzero(launching.to_numpy())
    if not len(rows):
        return LostRecords(0, 0)
    parent = cpu["parent"].fill_null(-1).to_numpy()
    launched_kernel = np.zeros(cpu.height, dtype=np.bool_)
    launched_kernel[gpu["launch"].drop_nulls().to_numpy()] = True
    is_launch = launching.to_numpy()
    parents = parent[rows]
    is_nested = (parents >= 0) & is_launch[np.maximum(parents, 0)]
    inner_rows, outer_rows = rows[is_nested], parents[is_nested]
    launched_kernel[outer_rows] |= launched_kernel[inner_rows]
    rows = rows[~is_nested]
    ts = cpu["ts"].to_numpy()[rows]
    has_kernel = launched_kernel[rows]
    if has_kernel.any():
        in_time = ts <= ts[has_kernel].max()
        rows, ts, has_kernel = rows[in_time], ts[in_time], has_kernel[in_time]
    has_kernel |= _is_captured(trace, rows)
    ids, index_of_id, launches = np.unique(
        cpu["correlation"].gather(rows).to_numpy(), return_inverse=True, return_counts=True
    )
    kernels = gpu.filter(gpu["kind"] == "kernel")["correlation"].drop_nulls().to_numpy()
    id_index = np.searchsorted(ids, kernels).clip(max=max(len(ids) - 1, 0))
    kernel_counts = (
        np.bincount(id_index[ids[id_index] == kernels], minlength=len(ids)) if len(ids) else ids
    )
    has_kernel |= (launches[index_of_id] > 1) & (kernel_counts >= launches)[index_of_id]
    unlinked = int((gpu["launch"].is_null().to_numpy() & ~launched_before_recording(trace)).sum())
    return LostRecords(len(rows), max(0, int((~has_kernel).sum()) - unlinked))


def _is_captured(trace: Trace, rows: np.ndarray) -> np.ndarray:
    """Return which host rows are between the begin and the end of a capture on their thread."""
    cpu = trace.cpu
    markers = np.flatnonzero((cpu["call"] == "graph_capture").fill_null(False).to_numpy())
    if not len(markers):
        return np.zeros(len(rows), dtype=np.bool_)
    is_begin = cpu["name"].gather(markers).cast(pl.String).str.contains("(?i)begin").to_numpy()
    # rows are ordered by (thread, ts), so the marker before a row may be on another thread
    marker_index = np.searchsorted(markers, rows) - 1
    thread = cpu["thread"].to_numpy()
    marker = markers[np.maximum(marker_index, 0)]
    return np.asarray(
        (marker_index >= 0)
        & is_begin[np.maximum(marker_index, 0)]
        & (thread[marker] == thread[rows])
    )


# -- queued work of the device --------------------------------------------------------------------

Times = NDArray[np.int64]

AHEAD_SHARE = 0.05
"""Minimum share of a step that its first work waits in the queue if the host runs ahead. Launch
latency is some 10 us; in a host-bound step the device waits, not its work."""
STEADY_SHARE = 0.5
"""Maximum range of the host's steps, as a share of their median, if its queue is steady."""
MIN_STEP_RATIO = 1.1
"""Minimum ratio of the device's steps to the host's at which the host runs ahead of the main stream
alone, while other streams start their work at once."""
MAX_TIME = np.iinfo(np.int64).max


class DeviceSteps(NamedTuple):
    """Steps on the device's clock."""

    start: Times
    """Start of the first device work of each step, ns."""
    end: Times
    """Start of the next step's first device work, or the end of this step's last work, ns."""
    ahead_ns: float
    """Median time that a step's first work waited in the queue, ns."""


def analyzed_device(trace: Trace) -> int | None:
    """Return the device with the most device time, or ``None`` without device work."""
    if trace.gpu.is_empty():
        return None
    totals = trace.gpu.group_by("device").agg(pl.col("dur").sum()).sort("dur", "device")
    return int(totals["device"][-1])


def launched_before_recording(trace: Trace) -> NDArray[np.bool_]:
    """Find work launched before the recording began, aligned with ``trace.gpu``.

    Its launch is not in the file, although host calls are, and it ran before the first work on its
    stream with a recorded launch (streams run their work in order). Later work without a launch
    lost its record instead."""
    gpu, cpu = trace.gpu, trace.cpu
    launch = gpu["launch"].fill_null(-1).to_numpy()
    has_no_launch = launch < 0
    if not has_no_launch.any() or has_no_launch.all() or cpu.is_empty():
        return np.zeros(gpu.height, dtype=np.bool_)
    lane_codes = gpu.select(pl.struct("device", "stream").rank("dense").cast(pl.Int64)).to_series()
    lane = lane_codes.fill_null(0).to_numpy()
    ts = gpu["ts"].to_numpy()
    first_launched = np.full(int(lane.max()) + 1, MAX_TIME)
    np.minimum.at(first_launched, lane[~has_no_launch], ts[~has_no_launch])
    # a stream without recorded launches: work that began before any launched work
    first_launched[first_launched == MAX_TIME] = int(ts[~has_no_launch].min())
    return np.asarray(has_no_launch & (ts < first_launched[lane]))


def device_steps(trace: Trace, start: Times, end: Times, *, closed: bool) -> DeviceSteps | None:
    """Return the device's steps for the host's [start, end), or ``None`` if it does not run ahead.

    The host runs ahead if the first work of a step, in the median, waits behind other work for more
    than AHEAD_SHARE of a step. Then the host's marks only show how fast it can launch, and the step
    is the device's period, from the first work of a step to the first of the next. ``closed`` says
    that the marks include the last step's own work (ranges); otherwise the host kept launching."""
    gpu, device = trace.gpu, analyzed_device(trace)
    if device is None:
        return None
    rows = np.flatnonzero(
        (gpu["launch"].is_not_null() & (gpu["device"] == device)).fill_null(False).to_numpy()
    )
    if not len(rows):
        return None
    launched = trace.cpu["ts"].to_numpy()[gpu["launch"].to_numpy()[rows].astype(np.int64)]
    work_start = gpu["ts"].to_numpy()[rows]
    work_end = work_start + gpu["dur"].to_numpy()[rows]
    step = np.searchsorted(start, launched, side="right") - 1
    in_any_step = (step >= 0) & (launched < end[np.maximum(step, 0)])
    count = len(start)
    step_end = np.full(count, -1, dtype=np.int64)
    np.maximum.at(step_end, step[in_any_step], work_end[in_any_step])
    if (step_end < 0).any():
        return None  # a step without launches has no time on the device
    if not closed:
        is_after = launched >= end[-1]
        step_end[-1] = work_start[is_after].min() if is_after.any() else step_end[-1]
    is_followed = np.append(start[1:] == end[:-1], False)
    on_main = _on_main_stream(gpu["stream"].to_numpy()[rows], step)
    for is_chosen in (in_any_step, in_any_step & on_main):
        in_step = np.flatnonzero(is_chosen)
        _, first_index = np.unique(step[in_step], return_index=True)  # rows are in order of ts
        first, launch_ts = (times[in_step[first_index]] for times in (work_start, launched))
        stop = np.where(is_followed, np.append(first[1:], MAX_TIME), step_end)
        length, waited = stop - first, float(np.median(first - launch_ts))
        if (length <= 0).any() or waited < AHEAD_SHARE * np.median(length):
            continue
        ratio = int(length.sum()) / int((end - start).sum())
        # marks may be as far apart as the device's steps if the queue is steady
        is_steady = np.ptp(end - start) < STEADY_SHARE * np.median(end - start)
        if not closed and is_steady and abs(ratio - 1) < AHEAD_SHARE:
            continue
        if is_chosen is not in_any_step and ratio < MIN_STEP_RATIO:
            continue
        # work of the same step on other streams, such as a gather of weights, is not ahead of it
        is_earlier = gpu["device"].eq_missing(device).to_numpy()
        is_earlier[rows[(step >= 0) & (work_start < first[np.maximum(step, 0)])]] = False
        if _waits_behind_work(trace, is_earlier, launch_ts, first):
            return DeviceSteps(first, stop, waited)
    return None


def _on_main_stream(stream: NDArray[np.int64], step: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which work is on the stream with most work, or all of it if a step has none there.
    Uploads ahead of time and other threads use streams that do not wait for the steps' work."""
    streams, counts = np.unique(stream, return_counts=True)
    is_main: NDArray[np.bool_] = stream == streams[np.argmax(counts)]
    has_all = np.isin(step[step >= 0], step[is_main]).all()
    return is_main if has_all else np.ones(len(stream), dtype=bool)


def find_drain_time(trace: Trace, start: int, end: int, *, held: bool = False) -> int | None:
    """Find when the device finished the work launched before the recording, ns, so that work of
    [start, end) could begin. ``None`` if the device was not busy with earlier work from ``start``
    on.

    With ``held``, only if the host just waited: from ``start`` until then it launched nothing, and
    a host call that waits for the device spans that moment."""
    rows = launched_before_recording(trace)
    if not rows.any():
        return None
    gpu = trace.gpu
    rows &= (gpu["device"] == analyzed_device(trace)).fill_null(False).to_numpy()
    ts = gpu["ts"].to_numpy()
    work_end = ts + gpu["dur"].to_numpy()
    later = ts[~rows & (work_end > start) & (gpu["device"] == analyzed_device(trace)).to_numpy()]
    drained = int(work_end[rows].max(initial=start))
    if not start < drained < end or not len(later) or later.min() < drained:
        return None
    if held and not _is_host_waiting(trace, start, drained):
        return None
    busy = union(ts[rows], work_end[rows])
    covered = covered_length(np.array([start]), np.array([drained]), busy)[0]
    return drained if covered >= 0.5 * (drained - start) else None


def _is_host_waiting(trace: Trace, start: int, done: int) -> bool:
    """Return whether the host only waits for the device from ``start`` to ``done``."""
    cpu = trace.cpu
    launch_ts = cpu["ts"].gather(trace.gpu["launch"].drop_nulls().unique())
    waits = (
        cpu["call"].cast(pl.String).is_in(BLOCKING_CALLS)
        & (cpu["ts"] < done)
        & (cpu["ts"] + cpu["dur"] >= done)
    ).fill_null(False)
    return bool(waits.any()) and not launch_ts.is_between(start, done, closed="left").any()


def _waits_behind_work(
    trace: Trace, is_earlier: NDArray[np.bool_], launch_ts: Times, work_start: Times
) -> bool:
    """Return whether earlier work kept the device busy for most of the time that first work
    waited."""
    gpu = trace.gpu.filter(is_earlier)
    busy = intervals_of(gpu)
    waited = int((work_start - launch_ts).sum())
    return waited > 0 and int(covered_length(launch_ts, work_start, busy).sum()) >= 0.5 * waited
