"""Confidence intervals: against published tables, by hand, and by how often they are right."""

from __future__ import annotations

import math

import numpy as np
import pytest

from advisor.compare import statistics as s


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
def test_quantiles_of_t_are_those_of_the_tables(p: float, freedom: float, published: float) -> None:
    assert s.t_quantile(p, freedom) == pytest.approx(published, abs=6e-5)


def test_the_distribution_function_has_its_closed_forms() -> None:
    for t in (0.1, 0.7, 2.0, 9.0):
        assert s.t_cdf(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi, abs=1e-12)
        assert s.t_cdf(t, 2) == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)), abs=1e-12)


def test_welch_by_hand() -> None:
    before = np.array([8.0, 9.0, 11.0, 12.0])  # variance 10/3
    after = np.array([13.0, 14.0, 14.0, 15.0])  # variance 2/3
    found = s.welch(before, after)
    va, vb = 10 / 3 / 4, 2 / 3 / 4
    freedom = (va + vb) ** 2 / (va**2 / 3 + vb**2 / 3)
    reach = s.t_quantile(0.975, freedom) * math.sqrt(va + vb)
    assert (found.before, found.after, found.amount) == (10.0, 14.0, 4.0)
    assert (found.low, found.high) == pytest.approx((4 - reach, 4 + reach))
    assert freedom == pytest.approx(4.1538, abs=1e-4)


def test_steps_that_are_all_alike_leave_no_doubt() -> None:
    found = s.welch(np.full(4, 10.0), np.full(5, 12.0))
    assert (found.amount, found.low, found.high) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize(("before", "after"), [(2, 100), (100, 2), (0, 5), (1, 1)])
def test_fewer_than_three_steps_are_not_compared(before: int, after: int) -> None:
    assert s.difference(np.ones(before), np.ones(after)) is None


def test_a_sample_against_itself_does_not_differ() -> None:
    random = np.random.default_rng(1)
    for count in (3, 6, 60, 600):
        sample = random.gamma(4.0, 10.0, count)
        found = s.difference(sample, sample)
        assert found is not None
        assert found.amount == 0
        assert found.low < 0 < found.high


def autoregression(random: np.random.Generator, rho: float, count: int) -> s.Sample:
    """Steps each of which takes after the one before."""
    noise = random.normal(size=count)
    found = np.empty(count)
    found[0] = noise[0] / math.sqrt(1 - rho * rho)
    for i in range(1, count):
        found[i] = rho * found[i - 1] + noise[i]
    return 100 + found


@pytest.mark.parametrize("rho", [0.0, 0.6])
def test_intervals_hold_the_truth_about_as_often_as_they_say(
    rho: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s, "RESAMPLES", 500)
    random = np.random.default_rng(7)
    rounds, hits = 150, 0
    for _ in range(rounds):
        before, after = (autoregression(random, rho, 200) for _ in range(2))
        found = s.block_bootstrap(before, after + 0.5)
        hits += found.low <= 0.5 <= found.high
    # 95% is asked for; the block bootstrap is known to be a little short at this length
    assert 0.86 <= hits / rounds <= 1.0


def test_welch_holds_the_truth_as_often_as_it_says_for_independent_steps() -> None:
    random = np.random.default_rng(3)
    rounds, hits = 1000, 0
    for _ in range(rounds):
        found = s.welch(random.normal(10, 1, 4), random.normal(12, 3, 6))
        hits += found.low <= 2 <= found.high
    assert 0.93 <= hits / rounds <= 0.97


def test_blocks_grow_with_the_correlation_of_neighbours() -> None:
    random = np.random.default_rng(5)
    independent = autoregression(random, 0.0, 4000)
    dependent = autoregression(random, 0.8, 4000)
    assert s.autocorrelation(independent) == pytest.approx(0, abs=0.06)
    assert s.autocorrelation(dependent) == pytest.approx(0.8, abs=0.06)
    # (1.5 * (1.6 / 0.36)² * 4000)^(1/3) = 49.1
    assert s.block_length(dependent) == pytest.approx(49, rel=0.2)
    assert s.block_length(independent) <= 5


def test_the_same_steps_give_the_same_interval() -> None:
    random = np.random.default_rng(2)
    before, after = random.normal(10, 1, 100), random.normal(11, 1, 80)
    assert s.difference(before, after) == s.difference(before, after)
