"""Trials of what is planned: runs in turn, until gains are known or time is up.

Each pass is the program as it is, in fresh processes, against all knobs that are still tried, every
second one backwards: in rounds of a few that take turns."""

import itertools
import re
import textwrap
from collections.abc import Callable, Sequence

from advisor.core.errors import AdvisorError
from advisor.tune.knob import KnobSetting, KnobSettings, TrialResult, find_knob
from advisor.tune.measured_gain import (
    MeasuredGain,
    block_log_ratios,
    check_losses,
    log_ratios,
    measure_gain,
    measure_paired_gain,
)
from advisor.tune.report import CombinedTrial, Trial, TrialReport
from advisor.tune.rounds import KNOBS_PER_ROUND, TrialLimits, TrialRounds
from advisor.tune.trial_process import TrialProgram, landlock_version

MIN_GAIN = 0.01
"""Smallest share of the step that counts as a gain: two runs of one program differ by less."""
NARROW_HALF_INTERVAL = 0.02
"""Half the interval, as a share of the step, at which a gain is known …"""
NARROW_SHARE_OF_GAIN = 0.1
"""… or as a share of the gain itself."""
MIN_PASSES, MAX_PASSES = 2, 6
MIN_FREED = 0.05
"""Smallest share of the peak that counts as freed: two runs of one program differ by less."""
MIN_SHARE_BEHIND = 0.02
"""Share of the step by which a setting is surely behind another of its knob, and given up."""


_DENIED = re.compile(
    r"permission denied|read-?only|os error 13|errno ?= ?13|unable to open database"
    r"|unable to (?:create|open) file|cannot (?:create|open|write)",
    re.IGNORECASE,
)
"""Messages of native writers that may not write."""
Say = Callable[[str], None]


