"""Rows of one table by numbers that stand in another: not all of a large file at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.read.sqlite import Database, Types, narrowed


class Numbered:
    """Rows by a column of whole numbers: of those with the same number, the first."""

    def __init__(self, rows: pl.DataFrame, key: str) -> None:
        rows = rows.drop_nulls(key)
        numbers = rows[key].to_numpy()
        if len(numbers) > 1 and not (numbers[1:] > numbers[:-1]).all():
            numbers, first = np.unique(numbers, return_index=True)
            rows = rows.select(pl.all().gather(pl.Series(first.astype(np.uint32))))
        self._rows = rows.drop(key)
        self._first = int(numbers[0]) if len(numbers) else 0
        self._count = len(numbers)
        gapless = self._count and int(numbers[-1]) - self._first + 1 == self._count
        # of the type that is looked for, else each search would copy them
        self._numbers: NDArray[np.int64] | None = None if gapless else numbers.astype(np.int64)

    def at(self, numbers: pl.Series, columns: Sequence[str] = ()) -> pl.DataFrame:
        """A row for each of these numbers, of some columns or of all; nulls where there is none."""
        rows = self._rows.select(columns) if columns else self._rows
        if not self._count:
            return rows.clear(len(numbers))
        wanted = numbers.fill_null(self._first).to_numpy().astype(np.int64)
        if self._numbers is None:
            known = (wanted >= self._first) & (wanted < self._first + self._count)
            place = np.where(known, wanted, self._first) - self._first
        else:
            place = np.minimum(np.searchsorted(self._numbers, wanted), self._count - 1)
            known = self._numbers[place] == wanted
        known &= numbers.is_not_null().to_numpy()
        index = pl.Series(np.where(known, place, 0).astype(np.uint32))
        if not known.all():
            index = index.set(pl.Series(~known), None)
        return rows.select(pl.all().gather(index))


def numbered(
    db: Database,
    table: str,
    types: Types,
    each: Callable[[pl.DataFrame], pl.DataFrame] = lambda rows: rows,
    key: str = "id",
) -> Numbered:
    """All rows of a table by their number, in as little room as what ``each`` makes of some
    thousands of them takes. Columns that the table has not are null."""

    def made(rows: pl.DataFrame) -> pl.DataFrame:
        return narrowed(each(with_all(rows, types)))

    read = db.read(table, types, each=made)
    return Numbered(read if read.height else made(pl.DataFrame(schema=dict(types))), key)


class Keyed:
    """Rows of a stored table by their number: looked up in the file where that is the key by which
    its rows are stored, else read once. Columns that the table has not are null."""

    def __init__(self, db: Database, table: str, key: str, types: Types) -> None:
        self._db, self._table, self._key, self._types = db, table, key, types
        self._read: Types = {key: pl.Int64, **types}
        stored = db.keys.get(table) == key
        self._whole = None if stored else numbered(db, table, self._read, key=key)

    def at(self, numbers: pl.Series) -> pl.DataFrame:
        """A row for each of these numbers; nulls where there is none. Asked for some thousands at
        once, as rows come."""
        if self._whole is not None:
            return self._whole.at(numbers).cast(pl.Schema(self._types))
        wanted = numbers.drop_nulls().unique().sort().to_list()
        result = self._db.read_some(self._table, self._read, wanted)
        return Numbered(with_all(result, self._read), self._key).at(numbers)


class NameLookup:
    """Numbered texts of which few are distinct: each is looked up once."""

    def __init__(self, db: Database, table: str, key: str, value: str) -> None:
        self.rows = Keyed(db, table, key, {value: pl.String})
        """The table itself, for texts that are nearly all distinct."""
        self._known: dict[int, str | None] = {}

    def of(self, numbers: pl.Series) -> pl.Series:
        """The text of each number; null where it has none."""
        distinct = numbers.drop_nulls().unique().to_list()
        new = [number for number in distinct if number not in self._known]
        if new:
            texts = self.rows.at(pl.Series(new, dtype=pl.Int64)).to_series()
            self._known.update(zip(new, texts.to_list(), strict=True))
        return looked_up(numbers, self._known)


def looked_up(numbers: pl.Series, texts: Mapping[int, str | None]) -> pl.Series:
    """The text of each number; null where it has none."""
    known = {n: texts[n] for n in numbers.drop_nulls().unique().to_list() if n in texts}
    if not known:
        return pl.Series("text", [None], dtype=pl.String).new_from_index(0, len(numbers))
    return numbers.replace_strict(known, default=None, return_dtype=pl.String)


def with_all(rows: pl.DataFrame, types: Types) -> pl.DataFrame:
    """The rows with all of these columns, null where they have them not."""
    lacking = [name for name in types if name not in rows.columns]
    if not lacking:
        return rows
    return rows.with_columns(pl.lit(None, dtype=types[name]).alias(name) for name in lacking)
