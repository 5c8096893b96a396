"""More or fewer worker processes of every DataLoader."""

from __future__ import annotations

from collections.abc import Sequence

from advisor.tune.knob import Knob, Machine
from advisor.tune.patch import LOADERS, loader_arguments
from advisor.tune.spec import Value


class LoaderWorkersKnob(Knob):
    """``num_workers`` of each map-style data set, and of an iterable one that has workers."""

    id = "workers"
    title = "DataLoader workers"
    redraws = True

    def values(self, wanted: int | None, machine: Machine) -> Sequence[Value]:
        """What the finding says, then powers of two up to the cores, and none."""
        found = [wanted] if wanted else []
        count = 1
        while count <= machine.cores:
            found.append(count)
            count *= 2
        return list(dict.fromkeys([*found, machine.cores, 0]))

    def apply(self, value: Value) -> None:
        """Every loader that is made from now on."""
        from torch.utils.data import IterableDataset

        workers = int(value or 0)

        def change(given: dict[str, object]) -> None:
            before = given.get("num_workers", 0)
            if before == workers:
                return
            # one that never had workers may not divide its items among them: each would give all
            if not before and isinstance(given.get("dataset"), IterableDataset):
                return
            given["num_workers"] = workers
            if not workers:
                for name in ("persistent_workers", "prefetch_factor", "multiprocessing_context"):
                    given.pop(name, None)
                given.pop("timeout", None)
            else:
                given["persistent_workers"] = True
            self.met()

        loader_arguments(change)

    def lines(self, value: Value) -> str:
        """See Lever."""
        if not value:
            return "DataLoader(..., num_workers=0)"
        return f"DataLoader(..., num_workers={value}, persistent_workers=True)"

    def arguments(self, value: Value) -> tuple[frozenset[str], dict[str, object]]:
        """See Lever."""
        return LOADERS, {"num_workers": value, "persistent_workers": bool(value)}
