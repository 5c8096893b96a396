"""Pointwise operators, reductions and normalisations that run far below the memory's rate."""

import re
from collections.abc import Iterator
from typing import Any

import polars as pl

from advisor.core.finding import SkippedCheck
from advisor.core.rule import Factor, Threshold
from advisor.measure import Analysis
from advisor.measure.device.shapes import OpInputs, Tensor
from advisor.measure.host.names import name_matches
from advisor.rules.support import kernel_work
from advisor.rules.support.below_rate import BelowRate, SlowCause
from advisor.rules.support.citations import RATES, public_traces
from advisor.testing import Examples, TraceBuilder

_COMPILED = "@torch.compile\ndef block(x, y): ..."


class LowBandwidth(BelowRate):
    """Memory-bound operators compute almost nothing compared with what they read and write, so a
    good kernel runs at the memory's rate. A kernel at a third of it usually reads across its rows
    (a transposed or sliced input). Other kernels reread a small tensor, normalise rows that are too
    short for their threads, or convert formats element by element. A cumulative sum along a
    dimension other than the last has one thread per column.

    The rule compares each operator's bytes (inputs once, outputs once) with what a STREAM copy
    reaches on such a GPU. It adds a kernel's start-up time. Small tensors that stay in the L2 cache
    come out above that rate. Another rule reports kernels with too few threads in flight."""

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
    attained_share = Factor(0.7, "of the memory's rate, that a better kernel reaches", RATES)
    best_attained_share = Factor(0.9, "of the memory's rate, at best", RATES)
    worst_attained_share = Factor(0.45, "of the memory's rate, at worst", RATES)

    families = (
        "elementwise", "reduction", "copy", "layout", "softmax", "normalisation", "pooling", "sort",
    )  # fmt: skip
    _work = "memory-bound operators"
    _rate = "the memory's rate"
    _names_costliest = True

    fix = (
        "Compile the function around the operator: the generated kernel reads along the rows and "
        "does the work of its neighbours in the same pass."
    )
    code = _COMPILED
    cases = {
        "transposed": {
            "fix": f"{fix} Otherwise reorder the input once, where the data is made.",
            "code": f"{_COMPILED}\n\n# or once, where x is made\nx = x.contiguous()",
        },
        "different orders": {
            "fix": f"{fix} Otherwise bring all inputs into one memory order, where they are made.",
            "code": f"{_COMPILED}\n\n# or once, where y is made\n"
            "y = torch.empty_like(x).copy_(y)   # in the order of x",
        },
        "channels last and another order": {
            "fix": f"{fix} Otherwise bring all inputs into channels-last order, where they are "
            "made.",
            "code": f"{_COMPILED}\n\n# or once, where y is made\n"
            "y = y.contiguous(memory_format=torch.channels_last)",
        },
        "small tensors": {"fix": f"{fix} Add small tensors in the format of the large one."},
        "scan": {
            "fix": "Scan along the last dimension, in a transposed copy. Along any other "
            "dimension, one thread adds up a whole column.",
            "code": "# instead of  x.cumsum(0), in two dimensions\n"
            "y = x.t().contiguous().cumsum(-1).t()",
        },
    }
    verify = "Profile again: advisor analyze --by operator shows more of the memory's rate."
    falsified_by = "more bytes in Nsight Compute than the kernel's tensors hold"

    def _report_unknown_rates(self, a: Analysis) -> Iterator[SkippedCheck]:
        """Return no check: the rules about matrix work report what is missing."""
        return iter(())

    def _keep_suitable(self, a: Analysis, slow: pl.DataFrame) -> pl.DataFrame:
        """Return the operators without sorts and selections: of that family, only scans move each
        value once."""
        return slow.filter((pl.col("family") != "sort") | name_matches(slow["op"], _SCAN_OPS))

    def _find_causes(
        self, a: Analysis, worst: dict[str, Any], inputs: OpInputs | None
    ) -> list[SlowCause]:
        return [_explain(str(worst["op"]), worst["family"], str(worst["kernel"]), inputs)]

    @staticmethod
    def examples() -> Examples:
        """Return slow operators, such as a layer norm over short rows (134 MB take 0.08 ms at the
        rate), and traps."""
        shape = [[4096, 8192], [4096, 8192]]
        return {
            "a transposed input": _build_step(
                "aten::add", [[4096, 8192], [4096, 8192]], 600, strides=[[1, 4096], [8192, 1]]
            ),
            "two memory orders": _build_step(
                "aten::add",
                [[64, 512, 32, 32], [64, 512, 32, 32]],
                600,
                strides=[[524288, 1, 16384, 512], [524288, 1024, 32, 1]],
            ),
            "short rows": _build_step(
                "aten::native_layer_norm",
                [[524288, 64], [], [64], [64], []],
                600,
                types=["c10::Half", "ScalarList", "c10::Half", "c10::Half", "Scalar"],
            ),
            # 1 MB: microseconds at the rate
            "a sum down the columns": _build_step(
                "aten::cumsum",
                [[8192, 8], []],
                1400,
                types=["long int", "Scalar"],
                kernel="void at::native::tensor_kernel_scan_outer_dim<long, unsigned int>",
            ),
            "a sort": (
                _build_step(
                    "aten::sort",
                    [[8192, 8], []],
                    1400,
                    types=["long int", "Scalar"],
                    kernel="radixSortKVInPlace",
                ),
                "slow.is_empty()",
            ),
            "near the rate": (_build_step("aten::add", shape, 145), "max_efficiency"),
            "small tensors": (
                _build_step("aten::add", [[128, 64], [128, 64]], 9),
                "slow.is_empty()",
            ),
            "small compared with products": (
                _build_step("aten::add", shape, 600, products=100_000),
                "min_share",
            ),
            "no shapes": (_build_step("aten::add", None, 600), "slow.is_empty()"),
        }


