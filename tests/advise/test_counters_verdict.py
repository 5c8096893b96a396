"""The verdict about hardware counters alone: it names kernels as the table does, and what to do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import advisor
from advisor.render.formats import REPORTS

CORPUS = Path(__file__).parents[1] / "corpus"


@pytest.mark.parametrize(
    "name",
    ["cutlass_a100_s4.ncu-rep.gz", "deepseek_ocr_rtx5090.csv.gz", "sparse_matmul_a10g.ncu-rep.gz"],
)
def test_the_kernel_that_is_first_has_one_name_everywhere(name: str) -> None:
    report = advisor.analyze(CORPUS / "ncu" / name)
    first = re.split(r"First: |A smaller gain: ", report.verdict)[1]
    kernel = first[first.index("(") + 1 : first.index(")")].split(" and ")[0]
    shown = REPORTS.render("terminal", report, width=100)
    table, findings = shown.split("What the counters show")
    assert f"  {kernel}  " in table
    assert kernel in " ".join(findings.split())


def test_kernels_that_wait_at_a_low_occupancy_have_something_to_do() -> None:
    report = advisor.analyze(CORPUS / "rocprof" / "rocprof_compute_sample.db.gz")
    longest = max(report.kernel_counters, key=lambda k: (k.duration_ns or 0) * k.profiled)
    assert longest.occupancy == pytest.approx(0.094, abs=0.001) and not report.notes
    assert (
        "Its occupancy is 9%" in report.verdict and "Give it more work per launch" in report.verdict
    )


def test_times_alone_say_how_to_add_the_counters() -> None:
    report = advisor.analyze(CORPUS / "rocprof" / "laplacian" / "kernel1_results.csv.gz")
    assert "collect it with rocprof-compute profile (AMD)" in report.verdict
    report = advisor.analyze(CORPUS / "rocprof" / "laplacian" / "kernel1_data_movement.csv.gz")
    assert "Give the file of their times with it (--kernels FILE)" in report.verdict
