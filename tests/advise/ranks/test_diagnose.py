"""Jobs whose fault is known: who is blamed, for what, and with which gain."""

from __future__ import annotations

import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from advisor.advise.engine import Options, analyze
from advisor.advise.finding_text import gain_conditions
from advisor.advise.ranks.task import summarize_file
from advisor.core.finding import Edit, Finding, Impact, Select, SkippedCheck
from advisor.core.ranks import Ranks, format_ranks
from advisor.measure.ranks.summary_schema import (
    Advice,
    KernelSummary,
    RankSummary,
    StepSummary,
    UnreadRank,
    pack,
    unpack,
)
from advisor.render.formats import REPORTS
from advisor.replay.ranks.estimator import RanksEstimator
from advisor.replay.ranks.rank_comparison import compare_ranks
from advisor.rules.distributed.straggler_rank import StragglerRank

sys.path.insert(0, str(Path(__file__).parent))
from job_by_hand import MS, Collective, Item, JobRun, Program, Work, run

SYNC = Edit(op="remove", select=Select(on="host"))
NO_REPLAY = {"method": "replay", "error": 0.0, "reason": "", "unseen_loader": False}
RANKS, STEPS, PIECES = 32, 6, 8
EVERYBODY = tuple(range(RANKS))
Extra = Callable[[int, int, int], Sequence[Item]]
"""Maps (rank, step, piece) to additional work."""


def data_parallel(extra: Extra, seed: int = 0, noise: float = 0.02) -> Program:
    """A step of eight pieces of compute and host time, each ended by an all-reduce of all ranks."""
    rng = np.random.default_rng(seed)
    factor = rng.normal(1.0, noise, (RANKS, STEPS, PIECES))

    def program(rank: int, step: int) -> list[Item]:
        items: list[Item] = []
        for piece in range(PIECES):
            items.append(Work(MS * factor[rank, step, piece]))
            items.append(Work(0.1 * MS * factor[rank, step, piece], "idle: dispatch"))
            items += extra(rank, step, piece)
            items.append(Collective("world", EVERYBODY, 0.2 * MS))
        return items

    return program


def no_extra_work(rank: int, step: int, piece: int) -> list[Item]:
    return []


def diagnose(summaries: Sequence[RankSummary], unread: Sequence[UnreadRank] = ()) -> Ranks:
    """Return what the diagnosis says of these ranks."""
    comparison = compare_ranks(summaries, unread)
    assert comparison is not None
    return comparison.ranks


def diagnose_job(
    extra: Extra,
    *,
    seed: int = 0,
    kernels: Callable[[int], dict[str, KernelSummary]] = lambda rank: {},
) -> tuple[Ranks, float]:
    """The report, and what the step is shorter by without what is extra."""
    ran = run(RANKS, STEPS, data_parallel(extra, seed), kernels=kernels)
    without = run(RANKS, STEPS, data_parallel(no_extra_work, seed))
    return diagnose(ran.summaries), ran.step_ns - without.step_ns


@pytest.mark.parametrize("seed", range(40))
def test_equal_ranks_have_no_straggler(seed: int) -> None:
    report = diagnose(run(RANKS, STEPS, data_parallel(no_extra_work, seed)).summaries)
    assert report.outliers == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [("compute", "compute"), ("idle: loader", "input"), ("idle: python", "host")],
)
def test_rank_with_more_own_work_is_reported(name: str, kind: str) -> None:
    report, gain = diagnose_job(lambda r, s, p: [Work(0.3 * MS, name)] if r == 7 else [])
    (outlier,) = report.outliers
    assert (outlier.unit, outlier.name, outlier.ranks, outlier.kind, outlier.moves) == (
        "rank",
        "7",
        "7",
        kind,
        False,
    )
    assert outlier.significance is not None
    assert outlier.significance > 0.99
    assert outlier.gain_ns == pytest.approx(gain, rel=0.05)
    assert outlier.low_ns is not None
    assert outlier.high_ns is not None
    assert outlier.low_ns <= gain <= outlier.high_ns
    assert outlier.reason


def test_ranks_waiting_in_collectives_are_not_blamed() -> None:
    report, _ = diagnose_job(lambda r, s, p: [Work(1.0 * MS)] if r == 3 and p == 0 else [])
    assert [outlier.ranks for outlier in report.outliers] == ["3"]
    waiting = report.classes.index("waiting")
    assert min(row.time[waiting] for row in report.lines if row.rank != 3) > 0.9 * MS
    assert next(row.time[waiting] for row in report.lines if row.rank == 3) < 0.5 * MS


