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
from advisor.rules.support.common import impact_per_step, locate_row, run_steps_of, steps_seen
from advisor.testing import Examples, TraceBuilder

PAUSED = "steps with a pause of 1 ms or more"
_MIN_SPREAD = 0.2
"""Minimum spread of the pauses, as a share of the mean pause, at which a line through the steps is
fitted."""
MIN_MARGIN = 0.1
"""Minimum margin, as a share of the gain: a cured recording gained 84 ms per step where pauses took
80."""


class GcPauses(Rule):
    """Python's cyclic garbage collector runs inside the training loop and pauses it. A full
    collection visits every container object of the process, so it takes longer the more of them the
    program keeps. Most are usually datasets kept as Python lists and dictionaries. In a job of
    several ranks each pause delays all ranks, and they pause at different times.

    Pauses are measured by ``gc.callbacks``. The rule reports pauses that take more than 1% of the
    steps' time, or more than 50 ms of one step. Pauses in fewer than 3 steps do not show a rate: a
    long one gives a note. A step of at least twice the median that is mostly not due to its pauses
    is left out: it compiles or saves. The gain is the pauses times how much steps grow with them (a
    line through the steps, and twice its error). A pause costs nothing while the GPU works through
    its queue.

    If pauses are equally long in each step, no line can be fitted. They are lost time if the host
    computes the steps. If a GPU does, they cost at most its idle time in the profiled steps. Either
    the program calls ``gc.collect()``, and the recorder counts the calls by line. Or each step
    creates so many objects that Python collects by itself."""

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
    max_excess_ratio = Threshold(
        2.0,
        "times its pauses, for the time beyond the median of a step of two medians or more",
        CHOSEN,
    )

    min_pauses = Threshold(
        3, "steps with a pause of 1 ms or more; fewer show neither rate nor range", CHOSEN
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
        "    if step == 10:          # keeps what exists now\n"
        "        gc.collect()\n"
        "        gc.freeze()"
    )
    verify = "Record again: the pauses are gone. Watch resident memory: reference cycles stay."
    falsified_by = "the same step times with gc.disable()"
    confidence = 0.85
    cases = {
        "created in each step": {
            "title": "Garbage collection pauses each step",
            "fix": "Create fewer objects in a step: keep results in tensors or arrays, not in "
            "tuples and lists. By default Python collects after 700 or 2,000 new objects: let it "
            "collect less often. Memory of reference cycles is then freed later.",
            "code": "import gc\ngc.set_threshold(100_000, 20, 20)      # before the loop",
        },
        "requested in each step": {
            "title": "The program asks for a garbage collection in each step",
            "fix": "Take gc.collect() out of the loop: Python collects by itself, and a tensor is "
            "freed with its last reference. Collect every N steps if reference cycles hold much "
            "memory.",
            "code": "if step % 1000 == 0:      # not in each step\n    gc.collect()",
            "verify": "Record again: the pauses are gone. Watch memory: reference cycles stay.",
            "confidence": 0.9,
        },
    }

    def check(self, a: Analysis) -> Outcomes:
        run_steps = run_steps_of(a)
        if run_steps.count < self.min_steps or not run_steps.median:
            if run_steps.count:
                yield SkippedCheck(
                    what="pauses of the garbage collector",
                    why=f"{t.count_noun(run_steps.count, 'step')} without a profiler are too few",
                    # where the host runs ahead, one step in four is timed
                    record=f"a run of {self.min_steps * (8 if run_steps.host_is_ahead else 2)} "
                    "steps or more",
                )
            return
        pause, dur = run_steps.column("gc")[run_steps.timed], run_steps.timed_durations
        beyond = np.maximum(0.0, dur - run_steps.median)
        # a step that compiles creates many objects that are collected in it, but only once
        is_usual = (beyond <= self.max_excess_ratio * pause) | (beyond <= run_steps.median)
        pause, dur, beyond = pause[is_usual], dur[is_usual], beyond[is_usual]
        share = float(pause.sum()) / float(dur.sum())
        longest = float(pause.max())
        if share < self.min_share and longest < self.min_pause_ms * 1e6:
            return
        in_each_step = bool((pause >= 0.5 * pause.mean()).mean() >= self.min_step_share)
        paused = int((pause >= 1e6).sum())
        impact = _estimate_equal_pauses(a, float(np.median(pause))) if in_each_step else None
        if impact is None:
            lost = float(np.minimum(pause, beyond).sum()) / len(dur)
            if a.is_device_bound or lost < 0.2 * float(pause.sum()) / len(dur):
                return  # the GPU had work meanwhile, so the steps are not longer
            if paused < self.min_pauses and not in_each_step:
                yield from self._note_few(a, pause, paused, share)
                return
            impact = _estimate_impact(a, pause.astype(float), dur.astype(float), lost)
        places, calls = _find_collect_calls(a)
        requested = calls >= self.min_step_share
        texts = (
            self.case("requested in each step" if requested else "created in each step")
            if in_each_step
            else {}
        )
        yield Finding(
            summary=(
                f"Garbage collection pauses the loop for {t.format_duration(float(pause.mean()))} "
                f"per step on average, up to {t.format_duration(longest)} in one "
                f"step. {'Every' if in_each_step else 'A'} step"
                + (" has such a pause." if in_each_step else " with a pause is that much longer.")
            ),
            evidence=[
                Evidence("pauses of the garbage collector", float(pause.mean()), "ns", per="step"),
                self.compare("share of the steps' time", share, "min_share"),
                self.compare("longest pause in a step", longest, "min_pause_ms", "ns", times=1e6),
                self.compare(PAUSED, paused, "min_pauses", "count"),
                Evidence("objects frozen (gc.freeze)", run_steps.flag("gc_frozen"), "count"),
                steps_seen(run_steps),
            ],
            where=places if requested or not in_each_step else [],
            impact=impact,
            **texts,
        )

    def _note_few(self, a: Analysis, pause: Floats, paused: int, share: float) -> Outcomes:
        """Report long pauses as a note if too few were recorded for a rate."""
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
            where=_find_collect_calls(a)[0],
            impact=impact_without_gain("too few pauses to show a rate"),
            informational=True,
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "a long pause now and then": _build_gc_run(every=10, pause=60),
            "a short pause in every other step": _build_gc_run(every=2, pause=1),
            "two long pauses in the whole run": _build_gc_run(every=40, pause=60, steps=54),
            "in each step, on the host": _build_gc_run(
                every=1, pause=8, b=_build_window(gpu=False)
            ),
            "asked for in each step": _build_gc_run(
                every=1, pause=8, asked=128, b=_build_window(gpu=False)
            ),
            "in each step, the GPU waits": _build_gc_run(
                every=1, pause=8, b=_build_window(idle=12_000)
            ),
            "in each step, behind a GPU's work": (
                _build_gc_run(every=1, pause=8, b=_build_window(idle=100)),
                "a.is_device_bound",
            ),
            "steps with pauses are no longer": (
                _build_gc_run(every=10, pause=4, longer=0),
                "lost < 0.2 * float(pause.sum()) / len(dur)",
            ),
            "in steps that compile": (
                _build_gc_run(every=60, pause=400, longer=4000),
                "longest < self.min_pause_ms * 1000000.0",
            ),
            "one in the whole run": (
                _build_gc_run(every=100, pause=46, steps=54),
                "longest < self.min_pause_ms * 1000000.0",
            ),
            "hardly any": (_build_gc_run(every=50, pause=1), "min_pause_ms"),
            "no pauses": (
                _build_gc_run(every=10, pause=0),
                "longest < self.min_pause_ms * 1000000.0",
            ),
            "few steps": (_build_gc_run(every=2, pause=60, steps=12), "min_steps"),
        }


