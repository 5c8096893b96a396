"""What listens to phases at once: ranges that others see, and CUDA events; and the allocator.

For Nsight Systems they are NVTX ranges in a domain of our own. The ``nvtx`` package, because
``torch.cuda.nvtx`` raises in builds without CUDA. A domain with cached attributes costs some 0.1 µs
a range; without a tool attached the package hands out a dummy, and then no range is made at all.

CUDA events are recorded and never waited for; a few steps later, when they have passed, their times
are read. Both happen in the training thread and not while it captures a graph: a query in any other
thread would end a capture with an error. Nothing of this before the process itself has initialised
CUDA. Their cost on a GPU is a figure of docs/overhead.md, measured or said not to be.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from time import perf_counter_ns
from typing import Any

from advisor.recorder.clock import MARK, MARKS_END, Tape

DOMAIN = "advisor"


class Ranges:
    """Opens and closes ranges with the phases."""

    def __init__(self, tape: Tape, domain: Any) -> None:
        self._names = tape.names
        self._domain = domain
        self._attributes: list[Any] = []

    def entered(self, phase: int) -> None:
        """A phase begins."""
        attributes = self._attributes
        while len(attributes) <= phase:
            name = self._names[len(attributes)]
            attributes.append(self._domain.get_event_attributes(message=name))
        self._domain.push_range(attributes[phase])

    def left(self, phase: int) -> None:
        """A phase has ended: close its range."""
        self._domain.pop_range()


class TraceRanges:
    """While a window is open: phases as ranges of its trace, ``advisor::forward`` …"""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._open: list[Any] = []

    def begin(self) -> None:
        """A profiler has started."""
        self._tape.watch(self)

    def end(self) -> None:
        """It is about to stop."""
        self._tape.unwatch(self)
        while self._open:
            self._close()

    def entered(self, phase: int) -> None:
        """A phase begins. A mode or a trace would take the range for one of the program's calls."""
        import torch
        from torch.profiler import record_function

        if _overheard(torch):
            self._open.append(None)
            return
        opened = record_function(f"{DOMAIN}::{self._tape.names[phase]}")
        opened.__enter__()
        self._open.append(opened)

    def left(self, phase: int) -> None:
        """A phase has ended; none is open if it began before the window."""
        if self._open:
            self._close()

    def _close(self) -> None:
        opened = self._open.pop()
        if opened is not None:
            opened.__exit__(None, None, None)


def _overheard(torch: Any) -> bool:
    """Whether calls of operators are being traced, or reported to somebody's mode."""
    lowlevel = torch._C
    modes = lowlevel._len_torch_dispatch_stack() or lowlevel._len_torch_function_stack()
    return bool(modes) or lowlevel._get_tracing_state() is not None


def make_ranges(tape: Tape) -> Ranges | None:
    """What makes ranges of phases; ``None``: nobody would see them."""
    try:
        import nvtx
    except ImportError:
        return None
    domain = nvtx.get_domain(DOMAIN)
    return None if "dummy" in type(domain).__name__.lower() else Ranges(tape, domain)


MEMORY_EVERY_NS = 250_000_000
"""The allocator is asked this often at most: its answer costs some 30 µs."""
MAX_POOL = 1024
"""Events kept for use again."""


class Reading:
    """Device times that somebody wants to know: the events of a step, and what they say."""

    __slots__ = ("done", "marks", "phases", "times")

    def __init__(self, marks: list[tuple[int, Any]], phases: int) -> None:
        self.marks = marks
        self.phases = phases
        self.times: list[int] | None = None
        """By phase number, ns; ``None``: not known."""
        self.done = False


class Marks:
    """CUDA events where phases begin and end, for one step in ``every``.

    Events are made from one optimizer step to the next but one: whatever a step's boundary is,
    one whole step lies between.
    """

    def __init__(self, tape: Tape, torch: Any, every: int) -> None:
        self._tape = tape
        self._torch = torch
        self._every = max(every, 3)
        self._pool: deque[Any] = deque(maxlen=MAX_POOL)
        self._asked: deque[Reading] = deque()
        self._steps = 0

    def ask(self, marks: list[tuple[int, Any]], phases: int) -> Reading:
        """Have the events of a step read. In any thread."""
        reading = Reading(marks, phases)
        self._asked.append(reading)
        return reading

    def answer(self) -> None:
        """Read what has passed. In the training thread."""
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
            reading.done = True
            asked.popleft()
            # the last one is also the next step's first
            self._pool.extend(event for _, event in reading.marks[:-1])

    def stepped(self) -> None:
        """An optimizer has stepped."""
        self.answer()
        self._steps += 1
        place = self._steps % self._every
        if place == 0 and is_cuda_initialised(self._torch):
            self._tape.watch(self)
        elif place == 2:
            self.end()

    def end(self) -> None:
        """No more events for now."""
        if self._tape.unwatch(self):
            self._tape.log.extend((MARKS_END, 0))

    def entered(self, phase: int) -> None:
        """A phase begins."""
        if self._torch._C._cuda_isCurrentStreamCapturing():
            self.end()
            return
        pool = self._pool
        event = pool.popleft() if pool else self._torch.cuda.Event(enable_timing=True)
        event.record()
        self._tape.log.extend((MARK, (phase, event)))

    left = entered  # the phase around the one that ended goes on


def phase_times(marks: list[tuple[int, Any]], phases: int) -> list[int] | None:
    """Device time by phase number, ns: from each event to the next; ``None``: they are of
    several devices or streams that cannot be compared."""
    spent = [0] * phases
    try:
        for (phase, event), (_, after) in pairwise(marks):
            spent[phase] += round(event.elapsed_time(after) * 1e6)
    except RuntimeError:
        return None
    return spent


def is_cuda_initialised(torch: Any) -> bool:
    """Whether the process has initialised CUDA itself."""
    return bool(torch.cuda.is_initialized())


class AllocatorStats:
    """The caching allocator's counters, now and then."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._last = 0

    def sample(self) -> tuple[int, int, int, int] | None:
        """Bytes in tensors, bytes held, most bytes in tensors, retries; ``None``: not now."""
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
