"""Operators by shape against what the device attains: figures by hand, and a brute-force twin."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from advisor.core import gpus
from advisor.core.gpus import lookup
from advisor.measure import Analysis
from advisor.measure.host.operators import KERNEL_NS, operator_mask
from advisor.read import open_run
from advisor.testing import TraceBuilder

BF16 = "c10::BFloat16"
GEMM = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_nn"
ADD = "void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add>"
MATMUL, MEMORY = 271.2e12, 1725e9
"""Measured of an A100 SXM4 80GB, which the builder's GPU is."""


def operator_row(
    op: str, shapes: list[list[int]], dtype: str, kernel: str, us: float, gpu: str | None = "A100"
) -> dict[str, Any]:
    """The row of an operator that is called three times."""
    b = TraceBuilder(gpu)
    for _ in range(3):
        with b.step():
            with b.op(op, shapes, dtype):
                b.launch(kernel, us)
            b.sync()
    (row,) = b.analysis().rooflines.iter_rows(named=True)
    return row


def test_large_product_is_compared_with_the_measured_rate() -> None:
    row = operator_row("aten::mm", [[8192, 4096], [4096, 8192]], BF16, GEMM, 4000)
    work = 2 * 8192 * 8192 * 4096
    assert (row["calls"], row["kernels"], row["dur"]) == (3, 3, 12_000_000)
    assert row["flops"] == 3 * work
    assert row["moved"] == 3 * 2 * (8192 * 4096 * 2 + 8192 * 8192)
    assert row["flops_per_s"] == pytest.approx(work / 4e-3)
    assert row["attainable_flops_per_s"] == pytest.approx(MATMUL)
    assert row["bound"] == "compute"
    could = work / MATMUL * 1e9 + KERNEL_NS
    assert row["efficiency"] == pytest.approx(could / 4e6)
    assert row["saved"] == pytest.approx(3 * (4e6 - could))


def test_a_sum_of_two_tensors_is_compared_with_the_memory_rate() -> None:
    row = operator_row("aten::add", [[8192, 8192]] * 2, BF16, ADD, 500)
    size = 3 * 2 * 8192 * 8192
    assert row["bound"] == "memory"
    assert row["attainable_flops_per_s"] is None
    assert row["bytes_per_s"] == pytest.approx(size / 500e-6)
    assert row["efficiency"] == pytest.approx((size / MEMORY * 1e9 + KERNEL_NS) / 500e3)


def test_a_thin_product_is_bound_by_reading_its_weights() -> None:
    row = operator_row("aten::mm", [[1, 8192], [8192, 8192]], BF16, GEMM, 100)
    assert row["bound"] == "memory"
    size = 2 * (8192 + 8192 * 8192 + 8192)
    assert row["efficiency"] == pytest.approx((size / MEMORY * 1e9 + KERNEL_NS) / 100e3)


def test_kernels_shorter_than_a_launch_are_launch_bound() -> None:
    small = operator_row("aten::add", [[64, 64]] * 2, BF16, ADD, 9)
    assert (small["bound"], small["efficiency"], small["saved"]) == ("launch", None, None)


def test_a_millisecond_for_as_little_work_is_not_a_launch() -> None:
    slow = operator_row("aten::add", [[64, 64]] * 2, BF16, ADD, 1000)
    assert slow["bound"] == "memory"
    assert slow["efficiency"] < 0.01


@pytest.mark.parametrize(
    ("gpu", "shapes"), [(None, [[8192, 8192]] * 2), ("A100", None)], ids=["device", "shapes"]
)
def test_operators_of_unknown_work_are_not_judged(gpu: str | None, shapes: Any) -> None:
    row = operator_row("aten::add", shapes, BF16, ADD, 500, gpu)
    assert (row["bound"], row["efficiency"], row["saved"]) == ("unknown", None, None)


def test_shapes_are_apart_and_helpers_count_to_their_operator() -> None:
    b = TraceBuilder()
    for n in (1024, 2048, 1024):
        with b.op("aten::mm", [[n, n], [n, n]], BF16):
            b.launch(GEMM, n / 8)
            b.launch("void cublasLt::splitKreduce_kernel<32, 16>", 10)
    b.collective("allreduce", 1 << 20, 700)
    a = b.analysis()
    rows = {row["flops"]: row for row in a.rooflines.iter_rows(named=True)}
    assert len(rows) == 2  # the collective is nobody's operator
    small = rows[2 * 2 * 1024**3]
    assert (small["calls"], small["kernels"], small["dur"]) == (2, 4, 2 * (128 + 10) * 1000)
    assert small["kernel"] == GEMM
    assert sum(row["share"] for row in rows.values()) == pytest.approx(1.0)
    chosen = operator_mask(a, a.rooflines.filter(a.rooflines["flops"] == small["flops"]))
    assert a.trace.gpu["dur"].to_numpy()[chosen].sum() == small["dur"]


