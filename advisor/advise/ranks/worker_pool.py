"""Distribution of tasks to workers, local or on a Dask cluster. There are as many tasks at once as
workers, and each task is tried a limited number of times."""

from __future__ import annotations

import os
import queue
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future
from contextlib import suppress
from functools import cached_property
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary

import advisor
from advisor.advise.options import RANK_TIMEOUT_SECONDS
from advisor.advise.ranks.task import MeasureTask, run_task, shorten_reason
from advisor.core.errors import AdvisorError, install_command
from advisor.core.pool import ProcessPool, Work, WorkerDied
from advisor.measure.ranks.summary_schema import MAX_DECODED, RankSummary, UnreadRank, decode

RETRIES: Final = 2
"""Number of retries of a file whose worker died, for whatever reason."""
FILES_PER_PROCESS: Final = 32
"""Number of files that one process measures before it is replaced."""
POLL_SECONDS: Final = 0.5
"""Interval between two checks for tasks that take too long, s."""


class WorkerPool(Protocol):
    """Workers that perform tasks: a ``ProcessPool``, or a ``Cluster``."""

    def slots(self) -> int:
        """Return the current number of parallel tasks, or 0 if no worker is left."""

    def submit(self, fn: Work, data: bytes, /) -> Future[bytes]:
        """Start a task. Its answer raises WorkerDied, or any error of the task."""

    def cancel(self, answer: Future[bytes]) -> None:
        """Stop waiting for an answer, and end its computation if possible."""


