"""What is true of all findings of a rule is filled in, once it has found something."""

from __future__ import annotations

from typing import TYPE_CHECKING

from advisor.core.finding import REPEATED

if TYPE_CHECKING:
    from advisor.core.finding import Finding, Rule
    from advisor.measure import Analysis

UNPROVEN = 0.7
"""Of the confidence of a rule that was only ever seen right on synthetic examples; its band is as
wide as the worst prediction so far was wrong. Such findings compete with the others."""


def complete(finding: Finding, rule: Rule, a: Analysis, number: int) -> Finding:
    """Fill in what the rule class says of all its findings, and lower the confidence by what the
    window allows."""
    rule.complete(finding)
    if rule.validated == "synthetic":
        finding.confidence *= UNPROVEN
        finding.confidence_notes.append("not proven on real traces, on synthetic examples only")
    finding.trace_rank = None if number < 0 else number
    finding.device = a.device_id
    alone = rule.reads_record or a.snapshot_only
    if not a.trace.meta.example and not alone:
        for factor, why in _doubts(a):
            finding.confidence *= factor
            finding.confidence_notes.append(why)
    return finding


def _doubts(a: Analysis) -> list[tuple[float, str]]:
    found = []
    if a.steps.source == "whole trace":
        found.append((0.8, "no steps in the trace: start-up and shut-down may be inside"))
    elif a.steps.source == REPEATED:
        found.append((0.9, "steps are where the device's work repeats, nothing marks them"))
    if a.steps.source != "whole trace" and a.step_count < 3:
        found.append((0.85, f"only {a.step_count} step(s) measured"))
    if a.trace.meta.truncated:
        found.append((0.9, "the file is truncated"))
    return found
