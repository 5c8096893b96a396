"""Nsight Systems and ROCm: what their files say is what the analysis says, by hand and by SQL."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import profiler_files
import pytest

import advisor
from advisor import cli
from advisor.core.errors import AdvisorError
from advisor.core.finding import Finding
from advisor.core.trace import Trace
from advisor.measure import Analysis
from advisor.read import ReadOptions, open_run, read_trace
from advisor.read.nvtx import framework_of, parse_ranges
from advisor.read.registry import read_bytes
from advisor.rules.memory.unified_memory import UnifiedMemory

Found = Callable[[str], str]
MADE: dict[str, Callable[[Path], Path]] = {
    "nsys 2020": lambda folder: profiler_files.nsys(folder / "a.sqlite", 2020),
    "nsys 2026": lambda folder: profiler_files.nsys(folder / "a.sqlite"),
    "rpd": lambda folder: profiler_files.rpd(folder / "a.rpd"),
    "rocpd 3": lambda folder: profiler_files.rocpd(folder / "a.db"),
    "rocpd 4": lambda folder: profiler_files.rocpd(folder / "a.db", 4),
    "rocprofv3": lambda folder: profiler_files.rocprof_json(folder / "a_results.json"),
}


@pytest.fixture(params=MADE)
def profile(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """The same program, as each profiler writes it."""
    return request.param, MADE[request.param](tmp_path)


# -- one program, written by hand ---------------------------------------------------------------


def test_every_profiler_tells_the_same_program(profile: tuple[str, Path]) -> None:
    name, path = profile
    trace = read_trace(str(path))
    assert trace.meta.format == name.split()[0]
    # RPD does not write which program it was
    assert trace.meta.framework == (None if name == "rpd" else "cuda")
    assert trace.meta.vendor == ("nvidia" if name.startswith("nsys") else "amd")
    iterations = profiler_files.ITERATIONS
    kinds = dict(trace.gpu["kind"].cast(pl.String).value_counts().iter_rows())
    assert kinds == {"kernel": 3 * iterations, "memcpy": iterations}
    assert int(trace.gpu["dur"].sum()) == profiler_files.busy_ns()
    # each piece of work knows the call that caused it, each call the range around it
    assert trace.gpu["launch"].null_count() == 0
    launch = trace.cpu[trace.gpu["launch"]]
    assert launch["correlation"].to_list() == trace.gpu["correlation"].to_list()
    around = trace.cpu[launch["parent"]]["name"].cast(pl.String).to_list()
    assert around == [f"iteration {n // 4}" for n in range(4 * iterations)]
    kernels = trace.gpu.filter(pl.col("kind") == "kernel")
    assert kernels["name"].cast(pl.String)[:3].to_list() == list(profiler_files.NAMES)
    assert set(kernels["blocks"].to_list()) == {24}
    assert set(kernels["threads"].to_list()) == {64}
    copies = trace.gpu.filter(pl.col("kind") == "memcpy")
    assert set(copies["copy"].cast(pl.String).to_list()) == {"HtoD"}
    assert set(copies["bytes"].to_list()) == {profiler_files.BYTES}
    memories = ["Pageable"] if name.startswith("nsys") else []
    assert copies["src"].drop_nulls().cast(pl.String).unique().to_list() == memories


def test_repeated_range_gives_steps_and_figures(profile: tuple[str, Path]) -> None:
    _, path = profile
    report = advisor.analyze(path)
    assert (report.scope.step_source, report.scope.steps_found) == (
        "ranges",
        profiler_files.ITERATIONS,
    )
    assert report.scope.step_ns == pytest.approx(profiler_files.PERIOD, rel=1e-3)
    shares = {part.name: part.ns for part in report.time}
    assert shares["compute"] == pytest.approx(sum(profiler_files.KERNELS), rel=1e-3)
    assert shares["copies"] == pytest.approx(profiler_files.COPY, rel=1e-3)


def test_everything_else_works_on_it(
    profile: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of what-if, export, HTML and redaction works, and none shows the process's
    environment."""
    _, path = profile
    out, page, perfetto = tmp_path / "r.json", tmp_path / "r.html", tmp_path / "p.json"
    assert cli.run(["analyze", str(path), "--redact", "-o", str(out)]) == 0
    assert cli.run(["report", str(path), "--html", str(page)]) == 0
    assert cli.run(["export", str(path), "--perfetto", str(perfetto), "--redact"]) == 0
    assert cli.run(["whatif", str(path), "-e", "scale kernel:third 0.5"]) == 0
    for file in (out, page, perfetto):
        text = file.read_text()
        assert "hunter2" not in text and "jemima" not in text
    restored = read_trace(str(perfetto))
    assert int(restored.gpu["dur"].sum()) == profiler_files.busy_ns()
    # a kernel of 300 us that is twice as fast saves 150 us of each iteration, at most
    result = advisor.whatif(advisor.open(path), ["scale kernel:third 0.5"])
    assert result.edits[0].selected == profiler_files.ITERATIONS
    assert 0 < result.edits[0].gain_ns <= profiler_files.KERNELS[2] // 2
    capsys.readouterr()


