"""Reports of kernel profilers: every value equal to the file's, by another reading of it."""

from __future__ import annotations

import csv
import gzip
import io
import random
import re
import shutil
import sqlite3
import struct
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from advisor.advise.engine import analyze
from advisor.core.errors import AdvisorError
from advisor.core.kernel_profile import KernelProfiles, ToolAdvice
from advisor.read import open_run
from advisor.read.directory import profile_files
from advisor.read.formats.kernel_profiles.reports import _read_advice, read_kernel_profiles
from advisor.read.formats.kernel_profiles.sampled_lines import lines_of_module
from advisor.read.protobuf import iterate_fields
from advisor.read.registry import read_bytes, read_trace
from advisor.render.formats import REPORTS as FORMATS
from benchmarks.public_traces import path_of

REPORTS = ("cutlass_a100_s4", "cutlass_a100_s8", "sparse_matmul_a10g")


def profiles_of(path: str | Path) -> KernelProfiles:
    trace = read_trace(str(path)).meta.kernel_profiles
    assert trace is not None
    return trace


# -- another reading of Protocol Buffers, with no code of the product ------------------------------


def walk(data: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    at = 0

    def read_varint() -> int:
        nonlocal at
        result = shift = 0
        while True:
            byte = data[at]
            at += 1
            result |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return result

    while at < len(data):
        key = read_varint()
        if key & 7 == 0:
            yield key >> 3, read_varint()
        elif key & 7 == 1:
            at += 8
            yield key >> 3, struct.unpack("<d", data[at - 8 : at])[0]
        elif key & 7 == 5:
            at += 4
            yield key >> 3, struct.unpack("<f", data[at - 4 : at])[0]
        else:
            size = read_varint()
            at += size
            yield key >> 3, data[at - size : at]


def results(data: bytes) -> Iterator[tuple[list[str], bytes]]:
    names: list[str] = []
    at = 8 + struct.unpack_from("<I", data, 4)[0]
    while at < len(data):
        size = struct.unpack_from("<I", data, at)[0]
        head = list(walk(data[at + 4 : at + 4 + size]))
        at += 4 + size
        plain = {number: value for number, value in head if isinstance(value, int)}
        tables = [value for number, value in head if number == 4 and isinstance(value, bytes)]
        for table in tables:
            names += [value.decode() for _, value in walk(table) if isinstance(value, bytes)]
        end = at + plain.get(5, 0)
        for place in range(plain.get(1, 0) + plain.get(2, 0)):
            size = struct.unpack_from("<I", data, at)[0]
            if place >= plain.get(1, 0):
                yield names, data[at + 4 : at + 4 + size]
            at += 4 + size
        assert at == end


@pytest.mark.parametrize("name", REPORTS)
def test_every_metric_of_a_report_is_the_file_s(name: str) -> None:
    path = path_of(f"ncu/{name}.ncu-rep.gz")
    kernels = profiles_of(path).kernels
    items = list(results(gzip.decompress(path.read_bytes())))
    assert len(kernels) == len(items)
    for kernel, (names, message) in zip(kernels, items, strict=True):
        expected: dict[str, object] = {}
        for number, value in walk(message):
            if number == 13:
                fields = dict(walk(value))  # type: ignore[arg-type]
                inner = dict(walk(fields[2])) if 2 in fields else {}  # type: ignore[arg-type]
                for one in inner.values():
                    text = one.decode()[:4096] if isinstance(one, bytes) else float(one)
                    expected[names[fields[1]]] = text  # type: ignore[index]
        assert {metric: each.value for metric, each in kernel.metrics.items()} == expected
        assert kernel.duration_ns == expected["gpu__time_duration.sum"]
        assert kernel.grid is not None and kernel.block is not None
        blocks = kernel.grid[0] * kernel.grid[1] * kernel.grid[2]
        assert blocks == expected["launch__grid_size"]
        threads = kernel.block[0] * kernel.block[1] * kernel.block[2]
        assert threads == expected["launch__block_size"]


def test_every_metric_of_the_details_page_is_the_file_s() -> None:
    path = path_of("ncu/deepseek_ocr_rtx5090.csv.gz")
    kernels = profiles_of(path).kernels
    rows = list(csv.DictReader(io.StringIO(gzip.decompress(path.read_bytes()).decode())))
    by_process: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        by_process.setdefault(row["Process ID"], []).append(row)
    assert len(kernels) == len(by_process) == 20
    scale = {
        "us": 1e3,
        "ms": 1e6,
        "ns": 1.0,
        "Kbyte": 1e3,
        "Mbyte": 1e6,
        "Gbyte/s": 1e9,
        "Ghz": 1e9,
    }
    for kernel, process_rows in zip(kernels, by_process.values(), strict=True):
        written = sorted(
            float(row["Metric Value"].replace(",", "")) * scale.get(row["Metric Unit"], 1.0)
            for row in process_rows
            if row["Metric Name"] and row["Metric Value"] != "n/a"
        )
        read = [each.value for each in kernel.metrics.values() if isinstance(each.value, float)]
        for value in read:
            assert min(abs(value - each) for each in written) <= 1e-6 * max(1.0, abs(value))
        labels = {
            (row["Section Name"], row["Metric Name"]) for row in process_rows if row["Metric Name"]
        }
        # a raw metric and its label of the details page are one
        assert len(labels) - 4 <= len(kernel.metrics) <= len(labels)
        rules = [row for row in process_rows if row["Rule Name"]]
        assert [advice.rule for advice in kernel.advice] == [row["Rule Name"] for row in rules]
        saved = [row["Estimated Speedup"] for row in rules]
        assert [advice.saved for advice in kernel.advice] == [
            pytest.approx(float(each) / 100) if each else None for each in saved
        ]


def test_the_raw_page_is_read_with_its_row_of_units() -> None:
    text = (
        "==PROF== Connected to process 1\n"
        '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream",'
        '"Block Size","Grid Size","Device","CC","dram__bytes_read.sum","gpu__time_duration.sum"\n'
        '"","","","","","","","","","","","Mbyte","usecond"\n'
        '"0","1","python","h","foo(int)","1","7","(128, 1, 1)","(32, 2, 1)","0",'
        '"8.0","1.5","12.25"\n'
    )
    trace = read_bytes(text.encode(), "raw.csv").meta.kernel_profiles
    assert trace is not None
    kernel = trace.kernels[0]
    assert (kernel.grid, kernel.block) == ((32, 2, 1), (128, 1, 1))
    assert kernel.duration_ns == 12_250.0
    assert kernel.number("dram__bytes_read.sum") == 1_500_000.0


@pytest.mark.parametrize(("variant", "published"), [("kernel1", 2.644), ("kernel2", 2.562)])
def test_laplacian_has_its_published_figures(variant: str, published: float) -> None:
    folder = path_of("rocprof/laplacian")
    files = [folder / f"{variant}_{part}.csv.gz" for part in ("data_movement", "results")]
    run = open_run([str(file) for file in files])
    (trace,) = run.traces.values()
    assert trace.meta.kernel_profiles is not None
    kernel = next(k for k in trace.meta.kernel_profiles.kernels if k.name == "laplacian_kernel")
    assert kernel.launches == 1001 and kernel.duration_ns is not None
    assert kernel.duration_ns / 1e6 == pytest.approx(published, rel=0.001)
    with gzip.open(files[0], "rt") as text:
        rows = [row for row in csv.DictReader(text) if row["KernelName"] == "laplacian_kernel"]
    fetched = sum(float(row["FETCH_SIZE"]) for row in rows) / len(rows) * 1024
    assert kernel.number("FETCH_SIZE") == pytest.approx(fetched)
    if variant == "kernel1":  # the authors count what an ideal cache would move, for a grid of 512
        moved = (512**3 - 8 - 3 * 4 * 510 + 510**3) * 8
        assert moved / kernel.duration_ns == pytest.approx(808, rel=0.02)


def test_a_folder_joins_the_counters_of_each_run_with_its_times() -> None:
    folder = path_of("rocprof/laplacian")
    (trace,) = open_run(folder).traces.values()
    assert trace.meta.kernel_profiles is not None
    kernels = trace.meta.kernel_profiles.kernels
    assert len(kernels) == 8
    kernel_by_file = {k.file: k for k in kernels if k.name == "laplacian_kernel"}
    assert sorted(kernel_by_file) == ["kernel1_results", "kernel2_results"]
    for variant in ("kernel1", "kernel2"):
        files = [folder / f"{variant}_{part}.csv.gz" for part in ("data_movement", "results")]
        separate = profiles_of(files[0]), profiles_of(files[1])
        counted, timed = (
            next(k for k in each.kernels if k.name == "laplacian_kernel") for each in separate
        )
        joined = kernel_by_file[f"{variant}_results"]
        assert joined.duration_ns == timed.duration_ns
        assert joined.number("FETCH_SIZE") == counted.number("FETCH_SIZE")
    text = " ".join(FORMATS.render("terminal", analyze(str(folder)), width=120).split())
    assert "kernel1_results 1,001 2.64 ms 2.88 GiB 1,171 GB/s" in text
    assert "kernel2_results 1,001 2.56 ms 2.73 GiB 1,143 GB/s" in text


def test_registers_and_scratch_of_a_launch_are_not_counters() -> None:
    (first, *_) = profiles_of(path_of("rocprof/laplacian/kernel1_results.csv.gz")).kernels
    assert first.metrics == {}


def test_the_database_beside_a_table_repeats_it(tmp_path: Path) -> None:
    (tmp_path / "one_results.csv").write_text(
        "Index,KernelName,grd,wgr,BeginNs,EndNs\n0,k,256,64,10,30\n"
    )
    with sqlite3.connect(tmp_path / "one_results.db") as db:
        db.execute("CREATE TABLE KERN (KernelName TEXT, grd INT, wgr INT, BeginNs INT, EndNs INT)")
        db.execute("INSERT INTO KERN VALUES ('k', 256, 64, 10, 30)")
    (trace,) = open_run(tmp_path).traces.values()
    assert trace.meta.kernel_profiles is not None
    (kernel,) = trace.meta.kernel_profiles.kernels
    assert (kernel.duration_ns, kernel.file) == (20.0, "")


@pytest.mark.parametrize("packed", [False, True])
def test_a_folder_of_tables_alone_is_read(packed: bool, tmp_path: Path) -> None:
    page = gzip.decompress(path_of("ncu/deepseek_ocr_rtx5090.csv.gz").read_bytes())
    name = "kernel_0001__ncu.details.csv"
    if packed:
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(page))
    else:
        (tmp_path / name).write_bytes(page)
    (tmp_path / "analysis__summary.csv").write_text("kernel,limit\na,latency\n")
    run = open_run(tmp_path)
    (trace,) = run.traces.values()
    assert trace.meta.kernel_profiles is not None and not run.problems
    assert len(trace.meta.kernel_profiles.kernels) == 20
    (file,) = profile_files(str(tmp_path))
    assert file.removesuffix(".gz").endswith(name)


