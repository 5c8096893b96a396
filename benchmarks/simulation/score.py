"""Compare a diagnosis with the truth."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from advisor.core.ranks import Outlier, Ranks
from benchmarks.simulation.jobs import HEALTHY, FaultTruth

KIND = {
    "slow_device": "compute",
    "slow_host": "host",
    "slow_input": "input",
    "slow_link": "network",
    "moving": "imbalance",
    "expert_imbalance": "imbalance",
    "pipeline_imbalance": "pipeline",
}
"""``Outlier.kind`` of each fault."""


class Score(NamedTuple):
    """The result of comparing a diagnosis with the truth."""

    kind: bool
    """The first that is blamed is blamed for the right thing; nothing, where all is well."""
    who: bool
    """All that have it are named for it, and no others."""
    wrong_blames: int
    """Blamed besides: for another thing, or ranks that have nothing."""
    gain_ns: float | None
    """Predicted gain; ``None``: not estimated."""
    inside: bool | None
    """Whether the true gain lies in the reported range; ``None``: there was none."""
    width: float | None
    """Width of that range, over the predicted gain."""
    reported: str
    """Short text of who was blamed for what."""

    @property
    def right(self) -> bool:
        """Kind and who."""
        return self.kind and self.who


def judge(ranks: Ranks, truth: FaultTruth, cut: Collection[int] = ()) -> Score:
    """Compare what is said of the ranks with the truth. Ranks that were not read cannot be named;
    whether those are whose files are ``cut`` off is not asked."""
    reported = "; ".join(
        f"{each.kind}{' moving' if each.moves else ''} {each.unit} {each.name} ({each.ranks})"
        for each in ranks.outliers[:6]
    )
    if truth.kind == HEALTHY:
        healthy = not ranks.outliers
        return Score(healthy, healthy, len(ranks.outliers), None, None, None, reported)
    wanted = KIND[truth.kind]
    hits = [
        outlier
        for outlier in ranks.outliers
        if outlier.kind == wanted and outlier.moves == truth.moves
    ]
    kind = bool(ranks.outliers) and ranks.outliers[0] in hits
    read = {row.rank for row in ranks.lines} - set(cut)
    guilty = set(truth.ranks) & read
    named = set().union(*(_ranks(outlier) for outlier in hits))
    who = bool(hits) if truth.moves else bool(hits) and named & read == guilty
    wrong_outliers = [outlier for outlier in ranks.outliers if outlier not in hits]
    first = next((outlier for outlier in hits if outlier.gain_ns is not None), None)
    gain = None if first is None else first.gain_ns
    inside = width = None
    if first is not None and first.low_ns is not None and first.high_ns is not None:
        inside = first.low_ns <= truth.gain_ns <= first.high_ns
        width = (first.high_ns - first.low_ns) / gain if gain else None
    return Score(kind, who, len(wrong_outliers), gain, inside, width, reported)


def _ranks(outlier: Outlier) -> set[int]:
    """``0-3, 7`` as numbers."""
    result: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", outlier.ranks):
        result.update(range(int(first), int(last or first) + 1))
    return result
