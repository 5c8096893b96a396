"""Upper bounds on what edits can save per step, for any arrangement of the steps.

:meth:`ExposedTime.max_saved` bounds every gain: no edit saves more than the selected time, and on
the host no more than the device's idle time. :meth:`ExposedTime.saved` is the estimate where the
steps cannot be replayed. It counts the instants at which only the selected events delay the step:
device work that nothing else covers, and host time during which the device is idle."""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import polars as pl

from advisor.core.finding import Edit, Select
from advisor.core.intervals import (
    EMPTY,
    Array,
    Bools,
    Intervals,
    covered_length,
    intersect,
    intervals_of,
    subtract,
    union,
    union_of,
)
from advisor.measure import Analysis
from advisor.measure.comm.gloo import time_on_host
from advisor.measure.host.names import WORKERS, name_matches
from advisor.measure.steps.named_intervals import select_instants
from advisor.replay.graph_builder import host_end
from advisor.replay.ledger import edit_kind, error_of, shipped_experiments
from advisor.replay.selection import (
    collectives_on_host,
    host_of_layer,
    host_spans,
    selected_gaps,
    selected_gpu,
    selected_host,
    waits_on_host,
)

_MAX_LATENCY_NS = 10_000
"""Maximum start latency before a piece of work on its stream, ns: it is removed with the work (1 to
17 µs in public traces)."""
LAUNCH_CAUSES = (
    "dispatch", "python", "host_code", "launch", "profiler", "other_thread", "unknown",
)  # fmt: skip
"""Causes of idle time that fewer launches can remove: waits for something else are not among
them."""


# -- bounds ----------------------------------------------------------------------------------------


class SelectedWork(NamedTuple):
    """Time that an edit can remove, ns in all steps."""

    device: float
    host: float
    gaps: Array | None = None
    """Share of each row of ``Analysis.gaps``, or ``None`` if it removes none."""
    latency: float = 0.0
    """Latency before the work on its streams, in which the device is idle if nothing else runs."""


def _launching_gaps(a: Analysis) -> Bools:
    """Return which gaps fewer launches can remove. Batches that the process loads itself also
    count, because it then loads them earlier."""
    names = a.trace.cpu["name"].gather(a.gaps["host"])
    loads = (a.gaps["cause"] == "loader") & ~name_matches(names, WORKERS)
    return (a.gaps["cause"].is_in(LAUNCH_CAUSES) | loads).fill_null(False).to_numpy()


def _selected_work(a: Analysis, edit: Edit, *, optimistic: bool) -> SelectedWork:
    select = edit.select
    factor = _min_factor(edit) if optimistic else edit.factor
    share = 1.0
    if edit.op in ("scale", "merge") and factor is not None:
        share = max(0.0, 1.0 - factor)
    if (waits := waits_on_host(a, select)) is not None:
        return SelectedWork(0.0, share * float(waits.total))
    if select.on == "gap":
        return SelectedWork(0.0, 0.0, share * selected_gaps(a, select))
    if select.on == "host":
        return SelectedWork(0.0, share * selected_host_time(a, select).total)
    if edit.op == "drop_launch":
        if a.device_id is None:
            return SelectedWork(0.0, float(a.spans.total))
        return SelectedWork(0.0, 0.0, _launching_gaps(a).astype(float))
    mask = selected_gpu(a, select)
    is_own = selected_gpu(a, select, anywhere=True) & _find_work_of_steps(a)
    # a device that is behind runs the work of these steps after them
    work = float(max(a.device_busy(mask).total, intervals_of(a.trace.gpu, is_own).total))
    mask = is_own if is_own.sum() > mask.sum() else mask
    layer = host_of_layer(select) if edit.op in ("scale", "remove") else None
    layer_ns = float(selected_host_time(a, layer).total) if layer is not None else 0.0
    if edit.op in ("scale", "roofline"):
        return SelectedWork(share * work, share * layer_ns)
    if edit.op == "overlap":
        return SelectedWork(min(work, _hideable_time(a, mask)), 0.0, None, _sum_latency(a, mask))
    gpu = a.trace.gpu.filter(pl.Series(mask))
    names = ("launch",) if edit.op == "remove" else ("launch", "op")
    rows = pl.concat([gpu[name] for name in names]).drop_nulls().unique().to_numpy()
    is_called = np.zeros(a.trace.cpu.height, dtype=bool)
    is_called[rows] = True
    host = float(_host_time(a, is_called).total)
    return SelectedWork(share * work, max(host, layer_ns), None, _sum_latency(a, mask))


