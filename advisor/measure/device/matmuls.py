"""Dimensions of matrix products, convolutions and attention, from recorded inputs.

``kernels.py`` and ``traffic.py`` both start from these. Argument positions are those of PyTorch's
operator schemas (``torch._C._jit_get_schemas_for_operator``)."""

import re
from math import prod
from typing import NamedTuple

from advisor.measure.device.shapes import MAX_ELEMENTS, OpInputs, Tensor


class MatrixProduct(NamedTuple):
    """A matrix product: ``batch`` times [m, k] x [k, n]."""

    batch: int
    m: int
    n: int
    k: int
    a: Tensor
    b: Tensor
    added: Tensor | None
    """Matrix or bias that is added (``addmm``, ``linear``)."""

    @property
    def is_vector_product(self) -> bool:
        """Whether one side is a vector: matrix units have nothing to reuse."""
        return min(self.m, self.n, self.k) <= 1


class ConvolutionCall(NamedTuple):
    """A convolution or one of its gradients."""

    batch: int
    points: int
    """Spatial positions at which the filter is applied: of the output, or of the input when
    transposed."""
    out_spatial: tuple[int, ...] | None
    """Output's spatial sizes; ``None``: not recorded (transposed, without all of its arguments)."""
    channels_out: int
    input: Tensor
    weight: Tensor
    backward: bool = False
    output_mask: tuple[bool, bool, bool] = (False, False, False)


class AttentionCall(NamedTuple):
    """Scaled dot product attention: ``pairs`` query-key pairs a head that are computed."""

    batch: int
    heads: int
    queries: int
    keys: int
    pairs: int
    width: int
    """Elements of a query or key."""
    value_width: int
    query: Tensor
    key: Tensor
    value: Tensor
    backward: bool


def parse_product(op: str, x: OpInputs) -> MatrixProduct | None:
    """Return the matrix product of an operator; ``None``: not one, or shapes that do not fit."""
    name = op.removeprefix("aten::").removesuffix("_")
    at = _PRODUCTS.get(name)
    if at is None:
        return None
    first, second, added = at
    a, b = x.tensor(first), x.tensor(second)
    if a is None or b is None:
        return None
    bias = x.tensor(added) if added is not None else None
    if name == "linear":
        return _linear(a, b, bias)
    if "grouped_mm" in name:
        return _grouped(a, b)
    return _matmul(a, b, bias)


_PRODUCTS: dict[str, tuple[int, int, int | None]] = {
    **dict.fromkeys(("mm", "bmm", "matmul", "mv", "dot", "vdot"), (0, 1, None)),
    **dict.fromkeys(("_int_mm", "_scaled_mm", "_scaled_mm_v2"), (0, 1, None)),
    **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"), (0, 1, None)),
    **dict.fromkeys(("addmm", "addmv", "baddbmm", "addbmm", "_addmm_activation"), (1, 2, 0)),
    "linear": (0, 1, 2),
}
"""Operator -> places of the two matrices and of what is added."""


def _linear(a: Tensor, weight: Tensor, bias: Tensor | None) -> MatrixProduct | None:
    if not a.shape or len(weight.shape) != 2 or a.shape[-1] != weight.shape[1]:
        return None
    rows = prod(a.shape[:-1])
    return MatrixProduct(1, rows, weight.shape[0], weight.shape[1], a, weight, bias)


def _matmul(a: Tensor, b: Tensor, added: Tensor | None) -> MatrixProduct | None:
    """Parse ``torch.matmul``: vectors become matrices, batch dimensions broadcast."""
    if not a.shape or not b.shape:
        return None
    left = a.shape if len(a.shape) > 1 else (1, *a.shape)
    right = b.shape if len(b.shape) > 1 else (*b.shape, 1)
    if left[-1] != right[-2]:
        return None
    batch = broadcast_shapes(left[:-2], right[:-2])
    if batch is None:
        return None
    return MatrixProduct(prod(batch), left[-2], right[-1], left[-1], a, b, added)


def _grouped(a: Tensor, b: Tensor) -> MatrixProduct | None:
    """Return a grouped product: a 2-D side holds all groups, so only the sums of their sizes are
    recorded, and the work depends only on those."""
    ranks = (len(a.shape), len(b.shape))
    if ranks == (2, 3) and a.shape[1] == b.shape[1]:
        return MatrixProduct(1, a.shape[0], b.shape[2], a.shape[1], a, b, None)
    if ranks == (3, 2) and a.shape[2] == b.shape[0]:
        return MatrixProduct(1, a.shape[1], b.shape[1], a.shape[2], a, b, None)
    if ranks == (2, 2) and a.shape[1] == b.shape[0]:
        return MatrixProduct(1, a.shape[0], b.shape[1], a.shape[1], a, b, None)
    return _matmul(a, b, None) if ranks == (3, 3) else None


