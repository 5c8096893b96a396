"""XPlane files of TensorFlow and JAX: what they hold becomes the tables, and nothing else does."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import subprocess
import sys
import tarfile
from collections import defaultdict
from collections.abc import Callable
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from advisor import cli
from advisor.advise.engine import Options, analyze, analyze_in_full
from advisor.core.errors import AdvisorError
from advisor.measure import Analysis
from advisor.measure.host.host_time import python_hot_spots
from advisor.read import open_run, read_trace
from advisor.read.protobuf import PADDING, Buffer
from advisor.read.registry import read_bytes
from advisor.render.formats import REPORTS
from tests.conftest import public_file
from tests.read import xspace_writer as w

MUTANTS = int(os.environ.get("ADVISOR_MUTATIONS", "0")) or 40
TORCH = re.compile(
    r"torch|DataLoader|num_workers|pin_memory|aten::|profiler\.step\b|activities=", re.I
)


@pytest.fixture
def jax_file(tmp_path: Path) -> Path:
    path = tmp_path / "host.xplane.pb"
    path.write_bytes(w.jax_training())
    return path


# -- the decoder ----------------------------------------------------------------------------------


def test_number_decoding_equals_decoding_one_by_one() -> None:
    chance = random.Random(1)
    values = [0, 1, 127, 128, 2**32, 2**56 - 1, 2**56, 2**63, 2**64 - 1]
    values += [chance.getrandbits(chance.randrange(1, 65)) for _ in range(500)]
    parts = [w.varint(value) for value in values]
    at = np.cumsum([0, *map(len, parts[:-1])])
    decoded, length, sound = Buffer(b"".join(parts) + bytes(PADDING)).numbers(at)
    assert decoded.tolist() == values
    assert length.tolist() == list(map(len, parts))
    assert sound.all()


def test_fields_equal_a_field_by_field_reading() -> None:
    chance = random.Random(2)
    messages = []
    for _ in range(300):
        body = b""
        for _ in range(chance.randrange(6)):
            key = chance.choice([1, 3, 15, 16, 900])
            raw = chance.randbytes(chance.choice([0, 3, 200]))
            body += chance.choice(
                [w.varint_field(key, chance.getrandbits(40)), w.bytes_field(key, raw)]
            )
        messages.append(body)
    end = np.cumsum(list(map(len, messages)))
    start = end - np.array(list(map(len, messages)))
    data = b"".join(messages) + bytes(PADDING)
    decoded, broken = Buffer(data).fields(start, end)
    order = np.argsort(decoded.row, kind="stable")
    fields = [
        (
            int(decoded.number[i]),
            int(decoded.value[i])
            if decoded.wire[i] == 0
            else data[decoded.start[i] : decoded.start[i] + int(decoded.value[i])],
        )
        for i in order
    ]
    assert broken == 0
    assert fields == [one for body in messages for one in w.fields(body)]


# -- what is in a file ----------------------------------------------------------------------------


def test_device_work_equals_a_field_by_field_sum() -> None:
    path = Path(public_file("xla/tf_gpu_multi_worker.xplane.pb.gz"))
    trace = read_trace(str(path))
    events = w.device_events(gzip.decompress(path.read_bytes()))
    sums: dict[tuple[int, str], float] = defaultdict(float)
    spans: dict[int, list[tuple[float, float]]] = defaultdict(list)
    moved: dict[tuple[int, str], int] = defaultdict(int)
    for plane, _, name, start, dur, stats in events:
        device = int(plane.rpartition(":")[2])
        sums[device, name] += dur / 1000
        spans[device].append((start / 1000, (start + dur) / 1000))
        if "memcpy_details" in stats:
            size = int(re.search(r"size:(\d+)", stats["memcpy_details"])[1])  # type: ignore[index]
            moved[device, name] += size
    gpu = trace.gpu.with_columns(pl.col("name").cast(pl.String))
    read_sums = {key: float(frame["dur"].sum()) for key, frame in gpu.group_by("device", "name")}
    assert read_sums == pytest.approx(dict(sums), rel=1e-3)
    copies = gpu.filter(pl.col("kind") == "memcpy")
    assert {k: f["bytes"].sum() for k, f in copies.group_by("device", "name")} == moved
    assert trace.gpu["launch"].null_count() == 0
    a = Analysis(trace)
    assert a.device_id is not None
    busy, reached = 0.0, float("-inf")
    # the step that the profiler derived: from the first kernel to the end of the last
    computed = [event for event in events if event[1].endswith("(Compute)")]
    device_events = [event for event in computed if int(event[0].rpartition(":")[2]) == a.device_id]
    begin, stop = (
        device_events[0][3] / 1000,
        max(event[3] + event[4] for event in device_events) / 1000,
    )
    inside = [(max(s, begin), min(e, stop)) for s, e in spans[a.device_id]]
    for start, end in sorted(span for span in inside if span[1] > span[0]):
        busy += max(end - max(start, reached), 0)
        reached = max(reached, end)
    idle = sum((e - s) for s, e in zip(a.breakdown.idle.start, a.breakdown.idle.end, strict=True))
    assert a.span_ns - idle == pytest.approx(busy, rel=1e-3)
    work = gpu.filter((pl.col("kind") == "kernel") & (pl.col("device") == a.device_id))
    of_name = {"FillPhilox": "random", "EigenMetaKernel": "elementwise"}
    expected: dict[str, float] = defaultdict(float)
    for (device, name), ns in sums.items():
        if device == a.device_id and not name.startswith("Memcpy"):
            expected[next(f for sign, f in of_name.items() if sign in name)] += ns
    families = dict(zip(gpu["name"], a.kernels["family"].cast(pl.String), strict=True))
    result = work.group_by(pl.col("name").replace_strict(families)).agg(pl.col("dur").sum())
    assert dict(result.iter_rows()) == pytest.approx(expected, rel=1e-3)


def test_gpu_is_identified_from_its_plane() -> None:
    trace = read_bytes(w.jax_training(), "host.xplane.pb")
    device = trace.meta.devices[0]
    assert device.name == "Tesla V100-SXM2-16GB"
    assert (device.sms, device.compute, device.memory_bytes) == (80, (7, 0), 16945512448)
    assert trace.meta.vendor == "nvidia"


def test_kernels_are_tied_to_their_launch_and_to_xlas_operator() -> None:
    trace = read_bytes(w.jax_training(), "host.xplane.pb")
    kernels = trace.gpu.filter(pl.col("kind") == "kernel")
    assert kernels.height == 12  # the derived lines repeat work, and are none
    first = kernels.row(0, named=True)
    assert trace.cpu["name"][first["launch"]] == "cuLaunchKernel"
    assert trace.cpu["name"][first["op"]] == "jit_train_step/dot.1"
    assert (first["blocks"], first["threads"]) == (320, 128)
    assert (first["registers"], first["shared"]) == (32, 1024)


def test_a_copy_has_its_size_direction_and_memories() -> None:
    trace = read_bytes(w.jax_training(), "host.xplane.pb")
    copy = trace.gpu.filter(pl.col("kind") == "memcpy").row(0, named=True)
    assert (copy["bytes"], copy["copy"]) == (4 << 20, "HtoD")
    assert (copy["src"], copy["dst"]) == ("Pageable", "Device")
    assert copy["gbps"] == pytest.approx(4.194304)


def test_steps_are_those_that_the_program_marked() -> None:
    a = Analysis(read_bytes(w.jax_training(), "host.xplane.pb"))
    assert a.steps.source == "StepTraceAnnotation"
    assert a.steps.table["name"].to_list() == [f"step {n}" for n in range(6)]
    assert a.trace.threads["name"][a.trace.main_thread] == "python"


def test_without_marks_a_step_is_the_period_of_the_program() -> None:
    a = Analysis(read_bytes(w.jax_training(marks=False), "host.xplane.pb"))
    assert a.steps.table["dur"].to_list()[:5] == [10_000_000] * 5
    assert a.steps.source == "program"


def test_derived_gpu_steps_are_used_without_marked_steps() -> None:
    """The file's line ``Steps`` of GPU 6: one of 21.310352 ms, in which 14.9 ms are kernels; copies
    reach back to 469 ms before it."""
    path = public_file("xla/tf_gpu_multi_worker.xplane.pb.gz")
    report = analyze(path, Options(config={}))
    assert report.scope.step_source == "device steps"
    assert report.scope.span_ns == 21_310_352
    assert {part.name: part.share for part in report.time}["compute"] == pytest.approx(
        0.70, abs=0.005
    )
    assert "GPU busy 70% of a 21.3 ms step." in report.verdict
    (limit,) = (line for line in report.limits if "derived" in line)
    assert "left out" in limit
    text = " ".join((report.verdict, *report.limits, *(one.record for one in report.not_checked)))
    assert "tf.profiler" in text
    assert "jax" not in text


def test_the_line_is_the_users_and_not_jaxs() -> None:
    host, gpu = w.Plane("/host:CPU"), w.Plane("/device:GPU:0", own=dict(w.V100))
    python, work = host.line("python"), gpu.line("Stream #13(Compute)")
    for step in range(6):
        t = step * 10_000_000
        python.event("train", t, 9_990_000, step_num=step, _r=1)
        python.event("$train.py:31 prepare", t + 1000, 6_000_000)
        python.event("$array_creation.py:98 ones", t + 2000, 5_900_000)
        python.event("$core.py:660 bind", t + 3000, 5_800_000)
        python.event("PjitFunction(f)", t + 7_000_000, 100_000)
        link = {"correlation_id": step + 1}
        python.event("cuLaunchKernel", t + 7_010_000, 20_000, **link)
        details = "->regs:32 grid:160,2,1 block:128,1,1"
        work.event("gemm", t + 7_100_000, 2_000_000, **link, kernel_details=details)
    a = Analysis(read_bytes(w.space(host, gpu), "host.xplane.pb"))
    (spot,) = python_hot_spots(a).iter_rows(named=True)
    assert (spot["file"], spot["line"], spot["function"]) == ("train.py", 31, "prepare")
    assert spot["critical_ns"] > 5 * 5_000_000


def test_a_python_frame_is_reported_as_other_profilers_do() -> None:
    trace = read_bytes(w.jax_training(), "host.xplane.pb")
    assert trace.meta.with_stack
    assert "train.py(12): batch" in trace.cpu["name"].cast(pl.String).to_list()


@pytest.mark.parametrize("name", ["PjitFunction(f)", "ExecutorState::Process", "my_loop"])
def test_framework_is_identified_by_its_events(name: str) -> None:
    host = w.Plane("/host:CPU")
    host.line("python").event(name, 0, 1000)
    known = {"PjitFunction(f)": "jax", "ExecutorState::Process": "tensorflow"}
    assert read_bytes(w.space(host)).meta.framework == known.get(name)


def test_a_tpu_is_refused_in_one_line() -> None:
    tpu, host = w.Plane("/device:TPU:0"), w.Plane("/host:CPU")
    tpu.line("XLA Ops").event("fusion.1", 0, 1000)
    host.line("python").event("PjitFunction(f)", 0, 1000)
    with pytest.raises(AdvisorError, match=r"TPUs are not read") as error:
        read_bytes(w.space(host, tpu), "tpu.xplane.pb")
    assert "\n" not in str(error.value)


def test_a_truncated_file_is_read_up_to_the_cut() -> None:
    data = w.jax_training(steps=40)
    host = w.Plane("/host:CPU")
    host.line("python").event("PjitFunction(f)", 0, 1000)
    host_plane = w.bytes_field(1, host.encode())
    cut = read_bytes(host_plane + data[: len(data) // 2], "cut.xplane.pb")
    assert cut.meta.truncated


def _jax_host(frames: list[tuple[str, float]], *, gpu: bool) -> Analysis:
    """Six steps of 10 ms on one thread, each of which is in the given events, one by one, ms."""
    host, device = w.Plane("/host:CPU"), w.Plane("/device:GPU:0", own=dict(w.V100))
    python, work = host.line("python"), device.line("Stream #13(Compute)")
    for step in range(6):
        t = step * 1e7
        python.event("train", t, 9_990_000, step_num=step, _r=1)
        python.event("PjitFunction(f)", t, 10_000)
        link = {"correlation_id": step + 1}
        python.event("cuLaunchKernel", t + 20_000, 5000, **link)
        work.event("gemm", t + 1e6, 8e6, **link, kernel_details="->grid:9,1,1 block:9,1,1")
        t += 100_000
        for name, ms in frames:
            python.event(name, t, ms * 1e6)
            t += ms * 1e6
    return Analysis(read_bytes(w.space(host, device) if gpu else w.space(host), "x.xplane.pb"))


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("$api.py:2479 block_until_ready", "awaited"),
        ("$array.py:615 _value", "awaited"),
        ("np.asarray(jax.Array)", "awaited"),
        ("ThunkExecutor::Execute (wait for completion)", "other_thread"),
        ("$compiler.py:292 backend_compile_and_load", "compile"),
        ("$pjit.py:466 _trace_for_jit", "compile"),
        ("backend_compile_and_load", "compile"),
        ("tf.function-graph_building", "compile"),
        ("$profiler.py:271 stop_trace", "profiler"),
        ("$train.py:3 _value_of", "python"),
        ("$profiler.py:417 wrapper", "python"),
    ],
)
def test_a_wait_for_xla_and_a_compilation_are_not_python_code(
    name: str, kind: str, gpu: bool
) -> None:
    """The time lies on a device or in XLA's own threads: no line of Python can be made faster
    for it."""
    a = _jax_host([(name, 7)], gpu=gpu)
    host_time = dict(
        a.host.filter(pl.col("thread") == a.trace.main_thread)["class", "ns"].iter_rows()
    )
    kind = kind if kind != "awaited" else "sync" if gpu else "other_thread"
    assert host_time[kind] == pytest.approx(6 * 7e6, rel=1e-2)
    if kind != "python":
        assert "python" not in host_time


@pytest.mark.parametrize(
    ("name", "words"),
    [("backend_compile_and_load", "jax_explain_cache_misses"),
     ("tf.function-graph_building", "reduce_retracing")],
)  # fmt: skip
def test_compiling_in_each_step_is_reported_in_framework_terms(
    name: str, words: str, tmp_path: Path
) -> None:
    host = w.Plane("/host:CPU")
    python = host.line("python")
    for step in range(8):
        t = step * 1e7
        python.event("train", t, 9_990_000, step_num=step, _r=1)
        python.event("FunctionRun" if "tf." in name else "PjitFunction(f)", t, 9_000_000)
        python.event(name, t + 1e6, 6_000_000)
    path = tmp_path / "host.xplane.pb"
    path.write_bytes(w.space(host))
    (first,) = analyze(str(path), Options(config={})).findings
    assert first.rule == "recompilation"
    assert first.impact is not None and first.impact.gain_ns == pytest.approx(6e6, rel=1e-2)
    assert words in first.code
    advice = f"{first.title} {first.summary} {first.fix} {first.code} {first.verify}"
    assert not TORCH.search(advice + first.falsified_by)


@pytest.mark.parametrize("waits", [True, False])
def test_loop_without_device_waits_is_reported(waits: bool, tmp_path: Path) -> None:
    """Twenty steps that take 20 us to hand 3 ms of work to another thread."""
    host = w.Plane("/host:CPU")
    python, pool = host.line("python"), host.line("tf_XLAEigen/7")
    for step in range(20):
        t = step * (3_100_000 if waits else 20_000)
        python.event("train", t, 3_099_000 if waits else 19_000, step_num=step, _r=1)
        python.event("PjitFunction(f)", t + 1000, 15_000)
        for nth in range(10):
            pool.event("dot.1", 50_000 + step * 3_100_000 + nth * 300_000, 290_000, hlo_op="dot.1")
    path = tmp_path / "host.xplane.pb"
    path.write_bytes(w.space(host))
    report = analyze(str(path), Options(config={}))
    limits = [line for line in report.limits if "runs after the steps" in line]
    assert bool(limits) is not waits
    assert waits or "block_until_ready" in limits[0]


def test_wait_starting_in_a_loop_call_is_counted_after_it() -> None:
    """``FunctionRun`` returns 0.5 ms after another thread began to ask for the batch."""
    host = w.Plane("/host:CPU")
    python, pool = host.line("python3"), host.line("tf_data_iterator_get_next/7")
    for step in range(6):
        t = step * 1e7
        python.event("train", t, 9_990_000, step_num=step, _r=1)
        python.event("FunctionRun", t + 1e6, 1e6)
        pool.event("IteratorGetNextOp::DoCompute", t + 1.5e6, 7e6)
    a = Analysis(read_bytes(w.space(host), "host.xplane.pb"))
    host_time = dict(
        a.host.filter(pl.col("thread") == a.trace.main_thread)["class", "ns"].iter_rows()
    )
    assert host_time["loader"] == pytest.approx(6 * 6.5e6, rel=1e-3)


def test_a_file_cut_in_its_first_plane_is_reported_as_cut() -> None:
    """Names follow the events of a plane: without them nothing is known of any."""
    plane = w.Plane("/host:CPU")
    line = plane.line("python")
    for number in range(1000):
        line.event("PjitFunction(f)", number * 1000, 900)
    with pytest.raises(AdvisorError, match="cut off or damaged"):
        read_bytes(w.space(plane)[:3000], "cut.xplane.pb")


# -- several files --------------------------------------------------------------------------------


def test_hosts_of_one_recording_are_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "plugins" / "profile" / "2026_01_01"
    folder.mkdir(parents=True)
    for host in ("b", "a"):
        (folder / f"{host}.xplane.pb").write_bytes(w.jax_training())
        (folder / f"{host}.trace.json.gz").write_bytes(gzip.compress(b'{"traceEvents":[]}'))
    run = open_run(str(tmp_path))
    assert run.ranks == [0, 1]
    assert Path(run.traces[0, 0].meta.path).name == "a.xplane.pb"
    assert not run.problems


def test_a_packed_file_is_the_same(tmp_path: Path) -> None:
    packed = tmp_path / "host.xplane.pb.gz"
    packed.write_bytes(gzip.compress(w.jax_training()))
    trace = read_bytes(w.jax_training())
    assert read_trace(str(packed)).gpu.equals(trace.gpu)


def test_timeline_file_agrees_with_the_xplane(tmp_path: Path) -> None:
    """``trace.json.gz``, which the profiler derives from the XPlane file."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:GPU:0"}},
        {"ph": "M", "pid": 1, "tid": 3, "name": "thread_name",
         "args": {"name": "Stream #13(Compute)"}},
        {"ph": "M", "pid": 701, "name": "process_name", "args": {"name": "/host:CPU"}},
        {"ph": "M", "pid": 701, "tid": 9, "name": "thread_name", "args": {"name": "python"}},
    ]  # fmt: skip
    for step in range(4):
        t = step * 1000.0
        link = {"correlation_id": str(step + 1)}
        events += [
            {"ph": "X", "pid": 701, "tid": 9, "ts": t, "dur": 990, "name": "train",
             "args": {"step_num": str(step)}},
            {"ph": "X", "pid": 701, "tid": 9, "ts": t + 10, "dur": 5, "name": "cuLaunchKernel",
             "args": link},
            {"ph": "X", "pid": 1, "tid": 3, "ts": t + 20, "dur": 500.25, "name": "gemm",
             "args": {**link, "kernel_details": "regs:8 grid:4,1,1 block:32,1,1"}},
        ]  # fmt: skip
    path = tmp_path / "host.trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": [*events, {}]}).encode()))
    trace = read_trace(str(path))
    assert trace.meta.format == "xla-timeline"
    assert trace.gpu.select("dur", "blocks", "device", "stream").row(0) == (500250, 4, 0, 13)
    assert trace.gpu["launch"].null_count() == 0
    assert Analysis(trace).steps.table.height == 4


