"""SQLite databases of ROCm's profilers: RPD (rocmProfileData) and rocpd (rocprofv3).

RPD keeps calls in ``rocpd_api``, device work in ``rocpd_op``, and the relation between them in
``rocpd_api_ops``. rocprofv3 has one set of tables per process, with the process's number at the end
of their names. Since version 4 of its schema, times and places are in separate tables
(``rocpd_timestamp``, ``rocpd_track``)."""

import contextlib
import json
from collections.abc import Callable
from typing import Any

import polars as pl

from advisor.core.trace import Copy, CpuKind, Device, GpuKind
from advisor.read.formats.rocm.device_rows import FILL, build_device, copy_direction
from advisor.read.nvtx import number_inputs, parse_ranges
from advisor.read.sqlite import (
    Database,
    KeyedTable,
    NameLookup,
    Numbered,
    Types,
    look_up_texts,
    narrow_integers,
    read_numbered,
    select_columns,
    stack_frames,
)

_PROFILER_CALLS = ("hcc_activity_callback", "roctracer", "rocprofiler")
_MARKER_PREFIXES = ("UserMarker", "roctxRange", "roctxMark")
_GRID_IN_THREADS = r"(?i)ext_?module|hccmodule"
"""Pattern of launches that take the number of threads. Others take the number of blocks."""
_CORRELATION_BITS = 40
_PINNED = pl.lit("Pinned")
_PLACE_COLUMNS: Types = dict.fromkeys(("pid", "tid", "agent_id", "queue_id", "stream_id"), pl.Int64)
_MAX_AGENTS = 4096


