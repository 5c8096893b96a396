"""Small files as Nsight Systems and ROCm's profilers write them, of one program.

The program (``PROGRAM``): six iterations of 1 ms, each with a range around it, in which a copy of
1 MB is made from pageable memory and three kernels are launched, and the host then waits. All
times are nanoseconds by hand, so that a reader's answers can be compared with arithmetic.
"""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ITERATIONS, PERIOD = 6, 1_000_000
COPY, KERNELS = 100_000, (50_000, 150_000, 300_000)
BYTES = 1 << 20
NAMES = ("first(float*)", "void second<int>(int)", "third")


@dataclass(frozen=True)
class Call:
    name: str
    start: int
    end: int
    number: int


@dataclass(frozen=True)
class Work:
    name: str
    """Name of the kernel; ``""`` for the copy."""
    start: int
    end: int
    number: int


def program() -> tuple[list[tuple[str, int, int]], list[Call], list[Work]]:
    """Return the ranges, calls and device work of the program."""
    ranges, calls, work = [], [], []
    number = 0
    for iteration in range(ITERATIONS):
        at = 5_000_000 + iteration * PERIOD
        ranges.append((f"iteration {iteration}", at, at + PERIOD - 1_000))
        number += 1
        calls.append(Call("cudaMemcpy", at + 1_000, at + 110_000, number))
        work.append(Work("", at + 5_000, at + 5_000 + COPY, number))
        device = at + 130_000
        for place, (name, length) in enumerate(zip(NAMES, KERNELS, strict=True)):
            number += 1
            launch = at + 112_000 + 5_000 * place
            calls.append(Call("cudaLaunchKernel", launch, launch + 4_000, number))
            work.append(Work(name, device, device + length, number))
            device += length + 10_000
        number += 1
        calls.append(Call("cudaDeviceSynchronize", at + 130_000, device, number))
    return ranges, calls, work


def busy_ns() -> int:
    """Total device time: nothing runs beside anything else."""
    return ITERATIONS * (COPY + sum(KERNELS))


PID, TID = 4_321, 4_321
GLOBAL_PID = (1 << 48) + (PID << 24)


def _table(
    db: sqlite3.Connection,
    name: str,
    columns: str,
    rows: list[tuple[Any, ...]],
    keyed: bool = False,
) -> None:
    """``keyed``: its first column is the number that rows are stored by."""
    first, *others = columns.split(",")
    stored = ",".join([f"{first} INTEGER PRIMARY KEY", *others] if keyed else [first, *others])
    db.execute(f'CREATE TABLE "{name}" ({stored})')
    marks = ", ".join("?" * len(columns.split(",")))
    db.executemany(f'INSERT INTO "{name}" VALUES ({marks})', rows)


