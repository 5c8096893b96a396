"""Speed and memory of reading a large Nsight Systems export, beside the floor.

The floor is ``sqlite3`` reading the same columns of the same tables, 50,000 rows at a time, and
throwing them away. Every figure is a process of its own, start-up and imports included; CPU time is
the best of several runs; memory is the largest resident set, measured apart from the floor's.

The file is written as the exporter lays it out, with what a real export holds beside what we read
(thread scheduling and sampled call chains), in the shares of the public recordings that it was
modelled on: 2 processes of a GPU each, PyTorch's ranges, runtime calls, kernels and copies.

    python benchmarks/bench_nsys.py [--mb 1000] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import os
import resource
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROUNDS = 2
BATCH = 50_000
OPS = ("aten::addmm", "aten::copy_", "aten::native_layer_norm", "aten::mul", "aten::add_")
KERNELS = [
    f"void at::native::elementwise_kernel<128, {n}, Functor{n}>(int, Functor{n})" for n in range(40)
]
TABLES = {
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
"""What our reader reads of the generated file."""


# -- the file -------------------------------------------------------------------------------------


def columns(table: str, more: tuple[str, ...] = ()) -> str:
    return ", ".join(
        f'"{name}" {"TEXT" if name in ("text", "value") else "INTEGER"}'
        for name in (*TABLES.get(table, ()), *more)
    )


def launches(first: int, count: int) -> Iterator[tuple[int, int, int, int]]:
    """Number, process, start of the call and of the kernel."""
    for number in range(first, first + count):
        at = 10**10 + number * 9_000
        yield number, number % 2, at, at + 30_000


def write(path: Path, megabytes: int) -> int:
    """Fill a file up to that size; returns its rows."""
    db = sqlite3.connect(path)
    db.execute("PRAGMA journal_mode = OFF")
    db.execute("PRAGMA synchronous = OFF")
    extra = {
        "CUPTI_ACTIVITY_KIND_KERNEL": (
            "contextId", "greenContextId", "launchType", "cacheConfig", "localMemoryPerThread",
            "localMemoryTotal", "gridId", "sharedMemoryExecuted", "sharedMemoryLimitConfig",
        ),
        "CUPTI_ACTIVITY_KIND_MEMCPY": ("contextId", "srcDeviceId", "dstDeviceId"),
        "CUPTI_ACTIVITY_KIND_RUNTIME": ("eventClass", "returnValue", "callchainId"),
        "NVTX_EVENTS": ("rangeId", "category", "color"),
    }  # fmt: skip
    for table in TABLES:
        db.execute(f"CREATE TABLE {table} ({columns(table, extra.get(table, ()))})")
    db.execute("CREATE TABLE SCHED_EVENTS (start, cpu, isSchedIn, globalTid, threadState)")
    db.execute("CREATE TABLE SAMPLING_CALLCHAINS (id, symbol, module, originalIP, stackDepth)")
    db.execute("CREATE TABLE PROCESSES (globalPid, pid, name)")
    names = [*KERNELS, "cudaLaunchKernel_v7000", "cudaMemcpyAsync_v3020"]
    db.executemany("INSERT INTO StringIds VALUES (?, ?)", enumerate(names, 1))
    pids = [(1 << 48) + (100 + n << 24) for n in range(2)]
    db.executemany(
        "INSERT INTO PROCESSES VALUES (?, ?, ?)",
        [(pid, 100 + n, "python3") for n, pid in enumerate(pids)],
    )
    rows = first = 0
    block = 20_000

    def put(table: str, values: list[tuple[object, ...]]) -> None:
        nonlocal rows
        rows += len(values)
        marks = ", ".join("?" * len(values[0]))
        db.executemany(f"INSERT INTO {table} VALUES ({marks})", values)

    while path.stat().st_size < megabytes * 1_000_000:
        kernels, calls, ranges, copies, sched, chains = [], [], [], [], [], []
        for number, who, call, begin in launches(first, block):
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
        put("CUPTI_ACTIVITY_KIND_KERNEL", kernels)
        put("CUPTI_ACTIVITY_KIND_RUNTIME", calls)
        put("NVTX_EVENTS", ranges)
        put("CUPTI_ACTIVITY_KIND_MEMCPY", copies)
        put("SCHED_EVENTS", sched)
        put("SAMPLING_CALLCHAINS", chains)
        db.commit()
        first += block
    db.close()
    return rows


# -- what is measured, each in a process of its own ---------------------------------------------


def floor(path: str) -> int:
    """The same columns, thrown away."""
    db = sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)
    rows = 0
    for table, names in TABLES.items():
        quoted = ", ".join(f'"{name}"' for name in names)
        cursor = db.execute(f"SELECT {quoted} FROM {table}")
        while batch := cursor.fetchmany(BATCH):
            rows += len(batch)
    return rows


def read(path: str) -> int:
    """Our reader, to the joined tables of a Trace."""
    from advisor.ingest import read_trace

    return read_trace(path).meta.events_read


SUBJECTS = {"floor": floor, "read": read}


def measure(subject: str, path: Path) -> tuple[float, float]:
    """CPU seconds and megabytes of one run."""
    command = [sys.executable, __file__, "--run", subject, str(path)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, nargs="+", default=[100, 300, 1000])
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--run", nargs=2)
    arguments = parser.parse_args()
    if arguments.run:
        subject, path = arguments.run
        SUBJECTS[subject](path)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000)
        return
    lines = [
        "| file | rows | floor: sqlite3, the same columns | reading | beside the floor "
        "| memory | beside the file |",
        "|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        for megabytes in arguments.mb:
            path = Path(folder, "big.sqlite")
            path.unlink(missing_ok=True)
            rows = write(path, megabytes)
            size = path.stat().st_size / 1e6
            best = {}
            for subject in SUBJECTS:
                runs = [measure(subject, path) for _ in range(ROUNDS)]
                best[subject] = min(run[0] for run in runs), max(run[1] for run in runs)
                time.sleep(0.1)
            (low, _), (own, memory) = best["floor"], best["read"]
            lines.append(
                f"| {size:,.0f} MB | {rows:,} | {low:.1f} s | {own:.1f} s | {own / low:.2f} | "
                f"{memory:,.0f} MB | {memory / size:.2f} |"
            )
            print(lines[-1], flush=True)
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("POLARS_MAX_THREADS", "2")
    main()
