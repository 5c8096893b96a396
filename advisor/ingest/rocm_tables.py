"""SQLite databases of ROCm's profilers: RPD (rocmProfileData) and rocpd (rocprofv3).

RPD keeps calls in ``rocpd_api``, device work in ``rocpd_op`` and what belongs together in
``rocpd_api_ops``. rocprofv3's tables have the process's number at the end of their names, one set a
process; since version 4 of its schema times and places stand in tables of their own
(``rocpd_timestamp``, ``rocpd_track``).
"""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

import polars as pl

from advisor.ingest.nvtx import inputs_of, parsed
from advisor.ingest.rocm import FILL, direction, gpu, ranges
from advisor.ingest.sqlite import Database, Types, narrowed
from advisor.trace import Copy, CpuKind, Device, GpuKind

_OWN = ("hcc_activity_callback", "roctracer", "rocprofiler")
_MARKERS = ("UserMarker", "roctxRange", "roctxMark")
_IN_THREADS = r"(?i)ext_?module|hccmodule"
"""Launches that are told the number of threads, where others are told that of blocks."""
_CORRELATIONS = 40
_MAX_AGENTS = 4096


def _all(rows: pl.DataFrame, types: Types) -> pl.DataFrame:
    return rows.with_columns(
        pl.lit(None, dtype=kind).alias(name)
        for name, kind in types.items()
        if name not in rows.columns
    )


def _looked_up(numbers: pl.Series, texts: dict[int, str]) -> pl.Series:
    known = {n: texts[n] for n in numbers.drop_nulls().unique().to_list() if n in texts}
    if not known:
        return pl.Series("text", [None], dtype=pl.String).new_from_index(0, len(numbers))
    return numbers.replace_strict(known, default=None, return_dtype=pl.String)


