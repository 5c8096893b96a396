"""Trials of a program that is made up: what is measured, compared and left out."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from advisor.core.errors import AdvisorError
from advisor.render.formats import TRIALS
from advisor.tune.knob import KnobSetting, Machine, TrialResult
from advisor.tune.pipeline import plan_requested_trials
from advisor.tune.report import TrialReport, write_trial_headline
from advisor.tune.rounds import TrialLimits
from advisor.tune.trial_process import RunningTrial, TrialProgram
from advisor.tune.trials import TrialSession


class FinishedRun(RunningTrial):
    """A run that is over at once."""

    def __init__(self, result: TrialResult) -> None:
        self.answer, self.spent = result, 0.0

    def run_turn(self, steps: int = 0) -> bool:
        return False

    def end(self) -> None:
        pass

    def result(self) -> TrialResult:
        return self.answer


class FakeProgram(TrialProgram):
    """Answers for a program."""

    def __init__(self, answer_settings: Callable[[tuple[KnobSetting, ...]], TrialResult]) -> None:
        self.answer, self.samples, self.counted = answer_settings, False, []

    def start(self, knob_settings: tuple[KnobSetting, ...], **_: object) -> FinishedRun:  # type: ignore[override]
        self.counted.append(self.samples)
        return FinishedRun(self.answer(knob_settings))


def run_trials(
    names: tuple[str, ...], answer_settings: Callable[[tuple[KnobSetting, ...]], TrialResult]
) -> TrialReport:
    report = TrialReport(trials=plan_requested_trials(names, Machine(2, False), []))
    program = FakeProgram(answer_settings)
    TrialSession(program, report, TrialLimits(), time.monotonic() + 3600, lambda text: None).run()
    assert set(program.counted) == {any(name.startswith("batch") for name in names)}
    return report


def steps(ms: float, batch: int = 16, **more: object) -> TrialResult:
    spread = (1.0, 1.01, 0.99, 1.005, 0.995)
    times = [round(ms * 1e6 * spread[i % 5]) for i in range(40)]
    losses: list[float | None] = [1.0, 0.9, 0.8]
    return TrialResult(steps_ns=times, losses=losses, samples=batch, batch=batch, **more)  # type: ignore[arg-type]


def test_other_batch_sizes_are_compared_by_the_time_per_sample() -> None:
    """16 samples take 10 ms and 64 take 20, by hand: a sample takes half as long, the step
    twice."""
    report = run_trials(
        ("batch=64",), lambda knob_settings: steps(20, 64) if knob_settings else steps(10)
    )
    (trial,) = report.trials
    assert trial.outcome == "gain" and abs((trial.gain or 0) - 0.5) < 0.02
    assert "16 → 64 samples" in trial.schedule and "4 times later" in trial.schedule
    assert trial.losses == "not compared: another training"
    assert report.together is None, "it is another training, not a winner to add others to"
    assert write_trial_headline(report).startswith("batch=64: a sample takes ")
    assert "another training" in TRIALS.render("terminal", report)


def test_batch_size_breaking_the_losses_is_dropped() -> None:
    broken = steps(20, 64)
    broken.losses = [1.0, None, None]
    report = run_trials(("batch=64",), lambda knob_settings: broken if knob_settings else steps(10))
    assert report.trials[0].outcome == "dropped" and "not finite" in report.trials[0].why


def test_batch_size_is_unknown_without_a_loader() -> None:
    blind = steps(10)
    blind.samples = blind.batch = None
    report = run_trials(("batch=x2",), lambda knob_settings: blind)
    assert report.trials[0].outcome == "dropped" and "DataLoader" in report.trials[0].why


def test_other_knobs_are_compared_with_the_step_and_combined() -> None:
    def answer_settings(knob_settings: tuple[KnobSetting, ...]) -> TrialResult:
        return (
            steps(20, 64)
            if KnobSetting("batch", 64) in knob_settings
            else steps(10 - 3 * len(knob_settings))
        )

    report = run_trials(("batch=64", "set-to-none"), answer_settings)
    assert [trial.outcome for trial in report.trials] == ["gain", "gain"]
    assert report.together is not None
    assert report.together.knob_settings == [KnobSetting("set-to-none")]


def test_custom_knob_setting_is_tried_on_request() -> None:
    machine = Machine(2, False)
    default_plan = plan_requested_trials(("workers",), machine, [])
    assert KnobSetting("workers", 3) not in [trial.knob_setting for trial in default_plan]
    more = plan_requested_trials(("workers=3", "workers=3", "workers=2"), machine, default_plan)
    assert [trial.knob_setting for trial in more] == [KnobSetting("workers", 3)]


def test_program_exceeding_the_budget_gets_advice() -> None:
    late = TrialResult(problem="no end after 20 s", kind="late")
    with pytest.raises(AdvisorError, match="give it more --budget, or fewer --steps"):
        run_trials(("set-to-none",), lambda knob_settings: late)


def test_unseeded_program_is_not_compared_with_its_first_run() -> None:
    """The losses differ from run to run as they do with the knob."""
    count = 0

    def answer_settings(knob_settings: tuple[KnobSetting, ...]) -> TrialResult:
        nonlocal count
        count += 1
        result = steps(7 if knob_settings else 10)
        result.losses = [1.0 + 0.001 * count, 0.9, 0.8]
        return result

    report = run_trials(("set-to-none",), answer_settings)
    assert report.repeats is False
    assert (report.trials[0].outcome, report.trials[0].why) == ("gain", "")
    assert "as its own runs" in report.trials[0].losses


def test_harmful_or_ineffective_knobs_are_dropped() -> None:
    def answer_settings(knob_settings: tuple[KnobSetting, ...]) -> TrialResult:
        result = steps(7 if knob_settings else 10)
        name = knob_settings[0].knob if knob_settings else ""
        if name == "set-to-none":
            result.losses = [1.0, 0.9, 0.81]
        if name == "gc-freeze":
            result = TrialResult(problem="RuntimeError: no more", kind="memory")
        if name == "loader-persistent":
            result.idle = ["loader-persistent"]
        return result

    names = ("set-to-none", "gc-freeze", "loader-persistent", "channels-last")
    report = run_trials(names, answer_settings)
    outcomes = {trial.name: (trial.outcome, trial.why) for trial in report.trials}
    assert outcomes["set-to-none"] == ("dropped", "losses: differs from loss 3 on, and must not")
    assert outcomes["gc-freeze"] == ("dropped", "out of memory: RuntimeError: no more")
    assert outcomes["loader-persistent"] == ("dropped", "it found nothing to change")
    assert outcomes["channels-last"] == ("gain", "")
    assert report.together is not None and report.together.knob_settings == [
        KnobSetting("channels-last")
    ]
