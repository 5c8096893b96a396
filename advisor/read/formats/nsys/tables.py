"""Reader of Nsight Systems' exported tables, as rows for ``build_trace``: device work, host calls.

The layout is that of Nsight Systems' exporter ("SQLite Schema Reference" in its user guide), 2020
to 2026. A table is written only if something was recorded, and columns differ between versions.
Anything missing counts as not recorded."""

from collections import Counter
from collections.abc import Callable, Iterator

import polars as pl
import polars.selectors as cs

from advisor.core.trace import Copy, CpuKind, Device, GpuKind
from advisor.read.nvtx import number_inputs, parse_ranges
from advisor.read.sqlite import (
    Database,
    Types,
    look_up_texts,
    narrow_integers,
    select_columns,
    stack_frames,
)

PREFIX = "CUPTI_ACTIVITY_KIND_"
KERNEL, MEMCPY, MEMSET = (PREFIX + name for name in ("KERNEL", "MEMCPY", "MEMSET"))
GRAPH, SYNC, EVENT = (PREFIX + name for name in ("GRAPH_TRACE", "SYNCHRONIZATION", "CUDA_EVENT"))
CALLS = (PREFIX + "RUNTIME", PREFIX + "DRIVER")
LIBRARIES = ("CUDNN_EVENTS", "CUBLAS_EVENTS")
MPI = ("MPI_COLLECTIVES_EVENTS", "MPI_P2P_EVENTS", "MPI_START_WAIT_EVENTS", "MPI_OTHER_EVENTS")
NVTX, SYSTEM, OVERHEAD = "NVTX_EVENTS", "OSRT_API", "PROFILER_OVERHEAD"
MEMORY = "CUDA_GPU_MEMORY_USAGE_EVENTS"
SAMPLES, CALL_CHAINS = "COMPOSITE_EVENTS", "SAMPLING_CALLCHAINS"
GPU_FAULTS, CPU_FAULTS = "CUDA_UM_GPU_PAGE_FAULT_EVENTS", "CUDA_UM_CPU_PAGE_FAULT_EVENTS"
METRICS, METRIC_NAMES = "GPU_METRICS", "TARGET_INFO_GPU_METRICS"

_TIME_COLUMNS = {"start": pl.Int64, "end": pl.Int64}
_PLACE_COLUMNS = {
    "deviceId": pl.Int32, "streamId": pl.Int64, "correlationId": pl.Int64, "globalPid": pl.Int64,
}  # fmt: skip
_RANGE_COLUMNS = {
    **_TIME_COLUMNS, "eventType": pl.Int32, "text": pl.String, "textId": pl.Int64,
    "globalTid": pl.Int64, "endGlobalTid": pl.Int64, "domainId": pl.Int64,
}  # fmt: skip
_COPY_DIRECTIONS = {
    1: "HtoD", 2: "DtoH", 3: "HtoD", 4: "DtoH", 5: "DtoD", 6: "DtoD", 7: "DtoD", 8: "DtoD",
    9: "HtoH", 10: "PtoP", 11: "HtoD", 12: "DtoH", 13: "DtoD",
}  # fmt: skip
"""Directions by CUpti_ActivityMemcpyKind, then the exporter's kinds for moves of managed memory."""
_MEMORY_KINDS = {
    0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed", 5: "Device Static",
    6: "Managed Static",
}  # fmt: skip
_MIGRATION_CAUSES = {
    1: "user prefetch", 2: "page fault", 3: "speculative prefetch", 4: "eviction",
    5: "access counters",
}  # fmt: skip
"""Causes by CUpti_ActivityUnifiedMemoryMigrationCause."""
_SYNC_KINDS = {1: "event", 2: "stream_wait", 3: "stream", 4: "context"}
"""Kinds by CUpti_ActivitySynchronizationType."""
_PUSH_POP, _START_END = (59, 70), (60, 71)
_THREAD_NAME, _DOMAIN = 39, 75
_CORRELATION_BITS = 32
"""Number of bits of a correlation number, which each process counts separately."""
_NO_STREAM = 1 << 31
_MAX_GPUS = 1024
_MAX_PERIODS = 5
"""Maximum time to the next sample, in typical sampling periods. Idle threads are not sampled."""


