"""Families by kernel name, by operator, and their totals against sums made from the raw file."""

from __future__ import annotations

import gzip
import json

import polars as pl
import pytest

from advisor.measure import Analysis
from advisor.measure.device.families import FAMILIES, op_families
from advisor.measure.device.kernel_names import describe_kernels
from advisor.read import read_trace
from advisor.testing import TraceBuilder

NATIVE = "void at::native::"
ANON = "void at::native::(anonymous namespace)::"
FUNCTOR = "(at::TensorIteratorBase&)::{lambda()#2}::operator()() const::{lambda()#4}"

# Names as profilers write them (long template lists cut), from public traces and projects.
KERNELS: dict[str, list[str]] = {
    "gemm": [
        "volta_sgemm_128x32_nt",
        "ampere_sgemm_32x32_sliced1x4_tn",
        "ampere_bf16_s16816gemm_bf16_256x128_ldg8_f2f_stages_64x3_nn",
        "turing_fp16_s1688gemm_fp16_256x128_ldg8_f2f_tn",
        "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_64x64_32x4_nn_align1>(cutlass_80_te",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x2_tn_al",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_warpgroupsize1x1x1_execute_s",
        "nvjet_tst_64x64_64x16_2x1_2cta_v_bz_bias_TNT",
        "nvjet_sm100_tst_mma_128x256x64_2_64x128x64_tmaAB_bz_TNT",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int>>",
        "void splitKreduce_kernel<float, float, float, float, true, false, false>(cublasSplitKP",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float>(x)",
        "void epilogue::impl::globalKernel<float, float, float, true, true>(int, int, long)",
        "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false>(x)",
        "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, float, float>(x)",
        "void gemmk1_kernel<float, 256, 5, false, false, false, false, cublasGemvTensorStrided>(",
        "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x192x64_MI16x16x1_SN_LDSB1",
        "bmm_MxE4m3_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3_et128x16_m128x16x32_cga1x1x1_16dp256b",
        "void deep_gemm::sm90_fp8_gemm_1d2d_impl<4096u, 7168u>(x)",
        "void marlin::Marlin<__nv_bfloat16, 256, 4>(x)",
        "fused_moe_kernel",
        "triton_tem_fused_mm_0",
        "_ZN2ck27kernel_gemm_xdl_cshuffle_v1INS_63GridwiseGemm_k0mk1_k0nk1_mn_xdl",
    ],
    "convolution": [
        "sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x12",
        "void cutlass_cudnn_infer::Kernel<cutlass_tensorop_s1688dgrad_optimized_tf32_64x128_32x",
        "_ZN19cutlass_cudnn_train6KernelINS_4conv6kernel23ImplicitGemmConvolutionINS1_11threadbl",
        "cudnn_infer_ampere_scudnn_128x64_relu_xregs_large_nn_v1",
        "ampere_gcgemm_64x64_nt",
        "void fft2d_c2r_32x32<float, false, false, 0u, false, false>(float*, float2 const*)",
        "void cask_cudnn::computeOffsetsKernel<false, false>(cask_cudnn::ComputeOffsetsParams)",
        "void cudnn::cnn::reduce_wgrad_nchw_helper<float, float>(void*, void const*, float)",
        "igemm_bwd_gtcx2_nhwc_bf16_bx0_ex1_bt32x128x32_wt16x64x4_ws1x1_wr1x1_ta1x4x1x1",
        "miopenSp3AsmConv_v30_3_1_gfx9_fp32_f3x2_stride1",
        "naive_conv_fwd_nchw_float_double_float",
        "void ck::kernel_grouped_conv_fwd_multiple_abd_xdl_cshuffle<ck::GridwiseGemmMultipleABD>(",
        ANON + "conv_depthwise2d_forward_kernel<3, float, int>(x)",
    ],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128>>(x)",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash>>>",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<x>)",
        "cudnn_generated_fort_native_sdpa_sm80_flash_fprop_wmma_f16_knob_31_64x64x64_4x1x1_kern",
        "fmhaSm100aKernel_QkvE4m3OBfloat16H64PagedKvCausalP16VarSeqQ128Kv128PersistentContext",
        "void flashinfer::BatchPrefillWithPagedKVCacheKernel<flashinfer::KernelTraits<x>>(y)",
        "kernel_unified_attention_2d",
        "attn_fwd",
        "triton_tem_fused_flex_attention_0",
        "_ZN7ck_tile6kentryILi1ENS_13FmhaFwdKernelINS_25BlockFmhaPipelineQRKSVSENS",
    ],
    "softmax": [
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true, false>(",
        ANON + "cunn_SoftMaxForward<8, float, float, float, SoftMaxForwardEpilogue>(x)",
        "void scaled_upper_triang_masked_softmax_warp_forward<c10::BFloat16, float, 11>(x)",
        "triton_per_fused__softmax_4",
    ],
    "normalisation": [
        ANON + "vectorized_layer_norm_kernel<c10::BFloat16, float>(int, float)",
        ANON + "GammaBetaBackwardCUDAKernel<float, float>(long, long, float const*)",
        "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 128, true, 1, true>(x)",
        "std::enable_if<(((8)>(0)))&&vllm::_typeConvert<c10::BFloat16>::exists, void>::type "
        "vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(c10::BFloat16*, long)",
        ANON + "unrolled_elementwise_kernel_for_multi_outputs<3, batch_norm_update_stats>(x)",
        "MIOpenBatchNormFwdTrainSpatial",
        "triton_per_fused_native_layer_norm_5",
    ],
    "elementwise": [
        NATIVE + "vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)",
        NATIVE + "elementwise_kernel<128, 2, gpu_kernel_impl<tanh_backward_kernel_cuda" + FUNCTOR,
        NATIVE + "vectorized_elementwise_kernel<8, at::native::FillFunctor<c10::BFloat16>>(int)",
        "void vllm::act_and_mul_kernel<c10::BFloat16, &(c10::BFloat16 vllm::silu_kernel)>(x)",
        "void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*)",  # no embedding
        # Its library is called fb-gemm.
        "void fbgemm_gpu::(anonymous namespace)::_compute_FP8_quantize_cuda_kernel<float>(x)",
        "triton_poi_fused_gelu_mul_1",
    ],
    "reduction": [
        NATIVE + "reduce_kernel<512, 1, at::native::ReduceOp<float, sum_functor<float>>>(x)",
        ANON + "multi_tensor_apply_kernel<TensorListMetadata<1>, LpNormFunctor<float>>(x)",
        "triton_red_fused_add_mean_mul_pow_rsqrt_0",
    ],
    "layout": [
        "void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true>(x)",
        "batched_transpose_16x64_pack_1x4_ediv_1x2_half",
        ANON + "CatArrayBatchedCopy<float, unsigned int, 2, 128, 1>(float*)",
        "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, unsigned char>(x)",
        "void fbgemm_gpu::permute_indices_weights_kernel<false, int, decltype(nullptr)>(int)",
        "triton_poi_fused_clone_3",
    ],
    "copy": [
        NATIVE + "elementwise_kernel<128, 4, gpu_kernel_impl<direct_copy_kernel_cuda" + FUNCTOR,
        NATIVE + "unrolled_elementwise_kernel<at::native::bfloat16_copy_kernel_cuda(x)>(y)",
        "triton_poi_fused__to_copy_0",
    ],
    "embedding": [
        "void split_embedding_backward_codegen_rowwise_adagrad_unweighted_kernel_cta_per_row_1<>(",
        ANON + "indexSelectLargeIndex<float, int, unsigned int, 1, 1, -2, true>(x)",
        NATIVE + "_scatter_gather_elementwise_kernel<128, 4, at::native::_cuda_scatter>(x)",
        NATIVE + "vectorized_gather_kernel<16, long>(char*, char*, long*, int)",
    ],
    "sort": [
        "void cub::DeviceRadixSortOnesweepKernel<cub::DeviceRadixSortPolicy<long, int, int>>(x)",
        NATIVE + "sbtopk::gatherTopK<float, unsigned int, 1, false>(x)",
        "void at_cuda_detail::cub::DeviceScanKernel<at_cuda_detail::cub::AgentScanPolicy<128>>(x)",
        "void vllm::moe::moe_align_block_size_kernel<int>(x)",
    ],
    "random": [
        ANON + "fused_dropout_kernel_vec<float, float, unsigned int, 1, 4, bool>(x)",
        ANON + "distribution_elementwise_grid_stride_kernel<float, 4, x>(y)",
    ],
    "pooling": [
        ANON + "max_pool_forward_nchw<float, float>(int, float const*)",
        ANON + "upsample_bilinear2d_out_frame<float, float>(x)",
    ],
    "loss": [
        ANON + "nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>(x)",
        NATIVE + "vectorized_elementwise_kernel<4, mse_kernel_cuda" + FUNCTOR,
    ],
    "transform": [
        "void vector_fft<32u, 8u, 32u, (padding_t)6, (twiddle_t)0, (loadstore_modifier_t)2>(x)",
        "hadacore::hadamard_transform_kernel",  # no Adam
    ],
    "optimizer": [
        "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>, float>(x)",
        ANON + "multi_tensor_apply_kernel<TensorListMetadata<4>, FusedAdamMathFunctor<float>>(x)",
    ],
    "communication": [
        "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)",
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(x)",
        "void c10d::symmetric_memory::(anonymous namespace)::one_shot_all_reduce_kernel<x>(y)",
        "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)",
        "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<x>(y)",
        "void deep_ep::intranode::dispatch<8, 768, 8192>(x)",
        "nvshmemi_transfer_rma_kernel",
        "rcclGenericKernel(ncclDevComm*)",
    ],
    "other": ["at::cuda::(anonymous namespace)::spin_kernel(long)", "my_kernel", "", "void "],
}
CASES = [(family, name) for family, names in KERNELS.items() for name in names]


