"""Matrix products whose shape leaves most of the GPU idle."""

from math import ceil
from typing import Any

import polars as pl

from advisor.core.rule import Factor, Threshold
from advisor.measure import Analysis
from advisor.measure.device.matmuls import MatrixProduct, parse_product
from advisor.measure.device.shapes import OpInputs
from advisor.rules.support import kernel_work
from advisor.rules.support.below_rate import ON_ROCM, BelowRate, SlowCause
from advisor.rules.support.citations import RATES, public_traces
from advisor.rules.support.kernel_work import inputs_if_known
from advisor.testing import Examples, TraceBuilder

TILE = 128
"""Rows and columns of the tiles in which libraries compute large products."""
_COMPILED = 'model = torch.compile(model, mode="max-autotune")   # times tiles and split-K'


class SlowGemm(BelowRate):
    """A matrix product is computed in tiles, one per multiprocessor (NVIDIA) or compute unit (AMD)
    at a time. Three shapes leave units idle. The result has fewer tiles than the device has units,
    however long the sum for each element is. Or it has slightly more tiles than a whole number of
    rounds, so the last round is nearly empty. Or thousands of tiny products do not even fill one
    tile.

    The rule compares each product's time with the longer of two times. One is for its FLOPs at the
    rate measured for large products on such a GPU, the other for its bytes at the memory's rate. It
    adds a kernel's start-up time, so small products need not reach the rate of large ones. The
    shape then gives the cause: ``ceil(M / 128) x ceil(N / 128) x batch`` tiles over the units of
    the device. Other rules report products in full FP32 that tensor cores could do, and products
    whose rows are off 16-byte boundaries."""

    id = "slow-gemm"
    subject = "matrix products"
    title = "GEMM shapes leave most of the GPU idle"
    silent_in = public_traces(
        "h100_qwen_inference pairs/sam_2_fp32_few_syncs b200_eager mi300_timesformer_inference "
        "mi300x_kernels_after_steps pairs/sam_3_bf16_compiled_sdpa"
    )
    validation_note = (
        "A100 training at batch 64: fires on 1.19 rounds of tiles at 31% of the rate. It has no "
        "gain there, because the host is the bottleneck. Silent on H100 inference (81 to 90% of "
        "the rate), an A100 in fp32, B200 inference (bound by launches), MI300X (unfused attention)"
    )
    references = (
        "https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/#tile-quant",
        "https://rocm.docs.amd.com/en/latest/how-to/rocm-for-ai/inference-optimization/workload.html",
        "https://arxiv.org/abs/2301.03598",
    )

    max_efficiency = Threshold(0.4, "of the attainable rate", RATES)
    attained_share = Factor(0.6, "of the attainable rate, that a better kernel reaches", RATES)
    best_attained_share = Factor(0.8, "of the attainable rate, at best", RATES)
    worst_attained_share = Factor(0.45, "of the attainable rate, at worst", RATES)

    families = ("gemm",)
    _work = "matrix products"
    _matrix_work = True

    fix = "Let autotuning time the library's kernels and generated ones for this shape."
    code = _COMPILED
    verify = "Profile again: advisor analyze --by operator shows more of the attainable rate."
    falsified_by = "a product that is no faster, timed alone in the proposed form"
    confidence = 0.55
    cases = {
        ON_ROCM: {
            "code": "# shell: export PYTORCH_TUNABLEOP_ENABLED=1   # times hipBLASLt's and "
            "rocBLAS's kernels"
        },
        "tiny products": {
            "fix": "Write them as larger products: fold the batch into the rows where one side is "
            "shared. Where they are attention over a few positions, call the fused operator, "
            "which keeps them on the chip.",
            "code": "y = x.reshape(-1, x.shape[-1]) @ w   # one product where w is shared\n"
            "out = F.scaled_dot_product_attention(q, k, v)   # where it is attention",
        },
        "fewer tiles than units": {
            "fix": "Split the sum over several tiles (split-K or stream-K, which autotuning "
            "tries). Or give the product more rows: a larger batch, or several products of one "
            "input stacked into one (query, key and value).",
            "code": f"{_COMPILED}\nqkv = F.linear(x, torch.cat([wq, wk, wv]))   # stacked",
        },
        "a last round that is nearly empty": {
            "fix": "Choose a batch or layer size just below a whole number of rounds, or let "
            "autotuning look for another tile.",
            "code": _COMPILED,
        },
        "a thin side": {
            "fix": "Multiply more at once: a larger batch, or several products of one input "
            "stacked into one. A product that stays thin is bound by reading its large side: keep "
            "that side in 16 or 8 bits.",
            "code": _COMPILED,
        },
    }

    def _keep_suitable(self, a: Analysis, slow: pl.DataFrame) -> pl.DataFrame:
        """Return slow operators with a recorded shape whose rows are on 16-byte boundaries."""
        is_aligned = [
            _is_aligned(row, inputs_if_known(a, row["inputs"]))
            for row in slow.iter_rows(named=True)
        ]
        return slow.filter(pl.Series(is_aligned, dtype=pl.Boolean))

    def _find_causes(
        self, a: Analysis, worst: dict[str, Any], inputs: OpInputs | None
    ) -> list[SlowCause]:
        shape = None if inputs is None else parse_product(worst["op"], inputs)
        assert shape is not None  # _keep_suitable() keeps only products with a shape
        units = a.device.sms if a.device is not None else None
        return explain_slow_product(shape, units, amd=a.trace.meta.vendor == "amd")

    @staticmethod
    def examples() -> Examples:
        """Return slow products, and traps: at 70% of the rate, memory-bound, launch-bound, in FP32,
        misaligned."""
        return {
            # 4 tiles, 69 GFLOP: 0.25 ms at the rate, and all units could share the sum
            "few tiles, a long sum": _build_products([256, 524288], [524288, 256], 2500),
            # 14 x 8 tiles for 108 units; 0.24 TFLOP
            "a round and a bit": _build_products([1792, 65536], [65536, 1024], 2600),
            # 96 MB take 0.06 ms
            "tiny products": _build_products([65536, 16, 16], [65536, 16, 16], 900, "aten::bmm"),
            # 0.55 TFLOP in 2.9 ms
            "at 70% of the rate": (
                _build_products([8192, 4096], [4096, 8192], 2900),
                "max_efficiency",
            ),
            # a vector times 134 MB: 0.1 ms
            "reads its weights at full speed": (
                _build_products([1, 8192], [8192, 8192], 100),
                "max_efficiency",
            ),
            "bound by launches": (_build_products([64, 256], [256, 64], 9), "slow.is_empty()"),
            "full FP32": (
                _build_products(
                    [256, 65536], [65536, 256], 2500, dtype="float", kernel="ampere_sgemm_128x64_nn"
                ),
                "slow.is_empty()",
            ),
            "odd rows": (_build_products([256, 65536], [65536, 255], 2500), "slow.is_empty()"),
        }


