"""SQLite files that somebody else wrote, as columns: read-only, bounded, nothing in them is run;
and rows joined by the numbers that such files have."""

from __future__ import annotations

import gc
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import polars as pl
import polars.selectors as cs
from numpy.typing import NDArray

from advisor.core.errors import AdvisorError
from advisor.core.files import scratch_folder
from advisor.read.reader import EVENT_BYTES, NO_ROOM, ReadOptions, memory_budget
from advisor.read.source import ByteSource

MAGIC = b"SQLite format 3\0"
BATCH = 20_000
"""Rows that are Python objects at once."""
MAX_ROWS = 1 << 31
"""Rows of one table: what 32-bit row numbers can count."""
MAX_VALUE = 1 << 24
"""Bytes of one text or blob. Longer ones are damage, or made to fill memory."""
MAX_TEXT = 1 << 16
"""Characters of a text that are kept."""
MAX_AT_ONCE = 1 << 24
"""Bytes of texts that are Python objects at once, as far as SAMPLED rows tell."""
SAMPLED = 32
MAX_TABLES = 100_000
_STEPS = 1_000_000
"""Instructions of SQLite's machine between two looks at how far it has come: some 10 ms."""
_STEPS_A_BYTE = 40
"""Instructions that reading a file may take for each of its bytes: some tens of times what the
tables of profilers take. Damaged pages may name each other in circles."""
_FEWEST_STEPS = 400

Types = Mapping[str, Any]
"""Column -> polars type."""


def quote_identifier(name: str) -> str:
    """A table's or column's name, whatever it holds, as SQL writes it."""
    return '"' + name.replace('"', '""') + '"'


class Database:
    """The plain tables of one file. What views, triggers and virtual tables would do is not done:
    only tables that are stored as such are looked at, with plain selections of columns."""

    def __init__(self, connection: sqlite3.Connection, path: str) -> None:
        self._connection = connection
        self._path = path
        self.tables: dict[str, tuple[str, ...]] = {}
        """Columns by table."""
        self.keys: dict[str, str] = {}
        """Column by whose whole numbers a table's rows are stored, where it has one."""
        self.damaged: dict[str, str] = {}
        """Tables that were not read to their end, and why."""
        self._room = memory_budget() // EVENT_BYTES
        """Rows that there is still memory for."""
        names = self._rows(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND rootpage > 0 "
            f"LIMIT {MAX_TABLES}"
        )
        for (name,) in names:
            if isinstance(name, str) and not name.startswith("sqlite_"):
                self.tables[name] = ()
        for name in self.tables:
            described = self._rows(f"PRAGMA table_info({quote_identifier(name)})")
            self.tables[name] = tuple(str(row[1]) for row in described)
            keys = [row for row in described if row[5]]
            if len(keys) == 1 and str(keys[0][2]).upper() == "INTEGER":
                self.keys[name] = str(keys[0][1])

    @property
    def damage(self) -> str | None:
        """What could not be read, in a line."""
        lines = [f"table {table[:60]} {why}" for table, why in sorted(self.damaged.items())]
        return "; ".join(lines[:3]) or None

    def has_table(self, table: str, *columns: str) -> bool:
        """Whether the table is there, with these columns."""
        return set(columns) <= set(self.tables.get(table, ())) and table in self.tables

    def read(
        self,
        table: str,
        types: Types,
        where: str = "",
        each: Callable[[pl.DataFrame], pl.DataFrame] | None = None,
    ) -> pl.DataFrame:
        """Those of the wanted columns that the table has, in the order of its rows; no columns
        where it has none of them, or is not there. Values that are of another type are null.
        ``where``: a condition of ours. ``each``: what to make of every batch of rows, so that not
        all of a table is in memory as it stands there: columns whose width differs from batch to
        batch become as wide as the widest. A damaged table is read up to there."""
        have = set(self.tables.get(table, ()))
        wanted = {name: kind for name, kind in types.items() if name in have}
        if not wanted:
            return pl.DataFrame()
        parts = []
        columns = ", ".join(map(quote_identifier, wanted))
        condition = f" WHERE {where}" if where else ""
        query = f"SELECT {columns} FROM {quote_identifier(table)}{condition} LIMIT {MAX_ROWS}"
        for rows in self._batches(query, table):
            values = zip(wanted.items(), zip(*rows, strict=True), strict=True)
            frame = pl.DataFrame(
                [typed_column(name, given, kind) for (name, kind), given in values]
            )
            del rows
            parts.append(frame if each is None else each(frame))
        return pl.concat(parts, how="vertical_relaxed") if parts else pl.DataFrame(schema=wanted)

    def read_keys(self, table: str, types: Types, numbers: Sequence[int]) -> pl.DataFrame:
        """As :meth:`read`, the rows whose key is one of these numbers, which are in order and
        some thousands."""
        if not numbers:
            return pl.DataFrame(schema=types)
        key, first, last = quote_identifier(self.keys[table]), numbers[0], numbers[-1]
        if last - first < 1.6 * len(numbers):  # a seek takes as long as two thirds of a row more
            return self.read(table, types, f"{key} BETWEEN {first:d} AND {last:d}")
        return self.read(table, types, f"{key} IN ({', '.join(map(str, numbers))})")

    def read_texts(self, table: str, key: str, value: str) -> dict[int, str]:
        """A table of numbered texts as a dictionary; empty: it is not there."""
        if not self.has_table(table, key, value):
            return {}
        names = [quote_identifier(each) for each in (key, value, table)]
        query = "SELECT {}, {} FROM {} LIMIT {}".format(*names, MAX_ROWS)
        result: dict[int, str] = {}
        for rows in self._batches(query, table):
            result.update(
                (number, text if len(text) <= MAX_TEXT else text[:MAX_TEXT])
                for number, text in rows
                if isinstance(number, int) and isinstance(text, str)
            )
        return result

    def _batches(self, query: str, table: str) -> Iterator[list[tuple[Any, ...]]]:
        done = 0
        try:
            try:
                for rows in _some_at_once(self._connection.execute(query)):
                    done += len(rows)
                    self._room -= len(rows)
                    if self._room < 0:
                        self.damaged[table] = f"has {NO_ROOM.format(done - len(rows))}"
                        return
                    yield rows
            except sqlite3.OperationalError as error:
                if "decode" not in str(error):
                    raise
                # a text that is no UTF-8: decoded by us from here on, which takes far longer
                self._connection.text_factory = _text
                yield from _some_at_once(self._connection.execute(f"{query} OFFSET {done}"))
        except (sqlite3.Error, OverflowError, MemoryError):
            self.damaged[table] = "cannot be read to its end"

    def _rows(self, query: str) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(query).fetchall()
        except (sqlite3.Error, OverflowError, UnicodeDecodeError, MemoryError) as error:
            raise AdvisorError(f"{self._path}: {_how(error)}") from None