def test_folder_without_known_names_is_read_by_content(tmp_path: Path) -> None:
    packed = path_of("memory_timeline.raw.gz")
    (tmp_path / packed.name).write_bytes(packed.read_bytes())
    (tmp_path / "notes.txt").write_text("ran on Tuesday\n")
    (trace,) = open_run(tmp_path).traces.values()
    assert trace.meta.snapshot is not None


@pytest.mark.parametrize("variant", ["kernel1", "kernel2"])
def test_a_database_of_rocprof_has_the_times_of_its_csv(variant: str, tmp_path: Path) -> None:
    text = gzip.decompress(
        (path_of("rocprof/laplacian") / f"{variant}_results.csv.gz").read_bytes()
    )
    head, *rows = list(csv.reader(io.StringIO(text.decode())))
    path = tmp_path / "results.db"
    with sqlite3.connect(path) as db:  # as rocprof writes it: names in quotes
        columns = ", ".join(f'"{name}"' for name in head)
        db.execute(f"CREATE TABLE KERN ({columns})")
        quoted = head.index("KernelName")
        for row in rows:
            row[:] = [int(cell) if cell.isdigit() else cell for cell in row]  # type: ignore[misc]
            row[quoted] = f'"{row[quoted]}"'
        marks = ", ".join("?" * len(head))
        db.executemany(f"INSERT INTO KERN VALUES ({marks})", rows)
    profiles = profiles_of(path)
    plain = profiles_of(path_of(f"rocprof/laplacian/{variant}_results.csv.gz"))
    assert profiles.tool == "rocprof"
    assert [(k.name, k.duration_ns, k.launches, k.grid) for k in profiles.kernels] == [
        (k.name, k.duration_ns, k.launches, k.grid) for k in plain.kernels
    ]
    with sqlite3.connect(path) as db:
        db.execute("DELETE FROM KERN")
    with pytest.raises(AdvisorError, match="without kernels"):
        profiles_of(path)


