"""Each piece of device work moves by what bounds it: factors by hand from published rates."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from advisor.core.gpus import GpuSpec, find_gpu
from advisor.replay.project.device_scaling import (
    KINDS,
    ScaledDeviceWork,
    memory_rate,
    scale_device_work,
)
from advisor.testing import TraceBuilder

SGEMM = "sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x32"
BF16 = "c10::BFloat16"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"


def gpu(name: str) -> GpuSpec:
    return find_gpu(name).gpu


def scale_work(
    write: Callable[[TraceBuilder], None], target: str, on: str = "A100"
) -> ScaledDeviceWork:
    """Project the work of one step. The recorded A100 has 80 GB and SXM4, the V100 SXM2."""
    b = TraceBuilder(on)
    for _ in range(3):
        with b.step():
            write(b)
            b.sync()
    a = b.analysis()
    assert a.hardware is not None
    return scale_device_work(a, a.hardware, gpu(target))


def kind(scaled: ScaledDeviceWork) -> str:
    return KINDS[int(scaled.kind[0])]


def add_product(b: TraceBuilder) -> None:
    with b.op("aten::mm", [[8192, 8192], [8192, 8192]], BF16):
        b.launch(SGEMM, 5_000, blocks=4096)


def sum_(b: TraceBuilder) -> None:
    with b.op("aten::add", [[8192, 8192], [8192, 8192]], "float"):
        b.launch(ADD, 1_000, blocks=65536)


def test_compute_bound_product_scales_with_attainable_rate() -> None:
    """A100 SXM 271.2, H100 SXM 794.5 TFLOP/s of bf16 (mamf-finder); 1.8 µs of 5 ms stay."""
    scaled = scale_work(add_product, "h100 sxm5")
    assert kind(scaled) == "compute"
    assert scaled.factor[0] == pytest.approx((1.8 + 4998.2 * 271.2 / 794.5) / 5000, rel=1e-3)


def test_work_without_products_goes_by_the_memory() -> None:
    """STREAM on V100 reaches 750, on the A100 with 80 GB 1725 GB/s."""
    scaled = scale_work(sum_, "a100 sxm4 80gb", on="V100")
    assert kind(scaled) == "memory"
    assert scaled.factor[0] == pytest.approx((1.8 + 998.2 * 750 / 1725) / 1000, rel=1e-3)


def test_a_product_without_shapes_lies_between_both_rates() -> None:
    def add_product_without_shapes(b: TraceBuilder) -> None:
        with b.op("aten::mm"):
            b.launch(SGEMM, 5_000, blocks=4096)

    unknown, known = (
        scale_work(add_product_without_shapes, "h100 sxm5"),
        scale_work(add_product, "h100 sxm5"),
    )
    add = scale_work(sum_, "h100 sxm5")
    assert kind(unknown) == "mixture"
    assert unknown.low[0] == pytest.approx(known.factor[0], rel=0.01)
    assert unknown.high[0] == pytest.approx(add.factor[0], rel=0.01)
    assert unknown.factor[0] == pytest.approx(np.sqrt(unknown.low[0] * unknown.high[0]), rel=0.01)


def test_kernel_of_few_blocks_does_not_gain_from_more_sms() -> None:
    """54 blocks use half of an A100's 108 processors, and about a third of a B200's 148."""

    def add_small_kernel(b: TraceBuilder) -> None:
        with b.op("aten::add", [[8192, 8192], [8192, 8192]], "float"):
            b.launch(ADD, 1_000, blocks=54)

    b200 = memory_rate(gpu("b200")) / 1e9
    ratio = 1725 / b200 * (54 / 108) / (54 / 148)
    expected = (1.8 + 998.2 * ratio) / 1000
    assert scale_work(add_small_kernel, "b200").factor[0] == pytest.approx(expected, rel=1e-3)
    # as many as there are in either: its share of the memory
    full = (3.6 + 998.2 * 1725 / 3948) / 1000
    assert scale_work(sum_, "mi300x").factor[0] == pytest.approx(full, rel=1e-3)


def test_shortest_kernels_keep_their_time_on_the_same_vendor() -> None:
    def add_tiny_kernel(b: TraceBuilder) -> None:
        with b.op("aten::add", [[4], [4]], "float"):
            b.launch(ADD, 2, blocks=1)

    assert kind(scale_work(add_tiny_kernel, "h200 sxm")) == "launch"
    assert scale_work(add_tiny_kernel, "h200 sxm").factor[0] == pytest.approx(1.0)
    assert scale_work(add_tiny_kernel, "mi300x").factor[0] == pytest.approx((2 + 1.8) / 2)


@pytest.mark.parametrize(("pinned", "factor"), [(True, 0.5), (False, 1.0)])
def test_pinned_copies_scale_with_pcie_pageable_with_the_host(pinned: bool, factor: float) -> None:
    """PCIe 4 x16 carries 31.5 GB/s, PCIe 5 twice that."""
    scaled = scale_work(lambda b: b.copy("HtoD", 1 << 28, pinned=pinned), "h100 sxm5")
    assert kind(scaled) == "copy"
    assert scaled.factor[0] == pytest.approx(factor)
    assert (scaled.low[0], scaled.high[0]) == (0.5, 1.0)


def test_a_grace_hopper_copies_by_its_chip_to_chip_link() -> None:
    """NVLink-C2C: 450 GB/s each way, against 31.5."""
    scaled = scale_work(lambda b: b.copy("HtoD", 1 << 28), "gh200 96gb")
    assert scaled.factor[0] == pytest.approx(31.5 / 450)


def test_collective_scales_by_links_and_its_waits_by_the_rank() -> None:
    """An all-reduce of 300 MB among 8 moves 525 MB through each link: 1.75 ms of 3.5 at NVLink 3's
    300 GB/s. Half of it goes by 300 / 450, half as the product beside it."""

    def step(b: TraceBuilder) -> None:
        add_product(b)
        b.collective("allreduce", 300_000_000, 3_500, group_size=8, wait=True)

    scaled, product_only = scale_work(step, "h100 sxm5"), scale_work(add_product, "h100 sxm5")
    assert KINDS[int(scaled.kind[1])] == "link"
    expected = 0.5 * 300 / 450 + 0.5 * product_only.factor[0]
    assert scaled.factor[1] == pytest.approx(expected, rel=1e-3)


def test_group_larger_than_a_machine_keeps_its_network() -> None:
    """Among 16, 562.5 MB and 1.875 ms of 3.5; these stay."""

    def step(b: TraceBuilder) -> None:
        add_product(b)
        b.collective("allreduce", 300_000_000, 3_500, group_size=16, wait=True)

    scaled, product_only = scale_work(step, "h100 sxm5"), scale_work(add_product, "h100 sxm5")
    share = 1.875 / 3.5
    assert scaled.factor[1] == pytest.approx(share + (1 - share) * product_only.factor[0], rel=1e-3)


def test_missing_gpu_formats_are_replaced_or_reported() -> None:
    def add_fp8_product(b: TraceBuilder) -> None:
        with b.op("aten::_scaled_mm", [[8192, 8192], [8192, 8192]], "c10::Float8_e4m3fn"):
            b.launch("sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n", 1_000, blocks=4096)

    assert scale_work(add_fp8_product, "a100 sxm4 80gb", on="H100").missing == ("fp8",)
    assert scale_work(add_fp8_product, "h200 sxm", on="H100").missing == ()
    assert scale_work(add_product, "v100 sxm2 16gb").instead == (("bf16", "fp32"),)


def test_the_same_gpu_changes_nothing() -> None:
    def add_all_work(b: TraceBuilder) -> None:
        add_product(b)
        sum_(b)
        b.copy("HtoD", 1 << 20)
        b.launch("my_own_kernel", 50, blocks=3)
        b.collective("allreduce", 1 << 20, 100, wait=True)

    scaled = scale_work(add_all_work, "a100 sxm4 80gb")
    assert np.allclose(scaled.factor, 1.0)
    assert np.allclose(scaled.low, 1.0) and np.allclose(scaled.high, 1.0)
