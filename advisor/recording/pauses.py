"""How long the garbage collector stopped the training thread."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from time import perf_counter_ns
from typing import Any

from advisor.recording.clock import Clock


class Pauses:
    """Adds up the collections that run in the clock's thread (``gc.callbacks``)."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._begun = 0
        self._spent = 0

    def install(self) -> None:
        """Listen."""
        gc.callbacks.append(self._call)

    def remove(self) -> None:
        """Stop listening."""
        if self._call in gc.callbacks:
            gc.callbacks.remove(self._call)

    def take(self) -> int:
        """Time since the last call of this, ns."""
        spent, self._spent = self._spent, 0
        return spent

    def _call(self, phase: str, info: Mapping[str, Any]) -> None:
        if phase == "start":
            self._begun = perf_counter_ns()
        elif self._begun and self._clock.ident != -1:
            self._spent += perf_counter_ns() - self._begun
            self._begun = 0
