"""Reader of kernel profilers' reports: Nsight Compute's CSV and ``.ncu-rep``, rocprof's counters.

Nsight Compute's report is a container of Protocol Buffers messages: ``NVR``, a file header, then
blocks. A block has a header (numbers of sources and results, a table of strings, its size) and
messages, each after its length. A result is one profiled launch. The layout was derived from files
of the versions 2022 to 2025. If a file differs, :data:`EXPORT` is the advice."""

import csv
import io
import re
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, Literal

import msgspec
import polars as pl

from advisor.core.errors import AdvisorError
from advisor.core.kernel_profile import (
    KernelProfile,
    KernelProfiles,
    Metric,
    SampledLine,
    ToolAdvice,
)
from advisor.read.formats.kernel_profiles.sampled_lines import (
    LineRow,
    lines_of_module,
    sampled_lines,
)
from advisor.read.protobuf import (
    BYTES,
    FIXED32,
    FIXED64,
    VARINT,
    Field,
    MalformedMessage,
    iterate_fields,
)
from advisor.read.sqlite import Database

EXPORT = "export it with 'ncu --import FILE --csv --page raw > FILE.csv', and give that"
NCU, ROCPROF = "Nsight Compute", "rocprof"
MAX_PROFILE_BYTES = 1 << 30
"""Maximum size of a report, bytes. Source files and binaries in it are skipped, but count."""
_MAX_KERNELS = 20_000
MAX_METRICS = 20_000
"""Maximum number of metrics per kernel. Nsight Compute's ``full`` set has 2,000."""
_MAX_TEXT = 4_096
"""Maximum number of characters kept of a name or text."""

_MAX_VALUE = 1e30
"""Maximum plausible value of a counter. Larger values are damage."""

Layout = Literal["ncu-rep", "ncu-csv", "rocprof-csv"]

_SCALES = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_NS_PER_UNIT = {"ns": 1.0, "nsecond": 1.0, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6}
_NS_PER_UNIT |= {"s": 1e9, "second": 1e9}
_SCALED_UNIT = re.compile(
    r"([KMGT]?)(bytes?|hz)(/(?:s|second|block|launch|thread))?", re.IGNORECASE
)

DETAILS = {
    "Compute (SM) Throughput": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "SM [%]": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "Memory Throughput": "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
    "DRAM Throughput": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "L1/TEX Cache Throughput": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "L2 Cache Throughput": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "Duration": "gpu__time_duration.sum",
    "Elapsed Cycles": "gpc__cycles_elapsed.max",
    "Achieved Occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "Theoretical Occupancy": "sm__maximum_warps_per_active_cycle_pct",
    "Block Limit Registers": "launch__occupancy_limit_registers",
    "Block Limit Shared Mem": "launch__occupancy_limit_shared_mem",
    "Block Limit Warps": "launch__occupancy_limit_warps",
    "Block Limit SM": "launch__occupancy_limit_blocks",
    "Block Limit Barriers": "launch__occupancy_limit_barriers",
    "Registers Per Thread": "launch__registers_per_thread",
    "Waves Per SM": "launch__waves_per_multiprocessor",
    "One or More Eligible": "smsp__issue_active.avg.pct",
    "Eligible Warps Per Scheduler": "smsp__warps_eligible.avg.per_cycle_active",
    "Active Warps Per Scheduler": "smsp__warps_active.avg.per_cycle_active",
    "L1/TEX Hit Rate": "l1tex__t_sector_hit_rate.pct",
    "L2 Hit Rate": "lts__t_sector_hit_rate.pct",
    "Avg. Active Threads Per Warp": "smsp__thread_inst_executed_per_inst_executed.ratio",
    "Local Memory Spilling Requests": "derived__local_spilling_requests",
}
"""Raw metrics by their labels on Nsight Compute's details page, according to its section files."""
_UNIT_PATTERNS = (
    (r"gpu__time_duration|gpu__time_active", "ns"),
    (r"\.pct|_pct$|pct_of_peak", "%"),
    (r"bytes.*\.per_second$", "byte/s"),
    (r"bytes|_mem_size$|shared_mem_per_block", "byte"),
    (r"\.per_second$", "Hz"),
)
_NCU_COLUMNS = {
    "ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream",
    "Block Size", "Grid Size", "Device", "CC", "Section Name", "Kernel Time", "thread Domain:Push",
}  # fmt: skip
_ROCPROF_COLUMNS = re.compile(
    r"index|kernel_?name|gpu.?id|queue.?(id|index)|pid|tid|process.?id|thread.?id|grd|wgr|sig|obj"
    r"|dispatch(_?id|ns)?|agent_?id|correlation_?id|kernel_?id|grid_?size|workgroup_?size"
    r"|(begin|end|complete|duration)ns|(start|end)_timestamp|counter_(name|value)|wave_size"
    r"|lds|scr|((arch|accum)_)?vgpr|sgpr|lds_block_size(_v)?|scratch_size|(accum_)?vgpr_count"
    r"|sgpr_count",
    re.IGNORECASE,
)


