"""What the recorder measured of a run's steps, as the Report has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from advisor.core.report import Phase, Recorded

if TYPE_CHECKING:
    from advisor.measure import Analysis


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
        inference=recorded.inference,
        outside_ns=None if recorded.inference else recorded.outside,
        outside_share=None if recorded.inference or not whole else recorded.outside / whole,
        ended=None if end is None else str(end.get("reason", "finished"))[:100],
        windows=window_lines(recorded.record.of_kind("window")),
    )


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
