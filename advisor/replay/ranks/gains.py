"""Gains of the job's step from changes, in the replay of the ranks."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from advisor.core.finding import Edit
from advisor.core.intervals import Bools, Floats, Ints
from advisor.measure.comm.messages import kind_of
from advisor.measure.ranks.align import group_medians
from advisor.measure.ranks.outliers import Deviation, JobMeasurements
from advisor.replay.predictions import OTHERS, fault_kind
from advisor.replay.ranks.ranks_replay import JobChange, JobGain, RanksReplay

HELD_UP = 0.5
"""Share of the last rank's excess in a step from which other ranks hold the step up too."""
ALL_OVER = 0.01
"""Share of the step: where half of the ranks are farther from the median, all ranks differ."""


def estimate_gain(job: JobMeasurements, replay: RanksReplay, deviation: Deviation) -> JobGain:
    """Estimate the gain of the job's step without a deviation. Where a change is not certain, the
    low end is of the part that is."""
    change, certain = change_without(job, replay, deviation)
    kind = fault_kind(deviation.kind, moves=deviation.rank_varies)
    gain = replay.gain(change, OTHERS if deviation.arrives_late else kind)
    if certain is None:
        return gain
    return gain._replace(low=min(gain.low, replay.gain(certain, kind).low))


def change_without(
    job: JobMeasurements, replay: RanksReplay, deviation: Deviation
) -> tuple[JobChange, JobChange | None]:
    """Return the job without a deviation: the rank like the others, the work spread evenly, the
    link as fast. And the part of the change that is certain; ``None``: all of it."""
    index = list(deviation.members.rank_indices)
    if deviation.kind == "network":
        return _speed_up_links(job, replay, index)
    if deviation.kind == "pipeline":
        return replay.scaled_work(_balanced(job, replay)), None
    usual = median_stage_work(job, replay, set() if deviation.rank_varies else set(index))
    if deviation.rank_varies:
        return _no_last(replay, usual), None
    change = _like_the_others(replay, usual, index)
    if deviation.kind == "imbalance":
        change = _spread_evenly(job, replay, change, index)
    if deviation.arrives_late:
        entry = replay.entry.copy()
        entry[index] = np.minimum(entry[index], np.median(np.delete(replay.entry, index)))
        change = change._replace(entry=entry)
    return change, None


def combine_changes(replay: RanksReplay, changes: Sequence[JobChange]) -> JobChange:
    """Combine several changes: the time that each removes is gone, as far as there is any."""

    def less(name: str, measured: Floats) -> Floats:
        deltas = [v - measured for c in changes if (v := getattr(c, name)) is not None]
        return np.maximum(0.0, measured + sum(deltas)) if deltas else measured

    removed = [c.removed for c in changes if c.removed is not None]
    entries = [replay.entry, *(c.entry for c in changes if c.entry is not None)]
    return JobChange(
        work=less("work", replay.work),
        tail=less("tail", replay.tail),
        transfer=less("transfer", replay.transfer),
        removed=np.logical_or.reduce(removed) if removed else None,
        entry=np.minimum.reduce(entries),
    )


def saving_change(replay: RanksReplay, saved: Floats, *, communication: bool) -> JobChange:
    """Return the change of ranks that save own time, ns per step each. A rank with less work of its
    own reaches the next collective earlier, which saves the others' waits for it. Of
    ``communication`` the transfers are hidden, not the waits."""
    if communication:
        return JobChange(transfer=_hide_transfers(replay, saved))
    own = np.nanmean(np.where(replay.complete_ranks[:, None], replay.own_ns, 0.0), axis=1)
    share = np.divide(saved, own, out=np.zeros_like(own), where=own > 0)
    return replay.scaled_work(_repeated(np.maximum(0.0, 1 - share), replay))


def without_collectives(replay: RanksReplay, edit: Edit) -> JobChange | None:
    """Return the job without collectives of up to ``Select.max_bytes``, of the kind that their name
    shows; the edit's factor of their transfers remains. ``None``: the edit is not about these."""
    select = edit.select
    if select.max_bytes is None:
        return None
    name = select.name.strip("^$")
    kind = (kind_of(name) or "other") if name else None
    removed = np.array(
        [
            key.kind == (kind or key.kind) and 0 < key.message <= select.max_bytes
            for key in replay.keys
        ],
        dtype=np.bool_,
    )[replay.key]
    left = replay.transfer * (edit.factor or 0.0)
    return JobChange(removed=removed, transfer=np.where(removed, left, replay.transfer))


class TypicalWork(NamedTuple):
    """Median own work of the ranks that have the same part of the job, ns."""

    work: Floats
    """Work by collective of the replay: at the same place of the same step; NaN: unknown."""
    tail: Floats
    """Work after the last collective, by rank."""


