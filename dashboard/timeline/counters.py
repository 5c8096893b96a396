"""Counters of the timeline: NVML and host samples, allocator totals, hardware counters."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.intervals import Ints
from advisor.core.run_directory import GpuSample, HostSample, RankRecord
from advisor.measure import Analysis
from advisor.measure.steps.run_steps import finite_or_nan

MAX_COUNTERS = 48
HOLD_PERIODS = 2.5
"""Number of median periods for which a sample without a successor is shown."""
MARGIN_NS = 2_000_000_000
"""Time around the trace, ns, from which samples are kept. A short window may have none inside."""


class CounterSeries(NamedTuple):
    """Series of samples. ``value`` holds from ``ts``, ns and sorted, until the next sample."""

    key: str
    label: str
    unit: str
    """Unit: ``%``, ``W``, ``MHz``, ``°C``, ``bytes``, ``bytes/s``, ``ns`` or empty."""
    ts: Ints
    value: NDArray[np.float64]
    max_shown_ns: int | None
    """Longest time for which a value is shown, ns; ``None``: until the next one."""


_GPU_COUNTERS: tuple[tuple[str, str, str, Callable[[GpuSample], Any]], ...] = (
    ("utilisation", "any kernel running", "%", lambda g: g.utilisation),
    ("power", "power", "W", lambda g: None if g.power is None else g.power / 1000),
    ("sm_clock", "SM clock", "MHz", lambda g: g.sm_clock),
    ("temperature", "temperature", "°C", lambda g: g.temperature),
    ("memory_used", "memory used, all processes", "bytes", lambda g: g.memory_used),
    ("memory_utilisation", "memory busy", "%", lambda g: g.memory_utilisation),
    ("pcie_rx", "PCIe received", "bytes/s", lambda g: g.pcie_rx),
    ("pcie_tx", "PCIe sent", "bytes/s", lambda g: g.pcie_tx),
)
_HOST_COUNTERS: tuple[tuple[str, str, str, Callable[[HostSample], Any]], ...] = (
    ("cpu", "all CPUs", "%", lambda h: h.cpu),
    ("process_cpu", "this process, % of one CPU", "%", lambda h: h.process_cpu),
    ("rss", "resident memory", "bytes", lambda h: h.rss),
    ("children_rss", "resident memory of child processes", "bytes", lambda h: h.children_rss),
)


def counter_series(a: Analysis) -> tuple[CounterSeries, ...]:
    """Build all counters of a rank's window, at most MAX_COUNTERS."""
    series = [
        *_phase_counters(a),
        *_telemetry_counters(a),
        *_memory_counters(a),
        *_hardware_counters(a),
    ]
    return tuple(counter for counter in series if len(counter.ts))[:MAX_COUNTERS]


def clock_offset(a: Analysis) -> int | None:
    """Return the offset from the recorder's times to the trace's, ns, or ``None`` if unknown."""
    if a.rank_record is None:
        return None
    if a.record_only:  # the first step starts at 0
        return -int(a.run_steps.ts.min()) if a.run_steps is not None and a.run_steps.steps else None
    if a.trace.meta.clock != "unix":
        return None
    rank = a.rank_record.rank
    if rank.anchor_unix_ns is None or rank.anchor_perf_ns is None:
        return None
    return rank.anchor_unix_ns - rank.anchor_perf_ns - a.trace.meta.start_ns


def _phase_counters(a: Analysis) -> list[CounterSeries]:
    """Build counters of host time per step by phase, for a run without a profiled window."""
    if not a.record_only or a.run_steps is None or not a.run_steps.steps:
        return []
    ts = a.run_steps.ts - a.run_steps.ts.min()
    max_shown_ns = int(a.run_steps.dur.max()) + 1
    return [
        CounterSeries(f"phase:{name}", f"{name}, per step", "ns", ts, value, max_shown_ns)
        for name, value in list(a.run_steps.phases.items())[:8]
    ]


