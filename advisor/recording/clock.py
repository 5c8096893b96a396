"""The stopwatch in the training thread: time by phase, each instant counted once.

This is the hot path. Nothing here takes a lock, writes, or calls torch; a pair of ``enter`` and
``leave`` is some 0.5 µs. Times are ns of ``time.perf_counter_ns``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

OTHER, DATA, H2D, FORWARD, BACKWARD, OPTIMIZER = range(6)
PHASES = ("other", "data", "h2d", "forward", "backward", "optimizer")
MAX_PHASES = 64
"""Names beyond these share ``other``: a name made up for each step must not grow a list."""


class Clock:
    """Which phase the training thread is in, and how long it was in each since the last ``cut``.

    Phases nest; the inner one's time is not the outer one's, so that phases add up to the time
    that passed. ``ident`` is the thread that is watched, -1 when recording is off: hooks compare
    it first and do nothing in other threads.
    """

    __slots__ = (
        "acc", "attribute", "attributes", "cur", "ident", "last", "mark", "names", "pop", "push",
        "stack",
    )  # fmt: skip

    def __init__(self) -> None:
        self.ident = -1
        self.names = list(PHASES)
        self.acc = [0] * len(PHASES)
        self.cur = OTHER
        self.last = perf_counter_ns()
        self.stack: list[int] = []
        self.push: Callable[[Any], Any] | None = None
        """Opens an NVTX range; ``None``: no NVTX."""
        self.pop: Callable[[], Any] | None = None
        self.attributes: list[Any] = []
        """NVTX attributes by phase …"""
        self.attribute: Callable[[str], Any] | None = None
        """… and what makes them of a name."""
        self.mark: Callable[[int], None] | None = None
        """Called with the phase that begins; ``None``: this step has no CUDA events."""

    def start(self) -> None:
        """Begin in the calling thread."""
        self.acc = [0] * len(self.names)
        self.stack.clear()
        self.cur = OTHER
        self.last = perf_counter_ns()
        self.ident = threading.get_ident()

    def stop(self) -> None:
        """From now on hooks pass through."""
        self.ident = -1
        self.mark = None

    def enter(self, phase: int) -> None:
        """A phase begins, inside the one that is open."""
        now = perf_counter_ns()
        self.acc[self.cur] += now - self.last
        self.last = now
        self.stack.append(self.cur)
        self.cur = phase
        if self.push is not None:
            self.push(self.attributes[phase])
        if self.mark is not None:
            self.mark(phase)

    def leave(self) -> None:
        """The innermost phase ends."""
        stack = self.stack
        if not stack:
            return
        now = perf_counter_ns()
        self.acc[self.cur] += now - self.last
        self.last = now
        self.cur = stack.pop()
        if self.pop is not None:
            self.pop()
        if self.mark is not None:
            self.mark(self.cur)

    def leave_to(self, depth: int) -> None:
        """Leave phases until this many are open: what an exception left behind, closed."""
        while len(self.stack) > depth:
            self.leave()

    def cut(self, now: int) -> list[int]:
        """Times by phase since the last cut, and begin anew; open phases stay open."""
        acc = self.acc
        acc[self.cur] += now - self.last
        self.last = now
        self.acc = [0] * len(self.names)
        return acc

    def phase(self, name: str) -> int:
        """Number of a phase, made up on first use."""
        try:
            return self.names.index(name)
        except ValueError:
            if len(self.names) >= MAX_PHASES:
                return OTHER
        if self.attribute is not None:
            self.attributes.append(self.attribute(name))
        self.names.append(name)
        self.acc.append(0)
        return len(self.names) - 1
