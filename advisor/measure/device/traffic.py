"""Floating-point operations of an operator, from its recorded shapes, and the minimum bytes that it
moves: each input is read once, each output is written once.

The real traffic is higher if a tensor is read twice, or lower if a tensor is still in L2. The
figure is what an ideal fused kernel would have to move. Broadcast inputs count what is stored.

A multiply-add counts as two. Matrix products, convolutions and attention are counted as
``torch.utils.flop_counter`` does (bias left out; attention backward is five products, one of them
the recomputed scores), except that causal attention counts only the pairs that are computed.
Winograd and FFT convolutions count as direct ones, so they can exceed a peak. The other operators
are memory-bound, and count the operations per element of their textbook formula."""

from math import prod

from advisor.measure.device.matmuls import (
    AttentionCall,
    ConvolutionCall,
    Experts,
    MatrixProduct,
    broadcast_shapes,
    parse_attention,
    parse_convolution,
    parse_experts,
    parse_product,
)
from advisor.measure.device.shapes import (
    OpInputs,
    Tensor,
    bare_type_name,
    scalar_type,
    type_order,
    width_of,
)

SOFTMAX, SOFTMAX_BACKWARD = 5, 4
"""FLOPs: maximum, difference, exponential, sum, division; backward: 2 products, sum, difference."""
LAYER_NORM, LAYER_NORM_BACKWARD = 8, 14
"""FLOPs: mean 1, variance 3, normalise 2, scale, shift 2; backward with parameter gradients."""
RMS_NORM, RMS_NORM_BACKWARD = 4, 9
"""FLOPs per element: square and sum 2, normalise 1, scale 1."""
BATCH_NORM_INFERENCE = 2
"""FLOPs per element: a scale and a shift of the channel, folded."""

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
"""Operator -> FLOPs per element of the first tensor."""

_BATCH_NORM = {"cudnn_batch_norm": 5, "miopen_batch_norm": 5, "native_batch_norm": 5}
"""Operator -> position of the ``training`` argument."""


def split_words(text: str) -> list[str]:
    """Split a list of names, written as prose."""
    return text.split()


_WITHOUT_ARITHMETIC = frozenset(
    split_words("""
    copy_ clone cat fill_ zero_ contiguous embedding index_select gather index_copy_ scatter_
    index constant_pad_nd flip roll repeat tril triu""")
)
"""Operators that compute nothing."""

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
"""Elementwise operators -> maximum number of tensors they read (fewer if others are numbers)."""


def count_flops(op: str, x: OpInputs) -> float | None:
    """Count a call's floating-point operations; ``None`` without a formula or recorded inputs."""
    result = parse_product(op, x)
    if result is not None:
        return 2.0 * result.batch * result.m * result.n * result.k
    conv = parse_convolution(op, x)
    if conv is not None:
        once = 2.0 * conv.batch * conv.points * prod(conv.weight.shape)
        return once * (conv.output_mask[0] + conv.output_mask[1]) if conv.backward else once
    sdpa = parse_attention(op, x)
    if sdpa is not None:
        # Forward: scores (width) and output (value width). Backward: scores again, their gradient
        # and the values' gradient (value width), gradients of queries and keys (width).
        widths = (
            3 * sdpa.width + 2 * sdpa.value_width
            if sdpa.backward
            else sdpa.width + sdpa.value_width
        )
        return 2.0 * sdpa.batch * sdpa.heads * sdpa.pairs * widths
    moe = parse_experts(op, x)
    if moe is not None:
        return 2.0 * moe.rows * (prod(moe.up.shape[1:]) + prod(moe.down.shape[1:]))
    return _count_elementwise_flops(op, x)


def _count_elementwise_flops(op: str, x: OpInputs) -> float | None:
    name = op.removeprefix("aten::")
    tensors = x.tensors
    if not tensors:
        return None
    if name in _WITHOUT_ARITHMETIC:
        return 0.0
    flops_per_element = _PER_ELEMENT.get(name)
    if flops_per_element is None and name in _BATCH_NORM:
        training = x.flag(_BATCH_NORM[name])
        if training is None:
            return None
        flops_per_element = LAYER_NORM if training else BATCH_NORM_INFERENCE
    if flops_per_element is not None:
        return flops_per_element * float(tensors[0].elements)
    if name.removesuffix("_") in ("index_add", "scatter_add"):
        return float(tensors[-1].elements)
    count = ELEMENTWISE.get(name, ELEMENTWISE.get(name.removesuffix("_")))
    if count is None:
        return None
    shape = broadcast_shapes(*(tensor.shape for tensor in tensors[:count]))
    return None if shape is None else float(prod(shape))


