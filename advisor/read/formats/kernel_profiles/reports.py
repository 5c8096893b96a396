"""Reader of kernel profilers' reports: Nsight Compute's CSV and ``.ncu-rep``, rocprof's counters.

Nsight Compute's report is a container of Protocol Buffers messages: ``NVR``, a file header, then
blocks of a header (numbers of sources and results, a table of strings, the size of what follows)
and so many messages, each behind its length. A result is one profiled launch. This was read off
files of the versions 2022 to 2025; where the layout does not fit, :data:`EXPORT` is advised."""

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
MAX_BYTES = 1 << 30
"""Largest report, bytes; source files and binaries inside are skipped, but read."""
MAX_KERNELS = 20_000
MAX_METRICS = 20_000
"""Most metrics of one kernel; Nsight Compute's ``full`` set has 2,000."""
MAX_TEXT = 4_096
"""Most characters kept of a name or text."""

MAX_VALUE = 1e30
"""Largest plausible counter value; anything above is damage."""

Layout = Literal["ncu-rep", "ncu-csv", "rocprof-csv"]

_SCALES = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_TIMES = {"ns": 1.0, "nsecond": 1.0, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6}
_TIMES |= {"s": 1e9, "second": 1e9}
_SCALED = re.compile(r"([KMGT]?)(bytes?|hz)(/(?:s|second|block|launch|thread))?", re.IGNORECASE)

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
"""Raw metrics by their labels on Nsight Compute's details page, as its section files pair them."""
_UNITS = (
    (r"gpu__time_duration|gpu__time_active", "ns"),
    (r"\.pct|_pct$|pct_of_peak", "%"),
    (r"bytes.*\.per_second$", "byte/s"),
    (r"bytes|_mem_size$|shared_mem_per_block", "byte"),
    (r"\.per_second$", "Hz"),
)
_NCU_META = {
    "ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream",
    "Block Size", "Grid Size", "Device", "CC", "Section Name", "Kernel Time", "thread Domain:Push",
}  # fmt: skip
_ROC_META = re.compile(
    r"index|kernel_?name|gpu.?id|queue.?(id|index)|pid|tid|process.?id|thread.?id|grd|wgr|sig|obj"
    r"|dispatch(_?id|ns)?|agent_?id|correlation_?id|kernel_?id|grid_?size|workgroup_?size"
    r"|(begin|end|complete|duration)ns|(start|end)_timestamp|counter_(name|value)|wave_size"
    r"|lds|scr|((arch|accum)_)?vgpr|sgpr|lds_block_size(_v)?|scratch_size|(accum_)?vgpr_count"
    r"|sgpr_count",
    re.IGNORECASE,
)


class _Machine(msgspec.Struct):
    """GPU of the machine, in a row of rocprof-compute."""

    gpu_model: str = ""
    gpu_arch: str = ""


def read_kernel_profiles(data: bytes, path: str, layout: Layout) -> KernelProfiles:
    """Return the kernels of one report. Raises AdvisorError if it holds none or cannot be read."""
    dropped = Counter[str]()
    if layout == "ncu-rep":
        tool, kernels = NCU, list(_ncu_report(data, path, dropped))
    elif layout == "ncu-csv":
        tool, kernels = NCU, _ncu_csv(_rows(data, path), dropped)
    else:
        tool, kernels = ROCPROF, _rocprof_csv(_rows(data, path))
    if not kernels:
        raise AdvisorError(f"{path}: a kernel profiler's report without a kernel in it")
    return KernelProfiles(path, tool, tuple(kernels[:MAX_KERNELS]), dropped)


def _rows(data: bytes, path: str) -> Iterator[list[str]]:
    text = io.StringIO(data.decode("utf-8-sig", errors="replace"), newline="")
    lines = (line for line in text if line.strip() and not line.startswith("=="))
    try:
        for row in csv.reader(lines):
            yield [value[:MAX_TEXT] for value in row]
    except csv.Error as error:
        raise AdvisorError(f"{path}: not a readable CSV file ({error})") from None


