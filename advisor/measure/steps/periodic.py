"""Work of the loop that comes every few steps, from the recorded times between and in steps."""

from typing import NamedTuple

import numpy as np

from advisor.core.intervals import Ints
from advisor.measure.steps.step_records import StepRecords

OWN_PHASES = ("between steps", "other")
"""Recorder phases of the loop's own code: not loading, forward, backward or optimizer."""
FACTOR, MADS = 0.5, 5.0
"""Least time of the work, beyond what lies in the median step: medians of the step, and median
absolute deviations of what lies in it."""
MIN_TIMES = 5
"""Least number of times that show a period."""
MIN_REGULAR = 0.8
"""Share of the distances that must be one period, or a few where profiled steps lie between."""
MAX_MISSED = 4
LONG_PERIOD = 8
"""Period from which a step more or less is the same distance."""


class RecurringWork(NamedTuple):
    """Work of the loop itself that comes every ``period`` steps. Times in ns."""

    period: int
    times: int
    """Number of times that it was recorded, in steps that count."""
    each: float
    """Mean time of it, beyond what lies in the median step."""
    per_step: float
    """Mean time of it per step."""
    step: float
    """Mean step with all that lies between steps."""
    gain: float
    """The mean step less the median one, and at most ``per_step``: where the host runs ahead the
    device works meanwhile."""
    outside: bool
    """Whether most of it lies outside the steps (validation, checkpoints)."""
    on_device: float | None
    """Median time of the device in the steps that contain it, beyond the median step; ``None``: not
    recorded."""
    first: int
    """Number of the first step that contains it."""

    @property
    def share(self) -> float:
        """Share of the run's time."""
        return self.per_step / self.step

    def contains(self, step: int) -> bool:
        """Return whether the step of this number should contain the work."""
        apart = (step - self.first) % self.period
        return min(apart, self.period - apart) <= int(self.period >= LONG_PERIOD)


def find_periodic_work(recorded: StepRecords) -> RecurringWork | None:
    """Find work between or in steps, outside loading, forward, backward and optimizer, that comes
    at equal distances in steps. ``None``: there is none, or the record is too short."""
    used = recorded.used
    if not used.any() or not recorded.median:
        return None
    evaluation = np.array([max(0, step.evaluation) for step in recorded.steps], dtype=np.float64)
    evaluation[:1] = 0.0  # what lies before the first step
    own = evaluation - np.nan_to_num(recorded.column("gc"))
    for name in OWN_PHASES:
        own += np.nan_to_num(recorded.phases.get(name, np.zeros(len(own))))
    plain = recorded.after_warmup & recorded.unprofiled
    usual = float(np.median(own[plain]))
    deviation = float(np.median(np.abs(own[plain] - usual)))
    excess = own - usual
    long = plain & (excess > max(FACTOR * recorded.median, MADS * deviation))
    period = _find_period(np.flatnonzero(long))
    counted = long & used
    if period is None or not counted.any():
        return None
    spent, number = float(excess[counted].sum()), int(used.sum())
    step = float((recorded.dur + evaluation)[used].mean())
    device = recorded.device_dur[counted] - recorded.median
    return RecurringWork(
        period,
        int(counted.sum()),
        spent / int(counted.sum()),
        spent / number,
        step,
        max(0.0, min(spent / number, step - recorded.median)),
        float(evaluation[counted].sum()) > spent / 2,
        float(np.median(device[~np.isnan(device)])) if not np.isnan(device).all() else None,
        recorded.steps[int(np.flatnonzero(long)[0])].n,
    )


def _find_period(rows: Ints) -> int | None:
    if len(rows) < MIN_TIMES:
        return None
    gaps = np.diff(rows)
    usual = int(np.median(gaps))
    if usual < 2:
        return None
    missed = np.clip(np.rint(gaps / usual), 1, MAX_MISSED)
    regular = np.abs(gaps - missed * usual) <= int(usual >= LONG_PERIOD)
    return usual if regular.mean() >= MIN_REGULAR else None
