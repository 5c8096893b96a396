"""Narrower number formats: by hand on small traces, on public ones, and on published tables."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from advisor import AdvisorError, Analysis
from advisor.core.gpus import find_gpu
from advisor.measure.host.operators import KERNEL_NS
from advisor.read import read_trace
from advisor.replay.project.device_scaling import (
    FORMATS,
    Gemm,
    estimate_product,
    matmul_rate,
    memory_rate,
    missing_unit,
)
from advisor.replay.project.precision import project_precision
from advisor.testing import TraceBuilder
from benchmarks.bench_precision import cases

H100 = find_gpu("h100 sxm5").gpu
LARGE = (8192, 8192, 8192)


def model(
    gpu: str, m: int, n: int, k: int, us: float, *, count: int = 4, name: str = "aten::mm"
) -> Analysis:
    t = TraceBuilder(gpu)
    for _ in range(4):
        with t.step():
            for number in range(count):
                with t.python(f"nn.Module: Linear_{number}"):
                    shapes, types = [[m, k], [k, n]], "c10::BFloat16"
                    t.run(name, "nvjet_tst_128x256_64x4_bf16_gemm", us, shapes, types)
            t.sync()
    return t.analysis()


def test_a_product_bound_by_arithmetic_by_hand() -> None:
    """8192 cubed in 1.9 ms: the kernel beyond its start and end by the ratio of the attainable
    rates, and one kernel that reads two bytes and writes one for each of 8192 x 8192 inputs."""
    product = estimate_product(Gemm(*LARGE, "bf16", 2, "inference"), "fp8", H100, 1.9e6)
    assert product is not None
    rates = [matmul_rate(H100, dtype) or 0.0 for dtype in ("bf16", "fp8")]
    ratio = rates[0] / rates[1] * FORMATS["fp8"].compute[1]
    assert product.kernel[1] == pytest.approx(KERNEL_NS + (1.9e6 - KERNEL_NS) * ratio)
    assert product.quantize[1] == pytest.approx(3 * 8192 * 8192 / memory_rate(H100) * 1e9)
    assert product.quantize[0] == 0.0
    assert product.total[0] < product.total[1] < product.total[2]


def test_weights_of_four_bits_read_a_quarter_of_the_bytes() -> None:
    """The batch is one row: bytes of weights are all there is."""
    gemm = Gemm(1, 4096, 4096, "bf16", 2, "inference")
    product = estimate_product(gemm, "int4-weights", H100, 20_000)
    assert product is not None
    share = (0.5 + 4 / 128) / 2
    beyond = (product.kernel[0] - KERNEL_NS) / (20_000 - KERNEL_NS)
    assert beyond == pytest.approx(share, rel=0.01)
    assert product.quantize == (0.0, 0.0, 0.0)


def test_quantized_tensors_match_the_torchao_count() -> None:
    """Input 6 bytes an element, gradient 6, weight 5 forward and 3 backward: two bytes to find the
    maximum, two to read and one for each layout that is written."""
    m, n, k = 16384, 8192, 8192
    forward = estimate_product(Gemm(m, n, k, "bf16", 2, "forward"), "fp8", H100, 5e6)
    gradient = estimate_product(Gemm(m, k, n, "bf16", 2, "input gradient"), "fp8", H100, 5e6)
    weight = estimate_product(Gemm(n, k, m, "bf16", 2, "weight gradient"), "fp8", H100, 5e6)
    assert forward is not None and gradient is not None and weight is not None
    bandwidth = memory_rate(H100) / 1e9
    assert forward.quantize[1] == pytest.approx((6 * m * k + 5 * k * n) / bandwidth)
    assert gradient.quantize[1] == pytest.approx((6 * m * n + 3 * k * n) / bandwidth)
    assert weight.quantize == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("name", "gpu", "training", "why"),
    [
        ("fp8", "a100 sxm4 80gb", False, "no unit"),
        ("mxfp8", "h100 sxm5", False, "no unit"),
        ("nvfp4", "mi355x", False, "no unit"),
        ("nvfp4", "gb300", False, "no source"),
        ("2:4", "mi300x", False, "no unit"),
        ("int8", "h100 sxm5", True, "inference"),
        ("int8", "b300", False, "no source"),
        ("fp8", "h100 sxm5", True, ""),
        ("fp8", "mi300x", False, ""),
        ("nvfp4", "b200", True, ""),
        ("int8", "a100 sxm4 80gb", False, ""),
    ],
)
def test_formats_without_a_unit_or_a_source_are_not_projected(
    name: str, gpu: str, training: bool, why: str
) -> None:
    result = missing_unit(name, find_gpu(gpu).gpu, training=training)
    assert (why in result) if why else not result


def test_large_layers_are_converted_and_their_memory_is_halved() -> None:
    result = project_precision(model("H100", *LARGE, 1900.0), "fp8")
    (layer,) = result.layers
    assert layer.convert and layer.calls == 4 and layer.where == "Linear_0–3"
    assert result.step_ns < 0.75 * result.measured_step_ns
    assert result.low_ns <= result.step_ns <= result.high_ns
    assert result.freed_bytes == 4 * 8192 * 8192
    assert result.weight_bytes == 4 * 2 * 8192 * 8192
    saved = (layer.ns - layer.after_ns) / 1e6
    assert result.gain_ns / 1e6 == pytest.approx(saved, rel=0.1)


def test_small_layers_are_not_converted() -> None:
    result = project_precision(model("H100", 128, 512, 512, 6.0), "fp8")
    assert [layer.convert for layer in result.layers] == [False]
    assert result.step_ns == result.measured_step_ns and result.freed_bytes == 0
    assert result.all_step_ns > result.measured_step_ns
    assert any("1297" in note for note in result.notes)


def training(m: int, n: int, k: int, us: float) -> Analysis:
    """Steps of one layer: its product forward and the two of its gradients."""
    t = TraceBuilder("H100")
    products = ([[m, k], [k, n]], [[m, n], [n, k]], [[n, m], [m, k]])
    for step in range(4):
        with t.step():
            for number, shapes in enumerate(products):
                name = "autograd::engine::evaluate_function: MmBackward0" if number else "aten::f"
                around = t.op(name, sequence=step if number else None)
                with around, t.op("aten::mm", shapes, "c10::BFloat16", sequence=step):
                    t.launch("nvjet_tst_128x256_64x4_bf16_gemm", us)
            t.sync()
    return t.analysis()


def test_three_products_of_a_layer_convert_together() -> None:
    for m, n, k, us, wanted in ((16384, 8192, 4096, 1600, True), (1024, 256, 512, 6, False)):
        result = project_precision(training(m, n, k, us), "fp8")
        assert result.training and result.freed_bytes is None
        roles = {layer.role for layer in result.layers}
        assert roles == {"forward", "input gradient", "weight gradient"}
        assert {layer.convert for layer in result.layers} == {wanted}
    assert "convert_to_float8_training" in result.snippet


def test_dimensions_that_no_narrow_kernel_takes_are_left() -> None:
    (layer,) = project_precision(model("H100", 8192, 30522, 512, 900.0), "fp8").layers
    assert not layer.convert and "multiple of 16" in layer.why


def test_activation_and_shapeless_products_are_unchanged() -> None:
    t = TraceBuilder("H100")
    with t.step():
        t.run("aten::bmm", "nvjet_bmm_gemm", 900, [[8, 512, 64], [8, 64, 512]], "c10::BFloat16")
        t.run("aten::mm", "nvjet_gemm", 900)
    result = project_precision(t.analysis(), "fp8")
    assert "record_shapes" in result.refused and not result.layers
    assert result.unknown_ns == 900_000


def test_an_unknown_format_and_an_unknown_gpu_are_errors() -> None:
    with pytest.raises(AdvisorError, match="fp9"):
        project_precision(model("H100", *LARGE, 1900.0), "fp9")


def test_training_on_an_a100_has_no_fp8(shared_trace: Callable[[str], str]) -> None:
    result = project_precision(Analysis(read_trace(shared_trace("a100_train_6steps"))), "fp8")
    assert "no unit for FP8" in result.refused and result.step_ns == result.measured_step_ns


def test_a_server_s_step_gets_the_server_s_option(shared_trace: Callable[[str], str]) -> None:
    result = project_precision(Analysis(read_trace(shared_trace("b200_eager"))), "fp8")
    assert "vllm serve" in result.snippet
    assert result.narrow_ns > result.layers[0].ns  # its experts are narrow already


def test_most_published_speed_ups_are_in_the_range() -> None:
    result = cases()
    assert sum(case.inside for case in result) >= 0.8 * len(result)
    assert len({case.table["format"] for case in result}) >= 6


def test_published_slowdowns_are_never_estimated_as_sure_gains() -> None:
    """The low end of the estimate says slower where a table does, but for the kernels of grouped
    products and the sparse ones of another generation (docs/accuracy.md)."""
    wrong = [case for case in cases() if case.measured < 1 and case.worst > 1]
    assert {case.table["format"] for case in wrong} <= {"mxfp8"}
