"""Gradients that are dropped between steps, not filled with zeros."""

from __future__ import annotations

from typing import Any

from advisor.tune.knob import Knob
from advisor.tune.patch import wrap
from advisor.tune.spec import Value


class SetToNone(Knob):
    """``zero_grad(set_to_none=True)`` where the program says otherwise."""

    id = "set-to-none"
    title = "gradients dropped, not zeroed"

    def apply(self, value: Value) -> None:
        """Every call from now on."""
        import torch

        def make(original: Any) -> Any:
            def zero_grad(self_: Any, set_to_none: bool = True) -> Any:
                if not set_to_none:
                    self.met()
                return original(self_, set_to_none=True)

            return zero_grad

        wrap(torch.optim.Optimizer, "zero_grad", make)
        wrap(torch.nn.Module, "zero_grad", make)

    def lines(self, value: Value) -> str:
        """See Lever."""
        return "optimizer.zero_grad(set_to_none=True)"
