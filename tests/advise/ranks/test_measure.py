"""Summaries of one rank: the numbers of the ordinary report, bounded."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from advisor.advise.engine import analyze_in_full
from advisor.advise.ranks.task import summarize_file
from advisor.core.errors import AdvisorError
from advisor.measure.ranks.rank_summary import shrink_to_limit
from advisor.measure.ranks.summary_schema import MAX_SUMMARY_BYTES, decode, encode, pack, unpack
from advisor.measure.ranks.topology import find_racks, host_of
from advisor.testing import TraceBuilder

sys.path.insert(0, str(Path(__file__).parent))
from job_by_hand import MS, Collective, Work, run


def write_trace(tmp_path: Path, name: str = "rank3.json") -> str:
    trace = TraceBuilder()
    for number in range(4):
        with trace.step(number):
            trace.launch("gemm", 300)
            trace.collective("allreduce", 1 << 20, 200, wait=True)
            trace.launch("gemm", 100)
            trace.collective("_allgather_base", 1 << 16, 50, group="1", wait=True)
            trace.sync()
    return str(trace.write(tmp_path / name))


def test_rank_summary_equals_the_ordinary_report(tmp_path: Path) -> None:
    path = write_trace(tmp_path)
    report, summary = analyze_in_full(path).report, summarize_file(path)
    assert report.scope is not None
    assert summary.step_ns == report.scope.step_ns
    assert summary.time == {share.name: share.ns for share in report.time}
    assert summary.idle == {cause.cause: cause.ns for cause in report.idle}
    assert summary.families == {family.name: family.ns for family in report.families}
    assert summary.communication == report.communication_ns
    assert {a.rule for a in summary.findings} == {
        f.rule for f in (*report.findings, *report.risks, *report.notes)
    }
    assert summary.rank == 3
    for name in ("compute", "communication"):
        assert unpack(summary.per_step[name]).mean() == pytest.approx(summary.time[name])


def test_collectives_have_key_step_and_preceding_work(tmp_path: Path) -> None:
    summary = summarize_file(write_trace(tmp_path))
    collectives = summary.collectives
    assert collectives is not None
    assert collectives.kind == ["all_reduce", "all_gather"]
    assert collectives.group == ["0", "1"]
    assert unpack(collectives.step).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert unpack(collectives.key).tolist() == [0, 1] * 4
    start, end, step = (unpack(getattr(collectives, name)) for name in ("start", "end", "step"))
    work, exposed = unpack(collectives.work), unpack(collectives.exposed)
    assert exposed.tolist() == (end - start).tolist(), "nothing runs beside them"
    begin = np.array([each.start for each in summary.steps])
    for row in range(8):
        before = end[row - 1] if row % 2 else begin[step[row]]
        assert work[row] == start[row] - before


def test_summary_takes_the_given_rank_number(tmp_path: Path) -> None:
    assert summarize_file(write_trace(tmp_path), 17).rank == 17
    with pytest.raises(AdvisorError):
        summarize_file(str(tmp_path / "none.json"))


def test_large_summary_leaves_out_whole_steps() -> None:
    rng = np.random.default_rng(0)

    def program(rank: int, step: int) -> list[Work | Collective]:
        return [
            item
            for n in range(300)
            for item in (Work(rng.uniform(0.1, 1.0) * MS), Collective(f"g{n}", (0,), 99.0))
        ]

    large = run(1, 60, program).summaries[0]
    assert len(encode(large)) > MAX_SUMMARY_BYTES
    small = shrink_to_limit(large)
    assert len(encode(small)) <= MAX_SUMMARY_BYTES
    kept, complete = small.collectives, large.collectives
    assert kept is not None
    assert complete is not None
    steps, counts = np.unique(unpack(kept.step), return_counts=True)
    assert steps.tolist() == list(range(len(steps)))
    assert set(counts.tolist()) == {300}
    assert kept.dropped == complete.key.count - kept.key.count
    assert decode(encode(small)) == small


def test_oversized_step_still_gives_a_summary() -> None:
    rng = np.random.default_rng(0)
    count = 60_000
    base = run(1, 1, lambda rank, step: [Work(MS), Collective("g", (0,), 9.0)]).summaries[0]
    assert base.collectives is not None
    wild = pack(np.sort(rng.integers(0, 1 << 40, count)))
    zeros = pack(np.zeros(count, dtype=np.int64))
    columns = dict.fromkeys(("key", "order", "step", "exposed"), zeros)
    huge = replace(base.collectives, start=wild, end=wild, work=wild, **columns)
    small = shrink_to_limit(replace(base, collectives=huge))
    assert len(encode(small)) <= MAX_SUMMARY_BYTES
    assert small.collectives is None


@pytest.mark.parametrize(
    ("path", "host"),
    [
        ("runs/node-03_4711.1700000000123.pt.trace.json.gz", "node-03"),
        ("s3://bucket/run/node-03/rank24.json.gz", "node-03"),
        ("runs/rack2-node04_rank12.json", "rack2-node04"),
        ("runs/worker0.pt.trace.json.gz", ""),
        ("two_ranks_rank0.json.gz", ""),
        ("trace.json", ""),
    ],
)
def test_hosts_are_identified_by_names(path: str, host: str) -> None:
    assert host_of(path) == host


def test_racks_are_common_host_name_prefixes() -> None:
    names = [f"rack{rack}-node{node:02d}" for rack in range(3) for node in range(4)]
    assert set(find_racks(names).values()) == {"rack0", "rack1", "rack2"}
    assert find_racks(["node-01", "node-02"]) == {}


def test_the_shared_pair_has_consistent_summaries(shared_file: Callable[[str], str]) -> None:
    summary = summarize_file(shared_file("two_ranks_rank0.json.gz"))
    assert len(encode(summary)) < MAX_SUMMARY_BYTES
    assert summary.world == 128
    assert summary.collectives is not None
    assert set(summary.collectives.kind) >= {"all_to_all", "all_reduce", "all_gather"}
