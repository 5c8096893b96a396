"""Time by phase: a tape that the training thread writes on, and the clock that reads it.

The tape is the hot path. A hook puts two things on it, a code and a time, by one ``list.extend``
(nothing can come between them), and that is all: no lock, no object that the garbage collector
would follow, no arithmetic. What it means is worked out when the tape is read: in the writer's
thread, or, while a profiled window is due, in the training thread at the boundaries of steps.
Times are ns of ``time.perf_counter_ns``.
"""

from __future__ import annotations

from typing import Any

OTHER, DATA, H2D, FORWARD, BACKWARD, OPTIMIZER, BETWEEN = range(7)
PHASES = ("other", "data", "h2d", "forward", "backward", "optimizer", "between steps")
"""``BETWEEN`` is no phase that a hook begins: it is what lies between the end of a step and the
first phase of the next, where no loader that is known is drawn from."""
PART_OF_GRADIENTS = frozenset((DATA, FORWARD, BACKWARD))
"""Phases in which a forward or a backward is part of something else …"""
PART_OF_UPLOADS = PART_OF_GRADIENTS | {H2D, OPTIMIZER}
"""… and a copy to a device."""
MAX_PHASES = 64
"""Names beyond these share ``other``: a name made up for each step must not grow a list."""
MAX_TAPE = 20_000_000
"""Entries that wait to be read: minutes of a disk that does not answer."""

THREAD, PHASE, WATCHED, ONLINE, LAST_LOADER, OPTIMIZED, LEARNT = range(7)
"""``Tape.here``: the thread that is watched (-1: recording is off; hooks do nothing in others), the
phase that is open in it, whether somebody listens to phases, whether something is to be done
when an optimizer has stepped, the loader that was noted last, whether an optimizer's step was
ever seen, and whether what follows is of no use for telling a loop that does not train."""

(
    LEAVE,  # time: the innermost phase ends
    FETCH,  # time: a loader is asked for a batch; phase ``data`` begins
    FETCHED,  # time: it gave one; the phase ends
    FETCHED_INSIDE,  # time: the same, inside a phase ``data`` that goes on
    EXHAUSTED,  # time: it has no more; the phase ends
    ITERATE,  # time: a loader is iterated anew
    ITERATED,  # data of the iterator
    LOADER,  # number of the loader that batches now come from
    BATCH,  # what was noted of the batch
    FORWARD_END,  # time: the outermost module returned; the phase ends
    FORWARD_END_NO_GRAD,  # the same, and nothing can be learnt from it
    FORWARD_END_NO_GRAPH,  # the same with gradients enabled, of a model that nothing trains
    FORWARD_END_EVALUATION,  # the same with a graph, in evaluation mode …
    FORWARD_END_TRAINING,  # … and the next in training mode of a model that had one of those
    BACKWARD_END,  # time; the phase ends
    OPTIMIZED_BY,  # id of the optimizer that the next entry is of
    OPTIMIZER_END,  # time; the phase ends
    SAVE,  # time: a checkpoint begins
    BOUNDARY,  # time: the user says that a step ends
    BEGIN,  # time: a loop begins whose every iteration is a step
    BREAK_OFF,  # time: it was left
    ABANDON,  # time: what was begun is no step
    RESET,  # time: an exception left phases open
    PAUSE,  # length of a garbage collection
    MEMORY,  # the allocator's counters
    MARK,  # (phase, CUDA event)
    MARKS_END,  # nothing: no more of them for a while
    APPLIED,  # time: weights or gradients were changed since the last backward
    FORWARD_OF,  # id of the module whose forward ended just before; negative: it has no parameters
    GENERATE,  # time: a call of ``generate`` begins; its forwards are seen as well
    GENERATED,  # time: it has ended
) = range(MAX_PHASES, MAX_PHASES + 31)
FORWARDED = frozenset(range(FORWARD_END, FORWARD_END_TRAINING + 1))
"""All ends of an outermost module's forward."""


class Tape:
    """What the training thread writes: codes and values in turn. A code below ``MAX_PHASES`` is a
    phase that begins at the time that follows."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.here = [-1, OTHER, 0, 0, -1, 0, 1]
        """One list for all that hooks look at, by ``THREAD``, ``PHASE``, ``WATCHED``, ``ONLINE``,
        ``LAST_LOADER``, ``OPTIMIZED`` and ``LEARNT``: the caches are cold when they run."""
        self.watched: list[Any] = []
        """Those that listen to phases at once (NVTX, CUDA events)."""
        self.names = list(PHASES)

    def add_watcher(self, watcher: Any) -> None:
        """Tell ``watcher`` of phases from now on."""
        if watcher not in self.watched:
            self.watched.append(watcher)
        self.here[WATCHED] = 1

    def remove_watcher(self, watcher: Any) -> bool:
        """Tell ``watcher`` no further phases; whether it listened until now."""
        was = watcher in self.watched
        if was:
            self.watched.remove(watcher)
        self.here[WATCHED] = int(bool(self.watched))
        return was

    def phase(self, name: str) -> int:
        """Number of a phase, made up on first use."""
        try:
            return self.names.index(name)
        except ValueError:
            if len(self.names) >= MAX_PHASES:
                return OTHER
        self.names.append(name)
        return len(self.names) - 1

    def take(self) -> list[Any]:
        """Cut off what was written so far. The thread may go on writing meanwhile: each of these
        operations is atomic."""
        count = len(self.log)
        taken = self.log[:count]
        del self.log[:count]
        return taken


class Clock:
    """Time in each phase since the last ``cut``. Phases nest; the inner one's time is not the
    outer one's, so that phases add up to the time that passed."""

    __slots__ = ("acc", "cur", "last", "stack")

    def __init__(self) -> None:
        self.acc = [0] * MAX_PHASES
        self.cur = OTHER
        self.last = 0
        self.stack: list[int] = []

    def start(self, now: int) -> None:
        """Begin, with no phase open."""
        self.acc = [0] * MAX_PHASES
        self.stack.clear()
        self.cur = OTHER
        self.last = now

    def enter(self, phase: int, now: int) -> None:
        """A phase begins, inside the one that is open."""
        self.acc[self.cur] += now - self.last
        self.last = now
        self.stack.append(OTHER if self.cur == BETWEEN else self.cur)
        self.cur = phase

    def rest(self) -> None:
        """A step has ended, and what follows is between steps until a phase begins."""
        if not self.stack:
            self.cur = BETWEEN

    def leave(self, now: int) -> None:
        """The innermost phase ends."""
        if self.stack:
            self.acc[self.cur] += now - self.last
            self.last = now
            self.cur = self.stack.pop()

    def leave_all(self, now: int) -> None:
        """Every phase ends."""
        while self.stack:
            self.leave(now)

    def cut(self, now: int) -> list[int]:
        """Times by phase since the last cut, and begin anew; open phases stay open."""
        acc = self.acc
        acc[self.cur] += now - self.last
        self.last = now
        self.acc = [0] * MAX_PHASES
        return acc
