"""Counters below the lanes: NVML and host samples, allocator totals, hardware counters."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.intervals import Ints
from advisor.core.run_directory import GpuSample, HostSample, RankRecord
from advisor.measure import Analysis
from advisor.measure.steps.step_records import finite_or_nan

MAX_COUNTERS = 48
HOLD_PERIODS = 2.5
"""Typical periods that a sample is shown for where none follows it."""
MARGIN_NS = 2_000_000_000
"""Time around the trace, ns, whose samples are kept: at 1 Hz a window of 0.5 s has one."""


class CounterSeries(NamedTuple):
    """Series: ``value`` from ``ts`` (in order) until the next. Missing samples are absent."""

    key: str
    label: str
    unit: str
    """Unit: ``%``, ``W``, ``MHz``, ``°C``, ``bytes``, ``bytes/s``, ``ns`` or empty."""
    ts: Ints
    value: NDArray[np.float64]
    max_shown_ns: int | None
    """Longest time that a value is shown for, ns, or ``None`` for until the next one."""


_GPU: tuple[tuple[str, str, str, Callable[[GpuSample], Any]], ...] = (
    ("utilisation", "any kernel running", "%", lambda g: g.utilisation),
    ("power", "power", "W", lambda g: None if g.power is None else g.power / 1000),
    ("sm_clock", "SM clock", "MHz", lambda g: g.sm_clock),
    ("temperature", "temperature", "°C", lambda g: g.temperature),
    ("memory_used", "memory used, all processes", "bytes", lambda g: g.memory_used),
    ("memory_utilisation", "memory busy", "%", lambda g: g.memory_utilisation),
    ("pcie_rx", "PCIe received", "bytes/s", lambda g: g.pcie_rx),
    ("pcie_tx", "PCIe sent", "bytes/s", lambda g: g.pcie_tx),
)
_HOST: tuple[tuple[str, str, str, Callable[[HostSample], Any]], ...] = (
    ("cpu", "all CPUs", "%", lambda h: h.cpu),
    ("process_cpu", "this process, % of one CPU", "%", lambda h: h.process_cpu),
    ("rss", "resident memory", "bytes", lambda h: h.rss),
    ("children_rss", "resident memory of child processes", "bytes", lambda h: h.children_rss),
)


def counter_series(a: Analysis) -> tuple[CounterSeries, ...]:
    """Return all series of a rank's window, at most MAX_COUNTERS."""
    series = [*_phases(a), *_samples(a), *_memory(a), *_hardware(a)]
    return tuple(c for c in series if len(c.ts))[:MAX_COUNTERS]


def clock_offset(a: Analysis) -> int | None:
    """Return what turns the recorder's times into the trace's, ns, or ``None`` if
    they have different clocks."""
    if a.record is None:
        return None
    if a.record_only:  # the first step is the beginning
        return -int(a.recorded.ts.min()) if a.recorded is not None and a.recorded.steps else None
    if a.trace.meta.clock != "unix":
        return None
    rank = a.record.rank
    if rank.anchor_unix_ns is None or rank.anchor_perf_ns is None:
        return None
    return rank.anchor_unix_ns - rank.anchor_perf_ns - a.trace.meta.start_ns


def _phases(a: Analysis) -> list[CounterSeries]:
    """Return host time of each step by phase, for a run without a profiled window."""
    if not a.record_only or a.recorded is None or not a.recorded.steps:
        return []
    ts = a.recorded.ts - a.recorded.ts.min()
    hold = int(a.recorded.dur.max()) + 1
    return [
        CounterSeries(f"phase:{name}", f"{name}, per step", "ns", ts, value, hold)
        for name, value in list(a.recorded.phases.items())[:8]
    ]


