"""The gain of a knob, from the steps of runs with and without it, with its interval; and whether it
changed what the program computes.

Steps of one run are not independent, and runs differ from each other. Mean steps of blocks give the
spread within runs, means of whole runs that between them; the larger of the two is used (for means,
since some knobs remove occasional pauses). The interval is that of the logarithm of the ratio, with
Student's t for the runs or blocks there are.

Where runs took turns, or were made one after the other, pairs of them are compared: that takes out
what changed for both. Few pairs say little about how pairs scatter. So pairs of other knobs, made
on the same machine in the same minutes, are added (a pooled variance). Until there are enough, the
ratios of blocks that ran in turn are used."""

import math
from collections.abc import Iterable, Sequence, Sized
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from advisor.compare.statistics import CONFIDENCE_LEVEL, t_quantile
from advisor.core import text as t
from advisor.tune.knob import Safety, TrialResult

BLOCKS_PER_RUN = 6
"""Number of blocks in which the steps of a run are averaged."""
MIN_OWN_PAIRS = 5
"""Number of pairs from which a knob's own scatter is enough."""
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
    """Number of runs with the knob."""


def measure_gain(
    before: Sequence[Sequence[int]],
    after: Sequence[Sequence[int]],
    turns: Sequence[Sequence[float]] = (),
) -> MeasuredGain | None:
    """Measure the gain from step times (ns) by run; ``None``: a side without steps. ``turns``:
    logarithms of ratios, of the blocks of each pair of runs that took turns
    (:func:`block_log_ratios`)."""
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
    """Return the gain of a ratio of mean steps whose logarithm is known to within ``reach``."""
    low, high = 1 - ratio * math.exp(min(reach, 50.0)), 1 - ratio * math.exp(-reach)
    return MeasuredGain(1 - ratio, low, high, before_ns, before_ns * ratio, runs)


def _within(sides: Sequence[Sequence[NDArray[np.float64]]]) -> float:
    """Return half the interval of the logarithm, from blocks of steps around their run's mean."""
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
    """Return half the interval from the means of whole runs, with one scatter for both sides."""
    variance, freedom = _pooled([np.log(item) for item in means])
    return _reach(variance * sum(1 / len(item) for item in means), freedom)


def _scatter(groups: Sequence[Sequence[float]]) -> float:
    """Return half the interval of the mean of all values, each around the mean of its group."""
    variance, freedom = _pooled(groups)
    return _reach(variance / max(1, sum(map(len, groups))), freedom)


def _pooled(groups: Iterable[ArrayLike]) -> tuple[float, int]:
    """Return the variance of values around the mean of their group, and its degrees of freedom."""
    logs = [log for group in groups if len(log := np.asarray(group, dtype=float))]
    freedom = sum(len(log) - 1 for log in logs)
    squares = sum(float(np.square(log - log.mean()).sum()) for log in logs)
    return squares / max(1, freedom), freedom


def block_log_ratios(
    before: Sequence[int], after: Sequence[int], first: Sequence[int], second: Sequence[int]
) -> list[float]:
    """Return logarithms of after over before, of the mean steps (ns) of blocks. ``first`` and
    ``second``: steps of each block."""
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
    """Return logarithms of after over before, of the mean steps of runs that were made in turn."""
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
    """Measure the gain of runs that were made in turn, the first of one side with the first of the
    other. ``others``: ratios of other knobs. ``None``: all of them together are too few."""
    own = log_ratios(before, after)
    if not own:
        return None
    asked = [own] if len(own) >= MIN_OWN_PAIRS else [own, *others]
    variance, freedom = _pooled(asked)
    if freedom < MIN_DEGREES_OF_FREEDOM:
        return None
    reach = _reach(variance / len(own), freedom)
    first = float(np.mean([np.mean(run) for run in before[: len(after)] if len(run)]))
    return _gain(first, math.exp(float(np.mean(own))), reach, len(own))


Numbers = Sequence[float | None]

FIRST_LOSSES = 3
"""Number of losses before rounding errors have grown by training."""
EPSILON = {"float32": 2.0**-23, "float64": 2.0**-52, "bfloat16": 2.0**-7, "float16": 2.0**-10}
SUM_ORDER_ULPS = 256.0
"""Relative difference from another order of sums in the first losses, in ulps: errors of n terms in
another order grow as √n, and 2¹⁶ terms are a row of the largest products."""
GROWN_ULPS = 1000.0
"""Factor on that for all of the losses: training enlarges small differences."""
BAND, NORM_BAND = 0.05, 0.25
"""Change that ``precision`` allows, as a share of the mean loss and of gradient norms. Two runs of
different seeds differ by more."""
MAX_STANDARD_ERRORS = 4.0
"""Standard errors of the mean difference on top, since losses of single steps scatter."""


class LossCheck(NamedTuple):
    """Result of comparing losses."""

    passed: bool
    text: str
    """Summary: ``equal``, ``within 0.3%``, ``differs from step 4``."""
    needs_rerun: bool = False
    """Whether it failed by rounding alone; another run may show whether the knob is the cause."""
    failed: bool = False
    """Whether it failed even if the program does not repeat its own losses."""


