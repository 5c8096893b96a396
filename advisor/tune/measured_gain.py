"""Gain of a knob with its interval, from the steps of runs with and without it, and whether the
knob changed the results of the program.

Steps of one run are not independent, and runs differ from each other. Mean steps of blocks give the
spread within runs, means of whole runs the spread between runs. The larger of the two is used (for
means, since some knobs remove occasional pauses). The interval is for the logarithm of the ratio,
with Student's t for the number of runs or blocks.

Runs that took turns, or ran one after the other, are compared in pairs: this removes what changed
for both. A few pairs do not show how pairs scatter. So pairs of other knobs, from the same machine
and the same minutes, are added (a pooled variance). Until there are enough pairs, the ratios of
blocks that ran in turn are used."""

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
"""Minimum number of pairs for which a knob's own scatter is enough."""
MIN_DEGREES_OF_FREEDOM = 3
"""Minimum degrees of freedom to use pairs."""


class MeasuredGain(NamedTuple):
    """Saved share of the step with its interval, and the mean steps, ns."""

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
    """Measure the gain from step times (ns) by run, or ``None`` if a side has no steps. ``turns``:
    logarithms of the ratios of blocks, for each pair of runs that took turns
    (:func:`block_log_ratios`)."""
    sides = [[np.asarray(run, dtype=float) for run in side if len(run)] for side in (before, after)]
    if not all(sides):
        return None
    means = [np.array([run.mean() for run in side]) for side in sides]
    a, b = (float(mean.mean()) for mean in means)
    pairs = log_ratios(before, after)
    if turns:  # from the runs side by side, not from all runs
        b = a * math.exp(float(np.mean(pairs)))
    half = max(_spread_of_groups(turns), _spread_of_groups([pairs])) if turns else 0.0
    half = half or max(_spread_within_runs(sides), _spread_between_runs(means))
    return _build_gain(a, b / a, half, len(sides[1]))


def _build_gain(before_ns: float, ratio: float, half: float, runs: int) -> MeasuredGain:
    """Return the gain of a ratio of mean steps whose logarithm is known to within ``half``."""
    low, high = 1 - ratio * math.exp(min(half, 50.0)), 1 - ratio * math.exp(-half)
    return MeasuredGain(1 - ratio, low, high, before_ns, before_ns * ratio, runs)


def _spread_within_runs(sides: Sequence[Sequence[NDArray[np.float64]]]) -> float:
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
        count, run_freedom = sum(map(len, logs)), sum(len(item) - 1 for item in logs)
        if run_freedom:
            variance += sum(float(np.square(item).sum()) for item in logs) / run_freedom / count
            freedom += run_freedom
    return _half_width(variance, freedom)


def _spread_between_runs(means: Sequence[NDArray[np.float64]]) -> float:
    """Return half the interval from the means of whole runs, with one scatter for both sides."""
    variance, freedom = _pool_variance([np.log(item) for item in means])
    return _half_width(variance * sum(1 / len(item) for item in means), freedom)


def _spread_of_groups(groups: Sequence[Sequence[float]]) -> float:
    """Return half the interval of the mean of all values, each around the mean of its group."""
    variance, freedom = _pool_variance(groups)
    return _half_width(variance / max(1, sum(map(len, groups))), freedom)


def _pool_variance(groups: Iterable[ArrayLike]) -> tuple[float, int]:
    """Return the variance of values around the mean of their group, and its degrees of freedom."""
    logs = [log for group in groups if len(log := np.asarray(group, dtype=float))]
    freedom = sum(len(log) - 1 for log in logs)
    squares = sum(float(np.square(log - log.mean()).sum()) for log in logs)
    return squares / max(1, freedom), freedom


def block_log_ratios(
    before: Sequence[int], after: Sequence[int], first: Sequence[int], second: Sequence[int]
) -> list[float]:
    """Return logarithms of after over before, of the mean steps (ns) of blocks. ``first`` and
    ``second``: number of steps in each block."""
    sides = [
        np.split(np.asarray(steps, dtype=float), np.cumsum(blocks)[:-1])
        for steps, blocks in ((before, first), (after, second))
        if len(blocks)
    ]
    if len(sides) < 2:
        return []
    return log_ratios(*sides)


