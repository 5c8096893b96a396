"""Changes of the losses that each class of knob may cause."""

from __future__ import annotations

import pytest

from advisor.tune.knob import Safety, TrialResult
from advisor.tune.measured_gain import check_losses

BASE = [2.0 / (1 + step) + 0.5 for step in range(40)]


def run(losses: list[float | None], norms: list[float | None] | None = None) -> TrialResult:
    return TrialResult(losses=losses, norms=norms or [1.0] * 5, loss_dtype="float32")


def scale_losses(factor: float) -> list[float | None]:
    return [loss * factor for loss in BASE]


@pytest.mark.parametrize(
    ("safety", "factor", "passed"),
    [
        ("exact", 1.0, True),
        ("exact", 1 + 2**-23, False),
        ("reordered", 1 + 4e-6, True),
        ("reordered", 1 + 1e-3, False),
        ("precision", 1.02, True),
        ("precision", 1.2, False),
    ],
)
def test_each_class_has_its_bar(safety: Safety, factor: float, passed: bool) -> None:
    assert check_losses(safety, False, [run([*BASE])], [run(scale_losses(factor))]).passed is passed


@pytest.mark.parametrize("safety", ["exact", "reordered", "precision"])
def test_nan_loss_is_never_accepted(safety: Safety) -> None:
    assert not check_losses(safety, False, [run([*BASE])], [run([*BASE[:20], None])]).passed


def test_a_single_bad_run_among_good_ones_is_enough() -> None:
    runs = [run([*BASE]), run(scale_losses(2.0)), run([*BASE])]
    assert not check_losses("exact", False, [run([*BASE])], runs).passed


def test_rounding_in_some_runs_is_the_machine_and_not_the_knob() -> None:
    """A knob that changes the order of sums changes it each time."""
    off = scale_losses(1 + 2**-22)
    once = check_losses("exact", False, [run([*BASE])] * 2, [run(off)])
    assert not once.passed
    assert once.needs_rerun
    both = check_losses("exact", False, [run([*BASE])] * 2, [run(off), run([*BASE])])
    assert both.passed
    assert both.text.startswith("equal in 1 of 2 runs, else ")
    assert not check_losses("exact", False, [run([*BASE])] * 2, [run(off), run(off)]).passed
    assert not check_losses(
        "exact", False, [run([*BASE])] * 2, [run(scale_losses(1.01))]
    ).needs_rerun


def test_varying_losses_are_compared_with_a_range() -> None:
    baseline = [run([*BASE]), run(scale_losses(1.001))]
    assert check_losses("exact", False, baseline, [run(scale_losses(0.999))]).passed
    assert not check_losses("exact", False, baseline, [run(scale_losses(1.5))]).passed


def test_shrinking_gradients_are_detected_with_equal_losses() -> None:
    small: list[float | None] = [0.1] * 5
    assert not check_losses(
        "precision", False, [run([*BASE])], [run(scale_losses(1.001), small)]
    ).passed


def test_trial_losing_its_losses_is_refused() -> None:
    assert not check_losses("exact", False, [run([*BASE])], [run([])]).passed