def test_the_list_of_real_names_is_long_enough_to_mean_something() -> None:
    assert len(CASES) >= 100
    assert set(KERNELS) | {"memset", "indexing"} == set(FAMILIES)


@pytest.mark.parametrize(("family", "name"), CASES, ids=[name[:60] for _, name in CASES])
def test_a_kernel_name_tells_its_family(family: str, name: str) -> None:
    assert describe_kernels(pl.Series([name]))["family"][0] == family


def test_a_gemm_templated_on_a_communicator_computes() -> None:
    name = "void cutlass::device_kernel<cutlass::gemm::GemmUniversal<NvshmemEpilogue<x>>>(y)"
    assert describe_kernels(pl.Series([name]))["family"][0] == "gemm"


def test_hostile_names_are_looked_at_in_linear_time() -> None:
    names = pl.Series(
        ["(" * 50_000, "<" * 50_000, "a::" * 20_000, "\x00\ud7ff" * 10, "void <", "a" * 200_000]
    )
    assert describe_kernels(names).height == len(names)


@pytest.mark.parametrize(
    ("op", "family"),
    [
        ("aten::addmm", "gemm"),
        ("aten::baddbmm_", "gemm"),
        ("aten::cudnn_convolution", "convolution"),
        ("aten::convolution_backward", "convolution"),
        ("aten::_flash_attention_forward", "attention"),
        ("aten::_scaled_dot_product_attention_math", None),  # its own operators say what they do
        ("aten::_softmax", "softmax"),
        ("aten::native_layer_norm_backward", "normalisation"),
        ("aten::add_", "elementwise"),
        ("aten::__and__", "elementwise"),
        ("aten::sum", "reduction"),
        ("aten::cat", "layout"),
        ("aten::copy_", "copy"),
        ("aten::embedding_dense_backward", "embedding"),
        ("aten::_index_put_impl_", "embedding"),
        ("aten::cumsum", "sort"),
        ("aten::native_dropout", "random"),
        ("aten::max_pool2d_with_indices_backward", "pooling"),
        ("aten::upsample_bilinear2d", "pooling"),
        ("aten::nll_loss_forward", "loss"),
        ("aten::_fused_adamw_", "optimizer"),
        ("_C::rotary_embedding", "elementwise"),
        ("_C::fused_add_rms_norm", "normalisation"),
        ("_C_cache_ops::reshape_and_cache_flash", "layout"),
        ("torch::autograd::CppNode<SplitLookupFunction_rowwise_adagrad_Op>", "embedding"),
        ("autograd::engine::evaluate_function: EmbeddingBackward0", None),
        ("record_param_comms", None),  # communication is never decided by an operator
        ("aten::unheard_of", None),
        ("", None),
    ],
)
def test_operator_gives_the_family_of_its_kernels(op: str, family: str | None) -> None:
    assert op_families(pl.Series([op]))[0] == family