class Rpd:
    """Tables of rocmProfileData. Rows are read a few thousand at a time and joined with facts from
    other tables, so that none of the tables is in memory as a whole."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._names = NameLookup(db, "rocpd_string", "id", "string")
        self.inputs: pl.DataFrame | None = None
        self._calls_in_threads: list[pl.DataFrame] = []
        """Ids of the calls that take a launch's number of threads."""

    def host(self) -> pl.DataFrame:
        """Return calls, ranges, and the profiler's own work (callbacks and writers)."""
        types = dict.fromkeys(
            ("id", "pid", "tid", "start", "end", "apiName_id", "args_id"), pl.Int64
        )
        texts = self._names.rows
        if self._db.has_table("rocpd_ustring", "id", "string"):
            texts = KeyedTable(self._db, "rocpd_ustring", "id", {"string": pl.String})
        rows = self._db.read(
            "rocpd_api",
            types,
            each=lambda batch: self._convert_calls(select_columns(batch, types), texts),
        )
        if not rows.height:
            return pl.DataFrame()
        rows, self.inputs = number_inputs(rows)
        return rows

    def _convert_calls(self, rows: pl.DataFrame, arguments: KeyedTable) -> pl.DataFrame:
        """Return calls, then ranges, without texts: nearly all texts of PyTorch are distinct."""
        name = self._names.names_of(rows["apiName_id"]).fill_null("call")
        self._calls_in_threads.append(
            narrow_integers(rows.select("id").filter(name.str.contains(_GRID_IN_THREADS)))
        )
        is_marker = pl.any_horizontal(
            pl.col("name").str.starts_with(word) for word in _MARKER_PREFIXES
        )
        is_profiler_work = pl.col("name").str.contains(
            "::writeRows", literal=True
        ) | pl.any_horizontal(pl.col("name").str.starts_with(word) for word in _PROFILER_CALLS)
        rows = rows.with_columns(name=name).with_columns(marker=is_marker)
        text = arguments.at(rows["args_id"].set(~rows["marker"], None)).to_series()
        rows = rows.select(
            "name",
            "marker",
            text=text,
            ts="start",
            dur=pl.col("end") - pl.col("start"),
            process=pl.col("pid").cast(pl.String),
            thread=pl.col("tid").cast(pl.String),
            correlation=pl.when(~pl.col("marker")).then("id"),
            kind=pl.when(is_profiler_work).then(pl.lit("overhead")).otherwise(pl.lit("runtime")),
            sequence=pl.lit(None, dtype=pl.Int64),
            dims=pl.lit(None, dtype=pl.String),
        )
        marker_rows = rows.filter("marker")
        if marker_rows.height:
            marker_rows = marker_rows.with_columns(
                parse_ranges(marker_rows["text"].fill_null(marker_rows["name"]))
            )
            rows = pl.concat([rows.filter(~pl.col("marker")), marker_rows])
        return _compact_rows(rows.drop("marker", "text"), CpuKind)

    def device(self) -> pl.DataFrame:
        """Return kernels, copies and fills, each with its call. Call it after ``host``."""
        types = dict.fromkeys(
            ("id", "gpuId", "queueId", "start", "end", "description_id", "opType_id"), pl.Int64
        )
        relation_types = {"api_id": pl.Int64, "op_id": pl.Int64}
        calls = read_numbered(
            self._db, "rocpd_api_ops", relation_types, pl.DataFrame.drop_nulls, key="op_id"
        )
        empty = pl.DataFrame(schema={"id": pl.Int64})
        call_ids = pl.concat([*self._calls_in_threads, empty], how="vertical_relaxed")
        in_threads = Numbered(call_ids.with_columns(in_threads=True), "id")
        sizes = ("gridX", "gridY", "gridZ", "workgroupX", "workgroupY", "workgroupZ")
        launches = KeyedTable(
            self._db, "rocpd_kernelapi", "api_ptr_id",
            dict.fromkeys((*sizes, "groupSegmentSize"), pl.Int64),
        )  # fmt: skip
        copies = KeyedTable(
            self._db, "rocpd_copyapi", "api_ptr_id", {"size": pl.Int64, "pinned": pl.Int64}
        )

        def convert_batch(batch: pl.DataFrame) -> pl.DataFrame:
            rows = self._convert_work(select_columns(batch, types))
            call = calls.at(rows["id"]).to_series().cast(pl.Int64)
            rows = rows.with_columns(call.alias("correlation"))
            is_copy = rows["kind"] == "memcpy"
            of_copy, of_kernel = call.set(~is_copy, None), call.set(is_copy, None)
            call_facts = (launches.at(of_kernel), copies.at(of_copy), in_threads.at(of_kernel))
            return _join_call_facts(pl.concat([rows, *call_facts], how="horizontal"))

        return self._db.read("rocpd_op", types, each=convert_batch)

    def _convert_work(self, rows: pl.DataFrame) -> pl.DataFrame:
        kind = self._names.names_of(rows["opType_id"]).fill_null("")
        description = self._names.names_of(rows["description_id"])
        rows = rows.with_columns(type=kind, what=description.set(description == "", None))
        rows = rows.filter(~pl.col("type").str.contains(r"(?i)barrier|marker"))
        is_copy = pl.col("type").str.contains(r"(?i)copy")
        return rows.select(
            "id",
            ts="start",
            dur=pl.col("end") - pl.col("start"),
            kind=pl.when(is_copy)
            .then(pl.lit("memcpy"))
            .when(pl.col("type").str.contains(FILL))
            .then(pl.lit("memset"))
            .otherwise(pl.lit("kernel")),
            name=pl.coalesce("what", "type"),
            device=pl.col("gpuId").fill_null(0),
            stream=pl.col("queueId").fill_null(0),
            copy=pl.when(is_copy).then(copy_direction(rows["type"])).cast(Copy),
        )

    def counters(self) -> pl.DataFrame | None:
        """Return clocks and other sampled values, or ``None`` if there are none."""
        types = {"deviceType": pl.String, "deviceId": pl.Int64, "monitorType": pl.String,
                 "start": pl.Int64, "end": pl.Int64, "value": pl.String}  # fmt: skip
        rows = select_columns(self._db.read("rocpd_monitor", types), types)
        rows = rows.with_columns(pl.col("value").cast(pl.Float64, strict=False))
        rows = rows.filter(pl.col("value").is_finite() & pl.col("monitorType").is_not_null())
        if not rows.height:
            return None
        return rows.select(
            "value",
            ts="start",
            dur=pl.col("end") - pl.col("start"),
            name=pl.col("monitorType").str.slice(0, 100),
            range=pl.format("GPU {}", pl.col("deviceId").fill_null(0)),
        )


