"""Dimensions of matrix products, convolutions and attention, from recorded inputs.

``kernels.py`` and ``traffic.py`` both use these. Argument positions are taken from PyTorch's
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
        """Whether one side is a vector, so that matrix units have nothing to reuse."""
        return min(self.m, self.n, self.k) <= 1


class ConvolutionCall(NamedTuple):
    """A convolution or one of its gradients."""

    batch: int
    points: int
    """Spatial positions at which the filter is applied: output positions, or input positions if
    transposed."""
    out_spatial: tuple[int, ...] | None
    """Output's spatial sizes, or ``None`` if not recorded (transposed, with missing arguments)."""
    channels_out: int
    input: Tensor
    weight: Tensor
    backward: bool = False
    output_mask: tuple[bool, bool, bool] = (False, False, False)


class AttentionCall(NamedTuple):
    """Scaled dot product attention. ``pairs``: query-key pairs that are computed per head."""

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
    """Return an operator's matrix product, or ``None`` if it has none or its shapes do not fit."""
    name = op.removeprefix("aten::").removesuffix("_")
    positions = _MATRIX_POSITIONS.get(name)
    if positions is None:
        return None
    first, second, added = positions
    a, b = x.tensor(first), x.tensor(second)
    if a is None or b is None:
        return None
    bias = x.tensor(added) if added is not None else None
    if name == "linear":
        return _parse_linear(a, b, bias)
    if "grouped_mm" in name:
        return _parse_grouped(a, b)
    return _parse_matmul(a, b, bias)


MATRIX_PRODUCTS = frozenset(f"aten::{name}" for name in "matmul mm addmm bmm linear".split())
"""Operators that multiply two matrices, under the names that programs call most."""
_MATRIX_POSITIONS: dict[str, tuple[int, int, int | None]] = {
    **dict.fromkeys(("mm", "bmm", "matmul", "mv", "dot", "vdot"), (0, 1, None)),
    **dict.fromkeys(("_int_mm", "_scaled_mm", "_scaled_mm_v2"), (0, 1, None)),
    **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"), (0, 1, None)),
    **dict.fromkeys(("addmm", "addmv", "baddbmm", "addbmm", "_addmm_activation"), (1, 2, 0)),
    "linear": (0, 1, 2),
}
"""Operator -> argument positions of the two matrices and of the added tensor."""


def _parse_linear(a: Tensor, weight: Tensor, bias: Tensor | None) -> MatrixProduct | None:
    if not a.shape or len(weight.shape) != 2 or a.shape[-1] != weight.shape[1]:
        return None
    rows = prod(a.shape[:-1])
    return MatrixProduct(1, rows, weight.shape[0], weight.shape[1], a, weight, bias)


def _parse_matmul(a: Tensor, b: Tensor, added: Tensor | None) -> MatrixProduct | None:
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


def _parse_grouped(a: Tensor, b: Tensor) -> MatrixProduct | None:
    """Return a grouped product. A 2-D side holds all groups, so only the sums of their sizes are
    recorded, and the work depends only on these sums."""
    ranks = (len(a.shape), len(b.shape))
    if ranks == (2, 3) and a.shape[1] == b.shape[1]:
        return MatrixProduct(1, a.shape[0], b.shape[2], a.shape[1], a, b, None)
    if ranks == (3, 2) and a.shape[2] == b.shape[0]:
        return MatrixProduct(1, a.shape[1], b.shape[1], a.shape[2], a, b, None)
    if ranks == (2, 2) and a.shape[1] == b.shape[0]:
        return MatrixProduct(1, a.shape[0], b.shape[1], a.shape[1], a, b, None)
    return _parse_matmul(a, b, None) if ranks == (3, 3) else None


class Experts(NamedTuple):
    """A layer of experts in one call (see ``parse_experts``). Each of ``rows`` goes through the two
    products of an expert: [width] x [width, inner] (gate and up together) and [hidden] x [hidden,
    width]."""

    tokens: Tensor
    up: Tensor
    """[experts, inner, width]."""
    down: Tensor
    """[experts, width, hidden]; hidden is half of inner if a gate is applied."""
    rows: int
    """Number of tokens times the experts that each token is sent to."""
    routing: tuple[Tensor, ...]
    """Weights and numbers of the chosen experts."""


_EXPERTS = re.compile(r"(?:^|::)(?:inplace_|outplace_|grouped_)?fused_(?:experts|moe)(?:_impl)?_?$")
"""Operators of expert layers: vLLM's and SGLang's ``inplace_fused_experts``, ``outplace_…``."""


