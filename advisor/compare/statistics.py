"""Confidence intervals for the difference between step times of two or more runs.

Steps depend on those before them, so blocks of neighbouring steps are resampled (circular block
bootstrap: D. N. Politis and J. P. Romano, 1992), which keeps that dependence. The interval is the
spread of the draws times a quantile of Student's t with one degree of freedom less than there are
blocks: percentiles of the draws are too narrow where there are few blocks (the same reason as for
fixed smoothing: N. M. Kiefer and T. J. Vogelsang, Econometric Theory 21, 2005).

Steps of the same number are drawn together where both series have the same numbers: two runs with
one seed see the same batches, and a step that is long in both is not a difference. Three or four
steps do not show how one depends on the next: they get Welch's interval (B. L. Welch, Biometrika
34, 1947)."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from advisor.core.report_steps import VARYING_STEPS_SHARE

Sample = NDArray[np.float64]

CONFIDENCE_LEVEL = 0.95
MIN_COMPARED_STEPS = 3
"""Minimum number of steps for a spread: two steps give only one difference."""
MIN_DEPENDENT_STEPS = 5
"""Minimum number of steps on each side that shows how one depends on the next."""
MIN_FOR_MEDIAN = 40
"""Minimum number of steps on both sides to compare medians. With fewer, a resampled median takes so
few values that its percentiles mean little."""
MAX_RARE_SHARE = 0.02
"""Maximum share of steps at each end that may be rare: a hiccup of the machine is no usual length.
"""
MAX_MIDDLE_SPREAD = 1.0
"""Maximum spread of the middle fifth of the steps, in standard deviations, for one usual length: it
is 0.5 in a normal distribution, 0.7 where all lengths are equally frequent, and 2 where there are
two lengths."""
RESAMPLES = 2000
MAX_CORRELATION, MAX_CORRELATION_OF_FEW = 0.98, 0.9
"""Maximum correlation of neighbours in the length of blocks, and in the error of few steps. At 1
there would be one block."""
MAX_DRAWN_AT_ONCE = 4_000_000
"""Maximum number of steps drawn at once: a long series needs no 2,000 times its memory."""
_RANDOM_SEED = 19_920_601
"""Seed of the draws, so that the same series give the same interval."""


class Difference(NamedTuple):
    """Difference of two series, after minus before, with its interval, in the samples' unit."""

    method: str
    statistic: str
    """Compared statistic: ``mean`` or ``median``."""
    before: float
    after: float
    low: float
    high: float
    between_runs: bool = False
    """Whether the interval comes from how far runs differ, as this is more than steps show."""

    @property
    def amount(self) -> float:
        """Difference, after minus before."""
        return self.after - self.before


def welch_interval(before: Sample, after: Sample, level: float = CONFIDENCE_LEVEL) -> Difference:
    """Return Welch's t interval for the difference of two means with unequal variances."""
    a, b = len(before), len(after)
    va, vb = before.var(ddof=1) / a, after.var(ddof=1) / b
    spread = math.sqrt(va + vb)
    half = 0.0
    if spread > 0:
        freedom = (va + vb) ** 2 / (va**2 / (a - 1) + vb**2 / (b - 1))
        half = t_quantile(0.5 + level / 2, float(freedom)) * spread
    centers = float(before.mean()), float(after.mean())
    return _center_on("Welch's t interval", "mean", *centers, half)


def _center_on(method: str, statistic: str, before: float, after: float, half: float) -> Difference:
    """Return the difference with an interval of ``half`` to either side."""
    amount = after - before
    return Difference(method, statistic, before, after, amount - half, amount + half)


def difference(
    before: Sample, after: Sample, *, paired: bool = False, level: float = CONFIDENCE_LEVEL
) -> Difference | None:
    """Return the difference of two series in time order; ``None`` with under five steps on a side.

    It compares means below 40 steps, or where steps have several usual lengths, and medians
    otherwise. ``paired``: the series are equally
    long, and steps at the same index have the same number."""
    shortest = min(len(before), len(after))
    if shortest < MIN_DEPENDENT_STEPS:
        return None
    if paired and len(before) != len(after):
        raise ValueError(f"{len(before)} and {len(after)} steps cannot be paired")
    statistic = _choose_statistic((before, after))
    random = np.random.default_rng(_RANDOM_SEED)
    blocks = [block_length(before), block_length(after)]
    if paired:
        blocks = [max(*blocks, block_length(after - before))]
        drawn = _resample([before, after], blocks[0], statistic, random)
        spread, freedom = _estimate_spread(drawn[1] - drawn[0], len(before) / blocks[0])
        if statistic == "mean":
            spread = max(spread, autoregressive_error(after - before))
    else:
        sides = [
            _standard_error(series, block, statistic, random)
            for series, block in zip((before, after), blocks, strict=True)
        ]
        spread, freedom = _combine_errors(sides)
    center = np.median if statistic == "median" else np.mean
    lengths = " and ".join(map(str, blocks))
    unit = "pairs of steps" if paired else "steps"
    method = f"circular block bootstrap, {RESAMPLES:,} draws, blocks of {lengths} ({unit})"
    centers = float(center(before)), float(center(after))
    return _center_on(method, statistic, *centers, _half_width(spread, freedom, level))


