"""Watchers of phases and memory: NVTX and trace ranges, CUDA events, allocator counters. When
memory runs out, a snapshot and an event are written, and the exception continues unchanged.

Nsight Systems gets NVTX ranges in a domain of our own. They use the ``nvtx`` package, because
``torch.cuda.nvtx`` raises in builds without CUDA. A domain with cached attributes costs some 0.1 µs
per range. Without an attached tool, the package returns a dummy domain, and no ranges are made.

CUDA events are recorded and never waited for. Their times are read a few steps later, when they
have completed. Both happen in the training thread, but not while it captures a graph: a query in
another thread would end the capture with an error. None of this happens before the process itself
initialises CUDA. docs/overhead.md gives their cost on a GPU, or says that it is not measured."""

import logging
import sys
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from advisor.core import run_directory as rundir
from advisor.recorder.tape import CUDA_EVENT, MARKS_END, Tape

DOMAIN = "advisor"


class Ranges:
    """NVTX ranges that open and close with the phases."""

    def __init__(self, tape: Tape, domain: Any) -> None:
        self._names = tape.names
        self._domain = domain
        self._attributes: list[Any] = []

    def on_enter(self, phase: int) -> None:
        attributes = self._attributes
        while len(attributes) <= phase:
            name = self._names[len(attributes)]
            attributes.append(self._domain.get_event_attributes(message=name))
        self._domain.push_range(attributes[phase])

    def on_leave(self, phase: int) -> None:
        self._domain.pop_range()


class TraceRanges:
    """Ranges of the phases in a window's trace, such as ``advisor::forward``."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._open: list[Any] = []

    def begin(self) -> None:
        """Start adding ranges, once the profiler has started."""
        self._tape.add_watcher(self)

    def end(self) -> None:
        """Close the open ranges, before the profiler stops."""
        self._tape.remove_watcher(self)
        while self._open:
            self._close()

    def on_enter(self, phase: int) -> None:
        """Open the range of a phase, unless a mode or a trace would take it for a call."""
        import torch
        from torch.profiler import record_function

        if is_intercepted(torch):
            self._open.append(None)
            return
        opened = record_function(f"{DOMAIN}::{self._tape.names[phase]}")
        opened.__enter__()
        self._open.append(opened)

    def on_leave(self, phase: int) -> None:
        """Close the range of a phase, unless the phase began before the window."""
        if self._open:
            self._close()

    def _close(self) -> None:
        opened = self._open.pop()
        if opened is not None:
            opened.__exit__(None, None, None)


def is_intercepted(torch: Any) -> bool:
    """Return whether operator calls are being traced, or reported to the program's modes."""
    lowlevel = torch._C
    modes = lowlevel._len_torch_dispatch_stack() or lowlevel._len_torch_function_stack()
    return bool(modes) or lowlevel._get_tracing_state() is not None


def make_ranges(tape: Tape) -> Ranges | None:
    """Return the NVTX ranges of the phases, or ``None`` if no tool would see them."""
    try:
        import nvtx
    except ImportError:
        return None
    domain = nvtx.get_domain(DOMAIN)
    return None if "dummy" in type(domain).__name__.lower() else Ranges(tape, domain)


MEMORY_EVERY_NS = 250_000_000
"""Minimum interval between queries of the allocator, ns: a query costs some 30 µs."""
MARKS_EVERY_NS = 100_000_000
"""Minimum interval between two measured steps, ns. A step and its surroundings take some 25 events
of 5 to 10 µs each."""
LONG_STEP_NS = 50_000_000
"""Minimum duration of a step, ns, from which every step is measured, at some 0.2% of its time."""
MAX_HOST_GAP = 0.25
"""Maximum difference between device and host time of a step, as a share of device time, if the host
waits for the device in each step."""
MAX_POOL = 1024
"""Maximum number of events kept for reuse."""


class EventTimes:
    """Device times of a step, from its CUDA events."""

    __slots__ = ("done", "host_ns", "marks", "phases", "times")

    def __init__(self, marks: list[tuple[int, Any]], phases: int, host_ns: int) -> None:
        self.marks = marks
        self.phases = phases
        self.host_ns = host_ns
        """Duration of the step on the host, ns."""
        self.times: list[int] | None = None
        """Device time by phase number, ns, or ``None`` if unknown."""
        self.done = False


