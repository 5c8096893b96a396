"""A step on another GPU: figures by hand, honest ranges, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from operator import ge
from pathlib import Path

import pytest

from advisor.core.errors import AdvisorError
from advisor.core.gpus import GpuSpec, find_gpu, is_at_least_as_fast, known_gpus
from advisor.core.prices import Prices
from advisor.measure import Analysis
from advisor.read import open_run
from advisor.replay.project.device_scaling import (
    host_rate,
    matmul_rate,
    peer_rate,
    scale_device_work,
)
from advisor.replay.project.project import Projector, choose_gpus, cost_of_steps, hourly_prices
from advisor.testing import TraceBuilder

SGEMM = "sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x32"
BF16 = "c10::BFloat16"
CORPUS = Path(__file__).parents[2] / "corpus"
MIB = 1 << 20


def add_product(b: TraceBuilder, us: float = 20_000) -> None:
    with b.op("aten::mm", [[16384, 16384], [16384, 8192]], BF16):
        b.launch(SGEMM, us, blocks=4096)


def trace(
    write: Callable[[TraceBuilder], None], gpu: str | None = "A100", *, host: float = 0
) -> Analysis:
    b = TraceBuilder(gpu)
    for _ in range(5):
        with b.step():
            b.host(host)
            write(b)
            b.sync()
    return b.analysis()


def test_step_of_one_product_scales_like_products() -> None:
    """20 ms at 271.2 TFLOP/s are 6.83 ms at 794.5; beside it there are some 30 µs of host."""
    projector = Projector(trace(add_product)).on(find_gpu("h100 sxm5").gpu)
    assert projector.step_ns == pytest.approx(20e6 * 271.2 / 794.5, rel=0.01)
    assert projector.low_ns < projector.step_ns < projector.high_ns
    assert projector.speedup == pytest.approx(794.5 / 271.2, rel=0.01)
    assert [part.kind for part in projector.parts] == ["compute"]


def test_host_bound_step_keeps_its_time_and_is_reported() -> None:
    """10 ms of host and 5 ms of device hidden under the next step's: no GPU makes that faster."""

    def step(b: TraceBuilder) -> None:
        add_product(b, 1_000)
        b.host(10_000)

    projector = Projector(trace(step), same_host=True)
    for name in ("h100 sxm5", "b200"):
        projection = projector.on(find_gpu(name).gpu)
        assert projection.step_ns == pytest.approx(projection.measured_ns, rel=0.02)
        assert projection.high_ns == pytest.approx(projection.measured_ns, rel=0.1)
        assert any("the host limits the step" in note for note in projection.notes)
    other_host = Projector(trace(step)).on(find_gpu("h100 sxm5").gpu)
    assert (
        other_host.low_ns < 0.7 * other_host.step_ns
        and other_host.high_ns > 1.4 * other_host.step_ns
    )


def test_loader_bound_step_scales_with_the_other_machine() -> None:
    def step(b: TraceBuilder) -> None:
        b.loader_wait(20_000)
        add_product(b, 1_000)

    gpu = find_gpu("h100 sxm5").gpu
    on_same_host = Projector(trace(step), same_host=True).on(gpu)
    on_other_host = Projector(trace(step)).on(gpu)
    assert on_same_host.step_ns == pytest.approx(on_same_host.measured_ns, rel=0.05)
    assert on_same_host.high_ns == pytest.approx(on_same_host.measured_ns, rel=0.1)
    assert (
        on_other_host.low_ns < 0.7 * on_other_host.step_ns
        and on_other_host.high_ns > 1.4 * on_other_host.step_ns
    )


def test_recorded_gpu_is_projected_to_itself() -> None:
    projector = Projector(trace(add_product, host=500)).on(find_gpu("a100 sxm4 80gb").gpu)
    assert projector.step_ns == pytest.approx(projector.measured_ns, rel=1e-6)
    assert projector.high_ns - projector.low_ns < 0.02 * projector.step_ns


def test_steps_without_replay_keep_idle_time_and_are_reported() -> None:
    """The device waits 30 of 35 ms for nothing that was recorded, and works 5: those become 1.7."""

    def step(b: TraceBuilder) -> None:
        with b.op("aten::mm", [[16384, 16384], [16384, 8192]], BF16):
            b.launch(SGEMM, 5_000, blocks=4096, after=b.now + 30_000)

    projector = Projector(trace(step), same_host=True)
    projection = projector.on(find_gpu("h100 sxm5").gpu)
    assert not projector.replayed
    assert projection.measured_ns == pytest.approx(35e6, rel=0.01)
    assert projection.step_ns == pytest.approx(30e6 + 5e6 * 271.2 / 794.5, rel=0.01)
    assert projection.low_ns < projection.step_ns < projection.high_ns < projection.measured_ns
    assert any("idle time kept, without a replay" in note for note in projection.notes)


def test_there_and_back_is_where_it_began() -> None:
    projected = Projector(trace(add_product)).on(find_gpu("h100 sxm5").gpu)
    us = projected.step_ns / 1e3
    back = Projector(trace(lambda b: add_product(b, us), "H100")).on(find_gpu("a100 sxm4 80gb").gpu)
    assert back.step_ns == pytest.approx(projected.measured_ns, rel=0.01)


