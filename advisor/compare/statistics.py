"""Confidence intervals for the difference between step times: of two runs, or of several.

Steps depend on those before them, so blocks of neighbouring steps are drawn again and again
(circular block bootstrap: D. N. Politis and J. P. Romano, 1992), which keeps that dependence. The
interval is the spread of the draws times a quantile of Student's t with a degree of freedom for
each block but one: percentiles of the draws are too narrow where there are few blocks (the same
reason as for fixed smoothing: N. M. Kiefer and T. J. Vogelsang, Econometric Theory 21, 2005).

Steps of the same number are drawn together where both series have the same ones: two runs with one
seed see the same batches, and what is long in both is no difference. Three or four steps show
nothing of how one depends on the next: Welch's interval (B. L. Welch, Biometrika 34, 1947)."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Sample = NDArray[np.float64]

CONFIDENCE_LEVEL = 0.95
MIN_STEPS = 3
"""Smallest number of steps for a spread: with two, Welch's interval is that of one difference."""
MIN_DEPENDENT_STEPS = 5
"""Smallest number of steps on each side that shows how one depends on the next."""
MIN_FOR_MEDIAN = 40
"""Number of steps on both sides from which medians are compared. Below, a resampled median takes so
few values that its percentiles mean little."""
RESAMPLES = 2000
MAX_CORRELATION, MAX_CORRELATION_OF_FEW = 0.98, 0.9
"""Largest correlation of neighbours for which blocks are made, and for which the error of few steps
is widened; at 1 there would be one block."""
MAX_DRAWN_AT_ONCE = 4_000_000
"""Number of steps drawn at one time: a series of a million does not take its size 2,000 times."""
_SEED = 19_920_601
"""Seed of the draws: the same series give the same interval."""


class Difference(NamedTuple):
    """Difference of two series, after minus before, with its interval, in the samples' unit."""

    method: str
    statistic: str
    """Statistic that is compared: ``mean`` or ``median``."""
    before: float
    after: float
    low: float
    high: float

    @property
    def amount(self) -> float:
        """Difference, after minus before."""
        return self.after - self.before


def welch_interval(before: Sample, after: Sample, level: float = CONFIDENCE_LEVEL) -> Difference:
    """Return Welch's t interval for the difference of two means with unequal variances."""
    a, b = len(before), len(after)
    va, vb = before.var(ddof=1) / a, after.var(ddof=1) / b
    spread = math.sqrt(va + vb)
    reach = 0.0
    if spread > 0:
        freedom = (va + vb) ** 2 / (va**2 / (a - 1) + vb**2 / (b - 1))
        reach = t_quantile(0.5 + level / 2, float(freedom)) * spread
    centers = float(before.mean()), float(after.mean())
    return _around("Welch's t interval", "mean", *centers, reach)


def _around(method: str, statistic: str, before: float, after: float, reach: float) -> Difference:
    """Return the difference with an interval of ``reach`` to either side."""
    amount = after - before
    return Difference(method, statistic, before, after, amount - reach, amount + reach)


def difference(
    before: Sample, after: Sample, *, paired: bool = False, level: float = CONFIDENCE_LEVEL
) -> Difference | None:
    """Return the difference of two series in time order; ``None``: fewer than five steps on a side.

    It compares means below 40 steps, and medians from there on. ``paired``: the steps at one place
    of both series have the same number; the series are equally long."""
    shortest = min(len(before), len(after))
    if shortest < MIN_DEPENDENT_STEPS:
        return None
    if paired and len(before) != len(after):
        raise ValueError(f"{len(before)} and {len(after)} steps cannot be paired")
    statistic = "median" if shortest >= MIN_FOR_MEDIAN else "mean"
    random = np.random.default_rng(_SEED)
    blocks = [block_length(before), block_length(after)]
    if paired:
        blocks = [max(*blocks, block_length(after - before))]
        drawn = _drawn([before, after], blocks[0], statistic, random)
        spread, freedom = _spread(drawn[1] - drawn[0], len(before) / blocks[0])
        if statistic == "mean":
            spread = max(spread, autoregressive_error(after - before))
    else:
        sides = [
            _standard_error(series, block, statistic, random)
            for series, block in zip((before, after), blocks, strict=True)
        ]
        spread, freedom = _combined(sides)
    center = np.median if statistic == "median" else np.mean
    long = " and ".join(map(str, blocks))
    unit = "pairs of steps" if paired else "steps"
    method = f"circular block bootstrap, {RESAMPLES:,} draws, blocks of {long} ({unit})"
    centers = float(center(before)), float(center(after))
    return _around(method, statistic, *centers, _reach(spread, freedom, level))


