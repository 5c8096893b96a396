"""Readers of kernel profilers' reports without a trace (parsed by ``reports.py``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from advisor.read.reader import Reader, ReaderClaim, ReadOptions
from advisor.read.source import ByteSource
from advisor.read.sqlite import open_database, table_names

if TYPE_CHECKING:
    from advisor.core.kernel_profile import KernelProfiles
    from advisor.core.trace import Trace
    from advisor.read.formats.kernel_profiles.reports import Layout

NCU_MAGIC = b"NVR\0"
_COMPUTE_TABLE = "compute_kernel_metric_value"
_KERNEL_TABLE = "KERN"


def layout_of(head: bytes) -> Layout | None:
    """Return the layout of a report by its first bytes after lines of ncu's log. ``None`` if it is
    neither an Nsight Compute report nor a rocprof table (version 1 to 3, one row per launch)."""
    if head.startswith(NCU_MAGIC):
        return "ncu-rep"
    if head[257:262] == b"ustar":
        return None  # other members of the archive would be read as kernels
    lines = (line.strip() for line in head[: 1 << 16].split(b"\n"))
    line = next((line for line in lines if line and not line.startswith(b"==")), b"")
    if b'"Kernel Name"' in line and b'"ID"' in line:
        return "ncu-csv"
    line = line.removeprefix(b"\xef\xbb\xbf").replace(b'"', b"")
    has_kernel_name = b"KernelName" in line or b"Kernel_Name" in line
    has_index = line.partition(b",")[0] in (b"Index", b"Dispatch_ID")
    has_counters = b"Kernel_Name" in line and b"Counter_Name" in line and b"Counter_Value" in line
    return "rocprof-csv" if (has_kernel_name and has_index) or has_counters else None


def trace_of(profiles: KernelProfiles, bytes_read: int) -> Trace:
    import polars as pl

    from advisor.core.trace import blank_trace
    from advisor.read.nvtx import framework_of

    names = pl.Series([k.signature or k.name for k in profiles.kernels], dtype=pl.String)
    framework = framework_of(names, [])
    return blank_trace(
        profiles.path,
        bytes_read=bytes_read,
        events_read=len(profiles.kernels) + len(profiles.compiled),
        kernel_profiles=profiles,
        vendor=profiles.vendor,
        framework=framework,
    )


class _ProfileReader(Reader):
    """Reader of kernel profiles without a trace."""

    meta_field = "kernel_profiles"

    def merge(self, values: list[KernelProfiles]) -> KernelProfiles:
        from advisor.read.formats.kernel_profiles.reports import merge_profiles

        return merge_profiles(values)


class KernelProfilerReader(_ProfileReader):
    """Reader of Nsight Compute's CSV pages and ``.ncu-rep``, and rocprof's CSV tables."""

    name = "kernel-profiler"
    description = "a report of Nsight Compute or rocprof (.ncu-rep, .csv, .db)"
    suffixes = (".ncu-rep",)
    shared_suffixes = (".csv",)

    def sniff(self, head: bytes, path: str) -> ReaderClaim:
        """Recognise a report by the magic bytes of the container, or the columns of the first
        line."""
        return ReaderClaim.NO if layout_of(head) is None else ReaderClaim.SURE

    def read(self, source: ByteSource, options: ReadOptions) -> Trace:
        from advisor.read.formats.kernel_profiles.reports import (
            MAX_PROFILE_BYTES,
            read_kernel_profiles,
        )

        layout = layout_of(source.head())
        assert layout is not None, "sniffed"
        limit = min(MAX_PROFILE_BYTES, options.max_bytes)
        advice = f"larger than {limit >> 20} MiB; profile fewer kernels (ncu --launch-count)"
        profiles = read_kernel_profiles(source.read_all(limit, advice), source.path, layout)
        return trace_of(profiles, source.bytes_read)


class RocprofComputeReader(_ProfileReader):
    """Reader of databases (SQLite) of rocprof-compute and of rocprof version 1."""

    name = "rocprof-compute"
    description = "a report of Nsight Compute or rocprof (.ncu-rep, .csv, .db)"
    suffixes = ()

    def sniff(self, head: bytes, path: str) -> ReaderClaim:
        """Recognise a database by its tables."""
        known_tables = {_COMPUTE_TABLE, f"TABLE {_KERNEL_TABLE} ("} & table_names(head, path)
        return ReaderClaim.SURE if known_tables else ReaderClaim.NO

    def read(self, source: ByteSource, options: ReadOptions) -> Trace:
        from advisor.read.formats.kernel_profiles.reports import (
            read_rocprof_compute,
            read_rocprof_kernels,
        )

        with open_database(source, options) as database:
            read = (
                read_rocprof_kernels if database.has_table(_KERNEL_TABLE) else read_rocprof_compute
            )
            return trace_of(read(database, source.path), source.bytes_read)