# -- Nsight Compute, CSV ---------------------------------------------------------------------------


def _ncu_csv(rows: Iterator[list[str]], dropped: Counter[str]) -> list[KernelProfile]:
    """Read the pages ``details`` (one row per metric or rule) and ``raw`` (one row per kernel)."""
    head = next(rows, [])
    column = {name: at for at, name in enumerate(head)}
    if "Metric Name" in column:
        return _details(rows, column, dropped)
    units = next(rows, [])
    metrics = [
        (at, name) for name, at in column.items() if name not in _NCU_META and len(units) > at
    ]
    result: list[KernelProfile] = []
    for row in rows:
        if len(row) < len(head):
            dropped["short rows"] += 1
        elif len(result) < MAX_KERNELS:
            values = {
                name: metric_of(row[at], units[at]) for at, name in metrics[:MAX_METRICS] if row[at]
            }
            result.append(_of_csv(row, column, values, ()))
    return result


def _details(
    rows: Iterator[list[str]], column: dict[str, int], dropped: Counter[str]
) -> list[KernelProfile]:
    kernels: dict[tuple[str, ...], tuple[list[str], dict[str, Metric], list[ToolAdvice]]] = {}
    wanted = ("ID", "Process ID", "Kernel Name", "Block Size", "Grid Size")
    least = column["Metric Name"]
    for row in rows:
        if len(row) <= least:
            dropped["short rows"] += 1
            continue
        row += [""] * (len(column) - len(row))
        key = tuple(row[column[name]] for name in wanted if name in column)
        if key not in kernels and len(kernels) >= MAX_KERNELS:
            dropped["kernels beyond the first 20,000"] += 1
            continue
        _, metrics, advice = kernels.setdefault(key, (row, {}, []))
        if label := row[least]:
            section = _cell(row, column, "Section Name")
            metric = metric_of(
                _cell(row, column, "Metric Value"), _cell(row, column, "Metric Unit")
            )
            if len(metrics) < MAX_METRICS:
                metrics[_raw_name(section, label, metric.unit)] = metric
        elif rule := _cell(row, column, "Rule Name"):
            saved = metric_of(_cell(row, column, "Estimated Speedup"), "%").value
            advice.append(
                ToolAdvice(
                    rule,
                    _cell(row, column, "Rule Description"),
                    _cell(row, column, "Estimated Speedup Type"),
                    share_of(saved),
                )
            )
    return [_of_csv(row, column, metrics, advice) for row, metrics, advice in kernels.values()]


def _raw_name(section: str, label: str, unit: str) -> str:
    """Return the raw name of a metric of the details page, if known, else ``section/label``.
    "Memory Throughput" is two metrics: a share, and bytes per second."""
    if "__" in label or section.startswith("Command line"):
        return label
    raw = DETAILS.get(label)
    if label == "Memory Throughput" and unit != "%":
        raw = "dram__bytes.sum.per_second"
    return raw if raw is not None else f"{section}/{label}"


def _cell(row: Sequence[str], column: dict[str, int], name: str) -> str:
    return row[column[name]] if name in column and column[name] < len(row) else ""


def _of_csv(
    row: Sequence[str],
    column: dict[str, int],
    metrics: dict[str, Metric],
    advice: Sequence[ToolAdvice],
) -> KernelProfile:
    result = KernelProfile(
        name=_cell(row, column, "Kernel Name"),
        grid=_dimensions(_cell(row, column, "Grid Size")),
        block=_dimensions(_cell(row, column, "Block Size")),
        **_common(metrics, advice),
    )
    found = re.fullmatch(r"(\d{1,3})\.(\d)", _cell(row, column, "CC"))
    return result if found is None else replace(result, compute=(int(found[1]), int(found[2])))


