"""Time as long as a listed gain that no finding is about has a line of its own, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from advisor.advise.engine import Options, analyze
from advisor.advise.report_text import describe_time_without_fix
from advisor.core.report import Report
from advisor.core.report_time import TimeWithoutFix
from advisor.render.formats import REPORTS
from advisor.testing import TraceBuilder

OPTIONS = Options(config={})
H100 = Path(__file__).parents[1] / "corpus" / "h100"
Trace = Callable[[str], str]


def report_of(path: str | Path) -> Report:
    return analyze(str(path), options=OPTIONS)


def part_of(report: Report, label: str) -> TimeWithoutFix:
    (part,) = (each for each in report.without_fix if label in each.labels)
    return part


def idle_ns(report: Report, cause: str) -> float:
    return sum(each.ns for each in report.idle if each.cause == cause)


@pytest.mark.parametrize(
    ("name", "cause", "label", "why"),
    [
        ("dlrm_8ranks/worker0.pt.trace", "loader", "data loader", "3 ms per batch"),
        ("dlrm_8ranks/worker6.pt.trace", "loader", "data loader", "3 ms per batch"),
        ("dlrm_8ranks/worker0.pt.trace", "unknown", "outside operators", "with_stack=True"),
        ("pairs/particle_batch64", "allocation", "allocating memory", "3 marked steps"),
    ],
)
def test_idle_time_as_long_as_a_fix_has_a_reason(
    shared_trace: Trace, name: str, cause: str, label: str, why: str
) -> None:
    report = report_of(shared_trace(name))
    part = part_of(report, label)
    smallest = min(f.impact.gain_ns or 0 for f in report.findings if f.priority and f.impact)
    assert part.ns == pytest.approx(idle_ns(report, cause)) and part.ns >= smallest
    assert why in part.why
    text = REPORTS.render("terminal", report, details=True)
    assert f"{label} " in text.partition("no fix")[2].partition("What to change")[0]


def test_exposed_copies_are_distinguished_by_direction(shared_trace: Trace) -> None:
    """201 reads of values belong to the first fix; copies within the GPU take 2.7% of the time."""
    report = report_of(shared_trace("pairs/sam_3_bf16_compiled_sdpa"))
    part = part_of(report, "exposed copies")
    assert part.ns == next(each.ns for each in report.time if each.name == "copies")
    assert part.why == (
        "15.1 ms to the CPU belong to fix 1; "
        "13.4 ms within the GPU (little to gain if such copies take under 5% of the time)"
    )


def test_a_fix_that_the_replay_finds_useless_is_named() -> None:
    """Pinning in the loop holds up the step; the copies are as long, and hide behind it."""
    report = report_of(H100 / "pin_each_step")
    why = part_of(report, "exposed copies").why
    assert "(to copy the next batch on a separate stream while this step computes gains" in why


def test_a_note_on_a_part_is_its_reason(shared_trace: Trace) -> None:
    report = report_of(shared_trace("dlrm_8ranks/worker7.pt.trace"))
    part = part_of(report, "exposed comm.")
    assert part.why.startswith("the fix gains little by itself, as the host sets the pace (89%")
    assert part.why.endswith("of the critical path)")


def test_causes_covered_by_a_finding_are_not_repeated(shared_trace: Trace) -> None:
    """Late launches are fix 2 on each rank, the loader's waits fix 1 of the pair."""
    for name in ("dlrm_8ranks/worker0.pt.trace", "pairs/loader_autograd_workers0"):
        named = {
            label for each in report_of(shared_trace(name)).without_fix for label in each.labels
        }
        assert not named & {"CPU operators", "exposed comm."}
    assert "data loader" not in named


def test_a_step_that_computes_has_no_such_time(tmp_path: Path) -> None:
    b = TraceBuilder()
    for _ in b.steps():
        b.product(6000, wait=True)
    (tmp_path / "trace.json").write_bytes(b.json())
    assert describe_time_without_fix(report_of(tmp_path / "trace.json")) == []


def test_a_note_that_may_gain_as_much_as_a_fix_is_shown(shared_trace: Trace) -> None:
    text = REPORTS.render("terminal", report_of(shared_trace("a100_train_6steps")), width=120)
    (line,) = (line for line in text.splitlines() if "The host waits for GPU values" in line)
    assert "possibly" in line and line.startswith(" ∙")


def test_possible_board_power_limit_is_only_a_note() -> None:
    report = report_of(H100 / "healthy_lm")
    (note,) = (note for note in report.notes if note.rule == "power-throttling")
    assert note.impact is not None and note.impact.gain_ns is None
    assert "Raise the limit if it is below" in note.fix
    assert note.title not in REPORTS.render("terminal", report, width=120)


def test_the_start_of_cuda_before_the_first_work_is_said(shared_trace: Trace) -> None:
    """cudaDeviceGetStreamPriorityRange takes 29.9 and 24.6 s before the first kernel."""
    for name, took in (("alexnet", "29.9 s"), ("simple_add", "24.6 s")):
        report = report_of(shared_trace(name))
        assert f"CUDA's start took {took} before that." in report.verdict
        assert any(f"{took} of it in cudaDeviceGet" in limit for limit in report.limits)
    quiet = report_of(shared_trace("pairs/sam_3_bf16_compiled_sdpa"))
    assert "CUDA starts" not in quiet.verdict and not any("of it in" in x for x in quiet.limits)


def test_existing_ranges_are_not_requested() -> None:
    """Some 11,000 NVTX ranges are in this file, and explain a quarter of the time."""
    report = report_of(H100.parent / "nsys" / "ee4fcf3_report1.sqlite.gz")
    texts = [report.verdict, *(each.record for each in report.not_checked)]
    assert sum("more NVTX ranges" in text for text in texts) == 2
    assert not any("with NVTX ranges" in text for text in texts)
