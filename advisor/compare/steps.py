"""Step times of two runs: which steps count, their distributions, and how far they differ."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from advisor.advise.words import mark_steps
from advisor.compare.data import Distribution, StepTimes, Verdict
from advisor.compare.dependent import MINIMUM, difference
from advisor.compare.statistics import (
    BOOTSTRAP_FROM,
    LEVEL,
    MIN_STEPS,
    Sample,
    autocorrelation,
    welch,
)
from advisor.core.finding import REPEATED
from advisor.measure.steps.record import StepRecords

if TYPE_CHECKING:
    from advisor.core.run_directory import RankRecord
    from advisor.measure import Analysis

MAX_DURATIONS = 2000
PERIODS = (
    "Steps are where the device's work repeats, for nothing marks them: they may be a part of an "
    "iteration, such as a layer, and how many of them an iteration has is not known. Name a range "
    "with --steps to compare iterations."
)
CORRELATED = 0.3
"""From this correlation of neighbouring steps on, the interval of a few is said to be narrow."""


def compare_steps(before: Analysis, after: Analysis) -> StepTimes:
    """The recorder's unprofiled steps where both runs have them, else the profiled ones."""
    samples, numbers = _sides(unprofiled_numbers, unprofiled, [before.record, after.record])
    source = "recorder"
    if min(map(len, samples)) < MIN_STEPS:
        samples, numbers = _sides(profiled_numbers, profiled, [before, after])
        source = "trace" if all(map(len, samples)) else ""
    shapes = [distribution(sample) if len(sample) else None for sample in samples]
    shortest = min(map(len, samples))
    if shortest >= MINIMUM:
        # periods are counted from wherever the recording began
        counted = source == "recorder" or REPEATED not in (before.steps.source, after.steps.source)
        counted |= np.array_equal(samples[0], samples[1])
        paired = counted and numbers[0] == numbers[1]
        found = difference(samples[0], samples[1], paired=paired)
    else:
        found = welch(samples[0], samples[1]) if shortest >= MIN_STEPS else None
    if found is None:
        reason = _too_few(before, after, samples)
        return StepTimes(
            verdict="not measured", source=source, before=shapes[0], after=shapes[1], reason=reason
        )
    verdict: Verdict = "no difference"
    if found.low > 0 or found.high < 0:
        verdict = "slower" if found.low > 0 else "faster"
    base = found.before or 1.0
    return StepTimes(
        verdict=verdict,
        source=source,
        before=shapes[0],
        after=shapes[1],
        statistic=found.statistic,
        method=found.method,
        level=LEVEL,
        difference_ns=found.amount,
        low_ns=found.low,
        high_ns=found.high,
        share=found.amount / base,
        share_low=found.low / base,
        share_high=found.high / base,
        notes=_notes(source, found.statistic, samples, before, after),
    )


_Side = TypeVar("_Side")


def _sides(
    numbers: Callable[[_Side], list[int]], durations: Callable[[_Side], Sample], of: list[_Side]
) -> tuple[list[Sample], list[list[int]]]:
    """Durations of both sides, and the numbers of their steps."""
    return [durations(one) for one in of], [numbers(one) for one in of]


def unprofiled(record: RankRecord | None) -> Sample:
    """Durations of the recorder's steps, ns: without warm-up, profiled steps, the step after a
    window (which writes the trace), and steps with an evaluation or a checkpoint in them."""
    if record is None:
        return np.zeros(0)
    recorded = StepRecords(record)
    kept: Sample = recorded.dur[_plain(recorded)].astype(np.float64)
    return kept


def unprofiled_numbers(record: RankRecord | None) -> list[int]:
    """Of the same steps, ascending."""
    if record is None:
        return []
    recorded = StepRecords(record)
    return [recorded.steps[i].n for i in np.flatnonzero(_plain(recorded))]


def _plain(recorded: StepRecords) -> NDArray[np.bool_]:
    plain = np.array([not step.evaluation for step in recorded.steps], dtype=bool)
    found: NDArray[np.bool_] = recorded.used & plain
    return found


def profiled(a: Analysis) -> Sample:
    """Durations of the used steps of a window, ns; none when the trace marks no steps."""
    if a.steps.source == "whole trace":
        return np.zeros(0)
    return a.steps.used["dur"].to_numpy().astype(np.float64)


def profiled_numbers(a: Analysis) -> list[int]:
    """Of the same steps, ascending; where they are not numbered, their places in the recording."""
    if a.steps.source == "whole trace":
        return []
    found = [re.search(r"(?:#|^step )(\d{1,12})$", str(name)) for name in a.steps.used["name"]]
    numbers = [int(match[1]) for match in found if match is not None]
    if len(numbers) != a.steps.used.height or sorted(set(numbers)) != numbers:
        numbers = a.steps.used["index"].to_list()
    return numbers


def distribution(sample: Sample) -> Distribution:
    """What a sample looks like."""
    low, middle, high = np.quantile(sample, [0.1, 0.5, 0.9])
    shown = sample
    if len(sample) > MAX_DURATIONS:
        shown = sample[np.linspace(0, len(sample) - 1, MAX_DURATIONS).round().astype(int)]
    return Distribution(
        count=len(sample),
        mean_ns=float(sample.mean()),
        median_ns=float(middle),
        p10_ns=float(low),
        p90_ns=float(high),
        min_ns=float(sample.min()),
        max_ns=float(sample.max()),
        autocorrelation=autocorrelation(sample),
        durations_ns=shown.tolist(),
    )


def _too_few(before: Analysis, after: Analysis, samples: list[Sample]) -> str:
    unmarked = [
        name
        for name, a in (("before", before), ("after", after))
        if a.steps.source == "whole trace"
    ]
    if unmarked:
        return (
            f"no steps are marked in the trace {' and '.join(unmarked)}; "
            f"{mark_steps(after.trace.meta)}"
        )
    counts = " and ".join(f"{len(sample)}" for sample in samples)
    return f"{counts} steps are too few to know their spread; record at least {MIN_STEPS}"


def _notes(
    source: str, statistic: str, samples: list[Sample], before: Analysis, after: Analysis
) -> list[str]:
    found = []
    if source == "recorder":
        found.append(
            "Steps outside the profiled windows, without the first ones and without those around "
            "evaluations: what the run really takes."
        )
    else:
        found.append(
            "Profiled steps: the profiler slows the host, most where there are many small "
            "operators. Two recorded runs are compared by their unprofiled steps."
        )
        found += _recorded_differently(before, after)
    shortest = min(map(len, samples))
    if shortest < MINIMUM:
        found.append(
            "So few steps say nothing of how one depends on the next: the interval is for "
            "independent ones, and the true one is wider."
        )
    elif statistic == "mean":
        worst = max((autocorrelation(sample) or 0.0) for sample in samples)
        told = f" (here by up to {worst:.2f})" if worst >= CORRELATED else ""
        found.append(
            f"Few steps: where one depends much on the next{told}, the true interval is wider. "
            f"Record {BOOTSTRAP_FROM} or more."
        )
    found.append(
        "One run each: another run of the same program may differ by more than its steps do."
    )
    return found


def _recorded_differently(before: Analysis, after: Analysis) -> list[str]:
    names = {"with_stack": "stacks", "record_shapes": "shapes", "profile_memory": "memory"}
    found = []
    for field, what in names.items():
        sides = [getattr(a.trace.meta, field) for a in (before, after)]
        if None not in sides and sides[0] != sides[1]:
            which = "before" if sides[0] else "after"
            found.append(
                f"Only the trace {which} was recorded with {what}, which slows its host: "
                "record both the same way."
            )
    return found
