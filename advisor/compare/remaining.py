"""Whether a finding that one report lacks is gone from the run, or only no longer told.

Rules speak up from a share of the step on, so that a finding falls silent when the step grows
around it, and speaks up when the step shrinks. What it would change tells which: its Edits name
events by what they are, and so can be priced, and looked for, in the other run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from advisor.advise.worth import MIN_GAIN_SHARE
from advisor.replay.selection import selected_gaps, selected_gpu, selected_host

if TYPE_CHECKING:
    from advisor.advise.engine import Examined
    from advisor.core.finding import Edit, Finding
    from advisor.measure import Analysis

KEPT = 0.6
"""Share of a finding's gain, or of the time in the events it would change, from which on it is
still there. Fixes that are worth the name take away more than 40 %."""
_KEEP_THEIR_EVENTS = ("overlap", "asynchronous", "resize")
"""Operations after which the events are still there, as they should be."""


class Remaining(NamedTuple):
    """A finding is in a run whose report does not have it."""

    gain_ns: int | None
    """What it is worth there, ns a step."""
    why: str
    """Why it is not told."""


def find_remaining(finding: Finding, own: Examined, other: Examined) -> Remaining | None:
    """Look for a finding of one run in the other; ``None``: it is not there, or cannot be told."""
    impact = finding.impact
    if impact is None or impact.gain_ns is None or impact.currency != "step_time":
        return None
    if not finding.edits or finding.other_rank or impact.gain_ns <= 0:
        return None
    if any(edit.select.correlation for edit in finding.edits):
        return None  # ids of one trace say nothing in another
    if own.pricing.method == other.pricing.method:
        gain = other.pricing.price(finding).gain
        if gain >= KEPT * impact.gain_ns:
            return Remaining(round(gain), _why_silent(gain, other.main.step_ns))
    edits = [edit for edit in finding.edits if edit.op not in _KEEP_THEIR_EVENTS]
    here = sum(_time(own.main, edit) for edit in edits)
    there = sum(_time(other.main, edit) for edit in edits)
    if here > 0 and there >= KEPT * here:
        return Remaining(None, "still there, but the step does not wait for it")
    return None


def _why_silent(gain: float, step_ns: float) -> str:
    """Why a rule does not speak of what is worth that much."""
    if gain < MIN_GAIN_SHARE * step_ns:
        return "worth too small a share of the step to be told"
    return f"worth {gain / step_ns:.0%} of the step, but below what the rule looks for"


def _time(a: Analysis, edit: Edit) -> float:
    """Time in the events that an edit selects, ns a step."""
    select = edit.select
    if select.on == "gpu":
        times = a.trace.gpu["dur"].to_numpy()[selected_gpu(a, select)]
    elif select.on == "gap":
        times = a.gaps["dur"].to_numpy()[selected_gaps(a, select)]
    else:
        times = a.trace.cpu["dur"].to_numpy()[selected_host(a, select)]
    return float(times.sum()) / a.step_count
