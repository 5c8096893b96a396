"""TF32 for matrix products and convolutions in fp32."""

from __future__ import annotations

from typing import Any

from advisor.tune.knob import Knob
from advisor.tune.patch import hold
from advisor.tune.spec import Value


class MatmulPrecision(Knob):
    """``torch.set_float32_matmul_precision("high")``, whatever the program sets later."""

    id = "matmul-precision"
    title = "TF32 matrix products"
    safety = "precision"
    needs_cuda = True

    def apply(self, value: Value) -> None:
        """At once, and against being set back."""
        import torch

        if torch.get_float32_matmul_precision() != "high":
            self.met()
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
        original = torch.set_float32_matmul_precision

        def keep(precision: Any) -> None:
            original("high")

        torch.set_float32_matmul_precision = keep
        hold(torch.backends.cuda.matmul, "allow_tf32", "fp32_precision")
        hold(torch.backends.cudnn, "allow_tf32", "fp32_precision")

    def lines(self, value: Value) -> str:
        """See Lever."""
        return 'torch.set_float32_matmul_precision("high")'
