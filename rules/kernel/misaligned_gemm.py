"""Matrix products whose rows do not start on 16-byte boundaries."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import polars as pl

from advisor.core.finding import Finding, Outcomes, Select
from advisor.core.rule import Citation, Evidence, Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.shapes import OpInputs, Tensor
from advisor.measure.host.operators import KERNEL_NS, Roofs, attainable_roofs
from advisor.rules.support import kernel_work
from advisor.rules.support.citations import (
    ALIGNED_RATE,
    ALIGNED_REACH,
    ENGINE_FLOOR,
    MATMUL_GUIDE,
    public_traces,
)
from advisor.rules.support.common import amount_per_step, example_steps
from advisor.rules.support.framework_advice import in_any_language
from advisor.testing import Examples, TraceBuilder

FIRST_MATRIX = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Ops that multiply two matrices -> position of the first matrix among the inputs."""
LAYOUT = re.compile(r"_([nt])([nt])(?=[_>\s(]|$)")
ALIGNED = re.compile(r"_align(\d+)|_ldg(\d+)[_>]")
ALWAYS_ALIGNED = re.compile(r"nvjet|_tma_|sm90_xmma|sm100_xmma|warpgroup")
"""Kernels that load by TMA, which needs rows on 16-byte boundaries."""


PAD_TO = 64
"""Multiple, in elements, to which long dimensions are padded."""
MAX_PADDING = 1 / 8
"""Maximum share that such padding may add to a dimension. Shorter dimensions are padded to 16
bytes."""
MIN_VOCABULARY = 20_000
"""Minimum width that counts as a vocabulary. Hidden sizes are smaller."""
_PADDED = "def padded(n, to=64):\n    return (n + to - 1) // to * to"
MAX_SIMILAR_RATIO = 4.0
"""Maximum ratio of two products' times at the attainable rate, up to which they count as
similar."""


class MisalignedProduct(NamedTuple):
    """Products with the same kernel name, op and inputs."""

    op: str
    dims: str
    padding: str
    """Dimensions to pad, as text. Empty if shapes are not recorded."""
    vocabulary: bool = False
    """Whether the width is that of a vocabulary."""


class TimedProduct(NamedTuple):
    """Times of products with the same kernel name, op and inputs."""

    dur: int
    """Time of all calls, ns."""
    ideal: float
    """Time of all calls, padded, at the attainable rate, ns; 0 if unknown."""
    calls: int
    of: tuple[str | None, bool]
    """Number format of the padded product, and whether FLOPs (not bytes) limit it."""


class PaddingSaving(NamedTuple):
    times: tuple[float, ...]
    """Saved time of all calls, ns: expected, at best, at worst."""
    by_rate: bool
    """Whether most of it follows from rates and not from the default factor."""


