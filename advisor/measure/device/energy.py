"""Energy of a rank's GPU per step, from what NVML reported while the steps ran.

The driver's counter (nvmlDeviceGetTotalEnergyConsumption, mJ since the driver was loaded) where
there is one, else its power (nvmlDeviceGetPowerUsage, mW) integrated by the trapezoid rule."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from advisor.core.intervals import Floats, Ints
from advisor.core.prices import RankEnergy
from advisor.measure.steps.step_records import StepRecords, finite_or_nan

MIN_SAMPLES = 4
"""Samples of the GPU that are needed, at least."""
MIN_INTERVALS = 3
"""Sampling intervals that the measured steps last, at least: the counter moves in jumps."""
MAX_GAP_NS = 10_000_000_000
"""Longest gap between two samples over which energy is interpolated, ns."""
MIN_COVERED = 0.5
"""Share of the steps that count which must lie between samples."""


def step_energy(recorded: StepRecords, rank: int = -1) -> RankEnergy | None:
    """Measure the energy per step of this rank's GPU; ``None``: not sampled, or too seldom. On a
    MIG slice it is that of the whole board, as the driver measures it. The steps are those that
    count (``StepRecords.used``) and lie between samples."""
    if recorded.uuid is not None and recorded.uuid.startswith("MIG-"):
        return None
    methods: tuple[Literal["counter", "power"], ...] = ("counter", "power")
    for method in methods:
        course = _counter(recorded) if method == "counter" else _integrated(recorded)
        if course is None:
            continue
        result = _a_step(recorded, *course)
        if result is not None:
            joules, steps, seconds = result
            watts = joules / seconds
            return RankEnergy(
                rank=rank, joules=joules / steps, watts=watts, method=method, steps=steps
            )
    return None


def _known(recorded: StepRecords, name: str) -> tuple[Ints, Floats] | None:
    """Return times, ns, and values of a figure in the GPU's samples; ``None``: too few samples."""
    times = np.array([t for t, _ in recorded.timed_gpu_samples], dtype=np.int64)
    values = np.array([finite_or_nan(getattr(gpu, name)) for _, gpu in recorded.timed_gpu_samples])
    known = ~np.isnan(values) if len(values) else np.zeros(0, dtype=bool)
    times, values = times[known], values[known]
    if len(times) < MIN_SAMPLES or bool((np.diff(times) <= 0).any()):
        return None
    return times, values


def _counter(recorded: StepRecords) -> tuple[Ints, Floats] | None:
    """Return (times, joules so far) by the counter."""
    known = _known(recorded, "energy")
    if known is None:
        return None
    times, values = known
    falls = bool((np.diff(values) < 0).any())  # the driver was loaded anew
    return None if falls or values[-1] <= values[0] else (times, (values - values[0]) / 1e3)


def _integrated(recorded: StepRecords) -> tuple[Ints, Floats] | None:
    known = _known(recorded, "power")
    if known is None:
        return None
    times, values = known
    if bool((values < 0).any()) or not values.any():
        return None
    parts = (values[1:] + values[:-1]) / 2 * np.diff(times) / 1e12  # mW and ns to J
    return times, np.concatenate([[0.0], np.cumsum(parts)])


def _a_step(recorded: StepRecords, times: Ints, joules: Floats) -> tuple[float, int, float] | None:
    """Return (joules, steps, seconds) of the steps that count and lie between samples."""
    begin = recorded.ts[recorded.used]
    finish = begin + recorded.dur[recorded.used]
    inside = (begin >= times[0]) & (finish <= times[-1])
    gaps = np.diff(times)
    bad: NDArray[np.int64] = np.concatenate([[0], np.cumsum(gaps > MAX_GAP_NS)])
    first = np.clip(np.searchsorted(times, begin, side="right") - 1, 0, len(gaps))
    last = np.clip(np.searchsorted(times, finish, side="left"), 0, len(gaps))
    inside &= bad[last] == bad[first]
    count = int(inside.sum())
    if not count or count < MIN_COVERED * len(begin):
        return None
    begin, finish = begin[inside], finish[inside]
    time = float((finish - begin).sum())
    if time < MIN_INTERVALS * float(np.median(gaps)):
        return None
    spent = np.interp(finish, times, joules) - np.interp(begin, times, joules)
    return float(spent.sum()), count, time / 1e9
