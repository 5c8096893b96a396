"""Time by phase: a tape that the training thread writes on, and the clock that reads it.

The tape is the hot path. A hook puts codes and times on it in turn, by one ``list.extend``
(nothing can come between them), and that is all: no lock, no object that the garbage collector
would follow, no arithmetic. What it means is worked out when the tape is read: in the writer's
thread, or, while a profiled window is due, in the training thread at the boundaries of steps.
Times are ns of ``time.perf_counter_ns``.

Where a phase begins, the caches are cold: each object that is looked at costs more than what is
done with it. So hooks have a *short way* for the usual case, that the watched thread begins a
phase with none open and nobody to be told: one look at ``here`` says so, the begin stays there,
and both begin and end are put on the tape at the end. Whoever writes in between ``flush``es first.
"""

from __future__ import annotations

from typing import Any

OTHER, DATA, H2D, FORWARD, BACKWARD, OPTIMIZER = range(6)
PHASES = ("other", "data", "h2d", "forward", "backward", "optimizer")
MAX_PHASES = 64
"""Names beyond these share ``other``: a name made up for each step must not grow a list."""
MAX_TAPE = 20_000_000
"""Entries that wait to be read: minutes of a disk that does not answer."""

THREAD, PHASE, WATCHED, ONLINE, DUE, FREE, HOME, BEGUN, WHO, OUTSIDE = range(10)
"""``Tape.here``:

- ``THREAD``: the thread that is watched (``NOBODY``: recording is off; hooks do nothing in others);
- ``PHASE``: the phase that is open in it;
- ``WATCHED``: somebody is told of phases;
- ``ONLINE``: something is to be done when an optimizer has stepped;
- ``DUE``: the tape is read in the training thread, a window may open or close there;
- ``FREE``: the thread that may take the short way now; written by that thread alone, but for
  ``NOBODY``;
- ``HOME``: what ``FREE`` is to be when no phase is open any more;
- ``BEGUN``: when the phase of the short way began, 0: none, or it is on the tape already;
- ``WHO``: id of the optimizer whose phase that is, 0: no optimizer's;
- ``OUTSIDE``: perhaps no loader's batch is being worked on."""
NOBODY = -1

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
) = range(MAX_PHASES, MAX_PHASES + 24)


class Tape:
    """What the training thread writes: codes and values in turn. A code below ``MAX_PHASES`` is a
    phase that begins at the time that follows."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.here = [NOBODY, OTHER, 0, 0, 0, NOBODY, NOBODY, 0, 0, 1]
        """One list for all that hooks look at."""
        self.opened: list[tuple[int, int]] = []
        """Optimizers that step, and the phase around each."""
        self.watched: list[Any] = []
        """Those that want to be told of phases at once (NVTX, CUDA events)."""
        self.names = list(PHASES)

    def start(self, thread: int) -> None:
        """Listen to a thread in which no phase is open. Called in it."""
        here = self.here
        here[PHASE], here[BEGUN], here[WHO], here[OUTSIDE] = OTHER, 0, 0, 1
        self.opened.clear()
        here[THREAD] = thread
        self.settle()
        here[FREE] = here[HOME]

    def stop(self) -> None:
        """Listen no more. In any thread."""
        self.here[THREAD] = self.here[HOME] = self.here[FREE] = NOBODY

    def settle(self) -> None:
        """Work out who may take the short way. In any thread: it is open, or closed, for good once
        the phase that is open has ended."""
        here = self.here
        here[HOME] = here[THREAD]
        if here[WATCHED] or here[DUE] or here[THREAD] == NOBODY:
            here[HOME] = NOBODY

    def flush(self) -> None:
        """Put the begin of the short way's phase on the tape: something inside it is to follow.
        In the watched thread."""
        here = self.here
        if here[BEGUN]:
            phase = here[PHASE]
            self.log.extend((FETCH if phase == DATA else phase, here[BEGUN]))
            here[BEGUN] = 0
            if here[WHO]:
                self.opened.append((here[WHO], OTHER))
                here[WHO] = 0

    def back(self, phase: int) -> None:
        """A phase has ended, and this one goes on."""
        here = self.here
        here[PHASE] = phase
        if phase == OTHER:
            here[FREE] = here[HOME]

    def watch(self, watcher: Any) -> None:
        """Tell ``watcher`` of phases from now on. In the watched thread."""
        if watcher not in self.watched:
            self.watched.append(watcher)
        self.here[WATCHED] = 1
        self.here[HOME] = self.here[FREE] = NOBODY

    def unwatch(self, watcher: Any) -> bool:
        """No more; whether it was told until now."""
        was = watcher in self.watched
        if was:
            self.watched.remove(watcher)
        self.here[WATCHED] = int(bool(self.watched))
        self.settle()
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
        self.stack.append(self.cur)
        self.cur = phase

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
