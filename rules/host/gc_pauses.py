"""Python's garbage collector inside the training loop."""

import re
from typing import Any

import numpy as np

from advisor.core import text as t
from advisor.core.finding import (
    Finding,
    Impact,
    Location,
    Outcomes,
    SkippedCheck,
    impact_without_gain,
)
from advisor.core.intervals import Floats
from advisor.core.rule import Evidence, Rule, Threshold
from advisor.core.run_directory import RecordedDevice
from advisor.measure import Analysis
from advisor.measure.host.names import name_matches
from advisor.measure.steps.steps import rows_in_steps
from advisor.rules.support.citations import CHOSEN, CURED_RECORDINGS, ENGINE_FLOOR, GPUPROF
from advisor.rules.support.common import impact_per_step, locate_row, recorded_steps, steps_seen
from advisor.testing import Examples, TraceBuilder

PAUSED = "steps with a pause of 1 ms or more"
MIN_SPREAD = 0.2
"""Share of the mean pause by which pauses must differ, for a line through the steps to count."""
MIN_MARGIN = 0.1
"""Least margin, share of the gain: a cured recording gained 84 ms per step where pauses took 80."""


class GcPauses(Rule):
    """Python's cyclic garbage collector runs inside the training loop and pauses it. A full
    collection looks at every container object of the process, so it takes longer the more of them
    the program keeps. Above all, these are datasets held as Python lists and dictionaries. In a job
    of several ranks each pause delays all ranks, and they pause at different times.

    Pauses are measured by ``gc.callbacks``. Reported where they take more than 1% of the steps'
    time, or where one step lost more than 50 ms to them. Pauses of fewer than 3 steps show no rate:
    a long one is a note. A step that takes twice the median or more, and for the most part not
    because of its pauses, is left out. It compiles, or saves. The gain is the pauses times how much
    steps grow with them (a line through the steps, and twice its error). A pause costs nothing
    while the GPU works through its queue.

    Pauses that are as long in each step leave no line to draw. Where the host computes the steps,
    they are lost time all the same. Where a GPU does, no more of them is lost than it idles in the
    profiled steps. Either the program asks for them, with ``gc.collect()``: the recorder counts the
    calls of each line that does. Or each step makes so many objects that Python collects by itself.
    """

    id = "gc-pauses"
    title = "Garbage collection pauses the loop"
    host_check = "garbage collection"
    knobs = ("gc-freeze",)
    is_python_time = True
    reads_record = True
    found_in = ("recorded/gc_pauses.slow",)
    silent_in = (*CURED_RECORDINGS, "recorded/threads.cured")
    validation_note = (
        "CPU recordings, torch 2.13: the workload gc_pauses (78 ms per step predicted, 108 to 24 "
        "ms measured). Fires also on a loop that collects over 600,000 objects. Silent on both "
        "cures"
    )
    references = (
        "https://docs.python.org/3/library/gc.html#gc.freeze",
        "https://arxiv.org/abs/2402.15627",
    )

    min_share = Threshold(0.01, "of the steps' time", ENGINE_FLOOR)
    min_pause_ms = Threshold(50.0, "ms lost to pauses in one step", CHOSEN)
    min_steps = Threshold(20, "steps without a profiler", GPUPROF)
    max_other = Threshold(
        2.0, "times its pauses, what a step of two medians or more takes beyond the median", CHOSEN
    )

    min_pauses = Threshold(
        3, "steps with a pause of 1 ms or more: fewer show neither rate nor range", CHOSEN
    )
    min_step_share = Threshold(
        0.9, "of the steps have at least half of the mean pause, or a call of gc.collect()", CHOSEN
    )

    fix = (
        "Freeze the objects that exist after the first steps, so that collections skip them. Or "
        "disable the collector and collect young generations every N steps, at the same step on "
        "all ranks. Keep large datasets in arrays, not in Python objects."
    )
    code = (
        "import gc\n"
        "for step, batch in enumerate(loader):\n"
        "    train_step(batch)\n"
        "    if step == 10:          # what exists now stays\n"
        "        gc.collect()\n"
        "        gc.freeze()"
    )
    verify = "Record again: the pauses are gone. Watch resident memory: reference cycles stay."
    falsified_by = "the same step times with gc.disable()"
    confidence = 0.85
    cases = {
        "made in each step": {
            "title": "Garbage collection pauses each step",
            "fix": "Make fewer objects in a step: keep results in tensors or arrays, not in tuples "
            "and lists. By default Python collects after 700 or 2,000 new objects: let it collect "
            "less often. Memory of reference cycles then stays longer.",
            "code": "import gc\ngc.set_threshold(100_000, 20, 20)      # before the loop",
        },
        "in each step": {
            "title": "The program asks for a garbage collection in each step",
            "fix": "Take gc.collect() out of the loop: Python collects by itself, and a tensor is "
            "freed when its last reference goes. Collect every N steps where reference cycles "
            "hold much memory.",
            "code": "if step % 1000 == 0:      # not in each step\n    gc.collect()",
            "verify": "Record again: the pauses are gone. Watch memory: reference cycles stay.",
            "confidence": 0.9,
        },
    }

    def check(self, a: Analysis) -> Outcomes:
        recorded = recorded_steps(a)
        if recorded.count < self.min_steps or not recorded.median:
            if recorded.count:
                yield SkippedCheck(
                    what="pauses of the garbage collector",
                    why=f"{t.count_noun(recorded.count, 'step')} without a profiler are too few",
                    # where the host runs ahead, one step in four is timed
                    record=f"a run of {self.min_steps * (8 if recorded.host_is_ahead else 2)} "
                    "steps or more",
                )
            return
        pause, dur = recorded.column("gc")[recorded.timed], recorded.timed_durations
        beyond = np.maximum(0.0, dur - recorded.median)
        # a step that compiles makes many objects, which are collected in it: once
        usual = (beyond <= self.max_other * pause) | (beyond <= recorded.median)
        pause, dur, beyond = pause[usual], dur[usual], beyond[usual]
        share = float(pause.sum()) / float(dur.sum())
        longest = float(pause.max())
        if share < self.min_share and longest < self.min_pause_ms * 1e6:
            return
        each = bool((pause >= 0.5 * pause.mean()).mean() >= self.min_step_share)
        paused = int((pause >= 1e6).sum())
        impact = _lost_in_each(a, float(np.median(pause))) if each else None
        if impact is None:
            lost = float(np.minimum(pause, beyond).sum()) / len(dur)
            if a.is_device_bound or lost < 0.2 * float(pause.sum()) / len(dur):
                return  # the GPU had work meanwhile: the steps are no longer
            if paused < self.min_pauses and not each:
                yield from self._of_few(a, pause, paused, share)
                return
            impact = _estimate(a, pause.astype(float), dur.astype(float), lost)
        places, calls = _asked_for(a)
        asked = calls >= self.min_step_share
        words = self.case("in each step" if asked else "made in each step") if each else {}
        yield Finding(
            summary=(
                f"Garbage collection pauses the loop for {t.format_duration(float(pause.mean()))} "
                f"per step on average ({share:.1%}), up to {t.format_duration(longest)} in one "
                f"step. {'Every' if each else 'A'} step"
                + (" has such a pause." if each else " with a pause is that much longer.")
            ),
            evidence=[
                Evidence("pauses", float(pause.mean()), "ns", per="step"),
                self.compare("share of the steps' time", share, "min_share"),
                self.compare("longest pause in a step", longest, "min_pause_ms", "ns", times=1e6),
                self.compare(PAUSED, paused, "min_pauses", "count"),
                Evidence("objects frozen (gc.freeze)", recorded.flag("gc_frozen"), "count"),
                steps_seen(recorded),
            ],
            where=places if asked or not each else [],
            impact=impact,
            **words,
        )

    def _of_few(self, a: Analysis, pause: Floats, paused: int, share: float) -> Outcomes:
        """Note long pauses of which too few were seen for a rate."""
        longest = float(pause.max())
        if longest < self.min_pause_ms * 1e6:
            return
        yield Finding(
            summary=(
                f"Garbage collection paused {paused} of {len(pause)} steps, for up to "
                f"{t.format_duration(longest)}."
            ),
            evidence=[
                self.compare("longest pause in a step", longest, "min_pause_ms", "ns", times=1e6),
                self.compare("share of the steps' time", share, "min_share"),
                self.compare(PAUSED, paused, "min_pauses", "count"),
            ],
            where=_asked_for(a)[0],
            impact=impact_without_gain("so few pauses show no rate"),
            informational=True,
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "a long pause now and then": _gc_run(every=10, pause=60),
            "a short pause in every other step": _gc_run(every=2, pause=1),
            "two long pauses in the whole run": _gc_run(every=40, pause=60, steps=54),
            "in each step, on the host": _gc_run(every=1, pause=8, b=_window(gpu=False)),
            "asked for in each step": _gc_run(every=1, pause=8, asked=128, b=_window(gpu=False)),
            "in each step, the GPU waits": _gc_run(every=1, pause=8, b=_window(idle=12_000)),
            "in each step, behind a GPU's work": (
                _gc_run(every=1, pause=8, b=_window(idle=100)),
                "a.is_device_bound",
            ),
            "steps with pauses are no longer": (
                _gc_run(every=10, pause=4, longer=0),
                "lost < 0.2 * float(pause.sum()) / len(dur)",
            ),
            "in steps that compile": (
                _gc_run(every=60, pause=400, longer=4000),
                "longest < self.min_pause_ms * 1000000.0",
            ),
            "one in the whole run": (
                _gc_run(every=100, pause=46, steps=54),
                "longest < self.min_pause_ms * 1000000.0",
            ),
            "hardly any": (_gc_run(every=50, pause=1), "min_pause_ms"),
            "no pauses": (_gc_run(every=10, pause=0), "longest < self.min_pause_ms * 1000000.0"),
            "few steps": (_gc_run(every=2, pause=60, steps=12), "min_steps"),
        }


