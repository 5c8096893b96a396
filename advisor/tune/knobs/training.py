"""Knobs of the training loop: batch size (only on request), optimizer, evaluation."""

import math
import re
from typing import Any

from advisor.core.errors import AdvisorError
from advisor.tune.knob import (
    Knob,
    Machine,
    Value,
    around_forwards,
    loader_arguments,
    optimizer_arguments,
    wrap_attribute,
)

MAX_BATCH = 1 << 20
"""Maximum number of samples per batch, and maximum multiple of the program's own."""


class BatchSizeKnob(Knob):
    """``batch_size`` of every DataLoader: a number of samples (``batch=64``) or a multiple of the
    program's own (``batch=x2``). The learning rate and everything that counts steps stay
    unchanged."""

    id = "batch"
    title = "batch size"
    safety = "learning"
    settings = ("x2", "x4")

    def parse_setting(self, text: str, machine: Machine) -> Value:
        match = re.fullmatch(r"(x?)([1-9]\d{0,6})", text)
        if match is None or int(match[2]) > MAX_BATCH:
            raise AdvisorError(
                f"batch={text}: give samples, such as batch=64, or times the program's own, such "
                "as batch=x2"
            )
        return text if match[1] else int(text)

    def apply(self, value: Value) -> None:
        from torch.utils.data import BatchSampler, DataLoader

        depth = 0

        def change(arguments: dict[str, Any]) -> None:
            size = arguments.get("batch_size", 1)
            if arguments.get("batch_sampler") is None and isinstance(size, int):
                arguments["batch_size"] = self._size(size, value)

        def track_depth(original: Any) -> Any:
            def __init__(self_: Any, *args: Any, **kwargs: Any) -> None:
                nonlocal depth
                depth += 1  # the loader's own sampler has its size already
                try:
                    original(self_, *args, **kwargs)
                finally:
                    depth -= 1

            return __init__

        def sampler(original: Any) -> Any:
            def __init__(self_: Any, sampler: Any, batch_size: int, drop_last: bool) -> None:
                size = batch_size if depth else self._size(batch_size, value)
                original(self_, sampler, size, drop_last)

            return __init__

        wrap_attribute(DataLoader, "__init__", track_depth)
        loader_arguments(change)
        wrap_attribute(BatchSampler, "__init__", sampler)

    def _size(self, before: int, value: Value) -> int:
        after = value if isinstance(value, int) else before * int(str(value)[1:])
        if after != before:
            self.took_effect()
        return after

    def schedule(self, before: float, after: float) -> str:
        ratio = after / before
        return (
            f"{before:,.4g} → {after:,.4g} samples per batch: an epoch has {1 / ratio:.3g} times "
            f"the steps, so a learning-rate schedule, warm-up or checkpoint that counts steps "
            f"comes {ratio:.3g} times later by sample. The learning rate stayed as it is; to start "
            f"from: ×{ratio:.3g} for SGD (linear, Goyal et al. 2017), ×{math.sqrt(ratio):.3g} for "
            "Adam (square root, Malladi et al. 2022). Compare the final accuracy with before."
        )

    def lines(self, value: Value) -> str:
        size = value if isinstance(value, int) else f"{str(value)[1:]} * batch_size"
        return f"DataLoader(..., batch_size={size})   # and adapt the schedule"


KNOWN_OPTIMIZERS = ("Adam", "AdamW", "SGD", "Adagrad")


class FusedOptimizerKnob(Knob):
    """``fused=True``, or ``foreach=True``, of every optimizer of torch that supports it."""

    id = "fused-optimizer"
    title = "fused optimizer"
    safety = "reordered"
    group = "optimizer"
    settings = ("fused", "foreach")
    """Implementations to try, the faster first."""
    keep = "torch.optim.AdamW(..., {value}=True)"

    def apply(self, value: Value) -> None:

        def change(arguments: dict[str, Any]) -> None:
            if not arguments.get(str(value)):
                arguments.update(fused=None, foreach=None)
                arguments[str(value)] = True
                self.took_effect()

        optimizer_arguments(str(value), change)

    def arguments(self, value: Value) -> tuple[frozenset[str], dict[str, object]]:
        return frozenset(f"torch.optim.{name}" for name in KNOWN_OPTIMIZERS), {str(value): True}


class SetToNoneKnob(Knob):
    """``zero_grad(set_to_none=True)`` where the program sets it to False."""

    id = "set-to-none"
    title = "gradients dropped, not zeroed"
    keep = "optimizer.zero_grad(set_to_none=True)"

    def apply(self, value: Value) -> None:
        import torch

        def make(original: Any) -> Any:
            def zero_grad(self_: Any, set_to_none: bool = True) -> Any:
                if not set_to_none:
                    self.took_effect()
                return original(self_, set_to_none=True)

            return zero_grad

        wrap_attribute(torch.optim.Optimizer, "zero_grad", make)
        wrap_attribute(torch.nn.Module, "zero_grad", make)


class NoGradEvaluationKnob(Knob):
    """``torch.no_grad()`` around forwards of models in evaluation mode. A program that learns
    through such a model (frozen normalisation) then fails, or the check of its losses does."""

    id = "no-grad-evaluation"
    title = "evaluation without gradients"
    keep = "with torch.inference_mode():   # around validation\n    output = model(batch)"

    def apply(self, value: Value) -> None:
        import torch

        def call(module: Any, go: Any) -> Any:
            if module.training or not torch.is_grad_enabled():
                return go()
            self.took_effect()
            with torch.no_grad():
                return go()

        around_forwards(call)
