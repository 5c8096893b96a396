"""Execution of the rules, on each rank's window and across ranks, and what they found."""

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
from advisor.advise.recording_limits import lost_records
from advisor.core.errors import AdvisorError, describe_failure
from advisor.core.finding import Finding, Location, Outcome, PassedCheck, SkippedCheck
from advisor.core.rule import Evidence, Rule
from advisor.core.run_directory import SCALENE
from advisor.core.text import lower_first
from advisor.measure import Analysis
from advisor.measure.host.module_lines import line_of_layer
from advisor.measure.host.sampled_code import line_of_operator
from advisor.replay.estimators import GainEstimator, estimator_for

if TYPE_CHECKING:
    from advisor.core.finding import HotLine
    from advisor.measure.ranks.summary_schema import RankSummary
    from advisor.replay.ranks.study import Study

RULE_FAILED = "the rule failed"
MAIN_PLACE = 0.5
"""Share of a finding's instances at its first place from which a sampled line is named."""
MANY_ROWS = 2_000_000
"""Number of events from which ranks are examined one after another. Threads share one interpreter,
gain a fifth of this part's time, and need much memory beside the trace."""
Subject = TypeVar("Subject", "Analysis", "Study")


@dataclass(frozen=True)
class RankFindings:
    """Findings, passed and skipped checks of one rank's window, or across ranks."""

    rank: int
    findings: list[Finding]
    passed: list[PassedCheck]
    skipped: list[SkippedCheck]
    estimator: GainEstimator | None = None
    """Estimator of the gains; ``None``: in another process, or across ranks."""
    summary: RankSummary | None = None
    """Figures of the rank for the comparison; ``None``: it is alone, or was not profiled."""

    def with_findings_across_ranks(self, across: RankFindings) -> RankFindings:
        """Return a copy that also has what the rules found across ranks."""
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
    with ThreadPoolExecutor(1 if rows > MANY_ROWS else None) as threads:
        done = threads.map(_summed_up, list(analyses), analyses.values(), [rules] * len(analyses))
        return {result.rank: result for result in done}


def _summed_up(number: int, a: Analysis, rules: list[Rule]) -> RankFindings:
    from advisor.advise.memory import memory_of_rank
    from advisor.measure.ranks.rank_summary import summarise_rank

    checked = run_rules(number, a, rules)
    if a.record_only:
        return checked
    memory = memory_of_rank(a, number)
    return replace(checked, summary=summarise_rank(a, number, checked.findings, memory=memory))


def run_rules(number: int, a: Analysis, rules: list[Rule], prices: bool = True) -> RankFindings:
    """Run the per-rank rules on one window; estimate the gains if ``prices`` is set."""
    outcomes: list[Outcome] = []
    unknown = lost_records(a)
    cut = a.trace.meta.truncated
    for rule in rules:
        if rule.across_ranks or not _applies(rule, a) or not is_of_use(rule, a):
            continue
        rule = for_program(rule, a)
        before = a.idle_reads
        said = _contained(rule, rule.check, a)
        if unknown and not rule.reads_record:
            said = _without_idle(rule, said, unknown, of_idle=a.idle_reads > before, cut=cut)
        outcomes += [_completed(outcome, rule, a, number) for outcome in said]
    outcomes += _not_run(a, rules)
    if a.only_input is None:
        outcomes += skip_foreign_rules(rules, a.trace.meta)
    return _sorted(outcomes, number, a, estimator_for(a) if prices else None)


def rank_rules(
    study: Study, main: int, a: Analysis, rules: list[Rule], estimator: GainEstimator
) -> RankFindings:
    """Run the rules that look across ranks; the report is of rank ``main``."""
    outcomes: list[Outcome] = []
    for rule in rules:
        if rule.across_ranks and is_of_use(rule, a):
            rule = for_program(rule, a)
            said = _contained(rule, rule.check_run, study)
            outcomes += [_completed(outcome, rule, a, main) for outcome in said]
    return _sorted(outcomes, main, a, estimator)


