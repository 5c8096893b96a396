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


def autoregression(random: np.random.Generator, rho: float, count: int) -> s.Sample:
    """Steps each of which takes after the one before."""
    noise = random.normal(size=count)
    found = np.empty(count)
    found[0] = noise[0] / math.sqrt(1 - rho * rho)
    for i in range(1, count):
        found[i] = rho * found[i - 1] + noise[i]
    return 100 + found


def test_welch_holds_the_truth_as_often_as_it_says_for_independent_steps() -> None:
    random = np.random.default_rng(3)
    rounds, hits = 1000, 0
    for _ in range(rounds):
        found = s.welch(random.normal(10, 1, 4), random.normal(12, 3, 6))
        hits += found.low <= 2 <= found.high
    assert 0.93 <= hits / rounds <= 0.97


def test_the_correlation_of_neighbours_is_that_of_the_series() -> None:
    random = np.random.default_rng(5)
    assert s.autocorrelation(autoregression(random, 0.0, 4000)) == pytest.approx(0, abs=0.06)
    assert s.autocorrelation(autoregression(random, 0.8, 4000)) == pytest.approx(0.8, abs=0.06)
    assert s.autocorrelation(np.full(50, 3.0)) is None
    assert s.autocorrelation(np.ones(2)) is None
