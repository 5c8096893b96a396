"""The families of device work, which family an operator's work belongs to, and the step's device
time in exclusive classes: each instant is counted once.

The operator that launched a kernel is the best evidence of its purpose (a cuDNN convolution runs
kernels called ``…gemm``), so it decides first; the kernel's own name (``kernel_names.py``) second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl

from advisor.core.intervals import (
    EMPTY,
    Intervals,
    covered_length,
    gaps,
    intersect,
    subtract,
    union_of,
)
from advisor.measure.comm.gloo import time_on_host
from advisor.measure.host.names import cache_by_name, name_matches

if TYPE_CHECKING:
    from advisor.measure import Analysis


FAMILIES = (
    "gemm",  # matrix multiplications, with their split-K reductions and epilogues
    "convolution",
    "attention",  # fused: flash, memory-efficient, cuDNN, paged …; linear, state-space models
    "softmax",
    "normalisation",
    "elementwise",
    "reduction",
    "layout",  # data moved to another order or location: transposes, concatenation, padding
    "copy",  # memcpy rows, and kernels that copy or cast
    "memset",
    "embedding",  # lookups in tables of embeddings
    "indexing",  # other lookups: gather, scatter, index
    "sort",  # sort, top-k, unique, scans, selection; offsets and counts, routing of experts
    "random",  # dropout and random numbers
    "pooling",  # pooling and resampling
    "loss",
    "transform",  # Fourier and Hadamard
    "optimizer",
    "communication",
    "other",
)
Family = pl.Enum(FAMILIES)
FAMILY_CODE = {name: code for code, name in enumerate(FAMILIES)}

MATRIX = ("gemm", "convolution", "attention")
"""Families whose work matrix units can do."""

RECURRENT = r"^aten::(lstm|gru|rnn)"
"""Operators that compute a complete recurrent layer, including its matrix products."""

_OPS: dict[str, str] = {
    "gemm": """
        mm addmm bmm baddbmm addbmm matmul linear mv addmv dot vdot inner ger outer addr einsum
        tensordot bilinear _trilinear chain_matmul linalg_multi_dot _scaled_mm _scaled_mm_v2
        _int_mm _addmm_activation _grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2
        _mixed_dtypes_linear _weight_int4pack_mm _weight_int8pack_mm _cslt_sparse_mm
        _sparse_semi_structured_linear _sparse_semi_structured_mm _sparse_semi_structured_addmm
        hspmm sspaddmm""",
    "convolution": """
        conv1d conv2d conv3d convolution _convolution convolution_overrideable
        convolution_backward convolution_backward_overrideable _convolution_double_backward
        conv_transpose1d conv_transpose2d conv_transpose3d cudnn_convolution
        cudnn_convolution_transpose cudnn_convolution_relu cudnn_convolution_add_relu
        cudnn_convolution_backward cudnn_convolution_backward_input
        cudnn_convolution_backward_weight cudnn_convolution_transpose_backward miopen_convolution
        miopen_convolution_transpose miopen_depthwise_convolution miopen_convolution_relu
        miopen_convolution_add_relu miopen_convolution_backward miopen_convolution_backward_input
        miopen_convolution_backward_weight _conv_depthwise2d conv_depthwise3d
        _conv_depthwise2d_backward thnn_conv2d thnn_conv_depthwise2d _slow_conv2d_forward
        _slow_conv2d_backward slow_conv3d slow_conv3d_forward slow_conv_dilated2d
        slow_conv_dilated3d slow_conv_transpose2d slow_conv_transpose3d""",
    "attention": """
        scaled_dot_product_attention _scaled_dot_product_flash_attention
        _scaled_dot_product_flash_attention_backward _scaled_dot_product_efficient_attention
        _scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention
        _scaled_dot_product_cudnn_attention_backward
        _scaled_dot_product_fused_attention_overrideable
        _scaled_dot_product_fused_attention_overrideable_backward _flash_attention_forward
        _flash_attention_backward _efficient_attention_forward _efficient_attention_backward
        _cudnn_attention_forward _cudnn_attention_backward _triton_scaled_dot_attention""",
    "softmax": """
        softmax _softmax log_softmax _log_softmax _softmax_backward_data
        _log_softmax_backward_data _safe_softmax _masked_softmax _masked_softmax_backward
        special_softmax special_log_softmax""",
    "normalisation": """
        layer_norm native_layer_norm native_layer_norm_backward batch_norm native_batch_norm
        native_batch_norm_backward cudnn_batch_norm cudnn_batch_norm_backward miopen_batch_norm
        miopen_batch_norm_backward _batch_norm_impl_index _batch_norm_impl_index_backward
        _native_batch_norm_legit _native_batch_norm_legit_no_training _batch_norm_with_update
        _batch_norm_no_update batch_norm_backward batch_norm_stats batch_norm_elemt
        batch_norm_gather_stats batch_norm_gather_stats_with_counts batch_norm_backward_reduce
        batch_norm_backward_elemt batch_norm_update_stats group_norm native_group_norm
        native_group_norm_backward instance_norm rms_norm _fused_rms_norm
        _fused_rms_norm_backward _weight_norm_interface _weight_norm_interface_backward""",
    "elementwise": """
        add sub rsub mul div true_divide divide multiply subtract floor_divide remainder fmod pow
        float_power exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square abs neg sign sgn sin cos
        tan sinh cosh tanh asin acos atan atan2 asinh acosh atanh sigmoid logit relu relu6
        leaky_relu elu selu celu gelu silu mish hardswish hardsigmoid hardtanh softplus softshrink
        hardshrink threshold clamp clamp_min clamp_max clip where masked_fill fill zero zeros ones
        full eye zeros_like ones_like full_like new_zeros new_ones new_full scalar_tensor eq ne lt
        le gt ge not_equal greater greater_equal less less_equal logical_and logical_or logical_not
        logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor bitwise_left_shift
        bitwise_right_shift __and__ __or__ __xor__ __lshift__ __rshift__ __iand__ __ior__ __ixor__
        maximum minimum fmax fmin lerp addcmul addcdiv reciprocal floor ceil round trunc frac erf
        erfc erfinv isnan isinf isfinite isposinf isneginf isclose nan_to_num angle polar complex
        heaviside copysign hypot xlogy lgamma digamma polygamma sinc i0 special_xlog1py
        log_sigmoid log_sigmoid_forward log_sigmoid_backward glu glu_backward glu_jvp prelu
        _prelu_kernel _prelu_kernel_backward rrelu rrelu_with_noise rrelu_with_noise_backward
        triu tril arange linspace logspace range gelu_backward silu_backward
        sigmoid_backward tanh_backward threshold_backward elu_backward leaky_relu_backward
        hardtanh_backward hardswish_backward hardsigmoid_backward hardshrink_backward
        softshrink_backward softplus_backward mish_backward logit_backward
        quantize_per_tensor quantize_per_channel dequantize fake_quantize_per_tensor_affine
        _amp_foreach_non_finite_check_and_unscale _amp_update_scale conj_physical""",
    "reduction": """
        sum mean prod max min amax amin aminmax argmax argmin std var std_mean var_mean norm
        linalg_vector_norm linalg_norm linalg_matrix_norm _foreach_norm _foreach_max all any nansum
        nanmean logsumexp count_nonzero median nanmedian equal frobenius_norm nuclear_norm dist
        cdist _cdist_forward pdist trace""",
    "layout": """
        contiguous reshape flatten cat _cat concat concatenate stack hstack vstack dstack repeat
        tile repeat_interleave flip roll rot90 im2col col2im pixel_shuffle pixel_unshuffle
        channel_shuffle constant_pad_nd pad reflection_pad1d reflection_pad2d reflection_pad3d
        replication_pad1d replication_pad2d replication_pad3d reflection_pad2d_backward
        replication_pad2d_backward split_with_sizes_copy _chunk_cat unfold_backward
        transpose_copy permute_copy expand_copy slice_backward select_backward diagonal_backward
        _reshape_copy block_diag cartesian_prod nested_to_padded_tensor to_padded_tensor
        _padded_dense_to_jagged_forward _jagged_to_padded_dense_forward""",
    "copy": """
        copy _to_copy to type_as _foreach_copy _copy_from _copy_from_and_resize
        item _local_scalar_dense""",
    "embedding": """
        embedding embedding_backward embedding_dense_backward embedding_sparse_backward
        embedding_renorm embedding_bag _embedding_bag _embedding_bag_forward_only
        _embedding_bag_backward _embedding_bag_dense_backward
        _embedding_bag_per_sample_weights_backward index _index_put_impl index_put _unsafe_index
        _unsafe_index_put index_backward index_select index_select_backward index_add index_copy
        index_fill index_reduce gather gather_backward scatter scatter_add scatter_reduce
        _segment_reduce segment_reduce masked_scatter take take_along_dim put one_hot""",
    "sort": """
        sort argsort msort topk kthvalue mode unique unique_dim unique_consecutive _unique _unique2
        cumsum cumprod cummax cummin logcumsumexp cumsum_backward nonzero nonzero_static
        masked_select searchsorted bucketize histc histogram bincount isin""",
    "random": """
        dropout native_dropout native_dropout_backward _fused_dropout _masked_scale
        feature_dropout alpha_dropout bernoulli normal uniform random exponential geometric cauchy
        log_normal poisson multinomial rand randn randint rand_like randn_like randint_like
        randperm""",
    "pooling": """
        affine_grid_generator grid_sampler grid_sampler_2d grid_sampler_3d
        grid_sampler_2d_backward grid_sampler_3d_backward cudnn_grid_sampler
        cudnn_grid_sampler_backward""",
    "loss": """
        nll_loss nll_loss_forward nll_loss_backward nll_loss_nd nll_loss2d nll_loss2d_forward
        nll_loss2d_backward cross_entropy_loss mse_loss mse_loss_backward l1_loss smooth_l1_loss
        smooth_l1_loss_backward huber_loss huber_loss_backward kl_div kl_div_backward
        binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits
        ctc_loss _ctc_loss _ctc_loss_backward _cudnn_ctc_loss cosine_embedding_loss
        margin_ranking_loss soft_margin_loss multi_margin_loss poisson_nll_loss""",
    "optimizer": """
        _fused_adam _fused_adamw _fused_sgd _fused_adagrad""",
}
"""Family -> operators of ATen, without namespace and without the underscore of in-place forms."""

_BY_NAME = {op: family for family, ops in _OPS.items() for op in ops.split()}

_PATTERNS: tuple[tuple[str, str], ...] = (
    (
        "pooling",
        r"^aten::_?(max_pool|avg_pool|adaptive_(avg|max)_pool|_adaptive_(avg|max)_pool"
        r"|fractional_max_pool|lp_pool|max_unpool|upsample_|_upsample_)",
    ),
    ("elementwise", r"^aten::_foreach_"),
    ("gemm", r"^(?:vllm|sglang|sgl_kernel)::.*fused_(?:experts|moe)(?:_impl)?_?$"),
    ("elementwise", r"(?i)^[^a].*(rotary|(^|[:_])rope|silu|gelu|swiglu|act_and_mul|quant(ize)?)"),
    (
        "layout",
        r"(?i)permute_(pooled|sparse|[12]D|indices|lengths|embed)|PermutePooled"
        r"|recat_embedding|reshape_and_cache|concat_and_cache",
    ),
    (
        "embedding",
        r"(?i)split_embedding|SplitLookup|embedding_?(bag|lookup|inplace)"
        r"|bounds_check_indices|^fb(gemm)?::.*embedding",
    ),
    ("sort", r"(?i)complete_cumsum|moe_align|topk_softmax"),
    ("normalisation", r"(?i)^([^a]|a[^t]).*(layer_?norm|rms_?norm|group_?norm|batch_?norm)"),
)
"""Family -> pattern of complete operator names that the table does not list."""

_AUTOGRAD_NODE = r"^autograd::engine|Backward\d+$"
"""Autograd's own nodes: the operators inside them determine the family."""

