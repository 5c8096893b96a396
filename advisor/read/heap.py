"""Memory that was let go of, given back to the system."""

from __future__ import annotations

import ctypes
from contextlib import suppress

LARGE = 1_000_000
"""Rows from which on it pays for the milliseconds."""


def give_back(rows: int) -> None:
    """What glibc's malloc keeps of columns that are gone is otherwise not the system's again while
    others are made, and a large file takes half as much memory more. Nothing is done for few
    ``rows``, nor with another malloc."""
    if rows < LARGE:
        return
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