# -- what is advised ------------------------------------------------------------------------------


def _published_steps(kind: str) -> list[dict[int, float]]:
    """Published step times of a ResNet-50, ms, by field of ``PerGenericStepDetails`` (2 step, 6
    device compute, 11 wait for input), from TensorFlow's profiler."""
    path = public_file("xla/tfprof_demo_GPU_input_vs_compute_bound.tar.gz")
    with tarfile.open(path) as archive:
        member = next(
            m
            for m in archive.getmembers()
            if m.name.endswith(f"GPU-{kind}-bound_input_pipeline.pb")
        )
        data = archive.extractfile(member).read()  # type: ignore[union-attr]
    return [dict(w.fields(w.message(detail)[2][0])) for detail in w.message(data)[4]]


def _resnet(kind: str) -> bytes:
    """The same steps as a file: the wait on a thread of tf.data, then the device's work."""
    host, gpu = w.Plane("/host:CPU"), w.Plane("/device:GPU:0", own=dict(w.V100))
    python, data = host.line("python3"), host.line("tf_data_iterator_get_next/7")
    pool, work = host.line("tf_gpu_private_0/8"), gpu.line("Stream #20(Compute)")
    t = 0.0
    for step, of in enumerate(_published_steps(kind)):
        length, wait = of[2] * 1e6, of[11] * 1e6
        busy = length - wait - 2e6
        python.event("train", t, length - 1000, step_num=step, _r=1)
        python.event("FunctionRun", t + 5000, length - 20_000)
        data.event("IteratorGetNextOp::DoCompute", t + 100_000, wait)
        pool.event("model/conv/Conv2D:Conv2D", t + 200_000 + wait, 900_000)
        link = {"correlation_id": step + 1}
        details = "->regs:64 shm:0 grid:4000,1,1 block:256,1,1"
        pool.event(
            "volta_scudnn_128x64_relu", t + 300_000 + wait, 50_000, **link, kernel_details=details
        )
        work.event(
            "volta_scudnn_128x64_relu", t + 400_000 + wait, busy, **link, kernel_details=details
        )
        t += length
    return bytes(w.space(host, gpu))


