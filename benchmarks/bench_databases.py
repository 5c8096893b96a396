"""Speed and memory of reading large SQLite files of other profilers, beside the floor.

The floor is ``sqlite3`` reading the same columns of the same tables, 50,000 rows at a time, and
throwing them away. Every figure is a process of its own, start-up and imports included; CPU time is
the best of several runs; memory is the largest resident set, measured apart from the floor's.

The files are written as the profilers lay them out, of a training with PyTorch's ranges, calls,
kernels and copies, and with what they hold beside what we read: ``nsys`` (2 processes of a GPU
each, thread scheduling and sampled call chains, in the shares of the public recordings that it was
modelled on), ``rpd`` (identifiers and signals) and ``rocpd``, schema 3, and ``rocpd4``, schema 4
(arguments of calls).

    python benchmarks/bench_databases.py [--mb 1000] [--formats nsys rpd] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from advisor.cli import ALLOCATOR_SETTING

ROUNDS = 2
BATCH = 50_000
OPS = ("aten::addmm", "aten::copy_", "aten::native_layer_norm", "aten::mul", "aten::add_")
BLOCK = 20_000
"""Launches that are written at once."""
KERNELS = [
    f"void at::native::elementwise_kernel<128, {n}, Functor{n}>(int, Functor{n})" for n in range(40)
]
Tables = dict[str, tuple[str, ...]]
NSYS: Tables = {
    "StringIds": ("id", "value"),
    "CUPTI_ACTIVITY_KIND_KERNEL": (
        "start", "end", "deviceId", "streamId", "correlationId", "globalPid", "registersPerThread",
        "gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ", "staticSharedMemory",
        "dynamicSharedMemory", "demangledName", "shortName", "mangledName", "graphId",
        "graphNodeId",
    ),
    "CUPTI_ACTIVITY_KIND_MEMCPY": (
        "start", "end", "deviceId", "streamId", "correlationId", "globalPid", "bytes", "copyKind",
        "srcKind", "dstKind", "graphId", "graphNodeId",
    ),
    "CUPTI_ACTIVITY_KIND_RUNTIME": ("start", "end", "globalTid", "correlationId", "nameId"),
    "NVTX_EVENTS": (
        "start", "end", "eventType", "text", "textId", "globalTid", "endGlobalTid", "domainId",
    ),
}  # fmt: skip
"""Columns that our reader reads of the generated file; below, of the others."""

RPD: Tables = {
    "rocpd_string": ("id", "string"),
    "rocpd_api": ("id", "pid", "tid", "start", "end", "apiName_id", "args_id"),
    "rocpd_op": ("id", "gpuId", "queueId", "start", "end", "description_id", "opType_id"),
    "rocpd_api_ops": ("api_id", "op_id"),
    "rocpd_kernelapi": (
        "api_ptr_id", "gridX", "gridY", "gridZ", "workgroupX", "workgroupY", "workgroupZ",
        "groupSegmentSize",
    ),
    "rocpd_copyapi": ("api_ptr_id", "size", "pinned"),
}  # fmt: skip
GUID = "_0000abcd_1234_5678_9abc_def012345678"
TEXTS = {
    "text", "string", "completionSignal", "stream", "kernelArgAddress", "aquireFence",
    "releaseFence", "dst", "src", "guid", "call_stack", "line_info", "extdata", "type", "name",
    "kernel_name", "display_name", "product_name", "command",
}  # fmt: skip


def rocpd_tables(version: int) -> Tables:
    """Columns that are read of rocprofv3's tables, whose times stand in a table of their own in
    4."""
    place = ("agent_id", "queue_id", "stream_id")
    host = ("start", "end", "pid", "tid") if version == 3 else ("track_id", "start_id", "end_id")
    device = (*host, *place) if version == 3 else host
    sizes = tuple(f"{what}_{axis}" for what in ("workgroup_size", "grid_size") for axis in "xyz")
    tables: Tables = {
        "string": ("id", "string"),
        "event": ("id", "stack_id", "category_id", "extdata"),
        "region": (*host, "name_id", "event_id"),
        "kernel_dispatch": (*device, "kernel_id", "group_segment_size", *sizes, "event_id"),
        "memory_copy": (
            *device, "name_id", "size", "dst_agent_id", "src_agent_id", "event_id",
        ),
        "info_kernel_symbol": ("id", "kernel_name", "display_name", "arch_vgpr_count"),
        "info_agent": ("id", "type", "type_index", "product_name"),
        "info_process": ("id", "pid", "command"),
        "info_thread": ("id", "tid"),
    }  # fmt: skip
    if version > 3:
        tables["timestamp"] = ("id", "value")
        tables["track"] = ("id", "pid", "tid", *place)
    return {f"rocpd_{name}{GUID}": names for name, names in tables.items()}


# -- the files -------------------------------------------------------------------------------------


def columns(names: tuple[str, ...]) -> str:
    return ", ".join(
        f'"{name}" {"TEXT" if name in TEXTS else "INTEGER"}'
        + (" PRIMARY KEY" if name in ("id", "api_ptr_id") else "")
        for name in names
    )


class GeneratedDatabase:
    """A database under construction: how many rows, and whether it is large enough."""

    def __init__(self, path: Path, megabytes: int, tables: Tables) -> None:
        self.rows = 0
        self._path, self._bytes = path, megabytes * 1_000_000
        self._db = sqlite3.connect(path)
        self._db.execute("PRAGMA journal_mode = OFF")
        self._db.execute("PRAGMA synchronous = OFF")
        for table, names in tables.items():
            self._db.execute(f'CREATE TABLE "{table}" ({columns(names)})')

    def put(self, table: str, values: list[tuple[object, ...]]) -> None:
        self.rows += len(values)
        marks = ", ".join("?" * len(values[0]))
        self._db.executemany(f'INSERT INTO "{table}" VALUES ({marks})', values)

    def full(self) -> bool:
        self._db.commit()
        return self._path.stat().st_size >= self._bytes

    def close(self) -> int:
        self._db.close()
        return self.rows


def launches(first: int, count: int) -> Iterator[tuple[int, int, int, int]]:
    """Number, process, start of the call and of the kernel."""
    for number in range(first, first + count):
        at = 10**10 + number * 9_000
        yield number, number % 2, at, at + 30_000


def nsys(path: Path, megabytes: int) -> int:
    """Fill a file up to that size; returns its rows."""
    extra = {
        "CUPTI_ACTIVITY_KIND_KERNEL": (
            "contextId", "greenContextId", "launchType", "cacheConfig", "localMemoryPerThread",
            "localMemoryTotal", "gridId", "sharedMemoryExecuted", "sharedMemoryLimitConfig",
        ),
        "CUPTI_ACTIVITY_KIND_MEMCPY": ("contextId", "srcDeviceId", "dstDeviceId"),
        "CUPTI_ACTIVITY_KIND_RUNTIME": ("eventClass", "returnValue", "callchainId"),
        "NVTX_EVENTS": ("rangeId", "category", "color"),
    }  # fmt: skip
    tables = {table: (*names, *extra.get(table, ())) for table, names in NSYS.items()}
    tables |= {
        "SCHED_EVENTS": ("start", "cpu", "isSchedIn", "globalTid", "threadState"),
        "SAMPLING_CALLCHAINS": ("chain", "symbol", "module", "originalIP", "stackDepth"),
        "PROCESSES": ("globalPid", "pid", "name"),
    }
    file = GeneratedDatabase(path, megabytes, tables)
    names = [*KERNELS, "cudaLaunchKernel_v7000", "cudaMemcpyAsync_v3020"]
    file.put("StringIds", list(enumerate(names, 1)))
    pids = [(1 << 48) + (100 + n << 24) for n in range(2)]
    file.put("PROCESSES", [(pid, 100 + n, "python3") for n, pid in enumerate(pids)])
    first = 0
    while not file.full():
        kernels, calls, ranges, copies, sched, chains = [], [], [], [], [], []
        for number, who, call, begin in launches(first, BLOCK):
            pid, correlation = pids[who], number + 1
            tid = pid + 100 + who
            name = number % len(KERNELS) + 1
            kernels.append((begin, begin + 7_000, who, 7, correlation, pid, 32, 128, 1, 1, 256, 1,
                            1, 0, 1024, name, name, name, 0, None,
                            1, 0, 1, 1, 0, 0, number, 8192, 0))  # fmt: skip
            calls.append((call, call + 4_000, tid, correlation, 41, 1, 0, None))
            op = OPS[number % len(OPS)]
            for depth in range(2):
                text = f"{op}, seq = {number}, op_id = {2 * number + depth}"
                at = call - 2_000 + 500 * depth
                ranges.append(
                    (at, call + 5_000 - 500 * depth, 59, text, None, tid, None, 0, None, None, None)
                )
            if number % 5 == 0:
                calls.append((call + 4_500, call + 4_900, tid, number + (1 << 30), 42, 1, 0, None))
                copies.append((begin + 7_100, begin + 7_500, who, 7, number + (1 << 30), pid, 4096,
                               1, 1, 2, 0, None, 1, None, None))  # fmt: skip
            sched.append((call, who, number % 2, tid, 3))
            chains += [(number, name, 3, 140_000_000_000_000 + number, n) for n in range(2)]
        file.put("CUPTI_ACTIVITY_KIND_KERNEL", kernels)
        file.put("CUPTI_ACTIVITY_KIND_RUNTIME", calls)
        file.put("NVTX_EVENTS", ranges)
        file.put("CUPTI_ACTIVITY_KIND_MEMCPY", copies)
        file.put("SCHED_EVENTS", sched)
        file.put("SAMPLING_CALLCHAINS", chains)
        first += BLOCK
    return file.close()


def rpd(path: Path, megabytes: int) -> int:
    """The same program, on one GPU, as rocmProfileData stores it: a call and a range around it with
    a text of its own for each launch, a copy for each fifth."""
    extra = {
        "rocpd_op": ("sequenceId", "completionSignal"),
        "rocpd_api_ops": ("id",),
        "rocpd_kernelapi": (
            "stream", "privateSegmentSize", "kernelArgAddress", "aquireFence", "releaseFence",
            "codeObject_id", "kernelName_id",
        ),
        "rocpd_copyapi": (
            "stream", "width", "height", "kind", "dst", "src", "dstDevice", "srcDevice", "sync",
        ),
    }  # fmt: skip
    file = GeneratedDatabase(path, megabytes, {t: (*n, *extra.get(t, ())) for t, n in RPD.items()})
    names = ["", *KERNELS, "hipLaunchKernel", "hipMemcpyAsync", "UserMarker", "KernelExecution",
             "CopyHostToDevice"]  # fmt: skip
    file.put("rocpd_string", list(enumerate(names, 1)))
    launch, copied, marker, run, copy = range(len(KERNELS) + 2, len(names) + 1)
    first, text, call_id, op_id = 0, len(names), 0, 0
    while not file.full():
        texts, api, ops, ties, kernels, copies = [], [], [], [], [], []
        for number, _, call, begin in launches(first, BLOCK):
            text, call_id, op_id = text + 1, call_id + 2, op_id + 1
            name = number % len(KERNELS) + 2
            texts.append((text, f"{OPS[number % len(OPS)]}, seq = {number}, op_id = {number}"))
            api.append((call_id - 1, 100, 101, call - 2_000, call + 5_000, marker, text))
            api.append((call_id, 100, 101, call, call + 4_000, launch, 1))
            ops.append((op_id, 0, 3, begin, begin + 7_000, name, run, 0, "0x0"))
            ties.append((call_id, op_id, op_id))
            kernels.append((call_id, 128, 1, 1, 256, 1, 1, 1024, "0x55d0c0de0040", 0, "", "", "",
                            1, name))  # fmt: skip
            if number % 5 == 0:
                call_id, op_id = call_id + 1, op_id + 1
                api.append((call_id, 100, 101, call + 4_500, call + 4_900, copied, 1))
                ops.append((op_id, 0, 3, begin + 7_100, begin + 7_500, 1, copy, 0, "0x0"))
                ties.append((call_id, op_id, op_id))
                copies.append((call_id, 4096, 0, "0x55d0c0de0040", 0, 0, 1, "0x7f5500000000",
                               "0x7f5600000000", 0, 0, 0))  # fmt: skip
        for table, rows in (
            ("rocpd_string", texts), ("rocpd_api", api), ("rocpd_op", ops),
            ("rocpd_api_ops", ties), ("rocpd_kernelapi", kernels), ("rocpd_copyapi", copies),
        ):  # fmt: skip
            file.put(table, rows)
        first += BLOCK
    return file.close()


def rocpd(path: Path, megabytes: int, version: int = 3) -> int:
    """The same as rocprofv3 stores it: an event for each range, call and piece of work."""
    extra = {
        "event": ("guid", "parent_stack_id", "correlation_id", "call_stack", "line_info"),
        "region": ("id", "guid", "nid", "extdata"),
        "kernel_dispatch": ("id", "guid", "nid", "dispatch_id", "private_segment_size",
                            "region_name_id", "extdata"),
        "memory_copy": ("id", "guid", "nid", "dst_address", "src_address", "region_name_id",
                        "extdata"),
    }  # fmt: skip
    read = rocpd_tables(version)
    layout = {t: (*n, *extra.get(_bare(t), ())) for t, n in read.items()}
    layout[f"rocpd_arg{GUID}"] = ("id", "guid", "event_id", "position", "type", "name", "value")
    file = GeneratedDatabase(path, megabytes, layout)
    names = [
        "HIP_RUNTIME_API_EXT", "MARKER_CORE_RANGE_API", "KERNEL_DISPATCH", "MEMORY_COPY",
        "hipLaunchKernel", "hipMemcpyAsync", "roctxThreadRangeA", "MEMORY_COPY_HOST_TO_DEVICE",
    ]  # fmt: skip
    hip, marker, dispatch, moved, launch, copied, ranged, copy = range(1, 9)
    guid = GUID[1:].replace("_", "-")
    file.put(f"rocpd_string{GUID}", list(enumerate(names, 1)))
    symbols = [(n, f"{name}.kd", name, 32) for n, name in enumerate(KERNELS, 1)]
    file.put(f"rocpd_info_kernel_symbol{GUID}", symbols)
    file.put(f"rocpd_info_agent{GUID}", [(1, "CPU", 0, "EPYC"), (2, "GPU", 0, "Instinct MI300X")])
    file.put(f"rocpd_info_process{GUID}", [(1, 100, "python train.py")])
    file.put(f"rocpd_info_thread{GUID}", [(1, 101)])
    if version > 3:
        file.put(f"rocpd_track{GUID}", [(1, 1, 1, None, None, None), (2, 1, 1, 2, 1, 3)])
    first, event, call_id, copy_id, stamp = 0, 0, 0, 0, 0
    rows: dict[str, list[tuple[object, ...]]] = {
        t: [] for t in ("event", "region", "kernel_dispatch", "memory_copy", "arg", "timestamp")
    }

    def happened(category: int, stack: int, text: str = "{}") -> int:
        nonlocal event
        event += 1
        rows["event"].append((event, stack, category, text, guid, 0, 0, "{}", "{}"))
        return event

    def when(start: int, end: int, device: bool) -> tuple[object, ...]:
        nonlocal stamp
        if version == 3:
            return (start, end, 1, 1, *((2, 1, 3) if device else ()))
        stamp += 2
        rows["timestamp"] += [(stamp - 1, start), (stamp, end)]
        return (1 + device, stamp - 1, stamp)

    while not file.full():
        for number, _, call, begin in launches(first, BLOCK):
            stack = 3 * number + 1
            text = f"{OPS[number % len(OPS)]}, seq = {number}, op_id = {number}"
            around = happened(marker, stack, json.dumps({"message": text}))
            call_id += 1
            rows["region"].append((*when(call - 2_000, call + 5_000, False), ranged, around,
                                   call_id, guid, 1, "{}"))  # fmt: skip
            called = happened(hip, stack + 1)
            call_id += 1
            rows["region"].append((*when(call, call + 4_000, False), launch, called,
                                   call_id, guid, 1, "{}"))  # fmt: skip
            rows["arg"] += [
                (None, guid, called, n, "const void*", what, "0x7f5500000000")
                for n, what in enumerate(("function_address", "stream"))
            ]
            rows["kernel_dispatch"].append(
                (*when(begin, begin + 7_000, True), number % len(KERNELS) + 1, 1024, 256, 1, 1,
                 32_768, 1, 1, happened(dispatch, stack + 1), number + 1, guid, 1, number, 0, 1,
                 "{}")
            )  # fmt: skip
            if number % 5 == 0:
                called = happened(hip, stack + 2)
                call_id += 1
                rows["region"].append((*when(call + 4_500, call + 4_900, False), copied, called,
                                       call_id, guid, 1, "{}"))  # fmt: skip
                copy_id += 1
                rows["memory_copy"].append(
                    (*when(begin + 7_100, begin + 7_500, True), copy, 4096, 2, 1,
                     happened(moved, stack + 2), copy_id, guid, 1, 0, 0, 1, "{}")
                )  # fmt: skip
        for table, table_rows in rows.items():
            if table_rows:
                file.put(f"rocpd_{table}{GUID}", table_rows)
                table_rows.clear()
        first += BLOCK
    return file.close()


def _bare(table: str) -> str:
    return table.removeprefix("rocpd_").removesuffix(GUID)


# -- what is measured, each in a process of its own ---------------------------------------------


def floor(path: str, tables: Tables) -> int:
    """The same columns, thrown away."""
    db = sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)
    rows = 0
    for table, names in tables.items():
        quoted = ", ".join(f'"{name}"' for name in names)
        cursor = db.execute(f'SELECT {quoted} FROM "{table}"')
        while batch := cursor.fetchmany(BATCH):
            rows += len(batch)
    return rows


def read(path: str) -> int:
    """Our reader, to the joined tables of a Trace."""
    from advisor.read import read_trace

    return read_trace(path).meta.events_read


def measure(subject: str, form: str, path: Path) -> tuple[float, float]:
    """CPU seconds and megabytes of one run."""
    command = [sys.executable, __file__, "--run", subject, form, str(path)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, float(result.stdout.split()[-1])


FORMATS: dict[str, tuple[Callable[[Path, int], int], Tables]] = {
    "nsys": (nsys, NSYS),
    "rpd": (rpd, RPD),
    "rocpd": (rocpd, rocpd_tables(3)),
    "rocpd4": (partial(rocpd, version=4), rocpd_tables(4)),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, nargs="+", default=[100, 300, 1000])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--run", nargs=3)
    arguments = parser.parse_args()
    if arguments.run:
        subject, form, path = arguments.run
        if subject == "floor":
            floor(path, FORMATS[form][1])
        else:
            read(path)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6)
        return
    lines = [
        "| file | rows | floor: sqlite3, the same columns | reading | beside the floor "
        "| memory | beside the file |",
        "|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        for form in arguments.formats:
            for megabytes in arguments.mb:
                path = Path(folder, "big.sqlite")
                path.unlink(missing_ok=True)
                rows = FORMATS[form][0](path, megabytes)
                size = path.stat().st_size / 1e6
                best = {}
                for subject in ("floor", "read"):
                    runs = [measure(subject, form, path) for _ in range(ROUNDS)]
                    best[subject] = min(run[0] for run in runs), max(run[1] for run in runs)
                    time.sleep(0.1)
                (low, _), (read_seconds, memory) = best["floor"], best["read"]
                lines.append(
                    f"| {form}, {size:,.0f} MB | {rows:,} | {low:.1f} s | {read_seconds:.1f} s | "
                    f"{read_seconds / low:.2f} | {memory:,.0f} MB | {memory / size:.2f} |"
                )
                print(lines[-1], flush=True)
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("POLARS_MAX_THREADS", "2")
    os.environ.setdefault(*ALLOCATOR_SETTING)  # as ``advisor analyze`` does
    main()
