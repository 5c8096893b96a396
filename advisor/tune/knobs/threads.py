"""Threads that one operator on the CPU takes."""

from __future__ import annotations

from collections.abc import Sequence

from advisor.tune.knob import Knob, Machine
from advisor.tune.spec import Value


class Threads(Knob):
    """``torch.set_num_threads``, and the same for OpenMP and MKL before they are loaded."""

    id = "threads"
    title = "threads of an operator"
    safety = "reordered"

    def values(self, wanted: int | None, machine: Machine) -> Sequence[Value]:
        """As many as cores, half of them, one."""
        return list(dict.fromkeys([machine.cores, max(1, machine.cores // 2), 1]))

    def environment(self, value: Value) -> dict[str, str | None]:
        """See Lever."""
        return {"OMP_NUM_THREADS": str(value), "MKL_NUM_THREADS": str(value)}

    def apply(self, value: Value) -> None:
        """At once; what the program sets later is not done."""
        import torch

        torch.set_num_threads(int(value or 1))
        torch.set_num_threads = lambda count: None
        self.met()

    def lines(self, value: Value) -> str:
        """See Lever."""
        return f"torch.set_num_threads({value})"
