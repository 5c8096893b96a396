"""Measured numbers against an oracle that reads the files itself: plain JSON and SQL, sorted lists
and sums, and none of the product's readers or interval arithmetic."""

from __future__ import annotations

import bisect
import gzip
import json
import re
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from advisor.measure import Analysis
from advisor.read import open_run

CORPUS = Path(__file__).resolve().parents[1] / "corpus"
WITHIN = 0.005
Span = tuple[float, float]


class Work(NamedTuple):
    """A piece of device work; times in ns on the file's clock."""

    kind: str
    """``kernel``, ``communication``, ``copy`` or ``memset``."""
    start: float
    end: float
    device: int
    stream: Any
    bytes: int | None
    called: float | None
    """Start of the launch call on the host; ``None``: not in the file."""
    returned: float | None
    """End of that call."""


class Oracle(NamedTuple):
    """The content of a file, read without the product's readers."""

    work: list[Work]
    steps: list[Span]
    """Ranges that mark steps."""
    optimizer: bool
    """The bounds are the ends of an optimizer's steps instead."""
    host: bool
    """Whether the file has host calls."""


# -- reading ------------------------------------------------------------------------------------

KINDS = {"kernel": "kernel", "gpu_memcpy": "copy", "memcpy": "copy"} | dict.fromkeys(
    ("gpu_memset", "memset"), "memset"
)
CALLS = ("cuda_runtime", "cuda_driver", "hip_runtime", "runtime")


def kind_of(kind: str, name: str) -> str:
    """Communication is a kernel of NCCL or RCCL, or an all-reduce of an engine's own."""
    collective_match = re.search(r"(?i)nccl|rccl|all_?reduce_kernel|cross_device_reduce", name)
    return "communication" if kind == "kernel" and collective_match else kind


def of_kineto(path: Path) -> Oracle:
    data = json.loads(gzip.decompress(path.read_bytes()))
    events = [e for e in (data["traceEvents"] if isinstance(data, dict) else data) if e]
    events = [e for e in events if e.get("ph") == "X" and isinstance(e.get("ts"), int | float)]
    called, steps, optimizers = {}, [], defaultdict(list)
    for e in events:
        category, name = str(e.get("cat", "")).lower(), str(e.get("name"))
        if category in CALLS:
            call = (e["ts"] * 1e3, (e["ts"] + e.get("dur", 0)) * 1e3)
            called[(e.get("args") or {}).get("correlation")] = call
        if category.startswith("gpu") or category in KINDS:
            continue
        span = (e["tid"], e["ts"] * 1e3, (e["ts"] + e.get("dur", 0)) * 1e3)
        if re.match(r"ProfilerStep#\d+$", name):
            steps.append(span)
        elif name.startswith("Optimizer.step#"):
            optimizers[name].append(span)
    work = []
    for e in events:
        kind = KINDS.get(str(e.get("cat", "")).lower())
        if kind is None:
            continue
        args = e.get("args") or {}
        start, end = e["ts"] * 1e3, (e["ts"] + e.get("dur", 0)) * 1e3
        size = args.get("bytes", args.get("Bytes"))
        device, stream = args.get("device", 0), args.get("stream", e.get("tid"))
        call = called.get(args.get("correlation"), (None, None))
        work.append(Work(kind_of(kind, e["name"]), start, end, device, stream, size, *call))
    marks = steps or max(optimizers.values(), key=len, default=[])
    marks = sorted((a, b) for tid, a, b in marks if tid == min(marks, key=lambda m: m[1])[0])
    return Oracle(work, marks, not steps, bool(called))


def of_nsys(path: Path) -> Oracle:
    base = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    tables = {name for (name,) in base.execute("SELECT name FROM sqlite_master")}
    launched = {
        (pid, correlation): (start, end)
        for pid, correlation, start, end in base.execute(
            "SELECT globalTid >> 24, correlationId, start, end FROM CUPTI_ACTIVITY_KIND_RUNTIME"
        )
    }
    work = []
    for table, kind in (("KERNEL", "kernel"), ("MEMCPY", "copy"), ("MEMSET", "memset")):
        table = f"CUPTI_ACTIVITY_KIND_{table}"
        if table not in tables:
            continue
        size = "NULL" if kind == "kernel" else "t.bytes"
        name = "s.value" if kind == "kernel" else "''"
        join = "JOIN StringIds s ON s.id = t.shortName" if kind == "kernel" else ""
        for start, end, device, stream, count, pid, correlation, called in base.execute(
            f"SELECT t.start, t.end, t.deviceId, t.streamId, {size}, t.globalPid >> 24, "
            f"t.correlationId, {name} FROM {table} t {join}"
        ):
            call = launched.get((pid, correlation), (None, None))
            work.append(Work(kind_of(kind, called), start, end, device, stream, count, *call))
    return Oracle(work, [], False, True)


