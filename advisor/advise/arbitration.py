"""Which findings to show in which order: greedy marginal gain, folding, alternatives."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from advisor.advise.pricing import Pricer
    from advisor.core.finding import Finding

FOLD_BELOW = 0.25
"""A finding that keeps less than this share of its own gain after those before it is a symptom."""


def rank(findings: list[Finding], pricer: Pricer, floor: float) -> list[Finding]:
    """Order findings by marginal gain x confidence, the largest first.

    Each choice is made as if the findings chosen before were done. What then keeps almost nothing
    is folded under the one that took most of it, and so are alternatives of a chosen finding.
    What is worth nothing alone but at least ``floor`` (ns a step) after others is shown with
    ``pays_after``; what never pays is left out. Folded findings come last, without a rank.
    """
    waiting = list(findings)
    latest = {id(f): _alone(f) for f in waiting}
    chosen: list[Finding] = []
    folded: list[Finding] = []
    while waiting:
        best, gain = _best(waiting, latest, chosen, pricer)
        waiting.remove(best)
        alone = _alone(best)
        rival = next(
            (c for c in chosen if best.alternatives and c.alternatives == best.alternatives), None
        )
        if rival is not None:
            best.folded_under = rival.rule
        elif chosen and gain < FOLD_BELOW * alone:
            best.folded_under = _taker(best, chosen, pricer).rule
        elif gain < floor:
            continue
        if best.folded_under is not None:
            if alone >= floor:
                folded.append(best)
            continue
        if alone < floor and chosen:
            best.pays_after = chosen[-1].rule
        chosen.append(best)
        best.rank = len(chosen)
        best.marginal_gain_ns = round(gain)
    return chosen + folded


def _alone(finding: Finding) -> float:
    impact = finding.impact
    return float(impact.gain_ns or 0) if impact is not None else 0.0


def _best(
    waiting: list[Finding], latest: dict[int, float], chosen: list[Finding], pricer: Pricer
) -> tuple[Finding, float]:
    """The finding with the largest marginal gain x confidence, and that gain.

    Gains mostly shrink as others are done, so each is looked at again only when what it was worth
    last could still win; what was worth nothing is looked at again every time, because a fix may
    begin to pay once another has moved the bottleneck.
    """
    largest = max((abs(g) for g in latest.values()), default=0.0)
    fresh: set[int] = set()
    while True:
        best = max(waiting, key=lambda f: (latest[id(f)] * f.confidence, f.rule))
        hopeless = [f for f in waiting if latest[id(f)] < 0.01 * largest and id(f) not in fresh]
        again = [best] if id(best) not in fresh else hopeless if chosen else []
        if not again:
            return best, latest[id(best)]
        for finding in again:
            latest[id(finding)] = _marginal(finding, chosen, pricer)
            fresh.add(id(finding))


def _marginal(finding: Finding, chosen: list[Finding], pricer: Pricer) -> float:
    if not chosen or not finding.edits or finding.other_rank:
        return _alone(finding)
    return pricer.marginal(finding, [c for c in chosen if not c.other_rank])


def _taker(finding: Finding, chosen: list[Finding], pricer: Pricer) -> Finding:
    """The chosen finding after which this one is worth least; the first of equals."""
    return min(chosen, key=lambda c: _marginal(finding, [c], pricer))
