"""Foreign input (rules, requests, ledgers, names) costs one line, never a traceback."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from advisor import cli
from advisor.core import files
from advisor.export.csv_tables import CsvTable
from advisor.replay import ledger
from advisor.testing import TraceBuilder

RULE = """
from advisor.core.finding import Edit, Finding, Impact, Location, Select
from advisor.core.rule import Evidence, Rule
class Mine(Rule):
    id = {id}
    title = "mine"
    category = {category}
    {attribute}
    def check(self, a):
        yield {outcome}
"""
NONSENSE = {
    "a number": "5",
    "nothing": "None",
    "a class": "Finding",
    "a summary of another type": "Finding(summary=5)",
    "evidence of another type": "Finding(summary='x', evidence=7)",
    "a list of other things": "Finding(summary='x', where=[3, None])",
    "not a number": "Finding(summary='x', evidence=[Evidence('a', float('nan'), 'ns')])",
    "infinite confidence": "Finding(summary='x', confidence=float('inf'))",
    "an edit that is none": "Finding(summary='x', edits=['scale', 3])",
    "a pattern that is none": "Finding(summary='x', edits=[Edit('remove', Select(name='((('))])",
}


@pytest.fixture(scope="module")
def slow_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    b = TraceBuilder()
    for _ in range(4):
        with b.step():
            b.loader_wait(5000, workers=0)
            with b.op("aten::mm"):
                b.launch("gemm", 900)
    return b.write(tmp_path_factory.mktemp("slow") / "trace.json")


def write_rule(folder: Path, **parts: str) -> Path:
    fields = {"id": "'mine'", "category": "'host'", "attribute": "pass", "outcome": "5", **parts}
    (folder / "mine.py").write_text(RULE.format(**fields))
    return folder


@pytest.mark.parametrize("kind", NONSENSE)
def test_invalid_yield_of_a_user_rule_is_a_skipped_check(
    kind: str, slow_trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = write_rule(tmp_path, outcome=NONSENSE[kind])
    for form in ("terminal", "json", "html"):
        assert cli.run(["analyze", str(slow_trace), "--rules", str(rules), "--format", form]) == 0
        out, errors = capsys.readouterr()
        assert "Traceback" not in errors
        if form == "json":
            report = json.loads(out)
            (skipped,) = [item for item in report["not_checked"] if item["what"] == "mine"]
            assert skipped["why"].startswith("the rule failed (")
            assert report["findings"], "the others ran on"


@pytest.mark.parametrize(
    "parts",
    [
        {"id": "7"},
        {"id": "'Mine Own'"},
        {"id": "('a', 'b')"},
        {"category": "'nowhere'"},
        {"category": "5"},
        {"attribute": "fix = 3"},
        {"attribute": "confidence = 'high'"},
        {"attribute": "assumptions = 'one'"},
        {"attribute": "inference = []"},
    ],
)
def test_user_rule_with_invalid_attributes_is_one_line_error(
    parts: dict[str, str], slow_trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = str(write_rule(tmp_path, **parts))
    for line in (
        ["analyze", str(slow_trace), "--rules", rules],
        ["rules", "list", "--rules", rules],
    ):
        assert cli.run(line) == 2
        errors = capsys.readouterr().err
        assert errors.count("\n") == 1 and "mine.py: rule Mine: " in errors


def test_a_ratio_of_the_ledger_is_a_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {"rule": "a", "predicted": 1e-300, "measured": 1e300, "low": 0, "high": 0},
        {"rule": "a", "predicted": 1e-300, "measured": 1.0, "low": 0, "high": 0},
        {"rule": "a\u202egnp.exe\u2066", "predicted": 0.2, "measured": 0.1, "low": 0.1, "high": 1},
    ]
    file = tmp_path / "ledger.jsonl"
    text = "".join(json.dumps({"schema": ledger.SCHEMA, **line}) + "\n" for line in lines)
    file.write_text(text + '{"schema": "advisor.ledger/1", "measured_high": 1e999}\n')
    table = ledger.read_ledger(file)
    assert ([row.ratio for row in table.predictions], table.skipped) == ([0.5], 3)
    for form in ("terminal", "json"):
        assert cli.run(["ledger", str(file), "--format", form]) == 0
        output = capsys.readouterr().out
        assert not any(char in output for char in "\u202e\u2066")
    assert json.loads(output)[0]["rule"] == "a\u202egnp.exe\u2066"


def test_ledger_counts_shipped_and_own_predictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.jsonl"
    monkeypatch.setenv(ledger.VARIABLE, str(file))
    shipped = len(ledger.shipped_rule_predictions())
    for count, yours in ((0, "none yet"), (2, "2 predictions")):
        ledger.append_to_ledger(
            file, [ledger.Prediction(rule="a", predicted=0.4, measured=0.3)] * count
        )
        assert cli.run(["ledger"]) == 0
        output = " ".join(capsys.readouterr().out.split())
        assert f"Shipped with advisor: {shipped}; yours: {yours} (" in output


@pytest.mark.parametrize("first", ["=", " =", "\u3000=", "\u00a0+", *"＝＋－＠﹦", "\t="])
def test_no_cell_is_a_formula(first: str) -> None:
    text = CsvTable(["name"], [[f"{first}HYPERLINK(1)"], [""], ["a=b"], [-3]]).text()
    rows = list(csv.reader(io.StringIO(text)))
    assert rows[1][0].startswith("'") or not rows[1][0].lstrip().startswith(("=", "+", "-", "@"))
    assert rows[2:] == [[""], ["a=b"], ["-3"]]


HELD = """
import sys, time
from advisor.core.files import scratch_folder
with scratch_folder() as folder:
    print(folder, flush=True)
    time.sleep(600)
"""


def test_files_of_a_killed_process_go_and_files_in_use_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "advisor-of-somebody").mkdir()  # no lock in it: not ours to judge
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    monkeypatch.setattr(files, "MIN_AGE_SECONDS", 0.0)
    with subprocess.Popen(
        [sys.executable, "-c", HELD], env=env, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        leftover = Path(program.stdout.readline().strip())
        assert leftover.stat().st_mode & 0o777 == 0o700
        with files.scratch_folder(tmp_path):
            assert leftover.exists()
        program.kill()
        program.wait(60)
    time.sleep(0.01)
    with files.scratch_folder(tmp_path) as scratch:
        assert {file.name for file in tmp_path.iterdir()} == {scratch.name, "advisor-of-somebody"}
