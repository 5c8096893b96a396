"""What the job's step would gain: each change told to the replay of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from advisor.measure.ranks.align import medians
from advisor.measure.ranks.odd import Fleet, Seen
from advisor.measure.ranks.summary import Advice
from advisor.replay.calibration import OTHERS, fault_kind
from advisor.replay.ranks.replay import Change, Gain, Replay

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
HELD_UP = 0.5
"""Of the last rank's excess in a step: ranks that are as far above hold the step up too."""
ALL_OVER = 0.01
"""Of the step: where half of the ranks are as far from the median, they differ all over."""


def price(fleet: Fleet, replay: Replay, seen: Seen) -> Gain:
    """Without what was seen: the rank like the others, the work spread evenly, the link as fast."""
    at, kind = list(seen.who.places), fault_kind(seen.kind, moves=seen.moves)
    if seen.kind == "network":
        return _faster(fleet, replay, at, kind)
    if seen.kind == "pipeline":
        return replay.gain(replay.scaled(_balanced(fleet, replay)), kind)
    usual = usual_work(fleet, replay, set() if seen.moves else set(at))
    if seen.moves:
        return replay.gain(_no_last(replay, usual), kind)
    change = _like_the_others(replay, usual, at)
    if seen.kind == "imbalance":
        change = _spread(fleet, replay, change, at)
    if seen.note == "late":
        entry = replay.entry.copy()
        entry[at] = np.minimum(entry[at], np.median(np.delete(replay.entry, at)))
        change, kind = change._replace(entry=entry), OTHERS
    return replay.gain(change, kind)


class Usual(NamedTuple):
    """Own work of the ranks that have the same part of the job, in their middle."""

    work: Floats
    """By collective of the replay: at the same place of the same step; NaN: not known."""
    tail: Floats
    """By rank."""


def usual_work(fleet: Fleet, replay: Replay, without: set[int]) -> Usual:
    """The middle of the ranks of a stage that have as many collectives in the step as most of them,
    ``without`` some. Place by place: where one is slower in some of the work, only that counts."""
    stage, place = fleet.stage[replay.rank], replay.places()
    code = (stage * len(replay.columns) + replay.at) * (int(place.max()) + 1) + place
    kept = np.isfinite(fleet.own.own)[replay.rank]
    kept &= ~np.isin(replay.rank, sorted(without))
    kept &= replay.same_program(fleet.stage)
    work = np.full(len(code), np.nan)
    order = np.flatnonzero(kept)[np.argsort(code[kept], kind="stable")]
    if len(order):
        names, first = np.unique(code[order], return_index=True)
        middle = medians(replay.work[order], np.append(first, len(order)))
        where = np.minimum(np.searchsorted(names, code), len(names) - 1)
        known = (names[where] == code) & replay.same_program(fleet.stage)
        work[known] = middle[where[known]]
    tail = np.full(len(replay.tail), np.nan)
    for name in np.unique(fleet.stage):
        rows = np.flatnonzero((fleet.stage == name) & replay.whole)
        like = [row for row in rows.tolist() if row not in without]
        if like:
            tail[rows] = float(np.median(replay.tail[like]))
    return Usual(work, tail)


def _like_the_others(replay: Replay, usual: Usual, at: Sequence[int]) -> Change:
    """Some ranks do what takes them longer than the others in the others' time."""
    mine = np.isin(replay.rank, list(at)) & (usual.work < replay.work)
    tail = replay.tail.copy()
    less = [row for row in at if usual.tail[row] < tail[row]]
    tail[less] = usual.tail[less]
    return Change(work=np.where(mine, usual.work, replay.work), tail=tail)


