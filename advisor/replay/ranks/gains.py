"""Gains of the job's step from changes, in the replay of the ranks."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from advisor.core.finding import Edit
from advisor.core.intervals import Bools, Floats, Ints
from advisor.measure.comm.messages import kind_of
from advisor.measure.ranks.align import group_medians
from advisor.measure.ranks.outliers import Deviation, JobMeasurements
from advisor.replay.ledger import OTHERS, fault_kind
from advisor.replay.ranks.ranks_replay import JobChange, JobGain, RanksReplay

MIN_EXCESS_RATIO = 0.5
"""Minimum share of the last rank's excess in a step at which other ranks also delay the step."""
MAX_MEDIAN_DEVIATION = 0.01
"""Maximum median deviation of ranks, as a share of the step; beyond it all ranks differ."""


def estimate_gain(job: JobMeasurements, replay: RanksReplay, deviation: Deviation) -> JobGain:
    """Estimate the gain of the job's step without a deviation. If a change is uncertain, the low
    end comes from its certain part."""
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
    link as fast. Also return the certain part of the change, or ``None`` if all of it is
    certain."""
    index = list(deviation.members.rank_indices)
    if deviation.kind == "network":
        return _speed_up_links(job, replay, index)
    if deviation.kind == "pipeline":
        return replay.scaled_work(_balance_stages(job, replay)), None
    typical = median_stage_work(job, replay, set() if deviation.rank_varies else set(index))
    if deviation.rank_varies:
        return _remove_last(replay, typical), None
    change = _match_others(replay, typical, index)
    if deviation.kind == "imbalance":
        change = _spread_evenly(job, replay, change, index)
    if deviation.arrives_late:
        entry = replay.entry.copy()
        entry[index] = np.minimum(entry[index], np.median(np.delete(replay.entry, index)))
        change = change._replace(entry=entry)
    if deviation.kind == "extra work":  # at least, all ranks share it
        return change, _spread_evenly(job, replay, change, index)
    return change, None


def combine_changes(replay: RanksReplay, changes: Sequence[JobChange]) -> JobChange:
    """Combine several changes: each removes its time, down to zero."""

    def subtract(name: str, measured: Floats) -> Floats:
        deltas = [v - measured for c in changes if (v := getattr(c, name)) is not None]
        return np.maximum(0.0, measured + sum(deltas)) if deltas else measured

    removed = [c.removed for c in changes if c.removed is not None]
    entries = [replay.entry, *(c.entry for c in changes if c.entry is not None)]
    return JobChange(
        work=subtract("work", replay.work),
        tail=subtract("tail", replay.tail),
        transfer=subtract("transfer", replay.transfer),
        removed=np.logical_or.reduce(removed) if removed else None,
        entry=np.minimum.reduce(entries),
    )


def saving_change(replay: RanksReplay, saved: Floats, *, communication: bool) -> JobChange:
    """Return the change of ranks that save own time, ns per step each. A rank with less own work
    reaches the next collective earlier, which saves the others' waits for it. For
    ``communication``, transfers are hidden, not waits."""
    if communication:
        return JobChange(transfer=_hide_transfers(replay, saved))
    work_ns = np.nanmean(np.where(replay.complete_ranks[:, None], replay.work_ns, 0.0), axis=1)
    share = np.divide(saved, work_ns, out=np.zeros_like(work_ns), where=work_ns > 0)
    return replay.scaled_work(_repeat_by_step(np.maximum(0.0, 1 - share), replay))


def without_collectives(replay: RanksReplay, edit: Edit) -> JobChange | None:
    """Return the job without collectives of up to ``Select.max_bytes``, of the kind in the name;
    the edit's factor of their transfers remains. ``None`` if the edit selects something else."""
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
    remaining = replay.transfer * (edit.factor or 0.0)
    return JobChange(removed=removed, transfer=np.where(removed, remaining, replay.transfer))


class TypicalWork(NamedTuple):
    """Median own work of ranks with the same part of the job, ns."""

    work: Floats
    """Work before each collective of the replay, at the same position of the same step; NaN if
    unknown."""
    tail: Floats
    """Work after the last collective, by rank."""


