"""Work in the recorded window that no step owns: earlier work, backlogs, holes, first calls."""

from __future__ import annotations

import gzip
import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import polars as pl
import pytest

from advisor.advise.engine import Options, analyze
from advisor.advise.recording_limits import list_limits
from advisor.compare.statistics import autocorrelation
from advisor.core.errors import AdvisorError
from advisor.core.trace import Run
from advisor.measure import Analysis
from advisor.measure.host.launches import count_lost_records
from advisor.measure.steps.step_differences import CAPTURE, LOADING
from advisor.read import open_run, read_trace
from advisor.render.formats import REPORTS
from advisor.testing import TraceBuilder

Shared = Callable[[str], str]
OPTIONS = Options(config={})


@pytest.fixture(scope="module")
def rewriting() -> ModuleType:
    file = Path(__file__).parents[1] / "replay" / "rewriting.py"
    spec = importlib.util.spec_from_file_location("window_rewriting", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["window_rewriting"] = module
    spec.loader.exec_module(module)
    return module


def kernels_of(data: dict) -> list[dict]:
    return [e for e in data["traceEvents"] if str(e.get("cat")).lower() == "kernel"]


def calls_of(data: dict) -> list[dict]:
    wanted = ("cuda_runtime", "cuda_driver", "hip_runtime", "runtime")
    return [e for e in data["traceEvents"] if str(e.get("cat")).lower() in wanted]


# -- work launched before the recording -------------------------------------------------------


def test_kernels_from_before_the_recording_are_ignored(shared_trace: Shared, rewriting):
    path = shared_trace("h100_qwen_inference")
    data = rewriting.load(path)
    called = {e["args"].get("correlation") for e in calls_of(data)}
    recorded_kernels = [e for e in kernels_of(data) if e["args"]["correlation"] in called]
    before = [e for e in kernels_of(data) if e["args"]["correlation"] not in called]
    assert len(before) > 400 and len(recorded_kernels) > 1000
    a = Analysis(read_trace(path))
    kernel = (a.trace.gpu["kind"] == "kernel").to_numpy()
    assert int((a.launched_before & kernel).sum()) == len(before)
    assert int((a.in_window & kernel).sum()) == len(recorded_kernels)
    work = [
        e
        for e in data["traceEvents"]
        if e.get("cat") in rewriting.WORK and e["args"]["correlation"] in called
    ]
    assert a.families["dur"].sum() == pytest.approx(sum(e["dur"] for e in work) * 1e3, rel=1e-6)
    # the host waited for them first: the step begins when the last of them is done
    drained = max(e["ts"] + e["dur"] for e in before)
    end = max(e["ts"] + e["dur"] for e in recorded_kernels)
    assert a.step_ns / 1e3 == pytest.approx(end - drained, rel=0.02)
    limits = analyze(path, OPTIONS).limits
    expected = f"{len(before)} kernels ({sum(e['dur'] for e in before) / 1e3:.1f} ms)"
    assert any(expected in line for line in limits)


@pytest.mark.parametrize("name", ["alexnet", "linear_2080ti_launch_bound"])
def test_work_launched_before_a_restarted_recording_is_found(
    shared_trace: Shared, rewriting, tmp_path: Path, name: str
):
    """The host's first third is cut away, the device's records stay."""
    data = rewriting.load(shared_trace(name))
    host = [e for e in data["traceEvents"] if e.get("ph") == "X" and not rewriting.on_device(e)]
    host = [e for e in host if e.get("cat") not in ("Trace", None)]
    launched = sorted(e["ts"] for e in calls_of(data) if "LaunchKernel" in e["name"])
    cut = launched[len(launched) // 3]
    removed = {
        e["args"]["correlation"]
        for e in calls_of(data)
        if e["ts"] < cut and "correlation" in e.get("args", {})
    }
    early = {id(e) for e in host if e["ts"] < cut}
    cut_data = {**data, "traceEvents": [e for e in data["traceEvents"] if id(e) not in early]}
    expected = sum(e["args"]["correlation"] in removed for e in kernels_of(data))
    a = Analysis(read_trace(rewriting.save(cut_data, tmp_path / "cut.json")))
    is_earlier_kernel = a.launched_before & (a.trace.gpu["kind"] == "kernel").to_numpy()
    assert int(is_earlier_kernel.sum()) == expected > 10
    assert not a.lost_records.reported


# -- hosts that run ahead -----------------------------------------------------------------------


def test_kernels_after_the_hosts_marks_are_their_steps_work(shared_trace: Shared):
    a = Analysis(read_trace(shared_trace("mi300x_kernels_after_steps")))
    # the device's own ranges, written by the profiler, are the steps
    assert a.steps.used.height == 10
    ranges = [2482.527, 4191.222, 323.282, 324.684, 2452.762, 4003.024, 395.028, 435.408, 3542.26]
    assert a.steps.used["dur"][:9].to_numpy() / 1e3 == pytest.approx(ranges, rel=0.02)
    assert a.breakdown.busy.total / a.span_ns > 0.99
    assert int(a.in_window.sum()) == 20  # two a step; nine were launched before the recording
    assert a.trace.gpu.filter(pl.Series(a.launched_before))["op"].null_count() == 9


def loop_trace(host: float, device: float, steps: int = 5) -> TraceBuilder:
    """A loop whose host needs ``host`` us per step and whose device ``device``."""
    b = TraceBuilder()
    for _ in range(steps):
        with b.step():
            for _ in range(4):
                b.launch("gemm", device / 4)
            b.host(host)
    b.sync()
    return b


def test_step_is_the_device_period_if_the_host_runs_ahead():
    steps = Analysis(loop_trace(host=400, device=1000).trace()).steps
    assert steps.used["dur"].to_numpy() == pytest.approx(1e6, rel=0.01)
    assert steps.host_ns is not None and steps.host_ns < 0.5e6
    assert steps.ahead_ns is not None and steps.ahead_ns == pytest.approx(1.15e6, rel=0.2)


def test_a_device_that_keeps_up_has_the_hosts_steps():
    steps = Analysis(loop_trace(host=1000, device=400).trace()).steps
    assert steps.ahead_ns is None
    assert steps.marks is steps.table


def test_the_ends_of_a_window_do_not_distort_the_steps(shared_trace: Shared, rewriting):
    path = shared_trace("pairs/loader_profiler_workers4")
    data = rewriting.load(path)
    marks = sorted(
        (e["ts"], e["ts"] + e["dur"])
        for e in data["traceEvents"]
        if str(e.get("name")).startswith("ProfilerStep#") and not rewriting.on_device(e)
    )
    called = {e["args"].get("correlation"): e["ts"] for e in calls_of(data)}
    launched = [
        (called[c], e["ts"]) for e in kernels_of(data) if (c := e["args"]["correlation"]) in called
    ]
    first = [min(began for at, began in launched if ts <= at < end) for ts, end in marks]
    period = np.diff(first).mean() * 1e3
    assert period / 1e6 == pytest.approx(117.3, abs=0.1)
    a = Analysis(read_trace(path))
    assert a.step_ns == pytest.approx(period, rel=0.005)
    durations = a.steps.used["dur"].to_numpy().astype(float)
    assert durations.std() / durations.mean() < 0.02  # 14% by the host's marks
    assert autocorrelation(durations) is not None
    assert any("The host runs ahead" in line for line in analyze(path, OPTIONS).limits)


# -- lost records -------------------------------------------------------------------------------

LOSING = ["alexnet", "linear_2080ti_launch_bound", "b200_eager", "h100_bert_small_inference"]


@pytest.mark.parametrize("name", LOSING)
def test_gaps_in_the_records_give_no_conclusions(
    shared_trace: Shared, rewriting, tmp_path: Path, name: str
):
    path = shared_trace(name)
    assert count_lost_records(read_trace(path)).lost == 0
    data = rewriting.load(path)
    thin = rewriting.drop_device_work(data, 0.4)
    lost_count = len(kernels_of(data)) - len(kernels_of(thin))
    report = analyze(rewriting.save(thin, tmp_path / "thin.json"), OPTIONS)
    trace = read_trace(str(tmp_path / "thin.json"))
    assert count_lost_records(trace).lost == pytest.approx(lost_count, abs=4)  # but the very last
    assert report.status == "limited"
    assert report.verdict.startswith("The profiler lost")
    assert not report.findings
    assert not report.idle
    assert any("lost the records" in line for line in report.limits)


def test_trace_with_all_kernels_lost_is_reported(shared_trace: Shared):
    limits = analyze(shared_trace("a100_kernels_lost"), OPTIONS).limits
    assert any("260 calls): the profiler lost the records of all" in line for line in limits)


def test_launches_into_a_captured_graph_lose_nothing():
    trace = loop_trace(400, 1000).trace()
    assert count_lost_records(trace)[:2] == (20, 0)


def test_copies_alone_give_no_overlap(shared_trace: Shared, rewriting, tmp_path: Path):
    data = rewriting.load(shared_trace("pairs/particle_batch32"))
    kernels = {e["args"]["correlation"] for e in kernels_of(data)}
    kept = [
        e for e in data["traceEvents"] if (e.get("args") or {}).get("correlation") not in kernels
    ]
    only = {**data, "traceEvents": kept}
    report = analyze(rewriting.save(only, tmp_path / "copies.json"), OPTIONS)
    assert report.status == "limited"
    assert not report.findings
    assert "no kernel" in report.verdict


def test_a_file_of_a_few_events_is_too_little(shared_trace: Shared):
    path = shared_trace("triton_example")
    report = analyze(path, OPTIONS)
    assert report.status == "limited"
    events = json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
    work = {"cpu_op", "cuda_runtime", "cuda_driver", "kernel", "gpu_memcpy", "user_annotation"}
    pieces = sum(e.get("ph") == "X" and e.get("cat") in work for e in events)
    few = f"but {pieces} events (operators, calls and kernels) are too few for advice."
    assert few in report.verdict


# -- links --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mi300_timesformer_inference", "alexnet", "b200_eager"])
def test_external_ids_tie_kernels_to_their_very_calls(
    shared_trace: Shared, rewriting, tmp_path: Path, name: str
):
    path = shared_trace(name)
    data = rewriting.load(path)
    for e in [*calls_of(data), *(e for e in data["traceEvents"] if rewriting.on_device(e))]:
        (e.get("args") or {}).pop("correlation", None)
    with_ids = read_trace(path).gpu
    without = read_trace(rewriting.save(data, tmp_path / "bare.json")).gpu
    named = without["external"].is_not_null()
    assert named.mean() > 0.99
    assert (without["launch"].filter(named) == with_ids["launch"].filter(named)).mean() > 0.99


def test_gpu_with_another_event_number_is_named(shared_trace: Shared):
    report = analyze(shared_trace("mi300_timesformer_inference"), OPTIONS)
    assert report.scope.device_name == "AMD Instinct MI300X VF"
    assert report.scope.device_known


# -- several ranks ------------------------------------------------------------------------------


def test_ranks_merged_into_one_file_are_ranks_again(
    shared_trace: Shared, rewriting, tmp_path: Path
):
    files = [shared_trace("two_ranks_rank0"), shared_trace("two_ranks_rank1")]
    merged = []
    for number, file in enumerate(files):  # as TraceLens' TraceFusion does it
        for e in rewriting.events(rewriting.load(file)):
            new = {**e, "args": {**(e.get("args") or {}), "rank": number}}
            for owner, key in ((new, "pid"), (new, "id"), (new["args"], "correlation")):
                if isinstance(owner.get(key), int):
                    owner[key] += number * 10**8
            if e.get("cat") != "Trace":
                merged.append(new)
    path = rewriting.save({"traceEvents": merged}, tmp_path / "merged.json")
    separate = open_run(files)
    together = open_run(path)
    assert together.ranks == separate.ranks == [0, 1]
    for number in (0, 1):
        one, other = separate.window(number), together.window(number)
        assert other.gpu.height == one.gpu.height
        assert Analysis(other).step_ns == Analysis(one).step_ns
        assert Analysis(other).breakdown.totals() == Analysis(one).breakdown.totals()
    report = analyze(together, OPTIONS)
    assert report.ranks is not None
    assert [line.rank for line in report.ranks.lines] == [0, 1]


UNRELATED = {
    "traces": [
        "triton_example.json.gz",
        "h100_bert_small_inference.json.gz",
        "mi250_train.json.gz",
    ],
    "snapshots": ["memory/h100_leak.pickle.gz", "memory/opt13b_weights.pickle.gz"],
    "a trace and a snapshot": ["h100_qwen_inference.json.gz", "memory/opt13b_weights.pickle.gz"],
}


@pytest.mark.parametrize("names", UNRELATED.values(), ids=UNRELATED)
def test_files_of_different_runs_are_refused_and_listed(
    shared_file: Callable[[str], str], tmp_path: Path, names: list[str]
):
    for name in names:
        shutil.copy(shared_file(name), tmp_path)
    with pytest.raises(AdvisorError, match=f"these {len(names)} files do not look like") as caught:
        analyze(tmp_path, OPTIONS)
    for name in names:
        assert name.rpartition("/")[2] in str(caught.value)


def test_report_names_the_snapshot_beside_its_trace(
    shared_file: Callable[[str], str], tmp_path: Path
):
    for name in ("alexnet.json.gz", "memory/opt13b_weights.pickle.gz"):
        shutil.copy(shared_file(name), tmp_path)
    text = REPORTS.render("terminal", analyze(tmp_path, OPTIONS))
    assert "from opt13b_weights.pickle.gz" in text


# -- first calls --------------------------------------------------------------------------------


def test_the_first_call_of_an_operator_is_named_and_blamed_apart():
    b = TraceBuilder()
    for number in range(6):
        with b.step(), b.op("aten::convolution", host_us=50_000 if number == 0 else 100):
            b.launch("conv", 50)
    a = Analysis(b.trace())
    assert a.one_off_costs["name"].to_list() == ["aten::convolution"]
    assert a.one_off_costs["count"][0] == 6
    blamed = a.gaps.group_by("cause").agg(pl.col("dur").sum())
    compiling = blamed.filter(pl.col("cause") == "compile")["dur"].sum()
    others = blamed.filter(pl.col("cause") != "compile")["dur"].sum()
    assert compiling + others < 60e6
    assert others < 5e6


def test_first_call_waiting_for_the_device_has_no_extra_cost():
    b = TraceBuilder()
    for number in range(6):
        with b.step(), b.op("aten::item"):
            b.launch("gemm", 50_000 if number == 0 else 10)
            b.sync()
    assert Analysis(b.trace()).one_off_costs.is_empty()


def _scripted(b: TraceBuilder, name: str, ms: float) -> None:
    """A function that runs a few operators; compiling it beforehand leaves no trace."""
    with b.op(name, host_us=1000 * ms), b.op("aten::sub"):
        b.launch("elementwise", 5)


def test_dominant_compiled_function_is_named_by_its_duration():
    """Reproduces a public recording: ``delta_r2``, a TorchScript function, takes 297 of 347 ms."""
    b = TraceBuilder()
    b.run("aten::mm", "gemm", 300, times=100)
    _scripted(b, "delta_r2", 297)
    b.run("aten::mm", "gemm", 300, times=60)
    b.sync()
    a = Analysis(b.trace())
    assert a.one_off_costs["name"].to_list() == ["delta_r2"] and a.one_off_costs["usual"][0] is None
    compiling = a.gaps.filter(pl.col("cause") == "compile")["dur"].sum()
    assert 0.6 * 297e6 < compiling <= 298e6
    limits = [limit.text for limit in list_limits(a, Run({(0, 0): b.trace()}))]
    assert any("delta_r2 29" in line and "(its only call)" in line for line in limits)


@pytest.mark.parametrize(("name", "ms"), [("aten::unique_dim", 297), ("delta_r2", 20)])
def test_an_operator_or_a_short_function_may_come_again(name: str, ms: float):
    b = TraceBuilder()
    b.run("aten::mm", "gemm", 300, times=100)
    _scripted(b, name, ms)
    b.run("aten::mm", "gemm", 300, times=60)
    b.sync()
    assert Analysis(b.trace()).one_off_costs.is_empty()


def test_work_that_other_steps_lack_is_a_cost_once():
    b = TraceBuilder()
    for number in range(6):
        with b.step():
            b.run("aten::mm", "gemm", 300, times=10)
            if number == 1:
                _scripted(b, "delta_r2", 20)
            b.sync()
    assert Analysis(b.trace()).one_off_costs["name"].to_list() == ["delta_r2"]


@pytest.mark.parametrize(
    "name",
    [
        "executor_utils::Nvrtc::CompileProgram",
        "FusionKernelRuntime::compileFusionParallel",
        "FusionExecutorCache::getKernelRuntimeFor::compileNewKRT",
        "KernelExecutor::compile",
        "SegmentCandidateFinder::findSegments",
        "triton.compile",
        "compile_fx_inner (dynamo_timed)",
        "torch/_inductor/async_compile.py(540): wait",
        "torch/_inductor/runtime/triton_heuristics.py(320): precompile",
        "triton/runtime/jit.py(660): _do_compile",
    ],
)
def test_ranges_of_compilers_are_compiling(name: str):
    b = TraceBuilder()
    around = b.python(name) if ".py(" in name else b.range(name)
    b.run("aten::mm", "gemm", 300)
    with around:
        b.host(50_000)
    b.run("aten::mm", "gemm", 300)
    b.sync()
    compiling = Analysis(b.trace()).gaps.filter(pl.col("cause") == "compile")["dur"].sum()
    assert compiling > 45e6


@pytest.mark.parametrize("name", ["FusionKernelRuntime::runWithInputs", "compiled_forward"])
def test_ranges_running_compiled_code_are_no_compilation(name: str):
    b = TraceBuilder()
    b.run("aten::mm", "gemm", 300)
    with b.range(name):
        b.host(50_000)
    b.run("aten::mm", "gemm", 300)
    b.sync()
    assert Analysis(b.trace()).gaps.filter(pl.col("cause") == "compile").is_empty()


@pytest.mark.parametrize(("queued_us", "is_start_up"), [(60_000, False), (10, True)])
def test_launch_waiting_for_a_full_queue_is_not_start_up(queued_us: float, is_start_up: bool):
    b = TraceBuilder()
    b.run("aten::mm", "gemm", queued_us)
    b.call("cudaLaunchKernel", 50_000)
    b.run("aten::mm", "gemm", 300)
    b.sync()
    limits = [limit.text for limit in list_limits(b.analysis(), Run({(0, 0): b.trace()}))]
    assert any("start-up" in line for line in limits) == is_start_up


def test_search_and_loading_of_a_real_first_iteration_are_named(shared_trace: Shared):
    report = analyze(shared_trace("alexnet"), OPTIONS)
    line = next(line for line in report.limits if line.startswith("One-off costs"))
    assert "aten::cudnn_convolution 10.8 s (first of 10 calls" in line
    assert not report.findings


def graph_capture_trace(steps: int, captures: int) -> TraceBuilder:
    """Graphs of 30 ms are captured in the first ``captures`` of some steps."""
    b = TraceBuilder()
    for number in range(steps):
        with b.step(number):
            if number < captures:
                b.call("cudaStreamBeginCapture", 5)
                b.host(30_000)
                b.call("cudaStreamEndCapture", 5)
            b.run("aten::mm", "gemm", 1000)
            b.sync()
    return b


@pytest.mark.parametrize("name", ["hipModuleLoadData", "cuModuleLoadDataEx", "cuLibraryLoadData"])
@pytest.mark.parametrize("between", ["nothing", "a query", "a launch", "an operator"])
def test_time_between_code_loads_is_start_up(name: str, between: str) -> None:
    b = TraceBuilder()
    b.run("aten::add", "add", 100)
    b.host(200)
    b.call(name, 300)
    b.host(5000)
    if between == "a query":
        b.call("hipGetDeviceProperties", 5)
    elif between == "a launch":
        b.launch("mul", 10)
    elif between == "an operator":
        b.on_host("aten::empty", 10)
    b.host(5000)
    b.call(name, 400)
    b.run("aten::mm", "gemm", 100)
    a = Analysis(b.trace())
    rows = a.one_off_costs.filter(pl.col("name").str.starts_with(LOADING))
    causes = dict(a.gaps.group_by("cause").agg(pl.col("dur").sum()).iter_rows())
    if between in ("nothing", "a query"):
        assert rows["count"].to_list() == [2]
        assert rows["dur"][0] >= 10_700_000
        assert causes["compile"] >= 10_700_000
        assert causes.get("unknown", 0) < 1_000_000
    else:
        assert rows.is_empty()
        assert causes["unknown"] >= 9_000_000


def test_library_starting_between_two_loads_is_named(
    shared_file: Callable[[str], str],
) -> None:
    """2.7 s between two calls of hipModuleLoadData, before the first product."""
    report = analyze(shared_file("rocprof/matmul_result.rpd"))
    assert report.verdict.startswith(
        "One-off costs take at least 92% of the analysed 2.96 s, mostly start-up around "
        "hipModuleLoadData."
    )
    assert "does not show" not in report.verdict
    assert any(
        "around hipModuleLoadData 2.74 s (37.7 ms in its 2 calls)" in x for x in report.limits
    )


def test_the_capture_of_a_graph_is_a_one_off_cost() -> None:
    a = Analysis(graph_capture_trace(6, 1).trace())
    assert a.one_off_costs["name"].to_list() == [CAPTURE]
    assert a.one_off_costs["dur"][0] == 30_010_000


def test_capture_in_each_step_is_not_a_one_off_cost() -> None:
    assert Analysis(graph_capture_trace(6, 6).trace()).one_off_costs.is_empty()


def test_a_capture_of_a_server_is_not_advice(shared_trace: Callable[[str], str]) -> None:
    report = analyze(shared_trace("serving/vllm_decode_full/capture"), OPTIONS)
    assert not [f for f in report.findings if f.rule == "python-hot-spot"]
    assert "One-off costs take at least 95%" in report.verdict


@pytest.mark.parametrize(
    ("name", "share", "what"),
    [
        ("mi250_train", "70%", "first calls of hipLaunchKernel"),
        ("alexnet", "90%", "aten::cudnn_convolution"),
    ],
)
def test_a_report_of_start_up_begins_with_it(
    name: str, share: str, what: str, shared_trace: Callable[[str], str]
) -> None:
    verdict = analyze(shared_trace(name), OPTIONS).verdict
    assert f"One-off costs take at least {share}" in verdict and f"mostly {what}" in verdict


def test_every_use_of_a_measurement_of_idle_time_is_counted(shared_trace: Shared):
    """Rules run in any order: the second one that uses a measurement must be known to use it."""
    a = Analysis(read_trace(shared_trace("b200_eager")))
    for measure, of_idle in (("gaps", 1), ("read_loops", 1), ("is_device_bound", 1), ("steps", 0)):
        for _ in range(3):
            before = a.idle_reads
            getattr(a, measure)
            assert (a.idle_reads > before) is bool(of_idle), measure
