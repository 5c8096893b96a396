"""Device work and its launches: the responsible operator, lost records, work queued before the
recording, and hosts that run ahead."""

from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.intervals import covered_length, union
from advisor.core.trace import BLOCKING_CALLS, Trace
from advisor.measure.device.families import CODE, SDPA, op_families
from advisor.measure.host.names import distinct_names, name_matches
from advisor.measure.host.stacks import climb_stack, rows_around

Rows = NDArray[np.int64]
NO_ROW = -1

_OPTIMIZER = r"^Optimizer\.step"


class Launches(NamedTuple):
    """Operators around each launch, aligned with ``trace.gpu``: rows of ``trace.cpu``, -1: none."""

    innermost_op: Rows
    """Innermost operator around the launch. None for work of a CUDA graph: the operator around
    the launch of a graph did not launch each of its kernels; a capture names those that did."""
    op: Rows
    """Nearest operator, from the inside, that does work of a known family."""
    outer_op: Rows
    """Next such operator around ``op``."""
    family: NDArray[np.int8]
    """Family code of ``op``; -1: none."""
    outer_family: NDArray[np.int8]
    """Family code of ``outer_op``; -1: none."""
    optimizer: NDArray[np.bool_]
    """Whether it was launched inside ``Optimizer.step``."""
    sdpa: Rows
    """Innermost ``scaled_dot_product_attention`` operator around the launch."""


def find_launches(trace: Trace) -> Launches:
    """Find the operators around each launch.

    The walk is done once for each distinct launching row; several kernels of one operator share it.
    """
    cpu, gpu = trace.cpu, trace.gpu
    inner = _rows(gpu["op"])
    launch = _rows(gpu["launch"])
    graph = (cpu["call"] == "graph_launch").fill_null(False).to_numpy()
    if graph.any():
        of_graph = (launch >= 0) & graph[np.maximum(launch, 0)]
        captured = cpu.height if trace.meta.capture is None else trace.meta.capture.row
        inner = np.where(of_graph & (inner < captured), NO_ROW, inner)
    parent = _rows(cpu["parent"])
    codes = _family_codes(cpu)
    start, back = np.unique(np.where(inner >= 0, inner, launch), return_inverse=True)
    ops, op_back = np.unique(inner, return_inverse=True)
    has_family = codes >= 0
    op = climb_stack(parent, has_family, ops)
    outer = climb_stack(parent, has_family, rows_around(parent, op))
    op, outer = op[op_back], outer[op_back]
    return Launches(
        innermost_op=inner,
        op=op,
        outer_op=outer,
        family=_at(codes, op),
        outer_family=_at(codes, outer),
        optimizer=_around(cpu, parent, start, "annotation", _OPTIMIZER)[back] >= 0,
        sdpa=_around(cpu, parent, start, "op", SDPA)[back],
    )


def _rows(column: pl.Series) -> Rows:
    rows: Rows = column.fill_null(NO_ROW).cast(pl.Int64).to_numpy()
    return rows


def _at(codes: NDArray[np.int8], rows: Rows) -> NDArray[np.int8]:
    if not len(codes):
        return np.full(len(rows), NO_ROW, dtype=np.int8)
    return np.where(rows >= 0, codes[np.maximum(rows, 0)], NO_ROW).astype(np.int8)


def _around(cpu: pl.DataFrame, parent: Rows, rows: Rows, kind: str, pattern: str) -> Rows:
    """Return the nearest host row of a kind and name at or around each row; -1: none."""
    where = np.flatnonzero((cpu["kind"] == kind).to_numpy())
    named = name_matches(cpu["name"].gather(where), pattern).to_numpy()
    if not named.any():
        return np.full(len(rows), NO_ROW, dtype=np.int64)
    wanted = np.zeros(cpu.height, dtype=np.bool_)
    wanted[where[named]] = True
    return climb_stack(parent, wanted, rows)


def _family_codes(cpu: pl.DataFrame) -> NDArray[np.int8]:
    """Return operators' family codes, aligned with ``trace.cpu``; -1: not an operator, or none."""
    codes = np.full(cpu.height, NO_ROW, dtype=np.int8)
    where = np.flatnonzero((cpu["kind"] == "op").to_numpy())
    texts, which = distinct_names(cpu["name"].gather(where))
    if texts.is_empty():
        return codes
    of_name = op_families(texts).replace_strict(CODE, default=NO_ROW, return_dtype=pl.Int8)
    codes[where] = np.append(of_name.fill_null(NO_ROW).to_numpy(), np.int8(NO_ROW))[which]
    return codes


REPORTED_SHARE = 0.01
"""Part of the launches from which lost records count, and nothing is concluded from idle time. A
file without losses has none, so this only leaves room for launches that failed."""


