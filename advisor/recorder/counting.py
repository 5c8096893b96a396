"""Counts training steps and leaves the process after enough of them: the pass under Scalene, and
programs that are only tried."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from advisor.recorder.clock import ONLINE, THREAD, Tape
from advisor.recorder.hooks import Hooks, Listener
from advisor.recorder.loaders import Loaders
from advisor.recorder.steps import StepSegment
from advisor.recorder.tape_reader import TapeReader

log = logging.getLogger("advisor")


class CallCounter(Listener):
    """Listens, keeps nothing; loops that do not train and other threads are left alone. ``ended``
    is called with the number of each step as it ends, in the training thread; what it raises that
    is no Exception goes through to the program."""

    def __init__(self, ended: Callable[[int], None]) -> None:
        self.ended = ended
        self.count = 0
        self.tape = Tape()
        self.tape.here[ONLINE] = 1
        self.looping: list[Any] = []
        self.loaders = Loaders(lambda kind, data: None)
        self.reader = TapeReader(self.loaders, self._emit)
        self.hooks = Hooks(self)

    def drain(self) -> None:
        """Read the tape."""
        try:
            self.reader.read(self.tape.take())
        except Exception as error:
            self.broken(error)

    def broken(self, error: BaseException) -> None:
        """Something of ours failed: let the program run to its end."""
        self.stop()
        log.warning("advisor: steps are not counted: %s", error)

    def start(self) -> None:
        """Count the steps of the calling thread."""
        self.hooks.install()
        self.tape.here[THREAD] = threading.get_ident()

    def stop(self) -> None:
        """Count no further calls."""
        self.tape.here[THREAD] = -1

    def _emit(self, segment: StepSegment, micro: int, gap: int) -> None:
        if not self.reader.steps.late:  # else it ended some time ago
            self.count += 1
            self.ended(self.count)
