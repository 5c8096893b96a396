"""FLOPs and bytes of operators: figures worked out by hand, and PyTorch's own counter."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.measure.device.shapes import OpInputs
from advisor.measure.device.traffic import count_bytes, count_flops

BF16 = "c10::BFloat16"


def inputs(
    dims: list[Any],
    types: str | list[str] = "float",
    arguments: dict[int, str] | None = None,
    strides: list[Any] | None = None,
    concrete: bool = True,
) -> OpInputs:
    """Inputs as the profiler writes them: ``None`` in ``dims`` is a plain argument, whose text
    ``arguments`` has; ``concrete=False`` is a profiler that does not record arguments."""
    arguments_by_place = arguments or {}
    count = max(len(dims), max(arguments_by_place, default=-1) + 1)
    shapes = [*dims, *[None] * (count - len(dims))]
    kinds = [types] * count if isinstance(types, str) else [*types, *["Scalar"] * count]
    fields = [
        ("" if arguments_by_place.get(at, "") == "" else "Scalar") if shape is None else kinds[at]
        for at, shape in enumerate(shapes)
    ]
    texts = [arguments_by_place.get(at, "") for at in range(count)]
    return OpInputs(
        json.dumps([shape or [] for shape in shapes]),
        json.dumps(fields),
        json.dumps(strides) if strides else "",
        json.dumps(texts) if concrete else "",
    )


# -- matrix products ------------------------------------------------------------------------


def test_mm_multiplies_and_adds_once_a_result_and_inner_element() -> None:
    x = inputs([[128, 512], [512, 64]])
    assert count_flops("aten::mm", x) == 2 * 128 * 64 * 512 == 8_388_608
    assert count_bytes("aten::mm", x) == 4 * (128 * 512 + 512 * 64 + 128 * 64) == 425_984


def test_addmm_counts_its_product_and_reads_its_bias() -> None:
    x = inputs([[256], [1024, 2880], [2880, 256], None, None], BF16, {3: "1", 4: "1"})
    assert count_flops("aten::addmm", x) == 2 * 1024 * 256 * 2880 == 1_509_949_440
    assert count_bytes("aten::addmm", x) == 2 * (256 + 1024 * 2880 + 2880 * 256 + 1024 * 256)


def test_a_bias_broadcast_by_stride_zero_is_read_once() -> None:
    dims = [[8, 4], [8, 2], [2, 4]]
    full = count_bytes("aten::addmm", inputs(dims, strides=[[4, 1], [2, 1], [4, 1]]))
    bias = count_bytes("aten::addmm", inputs(dims, strides=[[0, 1], [2, 1], [4, 1]]))
    assert (full, bias) == (4 * (32 + 16 + 8 + 32), 4 * (4 + 16 + 8 + 32))


def test_batches_multiply() -> None:
    assert count_flops("aten::bmm", inputs([[16, 50, 96], [16, 96, 8]])) == 16 * 2 * 50 * 8 * 96
    x = inputs([[16, 50, 8], [16, 50, 96], [16, 96, 8]])
    assert count_flops("aten::baddbmm", x) == 16 * 2 * 50 * 8 * 96


def test_linear_and_matmul_with_many_dimensions_and_vectors() -> None:
    assert count_flops("aten::linear", inputs([[2, 3, 5, 7], [11, 7], [11]])) == 2 * 30 * 11 * 7
    assert count_flops("aten::matmul", inputs([[4, 1, 5, 7], [3, 7, 2]])) == 2 * 12 * 5 * 2 * 7
    assert count_flops("aten::matmul", inputs([[7], [7, 9]])) == 2 * 9 * 7
    assert count_flops("aten::mv", inputs([[5, 7], [7]])) == 2 * 5 * 7
    assert count_flops("aten::dot", inputs([[7], [7]])) == 2 * 7


def test_grouped_products_depend_only_on_the_summed_rows() -> None:
    assert count_flops("aten::_grouped_mm", inputs([[100, 32], [4, 32, 16]])) == 2 * 100 * 32 * 16
    assert count_flops("aten::_grouped_mm", inputs([[8, 100], [100, 16]])) == 2 * 8 * 100 * 16
    assert (
        count_bytes("aten::_grouped_mm", inputs([[8, 100], [100, 16]])) is None
    )  # groups not recorded


def test_scaled_product_writes_its_output_dtype() -> None:
    fp8 = "c10::Float8_e4m3fn"
    dims: list[Any] = [[16, 64], [64, 32], [], [], None, None, None]
    kinds = [fp8, fp8, "float", "float"]
    x = inputs(dims, kinds, {6: "15"})
    assert count_flops("aten::_scaled_mm", x) == 2 * 16 * 64 * 32
    assert count_bytes("aten::_scaled_mm", x) == 16 * 64 + 64 * 32 + 2 * 16 * 32
    assert count_bytes("aten::_scaled_mm", inputs(dims, kinds)) is None


def test_shapes_that_do_not_fit_give_nothing() -> None:
    for dims in ([[2, 3], [4, 5]], [[2, 3]], [], [[2], []]):
        assert count_flops("aten::mm", inputs(dims)) is None
    assert count_flops("aten::bmm", inputs([[2, 3, 4], [5, 4, 6]])) is None
    assert count_flops("aten::linear", inputs([[2, 3], [7, 4]])) is None


# -- convolutions ---------------------------------------------------------------------------


def conv2d(op: str = "aten::conv2d", concrete: bool = True, **arguments: str) -> OpInputs:
    values = {"stride": "[2, 2]", "padding": "[3, 3]", "dilation": "[1, 1]", "groups": "1"}
    values |= arguments
    at = dict(enumerate(values.values(), start=3))
    return inputs([[32, 3, 224, 224], [64, 3, 7, 7], None], BF16, {2: "", **at}, concrete=concrete)


def test_resnets_first_convolution_is_236_megaflops_an_image() -> None:
    """(224 + 2 * 3 - 7) // 2 + 1 = 112: the published 118 M multiply-adds an image."""
    per_image = 2 * 64 * 112 * 112 * 3 * 7 * 7
    assert per_image == 236_027_904
    assert count_flops("aten::conv2d", conv2d()) == 32 * per_image
    assert count_bytes("aten::conv2d", conv2d()) == 2 * (
        32 * 3 * 224 * 224 + 64 * 3 * 7 * 7 + 32 * 64 * 112 * 112
    )


