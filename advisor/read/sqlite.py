"""Reader of foreign SQLite files, as columns: read-only, bounded, nothing in them is executed. Also
joins of rows by the numbers that such files use."""

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
"""Most rows that are Python objects at once."""
MAX_ROWS = 1 << 31
"""Most rows of one table: what 32-bit row numbers can count."""
MAX_VALUE = 1 << 24
"""Most bytes of one text or blob. Longer ones are damage, or made to fill memory."""
MAX_TEXT = 1 << 16
"""Most characters kept of a text."""
MAX_AT_ONCE = 1 << 24
"""Most bytes of texts that are Python objects at once, estimated from SAMPLED rows."""
SAMPLED = 32
MAX_TABLES = 100_000
_STEPS = 1_000_000
"""Instructions of SQLite's machine between two checks of its progress: some 10 ms."""
_STEPS_A_BYTE = 40
"""Most instructions that reading a file may take per byte: some tens of times what profilers'
tables take. Damaged pages may refer to each other in circles."""
_FEWEST_STEPS = 400

Types = Mapping[str, Any]
"""Polars type of each column."""


def quote_identifier(name: str) -> str:
    """Quote a table's or column's name, whatever it holds, for SQL."""
    return '"' + name.replace('"', '""') + '"'


class Database:
    """Stored tables of one file. Views, triggers and virtual tables are never used: only plain
    columns of stored tables are selected."""

    def __init__(self, connection: sqlite3.Connection, path: str) -> None:
        self._connection = connection
        self._path = path
        self.tables: dict[str, tuple[str, ...]] = {}
        """Columns of each table."""
        self.keys: dict[str, str] = {}
        """Integer primary key of each table that has one."""
        self.damaged: dict[str, str] = {}
        """Reason for each table that was not read completely."""
        self._room = memory_budget() // EVENT_BYTES
        """Number of rows that there is still memory for."""
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
        """Description of what could not be read, in a line; ``None``: nothing."""
        lines = [f"table {table[:60]} {why}" for table, why in sorted(self.damaged.items())]
        return "; ".join(lines[:3]) or None

    def has_table(self, table: str, *columns: str) -> bool:
        """Return whether the table exists, with these columns."""
        return set(columns) <= set(self.tables.get(table, ())) and table in self.tables

    def read(
        self,
        table: str,
        types: Types,
        where: str = "",
        each: Callable[[pl.DataFrame], pl.DataFrame] | None = None,
    ) -> pl.DataFrame:
        """Read the wanted columns that the table has, in row order; no columns if it has none of
        them or does not exist. Values of another type are null. ``where``: a condition of ours.
        ``each``: function applied to every batch of rows, so that not all of a table is in memory
        unreduced; columns whose width differs between batches become as wide as the widest. A
        damaged table is read as far as possible."""
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
        """Read the rows whose key is one of ``numbers``, which are in order and some thousands.
        Otherwise like :meth:`read`."""
        if not numbers:
            return pl.DataFrame(schema=types)
        key, first, last = quote_identifier(self.keys[table]), numbers[0], numbers[-1]
        if last - first < 1.6 * len(numbers):  # a seek takes as long as two thirds of a row more
            return self.read(table, types, f"{key} BETWEEN {first:d} AND {last:d}")
        return self.read(table, types, f"{key} IN ({', '.join(map(str, numbers))})")

    def read_texts(self, table: str, key: str, value: str) -> dict[int, str]:
        """Read a table of numbered texts as a dictionary; empty if it does not exist."""
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
    """Yield batches of rows, smaller ones if their texts are long."""
    count = 16
    while rows := cursor.fetchmany(count):
        seen = rows[:: max(1, len(rows) // SAMPLED)]
        size = sum(len(value) for row in seen for value in row if isinstance(value, str | bytes))
        yield rows
        count = min(BATCH, 8 * count, max(1, MAX_AT_ONCE * len(seen) // max(size, 1)))


def typed_column(name: str, values: Sequence[Any], kind: Any) -> pl.Series:
    """Return values of any types as a column of one type; what does not fit is null."""
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
    """Shrink integer columns to the fewest bytes: many rows are kept until the last is read. Starts
    (``ts``) keep their width, since their sums with narrow columns would not fit."""
    narrow = rows.select(cs.signed_integer() - cs.by_name("ts", require_all=False))
    return rows.with_columns(column.shrink_dtype() for column in narrow.iter_columns())


def table_names(head: bytes, path: str) -> frozenset[str]:
    """Return known words in an SQLite file's list of tables, before it is read; empty: no such
    file. If the list is longer than the head, the file itself is queried."""
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
    "StringIds", "NVTX_EVENTS", "CUPTI_ACTIVITY_KIND", "TARGET_INFO", "rocpd_",
    "compute_kernel_metric_value", "TABLE KERN (",
)  # fmt: skip


@contextmanager
def open_database(source: ByteSource, options: ReadOptions) -> Iterator[Database]:
    """Open a source's tables. A plain file is read in place; a packed or piped one is unpacked to a
    temporary file first. Raises AdvisorError: no database, or over the limit."""
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
    """Suspend garbage collection. Rows are tuples of numbers and texts, many and short-lived:
    searching them, and all that is imported, for cycles would take a third of the time."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextmanager
def _connected(path: str) -> Iterator[sqlite3.Connection]:
    """Open a connection that writes nothing, not even a journal, and runs nothing in the file."""
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
    """Rows by an integer column; of those with the same number, the first."""

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
        """Return a row for each number, of some columns or of all; nulls if there is none."""
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
    """Read all rows of a table by number, keeping only what ``each`` returns for batches of some
    thousands. Missing columns are null."""

    def made(rows: pl.DataFrame) -> pl.DataFrame:
        return narrow_integers(each(select_columns(rows, types)))

    read = db.read(table, types, each=made)
    return Numbered(read if read.height else made(pl.DataFrame(schema=dict(types))), key)


class KeyedTable:
    """Rows of a stored table by number: looked up in the file if that is the table's key, else read
    once. Missing columns are null."""

    def __init__(self, db: Database, table: str, key: str, types: Types) -> None:
        self._db, self._table, self._key, self._types = db, table, key, types
        self._read: Types = {key: pl.Int64, **types}
        stored = db.keys.get(table) == key
        self._whole = None if stored else read_numbered(db, table, self._read, key=key)

    def at(self, numbers: pl.Series) -> pl.DataFrame:
        """Return a row for each number; nulls if there is none. To be called with some thousands at
        once, as rows come."""
        if self._whole is not None:
            return self._whole.at(numbers).cast(pl.Schema(self._types))
        wanted = numbers.drop_nulls().unique().sort().to_list()
        result = self._db.read_keys(self._table, self._read, wanted)
        return Numbered(select_columns(result, self._read), self._key).at(numbers)


class NameLookup:
    """Lookup of numbered texts of which few are distinct: each is read once."""

    def __init__(self, db: Database, table: str, key: str, value: str) -> None:
        self.rows = KeyedTable(db, table, key, {value: pl.String})
        """Lookup of whole rows, for texts that are nearly all distinct."""
        self._known: dict[int, str | None] = {}

    def names_of(self, numbers: pl.Series) -> pl.Series:
        """Return the text of each number; null if it has none."""
        distinct = numbers.drop_nulls().unique().to_list()
        new = [number for number in distinct if number not in self._known]
        if new:
            texts = self.rows.at(pl.Series(new, dtype=pl.Int64)).to_series()
            self._known.update(zip(new, texts.to_list(), strict=True))
        return look_up_texts(numbers, self._known)


def look_up_texts(numbers: pl.Series, texts: Mapping[int, str | None]) -> pl.Series:
    """Return the text of each number; null if it has none."""
    known = {n: texts[n] for n in numbers.drop_nulls().unique().to_list() if n in texts}
    if not known:
        return pl.Series("text", [None], dtype=pl.String).new_from_index(0, len(numbers))
    return numbers.replace_strict(known, default=None, return_dtype=pl.String)


def stack_frames(parts: list[pl.DataFrame]) -> pl.DataFrame:
    """Concatenate the frames, whose list is emptied; a frame without columns if none has rows."""
    filled = [part for part in parts if part.height]
    parts.clear()
    return pl.concat(filled, how="diagonal_relaxed") if filled else pl.DataFrame()


def select_columns(rows: pl.DataFrame, types: Types) -> pl.DataFrame:
    """Return the rows with all of these columns; missing ones are null."""
    lacking = [name for name in types if name not in rows.columns]
    if not lacking:
        return rows
    return rows.with_columns(pl.lit(None, dtype=types[name]).alias(name) for name in lacking)
