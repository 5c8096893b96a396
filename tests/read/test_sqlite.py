"""Rows of one table by numbers that stand in another."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path

import polars as pl
import pytest

from advisor.read.reader import ReadOptions
from advisor.read.source import ByteSource
from advisor.read.sqlite import KeyedTable, NameLookup, Numbered, open_database, read_numbered

EXTREMES = [-(2**63), 2**63 - 1]


@pytest.mark.parametrize("gaps", [False, True])
def test_row_lookup_by_number_equals_a_dictionary(gaps: bool) -> None:
    chance = random.Random(1)
    numbers = list(range(5, 400, 3 if gaps else 1))
    chance.shuffle(numbers)
    values = {n: n * 7 for n in numbers}
    rows = Numbered(pl.DataFrame({"id": numbers, "value": [values[n] for n in numbers]}), "id")
    wanted = [chance.randrange(-10, 500) for _ in range(1000)] + [None, *EXTREMES]
    row = rows.at(pl.Series(wanted, dtype=pl.Int64)).to_series().to_list()
    assert row == [None if n is None else values.get(n) for n in wanted]


def test_first_row_of_a_number_counts() -> None:
    rows = Numbered(pl.DataFrame({"id": [3, None, 3, 1], "value": ["a", "b", "c", "d"]}), "id")
    assert rows.at(pl.Series([3, 1, 2, None])).to_series().to_list() == ["a", "d", None, None]
    none = Numbered(pl.DataFrame(schema={"id": pl.Int64, "value": pl.String}), "id")
    assert none.at(pl.Series([3, None])).to_series().to_list() == [None, None]


@pytest.mark.parametrize("key", ["INTEGER PRIMARY KEY", "INTEGER", "TEXT PRIMARY KEY"])
def test_stored_table_is_independent_of_its_row_layout(tmp_path: Path, key: str) -> None:
    path = tmp_path / "some.sqlite"
    with sqlite3.connect(path) as db:
        db.execute(f"CREATE TABLE texts (id {key}, text TEXT)")
        rows = [(n, f"text {n % 17}") for n in range(0, 50_000, 2)]
        db.executemany("INSERT INTO texts VALUES (?, ?)", rows)
    rows_by_key = dict(rows) if "TEXT" not in key else {}  # numbers that are texts are none
    wanted = pl.Series([7, 8, None, 49_998, 50_000, *EXTREMES, *range(0, 20_000, 6)])
    expected = [rows_by_key.get(n) for n in wanted.to_list()]
    with open_database(ByteSource(str(path)), ReadOptions()) as db:
        table = KeyedTable(db, "texts", "id", {"text": pl.String, "other": pl.Int64})
        row = table.at(wanted)
        assert row["text"].to_list() == expected
        assert row["other"].null_count() == len(wanted)
        assert NameLookup(db, "texts", "id", "text").names_of(wanted).to_list() == expected
        lost = KeyedTable(db, "nowhere", "id", {"text": pl.String})
        assert lost.at(wanted)["text"].null_count() == len(wanted)
        assert not db.damaged


def test_cached_and_missing_tables(
    tmp_path: Path,
) -> None:
    path = tmp_path / "some.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE stamps (id INTEGER PRIMARY KEY, value)")
        rows = [(n, n * 10**12) for n in range(1, 50_000)]
        db.executemany("INSERT INTO stamps VALUES (?, ?)", rows)
    types = {"id": pl.Int64, "value": pl.Int64, "other": pl.String}
    wanted = pl.Series([2, None, 0, 49_999, 50_000, *EXTREMES])
    expected = [2 * 10**12, None, None, 49_999 * 10**12, None, None, None]
    with open_database(ByteSource(str(path)), ReadOptions()) as db:
        table = read_numbered(db, "stamps", types, lambda batch: batch.with_columns(twice="value"))
        row = table.at(wanted)
        assert row["value"].to_list() == row["twice"].to_list() == expected
        assert row["other"].null_count() == len(wanted)
        assert table.at(wanted, ["value"]).columns == ["value"]
        lost = read_numbered(db, "nowhere", types, lambda batch: batch.with_columns(twice="value"))
        assert lost.at(wanted, ["twice"])["twice"].null_count() == len(wanted)


def test_empty_table_has_derived_columns(tmp_path: Path) -> None:
    path = tmp_path / "none.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE stamps (id INTEGER PRIMARY KEY, value)")
    types = {"id": pl.Int64, "value": pl.Int64}
    with open_database(ByteSource(str(path)), ReadOptions()) as db:
        table = read_numbered(db, "stamps", types, lambda batch: batch.with_columns(twice="value"))
        assert table.at(pl.Series([1]), ["twice"]).to_dicts() == [{"twice": None}]
