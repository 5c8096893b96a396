"""Every format: kernel time by family, device busy, copies and gaps are those that SQL, the
protobuf's fields or the JSON say, each read here without any of our readers.

Only families that a kernel's name makes certain are distinguished; the others count as one."""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import profiler_files
import pytest

from advisor.core.trace import Trace
from advisor.measure import Analysis
from advisor.read import open_run
from tests.read import xspace_writer as xspace


class Work(NamedTuple):
    """A piece of device work; times in ns."""

    device: int
    kind: str
    name: str
    start: float
    end: float
    size: int | None = None


def query_database(path: str, query: str) -> list[Any]:
    with sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True) as db:
        return db.execute(query).fetchall()


def tables(path: str) -> set[str]:
    return {
        name
        for (name,) in query_database(path, "SELECT name FROM sqlite_master WHERE type = 'table'")
    }


# -- what each file says ------------------------------------------------------------------------


def of_nsys(path: str) -> list[Work]:
    result = [
        Work(device, "kernel", name, start, end)
        for device, name, start, end in query_database(
            path,
            "SELECT deviceId, value, start, end FROM CUPTI_ACTIVITY_KIND_KERNEL JOIN StringIds "
            "ON id = demangledName",
        )
    ]
    for table, kind in (("MEMCPY", "memcpy"), ("MEMSET", "memset")):
        if f"CUPTI_ACTIVITY_KIND_{table}" in tables(path):
            rows = query_database(
                path,
                f"SELECT deviceId, start, end, bytes FROM CUPTI_ACTIVITY_KIND_{table}",
            )
            result += [
                Work(device, kind, "", start, end, size) for device, start, end, size in rows
            ]
    return result


def of_rpd(path: str) -> list[Work]:
    sizes = dict(
        query_database(
            path,
            "SELECT op_id, size FROM rocpd_copyapi JOIN rocpd_api_ops ON api_id = api_ptr_id",
        )
    )
    rows = query_database(
        path,
        "SELECT o.id, gpuId, d.string, k.string, start, end FROM rocpd_op o JOIN rocpd_string d "
        "ON d.id = description_id JOIN rocpd_string k ON k.id = opType_id",
    )
    kinds = {"KernelExecution": "kernel", "FillBuffer": "memset"}
    return [
        Work(device, kinds.get(kind, "memcpy"), name, start, end, sizes.get(number))
        for number, device, name, kind, start, end in rows
    ]


def of_rocpd(path: str) -> list[Work]:
    tail = next(name for name in tables(path) if name.startswith("rocpd_info_agent"))[16:]
    joined = "SELECT {what}, {times} FROM 'rocpd_{table}{tail}' w {more}"
    old = "rocpd_timestamp" + tail not in tables(path)
    times = "w.start, w.end" if old else "s.value, e.value"
    more = (
        ""
        if old
        else f"JOIN 'rocpd_timestamp{tail}' s ON s.id = start_id "
        f"JOIN 'rocpd_timestamp{tail}' e ON e.id = end_id "
    )
    name = f"JOIN 'rocpd_info_kernel_symbol{tail}' k ON k.id = kernel_id"
    rows = query_database(
        path,
        joined.format(
            what="k.display_name", times=times, table="kernel_dispatch", tail=tail, more=more + name
        ),
    )
    result = [Work(0, "kernel", *row) for row in rows]
    rows = query_database(
        path, joined.format(what="size", times=times, table="memory_copy", tail=tail, more=more)
    )
    return result + [Work(0, "memcpy", "", start, end, size) for size, start, end in rows]


def of_rocprof(path: str) -> list[Work]:
    (process,) = json.loads(Path(path).read_text())["rocprofiler-sdk-tool"]
    names = {one["kernel_id"]: one["formatted_kernel_name"] for one in process["kernel_symbols"]}
    records = process["buffer_records"]
    work = [
        Work(0, "kernel", names[one["dispatch_info"]["kernel_id"]], one["start_timestamp"],
             one["end_timestamp"])
        for one in records["kernel_dispatch"]
    ]  # fmt: skip
    return work + [
        Work(0, "memcpy", "", one["start_timestamp"], one["end_timestamp"], one["bytes"])
        for one in records["memory_copy"]
    ]


def of_xplane(path: str) -> list[Work]:
    result = []
    data = Path(path).read_bytes()
    data = gzip.decompress(data) if path.endswith(".gz") else data
    for plane, _, name, start, dur, stats in xspace.device_events(data):
        details = stats.get("memcpy_details", "")
        size = int(details.split("size:")[1].split()[0]) if details else None
        kind = "memcpy" if details else "memset" if "memset_details" in stats else "kernel"
        device = int(plane.rpartition(":")[2])
        result.append(Work(device, kind, name, start / 1000, (start + dur) / 1000, size))
    return result


def _write_xplane(folder: Path) -> Path:
    path = folder / "host.xplane.pb"
    path.write_bytes(xspace.jax_training())
    return path


