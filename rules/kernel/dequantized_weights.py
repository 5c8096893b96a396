"""Weights stored in 4 or 8 bits that every pass unpacks for the product."""

import numpy as np
import polars as pl

from advisor.core.finding import Edit, Finding, Outcomes, Select
from advisor.core.rule import Evidence, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.host.names import name_matches
from advisor.measure.memory.trace_memory import measure_held
from advisor.rules.support.citations import CHOSEN, SILENT_TRACES
from advisor.rules.support.common import amount_per_step, device_places, of_step
from advisor.testing import Examples, TraceBuilder

KERNELS = (
    r"kDequantizeBlockwise|dequantize_weights|dequantize_block|kdequant_mm_int32|"
    r"reconstruct_(?:gptq|exllama)"
)
"""Pattern of the kernels that unpack weights: of bitsandbytes, AWQ, GGUF and GPTQ."""


class DequantizedWeights(Rule):
    """Weights in 4 or 8 bits save memory. Where no kernel multiplies them directly, each pass first
    unpacks them to 16 bits and writes them to memory. QLoRA does so in forward and backward, and
    once more under activation checkpointing. The time depends on the weights alone: a batch of one
    sample unpacks as much as a batch of many.

    The rule counts kernels that are known by name to unpack weights. Kernels that unpack inside the
    product are not among them, nor optimizers with 8-bit states."""

    id = "dequantized-weights"
    title = "Quantized weights are unpacked again in each pass"
    silent_in = SILENT_TRACES
    references = (
        "https://huggingface.co/docs/transformers/quantization/bitsandbytes",
        "https://arxiv.org/abs/2305.14314",
        "https://docs.pytorch.org/ao/stable/",
    )

    min_share = Threshold(0.05, "of the step in kernels that unpack weights", CHOSEN)

    fix = (
        "If the model fits in 16 bits, load its frozen weights in 16 bits. Else let each pass "
        "unpack for more samples: a larger micro-batch with fewer accumulation steps."
    )
    code = (
        "# in place of load_in_4bit or load_in_8bit\n"
        "# keep your other arguments\n"
        "model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)"
    )
    inference = {
        "fix": "Use kernels that multiply the packed weights directly, or load the model in 16 "
        "bits if it fits.",
        "code": "from torchao.quantization import Int4WeightOnlyConfig, quantize_\n"
        "# of the model in 16 bits\n"
        "quantize_(model, Int4WeightOnlyConfig(group_size=128))\n"
        "model = torch.compile(model)",
        "falsified_by": "kernels for packed weights that are no faster at this batch size",
    }
    verify = "Profile again: these kernels are gone. Check the peak of memory."
    falsified_by = "a step in 16 bits that takes as long"
    assumptions = ("weights in 16 bits fit, at two to four times their bytes",)
    confidence = 0.8

    def check(self, a: Analysis) -> Outcomes:
        if a.device_id is None or not a.span_ns:
            return
        chosen = name_matches(a.trace.gpu["name"], KERNELS).to_numpy() & a.in_window
        busy_ns = a.device_busy(chosen).total
        share = busy_ns / a.span_ns
        if share < self.min_share:
            return
        rows = np.flatnonzero(chosen)
        work = a.trace.gpu[rows].select("ts", "dur", "op", gpu=pl.Series(rows))
        reserved, capacity = measure_held(a)
        free = max(0, capacity - reserved) if reserved is not None and capacity else None
        yield Finding(
            summary=(
                f"Unpacking quantized weights takes {of_step(a, busy_ns)}, as much for one sample "
                "as for many."
            ),
            evidence=[
                amount_per_step(a, "unpacking weights", busy_ns),
                amount_per_step(a, "kernels that unpack", len(rows), "count"),
                self.compare("unpacking, share", share, "min_share", per=a.per),
                *([Evidence("free GPU memory", free, "bytes")] if free is not None else []),
            ],
            where=device_places(a, work, "dur"),
            edits=[Edit(op="remove", select=Select(on="gpu", kind=("kernel",), name=KERNELS))],
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "4 bits": _build_training(unpack_us=80),
            "large batches": (
                _build_training(unpack_us=80, product_us=4000),
                "share < self.min_share",
            ),
            "16 bits": (_build_training(unpack_us=0), "share < self.min_share"),
        }


def _build_training(*, unpack_us: float, product_us: float = 200) -> TraceBuilder:
    """Build forward and backward products, whose weights are unpacked first."""
    b = TraceBuilder()
    for _ in b.steps():
        for name in ("MatMul4Bit", "autograd::engine::evaluate_function: MatMul4BitBackward"):
            for _ in range(12):
                with b.op(name):
                    if unpack_us:
                        b.launch("kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 1>", unpack_us)
                    b.product(product_us)
        b.sync()
    return b
