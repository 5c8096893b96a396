"""Workers of a Dask cluster: whoever joined its scheduler, on whatever machines."""

from __future__ import annotations

import time
from concurrent.futures import CancelledError, Executor, Future
from contextlib import suppress
from functools import cached_property
from typing import Any, Final
from weakref import WeakKeyDictionary

import advisor
from advisor.advise.ranks.task import one_line
from advisor.advise.ranks.worker_pool import RETRIES
from advisor.core.errors import AdvisorError, install_command
from advisor.core.pool import Work, WorkerDied

SCHEDULER_TIMEOUT_S: Final = 60.0
"""Seconds to wait for a scheduler to answer, and for its first worker; and for one to come back
when all have gone: a job manager starts a new one within a minute or not at all."""
SLOTS_REFRESH_S: Final = 1.0
"""Seconds that the number of workers is taken to be right."""


def _version() -> str:
    return advisor.__version__


class Cluster:
    """The workers of the scheduler at an address (``tcp://host:8786``). Used with ``with``.

    Raises AdvisorError: no such address, no answer, no worker, or workers with another advisor.
    """

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
            why = one_line(error) or type(error).__name__
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
        """There are workers, and they have this advisor."""
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
                why = f"the worker {worker} does not run advisor ({one_line(version)})"
            elif version != advisor.__version__:
                why = f"the worker {worker} has advisor {version}, this is {advisor.__version__}"
            else:
                continue
            raise AdvisorError(f"--cluster {address}: {why}; install the same on all workers")

    def slots(self) -> int:
        """Threads of all workers; 0 when none has been there for ``patience`` seconds."""
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
        """To whichever worker is free. Dask itself tries again where a worker dies."""
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

    def abandon(self, answer: Future[bytes]) -> None:
        """Forget it. A thread that has begun cannot be ended from here."""
        with suppress(Exception):
            self._theirs[answer].cancel()
