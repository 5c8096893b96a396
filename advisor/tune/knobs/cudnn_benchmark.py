"""cuDNN looks for the fastest convolution instead of guessing it."""

from __future__ import annotations

from advisor.tune.knob import Knob
from advisor.tune.patch import hold
from advisor.tune.spec import Value


class CudnnBenchmark(Knob):
    """``torch.backends.cudnn.benchmark = True``."""

    id = "cudnn-benchmark"
    title = "cuDNN's search for the fastest convolution"
    safety = "reordered"
    needs_cuda = True

    def apply(self, value: Value) -> None:
        """At once, and against being set back."""
        import torch

        if not torch.backends.cudnn.benchmark:
            self.met()
        torch.backends.cudnn.benchmark = True
        hold(torch.backends.cudnn, "benchmark")

    def lines(self, value: Value) -> str:
        """See Lever."""
        return "torch.backends.cudnn.benchmark = True"