def _common(metrics: dict[str, Metric], advice: Sequence[ToolAdvice]) -> dict[str, Any]:
    """Return the fields that both exports express in the same way."""
    device = metrics.get("device__attribute_display_name", Metric("")).value
    major, minor = (
        _figure(metrics, f"device__attribute_compute_capability_{part}")
        for part in ("major", "minor")
    )
    return {
        "duration_ns": _figure(metrics, "gpu__time_duration.sum"),
        "metrics": metrics,
        "advice": tuple(advice),
        "device": device if isinstance(device, str) else "",
        "compute": None if major is None or minor is None else (int(major), int(minor)),
    }


def _figure(metrics: dict[str, Metric], name: str) -> float | None:
    value = metrics.get(name, Metric(None)).value
    return value if isinstance(value, float) else None


def _dimensions(text: str) -> tuple[int, int, int] | None:
    found = re.fullmatch(r"\D*(\d{1,10})\D+(\d{1,10})\D+(\d{1,10})\D*", text)
    return None if found is None else (int(found[1]), int(found[2]), int(found[3]))


def metric_of(text: str, unit: str) -> Metric:
    """Parse a cell as a metric in its base unit: ``175.10`` ``Kbyte`` is 175,100 bytes."""
    plain = text.replace(",", "").strip()
    if plain.lower() in ("", "n/a"):
        return Metric(None, unit)
    try:
        value = float(plain)
    except ValueError:
        return Metric(text, unit)
    if not abs(value) < MAX_VALUE:  # nor a NaN
        return Metric(None, unit)
    if unit.lower() in _TIMES:
        return Metric(value * _TIMES[unit.lower()], "ns")
    if (found := _SCALED.fullmatch(unit)) is not None:
        base = "Hz" if found[2].lower() == "hz" else "byte"
        base += {"/second": "/s"}.get((found[3] or "").lower(), found[3] or "")
        return Metric(value * _SCALES.get(found[1].lower(), 1.0), base)
    return Metric(value, unit)


def share_of(percent: float | str | None) -> float | None:
    """Convert Nsight Compute's estimated speed-up, %, to a share of the time; ``None``: none."""
    if not isinstance(percent, float) or not 0.0 < percent <= 100.0:
        return None
    return percent / 100.0


# -- Nsight Compute, .ncu-rep ----------------------------------------------------------------------


_EXECUTED = "inst_executed"
"""Name of the metric counted by address, for every instruction of the function."""
_SAMPLED = re.compile(r"smsp__pcsamp_(?:sample_count|warps_issue_stalled_(?:(?!_not_issued)\w)+)")


def _ncu_report(data: bytes, path: str, dropped: Counter[str]) -> Iterator[KernelProfile]:
    """Yield a report's kernels. Damage after the first is counted; before, raises AdvisorError."""
    strings: list[str] = []
    tables: dict[str, list[LineRow]] = {}
    done = 0
    try:
        for kind, payload in _messages(data):
            if kind == "strings":
                strings += payload  # later blocks add the names that are new
            elif kind == "module":
                tables |= lines_of_module(payload)
            else:
                yield _result(payload, strings, tables)
                done += 1
                if done == MAX_KERNELS:
                    return
    except (MalformedMessage, IndexError, struct.error, ValueError, KeyError):
        if not done:
            raise AdvisorError(
                f"{path}: a report of Nsight Compute whose layout is not known; {EXPORT}"
            ) from None
        dropped["results after damage"] += 1


def _messages(data: bytes) -> Iterator[tuple[str, Any]]:
    """Yield the tables of strings, the modules and the results of a report, in order."""
    at = 8 + struct.unpack_from("<I", data, 4)[0]
    while at < len(data):
        at, size = _sized(data, at)
        head = list(iterate_fields(data, at, at + size))
        at += size
        number = {field.number: field.value for field in head if field.wire == VARINT}
        for field in head:
            if field.number == 4 and field.wire == BYTES and field.value:
                yield "strings", [_text(data, each) for each in _inside(data, field)]
        end = at + number.get(5, 0)
        if end > len(data):
            raise MalformedMessage
        sources = number.get(1, 0)
        while at < end:
            at, size = _sized(data, at)
            if sources > 0:
                sources -= 1
                for field in iterate_fields(data, at, at + size):
                    if field.wire == BYTES and data[field.start : field.start + 4] == b"\x7fELF":
                        yield "module", data[field.start : field.start + field.value]
            else:
                yield "result", data[at : at + size]
            at += size