def _min_factor(edit: Edit) -> float | None:
    """Return the smallest share of the selected time that an edit can leave. Kernels keep what the
    edit's best case leaves. If the best case is the expected case, they keep less, as past gains
    were larger than expected; merged kernels keep their traffic with the rest of the step. All host
    time may be removed."""
    if edit.factor is None or edit.best_factor is None:
        return edit.factor
    if edit.select.on != "gpu":
        return 0.0
    if edit.best_factor < edit.factor or edit.op == "merge":
        return edit.best_factor
    return edit.factor * math.exp(-error_of([edit_kind(edit)], shipped_experiments()))


def _find_work_of_steps(a: Analysis) -> Bools:
    """Return which rows of ``trace.gpu`` are work of the used steps: launched in them while the
    host is in them, or running in them where the launch or the steps are unknown."""
    launch = a.trace.gpu["launch"].fill_null(-1).to_numpy()
    is_own: Bools = a.in_window.copy()
    if a.trace.cpu.is_empty() or a.steps.used.is_empty() or a.steps.source == "whole trace":
        return is_own
    is_own &= launch < 0
    ts = a.trace.cpu["ts"].to_numpy()[launch]
    is_own |= (
        (launch >= 0) & (covered_length(ts, ts + 1, a.spans) > 0) & (ts < host_end(a, a.steps.used))
    )
    return is_own


def _host_time(a: Analysis, mask: Bools) -> Intervals:
    return intersect(intervals_of(a.trace.cpu, mask), a.spans)


def selected_host_time(a: Analysis, select: Select) -> Intervals:
    """Return the time in the window that a selection takes on the host, as ``host_spans``."""
    _, ts, dur = host_spans(a, select)
    return intersect(union(ts, ts + dur), a.spans)


def _sum_latency(a: Analysis, mask: Bools) -> float:
    """Return the start latency in the gaps before this work on its streams, ns in all steps."""
    gpu = a.trace.gpu.with_columns(chosen=pl.Series(mask)).sort("device", "stream", "ts")
    ended = (pl.col("ts") + pl.col("dur")).cum_max().shift(1).over("device", "stream")
    gap = gpu.select(
        "chosen", gap=(pl.col("ts") - ended).fill_null(_MAX_LATENCY_NS).clip(0, _MAX_LATENCY_NS)
    )
    return float(gap.filter("chosen")["gap"].sum())


def _hideable_time(a: Analysis, mask: Bools) -> float:
    """Return the time of this work that the rest of the steps can hide, ns. Work of one name stays
    in order, so it hides behind all other work, not behind itself. Without host events only the
    device's own work is known."""
    other_ns = a.spans.total if not a.trace.cpu.is_empty() else a.breakdown.busy.total
    gpu = a.trace.gpu.filter(pl.Series(mask))
    name_ns = gpu.group_by("stream", "name").agg(pl.col("dur").sum())["dur"].to_numpy()
    return float(np.minimum(name_ns, np.maximum(other_ns - name_ns, 0)).sum())


def leaves_device_work(edits: Sequence[Edit]) -> bool:
    """Return whether edits change host time alone and leave all device work unchanged."""
    return all(
        edit.op in ("drop_launch", "make_async")
        or (edit.op in ("remove", "scale", "parallelize") and edit.select.on in ("host", "gap"))
        for edit in edits
    )


def leaves_host_work(edits: Sequence[Edit]) -> bool:
    """Return whether edits change device work alone, so that the host launches as much as
    before."""
    kinds = ("scale", "roofline", "overlap")
    return bool(edits) and all(e.op in kinds and e.select.on == "gpu" for e in edits)


HOST_WORK = (
    "loader", "allocation", "launch", "dispatch", "python", "host_code", "communication",
    "autograd", "unknown",
)  # fmt: skip
"""Classes of host time that do not depend on the device."""
LONG_LAUNCH_RATIO = 10
"""Ratio to the median launch call beyond which the rest of a call is a wait for a full queue."""


def host_work_ns(a: Analysis) -> float | None:
    """Return the time that the thread of the steps works where it runs ahead of the device, ns in
    all steps, without the waits of launch calls for a full queue. ``None`` if it does not run
    ahead, so that any of its time may be a wait, or if its launches are not in the trace."""
    cpu, main = a.trace.cpu, a.trace.main_thread
    calls = cpu.filter(cpu["call"].is_in(["launch", "graph_launch"]).fill_null(False))
    if main is None or calls.is_empty() or a.steps.launched is None:
        return None
    main_classes = a.host.filter(pl.col("thread") == main, pl.col("class").is_in(HOST_WORK))
    ts, dur = calls["ts"].to_numpy(), calls["dur"].to_numpy()
    inside = covered_length(ts, ts + 1, a.steps.host_spans) > 0
    waits = np.maximum(dur - LONG_LAUNCH_RATIO * float(np.median(dur)), 0)[inside].sum()
    return max(0.0, float(main_classes["ns"].sum()) - float(waits))


