"""Recording of one process: one object for all that listens, measures and writes.

There is at most one at a time (``current_session``). A failure in it ends the recording with one
warning, and training continues unaffected."""

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
    is_cuda_initialized,
    make_ranges,
)
from advisor.recorder.windows import Windows
from advisor.recorder.writer import NO_INFERENCE, NO_STEPS, Writer

log = logging.getLogger("advisor")

_T = TypeVar("_T")


_MAX_MESSAGE = 500
MIN_FORWARDS = 10
"""Minimum number of forwards since the last backward or update in a loop that does not train."""
_MIN_FORWARD_RATIO = 2
"""Minimum ratio of those forwards to all backwards and updates."""
MIN_TRAINING_STEPS = 10
"""Number of training steps from which the process counts as training, whatever follows."""
MAX_SEARCHES = 3
"""Maximum number of searches for such a loop: alternating training and rollouts are training."""
MAX_TICKS = 64
"""Maximum number of optimizer steps or forwards in a step for which CUDA events are made."""
NO_STEP_MESSAGE = (
    "advisor: no training step detected: only %d forward passes, not in a loop. To record one, mark"
    " where its steps end: advisor.step(), or: for batch in advisor.record.steps(loader)"
)


class _ProcessState:
    """Recording state of the process: its session, and whether forks are watched."""

    session: RecordingSession | None = None
    watches_forks = False


def current_session() -> RecordingSession | None:
    """Return the active recording of this process, or ``None`` if there is none."""
    return _ProcessState.session


