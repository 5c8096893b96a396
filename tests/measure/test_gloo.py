"""Waits among processes without a device: gloo, simulated with two threads per process, against
a walk over the same job, microsecond by microsecond."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.core.trace import Trace
from advisor.measure import Analysis
from advisor.measure.comm.gloo import has_host_collectives, host_work, list_on_host
from advisor.measure.ranks.skew import align_ranks, measure_skew
from advisor.testing import TraceBuilder
from tests.measure.stragglers import stragglers, times_by_rank

TRANSFER = 40
THREADS = 2


class JobTruth(NamedTuple):
    """The truth about a simulated job: by process and collective, µs."""

    wait: np.ndarray
    exposed: np.ndarray


def simulate(
    work: Sequence[Sequence[Sequence[int]]], offsets: Sequence[int]
) -> tuple[dict[int, Analysis], JobTruth]:
    """``work[process][step]``: how long it computes before each of the step's all-reduces, µs.

    All-reduces run one after the other, each from when all processes have come to it; a process
    goes on to the next step when the last one has ended.
    """
    count = len(work)
    builders = [TraceBuilder(None, rank=n, world_size=count, launch_us=0) for n in range(count)]
    now = [1000] * count
    done: list[int] = []
    busy: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    came: list[list[int]] = [[] for _ in range(count)]
    spans: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    steps: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for step in range(len(work[0])):
        start_times = list(now)
        for part in range(len(work[0][step])):
            for n in range(count):
                end = now[n] + work[n][step][part]
                busy[n].append((now[n], end))
                now[n] = end
                came[n].append(end)
            before = done[-1] if done else 0
            done.append(max(before, *(c[-1] for c in came)) + TRANSFER)
            for n in range(count):
                free = done[-1 - THREADS] if len(done) > THREADS else 0
                spans[n].append((max(came[n][-1], free), done[-1]))
        for n in range(count):
            now[n] = max(now[n], done[-1])
            steps[n].append((start_times[n], now[n]))
    for n, b in enumerate(builders):
        for begin, end in steps[n]:
            b.now = begin + offsets[n]
            with b.step():
                b.now = end + offsets[n]
        for begin, end in busy[n]:
            b.now = begin + offsets[n]
            with b.op("aten::mm", host_us=end - begin - 0.5):
                pass
        for number, (begin, end) in enumerate(spans[n]):
            with b.thread(50 + number % THREADS):
                b.now = begin + offsets[n]
                with b.range("gloo:all_reduce"):
                    b.now = end + offsets[n]

    start = np.array([[max(c, d) for c, d in zip(one, [0, *done], strict=False)] for one in came]).T
    latest = start.max(axis=1, keepdims=True)
    exposed = np.zeros_like(start)
    for k in range(len(done)):
        for n in range(count):
            computing = np.zeros(int(latest[k, 0]) - start[k, n], dtype=bool)
            for begin, end in busy[n]:
                low, high = max(begin, start[k, n]), min(end, latest[k, 0])
                if low < high:
                    computing[low - start[k, n] : high - start[k, n]] = True
            exposed[k, n] = int((~computing).sum())
    return {n: b.analysis() for n, b in enumerate(builders)}, JobTruth(latest - start, exposed)


jobs = st.integers(2, 3).flatmap(
    lambda processes: st.integers(1, 3).flatmap(
        lambda parts: st.lists(
            st.lists(
                st.lists(st.integers(3, 400), min_size=parts, max_size=parts),
                min_size=4,
                max_size=4,
            ),
            min_size=processes,
            max_size=processes,
        )
    )
)


@settings(max_examples=60, deadline=None)
@given(jobs, st.lists(st.integers(0, 100_000), min_size=3, max_size=3))
def test_gloo_waits_equal_a_direct_walk(work: list[list[list[int]]], offsets: list[int]) -> None:
    ranks, truth = simulate(work, offsets[: len(work)])
    alignment = align_ranks(ranks)
    assert alignment.error_ns == pytest.approx(0, abs=1e-3)
    skew = measure_skew(ranks, alignment)
    waits, exposed = (times_by_rank(ranks, alignment, name) for name in ("wait", "exposed"))
    # steps much longer than the others are set aside
    parts = len(work[0][0])
    steps = [int(name.split("#")[1]) for name in skew.collectives["step"]]
    at = [step * parts + steps[:i].count(step) for i, step in enumerate(steps)]
    assert len(at) >= 3 * parts
    for n in ranks:
        assert waits[n] == (truth.wait[at, n] * 1000).tolist()
        # at most: where in a collective its open part lies is in no summary
        assert (truth.exposed[at, n] * 1000 <= exposed[n]).all()
        assert (exposed[n] <= np.array(waits[n])).all()


def test_waits_never_count_twice() -> None:
    """Both threads of the quick process wait at once."""
    ranks, truth = simulate([[[10, 10]] * 4, [[300, 100]] * 4], [0, 0])
    table = stragglers(ranks, align_ranks(ranks))
    late = table.row(1, named=True)
    assert late["last_share"] == 1
    step = ranks[0].step_ns
    lost = truth.exposed[:, 0].sum() * 1e3 / 4
    # what of a transfer is in the open may count as waiting, that of no other collective
    assert lost <= late["caused_exposed_ns"] <= lost + 1e3 * TRANSFER < step


def test_operators_that_wait_are_not_work() -> None:
    b = TraceBuilder(None)
    with b.step():
        with b.op("aten::mm", host_us=99.5):
            pass
        with b.op("_c10d_functional::wait_tensor", host_us=500):
            pass
        with b.op("c10d::allreduce_", host_us=50):
            pass
    assert host_work(b.analysis()).total == 100_000


def test_without_gloo_there_are_no_waits() -> None:
    b = TraceBuilder(None)
    with b.step(), b.op("aten::mm"):
        pass
    assert not has_host_collectives(b.analysis())
    assert list_on_host(b.analysis()).is_empty()
    gpu = TraceBuilder()
    with gpu.step(), gpu.op("aten::mm"):
        gpu.launch("gemm", 10)
    with gpu.range("gloo:all_reduce"):
        pass
    assert not has_host_collectives(gpu.analysis())  # its device tells


def test_a_group_is_complete_when_all_of_the_job_are_here() -> None:
    ranks, _ = simulate([[[10]] * 4, [[300]] * 4], [0, 0])
    complete = measure_skew(ranks, align_ranks(ranks)).collectives["complete"]
    assert complete.to_list() == [True] * 4
    larger = {n: Analysis(_with_three_ranks(a), None, None) for n, a in ranks.items()}
    assert (
        measure_skew(larger, align_ranks(larger)).collectives["complete"].to_list() == [False] * 4
    )


def _with_three_ranks(a: Analysis) -> Trace:
    return replace(a.trace, meta=replace(a.trace.meta, world_size=3))


def test_names_of_other_collectives() -> None:
    b = TraceBuilder(None)
    with b.step():
        for name in ("all_gather", "reduce_scatter", "broadcast", "send", "barrier"):
            with b.range(f"gloo:{name}"):
                b.now += 10
    kinds = list_on_host(b.analysis())["collective"].cast(pl.String).to_list()
    assert kinds == ["all_gather", "reduce_scatter", "broadcast", "send_recv", "all_reduce"]


def test_host_collective_starts_at_its_call() -> None:
    """gloo's thread is woken 30 us after the call, and takes 200 us."""
    b = TraceBuilder(None, rank=0, world_size=2)
    with b.step():
        b.on_host("aten::mm", 100)
        called = b.now
        with b.op("c10d::allreduce_"):
            pass
        with b.thread(50):
            b.now = called + 30
            with b.range("gloo:all_reduce"):
                b.now += 200
    row = list_on_host(b.analysis()).row(0, named=True)
    assert row["dur"] == 230_000
    assert row["ts"] == row["launch_ts"]


