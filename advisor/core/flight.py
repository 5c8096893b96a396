"""FlightDump: the last collectives of one rank, as PyTorch's flight recorder keeps them."""

from __future__ import annotations

from msgspec import Struct

from advisor.core.finding import Location


class FlightCall(Struct, frozen=True, kw_only=True):
    """An entry of the recorder's ring buffer."""

    group: str
    """Name of the process group."""
    description: str
    """Its description, ``default_pg``."""
    operation: str
    """Without the backend: ``all_reduce``, ``send 0->1``."""
    sequence: int
    p2p: bool
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    state: str
    """``scheduled``, ``started`` or ``completed``."""
    created_ns: int
    where: Location | None


class FlightDump(Struct, frozen=True, kw_only=True):
    """A file."""

    path: str
    rank: int | None
    """By the file's name; ``None``: it has no number."""
    calls: tuple[FlightCall, ...]
    """In the order in which they were called."""
    members: dict[str, tuple[int, ...]]
    """Global ranks of the process groups, by name, as far as the backend keeps them."""
    damaged: int