def remaining_device_time(
    a: Analysis, edits: Sequence[Edit], *, communication: bool = True
) -> float:
    """Return the time of device work that no edit selects, ns per step. With the edits, a step
    takes at least as long. ``communication``: count collectives, which also wait for other
    ranks."""
    if a.device_id is None:
        return 0.0
    if any(edit.op in ("resize", "remove_skew") for edit in edits):
        return 0.0
    is_kept = a.in_window.copy()
    if not communication:
        is_kept &= ~a.kernels["communication"].to_numpy()
    for edit in edits:
        if edit.select.on == "gpu" and edit.op != "drop_launch":
            is_kept &= ~selected_gpu(a, edit.select)
    return a.device_busy(is_kept).total / a.step_count


# -- the estimate where there is no replay ---------------------------------------------------------


class GainClaim(NamedTuple):
    """Instants of the window that a fix would save, and the saved share of them. Overlapped work
    saves at most what other device work can hide and, at best, idle time too."""

    time: Intervals
    shares: tuple[float, float, float]
    """Shares under the central, the pessimistic and the optimistic assumption."""


def claim_time(a: Analysis, edit: Edit) -> list[GainClaim]:
    claims = [_claim_selected(a, edit)]
    if edit.op == "merge" and a.device_id is not None:
        claims.append(GainClaim(_gaps_in_merged(a, edit.select), (1.0, 0.0, 1.0)))
    return claims


def _claim_selected(a: Analysis, edit: Edit) -> GainClaim:
    time = exposed_intervals(a, edit)
    if edit.op == "overlap" and edit.select.on == "gpu" and time.total:
        share = min(1.0, _hidden_by_others(a, selected_gpu(a, edit.select), time) / time.total)
        return GainClaim(time, (share, share * (1 - (edit.worst_factor or 0.0)), 1.0))
    if edit.op in ("scale", "merge", "remove_skew") and edit.factor is not None:
        central = 1 - edit.factor
        low = 1 - (edit.worst_factor if edit.worst_factor is not None else edit.factor)
        high = 1 - (edit.best_factor if edit.best_factor is not None else edit.factor)
        return GainClaim(time, (max(0.0, central), max(0.0, low), max(0.0, high)))
    return GainClaim(time, (1.0, 1.0, 1.0))


def _hidden_by_others(a: Analysis, mask: Bools, exposed: Intervals) -> float:
    """Return how much of the exposed time of this work the device's other work can hide, ns.
    Collectives, copies and kernels hide behind other kinds of work, not behind their own."""
    comm = a.kernels["communication"].to_numpy()
    copying = (a.trace.gpu["kind"] != "kernel").to_numpy() & ~comm
    total = 0.0
    for of_kind in (comm, copying, ~comm & ~copying):
        exposed_ns = intersect(exposed, a.device_busy(mask & of_kind)).total
        if exposed_ns:
            work, others = (a.device_busy(a.in_window & each) for each in (of_kind, ~of_kind))
            total += min(exposed_ns, subtract(others, work).total)
    return total


def exposed_intervals(a: Analysis, edit: Edit) -> Intervals:
    """Return the instants at which only the selected events delay the step."""
    select = edit.select
    if (waits := waits_on_host(a, select)) is not None:
        return waits
    if select.on == "gpu":
        mask = selected_gpu(a, select)
        other_work = a.device_busy(a.in_window & ~mask)
        result = subtract(a.device_busy(mask), other_work)
        layer = host_of_layer(select) if edit.op in ("scale", "remove") else None
        if layer is None:
            return result
        return union_of(result, intersect(selected_host_time(a, layer), a.breakdown.idle))
    if select.on == "gap":
        result = intervals_of(a.gaps, selected_gaps(a, select))
        return intersect(result, select_instants(a, select)) if select.at else result
    if edit.op == "make_async":
        return _idle_after_syncs(a, selected_host(a, select))
    idle = a.breakdown.idle if a.device_id is not None else a.spans
    time = intersect(selected_host_time(a, select), idle)
    if edit.op != "remove":
        return time
    return union_of(time, _idle_after_syncs(a, selected_host(a, select)))


def _idle_after_syncs(a: Analysis, mask: Bools) -> Intervals:
    """Return the idle time after the selected synchronising calls."""
    syncs = a.syncs
    if syncs.is_empty():
        return EMPTY
    rows = mask[syncs["host"].to_numpy()]
    start = syncs["idle_ts"].fill_null(0).to_numpy()[rows]
    end = syncs["idle_end"].fill_null(0).to_numpy()[rows]
    # without the call the host would be ahead by its wait in the call, and no more
    ahead = syncs["waited"].to_numpy()[rows]
    return intersect(union(np.maximum(start, end - ahead), end), a.breakdown.idle)


