"""The reader as a whole: spellings, damage, messages, several processes, limits."""

from __future__ import annotations

import gzip
import io
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest
import zstandard
from polars.testing import assert_frame_equal

from advisor.core import pool as core_pool
from advisor.core.errors import AdvisorError
from advisor.core.trace import CALLS, COPIES, SYNC_KINDS, Trace
from advisor.read import ReadOptions, read_trace, reader
from advisor.read.event_columns import Piece
from advisor.read.formats.kineto import reader as kineto
from advisor.read.registry import read_bytes
from advisor.read.trace_events import call_class, copy_parts, sync_kind
from advisor.testing import TraceBuilder

FRAMES = ("cpu", "gpu", "sync", "memory", "counters", "inputs", "comms", "threads")
SMALL_PIECES = ReadOptions(piece_bytes=3000, parallel_from=0, processes=1)


def loop(steps: int = 3, **options: Any) -> TraceBuilder:
    """A training loop with every kind of event."""
    b = TraceBuilder(rank=2, world_size=8, cuda_sync_rows=True, **options)
    for step in range(steps):
        with b.step():
            b.loader_wait(500)
            b.copy("HtoD", 1 << 20, pinned=step % 2 == 0)
            with b.python("train.py(12): forward"):
                for layer in range(4):
                    with (
                        b.op("aten::linear", [[8, 128], [64, 128]]),
                        b.op("aten::addmm", [[64], [8, 128], [128, 64]], sequence=layer),
                    ):
                        b.launch(f"gemm_{layer}", 30)
            b.collective("allreduce", 4 << 20, 100)
            with b.thread(2000), b.op("aten::mul", [[8, 64]]):
                b.launch("mul", 5, call="cuLaunchKernel")
            b.graph_launch([("a", 3.25), ("b", 4.5)])
            b.memory(512, 512 * (step + 1), 4096)
            b.item()
    return b


def assert_same_traces(one: Trace, two: Trace) -> None:
    for name in FRAMES:
        assert_frame_equal(getattr(one, name), getattr(two, name), categorical_as_str=True)
    assert replace(one.meta, path="") == replace(two.meta, path="")


# -- one trace, written in different ways -------------------------------------------------------


def old_spelling(event: dict[str, Any]) -> dict[str, Any]:
    """An event as profilers wrote it before 2022."""
    categories = {
        "cpu_op": "Operator",
        "kernel": "Kernel",
        "gpu_memcpy": "Memcpy",
        "gpu_memset": "Memset",
        "cuda_runtime": "Runtime",
        "cuda_driver": "Runtime",
    }
    args = dict(event["args"])
    if "External id" in args:
        args["external id"] = args.pop("External id")
    if "Input Dims" in args:
        args["Input dims"] = args.pop("Input Dims")
    if "memory bandwidth (GB/s)" in args:
        args["Memory bandwidth (GB/s)"] = args.pop("memory bandwidth (GB/s)")
    return {**event, "cat": categories.get(event["cat"], event["cat"]), "args": args}


def strings(event: dict[str, Any]) -> dict[str, Any]:
    """An event of tools that keep numbers as text."""

    def text(value: Any) -> Any:
        return str(value) if isinstance(value, int | float) else value

    return {k: text(v) for k, v in event.items() if k != "args"} | {
        "args": {k: text(v) for k, v in event["args"].items()}
    }


def with_float_times(event: dict[str, Any]) -> dict[str, Any]:
    return (
        {**event, "ts": float(event["ts"]), "dur": float(event["dur"])} if "dur" in event else event
    )


@pytest.mark.parametrize("spell", [old_spelling, strings, with_float_times])
def test_other_spellings_of_a_trace_are_the_same_trace(spell: Any) -> None:
    b = loop()
    document = msgspec.json.decode(b.json())
    document["traceEvents"] = [spell(event) for event in document["traceEvents"]]
    expected, trace = b.trace(), read_bytes(json.dumps(document).encode())
    for name in FRAMES:
        if name not in ("inputs", "comms"):  # there the texts differ by white space
            assert_frame_equal(
                getattr(expected, name), getattr(trace, name), categorical_as_str=True
            )
    assert_frame_equal(
        expected.inputs.select(pl.all().str.replace_all(" ", "")),
        trace.inputs.select(pl.all().str.replace_all(" ", "")),
    )


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress])
def test_packings_of_a_trace_are_the_same_trace(pack: Any, tmp_path: Path) -> None:
    b = loop()
    path = tmp_path / "any name"
    path.write_bytes(pack(b.json()))
    assert_same_traces(b.trace(), read_trace(str(path)))


