"""Tape of phases that the training thread writes, and the clock that reads it.

The tape is the hot path. A hook puts two things on it, a code and a time, by one ``list.extend``
(nothing can come between them), and that is all: no lock, no object that the garbage collector
would follow, no arithmetic. What it means is worked out when the tape is read: in the writer's
thread, or, while a profiled window is due, in the training thread at the boundaries of steps.
Times are ns of ``time.perf_counter_ns``."""

from typing import Any

OTHER, DATA, H2D, FORWARD, BACKWARD, OPTIMIZER, BETWEEN = range(7)
PHASES = ("other", "data", "h2d", "forward", "backward", "optimizer", "between steps")
"""Names of the phases by number. No hook begins ``BETWEEN``: it lies between the end of a step and
the first phase of the next, where no known loader is fetched from."""
PART_OF_GRADIENTS = frozenset((DATA, FORWARD, BACKWARD))
"""Phases within which a forward or backward is not timed …"""
PART_OF_UPLOADS = PART_OF_GRADIENTS | {H2D, OPTIMIZER}
"""… nor a copy to a device."""
MAX_PHASES = 64
"""Most phase names; later ones count as ``other``: names made up per step must not grow a list."""
MAX_TAPE = 20_000_000
"""Most entries that wait to be read: minutes of a disk that does not answer."""

(
    THREAD, PHASE, WATCHED, ACT_ON_OPTIMIZER_STEP, LAST_LOADER, OPTIMIZED, HAS_TRAINED, SEEKING
) = range(8)  # fmt: skip
"""Indices of ``Tape.hook_state``: the watched thread (-1: recording is off; hooks ignore other
threads), its open phase, whether watchers listen to phases, whether something must be done after an
optimizer step, the last loader noted, whether an optimizer has ever stepped, whether a backward or
update has ended the search for inference steps, and how many more forwards of the watched thread
are awaited while those of others are looked at: their model may be the one that serves."""

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
    CUDA_EVENT,  # (phase, CUDA event)
    MARKS_END,  # nothing: no more of them for a while
    APPLIED,  # time: weights or gradients were changed since the last backward
    FORWARD_OF,  # id of the module whose forward ended just before; negative: it has no parameters
    GENERATE,  # time: a call of ``generate`` begins; its forwards are seen as well
    GENERATED,  # time: it has ended
) = range(MAX_PHASES, MAX_PHASES + 31)
FORWARDED = frozenset(range(FORWARD_END, FORWARD_END_TRAINING + 1))
"""Codes that end an outermost module's forward."""


class Tape:
    """List of codes and values in turn, written by the training thread. A code below ``MAX_PHASES``
    is a phase that begins at the time that follows, ns."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.hook_state = [-1, OTHER, 0, 0, -1, 0, 1, 0]
        """State that hooks read, in one list, by ``THREAD``, ``PHASE``, ``WATCHED``,
        ``ACT_ON_OPTIMIZER_STEP``, ``LAST_LOADER``, ``OPTIMIZED``, ``HAS_TRAINED`` and ``SEEKING``:
        the caches are cold when they run."""
        self.watchers: list[Any] = []
        """Watchers called as phases begin and end (NVTX, CUDA events)."""
        self.names = list(PHASES)

    def add_watcher(self, watcher: Any) -> None:
        """Call ``watcher`` for phases from now on."""
        if watcher not in self.watchers:
            self.watchers.append(watcher)
        self.hook_state[WATCHED] = 1

    def remove_watcher(self, watcher: Any) -> bool:
        """Stop calling ``watcher``; return whether it was called until now."""
        was = watcher in self.watchers
        if was:
            self.watchers.remove(watcher)
        self.hook_state[WATCHED] = int(bool(self.watchers))
        return was

    def phase(self, name: str) -> int:
        """Return the number of a phase, added on first use; ``OTHER`` if there are too many."""
        try:
            return self.names.index(name)
        except ValueError:
            if len(self.names) >= MAX_PHASES:
                return OTHER
        self.names.append(name)
        return len(self.names) - 1

    def take(self) -> list[Any]:
        """Cut off and return what was written so far. The training thread may go on writing: each
        operation here is atomic."""
        count = len(self.log)
        taken = self.log[:count]
        del self.log[:count]
        return taken


class Clock:
    """Time in each phase since the last ``cut``, ns. Phases nest; the inner one's time is not the
    outer one's, so that phases add up to the time that passed."""

    __slots__ = ("acc", "cur", "last", "stack")

    def __init__(self) -> None:
        self.acc = [0] * MAX_PHASES
        self.cur = OTHER
        self.last = 0
        self.stack: list[int] = []

    def start(self, now: int) -> None:
        """Start, with no phase open, at ``now``, ns."""
        self.acc = [0] * MAX_PHASES
        self.stack.clear()
        self.cur = OTHER
        self.last = now

    def enter(self, phase: int, now: int) -> None:
        """Begin a phase inside the open one."""
        self.acc[self.cur] += now - self.last
        self.last = now
        self.stack.append(OTHER if self.cur == BETWEEN else self.cur)
        self.cur = phase

    def enter_between_steps(self) -> None:
        """Count time to ``BETWEEN`` until a phase begins, because a step has ended."""
        if not self.stack:
            self.cur = BETWEEN

    def leave(self, now: int) -> None:
        """End the innermost phase."""
        if self.stack:
            self.acc[self.cur] += now - self.last
            self.last = now
            self.cur = self.stack.pop()

    def leave_all(self, now: int) -> None:
        """End every open phase."""
        while self.stack:
            self.leave(now)

    def cut(self, now: int) -> list[int]:
        """Return the time by phase since the last cut, ns, and restart; open phases stay open."""
        acc = self.acc
        acc[self.cur] += now - self.last
        self.last = now
        self.acc = [0] * MAX_PHASES
        return acc
