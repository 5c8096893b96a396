"""Ranks on one clock, and who waits for whom: simulated jobs, whose truth is known, and a pair."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.measure import Analysis
from advisor.measure.ranks.skew import align_ranks, exposed_by_rank, measure_skew
from advisor.read import read_trace
from advisor.testing import TraceBuilder
from tests.measure.stragglers import stragglers

NOON = 1_700_000_000_000_000.0  # µs of Unix time
TRANSFER = 500.0


class Job:
    """Ranks that compute, then meet in collectives that all leave together.

    ``offsets``: how far each rank's clock is ahead, µs. ``late_ends``: added to the end of a
    collective on a rank, µs.
    """

    def __init__(self, offsets: Sequence[float], base: float = NOON) -> None:
        self.offsets = list(offsets)
        self.builders = [TraceBuilder(rank=r, world_size=len(offsets)) for r in range(len(offsets))]
        for b, offset in zip(self.builders, offsets, strict=True):
            b.now = base + offset
            b.launch("warm-up", 1)
            b.sync()
        self.sequence = 0

    def compute(self, us: Sequence[float]) -> None:
        for b, dur in zip(self.builders, us, strict=True):
            b.launch("gemm", dur)

    def add_collective(
        self,
        kind: str = "allreduce",
        *,
        members: Sequence[int] | None = None,
        group: str = "0",
        size: int = 1 << 20,
        sequence: bool = False,
        late_ends: Sequence[float] | None = None,
        hide: dict[int, float] | None = None,
        lost_on: Sequence[int] = (),
    ) -> None:
        """A collective of some ranks; ``hide``: compute that a rank runs meanwhile."""
        who = list(range(len(self.builders))) if members is None else list(members)
        arrival = {
            r: max(self.builders[r]._free[7], self.builders[r].now + 10) - self.offsets[r]
            for r in who
        }
        end = max(arrival.values()) + TRANSFER
        self.sequence += 1
        for place, r in enumerate(who):
            b = self.builders[r]
            leave = end + (late_ends[place] if late_ends else 0.0)
            before = len(b.events)
            b._free[7] = arrival[r] + self.offsets[r]
            b.collective(kind, size, leave - arrival[r], group=group, group_size=len(who))
            for e in b.events[before:]:
                if e["cat"] == "kernel":
                    e["args"]["Process Group Ranks"] = who
                    if sequence:
                        e["args"]["Seq"] = self.sequence
            if hide and r in hide:
                b.launch("hiding gemm", hide[r], stream=9, after=arrival[r] + self.offsets[r])
            b._free[7] = leave + self.offsets[r]
            if r in lost_on:
                b.events = [
                    e for e in b.events if e["cat"] != "kernel" or e not in b.events[before:]
                ]

    def step(self, fill_step: Callable[[], None]) -> None:
        spans = [b.step() for b in self.builders]
        for span in spans:
            span.__enter__()
        fill_step()
        for b, span in zip(self.builders, spans, strict=True):
            b.sync()
            span.__exit__(None, None, None)

    def analyses(self, **options: Any) -> dict[int, Analysis]:
        return {r: Analysis(b.trace(), **options) for r, b in enumerate(self.builders)}


def simple(
    offsets: Sequence[float], compute: Sequence[Sequence[float]], base: float = NOON, **more: Any
) -> dict[int, Analysis]:
    """A job with one all-reduce per step; ``compute``: µs, a row per step with a value for each
    rank."""
    job = Job(offsets, base)
    for row in compute:

        def fill_step(row: Sequence[float] = row) -> None:
            job.compute(row)
            job.add_collective(**more)

        job.step(fill_step)
    return job.analyses()


# -- one clock ---------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0.0, 37.0, -4_000.0, 2_500_000.0])
def test_a_known_clock_offset_is_found(ahead: float) -> None:
    ranks = simple([0.0, ahead], [[1000, 3000], [2500, 900], [1000, 1100], [1200, 1000]])
    alignment = align_ranks(ranks)
    assert alignment.reason == ""
    assert alignment.matched == 4
    # rank 1's clock is ahead, so that much is taken off it; timestamps have 0.25 µs at this date
    assert alignment.offset_ns[0] == 0
    assert alignment.offset_ns[1] == pytest.approx(-ahead * 1000, abs=600)
    assert alignment.error_ns is not None and alignment.error_ns < 1000
    assert alignment.unaligned == ()


def test_clocks_that_are_not_date_are_aligned_too() -> None:
    ranks = simple([0.0, 9e9], [[1000, 3000], [2500, 900], [1000, 1100]], base=5000.0)
    alignment = align_ranks(ranks)
    assert alignment.offset_ns[1] == pytest.approx(-9e12, abs=600)


def test_ends_that_differ_give_the_error() -> None:
    job = Job([0.0, 700.0])
    late = [[0, 40.0], [30.0, 0], [0, 20.0], [50.0, 0], [0, 10.0]]
    for ends in late:

        def fill_step(ends: list[float] = ends) -> None:
            job.compute([1000, 1500])
            job.add_collective(late_ends=ends)

        job.step(fill_step)
    alignment = align_ranks(job.analyses())
    # differences of ends, rank 1 - rank 0: 40 -30 20 -50 10: median 10, distances 30 40 10 60 0
    assert alignment.offset_ns[1] == pytest.approx(-(700 + 10) * 1000, abs=600)
    assert alignment.error_ns == pytest.approx(30_000, abs=1000)


def test_one_rank_is_not_aligned() -> None:
    alignment = align_ranks({0: simple([0.0, 0.0], [[10, 10]])[0]})
    assert alignment.error_ns is None
    assert "one rank" in alignment.reason


def test_ranks_without_collectives_are_not_aligned() -> None:
    job = Job([0.0, 0.0])
    job.step(lambda: job.compute([100, 100]))
    alignment = align_ranks(job.analyses())
    assert (alignment.error_ns, alignment.matched, alignment.unaligned) == (None, 0, (0, 1))
    assert "no collectives" in alignment.reason
    with pytest.raises(ValueError, match="not measured"):
        measure_skew(job.analyses(), alignment)


def test_a_rank_that_used_no_device_is_left_out() -> None:
    idle = TraceBuilder(rank=2)
    with idle.step(), idle.op("aten::add"):
        idle.host(10)
    ranks = simple([0.0, 5.0], [[100, 200], [200, 100], [100, 100]])
    alignment = align_ranks({**ranks, 2: idle.analysis()})
    assert alignment.unaligned == (2,)
    assert set(alignment.offset_ns) == {0, 1}
    single = align_ranks({0: ranks[0], 2: idle.analysis()})
    assert single.error_ns is None and "device" in single.reason


@pytest.mark.parametrize("steps", [1, 2])
def test_too_few_collectives_cannot_tell_their_own_error(steps: int) -> None:
    alignment = align_ranks(simple([0.0, 40.0], [[100, 200]] * steps))
    assert alignment.error_ns is None
    assert "more than 2 collectives" in alignment.reason


def test_a_rank_that_shares_too_few_is_left_out() -> None:
    job = Job([0.0, 70.0, 20.0])
    for number in range(5):

        def fill_step(number: int = number) -> None:
            job.compute([100, 200, 300])
            job.add_collective(members=[0, 1, 2] if number < 2 else [0, 1], group=f"{number < 2}")

        job.step(fill_step)
    alignment = align_ranks(job.analyses())
    assert alignment.unaligned == (2,)
    assert alignment.matched == 5


@pytest.mark.parametrize("kind", ["broadcast", "send", "recv"])
def test_collectives_without_a_common_end_are_not_used(kind: str) -> None:
    ranks = simple([0.0, 0.0], [[100, 200]] * 3, kind=kind)
    assert ranks[0].collectives.height == 3
    assert align_ranks(ranks).error_ns is None


def test_two_jobs_of_one_script_are_not_one_run() -> None:
    rng = np.random.default_rng(7)
    one = simple([0.0], rng.uniform(500, 60_000, (12, 1)).tolist())
    two = simple([0.0], rng.uniform(500, 60_000, (12, 1)).tolist())
    alignment = align_ranks({0: one[0], 1: two[0]})
    assert alignment.error_ns is None
    assert "cannot be" in alignment.reason


def test_traces_recorded_minutes_apart_are_not_one_run() -> None:
    alignment = align_ranks(simple([0.0, 120e6], [[1000, 1000]] * 4))
    assert alignment.error_ns is None
    assert "120 s apart" in alignment.reason


def test_pairs_without_common_collectives_leave_one_pair_aligned() -> None:
    job = Job([0.0, 70.0, 20.0, 900.0])
    for _ in range(4):

        def fill_step() -> None:
            job.compute([100, 200, 300, 100])
            job.add_collective(members=[0, 1], group="1")
            job.add_collective(members=[2, 3], group="2")

        job.step(fill_step)
    alignment = align_ranks(job.analyses())
    assert set(alignment.offset_ns) == {0, 1}
    assert alignment.unaligned == (2, 3)
    assert alignment.matched == 4


# -- which collective is which -----------------------------------------------------------------


def test_earlier_start_of_a_trace_does_not_shift_matching() -> None:
    job = Job([0.0, 800.0])
    b = job.builders[1]
    b.collective("allreduce", 1 << 20, 100, group_size=2)  # before the first step, on rank 1 only
    b.sync()
    job.builders[0].now = b.now - 800.0
    for _ in range(3):

        def fill_step() -> None:
            job.compute([1000, 1400])
            job.add_collective()

        job.step(fill_step)
    alignment = align_ranks(job.analyses())
    assert alignment.matched == 3
    assert alignment.offset_ns[1] == pytest.approx(-800_000, abs=600)


def test_steps_that_only_one_rank_recorded_are_not_matched() -> None:
    ranks = simple([0.0, 300.0], [[1000, 1400]] * 5)
    builder = Job([0.0, 300.0])
    for number in range(5):

        def fill_step() -> None:
            builder.compute([1000, 1400])
            builder.add_collective()

        if number == 3:
            builder.builders[1]._steps = 90  # a restarted counter
        builder.step(fill_step)
    assert align_ranks(ranks).matched == 5
    assert align_ranks(builder.analyses()).matched == 3


def test_a_lost_kernel_spoils_its_step_but_not_the_others() -> None:
    job = Job([0.0, 300.0])
    for number in range(4):

        def fill_step(number: int = number) -> None:
            for meeting in range(3):
                job.compute([1000, 1400])
                job.add_collective(lost_on=[1] if (number, meeting) == (2, 0) else [])

        job.step(fill_step)
    alignment = align_ranks(job.analyses())
    assert alignment.matched == 9
    assert alignment.error_ns is not None and alignment.error_ns < 1000


def test_recorded_sequence_numbers_survive_a_lost_kernel() -> None:
    job = Job([0.0, 300.0])
    for number in range(4):

        def fill_step(number: int = number) -> None:
            for meeting in range(3):
                job.compute([1000, 1400])
                lost = [1] if (number, meeting) == (2, 0) else []
                job.add_collective(sequence=True, lost_on=lost)

        job.step(fill_step)
    alignment = align_ranks(job.analyses())
    assert alignment.matched == 11
    assert alignment.offset_ns[1] == pytest.approx(-300_000, abs=600)


def test_sizes_and_groups_keep_collectives_apart() -> None:
    job = Job([0.0, 0.0])

    def fill_step() -> None:
        for size, group in ((1 << 20, "dp"), (1 << 21, "dp"), (1 << 20, "tp")):
            job.compute([100, 150])
            job.add_collective(size=size, group=group)

    job.step(fill_step)
    alignment = align_ranks(job.analyses())
    assert (
        alignment.cells is not None
        and alignment.joined is not None
        and alignment.joined.rank_count.tolist() == [2] * 3
    )
    rows = set(alignment.cells.select("group", "bytes", "order").rows())
    assert rows == {("dp", 1 << 20, 0), ("dp", 1 << 21, 0), ("tp", 1 << 20, 0)}


def test_ranks_of_different_groups_join_through_common_ranks() -> None:
    offsets = [0.0, 1000.0, -500.0, 250.0, 40.0]
    job = Job(offsets)
    for _ in range(3):

        def fill_step() -> None:
            job.compute([100, 300, 200, 250, 10])
            job.add_collective(members=[0, 1], group="a")
            job.add_collective(members=[1, 2], group="b")
            job.add_collective(members=[2, 3], group="a")  # a name that another group has, too

        job.step(fill_step)
    alignment = align_ranks(job.analyses())
    assert alignment.unaligned == (4,)
    assert alignment.matched == 9
    clocks = {r: -ns / 1000 + offsets[0] for r, ns in alignment.offset_ns.items()}
    first = clocks[0]
    for r in range(4):
        assert clocks[r] - first == pytest.approx(offsets[r], abs=1)


# -- who waits for whom ------------------------------------------------------------------------


def test_straggler_is_last_everywhere_and_costs_its_lateness() -> None:
    compute = [[1000, 1000, 1300, 1000]] * 5
    ranks = simple([0.0, 5000.0, -3000.0, 100.0], compute)
    result = measure_skew(ranks, align_ranks(ranks))
    assert result.steps == 5
    rows = {r["rank"]: r for r in stragglers(ranks, align_ranks(ranks)).iter_rows(named=True)}
    assert rows[2]["last_share"] == 1.0
    assert rows[2]["caused_wait_ns"] == pytest.approx(300_000, abs=1500)
    assert rows[2]["caused_exposed_ns"] == pytest.approx(300_000, abs=1500)
    assert rows[2]["wait_ns"] == pytest.approx(0, abs=1500)
    for r in (0, 1, 3):
        assert rows[r]["last"] == 0
        assert rows[r]["caused_wait_ns"] == 0
        assert rows[r]["wait_ns"] == pytest.approx(300_000, abs=1500)
    assert result.collectives["last"].to_list() == [2] * 5
    assert result.collectives["complete"].to_list() == [True] * 5


def test_equal_ranks_have_no_straggler() -> None:
    ranks = simple([0.0, 5000.0, -3000.0], [[1000, 1000, 1000]] * 6)
    result = measure_skew(ranks, align_ranks(ranks))
    table = stragglers(ranks, align_ranks(ranks))
    assert table["last"].to_list() == [0, 0, 0]
    assert table["caused_wait_ns"].to_list() == [0.0, 0.0, 0.0]
    assert result.collectives["last"].null_count() == 6


def test_lateness_within_the_alignment_error_is_ignored() -> None:
    job = Job([0.0, 0.0])
    for ends in ([0, 100.0], [100.0, 0], [0, 80.0], [90.0, 0], [0, 5.0]):

        def fill_step(ends: list[float] = ends) -> None:
            job.compute([1000, 1050])
            job.add_collective(late_ends=ends)

        job.step(fill_step)
    ranks = job.analyses()
    alignment = align_ranks(ranks)
    assert alignment.error_ns is not None and alignment.error_ns > 60_000
    assert stragglers(ranks, alignment)["last"].to_list() == [0, 0]


def test_a_wait_under_compute_is_not_exposed() -> None:
    job = Job([0.0, 0.0])
    for _ in range(3):

        def fill_step() -> None:
            job.compute([1000, 2000])
            job.add_collective(hide={0: 700.0})

        job.step(fill_step)
    ranks = job.analyses()
    row = stragglers(ranks, align_ranks(ranks)).row(1, named=True)
    assert row["caused_wait_ns"] == pytest.approx(1_000_000, abs=1500)
    # what of the whole collective lies in the open, its transfer too
    assert row["caused_exposed_ns"] == pytest.approx(300_000 + TRANSFER * 1000, abs=1500)


def test_only_used_steps_count() -> None:
    compute = [[1000, 9000]] + [[1000, 1200]] * 6  # the first step is an outlier on both ranks
    ranks = simple([0.0, 0.0], compute)
    assert ranks[0].steps.table["outlier"].to_list() == [True] + [False] * 6
    result = measure_skew(ranks, align_ranks(ranks))
    assert (result.steps, result.collectives.height) == (6, 6)
    table = stragglers(ranks, align_ranks(ranks))
    assert table["caused_wait_ns"][1] == pytest.approx(200_000, abs=1500)


def test_missing_group_members_are_reported() -> None:
    ranks = simple([0.0, 0.0, 0.0], [[100, 200, 900]] * 3)
    pair = {0: ranks[0], 1: ranks[1]}
    result = measure_skew(pair, align_ranks(pair))
    assert result.collectives["complete"].to_list() == [False] * 3
    share = stragglers(pair, align_ranks(pair))["last_share"]
    assert share.to_list() == [0.0, 1.0]  # among those that are here


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_figures_equal_the_simulated_job(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 4))
    steps = data.draw(st.integers(3, 5))
    offsets = data.draw(st.lists(st.integers(-(10**6), 10**6), min_size=count, max_size=count))
    compute = data.draw(
        st.lists(
            st.lists(st.integers(100, 3000), min_size=count, max_size=count),
            min_size=steps,
            max_size=steps,
        )
    )
    ranks = simple([float(o) for o in offsets], compute, base=5_000_000.0)
    alignment = align_ranks(ranks)
    if min(a.steps.table.height for a in ranks.values()) < 3:  # a much shorter first one is none
        assert alignment.reason
        return
    for rank, offset in enumerate(offsets):
        # the reference may be any rank; the differences are what is measured
        assert alignment.offset_ns[0] - alignment.offset_ns[rank] == (offset - offsets[0]) * 1000
    if not all(a.steps.table["used"].all() for a in ranks.values()):
        return  # one is an outlier, or so short at the end that the profiler stopped inside it
    table = stragglers(ranks, alignment)
    for rank in range(count):
        last = caused = waited = 0.0
        for row in compute:  # a rank that computes longer comes as much later
            slowest = max(row)
            waited += slowest - row[rank]
            if row[rank] == slowest and row.count(slowest) == 1:
                last += 1
                caused += sum(slowest - us for us in row) / (count - 1)
        line = table.row(rank, named=True)
        assert line["last"] == last
        assert line["caused_wait_ns"] == pytest.approx(caused * 1000 / steps, abs=1)
        assert line["wait_ns"] == pytest.approx(waited * 1000 / steps, abs=1)
        assert line["exposed_wait_ns"] == pytest.approx(waited * 1000 / steps, abs=1)


def test_exposed_communication_is_listed_by_rank_and_step() -> None:
    ranks = simple([0.0, 0.0], [[1000, 1400], [1000, 1000]])
    table = exposed_by_rank(ranks)
    assert table["rank"].to_list() == [0, 0, 1, 1]
    # transfer, and on rank 0 the wait for rank 1
    assert table["exposed"].to_list() == pytest.approx(
        [900_000, 500_000, 500_000, 500_000], abs=999
    )
    assert table["communication"].to_list() == table["exposed"].to_list()
    assert table["step"].to_list() == ["ProfilerStep#0", "ProfilerStep#1"] * 2


# -- a real pair -------------------------------------------------------------------------------


def test_collectives_of_the_public_pair_end_together(shared_trace) -> None:  # type: ignore[no-untyped-def]
    """Two ranks of 128 whose Unix clocks were in step: the offset, found without them, is zero
    within the error. Both files keep only a part of their rows."""
    paths = [shared_trace(f"two_ranks_rank{r}") for r in (0, 1)]
    ranks = {r: Analysis(read_trace(path)) for r, path in enumerate(paths)}
    alignment = align_ranks(ranks)
    assert alignment.error_ns is not None
    assert alignment.error_ns < 200_000
    assert abs(alignment.offset_ns[1]) <= alignment.error_ns

    # the ends of the collectives as the files have them, Unix time, µs
    ends = []
    for path in paths:
        events = json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
        kernels = [e for e in events if e.get("cat") == "kernel" and "nccl" in e["name"]]
        ends.append(np.array([e["ts"] + e["dur"] for e in kernels]))
    together = sum(bool((np.abs(ends[1] - end) < 1000).any()) for end in ends[0])
    assert alignment.matched == together == 5
