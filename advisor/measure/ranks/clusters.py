"""Groups of ranks that spend their time in a similar way, named by what differs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from advisor.core.intervals import Floats, Ints
from advisor.core.ranks import RankCluster, format_ranks
from advisor.measure.ranks.summary import Summary

MAX_CLUSTERS = 8
MAX_DISTANCE = 0.1
"""Of the step: ranks whose times differ by less, over all classes together, are similar."""
FAMILIES = 6
LABELS = {
    "compute": "compute",
    "copies": "copies",
    "input": "waiting for input",
    "host": "host time",
    "communication": "transfers",
    "waiting": "waiting for others",
}


def find_clusters(
    summaries: Sequence[Summary], values: Floats, classes: Sequence[str], stage: Ints
) -> list[RankCluster]:
    """At most LIMIT groups, the largest first. ``values``: ns per step, ranks x ``classes``; ranks
    of two stages of a pipeline are in two groups where their times differ at all."""
    known = np.flatnonzero(np.isfinite(values).all(axis=1))
    if not len(known):
        return []
    step = np.array([summary.step_ns for summary in summaries])
    scale = float(np.median(step[known])) or 1.0
    features = np.hstack([values, _families(summaries)])[known] / scale
    label = _clusters(features, MAX_DISTANCE)
    groups = [known[label == number] for number in range(int(label.max()) + 1)]
    groups.sort(key=lambda places: (-len(places), int(places[0])))
    middle = np.median(values[known], axis=0)
    several = len(np.unique(stage)) > 1
    result = []
    for places in groups:
        own = np.median(values[places], axis=0)
        result.append(
            RankCluster(
                name=_name(own - middle, classes, scale, len(groups), stage[places], several),
                ranks=format_ranks([summaries[place].rank for place in places.tolist()]),
                count=len(places),
                step_ns=float(np.median(step[places])),
                time=dict(zip(classes, own.tolist(), strict=True)),
            )
        )
    return result


def _families(summaries: Sequence[Summary]) -> Floats:
    """ns per step of the families of kernels that take most time, ranks x families."""
    total: dict[str, float] = {}
    for summary in summaries:
        for name, ns in summary.families.items():
            if name != "communication":
                total[name] = total.get(name, 0.0) + ns
    names = sorted(total, key=lambda name: -total[name])[:FAMILIES]
    table = [[summary.families.get(name, 0.0) for name in names] for summary in summaries]
    return np.array(table, dtype=np.float64).reshape(len(summaries), len(names))


def _clusters(features: Floats, near: float) -> Ints:
    """Number of each row's group. Each joins the first leader that is near; the nearest two groups
    become one until there are few."""
    leaders: list[int] = []
    label = np.full(len(features), -1, dtype=np.int64)
    # from the middle outwards, so that leaders are not outliers
    order = np.argsort(np.abs(features - np.median(features, axis=0)).sum(axis=1), kind="stable")
    left = order
    while len(left):  # a leader a round, and as many as there are kinds of ranks
        leader = int(left[0])
        if len(leaders) >= 64:
            label[left] = _nearest(features[left], features[leaders])
            break
        close = np.abs(features[left] - features[leader]).sum(axis=1) <= near
        label[left[close]] = len(leaders)
        leaders.append(leader)
        left = left[~close]
    middles = [np.median(features[label == n], axis=0) for n in range(len(leaders))]
    sizes = [int((label == n).sum()) for n in range(len(leaders))]
    alive = list(range(len(leaders)))
    while len(alive) > MAX_CLUSTERS:
        pairs = [
            (float(np.abs(middles[a] - middles[b]).sum()) * min(sizes[a], sizes[b]), a, b)
            for place, a in enumerate(alive)
            for b in alive[place + 1 :]
        ]
        _, a, b = min(pairs)
        label[label == b] = a
        middles[a] = np.median(features[label == a], axis=0)
        sizes[a] += sizes[b]
        alive.remove(b)
    return np.searchsorted(np.array(alive), label).astype(np.int64)


def _nearest(rows: Floats, leaders: Floats) -> Ints:
    distance = np.stack([np.abs(rows - leader).sum(axis=1) for leader in leaders])
    return np.asarray(distance.argmin(axis=0), dtype=np.int64)


def _name(
    more: Floats, classes: Sequence[str], scale: float, groups: int, stage: Ints, several: bool
) -> str:
    parts = []
    if several and len(np.unique(stage)) == 1:
        parts.append(f"stage {int(stage[0])}")
    if groups == 1:
        return parts[0] if parts else "all similar"
    order = np.argsort(-np.abs(more), kind="stable")
    for place in order[:2].tolist():
        if abs(more[place]) >= 0.02 * scale:
            word = LABELS.get(classes[place], classes[place])
            parts.append(f"{'more' if more[place] > 0 else 'less'} {word}")
    return ", ".join(parts) or "like the middle of all"
