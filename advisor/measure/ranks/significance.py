"""How probable it is that the most extreme of similar ranks looks like this."""

from __future__ import annotations

import math

import numpy as np

from advisor.core.intervals import Floats, Ints

NORMAL_MAD = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
MAX_DEGREES = 30.0
"""Of freedom: tails of measured times are heavier than the normal distribution's, and a thousand
ranks reach far into them. Student's t of 30 leaves six deviations to one of a million."""
MAD_EFFICIENCY = 0.37
"""Of the median absolute deviation for normal scatter (Huber, Robust Statistics, 1981)."""
LATE_SHARE = 0.05
"""Of the step, that the others wait in the open for the rank that is late."""
MIN_LATE = 0.5
MAX_LATE_CHANCE = 0.01
MIN_COLLECTIVES = 4
"""Fewer that a rank takes part in do not tell whether it is late."""


def upper_tail(t: float, degrees: float) -> float:
    """Probability of a larger value in Student's t distribution, to a few per cent of itself
    (Wallace, Biometrika 46, 1959)."""
    if not math.isfinite(t):
        return 0.0 if t > 0 else 1.0
    size = math.sqrt(degrees * math.log1p(t * t / degrees)) * (8 * degrees + 1) / (8 * degrees + 3)
    tail = 0.5 * math.erfc(size / math.sqrt(2))
    return tail if t >= 0 else 1 - tail


def of_the_largest(tail: float, count: int) -> float:
    """Probability that the largest of ``count`` is beyond what one is with probability ``tail``."""
    if tail >= 1:
        return 1.0
    return -math.expm1(count * math.log1p(-tail))


def binomial_tail(hits: int, tries: int, chance: float) -> float:
    """Probability of ``hits`` or more."""
    if hits <= 0:
        return 1.0
    total = 0.0
    for k in range(hits, tries + 1):
        log = math.lgamma(tries + 1) - math.lgamma(k + 1) - math.lgamma(tries - k + 1)
        log += k * math.log(chance) + (tries - k) * math.log1p(-chance) if chance < 1 else 0.0
        total += math.exp(log)
    return min(1.0, total)


def residuals(values: Floats, group: Ints) -> Floats:
    """Each value less the median of its group; NaN in a group of fewer than three, where nobody
    differ from the others."""
    left = np.full(len(values), np.nan)
    for number in np.unique(group):
        rows = np.flatnonzero((group == number) & np.isfinite(values))
        if len(rows) >= 3:
            left[rows] = values[rows] - np.median(values[rows])
    return left


def medians_over(values: Floats, axis: int) -> Floats:
    """Median over an axis of a table of what is known; NaN where nothing is."""
    table = values if axis == 1 else values.T
    result = np.full(len(table), np.nan)
    known = np.isfinite(table).any(axis=1) if table.size else np.zeros(len(table), dtype=np.bool_)
    if known.any():
        result[known] = np.nanmedian(table[known], axis=1)
    return result


def means_over(values: Floats, axis: int) -> Floats:
    """Mean likewise."""
    table = values if axis == 1 else values.T
    there = np.isfinite(table)
    count = there.sum(axis=1)
    total = np.where(there, table, 0.0).sum(axis=1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def p_values(left: Floats) -> Floats:
    """For each residual: probability that the largest of as many similar ones is as large.

    Two scales, and the smaller probability of the two, doubled: the median absolute deviation,
    which several outliers do not spoil, and the deviation of all others than the one in
    question (Student's deleted residual), which is sharper where there are few.
    """
    result = np.ones(len(left))
    known = np.flatnonzero(np.isfinite(left))
    count = len(known)
    if count < 4:
        return result
    values = left[known]
    scale = NORMAL_MAD * float(np.median(np.abs(values)))
    robust = min(MAX_DEGREES, max(2.0, MAD_EFFICIENCY * count - 1))
    total, squares = float(values.sum()), float((values**2).sum())
    for place, value in zip(known.tolist(), values.tolist(), strict=True):
        if value <= 0:
            continue
        others = count - 1
        mean = (total - value) / others
        spread = math.sqrt(max(0.0, (squares - value * value) / others - mean * mean))
        spread *= math.sqrt(others / (others - 1)) * math.sqrt(1 + 1 / others)
        best = 1.0
        if scale > 0:
            best = upper_tail(value / scale, robust)
        if spread > 0:
            best = min(best, upper_tail((value - mean) / spread, min(MAX_DEGREES, count - 2)))
        if scale == 0 and spread == 0:
            best = 0.0
        result[place] = min(1.0, 2 * of_the_largest(best, count))
    return result