def _spread(fleet: Fleet, replay: Replay, change: Change, at: Sequence[int]) -> Change:
    """What some ranks no longer do is done by all that have the same part of the work, and an
    all-to-all of theirs takes as long as when each of its ranks has the mean of its tokens: it is
    over when the rank with most of them has them."""
    stage, place = fleet.stage[replay.rank], replay.places()
    code = (stage * len(replay.columns) + replay.at) * (int(place.max()) + 1) + place
    _, of = np.unique(code, return_inverse=True)
    assert change.work is not None and change.tail is not None
    same = replay.same_program(fleet.stage)
    left = np.where(same, replay.work - change.work, 0.0)
    work = change.work + np.where(same, _mean(of, left, same), 0.0)
    whole = replay.whole
    tail = change.tail + np.where(whole, _mean(fleet.stage, replay.tail - change.tail, whole), 0.0)
    row = np.unique(replay.row, return_inverse=True)[1]
    most = np.zeros(int(row.max()) + 1)
    np.maximum.at(most, row, replay.amount)
    theirs = np.isin(row, row[np.isin(replay.rank, list(at))]) & (most[row] > 0)
    told = replay.amount > 0
    share = np.divide(_mean(row, replay.amount, told), most[row], out=np.ones(len(row)), where=told)
    transfer = np.where(theirs & told, replay.transfer * share, replay.transfer)
    # of the ranks that nobody waits for any more some may have no file: what others wait for those
    usual = replay.usual.copy()
    if (theirs & told).any():
        usual[told] *= float(np.median(share[theirs & told]))
    transfer = np.fmin(transfer, usual)
    return Change(work=work, tail=tail, transfer=transfer)


def _mean(of: Ints, values: Floats, kept: Bools) -> Floats:
    """Of each, the mean of the ``kept`` ones that have the same number in ``of``; 0: none."""
    total = np.bincount(of, np.where(kept, values, 0.0))
    count = np.bincount(of, kept)
    return np.asarray(np.divide(total, count, out=np.zeros_like(total), where=count > 0)[of])


def _no_last(replay: Replay, usual: Usual) -> Change:
    """Without the ranks that hold a step up: those that have more work in it than most. Where ranks
    differ all over, the next one is as late; then all of them do what most do."""
    steps = len(replay.columns)
    above = np.where(np.isfinite(usual.work), replay.work - usual.work, 0.0)
    shape = (len(replay.tail), steps)
    code = replay.rank * steps + replay.at
    each = np.bincount(code, above, shape[0] * steps).reshape(shape)[replay.whole]
    if float(np.median(np.abs(each))) > ALL_OVER * replay.measured:
        return _all_alike(replay, usual)
    holds = np.zeros(shape, dtype=np.bool_)
    holds[replay.whole] = each > HELD_UP * each.max(axis=0, keepdims=True)
    mine = holds[replay.rank, replay.at] & (usual.work < replay.work)
    return Change(work=np.where(mine, usual.work, replay.work))


def _all_alike(replay: Replay, usual: Usual) -> Change:
    """Every rank at the median of those with its part of the work, at every place: those that are
    faster there too, so that the work is the same and only what differs is gone."""
    work = np.where(np.isfinite(usual.work), usual.work, replay.work)
    tail = np.where(np.isfinite(usual.tail), usual.tail, replay.tail)
    return Change(work=work, tail=tail)


def no_stragglers(fleet: Fleet, replay: Replay) -> Gain:
    """Every rank at the median of its part of the work."""
    return replay.gain(_all_alike(replay, usual_work(fleet, replay, set())))


def no_transfers(replay: Replay, kind: str | None = None) -> Gain:
    """Transfers (of one kind of collective) hidden as a whole; waits for others stay."""
    took = replay.transfer.copy()
    if kind is None:
        took[:] = 0.0
    else:
        took[replay.of_kind(kind)] = 0.0
    return replay.gain(Change(transfer=took))


