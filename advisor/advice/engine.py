"""The engine: runs the rules, prices their edits, arbitrates, ranks, and writes the Report."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from msgspec.structs import replace

import advisor
from advisor.advice.arbitration import rank
from advisor.advice.lines import explain, hot_lines
from advisor.advice.pricing import BoundPricer, Price, Pricer, ReplayPricer, pricer
from advisor.advice.registry import load_rules, read_config
from advisor.advice.summary import (
    inputs,
    limits,
    measure,
    ranks_view,
    recorded_view,
    replay_view,
    strangers,
    verdict,
)
from advisor.analysis import Analysis
from advisor.errors import AdvisorError
from advisor.ingest import ReadOptions, open_run
from advisor.model import Finding, Good, NotMeasured, Outcome, Rule, Worth
from advisor.report.data import Report
from advisor.rundir import RankRecord
from advisor.trace import Run, Trace, blank_trace

MIN_GAIN_SHARE = 0.01
"""Findings worth less than this share of the step are notes: measurement noise between two
profiled runs is of that order."""
CRITICAL_SHARE, WARNING_SHARE = 0.20, 0.05
"""XProf's bands for input (5 and 20 % of the step), used for every cause alike."""


@dataclass(frozen=True)
class Options:
    """What to analyse and how."""

    rank: int | None = None
    window: int | None = None
    steps: tuple[int | None, int | None] | None = None
    rules_folder: Path | None = None
    config: dict[str, dict[str, Any]] | None = None
    """``None``: from the nearest pyproject.toml."""
    read: ReadOptions = field(default_factory=ReadOptions)
    executor: Executor | None = None
    """Where the per-rank stage runs; ``None``: threads of this process."""

    @property
    def which(self) -> int | Literal["first"]:
        """The windows that need to be read."""
        return "first" if self.window is None else self.window


@dataclass
class RankResult:
    """What the per-rank stage found."""

    rank: int
    findings: list[Finding]
    good: list[Good]
    not_measured: list[NotMeasured]
    pricing: Pricer | None = None
    """What priced them; ``None`` when it stayed in another process."""


def analyze(
    source: str | Path | Sequence[str | Path] | Run, options: Options | None = None
) -> Report:
    """Read traces (a path, several, or an opened Run) and say what is slow.

    Raises AdvisorError when there is nothing to analyse.
    """
    return examine(source, options).report


@dataclass(frozen=True)
class Examined:
    """A report with what it was made from, for those who want to measure or price more."""

    run: Run
    report: Report
    analyses: dict[int, Analysis]
    """By rank; the report is of the first."""
    pricing: Pricer
    """Of the first rank."""

    @property
    def main(self) -> Analysis:
        """The rank that the report is of."""
        return next(iter(self.analyses.values()))


def examine(
    source: str | Path | Sequence[str | Path] | Run, options: Options | None = None
) -> Examined:
    """Like :func:`analyze`, keeping the run, the measurements and what priced the findings."""
    options = options or Options()
    config = read_config() if options.config is None else options.config
    rules = load_rules(options.rules_folder, config)
    run = (
        source
        if isinstance(source, Run)
        else open_run(source, options.read, rank=options.rank, window=options.which)
    )
    chosen = _windows(run, options)
    analyses = {
        number: Analysis(run.traces[number, window], options.steps, _record(run, number))
        for number, window in chosen.items()
    }
    analyses |= _untraced(run, analyses)
    for number, a in analyses.items():
        if a.steps.used.is_empty() and a.steps.table.height and not a.record_only:
            raise AdvisorError(
                f"{a.trace.meta.path}: --steps selects none of the {a.steps.table.height} steps "
                f"of rank {number}"
            )
    main = next(iter(analyses))
    traced = {number: a for number, a in analyses.items() if not a.record_only}
    together = len(traced) > 1 and main in traced
    results = _per_rank(analyses, rules, options.executor, later=main if together else None)
    pricing = results[main].pricing
    if pricing is None:
        pricing = pricer(analyses[main], main, traced)
        results[main].pricing = pricing
        for finding in results[main].findings:
            price(finding, analyses[main], pricing)
    report = _report(run, analyses, results, rules, pricing)
    return Examined(run, report, analyses, pricing)


