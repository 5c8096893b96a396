"""Gains of ranks that wait for each other, against two and three small machines whose collectives
wait for the last rank; the bar is that of test_gains."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_gains import EXAMPLES, FLOOR, MS, STEPS, WITHIN, examples
from whatif_cluster import Cluster, meeting
from whatif_machine import QUIET, Program
from whatif_programs import (
    Fix,
    Shape,
    asynchronous,
    overlap_collectives,
    remove_host,
    scale_kernels,
    training,
)

from advisor.advise.engine import analyze
from advisor.core.errors import AdvisorError
from advisor.core.finding import Edit, Select
from advisor.measure import Analysis
from advisor.measure.ranks.skew import align_ranks
from advisor.read import open_run, read_trace
from advisor.replay.edit_language import parse_edit
from advisor.replay.result import what_if
from advisor.replay.window_replayer import WindowReplayer
from tests.measure.stragglers import stragglers

COMM = Select(on="gpu", family=("communication",))
CLOCKS = (0.0, 1234.5, -777.25)
"""What each rank's clock shows more, µs."""
BASE = Shape(
    layers=6, host=900, device=1500, python=150, backward=False, comm=600, optimizer=10, sync="item"
)


def loop(shape: Shape) -> Program:
    return meeting(training(shape, steps=STEPS))


def opened(cluster: Cluster, folder: Path) -> dict[int, Analysis]:
    found = {}
    for rank in cluster.ranks:
        path = folder / f"rank{rank.number}.json"
        path.write_bytes(rank.trace(CLOCKS[rank.number]))
        found[rank.number] = Analysis(read_trace(str(path)))
    return found


class Case:
    """Programs of all ranks with and without a fix; times in µs."""

    def __init__(
        self,
        slow: Sequence[Program],
        fast: Sequence[Program],
        machine: dict[str, Any],
        folder: Path,
    ) -> None:
        self.slow, self.fast = Cluster(slow, **machine), Cluster(fast, **machine)
        self.period = self.slow.ranks[0].period
        self.true = self.period - self.fast.ranks[0].period
        self.ranks = opened(self.slow, folder)
        self.whatif = WindowReplayer(self.ranks[0], 0, self.ranks)

    def check(self, *edits: Edit) -> None:
        predicted = self.whatif.gain(edits) / 1e3
        assert self.whatif.ranks[0] == 0
        assert sorted(self.whatif.ranks) == sorted(self.ranks)
        allowed = max(WITHIN * abs(self.true), FLOOR * self.period)
        assert abs(predicted - self.true) <= allowed, (
            f"true {self.true:.1f} µs, predicted {predicted:.1f} µs of {self.period:.1f}"
        )


def slowed(fix: Fix, only: int) -> Edit:
    """The one edit of a fix, for one rank only."""
    from msgspec.structs import replace as changed

    return changed(fix.edits[0], rank=only)


SHAPES = st.builds(
    Shape,
    seed=st.integers(0, 10**6),
    layers=st.sampled_from([3, 6, 9]),
    host=MS,
    device=MS,
    python=st.sampled_from([50.0, 400.0]),
    backward=st.booleans(),
    sync=st.sampled_from(["none", "item", "stream", "device", "event"]),
    comm=st.sampled_from([300.0, 900.0, 2500.0]),
    optimizer=st.sampled_from([0, 10, 40]),
)
SETTINGS = st.fixed_dictionaries(
    {"seed": st.integers(0, 10**6), "depth": st.sampled_from([1024, 200])}
)
LATE = st.sampled_from([("device", 1.4), ("device", 2.0), ("host", 1.5), ("python", 6.0)])


def late(shape: Shape, why: tuple[str, float]) -> Shape:
    what, factor = why
    return replace(shape, **{what: getattr(shape, what) * factor})


@settings(examples, max_examples=EXAMPLES or 5)
@given(SHAPES, SETTINGS, LATE)
def test_a_late_rank_brought_up_to_the_others(
    tmp_path: Path, shape: Shape, machine: dict[str, Any], why: tuple[str, float]
) -> None:
    even, behind = loop(shape), loop(late(shape, why))
    case = Case([even, behind], [even, even], machine, tmp_path)
    case.check(Edit(op="remove_skew", select=COMM, rank=1))


