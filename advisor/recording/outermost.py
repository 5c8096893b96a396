"""Times the forward of outermost modules without a wrapper around every module's call.

A wrapper around ``Module.__call__`` sees every forward, and is on the way of every submodule too:
a microsecond or two each where the caches are cold. So it stays for a few steps only, until it is
known which modules are called from outside. Those then get what ``Module.compile`` gives a module,
its own ``_compiled_call_impl``: torch calls it in the place of ``_call_impl`` and leaves it out of
copies and pickles.

The wrapper comes back for a few steps when a loader is seen for the first time (validation may use
another model), and when a step had no forward. It stays for good when something is compiled:
dynamo guards on what a module's call is, and a change of it would compile again.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

AFTER_STEPS = 3
"""Steps that the wrapper stays."""
MOST_MODULES = 16
FEWEST_INSIDE = 3
"""Modules inside of them, that the wrapper is a burden for."""
MOST_TIMES = 8
"""So often it goes away; a program that brings it back more often keeps it."""
PLACE = "_compiled_call_impl"


class Direct(partial[Any]):
    """A module's own call. Stored in the module, so it must neither keep the module alive nor
    stop it from being copied or pickled: there it turns into ``None``, the attribute's default.
    (``partial``: an object that calls a function without one more call of Python.)"""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class Outermost:
    """Which modules are outermost, and whether they are called directly.

    ``wrap(call)`` makes the timing wrapper of a function; ``put_back()`` puts the wrapper around
    ``Module.__call__``, ``take_off()`` takes it away.
    """

    def __init__(
        self,
        wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
        put_back: Callable[[], None],
        take_off: Callable[[], None],
    ) -> None:
        self._wrap = wrap
        self._put_back = put_back
        self._take_off = take_off
        self._lock = threading.Lock()
        self._seen: dict[int, ref[Any]] = {}
        self._steps = 0
        self._times = 0
        self._stays = not _supported()
        self.direct: list[ref[Any]] = []
        """The modules that are called directly; empty: the wrapper is in place."""

    @property
    def waits(self) -> bool:
        """Whether ``stepped`` is to be called."""
        return not self.direct and not self._stays

    def met(self, module: Any) -> None:
        """A module was called from outside all others."""
        known = self._seen.get(id(module))
        if known is None or known() is not module:
            self._seen[id(module)] = ref(module)

    def stepped(self) -> None:
        """A step has ended, in the thread that trains."""
        if not self.waits:
            return
        self._steps += 1
        if self._steps < AFTER_STEPS:
            return
        modules = [m for m in (known() for known in self._seen.values()) if m is not None]
        if self._times >= MOST_TIMES or not _worth(modules) or compiled():
            self._stays = True
            return
        with self._lock:
            self._times += 1
            for module in modules:
                vars(module)[PLACE] = Direct(self._wrap(_inner(module)))
                self.direct.append(ref(module))
            self._take_off()

    def look_again(self) -> None:
        """There may be other modules now. In any thread."""
        if self.direct:
            self.undo()
            self._put_back()

    def stay(self) -> None:
        """Something is about to be compiled."""
        self._stays = True
        self.look_again()

    def undo(self) -> None:
        """Leave modules as they were."""
        with self._lock:
            self._steps = 0
            for known in self.direct:
                module = known()
                if module is not None and type(vars(module).get(PLACE)) is Direct:
                    del vars(module)[PLACE]
            self.direct.clear()


def _inner(module: Any) -> Callable[..., Any]:
    """What torch would call. Does not keep the module alive."""
    known: Any = ref(module)

    def call(*args: Any, **kwargs: Any) -> Any:
        return known()._call_impl(*args, **kwargs)  # its own method is running

    return call


def _worth(modules: list[Any]) -> bool:
    if len(modules) > MOST_MODULES or any(vars(m).get(PLACE) is not None for m in modules):
        return False
    return sum(1 for m in modules for _ in m.modules()) >= FEWEST_INSIDE + len(modules)


def _supported() -> bool:
    """Whether this torch has modules with a call of their own, and leaves it out of pickles."""
    from torch.nn import Module

    probe = Module()
    vars(probe)[PLACE] = probe
    state = probe.__reduce_ex__(2)[2]
    return hasattr(Module, PLACE) and hasattr(Module, "_call_impl") and PLACE not in state


def compiled() -> bool:
    """Whether dynamo has compiled anything in this process, as far as can be told."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return False
    try:
        return bool(utils.counters["frames"]["total"])
    except (AttributeError, KeyError, TypeError):
        return True