def test_every_backend_has_its_arguments_in_its_own_places() -> None:
    shapes: list[Any] = [[4, 6, 17, 19], [8, 3, 3, 5]]
    expected = 2 * 4 * 8 * (9 * 15) * 3 * 3 * 5  # (17+2-3)//2+1 = 9, (19+4-2*4-1)//1+1 = 15
    stride, padding, dilation = "[2, 1]", "[1, 2]", "[1, 2]"
    cudnn = inputs([*shapes], "float", {2: padding, 3: stride, 4: dilation, 5: "2"})
    assert count_flops("aten::cudnn_convolution", cudnn) == expected
    miopen = inputs([*shapes], "float", {2: "", 3: padding, 4: stride, 5: dilation, 6: "2"})
    assert count_flops("aten::miopen_convolution", miopen) == expected
    both = {2: "", 3: stride, 4: padding, 5: dilation, 6: "False", 7: "[0, 0]", 8: "2"}
    assert count_flops("aten::convolution", inputs([*shapes], "float", both)) == expected
    assert count_flops("aten::_convolution", inputs([*shapes], "float", both)) == expected


def test_a_transposed_convolution_spreads_each_input_point() -> None:
    x = inputs(
        [[2, 6, 9], [6, 4, 3]],
        "float",
        {2: "", 3: "[2]", 4: "[0]", 5: "[1]", 6: "True", 7: "[0]", 8: "1"},
    )
    assert count_flops("aten::convolution", x) == 2 * 2 * 9 * 6 * 4 * 3


