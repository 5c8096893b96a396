"""Analysis from traces to a Report: select windows, run the rules, estimate and rank their
findings, and write the report."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from advisor.advise.impact import (
    limit_to_cores,
    limit_together,
    note_rank_counts,
    scale_to_run,
    with_gain,
)
from advisor.advise.options import Options as Options  # noqa: PLC0414
from advisor.advise.priority import prioritize
from advisor.advise.ranks.job import files_summarized_apart, first_rank, summarize_apart
from advisor.advise.ranks.task import shorten_reason
from advisor.advise.report_fields import cost_per_step
from advisor.advise.report_writer import write_report
from advisor.advise.rule_loading import load_rules, read_config
from advisor.advise.rule_runner import (
    RankFindings,
    add_hot_lines,
    merge_ranks,
    rank_rules,
    read_hot_lines,
    run_ranks,
)
from advisor.advise.unrelated_inputs import refuse_unrelated
from advisor.advise.window_choice import choose_windows
from advisor.core.errors import AdvisorError
from advisor.core.layers import MeshAxis
from advisor.core.prices import read_prices
from advisor.core.report import Report
from advisor.core.trace import Run
from advisor.measure.comm.links import NodeLinks
from advisor.measure.comm.mesh import report_mesh
from advisor.measure.inference.graphs import attach_capture, captured_launches, find_replays
from advisor.measure.ranks.join import collective_waits
from advisor.measure.ranks.topology import host_of
from advisor.read import open_run
from advisor.replay.estimators import GainEstimator, estimator_for

if TYPE_CHECKING:
    from advisor.core.rule import Rule
    from advisor.measure import Analysis
    from advisor.measure.ranks.summary_schema import RankSummary, UnreadRank
    from advisor.replay.ranks.estimator import OfRank
    from advisor.replay.ranks.rank_comparison import RankComparison


@dataclass(frozen=True)
class AnalysisResult:
    """A report with its run, measurements and estimator."""

    run: Run
    """Run with the traces in memory: only the first rank's if others were measured elsewhere."""
    report: Report
    analyses: dict[int, Analysis]
    """Analyses by rank number. The report is about the first, which ``Options.rank`` chooses."""
    estimator: GainEstimator
    """Estimator of the first rank's gains."""

    @property
    def main(self) -> Analysis:
        """Analysis of the rank that the report is about."""
        return next(iter(self.analyses.values()))


def analyze(
    source: str | Path | Sequence[str | Path] | Run, options: Options | None = None
) -> Report:
    """Read traces (a path, several, or an opened Run) and say what is slow.

    Raises AdvisorError when there is nothing to analyse."""
    return analyze_in_full(source, options).report


def analyze_in_full(
    source: str | Path | Sequence[str | Path] | Run,
    options: Options | None = None,
    on_read: Callable[[], object] | None = None,
) -> AnalysisResult:
    """Analyse as :func:`analyze` does, but also return the run, measurements and estimator.
    ``on_read`` is called once all local files are read."""
    options = options or Options()
    config = read_config() if options.config is None else options.config
    rules = load_rules(options.rules_folder, config)
    paths = [] if isinstance(source, Run) else _list_paths(source)
    sources = files_summarized_apart(paths, options) if paths else []
    summaries: list[RankSummary] = []
    unread: list[UnreadRank] = []
    if isinstance(source, Run):
        run = source
    elif sources:
        summaries, unread = summarize_apart(sources, paths, options, config)
        run = first_rank(summaries, sources, options)
    else:
        run = open_ranks(source, options)
    if on_read is not None:
        on_read()
    if options.capture is not None and sources:
        raise AdvisorError("--capture: analyze one rank at a time, with --rank")
    if options.capture is not None:
        run = _attach_given_capture(run, options)
    elif run.recording is None and options.window is None:
        run = _attach_own_capture(run)
    refuse_unrelated(run)
    analyses = choose_windows(run, options.window, options.steps)
    if options.rank in analyses:
        analyses = {options.rank: analyses[options.rank], **analyses}
    names = {number: host_of(a.trace.meta.path) for number, a in analyses.items()}
    hosts = {number: name for number, name in names.items() if name} if len(names) > 1 else {}
    for a in analyses.values():
        a.node_links = NodeLinks(options.node_size, options.node_bandwidth, hosts)
    main = next(iter(analyses))
    results = run_ranks(analyses, rules)
    summaries = summaries or [
        each for n in sorted(results) if (each := results[n].summary) is not None
    ]
    comparison = _compare_job(summaries, unread)
    if comparison is None and unread:
        left_out = [f"{each.path}: {each.why}" for each in unread]
        run = dataclasses.replace(run, problems=(*run.problems, *left_out))
    report, estimator = _advise(run, analyses, results, rules, comparison, summaries)
    prices = read_prices() if options.prices is None else options.prices
    report = structs.replace(
        report,
        cost=cost_per_step(run, report, prices, options.paid_gpus),
        mesh=_build_mesh(analyses[main], main, comparison),
    )
    return AnalysisResult(run, report, analyses, estimator)


