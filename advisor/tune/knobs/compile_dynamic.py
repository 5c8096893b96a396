"""What is compiled, once for all shapes."""

from __future__ import annotations

from typing import Any

from advisor.tune.knob import Knob
from advisor.tune.patch import wrap
from advisor.tune.spec import Value


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
                    self.met()
                return original(*args, **kwargs)

            return change

        # ``nn.Module.compile`` calls a name of its own module, found anew at each call
        wrap(torch, "compile", make)

    def lines(self, value: Value) -> str:
        """See Lever."""
        return "torch.compile(..., dynamic=True)"

    def arguments(self, value: Value) -> tuple[frozenset[str], dict[str, object]]:
        """See Lever."""
        return frozenset({"torch.compile"}), {"dynamic": True}
