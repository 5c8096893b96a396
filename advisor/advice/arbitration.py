"""Which findings to show in which order: greedy marginal gain, folding, alternatives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from advisor.advice.pricing import Claim, gain, touched
from advisor.intervals import EMPTY, intersect, join, subtract
from advisor.model import Finding

if TYPE_CHECKING:
    from advisor.analysis import Analysis

FOLD_BELOW = 0.25
"""A finding that keeps less than this share of its own gain after those before it is a symptom."""


@dataclass
class Priced:
    """A finding and the instants its fix would save."""

    finding: Finding
    parts: list[Claim]


def rank(priced: list[Priced], a: Analysis) -> list[Finding]:
    """Order findings by marginal gain x confidence, the largest first.

    After each choice its instants are taken. What keeps almost nothing then is folded under the
    earlier finding that took most of it, and so are alternatives of a chosen finding. Folded
    findings come last, with ``folded_under`` set and no rank.
    """
    waiting = list(priced)
    chosen: list[Priced] = []
    folded: list[Finding] = []
    taken = EMPTY
    while waiting:
        best = max(waiting, key=lambda p: (_marginal(p, taken)[0] * p.finding.confidence,
                                           p.finding.rule))  # fmt: skip
        waiting.remove(best)
        finding = best.finding
        central = _marginal(best, taken)[0]
        alone = gain(best.parts)[0] if best.parts else central
        rival = next(
            (c for c in chosen
             if finding.alternatives and c.finding.alternatives == finding.alternatives),
            None,
        )  # fmt: skip
        if rival is not None:
            finding.folded_under = rival.finding.rule
            folded.append(finding)
            continue
        if best.parts and chosen and central < FOLD_BELOW * alone:
            finding.folded_under = _taker(best, chosen).finding.rule
            folded.append(finding)
            continue
        chosen.append(best)
        finding.rank = len(chosen)
        finding.rank_gain_ns = round(central / a.step_count)
        taken = join(taken, touched(best.parts))
    return [c.finding for c in chosen] + folded


def _marginal(priced: Priced, taken: object) -> tuple[float, float, float]:
    if not priced.parts:  # of another rank: its own gain, as nothing here competes with it
        worth = priced.finding.worth
        value = float(worth.gain_ns or 0) if worth is not None else 0.0
        return value, value, value
    return gain(priced.parts, taken)  # type: ignore[arg-type]


def _taker(priced: Priced, chosen: list[Priced]) -> Priced:
    """The chosen finding that covers most of a finding's instants, in order of choice."""
    left = touched(priced.parts)
    best, most = chosen[0], -1
    for candidate in chosen:
        theirs = touched(candidate.parts)
        common = intersect(left, theirs).total
        if common > most:
            best, most = candidate, common
        left = subtract(left, theirs)
    return best
