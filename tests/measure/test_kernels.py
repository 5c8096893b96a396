"""Kernels: dtype, tensor cores, FLOPs and bytes shared out, roofline and MFU, on built traces
whose figures are worked out here, and the traps of real ones."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import polars as pl
import pytest

from advisor.core.gpus import lookup
from advisor.measure import Analysis
from advisor.measure.device.kernel_names import describe_kernels
from advisor.measure.host.stacks import climb_stack
from advisor.read import read_trace
from advisor.testing import TraceBuilder

BF16 = "c10::BFloat16"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"
COPY = "void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda(x)>(y)"
GEMM = "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_32x6_tn"


def column(b: TraceBuilder, name: str) -> list:
    series = b.analysis().kernels[name]
    text = isinstance(series.dtype, pl.Enum | pl.Categorical)
    return (series.cast(pl.String) if text else series).to_list()


# -- FLOPs and bytes ------------------------------------------------------------------------


def test_operator_flops_count_once_for_several_kernels() -> None:
    """2 * 128 * 64 * 512 = 8,388,608, to the GEMM; the bias copy moves, the reduction adds up."""
    b = TraceBuilder()
    shapes = [[64], [128, 512], [512, 64]]
    outer = b.op("aten::linear", [[128, 512], [64, 512], [64]], "float")
    with b.step(), outer, b.op("aten::addmm", shapes, "float"):
        b.launch(COPY, 3)
        b.launch("ampere_sgemm_128x64_nn", 50)
        b.launch("void splitKreduce_kernel<float, float>(x)", 5)
        b.memset(64, 1)
    assert column(b, "flops") == [None, 8_388_608, 0, None]
    moved = 4 * (64 + 128 * 512 + 512 * 64 + 128 * 64)
    assert column(b, "moved") == [None, moved, None, 64]
    assert column(b, "op_name")[1:3] == ["aten::addmm"] * 2


def test_several_main_kernels_share_by_duration() -> None:
    b = TraceBuilder()
    with b.step(), b.op("aten::bmm", [[2, 10, 10], [2, 10, 10]], "float"):
        b.launch("ampere_sgemm_32x32_nn", 30)
        b.launch("ampere_sgemm_32x32_nn", 10)
    assert column(b, "flops") == pytest.approx([3000, 1000])  # 2 * 2 * 10 ** 3
    assert column(b, "moved") == pytest.approx([1800, 600])  # 3 * 2 * 100 * 4


def test_named_convolution_gradients_have_equal_flops() -> None:
    shapes = [[1, 8, 10, 10], [1, 4, 10, 10], [8, 4, 3, 3], [], [], [], [], [], [], [], []]
    kinds = [*["float"] * 3, *["Scalar"] * 8]
    arguments = [
        "",
        "",
        "",
        "[8]",
        "[1, 1]",
        "[1, 1]",
        "[1, 1]",
        "False",
        "[0, 0]",
        "1",
        "[True, True, False]",
    ]
    once = 2 * 100 * 8 * 4 * 9

    def record(*names: str) -> list:
        b = TraceBuilder()
        with b.step(), b.op("aten::convolution_backward", shapes, kinds, concrete=arguments):
            for place, name in enumerate(names):
                b.launch(name, 10 * (place + 1))
        return column(b, "flops")

    dgrad, wgrad = "cutlass_tensorop_s1688dgrad_x", "cutlass_tensorop_s1688wgrad_x"
    assert record(dgrad, wgrad) == [once, once]
    assert record(dgrad, dgrad, wgrad) == pytest.approx([once / 3, once * 2 / 3, once])
    assert record(dgrad, "s1688gemm_x") == pytest.approx([once * 2 / 3, once * 4 / 3])
    assert record(wgrad) == [2 * once]  # the other is in there somewhere


def test_child_without_shapes_uses_its_parents_once() -> None:
    b = TraceBuilder()
    shapes = [[8, 16], [16, 4]]
    with b.step():
        with b.op("aten::matmul", shapes), b.op("aten::mm"):
            b.launch("ampere_sgemm_32x32_nn", 10)
        with b.op("aten::matmul", shapes):
            b.launch("ampere_sgemm_32x32_nn", 10)
            with b.op("aten::mm", shapes):
                b.launch("ampere_sgemm_32x32_nn", 10)
    assert column(b, "flops") == [1024, None, 1024]


def test_operator_shapes_do_not_apply_to_nested_operators() -> None:
    b = TraceBuilder()
    with b.step(), b.op("aten::linear", [[8, 16], [4, 16]], "float"), b.op("mylib::dequantise"):
        b.launch(ADD, 10)
    assert (column(b, "flops"), column(b, "family")) == ([None], ["elementwise"])


def test_work_of_zero_duration_is_still_shared() -> None:
    b = TraceBuilder()
    with b.step(), b.op("aten::mm", [[8, 16], [16, 4]]):
        b.launch("ampere_sgemm_32x32_nn", 0)
        b.launch("ampere_sgemm_32x32_nn", 0)
    assert column(b, "flops") == [512, 512]


def test_copy_and_memset_bytes_are_device_memory_bytes() -> None:
    b = TraceBuilder()
    with b.step():
        b.copy("HtoD", 1000)
        b.copy("DtoD", 1000)
        b.memset(1000, 1)
    assert column(b, "moved") == [1000, 2000, 1000]
    assert column(b, "flops") == [None] * 3


@pytest.mark.parametrize(
    "dims", [[[-1, 4], [4, 4]], [["x"]], [[[[]]]], [[1 << 62, 1 << 62], [1 << 62, 4]], [[None]]]
)
def test_damaged_shapes_are_not_known(dims: list) -> None:
    b = TraceBuilder()
    with b.step(), b.op("aten::mm", dims, "float"):
        b.launch("ampere_sgemm_32x32_nn", 10)
    assert column(b, "flops") == [None]
    assert column(b, "dtype") == ["fp32"]


# -- number formats and tensor cores --------------------------------------------------------


def matmul(kernel: str, dtype: str | None, gpu: str = "A100", op: str = "aten::mm") -> tuple:
    b = TraceBuilder(gpu)
    shapes = None if dtype is None else [[64, 64], [64, 64]]
    with b.step(), b.op(op, shapes, dtype or "float"):
        b.launch(kernel, 10)
    row = b.analysis().kernels.row(0, named=True)
    return row["dtype"], row["tensor_core"], row["eligible"]


def test_dtype_and_kernel_together_tell_tensor_cores() -> None:
    assert matmul(GEMM, BF16) == ("bf16", True, True)
    assert matmul("nvjet_tst_64x64_64x16_2x1_2cta_v_bz_bias_TNT", BF16) == ("bf16", True, True)
    assert matmul("ampere_sgemm_128x64_nn", "float") == ("fp32", False, True)
    # fp32 inputs on tensor cores are TF32, whatever the kernel is called.
    s1688 = "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_64x64_32x4_nn_align1>(x)"
    assert matmul(s1688, "float") == ("tf32", True, True)
    assert matmul("nvjet_sss_128x64_32x6_1x2_h_bz_TNN", "float", "H100") == ("tf32", True, True)
    assert matmul("volta_fp16_sgemm_fp16_128x64_tn", "c10::Half", "V100") == ("fp16", False, True)


def test_an_unknown_kernel_is_not_reported_and_never_false() -> None:
    assert matmul("vendor_secret_kernel", BF16) == ("bf16", None, True)
    assert matmul("vendor_secret_kernel", "float") == ("fp32", None, True)
    assert matmul("vendor_secret_kernel", None) == (None, None, None)
    # Except where the device has nothing that could: no TF32 before Ampere.
    assert matmul("vendor_secret_kernel", "float", "V100") == ("fp32", False, True)


def test_matrix_primitive_templates_use_tensor_cores_in_16_bit() -> None:
    assert matmul("triton_tem_fused_mm_0", BF16) == ("bf16", True, True)
    assert matmul("triton_tem_fused_mm_0", "float") == ("fp32", None, True)


def test_vectors_double_precision_and_helpers_are_not_eligible() -> None:
    assert matmul("void gemv2T_kernel_val<int, int, float>(x)", "float") == ("fp32", False, False)
    assert matmul("ampere_dgemm_64x64_nn", "double") == ("fp64", False, False)
    assert matmul("void splitKreduce_kernel<float>(x)", "float")[1:] == (False, False)
    b = TraceBuilder()
    with b.step(), b.op("aten::mm", [[1, 64], [64, 64]], "float"):
        b.launch("ampere_sgemm_32x32_sliced1x4_tn", 10)
    assert column(b, "eligible") == [False]


def test_only_matrix_products_are_tensor_core_eligible() -> None:
    b = TraceBuilder()
    with b.step():
        with b.op("aten::add", [[8], [8]], BF16):
            b.launch(ADD, 5)
        b.launch("nobody_knows", 5)
        b.launch("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", 5)
        b.copy("DtoD", 64)
    assert column(b, "tensor_core") == [False, None, False, False]
    assert column(b, "eligible") == [False, None, False, False]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT", "fp16"),
        ("nvjet_qqtst_128x256_128x5_2x1_v_bz_NNT", "fp8"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64", "bf16"),
        ("sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc", "tf32"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_d884gemm_64x64_16x4_nn_align1>(x)", "fp64"),
        ("Cijk_Ailk_Bljk_HHS_BH_MT128x128x16_MI32x32x8x1_SE", "fp16"),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x192x64_MI16x16x1", "bf16"),
        ("Cijk_Alik_Bljk_SB_Bias_AS_SAV_UserArgs_MT64x16x32_MI16x16x1", "fp32"),
        ("void at::native::reduce_kernel<512, 1, at::native::MeanOps<float, float>>(x)", "fp32"),
        # Two formats outside a GEMM: which one goes in is unknown.
        ("void at::native::softmax_warp_forward<c10::BFloat16, float, float>(x)", None),
        ("void vllm::paged_attention_v1_kernel<unsigned short, (vllm::Fp8KVCacheDataType)0>", None),
        ("plain", None),
    ],
)
def test_dtype_is_read_from_unambiguous_names_only(name: str, dtype: str | None) -> None:
    assert describe_kernels(pl.Series([name]))["dtype"].to_list() == [dtype]


def test_amds_matrix_cores_do_fp32_itself(shared_trace) -> None:
    a = Analysis(read_trace(shared_trace("mi250_train")))
    gemm = a.kernels.filter(pl.col("family") == "gemm")
    assert set(gemm["dtype"].cast(pl.String)) == {"fp32"}
    assert gemm["tensor_core"].all()


# -- the traps of real traces ---------------------------------------------------------------


def shares(a: Analysis) -> dict[bool | None, float]:
    """Share of matrix time by whether it runs on tensor cores, split-K reductions left out."""
    frame = a.kernels.with_columns(a.trace.gpu["dur"], a.trace.gpu["name"]).filter(
        pl.col("family").is_in(["gemm", "convolution", "attention"])
        & ~pl.col("name").cast(pl.String).str.contains("splitK|SplitK|globalKernel|reduce_wgrad")
        & pl.Series(a.in_window)
    )
    total = frame["dur"].sum()
    return {
        value: frame.filter(pl.col("tensor_core").eq_missing(value))["dur"].sum() / total
        for value in (True, False, None)
    }


@pytest.mark.parametrize(
    ("name", "on"),
    [("b200_eager", 1.0), ("h100_bert_small_inference", 1.0), ("v100_train_copy_heavy", 0.0)],
)
def test_tensor_core_use_of_public_traces(name: str, on: float, shared_trace) -> None:
    """A name list of before ``nvjet`` and ``wmma_tensorop`` finds 0% on B200 and half on H100."""
    shares_found = shares(Analysis(read_trace(shared_trace(name))))
    assert shares_found[True] == on
    assert shares_found[None] == 0


def test_tf32_is_detected_by_kernel_name_and_fp32_input(shared_trace) -> None:
    a = Analysis(read_trace(shared_trace("a100_train_6steps")))
    gemm = a.kernels.with_columns(a.trace.gpu["name"]).filter(pl.col("family") == "gemm")
    named = gemm["name"].cast(pl.String).str.contains("tensorop_s1688gemm")
    assert (gemm["dtype"].cast(pl.String) == "tf32").to_list() == named.to_list()
    assert gemm["tensor_core"].to_list() == named.to_list()
    assert named.sum() > 1000
    assert gemm["flops"].null_count() == 0


def test_gemm_flops_of_a100_training_equal_a_direct_sum(shared_trace) -> None:
    import json

    a = Analysis(read_trace(shared_trace("a100_train_6steps")))
    inside = a.in_window
    seen: set[int] = set()
    expected = 0
    kernels = zip(
        a.trace.gpu["op"].to_list(), a.kernels["family"].cast(pl.String), inside, strict=True
    )
    for op, family, used in kernels:
        if family != "gemm" or not used or op in seen:
            continue
        seen.add(op)
        dims = json.loads(a.trace.inputs["dims"][a.trace.cpu["inputs"][op]])
        left, right = [d for d in dims if len(d) > 1][-2:]
        expected += 2 * math.prod(left) * right[-1]
    rows = a.families.filter(pl.col("family") == "gemm")["flops"].item()
    assert rows == pytest.approx(expected, rel=1e-6)  # no kernel is cut by the end of a step
    assert expected > 1e12


# -- summaries ------------------------------------------------------------------------------


def test_roofline_is_attainable_over_actual_time() -> None:
    """A100-SXM4-80GB: 312 TFLOP/s in bf16, 2039 GB/s."""
    b = TraceBuilder("A100")
    with b.step():
        with b.op("aten::mm", [[4096, 4096], [4096, 4096]], BF16):
            b.launch(GEMM, 880.0)
        with b.op("aten::add", [[1 << 26], [1 << 26], []], ["float", "float", "Scalar"]):
            b.launch(ADD, 500.0)
    a = b.analysis()
    gpu = lookup("NVIDIA A100-SXM4-80GB")
    assert gpu is not None
    table = {row["name"]: row for row in a.hot_kernels.iter_rows(named=True)}
    gemm, add = table[GEMM], table[ADD]
    assert gemm["flops_per_s"] == pytest.approx(2 * 4096**3 / 880e-6)
    assert gemm["roofline"] == pytest.approx(2 * 4096**3 / 312e12 / 880e-6)
    assert gemm["roofline"] == pytest.approx(0.5006, abs=1e-3)
    assert add["bytes_per_s"] == pytest.approx(3 * 4 * 2**26 / 500e-6)
    assert add["roofline"] == pytest.approx(3 * 4 * 2**26 / gpu.bandwidth / 500e-6)
    assert (gemm["share"], add["share"]) == pytest.approx((880 / 1380, 500 / 1380))
    assert a.hot_kernels["name"].to_list() == [GEMM, ADD]


def test_roofline_is_unmeasured_for_unknown_device_or_shape() -> None:
    for gpu, shapes in ((None, [[64, 64], [64, 64]]), ("A100", None)):
        b = TraceBuilder(gpu)
        with b.step(), b.op("aten::mm", shapes, BF16):
            b.launch(GEMM, 10)
        assert b.analysis().hot_kernels["roofline"].to_list() == [None]
        assert b.analysis().mfu is None


def test_a_rate_needs_most_of_the_kernels_time_to_be_known() -> None:
    def rate(known_us: float, unknown_us: float) -> float | None:
        b = TraceBuilder("A100")
        with b.step():
            with b.op("aten::mm", [[1000, 1000], [1000, 1000]], BF16):
                b.launch(GEMM, known_us)
            with b.op("aten::mm"):
                b.launch(GEMM, unknown_us)
        a = b.analysis()
        assert (a.mfu is None) == (a.hot_kernels["roofline"][0] is None)
        flops_per_s = a.hot_kernels["flops_per_s"][0]
        return None if flops_per_s is None else float(flops_per_s)

    assert rate(90, 10) == pytest.approx(2e9 / 90e-6)
    assert rate(70, 30) is None


def test_each_name_has_one_row_with_its_main_kind() -> None:
    b = TraceBuilder("A100")
    with b.step():
        with b.op("aten::add"):
            b.launch(ADD, 10, blocks=108, threads=256)
        with b.op("aten::sub"):
            b.launch(ADD, 30, blocks=864, threads=256)
    table = b.analysis().hot_kernels
    assert table.height == 1
    row = table.row(0, named=True)
    assert (row["count"], row["dur"], row["op_name"]) == (2, 40_000, "aten::sub")
    assert row["blocks_per_sm"] == pytest.approx((1 * 10 + 8 * 30) / 40)
    assert row["occupancy"] == pytest.approx((12.5 * 10 + 100 * 30) / 40)


def test_mfu_holds_each_dtype_against_its_own_peak() -> None:
    """2 * 4096^3 FLOPs in bf16 and as many in fp32 (19.5 TFLOP/s), over the length of the step."""
    work = 2 * 4096**3
    b = TraceBuilder("A100")
    with b.step():
        with b.op("aten::mm", [[4096, 4096], [4096, 4096]], BF16):
            b.launch(GEMM, 800)
        with b.op("aten::mm", [[4096, 4096], [4096, 4096]], "float"):
            b.launch("ampere_sgemm_128x64_nn", 9000)
        b.sync()
    a = b.analysis()
    assert a.mfu == pytest.approx((work / 312e12 + work / 19.5e12) / (a.span_ns * 1e-9))


def test_only_the_part_inside_the_used_steps_counts() -> None:
    b = TraceBuilder("A100")
    for _ in range(3):
        with b.step(), b.op("aten::mm", [[64, 64], [64, 64]], "float"):
            b.launch("ampere_sgemm_32x32_nn", 100)
            b.sync()
    all_steps, one_step = b.analysis(), Analysis(b.trace(), select=(1, 2))
    assert all_steps.families["flops"].item() == 3 * 2 * 64**3
    assert one_step.families["flops"].item() == pytest.approx(2 * 64**3)
    assert one_step.families["dur"].item() == 100_000


def test_copies_are_listed_beside_kernels() -> None:
    b = TraceBuilder("A100")
    with b.step():
        b.launch("ampere_sgemm_32x32_nn", 100)
        b.copy("DtoD", 1 << 20, 25)
        b.memset(1 << 20, 5)
    table = {row["family"]: row for row in b.analysis().families.iter_rows(named=True)}
    assert table["gemm"]["share"] == 1.0
    assert table["copy"]["share"] == 0.25
    assert table["memset"]["moved"] == 1 << 20
    assert b.analysis().hot_kernels["name"].to_list() == ["ampere_sgemm_32x32_nn"]


@pytest.mark.parametrize(
    "name", ["no_gpu_rank", "cupti_counters", "mi210_gpu_only", "old_capitalised_categories"]
)
def test_reduced_traces_give_frames_of_the_same_columns(name: str, shared_trace) -> None:
    full = TraceBuilder("A100")
    with full.step():
        full.launch("k", 1)
    a = Analysis(read_trace(shared_trace(name)))
    for frame in ("kernels", "families", "hot_kernels"):
        assert getattr(a, frame).schema == getattr(full.analysis(), frame).schema
    assert a.kernels.height == a.trace.gpu.height
    assert a.mfu is None


def test_a_trace_without_device_work_gives_empty_frames() -> None:
    b = TraceBuilder("A100")
    with b.step(), b.op("aten::mm", [[8, 8], [8, 8]]):
        b.host(5)
    a = b.analysis()
    assert a.kernels.is_empty()
    assert a.families.is_empty()
    assert a.hot_kernels.is_empty()


@pytest.mark.parametrize("seed", range(5))
def test_nearest_ancestor_equals_a_walk_upwards(seed: int) -> None:
    rng = np.random.default_rng(seed)
    parent = np.array([-1, *(max(-1, row - int(rng.integers(1, 40))) for row in range(1, 6000))])
    wanted = rng.random(6000) < (0.001, 0.01, 0.0, 0.3, 0.003)[seed]
    rows = rng.integers(-1, 6000, 4000)

    def walk(row: int) -> int:
        while row >= 0 and not wanted[row]:
            row = int(parent[row])
        return row

    assert climb_stack(parent, wanted, rows).tolist() == [walk(int(row)) for row in rows]


@pytest.mark.parametrize(("shape", "varies"), [(64, True), (None, False)])
def test_kernels_of_varying_time_on_equal_inputs_are_found(shape: int | None, varies: bool) -> None:
    """A product of one kernel takes 100 or 900 us: on one shape, or on a larger one each time."""
    b = TraceBuilder()
    for number, _ in enumerate(b.steps(8)):
        size = shape or 64 + number
        us = 100 if number % 2 else 900
        b.run("aten::mm", "gemm", us, [[size, size], [size, size]], "float")
        b.run("aten::relu", "relu", 100, [[512, 512]], "float")
    analysis = b.analysis().varying_kernels
    assert analysis.share == pytest.approx(4000 / 4800 if varies else 0.0)
    assert analysis.ratio == pytest.approx(9.0 if varies else 1.0)


@pytest.mark.parametrize(
    ("name", "varies"),
    [
        ("mi300x_kernels_after_steps", True),
        ("a100_train_6steps", False),
        ("pairs/sam_3_bf16_compiled_sdpa", False),
    ],
)
def test_shared_gpu_is_detected_by_its_kernels(
    shared_trace: Callable[[str], str], name: str, varies: bool
) -> None:
    a = Analysis(read_trace(shared_trace(name)))
    assert (a.varying_kernels.share > 0.9) == varies
    assert varies or a.varying_kernels.share < 0.2
