"""What the rules said of single ranks, told once for the job, at what it is worth to the job."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from advisor.advise.impact import CRITICAL_SHARE, WARNING_SHARE
from advisor.measure.ranks.job_report import JobFinding, numbers
from advisor.measure.ranks.summary import Advice, Summary
from advisor.replay.ranks.price import advised
from advisor.replay.ranks.replay import Gain, Replay

LIMIT = 40
PRICED = 12
"""Rules that are replayed, those with the largest gains on their ranks first."""
SEVERITIES = ("critical", "warning", "info")


def merge(
    summaries: Sequence[Summary], replay: Replay, step_ns: float
) -> tuple[list[JobFinding], dict[str, str]]:
    """Findings, those worth most to the job first, and what the rules could not say, with the
    reason most ranks gave."""
    by_rule: dict[str, dict[int, Advice]] = defaultdict(dict)
    for place, summary in enumerate(summaries):
        for advice in summary.findings:
            by_rule[advice.rule].setdefault(place, advice)
    weight = {rule: sum(a.gain_ns or 0.0 for a in own.values()) for rule, own in by_rule.items()}
    found = []
    for number, rule in enumerate(sorted(by_rule, key=lambda rule: (-weight[rule], rule))):
        gain = None
        if not replay.reason and number < PRICED:
            gain = advised(replay, by_rule[rule])
        found.append(_finding(summaries, by_rule[rule], gain, step_ns))
    found.sort(key=lambda f: (-(f.gain_ns or 0.0), SEVERITIES.index(f.severity), -f.count, f.rule))
    return found[:LIMIT], _not_checked(summaries)


def _finding(
    summaries: Sequence[Summary], own: dict[int, Advice], gain: Gain | None, step_ns: float
) -> JobFinding:
    ordered = sorted(own, key=lambda place: own[place].gain_ns or 0.0)
    middle = ordered[len(ordered) // 2]
    advice = own[middle]
    ranks = [summaries[place].rank for place in own]
    summary = advice.summary
    if len(summaries) > 1:
        summary = f"Rank {summaries[middle].rank}, the middle of them: {summary}"
    return JobFinding(
        rule=advice.rule,
        title=advice.title,
        summary=summary,
        fix=advice.fix,
        severity=_severity(advice, gain, step_ns),
        category=advice.category,
        ranks=numbers(ranks),
        count=len(own),
        gain_ns=None if gain is None else gain.gain,
        low_ns=None if gain is None else gain.low,
        high_ns=None if gain is None else gain.high,
        place=Counter(a.place for a in own.values()).most_common(1)[0][0],
        verify=advice.verify,
    )


def _severity(advice: Advice, gain: Gain | None, step_ns: float) -> str:
    """What it is to the job, where that is known: as for one rank, by the share of the step."""
    if gain is None or step_ns <= 0:
        return advice.severity if advice.severity in SEVERITIES else "info"
    share = gain.gain / step_ns
    return (
        "critical" if share >= CRITICAL_SHARE else "warning" if share >= WARNING_SHARE else "info"
    )


def _not_checked(summaries: Sequence[Summary]) -> dict[str, str]:
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    for summary in summaries:
        for rule, reason in summary.not_checked.items():
            reasons[rule][reason] += 1
    found = {}
    for rule, counts in sorted(reasons.items(), key=lambda item: (-item[1].total(), item[0])):
        reason, _ = counts.most_common(1)[0]
        ranks = counts.total()
        found[rule] = reason if ranks == len(summaries) else f"{reason} (on {ranks} ranks)"
    return dict(list(found.items())[:LIMIT])
