"""Profiled windows: a torch profiler that lives for a few steps, and its trace on disk.

No profiler object exists outside a window (an idle one costs 39 µs per step). A window opens and
closes only at step boundaries in the training thread, at its outermost call depth (``call_depth``;
only ``_is_safe`` decides). A separate thread exports, compresses and renames the trace. Two
profilers crash a process, so no window opens while another profiler is active, and one that starts
during a window ends the window first. A profiler session that other code took over, or whose thread
has ended, cannot be stopped without a crash either, so it is never stopped."""

import errno
import functools
import gzip
import io
import logging
import shutil
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any
from weakref import WeakSet

from advisor.core.errors import AdvisorError
from advisor.core.files import scratch_folder
from advisor.core.run_directory import FAULT_NS, trace_name
from advisor.recorder.call_depth import is_outermost, is_undisturbed
from advisor.recorder.hooks import Hooks
from advisor.recorder.module_calls import CallLog
from advisor.recorder.modules import hide_from_warnings
from advisor.recorder.options import RecordOptions
from advisor.recorder.telemetry import (
    MemoryCounters,
    measure_page_fault,
    read_memory_counters,
)
from advisor.recorder.watchers import TraceRanges

log = logging.getLogger("advisor")

FIRST_WINDOW_STEP = 3
"""Number of steps before the first window if steps have many forwards."""
EARLY_NS = 2_000_000_000
"""Time until the first window, ns, from which it opens early."""
EARLY_STEPS = 2
"""Minimum number of steps before any window: the first step compiles and chooses algorithms."""
LONG_STEP_NS = 1_000_000_000
"""Minimum duration of a step, ns, for which a window needs no warm-up: the start is short."""
MANY_FORWARDS = 8
"""Number of forwards above which a step has many."""
MAX_FORWARDS = 64
"""Maximum number of forwards in a window whose steps have many."""
GUARD_STEPS = 3
"""Minimum number of profiled steps before the guard may stop a window. The first one includes the
start of the trace, and the median of three ignores it."""
GUARD_NS = 20_000_000
"""Minimum total slowdown of the profiled steps, ns: five short steps need no stop."""
COUNTED_FROM = 1
"""First step in which page faults may be counted: the one before sets up caches and optimizers."""
MIN_FAULTS, _MIN_FAULT_SHARE = 1_000, 0.08
"""Minimum number of page faults in a step, and share of its time, at which the first window waits:
it can end them, so enough steps before it must show how long the program's own steps are."""
MORE_STEPS = 20
"""Maximum number of steps that it waits for. They may take ``EARLY_NS``."""
BASELINE_STEPS = 32
"""Number of steps before a window that its steps are compared with."""
RETRY_STEPS = 20
"""Number of steps until the next try while another profiler is active."""
MAX_RETRIES = 5
MAX_UNSAFE = 12
"""Maximum number of tries, at growing intervals, at steps that end where no profiler may start."""
MAX_PAUSE = 256
"""Maximum interval between these tries, in steps."""
OTHER_PROFILER_WAIT_SECONDS = 1.0
"""Maximum time that a profiler in another thread waits for a window to end, s."""
EXPORT_SECONDS = 120.0
"""Maximum time that the end of a run waits for a trace to be written, s."""
FOLDER_SECONDS = 20.0
"""Maximum time that a trace waits for its folder, s: a short run can end before it exists."""

_OPERATOR = b'"cpu_op"'
"""Category of an operator in a trace."""

UNSAFE_REASON = "inside a backward, a hook or compiled code, where no profiler may start or stop"


