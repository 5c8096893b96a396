"""More or fewer worker processes of every DataLoader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from advisor.tune.knob import Knob, Machine
from advisor.tune.patch import LOADERS, loader_arguments, wrap
from advisor.tune.spec import Value


class LoaderWorkersKnob(Knob):
    """``num_workers`` of each map-style data set, and of an iterable one that has workers."""

    id = "workers"
    title = "DataLoader workers"
    redraws = True

    def values(self, wanted: int | None, machine: Machine) -> Sequence[Value]:
        """What the finding says, then powers of two up to the cores. None (``workers=0``) undoes
        what is there, and is tried where it is asked for."""
        result = [wanted] if wanted else []
        count = 1
        while count <= machine.cores:
            result.append(count)
            count *= 2
        return list(dict.fromkeys([*result, machine.cores]))

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
            self.took_effect()

        loader_arguments(change)

    def lines(self, value: Value) -> str:
        if not value:
            return "DataLoader(..., num_workers=0)"
        return f"DataLoader(..., num_workers={value}, persistent_workers=True)"

    def arguments(self, value: Value) -> tuple[frozenset[str], dict[str, object]]:
        return LOADERS, {"num_workers": value, "persistent_workers": bool(value)}


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
                self.took_effect()

        loader_arguments(change)

    def lines(self, value: Value) -> str:
        return f"DataLoader(..., prefetch_factor={value})"

    def arguments(self, value: Value) -> tuple[frozenset[str], dict[str, object]]:
        return LOADERS, {"prefetch_factor": value}


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
                self.took_effect()

        loader_arguments(change)

    def lines(self, value: Value) -> str:
        return "DataLoader(..., persistent_workers=True)"

    def arguments(self, value: Value) -> tuple[frozenset[str], dict[str, object]]:
        return LOADERS, {"persistent_workers": True}


class LoaderPinning(Knob):
    """``pin_memory`` of every DataLoader, and ``non_blocking`` copies of what is pinned: one is
    of little use without the other."""

    id = "loader-pinning"
    title = "pinned batches, non-blocking copies"
    needs_cuda = True

    def apply(self, value: Value) -> None:
        """Loaders that are made, and copies to a device, from now on."""
        import torch

        def change(given: dict[str, object]) -> None:
            if not given.get("pin_memory"):
                given["pin_memory"] = True
                self.took_effect()

        loader_arguments(change)

        def make(original: Any) -> Any:
            def copy(self_: Any, *args: Any, **kwargs: Any) -> Any:
                # to a device only: a copy to the host that is not waited for may be read too early
                if "non_blocking" not in kwargs and self_.is_cpu and self_.is_pinned():
                    first = args[0] if args else kwargs.get("device")
                    if original is cuda or str(first).startswith("cuda"):
                        kwargs["non_blocking"] = True
                        self.took_effect()
                return original(self_, *args, **kwargs)

            return copy

        cuda = torch.Tensor.cuda
        wrap(torch.Tensor, "to", make)
        wrap(torch.Tensor, "cuda", make)

    def lines(self, value: Value) -> str:
        return "DataLoader(..., pin_memory=True)\nbatch = batch.to(device, non_blocking=True)"
