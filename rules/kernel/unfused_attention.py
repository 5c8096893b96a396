"""Attention computed as product, softmax and product instead of one fused kernel."""

from collections.abc import Callable

import numpy as np
import polars as pl

from advisor.core.finding import (
    Edit,
    Finding,
    Operation,
    Outcomes,
    PassedCheck,
    Select,
    SkippedCheck,
)
from advisor.core.rule import Evidence, Factor, FrameworkAdvice, Rule, Threshold
from advisor.core.trace import JAX, TENSORFLOW
from advisor.measure import Analysis
from advisor.measure.host.names import name_matches
from advisor.measure.host.stacks import ENGINE_NODE
from advisor.replay.selection import mask_launched_under
from advisor.rules.support import kernel_work
from advisor.rules.support.citations import (
    CHOSEN,
    SAM_PAIR,
    SILENT_TRACES,
    TRIED_ON_TRACES,
    public_traces,
)
from advisor.rules.support.common import amount_per_step, example_steps, runs_code_of
from advisor.testing import Examples, TraceBuilder

SOFTMAX = r"^aten::(_softmax|_softmax_backward_data|_masked_softmax|_safe_softmax)$"
GRADIENT = r"^aten::_softmax_backward_data$"
MIN_OP_SHARE = 0.5
"""Minimum share of an operator's time in attention at which its kernels count as attention."""

_SDPA_MODELS = (
    "Llama Mistral Mixtral Qwen2 Qwen2Moe Qwen3 Qwen3Moe Gemma Phi Phi3 Cohere Olmo Olmo2 Falcon "
    "Starcoder2 GPT2 GPTNeoX GPTBigCode OPT Bert Roberta XLMRoberta DistilBert Bart MBart Whisper "
    "ViT DeiT Dinov2 CLIP Siglip Wav2Vec2 Hubert"
).split()
"""First parts of the module names of Hugging Face models with ``_supports_sdpa``."""
_SDPA_MODULES = rf"^(?:{'|'.join(_SDPA_MODELS)})(?:Self)?Attention$"
_EAGER_FRAMES = (
    rf"(?i)transformers/models/(?:{'|'.join(_SDPA_MODELS)}|gpt_neox|gpt_bigcode|xlm_roberta|qwen2_moe"
    r"|qwen3_moe)/modeling_\w+\.py\(\d+\): eager_attention_forward$"
)


def _is_sdpa_model(a: Analysis) -> bool:
    """Return whether modules or frames belong to a Hugging Face model that supports fused
    attention."""
    kinds = pl.Series([], dtype=pl.String) if a.layers is None else a.layers.nodes["kind"]
    return bool(kinds.str.contains(_SDPA_MODULES).any()) or runs_code_of(a, _EAGER_FRAMES)


