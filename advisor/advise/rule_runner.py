"""Execution of the rules, on each rank's window and across ranks, and their outcomes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import polars as pl
from msgspec import structs

from advisor.advise.impact import estimate_impact, note_rank_counts, weigh_confidence
from advisor.advise.program_wording import (
    for_program,
    how_to_record_more,
    is_of_use,
    skip_foreign_rules,
    without_compilation,
    without_known_settings,
)
from advisor.advise.recording_limits import explain_lost_records
from advisor.core.errors import AdvisorError, describe_failure
from advisor.core.finding import Finding, Location, Outcome, PassedCheck, SkippedCheck
from advisor.core.rule import Evidence, Rule
from advisor.core.run_directory import SCALENE
from advisor.core.text import lower_first
from advisor.measure import Analysis
from advisor.measure.host.module_calls import line_of_call
from advisor.measure.host.module_lines import line_of_layer
from advisor.measure.host.sampled_code import line_of_operator
from advisor.replay.estimators import GainEstimator, estimator_for

if TYPE_CHECKING:
    from advisor.core.finding import HotLine
    from advisor.measure.ranks.summary_schema import RankSummary
    from advisor.replay.ranks.rank_comparison import RankComparison

RULE_FAILED = "the rule failed"
MIN_MAIN_PLACE_SHARE = 0.5
"""Minimum share of a finding's instances at its first place at which a sampled line is named."""
MAX_PARALLEL_EVENTS = 2_000_000
"""Maximum number of events up to which ranks are examined in parallel. Threads share one
interpreter, save a fifth of this part's time, and need much memory in addition to the trace."""
Subject = TypeVar("Subject", "Analysis", "RankComparison")


@dataclass(frozen=True)
class RankFindings:
    """Findings, passed and skipped checks of one rank's window, or across ranks."""

    rank: int
    findings: list[Finding]
    passed: list[PassedCheck]
    skipped: list[SkippedCheck]
    estimator: GainEstimator | None = None
    """Estimator of the gains, or ``None`` in another process or for findings across ranks."""
    summary: RankSummary | None = None
    """Figures of the rank to compare, or ``None`` for a single rank or without a profile."""

    def with_findings_across_ranks(self, across: RankFindings) -> RankFindings:
        """Return a copy that also contains the outcomes across ranks."""
        return replace(
            self,
            findings=self.findings + across.findings,
            passed=self.passed + across.passed,
            skipped=self.skipped + across.skipped,
        )


def run_ranks(analyses: dict[int, Analysis], rules: list[Rule]) -> dict[int, RankFindings]:
    """Run the rules on each rank, and summarise each rank if there are several."""
    if len(analyses) == 1:
        return {number: run_rules(number, a, rules) for number, a in analyses.items()}
    rows = sum(a.trace.cpu.height + a.trace.gpu.height for a in analyses.values())
    with ThreadPoolExecutor(1 if rows > MAX_PARALLEL_EVENTS else None) as threads:
        done = threads.map(
            _run_and_summarize, list(analyses), analyses.values(), [rules] * len(analyses)
        )
        return {result.rank: result for result in done}


def _run_and_summarize(number: int, a: Analysis, rules: list[Rule]) -> RankFindings:
    from advisor.advise.memory import memory_of_rank
    from advisor.measure.ranks.rank_summary import summarize_rank

    checked = run_rules(number, a, rules)
    if a.record_only:
        return checked
    memory = memory_of_rank(a, number)
    return replace(checked, summary=summarize_rank(a, number, checked.findings, memory=memory))


def run_rules(
    number: int, a: Analysis, rules: list[Rule], *, estimate_gains: bool = True
) -> RankFindings:
    """Run the per-rank rules on one window; estimate the gains if ``estimate_gains`` is set."""
    outcomes: list[Outcome] = []
    lost = explain_lost_records(a)
    is_cut_off = a.trace.meta.truncated
    for rule in rules:
        if rule.across_ranks or not _applies(rule, a) or not is_of_use(rule, a):
            continue
        rule = for_program(rule, a)
        reads_before = a.idle_reads
        rule_outcomes = _run_safely(rule, rule.check, a)
        if lost and not rule.reads_record:
            rule_outcomes = _without_idle(
                rule, rule_outcomes, lost, of_idle=a.idle_reads > reads_before, cut=is_cut_off
            )
        outcomes += [_fill_outcome(outcome, rule, a, number) for outcome in rule_outcomes]
    outcomes += _list_checks_not_run(a, rules)
    if a.only_input is None:
        outcomes += skip_foreign_rules(rules, a.trace.meta)
    return _split_by_kind(outcomes, number, a, estimator_for(a) if estimate_gains else None)


