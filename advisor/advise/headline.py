"""The one step time that a recorded run has, and its findings' gains as gains of that step.

The profiled window tells why a step takes its time; how long a step takes is told by the steps
that no profiler slowed. A gain is replayed in the window, so what carries over is its share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from advisor.core.finding import Finding
from advisor.core.report import Crash, StepTime
from advisor.core.trace import Run
from advisor.measure.steps.record import MIN_AROUND, MIN_PROFILED

if TYPE_CHECKING:
    from advisor.measure import Analysis

MIN_STEPS = 5
"""Unprofiled steps that a median is taken of, as around a window."""
APART = 0.10
"""From here on two step times differ by more than the profiler usually costs: the bound of the
rule ``observer-effect``."""
FEW = 0.25
"""Of the run's steps that must be as far from its median as those around the window: the quarter
at either end is what is not usual in a run."""
UNLIKE_CONFIDENCE = 0.85
"""What is left of the confidence in a finding from a window that is not like its run."""


def step_time(a: Analysis) -> StepTime | None:
    """What a step of the run takes; ``None``: a trace alone, one without steps, or too few."""
    recorded = a.recorded
    if recorded is None or not recorded.median or recorded.count < MIN_STEPS:
        return None
    run = recorded.median
    found = StepTime(ns=run, mean_ns=recorded.mean or run)
    if a.record_only:
        return found
    if a.steps.source == "whole trace" or not a.step_ns:
        return None
    found.window_ns = a.step_ns
    found.longer = a.step_ns / run - 1
    kept = recorded.kept(a.trace.meta.window)
    inside, around = recorded.dur[kept], recorded.around(kept)
    found.first = bool(kept.any()) and not recorded.settled[kept].any()
    if len(around) < MIN_AROUND:
        return found
    beside = float(np.median(around))
    if not beside:
        return found
    found.around_ns = beside
    if len(inside) >= MIN_PROFILED:
        found.cost = float(np.median(inside)) / beside - 1
    used = recorded.dur[recorded.used]
    found.as_far = float((used >= beside if beside > run else used <= beside).mean())
    found.unlike = abs(beside / run - 1) >= APART and found.as_far < FEW
    return found


def carry_over(finding: Finding, step: StepTime | None, *, device: bool) -> None:
    """Make a gain that was found in a window one of the run's step: its share of the step stays.

    The range widens by what a share cannot know. What the profiler adds is host time, so a gain on
    the ``device`` may be as long without it as it was in the window; and steps that are longer than
    the window's need not have more of the cause.
    """
    impact = finding.impact
    if step is None or not step.window_ns or impact is None or impact.currency != "step_time":
        return
    gain = impact.gain_ns
    if gain is None:
        return
    scale = step.ns / step.window_ns
    least = gain if impact.low_ns is None else impact.low_ns
    most = gain if impact.high_ns is None else impact.high_ns
    low, high = least * scale, most * scale
    if device and scale < 1 and step.cost is not None and step.cost >= APART:
        high = max(high, min(most, step.ns))
    if scale > 1 + APART:
        low = min(low, least)
    finding.impact = replace(
        impact, gain_ns=round(gain * scale), low_ns=round(low), high_ns=round(high)
    )
    if finding.marginal_gain_ns is not None:
        finding.marginal_gain_ns = round(finding.marginal_gain_ns * scale)
    if step.unlike:
        finding.confidence *= UNLIKE_CONFIDENCE
        finding.confidence_notes.append("the profiled window is not like the rest of the run")


def bound_loading(finding: Finding, a: Analysis) -> None:
    """A fix of the loader saves no more than what the run's own steps spend on getting data,
    whatever share of a profiled window that is."""
    impact, recorded = finding.impact, a.recorded
    share = None if recorded is None else recorded.share("data")
    if recorded is None or share is None or not any(e.op == "spread" for e in finding.edits):
        return
    if impact is None or impact.currency != "step_time" or impact.gain_ns is None:
        return
    step = recorded.median or 0.0
    most = round(share * step)
    if impact.gain_ns <= most or not step:
        return
    finding.impact = replace(
        impact,
        gain_ns=most,
        low_ns=min(impact.low_ns or 0, most),
        high_ns=most,
        share=most / step,
    )
    if finding.marginal_gain_ns is not None:
        finding.marginal_gain_ns = min(finding.marginal_gain_ns, most)
    finding.confidence_notes.append(
        f"the run's own steps spend {share:.0%} on getting data, less than those of the window"
    )


def crashes(run: Run) -> list[Crash]:
    """Ranks that an exception ended, in the order of time; not those that somebody interrupted."""
    found = []
    for number, record in (run.recording.ranks if run.recording is not None else {}).items():
        ends = [event for event in record.events if event.kind == "end"]
        if not ends or ends[-1].data.get("reason") != "exception":
            continue
        last = ends[-1]
        message = last.data.get("message") or last.data.get("text")
        steps = last.data.get("steps")
        crash = Crash(
            rank=number,
            exception=str(last.data.get("exception") or "an exception")[:100],
            message=str(message)[:300] if message else None,
            steps=steps if isinstance(steps, int) and not isinstance(steps, bool) else None,
        )
        at, perf, unix = last.t, record.rank.anchor_perf_ns, record.rank.anchor_unix_ns
        if perf is not None and unix is not None:
            at += unix - perf
        found.append((at, crash))
    return [crash for _, crash in sorted(found, key=lambda item: item[0])]
