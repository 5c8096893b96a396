"""One recording of one process: everything that listens, measures and writes, as one object.

There is at most one at a time (``current``). Whatever fails in here ends the recording with one
warning; training goes on as if it had never been there.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from advisor.recording.batch import Batches
from advisor.recording.clock import (
    BACKWARD,
    BATCH,
    BEGIN,
    BOUNDARY,
    BREAK_OFF,
    DATA,
    FETCHED_INSIDE,
    FORWARD,
    LEAVE,
    MAX_TAPE,
    MEMORY,
    ONLINE,
    PHASE,
    THREAD,
    Tape,
)
from advisor.recording.cuda import Allocator, Marks, Reading, usable
from advisor.recording.hooks import Hooks
from advisor.recording.loaders import Loaders
from advisor.recording.oom import OutOfMemory
from advisor.recording.options import Options
from advisor.recording.pauses import Pauses
from advisor.recording.ranges import TraceRanges, ranges
from advisor.recording.reader import Reader
from advisor.recording.steps import Found, Segment
from advisor.recording.trouble import Trouble
from advisor.recording.windows import Windows
from advisor.recording.writer import Writer
from advisor.rundir import Event, Manifest, Rank

log = logging.getLogger("advisor")

_T = TypeVar("_T")


class _Here:
    """What there is one of in a process."""

    session: Session | None = None
    watches_forks = False


def current() -> Session | None:
    """The recording that is going on in this process."""
    return _Here.session


class Session:
    """A recording. ``entry``: ``decorator``, ``context``, ``command`` or ``callback``. With
    ``lazy`` the run directory is made when training is seen, not at the start."""

    def __init__(self, options: Options, entry: str, *, lazy: bool = False) -> None:
        import torch

        self.options = options
        self.entry = entry
        self.problem: str | None = None
        """Why recording stopped before its time."""
        self.tape = Tape()
        self.looping: list[Any] = []
        self.in_loop = False
        """Inside a loop that says itself where steps end."""
        self.loaders = Loaders(self.tell)
        self.reader = Reader(self.loaders, self._emit)
        self.steps = self.reader.steps
        self.batches = Batches(self._shapes)
        self.glance = self.batches.glance
        self._pid = os.getpid()
        self._torch = torch
        self._lazy = lazy
        self.over = False
        """It has ended."""
        self.listening = False
        """The hooks are in place."""
        self._told: tuple[int, BaseException | None] = -1, None
        self._lock = threading.Lock()
        self._reading = threading.RLock()
        self.rank, self.world = rank_of(torch)
        self.hooks = Hooks(self, native=options.native)
        self.pauses = Pauses(self.tape)
        self.allocator = Allocator(torch)
        self.marks = Marks(self.tape, torch, options.cuda_events) if options.cuda_events else None
        self.windows = Windows(
            options,
            self.rank,
            lambda data: self.tell("window", data),
            self.hooks,
            TraceRanges(self.tape),
        )
        self.oom = OutOfMemory(lambda data: self.tell("oom", data))
        self.writer = Writer(
            out=options.out,
            rank=self._where,
            names=self.tape.names,
            describe=self._describe,
            failed=self._failed,
        )
        self.writer.resolve = self.batches.resolve
        self.writer.opened = self._opened
        self.writer.wanted = self.want
        self.writer.read = self._read_in_writer
        self.writer.trouble = Trouble() if options.on_trouble and self.windows.enabled else None
        self._sampler: Any = None
        self._old_signal: Any = None

    # -- life -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to record in the calling thread."""
        _Here.session = self
        if not _Here.watches_forks:
            os.register_at_fork(after_in_child=_forked)
            _Here.watches_forks = True
        made = ranges(self.tape) if self.options.nvtx else None
        if made is not None:
            self.tape.watch(made)
        self.writer.start()
        if not self._lazy:
            self.writer.open()
        self._take_signal()
        self.listen()

    def listen(self) -> None:
        """Put the hooks in place; the calling thread is the one that trains."""
        if self.listening or self.over:
            return
        self.listening = True
        now = time.perf_counter_ns()
        self.reader.clock.start(now)
        self.steps.begun = now
        self.tape.here[PHASE] = 0
        self.hooks.install()
        self.windows.guard()
        self.pauses.install()
        self._settle()
        self.tape.here[THREAD] = threading.get_ident()

    def pause(self, error: BaseException | None = None) -> None:
        """Take the hooks out; ``listen`` goes on from here."""
        if not self.listening:
            return
        self.listening = False
        self.tape.here[THREAD] = -1
        self.hooks.remove()
        self.pauses.remove()
        if self.marks is not None:
            self.marks.end()
        now = time.perf_counter_ns()
        with self._reading:
            self.reader.read(self.tape.take())
            self.steps.finish(now)
            self.steps.abandon(now)
            if self.over:
                self.windows.finish(self.steps.count)
            else:
                self.windows.stop("recording was paused")
        self.windows.unguard()
        if self.marks is not None:
            self.marks.answer()
        self._end(error)

    def failed(self, error: BaseException) -> None:
        """Training raised: perhaps for good."""
        try:
            self.oom.raised(error)
            self.pause(error)
        except Exception as problem:
            self.broken(problem)

    def here(self) -> bool:
        """Whether the calling thread is the one that is watched."""
        return self.tape.here[THREAD] == threading.get_ident()

    def finish(self, error: BaseException | None = None) -> None:
        """End the recording and write what is left. Never raises; a second call does nothing."""
        with self._lock:
            if self.over or os.getpid() != self._pid:
                return
            self.over = True
        if _Here.session is self:
            _Here.session = None
        try:
            self._give_signal_back()
            if error is not None:
                self.oom.raised(error)
            self.pause(error)
            self.loaders.finish()
            if self._sampler is not None:
                self._sampler.stop()
            self._end(error)
        except Exception as problem:
            self._warn(problem)
        self.writer.stop()

    # -- what hooks call ------------------------------------------------------------------------

    def entered(self, phase: int) -> None:
        """A phase is about to begin."""
        try:
            for watcher in self.tape.watched:
                watcher.entered(phase)
        except Exception as error:
            self.broken(error)

    def left(self, phase: int) -> None:
        """A phase has ended, and this one goes on."""
        try:
            for watcher in self.tape.watched:
                watcher.left(phase)
        except Exception as error:
            self.broken(error)

    def stepped(self) -> None:
        """An optimizer has stepped."""
        try:
            counters = self.allocator.sample()
            if counters is not None:
                self.tape.log.extend((MEMORY, counters))
            if self.marks is not None:
                self.marks.stepped()
            if self.hooks.outermost.waits:
                self.hooks.stepped()
                self._settle()
            if len(self.tape.log) > MAX_TAPE:
                self.tape.log.clear()
                raise RuntimeError("the recorder's thread does not keep up")
        except Exception as error:
            self.broken(error)

    def look_again(self) -> None:
        """Another model may be used from here on."""
        self.hooks.outermost.look_again()
        self._settle()

    def drain(self) -> None:
        """Read the tape in the training thread, while a window is open or due."""
        if not self.windows.waits or not self._reading.acquire(blocking=False):
            return  # the writer is at it; the next boundary will do
        try:
            self.reader.read(self.tape.take())
        except Exception as error:
            self.broken(error)
        finally:
            self._reading.release()

    def broken(self, error: BaseException) -> None:
        """Something of ours failed: recording is over."""
        self._warn(error)
        self._stop_early()

    # -- what the user says ---------------------------------------------------------------------

    def boundary(self) -> None:
        """A step ends here."""
        self._say(BOUNDARY)

    def begin_loop(self) -> None:
        """A loop begins whose every iteration is a step."""
        self.in_loop = True
        self._say(BEGIN)

    def end_loop(self, *, broken_off: bool) -> None:
        """It ended; ``broken_off``: in the middle of an iteration, as far as can be told."""
        self.in_loop = False
        if broken_off:
            self._say(BREAK_OFF)

    def enter(self, phase: int) -> int:
        """A phase of the user's begins; what was open before, for ``leave``."""
        tape = self.tape
        before = tape.here[PHASE]
        if tape.watched:
            self.entered(phase)
        tape.here[PHASE] = phase
        tape.log.extend((phase, time.perf_counter_ns()))
        return before

    def leave(self, before: int) -> None:
        """It ends."""
        tape = self.tape
        tape.here[PHASE] = before
        tape.log.extend((LEAVE, time.perf_counter_ns()))
        if tape.watched:
            self.left(before)

    def fetch(self, iterator: Iterator[_T]) -> _T:
        """The next item of any iterator; the wait is of phase ``data``."""
        before = self.enter(DATA)
        self.looping.append(1)
        try:
            batch = next(iterator)
            if self.looping:  # no DataLoader, whose hook would have told
                self.tape.log.extend((FETCHED_INSIDE, time.perf_counter_ns()))
                self.tape.log.extend((BATCH, self.glance(batch)))
            return batch
        finally:
            self.looping.clear()
            self.leave(before)

    def count(self) -> int:
        """Steps so far, the one that is complete and has not ended included."""
        with self._reading:
            self.reader.read(self.tape.take())
            return self.steps.count + self.steps.complete()

    def want(self, reason: str, asked: bool) -> None:
        """Open a window at the next boundary."""
        if asked:
            self.windows.asked = reason
        else:
            self.windows.wanted = reason
        self._settle()

    def tell(self, kind: str, data: dict[str, Any]) -> None:
        """Write an event."""
        self.writer.put(Event(t=time.perf_counter_ns(), kind=kind, data=data))

    # -- inside ---------------------------------------------------------------------------------

    def _end(self, error: BaseException | None) -> None:
        """Tell that recording has ended here; it may go on after a pause."""
        steps = self.steps.count
        if (steps, error) == self._told or (error is None and self._told[0] == steps):
            return
        self._told = steps, error
        end: dict[str, Any] = {"steps": steps, "reason": "finished"}
        if error is not None:
            interrupted = isinstance(error, KeyboardInterrupt)
            end["reason"] = "interrupted" if interrupted else "exception"
            end["exception"] = type(error).__name__
        self.tell("end", end)

    def _say(self, code: int) -> None:
        if self.marks is not None and self.marks in self.tape.watched:
            self.marks.entered(self.tape.here[PHASE])
        self.tape.log.extend((code, time.perf_counter_ns()))
        if self.tape.here[ONLINE]:
            self.drain()

    def _settle(self) -> None:
        """Work out whether hooks must call when an optimizer has stepped. In any thread: whatever
        changes the answer calls this afterwards."""
        here = self.tape.here
        here[ONLINE] = 0
        if self.windows.waits or usable(self._torch) or self.hooks.outermost.waits:
            here[ONLINE] = 1

    def _read_in_writer(self) -> None:
        """Read the tape in the writer's thread, unless the training thread is at it."""
        self._settle()
        if self._reading.acquire(blocking=False):
            try:
                self.reader.read(self.tape.take())
            finally:
                self._reading.release()

    def _emit(self, segment: Segment, micro: int, gap: int) -> None:
        windows, reader = self.windows, self.reader
        number = self.steps.count
        batch, memory, paused = reader.batch, reader.memory, reader.paused
        reader.memory, reader.paused = None, 0
        if batch is not None and batch[1] is not None:
            reader.batch = batch[0], None
        window = windows.during(segment.t, segment.end)
        self.writer.put(
            Found(
                number,
                segment.t,
                segment.end,
                segment.phases,
                micro,
                gap,
                window,
                paused,
                batch,
                memory,
                self._reading_of(segment.marks),
            )
        )
        if number == 0:
            self._first(micro)
        if segment.phases[BACKWARD] and not segment.phases[FORWARD] and not self.hooks.lifted:
            self.look_again()
        duration = segment.end - segment.t
        if not self.here():
            windows.note(window, duration)
        else:
            windows.step(number + 1, window, duration)
            self._settle()

    def _reading_of(self, marks: Any) -> Reading | None:
        if self.marks is None or not marks:
            return None
        return self.marks.ask(marks, len(self.tape.names))

    def _first(self, micro: int) -> None:
        """The first step has ended: this process does train."""
        if self.loaders.length is not None:
            self.windows.fit(self.loaders.length // micro)
        self._where()  # a window may open before the writer's thread has asked
        self.writer.open()
        self.oom.install()

    def _where(self) -> tuple[int, int]:
        """Rank and world size, asked once training has begun: before, the process may not know."""
        self.rank, self.world = rank_of(self._torch)
        self.windows.enabled = self.options.traces(self.rank) and not self.over
        self._settle()
        return self.rank, self.world

    def _shapes(self, index: int, shapes: list[list[int]], dtypes: list[str]) -> None:
        self.tell("shapes", {"index": index, "shapes": shapes, "dtypes": dtypes})

    def _describe(self, run: str) -> tuple[Manifest, Rank]:
        from advisor.recording import environment

        manifest = environment.manifest(asdict(self.options), self.entry, run)
        rank = environment.rank_info()
        rank.rank = self.rank
        return manifest, rank

    def _opened(self, folder: Path) -> None:
        self.windows.place(folder)
        self.oom.folder = folder
        if self.options.telemetry > 0 and not self.over:
            from advisor.recording.telemetry import Sampler

            self._sampler = Sampler(self.writer.put, hz=self.options.telemetry)
            self._sampler.start()

    def _failed(self, problem: str) -> None:
        """The writer's thread could not go on."""
        if self.problem is None:
            self.problem = problem
            log.warning("advisor: recording stopped, training goes on: %s", problem)
        self._stop_early()

    def _warn(self, error: BaseException) -> None:
        if self.problem is None:
            self.problem = f"{type(error).__name__}: {error}"
            log.warning("advisor: recording stopped, training goes on: %s", self.problem)
            self.tell("error", {"text": self.problem[:500]})

    def _stop_early(self) -> None:
        """Hooks pass through from now on; what was recorded stays."""
        self.tape.here[THREAD] = -1
        self.windows.enabled = False
        if self.writer.folder is None:
            self.windows.place(None)
        if self._sampler is not None and threading.current_thread().name != "advisor telemetry":
            self._sampler.stop()

    def _take_signal(self) -> None:
        name = self.options.signal
        number = getattr(signal, name, None) if name.startswith("SIG") else None
        if not name:
            return
        if number is None:
            log.warning("advisor: %r is no signal; none is taken", name)
            return
        try:
            if signal.getsignal(number) is not signal.SIG_DFL:
                log.warning("advisor: %s has a handler already; it is left alone", name)
                return
            signal.signal(number, lambda *_: self.want(f"{name} received", True))
            self._old_signal = number
        except (ValueError, OSError) as error:  # not the main thread, or not to be caught
            log.warning("advisor: %s cannot be taken: %s", name, error)

    def _give_signal_back(self) -> None:
        if self._old_signal is not None:
            try:
                signal.signal(self._old_signal, signal.SIG_DFL)
            except ValueError:
                return  # not the main thread
            self._old_signal = None


def rank_of(torch: Any) -> tuple[int, int]:
    """Number of this process among those that train together, and how many they are."""
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()), int(distributed.get_world_size())
    for rank, world in (
        ("RANK", "WORLD_SIZE"),
        ("SLURM_PROCID", "SLURM_NTASKS"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
    ):
        number, total = os.environ.get(rank, ""), os.environ.get(world, "")
        if number.isdecimal() and total.isdecimal():
            return int(number), int(total)
    return 0, 1


def _forked() -> None:
    """In a forked child: the recording is the parent's."""
    session, _Here.session = _Here.session, None
    if session is not None:
        session.tape.here[THREAD] = -1
        session.windows.forget()
        session.over = True