@settings(examples, max_examples=EXAMPLES or 5)
@given(SHAPES, SETTINGS, LATE, st.sampled_from([0.0, 0.5]))
def test_kernels_of_the_late_rank_alone_made_faster(
    tmp_path: Path, shape: Shape, machine: dict[str, Any], why: tuple[str, float], factor: float
) -> None:
    even, behind = loop(shape), loop(late(shape, why))
    fix = scale_kernels("gemm", factor)
    case = Case([even, behind], [even, fix.change(behind)], machine, tmp_path)
    case.check(slowed(fix, 1))


@settings(examples, max_examples=EXAMPLES or 5)
@given(
    SHAPES,
    SETTINGS,
    LATE,
    st.sampled_from([scale_kernels("gemm", 0.3), remove_host(), overlap_collectives()]),
)
def test_a_fix_on_all_ranks(
    tmp_path: Path, shape: Shape, machine: dict[str, Any], why: tuple[str, float], fix: Fix
) -> None:
    slow = [loop(shape), loop(late(shape, why))]
    case = Case(slow, [fix.change(p) for p in slow], machine, tmp_path)
    case.check(*fix.edits)


@settings(examples, max_examples=EXAMPLES or 5)
@given(SHAPES.filter(lambda s: s.sync != "none"), SETTINGS, LATE)
def test_no_rank_waits_for_its_device(
    tmp_path: Path, shape: Shape, machine: dict[str, Any], why: tuple[str, float]
) -> None:
    slow = [loop(shape), loop(late(shape, why))]
    fix = asynchronous(shape.sync)
    case = Case(slow, [fix.change(p) for p in slow], machine, tmp_path)
    case.check(*fix.edits)


@settings(examples, max_examples=EXAMPLES or 5)
@given(SHAPES, SETTINGS, LATE)
def test_unchanged_steps_of_every_rank_are_replayed(
    tmp_path: Path, shape: Shape, machine: dict[str, Any], why: tuple[str, float]
) -> None:
    cluster = Cluster([loop(shape), loop(late(shape, why))], **machine)
    ranks = opened(cluster, tmp_path)
    for number, a in ranks.items():
        whatif = WindowReplayer(a, number, ranks)
        assert len(whatif.ranks) == 2
        assert whatif.quality.step_error <= 0.02
        assert not whatif.quality.unusable_reason


@pytest.mark.parametrize("comm", [900.0, 6000.0])
def test_steps_that_a_host_far_ahead_launched_begin_with_the_work_before_them(
    tmp_path: Path, comm: float
) -> None:
    """Nothing holds the host, which launches 12 steps within the first four of the device. What it
    had launched before them runs first, also after it is done with all."""
    shape = Shape(seed=3, layers=6, host=400, device=1500, python=50, comm=comm, optimizer=10)
    alone = Cluster([loop(shape)], depth=4096)
    (a,) = opened(alone, tmp_path).values()
    whatif = WindowReplayer(a)
    assert whatif.graph.time[whatif.graph.step_boundaries[-1]] < 4e3 * alone.ranks[0].period
    assert whatif.quality.step_error <= 0.01
    assert not whatif.unusable_reason
    fast = Cluster([scale_kernels("gemm", 0.5).change(loop(shape))], depth=4096)
    gain = whatif.gain(scale_kernels("gemm", 0.5).edits) / 1e3
    true = alone.ranks[0].period - fast.ranks[0].period
    assert gain == pytest.approx(true, rel=WITHIN)


def test_of_three_ranks_the_second_slowest_is_waited_for_once_the_slowest_is_on_time(
    tmp_path: Path,
) -> None:
    """Compute of 1500, 1900 and 2500 µs: 600 µs can be saved, not 1000."""
    programs = [loop(replace(BASE, device=us)) for us in (1500, 1900, 2500)]
    case = Case(programs, [programs[0], programs[1], programs[1]], QUIET, tmp_path)
    assert case.true == pytest.approx(600, rel=0.05)
    case.check(Edit(op="remove_skew", select=COMM, rank=2))