def _sized(data: bytes, at: int) -> tuple[int, int]:
    size = struct.unpack_from("<I", data, at)[0]
    if at + 4 + size > len(data):
        raise MalformedMessage
    return at + 4, size


_LINK = re.compile(r"@section:[^:@]*:([^@]*)@|@url:([^:@]*):[^@]*@")


def _text(data: bytes, field: Field) -> str:
    end = min(field.start + field.value, field.start + MAX_TEXT)
    return data[field.start : end].decode("utf-8", errors="replace")


def _number(field: Field) -> float | None:
    if field.wire == FIXED64:
        return float(struct.unpack("<d", field.value.to_bytes(8, "little"))[0])
    if field.wire == FIXED32:
        return float(struct.unpack("<f", field.value.to_bytes(4, "little"))[0])
    return float(field.value) if field.wire == VARINT else None


def _inside(data: bytes, field: Field) -> Iterator[Field]:
    return iterate_fields(data, field.start, field.start + field.value)


def _result(data: bytes, strings: list[str], tables: dict[str, list[LineRow]]) -> KernelProfile:
    texts: dict[int, str] = {}
    sizes: dict[int, tuple[int, int, int]] = {}
    metrics: dict[str, Metric] = {}
    advice: list[ToolAdvice] = []
    by_address: dict[str, dict[int, int]] = {}
    for field in iterate_fields(data, 0, len(data)):
        if field.wire != BYTES:
            continue
        if field.number in (5, 6, 7):
            texts[field.number] = _text(data, field)
        elif field.number in (10, 11):
            x, y, z = (inner.value for inner in list(_inside(data, field))[:3])
            sizes[field.number] = (x, y, z)
        elif field.number == 13 and len(metrics) < MAX_METRICS:
            name, value = _metric(data, field, strings)
            if value is not None:
                metrics[name] = value
            if name == _EXECUTED or _SAMPLED.fullmatch(name):
                by_address[name] = _instances(data, field)
        elif field.number == 19 and (said := _advice(data, field)) is not None:
            advice.append(said)
    samples, lines = _where(by_address, tables.get(texts.get(5, ""), []))
    return KernelProfile(
        name=texts.get(7) or texts.get(6) or texts.get(5, ""),
        signature=texts.get(5, ""),
        grid=sizes.get(10),
        block=sizes.get(11),
        **_common(metrics, advice),
        samples=samples,
        lines=lines,
    )


def _instances(data: bytes, field: Field) -> dict[int, int]:
    """Return a metric's counts by program counter: address -> count."""
    result = {}
    for inner in _inside(data, field):
        if inner.number != 3 or inner.wire != BYTES:
            continue
        pair = [
            next((each.value for each in _inside(data, part) if each.wire == VARINT), 0)
            for part in _inside(data, inner)
            if part.wire == BYTES
        ]
        if len(pair) == 2:  # a count of 0 is left out
            result[pair[0]] = pair[1]
    return result


def _where(
    by_address: dict[str, dict[int, int]], rows: list[LineRow]
) -> tuple[int | None, tuple[SampledLine, ...]]:
    """Return the number of warp samples, and their lines if the addresses fit the table."""
    samples = by_address.pop("smsp__pcsamp_sample_count", {})
    executed = by_address.pop(_EXECUTED, {})
    total = sum(samples.values()) or None
    if not rows or not executed or rows[-1].address > max(executed) - min(executed):
        return total, ()
    stalls: dict[int, dict[str, int]] = {}
    for name, counts in by_address.items():
        for address, count in counts.items():
            stalls.setdefault(address, {})[name.rpartition("stalled_")[2]] = count
    return total, sampled_lines(rows, min(executed), samples, stalls)


