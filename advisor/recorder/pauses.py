"""How long the garbage collector stopped the training thread."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from threading import get_ident
from time import perf_counter_ns
from typing import Any

from advisor.recorder.clock import PAUSE, THREAD, Tape


class Pauses:
    """Notes the collections that run in the watched thread (``gc.callbacks``)."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._begun = 0

    def install(self) -> None:
        """Listen."""
        gc.callbacks.append(self._call)

    def remove(self) -> None:
        """Stop listening."""
        if self._call in gc.callbacks:
            gc.callbacks.remove(self._call)

    def _call(self, phase: str, info: Mapping[str, Any]) -> None:
        if get_ident() != self._tape.here[THREAD]:
            return
        if phase == "start":
            self._begun = perf_counter_ns()
        elif self._begun:
            self._tape.log.extend((PAUSE, perf_counter_ns() - self._begun))
            self._begun = 0
