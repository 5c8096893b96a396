"""What the memory rules share: the window's peaks of device memory, and who held it then."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from advisor.core.finding import Location
from advisor.measure import Analysis

if TYPE_CHECKING:
    from advisor.measure.memory.post_mortem import PostMortem


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
    if a.device_id is None:
        return Peaks(None, None, None)
    rows = a.memory.filter(a.memory["device"] == a.device_id)

    def largest(name: str) -> int | None:
        return max((int(value) for value in rows[name].drop_nulls()), default=None)

    return Peaks(largest("peak_reserved"), largest("peak_allocated"), largest("capacity"))


def held_most(post: PostMortem, most: int = 3) -> list[Location]:
    """The user's lines that held most at the moment that a snapshot is looked at."""
    held = post.held.filter(post.held["file"].is_not_null()).head(most)
    return [
        Location(file=row["file"], line=row["line"], function=row["function"], count=row["blocks"])
        for row in held.iter_rows(named=True)
    ]
