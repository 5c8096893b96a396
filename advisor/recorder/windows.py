"""Profiled windows: a torch profiler that lives for a few steps, and its trace on disk.

No profiler object exists outside a window (an idle one costs 39 µs per step). It is opened and
closed at step boundaries in the training thread, at its outermost call depth (``call_depth``;
``_safe`` is the one place that decides), and nowhere else. The trace is exported, compressed and
renamed in a thread of its own. Two profilers in one process crash it, so another one that is active
is left alone, and one that starts during a window ends the window first. A session that somebody
else took, or whose thread is gone, cannot be ended without a crash either: it is left as it is."""

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
from advisor.core.run_directory import trace_name
from advisor.recorder.call_depth import is_outermost, is_undisturbed
from advisor.recorder.hooks import Hooks
from advisor.recorder.modules import hide_from_warnings
from advisor.recorder.options import RecordOptions
from advisor.recorder.watchers import TraceRanges

log = logging.getLogger("advisor")

FIRST_WINDOW_STEP = 3
"""Steps before the first window where each step is long …"""
EARLY_NS = 2_000_000_000
"""Time until the first window, ns, from which it opens early."""
EARLY_STEPS = 2
"""Minimum number of steps before any window: the first step compiles and chooses algorithms."""
LONG_NS = 1_000_000_000
"""Length of a step, ns, beside which a profiler's start is short: the window needs no warm-up."""
FORWARDS = 8
"""Number of forwards above which a step is long."""
MAX_FORWARDS = 64
"""Maximum number of forwards in a window whose steps are long."""
GUARD_STEPS = 3
"""Profiled steps needed before the guard may stop a window: the first one holds the start of the
trace, and the median of three ignores it …"""
GUARD_NS = 20_000_000
"""… and the least time that they must have lost together, ns: five short steps need no stop."""
BASELINE = 32
"""Steps before a window that its steps are compared with."""
RETRY = 20
"""Steps until the next try while another profiler is active."""
MAX_RETRIES = 5
MAX_UNSAFE = 12
"""Most steps tried that end where no profiler may start, at growing intervals …"""
MAX_PAUSE = 256
"""… up to this many steps."""
OTHER_PROFILER_WAIT_SECONDS = 1.0
"""Time that a profiler started in another thread waits for a window to end, s."""
EXPORT_SECONDS = 120.0
"""Time that the end of a run waits for a trace being written, s."""
PLACE_SECONDS = 20.0
"""Time that a trace waits for its folder, s: a short run can end before it is made."""

_OPERATOR = b'"cpu_op"'
"""Category of an operator in a trace."""

UNSAFE_REASON = (
    "inside a backward, a hook, compiled code or the like, where no profiler may start or stop"
)