class RecordingSession(Listener):
    """Recording of this process. ``entry``: ``decorator``, ``context``, ``command`` or
    ``callback``. With ``lazy``, the run directory is created only when training starts."""

    def __init__(self, options: RecordOptions, entry: str, *, lazy: bool = False) -> None:
        import torch

        self.options = options
        self.entry = entry
        self.owner: Any = None
        """The ``Recorder`` that began the session, or ``None`` if something else did."""
        self.fork_session: Callable[[], RecordingSession | None] | None = None
        """Function that opens a session in a forked child that trains, or ``None``."""
        self.problem: str | None = None
        """Reason why the recording stopped early, or ``None`` if it did not."""
        self.tape = Tape()
        self.looping: list[Any] = []
        self.in_loop = False
        """True inside a loop whose iterations are steps (``Recorder.steps``)."""
        self.loaders = Loaders(self.write_event)
        self.reader = TapeReader(self.loaders, self._emit_training_step, self._emit_block)
        self.steps = self.reader.steps
        self.steps.on_regroup = self._restart_steps
        self.inference = self._create_inference_finder()
        self.reader.on_training = self._stop_inference
        self.reader.on_more_forwards = self._retry_inference
        self._searches = 0
        self.tape.hook_state[HAS_TRAINED] = 0
        self._running_generate: tuple[int, Any] | None = None
        """Frame (id, code) of a ``generate`` call that was already running when it was wrapped."""
        self.batches = Batches(self._write_shapes)
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
        self._read_lock = threading.RLock()
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
            lambda number, log: self.write_event(
                "calls", {"window": number} | log.describe(self.module_lines.paths)
            ),
        )
        self.oom = OutOfMemoryHook(
            lambda data: self.write_event("oom", data), options.memory_history
        )
        self.writer = self._create_writer()
        self.compile_log = CompileLogHandler(self.writer.put)
        self._sampler: Any = None
        self._stack_sampler: StackSampler | None = None
        self._network: NetworkKeeper | None = None
        self._handled_signal: Any = None
        self._watched_thread = WatchedThread(self)
        self._timed_window = TimedWindow(self) if entry == "command" else None

    def _create_writer(self) -> Writer:
        """Return the writer of this session's files, which calls this session back."""
        writer = Writer(
            out=self.options.out,
            rank=self._update_rank_and_world,
            names=self.tape.names,
            describe=self._describe,
            failed=self._on_writer_failure,
        )
        writer.resolve = self.batches.resolve
        writer.on_open = self._on_open
        writer.on_window_request = self.request_window
        writer.read = self._read_in_writer
        writer.host_is_ahead = self._host_is_ahead
        watches_slowdown = self.options.on_trouble and self.windows.enabled
        writer.slowdown = SlowdownWatch() if watches_slowdown else None
        return writer

    # -- start and end --------------------------------------------------------------------------

    def start(self) -> None:
        """Start recording and watch the calling thread."""
        _ProcessState.session = self
        if not _ProcessState.watches_forks:
            os.register_at_fork(after_in_child=_detach_forked)
            _ProcessState.watches_forks = True
        ranges = make_ranges(self.tape) if self.options.nvtx else None
        if ranges is not None:
            self.tape.add_watcher(ranges)
        self.writer.start()
        if not self._lazy:
            self.writer.open()
        self._install_signal_handler()
        if multiprocessing.parent_process() is not None:  # ends without atexit handlers
            from multiprocessing import util

            util.Finalize(None, self.finish, exitpriority=100)
        self.listen()

    def listen(self) -> None:
        """Install the hooks and watch the calling thread."""
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
        self.oom.install()  # the first step may already run out of memory
        self._update_optimizer_hooks()
        self._watched_thread.begin()
        if self._timed_window is not None:
            self._timed_window.start()

    def pause(self, error: BaseException | None = None) -> None:
        """Remove the hooks and write what is on the tape. ``listen`` resumes the recording."""
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
        with self._read_lock:
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
        self._write_end(error)

    def on_exception(self, error: BaseException) -> None:
        """Record an exception that ended training, and pause: the program may continue."""
        try:
            self.oom.on_exception(error)
            self.pause(error)
        except Exception as problem:
            self.on_internal_error(problem)

    def on_watched_thread(self) -> bool:
        """Return whether the calling thread is the watched one."""
        return self.tape.hook_state[THREAD] == threading.get_ident()

    def progress(self) -> tuple[int, bool]:
        """Return the number of backwards and updates of the watched thread, and whether it has
        asked a loader for a batch."""
        with self._read_lock:  # so that each entry is either on the tape or fully read
            codes, finder = self.tape.log[::2], self.steps
            passes_read = finder.event_counts["backwards"] + finder.event_counts["optimized"]
            fetched = bool(finder.event_counts["fetched"]) or not finder.outside_loader
            passes_total = passes_read + codes.count(BACKWARD) + codes.count(OPTIMIZER)
            return passes_total, fetched or FETCH in codes

    def finish(self, error: BaseException | None = None) -> None:
        """End the recording and write what remains. Never raises; a second call does nothing."""
        with self._lock:
            if self.finished or os.getpid() != self._pid:
                return
            self.finished = True
        if _ProcessState.session is self:
            _ProcessState.session = None
        try:
            self._remove_signal_handler()
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
            self._write_end(error)
            is_unmarked = not self.recorded and self.steps.forwards and self.problem is None
            if is_unmarked and self.entry != "command":  # the command prints a longer message, once
                log.warning(NO_STEP_MESSAGE, self.steps.forwards)
        except Exception as problem:
            self._warn(problem)
        self.writer.stop()

    @property
    def recorded(self) -> int:
        """Number of training steps so far, or of inference steps if there are none."""
        return self.steps.count or self.inference.count

    # -- calls of the hooks ---------------------------------------------------------------------

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
        """Sample memory and CUDA events after an optimizer step. Stop if the tape is too long."""
        try:
            counters = self.allocator.sample()
            if counters is not None:
                self.tape.log.extend((MEMORY, counters))
            if self.event_timer is not None and not self.steps.explicit:
                self.event_timer.on_tick()
            if len(self.tape.log) > MAX_TAPE:
                self.tape.log.clear()
                raise RuntimeError("the recorder's thread cannot keep up")
        except Exception as error:
            self.on_internal_error(error)

    def on_forward_start(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Sample the inputs of an outermost forward: their padding, and whether they repeat earlier
        ones. Describe a model's layers once."""
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
        """Note an outermost forward that has ended before any backward or update."""
        try:
            put = self.tape.log.extend
            if self._running_generate is not None:
                self._leave_generate(sys._getframe(2))
            elif GENERATION in sys.modules:
                self._hook_generate(sys._getframe(2))
            has_weights = replayed or getattr(module, "_parameters", None)
            has_weights = has_weights or getattr(module, "_modules", None)
            put((FORWARD_OF, id(module) if has_weights else -id(module)))
            if has_weights and not replayed:
                self.gradients.add_module(module)
                self.repeated_inputs.on_end(module, result)
            self._on_inference_step()
        except Exception as error:
            self.on_internal_error(error)

    def on_generate_start(self) -> None:
        """End a ``generate`` call that ran before it was wrapped, because another one begins."""
        if self._running_generate is not None:
            self._running_generate = None
            self.tape.log.extend((GENERATED, time.perf_counter_ns()))

    def on_generate_end(self) -> None:
        """Check for the end of an inference step after a call of ``generate``."""
        try:
            self._on_inference_step()
        except Exception as error:
            self.on_internal_error(error)

    def on_first_backward(self) -> None:
        """Note the first backward, which may cause inference steps found before it to be
        dropped."""
        self.tape.hook_state[HAS_TRAINED] = 1
        if self.inference.count and self.windows.enabled:
            self.windows.restarts = True
            self.tape.hook_state[ACT_ON_OPTIMIZER_STEP] = 1

    def on_forward_elsewhere(self, module: Any) -> bool:
        """Consider watching the calling thread instead, because it calls a model."""
        try:
            return os.getpid() == self._pid and self._watched_thread.consider_forward(module)
        except Exception as error:
            self.on_internal_error(error)
            return False

    def consider_calling_thread(self, *, updates: bool) -> None:
        """Consider watching the calling thread instead, because it begins a backward or an
        optimizer step (``updates``)."""
        try:
            if os.getpid() != self._pid:
                self._record_in_child()
            else:
                self._watched_thread.consider(updates)
        except Exception as error:
            self.on_internal_error(error)

    def read_tape(self) -> None:
        """Read the tape in the training thread, while a window is open or due."""
        if not self.windows.needs_step_ends or not self._read_lock.acquire(blocking=False):
            return  # the writer is reading it; the next boundary is soon enough
        try:
            self.reader.read(self.tape.take())
        except Exception as error:
            self.on_internal_error(error)
        finally:
            self._read_lock.release()

    def on_internal_error(self, error: BaseException) -> None:
        """Warn that the recorder failed, and stop recording."""
        self._warn(error)
        self._stop_early()

    # -- calls of the program -------------------------------------------------------------------

    def on_step_end(self) -> None:
        """End the current step, because the program says so."""
        self._log_boundary(BOUNDARY)
        if self.event_timer is not None and self.steps.explicit:
            self.event_timer.on_tick()

    def begin_loop(self) -> None:
        """Begin a loop in which each iteration is a step."""
        self.in_loop = True
        self._log_boundary(BEGIN)

    def end_loop(self, *, broken_off: bool) -> None:
        """End the loop that ``begin_loop`` began. ``broken_off``: perhaps within an iteration."""
        self.in_loop = False
        if broken_off:
            self._log_boundary(BREAK_OFF)

    def enter(self, phase: int) -> int:
        """Begin a phase of the program. Return the phase that was open, for ``leave``."""
        tape = self.tape
        before = tape.hook_state[PHASE]
        if tape.watchers:
            self.on_enter(phase)
        tape.hook_state[PHASE] = phase
        tape.log.extend((phase, time.perf_counter_ns()))
        return before

    def leave(self, before: int) -> None:
        """End the phase that ``enter`` began. ``before`` is the phase that continues."""
        tape = self.tape
        tape.hook_state[PHASE] = before
        tape.log.extend((LEAVE, time.perf_counter_ns()))
        if tape.watchers:
            self.on_leave(before)

    def fetch(self, iterator: Iterator[_T]) -> _T:
        """Return the next item of an iterator. The wait is recorded as phase ``data``."""
        before = self.enter(DATA)
        self.looping.append(1)
        try:
            batch = next(iterator)
            if self.looping:  # not a DataLoader, whose hook would have noted the batch
                self.tape.log.extend((FETCHED_INSIDE, time.perf_counter_ns()))
                self.tape.log.extend((BATCH, self.inspect_batch(batch)))
            return batch
        finally:
            self.looping.clear()
            self.leave(before)

    def count(self) -> int:
        """Return the number of steps so far, including a complete one that has not ended yet."""
        with self._read_lock:
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

    # -- internals ------------------------------------------------------------------------------

    def _on_inference_step(self) -> None:
        """Sample memory and CUDA events, because an inference step may have ended."""
        tape = self.tape
        if len(tape.log) > MAX_TAPE:
            tape.log.clear()
            raise RuntimeError("the recorder's thread cannot keep up")
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
        """Wrap ``generate`` if it was imported since the last call. Note the frame of a call that
        is already running."""
        if not self.hooks.hook_new_imports():
            return
        while frame is not None:
            code = frame.f_code
            if code.co_name == "generate" and frame.f_globals.get("__name__") == GENERATION:
                self._running_generate = id(frame), code
                self.tape.log.extend((GENERATE, time.perf_counter_ns()))
                return
            frame = frame.f_back

    def _leave_generate(self, frame: FrameType | None) -> None:
        """End the noted ``generate`` call if its frame is no longer on the stack."""
        while frame is not None:
            if (id(frame), frame.f_code) == self._running_generate:
                return
            frame = frame.f_back
        self.on_generate_start()

    def _create_inference_finder(self) -> InferenceStepFinder:
        finder = InferenceStepFinder(
            self._emit_inference_step,
            lambda: self.hooks.module_calls_suspended,
            self._restart_inference,
            splits_calls=not (self.options.stacks or self.options.deep),
        )
        self.reader.inference = finder
        return finder

    def _retry_inference(self, forwards: int) -> None:
        """Search for inference steps again after ``forwards`` forwards without a backward or
        update, if the training before them was short: a test, a warm-up or a validation."""
        steps, windows = self.steps, self.windows
        passes = steps.event_counts["backwards"] + steps.event_counts["optimized"]
        if forwards < max(MIN_FORWARDS, _MIN_FORWARD_RATIO * passes):
            return
        is_short = steps.count < MIN_TRAINING_STEPS and windows.first_due and not steps.explicit
        if not is_short or self._searches >= MAX_SEARCHES:
            return
        self._searches += 1
        self.inference = self._create_inference_finder()
        self.inference.start(self.reader.clock.last)
        self.tape.hook_state[HAS_TRAINED] = self.tape.hook_state[OPTIMIZED] = 0

    def _restart_inference(self, why: str) -> None:
        """Drop the inference steps found so far, because different ones follow."""
        self.writer.put(NO_INFERENCE)
        if self.windows.enabled:
            self.windows.restart(why)

    def _stop_inference(self) -> None:
        """Stop the search for inference steps, because the tape shows training."""
        self.tape.hook_state[HAS_TRAINED] = 1
        self.windows.delimited_by_forward = False

    def _record_in_child(self) -> None:
        """Remove the hooks in a forked child that trains, and open a session of its own if
        possible."""
        self.tape.hook_state[THREAD] = -1
        self.hooks.remove()
        self.gradients.remove()
        self.windows.unwatch_profilers()
        self.pauses.remove()
        if self.fork_session is not None:
            session = self.fork_session()
            if session is not None:
                atexit.register(session.finish)

    def _write_end(self, error: BaseException | None) -> None:
        """Write an ``end`` event, unless nothing changed since the last: recording may resume."""
        steps = self.recorded
        if (steps, error) == self._last_end or (error is None and self._last_end[0] == steps):
            return
        self._last_end = steps, error
        end: dict[str, Any] = {"steps": steps, "reason": "finished"}
        if error is not None:
            interrupted = isinstance(error, KeyboardInterrupt)
            end["reason"] = "interrupted" if interrupted else "exception"
            end["exception"] = type(error).__name__
            end["message"] = clean_value(str(error))[:_MAX_MESSAGE]
        self.write_event("end", end)

    def _log_boundary(self, code: int) -> None:
        if self.event_timer is not None and self.event_timer in self.tape.watchers:
            self.event_timer.on_enter(self.tape.hook_state[PHASE])
        self.tape.log.extend((code, time.perf_counter_ns()))
        if self.tape.hook_state[ACT_ON_OPTIMIZER_STEP]:
            self.read_tape()

    def _update_optimizer_hooks(self) -> None:
        """Update whether hooks report optimizer steps at once. Any thread may call it, after any
        change that affects this."""
        hook_state = self.tape.hook_state
        hook_state[ACT_ON_OPTIMIZER_STEP] = 0
        if self.windows.needs_step_ends or is_cuda_initialized(self.torch):
            hook_state[ACT_ON_OPTIMIZER_STEP] = 1

    def _read_in_writer(self) -> None:
        """Read the tape in the writer's thread, unless the training thread is reading it."""
        self._update_optimizer_hooks()
        if self.listening:
            self.hooks.hook_new_imports()
        if self._read_lock.acquire(blocking=False):
            try:
                self.reader.read(self.tape.take(), aside=True)
            finally:
                self._read_lock.release()

    def _emit_training_step(self, segment: StepSegment, micro: int, gap: int) -> None:
        windows, reader = self.windows, self.reader
        number = self.steps.count
        if number == 0 and self.inference.count:  # the steps before were validation
            self.inference.count = 0
            self.writer.put(NO_INFERENCE)
            self.windows.restart("training began after it")
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
                self._ask_device_times(segment.marks, segment.end - segment.t),
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
            # without an optimizer, the end of a step is only known when the next one is nearly over
            windows.step(number + 1 + self.steps.is_undecided, slowed, duration)
            self._update_optimizer_hooks()

    def _restart_steps(self) -> None:
        """Drop the training steps found so far, which were parts of longer steps."""
        self.writer.put(NO_STEPS)
        if self.windows.enabled:
            self.windows.restart("steps were found to be longer")

    def _emit_inference_step(self, step: InferenceStep) -> None:
        windows, duration = self.windows, step.end - step.t
        window = windows.window_of(step.t, step.end)
        exporting = window is None and windows.exporting(step.t, step.end)
        self.writer.put(
            RecordedStep(step.n, step.t, step.end, step.phases, max(1, len(step.batches)), 0,
            window, step.gc, step.batches, step.memory,
            self._ask_device_times(step.marks, duration), trains=False, exporting=exporting,
            unused_graphs=step.graphs)
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
        """Drop the steps of a short training, because an inference loop has begun after it."""
        if self._searches:
            if self.steps.count:
                self.writer.put(NO_STEPS)
                self.windows.restart("a loop that does not train began after it")
            self.steps.forget()

    def _emit_block(self, block: RepeatedBlock) -> None:
        """Write steps that were read together. Runs in the writer's thread."""
        windows = self.windows
        span = block.starts[0], block.ends[-1]
        if windows.window_of(*span) is None and not windows.exporting(*span):
            self.writer.put(block)
            windows.add_steps(list(map(sub, block.ends, block.starts)))
            return
        for step in block.steps():
            window = windows.window_of(step.t, step.end)
            exporting = window is None and windows.exporting(step.t, step.end)
            self.writer.put(step._replace(window=window, exporting=exporting))
            windows.add_step(window is not None or exporting, step.end - step.t)

    def _ask_device_times(self, marks: Any, host_ns: int) -> EventTimes | None:
        if self.event_timer is None or not marks:
            return None
        return self.event_timer.ask(marks, len(self.tape.names), host_ns)

    def _host_is_ahead(self) -> bool:
        return self.event_timer is not None and self.event_timer.host_is_ahead

    def _on_first_step(self, micro: int) -> None:
        """Fit the windows to the loader and open the run directory, because this process trains."""
        if self.loaders.length is not None:
            self.windows.fit_to_loader(self.loaders.length // micro)
        self._update_rank_and_world()  # a window may open before the writer's thread asks for them
        self.writer.open()
        self.oom.install()

    def _keep_timed_window(self) -> None:
        """Open the run directory for a window without steps if the recording has no steps, unless
        another process of the program has recorded some."""
        others_recorded = self.world == 1 and (Path(self.options.out) / MANIFEST).exists()
        timed_window = self._timed_window
        is_wanted = self.windows.has_timed and not self.recorded and self.problem is None
        if timed_window is not None and is_wanted and not others_recorded:
            self.writer.open()
            self.windows.keep_timed()
            for kind, data in timed_window.samples:
                self.write_event(kind, data)

    def _update_rank_and_world(self) -> tuple[int, int]:
        """Return rank and world size, once training has begun: before, they may not be set."""
        self.rank, self.world = rank_of(self.torch)
        self.windows.enabled = self.options.traces(self.rank) and not self.finished
        self._update_optimizer_hooks()
        return self.rank, self.world

    def _write_shapes(self, index: int, shapes: list[list[int]], dtypes: list[str]) -> None:
        self.write_event("shapes", {"index": index, "shapes": shapes, "dtypes": dtypes})

    def _describe(self, run: str) -> tuple[Manifest, RankInfo]:
        from advisor.recorder import environment

        manifest = environment.build_manifest(asdict(self.options), self.entry, run)
        rank = environment.rank_info()
        rank.rank = self.rank
        return manifest, rank

    def _on_open(self, folder: Path) -> None:
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

    def _on_writer_failure(self, problem: str) -> None:
        """Stop recording because the writer's thread failed, and warn once."""
        if self.problem is None:
            self.problem = problem
            if self.windows.problem is None:  # else a warning about a trace was logged
                log.warning("advisor: recording stopped, training goes on: %s", problem)
        self._stop_early()

    def _warn(self, error: BaseException) -> None:
        if self.problem is None:
            self.problem = f"{type(error).__name__}: {error}"
            log.warning("advisor: recording stopped, training goes on: %s", self.problem)
            self.write_event("error", {"text": self.problem[:500]})

    def _stop_early(self) -> None:
        """Stop hooks, samplers and windows. What was recorded so far is kept."""
        self.tape.hook_state[THREAD] = -1
        self.windows.enabled = False
        if self.writer.folder is None:
            self.windows.set_folder(None)
        if self._sampler is not None and threading.current_thread().name != "advisor telemetry":
            self._sampler.stop()
        if self._stack_sampler is not None:
            self._stack_sampler.stop()

    def _install_signal_handler(self) -> None:
        name = self.options.signal
        number = getattr(signal, name, None) if name.startswith("SIG") else None
        if not name:
            return
        if number is None:
            log.warning("advisor: %r is not a signal name; no handler installed", name)
            return
        try:
            if signal.getsignal(number) is not signal.SIG_DFL:
                log.warning("advisor: %s already has a handler; it is not replaced", name)
                return
            signal.signal(number, lambda *_: self.request_window(f"{name} received", True))
            self._handled_signal = number
        except (ValueError, OSError) as error:  # not the main thread, or not catchable
            log.warning("advisor: cannot install a handler for %s: %s", name, error)

    def _remove_signal_handler(self) -> None:
        if self._handled_signal is not None:
            try:
                signal.signal(self._handled_signal, signal.SIG_DFL)
            except ValueError:
                return  # not the main thread
            self._handled_signal = None


def rank_of(torch: Any) -> tuple[int, int]:
    """Return the process's rank and the world size from torch or the launcher, else (0, 1)."""
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


def _detach_forked() -> None:
    """Detach the parent's recording in a forked child."""
    session, _ProcessState.session = _ProcessState.session, None
    if session is not None:
        session.tape.hook_state[THREAD] = -1
        session.windows.forget()
        session.finished = True
        session.tape.log.clear()
