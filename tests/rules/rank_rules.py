"""Rules across ranks, run on analyses that are here."""

from __future__ import annotations

from advisor.advise.rule_runner import RankFindings, rank_rules
from advisor.core.rule import Rule
from advisor.measure import Analysis
from advisor.measure.ranks.rank_summary import summarize_rank
from advisor.replay.estimators import estimator_for
from advisor.replay.ranks.estimator import RanksEstimator
from advisor.replay.ranks.study import Study, study_ranks


def study_of(ranks: dict[int, Analysis]) -> Study:
    """The study that rules of ranks read."""
    study = study_ranks([summarize_rank(a, number, []) for number, a in ranks.items()])
    assert study is not None
    return study


def estimated_findings(ranks: dict[int, Analysis], rules: list[Rule]) -> RankFindings:
    """Findings of rules, estimated as in a report of the first rank."""
    main, a = next(iter(ranks.items()))
    study, rank_estimator = study_of(ranks), estimator_for(a)
    estimator = (
        rank_estimator if study.replay.reason else RanksEstimator(rank_estimator, study, main, [])
    )
    return rank_rules(study, main, a, rules, estimator)