def median_stage_work(job: JobMeasurements, replay: RanksReplay, without: set[int]) -> TypicalWork:
    """Return a stage's median work over ranks, ``without`` some, with as many collectives in the
    step as most. It is place by place: where a rank is slower in some work, only that counts."""
    stage, place = job.stage[replay.rank], replay.order_in_step()
    code = (stage * len(replay.columns) + replay.step_of_cell) * (int(place.max()) + 1) + place
    kept = np.isfinite(job.profile.own_ns)[replay.rank]
    kept &= ~np.isin(replay.rank, sorted(without))
    kept &= replay.runs_same_program(job.stage)
    work = np.full(len(code), np.nan)
    order = np.flatnonzero(kept)[np.argsort(code[kept], kind="stable")]
    if len(order):
        names, first = np.unique(code[order], return_index=True)
        middle = group_medians(replay.work[order], np.append(first, len(order)))
        where = np.minimum(np.searchsorted(names, code), len(names) - 1)
        known = (names[where] == code) & replay.runs_same_program(job.stage)
        work[known] = middle[where[known]]
    tail = np.full(len(replay.tail), np.nan)
    for name in np.unique(job.stage):
        rows = np.flatnonzero((job.stage == name) & replay.complete_ranks)
        like = [row for row in rows.tolist() if row not in without]
        if like:
            tail[rows] = float(np.median(replay.tail[like]))
    return TypicalWork(work, tail)


def match_ranks_to_median(
    job: JobMeasurements, replay: RanksReplay, index: Sequence[int]
) -> JobChange:
    """Return the job with some ranks as fast as the median of the others."""
    return _like_the_others(replay, median_stage_work(job, replay, set(index)), index)


def _like_the_others(replay: RanksReplay, usual: TypicalWork, at: Sequence[int]) -> JobChange:
    """Give some ranks the others' time for the work that takes them longer."""
    own = np.isin(replay.rank, list(at)) & (usual.work < replay.work)
    tail = replay.tail.copy()
    less = [row for row in at if usual.tail[row] < tail[row]]
    tail[less] = usual.tail[less]
    return JobChange(work=np.where(own, usual.work, replay.work), tail=tail)


def _spread_evenly(
    job: JobMeasurements, replay: RanksReplay, change: JobChange, index: Sequence[int]
) -> JobChange:
    """Spread the work that some ranks no longer do over all ranks with the same part of it. Their
    all-to-alls take as long as if each rank had the mean of the tokens: they end when the rank with
    most tokens has them."""
    stage, place = job.stage[replay.rank], replay.order_in_step()
    code = (stage * len(replay.columns) + replay.step_of_cell) * (int(place.max()) + 1) + place
    _, of = np.unique(code, return_inverse=True)
    assert change.work is not None and change.tail is not None
    same = replay.runs_same_program(job.stage)
    left = np.where(same, replay.work - change.work, 0.0)
    work = change.work + np.where(same, _mean(of, left, same), 0.0)
    whole = replay.complete_ranks
    tail = change.tail + np.where(whole, _mean(job.stage, replay.tail - change.tail, whole), 0.0)
    row = np.unique(replay.row, return_inverse=True)[1]
    most = np.zeros(int(row.max()) + 1)
    np.maximum.at(most, row, replay.amount)
    theirs = np.isin(row, row[np.isin(replay.rank, list(index))]) & (most[row] > 0)
    known = replay.amount > 0
    share = np.divide(
        _mean(row, replay.amount, known), most[row], out=np.ones(len(row)), where=known
    )
    transfer = np.where(theirs & known, replay.transfer * share, replay.transfer)
    # of the ranks that nobody waits for any more some may have no file: what others wait for those
    usual = replay.usual_transfer.copy()
    if (theirs & known).any():
        usual[known] *= float(np.median(share[theirs & known]))
    transfer = np.fmin(transfer, usual)
    return JobChange(work=work, tail=tail, transfer=transfer)


def _mean(of: Ints, values: Floats, kept: Bools) -> Floats:
    """Return for each value the ``kept`` values' mean with its number in ``of``; 0: none."""
    total = np.bincount(of, np.where(kept, values, 0.0))
    count = np.bincount(of, kept)
    return np.asarray(np.divide(total, count, out=np.zeros_like(total), where=count > 0)[of])