def test_a_program_without_a_framework_gets_no_pytorch_advice(profile: tuple[str, Path]) -> None:
    name, path = profile
    report = advisor.analyze(path)
    assert report.findings or report.notes
    for finding in [*report.findings, *report.notes, *report.risks]:
        advice = f"{finding.title} {finding.summary} {finding.fix} {finding.code}"
        for word in ("DataLoader", "torch", "num_workers", "tensor.", "non_blocking", "model"):
            assert word not in advice, finding.rule
        if not name.startswith("nsys"):
            assert "cuda" not in finding.code
    advice = [note for note in report.not_checked if "single-process-loader" in note.rule]
    assert advice == [] or "PyTorch" in advice[0].why
    for line in [*report.limits, *(note.record for note in report.not_checked)]:
        for word in ("profiler.step", "with_stack", "record_shapes", "ProfilerActivity"):
            assert word not in line


def test_packed_and_piped_files_are_read_as_well(profile: tuple[str, Path], tmp_path: Path) -> None:
    _, path = profile
    packed = tmp_path / "packed.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    for trace in (read_trace(str(packed)), read_bytes(path.read_bytes(), "-")):
        assert int(trace.gpu["dur"].sum()) == profiler_files.busy_ns()


# -- what only Nsight Systems has ---------------------------------------------------------------


def test_processes_with_equal_counts_are_ranks(tmp_path: Path) -> None:
    """Correlation numbers begin anew in each process: joined by them alone, work would be tied to
    the other's calls."""
    run = open_run(profiler_files.nsys(tmp_path / "a.sqlite", processes=2))
    assert run.ranks == [0, 1]
    for rank, trace in ((rank, run.window(rank)) for rank in run.ranks):
        assert set(trace.gpu["device"].to_list()) == {rank}
        assert int(trace.gpu["dur"].sum()) == profiler_files.busy_ns()
        threads = trace.cpu["thread"].gather(trace.gpu["launch"]).unique()
        assert trace.threads["pid"].gather(threads).to_list() == [str(profiler_files.PID + rank)]


def test_graph_launches_count_without_recorded_nodes(tmp_path: Path) -> None:
    trace = read_trace(str(profiler_files.nsys(tmp_path / "a.sqlite", graphs=True)))
    assert int(trace.gpu["dur"].sum()) == profiler_files.busy_ns()
    graphs = trace.gpu.filter(pl.col("kind") == "kernel")
    assert set(graphs["name"].cast(pl.String).to_list()) == {"CUDA graph 77"}
    assert set(graphs["graph"].to_list()) == {77}
    assert graphs["launch"].null_count() == 0


def test_endless_ranges_are_counted_and_environment_is_unread(tmp_path: Path) -> None:
    path = profiler_files.nsys(tmp_path / "a.sqlite")
    trace = read_trace(str(path))
    assert trace.meta.events_dropped == {"ranges without an end": 1}
    assert trace.meta.devices[0].name == "NVIDIA A100-SXM4-40GB"
    assert trace.meta.clock == "unix"
    with sqlite3.connect(path) as db:  # if it were looked at, this would be damage
        db.execute("DROP TABLE TARGET_INFO_SYSTEM_ENV")
        db.execute("CREATE TABLE TARGET_INFO_SYSTEM_ENV (name, value)")
    assert read_trace(str(path)).cpu.equals(trace.cpu)


