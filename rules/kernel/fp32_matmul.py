"""fp32 matrix work that tensor cores could do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

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
from advisor.core.gpus import GpuSpec
from advisor.core.trace import JAX, TENSORFLOW
from advisor.measure import Analysis
from advisor.measure.host.names import name_matches
from advisor.rules.common import figure
from advisor.rules.elsewhere import in_any_language
from advisor.rules.kernel import facts
from advisor.rules.sources import (
    NCU,
    OURS,
    PEAKS,
    REAL_KERNEL,
    SMALL_GRIDS_TRACES,
    TF32_BLOG,
    TF32_NOTES,
)
from advisor.testing import TraceBuilder

FP32_NAMES = r"sgemm|scudnn|_f32f32_f32f32_f32_"
"""cuBLAS, cuDNN and CUTLASS spell single-precision CUDA-core kernels so, for matrices whose op
has no recorded types (compiled regions, CUDA graphs)."""


_TF32 = (
    'torch.set_float32_matmul_precision("high")   # matrix products\n'
    "torch.backends.cudnn.allow_tf32 = True        # convolutions (the default)\n"
)
_BF16 = 'with torch.autocast("cuda", dtype=torch.bfloat16):\n    loss = criterion(model(x), y)'
_REACHED = (
    "{derating:.0%} of the ratio of the peaks is reached ({worst_derating:.0%} to "
    "{best_derating:.0%} in the band)"
)
_REACHED_BLIND = (
    "{blind_derating:.0%} of the ratio of the peaks is reached, as shapes are not known "
    "({worst_blind_derating:.0%} to {best_blind_derating:.0%} in the band)"
)
_FORWARD = 'with torch.inference_mode(), torch.autocast("cuda", dtype=torch.{}):\n    y = model(x)'
"""The same where nothing is trained."""
BF16, FP16 = "no TF32 that is faster: bf16", "no TF32 and no bf16: fp16"
CASES = {"bf16": BF16, "fp16": FP16}
"""Format to move to -> the case; TF32 is what the rule says without one."""


class Target(NamedTuple):
    """A number format that tensor cores multiply faster than CUDA cores do fp32."""

    format: str
    fp32: float
    """Peak in fp32, FLOP/s."""
    peak: float
    """Peak in the format, FLOP/s."""


class Fp32Matmul(Rule):
    """Matrix multiplications or convolutions in full fp32 run on the CUDA cores although the GPU
    has tensor cores for them: an A100 multiplies eight times faster in TF32 than in fp32.

    A kernel counts when its inputs are fp32 (the op's recorded types, else the kernel's own name)
    AND the kernel is not a tensor-core kernel; neither alone is enough. Name lists of tensor-core
    kernels go stale: TensorBoard's misses ``nvjet`` (all matrix time of a B200 trace) and
    ``wmma_tensorop`` and then advises mixed precision to runs that are in bf16 already.

    From compute capability 8.0 the cure is TF32, one line; on Volta and Turing, which have no
    TF32, it is mixed precision in fp16, and on GeForce cards, whose TF32 is as fast as their fp32,
    in bf16. Where TF32 kernels of the same kind run in the window, the
    switch is on already and the rest is there because of its shapes: that is not this rule's
    business. PyTorch turns TF32 on for convolutions and off for matrix products by default, so the
    two are judged apart.

    The new duration of a kernel is its fp32 duration times the ratio of the peaks, derated; where
    its FLOPs and bytes are known, it cannot be shorter than memory bandwidth allows, so the small
    batches of an inference server, which are bound by reading weights, gain nothing.
    """

    id = "fp32-matmul"
    title = "Matrix work in fp32 does not use the tensor cores"
    category = "kernel"
    knobs = ("matmul-precision", "autocast")
    found_in = (
        "traces/v100_train_copy_heavy",
        "traces/pairs/sam_2_fp32_few_syncs",
    )
    silent_in = (
        "traces/a100_train_6steps",
        "traces/two_ranks_rank0",
        "traces/b200_eager",
        "traces/h100_bert_small_inference",
        "traces/pairs/sam_3_bf16_compiled_sdpa",
    )
    validated_on = (
        "V100 training (all matrix products are volta_sgemm: fires); A100 and two-rank training "
        "(TF32 is on: silent); B200 and H100 in bf16 (silent)"
    )
    references = (
        "https://pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices",
        "https://pytorch.org/docs/stable/amp.html",
    )

    min_share = Threshold(
        0.05, "of kernel time: below it another rule's finding is always worth more", OURS
    )
    min_busy = Threshold(facts.MIN_BUSY, "share of the step the device is busy", SMALL_GRIDS_TRACES)
    min_ratio = Threshold(
        1.8, "of the peaks: TF32 has twice fp32's on an A10, eight times on an A100", PEAKS
    )
    derating = Threshold(
        0.6,
        "of the ratio of the peaks that real shapes reach: 5 of 8 times, as the best of whole "
        "networks, whose other work is no faster",
        TF32_BLOG,
    )
    best_derating = Threshold(
        0.86, "of the ratio: 10240^3 on an A100 in 0.11 s, with TF32 in 0.016 s", TF32_NOTES
    )
    worst_derating = Threshold(
        0.25,
        "of the ratio: 2 of 8 times, as the least of these networks",
        TF32_BLOG,
    )
    blind_derating = Threshold(
        0.25,
        "of the ratio, where shapes are not known: the matrix products of one recommender model "
        "take 35 ms a step on a V100 in fp32 and 14 ms on an A100 in TF32; bandwidth explains a "
        "part of it",
        REAL_KERNEL,
    )
    best_blind_derating = Threshold(
        0.6, "of the ratio, at best: as where shapes are known", TF32_NOTES
    )
    worst_blind_derating = Threshold(0.16, "of the ratio, at worst", REAL_KERNEL)
    reachable_bandwidth = Threshold(
        0.9, "of the peak: a kernel at this share of bandwidth is bound by it", NCU
    )
    praise_share = Threshold(
        0.9, "of matrix time on tensor cores, from which it is worth saying", OURS
    )

    verify = (
        "Profile again: the kernels' names say tensorop, xmma … tf32, s1688 or s16816 "
        "instead of sgemm; compare the loss curve over some hundred steps."
    )
    falsified_by = (
        "a switch that is already set (print torch.get_float32_matmul_precision() and "
        "torch.backends.cudnn.allow_tf32), or fp32 that the mathematics needs"
    )

    fix = (
        "Allow TF32 for fp32 matrix work (one line, 10 bits of mantissa instead of 23), or better "
        "train in bf16 with autocast, which halves the bytes too."
    )
    code = f"{_TF32}# or, faster still:\n{_BF16}"
    confidence = 0.85
    assumptions = (_REACHED, "the model trains as well with the shorter mantissa")
    cases: ClassVar = {
        BF16: {
            "fix": "Train in bf16 with autocast: on this GPU TF32 is no faster than fp32, 16 bits "
            "are.",
            "code": _BF16,
        },
        FP16: {
            "fix": "Use mixed precision: this GPU has no TF32, its tensor cores take fp16. "
            "Autocast picks the ops; the scaler keeps small gradients alive.",
            "code": "scaler = torch.amp.GradScaler()\n"
            'with torch.autocast("cuda", dtype=torch.float16):\n'
            "    loss = criterion(model(x), y)\n"
            "scaler.scale(loss).backward()\n"
            "scaler.step(optimizer)\n"
            "scaler.update()",
        },
        "shapes are not recorded": {
            "confidence": 0.7,
            "assumptions": (
                _REACHED_BLIND,
                "the model trains as well with the shorter mantissa",
            ),
        },
    }
    inference: ClassVar = {
        "fix": "Allow TF32 for fp32 matrix work (one line, 10 bits of mantissa instead of 23), or "
        "better run the model in bf16, which halves the bytes too.",
        "code": f"{_TF32}# or, faster still:\n{_FORWARD.format('bfloat16')}",
        "verify": "Profile again: the kernels' names say tensorop, xmma … tf32, s1688 or s16816 "
        "instead of sgemm; compare its outputs.",
        "assumptions": (_REACHED, "the model's outputs are as good with the shorter mantissa"),
        "cases": {
            BF16: {
                "fix": "Run the model in bf16: on this GPU TF32 is no faster than fp32, 16 bits "
                "are.",
                "code": _FORWARD.format("bfloat16"),
            },
            FP16: {
                "fix": "Run the model in fp16: this GPU has no TF32, its tensor cores take fp16.",
                "code": _FORWARD.format("float16"),
            },
            "shapes are not recorded": {
                "assumptions": (
                    _REACHED_BLIND,
                    "the model's outputs are as good with the shorter mantissa",
                ),
            },
        },
    }
    elsewhere: ClassVar = {
        **in_any_language(
            "Let matrix products use the tensor cores: TF32, or 16-bit inputs with 32-bit sums.",
            cuda="cublasSetMathMode(handle, CUBLAS_TF32_TENSOR_OP_MATH), or "
            "CUBLAS_COMPUTE_32F_FAST_TF32 in cublasGemmEx.",
        ),
        TENSORFLOW: FrameworkAdvice(
            "Train in mixed precision, or allow TF32 in matrix products.",
            'tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")\n'
            "tf.config.experimental.enable_tensor_float_32_execution(True)",
        ),
        JAX: FrameworkAdvice(
            "Compute in bfloat16, or allow TF32 in matrix products.",
            'jax.config.update("jax_default_matmul_precision", "tensorfloat32")',
        ),
    }

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Time of fp32 matrix kernels on CUDA cores as a share of all kernel time."""
        if a.device_id is None:
            return
        matrix = facts.compute_rows(a) & facts.of_family(a, "gemm", "convolution")
        total = facts.duration(a, facts.kernel_rows(a))
        matrix_ns = facts.duration(a, matrix)
        if not matrix_ns or matrix_ns < self.min_share * total:
            return
        on_tensor = a.kernels["tensor_core"].fill_null(False).to_numpy()
        off_tensor = (~a.kernels["tensor_core"].fill_null(True)).to_numpy()
        off_tensor &= a.kernels["eligible"].fill_null(True).to_numpy()  # no vectors, no helpers
        fp32 = self._fp32(a)
        slow = np.zeros(len(matrix), dtype=bool)
        for family in ("gemm", "convolution"):
            kind = matrix & facts.of_family(a, family)
            if not (kind & fp32 & on_tensor).any():  # else TF32 is on and shapes decide
                slow |= kind & fp32 & off_tensor & ~self._bandwidth_bound(a)
        share = facts.duration(a, slow) / total
        if share < self.min_share:
            used = facts.duration(a, matrix & on_tensor) / matrix_ns
            if used >= self.praise_share:
                cores = "matrix cores" if a.trace.meta.vendor == "amd" else "tensor cores"
                yield PassedCheck(text=f"{used:.0%} of matrix and convolution time runs on {cores}")
            return
        if facts.busy_share(a) < self.min_busy:
            return  # faster kernels would only wait longer
        if a.trace.meta.vendor == "amd":
            return  # its matrix cores take fp32 as it is
        if a.hardware is None:
            name = a.device.name if a.device is not None else None
            yield SkippedCheck(
                what=f"whether tensor cores would be faster at fp32 matrix work ({share:.0%} of "
                "kernel time)",
                why=f"nothing is known of the GPU {name!r}"
                if name
                else "the trace does not say which GPU it is from",
                record="" if name else "a profiler that writes deviceProperties",
            )
            return
        target = self._target(a.hardware)
        if target is not None:
            yield self._finding(a, slow, share, target)

    def _target(self, gpu: GpuSpec) -> Target | None:
        """The format to move to; ``None``: this GPU has none that is much faster than fp32."""
        fp32 = gpu.peak("fp32")
        for name in ("tf32", "bf16", "fp16"):
            if name == "bf16" and gpu.compute < (8, 0):
                continue
            peak = gpu.peak(name)
            if fp32 and peak and peak >= self.min_ratio * fp32:
                return Target(name, fp32, peak)
        return None

    def _fp32(self, a: Analysis) -> facts.Mask:
        """Rows whose inputs are fp32: by the op's types, else by the kernel's name."""
        dtype = a.kernels["dtype"]
        told: facts.Mask = dtype.is_in(["fp32", "tf32"]).fill_null(False).to_numpy()
        named: facts.Mask = name_matches(a.trace.gpu["name"], FP32_NAMES).to_numpy()
        unknown: facts.Mask = dtype.is_null().to_numpy()
        return told | (unknown & named)

    def _bandwidth_bound(self, a: Analysis) -> facts.Mask:
        """Kernels that could not be a tenth faster: their bytes take as long as they do."""
        found = np.zeros(a.trace.gpu.height, dtype=bool)
        if a.hardware is not None:
            least = self._least(a, np.arange(a.trace.gpu.height))
            found = least > 0.9 * a.trace.gpu["dur"].to_numpy()
        return found

    def _least(self, a: Analysis, at: NDArray[np.int64]) -> NDArray[np.float64]:
        """What rows of ``trace.gpu`` need for their bytes alone, ns; 0 where that is not known."""
        moved = a.kernels["moved"].gather(at).cast(pl.Float64).fill_null(0.0).to_numpy()
        if a.hardware is None:
            return np.zeros(len(at))
        return moved / (a.hardware.bandwidth * self.reachable_bandwidth) * 1e9

    def _finding(self, a: Analysis, slow: facts.Mask, share: float, target: Target) -> Finding:
        families = [f for f in ("gemm", "convolution") if (slow & facts.of_family(a, f)).any()]
        rows = facts.compute_rows(a) & facts.of_family(a, *families)
        saved = [
            self._saved(a, slow, target, derating, blind)
            for derating, blind in (
                (self.derating, self.blind_derating),
                (self.best_derating, self.best_blind_derating),
                (self.worst_derating, self.worst_blind_derating),
            )
        ]
        middle, low, high = (facts.scale_factor(a, rows, ns) for ns in saved)
        what = " and ".join(
            {"gemm": "matrix products", "convolution": "convolutions"}[f] for f in families
        )
        known = bool(a.kernels["flops"].is_not_null().to_numpy()[slow].mean() >= 0.5)
        return Finding(
            summary=(
                f"{share:.0%} of kernel time goes into {what} in fp32 on the CUDA cores; the "
                f"tensor cores of this GPU are {target.peak / target.fp32:.0f}x as fast in "
                f"{target.format.upper()}."
            ),
            evidence=[
                Evidence(
                    "fp32 matrix time, share of kernel time",
                    share,
                    "share",
                    *self.limit("min_share"),
                ),
                figure(a, "fp32 matrix time", facts.duration(a, slow)),
                Evidence("peak in fp32", target.fp32, "FLOP/s"),
                Evidence(f"peak in {target.format}", target.peak, "FLOP/s"),
                *_switches(a),
            ],
            where=facts.locations(a, slow),
            edits=[
                Edit(
                    op="scale",
                    select=Select(on="gpu", kind=("kernel",), family=tuple(families)),
                    factor=middle,
                    factor_low=low,
                    factor_high=high,
                )
            ],
            confidence_notes=[]
            if known
            else ["shapes are not recorded: matrices bound by memory bandwidth gain less"],
            **(self.case(CASES[target.format]) if target.format in CASES else {}),
            **({} if known else self.case("shapes are not recorded")),
        )

    def _saved(
        self,
        a: Analysis,
        slow: facts.Mask,
        target: Target,
        derating: float,
        blind: float,
    ) -> float:
        """Time the slow kernels lose when the tensor cores do them, ns, summed."""
        at = np.flatnonzero(slow)
        dur = a.trace.gpu["dur"].to_numpy()[at].astype(float)
        ratio = target.fp32 / target.peak
        known = a.kernels["flops"].gather(at).is_not_null().to_numpy()
        after = dur * np.minimum(1.0, ratio / np.where(known, derating, blind))
        after = np.maximum(after, self._least(a, at))
        return float(np.maximum(dur - after, 0.0).sum())

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """fp32 products on an A100 with TF32 off, and on a V100."""
        return {
            "TF32 off on an A100": _training("A100", "float", "ampere_sgemm_128x128_nn", 8000),
            "fp32 on a V100": _training("V100", "float", "volta_sgemm_128x128_nn", 10000),
        }

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """Tensor cores under names that old lists do not know; bound by bandwidth; launch-bound."""
        gemv = TraceBuilder("A100")
        idle = TraceBuilder("A100")
        mixed = TraceBuilder("A100")
        for _ in range(4):
            with gemv.step():
                # eight rows times 16384 x 16384: 1.07 GB of weights, 0.53 ms at 2 TB/s
                with gemv.op("aten::mm", [[8, 16384], [16384, 16384]], "float"):
                    gemv.launch("ampere_sgemm_32x32_sliced1x4_tn", 560)
                gemv.sync()
            with idle.step():
                for _ in range(10):
                    with idle.op("aten::mm", [[64, 64], [64, 64]], "float"):
                        idle.launch("ampere_sgemm_32x32_sliced1x4_tn", 4)
                    idle.host(100)
                idle.sync()
            with mixed.step():
                with mixed.op("aten::mm", [[4096, 4096], [4096, 4096]], "float"):
                    mixed.launch(
                        "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_256x128_32x3_nn_align4>"
                        "(cutlass_80_tensorop_s1688gemm_256x128_32x3_nn_align4::Params)",
                        1500,
                    )
                with mixed.op("aten::mm", [[4096, 33], [33, 647]], "float"):
                    mixed.launch("ampere_sgemm_128x64_nn", 200)
                mixed.sync()
        unknown = _training("A100", "float", "ampere_sgemm_128x128_nn", 8000)
        unknown.head["deviceProperties"][0]["name"] = "Some GPU of next year"
        return {
            "a GPU of which nothing is known": (unknown, "a.hardware is None"),
            "bf16 as nvjet": (
                _training(
                    "H100", "c10::BFloat16", "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", 300
                ),
                "share < self.min_share",
            ),
            "bf16 as wmma_tensorop": (
                _training(
                    "H100",
                    "c10::BFloat16",
                    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_"
                    "128x2_tn_align8>(cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16::Params)",
                    900,
                ),
                "share < self.min_share",
            ),
            "TF32 is on": (
                _training(
                    "A100",
                    "float",
                    "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_256x128_32x3_nn_align4>"
                    "(cutlass_80_tensorop_s1688gemm_256x128_32x3_nn_align4::Params)",
                    1500,
                ),
                "share < self.min_share",
            ),
            "TF32 is on, an odd shape is left": (mixed, "share < self.min_share"),
            "bound by reading the weights": (gemv, "reachable_bandwidth"),
            "the device is mostly idle": (idle, "min_busy"),
        }


def _switches(a: Analysis) -> list[Evidence]:
    """How the run had the switches set, where it was recorded."""
    names = ("float32_matmul_precision", "cuda.matmul.allow_tf32", "cudnn.allow_tf32")
    flags = {} if a.recorded is None else a.recorded.record.rank.flags
    return [Evidence(name, str(flags[name])) for name in names if name in flags]


def _training(gpu: str, dtype: str, kernel: str, us: float) -> TraceBuilder:
    b = TraceBuilder(gpu)
    for _ in range(4):
        with b.step():
            b.run("aten::mm", kernel, us, [[4096, 4096], [4096, 4096]], dtype, times=3)
            b.sync()
    return b