def test_a_convolution_without_recorded_stride_is_not_guessed() -> None:
    assert count_flops("aten::conv2d", conv2d(concrete=False)) is None
    assert count_bytes("aten::conv2d", conv2d(concrete=False)) is None
    assert count_flops("aten::conv2d", conv2d(stride="[0, 0]")) is None
    assert count_flops("aten::conv2d", conv2d(padding="same")) is None


def backward(mask: str, concrete: bool = True) -> OpInputs:
    shapes: list[Any] = [[32, 64, 112, 112], [32, 3, 224, 224], [64, 3, 7, 7]]
    arguments = {
        3: "",
        4: "[2, 2]",
        5: "[3, 3]",
        6: "[1, 1]",
        7: "False",
        8: "[0, 0]",
        9: "1",
        10: mask,
    }
    return inputs(shapes, BF16, arguments, concrete=concrete)


def test_convolution_backward_counts_requested_gradients() -> None:
    forward = 32 * 236_027_904
    op = "aten::convolution_backward"
    assert count_flops(op, backward("[False, True, False]")) == forward  # a network's first layer
    assert count_flops(op, backward("[True, True, True]")) == 2 * forward
    assert count_flops(op, backward("[True, True]")) is None
    assert count_flops(op, backward("", concrete=False)) is None
    x, w, y = 32 * 3 * 224 * 224, 64 * 3 * 49, 32 * 64 * 112 * 112
    assert count_bytes(op, backward("[False, True, False]")) == 2 * (y + x + w)
    assert count_bytes(op, backward("[True, True, False]")) == 2 * (y + (w + x) + (x + w))


# -- attention ------------------------------------------------------------------------------

QKV = [[8, 4096, 16, 128]] * 3
FULL = 4 * 8 * 16 * 4096 * 4096 * 128  # two products of two operations a multiply-add
PAIRS = 4096 * 4097 // 2


def flash_attention_inputs(causal: str, dims: list[Any] = QKV, **more: str) -> OpInputs:
    arguments = {3: "", 4: "", 5: "4096", 6: "4096", 7: "0.", 8: causal, 9: "False"}
    arguments |= {int(at[1:]): text for at, text in more.items()}
    return inputs(dims, BF16, arguments)


def test_flash_attention_counts_two_products_half_if_causal() -> None:
    op = "aten::_flash_attention_forward"
    assert FULL == 1_099_511_627_776
    assert count_flops(op, flash_attention_inputs("False")) == FULL
    assert count_flops(op, flash_attention_inputs("True")) == 4 * 8 * 16 * PAIRS * 128
    assert count_bytes(op, flash_attention_inputs("True")) == 4 * 2 * 8 * 4096 * 16 * 128
    assert (
        count_flops(op, flash_attention_inputs("")) is None
    )  # causal or not makes a factor of two


def test_grouped_queries_and_other_key_lengths() -> None:
    dims = [[2, 10, 8, 64], [2, 30, 2, 64], [2, 30, 2, 32]]
    expected = 2 * 2 * 8 * 10 * 30 * (64 + 32)
    assert (
        count_flops("aten::_flash_attention_forward", flash_attention_inputs("False", dims))
        == expected
    )
    # Query i sees keys 0 … i: 1 + 2 + … + 10 pairs.
    assert (
        count_flops("aten::_flash_attention_forward", flash_attention_inputs("True", dims))
        == 2 * 16 * 55 * 96
    )


def test_packed_sequences_and_sliding_windows_are_not_guessed() -> None:
    packed = inputs([[100, 16, 128]] * 3 + [[5], [5]], [BF16] * 3 + ["int"] * 2, {8: "True"})
    assert count_flops("aten::_flash_attention_forward", packed) is None
    assert (
        count_flops("aten::_flash_attention_forward", flash_attention_inputs("True", a11="256"))
        is None
    )


