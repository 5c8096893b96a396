"""Recorded steps as columns: those that count, and their times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from advisor.core.intervals import Bools, Floats, Ints
from advisor.core.report_steps import StepTime
from advisor.core.run_directory import MAX_VALUE, is_sane, read_recording

if TYPE_CHECKING:
    from advisor.core.run_directory import GpuSample, HostSample, RankRecord, StepRow
    from advisor.measure.host.stacks import HottestLine, SampledStack


WARM_UP = 10
"""Recorded steps at the start that do not count: compilation, autotuning, caches. Of a short run,
a fifth (as ``advisor compare`` does it), the first one from ``FEW`` steps on."""
FEW = 3
MIN_USED = 5
"""Steps that count, at least, where a run has more than twice as many."""
START_UP = 3
"""First steps that are not compared even with a window that comes early."""
NEAR, MIN_AROUND = 20, 5
"""Largest distance of unprofiled steps compared with a profiled one; fewest such steps."""
MIN_SAMPLES = 3
"""Samples from which the mean use of the cores is reported."""
MIN_FORWARD_SHARE = 0.9
"""Share of steps with a recorded forward from which a loop counts as inference: in fewer, what is
not recorded (a compiled step) may train."""
MIN_PROFILED = 2
"""Profiled steps from which their median is reported."""
MIN_CERTAIN = 0.5
"""Part of the profiled steps' excess length that must exceed the variation of the steps around them
in every window. Below it, the profiler cannot be separated from it."""
MIN_STEPS = 5
"""Number of steps from which their median is a run's step time."""
MIN_DEVICE_TIMED = 3
"""Steps with a recorded device time from which they stand for the others."""
SAME_SHARE, SAME_NS = 0.05, 100_000
"""Differences of host and device time, as a share and in ns, up to which the host waits for the
device in a step."""
MAX_AHEAD = 0.1
"""Share of the steps in which the host may not wait; with more, it runs ahead."""
FAR_BELOW = 0.9
"""Share of the device's time per step below which the host's time shows that it does not wait."""