def test_a_host_is_reported_as_a_host() -> None:
    report, _ = diagnose_job(
        lambda r, s, p: [Work(0.3 * MS, "idle: loader")] if 8 <= r < 16 else []
    )
    (outlier,) = report.outliers
    assert (outlier.unit, outlier.name, outlier.ranks, outlier.kind) == (
        "host",
        "node-01",
        "8-15",
        "input",
    )


def test_slow_device_differs_from_imbalance_by_kernel_times() -> None:
    def kernels(rank: int, slow: tuple[float, float]) -> dict[str, KernelSummary]:
        gemm, other = slow if rank == 7 else (1.0, 1.0)
        return {
            "gemm#1": KernelSummary(50, 6 * MS * gemm, 0.12 * MS * gemm),
            "norm#2": KernelSummary(50, 2 * MS * other, 0.04 * MS * other),
        }

    def slower_rank(rank: int, step: int, piece: int) -> list[Item]:
        return [Work(0.3 * MS)] if rank == 7 else []

    slow, _ = diagnose_job(slower_rank, kernels=lambda rank: kernels(rank, (1.3, 1.3)))
    uneven, _ = diagnose_job(slower_rank, kernels=lambda rank: kernels(rank, (1.0, 2.2)))
    assert [outlier.kind for outlier in slow.outliers] == ["compute"]
    assert "1.30 times" in slow.outliers[0].reason
    assert [outlier.kind for outlier in uneven.outliers] == ["imbalance"]


def test_another_rank_in_each_step_is_reported_as_moving() -> None:
    order = np.random.default_rng(5).permutation(RANKS)
    report, gain = diagnose_job(lambda r, s, p: [Work(0.4 * MS)] if r == order[s] else [])
    (outlier,) = report.outliers
    assert (outlier.kind, outlier.moves) == ("imbalance", True)
    assert outlier.ranks == format_ranks(order[:STEPS].tolist())
    assert outlier.gain_ns == pytest.approx(gain, rel=0.1)


def test_one_long_step_makes_no_straggler() -> None:
    report, _ = diagnose_job(lambda r, s, p: [Work(0.9 * MS)] if r == 7 and s == 2 else [])
    assert report.outliers == []


def test_slow_links_of_one_host_are_reported() -> None:
    rng = np.random.default_rng(2)
    factor = rng.normal(1.0, 0.02, (RANKS, STEPS, PIECES))

    def program(rank: int, step: int) -> list[Item]:
        node = rank // 4
        members = tuple(range(4 * node, 4 * node + 4))
        items: list[Item] = []
        for piece in range(PIECES):
            items.append(Work(MS * factor[rank, step, piece]))
            items.append(Collective(f"tp{node}", members, (0.6 if node == 5 else 0.2) * MS))
        return [*items, Collective("world", EVERYBODY, 0.1 * MS)]

    ran = run(RANKS, STEPS, program, host=lambda rank: f"node-{rank // 4:02d}")
    report = diagnose(ran.summaries)
    (outlier,) = report.outliers
    assert (outlier.unit, outlier.name, outlier.ranks, outlier.kind) == (
        "host",
        "node-05",
        "20-23",
        "network",
    )
    # the other hosts wait for it at the end of the step: eight times 0.4 ms
    assert outlier.gain_ns == pytest.approx(8 * 0.4 * MS, rel=0.1)


def pipeline(longer: float) -> JobRun:
    """Four stages of two ranks, six microbatches forward through them."""
    rng = np.random.default_rng(4)
    factor = rng.normal(1.0, 0.01, (8, STEPS, 6))

    def program(rank: int, step: int) -> list[Item]:
        stage, lane = divmod(rank, 2)
        items: list[Item] = []
        for batch in range(6):
            if stage:
                items.append(_send(stage - 1, lane))
            work = MS * factor[rank, step, batch] * (1 + longer * (stage == 2))
            items += [Work(work), Collective(f"tp{stage}", (2 * stage, 2 * stage + 1), 0.02 * MS)]
            if stage < 3:
                items.append(_send(stage, lane))
        return items

    return run(8, STEPS, program, host=lambda rank: "")