class Windows:
    """Profiled windows of one rank. ``write_event(data)`` writes a ``window`` event.
    ``host_is_ahead`` tells whether host step times mean nothing, because the device lags behind."""

    def __init__(
        self,
        options: RecordOptions,
        rank: int,
        write_event: Callable[[dict[str, Any]], None],
        hooks: Hooks,
        ranges: TraceRanges,
        host_is_ahead: Callable[[], bool] = lambda: False,
    ) -> None:
        self._host_is_ahead = host_is_ahead
        self._options = options
        self._ranges = ranges
        self._stacks = options.stacks or options.deep
        self._hooks = hooks
        self._write_event = write_event
        self.enabled = options.traces(rank)
        self._folder: Path | None = None
        self._placed = threading.Event()
        self.automatic_reason: str | None = None
        """Reason to open a window at the next boundary, set by any thread, or ``None``."""
        self.requested_reason: str | None = None
        """Reason of a window that the user asked for, or ``None``."""
        self._spans: list[list[int | None]] = []
        """Times of each window: opened, ended, and trace written, ns."""
        self.first_step = options.skip
        """Step number from which the first window may open."""
        self._warmup = options.warmup
        self._active = options.active
        self.delimited_by_forward = False
        """True if only forwards tell where steps end: recording Python stacks would hide them."""
        self.restarts = False
        """True if a training may be about to begin."""
        self._dropped = -1
        """Number of the last window before the training; these are dropped."""
        self._profiler: Any = None
        self._steps: list[int] = []
        self._durations: list[int] = []
        self._before: deque[int] = deque(maxlen=BASELINE)
        self._reason = ""
        self._number = -1
        self._own = self._requested = 0
        self._retries = 0
        self._written = 0
        self._export: threading.Thread | None = None
        self._guards: list[tuple[str, Any]] = []
        self.problem: str | None = None
        """Reason why a trace could not be written; ``None``: none failed."""
        self._unsafe = 0
        self._pause = 1
        self._thread = -1
        """Identifier of the thread that opened the window."""
        self._ending: str | None = None
        """Reason to end the window at the next step; ``None``: it goes on."""
        self._ended = threading.Event()
        self._lost: list[Any] = []
        """Profilers that cannot be stopped, kept alive: freeing one would stop it."""
        self.timed = False
        """True while the window, or the last one, is of a length of time: no step was seen."""
        self._kept: tuple[bytes, dict[str, Any]] | None = None
        """Compressed trace of such a window, and its event: they wait for the run's end."""
        self._others: WeakSet[Any] = WeakSet()
        """Active profilers of the program, including those that warm up …"""
        self._stack_profilers: WeakSet[Any] = WeakSet()
        """… and those of them that record Python stacks."""

    def set_folder(self, folder: Path | None) -> None:
        """Set the folder for traces, from any thread; ``None``: there will be none."""
        self._folder = folder
        self._placed.set()

    def fit_to_loader(self, length: int | None) -> None:
        """Open the first window earlier if a loader has few batches. ``length``: its batches."""
        total = self.first_step + self._warmup + self._active
        if not self.first_due or length is None or length >= total + 1:
            return
        spare = max(0, length - self._active - 1)
        self._warmup = min(self._warmup, max(1, spare // 2))
        self.first_step = max(1, min(self.first_step, spare - self._warmup))

    def fit_to_forwards(self, forwards: int) -> None:
        """Shorten windows where a step has many forwards (``generate``): a few such steps are a
        long trace, and there may be few."""
        if forwards > FORWARDS:
            self.first_step, self._warmup = (
                min(self.first_step, FIRST_WINDOW_STEP),
                min(self._warmup, 1),
            )
        self._active = max(1, min(self._active, MAX_FORWARDS // max(1, forwards)))

    def restart(self, why: str) -> None:
        """Drop the windows so far, because a training begins after them."""
        self._dropped = self._number
        for number in range(self._number + 1):
            if self._folder is not None:
                (self._folder / trace_name(number)).unlink(missing_ok=True)
            self._write_event({"window": number, "state": "dropped", "why": why})
        if self._profiler is not None:
            self._ending = why
        options = self._options
        self.first_step, self._warmup, self._active = options.skip, options.warmup, options.active
        self._own = self._requested = self._written = self._retries = 0
        self.delimited_by_forward = self.restarts = False
        self.automatic_reason = None
        self._before.clear()

    @property
    def first_due(self) -> bool:
        """True while no window has been opened."""
        return self._number <= self._dropped

    def window_of(self, begin: int, end: int) -> int | None:
        """Return the number of the window that was open during a step; ``None``: none was."""
        return self._span(begin, end, 1)

    def exporting(self, begin: int, end: int) -> bool:
        """Return whether the trace of a window was being written during a step."""
        return self._span(begin, end, 2) is not None

    def _span(self, begin: int, end: int, until: int) -> int | None:
        for number, span in reversed([*enumerate(self._spans)]):
            opened, closed = span[0], span[until]
            if opened is not None and end > opened and (closed is None or begin < closed):
                return number
        return None

    def add_step(self, slowed: bool, dur: int) -> None:
        """Add a step's duration, ns, read too late for a window to open after it. ``slowed``: by a
        window, or by a trace being written."""
        if self.timed:
            self._leave_timed()
        if not slowed:
            self._before.append(dur)

    def add_steps(self, lengths: list[int]) -> None:
        """Add durations of steps outside windows, ns."""
        self._before.extend(lengths[-BASELINE:])

    @property
    def profiling(self) -> bool:
        """True while a window is open."""
        return self._profiler is not None

    @property
    def needs_step_ends(self) -> bool:
        """True if step ends must be reported at once: a window is open, due, or to be dropped."""
        if self._profiler is not None or self.restarts or self.timed:
            return True
        wanted = (
            self.first_due or self.requested_reason is not None or self.automatic_reason is not None
        )
        return self.enabled and wanted

    def step(self, number: int, slowed: bool, dur: int) -> None:
        """Open, advance or close a window: a step has just ended, and step ``number`` begins."""
        if self.timed:
            self._leave_timed()
        if self._profiler is not None:
            if self._safe():
                self._advance(number, dur)
            elif self._ending is None:
                self._ending = f"step {number - 1} ended {UNSAFE_REASON}"
        else:
            self.add_step(slowed, dur)
            first = self.first_due and self._is_first_due(number, dur)
            if self.enabled and (
                first or self.requested_reason is not None or self.automatic_reason is not None
            ):
                self._open_if_due(number)

    def finish(self, number: int) -> None:
        """End the open window as recording ends, and wait for its trace."""
        if self._profiler is not None:
            if not self._stoppable():
                self._lose("the run ended elsewhere than in the thread that it was opened in")
            elif self._steps[self._warmup :] or self.timed:
                self._close("done", "the run ended first")
            else:
                self._abandon("never", "the run ended before a step was profiled")
        elif self._unsafe and self.first_due:
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
        """Open a window although no step was seen, if a profiler may start here and now."""
        import torch

        if self.enabled and self.first_due and not self._others and is_outermost(torch):
            self.timed = True
            self._open(torch, "no step was seen", 0)

    def close_timed(self) -> None:
        """Close that window, if its profiler may be stopped here and now."""
        if self.timed and self._profiler is not None and self._safe():
            self._close("done", None)

    def _leave_timed(self) -> None:
        """Drop a window that was opened because no step was seen: a step was seen now. If it is
        still open, it ends where it can."""
        if self._number > self._dropped:
            self.restart("a step was seen after it")
        if self._profiler is None:
            self.timed = False

    @property
    def has_timed(self) -> bool:
        """True if such a window has a trace to be kept."""
        return self._kept is not None and not self.first_due

    def keep_timed(self) -> None:
        """Write its trace into the run directory, which is being made."""
        if self._kept is None or not self._placed.wait(PLACE_SECONDS) or self._folder is None:
            return
        data, event = self._kept
        part = self._folder / f".{event['file']}"
        part.write_bytes(data)
        part.replace(self._folder / event["file"])
        self._write_event(event)

    def forget(self) -> None:
        """Drop the profiler and the export in a forked child: they are the parent's."""
        self._profiler = None
        self._export = None
        self.enabled = False

    def stop(self, why: str) -> None:
        """Stop the profiler now, e.g. because another one starts."""
        if self._profiler is not None:
            if not self._stoppable():
                self._lose(why)
            elif self._steps[self._warmup :]:
                self._close("stopped", why)
            else:
                self._abandon("stopped", why)

    # -- opening --------------------------------------------------------------------------------

    def _is_first_due(self, number: int, dur: int) -> bool:
        """Return whether the first window may open before step ``number``; the last one took
        ``dur`` ns. Long steps are not waited for, unless the user said how many to skip, or they
        end where no window can open."""
        waiting = max(0, self.first_step - number) * dur
        early = (
            number >= EARLY_STEPS and waiting >= EARLY_NS and not (self._unsafe or self._retries)
        )
        early = early and self._options.skip == RecordOptions.skip
        if not early and number < self.first_step:
            return False
        if self._options.warmup == RecordOptions.warmup and (early or dur >= LONG_NS):
            self._warmup = 0 if dur >= LONG_NS else min(self._warmup, 1)
        return True

    def _open_if_due(self, number: int) -> None:
        options = self._options
        if self._export is not None:
            return
        asked = self.requested_reason is not None
        reason = self.requested_reason or self.automatic_reason or "schedule"
        self.requested_reason = self.automatic_reason = None
        used, most = (self._requested if asked else self._own), options.windows
        if used >= most or self._written >= options.max_bytes:
            if asked:
                why = f"{used} of {most} windows used, {self._written >> 20} MiB written"
                self._write_event({"reason": reason, "state": "never", "why": why})
            return
        import torch

        another = bool(self._others) or torch.autograd._profiler_enabled()
        if not another and not is_outermost(torch):
            self._postpone(number, reason, asked)
            return
        if another:
            self._retries += 1
            if self._retries <= MAX_RETRIES:
                self.first_step = number + RETRY
            if self._retries == 1:
                why = "another profiler is active"
                self._write_event({"reason": reason, "state": "never", "why": why})
            return
        self._requested += asked
        self._own += not asked
        self._open(torch, reason, number)

    def _open(self, torch: Any, reason: str, number: int) -> None:
        self._number += 1
        self._reason = reason
        self._steps = []
        self._durations = []
        options = self._options
        self._stacks = (options.stacks or options.deep) and not self.delimited_by_forward
        if not self._stacks:
            options = options.with_changes(
                stacks=False, deep=False, memory=options.memory or options.deep
            )
        profiler = make_profiler(torch, options, None if self.timed else number + self._warmup)
        if hasattr(profiler, "step_num"):
            profiler.step_num = number  # ProfilerStep#n is our step n
        if self._stacks:
            self._hooks.suspend_module_calls()
        self._spans.append([perf_counter_ns(), None, None])
        self._thread = threading.get_ident()
        self._ending = None
        self._ended.clear()
        self._profiler = profiler
        profiler.start()
        self._ranges.begin()
        self._write_event(
            {"window": self._number, "reason": reason, "state": "open", "steps": [number]}
        )

    def _postpone(self, number: int, reason: str, asked: bool) -> None:
        """Retry later, at growing intervals, because this step ended where no profiler may start. A
        window that the user asked for stays requested."""
        self._unsafe += 1
        self._pause = min(2 * self._pause, MAX_PAUSE)
        if self.first_due:
            self.first_step = number + self._pause
        if self._unsafe >= MAX_UNSAFE:
            self._warn_unsafe()
            self.enabled = False
        elif asked:
            self.requested_reason = reason
        elif not self.first_due:
            self.automatic_reason = reason

    def _warn_unsafe(self) -> None:
        why = f"every step that was looked at ended {UNSAFE_REASON}"
        self._write_event(
            {"window": self._number + 1, "reason": "schedule", "state": "never", "why": why}
        )

    # -- while it is open -----------------------------------------------------------------------

    def _safe(self) -> bool:
        """Return whether the profiler may be called here and now."""
        import torch

        return self._in_its_thread() and is_outermost(torch, profiled=self._recording())

    def _stoppable(self) -> bool:
        """Return whether the profiler can be stopped without a crash."""
        import torch

        return self._in_its_thread() and is_undisturbed(torch, profiled=self._recording())

    def _in_its_thread(self) -> bool:
        return threading.get_ident() == self._thread

    def _recording(self) -> bool:
        """Return whether the profiler records: in its warm-up torch reports none active."""
        return getattr(self._profiler.current_action, "name", "").startswith("RECORD")

    def _advance(self, number: int, dur: int) -> None:
        if self._ending is not None:
            self.stop(self._ending)
            return
        self._steps.append(number - 1)
        active = len(self._steps) - self._warmup
        if active > 0:
            self._durations.append(dur)
            if active >= self._active:
                self._close("done", None)
                return
            slow = self._too_slow()
            if slow:
                self._close("stopped", slow)
                return
        self._profiler.step()

    def _too_slow(self) -> str | None:
        if len(self._before) < GUARD_STEPS or len(self._durations) < GUARD_STEPS:
            return None
        if self._host_is_ahead():
            return None
        usual, now = median(self._before), median(self._durations)
        lost = len(self._durations) * (now - usual)
        if now > usual * self._options.guard and lost > GUARD_NS:
            return f"profiled steps take {now / usual:.1f} times as long"
        return None

    def watch_other_profilers(self) -> None:
        """Wrap torch's profiler, to end a window before another profiler starts."""
        from torch.autograd.profiler import profile

        def guarded(original: Any) -> Any:
            @functools.wraps(original)
            def call(other: Any, *args: Any, **kwargs: Any) -> Any:
                ours = self._profiler
                if ours is None or other is not getattr(ours, "profiler", None):
                    self._suspend_for_profiler(other)
                return original(other, *args, **kwargs)

            return call

        for name in ("__enter__", "_prepare_trace", "_start_trace"):
            original = getattr(profile, name, None)
            if original is not None:
                setattr(profile, name, guarded(original))
                self._guards.append((name, original))
        exits = profile.__exit__

        @functools.wraps(exits)
        def leave(other: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return exits(other, *args, **kwargs)
            finally:
                self._resume_after_profiler(other)

        profile.__exit__ = leave
        self._guards.append(("__exit__", exits))

    def unwatch_profilers(self) -> None:
        """Restore the methods of ``torch.autograd.profiler.profile``."""
        if self._guards:
            from torch.autograd.profiler import profile

            for name, original in self._guards:
                setattr(profile, name, original)
            self._guards.clear()

    def _suspend_for_profiler(self, other: Any) -> None:
        try:
            why = "another profiler was started"
            if self._profiler is not None and not self._in_its_thread():
                self._ending = why
                self._ended.wait(OTHER_PROFILER_WAIT_SECONDS)
            self.stop(why)
            self._others.add(other)
            if getattr(other, "with_stack", True) or getattr(other, "with_modules", True):
                self._stack_profilers.add(other)
                self._hooks.suspend_module_calls()
        except Exception as error:  # called inside torch, on the user's behalf
            log.warning("advisor: the window was not ended: %s", error)

    def _resume_after_profiler(self, other: Any) -> None:
        self._others.discard(other)
        if other in self._stack_profilers:
            self._stack_profilers.discard(other)
            self._resume_module_calls()

    def _resume_module_calls(self) -> None:
        if not self._stack_profilers and not (self._stacks and self._profiler is not None):
            self._hooks.resume_module_calls()

    # -- closing --------------------------------------------------------------------------------

    def _lose(self, why: str) -> None:
        """Give up a profiler whose session was taken or is out of reach: stopping it crashes."""
        self._lost.append(self._profiler)
        self._profiler = None
        self.enabled = False
        self._ended.set()
        self._end_span()
        self._tell_end("stopped", why)

    def _end(self) -> Any:
        """Stop and return the profiler, which holds what it recorded."""
        profiler, self._profiler = self._profiler, None
        self._ranges.end()
        profiler.stop()
        self._spans[-1][1] = perf_counter_ns()
        self._ended.set()
        if self._stacks:
            self._resume_module_calls()
        return profiler

    def _end_span(self) -> None:
        """Mark the end of the window's effect on step times."""
        span, now = self._spans[-1], perf_counter_ns()
        span[1:] = now if span[1] is None else span[1], now

    def _abandon(self, state: str, why: str) -> None:
        self._end()
        self._end_span()
        self._tell_end(state, why)

    def _tell_end(self, state: str, why: str) -> None:
        """Write the event of a window that leaves no trace."""
        self._write_event(
            {"window": self._number, "reason": self._reason, "state": state, "why": why}
        )

    def _close(self, state: str, why: str | None) -> None:
        if self._number <= self._dropped:
            self._end()
            self._end_span()
            return
        kept = self._steps[self._warmup :]
        event: dict[str, Any] = {"window": self._number, "reason": self._reason, "state": state}
        event |= {"steps": [kept[0], kept[-1]]} if kept else {}
        event |= {"why": why} if why else {}
        profiler = self._end()
        # not a daemon: a trace that is being written when the interpreter ends is finished
        self._export = threading.Thread(
            target=self._hold_back if self.timed else self._write,
            args=(profiler, event),
            name="advisor trace",
        )
        self._export.start()

    def _write(self, profiler: Any, event: dict[str, Any]) -> None:
        number = event["window"]
        try:
            self._placed.wait(PLACE_SECONDS)
            if self._folder is None:
                raise RuntimeError("there is no folder for it")
            size = write_trace(profiler, self._folder, number)
            self._written += size
            event["file"] = trace_name(number)
            if number <= self._dropped:
                (self._folder / trace_name(number)).unlink(missing_ok=True)
                event["state"] = "dropped"
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

    def _hold_back(self, profiler: Any, event: dict[str, Any]) -> None:
        """Keep the trace of a window without steps aside: steps may follow, or another process be
        the one that trains. One without operators is dropped."""
        name = event["file"] = trace_name(event["window"])
        try:
            with scratch_folder() as folder:
                write_trace(profiler, folder, event["window"])
                data = (folder / name).read_bytes()
            with gzip.open(io.BytesIO(data)) as file:
                while (part := file.read(1 << 20)) and _OPERATOR not in part:
                    continue
            self._kept = (data, event) if part else None
        except (OSError, RuntimeError, AssertionError, ValueError, AdvisorError) as error:
            log.debug("advisor: the trace of a window without steps was not kept: %s", error)
        self._end_span()
        self._export = None


def make_profiler(torch: Any, options: RecordOptions, first: int | None) -> Any:
    """Return a profiler that keeps steps from ``first`` on (``None``: that knows no steps), with
    options this torch knows."""
    from torch.profiler import ProfilerAction, ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        activities.append(ProfilerActivity.CUDA)

    def action(step: int) -> Any:
        return ProfilerAction.WARMUP if step < (first or 0) else ProfilerAction.RECORD

    return profile(
        activities=activities,
        schedule=None if first is None else action,
        record_shapes=options.shapes,
        with_stack=options.stacks or options.deep,
        profile_memory=options.memory or options.deep,
        experimental_config=_experimental(options),
    )


def _experimental(options: RecordOptions) -> Any:
    """Return experimental profiler settings, as far as this torch knows them; ``None`` if none."""
    try:
        from torch._C._profiler import _ExperimentalConfig
    except ImportError:
        return None
    # sync events: who waits for which stream
    wanted: dict[str, Any] = {"enable_cuda_sync_events": True}
    if options.stacks or options.deep:
        wanted["verbose"] = True
    else:
        wanted["trace_only"] = True  # nothing is parsed in this process; stacks need that
    known: dict[str, Any] = {}
    for name, value in wanted.items():
        try:
            _ExperimentalConfig(**{name: value})
        except TypeError:
            continue
        known[name] = value
    return _ExperimentalConfig(**known)


def write_trace(profiler: Any, folder: Path, window: int) -> int:
    """Export and compress the trace, rename it once complete, and return its size, bytes.

    torch would compress by itself, at level 9 and with the interpreter's lock held."""
    plain = folder / f".{trace_name(window)}.json"
    torchs = plain.with_name(f"{plain.name}.tmp")
    packed = folder / f".{trace_name(window)}"
    try:
        profiler.export_chrome_trace(str(plain))
        if not plain.exists():  # torch says so on stderr alone
            raise OSError(errno.ENOSPC, "no room for the trace, or a limit on the size of files")
        with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=1) as target:
            shutil.copyfileobj(source, target, 1 << 20)
        size = packed.stat().st_size
        packed.replace(folder / trace_name(window))
        return size
    finally:
        for file in (plain, torchs, packed):
            file.unlink(missing_ok=True)


hide_from_warnings(globals())