def test_estimate_in_a_report_is_read_if_present() -> None:
    data = gzip.decompress(path_of("ncu/cutlass_a100_s8.ncu-rep.gz").read_bytes())
    body = b"\x0a\x06\x0a\x04slow"  # item 1: the message
    speedup = b"\x08\x02\x11" + struct.pack("<d", 25.0)  # global, percent
    body += b"\x52" + bytes([len(speedup)]) + speedup  # item 10
    items = b"\x0a" + bytes([len(body)]) + body
    rule = b"\x0a\x04Rule\x1a" + bytes([len(items)]) + items
    (field,) = iterate_fields(b"\x9a\x01" + bytes([len(rule)]) + rule, 0, len(rule) + 3)
    advice = _read_advice(b"\x9a\x01" + bytes([len(rule)]) + rule, field)
    assert advice == ToolAdvice("Rule", "slow", "global", 0.25)
    # files of 2022 and 2024 have none, and none is made up
    (kernel, *_) = read_kernel_profiles(data, "x", "ncu-rep").kernels
    assert kernel.advice and all(each.saved is None for each in kernel.advice)


def test_a_database_of_rocprof_compute_gives_shares_of_peaks() -> None:
    profiles = profiles_of(path_of("rocprof/rocprof_compute_sample.db.gz"))
    assert profiles.tool == "rocprof" and len(profiles.kernels) == 7
    first = profiles.kernels[0]
    assert first.number("System Speed-of-Light/VALU Utilization") == pytest.approx(53.30881699)
    assert first.duration_ns == 227_562.0