def nsys(
    path: Path, year: int = 2026, *, python: bool = False, processes: int = 1, graphs: bool = False
) -> Path:
    """An export with the columns of that year's schema. ``graphs``: the kernels of an iteration
    are one graph, recorded as a whole."""
    ranges, calls, work = program()
    texts = {
        text: place + 1
        for place, text in enumerate(
            {c.name + "_v3020" for c in calls} | set(NAMES) | {r[0] for r in ranges} | {"main"}
        )
    }
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
        db.executemany("INSERT INTO StringIds VALUES (?, ?)", [(n, t) for t, n in texts.items()])
        kernels, copies, called, marked, graphed = [], [], [], [], []
        for place in range(processes):
            pid = GLOBAL_PID + (place << 24)
            tid = pid + PID + place
            for one in work:
                head = (one.start, one.end, place, 1, 7, one.number)
                if not one.name:
                    copies.append((*head, pid, BYTES, 1, 0, 2))
                elif not graphs:
                    kernels.append((*head, pid, texts[one.name], 2, 3, 4, 32, 2, 1, 16))
            for number in range(ITERATIONS) if graphs else ():
                at = 5_000_000 + number * PERIOD + 130_000
                graphed.append((at, at + sum(KERNELS), place, 1, 7, 5 * number + 2, pid, 77))
            called += [
                (c.start, c.end, 1, tid, c.number, texts[c.name + "_v3020"], 0) for c in calls
            ]
            marked += [(s, e, 59, None, texts[t], tid, 0) for t, s, e in ranges]
            marked.append((4_000_000, None, 59, "never ended", None, tid, 0))
        place = "start, end, deviceId, contextId, streamId, correlationId"
        pid_column = ", globalPid" if year > 2020 else ""
        cut = (lambda row: row) if pid_column else (lambda row: (*row[:6], *row[7:]))
        more = "demangledName, gridX, gridY, gridZ, blockX, blockY, blockZ, registersPerThread"
        if kernels:
            rows = [cut(row) for row in kernels]
            _table(db, "CUPTI_ACTIVITY_KIND_KERNEL", f"{place}{pid_column}, {more}", rows)
        if graphed:
            _table(db, "CUPTI_ACTIVITY_KIND_GRAPH_TRACE", f"{place}, globalPid, graphId", graphed)
        kinds = ", srcKind, dstKind"
        rows = [cut(row) for row in copies]
        _table(
            db, "CUPTI_ACTIVITY_KIND_MEMCPY", f"{place}{pid_column}, bytes, copyKind{kinds}", rows
        )
        _table(
            db,
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            "start, end, eventClass, globalTid, correlationId, nameId, returnValue",
            called,
        )
        _table(
            db, "NVTX_EVENTS", "start, end, eventType, text, textId, globalTid, domainId", marked
        )
        _table(db, "PROCESSES", "globalPid, pid, name", [
            (GLOBAL_PID + (n << 24), PID + n, "/usr/bin/python3.12" if python else "./solver")
            for n in range(processes)
        ])  # fmt: skip
        if year > 2020:
            _table(
                db,
                "TARGET_INFO_GPU",
                "id, name, totalMemory, smCount",
                [(n, "NVIDIA A100-SXM4-40GB", 42_297_524_224, 108) for n in range(processes)],
            )
            session = [(1_700_000_000_000_000_000,)]
            _table(db, "TARGET_INFO_SESSION_START_TIME", "utcEpochNs", session)
        _table(db, "TARGET_INFO_SYSTEM_ENV", "name, value", [("TOKEN", "hunter2 /home/jemima")])
    return path


_HIP = {
    "cudaMemcpy": "hipMemcpy",
    "cudaLaunchKernel": "hipLaunchKernel",
    "cudaDeviceSynchronize": "hipDeviceSynchronize",
}


