"""Knobs of the model's computation: its arithmetic, memory format and torch.compile."""

from collections.abc import Sequence
from typing import Any

from advisor.tune.knob import (
    Knob,
    Machine,
    Value,
    at_first_forward,
    ignore_assignments,
    wrap_attribute,
)


class AutocastKnob(Knob):
    """``torch.autocast`` around the forward of each outermost model."""

    id = "autocast"
    title = "bf16 autocast"
    safety = "precision"
    keep = "with torch.autocast(device_type, dtype=torch.bfloat16):\n    output = model(batch)"

    def apply(self, value: Value) -> None:
        import torch

        def begin(module: Any) -> None:
            parameter = next(module.parameters(), None)
            if parameter is None or parameter.dtype is not torch.float32:
                return
            device_type = parameter.device.type
            original = module.forward

            def forward(*args: Any, **kwargs: Any) -> Any:
                with torch.autocast(device_type, dtype=torch.bfloat16):
                    return original(*args, **kwargs)

            module.forward = forward
            self.took_effect()

        at_first_forward(begin)


class MatmulPrecisionKnob(Knob):
    """``torch.set_float32_matmul_precision("high")``, whatever the program sets later."""

    id = "matmul-precision"
    title = "TF32 matrix products"
    safety = "precision"
    needs_cuda = True
    keep = 'torch.set_float32_matmul_precision("high")'

    def apply(self, value: Value) -> None:
        import torch

        if torch.get_float32_matmul_precision() != "high":
            self.took_effect()
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
        original = torch.set_float32_matmul_precision

        def keep(precision: Any) -> None:
            original("high")

        torch.set_float32_matmul_precision = keep
        ignore_assignments(torch.backends.cuda.matmul, "allow_tf32", "fp32_precision")
        ignore_assignments(torch.backends.cudnn, "allow_tf32", "fp32_precision")


class ChannelsLastKnob(Knob):
    """Channels-last weights before the first forward, and 4-d inputs before each forward."""

    id = "channels-last"
    title = "channels-last order"
    safety = "reordered"
    keep = (
        "model = model.to(memory_format=torch.channels_last)\n"
        "images = images.to(memory_format=torch.channels_last)"
    )

    def apply(self, value: Value) -> None:
        import torch
        from torch import nn

        def to_channels_last(module: Any, args: Any) -> Any:
            return tuple(
                arg.contiguous(memory_format=torch.channels_last)
                if isinstance(arg, torch.Tensor) and arg.dim() == 4
                else arg
                for arg in args
            )

        def begin(module: Any) -> None:
            if any(isinstance(item, nn.Conv2d) for item in module.modules()):
                module.to(memory_format=torch.channels_last)
                module.register_forward_pre_hook(to_channels_last)
                self.took_effect()

        at_first_forward(begin)


class CudnnBenchmarkKnob(Knob):
    """``torch.backends.cudnn.benchmark = True``."""

    id = "cudnn-benchmark"
    title = "cuDNN's search for the fastest convolution"
    safety = "reordered"
    needs_cuda = True
    keep = "torch.backends.cudnn.benchmark = True"

    def apply(self, value: Value) -> None:
        import torch

        if not torch.backends.cudnn.benchmark:
            self.took_effect()
        torch.backends.cudnn.benchmark = True
        ignore_assignments(torch.backends.cudnn, "benchmark")


class CompileModelKnob(Knob):
    """``model.compile()`` before the first forward of each outermost model."""

    id = "compile"
    title = "torch.compile"
    safety = "reordered"

    def values(self, predicted: int | None, machine: Machine) -> Sequence[Value]:
        """Return the modes. The mode with CUDA graphs needs a GPU."""
        return ("default", "reduce-overhead") if machine.cuda else ("default",)

    def apply(self, value: Value) -> None:

        def begin(module: Any) -> None:
            if module._compiled_call_impl is None and any(True for _ in module.parameters()):
                module.compile(mode=None if value == "default" else value)
                self.took_effect()

        at_first_forward(begin)

    def lines(self, value: Value) -> str:
        return "model.compile()" if value == "default" else f'model.compile(mode="{value}")'


class CompileDynamicKnob(Knob):
    """``dynamic=True`` in every ``torch.compile`` of the program."""

    id = "compile-dynamic"
    title = "compiled for all shapes"
    safety = "reordered"
    keep = "torch.compile(..., dynamic=True)"

    def apply(self, value: Value) -> None:
        import torch

        def make(original: Any) -> Any:
            def change(*args: Any, **kwargs: Any) -> Any:
                if kwargs.get("dynamic") is not True:
                    kwargs["dynamic"] = True
                    self.took_effect()
                return original(*args, **kwargs)

            return change

        # ``nn.Module.compile`` looks up its own module's name at each call
        wrap_attribute(torch, "compile", make)

    def arguments(self, value: Value) -> tuple[frozenset[str], dict[str, object]]:
        return frozenset({"torch.compile"}), {"dynamic": True}
