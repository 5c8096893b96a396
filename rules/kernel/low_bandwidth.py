"""Pointwise operators, reductions and normalisations far below the memory's rate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from advisor.core.finding import Finding, Outcome, Threshold
from advisor.core.text import percent
from advisor.measure import Analysis
from advisor.measure.device.shapes import OpInputs
from advisor.rules.kernel import facts, rates
from advisor.rules.sources import RATES
from advisor.testing import TraceBuilder

FAMILIES = ("elementwise", "reduction", "copy", "layout", "softmax", "normalisation", "pooling")


class LowBandwidth(rates.Rated):
    """What these operators compute is nothing beside what they read and write, so a good kernel
    runs at the memory's rate. One that reaches a third of it reads across its rows (a transposed
    or sliced input), reads the same small tensor again and again, normalises rows that are too
    short for its threads, or converts between formats element by element.

    Each operator's bytes (inputs once, outputs once) are held against what a STREAM copy reaches on
    such a GPU, with a kernel's own start-up on top; small tensors that stay in the L2 cache come
    out above. Kernels that hold too few threads are another rule's business as well.
    """

    id = "low-bandwidth"
    title = "Memory-bound operators reach a third of the memory's rate"
    category = "kernel"
    found_in = (
        "traces/pairs/particle_batch128",
        "traces/pairs/particle_batch64",
    )
    silent_in = (
        "traces/h100_qwen_inference",
        "traces/a100_train_6steps",
        "traces/v100_train_copy_heavy",
    )
    validated_on = (
        "A100 training of a particle transformer at batch 128 (layer norm over 128 elements at "
        "21 % of the rate: fires, worth nothing there, since the host decides); A100 and H100 "
        "otherwise (50 to 127 %: silent)"
    )
    references = (
        "https://docs.nvidia.com/cuda/cuda-c-best-practices-guide/#coalesced-access-to-global-memory",
        "https://pytorch.org/tutorials/recipes/recipes/tuning_guide.html#fuse-operations",
    )

    max_efficiency = Threshold(1 / 3, "of the memory's measured rate", RATES)
    reach = Threshold(0.7, "of the memory's rate, that a better kernel comes to", RATES)
    best_reach = Threshold(0.9, "of the memory's rate, at best", RATES)
    worst_reach = Threshold(0.45, "of the memory's rate, at worst", RATES)

    fix = (
        "Compile the function around it: the generated kernel reads along the rows and does what "
        "comes before and after in the same pass. Else keep tensors in the order in which they are "
        "read: transpose once, where the data is made, not in every operator, and add small "
        "tensors in the format of the large one."
    )
    code = (
        "@torch.compile\n"
        "def block(x, y): ...\n"
        "# or once, where it is made:\n"
        "x = x.transpose(1, 2).contiguous()"
    )
    verify = "Profile again: more of the memory's rate in advisor analyze --operators."
    falsified_by = "Nsight Compute shows that the kernel moves more bytes than its tensors"

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Operators below the limit, and their share of kernel time."""
        if not facts.worth_looking(a, self.min_busy):
            return
        low = rates.far_below(a, FAMILIES, self.max_efficiency)
        if low.is_empty() or float(low["share"].sum()) < self.min_share:
            return
        worst = low.sort("saved", descending=True).row(0, named=True)
        cause = _why(worst, rates.inputs_of(a, worst["inputs"]))
        change, rows = self.edit(a, low)
        yield Finding(
            summary=(
                f"{low['share'].sum():.0%} of kernel time goes into memory-bound operators at "
                f"{percent(worst['efficiency'])} of the memory's rate, first {worst['op']} "
                f"{rates.shapes_of(a, worst['inputs'])}: {cause}."
            ),
            evidence=self.evidence(a, low),
            where=facts.locations(a, rows),
            edits=[change],
        )

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """A transposed input; a layer norm over short rows: 134 MB take 0.08 ms at the rate."""
        return {
            "a transposed input": _step(
                "aten::add", [[4096, 8192], [4096, 8192]], 600, strides=[[1, 4096], [8192, 1]]
            ),
            "short rows": _step(
                "aten::native_layer_norm",
                [[524288, 64], [], [64], [64], []],
                600,
                types=["c10::Half", "ScalarList", "c10::Half", "c10::Half", "Scalar"],
            ),
        }

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """At 80 % of the rate; small tensors; beside products; no shapes."""
        shape = [[4096, 8192], [4096, 8192]]
        return {
            "near the rate": (_step("aten::add", shape, 145), "max_efficiency"),
            "small tensors": (_step("aten::add", [[128, 64], [128, 64]], 9), "low.is_empty()"),
            "beside products": (_step("aten::add", shape, 600, products=100_000), "min_share"),
            "no shapes": (_step("aten::add", None, 600), "low.is_empty()"),
        }


def _why(worst: dict[str, Any], x: OpInputs | None) -> str:
    """The cause, as far as the recorded inputs tell it."""
    tensors = [] if x is None else [tensor for tensor in x.tensors if tensor.elements > 1]
    if tensors:
        largest = max(tensors, key=lambda tensor: tensor.elements)
        for tensor in tensors:
            steps = tensor.strides
            if not steps or not tensor.shape or tensor.elements < largest.elements:
                continue
            inner = [step for size, step in zip(tensor.shape, steps, strict=False) if size > 1]
            if inner and inner[-1] > 1:
                return "an input is transposed or sliced, and read across its rows"
        if worst["family"] in ("normalisation", "softmax", "reduction"):
            last = largest.shape[-1] if largest.shape else 0
            if 0 < last <= 256:
                return f"rows of {last} elements are too short for the kernel's threads"
        if len({tensor.width for tensor in tensors if tensor.shape}) > 1:
            return "its tensors have different formats, and are converted element by element"
        if any(tensor.elements < largest.elements for tensor in tensors):
            return "a smaller tensor is repeated along the larger one"
    return "its kernel does not read and write whole vectors"


def _step(
    op: str,
    shapes: list[list[int]] | None,
    us: float,
    *,
    types: list[str] | None = None,
    strides: list[list[int]] | None = None,
    products: float = 500,
) -> TraceBuilder:
    b = TraceBuilder()
    for _ in range(4):
        with b.step():
            with b.op("aten::mm", [[8192, 4096], [4096, 2048]], "c10::Half"):
                b.launch("ampere_fp16_s16816gemm_fp16_128x128_ldg8_nn", products)
            for _ in range(4):
                with b.op(op, shapes, types or "c10::Half", strides=strides):
                    b.launch("void at::native::elementwise_kernel<128, 4>", us)
            b.sync()
    return b