def _estimate_equal_pauses(a: Analysis, pause: float) -> Impact | None:
    """Estimate the cost of equal pauses (ns per step) in each step: all of them if the host
    computes, or else at most the device's idle time. ``None`` if unknown."""
    if a.trains_on_host:
        method = "pauses of the host, which computes the steps"
        return impact_per_step(a, pause, low=(1 - MIN_MARGIN) * pause, method=method)
    if a.device_id is None or a.is_device_bound or not a.span_ns:
        return None
    method = "upper bound (pauses, where the GPU idles)"
    return impact_per_step(a, pause, low=0.0, method=method, kind="upper bound")


def _find_collect_calls(a: Analysis) -> tuple[list[Location], float]:
    """Return lines that call for full collections, and their calls per step. They come from the
    trace's frames, or else from the recorder, which counts in powers of two."""
    calls = name_matches(a.trace.cpu["name"], r"^<built-in function collect>$").to_numpy().nonzero()
    if len(calls[0]):
        in_steps = len(rows_in_steps(a, calls[0]))
        return [locate_row(a, int(calls[0][0]), count=len(calls[0]))], in_steps / max(
            a.step_count, 1
        )
    record = run_steps_of(a).rank_record
    lines = {
        (_read_text(event, "file"), _read_line(event)): event
        for event in record.events_of("collect")
    }
    # without recorded numbers of calls, assume one per step
    call_counts = [event.get("times", len(record.steps)) for event in lines.values()]
    count = 2 * sum(number for number in call_counts if type(number) is int)
    places = [
        Location(file=file, line=line, function=_read_text(event, "function"))
        for (file, line), event in list(lines.items())[:3]
        if file is not None
    ]
    return places, count / max(len(record.steps), 1)


def _read_text(event: dict[str, Any], key: str) -> str | None:
    value = event.get(key)
    return re.sub(r"\s+", " ", value)[:1000] if isinstance(value, str) else None


def _read_line(event: dict[str, Any]) -> int | None:
    value = event.get("line")
    return value if type(value) is int and 0 < value < 10**9 else None


def _estimate_impact(a: Analysis, pause: Floats, dur: Floats, lost: float) -> Impact:
    """Estimate the pauses times how much a step grows with them: the slope of a line through the
    steps, and twice its error (White's, since steps with pauses scatter more). If all pauses are
    similar no line can be fitted, and the time lost is an upper bound."""
    mean, count = float(pause.mean()), len(pause)
    deviation = pause - mean
    square = float(np.square(deviation).sum())
    if count < 3 or square <= count * (_MIN_SPREAD * mean) ** 2:
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


def _build_gc_run(
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
        ms = pause if n % every == 0 else 0.0
        r.step(20 + (ms if longer is None else longer * (ms > 0)), gc=ms, forward=5)
    if asked:
        r.event("collect", file="train.py", line=9, function="main", times=asked)
    return b


def _build_window(*, gpu: bool = True, idle: float = 0.0) -> TraceBuilder:
    """Build steps of 28 ms, on the host or on a GPU that idles for ``idle`` µs."""
    b = TraceBuilder("A100" if gpu else None)
    for _ in b.steps():
        if gpu:
            b.product(28_000 - idle, wait=True)
            b.host(idle)
        else:
            b.on_host("aten::mm", 28_000)
    return b
