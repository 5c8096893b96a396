"""SQLite databases of ROCm's profilers: RPD (rocmProfileData) and rocpd (rocprofv3).

RPD keeps calls in ``rocpd_api``, device work in ``rocpd_op`` and what belongs together in
``rocpd_api_ops``. rocprofv3's tables have the process's number at the end of their names, one set a
process; since version 4 of its schema times and places stand in tables of their own
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

_OWN = ("hcc_activity_callback", "roctracer", "rocprofiler")
_MARKERS = ("UserMarker", "roctxRange", "roctxMark")
_IN_THREADS = r"(?i)ext_?module|hccmodule"
"""Pattern for launches given their number of threads; others give the number of blocks."""
_CORRELATIONS = 40
_PINNED = pl.lit("Pinned")
_PLACE: Types = dict.fromkeys(("pid", "tid", "agent_id", "queue_id", "stream_id"), pl.Int64)
_MAX_AGENTS = 4096


class Rpd:
    """Tables of rocmProfileData. Rows are read some thousands at a time, each joined with other
    tables' facts, so that none of these is in memory as a whole."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._names = NameLookup(db, "rocpd_string", "id", "string")
        self.inputs: pl.DataFrame | None = None
        self._in_threads: list[pl.DataFrame] = []
        """Ids of the calls that give a launch's number of threads."""

    def host(self) -> pl.DataFrame:
        """Return calls, ranges, and the profiler's own work (its callbacks and writers)."""
        types = dict.fromkeys(
            ("id", "pid", "tid", "start", "end", "apiName_id", "args_id"), pl.Int64
        )
        texts = self._names.rows
        if self._db.has_table("rocpd_ustring", "id", "string"):
            texts = KeyedTable(self._db, "rocpd_ustring", "id", {"string": pl.String})
        rows = self._db.read(
            "rocpd_api", types, each=lambda batch: self._calls(select_columns(batch, types), texts)
        )
        if not rows.height:
            return pl.DataFrame()
        rows, self.inputs = number_inputs(rows)
        return rows

    def _calls(self, rows: pl.DataFrame, arguments: KeyedTable) -> pl.DataFrame:
        """Return calls, then ranges, without their texts: nearly each of PyTorch's is distinct."""
        name = self._names.names_of(rows["apiName_id"]).fill_null("call")
        self._in_threads.append(
            narrow_integers(rows.select("id").filter(name.str.contains(_IN_THREADS)))
        )
        marker = pl.any_horizontal(pl.col("name").str.starts_with(word) for word in _MARKERS)
        own = pl.col("name").str.contains("::writeRows", literal=True) | pl.any_horizontal(
            pl.col("name").str.starts_with(word) for word in _OWN
        )
        rows = rows.with_columns(name=name).with_columns(marker=marker)
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
            kind=pl.when(own).then(pl.lit("overhead")).otherwise(pl.lit("runtime")),
            sequence=pl.lit(None, dtype=pl.Int64),
            dims=pl.lit(None, dtype=pl.String),
        )
        marks = rows.filter("marker")
        if marks.height:
            marks = marks.with_columns(parse_ranges(marks["text"].fill_null(marks["name"])))
            rows = pl.concat([rows.filter(~pl.col("marker")), marks])
        return _held(rows.drop("marker", "text"), CpuKind)

    def device(self) -> pl.DataFrame:
        """Return kernels, copies and fills, each with its call. To be called after ``host``."""
        types = dict.fromkeys(
            ("id", "gpuId", "queueId", "start", "end", "description_id", "opType_id"), pl.Int64
        )
        ties = {"api_id": pl.Int64, "op_id": pl.Int64}
        calls = read_numbered(self._db, "rocpd_api_ops", ties, pl.DataFrame.drop_nulls, key="op_id")
        none = pl.DataFrame(schema={"id": pl.Int64})
        threaded = pl.concat([*self._in_threads, none], how="vertical_relaxed")
        in_threads = Numbered(threaded.with_columns(in_threads=True), "id")
        sizes = ("gridX", "gridY", "gridZ", "workgroupX", "workgroupY", "workgroupZ")
        launches = KeyedTable(
            self._db, "rocpd_kernelapi", "api_ptr_id",
            dict.fromkeys((*sizes, "groupSegmentSize"), pl.Int64),
        )  # fmt: skip
        copies = KeyedTable(
            self._db, "rocpd_copyapi", "api_ptr_id", {"size": pl.Int64, "pinned": pl.Int64}
        )

        def of(batch: pl.DataFrame) -> pl.DataFrame:
            rows = self._work(select_columns(batch, types))
            call = calls.at(rows["id"]).to_series().cast(pl.Int64)
            rows = rows.with_columns(call.alias("correlation"))
            copy = rows["kind"] == "memcpy"
            of_copy, of_kernel = call.set(~copy, None), call.set(copy, None)
            more = (launches.at(of_kernel), copies.at(of_copy), in_threads.at(of_kernel))
            return _of_calls(pl.concat([rows, *more], how="horizontal"))

        return self._db.read("rocpd_op", types, each=of)

    def _work(self, rows: pl.DataFrame) -> pl.DataFrame:
        kind = self._names.names_of(rows["opType_id"]).fill_null("")
        what = self._names.names_of(rows["description_id"])
        rows = rows.with_columns(type=kind, what=what.set(what == "", None))
        rows = rows.filter(~pl.col("type").str.contains(r"(?i)barrier|marker"))
        copy = pl.col("type").str.contains(r"(?i)copy")
        return rows.select(
            "id",
            ts="start",
            dur=pl.col("end") - pl.col("start"),
            kind=pl.when(copy)
            .then(pl.lit("memcpy"))
            .when(pl.col("type").str.contains(FILL))
            .then(pl.lit("memset"))
            .otherwise(pl.lit("kernel")),
            name=pl.coalesce("what", "type"),
            device=pl.col("gpuId").fill_null(0),
            stream=pl.col("queueId").fill_null(0),
            copy=pl.when(copy).then(copy_direction(rows["type"])).cast(Copy),
        )

    def counters(self) -> pl.DataFrame | None:
        """Return clocks and other sampled values; ``None`` if there are none."""
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


