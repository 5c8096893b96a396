"""The limiter of a kernel, its launches in a trace, and a local gain per step."""

from __future__ import annotations

import csv
import io
import re
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from advisor import analyze
from advisor.advise.engine import analyze_in_full
from advisor.core.errors import AdvisorError
from advisor.core.report import Report
from advisor.core.trace import Run
from advisor.measure import Analysis
from advisor.measure.device.kernel_profiles import kernel_key, profiled_kernels
from advisor.read import open_run
from advisor.read.reader import ReadOptions
from advisor.read.registry import read_trace
from advisor.testing import TraceBuilder
from benchmarks.public_traces import path_of

OCR = "ncu/deepseek_ocr_rtx5090.csv.gz"
MEMORY = "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed"
PAIRS = (
    (
        "void vectorized_elementwise_kernel<4, BinaryFunctor<BFloat16, BFloat16, BFloat16, "
        "MulFunctor<float>>, array<char *, 3>>(int, T2, T3)",
        "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<"
        "c10::BFloat16, "
        "c10::BFloat16, c10::BFloat16, at::native::binary_internal::MulFunctor<float> >, "
        "std::array<char*, 3ul> >(int, at::native::BinaryFunctor<c10::BFloat16, c10::BFloat16, "
        "c10::BFloat16, at::native::binary_internal::MulFunctor<float> >, std::array<char*, 3ul>)",
    ),
    (
        "void vectorized_elementwise_kernel<4, bfloat16_copy_kernel_cuda(TensorIteratorBase &)::"
        "[lambda(float) (instance 1)], array<char *, 2>>(int, T2, T3)",
        "void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda("
        "at::TensorIteratorBase&)::{lambda(float)#1}, std::array<char*, 2ul> >(int, "
        "at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda(float)#1}, "
        "std::array<char*, 2ul>)",
    ),
    (
        "void gmem_coalesce<(int)32>(int, int, int, const float *)",
        "void gmem_coalesce<32>(int, int, int, float const*)",
    ),
)


@pytest.mark.parametrize(("counters", "trace"), PAIRS)
def test_kernel_names_of_two_profilers_match(counters: str, trace: str) -> None:
    assert kernel_key(counters) == kernel_key(trace)


def test_instances_of_a_lambda_are_two_kernels() -> None:
    name = "void k<f(T&)::{lambda()#%d}::operator()() const::{lambda(float)#1}>(int)"
    assert kernel_key(name % 3) != kernel_key(name % 4)


def test_an_author_s_classification_is_reproduced() -> None:
    """The author gives these thresholds: 1.3 times or five points between the use of the
    multiprocessors and of DRAM, balanced where both are below 20%. One of twenty differs: the
    first kernel's memory is used to 19.7%, and its author calls it memory-bound all the same."""
    a = Analysis(read_trace(str(path_of(OCR))))
    with path_of("ncu/deepseek_ocr_rtx5090.classification.csv").open() as text:
        published = [row["classification"] for row in csv.DictReader(text)]
    classified = []
    for k in profiled_kernels(a):
        sm, dram = k.use["compute"], k.use["DRAM"]
        memory = k.profile.number(
            "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed"
        )
        assert memory is not None
        differs = max(sm, dram) >= 1.3 * min(sm, dram) or abs(sm - dram) >= 5
        if (sm < 20 and memory < 20) or not differs:
            classified.append("balanced")
        else:
            classified.append("compute_bound" if sm > dram else "memory_bound")
    differ = [
        number for number, (x, y) in enumerate(zip(classified, published, strict=True), 1) if x != y
    ]
    assert differ == [1]


def test_means_over_the_kernels_are_the_author_s() -> None:
    kernels = profiled_kernels(Analysis(read_trace(str(path_of(OCR)))))
    mean = sum(k.occupancy or 0 for k in kernels) / 20, sum(k.use["compute"] for k in kernels) / 20
    assert mean == (pytest.approx(39.5, abs=0.05), pytest.approx(15.75, abs=0.05))


def step_with(theoretical: float, *, hidden: bool) -> TraceBuilder:
    """Four steps of 2 ms of ``slow`` and 1 ms of others on the GPU; ``hidden``: beside 5 ms of
    communication that takes longer."""
    b = TraceBuilder()
    for _ in range(6):
        with b.step():
            with b.op("aten::mm", [[512, 512], [512, 512]], "float"):
                b.launch("slow<float>(int)", 2000, blocks=640, threads=256)
                b.launch("other(int)", 1000, blocks=640, threads=128)
                if hidden:
                    b.launch("ncclDevKernel_AllReduce_Sum_f32(int)", 5000, stream=20)
            b.sync()
    b.kernel_profile(
        "slow<float>",
        grid=(64, 10, 1),
        block=(256, 1, 1),
        metrics={
            "gpu__time_duration.sum": 1_900_000.0,
            "sm__throughput.avg.pct_of_peak_sustained_elapsed": 40.0,
            "sm__maximum_warps_per_active_cycle_pct": theoretical,
        },
    )
    return b