def of_rpd(path: Path) -> Oracle:
    base = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    sizes = dict(
        base.execute(
            "SELECT o.op_id, c.size FROM rocpd_copyapi c "
            "JOIN rocpd_api_ops o ON o.api_id = c.api_ptr_id"
        )
    )
    work = []
    for row, device, queue, start, end, kind, name, *call in base.execute(
        "SELECT o.id, o.gpuId, o.queueId, o.start, o.end, t.string, d.string, a.start, a.end "
        "FROM rocpd_op o JOIN rocpd_string t ON t.id = o.opType_id "
        "JOIN rocpd_string d ON d.id = o.description_id "
        "LEFT JOIN rocpd_api_ops x ON x.op_id = o.id LEFT JOIN rocpd_api a ON a.id = x.api_id"
    ):
        what = "copy" if "Copy" in kind else "memset" if "Fill" in kind else "kernel"
        size = sizes.get(row)
        work.append(Work(kind_of(what, name), start, end, device, queue, size, *call))
    return Oracle(work, [], False, True)


def of_rocprofv3(path: Path) -> Oracle:
    (tool,) = json.loads(gzip.decompress(path.read_bytes()))["rocprofiler-sdk-tool"]
    names = {s["kernel_id"]: s["formatted_kernel_name"] for s in tool["kernel_symbols"]}
    records, work = tool["buffer_records"], []
    for r in records["kernel_dispatch"]:
        info = r["dispatch_info"]
        kind = kind_of("kernel", names[info["kernel_id"]])
        kind = "memset" if "fillBuffer" in names[info["kernel_id"]] else kind
        start, end = r["start_timestamp"], r["end_timestamp"]
        device, queue = info["agent_id"]["handle"], info["queue_id"]["handle"]
        work.append(Work(kind, start, end, device, queue, None, None, None))
    return Oracle(work, [], False, False)


# -- arithmetic ---------------------------------------------------------------------------------


def union_of(spans: Iterable[Span]) -> list[Span]:
    """Union of spans, as disjoint spans."""
    result: list[Span] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((start, end))
    return result


def clip_to(spans: list[Span], window: list[Span]) -> list[Span]:
    """The parts of disjoint spans inside disjoint windows."""
    starts = [start for start, _ in spans]
    return [
        (max(a, low), min(b, high))
        for low, high in window
        for a, b in spans[max(0, bisect.bisect_right(starts, low) - 1) :]
        if a < high and b > low
    ]