def estimate_findings(checked: RankFindings, a: Analysis, estimator: GainEstimator) -> RankFindings:
    """Return a copy with estimated gains; a finding whose estimate fails is also skipped."""
    findings, skipped = [], list(checked.skipped)
    for finding in checked.findings:
        try:
            findings.append(estimate_impact(finding, a, estimator))
        except AdvisorError:
            raise
        except Exception as error:  # an edit that somebody else's rule made
            why = f"no gain could be estimated ({describe_failure(error)})"[:300]
            skipped.append(SkippedCheck(what=finding.title, why=why, rule=finding.rule))
    return replace(checked, findings=findings, skipped=skipped, estimator=estimator)


def merge_ranks(
    results: dict[int, RankFindings], main: int, *, counted: bool = True
) -> RankFindings:
    """Return the main rank's findings, and those that only other ranks have. Each notes on how many
    ranks its rule found it, if ``counted``."""
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
    """Replace what a rule says of idle or exposed time by a skipped check. ``why``: from
    ``lost_records``; ``of_idle``: the rule looked at such time; ``cut``: the file is cut off."""
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
    return a.record is not None if rule.reads_record else not a.record_only


def _not_run(a: Analysis, rules: list[Rule]) -> list[SkippedCheck]:
    """Return one skipped check for all rules for which an input is missing."""
    if a.only_input is not None:
        return [a.only_input.skipped]
    if a.record_only:
        return [
            SkippedCheck(
                what="everything on the device: idle time, kernels, transfers, syncs",
                why="no window of this rank was profiled",
                record="a window that is reached: fewer steps skipped, or 'advisor window RUN'",
            )
        ]
    missing = [rule.id for rule in rules if rule.reads_record]
    if a.record is not None or not missing or not a.trace.meta.is_pytorch:
        return []
    return [
        SkippedCheck(
            what="the run around the window: loader settings, threads, pauses, memory over time, "
            "clocks and health of the GPU",
            why="a profiler's trace does not hold them",
            record="advisor record",
            rule=", ".join(missing),
        )
    ]


def _contained(
    rule: Rule, check: Callable[[Subject], Iterable[Outcome]], subject: Subject
) -> list[Outcome]:
    """Return what a rule yields, or one skipped check if it fails. A rule may be anybody's code,
    and a failure must not stop the others."""
    try:
        said = list(check(subject))
        if not rule.bundled:
            said = [_sound(outcome, rule) for outcome in said]
        return said
    except AdvisorError:
        raise
    except Exception as error:
        why = f"{RULE_FAILED} ({describe_failure(error)})"[:300]
        return [SkippedCheck(what=rule.title or rule.id, why=why)]


def _sound(outcome: Outcome, rule: Rule) -> Outcome:
    """Check the field types of what a foreign rule yields; nothing else does. Raises TypeError or
    ValueError."""
    if not isinstance(outcome, Finding | PassedCheck | SkippedCheck):
        raise TypeError(f"it yielded {type(outcome).__name__}, not a Finding")
    given = msgspec.to_builtins(outcome)
    if b"null" in msgspec.json.encode(list(_numbers(given))):  # how JSON writes NaN and infinity
        raise ValueError("it yielded a number that is not finite")
    sound: Outcome = msgspec.convert(given, type(outcome))
    if isinstance(sound, Finding):
        for edit in sound.edits:
            for pattern in (edit.select.name, edit.select.under):
                re.compile(pattern or "")
        rule.complete(sound)
    return sound