class MisalignedGemm(Rule):
    """A matrix product whose contiguous dimension is not a multiple of 16 bytes cannot use
    vectorised loads. The library falls back to a tensor-core kernel with narrow loads, or to the
    CUDA cores. Padding that dimension (a vocabulary of 50257 to 50304) costs almost nothing.

    Only dimensions along which memory is contiguous matter, and the layout decides which these are.
    An odd N, or odd K and M, is misaligned in every layout. For ``C[M,N] = A[M,K] B[K,N]``, C and a
    row-major B are contiguous along N, a row-major A and a transposed B along K. M counts only when
    A itself is transposed (the weight gradient). So M, the number of tokens, may have any value in
    the forward pass. PyTorch's ``pattern_matcher``, which tests every dimension, flags 73 of 73
    products of a public H100 trace, all for M alone and all at full speed.

    CUTLASS writes into a kernel's name what it was compiled for (``align4``, ``align8``). Otherwise
    the layout comes from the recorded strides, or from the ``nn``/``nt``/``tn`` in the name. That
    is cuBLAS's column-major view: the first letter is B (``t``: contiguous along K), the second A
    (``n``: contiguous along K). On public A100 traces this predicts the alignment in the name of
    1,942 of 1,946 products. The other four are slices with an odd row length.

    The gain comes from rates. At best, a padded product takes its FLOPs at the rate measured for
    products on such a GPU, or its bytes at the memory's rate. It is then slowed down as much as
    aligned products of the recording with the same format and limit and similar work. Without any,
    80% of the rate is assumed: large aligned products of busy public traces reach 72% and more.
    Padding adds FLOPs and bytes, too. So an H100, whose tensor cores need wide loads for their own
    instructions, gains far more than an A100. There, TF32 kernels with narrow loads reach 0.56 to
    0.70 of the FLOP rate of those with wide loads, in five classes of arithmetic intensity. This
    factor is used where shapes or rates are unknown."""

    id = "misaligned-gemm"
    subject = "matrix products"
    title = "GEMM dimensions are not aligned for tensor cores"
    found_in = ("traces/a100_train_6steps", "traces/h100/tab_cross_width")
    silent_in = public_traces(
        "v100_train_copy_heavy two_ranks_rank0 b200_eager h100_bert_small_inference"
    )
    validation_note = (
        "A100 training (fires: K or N of 30, 647, 9375 … ran on align1 kernels, 11% of kernel "
        "time); B200 and H100 in BF16 (73 and 25 products odd in M alone: not flagged; H100's "
        "vocabulary of 30522 is the one that ran on align2); names agree with shapes, see above"
    )
    sources = (Citation("NVIDIA's guide: multiples of 16 bytes", MATMUL_GUIDE.address),)
    references = (
        "https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/",
        "https://docs.nvidia.com/cuda/cublas/#tensor-core-usage",
    )

    min_share = Threshold(
        0.03, "of kernel time; with the factor below, about 1% of a busy step", ENGINE_FLOOR
    )
    min_busy = kernel_work.MIN_BUSY
    attained_share = Factor(
        0.8, "of the attainable rate, that padded products reach if none is aligned", ALIGNED_REACH
    )
    best_attained_share = Factor(1.0, "of the attainable rate, at best", ALIGNED_REACH)
    worst_attained_share = Factor(0.6, "of the attainable rate, at worst", ALIGNED_REACH)
    factor = Factor(0.6, "new duration over old where rates are unknown", ALIGNED_RATE)
    best_factor = Factor(0.5, "new duration over old, at best", ALIGNED_RATE)
    worst_factor = Factor(0.85, "new duration over old, at worst", MATMUL_GUIDE)

    fix = (
        "Pad the misaligned dimensions to a multiple of 64 elements (of 8, if they are below 64). "
        "Pad every layer that reads or writes such a width; the zeros do not change the "
        "result. The batch or token dimension needs no padding."
    )
    code = (
        f"{_PADDED}\n\n"
        "# pad each layer that reads or writes such a width\n"
        "self.first = nn.Linear(padded(width), padded(hidden))\n"
        "y = self.first(F.pad(x, (0, padded(width) - width)))[..., :hidden]"
    )
    verify = (
        "Profile again: the kernels of these products say align8 (16 bit) or align4 (TF32), or "
        "nvjet, and take less time."
    )
    falsified_by = (
        "a padded product that is no faster when timed alone (torch.utils.benchmark): it is bound "
        "by something else"
    )
    confidence = 0.75
    assumptions = (
        "padded products are as fast as similar aligned ones of the recording, or reach "
        "{attained_share:.0%} of the attainable rate ({worst_attained_share:.0%} to "
        "{best_attained_share:.0%})",
    )
    cases = {
        "a vocabulary": {
            "fix": "Set the vocabulary in the model's configuration to a multiple of 64, for both "
            "embedding and head. Targets stay the same; cut off the logits of the added tokens. "
            "Pad other misaligned dimensions the same way. The token dimension needs no padding.",
            "code": f"{_PADDED}\n\n"
            "self.embedding = nn.Embedding(padded(vocab), hidden)\n"
            "self.head = nn.Linear(hidden, padded(vocab))\n"
            "logits = self.head(hidden_states)[..., :vocab]",
        },
        "rates are not known": {
            "assumptions": (
                "an aligned kernel takes {factor:.0%} of the time ({best_factor:.0%} to "
                "{worst_factor:.0%}), as on public A100 traces",
            )
        },
    }

    framework_advice = in_any_language(
        "Pad the dimensions of matrices to multiples of 8 (16-bit) or 16 (8-bit) elements.",
        falsified_by="a padded product that is no faster when timed alone: it is bound by "
        "something else",
    )

    def check(self, a: Analysis) -> Outcomes:
        if not kernel_work.is_device_busy(a, self.min_busy):
            return
        rows = kernel_work.compute_mask(a) & kernel_work.family_mask(a, "gemm")
        total = kernel_work.summed_duration(a, kernel_work.kernel_mask(a))
        if kernel_work.summed_duration(a, rows) < self.min_share * total:
            return
        misaligned, undecided, cases, saved = self._judge(a, rows)
        spent = kernel_work.summed_duration(a, misaligned)
        share = spent / total
        if (
            kernel_work.summed_duration(a, undecided) > 0.5 * kernel_work.summed_duration(a, rows)
            and share < self.min_share
        ):
            yield kernel_work.skip_without_shapes(a, "alignment of matrix dimensions")
            return
        if share < self.min_share:
            return
        select = Select(on="gpu", kind=("kernel",), family=("gemm",))
        worst = cases[0]
        example = f", such as {worst.op} with {worst.padding}" if worst.padding else ""
        yield Finding(
            summary=(
                f"Misaligned matrix products{example}, take "
                f"{kernel_work.of_kernel_time(a, spent, share)}. Their row lengths are not a "
                "multiple of what tensor cores load."
            ),
            evidence=[
                self.compare("misaligned products, share of kernel time", share, "min_share"),
                amount_per_step(a, "misaligned products", spent),
                *(
                    Evidence("shape", f"{case.op} {case.dims}: {case.padding}")
                    for case in cases[:3]
                    if case.padding
                ),
            ],
            where=kernel_work.kernel_locations(a, misaligned),
            edits=[kernel_work.scale_kernels(a, rows, saved.times, select)],
            **({} if saved.by_rate else self.case("rates are not known")),
            **(self.case("a vocabulary") if worst.vocabulary else {}),
        )

    def _judge(
        self, a: Analysis, rows: kernel_work.Mask
    ) -> tuple[kernel_work.Mask, kernel_work.Mask, list[MisalignedProduct], PaddingSaving]:
        """Return the misaligned rows, the rows of unknown alignment, the misaligned products by
        time, and the saving from padding."""
        gpu, kernels = a.trace.gpu, a.kernels
        # split-K reductions and similar kernels multiply nothing
        index = np.flatnonzero(rows & (kernels["flops"].fill_null(1.0) > 0).to_numpy())
        table = pl.DataFrame(
            {
                "row": index,
                "name": gpu["name"].gather(index),
                "inputs": a.trace.cpu["inputs"].gather(gpu["op"].gather(index)),
                "op": kernels["op_name"].gather(index),
                "dtype": kernels["dtype"].gather(index),
                "tensor": kernels["tensor_core"].gather(index),
                "dur": gpu["dur"].gather(index),
                "flops": kernels["flops"].gather(index).cast(pl.Float64),
                "moved": kernels["moved"].gather(index).cast(pl.Float64),
            }
        )
        # TF32 is on where FP32 products run on tensor cores: CUDA-core ones then fell off them
        is_single_precision = pl.col("dtype").cast(pl.String).is_in(["fp32", "tf32"])
        tf32_on = table.filter(is_single_precision & pl.col("tensor")).height > 0
        groups = table.group_by("name", "inputs", "op", "dtype", "tensor", maintain_order=True).agg(
            pl.col("row"), pl.col("dur", "flops", "moved").sum()
        )
        misaligned, undecided = np.zeros((2, len(rows)), dtype=bool)
        cases = []
        roofs = attainable_roofs(a.hardware)
        misaligned_products: list[TimedProduct] = []
        aligned: list[TimedProduct] = []
        # a loop over distinct (kernel, shape) pairs, hundreds at most, not over kernels
        for name, inputs, op, dtype, tensor, members, dur, flops, moved in groups.iter_rows():
            unit = kernel_work.UNIT.get(str(dtype)) if dtype is not None else None
            if str(dtype) == "fp32" and not tensor and not tf32_on:
                continue  # full FP32: alignment decides nothing
            shape = self._parse_layout(a, inputs, op)
            if shape is not None and unit is not None and min(shape.sizes) < unit:
                continue  # a vector, or thinner than one load: padding would only add work
            padding = shape.misaligned(str(name), unit) if shape is not None and unit else None
            by_name = aligned_by_name(str(name), unit)
            if by_name is None and padding is None:
                undecided[members] = True
                continue
            is_narrow = not (by_name if by_name is not None else not padding)
            format_ = "tf32" if str(dtype) == "fp32" else dtype
            growth = shape.growth(unit) if is_narrow and shape is not None and unit else 1.0
            product = _time_at_rate(
                roofs, format_, dur, flops * growth, moved * growth, len(members)
            )
            (misaligned_products if is_narrow else aligned).append(product)
            if is_narrow:
                misaligned[members] = True
                dims = shape.text if shape is not None else ""
                is_vocabulary = shape is not None and max(shape.k, shape.n) >= MIN_VOCABULARY
                text = " and ".join(padding or ())
                cases.append((dur, MisalignedProduct(str(op or name), dims, text, is_vocabulary)))
        cases.sort(key=lambda pair: -pair[0])
        return (
            misaligned,
            undecided,
            [case for _, case in cases],
            self._estimate_saving(misaligned_products, aligned),
        )

    def _estimate_saving(
        self, products: Sequence[TimedProduct], aligned: Sequence[TimedProduct]
    ) -> PaddingSaving:
        """Return the time, ns, that misaligned products save at the rate of similar aligned
        ones."""
        times = np.zeros(3)
        by_rate = 0
        for product in products:
            if not product.ideal:
                factors = np.array(self.range_of("factor"))
                times += product.dur * (1 - factors)
                continue
            by_rate += product.dur
            attained_share = _reached_rate_share(product, aligned) or float(self.attained_share)
            attained_shares = np.array(
                [
                    attained_share,
                    max(self.best_attained_share, attained_share),
                    min(self.worst_attained_share, attained_share),
                ]
            )
            times += np.maximum(0.0, product.dur - product.ideal / attained_shares)
        total = sum(product.dur for product in products)
        return PaddingSaving(tuple(times.tolist()), 2 * by_rate >= total > 0)

    def _parse_layout(self, a: Analysis, inputs: int | None, op: object) -> GemmLayout | None:
        first = FIRST_MATRIX.get(str(op))
        if inputs is None or first is None:
            return None
        row = a.trace.inputs.row(inputs, named=True)
        op_inputs = OpInputs(row["dims"], row["types"], row["strides"] or "")
        left, right = op_inputs.tensor(first), op_inputs.tensor(first + 1)
        if left is None or right is None or {len(left.shape), len(right.shape)} - {2, 3}:
            return None
        return GemmLayout(left, right)

    @staticmethod
    def examples() -> Examples:
        tf32 = "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_128x128_32x3_nn_align1>"
        align2 = (
            "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_32x3_tn_align2>"
        )
        strides = [[1024, 1], [1, 1024]]
        gradient = _TN.replace("_tn", "_nt")
        nvjet = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT"
        traps = {
            "an odd number of tokens": _build_products(_TN, 8191, 1024, 4096, strides=strides),
            "an odd number of tokens, no strides": _build_products(_TN, 8191, 1024, 4096),
            "an odd number of tokens is K of the weight gradient": _build_products(
                gradient, 1024, 8191, 4096, strides=[[1, 1024], [4096, 1]]
            ),
            "odd K alone, layout not known": _build_products(_TENSILE, 8192, 1021, 4096),
            "aligned": _build_products(_TN, 8192, 1024, 4096),
            "TMA": _build_products(nvjet, 8191, 1024, 4096, gpu="H100"),
            "full FP32": _build_products("ampere_sgemm_128x128_nn", 4096, 1021, 4097, "float"),
            "a vector": _build_products(_TN, 8192, 1024, 1),
        }
        return {
            "the kernel was compiled for narrow loads": _build_products(align2, 8192, 1024, 50258),
            "odd N, by the strides": _build_products(_TN, 8192, 1024, 50257, strides=strides),
            "odd K, by the layout in the name": _build_products(_TN, 8192, 1021, 4096),
            "an odd N, in every layout": _build_products(_TENSILE, 8192, 1024, 50257),
            "odd K and M, in every layout": _build_products(_TENSILE, 8191, 1021, 4096),
            "TF32 with an odd N": _build_products(tf32, 4096, 1024, 9375, "float"),
            **{name: (b, "share < self.min_share") for name, b in traps.items()},
        }


