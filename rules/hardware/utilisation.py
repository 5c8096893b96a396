"""Rules about the used share of the GPU: multiprocessors behind the NVML figure, and MFU."""

import numpy as np
import polars as pl

from advisor.core import text as t
from advisor.core.finding import Finding, Outcomes, impact_without_gain
from advisor.core.rule import Citation, Evidence, Rule, Threshold
from advisor.core.run_directory import GpuSample
from advisor.measure import Analysis
from advisor.rules.support.citations import CHOSEN, GPUPROF, TRACELENS
from advisor.rules.support.common import record_example, run_steps_of
from advisor.testing import Examples, TraceBuilder


class UtilisationIllusion(Rule):
    """Monitors show full GPU utilisation, but utilisation is the share of time in which any kernel
    runs, even one on a single multiprocessor. Where NVML says 90% or more and less than half of the
    multiprocessors are active, the GPU has room for more work. GPM counts the active ones, on
    Hopper and later.

    Memory-bound work leaves arithmetic units idle and is not an illusion. The rule stays silent
    where GPM shows DRAM busy for 60% or more of the time."""

    id = "utilisation-illusion"
    title = "GPU utilisation reads high, but most SMs are idle"
    reads_record = True
    references = (
        "https://docs.nvidia.com/deploy/nvml-api/structnvmlUtilization__t.html",
        "https://arxiv.org/abs/2501.16909",
    )

    min_utilisation = Threshold(90.0, "%, mean", CHOSEN)
    max_active = Threshold(50.0, "% of the multiprocessors", CHOSEN)
    max_dram = Threshold(60.0, "% of the time DRAM is busy: above, memory is the limit", TRACELENS)
    min_samples = Threshold(5, "samples", CHOSEN)

    fix = (
        "Give the GPU more work at a time: a larger batch, fused kernels, fewer small launches "
        "(torch.compile, CUDA graphs). The findings of a profiled window name the right one."
    )
    verify = "Record again: more multiprocessors are active, and samples per second rise."
    falsified_by = "a profiled window whose kernels fill the device"
    confidence = 0.8

    def check(self, a: Analysis) -> Outcomes:
        samples = [
            (gpu.utilisation, gpu.gpm)
            for gpu in run_steps_of(a).gpus
            if gpu.utilisation is not None and gpu.gpm and "sm_util" in gpu.gpm
        ]
        if len(samples) < self.min_samples:
            return
        utilisation = float(np.mean([value for value, _ in samples]))
        active, dram, tensor = (
            float(np.mean(values)) if values else None
            for values in (
                [gpm[name] for _, gpm in samples if name in gpm]
                for name in ("sm_util", "dram", "tensor")
            )
        )
        assert active is not None
        if utilisation < self.min_utilisation or active >= self.max_active:
            return
        if dram is not None and dram >= self.max_dram:
            return
        yield Finding(
            summary=(
                f"NVML shows {utilisation:.0f}% utilisation, but only {active:.0f}% of the "
                "multiprocessors are active. Some kernel nearly always runs, on a part of the GPU."
            ),
            evidence=[
                self.compare("utilisation (NVML), %", utilisation, "min_utilisation", ""),
                self.compare("multiprocessors active (GPM), %", active, "max_active", ""),
                self.compare("DRAM busy (GPM), %", dram, "max_dram", ""),
                Evidence("tensor cores busy (GPM), %", tensor),
                self.compare("samples of the GPU", len(samples), "min_samples", "count"),
            ],
            impact=impact_without_gain(
                "the findings about kernels say how much of the room can be used"
            ),
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "a fifth of the device": _build_record(99, 20),
            "really busy": (_build_record(99, 85), "max_active"),
            "shown as idle": (_build_record(30, 10), "min_utilisation"),
            "memory-bound": (_build_record(99, 40, dram=80), "max_dram"),
            "no GPM": (_build_record(99, None), "len(samples) < self.min_samples"),
        }