class PhaseEventTimer:
    """Watcher that makes CUDA events where phases begin and end, for one step in ``every``: for all
    steps if they are long, and for a few per second if they are short.

    An event that happens in each step, an optimizer step or a forward, is a *tick*. ``ticks``
    returns their number per step. CUDA events are made for the ticks of two steps, so that they
    include one complete step, whatever its boundary is."""

    def __init__(self, tape: Tape, torch: Any, every: int, ticks: Callable[[], int]) -> None:
        self._tape = tape
        self._torch = torch
        self.host_is_ahead = False
        """True once the host launched a step well before the device ran it. Then times between
        steps on the host are meaningless."""
        self._skipped_steps = max(every, 3) - 2
        self._ticks = ticks
        self._pool: deque[Any] = deque(maxlen=MAX_POOL)
        self._readings: deque[EventTimes] = deque()
        self._steps = 0
        """Maximum number of steps for which events are being made, or 0 if none are made."""
        self._ticks_left = 0
        """Number of ticks until the making of events ends or, if none are made, until it may
        begin."""
        self._started_ns = 0
        """Time at which the making of events began, ns."""

    def ask(self, marks: list[tuple[int, Any]], phases: int, host_ns: int) -> EventTimes:
        """Return the device times of a step, which are filled in later. Any thread may call it."""
        reading = EventTimes(marks, phases, host_ns)
        self._readings.append(reading)
        return reading

    def answer(self) -> None:
        """Read the events that have completed. Called in the training thread."""
        readings = self._readings
        if not readings or self._torch._C._cuda_isCurrentStreamCapturing():
            return
        while readings:
            reading = readings[0]
            try:
                if not reading.marks[-1][1].query():
                    return
            except RuntimeError:  # the device failed: the training thread gets the error too
                return
            reading.times = sum_phase_times(reading.marks, reading.phases)
            if reading.times is not None:
                device_ns = sum(reading.times)
                self.host_is_ahead |= abs(device_ns - reading.host_ns) > MAX_HOST_GAP * device_ns
            reading.done = True
            readings.popleft()
            # the last event is also the first of the next step
            self._pool.extend(event for _, event in reading.marks[:-1])

    def on_tick(self) -> None:
        """Read completed events at a tick, and start or stop making new ones."""
        self.answer()
        self._ticks_left -= 1
        if self._ticks_left > 0:
            return
        now = perf_counter_ns()
        if self._steps and now - self._started_ns >= self._steps * LONG_STEP_NS:
            self._start_events(1, now)
        elif self._steps:
            self.end()
        elif now - self._started_ns >= MARKS_EVERY_NS and is_cuda_initialized(self._torch):
            self._start_events(2, now)
            self._tape.add_watcher(self)

    def _start_events(self, steps: int, now: int) -> None:
        self._steps, self._started_ns = steps, now
        self._ticks_left = steps * self._ticks()

    def end(self) -> None:
        """Stop making events for now."""
        self._ticks_left, self._steps = self._skipped_steps * self._ticks(), 0
        if self._tape.remove_watcher(self):
            self._tape.log.extend((MARKS_END, 0))

    def on_enter(self, phase: int) -> None:
        """Make an event as a phase begins, unless a graph is being captured."""
        if self._torch._C._cuda_isCurrentStreamCapturing():
            self.end()
            return
        pool = self._pool
        event = pool.popleft() if pool else self._torch.cuda.Event(enable_timing=True)
        event.record()
        self._tape.log.extend((CUDA_EVENT, (phase, event)))

    on_leave = on_enter  # the phase around the ended one continues


def sum_phase_times(marks: list[tuple[int, Any]], phases: int) -> list[int] | None:
    """Return the device time by phase number, ns, from each event to the next, or ``None`` if their
    devices or streams cannot be compared."""
    spent = [0] * phases
    try:
        for (phase, event), (_, after) in pairwise(marks):
            spent[phase] += round(event.elapsed_time(after) * 1e6)
    except RuntimeError:
        return None
    return spent


def is_cuda_initialized(torch: Any) -> bool:
    """Return whether the process has initialised CUDA itself."""
    return bool(torch.cuda.is_initialized())