class Experts(NamedTuple):
    """A layer of experts in one call: each of ``rows`` goes through the two products of one of
    ``parse_experts``, [width] x [width, inner] (gate and up together) and [hidden] x [hidden,
    width]."""

    tokens: Tensor
    up: Tensor
    """[experts, inner, width]."""
    down: Tensor
    """[experts, width, hidden]; hidden is half of inner where a gate is applied."""
    rows: int
    """Tokens times the experts that each is sent to."""
    routing: tuple[Tensor, ...]
    """Weights and numbers of the chosen experts."""


_EXPERTS = re.compile(r"(?:^|::)(?:inplace_|outplace_|grouped_)?fused_(?:experts|moe)(?:_impl)?_?$")
"""Operators of expert layers: vLLM's and SGLang's ``inplace_fused_experts``, ``outplace_…``."""


def parse_experts(op: str, x: OpInputs) -> Experts | None:
    """Return the experts of an operator; ``None``: not one, or unknown inputs. Known ones are
    tokens, the two weights, the routing weights and numbers, in this order (``fused_experts``).
    Routing scores instead (``fused_moe``) do not tell how many experts a token is sent to."""
    if op.startswith("aten::") or not _EXPERTS.search(op):
        return None
    tokens, up, down, weights, numbers = (x.tensor(at) for at in range(5))
    if tokens is None or up is None or down is None or weights is None or numbers is None:
        return None
    if len(tokens.shape) != 2 or len(up.shape) != 3 or len(down.shape) != 3:
        return None
    if numbers.shape != weights.shape or len(numbers.shape) != 2:
        return None
    width, count = tokens.shape[1], up.shape[0]
    if up.shape[2] != width or down.shape[:2] != (count, width):
        return None
    if down.shape[2] not in (up.shape[1], up.shape[1] // 2) or numbers.shape[0] != tokens.shape[0]:
        return None
    return Experts(tokens, up, down, numbers.elements, (weights, numbers))


def broadcast_shapes(*shapes: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape that all broadcast to; ``None``: they do not."""
    rank = max((len(shape) for shape in shapes), default=0)
    result = []
    for place in range(-rank, 0):
        sizes = {shape[place] for shape in shapes if len(shape) >= -place} - {1}
        if len(sizes) > 1:
            return None
        result.append(sizes.pop() if sizes else 1)
    return tuple(result)


class _Layout(NamedTuple):
    """Positions of a convolution's arguments; weight is always the second tensor."""

    stride: int
    padding: int
    dilation: int
    transposed: int | bool = False
    """Position of the flag, or its value."""
    bias: int | None = None
    output_padding: int | None = None
    """Position in the operators that can be transposed, as ``groups`` is."""
    groups: int | None = None


_CONVOLUTIONS: dict[str, _Layout] = {
    "convolution": _Layout(3, 4, 5, 6, bias=2, output_padding=7, groups=8),
    "_convolution": _Layout(3, 4, 5, 6, bias=2, output_padding=7, groups=8),
    "convolution_overrideable": _Layout(3, 4, 5, 6, bias=2, output_padding=7, groups=8),
    "conv1d": _Layout(3, 4, 5, bias=2),
    "conv2d": _Layout(3, 4, 5, bias=2),
    "conv3d": _Layout(3, 4, 5, bias=2),
    "conv_transpose1d": _Layout(3, 4, 7, True, bias=2, output_padding=5, groups=6),
    "conv_transpose2d": _Layout(3, 4, 7, True, bias=2, output_padding=5, groups=6),
    "conv_transpose3d": _Layout(3, 4, 7, True, bias=2, output_padding=5, groups=6),
    "cudnn_convolution": _Layout(3, 2, 4),
    "cudnn_convolution_transpose": _Layout(4, 2, 5, True, output_padding=3, groups=6),
    "cudnn_convolution_relu": _Layout(3, 4, 5, bias=2),
    "cudnn_convolution_add_relu": _Layout(5, 6, 7, bias=4),
    "miopen_convolution": _Layout(4, 3, 5, bias=2),
    "miopen_convolution_relu": _Layout(3, 4, 5, bias=2),
    "miopen_depthwise_convolution": _Layout(4, 3, 5, bias=2),
    "miopen_convolution_transpose": _Layout(5, 3, 6, True, bias=2, output_padding=4, groups=7),
    "_conv_depthwise2d": _Layout(4, 5, 6, bias=3),
    "conv_depthwise3d": _Layout(4, 5, 6, bias=3),
    "slow_conv_dilated2d": _Layout(4, 5, 6, bias=3),
}


def parse_convolution(op: str, x: OpInputs) -> ConvolutionCall | None:
    """Return the convolution of an operator; ``None``: not one, or stride, padding or the output
    mask were not recorded and the shapes alone do not tell."""
    name = op.removeprefix("aten::")
    if name == "convolution_backward":
        return _convolution_backward(x)
    layout = _CONVOLUTIONS.get(name)
    if layout is None:
        return None
    data, weight = x.tensor(0), x.tensor(1)
    if data is None or weight is None:
        return None
    rank = len(weight.shape) - 2
    shape = data.shape if len(data.shape) == rank + 2 else (1, *data.shape)  # unbatched
    if rank < 1 or len(shape) != rank + 2:
        return None
    transposed: bool | None
    if isinstance(layout.transposed, bool):
        transposed = layout.transposed
    else:
        transposed = x.flag(layout.transposed)
    if transposed is None:
        return None
    if transposed:
        if shape[1] != weight.shape[0]:
            return None
        # Each input point is spread through the filter: the work needs no output size.
        spatial = _transposed_size(x, layout, shape[2:], weight.shape[2:])
        groups = x.argument(layout.groups) if layout.groups is not None else None
        if spatial is None or not isinstance(groups, int) or groups < 1:
            return ConvolutionCall(shape[0], prod(shape[2:]), None, 0, data, weight)
        out = weight.shape[1] * groups
        return ConvolutionCall(shape[0], prod(shape[2:]), spatial, out, data, weight)
    spatial = _output_size(x, layout, shape[2:], weight.shape[2:])
    if spatial is None:
        return None
    return ConvolutionCall(shape[0], prod(spatial), spatial, weight.shape[0], data, weight)


def _transposed_size(
    x: OpInputs, layout: _Layout, size: tuple[int, ...], kernel: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return (size - 1) stride - 2 padding + dilation (kernel - 1) + output padding + 1."""
    if layout.output_padding is None:
        return None
    at = (layout.stride, layout.padding, layout.dilation, layout.output_padding)
    given = _a_dimension(x, at, len(size))
    if given is None:
        return None
    result = []
    for extent, taps, (stride, padding, dilation, more) in zip(size, kernel, given, strict=True):
        if stride < 1 or dilation < 1 or padding < 0 or more < 0:
            return None
        out = (extent - 1) * stride - 2 * padding + dilation * (taps - 1) + more + 1
        if not 0 <= out < MAX_ELEMENTS:
            return None
        result.append(out)
    return tuple(result)


def _a_dimension(x: OpInputs, at: tuple[int, ...], rank: int) -> list[tuple[int, ...]] | None:
    """Read arguments that are given once or for each dimension; ``None``: not recorded."""
    lists = [x.integers(place) for place in at]
    full = []
    for numbers in lists:
        if not numbers or len(numbers) not in (1, rank):
            return None
        full.append(numbers if len(numbers) > 1 else numbers * rank)
    return list(zip(*full, strict=True))


def _output_size(
    x: OpInputs, layout: _Layout, size: tuple[int, ...], kernel: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return floor((size + 2 padding - dilation (kernel - 1) - 1) / stride) + 1, by dimension."""
    given = _a_dimension(x, (layout.stride, layout.padding, layout.dilation), len(size))
    if given is None:
        return None
    result = []
    for extent, taps, (stride, padding, dilation) in zip(size, kernel, given, strict=True):
        if stride < 1 or dilation < 1 or padding < 0:
            return None
        out = (extent + 2 * padding - dilation * (taps - 1) - 1) // stride + 1
        if out < 0:
            return None
        result.append(out)
    return tuple(result)


def _convolution_backward(x: OpInputs) -> ConvolutionCall | None:
    """Return a convolution's gradients: the recorded output gradient has the output's size, so only
    the mask and the direction of the convolution must be known."""
    grad, data, weight = x.tensor(0), x.tensor(1), x.tensor(2)
    mask, transposed = x.argument(10), x.flag(7)
    if grad is None or data is None or weight is None or transposed is None:
        return None
    if not isinstance(mask, list) or len(mask) != 3 or {type(m) for m in mask} != {bool}:
        return None
    rank = len(weight.shape) - 2
    if rank < 1 or len(data.shape) != rank + 2 or len(grad.shape) != rank + 2:
        return None
    spatial = data.shape[2:] if transposed else grad.shape[2:]
    return ConvolutionCall(
        data.shape[0],
        prod(spatial),
        grad.shape[2:],
        grad.shape[1],
        data,
        weight,
        True,
        (mask[0], mask[1], mask[2]),
    )


class _AttentionArguments(NamedTuple):
    """Positions of an attention operator's query, its causal argument and its sequence lengths."""

    query: int
    causal: int
    heads_first: bool
    """Whether inputs are [batch, heads, sequence, width], else [batch, sequence, heads, width]."""
    varlen: int | None = None
    """Position of the cumulative sequence lengths; when given, the shapes do not tell the work."""
    window: int | None = None


_ATTENTION: dict[str, _AttentionArguments] = {
    "_flash_attention_forward": _AttentionArguments(0, 8, False, varlen=3, window=11),
    "_flash_attention_backward": _AttentionArguments(1, 11, False, varlen=6, window=15),
    "_efficient_attention_forward": _AttentionArguments(0, 9, False, varlen=4, window=13),
    "_efficient_attention_backward": _AttentionArguments(1, 14, False, varlen=6, window=18),
    "_cudnn_attention_forward": _AttentionArguments(0, 10, True, varlen=4),
    "_cudnn_attention_backward": _AttentionArguments(1, 14, True, varlen=9),
    "_scaled_dot_product_flash_attention": _AttentionArguments(0, 4, True),
    "_scaled_dot_product_flash_attention_backward": _AttentionArguments(1, 11, True, varlen=6),
    "_scaled_dot_product_efficient_attention": _AttentionArguments(0, 6, True),
    "_scaled_dot_product_efficient_attention_backward": _AttentionArguments(1, 11, True),
    "_scaled_dot_product_cudnn_attention": _AttentionArguments(0, 6, True),
    "_scaled_dot_product_cudnn_attention_backward": _AttentionArguments(1, 14, True, varlen=9),
    "_scaled_dot_product_fused_attention_overrideable": _AttentionArguments(0, 5, True),
    "_scaled_dot_product_fused_attention_overrideable_backward": _AttentionArguments(1, 13, True),
    "scaled_dot_product_attention": _AttentionArguments(0, 5, True),
}


def parse_attention(op: str, x: OpInputs) -> AttentionCall | None:
    """Return the attention of an operator; ``None``: not one, packed sequences of unknown length, a
    sliding window, or the causal argument was not recorded."""
    name = op.removeprefix("aten::")
    call = _ATTENTION.get(name)
    if call is None:
        return None
    tensors = [x.tensor(call.query + place) for place in range(3)]
    query, key, value = tensors
    if query is None or key is None or value is None:
        return None
    if not len(query.shape) == len(key.shape) == len(value.shape) == 4:
        return None
    if call.varlen is not None and x.tensor(call.varlen) is not None:
        return None
    if call.window is not None and _window(x, call.window):
        return None
    causal = _causal(name, x, call.causal)
    if causal is None:
        return None
    sequence, head = (2, 1) if call.heads_first else (1, 2)
    queries, keys = query.shape[sequence], key.shape[sequence]
    if key.shape[3] != query.shape[3] or value.shape[sequence] != keys:
        return None
    return AttentionCall(
        batch=query.shape[0],
        heads=query.shape[head],
        queries=queries,
        keys=keys,
        pairs=_causal_pairs(queries, keys) if causal else queries * keys,
        width=query.shape[3],
        value_width=value.shape[3],
        query=query,
        key=key,
        value=value,
        backward=call.query == 1,
    )


def _window(x: OpInputs, at: int) -> bool:
    size = x.argument(at)
    return isinstance(size, int) and size >= 0


def _causal(name: str, x: OpInputs, at: int) -> bool | None:
    if "efficient_attention_" not in name or name.startswith("_scaled"):
        return x.flag(at)
    # custom_mask_type: 0 none, 1 and 2 causal. Before PyTorch 2.3 the forward had one argument
    # less in front of it; then `at` holds compute_log_sumexp, a boolean.
    kind = x.argument(at)
    if isinstance(kind, bool):
        kind = x.argument(at - 1)
    return None if not isinstance(kind, int) or isinstance(kind, bool) else kind != 0


def _causal_pairs(queries: int, keys: int) -> int:
    """Count pairs (i, j) with j <= i: the sum of min(i + 1, keys) over the queries."""
    full = min(queries, keys)
    return full * (full + 1) // 2 + (queries - full) * keys
