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

PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Ops that multiply two matrices -> position of the first matrix among the inputs."""
LAYOUT = re.compile(r"_([nt])([nt])(?=[_>\s(]|$)")
ALIGNED = re.compile(r"_align(\d+)|_ldg(\d+)[_>]")
ALWAYS_ALIGNED = re.compile(r"nvjet|_tma_|sm90_xmma|sm100_xmma|warpgroup")
"""Kernels that load by TMA, which needs rows on 16-byte boundaries."""


PAD_TO = 64
"""Elements to whose multiple long dimensions are padded, as the fix says."""
MAX_PADDING = 1 / 8
"""Share of a dimension that such padding may add: shorter ones are padded to 16 bytes."""
MIN_VOCABULARY = 20_000
"""Width from which it is taken for a vocabulary's: hidden sizes end below."""
_PADDED = "def padded(n, to=64):\n    return (n + to - 1) // to * to"
SIMILAR = 4.0
"""Products whose calls take at most so many times longer or shorter at the attainable rate show
what a padded one reaches."""


class MisalignedProduct(NamedTuple):
    """Products on one kernel name under one op with one set of inputs."""

    op: str
    dims: str
    padding: str
    """Dimensions to pad, as text; empty when shapes are not recorded."""
    vocabulary: bool = False
    """Whether its width is that of a vocabulary."""


class TimedProduct(NamedTuple):
    """Products on one kernel name under one op with one set of inputs, for their rate."""

    dur: int
    """ns of all calls."""
    ideal: float
    """ns of all calls at the attainable rate, padded; 0: not known."""
    calls: int
    of: tuple[str | None, bool]
    """Number format that the padded product has, and whether FLOPs limit it (else bytes)."""


class PaddingSaving(NamedTuple):
    times: tuple[float, ...]
    """ns of all calls: expected, at best, at worst."""
    by_rate: bool
    """Whether most of it follows from rates, not from the usual factor."""


