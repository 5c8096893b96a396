"""Reader of untrusted SQLite files as columns: read-only, bounded, and nothing in them is executed.
Also joins of rows by the numbers that these files use."""

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
"""Maximum number of rows that are Python objects at a time."""
_MAX_ROWS = 1 << 31
"""Maximum number of rows of one table: what 32-bit row numbers can count."""
MAX_VALUE_BYTES = 1 << 24
"""Maximum size of a text or blob, bytes. Longer ones are damage, or made to fill memory."""
_MAX_TEXT = 1 << 16
"""Maximum number of characters kept of a text."""
MAX_TEXT_BYTES = 1 << 24
"""Maximum size of texts that are Python objects at a time, bytes, estimated from SAMPLED_ROWS."""
SAMPLED_ROWS = 32
MAX_TABLES = 100_000
_CHECK_INTERVAL = 1_000_000
"""Number of SQLite instructions between two checks of its progress, about 10 ms."""
_MAX_STEPS_PER_BYTE = 40
"""Maximum number of instructions per byte of a file, tens of times what tables of profilers take.
Damaged pages may refer to each other in circles."""
_MIN_CHECKS = 400

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
        """Reason by table, for tables that were not read completely."""
        self._rows_left = memory_budget() // EVENT_BYTES
        """Number of further rows for which there is memory."""
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
        """Description, in one line, of what could not be read. ``None`` if everything was."""
        lines = [f"table {table[:60]} {why}" for table, why in sorted(self.damaged.items())]
        return "; ".join(lines[:3]) or None

    def has_table(self, table: str, *columns: str) -> bool:
        """Return whether the table exists and has these columns."""
        return set(columns) <= set(self.tables.get(table, ())) and table in self.tables

    def read(
        self,
        table: str,
        types: Types,
        where: str = "",
        each: Callable[[pl.DataFrame], pl.DataFrame] | None = None,
    ) -> pl.DataFrame:
        """Read those of the columns that the table has, in row order. No columns if it has none of
        them or does not exist. Values of another type are null. ``where``: a trusted condition.
        ``each``: function that reduces every batch of rows, so that a whole table is never in
        memory unreduced; columns get the widest type of all batches. A damaged table is read as far
        as possible."""
        existing = set(self.tables.get(table, ()))
        wanted = {name: kind for name, kind in types.items() if name in existing}
        if not wanted:
            return pl.DataFrame()
        parts = []
        columns = ", ".join(map(quote_identifier, wanted))
        condition = f" WHERE {where}" if where else ""
        query = f"SELECT {columns} FROM {quote_identifier(table)}{condition} LIMIT {_MAX_ROWS}"
        for rows in self._batches(query, table):
            values = zip(wanted.items(), zip(*rows, strict=True), strict=True)
            frame = pl.DataFrame(
                [typed_column(name, column_values, kind) for (name, kind), column_values in values]
            )
            del rows
            parts.append(frame if each is None else each(frame))
        return pl.concat(parts, how="vertical_relaxed") if parts else pl.DataFrame(schema=wanted)

    def read_keys(self, table: str, types: Types, numbers: Sequence[int]) -> pl.DataFrame:
        """Read the rows whose key is one of ``numbers``: a few thousand, in order. Otherwise like
        :meth:`read`."""
        if not numbers:
            return pl.DataFrame(schema=types)
        key, first, last = quote_identifier(self.keys[table]), numbers[0], numbers[-1]
        if last - first < 1.6 * len(numbers):  # a seek costs as much as reading 0.6 rows
            return self.read(table, types, f"{key} BETWEEN {first:d} AND {last:d}")
        return self.read(table, types, f"{key} IN ({', '.join(map(str, numbers))})")

    def read_texts(self, table: str, key: str, value: str) -> dict[int, str]:
        """Read a table of numbered texts as a dictionary, empty if it does not exist."""
        if not self.has_table(table, key, value):
            return {}
        names = [quote_identifier(name) for name in (key, value, table)]
        query = "SELECT {}, {} FROM {} LIMIT {}".format(*names, _MAX_ROWS)
        result: dict[int, str] = {}
        for rows in self._batches(query, table):
            result.update(
                (number, text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT])
                for number, text in rows
                if isinstance(number, int) and isinstance(text, str)
            )
        return result

    def _batches(self, query: str, table: str) -> Iterator[list[tuple[Any, ...]]]:
        row_count = 0
        try:
            try:
                for rows in _iterate_batches(self._connection.execute(query)):
                    row_count += len(rows)
                    self._rows_left -= len(rows)
                    if self._rows_left < 0:
                        self.damaged[table] = f"has {NO_ROOM.format(row_count - len(rows))}"
                        return
                    yield rows
            except sqlite3.OperationalError as error:
                if "decode" not in str(error):
                    raise
                # a text is not UTF-8: decode texts ourselves from here on, which is much slower
                self._connection.text_factory = _decode_text
                yield from _iterate_batches(self._connection.execute(f"{query} OFFSET {row_count}"))
        except (sqlite3.Error, OverflowError, MemoryError):
            self.damaged[table] = "cannot be read to its end"

    def _rows(self, query: str) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(query).fetchall()
        except (sqlite3.Error, OverflowError, UnicodeDecodeError, MemoryError) as error:
            raise AdvisorError(f"{self._path}: {_describe_damage(error)}") from None


