"""Steps: a report's durations, step time and recorder figures, as plain data."""

from typing import Literal

from msgspec import Struct, field

from advisor.core.run_directory import MAX_VALUE

OTHER_STEP_SHARE = 0.20
"""Minimum relative difference at which a profiled step's shares say little about the run's step."""
EQUAL_STEP_SHARE = 0.03
"""Relative difference below which two step times are called equal."""
VARYING_STEPS_SHARE = 0.10
"""Minimum difference of mean and median, as a share of the median, at which step times vary."""


class StepDurations(Struct, frozen=True, kw_only=True):
    """Durations of the steps of one run, for comparison with other runs."""

    run: int = 0
    """Number of the run, from 0. A baseline may contain several runs of a program."""
    source: Literal["recorder", "trace"]
    """Origin. ``recorder``: unprofiled steps, without warm-up, steps after a profiled window, and
    steps with an evaluation. ``trace``: the used profiled steps."""
    numbers: list[tuple[int, int]]
    """Numbers of the steps as ranges from first to last. Steps between two ranges are left out. If
    steps are not numbered, these are indices in the recording."""
    durations_ns: list[int]
    """Durations of the last 5,000 steps, ns, in order of time."""

    def __post_init__(self) -> None:
        if not all(0 <= ns < MAX_VALUE for ns in self.durations_ns):
            raise ValueError("the duration of a step is not a time")
        if sum(last - first + 1 for first, last in self.numbers) != len(self.durations_ns):
            raise ValueError("steps and their numbers differ in count")


class StepTime(Struct, kw_only=True):
    """Step time of the run outside the profiler."""

    ns: float
    """Median of the timed steps (``RunSteps.timed``), ns."""
    mean_ns: float
    """Mean of the timed steps, ns."""
    window_ns: float | None = None
    """Mean step of the profiled window, ns, or ``null`` if no window was profiled. The report's
    other figures come from this window."""
    window_slowdown: float | None = None
    """Excess of the window's mean step over ``ns``, as a share of ``ns``, or ``null`` without a
    window."""
    busy_share: float | None = None
    """Share of the run's own step in which the device works, or ``null`` without a window or a
    device, or if the steps vary."""
    profiler_overhead: float | None = None
    """Overhead of the profiler, as a share: median of the window's steps over that of the
    unprofiled steps within 20 of it, minus 1. ``null`` if there are too few of either, or if the
    unprofiled steps vary as much."""
    nearby_ns: float | None = None
    """Median of the unprofiled steps within 20 of the window, ns, or ``null`` if there are too
    few."""
    share_beyond: float | None = None
    """Share of the run's steps that are at least as long as ``nearby_ns``, or at most as long if
    ``nearby_ns`` is shorter than ``ns``."""
    in_warm_up: bool = False
    """Whether the window is in the warm-up steps, which do not count."""
    atypical: bool = False
    """Whether the window is not typical of the run: ``nearby_ns`` differs from ``ns`` by 10% or
    more, and fewer than a quarter of the run's steps are as far off."""

    @property
    def varies(self) -> bool:
        """Whether a few steps are much longer or shorter than most, so that mean and median
        differ."""
        return abs(self.mean_ns / self.ns - 1) >= VARYING_STEPS_SHARE

    @property
    def reference_ns(self) -> float:
        """Step time that a report leads with and that gains are shares of, ns: the mean if steps
        vary, because it determines the run's duration, else the median."""
        return self.mean_ns if self.varies else self.ns

    @property
    def statistic(self) -> str:
        """Name of the statistic in ``reference_ns``: ``mean`` or ``median``."""
        return "mean" if self.varies else "median"

    @property
    def window_excess(self) -> float | None:
        """Excess of the window's mean step over ``reference_ns``, as a share of it, or ``None`` if
        no window was profiled."""
        return self.window_ns / self.reference_ns - 1 if self.window_ns else None

    @property
    def window_differs(self) -> bool:
        """Whether the window's mean step differs from the step that a report leads with."""
        return abs(self.window_excess or 0.0) >= EQUAL_STEP_SHARE

    @property
    def window_is_unrepresentative(self) -> bool:
        """Whether the window's step differs so much that its shares say little about the run's
        step."""
        return abs(self.window_excess or 0.0) >= OTHER_STEP_SHARE

    @property
    def gain_scale(self) -> float | None:
        """The run's usual step over the window's step, or ``None`` if no window was profiled."""
        return self.ns / self.window_ns if self.window_ns else None


