"""Runs of one program that take turns: some steps of one, then as many steps of the next.

Each process trains until it is warm, and stops. Then one process at a time runs a block of steps,
back and forth (A B C, C B A), while the others are stopped with all their threads and workers.
Disturbances of the machine then affect all processes within a second or two, and each process
starts only once. A program that cannot be stopped (several ranks, another operating system) runs to
its end, followed by the others."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from advisor.tune.knob import KnobSettings, TrialResult
from advisor.tune.trial_process import RunningTrial, TrialProgram

BLOCKS_PER_PROCESS = 8
"""Number of blocks of steps of each process."""
BLOCK_SECONDS = 0.4
"""Minimum length of a block, s: resuming takes a fraction of a millisecond."""
MAX_RUN_RATIO = 6.0
"""Multiple of the longest run so far at which a run is ended."""
USABLE_MEMORY_SHARE = 0.6
"""Maximum share of the free memory for stopped processes."""
CONTEXT_BYTES = 1 << 30
"""Device memory of a process that PyTorch does not count, bytes: its context and libraries."""
MIN_TURNS = 2
KNOBS_PER_ROUND = 3
"""Maximum number of knobs in one round: with more, the wait between turns is long."""


@dataclass(frozen=True, kw_only=True)
class TrialLimits:
    budget: float = 600.0
    """Time for everything, s."""
    warmup: int = 10
    steps: int = 60
    """Number of timed steps of a run."""
    max_runs: int = 3000
    """Maximum number of timed steps of a run where steps are very short."""
    seconds: float = 12.0
    """Time of the timed steps in one run, s."""
    timeout: float = 300.0
    """Time limit of the first run, imports included, s."""


@dataclass
class TrialRounds:
    program: TrialProgram
    limits: TrialLimits
    end: float
    """End of the budget, by ``time.monotonic``."""
    report: Callable[[str], None]
    one_at_a_time: bool = False
    """Whether processes run one at a time: there is no room for two, or they cannot be stopped."""
    longest: float = 0.0
    """Duration of the longest run, s, without the time in which it was stopped."""
    processes: int = 0
    interrupted: bool = False
    """Whether Ctrl-C ended a round; its blocks until then count."""

    @property
    def turns(self) -> int:
        return min(BLOCKS_PER_PROCESS, self.limits.steps // 2)

    def has_budget_for(self, runs: int = 1) -> bool:
        """Return whether this number of runs fits into the remaining budget."""
        return time.monotonic() + runs * self.longest < self.end

    def run(self, sides: Sequence[KnobSettings]) -> dict[KnobSettings, TrialResult]:
        """Run the first of the sides against each other, and return the results by side. All but
        the first may be left for another round. Raises AdvisorError if none can be started."""
        result: dict[KnobSettings, TrialResult] = {}
        live: dict[KnobSettings, RunningTrial] = {}
        try:
            if self.one_at_a_time:
                return self._run_one_by_one(sides, result)
            room = len(sides)
            for index, knob_settings in enumerate(sides):
                if index > room or (index and not self.has_budget_for(index + 1)):
                    break
                trial = self._start(knob_settings, turns=self.turns)
                live[knob_settings] = trial
                if trial.run_turn():
                    if not index:
                        room = self._count_fitting(trial)
                        self.longest = max(self.longest, trial.spent)
                    continue
                result[knob_settings] = self._end_trial(live.pop(knob_settings))
                if index:
                    if self._is_out_of_memory(result[knob_settings]):
                        del result[knob_settings]
                    continue
                self.one_at_a_time = (
                    bool(result[knob_settings].steps_ns) and not result[knob_settings].problem
                )
                return self._run_one_by_one(sides, result) if self.one_at_a_time else result
            if not room and len(sides) > 1:
                self.one_at_a_time = True
            self._take_turns(sides[0], live, result)
        except KeyboardInterrupt:
            self.interrupted = True
            for knob_settings, trial in live.items():
                trial.end()
                if (partial := trial.partial_result()).steps_ns:
                    result[knob_settings] = partial
            return result
        finally:
            for trial in live.values():
                trial.end()
        return self._run_one_by_one(sides, result) if self.one_at_a_time else result

    def _run_one_by_one(
        self, sides: Sequence[KnobSettings], result: dict[KnobSettings, TrialResult]
    ) -> dict[KnobSettings, TrialResult]:
        """Run each side to its end, as many sides as the budget allows."""
        for index, knob_settings in enumerate(sides):
            if knob_settings in result:
                continue
            if index and not self.has_budget_for():
                break
            trial = self._start(knob_settings, turns=0)
            try:
                trial.run_turn()
            finally:
                trial.end()
            result[knob_settings] = self._end_trial(trial)
            if not index and result[knob_settings].problem:
                break
        return result

    def _take_turns(
        self,
        first: KnobSettings,
        live: dict[KnobSettings, RunningTrial],
        results: dict[KnobSettings, TrialResult],
    ) -> None:
        """Run block by block until all sides are complete, the first has ended, or time is up."""
        if not live:
            return
        if len(live) > 1:
            self.report("in turns: " + ", ".join(map(join_settings, live)))
        block = self._choose_block(live[first].partial_result())
        for turn in range(self.turns):
            is_late = time.monotonic() > self.end
            if first not in live or (is_late and turn >= MIN_TURNS):
                break
            for knob_settings in list(live) if turn % 2 == 0 else list(live)[::-1]:
                if not live[knob_settings].run_turn(block):
                    result = self._end_trial(live.pop(knob_settings))
                    if not (live and self._is_out_of_memory(result)):
                        results[knob_settings] = result
        for knob_settings in list(live):
            results[knob_settings] = self._end_trial(live.pop(knob_settings))

    def _is_out_of_memory(self, result: TrialResult) -> bool:
        """Return whether memory ran out next to other runs, so that runs must be alone from now
        on."""
        self.one_at_a_time |= result.kind == "memory"
        return result.kind == "memory"

    def _start(self, knob_settings: KnobSettings, turns: int) -> RunningTrial:
        limits, now = self.limits, time.monotonic()
        self.report(join_settings(knob_settings))
        timeout = limits.timeout if not self.longest else max(60.0, self.longest * MAX_RUN_RATIO)
        self.processes += 1
        return self.program.start(
            knob_settings,
            warmup=limits.warmup,
            steps=limits.steps,
            seconds=limits.seconds,
            timeout=max(20.0, min(timeout, self.end - now + timeout / 2)),
            turns=turns,
        )

    def _end_trial(self, trial: RunningTrial) -> TrialResult:
        trial.end()
        result = trial.result()
        if not result.problem:
            self.longest = max(self.longest, trial.spent)
        return result

    def _choose_block(self, first: TrialResult) -> int:
        """Return the number of steps per turn, equal for all sides and larger for short steps."""
        limits, turns = self.limits, self.turns
        min_steps = limits.steps // turns
        if not first.warm_ns:
            return min_steps
        step = first.warm_ns / 1e9
        wanted = max(min_steps, math.ceil(BLOCK_SECONDS / step))
        max_steps = max(2, int(limits.seconds / turns / step))
        return min(wanted, max_steps, max(limits.steps, limits.max_runs) // turns)

    def _count_fitting(self, trial: RunningTrial) -> int:
        """Return how many more such processes fit into memory, at most ``KNOBS_PER_ROUND``."""
        result = trial.partial_result()
        limits = [KNOBS_PER_ROUND]
        memory = _measure_memory(trial.process.pid)
        if memory is None:
            return 0
        available, bytes_ = memory
        limits.append(int(USABLE_MEMORY_SHARE * available / max(bytes_, 1)))
        if result.device_free is not None:
            limits.append(
                int(
                    USABLE_MEMORY_SHARE
                    * result.device_free
                    / ((result.device_bytes or 0) + CONTEXT_BYTES)
                )
            )
        return max(0, min(limits))


def _measure_memory(pid: int) -> tuple[int, int] | None:
    """Return the available memory, and the memory of a process and its children, bytes. ``None`` if
    psutil is not installed, or fails."""
    try:
        import psutil
    except ImportError:
        return None
    try:
        parent = psutil.Process(pid)
        used = sum(item.memory_info().rss for item in (parent, *parent.children(recursive=True)))
        return int(psutil.virtual_memory().available), int(used)
    except (psutil.Error, OSError):
        return None


def join_settings(knob_settings: KnobSettings) -> str:
    return ", ".join(map(str, knob_settings)) or "as it is"