class UnfusedAttention(Rule):
    """Attention as separate kernels writes the whole matrix of scores (tokens x tokens per head) to
    memory. It reads the matrix back for scaling, mask, softmax and dropout. A fused kernel keeps it
    on the chip, and its memory grows with tokens, not with their square.

    The gain follows from the shapes. Fused kernels need the FLOPs of the two products, in whole
    tiles of queries and keys, and read queries, keys and values once. They reach about 45% of the
    attainable rate of 16-bit products or of memory, as in slow-attention. Short sequences fill
    their tiles badly and gain little. In FP32 fused kernels run without the fast formats, and may
    gain nothing. Where shapes are not recorded, the two products are assumed to keep their time.

    The rule looks for two signs, both by op and by kernel. One is kernels launched under PyTorch's
    own fallback (``aten::_scaled_dot_product_attention_math``). The other is a softmax kernel
    between two batched products of activations (``aten::bmm``) on its stream. Only scaling, masks,
    casts and dropout may be in between. A softmax after a linear layer (``addmm``: a classifier, a
    router of experts) is not attention, nor is a ``log_softmax``. If flash, memory-efficient or
    cuDNN attention runs, there is no softmax kernel, and the rule reports the check as passed."""

    id = "unfused-attention"
    subject = "attention"
    title = "Attention is not fused"
    found_in = public_traces(
        "mi300_timesformer_inference pairs/sam_1_fp32_many_syncs pairs/particle_batch2 "
        "pairs/particle_batch32 pairs/particle_batch64 pairs/particle_batch128"
    )
    silent_in = (*SILENT_TRACES, "traces/pairs/sam_3_bf16_compiled_sdpa")
    validation_note = (
        "MI300 video inference: fires, with 80% of kernel time in product, softmax, product. Fires "
        "on SAM in FP32 (13%, gone where its authors used fused attention). Fires on a particle "
        "transformer (eight blocks of baddbmm, softmax, bmm). Silent where flash attention runs "
        "and in two-rank training (softmax next to products of embeddings)"
    )
    references = (
        "https://pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html",
        "https://arxiv.org/abs/2205.14135",
    )

    min_share = Threshold(0.05, "of kernel time", TRIED_ON_TRACES)
    max_between = Threshold(
        kernel_work.MAX_BETWEEN,
        "kernels between product and softmax: scale, mask, casts, dropout",
        TRIED_ON_TRACES,
    )
    attained_share = kernel_work.ATTAINED_SHARE
    best_attained_share = kernel_work.BEST_ATTAINED_SHARE
    worst_attained_share = Factor(
        0.2, "of the attainable rate, at worst: the memory-efficient kernel with a mask", SAM_PAIR
    )
    product_factor = Factor(
        1.0, "of the two products' own time, where shapes or rates are not known", CHOSEN
    )
    best_product_factor = Factor(0.5, "of the two products' own time, at best", CHOSEN)
    worst_product_factor = Factor(1.5, "of the two products' own time, at worst", CHOSEN)
    min_praised_share = Threshold(
        0.03, "of kernel time in fused attention, from which the report says so", TRIED_ON_TRACES
    )

    fix = (
        "Call F.scaled_dot_product_attention, which picks a fused kernel. If it falls back to "
        "math, give it what fused kernels take: FP16 or BF16 inputs (autocast), a head size that "
        "is a multiple of 8, a mask of the inputs' type. For a causal mask, pass is_causal=True "
        "instead."
    )
    code = (
        "out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # or None\n\n"
        "# why it falls back: forbid the fallback and read the warning\n"
        "from torch.nn.attention import SDPBackend, sdpa_kernel\n"
        "fused = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]\n"
        "with sdpa_kernel(fused):\n"
        "    out = F.scaled_dot_product_attention(q, k, v)"
    )
    verify = (
        "Profile again: one fused kernel (flash, fmha or attn in its name) in place of bmm and "
        "softmax. Peak memory falls too."
    )
    falsified_by = (
        "code that needs the matrix of scores itself (returned weights, a bias that no fused "
        "kernel takes): use FlexAttention there"
    )
    confidence = 0.85
    assumptions = (
        "fused kernels reach {attained_share:.0%} of the attainable rate "
        "({worst_attained_share:.0%} to {best_attained_share:.0%}), with sequences filled up to "
        "whole tiles",
    )
    cases = {
        "transformers' own attention": {
            "fix": "Load the model with attn_implementation='sdpa': the attention is "
            "transformers' own code. With 'sdpa' it calls F.scaled_dot_product_attention, which "
            "picks a fused kernel. Run it in FP16 or BF16, which fused kernels take.",
            "code": "# or the class that you use now\n"
            "model = AutoModelForCausalLM.from_pretrained(\n"
            '    name, attn_implementation="sdpa")\n'
            '# from a configuration: from_config(config, attn_implementation="sdpa")',
        },
        "inputs of 32 bits": {
            "assumptions": (
                "inputs are FP16 or BF16 (autocast), and fused kernels reach {attained_share:.0%} "
                "of the attainable rate; at worst the inputs stay as they are",
            )
        },
        "shapes or rates not known": {
            "assumptions": (
                "the fused kernel takes as long as the two products did ({best_product_factor:.0%} "
                "to {worst_product_factor:.0%} of that)",
            )
        },
    }

    framework_advice = {
        TENSORFLOW: FrameworkAdvice(
            "Use fused attention.", "keras.config.enable_flash_attention()"
        ),
        JAX: FrameworkAdvice(
            "Use fused attention.", 'jax.nn.dot_product_attention(q, k, v, implementation="cudnn")'
        ),
    }

    def check(self, a: Analysis) -> Outcomes:
        if a.device_id is None:
            return
        total = kernel_work.summed_duration(a, kernel_work.kernel_mask(a))
        if not total:
            return
        rows = kernel_work.compute_mask(a)
        blocks = kernel_work.find_blocks(a, self.max_between)
        attention = blocks.rows | self._find_backward(a, rows, blocks.rows)
        has_numbers = (attention & ~blocks.rows).any()
        backward_ns = 0.0 if has_numbers else self._estimate_backward(a, rows, blocks.rows)
        attention_ns = kernel_work.summed_duration(a, attention) + backward_ns
        share = attention_ns / total
        if share < self.min_share:
            yield from self._check_fused(a, rows, total, share)
            return
        fallback = kernel_work.summed_duration(a, kernel_work.is_fallback_kernel(a))
        fused = kernel_work.estimate_fused_time(a, blocks)
        case = "shapes or rates not known"
        if fused is not None:
            case = "inputs of 32 bits" if fused.wide else ""
        named = attention & kernel_work.family_mask(a, "softmax")
        kind = "PyTorch's math fallback" if fallback else "product, softmax, product"
        yield Finding(
            summary=(
                f"Unfused attention ({kind}) takes "
                f"{kernel_work.of_kernel_time(a, attention_ns, share)}. Each kernel writes and "
                "reads the whole matrix of scores."
            ),
            evidence=[
                self.compare("unfused attention, share of kernel time", share, "min_share"),
                amount_per_step(a, "unfused attention", attention_ns),
                Evidence("attention under the math fallback", fallback / total, "share"),
                Evidence("tokens per sequence", fused and fused.tokens, "count"),
            ],
            where=kernel_work.kernel_locations(a, named if named.any() else attention),
            edits=self._edits(a, rows, blocks, attention, backward_ns, fused),
            confidence_notes=[] if fused else ["shapes, or what the GPU attains, are not known"],
            **(self.case(case) if case else {}),
            **(self.case("transformers' own attention") if _is_sdpa_model(a) else {}),
        )

    def _check_fused(
        self, a: Analysis, rows: kernel_work.Mask, total: int, share: float
    ) -> Outcomes:
        fused = kernel_work.summed_duration(a, rows & kernel_work.family_mask(a, "attention"))
        if fused >= self.min_praised_share * total and share < 0.01:
            yield PassedCheck(text=f"attention runs fused ({fused / total:.0%} of kernel time)")
        unknown = (
            rows & kernel_work.family_mask(a, "softmax") & a.kernels["op_name"].is_null().to_numpy()
        )
        if kernel_work.summed_duration(a, unknown) >= 0.02 * total:
            yield SkippedCheck(
                what="whether softmax kernels belong to unfused attention",
                why="the kernels were launched outside the window or by a CUDA graph",
                record="a window in which the model runs eagerly",
            )

    def _find_backward(
        self, a: Analysis, rows: kernel_work.Mask, forward: kernel_work.Mask
    ) -> kernel_work.Mask:
        """Return a mask of ``trace.gpu``: the backward kernels of attention's operators (products,
        softmax, scaling, mask, casts), by autograd's sequence numbers."""
        chains = kernel_work.backward_chains(a, np.where(forward, 0, -1))
        return rows & (chains >= 0) & ~forward

    def _estimate_backward(
        self, a: Analysis, rows: kernel_work.Mask, forward: kernel_work.Mask
    ) -> float:
        """Return the time, ns, of attention's backward pass where sequence numbers are not
        recorded: softmax gradients, and the same share of batched products as in the forward
        pass."""
        if not forward.any():
            return 0.0
        op = a.kernels["op_name"]
        products = rows & name_matches(op, kernel_work.FORWARD).to_numpy()
        in_backward = mask_launched_under(a, ENGINE_NODE)
        in_forward = kernel_work.summed_duration(a, products & ~in_backward)
        attention_share = kernel_work.summed_duration(a, products & forward) / max(1, in_forward)
        gradients = rows & in_backward & name_matches(op, GRADIENT).to_numpy()
        spent = kernel_work.summed_duration(a, gradients & ~forward)
        return spent + attention_share * kernel_work.summed_duration(
            a, products & in_backward & ~forward
        )

    def _edits(
        self,
        a: Analysis,
        rows: kernel_work.Mask,
        blocks: kernel_work.AttentionBlocks,
        attention: kernel_work.Mask,
        backward_ns: float,
        fused: kernel_work.FusedEstimate | None,
    ) -> list[Edit]:
        """Merge the kernels of ``attention``, by operator. Other kernels of the operators keep
        their time; operators used mostly elsewhere (additions, casts) are scaled, not merged."""
        op = a.kernels["op_name"]
        share = pl.DataFrame({"op": op, "dur": a.trace.gpu["dur"], "own": attention})
        share = (
            share.filter(pl.Series(rows))
            .group_by("op")
            .agg(part=pl.col("dur").filter(pl.col("own")).sum() / pl.col("dur").sum())
            .drop_nulls("op")
            .with_columns(pl.col("op").cast(pl.String))
        )
        operators = share.filter(pl.col("part") >= MIN_OP_SHARE)["op"].to_list()
        under = [rf"{kernel_work.FORWARD}|{SOFTMAX}", kernel_work.exact_pattern(operators)]
        if kernel_work.is_fallback_kernel(a).any():
            under.append(kernel_work.MATH)
        select = Select(on="gpu", kind=("kernel",), under="|".join(under))
        selected = mask_launched_under(a, select.under) & rows
        affected_ns = kernel_work.summed_duration(a, attention & selected) + backward_ns
        training = backward_ns > 0 or bool((attention & ~blocks.rows).any())
        fused_ns = self._estimate_fused(a, blocks, fused, training=training)
        saved = [max(0.0, affected_ns - ns) for ns in fused_ns]
        edits = []
        for part in kernel_work.select_by_name(a, selected, select, attention):
            gains = (ns * part.share for ns in saved)
            operation: Operation = "merge" if part.mostly_own else "scale"
            edits.append(kernel_work.scale_kernels(a, part.rows, gains, part.select, operation))
        remaining = attention & ~selected
        if remaining.any():
            mixed = share.filter(pl.col("part") > 0, pl.col("part") < MIN_OP_SHARE)["op"].to_list()
            select = Select(on="gpu", kind=("kernel",), under=kernel_work.exact_pattern(mixed))
            mixed_rows = mask_launched_under(a, select.under) & rows & ~selected
            remaining_ns = float(kernel_work.summed_duration(a, remaining & mixed_rows))
            edits.append(kernel_work.scale_kernels(a, mixed_rows, [remaining_ns] * 3, select))
        return edits

    def _estimate_fused(
        self,
        a: Analysis,
        blocks: kernel_work.AttentionBlocks,
        fused: kernel_work.FusedEstimate | None,
        *,
        training: bool,
    ) -> tuple[float, float, float]:
        """Estimate the time of the fused kernels, ns: expected, at best, at worst."""
        passes = 1 + kernel_work.BACKWARD * training
        if fused is None:
            op = a.kernels["op_name"]
            products = blocks.rows & name_matches(op, kernel_work.FORWARD).to_numpy()
            products_ns = kernel_work.summed_duration(a, products) * passes
            return (
                products_ns * self.product_factor,
                products_ns * self.best_product_factor,
                products_ns * self.worst_product_factor,
            )
        half_ns = fused.half_ns * passes
        worst = half_ns / self.worst_attained_share
        if fused.wide:
            worst = max(worst, fused.full_ns * passes)
        return half_ns / self.attained_share, half_ns / self.best_attained_share, worst

    @staticmethod
    def examples() -> Examples:
        """Return hand-written attention and PyTorch's fallback, and traps."""

        def add_fallback(b: TraceBuilder) -> None:
            with (
                b.op("aten::scaled_dot_product_attention"),
                b.op("aten::_scaled_dot_product_attention_math"),
            ):
                _add_attention(b)
            _add_linear(b)

        half, gemm = "c10::Half", "ampere_fp16_s16816gemm_fp16_128x128_ldg8"
        softmax = "void (anonymous namespace)::"

        def add_fused(b: TraceBuilder) -> None:
            kernel = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>"
            b.run("aten::_flash_attention_forward", kernel, 400, [[8, TOKENS, 16, 64]] * 3, half)

        def add_classifier(b: TraceBuilder) -> None:
            shapes = [[1000], [TOKENS, 1024], [1024, 1000]]
            b.run("aten::addmm", f"{gemm}_tn", 300, shapes, half)
            kernel = f"{softmax}cunn_SoftMaxForward<8, c10::Half>"
            b.run("aten::_softmax", kernel, 200, [[TOKENS, 1000]], half)

        def add_experts(b: TraceBuilder) -> None:
            kernel = "ampere_fp16_s16816gemm_fp16_64x64_ldg8_tn"
            b.run("aten::mm", kernel, 100, [[TOKENS, 1024], [1024, 8]], half)
            kernel = f"{softmax}softmax_warp_forward<c10::Half>"
            b.run("aten::_softmax", kernel, 200, [[TOKENS, 8]], half)
            shapes = [[8, TOKENS, 1024], [8, 1024, 4096]]
            b.run("aten::bmm", f"{gemm}_nn", 500, shapes, half)

        def add_interaction(b: TraceBuilder) -> None:
            shapes = [[TOKENS, 27, 64], [TOKENS, 64, 27]]
            b.run("aten::bmm", "ampere_sgemm_128x128_tn", 500, shapes, times=2)

        guard = "share < self.min_share"
        return {
            "by hand": _build_model(_add_attention),
            "PyTorch's math fallback": example_steps(add_fallback),
            "training": _build_model(_add_training),
            "flash attention": (_build_model(add_fused), guard),
            "a classifier's softmax": (_build_model(add_classifier), guard),
            "a router of experts": (_build_model(add_experts), guard),
            "products of embeddings": (_build_model(add_interaction), guard),
        }