def test_standard_input_is_the_same_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    b = loop()

    class Stdin:
        buffer = io.BytesIO(gzip.compress(b.json()))

    monkeypatch.setattr(sys, "stdin", Stdin)
    assert_same_traces(b.trace(), read_trace("-"))


def test_a_bare_list_of_events_is_the_same_trace_without_a_head() -> None:
    b = loop()
    events = msgspec.json.decode(b.json())["traceEvents"]
    trace = read_bytes(msgspec.json.encode(events))
    for name in FRAMES:
        assert_frame_equal(getattr(b.trace(), name), getattr(trace, name), categorical_as_str=True)
    assert trace.meta.devices == ()
    assert trace.meta.rank is None


def test_the_head_may_come_last() -> None:
    b = loop()
    document = msgspec.json.decode(b.json())
    turned = {"traceEvents": document.pop("traceEvents"), **document}
    assert_same_traces(b.trace(), read_bytes(msgspec.json.encode(turned)))


# -- pieces and processes -----------------------------------------------------------------------


@pytest.mark.parametrize("size", [200, 3000, 50_000])
def test_the_size_of_pieces_changes_nothing(size: int) -> None:
    b = loop(steps=20)
    in_one_piece, pieces = b.trace(), read_bytes(b.json(), options=ReadOptions(piece_bytes=size))
    assert_same_traces(in_one_piece, with_rows_of(in_one_piece, pieces))


def with_rows_of(expected: Trace, trace: Trace) -> Trace:
    """``found`` with its inputs and collectives numbered as in ``expected``: they are numbered as
    they come, and within a piece ops come before ranges."""
    changed: dict[str, pl.DataFrame] = {}
    for code, table in (("inputs", "inputs"), ("comm", "comms")):
        order = [getattr(expected, table).rows().index(row) for row in getattr(trace, table).rows()]
        assert sorted(order) == list(range(getattr(expected, table).height))
        new = pl.Series(order, dtype=pl.Int32)
        for name in ("cpu", "gpu"):
            frame = changed.get(name, getattr(trace, name))
            if code in frame.columns:
                changed[name] = frame.with_columns(new.gather(frame[code]).alias(code))
        changed[table] = getattr(expected, table)
    return Trace(
        **{name: changed.get(name, getattr(trace, name)) for name in FRAMES}, meta=trace.meta
    )


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_several_processes_read_the_same_trace(workers: int) -> None:
    b = loop(steps=40)
    one = read_bytes(b.json(), options=SMALL_PIECES)
    options = ReadOptions(piece_bytes=3000, parallel_from=0, processes=workers)
    assert_same_traces(one, read_bytes(b.json(), options=options))


def test_a_damaged_trace_is_the_same_for_several_processes() -> None:
    text = bytearray(loop(steps=40).json())
    for at in range(5000, len(text), 9001):
        text[at] = 0x22
    one = read_bytes(bytes(text), options=SMALL_PIECES)
    two = ReadOptions(piece_bytes=3000, parallel_from=0, processes=2)
    assert_same_traces(one, read_bytes(bytes(text), options=two))
    assert sum(one.meta.events_dropped.values()) > 0


