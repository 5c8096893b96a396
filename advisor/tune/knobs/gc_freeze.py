"""The collector of cyclic garbage out of the steps."""

from __future__ import annotations

import gc
from typing import Any

from advisor.tune.knob import Knob
from advisor.tune.spec import Value

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
                self.met()
            elif count % EVERY == 0:
                gc.collect()

        optim.register_optimizer_step_post_hook(after)

    def lines(self, value: Value) -> str:
        """See Lever."""
        return (
            "gc.collect(); gc.freeze(); gc.disable()   # before the loop\n"
            f"if step % {EVERY} == 0: gc.collect()        # in it"
        )
