"""Verdicts on recorded runs: they name the facts that stand out, with figures that recur below."""

import gzip
import re
from pathlib import Path

import pytest

from advisor.advise import engine
from advisor.advise.engine import Options
from advisor.advise.finding_text import is_unseen_code, ranked_findings
from advisor.advise.host_verdict import MIN_WAITING_SHARE
from advisor.advise.report_text import describe_all_fixes, find_slow_steps, other_load
from advisor.advise.verdict_parts import MIN_PAUSE_SHARE, MIN_SLOW_SHARE
from advisor.core.report import Report
from advisor.core.text import format_share, host_label
from advisor.render.formats import REPORTS
from advisor.testing import TraceBuilder
from advisor.testing.record import RecordBuilder
from tests.run_directories import write_run

OPTIONS = Options(config={})
TESTS = Path(__file__).parents[1]
RECORDED = sorted((TESTS / "data" / "recorded").iterdir())
H100 = sorted(path.parent for path in (TESTS / "corpus" / "h100").glob("*/manifest.json"))


@pytest.fixture(
    scope="module", params=[*RECORDED, *H100], ids=lambda path: f"{path.parent.name}/{path.name}"
)
def report(request: pytest.FixtureRequest) -> Report:
    return engine.analyze(str(request.param), OPTIONS)


@pytest.fixture(scope="module")
def text(report: Report) -> str:
    return re.sub(r"\s+", " ", REPORTS.render("terminal", report))


def test_most_is_said_of_more_than_half(text: str) -> None:
    most = re.findall(
        r"(?:mostly \S+|Most of [^.]*? is [^.()]*|Nearly all of [^.()]*) \((\d+)%", text
    )
    led = re.findall(r"(?:led by \S+|The largest part of [^.()]*) \((\d+)%", text)
    assert all(int(share) >= 50 for share in most), most
    assert all(int(share) <= 50 for share in led), led


def test_large_share_of_slow_steps_and_pauses_is_in_the_verdict(report: Report) -> None:
    slow = find_slow_steps(report)
    if slow is not None and slow.share >= MIN_SLOW_SHARE:
        share = rf" and takes? {format_share(slow.share)} of the time"
        load = re.escape(other_load(report).removesuffix(" in these steps"))
        assert re.search(rf"twice the median{f': {load}' if load else share}\.", report.verdict)
        assert "found no more" not in report.verdict
    recorded = report.recorded
    if recorded is None or not recorded.outside_share or report.findings:
        return
    assert ("auses between steps" in report.verdict) == (recorded.outside_share >= MIN_PAUSE_SHARE)


def test_verdict_without_a_fix_says_so(report: Report) -> None:
    if report.time or report.status != "limited" or report.recorded is None:
        return
    if not report.findings:
        assert re.search(r"Nothing (else )?to fix was found", report.verdict)
    for phase in report.recorded.phases:
        if phase.name == "data" and phase.share >= MIN_WAITING_SHARE:
            assert "found no more" not in report.verdict
            assert f"oading data takes {format_share(phase.share)}" in report.verdict


def test_phases_of_the_verdict_recur_in_the_report(report: Report, text: str) -> None:
    below = text[len(re.sub(r"\s+", " ", report.verdict)) :]
    for phase in () if report.recorded is None else report.recorded.phases:
        share = format_share(phase.share)
        quoted = re.search(
            rf"{re.escape(host_label(phase.name))}(?::| takes)? {share}", report.verdict
        )
        if quoted:
            assert re.search(rf"{host_label(phase.name)} (?:[\d.]+ \S+ )?{share}", below)


def test_code_that_nobody_has_seen_is_no_speedup(report: Report, text: str) -> None:
    assert len(re.findall(r"advisor record --deep \S+\.py", text)) <= 1
    if any(map(is_unseen_code, ranked_findings(report))):
        assert describe_all_fixes(report) == "" and "faster" not in report.verdict


def run_with_slow_steps(folder: Path, *, slow_ms: float, phase: str) -> Report:
    """Return the report of steps of 10 ms, of which every fifth or sixth is ``slow_ms`` longer."""
    b = TraceBuilder(gpu=None)
    for _ in b.steps():
        b.on_host("aten::mm", 9900)
    r = RecordBuilder()
    for number in range(60):
        more = slow_ms if number in (13, 19, 24, 37, 46, 51) else 0.0
        phases = {"forward": 5.5, "backward": 4.4}
        phases[phase] += more
        r.step(10 + more, **phases)
    r.event("end", steps=60, reason="finished")
    write_run(folder, {0: r.build()})
    (folder / "rank0" / "trace_w0.json.gz").write_bytes(gzip.compress(b.json()))
    return engine.analyze(folder, OPTIONS)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_slow_steps_are_named_with_their_phase(tmp_path: Path, phase: str) -> None:
    verdict = run_with_slow_steps(tmp_path / "run", slow_ms=40, phase=phase).verdict
    assert "6 of 50 timed steps exceed twice the median and take 41% of the time." in verdict
    assert f"Most of their extra time is in {phase} (100%)." in verdict
    assert "Record again on an idle machine" in verdict
    assert "Nothing else to fix was found in its mean step of 14.8 ms." in verdict
    assert "own computation" not in verdict and "found no more" not in verdict


def test_few_slow_steps_are_not_named(tmp_path: Path) -> None:
    verdict = run_with_slow_steps(tmp_path / "run", slow_ms=11, phase="forward").verdict
    assert "twice the median" not in verdict and "advisor cannot tell" in verdict


def test_risks_lead_a_verdict_without_a_fix() -> None:
    verdict = engine.analyze(
        TESTS / "data" / "recorded" / "evaluation_graphs.slow", OPTIONS
    ).verdict
    assert "First: evaluation builds autograd graphs that no backward pass uses." in verdict
    assert "Long pauses between steps take 17% of the time after the first step." in verdict


def test_growth_of_memory_in_the_verdict_is_explained_below() -> None:
    report = engine.analyze(TESTS / "data" / "recorded" / "leak.slow", OPTIONS)
    text = " ".join(REPORTS.render("terminal", report).split())
    assert "at this rate, the 22 GiB left are full in 4,030 steps" in report.verdict
    assert "grew by 1.25 GiB in 230 steps, 5.59 MiB per step" in text


def test_pauses_beside_a_busy_gpu_are_in_the_verdict(tmp_path: Path) -> None:
    """The GPU is busy and has no fix; the pauses take a sixth of the run."""
    b = TraceBuilder()
    for _ in range(6):
        with b.step():
            b.product(9_800, wait=True)
            b.host(200)
    r = RecordBuilder()
    for number in range(60):
        pause = 20.0 if number % 10 == 9 else 0.0
        r.step(10, forward=4, backward=6, evaluation=pause)
    r.event("end", steps=60, reason="finished")
    folder = tmp_path / "run"
    write_run(folder, {0: r.build()})
    (folder / "rank0" / "trace_w0.json.gz").write_bytes(gzip.compress(b.json()))
    report = engine.analyze(folder, OPTIONS)
    assert report.status != "bottlenecks" and report.verdict.startswith("GPU busy 9")
    pauses = "Long pauses between steps take 17% of the time after the first step."
    assert report.verdict.endswith(pauses)
