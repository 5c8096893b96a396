"""Source: one file that may be elsewhere, small enough to be handed to whoever reads it."""

from __future__ import annotations

from msgspec import Struct


class RemoteFile(Struct, frozen=True):
    """A file, here or elsewhere. Can be pickled."""

    url: str
    """For everybody's eyes: without credentials and without a query. A local path as it is."""
    at: str
    """What is opened: the URL as it was given, or a path. May hold a signature: not for showing."""
    rank: int | None = None
    """By its name or the nearest folder's; ``None``: they tell none."""
    size: int | None = None
    """Bytes; ``None``: not known before it is read."""
    offset: int | None = None
    """Of a member of a tar that is not packed: where its bytes begin in the archive."""
    problem: str = ""
    """Why it cannot be read, where that is known already."""

    def __repr__(self) -> str:
        return f"Source({self.url!r}, rank={self.rank}, size={self.size})"