def test_attention_backward_is_five_products() -> None:
    dims = [*[[8, 4096, 16, 128]] * 5, [8, 16, 4096]]
    kinds = [BF16] * 5 + ["float"]
    x = inputs(dims, kinds, {6: "", 7: "", 8: "4096", 9: "4096", 10: "0.", 11: "False"})
    assert count_flops("aten::_flash_attention_backward", x) == FULL / 2 * 5
    tensor = 2 * 8 * 4096 * 16 * 128
    # Read: query, key, value, output, its gradient, row sums; written: three gradients.
    assert count_bytes("aten::_flash_attention_backward", x) == 8 * tensor + 4 * 8 * 16 * 4096


def test_efficient_attention_finds_its_mask_in_both_signatures() -> None:
    new = {3: "", 4: "", 5: "", 6: "4096", 7: "4096", 8: "0.", 9: "1", 10: "True"}
    old = {3: "", 4: "", 5: "", 6: "4096", 7: "0.", 8: "1", 9: "True"}
    none = {**new, 9: "0"}
    op = "aten::_efficient_attention_forward"
    assert count_flops(op, inputs(QKV, BF16, new)) == 4 * 8 * 16 * PAIRS * 128
    assert count_flops(op, inputs(QKV, BF16, old)) == 4 * 8 * 16 * PAIRS * 128
    assert count_flops(op, inputs(QKV, BF16, none)) == FULL


def test_cudnn_attention_has_heads_before_the_sequence() -> None:
    dims = [[8, 16, 4096, 128]] * 3
    x = inputs(dims, BF16, {3: "", 4: "False", 5: "0.", 6: "True", 7: "False"})
    assert count_flops("aten::_scaled_dot_product_cudnn_attention", x) == 4 * 8 * 16 * PAIRS * 128


# -- bound by memory ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "x", "work", "size"),
    [
        # 10 x 20 fp32 read twice, written once.
        ("aten::add", inputs([[10, 20], [10, 20], None], "float", {2: "1"}), 200, 3 * 800),
        # In place and broadcast: the small one is small.
        ("aten::mul_", inputs([[10, 20], [20]]), 200, 800 + 80 + 800),
        # A comparison writes bool.
        ("aten::gt", inputs([[10, 20], None], "float", {1: "0"}), 200, 800 + 200),
        ("aten::where", inputs([[10], [10], [10]], ["bool", "float", "float"]), 10, 10 + 120),
        # bf16 + fp32 gives fp32; a bf16 number without dimensions changes nothing.
        ("aten::add", inputs([[8], [8]], [BF16, "float"]), 8, 16 + 32 + 32),
        ("aten::mul", inputs([[8], []], [BF16, "float"]), 8, 16 + 4 + 16),
        # Integers divided give float.
        ("aten::div", inputs([[8], [8]], "long int"), 8, 64 + 64 + 32),
        # With `out=`, the third tensor is the result.
        ("aten::add", inputs([[8], [8], None, [8]], "float", {2: "1"}), 8, 3 * 32),
        ("aten::fill_", inputs([[8, 8], None], BF16, {1: "0."}), 0, 128),
        ("aten::copy_", inputs([[8, 8], [8, 8], None], ["float", BF16]), 0, 256 + 128),
        ("aten::clone", inputs([[8, 8], None]), 0, 512),
        ("aten::_softmax", inputs([[4, 100], None, None], BF16, {1: "-1", 2: "False"}), 2000, 1600),
        ("aten::_softmax", inputs([[4, 100], None, None], BF16, {1: "-1", 2: "True"}), 2000, 2400),
        (
            "aten::_softmax_backward_data",
            inputs([[4, 100], [4, 100], None, None], "float", {2: "-1", 3: "6"}),
            1600,
            4800,
        ),
        ("aten::sum", inputs([[10, 20], None], "float", {1: ""}), 200, 800 + 4),
        ("aten::cumsum", inputs([[10, 20], None], "long int", {1: "0"}), 200, 1600 + 1600),
        (
            "aten::sum",
            inputs([[10, 20], None, None, None], "float", {1: "[0]", 2: "True", 3: ""}),
            200,
            800 + 80,
        ),
        (
            "aten::mean",
            inputs([[10, 20], None, None, None], "float", {1: "[-1]", 2: "False", 3: ""}),
            200,
            800 + 40,
        ),
        (
            "aten::argmax",
            inputs([[10, 20], None, None], "float", {1: "1", 2: "False"}),
            200,
            800 + 80,
        ),
        # 50 rows of a table, of 64 bf16 each, read and written, and 50 indices of 8 bytes.
        (
            "aten::embedding",
            inputs([[1000, 64], [5, 10]], [BF16, "long int"]),
            0,
            400 + 2 * 50 * 128,
        ),
        (
            "aten::embedding_dense_backward",
            inputs([[5, 10, 64], [5, 10], None], ["float", "long int"], {2: "1000"}),
            3200,
            3200 * 4 + 400 + 64_000 * 4,
        ),
        (
            "aten::index_select",
            inputs([[30, 8], None, [5]], ["float", "Scalar", "int"], {1: "0"}),
            0,
            20 + 2 * 5 * 32,
        ),
        (
            "aten::gather",
            inputs([[50], None, [7]], ["float", "Scalar", "long int"], {1: "0"}),
            0,
            56 + 2 * 28,
        ),
        (
            "aten::scatter_add_",
            inputs([[50], None, [7], [7]], ["float", "", "long int", "float"], {1: "0"}),
            7,
            56 + 28 + 2 * 28,
        ),
        (
            "aten::native_layer_norm",
            inputs([[4, 100], None, [100], [100], None], BF16, {1: "[100]"}),
            8 * 400,
            2 * (400 + 100 + 100 + 400),
        ),
        (
            "_C::fused_add_rms_norm",
            inputs([[4, 100], [4, 100], [100]], BF16),
            5 * 400,
            2 * (400 + 400 + 100 + 400 + 400),
        ),
    ],
)
def test_memory_bound_operators(op: str, x: OpInputs, work: float, size: float) -> None:
    assert (count_flops(op, x), count_bytes(op, x)) == (work, size)


