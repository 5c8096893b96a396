"""One kernel for all parameters of an optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from advisor.tune.knob import Knob, Machine
from advisor.tune.patch import optimizer_arguments
from advisor.tune.spec import Value

KNOWN = ("Adam", "AdamW", "SGD", "Adagrad")


class FusedOptimizer(Knob):
    """``fused=True``, or ``foreach=True``, of every optimizer of torch that knows it."""

    id = "fused-optimizer"
    title = "fused optimizer"
    safety = "reordered"
    group = "optimizer"

    def values(self, wanted: int | None, machine: Machine) -> Sequence[Value]:
        """The faster first."""
        return ("fused", "foreach")

    def apply(self, value: Value) -> None:
        """Every optimizer that is made from now on."""

        def change(given: dict[str, Any]) -> None:
            if not given.get(str(value)):
                given.update(fused=None, foreach=None)
                given[str(value)] = True
                self.met()

        optimizer_arguments(str(value), change)

    def lines(self, value: Value) -> str:
        """See Lever."""
        return f"torch.optim.AdamW(..., {value}=True)"

    def arguments(self, value: Value) -> tuple[frozenset[str], dict[str, object]]:
        """See Lever."""
        return frozenset(f"torch.optim.{name}" for name in KNOWN), {str(value): True}