def _samples(a: Analysis) -> list[CounterSeries]:
    offset = clock_offset(a)
    if offset is None or a.record is None or a.recorded is None or not a.record.samples:
        return []
    low, high = -MARGIN_NS, a.trace.meta.end_ns + MARGIN_NS
    if a.record_only:
        high = int((a.recorded.ts + a.recorded.dur).max()) + offset + MARGIN_NS
    near = [(s.t + offset, s) for s in a.record.samples if low <= s.t + offset <= high]
    near.sort(key=lambda pair: pair[0])
    ts = np.array([t for t, _ in near], dtype=np.int64)
    all_series: list[CounterSeries] = []
    devices = max((len(s.gpus) for _, s in near), default=0)
    for place in range(min(devices, 16)):
        number = _ordinal(a.record, place)
        gpus = [s.gpus[place] if place < len(s.gpus) else None for _, s in near]
        for key, label, unit, take in _GPU:
            values = [None if g is None else take(g) for g in gpus]
            all_series.append(
                _sampled(f"nvml:{place}:{key}", f"GPU {number} · {label}", unit, ts, values)
            )
    for key, label, unit, of in _HOST:
        values = [None if s.host is None else of(s.host) for _, s in near]
        all_series.append(_sampled(f"host:{key}", f"Host · {label}", unit, ts, values))
    return [series for series in all_series if len(series.ts)]


def _ordinal(record: RankRecord, place: int) -> int:
    devices = record.rank.devices
    index = devices[place].index if place < len(devices) else None
    return place if index is None else index


def _sampled(key: str, label: str, unit: str, ts: Ints, values: list[Any]) -> CounterSeries:
    value = np.array([finite_or_nan(v) for v in values], dtype=np.float64)
    there = ~np.isnan(value)
    times = ts[there]
    period = float(np.median(np.diff(times))) if len(times) > 1 else 1e9
    return CounterSeries(key, label, unit, times, value[there], int(HOLD_PERIODS * period) + 1)


def _memory(a: Analysis) -> list[CounterSeries]:
    memory = a.trace.memory
    all_series: list[CounterSeries] = []
    for device in sorted(memory["device"].unique().drop_nulls().to_list())[:17]:
        samples = memory.filter(pl.col("device") == device).sort("ts", maintain_order=True)
        where = "Host" if device < 0 else f"GPU {device}"
        for column, label in (
            ("allocated", "allocated"),
            ("reserved", "reserved by the allocator"),
        ):
            known = samples.filter(pl.col(column).is_not_null())
            all_series.append(
                CounterSeries(
                    f"memory:{device}:{column}",
                    f"{where} · {label}",
                    "bytes",
                    known["ts"].to_numpy(),
                    known[column].to_numpy().astype(np.float64),
                    None,
                )
            )
    return all_series


def _hardware(a: Analysis) -> list[CounterSeries]:
    table = a.trace.counters
    all_series: list[CounterSeries] = []
    names = table["name"].unique().cast(pl.String).sort().to_list()
    for name in names[:MAX_COUNTERS]:
        samples = table.filter((pl.col("name") == name) & pl.col("value").is_not_null()).sort("ts")
        hold = int(samples["dur"].max() or 1) if samples.height else 1  # type: ignore[arg-type]
        all_series.append(
            CounterSeries(
                f"counter:{name}",
                str(name)[:80],
                "",
                samples["ts"].to_numpy(),
                samples["value"].to_numpy(),
                max(hold, 1),
            )
        )
    return all_series


def sample_counter(counter: CounterSeries, x0: int, x1: int, px: int) -> NDArray[np.float32]:
    """Return least and largest value in each pixel, as two rows; NaN: no value there.

    Pixel i is [cut(i), cut(i + 1)) with ``cut(i) = x0 + ceil(i (x1 - x0) / px)``."""
    cut = x0 - (-(np.arange(px + 1) * (x1 - x0)) // px)
    place = np.searchsorted(counter.ts, cut, side="left")
    low = np.full(px, np.nan)
    high = low.copy()
    full = np.flatnonzero(place[1:] > place[:-1])
    # the value that holds at the pixel's beginning
    before = place[:-1] - 1
    previous = np.maximum(before, 0)
    holds = before >= 0
    if counter.max_shown_ns is not None:
        holds &= cut[:-1] - counter.ts[previous] <= counter.max_shown_ns
    low[holds] = counter.value[previous[holds]]
    high[holds] = low[holds]
    if len(full):
        # reduceat wants rising starts; pixels without a sample are left out, so they rise
        values = counter.value[place[full[0]] : place[full[-1] + 1]]
        starts = place[full] - place[full[0]]
        low[full] = np.fmin(low[full], np.minimum.reduceat(values, starts))
        high[full] = np.fmax(high[full], np.maximum.reduceat(values, starts))
    return np.stack([low, high]).astype(np.float32)
