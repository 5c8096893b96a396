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
from advisor.advise.one_run import refuse_unrelated
from advisor.advise.options import Options as Options  # noqa: PLC0414
from advisor.advise.priority import prioritize
from advisor.advise.ranks.job import files_summarised_apart, first_rank, summarise_apart
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
    from advisor.replay.ranks.study import Study


@dataclass(frozen=True)
class AnalysisResult:
    """A report with the run, measurements and estimator behind it."""

    run: Run
    """Run with the traces held here; of ranks that were measured elsewhere, only the first."""
    report: Report
    analyses: dict[int, Analysis]
    """Analyses by rank number; the report is of the first, which ``Options.rank`` chooses."""
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
    return examine(source, options).report


def examine(
    source: str | Path | Sequence[str | Path] | Run,
    options: Options | None = None,
    on_read: Callable[[], object] | None = None,
) -> AnalysisResult:
    """Analyse as :func:`analyze` does, but also return the run, measurements and estimator.
    ``on_read`` is called once all that is held here is read."""
    options = options or Options()
    config = read_config() if options.config is None else options.config
    rules = load_rules(options.rules_folder, config)
    places = [] if isinstance(source, Run) else _places(source)
    sources = files_summarised_apart(places, options) if places else []
    summaries: list[RankSummary] = []
    unread: list[UnreadRank] = []
    if isinstance(source, Run):
        run = source
    elif sources:
        summaries, unread = summarise_apart(sources, places, options, config)
        run = first_rank(summaries, sources, options)
    else:
        run = open_ranks(source, options)
    if on_read is not None:
        on_read()
    if options.capture is not None and sources:
        raise AdvisorError("--capture: analyze one rank at a time, with --rank")
    if options.capture is not None:
        run = _with_capture(run, options)
    elif run.recording is None and options.window is None:
        run = _with_own_capture(run)
    refuse_unrelated(run)
    analyses = choose_windows(run, options.window, options.steps)
    if options.rank in analyses:
        analyses = {options.rank: analyses[options.rank], **analyses}
    _tell_machine(analyses, options)
    main = next(iter(analyses))
    results = run_ranks(analyses, rules)
    summaries = summaries or [
        each for n in sorted(results) if (each := results[n].summary) is not None
    ]
    compared = _compared(summaries, unread)
    if compared is None and unread:
        left_out = [f"{each.path}: {each.why}" for each in unread]
        run = dataclasses.replace(run, problems=(*run.problems, *left_out))
    report, estimator = _advise(run, analyses, results, rules, compared, summaries)
    prices = read_prices() if options.prices is None else options.prices
    report = structs.replace(
        report,
        cost=cost_per_step(run, report, prices, options.paid_gpus),
        mesh=_mesh(analyses[main], main, compared),
    )
    return AnalysisResult(run, report, analyses, estimator)


def open_ranks(source: str | Path | Sequence[str | Path], options: Options) -> Run:
    """Open a run with all its ranks: what ``options.rank`` waits for, the others show. Of a window
    or a graph capture, only that rank is read. Raises AdvisorError, also for a rank that is not
    there."""
    window = options.window_to_read
    if options.rank is None or options.capture is not None or options.window is not None:
        return open_run(source, options.read, rank=options.rank, window=window)
    run = open_run(source, options.read, window=window)
    recorded = run.ranks if run.recording is None else run.recording.ranks
    if options.rank in recorded:
        return run
    return open_run(source, options.read, rank=options.rank, window=window)  # says which there are


def _advise(
    run: Run,
    analyses: dict[int, Analysis],
    results: dict[int, RankFindings],
    rules: list[Rule],
    compared: Study | None,
    summaries: Sequence[RankSummary],
) -> tuple[Report, GainEstimator]:
    """Return the report of the first rank, from what the rules found on each, and its estimator."""
    main, a = next(iter(analyses.items()))
    estimator = results[main].estimator or estimator_for(a, main)
    if compared is None:
        checked = merge_ranks(results, main)
    else:
        alone = {n: each for n, each in results.items() if n == main or each.summary is None}
        checked = merge_ranks(alone, main, counted=False)
        of_rank = partial(_own_estimator, analyses, results, {})
        checked, estimator = _of_all_ranks(checked, estimator, compared, a, rules, of_rank)
    hot, problems = read_hot_lines(a)
    findings = add_hot_lines(checked.findings, hot, rules)
    ranked = prioritize(findings, a, estimator, rules)
    ranked = ranked.map_findings(
        lambda found: limit_together(scale_to_run(limit_to_cores(found, a), a, estimator), a)
    )
    report = write_report(
        run, analyses, checked, ranked, estimator, rules, hot, problems, compared, summaries
    )
    return report, estimator


