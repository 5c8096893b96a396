"""Factors that the kernel, memory and optimizer rules put into their edits, worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from advisor.advise.rule_loading import load_rules
from advisor.core.finding import Edit, Finding
from advisor.measure.device.shapes import OpInputs
from advisor.measure.device.traffic import count_bytes
from advisor.measure.host.operators import KERNEL_NS, attainable_roofs
from advisor.replay.window_replayer import WindowReplayer
from advisor.testing import TraceBuilder

HALF = "c10::BFloat16"
GEMM = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_nn"
POINTWISE = "void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>"


def findings(rule_id: str, b: TraceBuilder, **options: Any) -> list[Finding]:
    (rule,) = [r for r in load_rules(config={rule_id: options}) if r.id == rule_id]
    return [o for o in rule.check(b.analysis()) if isinstance(o, Finding)]


def edits(rule_id: str, b: TraceBuilder, **options: Any) -> list[Edit]:
    (finding,) = findings(rule_id, b, **options)
    return finding.edits


Work = tuple[str, list[list[int]] | None, str, str, float]


def steps(*work: Work, gpu: str = "A100", **launch: Any) -> TraceBuilder:
    """Build four steps of kernels from operator, shapes, type, kernel and µs."""
    b = TraceBuilder(gpu)
    for _ in range(4):
        with b.step():
            for op, shapes, dtype, kernel, us in work:
                with b.op(op, shapes, dtype):
                    b.launch(kernel, us, **launch)
            b.sync()
    return b


def test_tf32_takes_the_ratio_of_the_peaks_derated() -> None:
    """A100: 19.5 and 156 TFLOP/s, an eighth; 60, 86 and 25% of that ratio."""
    square = [[4096, 4096], [4096, 4096]]
    (edit,) = edits("fp32-matmul", steps(("aten::mm", square, "float", "ampere_sgemm_nn", 8000)))
    assert edit.factor == pytest.approx(1 / 8 / 0.6)
    assert edit.best_factor == pytest.approx(1 / 8 / 0.86)
    assert edit.worst_factor == pytest.approx(1 / 8 / 0.25)


def test_tf32_cannot_be_faster_than_memory() -> None:
    """64 rows times 16384 x 16384 in fp32: (64 * 16384 * 2 + 16384^2) * 4 = 1.0821e9 bytes, at
    90% of 2039 GB/s 590 µs, more than the 417 µs that the peaks would allow."""
    wide = [[64, 16384], [16384, 16384]]
    (edit,) = edits("fp32-matmul", steps(("aten::mm", wide, "float", "ampere_sgemm_nn", 2000)))
    moved = (64 * 16384 * 2 + 16384**2) * 4
    assert edit.factor == pytest.approx(moved / (0.9 * 2.039e12) / 2e-3, rel=1e-3)


def test_on_a_geforce_card_bf16_is_the_faster_format() -> None:
    """An RTX 3090 does 35.6 TFLOP/s in fp32, as many in TF32, and 71 in bf16."""
    square = [[4096, 4096], [4096, 4096]]
    b = steps(("aten::mm", square, "float", "ampere_sgemm_nn", 8000))
    b.head["deviceProperties"][0] |= {
        "name": "NVIDIA GeForce RTX 3090",
        "numSms": 82,
        "totalGlobalMem": 25_438_126_080,
        "computeMajor": 8,
        "computeMinor": 6,
        "maxThreadsPerMultiprocessor": 1536,
    }
    (finding,) = findings("fp32-matmul", b)
    assert "bfloat16" in finding.code and "set_float32_matmul_precision" not in finding.code
    assert finding.edits[0].factor == pytest.approx(35.6 / 71 / 0.6)


SLOW = GEMM.replace("_ldg8", "")


def test_padded_products_take_the_time_of_aligned_ones() -> None:
    """4097 is padded to 4160. The aligned product with 4096 takes 200 µs, so 34.9 of its GFLOPs
    take 203; the misaligned one took 1000, the family 1200."""
    aligned, unaligned = [[4096, 1024], [1024, 4096]], [[4096, 1024], [1024, 4097]]
    b = steps(("aten::mm", aligned, HALF, GEMM, 200), ("aten::mm", unaligned, HALF, SLOW, 1000))
    (edit,) = edits("misaligned-gemm", b)
    assert edit.select.family == ("gemm",)
    assert edit.factor == pytest.approx((200 + 200 * 4160 / 4096) / 1200, rel=2e-3)
    ideal = 2 * 4096 * 1024 * 4160 / attainable_roofs(b.analysis().hardware).matmul["bf16"].rate
    assert edit.best_factor == pytest.approx((200 + ideal * 1e6 + KERNEL_NS / 1e3) / 1200, rel=2e-3)


def test_misaligned_product_gains_up_to_its_attainable_rate() -> None:
    """The oddness of a width of 1613 leaves tensor cores of an H100 at 130 of 794.5 TFLOP/s
    attainable: 1312 µs. Padded to 1664, at 80% of that rate, 182 GFLOP take 286 µs and not 60%
    of 1312."""
    shapes = [[32768, 1613], [1613, 1613]]
    b = steps(("aten::mm", shapes, HALF, SLOW, 1312), gpu="H100")
    (edit,) = edits("misaligned-gemm", b)
    padded = 2 * 32768 * 1664 * 1664 / (0.8 * 794.5e12) * 1e6
    assert edit.factor == pytest.approx(padded / 1312, rel=2e-2)


def test_a_misaligned_product_at_full_speed_gains_nothing() -> None:
    """1650 µs are 255 TFLOP/s on an A100, 94% of the attainable rate."""
    b = steps(("aten::mm", [[4096, 1024], [1024, 50257]], HALF, SLOW, 1650))
    (edit,) = edits("misaligned-gemm", b)
    assert edit.factor == 1.0


def test_misaligned_products_without_rate_gain_the_usual_share() -> None:
    """Half of the matrix time is misaligned: the family as a whole gets half of the gain."""
    b = steps(
        ("aten::mm", [[4096, 1024], [1024, 4096]], HALF, GEMM, 1000),
        ("aten::mm", [[4096, 1024], [1024, 50257]], HALF, SLOW, 1000),
    )
    b.head["deviceProperties"][0]["name"] = "an unknown GPU"
    (finding,) = findings("misaligned-gemm", b)
    (edit,) = finding.edits
    assert edit.factor == pytest.approx(1 - 0.5 * (1 - 0.6))
    assert edit.worst_factor == pytest.approx(1 - 0.5 * (1 - 0.85))
    assert "60%" in finding.assumptions[0]


def test_misaligned_row_length_is_found_in_the_strides() -> None:
    """A slice of 1024 columns out of 1027: the shape is fine, the rows are not."""
    shapes, strides = [[4096, 1024], [1024, 4096]], [[1027, 1], [4096, 1]]
    b = TraceBuilder()
    for _ in range(4):
        with b.step():
            with b.op("aten::mm", shapes, HALF, strides=strides):
                b.launch(GEMM.replace("_ldg8", ""), 1000)
            b.sync()
    assert findings("misaligned-gemm", b) == []  # 1027 < 4096: could be anything's length
    strides[0] = [5121, 1]
    c = TraceBuilder()
    for _ in range(4):
        with c.step():
            with c.op("aten::mm", shapes, HALF, strides=strides):
                c.launch(GEMM.replace("_ldg8", ""), 1000)
            c.sync()
    (finding,) = findings("misaligned-gemm", c)
    assert "row length 5121" in finding.summary


def test_shapes_are_requested_to_check_alignment() -> None:
    b = steps(("aten::mm", None, HALF, GEMM.replace("_ldg8", ""), 1000))
    (rule,) = [r for r in load_rules(config={}) if r.id == "misaligned-gemm"]
    (outcome,) = rule.check(b.analysis())
    assert getattr(outcome, "record", None) == "record_shapes=True"


def test_empty_multiprocessors_count_by_half() -> None:
    """27 blocks on 108 multiprocessors leave three quarters of them empty."""
    b = steps(("aten::mm", [[256, 1024], [1024, 512]], HALF, GEMM, 1000), blocks=27)
    (edit,) = edits("small-grids", b)
    assert edit.factor == pytest.approx(1 - 0.5 * 0.75, rel=1e-4)
    assert edit.best_factor == pytest.approx(0.25, rel=1e-4)


def test_last_wave_wastes_its_missing_blocks() -> None:
    """256 threads with 128 registers each: two blocks of 32768 registers fit, 216 on the device;
    270 blocks are 1.25 waves, which take the time of 2: 37.5% is empty."""
    b = steps(("aten::mm", [[4096, 4096]] * 2, HALF, GEMM, 1000), blocks=270, registers=128)
    (edit,) = edits("wave-quantisation", b)
    assert edit.best_factor == pytest.approx(1 - 0.375, rel=1e-3)
    assert edit.factor == pytest.approx(1 - 0.7 * 0.375, rel=1e-3)
    assert edit.worst_factor == 1.0


def test_merged_chain_moves_only_inputs_and_outputs() -> None:
    """Four additions of two 64 MiB tensors move 12 tensors; merged, three links save a write and
    a read each, 6 of 12, or 70% of that at worst."""
    shape = [[32, 1024, 1024]] * 2
    b = steps(*[("aten::add", shape, HALF, POINTWISE, 100.0)] * 4)
    (edit,) = edits("unfused-elementwise", b)
    assert edit.op == "merge"
    assert edit.factor == pytest.approx(0.5)
    assert edit.worst_factor == pytest.approx(1 - 0.7 * 0.5)
    assert edit.best_factor == pytest.approx(0.5)


def test_a_chain_goes_on_over_a_mean_of_its_rows() -> None:
    """An RMS norm by hand: 2 x 64 MiB each for pow and mul, the mean's rows in between. The square
    goes to the mean without being written and read, 2 of the 5 x 64 MiB that are moved."""
    large, rows = [32, 1024, 1024], [32, 1024, 1]
    b = steps(
        ("aten::pow", [large], HALF, POINTWISE, 100.0),
        ("aten::mean", [large], HALF, POINTWISE, 50.0),
        ("aten::add", [rows], HALF, POINTWISE, 1.0),
        ("aten::rsqrt", [rows], HALF, POINTWISE, 1.0),
        ("aten::mul", [large, rows], HALF, POINTWISE, 100.0),
    )
    (edit,) = edits("unfused-elementwise", b)
    assert edit.op == "merge"
    assert edit.factor == pytest.approx(1 - 2 / 5, rel=0.01)


def test_convolution_without_a_cause_has_a_wide_gain_range() -> None:
    """59 GFLOP at 20% of the rate (1.09 ms on an A100): 0.25 of it saves a fifth, 0.7 five
    sevenths; whether the library has a faster kernel, only a search tells: the geometric mean."""
    shapes = [[64, 256, 28, 28], [256, 256, 3, 3], [], [], [], [], [], [], []]
    types = ["c10::Half", "c10::Half", "", *["ScalarList"] * 3, "Scalar", "ScalarList", "Scalar"]
    concrete = ["", "", "", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"]
    kernel = "sm80_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize64x32x64"
    flops = 2 * 64 * 28 * 28 * 256 * 256 * 9
    rate = attainable_roofs(steps(("aten::add", [[8]], HALF, POINTWISE, 1)).analysis().hardware)
    b = TraceBuilder()
    for _ in b.steps():
        with b.op("aten::convolution", shapes, types, concrete=concrete):
            b.launch(kernel, 1e6 * flops / rate.matmul["fp16"].rate / 0.2)
        b.sync()
    (finding,) = findings("slow-convolution", b)
    (edit,) = finding.edits
    least, most = 1 - 0.2 / 0.25, 1 - 0.2 / 0.7
    assert edit.factor == pytest.approx(1 - (least * most) ** 0.5, rel=0.02)
    assert edit.worst_factor == pytest.approx(1 - least, rel=0.02)
    assert "geometric mean" in finding.assumptions[0]


def test_merged_chain_is_no_faster_than_its_longest_kernel() -> None:
    shape = [[32, 1024, 1024]] * 2
    times = (100.0, 100.0, 1000.0)
    b = steps(*[("aten::add", shape, HALF, POINTWISE, us) for us in times])
    (edit,) = edits("unfused-elementwise", b)
    assert edit.best_factor == pytest.approx(1000 / 1200)  # by bytes it would be 5 of 9


def test_kernels_of_other_sizes_are_not_link_of_a_chain() -> None:
    sizes = ([[32, 1024]] * 2, [[64, 1024]] * 2)
    b = steps(*[("aten::add", sizes[n % 2], HALF, POINTWISE, 100.0) for n in range(8)])
    assert findings("unfused-elementwise", b) == []


def test_bandwidth_of_a_starved_kernel_rises_to_three_quarters() -> None:
    """Three tensors of 64 MiB in 600 µs: 0.336 TB/s of 2.039; 384 threads with 168 registers."""
    shape = [[32, 1024, 1024]] * 2
    b = steps(("aten::add", shape, HALF, POINTWISE, 600), threads=384, registers=168, blocks=4096)
    (edit,) = edits("low-occupancy", b)
    rate = 3 * 64 * 2**20 / 600e-6 / 2.039e12
    assert edit.factor == pytest.approx(rate / 0.75, rel=1e-3)


def test_reentrant_checkpointing_nests_backward_in_its_node() -> None:
    """The op holds 1 ms of recomputation and 2 ms of backward: only the first goes."""
    (rule,) = [r for r in load_rules(config={}) if r.id == "recompute-with-free-memory"]
    example = rule.examples()["use_reentrant=True"]
    result = edits(rule.id, example)
    assert WindowReplayer(example.analysis()).gain(result) == pytest.approx(1e6, rel=0.01)


def _fused_us(batch: int, queries: int, keys: int, widths: int) -> float:
    """Time on an A100 by hand, µs: products at 45% of 271.2 TFLOP/s, and 3 µs per kernel."""
    return (2 * batch * queries * keys * widths / 271.2e12 * 1e6 + 3) / 0.45


def test_other_batched_products_are_not_claimed_as_attention() -> None:
    """Attention takes the 200 µs of the softmax, and 400 of the 800 of the batched products."""
    scores = [128, 1024, 1024]
    b = steps(
        ("aten::bmm", [[128, 1024, 64], [128, 64, 1024]], HALF, GEMM, 200),
        ("aten::_softmax", [scores], HALF, "softmax_warp_forward", 200),
        ("aten::bmm", [scores, [128, 1024, 64]], HALF, GEMM, 200),
        ("aten::addmm", [[64], [64, 64], [64, 64]], HALF, GEMM, 100),
        ("aten::bmm", [[64, 512, 512]] * 2, HALF, GEMM, 400),
    )
    softmax, products = edits("unfused-attention", b)
    fused = _fused_us(128, 1024, 1024, 64 + 64)
    assert softmax.factor == pytest.approx(fused / 600, rel=1e-3)
    assert products.factor == pytest.approx((fused * 400 / 600 + 400) / 800, rel=1e-3)


@pytest.mark.parametrize(("tokens", "tile"), [(128, 128), (129, 192), (40, 64)])
def test_fused_attention_computes_whole_tiles(tokens: int, tile: int) -> None:
    """Pretty-printed shapes too, as some exporters write them; narrow heads gain nothing."""
    scores = [4096, tokens, tokens]
    b = steps(
        ("aten::bmm", [[4096, tokens, 16], [4096, 16, tokens]], HALF, GEMM, 400),
        ("aten::div", [scores], HALF, POINTWISE, 400),
        ("aten::_softmax", [scores], HALF, "softmax_warp_forward", 400),
        ("aten::bmm", [scores, [4096, tokens, 16]], HALF, GEMM, 400),
    )
    (edit,) = edits("unfused-attention", b)
    fused = _fused_us(4096, tile, tile, 64 + 64)
    assert edit.factor == pytest.approx(fused / 1600, rel=1e-3)
    assert edit.best_factor is not None and edit.worst_factor is not None
    assert edit.best_factor < edit.factor < edit.worst_factor <= 1.0


def test_in_fp32_the_fused_kernel_may_gain_nothing() -> None:
    """Fused kernels for FP32 reach the rate of FP32, 15 TFLOP/s of an A100."""
    scores = [128, 1024, 1024]
    b = steps(
        ("aten::bmm", [[128, 1024, 64], [128, 64, 1024]], "float", GEMM, 1200),
        ("aten::_softmax", [scores], "float", "softmax_warp_forward", 500),
        ("aten::bmm", [scores, [128, 1024, 64]], "float", GEMM, 1200),
    )
    (edit,) = edits("unfused-attention", b)
    assert edit.factor == pytest.approx(_fused_us(128, 1024, 1024, 128) / 2900, rel=1e-3)
    assert edit.worst_factor == pytest.approx(
        2 * 128 * 1024**2 * 128 / 15.126e12 / 2900e-6, rel=0.01
    )


def test_without_shapes_the_two_products_stay() -> None:
    b = steps(
        ("aten::bmm", None, HALF, GEMM, 200),
        ("aten::_softmax", None, HALF, "softmax_warp_forward", 600),
        ("aten::bmm", None, HALF, GEMM, 200),
    )
    (finding,) = findings("unfused-attention", b)
    assert finding.edits[0].factor == pytest.approx(0.4)
    assert finding.confidence_notes


def test_memory_share_counts_the_cards_own_capacity() -> None:
    """80 of 85.09 GB are 94%; the same 80 GB are not even measured against another card."""
    b = TraceBuilder("A100")
    for _ in range(3):
        with b.step():
            b.memory(1, 70_000_000_000, 80_000_000_000)
            with b.op("aten::mm"):
                b.launch(GEMM, 100)
            b.sync()
    (finding,) = findings("memory-near-capacity", b)
    assert finding.impact is not None and finding.impact.currency == "risk"
    assert "94%" in finding.summary


def test_bf16_pays_for_the_casts_of_its_operands() -> None:
    """A100: 19.5 and 312 TFLOP/s, a sixteenth, of which 60% count; and 3 x 4096^2 floats are moved
    once more, at the 1.6 TB/s or so that such a GPU attains."""
    square = [[4096, 4096], [4096, 4096]]
    b = steps(("aten::mm", square, "float", "ampere_sgemm_nn", 8000))
    (edit,) = edits("mixed-precision-off", b)
    memory = attainable_roofs(b.analysis().hardware).memory
    assert memory is not None
    casts = 3 * 4 * 4096**2 / memory.rate / 8e-3
    assert edit.factor == pytest.approx(1 / 16 / 0.6 + casts, rel=1e-3)
    assert edit.best_factor == pytest.approx(1 / 16 / 0.86 + 0.5 * casts, rel=1e-3)


def test_a_fused_operator_takes_its_backward_pass_with_it() -> None:
    """GELU by hand over 64 MiB, seven kernels of 100 µs forward and seven backward, by their
    numbers; kernels of other nodes stay. Fused, 2 and 3 tensors are moved."""
    chain = ["pow", "mul", "add", "mul", "tanh", "add", "mul"]
    shape = [[32, 1024, 1024]] * 2
    b = TraceBuilder("A100")
    for step in range(4):
        numbered = list(enumerate([*chain, "mm"], 8 * step))
        with b.step():
            for number, name in numbered:
                with b.op(f"aten::{name}", shape, HALF, sequence=number):
                    b.launch(POINTWISE if name != "mm" else GEMM, 100.0)
            for number, name in reversed(numbered):
                with b.op(
                    f"autograd::engine::evaluate_function: {name.title()}Backward0",
                    sequence=number,
                ):
                    kernel, op = (POINTWISE, "div") if name != "mm" else (GEMM, "mm")
                    with b.op(f"aten::{op}", shape, HALF):
                        b.launch(kernel, 100.0)
            b.sync()
    (finding,) = findings("handwritten-operator", b)
    memory = attainable_roofs(b.analysis().hardware).memory
    assert memory is not None
    ideal = 5 * 2 * 32 * 1024**2 / memory.rate * 1e9 + 2 * KERNEL_NS
    assert finding.edits[0].op == "merge"
    assert finding.edits[0].factor == pytest.approx(1.5 * ideal / 1_400_000, rel=1e-3)


def test_fp64_products_scale_by_peaks_and_other_work_by_half() -> None:
    """V100: 7.8 and 15.7 TFLOP/s."""
    square = [[2048, 2048], [2048, 2048]]
    b = steps(
        ("aten::mm", square, "double", "volta_dgemm_128x64_nn", 3000),
        ("aten::tanh", square[:1], "double", "void tanh_kernel<double>", 1000),
        ("aten::tanh", square[:1], "float", "void tanh_kernel<float>", 1000),
        gpu="V100",
    )
    products, others = edits("double-precision", b)
    assert products.factor == pytest.approx(7.8 / 15.7)
    assert products.worst_factor == pytest.approx(1.5 * 7.8 / 15.7)
    assert others.factor == 0.5 and "float" not in others.select.name


def test_loop_without_loader_uses_convolution_shapes() -> None:
    """A host that launches four steps of 50 ms in a row, before the device has run the first."""

    def run(widths: Sequence[int]) -> list[Finding]:
        b = TraceBuilder("A100")
        for width in widths:
            with b.step():
                shapes = [[32, 64, width, 56], [64, 64, 3, 3]]
                with b.op("aten::cudnn_convolution", shapes):
                    b.launch("cudnn_ampere_scudnn_128x64_relu_medium_nn_v1", 50_000)
        b.record_of_run(flags={"cudnn.benchmark": False}).steps(40, 50)
        assert b.analysis().steps.launched is not None
        return findings("cudnn-benchmark-off", b)

    (finding,) = run([56] * 5)
    assert "100% of the profiled steps" in finding.summary
    assert run([56, 48, 64, 40, 32]) == []


def test_batch_norm_in_training_reads_channels_twice() -> None:
    """64 x 256 x 56 x 56 halves, and four vectors of 256 floats: 3 passes forward (2 with given
    statistics), 5 backward."""
    large, small = [64, 256, 56, 56], [256]
    types = f'["{HALF}", "float", "float", "float", "float", "Scalar"]'
    tensor, vectors = 2 * 64 * 256 * 56 * 56, 4 * 4 * 256
    for trains, passes in ((True, 3), (False, 2)):
        inputs = OpInputs(
            str([large, small, small, small, small, []]),
            types,
            "",
            f'["", "", "", "", "", "{trains}"]',
        )
        assert count_bytes("aten::native_batch_norm", inputs) == passes * tensor + vectors
    backward = OpInputs(str([large, large, small]), f'["{HALF}", "{HALF}", "float"]')
    expected = 5 * tensor + 4 * 256
    assert count_bytes("aten::cudnn_batch_norm_backward", backward) == expected


def test_casts_around_fp32_products_exclude_norm_casts() -> None:
    """A product has one cast of an operand and one of the result, 80 µs each; a norm has two of
    its own."""
    (rule,) = [r for r in load_rules(config={}) if r.id == "mixed-precision-off"]
    example = rule.examples()["operands are cast from BF16"]
    assert isinstance(example, TraceBuilder)
    (finding,) = findings("mixed-precision-off", example)
    values = {each.label: each.value for each in finding.evidence}
    assert values["casts around them"] == 2
    assert values["time of these casts"] == pytest.approx(160_000)
    # 80% of two of the four casts with this kernel's name, 50 to 100%
    edit = finding.edits[-1]
    assert (edit.factor, edit.best_factor, edit.worst_factor) == pytest.approx((0.6, 0.5, 0.75))