def difference_of_runs(
    before: Sequence[Sample], after: Sequence[Sample], *, level: float = CONFIDENCE_LEVEL
) -> Difference:
    """Return the difference between several runs of one program and one or more of another.

    A run differs from the next by more than its steps do: another node, clock or allocator layout.
    So runs are what is counted: the interval is Student's t over their medians (means below 40
    steps), whose spread is taken to be the same on both sides, and never narrower than the one of
    the steps themselves. Three runs or more on the two sides together."""
    statistic = "median" if min(map(len, (*before, *after))) >= MIN_FOR_MEDIAN else "mean"
    center = np.median if statistic == "median" else np.mean
    centers = [np.array([center(run) for run in runs]) for runs in (before, after)]
    counts = [len(runs) for runs in centers]
    runs_freedom = sum(counts) - 2
    squares = sum(float(((runs - runs.mean()) ** 2).sum()) for runs in centers)
    between = math.sqrt(squares / runs_freedom * sum(1 / count for count in counts))
    random = np.random.default_rng(_SEED)
    errors = []
    for runs in (before, after):
        each = [_standard_error(run, block_length(run), statistic, random) for run in runs]
        spread, freedom = _combined(each)
        errors.append((spread / len(runs), freedom))
    within, steps_freedom = _combined(errors)
    reach = max(_reach(between, runs_freedom, level), _reach(within, steps_freedom, level))
    method = f"Student's t interval over {counts[0]} and {counts[1]} runs"
    first, second = (float(runs.mean()) for runs in centers)
    return _around(method, statistic, first, second, reach)


def block_length(series: Sample) -> int:
    """Return the steps in a block that suit a first-order autoregression of the same correlation.

    D. N. Politis and H. White, Econometric Reviews 23 (2004), for the circular bootstrap:
    (1.5 (2r / (1 - r²))² n)^(1/3). The correlation of few steps is estimated too low, by
    (1 + 4r) / n (F. H. C. Marriott and J. A. Pope, Biometrika 41, 1954): that is added."""
    count = len(series)
    measured = autocorrelation(series)
    if measured is None or count < MIN_DEPENDENT_STEPS:
        return 1
    r = min(MAX_CORRELATION, max(0.0, (count * measured + 1) / (count - 4)))
    length = (1.5 * (2 * r / (1 - r * r)) ** 2 * count) ** (1 / 3)
    return max(1, min(int(length + 0.5), count // 4))


def autoregressive_error(series: Sample) -> float:
    """Return the mean's standard error in a first-order autoregression: s² / n (1 + r) / (1 - r). r
    is the correlation of neighbours, corrected by 1 / n for the mean that was estimated too."""
    count, measured = len(series), autocorrelation(series)
    if measured is None:
        return 0.0
    r = min(MAX_CORRELATION_OF_FEW, max(0.0, measured * count / (count - 1) + 1 / count))
    return math.sqrt(float(series.var(ddof=1)) / count * (1 + r) / (1 - r))


def _standard_error(
    series: Sample, block: int, statistic: str, random: np.random.Generator
) -> tuple[float, float]:
    """Return the standard error of one series' statistic, and its degrees of freedom."""
    drawn = _drawn([series], block, statistic, random)[0]
    spread, freedom = _spread(drawn, len(series) / block)
    if statistic == "mean":
        spread = max(spread, autoregressive_error(series))
    return spread, freedom


def _combined(errors: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return a sum's standard error and degrees of freedom (Welch and Satterthwaite, by blocks)."""
    variances = [error**2 for error, _ in errors]
    spread = math.sqrt(sum(variances))
    parts = sum(v * v / freedom for v, (_, freedom) in zip(variances, errors, strict=True))
    return spread, spread**4 / parts if parts > 0 else 1.0


def _reach(spread: float, freedom: float, level: float) -> float:
    """Return half the width of the interval."""
    return spread * t_quantile(0.5 + level / 2, max(1.0, freedom)) if spread > 0 else 0.0


def _drawn(
    series: list[Sample], block: int, statistic: str, random: np.random.Generator
) -> list[NDArray[np.float64]]:
    """Return the statistic of each series in every draw; all series draw the same blocks."""
    count = len(series[0])
    result = [np.empty(RESAMPLES) for _ in series]
    center = np.median if statistic == "median" else np.mean
    rounds = max(1, MAX_DRAWN_AT_ONCE // count)
    for first in range(0, RESAMPLES, rounds):
        many = min(rounds, RESAMPLES - first)
        starts = random.integers(0, count, size=(many, math.ceil(count / block), 1))
        rows = ((starts + np.arange(block)) % count).reshape(many, -1)[:, :count]
        for values, item in zip(result, series, strict=True):
            values[first : first + many] = center(item[rows], axis=1)
    return result


def _spread(drawn: NDArray[np.float64], blocks: float) -> tuple[float, float]:
    """Return (standard error, degrees of freedom); k blocks vary by (k - 1) / k too little."""
    blocks = max(2.0, blocks)
    return float(drawn.std()) * math.sqrt(blocks / (blocks - 1)), blocks - 1


def autocorrelation(sample: Sample) -> float | None:
    """Return the correlation of neighbouring steps; ``None`` if they are too few or all equal."""
    if len(sample) < MIN_STEPS:
        return None
    centred = sample - sample.mean()
    total = float(centred @ centred)
    return float(centred[1:] @ centred[:-1]) / total if total > 0 else None


def t_quantile(p: float, freedom: float) -> float:
    """Return the quantile of Student's t distribution for p of at least 0.5, by bisection."""
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
    """Return Student's t distribution function for t of at least 0 (Abramowitz, Stegun 26.5.27)."""
    return 1 - 0.5 * _beta(freedom / 2, 0.5, freedom / (freedom + t * t))


def _beta(a: float, b: float, x: float) -> float:
    """Return the regularised incomplete beta function, by its continued fraction (A&S 26.5.8)."""
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
        uneven = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, uneven):
            d = 1 / (1 + term * d or tiny)
            c = 1 + term / c or tiny
            fraction *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    return front * fraction / a