@pytest.mark.parametrize(
    ("op", "x"),
    [
        ("aten::sum", inputs([[10, 20], None, None, None], concrete=False)),  # over which?
        ("aten::_softmax", inputs([[4, 100], None, None], BF16, concrete=False)),  # fp32 out?
        ("aten::cat", inputs([None, None])),
        ("aten::add", inputs([[3], [4]])),
        ("aten::index_select", inputs([[30, 8], None, [5]], ["float", "", "int"], concrete=False)),
        ("aten::unheard_of", inputs([[8, 8]])),
        ("aten::add", inputs([[8], [8]], "mystery_t")),
    ],
)
def test_unrecorded_shapes_are_not_guessed(op: str, x: OpInputs) -> None:
    assert count_bytes(op, x) is None


def test_triton_kernel_moves_its_whole_arguments_if_known() -> None:
    x = inputs([[8, 64], [64], [8, 64], None], BF16, {3: "512"})
    assert count_bytes("triton_poi_fused_add_mul_0", x) == 2 * (512 + 64 + 512)
    assert count_bytes("triton_poi_fused_embedding_add_0", x) is None
    assert count_bytes("triton_tem_fused_mm_0", x) is None


# -- against PyTorch ------------------------------------------------------------------------

SIZE = st.integers(1, 40)


def torch_formulas() -> dict[str, Any]:
    """``torch.utils.flop_counter``'s formulas by operator name."""
    pytest.importorskip("torch")
    from torch.utils import flop_counter

    return {str(op).removeprefix("aten."): f for op, f in flop_counter.flop_registry.items()}


