"""Choice of the thread whose steps are recorded: the one that trains, or whose model serves."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from advisor.recorder.call_depth import in_backward
from advisor.recorder.tape import ABANDON, PHASE, RESET, SEEKING, THREAD

if TYPE_CHECKING:
    from advisor.recorder.session import RecordingSession

IDLE_UPDATES, IDLE_SECONDS = 3, 0.3
"""Updates by an unwatched thread, and their duration in s, without activity of the watched thread,
after which the unwatched thread is taken to be the one that trains."""
STARTING_SECONDS = 0.05
"""Time that a thread about to train waits for the watched one to leave ``Thread.start``, s, once in
a recording."""
AWAITED_FORWARDS = 8
"""Forwards of the watched thread from which its model is the one that is recorded."""
FORWARDS_ELSEWHERE = 3
"""Forwards of another thread, since the watched one's last, after which its model is."""
WAITING = frozenset(("threading", "concurrent", "queue", "selectors", "asyncio", "multiprocessing"))
"""Top-level modules that the innermost frames of a waiting thread belong to."""


class WatchedThread:
    """Choice of the watched thread, which ``THREAD`` of the tape's hook state names."""

    def __init__(self, session: RecordingSession) -> None:
        self._session = session
        self._hook_state = session.tape.hook_state
        self._first = -1
        """The thread that began to record, and whether it has trained: if not, it still may."""
        self._first_trained = False
        self._waited_for_start = False
        """True once a thread has waited in vain for another to leave ``Thread.start``."""
        self._others: dict[int, tuple[int, int, float]] = {}
        """Updates by unwatched threads, by thread: the watched thread's passes at the first (-1: it
        made more since), the number of updates, and the time of the first, s."""
        self._forwards: dict[int, tuple[int, int]] = {}
        """Forwards by unwatched threads, by thread: those that the watched one is still awaited to
        make at the first, and their number."""

    def begin(self) -> None:
        self._first, self._first_trained = threading.get_ident(), False
        self._hook_state[SEEKING] = AWAITED_FORWARDS * (self._session.entry == "command")
        self._hook_state[THREAD] = self._first

    def consider(self, updates: bool) -> None:
        """Watch the calling thread instead if it is the one that trains: a backward or an
        optimizer step (``updates``) begins in it."""
        if not self._may_move(updates):
            return
        self._move()

    def consider_forward(self, module: Any) -> bool:
        """Watch the calling thread instead if its model serves: it is called again and again, and
        the watched thread calls none. Return whether it does. Transforms of images are modules too,
        without parameters."""
        this, awaited = threading.get_ident(), self._hook_state[SEEKING]
        if next(module.parameters(), None) is None:
            return False
        before, count = self._forwards.get(this, (awaited, 0))
        count = count + 1 if before == awaited else 1
        self._forwards[this] = awaited, count
        progress, fetched = self._session.progress()
        if progress or fetched:
            self._hook_state[SEEKING] = 0
            return False
        if count < FORWARDS_ELSEWHERE or not self._may_move(updates=False):
            return False
        self._hook_state[SEEKING] = 0
        self._move()
        return True

    def _move(self) -> None:
        """Watch the calling thread from now on."""
        now, this, watched = time.perf_counter_ns(), threading.get_ident(), self._hook_state[THREAD]
        trained = watched == self._first and bool(self._session.progress()[0])
        self._first_trained |= trained or this == self._first
        self._hook_state[THREAD] = -1
        self._session.tape.log.extend((RESET, now, ABANDON, now))
        self._hook_state[PHASE] = 0
        self._hook_state[THREAD] = this

    def _may_move(self, updates: bool) -> bool:
        """Return whether the calling thread may become the watched one.

        It may where the watched one has ended, or has not trained and waits for others; under
        ``advisor record`` it is enough that it has not trained. A helper does not take over from
        a main thread that trains; another worker of a pool does, and so does a thread that goes on
        to make updates while the watched one does nothing, unless both did once."""
        session = self._session
        watched, this = self._hook_state[THREAD], threading.get_ident()
        if watched == -1 or session.in_loop or session.finished or in_backward(session.torch):
            return False
        names = self._wait_until_started(watched)
        if not names:
            return True
        if this == self._first and not self._first_trained:
            return True  # another thread was taken for the one that trains in its place
        starts = any(name == "start" for _, name in names)  # only until the other one runs
        # two frames: a collection's callback may run in one that waits. What calls a thread's, a
        # pool's or a loop's function is of these modules too, and does not wait
        around = [names[0], *(name for name in names[1:2] if name[1] not in ("run", "_run"))]
        waits = any(str(module).partition(".")[0] in WAITING for module, _ in around)
        progress, fetched = session.progress()
        if not progress and not fetched:
            moves = session.entry == "command" or (waits and not starts)
        else:
            moves = waits and not starts and watched != threading.main_thread().ident
        return moves or (updates and self._has_taken_over(this, progress))

    def _wait_until_started(self, thread: int) -> list[tuple[Any, str]]:
        """Return a thread's innermost frames once it has left ``Thread.start``.

        It is there until the system gives it a processor, and the thread it started may train
        meanwhile. Nothing is known then; so this one stands back for a moment."""
        names = _innermost_frames(thread)
        until = time.monotonic() + STARTING_SECONDS
        while ("threading", "start") in names and not self._waited_for_start:
            time.sleep(0.0001)
            self._waited_for_start = time.monotonic() > until
            names = _innermost_frames(thread)
        return names

    def _has_taken_over(self, thread: int, progress: int) -> bool:
        """Return whether an unwatched thread made its updates while the watched one did nothing."""
        now = time.monotonic()
        passes, updates, begun = self._others.get(thread, (progress, 0, now))
        if passes != progress:
            passes = -1  # both at the same time: it is a helper, or another training
        self._others[thread] = passes, updates + 1, begun
        return passes >= 0 and updates >= IDLE_UPDATES and now - begun > IDLE_SECONDS


def _innermost_frames(thread: int) -> list[tuple[Any, str]]:
    """Return module and function of a thread's four innermost frames; empty if it has ended."""
    frame = sys._current_frames().get(thread)
    names: list[tuple[Any, str]] = []
    while frame is not None and len(names) < 4:
        names.append((frame.f_globals.get("__name__"), frame.f_code.co_name))
        frame = frame.f_back
    return names