def test_samples_of_warps_are_at_lines_of_the_source() -> None:
    tiled, plain = profiles_of(path_of("ncu/cutlass_a100_s8.ncu-rep.gz")).kernels
    for kernel in (tiled, plain):
        assert kernel.samples == kernel.number("smsp__pcsamp_sample_count") > 200
        assert sum(line.samples for line in kernel.lines) <= kernel.samples
    assert sum(line.samples for line in plain.lines) == plain.samples
    # CUTLASS's reference: the sum over K, and where it begins and ends
    assert {(Path(line.file).name, line.line) for line in plain.lines[:3]} == {
        ("s8_gemm.cu", 286), ("s8_gemm.cu", 289), ("s8_gemm.cu", 283),
    }  # fmt: skip
    assert plain.hot_line == plain.lines[0] and plain.lines[0].stall == "lg_throttle"
    assert tiled.hot_line is None  # the multistage loop's largest line has a quarter
    assert (Path(tiled.lines[0].file).name, tiled.lines[0].line) == ("mma_multistage.h", 490)
    without = profiles_of(path_of("ncu/sparse_matmul_a10g.ncu-rep.gz")).kernels[0]
    assert (without.samples, without.lines) == (None, ())


@pytest.mark.skipif(shutil.which("readelf") is None, reason="binutils are not installed")
@pytest.mark.parametrize("name", ["cutlass_a100_s8", "cutlass_a100_s4"])
def test_line_tables_match_readelf(name: str, tmp_path: Path) -> None:
    data = gzip.decompress(path_of(f"ncu/{name}.ncu-rep.gz").read_bytes())
    module = data[data.index(b"\x7fELF") :]
    (tmp_path / "module").write_bytes(module)
    command = ["readelf", "--wide", "--debug-dump=decodedline", str(tmp_path / "module")]
    text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    rows = re.findall(r"^(\S+)\s+(\d+)\s+(0x[0-9a-f]+|0)\b.*x$", text, re.MULTILINE)
    expected = Counter((file, int(line), int(at, 16)) for file, line, at in rows)
    tables = lines_of_module(module).values()
    read_lines = Counter((Path(r.file).name, r.line, r.address) for table in tables for r in table)
    assert len(rows) > 900 and read_lines == expected


def test_a_damaged_module_has_no_lines_or_some() -> None:
    data = gzip.decompress(path_of("ncu/cutlass_a100_s8.ncu-rep.gz").read_bytes())
    module = data[data.index(b"\x7fELF") :][:1_000_000]
    draw = random.Random(3)
    for _ in range(300):
        broken = bytearray(module[: draw.randrange(0, len(module))])
        for _ in range(draw.randrange(1, 60)):
            place = draw.randrange(min(len(broken), draw.choice([80, len(broken)])) or 1)
            broken[place : place + 1] = bytes([draw.randrange(256)])
        assert isinstance(lines_of_module(bytes(broken)), dict)


@pytest.mark.parametrize("name", ["cutlass_a100_s8.ncu-rep.gz", "deepseek_ocr_rtx5090.csv.gz"])
def test_damaged_reports_are_read_in_part_or_refused(name: str) -> None:
    data = gzip.decompress(path_of(f"ncu/{name}").read_bytes())
    draw = random.Random(7)
    for _ in range(120):
        broken = bytearray(data[: draw.randrange(8, len(data))])
        for _ in range(draw.randrange(1, 40)):
            broken[draw.randrange(len(broken))] = draw.randrange(256)
        try:
            trace = read_bytes(bytes(broken), "broken")
        except AdvisorError as error:
            assert "\n" not in str(error)
        else:
            assert trace.meta.kernel_profiles is not None


def test_a_report_of_an_unknown_layout_names_the_export() -> None:
    with pytest.raises(AdvisorError, match="ncu --import FILE --csv"):
        read_bytes(b"NVR\0\x02\0\0\0\x08\x07\xff\xff\xff\x7fgarbage", "new.ncu-rep")


def test_a_folder_without_reports_is_refused(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("a,b\n1,2\n")
    with pytest.raises(AdvisorError, match="no report of a kernel profiler"):
        profile_files(str(tmp_path))
