"""Gate for CI: a comparison that decides whether a run is slower than its baseline."""

from collections.abc import Sequence

from msgspec.structs import replace

from advisor.advise.program_wording import mark_steps_of
from advisor.compare.compare import compare_reports, describe_side, find_other_programs
from advisor.compare.comparison import (
    Amount,
    Bounds,
    Comparison,
    Decision,
    GateAnswer,
    StepTimeChange,
)
from advisor.compare.comparison_text import describe_other_load
from advisor.compare.statistics import MIN_DEPENDENT_STEPS
from advisor.compare.steps import with_guessed_steps
from advisor.core.errors import AdvisorError
from advisor.core.report import Report
from advisor.core.text import lower_first

TOO_FEW_STEPS = f"steps cannot tell slower from noise; record at least {MIN_DEPENDENT_STEPS}"


def compare_with_baseline(
    before: Report, after: Report, bounds: Bounds | None = None
) -> Comparison:
    """Compare a run with its baseline and decide.

    Raises AdvisorError if they are not comparable: other programs, GPUs, batch sizes or ranks,
    profiled steps on one side only, or too few steps."""
    refuse_incomparable(before, after)
    check_steps(before, "the baseline")
    check_steps(after, "the run")
    comparison = compare_reports(before, after)
    steps = comparison.steps
    if steps.before is None or steps.after is None or steps.difference_ns is None:
        raise AdvisorError(steps.reason)
    if min(steps.before.count, steps.after.count) < MIN_DEPENDENT_STEPS:
        raise AdvisorError(f"{steps.before.count} and {steps.after.count} {TOO_FEW_STEPS}")
    comparison.decision = decide(comparison, bounds or Bounds())
    return comparison


def build_baseline(reports: Sequence[Report], paths: Sequence[str]) -> Report:
    """Return the first run's report with the step durations of all runs of a program. Raises
    AdvisorError if a run has too few steps, or is not comparable with the first."""
    first = reports[0]
    steps = []
    for number, (report, path) in enumerate(zip(reports, paths, strict=True)):
        check_steps(report, path)
        if number:
            if report.step_durations == first.step_durations:
                raise AdvisorError(f"{path}: has the same steps as {paths[0]}; give another run")
            try:
                refuse_incomparable(first, report)
            except AdvisorError as error:
                raise AdvisorError(f"{path}: {error}") from None
        steps += [replace(each, run=number) for each in report.step_durations]
    shared = set.intersection(*({each.source for each in r.step_durations} for r in reports))
    if not shared:
        raise AdvisorError(
            "some runs have profiled steps only, others unprofiled ones: record all the same way"
        )
    return replace(first, step_durations=[each for each in steps if each.source in shared])


def check_steps(report: Report, name: str) -> None:
    """Raise AdvisorError if the report has too few steps for a gate."""
    counts = [len(steps.durations_ns) for steps in report.step_durations]
    if with_guessed_steps([report]) and not any(
        s.source == "recorder" for s in report.step_durations
    ):
        raise AdvisorError(f"{name}: nothing marks the steps; {mark_steps_of(report)}")
    if max(counts, default=0) >= MIN_DEPENDENT_STEPS:
        return
    if report.scope.step_source == "whole trace":
        raise AdvisorError(f"{name}: no steps are marked; {mark_steps_of(report)}")
    raise AdvisorError(f"{name}: {max(counts, default=0)} {TOO_FEW_STEPS}")


def refuse_incomparable(baseline: Report, run: Report) -> None:
    """Raise AdvisorError if a run and its baseline are not comparable."""
    before, after = describe_side(baseline), describe_side(run)
    advice = "save the baseline again"
    if why := find_other_programs(baseline, run, strict=True):
        raise AdvisorError(f"{lower_first(why)}: these may be different programs; {advice}")
    if baseline.operator_names and run.operator_names and bool(baseline.time) != bool(run.time):
        places = ("a GPU", "the CPU") if baseline.time else ("the CPU", "a GPU")
        raise AdvisorError(
            f"the baseline ran on {places[0]} and the run on {places[1]}: keep a baseline for each"
        )
    devices = {before.device_name, after.device_name} - {None}
    if len(devices) > 1:
        raise AdvisorError(
            f"the baseline ran on {before.device_name} and the run on {after.device_name}: keep a "
            "baseline for each GPU"
        )
    if None not in (before.samples, after.samples) and before.samples != after.samples:
        raise AdvisorError(
            f"the baseline has {before.samples} samples per step and the run {after.samples}: "
            f"{advice}"
        )
    if before.ranks != after.ranks:
        raise AdvisorError(
            f"the baseline has {before.ranks} ranks and the run {after.ranks}: {advice}"
        )


def decide(c: Comparison, bounds: Bounds) -> Decision:
    """Decide whether a comparison with measured steps is within its bounds.

    Raises AdvisorError if a bound applies to a figure that was not measured."""
    low, high, share = c.steps.share_low, c.steps.share_high, c.steps.share
    if low is None or high is None or share is None:
        raise AdvisorError(f"step times are not compared: {c.steps.reason}")
    answer: GateAnswer = "not shown"
    if low > bounds.slower:
        answer = "regression"
    elif high <= bounds.slower:
        answer = "passed"
    grown, memory = _check_memory(c.find_amount("memory peak"), bounds)
    other_load = describe_other_load(c)
    return Decision(
        answer="regression" if grown else answer,
        failed=answer == "regression" or grown or (bounds.strict and answer == "not shown"),
        reasons=[
            _explain_step_time(answer, c.steps, bounds, is_busy=bool(other_load)),
            *other_load,
            *memory,
        ],
        bounds=bounds,
        # an end of -100% is a limit, not half of the interval
        detectable=bounds.slower + (share - low if low > -1 else max(share - low, high - share)),
    )


def _explain_step_time(
    answer: GateAnswer, steps: StepTimeChange, bounds: Bounds, *, is_busy: bool
) -> str:
    """Explain the answer. ``is_busy``: other programs took the cores, and a sentence says so."""
    low, high = steps.share_low or 0.0, steps.share_high or 0.0
    if max(abs(low), abs(high)) < 0.0005:  # 0.0% on both sides
        change = "no difference"
    elif low < 0 < high:
        change = f"between {-low:.1%} less and {high:.1%} more time"
    else:
        ends = sorted((abs(low), abs(high)))
        change = f"{ends[0]:.1%} to {ends[1]:.1%} {'less' if low < 0 else 'more'} time"
    allowed = f"{change}; up to {bounds.slower:.1%} more is allowed"
    if answer != "not shown":
        return allowed
    advice = "Record more steps"
    if is_busy:
        advice = ""
    elif steps.between_runs:
        advice = "The runs differ: save more of them, or record on an idle machine"
    drop = "" if not bounds.strict else ", or drop --strict" if advice else "Drop --strict"
    return f"{allowed}. {advice}{drop}" if advice or drop else allowed


def _check_memory(peak: Amount | None, bounds: Bounds) -> tuple[bool, list[str]]:
    """Return whether the memory peak is a regression, and the reason in a list."""
    if bounds.memory is None:
        return False, []
    if peak is None or not peak.before or peak.after is None:
        raise AdvisorError("--max-memory: the memory peak was not measured on both sides")
    growth = peak.after / peak.before - 1
    has_grown = growth > bounds.memory
    position = "above" if has_grown else "within"
    return has_grown, [f"memory peak {growth:+.1%}: {position} the limit of {bounds.memory:+.1%}"]