def _no_last(replay: RanksReplay, usual: TypicalWork) -> JobChange:
    """Remove the excess of the ranks that hold a step up: more work than most. Where all ranks
    differ, the next one is as late; then all of them are given the median."""
    steps = len(replay.columns)
    above = np.where(np.isfinite(usual.work), replay.work - usual.work, 0.0)
    shape = (len(replay.tail), steps)
    code = replay.rank * steps + replay.step_of_cell
    each = np.bincount(code, above, shape[0] * steps).reshape(shape)[replay.complete_ranks]
    if float(np.median(np.abs(each))) > ALL_OVER * replay.measured_ns:
        return _all_similar(replay, usual)
    holds = np.zeros(shape, dtype=np.bool_)
    holds[replay.complete_ranks] = each > HELD_UP * each.max(axis=0, keepdims=True)
    own = holds[replay.rank, replay.step_of_cell] & (usual.work < replay.work)
    return JobChange(work=np.where(own, usual.work, replay.work))


def _all_similar(replay: RanksReplay, usual: TypicalWork) -> JobChange:
    """Give every rank the median work of its part, at every place. Faster ranks get it too, so the
    total work stays and only the differences are gone."""
    work = np.where(np.isfinite(usual.work), usual.work, replay.work)
    tail = np.where(np.isfinite(usual.tail), usual.tail, replay.tail)
    return JobChange(work=work, tail=tail)


def estimate_without_stragglers(job: JobMeasurements, replay: RanksReplay) -> JobGain:
    """Estimate the gain with every rank at the median of its part of the work."""
    return replay.gain(_all_similar(replay, median_stage_work(job, replay, set())))


def no_transfers(replay: RanksReplay, kind: str | None = None) -> JobGain:
    """Estimate the gain with transfers hidden, all or of one kind; waits for others stay."""
    took = replay.transfer.copy()
    if kind is None:
        took[:] = 0.0
    else:
        took[replay.of_kind(kind)] = 0.0
    return replay.gain(JobChange(transfer=took))


def _hide_transfers(replay: RanksReplay, saved: Floats) -> Floats:
    """Return transfers less what each rank could hide of its exposed communication, ns."""
    ranks, steps = len(replay.tail), len(replay.columns)
    exposed = np.bincount(replay.rank, weights=replay.exposed, minlength=ranks) / steps
    share = np.divide(saved, exposed, out=np.zeros(ranks), where=exposed > 0)
    return np.asarray(replay.transfer * (1 - np.minimum(1.0, share))[replay.rank])


def _repeated(factor: Floats, replay: RanksReplay) -> Floats:
    return np.repeat(factor[:, None], len(replay.columns), axis=1)


def _balanced(job: JobMeasurements, replay: RanksReplay) -> Floats:
    """Return the own work with all stages' work spread evenly, as a factor per rank and step."""
    own = job.profile.own_ns
    names = np.unique(job.stage)
    middle = np.array([np.nanmedian(own[job.stage == name]) for name in names])
    factor = np.ones(len(own))
    for name, ns in zip(names.tolist(), middle.tolist(), strict=True):
        if ns > 0:
            factor[job.stage == name] = float(middle.mean()) / ns
    return _repeated(factor, replay)


def _speed_up_links(
    job: JobMeasurements, replay: RanksReplay, at: Sequence[int]
) -> tuple[JobChange, JobChange | None]:
    """Make transfers of some ranks as fast as those of groups without them.

    If every group of a kind has one of these ranks, its usual transfers are unknown. It then gets
    the others' factor, and only the others are certain."""
    share, known = _slower(job, replay, at)
    # what a rank without a file takes part in holds the wait for it, which may be of them
    took = np.fmin(replay.transfer * share, np.where(known, replay.usual_transfer, np.nan))
    if known.all():
        return JobChange(transfer=took), None
    return JobChange(transfer=took), JobChange(transfer=np.where(known, took, replay.transfer))


def _slower(
    job: JobMeasurements, replay: RanksReplay, index: Sequence[int]
) -> tuple[Floats, Bools]:
    """Return, by collective (cell), usual over own transfer time where some ranks take part, else
    1. And whether a group without them shows the usual time."""
    joined = job.joined
    row, rank, key = replay.row, replay.rank, replay.key
    theirs = np.isin(row, row[np.isin(rank, list(index))])
    kind, size = joined.group_code[row], joined.group_sizes[row]
    whole = (size == 0) | (np.bincount(row)[row] >= size)
    share, known = np.ones(len(row)), ~theirs
    took = usual = 0.0
    for item in np.unique(kind[theirs]).tolist():
        own_part = np.flatnonzero(theirs & (kind == item))
        clean = ~theirs & (kind == item) & whole
        if not clean.any():  # a group that seems to be without them lacks a member
            known[kind == item] = False
            continue
        level = float(np.median(replay.transfer[clean]))
        known[own_part] = True
        for group in np.unique(key[own_part]).tolist():
            cells = own_part[key[own_part] == group]
            own = float(np.median(replay.transfer[cells]))
            if own > level:
                share[cells] = level / own
            took += own * len(cells)
            usual += min(own, level) * len(cells)
    if took > 0:
        share[~known] = usual / took
    return share, known