def rank_rules(
    comparison: RankComparison, main: int, a: Analysis, rules: list[Rule], estimator: GainEstimator
) -> RankFindings:
    """Run the rules that look across ranks. The report is of rank ``main``."""
    outcomes: list[Outcome] = []
    for rule in rules:
        if rule.across_ranks and is_of_use(rule, a):
            rule = for_program(rule, a)
            rule_outcomes = _run_safely(rule, rule.check_run, comparison)
            outcomes += [_fill_outcome(outcome, rule, a, main) for outcome in rule_outcomes]
    return _split_by_kind(outcomes, main, a, estimator)


def estimate_findings(checked: RankFindings, a: Analysis, estimator: GainEstimator) -> RankFindings:
    """Return a copy with estimated gains. A finding that fails becomes a skipped check."""
    findings, skipped = [], list(checked.skipped)
    for finding in checked.findings:
        try:
            findings.append(estimate_impact(finding, a, estimator))
        except AdvisorError:
            raise
        except Exception as error:  # an edit from a third-party rule
            why = f"no gain could be estimated ({describe_failure(error)})"[:300]
            skipped.append(SkippedCheck(what=finding.title, why=why, rule=finding.rule))
    return replace(checked, findings=findings, skipped=skipped, estimator=estimator)


def merge_ranks(
    results: dict[int, RankFindings], main: int, *, counted: bool = True
) -> RankFindings:
    """Return the main rank's findings, and findings that only other ranks have. If ``counted``,
    each notes how many ranks have it."""
    findings = list(results[main].findings)
    seen = {finding.rule: {main} for finding in findings}
    for number, other in results.items():
        for finding in other.findings if number != main else ():
            if finding.rule not in seen:
                findings.append(structs.replace(finding, other_rank=True))
            seen.setdefault(finding.rule, set()).add(number)
    if len(results) > 1 and counted:
        counts = {rule: len(numbers) for rule, numbers in seen.items()}
        findings = note_rank_counts(findings, counts, len(results))
    return replace(results[main], findings=findings)


def _without_idle(
    rule: Rule, outcomes: list[Outcome], why: str, *, of_idle: bool, cut: bool
) -> list[Outcome]:
    """Replace what a rule says about idle or exposed time by a skipped check. ``why``: from
    ``explain_lost_records``. ``of_idle``: the rule looked at such time. ``cut``: the file is
    cut off."""
    if not of_idle or not outcomes:
        return outcomes
    name = rule.title or rule.id
    return [
        SkippedCheck(
            what=lower_first(name),
            why=why,
            record="the window again, from a whole file"
            if cut
            else "a shorter window, so that the profiler's buffers hold it, with all activities",
        )
    ]


def _applies(rule: Rule, a: Analysis) -> bool:
    if any(kind in a.auxiliary_inputs for kind in rule.auxiliary_inputs):
        return True
    if rule.needs_shapes and a.trace.inputs.is_empty():
        return False
    return a.rank_record is not None if rule.reads_record else not a.record_only


def _list_checks_not_run(a: Analysis, rules: list[Rule]) -> list[SkippedCheck]:
    """Return one skipped check for all rules that lack the same input."""
    if a.only_input is not None:
        return [a.only_input.skipped]
    if a.record_only:
        on_device = "everything on the device: idle time, kernels, transfers, syncs"
        return [
            SkippedCheck(
                what="the operators that the CPU computes" if a.trains_on_host else on_device,
                why="no window of this rank was profiled",
                record="a window that is reached: fewer steps skipped, or 'advisor window RUN'",
            )
        ]
    if not a.trace.meta.is_pytorch:
        return []
    result = []
    without_shapes = [rule.id for rule in rules if rule.needs_shapes and is_of_use(rule, a)]
    if without_shapes and a.trace.inputs.is_empty() and not a.trace.cpu.is_empty():
        result.append(
            SkippedCheck(
                what="work that shapes of tensors show to be needless: values computed again, "
                "copied or thrown away",
                why="the trace has no input shapes",
                record="record_shapes=True",
                missing="no shapes",
                rule=", ".join(without_shapes),
            )
        )
    missing = [rule.id for rule in rules if rule.reads_record]
    if a.rank_record is not None or not missing:
        return result
    return [
        *result,
        SkippedCheck(
            what="the run around the window: loader settings, threads, pauses, memory over time, "
            "clocks and health of the GPU",
            why="a profiler's trace does not contain them",
            record="advisor record",
            rule=", ".join(missing),
        ),
    ]


