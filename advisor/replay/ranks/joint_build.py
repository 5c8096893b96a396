"""Which ranks are replayed together, over which steps, and where they meet."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from advisor.measure.ranks.clocks import Alignment, Matches, align
from advisor.replay.build import MAX_NODES, representative_steps
from advisor.replay.graph import Array

if TYPE_CHECKING:
    from collections.abc import Mapping

    from advisor.measure import Analysis

MAX_RANKS = 4
"""Ranks that are replayed together: the analysed one, and those that are last most often. What
the others were waited for stays in the collectives as measured."""
MAX_JOINT_NODES = 2 * MAX_NODES
"""Nodes that they may have together, about."""


class JointRanks(NamedTuple):
    """Ranks that are replayed together, the analysed one first, and the collectives they share."""

    ranks: tuple[int, ...]
    analyses: tuple[Analysis, ...]
    steps: tuple[tuple[int, int], ...]
    """For each rank the same steps: rows of its steps table, first and one after the last."""
    shift: tuple[int, ...]
    """What to add to times of each rank's trace to have them on one clock, ns."""
    row: Array
    """A row a collective, a column a rank: row of ``trace.gpu``, -1: not on this rank."""


def find_joint_ranks(rank: int, ranks: Mapping[int, Analysis]) -> JointRanks | None:
    """Who is replayed with ``rank``; ``None``: nobody, because there are no other ranks, they
    cannot be put on one clock, or they do not have the same steps."""
    if len(ranks) < 2 or ranks[rank].steps.used.is_empty() or ranks[rank].device_id is None:
        return None
    alignment = align(ranks)
    matches = alignment.matches
    if matches is None or alignment.error_ns is None or rank not in alignment.shift_ns:
        return None
    chosen = _latest(rank, alignment, matches)
    a = ranks[rank]
    first, last = representative_steps(a, min(MAX_NODES, MAX_JOINT_NODES // len(chosen)))
    names = a.steps.table["name"][first:last].to_list()
    steps = {number: _same_steps(ranks[number], names) for number in chosen}
    there = [number for number in chosen if steps[number] is not None]
    if len(there) < 2 or rank not in there:
        return None
    columns = [matches.ranks.index(number) for number in there]
    row = np.stack(
        [_rows(ranks[n], matches, c) for n, c in zip(there, columns, strict=True)], axis=1
    )
    row = row[(row >= 0).sum(axis=1) > 1]
    if not len(row):
        return None
    return JointRanks(
        ranks=tuple(there),
        analyses=tuple(ranks[n] for n in there),
        steps=tuple(found for n in there if (found := steps[n]) is not None),
        shift=tuple(alignment.shift_ns[n] for n in there),
        row=row,
    )


def _latest(rank: int, alignment: Alignment, matches: Matches) -> list[int]:
    """The rank itself, then those for which the others wait longest, at most MAX_RANKS."""
    columns = [c for c, n in enumerate(matches.ranks) if n in alignment.shift_ns]
    numbers = [matches.ranks[c] for c in columns]
    shift = np.array([alignment.shift_ns[n] for n in numbers], dtype=float)
    arrival = matches.start[:, columns] + shift
    latest = np.nanmax(arrival, axis=1, keepdims=True)
    spread = np.nan_to_num(latest - np.nanmin(arrival, axis=1, keepdims=True))
    caused = np.where(arrival == latest, spread, 0.0).sum(axis=0)
    order = sorted(zip(-caused, numbers, strict=True))
    return [rank, *(n for _, n in order if n != rank)][:MAX_RANKS]


def _same_steps(a: Analysis, names: list[str]) -> tuple[int, int] | None:
    """The steps of these names, one after the other; ``None``: it does not have them."""
    own = a.steps.table["name"].to_list()
    if a.trace.main_thread is None or not names or names[0] not in own:
        return None
    first = own.index(names[0])
    return (first, first + len(names)) if own[first : first + len(names)] == names else None


def _rows(a: Analysis, matches: Matches, column: int) -> Array:
    """The row of ``trace.gpu`` of each matched collective, -1: none."""
    gpu = a.trace.gpu
    rows = np.flatnonzero(
        a.kernels["communication"].to_numpy() & (gpu["device"] == a.device_id).to_numpy()
    )
    ts, dur = gpu["ts"].to_numpy()[rows], gpu["dur"].to_numpy()[rows]
    at = {
        (start, start + length): row
        for start, length, row in zip(ts.tolist(), dur.tolist(), rows.tolist(), strict=True)
    }
    return np.array(
        [
            -1 if np.isnan(start) else at.get((int(start), int(end)), -1)
            for start, end in zip(
                matches.start[:, column].tolist(), matches.end[:, column].tolist(), strict=True
            )
        ],
        dtype=np.int64,
    )