def _iterate_batches(cursor: sqlite3.Cursor) -> Iterator[list[tuple[Any, ...]]]:
    """Yield batches of rows, smaller ones if their texts are long."""
    count = 16
    while rows := cursor.fetchmany(count):
        sample = rows[:: max(1, len(rows) // SAMPLED_ROWS)]
        size = sum(len(value) for row in sample for value in row if isinstance(value, str | bytes))
        yield rows
        count = min(BATCH, 8 * count, max(1, MAX_TEXT_BYTES * len(sample) // max(size, 1)))


def typed_column(name: str, values: Sequence[Any], kind: Any) -> pl.Series:
    """Return values of any types as a column of one type, with null for values that do not fit."""
    try:
        result = pl.Series(name, values, dtype=kind, strict=True)
        if kind == pl.String and (result.str.len_bytes().max() or 0) > _MAX_TEXT:  # type: ignore[operator]
            return result.str.slice(0, _MAX_TEXT)
        return result
    except (TypeError, ValueError, OverflowError, pl.exceptions.PolarsError):
        pass
    accepted_types: tuple[type, ...] = (int,)
    if kind == pl.String:
        accepted_types = (str,)
    elif kind == pl.Float64:
        accepted_types = (int, float)
    valid_values = [value if isinstance(value, accepted_types) else None for value in values]
    return pl.Series(name, valid_values, dtype=kind, strict=False)


def narrow_integers(rows: pl.DataFrame) -> pl.DataFrame:
    """Shrink integer columns to the fewest bytes, because rows are kept until the last one is read.
    Starts (``ts``) keep their width, because sums with narrow columns would not fit."""
    narrow = rows.select(cs.signed_integer() - cs.by_name("ts", require_all=False))
    return rows.with_columns(column.shrink_dtype() for column in narrow.iter_columns())


def table_names(head: bytes, path: str) -> frozenset[str]:
    """Return the known words in an SQLite file's list of tables, before it is read. Empty if it is
    another file. If the list is not in the head, the file itself is queried."""
    if not head.startswith(MAGIC):
        return frozenset()
    result = {word for word in _TABLE_NAMES if word.encode() in head}
    if not result and Path(path).is_file():
        try:
            with _connect(path) as connection:
                rows = connection.execute("SELECT name FROM sqlite_master LIMIT 1000").fetchall()
        except (sqlite3.Error, OSError):
            return frozenset()
        names = " ".join(f"TABLE {name} (" for (name,) in rows)
        result = {word for word in _TABLE_NAMES if word in names}
    return frozenset(result)


_TABLE_NAMES = (
    "StringIds", "NVTX_EVENTS", "CUPTI_ACTIVITY_KIND", "TARGET_INFO", "rocpd_",
    "compute_kernel_metric_value", "TABLE KERN (",
)  # fmt: skip


@contextmanager
def open_database(source: ByteSource, options: ReadOptions) -> Iterator[Database]:
    """Open a source's tables. A plain file is read in place; a packed or piped one is unpacked to a
    temporary file first. Raises AdvisorError if it is not a database or exceeds the limit."""
    head = source.head()
    if source.data is None and source.path != "-" and _is_database(source.path):
        size = Path(source.path).stat().st_size
        if size > options.max_bytes:
            limit = options.max_bytes
            raise AdvisorError(
                f"{source.path}: larger than {limit / 1e9:.1f} GB; "
                "if that is expected, raise the limit with --max-size"
            )
        for _ in source.blocks() if options.peek is not None else ():
            pass  # ``peek`` must see every byte
        source.bytes_read = size
        with _open_plain(source.path, source.path, size) as database:
            yield database
        return
    if not head:
        raise AdvisorError(f"{source.path}: nothing in it could be unpacked; copy it again")
    with scratch_folder() as folder:
        unpacked = folder / "trace.sqlite"
        with unpacked.open("wb") as file:
            for block in source.blocks():
                file.write(block)
        with _open_plain(str(unpacked), source.path, unpacked.stat().st_size) as database:
            yield database


@contextmanager
def _open_plain(path: str, name: str, size: int) -> Iterator[Database]:
    try:
        with _connect(path) as connection:
            checks_left = max(_MIN_CHECKS, size * _MAX_STEPS_PER_BYTE // _CHECK_INTERVAL)

            def count_check() -> int:
                nonlocal checks_left
                checks_left -= 1
                return int(checks_left < 0)

            connection.set_progress_handler(count_check, _CHECK_INTERVAL)
            with _pause_garbage_collection():
                yield Database(connection, name)
    except sqlite3.Error as error:
        raise AdvisorError(f"{name}: {_describe_damage(error)}") from None


@contextmanager
def _pause_garbage_collection() -> Iterator[None]:
    """Suspend garbage collection. There are many short-lived rows, and searching them and all
    imported modules for cycles would take a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _connect(path: str) -> Iterator[sqlite3.Connection]:
    """Open a connection that writes nothing, not even a journal, and runs nothing in the file."""
    quoted_path = quote(str(Path(path).absolute()))
    # a statement may name thousands of rows, and none is repeated, so cache none
    address = f"file:{quoted_path}?mode=ro&immutable=1"
    connection = sqlite3.connect(address, uri=True, cached_statements=0)
    try:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        for setting in ("trusted_schema = OFF", "query_only = ON", "cell_size_check = ON"):
            connection.execute(f"PRAGMA {setting}")
        connection.set_authorizer(_authorize)
        yield connection
    finally:
        connection.close()


def _authorize(action: int, first: str | None, *_: str | None) -> int:
    if action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ):
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_PRAGMA and first == "table_info":
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY


def _decode_text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _is_database(path: str) -> bool:
    try:
        with Path(path).open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _describe_damage(error: Exception) -> str:
    text = str(error).splitlines()[0][:100] if str(error) else type(error).__name__
    return f"a damaged SQLite file ({text}); copy or export it again"


# -- rows joined by numbers ------------------------------------------------------------------------


class Numbered:
    """Rows by an integer column. Of rows with the same number, the first one counts."""

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
        # same type as the numbers that are searched for, or each search would copy them
        self._numbers: NDArray[np.int64] | None = None if gapless else numbers.astype(np.int64)

    def at(self, numbers: pl.Series, columns: Sequence[str] = ()) -> pl.DataFrame:
        """Return a row for each number, with all or some columns, or nulls if there is no row."""
        rows = self._rows.select(columns) if columns else self._rows
        if not self._count:
            return rows.clear(len(numbers))
        keys = numbers.fill_null(self._first).to_numpy().astype(np.int64)
        if self._numbers is None:
            is_known = (keys >= self._first) & (keys < self._first + self._count)
            row_index = np.where(is_known, keys, self._first) - self._first
        else:
            row_index = np.minimum(np.searchsorted(self._numbers, keys), self._count - 1)
            is_known = self._numbers[row_index] == keys
        is_known &= numbers.is_not_null().to_numpy()
        index = pl.Series(np.where(is_known, row_index, 0).astype(np.uint32))
        if not is_known.all():
            index = index.set(pl.Series(~is_known), None)
        return rows.select(pl.all().gather(index))


def read_numbered(
    db: Database,
    table: str,
    types: Types,
    each: Callable[[pl.DataFrame], pl.DataFrame] = lambda rows: rows,
    key: str = "id",
) -> Numbered:
    """Read all rows of a table by number, keeping what ``each`` returns for batches of some 1,000
    rows. Missing columns are null."""

    def reduce_rows(rows: pl.DataFrame) -> pl.DataFrame:
        return narrow_integers(each(select_columns(rows, types)))

    rows_read = db.read(table, types, each=reduce_rows)
    return Numbered(
        rows_read if rows_read.height else reduce_rows(pl.DataFrame(schema=dict(types))), key
    )


class KeyedTable:
    """Rows of a stored table by number. They are looked up in the file if the number is the table's
    key, else read once. Missing columns are null."""

    def __init__(self, db: Database, table: str, key: str, types: Types) -> None:
        self._db, self._table, self._key, self._types = db, table, key, types
        self._read_types: Types = {key: pl.Int64, **types}
        stored = db.keys.get(table) == key
        self._all_rows = None if stored else read_numbered(db, table, self._read_types, key=key)

    def at(self, numbers: pl.Series) -> pl.DataFrame:
        """Return a row for each number, or nulls if there is no row. Call it with some thousand
        numbers at a time."""
        if self._all_rows is not None:
            return self._all_rows.at(numbers).cast(pl.Schema(self._types))
        distinct = numbers.drop_nulls().unique().sort().to_list()
        rows = self._db.read_keys(self._table, self._read_types, distinct)
        return Numbered(select_columns(rows, self._read_types), self._key).at(numbers)


class NameLookup:
    """Lookup of numbered texts. Few are distinct, so each is read once."""

    def __init__(self, db: Database, table: str, key: str, value: str) -> None:
        self.rows = KeyedTable(db, table, key, {value: pl.String})
        """Lookup of rows without a cache, for texts that are nearly all distinct."""
        self._known: dict[int, str | None] = {}

    def names_of(self, numbers: pl.Series) -> pl.Series:
        """Return the text of each number, null if it has none."""
        distinct = numbers.drop_nulls().unique().to_list()
        new = [number for number in distinct if number not in self._known]
        if new:
            texts = self.rows.at(pl.Series(new, dtype=pl.Int64)).to_series()
            self._known.update(zip(new, texts.to_list(), strict=True))
        return look_up_texts(numbers, self._known)


def look_up_texts(numbers: pl.Series, texts: Mapping[int, str | None]) -> pl.Series:
    """Return the text of each number, null if it has none."""
    known = {n: texts[n] for n in numbers.drop_nulls().unique().to_list() if n in texts}
    if not known:
        return pl.Series("text", [None], dtype=pl.String).new_from_index(0, len(numbers))
    return numbers.replace_strict(known, default=None, return_dtype=pl.String)


def stack_frames(parts: list[pl.DataFrame]) -> pl.DataFrame:
    """Concatenate frames and empty their list. Return an empty frame if none has rows."""
    filled = [part for part in parts if part.height]
    parts.clear()
    return pl.concat(filled, how="diagonal_relaxed") if filled else pl.DataFrame()


def select_columns(rows: pl.DataFrame, types: Types) -> pl.DataFrame:
    """Return the rows with all of these columns, with null for missing ones."""
    missing = [name for name in types if name not in rows.columns]
    if not missing:
        return rows
    return rows.with_columns(pl.lit(None, dtype=types[name]).alias(name) for name in missing)
