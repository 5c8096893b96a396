"""What a Comparison comes to, in a sentence."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from advisor.core import text as t
from advisor.core.finding import REPEATED

if TYPE_CHECKING:
    from advisor.compare.data import Comparison, StepTimes


def verdict(comparison: Comparison) -> str:
    """One sentence, after one for each run that crashed."""
    steps = comparison.steps
    if steps.difference_ns is None or steps.share is None:
        text = f"Step times are not compared: {steps.reason}"
    else:
        pair = (
            f"{t.format_duration(_center(steps, 'before'))} → "
            f"{t.format_duration(_center(steps, 'after'))}"
        )
        if steps.verdict == "no difference":
            text = f"No difference in step time can be shown: {pair} ({interval(steps)})"
        else:
            amount = t.format_share(abs(steps.share))
            part = "What repeats is " if repeated(comparison) else ""
            how = steps.verdict if part else steps.verdict.capitalize()
            text = f"{part}{how} by {amount}: {pair} ({interval(steps)})"
    counts = Counter(item.change for item in comparison.findings)
    parts = [f"{counts[kind]} {kind}" for kind in ("fixed", "new", "remaining") if counts[kind]]
    text = f"{text}; findings: {', '.join(parts)}." if parts else f"{text}."
    return " ".join([*_crashes(comparison), text])


def repeated(comparison: Comparison) -> bool:
    """The steps are periods of the device's work that nothing marks, perhaps parts of a step."""
    return REPEATED in (comparison.before.step_source, comparison.after.step_source)


def _crashes(comparison: Comparison) -> list[str]:
    """What an exception ended comes first: such a run is no match for one that reached its end."""
    sides = (("before", comparison.before), ("after", comparison.after))
    return [
        f"The run {which} crashed: {_inside(side.crash)}" for which, side in sides if side.crash
    ]


def _inside(sentence: str) -> str:
    """A sentence that others come before."""
    return sentence[0].lower() + sentence[1:]


def whole(comparison: Comparison) -> bool:
    """Neither has marked steps: figures are of the whole recordings."""
    sources = {comparison.before.step_source, comparison.after.step_source}
    return sources == {"whole trace"}


def per(comparison: Comparison) -> str:
    """What amounts are of, after a figure: `` a step``, or nothing where they are totals."""
    return "" if whole(comparison) else " a step"


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