class _Machine(msgspec.Struct):
    """GPU of the machine, from a row of rocprof-compute."""

    gpu_model: str = ""
    gpu_arch: str = ""


def read_kernel_profiles(data: bytes, path: str, layout: Layout) -> KernelProfiles:
    """Return the kernels of one report. Raises AdvisorError if it has none or is unreadable."""
    dropped = Counter[str]()
    if layout == "ncu-rep":
        tool, kernels = NCU, list(_iterate_ncu_report(data, path, dropped))
    elif layout == "ncu-csv":
        tool, kernels = NCU, _read_ncu_csv(_read_rows(data, path), dropped)
    else:
        tool, kernels = ROCPROF, _read_rocprof_csv(_read_rows(data, path))
    if not kernels:
        raise AdvisorError(f"{path}: a kernel profiler's report without a kernel in it")
    return KernelProfiles(path, tool, tuple(kernels[:_MAX_KERNELS]), dropped)


def _read_rows(data: bytes, path: str) -> Iterator[list[str]]:
    text = io.StringIO(data.decode("utf-8-sig", errors="replace"), newline="")
    lines = (line for line in text if line.strip() and not line.startswith("=="))
    try:
        for row in csv.reader(lines):
            yield [value[:_MAX_TEXT] for value in row]
    except csv.Error as error:
        raise AdvisorError(f"{path}: not a readable CSV file ({error})") from None


# -- Nsight Compute, CSV ---------------------------------------------------------------------------


def _read_ncu_csv(rows: Iterator[list[str]], dropped: Counter[str]) -> list[KernelProfile]:
    """Read the pages ``details`` (one row per metric or rule) and ``raw`` (one row per kernel)."""
    header = next(rows, [])
    column_index = {name: index for index, name in enumerate(header)}
    if "Metric Name" in column_index:
        return _read_details(rows, column_index, dropped)
    units = next(rows, [])
    metrics = [
        (index, name)
        for name, index in column_index.items()
        if name not in _NCU_COLUMNS and len(units) > index
    ]
    result: list[KernelProfile] = []
    for row in rows:
        if len(row) < len(header):
            dropped["short rows"] += 1
        elif len(result) < _MAX_KERNELS:
            values = {
                name: metric_of(row[index], units[index])
                for index, name in metrics[:MAX_METRICS]
                if row[index]
            }
            result.append(_build_from_csv(row, column_index, values, ()))
    return result


