"""Confidence intervals: against published tables, by hand, and by how often they are right."""

from __future__ import annotations

import math

import numpy as np
import pytest

from advisor.compare import statistics as s
from advisor.compare.statistics import MIN_DEPENDENT_STEPS, block_length, difference, welch_interval


@pytest.mark.parametrize(
    ("p", "freedom", "published"),
    [
        (0.975, 1, 12.7062),
        (0.975, 2, 4.3027),
        (0.975, 3, 3.1824),
        (0.975, 5, 2.5706),
        (0.975, 10, 2.2281),
        (0.975, 30, 2.0423),
        (0.975, 120, 1.9799),
        (0.95, 7, 1.8946),
        (0.995, 4, 4.6041),
    ],
)
def test_t_quantiles_match_published_tables(p: float, freedom: float, published: float) -> None:
    assert s.t_quantile(p, freedom) == pytest.approx(published, abs=6e-5)


def test_the_distribution_function_has_its_closed_forms() -> None:
    for t in (0.1, 0.7, 2.0, 9.0):
        assert s.t_cdf(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi, abs=1e-12)
        assert s.t_cdf(t, 2) == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)), abs=1e-12)


def test_welch_by_hand() -> None:
    before = np.array([8.0, 9.0, 11.0, 12.0])  # variance 10/3
    after = np.array([13.0, 14.0, 14.0, 15.0])  # variance 2/3
    interval = s.welch_interval(before, after)
    va, vb = 10 / 3 / 4, 2 / 3 / 4
    freedom = (va + vb) ** 2 / (va**2 / 3 + vb**2 / 3)
    reach = s.t_quantile(0.975, freedom) * math.sqrt(va + vb)
    assert (interval.before, interval.after, interval.amount) == (10.0, 14.0, 4.0)
    assert (interval.low, interval.high) == pytest.approx((4 - reach, 4 + reach))
    assert freedom == pytest.approx(4.1538, abs=1e-4)


def test_equal_steps_have_an_interval_without_width() -> None:
    interval = s.welch_interval(np.full(4, 10.0), np.full(5, 12.0))
    assert (interval.amount, interval.low, interval.high) == (2.0, 2.0, 2.0)


def autoregression(random: np.random.Generator, rho: float, count: int) -> s.Sample:
    """The recorder's API: decorator with and without options, context manager, explicit steps."""
    noise = random.normal(size=count)
    values = np.empty(count)
    values[0] = noise[0] / math.sqrt(1 - rho * rho)
    for i in range(1, count):
        values[i] = rho * values[i - 1] + noise[i]
    return 100 + values


def test_welch_interval_covers_at_its_nominal_rate() -> None:
    random = np.random.default_rng(3)
    rounds, hits = 1000, 0
    for _ in range(rounds):
        interval = s.welch_interval(random.normal(10, 1, 4), random.normal(12, 3, 6))
        hits += interval.low <= 2 <= interval.high
    assert 0.93 <= hits / rounds <= 0.97


def test_correlation_of_neighbours_matches_the_series() -> None:
    random = np.random.default_rng(5)
    assert s.autocorrelation(autoregression(random, 0.0, 4000)) == pytest.approx(0, abs=0.06)
    assert s.autocorrelation(autoregression(random, 0.8, 4000)) == pytest.approx(0.8, abs=0.06)
    assert s.autocorrelation(np.full(50, 3.0)) is None
    assert s.autocorrelation(np.ones(2)) is None


# -- steps that depend on each other ------------------------------------------------------------


def coverage(rho: float, count: int, *, naive: bool = False, trials: int = 120) -> float:
    """Share of trials whose interval holds the truth, that there is no difference."""
    random = np.random.default_rng(7)
    right = 0
    for _ in range(trials):
        pair = [autoregression(random, rho, count) for _ in range(2)]
        interval = welch_interval(*pair) if naive else difference(*pair)
        assert interval is not None
        right += interval.low <= 0 <= interval.high
    return right / trials


@pytest.mark.parametrize(
    ("rho", "count", "trials"),
    [(0.0, 5, 300), (0.3, 10, 300), (0.6, 20, 300), (0.6, 60, 300), (0.8, 200, 100)],
)
def test_block_interval_covers_dependent_steps(rho: float, count: int, trials: int) -> None:
    """95% is said. Never narrower than to hold 88%, and not so wide that they hold all."""
    assert 0.88 <= coverage(rho, count, trials=trials) <= 0.98


