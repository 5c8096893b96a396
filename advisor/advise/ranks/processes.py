"""Workers on this machine: plain child processes, one a slot, each replaced now and then.

Not a pool of ``multiprocessing``, for the reasons of ``advisor/read/pool.py``; and a pool breaks
as a whole when one of its processes is killed, where here one file is tried again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

from advisor.advise.ranks.work import Died
from advisor.measure.ranks.summary import MAX_DECODED

RECYCLE: Final = 32
"""Files that one process measures."""
HEAVY: Final = 1 << 30
"""Bytes of memory after which a process is replaced: what its allocator keeps is given back."""
GOODBYE: Final = 5.0
_LENGTH: Final = 8
_MAIN: Final = "from advisor.advise.ranks.processes import serve; serve()"


def serve() -> None:
    """A worker's life: perform orders until there are no more, or it is old."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides, by closing the pipe
    source = sys.stdin.buffer
    sink = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a rule prints is no answer
    from advisor.advise.ranks.task import perform

    for count in range(1, RECYCLE + 1):
        head = source.read(_LENGTH)
        if len(head) < _LENGTH:
            break
        answer = perform(source.read(int.from_bytes(head, "little")))
        last = count == RECYCLE or _memory() > HEAVY
        try:
            _put(sink, len(answer).to_bytes(_LENGTH, "little") + bytes([last]) + answer)
        except BrokenPipeError:
            break
        if last:
            break
    os._exit(0)


def _put(sink: Any, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[sink.write(view) :]


def _memory() -> int:
    """What this process holds now, bytes; 0: the system does not say. Not what ``getrusage`` calls
    its most, which starts with the parent's."""
    try:
        pages = int(Path("/proc/self/statm").read_bytes().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


class _Child:
    """One process."""

    def __init__(self, threads: int) -> None:
        path = [str(Path(__file__).resolve().parents[2]), *filter(None, sys.path)]
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-P", "-c", _MAIN],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=dict(
                os.environ,
                PYTHONPATH=os.pathsep.join(path),
                POLARS_MAX_THREADS=str(threads),
            ),
        )
        self.fresh = True

    def ask(self, order: bytes) -> bytes:
        """Its answer; afterwards ``fresh`` says whether it takes another. Raises Died."""
        try:
            source, sink = _pipe(self.process.stdout), _pipe(self.process.stdin)
            sink.write(len(order).to_bytes(_LENGTH, "little") + order)
            sink.flush()
            head = source.read(_LENGTH + 1)
            size = int.from_bytes(head[:_LENGTH], "little")
            if len(head) == _LENGTH + 1 and size <= MAX_DECODED:
                answer = source.read(size)
                if len(answer) == size:
                    self.fresh = not head[_LENGTH]
                    return answer
        except (OSError, ValueError):  # ValueError: its pipes were closed
            pass
        self.fresh = False
        self.process.kill()
        code = self.process.wait()
        raise Died(f"its process was killed by signal {-code}" if code < 0 else "its process ended")

    def close(self) -> None:
        """End it, politely where it waits for orders."""
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(OSError):
                _pipe(pipe).close()
        try:
            self.process.wait(GOODBYE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise OSError("no pipe")
    return pipe


class Processes:
    """``count`` of them. Used with ``with``: afterwards none is left."""

    def __init__(self, count: int) -> None:
        self._count = max(1, count)
        self._threads = max(1, (os.cpu_count() or 1) // self._count)
        self._pool = ThreadPoolExecutor(self._count, thread_name_prefix="advisor-rank")
        self._mine = threading.local()
        self._lock = threading.Lock()
        self._children: set[_Child] = set()
        self._at: dict[Future[bytes], _Child] = {}
        self._closed = False

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closed = True
            busy, children = list(self._at.values()), list(self._children)
        for child in busy:
            child.process.kill()
        self._pool.shutdown(wait=True, cancel_futures=True)
        for child in children:
            child.close()

    @property
    def pids(self) -> list[int]:
        """Process numbers of those that live."""
        with self._lock:
            return [child.process.pid for child in self._children if child.process.poll() is None]

    def slots(self) -> int:
        """All of them, always: one that dies is replaced."""
        return self._count

    def submit(self, order: bytes) -> Future[bytes]:
        """Performed by the next that is free."""
        answer: Future[bytes] = Future()
        self._pool.submit(self._perform, order, answer)
        return answer

    def abandon(self, answer: Any) -> None:
        """Kill the process that works at it."""
        with self._lock:
            child = self._at.get(answer)
        if child is not None:
            child.process.kill()

    def bytes_of(self, answer: Any) -> bytes:
        """What it answered. Raises Died."""
        data: bytes = answer.result()
        return data

    def _perform(self, order: bytes, answer: Future[bytes]) -> None:
        try:
            child = self._child(answer)
            try:
                data = child.ask(order)
            finally:
                with self._lock:
                    self._at.pop(answer, None)
        except Exception as error:
            answer.set_exception(error)
        else:
            answer.set_result(data)

    def _child(self, answer: Future[bytes]) -> _Child:
        """This thread's process, a new one where the last was used up."""
        child: _Child | None = getattr(self._mine, "child", None)
        if child is not None and not child.fresh:
            child.close()
        with self._lock:
            if self._closed:
                raise Died("the work was broken off")
            if child is None or not child.fresh:
                if child is not None:
                    self._children.discard(child)
                child = self._mine.child = _Child(self._threads)
                self._children.add(child)
            self._at[answer] = child
        return child