def _record(run: Run, number: int) -> RankRecord | None:
    """What the recorder wrote of a rank."""
    if run.recording is None:
        return None
    return run.recording.ranks.get(max(number, 0))


def _untraced(run: Run, traced: dict[int, Analysis]) -> dict[int, Analysis]:
    """The ranks of which there is a record but no trace: only some ranks were to be profiled, or
    the window was never reached."""
    if run.recording is None:
        return {}
    return {
        number: Analysis(blank_trace(record.folder, number), None, record)
        for number, record in run.recording.ranks.items()
        if number not in traced
    }


def _windows(run: Run, options: Options) -> dict[int, int]:
    """The window to analyse of each rank."""
    chosen = {}
    if not run.traces and run.unread and options.window is not None:
        raise _no_window(run, options.window, run.unread[0][0])
    for number in run.ranks:
        have = sorted(w for r, w in run.traces if r == number)
        if options.window is not None and options.window not in have:
            raise _no_window(run, options.window, number)
        chosen[number] = have[0] if options.window is None else options.window
    return chosen


def _no_window(run: Run, window: int, rank: int) -> AdvisorError:
    have = sorted(w for r, w in (*run.traces, *run.unread) if r == rank)
    return AdvisorError(
        f"{run.path or 'run'}: no window {window} of rank {rank} "
        f"(windows present: {have[0]} to {have[-1]})"
    )


def _per_rank(
    analyses: dict[int, Analysis],
    rules: list[Rule],
    executor: Executor | None,
    later: int | None = None,
) -> dict[int, RankResult]:
    """Run the rules of each rank. ``later``: the rank whose findings wait for their price, because
    it takes the other ranks too."""
    prices = [number != later for number in analyses]
    if len(analyses) == 1:
        return {number: run_rules(number, a, rules) for number, a in analyses.items()}
    if executor is not None:
        done = executor.map(
            _remote,
            list(analyses),
            [a.trace for a in analyses.values()],
            [a.selection for a in analyses.values()],
            [a.record for a in analyses.values()],
            [rules] * len(analyses),
            prices,
        )
        return {result.rank: result for result in done}
    with ThreadPoolExecutor() as threads:
        done = threads.map(
            run_rules, list(analyses), analyses.values(), [rules] * len(analyses), prices
        )
        return {result.rank: result for result in done}


def _remote(
    number: int,
    trace: Trace,
    select: tuple[int | None, int | None] | None,
    record: RankRecord | None,
    rules: list[Rule],
    prices: bool,
) -> RankResult:
    result = run_rules(number, Analysis(trace, select, record), rules, prices)
    result.pricing = None
    return result


def run_rules(number: int, a: Analysis, rules: list[Rule], prices: bool = True) -> RankResult:
    """Run the per-rank rules on one window and, unless told otherwise, price what they find."""
    pricing = pricer(a) if prices else None
    result = RankResult(number, [], [], [], pricing)
    for rule in rules:
        if rule.across_ranks or not _applies(rule, a):
            continue
        outcomes = _contained(rule, rule.check, a)
        _sort_out(rule, outcomes, a, number, result, pricing)
    result.not_measured += _not_run(a, rules)
    return result


def _applies(rule: Rule, a: Analysis) -> bool:
    return a.record is not None if rule.reads_record else not a.record_only


