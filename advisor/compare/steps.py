"""Step times of two reports: the steps that count, their distributions and their difference."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from advisor.advise.program_wording import mark_steps_of
from advisor.compare.comparison import Distribution, StepTimeChange, Verdict
from advisor.compare.statistics import (
    CONFIDENCE_LEVEL,
    MIN_COMPARED_STEPS,
    MIN_DEPENDENT_STEPS,
    MIN_FOR_MEDIAN,
    Sample,
    autocorrelation,
    difference,
    difference_of_runs,
    welch_interval,
)
from advisor.core import text as t
from advisor.core.finding import GUESSED_STEP_SOURCES
from advisor.core.report import Input, Report
from advisor.core.report_steps import StepDurations

Source = Literal["recorder", "trace"]
Runs = list[StepDurations]

MAX_SHOWN_DURATIONS = 2000
MIN_CORRELATION = 0.3
"""Minimum correlation of neighbouring steps that the caveat on few steps mentions."""
UNMARKED_STEPS_NOTE = (
    "Nothing marks the steps: a step is where the device's work repeats, which may be a part of an "
    "iteration, such as a layer. Name a range with --steps to compare iterations."
)
SIDE_NAMES = ("before", "after")


def compare_steps(before: Report, after: Report) -> StepTimeChange:
    """Compare the recorder's unprofiled steps if both reports have them, else profiled steps."""
    reports = (before, after)
    source, sides = common_steps(before, after)
    distributions = [_describe_distribution(runs) for runs in sides]
    shortest = min(len(run.durations_ns) for runs in sides for run in runs) if all(sides) else 0
    if shortest < MIN_COMPARED_STEPS or (source == "trace" and with_guessed_steps(reports)):
        return StepTimeChange(
            verdict="not measured",
            source=source,
            before=distributions[0],
            after=distributions[1],
            reason=_explain_missing(reports, sides),
        )
    paired = _has_paired_steps(sides)
    samples = [[_to_sample(run) for run in runs] for runs in sides]
    if any(len(runs) > 1 for runs in sides):
        result = difference_of_runs(*samples)
    else:
        result = difference(samples[0][0], samples[1][0], paired=paired) or welch_interval(
            samples[0][0], samples[1][0]
        )
    verdict: Verdict = "no difference"
    if result.low > 0 or result.high < 0:
        verdict = "slower" if result.low > 0 else "faster"
    base = result.before or 1.0
    low = max(result.low, -result.before)  # a step time is never negative
    return StepTimeChange(
        verdict=verdict,
        source=source,
        before=distributions[0],
        after=distributions[1],
        statistic=result.statistic,
        method=result.method,
        paired=paired,
        between_runs=result.between_runs,
        level=CONFIDENCE_LEVEL,
        difference_ns=result.amount,
        low_ns=low,
        high_ns=result.high,
        share=result.amount / base,
        share_low=low / base,
        share_high=result.high / base,
        notes=_list_notes(source, sides, reports),
    )


def common_steps(before: Report, after: Report) -> tuple[str, tuple[Runs, Runs]]:
    """Return the first source of steps that both have (``""`` if none), and the runs of both."""
    source: Source
    for source in ("recorder", "trace"):
        sides = (_select_runs(before, source), _select_runs(after, source))
        if (
            all(sides)
            and min(len(run.durations_ns) for runs in sides for run in runs) >= MIN_COMPARED_STEPS
        ):
            return source, sides
    return ("trace" if all(sides) else ""), sides


def with_guessed_steps(reports: Sequence[Report]) -> list[Report]:
    """Return the reports whose steps are repetitions of device work that nothing marks."""
    return [report for report in reports if report.scope.step_source in GUESSED_STEP_SOURCES]


def _select_runs(report: Report, source: Source) -> Runs:
    return [steps for steps in report.step_durations if steps.source == source]


def _to_sample(steps: StepDurations) -> Sample:
    return np.array(steps.durations_ns, dtype=np.float64)


def _has_paired_steps(sides: tuple[Runs, Runs]) -> bool:
    """Return whether each side is one run, with steps of the same numbers."""
    if any(len(runs) != 1 for runs in sides):
        return False
    before, after = sides[0][0], sides[1][0]
    return before.numbers == after.numbers


