"""Two timelines under each other: how far their times are apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from advisor.measure.ranks.ranks import align

if TYPE_CHECKING:
    from advisor.dashboard.session import Loaded
    from advisor.measure import Analysis

CLOCK = "on one clock, by their collectives"
STEP = "each from its first analysed step"
BEGIN = "each from its first event"


class Shift(NamedTuple):
    """What to add to a time of the one to get the same moment of the other."""

    ns: int
    how: str
    """What "the same moment" means, in words."""


def shift(one: tuple[Loaded, int], other: tuple[Loaded, int]) -> Shift:
    """Of two ranks, given with the run each is of.

    Ranks of one run are on one clock where their collectives tell it; everything else is put
    together where the first analysed step begins.
    """
    (run, a), (other_run, b) = one, other
    if run is other_run and a != b:
        alignment = run.view("alignment", lambda: align(run.analyses))
        known = alignment.shift_ns
        if alignment.error_ns is not None and a in known and b in known:
            return Shift(round(known[a] - known[b]), CLOCK)
    first = [_first_step(r.analyses[rank]) for r, rank in (one, other)]
    if None not in first:
        return Shift((first[1] or 0) - (first[0] or 0), STEP)
    return Shift(0, BEGIN)


def _first_step(a: Analysis) -> int | None:
    if a.steps.source == "whole trace" or not len(a.spans):
        return None
    return int(a.spans.start[0])
