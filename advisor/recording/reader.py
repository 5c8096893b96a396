"""Reads the tape: what the training thread noted, in order, becomes phases, steps and loaders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from advisor.recording import clock as tape
from advisor.recording.clock import DATA, FORWARD, MAX_PHASES, OPTIMIZER, Clock
from advisor.recording.loaders import Loaders
from advisor.recording.steps import Segment, Steps

OPENING = frozenset((FORWARD, tape.BACKWARD, OPTIMIZER))
"""Phases that a step may begin with, besides those of the user's own."""


class Reader:
    """Handlers by code. Not to be used in two threads at once."""

    def __init__(self, loaders: Loaders, emit: Callable[[Segment, int, int], None]) -> None:
        self.clock = Clock()
        self.steps = Steps(self.clock, emit)
        self.loaders = loaders
        self.batch: Any = None
        """The last one that was noted."""
        self.memory: Any = None
        """The allocator's counters since the last step."""
        self.paused = 0
        """Garbage collection since the last step, ns."""
        self._optimizer = 0
        self._handlers: dict[int, Callable[[Any], None]] = {
            tape.LEAVE: self.clock.leave,
            tape.FETCH: self._fetch,
            tape.FETCHED: self._fetched,
            tape.FETCHED_INSIDE: lambda now: self.steps.fetched(),
            tape.EXHAUSTED: self._exhausted,
            tape.ITERATE: self.steps.iterating,
            tape.ITERATED: self.loaders.began,
            tape.LOADER: self.loaders.fetching_from,
            tape.BATCH: self._batch,
            tape.FORWARD_END: self._forward_end,
            tape.FORWARD_END_NO_GRAD: self._forward_end_no_grad,
            tape.BACKWARD_END: self._backward_end,
            tape.OPTIMIZED_BY: self._optimized_by,
            tape.OPTIMIZER_END: self._optimizer_end,
            tape.SAVE: self.steps.saving,
            tape.CLEARED: self.steps.cleared,
            tape.BOUNDARY: self.steps.boundary,
            tape.BEGIN: self.steps.begin,
            tape.BREAK_OFF: self.steps.break_off,
            tape.ABANDON: self.steps.abandon,
            tape.RESET: self.clock.leave_all,
            tape.PAUSE: self._pause,
            tape.MEMORY: self._memory,
            tape.MARK: self.steps.mark,
            tape.MARKS_END: lambda _: self.steps.unmarked(),
        }

    def read(self, taken: list[Any]) -> None:
        """Go through what was cut off the tape."""
        clock, steps, handlers = self.clock, self.steps, self._handlers
        entries = iter(taken)
        for code, value in zip(entries, entries, strict=True):
            if code < MAX_PHASES:
                if not steps.open and (code in OPENING or code > OPTIMIZER):
                    steps.active(value)
                clock.enter(code, value)
            else:
                handlers[code](value)

    def _fetch(self, now: int) -> None:
        self.steps.fetching(now)
        self.clock.enter(DATA, now)

    def _fetched(self, now: int) -> None:
        self.clock.leave(now)
        self.steps.fetched()

    def _exhausted(self, now: int) -> None:
        self.clock.leave(now)
        self.steps.exhausted(now)
        self.loaders.exhausted()

    def _batch(self, glance: Any) -> None:
        before = self.batch
        if glance is not None and before is not None and before[1] is not None:
            glance = glance[0], before[1]  # of one that was fetched ahead
        self.batch = glance

    def _forward_end(self, now: int) -> None:
        self.clock.leave(now)
        self.steps.forwarded(True, now)

    def _forward_end_no_grad(self, now: int) -> None:
        self.clock.leave(now)
        self.steps.forwarded(False, now)

    def _backward_end(self, now: int) -> None:
        self.clock.leave(now)
        self.steps.backwarded(now)
        self.loaders.trained()

    def _optimized_by(self, optimizer: int) -> None:
        self._optimizer = optimizer

    def _optimizer_end(self, now: int) -> None:
        self.clock.leave(now)
        if self.clock.cur != OPTIMIZER:  # else a scaler or another optimizer is around it
            self.steps.optimized(self._optimizer, now)

    def _pause(self, length: int) -> None:
        self.paused += length

    def _memory(self, counters: Any) -> None:
        self.memory = counters