def _read_details(
    rows: Iterator[list[str]], column: dict[str, int], dropped: Counter[str]
) -> list[KernelProfile]:
    kernels: dict[tuple[str, ...], tuple[list[str], dict[str, Metric], list[ToolAdvice]]] = {}
    key_columns = ("ID", "Process ID", "Kernel Name", "Block Size", "Grid Size")
    label_index = column["Metric Name"]
    for row in rows:
        if len(row) <= label_index:
            dropped["short rows"] += 1
            continue
        row += [""] * (len(column) - len(row))
        key = tuple(row[column[name]] for name in key_columns if name in column)
        if key not in kernels and len(kernels) >= _MAX_KERNELS:
            dropped["kernels beyond the first 20,000"] += 1
            continue
        _, metrics, advice = kernels.setdefault(key, (row, {}, []))
        if label := row[label_index]:
            section = _get_cell(row, column, "Section Name")
            metric = metric_of(
                _get_cell(row, column, "Metric Value"), _get_cell(row, column, "Metric Unit")
            )
            if len(metrics) < MAX_METRICS:
                metrics[_find_raw_name(section, label, metric.unit)] = metric
        elif rule := _get_cell(row, column, "Rule Name"):
            speedup = metric_of(_get_cell(row, column, "Estimated Speedup"), "%").value
            advice.append(
                ToolAdvice(
                    rule,
                    _get_cell(row, column, "Rule Description"),
                    _get_cell(row, column, "Estimated Speedup Type"),
                    share_of(speedup),
                )
            )
    return [
        _build_from_csv(row, column, metrics, advice) for row, metrics, advice in kernels.values()
    ]


def _find_raw_name(section: str, label: str, unit: str) -> str:
    """Return the raw name of a metric of the details page, if known, else ``section/label``.
    "Memory Throughput" is two metrics: a share, and bytes per second."""
    if "__" in label or section.startswith("Command line"):
        return label
    raw = DETAILS.get(label)
    if label == "Memory Throughput" and unit != "%":
        raw = "dram__bytes.sum.per_second"
    return raw if raw is not None else f"{section}/{label}"


def _get_cell(row: Sequence[str], column: dict[str, int], name: str) -> str:
    return row[column[name]] if name in column and column[name] < len(row) else ""


def _build_from_csv(
    row: Sequence[str],
    column: dict[str, int],
    metrics: dict[str, Metric],
    advice: Sequence[ToolAdvice],
) -> KernelProfile:
    result = KernelProfile(
        name=_get_cell(row, column, "Kernel Name"),
        grid=_parse_dimensions(_get_cell(row, column, "Grid Size")),
        block=_parse_dimensions(_get_cell(row, column, "Block Size")),
        **_common_fields(metrics, advice),
    )
    match = re.fullmatch(r"(\d{1,3})\.(\d)", _get_cell(row, column, "CC"))
    return result if match is None else replace(result, compute=(int(match[1]), int(match[2])))


def _common_fields(metrics: dict[str, Metric], advice: Sequence[ToolAdvice]) -> dict[str, Any]:
    """Return the fields that both exports express in the same way."""
    device = metrics.get("device__attribute_display_name", Metric("")).value
    major, minor = (
        _metric_value(metrics, f"device__attribute_compute_capability_{part}")
        for part in ("major", "minor")
    )
    return {
        "duration_ns": _metric_value(metrics, "gpu__time_duration.sum"),
        "metrics": metrics,
        "advice": tuple(advice),
        "device": device if isinstance(device, str) else "",
        "compute": None if major is None or minor is None else (int(major), int(minor)),
    }


def _metric_value(metrics: dict[str, Metric], name: str) -> float | None:
    value = metrics.get(name, Metric(None)).value
    return value if isinstance(value, float) else None


def _parse_dimensions(text: str) -> tuple[int, int, int] | None:
    match = re.fullmatch(r"\D*(\d{1,10})\D+(\d{1,10})\D+(\d{1,10})\D*", text)
    return None if match is None else (int(match[1]), int(match[2]), int(match[3]))


def metric_of(text: str, unit: str) -> Metric:
    """Parse a cell as a metric in its base unit: ``175.10`` ``Kbyte`` is 175,100 bytes."""
    number_text = text.replace(",", "").strip()
    if number_text.lower() in ("", "n/a"):
        return Metric(None, unit)
    try:
        value = float(number_text)
    except ValueError:
        return Metric(text, unit)
    if not abs(value) < _MAX_VALUE:  # also true for NaN
        return Metric(None, unit)
    if unit.lower() in _NS_PER_UNIT:
        return Metric(value * _NS_PER_UNIT[unit.lower()], "ns")
    if (match := _SCALED_UNIT.fullmatch(unit)) is not None:
        base = "Hz" if match[2].lower() == "hz" else "byte"
        base += {"/second": "/s"}.get((match[3] or "").lower(), match[3] or "")
        return Metric(value * _SCALES.get(match[1].lower(), 1.0), base)
    return Metric(value, unit)


