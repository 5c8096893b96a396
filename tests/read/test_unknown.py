"""Files of other tools that are not read: each is named, with what to do instead."""

from __future__ import annotations

import gzip
import json
import sqlite3
import struct
import tarfile
from pathlib import Path

import pytest

from advisor.core.errors import AdvisorError
from advisor.read import open_run, read_trace
from advisor.read.runs import without_copies

CORPUS = Path(__file__).resolve().parents[1] / "corpus"

SPEEDSCOPE = {
    "$schema": "https://www.speedscope.app/file-format-schema.json",
    "shared": {"frames": [{"name": "main"}]},
    "profiles": [{"type": "evented", "name": "x", "unit": "none", "events": []}],
}
VIZTRACER = {
    "traceEvents": [
        {"ph": "M", "pid": 1, "tid": 1, "name": "process_name", "args": {"name": "MainProcess"}},
        {"pid": 1, "tid": 1, "ts": 5.0, "ph": "X", "cat": "fee", "dur": 3.0, "name": "f (a.py:1)"},
    ],
    "viztracer_metadata": {"version": "1.0.4", "overflow": False},
}
HATCHET = [
    {
        "children": [
            {"children": [], "frame": {"name": "gemm", "type": "function"}, "metrics": {"time": 5}}
        ],
        "frame": {"name": "ROOT", "type": "function"},
        "metrics": {"count": 0},
    },
    {"CUDA": {"0": {"arch": "90"}}},
]
NSYS_OLD = (
    f'{{"data": {json.dumps(["[Unknown]", *["main"] * 900])}}}\n'
    '{"Type": 79, "CudaEvent": {"startNs": "5", "endNs": "6"}}\n'
)
NSYS_NEW = '{"Type":"String","id":1,"Value":"main"}\n{"Type":"NVTX_EVENTS","start":5}\n'
NVPROF = "==4242== NVPROF is profiling process 4242, command: ./a\n==4242== Profiling result:\n"
NVPROF_CSV = '==7== Profiling result:\n"Start","Duration","Grid X"\ns,ms,\n1,2,3\n'
ROCPROF_3 = (
    '"Kind","Agent_Id","Queue_Id","Thread_Id","Dispatch_Id","Kernel_Id","Kernel_Name",'
    '"Correlation_Id","Start_Timestamp","End_Timestamp"\n"KERNEL_DISPATCH",1,1,1,1,1,"k",1,5,9\n'
)
ROCPROF_API = '"Domain","Function","Process_Id","Thread_Id","Correlation_Id","Start_Timestamp"\n'
EVENT = b"\x09\x00\x00\x00\x00\x80\xd4\xd9A\x1a\x0dbrain.Event:2"
TFEVENTS = struct.pack("<Q", len(EVENT)) + b"\1\2\3\4" + EVENT + b"\5\6\7\x08"
PFTRACE = b"\x0a\x0a\x50\x01\x58\x03\xb8\x01\x01\xf0\x01\x02" * 50
TENSORRT_TIMES = [{"startH2dMs": 0, "endH2dMs": 1, "startInMs": 2}]

