"""Recording of one process: everything that listens, measures and writes, as one object.

There is at most one at a time (``current_session``). A failure in here ends the recording with one
warning; training goes on as if it had never been there."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from operator import sub
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from advisor.core.credentials import clean_value
from advisor.core.run_directory import MANIFEST, Event, Manifest, RankInfo
from advisor.recorder.framework_logs import CompileLogHandler, NetworkKeeper
from advisor.recorder.gradients import UnusedGradientFinder
from advisor.recorder.hooks import GENERATION, Hooks, Listener
from advisor.recorder.inference import InferenceStep, InferenceStepFinder
from advisor.recorder.loaders import Batches, Loaders
from advisor.recorder.module_lines import ModuleLines
from advisor.recorder.options import RecordOptions
from advisor.recorder.padding import TokenPadding
from advisor.recorder.repeated_inputs import RepeatedInputs
from advisor.recorder.repeated_steps import RepeatedBlock
from advisor.recorder.slowdown import GcPauseHook, SlowdownWatch
from advisor.recorder.stack_samples import StackSampler
from advisor.recorder.steps import RecordedStep, StepSegment
from advisor.recorder.tape import (
    ACT_ON_OPTIMIZER_STEP,
    BACKWARD,
    BATCH,
    BEGIN,
    BOUNDARY,
    BREAK_OFF,
    DATA,
    FETCH,
    FETCHED_INSIDE,
    FORWARD_OF,
    GENERATE,
    GENERATED,
    HAS_TRAINED,
    LEAVE,
    MAX_TAPE,
    MEMORY,
    OPTIMIZED,
    OPTIMIZER,
    PHASE,
    THREAD,
    Tape,
)
from advisor.recorder.tape_reader import TapeReader
from advisor.recorder.timed_window import TimedWindow
from advisor.recorder.watched_thread import WatchedThread
from advisor.recorder.watchers import (
    AllocatorStats,
    EventTimes,
    OutOfMemoryHook,
    PhaseEventTimer,
    TraceRanges,
    is_cuda_initialised,
    make_ranges,
)
from advisor.recorder.windows import Windows
from advisor.recorder.writer import NO_INFERENCE, NO_STEPS, Writer

log = logging.getLogger("advisor")

_T = TypeVar("_T")


MAX_MESSAGE = 500
MIN_FORWARDS = 10
"""Minimum number of forwards since the last backward or update in a loop that does not train."""
MOSTLY_FORWARDS = 2
"""Minimum ratio of those forwards to all backwards and updates."""
LITTLE_TRAINING = 10
"""Number of training steps from which the process counts as training, whatever follows."""
MAX_LOOKS = 3
"""Maximum number of searches for such a loop: alternating training and rollouts are training."""
MAX_TICKS = 64
"""Most optimizer steps or forwards of one step for which CUDA events are made."""
UNMARKED = (
    "advisor: no step was seen, but %d forwards were, which are no loop. To record it, say where"
    " its steps end: advisor.step(), or: for batch in advisor.record.steps(loader)"
)


class _ProcessState:
    """Recording state of the process: the session, and whether forks are watched."""

    session: RecordingSession | None = None
    watches_forks = False


def current_session() -> RecordingSession | None:
    """Return the recording that is active in this process; ``None`` if there is none."""
    return _ProcessState.session


class RecordingSession(Listener):
    """Recording of this process. ``entry``: ``decorator``, ``context``, ``command`` or
    ``callback``. With ``lazy`` the run directory is made when training starts, not at the start."""

    def __init__(self, options: RecordOptions, entry: str, *, lazy: bool = False) -> None:
        import torch

        self.options = options
        self.entry = entry
        self.owner: Any = None
        """The ``Recorder`` that began the session; ``None`` if something else did."""
        self.fork_session: Callable[[], RecordingSession | None] | None = None
        """Function that opens a session in a forked child that trains; ``None``: there is none."""
        self.problem: str | None = None
        """Reason why the recording stopped early; ``None`` if it did not."""
        self.tape = Tape()
        self.looping: list[Any] = []
        self.in_loop = False
        """True inside a loop whose iterations are steps (``Recorder.steps``)."""
        self.loaders = Loaders(self.write_event)
        self.reader = TapeReader(self.loaders, self._emit, self._emit_block)
        self.steps = self.reader.steps
        self.steps.on_regroup = self._begin_steps_anew
        self.inference = self._new_inference()
        self.reader.on_training = self._stop_inference
        self.reader.on_more_forwards = self._retry_inference
        self._looked_again = 0
        self.tape.hook_state[HAS_TRAINED] = 0
        self._generate: tuple[int, Any] | None = None
        """Frame (id, code) of the ``generate`` call that was running before it was wrapped."""
        self.batches = Batches(self._shapes)
        self.inspect_batch = self.batches.inspect_batch
        self.padding = TokenPadding(self.write_event)
        self.repeated_inputs = RepeatedInputs(self.write_event)
        self.module_lines = ModuleLines(self.write_event)
        self._pid = os.getpid()
        self.torch = torch
        self._lazy = lazy
        self.finished = False
        """True once the session has ended."""
        self.listening = False
        """True while the hooks are in place."""
        self._last_end: tuple[int, BaseException | None] = -1, None
        self._lock = threading.Lock()
        self._reading = threading.RLock()
        self.rank, self.world = rank_of(torch)
        self.hooks = Hooks(self)
        self.gradients = UnusedGradientFinder(self.tape.hook_state, self.write_event)
        self.pauses = GcPauseHook(self.tape, self.write_event)
        self.allocator = AllocatorStats(torch)
        self.event_timer: PhaseEventTimer | None = None
        if options.cuda_events:
            self.event_timer = PhaseEventTimer(
                self.tape, torch, options.cuda_events, self._count_ticks
            )
        self.windows = Windows(
            options,
            self.rank,
            lambda data: self.write_event("window", data),
            self.hooks,
            TraceRanges(self.tape),
            self._host_is_ahead,
        )
        self.oom = OutOfMemoryHook(
            lambda data: self.write_event("oom", data), options.memory_history
        )
        self.writer = self._new_writer()
        self.compile_log = CompileLogHandler(self.writer.put)
        self._sampler: Any = None
        self._stack_sampler: StackSampler | None = None
        self._network: NetworkKeeper | None = None
        self._old_signal: Any = None
        self._watched = WatchedThread(self)
        self._timed_window = TimedWindow(self) if entry == "command" else None

    def _new_writer(self) -> Writer:
        """Return the writer of this session's files, which calls back into it."""
        writer = Writer(
            out=self.options.out,
            rank=self._rank_and_world,
            names=self.tape.names,
            describe=self._describe,
            failed=self._failed,
        )
        writer.resolve = self.batches.resolve
        writer.on_open = self._opened
        writer.on_window_request = self.request_window
        writer.read = self._read_in_writer
        writer.host_is_ahead = self._host_is_ahead
        watches = self.options.on_trouble and self.windows.enabled
        writer.slowdown = SlowdownWatch() if watches else None
        return writer

    # -- life -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start recording, with the calling thread as the watched one."""
        _ProcessState.session = self
        if not _ProcessState.watches_forks:
            os.register_at_fork(after_in_child=_forked)
            _ProcessState.watches_forks = True
        made = make_ranges(self.tape) if self.options.nvtx else None
        if made is not None:
            self.tape.add_watcher(made)
        self.writer.start()
        if not self._lazy:
            self.writer.open()
        self._take_signal()
        if multiprocessing.parent_process() is not None:  # ends without atexit
            from multiprocessing import util

            util.Finalize(None, self.finish, exitpriority=100)
        self.listen()

    def listen(self) -> None:
        """Install the hooks; the calling thread becomes the watched one."""
        if self.listening or self.finished:
            return
        self.listening = True
        now = time.perf_counter_ns()
        self.reader.clock.start(now)
        self.steps.begun = now
        if self.reader.inference is not None:
            self.inference.start(now)
        self.tape.hook_state[PHASE] = 0
        self.hooks.install()
        self.gradients.install()
        self.windows.watch_other_profilers()
        self.pauses.install()
        if self.options.compile_log:
            self.compile_log.install()
        self.oom.install()  # a first step may be the one that does not fit
        self._update_optimizer_hooks()
        self._watched.begin()
        if self._timed_window is not None:
            self._timed_window.start()

    def pause(self, error: BaseException | None = None) -> None:
        """Remove the hooks and write what is on the tape; ``listen`` resumes."""
        if not self.listening:
            return
        self.listening = False
        self.tape.hook_state[THREAD] = -1
        self.hooks.remove()
        self.gradients.remove()
        self.pauses.remove()
        self.compile_log.remove()
        if self.event_timer is not None:
            self.event_timer.end()
        now = time.perf_counter_ns()
        with self._reading:
            self.reader.read(self.tape.take())
            self.steps.finish(now)
            self.steps.drop_step(now)
            if self.reader.inference is not None:
                self.inference.finish()
            if self.finished:
                self.windows.finish(self.recorded)
            else:
                self.windows.stop("recording was paused")
        self.windows.unwatch_profilers()
        if self.event_timer is not None:
            self.event_timer.answer()
        self._end(error)

    def on_exception(self, error: BaseException) -> None:
        """Record an exception that left the training, and pause: the program may go on."""
        try:
            self.oom.on_exception(error)
            self.pause(error)
        except Exception as problem:
            self.on_internal_error(problem)

    def on_watched_thread(self) -> bool:
        """Return whether the calling thread is the watched one."""
        return self.tape.hook_state[THREAD] == threading.get_ident()

    def progress(self) -> tuple[int, bool]:
        """Return the number of backwards and updates that the watched thread has made, and whether
        it has asked a loader for a batch."""
        with self._reading:  # what is on the tape or was read, but nothing between
            codes, finder = self.tape.log[::2], self.steps
            seen = finder.event_counts["backwards"] + finder.event_counts["optimized"]
            fetched = bool(finder.event_counts["fetched"]) or not finder.outside_loader
            passes = seen + codes.count(BACKWARD) + codes.count(OPTIMIZER)
            return passes, fetched or FETCH in codes

    def finish(self, error: BaseException | None = None) -> None:
        """End the recording and write what is left. Never raises; a second call does nothing."""
        with self._lock:
            if self.finished or os.getpid() != self._pid:
                return
            self.finished = True
        if _ProcessState.session is self:
            _ProcessState.session = None
        try:
            self._give_signal_back()
            if self._timed_window is not None:
                self._timed_window.stop()
            if error is not None:
                self.oom.on_exception(error)
            self.pause(error)
            self._keep_timed_window()
            self.oom.close()
            self.loaders.finish()
            if self._sampler is not None:
                self._sampler.stop()
            if self._stack_sampler is not None:
                self._stack_sampler.stop()
            if self._network is not None:
                self._network.stop()
            self._end(error)
            seen = not self.recorded and self.steps.forwards and self.problem is None
            if seen and self.entry != "command":  # the command says more, and once
                log.warning(UNMARKED, self.steps.forwards)
        except Exception as problem:
            self._warn(problem)
        self.writer.stop()

    @property
    def recorded(self) -> int:
        """Number of steps so far: of the training, else of a loop that does not train."""
        return self.steps.count or self.inference.count

    # -- what hooks call ------------------------------------------------------------------------

    def on_enter(self, phase: int) -> None:
        """Tell the watchers that a phase is about to begin."""
        try:
            for watcher in self.tape.watchers:
                watcher.on_enter(phase)
        except Exception as error:
            self.on_internal_error(error)

    def on_leave(self, phase: int) -> None:
        """Tell the watchers that a phase has ended and that ``phase`` continues."""
        try:
            for watcher in self.tape.watchers:
                watcher.on_leave(phase)
        except Exception as error:
            self.on_internal_error(error)

    def on_optimizer_step(self) -> None:
        """Sample memory and CUDA events after an optimizer step. Stops if the tape is too long."""
        try:
            counters = self.allocator.sample()
            if counters is not None:
                self.tape.log.extend((MEMORY, counters))
            if self.event_timer is not None and not self.steps.explicit:
                self.event_timer.on_tick()
            if len(self.tape.log) > MAX_TAPE:
                self.tape.log.clear()
                raise RuntimeError("the recorder's thread does not keep up")
        except Exception as error:
            self.on_internal_error(error)

    def on_forward_start(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Sample the inputs of an outermost forward: their padding, and whether it repeats one.
        Describe a model's layers once."""
        try:
            self.padding.on_forward(module, args, kwargs)
            trained = bool(self.tape.hook_state[HAS_TRAINED])
            self.repeated_inputs.on_forward(module, args, kwargs, trained=trained)
            self.module_lines.on_forward(module)
        except Exception as error:
            self.on_internal_error(error)

    def on_upload(self, tensor: Any) -> None:
        """Sample the padding in a tensor that is copied to a device."""
        try:
            self.padding.on_upload(tensor)
        except Exception as error:
            self.on_internal_error(error)

    def on_forward(self, module: Any, result: Any = None, *, replayed: bool = False) -> None:
        """Note an outermost forward that has ended, before any backward or update."""
        try:
            put = self.tape.log.extend
            if self._generate is not None:
                self._leave_generate(sys._getframe(2))
            elif GENERATION in sys.modules:
                self._hook_generate(sys._getframe(2))
            model = replayed or getattr(module, "_parameters", None)
            model = model or getattr(module, "_modules", None)
            put((FORWARD_OF, id(module) if model else -id(module)))
            if model and not replayed:
                self.gradients.add_module(module)
                self.repeated_inputs.on_end(module, result)
            self._on_inference_step()
        except Exception as error:
            self.on_internal_error(error)

    def on_generate_start(self) -> None:
        """End the ``generate`` call that ran before it was wrapped: another one begins."""
        if self._generate is not None:
            self._generate = None
            self.tape.log.extend((GENERATED, time.perf_counter_ns()))

    def on_generate_end(self) -> None:
        """Look for the end of an inference step after a call of ``generate``."""
        try:
            self._on_inference_step()
        except Exception as error:
            self.on_internal_error(error)

    def on_first_backward(self) -> None:
        """Note the first backward: steps of an inference loop found before it may be dropped."""
        self.tape.hook_state[HAS_TRAINED] = 1
        if self.inference.count and self.windows.enabled:
            self.windows.restarts = True
            self.tape.hook_state[ACT_ON_OPTIMIZER_STEP] = 1

    def on_forward_elsewhere(self, module: Any) -> bool:
        """Consider watching the calling thread instead: a model is called in it."""
        try:
            return os.getpid() == self._pid and self._watched.consider_forward(module)
        except Exception as error:
            self.on_internal_error(error)
            return False

    def on_other_thread(self, *, updates: bool) -> None:
        """Consider watching the calling thread instead: a backward or an optimizer step
        (``updates``) begins in it."""
        try:
            if os.getpid() != self._pid:
                self._record_in_child()
            else:
                self._watched.consider(updates)
        except Exception as error:
            self.on_internal_error(error)

    def read_tape(self) -> None:
        """Read the tape in the training thread, while a window is open or due."""
        if not self.windows.needs_step_ends or not self._reading.acquire(blocking=False):
            return  # the writer is at it; the next boundary will do
        try:
            self.reader.read(self.tape.take())
        except Exception as error:
            self.on_internal_error(error)
        finally:
            self._reading.release()

    def on_internal_error(self, error: BaseException) -> None:
        """Warn that the recorder failed, and stop recording."""
        self._warn(error)
        self._stop_early()

    # -- what the user says ---------------------------------------------------------------------

    def on_step_end(self) -> None:
        """End the current step, as the program says."""
        self._log_boundary(BOUNDARY)
        if self.event_timer is not None and self.steps.explicit:
            self.event_timer.on_tick()

    def begin_loop(self) -> None:
        """Begin a loop whose every iteration is a step."""
        self.in_loop = True
        self._log_boundary(BEGIN)

    def end_loop(self, *, broken_off: bool) -> None:
        """End such a loop; ``broken_off``: in the middle of an iteration, as far as is known."""
        self.in_loop = False
        if broken_off:
            self._log_boundary(BREAK_OFF)

    def enter(self, phase: int) -> int:
        """Begin a phase of the program's; return the phase that was open, for ``leave``."""
        tape = self.tape
        before = tape.hook_state[PHASE]
        if tape.watchers:
            self.on_enter(phase)
        tape.hook_state[PHASE] = phase
        tape.log.extend((phase, time.perf_counter_ns()))
        return before

    def leave(self, before: int) -> None:
        """End the phase that ``enter`` began; ``before`` is the phase that continues."""
        tape = self.tape
        tape.hook_state[PHASE] = before
        tape.log.extend((LEAVE, time.perf_counter_ns()))
        if tape.watchers:
            self.on_leave(before)

    def fetch(self, iterator: Iterator[_T]) -> _T:
        """Return the next item of any iterator; the wait is recorded as phase ``data``."""
        before = self.enter(DATA)
        self.looping.append(1)
        try:
            batch = next(iterator)
            if self.looping:  # no DataLoader, whose hook would have noted it
                self.tape.log.extend((FETCHED_INSIDE, time.perf_counter_ns()))
                self.tape.log.extend((BATCH, self.inspect_batch(batch)))
            return batch
        finally:
            self.looping.clear()
            self.leave(before)

    def count(self) -> int:
        """Return the number of steps so far, including one that is complete but has not ended."""
        with self._reading:
            self.reader.read(self.tape.take())
            return self.steps.count + self.steps.complete() or self.inference.count

    def request_window(self, reason: str, asked: bool) -> None:
        """Request a window at the next step boundary."""
        if asked:
            self.windows.requested_reason = reason
        else:
            self.windows.automatic_reason = reason
        self._update_optimizer_hooks()

    def write_event(self, kind: str, data: dict[str, Any]) -> None:
        self.writer.put(Event(t=time.perf_counter_ns(), kind=kind, data=data))

    # -- inside ---------------------------------------------------------------------------------

    def _on_inference_step(self) -> None:
        """Sample memory and CUDA events where an inference step may have ended."""
        tape = self.tape
        if len(tape.log) > MAX_TAPE:
            tape.log.clear()
            raise RuntimeError("the recorder's thread does not keep up")
        if tape.hook_state[ACT_ON_OPTIMIZER_STEP]:
            counters = self.allocator.sample()
            if counters is not None:
                tape.log.extend((MEMORY, counters))
            if self.event_timer is not None:
                self.event_timer.on_tick()
            self.read_tape()

    def _count_ticks(self) -> int:
        """Return the optimizer steps per training step, or the forwards per inference step."""
        steps = self.steps
        if steps.explicit:
            return 1
        count = steps.count or self.inference.count
        ticks = steps.event_counts["optimized"] if steps.count else steps.forwards
        return min(MAX_TICKS, -(-ticks // count)) if count else 1

    def _hook_generate(self, frame: FrameType | None) -> None:
        """Wrap ``generate`` if it was imported since the last look; note a call of it that is
        already running, by its frame."""
        if not self.hooks.hook_new_imports():
            return
        while frame is not None:
            code = frame.f_code
            if code.co_name == "generate" and frame.f_globals.get("__name__") == GENERATION:
                self._generate = id(frame), code
                self.tape.log.extend((GENERATE, time.perf_counter_ns()))
                return
            frame = frame.f_back

    def _leave_generate(self, frame: FrameType | None) -> None:
        """End the first ``generate`` call if its frame is no longer on the stack."""
        while frame is not None:
            if (id(frame), frame.f_code) == self._generate:
                return
            frame = frame.f_back
        self.on_generate_start()

    def _new_inference(self) -> InferenceStepFinder:
        result = InferenceStepFinder(
            self._emit_inferred,
            lambda: self.hooks.module_calls_suspended,
            self._restart_inference,
            splits_calls=not (self.options.stacks or self.options.deep),
        )
        self.reader.inference = result
        return result

    def _retry_inference(self, forwards: int) -> None:
        """Look for inference steps again after ``forwards`` forwards without a backward or update,
        if the training before was short: a trial, a warm-up, or a validation."""
        steps, windows = self.steps, self.windows
        learnt = steps.event_counts["backwards"] + steps.event_counts["optimized"]
        if forwards < max(MIN_FORWARDS, MOSTLY_FORWARDS * learnt):
            return
        little = steps.count < LITTLE_TRAINING and windows.first_due and not steps.explicit
        if not little or self._looked_again >= MAX_LOOKS:
            return
        self._looked_again += 1
        self.inference = self._new_inference()
        self.inference.start(self.reader.clock.last)
        self.tape.hook_state[HAS_TRAINED] = self.tape.hook_state[OPTIMIZED] = 0

    def _restart_inference(self, why: str) -> None:
        """Drop the inference steps found so far: others follow."""
        self.writer.put(NO_INFERENCE)
        if self.windows.enabled:
            self.windows.restart(why)

    def _stop_inference(self) -> None:
        """Stop looking for inference steps: the tape has a backward, an update or the like."""
        self.tape.hook_state[HAS_TRAINED] = 1
        self.windows.delimited_by_forward = False

    def _record_in_child(self) -> None:
        """Remove the hooks in a forked child that trains; record it by itself if ``anew`` can."""
        self.tape.hook_state[THREAD] = -1
        self.hooks.remove()
        self.gradients.remove()
        self.windows.unwatch_profilers()
        self.pauses.remove()
        if self.fork_session is not None:
            session = self.fork_session()
            if session is not None:
                atexit.register(session.finish)

    def _end(self, error: BaseException | None) -> None:
        """Write an ``end`` event, unless nothing changed since the last; recording may resume."""
        steps = self.recorded
        if (steps, error) == self._last_end or (error is None and self._last_end[0] == steps):
            return
        self._last_end = steps, error
        end: dict[str, Any] = {"steps": steps, "reason": "finished"}
        if error is not None:
            interrupted = isinstance(error, KeyboardInterrupt)
            end["reason"] = "interrupted" if interrupted else "exception"
            end["exception"] = type(error).__name__
            end["message"] = clean_value(str(error))[:MAX_MESSAGE]
        self.write_event("end", end)

    def _log_boundary(self, code: int) -> None:
        if self.event_timer is not None and self.event_timer in self.tape.watchers:
            self.event_timer.on_enter(self.tape.hook_state[PHASE])
        self.tape.log.extend((code, time.perf_counter_ns()))
        if self.tape.hook_state[ACT_ON_OPTIMIZER_STEP]:
            self.read_tape()

    def _update_optimizer_hooks(self) -> None:
        """Decide whether hooks report optimizer steps at once. Any thread may call it, after
        whatever changes the answer."""
        hook_state = self.tape.hook_state
        hook_state[ACT_ON_OPTIMIZER_STEP] = 0
        if self.windows.needs_step_ends or is_cuda_initialised(self.torch):
            hook_state[ACT_ON_OPTIMIZER_STEP] = 1

    def _read_in_writer(self) -> None:
        """Read the tape in the writer's thread, unless the training thread is at it."""
        self._update_optimizer_hooks()
        if self.listening:
            self.hooks.hook_new_imports()
        if self._reading.acquire(blocking=False):
            try:
                self.reader.read(self.tape.take(), aside=True)
            finally:
                self._reading.release()

    def _emit(self, segment: StepSegment, micro: int, gap: int) -> None:
        windows, reader = self.windows, self.reader
        number = self.steps.count
        if number == 0 and self.inference.count:  # what came before was a validation
            self.inference.count = 0
            self.writer.put(NO_INFERENCE)
            self.windows.restart("it lies before the training")
        memory, paused = reader.memory, reader.paused
        reader.memory, reader.paused = None, 0
        batch, self.steps.used = self.steps.used, []
        window = windows.window_of(segment.t, segment.end)
        exporting = window is None and windows.exporting(segment.t, segment.end)
        self.writer.put(
            RecordedStep(
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
                self._reading_of(segment.marks, segment.end - segment.t),
                exporting=exporting,
                unused_graphs=self.steps.unused_graphs,
            )
        )
        if number == 0:
            self._on_first_step(micro)
        duration = segment.end - segment.t
        slowed = window is not None or exporting
        if self.steps.is_backdated or not self.on_watched_thread():
            windows.add_step(slowed, duration)
        else:
            # without an optimizer, a step is known to have ended when the next one is nearly over
            windows.step(number + 1 + self.steps.is_undecided, slowed, duration)
            self._update_optimizer_hooks()

    def _begin_steps_anew(self) -> None:
        """Drop the training steps found so far: they were parts of longer steps."""
        self.writer.put(NO_STEPS)
        if self.windows.enabled:
            self.windows.restart("steps were found to be longer")

    def _emit_inferred(self, step: InferenceStep) -> None:
        windows, duration = self.windows, step.end - step.t
        window = windows.window_of(step.t, step.end)
        exporting = window is None and windows.exporting(step.t, step.end)
        self.writer.put(
            RecordedStep(step.n, step.t, step.end, step.phases, max(1, len(step.batches)), 0,
            window, step.gc, step.batches, step.memory, self._reading_of(step.marks, duration),
            trains=False, exporting=exporting, unused_graphs=step.graphs)
        )  # fmt: skip
        if step.n == 0:
            self._forget_training()
            self._on_first_step(1)
            windows.fit_to_forwards(step.forwards)
        windows.delimited_by_forward = step.delimited_by_forward
        slowed = window is not None or exporting
        if step.is_backdated or not self.on_watched_thread():
            windows.add_step(slowed, duration)
        else:
            windows.step(step.n + 1, slowed, duration)
            self._update_optimizer_hooks()

    def _forget_training(self) -> None:
        """Drop a short training's steps: a loop that does not train has begun after it."""
        if self._looked_again:
            if self.steps.count:
                self.writer.put(NO_STEPS)
                self.windows.restart("it lies before a loop that does not train")
            self.steps.forget()

    def _emit_block(self, block: RepeatedBlock) -> None:
        """Write steps that were read together; runs in the writer's thread."""
        windows = self.windows
        whole = block.begins[0], block.ends[-1]
        if windows.window_of(*whole) is None and not windows.exporting(*whole):
            self.writer.put(block)
            windows.add_steps(list(map(sub, block.ends, block.begins)))
            return
        for step in block.steps():
            window = windows.window_of(step.t, step.end)
            exporting = window is None and windows.exporting(step.t, step.end)
            self.writer.put(step._replace(window=window, exporting=exporting))
            windows.add_step(window is not None or exporting, step.end - step.t)

    def _reading_of(self, marks: Any, host_ns: int) -> EventTimes | None:
        if self.event_timer is None or not marks:
            return None
        return self.event_timer.ask(marks, len(self.tape.names), host_ns)

    def _host_is_ahead(self) -> bool:
        return self.event_timer is not None and self.event_timer.host_is_ahead

    def _on_first_step(self, micro: int) -> None:
        """Fit the windows to the loader, and open the run directory: this process trains."""
        if self.loaders.length is not None:
            self.windows.fit_to_loader(self.loaders.length // micro)
        self._rank_and_world()  # a window may open before the writer's thread has asked
        self.writer.open()
        self.oom.install()

    def _keep_timed_window(self) -> None:
        """Open the run directory for a window without steps, as there are none at the end, unless
        another process of the program has recorded some."""
        other = self.world == 1 and (Path(self.options.out) / MANIFEST).exists()
        timed = self._timed_window
        wanted = self.windows.has_timed and not self.recorded and self.problem is None
        if timed is not None and wanted and not other:
            self.writer.open()
            self.windows.keep_timed()
            for kind, data in timed.samples:
                self.write_event(kind, data)

    def _rank_and_world(self) -> tuple[int, int]:
        """Return rank and world size, asked once training has begun: before, they may be unset."""
        self.rank, self.world = rank_of(self.torch)
        self.windows.enabled = self.options.traces(self.rank) and not self.finished
        self._update_optimizer_hooks()
        return self.rank, self.world

    def _shapes(self, index: int, shapes: list[list[int]], dtypes: list[str]) -> None:
        self.write_event("shapes", {"index": index, "shapes": shapes, "dtypes": dtypes})

    def _describe(self, run: str) -> tuple[Manifest, RankInfo]:
        from advisor.recorder import environment

        manifest = environment.build_manifest(asdict(self.options), self.entry, run)
        rank = environment.rank_info()
        rank.rank = self.rank
        return manifest, rank

    def _opened(self, folder: Path) -> None:
        self.windows.set_folder(folder)
        self.oom.folder = folder
        if self.options.network and not self.finished:
            self._network = NetworkKeeper(folder)
            self._network.start()
        if self.options.telemetry > 0 and not self.finished:
            from advisor.recorder.telemetry import Sampler

            self._sampler = Sampler(self.writer.put, hz=self.options.telemetry)
            self._sampler.start()
        if self.options.stack_samples and not self.finished:
            watched = self.tape.hook_state
            self._stack_sampler = StackSampler(
                lambda: watched[THREAD],
                lambda: self.windows.profiling,
                self.write_event,
                self.padding.on_loss,
            )
            self._stack_sampler.start()

    def _failed(self, problem: str) -> None:
        """Stop recording because the writer's thread failed, and warn once."""
        if self.problem is None:
            self.problem = problem
            if self.windows.problem is None:  # else it was said of a trace
                log.warning("advisor: recording stopped, training goes on: %s", problem)
        self._stop_early()

    def _warn(self, error: BaseException) -> None:
        if self.problem is None:
            self.problem = f"{type(error).__name__}: {error}"
            log.warning("advisor: recording stopped, training goes on: %s", self.problem)
            self.write_event("error", {"text": self.problem[:500]})

    def _stop_early(self) -> None:
        """Stop hooks, samplers and windows; what was recorded so far is kept."""
        self.tape.hook_state[THREAD] = -1
        self.windows.enabled = False
        if self.writer.folder is None:
            self.windows.set_folder(None)
        if self._sampler is not None and threading.current_thread().name != "advisor telemetry":
            self._sampler.stop()
        if self._stack_sampler is not None:
            self._stack_sampler.stop()

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
            signal.signal(number, lambda *_: self.request_window(f"{name} received", True))
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
    """Return the process's rank and the world size: from torch, else the launcher; else (0, 1)."""
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
    """Detach the parent's recording in a forked child."""
    session, _ProcessState.session = _ProcessState.session, None
    if session is not None:
        session.tape.hook_state[THREAD] = -1
        session.windows.forget()
        session.finished = True
        session.tape.log.clear()
