"""When memory runs out: the allocator's snapshot and an event; the exception goes on untouched."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from advisor.core import run_directory as rundir

log = logging.getLogger("advisor")
MAX_MESSAGE = 2000
MAX_ENTRIES = 1_000_000
"""Of the allocator's history: some GB of host memory."""


class OutOfMemoryHook:
    """Watches for CUDA's out of memory. ``tell(data)`` writes an ``oom`` event, once a run for
    each error that ends it and once for the first that was met. ``history``: events of the
    allocator to keep for the snapshot; 0: none."""

    def __init__(self, tell: Callable[[dict[str, Any]], None], history: int = 0) -> None:
        self._tell = tell
        self._history = min(history, MAX_ENTRIES)
        self._switched_on = False
        self.folder: Path | None = None
        self._observing = False
        self._snapshot: str | None = None

    def install(self) -> None:
        """Ask the allocator to call when it fails, while what fills the memory is still there."""
        torch = sys.modules.get("torch")
        attach = getattr(getattr(torch, "_C", None), "_cuda_attach_out_of_memory_observer", None)
        if attach is None or self._observing or torch is None or not torch.cuda.is_initialized():
            return
        self._observing = True
        self._keep_history(torch)
        attach(self._observed)  # there is no way to detach: it does nothing the second time

    def _keep_history(self, torch: Any) -> None:
        """Switch the allocator's history on, if that is wanted and nobody else has."""
        if not self._history:
            return
        try:
            if torch._C._cuda_isHistoryEnabled():
                return  # the program's own, with its own bounds
            torch.cuda.memory._record_memory_history(
                "all", context="all", stacks="python", max_entries=self._history
            )
            self._switched_on = True
        except (RuntimeError, AttributeError, TypeError) as error:  # another PyTorch
            log.warning("advisor: no memory history: %s", error)

    def close(self) -> None:
        """Switch off what was switched on."""
        torch = sys.modules.get("torch")
        if not self._switched_on or torch is None:
            return
        self._switched_on = False
        try:
            torch.cuda.memory._record_memory_history(None)
        except (RuntimeError, AttributeError, TypeError) as error:
            log.warning("advisor: memory history stays on: %s", error)

    def raised(self, error: BaseException) -> None:
        """An exception is on its way out of training."""
        if not is_out_of_memory(error):
            return
        allocated, reserved = _allocator()
        self._tell(
            {
                "message": str(error)[:MAX_MESSAGE],
                "snapshot": self._snapshot or self._dump(),
                "allocated": allocated,
                "reserved": reserved,
            }
        )

    def _observed(self, device: int, alloc: int, device_alloc: int, device_free: int) -> None:
        try:
            if self._snapshot is None and self.folder is not None:
                self._snapshot = self._dump()
        except Exception as error:  # called from inside the allocator: nothing may leave this
            log.warning("advisor: no memory snapshot: %s", error)

    def _dump(self) -> str | None:
        """Write the allocator's state; the name of the file, ``None``: there is none."""
        torch = sys.modules.get("torch")
        if torch is None or self.folder is None or not torch.cuda.is_initialized():
            return None
        hidden = self.folder / f".{rundir.SNAPSHOT}"
        try:
            torch.cuda.memory._dump_snapshot(str(hidden))
            hidden.replace(self.folder / rundir.SNAPSHOT)
        except (OSError, RuntimeError, AttributeError) as error:
            log.warning("advisor: no memory snapshot: %s", error)
            return None
        return rundir.SNAPSHOT


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it is torch's error for a device that is full."""
    kind = getattr(sys.modules.get("torch"), "OutOfMemoryError", None)
    if kind is None:
        kind = getattr(getattr(sys.modules.get("torch"), "cuda", None), "OutOfMemoryError", None)
    return kind is not None and isinstance(error, kind)


def _allocator() -> tuple[int | None, int | None]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None, None
    try:
        return int(torch.cuda.memory_allocated()), int(torch.cuda.memory_reserved())
    except RuntimeError:
        return None, None
