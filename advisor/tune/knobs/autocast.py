"""Forwards in bfloat16 where that is safe."""

from __future__ import annotations

from typing import Any

from advisor.tune.knob import Knob
from advisor.tune.patch import at_first_forward
from advisor.tune.spec import Value


class Autocast(Knob):
    """``torch.autocast`` around the forward of each outermost model."""

    id = "autocast"
    title = "bf16 autocast"
    safety = "precision"

    def apply(self, value: Value) -> None:
        """When models are called for the first time."""
        import torch

        def begin(module: Any) -> None:
            parameter = next(module.parameters(), None)
            if parameter is None or parameter.dtype is not torch.float32:
                return
            kind = parameter.device.type
            original = module.forward

            def forward(*args: Any, **kwargs: Any) -> Any:
                with torch.autocast(kind, dtype=torch.bfloat16):
                    return original(*args, **kwargs)

            module.forward = forward
            self.met()

        at_first_forward(begin)

    def lines(self, value: Value) -> str:
        """See Lever."""
        return "with torch.autocast(device_type, dtype=torch.bfloat16):\n    output = model(batch)"