class Processes:
    """Processes of a file, known by the upper bits of its thread numbers."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}

    def correlation(self, process: pl.Series, number: pl.Series) -> pl.Series:
        """Return correlation numbers that are unique across processes (null: none)."""
        processes = process.drop_nulls().unique(maintain_order=True).to_list()
        for item in processes:
            self._places.setdefault(item, len(self._places))
        process_index = process.fill_null(-1).replace_strict(
            list(self._places), list(self._places.values()), default=0, return_dtype=pl.Int64
        )
        is_valid = number.is_between(1, (1 << _CORRELATION_BITS) - 1)
        return (number + process_index * (1 << _CORRELATION_BITS)).set(
            ~is_valid.fill_null(False), None
        )


class NsysTables:
    """Tables of one export, as rows of a trace."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._names = db.read_texts("StringIds", "id", "value")
        self.processes = Processes()
        self.dropped = Counter[str]()
        self.inputs: pl.DataFrame | None = None
        self._gpu_numbers = self._read_gpu_numbers()

    # -- the device -------------------------------------------------------------------------

    def device(self) -> pl.DataFrame:
        """Return kernels, copies, memsets and whole graphs as rows for ``build_trace``."""
        return stack_frames(
            [self._read_kernels(), self._read_graphs(), self._read_copies(), self._read_memsets()]
        )

    def _read_work(
        self,
        table: str,
        columns: Types,
        kind: str,
        convert: Callable[[pl.DataFrame], pl.DataFrame] = lambda rows: rows,
    ) -> pl.DataFrame:
        """Read a table of device work. ``convert`` replaces the ``columns`` in batches of rows, so
        that a large table is never in memory in its original form."""

        def convert_batch(rows: pl.DataFrame) -> pl.DataFrame:
            rows = select_columns(rows, {**_PLACE_COLUMNS, **columns})
            process = rows["globalPid"] // (1 << 24)
            converted = convert(
                rows.with_columns(
                    ts=pl.col("start"),
                    dur=pl.col("end") - pl.col("start"),
                    kind=pl.lit(kind if kind in GpuKind.categories else None, dtype=GpuKind),
                    device=self._to_gpu_number(process, rows["deviceId"]).cast(
                        pl.Int32, strict=False
                    ),
                    stream=pl.col("streamId").fill_null(0),
                    correlation=self.processes.correlation(process, rows["correlationId"]),
                ).drop("start", "end", *_PLACE_COLUMNS)
            )
            return narrow_integers(converted)

        if not self._db.has_table(table, "start", "end"):
            return pl.DataFrame()
        rows = self._db.read(
            table, {**_TIME_COLUMNS, **_PLACE_COLUMNS, **columns}, each=convert_batch
        )
        return rows if rows.height else pl.DataFrame()

    def _read_kernels(self) -> pl.DataFrame:
        size_columns = (
            "registersPerThread",
            "gridX",
            "gridY",
            "gridZ",
            "blockX",
            "blockY",
            "blockZ",
        )
        shared_columns = ("staticSharedMemory", "dynamicSharedMemory")
        name_columns = ("demangledName", "shortName", "mangledName")
        columns = dict.fromkeys(
            (*size_columns, *shared_columns, *name_columns, "graphId", "graphNodeId"), pl.Int64
        )

        def convert(rows: pl.DataFrame) -> pl.DataFrame:
            return rows.with_columns(
                name=self._look_up_text(rows, *name_columns)
                .fill_null("kernel")
                .cast(pl.Categorical),
                blocks=pl.col("gridX") * pl.col("gridY") * pl.col("gridZ"),
                threads=pl.col("blockX") * pl.col("blockY") * pl.col("blockZ"),
                registers=pl.col("registersPerThread"),
                shared=pl.sum_horizontal(shared_columns),
                graph=_graph_number(),
            ).drop(columns)

        return self._read_work(KERNEL, columns, "kernel", convert)

    def _read_graphs(self) -> pl.DataFrame:
        """Return graph launches recorded as a whole (``--cuda-graph-trace=graph``)."""
        rows = self._read_work(GRAPH, {"graphId": pl.Int64}, "kernel")
        if not rows.height:
            return rows
        return rows.with_columns(
            name=pl.format("CUDA graph {}", pl.col("graphId").fill_null(0)).cast(pl.Categorical),
            graph="graphId",
        ).drop("graphId")

    def _read_copies(self) -> pl.DataFrame:
        kinds = ("copyKind", "srcKind", "dstKind", "migrationCause")
        columns = dict.fromkeys(("bytes", *kinds, "graphId", "graphNodeId"), pl.Int64)
        memories = self._read_memory_kinds()

        def convert(rows: pl.DataFrame) -> pl.DataFrame:
            rows = rows.with_columns(
                copy=_text_of_code("copyKind", _COPY_DIRECTIONS).fill_null("other"),
                src=_text_of_code("srcKind", memories),
                dst=_text_of_code("dstKind", memories),
                graph=_graph_number(),
                gbps=_copy_rate(),
            )
            is_migration = pl.col("copyKind").is_between(11, 13)
            migration_target = pl.when(is_migration & (pl.col("copyKind") != 12)).then(
                pl.lit("Device")
            )
            migration_source = pl.when(is_migration & (pl.col("copyKind") == 12)).then(
                pl.lit("Device")
            )
            managed = pl.when(is_migration).then(pl.lit("Managed"))
            rows = rows.with_columns(
                src=pl.coalesce(migration_source, managed, "src"),
                dst=pl.coalesce(migration_target, managed, "dst"),
            )
            arrow = pl.format(" ({} -> {})", pl.col("src"), pl.col("dst")).fill_null("")
            cause = pl.format(" {}", _text_of_code("migrationCause", _MIGRATION_CAUSES)).fill_null(
                ""
            )
            arrow += pl.when(is_migration).then(cause).otherwise(pl.lit(""))
            texts = pl.col("src", "dst", "name").cast(pl.Categorical)
            return (
                rows.with_columns(name=pl.format("Memcpy {}{}", pl.col("copy"), arrow))
                .with_columns(texts, pl.col("copy").cast(Copy))
                .drop(*kinds, "graphId", "graphNodeId")
            )

        return self._read_work(MEMCPY, columns, "memcpy", convert)

    def _read_memsets(self) -> pl.DataFrame:
        columns = dict.fromkeys(("bytes", "memKind", "graphId", "graphNodeId"), pl.Int64)
        memory = _text_of_code("memKind", self._read_memory_kinds()).fill_null("Unknown")

        def convert(rows: pl.DataFrame) -> pl.DataFrame:
            name = pl.format("Memset ({})", memory).cast(pl.Categorical)
            return rows.with_columns(name=name, graph=_graph_number(), gbps=_copy_rate()).drop(
                "memKind", "graphId", "graphNodeId"
            )

        return self._read_work(MEMSET, columns, "memset", convert)

    def memory(self) -> pl.DataFrame | None:
        """Return allocations and frees of device memory and of pinned host memory (device -1),
        recorded with ``--cuda-memory-usage=true``, with running totals in bytes since the recording
        began. ``None`` if they were not recorded."""
        types = {
            "start": pl.Int64, "globalPid": pl.Int64, "deviceId": pl.Int32, "bytes": pl.Int64,
            "address": pl.Int64, "memKind": pl.Int64, "memoryOperationType": pl.Int64,
        }  # fmt: skip
        if not self._db.has_table(MEMORY, "start", "bytes"):
            return None
        rows = select_columns(self._db.read(MEMORY, types), types)
        is_known_kind = pl.col("memKind").is_in(
            [1, 2, 3, 5]
        )  # Pinned; Device, Array, Device Static
        rows = rows.filter(is_known_kind & pl.col("memoryOperationType").is_in([0, 1])).sort(
            "start"
        )
        if rows.is_empty():
            return None
        device = self._to_gpu_number(rows["globalPid"] // (1 << 24), rows["deviceId"])
        rows = rows.with_columns(
            device=device.set(rows["memKind"] == 1, -1),
            change=pl.col("bytes") * (1 - 2 * pl.col("memoryOperationType")),
        )
        return rows.select(
            "address",
            "device",
            ts="start",
            bytes="change",
            allocated=pl.col("change").cum_sum().over("device"),
        )

    def syncs(self) -> pl.DataFrame | None:
        """Return synchronisations, with the awaited event if recorded, or ``None`` if none."""
        columns = {"syncType": pl.Int64, "eventId": pl.Int64, "eventSyncId": pl.Int64}
        rows = self._read_work(SYNC, columns, "sync")
        if not rows.height:
            return None
        process = self._db.read(SYNC, {"globalPid": pl.Int64})
        rows = (
            rows.with_columns(cs.signed_integer().cast(pl.Int64))
            .with_columns(
                kind=_text_of_code("syncType", _SYNC_KINDS),
                stream=pl.when(pl.col("stream") < _NO_STREAM).then("stream"),
                process=process["globalPid"] if process.height == rows.height else pl.lit(None),
            )
            .filter(pl.col("kind").is_not_null())
        )
        keys = ["process", "eventId", "eventSyncId"]
        events = self._db.read(
            EVENT, {**_PLACE_COLUMNS, "eventId": pl.Int64, "eventSyncId": pl.Int64}
        )
        if events.height and {"eventSyncId", "eventId", "globalPid"} <= set(events.columns):
            events = select_columns(events, _PLACE_COLUMNS).with_columns(process="globalPid")
            numbers = self.processes.correlation(
                events["globalPid"] // (1 << 24), events["correlationId"]
            )
            events = events.select(*keys, wait_stream="streamId", wait_correlation=numbers)
            rows = rows.join(
                events.unique(keys, keep="none"), on=keys, how="left", maintain_order="left"
            )
        return rows

    # -- the host ---------------------------------------------------------------------------

    def host(self) -> tuple[pl.DataFrame, dict[tuple[str, str], str]]:
        """Return calls of CUDA, the operating system and libraries, ranges, the profiler's
        overhead, and the names of threads."""
        parts = [
            *(self._read_calls(table, "runtime") for table in CALLS),
            self._read_calls(SYSTEM, "runtime"),
            *(self._read_calls(table, "annotation") for table in LIBRARIES),
            *(self._read_calls(table, "annotation", "textId") for table in MPI),
            self._read_calls(OVERHEAD, "overhead"),
            self._read_ranges(),
        ]
        return stack_frames(parts), self._read_thread_names()

    def _read_calls(self, table: str, kind: str, name_column: str = "nameId") -> pl.DataFrame:
        columns = {"globalTid": pl.Int64, "correlationId": pl.Int64, name_column: pl.Int64}
        if not self._db.has_table(table, "start", "end", "globalTid"):
            return pl.DataFrame()

        def convert_batch(rows: pl.DataFrame) -> pl.DataFrame:
            rows = select_columns(rows, columns)
            process = rows["globalTid"] // (1 << 24)
            converted = rows.select(
                ts="start",
                dur=pl.col("end") - pl.col("start"),
                kind=pl.lit(kind, dtype=CpuKind),
                name=self._look_up_text(rows, name_column).fill_null("call").cast(pl.Categorical),
                correlation=self.processes.correlation(process, rows["correlationId"]),
                **_thread_columns(),
            )
            return narrow_integers(converted)

        rows = self._db.read(table, {**_TIME_COLUMNS, **columns}, each=convert_batch)
        if not rows.height:
            return pl.DataFrame()
        return _drop_wrappers(rows) if table in CALLS else rows

    def _read_ranges(self) -> pl.DataFrame:
        kinds = f"eventType IN {(*_PUSH_POP, *_START_END)}"
        where = kinds if self._db.has_table(NVTX, "eventType") else ""
        domains = self._read_domains()
        rows = self._db.read(
            NVTX, _RANGE_COLUMNS, where, lambda batch: self._convert_ranges(batch, domains)
        )
        if "ts" not in rows.columns:
            return pl.DataFrame()
        rows, self.inputs = number_inputs(rows)
        return rows

    def _convert_ranges(self, rows: pl.DataFrame, domains: dict[int, str]) -> pl.DataFrame:
        """Parse rows of ranges and drop their texts: nearly all texts of PyTorch are distinct."""
        rows = select_columns(rows, _RANGE_COLUMNS)
        if open_count := rows["end"].null_count():
            self.dropped["ranges without an end"] += open_count
        rows = rows.filter(pl.col("end").is_not_null() & pl.col("globalTid").is_not_null())
        result = parse_ranges(
            rows["text"].fill_null(self._look_up_text(rows, "textId")).fill_null("range")
        )
        domain_names = pl.Series("domain", [None], dtype=pl.String).new_from_index(0, rows.height)
        if domains:
            domain = rows["domainId"].fill_null(0)
            domain_names = domain.replace_strict(domains, default=None, return_dtype=pl.String)
        result = result.with_columns(domain=domain_names)
        has_domain = pl.col("domain").is_not_null()
        name = pl.format("{}:{}", pl.col("domain"), pl.col("name"))
        result = result.select(
            "sequence",
            pl.col("dims").cast(pl.Categorical),
            name=pl.when(has_domain).then(name).otherwise(pl.col("name")).cast(pl.Categorical),
            kind=pl.when(has_domain)
            .then(pl.lit("annotation"))
            .otherwise(pl.col("kind"))
            .cast(CpuKind),
        )
        places = rows.select(ts="start", dur=pl.col("end") - pl.col("start"), **_thread_columns())
        # a range that another thread ended is not nested on the thread that began it
        crosses_threads = (
            rows["eventType"].is_in(_START_END) & (rows["endGlobalTid"] != rows["globalTid"])
        ).fill_null(False)
        if crosses_threads.any():
            separate_thread = pl.format("{} (ranges)", pl.col("thread").cast(pl.String))
            own_thread = pl.col("thread").cast(pl.String)
            thread = (
                pl.when(crosses_threads)
                .then(separate_thread)
                .otherwise(own_thread)
                .cast(pl.Categorical)
            )
            places = places.with_columns(thread=thread)
        return narrow_integers(places.hstack(result))

    def _read_domains(self) -> dict[int, str]:
        columns = {"domainId": pl.Int64, "text": pl.String, "textId": pl.Int64}
        if not self._db.has_table(NVTX, "eventType", "domainId"):
            return {}
        rows = self._db.read(NVTX, columns, f"eventType = {_DOMAIN}")
        rows = select_columns(rows, columns)
        names = rows["text"].fill_null(self._look_up_text(rows, "textId"))
        return {
            int(number): str(name)[:200]
            for number, name in zip(rows["domainId"], names, strict=True)
            if number is not None and name and number != 0
        }

    def _read_thread_names(self) -> dict[tuple[str, str], str]:
        rows = self._db.read("ThreadNames", {"nameId": pl.Int64, "globalTid": pl.Int64})
        if set(rows.columns) != {"nameId", "globalTid"}:
            return {}
        rows = rows.drop_nulls().head(100_000)
        return {
            (str(number >> 24 & 0xFFFFFF), str(number & 0xFFFFFF)): name[:200]
            for name_id, number in rows.iter_rows()
            if (name := self._names.get(name_id))
        }

    def samples(self) -> pl.DataFrame | None:
        """Return samples of running threads (``--sample=process-tree``), or ``None`` if not
        recorded: ``process``, ``thread``, ``ts``, ``end``, and ``name`` of the innermost function.
        A sample represents the time to the next one of its thread, unless that is far away."""
        if not self._db.has_table(SAMPLES, "start", "globalTid"):
            return None
        types = {"id": pl.Int64, "start": pl.Int64, "globalTid": pl.Int64}
        rows = select_columns(self._db.read(SAMPLES, types), types)
        rows = rows.filter(
            pl.col("globalTid").is_not_null() & pl.col("start").is_between(-1 << 61, 1 << 61)
        )
        stacks = {"id": pl.Int64, "symbol": pl.Int64, "module": pl.Int64}
        leaves = select_columns(self._db.read(CALL_CHAINS, stacks, "stackDepth = 0"), stacks)
        if rows.is_empty():
            return None
        rows = rows.join(leaves.unique("id"), on="id", how="left").sort("globalTid", "start")
        symbol, module = self._look_up_text(rows, "symbol"), self._look_up_text(rows, "module")
        is_unresolved = symbol.str.starts_with("0x").fill_null(True)
        name = symbol.set(is_unresolved, None).fill_null(module.str.extract(r"([^/]+)$"))
        rows = rows.with_columns(
            name=name.fill_null("unknown function").str.slice(0, 500),
            apart=pl.col("start").shift(-1).over("globalTid") - pl.col("start"),
        )
        median_period = rows["apart"].median()
        if not isinstance(median_period, float) or median_period <= 0:
            return None
        is_near = pl.col("apart") <= _MAX_PERIODS * median_period
        return rows.select(
            ts="start",
            end=pl.col("start") + pl.when(is_near).then("apart").otherwise(int(median_period)),
            name="name",
            **_thread_columns(),
        )

    # -- the machine --------------------------------------------------------------------------

    def counters(self) -> pl.DataFrame | None:
        """Return hardware counters and page faults of unified memory, or ``None`` if none."""
        parts = [
            part for part in (self._read_metrics(), *self._iterate_faults()) if part is not None
        ]
        return pl.concat(parts, how="diagonal_relaxed") if parts else None

    def _iterate_faults(self) -> Iterator[pl.DataFrame]:
        """Yield one row per group of faults on the GPU, and one per fault on the host."""
        types = {**_TIME_COLUMNS, "deviceId": pl.Int64, "numberOfPageFaults": pl.Int64}
        for table, processor in ((GPU_FAULTS, "GPU"), (CPU_FAULTS, "CPU")):
            if not self._db.has_table(table, "start"):
                continue
            rows = select_columns(self._db.read(table, types), types)
            yield rows.select(
                ts="start",
                dur=(pl.col("end") - pl.col("start")).fill_null(0),
                name=pl.lit(f"{processor} page faults"),
                range=pl.format(f"{processor} {{}}", pl.col("deviceId").fill_null(0)),
                value=pl.col("numberOfPageFaults").fill_null(1).cast(pl.Float64),
            )

    def _read_metrics(self) -> pl.DataFrame | None:
        """Return samples of the GPUs' hardware counters. Each lasts until the next one."""
        rows = self._db.read(
            METRICS,
            {"timestamp": pl.Int64, "typeId": pl.Int64, "metricId": pl.Int64, "value": pl.Float64},
        )
        columns = {"typeId": pl.Int64, "metricId": pl.Int64, "metricName": pl.String}
        names = self._db.read(METRIC_NAMES, columns)
        if not rows.height or set(rows.columns) != {"timestamp", "typeId", "metricId", "value"}:
            return None
        if set(names.columns) != set(columns):
            return None
        keys = ["typeId", "metricId"]
        rows = rows.drop_nulls().join(names.drop_nulls().unique(keys), on=keys).sort("timestamp")
        return rows.select(
            ts="timestamp",
            dur=(pl.col("timestamp").shift(-1).over(keys) - pl.col("timestamp")).fill_null(0),
            name=pl.col("metricName").str.slice(0, 200),
            range=pl.format("GPU {}", pl.col("typeId") % 256),
            value="value",
        )

    def devices(self) -> tuple[Device, ...]:
        """Return the GPUs of the machine, from ``TARGET_INFO_GPU``."""
        integer_columns = (
            "id", "totalMemory", "smCount", "computeMajor", "computeMinor", "maxWarpsPerSm",
            "maxRegistersPerSm", "maxShmemPerSm", "maxShmemPerBlockOptin", "threadsPerWarp",
        )  # fmt: skip
        types = {"name": pl.String, **dict.fromkeys(integer_columns, pl.Int64)}
        rows = self._db.read("TARGET_INFO_GPU", types).head(_MAX_GPUS)
        result = []
        for row in select_columns(rows, types).iter_rows(named=True):
            if row["id"] is None or not 0 <= row["id"] < 1 << 31:
                continue
            positive_values = {
                key: row[key] if row[key] and row[key] > 0 else None for key in integer_columns[1:]
            }
            major, minor = row["computeMajor"], row["computeMinor"]
            warps, lanes = positive_values["maxWarpsPerSm"], positive_values["threadsPerWarp"]
            result.append(
                Device(
                    id=row["id"],
                    name=row["name"][:200] if row["name"] else None,
                    memory_bytes=positive_values["totalMemory"],
                    sms=positive_values["smCount"],
                    compute=(major, minor) if major and minor is not None else None,
                    max_threads_per_sm=warps * lanes if warps and lanes else None,
                    registers_per_sm=positive_values["maxRegistersPerSm"],
                    shared_per_sm=positive_values["maxShmemPerSm"],
                    shared_per_block_optin=positive_values["maxShmemPerBlockOptin"],
                    warp_size=lanes,
                )
            )
        return tuple({device.id: device for device in result}.values())

    def programs(self, pids: list[str]) -> list[str]:
        rows = self._db.read("PROCESSES", {"pid": pl.Int64, "name": pl.String})
        if set(rows.columns) != {"pid", "name"}:
            return []
        names = rows.filter(pl.col("pid").cast(pl.String).is_in(pids))["name"].drop_nulls()
        return [name[:500] for name in names.head(_MAX_GPUS).to_list()]

    def mpi_rank(self) -> int | None:
        """Return the rank in the name that MPI's ranges give a thread. ``None`` if none or
        several."""
        columns = {"text": pl.String, "textId": pl.Int64}
        if not self._db.has_table(NVTX, "eventType"):
            return None
        rows = select_columns(self._db.read(NVTX, columns, f"eventType = {_THREAD_NAME}"), columns)
        names = rows["text"].fill_null(self._look_up_text(rows, "textId"))
        ranks = names.str.extract(r"^MPI Rank (\d{1,6})$", 1).drop_nulls().unique()
        return int(ranks[0]) if len(ranks) == 1 else None

    def start_ns(self) -> int:
        """Return the Unix time of the file's time 0 in ns, or 0 if it was not recorded."""
        types = {"utcEpochNs": pl.Int64, "systemClockNs": pl.Int64}
        rows = self._db.read("TARGET_INFO_SESSION_START_TIME", types).head(1)
        if not rows.height or "utcEpochNs" not in rows.columns:
            return 0
        unix = rows["utcEpochNs"][0] or 0
        clock = (rows["systemClockNs"][0] or 0) if "systemClockNs" in rows.columns else 0
        return int(unix) - int(clock) if 0 < unix < 1 << 62 and 0 <= clock < unix else 0

    # -- lookups ----------------------------------------------------------------------------

    def _look_up_text(self, rows: pl.DataFrame, *columns: str) -> pl.Series:
        """Return the text for the first known number in these columns."""
        result = pl.Series("text", [None], dtype=pl.String).new_from_index(0, rows.height)
        for column in columns:
            if column not in rows.columns or not result.null_count():
                continue
            result = result.fill_null(look_up_texts(rows[column], self._names))
        return result

    def _read_memory_kinds(self) -> dict[int, str]:
        """Return the kinds of memory by number, from the file's own list if it has one."""
        labels = self._db.read_texts("ENUM_CUDA_MEM_KIND", "id", "label")
        return {n: text[:40] for n, text in labels.items() if text != "Unknown"} or _MEMORY_KINDS

    def _read_gpu_numbers(self) -> dict[int, int]:
        """Return the GPU's number by process and CUDA number. They differ if a process sees only
        some GPUs. Keys are pid * 1024 + CUDA number."""
        types = {"gpuId": pl.Int64, "cudaId": pl.Int64, "pid": pl.Int64}
        rows = self._db.read("TARGET_INFO_CUDA_DEVICE", types).head(1 << 20)
        if set(rows.columns) != set(types):
            return {}
        rows = rows.drop_nulls().filter(
            pl.col("cudaId").is_between(0, _MAX_GPUS - 1) & pl.col("gpuId").is_between(0, 1 << 30)
        )
        return {
            pid * _MAX_GPUS + cuda: gpu
            for gpu, cuda, pid in rows.select("gpuId", "cudaId", "pid").iter_rows()
            if 0 <= pid < 1 << 40
        }

    def _to_gpu_number(self, process: pl.Series, device: pl.Series) -> pl.Series:
        number = device.fill_null(0).cast(pl.Int64)
        if not self._gpu_numbers:
            return number
        key = (process % (1 << 24)).fill_null(-1) * _MAX_GPUS + number
        gpus = key.replace_strict(self._gpu_numbers, default=None, return_dtype=pl.Int64)
        return gpus.fill_null(number)


def _thread_columns() -> dict[str, pl.Expr]:
    number = pl.col("globalTid")
    return {
        "process": (number // (1 << 24) % (1 << 24)).cast(pl.String).cast(pl.Categorical),
        "thread": (number % (1 << 24)).cast(pl.String).cast(pl.Categorical),
    }


def _drop_wrappers(rows: pl.DataFrame) -> pl.DataFrame:
    """Drop the outer one of two calls with the same correlation number. Some versions write a call
    as made and as seen by CUPTI (``cudaMemcpy`` around ``cudaMemcpy_v3020``)."""
    numbers = rows["correlation"].drop_nulls()
    if numbers.n_unique() == len(numbers):  # as in nearly every file
        return rows
    keys = ["process", "thread", "correlation"]
    has_correlation = rows["correlation"].is_not_null()
    is_duplicate = rows.select(pl.struct(keys).is_duplicated()).to_series() & has_correlation
    if not is_duplicate.any():
        return rows
    length = pl.col("dur")
    is_inner = ((pl.col("ts") >= pl.col("ts").min()) & (length == length.min())).over(keys)
    is_wrapper = is_duplicate & ~rows.select(is_inner).to_series().fill_null(True)
    return rows.filter(~is_wrapper)


def _text_of_code(column: str, texts: dict[int, str]) -> pl.Expr:
    return pl.col(column).replace_strict(texts, default=None, return_dtype=pl.String)


def _graph_number() -> pl.Expr:
    """Return the recorded graph number, else the upper half of the node's number."""
    node = pl.col("graphNodeId")
    return pl.coalesce(
        pl.when(pl.col("graphId") > 0).then(pl.col("graphId")),
        pl.when(node > 0).then(node // (1 << 32)),
    )


def _copy_rate() -> pl.Expr:
    return pl.when((pl.col("dur") > 0) & (pl.col("bytes") > 0)).then(
        pl.col("bytes") / pl.col("dur")
    )
