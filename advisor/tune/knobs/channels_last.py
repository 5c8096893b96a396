"""Images and weights of convolutions in channels-last order."""

from __future__ import annotations

from typing import Any

from advisor.tune.knob import Knob
from advisor.tune.patch import at_first_forward
from advisor.tune.spec import Value


class ChannelsLast(Knob):
    """The model's weights once, before its first forward; each 4-d input before its forward."""

    id = "channels-last"
    title = "channels-last order"
    safety = "reordered"

    def apply(self, value: Value) -> None:
        """When models are called for the first time."""
        import torch
        from torch import nn

        def ordered(module: Any, args: Any) -> Any:
            return tuple(
                one.contiguous(memory_format=torch.channels_last)
                if isinstance(one, torch.Tensor) and one.dim() == 4
                else one
                for one in args
            )

        def begin(module: Any) -> None:
            if any(isinstance(one, nn.Conv2d) for one in module.modules()):
                module.to(memory_format=torch.channels_last)
                module.register_forward_pre_hook(ordered)
                self.met()

        at_first_forward(begin)

    def lines(self, value: Value) -> str:
        """See Lever."""
        return (
            "model = model.to(memory_format=torch.channels_last)\n"
            "images = images.to(memory_format=torch.channels_last)"
        )
