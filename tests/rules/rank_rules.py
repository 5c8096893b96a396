"""Rules across ranks, run on analyses that are here."""

from __future__ import annotations

from advisor.advise.rule_runner import RankFindings, rank_rules
from advisor.core.rule import Rule
from advisor.measure import Analysis
from advisor.measure.ranks.rank_summary import summarise_rank
from advisor.replay.estimators import estimator_for
from advisor.replay.ranks.estimator import RanksEstimator
from advisor.replay.ranks.study import Study, study_ranks


def studied(ranks: dict[int, Analysis]) -> Study:
    """What such rules look at."""
    found = study_ranks([summarise_rank(a, number, []) for number, a in ranks.items()])
    assert found is not None
    return found


def compared(ranks: dict[int, Analysis], rules: list[Rule]) -> RankFindings:
    """What they find, estimated as in a report of the first rank."""
    main, a = next(iter(ranks.items()))
    found, own = studied(ranks), estimator_for(a)
    estimator = own if found.replay.reason else RanksEstimator(own, found, main, [])
    return rank_rules(found, main, a, rules, estimator)