def share_of(percent: float | str | None) -> float | None:
    """Convert Nsight Compute's estimated speed-up in % to a share of the time, or ``None``."""
    if not isinstance(percent, float) or not 0.0 < percent <= 100.0:
        return None
    return percent / 100.0


# -- Nsight Compute, .ncu-rep ----------------------------------------------------------------------


_EXECUTED_METRIC = "inst_executed"
"""Name of the metric that is counted by address for every instruction of a function."""
_SAMPLING_METRICS = re.compile(
    r"smsp__pcsamp_(?:sample_count|warps_issue_stalled_(?:(?!_not_issued)\w)+)"
)


def _iterate_ncu_report(data: bytes, path: str, dropped: Counter[str]) -> Iterator[KernelProfile]:
    """Yield a report's kernels. Raises AdvisorError for damage before the first kernel; damage
    after it is counted."""
    strings: list[str] = []
    tables: dict[str, list[LineRow]] = {}
    kernel_count = 0
    try:
        for kind, payload in _iterate_messages(data):
            if kind == "strings":
                strings += payload  # later blocks add the names that are new
            elif kind == "module":
                tables |= lines_of_module(payload)
            else:
                yield _build_from_result(payload, strings, tables)
                kernel_count += 1
                if kernel_count == _MAX_KERNELS:
                    return
    except (MalformedMessage, IndexError, struct.error, ValueError, KeyError):
        if not kernel_count:
            raise AdvisorError(
                f"{path}: a report of Nsight Compute whose layout is not known; {EXPORT}"
            ) from None
        dropped["results after damage"] += 1


def _iterate_messages(data: bytes) -> Iterator[tuple[str, Any]]:
    """Yield the string tables, modules and results of a report, in order."""
    offset = 8 + struct.unpack_from("<I", data, 4)[0]
    while offset < len(data):
        offset, size = _read_size(data, offset)
        header = list(iterate_fields(data, offset, offset + size))
        offset += size
        header_values = {field.number: field.value for field in header if field.wire == VARINT}
        for field in header:
            if field.number == 4 and field.wire == BYTES and field.value:
                yield "strings", [_read_text(data, inner) for inner in _inner_fields(data, field)]
        end = offset + header_values.get(5, 0)
        if end > len(data):
            raise MalformedMessage
        sources_left = header_values.get(1, 0)
        while offset < end:
            offset, size = _read_size(data, offset)
            if sources_left > 0:
                sources_left -= 1
                for field in iterate_fields(data, offset, offset + size):
                    if field.wire == BYTES and data[field.start : field.start + 4] == b"\x7fELF":
                        yield "module", data[field.start : field.start + field.value]
            else:
                yield "result", data[offset : offset + size]
            offset += size


def _read_size(data: bytes, offset: int) -> tuple[int, int]:
    size = struct.unpack_from("<I", data, offset)[0]
    if offset + 4 + size > len(data):
        raise MalformedMessage
    return offset + 4, size


_LINK = re.compile(r"@section:[^:@]*:([^@]*)@|@url:([^:@]*):[^@]*@")


def _read_text(data: bytes, field: Field) -> str:
    end = min(field.start + field.value, field.start + _MAX_TEXT)
    return data[field.start : end].decode("utf-8", errors="replace")


def _read_number(field: Field) -> float | None:
    if field.wire == FIXED64:
        return float(struct.unpack("<d", field.value.to_bytes(8, "little"))[0])
    if field.wire == FIXED32:
        return float(struct.unpack("<f", field.value.to_bytes(4, "little"))[0])
    return float(field.value) if field.wire == VARINT else None


def _inner_fields(data: bytes, field: Field) -> Iterator[Field]:
    return iterate_fields(data, field.start, field.start + field.value)