@settings(max_examples=60, deadline=None)
@given(SIZE, SIZE, SIZE, SIZE)
def test_products_agree_with_pytorchs_flop_counter(b: int, m: int, n: int, k: int) -> None:
    torch_flops = torch_formulas()
    mm = inputs([[m, k], [k, n]])
    assert count_flops("aten::mm", mm) == torch_flops["mm"]((m, k), (k, n), out_val=None)
    bmm = inputs([[b, m, k], [b, k, n]])
    assert count_flops("aten::bmm", bmm) == torch_flops["bmm"]((b, m, k), (b, k, n), out_val=None)


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 3),
    groups=st.integers(1, 3),
    ins=st.integers(1, 4),
    outs=st.integers(1, 4),
    size=st.lists(st.integers(8, 20), min_size=1, max_size=3),
    data=st.data(),
)
def test_convolutions_agree_with_the_shapes_pytorch_makes(
    batch: int, groups: int, ins: int, outs: int, size: list[int], data: st.DataObject
) -> None:
    """The output shape comes from torch itself (on the meta device), the formula from its
    counter; gradients of grouped convolutions are left out, where that counter has no groups."""
    torch_flops = torch_formulas()
    import torch

    rank = len(size)
    pick = lambda low, high: [data.draw(st.integers(low, high)) for _ in size]  # noqa: E731
    kernel, stride, padding, dilation = pick(1, 3), pick(1, 3), pick(0, 2), pick(1, 2)
    x = torch.empty(batch, ins * groups, *size, device="meta")
    w = torch.empty(outs * groups, ins, *kernel, device="meta")
    out = torch.convolution(x, w, None, stride, padding, dilation, False, [0] * rank, groups)
    arguments = {
        2: "",
        3: str(stride),
        4: str(padding),
        5: str(dilation),
        6: "False",
        7: str([0] * rank),
        8: str(groups),
    }
    flops = count_flops(
        "aten::convolution", inputs([list(x.shape), list(w.shape)], "float", arguments)
    )
    from torch.utils.flop_counter import conv_flop_count

    assert flops == conv_flop_count(list(x.shape), list(w.shape), list(out.shape))
    if groups == 1:
        back = {
            3: "",
            4: str(stride),
            5: str(padding),
            6: str(dilation),
            7: "False",
            8: str([0] * rank),
            9: "1",
            10: "[True, True, False]",
        }
        shapes = [list(out.shape), list(x.shape), list(w.shape)]
        torch_count = torch_flops["convolution_backward"](
            out,
            x,
            w,
            None,
            stride,
            padding,
            dilation,
            False,
            [0] * rank,
            1,
            [True, True, False],
            out_val=(x, w, None),
        )
        assert (
            count_flops("aten::convolution_backward", inputs(shapes, "float", back)) == torch_count
        )


@settings(max_examples=40, deadline=None)
@given(SIZE, st.integers(1, 4), st.integers(1, 4), SIZE, SIZE, SIZE, SIZE)
def test_attention_agrees_with_pytorchs_flop_counter(
    b: int, kv: int, repeat: int, sq: int, sk: int, d: int, dv: int
) -> None:
    pytest.importorskip("torch")
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    q, k, v = (b, kv * repeat, sq, d), (b, kv, sk, d), (b, kv, sk, dv)
    go = (b, kv * repeat, sq, dv)
    dims = [list(q), list(k), list(v)]
    x = inputs(dims, BF16, {3: "0.", 4: "False", 5: "False"})
    assert count_flops("aten::_scaled_dot_product_flash_attention", x) == sdpa_flop_count(q, k, v)
    x = inputs([list(go), *dims, list(go)], BF16, {10: "0.", 11: "False"})
    op = "aten::_scaled_dot_product_flash_attention_backward"
    assert count_flops(op, x) == sdpa_backward_flop_count(go, q, k, v)


