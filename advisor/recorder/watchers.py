"""Watchers beside the recorder: NVTX and trace ranges, CUDA events, allocator counters, and what is
kept when memory runs out: a snapshot and an event, while the exception continues unchanged.

For Nsight Systems they are NVTX ranges in a domain of our own. The ``nvtx`` package, because
``torch.cuda.nvtx`` raises in builds without CUDA. A domain with cached attributes costs some 0.1 µs
a range; without a tool attached the package hands out a dummy, and then no range is made at all.

CUDA events are recorded and never waited for; a few steps later, when they have passed, their times
are read. Both happen in the training thread and not while it captures a graph: a query in any other
thread would end a capture with an error. Nothing of this before the process itself has initialised
CUDA. Their cost on a GPU is a figure of docs/overhead.md, measured or said not to be."""

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
        """Close the open ranges before the profiler stops."""
        self._tape.remove_watcher(self)
        while self._open:
            self._close()

    def on_enter(self, phase: int) -> None:
        """Open the range of a phase. None under a mode or a trace: it would be taken for a call."""
        import torch
        from torch.profiler import record_function

        if is_intercepted(torch):
            self._open.append(None)
            return
        opened = record_function(f"{DOMAIN}::{self._tape.names[phase]}")
        opened.__enter__()
        self._open.append(opened)

    def on_leave(self, phase: int) -> None:
        """Close the range of a phase; none is open if the phase began before the window."""
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
    """Return the NVTX ranges of the phases; ``None`` if no tool would see them."""
    try:
        import nvtx
    except ImportError:
        return None
    domain = nvtx.get_domain(DOMAIN)
    return None if "dummy" in type(domain).__name__.lower() else Ranges(tape, domain)


MEMORY_EVERY_NS = 250_000_000
"""Least interval between queries of the allocator, ns: an answer costs some 30 µs."""
MARKS_APART_NS = 100_000_000
"""Least interval from one measured step to the next, ns: some 25 events, of 5 to 10 µs each, are
made for a step and what is around it …"""
LONG_STEP_NS = 50_000_000
"""… and duration from which every step is measured, ns: some 0.2% of its time."""
MAX_APART = 0.25
"""Largest difference between device and host time of a step, as a share of device time, if the host
waits for the device in each step."""
MAX_POOL = 1024
"""Most events kept for reuse."""


class EventTimes:
    """Device times of a step, from its CUDA events."""

    __slots__ = ("done", "host_ns", "marks", "phases", "times")

    def __init__(self, marks: list[tuple[int, Any]], phases: int, host_ns: int) -> None:
        self.marks = marks
        self.phases = phases
        self.host_ns = host_ns
        """Duration of the step on the host, ns."""
        self.times: list[int] | None = None
        """Device time by phase number, ns; ``None`` if unknown."""
        self.done = False


class PhaseEventTimer:
    """Watcher that makes CUDA events where phases begin and end, for one step in ``every``: for all
    steps if they are long, and for a few per second if they are short.

    What happens in each step, an optimizer's step or a forward, is a *tick*; ``ticks`` says how
    many a step has. Events are made for two steps' ticks: whatever a step's boundary is, one whole
    step lies between."""

    def __init__(self, tape: Tape, torch: Any, every: int, ticks: Callable[[], int]) -> None:
        self._tape = tape
        self._torch = torch
        self.host_is_ahead = False
        """True once the host was seen to launch a step well before the device ran it: times between
        steps on the host then say nothing."""
        self._pause = max(every, 3) - 2
        self._ticks = ticks
        self._pool: deque[Any] = deque(maxlen=MAX_POOL)
        self._asked: deque[EventTimes] = deque()
        self._steps = 0
        """Most steps that events are being made for; 0: none are made …"""
        self._left = 0
        """… and ticks until that ends or, if none are made, until some may be."""
        self._since = 0
        """Start of making events, ns."""

    def ask(self, marks: list[tuple[int, Any]], phases: int, host_ns: int) -> EventTimes:
        """Return the device times of a step, to be filled in later. Any thread may call it."""
        reading = EventTimes(marks, phases, host_ns)
        self._asked.append(reading)
        return reading

    def answer(self) -> None:
        """Read the events that have completed. Called in the training thread."""
        asked = self._asked
        if not asked or self._torch._C._cuda_isCurrentStreamCapturing():
            return
        while asked:
            reading = asked[0]
            try:
                if not reading.marks[-1][1].query():
                    return
            except RuntimeError:  # the device failed: the training thread will hear of it
                return
            reading.times = phase_times(reading.marks, reading.phases)
            if reading.times is not None:
                device_ns = sum(reading.times)
                self.host_is_ahead |= abs(device_ns - reading.host_ns) > MAX_APART * device_ns
            reading.done = True
            asked.popleft()
            # the last one is also the next step's first
            self._pool.extend(event for _, event in reading.marks[:-1])

    def on_tick(self) -> None:
        """Read completed events at a tick, and start or stop making new ones."""
        self.answer()
        self._left -= 1
        if self._left > 0:
            return
        now = perf_counter_ns()
        if self._steps and now - self._since >= self._steps * LONG_STEP_NS:
            self._make(1, now)
        elif self._steps:
            self.end()
        elif now - self._since >= MARKS_APART_NS and is_cuda_initialised(self._torch):
            self._make(2, now)
            self._tape.add_watcher(self)

    def _make(self, steps: int, now: int) -> None:
        self._steps, self._since = steps, now
        self._left = steps * self._ticks()

    def end(self) -> None:
        """Stop making events for now."""
        self._left, self._steps = self._pause * self._ticks(), 0
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

    on_leave = on_enter  # the phase around the one that ended goes on