def _metric(data: bytes, field: Field, strings: list[str]) -> tuple[str, Metric | None]:
    """Return name and value; ``None``: it has only instances, or was not collected."""
    name, value = "", None
    for inner in _inside(data, field):
        if inner.number == 1 and inner.wire == VARINT:
            name = strings[inner.value]
        elif inner.number == 2 and inner.wire == BYTES:
            for kept in _inside(data, inner):
                value = _text(data, kept) if kept.wire == BYTES else _number(kept)
    if value is None:
        return name, None
    unit = next((unit for pattern, unit in _UNITS if re.search(pattern, name)), "")
    return name, Metric(value, unit if isinstance(value, float) else "")


def _advice(data: bytes, field: Field) -> ToolAdvice | None:
    """Return a rule's first message, with its largest estimate; ``None`` if it has no message. An
    estimate is item 10 of a body (type, percent), by the layout of ``RuleResults.proto``; no file
    with one was seen."""
    rule, text, scope, saved = "", "", "", None
    parts = list(_inside(data, field))
    bodies = [part for part in parts if part.number == 3 and part.wire == BYTES]
    items = [
        item for body in bodies for each in _inside(data, body) for item in _inside(data, each)
    ]
    for part in parts:
        rule = _text(data, part) if part.number == 1 else rule
    for item in items:
        inner = list(_inside(data, item)) if item.wire == BYTES and item.number in (1, 10) else []
        if item.number == 1 and not text:
            said = [_text(data, each) for each in inner if each.number == 1 and each.wire == BYTES]
            text = "".join(said)
        elif item.number == 10:
            share = share_of(next((_number(x) for x in inner if x.wire == FIXED64), None))
            if share is not None and (saved is None or share > saved):
                saved = share
                kind = next((each.value for each in inner if each.wire == VARINT), 0)
                scope = {1: "local", 2: "global"}.get(kind, "")
    plain = _LINK.sub(lambda link: link[1] or link[2], text)  # names in place of links
    return ToolAdvice(rule, plain, scope, saved) if text else None


# -- rocprof ---------------------------------------------------------------------------------------


def _rocprof_csv(rows: Iterator[list[str]]) -> list[KernelProfile]:
    """Read tables of rocprof (one column per counter) and rocprofv3 (one row per counter): means
    over the launches of one kernel in one size."""
    head = next(rows, [])
    column = {re.sub(r"[^a-z0-9]", "", name.lower()): at for at, name in enumerate(head)}
    counters = [(at, name) for at, name in enumerate(head) if not _ROC_META.fullmatch(name)]
    long = "countername" in column and "countervalue" in column
    sums: dict[tuple[str, str, str], dict[str, list[float]]] = {}
    for row in rows:
        name = _cell(row, column, "kernelname").removesuffix(".kd")
        if len(row) < len(head) or not name:
            continue
        key = (
            name,
            _cell(row, column, "grd" if "grd" in column else "gridsize"),
            _cell(row, column, "wgr" if "wgr" in column else "workgroupsize"),
        )
        if key not in sums and len(sums) >= MAX_KERNELS:
            continue
        values = sums.setdefault(key, {})
        pairs = [(head[at], row[at]) for at, _ in counters]
        if long:
            pairs = [(row[column["countername"]], row[column["countervalue"]])]
        if (duration := _launch_ns(row, column)) is not None:
            pairs.append(("duration", str(duration)))
        for counter, text in pairs:
            value = metric_of(text, "").value
            if isinstance(value, float) and (counter in values or len(values) < MAX_METRICS):
                values.setdefault(counter, []).append(value)
    return [_of_rocprof(*key, values) for key, values in sums.items()]


def _launch_ns(row: Sequence[str], column: dict[str, int]) -> float | None:
    for begin, end in (("beginns", "endns"), ("starttimestamp", "endtimestamp")):
        if begin in column and end in column:
            times = (metric_of(row[column[begin]], "").value, metric_of(row[column[end]], "").value)
            if isinstance(times[0], float) and isinstance(times[1], float):
                return times[1] - times[0]
    return None


_KILOBYTES = ("FETCH_SIZE", "WRITE_SIZE")
"""Derived counters of rocprof in KiB."""