def test_argument_positions_match_pytorch_schemas() -> None:
    """The names at the positions that are read, for every operator that the build knows."""
    torch = pytest.importorskip("torch")
    from advisor.measure.device import matmuls

    def names(op: str) -> list[str]:
        schemas = torch._C._jit_get_schemas_for_operator(f"aten::{op}")
        plain = [s for s in schemas if s.overload_name in ("", "input")]
        return [argument.name for argument in plain[0].arguments] if plain else []

    checked = 0
    for op, layout in matmuls._CONVOLUTIONS.items():
        result = names(op)
        if not result:
            continue
        assert result[1] == "weight", op
        assert result[layout.stride] == "stride", op
        assert result[layout.padding] == "padding", op
        assert result[layout.dilation] == "dilation", op
        if layout.bias is not None:
            assert result[layout.bias] == "bias", op
        if not isinstance(layout.transposed, bool):
            assert result[layout.transposed] == "transposed", op
        if layout.groups is not None and layout.output_padding is not None:
            assert result[layout.groups] == "groups", op
            assert result[layout.output_padding] == "output_padding", op
        checked += 1
    for op, call in matmuls._ATTENTION.items():
        result = names(op)
        if not result:
            continue
        assert result[call.query : call.query + 3] == ["query", "key", "value"], op
        assert result[call.causal] in ("is_causal", "custom_mask_type"), op
        if call.varlen is not None:
            assert result[call.varlen] in ("cum_seq_q", "cu_seqlens_q"), op
        if call.window is not None:
            assert result[call.window] in ("window_size_left", "window_size"), op
        checked += 1
    back = names("convolution_backward")
    assert (back[7], back[10]) == ("transposed", "output_mask")
    assert checked > 25


# -- untrusted text -------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
DIMS = st.lists(st.integers(-1, 6), max_size=5) | JSON
TYPES = st.sampled_from(["float", BF16, "long int", "bool", "Scalar", ""]) | JSON
ARGUMENTS = st.sampled_from(["", "[1, 1]", "[0]", "True", "False", "0", "-1", "3", "0."]) | JSON
OPS = st.sampled_from(
    [
        "aten::mm",
        "aten::addmm",
        "aten::linear",
        "aten::convolution",
        "aten::cudnn_convolution",
        "aten::convolution_backward",
        "aten::_flash_attention_forward",
        "aten::_softmax",
        "aten::_efficient_attention_forward",
        "aten::sum",
        "aten::index_select",
        "aten::embedding",
        "aten::embedding_dense_backward",
        "aten::copy_",
        "aten::add",
        "aten::where",
        "aten::gather",
        "aten::scatter_add_",
        "aten::native_layer_norm",
        "triton_poi_fused_0",
        "_C::rms_norm",
    ]
)


@settings(max_examples=200, deadline=None)
@given(
    OPS, st.lists(DIMS, max_size=5), st.lists(TYPES, max_size=5), st.lists(ARGUMENTS, max_size=11)
)
def test_any_recorded_text_gives_a_figure_or_nothing(
    op: str, dims: list[Any], types: list[Any], concrete: list[Any]
) -> None:
    x = OpInputs(json.dumps(dims), json.dumps(types), json.dumps(dims), json.dumps(concrete))
    for figure in (count_flops(op, x), count_bytes(op, x)):
        assert figure is None or (isinstance(figure, float) and figure >= 0)


def test_damaged_and_absurd_text_gives_nothing() -> None:
    huge = 10**18
    deep = "[" * 100_000
    for dims in ("", "nonsense", deep, "{}", "[[-1, 2], [2, 3]]", f"[[{huge}, {huge}], [2, 3]]"):
        assert count_flops("aten::mm", OpInputs(dims, '["float", "float"]')) is None
    long_number = "9" * 10_000
    assert inputs([[2]], "float", {1: long_number}).argument(1) is None


