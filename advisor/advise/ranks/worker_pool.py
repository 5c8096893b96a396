"""Distribution of tasks to workers, here or on a Dask cluster: as many at once as there are
workers, each tried a limited number of times."""

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
"""Number of retries of a file whose worker died, because of it or something else."""
FILES_PER_PROCESS: Final = 32
"""Number of files that one process measures."""
POLL_SECONDS: Final = 0.5
"""Interval between two checks for tasks that take too long, s."""


class WorkerPool(Protocol):
    """Workers that perform tasks: a ``ProcessPool``, or a ``Cluster``."""

    def slots(self) -> int:
        """Return the number of tasks performed at once now; 0: no worker is left."""

    def submit(self, fn: Work, data: bytes, /) -> Future[bytes]:
        """Start a task. Its answer raises WorkerDied, or anything else that went wrong."""

    def cancel(self, answer: Future[bytes]) -> None:
        """Stop waiting for an answer, and end what computes it if that is possible."""


def start_processes(count: int) -> ProcessPool:
    """Start workers on this machine, which share its cores and are replaced now and then."""
    threads = max(1, (os.cpu_count() or 1) // max(1, count))
    return ProcessPool(
        count, recycle=FILES_PER_PROCESS, environ={"POLARS_MAX_THREADS": str(threads)}
    )


class _PendingTask:
    """A task that is being performed."""

    def __init__(self, place: int, answer: Future[bytes]) -> None:
        self.place = place
        self.answer = answer
        self.since = time.monotonic()


def iterate_results(
    orders: Sequence[MeasureTask], workers: WorkerPool, *, seconds: float = RANK_TIMEOUT_SECONDS
) -> Iterator[RankSummary | UnreadRank]:
    """Yield the result of each task as it completes. ``seconds``: time limit for one file.

    An order whose worker died is performed again ``RETRIES`` times, by itself when all others are
    done: a file which kills workers takes none with it. Where the workers themselves have tried
    again it is performed once more only if several orders are blamed, one of them perhaps for
    having waited at the worker that another killed."""
    packed = [order.encoded() for order in orders]
    deaths, why = [0] * len(orders), [""] * len(orders)
    waiting, alone = deque(range(len(orders))), deque[int]()
    blamed: set[int] = set()
    flying: dict[int, _PendingTask] = {}
    done: queue.SimpleQueue[int] = queue.SimpleQueue()
    number = 0

    def start(place: int) -> None:
        nonlocal number
        number += 1
        own, answer = number, workers.submit(run_task, packed[place])
        flying[own] = _PendingTask(place, answer)
        answer.add_done_callback(lambda _: done.put(own))

    while waiting or alone or flying:
        slots = workers.slots()
        if slots == 0:
            for place in (*(item.place for item in flying.values()), *waiting, *alone):
                yield orders[place].failure("no worker is left")
            for item in flying.values():
                workers.cancel(item.answer)
            return
        while waiting and len(flying) < slots:
            start(waiting.popleft())
        if alone and not waiting and not flying:
            place = alone.popleft()
            if blamed == {place}:  # nobody else can have been it
                yield orders[place].failure(describe_death(why[place], deaths[place]))
                continue
            start(place)
        try:
            came = flying.pop(done.get(timeout=POLL_SECONDS), None)
        except queue.Empty:
            for own, item in list(flying.items()):
                if time.monotonic() - item.since > seconds:
                    del flying[own]
                    workers.cancel(item.answer)
                    yield orders[item.place].failure(f"not done within {seconds:.0f} s")
            continue
        if came is None:
            continue  # it came after it had been given up
        order = orders[came.place]
        try:
            data = came.answer.result()
        except WorkerDied as death:
            deaths[came.place] += death.count
            why[came.place] = str(death)
            if death.count > 1:
                blamed.add(came.place)
            if deaths[came.place] > RETRIES:
                yield order.failure(describe_death(str(death), deaths[came.place]))
            else:
                alone.append(came.place)
            continue
        except Exception as error:
            yield order.failure(f"{type(error).__name__}: {error}")
            continue
        yield _decoded(order, data)


def describe_death(why: str, times: int) -> str:
    """Say why a file whose workers died has no result."""
    return shorten_reason(f"{why}, {times} times: it may need more memory than a worker has")


def _decoded(order: MeasureTask, data: bytes) -> RankSummary | UnreadRank:
    if len(data) > MAX_DECODED:
        return order.failure("its summary is too large")
    try:
        return decode(data)
    except AdvisorError as error:
        return order.failure(str(error))


SCHEDULER_TIMEOUT_S: Final = 60.0
"""Time limit for a scheduler to answer, its first worker to join, and one to return after all have
left, s. A job manager starts a new one within a minute or not at all."""
SLOTS_REFRESH_S: Final = 1.0
"""Age up to which the number of workers is not asked for again, s."""


def _version() -> str:
    return advisor.__version__


class Cluster:
    """Workers of the Dask scheduler at an address (``tcp://host:8786``), a context manager.

    Raises AdvisorError: no such address, no answer, no worker, or workers with another advisor."""

    def __init__(self, address: str, *, patience: float = SCHEDULER_TIMEOUT_S) -> None:
        try:
            from distributed import Client
        except ModuleNotFoundError as error:
            raise AdvisorError(
                f"--cluster needs {error.name}: {install_command('cluster')}"
            ) from None
        self._patience = patience
        try:
            make: Any = Client  # with its types or without, as the version has it
            self._client: Any = make(address, timeout=patience, set_as_default=False)
        except Exception as error:  # each kind of address fails in its own way
            why = shorten_reason(error) or type(error).__name__
            raise AdvisorError(f"--cluster {address}: no scheduler answers there ({why})") from None
        try:
            self._check(address)
        except BaseException:
            self._client.close()
            raise
        self._slots, self._looked, self._gone = 0, -SLOTS_REFRESH_S, 0.0
        self._theirs: WeakKeyDictionary[Future[bytes], Future[bytes]] = WeakKeyDictionary()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    @property
    def link(self) -> str:
        """Address of Dask's dashboard; empty: there is none."""
        return str(self._client.dashboard_link or "")

    def _check(self, address: str) -> None:
        """Raise AdvisorError unless there are workers, all with this version of advisor."""
        try:
            self._client.wait_for_workers(1, timeout=self._patience)
        except OSError:  # a time-out, which is one, or a connection that closed
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
        """Return the number of the workers' threads; 0 after ``patience`` seconds without any."""
        now = time.monotonic()
        if now - self._looked >= SLOTS_REFRESH_S:
            self._looked = now
            result = sum(self._client.nthreads().values())
            if result:
                self._slots, self._gone = result, 0.0
            elif not self._gone:
                self._gone = now
        if self._gone and now - self._gone > self._patience:
            return 0
        return max(1, self._slots)

    def submit(self, fn: Work, data: bytes, /) -> Future[bytes]:
        """Send a task to whichever worker is free. Dask itself retries where a worker dies."""
        from distributed import KilledWorker

        answer: Future[bytes] = Future()

        def done(theirs: Future[bytes]) -> None:
            try:
                answer.set_result(theirs.result())
            except KilledWorker:
                answer.set_exception(WorkerDied("the workers that read it died", count=RETRIES))
            except CancelledError:
                answer.set_exception(WorkerDied("its answer was lost with the worker that had it"))
            except BaseException as error:
                answer.set_exception(error)

        theirs = self._executor.submit(fn, data)
        self._theirs[answer] = theirs
        theirs.add_done_callback(done)
        return answer

    @cached_property
    def _executor(self) -> Executor:
        made: Executor = self._client.get_executor(pure=False, retries=RETRIES)
        return made

    def cancel(self, answer: Future[bytes]) -> None:
        """Forget an answer. A thread that has begun cannot be ended from here."""
        with suppress(Exception):
            self._theirs[answer].cancel()
