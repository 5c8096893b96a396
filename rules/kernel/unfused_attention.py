"""Attention computed as product, softmax, product instead of one fused kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import polars as pl

from advisor.core.finding import (
    Edit,
    Evidence,
    Finding,
    FrameworkAdvice,
    Outcome,
    PassedCheck,
    Rule,
    Select,
    SkippedCheck,
    Threshold,
)
from advisor.core.trace import JAX, TENSORFLOW
from advisor.measure import Analysis
from advisor.measure.host.names import name_matches
from advisor.rules.common import figure
from advisor.rules.kernel import attention, facts
from advisor.rules.sources import FLASH, OURS
from advisor.testing import TraceBuilder


class UnfusedAttention(Rule):
    """Attention as separate kernels writes the whole matrix of scores (tokens x tokens a head) to
    memory and reads it back for scaling, mask, softmax and dropout. A fused kernel keeps it on the
    chip and is 1.5 to 4 times faster, and its memory grows with tokens, not their square.

    Two signs, both by op and by kernel: kernels launched under PyTorch's own fallback
    (``aten::_scaled_dot_product_attention_math``), and a softmax kernel whose neighbouring matrix
    products on its stream are both batched products of activations (``aten::bmm``), with nothing
    but scaling, masks, casts and dropout in between. A softmax after a linear layer (``addmm``: a
    classifier, a router of experts) is not attention, nor is a ``log_softmax``; where flash,
    memory-efficient or cuDNN attention runs there is no softmax kernel at all, and the rule says
    so as praise. Sequences below some 512 tokens gain little, which lowers the factor.
    """

    id = "unfused-attention"
    title = "Attention is not fused"
    category = "kernel"
    found_in = (
        "traces/mi300_timesformer_inference",
        "traces/pairs/sam_1_fp32_many_syncs",
        "traces/pairs/particle_batch2",
        "traces/pairs/particle_batch32",
        "traces/pairs/particle_batch64",
        "traces/pairs/particle_batch128",
    )
    silent_in = (
        "traces/a100_train_6steps",
        "traces/v100_train_copy_heavy",
        "traces/two_ranks_rank0",
        "traces/b200_eager",
        "traces/pairs/sam_3_bf16_compiled_sdpa",
    )
    validated_on = (
        "MI300 video inference (80 % of kernel time in product, softmax, product: fires), SAM in "
        "fp32 (13 %, gone where its authors used fused attention), a particle transformer (eight "
        "blocks of baddbmm, softmax, bmm); silent where flash attention "
        "runs and in two-rank training (softmax beside products of embeddings)"
    )
    references = (
        "https://pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html",
        "https://arxiv.org/abs/2205.14135",
    )

    min_share = Threshold(0.05, "of kernel time", OURS)
    max_between = Threshold(
        attention.MAX_BETWEEN,
        "kernels between product and softmax: scale, mask, casts, dropout",
        OURS,
    )
    factor = Threshold(0.4, "new duration over old: 2.5 times faster", FLASH)
    best_factor = Threshold(0.25, "new duration over old, at best: 4 times faster", FLASH)
    worst_factor = Threshold(0.67, "new duration over old, at worst: 1.5 times faster", FLASH)
    short_tokens = Threshold(
        512, "tokens: below it fused attention is 1.3 times faster at best", FLASH
    )
    short_factor = Threshold(0.8, "new duration over old, for short sequences", FLASH)
    praise_share = Threshold(
        0.03, "of kernel time in fused attention, from which it is worth saying", OURS
    )

    fix = (
        "Call F.scaled_dot_product_attention and let it choose a fused kernel. If it falls "
        "back to math, give it what the fused ones take: fp16 or bf16 inputs (autocast), a "
        "head size that is a multiple of 8, and a mask of the inputs' type. Where the mask "
        "is causal, is_causal=True stands for it."
    )
    code = (
        "out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # or None\n"
        "# why it falls back: forbid the fallback and read the warning\n"
        "from torch.nn.attention import SDPBackend, sdpa_kernel\n"
        "fused = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]\n"
        "with sdpa_kernel(fused):\n"
        "    out = F.scaled_dot_product_attention(q, k, v)\n"
        "# Hugging Face: from_pretrained(..., attn_implementation='sdpa')"
    )
    verify = (
        "Profile again: flash, fmha or cudnn attention kernels in place of bmm and "
        "softmax; peak memory falls too."
    )
    falsified_by = (
        "something needs the matrix of scores itself (returned weights, a bias that no "
        "fused kernel takes): then FlexAttention is the way"
    )
    confidence = 0.85

    assumptions = (
        "the fused kernel takes {factor:.0%} of the time ({best_factor:.0%} to {worst_factor:.0%})",
    )
    cases: ClassVar = {
        "short sequences": {
            "assumptions": (
                "the fused kernel takes {short_factor:.0%} of the time ({factor:.0%} to 100%)",
            )
        }
    }

    elsewhere: ClassVar = {
        TENSORFLOW: FrameworkAdvice(
            "Use fused attention.", "keras.config.enable_flash_attention()"
        ),
        JAX: FrameworkAdvice(
            "Use fused attention.", 'jax.nn.dot_product_attention(q, k, v, implementation="cudnn")'
        ),
    }

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Time of attention in separate kernels as a share of kernel time."""
        if a.device_id is None:
            return
        total = facts.duration(a, facts.kernel_rows(a))
        if not total:
            return
        rows = facts.compute_rows(a)
        fallback = attention.fallback(a)
        forward = attention.unfused(a, self.max_between)
        backward, part = self._backward(a, rows, forward)
        spent = facts.duration(a, forward) + backward
        share = spent / total
        if share < self.min_share:
            yield from self._healthy(a, rows, total, share)
            return
        tokens = self._tokens(a, forward)
        short = tokens is not None and tokens < self.short_tokens
        factors = (
            (self.short_factor, self.factor, 1.0)
            if short
            else (self.factor, self.best_factor, self.worst_factor)
        )
        edits = [
            self._edit(attention.SOFTMAX, factors, 1.0),
            self._edit(attention.FORWARD, factors, part),
        ]
        if fallback.any():
            edits.insert(0, self._edit(attention.MATH, factors, 1.0))
        which = "PyTorch's math fallback" if fallback.any() else "product, softmax, product"
        yield Finding(
            summary=(
                f"{share:.0%} of kernel time computes attention as separate kernels ({which}): "
                "each writes and reads the whole matrix of scores."
            ),
            evidence=[
                Evidence(
                    "unfused attention, share of kernel time",
                    share,
                    "share",
                    *self.limit("min_share"),
                ),
                figure(a, "unfused attention", spent),
                Evidence("under the math fallback", facts.duration(a, fallback) / total, "share"),
                Evidence("tokens a sequence", tokens, "count"),
            ],
            where=facts.locations(a, forward),
            edits=edits,
            confidence_notes=(
                [f"sequences of {tokens} tokens gain little"]
                if short
                else []
                if tokens is not None
                else ["sequence length not known"]
            ),
            **(self.case("short sequences") if short else {}),
        )

    def _healthy(
        self, a: Analysis, rows: facts.Mask, total: int, share: float
    ) -> Iterator[Outcome]:
        fused = facts.duration(a, rows & facts.of_family(a, "attention"))
        if fused >= self.praise_share * total and share < 0.01:
            yield PassedCheck(text=f"attention runs fused ({fused / total:.0%} of kernel time)")
        unknown = rows & facts.of_family(a, "softmax") & a.kernels["op_name"].is_null().to_numpy()
        if facts.duration(a, unknown) >= 0.02 * total:
            yield SkippedCheck(
                what="whether softmax kernels belong to unfused attention",
                why="the kernels' launches lie outside the window or in a CUDA graph",
                record="a window in which the model runs eagerly",
            )

    def _backward(self, a: Analysis, rows: facts.Mask, forward: facts.Mask) -> tuple[float, float]:
        """Time of attention's backward, ns, and which part of batched products is attention's.

        The backward is told by its ops: softmax gradients, and of the batched products in the
        backward pass as large a part as of those in the forward pass.
        """
        if not forward.any():
            return 0.0, 0.0
        op = a.kernels["op_name"]
        products = rows & name_matches(op, attention.FORWARD).to_numpy()
        second = facts.launched_under(a, r"^autograd::engine::evaluate_function")
        part = facts.duration(a, products & forward) / max(1, facts.duration(a, products & ~second))
        gradients = rows & second & name_matches(op, r"^aten::_softmax_backward_data$").to_numpy()
        spent = facts.duration(a, gradients & ~forward)
        return spent + part * facts.duration(a, products & second & ~forward), min(1.0, part)

    def _tokens(self, a: Analysis, rows: facts.Mask) -> int | None:
        """Length of the rows that softmax kernels normalise; None: shapes not recorded."""
        at = np.flatnonzero(rows & facts.of_family(a, "softmax"))
        inputs = a.trace.cpu["inputs"].gather(a.trace.gpu["op"].gather(at)).unique().drop_nulls()
        dims = a.trace.inputs["dims"].gather(inputs).str.extract(r"^\[\[[\d,\s]*?(\d+)\]", 1)
        longest = dims.cast(pl.Int64, strict=False).max()
        return None if longest is None else int(longest)  # type: ignore[arg-type]

    def _edit(self, under: str, factors: tuple[float, float, float], part: float) -> Edit:
        """Merge ``part`` of the kernels under these ops; the others keep their time."""
        middle, low, high = (1 - part * (1 - f) for f in factors)
        return Edit(
            op="merge",
            select=Select(on="gpu", kind=("kernel",), under=under),
            factor=middle,
            factor_low=low,
            factor_high=high,
        )

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """Written by hand; and PyTorch's fallback, which a fp32 mask or an odd head size causes."""
        fallback = TraceBuilder()
        for _ in range(4):
            with fallback.step():
                with (
                    fallback.op("aten::scaled_dot_product_attention"),
                    fallback.op("aten::_scaled_dot_product_attention_math"),
                ):
                    _attention(fallback, 1024)
                _linear(fallback)
                fallback.sync()
        return {
            "by hand": _model(_attention),
            "PyTorch's math fallback": fallback,
            "training": _model(_training),
        }

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """Fused attention; a classifier; a router of experts; products without softmax."""

        def fused(b: TraceBuilder, tokens: int) -> None:
            with b.op("aten::_flash_attention_forward", [[8, tokens, 16, 64]] * 3, "c10::Half"):
                b.launch("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>", 400)

        def classifier(b: TraceBuilder, tokens: int) -> None:
            with b.op("aten::addmm", [[1000], [tokens, 1024], [1024, 1000]], "c10::Half"):
                b.launch("ampere_fp16_s16816gemm_fp16_128x128_ldg8_tn", 300)
            with b.op("aten::_softmax", [[tokens, 1000]], "c10::Half"):
                b.launch("void (anonymous namespace)::cunn_SoftMaxForward<8, c10::Half>", 200)

        def experts(b: TraceBuilder, tokens: int) -> None:
            with b.op("aten::mm", [[tokens, 1024], [1024, 8]], "c10::Half"):
                b.launch("ampere_fp16_s16816gemm_fp16_64x64_ldg8_tn", 100)
            with b.op("aten::_softmax", [[tokens, 8]], "c10::Half"):
                b.launch("void (anonymous namespace)::softmax_warp_forward<c10::Half>", 200)
            with b.op("aten::bmm", [[8, tokens, 1024], [8, 1024, 4096]], "c10::Half"):
                b.launch("ampere_fp16_s16816gemm_fp16_128x128_ldg8_nn", 500)

        def interaction(b: TraceBuilder, tokens: int) -> None:
            for _ in range(2):
                with b.op("aten::bmm", [[tokens, 27, 64], [tokens, 64, 27]], "float"):
                    b.launch("ampere_sgemm_128x128_tn", 500)

        return {
            "flash attention": (_model(fused), "share < self.min_share"),
            "a classifier's softmax": (_model(classifier), "share < self.min_share"),
            "a router of experts": (_model(experts), "share < self.min_share"),
            "products of embeddings": (_model(interaction), "share < self.min_share"),
        }


