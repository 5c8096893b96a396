"""Recording without a change to the user's code: begins when the process imports torch.

``advisor record`` sets ``PYTHONPATH`` to a folder with a sitecustomize that calls ``watch``; so
the processes that torchrun or a script starts are watched too. A directory is only made by one
that trains: helpers and DataLoader workers leave nothing.
"""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.machinery
import logging
import multiprocessing
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from advisor.recording.options import switched_off

log = logging.getLogger("advisor")

STOP_AFTER = "ADVISOR_STOP_AFTER"
"""Leave the process after so many steps: for the pass under Scalene, which is too slow for all."""


def watch() -> None:
    """Record this process once it has imported torch."""
    if switched_off():
        return
    if "torch" in sys.modules:
        begin()
    else:
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the import of torch happen as it would, and begins after it."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        loader = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = loader
        module.__loader__ = loader
        loader.exec_module(module)
        try:
            begin()
        except Exception as error:  # the user's import of torch must not fail by us
            log.warning("advisor: not recording: %s: %s", type(error).__name__, error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def begin() -> None:
    """Begin to record; the directory is made when training is seen."""
    from advisor.recording import api

    limit = os.environ.get(STOP_AFTER, "")
    if limit.isdecimal():
        _leave_after(int(limit))
        return
    session = api.open_session("command", {}, lazy=True)
    if session is None:
        return
    if multiprocessing.parent_process() is not None:
        _leave_workers_alone(session)
    atexit.register(_end, session)


def _end(session: Any) -> None:
    """The interpreter ends; an exception that nobody caught is its last one."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    session.finish(error if isinstance(error, BaseException) else None)


def _leave_workers_alone(session: Any) -> None:
    """A process that turns out to be a DataLoader's worker is not recorded."""
    from torch.utils.data import _utils

    original = _utils.worker._worker_loop

    def _worker_loop(*args: Any, **kwargs: Any) -> Any:
        session.finish()
        return original(*args, **kwargs)

    _utils.worker._worker_loop = _worker_loop


def _leave_after(limit: int) -> None:
    """End the process once it has made so many steps. Nothing is recorded."""
    from advisor.recording.counting import count_steps

    count_steps(limit)