def _is_aligned(row: dict[str, Any], inputs: OpInputs | None) -> bool:
    """Return whether the product's shape is recorded and its rows are on 16-byte boundaries."""
    shape = None if inputs is None else parse_product(row["op"], inputs)
    unit = kernel_work.UNIT.get(row["dtype"] or "")
    if shape is None or unit is None:
        return False
    return all(size < unit or not size % unit for size in (shape.n, shape.k))


def explain_slow_product(p: MatrixProduct, units: int | None, *, amd: bool) -> list[SlowCause]:
    """Return why a product is slow on a device with this many units."""
    tiles = p.batch * ceil(p.m / TILE) * ceil(p.n / TILE)
    unit = "compute units" if amd else "multiprocessors"
    size = f"{p.m} x {p.n} with a sum over {p.k}"
    vendor = [SlowCause("", ON_ROCM)] if amd else []
    if p.batch > 1 and min(p.m, p.n) < 64 and p.k < 512:
        text = f"{p.batch:,} products of {size}, each too small for a tile of {TILE}"
        return [SlowCause(text, "tiny products")]
    if units is not None and tiles < units:
        text = f"{size} makes {tiles} tiles of {TILE} x {TILE} for {units} {unit}"
        if p.k >= 4 * max(p.m, p.n):
            text += ", and each works through the whole sum"
        return [*vendor, SlowCause(text, "fewer tiles than units")]
    rounds = tiles / units if units else 0.0
    if 1 < rounds < 4 and 1 - rounds / ceil(rounds) >= 0.2:
        text = (
            f"{size} makes {rounds:.2f} rounds of tiles on {units} {unit}, and the last one is "
            "nearly empty"
        )
        return [*vendor, SlowCause(text, "a last round that is nearly empty")]
    if min(p.m, p.n, p.k) < 64:
        text = f"one side of {size} is thin, so a tile has little to reuse"
        return [*vendor, SlowCause(text, "a thin side")]
    return [*vendor, SlowCause(f"{size} runs on a kernel that does not suit it")]


def _build_products(
    left: list[int],
    right: list[int],
    us: float,
    op: str = "aten::mm",
    dtype: str = "c10::BFloat16",
    kernel: str = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_nn",
) -> TraceBuilder:
    b = TraceBuilder()
    for _ in b.steps():
        b.run(op, kernel, us, [left, right], dtype, times=6)
        b.sync()
    return b
