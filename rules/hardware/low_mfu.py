"""The step reaches a small part of what the GPU can compute."""

from __future__ import annotations

from collections.abc import Iterator

from advisor.core import text as t
from advisor.core.finding import Evidence, Finding, Outcome, Rule, Source, Threshold
from advisor.measure import Analysis
from advisor.rules.recorded import measure_it, record
from advisor.rules.sources import CHOSEN, GPUPROF
from advisor.testing import TraceBuilder


class LowMfu(Rule):
    """Model FLOP utilisation: the arithmetic of the step over what the GPU could do in that time at
    the peak of the data types in use. Below 30 % (gpuprof) there is room; well-tuned training of
    large models reaches 40 to 55 % (MegaScale: 55 % on 12,288 GPUs).

    The FLOPs come from the shapes of the profiled window, the time from the recorder's unprofiled
    median where it has one, because the profiler lengthens steps. It says that there is room, not
    why: the other findings do. Work that memory limits has a low figure by nature, so steps in
    which matrix products, convolutions and attention take less than half of the kernel time are
    left out.
    """

    id = "low-mfu"
    title = "The step reaches a small part of the GPU's peak"
    category = "hardware"
    reads_record = True
    sources = (
        Source("MegaScale: 40 to 55 % for large models", "https://arxiv.org/abs/2402.15627"),
    )
    references = ("https://arxiv.org/abs/2402.15627", "https://arxiv.org/abs/2204.02311")

    max_mfu = Threshold(0.30, "of the peak", GPUPROF)
    min_matrix = Threshold(0.50, "of kernel time in GEMM, convolution and attention", CHOSEN)

    fix = "Take the ranked findings in their order: they say what keeps it from the peak."
    verify = "Record again: the figure rises."
    falsified_by = "a count of the model's FLOPs that is much higher"
    confidence = 0.7

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Set the window's FLOPs against the unprofiled step."""
        if a.device_id is None or a.mfu is None or not a.step_ns:
            return
        recorded = record(a)
        matrix = float(
            a.families.filter(a.families["family"].is_in(["gemm", "convolution", "attention"]))[
                "share"
            ].sum()
            or 0.0
        )
        step = a.step_ns
        if recorded.median is not None and recorded.count >= 10:
            step = min(step, recorded.median)
        mfu = a.mfu * a.step_ns / step
        if mfu >= self.max_mfu or matrix < self.min_matrix:
            return
        yield Finding(
            summary=(
                f"The step of {t.time(step)} reaches {mfu:.0%} of the GPU's arithmetic peak for "
                "its data types, though most of its kernels are matrix work."
            ),
            evidence=[
                Evidence("model FLOP utilisation", mfu, "share", *self.limit("max_mfu")),
                Evidence("in the profiled window", a.mfu, "share"),
                Evidence(
                    "matrix work, share of kernel time", matrix, "share", *self.limit("min_matrix")
                ),
                Evidence(
                    "device busy, share",
                    a.breakdown.busy.total / max(a.span_ns, 1),
                    "share",
                    per=a.per,
                ),
            ],
            worth=measure_it("it is a sum of causes, which have findings of their own"),
            informational=True,
        )

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """A tenth of the peak."""
        return {"a tenth of the peak": _run(9000)}

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """Close to the peak; memory-bound work."""
        return {
            "close to the peak": (_run(1000), "max_mfu"),
            "bound by memory": (_run(9000, other=20_000), "min_matrix"),
        }


def _run(us: float, *, other: float = 0) -> TraceBuilder:
    b = TraceBuilder()
    for _ in range(4):
        with b.step():
            # 2 x 4096^3 = 137 GFLOP: 0.44 ms at an A100's 312 TFLOP/s in bf16
            with b.op("aten::mm", [[4096, 4096], [4096, 4096]], "c10::BFloat16"):
                b.launch("ampere_bf16_s16816gemm_bf16_128x128_ldg8_nn", us)
            if other:
                with b.op("aten::add", [[4096, 4096], [4096, 4096]], "c10::BFloat16"):
                    b.launch("void at::native::vectorized_elementwise_kernel<4, F>(int)", other)
            b.sync()
    b.record_of_run().steps(60, (us + other) / 1000)
    return b