def test_input_bound_resnet_waits_for_its_input(tmp_path: Path) -> None:
    path = tmp_path / "input.xplane.pb"
    path.write_bytes(_resnet("input"))
    report = analyze(str(path), Options(config={}))
    steps = _published_steps("input")
    share = sum(of[11] for of in steps) / sum(of[2] for of in steps)
    assert share == pytest.approx(0.81, abs=0.01)  # "81.4% of the step time" in its overview
    first = report.findings[0]
    assert (first.rule, first.severity) == ("dataloader-wait", "critical")
    assert first.title == "The step waits for tf.data"
    reported_share = next(e.value for e in first.evidence if e.label == "exposed wait, share")
    assert reported_share == pytest.approx(share, rel=1e-3)
    assert "prefetch(tf.data.AUTOTUNE)" in first.code
    assert not TORCH.search(
        f"{first.title} {first.summary} {first.fix} {first.code} {first.verify}"
    )


def test_the_compute_bound_resnet_is_not(tmp_path: Path) -> None:
    path = tmp_path / "compute.xplane.pb"
    path.write_bytes(_resnet("compute"))
    report = analyze(str(path), Options(config={}))
    assert not [f for f in report.findings if f.category == "input"]


def test_advice_for_jax_never_mentions_pytorch(jax_file: Path) -> None:
    report = analyze(str(jax_file), Options(config={}))
    advice = [
        text
        for f in (*report.findings, *report.notes)
        for text in (f.title, f.summary, f.fix, f.code, f.verify, f.falsified_by)
    ]
    assert advice
    assert not [text for text in advice if TORCH.search(text)]
    assert not [one.record for one in report.not_checked if TORCH.search(one.record)]
    assert not [line for line in report.limits if TORCH.search(line)]