def difference_of_runs(
    before: Sequence[Sample], after: Sequence[Sample], *, level: float = CONFIDENCE_LEVEL
) -> Difference:
    """Return the difference between several runs of one program and one or more of another.

    Runs differ by more than their steps do: another node, clock or allocator layout. So each run
    counts once: the interval is Student's t over the runs' medians, or means, as for steps. It
    assumes the same spread on both sides, and is never narrower than the interval of the steps
    themselves. Both sides together need at least three runs."""
    statistic = _choose_statistic((*before, *after))
    center = np.median if statistic == "median" else np.mean
    centers = [np.array([center(run) for run in runs]) for runs in (before, after)]
    counts = [len(runs) for runs in centers]
    runs_freedom = sum(counts) - 2
    squares = sum(float(((runs - runs.mean()) ** 2).sum()) for runs in centers)
    run_error = math.sqrt(squares / runs_freedom * sum(1 / count for count in counts))
    random = np.random.default_rng(_RANDOM_SEED)
    errors = []
    for runs in (before, after):
        step_errors = [_standard_error(run, block_length(run), statistic, random) for run in runs]
        spread, freedom = _combine_errors(step_errors)
        errors.append((spread / len(runs), freedom))
    step_error, steps_freedom = _combine_errors(errors)
    halves = (
        _half_width(step_error, steps_freedom, level), _half_width(run_error, runs_freedom, level)
    )  # fmt: skip
    method = f"Student's t interval over {counts[0]} and {counts[1]} runs"
    first, second = (float(runs.mean()) for runs in centers)
    result = _center_on(method, statistic, first, second, max(halves))
    return result._replace(between_runs=halves[1] > halves[0])


def _choose_statistic(samples: Sequence[Sample]) -> str:
    """Return ``median`` if all samples have enough steps of one usual length, else ``mean``."""
    if min(map(len, samples)) < MIN_FOR_MEDIAN or any(map(_has_several_lengths, samples)):
        return "mean"
    return "median"


def _has_several_lengths(steps: Sample) -> bool:
    """Return whether steps have several usual lengths, as with batches that arrive in groups, or a
    checkpoint in every tenth step. Their median is one of the lengths, or jumps between them."""
    rare = math.ceil(MAX_RARE_SHARE * len(steps))
    usual = np.sort(steps)[rare:-rare]
    median = float(np.median(usual))
    below, above = np.quantile(usual, (0.4, 0.6))
    is_split = above - below > MAX_MIDDLE_SPREAD * usual.std()
    return bool(is_split or abs(usual.mean() - median) >= VARYING_STEPS_SHARE * median)


def block_length(series: Sample) -> int:
    """Return the number of steps per block for a first-order autoregression of this correlation.

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
    is the correlation of neighbours, corrected by 1 / n because the mean is estimated as well."""
    count, measured = len(series), autocorrelation(series)
    if measured is None:
        return 0.0
    r = min(MAX_CORRELATION_OF_FEW, max(0.0, measured * count / (count - 1) + 1 / count))
    return math.sqrt(float(series.var(ddof=1)) / count * (1 + r) / (1 - r))


def _standard_error(
    series: Sample, block: int, statistic: str, random: np.random.Generator
) -> tuple[float, float]:
    """Return the standard error of one series' statistic, and its degrees of freedom."""
    drawn = _resample([series], block, statistic, random)[0]
    spread, freedom = _estimate_spread(drawn, len(series) / block)
    if statistic == "mean":
        spread = max(spread, autoregressive_error(series))
    return spread, freedom


def _combine_errors(errors: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return a sum's standard error and degrees of freedom (Welch and Satterthwaite, by blocks)."""
    variances = [error**2 for error, _ in errors]
    spread = math.sqrt(sum(variances))
    parts = sum(v * v / freedom for v, (_, freedom) in zip(variances, errors, strict=True))
    return spread, spread**4 / parts if parts > 0 else 1.0


def _half_width(spread: float, freedom: float, level: float) -> float:
    """Return half the width of the interval."""
    return spread * t_quantile(0.5 + level / 2, max(1.0, freedom)) if spread > 0 else 0.0


def _resample(
    series: list[Sample], block: int, statistic: str, random: np.random.Generator
) -> list[NDArray[np.float64]]:
    """Return the statistic of each series in every draw; all series draw the same blocks."""
    count = len(series[0])
    result = [np.empty(RESAMPLES) for _ in series]
    center = np.median if statistic == "median" else np.mean
    rounds = max(1, MAX_DRAWN_AT_ONCE // count)
    for first in range(0, RESAMPLES, rounds):
        draws = min(rounds, RESAMPLES - first)
        starts = random.integers(0, count, size=(draws, math.ceil(count / block), 1))
        rows = ((starts + np.arange(block)) % count).reshape(draws, -1)[:, :count]
        for result_values, values in zip(result, series, strict=True):
            result_values[first : first + draws] = center(values[rows], axis=1)
    return result


def _estimate_spread(drawn: NDArray[np.float64], blocks: float) -> tuple[float, float]:
    """Return (standard error, degrees of freedom). k blocks vary too little, by (k - 1) / k."""
    blocks = max(2.0, blocks)
    return float(drawn.std()) * math.sqrt(blocks / (blocks - 1)), blocks - 1


def autocorrelation(sample: Sample) -> float | None:
    """Return the correlation of neighbouring steps, or ``None`` if too few or all equal."""
    if len(sample) < MIN_COMPARED_STEPS:
        return None
    centered = sample - sample.mean()
    total = float(centered @ centered)
    return float(centered[1:] @ centered[:-1]) / total if total > 0 else None


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
