"""Matrix products whose shape leaves most of the device without work."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Any, ClassVar

import polars as pl

from advisor.core.finding import Finding, Outcome, Threshold
from advisor.core.text import percent
from advisor.measure import Analysis
from advisor.measure.device.matmuls import Product, product
from advisor.rules.kernel import facts, rates
from advisor.rules.sources import RATES
from advisor.testing import TraceBuilder

FAMILIES = ("gemm",)
TILE = 128
"""Rows and columns of the tile that libraries compute large products in."""
_COMPILED = "model = torch.compile(model, mode='max-autotune')   # times tiles and split-K"


class SlowGemm(rates.Rated):
    """A matrix product is computed in tiles, one a multiprocessor (NVIDIA) or compute unit (AMD) at
    a time. Where the result has fewer tiles than the device has units, the others idle, however
    long the sum behind each element is; just above a whole number of rounds the last one is nearly
    empty; thousands of tiny products fill no tile at all.

    Each product's time is held against the longer of its FLOPs at the rate of large products
    measured on such a GPU and its bytes at the rate of the memory, and a kernel's own start-up is
    added, so that small products are not asked for what only large ones reach. The shape then tells
    the cause: ``ceil(M / 128) x ceil(N / 128) x batch`` tiles over the units of the device.
    Products in full fp32 that tensor cores could do, and those with rows off 16-byte boundaries,
    are other rules' business.
    """

    id = "slow-gemm"
    title = "Matrix products leave most of the device idle"
    category = "kernel"
    silent_in = (
        "traces/h100_qwen_inference",
        "traces/pairs/sam_2_fp32_few_syncs",
        "traces/b200_eager",
        "traces/mi300_timesformer_inference",
        "traces/mi300x_kernels_after_steps",
        "traces/pairs/sam_3_bf16_compiled_sdpa",
    )
    validated_on = (
        "A100 training at batch 64 (1.19 rounds of tiles at 31 % of the rate: fires, worth nothing "
        "there, since the host decides); silent on H100 inference (81 to 90 % of the rate), an "
        "A100 in fp32, B200 inference (bound by launches), MI300X (attention that is not fused)"
    )
    references = (
        "https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/#tile-quant",
        "https://rocm.docs.amd.com/en/latest/how-to/rocm-for-ai/inference-optimization/workload.html",
        "https://arxiv.org/abs/2301.03598",
    )

    max_efficiency = Threshold(0.4, "of the attainable rate", RATES)
    reach = Threshold(0.6, "of the attainable rate, that a better kernel comes to", RATES)
    best_reach = Threshold(0.8, "of the attainable rate, at best", RATES)
    worst_reach = Threshold(0.45, "of the attainable rate, at worst", RATES)

    fix = "Let autotuning time the library's kernels and generated ones at this shape."
    code = _COMPILED
    verify = "Profile again: more of the attainable rate in advisor analyze --operators."
    falsified_by = "the product, timed alone in the proposed form, is no faster"
    confidence = 0.55
    cases: ClassVar = {
        "on ROCm": {
            "code": "# shell: export PYTORCH_TUNABLEOP_ENABLED=1   # times hipBLASLt's and "
            "rocBLAS's kernels"
        },
        "tiny products": {
            "fix": "Write them as larger ones: fold the batch into the rows where one side is "
            "shared, or, where they are attention over a few positions, call the fused "
            "operator, which keeps them on the chip.",
            "code": "y = (x.reshape(-1, x.shape[-1]) @ w)   # one product where w is shared\n"
            "out = F.scaled_dot_product_attention(q, k, v)",
        },
        "fewer tiles than units": {
            "fix": "Split the sum over several tiles (split-K or stream-K, which autotuning "
            "tries), or give the product more rows: a larger batch, several products of one input "
            "stacked into one (query, key and value).",
            "code": f"{_COMPILED}\n# stacked: qkv = F.linear(x, torch.cat([wq, wk, wv]))",
        },
        "a last round that is nearly empty": {
            "fix": "Choose a batch or layer size just below a whole number of rounds, or let "
            "autotuning look for another tile.",
            "code": _COMPILED,
        },
        "a thin side": {
            "fix": "Multiply more at once: a larger batch, or several products of one input "
            "stacked into one. What stays thin is bound by reading its large side: keep that in "
            "16 or 8 bits.",
            "code": _COMPILED,
        },
    }

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Products below the limit, and their share of kernel time."""
        if not facts.worth_looking(a, self.min_busy):
            return
        low = rates.far_below(a, FAMILIES, self.max_efficiency, tensor=True)
        shapes = [self._shape(a, row) for row in low.iter_rows(named=True)]
        low = low.filter(pl.Series([shape is not None for shape in shapes], dtype=pl.Boolean))
        if low.is_empty() or float(low["share"].sum()) < self.min_share:
            yield from rates.unknown(a, FAMILIES, "matrix products")
            return
        worst = low.sort("saved", descending=True).row(0, named=True)
        shape = self._shape(a, worst)
        assert shape is not None
        units = a.device.sms if a.device is not None else None
        amd = a.trace.meta.vendor == "amd"
        cause, case = self._why(shape, units, amd=amd)
        change, rows = self.edit(a, low)
        yield Finding(
            summary=(
                f"{low['share'].sum():.0%} of kernel time goes into matrix products at "
                f"{percent(worst['efficiency'])} of the attainable rate: {cause}."
            ),
            evidence=self.evidence(a, low),
            where=facts.locations(a, rows),
            edits=[change],
            **self._advice(case, amd=amd),
        )

    def _shape(self, a: Analysis, row: dict[str, Any]) -> Product | None:
        """The product; None: not told, or its rows are off 16-byte boundaries."""
        inputs = rates.inputs_of(a, row["inputs"])
        found = None if inputs is None else product(row["op"], inputs)
        unit = facts.UNIT.get(row["dtype"] or "")
        if found is None or unit is None or (found.n >= unit and found.n % unit):
            return None
        return None if found.k >= unit and found.k % unit else found

    def _advice(self, case: str, *, amd: bool) -> dict[str, Any]:
        """Fix and code of a case; ``""``: of none."""
        cases = [case] if case else []
        if amd and case != "tiny products":
            cases.insert(0, "on ROCm")
        return self.told(cases, own=not case)

    def _why(self, p: Product, units: int | None, *, amd: bool) -> tuple[str, str]:
        """The cause in words, and the case; ``""``: none."""
        tiles = p.batch * ceil(p.m / TILE) * ceil(p.n / TILE)
        what = "compute units" if amd else "multiprocessors"
        size = f"{p.m} x {p.n} with a sum over {p.k}"
        if p.batch > 1 and min(p.m, p.n) < 64 and p.k < 512:
            told = f"{p.batch:,} products of {size}, each too small for a tile of {TILE}"
            return told, "tiny products"
        if units is not None and tiles < units:
            long = p.k >= 4 * max(p.m, p.n)
            return (
                f"{size} makes {tiles} tiles of {TILE} x {TILE} for {units} {what}"
                + (", and each works through the whole sum" if long else ""),
                "fewer tiles than units",
            )
        rounds = tiles / units if units else 0.0
        if 1 < rounds < 4 and 1 - rounds / ceil(rounds) >= 0.2:
            return (
                f"{size} makes {rounds:.2f} rounds of tiles on {units} {what}: the last one is "
                "nearly empty",
                "a last round that is nearly empty",
            )
        if min(p.m, p.n, p.k) < 64:
            return f"one side of {size} is thin: there is little to reuse in a tile", "a thin side"
        return f"{size} runs on a kernel that does not suit it", ""

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """Few tiles with a long sum; a round and a bit; tiny products in a batch."""
        return {
            # 4 tiles, 69 GFLOP: 0.25 ms at the rate, and all units could share the sum
            "few tiles, a long sum": _products([256, 524288], [524288, 256], 2500),
            # 14 x 8 tiles for 108 units; 0.24 TFLOP
            "a round and a bit": _products([1792, 65536], [65536, 1024], 2600),
            # 96 MB take 0.06 ms
            "tiny products": _products([65536, 16, 16], [65536, 16, 16], 900, "aten::bmm"),
        }

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """At 70 % of the rate; bound by memory and near it; bound by launches; fp32; misaligned."""
        return {
            # 0.55 TFLOP in 2.9 ms
            "at 70 % of the rate": (_products([8192, 4096], [4096, 8192], 2900), "max_efficiency"),
            # a vector times 134 MB: 0.1 ms
            "reads its weights at full speed": (
                _products([1, 8192], [8192, 8192], 100),
                "max_efficiency",
            ),
            "bound by launches": (_products([64, 256], [256, 64], 9), "low.is_empty()"),
            "full fp32": (
                _products(
                    [256, 65536], [65536, 256], 2500, dtype="float", kernel="ampere_sgemm_128x64_nn"
                ),
                "low.is_empty()",
            ),
            "odd rows": (_products([256, 65536], [65536, 255], 2500), "low.is_empty()"),
        }


def _products(
    left: list[int],
    right: list[int],
    us: float,
    op: str = "aten::mm",
    dtype: str = "c10::BFloat16",
    kernel: str = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_nn",
) -> TraceBuilder:
    b = TraceBuilder()
    for _ in range(4):
        with b.step():
            b.run(op, kernel, us, [left, right], dtype, times=6)
            b.sync()
    return b