class LowMfu(Rule):
    """Model FLOP utilisation (MFU): the step's FLOPs over what the GPU could do in that time at the
    peak of the data types in use. Below 30% (gpuprof) there is room. Well-tuned training of large
    models reaches 40 to 55% (MegaScale: 55% on 12,288 GPUs).

    The FLOPs come from the shapes of the profiled window. The time is the recorder's unprofiled
    median where it exists, because the profiler lengthens steps. Memory-bound work and a GPU that
    waits have a low MFU by nature, and separate findings. So the rule leaves out steps in which
    matrix products, convolutions and attention take less than half of the time."""

    id = "low-mfu"
    title = "Low MFU: the step reaches a small part of the GPU's peak"
    reads_record = True
    only_without_findings = True
    sources = (
        Citation("MegaScale: 40 to 55% for large models", "https://arxiv.org/abs/2402.15627"),
    )
    references = ("https://arxiv.org/abs/2402.15627", "https://arxiv.org/abs/2204.02311")

    max_mfu = Threshold(0.30, "of the peak", GPUPROF)
    min_matrix = Threshold(0.50, "of the step in GEMM, convolution and attention", CHOSEN)

    fix = "See what limits the step: the findings, and advisor analyze --by operator."
    verify = "Record again: MFU rises."
    falsified_by = "a count of the model's FLOPs that is much higher"
    confidence = 0.7

    def check(self, a: Analysis) -> Outcomes:
        if a.device_id is None or a.mfu is None or not a.step_ns:
            return
        run_steps = run_steps_of(a)
        matrix_families = pl.col("family").is_in(["gemm", "convolution", "attention"])
        step = a.step_ns
        if run_steps.median is not None and run_steps.count >= 10:
            step = min(step, run_steps.median)
        mfu = a.mfu * a.step_ns / step
        matrix = float(a.families.filter(matrix_families)["dur"].sum() or 0.0) / a.step_count / step
        if mfu >= self.max_mfu or matrix < self.min_matrix:
            return
        yield Finding(
            summary=(
                f"MFU is {mfu:.0%} in a step of {t.format_duration(step)}, of which matrix work "
                f"takes {min(matrix, 1.0):.0%}."
            ),
            evidence=[
                self.compare("model FLOP utilisation", mfu, "max_mfu"),
                Evidence("model FLOP utilisation in the profiled window", a.mfu, "share"),
                self.compare("matrix work, share of the step", min(matrix, 1.0), "min_matrix"),
                Evidence(
                    "device busy, share",
                    a.breakdown.busy.total / max(a.span_ns, 1),
                    "share",
                    per=a.per,
                ),
            ],
            impact=impact_without_gain("many causes add up to it"),
            informational=True,
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "a tenth of the peak": _build_products(9000),
            "close to the peak": (_build_products(1000), "max_mfu"),
            "memory-bound": (_build_products(9000, other=20_000), "min_matrix"),
        }


def _build_record(utilisation: int, active: float | None, *, dram: float = 10) -> TraceBuilder:
    gpm = None if active is None else {"sm_util": active, "dram": dram, "tensor": 5.0}
    return record_example(GpuSample(uuid="GPU-x", utilisation=utilisation, gpm=gpm))


def _build_products(us: float, *, other: float = 0) -> TraceBuilder:
    b = TraceBuilder()
    for _ in b.steps():
        # 2 x 4096^3 = 137 GFLOP: 0.44 ms at an A100's 312 TFLOP/s in BF16
        with b.op("aten::mm", [[4096, 4096], [4096, 4096]], "c10::BFloat16"):
            b.launch("ampere_bf16_s16816gemm_bf16_128x128_ldg8_nn", us)
        if other:
            with b.op("aten::add", [[4096, 4096], [4096, 4096]], "c10::BFloat16"):
                b.launch("void at::native::vectorized_elementwise_kernel<4, F>(int)", other)
        b.sync()
    b.record_of_run().steps(60, (us + other) / 1000)
    return b
