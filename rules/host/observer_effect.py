"""The profiler makes the steps it records longer."""

from __future__ import annotations

from collections.abc import Iterator

from advisor.core import text as t
from advisor.core.finding import Evidence, Finding, Outcome, Rule, Source, Threshold
from advisor.measure import Analysis
from advisor.rules.recorded import measure_it, record, steps_seen
from advisor.rules.sources import CHOSEN, TRACEML
from advisor.testing import TraceBuilder


class ObserverEffect(Rule):
    """Steps in the profiled window take longer than those before and after it. Host times of the
    trace are inflated by that much, most where operators are small; the device's own times are not.

    Compared are the medians of the steps that the window kept and of the unprofiled ones within 20
    steps of them, so that a run whose speed drifts is compared with itself. Reported from 10 % on.
    """

    id = "observer-effect"
    title = "The profiled steps are longer than the others"
    category = "host"
    reads_record = True
    found_in = (
        "recorded/anomaly.slow",
        "recorded/gc_pauses.slow",
    )
    silent_in = ("recorded/leak.slow",)
    validated_on = "CPU recordings: windows whose steps are longer than those around them"
    sources = (Source("unprofiled steps within 20 steps", "advisor/measure/steps/record.py"),)
    references = ("https://github.com/pytorch/pytorch/issues/144455",)

    min_effect = Threshold(0.10, "longer step in the window", TRACEML)
    min_steps = Threshold(10, "unprofiled steps", CHOSEN)

    fix = (
        "Record less at a time: no stacks and no memory events unless they are needed. "
        "Trust device times, and gains from them, more than host times."
    )
    verify = "The recorded line of the report: the two medians come closer."
    falsified_by = "steps before and after the window that are as long"
    confidence = 0.9

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Compare the two medians."""
        recorded = record(a)
        effect = recorded.observer
        if effect is None or effect < self.min_effect or recorded.count < self.min_steps:
            return
        around, inside = recorded.around_windows, recorded.profiled_median
        assert around is not None and inside is not None
        yield Finding(
            summary=(
                f"Around the window a step takes {t.format_duration(around)}, and "
                f"{t.format_duration(inside)} "
                f"({effect:+.0%}) while it is profiled: host times and idle time in this report "
                "are longer than in an ordinary step."
            ),
            evidence=[
                Evidence("median step around the window", around, "ns"),
                Evidence("median profiled step", inside, "ns"),
                Evidence("longer by", effect, "share", *self.limit("min_effect")),
                Evidence("profiled steps", int(recorded.profiled.sum()), "count"),
                steps_seen(recorded),
            ],
            impact=measure_it("it costs the recording, not the training"),
            informational=True,
        )

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """Half as long again in the window."""
        return {"half as long again": _run(15)}

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """Hardly longer; never profiled."""
        return {
            "hardly longer": (_run(10.5), "min_effect"),
            "no window": (_run(None), "effect is None"),
        }


def _run(profiled: float | None) -> TraceBuilder:
    b = TraceBuilder()
    r = b.record_of_run()
    r.steps(30, 10)
    if profiled is not None:
        r.steps(5, profiled, window=0)
    r.steps(30, 10)
    return b
