"""The cause of a slow product follows from its tiles and the units of the device, whoever made
it."""

from __future__ import annotations

import pytest

from advisor.measure.device.matmuls import MatrixProduct
from advisor.measure.device.shapes import Tensor
from advisor.rules.kernel.slow_convolution import SlowConvolution
from advisor.rules.kernel.slow_gemm import SlowGemm, explain_slow_product


def advice_on_product(
    m: int, n: int, k: int, units: int | None, *, batch: int = 1, amd: bool = False
) -> str:
    a, b = Tensor((m, k), "c10::BFloat16", None), Tensor((k, n), "c10::BFloat16", None)
    causes = explain_slow_product(MatrixProduct(batch, m, n, k, a, b, None), units, amd=amd)
    advice = SlowGemm()._advise([cause.case for cause in causes if cause.case])
    return f"{[cause.text for cause in causes]} | {advice['fix']} | {advice['code']}"


@pytest.mark.parametrize(
    ("size", "units", "amd", "cause"),
    [
        # 2 x 2 tiles; 304 compute units of an MI300X
        ((256, 256, 65536), 304, True, "4 tiles of 128 x 128 for 304 compute units, and each"),
        ((256, 256, 65536), 108, False, "4 tiles of 128 x 128 for 108 multiprocessors"),
        ((1000, 300, 512), 132, False, "24 tiles of 128 x 128 for 132"),
        # 20 x 16 tiles: 1.05 rounds of 304
        ((2560, 2048, 1024), 304, True, "1.05 rounds of tiles on 304 compute units"),
        ((1792, 1024, 4096), 108, False, "1.04 rounds of tiles on 108 multiprocessors"),
        ((262144, 8, 4096), 108, False, "one side of 262144 x 8"),
        ((8192, 8192, 8192), 108, False, "a kernel that does not suit it"),
        ((8192, 8192, 8192), None, False, "a kernel that does not suit it"),
    ],
)
def test_tiles_over_units_tell_the_cause(
    size: tuple[int, int, int], units: int | None, amd: bool, cause: str
) -> None:
    assert cause in advice_on_product(*size, units, amd=amd)


def test_the_advice_on_tuning_products_is_the_vendors() -> None:
    assert "PYTORCH_TUNABLEOP_ENABLED" in advice_on_product(256, 256, 65536, 304, amd=True)
    assert "TUNABLEOP" not in advice_on_product(256, 256, 65536, 108)


def test_thousands_of_tiny_products_are_reported_as_such() -> None:
    assert "37,632 products of 8 x 8" in advice_on_product(8, 8, 64, 304, batch=37_632, amd=True)


@pytest.mark.parametrize(("kinds", "advised"), [(1, True), (12, False)])
def test_cudnn_benchmark_is_advised_only_for_few_shapes(kinds: int, advised: bool) -> None:
    b = SlowConvolution.examples()["no tensor cores"]
    run = b.record_of_run(flags={"cudnn.benchmark": False})
    for number in range(24):
        run.step(10, fields={"shapes": number % kinds})
    (finding,) = SlowConvolution().check(b.analysis())
    assert ("cudnn.benchmark = True" in (finding.code or "")) == advised
    assert "channels_last" in (finding.code or "")