_BOOLEAN_RESULT = frozenset(
    split_words("""
    eq ne lt le gt ge logical_not logical_and logical_or logical_xor isnan isinf
    isfinite""")
)
"""Elementwise operators whose output is bool."""

_FLOAT_FROM_INTEGER = frozenset(
    split_words("""
    exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan tanh sigmoid erf div
    true_divide logit""")
)
"""Elementwise operators that turn integers into float."""

_REDUCTIONS: dict[str, tuple[int, int]] = {
    **dict.fromkeys(split_words("sum nansum mean prod amax amin all any var std"), (1, 0)),
    **dict.fromkeys(("argmax", "argmin"), (1, 8)),
    **dict.fromkeys(("linalg_vector_norm", "norm"), (2, 0)),
}
"""Reduction -> position of its dimensions, and bytes per output element if not the input's."""

_TRITON_PARTIAL = ("embedding", "index", "gather", "scatter", "slice", "select", "cat", "pad")
"""Words in a fused Triton kernel's name after which it may touch only a part of an argument."""


def count_bytes(op: str, x: OpInputs) -> float | None:
    """Count the minimum bytes a call reads and writes, or ``None`` without a formula or inputs."""
    result = parse_product(op, x)
    if result is not None:
        return _product_bytes(op, x, result)
    conv = parse_convolution(op, x)
    if conv is not None:
        return _convolution_bytes(x, conv)
    sdpa = parse_attention(op, x)
    if sdpa is not None:
        return _attention_bytes(sdpa)
    moe = parse_experts(op, x)
    if moe is not None:
        return _expert_bytes(moe)
    if op.startswith("triton_"):
        return _triton_bytes(op, x)
    if not x.tensors:
        return None
    name = op.removeprefix("aten::")
    for formula in (
        _softmax_bytes,
        _norm_bytes,
        _reduction_bytes,
        _scan_bytes,
        _lookup_bytes,
        _copy_bytes,
        _elementwise_bytes,
    ):
        bytes_moved = formula(name, x)
        if bytes_moved is not None:
            return bytes_moved
    return None


def _sum(*parts: float | None) -> float | None:
    """Return the sum, or ``None`` if a part is unknown."""
    total = 0.0
    for part in parts:
        if part is None:
            return None
        total += part
    return total


def _size_of(elements: int, width: int | None) -> float | None:
    return None if width is None else float(elements * width)


def _optional_bytes(tensor: Tensor | None) -> float | None:
    """Return the bytes of an optional tensor, or 0 if there is no tensor."""
    return 0.0 if tensor is None else tensor.bytes


def _product_bytes(op: str, x: OpInputs, p: MatrixProduct) -> float | None:
    width = p.a.width
    if "_scaled" in op:
        dtype = scalar_type(x.argument(6)) if op == "aten::_scaled_mm" else None
        width = width_of(dtype) if dtype else None
    elif op == "aten::_int_mm":
        width = 4
    batch = p.batch
    if "grouped" in op and len(p.a.shape) == len(p.b.shape) == 2:
        # one product per group is written; the third argument holds the end of each group
        offsets = x.tensor(2 if op == "aten::_grouped_mm" else 4)
        if offsets is None or len(offsets.shape) != 1:
            return None
        batch = offsets.shape[0]
    return _sum(p.a.bytes, p.b.bytes, _optional_bytes(p.added), _size_of(batch * p.m * p.n, width))


def _convolution_bytes(x: OpInputs, c: ConvolutionCall) -> float | None:
    width, batch = c.input.width, c.batch
    if c.out_spatial is None:
        return None
    out = _size_of(batch * c.channels_out * prod(c.out_spatial), width)
    if not c.backward:
        bias = _size_of(c.channels_out, width) if len(x.tensors) > 2 else 0.0
        return _sum(c.input.bytes, c.weight.bytes, bias, out)
    data_grad = _sum(c.weight.bytes, _size_of(c.input.elements, width)) if c.output_mask[0] else 0.0
    weight_grad = (
        _sum(c.input.bytes, _size_of(c.weight.elements, width)) if c.output_mask[1] else 0.0
    )
    return _sum(out, data_grad, weight_grad)


MIN_ROWS_PER_EXPERT = 4
"""Minimum rows per expert at which all experts are assumed to be used: with 4 rows per expert,
spread evenly at random, 2% of the experts get none."""


