"""Counts training steps and leaves the process after enough of them: the pass under Scalene."""

from __future__ import annotations

import logging
import threading
from typing import Any

from advisor.recording.clock import ONLINE, THREAD, Tape
from advisor.recording.hooks import Hooks
from advisor.recording.loaders import Loaders
from advisor.recording.reader import Reader
from advisor.recording.steps import Segment

log = logging.getLogger("advisor")


class _Counter:
    """Listens, keeps nothing."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.tape = Tape()
        self.tape.here[ONLINE] = 1
        self.looping: list[Any] = []
        self.loaders = Loaders(lambda kind, data: None)
        self.reader = Reader(self.loaders, self._emit)
        self.hooks = Hooks(self)

    def glance(self, batch: Any) -> Any:
        """Batches are of no interest."""

    def entered(self, phase: int) -> None:
        """Nobody watches."""

    def left(self, phase: int) -> None:
        """Nobody watches."""

    def stepped(self) -> None:
        """An optimizer has stepped."""

    def drain(self) -> None:
        """Read the tape."""
        try:
            self.reader.read(self.tape.take())
        except Exception as error:
            self.broken(error)

    def look_again(self) -> None:
        """Forwards are of no interest."""

    def broken(self, error: BaseException) -> None:
        """Something of ours failed: let the program run to its end."""
        self.tape.here[THREAD] = -1
        log.warning("advisor: steps are not counted: %s", error)

    def _emit(self, segment: Segment, micro: int, gap: int) -> None:
        if self.reader.steps.count + 1 >= self.limit:
            self.tape.here[THREAD] = -1
            raise SystemExit(0)  # no Exception: hooks let it through, and so do most programs


def count_steps(limit: int) -> None:
    """Raise SystemExit in the calling thread after so many training steps."""
    counter = _Counter(limit)
    counter.hooks.install()
    counter.tape.here[THREAD] = threading.get_ident()