def median_stage_work(job: JobMeasurements, replay: RanksReplay, without: set[int]) -> TypicalWork:
    """Return a stage's median work over ranks, ``without`` some, with the usual number of
    collectives in the step. It has one median per position: only the slow parts of a rank's work
    count."""
    stage, slot = job.stage[replay.rank], replay.order_in_step()
    code = (stage * len(replay.columns) + replay.step_of_cell) * (int(slot.max()) + 1) + slot
    is_used = np.isfinite(job.profile.work_ns)[replay.rank]
    is_used &= ~np.isin(replay.rank, sorted(without))
    is_used &= replay.runs_same_program(job.stage)
    work = np.full(len(code), np.nan)
    order = np.flatnonzero(is_used)[np.argsort(code[is_used], kind="stable")]
    if len(order):
        names, first = np.unique(code[order], return_index=True)
        medians = group_medians(replay.work[order], np.append(first, len(order)))
        index = np.minimum(np.searchsorted(names, code), len(names) - 1)
        is_known = (names[index] == code) & replay.runs_same_program(job.stage)
        work[is_known] = medians[index[is_known]]
    tail = np.full(len(replay.tail), np.nan)
    for name in np.unique(job.stage):
        rows = np.flatnonzero((job.stage == name) & replay.complete_ranks)
        peers = [row for row in rows.tolist() if row not in without]
        if peers:
            tail[rows] = float(np.median(replay.tail[peers]))
    return TypicalWork(work, tail)


def match_ranks_to_median(
    job: JobMeasurements, replay: RanksReplay, index: Sequence[int]
) -> JobChange:
    """Return the job with some ranks as fast as the median of the others."""
    return _match_others(replay, median_stage_work(job, replay, set(index)), index)


def _match_others(replay: RanksReplay, typical: TypicalWork, ranks: Sequence[int]) -> JobChange:
    """Give some ranks the others' time for work in which they are slower."""
    is_slower = np.isin(replay.rank, list(ranks)) & (typical.work < replay.work)
    tail = replay.tail.copy()
    slower_ranks = [row for row in ranks if typical.tail[row] < tail[row]]
    tail[slower_ranks] = typical.tail[slower_ranks]
    return JobChange(work=np.where(is_slower, typical.work, replay.work), tail=tail)


def _spread_evenly(
    job: JobMeasurements, replay: RanksReplay, change: JobChange, index: Sequence[int]
) -> JobChange:
    """Spread the work that some ranks no longer do over all ranks with the same part. Their
    all-to-alls take as long as if each rank had the mean number of tokens: they end when the rank
    with most tokens has received them."""
    stage, slot = job.stage[replay.rank], replay.order_in_step()
    code = (stage * len(replay.columns) + replay.step_of_cell) * (int(slot.max()) + 1) + slot
    _, group = np.unique(code, return_inverse=True)
    assert change.work is not None and change.tail is not None
    is_comparable = replay.runs_same_program(job.stage)
    removed = np.where(is_comparable, replay.work - change.work, 0.0)
    work = change.work + np.where(is_comparable, _group_mean(group, removed, is_comparable), 0.0)
    complete = replay.complete_ranks
    tail = change.tail + np.where(
        complete, _group_mean(job.stage, replay.tail - change.tail, complete), 0.0
    )
    row = np.unique(replay.row, return_inverse=True)[1]
    max_amount = np.zeros(int(row.max()) + 1)
    np.maximum.at(max_amount, row, replay.amount)
    is_affected = np.isin(row, row[np.isin(replay.rank, list(index))]) & (max_amount[row] > 0)
    filled = replay.amount > 0
    share = np.divide(
        _group_mean(row, replay.amount, filled),
        max_amount[row],
        out=np.ones(len(row)),
        where=filled,
    )
    transfer = np.where(is_affected & filled, replay.transfer * share, replay.transfer)
    # some ranks that no longer delay others may have no file: remove the waits for them
    usual = replay.usual_transfer.copy()
    if (is_affected & filled).any():
        usual[filled] *= float(np.median(share[is_affected & filled]))
    transfer = np.fmin(transfer, usual)
    return JobChange(work=work, tail=tail, transfer=transfer)


def _group_mean(group: Ints, values: Floats, is_used: Bools) -> Floats:
    """Return for each value the mean of the ``is_used`` values in its group, or 0 without any."""
    total = np.bincount(group, np.where(is_used, values, 0.0))
    count = np.bincount(group, is_used)
    return np.asarray(np.divide(total, count, out=np.zeros_like(total), where=count > 0)[group])


def _remove_last(replay: RanksReplay, typical: TypicalWork) -> JobChange:
    """Remove the excess work of the ranks that delay a step. If all ranks differ, the next rank is
    as late; then all ranks get the median."""
    steps = len(replay.columns)
    above = np.where(np.isfinite(typical.work), replay.work - typical.work, 0.0)
    shape = (len(replay.tail), steps)
    code = replay.rank * steps + replay.step_of_cell
    excess = np.bincount(code, above, shape[0] * steps).reshape(shape)[replay.complete_ranks]
    if float(np.median(np.abs(excess))) > MAX_MEDIAN_DEVIATION * replay.measured_ns:
        return _equalize_ranks(replay, typical)
    is_last = np.zeros(shape, dtype=np.bool_)
    is_last[replay.complete_ranks] = excess > MIN_EXCESS_RATIO * excess.max(axis=0, keepdims=True)
    is_reduced = is_last[replay.rank, replay.step_of_cell] & (typical.work < replay.work)
    return JobChange(work=np.where(is_reduced, typical.work, replay.work))