def _own_estimator(
    analyses: dict[int, Analysis],
    results: dict[int, RankFindings],
    made: dict[int, GainEstimator],
    rank: int,
) -> GainEstimator | None:
    """Return the estimator of a rank by itself; ``None``: its trace is not here. ``made``: cache of
    estimators for ranks that were measured in other processes."""
    if rank not in analyses or analyses[rank].record_only:
        return None
    own = results[rank].estimator or made.get(rank)
    if own is None:
        own = made[rank] = estimator_for(analyses[rank], rank)
    return own


def _of_all_ranks(
    checked: RankFindings,
    own: GainEstimator,
    study: Study,
    a: Analysis,
    rules: list[Rule],
    of_rank: OfRank,
) -> tuple[RankFindings, GainEstimator]:
    """Add the findings of other ranks and of their comparison to those of one rank. Findings of
    single ranks get the job's gain, if the ranks can be replayed. Also returns the estimator."""
    from advisor.replay.ranks.estimator import RanksEstimator

    estimator = RanksEstimator(own, study, checked.rank, checked.findings, of_rank)
    findings = [*checked.findings, *estimator.other_findings({f.rule for f in checked.findings})]
    seen = {finding.rule: estimator.ranks_with(finding.rule) for finding in findings}
    findings = note_rank_counts(findings, seen, len(study.numbers))
    by_id = {rule.id: rule for rule in rules}
    findings = [by_id[f.rule].cite_ranks(f, study) if f.rule in by_id else f for f in findings]
    used: GainEstimator = own if study.replay.reason else estimator
    if used is estimator:
        findings = [
            with_gain(f, estimator.gain_range(f.edits), a, estimator.method, of_job=True)
            if estimator.is_estimated(f)
            else f
            for f in findings
        ]
    checked = dataclasses.replace(checked, findings=findings)
    return checked.with_findings_across_ranks(rank_rules(study, checked.rank, a, rules, used)), used


def _tell_machine(analyses: dict[int, Analysis], options: Options) -> None:
    """Set the nodes and network of each analysis, from the options and the names of the files."""
    names = {number: host_of(a.trace.meta.path) for number, a in analyses.items()}
    hosts = {number: name for number, name in names.items() if name} if len(names) > 1 else {}
    for a in analyses.values():
        a.machine = NodeLinks(options.node_size, options.node_bandwidth, hosts)


def _mesh(a: Analysis, rank: int, study: Study | None) -> list[MeshAxis]:
    """Return the communication by mesh axis, with waits if other ranks are here."""
    if a.device_id is None or a.only_input:
        return []
    waits = None
    if study is not None:
        place = study.summary_index(rank)
        waits = None if place is None else collective_waits(study.job.joined, place)
        hosts = {each.rank: each.host for each in study.job.summaries if each.host}
        a.machine = a.machine._replace(hosts=hosts)
    return report_mesh(a, waits=waits)


def _compared(summaries: Sequence[RankSummary], unread: Sequence[UnreadRank]) -> Study | None:
    """Study a job's ranks together; ``None``: one rank, or no steps. Raises AdvisorError."""
    if len(summaries) + len(unread) < 2 or not any(each.step_ns for each in summaries):
        return None
    from advisor.replay.ranks.study import study_ranks

    try:
        return study_ranks(summaries, unread)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # of damaged summaries
        why = shorten_reason(f"{type(error).__name__}: {error}")
        raise AdvisorError(f"the ranks cannot be compared, a fault of advisor ({why})") from error


def _with_capture(run: Run, options: Options) -> Run:
    """Add the names of a graph capture to the run. Raises AdvisorError if nothing is captured."""
    recorded = open_run(str(options.capture), options.read).traces.values()
    capture = next((trace for trace in recorded if captured_launches(trace)), None)
    if capture is None:
        raise AdvisorError(f"{options.capture}: no graph is captured in it")
    traces = {key: attach_capture(trace, capture) for key, trace in run.traces.items()}
    return dataclasses.replace(run, traces=traces)


def _with_own_capture(run: Run) -> Run:
    """Add a capture's names to the replays recorded beside it, and analyse only those."""
    traces = dict(run.traces)
    for number in run.ranks:
        own = [key for key in sorted(traces) if key[0] == number]
        if len(own) < 2:
            continue
        captures = [key for key in own if captured_launches(traces[key])]
        replaying = [key for key in own if key not in captures and find_replays(traces[key])]
        if len(captures) == 1 and replaying:
            capture = traces.pop(captures[0])
            traces |= {key: attach_capture(traces[key], capture) for key in replaying}
    return dataclasses.replace(run, traces=traces)


def _places(source: str | Path | Sequence[str | Path]) -> list[str]:
    return [str(source)] if isinstance(source, str | Path) else [str(each) for each in source]
