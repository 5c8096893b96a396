"""Steps that are much longer than the others, and whether they come at regular distances."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from advisor.measure.steps.record import Floats, Ints, StepRecords

FACTOR, MADS = 1.5, 5.0
"""A long step is longer than this many medians and more than so many median absolute deviations
away from it, as in the series of profiled steps."""
MIN_RHYTHM = 5
"""Shortest distance that counts as one: a loader with a few workers has a rhythm of its own."""
REGULAR = 0.8
"""Share of the distances that must be alike, within one step."""


class Stalls(NamedTuple):
    """Long steps among those that count."""

    rows: Ints
    """Their positions among all steps of the record."""
    excess: Floats
    """What each takes beyond the median, ns; with the time between steps that went into validation
    and checkpoints."""
    every: int | None
    """Steps from one to the next, if that is regular."""


def find_stalls(recorded: StepRecords) -> Stalls:
    """The long steps of a record. Validation between two steps counts with the step after it."""
    at = np.flatnonzero(recorded.used)
    if not len(at):
        return Stalls(at, np.zeros(0), None)
    dur = recorded.dur[at].astype(np.float64)
    median = float(np.median(dur))
    mad = float(np.median(np.abs(dur - median)))
    long = dur > max(FACTOR * median, median + MADS * mad)
    rows = at[long]
    return Stalls(rows, dur[long] - median, _rhythm(rows))


def _rhythm(rows: Ints) -> int | None:
    if len(rows) < 4:
        return None
    gaps = np.diff(rows)
    usual = int(np.median(gaps))
    alike = float(np.mean(np.abs(gaps - usual) <= 1))
    return usual if usual >= MIN_RHYTHM and alike >= REGULAR else None


def blame(recorded: StepRecords, stalls: Stalls) -> list[tuple[str, float]]:
    """What of a long step is longer than usual: (phase, ns over all long steps), largest first;
    pauses of the garbage collector are taken out of the phase they lie in only by name."""
    found = []
    for name, values in recorded.phases.items():
        usual = float(np.median(values[recorded.used]))
        more = float(np.maximum(0.0, values[stalls.rows] - usual).sum())
        found.append((name, more))
    pause = float(recorded.column("gc")[stalls.rows].sum())
    if pause > 0:
        found.append(("garbage collection", pause))
    return sorted(found, key=lambda item: -item[1])
