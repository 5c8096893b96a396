"""The interval of a gain holds the truth as often as it says."""

from __future__ import annotations

import numpy as np
import pytest

from advisor.tune.measured_gain import measure_gain, measure_paired_gain

TRUTH = 0.25


def runs(
    random: np.random.Generator, mean: float, load: list[float], steps: int = 60
) -> list[list[int]]:
    """Steps that follow their neighbours, in runs that differ by the load of the machine."""
    result = []
    for factor in load:
        noise = np.zeros(steps)
        for i in range(1, steps):
            noise[i] = 0.7 * noise[i - 1] + random.normal(0, 0.05)
        result.append([int(x) for x in mean * factor * np.exp(noise) * 1e6])
    return result


@pytest.mark.parametrize("drift", [0.02, 0.3])
def test_nine_of_ten_intervals_hold_on_a_loaded_machine(drift: float) -> None:
    hits = 0
    for seed in range(100):
        random = np.random.default_rng(seed)
        load = list(np.exp(random.normal(0, drift, 4)))
        near = [factor * float(np.exp(random.normal(0, 0.02))) for factor in load]
        before, after = runs(random, 10, load), runs(random, 10 * (1 - TRUTH), near)
        paired_gain = measure_paired_gain(before, after) or measure_gain(before, after)
        assert paired_gain is not None
        hits += paired_gain.low <= TRUTH <= paired_gain.high
    assert hits >= 88


def test_pairs_cancel_common_changes() -> None:
    random = np.random.default_rng(7)
    load = [1.0, 2.0, 1.5, 3.0, 1.2]
    before, after = runs(random, 10, load), runs(random, 7.5, load)
    unpaired, paired = measure_gain(before, after), measure_paired_gain(before, after)
    assert unpaired is not None
    assert paired is not None
    assert paired.high - paired.low < (unpaired.high - unpaired.low) / 3


def test_the_mean_counts_pauses_that_come_now_and_then() -> None:
    pauses = [[10, 10, 10, 50] * 10] * 2
    gain = measure_gain(pauses, [[10] * 40] * 2)
    assert gain is not None
    assert gain.share == pytest.approx(0.5)


def test_no_gain_is_measured_without_steps_on_both_sides() -> None:
    assert measure_gain([[1, 2]], [[]]) is None
    assert measure_paired_gain([[1], [2]], [[1], [2]]) is None


def test_two_pairs_suffice_with_noise_of_other_trials() -> None:
    before, after = [[10, 10], [11, 11]], [[5, 5], [5, 6]]
    assert measure_paired_gain(before, after) is None
    paired_gain = measure_paired_gain(before, after, [[0.0, 0.05], [0.02, -0.03], [-0.01, 0.01]])
    assert paired_gain is not None
    assert 0.4 < paired_gain.low < paired_gain.share < paired_gain.high < 0.6