def test_processes_are_started_when_there_is_enough_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started = []
    original = kineto.decode_all

    def count(pieces: Iterable[bytes], processes: int) -> Iterator[Piece]:
        started.append(processes)
        return original(pieces, processes)

    monkeypatch.setattr(kineto, "decode_all", count)
    text = loop(steps=40).json()
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(text))
    read_trace(str(path), ReadOptions(processes=2, piece_bytes=3000))
    assert started == []
    read_trace(str(path), ReadOptions(processes=2, piece_bytes=3000, parallel_from=len(text)))
    assert started == [2]

    class Stdin:  # its length is not known beforehand
        buffer = io.BytesIO(text)

    monkeypatch.setattr(sys, "stdin", Stdin)
    read_trace("-", ReadOptions(processes=2, piece_bytes=3000, parallel_from=len(text) // 2))
    assert started == [2, 2]


@pytest.mark.parametrize("pieces_before", [0, 1, 5, 30])
def test_a_worker_that_dies_costs_only_its_help(
    pieces_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = loop(steps=60)
    one = read_bytes(b.json(), options=SMALL_PIECES)
    killed: list[int] = []
    pools: list[core_pool.ProcessPool] = []
    start, original = core_pool.ProcessPool.__init__, kineto.decode_all

    def start_worker(self: core_pool.ProcessPool, count: int, **options: Any) -> None:
        start(self, count, **options)
        pools.append(self)

    def decode_and_kill(pieces: Iterable[bytes], processes: int) -> Iterator[Piece]:
        def pieces_until_kill() -> Iterator[bytes]:
            for number, piece in enumerate(pieces):
                if number == pieces_before + 1:
                    while not (pids := pools[-1].pids):
                        time.sleep(0.001)
                    os.kill(pids[0], signal.SIGKILL)
                    killed.append(pids[0])
                yield piece

        return original(pieces_until_kill(), processes)

    monkeypatch.setattr(core_pool.ProcessPool, "__init__", start_worker)
    monkeypatch.setattr(kineto, "decode_all", decode_and_kill)
    for processes in (2, 3):
        options = ReadOptions(piece_bytes=3000, parallel_from=0, processes=processes)
        assert_same_traces(one, read_bytes(b.json(), options=options))
    assert len(killed) == 2


def test_worker_with_invalid_answers_is_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    b = loop(steps=20)
    monkeypatch.setattr(
        core_pool, "_MAIN", "print('hello there', flush=True); import time; time.sleep(5)"
    )
    options = ReadOptions(piece_bytes=3000, parallel_from=0, processes=2)
    assert_same_traces(
        read_bytes(b.json(), options=SMALL_PIECES), read_bytes(b.json(), options=options)
    )


def test_an_answer_too_long_is_decoded_here(monkeypatch: pytest.MonkeyPatch) -> None:
    b = loop(steps=20)
    events = msgspec.json.decode(b.json())["traceEvents"]
    events[50]["args"]["long"] = "x" * 10_000
    text = msgspec.json.encode({"traceEvents": events})
    options = ReadOptions(piece_bytes=3000, parallel_from=0, processes=2)
    monkeypatch.setattr(core_pool, "MAX_ANSWER", 4096)
    assert_same_traces(read_bytes(text, options=SMALL_PIECES), read_bytes(text, options=options))


@pytest.mark.parametrize("executable", ["", "/does/not/exist", "/bin/false"])
def test_a_trace_is_read_in_this_process_when_no_other_can_start(
    executable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = loop(steps=10)
    monkeypatch.setattr(sys, "executable", executable)
    options = ReadOptions(piece_bytes=3000, parallel_from=0, processes=2)
    assert_same_traces(
        read_bytes(b.json(), options=SMALL_PIECES), read_bytes(b.json(), options=options)
    )


def test_no_process_is_left_behind(tmp_path: Path) -> None:
    text = loop(steps=60).json()
    before = children()
    options = ReadOptions(piece_bytes=3000, parallel_from=0, processes=2, max_bytes=len(text) // 2)
    with pytest.raises(AdvisorError, match="--max-size"):
        read_bytes(text, options=options)
    assert children() == before


def children() -> set[int]:
    import psutil

    return {child.pid for child in psutil.Process().children()}


def test_workers_do_not_load_polars() -> None:
    code = "import advisor.read.formats.kineto.decode, sys; print('polars' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True
    )
    assert result.stdout.strip() == "False"


def test_reading_in_a_thread_works() -> None:
    b = loop(steps=10)
    options = ReadOptions(piece_bytes=3000, parallel_from=0, processes=2)
    result: list[Trace] = []
    thread = threading.Thread(target=lambda: result.append(read_bytes(b.json(), options=options)))
    thread.start()
    thread.join()
    assert_same_traces(read_bytes(b.json(), options=SMALL_PIECES), result[0])


def test_progress_is_reported() -> None:
    calls: list[tuple[str, int]] = []
    text = loop(steps=20).json()
    options = ReadOptions(piece_bytes=3000, progress=lambda path, size: calls.append((path, size)))
    read_bytes(text, "name", options)
    assert {path for path, _ in calls} == {"name"}
    assert [size for _, size in calls] == sorted(size for _, size in calls)
    assert calls[-1][1] == len(text)


# -- damage -------------------------------------------------------------------------------------


def test_truncated_file_is_read_and_reported() -> None:
    text = loop().json()
    for cut in range(len(text) - 1, len(text) // 2, -97):
        trace = read_bytes(text[:cut])
        assert trace.meta.truncated
        assert trace.meta.damage is None
        kept = text[:cut].count(b'{"ph":')
        assert trace.meta.events_read in (kept, kept - 1)
        assert trace.cpu.height > 0


def test_truncated_gzip_is_reported() -> None:
    packed = gzip.compress(loop(steps=30).json())
    trace = read_bytes(packed[: len(packed) * 2 // 3])
    assert trace.meta.truncated
    assert trace.meta.damage == "gzip that is cut off"
    assert trace.gpu.height > 10
    assert trace.meta.bytes_read > 5000


def test_sound_file_is_reported_complete() -> None:
    meta = loop().trace().meta
    assert (meta.truncated, meta.damage, meta.events_dropped) == (False, None, {})


def test_nested_lists_of_objects_do_not_confuse_the_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick cut may fall between the objects of a list in ``args``: read again, exactly."""
    events = msgspec.json.decode(loop(steps=30).json())["traceEvents"]
    for event in events:
        if "args" in event:
            event["args"]["kernels"] = [{"name": "a"}, {"name": "b"}, {"args": {"ph": "X"}}] * 3
    text = json.dumps({"traceEvents": events}).encode()
    in_one_piece = read_bytes(text)
    for size in (900, 1500, 4000):
        pieces = read_bytes(text, options=ReadOptions(piece_bytes=size))
        assert pieces.meta.events_dropped == {}
        assert_same_traces(in_one_piece, with_rows_of(in_one_piece, pieces))

    class Stdin:  # it can be read only once, but what was read is kept
        buffer = io.BytesIO(text)

    monkeypatch.setattr(sys, "stdin", Stdin)
    assert_same_traces(
        in_one_piece, with_rows_of(in_one_piece, read_trace("-", ReadOptions(piece_bytes=900)))
    )


def test_one_bad_event_costs_one_event() -> None:
    b = loop(steps=3)
    events = msgspec.json.decode(b.json())["traceEvents"]
    parts = [msgspec.json.encode(event) for event in events]
    for bad in (b'{"ph": "X", "na', b"@", b'{"ph": 01}', b'{"a": "\\q\\', b"{}}"):
        text = b'{"traceEvents": [' + b",".join([*parts[:20], bad, *parts[20:]]) + b"]}"
        trace = read_bytes(text)
        assert len(events) - 2 <= trace.meta.events_read <= len(events), bad
        assert not trace.meta.truncated


# -- messages -----------------------------------------------------------------------------------


def error_message(text: bytes, **options: Any) -> str:
    with pytest.raises(AdvisorError) as caught:
        read_bytes(text, "x", ReadOptions(**options))
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.exit_code == 2
    return message.removeprefix("x: ")


def test_each_kind_of_no_trace_has_a_line_of_its_own() -> None:
    lines = [
        error_message(b""),
        error_message(b" "),
        error_message(b"?"),
        error_message(b"{}"),
        error_message(b"[5]"),
        error_message(b'{"traceEvents": 1}'),
        error_message(b'{"traceEvents": []}'),
        error_message(b'{"traceEvents": ['),
        error_message(b'{"traceEvents": [{"ph": "M", "name": "process_name"}]}'),
        error_message(b'{"trace'),
        error_message("{}".encode("utf-16")),
        error_message(b"SQLite format 3\0..."),
        error_message(b"\x80\x04..."),
        error_message(b"PK\x03\x04..."),
        error_message(b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n"),
    ]
    assert len(set(lines)) == len(lines)
    for line in lines:
        assert 20 < len(line) < 200
        words = (
            "give",
            "record",
            "convert",
            "copy it again",
            "was the profiler",
            "fetch",
            "--help",
        )
        assert any(word in line for word in words), line


def test_a_trace_without_events_is_reported() -> None:
    assert (
        error_message(b'{"traceEvents": []}')
        == "the trace holds no events; was the profiler ever active?"
    )


def test_a_trace_cut_in_its_first_event_is_reported() -> None:
    line = "cut off before its first usable event; copy or record it again"
    assert error_message(b'{"traceEvents": [') == line
    assert error_message(b'{"traceEvents": [{"ph": "X", "cat": "cpu_') == line


def test_a_trace_of_metadata_only_is_reported() -> None:
    metadata = b'{"traceEvents": [{"ph": "M", "name": "process_name", "pid": 1, "args": {}}]}'
    assert error_message(metadata).startswith(
        "none of the trace's 1 events can be used; record it with"
    )


def test_limit_message_names_its_option() -> None:
    text = loop(steps=5).json()
    assert "raise the limit with --max-size" in error_message(gzip.compress(text), max_bytes=1000)
    assert read_bytes(text, options=ReadOptions(max_bytes=len(text))).cpu.height > 0


# -- bombs --------------------------------------------------------------------------------------

BOMBS = {
    "white space": b'{"traceEvents": [' + b" " * (60 << 20),
    "one name": b'{"traceEvents": [{"ph": "X", "name": "' + b"a" * (60 << 20),
    "one list": b'{"traceEvents": [{"ph": "X", "args": {"Input Dims": [' + b"1," * (30 << 20),
    "brackets": b'{"traceEvents": [' + b"[" * (60 << 20),
    "quotes": b'{"traceEvents": [' + b'"' * (60 << 20),
    "backslashes": b'{"traceEvents": ["' + b"\\" * (60 << 20),
    "commas": b"[{}" + b"," * (60 << 20),
    "head": b'{"a": "' + b"x" * (60 << 20),
    "tail": b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "ts": 1, "dur": 1}], "a": "'
    + b"x" * (60 << 20)
    + b'"}',
}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read there")
@pytest.mark.parametrize(
    "kind",
    [
        kind
        if kind in ("one name", "brackets", "tail")
        else pytest.param(kind, marks=pytest.mark.thorough)
        for kind in BOMBS
    ],
)
def test_json_bomb_stays_within_memory_and_time(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "bomb.json.gz"
    with gzip.open(path, "wb", compresslevel=1) as out:
        out.write(BOMBS[kind])
    code = (
        "import sys; from advisor.core.errors import AdvisorError\n"
        "from advisor.read import read_trace\n"
        "try: read_trace(sys.argv[1])\n"
        "except AdvisorError as error: print(error)\n"
        "print(next(x for x in open('/proc/self/status') if x.startswith('VmHWM')).split()[1])"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, check=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime < 60
    peak = int(result.stdout.splitlines()[-1]) * 1024
    assert peak < 400 << 20, peak  # a quarter of that is Python, numpy and polars


def test_a_file_without_a_single_event_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kineto, "MAX_BYTES_WITHOUT_EVENT", 1 << 20)
    assert error_message(b"[{" + b'"ph" 1}, {' * (1 << 18), piece_bytes=1 << 18).startswith(
        "no trace event in its first 1 MB; give"
    )


# -- spellings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("cudaLaunchKernel", "launch"),
        ("cudaLaunchKernelExC", "launch"),
        ("cudaLaunch", "launch"),
        ("cudaLaunchKernel_ptsz_v7000", "launch"),
        ("cudaLaunchKernelExC_v11060", "launch"),
        ("cudaLaunchCooperativeKernel", "launch"),
        ("cuLaunchKernel", "launch"),
        ("cuLaunchKernelEx", "launch"),
        ("cuLaunchCooperativeKernel", "launch"),
        ("hipLaunchKernel", "launch"),
        ("hipExtLaunchKernel", "launch"),
        ("hipModuleLaunchKernel", "launch"),
        ("hipExtModuleLaunchKernel", "launch"),
        ("hipHccModuleLaunchKernel", "launch"),
        ("hipLaunchByPtr", "launch"),
        ("hipLaunchCooperativeKernelMultiDevice", "launch"),
        ("hipModuleLaunchCooperativeKernel", "launch"),
        ("cudaGraphLaunch", "graph_launch"),
        ("cuGraphLaunch", "graph_launch"),
        ("hipGraphLaunch", "graph_launch"),
        ("cudaGraphLaunch_v10000", "graph_launch"),
        ("cudaMemcpyAsync", "memcpy"),
        ("cuMemcpyHtoDAsync_v2", "memcpy"),
        ("cudaMemcpyPeerAsync", "memcpy"),
        ("hipMemcpyAsync", "memcpy"),
        ("cudaMemcpy", "memcpy_blocking"),
        ("cuMemcpyDtoH_v2", "memcpy_blocking"),
        ("hipMemcpyWithStream", "memcpy_blocking"),
        ("cudaMemsetAsync", "memset"),
        ("cuMemsetD8Async", "memset"),
        ("hipMemsetAsync", "memset"),
        ("cudaDeviceSynchronize", "sync_device"),
        ("cuCtxSynchronize", "sync_device"),
        ("hipDeviceSynchronize", "sync_device"),
        ("cudaStreamSynchronize", "sync_stream"),
        ("cudaStreamSynchronize_ptsz", "sync_stream"),
        ("hipStreamSynchronize", "sync_stream"),
        ("cudaEventSynchronize", "sync_event"),
        ("cudaEventRecord", "event_record"),
        ("cudaEventRecordWithFlags", "event_record"),
        ("cudaEventQuery", "event_query"),
        ("cudaStreamQuery", "event_query"),
        ("cudaStreamWaitEvent", "stream_wait"),
        ("cudaMalloc", "malloc"),
        ("cudaMallocAsync", "malloc"),
        ("hipMalloc", "malloc"),
        ("cuMemAlloc_v2", "malloc"),
        ("cuMemCreate", "malloc"),
        ("cuMemMap", "malloc"),
        ("cudaFree", "free"),
        ("hipFree", "free"),
        ("cuMemUnmap", "free"),
        ("cuMemRelease", "free"),
        ("cudaHostAlloc", "host_alloc"),
        ("cudaMallocHost", "host_alloc"),
        ("hipHostMalloc", "host_alloc"),
        ("cuMemHostAlloc", "host_alloc"),
        ("cudaFreeHost", "host_free"),
        ("hipHostFree", "host_free"),
        ("cuMemFreeHost", "host_free"),
        ("cudaStreamBeginCapture", "graph_capture"),
        ("cudaGraphInstantiate", "graph_capture"),
        ("cuModuleLoadData", "module_load"),
        ("cuLibraryLoadData", "module_load"),
        ("cudaStreamIsCapturing", "other"),
        ("cudaGetDevice", "other"),
        ("INVALID", "other"),
        ("cudaFuncSetAttribute", "other"),
        ("cudaLaunchHostFunc", "other"),
        ("", "other"),
        ("my_cudaLaunchKernel", "other"),
        ("cudaMemGetInfo", "other"),
    ],
)
def test_calls_are_identified_by_name(name: str, call: str) -> None:
    assert call_class(name) == call


def test_the_vocabulary_is_the_schemas() -> None:
    for name in ("cudaLaunchKernel", "hipMalloc", "x"):
        assert call_class(name) in CALLS
    for name in ("Memcpy HtoD", "Memcpy DtoA", "x"):
        assert copy_parts(name)[0] in COPIES
    for name in ("Context Sync", "Stream Sync", "Event Sync", "Stream Wait Event"):
        assert sync_kind(name) in SYNC_KINDS


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("Memcpy HtoD (Pageable -> Device)", ("HtoD", "Pageable", "Device")),
        ("Memcpy DtoH (Device -> Pinned)", ("DtoH", "Device", "Pinned")),
        ("Memcpy DtoD (Device -> Device)", ("DtoD", "Device", "Device")),
        ("Memcpy PtoP (Device -> Device)", ("PtoP", "Device", "Device")),
        ("Memcpy HtoH (Pinned -> Pageable)", ("HtoH", "Pinned", "Pageable")),
        ("Memcpy DtoA (Device Static -> Array)", ("DtoD", "Device Static", "Array")),
        ("Memcpy HtoD (Managed -> Device)", ("HtoD", "Managed", "Device")),
        ("Memcpy HtoD (Unknown -> Device)", ("HtoD", None, "Device")),
        ("Memcpy HtoD", ("HtoD", None, None)),
        ("CopyHostToDevice", ("HtoD", None, None)),
        ("Copy Device to Host", ("DtoH", None, None)),
        ("Memcpy", ("other", None, None)),
        ("", ("other", None, None)),
    ],
)
def test_copies_are_identified_by_name(
    name: str, parts: tuple[str, str | None, str | None]
) -> None:
    assert copy_parts(name) == parts


def test_hostile_names_cost_no_time() -> None:
    before = time.thread_time()
    for name in ("cuda" * 100_000, "Memcpy" + " " * 100_000, "(" * 100_000, "_v1" * 100_000):
        call_class(name)
        copy_parts(name)
        sync_kind(name)
    assert time.thread_time() - before < 1


# -- what the head says -------------------------------------------------------------------------


def meta_of(**head: Any) -> Any:
    events = [{"ph": "X", "cat": "cpu_op", "name": "a", "pid": 1, "tid": 1, "ts": 1, "dur": 1}]
    return read_bytes(json.dumps({**head, "traceEvents": events}).encode()).meta


def test_the_head_is_read() -> None:
    meta = loop().trace().meta
    assert (meta.rank, meta.world_size, meta.backend, meta.vendor) == (2, 8, "nccl", "nvidia")
    assert meta.devices[0].sms == 108
    assert meta.devices[0].compute == (8, 0)
    assert meta.profile_memory is meta.record_shapes is meta.with_stack is True
    meta = meta_of(record_shapes=1, with_stack=0, cuda_runtime_version=12040)
    assert (meta.record_shapes, meta.with_stack, meta.cuda_runtime) == (True, False, 12040)


@pytest.mark.parametrize(
    "value", [None, 5, "x", [], [5], {"rank": []}, [{"id": "x"}], True, 1e300, "9" * 5000]
)
def test_malformed_metadata_raises_no_exception(value: Any) -> None:
    meta = meta_of(
        deviceProperties=value,
        distributedInfo=value,
        baseTimeNanoseconds=value,
        record_shapes=value,
        cuda_runtime_version=value,
        with_stack=value,
    )
    assert meta.devices == ()
    assert meta.rank is None
    assert meta.backend is None


@pytest.mark.parametrize("number", [-1, 1 << 31, 1 << 70, None, "x"])
def test_a_device_of_absurd_number_is_left_out(number: Any) -> None:
    """Device numbers are compared with 32-bit columns."""
    properties = [{"id": number, "name": "A100"}, {"id": 1, "name": "A100", "numSms": 1 << 60}]
    meta = meta_of(deviceProperties=properties)
    assert [(device.id, device.sms) for device in meta.devices] == [(1, None)]


@pytest.mark.parametrize(
    ("name", "vendor"),
    [
        ("NVIDIA A100-SXM4-80GB", "nvidia"),
        ("Tesla V100-SXM2-16GB", "nvidia"),
        ("H100", "nvidia"),
        ("GeForce RTX 3090", "nvidia"),
        ("AMD Instinct MI250X", "amd"),
        ("MI300X", "amd"),
        ("AMD Radeon Graphics", "amd"),
        ("Intel(R) Data Center GPU Max 1550", None),
        ("", None),
    ],
)
def test_the_vendor_is_reported_or_not_known(name: str, vendor: str | None) -> None:
    assert meta_of(deviceProperties=[{"id": 0, "name": name}]).vendor == vendor


def test_the_reader_needs_no_main_module_guard(tmp_path: Path) -> None:
    """Processes are started without importing the caller's script again."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys; from advisor.read import ReadOptions, read_trace\n"
        "o = ReadOptions(piece_bytes=3000, parallel_from=0, processes=2)\n"
        "print(read_trace(sys.argv[1], o).cpu.height)\n"
    )
    (tmp_path / "numpy.py").write_text("raise SystemExit('imported from the current folder')")
    path = loop(steps=20).write(tmp_path / "t.json")
    result = subprocess.run(
        [sys.executable, "-P", str(script), str(path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.split() == [str(loop(steps=20).trace().cpu.height)]
    assert result.stderr == ""


def test_options_have_sane_defaults() -> None:
    assert reader.PARALLEL_FROM > 8 * reader.PIECE


def test_memory_is_on_the_device_that_the_kernels_are_on() -> None:
    """A program that sees one of several GPUs calls it 0; the profiler counts all there are."""

    def devices(kernel: int, *memory: int) -> set[int]:
        events: list[dict[str, Any]] = [
            {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 10, "dur": 5, "pid": kernel,
             "tid": 7, "args": {"device": kernel, "stream": 7, "correlation": 1}},
        ]  # fmt: skip
        events += [
            {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": 11 + n, "pid": 1,
             "tid": 1, "s": "t", "args": {"Device Type": 1, "Device Id": device, "Bytes": 512,
             "Addr": 64, "Total Allocated": 512, "Total Reserved": 2048}}
            for n, device in enumerate(memory)
        ]  # fmt: skip
        text = json.dumps({"traceEvents": events}).encode()
        return set(read_bytes(text, "x").memory["device"].to_list())

    assert devices(2, 0, 0) == {2}
    assert devices(2, 2) == {2}
    assert devices(2, 0, 1) == {0, 1}  # which of them is the kernels' device is unknown
