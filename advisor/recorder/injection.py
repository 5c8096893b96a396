"""Recording without a change to the user's code: begins when the process has imported torch.

``advisor record`` sets ``PYTHONPATH`` to a folder with a sitecustomize that notices it and calls
``begin``; so the processes that torchrun or a script starts are watched too. A directory is only
made by one that trains: helpers and DataLoader workers leave nothing but a note of what was seen.
"""

from __future__ import annotations

import atexit
import json
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any

from advisor.recorder.options import explain_unsupported

log = logging.getLogger("advisor")

STOP_AFTER = "ADVISOR_STOP_AFTER"
"""Leave the process after so many steps: for the pass under Scalene, which is too slow for all."""
Note = Callable[[str], None]
"""Writes a line for ``advisor record``."""


def begin(note: Note) -> None:
    """Begin to record; the directory is made when training is seen. Never raises: the user's
    import of torch is around it."""
    try:
        _begin(note)
    except Exception as error:
        note(f"problem {type(error).__name__}: {error}")
        log.warning("advisor: not recording: %s: %s", type(error).__name__, error)


def _begin(note: Note) -> None:
    from advisor.recorder import api

    limit = os.environ.get(STOP_AFTER, "")
    if limit.isdecimal():
        _leave_after(int(limit))
        return
    session = api.open_session("command", {}, lazy=True)
    if session is None:
        import torch

        note(f"problem {explain_unsupported(torch.__version__) or 'it did not begin'}")
        return
    if multiprocessing.parent_process() is not None:
        _leave_workers_alone(session)
        # a forked one ends without the handlers of atexit
        from multiprocessing.util import Finalize

        Finalize(None, _end, (session, note, os.getpid()), exitpriority=0)
    atexit.register(_end, session, note, os.getpid())


def _end(session: Any, note: Note, process: int) -> None:
    """The interpreter ends; an exception that nobody caught is its last one."""
    if os.getpid() != process:
        return
    from advisor.recorder import api

    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    session.finish(error if isinstance(error, BaseException) else None)
    api.restore_kineto_log()
    if session.problem is not None:
        note(f"problem {session.problem}")
    elif session.writer.folder is None:
        note(f"seen {json.dumps(session.steps.seen)}")


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
    from advisor.recorder.counting import CallCounter

    def ended(count: int) -> None:
        if count >= limit:
            counter.stop()
            raise SystemExit(0)  # no Exception: hooks let it through, and so do most programs

    counter = CallCounter(ended)
    counter.start()
