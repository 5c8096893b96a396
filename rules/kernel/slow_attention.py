"""Fused attention that runs far below the attainable rate."""

from typing import Any

import polars as pl

from advisor.core.rule import Factor, Threshold
from advisor.measure import Analysis
from advisor.measure.device.matmuls import parse_attention
from advisor.measure.device.shapes import OpInputs
from advisor.rules.support.below_rate import BelowRate, SlowCause
from advisor.rules.support.citations import FLASH_2, FLASH_3, public_traces
from advisor.rules.support.kernel_work import ATTAINED_SHARE, BEST_ATTAINED_SHARE, inputs_if_known
from advisor.testing import Examples, TraceBuilder

HOPPER = (9, 0)
_CUDNN_ON_HOPPER = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x64x64"


class SlowAttention(BelowRate):
    """Fused attention reaches only a small part of the device's rate. The kernel is in fp32, or
    heads are too small to fill a tile of the tensor cores. Or the memory-efficient kernel runs
    where FlashAttention could, or FlashAttention 2 runs on a GPU that it was not written for.

    The rule compares each operator's time with the longer of two times. One is for its FLOPs at the
    rate measured for matrix products on such a GPU, the other for its bytes at the memory's rate.
    Fused attention cannot match a matrix product, because the exponentials and reductions between
    its two products take time: FlashAttention 2 reaches 50 to 73% of an A100's peak, FlashAttention
    3 up to 75% of an H100's. Below a third of the attainable rate there may be a problem. The rule
    reports only known causes. Short sequences, the backward pass and causal masks are slow even
    in the best kernel. That is one for this GPU, in 16 bits, with heads that fill its tiles."""

    id = "slow-attention"
    subject = "attention"
    title = "Fused attention runs far below the GPU's rate"
    found_in = ("traces/pairs/sam_2_fp32_few_syncs", "traces/h100_qwen_inference")
    silent_in = public_traces("b200_eager h100_bert_small_inference pairs/sam_3_bf16_compiled_sdpa")
    validation_note = (
        "mask generation on an A100 in FP32: fires on heads of 16 and 80 in the memory-efficient "
        "kernel, 12 to 14% of the rate. The same calls in 16 bits went from 163 to 42 ms as "
        "measured, 116 ms less as predicted. H100 inference: fires on FlashAttention 2 at 26%. "
        "B200 inference in FP8: silent, because shapes are not recorded"
    )
    references = (
        "https://arxiv.org/abs/2307.08691",
        "https://arxiv.org/abs/2407.08608",
        "https://pytorch.org/docs/stable/generated/torch.nn.attention.sdpa_kernel.html",
    )

    sources = (FLASH_2, FLASH_3)

    max_efficiency = Threshold(
        0.33, "of the attainable rate; FlashAttention reaches half or more", FLASH_2, FLASH_3
    )
    attained_share = ATTAINED_SHARE
    best_attained_share = BEST_ATTAINED_SHARE
    worst_attained_share = Factor(0.36, "of the attainable rate, at worst", FLASH_2)

    families = ("attention",)
    _work = "attention kernels"

    fix = "Time the other backends at these shapes and keep the fastest."
    code = (
        "from torch.nn.attention import SDPBackend, sdpa_kernel\n"
        "for backend in (SDPBackend.FLASH_ATTENTION,\n"
        "                SDPBackend.EFFICIENT_ATTENTION,\n"
        "                SDPBackend.CUDNN_ATTENTION):\n"
        "    with sdpa_kernel(backend):\n"
        "        print(backend, benchmark(lambda: attend(q, k, v)))"
    )
    verify = "Profile again: another attention kernel, and more of the attainable rate."
    falsified_by = "other kernels that are no faster, timed alone at these shapes"
    cases = {
        "inputs of 32 or 64 bits": {
            "fix": "Give attention FP16 or BF16 inputs (autocast). FlashAttention then runs, on "
            "tensor cores at their full rate.",
            "code": 'with torch.autocast("cuda", dtype=torch.bfloat16):\n'
            "    out = F.scaled_dot_product_attention(q, k, v)",
        },
        "heads that are not a multiple of 8": {"fix": "Pad the head size to a multiple of 8."},
        "small heads": {"fix": "Use fewer and larger heads (64 or 128) if the model is yours."},
        "few queries or keys": {"fix": "Put several sequences into one call."},
        "FlashAttention 2 on Hopper": {
            "fix": "Try cuDNN's attention or FlashAttention 3, 1.5 to 2 times faster on Hopper.",
            "code": "from torch.nn.attention import SDPBackend, sdpa_kernel\n"
            "with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION],\n"
            "                 set_priority=True):\n"
            "    out = F.scaled_dot_product_attention(q, k, v)",
        },
        "the memory-efficient kernel": {
            "fix": "Find out why FlashAttention does not run: usually because of a mask.",
            "code": "from torch.nn.attention import SDPBackend, sdpa_kernel\n"
            "with sdpa_kernel(SDPBackend.FLASH_ATTENTION):   # says why, if it cannot\n"
            "    out = F.scaled_dot_product_attention(q, k, v)",
        },
    }

    def _keep_suitable(self, a: Analysis, slow: pl.DataFrame) -> pl.DataFrame:
        """Return slow operators with a known cause. A good 16-bit kernel is slow on short
        sequences, in the backward pass and with a causal mask, and nothing helps."""
        has_cause = [
            bool(self._find_causes(a, row, inputs_if_known(a, row["inputs"])))
            for row in slow.iter_rows(named=True)
        ]
        return slow.filter(pl.Series(has_cause, dtype=pl.Boolean))

    def _find_causes(
        self, a: Analysis, worst: dict[str, Any], inputs: OpInputs | None
    ) -> list[SlowCause]:
        shape = None if inputs is None else parse_attention(worst["op"], inputs)
        kernel = str(worst["kernel"])
        causes = []
        is_wide = worst["dtype"] in ("fp32", "tf32", "fp64")
        if is_wide:
            dtype = "FP64" if worst["dtype"] == "fp64" else "FP32"
            causes.append(SlowCause(f"its inputs are {dtype}", "inputs of 32 or 64 bits"))
        if shape is not None and shape.width % 8:
            text = f"heads of {shape.width} are not a multiple of 8"
            causes.append(SlowCause(text, "heads that are not a multiple of 8"))
        elif shape is not None and shape.width < 64:
            text = f"heads of {shape.width} fill only a part of a tile of 64"
            causes.append(SlowCause(text, "small heads"))
        if shape is not None and min(shape.queries, shape.keys) < 64:
            fewest = min(shape.queries, shape.keys)
            text = f"{fewest} queries or keys leave tiles empty"
            causes.append(SlowCause(text, "few queries or keys"))
        if not is_wide and a.device is not None and (a.device.compute or (0, 0)) >= HOPPER:
            if "pytorch_flash" in kernel or "flash_fwd_kernel" in kernel:
                text = "FlashAttention 2 runs, which was written for the previous generation"
                causes.append(SlowCause(text, "FlashAttention 2 on Hopper"))
        elif not is_wide and "fmha" in kernel:
            text = "the memory-efficient kernel runs instead of FlashAttention"
            causes.append(SlowCause(text, "the memory-efficient kernel"))
        return causes

    @staticmethod
    def examples() -> Examples:
        """Return small heads in FP32, and FlashAttention 2 on a Hopper GPU at a tenth of its rate.
        The traps are fast, small, unknown or too short."""
        kernel = "void pytorch_flash::flash_fwd_kernel"
        bf16 = "c10::BFloat16"
        # 8 x 16 heads, 4096 x 4096 pairs, 2 x 2 x 64 each: 0.55 TFLOP take 3.4 ms at 60% of 271
        return {
            "small heads in FP32": _build_model(
                16, 4096, "float", 9000, "fmha_cutlassF_f32_aligned_64x64_rf_sm80"
            ),
            "FlashAttention 2 on Hopper": _build_model(
                64, 1024, "c10::BFloat16", 1000, "void pytorch_flash::flash_fwd_kernel", "H100"
            ),
            "at 60% of the rate": (
                _build_model(64, 4096, bf16, 3400, "fmha_cutlassF_bf16_aligned_64x64_rf_sm80"),
                "max_efficiency",
            ),
            "a kernel for this GPU": (
                _build_model(64, 1024, bf16, 1000, _CUDNN_ON_HOPPER, "H100"),
                "slow.is_empty()",
            ),
            "small compared with products": (
                _build_model(16, 1024, bf16, 300, kernel, products=30_000),
                "min_share",
            ),
            "no shapes": (_build_model(16, 4096, None, 9000, kernel), "slow.is_empty()"),
            "an unknown GPU": (_build_model(16, 4096, bf16, 9000, kernel, None), "slow.is_empty()"),
            "bound by launches": (_build_model(16, 16, bf16, 9, kernel), "slow.is_empty()"),
        }


def _build_model(
    width: int,
    tokens: int,
    dtype: str | None,
    us: float,
    kernel: str,
    gpu: str | None = "A100",
    products: float = 100,
) -> TraceBuilder:
    b = TraceBuilder(gpu)
    shape = [8, tokens, 16, width]
    for _ in b.steps():
        with b.op("aten::mm", [[8192, 1024], [1024, 1024]], "c10::BFloat16"):
            b.launch("ampere_bf16_s16816gemm_bf16_128x128_ldg8_tn", products)
        for _ in range(4):
            with b.op(
                "aten::_efficient_attention_forward",
                None if dtype is None else [shape, shape, shape, [], [], [], [], [], [], []],
                dtype and [dtype] * 3 + [""] * 4 + ["Scalar"] * 3,  # type: ignore[arg-type]
                concrete=["", "", "", "", "", "", "", "", "0.", "0"],
            ):
                b.launch(kernel, us)
        b.sync()
    return b