def _run_safely(
    rule: Rule, check: Callable[[Subject], Iterable[Outcome]], subject: Subject
) -> list[Outcome]:
    """Return what a rule yields, or one skipped check if it fails. A rule may be third-party code,
    and its failure must not stop the others."""
    try:
        outcomes = list(check(subject))
        if not rule.bundled:
            outcomes = [_check_outcome(outcome, rule) for outcome in outcomes]
        return outcomes
    except AdvisorError:
        raise
    except Exception as error:
        why = f"{RULE_FAILED} ({describe_failure(error)})"[:300]
        return [SkippedCheck(what=rule.title or rule.id, why=why)]


def _check_outcome(outcome: Outcome, rule: Rule) -> Outcome:
    """Check the field types of what a third-party rule yields, as nothing else does. Raises
    TypeError or ValueError."""
    if not isinstance(outcome, Finding | PassedCheck | SkippedCheck):
        raise TypeError(f"it yielded {type(outcome).__name__}, not a Finding")
    plain = msgspec.to_builtins(outcome)
    if b"null" in msgspec.json.encode(
        list(_iterate_floats(plain))
    ):  # how JSON writes NaN and infinity
        raise ValueError("it yielded a number that is not finite")
    checked: Outcome = msgspec.convert(plain, type(outcome))
    if isinstance(checked, Finding):
        for edit in checked.edits:
            for pattern in (edit.select.name, edit.select.under):
                re.compile(pattern or "")
        rule.complete(checked)
    return checked


def _iterate_floats(value: object) -> Iterator[float]:
    """Yield all floats in plain data."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _iterate_floats(item)


def _fill_outcome(outcome: Outcome, rule: Rule, a: Analysis, number: int) -> Outcome:
    """Fill in an outcome's rule, rank, device and lines of code."""
    if isinstance(outcome, PassedCheck):
        return structs.replace(outcome, rule=rule.id)
    if isinstance(outcome, SkippedCheck):
        record = how_to_record_more(outcome.record, a)
        return structs.replace(outcome, rule=rule.id, record=record)
    finding = without_known_settings(without_compilation(rule.complete(outcome), a), a)
    finding = weigh_confidence(finding, rule, a)
    where = [_with_line(place, a) for place in finding.where]
    if where and a.run_steps is not None and not any(place.file for place in where):
        where = [_with_called_line(place, a) for place in where]
        counts = [place.count or 1 for place in where]
        is_main = counts[0] >= MIN_MAIN_PLACE_SHARE * sum(counts)
        if is_main and not any(place.file for place in where):
            where = [_with_layer_line(place, a) for place in where]
    if rule.sampled_part and a.run_steps is not None and not any(place.file for place in where):
        line = a.run_steps.hottest_line(rule.sampled_part)
        where = where if line is None else [line.location, *where]
    finding = structs.replace(finding, where=where)
    rank = None if number < 0 else number
    return structs.replace(finding, trace_rank=rank, device=a.device_id)


def _with_called_line(place: Location, a: Analysis) -> Location:
    """Add the user's line of code to an operator's place, from the log of module calls."""
    called = line_of_call(a, place)
    if called is None:
        return place
    location = called.frame.location
    if called.is_definition:  # a sampled line says more
        sampled = _with_sampled_line(place, a, by_share=False)
        if sampled.file is not None:
            return sampled
    return _add_line(place, location, layer=place.layer or called.layer)


def _with_layer_line(place: Location, a: Analysis) -> Location:
    """Add the user's line of code to an operator's place: from the layer with its weights, or else
    from stacks sampled outside windows."""
    line = line_of_layer(a, place)
    if line is None:
        return _with_sampled_line(place, a)
    return _add_line(place, line, layer=place.layer or line.layer)


def _with_sampled_line(place: Location, a: Analysis, *, by_share: bool = True) -> Location:
    """Add the user's line of code to an operator's place, from samples outside windows."""
    line = None if place.op is None else line_of_operator(a, place.op, by_share=by_share)
    if line is None or _has_copies_too(place, a):
        return place
    return _add_line(place, line.location, layer=place.layer, sampled_share=line.share)