def _of_rocprof(name: str, grid: str, block: str, values: dict[str, list[float]]) -> KernelProfile:
    means = {counter: sum(each) / len(each) for counter, each in values.items()}
    metrics = {
        counter: Metric(mean * 1024, "byte") if counter in _KILOBYTES else Metric(mean)
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


_KERN = ("KernelName", "grd", "wgr", "BeginNs", "EndNs")


def read_rocprof_kernels(database: Database, path: str) -> KernelProfiles:
    """Read the kernel table that rocprof (version 1) writes into SQLite: times, no counters. Raises
    AdvisorError if it has no kernels."""
    types = {name: pl.String if name == "KernelName" else pl.Int64 for name in _KERN}
    table = database.read("KERN", types)
    if set(table.columns) != set(_KERN) or table.is_empty():
        raise AdvisorError(f"{path}: a database of rocprof without kernels and their times")
    names = pl.col("KernelName").str.strip_chars('"')
    rows = table.select(_KERN).with_columns(names).cast(pl.String).fill_null("").rows()
    kernels = _rocprof_csv(iter([list(_KERN), *map(list, rows)]))
    return KernelProfiles(path, ROCPROF, tuple(kernels))


def read_rocprof_compute(database: Database, path: str) -> KernelProfiles:
    """Read a rocprof-compute database: metrics per kernel as shares of their peaks (``System
    Speed-of-Light/VALU Utilization``), else averages. Raises AdvisorError if it has none."""
    text, whole = pl.String, pl.Int64
    kernels = database.read("compute_kernel", {"kernel_uuid": whole, "kernel_name": text})
    launches = (
        database.read(
            "compute_dispatch",
            {"kernel_uuid": whole, "start_timestamp": whole, "end_timestamp": whole},
        )
        .group_by("kernel_uuid")
        .agg((pl.col("end_timestamp") - pl.col("start_timestamp")).mean().alias("ns"), pl.len())
    )
    names = database.read(
        "compute_metric_definition",
        {"metric_uuid": whole, "name": text, "table_name": text, "unit": text},
    )
    values = database.read(
        "compute_kernel_metric_value",
        {"metric_uuid": whole, "kernel_uuid": whole, "value_name": text, "value": pl.Float64},
    )
    if kernels.is_empty() or values.is_empty():
        raise AdvisorError(f"{path}: a database of rocprof-compute without metrics of a kernel")
    values = values.filter(pl.col("value_name").is_in(["Pct of Peak", "Avg"])).drop_nulls()
    values = values.join(names, on="metric_uuid").sort("value_name")  # a share comes after an Avg
    metrics: dict[int, dict[str, Metric]] = {}
    for row in values.iter_rows(named=True):
        share = row["value_name"] == "Pct of Peak"
        own = metrics.setdefault(row["kernel_uuid"], {})
        if len(own) < MAX_METRICS:
            own[f"{row['table_name']}/{row['name']}"] = Metric(
                row["value"], "%" if share else row["unit"] or ""
            )
    timed = {row["kernel_uuid"]: row for row in launches.iter_rows(named=True)}
    device = _device_of_workload(database)
    result = [
        KernelProfile(
            device=device,
            name=row["kernel_name"] or "",
            grid=None,
            block=None,
            duration_ns=timed.get(row["kernel_uuid"], {}).get("ns"),
            metrics=metrics.get(row["kernel_uuid"], {}),
            launches=timed.get(row["kernel_uuid"], {}).get("len", 1),
        )
        for row in kernels.head(MAX_KERNELS).iter_rows(named=True)
    ]
    return KernelProfiles(path, ROCPROF, tuple(result))


def _device_of_workload(database: Database) -> str:
    """Return the model of the GPU with its architecture; empty: not recorded, or several."""
    if not database.has_table("compute_workload"):
        return ""
    rows = database.read("compute_workload", {"sys_info_extdata": pl.String})
    found = set[str]()
    for row in rows["sys_info_extdata"].drop_nulls().head(2):
        try:
            machine = msgspec.json.decode(row, type=_Machine)
        except msgspec.DecodeError:
            return ""
        found.add(", ".join(filter(None, (machine.gpu_model, machine.gpu_arch))))
    return found.pop() if len(found) == 1 else ""


# -- several reports, and those that belong to a trace ---------------------------------------------


def merge_profiles(reports: Sequence[KernelProfiles]) -> KernelProfiles:
    """Merge several reports. rocprof writes times and counters to separate files: reports of one
    run become one. A kernel in several runs has the name of its file."""
    dropped: Counter[str] = Counter()
    runs: list[_Run] = []
    for report in reports:
        dropped.update(report.dropped)
        known = [run for run in runs if run.fits(report)] if report.tool == ROCPROF else []
        if known:
            max(known, key=lambda run: _common_ends(run.stem, _stem(report.path))).add(report)
        elif not any(run.repeats(report) for run in runs):
            runs.append(_Run(report))
    counts = Counter(name for run in runs for name in {key[0] for key in run.kernels})
    kernels = [
        replace(kernel, file=run.stem.rpartition("/")[2]) if counts[key[0]] > 1 else kernel
        for run in runs
        for key, own in run.kernels.items()
        for kernel in own
    ]
    path = ", ".join(report.path for report in reports[:3]) + (", …" if len(reports) > 3 else "")
    compiled = tuple(each for report in reports for each in report.compiled)
    return KernelProfiles(path, reports[0].tool, tuple(kernels[:MAX_KERNELS]), dropped, compiled)


_Key = tuple[str, tuple[int, int, int] | None, tuple[int, int, int] | None]


class _Run:
    """Reports of one run of a program, with its kernels by name and size."""

    def __init__(self, report: KernelProfiles) -> None:
        self.kernels: dict[_Key, list[KernelProfile]] = {}
        for kernel in report.kernels:
            self.kernels.setdefault(_key(kernel), []).append(kernel)
        self.stem = _stem(report.path)
        """Path of its times, else of its first report."""
        self.timed = _has_only_times(report)
        """Whether one of its reports has times and no counters."""

    def fits(self, report: KernelProfiles) -> bool:
        """Return whether a report has kernels of this run, and adds to all of them: a run has one
        report of times alone, and each counter once."""
        pairs = [(self.kernels[_key(k)][0], k) for k in report.kernels if _key(k) in self.kernels]
        if not pairs or (self.timed and _has_only_times(report)):
            return False
        return not any(first.metrics.keys() & second.metrics.keys() for first, second in pairs)

    def repeats(self, report: KernelProfiles) -> bool:
        """Return whether a report has the times of this run again: rocprof writes a table and a
        database."""
        return self.timed and _has_only_times(report) and self.stem == _stem(report.path)

    def add(self, report: KernelProfiles) -> None:
        if _has_only_times(report):
            self.timed, self.stem = True, _stem(report.path)
        for kernel in report.kernels:
            own = self.kernels.setdefault(_key(kernel), [])
            if not own:
                own.append(kernel)
                continue
            first = own[0]
            own[0] = replace(
                first,
                duration_ns=kernel.duration_ns if first.duration_ns is None else first.duration_ns,
                metrics=first.metrics | kernel.metrics,
            )


def _key(kernel: KernelProfile) -> _Key:
    return kernel.name, kernel.grid, kernel.block


def _has_only_times(report: KernelProfiles) -> bool:
    return not any(kernel.metrics for kernel in report.kernels)


def _stem(path: str) -> str:
    """Return a report's path without the suffixes of its format and packing."""
    return re.sub(r"\.(?:csv|db|ncu-rep)(?:\.gz|\.zst|\.zstd)?$", "", path)


def _common_ends(first: str, second: str) -> int:
    """Count the characters that two names share at their begins and ends."""
    result = 0
    for pair in (zip(first, second, strict=False), zip(first[::-1], second[::-1], strict=False)):
        result += sum(1 for _ in takewhile(lambda each: each[0] == each[1], pair))
    return result