def advised(replay: Replay, advice: dict[int, Advice]) -> Gain | None:
    """What a rule's findings on some ranks (by place) are worth to the job; ``None``: not priced.

    A rank with less work of its own is earlier at the next collective, which is worth what the
    others waited for it. Of advice about communication, the transfers count, not the waits."""
    gains = {place: a for place, a in advice.items() if a.gain_ns is not None}
    if not gains:
        return None

    def of(which: str) -> float:
        saved = np.zeros(len(replay.tail))
        for place, a in gains.items():
            value = getattr(a, which)
            saved[place] = max(0.0, float(a.gain_ns if value is None else value))  # type: ignore[arg-type]
        if next(iter(gains.values())).category in ("distributed", "communication"):
            return replay.gain(Change(transfer=_hidden(replay, saved))).gain
        own = np.nanmean(np.where(replay.whole[:, None], replay.own, 0.0), axis=1)
        share = np.divide(saved, own, out=np.zeros_like(own), where=own > 0)
        factor = _repeated(np.maximum(0.0, 1 - share), replay)
        return replay.gain(replay.scaled(factor)).gain

    gain, low, high = of("gain_ns"), of("low_ns"), of("high_ns")
    error = min(abs(replay.base - replay.measured), abs(gain))
    low, high = max(0.0, min(gain, low) - error), max(gain, high) + error
    return Gain(max(0.0, gain), low, max(0.0, high))


def _hidden(replay: Replay, saved: Floats) -> Floats:
    """Transfers less what each rank could hide of its exposed communication, ns a step."""
    ranks, steps = len(replay.tail), len(replay.columns)
    exposed = np.bincount(replay.rank, weights=replay.exposed, minlength=ranks) / steps
    share = np.divide(saved, exposed, out=np.zeros(ranks), where=exposed > 0)
    return np.asarray(replay.transfer * (1 - np.minimum(1.0, share))[replay.rank])


def _repeated(factor: Floats, replay: Replay) -> Floats:
    return np.repeat(factor[:, None], len(replay.columns), axis=1)


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


def _faster(fleet: Fleet, replay: Replay, at: Sequence[int], kind: str) -> Gain:
    """Transfers of some ranks as fast as the same ones of groups without them.

    Where each group has one of them, nothing tells what its transfers would take: those are taken
    as slow by the same factor as the others, and the band reaches down to what is worth without
    that."""
    share, known = _slower(fleet, replay, at)
    # what a rank without a file takes part in holds the wait for it, which may be of them
    took = np.fmin(replay.transfer * share, np.where(known, replay.usual, np.nan))
    gain = replay.gain(Change(transfer=took), kind)
    if known.all():
        return gain
    least = replay.gain(Change(transfer=np.where(known, took, replay.transfer)), kind)
    return gain._replace(low=min(gain.low, least.low))


def _slower(fleet: Fleet, replay: Replay, at: Sequence[int]) -> tuple[Floats, Bools]:
    """By collective (cell): usual over own transfer time where some ranks take part, else 1, and
    whether there is a group without them that says so."""
    joined = fleet.joined
    row, rank, key = replay.row, replay.rank, replay.key
    theirs = np.isin(row, row[np.isin(rank, list(at))])
    kinds: dict[tuple[str, int, int], int] = {}
    kind = np.array(
        [kinds.setdefault((k.kind, k.message, k.size), len(kinds)) for k in joined.keys],
        dtype=np.int64,
    )[key]
    size = np.array([k.size for k in joined.keys], dtype=np.int64)[key]
    whole = (size == 0) | (np.bincount(row)[row] >= size)
    share, known = np.ones(len(row)), ~theirs
    took = usual = 0.0
    for one in np.unique(kind[theirs]).tolist():
        mine = np.flatnonzero(theirs & (kind == one))
        clean = ~theirs & (kind == one) & whole
        if not clean.any():  # a group that seems to be without them lacks a member
            known[kind == one] = False
            continue
        level = float(np.median(replay.transfer[clean]))
        known[mine] = True
        for group in np.unique(key[mine]).tolist():
            cells = mine[key[mine] == group]
            own = float(np.median(replay.transfer[cells]))
            if own > level:
                share[cells] = level / own
            took += own * len(cells)
            usual += min(own, level) * len(cells)
    if took > 0:
        share[~known] = usual / took
    return share, known
