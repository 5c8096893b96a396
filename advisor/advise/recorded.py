"""The steps of a run as the Report has them: what the recorder measured, and how long each took."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from advisor.core.report import Phase, Recorded, StepDurations

if TYPE_CHECKING:
    from advisor.core.run_directory import RankRecord
    from advisor.measure import Analysis

MAX_DURATIONS = 5000
"""Steps whose durations a report holds, the last ones: neighbours stay neighbours."""


def recorded_view(a: Analysis) -> Recorded | None:
    """What the recorder measured of every step; ``None`` for a trace alone."""
    recorded = a.recorded
    if recorded is None:
        return None
    mean = recorded.mean or 0.0
    phases = [
        Phase(name, float(values[recorded.used].mean()), float(values[recorded.used].mean()) / mean)
        for name, values in recorded.phases.items()
        if mean and values[recorded.used].any()
    ]
    end = next(reversed(recorded.record.of_kind("end")), None)
    whole = int(recorded.dur.sum()) + recorded.outside
    return Recorded(
        steps=len(recorded.steps),
        used=recorded.count,
        median_ns=recorded.median,
        mean_ns=recorded.mean,
        p99_ns=recorded.quantile(0.99) if recorded.count >= 100 else None,
        profiled_steps=int(recorded.profiled.sum()),
        profiled_median_ns=recorded.profiled_median,
        observer_effect=recorded.observer,
        phases=phases,
        samples_per_second=recorded.samples_per_second,
        samples_per_step=samples_per_step(recorded.record),
        inference=recorded.inference,
        outside_ns=None if recorded.inference else recorded.outside,
        outside_share=None if recorded.inference or not whole else recorded.outside / whole,
        ended=None if end is None else str(end.get("reason", "finished"))[:100],
        windows=window_lines(recorded.record.of_kind("window")),
    )


def samples_per_step(record: RankRecord) -> int | None:
    """Samples of most steps, gradient accumulation included; ``None``: not recorded."""
    counts = Counter(s.samples * max(s.micro, 1) for s in record.steps if s.samples is not None)
    return counts.most_common(1)[0][0] if counts else None


def step_durations(a: Analysis) -> list[StepDurations]:
    """Durations of the steps that count: as the recorder measured them, and in the trace."""
    found = []
    recorded = a.recorded
    if recorded is not None:
        plain = np.array([not step.evaluation for step in recorded.steps], dtype=bool)
        rows = np.flatnonzero(recorded.used & plain)
        numbers = [recorded.steps[row].n for row in rows]
        found.append(_durations("recorder", numbers, recorded.dur[rows].tolist()))
    if a.steps.source != "whole trace":
        found.append(_durations("trace", _numbers(a), a.steps.used["dur"].to_list()))
    return [each for each in found if each.durations_ns]


def _durations(
    source: Literal["recorder", "trace"], numbers: list[int], durations: list[int]
) -> StepDurations:
    ranges: list[tuple[int, int]] = []
    for number in numbers[-MAX_DURATIONS:]:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return StepDurations(source=source, numbers=ranges, durations_ns=durations[-MAX_DURATIONS:])


def _numbers(a: Analysis) -> list[int]:
    """Of the used steps of a trace, ascending; where they are not numbered, their places."""
    found = [re.search(r"(?:#|^step )(\d{1,12})$", str(name)) for name in a.steps.used["name"]]
    numbers = [int(match[1]) for match in found if match is not None]
    if len(numbers) != a.steps.used.height or sorted(set(numbers)) != numbers:
        numbers = a.steps.used["index"].to_list()
    return numbers


def window_lines(events: list[dict[str, Any]]) -> list[str]:
    """The last that was told of each window: ``window 0: done``."""
    last: dict[Any, dict[str, Any]] = {}
    for event in events:
        last[str(event.get("window"))] = event
    return [
        " ".join(
            part
            for part in (
                f"window {number}:",
                str(event.get("state", "open"))[:40],
                f"({str(event['why'])[:200]})" if event.get("why") else "",
            )
            if part
        )
        for number, event in list(last.items())[:100]
    ]