def _build_from_result(
    data: bytes, strings: list[str], tables: dict[str, list[LineRow]]
) -> KernelProfile:
    texts: dict[int, str] = {}
    sizes: dict[int, tuple[int, int, int]] = {}
    metrics: dict[str, Metric] = {}
    advice: list[ToolAdvice] = []
    counts_by_address: dict[str, dict[int, int]] = {}
    for field in iterate_fields(data, 0, len(data)):
        if field.wire != BYTES:
            continue
        if field.number in (5, 6, 7):
            texts[field.number] = _read_text(data, field)
        elif field.number in (10, 11):
            x, y, z = (inner.value for inner in list(_inner_fields(data, field))[:3])
            sizes[field.number] = (x, y, z)
        elif field.number == 13 and len(metrics) < MAX_METRICS:
            name, value = _read_metric(data, field, strings)
            if value is not None:
                metrics[name] = value
            if name == _EXECUTED_METRIC or _SAMPLING_METRICS.fullmatch(name):
                counts_by_address[name] = _counts_by_address(data, field)
        elif field.number == 19 and (tool_advice := _read_advice(data, field)) is not None:
            advice.append(tool_advice)
    samples, lines = _locate_samples(counts_by_address, tables.get(texts.get(5, ""), []))
    return KernelProfile(
        name=texts.get(7) or texts.get(6) or texts.get(5, ""),
        signature=texts.get(5, ""),
        grid=sizes.get(10),
        block=sizes.get(11),
        **_common_fields(metrics, advice),
        samples=samples,
        lines=lines,
    )


def _counts_by_address(data: bytes, field: Field) -> dict[int, int]:
    """Return a metric's counts by program counter (address -> count)."""
    result = {}
    for inner in _inner_fields(data, field):
        if inner.number != 3 or inner.wire != BYTES:
            continue
        pair = [
            next((item.value for item in _inner_fields(data, part) if item.wire == VARINT), 0)
            for part in _inner_fields(data, inner)
            if part.wire == BYTES
        ]
        if len(pair) == 2:  # a count of 0 is left out
            result[pair[0]] = pair[1]
    return result


def _locate_samples(
    by_address: dict[str, dict[int, int]], rows: list[LineRow]
) -> tuple[int | None, tuple[SampledLine, ...]]:
    """Return the number of warp samples, and their lines if the addresses match the line table."""
    samples = by_address.pop("smsp__pcsamp_sample_count", {})
    executed = by_address.pop(_EXECUTED_METRIC, {})
    total = sum(samples.values()) or None
    if not rows or not executed or rows[-1].address > max(executed) - min(executed):
        return total, ()
    stalls: dict[int, dict[str, int]] = {}
    for name, counts in by_address.items():
        for address, count in counts.items():
            stalls.setdefault(address, {})[name.rpartition("stalled_")[2]] = count
    return total, sampled_lines(rows, min(executed), samples, stalls)


def _read_metric(data: bytes, field: Field, strings: list[str]) -> tuple[str, Metric | None]:
    """Return name and value. ``None``: the metric has only instances, or was not collected."""
    name, value = "", None
    for inner in _inner_fields(data, field):
        if inner.number == 1 and inner.wire == VARINT:
            name = strings[inner.value]
        elif inner.number == 2 and inner.wire == BYTES:
            for inner_field in _inner_fields(data, inner):
                value = (
                    _read_text(data, inner_field)
                    if inner_field.wire == BYTES
                    else _read_number(inner_field)
                )
    if value is None:
        return name, None
    unit = next((unit for pattern, unit in _UNIT_PATTERNS if re.search(pattern, name)), "")
    return name, Metric(value, unit if isinstance(value, float) else "")