def start_processes(count: int) -> ProcessPool:
    """Start workers on this machine. They share its cores and are replaced after some files."""
    threads = max(1, (os.cpu_count() or 1) // max(1, count))
    return ProcessPool(
        count, recycle=FILES_PER_PROCESS, environ={"POLARS_MAX_THREADS": str(threads)}
    )


class _PendingTask:
    """A task in progress."""

    def __init__(self, index: int, answer: Future[bytes]) -> None:
        self.index = index
        self.answer = answer
        self.since = time.monotonic()


def iterate_results(
    tasks: Sequence[MeasureTask], workers: WorkerPool, *, seconds: float = RANK_TIMEOUT_SECONDS
) -> Iterator[RankSummary | UnreadRank]:
    """Yield the result of each task as it completes. ``seconds``: time limit for one file.

    A task whose worker died is repeated up to ``RETRIES`` times, alone after all others, so that a
    file that kills workers does not affect other files. If the workers themselves have retried it,
    it is repeated only if several tasks are blamed, because one may only have waited at a worker
    that another task killed."""
    encoded = [task.encoded() for task in tasks]
    deaths, reasons = [0] * len(tasks), [""] * len(tasks)
    waiting, retried = deque(range(len(tasks))), deque[int]()
    blamed: set[int] = set()
    running: dict[int, _PendingTask] = {}
    done: queue.SimpleQueue[int] = queue.SimpleQueue()
    number = 0

    def start(index: int) -> None:
        nonlocal number
        number += 1
        key, answer = number, workers.submit(run_task, encoded[index])
        running[key] = _PendingTask(index, answer)
        answer.add_done_callback(lambda _: done.put(key))

    while waiting or retried or running:
        slots = workers.slots()
        if slots == 0:
            for index in (*(item.index for item in running.values()), *waiting, *retried):
                yield tasks[index].failure("no worker is left")
            for item in running.values():
                workers.cancel(item.answer)
            return
        while waiting and len(running) < slots:
            start(waiting.popleft())
        if retried and not waiting and not running:
            index = retried.popleft()
            if blamed == {index}:  # only this task was running, so it killed the worker
                yield tasks[index].failure(describe_death(reasons[index], deaths[index]))
                continue
            start(index)
        try:
            completed = running.pop(done.get(timeout=POLL_SECONDS), None)
        except queue.Empty:
            for key, item in list(running.items()):
                if time.monotonic() - item.since > seconds:
                    del running[key]
                    workers.cancel(item.answer)
                    yield tasks[item.index].failure(f"not done within {seconds:.0f} s")
            continue
        if completed is None:
            continue  # it completed after it was given up
        task = tasks[completed.index]
        try:
            data = completed.answer.result()
        except WorkerDied as death:
            deaths[completed.index] += death.count
            reasons[completed.index] = str(death)
            if death.count > 1:
                blamed.add(completed.index)
            if deaths[completed.index] > RETRIES:
                yield task.failure(describe_death(str(death), deaths[completed.index]))
            else:
                retried.append(completed.index)
            continue
        except Exception as error:
            yield task.failure(f"{type(error).__name__}: {error}")
            continue
        yield _decode_answer(task, data)


def describe_death(why: str, times: int) -> str:
    """Say why a file whose workers died has no result."""
    return shorten_reason(f"{why}, {times} times: it may need more memory than a worker has")


def _decode_answer(task: MeasureTask, data: bytes) -> RankSummary | UnreadRank:
    if len(data) > MAX_DECODED:
        return task.failure("its summary is too large")
    try:
        return decode(data)
    except AdvisorError as error:
        return task.failure(str(error))


SCHEDULER_TIMEOUT_S: Final = 60.0
"""Time limit for a scheduler to answer, for its first worker to join, and for a worker to return
after all have left, s. A job manager starts a new worker within a minute or not at all."""
SLOTS_REFRESH_S: Final = 1.0
"""Minimum interval between two queries for the number of workers, s."""


def _version() -> str:
    return advisor.__version__


class Cluster:
    """Workers of the Dask scheduler at an address (``tcp://host:8786``), a context manager.

    Raises AdvisorError for an invalid address, without an answer or a worker, or if a worker has
    another version of advisor."""

    def __init__(self, address: str, *, patience: float = SCHEDULER_TIMEOUT_S) -> None:
        try:
            from distributed import Client
        except ModuleNotFoundError as error:
            raise AdvisorError(
                f"--cluster needs {error.name}: {install_command('cluster')}"
            ) from None
        self._patience = patience
        try:
            make: Any = Client  # typed or untyped, depending on the version
            self._client: Any = make(address, timeout=patience, set_as_default=False)
        except Exception as error:  # each kind of address raises its own error
            why = shorten_reason(error) or type(error).__name__
            raise AdvisorError(f"--cluster {address}: no scheduler answers there ({why})") from None
        try:
            self._check(address)
        except BaseException:
            self._client.close()
            raise
        self._slots, self._checked_at, self._gone_since = 0, -SLOTS_REFRESH_S, 0.0
        self._dask_answers: WeakKeyDictionary[Future[bytes], Future[bytes]] = WeakKeyDictionary()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    @property
    def link(self) -> str:
        """Address of Dask's dashboard. Empty if there is none."""
        return str(self._client.dashboard_link or "")

    def _check(self, address: str) -> None:
        """Raise AdvisorError unless there are workers, all with this version of advisor."""
        try:
            self._client.wait_for_workers(1, timeout=self._patience)
        except OSError:  # a time-out, or a closed connection
            raise AdvisorError(
                f"--cluster {address}: no worker has joined it within {self._patience:.0f} s; "
                f"start some: dask worker {address} --nthreads 1"
            ) from None
        versions: dict[str, Any] = self._client.run(_version, on_error="return")
        for worker, version in sorted(versions.items()):
            if isinstance(version, ModuleNotFoundError):
                why = f"the worker {worker} cannot import {version.name}"
            elif isinstance(version, BaseException):
                why = f"the worker {worker} does not run advisor ({shorten_reason(version)})"
            elif version != advisor.__version__:
                why = f"the worker {worker} has advisor {version}, this is {advisor.__version__}"
            else:
                continue
            raise AdvisorError(f"--cluster {address}: {why}; install the same on all workers")

    def slots(self) -> int:
        """Return the number of worker threads, or 0 after ``patience`` seconds without any."""
        now = time.monotonic()
        if now - self._checked_at >= SLOTS_REFRESH_S:
            self._checked_at = now
            result = sum(self._client.nthreads().values())
            if result:
                self._slots, self._gone_since = result, 0.0
            elif not self._gone_since:
                self._gone_since = now
        if self._gone_since and now - self._gone_since > self._patience:
            return 0
        return max(1, self._slots)

    def submit(self, fn: Work, data: bytes, /) -> Future[bytes]:
        """Send a task to a free worker. Dask itself retries if a worker dies."""
        from distributed import KilledWorker

        answer: Future[bytes] = Future()

        def done(dask_answer: Future[bytes]) -> None:
            try:
                answer.set_result(dask_answer.result())
            except KilledWorker:
                answer.set_exception(WorkerDied("the workers that read it died", count=RETRIES))
            except CancelledError:
                answer.set_exception(WorkerDied("its answer was lost with the worker that had it"))
            except BaseException as error:
                answer.set_exception(error)

        dask_answer = self._executor.submit(fn, data)
        self._dask_answers[answer] = dask_answer
        dask_answer.add_done_callback(done)
        return answer

    @cached_property
    def _executor(self) -> Executor:
        executor: Executor = self._client.get_executor(pure=False, retries=RETRIES)
        return executor

    def cancel(self, answer: Future[bytes]) -> None:
        """Discard an answer. A thread that has started cannot be ended."""
        with suppress(Exception):
            self._dask_answers[answer].cancel()
