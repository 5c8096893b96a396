"""Segments of device memory that can grow."""

from __future__ import annotations

import gc
from typing import Any

from advisor.tune.knob import Knob
from advisor.tune.patch import wrap
from advisor.tune.spec import Value

SETTING = "expandable_segments:True"


class AllocatorKnob(Knob):
    """``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``."""

    id = "expandable-segments"
    title = "memory segments that grow"
    needs_cuda = True

    def environment(self, value: Value) -> dict[str, str | None]:
        return {"PYTORCH_CUDA_ALLOC_CONF": SETTING, "PYTORCH_ALLOC_CONF": SETTING}

    def apply(self, value: Value) -> None:
        """Torch has read it."""
        self.took_effect()

    def lines(self, value: Value) -> str:
        return f"PYTORCH_CUDA_ALLOC_CONF={SETTING} python train.py"


class EmptyCache(Knob):
    """``torch.cuda.empty_cache`` does nothing."""

    id = "keep-cache"
    title = "no empty_cache"
    needs_cuda = True

    def apply(self, value: Value) -> None:
        """Every call from now on."""
        import torch

        def make(original: Any) -> Any:
            def empty_cache() -> None:
                self.took_effect()

            return empty_cache

        wrap(torch.cuda, "empty_cache", make)

    def lines(self, value: Value) -> str:
        return "# without torch.cuda.empty_cache() in the loop"


BEFORE, EVERY = 3, 500
"""Steps until what is there is frozen, and between collections by hand."""


class GcFreeze(Knob):
    """After some steps: what is there is frozen, automatic collection ends, and one by hand is made
    now and then. Cyclic garbage stays until then, which the memory column shows."""

    id = "gc-freeze"
    title = "no garbage collection within steps"

    def apply(self, value: Value) -> None:
        """Counts optimizer steps."""
        from torch.optim import optimizer as optim

        count = 0

        def after(*_: Any) -> None:
            nonlocal count
            count += 1
            if count == BEFORE:
                gc.collect()
                gc.freeze()
                gc.disable()
                self.took_effect()
            elif count % EVERY == 0:
                gc.collect()

        optim.register_optimizer_step_post_hook(after)

    def lines(self, value: Value) -> str:
        return (
            "gc.collect(); gc.freeze(); gc.disable()   # before the loop\n"
            f"if step % {EVERY} == 0: gc.collect()        # in it"
        )