def _add_line(place: Location, line: Location, **fields: str | float | None) -> Location:
    """Add the line of an operator to its place. It is inside of the layer."""
    return structs.replace(
        place,
        file=line.file,
        line=line.line,
        function=line.function,
        around_layer=False,
        **fields,
    )


def _has_copies_too(place: Location, a: Analysis) -> bool:
    """Return whether an operator has copies to or from the host in addition to this kernel. Samples
    then show the copies, where the host waits."""
    if place.kernel is None or place.kernel.startswith("Memcpy"):
        return False
    of_operator = (a.kernels["op_name"] == place.op).fill_null(value=False)
    copied = a.trace.gpu["name"].cast(pl.String).filter(of_operator)
    return bool(copied.str.contains("HtoD|DtoH").any())


def _with_line(place: Location, a: Analysis) -> Location:
    """Add to a kernel's place the line it was generated from, if torch.compile's logs name it."""
    name = place.kernel or place.op
    if place.file is not None or name not in a.fused_kernels:
        return place
    lines = a.fused_kernels[name].lines
    if len(lines) == 0:
        return place
    first = lines[0]
    return structs.replace(place, file=first.file, line=first.line, function=first.function)


def _split_by_kind(
    outcomes: Sequence[Outcome], number: int, a: Analysis, estimator: GainEstimator | None
) -> RankFindings:
    """Split outcomes by kind, and estimate the gains of findings if there is an ``estimator``."""
    checked = RankFindings(
        number,
        [outcome for outcome in outcomes if isinstance(outcome, Finding)],
        [outcome for outcome in outcomes if isinstance(outcome, PassedCheck)],
        [outcome for outcome in outcomes if isinstance(outcome, SkippedCheck)],
    )
    return checked if estimator is None else estimate_findings(checked, a, estimator)


# -- hot lines of Python, from Scalene -------------------------------------------------------------

MAX_HOT_LINES = 3
"""Maximum number of hot lines added to a finding."""
_DATA_PATTERN = re.compile(
    r"__getitems?__|__iter__|__next__|collate|transform|augment|decode|load_|read_|preprocess"
    r"|tokeniz|\bforward_data\b|[Dd]ata[Ss]et|[Dd]ata[Ll]oader"
)
"""Pattern of functions that prepare data. Their lines explain waits for data."""


def read_hot_lines(a: Analysis) -> tuple[list[HotLine], list[str]]:
    """Read the rank's ``scalene.json``. Return its hot lines and its problems."""
    if a.rank_record is None or not a.rank_record.folder:
        return [], []
    file = Path(a.rank_record.folder) / SCALENE
    if not file.is_file():
        return [], []
    from advisor.read.formats.scalene import read_scalene

    try:
        return read_scalene(file), []
    except AdvisorError as error:
        return [], [str(error)]


def add_hot_lines(
    findings: Iterable[Finding], lines: Sequence[HotLine], rules: Iterable[Rule]
) -> list[Finding]:
    """Add the hottest lines of Python to findings on data loading and on Python in the loop
    (``Rule.is_python_time``). Lines of the user's code that a finding already names stay first."""
    python_rules = {rule.id for rule in rules if rule.is_python_time}
    data_lines = [line for line in lines if _DATA_PATTERN.search(line.function or "")]
    other_lines = [line for line in lines if line not in data_lines]
    return [
        _with_lines(finding, data_lines if finding.category == "input" else other_lines)
        if finding.category == "input" or finding.rule in python_rules
        else finding
        for finding in findings
    ]


def _with_lines(finding: Finding, lines: Sequence[HotLine]) -> Finding:
    chosen = lines[:MAX_HOT_LINES]
    named_lines = {(place.file, place.line) for place in finding.where}
    places = [
        Location(file=line.file, line=line.line, function=line.function)
        for line in chosen
        if (line.file, line.line) not in named_lines
    ]
    has_file = any(place.file is not None for place in finding.where)
    line_evidence = [
        Evidence(
            f"hot line {Path(line.file).name}:{line.line} (Scalene)",
            line.share,
            "share",
            source="share of all CPU samples of a separate pass",
        )
        for line in chosen
    ]
    return structs.replace(
        finding,
        where=[*finding.where, *places] if has_file else [*places, *finding.where],
        evidence=[*finding.evidence, *line_evidence],
    )