def _join_call_facts(rows: pl.DataFrame) -> pl.DataFrame:
    """Join device work with the facts recorded by its calls."""
    is_copy, is_kernel = pl.col("kind") == "memcpy", pl.col("kind") == "kernel"
    is_pinned = is_copy & (pl.col("pinned") > 0)
    has_rate = is_copy & (pl.col("size") > 0) & (pl.col("dur") > 0)
    grid = pl.col("gridX") * pl.col("gridY") * pl.col("gridZ")
    group = pl.col("workgroupX") * pl.col("workgroupY") * pl.col("workgroupZ")
    counts_threads = pl.col("in_threads").fill_null(False) & (group > 0)
    result = rows.select(
        *("ts", "dur", "kind", "name", "device", "stream", "copy", "correlation"),
        src=pl.when(is_pinned & (pl.col("copy") == "HtoD")).then(_PINNED),
        dst=pl.when(is_pinned & (pl.col("copy") == "DtoH")).then(_PINNED),
        bytes=pl.when(is_copy).then("size"),
        gbps=pl.when(has_rate).then(pl.col("size") / pl.col("dur")),
        blocks=pl.when(is_kernel).then(pl.when(counts_threads).then(grid // group).otherwise(grid)),
        threads=pl.when(is_kernel & (group > 0)).then(group),
        shared=pl.when(is_kernel).then("groupSegmentSize"),
    )
    return _compact_rows(result, GpuKind)


def _compact_rows(rows: pl.DataFrame, kind: Any) -> pl.DataFrame:
    """Shrink rows that stay in memory until the last ones are read."""
    texts = pl.col(pl.String).exclude("kind").cast(pl.Categorical)
    return narrow_integers(rows.with_columns(texts, pl.col("kind").cast(kind)))


class Rocpd:
    """Tables of rocprofv3's database, with all its processes."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self.sets = sorted(
            name.removeprefix("rocpd_string")
            for name in db.tables
            if name.startswith("rocpd_string")
        )
        self.inputs: pl.DataFrame | None = None
        self.devices: tuple[Device, ...] = ()
        self.programs: list[str] = []

    def rows(self) -> tuple[list[pl.DataFrame], list[pl.DataFrame]]:
        """Return the host rows and the device rows of each process."""
        host, device = [], []
        devices: dict[int, Device] = {}
        for index, suffix in enumerate(self.sets):
            process = _Process(self._db, suffix, index << _CORRELATION_BITS)
            devices |= process.devices
            host.append(process.calls())
            device += [process.kernels(), process.copies()]
            self.programs += process.programs()
        self.devices = tuple(devices.values())
        rows = stack_frames(host)
        if rows.height:
            rows, self.inputs = number_inputs(rows)
        return [rows], device


class _Process:
    """Tables of one process. Rows are read a few thousand at a time."""

    def __init__(self, db: Database, suffix: str, first: int) -> None:
        self._db, self._table_suffix, self._first_correlation = db, suffix, first
        self._names = NameLookup(db, self._table_name("string"), "id", "string")
        types = {"id": pl.Int64, "stack_id": pl.Int64, "category_id": pl.Int64,
                 "extdata": pl.String}  # fmt: skip
        self._events = read_numbered(db, self._table_name("event"), types, self._convert_events)
        stamps = {"id": pl.Int64, "value": pl.Int64}
        self._timestamps = read_numbered(db, self._table_name("timestamp"), stamps)
        self._tracks = KeyedTable(db, self._table_name("track"), "id", _PLACE_COLUMNS)
        self.devices: dict[int, Device] = {}
        self._agents = self._read_agents()
        self._pids = self._read_numbers("info_process", "pid")
        self._tids = self._read_numbers("info_thread", "tid")

    def _convert_events(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return the facts of events: their calls, and the ranges named by the texts of markers."""
        category = self._names.names_of(rows["category_id"]).fill_null("")
        message = rows["extdata"].str.extract(r'"message"\s*:\s*"((?:[^"\\]|\\.)*)"', 1)
        ranges = parse_ranges(message).with_columns(
            pl.when(message.is_not_null()).then(pl.col("name", "kind")),
            pl.col("dims").cast(pl.Categorical),
        )
        return rows.select(
            "id",
            "stack_id",
            hsa=category.str.starts_with("HSA"),
            marks=category.str.contains("MARKER"),
            range=ranges["name"].cast(pl.Categorical),
            range_kind=ranges["kind"].cast(CpuKind),
            sequence=ranges["sequence"],
            dims=ranges["dims"],
        )

    def _table_name(self, name: str) -> str:
        return f"rocpd_{name}{self._table_suffix}"

    def _read_numbers(self, table: str, column: str) -> dict[int, int]:
        types = {"id": pl.Int64, column: pl.Int64}
        rows = select_columns(self._db.read(self._table_name(table), types), types).drop_nulls()
        return dict(rows.select("id", column).iter_rows())

    def _read_agents(self) -> dict[int, int]:
        """Return the GPU number of each agent, numbered like HIP does."""
        integer_columns = ("id", "absolute_index", "logical_index", "type_index")
        text_columns = ("type", "name", "model_name", "product_name", "extdata")
        types: dict[str, Any] = dict.fromkeys(integer_columns, pl.Int64) | dict.fromkeys(
            text_columns, pl.String
        )
        rows = select_columns(self._db.read(self._table_name("info_agent"), types), types).head(
            _MAX_AGENTS
        )
        result = {}
        for row in rows.iter_rows(named=True):
            if row["type"] != "GPU" or row["id"] is None:
                continue
            number = next(
                (row[k] for k in ("type_index", "logical_index") if row[k] is not None), 0
            )
            if not 0 <= number < 1 << 31:
                continue
            extra_facts: object = {}
            with contextlib.suppress(ValueError, RecursionError):
                extra_facts = json.loads(row["extdata"] or "{}")
            facts = {**(extra_facts if isinstance(extra_facts, dict) else {}), **row}
            self.devices[number] = build_device(number, facts)
            result[row["id"]] = number
        return result

    def _read_timed(
        self,
        table: str,
        columns: Types,
        convert: Callable[[pl.DataFrame], pl.DataFrame],
        kind: Any,
        event_columns: tuple[str, ...] = ("stack_id",),
    ) -> pl.DataFrame:
        """Apply ``convert`` to a table in either layout, a few thousand rows at a time. Rows have
        their times and places, the ``columns``, and the ``event_columns`` of their events."""
        direct_types: Types = {"start": pl.Int64, "end": pl.Int64, **_PLACE_COLUMNS}
        split_types: Types = dict.fromkeys(("track_id", "start_id", "end_id"), pl.Int64)
        own_types: Types = {**columns, "event_id": pl.Int64}

        def convert_batch(batch: pl.DataFrame) -> pl.DataFrame:
            rows = select_columns(batch, own_types)
            if {"start_id", "end_id"} <= set(rows.columns) and "start" not in rows.columns:
                ids = pl.concat([rows["start_id"], rows["end_id"]])
                stamps = self._timestamps.at(ids).to_series()
                rows = rows.with_columns(start=stamps.head(len(rows)), end=stamps.tail(len(rows)))
                if "track_id" in rows.columns:
                    rows = rows.with_columns(self._tracks.at(rows["track_id"]))
            rows = select_columns(rows, direct_types).hstack(
                self._events.at(rows["event_id"], event_columns)
            )
            has_call = pl.col("stack_id").is_between(1, (1 << _CORRELATION_BITS) - 1)
            rows = rows.with_columns(
                ts=pl.col("start"),
                dur=pl.col("end") - pl.col("start"),
                correlation=pl.when(has_call).then(pl.col("stack_id") + self._first_correlation),
            )
            return _compact_rows(convert(rows), kind)

        rows = self._db.read(
            self._table_name(table),
            {**direct_types, **split_types, **own_types},
            each=convert_batch,
        )
        return rows if rows.height else pl.DataFrame()

    def calls(self) -> pl.DataFrame:
        """Return HIP's calls and ROCTX ranges, whose texts are in their events. HSA's calls are
        left out: they repeat HIP's calls one layer below."""

        def convert(rows: pl.DataFrame) -> pl.DataFrame:
            name = self._names.names_of(rows["name_id"]).fill_null("call")
            is_marker = pl.col("marks").fill_null(False) | pl.col("name").str.starts_with("roctx")
            text = pl.when(is_marker).then(pl.col("range").cast(pl.String))
            rows = rows.with_columns(name=name).filter(~pl.col("hsa").fill_null(False))
            rows = rows.select(
                "ts",
                "dur",
                name=pl.coalesce(text, "name"),
                correlation=pl.when(~is_marker).then("correlation"),
                kind=pl.when(is_marker)
                .then(pl.col("range_kind").cast(pl.String))
                .otherwise(pl.lit("runtime")),
                sequence=pl.when(is_marker).then(pl.col("sequence").cast(pl.Int64)),
                dims=pl.when(is_marker).then(pl.col("dims").cast(pl.String)),
                process=pl.col("pid").replace(self._pids).cast(pl.String),
                thread=pl.col("tid").replace(self._tids).cast(pl.String),
            )
            is_unnamed = pl.col("kind").is_null()  # markers whose events are lost or without text
            marker_rows = rows.filter(is_unnamed)
            if marker_rows.height:
                marker_rows = marker_rows.with_columns(parse_ranges(marker_rows["name"]))
                rows = pl.concat([rows.filter(~is_unnamed), marker_rows])
            return rows

        event_columns = ("stack_id", "hsa", "marks", "range", "range_kind", "sequence", "dims")
        return self._read_timed("region", {"name_id": pl.Int64}, convert, CpuKind, event_columns)

    def kernels(self) -> pl.DataFrame:
        """Return kernel dispatches. The file gives the size of grids in work items."""
        sizes = ("workgroup_size", "grid_size")
        columns = ["kernel_id", "group_segment_size"]
        columns += [f"{size}_{axis}" for size in sizes for axis in "xyz"]
        table = self._table_name("info_kernel_symbol")
        names = self._db.read_texts(table, "id", "kernel_name")
        names |= self._db.read_texts(table, "id", "display_name")
        symbols = KeyedTable(self._db, table, "id", {"arch_vgpr_count": pl.Int64})
        group, grid = (
            pl.col(f"{size}_x") * pl.col(f"{size}_y") * pl.col(f"{size}_z") for size in sizes
        )

        def convert(rows: pl.DataFrame) -> pl.DataFrame:
            name = look_up_texts(rows["kernel_id"], names).fill_null("kernel")
            fill = name.str.contains(r"^__amd_rocclr_fillBuffer")
            return rows.select(
                "ts",
                "dur",
                "correlation",
                kind=pl.when(fill).then(pl.lit("memset")).otherwise(pl.lit("kernel")),
                name=name,
                device=self._device("agent_id"),
                stream=pl.coalesce("stream_id", "queue_id").fill_null(0),
                threads=pl.when(group > 0).then(group),
                blocks=pl.when(group > 0).then(grid // group),
                shared="group_segment_size",
                registers=symbols.at(rows["kernel_id"]).to_series(),
            )

        return self._read_timed(
            "kernel_dispatch", dict.fromkeys(columns, pl.Int64), convert, GpuKind
        )

    def copies(self) -> pl.DataFrame:
        """Return copies, assigned to the GPU at one of their ends."""
        columns = ("name_id", "size", "dst_agent_id", "src_agent_id")
        has_rate = (pl.col("size") > 0) & (pl.col("dur") > 0)

        def convert(rows: pl.DataFrame) -> pl.DataFrame:
            name = self._names.names_of(rows["name_id"]).fill_null("copy")
            return rows.select(
                "ts",
                "dur",
                "correlation",
                kind=pl.lit("memcpy"),
                name=name,
                device=pl.coalesce(
                    self._device("dst_agent_id", None),
                    self._device("src_agent_id", None),
                    pl.lit(0, dtype=pl.Int64),
                ),
                stream=pl.coalesce("stream_id", "queue_id").fill_null(0),
                copy=copy_direction(name).cast(Copy),
                bytes="size",
                gbps=pl.when(has_rate).then(pl.col("size") / pl.col("dur")),
            )

        return self._read_timed("memory_copy", dict.fromkeys(columns, pl.Int64), convert, GpuKind)

    def _device(self, column: str, default: int | None = 0) -> pl.Expr:
        agents = self._agents or {-1: 0}
        return pl.col(column).replace_strict(agents, default=default, return_dtype=pl.Int64)

    def programs(self) -> list[str]:
        """Return the programs of the processes, without arguments."""
        result = self._db.read_texts(self._table_name("info_process"), "id", "command")
        return [text.split()[0][:500] for text in result.values() if text.split()]
