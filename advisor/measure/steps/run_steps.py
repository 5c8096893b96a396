"""Recorded steps as columns: the used steps, and their times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import numpy as np

from advisor.core.intervals import Bools, Floats, Ints
from advisor.core.report_steps import StepTime
from advisor.core.run_directory import (
    FAULT_NS,
    FIRST_COMPARED_STEP,
    MAX_VALUE,
    is_sane,
    read_recording,
)

if TYPE_CHECKING:
    from advisor.core.run_directory import GpuSample, HostSample, RankRecord, StepRow
    from advisor.measure.host.stacks import HottestLine, SampledStack


WARM_UP_STEPS = 10
"""Recorded steps at the start that do not count: compilation, autotuning, caches. In a short run, a
fifth (as in ``advisor compare``), at least one from ``MIN_STEPS_TO_WARM_UP`` on."""
MIN_STEPS_TO_WARM_UP = 3
MIN_USED = 5
"""Minimum number of used steps, if a run has more than twice as many steps."""
MAX_STEPS_APART, MIN_AROUND = 20, 5
"""Maximum distance of unprofiled steps compared with a profiled one; minimum number of them."""
_MIN_FAULT_SHARE = 0.1
"""Minimum share of a step in page faults that a window must end to change the step's length."""
MIN_SHORTER = 0.05
"""Minimum share by which steps become shorter where a window ends page faults."""
_MIN_SAMPLES = 3
"""Minimum number of samples for reporting the mean use of the cores."""
_MIN_FORWARD_SHARE = 0.9
"""Minimum share of steps with a recorded forward for a loop that counts as inference: with fewer,
unrecorded code (a compiled step) may train."""
MIN_PROFILED = 2
"""Minimum number of profiled steps for reporting their median."""
MIN_CERTAIN_SHARE = 0.5
"""Minimum share of the profiled steps' excess length that exceeds the variation of the steps around
them in every window. Below it, the overhead cannot be separated from the variation."""
_MIN_STEPS = 5
"""Minimum number of steps whose median is a run's step time."""
MIN_DEVICE_TIMED = 3
"""Minimum number of steps with a recorded device time that represent the others."""
MAX_WAITING_SHARE, MAX_WAITING_NS = 0.05, 100_000
"""Maximum differences of host and device time, as a share and in ns, if the host waits for the
device in a step."""
MAX_AHEAD_SHARE = 0.1
"""Maximum share of steps in which the host does not wait; with more, it runs ahead."""
MAX_NOT_WAITING_SHARE = 0.9
"""Share of the device's time per step below which the host's time shows that it does not wait."""


MAX_FAULT_NS = 1_000_000
"""Time of a page fault, ns, above which a measurement is not believed."""


LONG_FAULT_NS = 2_000
"""Time of a page fault, ns, that is not exceeded by much where it was not measured."""
MAX_FAULTS_RATIO = 1.6
"""Maximum ratio of the time that a window saved to the time of the page faults that it ended. If it
saved more, something else made the steps before it long."""


class FaultsAroundWindow(NamedTuple):
    """Page faults of the process that needed no disk, before and after the first window. The window
    can end them: the C library keeps more freed memory once the profiler has freed large blocks."""

    per_step: float
    """Mean number in a step before the window."""
    growth: int
    """Growth of the largest resident memory during the counted steps, bytes."""
    counted: Bools
    """Steps in which they were counted."""
    after: float | None
    """Mean number in a step after the window, or ``None`` if not sampled."""
    fault_ns: float | None = None
    """Time of a page fault that the recorder measured on the machine, ns, or ``None``."""