class LostRecords(NamedTuple):
    """Number of kernel launches in the recording, and of those whose kernel is not in it."""

    launches: int
    lost: int
    replayed: int = 0
    """Lost launches that are of graph replays: how much of their time is missing is unknown."""
    truncated: bool = False
    """Whether the file is cut off. Profilers write the host's operators first and in no order of
    time after that, so that device work may be missing anywhere."""

    @property
    def reported(self) -> bool:
        """Whether so many records are lost that apparent idle time may be missing work."""
        return self.truncated or self.lost > REPORTED_SHARE * self.launches

    @property
    def has_lost_replays(self) -> bool:
        """Whether enough records of graph replays are lost to report it."""
        return self.reported and self.replayed > 0


def lost_records(trace: Trace) -> LostRecords:
    """Count kernel launches with a correlation id that no device row has.

    Not counted: launches into a graph that is being captured, which run nothing; launches after the
    last one whose kernel is there, which the recording may have ended before; a launch inside
    another (the runtime's call around the driver's) whose kernel is tied to one of the two; as many
    as there are device rows that could not be tied to their launch; and those of an id that has as
    many device rows as launches (traces of several processes, put together by hand)."""
    cpu, gpu = trace.cpu, trace.gpu
    call = cpu["call"]
    launching = (call.is_in(["launch"]) & cpu["correlation"].is_not_null()).fill_null(False)
    rows = np.flatnonzero(launching.to_numpy())
    if not len(rows):
        return LostRecords(0, 0)
    parent = cpu["parent"].fill_null(-1).to_numpy()
    seen = np.zeros(cpu.height, dtype=np.bool_)
    seen[gpu["launch"].drop_nulls().to_numpy()] = True
    launch = launching.to_numpy()
    around = parent[rows]
    nested = (around >= 0) & launch[np.maximum(around, 0)]
    inner, outer = rows[nested], around[nested]
    seen[outer] |= seen[inner]
    rows = rows[~nested]
    ts = cpu["ts"].to_numpy()[rows]
    there = seen[rows]
    if there.any():
        inside = ts <= ts[there].max()
        rows, ts, there = rows[inside], ts[inside], there[inside]
    there |= _captured(trace, rows)
    ids, of_id, launches = np.unique(
        cpu["correlation"].gather(rows).to_numpy(), return_inverse=True, return_counts=True
    )
    kernels = gpu.filter(gpu["kind"] == "kernel")["correlation"].drop_nulls().to_numpy()
    found = np.searchsorted(ids, kernels).clip(max=max(len(ids) - 1, 0))
    kernels_of = np.bincount(found[ids[found] == kernels], minlength=len(ids)) if len(ids) else ids
    there |= (launches[of_id] > 1) & (kernels_of >= launches)[of_id]
    untied = int((gpu["launch"].is_null().to_numpy() & ~launched_before_recording(trace)).sum())
    return LostRecords(len(rows), max(0, int((~there).sum()) - untied))


def _captured(trace: Trace, rows: np.ndarray) -> np.ndarray:
    """Return which host rows lie between the begin and the end of a capture on their thread."""
    cpu = trace.cpu
    at = np.flatnonzero((cpu["call"] == "graph_capture").fill_null(False).to_numpy())
    if not len(at):
        return np.zeros(len(rows), dtype=np.bool_)
    begins = cpu["name"].gather(at).cast(pl.String).str.contains("(?i)begin").to_numpy()
    # rows are ordered by (thread, ts): the marker before a row is on its thread or is another's
    place = np.searchsorted(at, rows) - 1
    thread = cpu["thread"].to_numpy()
    before = at[np.maximum(place, 0)]
    return np.asarray(
        (place >= 0) & begins[np.maximum(place, 0)] & (thread[before] == thread[rows])
    )


# -- what the device had queued --------------------------------------------------------------------

Times = NDArray[np.int64]

AHEAD_SHARE = 0.05
"""Part of a step that its first work must wait in the queue for the host to run ahead. Launch
latency is some 10 us; in a step bound by the host the device waits, not its work."""
MIN_STEPS = 3
"""Steps that are needed, at least: fewer are all at the window's ends."""
NEVER = np.iinfo(np.int64).max


class DeviceSteps(NamedTuple):
    """Steps on the device's clock."""

    start: Times
    """Start of the first device work of each step, ns."""
    end: Times
    """Start of the next step's first device work, or the end of this one's last, ns."""
    ahead_ns: float
    """Time that a step's first work waited in the queue (median), ns."""


def analysed_device(trace: Trace) -> int | None:
    """Return the device with most device time; ``None``: no device work."""
    if trace.gpu.is_empty():
        return None
    totals = trace.gpu.group_by("device").agg(pl.col("dur").sum()).sort("dur", "device")
    return int(totals["device"][-1])


