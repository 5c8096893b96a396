"""Which ranks have the same part of the work: the stages of a pipeline, by who meets whom."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from advisor.measure.ranks.join import Joined

Ints = NDArray[np.int64]

MAX_STAGES = 64
FEW = 4
"""Collectives of all ranks in a step that do not make them one stage: a norm, a loss, a flag."""


def find_stages(joined: Joined, ranks: int, steps: int) -> Ints:
    """By rank (place): its stage, numbered by the first rank of each; all 0: there is no pipeline.

    Ranks that share collectives of part of the job are of one stage; stages exchange only sends and
    receives. Where nothing is sent, or all ranks share the step's collectives, there is one.
    """
    item = np.zeros(ranks, dtype=np.int64)
    sends = np.array([key.kind == "send_recv" for key in joined.keys], dtype=np.bool_)
    if not joined.rows or not sends.any():
        return item
    pieces = np.bincount(joined.rank[sends[joined.key[joined.row]]], minlength=ranks)
    active = np.bincount(joined.rank, minlength=ranks) > 0
    if (pieces[active] > 0).mean() < 0.5:
        return item
    sync = np.array([key.synchronising for key in joined.keys], dtype=np.bool_)[joined.key]
    whole = joined.seen >= 0.9 * active.sum()
    if int((sync & whole).sum()) > FEW * max(1, steps):
        return item
    use = (sync & ~whole & (joined.seen > 1))[joined.row]
    label = _components(joined.rank[use], joined.row[use], ranks)
    label = np.where(active, label, -1)
    names = np.unique(label[active])
    if not 2 <= len(names) <= MAX_STAGES:
        return item
    return np.maximum(np.searchsorted(names, label), 0).astype(np.int64)


def _components(rank: Ints, row: Ints, ranks: int) -> Ints:
    """The least rank that each is connected to by shared rows."""
    label = np.arange(ranks, dtype=np.int64)
    if not len(rank):
        return label
    _, row = np.unique(row, return_inverse=True)
    least = np.empty(int(row.max()) + 1, dtype=np.int64)
    while True:  # as many rounds as the longest chain of groups
        least.fill(ranks)
        np.minimum.at(least, row, label[rank])
        fresh = label.copy()
        np.minimum.at(fresh, rank, least[row])
        if (fresh == label).all():
            return label
        label = fresh