def total(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


def measure(work: list[Work], recorded_work: list[Work], window: list[Span]) -> dict[str, float]:
    """Busy and exposed time of all work, ns; counts, times and bytes of what was launched in the
    recording."""
    inside = [
        w
        for w in recorded_work
        if any(w.start < b and max(w.end, w.start + 1) > a for a, b in window)
    ]
    union = {
        kinds: total(clip_to(union_of((w.start, w.end) for w in work if w.kind in kinds), window))
        for kinds in (
            ("kernel",),
            ("kernel", "communication"),
            ("kernel", "communication", "copy"),
            ("kernel", "communication", "copy", "memset"),
        )
    }
    compute, working, copying, busy = union.values()
    result = {
        "span": total(window),
        "busy": busy,
        "exposed communication": working - compute,
        "exposed copies": copying - working,
        "kernels": sum(w.kind in ("kernel", "communication") for w in inside),
        "copies": sum(w.kind == "copy" for w in inside),
        "bytes": sum(w.bytes or 0 for w in inside if w.kind == "copy"),
    }
    for kind in ("kernel", "communication", "copy", "memset"):
        result[f"{kind} time"] = sum(w.end - w.start for w in inside if w.kind == kind)
    return result


# -- what the product says ------------------------------------------------------------------------


def product_measurements(a: Analysis) -> dict[str, float]:
    """The same figures, as the product measures them."""
    parts, gpu = a.breakdown, a.trace.gpu.filter(a.in_window)
    kernels = a.kernels.filter(a.in_window)
    result = {
        "span": a.span_ns,
        "busy": parts.busy.total,
        "exposed communication": parts.communication.total,
        "exposed copies": parts.copies.total,
        "kernels": (gpu["kind"] == "kernel").sum(),
        "copies": (gpu["kind"] == "memcpy").sum(),
        "bytes": gpu.filter(gpu["kind"] == "memcpy")["bytes"].sum() or 0,
    }
    communication = kernels["communication"]
    for name, rows in (
        ("kernel", (gpu["kind"] == "kernel") & ~communication),
        ("communication", communication),
        ("copy", (gpu["kind"] == "memcpy") & ~communication),
        ("memset", gpu["kind"] == "memset"),
    ):
        result[f"{name} time"] = gpu["dur"].filter(rows).sum()
    return {name: float(value) for name, value in result.items()}


# -- the comparison -------------------------------------------------------------------------------


def launched_before_recording(work: list[Work]) -> set[int]:
    """Places of work whose launch is not in the file, before the first of its stream whose is."""
    first: dict[Any, float] = {}
    for w in work:
        if w.called is not None:
            lane = (w.device, w.stream)
            first[lane] = min(first.get(lane, w.start), w.start)
    earliest = min(first.values(), default=0.0)
    return {
        place
        for place, w in enumerate(work)
        if w.called is None and w.start < first.get((w.device, w.stream), earliest)
    }


def windows(oracle: Oracle, work: list[Work], a: Analysis) -> list[Span]:
    """Spans of the steps, used or not; of the device's own work where none is marked."""
    source = a.steps.source
    if source == "whole trace":
        ordered = sorted(work, key=lambda w: w.start)
        begin, until, elapsed = ordered[0].start, ordered[0].end, 0.0
        everything = sum(w.end - w.start for w in ordered)
        for previous, w in pairwise(ordered):
            elapsed, until = elapsed + previous.end - previous.start, max(until, previous.end)
            queued = w.returned is not None and w.start - max(w.returned, until) > 1e6
            if queued and elapsed <= 0.01 * everything:
                begin = w.start
        return [(begin, max(w.end for w in ordered))]
    marks = oracle.steps
    if oracle.optimizer:
        ends = [end for _, end in marks]
        marks = list(pairwise(ends))
    starts = [start for start, _ in marks]
    gaps = sorted(b - a for a, b in pairwise(starts))
    near = 0.5 * gaps[len(gaps) // 2] if gaps else 0.0
    result = [
        (start, following if following - end <= near else end)
        for (start, end), following in zip(marks, [*starts[1:], float("inf")], strict=True)
    ]
    by_step: list[list[Work]] = [[] for _ in result]
    for w in work:
        place = bisect.bisect_right(starts, w.called if w.called is not None else w.start) - 1
        if place >= 0 and (w.called if w.called is not None else w.start) < result[place][1]:
            by_step[place].append(w)
    last = max((w.end for w in by_step[-1]), default=0.0)
    if a.steps.ahead_ns is not None:  # the device's periods
        first = [min(w.start for w in group) for group in by_step]
        return list(zip(first, [*first[1:], last], strict=True))
    if not oracle.optimizer:
        result[-1] = (result[-1][0], max(result[-1][1], last))
    return result


KINETO = sorted(
    str(path.relative_to(CORPUS))
    for path in CORPUS.rglob("*.json.gz")
    if "rocprof" not in str(path)
)
OTHERS: dict[str, Callable[[Path], Oracle]] = {
    "nsys/ee4fcf3_report1.sqlite": of_nsys,
    "nsys/mfu_2gpu_after.sqlite": of_nsys,
    "nsys/mfu_2gpu_before.sqlite": of_nsys,
    "nsys/saxpy-mpi-cuda_nsys_perlmutter0.sqlite": of_nsys,
    "rocprof/matmul_result.rpd": of_rpd,
    "rocprof/rocprofv3_mi350x_training.json.gz": of_rocprofv3,
}


@pytest.mark.parametrize("name", [*KINETO, *OTHERS])
def test_measured_numbers_match_the_raw_file(name: str, shared_file: Callable[[str], str]) -> None:
    path = Path(shared_file(name))
    oracle = OTHERS.get(name, of_kineto)(path)
    run = open_run(str(path), window="first")
    for number in run.ranks:
        a = Analysis(run.window(number))
        if a.device_id is None:
            assert not oracle.work
            continue
        devices: dict[int, float] = defaultdict(float)
        for w in oracle.work:
            devices[w.device] += w.end - w.start
        device = a.device_id if len(run.ranks) > 1 else max(devices, key=lambda d: (devices[d], d))
        work = [w for w in oracle.work if w.device == device]
        before = launched_before_recording(work) if oracle.host else set()
        recorded_work = [w for place, w in enumerate(work) if place not in before]
        if a.steps.source not in ("ProfilerStep", "optimizer", "whole trace"):
            # the oracle does not guess and knows no engines' steps: the same instants
            shift = min(w.start for w in work) - a.trace.gpu["ts"].min()
            used = a.steps.used
            window = [(ts + shift, end + shift) for ts, end in used.select("ts", "end").iter_rows()]
        else:
            spans = windows(oracle, recorded_work, a)
            queue = union_of((work[place].start, work[place].end) for place in before)
            done = queue[-1][1] if queue else 0.0
            first = [(spans[0][0], done)]
            drains = total(clip_to(queue, first)) >= 0.5 * total(first)
            # beside two others or more the host of the first step ran on while that work drained
            has_few_steps = len(spans) < 3
            if (
                has_few_steps
                and drains
                and spans[0][0] < done <= min(w.start for w in recorded_work)
            ):
                spans[0] = (done, spans[0][1])
            durations = a.steps.table["dur"].to_list()
            assert durations == pytest.approx([b - a for a, b in spans], rel=WITHIN, abs=2e3)
            window = [spans[index] for index in a.steps.used["index"]]
        expected = measure(work, recorded_work, union_of(window))
        assert product_measurements(a) == pytest.approx(expected, rel=WITHIN, abs=2e3)
