"""Comparison of ranks with traces on one clock: which rank others wait for, and how much
communication is exposed."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import polars as pl

from advisor.core.intervals import Bools, Ints, covered_length
from advisor.measure import Analysis
from advisor.measure.comm.gloo import has_host_collectives
from advisor.measure.ranks.collectives import (
    SYNCHRONIZING,
    collective_table,
    pack_collectives,
    step_summaries,
)
from advisor.measure.ranks.join import JoinedCollectives, match_collectives, measure_waits
from advisor.measure.ranks.summary_schema import RankSummary


class Alignment(NamedTuple):
    """Clocks of several ranks, compared at the ends of their common collectives."""

    error_ns: float | None
    """Error of the aligned clocks, ns: median distance of the worst rank's ends from the median of
    the other ranks' ends. ``None`` if not aligned."""
    reason: str
    """Reason why ranks could not be aligned, empty if they were."""
    offset_ns: dict[int, int]
    """Rank -> offset to add to its clock to get the clock of the reference rank (with offset 0),
    ns. Only aligned ranks."""
    shift_ns: dict[int, int]
    """Rank -> shift to add to times of its trace to get times of the reference's trace, ns."""
    unaligned: tuple[int, ...]
    """Ranks left out: they share no collective with others, or used no device although others did.
    """
    joined: JoinedCollectives | None = None
    """Collectives of the aligned ranks, in the order of ``offset_ns``, or ``None`` without any."""
    cells: pl.DataFrame | None = None
    """Cells of ``joined``, with the columns of ``collectives.collective_table``."""

    @property
    def matched(self) -> int:
        """Number of collectives that two or more aligned ranks share."""
        return 0 if self.joined is None else int(self.joined.matched.sum())


def align_ranks(ranks: Mapping[int, Analysis]) -> Alignment:
    """Put ranks on one clock by the ends of matched collectives, which all ranks leave together.

    All steps take part, including unused ones, with collectives that no rank can leave before all
    have entered."""
    if len(ranks) < 2:
        return Alignment(None, "only one rank is here", {}, {}, ())
    numbers = [number for number, a in ranks.items() if a.device_id is not None]
    if not numbers:
        numbers = [number for number, a in ranks.items() if has_host_collectives(a)]
    reason = "fewer than two ranks have device work"
    while len(numbers) > 1:  # repeat without ranks that share too few, as long as there are any
        tables, summaries = [], []
        for number in numbers:
            a = ranks[number]
            steps = a.steps.table
            tables.append(collective_table(a, steps, SYNCHRONIZING))
            summaries.append(
                RankSummary(
                    rank=number,
                    path=a.trace.meta.path,
                    clock=a.trace.meta.clock,
                    steps=step_summaries(a, steps),
                    collectives=pack_collectives(a, tables[-1], steps),
                )
            )
        joined = match_collectives(summaries)
        is_placed = np.isfinite(joined.clocks.shift)
        reason = joined.clocks.reason
        if reason or not is_placed.any():
            break
        if is_placed.all():
            first_cells = np.cumsum([0, *(table.height for table in tables[:-1])])
            cells = pl.concat(tables)[first_cells[joined.rank] + joined.index_on_rank]
            start = np.array([ranks[number].trace.meta.start_ns for number in numbers])
            return _build_alignment(joined, cells, start, numbers, ranks)
        numbers = [number for number, aligned in zip(numbers, is_placed, strict=True) if aligned]
    return Alignment(None, reason, {}, {}, tuple(ranks))


def _build_alignment(
    joined: JoinedCollectives,
    cells: pl.DataFrame,
    start: Ints,
    numbers: list[int],
    ranks: Mapping[int, object],
) -> Alignment:
    clocks, end = joined.clocks, cells["end"].to_numpy()
    offset = clocks.shift.copy()
    for index in range(len(numbers)):  # at the median time of the rank's matched collectives
        ends = end[(joined.rank == index) & joined.matched[joined.row]]
        offset[index] += clocks.drift[index] * (np.median(ends) + start[index] - joined.origin)
    reference = int(np.flatnonzero(clocks.shift == 0)[0])
    offset -= offset[reference]
    shift = offset + (start - start[reference])
    return Alignment(
        error_ns=clocks.error_ns,
        reason="",
        offset_ns=dict(zip(numbers, np.rint(offset).astype(int).tolist(), strict=True)),
        shift_ns=dict(zip(numbers, np.rint(shift).astype(int).tolist(), strict=True)),
        unaligned=tuple(number for number in ranks if number not in numbers),
        joined=joined,
        cells=cells,
    )