def parse_experts(op: str, x: OpInputs) -> Experts | None:
    """Return the experts of an operator, or ``None`` if it is not an expert layer or has unknown
    inputs. Known inputs are tokens, the two weights, the routing weights and numbers, in this
    order (``fused_experts``). Routing scores (``fused_moe``) do not show how many experts a
    token uses."""
    if op.startswith("aten::") or not _EXPERTS.search(op):
        return None
    tokens, up, down, weights, numbers = (x.tensor(position) for position in range(5))
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
    """Return the shape that all shapes broadcast to, or ``None`` if they are incompatible."""
    rank = max((len(shape) for shape in shapes), default=0)
    result = []
    for dim in range(-rank, 0):
        sizes = {shape[dim] for shape in shapes if len(shape) >= -dim} - {1}
        if len(sizes) > 1:
            return None
        result.append(sizes.pop() if sizes else 1)
    return tuple(result)


class _ConvolutionArguments(NamedTuple):
    """Positions of a convolution's arguments. The weight is always the second tensor."""

    stride: int
    padding: int
    dilation: int
    transposed: int | bool = False
    """Position of the flag, or its value."""
    bias: int | None = None
    output_padding: int | None = None
    """Position in the operators that can be transposed, as ``groups`` is."""
    groups: int | None = None


_CONVOLUTIONS: dict[str, _ConvolutionArguments] = {
    "convolution": _ConvolutionArguments(3, 4, 5, 6, bias=2, output_padding=7, groups=8),
    "_convolution": _ConvolutionArguments(3, 4, 5, 6, bias=2, output_padding=7, groups=8),
    "convolution_overrideable": _ConvolutionArguments(
        3, 4, 5, 6, bias=2, output_padding=7, groups=8
    ),
    "conv1d": _ConvolutionArguments(3, 4, 5, bias=2),
    "conv2d": _ConvolutionArguments(3, 4, 5, bias=2),
    "conv3d": _ConvolutionArguments(3, 4, 5, bias=2),
    "conv_transpose1d": _ConvolutionArguments(3, 4, 7, True, bias=2, output_padding=5, groups=6),
    "conv_transpose2d": _ConvolutionArguments(3, 4, 7, True, bias=2, output_padding=5, groups=6),
    "conv_transpose3d": _ConvolutionArguments(3, 4, 7, True, bias=2, output_padding=5, groups=6),
    "cudnn_convolution": _ConvolutionArguments(3, 2, 4),
    "cudnn_convolution_transpose": _ConvolutionArguments(4, 2, 5, True, output_padding=3, groups=6),
    "cudnn_convolution_relu": _ConvolutionArguments(3, 4, 5, bias=2),
    "cudnn_convolution_add_relu": _ConvolutionArguments(5, 6, 7, bias=4),
    "miopen_convolution": _ConvolutionArguments(4, 3, 5, bias=2),
    "miopen_convolution_relu": _ConvolutionArguments(3, 4, 5, bias=2),
    "miopen_depthwise_convolution": _ConvolutionArguments(4, 3, 5, bias=2),
    "miopen_convolution_transpose": _ConvolutionArguments(
        5, 3, 6, True, bias=2, output_padding=4, groups=7
    ),
    "_conv_depthwise2d": _ConvolutionArguments(4, 5, 6, bias=3),
    "conv_depthwise3d": _ConvolutionArguments(4, 5, 6, bias=3),
    "slow_conv_dilated2d": _ConvolutionArguments(4, 5, 6, bias=3),
}


def parse_convolution(op: str, x: OpInputs) -> ConvolutionCall | None:
    """Return the convolution of an operator. ``None`` if it is not a convolution, or if stride,
    padding or the output mask were not recorded and the shapes are not enough."""
    name = op.removeprefix("aten::")
    if name == "convolution_backward":
        return _parse_convolution_backward(x)
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
        # Each input point is spread through the filter, so the work does not depend on the output
        # size.
        spatial = _find_transposed_size(x, layout, shape[2:], weight.shape[2:])
        groups = x.argument(layout.groups) if layout.groups is not None else None
        if spatial is None or not isinstance(groups, int) or groups < 1:
            return ConvolutionCall(shape[0], prod(shape[2:]), None, 0, data, weight)
        out = weight.shape[1] * groups
        return ConvolutionCall(shape[0], prod(shape[2:]), spatial, out, data, weight)
    spatial = _find_output_size(x, layout, shape[2:], weight.shape[2:])
    if spatial is None:
        return None
    return ConvolutionCall(shape[0], prod(spatial), spatial, weight.shape[0], data, weight)


