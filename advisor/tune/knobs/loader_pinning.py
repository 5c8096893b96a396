"""Batches in pinned memory, and copies that need not be waited for."""

from __future__ import annotations

from typing import Any

from advisor.tune.knob import Knob
from advisor.tune.patch import loader_arguments, wrap
from advisor.tune.spec import Value


class LoaderPinning(Knob):
    """``pin_memory`` of every DataLoader, and ``non_blocking`` copies of what is pinned: one is
    worth little without the other."""

    id = "loader-pinning"
    title = "pinned batches, non-blocking copies"
    needs_cuda = True

    def apply(self, value: Value) -> None:
        """Loaders that are made, and copies to a device, from now on."""
        import torch

        def change(given: dict[str, object]) -> None:
            if not given.get("pin_memory"):
                given["pin_memory"] = True
                self.met()

        loader_arguments(change)

        def make(original: Any) -> Any:
            def copy(self_: Any, *args: Any, **kwargs: Any) -> Any:
                # to a device only: a copy to the host that is not waited for may be read too early
                if "non_blocking" not in kwargs and self_.is_cpu and self_.is_pinned():
                    first = args[0] if args else kwargs.get("device")
                    if original is cuda or str(first).startswith("cuda"):
                        kwargs["non_blocking"] = True
                        self.met()
                return original(self_, *args, **kwargs)

            return copy

        cuda = torch.Tensor.cuda
        wrap(torch.Tensor, "to", make)
        wrap(torch.Tensor, "cuda", make)

    def lines(self, value: Value) -> str:
        """See Lever."""
        return "DataLoader(..., pin_memory=True)\nbatch = batch.to(device, non_blocking=True)"