def _telemetry_counters(a: Analysis) -> list[CounterSeries]:
    """Build counters of the GPU and host samples near the trace."""
    offset = clock_offset(a)
    if offset is None or a.rank_record is None or a.run_steps is None or not a.rank_record.samples:
        return []
    low, high = -MARGIN_NS, a.trace.meta.end_ns + MARGIN_NS
    if a.record_only:
        high = int((a.run_steps.ts + a.run_steps.dur).max()) + offset + MARGIN_NS
    samples = [
        (sample.t + offset, sample)
        for sample in a.rank_record.samples
        if low <= sample.t + offset <= high
    ]
    samples.sort(key=lambda pair: pair[0])
    ts = np.array([time for time, _ in samples], dtype=np.int64)
    all_series: list[CounterSeries] = []
    devices = max((len(sample.gpus) for _, sample in samples), default=0)
    for position in range(min(devices, 16)):
        device_index = _device_index(a.rank_record, position)
        gpus = [
            sample.gpus[position] if position < len(sample.gpus) else None for _, sample in samples
        ]
        for key, label, unit, read_gpu in _GPU_COUNTERS:
            values = [None if gpu is None else read_gpu(gpu) for gpu in gpus]
            all_series.append(
                _build_counter(
                    f"nvml:{position}:{key}", f"GPU {device_index} · {label}", unit, ts, values
                )
            )
    for key, label, unit, read_host in _HOST_COUNTERS:
        values = [None if sample.host is None else read_host(sample.host) for _, sample in samples]
        all_series.append(_build_counter(f"host:{key}", f"Host · {label}", unit, ts, values))
    return [series for series in all_series if len(series.ts)]


def _device_index(record: RankRecord, position: int) -> int:
    """Return the index of the GPU at a position in the samples."""
    devices = record.rank.devices
    index = devices[position].index if position < len(devices) else None
    return position if index is None else index


def _build_counter(key: str, label: str, unit: str, ts: Ints, values: list[Any]) -> CounterSeries:
    """Build a counter of the samples that have a value."""
    value = np.array([finite_or_nan(number) for number in values], dtype=np.float64)
    is_known = ~np.isnan(value)
    times = ts[is_known]
    period = float(np.median(np.diff(times))) if len(times) > 1 else 1e9
    return CounterSeries(key, label, unit, times, value[is_known], int(HOLD_PERIODS * period) + 1)


def _memory_counters(a: Analysis) -> list[CounterSeries]:
    """Build counters of allocated and reserved memory by device."""
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


def _hardware_counters(a: Analysis) -> list[CounterSeries]:
    """Build counters of the trace's hardware counters by name."""
    table = a.trace.counters
    all_series: list[CounterSeries] = []
    names = table["name"].unique().cast(pl.String).sort().to_list()
    for name in names[:MAX_COUNTERS]:
        samples = table.filter((pl.col("name") == name) & pl.col("value").is_not_null()).sort("ts")
        max_shown_ns = int(samples["dur"].max() or 1) if samples.height else 1  # type: ignore[arg-type]
        all_series.append(
            CounterSeries(
                f"counter:{name}",
                str(name)[:80],
                "",
                samples["ts"].to_numpy(),
                samples["value"].to_numpy(),
                max(max_shown_ns, 1),
            )
        )
    return all_series


def sample_counter(counter: CounterSeries, x0: int, x1: int, px: int) -> NDArray[np.float32]:
    """Return the smallest and largest value in each of ``px`` pixels, as two rows; NaN: no value.

    Pixel i is [edge(i), edge(i + 1)) with ``edge(i) = x0 + ceil(i (x1 - x0) / px)``."""
    edges = x0 - (-(np.arange(px + 1) * (x1 - x0)) // px)
    first_samples = np.searchsorted(counter.ts, edges, side="left")
    low = np.full(px, np.nan)
    high = low.copy()
    sampled_pixels = np.flatnonzero(first_samples[1:] > first_samples[:-1])
    # the value at the start of the pixel
    before = first_samples[:-1] - 1
    previous = np.maximum(before, 0)
    has_previous = before >= 0
    if counter.max_shown_ns is not None:
        has_previous &= edges[:-1] - counter.ts[previous] <= counter.max_shown_ns
    low[has_previous] = counter.value[previous[has_previous]]
    high[has_previous] = low[has_previous]
    if len(sampled_pixels):
        # reduceat needs increasing starts, so pixels without a sample are left out
        values = counter.value[
            first_samples[sampled_pixels[0]] : first_samples[sampled_pixels[-1] + 1]
        ]
        starts = first_samples[sampled_pixels] - first_samples[sampled_pixels[0]]
        low[sampled_pixels] = np.fmin(low[sampled_pixels], np.minimum.reduceat(values, starts))
        high[sampled_pixels] = np.fmax(high[sampled_pixels], np.maximum.reduceat(values, starts))
    return np.stack([low, high]).astype(np.float32)