def report_of(b: TraceBuilder) -> Report:
    return analyze_in_full(Run(traces={(-1, 0): b.trace()})).report


def test_a_local_gain_is_replayed_into_the_step() -> None:
    """A quarter of the warps, the busiest unit at 40%: at best 60% of 2 ms, if the step waits for
    it; beside longer communication nothing."""
    report = report_of(step_with(25.0, hidden=False))
    finding = next(f for f in report.findings if f.rule == "kernel-occupancy-limited")
    assert finding.impact is not None
    assert finding.impact.gain_ns == pytest.approx(1_200_000, rel=0.02)
    assert finding.impact.low_ns == pytest.approx(0, abs=1000)
    (view,) = report.kernel_counters
    assert view.launches == 1.0 and view.step_ns == pytest.approx(2_000_000)
    assert view.gain_ns == pytest.approx(1_200_000, rel=0.02)
    hidden = report_of(step_with(25.0, hidden=True))
    assert hidden.kernel_counters[0].gain_ns == pytest.approx(0, abs=20_000)


def test_a_kernel_of_another_size_is_another_kernel() -> None:
    b = step_with(25.0, hidden=False)
    b.kernel_profile("other", grid=(1, 1, 1), block=(128, 1, 1), metrics={})
    kernels = profiled_kernels(b.analysis())
    assert [len(k.rows) for k in kernels] == [len(kernels[0].rows), 0]
    assert len(kernels[0].rows) >= 4


def test_counters_alone_make_a_report() -> None:
    report = analyze(str(path_of("ncu/sparse_matmul_a10g.ncu-rep.gz")))
    assert report.scope.step_source == "counters" and report.scope.device_name == "NVIDIA A10G"
    assert len(report.kernel_counters) == 11
    first = report.kernel_counters[0]
    assert first.short == "basic" and first.limit == "L1"
    assert first.use["L1"] == pytest.approx(0.990536784)
    assert not any(view.gain_ns for view in report.kernel_counters)
    assert not report.findings and all(note.impact.currency == "unknown" for note in report.notes)


def test_profile_without_matching_kernels_is_reported() -> None:
    b = TraceBuilder()
    with b.step():
        with b.op("aten::mm"):
            b.launch("another(int)", 900)
        b.sync()
    (profiles,) = (
        trace.meta.kernel_profiles
        for trace in [read_trace(str(path_of("ncu/sparse_matmul_a10g.ncu-rep.gz")))]
    )
    trace = b.trace()
    meta = replace(trace.meta, kernel_profiles=profiles)
    report = analyze_in_full(Run(traces={(-1, 0): replace(trace, meta=meta)})).report
    note = next(note for note in report.notes if note.rule == "kernel-partial-wave")
    assert note.impact is not None and "no launch of these kernels" in note.impact.reason


LAPLACIAN = path_of("rocprof/laplacian")


def test_times_alone_are_no_counters_but_counters_join_them() -> None:
    """rocprof writes both to files of their own: 1,001 launches of 2.644 ms, 1,171 GB/s."""
    times = LAPLACIAN / "kernel1_results.csv.gz"
    without_counters = analyze(str(times))
    assert "with times, without counters" in without_counters.verdict
    assert "takes most time: 100% of it, in 1,001 launches of 2.64 ms" in without_counters.verdict
    assert "collect it with rocprof-compute profile" in without_counters.verdict
    assert "not measured" not in str(without_counters)
    options = ReadOptions(kernel_profile=str(LAPLACIAN / "kernel1_data_movement.csv.gz"))
    both = analyze_in_full(open_run(str(times), options)).report
    assert "1,171 GB/s" in str(both) and "2.64 ms" in str(both)


def test_small_fix_does_not_lead_with_a_kernel_at_its_limit() -> None:
    """Eleven products of one size: the naive one takes most time, with L1 at its limit."""
    verdict = analyze(str(path_of("ncu/sparse_matmul_a10g.ncu-rep.gz"))).verdict
    assert "First" not in verdict
    limit, smaller = (
        verdict.index("keep tiles in registers"),
        verdict.index("The largest gain found"),
    )
    assert limit < smaller


def test_counters_verdict_names_the_fix_that_saves_most() -> None:
    report = analyze(str(path_of("ncu/deepseek_ocr_rtx5090.csv.gz")))
    assert re.search(
        r"The largest gain found is small: few resident warps[^.]+ \([^)]+\), at most 13\.8 µs "
        r"for a launch of each\.",
        report.verdict,
    )


def test_members_of_a_tar_are_not_read_as_kernels(tmp_path: Path) -> None:
    page = b'"ID","Process ID","Kernel Name","Metric Name"\\n"0","1","k","x"\\n'
    path = tmp_path / "reports.tar"
    with tarfile.open(path, "w") as archive:
        for name in ("a.details.csv", "summary.csv"):
            member = tarfile.TarInfo(name)
            member.size = len(page)
            archive.addfile(member, io.BytesIO(page))
    with pytest.raises(AdvisorError, match="a tar archive of 2 files, none named like a trace"):
        analyze(path)
