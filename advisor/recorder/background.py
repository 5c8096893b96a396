"""Daemon thread beside the training that mostly sleeps."""

import os
import threading
from abc import ABC, abstractmethod


class BackgroundThread(ABC):
    """Daemon thread that runs ``work`` from ``start`` until ``stop``, which sets ``over``.

    Nothing it meets reaches the caller, whatever a driver, ``/proc`` or a disk does: it is a thread
    of somebody's training process. A failure ends it. In a forked child it is not running."""

    name: str
    stop_seconds = 0.5
    """Time that ``stop`` waits for the thread, s."""

    def __init__(self) -> None:
        self.problem: str | None = None
        """Error that ended the thread early; ``None`` if none did."""
        self.stop_event = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid: int | None = None

    @abstractmethod
    def work(self) -> None:
        """Work in the thread until ``over`` is set."""

    def start(self) -> None:
        """Start the thread. A second call does nothing."""
        if self._thread is not None:
            return
        self._pid = os.getpid()
        thread = threading.Thread(target=self._run, name=f"advisor {self.name}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads, or the interpreter is going down
            self.problem = str(error)
            return
        self._thread = thread

    def stop(self) -> None:
        """End the thread after its current piece of work. May be called at any time."""
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