def _send(stage: int, lane: int) -> Collective:
    ends = (2 * stage + lane, 2 * stage + 2 + lane)
    return Collective(f"p2p{stage}-{lane}", ends, 0.01 * MS, "send_recv")


def test_long_pipeline_stage_is_reported_without_its_bubbles() -> None:
    report = diagnose(pipeline(0.4).summaries)
    (outlier,) = report.outliers
    assert (outlier.unit, outlier.name, outlier.ranks, outlier.kind) == (
        "stage",
        "2",
        "4-5",
        "pipeline",
    )
    assert outlier.gain_ns is not None
    assert outlier.gain_ns > 0
    assert diagnose(pipeline(0.0).summaries).outliers == []


def test_single_pause_is_reported_without_a_straggler() -> None:
    def pause(rank: int, step: int, piece: int) -> list[Item]:
        return [Work(40 * MS, "idle: python")] if (rank, step, piece) == (5, 2, 0) else []

    def straggler_messages(extra: Extra) -> list[str]:
        comparison = compare_ranks(run(RANKS, STEPS, data_parallel(extra)).summaries)
        assert comparison is not None and not comparison.outliers
        outcomes = StragglerRank().check_run(comparison)
        skipped = [item for item in outcomes if isinstance(item, SkippedCheck)]
        return [f"{item.what}: {item.why}" for item in skipped]

    (line,) = straggler_messages(pause)
    assert line.startswith("why rank 5 pauses in one step: in ")
    assert "2 it takes 40" in line or "2 it takes 39" in line
    assert straggler_messages(no_extra_work) == []


def test_pipeline_gain_assumes_rebalanced_stages() -> None:
    comparison = compare_ranks(pipeline(0.4).summaries)
    assert comparison is not None
    (finding,) = StragglerRank().check_run(comparison)
    assert isinstance(finding, Finding)
    assert "rebalanced stages" in finding.assumptions[0]


def test_gain_of_waiting_ranks_is_no_gain_of_the_job() -> None:
    def slower_rank(rank: int, step: int, piece: int) -> list[Item]:
        return [Work(0.5 * MS)] if rank == 7 else []

    def gain(who: set[int]) -> float:
        """The gain of a finding that saves each of these ranks 2 ms by itself. Rank 0 has the
        report."""
        advice = Advice("launch-bound", "host", 2 * MS)
        ran = run(
            RANKS,
            STEPS,
            data_parallel(slower_rank),
            findings=lambda rank: [advice] if rank in who else [],
        )
        comparison = compare_ranks(ran.summaries)
        assert comparison is not None
        impact = Impact(currency="step_time", gain_ns=round(2 * MS * (0 in who)))
        finding = Finding(
            rule="launch-bound", summary="", category="host", edits=[SYNC], impact=impact
        )
        estimator = RanksEstimator(
            cast("Any", SimpleNamespace(**NO_REPLAY)), comparison, 0, [finding]
        )
        assert estimator.ranks_with("launch-bound") == len(who)
        return estimator.gain_range(finding.edits).gain

    assert gain(set(EVERYBODY) - {7}) == pytest.approx(0, abs=0.02 * MS)
    assert gain({7}) == pytest.approx(2 * MS, rel=0.1)
    assert gain(set(EVERYBODY)) == pytest.approx(2 * MS, rel=0.1)


def make_estimator(ns: float) -> Any:
    """The estimator of a rank that saves so much by whatever it is asked for."""
    return SimpleNamespace(marginal=lambda edits, applied: ns)


def test_fix_applies_to_ranks_where_its_rule_is_silent() -> None:
    """The rank's value lies just below the rule's threshold. Each rank saves 2 ms, so the job
    does. If the silent ranks saved nothing, the others would wait for them."""
    advice = Advice("launch-bound", "host", 2 * MS)
    ran = run(
        RANKS,
        STEPS,
        data_parallel(no_extra_work),
        findings=lambda rank: [advice] if rank % 2 == 0 else [],
    )
    comparison = compare_ranks(ran.summaries)
    assert comparison is not None
    impact = Impact(currency="step_time", gain_ns=2 * MS)

    def gain(edit: Edit, saved: float | None) -> float:
        finding = Finding(
            rule="launch-bound", summary="", category="host", edits=[edit], impact=impact
        )
        replay_stub = cast("Any", SimpleNamespace(**NO_REPLAY))
        other = None if saved is None else make_estimator(saved)
        return (
            RanksEstimator(replay_stub, comparison, 0, [finding], lambda rank: other)
            .gain_range([edit])
            .gain
        )

    of_trace = replace(SYNC, select=Select(on="gpu", correlation=(3,)))
    of_rank = replace(SYNC, rank=0)
    assert gain(SYNC, 2 * MS) == pytest.approx(2 * MS, rel=0.1)
    assert gain(SYNC, None) == pytest.approx(0, abs=0.1 * MS)
    for edit in (of_trace, of_rank):
        assert gain(edit, 2 * MS) == pytest.approx(0, abs=0.1 * MS)


