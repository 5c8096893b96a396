"""Two runs to a Comparison."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import advisor
from advisor.advice.engine import Examined, Options, examine
from advisor.advice.pricing import REPLAY
from advisor.compare.data import Amount, Comparison, Realised, Side, StepTimes
from advisor.compare.findings import compare_findings
from advisor.compare.steps import compare_steps
from advisor.compare.still import Still, still_there
from advisor.compare.work import by_shape, compare_kernels, compare_work, matched
from advisor.model import Finding
from advisor.report import text as t
from advisor.trace import Run

if TYPE_CHECKING:
    from advisor.rundir import RankRecord

MIN_MATCHED = 0.2
"""Share of the device time in work that both have, below which the programs are said to differ."""

CLOSE = 0.1
"""Share by which gain and prediction may differ and still agree, however narrow both bands are: a
replay that misses the step by that much still prices findings (``pricing.MAX_STEP_ERROR``)."""

Source = str | Path | Sequence[str | Path] | Run


def compare(before: Source, after: Source, options: Options | None = None) -> Comparison:
    """Read and analyse two runs and say what differs. Raises AdvisorError as ``analyze`` does."""
    return compare_examined(examine(before, options), examine(after, options))


def compare_examined(before: Examined, after: Examined) -> Comparison:
    """Compare two runs that were analysed already; of several ranks, the reported one."""
    a, b = before.main, after.main
    sides = [side(before), side(after)]
    steps = compare_steps(a, b)
    names = [one.device_name for one in sides]
    same_device = None if None in names else names[0] == names[1]

    def search(finding: Finding, of_before: bool) -> Still | None:
        own, other = (before, after) if of_before else (after, before)
        return still_there(finding, own, other)

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
        amounts=amounts(before, after),
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
    )


def _samples(record: RankRecord | None) -> int | None:
    """Samples of most steps; ``None``: not recorded."""
    if record is None:
        return None
    counts = Counter(s.samples * max(s.micro, 1) for s in record.steps if s.samples is not None)
    return counts.most_common(1)[0][0] if counts else None


# -- the breakdown ------------------------------------------------------------------------------


def amounts(before: Examined, after: Examined) -> list[Amount]:
    """Every figure of the two reports, side by side. What one report lists and the other does not
    is 0 there when the whole list was measured, else not measured."""
    left, right = before.report, after.report
    found = []
    for group, attribute in (
        ("time", "time"),
        ("idle", "idle"),
        ("host", "host"),
        ("kernels", "families"),
    ):
        one, other = (
            {getattr(part, "name", getattr(part, "cause", "")): part.ns for part in items}
            for items in (getattr(left, attribute), getattr(right, attribute))
        )
        # an empty list of idle causes beside device time means that there was no idle time
        measured = [bool(one), bool(other)]
        if attribute == "idle":
            measured = [bool(left.time), bool(right.time)]
        for name in dict.fromkeys((*one, *other)):
            values = [
                side.get(name, 0.0 if there else None)
                for side, there in zip((one, other), measured, strict=True)
            ]
            found.append(
                Amount(group=group, name=name, unit="ns", before=values[0], after=values[1])
            )
    figures = (
        ("GPU busy", "share", "busy_share"),
        ("communication", "ns", "communication_ns"),
        ("communication hidden", "share", "communication_overlap"),
        ("MFU", "share", "mfu"),
        ("memory peak", "bytes", "memory_peak_bytes"),
    )
    for name, unit, field in figures:
        values = [getattr(left, field), getattr(right, field)]
        if values != [None, None]:
            found.append(
                Amount(group="figures", name=name, unit=unit, before=values[0], after=values[1])
            )
    return found


# -- predicted and realised ---------------------------------------------------------------------


def realised(findings: list[Finding], before: Examined, c: Comparison) -> Realised:
    """What the findings that were fixed promised together, and what the step gained."""
    steps = c.steps
    fixed = [
        finding
        for finding in findings
        if finding.edits
        and not finding.other_rank
        and finding.worth is not None
        and finding.worth.currency == "step_time"
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
    if "whole trace" in (one.step_source, other.step_source):
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
    if _other_program(c):
        found.append(
            f"Only {t.percent(c.matched)} of the device time is in operators and shapes that both "
            "have: these look like different programs."
        )
    if _other_batch(c):
        found.append(
            f"A step has {one.samples} samples before and {other.samples} after: compare time a "
            "sample, not time a step."
        )
    if one.ranks != other.ranks:
        found.append(f"{one.ranks} ranks before and {other.ranks} after; one of each is compared.")
    elif one.ranks > 1:
        found.append(f"One of {one.ranks} ranks is compared (rank {one.rank}); --rank chooses.")
    if not by_shape(before.main, after.main) and (one.record_shapes or other.record_shapes):
        found.append("Only one side has shapes: work is matched by operator alone.")
    for which, part in (("before", one), ("after", other)):
        if part.truncated:
            found.append(f"The trace {which} is truncated.")
    return found


def verdict(comparison: Comparison) -> str:
    """One sentence."""
    steps = comparison.steps
    if steps.difference_ns is None or steps.share is None:
        text = f"Step times are not compared: {steps.reason}"
    else:
        pair = f"{t.time(_center(steps, 'before'))} → {t.time(_center(steps, 'after'))}"
        if steps.verdict == "no difference":
            text = f"No difference in step time can be shown: {pair} ({interval(steps)})"
        else:
            amount = t.percent(abs(steps.share))
            text = f"{steps.verdict.capitalize()} by {amount}: {pair} ({interval(steps)})"
    counts = Counter(item.change for item in comparison.findings)
    parts = [f"{counts[kind]} {kind}" for kind in ("fixed", "new", "remaining") if counts[kind]]
    return f"{text}; findings: {', '.join(parts)}." if parts else f"{text}."


def _center(steps: StepTimes, which: str) -> float | None:
    side = getattr(steps, which)
    return None if side is None else side.mean_ns if steps.statistic == "mean" else side.median_ns


def interval(steps: StepTimes) -> str:
    """The interval of the difference: ``95% interval -2.1% to +0.3%``."""
    if steps.share_low is None or steps.share_high is None:
        return t.NOT_MEASURED
    return f"{steps.level:.0%} interval {signed(steps.share_low)} to {signed(steps.share_high)}"


def signed(share: float | None) -> str:
    """A relative difference with its sign: ``+12.3%``."""
    if share is None:
        return t.NOT_MEASURED
    text = f"{share:+.1%}" if abs(share) < 10 else f"{share:+,.0%}"
    return text.replace("-", "−")