def test_one_rank_alone_cannot_tell_waiting_from_transfer(tmp_path: Path) -> None:
    """Faster kernels on the rank that waits save nothing: the other one is as late as before. Its
    own trace alone says otherwise."""
    programs = [loop(BASE), loop(replace(BASE, device=2500))]
    fix = scale_kernels("gemm", 0.5)
    case = Case(programs, [fix.change(programs[0]), programs[1]], QUIET, tmp_path)
    edit = slowed(fix, 0)
    assert abs(case.true) < FLOOR * case.period
    case.check(edit)
    assert WindowReplayer(case.ranks[0]).gain([edit]) / 1e3 > 0.1 * case.period


def test_the_late_rank_itself_being_on_time_is_worth_what_the_others_gain(tmp_path: Path) -> None:
    programs = [loop(replace(BASE, device=2500)), loop(BASE)]
    case = Case(programs, [programs[1], programs[1]], QUIET, tmp_path)
    case.check(Edit(op="remove_skew", select=COMM, rank=0))


def test_ranks_that_share_no_collective_are_replayed_alone(tmp_path: Path) -> None:
    programs = [loop(replace(BASE, comm=0)), loop(replace(BASE, comm=0, device=2500))]
    ranks = opened(Cluster(programs), tmp_path)
    whatif = WindowReplayer(ranks[0], 0, ranks)
    assert whatif.ranks == ()
    assert whatif.gain([Edit(op="remove_skew", select=COMM, rank=1)]) == 0


# -- real traces, and the way in ---------------------------------------------------------------


def test_two_ranks_of_a_public_run_come_out_as_measured_together(
    shared_trace: Callable[[str], str], tmp_path: Path
) -> None:
    for name in ("two_ranks_rank0", "two_ranks_rank1"):
        shutil.copy(shared_trace(name), tmp_path)
    run = open_run(str(tmp_path))
    ranks = {number: Analysis(run.window(number)) for number in run.ranks}
    for number, a in ranks.items():
        whatif = WindowReplayer(a, number, ranks)
        assert sorted(whatif.ranks) == [0, 1]
        assert whatif.quality.step_error <= 0.005


def test_hiding_sends_gains_a_public_job_no_more_than_its_busier_gpu_sends(
    shared_file: Callable[[str], str],
) -> None:
    """Both GPUs take as long for a block of the model; so none gets faster than the one that sends
    and receives for less of it, waits included. From the database, in SQL: time in
    ``ncclDevKernel_SendRecv``, all of it alone on its stream, by attention (two a block)."""
    path = shared_file("nsys/mfu_2gpu_before.sqlite")
    query = (
        "SELECT SUM((k.end - k.start) * (s.value LIKE 'nccl%')) "
        "/ (SUM(s.value LIKE 'flash_fwd%') / 2.0) FROM CUPTI_ACTIVITY_KIND_KERNEL k "
        "JOIN StringIds s ON s.id = k.shortName GROUP BY k.deviceId"
    )
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
        sending = [ns for (ns,) in db.execute(query)]
    assert min(sending) < 0.6 * max(sending)
    report = analyze(path)
    found = {each.rule: each.impact for each in report.findings}
    impact = found["exposed-communication"]
    assert impact is not None and impact.of_job and impact.method == "replay"
    assert impact.low_ns and impact.gain_ns and impact.high_ns
    assert 0.3 * min(sending) < impact.low_ns < impact.gain_ns < impact.high_ns
    assert impact.high_ns < 1.05 * min(sending)
    fused = found["unfused-elementwise"]  # of the other GPU it has 19.9%, below its threshold
    assert fused is not None and fused.of_job and (fused.gain_ns or 0) > max(sending)