def _time_at_rate(
    roofs: Roofs, dtype: str | None, dur: int, flops: float, moved: float, calls: int
) -> TimedProduct:
    """Return the product with its time at the attainable rates."""
    rate, memory = roofs.matmul.get(str(dtype)), roofs.memory
    if rate is None or memory is None or not flops or not moved:
        return TimedProduct(dur, 0.0, calls, (dtype, True))
    compute, read = 1e9 * flops / rate.rate, 1e9 * moved / memory.rate
    ideal = max(compute, read) + calls * KERNEL_NS
    return TimedProduct(dur, ideal, calls, (dtype, compute >= read))


def _reached_rate_share(product: TimedProduct, aligned: Sequence[TimedProduct]) -> float | None:
    """Return the share of the attainable rate that similar aligned products reach, weighted by
    time. ``None`` if there are none."""
    call_time = product.ideal / product.calls
    similar = [
        other
        for other in aligned
        if other.of == product.of
        and other.ideal
        and 1 / MAX_SIMILAR_RATIO <= other.ideal / other.calls / call_time <= MAX_SIMILAR_RATIO
    ]
    spent = sum(other.dur for other in similar)
    return min(1.0, sum(other.ideal for other in similar) / spent) if spent else None


def aligned_by_name(kernel: str, unit: int | None) -> bool | None:
    """Return whether a kernel's name shows that it loads 16 bytes at once, or ``None`` if it does
    not tell."""
    if ALWAYS_ALIGNED.search(kernel):
        return True
    match = ALIGNED.search(kernel)
    if match is None or unit is None:
        return None
    return int(match.group(1) or match.group(2)) >= unit


