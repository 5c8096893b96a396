"""Steps: a report's durations, step time and recorder figures, as plain data."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

from advisor.core.run_directory import MAX_VALUE

OTHER_STEP_SHARE = 0.20
"""Relative difference from which a profiled step's shares say little of the run's own step."""
EQUAL_STEP_SHARE = 0.03
"""Relative difference below which two step times are called equal."""
VARYING_STEPS_SHARE = 0.10
"""Difference of mean and median, as a share of the median, from which step times vary."""


class StepDurations(Struct, frozen=True, kw_only=True):
    """Durations of the steps of one run, which a comparison with another run is made of."""

    run: int = 0
    """Number of the run, from 0: a baseline may hold several runs of one program."""
    source: Literal["recorder", "trace"]
    """Origin. ``recorder``: steps that no profiler slowed, without warm-up, the step after a
    profiled window and steps with an evaluation. ``trace``: the profiled steps that are used."""
    numbers: list[tuple[int, int]]
    """Numbers of the steps as ranges, first and last: steps between two ranges are set aside.
    Where steps are not numbered, their places in the recording."""
    durations_ns: list[int]
    """Durations, ns, in order of time; the last 5,000."""

    def __post_init__(self) -> None:
        if not all(0 <= ns < MAX_VALUE for ns in self.durations_ns):
            raise ValueError("the duration of a step is not a time")
        if sum(last - first + 1 for first, last in self.numbers) != len(self.durations_ns):
            raise ValueError("steps and their numbers differ in count")


class StepTime(Struct, kw_only=True):
    """Step time of the run while nothing is profiled."""

    ns: float
    """Median of the steps that count (``StepRecords.timed``), ns."""
    mean_ns: float
    """Mean of these steps, ns."""
    window_ns: float | None = None
    """Mean step of the profiled window, whose trace the other figures are of, ns; ``null``: no
    window was profiled."""
    window_slowdown: float | None = None
    """Excess of the window's mean step over ``ns``, as a share of ``ns``; ``null``: no window."""
    busy_share: float | None = None
    """Share of the run's own step in which the device works; ``null``: no window, no
    device, or the steps vary."""
    profiler_overhead: float | None = None
    """Overhead of the profiler, as a share: the median of the window's steps over that of the
    unprofiled steps within 20 of it, less 1. ``null``: too few of either, or those vary as
    much."""
    nearby_ns: float | None = None
    """Median of the unprofiled steps within 20 of the window, ns; ``null``: too few."""
    share_beyond: float | None = None
    """Share of the run's steps that are at least as long as ``nearby_ns``; where that is shorter
    than ``ns``, at most as long."""
    in_warm_up: bool = False
    """Whether the window lies in the steps at the start that do not count."""
    atypical: bool = False
    """Whether the window is not typical of the run: ``nearby_ns`` differs from ``ns`` by 10% or
    more, and fewer than a quarter of the run's steps are as far off."""

    @property
    def varies(self) -> bool:
        """Whether a few steps are much longer than most, or shorter: mean and median differ."""
        return abs(self.mean_ns / self.ns - 1) >= VARYING_STEPS_SHARE

    @property
    def reference_ns(self) -> float:
        """Step time that a report leads with and that gains are shares of, ns: the mean where steps
        vary, because the run's duration is made of it, else the median."""
        return self.mean_ns if self.varies else self.ns

    @property
    def statistic(self) -> str:
        """Name of what ``reference_ns`` is of the run's steps."""
        return "mean" if self.varies else "median"

    @property
    def window_excess(self) -> float | None:
        """Excess of the window's mean step over ``reference_ns``, as a share of it; ``None``: no
        window was profiled."""
        return self.window_ns / self.reference_ns - 1 if self.window_ns else None

    @property
    def window_differs(self) -> bool:
        """Whether the window's mean step is another than the one that a report leads with."""
        return abs(self.window_excess or 0.0) >= EQUAL_STEP_SHARE

    @property
    def window_is_other(self) -> bool:
        """Whether the two differ so much that the shares of one say little of the other."""
        return abs(self.window_excess or 0.0) >= OTHER_STEP_SHARE

    @property
    def gain_scale(self) -> float | None:
        """The run's usual step over that of the window; ``None`` if no window was profiled."""
        return self.ns / self.window_ns if self.window_ns else None


