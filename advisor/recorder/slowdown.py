"""Detector of training that slows down. Runs in the writer's thread, on records of steps."""

import gc
import sys
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from threading import get_ident
from time import perf_counter_ns
from typing import Any

from advisor.recorder.tape import PAUSE, THREAD, Tape

SLOW_RATIO = 1.25
"""Minimum ratio of the recent median to the baseline that counts as slow."""
SPIKE_RATIO = 3.0
"""Minimum ratio of a step to the median that counts as a spike."""
MIN_SPIKE_NS = 100_000_000
"""Minimum time lost by a spike, ns: for less, a window would cost more."""
WARMUP_STEPS = 5
"""Number of first steps to ignore, because they compile and warm up."""
MIN_BASELINE_STEPS = 32
"""Minimum number of steps in the baseline."""
MIN_BASELINE_NS = 2_000_000_000
"""Minimum total time of the baseline, ns: over less, the machine's speed varies by itself."""
MAX_BASELINE_STEPS = 4096
RECENT_STEPS = 16
"""Number of latest steps whose median is compared with the baseline."""
FIRST_STEPS = 5
"""Number of first steps after the warm-up that the recent ones are compared with until there is a
baseline: the first window is near them."""
CHANGE_RATIO = 2.0
"""Minimum ratio of recent to first steps, or of first to recent, that shows that the loop had not
begun at the first window: the steps were those of a preparation."""
MIN_CHANGED_NS = 300_000_000
"""Minimum time of the recent steps for that, ns."""
MIN_SLOW_NS = 1_000_000_000
"""Minimum time for which that median must be slow, ns."""
MIN_ALARM_INTERVAL = 100
"""Minimum number of steps between two alarms."""
MIN_CHANGE_NS = 2_000_000
"""Minimum difference that counts, ns: machines vary by less."""


class SlowdownWatch:
    """Detector of slowdowns, which takes unprofiled steps and returns reasons to open a window."""

    def __init__(self) -> None:
        self._steps = 0
        self._baseline: list[int] = []
        self._baseline_ns = 0
        """Total time of the baseline's steps, ns."""
        self._recent: deque[int] = deque(maxlen=RECENT_STEPS)
        self._slow_ns = 0
        """Time for which the recent median has been slow, ns."""
        self._median: float | None = None
        self._next_alarm = 0

    def add_step(self, dur: int) -> str | None:
        """Add a step of ``dur`` ns. Return the reason to open a window, or ``None``."""
        self._steps += 1
        if self._steps <= WARMUP_STEPS:
            return None
        if self._median is None:
            self._baseline_ns += dur
            if len(self._baseline) < MAX_BASELINE_STEPS:
                self._baseline.append(dur)
            if reason := self._find_change():
                return reason
            if len(self._baseline) >= MIN_BASELINE_STEPS and self._baseline_ns >= MIN_BASELINE_NS:
                self._median = median(self._baseline)
            return None
        self._recent.append(dur)
        if self._steps < self._next_alarm:
            return None
        if len(self._recent) == RECENT_STEPS:
            recent = median(self._recent)
            is_slow = recent > self._median * SLOW_RATIO and recent - self._median > MIN_CHANGE_NS
            self._slow_ns = (
                (self._slow_ns + dur if self._slow_ns else sum(self._recent)) if is_slow else 0
            )
            if self._slow_ns >= MIN_SLOW_NS:
                reason = (
                    f"the median step takes {recent / self._median:.2f} times as long as before"
                )
                self._median = recent
                return self._raise_alarm(reason)
        if dur > self._median * SPIKE_RATIO and dur - self._median > MIN_SPIKE_NS:
            return self._raise_alarm(f"a step took {dur / self._median:.1f} times the median")
        return None

    def _find_change(self) -> str | None:
        """Return the reason to open a window if steps are much longer or shorter than the first
        ones, or ``None``. The recent ones then begin the baseline."""
        if len(self._baseline) < FIRST_STEPS + RECENT_STEPS:
            return None
        recent_steps = self._baseline[-RECENT_STEPS:]
        first, recent = median(self._baseline[:FIRST_STEPS]), median(recent_steps)
        ratio = recent / max(first, 1)
        if 1 / CHANGE_RATIO < ratio < CHANGE_RATIO or abs(recent - first) <= MIN_CHANGE_NS:
            return None
        if sum(recent_steps) < MIN_CHANGED_NS:
            return None
        self._baseline = recent_steps[
            -RECENT_STEPS // 2 :
        ]  # at least the half is of the new length
        self._baseline_ns = sum(self._baseline)
        return self._raise_alarm(f"steps take {ratio:.2f} times as long as the first ones")

    def add_steps(self, lengths: list[int]) -> str | None:
        """Add several steps, ns. Return the last reason to open a window, or ``None``."""
        baseline = self._median
        if baseline is not None:
            # an alarm needs a new or recent step above both of these limits
            limit = max(baseline * min(SLOW_RATIO, SPIKE_RATIO), baseline + MIN_CHANGE_NS)
            if max(lengths) <= limit and max(self._recent, default=0) <= limit:
                self._steps += len(lengths)
                self._slow_ns = 0
                self._recent.extend(lengths[-RECENT_STEPS:])
                return None
        reason = None
        for length in lengths:
            reason = self.add_step(length) or reason
        return reason

    def _raise_alarm(self, reason: str) -> str:
        self._next_alarm = self._steps + MIN_ALARM_INTERVAL
        return reason


FULL_GENERATION = 2
"""Number of the oldest generation, which a full collection collects."""
MAX_GC_LINES = 8
"""Maximum number of noted lines that request full collections."""


class GcPauseHook:
    """Recorder of garbage collections in the watched thread (``gc.callbacks``), and of the lines
    that request full ones. Each line is noted at its first, second, fourth, eighth … call, with the
    number of calls. ``write_event`` writes an event."""

    def __init__(self, tape: Tape, write_event: Callable[[str, dict[str, Any]], None]) -> None:
        self._tape = tape
        self._write_event = write_event
        self._begun = 0
        self._lines: dict[tuple[Any, int], int] = {}

    def install(self) -> None:
        gc.callbacks.append(self._on_collection)

    def remove(self) -> None:
        if self._on_collection in gc.callbacks:
            gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: str, info: Mapping[str, Any]) -> None:
        if get_ident() != self._tape.hook_state[THREAD]:
            return
        if phase == "start":
            if info.get("generation") == FULL_GENERATION:
                self._note_line()
            self._begun = perf_counter_ns()
        elif self._begun:
            self._tape.log.extend((PAUSE, perf_counter_ns() - self._begun))
            self._begun = 0

    def _note_line(self) -> None:
        """Note the line that requests a full collection. Python itself starts one only after enough
        younger collections; before that, the current line has requested it."""
        if gc.get_count()[FULL_GENERATION] > gc.get_threshold()[FULL_GENERATION]:
            return
        frame = sys._getframe(2)
        line = frame.f_code, frame.f_lineno
        if line not in self._lines and len(self._lines) >= MAX_GC_LINES:
            return
        calls = self._lines[line] = self._lines.get(line, 0) + 1
        if calls & (calls - 1) == 0:
            code = frame.f_code
            location = {"file": code.co_filename, "line": line[1], "function": code.co_qualname}
            self._write_event("collect", {**location, "times": calls})
