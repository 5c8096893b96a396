"""What a fix is worth: the dependency graph of the steps, its replay, and Edits applied to it.

The package is called as the public function is, ``advisor.whatif(run, edits)``, and so can be
called itself: whichever of the two a name turns out to be, it does the same.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from advisor.whatif.result import WhatIfResult


class _Callable(ModuleType):
    """This package. Calling it loads what replays, which ``import advisor`` must not."""

    def __call__(self, *args: Any, **kwargs: Any) -> WhatIfResult:
        """``advisor.whatif.result.what_if``."""
        from advisor.whatif.result import what_if

        return what_if(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