def _read_advice(data: bytes, field: Field) -> ToolAdvice | None:
    """Return a rule's first message with its largest estimate, or ``None`` if it has no message. An
    estimate is item 10 of a body (type, percent), according to ``RuleResults.proto``; no file with
    an estimate was available."""
    rule, text, scope, best_share = "", "", "", None
    parts = list(_inner_fields(data, field))
    bodies = [part for part in parts if part.number == 3 and part.wire == BYTES]
    items = [
        item
        for body in bodies
        for outer in _inner_fields(data, body)
        for item in _inner_fields(data, outer)
    ]
    for part in parts:
        rule = _read_text(data, part) if part.number == 1 else rule
    for item in items:
        inner = (
            list(_inner_fields(data, item)) if item.wire == BYTES and item.number in (1, 10) else []
        )
        if item.number == 1 and not text:
            words = [
                _read_text(data, part) for part in inner if part.number == 1 and part.wire == BYTES
            ]
            text = "".join(words)
        elif item.number == 10:
            share = share_of(next((_read_number(x) for x in inner if x.wire == FIXED64), None))
            if share is not None and (best_share is None or share > best_share):
                best_share = share
                kind = next((part.value for part in inner if part.wire == VARINT), 0)
                scope = {1: "local", 2: "global"}.get(kind, "")
    plain_text = _LINK.sub(lambda link: link[1] or link[2], text)  # names in place of links
    return ToolAdvice(rule, plain_text, scope, best_share) if text else None


# -- rocprof ---------------------------------------------------------------------------------------


def _read_rocprof_csv(rows: Iterator[list[str]]) -> list[KernelProfile]:
    """Read tables of rocprof (one column per counter) and rocprofv3 (one row per counter). Values
    are means over the launches of a kernel in one size."""
    header = next(rows, [])
    column_index = {
        re.sub(r"[^a-z0-9]", "", name.lower()): index for index, name in enumerate(header)
    }
    counters = [
        (index, name) for index, name in enumerate(header) if not _ROCPROF_COLUMNS.fullmatch(name)
    ]
    is_long_table = "countername" in column_index and "countervalue" in column_index
    values_by_kernel: dict[tuple[str, str, str], dict[str, list[float]]] = {}
    for row in rows:
        name = _get_cell(row, column_index, "kernelname").removesuffix(".kd")
        if len(row) < len(header) or not name:
            continue
        key = (
            name,
            _get_cell(row, column_index, "grd" if "grd" in column_index else "gridsize"),
            _get_cell(row, column_index, "wgr" if "wgr" in column_index else "workgroupsize"),
        )
        if key not in values_by_kernel and len(values_by_kernel) >= _MAX_KERNELS:
            continue
        values = values_by_kernel.setdefault(key, {})
        pairs = [(header[index], row[index]) for index, _ in counters]
        if is_long_table:
            pairs = [(row[column_index["countername"]], row[column_index["countervalue"]])]
        if (duration := _launch_duration(row, column_index)) is not None:
            pairs.append(("duration", str(duration)))
        for counter, text in pairs:
            value = metric_of(text, "").value
            if isinstance(value, float) and (counter in values or len(values) < MAX_METRICS):
                values.setdefault(counter, []).append(value)
    return [_build_from_rocprof(*key, values) for key, values in values_by_kernel.items()]


def _launch_duration(row: Sequence[str], column: dict[str, int]) -> float | None:
    for start, end in (("beginns", "endns"), ("starttimestamp", "endtimestamp")):
        if start in column and end in column:
            times = (metric_of(row[column[start]], "").value, metric_of(row[column[end]], "").value)
            if isinstance(times[0], float) and isinstance(times[1], float):
                return times[1] - times[0]
    return None


_KIB_COUNTERS = ("FETCH_SIZE", "WRITE_SIZE")
"""Derived counters of rocprof that are in KiB."""


def _build_from_rocprof(
    name: str, grid: str, block: str, values: dict[str, list[float]]
) -> KernelProfile:
    means = {counter: sum(items) / len(items) for counter, items in values.items()}
    metrics = {
        counter: Metric(mean * 1024, "byte") if counter in _KIB_COUNTERS else Metric(mean)
        for counter, mean in means.items()
        if counter != "duration"
    }
    threads, items = metric_of(block, "").value, metric_of(grid, "").value
    size: tuple[int, int] | None = None
    if isinstance(threads, float) and isinstance(items, float) and threads >= 1:
        size = int(items / threads), int(threads)
    return KernelProfile(
        name=name,
        grid=None if size is None else (size[0], 1, 1),
        block=None if size is None else (size[1], 1, 1),
        duration_ns=means.get("duration"),
        metrics=metrics,
        launches=max(map(len, values.values()), default=1),
    )