def rocpd(path: Path, version: int = 3, *, keyed: bool = True) -> Path:
    """rocprofv3's database, of schema 3 or 4. Rows are stored by their number, unless somebody
    else copied them: not ``keyed``."""
    ranges, calls, work = program()
    tail = "_0000abcd_1234_5678_9abc_def012345678"
    texts: dict[str, int] = {}
    code = lambda text: texts.setdefault(text, len(texts) + 1)  # noqa: E731
    events: list[tuple[Any, ...]] = []
    times: list[int] = []

    def event(category: str, stack: int, extra: str = "{}") -> int:
        events.append((len(events) + 1, code(category), stack, extra))
        return len(events)

    def add_times(row: dict[str, Any], start: int, end: int, track: int) -> dict[str, Any]:
        if version == 3:
            where = {"pid": 1, "tid": 1, "agent_id": 2, "queue_id": 1, "stream_id": 3}
            return {**row, **where, "start": start, "end": end}
        times.extend((start, end))
        return {**row, "track_id": track, "start_id": len(times) - 1, "end_id": len(times)}

    regions, kernels, copies = [], [], []
    for text, start, end in ranges:
        number = event("MARKER_CORE_API", 10_000 + len(regions), json.dumps({"message": text}))
        row = {"id": len(regions) + 1, "name_id": code("roctxThreadRangeA"), "event_id": number}
        regions.append(add_times(row, start, end, 1))
    for call in calls:
        number = event("HIP_RUNTIME_API", call.number)
        row = {"id": len(regions) + 1, "name_id": code(_HIP[call.name]), "event_id": number}
        regions.append(add_times(row, call.start, call.end, 1))
    for one in work:
        size = {f"{what}_{axis}": 1 for what in ("workgroup_size", "grid_size") for axis in "xyz"}
        if one.name:
            row = {"id": len(kernels) + 1, "kernel_id": NAMES.index(one.name) + 1, **size}
            row |= {"workgroup_size_x": 64, "grid_size_x": 64 * 24, "group_segment_size": 0}
            row["event_id"] = event("KERNEL_DISPATCH", one.number)
            kernels.append(add_times(row, one.start, one.end, 2))
        else:
            row = {"id": len(copies) + 1, "name_id": code("MEMORY_COPY_HOST_TO_DEVICE")}
            row |= {"size": BYTES, "dst_agent_id": 2, "src_agent_id": 1}
            row["event_id"] = event("MEMORY_COPY", one.number)
            copies.append(add_times(row, one.start, one.end, 2))
    with sqlite3.connect(path) as db:
        for name, rows in (
            ("region", regions),
            ("kernel_dispatch", kernels),
            ("memory_copy", copies),
        ):
            columns = ", ".join(f'"{key}"' for key in rows[0])
            _table(db, f"rocpd_{name}{tail}", columns, [tuple(row.values()) for row in rows], keyed)
        _table(db, f"rocpd_string{tail}", "id, string", [(n, t) for t, n in texts.items()], keyed)
        _table(db, f"rocpd_event{tail}", "id, category_id, stack_id, extdata", events, keyed)
        symbols = [(n + 1, name + ".kd", name, 20) for n, name in enumerate(NAMES)]
        columns = "id, kernel_name, display_name, arch_vgpr_count"
        _table(db, f"rocpd_info_kernel_symbol{tail}", columns, symbols, keyed)
        facts = json.dumps({"cu_count": 104, "wave_front_size": 64})
        agents = [(1, "CPU", 0, "EPYC", "{}"), (2, "GPU", 0, "AMD Instinct MI250X", facts)]
        _table(
            db,
            f"rocpd_info_agent{tail}",
            "id, type, type_index, product_name, extdata",
            agents,
            keyed,
        )
        columns = "id, pid, command, environment"
        process = [(1, PID, "./solver --fast", '{"TOKEN": "hunter2"}')]
        _table(db, f"rocpd_info_process{tail}", columns, process, keyed)
        _table(db, f"rocpd_info_thread{tail}", "id, tid", [(1, TID)], keyed)
        if version > 3:
            stamps = [(n + 1, value) for n, value in enumerate(times)]
            _table(db, f"rocpd_timestamp{tail}", "id, value", stamps, keyed)
            tracks = [(1, 1, 1, None, None, None), (2, 1, 1, 2, 1, 3)]
            columns = "id, pid, tid, agent_id, queue_id, stream_id"
            _table(db, f"rocpd_track{tail}", columns, tracks, keyed)
        db.execute(f'CREATE VIEW rocpd_region AS SELECT * FROM "rocpd_region{tail}"')
    return path


