"""Knobs of every DataLoader: workers, batches ahead and pinned memory."""

from collections.abc import Sequence
from typing import Any

from advisor.tune.knob import LOADERS, Knob, Machine, Value, loader_arguments, wrap_attribute


class _LoaderKnob(Knob):
    """Base of knobs that set arguments of every DataLoader made from now on."""

    def kept_arguments(self, value: Value) -> dict[str, object]:
        """Return the arguments that keep the change."""
        raise NotImplementedError

    def change(self, arguments: dict[str, object], value: Value) -> bool:
        """Edit the arguments of a loader; return whether there was anything to change."""
        wanted = self.kept_arguments(value)
        if not arguments.get("num_workers") or wanted.items() <= arguments.items():
            return False
        arguments.update(wanted)
        return True

    def apply(self, value: Value) -> None:

        def change(arguments: dict[str, object]) -> None:
            if self.change(arguments, value):
                self.took_effect()

        loader_arguments(change)

    def lines(self, value: Value) -> str:
        arguments = self.kept_arguments(value).items()
        return f"DataLoader(..., {', '.join(f'{k}={v}' for k, v in arguments if v is not False)})"

    def arguments(self, value: Value) -> tuple[frozenset[str], dict[str, object]]:
        return LOADERS, self.kept_arguments(value)


class LoaderWorkersKnob(_LoaderKnob):
    """``num_workers`` of each map-style data set, and of iterable data sets with workers."""

    id = "workers"
    title = "DataLoader workers"
    changes_random_numbers = True

    def values(self, predicted: int | None, machine: Machine) -> Sequence[Value]:
        """Return the finding's number, then powers of two up to the cores. No workers
        (``workers=0``) undoes the program's own setting, and is tried only on request."""
        result = [predicted] if predicted else []
        count = 1
        while count <= machine.cores:
            result.append(count)
            count *= 2
        return list(dict.fromkeys([*result, machine.cores]))

    def kept_arguments(self, value: Value) -> dict[str, object]:
        return {"num_workers": value, "persistent_workers": bool(value)}

    def change(self, arguments: dict[str, object], value: Value) -> bool:
        from torch.utils.data import IterableDataset

        before, workers = arguments.get("num_workers", 0), int(value or 0)
        # an iterable data set may not divide its items: each worker would return all of them
        is_indivisible = not before and isinstance(arguments.get("dataset"), IterableDataset)
        if before == workers or is_indivisible:
            return False
        arguments["num_workers"] = workers
        if workers:
            arguments["persistent_workers"] = True
        else:
            for name in ("persistent_workers", "prefetch_factor", "multiprocessing_context",
                         "timeout"):  # fmt: skip
                arguments.pop(name, None)
        return True


class LoaderPrefetch(_LoaderKnob):
    """``prefetch_factor`` of every DataLoader that has workers: two and four times PyTorch's
    default."""

    id = "loader-prefetch"
    title = "batches prepared ahead"
    settings = (4, 8)

    def kept_arguments(self, value: Value) -> dict[str, object]:
        return {"prefetch_factor": value}


class LoaderPersistent(_LoaderKnob):
    """``persistent_workers`` of every DataLoader that has workers."""

    id = "loader-persistent"
    title = "workers that outlive the epoch"
    changes_random_numbers = True

    def kept_arguments(self, value: Value) -> dict[str, object]:
        return {"persistent_workers": True}


class LoaderPinningKnob(Knob):
    """``pin_memory`` of every DataLoader, and ``non_blocking`` copies of pinned memory: one is of
    little use without the other."""

    id = "loader-pinning"
    title = "pinned batches, non-blocking copies"
    needs_cuda = True
    keep = "DataLoader(..., pin_memory=True)\nbatch = batch.to(device, non_blocking=True)"

    def apply(self, value: Value) -> None:
        import torch

        def change(arguments: dict[str, object]) -> None:
            if not arguments.get("pin_memory"):
                arguments["pin_memory"] = True
                self.took_effect()

        loader_arguments(change)

        def make(original: Any) -> Any:
            def copy(self_: Any, *args: Any, **kwargs: Any) -> Any:
                # only to a device: an unfinished copy to the host may be read too early
                if "non_blocking" not in kwargs and self_.is_cpu and self_.is_pinned():
                    device = args[0] if args else kwargs.get("device")
                    if original is cuda or str(device).startswith("cuda"):
                        kwargs["non_blocking"] = True
                        self.took_effect()
                return original(self_, *args, **kwargs)

            return copy

        cuda = torch.Tensor.cuda
        wrap_attribute(torch.Tensor, "to", make)
        wrap_attribute(torch.Tensor, "cuda", make)
