"""Collectives matched, clocks brought together, waits: against the analysis of few ranks."""

from __future__ import annotations

import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from advisor.advise.ranks.task import summarize_file
from advisor.core.errors import AdvisorError
from advisor.measure import Analysis
from advisor.measure.ranks.join import match_collectives, measure_waits
from advisor.measure.ranks.skew import align_ranks, measure_skew
from advisor.measure.ranks.summary_schema import pack, unpack
from advisor.read import open_run
from tests.measure.stragglers import stragglers

sys.path.insert(0, str(Path(__file__).parent))
from job_by_hand import MS, Collective, Item, Work, run

REAL = {
    "dlrm": [f"dlrm_8ranks/worker{rank}.pt.trace.json.gz" for rank in range(8)],
    "two": [f"two_ranks_rank{rank}.json.gz" for rank in range(2)],
}


@pytest.mark.parametrize("name", REAL)
def test_waits_equal_those_of_the_full_rank_analysis(
    name: str, shared_file: Callable[[str], str]
) -> None:
    files = [shared_file(file) for file in REAL[name]]
    run_of = open_run(files)
    analyses = {rank: Analysis(run_of.window(rank)) for rank in run_of.ranks}
    alignment = align_ranks(analyses)
    assert alignment.error_ns is not None
    few = measure_skew(analyses, alignment)
    table = stragglers(analyses, alignment).sort("rank")
    summaries = sorted((summarize_file(file) for file in files), key=lambda s: s.rank)
    joined = match_collectives(summaries)
    waits = measure_waits(joined)
    assert [s.rank for s in summaries] == table["rank"].to_list()
    assert waits.collective_count.tolist() == table["collectives"].to_list()
    assert waits.last_count.tolist() == table["last"].to_list()
    near = 4 * alignment.error_ns * len(waits.row)
    assert np.allclose(waits.caused_ns, few.steps * table["caused_wait_ns"].to_numpy(), atol=near)
    own_waits = np.bincount(joined.rank[waits.cells], waits.wait, len(summaries))
    assert np.allclose(own_waits, few.steps * table["wait_ns"].to_numpy(), atol=near)
    first = min(analyses)
    start = {s.rank: s for s in summaries}
    for place, summary in enumerate(summaries):
        shift = joined.clocks.shift[place] - joined.clocks.shift[summaries.index(start[first])]
        expected = alignment.offset_ns[summary.rank] - alignment.offset_ns[first]
        assert shift == pytest.approx(expected, abs=4 * alignment.error_ns)