PYTORCHS = re.compile(r"ProfilerStep|data loader|DataLoader", re.I)


@pytest.mark.parametrize("form", ["terminal", "markdown", "github", "sarif", "html", "json"])
def test_steps_and_input_pipeline_have_framework_names(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, faster = tmp_path / "input.xplane.pb", tmp_path / "compute.xplane.pb"
    path.write_bytes(_resnet("input"))
    faster.write_bytes(_resnet("compute"))
    assert cli.run(["analyze", str(path), "--format", form]) == 0
    output = capsys.readouterr().out
    if form in ("json", "sarif"):  # rules that look anywhere use their own words
        document = json.loads(output)
        (document if form == "json" else document["runs"][0]["tool"]["driver"]).pop("rules")
        output = json.dumps(document)
    assert not PYTORCHS.search(output.replace("dataloader-wait", ""))  # but for the rule's name
    if form in ("terminal", "html", "json"):
        assert "step_num" in output
    if form in ("terminal", "html"):
        assert "input pipeline" in output
    if form != "terminal":
        return
    for line in (
        ["compare", str(path), str(faster)],
        ["analyze", str(faster), "--details"],
    ):
        assert cli.run(line) == 0
        output = capsys.readouterr().out
        assert not PYTORCHS.search(output.replace("dataloader-wait", "")), output
        assert "input pipeline" in output or "tf.data" in output


def test_the_timeline_names_the_input_pipeline(tmp_path: Path) -> None:
    pytest.importorskip("dash", reason="the dashboard's packages are not installed")
    from advisor.dashboard.timeline.detail_levels import ALL_CATEGORIES, category_label
    from advisor.dashboard.timeline.index_builder import build_index

    path = tmp_path / "input.xplane.pb"
    path.write_bytes(_resnet("input"))
    index = build_index(Analysis(read_trace(str(path))))
    labels = {*index.names, *(category_label(category, index) for category in ALL_CATEGORIES)}
    assert "input pipeline" in labels
    assert not [name for name in labels if PYTORCHS.search(name)]


# -- all that works on a trace works on it --------------------------------------------------------


def test_every_command_takes_it(
    jax_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    after = tmp_path / "after.xplane.pb"
    after.write_bytes(w.jax_training(shift_ns=5_000))
    out, page = tmp_path / "out.json", tmp_path / "report.html"
    for line in (
        ["analyze", str(jax_file), "--redact", "--format", "json"],
        ["report", str(jax_file), "--html", str(page)],
        ["compare", str(jax_file), str(after)],
        ["whatif", str(jax_file), "-e", "scale kernel:gemm 0.5"],
        ["export", str(jax_file), "--perfetto", str(out)],
    ):
        assert cli.run(line) == 0, line
    document = json.loads(out.read_bytes())["traceEvents"]
    assert sum(e.get("cat") == "kernel" for e in document) == 12
    assert "volta_sgemm" in page.read_text()
    assert "Traceback" not in capsys.readouterr().err


def test_the_dashboard_shows_it(jax_file: Path) -> None:
    dash = pytest.importorskip("dash", reason="the dashboard's packages are not installed")
    from advisor.dashboard.app import create_app
    from advisor.dashboard.loaded_runs import DashboardSession
    from advisor.dashboard.timeline.index_builder import build_index

    session = DashboardSession([str(jax_file)]).load()
    assert session.entries[0].loaded is not None
    app = create_app(session)
    with app.server.test_request_context():
        for page in dash.page_registry.values():
            page["layout"]()
    assert build_index(session.entries[0].loaded.main)


# -- damage ---------------------------------------------------------------------------------------


def _mutated(data: bytes, chance: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(chance.choice([1, 1, 3, 20])):
        if not out:
            break
        at = chance.randrange(len(out))
        how = chance.randrange(6)
        if how == 0:
            out[at] = chance.randrange(256)
        elif how == 1:
            out[at : at + 10] = b"\xff" * chance.choice([1, 9, 10])
        elif how == 2:
            del out[at : at + chance.choice([1, 4, 300])]
        elif how == 3:
            out[at:at] = chance.randbytes(chance.choice([1, 8, 100]))
        elif how == 4:
            out[at:at] = out[at : at + 500]
        else:
            del out[at + 20 :]
    return bytes(out)


@pytest.mark.parametrize("chunk", range(4))
def test_a_mutated_file_is_read_or_refused_in_a_line(chunk: int, tmp_path: Path) -> None:
    seeds = [w.jax_training(), w.jax_training(marks=False)]
    path = tmp_path / "host.xplane.pb"
    read = 0
    for number in range(chunk * MUTANTS // 4, (chunk + 1) * MUTANTS // 4):
        chance = random.Random(number)
        path.write_bytes(_mutated(chance.choice(seeds), chance) or b"\0")
        try:
            report = analyze_in_full(str(path), Options(config={})).report
        except AdvisorError as error:
            assert "\n" not in str(error), number
            continue
        read += 1
        if chance.random() < 0.2:
            for form in ("terminal", "html", "json"):
                REPORTS.render(form, report)
    assert read > MUTANTS // 16


@pytest.mark.parametrize(
    "hostile",
    [
        lambda: w.bytes_field(
            1, w.bytes_field(2, "/host:CPU") + w.bytes_field(3, b"\x22\x00" * 500_000)
        ),
        lambda: w.bytes_field(1, w.bytes_field(2, "/host:CPU") + b"\x1a\x00" * 500_000),
        lambda: w.bytes_field(
            1,
            w.bytes_field(2, "/host:CPU")
            + w.bytes_field(3, w.bytes_field(4, b"\x08\x01" * 400_000)),
        ),
        lambda: w.bytes_field(
            1, w.bytes_field(2, "/host:CPU") + w.bytes_field(4, b"\x08\x01" * 400_000)
        ),
        lambda: w.bytes_field(1, w.bytes_field(2, "/host:CPU")) + b"\x0a\x00" * 500_000,
    ],
)
def test_many_trifles_are_refused_soon(hostile: Callable[[], bytes]) -> None:
    with pytest.raises(AdvisorError):
        read_bytes(hostile(), "hostile.xplane.pb")


# -- recorded here --------------------------------------------------------------------------------

FRAMEWORKS = "ADVISOR_FRAMEWORKS"
"""Names a Python with JAX and TensorFlow, which are of no use to anything else here."""
JAX_PROGRAM = """
import sys, time, jax, jax.numpy as jnp
step = jax.jit(lambda w, x: w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w))
w, x = jnp.ones((64, 64)), jnp.ones((32, 64))
step(w, x).block_until_ready()
with jax.profiler.trace(sys.argv[1]):
    for number in range(4):
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            time.sleep(0.01)
            step(w, x).block_until_ready()
"""
TENSORFLOW_PROGRAM = """
import sys, tensorflow as tf
data = tf.data.Dataset.range(99).map(lambda i: tf.linalg.svd(tf.random.normal([96, 96]),
                                                            compute_uv=False))
step = tf.function(lambda x: tf.reduce_sum(tf.matmul(x[None], x[:, None])))
batches = iter(data)
step(next(batches))
tf.profiler.experimental.start(sys.argv[1])
for number in range(4):
    with tf.profiler.experimental.Trace("train", step_num=number, _r=1):
        step(next(batches))
tf.profiler.experimental.stop()
"""


@pytest.mark.parametrize(
    ("framework", "program"), [("jax", JAX_PROGRAM), ("tensorflow", TENSORFLOW_PROGRAM)]
)
def test_a_recording_of_the_cpu_is_read(framework: str, program: str, tmp_path: Path) -> None:
    python = os.environ.get(FRAMEWORKS) or sys.executable
    if python == sys.executable and util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed, and {FRAMEWORKS} names no Python that has it")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    result = subprocess.run([python, "-c", program, str(tmp_path / "log")], check=False,
                          capture_output=True, text=True, timeout=300, env=environment)  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    report = analyze(str(tmp_path / "log"), Options(config={}))
    trace = next(iter(open_run(str(tmp_path / "log")).traces.values()))
    assert trace.meta.framework == framework
    assert trace.meta.clock == "unix"
    assert trace.gpu.is_empty()
    steps = Analysis(trace).steps
    assert steps.table["name"].to_list() == [f"step {n}" for n in range(4)]
    if framework == "jax":
        assert steps.table["dur"].min() > 10e6  # each slept so long  # type: ignore[operator]
    else:
        assert "tf.data::IteratorGetNext" in trace.cpu["name"].cast(pl.String).to_list()
    assert any("No device work in the trace" in line for line in report.limits)