def _lost_in_each(a: Analysis, pause: float) -> Impact | None:
    """Estimate the cost of equally long pauses in each step: all of them where the host computes,
    else at most the device's idle time. ``pause``: ns per step. ``None``: unknown."""
    if a.trains_on_host:
        method = "pauses of the host, which computes the steps"
        return impact_per_step(a, pause, low=(1 - MIN_MARGIN) * pause, method=method)
    if a.device_id is None or a.is_device_bound or not a.span_ns:
        return None
    method = "upper bound (pauses, where the GPU idles)"
    return impact_per_step(a, pause, low=0.0, method=method, kind="upper bound")


def _asked_for(a: Analysis) -> tuple[list[Location], float]:
    """Find lines that ask for full collections, and their calls per step: by the trace's frames,
    else the recorder's notes, which give the last power of two."""
    calls = name_matches(a.trace.cpu["name"], r"^<built-in function collect>$").to_numpy().nonzero()
    if len(calls[0]):
        within = len(rows_in_steps(a, calls[0]))
        return [locate_row(a, int(calls[0][0]), count=len(calls[0]))], within / max(a.step_count, 1)
    record = recorded_steps(a).record
    lines = {(_text(noted, "file"), _line(noted)): noted for noted in record.events_of("collect")}
    # a recording without numbers of calls: as many as steps
    times = [noted.get("times", len(record.steps)) for noted in lines.values()]
    count = 2 * sum(number for number in times if type(number) is int)
    places = [
        Location(file=file, line=line, function=_text(noted, "function"))
        for (file, line), noted in list(lines.items())[:3]
        if file is not None
    ]
    return places, count / max(len(record.steps), 1)