class Rpd:
    """Tables of rocmProfileData."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._texts = db.texts("rocpd_string", "id", "string")
        self.inputs: pl.DataFrame | None = None

    def host(self) -> pl.DataFrame:
        """Calls, ranges, and the profiler's own work, which its callbacks and writers are."""
        types = dict.fromkeys(
            ("id", "pid", "tid", "start", "end", "apiName_id", "args_id"), pl.Int64
        )
        arguments = self._db.texts("rocpd_ustring", "id", "string") or self._texts
        rows = self._db.read(
            "rocpd_api", types, each=lambda batch: self._calls(_all(batch, types), arguments)
        )
        if not rows.height:
            return pl.DataFrame()
        number, self.inputs = inputs_of(rows["dims"])
        return rows.drop("dims").with_columns(number)

    def _calls(self, rows: pl.DataFrame, arguments: dict[int, str]) -> pl.DataFrame:
        """Calls, then ranges, without their texts: nearly each of PyTorch's has a number in it."""
        name = _looked_up(rows["apiName_id"], self._texts).fill_null("call")
        marker = pl.any_horizontal(pl.col("name").str.starts_with(word) for word in _MARKERS)
        own = pl.col("name").str.contains("::writeRows", literal=True) | pl.any_horizontal(
            pl.col("name").str.starts_with(word) for word in _OWN
        )
        rows = rows.with_columns(name=name).with_columns(marker=marker)
        text = _looked_up(rows["args_id"].set(~rows["marker"], None), arguments)
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
            marks = marks.with_columns(parsed(marks["text"].fill_null(marks["name"])))
            rows = pl.concat([rows.filter(~pl.col("marker")), marks])
        texts = pl.col("name", "process", "thread", "dims").cast(pl.Categorical)
        rows = rows.drop("marker", "text").with_columns(texts, pl.col("kind").cast(CpuKind))
        return narrowed(rows)

    def device(self) -> pl.DataFrame:
        """Kernels, copies and fills, each with the call that caused it."""
        types = dict.fromkeys(
            ("id", "gpuId", "queueId", "start", "end", "description_id", "opType_id"), pl.Int64
        )
        rows = self._db.read("rocpd_op", types, each=lambda batch: self._work(_all(batch, types)))
        if not rows.height:
            return pl.DataFrame()
        copy = pl.col("kind") == "memcpy"
        pinned = copy & (pl.col("pinned") > 0)
        timed = copy & (pl.col("size") > 0) & (pl.col("dur") > 0)
        return self._with_calls(rows).select(
            *("ts", "dur", "kind", "name", "device", "stream", "copy"),
            correlation="api_id",
            src=pl.when(pinned & (pl.col("copy") == "HtoD")).then(pl.lit("Pinned")),
            dst=pl.when(pinned & (pl.col("copy") == "DtoH")).then(pl.lit("Pinned")),
            bytes=pl.when(copy).then("size"),
            gbps=pl.when(timed).then(pl.col("size") / pl.col("dur")),
            **{
                name: pl.when(pl.col("kind") == "kernel").then(column)
                for name, column in (
                    ("blocks", "blocks"),
                    ("threads", "threads"),
                    ("shared", "groupSegmentSize"),
                )
            },
        )

    def _work(self, rows: pl.DataFrame) -> pl.DataFrame:
        kind = _looked_up(rows["opType_id"], self._texts).fill_null("")
        what = _looked_up(rows["description_id"], self._texts)
        rows = rows.with_columns(type=kind, what=what.set(what == "", None))
        rows = rows.filter(~pl.col("type").str.contains(r"(?i)barrier|marker"))
        copy = pl.col("type").str.contains(r"(?i)copy")
        rows = rows.select(
            "id",
            ts="start",
            dur=pl.col("end") - pl.col("start"),
            kind=pl.when(copy)
            .then(pl.lit("memcpy"))
            .when(pl.col("type").str.contains(FILL))
            .then(pl.lit("memset"))
            .otherwise(pl.lit("kernel"))
            .cast(GpuKind),
            name=pl.coalesce("what", "type").cast(pl.Categorical),
            device=pl.col("gpuId").fill_null(0),
            stream=pl.col("queueId").fill_null(0),
            copy=pl.when(copy).then(direction(rows["type"])).cast(Copy),
        )
        return narrowed(rows)

    def _with_calls(self, rows: pl.DataFrame) -> pl.DataFrame:
        ties = {"api_id": pl.Int64, "op_id": pl.Int64}
        of_op = _all(self._db.read("rocpd_api_ops", ties), ties).drop_nulls().unique("op_id")
        rows = rows.with_columns(pl.col("id").cast(pl.Int64))
        rows = rows.join(of_op, left_on="id", right_on="op_id", how="left", maintain_order="left")
        del of_op
        names = [n for n, text in self._texts.items() if re.search(_IN_THREADS, text)]
        named = {"id": pl.Int64, "apiName_id": pl.Int64}
        calls = self._db.read(
            "rocpd_api",
            named,
            each=lambda batch: _all(batch, named).filter(pl.col("apiName_id").is_in(names)),
        )
        grid = pl.col("gridX") * pl.col("gridY") * pl.col("gridZ")
        group = pl.col("workgroupX") * pl.col("workgroupY") * pl.col("workgroupZ")
        in_threads = pl.col("api_ptr_id").is_in(_all(calls, named)["id"].implode())
        sizes = ("gridX", "gridY", "gridZ", "workgroupX", "workgroupY", "workgroupZ")
        types = dict.fromkeys(("api_ptr_id", *sizes, "groupSegmentSize"), pl.Int64)

        def of(batch: pl.DataFrame) -> pl.DataFrame:
            blocks = pl.when(in_threads & (group > 0)).then(grid // group).otherwise(grid)
            return narrowed(
                _all(batch, types).select(
                    *("api_ptr_id", "groupSegmentSize"),
                    threads=pl.when(group > 0).then(group),
                    blocks=blocks,
                )
            )

        kernels = self._db.read("rocpd_kernelapi", types, each=of)
        kernels = _all(kernels, dict.fromkeys((*types, "threads", "blocks"), pl.Int64))
        kernels = kernels.select("api_ptr_id", "groupSegmentSize", "threads", "blocks")
        kernels = kernels.with_columns(pl.col("api_ptr_id").cast(pl.Int64)).unique("api_ptr_id")
        types = {"api_ptr_id": pl.Int64, "size": pl.Int64, "pinned": pl.Int64}
        copies = _all(self._db.read("rocpd_copyapi", types), types).unique("api_ptr_id")
        for more in (kernels, copies):
            rows = rows.join(
                more, left_on="api_id", right_on="api_ptr_id", how="left", maintain_order="left"
            )
        return rows

    def counters(self) -> pl.DataFrame | None:
        """Clocks and whatever else was sampled meanwhile."""
        types = {"deviceType": pl.String, "deviceId": pl.Int64, "monitorType": pl.String,
                 "start": pl.Int64, "end": pl.Int64, "value": pl.String}  # fmt: skip
        rows = _all(self._db.read("rocpd_monitor", types), types)
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


class Rocpd:
    """Tables of rocprofv3's database, of all the processes that are in it."""

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
        """Host and device rows of each process."""
        host, device = [], []
        devices: dict[int, Device] = {}
        for place, suffix in enumerate(self.sets):
            one = _Process(self._db, suffix, place << _CORRELATIONS)
            devices |= one.devices
            host.append(one.calls())
            device += [one.kernels(), one.copies()]
            self.programs += one.programs()
        self.devices = tuple(devices.values())
        return self._with_ranges(host), device

    def _with_ranges(self, parts: list[pl.DataFrame]) -> list[pl.DataFrame]:
        parts = [part for part in parts if part.height]
        if not parts:
            return []
        rows = pl.concat(parts, how="diagonal_relaxed")
        marks = rows.filter(pl.col("kind") == "annotation")
        if not marks.height:
            return [rows]
        found, self.inputs = ranges(marks["name"])
        marks = marks.drop("name", "kind", "correlation").hstack(found)
        return [rows.filter(pl.col("kind") != "annotation"), marks]


class _Process:
    """One process's tables."""

    def __init__(self, db: Database, suffix: str, first: int) -> None:
        self._db, self._suffix, self._first = db, suffix, first
        self._texts = db.texts(self._table("string"), "id", "string")
        types = {name: pl.Int64 for name in ("id", "stack_id", "category_id")}  # noqa: C420
        events = _all(db.read(self._table("event"), {**types, "extdata": pl.String}), types)
        self._events = events.unique("id") if events.height else events
        self.devices: dict[int, Device] = {}
        self._agents = self._known_agents()
        self._pids = self._numbers("info_process", "pid")
        self._tids = self._numbers("info_thread", "tid")

    def _table(self, name: str) -> str:
        return f"rocpd_{name}{self._suffix}"

    def _numbers(self, table: str, column: str) -> dict[int, int]:
        types = {"id": pl.Int64, column: pl.Int64}
        rows = _all(self._db.read(self._table(table), types), types).drop_nulls()
        return dict(rows.select("id", column).iter_rows())

    def _known_agents(self) -> dict[int, int]:
        """Number of the GPU by that of the agent: among the GPUs, as HIP counts them."""
        whole = ("id", "absolute_index", "logical_index", "type_index")
        texts = ("type", "name", "model_name", "product_name", "extdata")
        types: dict[str, Any] = dict.fromkeys(whole, pl.Int64) | dict.fromkeys(texts, pl.String)
        rows = _all(self._db.read(self._table("info_agent"), types), types).head(_MAX_AGENTS)
        found = {}
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
            self.devices[number] = gpu(number, facts)
            found[row["id"]] = number
        return found

    def _timed(self, table: str, more: Types) -> pl.DataFrame:
        """Rows with ``start``, ``end``, ``pid``, ``tid``, ``agent_id``, ``queue_id``, ``stream_id``
        and what else is asked for, from either layout."""
        place: Types = dict.fromkeys(("pid", "tid", "agent_id", "queue_id", "stream_id"), pl.Int64)
        direct: Types = {"start": pl.Int64, "end": pl.Int64, **place}
        split: Types = dict.fromkeys(("track_id", "start_id", "end_id"), pl.Int64)
        rows = self._db.read(self._table(table), {**direct, **split, **more, "event_id": pl.Int64})
        rows = _all(rows, {**more, "event_id": pl.Int64})
        if not rows.height:
            return pl.DataFrame()
        if {"start_id", "end_id"} <= set(rows.columns) and "start" not in rows.columns:
            types: Types = {"id": pl.Int64, "value": pl.Int64}
            times = _all(self._db.read(self._table("timestamp"), types), types).unique("id")
            for column in ("start", "end"):
                rows = rows.join(
                    times.rename({"value": column}),
                    left_on=f"{column}_id", right_on="id", how="left", maintain_order="left",
                )  # fmt: skip
            tracks = _all(self._db.read(self._table("track"), {"id": pl.Int64, **place}), place)
            if "track_id" in rows.columns and "id" in tracks.columns:
                rows = rows.join(
                    tracks.unique("id"),
                    left_on="track_id", right_on="id", how="left", maintain_order="left",
                )  # fmt: skip
        rows = _all(rows, direct)
        if {"id", "stack_id"} <= set(self._events.columns):
            rows = rows.join(
                self._events, left_on="event_id", right_on="id", how="left", maintain_order="left"
            )
        rows = _all(rows, {"stack_id": pl.Int64, "category_id": pl.Int64, "extdata": pl.String})
        own = pl.col("stack_id").is_between(1, (1 << _CORRELATIONS) - 1)
        return rows.with_columns(
            ts=pl.col("start"),
            dur=pl.col("end") - pl.col("start"),
            correlation=pl.when(own).then(pl.col("stack_id") + self._first),
        )

    def calls(self) -> pl.DataFrame:
        """Calls of HIP and ROCTX ranges, whose text stands in their event. HSA's calls are those of
        HIP again, one layer below."""
        rows = self._timed("region", {"name_id": pl.Int64})
        if not rows.height:
            return rows
        name = _looked_up(rows["name_id"], self._texts).fill_null("call")
        category = _looked_up(rows["category_id"], self._texts).fill_null("")
        rows = rows.with_columns(name=name, category=category)
        rows = rows.filter(~pl.col("category").str.starts_with("HSA"))
        marker = pl.col("category").str.contains("MARKER") | pl.col("name").str.starts_with("roctx")
        message = pl.when(marker).then(
            pl.col("extdata").str.extract(r'"message"\s*:\s*"((?:[^"\\]|\\.)*)"', 1)
        )
        return rows.select(
            "ts",
            "dur",
            "correlation",
            name=pl.coalesce(message, "name"),
            kind=pl.when(marker).then(pl.lit("annotation")).otherwise(pl.lit("runtime")),
            process=pl.col("pid").replace(self._pids).cast(pl.String),
            thread=pl.col("tid").replace(self._tids).cast(pl.String),
        )

    def kernels(self) -> pl.DataFrame:
        """Dispatches. Grids are counted in work items here."""
        sizes = ("workgroup_size", "grid_size")
        more = ["kernel_id", "group_segment_size"]
        more += [f"{size}_{axis}" for size in sizes for axis in "xyz"]
        rows = self._timed("kernel_dispatch", dict.fromkeys(more, pl.Int64))
        if not rows.height:
            return rows
        table = self._table("info_kernel_symbol")
        names = self._db.texts(table, "id", "kernel_name")
        names |= self._db.texts(table, "id", "display_name")
        registers = {"id": pl.Int64, "arch_vgpr_count": pl.Int64}
        known = _all(self._db.read(table, registers), registers).drop_nulls().unique("id")
        rows = rows.join(
            known, left_on="kernel_id", right_on="id", how="left", maintain_order="left"
        )
        group, grid = (
            pl.col(f"{size}_x") * pl.col(f"{size}_y") * pl.col(f"{size}_z") for size in sizes
        )
        name = _looked_up(rows["kernel_id"], names).fill_null("kernel")
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
            registers="arch_vgpr_count",
        )

    def copies(self) -> pl.DataFrame:
        """Copies, by the GPU that is one of their ends."""
        more = ("name_id", "size", "dst_agent_id", "src_agent_id")
        rows = self._timed("memory_copy", dict.fromkeys(more, pl.Int64))
        if not rows.height:
            return rows
        name = _looked_up(rows["name_id"], self._texts).fill_null("copy")
        timed = (pl.col("size") > 0) & (pl.col("dur") > 0)
        return rows.select(
            "ts",
            "dur",
            "correlation",
            kind=pl.lit("memcpy"),
            name=name,
            device=pl.coalesce(
                self._device("dst_agent_id", None), self._device("src_agent_id", None), pl.lit(0)
            ),
            stream=pl.coalesce("stream_id", "queue_id").fill_null(0),
            copy=direction(name),
            bytes="size",
            gbps=pl.when(timed).then(pl.col("size") / pl.col("dur")),
        )

    def _device(self, column: str, default: int | None = 0) -> pl.Expr:
        agents = self._agents or {-1: 0}
        return pl.col(column).replace_strict(agents, default=default, return_dtype=pl.Int64)

    def programs(self) -> list[str]:
        """What was run, without its arguments."""
        found = self._db.texts(self._table("info_process"), "id", "command")
        return [text.split()[0][:500] for text in found.values() if text.split()]
