"""The model through torch.compile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from advisor.tune.knob import Knob, Machine
from advisor.tune.patch import at_first_forward, wrap
from advisor.tune.spec import Value


class CompileModel(Knob):
    """``model.compile()`` before the first forward of each outermost model."""

    id = "compile"
    title = "torch.compile"
    safety = "reordered"

    def values(self, wanted: int | None, machine: Machine) -> Sequence[Value]:
        """The modes; those with CUDA graphs where there is a GPU."""
        return ("default", "reduce-overhead") if machine.cuda else ("default",)

    def apply(self, value: Value) -> None:
        """When models are called for the first time."""

        def begin(module: Any) -> None:
            if module._compiled_call_impl is None and any(True for _ in module.parameters()):
                module.compile(mode=None if value == "default" else value)
                self.took_effect()

        at_first_forward(begin)

    def lines(self, value: Value) -> str:
        return "model.compile()" if value == "default" else f'model.compile(mode="{value}")'


class CompileDynamic(Knob):
    """``dynamic=True`` in every ``torch.compile`` of the program."""

    id = "compile-dynamic"
    title = "compiled for all shapes"
    safety = "reordered"

    def apply(self, value: Value) -> None:
        """Every function and model that is compiled from now on."""
        import torch

        def make(original: Any) -> Any:
            def change(*args: Any, **kwargs: Any) -> Any:
                if kwargs.get("dynamic") is not True:
                    kwargs["dynamic"] = True
                    self.took_effect()
                return original(*args, **kwargs)

            return change

        # ``nn.Module.compile`` calls a name of its own module, found anew at each call
        wrap(torch, "compile", make)

    def lines(self, value: Value) -> str:
        return "torch.compile(..., dynamic=True)"

    def arguments(self, value: Value) -> tuple[frozenset[str], dict[str, object]]:
        return frozenset({"torch.compile"}), {"dynamic": True}
