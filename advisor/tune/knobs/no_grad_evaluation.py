"""Validation without a graph."""

from __future__ import annotations

from typing import Any

from advisor.tune.knob import Knob
from advisor.tune.patch import around_forwards
from advisor.tune.spec import Value


class NoGradEvaluation(Knob):
    """``torch.no_grad()`` around forwards of models in evaluation mode. A program that learns
    through such a model (frozen normalisation) raises then, or its losses change: it is told."""

    id = "no-grad-evaluation"
    title = "evaluation without gradients"

    def apply(self, value: Value) -> None:
        """Every outermost forward from now on."""
        import torch

        def call(module: Any, go: Any) -> Any:
            if module.training or not torch.is_grad_enabled():
                return go()
            self.met()
            with torch.no_grad():
                return go()

        around_forwards(call)

    def lines(self, value: Value) -> str:
        """See Lever."""
        return "with torch.inference_mode():   # around validation\n    output = model(batch)"
