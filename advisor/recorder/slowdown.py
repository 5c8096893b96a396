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

SLOWER = 1.25
"""Ratio of the recent median to the first one that counts as slow: a quarter more is noticeable."""
SPIKE = 3.0
"""Ratio of one step to the median that counts as a spike …"""
SPIKE_NS = 100_000_000
"""… and the least time it must lose, ns: for less, a window would cost more."""
WARMUP_STEPS = 5
"""First steps, which compile and warm up, that are ignored."""
BASE = 32
"""Minimum number of steps in the baseline."""
BASE_NS = 2_000_000_000
"""Minimum total time of the baseline, ns: over less, the machine's speed varies by itself."""
MAX_BASE = 4096
RECENT = 16
"""Number of latest steps whose median is compared with the baseline."""
RECENT_NS = 1_000_000_000
"""Minimum time for which that median must be slow, ns."""
APART = 100
"""Least number of steps from one alarm to the next."""
FLOOR_NS = 2_000_000
"""Smallest difference that counts, ns; below it, machines vary by themselves."""


class SlowdownWatch:
    """Detector of slowdowns: takes unprofiled steps, returns reasons to open a window."""

    def __init__(self) -> None:
        self._seen = 0
        self._base: list[int] = []
        self._based = 0
        """Total time of the first steps, ns."""
        self._recent: deque[int] = deque(maxlen=RECENT)
        self._slow = 0
        """Time for which the recent median was slow, ns."""
        self._median: float | None = None
        self._quiet_until = 0

    def add_step(self, dur: int) -> str | None:
        """Add a step of ``dur`` ns; return the reason to open a window, or ``None``."""
        self._seen += 1
        if self._seen <= WARMUP_STEPS:
            return None
        if self._median is None:
            self._based += dur
            if len(self._base) < MAX_BASE:
                self._base.append(dur)
            if len(self._base) >= BASE and self._based >= BASE_NS:
                self._median = median(self._base)
            return None
        self._recent.append(dur)
        if self._seen < self._quiet_until:
            return None
        if len(self._recent) == RECENT:
            now = median(self._recent)
            slow = now > self._median * SLOWER and now - self._median > FLOOR_NS
            self._slow = (self._slow + dur if self._slow else sum(self._recent)) if slow else 0
            if self._slow >= RECENT_NS:
                reason = f"the median step takes {now / self._median:.2f} times what it did"
                self._median = now
                return self._alarm(reason)
        if dur > self._median * SPIKE and dur - self._median > SPIKE_NS:
            return self._alarm(f"a step took {dur / self._median:.1f} times the median")
        return None

    def add_steps(self, lengths: list[int]) -> str | None:
        """Add several steps, ns; return the last reason to open a window, or ``None``."""
        usual = self._median
        if usual is not None:
            # an alarm needs a step above both of these, this one or one of the recent ones
            limit = max(usual * min(SLOWER, SPIKE), usual + FLOOR_NS)
            if max(lengths) <= limit and max(self._recent, default=0) <= limit:
                self._seen += len(lengths)
                self._slow = 0
                self._recent.extend(lengths[-RECENT:])
                return None
        reason = None
        for length in lengths:
            reason = self.add_step(length) or reason
        return reason

    def _alarm(self, reason: str) -> str:
        self._quiet_until = self._seen + APART
        return reason


FULL = 2
"""Number of the oldest generation, collected in a full collection."""
MAX_PLACES = 8
"""Most lines noted that ask for full collections."""


class GcPauseHook:
    """Recorder of collections in the watched thread (``gc.callbacks``), and of lines that ask for
    full ones. Each is noted at its first, second, fourth, eighth … call, with their number.
    ``write_event`` writes an event."""

    def __init__(self, tape: Tape, write_event: Callable[[str, dict[str, Any]], None]) -> None:
        self._tape = tape
        self._write_event = write_event
        self._begun = 0
        self._places: dict[tuple[Any, int], int] = {}

    def install(self) -> None:
        gc.callbacks.append(self._call)

    def remove(self) -> None:
        if self._call in gc.callbacks:
            gc.callbacks.remove(self._call)

    def _call(self, phase: str, info: Mapping[str, Any]) -> None:
        if get_ident() != self._tape.hook_state[THREAD]:
            return
        if phase == "start":
            if info.get("generation") == FULL:
                self._note_place()
            self._begun = perf_counter_ns()
        elif self._begun:
            self._tape.log.extend((PAUSE, perf_counter_ns() - self._begun))
            self._begun = 0

    def _note_place(self) -> None:
        """Note the line that asks for a full collection. By itself Python starts one only after
        enough younger ones; before that, the line that runs has asked for it."""
        if gc.get_count()[FULL] > gc.get_threshold()[FULL]:
            return
        frame = sys._getframe(2)
        place = frame.f_code, frame.f_lineno
        if place not in self._places and len(self._places) >= MAX_PLACES:
            return
        times = self._places[place] = self._places.get(place, 0) + 1
        if times & (times - 1) == 0:
            code = frame.f_code
            noted = {"file": code.co_filename, "line": place[1], "function": code.co_qualname}
            self._write_event("collect", {**noted, "times": times})
