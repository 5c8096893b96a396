"""Convolutions that transpose their tensors back and forth."""

import numpy as np
import polars as pl

from advisor.core import text as t
from advisor.core.finding import Edit, Finding, Outcomes, PassedCheck, Select
from advisor.core.rule import Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.host.names import name_matches
from advisor.measure.host.operators import attainable_roofs
from advisor.replay.operations import ROOFLINE_SHARE
from advisor.rules.support import kernel_work
from advisor.rules.support.below_rate import saved_time
from advisor.rules.support.citations import SILENT_TRACES, TRACELENS, TRIED_ON_TRACES
from advisor.rules.support.common import amount_per_step, example_steps, scale_edit
from advisor.testing import Examples, TraceBuilder

NORMS = r"batch_norm_(?:collect_statistics|transform_input|backward(?:_reduce|_elemt)?)_kernel"
"""PyTorch's own batch norm kernels in NCHW order; those in channels-last order have other names."""


class LayoutTransposes(Rule):
    """Tensor cores convolve in channels-last order (NHWC). In PyTorch's default order (NCHW) each
    tensor is transposed before a convolution and back after it. These kernels move bytes and
    compute nothing.

    The rule recognises transposes by their kernels' names. Their share is a share of all
    convolution time, including their own. In FP32 without TF32 the library convolves in NCHW and
    transposes nothing. A channels-last model has no transposes either. The rule is silent on both.
    The first layer of a channels-last model may keep one (three input channels), which stays below
    the threshold.

    PyTorch's own batch norm is slow in NCHW order, where each channel is split into as many pieces
    as there are images. Its kernels count where their bytes are known: in channels-last order they
    are assumed to reach a share of the memory's rate. The library may choose other kernels for the
    convolutions themselves, which the range allows for. Pooling and other kernels keep their
    durations."""

    id = "layout-transposes"
    title = "Convolutions transpose between NCHW and NHWC"
    knobs = ("channels-last",)
    found_in = ("traces/mi210_gpu_only",)
    silent_in = SILENT_TRACES
    validation_note = (
        "MI210 ResNet training (MIOpen transposes, 34% of convolution time: fires); A100 ResNet "
        "at 24% busy (27% of convolution time, but the device waits for the host: silent)"
    )
    references = (
        "https://pytorch.org/tutorials/intermediate/memory_format_tutorial.html",
        "https://docs.nvidia.com/deeplearning/performance/dl-performance-convolutional/#tensor-layout",
    )

    min_share = Threshold(
        0.10, "of convolution time: consider from 10%, strongly from 20%", TRACELENS
    )
    min_time = Threshold(
        0.02,
        "of kernel time: converting a network with one convolution does not pay",
        TRIED_ON_TRACES,
    )
    min_busy = kernel_work.MIN_BUSY
    attained_share = Factor(
        ROOFLINE_SHARE, "of the memory's rate: batch norm in channels-last order", TRACELENS
    )
    best_attained_share = Factor(1.0, "of the memory's rate, at best", TRIED_ON_TRACES)
    worst_attained_share = Factor(0.5, "of the memory's rate, at worst", TRIED_ON_TRACES)
    best_convolution_share = Factor(
        0.45,
        "of the attainable rate, at best, for convolutions that are slower now",
        TRIED_ON_TRACES,
    )
    best_speedup = Factor(2.0, "times faster at most, at best", TRIED_ON_TRACES)
    min_praised_share = Threshold(
        0.2,
        "of kernel time in convolutions without transposes, from which the report says so",
        TRIED_ON_TRACES,
    )

    fix = (
        "Keep model and inputs in channels-last order. Convolutions, batch norm, pooling and "
        "pointwise ops then keep this order, and nothing is reordered in between."
    )
    code = (
        "model = model.to(memory_format=torch.channels_last)\n"
        "x = x.to(memory_format=torch.channels_last)   # inputs too, on the device"
    )
    verify = (
        "Profile again: the transpose kernels are gone. If some stay, an op in between returns "
        "NCHW: print(out.is_contiguous(memory_format=torch.channels_last))."
    )
    falsified_by = (
        "a model that is in channels-last order already: one op returns NCHW, and only the "
        "transposes around it can go"
    )
    assumptions = (
        "every op between the convolutions keeps channels-last order",
        "batch norm reaches {attained_share:.0%} of the memory's rate ({worst_attained_share:.0%} "
        "to {best_attained_share:.0%})",
        "at best, slow convolutions then reach {best_convolution_share:.0%} of the attainable rate",
    )
    confidence = 0.85
    cases = {
        "on ROCm": {
            "fix": f"{fix} On ROCm this needs an environment variable.",
            "code": f"# shell: export PYTORCH_MIOPEN_SUGGEST_NHWC=1\n{code}",
        }
    }

    def check(self, a: Analysis) -> Outcomes:
        if a.device_id is None:
            return
        rows = kernel_work.compute_mask(a)
        transposes, convolutions = kernel_work.transposes_and_convolutions(a)
        total = kernel_work.summed_duration(a, kernel_work.kernel_mask(a))
        conv_ns, transpose_ns = (
            kernel_work.summed_duration(a, convolutions),
            kernel_work.summed_duration(a, transposes),
        )
        if not conv_ns:
            return
        share = transpose_ns / conv_ns
        if share < self.min_share or transpose_ns < self.min_time * total:
            on_tensor_cores = a.kernels["tensor_core"].fill_null(False).to_numpy()
            if (
                transpose_ns < 0.01 * conv_ns
                and kernel_work.summed_duration(a, convolutions & on_tensor_cores)
                >= self.min_praised_share * total
            ):
                yield PassedCheck(text="convolutions run on tensor cores without layout transposes")
            return
        if kernel_work.busy_share(a) < self.min_busy:
            return
        amd = a.trace.meta.vendor == "amd"
        norms = rows & name_matches(a.trace.gpu["name"], NORMS).to_numpy()
        norm_ns = kernel_work.summed_duration(a, norms)
        saved = [
            self._estimate_saved(a, norms, attained_share)
            for attained_share in self.range_of("attained_share")
        ]
        edits = [
            Edit(
                op="remove", select=Select(on="gpu", kind=("kernel",), name=kernel_work.TRANSPOSES)
            )
        ]
        if saved[1] > 0:
            select = Select(on="gpu", kind=("kernel",), name=NORMS)
            edits.append(kernel_work.scale_kernels(a, norms, saved, select))
        table = a.rooflines.filter(pl.col("family") == "convolution")
        if not table.is_empty():
            saved_share = saved_time(table, self.best_convolution_share, self.best_speedup)
            saved_share /= float(table["dur"].sum())
            select = Select(on="gpu", kind=("kernel",), family=("convolution",))
            edits.append(scale_edit(select, 1.0, 1 - saved_share, 1.0))
        assumptions = self.fill_thresholds(
            self.assumptions if saved[1] > 0 else self.assumptions[::2]
        )
        yield Finding(
            summary=(
                f"Transposes between NCHW and NHWC take {share:.0%} of convolution time "
                f"({t.format_duration(transpose_ns / a.step_count)} {t.format_per(a.per)})."
            ),
            evidence=[
                self.compare("layout transposes, share of convolution time", share, "min_share"),
                amount_per_step(a, "layout transposes", transpose_ns),
                amount_per_step(a, "transposes", int(transposes.sum()), "count"),
                *([amount_per_step(a, "batch norm in NCHW order", norm_ns)] if norm_ns else []),
            ],
            where=kernel_work.kernel_locations(a, transposes),
            edits=edits,
            assumptions=assumptions,
            **(self.case("on ROCm") if amd else {}),
        )

    @staticmethod
    def _estimate_saved(a: Analysis, norms: kernel_work.Mask, attained_share: float) -> float:
        """Estimate the time, ns, that these kernels save at this share of the memory's rate; 0 if
        unknown."""
        memory = attainable_roofs(a.hardware).memory
        if memory is None:
            return 0.0
        moved = a.kernels["moved"].cast(pl.Float64).fill_null(np.nan).to_numpy()
        ideal = moved / (attained_share * memory.rate) * 1e9
        dur = a.trace.gpu["dur"].to_numpy()
        return float(np.nan_to_num(np.clip(dur - ideal, 0.0, None))[norms].sum())

    @staticmethod
    def examples() -> Examples:
        shape = [64, 512, 512]

        def add_products(b: TraceBuilder) -> None:
            kernel = "ampere_fp16_s16816gemm_fp16_128x128_ldg8_nn"
            b.run("aten::bmm", kernel, 800, [shape, shape], "c10::Half")
            copy = "void at::native::elementwise_kernel<128, 4>"
            b.run("aten::copy_", copy, 300, [shape], "c10::Half")

        return {
            "cuDNN": _build_network("void cudnn::ops::nchwToNhwcKernel<__half, __half, float>", 90),
            "MIOpen": _build_network("batched_transpose_16x64_pack_1x4_ediv_1x2_half", 90),
            "channels last": (_build_network(None, 0), "share < self.min_share"),
            "one small transpose": (
                _build_network("void cudnn::ops::nchwToNhwcKernel<__half>", 10),
                "share < self.min_share",
            ),
            "transposes without a convolution": (example_steps(add_products), "not conv_ns"),
        }


def _build_network(transpose: str | None, us: float) -> TraceBuilder:
    shapes = [[64, 256, 56, 56], [256, 256, 3, 3]]

    def body(b: TraceBuilder) -> None:
        for _ in range(5):
            with b.op("aten::cudnn_convolution", shapes, "c10::Half"):
                if transpose:
                    b.launch(transpose, us)
                b.launch(
                    "sm80_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_"
                    "tilesize128x128x32_stage4_warpsize2x2x1_g1_tensor16x8x16_kernel",
                    400,
                )
            kernel = "void cudnn::bn_fw_tr_1C11_kernel_NCHW<__half, float>"
            b.run("aten::cudnn_batch_norm", kernel, 100, shapes[:1], "c10::Half")

    return example_steps(body)
