"""What may still be said of a window whose device records were lost in part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from advisor.core.finding import SkippedCheck

if TYPE_CHECKING:
    from advisor.core.finding import Outcome, Rule
    from advisor.measure import Analysis


def holes(a: Analysis) -> str:
    """Why nothing is concluded from idle time, and nothing priced; empty: no reason."""
    if a.lost.told:
        return (
            f"the records of {a.lost.lost:,} of {a.lost.launches:,} launched kernels are lost, "
            "and what looks idle may be one of them"
        )
    if a.device_id is not None and not (a.trace.gpu["kind"] == "kernel").any():
        return "the trace holds copies but no kernel, so when the device computes is not known"
    return ""


def without_holes(rule: Rule, outcomes: list[Outcome], why: str, *, of_idle: bool) -> list[Outcome]:
    """A rule's outcomes where ``holes`` says ``why``: one that looked at idle or exposed time
    (``of_idle``) and had something to say abstains by name."""
    if not of_idle or not outcomes:
        return outcomes
    name = rule.title or rule.id
    return [
        SkippedCheck(
            what=name[:1].lower() + name[1:],
            why=why,
            record="a shorter window, so that the profiler's buffers hold it, with all activities",
        )
    ]
