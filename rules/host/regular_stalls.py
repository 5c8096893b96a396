"""Every n-th step takes much longer than the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from advisor.core import text as t
from advisor.core.finding import Evidence, Finding, Outcome, Rule, Threshold
from advisor.measure import Analysis
from advisor.rules.host.stalls import blame, find_stalls
from advisor.rules.recorded import over_the_run, record, steps_seen
from advisor.rules.sources import CHOSEN, STEP_SERIES
from advisor.testing import TraceBuilder


class RegularStalls(Rule):
    """Every n-th step takes much longer than the others, over the whole run: something is done
    every n steps, such as logging, a checkpoint, clearing a cache, or a collection of garbage.

    A long step takes more than 1.5 times the median and lies more than five median absolute
    deviations away; at least four of them, five or more steps apart, whose distances are alike.
    The phase that is longer in them says where to look: ``other`` is the loop's own code after the
    optimizer step, ``data`` the loader. Validation loops and checkpoints that the recorder saw as
    such are no part of a step and do not count.

    The rule periodic-stalls names what is saved or logged, from the stacks of a profiled window;
    this one needs no window, but sees no cause.
    """

    id = "regular-stalls"
    title = "Every n-th step stalls"
    category = "host"
    reads_record = True
    silent_in = (
        "recorded/anomaly.cured",
        "recorded/gc_pauses.cured",
        "recorded/leak.cured",
    )
    sources = (STEP_SERIES,)
    references = ("https://pytorch.org/tutorials/recipes/distributed_async_checkpoint_recipe.html",)

    min_steps = Threshold(40, "steps", CHOSEN)
    min_share = Threshold(0.02, "of the steps' time", CHOSEN)

    verify = "Record again: no step stands out."
    falsified_by = "long steps at irregular distances in a longer run"
    confidence = 0.85

    fix = (
        "Look for what the loop does every {every} steps (logging, saving, empty_cache, a "
        "collection of garbage): do it less often, from another thread, or without waiting for "
        "the device."
    )
    cases: ClassVar = {
        "while data is fetched": {
            "fix": "Look for what the loop does every {every} steps while it fetches data (a shard "
            "that is opened, a buffer that is shuffled)."
        }
    }

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Look for long steps at regular distances."""
        recorded = record(a)
        if recorded.count < self.min_steps or not recorded.median:
            return
        stalls = find_stalls(recorded)
        total = float(recorded.dur[recorded.used].sum())
        lost = float(stalls.excess.sum())
        if stalls.every is None or lost < self.min_share * total:
            return
        causes = blame(recorded, stalls)
        phase = causes[0][0] if causes else "other"
        parts = ", ".join(f"{name} {t.format_duration(ns)}" for name, ns in causes[:3] if ns > 0)
        yield Finding(
            title=f"Every {stalls.every}th step stalls",
            summary=(
                f"{t.count_noun(len(stalls.rows), 'step')}, {stalls.every} steps apart, take "
                f"{t.format_duration(float(stalls.excess.mean()))} more than the median of "
                f"{t.format_duration(recorded.median)}: {t.format_duration(lost)} of the run "
                f"({lost / total:.1%}). "
                f"What is longer in them: {parts}."
            ),
            evidence=[
                Evidence("time in stalls", lost, "ns"),
                Evidence(
                    "share of the steps' time", lost / total, "share", *self.limit("min_share")
                ),
                Evidence("stalled steps", len(stalls.rows), "count", 4),
                Evidence("steps apart", stalls.every, "count"),
                Evidence("longest phase in them", phase),
                steps_seen(recorded),
            ],
            impact=over_the_run(lost, method="what the stalled steps take beyond the median"),
            fix=(self.case("while data is fetched")["fix"] if phase == "data" else self.fix).format(
                every=stalls.every
            ),
        )

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """A log every twenty steps; a shard every 25."""
        return {"every 20 steps": _run(20, "other"), "every 25 steps": _run(25, "data")}

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """Irregular; too seldom to count; the loader's own rhythm."""
        return {
            "irregular": (_run(0, "other", at=(12, 31, 90, 130, 190)), "stalls.every is None"),
            "twice": (_run(0, "other", at=(50, 100)), "stalls.every is None"),
            "every second batch, from two workers": (_run(2, "data"), "stalls.every is None"),
        }


def _run(every: int, phase: str, *, at: tuple[int, ...] = ()) -> TraceBuilder:
    b = TraceBuilder()
    r = b.record_of_run()
    for n in range(200):
        slow = n in at or (every and n % every == every - 1)
        ms = 60.0 if slow else 10.0
        r.step(ms, forward=5, data=ms - 5 if phase == "data" else 0)
    return b