def _model(block: object) -> TraceBuilder:
    b = TraceBuilder()
    for _ in range(4):
        with b.step():
            for _ in range(3):
                _linear(b)
                block(b, 1024)  # type: ignore[operator]
            b.sync()
    return b


def _training(b: TraceBuilder, tokens: int) -> None:
    """Forward, and the backward of the second product, the softmax and the first product."""
    _attention(b, tokens)
    scores = [128, tokens, tokens]
    for node in ("BmmBackward0", "SoftmaxBackward0", "BmmBackward0"):
        with b.op(f"autograd::engine::evaluate_function: {node}"):
            if node == "SoftmaxBackward0":
                with b.op("aten::_softmax_backward_data", [scores, scores], "c10::Half"):
                    b.launch("void (anonymous namespace)::softmax_warp_backward<c10::Half>", 250)
                continue
            for _ in range(2):
                with b.op("aten::bmm", [scores, [128, tokens, 64]], "c10::Half"):
                    b.launch("ampere_fp16_s16816gemm_fp16_128x128_ldg8_nn", 200)


def _linear(b: TraceBuilder) -> None:
    with b.op("aten::mm", [[8192, 1024], [1024, 1024]], "c10::Half"):
        b.launch("ampere_fp16_s16816gemm_fp16_128x128_ldg8_tn", 500)


def _attention(b: TraceBuilder, tokens: int) -> None:
    scores = [128, tokens, tokens]
    with b.op("aten::bmm", [[128, tokens, 64], [128, 64, tokens]], "c10::Half"):
        b.launch("ampere_fp16_s16816gemm_fp16_128x128_ldg8_tn", 200)
    with b.op("aten::div", [scores], "c10::Half"):
        b.launch("void at::native::vectorized_elementwise_kernel<4, BinaryFunctor<Half>>", 250)
    with b.op("aten::_softmax", [scores], "c10::Half"):
        b.launch("void (anonymous namespace)::softmax_warp_forward<c10::Half, float>", 250)
    with b.op("aten::bmm", [scores, [128, tokens, 64]], "c10::Half"):
        b.launch("ampere_fp16_s16816gemm_fp16_128x128_ldg8_nn", 200)
