"""Counts training steps and leaves the process after enough of them: the pass under Scalene."""

from __future__ import annotations

import logging
from typing import Any

from advisor.recording.clock import Clock
from advisor.recording.hooks import Hooks
from advisor.recording.loaders import Loaders
from advisor.recording.steps import Segment, Steps

log = logging.getLogger("advisor")


class _Counter:
    """Listens, keeps nothing."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.clock = Clock()
        self.steps = Steps(self.clock, self._emit)
        self.loaders = Loaders(lambda kind, data: None)
        self.hooks = Hooks(self)

    def batch(self, batch: Any) -> None:
        """A loader gave this."""

    def broken(self, error: BaseException) -> None:
        """Something of ours failed: let the program run to its end."""
        self.clock.stop()
        log.warning("advisor: steps are not counted: %s", error)

    def _emit(self, segment: Segment, micro: int, gap: int) -> None:
        if self.steps.count + 1 >= self.limit:
            self.clock.stop()
            raise SystemExit(0)  # no Exception: hooks let it through, and so do most programs


def count_steps(limit: int) -> None:
    """Raise SystemExit in the calling thread after so many training steps."""
    counter = _Counter(limit)
    counter.hooks.install()
    counter.clock.start()
    counter.steps.begun = counter.clock.last