KNOWN_BY_NAME = ("perfetto", "program")
"""Formats that are recognized by name, unless compressed."""
FILES: dict[str, tuple[str, object, str, str]] = {
    "speedscope": ("a.speedscope.json", SPEEDSCOPE, "speedscope", "torch.profiler"),
    "viztracer": ("result.json", VIZTRACER, "viztracer", "torch.profiler"),
    "proton": ("proton.hatchet", HATCHET, "Proton", "torch.profiler"),
    "nsys, old": ("a.json", NSYS_OLD, "JSON lines of nsys", "--type sqlite"),
    "nsys, new": ("a.jsonl", NSYS_NEW, "JSON lines of nsys", "--type sqlite"),
    "nvprof": ("log.txt", NVPROF, "nvprof", "nsys profile"),
    "nvprof csv": ("log.csv", NVPROF_CSV, "nvprof", "nsys profile"),
    "rocprofv3": ("1_kernel_trace.csv", ROCPROF_3, "rocprof", "rocpd"),
    "rocprofv3 api": ("1_hip_api_trace.csv", ROCPROF_API, "rocprof", "rocpd"),
    "tensorboard": ("events.out.tfevents.1", TFEVENTS, "TensorBoard", ".xplane.pb"),
    "program": ("train.py", b"import torch\n", "a program", "advisor record"),
    "perfetto": ("results.pftrace", PFTRACE, "Perfetto", "rocpd"),
    "tensorrt times": ("times.json", TENSORRT_TIMES, "TensorRT", "--exportProfile"),
    "tensorrt engine": ("net.engine", b"ftrt\0\0\0\1" + bytes(200), "TensorRT", "--exportProfile"),
}


def refusal(path: Path) -> str:
    with pytest.raises(AdvisorError) as caught:
        read_trace(str(path))
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "packed"),
    [
        (kind, packed)
        for kind in FILES
        for packed in (False, True)
        if not packed or kind not in KNOWN_BY_NAME
    ],
)
def test_unknown_formats_are_named_with_a_remedy(kind: str, packed: bool, tmp_path: Path) -> None:
    name, content, what, cure = FILES[kind]
    data = content if isinstance(content, bytes) else (
        content if isinstance(content, str) else json.dumps(content, indent=1)
    ).encode()  # fmt: skip
    path = tmp_path / (f"{name}.gz" if packed else name)
    path.write_bytes(gzip.compress(data) if packed else data)
    line = refusal(path)
    assert what in line and cure in line and "\n" not in line, line


def test_layers_of_tensorrt_without_times_are_named(tmp_path: Path) -> None:
    with tarfile.open(next((CORPUS / "tensorrt").glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    files = [file for file in tmp_path.rglob("*.json") if "graph" in file.name]
    assert len(files) > 3
    for file in files:
        assert "TensorRT" in refusal(file)


def test_a_profile_of_nvprof_is_not_taken_for_one_of_nsys(tmp_path: Path) -> None:
    path = tmp_path / "a.nvvp"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE StringTable (_id_ INTEGER PRIMARY KEY, value TEXT)")
        db.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL (_id_ INTEGER, start INT)")
    db.close()
    line = refusal(path)
    assert "nvprof" in line and "nsys profile" in line


def test_xplane_precedes_its_derived_files(tmp_path: Path) -> None:
    folder = "logs/plugins/profile/2026_01_01"
    xplane, torch = f"{folder}/host0.xplane.pb", f"{folder}/host.1.pt.trace.json"
    copies = [f"{folder}/host0.trace.json.gz", f"{folder}/perfetto_trace.json.gz"]
    assert without_copies([xplane, torch, *copies]) == [xplane, torch]
    assert without_copies([torch, *copies]) == [torch, *copies]
    source = next((CORPUS / "xla").glob("*.xplane.pb.gz"))
    (tmp_path / "host0.xplane.pb").write_bytes(gzip.decompress(source.read_bytes()))
    event = '{"ph":"X","cat":"kernel","name":"k","pid":1,"tid":1,"ts":1,"dur":1}'
    text = f'{{"traceEvents":[{event}]}}'.encode()
    (tmp_path / "perfetto_trace.json.gz").write_bytes(gzip.compress(text))
    run = open_run(tmp_path)
    assert [trace.meta.format for trace in run.traces.values()] == ["xplane"]


def test_a_memory_snapshot_is_read_and_not_refused(tmp_path: Path) -> None:
    from advisor.testing.allocator import FakeAllocator

    allocator = FakeAllocator()
    allocator.alloc(1 << 20)
    trace = read_trace(str(allocator.write(tmp_path / "snapshot.pickle")))
    assert trace.meta.snapshot is not None
