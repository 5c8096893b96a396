"""Phases as ranges that others see: in the trace of a window, and in Nsight Systems.

For Nsight they are NVTX ranges in a domain of our own. The ``nvtx`` package, because
``torch.cuda.nvtx`` raises in builds without CUDA. A domain with cached attributes costs some 0.1 µs
a range; without a tool attached the package hands out a dummy, and then no range is made at all.
"""

from __future__ import annotations

from typing import Any

from advisor.recorder.clock import Tape

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
        """A phase has ended."""
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


def ranges(tape: Tape) -> Ranges | None:
    """What makes ranges of phases; ``None``: nobody would see them."""
    try:
        import nvtx
    except ImportError:
        return None
    domain = nvtx.get_domain(DOMAIN)
    return None if "dummy" in type(domain).__name__.lower() else Ranges(tape, domain)
