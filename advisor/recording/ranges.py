"""Phases as NVTX ranges in a domain of our own, visible in Nsight Systems.

The ``nvtx`` package, because ``torch.cuda.nvtx`` raises in builds without CUDA. A domain with
cached attributes costs some 0.1 µs a range; without a tool attached the package hands out a
dummy, and then no range is made at all.
"""

from __future__ import annotations

from typing import Any

from advisor.recording.clock import Tape

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


def ranges(tape: Tape) -> Ranges | None:
    """What makes ranges of phases; ``None``: nobody would see them."""
    try:
        import nvtx
    except ImportError:
        return None
    domain = nvtx.get_domain(DOMAIN)
    return None if "dummy" in type(domain).__name__.lower() else Ranges(tape, domain)
