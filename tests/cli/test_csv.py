"""``advisor analyze --csv``: tables whose figures add up, and that a spreadsheet does not run."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import advisor
from advisor.core.report import MAX_OUTPUT_LINES
from advisor.testing import TraceBuilder

Cli = Callable[..., Any]
FORMULA = '=cmd|"/c calc"!A1'
NAMES = {"findings", "steps", "kernels", "operators", "rooflines", "idle"}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 steps that wait for the loader, with kernels of 900 and 100 µs."""
    b = TraceBuilder()
    for _ in range(20):
        with b.step():
            b.loader_wait(3000, workers=0)
            with b.op("aten::mm", [[512, 512], [512, 512]], "float"):
                b.launch("gemm_kernel", 900)
                b.launch(FORMULA, 100)
            b.sync()
    return b.write(tmp_path_factory.mktemp("csv") / "trace.json")


def read(folder: Path) -> dict[str, list[dict[str, str]]]:
    result = {}
    for file in folder.glob("*.csv"):
        with file.open(encoding="utf-8", newline="") as opened:
            result[file.stem] = list(csv.DictReader(opened))
    return result


def test_csv_tables_add_up_to_the_report(advisor: Cli, trace: Path, tmp_path: Path) -> None:
    result = advisor("analyze", trace, "--csv", tmp_path / "a" / "b", "--format", "json")
    assert result.code == 0 and "kernels.csv" in result.err
    report = advisor_report(result.out)
    parsed = read(tmp_path / "a" / "b")
    assert set(parsed) == NAMES
    kernels = {row["kernel"]: row for row in parsed["kernels"]}
    assert set(kernels) == {"gemm_kernel", f"'{FORMULA}"}
    # by hand: used steps have one of each
    assert float(kernels["gemm_kernel"]["ns_per_step"]) == 900e3
    assert float(kernels["gemm_kernel"]["share"]) == pytest.approx(0.9)
    (mm,) = parsed["rooflines"]
    assert (mm["operator"], mm["shapes"]) == ("aten::mm", "[512, 512] [512, 512]")
    assert float(mm["ns_per_step"]) == 1e6  # with what it launched beside its product
    assert float(mm["flops_per_call"]) == 2 * 512**3
    used = [row for row in parsed["steps"] if row["used"] == "True"]
    assert len(used) == report.scope.steps_used
    mean = sum(int(row["duration_ns"]) for row in used) / len(used)
    assert mean == pytest.approx(report.scope.step_ns)
    idle = sum(int(row["duration_ns"]) for row in parsed["idle"]) / len(used)
    assert idle == pytest.approx(sum(cause.ns for cause in report.idle))
    assert [row["rule"] for row in parsed["findings"] if row["section"] == "finding"] == [
        finding.rule for finding in report.findings
    ]
    assert parsed["findings"][0]["code"] == report.findings[0].code.rstrip("\r")
    assert parsed["operators"][0]["operator"] == "aten::mm"


def advisor_report(text: str) -> Any:
    from advisor.core.report import Report

    return Report.from_json(text)


def test_unmeasured_csv_values_are_empty_without_a_device(advisor: Cli, tmp_path: Path) -> None:
    b = TraceBuilder()
    for _ in range(4):
        with b.step(), b.op("aten::mm"):
            b.host(100)
    result = advisor("analyze", b.write(tmp_path / "cpu.json"), "--csv", tmp_path)
    trace = read(tmp_path)
    assert result.code == 0 and trace["kernels"] == trace["idle"] == []
    assert {row["device_ns"] for row in trace["operators"]} == {""}


def test_redacted_tables_tell_no_folder(advisor: Cli, tmp_path: Path) -> None:
    b = TraceBuilder()
    for _ in range(4):
        with b.step(), b.op("/home/alice/secret/train.py: step"):
            b.launch("gemm", 900)
            b.sync()
    advisor("analyze", b.write(tmp_path / "t.json"), "--csv", tmp_path / "out", "--redact")
    tables = "".join(file.read_text() for file in (tmp_path / "out").glob("*.csv"))
    assert "gemm" in tables and "alice" not in tables


def test_invalid_folder_is_one_line_error(advisor: Cli, trace: Path) -> None:
    for target in (trace, trace / "x"):
        result = advisor("analyze", trace, "--csv", target)
        assert (result.code, result.err.count("\n")) == (2, 1)


# -- print -------------------------------------------------------------------------------------


def test_printed_report_equals_command_and_repr_is_one_line(advisor: Cli, trace: Path) -> None:
    import advisor as library

    report = library.analyze(trace)
    output = advisor("analyze", trace).out
    assert str(report).splitlines() == output.rstrip("\n").splitlines()
    assert "\n" not in repr(report) and repr(report).startswith("<Report bottlenecks")
    assert repr([report]) == f"[{report!r}]"


def test_printed_tables_are_bounded_and_harmless(trace: Path) -> None:
    report = advisor.analyze(trace)
    report.limits = [f"limit {n} \x1b[2J" for n in range(3000)]
    report.verdict = "long\n\x1b[31m" * 3000
    lines = str(report).splitlines()
    assert len(lines) == MAX_OUTPUT_LINES + 1 and "more lines" in lines[-1]
    assert "\x1b" not in str(report) and "\x1b" not in repr(report) and len(repr(report)) < 300


def test_a_printed_comparison_is_the_table(trace: Path) -> None:
    from advisor.compare import compare

    comparison = compare(trace, trace)
    assert "Step times" in str(comparison) and repr(comparison).startswith(
        "<Comparison: No difference"
    )
    assert "\n" not in repr(comparison)


def test_a_notebook_shows_the_fix_with_its_code(trace: Path) -> None:
    report = advisor.analyze(trace)
    code = "loader = DataLoader(num_workers=8)\n<script>x</script>"
    first = report.findings[0] = replace(report.findings[0], code=code)
    text = report._repr_html_()
    assert "loader = DataLoader(num_workers=8)\n&lt;script&gt;" in text
    assert first.fix.split("<")[0][:40] in text and text.count("<details open") == 1
    assert "<script" not in text