def _expert_bytes(e: Experts) -> float | None:
    """Count tokens in and out and the experts' weights once; the data between the products may stay
    on the chip. ``None`` if there are so few rows that the number of experts read is unknown."""
    if e.rows < MIN_ROWS_PER_EXPERT * e.up.shape[0]:
        return None
    tokens = e.tokens.bytes
    return _sum(tokens, tokens, e.up.bytes, e.down.bytes, *(tensor.bytes for tensor in e.routing))


def _attention_bytes(s: AttentionCall) -> float | None:
    width = s.query.width
    rows = s.batch * s.heads * s.queries
    out = _size_of(rows * s.value_width, width)
    inputs = _sum(s.query.bytes, s.key.bytes, s.value.bytes)
    if not s.backward:
        return _sum(inputs, out)
    # Output, its gradient and the row sums are read too; three gradients are written.
    gradients = _size_of(s.query.elements + s.key.elements + s.value.elements, width)
    return _sum(inputs, out, out, _size_of(rows, 4), gradients)


def _triton_bytes(op: str, x: OpInputs) -> float | None:
    """Count every pointer argument of a fused kernel as read or written completely."""
    if not op.startswith(("triton_poi_", "triton_red_", "triton_per_")):
        return None
    if any(word in op for word in _TRITON_PARTIAL):
        return None
    return _sum(*(tensor.bytes for tensor in x.tensors)) if x.tensors else None


def _softmax_bytes(name: str, x: OpInputs) -> float | None:
    first = x.tensors[0]
    if name in ("_softmax", "_log_softmax"):
        to_float = x.flag(2)
        if to_float is None and first.width != 4:
            return None
        return _sum(first.bytes, _size_of(first.elements, 4 if to_float else first.width))
    if name in ("_softmax_backward_data", "_log_softmax_backward_data") and len(x.tensors) > 1:
        dtype = scalar_type(x.argument(3))
        if dtype is None:
            return None
        out = _size_of(first.elements, width_of(dtype))
        return _sum(first.bytes, x.tensors[1].bytes, out)
    return None


_NORM_OUTPUTS = {
    **dict.fromkeys(
        split_words("""
    native_layer_norm native_group_norm native_batch_norm cudnn_batch_norm miopen_batch_norm
    rms_norm _fused_rms_norm _C::rms_norm"""),
        1,
    ),
    **dict.fromkeys(
        split_words("""
    native_layer_norm_backward native_group_norm_backward native_batch_norm_backward
    cudnn_batch_norm_backward miopen_batch_norm_backward _fused_rms_norm_backward
    _C::fused_add_rms_norm"""),
        2,
    ),
}
"""Normalisation -> number of tensors it reads that have the size of the activations."""

_TRAINING_POSITIONS = {**_BATCH_NORM, "native_batch_norm_backward": 7}
"""Operator -> position of the ``training`` argument. Others have no such argument, and train."""


def _norm_bytes(name: str, x: OpInputs) -> float | None:
    """Count activations in, parameters and statistics in, one activation out (both for vLLM's
    residual form). Batch norm in training reads a complete channel before the first result, and
    then again. Gradients of the parameters are as small as the parameters, and are not counted."""
    large = _NORM_OUTPUTS.get(name)
    first = x.tensors[0]
    if large is None or not first.elements:
        return None
    read = [tensor.bytes for tensor in x.tensors if tensor.elements <= first.elements]
    if name == "_C::rms_norm":
        return _sum(*read)  # its first argument is the output
    written = _size_of(first.elements, first.width)
    if name == "_C::fused_add_rms_norm":
        return _sum(*read, written, written)
    if "batch_norm" in name and x.flag(_TRAINING_POSITIONS.get(name, len(x))) is not False:
        read += [written] * large
    return _sum(*read, written)


def _reduction_bytes(name: str, x: OpInputs) -> float | None:
    result = _REDUCTIONS.get(name)
    if result is None:
        return None
    position, out_width = result
    tensor = x.tensors[0]
    rank = len(tensor.shape)
    # Overloads without dimensions reduce everything; they record fewer inputs than `at`.
    if len(x) <= position or (name in ("sum", "mean", "prod") and len(x) == 2):
        reduced = tuple(range(rank))
    else:
        if not x.has_arguments:
            return None
        dims = x.integers(position)
        if dims is None or dims == []:
            reduced = tuple(range(rank))
        elif any(not -rank <= dim < max(rank, 1) for dim in dims):
            return None
        else:
            reduced = tuple(dim % rank if rank else 0 for dim in dims)
    outputs = prod(size for dim_index, size in enumerate(tensor.shape) if dim_index not in reduced)
    return _sum(tensor.bytes, _size_of(outputs, out_width or tensor.width))