def open_ranks(source: str | Path | Sequence[str | Path], options: Options) -> Run:
    """Open a run with all its ranks, because the others show what ``options.rank`` waits for. With
    a window or a graph capture, read only that rank. Raises AdvisorError, also for a missing
    rank."""
    window = options.window_to_read
    if options.rank is None or options.capture is not None or options.window is not None:
        return open_run(source, options.read, rank=options.rank, window=window)
    run = open_run(source, options.read, window=window)
    recorded = run.ranks if run.recording is None else run.recording.ranks
    if options.rank in recorded:
        return run
    return open_run(
        source, options.read, rank=options.rank, window=window
    )  # its error lists the ranks


def _advise(
    run: Run,
    analyses: dict[int, Analysis],
    results: dict[int, RankFindings],
    rules: list[Rule],
    comparison: RankComparison | None,
    summaries: Sequence[RankSummary],
) -> tuple[Report, GainEstimator]:
    """Return the report of the first rank, and its estimator."""
    main, a = next(iter(analyses.items()))
    estimator = results[main].estimator or estimator_for(a, main)
    if comparison is None:
        checked = merge_ranks(results, main)
    else:
        own_results = {n: each for n, each in results.items() if n == main or each.summary is None}
        checked = merge_ranks(own_results, main, counted=False)
        of_rank = partial(_get_rank_estimator, analyses, results, {})
        checked, estimator = _add_other_ranks(checked, estimator, comparison, a, rules, of_rank)
    hot_lines, problems = read_hot_lines(a)
    findings = add_hot_lines(checked.findings, hot_lines, rules)
    ranked = prioritize(findings, a, estimator, rules)
    ranked = ranked.map_findings(
        lambda found: limit_together(scale_to_run(limit_to_cores(found, a), a, estimator), a)
    )
    report = write_report(
        run, analyses, checked, ranked, estimator, rules, hot_lines, problems, comparison, summaries
    )
    return report, estimator


def _get_rank_estimator(
    analyses: dict[int, Analysis],
    results: dict[int, RankFindings],
    cache: dict[int, GainEstimator],
    rank: int,
) -> GainEstimator | None:
    """Return the estimator of a single rank, or ``None`` if its trace is not in memory. ``cache``:
    cache of estimators for ranks that were measured in other processes."""
    if rank not in analyses or analyses[rank].record_only:
        return None
    estimator = results[rank].estimator or cache.get(rank)
    if estimator is None:
        estimator = cache[rank] = estimator_for(analyses[rank], rank)
    return estimator


