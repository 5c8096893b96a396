"""Readers of ROCm: RPD and rocpd databases, and rocprofv3's JSON."""

from dataclasses import replace

from advisor.core.trace import Trace, TraceMeta
from advisor.read.reader import Reader, ReaderClaim, ReadOptions, Tool, memory_budget
from advisor.read.source import ByteSource
from advisor.read.sqlite import MAGIC, Database, open_database, table_names

TOOL_KEY = b'"rocprofiler-sdk-tool"'
_MAX_JSON_BYTES = 4 << 30
"""Maximum size of a JSON file, bytes. All of it is in memory at once."""
MEMORY_PER_JSON_BYTE = 8
"""Memory in bytes per byte of a JSON file."""


_ROCTX = ("a ROCTX range around each iteration", "ROCTX ranges around the host's work")
_ROCPROF = Tool("rocprofv3 --sys-trace", *_ROCTX)


class RpdReader(Reader):
    """Reader of rocmProfileData: ``runTracer.sh``, ``rpdTracerControl``."""

    name = "rpd"
    description = "an RPD profile of ROCm (.rpd)"
    suffixes = (".rpd",)
    tool = Tool("runTracer.sh", *_ROCTX)

    def sniff(self, head: bytes, path: str) -> ReaderClaim:
        """Recognise SQLite with tables of RPD, or of rocprofv3 with similar names."""
        return _claim(head, path, split=False)

    def read(self, source: ByteSource, options: ReadOptions) -> Trace:
        from advisor.read.formats.rocm.databases import Rpd
        from advisor.read.formats.rocm.device_rows import trace_of

        with open_database(source, options) as db:
            if not db.has_table("rocpd_api") and not db.has_table("rocpd_op"):
                return _read_rocpd(source, db)
            rpd = Rpd(db)
            host, device = [rpd.host()], [rpd.device()]
            counters = rpd.counters()
            meta = _build_meta(source, db)
        return trace_of(meta, host, device, rpd.inputs, [], counters)


class RocpdReader(Reader):
    """Reader of rocprofv3's database, of one process or of several."""

    name = "rocpd"
    description = "a profile of rocprofv3 (.db, .json)"
    suffixes = (".db",)
    tool = _ROCPROF

    def sniff(self, head: bytes, path: str) -> ReaderClaim:
        """Recognise SQLite whose tables are named after a process."""
        return _claim(head, path, split=True)

    def read(self, source: ByteSource, options: ReadOptions) -> Trace:
        with open_database(source, options) as db:
            return _read_rocpd(source, db)


class RocprofJsonReader(Reader):
    """Reader of ``rocprofv3 --output-format json``."""

    name = "rocprofv3"
    description = "a profile of rocprofv3 (.db, .json)"
    suffixes = ()
    tool = _ROCPROF

    def sniff(self, head: bytes, path: str) -> ReaderClaim:
        """Recognise JSON whose first key is that of the tool."""
        return ReaderClaim.SURE if TOOL_KEY in head[:4096] else ReaderClaim.NO

    def read(self, source: ByteSource, options: ReadOptions) -> Trace:
        """Read the whole file at once. Raises AdvisorError if memory does not suffice."""
        from advisor.read.formats.rocm.device_rows import trace_of
        from advisor.read.formats.rocm.rocprof_json import Rows, decode_document

        max_bytes = min(_MAX_JSON_BYTES, memory_budget() // MEMORY_PER_JSON_BYTE)
        advice = (
            f"more than {max_bytes / 1e9:.1f} GB of JSON, for which there is no memory; record "
            "with --output-format rocpd"
        )
        processes, left_out = decode_document(source.read_all(max_bytes, advice), source.path)
        rows = Rows(processes)
        meta = TraceMeta(
            path=source.path,
            devices=rows.devices,
            bytes_read=source.bytes_read,
            truncated=source.truncated,
            damage=source.damage,
            events_dropped={"values of another type": left_out} if left_out else {},
        )
        return trace_of(meta, rows.host, rows.device, rows.inputs, rows.programs)


def _claim(head: bytes, path: str, *, split: bool) -> ReaderClaim:
    if not head.startswith(MAGIC) or "rocpd_" not in table_names(head, path):
        return ReaderClaim.NO
    return ReaderClaim.SURE if (b"rocpd_string_" in head) == split else ReaderClaim.PERHAPS


def _read_rocpd(source: ByteSource, db: Database) -> Trace:
    from advisor.read.formats.rocm.databases import Rocpd
    from advisor.read.formats.rocm.device_rows import trace_of

    tables = Rocpd(db)
    host, device = tables.rows()
    meta = replace(_build_meta(source, db), devices=tables.devices)
    return trace_of(meta, host, device, tables.inputs, tables.programs)


def _build_meta(source: ByteSource, db: Database) -> TraceMeta:
    return TraceMeta(
        path=source.path,
        bytes_read=source.bytes_read,
        truncated=source.truncated or bool(db.damaged),
        damage=db.damage or source.damage,
    )
