"""Window of a fixed length for a program in which no step is seen.

Where a program has no loader, module, backward or optimizer (a solver of tensor operators), nothing
says where a step ends, and no window opens. Then one opens after some seconds, for a moment. Its
trace has no steps; the operators and their lines are there.

A profiler starts and stops in the thread whose operators it records. So the main thread is asked to
call back, as for a signal: the interpreter calls between two bytecodes (``Py_AddPendingCall``), at
once where Python code runs, after the call where that is in C."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from advisor.recorder.background import BackgroundThread
from advisor.recorder.stack_samples import StackSampler
from advisor.recorder.tape import THREAD

if TYPE_CHECKING:
    from advisor.recorder.session import RecordingSession

WAIT_SECONDS = 8.0
"""Time without any activity of a training or an inference before the window opens, s …"""
WINDOW_SECONDS = 1.5
"""… its length, s …"""
RETRY_SECONDS, MAX_TRIES = 0.1, 300
"""… and how often the main thread is asked, s and times: it may be inside of torch's code."""
LATE_SECONDS = 1.0
"""Delay of a call back, s, after which it does nothing: the main thread was waiting."""


class _Request:
    """Request to the main thread: the call, until when (s, monotonic), and whether it was there."""

    what: Callable[[], None] | None = None
    until = 0.0
    answered = threading.Event()


def _answer(_: int) -> int:
    what, _Request.what = _Request.what, None
    try:
        if what is not None and time.monotonic() < _Request.until:
            what()
    finally:
        _Request.answered.set()
    return 0


_ANSWER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_answer)
"""The function that the interpreter is given. It lives as long as the process: a call may come when
nobody waits for it any more."""


class TimedWindow(BackgroundThread):
    """Thread that opens the window if ``session`` sees nothing, and closes it."""

    name = "timed window"

    def __init__(self, session: RecordingSession) -> None:
        super().__init__()
        self._session = session
        self.samples: list[tuple[str, dict[str, Any]]] = []
        """Events of the stacks sampled after the window. If steps follow, they are of no step."""

    def work(self) -> None:
        windows = self._session.windows
        if self.stop_event.wait(WAIT_SECONDS) or self._seen() or not windows.enabled:
            return
        opened = self._ask(windows.open_timed, lambda: windows.profiling or self._seen())
        if not opened or not windows.timed:
            return
        self.stop_event.wait(WINDOW_SECONDS)
        if self._ask(windows.close_timed, lambda: not windows.profiling):
            session = self._session
            sampler = StackSampler(
                lambda: session.tape.hook_state[THREAD],
                self._seen,
                lambda kind, data: self.samples.append((kind, data)),
            )
            sampler.stop_event = self.stop_event
            sampler.work()

    def _seen(self) -> bool:
        """Return whether a step, or what may become one, was seen; or nothing more can be."""
        session = self._session
        counts = session.steps.event_counts
        seen = session.recorded or session.steps.explicit or session.in_loop
        main = session.tape.hook_state[THREAD] == threading.main_thread().ident
        others = counts["forwards"] + counts["backwards"] + counts["optimized"]
        return bool(seen or others or session.finished or not session.listening or not main)

    def _ask(self, what: Callable[[], None], is_done: Callable[[], bool]) -> bool:
        """Have the main thread call ``what`` until ``is_done``. Return whether it is."""
        _Request.answered.set()
        for _ in range(MAX_TRIES):
            if _Request.answered.is_set():
                if is_done():
                    break
                _Request.answered.clear()
                _Request.until = time.monotonic() + LATE_SECONDS
                _Request.what = lambda: self._contained(what)
                if ctypes.pythonapi.Py_AddPendingCall(_ANSWER, None):  # too many are waiting
                    _Request.answered.set()
            if self.stop_event.wait(RETRY_SECONDS):
                break
        _Request.what = None
        return is_done()

    def _contained(self, what: Callable[[], None]) -> None:
        session = self._session
        try:
            if session.listening and session.on_watched_thread():
                what()
        except Exception as error:
            session.on_internal_error(error)
