"""Tries what is planned: runs side by side, back and forth, until it is known or time is up.

Each pass starts with the program as it is and goes through all levers that are still in the race,
every second one backwards (A B C, C B A): what drifts over the minutes falls on all alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from advisor.trial.catalogue import lever
from advisor.trial.confine import version
from advisor.trial.losses import check
from advisor.trial.measure import Gain, gain, paired, ratios
from advisor.trial.process import Program
from advisor.trial.report import Together, Trial, TrialReport
from advisor.trial.spec import Pull, Result

WORTH_IT = 0.01
"""Share of the step: less is what two runs of one program differ by."""
NARROW = 0.02
"""Half the interval, of the step, at which a gain is known …"""
OF_THE_GAIN = 0.1
"""… or of the gain itself."""
LEAST_PASSES, MOST_PASSES = 2, 6
LEAST_FREED = 0.05
"""Of the peak: less memory than this is what two runs of one program differ by."""
BEHIND = 0.02
"""A setting surely this much of the step behind another of its lever is out of the race."""
PATIENCE = 6.0
"""Times the longest run so far, until a run is ended."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long it may take."""

    budget: float = 600.0
    """Seconds for everything."""
    warmup: int = 10
    steps: int = 60
    seconds: float = 12.0
    """Of timed steps in one run."""
    timeout: float = 300.0
    """Of the first run, imports included."""


Say = Callable[[str], None]


