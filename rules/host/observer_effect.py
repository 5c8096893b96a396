"""The profiler makes the steps it records longer."""

from __future__ import annotations

from collections.abc import Iterator

from advisor.analysis import Analysis
from advisor.model import Evidence, Finding, Outcome, Rule
from advisor.rules.common import duration
from advisor.rules.recorded import measure_it, record, steps_seen
from advisor.testing import TraceBuilder


class ObserverEffect(Rule):
    """Steps in the profiled window take longer than those before and after it. Host times of the
    trace are inflated by that much, most where operators are small; the device's own times are not.

    Compared are the medians of the steps that the window kept and of the unprofiled ones within 20
    steps of them, so that a run whose speed drifts is compared with itself. Reported from 10 % on;
    fine-grained profilers cost 5 to 30 % (ARGUS).
    """

    id = "observer-effect"
    title = "The profiled steps are longer than the others"
    category = "host"
    reads_record = True
    references = ("https://github.com/pytorch/pytorch/issues/144455",)

    min_effect = 0.10  # rule catalogue
    min_steps = 10  # unprofiled ones

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Compare the two medians."""
        recorded = record(a)
        effect = recorded.observer
        if effect is None or effect < self.min_effect or recorded.count < self.min_steps:
            return
        around, inside = recorded.around_windows, recorded.profiled_median
        assert around is not None and inside is not None
        yield Finding(
            rule=self.id,
            title=self.title,
            summary=(
                f"Around the window a step takes {duration(around)}, and {duration(inside)} "
                f"({effect:+.0%}) while it is profiled: host times and idle time in this report "
                "are longer than in an ordinary step."
            ),
            evidence=[
                Evidence("median step around the window", around, "ns"),
                Evidence("median profiled step", inside, "ns"),
                Evidence("longer by", effect, "share", self.min_effect, "rule catalogue"),
                Evidence("profiled steps", int(recorded.profiled.sum()), "count"),
                steps_seen(recorded),
            ],
            fix=(
                "Record less at a time: no stacks and no memory events unless they are needed. "
                "Trust device times, and gains from them, more than host times."
            ),
            check="The recorded line of the report: the two medians come closer.",
            worth=measure_it("it costs the recording, not the training"),
            informational=True,
            confidence=0.9,
            falsified_by="steps before and after the window that are as long",
        )

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """Half as long again in the window."""
        return {"half as long again": _run(15)}

    @staticmethod
    def silent_on() -> dict[str, TraceBuilder]:
        """Hardly longer; never profiled."""
        return {"hardly longer": _run(10.5), "no window": _run(None)}


def _run(profiled: float | None) -> TraceBuilder:
    b = TraceBuilder()
    r = b.record_of_run()
    r.steps(30, 10)
    if profiled is not None:
        r.steps(5, profiled, window=0)
    r.steps(30, 10)
    return b