class GemmLayout:
    """Layout of ``C[M,N] = A[M,K] B[K,N]``: the dimensions along which the matrices are
    contiguous."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self.m, self.k, self.n = a.shape[-2], a.shape[-1], b.shape[-1]
        self.strides = (a.strides, b.strides) if a.strides and b.strides else None
        self.text = f"{list(a.shape)} x {list(b.shape)}"

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, K, N."""
        return self.m, self.k, self.n

    def growth(self, unit: int) -> float:
        """Return the work of the padded product over that of this one. Sizes are padded to a
        multiple of ``PAD_TO``, short ones to a multiple of ``unit``."""
        return prod(_pad_size(n, unit) / n for n in (self.k, self.n))

    def misaligned(self, kernel: str, unit: int) -> list[str] | None:
        """Return the contiguous dimensions that are not a multiple of ``unit``, as text. ``None``
        if the layout is unknown and some layout would have none."""
        if self.strides:
            # contiguous along the last dimension, or along the one before it (transposed)
            along_a = "K" if self.strides[0][-1] == 1 else "M"
            along_b = "N" if self.strides[1][-1] == 1 else "K"
            lengths = [max(steps[-2:]) for steps in self.strides]  # from one row to the next
        else:
            layout = LAYOUT.search(kernel)
            if layout is None:
                return self._misaligned_in_any_layout(unit)
            # cuBLAS multiplies the transposed matrices, column by column: first B, then A
            along_a = "K" if layout.group(2) == "n" else "M"
            along_b = "K" if layout.group(1) == "t" else "N"
            lengths = []
        size = dict(zip("MKN", self.sizes, strict=True))
        dims = [
            f"{dim} = {size[dim]} (pad to {_pad_size(size[dim], unit)})"
            for dim in sorted({along_a, along_b, "N"})
            if size[dim] % unit
        ]
        # a slice of a wider tensor; a broadcast matrix (row stride 0 or 1) shows nothing
        dims += [f"row length {n}" for n in lengths if n % unit and n > max(self.sizes)]
        return dims

    def _misaligned_in_any_layout(self, unit: int) -> list[str] | None:
        """Return sizes that are misaligned in every layout, or ``None`` if there are none. These
        are N, along which the result is contiguous, and K and M together, because the first matrix
        is contiguous along one of them."""
        size = {dim: n for dim, n in zip("MKN", self.sizes, strict=True) if n % unit}
        dims = {"N"} & size.keys() | ({"K", "M"} if {"K", "M"} <= size.keys() else set())
        return [
            f"{dim} = {size[dim]} (pad to {_pad_size(size[dim], unit)})" for dim in sorted(dims)
        ] or None


def _pad_size(size: int, unit: int) -> int:
    if not size % unit:
        return size
    to = -(-size // PAD_TO) * PAD_TO
    return to if to <= size * (1 + MAX_PADDING) else -(-size // unit) * unit


_TN = "ampere_bf16_s16816gemm_bf16_128x128_stages_32x5_tn"
_TENSILE = "Cijk_some_kernel_MT128x128x32"


def _build_products(
    kernel: str,
    m: int,
    k: int,
    n: int,
    dtype: str = "c10::BFloat16",
    *,
    strides: Sequence[Sequence[int]] | None = None,
    gpu: str = "A100",
) -> TraceBuilder:
    def body(b: TraceBuilder) -> None:
        us = max(2000, 2e-6 * m * k * n / 100)  # at 100 TFLOP/s, of 271 on an A100 in bfloat16
        with b.op("aten::mm", [[m, k], [k, n]], dtype, strides=strides):
            b.launch(kernel, us)
        pointwise = "void at::native::vectorized_elementwise_kernel<4>"
        b.run("aten::relu", pointwise, 500, [[8192, 4096]], dtype)

    return example_steps(body, gpu)