def _gaps_in_merged(a: Analysis, select: Select) -> Intervals:
    """Return the idle time before kernels that merge with the previous kernel on their stream,
    which ends with their launches. Idle time with causes other than launching stays."""
    gpu = a.trace.gpu.select("device", "stream", "ts", end=pl.col("ts") + pl.col("dur"))
    starts = pl.Series(
        np.searchsorted(a.steps.used["ts"].to_numpy(), gpu["ts"].to_numpy(), "right")
    )
    gpu = gpu.with_columns(step=starts, chosen=pl.Series(selected_gpu(a, select)))
    before = pl.col("chosen", "end", "step").shift(1).over("device", "stream").name.prefix("last_")
    merged = (
        gpu.filter(pl.Series(a.in_window))
        .sort("device", "stream", "ts")
        .with_columns(before)
        .filter(pl.col("chosen") & pl.col("last_chosen") & (pl.col("last_step") == pl.col("step")))
    )
    launching = intervals_of(a.gaps.filter(pl.col("cause").is_in(LAUNCH_CAUSES)))
    return intersect(union(merged["last_end"].to_numpy(), merged["ts"].to_numpy()), launching)


class ExposedTime:
    """Estimates and upper bounds of what edits save in one window, by exposed time; ns per step."""

    def __init__(self, a: Analysis) -> None:
        self.a = a
        self._claims: dict[Edit, list[GainClaim]] = {}
        self._selected_work: dict[tuple[Edit, bool], SelectedWork] = {}

    @cached_property
    def _idle(self) -> float:
        """Device idle time, ns in all steps."""
        span = float(self.a.spans.total)
        return span if self.a.device_id is None else span - float(self.a.breakdown.busy.total)

    def max_saved(self, edits: Sequence[Edit], *, optimistic: bool = False) -> float:
        """Return the maximum that edits save together, ns per step: the device time that they
        select, and host time up to the device's idle time. ``optimistic``: use the factors that
        make the gain large. Idle time that several edits select counts once."""
        if any(e.op in ("resize", "remove_skew") for e in edits):
            return self.a.step_ns
        device = host = latency = 0.0
        gaps = np.zeros(self.a.gaps.height)
        for edit in dict.fromkeys(edits):
            key = edit, optimistic
            if key not in self._selected_work:
                self._selected_work[key] = _selected_work(self.a, edit, optimistic=optimistic)
            work = self._selected_work[key]
            device += work.device
            host += work.host
            latency += work.latency
            if work.gaps is not None:
                gaps = np.maximum(gaps, work.gaps)
        host += float((gaps * self.a.gaps["dur"].to_numpy()).sum())
        total = device + max(latency, min(self._idle, host + latency))
        return min(total, float(self.a.spans.total)) / self.a.step_count

    def beside_compute(self, edits: Sequence[Edit]) -> float:
        """Return the hidden time of host collectives that edits remove, ns per step. Operators then
        no longer share their cores with the library."""
        hidden = 0.0
        for edit in dict.fromkeys(edits):
            table = collectives_on_host(self.a, edit.select)
            if table is not None and edit.op in ("remove", "scale", "merge"):
                run, waits = time_on_host(self.a, table)
                factor = 0.0 if edit.op == "remove" or edit.factor is None else edit.factor
                hidden += max(0.0, 1.0 - factor) * float(run.total - waits.total)
        return hidden / max(1, self.a.step_count)

    def saved(self, edits: Sequence[Edit]) -> tuple[float, float, float]:
        """Return the (central, low, high) savings of all edits together, ns per step. An instant
        that several edits select counts once, with the largest of their shares."""
        for edit in edits:
            if edit not in self._claims:
                self._claims[edit] = claim_time(self.a, edit)
        parts = [claim for edit in edits for claim in self._claims[edit]]
        steps = max(1, self.a.step_count)
        central, low, high = (
            _sum_claims([(part.shares[index], part.time) for part in parts]) / steps
            for index in range(3)
        )
        central = min(central, self.max_saved(edits))
        high = max(central, min(high, self.max_saved(edits, optimistic=True)))
        return central, min(low, central), high


def _sum_claims(parts: list[tuple[float, Intervals]]) -> float:
    total, taken = 0.0, EMPTY
    for share, time in sorted(parts, key=lambda part: -part[0]):
        total += share * subtract(time, taken).total
        taken = union_of(taken, time)
    return total