class Phase(Struct, frozen=True):
    """Host time of one phase, over the recorded steps that count."""

    name: str
    """``data``, ``h2d``, ``forward``, ``backward``, ``optimizer``, ``other``, or the user's own."""
    ns: float
    """Mean time per step, ns."""
    share: float
    """Share of the step."""


class RecordedSteps(Struct, kw_only=True):
    """Figures of the recorder: steps around the profiled window, which no profiler slowed."""

    steps: int
    """Number of steps that were recorded."""
    used: int
    """Number of steps that count: after the warm-up, no window open, not the one after a window.
    Where the host runs ahead of the device, those that CUDA events timed."""
    median_ns: float | None
    """Median of the steps that count, ns; ``null``: there are none, or the host runs ahead and no
    step was timed on the device."""
    mean_ns: float | None
    """Mean of the steps that count, ns; ``null``: as for the median."""
    p99_ns: float | None
    """99th percentile of the steps that count, ns; ``null``: fewer than a hundred."""
    profiled_steps: int
    """Number of steps while a window was open."""
    profiled_median_ns: float | None
    """Median of the steps that windows kept, ns; ``null``: fewer than two."""
    profiler_overhead: float | None = field(name="observer_effect")
    """Overhead of the profiler, as ``StepTime.profiler_overhead``, but over the steps of all
    windows."""
    phases: list[Phase]
    """Host time by phase, largest first; adds up to the mean step on the host."""
    samples_per_second: float | None
    """Samples per second of this rank in the steps that count; ``null``: batch sizes unknown."""
    samples_per_step: int | None = None
    """Batch size in most steps, gradient accumulation included; ``null``: not recorded."""
    inference: bool = False
    """Whether the loop does not train: its steps are forwards, or calls of ``generate``."""
    outside_ns: int | None = None
    """Time between training steps, summed, ns: validation, checkpoints and the like; ``null``: the
    loop does not train."""
    outside_share: float | None = None
    """Share of that in the time of the steps after the first and of what lies between them;
    ``null``: as above."""
    ended: str | None
    """End of the run: ``finished``, ``exception``, ``interrupted`` or ``disk`` (nothing more could
    be written); ``null``: killed, or still going on."""
    windows: list[str]
    """Outcome of each profiled window, one line each."""
    program: str | None = None
    """File name of the program, ``train.py``; ``null``: not recorded."""


class StepVariationPart(Struct, frozen=True):
    """A class of time, kernel, copy or operator that longer steps have more of."""

    name: str
    """Class of time (``idle: `` and its cause for idle time; without device work ``host: `` and its
    class), or name of a kernel, copy or operator."""
    ns: float
    """Mean excess of its time in a longer step over that in a shorter one, ns."""
    short_count: float | None = None
    """Mean number of runs in a shorter step; ``null``: it is no device work."""
    long_count: float | None = None
    """Mean number of runs in a longer step; ``null``: it is no device work."""


class StepVariation(Struct, frozen=True):
    """The longer half of the steps compared with the shorter half, and what makes them longer."""

    short_ns: float
    """Mean of the shorter half, ns."""
    long_ns: float
    """Mean of the longer half, ns."""
    classes: list[StepVariationPart] = field(default_factory=list)
    """Exclusive classes of the step's time that hold 15% of the difference or more, largest
    first."""
    work: list[StepVariationPart] = field(default_factory=list)
    """Device work that holds as much of the difference, hidden or not."""

    @property
    def difference_ns(self) -> float:
        """Mean of the longer half less that of the shorter half, ns."""
        return self.long_ns - self.short_ns
