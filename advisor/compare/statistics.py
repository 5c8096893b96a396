"""Two samples of step times that do not depend on each other, and what intervals are made of.

Welch's interval for the difference of means (B. L. Welch, Biometrika 34, 1947) is for the three or
four steps that say nothing of how one depends on the next; ``dependent`` is for all others.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Sample = NDArray[np.float64]

LEVEL = 0.95
MIN_STEPS = 3
"""Fewer say nothing about the spread: with two, Welch's interval is that of one difference."""
BOOTSTRAP_FROM = 40
"""Steps on both sides from which medians are compared: below that, a resampled median takes so
few values that its percentiles mean little."""


class Difference(NamedTuple):
    """After minus before, with its confidence interval, in the unit of the samples."""

    method: str
    statistic: str
    """``mean`` or ``median``."""
    before: float
    after: float
    low: float
    high: float

    @property
    def amount(self) -> float:
        """After minus before."""
        return self.after - self.before


def welch(before: Sample, after: Sample, level: float = LEVEL) -> Difference:
    """Welch's t interval for the difference of two means with unequal variances."""
    a, b = len(before), len(after)
    va, vb = before.var(ddof=1) / a, after.var(ddof=1) / b
    spread = math.sqrt(va + vb)
    amount = float(after.mean() - before.mean())
    reach = 0.0
    if spread > 0:
        freedom = (va + vb) ** 2 / (va**2 / (a - 1) + vb**2 / (b - 1))
        reach = t_quantile(0.5 + level / 2, float(freedom)) * spread
    return Difference(
        "Welch's t interval",
        "mean",
        float(before.mean()),
        float(after.mean()),
        amount - reach,
        amount + reach,
    )


def autocorrelation(sample: Sample) -> float | None:
    """Correlation of neighbouring steps; ``None``: too few, or all the same."""
    if len(sample) < MIN_STEPS:
        return None
    centred = sample - sample.mean()
    total = float(centred @ centred)
    return float(centred[1:] @ centred[:-1]) / total if total > 0 else None


def t_quantile(p: float, freedom: float) -> float:
    """Quantile of Student's t distribution for p of at least 0.5, by bisection."""
    low, high = 0.0, 1.0
    while t_cdf(high, freedom) < p:
        low, high = high, high * 2
        if high > 1e9:
            return high
    for _ in range(80):
        middle = (low + high) / 2
        if t_cdf(middle, freedom) < p:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def t_cdf(t: float, freedom: float) -> float:
    """Distribution function of Student's t for t of at least 0 (Abramowitz and Stegun 26.5.27)."""
    return 1 - 0.5 * _beta(freedom / 2, 0.5, freedom / (freedom + t * t))


def _beta(a: float, b: float, x: float) -> float:
    """Regularised incomplete beta function, by its continued fraction (A&S 26.5.8)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta(b, a, 1 - x)
    front = math.exp(
        a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    )
    tiny = 1e-300
    c, d = 1.0, 1 / max(1 - (a + b) * x / (a + 1), tiny)
    fraction = d
    for m in range(1, 300):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / (1 + term * d or tiny)
            c = 1 + term / c or tiny
            fraction *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    return front * fraction / a
