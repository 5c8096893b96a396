"""Rules across ranks, run on analyses that are here."""

from __future__ import annotations

from advisor.advise.rule_runner import RankFindings, rank_rules
from advisor.core.rule import Rule
from advisor.measure import Analysis
from advisor.measure.ranks.rank_summary import summarize_rank
from advisor.replay.estimators import estimator_for
from advisor.replay.ranks.estimator import RanksEstimator
from advisor.replay.ranks.rank_comparison import RankComparison, compare_ranks


def comparison_of(ranks: dict[int, Analysis]) -> RankComparison:
    """The comparison that rules of ranks read."""
    comparison = compare_ranks([summarize_rank(a, number, []) for number, a in ranks.items()])
    assert comparison is not None
    return comparison


def estimated_findings(ranks: dict[int, Analysis], rules: list[Rule]) -> RankFindings:
    """Findings of rules, estimated as in a report of the first rank."""
    main, a = next(iter(ranks.items()))
    comparison, rank_estimator = comparison_of(ranks), estimator_for(a)
    estimator = (
        rank_estimator
        if comparison.replay.reason
        else RanksEstimator(rank_estimator, comparison, main, [])
    )
    return rank_rules(comparison, main, a, rules, estimator)
