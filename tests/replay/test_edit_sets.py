"""Savings of edits obey the laws of ``edit_sets.py``, alone and together, on every real trace.

``ADVISOR_LAWS=200`` tries as many random sets a file (default 3, and 1 of a large one).
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import edit_sets
import polars as pl
import pytest

from advisor import Analysis
from advisor.core.errors import AdvisorError
from advisor.core.intervals import subtract
from advisor.read import open_run
from advisor.replay.edit_language import parse_edit
from advisor.replay.estimators import BoundEstimator, ReplayEstimator
from advisor.replay.exposed_time import ExposedTime
from advisor.replay.window_replayer import WindowReplayer
from advisor.testing import TraceBuilder
from benchmarks.public_traces import CORPUS
from tests.corpus_analyses import analyze_cached

SETS = int(os.environ.get("ADVISOR_LAWS", "0"))
LARGE = 700_000
"""Bytes of a file from which its replays take long."""


def traces() -> list[str]:
    """Files of the corpus with a trace in them, by size."""
    result = [
        path
        for path in CORPUS.rglob("*")
        if path.name.endswith((".json.gz", ".sqlite", ".sqlite.gz"))
    ]
    result += [path for path in CORPUS.rglob("*") if path.suffix in (".rpd", ".pb")]
    return [str(p.relative_to(CORPUS)) for p in sorted(result, key=lambda p: p.stat().st_size)]


def runs() -> list[Path]:
    """Recorded runs: of a GPU, and of the CPU."""
    folders = (CORPUS / "h100", Path(__file__).parents[1] / "data" / "recorded")
    return [path.parent for f in folders for path in sorted(f.glob("*/manifest.json"))]


@pytest.mark.parametrize("name", traces())
def test_no_law_is_broken(name: str) -> None:
    path = CORPUS / name
    try:
        a = analyze_cached(str(path)).main
    except AdvisorError as error:
        pytest.skip(f"no trace: {error}")
    if a.steps.table.is_empty() or a.step_ns <= 0:
        pytest.skip("no steps in it")
    count = SETS or (1 if path.stat().st_size > LARGE else 3)
    assert_laws(a, name, count)


@pytest.mark.parametrize("run", runs(), ids=lambda run: run.name)
def test_no_law_is_broken_by_a_recorded_run(run: Path) -> None:
    """The gains are of steps without the profiler, and then of the measured ones."""
    a = analyze_cached(str(run)).main
    if a.steps.table.is_empty() or a.step_ns <= 0:
        pytest.skip("no steps in it")
    assert_laws(a, run.name, SETS or 2)


def assert_laws(a: Analysis, name: str, count: int) -> None:
    laws = edit_sets.check_random_sets(a, name, count)
    assert not [str(violation) for violation in laws.violations]


def test_moved_work_keeps_its_time_without_steps() -> None:
    """Uploads of 40 ms beside 4 ms of kernels: at most the kernels can hide them."""
    b = TraceBuilder()
    for _ in range(4):
        b.copy("HtoD", 100 << 20, 10_000)
        b.run("aten::mm", "ampere_sgemm_128x64_nn", 1000)
    b.sync()
    replayer = WindowReplayer(b.analysis())
    uploads, every = (replayer.gain([parse_edit(f"overlap {t}")]) for t in ("copy:HtoD", "copy"))
    assert 0 < uploads <= 4_100_000
    assert every >= uploads


def test_no_work_hides_behind_idle_time_without_host_events() -> None:
    """Collectives of 40 ms beside 4 ms of kernels, and pauses of unknown cause: 4 ms at most."""
    b = TraceBuilder()
    for _ in range(4):
        b.run("nccl:all_reduce", "ncclDevKernel_AllReduce_Sum", 10_000)
        b.host(20_000)
        b.run("aten::mm", "ampere_sgemm_128x64_nn", 1000)
        b.host(20_000)
    b.sync()
    trace = b.trace()
    unlinked = trace.gpu.with_columns(launch=pl.lit(None, pl.Int64), op=pl.lit(None, pl.Int64))
    unlinked = unlinked.cast(dict(trace.gpu.schema))
    device_only = dataclasses.replace(trace, cpu=trace.cpu.clear(), gpu=unlinked)
    limit = ExposedTime(Analysis(device_only)).max_saved([parse_edit("overlap comm")])
    assert 0 < limit <= 4_100_000


@pytest.mark.parametrize("rank", [0, 1])
def test_overlap_without_replay_is_bounded_by_parallel_work(rank: int) -> None:
    """The middle is what other work can hide, the upper end what is exposed."""
    a = Analysis(open_run(str(CORPUS / f"two_ranks_rank{rank}.json.gz")).window(rank))
    saved = BoundEstimator(a).gain_range([parse_edit("overlap comm")])
    talks = a.kernels["communication"].to_numpy()
    sends, works = (a.device_busy(a.in_window & mask) for mask in (talks, ~talks))
    exposed = subtract(sends, works).total / a.step_count
    hides = subtract(works, sends).total / a.step_count
    assert hides < exposed
    assert saved.gain == pytest.approx(hides)
    assert saved.low < saved.gain < saved.high == pytest.approx(exposed)


def test_copy_to_host_still_waits_for_its_kernel() -> None:
    """The copy comes no earlier on a stream of its own than the kernels whose result it takes."""
    b = TraceBuilder()
    for _ in range(4):
        with b.step():
            b.run("aten::mm", "ampere_sgemm_128x64_nn", 2000)
            b.copy("DtoH", 1 << 10, 10, pinned=False)
            b.host(500)
    replayer = WindowReplayer(b.analysis())
    assert replayer.gain([parse_edit("overlap copy:DtoH")]) < 100_000


def test_nonblocking_reads_leave_uploads_unchanged() -> None:
    b = TraceBuilder()
    for _ in range(4):
        with b.step():
            b.copy("HtoD", 64 << 20, 5000, pinned=False)
            b.run("aten::mm", "ampere_sgemm_128x64_nn", 1000)
            b.item()
    replayer = WindowReplayer(b.analysis())
    reads, both = (
        replayer.count_selected(parse_edit(e)) for e in ("async sync copy:DtoH", "async sync")
    )
    assert (reads, both) == (8, 16)  # each copies and waits


def test_removing_part_of_moved_work_has_no_cost() -> None:
    """A kernel that is removed from a stream whose work moves does not hold the others together."""
    b = TraceBuilder()
    for _ in range(3):
        b.run("aten::mm", "ampere_sgemm_128x64_nn", 1000)
        b.run("aten::add", "elementwise_kernel", 100)
        b.run("aten::bmm", "ampere_sgemm_64x64_nn", 900)
    b.sync()
    replayer = WindowReplayer(b.analysis())
    move, remove = (parse_edit(e) for e in ("overlap work", "remove family:elementwise"))
    assert 0 < replayer.gain([move]) <= replayer.gain([move, remove])


def test_overlapping_kernels_still_overlap_when_merged() -> None:
    """Programmatic dependent launch: 100 kernels of 10 µs, each 0.9 µs before the last one's end.
    All in one take the 911 µs that they do; at a tenth of their time, a tenth."""
    b = TraceBuilder(launch_us=1)
    for _ in range(4):
        with b.step():
            for number in range(100):
                b._free[7] = b._free.get(7, 0.0) - 0.9 * (number > 0)
                b.run("aten::mm", "nvjet_tst_64x64", 10, host_us=0.5)
            b.sync()
    replayer = WindowReplayer(b.analysis())
    merged, tenth = (replayer.gain([parse_edit(f"merge work {f}")]) for f in ("1", "0.1"))
    assert -1_000 < merged < 50_000
    assert tenth - merged == pytest.approx(0.9 * 910_900, rel=0.01)


@pytest.mark.parametrize(
    ("factor_range", "remaining_us"),
    [("0.1..0.25..0.5", 100), ("0.25..0.25..0.5", 125), ("0..0.25..0.5", 0)],
)
def test_a_range_ends_where_the_kernels_would_be_done_in_no_time(
    factor_range: str, remaining_us: float
) -> None:
    """1 ms of kernels per step: at best the share that the best case says is left, µs. One that is
    no more than the expected one may be exceeded, as past estimates were, but not without end."""
    b = TraceBuilder("A100")
    for _ in b.steps():
        for _ in range(5):
            b.product(200)
    a = b.analysis()
    edit = parse_edit(f"scale family:gemm {factor_range}")
    for estimator in (ReplayEstimator(a), BoundEstimator(a)):
        gain, _, high, *_ = estimator.gain_range([edit])
        assert gain == pytest.approx(750e3, rel=0.02)
        assert gain < high <= (1000 - remaining_us) * 1e3


def test_launches_removed_by_merging_are_not_counted_twice() -> None:
    """20 kernels of 10 µs, launched one every 30 µs, become one: no launch is left to save."""
    b = TraceBuilder("A100")
    for _ in b.steps():
        for n in range(20):
            b.run("aten::mul", f"vectorized_elementwise_kernel_{n}", 10, host_us=25)
        b.sync()
    a = b.analysis()
    merge, graph = (parse_edit(line) for line in ("merge family:elementwise 0.5", "graph gap"))
    estimator = BoundEstimator(a)
    graph_gain = estimator.marginal([graph], ())
    assert graph_gain > 200e3
    assert estimator.marginal([graph], [merge]) < 0.2 * graph_gain
    assert estimator.marginal([merge], ()) > 100e3 + 0.8 * graph_gain
