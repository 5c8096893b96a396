"""Loader workers that outlive the epoch."""

from __future__ import annotations

from advisor.tune.knob import Knob
from advisor.tune.patch import LOADERS, loader_arguments
from advisor.tune.spec import Value


class LoaderPersistent(Knob):
    """``persistent_workers`` of every DataLoader that has workers."""

    id = "loader-persistent"
    title = "workers that outlive the epoch"
    redraws = True

    def apply(self, value: Value) -> None:
        """Every loader that is made from now on."""

        def change(given: dict[str, object]) -> None:
            if given.get("num_workers") and not given.get("persistent_workers"):
                given["persistent_workers"] = True
                self.met()

        loader_arguments(change)

    def lines(self, value: Value) -> str:
        """See Lever."""
        return "DataLoader(..., persistent_workers=True)"

    def arguments(self, value: Value) -> tuple[frozenset[str], dict[str, object]]:
        """See Lever."""
        return LOADERS, {"persistent_workers": True}