class Session:
    """One program and its trials; ``report`` is right at any moment, also after Ctrl-C."""

    def __init__(
        self, program: Program, report: TrialReport, limits: Limits, end: float, say: Say
    ) -> None:
        self.program, self.report, self.limits, self.say = program, report, limits, say
        self.end = end
        """When the budget is spent, by ``time.monotonic``."""
        self.runs: dict[tuple[Pull, ...], list[Result]] = {}
        self.longest = 0.0
        report.confined = version() > 0
        program.samples = any(trial.safety == "learning" for trial in report.trials)

    def run(self) -> None:
        """All of it. Raises AdvisorError: the program cannot be tried at all."""
        try:
            self._passes()
            self._together()
        except KeyboardInterrupt:
            self.report.interrupted = True
        finally:
            self._settle()

    def affords(self) -> bool:
        """Whether another run fits into what is left."""
        fits = time.monotonic() + self.longest < self.end
        if not fits:
            self.report.out_of_budget = True
        return fits

    def once(self, pulls: tuple[Pull, ...]) -> Result:
        """One more run."""
        limits = self.limits
        self.say(", ".join(map(str, pulls)) or "as it is")
        begun = time.monotonic()
        timeout = limits.timeout if not self.longest else max(60.0, self.longest * PATIENCE)
        result = self.program.run(
            pulls,
            warmup=limits.warmup,
            steps=limits.steps,
            seconds=limits.seconds,
            timeout=max(20.0, min(timeout, self.end - begun + timeout / 2)),
        )
        if not result.problem:
            self.longest = max(self.longest, time.monotonic() - begun)
        self.report.processes += 1
        self.runs.setdefault(pulls, []).append(result)
        return result

    # -- one by one -----------------------------------------------------------------------------

    def _passes(self) -> None:
        racing = list(self.report.trials)
        for number in range(MOST_PASSES):
            order = racing if number % 2 == 0 else racing[::-1]
            if not racing or not self._baseline():
                return
            for trial in order:
                if not self.affords():
                    return
                self.once((trial.pull,))
                self._judge(trial)
            for trial in racing:  # what is known of the machine's scatter is more by now
                if trial.outcome != "dropped":
                    self._judge(trial)
            racing = [trial for trial in racing if self._open(trial, number + 1)]

    def _baseline(self) -> bool:
        if self.runs.get(()) and not self.affords():
            return False
        result = self.once(())
        report = self.report
        if result.problem or not result.steps_ns:
            if len(self.runs[()]) == 1:
                from advisor.errors import AdvisorError

                raise AdvisorError(why_not(result))
            self.runs[()].pop()
            return False
        report.device, report.torch = result.device, result.torch
        report.device_bytes, report.host_bytes = result.device_bytes, result.host_bytes
        report.moved, report.steps = max(report.moved, result.moved), len(result.steps_ns)
        runs = self.runs[()]
        report.step_ns = sum(sum(r.steps_ns) / len(r.steps_ns) for r in runs) / len(runs)
        if len(runs) > 1:
            report.repeats = all(
                a == b for r in runs[1:] for a, b in zip(runs[0].losses, r.losses, strict=False)
            )
        return True

    def measured(self, pulls: tuple[Pull, ...], before: tuple[Pull, ...] = ()) -> Gain | None:
        """From all runs so far."""
        one = [r.steps_ns for r in self.runs.get(before, []) if not r.problem]
        other = [self._steps(pulls, r) for r in self.runs.get(pulls, []) if not r.problem]
        if before:  # those that were made in turn with these are the last ones
            one = one[-len(other) :]
        others = (
            []
            if before
            else [self._ratios(t.pull) for t in self.report.trials if (t.pull,) != pulls]
        )
        return paired(one, other, [r for r in others if r]) or gain(one, other)

    def _steps(self, pulls: tuple[Pull, ...], result: Result) -> list[int]:
        """Steps of a run, ns; of another batch size as long as they would be for the samples of the
        program's own."""
        if not any(lever(pull.lever).safety == "learning" for pull in pulls):
            return result.steps_ns
        before = self.samples
        if not before or not result.samples:
            return []
        return [round(ns * before / result.samples) for ns in result.steps_ns]

    @property
    def samples(self) -> float | None:
        """Of a batch of the unchanged program; ``None``: not seen."""
        return next((r.samples for r in self.runs.get((), []) if r.samples), None)

    def _ratios(self, pull: Pull) -> list[float]:
        runs = [self._steps((pull,), r) for r in self.runs.get((pull,), []) if not r.problem]
        return ratios([r.steps_ns for r in self.runs[()] if not r.problem], runs)

    def _judge(self, trial: Trial) -> None:
        runs = self.runs[(trial.pull,)]
        last = runs[-1]
        one = lever(trial.pull.lever)
        trial.runs = len(runs)
        if last.problem:
            told = {"memory": "out of memory: ", "lever": "it does not apply: "}
            reason = told.get(last.kind, "")
            trial.outcome, trial.why = "dropped", f"{reason}{last.problem}"
            if last.refused:
                trial.why += f" ({last.refused[0]})"
            return
        if one.id in last.idle:
            trial.outcome, trial.why = "dropped", "it met nothing to change"
            return
        if not last.steps_ns:
            trial.outcome, trial.why = "dropped", "it ended before a step was timed"
            return
        trial.device_bytes, trial.host_bytes = last.device_bytes, last.host_bytes
        found = check(one.safety, one.redraws, self.runs[()], runs)
        trial.losses = found.text
        if not found.passed:
            trial.outcome, trial.why = "dropped", f"losses: {found.text}"
            return
        if trial.safety == "learning":
            before = self.runs[()][0]
            if not self.samples or not last.samples or not before.batch or not last.batch:
                trial.outcome, trial.why = "dropped", "no DataLoader says how large a batch is"
                return
            trial.schedule = one.schedule(before.batch, last.batch)
        got = self.measured((trial.pull,))
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
            if got.low > 0 and got.share >= WORTH_IT
            else "slower"
            if got.high < 0 and got.share <= -WORTH_IT
            else "no gain"
            if trial.is_known
            else "unclear"
        )

    def _freed(self, trial: Trial) -> int:
        """Bytes that every run with the lever takes less than every run without, at the peak of the
        device where there is one; 0: too few to speak of, or not known."""

        def peaks(pulls: tuple[Pull, ...]) -> list[int]:
            runs = [r for r in self.runs[pulls] if not r.problem]
            device = [r.device_bytes for r in runs if r.device_bytes is not None]
            return device or [r.host_bytes for r in runs if r.host_bytes is not None]

        before, after = peaks(()), peaks((trial.pull,))
        if not before or not after:
            return 0
        freed = min(before) - max(after)
        return freed if freed > LEAST_FREED * min(before) else 0

    def _open(self, trial: Trial, passes: int) -> bool:
        """Whether another run of it says more."""
        if trial.outcome == "dropped" or trial.gain is None:
            return False
        rivals = [t for t in self.report.trials if t.pull.lever == trial.pull.lever]
        best = max((t.gain_low or -1.0 for t in rivals if t is not trial), default=-1.0)
        if (trial.gain_high or 0.0) + BEHIND < best and trial.predicted is None:
            return False  # another setting is surely better, and nothing was promised of this one
        if passes < LEAST_PASSES:
            return True
        half = ((trial.gain_high or 0.0) - (trial.gain_low or 0.0)) / 2
        return half > max(NARROW, OF_THE_GAIN * abs(trial.gain))

    # -- together -------------------------------------------------------------------------------

    def _together(self) -> None:
        """Greedily: the best setting of each lever, the most first, as long as each adds to it."""
        winners: list[Trial] = []
        for trial in self.report.winners:
            if trial.safety == "learning":
                continue  # another training: for the user to decide
            one = lever(trial.pull.lever)
            same = [lever(t.pull.lever) for t in winners]
            if any(one.id == o.id or (one.group and one.group == o.group) for o in same):
                continue
            winners.append(trial)
        if not winners:
            return
        best: tuple[Pull, ...] = (winners[0].pull,)
        left: list[Pull] = []
        self._note(best, left)
        for trial in winners[1:]:
            more = (*best, trial.pull)
            for pulls in (more, best, best, more):
                if not self.affords():
                    left.append(trial.pull)
                    break
                if self.once(pulls).problem:
                    break
            got = self.measured(more, best)
            classes = [lever(pull.lever) for pull in more]
            worst = max((c.safety for c in classes), key=["exact", "reordered", "precision"].index)
            fine = (
                not any(r.problem for r in self.runs.get(more, []))
                and check(
                    worst, any(c.redraws for c in classes), self.runs[()], self.runs.get(more, [])
                ).passed
            )
            if got is not None and fine and got.low > 0:
                best = more
            elif trial.pull not in left:
                left.append(trial.pull)
            self._note(best, left)

    def _note(self, pulls: tuple[Pull, ...], left: list[Pull]) -> None:
        got = self.measured(pulls)
        if got is None:
            return
        self.report.together = Together(
            pulls=list(pulls),
            left_out=list(left),
            step_ns=got.after_ns,
            gain=got.share,
            gain_low=got.low,
            gain_high=got.high,
        )

    def _settle(self) -> None:
        for trial in self.report.trials:
            if trial.outcome == "not run":
                trial.why = "interrupted" if self.report.interrupted else "the budget was spent"


def why_not(result: Result) -> str:
    """Why the unchanged program cannot be tried, in a line."""
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
        return f"the unchanged program ended: {result.problem}"
    return (
        "no training step was seen that could be timed: the program ended before the warm-up did, "
        "does not train, or its Python has no advisor"
    )
