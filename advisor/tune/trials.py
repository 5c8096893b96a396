"""Trials of a plan: runs in turns, until gains are known or time is up.

Each pass runs the unchanged program, in fresh processes, against all remaining knobs, in rounds of
a few that take turns. Every second pass goes backwards."""

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
MAX_KNOWN_INTERVAL = 0.02
"""Half interval, as a share of the step, at which a gain is known."""
MAX_KNOWN_SHARE = 0.1
"""Half interval, as a share of the gain itself, at which a gain is known."""
MIN_PASSES, _MAX_PASSES = 2, 6
_MIN_FREED_SHARE = 0.05
"""Smallest share of the peak that counts as freed: two runs of one program differ by less."""
MIN_SHARE_BEHIND = 0.02
"""Share of the step by which a setting is certainly behind another of its knob, and dropped."""


_DENIED = re.compile(
    r"permission denied|read-?only|os error 13|errno ?= ?13|unable to open database"
    r"|unable to (?:create|open) file|cannot (?:create|open|write)",
    re.IGNORECASE,
)
"""Messages of native writers without permission to write."""
Say = Callable[[str], None]


class TrialSession:
    """Trials of one program. ``report`` is valid at any time, even after Ctrl-C."""

    def __init__(
        self, program: TrialProgram, report: TrialReport, limits: TrialLimits, end: float, say: Say
    ) -> None:
        self.report, self.limits = report, limits
        self.rounds = TrialRounds(program, limits, end, say)
        self.runs: dict[KnobSettings, list[TrialResult]] = {}
        self.pairs: dict[
            tuple[KnobSettings, KnobSettings], list[tuple[TrialResult, TrialResult]]
        ] = {}
        """Pairs of runs in one round that both reached their steps."""
        self.doubtful: set[KnobSetting] = set()
        """Knobs whose losses differ; one more run shows whether the knob is the cause."""
        report.confined = landlock_version() > 0
        program.samples = any(trial.safety == "learning" for trial in report.trials)

    def run(self) -> None:
        """Run all trials. Raises AdvisorError if the program cannot be tried at all."""
        try:
            self._run_passes()
            self._combine_winners()
        except KeyboardInterrupt:
            self.report.interrupted = True
        finally:
            self.report.interrupted |= self.rounds.interrupted
            self._settle_outcomes()

    def has_budget_for(self, runs: int = 1) -> bool:
        """Return whether this number of runs fits into the remaining budget."""
        fits = self.rounds.has_budget_for(runs)
        if not fits:
            self.report.out_of_budget = True
        return fits

    def run_round(self, sides: Sequence[KnobSettings]) -> list[KnobSettings]:
        """Run the unchanged program against the sides for which there is room, and return the sides
        that ran. Raises AdvisorError if the program cannot be tried."""
        if self.rounds.interrupted:
            raise KeyboardInterrupt
        if self.runs.get(()) and not self.has_budget_for(2):
            return []
        wanted = [(), *sides] if self.rounds.one_at_a_time else [(), *sides[:KNOBS_PER_ROUND]]
        results = self.rounds.run(wanted)
        self.report.processes = self.rounds.processes
        for knob_settings, result in results.items():
            self.runs.setdefault(knob_settings, []).append(result)
        if () not in results or not self._update_baseline():
            return []
        complete = {
            knob_settings: result for knob_settings, result in results.items() if not result.problem
        }
        for first, second in itertools.permutations(complete, 2):
            self.pairs.setdefault((first, second), []).append((complete[first], complete[second]))
        if len(results) < len(wanted):
            self.has_budget_for()
        return [knob_settings for knob_settings in results if knob_settings]

    # -- one by one -----------------------------------------------------------------------------

    def _run_passes(self) -> None:
        active = list(self.report.trials)
        for number in range(_MAX_PASSES):
            queue: dict[KnobSettings, Trial] = {(trial.knob_setting,): trial for trial in active}
            if number % 2:
                queue = dict(reversed(queue.items()))
            while queue:
                ran = self.run_round(list(queue))
                if not ran:
                    return
                for knob_settings in ran:
                    self._judge(queue.pop(knob_settings))
            for trial in active:  # by now more is known of the machine's scatter
                if trial.outcome != "dropped":
                    self._judge(trial)
            active = [trial for trial in active if self._needs_more_runs(trial, number + 1)]

    def _update_baseline(self) -> bool:
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
        before_steps = [self._scale(before, a) for a, _ in pairs]
        after_steps = [self._scale(knob_settings, b) for _, b in pairs]
        turns = [
            block_log_ratios(a, b, first.blocks, second.blocks)
            for a, b, (first, second) in zip(before_steps, after_steps, pairs, strict=True)
            if a and b
        ]
        others = [
            ratios
            for key in self.pairs
            if key[0] == before and key[1] != knob_settings and (ratios := self._pair_ratios(key))
        ]
        return measure_paired_gain(before_steps, after_steps, others) or measure_gain(
            before_steps, after_steps, [t for t in turns if t]
        )

    def _pair_ratios(self, key: tuple[KnobSettings, KnobSettings]) -> list[float]:
        pairs = self.pairs[key]
        return log_ratios(
            [self._scale(key[0], a) for a, _ in pairs], [self._scale(key[1], b) for _, b in pairs]
        )

    def _scale(self, knob_settings: KnobSettings, result: TrialResult) -> list[int]:
        """Return the steps of a run, ns. With another batch size they are scaled to the program's
        own number of samples."""
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
        """Mean samples per batch of the unchanged program, or ``None`` if unknown."""
        return next((r.samples for r in self.runs.get((), []) if r.samples), None)

    def _judge(self, trial: Trial) -> None:
        runs = self.runs[(trial.knob_setting,)]
        latest = runs[-1]
        knob = find_knob(trial.knob_setting.knob)
        trial.runs = len(runs)
        if latest.problem:
            prefixes = {"memory": "out of memory: ", "knob": "it does not apply: "}
            reason = prefixes.get(latest.kind, "")
            trial.outcome, trial.why = "dropped", f"{reason}{latest.problem}"
            if latest.refused:
                trial.why += f" ({latest.refused[0]})"
            return
        if knob.id in latest.idle:
            trial.outcome, trial.why = "dropped", "it found nothing to change"
            return
        if not latest.steps_ns:
            trial.outcome, trial.why = "dropped", "it ended before a step was timed"
            return
        trial.device_bytes, trial.host_bytes = latest.device_bytes, latest.host_bytes
        check = check_losses(knob.safety, knob.changes_random_numbers, self.runs[()], runs)
        trial.losses = check.text
        # only a second run of the program shows whether it repeats its own losses
        is_unsure = len(self.runs[()]) < 2 and not check.failed
        if not check.passed:
            rerun = is_unsure or (check.needs_rerun and len(runs) < 2)
            (self.doubtful.add if rerun else self.doubtful.discard)(trial.knob_setting)
            trial.outcome = "unclear" if rerun else "dropped"
            trial.why = f"losses: {check.text}"
            return
        if trial.knob_setting in self.doubtful:
            self.doubtful.discard(trial.knob_setting)
            trial.why = ""
        if trial.safety == "learning":
            before = self.runs[()][0]
            if not self.samples or not latest.samples or not before.batch or not latest.batch:
                trial.outcome, trial.why = "dropped", "no DataLoader shows the batch size"
                return
            trial.schedule = knob.schedule(before.batch, latest.batch)
        measured = self.measure_gain((trial.knob_setting,))
        if measured is None:
            return
        trial.gain, trial.gain_low, trial.gain_high = measured.share, measured.low, measured.high
        trial.step_ns = measured.after_ns
        trial.inside = None
        low, high = trial.predicted_low, trial.predicted_high
        if trial.is_known and low is not None and high is not None:
            trial.inside = measured.low <= high and measured.high >= low
        if trial.memory and measured.high > 0 and (freed := self._count_freed(trial)) > 0:
            trial.outcome, trial.why = "gain", f"{freed / 1e6:,.0f} MB less at the peak"
            return
        trial.outcome = (
            "gain"
            if measured.low > 0 and measured.share >= MIN_GAIN
            else "slower"
            if measured.high < 0 and measured.share <= -MIN_GAIN
            else "no gain"
            if trial.is_known
            else "unclear"
        )

    def _count_freed(self, trial: Trial) -> int:
        """Return the bytes of peak memory that every run with the knob saves compared with every
        run without it, on the device if there is one. 0 if too little, or unknown."""

        def peaks(knob_settings: KnobSettings) -> list[int]:
            runs = [r for r in self.runs[knob_settings] if not r.problem]
            device = [r.device_bytes for r in runs if r.device_bytes is not None]
            return device or [r.host_bytes for r in runs if r.host_bytes is not None]

        before, after = peaks(()), peaks((trial.knob_setting,))
        if not before or not after:
            return 0
        freed = min(before) - max(after)
        return freed if freed > _MIN_FREED_SHARE * min(before) else 0

    def _needs_more_runs(self, trial: Trial, passes: int) -> bool:
        """Return whether another run of the knob would show more."""
        if trial.knob_setting in self.doubtful:
            return True
        if trial.outcome == "dropped" or trial.gain is None:
            return False
        rivals = [t for t in self.report.trials if t.knob_setting.knob == trial.knob_setting.knob]
        best = max((t.gain_low or -1.0 for t in rivals if t is not trial), default=-1.0)
        if (trial.gain_high or 0.0) + MIN_SHARE_BEHIND < best and trial.predicted is None:
            return False  # another setting is certainly better, and this one has no prediction
        if passes < MIN_PASSES:
            return True
        half = ((trial.gain_high or 0.0) - (trial.gain_low or 0.0)) / 2
        return half > max(MAX_KNOWN_INTERVAL, MAX_KNOWN_SHARE * abs(trial.gain))

    # -- together -------------------------------------------------------------------------------

    def _combine_winners(self) -> None:
        """Combine the best setting of each knob, largest gain first, if it adds to the gain."""
        winners: list[Trial] = []
        for trial in self.report.winners:
            if trial.safety == "learning":
                continue  # the training differs, so the user decides
            knob = find_knob(trial.knob_setting.knob)
            chosen = [find_knob(t.knob_setting.knob) for t in winners]
            if any(knob.id == o.id or (knob.group and knob.group == o.group) for o in chosen):
                continue
            winners.append(trial)
        if not winners:
            return
        best: KnobSettings = (winners[0].knob_setting,)
        left_out: list[KnobSetting] = []
        self._set_combined(best, left_out)
        for trial in winners[1:]:
            combination = (*best, trial.knob_setting)
            for sides in ((best, combination), (combination, best)):
                if len(self.run_round(sides)) < 2 or any(r.problem for r in self.runs[combination]):
                    break
            measured = self.measure_gain(combination, best)
            classes = [find_knob(knob_setting.knob) for knob_setting in combination]
            worst = max((c.safety for c in classes), key=["exact", "reordered", "precision"].index)
            is_valid = (
                not any(r.problem for r in self.runs.get(combination, []))
                and check_losses(
                    worst,
                    any(c.changes_random_numbers for c in classes),
                    self.runs[()],
                    self.runs.get(combination, []),
                ).passed
            )
            if measured is not None and is_valid and measured.low > 0:
                best = combination
            elif trial.knob_setting not in left_out:
                left_out.append(trial.knob_setting)
            self._set_combined(best, left_out)

    def _set_combined(self, knob_settings: KnobSettings, left_out: list[KnobSetting]) -> None:
        measured = self.measure_gain(knob_settings)
        if measured is None:
            return
        self.report.together = CombinedTrial(
            knob_settings=list(knob_settings),
            left_out=list(left_out),
            step_ns=measured.after_ns,
            gain=measured.share,
            gain_low=measured.low,
            gain_high=measured.high,
        )

    def _settle_outcomes(self) -> None:
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
            f"the program would {result.refused[0]}, which is not allowed during a trial "
            f"({result.problem or 'it continued without'})"
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