def _add_other_ranks(
    checked: RankFindings,
    own_estimator: GainEstimator,
    comparison: RankComparison,
    a: Analysis,
    rules: list[Rule],
    of_rank: OfRank,
) -> tuple[RankFindings, GainEstimator]:
    """Add the findings of other ranks and of their comparison to the findings of one rank. If the
    ranks can be replayed, findings of single ranks get the job's gain. Also return the
    estimator."""
    from advisor.replay.ranks.estimator import RanksEstimator

    estimator = RanksEstimator(own_estimator, comparison, checked.rank, checked.findings, of_rank)
    findings = [*checked.findings, *estimator.other_findings({f.rule for f in checked.findings})]
    rank_counts = {finding.rule: estimator.ranks_with(finding.rule) for finding in findings}
    findings = note_rank_counts(findings, rank_counts, len(comparison.numbers))
    by_id = {rule.id: rule for rule in rules}
    findings = [by_id[f.rule].cite_ranks(f, comparison) if f.rule in by_id else f for f in findings]
    used_estimator: GainEstimator = own_estimator if comparison.replay.reason else estimator
    if used_estimator is estimator:
        findings = [
            with_gain(f, estimator.gain_range(f.edits), a, estimator.method, is_job_gain=True)
            if estimator.is_estimated(f)
            else f
            for f in findings
        ]
    checked = dataclasses.replace(checked, findings=findings)
    return checked.with_findings_across_ranks(
        rank_rules(comparison, checked.rank, a, rules, used_estimator)
    ), used_estimator


def _build_mesh(a: Analysis, rank: int, comparison: RankComparison | None) -> list[MeshAxis]:
    """Return the communication by mesh axis, with waits if other ranks are in memory."""
    if a.device_id is None or a.only_input:
        return []
    waits, links = None, a.node_links
    if comparison is not None:
        index = comparison.summary_index(rank)
        waits = None if index is None else collective_waits(comparison.job.joined, index)
        hosts = {each.rank: each.host for each in comparison.job.summaries if each.host}
        links = links._replace(hosts=hosts)
    return report_mesh(a, links, waits=waits)


def _compare_job(
    summaries: Sequence[RankSummary], unread: Sequence[UnreadRank]
) -> RankComparison | None:
    """Compare a job's ranks together. Return ``None`` for one rank. Raises AdvisorError."""
    if len(summaries) + len(unread) < 2 or not any(each.step_ns for each in summaries):
        return None
    from advisor.replay.ranks.rank_comparison import compare_ranks

    try:
        return compare_ranks(summaries, unread)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # damaged summaries
        why = shorten_reason(f"{type(error).__name__}: {error}")
        raise AdvisorError(f"the ranks cannot be compared, a bug in advisor ({why})") from error


def _attach_given_capture(run: Run, options: Options) -> Run:
    """Add the names of a graph capture to the run. Raises AdvisorError if nothing is captured."""
    recorded = open_run(str(options.capture), options.read).traces.values()
    capture = next((trace for trace in recorded if captured_launches(trace)), None)
    if capture is None:
        raise AdvisorError(f"{options.capture}: no graph is captured in it")
    traces = {key: attach_capture(trace, capture) for key, trace in run.traces.items()}
    return dataclasses.replace(run, traces=traces)


def _attach_own_capture(run: Run) -> Run:
    """Add a capture's names to the replays recorded with it, and analyse only the replays."""
    traces = dict(run.traces)
    for number in run.ranks:
        keys = [key for key in sorted(traces) if key[0] == number]
        if len(keys) < 2:
            continue
        captures = [key for key in keys if captured_launches(traces[key])]
        replaying = [key for key in keys if key not in captures and find_replays(traces[key])]
        if len(captures) == 1 and replaying:
            capture = traces.pop(captures[0])
            traces |= {key: attach_capture(traces[key], capture) for key in replaying}
    return dataclasses.replace(run, traces=traces)


def _list_paths(source: str | Path | Sequence[str | Path]) -> list[str]:
    return [str(source)] if isinstance(source, str | Path) else [str(each) for each in source]