def test_experts_are_compared_with_products_of_weight_dtype() -> None:
    b = TraceBuilder()
    shapes = [[4096, 1024], [8, 2048, 1024], [8, 1024, 1024], [4096, 2], [4096, 2]]
    with b.op("vllm::outplace_fused_experts", shapes, [BF16, BF16, BF16, "float", "int"]):
        b.launch("fused_moe_kernel", 600)
        b.launch("void vllm::act_and_mul_kernel<c10::BFloat16>", 100)
        b.launch("fused_moe_kernel", 300)
    (row,) = b.analysis().rooflines.iter_rows(named=True)
    work = 2 * 4096 * 2 * (2048 * 1024 + 1024 * 1024)
    assert (row["family"], row["dtype"], row["bound"]) == ("gemm", "bf16", "compute")
    assert row["flops"] == work
    assert row["efficiency"] == pytest.approx((work / MATMUL * 1e9 + KERNEL_NS) / 1e6)


def test_unmeasured_rate_is_raised_to_the_highest_recorded_one() -> None:
    a100 = lookup("NVIDIA A100-SXM4-80GB")
    assert a100 is not None
    estimated = gpus.attainable_matmul(a100, "fp32")
    assert estimated is not None and estimated.source is None
    assert estimated.rate < 19e12
    # 2 x 8192 x 8192 x 8192 in 57.9 ms: 19 TFLOP/s
    row = operator_row("aten::mm", [[8192, 8192]] * 2, "float", "ampere_sgemm_128x128_nn", 57_900)
    assert row["attainable_flops_per_s"] == pytest.approx(19e12, rel=0.01)
    fast = operator_row("aten::mm", [[8192, 8192]] * 2, "float", "ampere_sgemm_128x128_nn", 10_000)
    assert fast["attainable_flops_per_s"] == 19.5e12  # the peak: FLOPs follow from shapes


def test_attainable_rate_is_measured_or_scaled_from_the_peak() -> None:
    h100 = lookup("NVIDIA H100 80GB HBM3")
    assert h100 is not None
    bf16, memory = gpus.attainable_matmul(h100, "bf16"), gpus.attainable_bandwidth(h100)
    assert bf16 is not None and bf16.rate == 794.5e12 and bf16.source is not None
    assert memory is not None and memory.source is None
    assert 0.68 * 3350e9 < memory.rate < 0.89 * 3350e9  # of a T4, and of an A100
    assert gpus.attainable_matmul(h100, "long int") is None


@pytest.mark.parametrize("name", ["h100_qwen_inference", "mi300_timesformer_inference"])
def test_operator_sums_equal_a_direct_loop_over_kernels(
    name: str, shared_trace: Callable[[str], str]
) -> None:
    (trace,) = open_run([shared_trace(name)]).traces.values()
    a = Analysis(trace)
    sums: dict[tuple[Any, Any], list[float]] = defaultdict(lambda: [0, 0, 0.0, 0.0])
    calls = defaultdict(set)
    kernels = a.kernels
    for at, gpu in enumerate(trace.gpu.iter_rows(named=True)):
        row = kernels["op_row"][at]
        if gpu["kind"] != "kernel" or not a.in_window[at] or row is None:
            continue
        key = (kernels["op_name"][at], trace.cpu["inputs"][row])
        inside = sum(
            max(0, min(gpu["ts"] + gpu["dur"], end) - max(gpu["ts"], start))
            for start, end in zip(a.spans.start.tolist(), a.spans.end.tolist(), strict=True)
        )
        sums[key][0] += 1
        sums[key][1] += inside
        sums[key][2] += (kernels["flops"][at] or 0.0) * inside / max(gpu["dur"], 1)
        sums[key][3] += (kernels["moved"][at] or 0.0) * inside / max(gpu["dur"], 1)
        calls[key].add(row)
    table = a.rooflines.filter(a.rooflines["op"].is_not_null())
    assert table.height == len(sums)
    for row in table.iter_rows(named=True):
        count, dur, flops, moved = sums[row["op"], row["inputs"]]
        assert (row["kernels"], row["dur"]) == (count, dur)
        assert row["calls"] == len(calls[row["op"], row["inputs"]])
        assert (row["flops"] or 0.0) == pytest.approx(flops)
        assert (row["moved"] or 0.0) == pytest.approx(moved)


def test_products_of_a_real_trace_by_hand(shared_trace: Callable[[str], str]) -> None:
    """[8944 x 1024] x [1024 x 2816] in bf16 on an H100: 48 times, 4,015.5 us in all."""
    (trace,) = open_run([shared_trace("h100_qwen_inference")]).traces.values()
    row = Analysis(trace).rooflines.row(0, named=True)
    work, size = 2 * 8944 * 1024 * 2816, 2 * (8944 * 1024 + 1024 * 2816 + 8944 * 2816)
    assert (row["op"], row["calls"], row["dtype"]) == ("aten::mm", 48, "bf16")
    assert row["flops"] == pytest.approx(48 * work)
    assert row["moved"] == pytest.approx(48 * size)
    assert row["flops_per_s"] == pytest.approx(616.6e12, rel=0.001)
    assert row["efficiency"] == pytest.approx(0.81, abs=0.005)
