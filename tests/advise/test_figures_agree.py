"""Figures of one quantity agree within a report: what a reader can recompute comes out the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from advisor.advise import engine
from advisor.advise.finding_text import ranked_findings
from advisor.advise.gain_reasons import beyond_evidence, range_reasons
from advisor.core.errors import AdvisorError
from advisor.core.report import Report
from advisor.render.formats import REPORTS
from benchmarks.public_traces import CORPUS
from tests.advise.test_contradictions import files

RECORDED = CORPUS.parent / "data" / "recorded"
UNITS = {"ns": 1, "µs": 1e3, "ms": 1e6, "s": 1e9, "min": 60e9}
TIME = r"([\d.,]+) (ns|µs|ms|s|min)\b"
ROUNDING = 0.012
"""Maximum difference of two shares that the rounding of times and shares explains."""


def _all_inputs() -> list[Path]:
    runs = sorted(path for path in RECORDED.iterdir() if re.search(r"\.(slow|cured)$", path.name))
    return [*files(), *runs]


@pytest.fixture(
    scope="module", params=_all_inputs(), ids=lambda p: str(p.relative_to(CORPUS.parent))
)
def report(request: pytest.FixtureRequest) -> Report:
    try:
        return engine.analyze(str(request.param))
    except AdvisorError as error:
        pytest.skip(f"no trace of steps: {error}")


@pytest.fixture(scope="module")
def text(report: Report) -> str:
    return re.sub(r"\s+", " ", REPORTS.render("terminal", report, details=True))


def _parse(value: str, unit: str) -> float:
    return float(value.replace(",", "")) * UNITS[unit]


def test_profiler_overhead_follows_from_the_times_beside_it(text: str) -> None:
    both = re.search(
        rf"the profiler adds (\d+)%: the median profiled step takes {TIME}, the median step around "
        rf"them {TIME}",
        text,
    )
    of_mean = re.search(
        rf"window .*?(?:· |takes ){TIME}.*?the profiler adds (\d+)% to the "
        rf"(?:{TIME} of the steps around them|run's (median|mean) step)",
        text,
    )
    if both:
        share, profiled, usual = int(both[1]), _parse(*both.group(2, 3)), _parse(*both.group(4, 5))
    elif of_mean:
        share, profiled = int(of_mean[3]), _parse(*of_mean.group(1, 2))
        if of_mean[4]:
            usual = _parse(*of_mean.group(4, 5))
        else:
            run = re.search(rf"run .*?{of_mean[6]} {TIME}", text)
            assert run is not None
            usual = _parse(*run.groups())
    else:
        assert not re.search(r"the profiler adds \d+%", text)
        return
    assert profiled / usual - 1 == pytest.approx(share / 100, abs=ROUNDING * profiled / usual)


def test_share_of_the_first_gain_is_of_the_step_that_the_report_leads_with(report: Report) -> None:
    named = re.search(rf"A fix (?:may save|saves) [a-z ]*{TIME} \((\d+)%", report.verdict)
    if named and report.step_ns:
        gain = _parse(named[1], named[2])
        assert gain / report.step_ns == pytest.approx(int(named[3]) / 100, abs=ROUNDING)


def test_no_range_has_two_equal_ends(text: str) -> None:
    assert not re.search(
        r"(?<![\d.,])([\d.,]+)( (?:µs|ms|s|J|MiB|GiB))?(?: to |–)\1 (µs|ms|s)\b", text
    )


def test_removed_share_of_a_time_gives_the_gain(report: Report) -> None:
    for finding in ranked_findings(report):
        notes = " ".join(range_reasons(finding, report))
        removed = re.search(r"the fix removes about (\d+)% of this time", notes)
        if removed:
            assert finding.shown_time is not None and finding.impact is not None
            share = (finding.impact.gain_ns or 0) / float(finding.shown_time.value or 0)
            if "for the run's step" in " ".join(beyond_evidence(finding, report)):
                share /= report.gain_scale or 1.0
            assert share == pytest.approx(int(removed[1]) / 100, abs=ROUNDING)


def test_the_worst_call_fits_in_an_analysed_step(report: Report) -> None:
    scope = report.scope
    if report.per != "step" or scope.has_no_step_time:
        return
    for finding in ranked_findings(report):
        for place in finding.where:
            if place.op is not None and place.dur_ns is not None:
                assert place.dur_ns <= 1.05 * scope.step_max_ns, (finding.rule, place)


def test_energy_over_power_is_a_step(text: str) -> None:
    energy = re.search(
        rf"energy ([\d.]+) J per step · ([\d.]+) W(?: · measured in \d+ steps? of {TIME})?", text
    )
    step = re.search(rf"(?:per step|steps) .*?{TIME}", text)
    if energy and energy[3]:
        seconds = float(energy[1]) / float(energy[2])
        assert seconds * 1e9 == pytest.approx(_parse(energy[3], energy[4]), rel=0.02)
    assert step or not energy


def test_no_table_has_a_column_of_dashes(text: str, report: Report) -> None:
    page = REPORTS.render("terminal", report)
    for title in ("Inference by phase", "Ranks"):
        if f"\n{title} " in page:
            section = page.partition(f"\n{title} ")[2].partition("\n\n")[0]
            rows = [line.split() for line in section.splitlines()[1:]]
            cells = [row for row in rows if len(row) > 2 and len(row) == len(rows[1])]
            for column in zip(*cells, strict=True):
                assert set(column) != {"–"}, section