_KERNEL_COLUMNS = ("KernelName", "grd", "wgr", "BeginNs", "EndNs")


def read_rocprof_kernels(database: Database, path: str) -> KernelProfiles:
    """Read the kernel table that rocprof (version 1) writes into SQLite. It has times, but no
    counters. Raises AdvisorError if it has no kernels."""
    types = {name: pl.String if name == "KernelName" else pl.Int64 for name in _KERNEL_COLUMNS}
    table = database.read("KERN", types)
    if set(table.columns) != set(_KERNEL_COLUMNS) or table.is_empty():
        raise AdvisorError(f"{path}: a database of rocprof without kernels and their times")
    names = pl.col("KernelName").str.strip_chars('"')
    rows = table.select(_KERNEL_COLUMNS).with_columns(names).cast(pl.String).fill_null("").rows()
    kernels = _read_rocprof_csv(iter([list(_KERNEL_COLUMNS), *map(list, rows)]))
    return KernelProfiles(path, ROCPROF, tuple(kernels))


def read_rocprof_compute(database: Database, path: str) -> KernelProfiles:
    """Read a rocprof-compute database: metrics per kernel as shares of their peaks (``System
    Speed-of-Light/VALU Utilization``), else averages. Raises AdvisorError if there are none."""
    text, integer = pl.String, pl.Int64
    kernels = database.read("compute_kernel", {"kernel_uuid": integer, "kernel_name": text})
    launches = (
        database.read(
            "compute_dispatch",
            {"kernel_uuid": integer, "start_timestamp": integer, "end_timestamp": integer},
        )
        .group_by("kernel_uuid")
        .agg((pl.col("end_timestamp") - pl.col("start_timestamp")).mean().alias("ns"), pl.len())
    )
    names = database.read(
        "compute_metric_definition",
        {"metric_uuid": integer, "name": text, "table_name": text, "unit": text},
    )
    values = database.read(
        "compute_kernel_metric_value",
        {"metric_uuid": integer, "kernel_uuid": integer, "value_name": text, "value": pl.Float64},
    )
    if kernels.is_empty() or values.is_empty():
        raise AdvisorError(f"{path}: a database of rocprof-compute without metrics of a kernel")
    values = values.filter(pl.col("value_name").is_in(["Pct of Peak", "Avg"])).drop_nulls()
    values = values.join(names, on="metric_uuid").sort("value_name")  # a share comes after an Avg
    metrics: dict[int, dict[str, Metric]] = {}
    for row in values.iter_rows(named=True):
        is_share = row["value_name"] == "Pct of Peak"
        kernel_metrics = metrics.setdefault(row["kernel_uuid"], {})
        if len(kernel_metrics) < MAX_METRICS:
            kernel_metrics[f"{row['table_name']}/{row['name']}"] = Metric(
                row["value"], "%" if is_share else row["unit"] or ""
            )
    launches_by_kernel = {row["kernel_uuid"]: row for row in launches.iter_rows(named=True)}
    device = _read_workload_device(database)
    result = [
        KernelProfile(
            device=device,
            name=row["kernel_name"] or "",
            grid=None,
            block=None,
            duration_ns=launches_by_kernel.get(row["kernel_uuid"], {}).get("ns"),
            metrics=metrics.get(row["kernel_uuid"], {}),
            launches=launches_by_kernel.get(row["kernel_uuid"], {}).get("len", 1),
        )
        for row in kernels.head(_MAX_KERNELS).iter_rows(named=True)
    ]
    return KernelProfiles(path, ROCPROF, tuple(result))


def _read_workload_device(database: Database) -> str:
    """Return the GPU model with its architecture. Empty if not recorded, or if there are
    several."""
    if not database.has_table("compute_workload"):
        return ""
    rows = database.read("compute_workload", {"sys_info_extdata": pl.String})
    devices = set[str]()
    for row in rows["sys_info_extdata"].drop_nulls().head(2):
        try:
            machine = msgspec.json.decode(row, type=_Machine)
        except msgspec.DecodeError:
            return ""
        devices.add(", ".join(filter(None, (machine.gpu_model, machine.gpu_arch))))
    return devices.pop() if len(devices) == 1 else ""


