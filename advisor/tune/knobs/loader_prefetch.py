"""More batches that each loader worker prepares ahead."""

from __future__ import annotations

from collections.abc import Sequence

from advisor.tune.knob import Knob, Machine
from advisor.tune.patch import LOADERS, loader_arguments
from advisor.tune.spec import Value


class LoaderPrefetch(Knob):
    """``prefetch_factor`` of every DataLoader that has workers; PyTorch's own is 2."""

    id = "loader-prefetch"
    title = "batches prepared ahead"

    def values(self, wanted: int | None, machine: Machine) -> Sequence[Value]:
        """Twice and four times PyTorch's."""
        return (4, 8)

    def apply(self, value: Value) -> None:
        """Every loader that is made from now on."""

        def change(given: dict[str, object]) -> None:
            if given.get("num_workers") and given.get("prefetch_factor") != value:
                given["prefetch_factor"] = value
                self.met()

        loader_arguments(change)

    def lines(self, value: Value) -> str:
        """See Lever."""
        return f"DataLoader(..., prefetch_factor={value})"

    def arguments(self, value: Value) -> tuple[frozenset[str], dict[str, object]]:
        """See Lever."""
        return LOADERS, {"prefetch_factor": value}