def _equalize_ranks(replay: RanksReplay, typical: TypicalWork) -> JobChange:
    """Give every rank the median work of its part, at every position. Faster ranks get it too, so
    the total work stays and only the differences disappear."""
    work = np.where(np.isfinite(typical.work), typical.work, replay.work)
    tail = np.where(np.isfinite(typical.tail), typical.tail, replay.tail)
    return JobChange(work=work, tail=tail)


def estimate_without_stragglers(job: JobMeasurements, replay: RanksReplay) -> JobGain:
    """Estimate the gain with every rank at the median of its part of the work."""
    return replay.gain(_equalize_ranks(replay, median_stage_work(job, replay, set())))


def no_transfers(replay: RanksReplay, kind: str | None = None) -> JobGain:
    """Estimate the gain with transfers hidden, all or of one kind; waits for others stay."""
    transfer = replay.transfer.copy()
    if kind is None:
        transfer[:] = 0.0
    else:
        transfer[replay.of_kind(kind)] = 0.0
    return replay.gain(JobChange(transfer=transfer))


def _hide_transfers(replay: RanksReplay, saved: Floats) -> Floats:
    """Return transfers minus the exposed communication that each rank could hide, ns."""
    ranks, steps = len(replay.tail), len(replay.columns)
    exposed = np.bincount(replay.rank, weights=replay.exposed, minlength=ranks) / steps
    share = np.divide(saved, exposed, out=np.zeros(ranks), where=exposed > 0)
    return np.asarray(replay.transfer * (1 - np.minimum(1.0, share))[replay.rank])


def _repeat_by_step(factor: Floats, replay: RanksReplay) -> Floats:
    return np.repeat(factor[:, None], len(replay.columns), axis=1)


def _balance_stages(job: JobMeasurements, replay: RanksReplay) -> Floats:
    """Return the own work with all stages' work spread evenly, as a factor per rank and step."""
    work_ns = job.profile.work_ns
    names = np.unique(job.stage)
    medians = np.array([np.nanmedian(work_ns[job.stage == name]) for name in names])
    factor = np.ones(len(work_ns))
    for name, ns in zip(names.tolist(), medians.tolist(), strict=True):
        if ns > 0:
            factor[job.stage == name] = float(medians.mean()) / ns
    return _repeat_by_step(factor, replay)


def _speed_up_links(
    job: JobMeasurements, replay: RanksReplay, ranks: Sequence[int]
) -> tuple[JobChange, JobChange | None]:
    """Make transfers of some ranks as fast as transfers of groups without them.

    If every group of a kind has one of these ranks, its usual transfers are unknown. It then gets
    the others' factor, and only the others are certain."""
    share, is_known = _measure_slowdown(job, replay, ranks)
    # a collective with a rank without a file includes the wait for it, which may be one of these
    # ranks
    faster = np.fmin(replay.transfer * share, np.where(is_known, replay.usual_transfer, np.nan))
    if is_known.all():
        return JobChange(transfer=faster), None
    return JobChange(transfer=faster), JobChange(
        transfer=np.where(is_known, faster, replay.transfer)
    )


def _measure_slowdown(
    job: JobMeasurements, replay: RanksReplay, index: Sequence[int]
) -> tuple[Floats, Bools]:
    """Return, by collective (cell), usual over own transfer time if some of these ranks take part,
    else 1; and whether a group without them shows the usual time."""
    joined = job.joined
    row, rank, key = replay.row, replay.rank, replay.key
    is_affected = np.isin(row, row[np.isin(rank, list(index))])
    kind, size = joined.group_code[row], joined.group_sizes[row]
    is_complete = (size == 0) | (np.bincount(row)[row] >= size)
    share, is_known = np.ones(len(row)), ~is_affected
    own_sum = usual_sum = 0.0
    for item in np.unique(kind[is_affected]).tolist():
        own_part = np.flatnonzero(is_affected & (kind == item))
        is_clean = ~is_affected & (kind == item) & is_complete
        if not is_clean.any():  # a group that seems to be without them lacks a member
            is_known[kind == item] = False
            continue
        usual_median = float(np.median(replay.transfer[is_clean]))
        is_known[own_part] = True
        for group in np.unique(key[own_part]).tolist():
            cells = own_part[key[own_part] == group]
            own_median = float(np.median(replay.transfer[cells]))
            if own_median > usual_median:
                share[cells] = usual_median / own_median
            own_sum += own_median * len(cells)
            usual_sum += min(own_median, usual_median) * len(cells)
    if own_sum > 0:
        share[~is_known] = usual_sum / own_sum
    return share, is_known
