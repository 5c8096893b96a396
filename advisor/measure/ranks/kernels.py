"""More compute on some ranks: is the device slower, or is there more work?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from advisor.measure.device.families import MATRIX
from advisor.measure.ranks.summary import Summary

MIN_INSTANCES = 20
"""Fewer instances on a rank do not make a median to compare by."""
MIN_KERNELS = 5
"""Fewer do not tell a device from its inputs."""
MIN_SLOWER_SHARE = 0.7
"""Share of compute time that must be slower for the device to be: what has more work has it in some
kernels."""
MIN_FAMILY_SHARE = 0.05
"""Of compute, from which a family of kernels tells something."""
MIN_COMPARED_SHARE = 0.3
"""Share of compute time in kernels that both ran, to compare them."""


class Speed(NamedTuple):
    """How some ranks run what others run too."""

    slower: bool
    """The device is slower; else there is more work."""
    ratio: float
    """How many times as long half of the compared time takes at least."""
    kernels: list[str]
    """Names of the kernels with enough instances, the longest first."""


def compare_devices(slow: Sequence[Summary], others: Sequence[Summary]) -> Speed | None:
    """Whether ranks with more compute have a slower device or more work; ``None``: not known.

    A slower device is slower at all matrix work: where some of it (attention) takes as long as on
    the others while other such work (matrix products) takes longer, there is more of the latter.
    Of one kind of matrix work alone nothing can be said by that; then nearly all compute must be
    longer. "Longer" is by at least half of what compute as a whole is. Kernels are compared by name
    and launch size, families where these are not recorded.
    """
    compute = _mean([s.time.get("compute", 0.0) for s in slow])
    usual = _median([s.time.get("compute", 0.0) for s in others])
    if usual <= 0 or compute <= usual:
        return None
    limit = 1 + 0.5 * (compute / usual - 1)
    families = _families(slow, others)
    kernels = _kernels(slow, others)
    names = [name for name, _, _, count in kernels if count >= MIN_INSTANCES]
    compared = [(weight, ratio) for _, weight, ratio, _ in kernels]
    if sum(weight for weight, _ in compared) < MIN_COMPARED_SHARE * usual:
        compared, names = [(weight, ratio) for _, weight, ratio in families], []
    total = sum(weight for weight, _ in compared)
    if total <= 0:
        return None
    weights, ratios = np.array(compared).T
    order = np.argsort(ratios)
    middle = float(ratios[order][int(np.searchsorted(np.cumsum(weights[order]), total / 2))])
    least = MIN_FAMILY_SHARE * usual
    matrix = [ratio for name, weight, ratio in families if name in MATRIX and weight > least]
    if len(matrix) > 1:
        return Speed(min(matrix) >= limit, middle, names)
    slower = float(weights[ratios >= limit].sum())
    return Speed(slower >= MIN_SLOWER_SHARE * total, middle, names)


def _kernels(
    slow: Sequence[Summary], others: Sequence[Summary]
) -> list[tuple[str, float, float, int]]:
    """(name, usual ns per step, how many times as long here, instances), the longest first."""
    result = []
    names = set.union(*(set(s.kernels) for s in slow)) if slow else set()
    for name in sorted(names):
        own = [s.kernels[name] for s in slow if name in s.kernels]
        theirs = [s.kernels[name] for s in others if name in s.kernels]
        if 2 * len(theirs) < len(others) or 2 * len(own) < len(slow):
            continue
        usual = _median([kernel.median_ns for kernel in theirs])
        if usual > 0:
            weight = _median([kernel.total_ns for kernel in theirs])
            ratio = _median([kernel.median_ns for kernel in own]) / usual
            instances = min(kernel.count for kernel in (*own, *theirs))
            result.append((name, weight, ratio, instances))
    return sorted(result, key=lambda item: (-item[1], item[0]))


def _families(slow: Sequence[Summary], others: Sequence[Summary]) -> list[tuple[str, float, float]]:
    """(name, usual ns per step, how many times as long on the slow ones)."""
    result = []
    for name in sorted(set[str]().union(*(s.families for s in others))):
        if name in ("communication", "copy", "memset"):
            continue
        usual = _median([s.families.get(name, 0.0) for s in others])
        if usual > 0:
            own = _median([s.families.get(name, 0.0) for s in slow])
            result.append((name, usual, own / usual))
    return result


def longer_families(slow: Sequence[Summary], others: Sequence[Summary]) -> list[tuple[str, float]]:
    """Families of kernels by how much longer they take on the ``slow`` ranks, ns per step; the most
    first, only those that hold a fifth of the difference."""
    more = {}
    for name in sorted(set.union(set(), *(set(s.families) for s in slow))):
        if name != "communication":
            usual = _median([s.families.get(name, 0.0) for s in others])
            more[name] = _median([s.families.get(name, 0.0) for s in slow]) - usual
    whole = sum(value for value in more.values() if value > 0)
    notable = [(name, value) for name, value in more.items() if value > 0.2 * whole > 0]
    return sorted(notable, key=lambda item: -item[1])[:3]


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def _median(values: Sequence[float]) -> float:
    return float(np.median(values)) if len(values) else 0.0
