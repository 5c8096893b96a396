"""Attention reads keys and values in 16 bits while tokens are decoded."""

import re

import numpy as np
import polars as pl

from advisor.core import text as t
from advisor.core.finding import Finding, Outcomes, Select
from advisor.core.rule import Factor, FrameworkAdvice, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.inference.annotations import DECODE
from advisor.measure.inference.inference_steps import NARROW, read_heads
from advisor.rules.support.citations import CHOSEN, TENSORBOARD
from advisor.rules.support.common import amount_per_step, of_step, scale_edit
from advisor.rules.support.framework_advice import SGLANG_KV, VLLM_KV
from advisor.testing import Examples, TraceBuilder

_MIN_BYTES = 2
"""Minimum bytes of a cache value at which half of them can be saved."""


class KvCache16Bits(Rule):
    """Each decoded token reads all keys and values of its sequence, so attention is as fast as the
    memory. A cache in 8 bits takes half as many bytes, and holds twice the tokens.

    The rule looks at attention kernels in decode steps that an engine marks with sums (``sk``).
    Their heads and number format must be known from recorded shapes. A kernel's reads must explain
    its time: at least half at the memory's attainable rate."""

    id = "kv-cache-16-bits"
    title = "Attention reads a KV cache in 16 bits"

    min_share = Threshold(0.10, "of the step, in this attention", TENSORBOARD)
    min_rate = Threshold(0.5, "of the memory's bandwidth, reached while it reads", CHOSEN)
    factor = Factor(0.6, "of the kernel's time, with half the bytes of the cache", CHOSEN)

    fix = "Keep keys and values in 8 bits, and compare the quality of the answers."
    engine_advice = {
        "vllm": FrameworkAdvice(
            "Start vLLM with --kv-cache-dtype fp8, and compare the quality of the answers.",
            "vllm serve MODEL --kv-cache-dtype fp8",
        ),
        "sglang": FrameworkAdvice(
            "Start SGLang with --kv-cache-dtype fp8_e4m3, and compare the quality of the answers.",
            "python -m sglang.launch_server --model-path MODEL \\\n  --kv-cache-dtype fp8_e4m3",
        ),
    }
    verify = "Profile again: attention takes little more than half as long per decode step."
    falsified_by = "attention that is as slow with an FP8 cache: its backend converts first"
    assumptions = ("the attention backend reads FP8 directly", "the answers stay good enough")
    confidence = 0.6
    references = (VLLM_KV.address, SGLANG_KV.address)

    def check(self, a: Analysis) -> Outcomes:
        inference_steps, hardware = a.inference_steps, a.hardware
        if inference_steps is None or hardware is None:
            return
        is_decode = np.array([mark.phase == DECODE for mark in inference_steps.marks] + [False])
        kernels, gpu = a.kernels, a.trace.gpu
        is_attention = (kernels["family"] == "attention") & kernels["moved"].is_not_null()
        rows = np.flatnonzero(
            is_attention.fill_null(False).to_numpy() & is_decode[inference_steps.owner]
        )
        names = gpu["name"].gather(rows).cast(pl.String).to_list()
        ops = kernels["op_row"].gather(rows).to_list()
        is_wide = [
            (shape := None if op is None else read_heads(a.trace, op)) is not None
            and shape.width >= _MIN_BYTES
            and not re.search(NARROW, name)
            for op, name in zip(ops, names, strict=True)
        ]
        rows = rows[is_wide]
        if not len(rows):
            return
        dur = int(gpu["dur"].gather(rows).sum())
        moved = float(kernels["moved"].gather(rows).sum())
        share, rate = dur / max(a.span_ns, 1), moved / max(dur, 1) * 1e9 / hardware.bandwidth
        if share < self.min_share or rate < self.min_rate:
            return
        wide_names = sorted({name for name, fits in zip(names, is_wide, strict=True) if fits})
        yield Finding(
            summary=f"Attention reads {t.format_bytes(moved / a.step_count)} of keys and values in "
            f"16 bits and takes {of_step(a, dur)}.",
            evidence=[
                amount_per_step(a, "attention over the cache", dur),
                self.compare("attention over the cache, share", share, "min_share", per=a.per),
                self.compare(
                    "bandwidth of this attention, share of the memory's", rate, "min_rate"
                ),
            ],
            edits=[
                scale_edit(
                    Select(on="gpu", name=f"^(?:{'|'.join(map(re.escape, wide_names))})$"),
                    self.factor,
                    0.5,
                    1.0,
                )
            ],
        )

    @staticmethod
    def examples() -> Examples:
        """Build decode steps of 64 sequences of 4,000 tokens: 0.5 GB per layer in 200 µs. Others
        have short attention, slow attention, a cache in FP8, or no sums."""
        return {
            "long sequences in bf16": _build_decoding(200),
            "little attention": (_build_decoding(200, other=20_000), "min_share"),
            "attention far from the memory's rate": (_build_decoding(900), "min_rate"),
            "a cache in FP8": (_build_decoding(120, "fmha_QkvE4m3_paged"), "not len(rows)"),
            "no sums": (_build_decoding(200, mark="step[DECODE bs=64]"), "not len(rows)"),
        }


def _build_decoding(
    us: float,
    kernel: str = "flash_fwd_splitkv_kernel",
    *,
    other: float = 400,
    mark: str = "step[DECODE bs=64 g_sq=64 g_sqsq=64 g_sqsk=256000 g_sk=256000]",
) -> TraceBuilder:
    b = TraceBuilder("H100")
    shapes = [[64, 32, 64], [64, 8, 64], [64, 8, 64]]
    for _ in range(4):
        with b.range(mark):
            for _ in range(4):
                b.run("vllm::unified_attention_with_output", kernel, us, shapes, "c10::BFloat16")
                b.run("aten::mm", "nvjet_hsh_64x8", other)
            b.sync("cudaStreamSynchronize")
    return b
