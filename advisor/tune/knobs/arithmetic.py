"""Forwards in bfloat16 where that is safe."""

from __future__ import annotations

from typing import Any

from advisor.tune.knob import Knob
from advisor.tune.patch import at_first_forward, hold
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
            self.took_effect()

        at_first_forward(begin)

    def lines(self, value: Value) -> str:
        return "with torch.autocast(device_type, dtype=torch.bfloat16):\n    output = model(batch)"


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
            self.took_effect()
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
        original = torch.set_float32_matmul_precision

        def keep(precision: Any) -> None:
            original("high")

        torch.set_float32_matmul_precision = keep
        hold(torch.backends.cuda.matmul, "allow_tf32", "fp32_precision")
        hold(torch.backends.cudnn, "allow_tf32", "fp32_precision")

    def lines(self, value: Value) -> str:
        return 'torch.set_float32_matmul_precision("high")'


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
                arg.contiguous(memory_format=torch.channels_last)
                if isinstance(arg, torch.Tensor) and arg.dim() == 4
                else arg
                for arg in args
            )

        def begin(module: Any) -> None:
            if any(isinstance(item, nn.Conv2d) for item in module.modules()):
                module.to(memory_format=torch.channels_last)
                module.register_forward_pre_hook(ordered)
                self.took_effect()

        at_first_forward(begin)

    def lines(self, value: Value) -> str:
        return (
            "model = model.to(memory_format=torch.channels_last)\n"
            "images = images.to(memory_format=torch.channels_last)"
        )


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
            self.took_effect()
        torch.backends.cudnn.benchmark = True
        hold(torch.backends.cudnn, "benchmark")

    def lines(self, value: Value) -> str:
        return "torch.backends.cudnn.benchmark = True"