class AllocatorStats:
    """Counters of the caching allocator, read at intervals."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._sampled_ns = 0

    def sample(self) -> tuple[int, int, int, int] | None:
        """Return bytes in tensors, reserved bytes, peak in tensors, retries, or ``None`` if too
        soon."""
        now = perf_counter_ns()
        if now - self._sampled_ns < MEMORY_EVERY_NS or not is_cuda_initialized(self._torch):
            return None
        self._sampled_ns = now
        stats = self._torch.cuda.memory_stats()
        return (
            stats.get("allocated_bytes.all.current", 0),
            stats.get("reserved_bytes.all.current", 0),
            stats.get("allocated_bytes.all.peak", 0),
            stats.get("num_alloc_retries", 0),
        )


log = logging.getLogger("advisor")
_MAX_MESSAGE = 2000
MAX_HISTORY_ENTRIES = 1_000_000
"""Maximum number of events in the allocator's history: some GB of host memory."""


class OutOfMemoryHook:
    """Recorder of CUDA's out-of-memory errors. ``write_event(data)`` writes an ``oom`` event for
    each error that ends the run. The first error of all writes the snapshot. ``history``: number of
    allocator events to keep for the snapshot, or 0 for none."""

    def __init__(self, write_event: Callable[[dict[str, Any]], None], history: int = 0) -> None:
        self._write_event = write_event
        self._history = min(history, MAX_HISTORY_ENTRIES)
        self._switched_on = False
        self.folder: Path | None = None
        self._observing = False
        self._snapshot: str | None = None

    def install(self) -> None:
        """Have the allocator call us when an allocation fails, while the memory is still full."""
        torch = sys.modules.get("torch")
        attach = getattr(getattr(torch, "_C", None), "_cuda_attach_out_of_memory_observer", None)
        if attach is None or self._observing or torch is None or not torch.cuda.is_initialized():
            return
        self._observing = True
        self._switch_on_history(torch)
        attach(self._on_full)  # it cannot be detached, but only its first call has an effect

    def _switch_on_history(self, torch: Any) -> None:
        """Switch on the allocator's history, if it is wanted and the program has not done so."""
        if not self._history:
            return
        try:
            if torch._C._cuda_isHistoryEnabled():
                return  # the program's own history, with its own limits
            torch.cuda.memory._record_memory_history(
                "all", context="all", stacks="python", max_entries=self._history
            )
            self._switched_on = True
        except (RuntimeError, AttributeError, TypeError) as error:  # another version of PyTorch
            log.warning("advisor: no memory history: %s", error)

    def close(self) -> None:
        """Switch off the history, if this recorder switched it on."""
        torch = sys.modules.get("torch")
        if not self._switched_on or torch is None:
            return
        self._switched_on = False
        try:
            torch.cuda.memory._record_memory_history(None)
        except (RuntimeError, AttributeError, TypeError) as error:
            log.warning("advisor: memory history stays on: %s", error)

    def on_exception(self, error: BaseException) -> None:
        """Write an ``oom`` event if the exception is an out-of-memory error of the device."""
        if not is_out_of_memory(error):
            return
        allocated, reserved = _allocator_bytes()
        self._write_event(
            {
                "message": str(error)[:_MAX_MESSAGE],
                "snapshot": self._snapshot or self._write_snapshot(),
                "allocated": allocated,
                "reserved": reserved,
            }
        )

    def _on_full(self, device: int, alloc: int, device_alloc: int, device_free: int) -> None:
        try:
            if self._snapshot is None and self.folder is not None:
                self._snapshot = self._write_snapshot()
        except Exception as error:  # called inside the allocator: no error may leave this function
            log.warning("advisor: no memory snapshot: %s", error)

    def _write_snapshot(self) -> str | None:
        """Write the allocator's snapshot. Return the file's name, or ``None`` if there is none."""
        torch = sys.modules.get("torch")
        if torch is None or self.folder is None or not torch.cuda.is_initialized():
            return None
        hidden = self.folder / f".{rundir.SNAPSHOT}"
        try:
            torch.cuda.memory._dump_snapshot(str(hidden))
            hidden.replace(self.folder / rundir.SNAPSHOT)
        except (OSError, RuntimeError, AttributeError) as error:
            log.warning("advisor: no memory snapshot: %s", error)
            return None
        return rundir.SNAPSHOT


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception is torch's error for a full device."""
    kind = getattr(sys.modules.get("torch"), "OutOfMemoryError", None)
    if kind is None:
        kind = getattr(getattr(sys.modules.get("torch"), "cuda", None), "OutOfMemoryError", None)
    return kind is not None and isinstance(error, kind)


def _allocator_bytes() -> tuple[int | None, int | None]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None, None
    try:
        return int(torch.cuda.memory_allocated()), int(torch.cuda.memory_reserved())
    except RuntimeError:
        return None, None