def check_losses(
    safety: Safety,
    changes_random_numbers: bool,
    baseline: Sequence[TrialResult],
    tried: Sequence[TrialResult],
) -> LossCheck:
    """Compare the losses of each trial with those of the unchanged program."""
    if not baseline or not baseline[0].losses:
        return LossCheck(True, "no losses seen")
    before = baseline[0]
    steady = all(_equal(before.losses, other.losses) for other in baseline[1:])
    if safety == "exact" and steady and not changes_random_numbers and len(tried) > 1:
        same = [_equal(before.losses, other.losses) and bool(other.losses) for other in tried]
        others = [other for other, equal in zip(tried, same, strict=True) if not equal]
        if any(same) and others and all(_rounded(before, other) for other in others):
            apart = max(_apart(before.losses, other.losses) for other in others)
            text = f"equal in {sum(same)} of {len(tried)} runs, else {apart:.1g} apart"
            return LossCheck(True, text)
    worst: LossCheck | None = None
    for result in tried:
        results = _one(safety, changes_random_numbers, steady, before, result)
        if worst is None or not results.passed:
            worst = results
        if not results.passed:
            break
    return worst or LossCheck(True, "not run")


def _one(
    safety: Safety,
    changes_random_numbers: bool,
    steady: bool,
    before: TrialResult,
    after: TrialResult,
) -> LossCheck:
    a, b = before.losses, after.losses
    if not b:
        return LossCheck(False, "no loss was seen", failed=True)
    bad = next((i for i, value in enumerate(b) if value is None), None)
    if bad is not None and (bad >= len(a) or a[bad] is not None):
        return LossCheck(False, f"not finite from loss {bad + 1} on", failed=True)
    if safety == "learning":
        return LossCheck(True, "not compared: another training")
    if _equal(a, b):
        return LossCheck(True, "equal")
    first = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y) + 1
    if safety == "exact" and steady and not changes_random_numbers:
        text = f"differs from loss {first} on, and must not"
        return LossCheck(False, text, needs_rerun=_rounded(before, after))
    if safety == "precision" or changes_random_numbers or (safety == "exact" and not steady):
        result = _in_band(before, after)
        if safety != "precision" and result.passed:
            why = "other random numbers" if steady else "as its own runs"
            return LossCheck(True, f"{result.text} ({why})")
        return result
    unit = EPSILON.get(before.loss_dtype, EPSILON["float32"])
    early = _apart(a[:FIRST_LOSSES], b[:FIRST_LOSSES])
    if early > SUM_ORDER_ULPS * unit:
        return LossCheck(
            False, f"{early:.2g} apart in the first losses, above {SUM_ORDER_ULPS * unit:.2g}"
        )
    whole = _apart(a, b)
    if whole > SUM_ORDER_ULPS * GROWN_ULPS * unit:
        result = _in_band(before, after)
        return (
            result
            if not result.passed
            else LossCheck(True, f"{early:.1g} apart, then {result.text}")
        )
    return LossCheck(True, f"{whole:.1g} apart")


def _rounded(before: TrialResult, after: TrialResult) -> bool:
    """Return whether another order of the same sums makes as large a difference."""
    a, b = before.losses, after.losses
    if not b or any(value is None for value in b):
        return False
    unit = EPSILON.get(before.loss_dtype, EPSILON["float32"])
    return (
        _apart(a[:FIRST_LOSSES], b[:FIRST_LOSSES]) <= SUM_ORDER_ULPS * unit
        and _apart(a, b) <= SUM_ORDER_ULPS * GROWN_ULPS * unit
    )


def _equal(a: Numbers, b: Numbers) -> bool:
    """Return whether the losses are equal, as far as both go."""
    return all(x == y for x, y in zip(a, b, strict=False))


def _pairs(a: Numbers, b: Numbers) -> list[tuple[float, float]]:
    return [(x, y) for x, y in zip(a, b, strict=False) if x is not None and y is not None]


def _apart(a: Numbers, b: Numbers) -> float:
    """Return the largest difference, relative to the larger of a loss and the mean of all."""
    pairs = _pairs(a, b)
    if not pairs:
        return math.inf
    mean = sum(abs(x) for x, _ in pairs) / len(pairs)
    return max(abs(x - y) / (max(abs(x), mean) or 1.0) for x, y in pairs)


def _in_band(before: TrialResult, after: TrialResult) -> LossCheck:
    pairs = _pairs(before.losses, after.losses)
    if not pairs:
        return LossCheck(False, "no loss to compare")
    count = len(pairs)
    scale = sum(abs(x) for x, _ in pairs) / count or 1.0
    gaps = [y - x for x, y in pairs]
    mean = sum(gaps) / count
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / max(1, count - 1) / count)
    allowed = BAND + MAX_STANDARD_ERRORS * spread / scale
    share = abs(mean) / scale
    if share > allowed:
        return LossCheck(
            False, f"loss {t.format_share_change(mean / scale)} over {count}, above {allowed:.1%}"
        )
    norms = [(x, y) for x, y in _pairs(before.norms, after.norms) if x > 0]
    if norms:
        factor = math.exp(sum(math.log(max(y, 1e-30) / x) for x, y in norms) / len(norms))
        if not 1 / (1 + NORM_BAND) <= factor <= 1 + NORM_BAND:
            return LossCheck(False, f"gradient norms ×{factor:.2g}")
    return LossCheck(True, f"loss {t.format_share_change(mean / scale)} over {count}")