def test_clock_offsets_and_drift_are_found_through_group_chains() -> None:
    ranks, rng = 32, np.random.default_rng(3)
    shift, drift = rng.normal(0, 4 * MS, 4), rng.normal(0, 4e-5, 4)
    work = rng.uniform(0.5, 1.5, (ranks, 3, 40))

    def program(rank: int, step: int) -> list[Item]:
        items: list[Item] = []
        for number in range(40):
            items.append(Work(MS * work[rank, step, number]))
            if number % 2:
                members = tuple(range(rank % 8, ranks, 8))
                items.append(Collective(f"dp{rank % 8}", members, 0.1 * MS))
            else:
                members = tuple(range(rank // 8 * 8, rank // 8 * 8 + 8))
                items.append(Collective(f"tp{rank // 8}", members, 0.1 * MS))
        return items

    ran = run(ranks, 3, program, shift=lambda r: shift[r // 8], drift=lambda r: drift[r // 8])
    joined = match_collectives(ran.summaries)
    assert joined.clocks.error_ns is not None
    assert joined.clocks.error_ns < 1_000
    # on the common clock every collective ends for all at once
    for first, last in zip(joined.first_cell[:-1], joined.first_cell[1:], strict=True):
        assert np.ptp(joined.end[first:last]) < 5_000
    assert joined.matched.all()
    shift_difference = joined.clocks.shift + shift[np.arange(ranks) // 8]
    assert np.ptp(shift_difference) < 20_000


def test_stages_joined_by_sends_only_share_one_clock() -> None:
    def program(rank: int, step: int) -> list[Item]:
        stage = rank // 2
        items: list[Item] = [Work((1.0 + 0.1 * rank) * MS)]
        for number in range(6):
            peer = rank ^ 2
            name = f"p2p{min(rank, peer)}"
            items += [Collective(name, (min(rank, peer), max(rank, peer)), 5_000, "send_recv")]
            items += [Work(0.2 * MS), Collective(f"tp{stage}", (2 * stage, 2 * stage + 1), 9_000)]
            items += [Work(0.1 * MS * (number + 1))]
        return items

    ran = run(4, 2, program, shift=lambda rank: 3.0 * MS * (rank // 2))
    clocks = match_collectives(ran.summaries).clocks
    assert np.isfinite(clocks.shift).all()
    assert clocks.shift[2] - clocks.shift[0] == pytest.approx(-3.0 * MS, abs=1_000)


def test_ranks_with_unequal_step_counts_match_in_common_steps() -> None:
    def program(rank: int, step: int) -> list[Item]:
        return [Work((1 + 0.1 * rank) * MS), Collective("world", (0, 1, 2), 10_000)] * 4

    complete = run(3, 5, program, sequenced=False).summaries
    short = complete[2]
    assert short.collectives is not None
    step = unpack(short.collectives.step)
    rows = step >= 2
    columns = {
        name: pack(unpack(getattr(short.collectives, name))[rows])
        for name in ("key", "order", "start", "end", "exposed", "work")
    }
    cut = replace(
        short,
        steps=short.steps[2:],
        collectives=replace(short.collectives, step=pack(step[rows] - 2), **columns),
    )
    joined = match_collectives([complete[0], complete[1], cut])
    assert sorted(joined.rank_count.tolist()) == [2] * 8 + [3] * 12
    assert measure_waits(joined).last_count.tolist() == [0, 8, 12]


def test_summary_with_inconsistent_columns_is_refused() -> None:
    ran = run(2, 1, lambda rank, step: [Work(MS), Collective("world", (0, 1), 10.0)] * 3)
    bad = ran.summaries[1]
    assert bad.collectives is not None
    for change in (
        {"key": pack(np.array([0, 0, 9]))},
        {"start": pack(np.array([1, 2]))},
        {"step": pack(np.array([0, 0, 5]))},
        {"end": pack(np.array([0, 0, 0]))},
    ):
        broken = replace(bad, collectives=replace(bad.collectives, **change))
        with pytest.raises(AdvisorError, match="damaged"):
            match_collectives([ran.summaries[0], broken])


def test_two_runs_of_one_script_are_separate_jobs() -> None:
    def program(rank: int, step: int) -> list[Item]:
        return [Work(MS), Collective("world", (0, 1), 10_000)] * 5

    ran = run(2, 1, program, shift=lambda rank: rank * 300e9)
    clocks = match_collectives(ran.summaries).clocks
    assert clocks.error_ns is None
    assert "300 s apart" in clocks.reason


def test_thousand_ranks_of_thousand_collectives_fit_in_memory() -> None:
    ranks, count = 1024, 1000
    rng = np.random.default_rng(1)
    ran = run(2, 1, lambda rank, step: [Work(MS), Collective("world", (0, 1), 10.0)])
    template = ran.summaries[0]
    assert template.collectives is not None
    ends = np.cumsum(np.full(count, MS, dtype=np.int64)) + template.steps[0].start
    zeros = np.zeros(count, dtype=np.int64)
    summaries = []
    for rank in range(ranks):
        late = rng.integers(1, MS // 2, count)
        collectives_of_rank = replace(
            template.collectives,
            key=pack(np.arange(count, dtype=np.int64) % 2),
            keys=[f"tp{rank // 8}", f"dp{rank % 8}"],
            synchronising=[True, True],
            group=["tp", "dp"],
            size=[8, ranks // 8],
            kind=["all_reduce", "all_reduce"],
            message=[8, 8],
            sequenced=[True, True],
            order=pack(np.arange(count, dtype=np.int64)),
            step=pack(zeros),
            start=pack(ends - late + 1000 * rank),
            end=pack(ends + 1000 * rank),
            exposed=pack(late),
            work=pack(MS - late),
        )
        summaries.append(replace(template, rank=rank, world=ranks, collectives=collectives_of_rank))
    tracemalloc.start()
    begin = time.process_time()
    joined = match_collectives(summaries)
    waits = measure_waits(joined)
    took = time.process_time() - begin
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(joined.rank) == ranks * count
    assert waits.collective_count.tolist() == [count] * ranks
    assert joined.clocks.shift[8] - joined.clocks.shift[0] == pytest.approx(-8_000, abs=10)
    assert peak < 1 << 30
    assert took < 60, "seconds of CPU; some 3 where nothing else runs and memory is not traced"
