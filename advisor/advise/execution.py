"""Runs the rules: on each rank's window, here or elsewhere, and across ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from advisor.advise.completion import complete
from advisor.advise.holes import holes, without_holes
from advisor.advise.pricing import Pricer, pricer
from advisor.advise.words import advises, left_out, not_recorded, unsuited, worded
from advisor.advise.worth import price
from advisor.core.errors import AdvisorError
from advisor.core.finding import Finding, Outcome, PassedCheck, Rule, SkippedCheck
from advisor.measure import Analysis

if TYPE_CHECKING:
    from advisor.core.run_directory import RankRecord
    from advisor.core.snapshot import MemorySnapshot
    from advisor.core.trace import Trace

FAILED = "the rule failed"
MANY_ROWS = 2_000_000
"""From so many on, ranks are examined one after another: threads share one interpreter and gain a
fifth of this part's time, and what each works with beside the trace is large."""
Subject = TypeVar("Subject", Analysis, dict[int, Analysis])


@dataclass
class RankResult:
    """What the per-rank stage found."""

    rank: int
    findings: list[Finding]
    good: list[PassedCheck]
    not_measured: list[SkippedCheck]
    pricing: Pricer | None
    """What priced them; ``None`` when it stayed in another process."""


def run_ranks(
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
            [a.snapshot for a in analyses.values()],
            [rules] * len(analyses),
            prices,
        )
        return {result.rank: result for result in done}
    rows = sum(a.trace.cpu.height + a.trace.gpu.height for a in analyses.values())
    with ThreadPoolExecutor(1 if rows > MANY_ROWS else None) as threads:
        done = threads.map(
            run_rules, list(analyses), analyses.values(), [rules] * len(analyses), prices
        )
        return {result.rank: result for result in done}


def _remote(
    number: int,
    trace: Trace,
    select: tuple[int | None, int | None] | None,
    record: RankRecord | None,
    snapshot: MemorySnapshot | None,
    rules: list[Rule],
    prices: bool,
) -> RankResult:
    result = run_rules(number, Analysis(trace, select, record, snapshot), rules, prices)
    result.pricing = None
    return result


def run_rules(number: int, a: Analysis, rules: list[Rule], prices: bool = True) -> RankResult:
    """Run the per-rank rules on one window and, unless told otherwise, price what they find."""
    pricing = pricer(a) if prices else None
    result = RankResult(number, [], [], [], pricing)
    unknown = holes(a)
    for rule in rules:
        if rule.across_ranks or not _applies(rule, a) or not advises(rule, a.trace.meta):
            continue
        rule = _for_what_it_is(rule, a)
        before = a.idle_reads
        outcomes = _contained(rule, rule.check, a)
        if unknown and not rule.reads_record:
            outcomes = without_holes(rule, outcomes, unknown, of_idle=a.idle_reads > before)
        _sort_out(rule, outcomes, a, number, result, pricing)
    meta = a.trace.meta
    result.not_measured += [not_recorded(one, meta) for one in _not_run(a, rules)]
    result.not_measured += left_out(rules, meta)
    return result


def _for_what_it_is(rule: Rule, a: Analysis) -> Rule:
    return rule.where_nothing_is_trained() if rule.inference and a.forward_only else rule


def _applies(rule: Rule, a: Analysis) -> bool:
    if rule.reads_snapshot and a.snapshot is not None:
        return True
    return a.record is not None if rule.reads_record else not a.record_only


def _not_run(a: Analysis, rules: list[Rule]) -> list[SkippedCheck]:
    """One line for all the rules that a trace alone, or a record alone, gives nothing to."""
    if a.snapshot_only:
        return [
            SkippedCheck(
                what="time: steps, kernels, copies, syncs, and what any of them is worth",
                why="a memory snapshot tells of memory alone",
                record="a profiler trace, or 'advisor record', and the snapshot with --memory",
            )
        ]
    if a.record_only:
        return [
            SkippedCheck(
                what="everything on the device: idle time, kernels, transfers, syncs",
                why="no window of this rank was profiled",
                record="a window that is reached: fewer steps skipped, or 'advisor window RUN'",
            )
        ]
    missing = [rule.id for rule in rules if rule.reads_record]
    if a.record is not None or not missing:
        return []
    return [
        SkippedCheck(
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
        if rule.across_ranks and advises(rule, ranks[main].trace.meta):
            rule = _for_what_it_is(rule, ranks[main])
            outcomes = _contained(rule, rule.check_run, ranks)
            _sort_out(rule, outcomes, ranks[main], main, result, pricing)
    return result


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
        return [SkippedCheck(what=rule.title or rule.id, why=why)]


def _sort_out(
    rule: Rule,
    outcomes: list[Outcome],
    a: Analysis,
    number: int,
    result: RankResult,
    pricing: Pricer | None,
) -> None:
    for outcome in outcomes:
        if isinstance(outcome, Finding):
            finding = complete(outcome, rule, a, number)
            worded(finding, rule, a.trace.meta)
            if (instead := unsuited(finding, rule, a.trace.meta)) is not None:
                result.not_measured.append(instead)
                continue
            result.findings.append(finding if pricing is None else price(finding, a, pricing))
        elif isinstance(outcome, PassedCheck):
            worded(outcome, rule, a.trace.meta)
            outcome.rule = rule.id
            result.good.append(outcome)
        else:
            worded(outcome, rule, a.trace.meta)
            outcome.rule = rule.id
            result.not_measured.append(outcome)