class Phase(Struct, frozen=True):
    """Host time of one phase, over the timed steps."""

    name: str
    """Phase: ``data``, ``h2d``, ``forward``, ``backward``, ``optimizer``, ``other``, or the
    user's."""
    ns: float
    """Mean time per step, ns."""
    share: float
    """Share of the step."""


class RunStepFigures(Struct, kw_only=True):
    """Figures of the recorder for all steps of a run. Those in profiled windows are counted, but
    only the others give its times."""

    steps: int
    """Number of recorded steps."""
    used: int
    """Number of timed steps: after the warm-up, outside windows, and not the first after a window.
    If the host runs ahead of the device, only steps timed by CUDA events count."""
    median_ns: float | None
    """Median of the timed steps, ns, or ``null`` without any."""
    mean_ns: float | None
    """Mean of the timed steps, ns, or ``null`` without any."""
    p99_ns: float | None
    """99th percentile of the timed steps, ns, or ``null`` for fewer than a hundred."""
    profiled_steps: int
    """Number of steps in open profiler windows."""
    profiled_median_ns: float | None
    """Median of the steps that windows recorded, ns, or ``null`` for fewer than two."""
    profiler_overhead: float | None
    """Overhead of the profiler, as in ``StepTime.profiler_overhead``, but over all windows."""
    phases: list[Phase]
    """Host time by phase, largest first. It adds up to the mean step on the host."""
    samples_per_second: float | None
    """Samples per second of this rank in the timed steps, or ``null`` if batch sizes are
    unknown."""
    samples_per_step: int | None = None
    """Batch size in most steps, with gradient accumulation, or ``null`` if not recorded."""
    inference: bool = False
    """Whether the loop does not train: its steps are forwards, or calls of ``generate``."""
    outside_ns: int | None = None
    """Total time between training steps, ns, such as validation and checkpoints. ``null`` if the
    loop does not train."""
    outside_share: float | None = None
    """Share of ``outside_ns`` in the time after the first step, or ``null`` if the loop does not
    train."""
    other_programs_ns: float | None = None
    """Time of the mean step in which the main thread had work, but other programs had the cores,
    ns, or ``null`` if not sampled."""
    ended: str | None
    """End of the run: ``finished``, ``exception``, ``interrupted`` or ``disk`` (disk full).
    ``null`` if it was killed or is still running."""
    windows: list[str]
    """Outcome of each profiled window, one line each."""
    program: str | None = None
    """File name of the program, ``train.py``, or ``null`` if not recorded."""


class StepVariationPart(Struct, frozen=True):
    """A class of time, kernel, copy or operator that takes more time in longer steps."""

    name: str
    """Class of time, or name of a kernel, copy or operator. Idle time is ``idle: `` and its cause.
    Without device work, host time is ``host: `` and its class."""
    ns: float
    """Mean excess of its time in a longer step over its time in a shorter one, ns."""
    short_count: float | None = None
    """Mean number of runs in a shorter step, or ``null`` if it is not device work."""
    long_count: float | None = None
    """Mean number of runs in a longer step, or ``null`` if it is not device work."""


class StepVariation(Struct, frozen=True):
    """The longer half of the steps compared with the shorter half, and what makes them longer."""

    short_ns: float
    """Mean of the shorter half, ns."""
    long_ns: float
    """Mean of the longer half, ns."""
    classes: list[StepVariationPart] = field(default_factory=list)
    """Exclusive classes of the step's time with at least 15% of the difference, largest first."""
    work: list[StepVariationPart] = field(default_factory=list)
    """Device work with at least 15% of the difference, hidden or not."""

    @property
    def difference_ns(self) -> float:
        """Mean of the longer half minus the mean of the shorter half, ns."""
        return self.long_ns - self.short_ns