def families(b: TraceBuilder) -> list[str]:
    return b.analysis().kernels["family"].cast(pl.String).to_list()


def test_convolution_family_excludes_transposes_and_bias() -> None:
    b = TraceBuilder()
    with b.step(), b.op("aten::conv2d"), b.op("aten::convolution"), b.op("aten::_convolution"):
        with b.op("aten::cudnn_convolution"):
            b.launch("void cudnn::ops::nchwToNhwcKernel<float, float>(x)", 10)
            b.launch("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_64x64_16x6_nn_a>(x)", 90)
            b.launch("void some_unheard_of_cudnn_part(x)", 5)
            b.memset(64, 1)
        with b.op("aten::add_"):
            b.launch("void at::native::elementwise_kernel<128, 2, x>(y)", 10)
    assert families(b) == ["layout", "convolution", "convolution", "memset", "elementwise"]


def test_lookup_is_embedding_only_within_a_named_embedding() -> None:
    b = TraceBuilder()
    with b.step():
        with b.op("aten::embedding"), b.op("aten::index_select"), b.op("aten::gather"):
            b.launch("void at::native::vectorized_gather_kernel<16, long>(char*)", 10)
        with b.op("aten::index"), b.op("aten::gather"):
            b.launch("void at::native::vectorized_gather_kernel<16, long>(char*)", 20)
        b.sync()
    a = Analysis(b.trace())
    families = dict(zip(a.families["family"].cast(pl.String), a.families["dur"], strict=True))
    assert families == {"embedding": 10_000, "indexing": 20_000}
    assert a.kernels["family"].cast(pl.String).to_list() == ["embedding", "indexing"]