def _numbers(value: object) -> Iterator[float]:
    """Yield all floats in plain data."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _numbers(item)


def _completed(outcome: Outcome, rule: Rule, a: Analysis, number: int) -> Outcome:
    """Complete an outcome with the fields of its rule, its rank, device and lines of code."""
    if isinstance(outcome, PassedCheck):
        return structs.replace(outcome, rule=rule.id)
    if isinstance(outcome, SkippedCheck):
        record = how_to_record_more(outcome.record, a)
        return structs.replace(outcome, rule=rule.id, record=record)
    finding = without_known_settings(without_compilation(rule.complete(outcome), a), a)
    finding = weigh_confidence(finding, rule, a)
    where = [_with_line(place, a) for place in finding.where]
    if rule.sampled_part and a.recorded is not None and not any(place.file for place in where):
        line = a.recorded.hottest_line(rule.sampled_part)
        where = where if line is None else [line.location, *where]
    elif where and a.recorded is not None and not any(place.file for place in where):
        counts = [place.count or 1 for place in where]
        if counts[0] >= MAIN_PLACE * sum(counts):  # else its line is that of a bystander
            where = [_with_layer_line(place, a) for place in where]
    finding = structs.replace(finding, where=where)
    rank = None if number < 0 else number
    return structs.replace(finding, trace_rank=rank, device=a.device_id)


def _with_layer_line(place: Location, a: Analysis) -> Location:
    """Add the line of the user's code to an operator's place, by the layer that has its weights;
    else by stacks sampled outside windows."""
    line = line_of_layer(a, place)
    if line is None:
        return _with_sampled_line(place, a)
    layer = place.layer or line.layer
    return structs.replace(
        place, file=line.file, line=line.line, function=line.function, layer=layer
    )


def _with_sampled_line(place: Location, a: Analysis) -> Location:
    """Add the line of the user's code to an operator's place, by the stacks sampled outside
    windows."""
    line = None if place.op is None else line_of_operator(a, place.op)
    if line is None or _is_beside_copies(place, a):
        return place
    found = line.location
    return structs.replace(
        place, file=found.file, line=found.line, function=found.function, sampled_share=line.share
    )


def _is_beside_copies(place: Location, a: Analysis) -> bool:
    """Return whether an operator's kernel is one place, and its copies to or from the host another:
    samples are where the host waits, which is at the copies."""
    if place.kernel is None or place.kernel.startswith("Memcpy"):
        return False
    of_operator = (a.kernels["op_name"] == place.op).fill_null(value=False)
    copied = a.trace.gpu["name"].cast(pl.String).filter(of_operator)
    return bool(copied.str.contains("HtoD|DtoH").any())


def _with_line(place: Location, a: Analysis) -> Location:
    """Add the line that a kernel was generated from to its place, if torch.compile's logs name
    it."""
    name = place.kernel or place.op
    if place.file is not None or name not in a.fused_kernels:
        return place
    lines = a.fused_kernels[name].lines
    if len(lines) == 0:
        return place
    first = lines[0]
    return structs.replace(place, file=first.file, line=first.line, function=first.function)


def _sorted(
    outcomes: Sequence[Outcome], number: int, a: Analysis, estimator: GainEstimator | None
) -> RankFindings:
    """Sort outcomes by kind, and estimate the gains of findings if there is an ``estimator``."""
    checked = RankFindings(
        number,
        [outcome for outcome in outcomes if isinstance(outcome, Finding)],
        [outcome for outcome in outcomes if isinstance(outcome, PassedCheck)],
        [outcome for outcome in outcomes if isinstance(outcome, SkippedCheck)],
    )
    return checked if estimator is None else estimate_findings(checked, a, estimator)


# -- hot lines of Python, from Scalene -------------------------------------------------------------

MAX_HOT_LINES = 3
"""Number of hot lines added to a finding."""
_DATA = re.compile(
    r"__getitems?__|__iter__|__next__|collate|transform|augment|decode|load_|read_|preprocess"
    r"|tokeniz|\bforward_data\b|[Dd]ata[Ss]et|[Dd]ata[Ll]oader"
)
"""Pattern of functions that prepare data: their lines explain waits for it."""


def read_hot_lines(a: Analysis) -> tuple[list[HotLine], list[str]]:
    """Read the rank's ``scalene.json``: its hot lines, and the problems found in it."""
    if a.record is None or not a.record.folder:
        return [], []
    file = Path(a.record.folder) / SCALENE
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
    """Add the hottest lines of Python to findings on loading data and Python in the loop
    (``Rule.is_python_time``). Lines of the user's code that a finding already names stay first."""
    python = {rule.id for rule in rules if rule.is_python_time}
    data = [line for line in lines if _DATA.search(line.function or "")]
    rest = [line for line in lines if line not in data]
    return [
        _with_lines(finding, data if finding.category == "input" else rest)
        if finding.category == "input" or finding.rule in python
        else finding
        for finding in findings
    ]


def _with_lines(finding: Finding, lines: Sequence[HotLine]) -> Finding:
    chosen = lines[:MAX_HOT_LINES]
    known = {(place.file, place.line) for place in finding.where}
    places = [
        Location(file=line.file, line=line.line, function=line.function)
        for line in chosen
        if (line.file, line.line) not in known
    ]
    named = any(place.file is not None for place in finding.where)
    measured = [
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
        where=[*finding.where, *places] if named else [*places, *finding.where],
        evidence=[*finding.evidence, *measured],
    )