def _half_width(variance: float, freedom: int) -> float:
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
    other. ``others``: ratios of other knobs. ``None`` if all of them together are too few."""
    ratios = log_ratios(before, after)
    if not ratios:
        return None
    groups = [ratios] if len(ratios) >= MIN_OWN_PAIRS else [ratios, *others]
    variance, freedom = _pool_variance(groups)
    if freedom < MIN_DEGREES_OF_FREEDOM:
        return None
    half = _half_width(variance / len(ratios), freedom)
    before_ns = float(np.mean([np.mean(run) for run in before[: len(after)] if len(run)]))
    return _build_gain(before_ns, math.exp(float(np.mean(ratios))), half, len(ratios))


Numbers = Sequence[float | None]

FIRST_LOSSES = 3
"""Number of first losses, in which training has not yet enlarged rounding errors."""
EPSILONS = {"float32": 2.0**-23, "float64": 2.0**-52, "bfloat16": 2.0**-7, "float16": 2.0**-10}
SUM_ORDER_ULPS = 256.0
"""Relative difference from another order of sums in the first losses, in ulps: errors of n terms in
another order grow as √n, and 2¹⁶ terms are a row of the largest products."""
GROWN_ULPS = 1000.0
"""Factor on ``SUM_ORDER_ULPS`` for all losses: training enlarges small differences."""
MAX_LOSS_DIFFERENCE, MAX_NORM_DIFFERENCE = 0.05, 0.25
"""Change that ``precision`` allows, as a share of the mean loss and of gradient norms. Two runs of
different seeds differ by more."""
MAX_STANDARD_ERRORS = 4.0
"""Number of standard errors added to the range, since losses of single steps scatter."""


class LossCheck(NamedTuple):
    """Result of comparing losses."""

    passed: bool
    text: str
    """Summary: ``equal``, ``within 0.3%``, ``differs from step 4``."""
    needs_rerun: bool = False
    """Whether it failed by rounding alone; another run may show whether the knob is the cause."""
    failed: bool = False
    """Whether it fails even for a program that does not repeat its own losses."""


def check_losses(
    safety: Safety,
    changes_random_numbers: bool,
    baseline: Sequence[TrialResult],
    tried: Sequence[TrialResult],
) -> LossCheck:
    """Compare the losses of each trial with the losses of the unchanged program."""
    if not baseline or not baseline[0].losses:
        return LossCheck(True, "no losses seen")
    before = baseline[0]
    repeats = all(_is_equal(before.losses, other.losses) for other in baseline[1:])
    if safety == "exact" and repeats and not changes_random_numbers and len(tried) > 1:
        equals = [_is_equal(before.losses, other.losses) and bool(other.losses) for other in tried]
        others = [other for other, equal in zip(tried, equals, strict=True) if not equal]
        if any(equals) and others and all(_is_rounding(before, other) for other in others):
            gap = max(_max_gap(before.losses, other.losses) for other in others)
            text = f"equal in {sum(equals)} of {len(tried)} runs, else {gap:.1g} apart"
            return LossCheck(True, text)
    worst: LossCheck | None = None
    for result in tried:
        check = _check_run(safety, changes_random_numbers, repeats, before, result)
        if worst is None or not check.passed:
            worst = check
        if not check.passed:
            break
    return worst or LossCheck(True, "not run")


def _check_run(
    safety: Safety,
    changes_random_numbers: bool,
    repeats: bool,
    before: TrialResult,
    after: TrialResult,
) -> LossCheck:
    a, b = before.losses, after.losses
    if not b:
        return LossCheck(False, "no loss was seen", failed=True)
    bad_index = next((i for i, value in enumerate(b) if value is None), None)
    if bad_index is not None and (bad_index >= len(a) or a[bad_index] is not None):
        return LossCheck(False, f"not finite from loss {bad_index + 1} on", failed=True)
    if safety == "learning":
        return LossCheck(True, "not compared: another training")
    if _is_equal(a, b):
        return LossCheck(True, "equal")
    position = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y) + 1
    if safety == "exact" and repeats and not changes_random_numbers:
        text = f"differs from loss {position} on, and must not"
        return LossCheck(False, text, needs_rerun=_is_rounding(before, after))
    if safety == "precision" or changes_random_numbers or (safety == "exact" and not repeats):
        result = _check_ranges(before, after)
        if safety != "precision" and result.passed:
            reason = "it draws other random numbers" if repeats else "as its own runs differ"
            return LossCheck(True, f"{result.text}; {reason}")
        return result
    epsilon = EPSILONS.get(before.loss_dtype, EPSILONS["float32"])
    early = _max_gap(a[:FIRST_LOSSES], b[:FIRST_LOSSES])
    if early > SUM_ORDER_ULPS * epsilon:
        return LossCheck(
            False, f"{early:.2g} apart in the first losses, above {SUM_ORDER_ULPS * epsilon:.2g}"
        )
    gap = _max_gap(a, b)
    if gap > SUM_ORDER_ULPS * GROWN_ULPS * epsilon:
        result = _check_ranges(before, after)
        return (
            result
            if not result.passed
            else LossCheck(True, f"{early:.1g} apart, then {result.text}")
        )
    return LossCheck(True, f"{gap:.1g} apart")


def _is_rounding(before: TrialResult, after: TrialResult) -> bool:
    """Return whether another order of the same sums explains the difference."""
    a, b = before.losses, after.losses
    if not b or any(value is None for value in b):
        return False
    epsilon = EPSILONS.get(before.loss_dtype, EPSILONS["float32"])
    return (
        _max_gap(a[:FIRST_LOSSES], b[:FIRST_LOSSES]) <= SUM_ORDER_ULPS * epsilon
        and _max_gap(a, b) <= SUM_ORDER_ULPS * GROWN_ULPS * epsilon
    )


def _is_equal(a: Numbers, b: Numbers) -> bool:
    """Return whether the losses are equal, up to the end of the shorter list."""
    return all(x == y for x, y in zip(a, b, strict=False))


def _pair_finite(a: Numbers, b: Numbers) -> list[tuple[float, float]]:
    return [(x, y) for x, y in zip(a, b, strict=False) if x is not None and y is not None]


def _max_gap(a: Numbers, b: Numbers) -> float:
    """Return the largest difference, relative to the larger of the loss and the mean loss."""
    pairs = _pair_finite(a, b)
    if not pairs:
        return math.inf
    mean = sum(abs(x) for x, _ in pairs) / len(pairs)
    return max(abs(x - y) / (max(abs(x), mean) or 1.0) for x, y in pairs)


def _check_ranges(before: TrialResult, after: TrialResult) -> LossCheck:
    pairs = _pair_finite(before.losses, after.losses)
    if not pairs:
        return LossCheck(False, "no loss to compare")
    count = len(pairs)
    scale = sum(abs(x) for x, _ in pairs) / count or 1.0
    gaps = [y - x for x, y in pairs]
    mean = sum(gaps) / count
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / max(1, count - 1) / count)
    allowed = MAX_LOSS_DIFFERENCE + MAX_STANDARD_ERRORS * spread / scale
    share = abs(mean) / scale
    text = f"mean loss {t.format_share_change(mean / scale)} over {count} steps"
    if share > allowed:
        return LossCheck(False, f"{text}, above {allowed:.1%}")
    norms = [(x, y) for x, y in _pair_finite(before.norms, after.norms) if x > 0]
    if norms:
        factor = math.exp(sum(math.log(max(y, 1e-30) / x) for x, y in norms) / len(norms))
        if not 1 / (1 + MAX_NORM_DIFFERENCE) <= factor <= 1 + MAX_NORM_DIFFERENCE:
            return LossCheck(False, f"gradient norms ×{factor:.2g}")
    return LossCheck(True, text)