TOKENS = 1024
SCORES = [128, TOKENS, TOKENS]


def _build_model(block: Callable[[TraceBuilder], None]) -> TraceBuilder:
    def body(b: TraceBuilder) -> None:
        for _ in range(3):
            _add_linear(b)
            block(b)

    return example_steps(body)


def _add_training(b: TraceBuilder) -> None:
    """Add the forward pass, and the backward of the second product, the softmax and the first
    product."""
    _add_attention(b)
    for node in ("BmmBackward0", "SoftmaxBackward0", "BmmBackward0"):
        with b.op(f"autograd::engine::evaluate_function: {node}"):
            if node == "SoftmaxBackward0":
                kernel = "void (anonymous namespace)::softmax_warp_backward<c10::Half>"
                b.run("aten::_softmax_backward_data", kernel, 250, [SCORES, SCORES], "c10::Half")
                continue
            kernel = "ampere_fp16_s16816gemm_fp16_128x128_ldg8_nn"
            b.run("aten::bmm", kernel, 200, [SCORES, [128, TOKENS, 64]], "c10::Half", times=2)


def _add_linear(b: TraceBuilder) -> None:
    kernel = "ampere_fp16_s16816gemm_fp16_128x128_ldg8_tn"
    b.run("aten::mm", kernel, 500, [[8192, 1024], [1024, 1024]], "c10::Half")


def _add_attention(b: TraceBuilder) -> None:
    gemm, half = "ampere_fp16_s16816gemm_fp16_128x128_ldg8", "c10::Half"
    pointwise = "void at::native::vectorized_elementwise_kernel<4, BinaryFunctor<Half>>"
    softmax = "void (anonymous namespace)::softmax_warp_forward<c10::Half, float>"
    b.run("aten::bmm", f"{gemm}_tn", 200, [[128, TOKENS, 64], [128, 64, TOKENS]], half)
    b.run("aten::div", pointwise, 250, [SCORES], half)
    b.run("aten::_softmax", softmax, 250, [SCORES], half)
    b.run("aten::bmm", f"{gemm}_nn", 200, [SCORES, [128, TOKENS, 64]], half)