def launched_before_recording(trace: Trace) -> NDArray[np.bool_]:
    """Find work launched before the recording began, aligned with ``trace.gpu``.

    Its launch is not in the file, though calls of the host are, and it ran before the first work of
    its stream whose launch is (streams run their work in order). Work without a launch that came
    later lost its record instead."""
    gpu, cpu = trace.gpu, trace.cpu
    launch = gpu["launch"].fill_null(-1).to_numpy()
    unknown = launch < 0
    if not unknown.any() or unknown.all() or cpu.is_empty():
        return np.zeros(gpu.height, dtype=np.bool_)
    lanes = gpu.select(pl.struct("device", "stream").rank("dense").cast(pl.Int64)).to_series()
    lane = lanes.fill_null(0).to_numpy()
    ts = gpu["ts"].to_numpy()
    first = np.full(int(lane.max()) + 1, NEVER)
    np.minimum.at(first, lane[~unknown], ts[~unknown])
    # a stream on which nothing was launched meanwhile: what began before anything else could
    first[first == NEVER] = int(ts[~unknown].min())
    return np.asarray(unknown & (ts < first[lane]))


def device_steps(trace: Trace, start: Times, end: Times, *, closed: bool) -> DeviceSteps | None:
    """Return the device's steps for the host's [start, end); ``None``: the host does not run ahead.

    The host runs ahead when the first work of a step, in the median, waits for more than
    AHEAD_SHARE of a step behind other work. Then the host's marks say how fast it can launch, and
    the step is the device's period: from the first work of a step to the first of the next.
    ``closed``: the marks include the last step's own work (ranges), else the host launched on."""
    gpu, device = trace.gpu, analysed_device(trace)
    if device is None or len(start) < MIN_STEPS:
        return None
    rows = np.flatnonzero(
        (gpu["launch"].is_not_null() & (gpu["device"] == device)).fill_null(False).to_numpy()
    )
    if not len(rows):
        return None
    called = trace.cpu["ts"].to_numpy()[gpu["launch"].to_numpy()[rows].astype(np.int64)]
    began = gpu["ts"].to_numpy()[rows]
    ended = began + gpu["dur"].to_numpy()[rows]
    step = np.searchsorted(start, called, side="right") - 1
    inside = (step >= 0) & (called < end[np.maximum(step, 0)])
    count = len(start)
    last = np.full(count, -1, dtype=np.int64)
    np.maximum.at(last, step[inside], ended[inside])
    if (last < 0).any():
        return None  # a step that launched nothing has no place on the device
    place = np.flatnonzero(inside)
    _, index = np.unique(step[place], return_index=True)  # rows are in order of ts
    first = began[place[index]]
    if not closed:
        after = called >= end[-1]
        last[-1] = began[after].min() if after.any() else last[-1]
    waited = first - called[place[index]]
    upto = np.where(np.append(start[1:] == end[:-1], False), np.append(first[1:], NEVER), last)
    length = upto - first
    if (length <= 0).any() or np.median(waited) < AHEAD_SHARE * np.median(length):
        return None
    if not _behind_work(trace, device, called[place[index]], first):
        return None
    queue = DeviceSteps(first, upto, float(np.median(waited)))
    if not closed and abs(int(length.sum()) / int((end - start).sum()) - 1) < AHEAD_SHARE:
        return None  # periods between marks: as long as the device's while the queue is steady
    return queue


def find_drain_time(trace: Trace, start: int, end: int, *, held: bool = False) -> int | None:
    """Find when the device was done with work launched before the recording, ns, so that its own
    work of [start, end) could begin. ``None``: it was not busy with such work from ``start`` on.

    ``held``: only if the host did nothing but wait for that: from ``start`` on it launched nothing
    before, and a call of it that waits for the device spans that moment."""
    rows = launched_before_recording(trace)
    if not rows.any():
        return None
    gpu = trace.gpu
    rows &= (gpu["device"] == analysed_device(trace)).fill_null(False).to_numpy()
    ts = gpu["ts"].to_numpy()
    ended = ts + gpu["dur"].to_numpy()
    own = ts[~rows & (ended > start) & (gpu["device"] == analysed_device(trace)).to_numpy()]
    done = int(ended[rows].max(initial=start))
    if not start < done < end or not len(own) or own.min() < done:
        return None
    if held and not _held(trace, start, done):
        return None
    busy = union(ts[rows], ended[rows])
    covered = covered_length(np.array([start]), np.array([done]), busy)[0]
    return done if covered >= 0.5 * (done - start) else None


def _held(trace: Trace, start: int, done: int) -> bool:
    """Return whether the host only waits for the device from ``start`` to ``done``."""
    cpu = trace.cpu
    called = cpu["ts"].gather(trace.gpu["launch"].drop_nulls().unique())
    waits = (
        cpu["call"].cast(pl.String).is_in(BLOCKING_CALLS)
        & (cpu["ts"] < done)
        & (cpu["ts"] + cpu["dur"] >= done)
    ).fill_null(False)
    return bool(waits.any()) and not called.is_between(start, done, closed="left").any()


def _behind_work(trace: Trace, device: int, called: Times, began: Times) -> bool:
    """Return whether the device was at work for most of the time that first work waited."""
    gpu = trace.gpu.filter(pl.col("device") == device)
    ts = gpu["ts"].to_numpy()
    busy = union(ts, ts + gpu["dur"].to_numpy())
    waited = int((began - called).sum())
    return waited > 0 and int(covered_length(called, began, busy).sum()) >= 0.5 * waited
