"""More compute on some ranks: is the device slower, or is there more work?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from advisor.fleet.summary import Summary

ALL_OF_IT = 0.7
"""Share of compute time that must be slower for the device to be: what has more work has it in some
kernels."""
COMPARABLE = 0.3
"""Share of compute time in kernels that both ran, to compare them."""


def slower_share(odd: Sequence[Summary], others: Sequence[Summary]) -> tuple[float, float] | None:
    """(share of the compute time whose kernels are slower on the ``odd`` ranks by at least half of
    what their compute is longer, how much slower the middle one is: 1.2); ``None``: not known.

    Kernels of the same name and launch size; families of kernels where these are not recorded.
    """
    compute = _mean([s.time.get("compute", 0.0) for s in odd])
    usual = _median([s.time.get("compute", 0.0) for s in others])
    if usual <= 0 or compute <= usual:
        return None
    limit = 1 + 0.5 * (compute / usual - 1)
    weights, ratios = _kernels(odd, others)
    if sum(weights) < COMPARABLE * usual:
        weights, ratios = _families(odd, others)
    total = sum(weights)
    if total <= 0:
        return None
    slower = sum(w for w, r in zip(weights, ratios, strict=True) if r >= limit)
    order = np.argsort(ratios)
    up_to = np.cumsum(np.array(weights)[order])
    middle = float(np.array(ratios)[order][int(np.searchsorted(up_to, total / 2))])
    return slower / total, middle


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


def _families(odd: Sequence[Summary], others: Sequence[Summary]) -> tuple[list[float], list[float]]:
    weights, ratios = [], []
    for name in sorted(set.union(set(), *(set(s.families) for s in others))):
        if name in ("communication", "copy", "memset"):
            continue
        usual = _median([s.families.get(name, 0.0) for s in others])
        if usual > 0:
            weights.append(usual)
            ratios.append(_median([s.families.get(name, 0.0) for s in odd]) / usual)
    return weights, ratios


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
