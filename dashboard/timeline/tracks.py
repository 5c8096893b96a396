"""Slices that overlap, laid side by side on tracks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from advisor.core.intervals import Ints

MOST_TRACKS = 12
"""More would push everything else off the screen; what finds no free track goes to the last."""
MOST_LOOPED = 300_000
"""Overlapping slices that are placed one by one: about 0.2 s."""


def lay(start: Ints, end: Ints, most: int = MOST_TRACKS) -> NDArray[np.int64]:
    """Track of each slice (ordered by start): the first one that is free, at most ``most``.

    Slices that overlap none are on track 0. Beyond MOST_LOOPED overlapping slices they take
    turns, whether a track is free or not.
    """
    track = np.zeros(len(start), dtype=np.int64)
    if len(start) < 2:
        return track
    reach = np.maximum.accumulate(end)
    clash = np.zeros(len(start), dtype=bool)
    clash[1:] = start[1:] < reach[:-1]
    rows = np.flatnonzero(clash)
    if not len(rows):
        return track
    if len(rows) > MOST_LOOPED:
        track[rows] = np.arange(1, len(rows) + 1) % most
        return track
    # Where a slice goes depends on where those before it went: a loop over the overlapping ones
    # only, each stretch of which begins with the slice before it.
    first = rows[np.append(True, np.diff(rows) > 1)] - 1
    look = np.union1d(rows, first)
    free: list[int] = []
    for row, begin, finish, new in zip(
        look.tolist(), start[look].tolist(), end[look].tolist(), ~clash[look], strict=True
    ):
        if new:
            free = []
        for number, until in enumerate(free):
            if until <= begin:
                free[number] = finish
                track[row] = number
                break
        else:
            if len(free) < most:
                free.append(finish)
            else:
                free[-1] = max(free[-1], finish)
            track[row] = len(free) - 1
    return track
