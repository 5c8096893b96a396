"""Findings, prices and measurements put together: the Report."""

from __future__ import annotations

from typing import TYPE_CHECKING

import advisor
from advisor.advise.arbitration import rank
from advisor.advise.execution import RankResult, rank_rules
from advisor.advise.headline import bound_loading, carry_over, crashes, step_time
from advisor.advise.hot_lines import explain, hot_lines
from advisor.advise.limits import limits
from advisor.advise.measure import inputs, measure
from advisor.advise.memory import memory_views
from advisor.advise.rank_table import ranks_view
from advisor.advise.recorded import recorded_view, step_durations
from advisor.advise.resources import energy_use
from advisor.advise.verdict import verdict
from advisor.advise.views import drawn
from advisor.advise.words import limit_worded
from advisor.advise.worth import MIN_GAIN_SHARE, WARNING_SHARE, may_be_nothing, worthless
from advisor.core.report import Report, RuleText

if TYPE_CHECKING:
    from advisor.advise.pricing import Pricer
    from advisor.core.finding import Finding, Rule, SkippedCheck
    from advisor.core.trace import Run
    from advisor.measure import Analysis


def assemble(
    run: Run,
    analyses: dict[int, Analysis],
    results: dict[int, RankResult],
    rules: list[Rule],
    pricing: Pricer,
) -> Report:
    """The Report of the first rank, with what was found on the others and across them."""
    main = next(iter(analyses))
    a, result = analyses[main], results[main]
    _other_ranks(result, results, main)
    traced = {number: each for number, each in analyses.items() if not each.record_only}
    if len(traced) > 1:
        across = rank_rules(traced, rules, pricing)
        result.findings += across.findings
        result.good += across.good
        result.not_measured += across.not_measured
    lines, unread = hot_lines(a)
    explain(result.findings, lines, {rule.id for rule in rules if rule.of_python})
    floor = max(MIN_GAIN_SHARE * a.step_ns, pricing.error)
    ranked, notes, risks = [], [], []
    for finding in result.findings:
        currency = "unpriced" if finding.impact is None else finding.impact.currency
        gain = None if finding.impact is None else finding.impact.gain_ns
        if finding.informational and currency == "step_time" and gain is not None and gain < floor:
            notes += worthless([finding], pricing, a, WARNING_SHARE * a.step_ns)
            continue
        if finding.informational or currency == "unpriced" or may_be_nothing(finding, floor):
            notes.append(finding)
        elif currency != "step_time":
            risks.append(finding)
        else:
            ranked.append(finding)
    findings = rank(ranked, pricing, floor)
    chosen = {id(finding) for finding in findings}
    left = [finding for finding in ranked if id(finding) not in chosen]
    notes += worthless(left, pricing, a, floor)
    _as_gains_of_the_run([*findings, *notes], analyses, rules)
    report = Report(
        version=advisor.__version__,
        status="limited",
        verdict="",
        inputs=inputs(run, analyses),
        findings=findings,
        notes=notes,
        risks=sorted(risks, key=lambda f: -f.confidence),
        good=result.good,
        not_checked=_merged(result.not_measured),
        limits=[
            *(limit_worded(line, a.trace.meta) for line in limits(a, run)),
            *_why_bounds(pricing, findings),
            *unread,
        ],
        ranks=ranks_view(analyses),
        replay=pricing.view(_shown(findings)),
        step=step_time(a),
        step_durations=step_durations(a),
        crashes=crashes(run),
        recorded=recorded_view(a),
        energy=energy_use(analyses),
        hot_lines=lines,
        rules=_texts(rules, [*findings, *risks, *notes]),
        memory=memory_views(a),
        **measure(a),
    )
    if report.ranks is not None and pricing.ranks:
        names = ", ".join(map(str, sorted(pricing.ranks)))
        report.ranks.note += f" Gains are of ranks {names} replayed together."
    report.status, report.verdict = verdict(report, a)
    report.views = drawn(report)
    return report


def _shown(findings: list[Finding]) -> list[Finding]:
    """Those of the analysed rank that are shown with a rank of their own: the advice to follow."""
    return [f for f in findings if f.rank is not None and not f.other_rank]


def _texts(rules: list[Rule], findings: list[Finding]) -> list[RuleText]:
    """What the rules of these findings say of themselves, by id."""
    spoke = {finding.rule for finding in findings}
    return [
        RuleText(
            id=rule.id, title=rule.title, category=str(rule.category), paragraphs=rule.paragraphs()
        )
        for rule in rules
        if rule.id in spoke
    ]


def _as_gains_of_the_run(
    findings: list[Finding], analyses: dict[int, Analysis], rules: list[Rule]
) -> None:
    """Gains that were found in a window become gains of the run's own step. What a rule worked out
    from the record is that already."""
    of_record = {rule.id for rule in rules if rule.reads_record}
    steps = {number: step_time(a) for number, a in analyses.items()}
    main = next(iter(analyses))
    for finding in findings:
        if finding.edits or finding.rule not in of_record:
            own = finding.trace_rank if finding.other_rank else None
            number = main if own is None else own
            carry_over(finding, steps[number], device=analyses[number].device_id is not None)
            bound_loading(finding, analyses[number])


def _why_bounds(pricing: Pricer, findings: list[Finding]) -> list[str]:
    """Why gains are upper bounds, where they are."""
    if not findings or not pricing.reason:
        return []
    return [f"Gains are upper bounds, not replayed: {pricing.reason}."]


def _other_ranks(result: RankResult, results: dict[int, RankResult], main: int) -> None:
    """Findings of other ranks: counted beside the same one of the main rank, added when new."""
    own = {finding.rule: finding for finding in result.findings}
    seen: dict[str, set[int]] = {rule: {main} for rule in own}
    for number, other in results.items():
        for finding in other.findings if number != main else ():
            if finding.rule not in own:
                own[finding.rule] = finding
                finding.other_rank = True
                result.findings.append(finding)
            seen.setdefault(finding.rule, set()).add(number)
    for rule, numbers in seen.items() if len(results) > 1 else ():
        own[rule].confidence_notes.append(f"seen on {len(numbers)} of {len(results)} ranks")


def _merged(items: list[SkippedCheck]) -> list[SkippedCheck]:
    """The same abstention of several rules becomes one."""
    merged: dict[tuple[str, str], SkippedCheck] = {}
    for item in items:
        key = (item.why, item.record)
        if key in merged:
            what = merged[key].what
            if item.what not in what:
                merged[key].what = f"{what}; {item.what}"
            merged[key].rule += f", {item.rule}" if item.rule not in merged[key].rule else ""
        else:
            merged[key] = item
    return list(merged.values())