def test_hiding_communication_gains_at_most_the_least_of_a_rank() -> None:
    """Rank 7 comes last in every collective and waits for nobody. Without the transfers it is as
    late, so the job gains these; if its own wait could be hidden too, it has none."""
    slow = data_parallel(lambda r, s, p: [Work(0.5 * MS)] if r == 7 else [], noise=0)
    uneven = data_parallel(no_extra_work, noise=0.3)
    for program, waits in ((slow, False), (uneven, True)):
        ran = run(RANKS, STEPS, program)
        comparison = compare_ranks(ran.summaries)
        assert comparison is not None
        exposed = {place: s.time["communication"] for place, s in enumerate(ran.summaries)}
        impact = Impact(currency="step_time", gain_ns=round(exposed[0]), high_ns=round(exposed[0]))
        edit = Edit(op="overlap", select=Select(on="gpu", family=("communication",)))
        finding = Finding(
            rule="exposed-communication",
            summary="",
            category="distributed",
            edits=[edit],
            impact=impact,
        )
        estimator = RanksEstimator(
            cast("Any", SimpleNamespace(**NO_REPLAY)),
            comparison,
            0,
            [finding],
            lambda rank, of=exposed: make_estimator(of[rank]),
        )
        gain = estimator.gain_range([edit])
        transfers = PIECES * 0.2 * MS
        assert gain.gain == pytest.approx(transfers, rel=0.02)
        assert gain.high <= min(exposed.values()) * 1.01 + 2 * abs(
            comparison.replay.replayed_ns - comparison.replay.measured_ns
        )
        assert (gain.high > 1.2 * transfers) == waits


def test_missing_ranks_are_reported_beside_the_others_results() -> None:
    ran = run(RANKS, STEPS, data_parallel(lambda r, s, p: [Work(0.3 * MS)] if r == 7 else []))
    present = [summary for summary in ran.summaries if summary.rank not in (4, 5, 20)]
    lost = [UnreadRank(rank=rank, path=f"{rank}.json", why="access denied") for rank in (4, 5)]
    report = diagnose(present, [*lost, UnreadRank(rank=20, path="20.json", why="cut off")])
    assert [(m.ranks, m.count, m.why) for m in report.missing] == [
        ("4-5", 2, "access denied"),
        ("20", 1, "cut off"),
    ]
    assert [outlier.ranks for outlier in report.outliers] == ["7"]
    assert (len(report.lines), report.world) == (29, 32)


@pytest.mark.parametrize("slow", [True, False])
def test_the_steps_before_the_cut_of_a_truncated_file_count(slow: bool) -> None:
    extra = (lambda r, s, p: [Work(0.3 * MS)] if r == 7 else []) if slow else no_extra_work
    ran = run(RANKS, STEPS, data_parallel(extra))
    summaries = list(ran.summaries)
    complete = summaries[7]
    length = np.array([step.end - step.start for step in complete.steps])
    cut = np.arange(STEPS) < 3
    per_step = {n: pack(np.where(cut, unpack(v), 0)) for n, v in complete.per_step.items()}
    idle = unpack(complete.per_step["idle: dispatch"])
    per_step["idle: dispatch"] = pack(np.where(cut, idle, length))
    summaries[7] = replace(complete, damage="cut off before its end", per_step=per_step)
    report = diagnose(summaries)
    assert [outlier.kind for outlier in report.outliers] == (["compute"] if slow else [])
    assert "7" in report.not_checked["the work of damaged files"]


def test_rank_with_several_files_counts_once() -> None:
    ran = run(RANKS, STEPS, data_parallel(no_extra_work))
    report = diagnose([*ran.summaries, replace(ran.summaries[4], path="copy.json")])
    assert len(report.lines) == RANKS
    assert "4" in report.not_checked["further files of the same ranks"]


