"""``measure_waits`` for ranks whose traces are here: who keeps whom waiting, by rank."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import polars as pl

from advisor.measure import Analysis
from advisor.measure.ranks.join import CollectiveWaits, measure_waits
from advisor.measure.ranks.skew import Alignment, in_used_steps, measure_skew


def waits_of(ranks: Mapping[int, Analysis], alignment: Alignment) -> CollectiveWaits:
    """Measure waits at the collectives that ``measure_skew`` lists."""
    assert alignment.joined is not None
    analyses = [ranks[number] for number in alignment.offset_ns]
    return measure_waits(alignment.joined, in_used_steps(alignment.joined, analyses))


def stragglers(ranks: Mapping[int, Analysis], alignment: Alignment) -> pl.DataFrame:
    """A row for each rank: ``collectives`` that it takes part in, ``last`` (at how many it is the
    last), ``last_share``, and ns per step: ``caused_wait_ns`` (mean wait of the others for it), its
    exposed part, and its own ``wait_ns`` and ``exposed_wait_ns``."""
    assert alignment.joined is not None
    waits, numbers = waits_of(ranks, alignment), list(alignment.offset_ns)
    owner, steps = alignment.joined.rank[waits.cells], measure_skew(ranks, alignment).steps
    return pl.DataFrame(
        {
            "rank": numbers,
            "collectives": waits.collective_count,
            "last": waits.last_count,
            "last_share": waits.last_count / waits.collective_count,
            "caused_wait_ns": waits.caused_ns / steps,
            "caused_exposed_ns": waits.caused_exposed_ns / steps,
            "wait_ns": np.bincount(owner, waits.wait, len(numbers)) / steps,
            "exposed_wait_ns": np.bincount(owner, waits.exposed, len(numbers)) / steps,
        }
    )


def times_by_rank(
    ranks: Mapping[int, Analysis], alignment: Alignment, name: str
) -> dict[int, list[int]]:
    """``wait`` or ``exposed`` of each rank at each collective that all ranks share, ns."""
    assert alignment.joined is not None
    waits = waits_of(ranks, alignment)
    owner, values = alignment.joined.rank[waits.cells], np.rint(getattr(waits, name)).astype(int)
    return {n: values[owner == place].tolist() for place, n in enumerate(alignment.offset_ns)}
