"""What the memory rules share: the window's peaks of device memory."""

from __future__ import annotations

from typing import NamedTuple

from advisor.analysis import Analysis


class Peaks(NamedTuple):
    """Bytes on the analysed device; ``None``: not measured."""

    reserved: int | None
    """Held by PyTorch's allocator at most, cached memory included."""
    allocated: int | None
    """Held by tensors at most."""
    capacity: int | None
    """All the device has."""


def peaks(a: Analysis) -> Peaks:
    """The largest values of any used step."""
    rows = a.memory.filter(a.memory["device"] == a.device_id)

    def largest(name: str) -> int | None:
        return max((int(value) for value in rows[name].drop_nulls()), default=None)

    return Peaks(largest("peak_reserved"), largest("peak_allocated"), largest("capacity"))
