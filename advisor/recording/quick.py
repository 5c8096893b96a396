"""The hooks in C (``_quick.c``), where they were built: at less than half the cost of Python's.

They know the usual case only and leave every other to the Python hook that they stand for. They
come after the first steps, once nothing has been compiled: dynamo looks into functions of Python
and must find them where it compiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from advisor.recording.clock import (
    BACKWARD,
    BACKWARD_END,
    BATCH,
    DATA,
    EXHAUSTED,
    FETCH,
    FETCHED,
    FORWARD,
    FORWARD_END,
    FORWARD_END_NO_GRAD,
    H2D,
    LEAVE,
    LOADER,
    MAX_TAPE,
    OPTIMIZED_BY,
    OPTIMIZER,
    OPTIMIZER_END,
    Tape,
)

if TYPE_CHECKING:
    from advisor.recording.hooks import Listener

try:
    from advisor.recording import _quick
except ImportError:  # no compiler when it was installed, or another Python
    _quick = None  # type: ignore[assignment]

_TIMED, _FORWARD, _UPLOAD, _CUDA, _NEXT, _BEFORE, _AFTER = range(7)  # kinds, as in _quick.c


def _bits(*phases: int) -> int:
    return sum(1 << phase for phase in phases)


_GRADIENTS = _bits(DATA, FORWARD, BACKWARD)
_UPLOADS = _bits(DATA, H2D, FORWARD, BACKWARD, OPTIMIZER)
_WRAPPERS: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "__call__": (_FORWARD, _GRADIENTS, (FORWARD, FORWARD, FORWARD_END, FORWARD_END_NO_GRAD)),
    "_engine_run_backward": (_TIMED, _GRADIENTS, (BACKWARD, BACKWARD, BACKWARD_END, LEAVE)),
    "to": (_UPLOAD, _UPLOADS, (H2D, H2D, LEAVE, LEAVE)),
    "cuda": (_CUDA, _UPLOADS, (H2D, H2D, LEAVE, LEAVE)),
    "__next__": (
        _NEXT,
        _bits(DATA, OPTIMIZER),
        (FETCH, DATA, FETCHED, LEAVE, EXHAUSTED, BATCH, LOADER),
    ),
}
"""By the name of what is wrapped: the kind, phases in which a call is not one of its own (for
``__next__``: not a usual one), and what is written."""


def available() -> bool:
    """Whether they were built, and take this thread for the one that Python takes it for (gevent
    has threads of its own)."""
    built: Any = _quick
    return built is not None and built.thread() == get_ident()


class Quick:
    """Makes them. ``available`` must hold."""

    def __init__(self, on: Listener) -> None:
        from torch import Tensor, device, is_grad_enabled

        _quick.set_up(perf_counter_ns, Tensor, device)
        self._tape: Tape = on.tape
        self._listener = on.left, on.drain, on.stepped
        self._aids = {"__next__": _noted(on), "__call__": is_grad_enabled}

    def wrapper(self, name: str, original: Any, slow: Any) -> Any:
        """In place of ``slow``, the hook around ``original``; that itself: there is none."""
        if name not in _WRAPPERS:
            return slow
        kind, inside, codes = _WRAPPERS[name]
        aid = self._aids.get(name)
        tape = self._tape
        made = _quick.Hook(
            kind, original, slow, tape.log, tape.here, inside, codes, self._listener, aid
        )
        return functools.wraps(original)(made)

    def around_step(
        self, slow: tuple[Any, Any], opened: list[tuple[int, int]]
    ) -> tuple[Callable[..., None], Callable[..., None]]:
        """Hooks of all optimizers, which share ``opened`` with those of Python."""
        log, here = self._tape.log, self._tape.here
        before, after = slow
        codes = OPTIMIZER, OPTIMIZER, LEAVE, LEAVE
        ends = OPTIMIZED_BY, OPTIMIZER, OPTIMIZER_END, LEAVE
        return (
            _quick.Hook(_BEFORE, None, before, log, here, 0, codes, self._listener, opened),
            _quick.Hook(_AFTER, None, after, log, here, MAX_TAPE, ends, self._listener, opened),
        )


def _noted(on: Listener) -> Callable[[int, Any], bool]:
    """Notes a batch that is not the usual one, and that it came; whether that went well."""
    put, glance = on.tape.log.extend, on.glance

    def noted(end: int, batch: Any) -> bool:
        try:
            put((FETCHED, end, BATCH, glance(batch)))
        except Exception as error:
            on.broken(error)
            return False
        return True

    return noted