@pytest.mark.parametrize(
    ("pattern", "steps"), [("^iteration [0-3]$", 4), ("iter", profiler_files.ITERATIONS)]
)
def test_steps_may_be_named(tmp_path: Path, pattern: str, steps: int) -> None:
    path = profiler_files.nsys(tmp_path / "a.sqlite")
    trace = read_trace(str(path), ReadOptions(step_ranges=pattern))
    assert Analysis(trace).steps.table.height == steps
    out = tmp_path / "out.json"
    assert cli.run(["analyze", str(path), "--steps", pattern, "-o", str(out)]) == 0
    assert json.loads(out.read_text())["scope"]["steps_found"] == steps


@pytest.mark.parametrize("pattern", ["nothing like it", "iter(", "a:b"])
def test_missing_steps_are_one_line_error(
    tmp_path: Path, pattern: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = profiler_files.nsys(tmp_path / "a.sqlite")
    assert cli.run(["analyze", str(path), "--steps", pattern]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_steps_are_found_from_device_work_without_ranges(tmp_path: Path) -> None:
    path = profiler_files.nsys(tmp_path / "a.sqlite")
    with sqlite3.connect(path) as db:
        db.execute("DROP TABLE NVTX_EVENTS")
    steps = Analysis(read_trace(str(path))).steps
    assert (steps.source, steps.table.height) == ("device sequence", profiler_files.ITERATIONS)
    assert np.diff(steps.table["ts"].to_numpy()).tolist() == [profiler_files.PERIOD] * 5


def test_work_in_no_order_gives_no_steps(tmp_path: Path) -> None:
    path = profiler_files.nsys(tmp_path / "a.sqlite")
    chance = np.random.default_rng(7)
    with sqlite3.connect(path) as db:
        db.execute("DROP TABLE NVTX_EVENTS")
        rows = db.execute("SELECT rowid FROM CUPTI_ACTIVITY_KIND_KERNEL").fetchall()
        for (row,) in rows:
            name = int(chance.integers(1, 9))
            db.execute(
                "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET demangledName = ? WHERE rowid = ?",
                (name, row),
            )
        db.execute("DELETE FROM CUPTI_ACTIVITY_KIND_MEMCPY")
    assert Analysis(read_trace(str(path))).steps.source == "whole trace"


@pytest.mark.parametrize(
    ("text", "name", "kind", "sequence", "dims"),
    [
        ("aten::mm, seq = 7, op_id = 3, sizes = [[8, 4], [4, 2]], input_op_ids = [(1,0)]",
         "aten::mm", "op", 7, "[[8,4],[4,2]]"),
        ("aten::empty", "aten::empty", "op", None, None),
        ("autograd::engine::evaluate_function: MmBackward0, seq = 7, op_id = 9",
         "autograd::engine::evaluate_function: MmBackward0", "op", 7, None),
        ("AddmmBackward0, seq = 12", "AddmmBackward0", "op", 12, None),
        ("FlashAttnFunc, op_id = 4", "FlashAttnFunc", "op", None, None),
        ("Optimizer.step#Adam.step, op_id = 5", "Optimizer.step#Adam.step", "annotation", None,
         None),
        ("FSDP::pre_forward (blocks.3), op_id = 5", "FSDP::pre_forward (blocks.3)", "annotation",
         None, None),
        ("registry.cpp::check<T>", "registry.cpp::check<T>", "annotation", None, None),
        ("step 7", "step 7", "annotation", None, None),
    ],
)  # fmt: skip
def test_ranges_of_pytorch_are_operators(
    text: str, name: str, kind: str, sequence: int | None, dims: str | None
) -> None:
    """The texts are those of ``getNvtxStr`` in PyTorch's torch/csrc/profiler/util.cpp."""
    assert parse_ranges(pl.Series([text, None, text])).row(2) == (name, kind, sequence, dims)


@pytest.mark.parametrize(
    ("names", "programs", "framework"),
    [
        (["saxpy"], ["./saxpy"], "cuda"),
        (["saxpy"], ["/usr/bin/python3.11"], None),
        (["saxpy"], [], None),
        (["void at::native::reduce_kernel<512>"], ["python"], "pytorch"),
        (["XlaModule:#hlo_module=jit_step#"], ["python"], "jax"),
        (["void tensorflow::functor::BiasNHWCKernel<float>"], ["python"], "tensorflow"),
    ],
)
def test_the_framework_of_a_program_is_found(
    names: list[str], programs: list[str], framework: str | None
) -> None:
    assert framework_of(pl.Series(names), programs) == framework


@pytest.mark.parametrize("suffix", [".nsys-rep", ".qdrep"])
def test_report_is_exported_by_nsys_or_shows_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    report = tmp_path / f"run{suffix}"
    report.write_bytes(b"\x8d\0\x01\xff" * 100)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(AdvisorError, match=rf"nsys export --type sqlite run\{suffix}"):
        read_trace(str(report))
    (tmp_path / "made").mkdir()
    database = profiler_files.nsys(tmp_path / "made" / "a.sqlite")
    tool = tmp_path / "bin" / "nsys"
    tool.parent.mkdir()
    # the command as it is called: nsys export --type sqlite --force-overwrite true --output F R
    tool.write_text(
        f'#!/bin/sh\n[ "$1 $2 $3" = "export --type sqlite" ] && /bin/cp {database} "$7"\n'
    )
    tool.chmod(0o755)
    trace = read_trace(str(report))
    assert int(trace.gpu["dur"].sum()) == profiler_files.busy_ns()
    assert trace.meta.path == str(report)
    tool.write_text("#!/bin/sh\necho 'cannot open the report' >&2\nexit 1\n")
    with pytest.raises(AdvisorError, match=r"nsys export failed \(cannot open the report\)"):
        read_trace(str(report))
    shutil.copy(report, database.parent / f"a{suffix}")  # nsys leaves both in a folder
    assert open_run(database.parent).problems == ()


# -- untrusted files ----------------------------------------------------------------------------


def test_views_triggers_and_unusual_values_have_no_effect(tmp_path: Path) -> None:
    path = profiler_files.nsys(tmp_path / "a.sqlite")
    with sqlite3.connect(path) as db:
        db.execute("ALTER TABLE CUPTI_ACTIVITY_KIND_MEMCPY RENAME TO hidden")
        db.execute(
            "CREATE VIEW CUPTI_ACTIVITY_KIND_MEMCPY AS WITH RECURSIVE n(start) AS (SELECT 1 UNION "
            "ALL SELECT start + 1 FROM n) SELECT start, start AS end, 0 AS deviceId FROM n"
        )
        db.execute(
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES "
            "('soon', x'00', 'one', NULL, 1e400, 'x', -1, 'name', 1, 1, 1, 1, 1, 1, 1)"
        )
    before = path.read_bytes()
    trace = read_trace(str(path))
    assert (trace.gpu["kind"] == "kernel").sum() == 3 * profiler_files.ITERATIONS
    assert (trace.gpu["kind"] == "memcpy").sum() == 0
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.sqlite"]


def test_foreign_database_is_one_line_error(tmp_path: Path) -> None:
    path = tmp_path / "notes.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE notes (text)")
    with pytest.raises(
        AdvisorError, match=r"an SQLite file without the tables of a known profiler"
    ):
        read_trace(str(path))


# -- real files, compared with SQL --------------------------------------------------------------


def query_database(path: str, query: str) -> list[Any]:
    with sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True) as db:
        return db.execute(query).fetchall()