def _find_transposed_size(
    x: OpInputs, layout: _ConvolutionArguments, size: tuple[int, ...], kernel: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return (size - 1) stride - 2 padding + dilation (kernel - 1) + output padding + 1."""
    if layout.output_padding is None:
        return None
    positions = (layout.stride, layout.padding, layout.dilation, layout.output_padding)
    arguments = _expand_arguments(x, positions, len(size))
    if arguments is None:
        return None
    result = []
    for extent, taps, (stride, padding, dilation, output_padding) in zip(
        size, kernel, arguments, strict=True
    ):
        if stride < 1 or dilation < 1 or padding < 0 or output_padding < 0:
            return None
        out = (extent - 1) * stride - 2 * padding + dilation * (taps - 1) + output_padding + 1
        if not 0 <= out < MAX_ELEMENTS:
            return None
        result.append(out)
    return tuple(result)


def _expand_arguments(
    x: OpInputs, positions: tuple[int, ...], rank: int
) -> list[tuple[int, ...]] | None:
    """Read arguments that are given once or for each dimension, or ``None`` if not recorded."""
    lists = [x.integers(position) for position in positions]
    expanded = []
    for numbers in lists:
        if not numbers or len(numbers) not in (1, rank):
            return None
        expanded.append(numbers if len(numbers) > 1 else numbers * rank)
    return list(zip(*expanded, strict=True))


def _find_output_size(
    x: OpInputs, layout: _ConvolutionArguments, size: tuple[int, ...], kernel: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return floor((size + 2 padding - dilation (kernel - 1) - 1) / stride) + 1, by dimension."""
    arguments = _expand_arguments(x, (layout.stride, layout.padding, layout.dilation), len(size))
    if arguments is None:
        return None
    result = []
    for extent, taps, (stride, padding, dilation) in zip(size, kernel, arguments, strict=True):
        if stride < 1 or dilation < 1 or padding < 0:
            return None
        out = (extent + 2 * padding - dilation * (taps - 1) - 1) // stride + 1
        if out < 0:
            return None
        result.append(out)
    return tuple(result)


def _parse_convolution_backward(x: OpInputs) -> ConvolutionCall | None:
    """Return a convolution's gradients. The recorded output gradient has the output's size, so only
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
    """Position of the cumulative sequence lengths; with them shapes do not determine the work."""
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
    """Return the attention of an operator. ``None`` if it is not attention, has packed sequences of
    unknown length or a sliding window, or its causal argument was not recorded."""
    name = op.removeprefix("aten::")
    call = _ATTENTION.get(name)
    if call is None:
        return None
    tensors = [x.tensor(call.query + index) for index in range(3)]
    query, key, value = tensors
    if query is None or key is None or value is None:
        return None
    if not len(query.shape) == len(key.shape) == len(value.shape) == 4:
        return None
    if call.varlen is not None and x.tensor(call.varlen) is not None:
        return None
    if call.window is not None and _has_window(x, call.window):
        return None
    causal = _is_causal(name, x, call.causal)
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
        pairs=_count_causal_pairs(queries, keys) if causal else queries * keys,
        width=query.shape[3],
        value_width=value.shape[3],
        query=query,
        key=key,
        value=value,
        backward=call.query == 1,
    )


def _has_window(x: OpInputs, position: int) -> bool:
    size = x.argument(position)
    return isinstance(size, int) and size >= 0


def _is_causal(name: str, x: OpInputs, position: int) -> bool | None:
    if "efficient_attention_" not in name or name.startswith("_scaled"):
        return x.flag(position)
    # custom_mask_type: 0 none, 1 and 2 causal. Before PyTorch 2.3 the forward had one argument
    # less in front of it; then `at` holds compute_log_sumexp, a boolean.
    kind = x.argument(position)
    if isinstance(kind, bool):
        kind = x.argument(position - 1)
    return None if not isinstance(kind, int) or isinstance(kind, bool) else kind != 0


def _count_causal_pairs(queries: int, keys: int) -> int:
    """Count pairs (i, j) with j <= i, the sum of min(i + 1, keys) over the queries."""
    full = min(queries, keys)
    return full * (full + 1) // 2 + (queries - full) * keys