def test_a_bias_copy_inside_addmm_is_a_copy() -> None:
    b = TraceBuilder()
    with b.step(), b.op("aten::linear"), b.op("aten::addmm"):
        b.launch(KERNELS["copy"][0], 3)
        b.launch("ampere_sgemm_128x64_nn", 50)
        b.launch("void splitKreduce_kernel<float>(x)", 5)
    assert families(b) == ["copy", "gemm", "gemm"]


def test_a_copy_inside_a_collective_is_a_copy() -> None:
    b = TraceBuilder()
    with b.step(), b.op("c10d::allreduce_"), b.range("nccl:all_reduce"):
        with b.op("record_param_comms"):
            b.copy("DtoD", 1 << 20, op=None)
            b.launch("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 100)
        b.launch("void at::native::vectorized_elementwise_kernel<4, MulFunctor<float>>(x)", 5)
    assert families(b) == ["copy", "communication", "elementwise"]
    assert b.analysis().kernels["communication"].to_list() == [False, True, False]


def test_kernel_with_collective_arguments_is_communication() -> None:
    b = TraceBuilder()
    with b.step():
        b.launch("vendor_ring_kernel", 50, comm={"Collective name": "allreduce", "Group size": 8})
    assert families(b) == ["communication"]


def test_cuda_graph_work_is_classified_by_kernel_name() -> None:
    b = TraceBuilder()
    with b.step(), b.op("aten::addmm"):  # whatever happens to be around cudaGraphLaunch
        b.graph_launch([("ampere_sgemm_128x64_nn", 50), (KERNELS["softmax"][0], 9), ("x", 2)])
    assert families(b) == ["gemm", "softmax", "other"]
    assert b.analysis().kernels["op_name"].null_count() == 3


def test_optimizer_family_has_elementwise_work_but_no_gemms() -> None:
    add = NATIVE + "vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"
    b = TraceBuilder()
    with b.step():
        with b.op("aten::add_"):
            b.launch(add, 5)
        with b.range("Optimizer.step#Muon.step"):
            with b.op("aten::add_"):
                b.launch(add, 5)
            with b.op("aten::mm"):
                b.launch("nvjet_tst_64x64_64x16_2x1_2cta_v_bz_TNT", 5)
            b.launch(KERNELS["optimizer"][0], 5)
    assert families(b) == ["elementwise", "optimizer", "gemm", "optimizer"]


def test_reordering_contiguous_is_layout_and_cast_is_copy() -> None:
    copy = KERNELS["copy"][0]
    b = TraceBuilder()
    with b.step():
        with b.op("aten::contiguous"), b.op("aten::clone"), b.op("aten::copy_"):
            b.launch(copy, 5)
        with b.op("aten::to"), b.op("aten::_to_copy"), b.op("aten::copy_"):
            b.launch(copy, 5)
        shape = [[8, 3, 32, 32], [8, 3, 32, 32]]
        last = [3072, 1, 96, 3]
        first = [3072, 1024, 32, 1]
        with b.op("aten::copy_", shape, "float", strides=[last, first]):
            b.launch(copy, 5)
        with b.op("aten::copy_", shape, "float", strides=[first, first]):
            b.launch(copy, 5)
        with b.op("aten::copy_", shape, ["c10::Half", "float"], strides=[last, first]):
            b.launch(copy, 5)
    assert families(b) == ["layout", "copy", "layout", "copy", "copy"]


def test_math_attention_is_gemm_and_softmax_of_an_sdpa_operator() -> None:
    b = TraceBuilder()
    with b.step():
        outer = b.op("aten::scaled_dot_product_attention")
        with outer, b.op("aten::_scaled_dot_product_attention_math"):
            with b.op("aten::matmul"), b.op("aten::bmm"):
                b.launch("ampere_bf16_s16816gemm_bf16_64x64_tn", 20)
            with b.op("aten::softmax"), b.op("aten::_softmax"):
                b.launch(KERNELS["softmax"][0], 9)
        with b.op("aten::bmm"):
            b.launch("ampere_bf16_s16816gemm_bf16_64x64_tn", 20)
    a = b.analysis()
    assert a.kernels["family"].cast(pl.String).to_list() == ["gemm", "softmax", "gemm"]
    rows = a.kernels["sdpa"].to_list()
    assert rows[2] is None
    assert {a.trace.cpu["name"][row] for row in rows[:2]} == {
        "aten::_scaled_dot_product_attention_math"
    }


def test_a_transpose_is_layout_whatever_launched_it() -> None:
    b = TraceBuilder()
    with b.step():
        for op in ("aten::cudnn_batch_norm", "aten::copy_", "aten::cudnn_convolution"):
            with b.op(op):
                b.launch("void cudnn::ops::nchwToNhwcKernel<float, float>(x)", 5)
    assert families(b) == ["layout"] * 3


def test_an_unknown_operator_leaves_the_word_to_the_kernels_name() -> None:
    b = TraceBuilder()
    with b.step(), b.op("aten::embedding_bag"), b.op("mylib::fancy"):
        b.launch(KERNELS["sort"][0], 9)
    with b.step(), b.op("aten::embedding_bag"):
        b.launch(KERNELS["sort"][0], 9)
    assert families(b) == ["sort", "embedding"]
    b = TraceBuilder()
    with b.step(), b.op("aten::linear"), b.op("mylib::fancy"):
        b.launch(KERNELS["softmax"][0], 9)
        b.launch("unheard_of", 9)
    assert families(b) == ["softmax", "gemm"]  # the second: all that is known is aten::linear


# -- against the raw file -------------------------------------------------------------------


def launching_ops(events: list[dict]) -> dict[int, str]:
    """Correlation of each runtime call -> innermost operator around it, by a walk over each
    thread in order of time with a stack of open operators."""
    threads: dict[tuple, list[dict]] = {}
    for event in events:
        if event["cat"] in ("cpu_op", "cuda_runtime", "cuda_driver"):
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
    result = {}
    for rows in threads.values():
        open_ops: list[tuple[float, str]] = []
        for event in sorted(rows, key=lambda e: (float(e["ts"]), -float(e["dur"]))):
            start, end = float(event["ts"]), float(event["ts"]) + float(event["dur"])
            while open_ops and open_ops[-1][0] < end:
                open_ops.pop()
            if event["cat"] == "cpu_op":
                open_ops.append((end, event["name"]))
            elif open_ops and start <= open_ops[-1][0]:
                result[event["args"].get("correlation")] = open_ops[-1][1]
    return result


@pytest.mark.parametrize("name", ["a100_train_6steps", "b200_eager", "h100_bert_small_inference"])
def test_family_totals_equal_a_loop_over_rows(name: str, shared_trace) -> None:
    a = Analysis(read_trace(shared_trace(name)))
    expected: dict[str, float] = {}
    counts: dict[str, int] = {}
    kernel_ns = 0
    spans = list(zip(a.steps.used["ts"].to_list(), a.steps.used["end"].to_list(), strict=True))
    rows = zip(
        a.trace.gpu["ts"].to_list(),
        a.trace.gpu["dur"].to_list(),
        a.trace.gpu["kind"].cast(pl.String).to_list(),
        a.trace.gpu["device"].to_list(),
        a.kernels["family"].cast(pl.String).to_list(),
        strict=True,
    )
    for ts, dur, kind, device, family in rows:
        ns = sum(max(0, min(ts + dur, end) - max(ts, begin)) for begin, end in spans)
        if device != a.device_id or not ns:
            continue
        expected[family] = expected.get(family, 0) + ns
        counts[family] = counts.get(family, 0) + 1
        kernel_ns += ns if kind == "kernel" else 0
    table = a.families
    items = dict(zip(table["family"].cast(pl.String), table["dur"], strict=True))
    assert items == expected
    assert dict(zip(table["family"].cast(pl.String), table["count"], strict=True)) == counts
    for family, share in zip(table["family"].cast(pl.String), table["share"], strict=True):
        assert share == pytest.approx(expected[family] / kernel_ns)


@pytest.mark.parametrize(
    ("name", "ops"),
    [
        ("a100_train_6steps", {"aten::mm", "aten::addmm", "aten::bmm"}),
        ("h100_bert_small_inference", {"aten::addmm"}),
        ("b200_eager", {"aten::mm", "aten::addmm"}),
    ],
)
def test_gemm_time_equals_matrix_operator_kernels_of_the_file(
    name: str, ops: set[str], shared_trace
) -> None:
    path = shared_trace(name)
    a = Analysis(read_trace(path))
    with gzip.open(path) as file:
        document = json.load(file)
    events = [e for e in document["traceEvents"] if e.get("ph") == "X" and "cat" in e]
    zero = a.trace.meta.start_ns - document.get("baseTimeNanoseconds", 0)
    op_of = launching_ops(events)
    steps = list(zip(a.steps.used["ts"], a.steps.used["end"], strict=True))
    total = 0.0
    for event in events:
        if event["cat"] != "kernel" or op_of.get(event["args"]["correlation"]) not in ops:
            continue
        if "elementwise_kernel" in event["name"]:
            continue  # addmm copies its bias into the result first
        start = float(event["ts"]) * 1000 - zero
        end = start + float(event["dur"]) * 1000
        total += sum(max(0.0, min(end, stop) - max(start, begin)) for begin, stop in steps)
    of_ops = a.kernels["op_name"].cast(pl.String).is_in(list(ops))
    gemm = (a.kernels["family"] == "gemm") & of_ops & pl.Series(a.in_window)
    assert total > 0
    assert a.trace.gpu["dur"].filter(gemm).sum() == pytest.approx(total, rel=1e-4)