_SCAN_OPS = r"^aten::(?:cumsum|cumprod|logcumsumexp)$"
_ROW_NORMS = re.compile(r"layer_norm|rms_norm|softmax")
"""Operators that normalise along the last dimension."""


def _is_read_across(tensor: Tensor) -> bool:
    """Return whether neighbours along the last dimension are not adjacent in memory."""
    sizes = zip(tensor.shape, tensor.strides or (), strict=False)
    strides = [stride for size, stride in sizes if size > 1]
    return bool(strides) and strides[-1] > 1 and not kernel_work.is_channels_last(tensor)


def _explain(op: str, family: str, kernel: str, inputs: OpInputs | None) -> SlowCause:
    """Return the cause, as far as the recorded inputs show it."""
    tensors = [] if inputs is None else [x for x in inputs.tensors if x.elements > 1]
    largest = max(tensors, key=lambda tensor: tensor.elements, default=None)
    full_size = [x for x in tensors if largest is not None and x.elements == largest.elements]
    strided = [x for x in full_size if x.strides and len(x.strides) == len(x.shape)]
    if len({kernel_work.memory_order(x) for x in strided if x.shape == strided[0].shape}) > 1:
        any_channels_last = any(kernel_work.is_channels_last(x) for x in strided)
        return SlowCause(
            "its inputs have different memory orders",
            "channels last and another order" if any_channels_last else "different orders",
        )
    if "scan_outer_dim" in kernel:
        return SlowCause("it adds up along a dimension other than the last", "scan")
    # if all inputs have one order, a pointwise kernel reads contiguously, whatever the dimension
    reads_along = family == "elementwise" and strided and min(strided[0].strides or (0,)) == 1
    if any(_is_read_across(x) for x in strided) and not reads_along:
        return SlowCause("an input is transposed or sliced, and read across its rows", "transposed")
    reduces_rows = family == "reduction" and not any(
        kernel_work.is_channels_last(x) for x in strided
    )
    if largest is not None and largest.shape and (_ROW_NORMS.search(op) or reduces_rows):
        last_size = largest.shape[-1]
        if 0 < last_size <= 256:
            return SlowCause(f"rows of {last_size} elements are too short for the kernel's threads")
    if len({x.width for x in full_size if x.shape}) > 1:
        return SlowCause(
            "its tensors have different formats and are converted element by element",
            "small tensors",
        )
    if family in ("elementwise", "copy") and len(full_size) < len(tensors):
        return SlowCause("a smaller tensor is repeated along the larger one", "small tensors")
    if "elementwise_kernel" in kernel and "vectorized" not in kernel:
        return SlowCause("its kernel does not read and write whole vectors")
    return SlowCause("the recorded inputs do not show why")


def _build_step(
    op: str,
    shapes: list[list[int]] | None,
    us: float,
    *,
    types: list[str] | None = None,
    strides: list[list[int]] | None = None,
    products: float = 500,
    kernel: str = "void at::native::elementwise_kernel<128, 4>",
) -> TraceBuilder:
    b = TraceBuilder()
    for _ in b.steps():
        with b.op("aten::mm", [[8192, 4096], [4096, 2048]], "c10::Half"):
            b.launch("ampere_fp16_s16816gemm_fp16_128x128_ldg8_nn", products)
        for _ in range(4):
            with b.op(op, shapes, types or "c10::Half", strides=strides):
                b.launch(kernel, us)
        b.sync()
    return b
