"""Recording API: ``advisor.profile``, an object that is a decorator, a context manager and more.

::

    @advisor.profile                     # a train() with the loop inside, or a train_step()
    @advisor.profile(active=10)          # with options, see advisor.recorder.options
    with advisor.record("runs/a") as rec:
        for batch in rec.steps(loader):  # step boundary and data wait
            with rec.phase("forward"): ...
    advisor.step()                       # a step ends here, wherever one is recorded

``ADVISOR=0`` makes all of this a no-op. A recording inside another one is a no-op too, with a
warning. A decorator's recording ends when another begins after its functions have returned."""

from __future__ import annotations

import atexit
import functools
import inspect
import logging
import os
import sys
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator
from multiprocessing import parent_process
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload

from advisor.recorder.modules import hide_from_warnings
from advisor.recorder.options import (
    RecordOptions,
    explain_unsupported,
    resolve_options,
    switched_off,
)

if TYPE_CHECKING:
    from pathlib import Path

    from advisor.recorder.session import RecordingSession

log = logging.getLogger("advisor")
LEVEL: Final = "KINETO_LOG_LEVEL"
SILENT: Final = "6"
"""Log level above all of Kineto's levels. Kineto logs each start and stop of a profiler to stderr,
with the level that the C environment has when a process first profiles. stderr is not redirected,
because the program's own threads write to it meanwhile."""
_MAIN_PID = os.getpid()

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])


