"""Python's garbage collector stops the training loop."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from advisor.core import text as t
from advisor.core.finding import Evidence, Finding, Impact, Outcome, Rule, SkippedCheck, Threshold
from advisor.measure import Analysis
from advisor.measure.steps.record import Floats
from advisor.rules.recorded import a_step, device_bound, record, steps_seen
from advisor.rules.sources import CHOSEN, ENGINE_FLOOR, GPUPROF
from advisor.testing import TraceBuilder

MIN_SPREAD = 0.2
"""Of the mean pause: what pauses differ by, at least, for a line through the steps to mean much."""
MIN_REACH = 0.1
"""Of the gain: a cured recording gained 84 ms a step where pauses were 80."""


class GcPauses(Rule):
    """Python's cyclic garbage collector runs inside the training loop and stops it: a full
    collection looks at every container object of the process, which takes longer the more of them
    the program keeps (datasets held as Python lists and dictionaries above all). In a job of
    several ranks each pause holds up all ranks, and they pause at different times.

    Pauses are measured by ``gc.callbacks``. Reported where they take more than 1 % of the steps'
    time, or where one step lost more than 50 ms to them. The gain is the pauses by how much steps
    grow with them (a line through the steps, and twice its error): a pause during which the device
    works through its queue costs nothing.
    """

    id = "gc-pauses"
    title = "Garbage collection pauses the loop"
    category = "host"
    knobs = ("gc-freeze",)
    of_python = True
    reads_record = True
    found_in = ("recorded/gc_pauses.slow",)
    silent_in = (
        "recorded/gc_pauses.cured",
        "recorded/anomaly.cured",
        "recorded/leak.cured",
        "recorded/threads.cured",
    )
    validated_on = (
        "CPU recordings, torch 2.13: the workload gc_pauses (78 ms a step predicted, 108 to 24 ms "
        "measured) and a loop that collects over 600,000 objects; silent on both cures"
    )
    references = (
        "https://docs.python.org/3/library/gc.html#gc.freeze",
        "https://arxiv.org/abs/2402.15627",
    )

    min_share = Threshold(0.01, "of the steps' time", ENGINE_FLOOR)
    min_pause_ms = Threshold(50.0, "ms lost to pauses in one step", CHOSEN)
    min_steps = Threshold(20, "steps without a profiler", GPUPROF)

    fix = (
        "Freeze what exists once the first steps are done, so that collections do not look "
        "at it again; or switch the collector off and collect the young generations every "
        "N steps, at the same step on all ranks. Keep large datasets in arrays, not in "
        "Python objects."
    )
    code = (
        "import gc\n"
        "if step == 10:          # what is there now stays\n"
        "    gc.collect(); gc.freeze()\n"
        "# or: gc.disable() before the loop, and in it\n"
        "if step % 500 == 0:\n"
        "    gc.collect(1)"
    )
    verify = "Record again: the pauses are gone. Watch resident memory: cycles then stay."
    falsified_by = "the same step times with gc.disable()"
    confidence = 0.85

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Add up the pauses and what the steps with them lost."""
        recorded = record(a)
        if recorded.count < self.min_steps or not recorded.median:
            if recorded.count:
                yield SkippedCheck(
                    what="pauses of the garbage collector",
                    why=f"{t.count_noun(recorded.count, 'step')} without a profiler say too little",
                    record=f"a run of {2 * self.min_steps} steps or more",
                )
            return
        pause = recorded.column("gc")[recorded.used]
        dur = recorded.dur[recorded.used]
        share = float(pause.sum()) / float(dur.sum())
        longest = float(pause.max())
        if share < self.min_share and longest < self.min_pause_ms * 1e6:
            return
        beyond = np.maximum(0.0, dur - recorded.median)
        lost = float(np.minimum(pause, beyond).sum()) / len(dur)
        if device_bound(a) or lost < 0.2 * float(pause.sum()) / len(dur):
            return  # the device had work meanwhile: the steps are no longer
        yield Finding(
            summary=(
                f"The collector stops the loop for {t.format_duration(float(pause.mean()))} a "
                "step on "
                f"average ({share:.1%}), up to {t.format_duration(longest)} in one step; steps "
                "with a pause "
                "are that much longer."
            ),
            evidence=[
                Evidence("pauses", float(pause.mean()), "ns", per="step"),
                Evidence("share of the steps' time", share, "share", *self.limit("min_share")),
                Evidence("longest in a step", longest, "ns", *self.limit("min_pause_ms", 1e6)),
                Evidence("steps with a pause of 1 ms or more", int((pause >= 1e6).sum()), "count"),
                Evidence("objects frozen (gc.freeze)", recorded.flag("gc_frozen"), "count"),
                steps_seen(recorded),
            ],
            impact=_worth(a, pause.astype(float), dur.astype(float), lost),
        )

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """A pause of 60 ms every tenth step; a short one in every step."""
        return {
            "a long pause now and then": _run(every=10, pause=60),
            "a short pause in every other step": _run(every=2, pause=1),
        }

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """Pauses that cost nothing; hardly any; too few steps."""
        return {
            "steps with pauses are no longer": (
                _run(every=10, pause=4, longer=0),
                "lost < 0.2 * float(pause.sum()) / len(dur)",
            ),
            "hardly any": (_run(every=50, pause=1), "min_pause_ms"),
            "no pauses": (_run(every=10, pause=0), "longest < self.min_pause_ms * 1000000.0"),
            "few steps": (_run(every=2, pause=60, steps=12), "min_steps"),
        }


def _worth(a: Analysis, pause: Floats, dur: Floats, lost: float) -> Impact:
    """Pauses, by as much as a step grows with them: the slope of a line through the steps and twice
    its error (White's, since steps with pauses scatter more). Where all steps have alike pauses
    no line tells, and what was lost is an upper bound."""
    mean, count = float(pause.mean()), len(pause)
    apart = pause - mean
    square = float(np.square(apart).sum())
    if count < 3 or square <= count * (MIN_SPREAD * mean) ** 2:
        method = "upper bound (pauses, where the step was longer)"
        return a_step(a, lost, low=0.0, high=mean, method=method)
    slope = float((apart * (dur - dur.mean())).sum()) / square
    off = dur - dur.mean() - slope * apart
    error = float(np.sqrt(np.square(apart * off).sum() * count / (count - 2))) / square
    reach = max(2 * error, MIN_REACH * slope)
    slope = min(1.0, max(0.0, slope))
    return a_step(
        a,
        mean * slope,
        low=mean * max(0.0, slope - reach),
        high=mean * (slope + reach),
        method="pauses, by how much steps grow with them",
    )


def _run(
    *, every: int, pause: float, longer: float | None = None, steps: int = 200
) -> TraceBuilder:
    b = TraceBuilder()
    r = b.record_of_run()
    for n in range(steps):
        here = pause if n % every == 0 else 0.0
        r.step(20 + (here if longer is None else longer), gc=here, forward=5)
    return b