class RunSteps:
    """Steps and samples of one rank. All times are ns; missing values are NaN in float columns."""

    def __init__(
        self, rank_record: RankRecord, ahead_of: Callable[[], float | None] | None = None
    ) -> None:
        """Read a record. ``ahead_of`` returns the device time in the mean step of a trace of this
        rank in which the host runs ahead, ns, or ``None`` if it does not, or without a trace."""
        self.rank_record = rank_record
        self._ahead_of = ahead_of
        self.steps: list[StepRow] = [step for step in rank_record.steps if is_sane(step)]

    # -- which steps --------------------------------------------------------------------------

    @cached_property
    def dur(self) -> Ints:
        """Time of each step on the host, from its begin to its end."""
        return np.array([step.dur for step in self.steps], dtype=np.int64)

    @cached_property
    def device_dur(self) -> Floats:
        """Time of each step on the device, from the CUDA event at its begin to the event at the
        next begin, including idle time. NaN if it has none."""
        return np.array(
            [finite_or_nan(sum(step.gpu.values())) if step.gpu else np.nan for step in self.steps]
        )

    @cached_property
    def host_is_ahead(self) -> bool:
        """Whether the host launches steps before the device has run the previous ones, so that host
        times say nothing about a step."""
        is_timed = self.used & ~np.isnan(self.device_dur)
        device, host = self.device_dur[is_timed], self.dur[is_timed]
        if len(device):
            differs = np.abs(device - host) > np.maximum(MAX_WAITING_SHARE * device, MAX_WAITING_NS)
            return bool(differs.mean() > MAX_AHEAD_SHARE)
        device_time = None if self._ahead_of is None or not self.used.any() else self._ahead_of()
        return (
            device_time is not None
            and float(np.median(self.dur[self.used])) < MAX_NOT_WAITING_SHARE * device_time
        )

    @cached_property
    def durations(self) -> Floats:
        """Length of each step, ns: its device time if the host runs ahead, else its host time. NaN
        if unknown."""
        if not self.host_is_ahead:
            return self.dur.astype(np.float64)
        is_known = self.used & ~np.isnan(self.device_dur)
        too_few = is_known.sum() < MIN_DEVICE_TIMED
        return np.full(len(self.steps), np.nan) if too_few else self.device_dur

    @cached_property
    def timed(self) -> Bools:
        """Used steps with a known length."""
        result: Bools = self.used & ~np.isnan(self.durations)
        return result

    @cached_property
    def timed_durations(self) -> Floats:
        """Lengths of the ``timed`` steps, ns."""
        return self.durations[self.timed]

    @cached_property
    def ts(self) -> Ints:
        """Start of each step."""
        return np.array([step.t for step in self.steps], dtype=np.int64)

    @cached_property
    def profiled(self) -> Bools:
        """Steps while a window was open."""
        return np.array([step.window is not None for step in self.steps], dtype=bool)

    @cached_property
    def after_warmup(self) -> Bools:
        """Steps after the warm-up."""
        result = np.ones(len(self.steps), dtype=bool)
        number = len(self.steps)
        result[: min(WARM_UP_STEPS, max(number // 5, int(number >= MIN_STEPS_TO_WARM_UP)))] = False
        return result

    @cached_property
    def unprofiled(self) -> Bools:
        """Steps with no window open, except the step after a window, which stops the profiler."""
        result = ~self.profiled
        result[1:] &= ~self.profiled[:-1]
        return result

    @cached_property
    def page_faults(self) -> FaultsAroundWindow | None:
        """Page faults before the first window, or ``None`` if not counted."""
        event: dict[str, Any] = next(iter(self.rank_record.events_of("window")), {})
        steps, faults, growth = (
            event.get(name) for name in ("fault_steps", "minor_faults", "memory_growth")
        )
        if not isinstance(steps, list) or len(steps) != 2:
            return None
        if not (_is_count(faults) and _is_count(growth) and all(map(_is_count, steps))):
            return None
        number = self.column("n")
        counted = (number >= steps[0]) & (number <= steps[1])
        if not counted.any():
            return None
        after = self._faults_after(int(np.flatnonzero(counted)[-1]))
        fault_ns = event.get("fault_ns")
        if not isinstance(fault_ns, int | float) or not 0 < fault_ns < MAX_FAULT_NS:
            fault_ns = None
        return FaultsAroundWindow(faults / int(counted.sum()), growth, counted, after, fault_ns)

    def _faults_after(self, row: int) -> float | None:
        """Return the page faults per step that samples counted after the first window, which
        follows the step in ``row``, or ``None`` if not sampled for ``MIN_USED`` steps."""
        taken = [
            (sample.t, sample.host.minor_faults)
            for sample in self.rank_record.samples
            if sample.host is not None and sample.host.minor_faults is not None
        ]
        undisturbed = self.unprofiled & ~self.exporting
        undisturbed[: row + 1] = False
        faults = time = 0
        for (t, before), (next_t, count) in pairwise(taken):
            first, last = np.searchsorted(self.ts, (t, next_t), side="right") - 1
            if first >= 0 and undisturbed[first : last + 1].all():
                faults, time = faults + count - before, time + next_t - t
        length = float(np.median(self.dur[undisturbed])) if undisturbed.any() else 0.0
        return faults * length / time if time >= MIN_USED * length > 0 else None

    @cached_property
    def before_window(self) -> Bools:
        """Steps before the first window, without the first ones, if the window ended page faults
        that made them longer: the steps after it are those of another program. Else no steps.
        Also none if the steps became shorter than these page faults explain."""
        none = np.zeros(len(self.steps), dtype=bool)
        faults = self.page_faults
        if faults is None or faults.after is None:
            return none
        before = faults.counted.copy()
        before[:FIRST_COMPARED_STEP] = False
        after = self._after_window
        if before.sum() < _MIN_STEPS or not after.any():
            return none
        usual, next_usual = float(np.median(self.dur[before])), float(np.median(self.dur[after]))
        ended_ns = (faults.per_step - faults.after) * (faults.fault_ns or FAULT_NS)
        has_changed = next_usual <= (1 - MIN_SHORTER) * usual
        longest_ns = (faults.per_step - faults.after) * (faults.fault_ns or LONG_FAULT_NS)
        has_changed &= usual - next_usual <= MAX_FAULTS_RATIO * longest_ns
        return before if has_changed and ended_ns >= _MIN_FAULT_SHARE * usual else none

    @cached_property
    def saved_by_window(self) -> float | None:
        """Time by which the median step became shorter when the first window ended page faults, ns,
        or ``None`` if it ended none."""
        before = self.before_window
        if not before.any():
            return None
        return float(np.median(self.dur[before]) - np.median(self.dur[self._after_window]))

    @cached_property
    def _after_window(self) -> Bools:
        """Steps after the first window and its trace, if page faults before it are known."""
        result = self.unprofiled & ~self.exporting
        if self.page_faults is not None:
            result[: np.flatnonzero(self.page_faults.counted)[-1] + 1] = False
        return result

    @cached_property
    def used(self) -> Bools:
        """Steps that count: ``before_window`` if there are such steps, else ``unprofiled`` steps
        after the warm-up, and not while a trace is written. If there are too few, as in a short run
        of fast steps, steps while a trace is written count too. If there are still too few, no step
        counts."""
        if self.before_window.any():
            return self.before_window
        comparable = self.after_warmup & self.unprofiled
        min_count = MIN_USED if len(self.steps) > 2 * MIN_USED else 1
        for candidates in (comparable & ~self.exporting, comparable):
            if candidates.sum() >= min_count:
                return candidates
        return np.zeros(len(self.steps), dtype=bool)

    @cached_property
    def exporting(self) -> Bools:
        """Steps while a trace is written."""
        return np.array([step.exporting for step in self.steps], dtype=bool)

    @cached_property
    def inference(self) -> bool:
        """Whether the loop does not train: the recorder said so, or its steps were marked by hand
        and contain forwards but neither backward nor optimizer."""
        if self.rank_record.inference:
            return True
        kinds = [step.phases.keys() for step in self.steps]
        if any(phases & {"backward", "optimizer"} for phases in kinds):
            return False
        return sum("forward" in phases for phases in kinds) >= max(
            1, _MIN_FORWARD_SHARE * len(kinds)
        )

    @cached_property
    def outside_steps_ns(self) -> int:
        """Time between the steps for validation, checkpoints and similar work, ns. Time before the
        first step, such as imports and building the model, does not count."""
        lengths = (step.evaluation for step in self.steps if step.n)
        return sum(length for length in lengths if 0 <= length < MAX_VALUE)

    @cached_property
    def after_first_ns(self) -> int:
        """Time of the steps after the first, which has start-up costs, and of the time between
        them, ns. ``outside_steps_ns`` is a part of it."""
        steps = self.dur[[bool(step.n) for step in self.steps]]
        return int(steps.sum()) + self.outside_steps_ns

    @cached_property
    def unseen_end(self) -> tuple[int, float]:
        """Time from the last step to the end of an inference run, ns, and its share of the time
        since the first step. (0, 0) if the end is unknown, or the run trains."""
        ends = [event.t for event in self.rank_record.events if event.kind == "end"]
        if not self.steps or not ends or not self.inference:
            return 0, 0.0
        start, last_end = int(self.ts[0]), int((self.ts + self.dur).max())
        remaining = max(ends) - last_end
        return (remaining, remaining / (max(ends) - start)) if remaining > 0 else (0, 0.0)

    @cached_property
    def count(self) -> int:
        """Number of steps used for the figures."""
        return len(self.timed_durations)

    # -- how long -----------------------------------------------------------------------------

    @cached_property
    def median(self) -> float | None:
        """Median length of the used steps, or ``None`` if there are none or it is unknown."""
        return float(np.median(self.timed_durations)) if self.count else None

    @cached_property
    def mean(self) -> float | None:
        """Mean length of the used steps."""
        return float(self.timed_durations.mean()) if self.count else None

    @cached_property
    def varies(self) -> bool:
        """Whether mean and median differ, so that reports show the mean step first."""
        return bool(self.median) and StepTime(ns=self.median or 1, mean_ns=self.mean or 1).varies

    @property
    def reference(self) -> float | None:
        """Length of the step that a report leads with, as in ``StepTime.reference_ns``."""
        return self.mean if self.varies else self.median

    @cached_property
    def step_time(self) -> StepTime | None:
        """Step time while nothing is profiled, or ``None`` if not measured, or of too few steps."""
        min_steps = MIN_DEVICE_TIMED if self.host_is_ahead else _MIN_STEPS
        if not self.median or self.count < min_steps:
            return None
        return StepTime(ns=self.median, mean_ns=self.mean or self.median)

    @property
    def may_run_ahead(self) -> bool:
        """Whether only a trace shows how long a step is: device times of steps are not recorded,
        and training does not have to wait for the device."""
        has_no_device_times = bool(np.isnan(self.device_dur).all())
        return has_no_device_times and bool(self.rank_record.rank.devices) and not self.inference

    def typical(self, values: Floats) -> float:
        """Return the mean of a figure of the used steps if they vary, else its median."""
        return float(np.mean(values) if self.varies else np.median(values))

    @staticmethod
    def later_half_mean(values: Floats) -> float:
        """Return the mean of a figure of the used steps in the later half of them, in which the
        program and the recorder have started. 0 without steps."""
        return float(np.mean(values[len(values) // 2 :])) if len(values) else 0.0

    def quantile(self, share: float) -> float | None:
        """Return a quantile of the lengths of the used steps."""
        return float(np.quantile(self.timed_durations, share)) if self.count else None

    @cached_property
    def active(self) -> Bools:
        """Steps that a window kept, without its warm-up and the step in which the trace is written.
        All steps of a window if this is not recorded."""
        result = self.profiled.copy()
        number = np.array([step.n for step in self.steps], dtype=np.int64)
        windows = self.column("window")
        for event in self.rank_record.events_of("window"):
            window_number, steps = event.get("window"), event.get("steps")
            if event.get("state") not in ("done", "stopped") or not isinstance(window_number, int):
                continue
            if not isinstance(steps, list) or len(steps) != 2:
                continue
            if all(isinstance(end, int) and abs(end) < MAX_VALUE for end in steps):
                in_window = windows == window_number
                result[in_window] = ((number >= steps[0]) & (number <= steps[1]))[in_window]
        return result

    def median_of(self, steps: Bools) -> float | None:
        """Return the median length of steps that windows kept, or ``None`` for fewer than two."""
        inside = _drop_missing(self.durations[steps])
        return float(np.median(inside)) if len(inside) >= MIN_PROFILED else None

    def median_around(self, steps: Bools) -> float | None:
        """Return the median length of the unprofiled steps within 20 of these, so that a run whose
        speed drifts is compared with itself. ``None`` for fewer than five."""
        result = self.durations_around(steps)
        return float(np.median(result)) if len(result) >= MIN_AROUND else None

    def kept_by_window(self, window: int) -> Bools:
        result: Bools = self.active & (self.column("window") == window)
        return result

    def durations_around(self, steps: Bools) -> Floats:
        """Return the known lengths of the unprofiled steps within 20 of the given ones, without the
        first three and the one after a window."""
        return _drop_missing(self.durations[self._is_around(steps)])

    def _is_around(self, steps: Bools) -> Bools:
        step_numbers = np.flatnonzero(steps)
        if not len(step_numbers):
            return np.zeros(len(self.steps), dtype=bool)
        comparable = self.unprofiled.copy()
        comparable[:FIRST_COMPARED_STEP] = False
        if self.before_window.any():
            comparable = self.before_window
        indices = np.arange(len(self.steps))
        following = np.searchsorted(step_numbers, indices)
        right = step_numbers[np.minimum(following, len(step_numbers) - 1)]
        left = step_numbers[np.maximum(following - 1, 0)]
        is_near: Bools = comparable & (
            np.minimum(np.abs(right - indices), np.abs(left - indices)) <= MAX_STEPS_APART
        )
        return is_near

    def profiler_overhead(self, steps: Bools) -> float | None:
        """Return the excess length of profiled steps, as a share of the unprofiled steps around
        them. ``None`` if there are too few of either, or the variation of unprofiled steps explains
        more than half of the excess in one of the windows. Negative if variation outweighs it."""
        profiled, unprofiled = self.median_of(steps), self.median_around(steps)
        if profiled is None or not unprofiled:
            return None
        excess = profiled / unprofiled - 1
        return excess if excess <= 0 or self._min_excess >= MIN_CERTAIN_SHARE * excess else None

    @cached_property
    def _min_excess(self) -> float:
        """Minimum excess over all windows of the profiled steps that variation does not explain, as
        a share. It compares lower quartiles of profiled and unprofiled steps, and medians of the
        profiled steps and as many unprofiled steps directly before or after them."""
        windows = np.unique(self.column("window")[self.active])
        masks = [self.active & (self.column("window") == window) for window in windows]
        result = []
        for steps in [
            steps_of_window for steps_of_window in masks if steps_of_window.sum() >= MIN_PROFILED
        ] or [self.active]:
            inside, around = (
                _drop_missing(self.durations[steps]),
                np.flatnonzero(self._is_around(steps)),
            )
            around = around[~np.isnan(self.durations[around])]
            if len(inside) < MIN_PROFILED or len(around) < MIN_AROUND:
                continue
            first, last = np.flatnonzero(steps)[[0, -1]]
            undisturbed = around[~self.exporting[around]]
            before = undisturbed[undisturbed < first][-len(inside) :]
            after = undisturbed[undisturbed > last][: len(inside)]
            for share, compared in ((0.25, around), (0.5, before), (0.5, after)):
                if len(compared) < MIN_PROFILED:
                    continue
                unprofiled = np.quantile(self.durations[compared], share, method="lower")
                profiled = np.quantile(inside, share, method="lower")
                result += [float(profiled / unprofiled - 1)] if unprofiled else []
        return min(result, default=np.inf)

    @cached_property
    def phases(self) -> dict[str, Floats]:
        """Host time of each step by phase, the largest first; they add up to ``dur``."""
        names = sorted({name for step in self.steps for name in step.phases})
        result = {
            name: np.array([finite_or_nan(step.phases.get(name, 0)) for step in self.steps])
            for name in names
        }
        return dict(sorted(result.items(), key=lambda item: -item[1][self.used].sum()))

    def phase(self, name: str) -> Floats | None:
        """Return the host time of one phase in the used steps, or ``None`` if not measured."""
        result = self.phases.get(name)
        return None if result is None or not self.used.any() else result[self.used]

    def share(self, name: str) -> float | None:
        """Return a phase's share of the time of the used steps, or ``None`` if not measured."""
        result, total = self.phase(name), float(self.dur[self.used].sum())
        return None if result is None or total <= 0 else float(result.sum()) / total

    # -- the other columns --------------------------------------------------------------------

    def column(self, name: str) -> Floats:
        """Return a field of every step, or NaN if it was not measured."""
        return np.array(
            [finite_or_nan(getattr(step, name)) for step in self.steps], dtype=np.float64
        )

    @cached_property
    def span(self) -> tuple[int, int]:
        """First start and last end of the steps after the warm-up, or (0, 0) if there are none."""
        if not self.after_warmup.any():
            return 0, 0
        ts, dur = self.ts[self.after_warmup], self.dur[self.after_warmup]
        return int(ts[0]), int((ts + dur).max())

    @cached_property
    def samples_per_second(self) -> float | None:
        """Batch sizes over the time of the used steps, or ``None`` if sizes are not recorded."""
        sizes = self.column("samples")[self.timed]
        is_known = ~np.isnan(sizes)
        if not is_known.any() or is_known.mean() < 0.9:
            return None
        time = float(self.timed_durations[is_known].sum())
        return float(sizes[is_known].sum()) * 1e9 / time if time else None

    @cached_property
    def samples_per_step(self) -> int | None:
        """Samples of most steps, including gradient accumulation, or ``None`` if not recorded."""
        counts = Counter(
            step.samples * max(step.micro, 1)
            for step in self.rank_record.steps
            if step.samples is not None
        )
        return counts.most_common(1)[0][0] if counts else None

    @cached_property
    def epoch_steps(self) -> int | None:
        """Steps of an epoch: the batches of the loader that feeds them, over the batches of a step.
        ``None`` if not recorded, or if there are several loaders."""
        lengths = {loader.get("length") for loader in self.loaders}
        batches = lengths.pop() if len(lengths) == 1 else None
        if (
            not isinstance(batches, int)
            or not 0 < batches < MAX_VALUE
            or not self.rank_record.steps
        ):
            return None
        counts = Counter(max(step.micro, 1) for step in self.rank_record.steps)
        return max(1, batches // counts.most_common(1)[0][0])

    # -- telemetry ----------------------------------------------------------------------------

    @cached_property
    def hosts(self) -> list[tuple[int, HostSample]]:
        """Samples of the host while steps ran, without the warm-up: (time, sample)."""
        first, last = self.span
        return [
            (sample.t, sample.host)
            for sample in self.rank_record.samples
            if sample.host is not None and first <= sample.t <= last
        ]

    def host(self, name: str) -> Floats:
        """Return a field of the host's samples, without missing values."""
        return _drop_missing([getattr(sample, name) for _, sample in self.hosts])

    def counter_increase(self, name: str) -> tuple[int, int] | None:
        """Return the increase of a counter of the host between its first and last sample, and the
        time between these, ns. ``None`` for fewer than two samples."""
        counts = ((ns, getattr(sample, name)) for ns, sample in self.hosts)
        samples = [(ns, count) for ns, count in counts if count is not None]
        if len(samples) < 2 or samples[-1][0] <= samples[0][0]:
            return None
        (start, first), (end, last) = samples[0], samples[-1]
        return last - first, end - start

    @cached_property
    def gpus(self) -> list[GpuSample]:
        """Samples of the GPU that this rank uses while steps ran, without the warm-up."""
        return [gpu for _, gpu in self.timed_gpu_samples]

    @cached_property
    def timed_gpu_samples(self) -> list[tuple[int, GpuSample]]:
        """Samples of ``gpus`` with their times: (time, sample)."""
        first, last = self.span
        wanted = self.uuid
        return [
            (sample.t, gpu)
            for sample in self.rank_record.samples
            if first <= sample.t <= last
            for gpu in sample.gpus
            if gpu.uuid == wanted
        ]

    @cached_property
    def uuid(self) -> str | None:
        """UUID of the GPU in use, as telemetry spells it: the first device of the rank, or the only
        sampled GPU. ``None`` if unknown."""
        sampled = list(dict.fromkeys(g.uuid for s in self.rank_record.samples for g in s.gpus))
        device_uuid = next((device.uuid for device in self.rank_record.rank.devices), None)
        if device_uuid is not None:
            bare = device_uuid.removeprefix("GPU-").lower()
            return next((u for u in sampled if u and u.removeprefix("GPU-").lower() == bare), None)
        return sampled[0] if len(sampled) == 1 else None

    def gpu(self, name: str) -> Floats:
        """Return a field of the GPU's samples, without missing values."""
        return _drop_missing([getattr(sample, name) for sample in self.gpus])

    @cached_property
    def stacks(self) -> list[SampledStack]:
        """Python stacks of the training thread, sampled outside windows."""
        from advisor.measure.host.stacks import read_stacks

        return read_stacks(self.rank_record)

    @cached_property
    def loop_share(self) -> float | None:
        """Share of the loop's own code in sampled time outside loading, forward, backward and
        optimizer. The rest is collectives that the loop calls. ``None`` with too few samples."""
        from advisor.measure.host.stacks import COMMUNICATION, LOOP, MIN_SAMPLES

        samples = {LOOP: 0, COMMUNICATION: 0}
        for stack in self.stacks:
            if stack.part in samples:
                samples[stack.part] += stack.samples
        total = sum(samples.values())
        return samples[LOOP] / total if total >= MIN_SAMPLES else None

    def hottest_line(self, part: str) -> HottestLine | None:
        """Find the line of the user's code that takes most of a part of the step (``data``,
        ``loop`` …), or ``None`` if not sampled, or too rarely."""
        from advisor.measure.host.stacks import hottest_line

        return hottest_line([stack for stack in self.stacks if stack.part == part])

    # -- what is reported once --------------------------------------------------------------------

    def flag(self, name: str) -> Any:
        """Return a framework flag, or ``None`` if not recorded."""
        return self.rank_record.rank.flags.get(name)

    @cached_property
    def used_cores(self) -> float | None:
        """Mean number of cores that this process and its children kept busy while steps ran, or
        ``None`` if not sampled."""
        percentages = self.host("process_cpu")
        return float(percentages.mean()) / 100 if len(percentages) else None

    @cached_property
    def other_programs_cores(self) -> float | None:
        """Mean number of cores that other programs of the machine kept busy, if this process may
        use all cores, or ``None`` if not sampled."""
        rank, machine = self.rank_record.rank, self.host("cpu")
        total = rank.cpus_total or rank.cpus
        if rank.cpus is None or total is None or rank.cpus < total or not len(machine):
            return None
        return max(0.0, float(machine.mean()) / 100 * total - (self.used_cores or 0.0))

    @cached_property
    def run_delay_share(self) -> float | None:
        """Share of the time in which the main thread had work but no core, while steps ran.
        ``None`` if not sampled, or in fewer than ``_MIN_SAMPLES`` samples."""
        increase = self.counter_increase("run_delay")
        if increase is None or len(self.host("run_delay")) < _MIN_SAMPLES:
            return None
        waited, elapsed = increase
        return min(1.0, max(0.0, waited / elapsed))

    @cached_property
    def other_programs_share(self) -> float | None:
        """Share of the time in which the main thread had work, but other programs had the cores.
        ``run_delay_share`` without the part of this process's workers. ``None`` if not sampled."""
        waited, others = self.run_delay_share, self.other_programs_cores
        if waited is None or others is None:
            return None
        return waited * others / (others + self.worker_cores) if others else 0.0

    @cached_property
    def worker_cores(self) -> float:
        """Mean number of cores that this process's workers use; 0 if not sampled."""
        workers = self.host("children_cpu")
        return float(workers.mean()) / 100 if len(workers) else 0.0

    @cached_property
    def free_cores(self) -> float | None:
        """Mean number of idle cores that this process may use, or ``None`` if not sampled. Ranks
        that share a machine each get their share."""
        rank = self.rank_record.rank
        if rank.cpus is None or self.used_cores is None:
            return None
        if len(self.host("process_cpu")) < _MIN_SAMPLES:
            return None
        return max(0.0, rank.cpus - self.used_cores - (self.other_programs_cores or 0.0))

    def computing_share(self, loading: float, *, on_host: bool) -> float | None:
        """Estimate the maximum share of the main thread's loading that can be computing, from the
        CPU time of the process; the rest is waiting (storage, a sleep). ``loading`` is its share of
        the step. ``on_host`` says that the step computes on the CPU too, on at least one core.
        ``None`` if not sampled."""
        if self.used_cores is None:
            return None
        step_cores = 1 - loading if on_host else 0.0
        return min(1.0, max(0.0, self.used_cores - step_cores) / max(loading, 1e-9))

    def remaining_loading_share(
        self, loading: float, computed: float, *, alone: bool = False
    ) -> float | None:
        """Estimate the share of the main thread's loading that remains with workers. Workers
        compete for cores that the step computes on: threads that share an operator wait for the
        thread whose core a worker uses. Idle cores are free for workers. If use was not sampled,
        PyTorch's threads are assumed to be busy. ``alone`` ignores other programs. ``None`` if
        neither is known."""
        cores, threads = self.rank_record.rank.cpus, self.flag("num_threads")
        if not cores or (self.used_cores is None and not isinstance(threads, int)):
            return None
        step_share = max(1 - loading, 1e-9)
        if self.used_cores is None:
            busy = float(threads or 1)
        else:
            busy = max(1.0, (self.used_cores - computed * loading) / step_share)
        others = 0.0 if alone else self.other_programs_cores or 0.0
        spare = max(0.0, cores - busy - others)
        return max(0.0, computed - spare * step_share / max(loading, 1e-9))

    @cached_property
    def loaders(self) -> list[dict[str, Any]]:
        """DataLoaders that fed steps, by first use. In training, a loader that was only iterated
        for validation is left out."""
        if self.inference:
            return self.rank_record.events_of("loader")
        iterations = self.rank_record.events_of("loader_iter")
        evaluation_ids = [item.get("id") for item in iterations if item.get("evaluation")]
        training_ids = [item.get("id") for item in iterations if not item.get("evaluation")]
        return [
            event
            for event in self.rank_record.events_of("loader")
            if event.get("id") in training_ids or event.get("id") not in evaluation_ids
        ]


def finite_or_nan(value: float | None) -> float:
    """Return a figure for a column: NaN if it is missing or impossibly large."""
    return float(value) if value is not None and -MAX_VALUE < value < MAX_VALUE else np.nan


def _is_count(value: Any) -> TypeGuard[int]:
    """Return whether a value is a number of things, of a size that a record can have."""
    return type(value) is int and 0 <= value < MAX_VALUE


def _drop_missing(values: Sequence[float | None] | Floats) -> Floats:
    result = np.array([finite_or_nan(value) for value in values], dtype=np.float64)
    return result[~np.isnan(result)]


class RunSummary(NamedTuple):
    """Summary of a run by its records, without an analysis."""

    started_unix_ns: int
    command: str
    commit: str
    """Commit of the working directory's repository, with ``+`` if it had changes."""
    ranks: int
    steps: int
    program: str
    """File names of the program and of a Python file that it is given. Empty if unknown."""
    step: StepTime | None
    """Step time of the first rank, or ``None`` if not measured, or only a trace shows it."""

    @classmethod
    def read(cls, path: str) -> RunSummary:
        """Read a run. Raises AdvisorError if the run cannot be read."""
        recording = read_recording(path)
        manifest = recording.manifest
        steps = next((RunSteps(record) for record in recording.ranks.values()), None)
        names = (PurePath(word).name for word in manifest.command)
        commit = (manifest.git_commit or "")[:10] + "+" * bool(manifest.git_dirty)
        return cls(
            manifest.started_unix_ns,
            " ".join(manifest.command),
            commit,
            len(recording.ranks),
            0 if steps is None else len(steps.steps),
            " ".join(name for name in names if name.endswith(".py")),
            None if steps is None or steps.may_run_ahead else steps.step_time,
        )