Truth = Callable[[str], list[Work]]
FILES: dict[str, Truth] = {
    "nsys/mfu_2gpu_before.sqlite": of_nsys,
    "nsys/mfu_2gpu_after.sqlite": of_nsys,
    "nsys/ee4fcf3_report1.sqlite": of_nsys,
    "nsys/saxpy-mpi-cuda_nsys_perlmutter0.sqlite": of_nsys,
    "xla/tf_gpu_multi_worker.xplane.pb.gz": of_xplane,
    "rocprof/matmul_result.rpd": of_rpd,
}
"""Files of public projects."""
MADE: dict[str, tuple[Callable[[Path], Path], Truth]] = {
    "nsys 2020": (lambda folder: profiler_files.nsys(folder / "a.sqlite", 2020), of_nsys),
    "nsys 2026": (lambda folder: profiler_files.nsys(folder / "a.sqlite"), of_nsys),
    "rpd": (lambda folder: profiler_files.rpd(folder / "a.rpd"), of_rpd),
    "rocpd 3": (lambda folder: profiler_files.rocpd(folder / "a.db"), of_rocpd),
    "rocpd 4": (lambda folder: profiler_files.rocpd(folder / "a.db", 4), of_rocpd),
    "rocprofv3": (lambda folder: profiler_files.rocprof_json(folder / "a.json"), of_rocprof),
    "xplane": (_write_xplane, of_xplane),
}
"""Files that the tests write."""
SIGNS = {
    "nccl": "communication",
    "flash_fwd": "attention",
    "nvjet": "gemm",
    "sgemm": "gemm",
    "Cijk_": "gemm",
    "layer_norm_kernel": "normalisation",
    "native::reduce_kernel": "reduction",
    "block_reduce_kernel": "reduction",
    "nvfuser_reduction": "reduction",
    "nvfuser_inner_persistent": "reduction",  # what is persistent in nvFuser is a reduction
    "distribution_elementwise": "random",
    "nll_loss": "loss",
    "FillPhilox": "random",
}
"""Parts of a kernel's name that identify its family."""


def family(name: str) -> str:
    return next((family for sign, family in SIGNS.items() if sign in name), "another")


@pytest.fixture(params=[*FILES, *MADE])
def truth_of(
    request: pytest.FixtureRequest, tmp_path: Path, shared_file: Callable[[str], str]
) -> tuple[str, Truth]:
    """A file, and the function that reads it here."""
    if request.param in FILES:
        return shared_file(request.param), FILES[request.param]
    make, truth = MADE[request.param]
    return str(make(tmp_path)), truth


# -- what we say of it --------------------------------------------------------------------------


def without_steps(trace: Trace) -> Analysis:
    """A trace without steps, so that all of the recording counts."""
    return Analysis(replace(trace, meta=replace(trace.meta, format="kineto", step_marks=None)))


def test_families_busy_time_copies_and_gaps_match_sql(
    truth_of: tuple[str, Truth],
) -> None:
    path, truth = truth_of
    work = truth(path)
    run = open_run(path)
    seen = set()
    for rank in run.ranks:
        trace = run.window(rank)
        a = without_steps(trace)
        assert a.steps.source == "whole trace" and a.device_id is not None
        gpu = trace.gpu.with_columns(pl.col("name", "kind").cast(pl.String))
        seen |= set(gpu["device"].to_list())
        on_device = [one for one in work if one.device in set(gpu["device"].to_list())]
        assert gpu.height == len(on_device)
        _families(a, gpu, on_device)
        _copies(gpu, on_device)
        _busy_and_gaps(a, [one for one in on_device if one.device == a.device_id])
    assert seen == {one.device for one in work}


def _families(a: Analysis, gpu: pl.DataFrame, work: list[Work]) -> None:
    expected_ns: dict[tuple[int, str], float] = defaultdict(float)
    for one in work:
        if one.kind == "kernel":
            expected_ns[one.device, family(one.name)] += one.end - one.start
    families = a.kernels["family"].cast(pl.String).to_list()
    known = set(SIGNS.values())
    sums = (
        gpu.with_columns(family=pl.Series([f if f in known else "another" for f in families]))
        .filter(pl.col("kind") == "kernel")
        .group_by("device", "family")
        .agg(pl.col("dur").sum())
    )
    result = {(device, name): float(ns) for device, name, ns in sums.iter_rows()}
    assert result == pytest.approx(dict(expected_ns), rel=1e-3)


def _copies(gpu: pl.DataFrame, work: list[Work]) -> None:
    for kind in ("memcpy", "memset"):
        expected = [one for one in work if one.kind == kind]
        rows = gpu.filter(pl.col("kind") == kind)
        assert rows.height == len(expected)
        assert rows["dur"].sum() == pytest.approx(sum(w.end - w.start for w in expected), rel=1e-3)
        if kind == "memcpy":
            assert rows["bytes"].sum() == sum(one.size or 0 for one in expected)


def _busy_and_gaps(a: Analysis, work: list[Work]) -> None:
    # figures begin with the device's own span: without work launched before the recording
    on_device = (a.trace.gpu["device"] == a.device_id).to_numpy()
    lead = int(a.spans.start[0]) - int(a.trace.gpu["ts"].to_numpy()[on_device].min())
    first = min(one.start for one in work) + max(0, lead)
    assert lead <= 0.05 * a.trace.meta.end_ns
    work = [one for one in work if one.end > first]
    spans: list[list[float]] = []
    for start, end in sorted((max(one.start, first), one.end) for one in work):
        if spans and start <= spans[-1][1]:
            spans[-1][1] = max(spans[-1][1], end)
        else:
            spans.append([start, end])
    busy = sum(end - start for start, end in spans)
    between = sum(after[0] - before[1] for before, after in pairwise(spans))
    assert a.device_busy(on_device).total == pytest.approx(busy, rel=1e-3)
    device_work = a.trace.gpu.filter(on_device)
    inside = a.gaps.filter(
        pl.col("ts").is_between(device_work["ts"].min(), device_work["ts"].max())
    )
    assert int(inside["dur"].sum()) == pytest.approx(between, rel=1e-3)