# -- several reports, and those that belong to a trace ---------------------------------------------


def merge_profiles(reports: Sequence[KernelProfiles]) -> KernelProfiles:
    """Merge several reports. rocprof writes times and counters to separate files, so reports of one
    run become one. A kernel that is in several runs gets the name of its file."""
    dropped: Counter[str] = Counter()
    runs: list[_Run] = []
    for report in reports:
        dropped.update(report.dropped)
        matching_runs = [run for run in runs if run.fits(report)] if report.tool == ROCPROF else []
        if matching_runs:
            max(
                matching_runs, key=lambda run: _count_common_ends(run.stem, _stem(report.path))
            ).add(report)
        elif not any(run.repeats(report) for run in runs):
            runs.append(_Run(report))
    counts = Counter(name for run in runs for name in {key[0] for key in run.kernels})
    kernels = [
        replace(kernel, file=run.stem.rpartition("/")[2]) if counts[key[0]] > 1 else kernel
        for run in runs
        for key, kernels_of_key in run.kernels.items()
        for kernel in kernels_of_key
    ]
    path = ", ".join(report.path for report in reports[:3]) + (", …" if len(reports) > 3 else "")
    compiled = tuple(kernel for report in reports for kernel in report.compiled)
    return KernelProfiles(path, reports[0].tool, tuple(kernels[:_MAX_KERNELS]), dropped, compiled)


_Key = tuple[str, tuple[int, int, int] | None, tuple[int, int, int] | None]


class _Run:
    """Reports of one run of a program, with its kernels by name and size."""

    def __init__(self, report: KernelProfiles) -> None:
        self.kernels: dict[_Key, list[KernelProfile]] = {}
        for kernel in report.kernels:
            self.kernels.setdefault(_kernel_key(kernel), []).append(kernel)
        self.stem = _stem(report.path)
        """Path stem of the report with times, else of the first report."""
        self.timed = _has_only_times(report)
        """Whether one of its reports has times but no counters."""

    def fits(self, report: KernelProfiles) -> bool:
        """Return whether a report has kernels of this run and new values for all of them. A run has
        one report with only times, and each counter once."""
        pairs = [
            (self.kernels[_kernel_key(k)][0], k)
            for k in report.kernels
            if _kernel_key(k) in self.kernels
        ]
        if not pairs or (self.timed and _has_only_times(report)):
            return False
        return not any(first.metrics.keys() & second.metrics.keys() for first, second in pairs)

    def repeats(self, report: KernelProfiles) -> bool:
        """Return whether a report repeats the times of this run: rocprof writes a table and a
        database."""
        return self.timed and _has_only_times(report) and self.stem == _stem(report.path)

    def add(self, report: KernelProfiles) -> None:
        if _has_only_times(report):
            self.timed, self.stem = True, _stem(report.path)
        for kernel in report.kernels:
            kernels = self.kernels.setdefault(_kernel_key(kernel), [])
            if not kernels:
                kernels.append(kernel)
                continue
            first = kernels[0]
            kernels[0] = replace(
                first,
                duration_ns=kernel.duration_ns if first.duration_ns is None else first.duration_ns,
                metrics=first.metrics | kernel.metrics,
            )


def _kernel_key(kernel: KernelProfile) -> _Key:
    return kernel.name, kernel.grid, kernel.block


def _has_only_times(report: KernelProfiles) -> bool:
    return not any(kernel.metrics for kernel in report.kernels)


def _stem(path: str) -> str:
    """Return a report's path without the suffixes of its format and packing."""
    return re.sub(r"\.(?:csv|db|ncu-rep)(?:\.gz|\.zst|\.zstd)?$", "", path)


def _count_common_ends(first: str, second: str) -> int:
    """Count the characters that two names share at their beginnings and ends."""
    result = 0
    for pair in (zip(first, second, strict=False), zip(first[::-1], second[::-1], strict=False)):
        result += sum(1 for _ in takewhile(lambda chars: chars[0] == chars[1], pair))
    return result
