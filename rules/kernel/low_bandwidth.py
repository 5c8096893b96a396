"""Pointwise operators, reductions and normalisations far below the memory's rate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from advisor.core.finding import SkippedCheck
from advisor.core.rule import Threshold
from advisor.measure import Analysis
from advisor.measure.device.shapes import OpInputs
from advisor.rules.citations import RATES, public_traces
from advisor.rules.kernel.rates import BelowRate, SlowCause
from advisor.testing import Examples, TraceBuilder


class LowBandwidth(BelowRate):
    """Memory-bound operators compute almost nothing compared with what they read and write, so a
    good kernel runs at the memory's rate. One at a third of it usually reads across its rows (a
    transposed or sliced input). Or it reads the same small tensor again and again, or normalises
    rows that are too short for its threads. Or it converts between formats element by element.

    The rule compares each operator's bytes (inputs once, outputs once) with what a STREAM copy
    reaches on such a GPU. It adds a kernel's own start-up. Small tensors that stay in the L2 cache
    come out above that rate. Kernels with too few threads in flight are another rule's finding.
    """

    id = "low-bandwidth"
    title = "Memory-bound operators use a third of the memory bandwidth or less"
    found_in = public_traces("pairs/particle_batch128 pairs/particle_batch64")
    silent_in = public_traces("h100_qwen_inference a100_train_6steps v100_train_copy_heavy")
    validation_note = (
        "A100 training of a particle transformer at batch 128: fires on layer norm over 128 "
        "elements at 21% of the rate. It has no gain there, because the host is the bottleneck. "
        "Silent on A100 and H100 otherwise (50 to 127%)"
    )
    references = (
        "https://docs.nvidia.com/cuda/cuda-c-best-practices-guide/#coalesced-access-to-global-memory",
        "https://pytorch.org/tutorials/recipes/recipes/tuning_guide.html#fuse-operations",
    )

    max_efficiency = Threshold(1 / 3, "of the memory's measured rate", RATES)
    reach = Threshold(0.7, "of the memory's rate, that a better kernel reaches", RATES)
    best_reach = Threshold(0.9, "of the memory's rate, at best", RATES)
    worst_reach = Threshold(0.45, "of the memory's rate, at worst", RATES)

    families = (
        "elementwise", "reduction", "copy", "layout", "softmax", "normalisation", "pooling",
    )  # fmt: skip
    _work = "memory-bound operators"
    _rate = "the memory's rate"
    _names_costliest = True

    fix = (
        "Compile the function around the operator: the generated kernel reads along the rows and "
        "does its neighbours' work in the same pass. Otherwise keep tensors in the order in which "
        "they are read: transpose once, where the data is made. Add small tensors in the format of "
        "the large one."
    )
    code = (
        "@torch.compile\n"
        "def block(x, y): ...\n\n"
        "# or once, where x is made\n"
        "x = x.transpose(1, 2).contiguous()"
    )
    verify = "Profile again: advisor analyze --by operator shows more of the memory's rate."
    falsified_by = "more bytes in Nsight Compute than the kernel's tensors have"

    def _unknown(self, a: Analysis) -> Iterator[SkippedCheck]:
        """Return nothing: the rules about matrix work ask for what is missing."""
        return iter(())

    def _causes(
        self, a: Analysis, worst: dict[str, Any], inputs: OpInputs | None
    ) -> list[SlowCause]:
        return [SlowCause(_why(worst["family"], inputs))]

    @staticmethod
    def examples() -> Examples:
        """A transposed input; a layer norm over short rows: 134 MB take 0.08 ms at the rate. At
        80% of the rate; small tensors; beside products; no shapes."""
        shape = [[4096, 8192], [4096, 8192]]
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
            "near the rate": (_step("aten::add", shape, 145), "max_efficiency"),
            "small tensors": (_step("aten::add", [[128, 64], [128, 64]], 9), "slow.is_empty()"),
            "beside products": (_step("aten::add", shape, 600, products=100_000), "min_share"),
            "no shapes": (_step("aten::add", None, 600), "slow.is_empty()"),
        }


def _why(family: str, inputs: OpInputs | None) -> str:
    """Name the cause, as far as the recorded inputs show it."""
    tensors = [] if inputs is None else [x for x in inputs.tensors if x.elements > 1]
    if tensors:
        largest = max(tensors, key=lambda tensor: tensor.elements)
        for tensor in tensors:
            if not tensor.strides or not tensor.shape or tensor.elements < largest.elements:
                continue
            sizes = zip(tensor.shape, tensor.strides, strict=False)
            strides = [stride for size, stride in sizes if size > 1]
            if strides and strides[-1] > 1:
                return "an input is transposed or sliced, and read across its rows"
        if family in ("normalisation", "softmax", "reduction"):
            last = largest.shape[-1] if largest.shape else 0
            if 0 < last <= 256:
                return f"rows of {last} elements are too short for the kernel's threads"
        if len({tensor.width for tensor in tensors if tensor.shape}) > 1:
            return "its tensors have different formats and are converted element by element"
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
    for _ in b.steps():
        with b.op("aten::mm", [[8192, 4096], [4096, 2048]], "c10::Half"):
            b.launch("ampere_fp16_s16816gemm_fp16_128x128_ldg8_nn", products)
        for _ in range(4):
            with b.op(op, shapes, types or "c10::Half", strides=strides):
                b.launch("void at::native::elementwise_kernel<128, 4>", us)
        b.sync()
    return b