def test_no_ranks_and_a_rank_without_collectives() -> None:
    assert compare_ranks([]) is None
    lone = RankSummary(rank=0, path="a.json", step_ns=0.0)
    report = diagnose([lone])
    assert report.step is None
    assert report.outliers == []
    single_rank = run(1, 3, lambda rank, step: [Work(MS)]).summaries
    diagnosis = diagnose(single_rank)
    assert diagnosis.step is not None and diagnosis.step.median == MS


def test_the_public_job_of_eight_ranks(shared_file: Callable[[str], str]) -> None:
    """README of the traces: rank 7 comes last in 5 of 8 collectives."""
    summaries = [
        summarize_file(shared_file(f"dlrm_8ranks/worker{rank}.pt.trace.json.gz"))
        for rank in range(8)
    ]
    report = diagnose(summaries)
    (outlier,) = report.outliers
    assert (outlier.unit, outlier.name) == ("rank", "7")
    assert outlier.last_share == pytest.approx(5 / 8)
    assert outlier.significance is not None
    assert 0.98 < outlier.significance < 1
    assert "5 of 8" in outlier.reason
    assert report.alignment_error_ns is not None
    column = {name: place for place, name in enumerate(report.classes)}
    # the ordinary report of rank 0: 38% of its step is communication that nothing hides
    first = report.lines[0]
    exposed = first.time[column["communication"]] + first.time[column["waiting"]]
    assert exposed / first.step_ns == pytest.approx(0.38, abs=0.005)
    folder = Path(shared_file("dlrm_8ranks/worker0.pt.trace.json.gz")).parent
    full_report = analyze(folder, Options(config={}))
    assert full_report.ranks is not None and full_report.ranks.outliers == report.outliers
    (exposed_there,) = (
        f for f in (*full_report.findings, *full_report.notes) if f.rule == "exposed-communication"
    )
    assert "seen on 8 of 8 ranks" in exposed_there.confidence_notes
    evidence = {item.label: item.value for item in exposed_there.evidence}
    assert str(evidence["exposed by rank"]).startswith("0 38%, 1 56%")
    assert evidence["exposed in all-to-all"]
    late, exposed_share = (
        next(item.value for item in exposed_there.evidence if item.label.startswith(label))
        for label in ("exposed in waiting for the last rank", "exposed, all ranks")
    )
    assert 0.9 * exposed_share < late < exposed_share  # both of the step


def test_job_report_names_its_step_and_waits_between_ranks(
    shared_file: Callable[[str], str],
) -> None:
    """DLRM: steps of 12.5 to 19.9 ms. Its messages are small, so fewer bytes help nothing, and no
    graph can hold its reads of values."""
    folder = Path(shared_file("dlrm_8ranks/worker0.pt.trace.json.gz")).parent
    report = analyze(folder, Options(config={}))
    assert "a 14.5 ms step of rank 0 (ranks: 12.5 ms to 19.9 ms)" in report.verdict
    for axis in report.mesh:
        assert axis.waiting_ns is None and axis.waited_here_ns is not None
        assert 0.8 * axis.ns < axis.waited_here_ns <= axis.ns
    text = REPORTS.render("terminal", report, details=True)
    assert "How long is unknown" not in text and "≥ 3.96 ms" in text
    result = {f.rule: f for f in (*report.findings, *report.notes)}
    assert result["launch-bound"].fix.startswith(
        "Replay only the dense layers as CUDA graphs; leave the 4 waits per step for the GPU"
    )
    fix = result["exposed-communication"].fix
    assert fix.startswith("Let rank 7 enter with the others") and "nor fewer bytes shorten" in fix