class Skew(NamedTuple):
    """Arrivals at collectives, among the ranks with traces.

    A rank without a trace may be later than all of them: then all ranks wait for it, and no figure
    includes that wait. ``collectives.complete`` says whether all members have traces."""

    collectives: pl.DataFrame
    """Table with one row per collective inside the used steps of all its ranks: ``collective``,
    ``group``, ``bytes``, ``annotation``, ``label``, ``step``, ``seen`` (number of ranks with
    traces), ``complete`` (whether all members have traces; null if group size is unknown), ``last``
    (rank that arrives last; null if all arrive within twice the alignment error), ``skew_ns`` (last
    arrival - first), ``mean_wait_ns`` (of the others; null if no rank is last)."""
    steps: int
    """Number of steps for figures per step: used steps that all ranks have, by name."""


def measure_skew(ranks: Mapping[int, Analysis], alignment: Alignment) -> Skew:
    """Measure how late each rank arrives at the collectives.

    Raises ValueError if ``alignment`` says that the ranks could not be aligned."""
    joined, cells = alignment.joined, alignment.cells
    if joined is None or cells is None:
        raise ValueError(f"skew is not measured: {alignment.reason}")
    numbers = list(alignment.offset_ns)
    analyses = [ranks[number] for number in numbers]
    waits = measure_waits(joined, in_used_steps(joined, analyses))
    names = [set(a.steps.used["name"].to_list()) for a in analyses]
    rank_numbers = pl.Series([*numbers, None], dtype=pl.Int64)
    seen = pl.Series(joined.rank_count[waits.row], dtype=pl.Int64)
    table = cells[joined.first_cell[waits.row]]
    collectives = table.select(
        "collective", "group", "bytes", "annotation", "label", "step"
    ).with_columns(
        seen=seen,
        complete=seen == table["group_size"],
        last=rank_numbers.gather(np.where(waits.last_rank >= 0, waits.last_rank, len(numbers))),
        skew_ns=waits.skew,
        mean_wait_ns=pl.Series(waits.mean_wait).set(pl.Series(waits.last_rank < 0), None),
    )
    return Skew(collectives, max(1, len(set.intersection(*names))))


def in_used_steps(joined: JoinedCollectives, analyses: Sequence[Analysis]) -> Bools:
    """Return whether each row is in a used step of each of its ranks."""
    is_inside = np.zeros(len(joined.rank), dtype=np.bool_)
    for index, a in enumerate(analyses):
        of_rank = joined.rank == index
        is_inside[of_rank] = a.steps.table["used"].to_numpy()[joined.step[of_rank]]
    return np.logical_and.reduceat(is_inside, joined.first_cell[:-1])


def exposed_by_rank(ranks: Mapping[int, Analysis]) -> pl.DataFrame:
    """Measure communication per rank and step, ns: ``rank``, ``step`` (name), ``step_ns``,
    ``exposed`` (not under compute), ``communication`` (all). Only ranks with device work."""
    parts = []
    for number, a in ranks.items():
        if a.device_id is None:
            continue
        used = a.steps.used
        start, end = used["ts"].to_numpy(), used["end"].to_numpy()
        parts.append(
            pl.DataFrame(
                {
                    "rank": np.full(used.height, number, dtype=np.int64),
                    "step": used["name"],
                    "step_ns": used["dur"],
                    "exposed": covered_length(start, end, a.breakdown.communication),
                    "communication": covered_length(start, end, a.breakdown.all_communication),
                }
            )
        )
    schema = {"rank": pl.Int64, "step": pl.String} | dict.fromkeys(
        ("step_ns", "exposed", "communication"), pl.Int64
    )
    return pl.concat(parts) if parts else pl.DataFrame(schema=schema)