class Recorder:
    """Recorder of the code that runs inside it. Keywords are the options. ``step=True`` makes each
    call of the decorated function one step; by default, the recorder finds the steps."""

    def __init__(self, out: str | None = None, *, step: bool | None = None, **options: Any) -> None:
        if out is not None:
            options["out"] = str(out)
        RecordOptions().with_changes(**options)  # so that a wrong keyword fails at its own line
        self._keywords = options
        self._step = step
        self._session: RecordingSession | None = None
        self._depth = 0
        self._warned = False
        self._atexit = False

    @overload
    def __call__(self, out: _F, /) -> _F: ...

    @overload
    def __call__(
        self, out: str | None = None, /, *, step: bool | None = None, **options: Any
    ) -> Recorder: ...

    def __call__(self, out: Any = None, /, *, step: bool | None = None, **options: Any) -> Any:
        """Decorate a function, or return a recorder with other options."""
        if callable(out):
            return self._decorate(out)
        merged = {**self._keywords, **options}
        if out is not None:
            merged["out"] = out
        return Recorder(step=self._step if step is None else step, **merged)

    # -- as a context manager -------------------------------------------------------------------

    def __enter__(self) -> Recorder:
        self._depth += 1
        if self._depth == 1:
            self.begin("context")
        elif self._session is not None:
            log.warning("advisor: already recording; the recording inside is left out")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """End the recording, write what remains, and print where it is."""
        session, self._session = self._session, None
        if session is not None:
            end_recording(session, error)

    @property
    def path(self) -> Path | None:
        """Run directory, or ``None`` if nothing is being recorded or it does not exist yet."""
        session = self._session
        if session is None or session.writer.folder is None:
            return None
        return session.writer.folder.parent

    # -- calls of the program -------------------------------------------------------------------

    def step(self) -> None:
        """End the current step here."""
        step()

    def phase(self, name: str) -> PhaseRange:
        """Return a context manager whose time counts as phase ``name``."""
        return PhaseRange(name)

    def steps(self, loader: Iterable[_T]) -> Iterator[_T]:
        """Iterate over a loader. Each batch is a step, and the wait for it is the phase
        ``data``."""
        from advisor.recorder.session import current_session

        session = current_session()
        if session is None:
            yield from loader
            return
        length = getattr(loader, "__len__", None)
        iterator = _begin_loop(session, loader, length)
        while True:
            try:
                batch = _fetch(session, iterator)
            except StopIteration:
                session.end_loop(broken_off=False)
                return
            try:
                yield batch
            except GeneratorExit:  # the program left the loop by break, after or within a step
                _run_safely(session, lambda: session.end_loop(broken_off=True))
                raise
            _run_safely(session, session.on_step_end)

    # -- as a decorator -------------------------------------------------------------------------

    def _decorate(self, function: Any) -> Any:
        if inspect.isasyncgenfunction(function):

            @functools.wraps(function)
            async def run_async_generator(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
                with _DecoratedCall(self):
                    inner = function(*args, **kwargs)
                    try:
                        sent = None
                        while True:
                            item = await inner.asend(sent)
                            try:
                                sent = yield item
                            except GeneratorExit:
                                raise
                            except BaseException as error:
                                sent = yield await inner.athrow(error)
                    except StopAsyncIteration:
                        return
                    finally:
                        await inner.aclose()

            return run_async_generator
        if inspect.isgeneratorfunction(function):

            @functools.wraps(function)
            def run_generator(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
                with _DecoratedCall(self):
                    return (yield from function(*args, **kwargs))

            return run_generator
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def run_coroutine(*args: Any, **kwargs: Any) -> Any:
                with _DecoratedCall(self):
                    return await function(*args, **kwargs)

            return run_coroutine

        @functools.wraps(function)
        def run_function(*args: Any, **kwargs: Any) -> Any:
            with _DecoratedCall(self):
                return function(*args, **kwargs)

        return run_function

    def begin(self, entry: str = "context") -> None:
        """Begin to record until ``close`` or the end of the process, unless ``ADVISOR=0``."""
        if switched_off() or self._session is not None:
            return
        self._session = open_session(entry, self._keywords, self)
        if self._session is not None and not self._atexit:
            self._atexit = True
            atexit.register(self.close)

    def is_idle(self) -> bool:
        """Return whether a decorator began the recording and its functions have all returned."""
        session = self._session
        return self._depth == 0 and session is not None and session.entry == "decorator"

    def _warn_active(self) -> None:
        """Warn once that a recording is already active."""
        if not self._warned:
            self._warned = True
            log.warning("advisor: already recording; the recording inside is left out")


class _DecoratedCall:
    """Context manager around one call of a decorated function."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._before = 0
        self._ours = self._is_first_call = False

    def __enter__(self) -> None:
        recorder = self._recorder
        recorder._depth += 1
        if recorder._depth > 1:
            return
        session = recorder._session
        if session is None or session.finished:
            recorder._session = None
            recorder.begin("decorator")
            session = recorder._session
            self._is_first_call = True
        elif not session.listening:
            _run_safely(session, session.listen)
            self._is_first_call = True
        if session is not None:
            self._ours = True
            self._before = session.steps.count

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        recorder = self._recorder
        recorder._depth -= 1
        session = recorder._session
        if not self._ours or session is None:
            return
        if error is not None and not isinstance(error, GeneratorExit | StopIteration):
            session.on_exception(error)  # a caller that catches it may call again
            return
        if recorder._step:
            _run_safely(session, session.on_step_end)
        elif self._is_first_call:
            _run_safely(session, lambda: self._detect_inner_loop(session))

    def _detect_inner_loop(self, session: RecordingSession) -> None:
        if session.count() - self._before > 1:
            # the loop is inside the function: there is nothing to record until the next call
            session.pause()
            if hasattr(sys, "ps1"):  # a notebook or a prompt, which may stay for days
                self._recorder.close()
            elif os.getpid() != _MAIN_PID or parent_process() is not None:
                session.writer.flush()  # a child may exit without notice


class PhaseRange:
    """Context manager whose time counts as the named phase: ``data``, ``h2d``, ``forward``,
    ``backward``, ``optimizer``, or a name of your own."""

    __slots__ = ("_before", "_name", "_session")

    def __init__(self, name: str) -> None:
        self._name = name
        self._session: RecordingSession | None = None
        self._before = 0

    def __enter__(self) -> None:
        from advisor.recorder.session import current_session

        session = current_session()
        if session is None or not session.on_watched_thread():
            return
        try:
            self._before = session.enter(session.tape.phase(self._name))
            self._session = session
        except Exception as error:
            session.on_internal_error(error)

    def __exit__(self, *_: object) -> None:
        session, self._session = self._session, None
        if session is None:
            return
        try:
            session.leave(self._before)
        except Exception as error:
            session.on_internal_error(error)


def step() -> None:
    """End the current training step here. Does nothing if nothing is recorded."""
    from advisor.recorder.session import current_session

    session = current_session()
    if session is not None and session.on_watched_thread() and not session.in_loop:
        _run_safely(session, session.on_step_end)


def phase(name: str) -> PhaseRange:
    """Return a context manager whose time counts as this phase of the step."""
    return PhaseRange(name)


def silence_kineto() -> None:
    """Silence Kineto's log from the first window on, unless the user has set a level.
    ``os.environ``, which programs read, does not show the change."""
    if LEVEL not in os.environ:
        os.putenv(LEVEL, SILENT)


def restore_kineto_log() -> None:
    """Restore Kineto's log level for processes started after the recording."""
    if LEVEL not in os.environ:
        os.unsetenv(LEVEL)


def open_session(
    entry: str, keywords: dict[str, Any], recorder: Recorder | None = None, *, lazy: bool = False
) -> RecordingSession | None:
    """Begin to record. Return ``None`` if that fails or a recording is active (warned once)."""
    try:
        from advisor.recorder.session import RecordingSession, current_session

        other = current_session()
        if other is not None and isinstance(other.owner, Recorder) and other.owner.is_idle():
            other.owner.close()
            other = current_session()
        if other is not None:
            if recorder is not None:
                recorder._warn_active()
            return None
        import torch

        if problem := explain_unsupported(torch.__version__):
            log.warning("advisor: not recording: %s", problem)
            return None
        session = RecordingSession(resolve_options(**keywords), entry, lazy=lazy)
        session.owner = recorder
        if entry == "command":
            session.fork_session = lambda: open_session("command", {}, lazy=True)
        silence_kineto()
        try:
            session.start()
        except BaseException:
            session.finish()
            raise
        return session
    except Exception as error:  # whatever fails in recording, training must begin
        log.warning("advisor: not recording: %s: %s", type(error).__name__, error)
        return None


def end_recording(session: RecordingSession, error: BaseException | None = None) -> None:
    """End a recording and print where it is."""
    session.finish(error)
    restore_kineto_log()
    if session.problem is not None and session.rank == 0:
        from advisor.recorder.folder import print_message

        run = session.writer.folder
        location = "" if run is None else f" Recorded until then: {run.parent}"
        print_message(f"recording stopped early: {session.problem}.{location}")
    elif session.writer.folder is not None and session.rank == 0:
        from advisor.recorder.folder import print_result

        print_result(session.writer.folder.parent, analyse=session.options.report and error is None)


def _begin_loop(session: RecordingSession, loader: Iterable[_T], length: Any) -> Iterator[_T]:
    if session.on_watched_thread():
        try:
            session.begin_loop()
            if length is not None:
                session.windows.fit_to_loader(length())
        except Exception as error:
            session.on_internal_error(error)
    return iter(loader)


def _fetch(session: RecordingSession, iterator: Iterator[_T]) -> _T:
    return session.fetch(iterator) if session.on_watched_thread() else next(iterator)


def _run_safely(session: RecordingSession, call: Callable[[], None]) -> None:
    if session.finished:
        return
    try:
        if session.on_watched_thread() or not session.listening:
            call()
    except Exception as error:
        session.on_internal_error(error)


profile = Recorder()
"""Recorder with default options; call it for others."""
record = profile


hide_from_warnings(globals())