class StepRecords:
    """Steps and samples of one rank. All times ns; missing is NaN in columns of floats."""

    def __init__(
        self, record: RankRecord, ahead_of: Callable[[], float | None] | None = None
    ) -> None:
        """Read a record. ``ahead_of``: device time in the mean step of a trace of this rank in
        which the host runs ahead, ns; ``None``: it does not, or there is no trace."""
        self.record = record
        self._ahead_of = ahead_of
        self.steps: list[StepRow] = [step for step in record.steps if is_sane(step)]

    # -- which steps --------------------------------------------------------------------------

    @cached_property
    def dur(self) -> Ints:
        """Time of each step on the host, from its begin to its end."""
        return np.array([step.dur for step in self.steps], dtype=np.int64)

    @cached_property
    def device_dur(self) -> Floats:
        """Time of each step on the device, between CUDA events where it begins and where the next
        one does, idle time included; NaN: it has none."""
        return np.array(
            [finite_or_nan(sum(step.gpu.values())) if step.gpu else np.nan for step in self.steps]
        )

    @cached_property
    def host_is_ahead(self) -> bool:
        """Whether the host launches steps before the device has run those before: the time from one
        step to the next on the host says nothing about a step."""
        timed = self.used & ~np.isnan(self.device_dur)
        device, host = self.device_dur[timed], self.dur[timed]
        if len(device):
            apart = np.abs(device - host) > np.maximum(SAME_SHARE * device, SAME_NS)
            return bool(apart.mean() > MAX_AHEAD)
        busy = None if self._ahead_of is None or not self.used.any() else self._ahead_of()
        return busy is not None and float(np.median(self.dur[self.used])) < FAR_BELOW * busy

    @cached_property
    def durations(self) -> Floats:
        """Length of each step: its device time where the host runs ahead, else its host time, ns.
        NaN: unknown."""
        if not self.host_is_ahead:
            return self.dur.astype(np.float64)
        known = self.used & ~np.isnan(self.device_dur)
        few = known.sum() < MIN_DEVICE_TIMED
        return np.full(len(self.steps), np.nan) if few else self.device_dur

    @cached_property
    def timed(self) -> Bools:
        """Steps that count and whose length is known."""
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
        result[: min(WARM_UP, max(number // 5, int(number >= FEW)))] = False
        return result

    @cached_property
    def unprofiled(self) -> Bools:
        """Steps with no window open, without the one after a window, which stops the profiler."""
        result = ~self.profiled
        result[1:] &= ~self.profiled[:-1]
        return result

    @cached_property
    def used(self) -> Bools:
        """Steps that count: after the warm-up, with no window open, not the one after a window,
        which stops the profiler, and not while a trace is written. Where those are too few, as in
        a short run of fast steps, the ones while it is written count; where there are too few of
        them as well, none does."""
        plain = self.after_warmup & self.unprofiled
        enough = MIN_USED if len(self.steps) > 2 * MIN_USED else 1
        for some in (plain & ~self.exporting, plain):
            if some.sum() >= enough:
                return some
        return np.zeros(len(self.steps), dtype=bool)

    @cached_property
    def exporting(self) -> Bools:
        """Steps while a trace is written."""
        return np.array([step.exporting for step in self.steps], dtype=bool)

    @cached_property
    def inference(self) -> bool:
        """Whether the loop does not train: the recorder said so, or its steps were marked by hand
        and hold forwards and nothing learnt."""
        if self.record.inference:
            return True
        kinds = [step.phases.keys() for step in self.steps]
        if any(phases & {"backward", "optimizer"} for phases in kinds):
            return False
        return sum("forward" in phases for phases in kinds) >= max(
            1, MIN_FORWARD_SHARE * len(kinds)
        )

    @cached_property
    def outside_steps_ns(self) -> int:
        """Time between the steps that went into validation, checkpoints and the like, ns. Before
        the first step lie imports, the making of the model and the like: not between steps."""
        lengths = (step.evaluation for step in self.steps if step.n)
        return sum(length for length in lengths if 0 <= length < MAX_VALUE)

    @cached_property
    def after_first_ns(self) -> int:
        """Time of the steps after the first, which has start-up costs, and of what lies between
        them, ns: what ``outside_steps_ns`` is a share of."""
        steps = self.dur[[bool(step.n) for step in self.steps]]
        return int(steps.sum()) + self.outside_steps_ns

    @cached_property
    def unseen_end(self) -> tuple[int, float]:
        """Time from the last step to the end of an inference run, ns, and its share of the time
        since the first step; (0, 0): the end is not known, or the run trains."""
        ends = [event.t for event in self.record.events if event.kind == "end"]
        if not self.steps or not ends or not self.inference:
            return 0, 0.0
        begin, last = int(self.ts[0]), int((self.ts + self.dur).max())
        after = max(ends) - last
        return (after, after / (max(ends) - begin)) if after > 0 else (0, 0.0)

    @cached_property
    def count(self) -> int:
        """Number of steps that the figures use."""
        return len(self.timed_durations)

    # -- how long -----------------------------------------------------------------------------

    @cached_property
    def median(self) -> float | None:
        """Median length of the steps that count; ``None``: there are none, or it is not known."""
        return float(np.median(self.timed_durations)) if self.count else None

    @cached_property
    def mean(self) -> float | None:
        """Mean length of the steps that count."""
        return float(self.timed_durations.mean()) if self.count else None

    @cached_property
    def varies(self) -> bool:
        """Whether mean and median differ, so that reports lead with the mean step."""
        return bool(self.median) and StepTime(ns=self.median or 1, mean_ns=self.mean or 1).varies

    @cached_property
    def step_time(self) -> StepTime | None:
        """Step time while nothing is profiled; ``None``: not measured, or of too few steps."""
        least = MIN_DEVICE_TIMED if self.host_is_ahead else MIN_STEPS
        if not self.median or self.count < least:
            return None
        return StepTime(ns=self.median, mean_ns=self.mean or self.median)

    @property
    def may_run_ahead(self) -> bool:
        """Whether only a trace shows how long a step is: the device's time of steps is not
        recorded, and training need not wait for it."""
        untimed = bool(np.isnan(self.device_dur).all())
        return untimed and bool(self.record.rank.devices) and not self.inference

    def typical(self, values: Floats) -> float:
        """Return the mean of a figure of the steps that count where they vary, else its median."""
        return float(np.mean(values) if self.varies else np.median(values))

    def quantile(self, share: float) -> float | None:
        """Return a quantile of the lengths of the steps that count."""
        return float(np.quantile(self.timed_durations, share)) if self.count else None

    @cached_property
    def active(self) -> Bools:
        """Steps that a window kept: without its warm-up, and without the step in which the trace
        is written. All steps of windows of which that is not recorded."""
        result = self.profiled.copy()
        number = np.array([step.n for step in self.steps], dtype=np.int64)
        window = self.column("window")
        for event in self.record.events_of("window"):
            which, steps = event.get("window"), event.get("steps")
            if event.get("state") not in ("done", "stopped") or not isinstance(which, int):
                continue
            if not isinstance(steps, list) or len(steps) != 2:
                continue
            if all(isinstance(end, int) and abs(end) < MAX_VALUE for end in steps):
                own = window == which
                result[own] = ((number >= steps[0]) & (number <= steps[1]))[own]
        return result

    def median_of(self, steps: Bools) -> float | None:
        """Return the median length of steps that windows kept; ``None``: fewer than two."""
        inside = _known(self.durations[steps])
        return float(np.median(inside)) if len(inside) >= MIN_PROFILED else None

    def median_around(self, steps: Bools) -> float | None:
        """Return the median length of the unprofiled steps within 20 of these, so that a run whose
        speed drifts is compared with itself; ``None``: fewer than five."""
        result = self.durations_around(steps)
        return float(np.median(result)) if len(result) >= MIN_AROUND else None

    def kept_by_window(self, window: int) -> Bools:
        result: Bools = self.active & (self.column("window") == window)
        return result

    def durations_around(self, steps: Bools) -> Floats:
        """Return lengths of the unprofiled steps within 20 of some, where they are known, without
        the first three and the one after a window."""
        return _known(self.durations[self._around(steps)])

    def _around(self, steps: Bools) -> Bools:
        some = np.flatnonzero(steps)
        if not len(some):
            return np.zeros(len(self.steps), dtype=bool)
        plain = self.unprofiled.copy()
        plain[:START_UP] = False
        at = np.arange(len(self.steps))
        following = np.searchsorted(some, at)
        right = some[np.minimum(following, len(some) - 1)]
        left = some[np.maximum(following - 1, 0)]
        result: Bools = plain & (np.minimum(np.abs(right - at), np.abs(left - at)) <= NEAR)
        return result

    def profiler_overhead(self, steps: Bools) -> float | None:
        """Return the excess length of profiled steps, as a share of the unprofiled ones around
        them. ``None``: too few of either, or the variation of unprofiled steps explains more than
        half of it in one of the windows. Negative where variation outweighs it."""
        profiled, unprofiled = self.median_of(steps), self.median_around(steps)
        if profiled is None or not unprofiled:
            return None
        excess = profiled / unprofiled - 1
        return excess if excess <= 0 or self._min_excess >= MIN_CERTAIN * excess else None

    @cached_property
    def _min_excess(self) -> float:
        """Excess of the profiled steps that variation does not explain, in the window that has
        least of it, as a share: of the lower quartile over that of the unprofiled steps, and of
        the median over that of as many unprofiled steps right before it, and after it."""
        windows = np.unique(self.column("window")[self.active])
        kept = [self.active & (self.column("window") == window) for window in windows]
        result = []
        for steps in [each for each in kept if each.sum() >= MIN_PROFILED] or [self.active]:
            inside, around = _known(self.durations[steps]), np.flatnonzero(self._around(steps))
            around = around[~np.isnan(self.durations[around])]
            if len(inside) < MIN_PROFILED or len(around) < MIN_AROUND:
                continue
            first, last = np.flatnonzero(steps)[[0, -1]]
            alone = around[~self.exporting[around]]
            before = alone[alone < first][-len(inside) :]
            after = alone[alone > last][: len(inside)]
            for share, compared in ((0.25, around), (0.5, before), (0.5, after)):
                if len(compared) < MIN_PROFILED:
                    continue
                usual = np.quantile(self.durations[compared], share, method="lower")
                own = np.quantile(inside, share, method="lower")
                result += [float(own / usual - 1)] if usual else []
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
        """Return the host time of one phase in the steps that count; ``None``: not measured."""
        result = self.phases.get(name)
        return None if result is None or not self.used.any() else result[self.used]

    def share(self, name: str) -> float | None:
        """Return a phase's share of the time of the steps that count; ``None``: not measured."""
        result, total = self.phase(name), float(self.dur[self.used].sum())
        return None if result is None or total <= 0 else float(result.sum()) / total

    # -- the other columns --------------------------------------------------------------------

    def column(self, name: str) -> Floats:
        """Return a field of every step; NaN where it was not measured."""
        return np.array(
            [finite_or_nan(getattr(step, name)) for step in self.steps], dtype=np.float64
        )

    @cached_property
    def span(self) -> tuple[int, int]:
        """First start and last end of the steps after the warm-up; (0, 0): none."""
        if not self.after_warmup.any():
            return 0, 0
        ts, dur = self.ts[self.after_warmup], self.dur[self.after_warmup]
        return int(ts[0]), int((ts + dur).max())

    @cached_property
    def samples_per_second(self) -> float | None:
        """Batch sizes over the time of the steps that count; ``None``: sizes not recorded."""
        sizes = self.column("samples")[self.timed]
        known = ~np.isnan(sizes)
        if not known.any() or known.mean() < 0.9:
            return None
        time = float(self.timed_durations[known].sum())
        return float(sizes[known].sum()) * 1e9 / time if time else None

    @cached_property
    def samples_per_step(self) -> int | None:
        """Samples of most steps, gradient accumulation included; ``None``: not recorded."""
        counts = Counter(
            s.samples * max(s.micro, 1) for s in self.record.steps if s.samples is not None
        )
        return counts.most_common(1)[0][0] if counts else None

    @cached_property
    def epoch_steps(self) -> int | None:
        """Steps of an epoch: the batches of the one loader that feeds them, over those of a step;
        ``None``: not recorded, or there are several loaders."""
        lengths = {loader.get("length") for loader in self.loaders}
        batches = lengths.pop() if len(lengths) == 1 else None
        if not isinstance(batches, int) or not 0 < batches < MAX_VALUE or not self.record.steps:
            return None
        counts = Counter(max(step.micro, 1) for step in self.record.steps)
        return max(1, batches // counts.most_common(1)[0][0])

    # -- telemetry ----------------------------------------------------------------------------

    @cached_property
    def hosts(self) -> list[tuple[int, HostSample]]:
        """Samples of the host while steps ran, without the warm-up: (time, sample)."""
        first, last = self.span
        return [
            (s.t, s.host)
            for s in self.record.samples
            if s.host is not None and first <= s.t <= last
        ]

    def host(self, name: str) -> Floats:
        """Return a field of the host's samples, where it was measured."""
        return _known([getattr(sample, name) for _, sample in self.hosts])

    @cached_property
    def gpus(self) -> list[GpuSample]:
        """Samples of the GPU that this rank uses while steps ran, without the warm-up."""
        return [gpu for _, gpu in self.timed_gpu_samples]

    @cached_property
    def timed_gpu_samples(self) -> list[tuple[int, GpuSample]]:
        """Samples of ``gpus``, each with its time."""
        first, last = self.span
        wanted = self.uuid
        return [
            (sample.t, gpu)
            for sample in self.record.samples
            if first <= sample.t <= last
            for gpu in sample.gpus
            if gpu.uuid == wanted
        ]

    @cached_property
    def uuid(self) -> str | None:
        """UUID of the GPU in use, as telemetry spells it: that of the first device of the rank, or
        the only one that was sampled; ``None``: not known."""
        seen = list(dict.fromkeys(g.uuid for s in self.record.samples for g in s.gpus))
        own = next((device.uuid for device in self.record.rank.devices), None)
        if own is not None:
            bare = own.removeprefix("GPU-").lower()
            return next((u for u in seen if u and u.removeprefix("GPU-").lower() == bare), None)
        return seen[0] if len(seen) == 1 else None

    def gpu(self, name: str) -> Floats:
        """Return a field of the GPU's samples, where it was measured."""
        return _known([getattr(sample, name) for sample in self.gpus])

    @cached_property
    def stacks(self) -> list[SampledStack]:
        """Python stacks of the training thread, sampled outside windows."""
        from advisor.measure.host.stacks import read_stacks

        return read_stacks(self.record)

    @cached_property
    def loop_share(self) -> float | None:
        """Share of the loop's own code in sampled time outside loading, forward, backward and
        optimizer; the rest is collectives that it calls. ``None``: too little was sampled."""
        from advisor.measure.host.stacks import COMMUNICATION, LOOP, MIN_SAMPLES

        seen = {LOOP: 0, COMMUNICATION: 0}
        for stack in self.stacks:
            if stack.part in seen:
                seen[stack.part] += stack.samples
        total = sum(seen.values())
        return seen[LOOP] / total if total >= MIN_SAMPLES else None

    def hottest_line(self, part: str) -> HottestLine | None:
        """Find the line of the user's code behind a part of the step (``data``, ``loop`` …);
        ``None``: not sampled, or too rarely."""
        from advisor.measure.host.stacks import hottest_line

        return hottest_line([stack for stack in self.stacks if stack.part == part])

    # -- what is reported once --------------------------------------------------------------------

    def flag(self, name: str) -> Any:
        """Return a framework flag; ``None``: not recorded."""
        return self.record.rank.flags.get(name)

    @cached_property
    def used_cores(self) -> float | None:
        """Cores that this process and its children kept busy while steps ran, on average; ``None``:
        not sampled."""
        own = self.host("process_cpu")
        return float(own.mean()) / 100 if len(own) else None

    @cached_property
    def other_programs_cores(self) -> float | None:
        """Cores that other programs of the machine kept busy, where this process may use all of
        them; ``None``: not sampled."""
        rank, machine = self.record.rank, self.host("cpu")
        total = rank.cpus_total or rank.cpus
        if rank.cpus is None or total is None or rank.cpus < total or not len(machine):
            return None
        return max(0.0, float(machine.mean()) / 100 * total - (self.used_cores or 0.0))

    @cached_property
    def free_cores(self) -> float | None:
        """Cores that this process may use and nobody does, on average; ``None``: not sampled. Ranks
        that share a machine each get their part."""
        rank = self.record.rank
        if rank.cpus is None or self.used_cores is None:
            return None
        if len(self.host("process_cpu")) < MIN_SAMPLES:
            return None
        return max(0.0, rank.cpus - self.used_cores - (self.other_programs_cores or 0.0))

    def computing_share(self, loading: float, *, on_host: bool) -> float | None:
        """Estimate the largest share of the main thread's loading that can be computing, by the CPU
        time of the process; the rest was waited for (storage, a sleep). ``loading``: its share of
        the step. ``on_host``: the step computes on the CPU as well, on one core at least. ``None``:
        not sampled."""
        if self.used_cores is None:
            return None
        rest = 1 - loading if on_host else 0.0
        return min(1.0, max(0.0, self.used_cores - rest) / max(loading, 1e-9))

    def remaining_loading_share(
        self, loading: float, computed: float, *, alone: bool = False
    ) -> float | None:
        """Estimate the share of the main thread's loading that remains with workers. Workers need
        cores that the step computes on: threads that share out an operator wait for the one whose
        core a worker has. Cores that are idle, workers have. Where use was not sampled PyTorch's
        threads are taken to be at work. ``alone``: without other programs. ``None``: neither is
        known."""
        cores, threads = self.record.rank.cpus, self.flag("num_threads")
        if not cores or (self.used_cores is None and not isinstance(threads, int)):
            return None
        rest = max(1 - loading, 1e-9)
        if self.used_cores is None:
            busy = float(threads or 1)
        else:
            busy = max(1.0, (self.used_cores - computed * loading) / rest)
        others = 0.0 if alone else self.other_programs_cores or 0.0
        spare = max(0.0, cores - busy - others)
        return max(0.0, computed - spare * rest / max(loading, 1e-9))

    @cached_property
    def loaders(self) -> list[dict[str, Any]]:
        """The DataLoaders that fed steps, by first use. In a training, one that was only iterated
        for validation is left out."""
        if self.inference:
            return self.record.events_of("loader")
        iterations = self.record.events_of("loader_iter")
        evaluated = [e.get("id") for e in iterations if e.get("evaluation")]
        trained = [e.get("id") for e in iterations if not e.get("evaluation")]
        return [
            event
            for event in self.record.events_of("loader")
            if event.get("id") in trained or event.get("id") not in evaluated
        ]


def finite_or_nan(value: float | None) -> float:
    """Return a figure as a column has it: NaN where it is missing, or too large to be true."""
    return float(value) if value is not None and -MAX_VALUE < value < MAX_VALUE else np.nan


def _known(values: Sequence[float | None] | Floats) -> Floats:
    result = np.array([finite_or_nan(value) for value in values], dtype=np.float64)
    return result[~np.isnan(result)]


class RunSummary(NamedTuple):
    """Summary of a run by its records, without an analysis."""

    started_unix_ns: int
    command: str
    commit: str
    """Commit of the working directory's repository; with ``+`` where it had changes."""
    ranks: int
    steps: int
    program: str
    """File names of the program and of a Python file that it is given; empty: unknown."""
    step: StepTime | None
    """Step time of the first rank; ``None``: not measured, or only a trace shows it."""

    @classmethod
    def read(cls, path: str) -> RunSummary:
        """Read a run. Raises AdvisorError: the run cannot be read."""
        recording = read_recording(path)
        manifest = recording.manifest
        steps = next((StepRecords(record) for record in recording.ranks.values()), None)
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
