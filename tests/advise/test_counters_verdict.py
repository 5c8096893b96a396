"""The verdict about hardware counters alone names kernels as the table does, and says what to do;
the command that collects them profiles the chosen kernels."""

from __future__ import annotations

import gzip
import json
import math
import re
from pathlib import Path

import pytest

import advisor
from advisor.advise.kernel_counters import base_name
from advisor.measure.device.kernel_names import library_of
from advisor.render.formats import REPORTS

CORPUS = Path(__file__).parents[1] / "corpus"


@pytest.mark.parametrize(
    "name",
    ["deepseek_ocr_rtx5090.csv.gz", "sparse_matmul_a10g.ncu-rep.gz"],
)
def test_first_kernel_has_the_same_name_everywhere(name: str) -> None:
    report = advisor.analyze(CORPUS / "ncu" / name)
    first = re.split(r"First: |The largest gain found is small: ", report.verdict)[1]
    kernel = first[first.index("(") + 1 : first.index(")")].split(" and ")[0]
    text = REPORTS.render("terminal", report, width=100)
    table, findings = text.split("What the counters show")
    assert f"  {kernel}  " in table
    assert kernel in " ".join(findings.split())


def test_latency_bound_kernels_at_low_occupancy_get_advice() -> None:
    report = advisor.analyze(CORPUS / "rocprof" / "rocprof_compute_sample.db.gz")
    longest = max(report.kernel_counters, key=lambda k: (k.duration_ns or 0) * k.profiled)
    assert longest.occupancy == pytest.approx(0.094, abs=0.001) and not report.notes
    assert "Its occupancy is 9%" in report.verdict
    assert "Its waves mostly wait" in report.verdict and "warps" not in report.verdict
    assert "It is a kernel of rocPRIM: give it more work" in report.verdict


def test_times_alone_say_how_to_add_the_counters() -> None:
    report = advisor.analyze(CORPUS / "rocprof" / "laplacian" / "kernel1_results.csv.gz")
    assert "collect it with rocprof-compute profile" in report.verdict
    report = advisor.analyze(CORPUS / "rocprof" / "laplacian" / "kernel1_data_movement.csv.gz")
    command = "advisor analyze kernel1_data_movement.csv.gz --kernel-profile TIMES"
    assert report.verdict.endswith(command)


def raw_launches(path: Path) -> list[str]:
    """Names of a file's kernels in the order of their start, without polars or the reader: those in
    the device's step marks, where it has any."""
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    marks = [e for e in events if e.get("cat") == "gpu_user_annotation" and "Step#" in e["name"]]
    first = min((e["ts"] for e in marks), default=0)
    last = max((e["ts"] + e["dur"] for e in marks), default=math.inf)
    kernels = [e for e in events if str(e.get("cat", "")).lower() == "kernel"]
    kernels = [e for e in kernels if first <= e["ts"] < last]
    return [e["name"] for e in sorted(kernels, key=lambda e: float(e["ts"]))]


@pytest.mark.parametrize(
    ("name", "steps", "per_step", "chosen"),
    [
        # counted in the files: flash_fwd_kernel 24, elementwise_kernel<…> of all functors 387
        ("h100_qwen_inference", 1, 411, ["flash_fwd_kernel", "BinaryFunctor<c10::BFloat16"]),
        # six kernels begin with split_embedding_backward, 16 with CatArrayBatchedCopy
        ("a100_train_6steps", 6, 22, ["adagrad_unweighted_kernel_cta_per_row_1"]),
    ],
)
def test_profiled_launches_are_chosen_kernels_of_the_third_step(
    name: str, steps: int, per_step: int, chosen: list[str]
) -> None:
    path = CORPUS / f"{name}.json.gz"
    command, cost = advisor.analyze(path).profile_kernels
    pattern = re.search(r"regex:\^\(([^)]+)\)", command)
    numbers = re.search(r"--launch-skip (\d+) --launch-count (\d+)", command)
    assert pattern is not None and numbers is not None
    skip, count = map(int, numbers.groups())
    base = re.compile(rf"(?:^|[\s:])(?:{pattern[1]})[^:]*?(?:[<(]|$)")
    matching = [each for each in raw_launches(path) if base.search(each.split("<")[0] + "<")]
    assert len(matching) == pytest.approx(steps * per_step, rel=0.02)
    assert 2 * per_step <= skip and skip + count <= 3 * per_step
    profiled = matching[skip % per_step :][:count]
    assert all(any(kernel in each for each in profiled) for kernel in chosen)
    assert cost.startswith(f"{count} launches of the third step, each")


def test_kernels_of_a_mostly_idle_device_are_not_profiled() -> None:
    assert advisor.analyze(CORPUS / "linear_2080ti_launch_bound.json.gz").profile_kernels == []


def test_kernel_is_matched_by_its_nsight_compute_name() -> None:
    names = {
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, 4>(float*)": (
            "CatArrayBatchedCopy"
        ),
        "_ZN19cutlass_cudnn_train6KernelINS_4conv6kernel23ImplicitGemmEEEvNT_6ParamsE": "Kernel",
        "_Z12scale_kernelPfi": "scale_kernel",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop>(int)": "Kernel2",
        "volta_sgemm_64x64_tn": "volta_sgemm_64x64_tn",
    }
    assert {name: base_name(name) for name in names} == names


