"""Two samples of step times: how far apart they are, and how sure that is.

Few steps (a profiler window): Welch's interval for the difference of means (B. L. Welch,
Biometrika 34, 1947). Many (the recorder's): a circular block bootstrap of the difference of
medians, whose blocks keep neighbouring steps together because they are not independent.
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
RESAMPLES = 2000
_SEED = 20_140_601
"""The same samples give the same interval."""


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


def difference(before: Sample, after: Sample, level: float = LEVEL) -> Difference | None:
    """The difference of two samples in order of time; ``None``: too few to say."""
    if min(len(before), len(after)) < MIN_STEPS:
        return None
    if min(len(before), len(after)) >= BOOTSTRAP_FROM:
        return block_bootstrap(before, after, level)
    return welch(before, after, level)


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


def block_bootstrap(before: Sample, after: Sample, level: float = LEVEL) -> Difference:
    """Percentile interval of the difference of medians, from resampled blocks of steps."""
    random = np.random.default_rng(_SEED)
    medians = [_resampled_medians(sample, random) for sample in (before, after)]
    low, high = np.quantile(medians[1] - medians[0], [0.5 - level / 2, 0.5 + level / 2])
    return Difference(
        f"block bootstrap, {RESAMPLES:,} resamples, blocks of {block_length(before)} and "
        f"{block_length(after)} steps",
        "median",
        float(np.median(before)),
        float(np.median(after)),
        float(low),
        float(high),
    )


def _resampled_medians(sample: Sample, random: np.random.Generator) -> Sample:
    count, block = len(sample), block_length(sample)
    found = np.empty(RESAMPLES)
    blocks = math.ceil(count / block)
    # in rounds, so that a run of a million steps does not take its size 2,000 times
    rounds = max(1, 4_000_000 // count)
    for first in range(0, RESAMPLES, rounds):
        many = min(rounds, RESAMPLES - first)
        starts = random.integers(0, count, size=(many, blocks, 1))
        rows = ((starts + np.arange(block)) % count).reshape(many, -1)[:, :count]
        found[first : first + many] = np.median(sample[rows], axis=1)
    return found


def block_length(sample: Sample) -> int:
    """Steps in a block: what suits a first-order autoregression of the same correlation.

    D. N. Politis and H. White, Econometric Reviews 23 (2004), for the circular bootstrap:
    (1.5 (2r / (1 - r²))² n)^(1/3), with r the correlation of neighbours.
    """
    count = len(sample)
    rho = min(0.98, max(0.0, autocorrelation(sample) or 0.0))
    length = (1.5 * (2 * rho / (1 - rho * rho)) ** 2 * count) ** (1 / 3)
    return max(1, min(int(length + 0.5), count // 4))


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