def _scan_bytes(name: str, x: OpInputs) -> float | None:
    """Count a cumulative sum's input and its output, whose type is at least as wide."""
    if name not in ("cumsum", "cumprod", "logcumsumexp"):
        return None
    return _sum(x.tensors[0].bytes, _size_of(x.tensors[0].elements, x.tensors[0].width))


def _lookup_bytes(name: str, x: OpInputs) -> float | None:
    """Count looked-up rows, read and written once, and the indices."""
    tensors = x.tensors
    if name == "embedding" and len(tensors) > 1 and len(tensors[0].shape) == 2:
        rows = _size_of(tensors[1].elements * tensors[0].shape[1], tensors[0].width)
        return _sum(tensors[1].bytes, rows, rows)
    if name == "gather" and len(tensors) > 1:
        picked = _size_of(tensors[1].elements, tensors[0].width)
        return _sum(tensors[1].bytes, picked, picked)
    if name == "index_select" and len(tensors) > 1:
        shape, dim = tensors[0].shape, x.integers(1)
        if len(shape) == 1:
            dim = [0]
        if not dim or not -len(shape) <= dim[0] < len(shape) or not shape[dim[0]]:
            return None
        elements_per_row = tensors[0].elements // shape[dim[0]]
        picked = _size_of(tensors[1].elements * elements_per_row, tensors[0].width)
        return _sum(tensors[1].bytes, picked, picked)
    if name.removesuffix("_") in ("scatter_add", "index_add") and len(tensors) > 2:
        source = tensors[-1]
        touched = _size_of(source.elements, tensors[0].width)
        return _sum(tensors[-2].bytes, source.bytes, touched, touched)
    if name == "embedding_dense_backward" and len(tensors) > 1:
        rows = x.argument(2)
        if not isinstance(rows, int) or isinstance(rows, bool) or not tensors[0].shape:
            return None
        table = _size_of(max(rows, 0) * tensors[0].shape[-1], tensors[0].width)
        return _sum(tensors[0].bytes, tensors[1].bytes, table)
    return None


def _copy_bytes(name: str, x: OpInputs) -> float | None:
    first = x.tensors[0]
    if name == "copy_":
        source = x.tensor(1)
        written = _size_of(first.elements, first.width)
        return None if source is None else _sum(source.bytes, written)
    if name == "clone":
        return _sum(first.bytes, _size_of(first.elements, first.width))
    if name in ("fill_", "zero_"):
        return _size_of(first.elements, first.width)
    return None


def _elementwise_bytes(name: str, x: OpInputs) -> float | None:
    plain = name if name in ELEMENTWISE else name.removesuffix("_")
    count = ELEMENTWISE.get(plain)
    if count is None:
        return None
    read, out = x.tensors[:count], x.tensors[count:]
    shape = broadcast_shapes(*(tensor.shape for tensor in read))
    if shape is None:
        return None
    if out and out[0].shape == shape:
        width = out[0].width
    elif name != plain:
        width = read[0].width
    elif plain in _BOOLEAN_RESULT:
        width = 1
    else:
        values = read[1:] if plain in ("where",) and len(read) > 1 else read
        width = _promoted_width([read[0]] if plain == "masked_fill" else values, plain)
    return _sum(*(tensor.bytes for tensor in read), _size_of(prod(shape), width))


def _promoted_width(tensors: list[Tensor], name: str) -> int | None:
    """Return the bytes per element of the result: the widest type of the highest kind (bool,
    integer, float, complex). Tensors without dimensions count only if they have a higher kind."""
    kinds = [type_order(tensor.dtype) for tensor in tensors]
    with_dims = [kind for kind, tensor in zip(kinds, tensors, strict=True) if tensor.shape]
    highest = max(kinds)
    if with_dims and max(with_dims) == highest:
        widest = [t for t, kind in zip(tensors, kinds, strict=True) if kind == highest and t.shape]
    else:
        widest = [t for t, kind in zip(tensors, kinds, strict=True) if kind == highest]
    if highest < 2 and name in _FLOAT_FROM_INTEGER:
        return 4
    widths = [tensor.width for tensor in widest]
    if None in widths:
        return None
    formats = {bare_type_name(tensor.dtype) for tensor in widest}
    if formats >= {"half", "bfloat16"}:
        return 4
    return max(width for width in widths if width is not None)