def large_job(ranks: int, steps: int, per: int, slow: int) -> list[RankSummary]:
    """Data-parallel, whole columns at once: each collective ends when the last rank has come."""
    rng = np.random.default_rng(9)
    work = MS * rng.normal(1.0, 0.02, (ranks, steps * per))
    work[slow] *= 1.3
    end = np.cumsum(work.max(axis=0) + 0.1 * MS)
    start = np.concatenate([[0.0], end[:-1]]) + work
    clock = 3 * MS * rng.normal(size=ranks // 8)
    base = run(2, 1, lambda rank, step: [Work(MS), Collective("world", (0, 1), 9.0)]).summaries[0]
    assert base.collectives is not None
    result = []
    for rank in range(ranks):
        local_start = start[rank] + clock[rank // 8]
        over = end + clock[rank // 8]
        begin = np.concatenate([[clock[rank // 8]], over[per - 1 : -1 : per]])
        lines = [
            StepSummary(f"ProfilerStep#{n}", round(a) + 10**18, round(b) + 10**18)
            for n, (a, b) in enumerate(zip(begin, over[per - 1 :: per], strict=True))
        ]
        waited = np.rint(over).astype(np.int64) - np.rint(local_start).astype(np.int64)
        by_step = waited.reshape(steps, per).sum(axis=1)
        length = np.array([line.end - line.start for line in lines])
        index = np.arange(steps * per, dtype=np.int64)
        columns = {
            "key": np.zeros_like(index),
            "order": index,
            "step": index // per,
            "start": np.rint(local_start).astype(np.int64) + 10**18,
            "end": np.rint(over).astype(np.int64) + 10**18,
            "exposed": waited,
            "work": np.rint(work[rank]).astype(np.int64),
        }
        packed = {name: pack(values) for name, values in columns.items()}
        result.append(
            replace(
                base,
                rank=rank,
                host=f"node-{rank // 8:03d}",
                world=ranks,
                steps=lines,
                step_ns=float(length.mean()),
                time={"compute": float((length - by_step).mean()), "idle": 0.0},
                per_step={"compute": pack(length - by_step), "communication": pack(by_step)},
                collectives=replace(base.collectives, size=[ranks], **packed),
            )
        )
    return result


def test_thousand_ranks_are_diagnosed_within_time_and_memory() -> None:
    summaries = large_job(1024, 10, 100, slow=77)
    tracemalloc.start()
    begin = time.process_time()
    report = diagnose(summaries)
    took = time.process_time() - begin
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    (outlier,) = report.outliers
    assert (outlier.unit, outlier.name, outlier.kind) == ("rank", "77", "compute")
    # a million collectives, 100 a step: without it the last of 1,023 is some 3.2 deviations late
    assert outlier.gain_ns == pytest.approx(100 * (1.3 - 1.065) * MS, rel=0.1)
    assert report.alignment_error_ns is not None
    assert peak < 1 << 30
    assert took < 60, "seconds of CPU; some 5 where memory is not traced"
    assert len(msgspec.json.encode(report)) < 1 << 20


def test_no_measurement_of_a_late_rank_is_shown_twice(shared_trace: Callable[[str], str]) -> None:
    report = analyze(Path(shared_trace("dlrm_8ranks/worker7.pt.trace")).parent)
    (late,) = [finding for finding in report.findings if finding.rule == "straggler-rank"]
    labels = [item.label for item in late.evidence]
    assert "exposed wait of the others" in labels and len(labels) == len(set(labels))
    assert "more host time" in late.summary
    (note,) = gain_conditions(late, report)  # 1.27 of 5.06 ms
    assert note.endswith("5.06 ms below: the others then wait for the next rank")
    assert "time.perf_counter" in late.code and "a @ a" not in late.code, "the host is to test"
    (waits,) = [note for note in report.notes if note.rule == "exposed-communication"]
    assert waits.fix.startswith("Let rank 7 enter with the others") and not waits.code
    assert "traces of all ranks" not in waits.fix, "this report is of all ranks"


def test_outlier_fixed_by_a_finding_is_not_listed_twice(
    shared_trace: Callable[[str], str],
) -> None:
    """Rank 7 is late: a fix, so no change of its own. It comes before a fix of about the same gain,
    because its range starts higher."""
    report = analyze(Path(shared_trace("dlrm_8ranks/worker7.pt.trace")).parent)
    text = " ".join(REPORTS.render("terminal", report, details=True).split())
    first, fixes, others = (text.index(part) for part in ("rank 0 of 8", "What to", "What if"))
    assert first < fixes < others and "rank 7 arriving" not in text
    assert "rank 7 (--rank 7) keeps the others waiting longest step: rank 1, 19.9 ms" in text
    leading, second = report.findings[:2]
    assert (leading.rule, second.rule) == ("straggler-rank", "launch-bound")
    assert leading.impact is not None and second.impact is not None
    assert leading.impact.gain_ns == pytest.approx(second.impact.gain_ns, rel=0.1)
    assert (leading.impact.low_ns or 0) > 1.5 * (second.impact.low_ns or 0)
