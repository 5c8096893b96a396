"""Daemon thread in the training process that mostly sleeps."""

import os
import threading
from abc import ABC, abstractmethod


class BackgroundThread(ABC):
    """Daemon thread that runs ``work`` from ``start`` until ``stop``, which sets ``stop_event``.

    It runs in the user's training process, so no failure of a driver, ``/proc`` or a disk reaches
    the caller. A failure ends the thread. It does not run in a forked child."""

    name: str
    stop_seconds = 0.5
    """Maximum time that ``stop`` waits for the thread, s."""

    def __init__(self) -> None:
        self.problem: str | None = None
        """Error that ended the thread early, or ``None`` if there was none."""
        self.stop_event = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid: int | None = None

    @abstractmethod
    def work(self) -> None:
        """Work in the thread until ``stop_event`` is set."""

    def start(self) -> None:
        """Start the thread. A second call does nothing."""
        if self._thread is not None:
            return
        self._pid = os.getpid()
        thread = threading.Thread(target=self._run, name=f"advisor {self.name}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # too many threads, or the interpreter is shutting down
            self.problem = str(error)
            return
        self._thread = thread

    def stop(self) -> None:
        """End the thread after its current piece of work. It may be called at any time."""
        thread = self._thread
        if thread is None or os.getpid() != self._pid or thread is threading.current_thread():
            return
        self.stop_event.set()
        thread.join(self.stop_seconds)
        self._thread = None

    def _run(self) -> None:
        try:
            self.work()
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"[:300]