# -- experts and transposed convolutions ----------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 3),
    groups=st.integers(1, 3),
    ins=st.integers(1, 4),
    outs=st.integers(1, 4),
    size=st.lists(st.integers(4, 9), min_size=1, max_size=3),
    data=st.data(),
)
def test_transposed_convolution_shapes_match_pytorch(
    batch: int, groups: int, ins: int, outs: int, size: list[int], data: st.DataObject
) -> None:
    """Output on the meta device, FLOPs by torch's counter, bytes by the sizes of its tensors."""
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import conv_flop_count

    rank = len(size)
    pick = lambda low, high: [data.draw(st.integers(low, high)) for _ in size]  # noqa: E731
    kernel, stride, padding, dilation = pick(2, 3), pick(1, 3), pick(0, 1), pick(1, 2)
    more = [min(s, d, 2) - 1 for s, d in zip(stride, dilation, strict=True)]
    x = torch.empty(batch, ins * groups, *size, device="meta")
    w = torch.empty(ins * groups, outs, *kernel, device="meta")
    out = torch.convolution(x, w, None, stride, padding, dilation, True, more, groups)
    settings = {"stride": stride, "padding": padding, "dilation": dilation}
    general = {2: "", 3: str(stride), 4: str(padding), 5: str(dilation), 6: "True", 7: str(more),
               8: str(groups)}  # fmt: skip
    transposed = {
        2: "",
        3: str(stride),
        4: str(padding),
        5: str(more),
        6: str(groups),
        7: str(dilation),
    }
    counted = conv_flop_count(list(x.shape), list(w.shape), list(out.shape), transposed=True)
    size_in_all = 4 * (x.numel() + w.numel() + out.numel())
    for op, arguments in ((f"conv_transpose{rank}d", transposed), ("convolution", general)):
        seen = inputs([list(x.shape), list(w.shape)], "float", arguments)
        assert count_flops(f"aten::{op}", seen) == counted, settings
        assert count_bytes(f"aten::{op}", seen) == size_in_all, settings


def experts(tokens: int, top: int, count: int = 8, gate: int = 2) -> OpInputs:
    """A call of vLLM's fused experts: 64 wide, 32 inside."""
    shapes = [[tokens, 64], [count, 32 * gate, 64], [count, 64, 32], [tokens, top], [tokens, top]]
    return inputs(shapes, [BF16, BF16, BF16, "float", "int"])


@pytest.mark.parametrize("op", ["vllm::outplace_fused_experts", "vllm::inplace_fused_experts"])
def test_fused_experts_count_routed_tokens_only(op: str) -> None:
    # 100 tokens to 2 experts each: 200 rows through [64 x 64] and [32 x 64]
    assert count_flops(op, experts(100, 2)) == 2 * 200 * (64 * 64 + 32 * 64) == 2_457_600
    # tokens in and out, all eight experts' weights, routing weights and numbers
    weights = 2 * 8 * (64 * 64 + 64 * 32)
    assert count_bytes(op, experts(100, 2)) == 2 * 2 * 100 * 64 + weights + 200 * 4 + 200 * 4


def test_expert_products_equal_a_walk_over_tokens() -> None:
    for tokens, top, gate in ((1, 1, 1), (7, 2, 2), (40, 3, 2)):
        work = 0
        for _token in range(tokens):
            for _expert in range(top):
                work += sum(2 for _row in range(32 * gate) for _inner in range(64))
                work += sum(2 for _row in range(64) for _inner in range(32))
        assert count_flops("vllm::outplace_fused_experts", experts(tokens, top, gate=gate)) == work


def test_expert_bytes_are_unknown_for_few_tokens() -> None:
    assert count_flops("vllm::outplace_fused_experts", experts(3, 2)) is not None
    assert count_bytes("vllm::outplace_fused_experts", experts(3, 2)) is None  # 6 rows, 8 experts


def test_experts_without_routing_or_known_shapes_have_no_flops() -> None:
    shapes = [[100, 64], [8, 64, 64], [8, 64, 32], [100, 8]]
    assert count_flops("vllm::fused_moe", inputs(shapes, BF16)) is None
    assert count_flops("mine::fused_experts", inputs([[4, 4]] * 5, BF16)) is None
    assert count_flops("aten::fused_experts", experts(100, 2)) is None


def test_grouped_products_of_two_matrices_write_one_result_a_group() -> None:
    # weight gradients of 8 experts: [64 x 1000] times [1000 x 32], split along the 1000
    x = inputs([[64, 1000], [1000, 32], [8]], [BF16, BF16, "int"])
    assert count_bytes("aten::_grouped_mm", x) == 2 * (64 * 1000 + 1000 * 32 + 8 * 64 * 32)
    assert count_bytes("aten::_grouped_mm", inputs([[64, 1000], [1000, 32]], BF16)) is None