class MisalignedGemm(Rule):
    """A matrix product whose contiguous dimension is no multiple of 16 bytes cannot use vectorised
    loads. The library falls back to a tensor-core kernel with narrow loads, or to the CUDA cores.
    Padding that dimension (a vocabulary of 50257 to 50304) costs almost nothing.

    Only dimensions along which memory is contiguous matter, and the layout decides which those are.
    An odd N, or K and M both odd, is odd in every layout. For ``C[M,N] = A[M,K] B[K,N]``, C and a
    row-major B are contiguous along N, a row-major A and a transposed B along K. M counts only when
    A itself is transposed (the weight gradient).
    So M, the number of tokens, is fine at any value in the forward pass. PyTorch's
    ``pattern_matcher``, which tests every dimension, flags 73 of 73 products of a public H100
    trace, all for M alone and all at full speed.

    CUTLASS writes into a kernel's name what it was compiled for (``align4``, ``align8``). Otherwise
    the layout comes from the recorded strides, or from the ``nn``/``nt``/``tn`` in the name. That
    is cuBLAS's column-major view: the first letter is B (``t``: contiguous along K), the second A
    (``n``: contiguous along K). On public A100 traces this predicts the alignment in the name of
    1,942 of 1,946 products; the others are slices with an odd row length.

    The gain comes from rates. At best, a padded product takes its FLOPs at the rate measured for
    products on such a GPU, or its bytes at the memory's rate. It takes as much longer as aligned
    products do. These are the aligned products of the recording that have the same format and
    limit and similar work. Without any it is 80%: large aligned products of
    busy public traces reach 72% and more. Padding adds FLOPs and bytes, too. So an H100, whose
    tensor cores need wide loads for their own instructions, gains far more than an A100. There,
    TF32 kernels with narrow loads reach 0.56 to 0.70 of the FLOP rate of those with wide loads, in
    five classes of arithmetic intensity. That is the factor where shapes or rates are not known."""

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
        0.03, "of kernel time; with the factor below that is about 1% of a busy step", ENGINE_FLOOR
    )
    min_busy = kernel_work.MIN_BUSY
    reach = Factor(
        0.8, "of the attainable rate, that padded products reach if none is aligned", ALIGNED_REACH
    )
    best_reach = Factor(1.0, "of the attainable rate, at best", ALIGNED_REACH)
    worst_reach = Factor(0.6, "of the attainable rate, at worst", ALIGNED_REACH)
    factor = Factor(0.6, "new duration over old where rates are unknown", ALIGNED_RATE)
    best_factor = Factor(0.5, "new duration over old, at best", ALIGNED_RATE)
    worst_factor = Factor(0.85, "new duration over old, at worst", MATMUL_GUIDE)

    fix = (
        "Pad the misaligned dimensions to a multiple of 64 elements (of 8, if they are "
        "below 64). Every layer that reads or writes such a width grows with it; the zeros change "
        "no result. The batch or token dimension needs no padding."
    )
    code = (
        f"{_PADDED}\n\n"
        "# each layer that reads or writes such a width grows with it\n"
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
        "{reach:.0%} of the attainable rate ({worst_reach:.0%} to {best_reach:.0%})",
    )
    cases = {
        "a vocabulary": {
            "fix": "Set the vocabulary in the model's configuration to a multiple of 64, for both "
            "embedding and head. Targets stay; cut the logits of the added tokens off. Pad other "
            "misaligned dimensions so too. The token dimension needs no padding.",
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
        rows = kernel_work.compute_rows(a) & kernel_work.family_rows(a, "gemm")
        total = kernel_work.summed_duration(a, kernel_work.kernel_rows(a))
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
                f"Misaligned matrix products take {share:.0%} of kernel time{example}. Their rows "
                "are no multiple of what tensor cores load."
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
        """Rows that are misaligned, rows of unknown alignment, the misaligned products by time,
        and what padding them saves."""
        gpu, kernels = a.trace.gpu, a.kernels
        # split-K reductions and the like multiply nothing
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
        single = pl.col("dtype").cast(pl.String).is_in(["fp32", "tf32"])
        tf32 = table.filter(single & pl.col("tensor")).height > 0
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
            if str(dtype) == "fp32" and not tensor and not tf32:
                continue  # full FP32: alignment decides nothing
            shape = self._shape(a, inputs, op)
            if shape is not None and unit is not None and min(shape.sizes) < unit:
                continue  # a vector, or thinner than one load: padding would only add work
            padding = shape.misaligned(str(name), unit) if shape is not None and unit else None
            by_name = aligned_by_name(str(name), unit)
            if by_name is None and padding is None:
                undecided[members] = True
                continue
            narrow = not (by_name if by_name is not None else not padding)
            format_ = "tf32" if str(dtype) == "fp32" else dtype
            growth = shape.growth(unit) if narrow and shape is not None and unit else 1.0
            product = _at_rate(roofs, format_, dur, flops * growth, moved * growth, len(members))
            (misaligned_products if narrow else aligned).append(product)
            if narrow:
                misaligned[members] = True
                dims = shape.text if shape is not None else ""
                words = shape is not None and max(shape.k, shape.n) >= MIN_VOCABULARY
                text = " and ".join(padding or ())
                cases.append((dur, MisalignedProduct(str(op or name), dims, text, words)))
        cases.sort(key=lambda pair: -pair[0])
        return (
            misaligned,
            undecided,
            [case for _, case in cases],
            self._saving(misaligned_products, aligned),
        )

    def _saving(
        self, products: Sequence[TimedProduct], aligned: Sequence[TimedProduct]
    ) -> PaddingSaving:
        """Time that misaligned products save at the rate that similar aligned ones reach, ns."""
        times = np.zeros(3)
        by_rate = 0
        for product in products:
            if not product.ideal:
                factors = np.array([self.factor, self.best_factor, self.worst_factor])
                times += product.dur * (1 - factors)
                continue
            by_rate += product.dur
            reach = _reached(product, aligned) or float(self.reach)
            reaches = np.array([reach, max(self.best_reach, reach), min(self.worst_reach, reach)])
            times += np.maximum(0.0, product.dur - product.ideal / reaches)
        total = sum(product.dur for product in products)
        return PaddingSaving(tuple(times.tolist()), 2 * by_rate >= total > 0)

    def _shape(self, a: Analysis, inputs: int | None, op: object) -> GemmLayout | None:
        first = PRODUCTS.get(str(op))
        if inputs is None or first is None:
            return None
        row = a.trace.inputs.row(inputs, named=True)
        given = OpInputs(row["dims"], row["types"], row["strides"] or "")
        left, right = given.tensor(first), given.tensor(first + 1)
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
        aligned = {
            "an odd number of tokens": _products(_TN, 8191, 1024, 4096, strides=strides),
            "an odd number of tokens, no strides": _products(_TN, 8191, 1024, 4096),
            "an odd number of tokens is K of the weight gradient": _products(
                gradient, 1024, 8191, 4096, strides=[[1, 1024], [4096, 1]]
            ),
            "odd K alone, layout not known": _products(_TENSILE, 8192, 1021, 4096),
            "aligned": _products(_TN, 8192, 1024, 4096),
            "TMA": _products(nvjet, 8191, 1024, 4096, gpu="H100"),
            "full FP32": _products("ampere_sgemm_128x128_nn", 4096, 1021, 4097, "float"),
            "a vector": _products(_TN, 8192, 1024, 1),
        }
        return {
            "the kernel was compiled for narrow loads": _products(align2, 8192, 1024, 50258),
            "odd N, by the strides": _products(_TN, 8192, 1024, 50257, strides=strides),
            "odd K, by the layout in the name": _products(_TN, 8192, 1021, 4096),
            "an odd N, in every layout": _products(_TENSILE, 8192, 1024, 50257),
            "odd K and M, in every layout": _products(_TENSILE, 8191, 1021, 4096),
            "TF32 with an odd N": _products(tf32, 4096, 1024, 9375, "float"),
            **{name: (b, "share < self.min_share") for name, b in aligned.items()},
        }


def _at_rate(
    roofs: Roofs, dtype: str | None, dur: int, flops: float, moved: float, calls: int
) -> TimedProduct:
    """Return the product with the time that it takes at the attainable rates."""
    rate, memory = roofs.matmul.get(str(dtype)), roofs.memory
    if rate is None or memory is None or not flops or not moved:
        return TimedProduct(dur, 0.0, calls, (dtype, True))
    compute, read = 1e9 * flops / rate.rate, 1e9 * moved / memory.rate
    ideal = max(compute, read) + calls * KERNEL_NS
    return TimedProduct(dur, ideal, calls, (dtype, compute >= read))


def _reached(product: TimedProduct, aligned: Sequence[TimedProduct]) -> float | None:
    """Return the share of the attainable rate that similar aligned products reach, by time;
    ``None``: there is none."""
    each = product.ideal / product.calls
    similar = [
        other
        for other in aligned
        if other.of == product.of
        and other.ideal
        and 1 / SIMILAR <= other.ideal / other.calls / each <= SIMILAR
    ]
    spent = sum(other.dur for other in similar)
    return min(1.0, sum(other.ideal for other in similar) / spent) if spent else None


def aligned_by_name(kernel: str, unit: int | None) -> bool | None:
    """Whether a kernel's name says that it loads 16 bytes at once; None: it does not say so."""
    if ALWAYS_ALIGNED.search(kernel):
        return True
    match = ALIGNED.search(kernel)
    if match is None or unit is None:
        return None
    return int(match.group(1) or match.group(2)) >= unit


class GemmLayout:
    """``C[M,N] = A[M,K] B[K,N]``: the dimensions along which its matrices are contiguous."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self.m, self.k, self.n = a.shape[-2], a.shape[-1], b.shape[-1]
        self.strides = (a.strides, b.strides) if a.strides and b.strides else None
        self.text = f"{list(a.shape)} x {list(b.shape)}"

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, K, N."""
        return self.m, self.k, self.n

    def growth(self, unit: int) -> float:
        """Return the work of the padded product over this one's: sizes are padded to a multiple of
        ``PAD_TO``, short ones to one of ``unit``."""
        return prod(_padded(n, unit) / n for n in (self.k, self.n))

    def misaligned(self, kernel: str, unit: int) -> list[str] | None:
        """The contiguous dimensions that are no multiple of ``unit``, as text; None: the layout
        is not known, and in some layout there is none."""
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
            f"{dim} = {size[dim]} (pad to {_padded(size[dim], unit)})"
            for dim in sorted({along_a, along_b, "N"})
            if size[dim] % unit
        ]
        # a slice of something wider; a broadcast matrix (rows 0 or 1 apart) tells nothing
        dims += [f"row length {n}" for n in lengths if n % unit and n > max(self.sizes)]
        return dims

    def _misaligned_in_any_layout(self, unit: int) -> list[str] | None:
        """Return sizes that are no multiple in any layout: N, along which the result is contiguous;
        K and M together, as the first matrix is contiguous along one of them. ``None``: all fit."""
        size = {dim: n for dim, n in zip("MKN", self.sizes, strict=True) if n % unit}
        dims = {"N"} & size.keys() | ({"K", "M"} if {"K", "M"} <= size.keys() else set())
        return [
            f"{dim} = {size[dim]} (pad to {_padded(size[dim], unit)})" for dim in sorted(dims)
        ] or None


def _padded(size: int, unit: int) -> int:
    if not size % unit:
        return size
    to = -(-size // PAD_TO) * PAD_TO
    return to if to <= size * (1 + MAX_PADDING) else -(-size // unit) * unit


_TN = "ampere_bf16_s16816gemm_bf16_128x128_stages_32x5_tn"
_TENSILE = "Cijk_some_kernel_MT128x128x32"


def _products(
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