def _text(noted: dict[str, Any], key: str) -> str | None:
    value = noted.get(key)
    return re.sub(r"\s+", " ", value)[:1000] if isinstance(value, str) else None


def _line(noted: dict[str, Any]) -> int | None:
    value = noted.get("line")
    return value if type(value) is int and 0 < value < 10**9 else None


def _estimate(a: Analysis, pause: Floats, dur: Floats, lost: float) -> Impact:
    """The pauses times how much a step grows with them: the slope of a line through the steps, and
    twice its error (White's, since steps with pauses scatter more). Where all pauses are similar no
    line can be drawn, and the time lost is an upper bound."""
    mean, count = float(pause.mean()), len(pause)
    deviation = pause - mean
    square = float(np.square(deviation).sum())
    if count < 3 or square <= count * (MIN_SPREAD * mean) ** 2:
        method = "upper bound (pauses, where the step was longer)"
        return impact_per_step(a, lost, low=0.0, high=mean, method=method, kind="upper bound")
    slope = float((deviation * (dur - dur.mean())).sum()) / square
    residual = dur - dur.mean() - slope * deviation
    error = float(np.sqrt(np.square(deviation * residual).sum() * count / (count - 2))) / square
    margin = max(2 * error, MIN_MARGIN * slope)
    slope = min(1.0, max(0.0, slope))
    return impact_per_step(
        a,
        mean * slope,
        low=mean * max(0.0, slope - margin),
        high=mean * (slope + margin),
        method="pauses times how much steps grow with them",
    )


def _gc_run(
    *,
    every: int,
    pause: float,
    longer: float | None = None,
    steps: int = 200,
    asked: int = 0,
    b: TraceBuilder | None = None,
) -> TraceBuilder:
    b = b or TraceBuilder()
    r = b.record_of_run(devices=[RecordedDevice()] if b.head["deviceProperties"] else [])
    for n in range(steps):
        here = pause if n % every == 0 else 0.0
        r.step(20 + (here if longer is None else longer * (here > 0)), gc=here, forward=5)
    if asked:
        r.event("collect", file="train.py", line=9, function="main", times=asked)
    return b


def _window(*, gpu: bool = True, idle: float = 0.0) -> TraceBuilder:
    """Steps of 28 ms, on the host or on a GPU that idles so long (µs)."""
    b = TraceBuilder("A100" if gpu else None)
    for _ in b.steps():
        if gpu:
            b.product(28_000 - idle, wait=True)
            b.host(idle)
        else:
            b.on_host("aten::mm", 28_000)
    return b
