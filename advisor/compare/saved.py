"""Two reports to a Comparison: what can be said of runs of which a saved report is all there is.

A report holds how many steps there were, their mean, median, shortest and longest, and not each of
them. That bounds how far they are spread: steps between a and b with the mean m have a variance of
(b - m)(m - a) at most (R. Bhatia and C. Davis, American Mathematical Monthly 107, 2000), so that
the interval of the difference is at least as wide as the one of the steps themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import advisor
from advisor.compare.amounts import amounts
from advisor.compare.data import (
    Comparison,
    Distribution,
    FindingChange,
    Realised,
    Side,
    StepTimes,
    Verdict,
)
from advisor.compare.findings import compare_findings
from advisor.compare.statistics import LEVEL, MIN_STEPS, t_quantile
from advisor.compare.steps import PERIODS
from advisor.compare.verdict import repeated, verdict
from advisor.core import text as t
from advisor.core.report import Report

METHOD = "Welch's t interval for the widest spread that the shortest and the longest step allow"
UNSEEN = (
    "in a saved report nothing can be looked for: whether it is gone or too small to be told "
    "is not known"
)


def compare_reports(
    before: Report, after: Report, paths: Sequence[str] = ("", ""), saved: Sequence[int] = (0, 1)
) -> Comparison:
    """Compare two runs by their reports. ``paths``: what to call them, else the first trace of
    each. ``saved``: which of the two, 0 and 1, is all there is of its run, for the limits that are
    told."""
    sides = [_side(report, path) for report, path in zip((before, after), paths, strict=True)]
    names = [one.device_name for one in sides]
    comparison = Comparison(
        version=advisor.__version__,
        verdict="",
        before=sides[0],
        after=sides[1],
        same_device=None if None in names else names[0] == names[1],
        steps=_steps(before, after),
        amounts=amounts(before, after),
        findings=[_seen(change) for change, _ in compare_findings(before, after)],
        realised=Realised(rules=[], reason="there is no trace to replay"),
    )
    comparison.limits = _limits(before, after, comparison, saved)
    comparison.verdict = verdict(comparison)
    return comparison


def _side(report: Report, path: str) -> Side:
    first = report.inputs[0] if report.inputs else None
    scope = report.scope
    return Side(
        path=path or (first.path if first is not None else ""),
        rank=scope.rank,
        window=first.window if first is not None else 0,
        ranks=len(report.ranks.lines) if report.ranks is not None else 1,
        status=report.status,
        verdict=report.verdict,
        device_name=scope.device_name,
        step_source=scope.step_source,
        steps_used=scope.steps_used,
        step_ns=scope.step_ns,
        record_shapes=None,
        with_stack=None,
        profile_memory=None,
        truncated=any(item.truncated for item in report.inputs),
        crash=t.describe_crashes(report.crashes),
        framework=scope.framework,
    )


def _seen(change: FindingChange) -> FindingChange:
    """A finding of one report alone is neither fixed nor new: it may be there and fall silent."""
    if change.change == "fixed" and not change.reason:
        change.change, change.reason = "unchecked", UNSEEN
    elif change.change == "new":
        change.change, change.reason = "unchecked before", UNSEEN
    return change


# -- step times ---------------------------------------------------------------------------------


def _steps(before: Report, after: Report) -> StepTimes:
    """The difference of the means of the measured steps, with the widest interval it can have."""
    reports = (before, after)
    shapes = [_distribution(report) for report in reports]
    one, other = shapes
    if one is None or other is None or min(one.count, other.count) < MIN_STEPS:
        return StepTimes(
            verdict="not measured", source="", before=one, after=other, reason=_reason(reports)
        )
    spreads = [_variance(shape) / shape.count for shape in (one, other)]
    # the fewest degrees of freedom: those of the smaller side alone
    reach = math.sqrt(sum(spreads)) * t_quantile(0.5 + LEVEL / 2, min(one.count, other.count) - 1.0)
    difference = other.mean_ns - one.mean_ns
    low, high = difference - reach, difference + reach
    found: Verdict = "slower" if low > 0 else "faster" if high < 0 else "no difference"
    base = one.mean_ns or 1.0
    recorded = all(report.scope.step_source == "record" for report in reports)
    return StepTimes(
        verdict=found,
        source="recorder" if recorded else "trace",
        before=one,
        after=other,
        statistic="mean",
        method=METHOD,
        level=LEVEL,
        difference_ns=difference,
        low_ns=low,
        high_ns=high,
        share=difference / base,
        share_low=low / base,
        share_high=high / base,
        notes=_notes(before, after),
    )


def _distribution(report: Report) -> Distribution | None:
    scope = report.scope
    if scope.step_source == "whole trace" or not scope.steps_used:
        return None
    return Distribution(
        count=scope.steps_used,
        mean_ns=scope.step_ns,
        median_ns=scope.step_median_ns,
        p10_ns=None,
        p90_ns=None,
        min_ns=float(scope.step_min_ns),
        max_ns=float(scope.step_max_ns),
        autocorrelation=None,
        durations_ns=[],
    )


def _variance(steps: Distribution) -> float:
    """The largest that the sample can have, ns²."""
    widest = max(0.0, steps.max_ns - steps.mean_ns) * max(0.0, steps.mean_ns - steps.min_ns)
    return widest * steps.count / (steps.count - 1)


def _reason(reports: Sequence[Report]) -> str:
    for which, report in zip(("before", "after"), reports, strict=True):
        if report.scope.step_source == "whole trace":
            return f"no steps are marked {which}"
    counts = " and ".join(str(report.scope.steps_used) for report in reports)
    return f"{counts} steps are too few to know their spread; record at least {MIN_STEPS}"


def _notes(before: Report, after: Report) -> list[str]:
    found = [
        "A saved report does not hold each step: the interval is the widest that its figures "
        "allow. Compare the traces or runs for a closer one."
    ]
    medians = [
        report.recorded.median_ns if report.recorded is not None else None
        for report in (before, after)
    ]
    if medians[0] is not None and medians[1] is not None:
        found.append(
            "Unprofiled steps, as the recorder measured them: median "
            f"{t.format_duration(medians[0])} before "
            f"and {t.format_duration(medians[1])} after; reports do not hold how far they are "
            "spread, so no "
            "interval is given for these."
        )
    return found


# -- limits -------------------------------------------------------------------------------------


def _limits(before: Report, after: Report, c: Comparison, saved: Sequence[int]) -> list[str]:
    which = "both runs" if len(saved) > 1 else f"the run {('before', 'after')[saved[0]]}"
    found = [
        f"Of {which} there is only a saved report: device work by operator and kernel, and "
        "what fixes were predicted to gain, are not compared, and findings of one side alone are "
        "not told to be fixed or new."
    ]
    if before == after:
        found.append("Both are the same report.")
    if c.same_device is False:
        found.append(
            f"The GPUs differ ({c.before.device_name} and {c.after.device_name}): what became "
            "faster or slower need not be the program."
        )
    if repeated(c):
        found.append(PERIODS)
    if c.before.step_source != c.after.step_source:
        found.append(
            f"A step is taken to be {c.before.step_source} before and {c.after.step_source} after."
        )
    if "record" in (c.before.step_source, c.after.step_source) and (
        c.before.step_source != c.after.step_source
    ):
        found.append("The profiler slowed the steps of one side only.")
    if c.before.ranks != c.after.ranks:
        found.append(
            f"{t.count_noun(c.before.ranks, 'rank')} before and {c.after.ranks} after; one is "
            "compared."
        )
    found += [
        f"The trace {name} is truncated."
        for name, side in (("before", c.before), ("after", c.after))
        if side.truncated
    ]
    return found
