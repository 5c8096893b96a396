"""FP32 matrix work that tensor cores could do."""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
import polars as pl
from msgspec.structs import replace
from numpy.typing import NDArray

from advisor.core import text as t
from advisor.core.finding import Finding, Outcomes, Select, SkippedCheck
from advisor.core.gpus import GpuSpec
from advisor.core.rule import Evidence, Factor, FrameworkAdvice, Rule, Threshold
from advisor.core.text import count_noun
from advisor.core.trace import JAX, TENSORFLOW
from advisor.measure import Analysis
from advisor.measure.device.precision_casts import find_casts
from advisor.measure.host.names import name_matches
from advisor.measure.host.operators import attainable_roofs
from advisor.rules.support import kernel_work
from advisor.rules.support.citations import (
    NCU,
    PEAKS,
    REAL_KERNEL,
    SAM_PAIR,
    TF32_BLOG,
    TF32_NOTES,
    TRIED_ON_TRACES,
    public_traces,
)
from advisor.rules.support.common import (
    amount_per_step,
    example_steps,
    of_step,
    per_step,
    runs_code_of,
)
from advisor.rules.support.framework_advice import in_any_language
from advisor.testing import Examples, TraceBuilder

FP32_NAMES = r"sgemm|scudnn|_f32f32_f32f32_f32_"
"""Names of single-precision CUDA-core kernels of cuBLAS, cuDNN and CUTLASS, used where the op's
types are not recorded (compiled regions, CUDA graphs)."""
_VOLTA, _LATER = r"^volta_|^turing_", r"ampere|hopper|(?:sm_?|cutlass_)(?:8|9|1\d)\d|nvjet"
"""Names of kernels in NVIDIA's libraries made for Volta or Turing, and for later GPUs, which have
TF32."""
_TF32 = (
    'torch.set_float32_matmul_precision("high")   # matrix products\n'
    "torch.backends.cudnn.allow_tf32 = True        # convolutions (the default)\n"
)
_TF32_FIRST = '# smaller, stays FP32: torch.set_float32_matmul_precision("high")\n'
"""First line of the code of mixed precision on a GPU that has TF32."""
_BF16 = 'with torch.autocast("cuda", dtype=torch.bfloat16):\n    loss = criterion(model(x), y)'
_FORWARD = 'with torch.inference_mode(), torch.autocast("cuda", dtype=torch.{}):\n    y = model(x)'
"""Code for BF16 or FP16 in a program that does not train."""
_SCALED = (
    "scaler = torch.amp.GradScaler()\n"
    'with torch.autocast("cuda", dtype=torch.float16):\n'
    "    loss = criterion(model(x), y)\n"
    "scaler.scale(loss).backward()\n"
    "scaler.step(optimizer)\n"
    "scaler.update()"
)
_VERIFY = (
    "Profile again: kernel names contain tensorop, bf16, tf32, s1688 or nvjet instead of sgemm. "
)
_VERIFY_FP16 = (
    "Profile again: kernel names contain s884, h884, s1688 or fp16 instead of sgemm or scudnn. "
)
_NEEDS_FP32 = "mathematics that needs FP32, or results that are not finite in 16 bits"
_DERATING_TEXT = (
    "real shapes reach {derating:.0%} of the ratio of the peaks ({worst_derating:.0%} to "
    "{best_derating:.0%})"
)
_DERATING_TEXT_WITHOUT_SHAPES = (
    "real shapes, which are not recorded, reach {derating_without_shapes:.0%} of the ratio of the "
    "peaks ({worst_derating_without_shapes:.0%} to {best_derating_without_shapes:.0%})"
)
_HAS_TENSOR_CORES = (
    "the GPU has tensor cores, as V100 and T4 do: {usual_peak_ratio:.0f} times as fast in FP16 as "
    "without them; at worst it has none: no gain"
)
_TRAINS = "the model trains as well with the shorter mantissa"
_ANSWERS = "the model's outputs are as good with the shorter mantissa"
_PEFT = " In PEFT, autocast_adapter_dtype=False makes adapters 16-bit instead."
BF16, FP16 = "TF32 is no faster: BF16", "no TF32 and no BF16: FP16"
NO_NAME = "the GPU is not named"
MIXED = "other products are in a 16-bit format"
CASTS = "their operands are cast from it"
CASES = {"bf16": BF16, "fp16": FP16}
"""Case by format to move to. TF32 has none: the rule's own texts apply."""
SHAPES_MISSING = "shapes are not recorded"
_TF32_ALREADY_ON = "TF32 that is on already, or mathematics that needs FP32"
"""Text of what would prove the finding wrong in programs without PyTorch."""
FAMILIES = {"gemm": "GEMMs", "convolution": "convolutions"}