def _describe_distribution(runs: Runs) -> Distribution | None:
    durations = [ns for run in runs for ns in run.durations_ns]
    if not durations:
        return None
    sample = np.array(durations, dtype=np.float64)
    low, middle, high = np.quantile(sample, [0.1, 0.5, 0.9])
    listed_count = min(len(sample), MAX_SHOWN_DURATIONS)
    rows = np.linspace(0, len(sample) - 1, listed_count).round().astype(int)
    return Distribution(
        count=len(sample),
        mean_ns=float(sample.mean()),
        median_ns=float(middle),
        p10_ns=float(low),
        p90_ns=float(high),
        min_ns=float(sample.min()),
        max_ns=float(sample.max()),
        autocorrelation=autocorrelation(sample),
        durations_ns=[durations[row] for row in rows],
        runs=len(runs),
    )


def _explain_missing(reports: Sequence[Report], sides: tuple[Runs, Runs]) -> str:
    """Say why step times are not compared."""
    if guesses := with_guessed_steps(reports):
        advice = mark_steps_of(guesses[0])
        return f"nothing marks the steps, and what repeats may be a part of one; {advice}"
    unmarked, example = [], reports[0]
    for side, report in zip(SIDE_NAMES, reports, strict=True):
        if report.scope.step_source == "whole trace":
            unmarked.append(side)
            example = report
        elif not report.step_durations and report.scope.steps_used:
            return f"the report {side} does not contain its steps; analyze the trace again"
    if unmarked:
        advice = mark_steps_of(example)
        return f"no steps are marked in the trace {' and '.join(unmarked)}; {advice}"
    sources = [{steps.source for steps in report.step_durations} for report in reports]
    if all(sources) and not sources[0] & sources[1]:
        return "profiled steps on one side, unprofiled ones on the other; record both the same way"
    counts = t.list_names(str(min((len(r.durations_ns) for r in s), default=0)) for s in sides)
    return f"{counts} steps are too few to know their spread; record at least {MIN_COMPARED_STEPS}"


def _list_notes(source: str, sides: tuple[Runs, Runs], reports: Sequence[Report]) -> list[str]:
    result = []
    if source == "recorder":
        result.append(
            "Steps that no profiler slowed, without warm-up and evaluations: the run's real speed."
        )
    else:
        result.append(
            "These steps were profiled, which slows the host, most of all with many small "
            "operators. Runs of advisor record are compared by their unprofiled steps."
        )
        result += _note_other_options(reports)
    samples = [_to_sample(run) for runs in sides for run in runs]
    if min(map(len, samples)) < MIN_DEPENDENT_STEPS:
        result.append(
            "So few steps do not show how one depends on the next: the interval is for "
            "independent steps, and the true one is wider."
        )
    elif (missing := MIN_FOR_MEDIAN - min(map(len, samples))) > 0:
        highest = max((autocorrelation(sample) or 0.0) for sample in samples)
        suffix = f" (correlation up to {highest:.2f})" if highest >= MIN_CORRELATION else ""
        result.append(
            f"Few steps: where one depends on the next{suffix}, the true interval is wider. "
            f"Record {t.count_noun(missing, 'more step')}: {MIN_FOR_MEDIAN} are needed after the "
            "warm-up."
        )
    if all(len(runs) == 1 for runs in sides):
        result.append("One run each: another run of the same program may differ by more.")
    else:
        counts = t.list_names(t.count_noun(len(runs), "run") for runs in sides)
        result.append(f"{counts}: the interval includes how much runs of one program differ.")
    return result


def _note_other_options(reports: Sequence[Report]) -> list[str]:
    names = {"with_stack": "stacks", "record_shapes": "shapes", "profile_memory": "memory"}
    inputs: list[Input] = [report.inputs[0] for report in reports if report.inputs]
    result = []
    for field, option_noun in names.items() if len(inputs) == len(reports) else ():
        sides = [getattr(trace_input, field) for trace_input in inputs]
        if None not in sides and sides[0] != sides[1]:
            side = SIDE_NAMES[0] if sides[0] else SIDE_NAMES[1]
            result.append(
                f"Only the trace {side} was recorded with {option_noun}, which slows its host: "
                "record both the same way."
            )
    return result
