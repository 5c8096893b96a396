"""Files of other profilers, damaged in every way: read, or refused in a line; soon, in little room.

``ADVISOR_MUTATIONS=2000`` tries so many mutants of each format; a few otherwise.
"""

from __future__ import annotations

import os
import random
import sqlite3
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import util
from pathlib import Path
from types import ModuleType

import pytest

from advisor.ingest import read_trace

MUTANTS = int(os.environ.get("ADVISOR_MUTATIONS", "0"))
SAMPLE = 40


def _load(path: str) -> ModuleType:
    file = Path(__file__).resolve().parents[1] / path
    spec = util.spec_from_file_location(f"databases_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


mutations = _load("ingest/test_mutations.py")
files = _load("ingest/profiler_files.py")
every = _load("robustness/test_every_reader.py")
Chance = random.Random
ODD = [None, -1, 0, 1, 59, 60, 2**31, 2**32, 2**62, -(2**63), 2**63 - 1, 0.5, 1e308, float("inf"),
       "", "x", "7", "aten::mm, seq = 99999999999999999999, sizes = [[1]]", b"\0\xff", b"x" * 5000,
       "\ud7ff\U0010ffff", "<script>alert(1)</script>", "a" * 100_000]  # fmt: skip

SEEDS: dict[str, Callable[[Path], Path]] = {
    "nsys": lambda folder: files.nsys(folder / "seed.sqlite", processes=2),
    "rpd": lambda folder: files.rpd(folder / "seed.rpd"),
    "rocpd": lambda folder: files.rocpd(folder / "seed.db"),
    "rocpd 4": lambda folder: files.rocpd(folder / "seed4.db", 4),
    "rocprofv3": lambda folder: files.rocprof_json(folder / "seed_results.json"),
}


# -- how ------------------------------------------------------------------------------------------


def tables(db: sqlite3.Connection) -> list[str]:
    return [n for (n,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]


def columns(db: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in db.execute(f'PRAGMA table_info("{table}")')]


def odd_values(db: sqlite3.Connection, chance: Chance) -> None:
    """In some rows of one column, or in all."""
    for _ in range(chance.choice([1, 3, 10])):
        table = chance.choice(tables(db))
        column = chance.choice(columns(db, table))
        where = chance.choice(["", f" WHERE rowid % 7 = {chance.randrange(7)}"])
        try:
            db.execute(f'UPDATE "{table}" SET "{column}" = ?{where}', (chance.choice(ODD),))
        except sqlite3.IntegrityError:
            continue  # a primary key


def shifted_values(db: sqlite3.Connection, chance: Chance) -> None:
    """Numbers times or plus something."""
    table = chance.choice(tables(db))
    column = chance.choice(columns(db, table))
    change = chance.choice(["* -1", "* 1000000", "+ 1000000000000", "% 3", "/ 1000", "* 2"])
    with suppress(sqlite3.Error):
        db.execute(f'UPDATE OR IGNORE "{table}" SET "{column}" = "{column}" {change}')


def without_a_table(db: sqlite3.Connection, chance: Chance) -> None:
    db.execute(f'DROP TABLE "{chance.choice(tables(db))}"')


def without_a_column(db: sqlite3.Connection, chance: Chance) -> None:
    table = chance.choice(tables(db))
    with suppress(sqlite3.Error):
        db.execute(f'ALTER TABLE "{table}" DROP COLUMN "{chance.choice(columns(db, table))}"')


def other_columns(db: sqlite3.Connection, chance: Chance) -> None:
    """A table of the same name with columns of its own, or a view that never ends."""
    table = chance.choice(tables(db))
    db.execute(f'DROP TABLE "{table}"')
    if chance.random() < 0.5:
        db.execute(f'CREATE TABLE "{table}" (id, start TEXT, "end" BLOB, "odd name", value)')
        db.execute(f'INSERT INTO "{table}" VALUES (?, ?, ?, ?, ?)', chance.choices(ODD, k=5))
    else:
        db.execute(
            f'CREATE VIEW "{table}" AS WITH RECURSIVE n(start) AS (SELECT 1 UNION ALL SELECT '
            'start + 1 FROM n) SELECT start, start AS "end", start AS id FROM n'
        )


def rows_twice(db: sqlite3.Connection, chance: Chance) -> None:
    table = chance.choice(tables(db))
    for _ in range(chance.choice([1, 6])):
        try:
            db.execute(f'INSERT INTO "{table}" SELECT * FROM "{table}"')
        except sqlite3.Error:
            return


CHANGES = [odd_values, odd_values, odd_values, shifted_values, shifted_values, without_a_table,
           without_a_column, other_columns, rows_twice]  # fmt: skip
BYTES = [mutations.cut, mutations.flip_bytes, mutations.lose_a_stretch, mutations.repeat_a_stretch,
         mutations.insert_garbage, mutations.lose_the_start]  # fmt: skip


def mutated(number: int, seed: bytes, path: Path) -> str:
    """Writes the number-th mutant; its story."""
    chance = random.Random(number)
    story = []
    if not seed.startswith(b"SQLite"):
        path.write_bytes(every.mutated(seed, every.JSON, chance))
        return f"{number}: JSON"
    path.write_bytes(seed)
    if chance.random() < 0.75:
        with sqlite3.connect(path) as db:
            for _ in range(chance.choice([1, 1, 2, 4])):
                change = chance.choice(CHANGES)
                if tables(db):
                    change(db, chance)
                story.append(change.__name__)
        db.close()
    if chance.random() < 0.4:
        harm = chance.choice(BYTES)
        path.write_bytes(harm(path.read_bytes(), chance))
        story.append(harm.__name__)
    return f"{number}: {' + '.join(story)}"


# -- what must hold -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("profilers")
    return {name: make(folder).read_bytes() for name, make in SEEDS.items()}


@pytest.mark.parametrize("name", SEEDS)
def test_a_mutated_file_is_read_or_refused_in_a_line(
    name: str, seeds: dict[str, bytes], tmp_path: Path
) -> None:
    outcomes = []
    for number in range(MUTANTS or SAMPLE):
        path = tmp_path / f"mutant{'.json' if name == 'rocprofv3' else '.sqlite'}"
        path.unlink(missing_ok=True)
        story = mutated(number, seeds[name], path)
        act = mutations.analysing if number % 8 == 0 else _reading
        outcomes.append(mutations.check(act, f"{name} {story}", path.read_bytes(), path))
    assert outcomes.count("read") > len(outcomes) // 40  # else the mutations prove nothing


def _reading(path: Path) -> None:
    read_trace(str(path))
