"""Whether a knob changed what the program computes, by the knob's class."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from advisor.tune.knob import Safety
from advisor.tune.spec import Result

Numbers = Sequence[float | None]

FIRST_LOSSES = 3
"""Losses before rounding errors have grown by training."""
EPSILON = {"float32": 2.0**-23, "float64": 2.0**-52, "bfloat16": 2.0**-7, "float16": 2.0**-10}
SUM_ORDER_ULPS = 256.0
"""Times the unit of the last place that another order of sums may make in the first losses: errors
of n terms in another order grow as √n, and 2¹⁶ terms are a row of the largest products."""
GROWN_ULPS = 1000.0
"""Times that, in all of the losses: training takes small differences apart."""
BAND, NORM_BAND = 0.05, 0.25
"""Of the mean loss, and of gradient norms: what ``precision`` may change. Two runs of different
seeds differ by more."""
MAX_STANDARD_ERRORS = 4.0
"""Standard errors of the mean difference on top, since losses of single steps scatter."""


class Check(NamedTuple):
    """What came of it."""

    passed: bool
    text: str
    """In some words: ``equal``, ``within 0.3%``, ``differs from step 4``."""
    again: bool = False
    """Not passed by what rounding does: one more run may say whether the knob does it at all."""
    broken: bool = False
    """Not passed, whether or not the program repeats its own losses."""


def check_losses(
    safety: Safety, redraws: bool, baseline: Sequence[Result], tried: Sequence[Result]
) -> Check:
    """Hold the losses of each trial against those of the program as it is."""
    if not baseline or not baseline[0].losses:
        return Check(True, "no losses seen")
    before = baseline[0]
    steady = all(_equal(before.losses, other.losses) for other in baseline[1:])
    if safety == "exact" and steady and not redraws and len(tried) > 1:
        same = [_equal(before.losses, other.losses) and bool(other.losses) for other in tried]
        others = [other for other, equal in zip(tried, same, strict=True) if not equal]
        if any(same) and others and all(_rounded(before, other) for other in others):
            apart = max(_apart(before.losses, other.losses) for other in others)
            text = f"equal in {sum(same)} of {len(tried)} runs, else {apart:.1g} apart"
            return Check(True, text)
    worst: Check | None = None
    for result in tried:
        results = _one(safety, redraws, steady, before, result)
        if worst is None or not results.passed:
            worst = results
        if not results.passed:
            break
    return worst or Check(True, "not run")


def _one(safety: Safety, redraws: bool, steady: bool, before: Result, after: Result) -> Check:
    a, b = before.losses, after.losses
    if not b:
        return Check(False, "no loss was seen", broken=True)
    bad = next((i for i, value in enumerate(b) if value is None), None)
    if bad is not None and (bad >= len(a) or a[bad] is not None):
        return Check(False, f"not finite from loss {bad + 1} on", broken=True)
    if safety == "learning":
        return Check(True, "not compared: another training")
    if _equal(a, b):
        return Check(True, "equal")
    first = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y) + 1
    if safety == "exact" and steady and not redraws:
        text = f"differs from loss {first} on, and must not"
        return Check(False, text, again=_rounded(before, after))
    if safety == "precision" or redraws or (safety == "exact" and not steady):
        result = _in_band(before, after)
        if safety != "precision" and result.passed:
            why = "other random numbers" if steady else "as its own runs"
            return Check(True, f"{result.text} ({why})")
        return result
    unit = EPSILON.get(before.loss_dtype, EPSILON["float32"])
    early = _apart(a[:FIRST_LOSSES], b[:FIRST_LOSSES])
    if early > SUM_ORDER_ULPS * unit:
        return Check(
            False, f"{early:.2g} apart in the first losses, above {SUM_ORDER_ULPS * unit:.2g}"
        )
    whole = _apart(a, b)
    if whole > SUM_ORDER_ULPS * GROWN_ULPS * unit:
        result = _in_band(before, after)
        return (
            result if not result.passed else Check(True, f"{early:.1g} apart, then {result.text}")
        )
    return Check(True, f"{whole:.1g} apart")


def _rounded(before: Result, after: Result) -> bool:
    """Whether another order of the same sums makes as large a difference."""
    a, b = before.losses, after.losses
    if not b or any(value is None for value in b):
        return False
    unit = EPSILON.get(before.loss_dtype, EPSILON["float32"])
    return (
        _apart(a[:FIRST_LOSSES], b[:FIRST_LOSSES]) <= SUM_ORDER_ULPS * unit
        and _apart(a, b) <= SUM_ORDER_ULPS * GROWN_ULPS * unit
    )


def _equal(a: Numbers, b: Numbers) -> bool:
    """As far as both go."""
    return all(x == y for x, y in zip(a, b, strict=False))


def _pairs(a: Numbers, b: Numbers) -> list[tuple[float, float]]:
    """Those that both have, and that are numbers."""
    return [(x, y) for x, y in zip(a, b, strict=False) if x is not None and y is not None]


def _apart(a: Numbers, b: Numbers) -> float:
    """Largest difference, relative to the larger of a loss and the mean of all."""
    pairs = _pairs(a, b)
    if not pairs:
        return math.inf
    mean = sum(abs(x) for x, _ in pairs) / len(pairs)
    return max(abs(x - y) / (max(abs(x), mean) or 1.0) for x, y in pairs)


def _in_band(before: Result, after: Result) -> Check:
    pairs = _pairs(before.losses, after.losses)
    if not pairs:
        return Check(False, "no loss to compare")
    count = len(pairs)
    scale = sum(abs(x) for x, _ in pairs) / count or 1.0
    gaps = [y - x for x, y in pairs]
    mean = sum(gaps) / count
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / max(1, count - 1) / count)
    allowed = BAND + MAX_STANDARD_ERRORS * spread / scale
    share = abs(mean) / scale
    if share > allowed:
        return Check(False, f"loss {mean / scale:+.1%} over {count}, above {allowed:.1%}")
    norms = [(x, y) for x, y in _pairs(before.norms, after.norms) if x > 0]
    if norms:
        factor = math.exp(sum(math.log(max(y, 1e-30) / x) for x, y in norms) / len(norms))
        if not 1 / (1 + NORM_BAND) <= factor <= 1 + NORM_BAND:
            return Check(False, f"gradient norms ×{factor:.2g}")
    return Check(True, f"loss {mean / scale:+.1%} over {count}")
