"""Knobs of DistributedDataParallel that cost nothing to set."""

from collections import Counter
from typing import Any, ClassVar

from advisor.tune.knob import Knob, Safety, Value, wrap_attribute


class _DdpKnob(Knob):
    """Base of knobs that set a keyword argument of every model wrapped from now on."""

    safety: ClassVar[Safety] = "reordered"
    argument: ClassVar[str]

    def _setting(self, value: Value) -> Value:
        return True if value is None else value

    def apply(self, value: Value) -> None:
        from torch.nn.parallel import DistributedDataParallel

        def make(original: Any) -> Any:
            def __init__(self_: Any, *args: Any, **kwargs: Any) -> None:
                self.took_effect()
                original(self_, *args, **{**kwargs, self.argument: self._setting(value)})

            return __init__

        wrap_attribute(DistributedDataParallel, "__init__", make)

    def lines(self, value: Value) -> str:
        return f"DistributedDataParallel(..., {self.argument}={self._setting(value)})"


class DdpBucketsKnob(_DdpKnob):
    """``bucket_cap_mb``, larger and smaller than PyTorch's 25."""

    id = "ddp-bucket-size"
    title = "size of DDP's buckets"
    settings = (100, 10)
    argument = "bucket_cap_mb"


class DdpStaticGraphKnob(_DdpKnob):
    """``static_graph=True``."""

    id = "ddp-static-graph"
    title = "DDP with a static graph"
    argument = "static_graph"


class DdpBucketViewKnob(_DdpKnob):
    """``gradient_as_bucket_view=True``."""

    id = "ddp-bucket-view"
    title = "gradients stored in DDP's buckets"
    safety = "exact"
    argument = "gradient_as_bucket_view"


_MIN_EQUAL_STEPS = 2
"""Number of optimizer steps with the same number of passes before that number is used."""


class DdpNoSyncKnob(Knob):
    """``no_sync`` around all passes of an optimizer step but the last. Their number comes from the
    first steps. A later step with another number would use gradients that were never reduced: this
    ends the run and drops the knob."""

    id = "ddp-no-sync"
    title = "gradients sent once per optimizer step"
    safety = "reordered"
    keep = (
        "with nullcontext() if last_micro_batch else model.no_sync():\n"
        "    loss(model(micro_batch)).backward()"
    )

    def apply(self, value: Value) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel
        from torch.optim import optimizer as optim

        first_counts: dict[int, list[int]] = {}
        """Passes of each model in the first optimizer steps."""
        counts: Counter[int] = Counter()
        """Passes of each model since the last optimizer step."""
        unsent: set[int] = set()
        """Models whose last pass was not sent."""

        def make(original: Any) -> Any:
            def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
                if not (torch.is_grad_enabled() and model.training):
                    return original(model, *args, **kwargs)
                key = id(model)
                counts[key] += 1
                earlier = first_counts.get(key, [])
                stable = len(earlier) == _MIN_EQUAL_STEPS and len(set(earlier)) == 1
                if not stable or counts[key] >= earlier[0] or not model.require_backward_grad_sync:
                    unsent.discard(key)
                    return original(model, *args, **kwargs)
                self.took_effect()
                unsent.add(key)
                with model.no_sync():  # only the forward matters, by PyTorch's documentation
                    return original(model, *args, **kwargs)

            return forward

        def before(*_: Any) -> None:
            for key in unsent:
                raise RuntimeError(
                    f"an optimizer step has {counts[key]} passes where others have "
                    f"{first_counts[key][0]}: its gradients would not be reduced"
                )
            for key, count in counts.items():
                earlier = first_counts.setdefault(key, [])
                if len(earlier) < _MIN_EQUAL_STEPS:
                    earlier.append(count)
            counts.clear()

        wrap_attribute(DistributedDataParallel, "forward", make)
        optim.register_optimizer_step_pre_hook(before)