def phase_times(marks: list[tuple[int, Any]], phases: int) -> list[int] | None:
    """Return the device time by phase number, ns, from each event to the next; ``None`` if they are
    of devices or streams that cannot be compared."""
    spent = [0] * phases
    try:
        for (phase, event), (_, after) in pairwise(marks):
            spent[phase] += round(event.elapsed_time(after) * 1e6)
    except RuntimeError:
        return None
    return spent


def is_cuda_initialised(torch: Any) -> bool:
    """Return whether the process has initialised CUDA itself."""
    return bool(torch.cuda.is_initialized())


class AllocatorStats:
    """Counters of the caching allocator, read at intervals."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._last = 0

    def sample(self) -> tuple[int, int, int, int] | None:
        """Return bytes in tensors, reserved bytes, peak in tensors, retries; ``None``: too soon."""
        now = perf_counter_ns()
        if now - self._last < MEMORY_EVERY_NS or not is_cuda_initialised(self._torch):
            return None
        self._last = now
        stats = self._torch.cuda.memory_stats()
        return (
            stats.get("allocated_bytes.all.current", 0),
            stats.get("reserved_bytes.all.current", 0),
            stats.get("allocated_bytes.all.peak", 0),
            stats.get("num_alloc_retries", 0),
        )


log = logging.getLogger("advisor")
MAX_MESSAGE = 2000
MAX_ENTRIES = 1_000_000
"""Most events of the allocator's history: some GB of host memory."""


class OutOfMemoryHook:
    """Recorder of CUDA's out-of-memory errors. ``write_event(data)`` writes an ``oom`` event, once
    a run for each error that ends it and once for the first that was met. ``history``: events of
    the allocator to keep for the snapshot; 0: none."""

    def __init__(self, write_event: Callable[[dict[str, Any]], None], history: int = 0) -> None:
        self._write_event = write_event
        self._history = min(history, MAX_ENTRIES)
        self._switched_on = False
        self.folder: Path | None = None
        self._observing = False
        self._snapshot: str | None = None

    def install(self) -> None:
        """Have the allocator call us when it fails, while the memory is still full."""
        torch = sys.modules.get("torch")
        attach = getattr(getattr(torch, "_C", None), "_cuda_attach_out_of_memory_observer", None)
        if attach is None or self._observing or torch is None or not torch.cuda.is_initialized():
            return
        self._observing = True
        self._keep_history(torch)
        attach(self._observed)  # there is no way to detach: it does nothing the second time

    def _keep_history(self, torch: Any) -> None:
        """Switch on the allocator's history, if it is wanted and the program has not."""
        if not self._history:
            return
        try:
            if torch._C._cuda_isHistoryEnabled():
                return  # the program's own, with its own bounds
            torch.cuda.memory._record_memory_history(
                "all", context="all", stacks="python", max_entries=self._history
            )
            self._switched_on = True
        except (RuntimeError, AttributeError, TypeError) as error:  # another PyTorch
            log.warning("advisor: no memory history: %s", error)

    def close(self) -> None:
        """Switch off the history that was switched on."""
        torch = sys.modules.get("torch")
        if not self._switched_on or torch is None:
            return
        self._switched_on = False
        try:
            torch.cuda.memory._record_memory_history(None)
        except (RuntimeError, AttributeError, TypeError) as error:
            log.warning("advisor: memory history stays on: %s", error)

    def on_exception(self, error: BaseException) -> None:
        """Write an ``oom`` event if the exception is for lack of device memory."""
        if not is_out_of_memory(error):
            return
        allocated, reserved = _allocator()
        self._write_event(
            {
                "message": str(error)[:MAX_MESSAGE],
                "snapshot": self._snapshot or self._dump(),
                "allocated": allocated,
                "reserved": reserved,
            }
        )

    def _observed(self, device: int, alloc: int, device_alloc: int, device_free: int) -> None:
        try:
            if self._snapshot is None and self.folder is not None:
                self._snapshot = self._dump()
        except Exception as error:  # called from inside the allocator: nothing may leave this
            log.warning("advisor: no memory snapshot: %s", error)

    def _dump(self) -> str | None:
        """Write the allocator's snapshot; return the file's name, or ``None`` if there is none."""
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
    """Return whether an exception is torch's for a full device."""
    kind = getattr(sys.modules.get("torch"), "OutOfMemoryError", None)
    if kind is None:
        kind = getattr(getattr(sys.modules.get("torch"), "cuda", None), "OutOfMemoryError", None)
    return kind is not None and isinstance(error, kind)


def _allocator() -> tuple[int | None, int | None]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None, None
    try:
        return int(torch.cuda.memory_allocated()), int(torch.cuda.memory_reserved())
    except RuntimeError:
        return None, None