def rocprof_json(path: Path) -> Path:
    """Write what ``rocprofv3 --output-format json`` writes."""
    ranges, calls, work = program()
    names = sorted(set(_HIP.values()))
    strings = {
        "buffer_records": [
            {"kind": "NONE", "operations": []},
            {"kind": "HIP_RUNTIME_API", "operations": names},
            {"kind": "MEMORY_COPY", "operations": ["NONE", "MEMORY_COPY_HOST_TO_DEVICE"]},
            {"kind": "MARKER_CORE_API", "operations": ["roctxRangePushA"]},
        ],
        "marker_api": [{"key": 900 + n, "value": text} for n, (text, *_) in enumerate(ranges)],
    }

    def record(kind: int, operation: int, start: int, end: int, number: int, **more: Any) -> Any:
        return {"size": 64, "kind": kind, "operation": operation, "thread_id": TID,
                "correlation_id": {"internal": number, "external": 0},
                "start_timestamp": start, "end_timestamp": end, **more}  # fmt: skip

    size = {"x": 64, "y": 1, "z": 1}
    records = {
        "hip_api": [
            record(1, names.index(_HIP[c.name]), c.start, c.end, c.number) for c in calls
        ],
        "marker_api": [record(3, 0, s, e, 900 + n) for n, (_, s, e) in enumerate(ranges)],
        "memory_copy": [
            record(2, 1, w.start, w.end, w.number, dst_agent_id={"handle": 22},
                   src_agent_id={"handle": 11}, bytes=BYTES)
            for w in work if not w.name
        ],
        "kernel_dispatch": [
            record(0, 0, w.start, w.end, w.number, stream_id={"handle": 3}, dispatch_info={
                "agent_id": {"handle": 22}, "queue_id": {"handle": 1},
                "kernel_id": NAMES.index(w.name) + 1, "workgroup_size": size,
                "grid_size": {"x": 64 * 24, "y": 1, "z": 1}})
            for w in work if w.name
        ],
    }  # fmt: skip
    process = {
        "metadata": {"pid": PID, "command": ["./solver"], "environment": {"TOKEN": "hunter2"}},
        "agents": [
            {"id": {"handle": 11}, "type": 1, "node_id": 0},
            {"id": {"handle": 22}, "type": 2, "node_id": 4, "product_name": "AMD Instinct MI250X",
             "cu_count": 104, "wave_front_size": 64},
        ],
        "kernel_symbols": [
            {"kernel_id": n + 1, "formatted_kernel_name": name} for n, name in enumerate(NAMES)
        ],
        "strings": strings,
        "buffer_records": records,
    }  # fmt: skip
    path.write_text(json.dumps({"rocprofiler-sdk-tool": [process]}))
    return path


def rpd(path: Path, *, keyed: bool = True) -> Path:
    """Write a database of rocmProfileData."""
    ranges, calls, work = program()
    texts: dict[str, int] = {"": 1}
    code = lambda text: texts.setdefault(text, len(texts) + 1)  # noqa: E731
    api = [(c.number, PID, TID, c.start, c.end, code(_HIP[c.name]), 1) for c in calls]
    api += [
        (900 + n, PID, TID, s, e, code("UserMarker"), code(text))
        for n, (text, s, e) in enumerate(ranges)
    ]
    ops = [
        (n + 1, 0, 0, w.start, w.end, code(w.name), code("KernelExecution" if w.name else
                                                         "CopyHostToDevice"))
        for n, w in enumerate(work)
    ]  # fmt: skip
    with sqlite3.connect(path) as db:
        columns = '"id", "pid", "tid", "start", "end", "apiName_id", "args_id"'
        _table(db, "rocpd_api", columns, api, keyed)
        columns = '"id", "gpuId", "queueId", "start", "end", "description_id", "opType_id"'
        _table(db, "rocpd_op", columns, ops, keyed)
        ties = [(n + 1, w.number, n + 1) for n, w in enumerate(work)]
        _table(db, "rocpd_api_ops", "id, api_id, op_id", ties, keyed)
        columns = "api_ptr_id, gridX, gridY, gridZ, workgroupX, workgroupY, workgroupZ"
        _table(
            db,
            "rocpd_kernelapi",
            columns,
            [(w.number, 24, 1, 1, 64, 1, 1) for w in work if w.name],
            keyed,
        )
        _table(
            db,
            "rocpd_copyapi",
            "api_ptr_id, size, pinned",
            [(w.number, BYTES, 0) for w in work if not w.name],
            keyed,
        )
        _table(db, "rocpd_string", "id, string", [(n, t) for t, n in texts.items()], keyed)
        db.execute("CREATE VIEW api AS SELECT * FROM rocpd_api")
    return path