def _some_at_once(cursor: sqlite3.Cursor) -> Iterator[list[tuple[Any, ...]]]:
    """Rows, fewer at a time where their texts are long."""
    count = 16
    while rows := cursor.fetchmany(count):
        seen = rows[:: max(1, len(rows) // SAMPLED)]
        size = sum(len(value) for row in seen for value in row if isinstance(value, str | bytes))
        yield rows
        count = min(BATCH, 8 * count, max(1, MAX_AT_ONCE * len(seen) // max(size, 1)))


def typed_column(name: str, values: Sequence[Any], kind: Any) -> pl.Series:
    """Values of any types as a column of one; what does not fit is null."""
    try:
        result = pl.Series(name, values, dtype=kind, strict=True)
        if kind == pl.String and (result.str.len_bytes().max() or 0) > MAX_TEXT:  # type: ignore[operator]
            return result.str.slice(0, MAX_TEXT)
        return result
    except (TypeError, ValueError, OverflowError, pl.exceptions.PolarsError):
        pass
    fitting: tuple[type, ...] = (int,)
    if kind == pl.String:
        fitting = (str,)
    elif kind == pl.Float64:
        fitting = (int, float)
    kept = [value if isinstance(value, fitting) else None for value in values]
    return pl.Series(name, kept, dtype=kind, strict=False)


def narrow_integers(rows: pl.DataFrame) -> pl.DataFrame:
    """The rows with their integers in as few bytes as these take: many rows wait for the last.
    Starts stay as they are, since sums of narrow columns do not fit these."""
    narrow = rows.select(cs.signed_integer() - cs.by_name("ts", require_all=False))
    return rows.with_columns(column.shrink_dtype() for column in narrow.iter_columns())


def table_names(head: bytes, path: str) -> frozenset[str]:
    """Words of an SQLite file's list of tables, as far as it can be looked at before reading it;
    empty: no such file. In a list that is longer than the head, the file itself is asked."""
    if not head.startswith(MAGIC):
        return frozenset()
    result = {word for word in _KNOWN if word.encode() in head}
    if not result and Path(path).is_file():
        try:
            with _connected(path) as connection:
                rows = connection.execute("SELECT name FROM sqlite_master LIMIT 1000").fetchall()
        except (sqlite3.Error, OSError):
            return frozenset()
        names = " ".join(f"TABLE {name} (" for (name,) in rows)
        result = {word for word in _KNOWN if word in names}
    return frozenset(result)


_KNOWN = (
    "StringIds",
    "NVTX_EVENTS",
    "CUPTI_ACTIVITY_KIND",
    "TARGET_INFO",
    "rocpd_",
    "compute_kernel_metric_value",
    "TABLE KERN (",
)


@contextmanager
def open_database(source: ByteSource, options: ReadOptions) -> Iterator[Database]:
    """A source's tables. A plain file is read where it lies; one that is packed or piped is
    unpacked to a temporary file first. Raises AdvisorError: no database, or over the limit."""
    head = source.head()
    if source.data is None and source.path != "-" and _is_plain(source.path):
        size = Path(source.path).stat().st_size
        if size > options.max_bytes:
            limit = options.max_bytes
            raise AdvisorError(
                f"{source.path}: larger than {limit / 1e9:.1f} GB; "
                "if that is expected, raise the limit with --max-size"
            )
        for _ in source.blocks() if options.peek is not None else ():
            pass  # whoever peeks sees every byte
        source.bytes_read = size
        with _reading(source.path, source.path, size) as database:
            yield database
        return
    if not head:
        raise AdvisorError(f"{source.path}: nothing in it could be unpacked; copy it again")
    with scratch_folder() as folder:
        unpacked = folder / "trace.sqlite"
        with unpacked.open("wb") as file:
            for block in source.blocks():
                file.write(block)
        with _reading(str(unpacked), source.path, unpacked.stat().st_size) as database:
            yield database


@contextmanager
def _reading(path: str, shown: str, size: int) -> Iterator[Database]:
    try:
        with _connected(path) as connection:
            left = max(_FEWEST_STEPS, size * _STEPS_A_BYTE // _STEPS)

            def count() -> int:
                nonlocal left
                left -= 1
                return int(left < 0)

            connection.set_progress_handler(count, _STEPS)
            with _no_collections():
                yield Database(connection, shown)
    except sqlite3.Error as error:
        raise AdvisorError(f"{shown}: {_how(error)}") from None


@contextmanager
def _no_collections() -> Iterator[None]:
    """Rows are tuples of numbers and texts, many and soon gone: looking for circles among them, and
    among all that is imported, would take a third of the time."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextmanager
def _connected(path: str) -> Iterator[sqlite3.Connection]:
    """A connection that writes nothing, not even a journal, and runs nothing of the file's."""
    place = quote(str(Path(path).absolute()))
    # a statement may name thousands of rows, and none is asked twice: none is kept
    where = f"file:{place}?mode=ro&immutable=1"
    connection = sqlite3.connect(where, uri=True, cached_statements=0)
    try:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        for setting in ("trusted_schema = OFF", "query_only = ON", "cell_size_check = ON"):
            connection.execute(f"PRAGMA {setting}")
        connection.set_authorizer(_allowed)
        yield connection
    finally:
        connection.close()


def _allowed(action: int, first: str | None, *_: str | None) -> int:
    if action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ):
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_PRAGMA and first == "table_info":
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _is_plain(path: str) -> bool:
    try:
        with Path(path).open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _how(error: Exception) -> str:
    text = str(error).splitlines()[0][:100] if str(error) else type(error).__name__
    return f"a damaged SQLite file ({text}); copy or export it again"


# -- rows joined by numbers ------------------------------------------------------------------------


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


def read_numbered(
    db: Database,
    table: str,
    types: Types,
    each: Callable[[pl.DataFrame], pl.DataFrame] = lambda rows: rows,
    key: str = "id",
) -> Numbered:
    """All rows of a table by their number, in as little room as what ``each`` makes of some
    thousands of them takes. Columns that the table has not are null."""

    def made(rows: pl.DataFrame) -> pl.DataFrame:
        return narrow_integers(each(with_all(rows, types)))

    read = db.read(table, types, each=made)
    return Numbered(read if read.height else made(pl.DataFrame(schema=dict(types))), key)


class KeyedTable:
    """Rows of a stored table by their number: looked up in the file where that is the key by which
    its rows are stored, else read once. Columns that the table has not are null."""

    def __init__(self, db: Database, table: str, key: str, types: Types) -> None:
        self._db, self._table, self._key, self._types = db, table, key, types
        self._read: Types = {key: pl.Int64, **types}
        stored = db.keys.get(table) == key
        self._whole = None if stored else read_numbered(db, table, self._read, key=key)

    def at(self, numbers: pl.Series) -> pl.DataFrame:
        """A row for each of these numbers; nulls where there is none. Asked for some thousands at
        once, as rows come."""
        if self._whole is not None:
            return self._whole.at(numbers).cast(pl.Schema(self._types))
        wanted = numbers.drop_nulls().unique().sort().to_list()
        result = self._db.read_keys(self._table, self._read, wanted)
        return Numbered(with_all(result, self._read), self._key).at(numbers)


class NameLookup:
    """Numbered texts of which few are distinct: each is looked up once."""

    def __init__(self, db: Database, table: str, key: str, value: str) -> None:
        self.rows = KeyedTable(db, table, key, {value: pl.String})
        """The table itself, for texts that are nearly all distinct."""
        self._known: dict[int, str | None] = {}

    def names_of(self, numbers: pl.Series) -> pl.Series:
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


def stack_frames(parts: list[pl.DataFrame]) -> pl.DataFrame:
    """All rows of these frames, which are let go of; without a column where there are none."""
    filled = [part for part in parts if part.height]
    parts.clear()
    return pl.concat(filled, how="diagonal_relaxed") if filled else pl.DataFrame()


def with_all(rows: pl.DataFrame, types: Types) -> pl.DataFrame:
    """The rows with all of these columns, null where they have them not."""
    lacking = [name for name in types if name not in rows.columns]
    if not lacking:
        return rows
    return rows.with_columns(pl.lit(None, dtype=types[name]).alias(name) for name in lacking)
