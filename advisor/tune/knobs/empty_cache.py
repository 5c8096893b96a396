"""The allocator keeps what it has."""

from __future__ import annotations

from typing import Any

from advisor.tune.knob import Knob
from advisor.tune.patch import wrap
from advisor.tune.spec import Value


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
                self.met()

            return empty_cache

        wrap(torch.cuda, "empty_cache", make)

    def lines(self, value: Value) -> str:
        """See Lever."""
        return "# without torch.cuda.empty_cache() in the loop"
