"""Reader of Nsight Systems: exports to SQLite, and reports through ``nsys export``."""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import polars as pl

from advisor.core.errors import AdvisorError
from advisor.core.files import scratch_folder
from advisor.core.trace import Trace, TraceMeta
from advisor.read.reader import Reader, ReaderClaim, ReadOptions, Tool
from advisor.read.source import ByteSource
from advisor.read.sqlite import MAGIC, open_database, table_names

REPORTS = (".nsys-rep", ".qdrep")
_TABLE_NAMES = frozenset({"StringIds", "NVTX_EVENTS", "CUPTI_ACTIVITY_KIND", "TARGET_INFO"})
_EXPORT_SECONDS = 3600.0


class NsysReader(Reader):
    """Reader of Nsight Systems' exports, 2020 to 2026 (``nsys export --type sqlite``), of any CUDA
    program, and of its reports if ``nsys`` is installed. It never reads tables about the machine's
    users or the process's environment."""

    name = "nsys"
    description = "an Nsight Systems export or report (.sqlite, .nsys-rep or .qdrep)"
    suffixes = (".sqlite", *REPORTS)
    tool = Tool(
        "nsys profile --trace=cuda,nvtx,osrt",
        "an NVTX range around each iteration",
        "NVTX ranges around the host's work (or samples: nsys profile --sample=process-tree)",
        records_device=True,
    )

    def sniff(self, head: bytes, path: str) -> ReaderClaim:
        """Recognise SQLite with Nsight Systems' tables, or a report by its name if it is binary."""
        if head.startswith(MAGIC):
            names = table_names(head, path)
            is_nvprof = "CUPTI_ACTIVITY_KIND" in names and not names & {"StringIds", "TARGET_INFO"}
            return ReaderClaim.SURE if names & _TABLE_NAMES and not is_nvprof else ReaderClaim.NO
        is_binary_report = _is_report(path) and not head.lstrip()[:1].isascii()
        has_null_bytes = b"\0" in head[:4096]
        return (
            ReaderClaim.SURE
            if is_binary_report or (_is_report(path) and has_null_bytes)
            else ReaderClaim.NO
        )

    def read(self, source: ByteSource, options: ReadOptions) -> Trace:
        import polars as pl

        from advisor.read.build import build_trace
        from advisor.read.formats.nsys.tables import NsysTables
        from advisor.read.nvtx import framework_of

        if not source.head().startswith(MAGIC):
            return _export_and_read(source, options)
        with open_database(source, options) as db:
            tables = NsysTables(db)
            host, threads = tables.host()
            device = tables.device()
            if not host.height and not device.height:
                raise AdvisorError(
                    f"{source.path}: an Nsight Systems export without CUDA work and without "
                    "ranges; record with --trace=cuda,nvtx,osrt"
                )
            sync, metrics, memory = tables.syncs(), tables.counters(), tables.memory()
            pids = host["process"].unique().cast(pl.String).to_list() if host.height else []
            names = [
                frame["name"].unique().cast(pl.String) for frame in (host, device) if frame.height
            ]
            meta = TraceMeta(
                path=source.path,
                framework=framework_of(pl.concat(names), tables.programs(pids)),
                rank=tables.mpi_rank(),
                devices=tables.devices(),
                start_ns=tables.start_ns(),
                vendor="nvidia",
                bytes_read=source.bytes_read,
                truncated=source.truncated or bool(db.damaged),
                damage=db.damage or source.damage,
                events_dropped=tables.dropped,
            )
            if options.progress is not None:
                options.progress(source.path, source.bytes_read)
            samples = tables.samples()
            rows = {"host": host, "device": device}
            del host, device
        trace = build_trace(  # it frees the rows as soon as it has read them
            meta,
            host=rows.pop("host"),
            device=rows.pop("device"),
            sync=sync,
            counters=metrics,
            memory=memory,
            inputs=tables.inputs,
            thread_names=threads,
        )
        return trace if samples is None else _with_samples(trace, samples, meta.start_ns)


def _with_samples(trace: Trace, samples: pl.DataFrame, start_ns: int) -> Trace:
    """Return the trace with samples of its threads on its clock. ``start_ns``: Unix time of the
    file's time 0."""
    import polars as pl

    threads = trace.threads.select(
        pl.col("pid").cast(pl.String),
        pl.col("tid").cast(pl.String),
        thread=pl.int_range(pl.len(), dtype=pl.Int32),
    )
    origin = trace.meta.start_ns - start_ns
    with_thread_ids = samples.with_columns(pl.col("process", "thread").cast(pl.String)).rename(
        {"process": "pid", "thread": "tid"}
    )
    table = with_thread_ids.join(threads, on=["pid", "tid"]).select(
        "thread", pl.col("ts", "end") - origin, "name"
    )
    if table.is_empty():
        return trace
    return replace(trace, meta=replace(trace.meta, cpu_samples=table))


def _is_report(path: str) -> bool:
    return str(path).lower().endswith(REPORTS)  # read_trace may have been given a Path


def _export_and_read(source: ByteSource, options: ReadOptions) -> Trace:
    """Export a report to a temporary folder and read it. Raises AdvisorError without ``nsys``."""
    command = shutil.which("nsys")
    file_name = Path(source.path).name
    if command is None:
        raise AdvisorError(
            f"{source.path}: a report of Nsight Systems, and nsys is not installed here; where it "
            f"is, run: nsys export --type sqlite {file_name}   and give the .sqlite file"
        )
    with scratch_folder() as folder:
        report = Path(source.path)
        if source.data is not None or not report.is_file():
            report = folder / "report.nsys-rep"
            with report.open("wb") as file:
                for block in source.blocks():
                    file.write(block)
        target = folder / "report.sqlite"
        arguments = [command, "export", "--type", "sqlite", "--force-overwrite", "true"]
        arguments += ["--output", str(target), str(report.absolute())]
        try:
            process = subprocess.run(
                arguments, capture_output=True, timeout=_EXPORT_SECONDS, check=False, cwd=folder,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            raise AdvisorError(f"{source.path}: nsys export failed ({error})") from None
        if process.returncode or not target.is_file():
            output_lines = (process.stderr or process.stdout).decode("utf-8", "replace").split("\n")
            reason = next(
                (line.strip() for line in output_lines if line.strip()),
                f"exit {process.returncode}",
            )
            raise AdvisorError(f"{source.path}: nsys export failed ({reason[:200]})")
        inner = ByteSource(str(target), limit=source.limit)
        trace = NsysReader().read(inner, options)
    return replace(trace, meta=replace(trace.meta, path=source.path))
