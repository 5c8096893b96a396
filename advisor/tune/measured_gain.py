"""The gain of a knob, from the steps of runs with and without it, and how sure that is.

Steps of one run are not independent, and runs differ from each other. Mean steps of blocks give the
spread within runs, means of whole runs that between them; the larger of the two is believed (for
means, since pauses that come now and then are what some knobs take away). The interval is that of
the logarithm of the ratio, with Student's t for the runs or blocks there are.

Where runs took turns, or were made one after the other, pairs of them are compared: that takes out
what changed for both. Few pairs say little about how pairs scatter, so other knobs' pairs, made on
the same machine in the same minutes, are asked as well (a pooled variance); until there are enough,
the ratios of blocks that were run in turn are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Sized
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from advisor.compare.statistics import CONFIDENCE_LEVEL, t_quantile

BLOCKS_PER_RUN = 6
"""In which the steps of a run are averaged."""
MIN_OWN_PAIRS = 5
"""Pairs from which on a knob's own scatter is enough."""
MIN_DEGREES_OF_FREEDOM = 3
"""Degrees of freedom below which pairs say nothing."""


class MeasuredGain(NamedTuple):
    """Share of the step that is saved, with its interval; and the mean steps, ns."""

    share: float
    low: float
    high: float
    before_ns: float
    after_ns: float
    runs: int
    """With the knob."""

    @property
    def half(self) -> float:
        """Half the width of the interval."""
        return (self.high - self.low) / 2


def measure_gain(
    before: Sequence[Sequence[int]],
    after: Sequence[Sequence[int]],
    turns: Sequence[Sequence[float]] = (),
) -> MeasuredGain | None:
    """Of step times (ns) by run; ``None``: a side without steps. ``turns``: logarithms of ratios,
    of the blocks of each pair of runs that took turns (:func:`by_turns`)."""
    sides = [[np.asarray(run, dtype=float) for run in side if len(run)] for side in (before, after)]
    if not all(sides):
        return None
    means = [np.array([run.mean() for run in side]) for side in sides]
    a, b = (float(mean.mean()) for mean in means)
    pairs = log_ratios(before, after)
    if turns:  # of those that were run side by side, not of all there are
        b = a * math.exp(float(np.mean(pairs)))
    reach = max(_scatter(turns), _scatter([pairs])) if turns else 0.0
    reach = reach or max(_within(sides), _between(means))
    return _gain(a, b / a, reach, len(sides[1]))


def _gain(before_ns: float, ratio: float, reach: float, runs: int) -> MeasuredGain:
    """Of a ratio of mean steps whose logarithm is sure to within ``reach``."""
    low, high = 1 - ratio * math.exp(min(reach, 50.0)), 1 - ratio * math.exp(-reach)
    return MeasuredGain(1 - ratio, low, high, before_ns, before_ns * ratio, runs)


def _within(sides: Sequence[Sequence[NDArray[np.float64]]]) -> float:
    """Half the interval of the logarithm, from blocks of steps around their run's mean."""
    variance, freedom = 0.0, 0
    for runs in sides:
        logs = [
            np.log(
                [
                    block.mean() / run.mean()
                    for block in np.array_split(run, min(BLOCKS_PER_RUN, len(run)))
                ]
            )
            for run in runs
        ]
        count, free = sum(map(len, logs)), sum(len(item) - 1 for item in logs)
        if free:
            variance += sum(float(np.square(item).sum()) for item in logs) / free / count
            freedom += free
    return _reach(variance, freedom)


def _between(means: Sequence[NDArray[np.float64]]) -> float:
    """The same from the means of whole runs, which scatter equally on both sides."""
    logs = [np.log(item) for item in means]
    freedom = sum(len(item) - 1 for item in logs)
    if not freedom:
        return 0.0
    spread = sum(float(np.square(item - item.mean()).sum()) for item in logs) / freedom
    return _reach(spread * sum(1 / len(item) for item in logs), freedom)


def _scatter(groups: Sequence[Sequence[float]]) -> float:
    """Half the interval of the mean of all, each around the mean of its group."""
    logs = [np.asarray(group, dtype=float) for group in groups if len(group)]
    freedom = sum(len(log) - 1 for log in logs)
    if not freedom:
        return 0.0
    squares = sum(float(np.square(log - log.mean()).sum()) for log in logs)
    return _reach(squares / freedom / sum(map(len, logs)), freedom)


def by_turns(
    before: Sequence[int], after: Sequence[int], first: Sequence[int], second: Sequence[int]
) -> list[float]:
    """Logarithms of after over before, of the mean steps (ns) of blocks; ``first`` and ``second``:
    steps of each block."""
    sides = [
        np.split(np.asarray(steps, dtype=float), np.cumsum(blocks)[:-1])
        for steps, blocks in ((before, first), (after, second))
        if len(blocks)
    ]
    if len(sides) < 2:
        return []
    return log_ratios(*sides)


def _reach(variance: float, freedom: int) -> float:
    if not freedom or variance <= 0:
        return 0.0
    return t_quantile(0.5 + CONFIDENCE_LEVEL / 2, freedom) * math.sqrt(variance)


def log_ratios(before: Iterable[Sized], after: Iterable[Sized]) -> list[float]:
    """Logarithms of after over before, of the mean steps of runs that were made in turn."""
    return [
        math.log(float(np.mean(np.asarray(b))) / float(np.mean(np.asarray(a))))
        for a, b in zip(before, after, strict=False)
        if len(a) and len(b)
    ]


def measure_paired_gain(
    before: Sequence[Sequence[int]],
    after: Sequence[Sequence[int]],
    others: Sequence[Sequence[float]] = (),
) -> MeasuredGain | None:
    """The gain of runs that were made in turn, the first of one side with the first of the other.
    ``others``: ratios of other knobs. ``None``: all of them together are too few."""
    own = log_ratios(before, after)
    if not own:
        return None
    asked = [own] if len(own) >= MIN_OWN_PAIRS else [own, *others]
    freedom = sum(len(logs) - 1 for logs in asked if logs)
    if freedom < MIN_DEGREES_OF_FREEDOM:
        return None
    squares = sum(float(np.square(np.array(logs) - np.mean(logs)).sum()) for logs in asked if logs)
    reach = t_quantile(0.5 + CONFIDENCE_LEVEL / 2, freedom) * math.sqrt(
        squares / freedom / len(own)
    )
    first = float(np.mean([np.mean(run) for run in before[: len(after)] if len(run)]))
    return _gain(first, math.exp(float(np.mean(own))), reach, len(own))
