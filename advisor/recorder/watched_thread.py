"""Choice of the thread whose steps are recorded: the one that trains or serves a model."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from advisor.recorder.call_depth import in_backward
from advisor.recorder.tape import ABANDON, FORWARDS_LEFT, PHASE, RESET, THREAD

if TYPE_CHECKING:
    from advisor.recorder.session import RecordingSession

IDLE_UPDATES, IDLE_SECONDS = 3, 0.3
"""Number of updates by an unwatched thread, and their total duration, s, after which that thread is
considered to train, if the watched thread was inactive meanwhile."""
STARTING_SECONDS = 0.05
"""Maximum time that a thread about to train waits for the watched one to leave ``Thread.start``, s,
once per recording."""
AWAITED_FORWARDS = 8
"""Number of forwards of the watched thread after which its model is the recorded one."""
FORWARDS_ELSEWHERE = 3
"""Number of forwards of another thread, since the watched thread's last, until it takes over."""
WAITING = frozenset(("threading", "concurrent", "queue", "selectors", "asyncio", "multiprocessing"))
"""Top-level modules of the innermost frames of a waiting thread."""


class WatchedThread:
    """Choice of the watched thread, which ``THREAD`` of the tape's hook state names."""

    def __init__(self, session: RecordingSession) -> None:
        self._session = session
        self._hook_state = session.tape.hook_state
        self._first = -1
        """Thread that began to record."""
        self._first_trained = False
        """True if that thread has trained; if not, it still may."""
        self._waited_for_start = False
        """True once a thread has waited in vain for another one to leave ``Thread.start``."""
        self._updates: dict[int, tuple[int, int, float]] = {}
        """Updates by each unwatched thread: the watched thread's passes at the first one (-1 if it
        made more since then), the number of updates, and the time of the first one, s."""
        self._forwards: dict[int, tuple[int, int]] = {}
        """Forwards by each unwatched thread: the forwards still awaited from the watched thread at
        the first one, and the number of forwards."""

    def begin(self) -> None:
        self._first, self._first_trained = threading.get_ident(), False
        self._hook_state[FORWARDS_LEFT] = AWAITED_FORWARDS * (self._session.entry == "command")
        self._hook_state[THREAD] = self._first

    def consider(self, updates: bool) -> None:
        """Watch the calling thread instead if it is the one that trains. It begins a backward or an
        optimizer step (``updates``)."""
        if not self._may_watch(updates):
            return
        self._watch_this_thread()

    def consider_forward(self, module: Any) -> bool:
        """Watch the calling thread instead if it calls a model repeatedly and the watched thread
        calls none. Return whether it is watched now. Modules without parameters, such as image
        transforms, do not count."""
        thread, awaited = threading.get_ident(), self._hook_state[FORWARDS_LEFT]
        if next(module.parameters(), None) is None:
            return False
        before, count = self._forwards.get(thread, (awaited, 0))
        count = count + 1 if before == awaited else 1
        self._forwards[thread] = awaited, count
        progress, fetched = self._session.progress()
        if progress or fetched:
            self._hook_state[FORWARDS_LEFT] = 0
            return False
        if count < FORWARDS_ELSEWHERE or not self._may_watch(updates=False):
            return False
        self._hook_state[FORWARDS_LEFT] = 0
        self._watch_this_thread()
        return True

    def _watch_this_thread(self) -> None:
        """Watch the calling thread from now on."""
        now, this, watched = time.perf_counter_ns(), threading.get_ident(), self._hook_state[THREAD]
        trained = watched == self._first and bool(self._session.progress()[0])
        self._first_trained |= trained or this == self._first
        self._hook_state[THREAD] = -1
        self._session.tape.log.extend((RESET, now, ABANDON, now))
        self._hook_state[PHASE] = 0
        self._hook_state[THREAD] = this

    def _may_watch(self, updates: bool) -> bool:
        """Return whether the calling thread may become the watched one.

        It may if the watched one has ended, or has not trained and waits for others; under
        ``advisor record``, it is enough that it has not trained. An auxiliary thread does not take
        over from a main thread that trains. Another worker of a pool does, and so does a thread
        that makes updates while the watched one is inactive, unless both were ever active."""
        session = self._session
        watched, thread = self._hook_state[THREAD], threading.get_ident()
        if watched == -1 or session.in_loop or session.finished or in_backward(session.torch):
            return False
        names = self._wait_until_started(watched)
        if not names:
            return True
        if thread == self._first and not self._first_trained:
            return True  # another thread was mistaken for the one that trains
        # only until the started thread runs
        is_starting = any(name == "start" for _, name in names)
        # Two frames, because a garbage collection's callback may run in a frame that waits. Frames
        # that call the function of a thread, pool or loop are in these modules, but do not wait.
        frames = [names[0], *(name for name in names[1:2] if name[1] not in ("run", "_run"))]
        waits = any(str(module).partition(".")[0] in WAITING for module, _ in frames)
        progress, fetched = session.progress()
        if not progress and not fetched:
            moves = session.entry == "command" or (waits and not is_starting)
        else:
            moves = waits and not is_starting and watched != threading.main_thread().ident
        return moves or (updates and self._has_taken_over(thread, progress))

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
        """Return whether an unwatched thread made its updates while the watched one was
        inactive."""
        now = time.monotonic()
        passes, updates, begun = self._updates.get(thread, (progress, 0, now))
        if passes != progress:
            passes = -1  # both are active: an auxiliary thread, or another training
        self._updates[thread] = passes, updates + 1, begun
        return passes >= 0 and updates >= IDLE_UPDATES and now - begun > IDLE_SECONDS


def _innermost_frames(thread: int) -> list[tuple[Any, str]]:
    """Return module and function of a thread's four innermost frames, none if it has ended."""
    frame = sys._current_frames().get(thread)
    names: list[tuple[Any, str]] = []
    while frame is not None and len(names) < 4:
        names.append((frame.f_globals.get("__name__"), frame.f_code.co_name))
        frame = frame.f_back
    return names