def _of_calls(rows: pl.DataFrame) -> pl.DataFrame:
    """Join device work with the facts recorded by its calls."""
    copy, kernel = pl.col("kind") == "memcpy", pl.col("kind") == "kernel"
    pinned = copy & (pl.col("pinned") > 0)
    timed = copy & (pl.col("size") > 0) & (pl.col("dur") > 0)
    grid = pl.col("gridX") * pl.col("gridY") * pl.col("gridZ")
    group = pl.col("workgroupX") * pl.col("workgroupY") * pl.col("workgroupZ")
    grouped = pl.col("in_threads").fill_null(False) & (group > 0)
    result = rows.select(
        *("ts", "dur", "kind", "name", "device", "stream", "copy", "correlation"),
        src=pl.when(pinned & (pl.col("copy") == "HtoD")).then(_PINNED),
        dst=pl.when(pinned & (pl.col("copy") == "DtoH")).then(_PINNED),
        bytes=pl.when(copy).then("size"),
        gbps=pl.when(timed).then(pl.col("size") / pl.col("dur")),
        blocks=pl.when(kernel).then(pl.when(grouped).then(grid // group).otherwise(grid)),
        threads=pl.when(kernel & (group > 0)).then(group),
        shared=pl.when(kernel).then("groupSegmentSize"),
    )
    return _held(result, GpuKind)


def _held(rows: pl.DataFrame, kind: Any) -> pl.DataFrame:
    """Shrink rows that are kept until the last ones are read."""
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
        """Return the host and the device rows of each process."""
        host, device = [], []
        devices: dict[int, Device] = {}
        for place, suffix in enumerate(self.sets):
            item = _Process(self._db, suffix, place << _CORRELATIONS)
            devices |= item.devices
            host.append(item.calls())
            device += [item.kernels(), item.copies()]
            self.programs += item.programs()
        self.devices = tuple(devices.values())
        rows = stack_frames(host)
        if rows.height:
            rows, self.inputs = number_inputs(rows)
        return [rows], device


class _Process:
    """Tables of one process. Rows are read some thousands at a time."""

    def __init__(self, db: Database, suffix: str, first: int) -> None:
        self._db, self._suffix, self._first = db, suffix, first
        self._names = NameLookup(db, self._table("string"), "id", "string")
        types = {"id": pl.Int64, "stack_id": pl.Int64, "category_id": pl.Int64,
                 "extdata": pl.String}  # fmt: skip
        self._events = read_numbered(db, self._table("event"), types, self._event)
        stamps = {"id": pl.Int64, "value": pl.Int64}
        self._stamps = read_numbered(db, self._table("timestamp"), stamps)
        self._tracks = KeyedTable(db, self._table("track"), "id", _PLACE)
        self.devices: dict[int, Device] = {}
        self._agents = self._known_agents()
        self._pids = self._numbers("info_process", "pid")
        self._tids = self._numbers("info_thread", "tid")

    def _event(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return the facts of events: their calls, and the ranges named by markers' texts."""
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

    def _table(self, name: str) -> str:
        return f"rocpd_{name}{self._suffix}"

    def _numbers(self, table: str, column: str) -> dict[int, int]:
        types = {"id": pl.Int64, column: pl.Int64}
        rows = select_columns(self._db.read(self._table(table), types), types).drop_nulls()
        return dict(rows.select("id", column).iter_rows())

    def _known_agents(self) -> dict[int, int]:
        """Return each agent's GPU number, which counts GPUs as HIP does."""
        whole = ("id", "absolute_index", "logical_index", "type_index")
        texts = ("type", "name", "model_name", "product_name", "extdata")
        types: dict[str, Any] = dict.fromkeys(whole, pl.Int64) | dict.fromkeys(texts, pl.String)
        rows = select_columns(self._db.read(self._table("info_agent"), types), types).head(
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
            more: object = {}
            with contextlib.suppress(ValueError, RecursionError):
                more = json.loads(row["extdata"] or "{}")
            facts = {**(more if isinstance(more, dict) else {}), **row}
            self.devices[number] = build_device(number, facts)
            result[row["id"]] = number
        return result

    def _timed(
        self,
        table: str,
        more: Types,
        of: Callable[[pl.DataFrame], pl.DataFrame],
        kind: Any,
        said: tuple[str, ...] = ("stack_id",),
    ) -> pl.DataFrame:
        """Apply ``of`` to a table in either layout, some thousands of rows at a time, with their
        times and places, the columns ``more``, and the columns ``said`` of their events."""
        direct: Types = {"start": pl.Int64, "end": pl.Int64, **_PLACE}
        split: Types = dict.fromkeys(("track_id", "start_id", "end_id"), pl.Int64)
        own: Types = {**more, "event_id": pl.Int64}

        def made(batch: pl.DataFrame) -> pl.DataFrame:
            rows = select_columns(batch, own)
            if {"start_id", "end_id"} <= set(rows.columns) and "start" not in rows.columns:
                ids = pl.concat([rows["start_id"], rows["end_id"]])
                stamps = self._stamps.at(ids).to_series()
                rows = rows.with_columns(start=stamps.head(len(rows)), end=stamps.tail(len(rows)))
                if "track_id" in rows.columns:
                    rows = rows.with_columns(self._tracks.at(rows["track_id"]))
            rows = select_columns(rows, direct).hstack(self._events.at(rows["event_id"], said))
            caused = pl.col("stack_id").is_between(1, (1 << _CORRELATIONS) - 1)
            rows = rows.with_columns(
                ts=pl.col("start"),
                dur=pl.col("end") - pl.col("start"),
                correlation=pl.when(caused).then(pl.col("stack_id") + self._first),
            )
            return _held(of(rows), kind)

        rows = self._db.read(self._table(table), {**direct, **split, **own}, each=made)
        return rows if rows.height else pl.DataFrame()

    def calls(self) -> pl.DataFrame:
        """Return HIP's calls and ROCTX ranges, whose texts are in their events. HSA's calls are
        left out: HIP's again, one layer below."""

        def of(rows: pl.DataFrame) -> pl.DataFrame:
            name = self._names.names_of(rows["name_id"]).fill_null("call")
            marker = pl.col("marks").fill_null(False) | pl.col("name").str.starts_with("roctx")
            text = pl.when(marker).then(pl.col("range").cast(pl.String))
            rows = rows.with_columns(name=name).filter(~pl.col("hsa").fill_null(False))
            rows = rows.select(
                "ts",
                "dur",
                name=pl.coalesce(text, "name"),
                correlation=pl.when(~marker).then("correlation"),
                kind=pl.when(marker)
                .then(pl.col("range_kind").cast(pl.String))
                .otherwise(pl.lit("runtime")),
                sequence=pl.when(marker).then(pl.col("sequence").cast(pl.Int64)),
                dims=pl.when(marker).then(pl.col("dims").cast(pl.String)),
                process=pl.col("pid").replace(self._pids).cast(pl.String),
                thread=pl.col("tid").replace(self._tids).cast(pl.String),
            )
            unnamed = pl.col("kind").is_null()  # markers whose events are lost or say nothing
            marks = rows.filter(unnamed)
            if marks.height:
                marks = marks.with_columns(parse_ranges(marks["name"]))
                rows = pl.concat([rows.filter(~unnamed), marks])
            return rows

        said = ("stack_id", "hsa", "marks", "range", "range_kind", "sequence", "dims")
        return self._timed("region", {"name_id": pl.Int64}, of, CpuKind, said)

    def kernels(self) -> pl.DataFrame:
        """Return kernel dispatches. The file counts grids in work items."""
        sizes = ("workgroup_size", "grid_size")
        more = ["kernel_id", "group_segment_size"]
        more += [f"{size}_{axis}" for size in sizes for axis in "xyz"]
        table = self._table("info_kernel_symbol")
        names = self._db.read_texts(table, "id", "kernel_name")
        names |= self._db.read_texts(table, "id", "display_name")
        symbols = KeyedTable(self._db, table, "id", {"arch_vgpr_count": pl.Int64})
        group, grid = (
            pl.col(f"{size}_x") * pl.col(f"{size}_y") * pl.col(f"{size}_z") for size in sizes
        )

        def of(rows: pl.DataFrame) -> pl.DataFrame:
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

        return self._timed("kernel_dispatch", dict.fromkeys(more, pl.Int64), of, GpuKind)

    def copies(self) -> pl.DataFrame:
        """Return copies, on the GPU at one of their ends."""
        more = ("name_id", "size", "dst_agent_id", "src_agent_id")
        timed = (pl.col("size") > 0) & (pl.col("dur") > 0)

        def of(rows: pl.DataFrame) -> pl.DataFrame:
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
                gbps=pl.when(timed).then(pl.col("size") / pl.col("dur")),
            )

        return self._timed("memory_copy", dict.fromkeys(more, pl.Int64), of, GpuKind)

    def _device(self, column: str, default: int | None = 0) -> pl.Expr:
        agents = self._agents or {-1: 0}
        return pl.col(column).replace_strict(agents, default=default, return_dtype=pl.Int64)

    def programs(self) -> list[str]:
        """Return the programs of the processes, without arguments."""
        result = self._db.read_texts(self._table("info_process"), "id", "command")
        return [text.split()[0][:500] for text in result.values() if text.split()]