class TrialSession:
    """Trials of one program; ``report`` is right at any moment, also after Ctrl-C."""

    def __init__(
        self, program: TrialProgram, report: TrialReport, limits: TrialLimits, end: float, say: Say
    ) -> None:
        self.report, self.limits = report, limits
        self.rounds = TrialRounds(program, limits, end, say)
        self.runs: dict[KnobSettings, list[TrialResult]] = {}
        self.pairs: dict[
            tuple[KnobSettings, KnobSettings], list[tuple[TrialResult, TrialResult]]
        ] = {}
        """Pairs of runs in one round, both of which came to their steps."""
        self.doubtful: set[KnobSetting] = set()
        """Knobs whose losses differ; one more run shows whether the knob is the cause."""
        report.confined = landlock_version() > 0
        program.samples = any(trial.safety == "learning" for trial in report.trials)

    def run(self) -> None:
        """Run all trials. Raises AdvisorError: the program cannot be tried at all."""
        try:
            self._passes()
            self._together()
        except KeyboardInterrupt:
            self.report.interrupted = True
        finally:
            self.report.interrupted |= self.rounds.interrupted
            self._settle()

    def has_budget_for(self, runs: int = 1) -> bool:
        """Return whether so many more runs fit into the remaining budget."""
        fits = self.rounds.has_budget_for(runs)
        if not fits:
            self.report.out_of_budget = True
        return fits

    def run_round(self, sides: Sequence[KnobSettings]) -> list[KnobSettings]:
        """Run the unchanged program against the sides for which there is room, and return the sides
        that ran. Raises AdvisorError: the program cannot be tried."""
        if self.rounds.interrupted:
            raise KeyboardInterrupt
        if self.runs.get(()) and not self.has_budget_for(2):
            return []
        wanted = [(), *sides] if self.rounds.one_at_a_time else [(), *sides[:KNOBS_PER_ROUND]]
        results = self.rounds.run(wanted)
        self.report.processes = self.rounds.processes
        for knob_settings, result in results.items():
            self.runs.setdefault(knob_settings, []).append(result)
        if () not in results or not self._baseline():
            return []
        good = {
            knob_settings: result for knob_settings, result in results.items() if not result.problem
        }
        for item, other in itertools.permutations(good, 2):
            self.pairs.setdefault((item, other), []).append((good[item], good[other]))
        if len(results) < len(wanted):
            self.has_budget_for()
        return [knob_settings for knob_settings in results if knob_settings]

    # -- one by one -----------------------------------------------------------------------------

    def _passes(self) -> None:
        racing = list(self.report.trials)
        for number in range(MAX_PASSES):
            left: dict[KnobSettings, Trial] = {(trial.knob_setting,): trial for trial in racing}
            if number % 2:
                left = dict(reversed(left.items()))
            while left:
                done = self.run_round(list(left))
                if not done:
                    return
                for knob_settings in done:
                    self._judge(left.pop(knob_settings))
            for trial in racing:  # what is known of the machine's scatter is more by now
                if trial.outcome != "dropped":
                    self._judge(trial)
            racing = [trial for trial in racing if self._open(trial, number + 1)]

    def _baseline(self) -> bool:
        """Take the figures of the unchanged program's last run; return whether it succeeded."""
        runs, report = self.runs[()], self.report
        result = runs[-1]
        if result.problem or not result.steps_ns:
            if len(runs) == 1:
                raise build_trial_error(explain_refusal(result), result)
            runs.pop()
            return False
        report.device, report.torch = result.device, result.torch
        report.device_bytes, report.host_bytes = result.device_bytes, result.host_bytes
        report.moved, report.steps = max(report.moved, result.moved), len(result.steps_ns)
        report.turns = report.turns or bool(result.blocks)
        report.step_ns = sum(sum(r.steps_ns) / len(r.steps_ns) for r in runs) / len(runs)
        if len(runs) > 1:
            report.repeats = all(
                a == b for r in runs[1:] for a, b in zip(runs[0].losses, r.losses, strict=False)
            )
        return True

    def measure_gain(
        self, knob_settings: KnobSettings, before: KnobSettings = ()
    ) -> MeasuredGain | None:
        """Measure a gain from all runs so far that were made against each other."""
        pairs = self.pairs.get((before, knob_settings), [])
        item = [self._steps(before, a) for a, _ in pairs]
        other = [self._steps(knob_settings, b) for _, b in pairs]
        turns = [
            block_log_ratios(a, b, first.blocks, second.blocks)
            for a, b, (first, second) in zip(item, other, pairs, strict=True)
            if a and b
        ]
        others = [
            found
            for key in self.pairs
            if key[0] == before and key[1] != knob_settings and (found := self._ratios(key))
        ]
        return measure_paired_gain(item, other, others) or measure_gain(
            item, other, [t for t in turns if t]
        )

    def _ratios(self, key: tuple[KnobSettings, KnobSettings]) -> list[float]:
        pairs = self.pairs[key]
        return log_ratios(
            [self._steps(key[0], a) for a, _ in pairs], [self._steps(key[1], b) for _, b in pairs]
        )

    def _steps(self, knob_settings: KnobSettings, result: TrialResult) -> list[int]:
        """Return the steps of a run, ns. With another batch size they are scaled to the samples of
        the program's own."""
        if not any(
            find_knob(knob_setting.knob).safety == "learning" for knob_setting in knob_settings
        ):
            return result.steps_ns
        before = self.samples
        if not before or not result.samples:
            return []
        return [round(ns * before / result.samples) for ns in result.steps_ns]

    @property
    def samples(self) -> float | None:
        """Mean samples of a batch of the unchanged program; ``None``: unknown."""
        return next((r.samples for r in self.runs.get((), []) if r.samples), None)

    def _judge(self, trial: Trial) -> None:
        runs = self.runs[(trial.knob_setting,)]
        last = runs[-1]
        item = find_knob(trial.knob_setting.knob)
        trial.runs = len(runs)
        if last.problem:
            prefixes = {"memory": "out of memory: ", "knob": "it does not apply: "}
            reason = prefixes.get(last.kind, "")
            trial.outcome, trial.why = "dropped", f"{reason}{last.problem}"
            if last.refused:
                trial.why += f" ({last.refused[0]})"
            return
        if item.id in last.idle:
            trial.outcome, trial.why = "dropped", "it met nothing to change"
            return
        if not last.steps_ns:
            trial.outcome, trial.why = "dropped", "it ended before a step was timed"
            return
        trial.device_bytes, trial.host_bytes = last.device_bytes, last.host_bytes
        result = check_losses(item.safety, item.changes_random_numbers, self.runs[()], runs)
        trial.losses = result.text
        # before a second run of the program nobody knows whether it repeats its own losses
        once = len(self.runs[()]) < 2 and not result.failed
        if not result.passed:
            again = once or (result.needs_rerun and len(runs) < 2)
            (self.doubtful.add if again else self.doubtful.discard)(trial.knob_setting)
            trial.outcome = "unclear" if again else "dropped"
            trial.why = f"losses: {result.text}"
            return
        if trial.knob_setting in self.doubtful:
            self.doubtful.discard(trial.knob_setting)
            trial.why = ""
        if trial.safety == "learning":
            before = self.runs[()][0]
            if not self.samples or not last.samples or not before.batch or not last.batch:
                trial.outcome, trial.why = "dropped", "no DataLoader says how large a batch is"
                return
            trial.schedule = item.schedule(before.batch, last.batch)
        got = self.measure_gain((trial.knob_setting,))
        if got is None:
            return
        trial.gain, trial.gain_low, trial.gain_high = got.share, got.low, got.high
        trial.step_ns = got.after_ns
        trial.inside = None
        low, high = trial.predicted_low, trial.predicted_high
        if trial.is_known and low is not None and high is not None:
            trial.inside = got.low <= high and got.high >= low
        if trial.memory and got.high > 0 and (freed := self._freed(trial)) > 0:
            trial.outcome, trial.why = "gain", f"{freed / 1e6:,.0f} MB less at the peak"
            return
        trial.outcome = (
            "gain"
            if got.low > 0 and got.share >= MIN_GAIN
            else "slower"
            if got.high < 0 and got.share <= -MIN_GAIN
            else "no gain"
            if trial.is_known
            else "unclear"
        )

    def _freed(self, trial: Trial) -> int:
        """Return the peak memory that every run with the knob saves against every run without,
        bytes, of the device where there is one. 0: too little, or unknown."""

        def peaks(knob_settings: KnobSettings) -> list[int]:
            runs = [r for r in self.runs[knob_settings] if not r.problem]
            device = [r.device_bytes for r in runs if r.device_bytes is not None]
            return device or [r.host_bytes for r in runs if r.host_bytes is not None]

        before, after = peaks(()), peaks((trial.knob_setting,))
        if not before or not after:
            return 0
        freed = min(before) - max(after)
        return freed if freed > MIN_FREED * min(before) else 0

    def _open(self, trial: Trial, passes: int) -> bool:
        """Return whether another run of it would tell more."""
        if trial.knob_setting in self.doubtful:
            return True
        if trial.outcome == "dropped" or trial.gain is None:
            return False
        rivals = [t for t in self.report.trials if t.knob_setting.knob == trial.knob_setting.knob]
        best = max((t.gain_low or -1.0 for t in rivals if t is not trial), default=-1.0)
        if (trial.gain_high or 0.0) + MIN_SHARE_BEHIND < best and trial.predicted is None:
            return False  # another setting is surely better, and nothing was promised of this one
        if passes < MIN_PASSES:
            return True
        half = ((trial.gain_high or 0.0) - (trial.gain_low or 0.0)) / 2
        return half > max(NARROW_HALF_INTERVAL, NARROW_SHARE_OF_GAIN * abs(trial.gain))

    # -- together -------------------------------------------------------------------------------

    def _together(self) -> None:
        """Combine the best setting of each knob, the most first, as long as each adds to it."""
        winners: list[Trial] = []
        for trial in self.report.winners:
            if trial.safety == "learning":
                continue  # another training: for the user to decide
            item = find_knob(trial.knob_setting.knob)
            same = [find_knob(t.knob_setting.knob) for t in winners]
            if any(item.id == o.id or (item.group and item.group == o.group) for o in same):
                continue
            winners.append(trial)
        if not winners:
            return
        best: KnobSettings = (winners[0].knob_setting,)
        left: list[KnobSetting] = []
        self._note(best, left)
        for trial in winners[1:]:
            more = (*best, trial.knob_setting)
            for sides in ((best, more), (more, best)):
                if len(self.run_round(sides)) < 2 or any(r.problem for r in self.runs[more]):
                    break
            got = self.measure_gain(more, best)
            classes = [find_knob(knob_setting.knob) for knob_setting in more]
            worst = max((c.safety for c in classes), key=["exact", "reordered", "precision"].index)
            fine = (
                not any(r.problem for r in self.runs.get(more, []))
                and check_losses(
                    worst,
                    any(c.changes_random_numbers for c in classes),
                    self.runs[()],
                    self.runs.get(more, []),
                ).passed
            )
            if got is not None and fine and got.low > 0:
                best = more
            elif trial.knob_setting not in left:
                left.append(trial.knob_setting)
            self._note(best, left)

    def _note(self, knob_settings: KnobSettings, left: list[KnobSetting]) -> None:
        got = self.measure_gain(knob_settings)
        if got is None:
            return
        self.report.together = CombinedTrial(
            knob_settings=list(knob_settings),
            left_out=list(left),
            step_ns=got.after_ns,
            gain=got.share,
            gain_low=got.low,
            gain_high=got.high,
        )

    def _settle(self) -> None:
        for trial in self.report.trials:
            if trial.knob_setting in self.doubtful:
                trial.outcome = "dropped"
            elif trial.outcome == "not run":
                trial.why = "interrupted" if self.report.interrupted else "the budget was spent"


def build_trial_error(message: str, result: TrialResult) -> AdvisorError:
    """Return the error, with the last lines that the program printed."""
    error = AdvisorError(message)
    if result.output:
        error.add_note("The program's last lines:\n" + textwrap.indent(result.output, "  "))
    return error


def explain_refusal(result: TrialResult) -> str:
    """Return in a line why the unchanged program cannot be tried."""
    if result.refused:
        return (
            f"the program would {result.refused[0]}, which is not done while it is only tried "
            f"({result.problem or 'it went on without'})"
        )
    if result.kind == "late":
        return (
            f"the unchanged program did not make its steps in time ({result.problem}): give it "
            "more --budget, or fewer --steps and --warmup"
        )
    if result.problem:
        hint = ""
        if landlock_version() and _DENIED.search(result.problem):
            hint = (
                " (while a program is tried, its native code may write to the scratch folder"
                " only; --allow-write DIR lets it write into DIR)"
            )
        return f"the unchanged program ended: {result.problem}{hint}"
    return (
        "no training step was seen that could be timed: the program ended before the warm-up did, "
        "does not train, or its Python has no advisor"
    )
