"""Floating-point operations of an operator, from its recorded shapes.

A multiply-add counts two. Matrix products, convolutions and attention are counted as
``torch.utils.flop_counter`` does (bias left out; attention backward is five products, one of them
the recomputed scores), except that causal attention counts only the pairs that are computed.
Winograd and FFT convolutions count as direct ones, so they can exceed a peak. The others are
bound by memory, and get the operations of their textbook formula an element.
"""

from __future__ import annotations

from math import prod

from advisor.measure.device.matmuls import (
    broadcast_shapes,
    parse_attention,
    parse_convolution,
    parse_experts,
    parse_product,
)
from advisor.measure.device.shapes import OpInputs

SOFTMAX, SOFTMAX_BACKWARD = 5, 4
"""Maximum, difference, exponential, sum, division; backward: product, sum, difference, product."""
LAYER_NORM, LAYER_NORM_BACKWARD = 8, 14
"""Mean 1, variance 3, normalise 2, scale and shift 2; backward with weight and bias gradients."""
RMS_NORM, RMS_NORM_BACKWARD = 4, 9
"""Square and sum 2, normalise 1, scale 1."""
BATCH_NORM_INFERENCE = 2
"""One scale and one shift a channel, folded."""

_PER_ELEMENT: dict[str, float] = {
    name: each
    for each, names in (
        (SOFTMAX, "_softmax _log_softmax"),
        (SOFTMAX_BACKWARD, "_softmax_backward_data _log_softmax_backward_data"),
        (LAYER_NORM, "native_layer_norm native_group_norm"),
        (
            LAYER_NORM_BACKWARD,
            "native_layer_norm_backward native_group_norm_backward cudnn_batch_norm_backward "
            "miopen_batch_norm_backward native_batch_norm_backward",
        ),
        (RMS_NORM, "_fused_rms_norm rms_norm _C::rms_norm"),
        (RMS_NORM_BACKWARD, "_fused_rms_norm_backward"),
        (RMS_NORM + 1, "_C::fused_add_rms_norm"),
        (
            1,
            "sum nansum mean prod max min amax amin argmax argmin all any cumsum cumprod "
            "embedding_dense_backward",
        ),
        (2, "linalg_vector_norm norm"),
        (4, "var std var_mean"),
    )
    for name in names.split()
}
"""Operations an element of the first tensor."""

_BATCH_NORM = {"cudnn_batch_norm": 5, "miopen_batch_norm": 5, "native_batch_norm": 5}
"""Operator -> position of the ``training`` argument."""


def split_words(text: str) -> list[str]:
    """A list of names, written as prose."""
    return text.split()


_MOVES = frozenset(
    split_words("""
    copy_ clone cat fill_ zero_ contiguous embedding index_select gather index_copy_ scatter_
    index constant_pad_nd flip roll repeat tril triu""")
)
"""Nothing is computed."""

ELEMENTWISE: dict[str, int] = (
    dict.fromkeys(
        split_words("""
    neg abs exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sign sin cos tan
    tanh sigmoid relu silu gelu hardswish hardsigmoid hardtanh elu leaky_relu softplus floor ceil
    round trunc erf logit clamp clamp_min clamp_max logical_not bitwise_not isnan isinf isfinite
    nan_to_num mish selu"""),
        1,
    )
    | dict.fromkeys(
        split_words("""
    add sub rsub mul div true_divide pow remainder fmod floor_divide eq ne lt le gt ge maximum
    minimum fmax fmin logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor atan2
    masked_fill threshold_backward sigmoid_backward tanh_backward gelu_backward silu_backward
    hardswish_backward hardsigmoid_backward hardtanh_backward elu_backward leaky_relu_backward
    softplus_backward mish_backward logit_backward native_dropout_backward"""),
        2,
    )
    | dict.fromkeys(split_words("where addcmul addcdiv lerp"), 3)
)
"""Elementwise operators -> the most tensors they read (fewer when the others are numbers)."""


def count_flops(op: str, x: OpInputs) -> float | None:
    """Floating-point operations of one call; ``None``: no formula, or inputs not recorded."""
    result = parse_product(op, x)
    if result is not None:
        return 2.0 * result.batch * result.m * result.n * result.k
    conv = parse_convolution(op, x)
    if conv is not None:
        once = 2.0 * conv.batch * conv.points * prod(conv.weight.shape)
        return once * (conv.output_mask[0] + conv.output_mask[1]) if conv.backward else once
    sdpa = parse_attention(op, x)
    if sdpa is not None:
        # Forward: scores (width) and output (value width). Backward: scores again, their
        # gradient and that of the values (value width), those of queries and keys (width).
        widths = (
            3 * sdpa.width + 2 * sdpa.value_width
            if sdpa.backward
            else sdpa.width + sdpa.value_width
        )
        return 2.0 * sdpa.batch * sdpa.heads * sdpa.pairs * widths
    moe = parse_experts(op, x)
    if moe is not None:
        return 2.0 * moe.rows * (prod(moe.up.shape[1:]) + prod(moe.down.shape[1:]))
    return _per_element(op, x)


def _per_element(op: str, x: OpInputs) -> float | None:
    name = op.removeprefix("aten::")
    tensors = x.tensors
    if not tensors:
        return None
    if name in _MOVES:
        return 0.0
    each = _PER_ELEMENT.get(name)
    if each is None and name in _BATCH_NORM:
        training = x.flag(_BATCH_NORM[name])
        if training is None:
            return None
        each = LAYER_NORM if training else BATCH_NORM_INFERENCE
    if each is not None:
        return each * float(tensors[0].elements)
    if name.removesuffix("_") in ("index_add", "scatter_add"):
        return float(tensors[-1].elements)
    count = ELEMENTWISE.get(name, ELEMENTWISE.get(name.removesuffix("_")))
    if count is None:
        return None
    shape = broadcast_shapes(*(tensor.shape for tensor in tensors[:count]))
    return None if shape is None else float(prod(shape))