@pytest.mark.parametrize(("rho", "count"), [(0.0, 10), (0.6, 20), (0.6, 60)])
def test_intervals_of_pairs_hold_the_truth_too(rho: float, count: int) -> None:
    random = np.random.default_rng(11)
    right = 0
    for _ in range(200):
        batches = 10 * random.normal(size=count)
        one, other = (batches + autoregression(random, rho, count) for _ in range(2))
        result = difference(one, other, paired=True)
        assert result is not None
        right += result.low <= 0 <= result.high
    assert 0.88 <= right / 200 <= 0.995


def test_the_same_steps_give_the_same_interval() -> None:
    random = np.random.default_rng(2)
    before, after = random.normal(10, 1, 100), random.normal(11, 1, 80)
    assert difference(before, after) == difference(before, after)


def test_welch_interval_undercovers_dependent_steps() -> None:
    assert coverage(0.6, 60, naive=True) < 0.8


def test_block_length_matches_formula_for_known_correlation() -> None:
    rho, count = 0.5, 20_000
    series = autoregression(np.random.default_rng(3), rho, count)
    by_hand = (1.5 * (2 * rho / (1 - rho**2)) ** 2 * count) ** (1 / 3)
    assert block_length(series) == pytest.approx(by_hand, rel=0.08)
    independent = np.random.default_rng(3).normal(size=count)
    assert block_length(independent) <= 4
    assert block_length(np.full(50, 3.0)) == 1


@pytest.mark.parametrize("count", [6, 30, 100])
def test_steps_long_in_both_runs_cancel_when_paired(count: int) -> None:
    random = np.random.default_rng(5)
    batches = random.gamma(4.0, 25.0, count)  # lengths differ by half from batch to batch
    before, after = batches + random.normal(size=count), 4 + batches + random.normal(size=count)
    unpaired, paired = difference(before, after), difference(before, after, paired=True)
    assert unpaired is not None and paired is not None
    assert unpaired.low < 0 < unpaired.high
    # the two noises differ by sqrt(2) a step; the difference of medians says it less sharply
    assert 0 < paired.high - paired.low < 0.5 * (unpaired.high - unpaired.low)
    assert paired.low < 4 < paired.high
    assert difference(before, before, paired=True)[2:] == (  # type: ignore[index]
        paired.before,
        paired.before,
        0.0,
        0.0,
        False,
    )


def test_fewer_than_five_steps_are_not_compared() -> None:
    assert difference(np.ones(MIN_DEPENDENT_STEPS - 1), np.arange(50.0)) is None
    with pytest.raises(ValueError, match="5 and 6 steps cannot be paired"):
        difference(np.ones(5), np.ones(6), paired=True)


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_batches_that_arrive_in_groups_are_compared_by_their_mean(workers: int) -> None:
    """Batches of several workers arrive in groups: one step waits 35 ms for all of them, and the
    others take 0.3 ms. Without workers each step takes 35 ms."""
    random = np.random.default_rng(workers)
    before = 35 + random.normal(0, 2, 60)
    group = np.array([35.0] + [0.3] * (workers - 1))
    after = np.resize(group, 60) + np.abs(random.normal(0, 0.1, 60))
    shorter = difference(before, after)
    assert shorter is not None and shorter.statistic == "mean"
    true = 35 * (1 / workers - 1)
    assert shorter.low <= true + 0.5 and true - 0.5 <= shorter.high < -0.3 * 35
    longer = difference(after, before)
    assert longer is not None and longer.low > 0.3 * 35


def test_rare_long_steps_do_not_hide_a_difference_of_medians() -> None:
    random = np.random.default_rng(1)
    before, after = 10 + random.normal(0, 0.2, 200), 11 + random.normal(0, 0.2, 200)
    before[[20, 90, 150]] = 300
    shown = difference(before, after)
    assert shown is not None and shown.statistic == "median"
    assert 0.8 < shown.low < shown.high < 1.2


def test_a_checkpoint_in_every_tenth_step_counts() -> None:
    random = np.random.default_rng(2)
    before = 10 + random.normal(0, 0.2, 200)
    after = before + random.normal(0, 0.2, 200)
    after[::10] += 90
    shown = difference(before, after)
    assert shown is not None and shown.statistic == "mean"
    assert shown.low < 9 < shown.high and shown.low > 4