SDPA = r"^aten::_?scaled_dot_product_"
"""Operators of ``scaled_dot_product_attention``: the innermost one names its backend
(``…_attention_math`` is the unfused one)."""


def op_families(names: pl.Series) -> pl.Series:
    """Return the family of the work that each operator does itself, or null if it only calls others
    or is unknown. Both names and result have one row per operator name (strings)."""
    return _op_families(names)["family"]


def find_layer_operators(names: pl.Series) -> pl.Series:
    """Return which operators make up a layer of a model."""
    layers = [*MATRIX, "normalisation"]
    return op_families(names).is_in(layers).fill_null(value=False) | name_matches(names, RECURRENT)


@cache_by_name
def _op_families(names: pl.Series) -> pl.DataFrame:
    bare_names = names.str.strip_prefix("aten::")
    aten = names.str.starts_with("aten::")
    families = [
        _find_family(op) if is_aten else None for op, is_aten in zip(bare_names, aten, strict=True)
    ]
    table = pl.Series(families, dtype=pl.String)
    frame = pl.DataFrame({"name": names, "table": table})
    engine = pl.col("name").str.contains(_AUTOGRAD_NODE)
    pattern = pl.coalesce(
        pl.when(pl.col("name").str.contains(text)).then(pl.lit(family))
        for family, text in _PATTERNS
    )
    family = pl.coalesce("table", pl.when(~engine).then(pattern))
    return frame.select(family.cast(Family).alias("family"))


