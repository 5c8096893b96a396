"""cuDNN picks convolution algorithms by heuristics although shapes never change."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from advisor.core.finding import Evidence, Finding, Outcome, Rule, Threshold
from advisor.measure import Analysis
from advisor.rules.common import example_steps
from advisor.rules.kernel import facts
from advisor.rules.recorded import measure_it, record
from advisor.rules.sources import CHOSEN
from advisor.testing import TraceBuilder


class CudnnBenchmarkOff(Rule):
    """With ``torch.backends.cudnn.benchmark`` off (the default) cuDNN chooses each convolution's
    algorithm by heuristics. Switched on, it times the candidates once for every new shape and keeps
    the fastest. That pays where shapes stay the same and convolutions matter, and costs time where
    every batch has another shape.

    The rule fires when the switch is off, convolutions take at least 20 % of the kernel time of the
    profiled window, and at least 95 % of the recorded batches have one shape. Only a trial shows
    the gain. Deterministic runs keep the switch off on purpose.
    """

    id = "cudnn-benchmark-off"
    title = "cudnn.benchmark is off"
    category = "kernel"
    knobs = ("cudnn-benchmark",)
    reads_record = True
    references = (
        "https://pytorch.org/tutorials/recipes/recipes/tuning_guide.html#enable-cudnn-auto-tuner",
    )

    min_share = Threshold(0.20, "of kernel time in convolutions", CHOSEN)
    min_constant = Threshold(0.95, "of the batches have the most frequent shape", CHOSEN)

    fix = "Set cudnn.benchmark before the first step, and drop a last batch of another size."
    code = "torch.backends.cudnn.benchmark = True\nloader = DataLoader(..., drop_last=True)"
    verify = "Compare the median step, without the slower first steps."
    falsified_by = "a median step that is no shorter with cudnn.benchmark"
    confidence = 0.6

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Look at the switch, the kernels and the batches."""
        recorded = record(a)
        if recorded.flag("cudnn.benchmark") is not False or a.device_id is None:
            return
        if recorded.flag("cudnn.deterministic") or recorded.flag("deterministic_algorithms"):
            return
        kernels = facts.kernel_rows(a)
        total = facts.duration(a, kernels)
        share = facts.duration(a, kernels & facts.of_family(a, "convolution")) / max(total, 1)
        shapes = recorded.column("shapes")
        shapes = shapes[~np.isnan(shapes)]
        if share < self.min_share or len(shapes) < 10:
            return
        constant = float(np.unique(shapes, return_counts=True)[1].max() / len(shapes))
        if constant < self.min_constant:
            return
        yield Finding(
            summary=(
                f"Convolutions take {share:.0%} of kernel time. cudnn.benchmark is off although "
                f"{constant:.0%} of the batches have one shape."
            ),
            evidence=[
                Evidence(
                    "convolutions, share of kernel time", share, "share", *self.limit("min_share")
                ),
                Evidence("batches of one shape", constant, "share", *self.limit("min_constant")),
                Evidence("cudnn.benchmark", "False"),
                Evidence("batches", len(shapes), "count"),
            ],
            impact=measure_it("only a trial shows the fastest algorithm"),
        )

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """A convolutional network with one batch shape."""
        return {"one shape": _run()}

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """On; shapes that change; no convolutions; deterministic; not recorded."""
        switch = "recorded.flag('cudnn.benchmark') is not False"
        deterministic: dict[str, object] = {"cudnn.benchmark": False, "cudnn.deterministic": True}
        return {
            "on": (_run({"cudnn.benchmark": True}), switch),
            "shapes that change": (_run(kinds=5), "min_constant"),
            "no convolutions": (
                _run(kernel="ampere_sgemm_128x64_nn", op="aten::mm"),
                "share < self.min_share",
            ),
            "deterministic": (_run(deterministic), "recorded.flag('cudnn.deterministic')"),
            "not recorded": (_run({}), switch),
        }


def _run(
    flags: dict[str, object] | None = None,
    *,
    kinds: int = 1,
    kernel: str = "cudnn_ampere_scudnn_128x64_relu_medium_nn_v1",
    op: str = "aten::cudnn_convolution",
) -> TraceBuilder:
    shapes = [[32, 64, 56, 56], [64, 64, 3, 3]]
    b = example_steps(lambda b: b.run(op, kernel, 3000, shapes))
    r = b.record_of_run(flags={"cudnn.benchmark": False} if flags is None else flags)
    for n in range(60):
        r.step(10, fields={"shapes": n % kinds})
    return b