def test_another_vendor_has_a_wider_range_and_is_reported() -> None:
    projector = Projector(trace(add_product), same_host=True)
    near, far = projector.on(find_gpu("h100 sxm5").gpu), projector.on(find_gpu("mi300x").gpu)
    assert far.high_ns / far.step_ns >= near.high_ns / near.step_ns
    assert any("another vendor" in note for note in far.notes)
    assert not any("another vendor" in note for note in near.notes)
    # 668.4 TFLOP/s were measured on an MI300X; a launch takes AMD 4.9 µs longer to start
    assert far.step_ns == pytest.approx(20e6 * 271.2 / 668.4, rel=0.01)


@pytest.mark.parametrize(
    ("allocated", "reserved", "on", "verdict"),
    [
        (10_000, 12_000, "l4", "fits"),
        (18_000, 21_000, "l4", "fits"),
        (20_000, 23_500, "l4", "tight"),
        (22_500, 23_500, "l4", "too small"),
        (40_000, 60_000, "l4", "too small"),
        (40_000, 60_000, "h100 sxm5", "fits"),
    ],
)
def test_memory_is_compared_with_what_a_driver_hands_out(
    allocated: int, reserved: int, on: str, verdict: str
) -> None:
    """24 GiB as sold are 22,610 MiB handed out at least, 600 of which the driver takes itself."""

    def step(b: TraceBuilder) -> None:
        b.memory(MIB, allocated * MIB, reserved * MIB)
        add_product(b)

    projector = Projector(trace(step)).on(find_gpu(on).gpu)
    assert (projector.fit.verdict, projector.fit.allocated) == (verdict, allocated * MIB)


def test_unrecorded_memory_is_unmeasured() -> None:
    projector = Projector(trace(add_product)).on(find_gpu("l4").gpu)
    assert projector.fit.verdict == "not measured"
    assert (projector.fit.allocated, projector.fit.reserved) == (None, None)


def test_a_recorded_run_knows_its_peaks_without_events() -> None:
    """The recorder samples the allocator: 30 GiB at most, of 31 held; zeros are no measurement."""
    b = TraceBuilder()
    record = b.record_of_run()
    for _ in range(5):
        with b.step():
            add_product(b)
            b.sync()
    record.step(20, fields={"peak": 0, "reserved": 0})
    record.steps(5, 20, fields={"peak": 30 << 30, "reserved": 31 << 30})
    projector = Projector(b.analysis())
    assert projector.on(find_gpu("l4").gpu).fit.verdict == "too small"
    fitting = projector.on(find_gpu("h100 sxm5").gpu).fit
    assert (fitting.verdict, fitting.allocated, fitting.reserved) == ("fits", 30 << 30, 31 << 30)


def add_host_time(b: TraceBuilder) -> None:
    b.host(1_000)


def add_unknown_kernel(b: TraceBuilder) -> None:
    b.launch("zzz_my_own", 1_000)


@pytest.mark.parametrize(
    ("write", "gpu", "message"),
    [
        (add_product, None, "its GPU is not recorded"),
        (add_host_time, "A100", "no device work"),
        (add_unknown_kernel, "A100", "100% of the kernel time is in kernels of no known kind"),
    ],
)
def test_an_impossible_projection_is_refused(
    write: Callable[[TraceBuilder], None], gpu: str | None, message: str
) -> None:
    with pytest.raises(AdvisorError, match=message):
        Projector(trace(write, gpu))


def test_a_gpu_without_the_format_is_refused_for_itself_alone() -> None:
    def add_fp8_product(b: TraceBuilder) -> None:
        with b.op("aten::_scaled_mm", [[8192, 8192], [8192, 8192]], "c10::Float8_e4m3fn"):
            b.launch("sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n", 1_000, blocks=4096)

    projector = Projector(trace(add_fp8_product, "H100"))
    gpus = choose_gpus(
        projector, [(find_gpu("a100 pcie 80gb").gpu, 0.1), (find_gpu("h200 sxm").gpu, 3.0)]
    )
    assert [c.is_possible for c in gpus] == [True, False]
    assert gpus[0].projection.gpu == "NVIDIA H200 SXM"
    assert "fp8" in gpus[1].projection.refused and gpus[1].cost is None


def test_money_is_price_times_time() -> None:
    """A million steps of 18 ms are 5 hours."""
    assert cost_of_steps(2.0, 18e6) == pytest.approx(10.0)
    assert cost_of_steps(None, 18e6) is None


def test_cheapest_gpu_comes_before_the_fastest() -> None:
    """An H100 is 2.93 times an A100 in products, by hand; at 5 times the price it costs more."""
    prices = hourly_prices(Prices({"a100 sxm4 80gb": 1.0, "h100 sxm5": 5.0}, "USD", "here"))
    gpus = [(find_gpu(name).gpu, price) for name, price in prices.items()]
    result = choose_gpus(Projector(trace(add_product)), gpus)
    assert [c.projection.gpu for c in result] == [
        "NVIDIA A100 SXM4 80GB",
        "NVIDIA H100 SXM5 80GB",
    ]
    assert result[0].cost is not None and result[1].cost is not None
    assert result[1].cost / result[0].cost == pytest.approx(5 * 271.2 / 794.5, rel=0.01)


