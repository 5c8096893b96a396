"""From traces to a Report: select the windows, check them with the rules, estimate and rank what
they find, and write it down."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from msgspec import structs

from advisor.advise.check import (
    Checked,
    combined,
    estimated,
    explain,
    hot_lines,
    rank_rules,
    run_ranks,
)
from advisor.advise.impact import BoundPricer, Pricer, for_run, pricer
from advisor.advise.measured import cost
from advisor.advise.rank import rank
from advisor.advise.select import choose, load_rules, read_config
from advisor.advise.unrelated import apart_report, why_apart
from advisor.advise.write import write_report
from advisor.core.prices import Prices, read_prices
from advisor.core.trace import Run
from advisor.read import ReadOptions, open_run

if TYPE_CHECKING:
    from advisor.core.finding import Rule
    from advisor.core.report import Report
    from advisor.core.trace import Trace
    from advisor.measure import Analysis


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
    prices: Prices | None = None
    """What an hour of a GPU costs; ``None``: from the nearest pyproject.toml."""
    gpus: int | None = None
    """GPUs that are paid for; ``None``: one a rank."""

    @property
    def which(self) -> int | Literal["first"]:
        """The windows that need to be read."""
        return "first" if self.window is None else self.window


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


def analyze(
    source: str | Path | Sequence[str | Path] | Run, options: Options | None = None
) -> Report:
    """Read traces (a path, several, or an opened Run) and say what is slow.

    Raises AdvisorError when there is nothing to analyse.
    """
    return examine(source, options).report


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
    analyses = choose(run, options.window, options.steps)
    main = next(iter(analyses))
    if why := why_apart(run):
        each = [(trace, partial(_alone, trace, options)) for trace in run.traces.values()]
        told = apart_report(run, analyses, why, each)
        return Examined(run, told, analyses, BoundPricer(analyses[main]))
    traced = {number: a for number, a in analyses.items() if not a.record_only}
    with_others = len(traced) > 1 and main in traced
    results = run_ranks(analyses, rules, options.executor, later=main if with_others else None)
    pricing = results[main].pricing or pricer(analyses[main], main, traced)
    if with_others:
        results[main] = estimated(results[main], analyses[main], pricing)
    report = _advise(run, analyses, results, rules, pricing)
    prices = read_prices() if options.prices is None else options.prices
    report = structs.replace(report, cost=cost(run, report, prices, options.gpus))
    return Examined(run, report, analyses, pricing)


def _advise(
    run: Run,
    analyses: dict[int, Analysis],
    results: dict[int, Checked],
    rules: list[Rule],
    pricing: Pricer,
) -> Report:
    """From what the rules found on each rank to the report of the first."""
    main = next(iter(analyses))
    checked = combined(results, main)
    traced = {number: a for number, a in analyses.items() if not a.record_only}
    if len(traced) > 1:
        checked = checked.and_across(rank_rules(traced, rules, pricing))
    hot, problems = hot_lines(analyses[main])
    findings = explain(checked.findings, hot, rules)
    ranked = rank(findings, analyses[main], pricing)
    ranked = ranked.each(lambda found: for_run(found, analyses, rules))
    return write_report(run, analyses, checked, ranked, pricing, rules, hot, problems)


def _alone(trace: Trace, options: Options) -> Report:
    """The report of one of several traces that have nothing to do with each other."""
    plain = dataclasses.replace(options, rank=None, window=None)
    return examine(Run(traces={(-1, 0): trace}), plain).report
