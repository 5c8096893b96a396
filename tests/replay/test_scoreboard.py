"""docs/scoreboard.md says what the reports say."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import scoreboard

from tests.corpus_analyses import analyze_cached

ROWS = {
    cells[1].strip(): cells[4].strip().strip("`")
    for line in scoreboard.PAGE.read_text().splitlines()
    if len(cells := line.split("|")) > 7
}
HELD = {
    cells[1].strip(): cells[5].strip() == "yes"
    for line in scoreboard.PAGE.read_text().splitlines()
    if len(cells := line.split("|")) == 7 and cells[5].strip() in ("yes", "**no**")
}
"""Whether the range holds what the fix saved: as the page says it."""
COVERAGE = 0.8
TRUTH = tomllib.loads(scoreboard.TRUTH.read_text())
QUICK = 2_000_000
"""Bytes of a file that this test analyses; the others cost minutes."""


def size(name: str) -> int:
    path = Path(scoreboard.file_of(name))
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


def test_scoreboard_starts_with_the_sum_of_new_programs() -> None:
    text = scoreboard.PAGE.read_text()
    groups = re.findall(r"^\|[^|]+\| (\d+) \| (\d+) \|(?:[^|]+\|){3}$", text, re.MULTILINE)
    assert len(groups) >= 10
    faults, right = (sum(map(int, column)) for column in zip(*groups, strict=True))
    assert (
        f"**On {faults} programs that were new to the rules, the first advice was right on {right}."
        in text
    )


def test_every_known_file_has_its_row() -> None:
    assert set(TRUTH) <= set(ROWS)


@pytest.mark.parametrize("name", [name for name in TRUTH if size(name) < QUICK])
def test_scoreboard_row_is_the_first_finding(name: str) -> None:
    measured = "saves_ms" in TRUTH[name]  # then its own figures are no part of its ranges
    report = None if measured else analyze_cached(scoreboard.file_of(name)).report
    row = scoreboard.row(name, TRUTH[name], report)
    assert (row.first or "none") == ROWS[name]
    assert not row.unsaid
    assert row.inside is HELD.get(name)
    assert row.inside is not False or name.startswith("h100/")


def test_four_of_five_ranges_hold_and_misses_are_listed() -> None:
    assert len(HELD) >= 18
    assert sum(HELD.values()) >= COVERAGE * len(HELD)
