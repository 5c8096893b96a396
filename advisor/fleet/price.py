"""What the job's step would gain: each change told to the replay of the ranks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from advisor.fleet.network import transfer_excess
from advisor.fleet.odd import Fleet, Seen
from advisor.fleet.replay import Gain, Replay
from advisor.fleet.summary import Advice

Floats = NDArray[np.float64]
HELD_UP = 0.5
"""Of the last rank's excess in a step: ranks that are as far above hold the step up too."""


def price(fleet: Fleet, replay: Replay, seen: Seen) -> Gain:
    """Without what was seen: the rank like the others, the work spread evenly, the link as fast."""
    at = list(seen.who.places)
    if seen.kind == "network":
        return replay.gain(transfer=_as_fast(fleet, replay, at))
    if seen.moves:
        return replay.gain(_no_last(fleet, replay, even=seen.kind == "imbalance"))
    if seen.kind == "pipeline":
        return replay.gain(_balanced(fleet, replay))
    if seen.note == "late":
        entry = replay.entry.copy()
        others = np.delete(replay.entry, at)
        entry[at] = np.minimum(entry[at], np.median(others))
        return replay.gain(_like_the_others(fleet, replay, at), entry=entry)
    if seen.kind == "imbalance":
        return replay.gain(_even(fleet, replay))
    return replay.gain(_like_the_others(fleet, replay, at))


def no_stragglers(fleet: Fleet, replay: Replay) -> Gain:
    """Every rank at most at the median of its part of the work, in every step."""
    return replay.gain(np.minimum(1.0, _to_median(fleet, replay)))


def no_transfers(replay: Replay, kind: str | None = None) -> Gain:
    """Transfers (of one kind of collective) hidden as a whole; waits for others stay."""
    took = replay.transfer.copy()
    if kind is None:
        took[:] = 0.0
    else:
        took[replay.of_kind(kind)] = 0.0
    return replay.gain(transfer=took)


def advised(replay: Replay, advice: dict[int, Advice]) -> Gain | None:
    """What a rule's findings on some ranks (by place) are worth to the job; ``None``: not priced.

    A rank with less work of its own is earlier at the next collective, which is worth what the
    others waited for it. Of advice about communication, the transfers count, not the waits."""
    gains = {place: a for place, a in advice.items() if a.gain_ns is not None}
    if not gains:
        return None

    def of(which: str) -> float:
        saved = np.zeros(len(replay.work))
        for place, a in gains.items():
            value = getattr(a, which)
            saved[place] = max(0.0, float(a.gain_ns if value is None else value))  # type: ignore[arg-type]
        if next(iter(gains.values())).category in ("distributed", "communication"):
            return replay.gain(transfer=_hidden(replay, saved)).gain
        own = replay.work.mean(axis=1)
        share = np.divide(saved, own, out=np.zeros_like(own), where=own > 0)
        factor = np.repeat(np.maximum(0.0, 1 - share)[:, None], replay.work.shape[1], axis=1)
        return replay.gain(factor).gain

    gain, low, high = of("gain_ns"), of("low_ns"), of("high_ns")
    error = min(abs(replay.base - replay.measured), abs(gain))
    low, high = max(0.0, min(gain, low) - error), max(gain, high) + error
    return Gain(max(0.0, gain), low, max(0.0, high))


def _hidden(replay: Replay, saved: Floats) -> Floats:
    """Transfers less what each rank could hide of its exposed communication, ns a step."""
    ranks = len(replay.work)
    steps = replay.work.shape[1]
    exposed = np.bincount(replay.rank, weights=replay.exposed, minlength=ranks) / steps
    share = np.divide(saved, exposed, out=np.zeros(ranks), where=exposed > 0)
    return np.asarray(replay.transfer * (1 - np.minimum(1.0, share))[replay.rank])


def _repeated(factor: Floats, replay: Replay) -> Floats:
    return np.repeat(factor[:, None], replay.work.shape[1], axis=1)


def _like_the_others(fleet: Fleet, replay: Replay, at: list[int]) -> Floats:
    """The work of some ranks, in the mean of the steps, that of the others of their stage."""
    own = fleet.own.own
    factor = np.ones(len(own))
    for place in at:
        like = (fleet.stage == fleet.stage[place]) & np.isfinite(own)
        like[at] = False
        if like.any() and own[place] > 0:
            factor[place] = min(1.0, float(np.median(own[like])) / own[place])
    return _repeated(factor, replay)


def _even(fleet: Fleet, replay: Replay) -> Floats:
    """The work of each stage spread over its ranks."""
    own = fleet.own.own
    factor = np.ones(len(own))
    for name in np.unique(fleet.stage):
        rows = (fleet.stage == name) & np.isfinite(own) & (own > 0)
        if rows.any():
            factor[rows] = own[rows].mean() / own[rows]
    return _repeated(factor, replay)


def _balanced(fleet: Fleet, replay: Replay) -> Floats:
    """The work of all stages spread over the stages."""
    own = fleet.own.own
    names = np.unique(fleet.stage)
    middle = np.array([np.nanmedian(own[fleet.stage == name]) for name in names])
    factor = np.ones(len(own))
    for name, ns in zip(names.tolist(), middle.tolist(), strict=True):
        if ns > 0:
            factor[fleet.stage == name] = float(middle.mean()) / ns
    return _repeated(factor, replay)


def _to_median(fleet: Fleet, replay: Replay) -> Floats:
    """Factors that bring each rank in each step to the median of its stage."""
    factor = replay.ones()
    for name in np.unique(fleet.stage):
        rows = np.flatnonzero(fleet.stage == name)
        own = replay.own[rows]
        if len(rows) < 2 or not np.isfinite(own).any():
            continue
        middle = np.nanmedian(own, axis=0, keepdims=True)
        with np.errstate(divide="ignore", invalid="ignore"):
            factor[rows] = np.where(own > 0, middle / own, 1.0)
    return np.where(np.isfinite(factor), factor, 1.0)


def _no_last(fleet: Fleet, replay: Replay, *, even: bool) -> Floats:
    """Without the ranks that hold a step up; where they differ all over, work spread evenly."""
    to_median = _to_median(fleet, replay)
    above = replay.work * (1 - to_median)
    most = above.max(axis=0, keepdims=True)
    factor = np.where(above > HELD_UP * most, to_median, 1.0)
    if even and (above > HELD_UP * most).mean() > 0.1:
        total = np.where(replay.work > 0, replay.work, np.nan)
        factor = np.nan_to_num(np.nanmean(total, axis=0, keepdims=True) / total, nan=1.0)
    return np.asarray(factor)


def _as_fast(fleet: Fleet, replay: Replay, at: list[int]) -> Floats:
    """Transfers of the collectives of some ranks as those of other groups."""
    _, excess = transfer_excess(fleet)
    joined, waits = fleet.joined, fleet.waits
    slow = np.zeros(joined.rows, dtype=np.bool_)
    slow[joined.row[np.isin(joined.rank, at)]] = True
    saved = np.zeros(joined.rows)
    saved[waits.row] = np.maximum(0.0, np.nan_to_num(excess))
    saved[~slow] = 0.0
    return np.asarray(np.maximum(0.0, replay.transfer - saved[replay.row]))