def _not_run(a: Analysis, rules: list[Rule]) -> list[NotMeasured]:
    """One line for all the rules that a trace alone, or a record alone, gives nothing to."""
    if a.record_only:
        return [
            NotMeasured(
                what="everything on the device: idle time, kernels, transfers, syncs",
                why="no window of this rank was profiled",
                record="a window that is reached: fewer steps skipped, or 'advisor window RUN'",
            )
        ]
    missing = [rule.id for rule in rules if rule.reads_record]
    if a.record is not None or not missing:
        return []
    return [
        NotMeasured(
            what="the run around the window: loader settings, threads, pauses, memory over time, "
            "clocks and health of the GPU",
            why=f"{len(missing)} checks read what our recorder writes",
            record="advisor record",
            rule=", ".join(missing),
        )
    ]


def rank_rules(
    ranks: dict[int, Analysis], rules: list[Rule], pricing: Pricer | None = None
) -> RankResult:
    """Run the rules that look across ranks; prices are for the first rank's window."""
    main = next(iter(ranks))
    pricing = pricing or pricer(ranks[main])
    result = RankResult(main, [], [], [], pricing)
    for rule in rules:
        if rule.across_ranks:
            outcomes = _contained(rule, rule.check_run, ranks)
            _sort_out(rule, outcomes, ranks[main], main, result, pricing)
    return result


UNSEEN_SHARE = 0.05
"""Gains from this share of the step up may meet the pace of loader workers that keep up."""
FAILED = "the rule failed"
Subject = TypeVar("Subject", Analysis, dict[int, Analysis])


def _contained(
    rule: Rule, check: Callable[[Subject], Iterable[Outcome]], subject: Subject
) -> list[Outcome]:
    """What a rule yields. A rule may be anybody's code, and one that fails must not take the
    others with it: it counts as not checked, and says so."""
    try:
        return list(check(subject))
    except AdvisorError:
        raise
    except Exception as error:
        why = f"{FAILED} ({type(error).__name__}: {error})"[:300]
        return [NotMeasured(what=rule.title or rule.id, why=why)]


def _sort_out(
    rule: Rule,
    outcomes: list[Outcome],
    a: Analysis,
    number: int,
    result: RankResult,
    pricing: Pricer | None,
) -> None:
    for outcome in outcomes:
        if a.steps.source == "whole trace" and not a.record_only:
            _without_steps(outcome)
        if isinstance(outcome, Finding):
            finding = _complete(outcome, rule, a, number)
            result.findings.append(finding if pricing is None else price(finding, a, pricing))
        elif isinstance(outcome, Good):
            outcome.rule = rule.id
            result.good.append(outcome)
        else:
            outcome.rule = rule.id
            result.not_measured.append(outcome)


_A_STEP = re.compile(r"\b(?:of )?(?:a|the|each) step\b")


def _without_steps(outcome: Outcome) -> None:
    """Rules word their figures a step; where no step is marked they are of the recording."""

    def reworded(text: str) -> str:
        return _A_STEP.sub("of the recording", text)

    if isinstance(outcome, Good):
        outcome.text = reworded(outcome.text)
    elif isinstance(outcome, Finding):
        outcome.summary = reworded(outcome.summary)
        outcome.evidence = [replace(item, label=reworded(item.label)) for item in outcome.evidence]


def _complete(finding: Finding, rule: Rule, a: Analysis, number: int) -> Finding:
    """Fill in what the rule class says of all its findings, and lower the confidence by what the
    window allows."""
    finding.rule = rule.id
    finding.category = rule.category
    finding.validation = rule.validated
    finding.references = list(rule.references)
    finding.informational = finding.informational or rule.validated == "synthetic"
    finding.trace_rank = None if number < 0 else number
    finding.device = a.device_id
    if not a.trace.meta.path.startswith("<") and not rule.reads_record:
        for factor, why in _doubts(a):
            finding.confidence *= factor
            finding.confidence_notes.append(why)
    return finding


def _doubts(a: Analysis) -> list[tuple[float, str]]:
    found = []
    if a.steps.source == "whole trace":
        found.append((0.8, "no steps in the trace: start-up and shut-down may be inside"))
    elif a.step_count < 3:
        found.append((0.85, f"only {a.step_count} step(s) measured"))
    if a.trace.meta.truncated:
        found.append((0.9, "the file is truncated"))
    return found


