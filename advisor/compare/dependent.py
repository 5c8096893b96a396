"""How far apart two series of steps are, where a step depends on those before it.

Blocks of neighbouring steps are drawn again and again (circular block bootstrap: D. N. Politis and
J. P. Romano, 1992), so that what one step passes on to the next is kept. The interval is the
spread of what was drawn times a quantile of Student's t with a degree of freedom for each block but
one: percentiles of what was drawn are too narrow where there are few blocks (the same reason as
for fixed smoothing: N. M. Kiefer and T. J. Vogelsang, Econometric Theory 21, 2005).

Steps of the same number are drawn together where both series have the same ones: two runs with one
seed see the same batches, and what is long in both is no difference.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from advisor.compare.statistics import (
    BOOTSTRAP_FROM,
    LEVEL,
    Difference,
    Sample,
    autocorrelation,
    t_quantile,
)

MINIMUM = 5
"""Steps on each side; fewer tell nothing of how one depends on the next."""
RESAMPLES = 2000
STRONGEST, STRONGEST_OF_FEW = 0.98, 0.9
"""Correlation of neighbours that a block is made for, and that few steps are spread for; at 1 there
would be one block."""
AT_ONCE = 4_000_000
"""Steps that are drawn at one time: a series of a million does not take its size 2,000 times."""
_SEED = 19_920_601
"""The same series give the same interval."""


def difference(
    before: Sample, after: Sample, *, paired: bool = False, level: float = LEVEL
) -> Difference | None:
    """The difference of two series in order of time; ``None``: fewer than five steps.

    Of means below 40 steps, of medians from there on. ``paired``: the steps at one place of both
    series have the same number; the series are equally long.
    """
    shortest = min(len(before), len(after))
    if shortest < MINIMUM:
        return None
    if paired and len(before) != len(after):
        raise ValueError(f"{len(before)} and {len(after)} steps cannot be paired")
    statistic = "median" if shortest >= BOOTSTRAP_FROM else "mean"
    random = np.random.default_rng(_SEED)
    blocks = [block_length(before), block_length(after)]
    if paired:
        blocks = [max(*blocks, block_length(after - before))]
        drawn = _drawn([before, after], blocks[0], statistic, random)
        spread, freedom = _spread(drawn[1] - drawn[0], len(before) / blocks[0])
        if statistic == "mean":
            spread = max(spread, autoregressive(after - before))
    else:
        sides = [
            _spread(_drawn([one], block, statistic, random)[0], len(one) / block)
            for one, block in zip((before, after), blocks, strict=True)
        ]
        if statistic == "mean":
            few = zip(sides, (before, after), strict=True)
            sides = [(max(side, autoregressive(one)), free) for (side, free), one in few]
        variances = [side**2 for side, _ in sides]
        spread = math.sqrt(sum(variances))
        # Welch and Satterthwaite, with blocks in place of steps
        parts = sum(v * v / free for v, (_, free) in zip(variances, sides, strict=True))
        freedom = spread**4 / parts if parts > 0 else 1.0
    center = np.median if statistic == "median" else np.mean
    one, other = float(center(before)), float(center(after))
    reach = spread * t_quantile(0.5 + level / 2, max(1.0, freedom)) if spread > 0 else 0.0
    long = " and ".join(map(str, blocks))
    pairs = "pairs of " if paired else ""
    return Difference(
        f"circular block bootstrap, {RESAMPLES:,} draws, blocks of {long} {pairs}steps",
        statistic,
        one,
        other,
        other - one - reach,
        other - one + reach,
    )


def block_length(series: Sample) -> int:
    """Steps in a block: what suits a first-order autoregression with the same correlation.

    D. N. Politis and H. White, Econometric Reviews 23 (2004), for the circular bootstrap:
    (1.5 (2r / (1 - r²))² n)^(1/3). The correlation of few steps is estimated too low, by
    (1 + 4r) / n (F. H. C. Marriott and J. A. Pope, Biometrika 41, 1954): that is added.
    """
    count = len(series)
    measured = autocorrelation(series)
    if measured is None or count < MINIMUM:
        return 1
    r = min(STRONGEST, max(0.0, (count * measured + 1) / (count - 4)))
    length = (1.5 * (2 * r / (1 - r * r)) ** 2 * count) ** (1 / 3)
    return max(1, min(int(length + 0.5), count // 4))


def autoregressive(series: Sample) -> float:
    """Standard error of the mean of a first-order autoregression: s² / n (1 + r) / (1 - r), where r
    is the correlation of neighbours, corrected by 1 / n for the mean that was estimated too."""
    count, measured = len(series), autocorrelation(series)
    if measured is None:
        return 0.0
    r = min(STRONGEST_OF_FEW, max(0.0, measured * count / (count - 1) + 1 / count))
    return math.sqrt(float(series.var(ddof=1)) / count * (1 + r) / (1 - r))


def _drawn(
    series: list[Sample], block: int, statistic: str, random: np.random.Generator
) -> list[NDArray[np.float64]]:
    """The statistic of each series in every draw; the same blocks are drawn of all."""
    count = len(series[0])
    found = [np.empty(RESAMPLES) for _ in series]
    center = np.median if statistic == "median" else np.mean
    rounds = max(1, AT_ONCE // count)
    for first in range(0, RESAMPLES, rounds):
        many = min(rounds, RESAMPLES - first)
        starts = random.integers(0, count, size=(many, math.ceil(count / block), 1))
        rows = ((starts + np.arange(block)) % count).reshape(many, -1)[:, :count]
        for values, one in zip(found, series, strict=True):
            values[first : first + many] = center(one[rows], axis=1)
    return found


def _spread(drawn: NDArray[np.float64], blocks: float) -> tuple[float, float]:
    """(standard error, degrees of freedom): draws of k blocks vary by (k - 1) / k too little."""
    blocks = max(2.0, blocks)
    return float(drawn.std()) * math.sqrt(blocks / (blocks - 1)), blocks - 1