def test_gloo_ranges_match_calls_of_their_kind_first() -> None:
    """gloo's reduce-scatter is an all-reduce; a range before the first call has none."""
    b = TraceBuilder(None, rank=0, world_size=2)
    with b.step():
        with b.thread(50), b.range("gloo:all_reduce"):
            b.now += 10
        b.host_collective("allreduce", 400, 100)
        b.host_collective("barrier", 0, 100)
        b.host_collective("allgather", 800, 100, dtype="long int")
        with b.op("c10d::_reduce_scatter_base_"):
            pass
        with b.thread(50):
            b.now += 500
            with b.range("gloo:all_reduce"):
                b.now += 10
    a = b.analysis()
    table = list_on_host(a)
    names = a.trace.cpu["name"].gather(table["op"]).cast(pl.String).to_list()
    assert names == [
        None,
        "c10d::allreduce_",
        "c10d::barrier",
        "c10d::allgather_",
        "c10d::_reduce_scatter_base_",
    ]
    assert table["bytes"].to_list() == [None, 400, 1, 1600, None]  # gathered from both


def test_host_collectives_of_the_window_have_exposed_time() -> None:
    b = TraceBuilder(None, rank=0, world_size=2)
    for _ in b.steps():
        b.on_host("aten::mm", 1000)
        b.host_collective("allreduce", 4 << 20, 400)
        b.on_host("aten::mm", 100)  # the first quarter runs beside it
        b.host(400)
    a = b.analysis()
    assert a.collectives.height == 4
    assert a.collectives["bytes"].unique().to_list() == [4 << 20]
    # 400 us, and the 2.5 us of the call; less the 100.5 us of the operator
    assert a.collectives["exposed"].to_list() == pytest.approx([302_000] * 4, abs=1_000)
    assert a.breakdown.communication.total == int(a.collectives["exposed"].to_numpy().sum())
    assert a.breakdown.communication_overlap == pytest.approx(0.25, abs=0.01)
