"""The files of simulated jobs are read as any other, to the numbers that the short way has."""

from __future__ import annotations

import gzip
import math
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from advisor.advise.engine import analyze_in_full
from advisor.advise.ranks.task import summarize_file
from advisor.measure.ranks.summary_schema import PackedColumns, RankSummary, unpack
from benchmarks.simulation import kineto
from benchmarks.simulation.engine import SimulatedRun
from benchmarks.simulation.jobs import HEALTHY
from benchmarks.simulation.programs import play, simulate
from benchmarks.simulation.summaries import summarize_all

APART = ("path", "events", "bytes_read", "findings", "details")
"""Fields that only a summary read from a file has."""


def small_job(seed: int, kind: str) -> SimulatedRun:
    """A job of 16 ranks and three steps, all of whose files are whole."""
    played, _ = play(seed, 16, kind, steps=3)
    return simulate(replace(played.job, lost=(), cut=()))


def unpack_value(value: object) -> object:
    """Unpack a value so that it can be compared."""
    if isinstance(value, PackedColumns):
        return unpack(value).tolist()
    if isinstance(value, float):
        return float(f"{value:.12g}")
    if isinstance(value, dict):
        return {key: unpack_value(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [unpack_value(each) for each in value]
    if isinstance(value, msgspec.Struct):
        return {name: unpack_value(getattr(value, name)) for name in value.__struct_fields__}
    return value


@pytest.mark.parametrize(
    ("seed", "kind"),
    [(1, "slow_host"), (2, "pipeline_imbalance"), (4, "expert_imbalance"), (5, "slow_input")],
)
def test_summary_is_the_same_with_and_without_a_file(tmp_path: Path, seed: int, kind: str) -> None:
    played = small_job(seed, kind)
    fast, unread = summarize_all(played)
    assert not unread and len(fast) == 16
    for rank in (0, 13):
        path = tmp_path / kineto.file_name(played.job, rank)
        path.write_bytes(gzip.compress(kineto.trace(played, rank), 1))
        read = summarize_file(str(path))
        for name in RankSummary.__struct_fields__:
            if name not in APART:
                actual, expected = (
                    unpack_value(getattr(fast[rank], name)),
                    unpack_value(getattr(read, name)),
                )
                assert actual == expected, name
        assert read.findings and read.details


def test_analyze_reads_a_simulated_file_without_complaint(tmp_path: Path) -> None:
    played = small_job(3, HEALTHY)
    path = tmp_path / kineto.file_name(played.job, 5)
    path.write_bytes(gzip.compress(kineto.trace(played, 5), 1))
    result = analyze_in_full(path)
    assert list(result.analyses) == [5] and result.main.step_count == 3
    trace = result.main.trace
    assert not trace.meta.truncated and trace.meta.nesting_repaired == 0
    lost = {why for why in trace.meta.events_dropped if not why.startswith("not used")}
    assert not lost
    assert trace.gpu["launch"].null_count() == 0
    kernels = played.kernels["rank"] == 5
    assert (trace.gpu["name"].cast(str).str.contains("nccl")).sum() == (
        played.talks["rank"] == 5
    ).sum()
    assert trace.gpu.height == kernels.sum() + (played.talks["rank"] == 5).sum() + 3


def test_lost_ranks_have_no_file_and_cut_ones_say_so(tmp_path: Path) -> None:
    played = small_job(7, HEALTHY)
    played = simulate(replace(played.job, lost=(2,), cut=(9,)))
    files = kineto.write(played, tmp_path)
    assert len(files) == 15
    cut = next(path for path in files if f"_{kineto.PID + 9}." in path.name)
    assert summarize_file(str(cut)).damage
    fast = {summary.rank: summary for summary in summarize_all(played)[0]}
    assert sorted(fast) == [rank for rank in range(16) if rank != 2]
    assert fast[9].damage and not fast[8].damage
    assert fast[9].time["compute"] < 0.7 * fast[8].time["compute"]


def test_clocks_of_hosts_are_apart_and_drift() -> None:
    played = small_job(8, HEALTHY)
    steps = played.steps
    begin = [int(steps["start"][steps["rank"] == rank][0]) for rank in range(16)]
    same = [abs(begin[rank] - begin[0]) for rank in range(8)]
    other = [abs(begin[rank] - begin[0]) for rank in range(8, 16)]
    assert max(same) < 1_000 < min(other)
    true = simulate(replace(played.job, offset_ns=0.0, drift=0.0)).steps
    stretch = [
        np.ptp(steps["end"][steps["rank"] == rank]) / np.ptp(true["end"][true["rank"] == rank]) - 1
        for rank in (0, 8)
    ]
    assert all(0 < abs(part) <= 51e-6 for part in stretch)
    assert not math.isclose(*stretch, rel_tol=1e-3)


def test_long_rank_lists_are_cut_like_pytorch() -> None:
    assert kineto.format_ranks([0, 8]) == "[0, 8]"
    assert kineto.format_ranks(list(range(64))).endswith("27, 28, ..., 63]")
