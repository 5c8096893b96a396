"""ProcessPool: a ``concurrent.futures.Executor`` of plain child processes.

It runs functions of advisor that take and return bytes. Pools of ``multiprocessing``, loky or
pebble import the caller's main module again, fork a process with threads, or fail as a whole if one
process is killed (measured in docs/design.md). Here, the task of a process that dies fails with
:class:`WorkerDied`, and another process replaces it. Imports only the standard library."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import cache
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any, Final, cast

from advisor.core.cgroup import resident_memory

MAX_ANSWER: Final = 1 << 30
"""Maximum size of an answer, bytes. A longer one is an error."""
MAX_MEMORY: Final = 1 << 30
"""Memory above which a recycled process is replaced, bytes. This frees its allocator's memory."""
_LENGTH: Final = 8
_PIPE_BYTES: Final = 1 << 20  # the most an unprivileged process may ask for
_F_SETPIPE_SZ: Final = 1031  # Linux
_MAIN: Final = "from advisor.core.pool import serve; serve()"

Work = Callable[[bytes], bytes]


class WorkerDied(Exception):
    """Error of a task whose process ended before it answered. ``count``: number of times, if the
    workers themselves retried it."""

    def __init__(self, why: str, *, count: int = 1) -> None:
        super().__init__(why)
        self.count = count


# -- in the child -------------------------------------------------------------------------------


