"""Energy of a rank's GPU per step, from what NVML reported while the steps ran.

The driver's counter (nvmlDeviceGetTotalEnergyConsumption, mJ since the driver was loaded) where
there is one, else its power (nvmlDeviceGetPowerUsage, mW) integrated by the trapezoid rule."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from advisor.core.intervals import Floats, Ints
from advisor.core.prices import RankEnergy
from advisor.measure.steps.run_steps import RunSteps, finite_or_nan

_MIN_SAMPLES = 4
"""Minimum number of samples of the GPU."""
MIN_INTERVALS = 3
"""Minimum duration of the measured steps in sampling intervals: the counter moves in jumps."""
_MAX_GAP_NS = 10_000_000_000
"""Longest gap between two samples over which energy is interpolated, ns."""
_MIN_COVERED_SHARE = 0.5
"""Minimum share of the used steps that are between samples."""


def step_energy(run_steps: RunSteps, rank: int = -1) -> RankEnergy | None:
    """Measure the energy per step of this rank's GPU; ``None`` if not sampled, or too seldom. There
    is none for a MIG slice, since the driver measures the whole board. The steps are the used ones
    (``RunSteps.used``) between samples."""
    if run_steps.uuid is not None and run_steps.uuid.startswith("MIG-"):
        return None
    methods: tuple[Literal["counter", "power"], ...] = ("counter", "power")
    for method in methods:
        energy_over_time = (
            _read_counter(run_steps) if method == "counter" else _integrate_power(run_steps)
        )
        if energy_over_time is None:
            continue
        total = _sum_steps(run_steps, *energy_over_time)
        if total is not None:
            joules, steps, seconds = total
            watts = joules / seconds
            return RankEnergy(
                rank=rank, joules=joules / steps, watts=watts, method=method, steps=steps
            )
    return None


def _read_samples(run_steps: RunSteps, name: str) -> tuple[Ints, Floats] | None:
    """Return times, ns, and values of a field of the GPU's samples, or ``None`` if too few."""
    times = np.array([t for t, _ in run_steps.timed_gpu_samples], dtype=np.int64)
    values = np.array([finite_or_nan(getattr(gpu, name)) for _, gpu in run_steps.timed_gpu_samples])
    is_known = ~np.isnan(values) if len(values) else np.zeros(0, dtype=bool)
    times, values = times[is_known], values[is_known]
    if len(times) < _MIN_SAMPLES or bool((np.diff(times) <= 0).any()):
        return None
    return times, values


def _read_counter(run_steps: RunSteps) -> tuple[Ints, Floats] | None:
    """Return (times, joules so far) from the counter."""
    samples = _read_samples(run_steps, "energy")
    if samples is None:
        return None
    times, values = samples
    is_reset = bool((np.diff(values) < 0).any())  # the driver was reloaded
    return None if is_reset or values[-1] <= values[0] else (times, (values - values[0]) / 1e3)


def _integrate_power(run_steps: RunSteps) -> tuple[Ints, Floats] | None:
    samples = _read_samples(run_steps, "power")
    if samples is None:
        return None
    times, values = samples
    if bool((values < 0).any()) or not values.any():
        return None
    parts = (values[1:] + values[:-1]) / 2 * np.diff(times) / 1e12  # mW and ns to J
    return times, np.concatenate([[0.0], np.cumsum(parts)])


def _sum_steps(run_steps: RunSteps, times: Ints, joules: Floats) -> tuple[float, int, float] | None:
    """Return (joules, steps, seconds) of the used steps between samples."""
    start = run_steps.ts[run_steps.used]
    end = start + run_steps.dur[run_steps.used]
    is_covered = (start >= times[0]) & (end <= times[-1])
    gaps = np.diff(times)
    gaps_before: NDArray[np.int64] = np.concatenate([[0], np.cumsum(gaps > _MAX_GAP_NS)])
    first_sample = np.clip(np.searchsorted(times, start, side="right") - 1, 0, len(gaps))
    last_sample = np.clip(np.searchsorted(times, end, side="left"), 0, len(gaps))
    is_covered &= gaps_before[last_sample] == gaps_before[first_sample]
    count = int(is_covered.sum())
    if not count or count < _MIN_COVERED_SHARE * len(start):
        return None
    start, end = start[is_covered], end[is_covered]
    total_ns = float((end - start).sum())
    if total_ns < MIN_INTERVALS * float(np.median(gaps)):
        return None
    energy = np.interp(end, times, joules) - np.interp(start, times, joules)
    return float(energy.sum()), count, total_ns / 1e9
