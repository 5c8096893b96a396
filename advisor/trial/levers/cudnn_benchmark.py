"""cuDNN looks for the fastest convolution instead of guessing it."""

from __future__ import annotations

from advisor.trial.lever import Lever
from advisor.trial.spec import Value


class CudnnBenchmark(Lever):
    """``torch.backends.cudnn.benchmark = True``."""

    id = "cudnn-benchmark"
    title = "cuDNN's search for the fastest convolution"
    safety = "reordered"
    needs_cuda = True

    def apply(self, value: Value) -> None:
        """At once."""
        import torch

        if not torch.backends.cudnn.benchmark:
            self.met()
        torch.backends.cudnn.benchmark = True

    def lines(self, value: Value) -> str:
        """See Lever."""
        return "torch.backends.cudnn.benchmark = True"
