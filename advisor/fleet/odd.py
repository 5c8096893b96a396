"""Who is not like the others, by work of their own: nobody is blamed for waiting."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from advisor.fleet.chance import chances, residuals
from advisor.fleet.join import Joined, Waits
from advisor.fleet.profile import OWN, Profile
from advisor.fleet.report import Odd
from advisor.fleet.summary import Summary

CHANCE = 0.002
"""Of a false alarm by each of five searches: together one healthy job of a hundred."""
MIN_SHARE = 0.02
"""Of the step, that a rank's own time is above the others'."""


def find_odd(summaries: Sequence[Summary], own: Profile, joined: Joined, waits: Waits) -> list[Odd]:
    """The odd ones, those that others wait for longest first."""
    group = np.zeros(len(summaries), dtype=np.int64)
    left = residuals(own.own, group)
    chance = chances(left)
    step = float(np.median(own.step_ns))
    found = []
    for place in np.flatnonzero((chance < CHANCE) & (left > MIN_SHARE * step)).tolist():
        middle = np.nanmedian(own.values, axis=0)
        more = own.values[place] - middle
        kind = OWN[int(np.argmax(more[: len(OWN)]))]
        rank = summaries[place].rank
        taken = int(waits.taken[place])
        found.append(
            Odd(
                what="rank",
                name=str(rank),
                ranks=str(rank),
                kind="host" if kind == "copies" else kind,
                moves=False,
                waited_ns=float(waits.caused[place]) / max(1, len(own.steps)),
                last_share=float(waits.late[place]) / taken if taken else None,
                sure=1 - float(chance[place]),
            )
        )
    return sorted(found, key=lambda odd: -(odd.waited_ns or 0.0))