def test_a_folder_of_ranks_is_replayed_together_and_a_file_alone(tmp_path: Path) -> None:
    opened(Cluster([loop(BASE), loop(replace(BASE, device=2500))], **QUIET), tmp_path)
    found = what_if(open_run(str(tmp_path)), ["remove_skew comm rank:1"])
    assert found.ranks == (0, 1)
    assert found.edits[0].gain_ns / 1e3 == pytest.approx(1000, rel=0.05)
    with pytest.raises(AdvisorError, match="only rank 0 is replayed here"):
        what_if(open_run(str(tmp_path / "rank0.json")), ["remove_skew comm rank:1"])
    with pytest.raises(AdvisorError, match=r"no trace of rank 3 \(ranks present: 0, 1\)"):
        what_if(open_run(str(tmp_path)), [], rank=3)


def test_the_package_can_be_called_by_the_name_of_the_public_function(tmp_path: Path) -> None:
    """Before and after one of its modules was imported, which makes the name mean the package."""
    opened(Cluster([loop(BASE)], **QUIET), tmp_path)
    code = (
        "import sys, advisor; run = advisor.open(sys.argv[1])\n"
        "first = advisor.whatif(run, ['remove sync'])\n"
        "from advisor.replay.edit_language import parse_edit\n"
        "assert advisor.whatif(run, [parse_edit('remove sync')]) == first\n"
        "assert first.edits[0].selected > 0\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120)


@pytest.mark.parametrize("devices", [(1500, 2500), (2500, 1500), (1500, 1900, 2500)])
def test_a_report_prices_the_late_rank_by_replaying_all(
    tmp_path: Path, devices: tuple[int, ...]
) -> None:
    """Up to where the next one is waited for: 1000, 1000 and 600 µs."""
    opened(Cluster([loop(replace(BASE, device=us)) for us in devices], **QUIET), tmp_path)
    report = analyze(tmp_path)
    found = next(f for f in report.notes + report.findings if f.rule == "straggler-rank")
    assert found.impact is not None and found.impact.gain_ns is not None
    first, second = sorted(devices)[-1:-3:-1]
    assert found.impact.gain_ns / 1e3 == pytest.approx(first - second, rel=0.05)
    assert found.impact.method == "replay"
    assert report.ranks is not None and "replayed together" in report.ranks.note


def test_an_edit_may_name_one_rank() -> None:
    assert (
        parse_edit("punctual comm rank:3")
        == parse_edit("remove_skew comm rank:3")
        == Edit(op="remove_skew", select=COMM, rank=3)
    )
    assert parse_edit("scale comm rank:0 0.5") == parse_edit("scale comm 0.5 rank:0")
    for line in ("remove_skew comm", "punctual kernel rank:1", "scale comm rank:x 1"):
        with pytest.raises(AdvisorError):
            parse_edit(line)


@pytest.fixture
def dlrm(shared_trace: Callable[[str], str]) -> dict[int, Analysis]:
    folder = Path(shared_trace("dlrm_8ranks/worker0.pt.trace")).parent
    return {number: Analysis(trace) for (number, _), trace in open_run(folder).traces.items()}


def test_what_a_rank_waits_for_the_others_is_explained_in_time(dlrm: dict[int, Analysis]) -> None:
    """Eight ranks of a DLRM job: rank 0's collectives last 5.6 ms longer than they need to, by the
    starts of the same collectives on all ranks, on one clock."""
    whatif = WindowReplayer(dlrm[0], 0, dlrm)
    parts = {part.name: part for part in whatif.quality.hard}
    found = parts["waits for other ranks"]
    waits = stragglers(dlrm, align_ranks(dlrm))
    waited = waits.filter(pl.col("rank") == 0)["wait_ns"].item()
    assert found.time_ns == pytest.approx(waited, rel=0.02)
    assert found.explained > 0.95


def test_a_late_rank_on_time_is_worth_no_more_than_the_step_of_who_never_waits(
    dlrm: dict[int, Analysis],
) -> None:
    """Rank 7 of the DLRM job waits for nobody, and takes 12.5 ms; rank 0 takes 14.5."""
    whatif = WindowReplayer(dlrm[0], 0, dlrm)
    saved = whatif.gain([parse_edit("remove_skew comm rank:7")])
    at_most = dlrm[0].step_ns - dlrm[7].step_ns
    assert 0.8 * at_most < saved <= 1.05 * at_most