def price(finding: Finding, a: Analysis, pricing: Pricer) -> Finding:
    """Give a finding its worth: the rule's own (memory, risk), else what its edits save. A rule
    that names a change of one rank may give a worth that stands in where that rank cannot be
    replayed with the others."""
    if finding.worth is not None and finding.worth.currency == "step_time" and finding.edits:
        here = pricing.whatif.ranks if isinstance(pricing, ReplayPricer) else ()
        if all(edit.rank in here for edit in finding.edits):
            finding.worth = None
        else:
            finding.edits = []
    if finding.worth is not None or not finding.edits:
        if finding.worth is None:
            finding.worth = Worth(
                currency="unpriced", reason="the rule names no change of the step's events"
            )
        if finding.worth.currency == "step_time":
            finding.severity = severity(finding.worth.share)
        return finding
    finding.worth = step_worth(pricing.price(finding), pricing.method, a)
    finding.severity = severity(finding.worth.share)
    unseen = isinstance(pricing, ReplayPricer) and pricing.whatif.unseen_loader
    if unseen and (finding.worth.share or 0.0) >= UNSEEN_SHARE:
        finding.confidence *= 0.85
        finding.confidence_notes.append(
            "the loader's workers keep up with these steps; whether they do with shorter ones is "
            "not in the trace"
        )
    return finding


def step_worth(saved: Price, method: str, a: Analysis) -> Worth:
    """Time saved a step, with its share of the step."""
    return Worth(
        currency="step_time",
        gain_ns=round(saved.gain),
        low_ns=round(saved.low),
        high_ns=round(saved.high),
        share=saved.gain / a.step_ns if a.step_ns else None,
        method=method,
    )


def severity(share: float | None) -> Any:
    """critical, warning or info, by the share of the step that the fix is worth."""
    if share is None or share < WARNING_SHARE:
        return "info"
    return "critical" if share >= CRITICAL_SHARE else "warning"


def _report(
    run: Run,
    analyses: dict[int, Analysis],
    results: dict[int, RankResult],
    rules: list[Rule],
    pricing: Pricer,
) -> Report:
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
    explain(result.findings, lines)
    floor = max(MIN_GAIN_SHARE * a.step_ns, pricing.error)
    ranked, notes, risks = [], [], []
    for finding in result.findings:
        currency = "unpriced" if finding.worth is None else finding.worth.currency
        gain = None if finding.worth is None else finding.worth.gain_ns
        if finding.informational and currency == "step_time" and gain is not None and gain < floor:
            continue  # worth nothing, and nobody asked
        if finding.informational or currency == "unpriced":
            notes.append(finding)
        elif currency != "step_time":
            risks.append(finding)
        else:
            ranked.append(finding)
    findings = rank(ranked, pricing, floor)
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
        limits=[*strangers(analyses), *limits(a, run), *_why_bounds(pricing, findings), *unread],
        ranks=ranks_view(analyses),
        replay=replay_view(pricing, findings),
        recorded=recorded_view(run, a),
        hot_lines=lines,
        **measure(a),
    )
    if report.ranks is not None and isinstance(pricing, ReplayPricer) and pricing.whatif.ranks:
        names = ", ".join(map(str, sorted(pricing.whatif.ranks)))
        report.ranks.note += f" Gains are of ranks {names} replayed together."
    report.status, report.verdict = verdict(report, a)
    return report


def _why_bounds(pricing: Pricer, findings: list[Finding]) -> list[str]:
    """Why gains are upper bounds, where they are."""
    if not findings or not isinstance(pricing, BoundPricer) or not pricing.reason:
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


def _merged(items: list[NotMeasured]) -> list[NotMeasured]:
    """The same abstention of several rules becomes one."""
    merged: dict[tuple[str, str], NotMeasured] = {}
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