def _find_family(op: str) -> str | None:
    return _BY_NAME.get(op) or _BY_NAME.get(op.removesuffix("_"))


CLASSES = ("compute", "communication", "copies", "memset", "idle")


class Breakdown(NamedTuple):
    """Exclusive device time inside the used steps.

    An instant with several activities counts for the first of compute, communication, copies,
    memset: so ``communication`` is communication not hidden under compute, and ``copies`` are
    copies hidden under neither. Work launched before the recording began belongs to no step, but
    the device is busy with it. ``per_step`` has one row per used step: ``step`` and one column per
    class, ns, clipped to the step's own span.

    Without device work in the trace all sets are empty, including ``idle``, and the columns of
    ``per_step`` are null. The exception is communication: it is then gloo's, exposed while no
    operator runs."""

    compute: Intervals
    communication: Intervals
    """Exposed communication: not under compute."""
    copies: Intervals
    """Exposed copies: not under compute or communication."""
    memset: Intervals
    idle: Intervals
    busy: Intervals
    all_communication: Intervals
    per_step: pl.DataFrame

    def totals(self) -> dict[str, int]:
        """Return ns by class, which add up to the analysed window (0 without device work)."""
        return {name: getattr(self, name).total for name in CLASSES}

    @property
    def communication_overlap(self) -> float | None:
        """Share of communication time that is under compute, or ``None`` without communication."""
        total = self.all_communication.total
        return None if total == 0 else 1 - self.communication.total / total