def test_price_applies_to_gpus_with_all_its_words() -> None:
    table = {"h100": 2.0, "h100 nvl": 3.0, "NVIDIA A100-PCIE-40GB": 1.0}
    assert hourly_prices(Prices(table, "EUR", "here")) == {
        "NVIDIA H100 SXM5 80GB": 2.0,
        "NVIDIA H100 PCIe": 2.0,
        "NVIDIA H100 NVL": 3.0,
        "NVIDIA A100 PCIe 40GB": 1.0,
    }
    with pytest.raises(AdvisorError, match="here: none of its names"):
        hourly_prices(Prices({"voodoo": 1.0}, "EUR", "here"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("h200", "NVIDIA H200 SXM"),
        ("H200 NVL", "NVIDIA H200 NVL"),
        ("gh200 96gb", "NVIDIA GH200 96GB"),
        ("mi300x", "AMD Instinct MI300X"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 SXM5 80GB"),
        ("rtx 3090", "NVIDIA GeForce RTX 3090"),
        ("rtx 3090 ti", "NVIDIA GeForce RTX 3090 Ti"),
        ("l4", "NVIDIA L4"),
        ("h100 sxm", "NVIDIA H100 SXM5 80GB"),
        ("H100-SXM", "NVIDIA H100 SXM5 80GB"),
        ("h100sxm", "NVIDIA H100 SXM5 80GB"),
        ("a100 sxm", "NVIDIA A100 SXM4 40GB"),
        ("h100 pcie", "NVIDIA H100 PCIe"),
        ("rtx4090", "NVIDIA GeForce RTX 4090"),
        ("rtx 2080", "NVIDIA GeForce RTX 2080"),
    ],
)
def test_a_gpu_is_found_by_its_words_and_by_its_drivers_name(name: str, expected: str) -> None:
    assert find_gpu(name).gpu.name == expected


@pytest.mark.parametrize("name", ["", "  ", "h21", "voodoo 2", "nvidia h100 mi300x"])
def test_unmatched_price_name_is_reported(name: str) -> None:
    with pytest.raises(AdvisorError, match="no GPU"):
        find_gpu(name)


@pytest.mark.parametrize(
    ("name", "slower", "faster"),
    [
        ("h100_qwen_inference", "a100 sxm4 80gb", "h200 sxm"),
        ("mi300_torch_compile", "mi210", "mi325x"),
        ("pairs/sam_2_fp32_few_syncs", "t4", "h100 sxm5"),
    ],
)
def test_real_steps_slow_down_on_slower_gpus_only(
    shared_trace: Callable[[str], str], name: str, slower: str, faster: str
) -> None:
    run = open_run(shared_trace(name), window="first")
    projector = Projector(Analysis(run.window(run.ranks[0])))
    down, up = projector.on(find_gpu(slower).gpu), projector.on(find_gpu(faster).gpu)
    assert up.step_ns <= down.measured_ns * 1.001 < down.step_ns
    for projected in (down, up):
        assert 0 < projected.low_ns < projected.step_ns < projected.high_ns
    assert Path(projector.a.trace.meta.path).exists()


@pytest.mark.parametrize("name", ["h100/healthy_lm", "h100/decode_batch1", "nccl_collectives"])
def test_gpu_faster_in_every_figure_is_not_projected_slower(
    name: str,
) -> None:
    """Figures: those of the datasheets, and what kernels reach: an H200 SXM is measured slower than
    an H200 NVL, though its datasheet has higher peaks."""
    path = CORPUS / name
    run = open_run(str(path if path.exists() else f"{path}.json.gz"), window="first")
    projector = Projector(Analysis(run.window(run.ranks[0])))
    factors = {
        gpu.name: scale_device_work(projector.a, projector.recorded_gpu, gpu).factor
        for gpu in known_gpus()
    }
    figures = {gpu.name: _attainable_rates(gpu) for gpu in known_gpus()}
    pairs = [
        (gpu.name, other.name)
        for gpu in known_gpus()
        for other in known_gpus()
        if gpu is not other
        and all(map(ge, figures[gpu.name], figures[other.name]))
        and is_at_least_as_fast(gpu, other)
    ]
    assert len(pairs) > 1000
    slower = {
        (name, other)
        for name, other in pairs
        if (factors[name] > factors[other] * (1 + 1e-9)).any()
    }
    assert not slower
    newer, older = (projector.on(find_gpu(each).gpu).step_ns for each in ("rtx 5090", "rtx 4090"))
    assert newer <= older


def _attainable_rates(gpu: GpuSpec) -> list[float]:
    """Attainable rates of kernels, copies and collectives."""
    products = [matmul_rate(gpu, d) for d in ("fp32", "tf32", "fp16", "bf16", "fp8")]
    rates = [*products, matmul_rate(gpu, "fp16", half_sums=True), host_rate(gpu), peer_rate(gpu)]
    return [rate or 0.0 for rate in rates]
