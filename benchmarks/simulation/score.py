"""A diagnosis held against the truth."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from advisor.measure.ranks.job_report import JobReport, Odd
from benchmarks.simulation.jobs import HEALTHY, Truth

KIND = {
    "slow_device": "compute",
    "slow_host": "host",
    "slow_input": "input",
    "slow_link": "network",
    "moving": "imbalance",
    "expert_imbalance": "imbalance",
    "pipeline_imbalance": "pipeline",
}
"""What ``Odd.kind`` is for each fault."""


class Score(NamedTuple):
    """How right a diagnosis is."""

    kind: bool
    """The first that is blamed is blamed for the right thing; nothing, where all is well."""
    who: bool
    """All that have it are named for it, and no others."""
    beside: int
    """Blamed besides: for another thing, or ranks that have nothing."""
    gain_ns: float | None
    """As predicted; ``None``: not priced."""
    inside: bool | None
    """Whether the true gain lies in the band that was told; ``None``: none was."""
    width: float | None
    """Of that band, over the predicted gain."""
    told: str
    """Who was blamed for what, in short."""

    @property
    def right(self) -> bool:
        """Kind and who."""
        return self.kind and self.who


def judge(report: JobReport, truth: Truth, cut: Collection[int] = ()) -> Score:
    """Hold a report against the truth. Ranks that were not read cannot be named; whether those are
    whose files are ``cut`` off is not asked."""
    told = "; ".join(
        f"{odd.kind}{' moving' if odd.moves else ''} {odd.what} {odd.name} ({odd.ranks})"
        for odd in report.odd[:6]
    )
    if truth.kind == HEALTHY:
        healthy = not report.odd
        return Score(healthy, healthy, len(report.odd), None, None, None, told)
    wanted = KIND[truth.kind]
    hits = [odd for odd in report.odd if odd.kind == wanted and odd.moves == truth.moves]
    kind = bool(report.odd) and report.odd[0] in hits
    read = {row.rank for row in report.rows} - set(cut)
    guilty = set(truth.ranks) & read
    named = set().union(*(_ranks(odd) for odd in hits))
    who = bool(hits) if truth.moves else bool(hits) and named & read == guilty
    beside = [odd for odd in report.odd if odd not in hits]
    first = next((odd for odd in hits if odd.gain_ns is not None), None)
    gain = None if first is None else first.gain_ns
    inside = width = None
    if first is not None and first.low_ns is not None and first.high_ns is not None:
        inside = first.low_ns <= truth.gain_ns <= first.high_ns
        width = (first.high_ns - first.low_ns) / gain if gain else None
    return Score(kind, who, len(beside), gain, inside, width, told)


def _ranks(odd: Odd) -> set[int]:
    """``0-3, 7`` as numbers."""
    found: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", odd.ranks):
        found.update(range(int(first), int(last or first) + 1))
    return found
