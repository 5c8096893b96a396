"""Patience with what is elsewhere: an end to waiting, and another attempt after what may pass."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from advisor.core.errors import AdvisorError
from advisor.read.remote.failures import trouble
from advisor.read.remote.urls import shown

_T = TypeVar("_T")

TIMEOUT = 60.0
"""Seconds that one answer, of at most a block, may take."""
ATTEMPTS = 4
"""In a row that bring nothing, before it is given up."""
FIRST_WAIT, LONGEST_WAIT = 0.5, 8.0
"""Seconds before the second attempt; each later one doubles it."""


def within(seconds: float, call: Callable[[], _T]) -> _T:
    """What a call returns or raises. TimeoutError: not in time; it is left to itself, in a thread
    that nobody waits for. Ctrl-C is heard meanwhile, whatever the call waits for."""
    done = threading.Event()
    result: list[_T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(call())
        except BaseException as error:
            failure.append(error)
        finally:
            done.set()

    threading.Thread(target=run, daemon=True, name="advisor-remote").start()
    if not done.wait(seconds):
        raise TimeoutError
    if failure:
        raise failure[0]
    return result[0]


def patiently(place: str, call: Callable[[], _T], timeout: float | None = None) -> _T:
    """What a call returns, after another attempt or more where a failure may pass. Raises
    AdvisorError with one line."""
    failures = 0
    while True:
        try:
            return within(TIMEOUT if timeout is None else timeout, call)
        except AdvisorError:
            raise
        except Exception as error:  # a file system's library may raise anything
            failures += 1
            give_up_or_wait(error, place, failures)


def give_up_or_wait(error: Exception, place: str, failures: int) -> None:
    """Wait before the next attempt. Raises AdvisorError: it cannot help, or there were enough."""
    what = trouble(error, place)
    if not what.passing:
        raise AdvisorError(f"{shown(place)}: {what.said}") from None
    if failures >= ATTEMPTS:
        often = f" ({failures} attempts)" if failures > 1 else ""
        raise AdvisorError(f"{shown(place)}: {what.said}{often}") from None
    wait = min(FIRST_WAIT * 2 ** (failures - 1), LONGEST_WAIT)
    time.sleep(wait * random.uniform(0.5, 1.0))  # not all of many processes at once