def serve() -> None:
    """Run the tasks that arrive on stdin until there are no more, or ``recycle`` is reached."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides, by closing the pipe
    recycle = int(sys.argv[1])
    source = sys.stdin.buffer
    sink = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # printed text must not mix with answers
    done = 0
    while len(head := source.read(2 * _LENGTH)) == 2 * _LENGTH:
        name = source.read(int.from_bytes(head[:_LENGTH], "little")).decode()
        answer = _import_function(name)(source.read(int.from_bytes(head[_LENGTH:], "little")))
        done += 1
        last = recycle > 0 and (done >= recycle or (resident_memory() or 0) > MAX_MEMORY)
        try:
            _write(sink, len(answer).to_bytes(_LENGTH, "little") + bytes([last]))
            _write(sink, answer)
        except BrokenPipeError:  # the parent is gone
            break
        if last:
            break
    os._exit(0)


@cache
def _import_function(name: str) -> Work:
    module, _, function = name.partition(":")
    result: Work = getattr(importlib.import_module(module), function)
    return result


# -- in the parent ------------------------------------------------------------------------------


class ProcessPool(Executor):
    """Pool of ``count`` processes, started when there is work. Leaving the ``with`` block ends them
    all, including running tasks.

    ``depth``: number of tasks sent to a process before it answers. ``recycle``: number of tasks
    after which it is replaced (0: never). ``environ``: variables added to its environment."""

    def __init__(
        self,
        count: int,
        *,
        depth: int = 1,
        recycle: int = 0,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.count, self.depth, self.recycle = max(1, count), depth, recycle
        # only our own search path, given explicitly: -S skips site, -P the current folder
        path = [str(Path(__file__).resolve().parents[2]), *filter(None, sys.path)]
        self.environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path), **(environ or {})}
        self.work: SimpleQueue[tuple[Future[bytes], str, bytes] | None] = SimpleQueue()
        self.lock = threading.Lock()
        self.closed = False
        self._workers: list[_Worker] = []

    def slots(self) -> int:
        """Return the number of parallel tasks. It is constant, as a process that dies is
        replaced."""
        return self.count

    @property
    def pids(self) -> list[int]:
        """Process ids of the running processes."""
        with self.lock:
            children = [worker.child for worker in self._workers]
        return [c.process.pid for c in children if c is not None and c.process.poll() is None]

    def submit(self, fn: Work, data: bytes, /) -> Future[bytes]:  # type: ignore[override]
        """Run ``fn(data)`` in the next free process. ``fn``: a module-level function."""
        with self.lock:
            if self.closed:
                raise RuntimeError("the pool is closed")
            if len(self._workers) < self.count:
                self._workers.append(_Worker(self))
        answer: Future[bytes] = Future()
        self.work.put((answer, f"{fn.__module__}:{fn.__qualname__}", data))
        return answer

    def cancel(self, answer: Future[bytes]) -> None:
        """End the process that works on an answer."""
        with self.lock:
            children = [worker.child for worker in self._workers]
        for child in children:
            if child is not None:
                child.kill_if_working_on(answer)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = True) -> None:
        """End all processes and their tasks."""
        with self.lock:
            self.closed = True
            workers = list(self._workers)
        for worker in workers:
            self.work.put(None)
            if worker.child is not None:
                worker.child.process.kill()
        for worker in workers:
            worker.thread.join()
            if worker.child is not None:
                worker.child.thread.join()
        with suppress(Empty):
            while True:
                task = self.work.get_nowait()
                if task is not None:
                    task[0].cancel()


class _Worker:
    """A slot for one process at a time, and the thread that sends tasks to it."""

    def __init__(self, pool: ProcessPool) -> None:
        self._pool = pool
        self.child: _Child | None = None
        self.room = threading.Semaphore(pool.depth)
        self.thread = threading.Thread(target=self._feed, daemon=True, name="advisor-pool")
        self.thread.start()

    def _feed(self) -> None:
        while True:
            self.room.acquire()
            task = self._pool.work.get()
            if task is None:
                return
            answer, name, data = task
            if not answer.set_running_or_notify_cancel():
                self.room.release()
                continue
            try:
                child = self._expecting(answer)
            except OSError as error:  # no process can be started
                answer.set_exception(WorkerDied(str(error)))
                self.room.release()
                continue
            child.send(name.encode(), data)

    def _expecting(self, answer: Future[bytes]) -> _Child:
        """Return the process for an answer: a new one if the last has ended."""
        if self.child is not None and self.child.expect(answer):
            return self.child
        with self._pool.lock:
            if self._pool.closed:
                raise OSError("the work was broken off")
            self.child = child = _Child(self._pool, self.room)
        child.expect(answer)
        child.thread.start()
        return child


class _Child:
    """A worker process, and the thread that receives its answers."""

    def __init__(self, pool: ProcessPool, room: threading.Semaphore) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-P", "-c", _MAIN, str(pool.recycle)],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=pool.environ,
        )
        self._sink, self._source = _widen(self.process.stdin), _widen(self.process.stdout)
        self.waiting: deque[Future[bytes]] = deque()
        self._room = room
        self._lock = threading.Lock()
        self._over = False
        self.thread = threading.Thread(target=self._take, daemon=True, name="advisor-pool")

    def expect(self, answer: Future[bytes]) -> bool:
        """Queue an expected answer. Return ``False`` if the process sends no more."""
        with self._lock:
            if not self._over:
                self.waiting.append(answer)
            return not self._over

    def kill_if_working_on(self, answer: Future[bytes]) -> None:
        """Kill the process if it works on this answer."""
        with self._lock:
            if answer in self.waiting:
                self.process.kill()

    def send(self, name: bytes, data: bytes) -> None:
        """Send a task to the process. If it has ended, its waiting answers fail."""
        with suppress(OSError, ValueError):  # ValueError: its pipes were closed
            head = len(name).to_bytes(_LENGTH, "little") + len(data).to_bytes(_LENGTH, "little")
            _write(self._sink, head + name)
            _write(self._sink, data)

    def _take(self) -> None:
        """Receive the process's answers until it ends."""
        with suppress(EOFError, OSError, ValueError):
            while True:
                head = _read(self._source, _LENGTH + 1)
                size = int.from_bytes(head[:_LENGTH], "little")
                if size > MAX_ANSWER:
                    break
                data = cast(bytes, _read(self._source, size))
                with self._lock:
                    self._over = bool(head[_LENGTH])  # before it is given more work
                    answer = self.waiting.popleft()
                answer.set_result(data)
                self._room.release()
        with self._lock:
            self._over = True
        if self.waiting:
            self.process.kill()
        for pipe in (self._sink, self._source):
            with suppress(OSError):
                pipe.close()
        code = self.process.wait()
        why = f"its process was killed by signal {-code}" if code < 0 else "its process ended"
        while self.waiting:
            self.waiting.popleft().set_exception(WorkerDied(why))
            self._room.release()


def _write(pipe: Any, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[pipe.write(view) :]


def _read(pipe: IO[bytes], size: int) -> bytearray:
    """Return ``size`` bytes from a pipe. Raises EOFError if there are fewer."""
    data = bytearray(size)
    view, position = memoryview(data), 0
    while position < size:
        count = pipe.readinto(view[position:])  # type: ignore[attr-defined]
        if not count:
            raise EOFError
        position += count
    return data


def _widen(pipe: IO[bytes] | None) -> IO[bytes]:
    """Return a pipe with the largest allowed buffer, so that short answers never block."""
    if pipe is None:
        raise OSError("no pipe")
    if sys.platform == "linux":
        import fcntl

        with suppress(OSError):
            fcntl.fcntl(pipe.fileno(), _F_SETPIPE_SZ, _PIPE_BYTES)
    return pipe