class NumberFormat(NamedTuple):
    """A number format that tensor cores multiply faster than CUDA cores do FP32."""

    format: str
    fp32: float
    """Peak in FP32, FLOP/s."""
    peak: float
    """Peak in the format, FLOP/s."""


class Fp32Matmul(Rule):
    """Matrix multiplications or convolutions in full FP32 run on the CUDA cores although the GPU
    has tensor cores for them. An A100 multiplies eight times faster in TF32 than in FP32.

    A kernel counts when its inputs are FP32 AND it is not a tensor-core kernel; neither alone is
    enough. The type comes from the recorded op, or else from the kernel's name. Name lists of
    tensor-core kernels go stale: TensorBoard's misses ``nvjet`` (all matrix time of a B200 trace)
    and ``wmma_tensorop``, and then advises mixed precision to runs already in BF16.

    From compute capability 8.0 the fix is TF32, one line; mixed precision, which changes more, is
    reported by mixed-precision-off. On Volta and Turing, which have no TF32, it is mixed precision
    in FP16. On GeForce cards, whose TF32 is as fast as their FP32, it is mixed precision in BF16.
    Where TF32 kernels of the same kind run in the window, the switch is already on. The other
    kernels then run in FP32 because of their shapes, and this rule does not report them. PyTorch
    turns TF32 on for convolutions and off for matrix products by default, so the rule judges the
    two apart.

    A kernel's new duration is its FP32 duration times the derated ratio of the peaks. If its FLOPs
    and bytes are known, memory bandwidth sets a lower limit. So the small batches of an inference
    server, which are bound by reading weights, gain nothing."""

    id = "fp32-matmul"
    subject = "matrix products"
    title = "GEMMs or convolutions run in FP32 without tensor cores"
    knobs: ClassVar[tuple[str, ...]] = ("matmul-precision", "autocast")
    found_in: ClassVar[tuple[str, ...]] = public_traces(
        "v100_train_copy_heavy pairs/sam_1_fp32_many_syncs pairs/sam_2_fp32_few_syncs "
        "pairs/loader_autograd_workers0 pairs/loader_autograd_workers4 "
        "pairs/loader_profiler_workers0 pairs/loader_profiler_workers4"
    )
    silent_in: ClassVar[tuple[str, ...]] = public_traces(
        "a100_train_6steps two_ranks_rank0 b200_eager h100_bert_small_inference "
        "pairs/sam_3_bf16_compiled_sdpa"
    )
    validation_note = (
        "V100 training (all matrix products are volta_sgemm: fires); A100 and two-rank training "
        "(TF32 is on: silent); B200 and H100 in BF16 (silent)"
    )
    alternatives = "precision"
    references: ClassVar[tuple[str, ...]] = (
        "https://pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices",
        "https://pytorch.org/docs/stable/amp.html",
    )

    min_share = Threshold(
        0.05, "of kernel time; below it, findings of other rules always save more", TRIED_ON_TRACES
    )
    min_step_share = Threshold(
        0.025,
        "of the step: 5% of kernel time on a device that is busy half of it; the replay decides "
        "the rest",
        TRIED_ON_TRACES,
    )
    min_ratio = Threshold(
        1.8, "of the peaks: TF32 has twice FP32's on an A10, eight times on an A100", PEAKS
    )
    usual_peak_ratio = Factor(
        8.0, "of FP32's peak: FP16 on V100 and T4, which these kernels are made for", PEAKS
    )
    derating = Factor(
        0.6,
        "of the ratio of the peaks that real shapes reach: 5 of 8 times, like the best of whole "
        "networks, whose other work is not faster",
        TF32_BLOG,
    )
    best_derating = Factor(
        0.86, "of the ratio: 10240^3 on an A100 in 0.11 s, with TF32 in 0.016 s", TF32_NOTES
    )
    worst_derating = Factor(
        0.25, "of the ratio: 2 of 8 times, like the slowest of these networks", TF32_BLOG
    )
    derating_without_shapes = Factor(
        0.25,
        "of the ratio, where shapes are not known. The matrix products of one recommender model "
        "take 35 ms per step on a V100 in FP32. On an A100 in TF32 they take 14 ms, and bandwidth "
        "explains a part of it",
        REAL_KERNEL,
    )
    best_derating_without_shapes = Factor(
        0.6, "of the ratio, at best: as where shapes are known", TF32_NOTES
    )
    worst_derating_without_shapes = Factor(0.16, "of the ratio, at worst", REAL_KERNEL)
    max_bandwidth_share = Threshold(
        0.9, "of the peak: a kernel at this share of bandwidth is bound by it", NCU
    )
    min_cast_share = Threshold(
        0.2, "of the products' time is spent in casts around them", TRIED_ON_TRACES
    )
    min_praised_share = Threshold(
        0.9, "of matrix time on tensor cores, from which the report says so", TRIED_ON_TRACES
    )
    min_praised_rate = Threshold(0.25, "of the attainable rate, to be praised", TRIED_ON_TRACES)

    fix = (
        "Allow TF32 for FP32 matrix work; check that accuracy holds. Products then have 10 bits of "
        "mantissa instead of 23."
    )
    code = _TF32
    verify = f"{_VERIFY}Compare the loss curve over some hundred steps."
    falsified_by = (
        "a switch that is already set (print torch.get_float32_matmul_precision() and "
        "torch.backends.cudnn.allow_tf32), or mathematics that needs FP32"
    )
    confidence = 0.85
    assumptions: ClassVar[tuple[str, ...]] = (_DERATING_TEXT, _TRAINS)
    cases: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        BF16: {
            "fix": "Train in BF16 with autocast; check that accuracy holds. TF32 is no faster "
            "than FP32 on this GPU; 16-bit formats are.",
            "code": _BF16,
            "falsified_by": _NEEDS_FP32,
        },
        FP16: {
            "fix": "Train in mixed precision with FP16; check that accuracy holds. This GPU has "
            "no TF32. Autocast picks the ops, and the scaler keeps small gradients from vanishing.",
            "code": _SCALED,
            "verify": f"{_VERIFY_FP16}Compare the loss curve over some hundred steps.",
            "falsified_by": _NEEDS_FP32,
        },
        NO_NAME: {
            "fix": "Train in mixed precision if this GPU has tensor cores; check that accuracy "
            "holds. Autocast runs matrix work on them. From Ampere on, use BF16 without a scaler, "
            "or allow TF32.",
            "code": _SCALED,
            "verify": f"{_VERIFY_FP16}Compare the loss curve over some hundred steps.",
            "falsified_by": f"{_NEEDS_FP32}, or a GPU without tensor cores (GTX 16)",
            "confidence": 0.5,
            "assumptions": (_HAS_TENSOR_CORES, _DERATING_TEXT_WITHOUT_SHAPES, _TRAINS),
        },
        SHAPES_MISSING: {
            "confidence": 0.7,
            "assumptions": (_DERATING_TEXT_WITHOUT_SHAPES, _TRAINS),
        },
    }
    inference: ClassVar[Mapping[str, Any]] = {
        "verify": f"{_VERIFY}Compare the model's outputs.",
        "assumptions": (_DERATING_TEXT, _ANSWERS),
        "cases": {
            BF16: {
                "fix": "Run the model in BF16; check that accuracy holds. TF32 is no faster than "
                "FP32 on this GPU; 16-bit formats are.",
                "code": _FORWARD.format("bfloat16"),
            },
            NO_NAME: {
                "fix": "Run the model in FP16, or from Ampere on in BF16 or TF32; check that "
                "accuracy holds.",
                "code": _FORWARD.format("float16"),
                "verify": f"{_VERIFY_FP16}Compare the model's outputs.",
                "assumptions": (_HAS_TENSOR_CORES, _DERATING_TEXT_WITHOUT_SHAPES, _ANSWERS),
            },
            FP16: {
                "fix": "Run the model in FP16; check that accuracy holds. This GPU has no TF32, "
                "and its tensor cores take FP16.",
                "code": _FORWARD.format("float16"),
                "verify": f"{_VERIFY_FP16}Compare the model's outputs.",
            },
            SHAPES_MISSING: {"assumptions": (_DERATING_TEXT_WITHOUT_SHAPES, _ANSWERS)},
        },
    }
    framework_advice = {
        **in_any_language(
            "Let matrix products use the tensor cores: TF32, or 16-bit inputs with 32-bit sums.",
            cuda="cublasSetMathMode(handle, CUBLAS_TF32_TENSOR_OP_MATH), or "
            "CUBLAS_COMPUTE_32F_FAST_TF32 in cublasGemmEx.",
            falsified_by=_TF32_ALREADY_ON,
        ),
        TENSORFLOW: FrameworkAdvice(
            "Train in mixed precision, or allow TF32 in matrix products.",
            'tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")\n'
            "tf.config.experimental.enable_tensor_float_32_execution(True)",
            falsified_by=_TF32_ALREADY_ON,
        ),
        JAX: FrameworkAdvice(
            "Compute in bfloat16, or allow TF32 in matrix products.",
            'jax.config.update("jax_default_matmul_precision", "tensorfloat32")',
            falsified_by=_TF32_ALREADY_ON,
        ),
    }

    def check(self, a: Analysis) -> Outcomes:
        if a.device_id is None:
            return
        matrix = kernel_work.compute_mask(a) & kernel_work.family_mask(a, *FAMILIES)
        total = kernel_work.summed_duration(a, kernel_work.kernel_mask(a))
        matrix_ns = kernel_work.summed_duration(a, matrix)
        if not matrix_ns or matrix_ns < self.min_share * total:
            return
        on_tensor = a.kernels["tensor_core"].fill_null(False).to_numpy()
        off_tensor = (~a.kernels["tensor_core"].fill_null(True)).to_numpy()
        off_tensor &= a.kernels["eligible"].fill_null(True).to_numpy()
        fp32 = _find_fp32_mask(a)
        slow = np.zeros(len(matrix), dtype=bool)
        for family in FAMILIES:
            kind = matrix & kernel_work.family_mask(a, family)
            if not (kind & fp32 & on_tensor).any():  # otherwise TF32 is on and shapes decide
                slow |= kind & fp32 & off_tensor & ~self._is_bandwidth_bound(a)
        share = kernel_work.summed_duration(a, slow) / total
        if share < self.min_share:
            limits = (self.min_praised_share, self.min_praised_rate)
            yield from kernel_work.tensor_core_passed_check(a, matrix, matrix & on_tensor, *limits)
            return
        if kernel_work.summed_duration(a, slow) < self.min_step_share * a.span_ns:
            return  # faster kernels would only wait longer
        if a.trace.meta.vendor == "amd":
            return  # its matrix cores multiply FP32
        if a.hardware is None:
            yield self._check_unknown_gpu(a, slow, share)
            return
        target = self._find_target(a.hardware)
        if target is None or (target.format == "tf32" and self._mask_casts(a, slow).any()):
            return  # mixed-precision-off advises the 16-bit format of the operands
        yield self._build_finding(a, slow, share, target)

    def _mask_casts(self, a: Analysis, slow: kernel_work.Mask) -> kernel_work.Mask:
        """Return the mask of casts around these products; empty if they take little time."""
        matrix = kernel_work.compute_mask(a) & kernel_work.family_mask(a, *FAMILIES)
        casts = find_casts(a, slow, matrix)
        min_ns = self.min_cast_share * kernel_work.summed_duration(a, slow)
        return casts & (kernel_work.summed_duration(a, casts) >= max(1.0, min_ns))

    def _check_unknown_gpu(
        self, a: Analysis, slow: kernel_work.Mask, share: float
    ) -> Finding | SkippedCheck:
        """Advise FP16 if kernels made for Volta and Turing run; otherwise report that the GPU is
        unknown."""
        work_time = kernel_work.of_kernel_time(a, kernel_work.summed_duration(a, slow), share)
        names = a.trace.gpu["name"]
        made_for = [name_matches(names, pattern).any() for pattern in (_VOLTA, _LATER)]
        name = a.device.name if a.device is not None else None
        if name is None and made_for == [True, False]:
            target = NumberFormat("fp16", 1.0, self.usual_peak_ratio)
            saved = [
                self._estimate_saved(a, slow, target, derating, blind)
                for derating, blind in (
                    (self.derating, self.derating_without_shapes),
                    (self.best_derating, self.best_derating_without_shapes),
                )
            ]
            families = [
                name for name in FAMILIES if (slow & kernel_work.family_mask(a, name)).any()
            ]
            rows = kernel_work.compute_mask(a) & kernel_work.family_mask(a, *families)
            select = Select(on="gpu", kind=("kernel",), family=tuple(families))
            return Finding(
                summary=f"Matrix work in FP32 takes {work_time}. Its kernels are from cuBLAS and "
                "cuDNN for Volta and Turing; later GPUs run them too. Most of these GPUs have "
                "tensor cores. --recorded-gpu NAME narrows the range.",
                evidence=[
                    self.compare("FP32 matrix time, share of kernel time", share, "min_share"),
                    amount_per_step(a, "FP32 matrix time", kernel_work.summed_duration(a, slow)),
                ],
                where=kernel_work.kernel_locations(a, slow),
                edits=[kernel_work.scale_kernels(a, rows, [*saved, 0.0], select)],
                **self.case(NO_NAME),
            )
        return SkippedCheck(
            what=f"whether tensor cores would be faster at FP32 matrix work, {work_time}",
            why=f"the GPU {name!r} is unknown" if name else "the trace does not name its GPU",
            missing="GPU unknown",
            record="" if name else "a profiler that writes deviceProperties",
        )

    def _find_target(self, gpu: GpuSpec) -> NumberFormat | None:
        """Return the format to move to, or ``None`` if this GPU has none much faster than FP32."""
        fp32 = gpu.peak("fp32")
        for name in ("tf32", "bf16", "fp16"):
            if name == "bf16" and gpu.compute < (8, 0):
                continue
            peak = gpu.peak(name)
            if fp32 and peak and peak >= self.min_ratio * fp32:
                return NumberFormat(name, fp32, peak)
        return None

    def _is_bandwidth_bound(self, a: Analysis) -> kernel_work.Mask:
        """Return kernels that cannot become 10% faster, because moving their bytes takes as
        long."""
        if a.hardware is None:
            return np.zeros(a.trace.gpu.height, dtype=bool)
        bound = self._memory_time(a, np.arange(a.trace.gpu.height))
        return np.asarray(bound > 0.9 * a.trace.gpu["dur"].to_numpy(), dtype=np.bool_)

    def _memory_time(self, a: Analysis, index: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the time, ns, that rows of ``trace.gpu`` need to move their bytes; 0 if
        unknown."""
        moved = a.kernels["moved"].gather(index).cast(pl.Float64).fill_null(0.0).to_numpy()
        if a.hardware is None:
            return np.zeros(len(index))
        return moved / (a.hardware.bandwidth * self.max_bandwidth_share) * 1e9

    def _build_finding(
        self, a: Analysis, slow: kernel_work.Mask, share: float, target: NumberFormat
    ) -> Finding:
        families = [name for name in FAMILIES if (slow & kernel_work.family_mask(a, name)).any()]
        rows = kernel_work.compute_mask(a) & kernel_work.family_mask(a, *families)
        saved = (
            self._estimate_saved(a, slow, target, derating, blind)
            for derating, blind in (
                (self.derating, self.derating_without_shapes),
                (self.best_derating, self.best_derating_without_shapes),
                (self.worst_derating, self.worst_derating_without_shapes),
            )
        )
        select = Select(on="gpu", kind=("kernel",), family=tuple(families))
        slow_ns = kernel_work.summed_duration(a, slow)
        work_name = " and ".join(FAMILIES[name] for name in families)
        work_name = t.upper_first(work_name)
        shapes_known = bool(a.kernels["flops"].is_not_null().to_numpy()[slow].mean() >= 0.5)
        return Finding(
            title=f"{work_name} run in FP32 without tensor cores",
            summary=(
                f"{work_name} in FP32 on the CUDA cores take "
                f"{kernel_work.of_kernel_time(a, slow_ns, share)}. This GPU's "
                f"tensor cores are {target.peak / target.fp32:.0f}x as fast in "
                f"{target.format.upper()}."
            ),
            evidence=[
                self.compare("FP32 matrix time, share of kernel time", share, "min_share"),
                amount_per_step(a, "FP32 matrix time", slow_ns),
                Evidence("peak in FP32", target.fp32, "FLOP/s"),
                Evidence(f"peak in {target.format.upper()}", target.peak, "FLOP/s"),
                *_list_switches(a),
            ],
            where=kernel_work.kernel_locations(a, slow),
            edits=[kernel_work.scale_kernels(a, rows, saved, select)],
            confidence_notes=[]
            if shapes_known
            else ["shapes are not recorded: memory-bound matrices gain less"],
            **(self.case(CASES[target.format]) if target.format in CASES else {}),
            **({} if shapes_known else self.case(SHAPES_MISSING)),
        )

    def _estimate_saved(
        self,
        a: Analysis,
        slow: kernel_work.Mask,
        target: NumberFormat,
        derating: float,
        blind: float,
    ) -> float:
        """Return the time, ns, that the slow kernels save on the tensor cores."""
        index = np.flatnonzero(slow)
        dur = a.trace.gpu["dur"].to_numpy()[index].astype(float)
        ratio = target.fp32 / target.peak
        known = a.kernels["flops"].gather(index).is_not_null().to_numpy()
        after = dur * np.minimum(1.0, ratio / np.where(known, derating, blind))
        after = np.maximum(after, self._memory_time(a, index))
        return float(np.maximum(dur - after, 0.0).sum())

    @staticmethod
    def examples() -> Examples:
        """Return FP32 products on an A100 with TF32 off, and on a V100."""
        tf32 = "cutlass_80_tensorop_s1688gemm_256x128_32x3_nn_align4"
        tf32 = f"void cutlass::Kernel<{tf32}>({tf32}::Params)"
        wmma = (
            "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x2_tn_"
            "align8>(cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16::Params)"
        )
        nvjet = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT"
        sliced = "ampere_sgemm_32x32_sliced1x4_tn"

        def add_matrix_vector(b: TraceBuilder) -> None:
            # eight rows times 16384 x 16384: 1.07 GB of weights, 0.53 ms at 2 TB/s
            b.run("aten::mm", sliced, 560, [[8, 16384], [16384, 16384]])

        def add_idle_time(b: TraceBuilder) -> None:
            for _ in range(10):
                b.run("aten::mm", sliced, 4, [[64, 64], [64, 64]])
                b.host(100)

        def add_mixed_precision(b: TraceBuilder) -> None:
            b.run("aten::mm", tf32, 1500, [[4096, 4096], [4096, 4096]])
            b.run("aten::mm", "ampere_sgemm_128x64_nn", 200, [[4096, 33], [33, 647]])

        unknown = _build_training("A100", "float", "ampere_sgemm_128x128_nn", 8000)
        unknown.head["deviceProperties"][0]["name"] = "Some GPU of next year"
        guard = "share < self.min_share"
        unnamed = _build_training("V100", "float", "volta_sgemm_128x128_nn", 10000)
        unnamed.head["deviceProperties"] = []
        return {
            "a GPU without a name": unnamed,
            "TF32 off on an A100": _build_training(
                "A100", "float", "ampere_sgemm_128x128_nn", 8000
            ),
            "FP32 on a V100": _build_training("V100", "float", "volta_sgemm_128x128_nn", 10000),
            "an unknown GPU": (unknown, "name is None"),
            "BF16 as nvjet": (_build_training("H100", "c10::BFloat16", nvjet, 300), guard),
            "BF16 as wmma_tensorop": (_build_training("H100", "c10::BFloat16", wmma, 900), guard),
            "TF32 is on": (_build_training("A100", "float", tf32, 1500), guard),
            "TF32 is on, an odd shape is left": (example_steps(add_mixed_precision), guard),
            "bound by reading the weights": (
                example_steps(add_matrix_vector),
                "max_bandwidth_share",
            ),
            "the device is mostly idle": (example_steps(add_idle_time), "min_step_share"),
            "operands are cast from BF16": (_build_adapters(), "self._mask_casts(a, slow)"),
        }


class MixedPrecisionOff(Fp32Matmul):
    """Matrix multiplications or convolutions in full FP32, as fp32-matmul finds them, on a GPU that
    multiplies in BF16 twice as fast as in TF32. With autocast the products use BF16, and so does
    attention, which then runs as FlashAttention.

    Products speed up by the derated ratio of the peaks, but take at least the time to move half of
    their bytes. Casts of their operands come on top: about as much traffic as the products have in
    FP32 (0.5 to 1.5 times). Attention in FP32 is assumed to reach a share of the attainable rate,
    as in unfused-attention. Pointwise kernels, softmax, losses and norms keep their time: autocast
    halves the bytes of some and leaves others in FP32.

    Where other products already run in 16 bits, operands may be cast to FP32 for a product, and its
    result cast back. This happens with FP32 adapters on a BF16 base without autocast. The fix
    removes these casts and casts the small weights instead. A cast counts right before such a
    product if it has as many values as an operand. Right after the product, it must have as many
    values as the result."""

    id = "mixed-precision-off"
    title = "The step computes in FP32 without mixed precision"
    knobs = ("autocast",)
    found_in = public_traces("pairs/sam_1_fp32_many_syncs pairs/sam_2_fp32_few_syncs")
    silent_in = public_traces(
        "v100_train_copy_heavy a100_train_6steps two_ranks_rank0 b200_eager "
        "h100_bert_small_inference pairs/sam_3_bf16_compiled_sdpa"
    )
    validation_note = (
        "mask generation in FP32 on an A100, whose authors went to BF16 (fires); TF32 and BF16 "
        "(silent)"
    )
    references = ("https://pytorch.org/docs/stable/amp.html",)

    cast_share = Factor(
        1.0, "of the products' bytes in FP32, for casts of operands", TRIED_ON_TRACES
    )
    best_cast_share = Factor(0.5, "of these bytes, at best", TRIED_ON_TRACES)
    worst_cast_share = Factor(1.5, "of these bytes, at worst", TRIED_ON_TRACES)
    removed_cast_share = Factor(
        0.8, "of these casts' time is saved: weights are cast instead", TRIED_ON_TRACES
    )
    worst_removed_cast_share = Factor(0.5, "of it, at worst", TRIED_ON_TRACES)
    attained_share = kernel_work.ATTAINED_SHARE
    best_attained_share = kernel_work.BEST_ATTAINED_SHARE
    worst_attained_share = Factor(0.2, "of the attainable rate, at worst: attention", SAM_PAIR)

    fix = (
        "Train in BF16 with autocast; check that accuracy holds. Weights and optimizer stay in "
        "FP32, and no scaler is needed."
    )
    code = _TF32_FIRST + _BF16
    falsified_by = "mathematics that needs FP32, or an autocast region that these products leave"
    assumptions = (
        _DERATING_TEXT,
        "bytes of casts are {cast_share:.0%} of those of the products ({best_cast_share:.0%} to "
        "{worst_cast_share:.0%})",
        _TRAINS,
    )
    cases: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        BF16: {},
        MIXED: {
            "title": "Some matrix products run in FP32, others in {format}",
            "fix": "Compute these products in {format}, like the others; check that accuracy "
            "holds. Put them inside the autocast region too, and remove any .float() before them.",
            "code": 'with torch.autocast("cuda", dtype={dtype}):\n'
            "    # the whole model, with its head: no .float() before it\n"
            "    loss = criterion(model(x), y)",
        },
        CASTS: {
            "title": "Tensors in {format} are cast to FP32 for products, and back",
            "fix": "Run the forward pass under autocast: it casts the small FP32 weights to "
            "{format}, and no longer the activations to FP32. Weights and optimizer stay in "
            "FP32.{library}",
            "code": 'with torch.autocast("cuda", dtype={dtype}):\n'
            "    loss = model(**batch).loss  # loss.backward() stays outside",
        },
        SHAPES_MISSING: {
            "confidence": 0.7,
            "assumptions": (_DERATING_TEXT_WITHOUT_SHAPES, _TRAINS),
        },
    }
    inference: ClassVar[Mapping[str, Any]] = {
        "fix": "Run the model in BF16, whole or with autocast; check that accuracy holds.",
        "code": _TF32_FIRST + _FORWARD.format("bfloat16"),
        "verify": f"{_VERIFY}Compare the model's outputs.",
        "assumptions": (_DERATING_TEXT, assumptions[1], _ANSWERS),
        "cases": {
            MIXED: {
                "code": 'with torch.inference_mode(), torch.autocast("cuda", dtype={dtype}):\n'
                "    # the whole model, with its head: no .float() before it\n"
                "    y = model(x)"
            },
            CASTS: {
                "fix": "Run the model under autocast: it casts the small FP32 weights to {format}, "
                "and no longer the activations to FP32. Or convert these weights once.{library}",
                "code": 'with torch.inference_mode(), torch.autocast("cuda", dtype={dtype}):\n'
                "    y = model(x)",
            },
            SHAPES_MISSING: {"assumptions": (_DERATING_TEXT_WITHOUT_SHAPES, _ANSWERS)},
        },
    }
    framework_advice = {
        TENSORFLOW: FrameworkAdvice(
            "Train in mixed precision.",
            'tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")',
        ),
        JAX: FrameworkAdvice(
            "Compute in bfloat16.", 'jax.config.update("jax_default_matmul_precision", "bfloat16")'
        ),
    }

    def check(self, a: Analysis) -> Outcomes:
        """Check the same matrix kernels; fp32-matmul reports passed and skipped checks."""
        if a.hardware is not None:
            yield from (outcome for outcome in super().check(a) if isinstance(outcome, Finding))

    def _find_target(self, gpu: GpuSpec) -> NumberFormat | None:
        cheaper = super()._find_target(gpu)
        fp32, peak = gpu.peak("fp32"), gpu.peak("bf16")
        if cheaper is None or cheaper.format != "tf32" or not fp32 or not peak:
            return None  # fp32-matmul advises it
        return NumberFormat("bf16", fp32, peak)

    def _build_finding(
        self, a: Analysis, slow: kernel_work.Mask, share: float, target: NumberFormat
    ) -> Finding:
        finding = super()._build_finding(a, slow, share, target)
        compute = kernel_work.compute_mask(a)
        matrix = compute & kernel_work.family_mask(a, *FAMILIES)
        attention = compute & kernel_work.family_mask(a, "attention")
        attention &= a.kernels["dtype"].is_in(["fp32", "tf32"]).fill_null(False).to_numpy()
        edits, evidence = list(finding.edits), list(finding.evidence)
        half_rate = attainable_roofs(a.hardware).matmul.get("bf16")
        if half_rate is not None and attention.any():
            flops = a.kernels["flops"].cast(pl.Float64).fill_null(np.nan).to_numpy()[attention]
            spent = a.trace.gpu["dur"].to_numpy()[attention].astype(float)
            saved = [
                float(
                    np.nan_to_num(spent - 1e9 * flops / (attained_share * half_rate.rate))
                    .clip(0.0)
                    .sum()
                )
                for attained_share in self.range_of("attained_share")
            ]
            attention_time = of_step(a, kernel_work.summed_duration(a, attention))
            names = a.trace.gpu["name"].gather(np.flatnonzero(attention)).cast(pl.String)
            select = kernel_work.select_kernels(names.unique().to_list())
            edits.append(kernel_work.scale_kernels(a, attention, saved, select))
            with_attention = finding.summary.replace(". ", f", and attention {attention_time}. ", 1)
            finding = replace(finding, summary=with_attention)
        dtypes = a.kernels["dtype"].filter(pl.Series(a.in_window & matrix))
        half_dtypes = dtypes.filter(dtypes.is_in(["bf16", "fp16"])).mode()
        text = {"title": self.title}
        if len(half_dtypes):
            dtype = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[half_dtypes[0]]
            placeholders = {"format": half_dtypes[0].upper(), "dtype": dtype}
            text = self.case(MIXED, **placeholders)
            casts = self._mask_casts(a, slow)
            if casts.any():
                ns = kernel_work.summed_duration(a, casts)
                peft = runs_code_of(a, r"(?:^|/)peft/")
                text = self.case(CASTS, **placeholders, library=_PEFT if peft else "")
                names = a.trace.gpu["name"].filter(pl.Series(casts)).cast(pl.String).unique()
                rows = kernel_work.kernel_mask(a)
                rows &= a.trace.gpu["name"].cast(pl.String).is_in(names.implode()).to_numpy()
                saved_casts = (
                    ns * self.removed_cast_share,
                    float(ns),
                    ns * self.worst_removed_cast_share,
                )
                select = kernel_work.select_kernels(names.to_list())
                edits.append(kernel_work.scale_kernels(a, rows, saved_casts, select))
                cast_count = count_noun(round(int(casts.sum()) / a.step_count), "cast")
                text["summary"] = f"{finding.summary} {cast_count}{per_step(a)} of operands and "
                text["summary"] += f"results take {of_step(a, ns)}."
                evidence += [
                    amount_per_step(a, "casts around them", int(casts.sum()), "count"),
                    amount_per_step(a, "time of these casts", ns),
                ]
        return replace(finding, edits=edits, evidence=evidence, **text)

    def _estimate_saved(
        self,
        a: Analysis,
        slow: kernel_work.Mask,
        target: NumberFormat,
        derating: float,
        blind: float,
    ) -> float:
        casts = {
            self.best_derating: self.best_cast_share,
            self.worst_derating: self.worst_cast_share,
        }
        moved = a.kernels["moved"].cast(pl.Float64).fill_null(0.0).to_numpy()[slow].sum()
        memory = attainable_roofs(a.hardware).memory
        cast_ns = (
            1e9 * moved * casts.get(derating, self.cast_share) / memory.rate if memory else 0.0
        )
        if self._mask_casts(a, slow).any():
            cast_ns = 0.0  # operands are in 16 bits already
        return max(0.0, super()._estimate_saved(a, slow, target, derating, blind) - float(cast_ns))

    @staticmethod
    def examples() -> Examples:
        guard = "share < self.min_share"
        tf32 = "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_256x128_32x3_nn_align4>"
        return {
            "FP32 on an A100": _build_training("A100", "float", "ampere_sgemm_128x128_nn", 8000),
            "no TF32: the other rule": (
                _build_training("V100", "float", "volta_sgemm_128x128_nn", 10000),
                "target is None",
            ),
            "TF32 is on": (_build_training("A100", "float", tf32, 1500), guard),
            "operands are cast from BF16": _build_adapters(),
        }


def _find_fp32_mask(a: Analysis) -> kernel_work.Mask:
    """Return rows whose inputs are FP32, by the op's types or else by the kernel's name."""
    dtype = a.kernels["dtype"]
    typed: kernel_work.Mask = dtype.is_in(["fp32", "tf32"]).fill_null(False).to_numpy()
    named: kernel_work.Mask = name_matches(a.trace.gpu["name"], FP32_NAMES).to_numpy()
    unknown: kernel_work.Mask = dtype.is_null().to_numpy()
    return typed | (unknown & named)


def _list_switches(a: Analysis) -> list[Evidence]:
    """Return the recorded settings of the TF32 switches."""
    names = ("float32_matmul_precision", "cuda.matmul.allow_tf32", "cudnn.allow_tf32")
    flags = {} if a.run_steps is None else a.run_steps.rank_record.rank.flags
    return [Evidence(name, str(flags[name])) for name in names if name in flags]


def _build_training(gpu: str, dtype: str, kernel: str, us: float) -> TraceBuilder:
    shapes = [[4096, 4096], [4096, 4096]]
    return example_steps(lambda b: b.run("aten::mm", kernel, us, shapes, dtype, times=3), gpu)


def _build_adapters() -> TraceBuilder:
    """Build a BF16 base with FP32 adapters, and a norm that computes in FP32."""
    shape, small = [4096, 4096], [4096, 512]
    kernel = "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>"

    def cast(b: TraceBuilder, to: str, source: str) -> None:
        b.run("aten::copy_", kernel, 80, [shape, shape], [to, source])

    def body(b: TraceBuilder) -> None:
        bf16 = "c10::BFloat16"
        cast(b, "float", bf16)
        cast(b, bf16, "float")
        b.run("aten::mm", "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", 300, [shape, shape], bf16)
        cast(b, "float", bf16)
        b.run("aten::mm", "ampere_sgemm_128x128_nn", 400, [shape, small])
        b.run("aten::mm", "ampere_sgemm_128x128_nn", 400, [small, small[::-1]])
        cast(b, bf16, "float")

    return example_steps(body, "H100")
