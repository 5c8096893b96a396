"""Tape of phases that the training thread writes, and the clock that reads it.

The tape is the hot path. A hook only appends a code and a time, with one ``list.extend`` (so
nothing can come between them): no lock, no object that the garbage collector tracks, no arithmetic.
The meaning is worked out when the tape is read: in the writer's thread, or at step boundaries in
the training thread while a profiled window is due. Times are ns of ``time.perf_counter_ns``."""

from typing import Any

OTHER, DATA, H2D, FORWARD, BACKWARD, OPTIMIZER, BETWEEN = range(7)
PHASES = ("other", "data", "h2d", "forward", "backward", "optimizer", "between steps")
"""Names of the phases by number. No hook begins ``BETWEEN``: it lasts from the end of a step to the
first phase of the next, if the program fetches from no known loader."""
PART_OF_GRADIENTS = frozenset((DATA, FORWARD, BACKWARD))
"""Phases within which a forward or backward is not timed."""
PART_OF_UPLOADS = PART_OF_GRADIENTS | {H2D, OPTIMIZER}
"""Phases within which a copy to a device is not timed."""
MAX_PHASES = 64
"""Maximum number of phase names. Later ones count as ``other``, in case each step has a new
name."""
MAX_TAPE = 20_000_000
"""Maximum number of unread entries: minutes of a disk that does not respond."""

(
    THREAD, PHASE, WATCHED, ACT_ON_OPTIMIZER_STEP, LAST_LOADER, OPTIMIZED, HAS_TRAINED,
    FORWARDS_LEFT,
) = range(8)  # fmt: skip
"""Indices of ``Tape.hook_state``:

- ``THREAD``: the watched thread, -1 if recording is off. Hooks ignore other threads.
- ``PHASE``: its open phase.
- ``WATCHED``: whether watchers listen to phases.
- ``ACT_ON_OPTIMIZER_STEP``: whether an optimizer step needs an action.
- ``LAST_LOADER``: the last noted loader.
- ``OPTIMIZED``: whether an optimizer has ever stepped.
- ``HAS_TRAINED``: whether a backward or update has ended the search for inference steps.
- ``FORWARDS_LEFT``: number of forwards in the watched thread after which those in other threads are
  ignored. Until then, a model that another thread calls may be the served one.
"""

(
    LEAVE,  # time: the innermost phase ends
    FETCH,  # time: a loader is asked for a batch; phase ``data`` begins
    FETCHED,  # time: the loader returned a batch; the phase ends
    FETCHED_INSIDE,  # time: the same, inside a phase ``data`` that continues
    EXHAUSTED,  # time: the loader has no more batches; the phase ends
    ITERATE,  # time: a new iteration over a loader begins
    ITERATED,  # data of the iterator
    LOADER,  # number of the loader that now provides batches
    BATCH,  # note on the batch
    FORWARD_END,  # time: the outermost module returned; the phase ends
    FORWARD_END_NO_GRAD,  # the same, with gradients disabled
    FORWARD_END_NO_GRAPH,  # the same with gradients enabled, of a model that is not trained
    FORWARD_END_EVALUATION,  # the same with a graph, in evaluation mode
    FORWARD_END_TRAINING,  # the same in training mode, after the model's FORWARD_END_EVALUATION
    BACKWARD_END,  # time; the phase ends
    OPTIMIZED_BY,  # id of the optimizer of the next entry
    OPTIMIZER_END,  # time; the phase ends
    SAVE,  # time: a checkpoint begins
    BOUNDARY,  # time: the program marks the end of a step
    BEGIN,  # time: a loop whose iterations are steps begins
    BREAK_OFF,  # time: the program left that loop
    ABANDON,  # time: the open segment is not a step
    RESET,  # time: an exception left phases open
    PAUSE,  # length of a garbage collection
    MEMORY,  # the allocator's counters
    CUDA_EVENT,  # (phase, CUDA event)
    MARKS_END,  # nothing: no more CUDA events for a while
    GRADIENTS_USED,  # time: weights or gradients changed since the last backward
    FORWARD_OF,  # id of the module whose forward just ended, negative if it has no parameters
    GENERATE,  # time: a call of ``generate`` begins; its forwards are recorded as well
    GENERATED,  # time: the call of ``generate`` has ended
) = range(MAX_PHASES, MAX_PHASES + 31)
FORWARDED = frozenset(range(FORWARD_END, FORWARD_END_TRAINING + 1))
"""Codes that end an outermost module's forward."""


class Tape:
    """List of alternating codes and values, written by the training thread. A code below
    ``MAX_PHASES`` is a phase that begins at the time that follows it, ns."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.hook_state = [-1, OTHER, 0, 0, -1, 0, 1, 0]
        """State that hooks read, indexed by ``THREAD``, ``PHASE``, ``WATCHED``,
        ``ACT_ON_OPTIMIZER_STEP``, ``LAST_LOADER``, ``OPTIMIZED``, ``HAS_TRAINED`` and
        ``FORWARDS_LEFT``. It is one list because the caches are cold when hooks run."""
        self.watchers: list[Any] = []
        """Watchers to call when phases begin and end (NVTX, CUDA events)."""
        self.names = list(PHASES)

    def add_watcher(self, watcher: Any) -> None:
        """Call ``watcher`` for phases from now on."""
        if watcher not in self.watchers:
            self.watchers.append(watcher)
        self.hook_state[WATCHED] = 1

    def remove_watcher(self, watcher: Any) -> bool:
        """Stop calling ``watcher``; return whether it was called until now."""
        is_known = watcher in self.watchers
        if is_known:
            self.watchers.remove(watcher)
        self.hook_state[WATCHED] = int(bool(self.watchers))
        return is_known

    def phase(self, name: str) -> int:
        """Return the number of a phase, which is added on first use, or ``OTHER`` if there are too
        many."""
        try:
            return self.names.index(name)
        except ValueError:
            if len(self.names) >= MAX_PHASES:
                return OTHER
        self.names.append(name)
        return len(self.names) - 1

    def take(self) -> list[Any]:
        """Remove and return the entries so far. The training thread may continue to write: each
        operation here is atomic."""
        count = len(self.log)
        taken = self.log[:count]
        del self.log[:count]
        return taken


class Clock:
    """Time in each phase since the last ``cut``, ns. Phases nest, and the outer phase excludes the
    time of the inner one, so phases add up to the elapsed time."""

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