def union_of(spans: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The union of spans, one by one."""
    ordered = sorted(spans)
    begin, end = ordered[0]
    for start, stop in ordered[1:]:
        if start > end:
            yield begin, end
            begin, end = start, stop
        else:
            end = max(end, stop)
    yield begin, end


NSYS = {
    "nsys/mfu_2gpu_before.sqlite": 2,
    "nsys/mfu_2gpu_after.sqlite": 2,
    "nsys/ee4fcf3_report1.sqlite": 1,
    "nsys/saxpy-mpi-cuda_nsys_perlmutter0.sqlite": 1,
}


def device_spans(path: str, device: int, *, is_recorded: bool = False) -> list[tuple[int, int]]:
    """Spans of all device work, or of what was launched in the recording."""
    launched = (
        " AND (correlationId, globalPid >> 24) IN "
        "(SELECT correlationId, globalTid >> 24 FROM CUPTI_ACTIVITY_KIND_RUNTIME)"
    )
    tables = {
        name
        for (name,) in query_database(path, "SELECT name FROM sqlite_master WHERE type = 'table'")
    }
    return [
        span
        for table in ("KERNEL", "MEMCPY", "MEMSET")
        if f"CUPTI_ACTIVITY_KIND_{table}" in tables
        for span in query_database(
            path,
            f"SELECT start, end FROM CUPTI_ACTIVITY_KIND_{table} WHERE deviceId = {device}"
            + (launched if is_recorded else ""),
        )
    ]


@pytest.mark.parametrize("name", NSYS)
def test_kernels_copies_busy_time_and_gaps_match_sql(shared_file: Found, name: str) -> None:
    path = shared_file(name)
    run = open_run(path)
    assert len(run.ranks) == NSYS[name]
    for number, rank in enumerate(run.ranks):
        trace = run.window(rank)
        device = int(trace.gpu["device"][0])
        assert device == number
        sql_rows = query_database(
            path,
            "SELECT count(*), sum(end - start) FROM CUPTI_ACTIVITY_KIND_KERNEL "
            f"WHERE deviceId = {device}",
        )[0]
        kernels = trace.gpu.filter(pl.col("kind") == "kernel")
        assert (kernels.height, int(kernels["dur"].sum())) == sql_rows
        by_name = dict(
            query_database(
                path,
                "SELECT value, sum(end - start) FROM CUPTI_ACTIVITY_KIND_KERNEL JOIN StringIds ON "
                f"id = demangledName WHERE deviceId = {device} GROUP BY value",
            )
        )
        result = kernels.group_by(pl.col("name").cast(pl.String)).agg(pl.col("dur").sum())
        assert dict(result.iter_rows()) == by_name
        copies = query_database(
            path,
            "SELECT count(*), sum(bytes), sum(end - start) FROM CUPTI_ACTIVITY_KIND_MEMCPY "
            f"WHERE deviceId = {device}",
        )[0]
        read_copies = trace.gpu.filter(pl.col("kind") == "memcpy")
        assert (
            read_copies.height,
            int(read_copies["bytes"].sum()),
            int(read_copies["dur"].sum()),
        ) == copies
        launched = list(union_of(device_spans(path, device, is_recorded=True)))
        busy = sum(end - start for start, end in launched)
        spans = union_of(device_spans(path, device))
        first = launched[0][0]
        gaps = [b[0] - max(a[1], first) for a, b in pairwise(spans) if b[0] > first]
        a = Analysis(_without_steps(trace))
        assert a.device_busy(a.in_window).total == pytest.approx(busy, rel=1e-3)
        inside = a.gaps.filter(pl.col("ts").is_between(*_launch_range(trace)))
        assert int(inside["dur"].sum()) == pytest.approx(sum(gaps), rel=1e-3)


def _launch_range(trace: Trace) -> tuple[int, int]:
    """First start and last start of device work."""
    return int(trace.gpu["ts"][0]), int(trace.gpu["ts"][-1])


def _without_steps(trace: Trace) -> Trace:
    """A trace without steps: all of it counts."""
    from dataclasses import replace

    meta = replace(trace.meta, format="kineto")
    host = trace.cpu.filter(~pl.col("name").cast(pl.String).str.starts_with("ProfilerStep"))
    assert host.height == trace.cpu.height
    return replace(trace, meta=meta)


def test_families_add_up_to_the_kernels_of_sql(shared_file: Found) -> None:
    path = shared_file("nsys/mfu_2gpu_after.sqlite")
    report = advisor.analyze(path)
    trace = open_run(path, rank=0).window(0)
    sql_rows = query_database(
        path,
        "SELECT sum(end - start) FROM CUPTI_ACTIVITY_KIND_KERNEL JOIN StringIds ON id = "
        "demangledName WHERE deviceId = 0 AND value LIKE '%flash%'",
    )[0][0]
    attention = next(family.ns for family in report.families if family.name == "attention")
    # the steps are 15 of the blocks of 300 ms; work of before them belongs to none
    earlier = trace.gpu.filter(pl.col("launch").is_null())["dur"].sum()
    assert sql_rows - 2 * earlier <= attention * report.scope.steps_used <= sql_rows


def test_cpu_samples_and_mpi_ranges_say_why_the_gpu_idles(
    shared_file: Found,
) -> None:
    """Counted in the database: MPI ranges and samples, by leaf, that lie in the time without GPU
    work, of the four repetitions from the first copy of one to the next."""
    path = shared_file("nsys/saxpy-mpi-cuda_nsys_perlmutter0.sqlite")
    report = advisor.analyze(path)
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
        work = "SELECT start, end FROM CUPTI_ACTIVITY_KIND_{}"
        busy = sorted(row for name in ("MEMCPY", "KERNEL") for row in db.execute(work.format(name)))
        mpi = db.execute(
            "SELECT start, end FROM NVTX_EVENTS WHERE eventType = 59 AND domainId != 0 AND end > 0"
        ).fetchall()
        samples = db.execute(
            "SELECT e.start, s.value FROM COMPOSITE_EVENTS e JOIN SAMPLING_CALLCHAINS c ON "
            "c.id = e.id AND c.stackDepth = 0 JOIN StringIds s ON s.id = c.symbol"
        ).fetchall()
    gaps = [
        (before[1], after[0])
        for before, after in pairwise(busy)
        if after[0] - before[1] > 100_000_000
    ]
    assert len(gaps) == 4
    in_mpi = sum(
        max(0, min(end, stop) - max(begin, start)) for begin, end in gaps for start, stop in mpi
    )
    leaves = Counter(
        name for ts, name in samples if any(a < ts < b for a, b in gaps)
        and not any(a < ts < b for a, b in mpi)
    )  # fmt: skip
    idle = {part.cause: part for part in report.idle}
    assert "unknown" not in idle or idle["unknown"].share < 0.005
    assert idle["communication"].ns * 4 == pytest.approx(in_mpi, rel=0.02)
    first, second = idle["host_code"].functions
    assert [first.name, second.name] == [name for name, _ in leaves.most_common(2)]
    assert first.share / second.share == pytest.approx(
        leaves["main"] / leaves["std::abs(double)"], rel=0.05
    )
    assert re.search(
        r"The GPU idles for 5\d% of the repetition during the program's CPU", report.verdict
    )
    assert "does not show" not in report.verdict
    (copies,) = [f for f in report.findings if f.rule == "pageable-copies"]
    assert copies.summary.startswith("3 copies, 750 MiB in all, through pageable")


def test_a_program_in_c_is_bound_by_its_transfers(shared_file: Found) -> None:
    """285 ms of copies against 89 ms of kernels, in five rounds."""
    path = shared_file("nsys/saxpy-mpi-cuda_nsys_perlmutter0.sqlite")
    report = advisor.analyze(path)
    assert report.scope.steps_found == 5
    # 8 calls of MPI_Send of 11.1 ms lie in the rounds, and 4 of MPI_Recv of 84.7 ms together
    # of the last one the end is not recorded: when the next would have begun
    assert (report.scope.steps_used, report.per) == (4, "repetition")
    shares = {one.name: one.share * 4 * report.scope.step_ns for one in report.ranges}
    assert shares["MPI:MPI_Send"] == pytest.approx(88.85e6, rel=1e-3)
    assert shares["MPI:MPI_Recv"] == pytest.approx(84.75e6, rel=1e-3)
    copies = next(part.ns for part in report.time if part.name == "copies")
    kernels = next(part.ns for part in report.time if part.name == "compute")
    assert 5 * copies == pytest.approx(284.7e6, rel=5e-3)
    assert 5 * kernels == pytest.approx(88.573e6, rel=5e-3)
    result = {finding.rule: finding for finding in report.findings}
    assert list(result) == ["pageable-copies"]  # results are fetched: no values that are read
    seen = {each.label: each.value for each in result["pageable-copies"].evidence}
    assert 5 * seen["exposed copy time"] == pytest.approx(284.7e6, rel=5e-3)
    assert "exposed copy time" in report.verdict
    assert "cudaHostAlloc" in result["pageable-copies"].code
    assert "cudaMemcpyAsync" in result["pageable-copies"].code
    assert "on the GPU" in result["pageable-copies"].fix
    report_text = report.to_json() if hasattr(report, "to_json") else repr(report)
    assert "DataLoader(" not in str(report_text)


def test_file_without_device_work_is_one_line_error(shared_file: Found) -> None:
    report = advisor.analyze(shared_file("nsys/209de58_baseline.sqlite"))
    assert report.verdict.startswith(
        "No GPU work was recorded. The machine has an NVIDIA TITAN RTX, but"
    )
    assert "on a machine with a GPU" not in report.verdict
    assert not report.findings


def test_ranges_alone_give_steps_and_their_parts(shared_file: Found) -> None:
    """304 rounds of six ranges, one behind the other."""
    path = shared_file("nsys/209de58_baseline.sqlite")
    report = advisor.analyze(path)
    sql_rows = dict(
        query_database(
            path,
            "SELECT value, sum(end - start) FROM NVTX_EVENTS JOIN StringIds ON id = textId "
            "GROUP BY value",
        )
    )
    scope, first, last = (
        report.scope,
        *query_database(path, "SELECT min(start), max(end) FROM NVTX_EVENTS")[0],
    )
    assert (scope.step_source, scope.steps_found) == ("ranges", 304)
    assert scope.step_ns == pytest.approx((last - first) / 304, rel=0.01)  # one set aside
    assert "find_centers: 51% of a 131 ms" in report.verdict
    shares = {one.name: one.share for one in report.ranges}
    assert shares == pytest.approx({k: ns / (last - first) for k, ns in sql_rows.items()}, rel=0.02)


def test_rounds_are_whole_and_chance_repetition_is_no_round(
    tmp_path: Path,
) -> None:
    def steps(names: str) -> list[tuple[str, int]]:
        path = tmp_path / f"{names}.sqlite"
        profiler_files.nsys(path)
        with sqlite3.connect(path) as db:
            for table in ("KERNEL", "MEMCPY", "RUNTIME"):
                db.execute(f"DELETE FROM CUPTI_ACTIVITY_KIND_{table}")
            (thread,) = db.execute("SELECT globalTid FROM NVTX_EVENTS").fetchone()
            db.execute("DELETE FROM NVTX_EVENTS")
            db.executemany(
                "INSERT INTO NVTX_EVENTS (start, end, eventType, text, globalTid, domainId) "
                "VALUES (?, ?, 59, ?, ?, 0)",
                [(n * 1000, n * 1000 + 900, name, thread) for n, name in enumerate(names)],
            )
        analysis = Analysis(read_trace(str(path))).steps
        assert analysis.source in ("ranges", "whole trace")
        return (
            []
            if analysis.source == "whole trace"
            else list(analysis.table["name", "dur"].iter_rows())
        )

    assert steps("abcabcabcabc") == [(f"round {n}", 2900 + 100 * (n < 4)) for n in range(1, 5)]
    # "ab" begin the last round, which the recording cuts off
    assert steps("abcabcabcabcab") == [(f"round {n}", 3000) for n in range(1, 5)]
    assert [dur for _, dur in steps("abacabacabacabac")] == [4000, 4000, 4000]
    assert steps("abcacbbacbca") == []


def test_two_recordings_are_compared(
    shared_file: Found, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both files hold 300 ms out of the middle of an iteration: 17 and 15 blocks of the model, so
    that a block takes 17.0 ms in the first and 19.9 ms in the second, by the median distance
    of the kernels of which there is one a block."""
    paths = [shared_file(f"nsys/mfu_2gpu_{which}.sqlite") for which in ("before", "after")]
    blocks: list[list[float]] = []
    for path in paths:
        starts = [
            start
            for (start,) in query_database(
                path,
                "SELECT start FROM CUPTI_ACTIVITY_KIND_KERNEL JOIN StringIds ON id = shortName "
                "WHERE deviceId = 0 AND value LIKE 'nvjet_tst_192x208%' ORDER BY start",
            )
        ]
        gaps = np.diff(starts)
        blocks.append(sorted((float(np.median(gaps)), float(np.mean(gaps)))))
        step = advisor.analyze(path).scope.step_ns
        assert 0.97 * blocks[-1][0] <= step <= 1.03 * blocks[-1][1]
    out = tmp_path / "out.json"
    assert cli.run(["compare", *paths, "--format", "json", "-o", str(out)]) == 0
    comparison = json.loads(out.read_text())
    assert comparison["verdict"].startswith("GPU work repeats every 17.4 ms → 19.9 ms")
    assert "step times are not compared: nothing marks the steps" in comparison["verdict"]
    assert "slower" not in comparison["verdict"] and "interval" not in comparison["verdict"]
    assert comparison["steps"]["verdict"] == "not measured"  # of an iteration nothing is known
    capsys.readouterr()


def test_rpd_figures_match_sql(shared_file: Found) -> None:
    path = shared_file("rocprof/matmul_result.rpd")
    trace = read_trace(path)
    sql_rows = dict(
        query_database(
            path,
            "SELECT string, sum(end - start) FROM rocpd_op JOIN rocpd_string s ON s.id = opType_id "
            "GROUP BY string",
        )
    )
    result = trace.gpu.group_by(pl.col("kind").cast(pl.String)).agg(pl.col("dur").sum())
    assert dict(result.iter_rows()) == {
        "kernel": sql_rows["KernelExecution"],
        "memcpy": sql_rows["CopyHostToDevice"] + sql_rows["CopyDeviceToHost"],
        "memset": sql_rows["FillBuffer"],
    }
    assert trace.gpu["launch"].null_count() == 0
    size = query_database(path, "SELECT sum(size) FROM rocpd_copyapi")[0][0]
    assert int(trace.gpu["bytes"].sum()) == size
    assert trace.meta.framework == "pytorch"
    assert trace.counters.height == 15


def test_unified_memory_migrations_and_faults_are_read(tmp_path: Path) -> None:
    # as NVIDIA's schema reference has the tables: no real file with migrations was at hand
    path = profiler_files.nsys(tmp_path / "a.sqlite")
    _, _, work = profiler_files.program()
    kernels = [each for each in work if each.name == profiler_files.NAMES[2]]
    with sqlite3.connect(path) as db:
        db.execute("ALTER TABLE CUPTI_ACTIVITY_KIND_MEMCPY ADD COLUMN migrationCause INTEGER")
        columns = "start, end, deviceId, contextId, streamId, correlationId, globalPid, bytes, "
        columns += "copyKind, srcKind, dstKind, migrationCause"
        pid = profiler_files.GLOBAL_PID
        for kernel in kernels:  # 300 us, of which 200 beside pages that come on demand
            for begin, cause in ((kernel.start + 50_000, 2), (kernel.start - 500_000, 1)):
                row = (begin, begin + 200_000, 0, 1, 0, 0, pid, 1 << 20, 11, 4, 2, cause)
                marks = ", ".join("?" * len(row))
                db.execute(
                    f"INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY ({columns}) VALUES ({marks})", row
                )
        db.execute(
            "CREATE TABLE CUDA_UM_GPU_PAGE_FAULT_EVENTS (start, end, globalPid, deviceId, address, "
            "numberOfPageFaults, faultAccessType)"
        )
        db.execute(
            "CREATE TABLE CUDA_UM_CPU_PAGE_FAULT_EVENTS (start, globalPid, address, "
            "originalFaultPc, CpuInstruction, module, unresolvedFaultPc)"
        )
        for kernel in kernels:
            fault = (kernel.start + 40_000, kernel.start + 50_000, pid, 0, 4096, 7, 1)
            db.execute("INSERT INTO CUDA_UM_GPU_PAGE_FAULT_EVENTS VALUES (?,?,?,?,?,?,?)", fault)
        host = (kernels[0].start, pid, 4096, None, 1, 1, None)
        db.execute("INSERT INTO CUDA_UM_CPU_PAGE_FAULT_EVENTS VALUES (?,?,?,?,?,?,?)", host)
    trace = read_trace(str(path))
    names = trace.gpu["name"].cast(pl.String).value_counts().rows()
    assert ("Memcpy HtoD (Managed -> Device) page fault", len(kernels)) in names
    assert ("Memcpy HtoD (Managed -> Device) user prefetch", len(kernels)) in names
    faults = trace.counters.group_by(pl.col("name").cast(pl.String)).agg(pl.col("value").sum())
    assert dict(faults.rows()) == {"GPU page faults": 7 * len(kernels), "CPU page faults": 1}
    a = Analysis(trace)
    (finding,) = [each for each in UnifiedMemory().check(a) if isinstance(each, Finding)]
    values = {each.label: each.value for each in finding.evidence}
    # what was asked for ahead of time does not count
    assert values["kernels during migrations"] == pytest.approx(
        200_000 * len(kernels) / a.step_count, rel=0.05
    )
    assert values["GPU page faults in the recording"] == 7 * len(kernels)