class Windows:
    """Profiled windows of one rank. ``write_event(data)`` writes a ``window`` event, and
    ``write_calls(number, log)`` the module calls of a window.
    ``host_is_ahead`` returns whether the device lags so far behind that host times are useless."""

    def __init__(
        self,
        options: RecordOptions,
        rank: int,
        write_event: Callable[[dict[str, Any]], None],
        hooks: Hooks,
        ranges: TraceRanges,
        host_is_ahead: Callable[[], bool] = lambda: False,
        write_calls: Callable[[int, CallLog], None] = lambda number, log: None,
    ) -> None:
        self._write_calls = write_calls
        self._host_is_ahead = host_is_ahead
        self._options = options
        self._ranges = ranges
        self._stacks = options.stacks or options.deep
        self._hooks = hooks
        self._write_event = write_event
        self.enabled = options.traces(rank)
        self._folder: Path | None = None
        self._folder_set = threading.Event()
        self.automatic_reason: str | None = None
        """Reason to open a window at the next boundary, or ``None``. Any thread may set it."""
        self.requested_reason: str | None = None
        """Reason for a window that the user requested, or ``None``."""
        self._spans: list[list[int | None]] = []
        """Times at which each window opened, ended and had its trace written, ns."""
        self.first_step = options.skip
        """Step number from which the first window may open."""
        self._warmup = options.warmup
        self._active = options.active
        self.delimited_by_forward = False
        """True if only forwards show where steps end: recording Python stacks would hide them."""
        self.restarts = False
        """True if training may be about to begin."""
        self._dropped = -1
        """Number of the last window before the training; windows up to it are dropped."""
        self._profiler: Any = None
        self._steps: list[int] = []
        self._durations: list[int] = []
        self._unprofiled: deque[int] = deque(maxlen=BASELINE_STEPS)
        self._reason = ""
        self._number = -1
        self._automatic = self._requests = 0
        self._busy_tries = 0
        self._bytes = 0
        self._export: threading.Thread | None = None
        self._wrapped: list[tuple[str, Any]] = []
        self.problem: str | None = None
        """Reason why a trace could not be written, or ``None`` if none failed."""
        self._unsafe_tries = 0
        self._retry_interval = 1
        self._thread = -1
        """Identifier of the thread that opened the window."""
        self._end_reason: str | None = None
        """Reason to end the window at the next step, or ``None`` if it continues."""
        self._end_event = threading.Event()
        self._lost_profilers: list[Any] = []
        """Profilers that cannot be stopped. They are kept alive: freeing one would stop it."""
        self.timed = False
        """True if the current or last window has a fixed duration, because no step was seen."""
        self._timed_trace: tuple[bytes, dict[str, Any]] | None = None
        """Compressed trace of a timed window and its event, kept until the end of the run."""
        self._more_steps = MORE_STEPS
        """Maximum number of steps that the first window waits for because of page faults."""
        self._counted_from = COUNTED_FROM
        """First step in which page faults are counted. The first steps may be known only later."""
        self._counters_before: MemoryCounters | None = None
        """Counters at the begin of the step from which page faults are counted, or ``None``."""
        self._other_profilers: WeakSet[Any] = WeakSet()
        """Active profilers of the program, including those that are warming up."""
        self._stack_profilers: WeakSet[Any] = WeakSet()
        """Active profilers of the program that record Python stacks."""

    def set_folder(self, folder: Path | None) -> None:
        """Set the folder for traces, or ``None`` if there will be none. Any thread may call it."""
        self._folder = folder
        self._folder_set.set()

    def fit_to_loader(self, length: int | None) -> None:
        """Open the first window earlier if a loader has few batches (``length``)."""
        total = self.first_step + self._warmup + self._active
        if not self.first_due or length is None:
            return
        self._more_steps = min(MORE_STEPS, max(0, length - total - 1))
        if length >= total + 1:
            return
        spare = max(0, length - self._active - 1)
        self._warmup = min(self._warmup, max(1, spare // 2))
        self.first_step = max(1, min(self.first_step, spare - self._warmup))

    def fit_to_forwards(self, forwards: int) -> None:
        """Shorten windows if a step has many forwards (``generate``): a few such steps make a long
        trace, and the run may have only a few."""
        if forwards > MANY_FORWARDS:
            self.first_step, self._warmup = (
                min(self.first_step, FIRST_WINDOW_STEP),
                min(self._warmup, 1),
            )
        self._active = max(1, min(self._active, MAX_FORWARDS // max(1, forwards)))

    def restart(self, why: str) -> None:
        """Drop all windows so far, because training begins after them."""
        self._dropped = self._number
        for number in range(self._number + 1):
            if self._folder is not None:
                (self._folder / trace_name(number)).unlink(missing_ok=True)
            self._write_event({"window": number, "state": "dropped", "why": why})
        if self._profiler is not None:
            self._end_reason = why
        options = self._options
        self.first_step, self._warmup, self._active = options.skip, options.warmup, options.active
        self._automatic = self._requests = self._bytes = self._busy_tries = 0
        self.delimited_by_forward = self.restarts = False
        self.automatic_reason = None
        self._counters_before = None
        self._unprofiled.clear()

    @property
    def first_due(self) -> bool:
        """True while no window has been opened."""
        return self._number <= self._dropped

    def window_of(self, start: int, end: int) -> int | None:
        """Return the number of the window that was open during a step, or ``None`` if none was."""
        return self._find_window(start, end, 1)

    def exporting(self, start: int, end: int) -> bool:
        """Return whether a window's trace was being written during a step."""
        return self._find_window(start, end, 2) is not None

    def _find_window(self, start: int, end: int, until: int) -> int | None:
        for number, span in reversed([*enumerate(self._spans)]):
            opened, closed = span[0], span[until]
            if opened is not None and end > opened and (closed is None or start < closed):
                return number
        return None

    def add_step(self, slowed: bool, dur: int) -> None:
        """Add the duration of a step, ns, that was read too late to open a window after it.
        ``slowed``: whether a window or the writing of a trace slowed it down."""
        if self.timed:
            self._leave_timed()
        if not slowed:
            self._unprofiled.append(dur)

    def add_steps(self, lengths: list[int]) -> None:
        """Add the durations of steps outside windows, ns."""
        self._unprofiled.extend(lengths[-BASELINE_STEPS:])

    @property
    def profiling(self) -> bool:
        """True while a window is open."""
        return self._profiler is not None

    @property
    def needs_step_ends(self) -> bool:
        """True if step ends must be reported at once: a window is open, due or to be dropped."""
        if self._profiler is not None or self.restarts or self.timed:
            return True
        wanted = (
            self.first_due or self.requested_reason is not None or self.automatic_reason is not None
        )
        return self.enabled and wanted

    def step(self, number: int, slowed: bool, dur: int) -> None:
        """Open, advance or close a window, because a step has just ended and ``number`` begins."""
        if self.timed:
            self._leave_timed()
        if self._profiler is not None:
            if self._is_safe():
                self._advance_window(number, dur)
            elif self._end_reason is None:
                self._end_reason = f"step {number - 1} ended {UNSAFE_REASON}"
        else:
            self.add_step(slowed, dur)
            if number >= COUNTED_FROM and self.first_due and self._counters_before is None:
                self._counted_from, self._counters_before = number, read_memory_counters()
            first = self.first_due and self._is_first_due(number, dur)
            if self.enabled and (
                first or self.requested_reason is not None or self.automatic_reason is not None
            ):
                self._open_if_due(number)

    def finish(self, number: int) -> None:
        """End the open window at the end of the recording, and wait for its trace."""
        if self._profiler is not None:
            if not self._is_stoppable():
                self._give_up_profiler("the run ended outside the thread that opened the window")
            elif self._steps[self._warmup :] or self.timed:
                self._close_window("done", "the run ended first")
            else:
                self._drop_window("never", "the run ended before a step was profiled")
        elif self._unsafe_tries and self.first_due:
            self._warn_unsafe()
        elif self.enabled and self.first_due and number:
            steps = f"{number} step{'s' * (number != 1)}"
            why = f"the run has {steps}; the first window opens after {self.first_step}"
            if number > self.first_step:
                why = f"where {'a step' if number == 1 else 'the steps'} ended was only known later"
            self._write_event(
                {"window": self._number + 1, "reason": "schedule", "state": "never", "why": why}
            )
        export = self._export
        if export is not None:
            export.join(EXPORT_SECONDS)

    def open_timed(self) -> None:
        """Open a window although no step was seen, if a profiler may start now."""
        import torch

        if self.enabled and self.first_due and not self._other_profilers and is_outermost(torch):
            self.timed = True
            self._open_window(torch, "no step was seen", 0)

    def close_timed(self) -> None:
        """Close the timed window, if its profiler may stop now."""
        if self.timed and self._profiler is not None and self._is_safe():
            self._close_window("done", None)

    def _leave_timed(self) -> None:
        """Drop the timed window, because a step was seen after all. If it is still open, end it as
        soon as possible."""
        if self._number > self._dropped:
            self.restart("a step was seen after it")
        if self._profiler is None:
            self.timed = False

    @property
    def has_timed(self) -> bool:
        """True if a timed window has a trace to keep."""
        return self._timed_trace is not None and not self.first_due

    def keep_timed(self) -> None:
        """Write the timed window's trace to the run directory, which is being created."""
        if (
            self._timed_trace is None
            or not self._folder_set.wait(FOLDER_SECONDS)
            or self._folder is None
        ):
            return
        data, event = self._timed_trace
        part = self._folder / f".{event['file']}"
        part.write_bytes(data)
        part.replace(self._folder / event["file"])
        self._write_event(event)

    def forget(self) -> None:
        """Drop the profiler and the export in a forked child: they belong to the parent."""
        self._profiler = None
        self._export = None
        self.enabled = False

    def stop(self, why: str) -> None:
        """Stop the profiler now, for example because another one starts."""
        if self._profiler is not None:
            if not self._is_stoppable():
                self._give_up_profiler(why)
            elif self._steps[self._warmup :]:
                self._close_window("stopped", why)
            else:
                self._drop_window("stopped", why)

    # -- opening --------------------------------------------------------------------------------

    def _is_first_due(self, number: int, dur: int) -> bool:
        """Return whether the first window may open before step ``number``, after a step of ``dur``
        ns. If steps are long, it opens early, unless the user set ``skip`` or steps end where no
        window can open."""
        waiting_ns = max(0, self.first_step - number) * dur
        is_early = (
            number >= EARLY_STEPS
            and waiting_ns >= EARLY_NS
            and not (self._unsafe_tries or self._busy_tries)
        )
        is_early = is_early and self._options.skip == RecordOptions.skip
        if number < self.first_step and not is_early:
            return False
        if self._awaits_steps(number, dur):
            return False
        if self._options.warmup == RecordOptions.warmup and (is_early or dur >= LONG_STEP_NS):
            self._warmup = 0 if dur >= LONG_STEP_NS else min(self._warmup, 1)
        return True

    def _awaits_steps(self, number: int, dur: int) -> bool:
        """Return whether page faults take so much of steps of ``dur`` ns before step ``number``
        that the window waits for more of them. Long steps cannot wait, nor can a short run."""
        before, options = self._counters_before, self._options
        if before is None or dur >= LONG_STEP_NS or self.first_step != RecordOptions.skip:
            return False
        if number >= options.skip + min(self._more_steps, EARLY_NS // max(1, dur)):
            return False
        now, steps = read_memory_counters(), max(1, number - self._counted_from)
        faults = 0 if now is None else now.minor_faults - before.minor_faults
        usual = min(dur, median(self._unprofiled or [dur]))  # a long step does not count
        return faults >= max(MIN_FAULTS, _MIN_FAULT_SHARE * usual / FAULT_NS) * steps

    def _open_if_due(self, number: int) -> None:
        options = self._options
        if self._export is not None:
            return
        is_requested = self.requested_reason is not None
        reason = self.requested_reason or self.automatic_reason or "schedule"
        self.requested_reason = self.automatic_reason = None
        count, max_count = (self._requests if is_requested else self._automatic), options.windows
        if count >= max_count or self._bytes >= options.max_bytes:
            if is_requested:
                why = f"{count} of {max_count} windows used, {self._bytes >> 20} MiB written"
                self._write_event({"reason": reason, "state": "never", "why": why})
            return
        import torch

        other_is_active = bool(self._other_profilers) or torch.autograd._profiler_enabled()
        if not other_is_active and not is_outermost(torch):
            self._postpone(number, reason, is_requested)
            return
        if other_is_active:
            self._busy_tries += 1
            if self._busy_tries <= MAX_RETRIES:
                self.first_step = number + RETRY_STEPS
            if self._busy_tries == 1:
                why = "another profiler is active"
                self._write_event({"reason": reason, "state": "never", "why": why})
            return
        self._requests += is_requested
        self._automatic += not is_requested
        self._open_window(torch, reason, number)

    def _open_window(self, torch: Any, reason: str, number: int) -> None:
        self._number += 1
        self._reason = reason
        self._steps = []
        self._durations = []
        options = self._options
        faults = self._count_faults_so_far(number)
        self._stacks = (options.stacks or options.deep) and not self.delimited_by_forward
        if not self._stacks:
            options = options.with_changes(
                stacks=False, deep=False, memory=options.memory or options.deep
            )
        profiler = make_profiler(torch, options, None if self.timed else number + self._warmup)
        if hasattr(profiler, "step_num"):
            profiler.step_num = number  # so that ProfilerStep#n is our step n
        if self._stacks:
            self._hooks.suspend_module_calls()
        self._spans.append([perf_counter_ns(), None, None])
        self._thread = threading.get_ident()
        self._end_reason = None
        self._end_event.clear()
        self._profiler = profiler
        profiler.start()
        self._ranges.begin()
        self._log_module_calls()
        event = {"window": self._number, "reason": reason, "state": "open", "steps": [number]}
        self._write_event(event | faults)

    def _count_faults_so_far(self, number: int) -> dict[str, Any]:
        """Return the fields of the event of the first window, before step ``number``, about page
        faults. The window may end them: the C library raises its limits when the profiler frees
        large blocks."""
        before, self._counters_before = self._counters_before, None
        now = None if before is None else read_memory_counters()
        if before is None or now is None or number <= self._counted_from:
            return {}
        faults = now.minor_faults - before.minor_faults
        result = {
            "fault_steps": [self._counted_from, number - 1],
            "minor_faults": faults,
            "memory_growth": now.max_resident - before.max_resident,
        }
        if faults >= MIN_FAULTS * (number - self._counted_from):
            result["fault_ns"] = measure_page_fault()
        return result

    def _postpone(self, number: int, reason: str, is_requested: bool) -> None:
        """Retry later, at growing intervals, because this step ended where no profiler may start.
        Keep the request for a window that the user asked for."""
        self._unsafe_tries += 1
        self._retry_interval = min(2 * self._retry_interval, MAX_PAUSE)
        if self.first_due:
            self.first_step = number + self._retry_interval
        if self._unsafe_tries >= MAX_UNSAFE:
            self._warn_unsafe()
            self.enabled = False
        elif is_requested:
            self.requested_reason = reason
        elif not self.first_due:
            self.automatic_reason = reason

    def _warn_unsafe(self) -> None:
        why = f"every step that was tried ended {UNSAFE_REASON}"
        self._write_event(
            {"window": self._number + 1, "reason": "schedule", "state": "never", "why": why}
        )

    # -- while a window is open -----------------------------------------------------------------

    def _is_safe(self) -> bool:
        """Return whether the profiler may be called now."""
        import torch

        return self._is_in_thread() and is_outermost(torch, profiled=self._is_recording())

    def _is_stoppable(self) -> bool:
        """Return whether the profiler can be stopped without a crash."""
        import torch

        return self._is_in_thread() and is_undisturbed(torch, profiled=self._is_recording())

    def _is_in_thread(self) -> bool:
        return threading.get_ident() == self._thread

    def _is_recording(self) -> bool:
        """Return whether the profiler records. During its warm-up, torch reports no active
        profiler."""
        return getattr(self._profiler.current_action, "name", "").startswith("RECORD")

    def _advance_window(self, number: int, dur: int) -> None:
        if self._end_reason is not None:
            self.stop(self._end_reason)
            return
        self._steps.append(number - 1)
        active = len(self._steps) - self._warmup
        if active > 0:
            self._durations.append(dur)
            if active >= self._active:
                self._close_window("done", None)
                return
            slow = self._explain_slowdown()
            if slow:
                self._close_window("stopped", slow)
                return
        self._profiler.step()
        self._log_module_calls()

    def _log_module_calls(self) -> None:
        """Log the calls of modules from the first step that is kept. Stacks would show them."""
        if not self._stacks and (self.timed or len(self._steps) >= self._warmup):
            self._hooks.log_module_calls()

    def _explain_slowdown(self) -> str | None:
        if len(self._unprofiled) < GUARD_STEPS or len(self._durations) < GUARD_STEPS:
            return None
        if self._host_is_ahead():
            return None
        usual_ns, profiled_ns = median(self._unprofiled), median(self._durations)
        lost_ns = len(self._durations) * (profiled_ns - usual_ns)
        if profiled_ns > usual_ns * self._options.guard and lost_ns > GUARD_NS:
            return f"profiled steps take {profiled_ns / usual_ns:.1f} times as long"
        return None

    def watch_other_profilers(self) -> None:
        """Wrap torch's profiler to end a window before another profiler starts."""
        from torch.autograd.profiler import profile

        def guard(original: Any) -> Any:
            @functools.wraps(original)
            def call(other: Any, *args: Any, **kwargs: Any) -> Any:
                own_profiler = self._profiler
                if own_profiler is None or other is not getattr(own_profiler, "profiler", None):
                    self._suspend_for_profiler(other)
                return original(other, *args, **kwargs)

            return call

        for name in ("__enter__", "_prepare_trace", "_start_trace"):
            original = getattr(profile, name, None)
            if original is not None:
                setattr(profile, name, guard(original))
                self._wrapped.append((name, original))
        original_exit = profile.__exit__

        @functools.wraps(original_exit)
        def leave(other: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original_exit(other, *args, **kwargs)
            finally:
                self._resume_after_profiler(other)

        profile.__exit__ = leave
        self._wrapped.append(("__exit__", original_exit))

    def unwatch_profilers(self) -> None:
        """Restore the methods of ``torch.autograd.profiler.profile``."""
        if self._wrapped:
            from torch.autograd.profiler import profile

            for name, original in self._wrapped:
                setattr(profile, name, original)
            self._wrapped.clear()

    def _suspend_for_profiler(self, other: Any) -> None:
        try:
            why = "another profiler was started"
            if self._profiler is not None and not self._is_in_thread():
                self._end_reason = why
                self._end_event.wait(OTHER_PROFILER_WAIT_SECONDS)
            self.stop(why)
            self._other_profilers.add(other)
            if getattr(other, "with_stack", True) or getattr(other, "with_modules", True):
                self._stack_profilers.add(other)
                self._hooks.suspend_module_calls()
        except Exception as error:  # called inside torch, in the user's code
            log.warning("advisor: the window was not ended: %s", error)

    def _resume_after_profiler(self, other: Any) -> None:
        self._other_profilers.discard(other)
        if other in self._stack_profilers:
            self._stack_profilers.discard(other)
            self._resume_module_calls()

    def _resume_module_calls(self) -> None:
        if not self._stack_profilers and not (self._stacks and self._profiler is not None):
            self._hooks.resume_module_calls()

    # -- closing --------------------------------------------------------------------------------

    def _give_up_profiler(self, why: str) -> None:
        """Give up a profiler whose session was taken over or is unreachable: stopping it
        crashes."""
        self._lost_profilers.append(self._profiler)
        self._profiler = None
        self._hooks.take_call_log()
        self.enabled = False
        self._end_event.set()
        self._end_span()
        self._write_end("stopped", why)

    def _stop_profiler(self) -> tuple[Any, CallLog | None]:
        """Stop the profiler and return it, with what it recorded, and the log of module calls."""
        profiler, self._profiler = self._profiler, None
        call_log = self._hooks.take_call_log()
        self._ranges.end()
        profiler.stop()
        self._spans[-1][1] = perf_counter_ns()
        self._end_event.set()
        if self._stacks:
            self._resume_module_calls()
        return profiler, call_log

    def _end_span(self) -> None:
        """Mark the end of the window's effect on step times."""
        span, now = self._spans[-1], perf_counter_ns()
        span[1:] = now if span[1] is None else span[1], now

    def _drop_window(self, state: str, why: str) -> None:
        self._stop_profiler()
        self._end_span()
        self._write_end(state, why)

    def _write_end(self, state: str, why: str) -> None:
        """Write the event of a window without a trace."""
        self._write_event(
            {"window": self._number, "reason": self._reason, "state": state, "why": why}
        )

    def _close_window(self, state: str, why: str | None) -> None:
        if self._number <= self._dropped:
            self._stop_profiler()
            self._end_span()
            return
        kept_steps = self._steps[self._warmup :]
        event: dict[str, Any] = {"window": self._number, "reason": self._reason, "state": state}
        event |= {"steps": [kept_steps[0], kept_steps[-1]]} if kept_steps else {}
        event |= {"why": why} if why else {}
        profiler, call_log = self._stop_profiler()
        # not a daemon: the interpreter waits at exit until the trace is written
        self._export = threading.Thread(
            target=self._keep_in_memory if self.timed else self._write_trace,
            args=(profiler, event, call_log),
            name="advisor trace",
        )
        self._export.start()

    def _write_trace(self, profiler: Any, event: dict[str, Any], call_log: CallLog | None) -> None:
        number = event["window"]
        try:
            self._folder_set.wait(FOLDER_SECONDS)
            if self._folder is None:
                raise RuntimeError("there is no folder for the trace")
            size = write_trace(profiler, self._folder, number)
            self._bytes += size
            event["file"] = trace_name(number)
            if number <= self._dropped:
                (self._folder / trace_name(number)).unlink(missing_ok=True)
                event["state"] = "dropped"
            elif call_log is not None:
                self._write_calls(number, call_log)
        except (OSError, RuntimeError, AssertionError, ValueError) as error:
            event["state"] = "failed"
            event["why"] = f"{type(error).__name__}: {error}"[:300]
            if isinstance(error, OSError):
                self.enabled = False
                self.problem = error.strerror or str(error)
            log.warning(
                "advisor: the trace of window %d was not written: %s", number, self.problem or error
            )
        self._write_event(event)
        self._end_span()
        self._export = None

    def _keep_in_memory(self, profiler: Any, event: dict[str, Any], _: CallLog | None) -> None:
        """Keep the trace of a window without steps in memory: steps may follow, or another process
        may be the one that trains. Drop a trace without operators."""
        name = event["file"] = trace_name(event["window"])
        try:
            with scratch_folder() as folder:
                write_trace(profiler, folder, event["window"])
                data = (folder / name).read_bytes()
            with gzip.open(io.BytesIO(data)) as file:
                while (part := file.read(1 << 20)) and _OPERATOR not in part:
                    continue
            self._timed_trace = (data, event) if part else None
        except (OSError, RuntimeError, AssertionError, ValueError, AdvisorError) as error:
            log.debug("advisor: the trace of a window without steps was not kept: %s", error)
        self._end_span()
        self._export = None


def make_profiler(torch: Any, options: RecordOptions, first: int | None) -> Any:
    """Return a profiler that keeps steps from ``first`` on, or one without steps for ``None``.
    Leave out options that this torch does not have."""
    from torch.profiler import ProfilerAction, ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        activities.append(ProfilerActivity.CUDA)

    def choose_action(step: int) -> Any:
        return ProfilerAction.WARMUP if step < (first or 0) else ProfilerAction.RECORD

    return profile(
        activities=activities,
        schedule=None if first is None else choose_action,
        record_shapes=options.shapes,
        with_stack=options.stacks or options.deep,
        profile_memory=options.memory or options.deep,
        experimental_config=_make_experimental_config(options),
    )


def _make_experimental_config(options: RecordOptions) -> Any:
    """Return the experimental profiler settings of this torch, or ``None`` if it has none."""
    try:
        from torch._C._profiler import _ExperimentalConfig
    except ImportError:
        return None
    # sync events show which stream waits for which
    settings: dict[str, Any] = {"enable_cuda_sync_events": True}
    if options.stacks or options.deep:
        settings["verbose"] = True
    else:
        settings["trace_only"] = True  # parses nothing in this process, but stacks need that
    supported: dict[str, Any] = {}
    for name, value in settings.items():
        try:
            _ExperimentalConfig(**{name: value})
        except TypeError:
            continue
        supported[name] = value
    return _ExperimentalConfig(**supported)


def write_trace(profiler: Any, folder: Path, window: int) -> int:
    """Export and compress the trace, rename it once complete, and return its size in bytes.

    torch's own compression uses level 9 and holds the interpreter's lock."""
    plain = folder / f".{trace_name(window)}.json"
    torch_file = plain.with_name(f"{plain.name}.tmp")
    compressed = folder / f".{trace_name(window)}"
    try:
        profiler.export_chrome_trace(str(plain))
        if not plain.exists():  # torch reports that only on stderr
            raise OSError(errno.ENOSPC, "disk full, or the trace exceeds the limit on file size")
        with plain.open("rb") as source, gzip.open(compressed, "wb", compresslevel=1) as target:
            shutil.copyfileobj(source, target, 1 << 20)
        size = compressed.stat().st_size
        compressed.replace(folder / trace_name(window))
        return size
    finally:
        for file in (plain, torch_file, compressed):
            file.unlink(missing_ok=True)


hide_from_warnings(globals())