def break_down(a: Analysis) -> Breakdown:
    """Split the analysed device's time into exclusive classes."""
    if a.device_id is None:
        return _break_down_host(a)
    kind = a.trace.gpu["kind"]
    is_inside = a.on_device
    communication = a.kernels["communication"].to_numpy() & is_inside
    kernel = (kind == "kernel").to_numpy() & is_inside & ~communication
    compute = a.device_busy(kernel)
    comm = a.device_busy(communication)
    copies = a.device_busy((kind == "memcpy").to_numpy() & is_inside & ~communication)
    memset = a.device_busy((kind == "memset").to_numpy() & is_inside)
    busy = union_of(compute, comm, copies, memset)
    classes = {
        "compute": compute,
        "communication": subtract(comm, compute),
        "copies": subtract(copies, union_of(compute, comm)),
        "memset": subtract(memset, union_of(compute, comm, copies)),
        "idle": _find_idle(busy, a.spans),
    }
    used = a.steps.used
    start, end = used["ts"].to_numpy(), used["end"].to_numpy()
    per_step = pl.DataFrame(
        {
            "step": used["index"],
            **{name: covered_length(start, end, part) for name, part in classes.items()},
        }
    )
    return Breakdown(**classes, busy=busy, all_communication=comm, per_step=per_step)


def _break_down_host(a: Analysis) -> Breakdown:
    step = a.steps.used.select(pl.col("index").alias("step"))
    nulls = [pl.lit(None, dtype=pl.Int64).alias(name) for name in CLASSES]
    sets = dict.fromkeys((*CLASSES, "busy", "all_communication"), EMPTY)
    communication, exposed = time_on_host(a)
    sets |= {"communication": exposed, "all_communication": communication}
    return Breakdown(**sets, per_step=step.with_columns(nulls))


def _find_idle(busy: Intervals, spans: Intervals) -> Intervals:
    if not len(spans):
        return spans
    idle = gaps(busy, int(np.min(spans.start)), int(np.max(spans.end)))
    return intersect(idle, spans)
