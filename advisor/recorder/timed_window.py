"""Window of a fixed duration for a program in which no step is seen.

If a program has no loader, module, backward or optimizer (a solver made of tensor operators),
nothing shows where a step ends, and no window opens. So a short one opens after some seconds. Its
trace has no steps, but it has the operators and their lines.

A profiler starts and stops in the thread whose operators it records. So the main thread is asked to
call us back, as for a signal: the interpreter makes the call between two bytecodes
(``Py_AddPendingCall``), at once if Python code runs, or after the current call into C."""

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
"""Time without any training or inference activity before the window opens, s."""
WINDOW_SECONDS = 1.5
"""Duration of the window, s."""
RETRY_SECONDS, _MAX_TRIES = 0.1, 300
"""Interval, s, and maximum number of requests to the main thread, which may be in torch's code."""
LATE_SECONDS = 1.0
"""Delay of a callback, s, after which it does nothing: the main thread was waiting."""


class _Request:
    """Request to the main thread: the call, its deadline (s, monotonic), and whether it was
    answered."""

    action: Callable[[], None] | None = None
    until = 0.0
    answered = threading.Event()


def _run_request(_: int) -> int:
    action, _Request.action = _Request.action, None
    try:
        if action is not None and time.monotonic() < _Request.until:
            action()
    finally:
        _Request.answered.set()
    return 0


_RUN_REQUEST = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_run_request)
"""Function that is given to the interpreter. It lives as long as the process, because a call may
come after the last request was given up."""


class TimedWindow(BackgroundThread):
    """Thread that opens and closes the window if ``session`` sees no activity."""

    name = "timed window"

    def __init__(self, session: RecordingSession) -> None:
        super().__init__()
        self._session = session
        self.samples: list[tuple[str, dict[str, Any]]] = []
        """Events of the stacks sampled after the window, which belong to no step."""

    def work(self) -> None:
        windows = self._session.windows
        if self.stop_event.wait(WAIT_SECONDS) or self._is_moot() or not windows.enabled:
            return
        opened = self._call_in_main(
            windows.open_timed, lambda: windows.profiling or self._is_moot()
        )
        if not opened or not windows.timed:
            return
        self.stop_event.wait(WINDOW_SECONDS)
        if self._call_in_main(windows.close_timed, lambda: not windows.profiling):
            session = self._session
            sampler = StackSampler(
                lambda: session.tape.hook_state[THREAD],
                self._is_moot,
                lambda kind, data: self.samples.append((kind, data)),
            )
            sampler.stop_event = self.stop_event
            sampler.work()

    def _is_moot(self) -> bool:
        """Return whether a step or possible part of one was seen, or no step can be seen any
        more."""
        session = self._session
        counts = session.steps.event_counts
        has_steps = session.recorded or session.steps.explicit or session.in_loop
        is_main_thread = session.tape.hook_state[THREAD] == threading.main_thread().ident
        passes = counts["forwards"] + counts["backwards"] + counts["optimized"]
        return bool(
            has_steps or passes or session.finished or not session.listening or not is_main_thread
        )

    def _call_in_main(self, action: Callable[[], None], is_done: Callable[[], bool]) -> bool:
        """Have the main thread call ``action`` until ``is_done``. Return whether it is done."""
        _Request.answered.set()
        for _ in range(_MAX_TRIES):
            if _Request.answered.is_set():
                if is_done():
                    break
                _Request.answered.clear()
                _Request.until = time.monotonic() + LATE_SECONDS
                _Request.action = lambda: self._run_safely(action)
                if ctypes.pythonapi.Py_AddPendingCall(_RUN_REQUEST, None):  # too many are waiting
                    _Request.answered.set()
            if self.stop_event.wait(RETRY_SECONDS):
                break
        _Request.action = None
        return is_done()

    def _run_safely(self, action: Callable[[], None]) -> None:
        session = self._session
        try:
            if session.listening and session.on_watched_thread():
                action()
        except Exception as error:
            session.on_internal_error(error)
