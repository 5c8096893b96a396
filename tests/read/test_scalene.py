"""Scalene's JSON gives the hot lines, and nothing it may hold does harm."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.advise.engine import Options, analyze
from advisor.core.errors import AdvisorError
from advisor.read.formats import scalene
from advisor.read.formats.scalene import read_scalene
from advisor.render.formats import REPORTS
from advisor.testing.record import RecordBuilder
from tests.run_directories import write_run

REAL = Path(__file__).with_name("scalene_loader.json")
"""Scalene 2.4.0, ``run --cpu-only --no-stacks --no-async``, of a loop whose dataset computes in
Python: samples of memory and of single lines taken out, paths replaced."""


def profile(tmp_path: Path, lines: list[dict[str, Any]], name: str = "train.py") -> Path:
    file = tmp_path / "scalene.json"
    file.write_text(json.dumps({"files": {name: {"lines": lines, "functions": []}}}))
    return file


def line(number: int, percent: float, **more: Any) -> dict[str, Any]:
    return {
        "lineno": number,
        "line": f"line {number}",
        "n_cpu_percent_python": percent,
        "n_cpu_percent_c": 0,
        "n_sys_percent": 0,
        "start_region_line": 2,
        "start_function_line": 1,
        **more,
    }


def test_computing_dataset_line_comes_first() -> None:
    profile = read_scalene(REAL)
    first = profile[0]
    assert (first.line, first.function) == (11, "Slow.__getitem__")
    assert first.text == "values.append((i * k) % 7)"
    raw = json.loads(REAL.read_text())["files"]["/home/me/project/train.py"]["lines"]
    line = next(item for item in raw if item["lineno"] == 11)
    assert first.python == pytest.approx(line["n_cpu_percent_python"] / 100)
    assert first.share == pytest.approx(first.python + first.native + first.system)


def test_lines_that_run_once_are_left_out() -> None:
    # a third of the samples fell on the optimizer's first use, 2% on a sum after the training
    assert not {17, 27} & {item.line for item in read_scalene(REAL)}


def test_lines_are_sorted_and_small_ones_left_out(tmp_path: Path) -> None:
    file = profile(tmp_path, [line(5, 3), line(6, 30), line(7, 0.2)])
    assert [item.line for item in read_scalene(file)] == [6, 5]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "null",
        '{"files": 3}',
        '{"files": {"a": {"lines": [{"lineno": "x"}]}}}',
        "[" * 100_000,
        '{"files": {"a": {"lines": [{"n_cpu_percent_python": "\\ud800"}]}}}',
    ],
)
def test_a_file_that_is_no_profile_is_one_line_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "scalene.json"
    file.write_text(text)
    with pytest.raises(AdvisorError, match="not a Scalene profile"):
        read_scalene(file)


def test_a_profile_that_is_too_large_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scalene, "MAX_SCALENE_BYTES", 100)
    with pytest.raises(AdvisorError, match="larger than"):
        read_scalene(profile(tmp_path, [line(n, 2) for n in range(2, 40)]))


def test_numbers_out_of_range_count_for_nothing(tmp_path: Path) -> None:
    file = profile(tmp_path, [line(5, 1e300), line(6, -5), line(-7, 50), line(8, 10)])
    assert [item.line for item in read_scalene(file)] == [8]


@given(st.binary(max_size=300))
def test_arbitrary_bytes_give_lines_or_one_error(tmp_path_factory: Any, data: bytes) -> None:
    file = tmp_path_factory.mktemp("s") / "scalene.json"
    file.write_bytes(data)
    try:
        assert read_scalene(file) == []
    except AdvisorError as error:
        assert "\n" not in str(error)


def test_scalene_is_not_imported() -> None:
    read_scalene(REAL)
    assert "scalene" not in sys.modules


def recorded(tmp_path: Path, text: str) -> Path:
    r = RecordBuilder()
    r.rank.cpus = 8
    r.event("loader", id=1, workers=0)
    r.event("loader_iter", id=1)
    r.steps(60, 10, data=7, forward=1)
    folder = write_run(tmp_path / "run", {0: r.build()})
    (folder / "rank0" / "scalene.json").write_text(text)
    return folder


def test_the_loaders_finding_names_the_line_in_the_dataset(tmp_path: Path) -> None:
    report = analyze(recorded(tmp_path, REAL.read_text()), Options(config={}))
    (finding,) = [f for f in [*report.findings, *report.notes] if f.rule == "loader-workers"]
    assert (finding.where[0].file, finding.where[0].line) == ("/home/me/project/train.py", 11)
    assert report.hot_lines[0].line == 11
    for form in ("terminal", "markdown"):
        text = REPORTS.render(form, report, details=True)
        assert "train.py:11" in text and "values.append" in text


def test_damaged_profile_is_reported_beside_the_full_report(tmp_path: Path) -> None:
    report = analyze(recorded(tmp_path, "{]"), Options(config={}))
    assert report.hot_lines == []
    assert any("not a Scalene profile" in limit for limit in report.limits)


def test_hostile_lines_do_not_reach_the_terminal(tmp_path: Path) -> None:
    bad = line(5, 30, line="x = '\x1b[31m\x1b]0;owned\x07' | `tick` <script>")
    file = profile(tmp_path, [bad], name="a\x1b[2Jb.py")
    report = analyze(recorded(tmp_path, file.read_text()), Options(config={}))
    assert "\x1b" not in REPORTS.render("terminal", report)
    assert msgspec.json.decode(report.to_json())["hot_lines"][0]["line"] == 5
