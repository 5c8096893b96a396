"""Two runs to a Comparison."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import advisor
from advisor.advise.engine import Examined, Options, examine
from advisor.advise.pricing import REPLAY
from advisor.compare.amounts import amounts
from advisor.compare.data import Comparison, Realised, Side
from advisor.compare.findings import compare_findings
from advisor.compare.remaining import Remaining, find_remaining
from advisor.compare.steps import PERIODS, compare_steps
from advisor.compare.verdict import repeated, verdict, whole
from advisor.compare.work import by_shape, compare_kernels, compare_work, matched
from advisor.core import text as t
from advisor.core.finding import Finding
from advisor.core.trace import Run

if TYPE_CHECKING:
    from advisor.core.report import Report
    from advisor.core.run_directory import RankRecord

MIN_MATCHED = 0.2
"""Share of the device time in work that both have, below which the programs are said to differ."""

CLOSE = 0.1
"""Share by which gain and prediction may differ and still agree, however narrow both bands are: a
replay that misses the step by that much still prices findings (``pricing.MAX_STEP_ERROR``)."""

RunOrFiles = str | Path | Sequence[str | Path] | Run


def compare(
    before: RunOrFiles | Report, after: RunOrFiles | Report, options: Options | None = None
) -> Comparison:
    """Read and analyse two runs and say what differs; of one that is given as a Report, as far as
    that tells. Raises AdvisorError as ``analyze`` does."""
    from advisor.core.report import Report

    if isinstance(before, Report) or isinstance(after, Report):
        from advisor.compare.saved import compare_reports

        reports = [
            given if isinstance(given, Report) else examine(given, options).report
            for given in (before, after)
        ]
        saved = [i for i, given in enumerate((before, after)) if isinstance(given, Report)]
        return compare_reports(reports[0], reports[1], saved=saved)
    return compare_examined(examine(before, options), examine(after, options))


def compare_examined(before: Examined, after: Examined) -> Comparison:
    """Compare two runs that were analysed already; of several ranks, the reported one."""
    a, b = before.main, after.main
    sides = [side(before), side(after)]
    steps = compare_steps(a, b)
    names = [one.device_name for one in sides]
    same_device = None if None in names else names[0] == names[1]

    def search(finding: Finding, of_before: bool) -> Remaining | None:
        own, other = (before, after) if of_before else (after, before)
        return find_remaining(finding, own, other)

    changes = compare_findings(before.report, after.report, search)
    work, work_rest = compare_work(a, b)
    kernels, kernels_rest = compare_kernels(a, b) if same_device is not False else ([], None)
    comparison = Comparison(
        version=advisor.__version__,
        verdict="",
        before=sides[0],
        after=sides[1],
        same_device=same_device,
        steps=steps,
        amounts=amounts(before.report, after.report),
        findings=[change for change, _ in changes],
        matched=matched(work, work_rest),
        realised=Realised(rules=[]),
        work=work,
        work_rest=work_rest,
        kernels=kernels,
        kernels_rest=kernels_rest,
    )
    fixed = [old for change, old in changes if change.change == "fixed" and old is not None]
    comparison.realised = realised(fixed, before, comparison)
    comparison.limits = limits(before, after, comparison)
    comparison.verdict = verdict(comparison)
    return comparison


def side(examined: Examined) -> Side:
    """What one of the two is."""
    report, a = examined.report, examined.main
    meta = a.trace.meta
    path = examined.run.path
    return Side(
        path=str(path) if path is not None else meta.path,
        rank=meta.rank,
        window=meta.window,
        ranks=len(examined.analyses),
        status=report.status,
        verdict=report.verdict,
        device_name=report.scope.device_name,
        step_source=report.scope.step_source,
        steps_used=report.scope.steps_used,
        step_ns=report.scope.step_ns,
        record_shapes=meta.record_shapes,
        with_stack=meta.with_stack,
        profile_memory=meta.profile_memory,
        truncated=meta.truncated,
        samples=_samples(a.record),
        crash=t.describe_crashes(report.crashes),
        framework=report.scope.framework,
    )


def _samples(record: RankRecord | None) -> int | None:
    """Samples of most steps; ``None``: not recorded."""
    if record is None:
        return None
    counts = Counter(s.samples * max(s.micro, 1) for s in record.steps if s.samples is not None)
    return counts.most_common(1)[0][0] if counts else None


# -- the breakdown ------------------------------------------------------------------------------


def realised(findings: list[Finding], before: Examined, c: Comparison) -> Realised:
    """What the findings that were fixed promised together, and what the step gained."""
    steps = c.steps
    fixed = [
        finding
        for finding in findings
        if finding.edits
        and not finding.other_rank
        and finding.impact is not None
        and finding.impact.currency == "step_time"
    ]
    found = Realised(rules=[f.rule for f in fixed])
    if not fixed:
        found.reason = "no finding with a price was fixed"
        return found
    edits = [edit for finding in fixed for edit in finding.edits]
    whole = Finding(rule="", title="", summary="", fix="", edits=edits)
    price = before.pricing.price(whole)
    found.predicted_ns, found.predicted_low_ns, found.predicted_high_ns = price
    found.method = before.pricing.method
    if steps.difference_ns is None or steps.low_ns is None or steps.high_ns is None:
        found.reason = f"step times are not compared: {steps.reason}"
        return found
    found.measured_ns = -steps.difference_ns
    found.measured_low_ns, found.measured_high_ns = -steps.high_ns, -steps.low_ns
    if c.same_device is False:
        found.reason = "the GPUs differ, and the prediction is for the one before"
    elif _other_program(c):
        found.reason = "the device work is another, and the prediction is for the one before"
    elif _other_batch(c):
        found.reason = "the batch sizes differ, and the prediction is for the one before"
    elif found.method == REPLAY:
        apart = abs(found.measured_ns - found.predicted_ns)
        found.agrees = apart <= CLOSE * max(found.measured_ns, found.predicted_ns) or (
            found.measured_low_ns <= found.predicted_high_ns
            and found.predicted_low_ns <= found.measured_high_ns
        )
    else:
        found.agrees = found.measured_low_ns <= found.predicted_high_ns
    return found


def _other_batch(c: Comparison) -> bool:
    return None not in (c.before.samples, c.after.samples) and c.before.samples != c.after.samples


def _other_program(c: Comparison) -> bool:
    return c.matched is not None and c.matched < MIN_MATCHED


# -- what it comes to ---------------------------------------------------------------------------


def limits(before: Examined, after: Examined, c: Comparison) -> list[str]:
    """What keeps the two from being comparable."""
    one, other, same_device = c.before, c.after, c.same_device
    found = []
    if one.path == other.path and one.rank == other.rank and one.window == other.window:
        found.append("Both are the same recording.")
    if same_device is False:
        found.append(
            f"The GPUs differ ({one.device_name} and {other.device_name}): what became faster or "
            "slower need not be the program. Work is matched by operator, not by kernel name."
        )
    elif same_device is None and (one.device_name or other.device_name):
        found.append("Not both traces tell the GPU's model: they may have run on different ones.")
    for which, report, else_ in (
        ("before", before.report, after.report),
        ("after", after.report, before.report),
    ):
        if not report.time and else_.time:
            found.append(f"No GPU work in the trace {which}: device time is not compared.")
    if whole(c):
        found.append(
            "No steps are marked in either: figures are totals of the whole recordings, and "
            "comparable only if both did the same amount of work."
        )
    elif "whole trace" in (one.step_source, other.step_source):
        unmarked = [
            name
            for name, part in (("before", one), ("after", other))
            if part.step_source == "whole trace"
        ]
        found.append(
            f"No steps are marked {' and '.join(unmarked)}: what is said to be a step's is the "
            "whole recording's there, and comparable only if both did the same amount of work."
        )
    elif one.step_source != other.step_source:
        found.append(
            f"A step is taken to be {one.step_source} before and {other.step_source} after."
        )
    if repeated(c):
        found.append(PERIODS)
    if _other_program(c):
        found.append(
            f"Only {t.format_share(c.matched)} of the device time is in operators and shapes that "
            "both "
            "have: these look like different programs."
        )
    if _other_batch(c):
        found.append(
            f"A step has {t.count_noun(one.samples or 0, 'sample')} before and {other.samples} "
            "after: "
            "compare time a sample, not time a step."
        )
    if one.ranks != other.ranks:
        found.append(
            f"{t.count_noun(one.ranks, 'rank')} before and {other.ranks} after; one of each is "
            "compared."
        )
    elif one.ranks > 1:
        found.append(f"One of {one.ranks} ranks is compared (rank {one.rank}); --rank chooses.")
    if not by_shape(before.main, after.main) and (one.record_shapes or other.record_shapes):
        found.append("Only one side has shapes: work is matched by operator alone.")
    for which, part in (("before", one), ("after", other)):
        if part.truncated:
            found.append(f"The trace {which} is truncated.")
    return found
