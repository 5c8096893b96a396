"""Work of the loop that recurs every few steps, from the recorded times between and in steps."""

from typing import NamedTuple

import numpy as np

from advisor.core.intervals import Ints
from advisor.measure.steps.run_steps import RunSteps

LOOP_PHASES = ("between steps", "other")
"""Recorder phases of the loop's own code, outside loading, forward, backward and optimizer."""
MIN_EXCESS_STEPS, MIN_EXCESS_MADS = 0.5, 5.0
"""Minimum excess of the work over its median per step: in median steps, and in median absolute
deviations."""
MIN_TIMES = 5
"""Minimum number of occurrences that show a period."""
_MIN_REGULAR_SHARE = 0.8
"""Minimum share of the distances that are one period, or several with profiled steps in between."""
MAX_MISSED_PERIODS = 4
MIN_LONG_PERIOD = 8
"""Minimum period at which distances may differ by one step."""


class RecurringWork(NamedTuple):
    """Work of the loop itself that recurs every ``period`` steps. Times in ns."""

    period: int
    times: int
    """Number of recorded occurrences in used steps."""
    each: float
    """Mean excess time of an occurrence over the median step."""
    per_step: float
    """Mean excess time per step."""
    step: float
    """Mean step, including the time between steps."""
    gain: float
    """The mean step minus the median step, at most ``per_step``: if the host runs ahead, the device
    works meanwhile."""
    outside: bool
    """Whether most of the time is outside the steps (validation, checkpoints)."""
    on_device: float | None
    """Median excess device time of the steps that contain the work, or ``None`` if not recorded."""
    first: int
    """Number of the first step that contains the work."""

    @property
    def share(self) -> float:
        """Share of the work in the run's time."""
        return self.per_step / self.step

    def contains(self, step: int) -> bool:
        """Return whether the step of this number should contain the work."""
        offset = (step - self.first) % self.period
        return min(offset, self.period - offset) <= int(self.period >= MIN_LONG_PERIOD)


def find_periodic_work(run_steps: RunSteps) -> RecurringWork | None:
    """Find work between or in steps, outside loading, forward, backward and optimizer, that recurs
    at equal distances in steps. ``None`` if there is no such work, or the record is too short."""
    used = run_steps.used
    if not used.any() or not run_steps.median:
        return None
    evaluation = np.array([max(0, step.evaluation) for step in run_steps.steps], dtype=np.float64)
    evaluation[:1] = 0.0  # excludes the time before the first step
    own_ns = evaluation - np.nan_to_num(run_steps.column("gc"))
    for name in LOOP_PHASES:
        own_ns += np.nan_to_num(run_steps.phases.get(name, np.zeros(len(own_ns))))
    comparable = run_steps.after_warmup & run_steps.unprofiled
    usual_ns = float(np.median(own_ns[comparable]))
    deviation = float(np.median(np.abs(own_ns[comparable] - usual_ns)))
    excess = own_ns - usual_ns
    is_long = comparable & (
        excess > max(MIN_EXCESS_STEPS * run_steps.median, MIN_EXCESS_MADS * deviation)
    )
    period = _find_period(np.flatnonzero(is_long))
    is_counted = is_long & used
    if period is None or not is_counted.any():
        return None
    excess_ns, used_steps = float(excess[is_counted].sum()), int(used.sum())
    step = float((run_steps.dur + evaluation)[used].mean())
    device_excess = run_steps.device_dur[is_counted] - run_steps.median
    return RecurringWork(
        period,
        int(is_counted.sum()),
        excess_ns / int(is_counted.sum()),
        excess_ns / used_steps,
        step,
        max(0.0, min(excess_ns / used_steps, step - run_steps.median)),
        float(evaluation[is_counted].sum()) > excess_ns / 2,
        float(np.median(device_excess[~np.isnan(device_excess)]))
        if not np.isnan(device_excess).all()
        else None,
        run_steps.steps[int(np.flatnonzero(is_long)[0])].n,
    )


def _find_period(rows: Ints) -> int | None:
    if len(rows) < MIN_TIMES:
        return None
    gaps = np.diff(rows)
    period = int(np.median(gaps))
    if period < 2:
        return None
    multiples = np.clip(np.rint(gaps / period), 1, MAX_MISSED_PERIODS)
    is_regular = np.abs(gaps - multiples * period) <= int(period >= MIN_LONG_PERIOD)
    return period if is_regular.mean() >= _MIN_REGULAR_SHARE else None
