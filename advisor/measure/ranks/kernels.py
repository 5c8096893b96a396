"""More compute on some ranks: is the device slower, or is there more work?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from advisor.measure.device.families import MATRIX
from advisor.measure.ranks.summary import Summary

ALL_OF_IT = 0.7
"""Share of compute time that must be slower for the device to be: what has more work has it in some
kernels."""
PART = 0.05
"""Of compute, from which a family of kernels tells something."""
COMPARABLE = 0.3
"""Share of compute time in kernels that both ran, to compare them."""


def device_slower(odd: Sequence[Summary], others: Sequence[Summary]) -> tuple[bool, float] | None:
    """(is the device slower, how much longer the middle of its compute takes: 1.2); ``None``: not
    known.

    A slower device is slower at all matrix work: where some of it (attention) takes as long as on
    the others while other such work (matrix products) takes longer, there is more of the latter.
    Of one kind of matrix work alone nothing can be said by that; then nearly all compute must be
    longer. "Longer" is by at least half of what compute as a whole is. Kernels are compared by name
    and launch size, families where these are not recorded.
    """
    compute = _mean([s.time.get("compute", 0.0) for s in odd])
    usual = _median([s.time.get("compute", 0.0) for s in others])
    if usual <= 0 or compute <= usual:
        return None
    limit = 1 + 0.5 * (compute / usual - 1)
    families = _families(odd, others)
    weights, ratios = _kernels(odd, others)
    if sum(weights) < COMPARABLE * usual:
        weights = [weight for _, weight, _ in families]
        ratios = [ratio for _, _, ratio in families]
    total = sum(weights)
    if total <= 0:
        return None
    order = np.argsort(ratios)
    up_to = np.cumsum(np.array(weights)[order])
    middle = float(np.array(ratios)[order][int(np.searchsorted(up_to, total / 2))])
    matrix = [ratio for name, weight, ratio in families if name in MATRIX and weight > PART * usual]
    if len(matrix) > 1:
        return min(matrix) >= limit, middle
    slower = sum(w for w, r in zip(weights, ratios, strict=True) if r >= limit)
    return slower >= ALL_OF_IT * total, middle


def _kernels(odd: Sequence[Summary], others: Sequence[Summary]) -> tuple[list[float], list[float]]:
    weights, ratios = [], []
    names = set.union(*(set(s.kernels) for s in odd)) if odd else set()
    for name in sorted(names):
        mine = [s.kernels[name] for s in odd if name in s.kernels]
        theirs = [s.kernels[name] for s in others if name in s.kernels]
        if 2 * len(theirs) < len(others) or 2 * len(mine) < len(odd):
            continue
        usual = _median([kernel.median_ns for kernel in theirs])
        if usual > 0:
            weights.append(_median([kernel.total_ns for kernel in theirs]))
            ratios.append(_median([kernel.median_ns for kernel in mine]) / usual)
    return weights, ratios


def _families(odd: Sequence[Summary], others: Sequence[Summary]) -> list[tuple[str, float, float]]:
    """(name, usual ns a step, how many times as long on the odd ones)."""
    found = []
    for name in sorted(set[str]().union(*(s.families for s in others))):
        if name in ("communication", "copy", "memset"):
            continue
        usual = _median([s.families.get(name, 0.0) for s in others])
        if usual > 0:
            mine = _median([s.families.get(name, 0.0) for s in odd])
            found.append((name, usual, mine / usual))
    return found


def longer_families(odd: Sequence[Summary], others: Sequence[Summary]) -> list[tuple[str, float]]:
    """Families of kernels by how much longer they take on the ``odd`` ranks, ns a step; the most
    first, only those that hold a fifth of the difference."""
    more = {}
    for name in sorted(set.union(set(), *(set(s.families) for s in odd))):
        if name != "communication":
            usual = _median([s.families.get(name, 0.0) for s in others])
            more[name] = _median([s.families.get(name, 0.0) for s in odd]) - usual
    whole = sum(value for value in more.values() if value > 0)
    told = [(name, value) for name, value in more.items() if value > 0.2 * whole > 0]
    return sorted(told, key=lambda item: -item[1])[:3]


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def _median(values: Sequence[float]) -> float:
    return float(np.median(values)) if len(values) else 0.0
