"""A baseline of several runs: how far runs of one program differ is part of the decision."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from advisor import cli
from advisor.compare.comparison import Bounds, Comparison
from advisor.compare.gate import build_baseline, compare_with_baseline, decide
from advisor.compare.statistics import Sample, difference_of_runs, t_quantile
from advisor.core.errors import AdvisorError
from advisor.core.report import Report, Scope
from advisor.core.report_steps import StepDurations
from advisor.testing import TraceBuilder

Record = Callable[..., Path]
Make = Callable[..., TraceBuilder]
NOISE = 0.06
"""Standard deviation of a run's speed, as on a shared machine."""


def report(durations: Sample) -> Report:
    """A report of nothing but steps."""
    durations_ns = [int(ns) for ns in durations]
    scope = Scope(
        rank=0,
        step_source="record",
        steps_found=len(durations_ns),
        steps_used=len(durations_ns),
        outliers=[],
        span_ns=sum(durations_ns),
        step_ns=float(np.mean(durations_ns)),
        step_min_ns=min(durations_ns),
        step_max_ns=max(durations_ns),
        step_median_ns=float(np.median(durations_ns)),
        device=None,
        device_name=None,
        device_known=False,
        devices_seen=0,
    )
    numbers = [(0, len(durations_ns) - 1)]
    steps = StepDurations(source="recorder", numbers=numbers, durations_ns=durations_ns)
    return Report(status="limited", verdict="", inputs=[], scope=scope, step_durations=[steps])


def draw_run(random: np.random.Generator, slower: float = 0.0, steps: int = 50) -> Report:
    """10 ms per step; a run is faster or slower as a whole, and steps depend on each other."""
    speed = (1 + slower) * np.exp(random.normal(0, NOISE))
    noise = random.normal(0, 0.02, steps)
    for i in range(1, steps):
        noise[i] += 0.6 * noise[i - 1]
    return report(1e7 * speed * (1 + noise))


def test_the_note_on_few_steps_counts_those_that_lack() -> None:
    """12 more than 28 are needed."""
    random = np.random.default_rng(1)
    few, enough = (draw_run(random, steps=steps) for steps in (28, 60))
    notes = " ".join(compare_with_baseline(build_baseline([few], ["run"]), enough).steps.notes)
    assert "Record 12 more steps: 40 are needed after the warm-up." in notes
    both = compare_with_baseline(build_baseline([enough], ["run"]), enough).steps.notes
    assert "Record" not in " ".join(both)


def alarm_rates(baseline_runs: int, bounds: Sequence[float], trials: int = 150) -> list[float]:
    """Share of trials in which identical runs are a regression, for each bound."""
    random = np.random.default_rng(25)
    values = np.zeros(len(bounds))
    for _ in range(trials):
        runs = [draw_run(random) for _ in range(baseline_runs)]
        kept = build_baseline(runs, ["run"] * baseline_runs)
        comparison = compare_with_baseline(kept, draw_run(random))
        values += [decide(comparison, Bounds(slower=bound)).failed for bound in bounds]
    return [float(share) for share in values / trials]


def test_three_identical_noisy_runs_seldom_alarm() -> None:
    bounds = (0.0, 0.02, 0.05)
    assert max(alarm_rates(3, bounds)) <= 0.05
    single = alarm_rates(1, bounds, trials=60)
    assert min(single) > 0.15, "what one run does not tell"


def test_large_slowdown_alarms_and_detectable_size_is_given() -> None:
    random = np.random.default_rng(7)
    kept = build_baseline([draw_run(random) for _ in range(3)], ["a", "b", "c"])
    comparison: Comparison = compare_with_baseline(kept, draw_run(random, slower=1.0))
    assert comparison.decision is not None and comparison.decision.answer == "regression"
    edge = comparison.decision.detectable
    assert comparison.steps.share is not None and 0.05 < edge < comparison.steps.share
    base = 1 / (1 + comparison.steps.share)  # a run as fast as the baseline's, to scale
    for scale, answer in ((1.02, "regression"), (0.98, "not shown")):
        steps = comparison.steps
        assert steps.after is not None
        durations = np.array(steps.after.durations_ns) * base * (1 + edge * scale)
        decision = compare_with_baseline(kept, report(durations)).decision
        assert decision is not None and decision.answer == answer
        # far more steps of these runs would not help: they differ by more than their steps do
        advice = "The runs differ: save more of them, or record on an idle machine"
        assert (advice in decision.reasons[0]) == (answer == "not shown")


def test_the_interval_over_runs_by_hand() -> None:
    """Steps that are all equal: only the runs differ."""
    before = [np.full(8, ms) for ms in (10.0, 11.0, 12.0)]
    comparison = difference_of_runs(before, [np.full(8, 15.0)])
    reach = t_quantile(0.975, 2) * np.sqrt(1.0 * (1 / 3 + 1))  # variance of 10, 11, 12 is 1
    assert (comparison.before, comparison.after, comparison.amount) == (11.0, 15.0, 4.0)
    assert (comparison.low, comparison.high) == pytest.approx((4 - reach, 4 + reach))


def test_equal_runs_keep_the_interval_of_their_steps() -> None:
    random = np.random.default_rng(3)
    steps = random.normal(100, 10, 60)
    same = [steps, steps.copy(), steps.copy()]
    comparison = difference_of_runs(same, [random.normal(100, 10, 60)])
    assert comparison.high - comparison.low > 2


def test_the_command_line_gathers_several_runs(
    write_recording: Record,
    training: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, us in (("a", 1000), ("b", 1080), ("c", 1040), ("d", 1090)):
        write_recording(name, [us + (n * n) % 7 for n in range(60)], training(), samples=32)
    assert cli.run(["gate", "--save", "base.json", "a", "b", "c"]) == 0
    assert "of 3 runs" in capsys.readouterr().err
    kept = Report.from_json(Path("base.json").read_bytes())
    assert {steps.run for steps in kept.step_durations} == {0, 1, 2}
    assert cli.run(["gate", "base.json", "d", "--max-slower", "2%", "--format", "json"]) == 0
    comparison = json.loads(capsys.readouterr().out)
    assert comparison["decision"]["answer"] == "not shown"
    assert comparison["steps"]["before"]["runs"] == 3
    # by hand: medians of 1,000, 1,080 and 1,040 µs and some; 1,090 µs is 4.8% more than their mean
    assert comparison["steps"]["share"] == pytest.approx(1.048 - 1, abs=0.001)
    # the first run alone calls the same run 9% slower for sure
    assert cli.run(["gate", "a", "d", "--max-slower", "2%", "--format", "json"]) == 1


def test_runs_that_do_not_compare_are_not_baseline() -> None:
    random = np.random.default_rng(1)
    one, other = draw_run(random), draw_run(random)
    with pytest.raises(AdvisorError, match="give another run"):
        build_baseline([one, one], ["a", "b"])
    other.scope.device_name, one.scope.device_name = "NVIDIA H100", "NVIDIA A100"
    with pytest.raises(AdvisorError, match=r"b: .*keep a baseline for each GPU"):
        build_baseline([one, other], ["a", "b"])
    with pytest.raises(AdvisorError, match="a: 4 steps cannot tell"):
        build_baseline([draw_run(random, steps=4)], ["a"])