def test_a_librarys_kernel_is_replaced_and_not_rewritten() -> None:
    """The longest, cutlass_80_tensorop…, does 45.9e9 operations on tensor cores in 405 µs: 113 of
    the 209 TFLOP/s of an RTX 5090. Its 17% occupancy is the tile's design; a gemv has 17% too."""
    report = advisor.analyze(CORPUS / "ncu" / "deepseek_ocr_rtx5090.csv.gz")
    (note,) = report.notes
    assert "is a kernel of cuBLAS" in note.fix and "choose another" in note.fix
    assert not any("tensorop" in (place.kernel or "") for place in note.where)
    assert "no unit is busier" not in report.verdict
    assert "For 4 it was not collected: add ncu --set full." in report.verdict
    assert "registers" not in note.fix and "__launch_bounds__" not in note.code
    report = advisor.analyze(CORPUS / "rocprof" / "rocprof_compute_sample.db.gz")
    assert "It is a kernel of rocPRIM" in report.verdict and "registers" not in report.verdict


@pytest.mark.parametrize(
    ("kernel", "library"),
    [
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>(Params)", "CUTLASS"),
        ("void cutlass::Kernel<cutlass::gemm::kernel::Gemm<MyTile>>(Params)", None),
        ("ampere_sgemm_128x64_nn", "cuBLAS"),
        ("void gemv2T_kernel_val<int, int, float, cublasGemvParamsEx<int>>(T)", "cuBLAS"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas", "cuBLAS"),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float>(int)", "cuDNN"),
        ("void flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128>>(P)", "FlashAttention"),
        ("void at::native::vectorized_elementwise_kernel<4, F>(int)", "PyTorch"),
        ("one_d_vec<64, 64, 16>(int)", None),
        ("triton_poi_fused_add_0", None),
    ],
)
def test_kernels_of_libraries_are_known_by_their_names(kernel: str, library: str | None) -> None:
    assert library_of(kernel) == library


def test_gain_below_the_loss_names_its_limit() -> None:
    """1.07 waves: 47% is lost, but L1 is busy for 81% of the time already."""
    (note,) = advisor.analyze(CORPUS / "ncu" / "sparse_matmul_a10g.ncu-rep.gz").notes
    assert "47% of the kernel's time" in note.summary
    assert "up to 19% of the kernel's time, because then L1 (81% busy) limits it" in note.summary


@pytest.mark.parametrize("name", ["cutlass_a100_s4", "cutlass_a100_s8"])
def test_the_reference_of_an_example_does_not_lead(name: str) -> None:
    """CUTLASS' basic_gemm checks its product with ReferenceGemm_kernel, 38 times as long."""
    report = advisor.analyze(CORPUS / "ncu" / f"{name}.ncu-rep.gz")
    assert report.verdict.startswith("1 kernel with hardware counters: it is limited by latency.")
    left_out = "ReferenceGemm_kernel only checks results and is left out."
    assert left_out in report.verdict
    assert "First" not in report.verdict
    # 16 blocks of 108 multiprocessors, or 12: the grid that the file has
    assert re.search(
        r"left out. Kernel<Gemm<Mma[^ ]*…> takes .*Its \d+ blocks fill \d+% of the GPU",
        report.verdict,
    )
    page = REPORTS.render("terminal", report, width=80)
    assert "memory (long scoreboard)" in page and "constants (imc miss)" in page
    below = page.partition("Kernels with hardware counters")[2]
    assert "Reference" not in below and "Uncoalesced" not in below


def test_profiler_advice_appears_once_without_links() -> None:
    report = advisor.analyze(CORPUS / "ncu" / "sparse_matmul_a10g.ncu-rep.gz")
    page = " ".join(REPORTS.render("terminal", report, details=True).split())
    assert "Best Practices Guide" not in page
    assert (
        page.count("To further improve performance, work will likely") == 1
    )  # of L1 and of compute


def test_two_variants_of_a_program_are_compared_and_not_added_up() -> None:
    """rocprof's files: 1,001 launches of 2.644 ms, and of 2.557 ms, beside 2.2 ms of others."""
    report = advisor.analyze(CORPUS / "rocprof" / "laplacian")
    assert "100% of kernel1_results, in 1,001 launches of 2.64 ms" in report.verdict
    # 2,557 / 2,644 µs; 2.73 / 2.88 GiB
    second = "In kernel2_results each takes 2.56 ms, 3% less, and moves 5% fewer bytes"
    assert second in report.verdict
    assert "NVIDIA" not in report.verdict


def test_profile_names_its_program_and_device() -> None:
    """The kernels have PyTorch's TensorIteratorBase in their names; the GPU has CC 12.0."""
    text = _report_text("ncu/deepseek_ocr_rtx5090.csv.gz")
    assert "20 kernels of a PyTorch program" in text
    assert "model not recorded, compute capability 12.0" in text
    assert "no known framework" not in text
    assert "MI350, gfx950" in _report_text("rocprof/rocprof_compute_sample.db.gz")


def test_the_profilers_own_rules_follow_the_findings_each_once() -> None:
    text = _report_text("ncu/deepseek_ocr_rtx5090.csv.gz")
    profiler_advice = text.split("The kernel profiler's own advice")[1].split("Skipped checks")[0]
    assert text.index("What the counters show") < text.index("The kernel profiler's own advice")
    assert (
        len(profiler_advice) < 1200 and "fp64" not in profiler_advice
    )  # these kernels compute in BF16
    assert profiler_advice.count("Every scheduler is capable of") == 1


def test_kernel_with_a_half_busy_unit_is_not_latency_bound() -> None:
    """The kernel's compute is 53% busy; the copies and the heap come from AMD's runtime."""
    report = advisor.analyze(CORPUS / "rocprof" / "rocprof_compute_sample.db.gz")
    assert "5 kernels with hardware counters: 4 are limited by latency, 1 by latency and" in (
        report.verdict
    )
    assert "2 kernels of the runtime are not counted." in report.verdict


def _report_text(name: str) -> str:
    text = REPORTS.render("terminal", advisor.analyze(CORPUS / name), width=100, details=True)
    return " ".join(text.split())
