"""What findings are worth: which are priced, by how much their price is believed, what is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from advisor.advise.holes import holes
from advisor.advise.pricing import BoundPricer, Price, Pricer
from advisor.core import text as t
from advisor.core.finding import Impact
from advisor.replay.calibration import Band, widened_by_rule, worst_case

if TYPE_CHECKING:
    from advisor.core.finding import Finding, Severity
    from advisor.measure import Analysis

MIN_GAIN_SHARE = 0.01
"""Findings worth less than this share of the step are notes: measurement noise between two
profiled runs is of that order."""
CRITICAL_SHARE, WARNING_SHARE = 0.20, 0.05
"""XProf's bands for input (5 and 20 % of the step), used for every cause alike."""
UNSEEN_SHARE = 0.05
"""Gains from this share of the step up may meet the pace of loader workers that keep up."""


def price(finding: Finding, a: Analysis, pricing: Pricer) -> Finding:
    """Give a finding its worth: the rule's own (memory, risk), else what its edits save. A rule
    that names a change of one rank may give a worth that stands in where that rank cannot be
    replayed with the others."""
    if finding.impact is not None and finding.impact.currency == "step_time" and finding.edits:
        if all(edit.rank in pricing.ranks for edit in finding.edits):
            finding.impact = None
        else:
            finding.edits = []
    if finding.impact is not None or not finding.edits:
        if finding.impact is None:
            finding.impact = Impact(
                currency="unpriced", reason="the rule names no change of the step's events"
            )
        if finding.impact.currency == "step_time":
            finding.severity = severity(finding.impact.share)
        return finding
    if why := holes(a):
        finding.impact = Impact(currency="unpriced", reason=why)
        finding.edits = []
        return finding
    saved = pricing.price(finding)
    if finding.validation == "synthetic":
        saved = Price(saved.gain, *worst_case(saved.low, saved.high, a.step_ns))
    device = "" if a.device is None or a.device.name is None else a.device.name
    own = Band(saved.low, saved.high)
    band, told = widened_by_rule(finding.rule, device, saved.gain, own, a.step_ns)
    if told:
        saved = Price(saved.gain, *band)
        finding.confidence_notes.append(f"{told}, and the range allows for that")
    finding.impact = step_worth(saved, pricing.method, a)
    finding.severity = severity(finding.impact.share)
    if pricing.unseen_loader and (finding.impact.share or 0.0) >= UNSEEN_SHARE:
        finding.confidence *= 0.85
        finding.confidence_notes.append(
            "the loader's workers keep up with these steps; whether they do with shorter ones is "
            "not in the trace"
        )
    return finding


def step_worth(saved: Price, method: str, a: Analysis) -> Impact:
    """Time saved a step, with its share of the step."""
    return Impact(
        currency="step_time",
        gain_ns=round(saved.gain),
        low_ns=round(saved.low),
        high_ns=round(saved.high),
        share=saved.gain / a.step_ns if a.step_ns else None,
        method=method,
        per=a.per,
    )


def severity(share: float | None) -> Severity:
    """critical, warning or info, by the share of the step that the fix is worth."""
    if share is None or share < WARNING_SHARE:
        return "info"
    return "critical" if share >= CRITICAL_SHARE else "warning"


def may_be_nothing(finding: Finding, floor: float) -> bool:
    """Not proven, and by its own band perhaps worth nothing: no ground to call a run ill."""
    impact = finding.impact
    return (
        finding.validation == "synthetic"
        and impact is not None
        and impact.currency == "step_time"
        and (impact.low_ns or 0) < floor
    )


def worthless(findings: list[Finding], pricing: Pricer, a: Analysis, floor: float) -> list[Finding]:
    """Those that have the device waiting for ``floor`` (ns a step) or more by exposed time, with
    what the step hangs on instead. The others are of no account by either reckoning."""
    path = pricing.critical_path() if findings else {}
    if not path:
        return []
    told = []
    bound = BoundPricer(a)
    whole = sum(path.values()) or 1.0
    own = a.trace.meta.framework
    hangs_on = " and ".join(
        f"{t.path_label(name, own)} ({ns / whole:.0%})" for name, ns in list(path.items())[:2]
    )
    unit = "the recording" if a.steps.source == "whole trace" else "each step"
    for finding in findings:
        if finding.other_rank or not finding.edits:
            continue
        exposed = bound.price(finding).gain
        if exposed >= floor:
            finding.summary += (
                f" Priced at nothing: {exposed / 1e6:.1f} ms of {unit} are exposed to it, but a "
                f"replay without it takes as long, for then it hangs on {hangs_on} as before."
            )
            finding.impact = Impact(currency="unpriced", reason="a replay prices it at nothing")
            told.append(finding)
    return told
